#!/bin/sh
# Makes a book with search of the documents: `make book` calls it.
#
#   packaging/book/build.sh MDBOOK DIRECTORY | summary
#
# The book's first page is DIRECTORY/index.html. `summary` prints the table of contents. Both fail if a
# page of docs/ has no place in the book.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$(CDPATH='' cd -- "$here/../.." && pwd)
cd "$root"

# Parts and their pages, in the order of the book.
parts() {
    cat <<'PARTS'
# Start
README.md docs/releases.md docs/systemd.md docs/operations.md
# Disks
docs/volumes.md docs/qcow2.md docs/encryption.md docs/backup.md docs/nbd.md docs/ceph.md docs/nvme-tcp.md docs/front-ends.md docs/nvme-tcp-target.md docs/ap.md
# Running
docs/control.md docs/metrics.md docs/tuning.md docs/survival.md docs/migration.md docs/process-per-vm.md docs/libvirt.md docs/proxmox.md docs/kubernetes.md docs/embedding.md
# Reference
docs/reference.md docs/compatibility.md docs/conformance.md docs/figures.md CHANGELOG.md
# Trust
SECURITY.md docs/threat-model.md docs/hostile-clients.md
# Inside
ARCHITECTURE.md docs/one-read.md docs/testing.md CONTRIBUTING.md docs/internals/glossary.md docs/internals/threads.md docs/internals/journal.md docs/internals/survival.md docs/internals/volumes.md docs/internals/shared-namespaces.md
PARTS
}

summary() {
    status=0
    for page in docs/*.md docs/internals/*.md; do
        parts | grep -qw -- "$page" || {
            echo "packaging/book/build.sh: $page has no place in the book" >&2
            status=1
        }
    done
    echo '# Summary'
    parts | while read -r line; do
        case $line in
        '# '*) printf '\n%s\n\n' "$line" ;;
        *)
            for page in $line; do
                echo "- [$(sed -n 's/^# //p' "$page" | head -n 1)]($page)"
            done
            ;;
        esac
    done
    return "$status"
}

case $#,${1-} in
1,summary)
    summary
    exit
    ;;
2,*) ;;
*)
    sed -n 's/^# \{0,1\}//; 2,7p' "$0" >&2
    exit 2
    ;;
esac
mdbook=$1
mkdir -p -- "$2"
output=$(CDPATH='' cd -- "$2" && pwd)
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT INT TERM
mkdir "$work/src"
summary >"$work/src/SUMMARY.md"
cp "$here/book.toml" "$work"
cp ./*.md LICENSE-* "$work/src"
cp -R docs "$work/src/docs"
"$mdbook" build --dest-dir "$output" "$work"
echo "$output/index.html"
