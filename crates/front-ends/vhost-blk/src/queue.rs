//! Set-up of a queue by the front-end. A queue runs when it has an address and a kick, and is
//! enabled.

use crate::disk::{Disk, MAX_QUEUE_SIZE};
use crate::error::RequestRefusal;
use crate::eventfd::{Kick, Signal};
use crate::inflight::Inflight;
use crate::log::{DirtyLog, UsedRingLog};
use crate::memory::GuestMemory;
use crate::ring::{Ring, RingAddress, part_sizes};
use crate::run::{Run, RunOptions};
use crate::stats::{QueueStats, Stats};
use crate::virtio::feature;
use std::rc::Rc;
use std::sync::Arc;
use volume::{Budget, Completion};

/// Maximum accepted size of a virtqueue, for front-ends that do not know `queue_size`.
const MAX_SIZE: u32 = MAX_QUEUE_SIZE as u32;

/// How a virtqueue learns of new requests, once the front-end has started it.
#[derive(Debug, Default)]
enum Start {
    /// The front-end has not started the virtqueue.
    #[default]
    Stopped,
    /// The virtqueue is started, and the guest signals this eventfd.
    Kick(#[allow(dead_code)] Kick),
    /// The virtqueue is started without an eventfd, so it must be polled.
    Poll,
}

/// Request queue (virtqueue) of an export, and its state in the vhost-user protocol.
pub(crate) struct Queue {
    index: u16,
    size: u16,
    /// Addresses of the virtqueue's parts, in the front-end's address space.
    address: Option<RingAddress>,
    /// Guest-physical address under which writes to the used ring are logged, if they are.
    used_log_at: Option<u64>,
    base: u16,
    start: Start,
    call: Option<Signal>,
    err: Option<Signal>,
    /// Value of the last SET_VRING_ENABLE; `None` before the first.
    enabled: Option<bool>,
    /// Whether the queue is enabled before the first SET_VRING_ENABLE.
    enabled_at_first: bool,
    pub(crate) run: Option<Run>,
    stats: Arc<Stats>,
}

/// Properties of the connection that a starting queue needs.
pub(crate) struct Negotiated<'a> {
    pub(crate) features: u64,
    pub(crate) inflight: Option<&'a Inflight>,
    pub(crate) memory: &'a GuestMemory,
}

impl Queue {
    pub(crate) fn new(index: u16, stats: Arc<Stats>) -> Queue {
        Queue {
            index,
            size: 0,
            address: None,
            used_log_at: None,
            base: 0,
            start: Start::Stopped,
            call: None,
            err: None,
            enabled: None,
            enabled_at_first: false,
            run: None,
            stats,
        }
    }

    pub(crate) fn stats(&self) -> Option<&QueueStats> {
        self.stats.queues.get(usize::from(self.index))
    }

    /// Returns an error unless the queue is stopped, since its layout may change only then.
    fn stopped(&self) -> Result<(), RequestRefusal> {
        match self.run {
            Some(_) => Err(RequestRefusal::Running(self.index)),
            None => Ok(()),
        }
    }

    pub(crate) fn set_size(&mut self, size: u32) -> Result<(), RequestRefusal> {
        self.stopped()?;
        if !size.is_power_of_two() || size > MAX_SIZE {
            return Err(RequestRefusal::Value("ring size"));
        }
        // At most 1024.
        self.size = size as u16;
        Ok(())
    }

    pub(crate) fn set_base(&mut self, base: u32) -> Result<(), RequestRefusal> {
        self.stopped()?;
        self.base = u16::try_from(base).map_err(|_| RequestRefusal::Value("ring index"))?;
        Ok(())
    }

    pub(crate) fn set_address(&mut self, address: RingAddress) -> Result<(), RequestRefusal> {
        // QEMU repeats the address when memory moves: a running queue is resolved again.
        self.address = Some(address);
        Ok(())
    }

    /// Sets the guest-physical address under which writes to the used ring are logged, or `None`.
    pub(crate) fn set_used_log(&mut self, at: Option<u64>) {
        self.used_log_at = at;
    }

    /// Applies the logs of the connection: that of the guest's memory (`all`), and that of rings
    /// which have chosen it.
    pub(crate) fn set_log(
        &mut self,
        all: Option<&Rc<DirtyLog>>,
        rings: Option<&(Rc<DirtyLog>, Option<Rc<Signal>>)>,
    ) {
        let used = self.used_log_at.zip(rings);
        let used = used.map(|(at, (log, signal))| UsedRingLog {
            log: log.clone(),
            at,
            signal: signal.clone(),
        });
        if let Some(run) = &mut self.run {
            run.set_log(all.cloned(), used);
        }
    }

    /// Returns the front-end's address of the available ring, if it is set.
    pub(crate) fn available(&self) -> Option<u64> {
        self.address.map(|address| address.available)
    }

    pub(crate) fn set_kick(&mut self, kick: Option<Kick>) {
        self.start = kick.map_or(Start::Poll, Start::Kick);
    }

    pub(crate) fn set_call(&mut self, call: Option<Signal>) {
        self.call = call;
        // Front-ends may set it only after the queue runs. Requests answered meanwhile, or by a
        // previous back-end, must not wait for the next interrupt.
        if self.run.is_some()
            && let Some(call) = &self.call
        {
            call.send();
        }
    }

    pub(crate) fn set_err(&mut self, err: Option<Signal>) {
        self.err = err;
    }

    pub(crate) fn set_enabled(&mut self, enabled: u32) -> Result<(), RequestRefusal> {
        self.enabled = Some(match enabled {
            0 => false,
            1 => true,
            _ => return Err(RequestRefusal::Value("neither 0 nor 1")),
        });
        Ok(())
    }

    /// Sets the negotiated features. Without VHOST_USER_F_PROTOCOL_FEATURES "the ring starts
    /// directly in the enabled state".
    pub(crate) fn set_features(&mut self, features: u64) {
        self.enabled_at_first = features & feature::PROTOCOL_FEATURES == 0;
    }

    fn is_enabled(&self) -> bool {
        self.enabled.unwrap_or(self.enabled_at_first)
    }

    /// Returns whether the guest has added requests that were not fetched.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        self.is_enabled() && self.run.as_ref().is_some_and(Run::has_news)
    }

    /// Returns whether the queue must be polled, because the guest signals no eventfd.
    pub(crate) fn must_poll(&self) -> bool {
        matches!(self.start, Start::Poll) && self.is_fetching()
    }

    /// Returns whether the queue is running, so that it fetches requests.
    pub(crate) fn is_fetching(&self) -> bool {
        self.is_enabled() && self.run.as_ref().is_some_and(|run| !run.is_broken())
    }

    /// Returns the virtqueue's rings in guest memory.
    fn resolve(&self, features: u64, memory: &GuestMemory) -> Result<Ring, RequestRefusal> {
        let address = self
            .address
            .ok_or(RequestRefusal::Value("ring without address"))?;
        let event_idx = features & feature::EVENT_IDX != 0;
        let (descriptors, available, used) = part_sizes(self.size, event_idx);
        let at = RingAddress {
            descriptors: memory.guest_address(address.descriptors, descriptors)?,
            available: memory.guest_address(address.available, available)?,
            used: memory.guest_address(address.used, used)?,
        };
        Ok(Ring::resolve(memory.map(), at, self.size, event_idx)?)
    }

    /// Returns whether the front-end has started the queue.
    pub(crate) fn is_started(&self) -> bool {
        !matches!(self.start, Start::Stopped)
    }

    /// Starts to fetch requests, if the queue is started and does not run yet.
    pub(crate) fn begin(&mut self, with: &Negotiated<'_>) -> Result<(), RequestRefusal> {
        if self.run.is_some() || !self.is_started() {
            return Ok(());
        }
        if self.size == 0 {
            return Err(RequestRefusal::Value("ring without size"));
        }
        let ring = self.resolve(with.features, with.memory)?;
        let tracker = with
            .inflight
            .and_then(|inflight| inflight.tracker(self.index, self.size));
        let options = RunOptions {
            index: self.index,
            size: self.size,
            event_idx: with.features & feature::EVENT_IDX != 0,
            indirect: with.features & feature::INDIRECT_DESC != 0,
            next: self.base,
            tracker,
        };
        self.run = Some(Run::new(options, ring, &self.stats));
        crash::point!("vhost-blk.queue.recovered");
        // Requests of the guest may have ended without an interrupt while no back-end ran.
        if let Some(call) = &self.call {
            call.send();
        }
        crash::point!("vhost-blk.queue.begun");
        Ok(())
    }

    /// Handles a change of guest memory: finds the rings again, or suspends the queue.
    pub(crate) fn memory_changed(&mut self, features: u64, memory: &GuestMemory) {
        let generation = memory.map().generation();
        let stale = |run: &Run| run.generation() != Some(generation);
        if !self.run.as_ref().is_some_and(stale) {
            return;
        }
        let ring = self.resolve(features, memory);
        if let Err(why) = &ring {
            tracing::debug!(queue = self.index, %why, "ring memory has gone");
        }
        if let Some(run) = &mut self.run {
            run.set_ring(ring.ok(), memory.map());
        }
    }

    /// Stops the queue if its ring, or the dirty log (`is_log_lost`), was in a mapping that has
    /// lost its memory.
    pub(crate) fn check_memory(&mut self, is_log_lost: bool) {
        let is_lost = |run: &&mut Run| is_log_lost || run.is_poisoned();
        if let Some(run) = self.run.as_mut().filter(is_lost) {
            run.breaks(&"its memory file was cut short");
            self.signal_error();
        }
    }

    fn signal_error(&self) {
        if let Some(err) = &self.err {
            err.send();
        }
    }

    /// Fetches requests and starts them at the volume. Returns whether there were any.
    #[inline]
    pub(crate) fn fetch(
        &mut self,
        disk: &mut Disk,
        memory: &GuestMemory,
        budget: &mut Budget,
    ) -> bool {
        if !self.is_enabled() {
            return false;
        }
        let (Some(run), Some(stats)) = (
            &mut self.run,
            self.stats.queues.get(usize::from(self.index)),
        ) else {
            return false;
        };
        if run.is_broken() {
            return false;
        }
        let worked = run.fetch(disk, memory.map(), stats, budget);
        if run.is_broken() {
            self.signal_error();
        }
        worked
    }

    /// Handles the completion of a request by the volume.
    pub(crate) fn complete(
        &mut self,
        slot: u16,
        completion: Completion,
        disk: &mut Disk,
        memory: &GuestMemory,
    ) {
        if let (Some(run), Some(stats)) = (
            &mut self.run,
            self.stats.queues.get(usize::from(self.index)),
        ) {
            run.complete(slot, completion, disk, memory.map(), stats);
        }
    }

    /// Publishes the completed requests in the used ring, and interrupts the guest.
    #[inline]
    pub(crate) fn publish(&mut self) {
        if let (Some(run), Some(stats)) = (
            &mut self.run,
            self.stats.queues.get(usize::from(self.index)),
        ) {
            run.publish(self.call.as_ref(), stats);
        }
    }

    /// Asks the guest to signal new requests. Returns whether requests have arrived already.
    pub(crate) fn arm(&mut self) -> bool {
        if !self.is_enabled() {
            return false;
        }
        match (
            &mut self.run,
            self.stats.queues.get(usize::from(self.index)),
        ) {
            (Some(run), Some(stats)) => run.arm(stats),
            _ => false,
        }
    }

    /// Stops fetching requests. Outstanding requests continue.
    pub(crate) fn stop(&mut self) {
        if let Some(run) = &mut self.run {
            run.stop();
        }
    }

    /// Returns whether requests of the queue are outstanding at the volume.
    pub(crate) fn is_busy(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.in_flight() > 0)
    }

    /// Drops the ring of a stopped, idle queue. Returns the index of the next available entry.
    pub(crate) fn end(&mut self) -> u16 {
        self.publish();
        if let Some(run) = self.run.take() {
            self.base = run.next();
        }
        self.start = Start::Stopped;
        self.base
    }

    /// Returns the queue to its initial state, except for the eventfds.
    pub(crate) fn reset(&mut self) {
        self.end();
        self.size = 0;
        self.base = 0;
        self.address = None;
        self.used_log_at = None;
        self.enabled = None;
    }

    /// Abandons the queue of a disconnected front-end: guest memory is accessed only by outstanding
    /// requests.
    pub(crate) fn abandon(&mut self) {
        self.start = Start::Stopped;
        self.call = None;
        self.err = None;
        if let Some(run) = &mut self.run {
            run.abandon();
        }
    }
}
