#!/bin/sh
# Makes an image for container runtimes, as an OCI image layout in a tar archive; no daemon is needed.
#
#   packaging/image.sh PROGRAM DIRECTORY
#
# The image is DIRECTORY/vnvme-VERSION-MACHINE.oci.tar; its path is printed. The C library comes from
# Debian's packages, which mmdebstrap fetches and unpacks without running anything of them, so the
# image depends on the commit and on Debian's current packages. The program runs as user 10001.
# docs/kubernetes.md has what it needs. Environment variables: packaging/common.sh.
set -eu

[ $# = 2 ] || {
    sed -n 's/^# \{0,1\}//; 2,9p' "$0" >&2
    exit 2
}
program=$1
output=$2
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$here/common.sh"
mkdir -p -- "$output"
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT INT TERM
blobs=$work/layout/blobs/sha256
mkdir -p "$blobs"

# Files of a layer: sorted, owned by root, and of the package's time.
archive() {
    tar --create --directory "$1" --format=gnu --sort=name --mtime="@$SOURCE_DATE_EPOCH" \
        --owner=0 --group=0 --numeric-owner .
}

# Moves a file to the blobs; answers its digest and size as a descriptor of this media type.
blob() {
    digest=$(sha256sum "$1" | cut -d ' ' -f 1)
    size=$(stat -c %s "$1")
    mv "$1" "$blobs/$digest"
    printf '{"mediaType":"application/vnd.oci.image.%s","digest":"sha256:%s","size":%s}' "$2" "$digest" "$size"
}

# The C library and the directories of Debian 13; documentation other than licences stays out.
mmdebstrap --quiet --variant=extract --architectures="$debian" \
    --include=base-files,libc6,libgcc-s1 trixie "$work/base.tar"
mkdir "$work/base"
tar --extract --file "$work/base.tar" --directory "$work/base" --exclude=./dev
(
    cd "$work/base"
    find usr/share/doc -type f ! -name copyright -delete
    rm -rf etc/apt usr/share/lintian usr/share/man usr/share/locale var/cache var/lib/apt var/lib/dpkg var/log
    find usr/share/doc -type d -empty -delete
)

top=$work/top
mkdir -p "$top/etc/vnvme" "$top/run/vnvme" "$top/var/lib/vnvme" "$top/tmp"
install -D -m 755 "$program" "$top/usr/bin/vnvme"
documents=$top/usr/share/doc/vnvme
mkdir -p "$documents"
install -m 644 "$source/LICENSE-MIT" "$source/LICENSE-APACHE" "$documents"
add_inventory "$documents"
echo 'root:x:0:0:root:/:/usr/sbin/nologin
vnvme:x:10001:10001:Virtual NVMe disks:/var/lib/vnvme:/usr/sbin/nologin' >"$top/etc/passwd"
echo 'root:x:0:
vnvme:x:10001:' >"$top/etc/group"
# Directories that the program writes. A volume that is mounted there brings an owner of its own.
chmod 1777 "$top/tmp"

layers=''
identities=''
for layer in base top; do
    archive "$work/$layer" >"$work/$layer.layer"
    if [ "$layer" = top ]; then
        tar --delete --file "$work/$layer.layer" ./run/vnvme ./var/lib/vnvme
        tar --append --file "$work/$layer.layer" --directory "$top" --format=gnu --mtime="@$SOURCE_DATE_EPOCH" \
            --owner=10001 --group=10001 --numeric-owner ./run/vnvme ./var/lib/vnvme
    fi
    identities=$identities,\"sha256:$(sha256sum "$work/$layer.layer" | cut -d ' ' -f 1)\"
    gzip -9n "$work/$layer.layer"
    layers=$layers,$(blob "$work/$layer.layer.gz" layer.v1.tar+gzip)
done
created=$(date -u -d "@$SOURCE_DATE_EPOCH" +%FT%TZ)
cat >"$work/config" <<CONFIG
{"created":"$created","architecture":"$debian","os":"linux","config":{"User":"10001:10001",
"Env":["PATH=/usr/bin:/bin"],"Entrypoint":["/usr/bin/vnvme"],
"Cmd":["daemon","--config","/etc/vnvme/vnvme.toml","--control","/run/vnvme/control.sock"],
"WorkingDir":"/var/lib/vnvme","StopSignal":"SIGTERM",
"Labels":{"org.opencontainers.image.title":"vnvme","org.opencontainers.image.version":"$version",
"org.opencontainers.image.licenses":"MIT OR Apache-2.0","org.opencontainers.image.description":"$summary"}},
"rootfs":{"type":"layers","diff_ids":[${identities#,}]}}
CONFIG
config=$(blob "$work/config" config.v1+json)
cat >"$work/manifest" <<MANIFEST
{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":$config,"layers":[${layers#,}]}
MANIFEST
manifest=$(blob "$work/manifest" manifest.v1+json)
echo '{"imageLayoutVersion":"1.0.0"}' >"$work/layout/oci-layout"
cat >"$work/layout/index.json" <<INDEX
{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[${manifest%\}},
"platform":{"architecture":"$debian","os":"linux"},"annotations":{"org.opencontainers.image.ref.name":"$version"}}]}
INDEX

image=$output/vnvme-$version-$machine.oci.tar
archive "$work/layout" >"$image"
echo "$image"
