//! Volumes as block devices of the host.

use crate::open::{Opened, Opener, is_within};
use crate::options::Url;
use crate::parts::ublk::{Disk, DiskOptions, NewDisk, QueueSetup};
use crate::registry::Registry;
use crate::sizes::Sizes;
use crate::spec::UblkSpec;
use anyhow::{Context, Result, anyhow, ensure};
use driver::NvmeVolume;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use volume::Volume;

/// Between two looks whether the kernel has taken the device away.
const ALIVE: Timespec = Timespec {
    tv_sec: 2,
    tv_nsec: 0,
};

/// A block device that is served.
struct Ublk {
    disk: Disk,
    volume: String,
    /// Readable when the volume has been resized.
    resized: Arc<OwnedFd>,
}

/// A block device that has been made, and is not served yet.
pub struct OpenDisk {
    disk: NewDisk,
    name: Url,
    volume: Arc<dyn Volume>,
    /// The device below, if it is one that reaches memory itself.
    device: Option<Arc<NvmeVolume>>,
}

impl OpenDisk {
    pub fn new(spec: &UblkSpec, opener: &Opener) -> Result<Self> {
        let name = &spec.volume;
        // The volume is opened by the workers that have the queues, too.
        ensure!(
            !is_within(name),
            "{name}: a block device cannot stand on a volume of one worker"
        );
        let Opened { volume, device, .. } = opener.open(&spec.namespace())?;
        let options = DiskOptions {
            id: spec.id,
            queues: spec.queues(),
            depth: spec.depth(),
            block_size: spec.block_size,
            recover: spec.recover.unwrap_or(false),
        };
        let disk = NewDisk::new(volume.clone(), options).with_context(|| name.to_string())?;
        Ok(Self {
            disk,
            name: name.clone(),
            volume,
            device,
        })
    }

    /// The disk, its queues with the workers that `serve` passes them to.
    fn start(self, sizes: &Sizes, serve: &mut dyn FnMut(QueueSetup)) -> Result<Ublk> {
        let Self {
            disk,
            name,
            volume,
            device,
        } = self;
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
        let disk = disk.start(&mut register, serve);
        let disk = disk.with_context(|| name.to_string())?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let resized = Arc::new(eventfd(0, flags).context("eventfd")?);
        sizes.watch(volume, &resized);
        Ok(Ublk {
            disk,
            volume: name.to_string(),
            resized,
        })
    }
}

/// All block devices of the process: their queues are with the workers; one thread makes them,
/// tells the kernel of their sizes, and removes them.
pub struct Disks {
    all: Vec<Ublk>,
    /// Readable when the process is asked to end.
    stop: OwnedFd,
}

impl Disks {
    /// Starts the devices; `serve` passes a queue to a worker.
    pub fn new(
        disks: Vec<OpenDisk>,
        stop: OwnedFd,
        registry: &Registry,
        sizes: &Sizes,
        serve: &mut dyn FnMut(QueueSetup),
    ) -> Result<Self> {
        let mut all = Vec::new();
        for disk in disks {
            let disk = disk.start(sizes, serve)?;
            registry.enter_disk(&disk.volume, disk.disk.stats());
            all.push(disk);
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
