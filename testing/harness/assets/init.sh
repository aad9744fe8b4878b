#!/bin/busybox sh
# The guest's first and only process of its own: brings up what the harness needs, then answers its requests on a
# virtio port. One request at a time:
#
#   RUN ID BYTES SECONDS\n + script   runs it with sh; answers DONE ID STATUS BYTES\n + what it printed
#   PUT ID BYTES MODE PATH\n + data   writes a file;    answers DONE ID STATUS 0\n
#   GET ID PATH\n                     reads a file;     answers DONE ID STATUS BYTES\n + data
#   REBOOT / POWEROFF                 syncs and does it
#
# Scripts may write lines for the host at any time to file descriptor 4.
export PATH=/tools/bin:/bin LD_LIBRARY_PATH=/tools/lib HOME=/root TERM=dumb
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
release=$(uname -r)
for module in /boot/$release/*.ko; do
    [ -e "$module" ] && insmod "$module"
done
port() {
    # $1: name of the port. Prints its device once the host's side is known.
    tries=0
    while [ $tries -lt 200 ]; do
        for p in /sys/class/virtio-ports/*; do
            [ -e "$p/name" ] || continue
            read -r name <"$p/name"
            if [ "$name" = "$1" ]; then
                echo "/dev/${p##*/}"
                return
            fi
        done
        tries=$((tries + 1))
        sleep 0.02
    done
    echo "init: no virtio port $1" >/dev/console
    echo /dev/null
}
agent=$(port vnvme.agent)
exec 3<>"$agent"
exec 4>"$(port vnvme.events)"
for disk in /sys/block/vd*; do
    [ -e "$disk/serial" ] || continue
    read -r serial <"$disk/serial"
    [ "$serial" = vnvme-tools ] && mount -t ext4 -o ro,noload "/dev/${disk##*/}" /tools
done
# busybox's shell takes its own applets before the search path; the real programs are meant.
: >/run/prelude
for program in /tools/bin/*; do
    name=${program##*/}
    [ -e "/bin/$name" ] && echo "$name() { $program \"\$@\"; }" >>/run/prelude
done
read -r up _ </proc/uptime
read -r boot </proc/sys/kernel/random/boot_id
echo "READY $boot $up" >&3
while read -r verb id size rest <&3; do
    case $verb in
    RUN)
        { cat /run/prelude && head -c "$size" <&3; } >/run/script
        timeout -s KILL "$rest" sh /run/script </dev/null >/run/output 2>&1 3>&-
        status=$?
        echo "DONE $id $status $(stat -c %s /run/output)" >&3
        cat /run/output >&3
        ;;
    PUT)
        mode=${rest%% *}
        path=${rest#* }
        head -c "$size" <&3 >"$path" && chmod "$mode" "$path"
        echo "DONE $id $? 0" >&3
        ;;
    GET)
        if cat "$size" >/run/output 2>/dev/null; then
            echo "DONE $id 0 $(stat -c %s /run/output)" >&3
            cat /run/output >&3
        else
            echo "DONE $id 1 0" >&3
        fi
        ;;
    REBOOT)
        sync
        reboot -f
        ;;
    POWEROFF)
        sync
        poweroff -f
        ;;
    *)
        echo "init: unknown request: $verb" >/dev/console
        ;;
    esac
done
echo "init: the harness is gone" >/dev/console
poweroff -f
