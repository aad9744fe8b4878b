//! A zoned namespace under Linux: what its block layer makes of it, and fio.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

mod common;

use std::path::Path;

use anyhow::Result;
use common::{Checks, Disks, LONG, run, run_for};
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Guest};

/// `$d` is the disk.
const LIB: &str = "d=$(wait_disk 1 1); q=/sys/block/$(basename $d)/queue";

/// A zone has 8192 blocks of 512 bytes, 6144 of which can be written.
const ZONES: &str = "zone-size=4M&zone-capacity=3M&max-open-zones=4&max-active-zones=6";

fn serve(disk: &Path) -> Result<Daemon> {
    let table = disk.with_extension("zones");
    let volume = format!("{}?{ZONES}&zone-table={}", disk.display(), table.display());
    Daemon::builder("zones").volume(volume).start()
}

fn boot(daemon: &Daemon) -> Result<Guest> {
    Guest::builder("zones").vfio_user(daemon.socket()).boot()
}

fn script(guest: &Guest, text: &str) -> Result<String> {
    run(guest, &format!("{LIB}\n{text}"))
}

#[test]
fn a_zoned_disk() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        skip("zones::a_zoned_disk", "the zones are vnvme's");
        return Ok(());
    }
    let disks = Disks::new()?;
    // Behind the last zone 1 MiB is left.
    let disk = disks.sparse("disk.raw", 65)?;
    let daemon = serve(&disk)?;
    let guest = boot(&daemon)?;
    let mut checks = Checks::new("zones");
    checks.check("what Linux sees", || sees(&guest));
    checks.check("fio verify, --zonemode=zbd", || fio(&guest));
    checks.finish();
    guest.poweroff()?;
    daemon.terminate()
}

fn sees(guest: &Guest) -> Result<()> {
    script(
        guest,
        "[ $(cat $q/zoned) = host-managed ]; [ $(cat $q/nr_zones) = 16 ]
         [ $(cat $q/chunk_sectors) = 8192 ]; [ $(cat $q/max_open_zones) = 4 ]
         [ $(cat $q/max_active_zones) = 6 ]; [ $(cat $q/zone_append_max_bytes) -gt 65536 ]
         [ $(blockdev --getsize64 $d) = 67108864 ]",
    )?;
    Ok(())
}

/// Every zone is written from its start, several at a time, and read back.
fn fio(guest: &Guest) -> Result<()> {
    let text = format!(
        "{LIB}
         fio --name=zones --filename=$d --direct=1 --zonemode=zbd --ioengine=libaio --iodepth=8 \\
             --rw=randwrite --bs=64k --size=64m --io_size=40m --max_open_zones=4 --verify=crc32c \\
             --verify_backlog=64 --output-format=terse >/tmp/fio || {{ cat /tmp/fio; exit 1; }}
         fio --name=seq --filename=$d --direct=1 --zonemode=zbd --ioengine=libaio --iodepth=4 \\
             --rw=write --bs=128k --size=24m --do_verify=1 --verify=crc32c --output-format=terse \\
             >/tmp/fio || {{ cat /tmp/fio; exit 1; }}"
    );
    run_for(guest, LONG, &text)?;
    Ok(())
}
