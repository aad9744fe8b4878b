# Read by the scripts that make packages: names, versions and texts that all packages share.
# Variables of theirs: `program` (the binary), and those of the environment that are named here.
#
#   VERSION            of the package; default: the workspace's in Cargo.toml
#   SOURCE_DATE_EPOCH  time of all files in it; default: that of the commit
#   DEBFULLNAME, DEBEMAIL   the packager
#   INVENTORY          directory with sbom.cdx.json and LICENSES-dependencies.txt; default: none
# shellcheck shell=sh disable=SC2034,SC2154

LC_ALL=C
export LC_ALL
umask 022

source=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
version=${VERSION:-$(sed -n 's/^version = "\(.*\)"/\1/p' "$source/Cargo.toml" | head -n 1)}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$source" log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH
maintainer="${DEBFULLNAME:-The vnvme project} <${DEBEMAIL:-vnvme@localhost}>"

summary='virtual NVMe disks for virtual machines, from userspace'
description='Serves files, block devices and NVMe devices to virtual machines as NVMe
disks over vfio-user, as virtio disks over vhost-user, and to the host as
block devices by ublk.'

# e_machine of the ELF header (the 16 bits at 18): what the program is for.
case $(od -An -tu2 -j 18 -N 2 -- "$program" | tr -d ' ') in
62) machine=x86_64 debian=amd64 ;;
183) machine=aarch64 debian=arm64 ;;
*)
    echo "$program is no program for x86-64 or AArch64" >&2
    exit 1
    ;;
esac

# The oldest C library that has all symbols of the program.
libc=$(grep -ao 'GLIBC_2\.[0-9.]*' -- "$program" | sed 's/GLIBC_//' | sort -uV | tail -n 1)

# Copies the inventory into a directory of documents.
add_inventory() {
    [ -n "${INVENTORY:-}" ] || return 0
    install -m 644 "$INVENTORY/sbom.cdx.json" "$INVENTORY/LICENSES-dependencies.txt" "$1"
}

# Gives all files of a directory the package's time.
set_times() {
    find "$1" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
}
