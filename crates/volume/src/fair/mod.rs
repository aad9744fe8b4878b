//! Fair shares of one device: slices of a volume, each with a weight, behind one scheduler on each worker.
//!
//! A device that is given more requests than it can work on at once decides itself whose turn it is, and whoever has most
//! requests outstanding wins. So the scheduler keeps only as many in the device as it needs, the group's depth, and gives
//! each place that becomes free to the slice that has had least for its weight. The depth should be that from which on
//! the device does not become faster; above it shares follow the load again.
//!
//! Slices on different workers do not know of each other: each worker shares out its own places.

mod scheduler;

use crate::{Completion, Extent, Info, Io, LimitHandle, Request, Volume, VolumeError, VolumeQueue};
use scheduler::{Flow, Scheduler};
use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The weight of a slice that says nothing else.
pub const DEFAULT_WEIGHT: u32 = 100;
/// Requests of a group in the device at one time, where nothing else is said.
pub const DEFAULT_DEPTH: usize = 32;

/// Volumes that share a device.
#[derive(Debug, Clone)]
pub struct FairGroup(Arc<Group>);

#[derive(Debug)]
struct Group {
    depth: usize,
}

/// The groups of this process, by what their volumes lie in.
static GROUPS: Mutex<Vec<(String, Weak<Group>)>> = Mutex::new(Vec::new());

impl FairGroup {
    /// A group that keeps at most `depth` requests (1 at least) in the device, on each worker.
    pub fn new(depth: usize) -> Self {
        Self(Arc::new(Group {
            depth: depth.max(1),
        }))
    }

    /// The group of all volumes of this process in `root` (see [`Extent::root`]). The first one decides its depth: what it
    /// asks for, or [`DEFAULT_DEPTH`].
    pub(crate) fn of(root: &str, depth: Option<usize>) -> Self {
        let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|(_, group)| group.strong_count() > 0);
        let known = groups.iter().find(|(known, _)| known == root);
        if let Some(group) = known.and_then(|(_, group)| group.upgrade()) {
            if depth.is_some_and(|depth| depth != group.depth) {
                tracing::warn!(
                    "{root}: share-depth={} stays as the first slice has set it",
                    group.depth
                );
            }
            return Self(group);
        }
        let group = Self::new(depth.unwrap_or(DEFAULT_DEPTH));
        groups.push((root.into(), Arc::downgrade(&group.0)));
        group
    }

    /// The group's scheduler on the worker that `io` belongs to.
    fn scheduler(&self, io: &Io) -> Rc<RefCell<Scheduler>> {
        let mut known = io.shared().borrow_mut();
        known.retain(|(_, scheduler)| scheduler.strong_count() > 0);
        let key = Arc::as_ptr(&self.0).addr();
        let found = known.iter().find(|(other, _)| *other == key);
        let found = found.and_then(|(_, scheduler)| scheduler.upgrade());
        if let Some(Ok(scheduler)) = found.map(Rc::downcast) {
            return scheduler;
        }
        let scheduler = Rc::new(RefCell::new(Scheduler::new(self.0.depth)));
        let any: Rc<dyn Any> = scheduler.clone();
        known.push((key, Rc::downgrade(&any)));
        scheduler
    }
}

/// Another volume with a weight among those of its group.
#[derive(Debug)]
pub struct FairVolume {
    volume: Arc<dyn Volume>,
    group: FairGroup,
    weight: u32,
}

impl FairVolume {
    /// `volume` in a group; its share is its weight (1 at least) among the weights of those that want more than they get.
    pub fn new(volume: Arc<dyn Volume>, group: FairGroup, weight: u32) -> Self {
        Self {
            volume,
            group,
            weight: weight.max(1),
        }
    }
}

impl Volume for FairVolume {
    fn info(&self) -> Info {
        self.volume.info()
    }

    fn open(&self, io: &Io) -> Result<Box<dyn VolumeQueue>, VolumeError> {
        let queue = self.volume.open(io)?;
        let scheduler = self.group.scheduler(io);
        let flow = scheduler.borrow_mut().enter(Flow::new(queue, self.weight));
        Ok(Box::new(FairQueue {
            scheduler,
            flow,
            // Kept so that the group is found by the next one.
            _group: self.group.clone(),
        }))
    }

    fn id(&self) -> Vec<u8> {
        self.volume.id()
    }

    fn extent(&self) -> Option<Extent> {
        self.volume.extent()
    }

    fn limits(&self) -> Option<LimitHandle> {
        self.volume.limits()
    }

    fn refresh(&self) -> Result<bool, VolumeError> {
        self.volume.refresh()
    }
}

/// One worker's queue into a [`FairVolume`].
struct FairQueue {
    scheduler: Rc<RefCell<Scheduler>>,
    /// Its number in the scheduler.
    flow: usize,
    _group: FairGroup,
}

impl VolumeQueue for FairQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        self.scheduler.borrow_mut().submit(self.flow, request)
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        // The scheduler is let go before anybody else's code runs.
        let mut over = self.scheduler.borrow_mut().poll(self.flow);
        let count = over.len();
        over.drain(..).for_each(done);
        self.scheduler.borrow_mut().recycle(self.flow, over);
        count
    }

    fn polled_in_flight(&self) -> usize {
        self.scheduler.borrow().polled_in_flight(self.flow)
    }

    fn in_flight(&self) -> usize {
        self.scheduler.borrow().in_flight(self.flow)
    }

    fn next_deadline(&self) -> Option<std::time::Instant> {
        self.scheduler.borrow().next_deadline(self.flow)
    }

    fn cancel(&mut self, tag: u64) {
        self.scheduler.borrow_mut().cancel(self.flow, tag);
    }
}

impl Drop for FairQueue {
    fn drop(&mut self) {
        let flow = self.scheduler.borrow_mut().leave(self.flow);
        // This may wait for the device: the others can go on as soon as it is over.
        drop(flow);
    }
}
