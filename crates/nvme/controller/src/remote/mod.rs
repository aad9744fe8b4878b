//! Engine for a controller's queues on a worker other than the controller's own.
//!
//! ```text
//!   the controller's own worker                        another worker
//!  Controller ---- Order (channel, in order) -----> RemoteEngine
//!    control half <- EngineReport (channel, bounded)  |
//!    engine       <- Progress (plain stores) ------ engine
//! ```
//!
//! A [`RemoteEngine`] is an engine with the channels between it and the control half. It has its
//! own map of guest memory, its own command slots, and its own queues into the volumes, so the path
//! of a command touches no shared state. It shares with the control half the doorbell page, the
//! counters (those of a queue are written only by that queue's worker), and the interrupt
//! receivers. A submission queue is always on the worker of its completion queue.
//!
//! This module receives orders, which the engine carries out ([`Engine::apply`]), and reports
//! progress to the control half. Module `controller::migration` decides where queues migrate.

mod report;
mod setup;

pub(crate) use report::{EngineReport, OPEN, OPENING, Progress};
pub(crate) use setup::Connection;
pub use setup::RemoteEngineSetup;

use crate::config::NamespaceConfig;
use crate::engine::{Engine, Event, MemoryChange, Namespace, Order};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError};
use std::task::Waker;
use std::time::{Duration, Instant};
use volume::{Budget, Io, PinPace, PinnedWindows};

/// Interval of checks on detached namespaces while nothing else wakes the worker: the last command
/// on a namespace, or the flush after it, may end while the worker sleeps.
const TIDY_INTERVAL: Duration = Duration::from_millis(1);

/// Maximum number of events waiting to be reported. With more, no entry is fetched, which bounds
/// the memory that a guest's errors can occupy.
const EVENTS_WAITING: usize = 64;

/// A controller's data half on a worker other than the controller's own. Owned by that worker's
/// thread, which uses it like a controller, and calls [`RemoteEngine::drain_messages`] when
/// messages wake the worker.
pub struct RemoteEngine {
    engine: Engine,
    /// io_uring of this worker, for the volumes of namespaces that are attached later.
    io: Rc<Io>,
    /// Whether the controller was dropped, so that the worker removes this engine.
    ended: bool,
    orders: Receiver<Order>,
    reports: SyncSender<EngineReport>,
    progress: Arc<Progress>,
    /// Waker of the controller's own worker.
    controller: Waker,
    mapped_doorbells: bool,
    /// Number of the last controller-level reset that this engine has begun.
    epoch: u64,
    /// Whether commands that were fetched before the last controller reset are still outstanding.
    stopping: bool,
    /// Number of orders of the control half that this engine has applied.
    handled: u64,
    /// Whether outstanding commands may still access guest memory that was removed.
    unmapping: bool,
    /// Windows of guest memory that are registered as buffers with this worker's io_uring.
    pinned: PinnedWindows,
    /// Time of the next check on whether detached namespaces can be closed.
    next_tidy: Instant,
}

impl RemoteEngine {
    fn new(engine: Engine, connection: Connection, io: &Rc<Io>) -> Self {
        RemoteEngine {
            engine,
            io: io.clone(),
            ended: false,
            orders: connection.orders,
            reports: connection.reports,
            progress: connection.progress,
            controller: connection.controller,
            mapped_doorbells: connection.mapped_doorbells,
            epoch: connection.epoch,
            stopping: false,
            handled: 0,
            unmapping: false,
            pinned: PinnedWindows::new(io.pinner()),
            next_tidy: Instant::now(),
        }
    }

    /// Returns whether windows of guest memory still have to be pinned for this worker by
    /// [`RemoteEngine::pin_on`].
    pub fn is_pinning(&self) -> bool {
        self.pinned.is_pinning()
    }

    /// Pins the next piece of guest memory for this worker.
    pub fn pin_on(&mut self, pace: &mut PinPace) {
        pace.step(&mut self.pinned);
    }

    /// Wakes the controller's own worker, if this engine has I/O queues.
    pub fn wake_controller(&self) {
        if self.engine.queues.any_io_queue() {
            self.controller.wake_by_ref();
        }
    }

    /// Applies the orders that the control half has sent. Returns whether there were any.
    pub fn drain_messages(&mut self) -> bool {
        let before = self.handled;
        while let Ok(order) = self.orders.try_recv() {
            self.apply(order);
            self.handled += 1;
        }
        if self.handled == before {
            return false;
        }
        self.tell_progress();
        self.progress.handled.store(self.handled, Ordering::Release);
        self.report();
        self.controller.wake_by_ref();
        true
    }

    fn apply(&mut self, order: Order) {
        self.unmapping |= order.takes_memory_away();
        if let Order::Stop(epoch) = order {
            self.epoch = epoch;
            self.stopping = true;
        }
        let change = match order {
            Order::Memory(change) => change,
            Order::Attach(index, config) => return self.attach(index, *config),
            Order::End => {
                self.ended = true;
                return;
            }
            order => {
                let detaches = matches!(order, Order::Detach(_) | Order::EndDetachedEarly);
                // Only changes of guest memory can fail.
                let _ = self.engine.apply(order);
                if detaches {
                    self.tidy(Instant::now());
                }
                return;
            }
        };
        // The controller's own map has accepted the change. This map may refuse it, for example
        // when the file was truncated meanwhile. The window is then missing here, and commands that
        // need it fail.
        match self.engine.apply(Order::Memory(change.clone())) {
            Ok(_) => self.pin(change),
            Err(error) => tracing::debug!(%error, "window missing on a worker"),
        }
    }

    /// Opens a namespace for this worker. If opening fails, the controller detaches the namespace.
    fn attach(&mut self, index: usize, config: NamespaceConfig) {
        let nsid = config.nsid;
        let _disk = self.engine.settings.span.clone().entered();
        let opened = Namespace::open_or_vacant(config, &self.io, &self.engine.counters.io).or_else(
            |error| {
                if let Some(left_out) = self.engine.settings.log.allow("not opened") {
                    let text = "a namespace cannot be opened on another worker";
                    tracing::warn!(nsid, %error, left_out, "{text}");
                }
                self.progress.refused.fetch_add(1, Ordering::Release);
                // A placeholder keeps the index in use, so that indices agree with those of the
                // control half.
                Namespace::vacant(&self.io)
            },
        );
        if let Ok(namespace) = opened {
            self.engine.namespaces.attach(index, namespace);
        }
    }

    /// Releases detached namespaces that have no outstanding commands. Call it periodically, and at
    /// [`RemoteEngine::deadline`].
    pub fn tidy(&mut self, now: Instant) {
        self.next_tidy = now + TIDY_INTERVAL;
        if self.engine.tidy(&self.io) {
            let left = self.engine.namespaces.detached() as u64;
            self.progress.leaving.store(left, Ordering::Release);
            self.controller.wake_by_ref();
        }
    }

    /// Returns whether the controller was dropped; the worker then removes this engine.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Has the kernel pin windows that were mapped, and unpin windows that were removed.
    /// Outstanding requests keep their pages; the report that the memory is unused waits for them.
    fn pin(&mut self, change: MemoryChange) {
        match change {
            MemoryChange::Map {
                iova,
                len,
                backing: Some((memory, offset)),
                ..
            } => self.pinned.mapped(iova, len, &memory, offset),
            MemoryChange::Map { .. } => {}
            MemoryChange::Unmap { iova, len } => self.pinned.unmapped(iova, len),
            MemoryChange::UnmapAll => self.pinned.clear(),
        }
    }

    /// Publishes this engine's progress in applying orders to the control half. Returns whether
    /// there was any.
    fn tell_progress(&mut self) -> bool {
        let mut told = false;
        if self.stopping && self.engine.drained() {
            self.stopping = false;
            self.progress.stopped.store(self.epoch, Ordering::Release);
            told = true;
        }
        if self.unmapping && self.engine.dma.quiesced() {
            self.unmapping = false;
            told = true;
        }
        if !self.unmapping {
            self.progress
                .quiesced
                .store(self.handled, Ordering::Release);
        }
        told
    }

    /// Sends waiting events to the control half, as far as the channel has room. Returns whether
    /// any was sent.
    fn report(&mut self) -> bool {
        let mut told = false;
        while let Some(event) = self.engine.events.pop_front() {
            let report = EngineReport {
                epoch: self.epoch,
                event,
            };
            match self.reports.try_send(report) {
                Ok(()) => told = true,
                Err(TrySendError::Full(report)) => {
                    self.engine.events.push_front(report.event);
                    break;
                }
                // The controller was dropped, so the event is no longer needed.
                Err(TrySendError::Disconnected(_)) => {}
            }
        }
        told
    }

    /// Runs one round of this engine, like
    /// [`Controller::poll_within`](crate::Controller::poll_within).
    pub fn poll(&mut self, now: Instant, budget: &mut Budget) -> bool {
        let mut worked = self.engine.events.len() < EVENTS_WAITING && self.engine.poll(now, budget);
        worked |= self.engine.end_round();
        if let Some(queues) = self.engine.release_migrating() {
            self.engine.events.push_back(Event::Released(queues));
        }
        if self.stopping || self.unmapping || !self.engine.events.is_empty() {
            let told = self.tell_progress() | self.report();
            if told {
                self.controller.wake_by_ref();
            }
            worked |= told;
        }
        worked
    }

    /// Handles the completion of a volume request, like
    /// [`Controller::complete`](crate::Controller::complete).
    pub fn complete(&mut self, completion: volume::Completion) {
        self.engine.complete(completion);
    }

    /// Takes over changed settings of the volumes, like
    /// [`Controller::update_volumes`](crate::Controller::update_volumes).
    pub fn update_volumes(&mut self) {
        self.engine.update_volumes();
    }

    /// Collects completions of volumes without the ring, like
    /// [`Controller::poll_volumes`](crate::Controller::poll_volumes).
    pub fn poll_volumes(&mut self, out: &mut Vec<volume::Completion>) {
        self.engine.poll_volumes(out);
    }

    /// Arms EventIdx of this engine's queues, like [`Controller::arm`](crate::Controller::arm).
    pub fn arm(&mut self) -> bool {
        self.engine.arm()
    }

    /// Checks the doorbells again after arming, like
    /// [`Controller::recheck`](crate::Controller::recheck).
    pub fn recheck(&mut self) -> bool {
        self.engine.recheck()
    }

    /// Returns whether the worker must poll this engine, like
    /// [`Controller::needs_polling`](crate::Controller::needs_polling).
    pub fn needs_polling(&self) -> bool {
        self.engine.polled_in_flight()
    }

    /// Returns whether no notification announces new commands, like
    /// [`Controller::is_unannounced`](crate::Controller::is_unannounced).
    pub fn is_unannounced(&self) -> bool {
        self.mapped_doorbells && self.engine.queues.is_master() && self.engine.queues.any_io_queue()
    }

    /// Returns whether a recently busy queue has a new doorbell value, like
    /// [`Controller::has_news`](crate::Controller::has_news).
    pub fn has_news(&self) -> bool {
        self.engine.queues.has_news()
    }

    /// Returns the number of outstanding commands, like
    /// [`Controller::in_flight`](crate::Controller::in_flight).
    pub fn in_flight(&self) -> usize {
        self.engine.slots.in_use()
    }

    /// Returns whether commands are outstanding, like
    /// [`Controller::is_busy`](crate::Controller::is_busy).
    pub fn is_busy(&self) -> bool {
        self.engine.slots.in_use() > 0
    }

    /// Returns whether this engine has queues with shadow doorbells, like
    /// [`Controller::shadowed`](crate::Controller::shadowed).
    pub fn shadowed(&self) -> bool {
        self.engine.queues.shadowed() && self.engine.queues.any_io_queue()
    }

    /// Returns the time at which [`RemoteEngine::poll`] has to be called next, like
    /// [`Controller::deadline`](crate::Controller::deadline).
    pub fn deadline(&self) -> Option<Instant> {
        let leaving = self.engine.namespaces.detached() > 0;
        let deadlines = [
            self.engine.next_interrupt(),
            self.engine.next_volume_deadline(),
            leaving.then_some(self.next_tidy),
        ];
        deadlines.into_iter().flatten().min()
    }

    /// Begins to flush all data written through this engine, for a clean exit of the process.
    /// [`RemoteEngine::is_drained`] returns `true` when the flush has ended.
    pub fn flush(&mut self) {
        self.engine.flush_for_exit();
    }

    /// Returns whether this engine has no outstanding command or flush.
    pub fn is_drained(&self) -> bool {
        self.engine.drained()
    }
}
