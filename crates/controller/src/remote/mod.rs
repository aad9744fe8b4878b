//! A controller's queues on another worker than its own.
//!
//! ```text
//!   the controller's own worker                        another worker
//!  Controller ---- Order (channel, in order) -----> RemoteEngine
//!    control half <- Report (channel, bounded) ----   |
//!    engine       <- Progress (plain stores) ------ engine
//! ```
//!
//! A [`RemoteEngine`] is an engine with the messages between it and the control half. It has its
//! own map of the guest's memory, its own slots and its own queues into the volumes, so that a
//! command's path shares nothing. With the control half it shares the doorbell page, the counters
//! (each queue's have one writer, that queue's worker) and the receivers of interrupts. A
//! submission queue lives on the worker of its completion queue.
//!
//! The engine carries out the orders ([`Engine::apply`]); here they are received, and progress is
//! reported to the control half. `controller::migration` decides the migration of a queue.

mod report;
mod setup;

pub(crate) use report::{OPEN, OPENING, Progress, Report};
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

/// Interval of checks on detached namespaces, although nothing wakes the worker: the last command
/// on a namespace may end while the worker sleeps, and the flush after it.
const TIDY_INTERVAL: Duration = Duration::from_millis(1);

/// Maximum number of events that wait to be reported; with more, no entry is fetched. This bounds
/// the memory used by the guest's errors.
const EVENTS_WAITING: usize = 64;

/// A controller's data half on a worker other than its own. Belongs to that worker's thread,
/// which uses it like a controller, and calls [`RemoteEngine::drain_messages`] when its worker
/// was woken for messages.
pub struct RemoteEngine {
    engine: Engine,
    /// Ring of the worker, for namespaces that are attached later.
    io: Rc<Io>,
    /// The controller was dropped.
    ended: bool,
    orders: Receiver<Order>,
    reports: SyncSender<Report>,
    progress: Arc<Progress>,
    /// Wakes the controller's own worker.
    controller: Waker,
    mapped_doorbells: bool,
    /// Number of the last controller-level reset that has begun.
    epoch: u64,
    /// The last reset has not ended: commands are in flight.
    stopping: bool,
    /// Number of orders applied.
    handled: u64,
    /// Memory was taken away, and commands in flight may still touch it.
    unmapping: bool,
    /// Guest memory that the kernel has pinned for this worker.
    pinned: PinnedWindows,
    /// Time of the next check on detached namespaces.
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

    /// Returns whether guest memory waits to be pinned for this worker: call
    /// [`RemoteEngine::pin_on`].
    pub fn is_pinning(&self) -> bool {
        self.pinned.is_pinning()
    }

    /// Pins a piece of it.
    pub fn pin_on(&mut self, pace: &mut PinPace) {
        pace.step(&mut self.pinned);
    }

    /// Wakes the controller's own worker, if this one has queues of the controller.
    pub fn wake_controller(&self) {
        if self.engine.any_io_queue() {
            self.controller.wake_by_ref();
        }
    }

    /// Applies the orders of the control half. Returns whether there were any.
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
                // Only changes of memory can fail.
                let _ = self.engine.apply(order);
                if detaches {
                    self.tidy(Instant::now());
                }
                return;
            }
        };
        // The controller's own map has accepted the change. If this map refuses it (the file
        // shrank meanwhile), the window is missing here, and commands that need it fail.
        match self.engine.apply(Order::Memory(change.clone())) {
            Ok(_) => self.pin(change),
            Err(error) => tracing::debug!(%error, "window missing on a worker"),
        }
    }

    /// Opens a namespace for this worker. If that fails, the controller detaches the namespace
    /// again.
    fn attach(&mut self, index: usize, config: NamespaceConfig) {
        let nsid = config.nsid;
        let opened =
            Namespace::open_or_vacant(config, &self.io, self.engine.io()).or_else(|error| {
                tracing::warn!(nsid, %error, "a namespace cannot be opened on another worker");
                self.progress.refused.fetch_add(1, Ordering::Release);
                // The index stays in use, so that indices agree with the control half's.
                Namespace::vacant(&self.io)
            });
        if let Ok(namespace) = opened {
            self.engine.attach(index, namespace);
        }
    }

    /// Releases detached namespaces without commands in flight. To be called periodically, and at
    /// [`RemoteEngine::deadline`].
    pub fn tidy(&mut self, now: Instant) {
        self.next_tidy = now + TIDY_INTERVAL;
        if self.engine.tidy(&self.io) {
            let left = self.engine.detached() as u64;
            self.progress.leaving.store(left, Ordering::Release);
            self.controller.wake_by_ref();
        }
    }

    /// Returns whether the controller was dropped, so that the worker may remove the engine.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Has the kernel pin mapped windows, and unpin unmapped ones: requests in flight keep their
    /// pages, and the report of the unmap waits for them.
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

    /// Reports the progress that the control half waits for. Returns whether there was any.
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

    /// Sends events to the control half, as far as it has room for them. Returns whether there
    /// were any.
    fn report(&mut self) -> bool {
        let mut told = false;
        while let Some(event) = self.engine.events.pop_front() {
            let report = Report {
                epoch: self.epoch,
                event,
            };
            match self.reports.try_send(report) {
                Ok(()) => told = true,
                Err(TrySendError::Full(report)) => {
                    self.engine.events.push_front(report.event);
                    break;
                }
                // The controller was dropped, and nothing needs the event.
                Err(TrySendError::Disconnected(_)) => {}
            }
        }
        told
    }

    /// Runs one round, like [`Controller::poll_within`](crate::Controller::poll_within).
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

    /// Handles a completion, like [`Controller::complete`](crate::Controller::complete).
    pub fn complete(&mut self, completion: volume::Completion) {
        self.engine.complete(completion);
    }

    /// Collects completions, like [`Controller::poll_volumes`](crate::Controller::poll_volumes).
    pub fn poll_volumes(&mut self, out: &mut Vec<volume::Completion>) {
        self.engine.poll_volumes(out);
    }

    /// Arms EventIdx, like [`Controller::arm`](crate::Controller::arm).
    pub fn arm(&mut self) -> bool {
        self.engine.arm()
    }

    /// Checks the doorbells again, like [`Controller::recheck`](crate::Controller::recheck).
    pub fn recheck(&mut self) -> bool {
        self.engine.recheck()
    }

    /// Like [`Controller::needs_polling`](crate::Controller::needs_polling), for this engine.
    pub fn needs_polling(&self) -> bool {
        (self.mapped_doorbells && self.engine.is_master() && self.engine.any_io_queue())
            || self.engine.polled_in_flight()
    }

    /// Like [`Controller::has_news`](crate::Controller::has_news), for this engine.
    pub fn has_news(&self) -> bool {
        self.engine.has_news()
    }

    /// Like [`Controller::in_flight`](crate::Controller::in_flight), for this engine.
    pub fn in_flight(&self) -> usize {
        self.engine.in_flight()
    }

    /// Like [`Controller::is_busy`](crate::Controller::is_busy), for this engine.
    pub fn is_busy(&self) -> bool {
        self.engine.in_flight() > 0
    }

    /// Like [`Controller::shadowed`](crate::Controller::shadowed), if the engine has queues.
    pub fn shadowed(&self) -> bool {
        self.engine.shadowed() && self.engine.any_io_queue()
    }

    /// Like [`Controller::deadline`](crate::Controller::deadline), for this engine.
    pub fn deadline(&self) -> Option<Instant> {
        let leaving = self.engine.detached() > 0;
        let deadlines = [
            self.engine.next_interrupt(),
            self.engine.next_volume_deadline(),
            leaving.then_some(self.next_tidy),
        ];
        deadlines.into_iter().flatten().min()
    }

    /// Starts to make all data durable that was written through this engine, for a clean exit of
    /// the process. The flush has ended when [`RemoteEngine::is_drained`] returns `true`.
    pub fn flush(&mut self) {
        self.engine.flush_for_exit();
    }

    /// Returns whether no command is in flight, and no flush.
    pub fn is_drained(&self) -> bool {
        self.engine.drained()
    }
}
