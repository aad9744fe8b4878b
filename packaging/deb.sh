#!/bin/sh
# Makes a Debian package: `make package` calls it.
#
#   packaging/deb.sh PROGRAM DIRECTORY
#
# The package is DIRECTORY/vnvme_VERSION_ARCHITECTURE.deb; its path is printed. It needs dpkg-deb and
# nothing of debhelper's. VERSION: the workspace's in Cargo.toml, or the variable of that name.
# DEBFULLNAME and DEBEMAIL say who maintains it, SOURCE_DATE_EPOCH when it was made.
set -eu

[ $# = 2 ] || {
    sed -n 's/^# \{0,1\}//; 2,8p' "$0" >&2
    exit 2
}
program=$1
output=$2
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
version=${VERSION:-$(sed -n 's/^version = "\(.*\)"/\1/p' "$here/../Cargo.toml" | head -n 1)}
architecture=$(dpkg --print-architecture)
maintainer="${DEBFULLNAME:-The vnvme project} <${DEBEMAIL:-vnvme@localhost}>"
mkdir -p -- "$output"
tree=$(mktemp -d)
trap 'rm -rf -- "$tree"' EXIT INT TERM
chmod 755 "$tree"
umask 022

DESTDIR=$tree PREFIX=/usr UNITDIR=/usr/lib/systemd/system "$here/install.sh" install "$program"

# As Debian has it (Policy 12.1, 12.7): manual pages and changelogs are compressed.
find "$tree/usr/share/man" -type f -exec gzip -9n {} +
doc=$tree/usr/share/doc/vnvme
cat >"$doc/changelog" <<CHANGELOG
vnvme ($version) unstable; urgency=medium

  * /usr/share/doc/vnvme/CHANGELOG.md.gz has what users notice.

 -- $maintainer  $(LC_ALL=C date -u -R -d "@${SOURCE_DATE_EPOCH:-$(date +%s)}")
CHANGELOG
gzip -9n "$doc/changelog" "$doc/CHANGELOG.md"
mkdir -p "$tree/usr/share/lintian/overrides"
install -m 644 "$here/debian/lintian-overrides" "$tree/usr/share/lintian/overrides/vnvme"
# zsh looks elsewhere for what packages bring.
mkdir -p "$tree/usr/share/zsh/vendor-completions"
mv "$tree/usr/share/zsh/site-functions/_vnvme" "$tree/usr/share/zsh/vendor-completions/_vnvme"
rmdir "$tree/usr/share/zsh/site-functions"
if command -v strip >/dev/null; then
    strip --strip-unneeded --remove-section=.comment --remove-section=.note "$tree/usr/bin/vnvme"
fi

# The C library that it was built with, or a newer one.
libc=$(getconf GNU_LIBC_VERSION | sed 's/^glibc //')
size=$(du -k -s --apparent-size "$tree" | cut -f 1)
mkdir "$tree/DEBIAN"
cat >"$tree/DEBIAN/control" <<CONTROL
Package: vnvme
Version: $version
Architecture: $architecture
Maintainer: $maintainer
Installed-Size: $size
Depends: libc6 (>= $libc), libgcc-s1
Recommends: systemd
Suggests: qemu-system-x86, libvirt-daemon-system
Section: admin
Priority: optional
Description: virtual NVMe disks for virtual machines, from userspace
 Serves files, block devices and NVMe devices to virtual machines as NVMe
 disks over vfio-user, as virtio disks over vhost-user, and to the host as
 block devices by ublk.
CONTROL
(cd "$tree" && find etc -type f | sed 's|^|/|' | sort) >"$tree/DEBIAN/conffiles"
for script in postinst prerm postrm; do
    install -m 755 "$here/debian/$script" "$tree/DEBIAN/$script"
done
(cd "$tree" && find usr etc -type f -exec md5sum {} +) >"$tree/DEBIAN/md5sums"
chmod 644 "$tree/DEBIAN/conffiles" "$tree/DEBIAN/md5sums"

package=$output/vnvme_${version}_$architecture.deb
dpkg-deb --root-owner-group --build "$tree" "$package" >/dev/null
echo "$package"
