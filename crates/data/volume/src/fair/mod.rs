//! Fair shares of one device: volumes with weights, scheduled as one group for the whole process.
//!
//! A device with more outstanding requests than it can process at once decides the order itself,
//! and the slice with most requests outstanding wins. The group therefore keeps only as many in the
//! device as it needs, its depth. Each place that becomes free is given to the slice that has had
//! least for its weight ([`scheduler`]). Places and virtual times are atomic counters, shared by
//! all threads that serve slices of the group ([`group`]).
//!
//! The depth has to be that from which on the device does not become faster: below it the device
//! idles, above it requests queue up inside, where shares follow the load again. A slice with few
//! requests outstanding suffers first: all of them wait inside, behind those of other slices. The
//! group detects this and tries a smaller depth ([`tuner`]).

mod group;
mod scheduler;
mod tuner;

use crate::clock::{Clock, SystemClock};
use crate::io::SharedObject;
use crate::traits::DormantLayer;
use crate::{
    Allocation, AtomicWrites, Completion, FastPath, Info, Io, IoError, Op, OpenQueue, QueueState,
    Request, Volume, VolumeError, VolumeQueue,
};
use dma::{SegmentList, View};
use group::{FairShare, Group};
use scheduler::{Flow, Scheduler};
use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use sync::Unpoisoned;

/// Default weight of a volume within its group.
pub const DEFAULT_WEIGHT: u32 = 100;
/// Maximum weight of a volume within its group.
pub const MAX_WEIGHT: u32 = 10_000;
/// Default for the maximum number of requests that a group has outstanding in its device.
pub const DEFAULT_DEPTH: usize = 32;

/// Group of volumes that share a device in proportion to their weights.
#[derive(Debug, Clone)]
pub struct FairGroup(Arc<Group>);

/// Groups of this process, by the [`Extent::root`](crate::Extent::root) of their volumes.
static GROUPS: Mutex<Vec<(String, Weak<Group>)>> = Mutex::new(Vec::new());

impl FairGroup {
    /// Creates a group that keeps at most `depth` requests (at least 1) in the device, over all
    /// threads.
    pub fn new(depth: usize) -> Self {
        Self::with_clock(depth, Arc::new(SystemClock))
    }

    /// Creates a group with another clock, for tests.
    pub fn with_clock(depth: usize, clock: Arc<dyn Clock>) -> Self {
        Self(Arc::new(Group::new(depth.max(1), clock)))
    }

    /// Returns the group of all volumes of this process with the same
    /// [`Extent::root`](crate::Extent::root), creating it if needed. The first volume sets the
    /// depth: the requested one, or [`DEFAULT_DEPTH`].
    pub(crate) fn of(root: &str, depth: Option<usize>) -> Self {
        let mut groups = GROUPS.lock().unpoisoned();
        groups.retain(|(_, group)| group.strong_count() > 0);
        let known = groups.iter().find(|(known, _)| known == root);
        if let Some(group) = known.and_then(|(_, group)| group.upgrade()) {
            if depth.is_some_and(|depth| depth != group.most()) {
                tracing::warn!(
                    "{root}: share-depth={} stays as the first slice has set it",
                    group.most()
                );
            }
            return Self(group);
        }
        let group = Self::new(depth.unwrap_or(DEFAULT_DEPTH));
        groups.push((root.into(), Arc::downgrade(&group.0)));
        group
    }

    /// Returns the group's scheduler among the shared objects of a worker, creating it if needed.
    fn scheduler(&self, shared: &RefCell<Vec<SharedObject>>) -> Rc<RefCell<Scheduler>> {
        let mut known = shared.borrow_mut();
        known.retain(|(_, scheduler)| scheduler.strong_count() > 0);
        let key = Arc::as_ptr(&self.0).addr();
        let found = known.iter().find(|(other, _)| *other == key);
        let found = found.and_then(|(_, scheduler)| scheduler.upgrade());
        if let Some(Ok(scheduler)) = found.map(Rc::downcast) {
            return scheduler;
        }
        let scheduler = Rc::new(RefCell::new(Scheduler::new(self.0.clone())));
        let any: Rc<dyn Any> = scheduler.clone();
        known.push((key, Rc::downgrade(&any)));
        scheduler
    }
}

/// Handle to a volume's share of its group. Any thread may read and change the share while the
/// volume is in use.
#[derive(Debug, Clone)]
pub struct ShareHandle(Arc<Share>);

#[derive(Debug)]
struct Share {
    share: Arc<FairShare>,
    /// [`Extent::root`](crate::Extent::root) of the volume, by which its group is found.
    root: String,
    /// Group of the slice, from the time on when it has a weight.
    group: OnceLock<FairGroup>,
}

impl ShareHandle {
    /// Returns whether the slice has a weight. Without one it is not scheduled.
    pub fn is_weighted(&self) -> bool {
        self.0.group.get().is_some()
    }

    /// Returns the weight of the slice.
    pub fn weight(&self) -> u32 {
        self.0.share.weight()
    }

    /// Sets the weight of the slice, from 1 to [`MAX_WEIGHT`]; it also applies to waiting requests.
    /// Queues of a slice that has had no weight notice it by [`OpenQueue::update`].
    pub fn set_weight(&self, weight: u32) {
        self.0.share.set_weight(weight);
        self.0
            .group
            .get_or_init(|| FairGroup::of(&self.0.root, None));
    }

    /// Returns the number of requests that the group keeps in the device while several volumes
    /// compete: the current limit and the maximum.
    pub fn depth(&self) -> (usize, usize) {
        let group = self.0.group.get();
        group.map_or((DEFAULT_DEPTH, DEFAULT_DEPTH), |group| {
            (group.0.depth(), group.0.most())
        })
    }
}

/// A volume that shares a device with the other volumes of its group, by weight.
#[derive(Debug)]
pub struct FairVolume {
    volume: Arc<dyn Volume>,
    handle: ShareHandle,
}

impl FairVolume {
    /// Puts `volume` into a group. While volumes compete, each gets device time in proportion to
    /// its weight (1 to [`MAX_WEIGHT`]).
    pub fn new(volume: Arc<dyn Volume>, group: FairGroup, weight: u32) -> Self {
        Self::with_share(volume, String::new(), OnceLock::from(group), weight)
    }

    /// Wraps a volume without a weight. The wrapper costs nothing until [`ShareHandle::set_weight`]
    /// puts the volume into the group of all volumes with the same
    /// [`Extent::root`](crate::Extent::root).
    pub(crate) fn dormant(volume: Arc<dyn Volume>, root: String) -> Self {
        Self::with_share(volume, root, OnceLock::new(), DEFAULT_WEIGHT)
    }

    fn with_share(
        volume: Arc<dyn Volume>,
        root: String,
        group: OnceLock<FairGroup>,
        weight: u32,
    ) -> Self {
        let share = Arc::new(FairShare::new(weight));
        let handle = ShareHandle(Arc::new(Share { share, root, group }));
        Self { volume, handle }
    }
}

/// A volume's share before it has a weight.
struct ShareLayer {
    share: Arc<Share>,
    /// Shared objects of the worker, among which is its scheduler.
    shared: Rc<RefCell<Vec<SharedObject>>>,
}

impl DormantLayer for ShareLayer {
    fn is_needed(&self) -> bool {
        self.share.group.get().is_some()
    }

    fn wrap(self: Box<Self>, queue: OpenQueue) -> OpenQueue {
        let Some(group) = self.share.group.get() else {
            return queue;
        };
        let scheduler = group.scheduler(&self.shared);
        let flow = Flow::new(queue, group.0.enter(self.share.share.clone()));
        let flow = scheduler.borrow_mut().enter(flow);
        OpenQueue::with_fast_path(FairQueue {
            scheduler,
            flow,
            // Kept so that the group is found by the next one.
            _group: group.clone(),
        })
    }
}

impl Volume for FairVolume {
    fn info(&self) -> Info {
        self.volume.info()
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        let share = self.handle.0.clone();
        let shared = io.shared().clone();
        Ok(self
            .volume
            .open(io)?
            .with_layer(ShareLayer { share, shared }))
    }

    fn id(&self) -> Vec<u8> {
        self.volume.id()
    }

    /// Returns the promise of the inner volume. Scheduling delays requests but never splits them.
    fn atomic_writes(&self) -> AtomicWrites {
        self.volume.atomic_writes()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.volume)
    }

    fn allocation(&self, offset: u64, len: u64) -> Option<(Allocation, u64)> {
        self.volume.allocation(offset, len)
    }

    fn share(&self) -> Option<ShareHandle> {
        Some(self.handle.clone())
    }
}

/// Queue of one worker into a [`FairVolume`].
struct FairQueue {
    scheduler: Rc<RefCell<Scheduler>>,
    /// Index of the queue's flow in the scheduler.
    flow: usize,
    _group: FairGroup,
}

impl VolumeQueue for FairQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        self.scheduler.borrow_mut().submit(self.flow, request)
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        // The scheduler is not borrowed while the caller's code runs.
        let mut completed = self.scheduler.borrow_mut().poll(self.flow);
        let count = completed.len();
        completed.drain(..).for_each(done);
        self.scheduler.borrow_mut().recycle(self.flow, completed);
        count
    }

    fn state(&self) -> QueueState {
        self.scheduler.borrow().state(self.flow)
    }

    fn cancel(&mut self, tag: u64) {
        self.scheduler.borrow_mut().cancel(self.flow, tag);
    }
}

/// Copies use reads and writes: a copy by the file system would bypass the accounting of shares.
impl FastPath for FairQueue {
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        self.submit(Request::transfer(tag, op, offset, data))
    }

    fn push(&mut self) {
        self.scheduler.borrow_mut().push(self.flow);
    }

    /// Returns false: a request may have to wait for room in the device, so each must be submitted.
    fn is_immediate(&self) -> bool {
        false
    }

    fn try_now(&mut self, _: Op, _: u64, _: View<'_>) -> Option<Result<(), IoError>> {
        None
    }

    fn prefetches(&self) -> bool {
        self.scheduler.borrow().prefetches(self.flow)
    }

    fn prefetch(&mut self, op: Op, offset: u64, len: u64) {
        let mut scheduler = self.scheduler.borrow_mut();
        scheduler.prefetch(self.flow, op, offset, len);
    }
}

impl Drop for FairQueue {
    fn drop(&mut self) {
        let flow = self.scheduler.borrow_mut().leave(self.flow);
        // The drop may wait for the device; then the other flows get the places.
        drop(flow);
        self.scheduler.borrow_mut().settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemVolume;

    #[test]
    fn departed_queues_are_forgotten_by_all_threads() {
        let group = FairGroup::new(4);
        let volume = FairVolume::new(Arc::new(MemVolume::new(1 << 20).unwrap()), group.clone(), 1);
        let threads = [(); 2].map(|()| Io::new(Default::default()));
        let mut stays = threads.each_ref().map(|io| volume.open(io).unwrap());
        for _ in 0..100 {
            let mut comes = threads.each_ref().map(|io| volume.open(io).unwrap());
            for queue in stays.iter_mut().chain(&mut comes) {
                queue.poll(&mut |_| ());
            }
        }
        assert_eq!(group.0.entries(&mut 0).unwrap().len(), 2);
        for (io, queue) in threads.iter().zip(&mut stays) {
            queue.poll(&mut |_| ());
            assert_eq!(group.scheduler(io.shared()).borrow().others(), 1);
        }
    }
}
