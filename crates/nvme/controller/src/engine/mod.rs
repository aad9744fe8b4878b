//! The data half of a controller: queues, outstanding commands, completions and interrupts. Owned
//! by one worker thread.
//!
//! ```text
//! doorbell cells -> fetch (batch) -> I/O command (io) -> dma walk -> volume
//!                       |                                              |
//!                       `-> admin command -> control half              v
//! interrupt <- completion queue <- post <------------------------- complete
//! ```
//!
//! An engine consists of parts that change together: queues with their doorbells ([`Queues`]),
//! outstanding commands ([`Slots`]), namespaces ([`NamespaceTable`]), settings, counters, journal,
//! flushes, interrupts and guest memory. Methods of a part name the other parts that they use.
//! Commands use the parts in [`Execution`], which excludes queues and interrupts. Files with
//! `impl Engine` connect the parts.
//!
//! The control half ([`crate::Controller`]) creates and deletes queues here, and receives
//! [`Event`]s. An idle queue costs only a look at its submission queue's doorbell: completion
//! queues that have entries to signal or completions to post are in lists (`dirty`, `blocked`).

mod abort;
mod attach;
mod bus_master;
pub(crate) mod commands;
mod complete;
pub(crate) mod copy;
mod copy_metadata;
mod copy_ranges;
mod distance;
mod doorbells;
mod execution;
mod features;
mod fetch;
mod flushes;
mod gate;
mod interrupt;
mod invariant;
mod io;
mod journal;
mod keep;
mod live;
mod metadata;
mod migrate;
mod namespace;
mod namespaces;
mod order;
mod own;
mod pass;
mod placed;
mod polled;
mod polling;
mod post;
mod queue;
mod queues;
mod ranges;
mod recover;
mod reservation;
mod run;
mod scratch;
mod slots;
mod timing;
mod uncorrectable;
mod zoned;

use crate::irq::{Irqs, Pending};
use crate::marks::MarkTable;
use crate::stats::{ControllerStats, IoStats};
use crate::survival::state::AdminQueue;
use bus_master::BusMaster;
use dma::{DmaMap, SharedPages};
use execution::Execution;
pub(crate) use features::EngineFeatures;
use features::Settings;
use flushes::Flushes;
use journal::{Journal, QueueRows};
use nvme::{Command, Status};
use probes::LogLimits;
use run::BatchMemory;
use slots::Slots;
use state_memory::{StateError, StateMemory};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;
use timing::IoCounters;
use tracing::Span;

pub(crate) use execution::{dma_status, status_of};
pub(crate) use interrupt::Coalescing;
pub(crate) use migrate::MigratingQueues;
pub(crate) use namespace::Namespace;
pub(crate) use namespaces::NamespaceTable;
pub(crate) use order::{MemoryChange, Order};
pub(crate) use own::OwnRequest;
pub(crate) use queue::Sq;
pub(crate) use queues::Queues;
pub use recover::Recovery;
pub(crate) use recover::{SavedCq, SavedSq};
pub(crate) use reservation::{ReservationCommand, ReservationEnd, ReservationRequest};
pub use slots::tag_owner;
pub(crate) use uncorrectable::{Change, Marking};

/// Message of an engine, which executes commands, to the controller's control half.
pub(crate) enum Event {
    /// The engine has fetched this admin command.
    Admin(Command),
    /// A submission queue that was being deleted has no outstanding command left.
    SqDrained(u16),
    /// The command to abort has ended.
    AbortDone { sqid: u16, cid: u16, aborted: bool },
    /// An I/O command has failed.
    Failed {
        sqid: u16,
        cid: u16,
        status: Status,
        nsid: u32,
        lba: u64,
        /// The block cannot be read because Write Uncorrectable has marked it.
        marked: bool,
    },
    /// The host wrote a doorbell value that the queue does not allow. `cq` selects the completion
    /// queue head doorbell.
    InvalidDoorbell { qid: u16, cq: bool, value: u32 },
    /// All flushes ordered up to this number have completed; `failed` is their first error.
    Flushed { number: u64, failed: Option<Status> },
    /// The command to abort does not exist.
    AbortMissed { sqid: u16, cid: u16 },
    /// The migrating queue was released, and none of its commands is outstanding
    /// ([`Queues::begin_migration`]).
    Released(Box<MigratingQueues>),
    /// The queue stays, because its migration was cancelled ([`Queues::cancel_migration`]).
    MigrationCancelled,
    /// A reservation command was fetched. [`Engine::end_reservation`] ends it.
    Reservation(Box<ReservationCommand>),
    /// A command marks blocks or removes marks. [`Execution::end_marking`] ends it.
    Marking(Box<Marking>),
    /// This invariant is violated ([`Engine::broken`]).
    Broken(&'static str),
}

/// Messages to the control half, in order.
pub(crate) type Events = VecDeque<Event>;

#[derive(Clone)]
pub(crate) struct EngineConfig {
    pub id: u16,
    /// Index of this engine's command records in the state memory, and of its I/O counters in
    /// [`ControllerStats::shares`].
    pub share: u16,
    /// I/O counters of this engine.
    pub io: Arc<IoStats>,
    pub io_queues: u16,
    pub vectors: u16,
    pub max_in_flight: u16,
    pub max_transfer: u64,
    /// Largest valid NSID (NN of Identify Controller).
    pub max_namespaces: u32,
    pub page: Arc<SharedPages>,
    pub stats: Arc<ControllerStats>,
    pub pending: Arc<Pending>,
    /// Properties of the controller that decide the commands it supports.
    pub offer: commands::Offer,
    /// Blocks that Write Uncorrectable has marked, by NSID.
    pub marks: Arc<MarkTable>,
    /// State memory for the next process; `None` when restart is not enabled.
    pub state: Option<StateMemory>,
    /// Names the disk in log lines.
    pub span: Span,
    /// Limits of the disk's log lines.
    pub log: Arc<LogLimits>,
}

/// Data half of a controller on one worker.
pub(crate) struct Engine {
    pub dma: DmaMap,
    pub irqs: Irqs,
    pub events: Events,
    pub stats: Arc<ControllerStats>,
    pub counters: IoCounters,
    pub settings: Settings,
    pub namespaces: NamespaceTable,
    pub queues: Queues,
    /// Outstanding commands.
    pub slots: Slots,
    pub journal: Journal,
    flushes: Flushes,
    batch: BatchMemory,
}

impl Drop for Engine {
    fn drop(&mut self) {
        zoned::leave_zones(&mut self.namespaces, &self.slots);
    }
}

impl Engine {
    /// Creates an engine with these namespaces.
    ///
    /// # Errors
    /// [`StateError`] when pages of the state memory cannot be mapped.
    pub fn new(config: EngineConfig, namespaces: Vec<Namespace>) -> Result<Self, StateError> {
        let hot = config.state.as_ref().map(StateMemory::hot).transpose()?;
        let hot = hot.map(QueueRows::new);
        Ok(Engine {
            dma: DmaMap::new(),
            irqs: Irqs::new(config.vectors, config.pending),
            events: Events::new(),
            stats: config.stats.clone(),
            counters: IoCounters::new(config.io),
            settings: Settings {
                features: EngineFeatures::default(),
                page_size: 4096,
                max_transfer: config.max_transfer,
                offer: config.offer,
                span: config.span,
                log: config.log,
            },
            namespaces: NamespaceTable::new(namespaces, config.max_namespaces, config.marks),
            queues: Queues::new(config.id, config.page, config.io_queues + 1, config.stats),
            slots: Slots::new(config.id, config.max_in_flight, config.max_transfer),
            journal: Journal::new(config.state, config.share, hot),
            flushes: Flushes::default(),
            batch: BatchMemory::new(),
        })
    }

    /// Reports the violation of an invariant, see [`invariant::broken`].
    pub(crate) fn broken(&mut self, what: &'static str) {
        invariant::broken(&mut self.events, what);
    }

    /// Returns the controller properties that decide the supported commands.
    pub fn offer(&self) -> commands::Offer {
        commands::Offer {
            placed: self.namespaces.any_placed,
            ..self.settings.offer
        }
    }

    /// Clears the remains of the queues after all engines of the controller have stopped. Earlier,
    /// an engine that still fetches from a queue would take the cleared register for a doorbell
    /// value.
    pub fn clear(&mut self) {
        self.queues.doorbells.clear();
        self.irqs.reset();
    }

    /// Returns the state of the admin queue for the next process: the number of fetched commands,
    /// the tail, and the completions that wait for room.
    pub fn admin_queue(&self) -> Option<AdminQueue> {
        let (Some(Some(sq)), Some(Some(cq))) = (self.queues.sqs.first(), self.queues.cqs.first())
        else {
            return None;
        };
        Some(AdminQueue {
            fetched: sq.fetched,
            tail: cq.tail,
            phase: cq.phase,
            posted: self.journal.admin_posted,
            posting: cq.backlog.iter().map(|kept| kept.entry.ending()).collect(),
        })
    }

    /// Returns whether neither a command nor a flush at the controller's own request is
    /// outstanding.
    pub fn drained(&self) -> bool {
        self.slots.in_use() == 0 && self.flushes.pending() == 0
    }

    /// Ends a round: posts completions that waited for room, and sends interrupts. Returns whether
    /// any completion was posted.
    pub fn end_round(&mut self) -> bool {
        let posted = !self.queues.blocked.is_empty() && self.post_backlogs();
        let (irqs, coalescing) = (&mut self.irqs, &self.settings.features.coalescing);
        let (now, events) = (self.counters.now, &mut self.events);
        self.queues.send_interrupts(irqs, coalescing, now, events);
        if std::mem::take(&mut self.queues.queue_gone) {
            self.broken("a command ends whose queue is gone");
        }
        self.counters.count_busy(&self.slots);
        posted
    }

    /// Posts completions that waited for room, see [`Queues::post_backlogs`].
    fn post_backlogs(&mut self) -> bool {
        let (slots, journal, events) = (&mut self.slots, &mut self.journal, &mut self.events);
        self.queues.post_backlogs(slots, journal, events)
    }

    /// Returns the time at which the next delayed interrupt is due.
    pub fn next_interrupt(&self) -> Option<Instant> {
        self.queues
            .next_interrupt(&self.settings.features.coalescing)
    }

    /// Returns whether outstanding commands complete without waking the worker, which therefore has
    /// to poll.
    pub fn polled_in_flight(&self) -> bool {
        self.namespaces.iter().any(Namespace::needs_polling)
    }

    /// Returns the time by which a volume has to be polled even if nothing wakes the worker,
    /// because requests wait for that time.
    pub fn next_volume_deadline(&self) -> Option<Instant> {
        let queues = self.namespaces.iter();
        queues.filter_map(Namespace::deadline).min()
    }

    /// Takes over changed settings of the volumes.
    pub fn update_volumes(&mut self) {
        for ns in self.namespaces.iter_mut() {
            ns.update_volume();
        }
    }

    /// Appends to `out` the completions of polled volumes.
    pub fn poll_volumes(&mut self, out: &mut Vec<volume::Completion>) {
        for ns in self.namespaces.iter_mut() {
            ns.queue.poll(&mut |completion| out.push(completion));
        }
    }
}
