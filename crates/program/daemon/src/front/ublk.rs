//! Volumes as block devices of the host.

use super::kind::{FrontEnd, Ready, RingUse};
use super::{Front, Worker};
use crate::keep::KeeperSession;
use crate::manage::{DiskServer, ServedDisk, Source};
use crate::open::prepare::{UnavailableDisk, event};
use crate::open::{OpenedVolume, Opener};
use crate::parts::ublk::{
    Disk, DiskOptions, DiskStats, NewDisk, QueueSetup, QueueSetupFailed, QueueStats,
};
use crate::record;
use crate::registry::Registry;
use crate::registry::counters::{CountedDisk, Counters};
use crate::registry::guarded_list::ListEntry;
use crate::registry::snapshot::SnapshotBuilder;
use crate::serve::peers::{Assignment, FixedCounter};
use crate::serve::worker_context::WorkerContext;
use anyhow::{Context, Result, anyhow, ensure};
use config::choices::Spread;
use config::disk::{DiskSpec, UblkSpec, device};
use config::volumes::is_within;
use control::Error;
use control::api::{DiskKind, Stats, UblkCounters, UblkQueueCounters};
use driver::NvmeVolume;
use metrics::{Namespace, Queue};
use probes::IoKind;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use sandbox::Needs;
use std::any::Any;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;
use volume::Volume;

/// Interval of checks on whether the kernel has removed the device.
const DEVICE_CHECK_INTERVAL: Timespec = Timespec {
    tv_sec: 2,
    tv_nsec: 0,
};

impl FrontEnd for UblkSpec {
    fn is_built(&self) -> bool {
        cfg!(feature = "ublk")
    }

    fn descriptors(&self) -> u64 {
        0
    }

    fn max_workers(&self, _: Spread) -> usize {
        usize::from(self.queues())
    }

    fn ring_use(&self, _: Spread) -> RingUse {
        // Queues of the device may come to any worker.
        RingUse {
            everywhere: usize::from(self.queues()) * (usize::from(self.depth()) + 1),
            ..RingUse::default()
        }
    }

    fn add_needs(&self, needs: &mut Needs, _keeper: &KeeperSession) {
        needs.ublk = true;
    }

    fn open(&self, opener: &Opener) -> Result<Ready> {
        let open = self.origin.place("volume", OpenDisk::new(self, opener));
        Ok(Ready::Device(Box::new(open?)))
    }

    fn say_listening(&self, _: &str) {}
}

/// Counters of a block device. Devices have the same empty address in the registry, and so are
/// listed in the order in which they were added.
struct CountedDevice {
    volume: String,
    stats: Arc<DiskStats>,
}

impl Counters for CountedDevice {
    fn kind(&self) -> DiskKind {
        DiskKind::Ublk
    }

    fn metrics(
        &self,
        _address: &Path,
        _registry: &Registry,
        numbers: &mut SnapshotBuilder<'_>,
    ) -> metrics::Disk {
        let mut namespace = Namespace::new(1);
        namespace.volume = self.volume.clone();
        for queue in &self.stats.queues {
            namespace.add(&queue.io, numbers.ns_per_cycle);
        }
        let queues = (0..).zip(&self.stats.queues).map(|(id, queue)| Queue {
            id,
            completions: queue.io.all_operations(),
            commands: queue.requests.get(),
            arms: queue.sleeps.get(),
            ..Queue::default()
        });
        let device = device(self.stats.id);
        metrics::Disk {
            name: numbers.name(&device),
            kind: self.kind().to_string(),
            address: device.display().to_string(),
            connected: true,
            connections: 1,
            namespaces: vec![namespace],
            queues: queues.collect(),
            ..metrics::Disk::default()
        }
    }

    fn add_to(&self, stats: &mut Stats, _address: &Path, registry: &Registry) {
        let queue = |q: &QueueStats| UblkQueueCounters {
            reads: q.io.operations(IoKind::Read).get(),
            writes: q.io.operations(IoKind::Write).get(),
            bytes_read: q.io.bytes_read().get(),
            bytes_written: q.io.bytes_written().get(),
            flushes: q.io.operations(IoKind::Flush).get(),
            discards: q.io.operations(IoKind::Other).get(),
            errors: q.io.all_failures(),
            sleeps: q.sleeps.get(),
        };
        stats.ublk.push(UblkCounters {
            name: registry.described.name(&device(self.stats.id)),
            device: format!("/dev/ublkb{}", self.stats.id),
            volume: self.volume.clone(),
            queues: self.stats.queues.iter().map(queue).collect(),
        });
    }
}

/// ublk block device that is being served.
struct Ublk {
    disk: Disk,
    volume: String,
    /// Eventfd that becomes readable when the volume was resized.
    resized: Arc<OwnedFd>,
    _entry: ListEntry<CountedDisk>,
    /// Registrations of the device's queues with the workers that serve them.
    _queues: Vec<(FixedCounter, Assignment)>,
}

/// ublk block device that was created and is not served yet.
pub struct OpenDisk {
    spec: UblkSpec,
    disk: NewDisk,
    volume: Arc<dyn Volume>,
    /// NVMe device of the volume, if the volume is on one.
    device: Option<Arc<NvmeVolume>>,
}

impl OpenDisk {
    pub fn new(spec: &UblkSpec, opener: &Opener) -> Result<Self> {
        let name = &spec.namespace.volume;
        // The volume is opened by the workers that have the queues, too.
        ensure!(
            !is_within(name),
            "{name}: a block device cannot use a volume of a single worker"
        );
        let (namespace, called) = (&spec.namespace, spec.any_name());
        let opened = opener.open(namespace, &called, 1)?;
        let OpenedVolume {
            volume,
            device,
            block_size,
            ..
        } = opened;
        // A device without a number of its own has no lasting name.
        if spec.name.is_some() || spec.id.is_some() {
            opener.records.settle(&record::OpenDisk {
                name: &called,
                kind: "ublk",
                subsystem: None,
                serial: None,
                subnqn: None,
                files: Vec::new(),
                namespaces: vec![record::Open {
                    nsid: 1,
                    spec: namespace,
                    volume: Some(&*volume),
                    block_size,
                }],
            })?;
        }
        let options = DiskOptions {
            id: spec.id,
            queues: spec.queues(),
            depth: spec.depth(),
            block_size,
            recover: spec.recover.unwrap_or(false),
        };
        let disk = NewDisk::new(volume.clone(), options).with_context(|| name.to_string())?;
        Ok(Self {
            spec: spec.clone(),
            disk,
            volume,
            device,
        })
    }

    /// Starts the block device, and assigns its queues to the workers with the fewest front-ends.
    fn start(self, worker_context: &WorkerContext) -> Result<(Ublk, ServedDisk, UblkSpec)> {
        let Self {
            mut spec,
            disk,
            volume,
            device,
        } = self;
        let name = spec.namespace.volume.to_string();
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
        let mut queues = Vec::new();
        let mut serve = |setup: QueueSetup| {
            let (worker, assignment) = worker_context.peers.assign_any();
            let fixed = pass_queue(worker_context, worker, setup);
            queues.extend(fixed.map(|fixed| (fixed, assignment)));
        };
        let disk = disk.start(&mut register, &mut serve);
        let disk = disk.with_context(|| name.clone())?;
        let resized = event()?;
        worker_context.sizes.watch(&volume, &resized);
        let running = ServedDisk {
            server: DiskServer::Ublk(disk.id()),
            volumes: vec![(1, Arc::downgrade(&volume))],
            resized: resized.clone(),
        };
        spec.id = Some(disk.id());
        let counted = CountedDevice {
            volume: name.clone(),
            stats: disk.stats(),
        };
        let ublk = Ublk {
            _entry: worker_context.registry.enter(Path::new(""), counted),
            _queues: queues,
            disk,
            volume: name,
            resized,
        };
        Ok((ublk, running, spec))
    }
}

/// Passes a queue of a block device to the worker with this index.
fn pass_queue(
    worker_context: &WorkerContext,
    worker: usize,
    setup: QueueSetup,
) -> Option<FixedCounter> {
    let handle = worker_context.peers.handle(worker)?;
    let (stats, number) = (setup.stats(), usize::from(setup.number()));
    let queue = move || stats.queues.get(number).map_or(0, |q| q.requests.get());
    let fixed = worker_context.peers.enter_fixed(worker, queue);
    handle.post(|worker| serve_queue(worker, setup));
    Some(fixed)
}

/// Opens a queue of a block device on the worker that is to serve it. The device waits for the
/// result.
fn serve_queue(worker: &mut Worker, setup: QueueSetup) {
    let name = format!("queue {} of /dev/ublkb{}", setup.number(), setup.stats().id);
    let added = worker
        .add(|context| Ok::<_, QueueSetupFailed>(Front::Ublk(Box::new(setup.open(context)?))));
    match added {
        Ok(Some(owner)) => worker.handle().set_name(owner, name),
        Ok(None) => {
            tracing::error!("no queue of a block device can be added to this worker: it is full");
        }
        Err(_) => {}
    }
}

/// All block devices of the process. The workers serve their queues; one thread reports their sizes
/// to the kernel, and removes them at the end.
pub struct Disks {
    all: Mutex<Vec<Ublk>>,
    /// Eventfd that becomes readable when the list of block devices has changed.
    changed: OwnedFd,
}

impl Disks {
    /// Creates an empty list of block devices.
    ///
    /// # Errors
    /// The eventfd cannot be created.
    pub fn new() -> Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self {
            all: Mutex::default(),
            changed: eventfd(0, flags).context("eventfd")?,
        })
    }

    /// Starts the block devices of the configuration.
    pub fn start(&self, disks: Vec<OpenDisk>, worker_context: &WorkerContext) -> Result<()> {
        for disk in disks {
            let named = DiskSpec::Ublk(disk.spec.clone());
            let source = worker_context.options.source(&named.name());
            let (ublk, running, spec) = match disk.start(worker_context) {
                Ok(started) => started,
                Err(error) if source == Source::Runtime => {
                    worker_context.leave_out(UnavailableDisk::new(named, &error));
                    continue;
                }
                Err(error) => return Err(error),
            };
            let spec = UblkSpec {
                name: Some(spec.any_name()),
                ..spec
            };
            let disk = DiskSpec::Ublk(spec);
            worker_context.registry.described.add(&disk);
            worker_context.table.enter(disk, source, running);
            self.all.lock().unpoisoned().push(ublk);
        }
        Ok(())
    }

    /// Starts a block device that was added at run time.
    pub fn add(&self, disk: OpenDisk, worker_context: &WorkerContext) -> Result<ServedDisk> {
        let (ublk, running, _) = disk.start(worker_context)?;
        self.all.lock().unpoisoned().push(ublk);
        let _ = rustix::io::write(&self.changed, &1u64.to_ne_bytes());
        Ok(running)
    }

    /// Removes the block device with this number. A device in use (mounted, for example) is removed
    /// only with `force`.
    ///
    /// # Errors
    /// The device is in use, or cannot be removed.
    pub fn remove(&self, id: u32, force: bool) -> Result<(), Error> {
        if !force {
            self.check_unused(id)?;
        }
        let mut all = self.all.lock().unpoisoned();
        let at = all.iter().position(|ublk| ublk.disk.id() == id);
        let removed = at.map(|at| all.swap_remove(at));
        drop(all);
        let _ = rustix::io::write(&self.changed, &1u64.to_ne_bytes());
        let gone = || Error::not_found(format!("/dev/ublkb{id} is gone"));
        let stopped = removed.map(stop).ok_or_else(gone)?;
        stopped.map_err(|error| Error::failed(format!("{error:#}")))
    }

    /// Checks that no program has opened the device exclusively.
    ///
    /// # Errors
    /// A conflict, if the device is mounted or part of another device.
    pub fn check_unused(&self, id: u32) -> Result<(), Error> {
        if self.is_open(id) {
            return Err(Error::conflict(format!(
                "/dev/ublkb{id} is in use (mounted, or part of another device): force the removal, \
                 or unmount it first"
            )));
        }
        Ok(())
    }

    /// Returns whether a program has opened the device exclusively.
    pub fn is_open(&self, id: u32) -> bool {
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let path = format!("/dev/ublkb{id}");
        matches!(open(path, flags, Mode::empty()), Err(Errno::BUSY))
    }

    /// Keeps the devices until the process is asked to end, then removes them. The workers make
    /// everything durable meanwhile. With `goes_on`, the end of one device does not end the rest.
    pub fn run(&self, stopped: &OwnedFd, goes_on: bool) -> Result<()> {
        loop {
            let resized: Vec<Arc<OwnedFd>> = {
                let all = self.all.lock().unpoisoned();
                all.iter().map(|ublk| ublk.resized.clone()).collect()
            };
            let own = [stopped, &self.changed];
            let fds = own.into_iter().chain(resized.iter().map(|fd| &**fd));
            let mut fds: Vec<_> = fds.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            match poll(&mut fds, Some(&DEVICE_CHECK_INTERVAL)) {
                Ok(_) if fds.first().is_some_and(|stop| !stop.revents().is_empty()) => break,
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error).context("poll"),
            }
            let _ = rustix::io::read(&self.changed, &mut [0; 8]);
            let mut all = self.all.lock().unpoisoned();
            for Ublk {
                disk,
                volume,
                resized,
                ..
            } in all.iter_mut()
            {
                ensure!(
                    goes_on || disk.is_alive(),
                    "/dev/ublkb{} is gone",
                    disk.id()
                );
                if rustix::io::read(&**resized, &mut [0; 8]).is_ok()
                    && let Err(error) = disk.resize()
                {
                    tracing::warn!(volume, %error, "size");
                }
            }
        }
        // Each removal waits for the remaining writes of the block layer, and then for processes
        // that have the device open.
        let all = std::mem::take(&mut *self.all.lock().unpoisoned());
        at_once(all, stop)
    }
}

fn stop(ublk: Ublk) -> Result<()> {
    let Ublk { disk, .. } = ublk;
    let id = disk.id();
    let stopped = disk.stop();
    stopped.with_context(|| format!("/dev/ublkb{id} could not be removed"))
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn devices_end_concurrently() {
        // Each device signals the next one that it has begun, and ends only when another has.
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
    fn failed_device_lets_others_end() {
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
