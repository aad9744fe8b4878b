#!/bin/sh
# Runs the image of packaging/image.sh under runc, as its user and without capabilities, and loads its disk.
# `make test-packages` calls it as root.
#
#   image.sh IMAGE PROGRAM
#
# IMAGE is the tar archive, PROGRAM a vnvme that loads the disk.
set -eu
: "${2:?usage: image.sh IMAGE PROGRAM}"
image=$1
program=$2
work=$(mktemp -d)
name=vnvme-image-$$
trap 'runc --root "$work/state" delete --force "$name" 2>/dev/null || :; rm -rf -- "$work"' EXIT INT TERM

mkdir "$work/layout"
tar --extract --file "$image" --directory "$work/layout"
tag=$(sed -n 's/.*"org.opencontainers.image.ref.name":"\([^"]*\)".*/\1/p' "$work/layout/index.json")
umoci unpack --image "$work/layout:$tag" "$work/bundle"
# No terminal, and none of the capabilities that umoci adds.
sed -i -e 's/"terminal": true/"terminal": false/' -e '/^[[:space:]]*"CAP_[A-Z_]*",*$/d' "$work/bundle/config.json"
if grep -q CAP_ "$work/bundle/config.json"; then
    echo "image: capabilities are left in config.json" >&2
    exit 1
fi

root=$work/bundle/rootfs
truncate -s 64M "$root/var/lib/vnvme/vm0.raw"
chown 10001:10001 "$root/var/lib/vnvme/vm0.raw"
cat >"$root/etc/vnvme/vnvme.toml" <<'CONFIG'
[[controller]]
name = "vm0"
socket = "/run/vnvme/vm0.sock"
namespace = [{ volume = "/var/lib/vnvme/vm0.raw" }]
CONFIG

runc --root "$work/state" run --bundle "$work/bundle" "$name" </dev/null >"$work/log" 2>&1 &
runtime=$!
until grep -q 'listening socket=/run/vnvme/vm0.sock' "$work/log"; do
    kill -0 "$runtime" 2>/dev/null || {
        cat "$work/log" >&2
        exit 1
    }
    sleep 0.1
done
grep 'sandbox: landlock' "$work/log"
owner=$(stat -c '%u %g' "$root/run/vnvme/vm0.sock")
[ "$owner" = '10001 10001' ] || {
    echo "image: the socket belongs to $owner" >&2
    exit 1
}
timeout 120 "$program" bench "vfio-user://$root/run/vnvme/vm0.sock" --rw randwrite --verify --ios 2000 --destroy-data
runc --root "$work/state" kill "$name" TERM
wait "$runtime" || {
    cat "$work/log" >&2
    exit 1
}
grep -q 'making everything durable' "$work/log"
echo "image: served and ended"
