//! Live migration of a Linux guest with a vhost-user disk, between QEMU processes that each have a
//! vnvme of their own, on one raw file.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::{Disks, LONG_TIMEOUT};
use crate::vhost_blk::{Export, run};
use anyhow::{Context, Result, ensure};
use harness::served::Controller;
use harness::{Guest, GuestBuilder};
use serde_json::json;

const MIB: u64 = 128;

/// Copies of memory before the guest may be stopped: pages that are written during one are in the
/// log of the next.
const PASSES: u64 = 4;

/// Migrations from one process to the other.
const HOPS: usize = 4;

/// Random writes that are read and compared, beside reads of data that were written before. Both go
/// on until [`STOP`], or until they find wrong data.
const LOAD: &str = "
    options='--filename='$d' --ioengine=io_uring --direct=1 --verify=crc32c --verify_fatal=1 --verify_state_save=0'
    fio --name=before $options --rw=write --bs=16k --iodepth=8 --offset=64m --size=32m --do_verify=0
    { set +e; fio $options --iodepth=16 --loops=1000000 \
          --name=written --rw=randwrite --bsrange=4k-64k --size=16m --fsync=64 \
          --name=read --rw=randread --bs=16k --offset=64m --size=32m </dev/null >/tmp/fio.log 2>&1
      echo $? >/tmp/fio.status; } &
    for try in $(seq 600); do [ -s /tmp/fio.log ] && break; sleep 0.1; done";

/// fio ends with status 128 when a signal stops it; jobs that have found wrong data show an error.
const STOP: &str = "
    [ ! -e /tmp/fio.status ] && kill -INT $(pidof fio)
    for try in $(seq 1800); do [ -e /tmp/fio.status ] && break; sleep 0.1; done
    [ \"$(cat /tmp/fio.status)\" = 128 ] && [ $(grep -c 'err= 0' /tmp/fio.log) = 2 ] ||
        { cat /tmp/fio.status; tail -n 30 /tmp/fio.log; dmesg | tail -n 20; exit 1; }";

fn machine(name: &str, export: &Export) -> GuestBuilder {
    let chardev = format!("socket,id=v0,path={}", export.socket().display());
    Guest::builder(name)
        .qemu_args(["-chardev", &chardev])
        .qemu_args(["-device", "vhost-user-blk-pci,id=disk0,chardev=v0"])
}

/// Waits until `vnvme list` shows this state of the disk.
fn wait_state(export: &Export, wanted: &str) -> Result<()> {
    let deadline = Instant::now() + LONG_TIMEOUT;
    loop {
        let list = export.ask("list")?;
        let disks = list.as_array().context("no list of disks")?;
        let disk = disks.iter().find(|disk| disk["kind"] == "vhost-user-blk");
        if disk.is_some_and(|disk| disk["state"] == wanted) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "not {wanted}: {list}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The load goes on, by this export.
fn works(export: &Export) -> Result<()> {
    wait_state(export, "attached")?;
    export.wait_requests(100, LONG_TIMEOUT)
}

#[test]
fn guest_migrates_between_qemu_processes() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        harness::progress::skip("guest_migrates_between_qemu_processes", "it needs vnvme");
        return Ok(());
    }
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", MIB)?;
    let exports = [Export::new(&file)?, Export::new(&file)?];
    // The limit of the second disk lets requests be outstanding when the guest is stopped.
    let daemons = [
        exports[0].serve("")?,
        exports[1].serve("&incoming=on&iops=500")?,
    ];
    let mut guest = machine("migration-0", &exports[0]).boot()?;
    run(&guest, LOAD)?;
    works(&exports[0])?;
    cancel(&guest, &exports[0])?;
    for hop in 1..=HOPS {
        let (from, to) = (&exports[(hop + 1) % 2], &exports[hop % 2]);
        wait_state(to, "incoming")?;
        let target = machine(&format!("migration-{hop}"), to).incoming().boot()?;
        works(from)?;
        guest.migrate(&target, PASSES, LONG_TIMEOUT)?;
        works(to)?;
        wait_state(from, "incoming")?;
        // The source's QEMU ends here.
        guest = target;
    }
    run(&guest, STOP)?;
    let sum = run(
        &guest,
        "dd if=$d bs=1M iflag=direct 2>/dev/null | sha256sum",
    )?;
    guest.poweroff()?;
    for daemon in &daemons {
        daemon.terminate()?;
        let log = daemon.log()?;
        ensure!(!log.contains(" WARN ") && !log.contains("ERROR"), "{log}");
    }
    let output = Command::new("sha256sum").arg(&file).output()?;
    let file_sum = String::from_utf8(output.stdout)?;
    ensure!(
        sum.split_whitespace().next() == file_sum.split_whitespace().next(),
        "the guest's disk: {sum}, its file: {file_sum}"
    );
    Ok(())
}

/// A guest stays where it is: its migration is cancelled, and then ends at nobody.
fn cancel(guest: &Guest, export: &Export) -> Result<()> {
    const NOBODY: &str = "exec:cat >/dev/null";
    guest.begin_migration(NOBODY)?;
    works(export)?;
    guest.qmp("migrate_cancel", json!({}))?;
    guest.wait_migration("cancelled", LONG_TIMEOUT)?;
    works(export)?;
    guest.begin_migration(NOBODY)?;
    guest.finish_migration(PASSES, LONG_TIMEOUT)?;
    wait_state(export, "incoming")?;
    guest.qmp("cont", json!({}))?;
    works(export)
}
