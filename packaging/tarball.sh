#!/bin/sh
# Makes a tarball that runs where it is unpacked, and installs itself: packaging/build.sh calls it.
#
#   packaging/tarball.sh PROGRAM DIRECTORY
#
# The tarball is DIRECTORY/vnvme-VERSION-MACHINE-linux.tar.gz; its path is printed. Environment
# variables: packaging/common.sh.
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
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT INT TERM
name=vnvme-$version-$machine-linux
top=$work/$name
mkdir "$top"

install -m 755 "$program" "$top/vnvme"
# What install.sh installs is where it is in the sources.
"$here/install.sh" sources "$program" | while IFS= read -r file; do
    path=${file#"$source/"}
    mode=644
    [ ! -x "$file" ] || mode=755
    install -D -m "$mode" -- "$file" "$top/$path"
done
install -m 755 "$here/install.sh" "$top/packaging/install.sh"
install -m 644 "$source/LICENSE-MIT" "$source/LICENSE-APACHE" "$top"
add_inventory "$top"

tarball=$output/$name.tar.gz
tar --create --directory "$work" --format=ustar --sort=name --mtime="@$SOURCE_DATE_EPOCH" \
    --owner=0 --group=0 --numeric-owner "$name" | gzip -9n >"$tarball"
echo "$tarball"
