//! Interrupts of every kind that a host may ask for, and hosts without shadow doorbells.

mod common;

use std::time::Duration;

use anyhow::{Result, ensure};
use common::{Disks, run_for};
use harness::Guest;
use harness::served::Volumes;

const FIO: &str = "fio --name=v --filename=$d --ioengine=io_uring --direct=1 --rw=randrw --bsrange=4k-256k --size=32m \
                   --iodepth=8 --verify=crc32c --verify_fatal=1 --verify_state_save=0 >/dev/null";

fn verified(name: &str, options: &[&str], append: &str, expected: &str) -> Result<()> {
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 128)?;
    let mut volumes = Volumes::file(name, &file);
    volumes.options = options.iter().map(ToString::to_string).collect();
    let served = volumes.serve()?;
    let guest = Guest::builder(name)
        .disk(served.disk())
        .append(append)
        .boot()?;
    let interrupts = run_for(
        &guest,
        Duration::from_secs(120),
        &format!("d=$(wait_disk 1 1); {FIO}; grep nvme /proc/interrupts"),
    )?;
    ensure!(
        interrupts.contains(expected),
        "no {expected} among\n{interrupts}"
    );
    guest.poweroff()?;
    served.finish()
}

/// The pin: level-triggered, masked by QEMU after each interrupt.
#[test]
fn a_guest_without_msi_uses_the_pin() -> Result<()> {
    verified("intx", &[], "pci=nomsi", "IO-APIC")
}

/// Every doorbell is a message.
#[test]
fn a_guest_without_shadow_doorbells_rings_by_message() -> Result<()> {
    verified("no-shadow", &["--no-shadow-doorbells"], "", "MSI")
}

/// The doorbell page is mapped into the guest: no message, and no interrupt of the server's sleep.
#[test]
fn a_guest_with_mapped_doorbells_rings_by_store() -> Result<()> {
    verified("mapped", &["--doorbells=mapped"], "", "MSI")
}

/// A worker that sleeps after every command: each one has to wake it.
#[test]
fn a_worker_that_always_sleeps_loses_no_wake_up() -> Result<()> {
    verified("sleeper", &["--idle-window=0"], "", "MSI")
}
