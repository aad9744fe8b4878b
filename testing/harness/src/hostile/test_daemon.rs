//! The daemon under attack: its disks, its directory, and the system's figures about it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;

use super::client::fuse;
use crate::process::Process;

/// Namespaces of the hostile client's controller: in memory, in a file, a large one in memory, and
/// one in a file that hangs.
pub(super) const MEMORY_NSID: u32 = 1;
pub(super) const FILE_NSID: u32 = 2;
pub(super) const LARGE_NSID: u32 = 3;
pub(super) const SILENT_NSID: u32 = 4;
/// Bytes of the first, of the neighbour's in memory, and of the export's volume.
pub(super) const VOLUME_SIZE: u64 = 64 << 20;
/// Size of the files.
pub(super) const FILE_SIZE: u64 = 16 << 20;
/// Size of the third namespace.
pub(super) const LARGE_SIZE: u64 = 2 << 30;
/// Namespaces of the good neighbour: in memory, and in a file that keeps flushed data.
pub(super) const GOOD_MEMORY_NSID: u32 = 1;
pub(super) const GOOD_FILE_NSID: u32 = 2;

/// The daemon is killed then, whatever it does.
const LIFE: Duration = Duration::from_secs(120);

pub(super) fn good_socket(dir: &Path) -> PathBuf {
    dir.join("good.sock")
}

pub(super) fn bad_socket(dir: &Path) -> PathBuf {
    dir.join("bad.sock")
}

/// A controller that nobody uses, until a newcomer tries.
pub(super) fn late_socket(dir: &Path) -> PathBuf {
    dir.join("late.sock")
}

pub(super) fn vhost_socket(dir: &Path) -> PathBuf {
    dir.join("vhost.sock")
}

pub(super) fn control_socket(dir: &Path) -> PathBuf {
    dir.join("control.sock")
}

/// The file behind the good neighbour's second namespace.
pub(super) fn good_file(dir: &Path) -> PathBuf {
    dir.join("good.raw")
}

fn configuration(dir: &Path, silent: bool) -> String {
    let controller = |socket: PathBuf, volumes: &[String]| {
        let mut text = format!("[[controller]]\nsocket = {socket:?}\n");
        for volume in volumes {
            text.push_str(&format!("[[controller.namespace]]\nvolume = {volume:?}\n"));
        }
        text
    };
    let memory = format!("mem://{}M", VOLUME_SIZE >> 20);
    let file = |path: PathBuf| path.display().to_string();
    let mut bad = vec![
        memory.clone(),
        file(dir.join("bad.raw")),
        format!("mem://{}M", LARGE_SIZE >> 20),
    ];
    if silent {
        bad.push(file(fuse::mount_point(dir).join("0")));
    }
    let good = [memory.clone(), file(good_file(dir))];
    let export = format!(
        "[[vhost-user-blk]]\nsocket = {:?}\nvolume = {memory:?}\n",
        vhost_socket(dir)
    );
    [
        controller(good_socket(dir), &good),
        controller(bad_socket(dir), &bad),
        controller(late_socket(dir), &["mem://1M".to_owned()]),
        export,
    ]
    .concat()
}

/// Resources of the daemon by the system's figures, its children included.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Footprint {
    /// Resident memory in KiB.
    pub(super) rss_kib: u64,
    pub(super) descriptors: u64,
}

/// A daemon with a directory of its own.
pub(super) struct TestDaemon {
    pub(super) dir: PathBuf,
    process: Process,
    log: PathBuf,
}

impl TestDaemon {
    /// Starts `program` in a directory that exists, with default options and one worker.
    pub(super) fn start(program: &Path, dir: &Path, silent: bool) -> Result<Self> {
        for name in ["good.raw", "bad.raw"] {
            let file = File::create(dir.join(name))?;
            // Blocks that exist: the file system's allocation is not measured.
            (&file).write_all(&vec![0; FILE_SIZE as usize])?;
        }
        let config = dir.join("vnvme.toml");
        fs::write(&config, configuration(dir, silent))?;
        let log = dir.join("log");
        let words: Vec<OsString> = vec![
            program.into(),
            "serve".into(),
            "--workers".into(),
            "1".into(),
            "--config".into(),
            config.into(),
            "--control".into(),
            control_socket(dir).into(),
        ];
        let process = Process::start("vnvme-attacked", &words, &[], &log, LIFE)?;
        let daemon = Self {
            dir: dir.to_owned(),
            process,
            log,
        };
        // The socket made last, and the control socket: its thread starts after the workers.
        let deadline = Instant::now() + Duration::from_secs(20);
        while !vhost_socket(dir).exists() || control_answers(dir).is_err() {
            if let Some(status) = daemon.process.ended() {
                bail!("the daemon ended ({status}): {}", daemon.tail());
            }
            ensure!(
                Instant::now() < deadline,
                "the daemon does not serve: {}",
                daemon.tail()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(daemon)
    }

    /// Returns the daemon's processes.
    pub(super) fn family(&self) -> Vec<u32> {
        family(self.process.pid())
    }

    pub(super) fn is_alive(&self) -> bool {
        self.process.ended().is_none()
    }

    pub(super) fn log_bytes(&self) -> u64 {
        fs::metadata(&self.log).map_or(0, |meta| meta.len())
    }

    /// The end of its log.
    pub(super) fn tail(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(4)..].join(" | ")
    }

    pub(super) fn footprint(&self) -> Footprint {
        let mut all = Footprint::default();
        for pid in self.family() {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let rss = status.lines().find(|line| line.starts_with("VmRSS:"));
            let rss = rss.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
            all.rss_kib += rss.unwrap_or(0u64);
            let fds = fs::read_dir(format!("/proc/{pid}/fd"));
            all.descriptors += fds.map_or(0, |fds| fds.count() as u64);
        }
        all
    }

    /// Asks the daemon to end. Returns the duration, and whether it reported success. `None`: it
    /// did not end.
    pub(super) fn terminate(&self, limit: Duration) -> Option<(Duration, bool)> {
        let start = Instant::now();
        self.process.signal(Signal::TERM).ok()?;
        let status = self.process.wait(limit).ok()?;
        Some((start.elapsed(), status.success()))
    }

    /// Kills it; whether it ended within this time.
    pub(super) fn kill(&self, limit: Duration) -> bool {
        let _ = self.process.signal(Signal::KILL);
        self.process.wait(limit).is_ok()
    }
}

/// A process and all that it started.
fn family(pid: u32) -> Vec<u32> {
    let mut all = vec![pid];
    let mut next = 0;
    while let Some(pid) = all.get(next).copied() {
        next += 1;
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
            continue;
        };
        for task in tasks.flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            all.extend(
                children
                    .split_whitespace()
                    .filter_map(|c| c.parse::<u32>().ok()),
            );
        }
    }
    all
}

/// Asks the control socket for its counters.
pub(super) fn control_answers(dir: &Path) -> Result<Duration> {
    let start = Instant::now();
    let limit = Some(Duration::from_secs(8));
    let mut stream = UnixStream::connect(control_socket(dir))?;
    stream.set_read_timeout(limit)?;
    stream.set_write_timeout(limit)?;
    stream.write_all(b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    ensure!(answer.contains("controllers"), "no counters: {answer:?}");
    Ok(start.elapsed())
}

/// Connects a client that was not there before, with its memory, and reads a register.
pub(super) fn newcomer(dir: &Path) -> Result<Duration> {
    let start = Instant::now();
    let mut guest = super::client::nvme::Guest::attach(&late_socket(dir)).context("newcomer")?;
    guest.read32(super::client::nvme::REG_CSTS)?;
    Ok(start.elapsed())
}
