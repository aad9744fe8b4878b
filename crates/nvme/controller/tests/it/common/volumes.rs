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

/// A volume that is described otherwise.
struct Described<F> {
    volume: Arc<dyn Volume>,
    describe: F,
}

impl<F> fmt::Debug for Described<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.volume.fmt(f)
    }
}

impl<F: Fn(Info) -> Info + Send + Sync> Volume for Described<F> {
    fn info(&self) -> Info {
        (self.describe)(self.volume.info())
    }
    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        self.volume.open(io)
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
    Arc::new(Described { volume, describe })
}

/// A volume that says it has a volatile cache, so that flushes matter.
pub fn cached(volume: Arc<dyn Volume>) -> Arc<dyn Volume> {
    described(volume, |info| Info {
        volatile_cache: true,
        ..info
    })
}

/// A volume with requests that cannot be ended early.
#[derive(Debug)]
pub struct Stubborn(pub Arc<dyn Volume>);

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

impl Volume for Stubborn {
    fn info(&self) -> Info {
        self.0.info()
    }
    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        Ok(OpenQueue::new(StubbornQueue(self.0.open(io)?)))
    }
    fn id(&self) -> Vec<u8> {
        self.0.id()
    }
    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.0)
    }
}

/// A memory volume with faults, and where they are declared.
pub fn faulty(bytes: u64) -> (Arc<dyn Volume>, Arc<Faults>) {
    let volume = FaultVolume::new(mem(bytes));
    let faults = volume.faults();
    (Arc::new(volume), faults)
}
