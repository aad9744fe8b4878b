//! `nvme format` in a Linux guest: blocks of another size, which the block layer takes over, and
//! which are there in the next process.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

mod common;

use std::path::Path;

use anyhow::Result;
use common::{Checks, Disks, LONG, run_for};
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Guest};

/// `$d` is the disk. `has N` waits until it has blocks of N bytes, and looks at its size.
const LIB: &str = r#"
d=$(wait_disk 1 1); n=$(basename $d)
has() {
    for try in $(seq 100); do
        [ $(blockdev --getss $d) = $1 ] && break
        sleep 0.1
    done
    [ $(blockdev --getss $d) = $1 ]
    [ $(blockdev --getsize64 $d) = 67108864 ]
    [ $(cat /sys/block/$n/queue/logical_block_size) = $1 ]
    nvme id-ns $d >/tmp/id
    grep -q "^nsze *: $(printf 0x%x $((67108864 / $1)))\$" /tmp/id || { cat /tmp/id; exit 1; }
}
verify() {
    fio --name=formats --filename=$d --direct=1 --ioengine=libaio --iodepth=16 --rw=randrw \
        --bsrange=$1-64k --size=32m --verify=crc32c --output-format=terse \
        >/tmp/fio || { cat /tmp/fio; exit 1; }
}
"#;

fn serve(disk: &Path) -> Result<Daemon> {
    let file = disk.with_extension("format");
    let volume = format!("{}?format-file={}", disk.display(), file.display());
    Daemon::builder("formats").volume(volume).start()
}

fn boot(daemon: &Daemon) -> Result<Guest> {
    Guest::builder("formats").vfio_user(daemon.socket()).boot()
}

fn script(guest: &Guest, text: &str) -> Result<String> {
    run_for(guest, LONG, &format!("{LIB}\n{text}"))
}

#[test]
fn a_guest_chooses_the_blocks_of_its_disk() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        skip(
            "formats::a_guest_chooses_the_blocks_of_its_disk",
            "what is tried is where vnvme keeps the format",
        );
        return Ok(());
    }
    let disks = Disks::new()?;
    let disk = disks.sparse("disk.raw", 64)?;
    let daemon = serve(&disk)?;
    let guest = boot(&daemon)?;
    let mut checks = Checks::new("formats");
    checks.check("two formats, blocks of 512 bytes", || first(&guest));
    checks.check(
        "format --lbaf=1: blocks of 4096 bytes, and all zeroes",
        || to_4096(&guest),
    );
    checks.check("format --lbaf=0: back, beside what is written", || {
        under_load(&guest)
    });
    checks.check("formats that there are not", || wrong(&guest));
    checks.check("a file system with the larger blocks", || stays(&guest));
    guest.poweroff()?;
    daemon.terminate()?;
    // The next guest, at the next process, has what this one has chosen.
    let daemon = serve(&disk)?;
    let guest = boot(&daemon)?;
    checks.check("after a restart", || after_restart(&guest));
    checks.finish();
    guest.poweroff()?;
    daemon.terminate()
}

fn first(guest: &Guest) -> Result<()> {
    script(
        guest,
        "has 512
         grep -q 'lbaf *0 : ms:0 *lbads:9 .*in use' /tmp/id
         grep -q 'lbaf *1 : ms:0 *lbads:12' /tmp/id
         ! grep -q 'lbaf *2' /tmp/id || exit 1
         verify 512",
    )?;
    Ok(())
}

fn to_4096(guest: &Guest) -> Result<()> {
    script(
        guest,
        "nvme format $d --lbaf=1 --force
         has 4096
         grep -q 'lbaf *1 : ms:0 *lbads:12 .*in use' /tmp/id
         cmp -n 67108864 $d /dev/zero
         ! fio --name=small --filename=$d --direct=1 --ioengine=libaio --rw=write --bs=512 \\
             --size=64k >/dev/null 2>&1 || exit 1
         verify 4k",
    )?;
    Ok(())
}

/// What fio has in flight ends before, or with an error that the kernel repeats or tells of.
fn under_load(guest: &Guest) -> Result<()> {
    script(
        guest,
        "fio --name=load --filename=$d --direct=1 --ioengine=libaio --iodepth=32 --rw=randwrite \\
             --bs=4k --time_based --runtime=20 --size=64m --continue_on_error=all \\
             --output-format=terse >/tmp/load 2>&1 &
         load=$!
         sleep 2
         nvme format $d --lbaf=0 --force
         kill -INT $load; wait $load || true
         has 512
         nvme format $d --lbaf=0 --force
         cmp -n 67108864 $d /dev/zero
         verify 512",
    )?;
    Ok(())
}

fn wrong(guest: &Guest) -> Result<()> {
    script(
        guest,
        "dd if=/dev/urandom of=/tmp/random bs=1M count=1 2>/dev/null
         dd if=/tmp/random of=$d bs=1M oflag=direct 2>/dev/null
         for lbaf in 2 15 16; do
             ! nvme format $d --lbaf=$lbaf --force 2>/dev/null || exit 1
         done
         has 512
         cmp -n 1048576 $d /tmp/random",
    )?;
    Ok(())
}

fn stays(guest: &Guest) -> Result<()> {
    script(
        guest,
        "nvme format $d --lbaf=1 --force
         has 4096
         mkfs.ext4 -q $d; mount $d /mnt
         dd if=/dev/urandom of=/mnt/file bs=1M count=8 2>/dev/null
         (cd /mnt; sha256sum file >sum); umount /mnt",
    )?;
    Ok(())
}

fn after_restart(guest: &Guest) -> Result<()> {
    script(
        guest,
        "has 4096
         mount $d /mnt; cd /mnt; sha256sum -c sum; cd /; umount /mnt
         nvme format $d --lbaf=0 --force
         has 512",
    )?;
    Ok(())
}
