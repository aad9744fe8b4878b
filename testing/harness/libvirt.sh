#!/bin/sh
# A real libvirtd starts and stops a domain with an NVMe disk (vfio-user) and a virtio disk
# (vhost-user-blk), whose disks the hook of packaging/libvirt adds and removes, and hot-plugs another
# virtio disk. Usage: libvirt.sh VNVME (the program).
#
# libvirt is unpacked from Debian packages, above this machine's own root directory, in namespaces.
# QEMU, the guest's kernel and its first programs are those of the guest tests (`prepare`).
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
target=${CARGO_TARGET_DIR:-$here/target}

skip() {
    exec "$here/testing/harness/skips.sh" --skip "libvirt: domains with disks" "$1"
}

if [ "${2-}" != inside ]; then
    program=$(realpath "${1:?usage: libvirt.sh VNVME}")
    [ "$(id -u)" = 0 ] || skip "needs root"
    for tool in unshare apt-get dpkg-deb chroot cpio; do
        command -v $tool >/dev/null 2>&1 || skip "no $tool"
    done
    packages=$target/libvirt
    if [ ! -e "$packages/complete" ]; then
        rm -rf "$packages"
        mkdir -p "$packages/archives/partial" "$packages/root"
        apt-get install -y -qq --download-only --no-install-recommends \
            -o Dir::Cache::archives="$packages/archives" \
            libvirt-daemon libvirt-daemon-driver-qemu libvirt-clients >"$packages/log" 2>&1 ||
            skip "Debian's packages of libvirt cannot be fetched"
        for package in "$packages"/archives/*.deb; do
            dpkg-deb -x "$package" "$packages/root"
        done
        # This machine has links to the directories of the same names in /usr.
        for merged in bin lib lib64 sbin; do
            [ -d "$packages/root/$merged" ] || continue
            mkdir -p "$packages/root/usr/$merged"
            cp -a "$packages/root/$merged/." "$packages/root/usr/$merged"
            rm -r "${packages:?}/root/$merged"
        done
        touch "$packages/complete"
    fi
    exec unshare --mount --pid --fork --kill-child --mount-proc "$0" "$program" inside
fi

program=$1
work=$(mktemp -d)
mount --make-rprivate /
mount -t tmpfs tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root"
cp -a "$target/libvirt/root/." "$work/upper"
mount -t overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" overlay "$work/root" ||
    skip "no overlay can be mounted"
root=$work/root
qemu=$(ls -d "$target"/harness/qemu-[0-9a-f]*)
image=$(ls -d "$target"/harness/image-*)
for place in proc sys dev; do
    mount --rbind "/$place" "$root/$place"
done
mount -t tmpfs tmpfs "$root/run"
mkdir -p "$root/opt/qemu" "$root/run/vnvme" "$root/etc/vnvme" "$root/etc/libvirt/hooks" "$root/var/lib/vnvme" "$root/var/log/libvirt/qemu"
mount --bind "$qemu" "$root/opt/qemu"
cp "$program" "$root/usr/bin/vnvme"
cp "$here/packaging/libvirt/qemu" "$root/etc/libvirt/hooks/qemu"
cp "$image/vmlinux" "$root/var/lib/vnvme/vmlinux"
cat >"$root/usr/bin/qemu-system-x86_64" <<'END'
#!/bin/sh
exec /opt/qemu/lib64/ld-linux-x86-64.so.2 --library-path /opt/qemu/usr/lib/x86_64-linux-gnu \
    /opt/qemu/usr/bin/qemu-system-x86_64 -L /opt/qemu/usr/share/qemu -L /opt/qemu/usr/share/seabios "$@"
END
chmod 755 "$root/usr/bin/qemu-system-x86_64"
cat >"$root/etc/libvirt/qemu.conf" <<'END'
security_driver = "none"
user = "root"
group = "root"
namespaces = []
cgroup_controllers = []
stdio_handler = "file"
remember_owner = 0
END
# The package's script makes this user; QEMU runs as root here.
echo 'libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin' >>"$root/etc/passwd"
for group in libvirt-qemu:x:64055: kvm:x:64056: libvirt:x:64057:; do
    grep -q "^${group%%:*}:" "$root/etc/group" || echo "$group" >>"$root/etc/group"
done
printf 'auth_unix_rw = "none"\n' >"$root/etc/libvirt/libvirtd.conf"

# The guest writes down the disks that it has, each with its first words, until it is powered off.
mkdir "$work/init"
cat >"$work/init/init" <<'END'
#!/bin/busybox sh
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /boot/$(uname -r)/*.ko; do
    insmod "$module"
done
seen=
while :; do
    for disk in /sys/block/nvme* /sys/block/vd*; do
        [ -e "$disk" ] || continue
        name=${disk##*/}
        case " $seen " in *" $name "*) continue ;; esac
        text=$(dd if=/dev/$name bs=16 count=1 2>/dev/null) || continue
        printf 'written by guest' | dd of=/dev/$name bs=512 seek=8 conv=fsync 2>/dev/null || continue
        seen="$seen $name"
        echo "DISK $name: $text" >/dev/console
    done
    for name in $seen; do
        [ -e /sys/block/$name ] && continue
        echo "GONE $name" >/dev/console
        seen=$(for one in $seen; do [ $one = $name ] || echo $one; done)
    done
    sleep 1
done
END
chmod 755 "$work/init/init"
{ cat "$image/initramfs.cpio"; cd "$work/init" && echo init | cpio --quiet -o -H newc; } >"$root/var/lib/vnvme/initramfs"
for disk in system data extra; do
    truncate -s 16M "$root/var/lib/vnvme/$disk.raw"
    printf '%-16s' "vnvme $disk" | dd of="$root/var/lib/vnvme/$disk.raw" conv=notrunc status=none
done
cat >"$root/etc/vnvme/vm0.disks" <<'END'
# Disks of the domain vm0.
controller socket=/run/vnvme/vm0.sock /var/lib/vnvme/system.raw
vhost-user-blk socket=/run/vnvme/vm0-data.sock /var/lib/vnvme/data.raw
END
cat >"$root/var/lib/vnvme/vm0.xml" <<'END'
<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>vm0</name>
  <memory unit='MiB'>256</memory>
  <vcpu>1</vcpu>
  <memoryBacking>
    <source type='memfd'/>
    <access mode='shared'/>
  </memoryBacking>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>/var/lib/vnvme/vmlinux</kernel>
    <initrd>/var/lib/vnvme/initramfs</initrd>
    <cmdline>console=ttyS0 panic=-1</cmdline>
  </os>
  <features>
    <acpi/>
  </features>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='pci' index='0' model='pcie-root'/>
    <controller type='pci' index='1' model='pcie-root-port'/>
    <controller type='pci' index='2' model='pcie-root-port'/>
    <controller type='pci' index='3' model='pcie-root-port'/>
    <controller type='pci' index='4' model='pcie-root-port'/>
    <disk type='vhostuser' device='disk'>
      <driver name='qemu' type='raw'/>
      <source type='unix' path='/run/vnvme/vm0-data.sock'/>
      <target dev='vda' bus='virtio'/>
    </disk>
    <serial type='file'>
      <source path='/var/log/console'/>
    </serial>
    <memballoon model='none'/>
  </devices>
  <qemu:commandline>
    <qemu:arg value='-device'/>
    <qemu:arg value='{"driver":"vfio-user-pci","bus":"pcie.0","addr":"0x10","socket":{"type":"unix","path":"/run/vnvme/vm0.sock"}}'/>
  </qemu:commandline>
</domain>
END
cat >"$root/var/lib/vnvme/extra.xml" <<'END'
<disk type='vhostuser' device='disk'>
  <driver name='qemu' type='raw'/>
  <source type='unix' path='/run/vnvme/vm0-extra.sock'/>
  <target dev='vdb' bus='virtio'/>
</disk>
END

inside() {
    chroot "$root" "$@"
}

fail() {
    echo "libvirt: $1" >&2
    for log in console libvirt/qemu/vm0.log libvirtd vnvme; do
        echo "--- $log" >&2
        tail -n 30 "$root/var/log/$log" >&2 || true
    done
    exit 1
}

# wait_for WHAT COMMAND...: the command succeeds within five minutes.
wait_for() {
    what=$1
    shift
    tries=0
    until "$@" >/dev/null 2>&1; do
        tries=$((tries + 1))
        [ $tries -lt 600 ] || fail "$what"
        sleep 0.5
    done
}

shows() {
    grep -qF "$1" "$root/var/log/console"
}

virsh() {
    inside virsh -q -c qemu:///system "$@"
}

is_off() {
    [ "$(virsh domstate vm0)" = "shut off" ]
}

# The names of the disks that vnvme serves, in one line.
served() {
    inside vnvme list --json | tr ',{' '\n\n' | sed -n 's/^ *"name": *"\(vm0[^"]*\)".*/\1/p' | sort -u | tr '\n' ' '
}

inside vnvme daemon --allow /run/vnvme --allow /var/lib/vnvme >"$root/var/log/vnvme" 2>&1 &
wait_for "vnvme does not answer" inside vnvme list
inside libvirtd >"$root/var/log/libvirtd" 2>&1 &
wait_for "libvirtd does not answer" virsh list
virsh define /var/lib/vnvme/vm0.xml
[ -z "$(served)" ] || fail "disks before the domain: $(served)"

for turn in 1 2; do
    virsh start vm0 || fail "the domain does not start"
    [ "$(served)" = "vm0 vm0-data " ] || fail "disks of the domain: $(served)"
    wait_for "no NVMe disk" shows "DISK nvme0n1: vnvme system"
    wait_for "no virtio disk" shows "DISK vda: vnvme data"
    if [ $turn = 1 ]; then
        inside vnvme add vhost-user-blk socket=/run/vnvme/vm0-extra.sock /var/lib/vnvme/extra.raw
        virsh attach-device vm0 /var/lib/vnvme/extra.xml || fail "no hot-plug"
        wait_for "the hot-plugged disk does not appear" shows "DISK vdb: vnvme extra"
        virsh detach-device vm0 /var/lib/vnvme/extra.xml || fail "no unplug"
        wait_for "the unplugged disk stays" shows "GONE vdb"
        wait_for "vnvme keeps the unplugged disk" inside vnvme remove vm0-extra
    fi
    virsh destroy vm0
    wait_for "the domain stays" is_off
    [ -z "$(served)" ] || fail "disks after the domain: $(served)"
    : >"$root/var/log/console"
done
for disk in system data extra; do
    text=$(dd if="$root/var/lib/vnvme/$disk.raw" bs=512 skip=8 count=1 status=none | head -c 16)
    [ "$text" = "written by guest" ] || fail "$disk has not what the guest wrote"
done

# A disk that cannot be served keeps the domain from starting, and leaves nothing.
echo "vhost-user-blk socket=/run/vnvme/vm0-none.sock /var/lib/vnvme/none.raw" >>"$root/etc/vnvme/vm0.disks"
if virsh start vm0 2>"$root/var/log/refused"; then
    fail "a domain without its disk has started"
fi
grep -q "none.raw" "$root/var/log/refused" || fail "the disk is not named: $(cat "$root/var/log/refused")"
[ -z "$(served)" ] || fail "disks of a domain that has not started: $(served)"
echo "libvirt: $(virsh version --daemon | tail -n 1): two starts, a hot-plug, a refused start"
