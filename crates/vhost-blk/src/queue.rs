//! A queue as the front-end sets it up, and when it runs: it has an
//! address, a kick, and is enabled.

use crate::disk::{Disk, MAX_QUEUE_SIZE};
use crate::error::Refusal;
use crate::eventfd::{Kick, Signal};
use crate::inflight::Inflight;
use crate::memory::GuestMemory;
use crate::ring::{Ring, RingAddress, part_sizes};
use crate::run::{Run, RunOptions};
use crate::stats::{QueueStats, Stats};
use crate::virtio::feature;
use std::sync::Arc;
use volume::{Budget, Completion};

/// Largest ring that is taken, for front-ends that were told nothing of `queue_size`.
const MAX_SIZE: u32 = MAX_QUEUE_SIZE as u32;

/// Where a kick comes from, if at all.
#[derive(Debug, Default)]
enum Start {
    /// The queue is stopped.
    #[default]
    Stopped,
    /// It is started, and the guest rings here.
    Kick(#[allow(dead_code)] Kick),
    /// It is started, and the guest never rings: it has to be polled.
    Poll,
}

/// One request queue.
pub(crate) struct Queue {
    index: u16,
    size: u16,
    /// In the front-end's address space.
    address: Option<RingAddress>,
    base: u16,
    start: Start,
    call: Option<Signal>,
    err: Option<Signal>,
    /// What SET_VRING_ENABLE said last.
    enabled: Option<bool>,
    /// What holds until it says something.
    enabled_at_first: bool,
    pub(crate) run: Option<Run>,
    stats: Arc<Stats>,
}

/// What a queue needs to know of its connection when it begins to run.
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

    /// Its layout may change only while it stands.
    fn stopped(&self) -> Result<(), Refusal> {
        match self.run {
            Some(_) => Err(Refusal::Running(self.index)),
            None => Ok(()),
        }
    }

    pub(crate) fn set_size(&mut self, size: u32) -> Result<(), Refusal> {
        self.stopped()?;
        if !size.is_power_of_two() || size > MAX_SIZE {
            return Err(Refusal::Value("ring size"));
        }
        // At most 1024.
        self.size = size as u16;
        Ok(())
    }

    pub(crate) fn set_base(&mut self, base: u32) -> Result<(), Refusal> {
        self.stopped()?;
        self.base = u16::try_from(base).map_err(|_| Refusal::Value("ring index"))?;
        Ok(())
    }

    pub(crate) fn set_address(&mut self, address: RingAddress) -> Result<(), Refusal> {
        // QEMU says it again when memory moves: a queue that runs is found anew.
        self.address = Some(address);
        Ok(())
    }

    /// Where the driver's part of the ring lies, by an address of the front-end's.
    pub(crate) fn available(&self) -> Option<u64> {
        self.address.map(|address| address.available)
    }

    pub(crate) fn set_kick(&mut self, kick: Option<Kick>) {
        self.start = kick.map_or(Start::Poll, Start::Kick);
    }

    pub(crate) fn set_call(&mut self, call: Option<Signal>) {
        self.call = call;
        // Front-ends may name it only when the queue runs. What was answered meanwhile, or by a
        // back-end before this one, is not to wait for the next interrupt.
        if self.run.is_some()
            && let Some(call) = &self.call
        {
            call.send();
        }
    }

    pub(crate) fn set_err(&mut self, err: Option<Signal>) {
        self.err = err;
    }

    pub(crate) fn set_enabled(&mut self, enabled: u32) -> Result<(), Refusal> {
        self.enabled = Some(match enabled {
            0 => false,
            1 => true,
            _ => return Err(Refusal::Value("neither 0 nor 1")),
        });
        Ok(())
    }

    /// Without VHOST_USER_F_PROTOCOL_FEATURES "the ring starts directly in the enabled state".
    pub(crate) fn set_features(&mut self, features: u64) {
        self.enabled_at_first = features & feature::PROTOCOL_FEATURES == 0;
    }

    fn is_enabled(&self) -> bool {
        self.enabled.unwrap_or(self.enabled_at_first)
    }

    /// The guest has made requests that were not fetched.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        self.is_enabled() && self.run.as_ref().is_some_and(Run::has_news)
    }

    /// Nobody rings for it.
    pub(crate) fn must_poll(&self) -> bool {
        matches!(self.start, Start::Poll) && self.is_fetching()
    }

    /// It fetches requests.
    pub(crate) fn is_fetching(&self) -> bool {
        self.is_enabled() && self.run.as_ref().is_some_and(|run| !run.is_broken())
    }

    /// Where the ring lies, and the ring.
    fn resolve(&self, features: u64, memory: &GuestMemory) -> Result<Ring, Refusal> {
        let address = self.address.ok_or(Refusal::Value("ring without address"))?;
        let event_idx = features & feature::EVENT_IDX != 0;
        let (descriptors, available, used) = part_sizes(self.size, event_idx);
        let at = RingAddress {
            descriptors: memory.guest_address(address.descriptors, descriptors)?,
            available: memory.guest_address(address.available, available)?,
            used: memory.guest_address(address.used, used)?,
        };
        Ok(Ring::resolve(memory.map(), at, self.size, event_idx)?)
    }

    /// Begins to run, if it is started and does not.
    pub(crate) fn begin(&mut self, with: &Negotiated<'_>) -> Result<(), Refusal> {
        if self.run.is_some() || matches!(self.start, Start::Stopped) {
            return Ok(());
        }
        if self.size == 0 {
            return Err(Refusal::Value("ring without size"));
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
        // What the guest asked for while nobody was here may have ended without a word.
        if let Some(call) = &self.call {
            call.send();
        }
        crash::point!("vhost-blk.queue.begun");
        Ok(())
    }

    /// The memory has changed: finds the ring again, or stands still.
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
            run.set_ring(ring.ok());
        }
    }

    /// Some mapping of the process has lost its memory: if it was this ring's, it stops.
    pub(crate) fn check_memory(&mut self) {
        if let Some(run) = self.run.as_mut().filter(|run| run.is_poisoned()) {
            run.breaks(&"its memory file was cut short");
            self.signal_error();
        }
    }

    fn signal_error(&self) {
        if let Some(err) = &self.err {
            err.send();
        }
    }

    /// Fetches and starts requests. `true` when there were some.
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

    /// Takes a completion in.
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

    /// Shows the guest what has been answered.
    #[inline]
    pub(crate) fn publish(&mut self) {
        if let (Some(run), Some(stats)) = (
            &mut self.run,
            self.stats.queues.get(usize::from(self.index)),
        ) {
            run.publish(self.call.as_ref(), stats);
        }
    }

    /// Asks the guest to ring. `true` when there is something already.
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

    /// Nothing more is fetched; what is in flight goes on.
    pub(crate) fn stop(&mut self) {
        if let Some(run) = &mut self.run {
            run.stop();
        }
    }

    /// Requests of it are with the volume.
    pub(crate) fn is_busy(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.in_flight() > 0)
    }

    /// It has been stopped and is not busy: drops its ring, and answers the index of
    /// the next available entry.
    pub(crate) fn end(&mut self) -> u16 {
        self.publish();
        if let Some(run) = self.run.take() {
            self.base = run.next();
        }
        self.start = Start::Stopped;
        self.base
    }

    /// Back to how it was made, but for its signals.
    pub(crate) fn reset(&mut self) {
        self.end();
        self.size = 0;
        self.base = 0;
        self.address = None;
        self.enabled = None;
    }

    /// The front-end has gone: guest memory is not touched any more, except by what is in flight.
    pub(crate) fn abandon(&mut self) {
        self.start = Start::Stopped;
        self.call = None;
        self.err = None;
        if let Some(run) = &mut self.run {
            run.abandon();
        }
    }
}
