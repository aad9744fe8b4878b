#!/bin/sh
# Builds the program and its packages for each architecture: `make packages` calls it.
#
#   packaging/build.sh DIRECTORY [amd64] [arm64]
#
# DIRECTORY gets a Debian package, an RPM package, a tarball and an image for container runtimes of
# each architecture (default: both). A commit gives the same packages and tarballs in every directory,
# with the same compiler and linker: paths are replaced, and all times are those of the commit. Environment variables: packaging/common.sh.
set -eu

[ $# -ge 1 ] || {
    sed -n 's/^# \{0,1\}//; 2,9p' "$0" >&2
    exit 2
}
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
source=$(dirname -- "$here")
mkdir -p -- "$1"
output=$(CDPATH='' cd -- "$1" && pwd)
shift
[ $# != 0 ] || set -- amd64 arm64
cd "$source"

# docs/systemd.md promises this version of the GNU C library, or an older one.
OLDEST_LIBC=2.34

cargo=${CARGO:-cargo}
target_directory=${CARGO_TARGET_DIR:-$source/target}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
# Of the registry's crates, panics have their path.
registry=${CARGO_HOME:-$HOME/.cargo}
paths=$(printf '%s=/usr/src/vnvme\037%s=/usr/src/cargo' "--remap-path-prefix=$source" "--remap-path-prefix=$registry")

for architecture; do
    case $architecture in
    amd64) target=x86_64-unknown-linux-gnu ;;
    arm64) target=aarch64-unknown-linux-gnu ;;
    *)
        echo "$architecture is no architecture that vnvme runs on: amd64, arm64" >&2
        exit 2
        ;;
    esac
    testing/harness/setup.sh packages "$target"
    machine=${target%%-*}
    linker=
    if [ "$machine" != "$(uname -m)" ]; then
        variable=$(echo "$target" | tr a-z- A-Z_)
        linker=CARGO_TARGET_${variable}_LINKER=$machine-linux-gnu-gcc
    fi
    # shellcheck disable=SC2086
    env $linker CARGO_ENCODED_RUSTFLAGS="$paths" \
        "$cargo" build --locked --profile dist --package vnvme --bin vnvme --target "$target"
    program=$target_directory/$target/dist/vnvme

    libc=$(grep -ao 'GLIBC_2\.[0-9.]*' "$program" | sed 's/GLIBC_//' | sort -uV | tail -n 1)
    newest=$(printf '%s\n' "$libc" "$OLDEST_LIBC" | sort -V | tail -n 1)
    if [ "$newest" != "$OLDEST_LIBC" ]; then
        echo "the program needs glibc $libc, which is newer than $OLDEST_LIBC" >&2
        exit 1
    fi
    if grep -aqF -e "$source" -e "$registry" "$program"; then
        echo "the program has paths of this machine: $source or $registry" >&2
        exit 1
    fi

    INVENTORY=$target_directory/$target/inventory
    export INVENTORY
    mkdir -p "$INVENTORY"
    "$cargo" run --quiet --locked --package inventory -- \
        "$target" "$(date -u -d "@$SOURCE_DATE_EPOCH" +%FT%TZ)" "$INVENTORY"
    for form in deb rpm tarball image; do
        "$here/$form.sh" "$program" "$output"
    done
done
