//! Volumes as block devices of the host: the `[[ublk]]` tables of a configuration, and `vnvme
//! ublk`.

use crate::balance::Spread;
use crate::control::Registry;
use crate::open::{Opened, Opener, is_within};
use crate::options::flags::{self, Given};
use crate::options::{Command, Url, url};
use crate::outln;
use crate::output::OutputError;
use crate::parts::ublk::{Disk, DiskOptions, DiskStats, QueueSetup, QueueStats, remove};
use crate::serve::{MAX_WORKERS, ServeOptions, serve};
use crate::sizes::Sizes;
use crate::spec::{NamespaceSpec, Specs};
use anyhow::{Context, Result, anyhow, ensure};
use clap::{ArgMatches, Args, FromArgMatches};
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UblkSpec {
    /// Path or URL.
    pub volume: Url,
    /// N of `/dev/ublkbN`; the kernel's choice when not given.
    pub id: Option<u32>,
    /// Queues: each is served by one worker.
    pub queues: Option<u16>,
    /// Requests of each queue.
    pub depth: Option<u16>,
    /// Logical block size in bytes.
    pub block_size: Option<u32>,
    /// Refuse writes.
    pub read_only: Option<bool>,
    /// The device outlives a killed process, and waits for the next one.
    pub recover: Option<bool>,
}

impl UblkSpec {
    /// Queues of the device.
    pub fn queues(&self) -> u16 {
        self.queues.unwrap_or(1)
    }

    /// Requests of each queue.
    pub fn depth(&self) -> u16 {
        self.depth.unwrap_or(128)
    }

    fn namespace(&self) -> NamespaceSpec {
        NamespaceSpec {
            volume: self.volume.clone(),
            block_size: self.block_size,
            read_only: self.read_only,
            ..NamespaceSpec::default()
        }
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
            queues: self.queues(),
            depth: self.depth(),
            block_size: self.block_size,
            recover: self.recover.unwrap_or(false),
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
                volume: spec.volume.to_string(),
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
        // Each waits for what the block layer still has to write, and then for those that have the
        // device open.
        at_once(self.all, |Ublk { disk, .. }| {
            let id = disk.id();
            let stopped = disk.stop();
            stopped.with_context(|| format!("/dev/ublkb{id} could not be removed"))
        })
    }
}

/// Ends all of them at the same time, each in a thread of its own; the first error.
fn at_once<T: Send>(all: Vec<T>, end: impl Fn(T) -> Result<()> + Sync) -> Result<()> {
    let end = &end;
    std::thread::scope(|scope| {
        let threads = all.into_iter().map(|one| scope.spawn(move || end(one)));
        let threads: Vec<_> = threads.collect();
        let ends = threads.into_iter().map(|thread| {
            let ended = thread.join();
            ended.map_err(|_| anyhow!("a block device ended by a bug"))?
        });
        ends.collect::<Vec<Result<()>>>().into_iter().collect()
    })
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
    /// Ranges zeroed or deallocated.
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

/// What `vnvme ublk` serves.
#[derive(Args)]
struct Named {
    /// Volumes, each a block device: paths or URLs, as for vnvme serve
    #[arg(required_unless_present = "remove", value_name = "VOLUME")]
    volumes: Vec<String>,
    /// Remove the device of this number, which a killed process left
    #[arg(long, conflicts_with = "volumes", value_name = "N")]
    remove: Option<u32>,
}

/// Options of `vnvme ublk`.
pub struct UblkArgs {
    named: Named,
    given: Given,
}

impl FromArgMatches for UblkArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self {
            named: Named::from_arg_matches(matches)?,
            given: Given::of(Command::Ublk, matches),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for UblkArgs {
    fn augment_args(cli: clap::Command) -> clap::Command {
        flags::augment(Command::Ublk, Named::augment_args(cli))
    }

    fn augment_args_for_update(cli: clap::Command) -> clap::Command {
        Self::augment_args(cli)
    }
}

impl UblkArgs {
    /// Serves until a signal asks for the end.
    pub fn run(self) -> Result<()> {
        if let Some(id) = self.named.remove {
            return remove(id).map_err(Into::into);
        }
        let (specs, options) = self.merge()?;
        serve(&specs, &options)
    }

    /// What is to be served.
    fn merge(self) -> Result<(Specs, ServeOptions)> {
        let volumes = self.named.volumes.iter().map(|text| url::parse(text));
        let mut specs = Specs {
            ublk: volumes.collect::<Result<_>>()?,
            ..Specs::default()
        };
        self.given.merge(None, &mut specs)?;
        // --id is the first one's.
        for (disk, i) in specs.ublk.iter_mut().zip(0..) {
            if let Some(first) = disk.id {
                let id = first.checked_add(i);
                disk.id = Some(id.context("--id: the numbers are too large")?);
            }
        }
        let queues = specs.ublk.first().map_or(1, UblkSpec::queues);
        let mut process = specs.process.clone();
        process.spread = Some(Spread::Off);
        let options = process.options(queues.clamp(1, MAX_WORKERS));
        Ok((specs, options))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn devices_end_at_the_same_time() {
        // Each tells the next one that it has begun, and ends only when another has.
        let (first, at_first) = mpsc::channel();
        let (second, at_second) = mpsc::channel();
        let bound = Duration::from_secs(60);
        let both = vec![(first, at_second), (second, at_first)];
        let ended = at_once(both, |(tell, told)| {
            tell.send(())?;
            Ok(told.recv_timeout(bound)?)
        });
        ended.unwrap();
    }

    #[test]
    fn an_error_of_one_does_not_keep_the_others() {
        let (ended, ends) = mpsc::channel();
        let error = at_once(vec![1, 2, 3], |number| {
            ended.send(number)?;
            ensure!(number != 2, "number {number}");
            Ok(())
        });
        assert_eq!(error.unwrap_err().to_string(), "number 2");
        assert_eq!(ends.try_iter().count(), 3);
    }
}
