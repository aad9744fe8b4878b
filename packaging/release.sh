#!/bin/sh
# Makes all files of a release: `make release` calls it, after `make packages`.
#
#   packaging/release.sh DIRECTORY
#
# DIRECTORY has the packages. It gets the sources, the bill of materials of each architecture, the
# notes (the version's section of CHANGELOG.md) and SHA256SUMS of all files. The version is the
# workspace's in Cargo.toml; CHANGELOG.md has to have a dated section of it, and the checkout no changes.
set -eu

[ $# = 1 ] || {
    sed -n 's/^# \{0,1\}//; 2,8p' "$0" >&2
    exit 2
}
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
source=$(dirname -- "$here")
output=$(CDPATH='' cd -- "$1" && pwd)
cd "$source"
LC_ALL=C
export LC_ALL
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)

changes=$(git status --porcelain --untracked-files=no)
if [ -n "$changes" ]; then
    echo "the checkout has changes that no commit has:" >&2
    echo "$changes" >&2
    exit 1
fi
notes=$(awk -v heading="## [$version] - " '
    /^## / { inside = index($0, heading) == 1; next }
    inside' CHANGELOG.md)
if [ -z "$notes" ]; then
    echo "CHANGELOG.md has no section \"## [$version] - DATE\"" >&2
    exit 1
fi
printf 'vnvme %s\n%s\n' "$version" "$notes" >"$output/vnvme-$version-notes.md"

git -c tar.umask=0022 archive --format=tar --prefix="vnvme-$version/" HEAD |
    gzip -9n >"$output/vnvme-$version.tar.gz"
for machine in x86_64 aarch64; do
    tarball=$output/vnvme-$version-$machine-linux.tar.gz
    [ -f "$tarball" ] || {
        echo "$tarball is missing: make packages" >&2
        exit 1
    }
    tar --extract --to-stdout --file "$tarball" "vnvme-$version-$machine-linux/sbom.cdx.json" \
        >"$output/vnvme-$version-$machine.cdx.json"
done
(
    cd "$output"
    rm -f SHA256SUMS
    find . -maxdepth 1 -type f | sed 's|^\./||' | sort | tr '\n' '\0' | xargs -0 sha256sum >../SHA256SUMS
    mv ../SHA256SUMS SHA256SUMS
)
ls -l "$output"
