//! Volumes that say, or do, something else than those they are on.

use std::fmt;
use std::sync::Arc;
use volume::{
    FaultVolume, Faults, Info, Io, MemVolume, NullOptions, NullVolume, OpenQueue, QueueState,
    Volume, VolumeError, VolumeQueue,
};

pub fn mem(bytes: u64) -> Arc<dyn Volume> {
    Arc::new(MemVolume::new(bytes).unwrap())
}

pub fn null(bytes: u64) -> Arc<dyn Volume> {
    let options = NullOptions {
        size: bytes,
        ..Default::default()
    };
    Arc::new(NullVolume::new(options).unwrap())
}

/// A volume that is described otherwise, or whose queues are other ones.
struct Double<F, G> {
    volume: Arc<dyn Volume>,
    describe: F,
    open: G,
}

impl<F, G> fmt::Debug for Double<F, G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.volume.fmt(f)
    }
}

impl<F, G> Volume for Double<F, G>
where
    F: Fn(Info) -> Info + Send + Sync,
    G: Fn(&dyn Volume, &Io) -> Result<OpenQueue, VolumeError> + Send + Sync,
{
    fn info(&self) -> Info {
        (self.describe)(self.volume.info())
    }
    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        (self.open)(&*self.volume, io)
    }
    fn id(&self) -> Vec<u8> {
        self.volume.id()
    }
    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.volume)
    }
}

/// A volume of which `describe` makes what it says of itself.
pub fn described(
    volume: Arc<dyn Volume>,
    describe: impl Fn(Info) -> Info + Send + Sync + 'static,
) -> Arc<dyn Volume> {
    let open = |volume: &dyn Volume, io: &Io| volume.open(io);
    Arc::new(Double {
        volume,
        describe,
        open,
    })
}

/// A volume whose queues are those that `open` returns.
pub fn opened(
    volume: Arc<dyn Volume>,
    open: impl Fn(&dyn Volume, &Io) -> Result<OpenQueue, VolumeError> + Send + Sync + 'static,
) -> Arc<dyn Volume> {
    Arc::new(Double {
        volume,
        describe: |info| info,
        open,
    })
}

/// A volume that says it has a volatile cache, so that flushes matter.
pub fn cached(volume: Arc<dyn Volume>) -> Arc<dyn Volume> {
    described(volume, |info| Info {
        volatile_cache: true,
        ..info
    })
}

/// A volume with requests that cannot be ended early.
pub fn stubborn(volume: Arc<dyn Volume>) -> Arc<dyn Volume> {
    opened(volume, |volume, io| {
        Ok(OpenQueue::new(StubbornQueue(volume.open(io)?)))
    })
}

struct StubbornQueue(OpenQueue);

impl VolumeQueue for StubbornQueue {
    fn submit(&mut self, request: volume::Request) -> Option<volume::Completion> {
        self.0.submit(request)
    }
    fn poll(&mut self, done: &mut dyn FnMut(volume::Completion)) -> usize {
        self.0.poll(done)
    }
    fn state(&self) -> QueueState {
        self.0.state()
    }
    fn cancel(&mut self, _: u64) {}
}

/// A memory volume with faults, and where they are declared.
pub fn faulty(bytes: u64) -> (Arc<dyn Volume>, Arc<Faults>) {
    let volume = FaultVolume::new(mem(bytes));
    let faults = volume.faults();
    (Arc::new(volume), faults)
}
