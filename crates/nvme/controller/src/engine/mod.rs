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
mod features;
mod fetch;
mod flushes;
mod gate;
mod interrupt;
mod invariant;
mod io;
mod journal;
mod keep;
mod metadata;
mod migrate;
mod namespace;
mod order;
mod own;
mod pass;
mod placed;
mod polled;
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
use attach::Detached;
use bus_master::BusMaster;
use distance::Distance;
use dma::{DmaMap, SegmentList, SharedPages};
use doorbells::Doorbells;
pub(crate) use features::EngineFeatures;
use flushes::Flushes;
use gate::NsidTable;
use journal::{Journal, QueueRows};
use nvme::{Command, Status};
use polled::PolledQueues;
use probes::{IoRecord, LogLimits};
use queue::Cq;
use scratch::Budget;
use slots::Slots;
use state_memory::{StateError, StateMemory};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;
use timing::LatencySampling;
use tracing::Span;

pub(crate) use complete::status_of;
pub(crate) use interrupt::Coalescing;
pub(crate) use io::dma_status;
pub(crate) use migrate::MigratingQueues;
pub(crate) use namespace::Namespace;
pub(crate) use order::{MemoryChange, Order};
pub(crate) use own::OwnRequest;
pub(crate) use queue::Sq;
pub use recover::Recovery;
pub(crate) use recover::{SavedCq, SavedSq};
pub(crate) use reservation::{ReservationCommand, ReservationEnd, ReservationRequest};
pub use slots::tag_owner;
pub(crate) use uncorrectable::{Change, Marking};

/// Value that stands for no namespace in a table of namespace indices by NSID.
const NO_NAMESPACE: u16 = u16::MAX;

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
    /// ([`Engine::begin_migration`]).
    Released(Box<MigratingQueues>),
    /// The queue stays, because its migration was cancelled ([`Engine::cancel_migration`]).
    MigrationCancelled,
    /// A reservation command was fetched. [`Engine::end_reservation`] ends it.
    Reservation(Box<ReservationCommand>),
    /// A command marks blocks or removes marks. [`Engine::end_marking`] ends it.
    Marking(Box<Marking>),
    /// This invariant is violated ([`Engine::broken`]).
    Broken(&'static str),
}

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

pub(crate) struct Engine {
    /// Number of the engine's controller within its worker, which trace points report.
    id: u16,
    pub dma: DmaMap,
    pub irqs: Irqs,
    /// Names the disk in log lines.
    pub span: Span,
    pub stats: Arc<ControllerStats>,
    /// I/O counters of this engine.
    io: Arc<IoStats>,
    /// I/O counters of commands for namespaces that do not exist.
    nowhere: Arc<IoRecord>,
    sampling: LatencySampling,
    /// Values of the features that the host has set.
    features: EngineFeatures,
    pub events: VecDeque<Event>,
    pub namespaces: Vec<Namespace>,
    nsids: NsidTable,
    /// Properties of the controller that decide the commands it supports.
    offer: commands::Offer,
    /// Blocks that Write Uncorrectable has marked, by NSID.
    marks: Arc<MarkTable>,
    /// Namespace index and tag of each outstanding command that a change of access rights waits
    /// for.
    fences: Vec<(usize, u64)>,
    /// Detached namespaces with volumes that are still open.
    detached: Vec<Detached>,
    /// Memory page size in bytes (CC.MPS).
    pub page_size: u64,
    max_transfer: u64,
    doorbells: Doorbells,
    sqs: Vec<Option<Sq>>,
    cqs: Vec<Option<Cq>>,
    /// Whether the engine fetches no commands until the controller is enabled again.
    halted: bool,
    bus_master: BusMaster,
    /// ID of the completion queue that is migrating to another worker's engine, if any.
    migrating: Option<u16>,
    /// IDs of the submission queues to fetch from, in polling order.
    polled: PolledQueues,
    /// IDs of the completion queues that have new entries and need an interrupt.
    dirty: Vec<u16>,
    /// IDs of the completion queues that were full, so that completions wait for room.
    blocked: Vec<u16>,
    slots: Slots,
    /// Slot index of the command that is being started, if any.
    starting: Option<u16>,
    journal: Journal,
    /// Slots of commands that the volume executes piece by piece within the call, and that continue
    /// in the next round.
    parked: VecDeque<u16>,
    /// Budget for the process memory that Compare, Verify and Copy read into.
    scratch: Budget,
    flushes: Flushes,
    own: own::OwnRequests,
    now: Instant,
    busy_since: Option<Instant>,
    /// Whether a command of a queue that no longer exists has ended. [`Engine::broken`] is called
    /// at the end of the round, because a call in the completion path would cost each command some
    /// registers.
    queue_gone: bool,
    /// Copies of the submission queue entries of the current batch.
    entries: Box<[[u8; 64]; run::BATCH]>,
    /// Guest memory segments of the current command; empty between commands.
    list: SegmentList,
    /// Budget of the current batch for commands with data in more than one page.
    long: run::LongWork,
    /// Measured distance of the host's processor.
    distance: Distance,
    /// Limits of the disk's log lines.
    pub log: Arc<LogLimits>,
}

impl Engine {
    /// Creates an engine with these namespaces.
    ///
    /// # Errors
    /// [`StateError`] when pages of the state memory cannot be mapped.
    pub fn new(config: EngineConfig, namespaces: Vec<Namespace>) -> Result<Self, StateError> {
        let hot = config.state.as_ref().map(StateMemory::hot).transpose()?;
        let hot = hot.map(QueueRows::new);
        let queues = config.io_queues + 1;
        let mut by_nsid = vec![NO_NAMESPACE; config.max_namespaces as usize + 1];
        for (i, ns) in namespaces.iter().enumerate() {
            if !ns.is_vacant()
                && let Some(slot) = by_nsid.get_mut(ns.config.nsid as usize)
            {
                *slot = i as u16;
            }
        }
        let mut engine = Engine {
            nowhere: config.io.namespace(0),
            sampling: LatencySampling::default(),
            id: config.id,
            dma: DmaMap::new(),
            irqs: Irqs::new(config.vectors, config.pending),
            span: config.span,
            io: config.io,
            stats: config.stats,
            features: EngineFeatures::default(),
            events: VecDeque::new(),
            namespaces,
            nsids: NsidTable::new(by_nsid),
            offer: config.offer,
            marks: config.marks,
            fences: Vec::new(),
            detached: Vec::new(),
            page_size: 4096,
            max_transfer: config.max_transfer,
            doorbells: Doorbells::new(config.page, queues),
            sqs: (0..queues).map(|_| None).collect(),
            cqs: (0..queues).map(|_| None).collect(),
            halted: false,
            bus_master: BusMaster::default(),
            migrating: None,
            polled: PolledQueues::with_capacity(usize::from(queues)),
            dirty: Vec::with_capacity(usize::from(queues)),
            blocked: Vec::with_capacity(usize::from(queues)),
            slots: Slots::new(config.id, config.max_in_flight),
            starting: None,
            journal: Journal::new(config.state, config.share, hot),
            parked: VecDeque::with_capacity(usize::from(config.max_in_flight)),
            scratch: Budget::new(config.max_transfer),
            flushes: Flushes::default(),
            own: own::OwnRequests::default(),
            now: Instant::now(),
            busy_since: None,
            queue_gone: false,
            entries: Box::new([[0; 64]; run::BATCH]),
            list: SegmentList::with_capacity(1),
            long: run::LongWork::default(),
            distance: Distance::new(),
            log: config.log,
        };
        let all = 0..engine.namespaces.len();
        all.for_each(|index| engine.find_marks(index));
        engine.index_namespaces();
        Ok(engine)
    }

    /// Returns the index of an attached namespace.
    ///
    /// # Errors
    /// Invalid Field when no namespace has this NSID, Invalid Namespace when none can have it
    /// ("NVMe Base 2.1", 3.2.1.2 to 3.2.1.4).
    pub fn namespace_index(&self, nsid: u32) -> Result<usize, Status> {
        match self.nsids.all.get(nsid as usize) {
            Some(index) if *index != NO_NAMESPACE => Ok(usize::from(*index)),
            Some(_) if nsid != 0 => Err(Status::INVALID_FIELD.with_dnr(true)),
            _ => Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(true)),
        }
    }

    /// Begins a controller-level reset: deletes all queues, and stops fetching and posting.
    /// [`Engine::drained`] returns `true` when the reset has ended; until then, commands may still
    /// access guest memory.
    fn stop(&mut self) {
        self.sqs.iter_mut().for_each(|q| *q = None);
        self.cqs.iter_mut().for_each(|q| *q = None);
        self.polled.clear();
        self.dirty.clear();
        self.blocked.clear();
        self.events.clear();
        self.queue_gone = false;
        self.halted = false;
        self.migrating = None;
        self.doorbells.forget();
        self.slots.release_all_kept();
        self.forget_reservations();
        self.forget_marking();
        self.slots.orphan_all();
        let in_flight: Vec<(u64, usize)> = self.slots.guests_in_flight(self.own_stays()).collect();
        for (tag, ns) in in_flight {
            self.cancel(tag, ns);
        }
    }

    /// Asks the volume to end the command with this tag early.
    fn cancel(&mut self, tag: u64, ns: usize) {
        if let Some(ns) = self.namespaces.get_mut(ns) {
            ns.queue.cancel(tag);
            if let Some(passthrough) = &mut ns.passthrough {
                passthrough.abort(tag);
            }
        }
    }

    /// Clears the remains of the queues after all engines of the controller have stopped. Earlier,
    /// an engine that still fetches from a queue would take the cleared register for a doorbell
    /// value.
    pub fn clear(&mut self) {
        self.doorbells.clear();
        self.irqs.reset();
    }

    /// Returns the state of the admin queue for the next process: the number of fetched commands,
    /// the tail, and the completions that wait for room.
    pub fn admin_queue(&self) -> Option<AdminQueue> {
        let (Some(Some(sq)), Some(Some(cq))) = (self.sqs.first(), self.cqs.first()) else {
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

    /// Returns whether commands of the previous process still occupy additional slots, because
    /// their records are not in this engine's share of the state memory.
    pub fn is_inheriting(&self) -> bool {
        self.slots.is_inheriting()
    }

    /// Returns whether neither a command nor a flush at the controller's own request is
    /// outstanding.
    pub fn drained(&self) -> bool {
        self.slots.in_use() == 0 && self.flushes.pending() == 0
    }

    /// Enables the engine, so that queues may be created. `page_size` is the host's memory page
    /// size in bytes.
    fn enable(&mut self, page_size: u64) {
        self.halted = false;
        self.page_size = page_size;
    }

    /// Returns whether fetching has stopped until the controller is enabled again.
    pub fn halted(&self) -> bool {
        self.halted
    }

    /// Stops fetching commands, for a shutdown or a fatal error. Outstanding commands complete.
    fn stop_fetching(&mut self) {
        self.halted = true;
        self.polled.clear();
    }

    // ---- guest memory

    /// Releases rings and buffers in a range of IOVAs that was unmapped. The caller answers the VMM
    /// when `self.dma.quiesced()` returns `true`.
    fn unmapped(&mut self, iova: u64, len: u64) {
        for sq in self.sqs.iter_mut().flatten() {
            sq.memory.unmapped(iova, len);
        }
        for (qid, cq) in (0..).zip(&mut self.cqs) {
            if let Some(cq) = cq
                && cq.memory.unmapped(iova, len)
            {
                Self::note_cq(&self.journal.hot, qid, cq);
            }
        }
        if self.doorbells.shadowed() && self.doorbells.lie_in(iova, len) {
            // Shadow entries are read a last time, and registers a first time without them:
            // registers count from their next change on.
            self.look_at_all();
            self.doorbells.release();
            self.look_at_all();
        }
    }

    /// Looks up unmapped rings and buffers after some part of this range of IOVAs was mapped.
    fn mapped(&mut self, iova: u64, len: u64) {
        if !self.bus_master.is_enabled {
            // Rings are looked up when Bus Master Enable is set.
            return;
        }
        let dma = &self.dma;
        for sq in self.sqs.iter_mut().flatten() {
            sq.memory.mapped_in(dma, iova, len);
        }
        for (qid, cq) in (0..).zip(&mut self.cqs) {
            if let Some(cq) = cq
                && cq.memory.mapped_in(dma, iova, len)
            {
                cq.clear();
                Self::note_cq(&self.journal.hot, qid, cq);
            }
        }
        if self.doorbells.lie_in(iova, len) && self.doorbells.mapped(dma) {
            self.look_at_all();
        }
    }

    /// Returns the guest addresses of the shadow doorbell buffer and the EventIdx buffer, as set by
    /// Doorbell Buffer Config.
    pub fn shadow_buffers(&self) -> Option<(u64, u64)> {
        self.doorbells.buffers()
    }

    /// Returns the doorbell page, which a client may map.
    pub fn doorbell_page(&self) -> &Arc<SharedPages> {
        self.doorbells.page()
    }

    /// Returns whether shadow doorbells are in use.
    pub fn shadowed(&self) -> bool {
        self.doorbells.shadowed()
    }

    // ---- running

    /// Ends a round: posts completions that waited for room, and sends interrupts. Returns whether
    /// any completion was posted.
    pub fn end_round(&mut self) -> bool {
        let posted = !self.blocked.is_empty() && self.post_backlogs();
        self.send_interrupts();
        if std::mem::take(&mut self.queue_gone) {
            self.broken("a command ends whose queue is gone");
        }
        if self.busy_since.is_some() {
            self.count_busy();
        }
        posted
    }

    /// Returns whether outstanding commands complete without waking the worker, which therefore has
    /// to poll.
    pub fn polled_in_flight(&self) -> bool {
        self.namespaces.iter().any(Namespace::needs_polling)
    }

    /// Returns the number of outstanding commands of the host plus the controller's own outstanding
    /// flushes.
    pub fn in_flight(&self) -> usize {
        self.slots.in_use()
    }

    /// Returns the time by which a volume has to be polled even if nothing wakes the worker,
    /// because requests wait for that time.
    pub fn next_volume_deadline(&self) -> Option<Instant> {
        let queues = self.namespaces.iter();
        queues.filter_map(Namespace::deadline).min()
    }

    /// Takes over changed settings of the volumes.
    pub fn update_volumes(&mut self) {
        for ns in &mut self.namespaces {
            ns.update_volume();
        }
    }

    /// Appends to `out` the completions of polled volumes.
    pub fn poll_volumes(&mut self, out: &mut Vec<volume::Completion>) {
        for ns in &mut self.namespaces {
            ns.queue.poll(&mut |completion| out.push(completion));
        }
    }
}
