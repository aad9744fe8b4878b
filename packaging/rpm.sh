#!/bin/sh
# Makes an RPM package: packaging/build.sh calls it.
#
#   packaging/rpm.sh PROGRAM DIRECTORY
#
# The package is DIRECTORY/vnvme-VERSION-1.MACHINE.rpm; its path is printed. It needs rpmbuild, of any
# distribution and machine. Environment variables: packaging/common.sh.
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
output=$(CDPATH='' cd -- "$output" && pwd)
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT INT TERM
tree=$work/tree
mkdir "$tree"

DESTDIR=$tree PREFIX=/usr UNITDIR=/usr/lib/systemd/system "$here/install.sh" install "$program"
find "$tree/usr/share/man" -type f -exec gzip -9n {} +
licenses=$tree/usr/share/licenses/vnvme
mkdir -p "$licenses"
mv "$tree/usr/share/doc/vnvme/copyright" "$licenses/copyright"
install -m 644 "$source/LICENSE-MIT" "$source/LICENSE-APACHE" "$licenses"
add_inventory "$licenses"
set_times "$tree"

# Directories of the package, and those of AppArmor, which not all distributions have.
directories='usr/share/doc/vnvme etc/vnvme etc/apparmor.d usr/share/licenses/vnvme'
(
    cd "$tree"
    # shellcheck disable=SC2086
    find $directories -type d | sort | sed 's|.*|%dir "/&"|'
    find . -type f | sort | sed '
        s|^\./|/|
        s|.*|"&"|
        \|^"/etc/|s|^|%config(noreplace) |
        \|^"/usr/share/licenses/|s|^|%license |
        \|^"/usr/share/doc/|s|^|%doc |'
) >"$work/files"
sed -e "s|@VERSION@|$version|" -e "s|@MAINTAINER@|$maintainer|" \
    -e "s|@DATE@|$(date -u -d "@$SOURCE_DATE_EPOCH" '+%a %b %d %Y')|" \
    -e "/@FILES@/{
        r $work/files
        d
    }" "$here/rpm/vnvme.spec" >"$work/vnvme.spec"
echo "$description" >"$work/description"
sed -i -e "/@DESCRIPTION@/{
        r $work/description
        d
    }" "$work/vnvme.spec"

# Neither the host's name nor its helpers for build roots, which need tools for the machine.
rpmbuild --quiet -bb --target "$machine-unknown-linux" --buildroot "$tree" \
    --define "_topdir $work/top" --define "_rpmdir $output" --define "_tmppath $work" \
    --define '_build_name_fmt %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm' \
    --define '__os_install_post %{nil}' --define 'debug_package %{nil}' \
    --define '_build_id_links none' --define '_buildhost localhost' \
    --define 'use_source_date_epoch_as_buildtime 1' \
    --define 'clamp_mtime_to_source_date_epoch 1' \
    --define '_binary_payload w6.xzdio' --noclean \
    "$work/vnvme.spec" >&2
echo "$output/vnvme-$version-1.$machine.rpm"
