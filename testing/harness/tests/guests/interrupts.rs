//! Interrupts of every kind that a host may ask for, and hosts without shadow doorbells.

use std::path::PathBuf;
use std::process::Command;

use crate::common::{Checks, Disks, LONG_TIMEOUT, Part, in_one_guest, run_for};
use anyhow::{Result, ensure};
use harness::daemon::program;
use harness::progress::{say, skip};
use harness::served::{Controller, ServedVolumes, Volumes};
use harness::{Disk, Guest};

const FIO: &str = "fio --name=v --filename=$d --ioengine=io_uring --direct=1 --rw=randrw --bsrange=4k-256k --size=32m \
                   --iodepth=8 --verify=crc32c --verify_fatal=1 --verify_state_save=0 >/dev/null";

/// What the I/O queues counted in all.
pub struct Counted {
    commands: u64,
    /// Doorbells that arrived as messages.
    messages: u64,
    /// Doorbells that were found in memory: a shadow doorbell buffer, or the page of doorbells.
    memory: u64,
    /// Times that the worker armed EventIdx to sleep.
    arms: u64,
}

/// A disk of a daemon with certain options, in a guest that others share.
pub struct Doorbells {
    name: &'static str,
    /// Kind of interrupts that the guest has.
    expected: &'static str,
    /// Whether the counters are as they must be.
    right: fn(&Counted) -> bool,
    served: ServedVolumes,
    control: PathBuf,
    _dir: tempfile::TempDir,
    _disks: Disks,
}

impl Doorbells {
    fn serve(
        name: &'static str,
        options: &[&str],
        expected: &'static str,
        right: fn(&Counted) -> bool,
    ) -> Result<Option<Box<dyn Part>>> {
        if Controller::chosen()? == Controller::Qemu {
            skip(name, "QEMU's controller has none of these options");
            return Ok(None);
        }
        let disks = Disks::new()?;
        let dir = tempfile::Builder::new().prefix("vnvme-").tempdir()?;
        let control = dir.path().join("control");
        let log = name.replace(' ', "-");
        let mut volumes = Volumes::file(&log, disks.sparse("disk.raw", 128)?);
        volumes.options = options.iter().map(ToString::to_string).collect();
        let words = ["--control".to_string(), control.display().to_string()];
        volumes.options.extend(words);
        Ok(Some(Box::new(Doorbells {
            name,
            expected,
            right,
            served: volumes.serve()?,
            control,
            _dir: dir,
            _disks: disks,
        })))
    }

    /// Every doorbell is a message.
    pub fn without_shadows() -> Result<Option<Box<dyn Part>>> {
        let options = ["--no-shadow-doorbells"];
        Doorbells::serve("no shadow doorbells", &options, "MSI", |counted| {
            counted.memory == 0 && counted.messages > 0
        })
    }

    /// The doorbell page is mapped into the guest: no message. The server's sleep ends by itself.
    pub fn mapped() -> Result<Option<Box<dyn Part>>> {
        let options = ["--doorbells=mapped"];
        Doorbells::serve("mapped doorbells", &options, "MSI", |counted| {
            counted.messages == 0 && counted.memory > 0 && counted.arms > 0
        })
    }

    /// A worker that sleeps after every command: each one has to wake it.
    pub fn of_a_sleeper() -> Result<Option<Box<dyn Part>>> {
        let options = ["--idle-window=0"];
        Doorbells::serve("a worker that always sleeps", &options, "MSI", |counted| {
            counted.arms > counted.commands / 8
        })
    }
}

impl Part for Doorbells {
    fn name(&self) -> &'static str {
        self.name
    }

    fn disks(&self) -> Vec<Disk> {
        vec![self.served.disk()]
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("fio, interrupts and doorbells", || verified(self, guest));
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.served.finish()
    }
}

/// fio with verification; then interrupts and counters are as they must be.
fn verified(part: &Doorbells, guest: &Guest) -> Result<()> {
    let (name, expected) = (part.name, part.expected);
    let interrupts = run_for(
        guest,
        LONG_TIMEOUT,
        &format!("d=$(wait_disk 1 1); {FIO}; grep $(ctrl 1)q /proc/interrupts"),
    )?;
    ensure!(
        interrupts.contains(expected),
        "no {expected} among\n{interrupts}"
    );
    let output = Command::new(program()?)
        .args(["stats", "--json", "--control"])
        .arg(&part.control)
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
    ensure!(
        counted.commands > 300 && (part.right)(&counted),
        "{queues:#}"
    );
    Ok(())
}

/// The pin: level-triggered, masked by QEMU after each interrupt.
#[test]
fn guest_without_msi_uses_pin() -> Result<()> {
    let builder = || Guest::builder("intx").append("pci=nomsi");
    let part = Doorbells::serve("intx", &[], "IO-APIC", |_| true)?;
    in_one_guest(builder, [part])
}

/// The guest's driver has a queue for each of its processors. Two of them run, then the last one.
#[test]
fn guest_with_128_cpus_has_queue_for_each() -> Result<()> {
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
    let said = run_for(&guest, LONG_TIMEOUT, &script)?;
    say(format!("{name}: {}", said.trim()));
    Ok(())
}
