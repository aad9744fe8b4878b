//! Volumes as block devices of the host: the `[[ublk]]` tables of a configuration, and `vnvme ublk`.

use crate::balance::Spread;
use crate::control::Registry;
use crate::open::{Opened, Opener, is_within};
use crate::outln;
use crate::output::OutputError;
use crate::parts::ublk::{Disk, DiskOptions, DiskStats, QueueSetup, QueueStats, remove};
use crate::serve::{LoopOptions, MAX_WORKERS, ServeOptions, serve};
use crate::sizes::Sizes;
use crate::spec::{NamespaceSpec, Specs, once, take_options, volume_url};
use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

/// Between two looks whether the kernel has taken the device away.
const ALIVE: Timespec = Timespec {
    tv_sec: 2,
    tv_nsec: 0,
};

/// One block device of the host.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct UblkSpec {
    /// Path or URL.
    #[serde(deserialize_with = "volume_url")]
    pub volume: String,
    /// N of `/dev/ublkbN`; the kernel's choice when not given.
    pub id: Option<u32>,
    /// Queues: each is served by one worker.
    #[serde(default = "one")]
    pub queues: u16,
    /// Requests of each queue.
    #[serde(default = "depth")]
    pub depth: u16,
    /// Logical block size in bytes.
    pub block_size: Option<u32>,
    /// Refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// The device outlives a killed process, and waits for the next one.
    #[serde(default)]
    pub recover: bool,
}

fn one() -> u16 {
    1
}

fn depth() -> u16 {
    128
}

impl UblkSpec {
    fn namespace(&self) -> NamespaceSpec {
        NamespaceSpec {
            volume: self.volume.clone(),
            nsid: None,
            block_size: self.block_size,
            read_only: self.read_only,
            nguid: None,
            eui64: None,
            path: None,
        }
    }

    /// Takes the disk's own option (block-size) out of the volume's URL; the others are the
    /// volume's.
    pub fn take_url_options(&mut self) -> Result<()> {
        let text = self.volume.clone();
        self.volume = take_options(&text, |key, value| {
            if key != "block-size" {
                return Ok(false);
            }
            let number = value
                .parse()
                .with_context(|| format!("{text}: {key}={value}"));
            once(&mut self.block_size, key, number?)?;
            Ok(true)
        })?;
        Ok(())
    }

    /// The disk, its queues with the workers that `serve` passes them to; `resized` becomes
    /// readable when its volume has been resized.
    fn start(
        &self,
        opener: &Opener,
        sizes: &Sizes,
        resized: &Arc<OwnedFd>,
        serve: &mut dyn FnMut(QueueSetup),
    ) -> Result<Disk> {
        let Opened { volume, device, .. } = opener.open(&self.namespace())?;
        let options = DiskOptions {
            id: self.id,
            queues: self.queues,
            depth: self.depth,
            block_size: self.block_size,
            recover: self.recover,
        };
        let mut register = |memory: &dma::Memory| -> Box<dyn Any + Send> {
            let registered = device.as_ref().map(|device| device.register(memory));
            match registered.transpose() {
                Ok(registration) => Box::new(registration),
                Err(error) => {
                    tracing::warn!(%error, "data is copied on its way to a device");
                    Box::new(())
                }
            }
        };
        let disk = Disk::start(volume.clone(), options, &mut register, serve);
        let disk = disk.with_context(|| self.volume.clone())?;
        if !is_within(&self.volume) {
            sizes.watch(volume, resized);
        }
        Ok(disk)
    }
}

/// A block device that is served.
struct Ublk {
    disk: Disk,
    volume: String,
    /// Readable when the volume has been resized.
    resized: Arc<OwnedFd>,
}

/// All block devices of the process: their queues are with the workers; one thread makes them,
/// tells the kernel of their sizes, and removes them.
pub struct Disks {
    all: Vec<Ublk>,
    /// Readable when the process is asked to end.
    stop: OwnedFd,
}

impl Disks {
    /// Makes the devices; `serve` passes a queue to a worker.
    pub fn new(
        specs: &[UblkSpec],
        stop: OwnedFd,
        opener: &Opener,
        registry: &Registry,
        sizes: &Sizes,
        serve: &mut dyn FnMut(QueueSetup),
    ) -> Result<Self> {
        let mut all = Vec::new();
        for spec in specs {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            let resized = Arc::new(eventfd(0, flags).context("eventfd")?);
            let disk = spec.start(opener, sizes, &resized, serve)?;
            registry.enter_disk(&spec.volume, disk.stats());
            all.push(Ublk {
                disk,
                volume: spec.volume.clone(),
                resized,
            });
        }
        Ok(Self { all, stop })
    }

    /// Keeps them until the process is asked to end, then removes them. The workers make everything
    /// durable meanwhile.
    pub fn run(mut self) -> Result<()> {
        loop {
            let resized = self.all.iter().map(|disk| &*disk.resized);
            let fds = std::iter::once(&self.stop).chain(resized);
            let mut fds: Vec<_> = fds.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            match poll(&mut fds, Some(&ALIVE)) {
                Ok(_) if fds.first().is_some_and(|stop| !stop.revents().is_empty()) => break,
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error).context("poll"),
            }
            for Ublk {
                disk,
                volume,
                resized,
            } in &mut self.all
            {
                ensure!(disk.is_alive(), "/dev/ublkb{} is gone", disk.id());
                if rustix::io::read(&**resized, &mut [0; 8]).is_ok()
                    && let Err(error) = disk.resize()
                {
                    tracing::warn!(volume, %error, "size");
                }
            }
        }
        // At the same time: each waits for what the block layer still has to write.
        let halted = std::thread::scope(|scope| {
            let disks = self.all.iter_mut().map(|ublk| &mut ublk.disk);
            let threads: Vec<_> = disks.map(|disk| scope.spawn(|| disk.halt())).collect();
            let ends = threads.into_iter().map(|thread| thread.join());
            ends.collect::<Vec<_>>()
        });
        let mut result = Ok(());
        for halted in halted {
            let halted = halted.map_err(|_| anyhow!("a block device ended by a bug"))?;
            result = result.and(halted.context("a block device could not be stopped"));
        }
        for Ublk { disk, .. } in self.all {
            let id = disk.id();
            let stopped = disk.stop();
            let stopped = stopped.with_context(|| format!("/dev/ublkb{id} could not be removed"));
            result = result.and(stopped);
        }
        result
    }
}

/// Counters of one disk.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct DiskCounters {
    /// Its node.
    pub device: PathBuf,
    /// Path or URL of its volume.
    pub volume: String,
    /// Requests and bytes, by queue.
    pub queues: Vec<DiskQueueCounters>,
}

/// Counters of one queue of a disk.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct DiskQueueCounters {
    pub reads: u64,
    pub writes: u64,
    pub bytes_read: u64,
    pub bytes_written: u64,
    pub flushes: u64,
    /// Ranges zeroed or given back.
    pub discards: u64,
    pub errors: u64,
    /// Times that the queue's thread slept.
    pub sleeps: u64,
}

impl DiskCounters {
    pub fn of(volume: &str, stats: &DiskStats) -> Self {
        let queue = |q: &QueueStats| DiskQueueCounters {
            reads: q.reads.get(),
            writes: q.writes.get(),
            bytes_read: q.bytes_read.get(),
            bytes_written: q.bytes_written.get(),
            flushes: q.flushes.get(),
            discards: q.discards.get(),
            errors: q.errors.get(),
            sleeps: q.sleeps.get(),
        };
        Self {
            device: format!("/dev/ublkb{}", stats.id).into(),
            volume: volume.into(),
            queues: stats.queues.iter().map(queue).collect(),
        }
    }

    /// For people.
    pub fn print(&self) -> Result<(), OutputError> {
        outln!("{}  ({})", self.device.display(), self.volume);
        outln!(
            "  {:>5} {:>12} {:>10} {:>12} {:>10} {:>9} {:>9} {:>7} {:>10}",
            "queue",
            "reads",
            "MB",
            "writes",
            "MB",
            "flushes",
            "discards",
            "errors",
            "sleeps"
        );
        for (i, q) in self.queues.iter().enumerate() {
            outln!(
                "  {:>5} {:>12} {:>10} {:>12} {:>10} {:>9} {:>9} {:>7} {:>10}",
                i,
                q.reads,
                q.bytes_read / 1_000_000,
                q.writes,
                q.bytes_written / 1_000_000,
                q.flushes,
                q.discards,
                q.errors,
                q.sleeps
            );
        }
        Ok(())
    }
}

/// Options of `vnvme ublk`.
#[derive(Args)]
pub struct UblkArgs {
    /// Volumes, each a block device: paths or URLs, as for vnvme serve
    #[arg(required_unless_present = "remove", value_name = "VOLUME")]
    volumes: Vec<String>,
    /// Number of the first device, N of /dev/ublkbN; the others follow [default: any that are free]
    #[arg(long, value_name = "N")]
    id: Option<u32>,
    /// Queues of each device
    #[arg(long, default_value_t = one(), value_name = "N")]
    queues: u16,
    /// Requests of each queue
    #[arg(long, default_value_t = depth(), value_name = "N")]
    depth: u16,
    /// Logical block size in bytes [default: the volume's, 512 at least]
    #[arg(long, short, value_name = "512|4096")]
    block_size: Option<u32>,
    /// Refuse writes
    #[arg(long, short)]
    read_only: bool,
    /// Let the devices outlive a killed process: they wait for the next one with the same --id, and so do their users
    #[arg(long, requires = "id")]
    recover: bool,
    #[command(flatten)]
    polling: LoopOptions,
    /// Worker threads: queues are assigned to them in turn [default: one for each queue of a
    /// device]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_WORKERS)), value_name = "N")]
    workers: Option<u16>,
    /// CPUs to pin the workers to, one each, like 2,3 [default: not pinned]
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    cpus: Vec<usize>,
    /// Unix socket to answer "vnvme stats" and "vnvme limits" on
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Remove the device of this number, which a killed process left
    #[arg(long, conflicts_with = "volumes", value_name = "N")]
    remove: Option<u32>,
}

impl UblkArgs {
    /// Serves until a signal asks for the end.
    pub fn run(self) -> Result<()> {
        if let Some(id) = self.remove {
            return remove(id).map_err(Into::into);
        }
        let (specs, options) = self.merge()?;
        serve(&specs, &options)
    }

    /// What is to be served. All options are named, so that a new one does not compile until it has
    /// an effect.
    fn merge(self) -> Result<(Specs, ServeOptions)> {
        let UblkArgs {
            volumes,
            id,
            queues,
            depth,
            block_size,
            read_only,
            recover,
            polling,
            workers,
            cpus,
            control,
            remove: _,
        } = self;
        let spec = |(i, volume): (usize, String)| -> Result<UblkSpec> {
            let number = |first: u32| first.checked_add(u32::try_from(i).ok()?);
            let mut spec = UblkSpec {
                volume,
                id: match id {
                    Some(first) => Some(number(first).context("--id: the numbers are too large")?),
                    None => None,
                },
                queues,
                depth,
                block_size: None,
                read_only,
                recover,
            };
            spec.take_url_options()?;
            spec.block_size = spec.block_size.or(block_size);
            Ok(spec)
        };
        let ublk = volumes.into_iter().enumerate().map(spec);
        let specs = Specs {
            ublk: ublk.collect::<Result<_>>()?,
            ..Specs::default()
        };
        let options = ServeOptions {
            polling,
            workers: workers.unwrap_or(queues).clamp(1, MAX_WORKERS),
            spread: Spread::Off,
            cpus,
            control,
        };
        Ok((specs, options))
    }
}
