//! What the guest tests share: disks, checks that report by name, and a few
//! shell functions for the guest.

// Each test program uses its own part of this module.
#![allow(dead_code)]

pub mod ceph;
pub mod kill_loop;
pub mod layers;
pub mod nbd;
pub mod nvmet;

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use harness::cache::checkout;
use harness::{Cache, Daemon, Disk, Guest, GuestBuilder};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Longer than a minute, for what writes much.
pub const LONG_TIMEOUT: Duration = Duration::from_secs(240);

/// Returns the number in an environment variable, or the default where it is not set.
pub fn number(name: &str, default: usize) -> Result<usize> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name} is a number")),
        Err(_) => Ok(default),
    }
}

/// Ends the process that serves as nobody expects, and waits until its keeper has another.
pub fn kill_serving(daemon: &Daemon) -> Result<()> {
    let serving = daemon.serving();
    let pid = i32::try_from(serving).ok().and_then(Pid::from_raw);
    kill_process(pid.context("a process ID")?, Signal::KILL)?;
    let began = Instant::now();
    // Between two of them, the keeper is what `serving` answers.
    while [serving, daemon.process().pid()].contains(&daemon.serving()) {
        ensure!(began.elapsed() < LONG_TIMEOUT, "no process follows");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Runs the checks of one boot one after the other, continues after one that fails, and fails at
/// the end if any did.
pub struct Checks {
    suite: &'static str,
    failed: Vec<String>,
}

impl Checks {
    pub fn new(suite: &'static str) -> Checks {
        Checks {
            suite,
            failed: Vec::new(),
        }
    }

    pub fn check(&mut self, name: &'static str, body: impl FnOnce() -> Result<()>) {
        let started = Instant::now();
        let result = body();
        let seconds = started.elapsed().as_secs_f32();
        match result {
            Ok(()) => eprintln!("{}: {name}: ok ({seconds:.1} s)", self.suite),
            Err(e) => {
                eprintln!("{}: {name}: FAILED ({seconds:.1} s): {e:#}", self.suite);
                self.failed.push(format!("{}: {name}", self.suite));
            }
        }
    }

    pub fn finish(self) {
        assert!(self.failed.is_empty(), "failed: {:?}", self.failed);
    }
}

/// Disks and checks of one subject, in a guest that several subjects share. A failed check leaves
/// the other subjects alone: each has daemons and controllers of its own.
pub trait Part {
    /// Prefix of its checks in the output.
    fn name(&self) -> &'static str;

    /// Its controllers, in the order in which scripts count them from 1.
    fn disks(&self) -> Vec<Disk>;

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()>;

    /// Ends its daemons and starts them again, between two guests.
    fn restart(&mut self) -> Result<()> {
        Ok(())
    }

    /// Checks in the second guest.
    fn check_again(&mut self, _: &Guest, _: &mut Checks) -> Result<()> {
        Ok(())
    }

    /// Ends its daemons.
    fn end(self: Box<Self>) -> Result<()>;
}

/// Runs parts in one guest; those that are `None` were skipped.
pub fn in_one_guest(
    builder: impl Fn() -> GuestBuilder,
    parts: impl IntoIterator<Item = Option<Box<dyn Part>>>,
) -> Result<()> {
    run_parts(builder, parts, false)
}

/// Runs parts in a guest, restarts their daemons, and runs the rest in a second guest.
pub fn in_two_guests(
    builder: impl Fn() -> GuestBuilder,
    parts: impl IntoIterator<Item = Option<Box<dyn Part>>>,
) -> Result<()> {
    run_parts(builder, parts, true)
}

fn run_parts(
    builder: impl Fn() -> GuestBuilder,
    parts: impl IntoIterator<Item = Option<Box<dyn Part>>>,
    again: bool,
) -> Result<()> {
    let mut parts: Vec<_> = parts.into_iter().flatten().collect();
    if parts.is_empty() {
        return Ok(());
    }
    let mut checks = Checks::new("");
    for second in [false, true] {
        if second && !again {
            continue;
        }
        let disks = parts.iter().flat_map(|part| part.disks());
        let guest = disks.fold(builder(), GuestBuilder::disk).boot()?;
        let mut behind = 0;
        for part in &mut parts {
            checks.suite = part.name();
            let begun = begin_part(&guest, behind).and_then(|()| {
                if second {
                    part.check_again(&guest, &mut checks)
                } else {
                    part.check(&guest, &mut checks)
                }
            });
            if begun.is_err() {
                checks.check("begun", || begun);
            }
            behind += part.disks().len();
        }
        checks.suite = "guest";
        checks.check("power off", || guest.poweroff());
        if again && !second {
            for part in &mut parts {
                checks.suite = part.name();
                checks.check("daemons are started again", || part.restart());
            }
        }
    }
    for part in parts {
        checks.suite = part.name();
        checks.check("SIGTERM", || part.end());
    }
    checks.finish();
    Ok(())
}

/// Has scripts count controllers behind the first `number`, and removes what another part has left:
/// its mounts, files and messages of the kernel.
pub fn begin_part(guest: &Guest, number: usize) -> Result<()> {
    guest
        .run(&format!(
            "for at in $(sed -n 's:^/dev/[a-z0-9]* \\([^ ]*\\) .*:\\1:p' /proc/mounts); do
                 [ $at = /tools ] || umount -l $at
             done
             rm -rf /tmp/* && echo {number} >/tmp/behind && dmesg -c >/dev/null"
        ))
        .map(drop)
}

/// A directory for disks, and sparse files in it.
pub struct Disks(tempfile::TempDir);

impl Disks {
    pub fn new() -> Result<Disks> {
        Ok(Disks(Cache::open()?.scratch()?))
    }

    pub fn dir(&self) -> &Path {
        self.0.path()
    }

    /// A sparse file of `mib` MiB.
    pub fn sparse(&self, name: &str, mib: u64) -> Result<PathBuf> {
        let path = self.0.path().join(name);
        File::create(&path)?.set_len(mib << 20)?;
        Ok(path)
    }
}

/// Boots a guest with QEMU's own NVMe device on a file, behind an IOMMU, and programs of ours.
pub fn boot_with_device(
    name: &str,
    file: &Path,
    kernel: Option<PathBuf>,
    programs: &[PathBuf],
) -> Result<Guest> {
    let device = Disk::QemuNvme {
        files: vec![file.to_path_buf()],
        block_size: 512,
        read_only: false,
    };
    let builder = Guest::builder(name).viommu().memory_mib(1024);
    let mut builder = builder.disk(device).programs(programs);
    if let Some(kernel) = kernel {
        builder = builder.kernel(kernel);
    }
    builder.boot()
}

/// A newer kernel than Debian's: the one that the environment names, or one that lies beside the
/// checkout.
pub fn newer_kernel() -> Option<PathBuf> {
    let beside = checkout().parent()?.join("shared/guest/vmlinux");
    let named = std::env::var_os("VNVME_KERNEL").filter(|v| !v.is_empty());
    let kernel = named.map_or(beside, PathBuf::from);
    kernel.is_file().then_some(kernel)
}

/// Bytes that a file really takes on the host's disk.
pub fn allocated(path: &Path) -> Result<u64> {
    Ok(path.metadata()?.blocks() * 512)
}

/// Shell functions for every script.
///
/// `ctrl N`: the N-th NVMe controller in PCI order (`nvme0`), behind those of other parts. The
/// driver probes in parallel, so its own numbers may differ. `disk N NSID`: the block device of a
/// namespace of it (`/dev/nvme0n1`). `bdf N`: its PCI address. `zeroes FILE SKIP COUNT`: so many
/// MiB of it are all zeroes (by a checksum: busybox compares 10 MB a second).
pub const LIB: &str = r#"
bdf() {
    local left=0 p class
    [ ! -e /tmp/behind ] || read -r left </tmp/behind
    left=$((left + $1))
    for p in /sys/bus/pci/devices/*; do
        read -r class <$p/class
        [ $class = 0x010802 ] && left=$((left - 1)) && [ $left = 0 ] && echo ${p##*/} && return 0
    done
    return 1
}
ctrl() {
    local c
    for c in /sys/bus/pci/devices/$(bdf $1)/nvme/nvme*; do
        [ -e $c ] && echo ${c##*/} && return 0
    done
    return 1
}
disk() {
    local n id
    for n in /sys/class/nvme/$(ctrl $1)/nvme*n*; do
        [ -e $n/nsid ] && read -r id <$n/nsid && [ $id = $2 ] || continue
        n=${n##*/}
        case $n in *c*) n=${n%c*}n${n##*n} ;; esac
        echo /dev/$n && return 0
    done
    return 1
}
wait_disk() {
    for try in $(seq 300); do
        d=$(disk $1 $2 2>/dev/null) && [ -b "$d" ] && [ "$(cat /sys/class/nvme/$(ctrl $1)/state)" = live ] && echo $d && return 0
        sleep 0.1
    done
    echo "no namespace $2 on controller $1" >&2
    return 1
}
zeroes() {
    [ "$(dd if=$1 bs=1M skip=$2 count=$3 iflag=direct 2>/dev/null | md5sum)" = \
        "$(dd if=/dev/zero bs=1M count=$3 2>/dev/null | md5sum)" ] && return 0
    echo "not all zeroes in $3 MiB of $1, from $2 MiB on"
    return 1
}
"#;

/// Runs a script with [`LIB`] that must succeed.
pub fn run(guest: &Guest, script: &str) -> Result<String> {
    run_for(guest, Duration::from_secs(180), script)
}

/// Runs a script with [`LIB`] that must succeed within a time.
pub fn run_for(guest: &Guest, limit: Duration, script: &str) -> Result<String> {
    guest.run_for(limit, &format!("{LIB}\nset -e\n{script}"))
}

/// Runs a script that prints JSON, perhaps after a line of something else.
pub fn json(guest: &Guest, script: &str) -> Result<Value> {
    let text = run(guest, script)?;
    let at = text
        .find('{')
        .with_context(|| format!("no JSON from {script}: {text}"))?;
    serde_json::from_str(text.get(at..).unwrap_or_default())
        .with_context(|| format!("JSON from {script}: {text}"))
}
