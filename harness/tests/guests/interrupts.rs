//! Interrupts of every kind that a host may ask for, and hosts without shadow doorbells.

use std::process::Command;

use crate::common::{Disks, LONG, run_for};
use anyhow::{Result, ensure};
use harness::Guest;
use harness::daemon::program;
use harness::progress::{say, skip};
use harness::served::{Controller, Volumes};

const FIO: &str = "fio --name=v --filename=$d --ioengine=io_uring --direct=1 --rw=randrw --bsrange=4k-256k --size=32m \
                   --iodepth=8 --verify=crc32c --verify_fatal=1 --verify_state_save=0 >/dev/null";

/// What the I/O queues counted in all.
struct Counted {
    commands: u64,
    /// Doorbells that came as messages.
    messages: u64,
    /// Doorbells that were found in memory: a shadow doorbell buffer, or the page of doorbells.
    memory: u64,
    /// Times that the worker armed EventIdx to sleep.
    arms: u64,
}

/// fio with verification; the interrupts are of the `expected` kind, and the counters are as
/// `right` wants them.
fn verified(
    name: &str,
    options: &[&str],
    append: &str,
    expected: &str,
    right: fn(&Counted) -> bool,
) -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        skip(name, "QEMU's controller has none of these options");
        return Ok(());
    }
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 128)?;
    let dir = tempfile::Builder::new().prefix("vnvme-").tempdir()?;
    let control = dir.path().join("control");
    let mut volumes = Volumes::file(name, &file);
    volumes.options = options.iter().map(ToString::to_string).collect();
    let words = ["--control".to_string(), control.display().to_string()];
    volumes.options.extend(words);
    let served = volumes.serve()?;
    let guest = Guest::builder(name)
        .disk(served.disk())
        .append(append)
        .boot()?;
    let interrupts = run_for(
        &guest,
        LONG,
        &format!("d=$(wait_disk 1 1); {FIO}; grep nvme /proc/interrupts"),
    )?;
    ensure!(
        interrupts.contains(expected),
        "no {expected} among\n{interrupts}"
    );
    let output = Command::new(program()?)
        .args(["stats", "--json", "--control"])
        .arg(&control)
        .output()?;
    let stats: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let queues = &stats["controllers"][0]["queues"];
    let sum = |key: &str| -> u64 {
        let queues = queues.as_array().into_iter().flatten();
        let io = queues.filter(|queue| queue["qid"] != 0);
        io.filter_map(|queue| queue[key].as_u64()).sum()
    };
    let counted = Counted {
        commands: sum("commands"),
        messages: sum("mmio_doorbells"),
        memory: sum("shadow_doorbells"),
        arms: sum("arms"),
    };
    say(format!(
        "{name}: {} commands, {} doorbell messages, {} doorbells in memory, armed {} times",
        counted.commands, counted.messages, counted.memory, counted.arms
    ));
    ensure!(counted.commands > 300 && right(&counted), "{queues:#}");
    guest.poweroff()?;
    served.finish()
}

/// The pin: level-triggered, masked by QEMU after each interrupt.
#[test]
fn a_guest_without_msi_uses_the_pin() -> Result<()> {
    verified("intx", &[], "pci=nomsi", "IO-APIC", |_| true)
}

/// Every doorbell is a message.
#[test]
fn a_guest_without_shadow_doorbells_rings_by_message() -> Result<()> {
    let options = ["--no-shadow-doorbells"];
    verified("no-shadow", &options, "", "MSI", |counted| {
        counted.memory == 0 && counted.messages > 0
    })
}

/// The doorbell page is mapped into the guest: no message, and no interrupt of the server's sleep.
#[test]
fn a_guest_with_mapped_doorbells_rings_by_store() -> Result<()> {
    let options = ["--doorbells=mapped"];
    verified("mapped", &options, "", "MSI", |counted| {
        counted.messages == 0 && counted.memory > 0 && counted.arms == 0
    })
}

/// A worker that sleeps after every command: each one has to wake it.
#[test]
fn a_worker_that_always_sleeps_loses_no_wake_up() -> Result<()> {
    let options = ["--idle-window=0"];
    verified("sleeper", &options, "", "MSI", |counted| {
        counted.arms > counted.commands / 8
    })
}

/// The guest's driver has a queue for each of its processors. Two of them run, then the last one.
#[test]
fn a_queue_for_each_of_128_processors() -> Result<()> {
    let name = "queues";
    if Controller::chosen()? == Controller::Qemu {
        skip(name, "QEMU's controller has no such option");
        return Ok(());
    }
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 128)?;
    let mut volumes = Volumes::file(name, &file);
    volumes.options = ["--io-queues", "128"].map(str::to_owned).into();
    let served = volumes.serve()?;
    let guest = Guest::builder(name)
        .disk(served.disk())
        .cpus(128)
        .append("maxcpus=2")
        .boot()?;
    let script = format!(
        "d=$(wait_disk 1 1)
         dmesg | grep 'nvme.*queues'
         [ $(cat /sys/class/nvme/$(ctrl 1)/queue_count) = 129 ]
         [ $(ls /sys/block/${{d##*/}}/mq | wc -l) = 128 ]
         {FIO}
         told() {{
             grep -w nvme0q128 /proc/interrupts | tr ' ' '\\n' | grep -cE '^[1-9][0-9]*$' || true
         }}
         [ $(told) = 0 ]
         echo 1 >/sys/devices/system/cpu/cpu127/online
         fio --name=q --filename=$d --ioengine=psync --direct=1 --rw=randread --bs=4k --size=1m \
             --cpus_allowed=127 >/dev/null
         [ $(told) = 1 ]"
    );
    let said = run_for(&guest, LONG, &script)?;
    say(format!("{name}: {}", said.trim()));
    Ok(())
}
