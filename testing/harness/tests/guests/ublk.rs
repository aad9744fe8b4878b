//! Volumes as block devices of the host: the guest is the host here, for it has a kernel with ublk.

use std::path::{Path, PathBuf};

use crate::common::{
    Checks, Disks, LONG_TIMEOUT, boot_with_device, json, newer_kernel, run, run_for,
};
use anyhow::{Context, Result, ensure};
use harness::Guest;
use harness::daemon::program;
use harness::progress::{say, skip};

/// The program's environment, and what all scripts need: `up N ARGS` starts
/// `vnvme ublk --id N ARGS` and waits for the device, `down N` ends it by SIGTERM and waits until
/// the device is gone. A kernel without file locks has `$L` set.
const LIB: &str = r#"
export LD_LIBRARY_PATH=/tools/lib:/tmp
[ -e /proc/locks ] && L= || L='?lock=off'
wait_for() { for try in $(seq 600); do eval "$1" && return 0; sleep 0.05; done; echo "never: $1" >&2; return 1; }
up() {
    id=$1; shift
    [ "$L" ] || set -- --control /tmp/ctl$id "$@"
    rm -f /tmp/pid$id /tmp/status$id /tmp/log$id
    {
        /tmp/vnvme ublk --id $id "$@" >/tmp/log$id 2>&1 &
        echo $! >/tmp/pid$id; wait $! && s=0 || s=$?; echo $s >/tmp/status$id
    } &
    wait_for '[ -s /tmp/pid'$id' ]'
    wait_for "[ -b /dev/ublkb$id ] && grep -q 'block device' /tmp/log$id || ! kill -0 $(cat /tmp/pid$id) 2>/dev/null"
    grep -q 'block device' /tmp/log$id || { cat /tmp/log$id >&2; return 1; }
}
down() {
    kill -TERM $(cat /tmp/pid$1)
    wait_for '[ -s /tmp/status'$1' ]'
    [ $(cat /tmp/status$1) = 0 ] || { cat /tmp/status$1 /tmp/log$1 >&2; return 1; }
    [ ! -e /dev/ublkb$1 ] && [ ! -e /dev/ublkc$1 ] || { echo "a node is left" >&2; return 1; }
}
verify() { fio --name=v --filename=$1 --ioengine=io_uring --direct=1 --rw=randrw --bsrange=4k-1m \
    --size=${2:-8m} --iodepth=16 --verify=crc32c --verify_fatal=1 --verify_state_save=0 \
    >/tmp/fio 2>&1 || { cat /tmp/fio; return 1; }; }
"#;

fn boot(name: &str, file: &Path, kernel: Option<PathBuf>) -> Result<Guest> {
    boot_with_device(name, file, kernel, &[program()?])
}

fn sh(guest: &Guest, script: &str) -> Result<String> {
    run_for(guest, LONG_TIMEOUT, &format!("{LIB}{script}"))
}

/// Data, filesystem, discards, and what the kernel says of the disk.
fn a_file(guest: &Guest) -> Result<()> {
    sh(
        guest,
        "truncate -s 64M /tmp/disk.raw
         up 0 --queues 2 --block-size 4096 /tmp/disk.raw$L
         q=/sys/block/ublkb0/queue
         [ $(blockdev --getsize64 /dev/ublkb0) = $((64 << 20)) ]
         [ $(cat $q/logical_block_size) = 4096 ]
         [ \"$(cat $q/write_cache)\" = 'write back' ] && [ $(cat $q/fua) = 1 ] && [ $(blockdev --getro /dev/ublkb0) = 0 ]
         [ $(ls /sys/block/ublkb0/mq | wc -l) = 2 ]
         verify /dev/ublkb0
         /tmp/vnvme bench /dev/ublkb0$L --rw randrw --bs 4k --iodepth 8 --ios 500 --size 8m --verify --destroy-data >/tmp/load
         grep -q 'verified .* blocks' /tmp/load
         mkfs.ext4 -q /dev/ublkb0; mkdir -p /tmp/m; mount /dev/ublkb0 /tmp/m; cp -r /bin /tmp/m/; sync
         umount /tmp/m; fsck.ext4 -fn /dev/ublkb0
         before=$(stat -c %b /tmp/disk.raw); blkdiscard -f /dev/ublkb0
         [ $(stat -c %b /tmp/disk.raw) -lt $before ]
         zeroes /dev/ublkb0 0 64
         tr '\\0' x </dev/zero | dd of=/dev/ublkb0 bs=1M count=8 iflag=fullblock 2>/dev/null
         blkdiscard -z -o 1048576 -l 1048576 /dev/ublkb0
         [ $(dd if=/dev/ublkb0 bs=1M count=8 2>/dev/null | tr -d '\\0' | wc -c) = $((7 << 20)) ]",
    )?;
    if locks(guest)? {
        counted(guest)?;
    }
    // Data in the page cache only is in the file when the device is removed.
    sh(
        guest,
        "tr '\\0' y </dev/zero | dd of=/dev/ublkb0 bs=1M count=4 seek=60 iflag=fullblock 2>/dev/null
         down 0
         [ $(dd if=/tmp/disk.raw bs=1M skip=60 count=4 2>/dev/null | tr -d y | wc -c) = 0 ]",
    )
    .map(drop)
}

/// The kernel has file locks: control sockets and locked volumes work.
fn locks(guest: &Guest) -> Result<bool> {
    Ok(guest.sh("[ -e /proc/locks ]")?.status == 0)
}

fn counted(guest: &Guest) -> Result<()> {
    let told = json(
        guest,
        &format!("{LIB}/tmp/vnvme stats --json --control /tmp/ctl0"),
    )?;
    let queues = told["ublk"][0]["queues"].as_array().context("queues")?;
    let sum = |key: &str| queues.iter().filter_map(|q| q[key].as_u64()).sum::<u64>();
    say(format!(
        "ublk: {} reads, {} writes, {} flushes, {} discards, {} sleeps",
        sum("reads"),
        sum("writes"),
        sum("flushes"),
        sum("discards"),
        sum("sleeps")
    ));
    ensure!(told["ublk"][0]["device"] == "/dev/ublkb0", "{told}");
    ensure!(
        queues.len() == 2 && queues.iter().all(|q| q["reads"].as_u64() > Some(0)),
        "{told}"
    );
    ensure!(
        sum("writes") > 20 && sum("flushes") > 0 && sum("discards") > 1,
        "{told}"
    );
    ensure!(sum("errors") == 0, "{told}");
    Ok(())
}

/// Commands one at a time, each sent while the worker falls asleep or is asleep.
fn woken(guest: &Guest) -> Result<()> {
    let script = "up 6 --idle-window 0 --queues 1 null://64M
         dd if=/dev/ublkb6 of=/dev/null bs=4096 count=3000 iflag=direct";
    sh(guest, script)?;
    if locks(guest)? {
        let told = json(
            guest,
            &format!("{LIB}/tmp/vnvme stats --json --control /tmp/ctl6"),
        )?;
        let queue = &told["ublk"][0]["queues"][0];
        let figure = |key: &str| queue[key].as_u64();
        ensure!(figure("reads") >= Some(3000), "{told}");
        // Else nothing was shown.
        ensure!(
            figure("sleeps") > Some(100),
            "the worker hardly slept: {told}"
        );
    }
    sh(guest, "down 6").map(drop)
}

/// Nothing is lost but the device when the process is killed, and the number can be had again.
fn killed(guest: &Guest) -> Result<()> {
    sh(
        guest,
        "up 1 /tmp/disk.raw$L
         dd if=/tmp/vnvme of=/dev/ublkb1 bs=1M count=4 conv=fsync 2>/dev/null
         kill -9 $(cat /tmp/pid1)
         wait_for '[ ! -e /dev/ublkb1 ]'
         wait_for '[ -s /tmp/status1 ]'
         up 1 /tmp/disk.raw$L
         cmp -n $((4 << 20)) /dev/ublkb1 /tmp/vnvme
         /tmp/vnvme ublk --id 1 mem://1M 2>&1 | grep 'served by process'
         [ \"$L\" ] || /tmp/vnvme ublk --id 5 /tmp/disk.raw 2>&1 | grep 'is in use by'
         down 1",
    )
    .map(drop)
}

/// A load that runs while the process is killed notices nothing but a pause.
fn recovered(guest: &Guest) -> Result<()> {
    sh(
        guest,
        "up 2 --recover --queues 2 /tmp/disk.raw$L
         mkdir -p /tmp/m; mkfs.ext4 -q /dev/ublkb2; mount /dev/ublkb2 /tmp/m
         fio --name=r --directory=/tmp/m --ioengine=io_uring --direct=1 --rw=randwrite --bs=16k \
             --size=32m --loops=3 --iodepth=16 --verify=crc32c --verify_fatal=1 \
             --verify_state_save=0 >/tmp/fio2 2>&1 &
         load=$!
         ios() { set -- $(cat /sys/block/ublkb2/stat); echo $(($1 + $5)); }
         # fio is at work before each kill and after it, so each hits it in the middle.
         works() { was=$(ios); wait_for '[ $(ios) -ge '$((was + 200))' ]' || { cat /tmp/fio2; return 1; }; }
         for round in 1 2 3; do
             works
             kill -9 $(cat /tmp/pid2); wait_for '[ -s /tmp/status2 ]'
             [ -b /dev/ublkb2 ]
             up 2 --recover --queues 2 /tmp/disk.raw$L
             grep -q 'recovered=true' /tmp/log2
         done
         works
         wait $load || { cat /tmp/fio2; false; }
         umount /tmp/m; fsck.ext4 -fn /dev/ublkb2
         down 2",
    )?;
    // No process recovers the device: it is removed by hand.
    sh(
        guest,
        "up 2 --recover mem://8M
         kill -9 $(cat /tmp/pid2); wait_for '[ -s /tmp/status2 ]'; [ -b /dev/ublkb2 ]
         /tmp/vnvme ublk --remove 2
         [ ! -e /dev/ublkb2 ] && [ ! -e /dev/ublkc2 ]",
    )
    .map(drop)
}

fn refusals(guest: &Guest) -> Result<()> {
    sh(
        guest,
        "up 3 --read-only --queues 1 /tmp/disk.raw$L
         [ $(blockdev --getro /dev/ublkb3) = 1 ]
         dd if=/dev/zero of=/dev/ublkb3 count=1 2>/dev/null && false
         down 3
         refuse() { text=$1; shift; /tmp/vnvme ublk \"$@\" >/tmp/refused 2>&1 && return 1; grep \"$text\" /tmp/refused; }
         refuse 'blocks of 8192' --block-size 8192 /tmp/disk.raw$L
         refuse '1 to 64 queues' --queues 0 /tmp/disk.raw$L
         refuse 'no such file' /tmp/nothing
         [ \"$L\" ] || refuse 'overlaps' /tmp/disk.raw '/tmp/disk.raw?offset=1M'",
    )
    .map(drop)
}

/// Slices of one block device, which the system's own users are kept off.
fn slices_of_a_block_device(guest: &Guest) -> Result<()> {
    sh(
        guest,
        "up 3 mem://16M
         up 4 '/dev/ublkb3?length=8M' '/dev/ublkb3?offset=8M'
         wait_for '[ -b /dev/ublkb5 ]'
         [ $(blockdev --getsize64 /dev/ublkb5) = $((8 << 20)) ]
         for i in 4 5; do tr '\\0' $i </dev/zero | dd of=/dev/ublkb$i bs=1M count=8 iflag=fullblock oflag=direct 2>/dev/null; done
         mkfs.ext4 -q /dev/ublkb3 2>&1 | grep 'in use by the system'
         /tmp/vnvme ublk '/dev/ublkb3?offset=12M' 2>&1 | grep 'is in use by'
         down 4
         [ $(dd if=/dev/ublkb3 bs=1M count=8 2>/dev/null | tr -d 4 | wc -c) = 0 ]
         [ $(dd if=/dev/ublkb3 bs=1M skip=8 2>/dev/null | tr -d 5 | wc -c) = 0 ]
         mkfs.ext4 -q /dev/ublkb3
         down 3",
    )
    .map(drop)
}

/// Slices of a real device, of one behind a socket and of a file, by three ways out of one process.
fn slices_of_a_device(guest: &Guest) -> Result<()> {
    run(guest, &format!("{LIB}/tmp/vnvme bind $(bdf 1)"))?;
    sh(
        guest,
        "/tmp/vnvme serve --socket /tmp/below mem://32M >/tmp/log_below 2>&1 &
         below=$!; wait_for '[ -S /tmp/below ]'
         d=nvme://$(bdf 1)/1
         cat >/tmp/all.toml <<END
[[controller]]
socket = \"/tmp/vm0\"
[[controller.namespace]]
volume = { url = \"$d\", offset = \"16M\", length = \"16M\" }
[[ublk]]
id = 6
volume = \"$d?length=16M\"
[[ublk]]
id = 7
volume = \"$d?offset=32M&iops=100000\"
depth = 32
[[ublk]]
id = 8
volume = \"vfio-user:///tmp/below/1?offset=8M&length=24M\"
END
         /tmp/vnvme serve --config /tmp/all.toml --control /tmp/ctl >/tmp/log_all 2>&1 &
         all=$!
         wait_for '[ -b /dev/ublkb6 ] && [ -b /dev/ublkb7 ] && [ -b /dev/ublkb8 ] && [ -S /tmp/vm0 ] || ! kill -0 '$all
         kill -0 $all || { cat /tmp/log_all; false; }
         # The namespace between the two is written through its own controller.
         up 9 vfio-user:///tmp/vm0/1
         for i in 6 9 7 8; do verify /dev/ublkb$i 4m; done
         for i in 6 9 7; do tr '\\0' $i </dev/zero | dd of=/dev/ublkb$i bs=1M count=16 iflag=fullblock oflag=direct 2>/dev/null; done
         for i in 6 9 7; do
             [ $(blockdev --getsize64 /dev/ublkb$i) = $((16 << 20)) ]
             [ $(dd if=/dev/ublkb$i bs=1M iflag=direct 2>/dev/null | tr -d $i | wc -c) = 0 ]
         done
         /tmp/vnvme limits --control /tmp/ctl --all --iops 200000 | grep 200000
         down 9
         kill -TERM $all; wait $all
         [ ! -e /dev/ublkb6 ] && [ ! -e /dev/ublkb8 ]
         kill -TERM $below; wait $below
         /tmp/vnvme unbind $(bdf 1)
         d=$(wait_disk 1 1)
         slice() { dd if=$d bs=1M skip=$1 count=16 2>/dev/null | tr -d $2 | wc -c; }
         [ $(slice 0 6) = 0 ] && [ $(slice 16 9) = 0 ] && [ $(slice 32 7) = 0 ]",
    )
    .map(drop)
}

/// A disk of 8 MiB with two partitions, `boot` and `two words`: its first and its
/// last 34 blocks of 512 bytes.
fn partitioned() -> [Vec<u8>; 2] {
    const LAST: u64 = (8 << 11) - 1;
    let mut table = vec![0; 128 * 128];
    for (i, (first, last, label)) in [(64u64, 2111u64, "boot"), (4096, 12287, "two words")]
        .into_iter()
        .enumerate()
    {
        let mut entry = vec![0x11 * (i as u8 + 1); 32];
        entry.extend([first.to_le_bytes(), last.to_le_bytes(), [0; 8]].concat());
        entry.extend(label.encode_utf16().flat_map(u16::to_le_bytes));
        table[i * 128..i * 128 + entry.len()].copy_from_slice(&entry);
    }
    let header = |lba: u64, other: u64, entries: u64| {
        let mut header = [b"EFI PART".as_slice(), &[0, 0, 1, 0, 92, 0, 0, 0], &[0; 8]].concat();
        for number in [lba, other, 34, LAST - 33] {
            header.extend(number.to_le_bytes());
        }
        header.extend([0xab; 16]);
        header.extend(entries.to_le_bytes());
        for number in [128, 128, crc32fast::hash(&table)] {
            header.extend(u32::to_le_bytes(number));
        }
        let crc = crc32fast::hash(&header);
        header[16..20].copy_from_slice(&crc.to_le_bytes());
        header.resize(512, 0);
        header
    };
    let mut protective = vec![0; 512];
    protective[446..462].copy_from_slice(&[
        0, 0, 2, 0, 0xee, 0xff, 0xff, 0xff, 1, 0, 0, 0, 0xff, 0x3f, 0, 0,
    ]);
    protective[510..].copy_from_slice(&[0x55, 0xaa]);
    let first = [&protective[..], &header(1, LAST, 2), &table].concat();
    let last = [&[0; 512], &table[..], &header(LAST, 1, LAST - 32)].concat();
    [first, last]
}

/// The kernel and we find the same partitions in a table, also when its first copy is lost.
fn partitions(guest: &Guest) -> Result<()> {
    let [first, last] = partitioned();
    guest.push_file("/tmp/first", 0o644, &first)?;
    guest.push_file("/tmp/last", 0o644, &last)?;
    sh(
        guest,
        "truncate -s 8M /tmp/gpt.raw
         dd if=/tmp/first of=/tmp/gpt.raw conv=notrunc 2>/dev/null
         dd if=/tmp/last of=/tmp/gpt.raw conv=notrunc seek=$(((8 << 11) - 34)) 2>/dev/null
         up 3 /tmp/gpt.raw
         wait_for '[ -b /dev/ublkb3p2 ]'
         grep 'PARTNAME=two words' /sys/block/ublkb3/ublkb3p2/uevent
         tr '\\0' q </dev/zero | dd of=/dev/ublkb3p2 bs=1M count=4 iflag=fullblock oflag=direct 2>/dev/null
         sizes=$(cat /sys/block/ublkb3/ublkb3p[12]/size)
         down 3
         for damage in no yes; do
             ours=
             for part in partition=1 'partlabel=two%20words'; do
                 up 3 \"/tmp/gpt.raw?$part\"
                 ours=\"$ours $(cat /sys/block/ublkb3/size)\"
                 [ $part = partition=1 ] || [ $(tr -d q </dev/ublkb3 | wc -c) = 0 ]
                 down 3
             done
             [ \"$(echo $ours)\" = \"$(echo $sizes)\" ]
             dd if=/dev/zero of=/tmp/gpt.raw conv=notrunc seek=1 count=33 2>/dev/null
         done
         /tmp/vnvme ublk '/tmp/gpt.raw?partition=3' 2>&1 | grep 'there are 1 (\"boot\"), 2 (\"two words\")'",
    )
    .map(drop)
}

fn resized(guest: &Guest) -> Result<()> {
    sh(
        guest,
        "truncate -s 16M /tmp/grow.raw; up 4 /tmp/grow.raw$L
         truncate -s 24M /tmp/grow.raw
         wait_for '[ $(blockdev --getsize64 /dev/ublkb4) = '$((24 << 20))' ]'
         tr '\\0' z </dev/zero | dd of=/dev/ublkb4 bs=1M count=4 seek=20 iflag=fullblock oflag=direct 2>/dev/null
         down 4
         [ $(dd if=/tmp/grow.raw bs=1M skip=20 2>/dev/null | tr -d z | wc -c) = 0 ]",
    )
    .map(drop)
}

/// Devices that are added and removed while another one of the same process is in use.
fn come_and_go(guest: &Guest) -> Result<()> {
    sh(
        guest,
        "mkdir -p /tmp/d; truncate -s 16M /tmp/d/busy.raw /tmp/d/a.raw
         echo 'ublk = [{ id = 20, queues = 2, volume = \"/tmp/d/busy.raw\" }]' >/tmp/d/v.toml
         /tmp/vnvme daemon --config /tmp/d/v.toml --control /tmp/ctld --allow /tmp/d,ublk \
             >/tmp/logd 2>&1 &
         daemon=$!
         v() { verb=$1; shift; /tmp/vnvme $verb --control /tmp/ctld \"$@\"; }
         refuse() { text=$1; shift; v \"$@\" >/tmp/refused 2>&1 && return 1; grep \"$text\" /tmp/refused; }
         wait_for '[ -b /dev/ublkb20 ] && [ -S /tmp/ctld ] || ! kill -0 '$daemon
         kill -0 $daemon || { cat /tmp/logd; false; }
         rm -f /tmp/stop /tmp/end
         { while [ ! -e /tmp/stop ]; do
               fio --name=busy --filename=/dev/ublkb20 --ioengine=io_uring --direct=1 --rw=randrw \
                   --bsrange=4k-64k --iodepth=8 --size=4m --verify=crc32c --verify_fatal=1 \
                   --verify_state_save=0 >/tmp/busy 2>&1 || { echo failed >/tmp/end; exit; }
           done; echo well >/tmp/end; } &
         inode=$(stat -c %i /tmp/d/a.raw)
         for turn in 1 2 3; do
             v add ublk id=21 queues=2 /tmp/d/a.raw
             wait_for '[ -b /dev/ublkb21 ]'
             verify /dev/ublkb21 4m
             refuse 'there already' add ublk id=21 mem://1M
             mkfs.ext4 -q -F /dev/ublkb21; mount /dev/ublkb21 /mnt
             refuse 'in use' remove ublkb21
             umount /mnt
             wait_for 'v remove ublkb21 2>/dev/null'
             [ ! -e /dev/ublkb21 ] && [ ! -e /dev/ublkc21 ]
             grep \":$inode \" /proc/locks && false
             [ ! -e /tmp/end ] || { cat /tmp/busy; false; }
         done
         v save >/tmp/saved
         { cat /tmp/saved; printf '[[ublk]]\\nid = 22\\nvolume = \"mem://1M\"\\n'; } >/tmp/d/w.toml
         printf '[[ublk]]\\nid = 23\\nvolume = \"/tmp/d/nothing\"\\n' >>/tmp/d/w.toml
         refuse nothing apply /tmp/d/w.toml
         v save | cmp - /tmp/saved
         [ ! -e /dev/ublkb22 ] && [ ! -e /dev/ublkb23 ]
         touch /tmp/stop; wait_for '[ -e /tmp/end ]'
         [ $(cat /tmp/end) = well ] || { cat /tmp/busy; false; }
         kill -TERM $daemon; wait $daemon
         [ ! -e /dev/ublkb20 ] && [ ! -e /dev/ublkc20 ]",
    )
    .map(drop)
}

fn on(name: &'static str, kernel: Option<PathBuf>, newer: bool) -> Result<()> {
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 48)?;
    let guest = boot(name, &file, kernel)?;
    let mut checks = Checks::new(name);
    if !newer {
        checks.check("without the module", || {
            sh(
                &guest,
                "/tmp/vnvme ublk mem://1M 2>&1 | grep 'modprobe ublk_drv'",
            )
            .map(drop)
        });
        run(&guest, "modprobe ublk_drv")?;
    }
    if !locks(&guest)? {
        let what = format!("{name}: counters, locks and overlaps of files");
        skip(&what, "the guest's kernel has no file locks");
    }
    checks.check("a file", || a_file(&guest));
    checks.check("killed", || killed(&guest));
    checks.check("recovered", || recovered(&guest));
    if newer {
        checks.check("resized", || resized(&guest));
    } else {
        checks.check("woken", || woken(&guest));
        checks.check("refusals", || refusals(&guest));
        checks.check("come and go", || come_and_go(&guest));
        checks.check("partitions", || partitions(&guest));
        checks.check("slices of a block device", || {
            slices_of_a_block_device(&guest)
        });
        checks.check("slices of a device", || slices_of_a_device(&guest));
    }
    guest.poweroff()?;
    checks.finish();
    Ok(())
}

#[test]
fn debian_kernel_uses_ublk_disk() -> Result<()> {
    on("ublk-debian", None, false)
}

#[test]
fn newer_kernel_uses_ublk_disk() -> Result<()> {
    match newer_kernel() {
        Some(kernel) => on("ublk-newer", Some(kernel), true),
        None => {
            let what = "ublk::newer_kernel_uses_ublk_disk";
            skip(what, "no newer kernel is given (VNVME_KERNEL)");
            Ok(())
        }
    }
}
