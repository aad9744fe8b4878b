//! The control socket: asks a running `vnvme serve` for its counters.
//!
//! A request is one line of JSON, `{"method":"stats"}`,
//! `{"method":"limits","volume":"a.raw","iops":1000}`,
//! `{"method":"path","path":"generic","all":true}` or
//! `{"method":"device","device":"0000:44:00.0","action":"suspend"}`; the answer is one line of
//! JSON. A thread of its own answers: it reads the workers' counters and sets limits without
//! stopping them.

use crate::devices::{DeviceChange, DeviceRegistry, DeviceStatus};
use crate::direct::{Cycles, PathChange, PathChoice, PathCounters, PathRegistry};
use crate::limits::{Change, LimitRegistry, VolumeLimits};
use crate::outln;
use crate::output::OutputError;
use crate::parts::ublk::DiskStats;
use crate::parts::vhost_blk;
use crate::rings::{RingCounters, RingRegistry};
use crate::ublk::DiskCounters;
use crate::vhost_blk::VhostBlkCounters;
use anyhow::{Context, Result, bail};
use controller::{ControllerStats, QueueStats};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use sync::Unpoisoned;
use vfio_user::Listener;

/// Longest request, in bytes.
const REQUEST_MAX: u64 = 4096;
/// How long a client may take for its request and our answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// How long a device may take to shut down or to come up.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(120);

/// Where workers enter their controllers.
#[derive(Clone, Default)]
pub struct Registry {
    controllers: Arc<Mutex<Vec<ControllerEntry>>>,
    vhost_blk: Arc<Mutex<Vec<VhostBlkEntry>>>,
    disks: Arc<Mutex<Vec<DiskEntry>>>,
    /// Limits of volumes.
    pub limits: LimitRegistry,
    /// Direct paths to devices.
    pub paths: PathRegistry,
    /// Devices below.
    pub devices: DeviceRegistry,
    /// The workers' rings.
    pub rings: RingRegistry,
}

type DiskEntry = (String, Arc<DiskStats>);
type ControllerEntry = (PathBuf, Arc<ControllerStats>);
type VhostBlkEntry = (PathBuf, Arc<vhost_blk::Stats>);

impl Registry {
    /// Enters a controller under its socket.
    pub fn enter(&self, socket: &Path, stats: Arc<ControllerStats>) {
        // A thread that panicked while it held the lock left a whole list: there is no half an
        // entry.
        let mut list = self.controllers.lock().unpoisoned();
        list.push((socket.to_owned(), stats));
    }

    /// Enters a vhost-user-blk export under its socket.
    pub fn enter_vhost_blk(&self, socket: &Path, stats: Arc<vhost_blk::Stats>) {
        let mut list = self.vhost_blk.lock().unpoisoned();
        list.push((socket.to_owned(), stats));
    }

    /// Enters a block device under the name of its volume.
    pub fn enter_disk(&self, volume: &str, stats: Arc<DiskStats>) {
        let mut list = self.disks.lock().unpoisoned();
        list.push((volume.to_owned(), stats));
    }

    /// The counters of all controllers and exports as they are now.
    pub fn snapshot(&self) -> Stats {
        let list = self.controllers.lock().unpoisoned();
        let exports = self.vhost_blk.lock().unpoisoned();
        let disks = self.disks.lock().unpoisoned();
        Stats {
            controllers: list
                .iter()
                .map(|(socket, stats)| ControllerCounters {
                    direct: self.paths.of(socket),
                    ..ControllerCounters::of(socket, stats)
                })
                .collect(),
            vhost_user_blk: exports
                .iter()
                .map(|(socket, stats)| VhostBlkCounters::of(socket, stats))
                .collect(),
            ublk: disks
                .iter()
                .map(|(volume, stats)| DiskCounters::of(volume, stats))
                .collect(),
            volumes: self.limits.list(),
            devices: self.devices.list(),
            rings: self.rings.counters(),
        }
    }
}

/// The answer to `stats`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Stats {
    /// One for each socket.
    pub controllers: Vec<ControllerCounters>,
    /// One for each vhost-user-blk export.
    #[serde(default)]
    pub vhost_user_blk: Vec<VhostBlkCounters>,
    /// One for each block device of the host.
    #[serde(default)]
    pub ublk: Vec<DiskCounters>,
    /// Volumes with limits or weights.
    #[serde(default)]
    pub volumes: Vec<VolumeLimits>,
    /// Devices below.
    #[serde(default)]
    pub devices: Vec<DeviceStatus>,
    /// One for each worker whose io_uring was used.
    #[serde(default)]
    pub rings: Vec<RingCounters>,
}

/// Counters of one controller since the process began.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct ControllerCounters {
    /// Its socket.
    pub socket: PathBuf,
    /// Read commands completed, Compare and Verify among them.
    pub host_reads: u64,
    /// Write commands completed.
    pub host_writes: u64,
    /// Bytes read by the host.
    pub bytes_read: u64,
    /// Bytes written by the host.
    pub bytes_written: u64,
    /// Entries ever made in the error log.
    pub errors: u64,
    /// Controller-level resets.
    pub resets: u64,
    /// Queues that went from one worker to another.
    #[serde(default)]
    pub moves: u64,
    /// Queue pairs that were used, by ID; 0 is the admin queue.
    pub queues: Vec<QueueCounters>,
    /// Namespaces that have a direct path to a device.
    #[serde(default)]
    pub direct: Vec<PathCounters>,
}

/// Counters of one queue pair.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct QueueCounters {
    /// Queue ID.
    pub qid: usize,
    /// Commands fetched.
    pub commands: u64,
    /// Completions posted.
    pub completions: u64,
    /// Doorbells that came as messages.
    pub mmio_doorbells: u64,
    /// Doorbells that were found in memory.
    pub shadow_doorbells: u64,
    /// Times that EventIdx was armed.
    pub arms: u64,
    /// Interrupts sent.
    pub interrupts: u64,
    /// Cycles to send them.
    #[serde(default)]
    pub interrupt_cycles: Cycles,
    /// The worker that it lives on.
    #[serde(default)]
    pub worker: u64,
}

impl ControllerCounters {
    fn of(socket: &Path, stats: &ControllerStats) -> Self {
        let queue = |(qid, q): (usize, &QueueStats)| QueueCounters {
            qid,
            commands: q.commands.get(),
            completions: q.completions.get(),
            mmio_doorbells: q.mmio_doorbells.get(),
            shadow_doorbells: q.shadow_doorbells.get(),
            arms: q.arms.get(),
            interrupts: q.interrupts.get(),
            interrupt_cycles: q.interrupt_summary().into(),
            worker: q.worker.get(),
        };
        ControllerCounters {
            socket: socket.to_owned(),
            host_reads: stats.host_reads(),
            host_writes: stats.host_writes(),
            bytes_read: stats.bytes_read(),
            bytes_written: stats.bytes_written(),
            errors: stats.error_log_entries.get(),
            resets: stats.resets.get(),
            moves: stats.migrations.get(),
            queues: stats
                .queues
                .iter()
                .enumerate()
                .map(queue)
                .filter(|q| q.commands + q.mmio_doorbells > 0)
                .collect(),
            direct: Vec::new(),
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Request {
    method: String,
    #[serde(flatten)]
    arguments: serde_json::Map<String, serde_json::Value>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Reply {
    Stats(Stats),
    Limits(Vec<VolumeLimits>),
    Paths(Vec<(PathBuf, u32, PathChoice)>),
    Device(DeviceStatus),
    Error(String),
}

/// Answers on `listener` until the process ends.
pub fn answer(listener: &Listener, registry: &Registry) {
    loop {
        let mut poll = [rustix::event::PollFd::new(
            listener,
            rustix::event::PollFlags::IN,
        )];
        match rustix::event::poll(&mut poll, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "control socket");
                return;
            }
        }
        match listener.accept() {
            Ok(Some(fd)) => {
                if let Err(error) = serve_one(UnixStream::from(fd), registry) {
                    tracing::debug!(error = format_args!("{error:#}"), "control client");
                }
            }
            Ok(None) => {}
            Err(error) => {
                // Out of descriptors, most likely: not a reason to spin.
                tracing::warn!(%error, "control socket");
                std::thread::sleep(TIMEOUT);
            }
        }
    }
}

fn serve_one(stream: UnixStream, registry: &Registry) -> Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut line = String::new();
    BufReader::new((&stream).take(REQUEST_MAX))
        .read_line(&mut line)
        .context("request")?;
    let reply = match serde_json::from_str::<Request>(&line) {
        Ok(request) if request.method == "stats" => Reply::Stats(registry.snapshot()),
        Ok(request) if request.method == "limits" => change_limits(registry, request.arguments),
        Ok(request) if request.method == "path" => change_paths(registry, request.arguments),
        Ok(request) if request.method == "device" => change_device(registry, request.arguments),
        Ok(request) => Reply::Error(format!(
            "unknown method \"{}\"; known: stats, limits, path, device",
            request.method
        )),
        Err(error) => Reply::Error(format!("no request: {error}")),
    };
    let mut text = serde_json::to_vec(&reply)?;
    text.push(b'\n');
    (&stream).write_all(&text).context("reply")
}

fn change_limits(
    registry: &Registry,
    arguments: serde_json::Map<String, serde_json::Value>,
) -> Reply {
    let change = serde_json::from_value::<Change>(arguments.into()).map_err(|e| e.to_string());
    match change.and_then(|change| registry.limits.change(&change)) {
        Ok(limits) => Reply::Limits(limits),
        Err(error) => Reply::Error(error),
    }
}

fn change_paths(
    registry: &Registry,
    arguments: serde_json::Map<String, serde_json::Value>,
) -> Reply {
    let change = serde_json::from_value::<PathChange>(arguments.into()).map_err(|e| e.to_string());
    match change.and_then(|change| registry.paths.change(&change)) {
        Ok(paths) => Reply::Paths(paths),
        Err(error) => Reply::Error(error),
    }
}

fn change_device(
    registry: &Registry,
    arguments: serde_json::Map<String, serde_json::Value>,
) -> Reply {
    let change =
        serde_json::from_value::<DeviceChange>(arguments.into()).map_err(|e| e.to_string());
    match change.and_then(|change| registry.devices.change(&change)) {
        Ok(status) => Reply::Device(status),
        Err(error) => Reply::Error(error),
    }
}

/// Asks the process behind a control socket for its counters.
pub fn stats(path: &Path) -> Result<Stats> {
    match ask(path, "stats", serde_json::Map::new())? {
        Reply::Stats(stats) => Ok(stats),
        reply => refused(path, reply),
    }
}

/// Changes limits in the process behind a control socket; answers those of the volumes that were
/// meant.
pub fn limits(path: &Path, change: &Change) -> Result<Vec<VolumeLimits>> {
    let arguments = match serde_json::to_value(change)? {
        serde_json::Value::Object(arguments) => arguments,
        _ => serde_json::Map::new(),
    };
    match ask(path, "limits", arguments)? {
        Reply::Limits(limits) => Ok(limits),
        reply => refused(path, reply),
    }
}

/// Changes paths in the process behind a control socket; answers socket, namespace and path of
/// those that were meant.
pub fn paths(path: &Path, change: &PathChange) -> Result<Vec<(PathBuf, u32, PathChoice)>> {
    let arguments = match serde_json::to_value(change)? {
        serde_json::Value::Object(arguments) => arguments,
        _ => serde_json::Map::new(),
    };
    match ask(path, "path", arguments)? {
        Reply::Paths(paths) => Ok(paths),
        reply => refused(path, reply),
    }
}

/// Suspends or resumes a device of the process behind a control socket; answers how it is then.
pub fn device(path: &Path, change: &DeviceChange) -> Result<DeviceStatus> {
    let arguments = match serde_json::to_value(change)? {
        serde_json::Value::Object(arguments) => arguments,
        _ => serde_json::Map::new(),
    };
    match ask_for(path, "device", arguments, DEVICE_TIMEOUT)? {
        Reply::Device(status) => Ok(status),
        reply => refused(path, reply),
    }
}

fn refused<T>(path: &Path, reply: Reply) -> Result<T> {
    match reply {
        Reply::Error(error) => bail!("{}: {error}", path.display()),
        _ => bail!("{}: an answer to another question", path.display()),
    }
}

fn ask(
    path: &Path,
    method: &str,
    arguments: serde_json::Map<String, serde_json::Value>,
) -> Result<Reply> {
    ask_for(path, method, arguments, TIMEOUT)
}

fn ask_for(
    path: &Path,
    method: &str,
    arguments: serde_json::Map<String, serde_json::Value>,
    timeout: Duration,
) -> Result<Reply> {
    let stream = UnixStream::connect(path).with_context(|| {
        format!(
            "{} (is a vnvme serve --control {} running?)",
            path.display(),
            path.display()
        )
    })?;
    stream.set_read_timeout(Some(timeout))?;
    let mut request = serde_json::to_vec(&Request {
        method: method.into(),
        arguments,
    })?;
    request.push(b'\n');
    (&stream).write_all(&request).context("request")?;
    let mut line = String::new();
    BufReader::new(&stream)
        .read_line(&mut line)
        .context("answer")?;
    serde_json::from_str(&line).context("answer")
}

impl Stats {
    /// For people.
    pub fn print(&self) -> Result<(), OutputError> {
        self.ublk.iter().try_for_each(DiskCounters::print)?;
        for c in &self.controllers {
            outln!("{}", c.socket.display());
            outln!(
                "  reads {} ({} MB)   writes {} ({} MB)   errors {}   resets {}",
                c.host_reads,
                c.bytes_read / 1_000_000,
                c.host_writes,
                c.bytes_written / 1_000_000,
                c.errors,
                c.resets
            );
            outln!(
                "  {:>5} {:>12} {:>12} {:>10} {:>12} {:>10} {:>12} {:>9} {:>7}",
                "queue",
                "commands",
                "completions",
                "mmio",
                "shadow",
                "arms",
                "interrupts",
                "mmio/cmd",
                "worker"
            );
            for q in &c.queues {
                let per_command = q.mmio_doorbells as f64 / q.commands.max(1) as f64;
                outln!(
                    "  {:>5} {:>12} {:>12} {:>10} {:>12} {:>10} {:>12} {:>9.3} {:>7}",
                    q.qid,
                    q.commands,
                    q.completions,
                    q.mmio_doorbells,
                    q.shadow_doorbells,
                    q.arms,
                    q.interrupts,
                    per_command,
                    q.worker
                );
            }
            for direct in &c.direct {
                direct.print()?;
            }
        }
        self.vhost_user_blk
            .iter()
            .try_for_each(VhostBlkCounters::print)?;
        self.volumes.iter().try_for_each(VolumeLimits::print)?;
        self.devices.iter().try_for_each(DeviceStatus::print)?;
        self.rings.iter().try_for_each(RingCounters::print)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(registry: &Registry, request: &[u8]) -> String {
        let (client, server) = UnixStream::pair().unwrap();
        (&client).write_all(request).unwrap();
        serve_one(server, registry).unwrap();
        let mut text = String::new();
        (&client).read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn answers_stats_and_explains_the_rest() {
        let registry = Registry::default();
        let stats = Arc::new(ControllerStats::new(2, 1));
        registry.enter(Path::new("/tmp/vm0.sock"), stats.clone());
        if let Some(queue) = stats.queues.get(1) {
            queue.commands.add(7);
            queue.mmio_doorbells.add(2);
        }
        let text = ask(&registry, b"{\"method\":\"stats\"}\n");
        let Reply::Stats(stats) = serde_json::from_str(&text).unwrap() else {
            panic!("{text}");
        };
        assert_eq!(stats.controllers.len(), 1);
        let queues = &stats.controllers[0].queues;
        assert_eq!(queues.len(), 1, "unused queues are left out");
        assert_eq!(
            (queues[0].qid, queues[0].commands, queues[0].mmio_doorbells),
            (1, 7, 2)
        );
        assert!(ask(&registry, b"{\"method\":\"dance\"}\n").contains("dance"));
        assert!(ask(&registry, b"what?\n").contains("error"));
        let long = [b'x'; REQUEST_MAX as usize];
        assert!(ask(&registry, &long).contains("error"));
    }
}
