#!/bin/sh
# Starts a systemd as process 1 of namespaces of its own (systemd.rs). As root.
#
#   systemd.sh TREE WORK CGROUP
#
# TREE: unpacked packages, which are not changed. WORK: a directory; what changes is in WORK/upper.
# CGROUP: a directory of the cgroup2 file system that is this process's own.
set -e
echo 0 >"$3/cgroup.procs"
# Not on a tty, and with no network. When unshare is killed, so is all that runs in there.
exec unshare --mount --pid --fork --cgroup --ipc --uts --net --kill-child sh -ec '
mount --make-rprivate /
mkdir -p "$2/upper" "$2/overlay" "$2/root"
mount -t overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/overlay" overlay "$2/root"
cd "$2/root"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mount -t tmpfs tmpfs dev
for node in null zero full random urandom tty; do
    touch "dev/$node"
    mount --bind "/dev/$node" "dev/$node"
done
# As PrivateDevices= copies them.
mkdir dev/pts dev/shm dev/mqueue dev/hugepages
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mount -t tmpfs tmpfs sys/fs/cgroup
mount -t cgroup2 cgroup2 sys/fs/cgroup
exec env -i container=vnvme PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    chroot . /lib/systemd/systemd --unit=test.target --log-level=debug --show-status=0
' systemd.sh "$@"
