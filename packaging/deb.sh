#!/bin/sh
# Makes a Debian package: `make package` and packaging/build.sh call it.
#
#   packaging/deb.sh PROGRAM DIRECTORY
#
# The package is DIRECTORY/vnvme_VERSION_ARCHITECTURE.deb; its path is printed. It needs dpkg-deb and
# nothing of debhelper's. Environment variables: packaging/common.sh.
set -eu

[ $# = 2 ] || {
    sed -n 's/^# \{0,1\}//; 2,7p' "$0" >&2
    exit 2
}
program=$1
output=$2
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$here/common.sh"
mkdir -p -- "$output"
tree=$(mktemp -d)
trap 'rm -rf -- "$tree"' EXIT INT TERM
chmod 755 "$tree"

DESTDIR=$tree PREFIX=/usr UNITDIR=/usr/lib/systemd/system "$here/install.sh" install "$program"

# As Debian has it (Policy 12.1, 12.7): manual pages and changelogs are compressed.
find "$tree/usr/share/man" -type f -exec gzip -9n {} +
doc=$tree/usr/share/doc/vnvme
cat >"$doc/changelog" <<CHANGELOG
vnvme ($version) unstable; urgency=medium

  * /usr/share/doc/vnvme/CHANGELOG.md.gz has what users notice.

 -- $maintainer  $(date -u -R -d "@$SOURCE_DATE_EPOCH")
CHANGELOG
gzip -9n "$doc/changelog" "$doc/CHANGELOG.md"
add_inventory "$doc"
mkdir -p "$tree/usr/share/lintian/overrides"
install -m 644 "$here/debian/lintian-overrides" "$tree/usr/share/lintian/overrides/vnvme"
# zsh looks elsewhere for what packages bring.
mkdir -p "$tree/usr/share/zsh/vendor-completions"
mv "$tree/usr/share/zsh/site-functions/_vnvme" "$tree/usr/share/zsh/vendor-completions/_vnvme"
rmdir "$tree/usr/share/zsh/site-functions"
# A program of packaging/build.sh has no symbols; binutils need not know its architecture.
if [ "$debian" = "$(dpkg --print-architecture)" ] && command -v strip >/dev/null; then
    strip --strip-unneeded --remove-section=.comment --remove-section=.note "$tree/usr/bin/vnvme"
fi

# As dpkg-gencontrol counts: files in KiB, rounded up, and 1 for each directory.
size=0
for bytes in $(find "$tree" -type f -printf '%s\n'); do
    size=$((size + (bytes + 1023) / 1024))
done
size=$((size + $(find "$tree" ! -type f | wc -l)))
mkdir "$tree/DEBIAN"
cat >"$tree/DEBIAN/control" <<CONTROL
Package: vnvme
Version: $version
Architecture: $debian
Maintainer: $maintainer
Installed-Size: $size
Depends: libc6 (>= $libc), libgcc-s1
Recommends: systemd
Suggests: librbd1, qemu-system-x86, libvirt-daemon-system
Section: admin
Priority: optional
Description: $summary
$(echo "$description" | sed 's/^/ /')
CONTROL
(cd "$tree" && find etc -type f | sed 's|^|/|' | sort) >"$tree/DEBIAN/conffiles"
for script in postinst prerm postrm; do
    install -m 755 "$here/debian/$script" "$tree/DEBIAN/$script"
done
(cd "$tree" && find usr etc -type f | sort | xargs md5sum) >"$tree/DEBIAN/md5sums"
chmod 644 "$tree/DEBIAN/conffiles" "$tree/DEBIAN/md5sums"
set_times "$tree"

package=$output/vnvme_${version}_$debian.deb
# dpkg's default differs between distributions.
DPKG_DEB_COMPRESSOR_TYPE=${DPKG_DEB_COMPRESSOR_TYPE:-xz} \
    dpkg-deb --root-owner-group --build "$tree" "$package" >/dev/null
echo "$package"
