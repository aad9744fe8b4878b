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
use harness::{Cache, Daemon, Disk, Guest};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Longer than a minute, for what writes much.
pub const LONG: Duration = Duration::from_secs(240);

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
        ensure!(began.elapsed() < LONG, "no process follows");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Runs the checks of one boot one after the other, goes on after one that fails, and
/// fails at the end if any did.
pub struct Checks {
    suite: &'static str,
    failed: Vec<&'static str>,
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
                self.failed.push(name);
            }
        }
    }

    pub fn finish(self) {
        assert!(
            self.failed.is_empty(),
            "{}: failed: {:?}",
            self.suite,
            self.failed
        );
    }
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
    // Programs with all that a debugger needs lie in the guest's memory, beside what they do.
    let mut builder = Guest::builder(name).viommu().memory_mib(1024).disk(device);
    if let Some(kernel) = kernel {
        builder = builder.kernel(kernel);
    }
    let guest = builder.boot()?;
    guest.push_programs(programs)?;
    Ok(guest)
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
/// `ctrl N`: the N-th NVMe controller in PCI order (`nvme0`). The driver probes in parallel, so its
/// own numbers may differ. `disk N NSID`: the block device of a namespace of it (`/dev/nvme0n1`).
/// `bdf N`: its PCI address.
pub const LIB: &str = r#"
bdf() { ls -d /sys/bus/pci/devices/*/class | while read -r c; do [ "$(cat $c)" = 0x010802 ] && basename ${c%/class}; done | sed -n "$1p"; }
ctrl() { basename /sys/bus/pci/devices/$(bdf $1)/nvme/nvme*; }
disk() {
    for n in /sys/class/nvme/$(ctrl $1)/nvme*n*; do
        [ -e $n/nsid ] && [ "$(cat $n/nsid)" = "$2" ] && echo /dev/$(basename $n | sed 's/c[0-9]*n/n/') && return 0
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
