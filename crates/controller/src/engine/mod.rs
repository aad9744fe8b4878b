//! The data half of a controller: queues, commands in flight, completions, interrupts. Owned by one
//! worker thread.
//!
//! ```text
//! doorbell cells -> fetch (batch) -> I/O command (io) -> dma walk -> volume
//!                       |                                              |
//!                       `-> admin command -> control half              v
//! interrupt <- completion queue <- post <------------------------- complete
//! ```
//!
//! The control half ([`crate::Controller`]) creates and deletes queues here, and receives
//! [`Event`]s. An idle queue costs one look at its submission queue's doorbell: completion queues
//! with entries to signal or completions to post are in lists (`dirty`, `blocked`).

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
mod fetch;
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
use distance::Distance;
use dma::{DmaMap, SegmentList, SharedPages};
use doorbells::Doorbells;
use journal::Hot;
use nvme::{Command, Status};
use polled::PolledQueues;
use probes::IoRecord;
use queue::Cq;
use scratch::Budget;
use slots::Slots;
use state_memory::{StateError, StateMemory};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

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
pub(crate) use reservation::{Asked, ReservationCommand, ReservationEnd};
pub use slots::tag_owner;
pub(crate) use uncorrectable::{Change, Marking};

/// Value that is no index of a namespace.
const NO_NAMESPACE: u16 = u16::MAX;

/// Report of an engine to the control half.
pub(crate) enum Event {
    /// An admin command was fetched.
    Admin(Command),
    /// A submission queue that was being deleted has no command left.
    SqDrained(u16),
    /// The target of an Abort command has ended.
    AbortDone { sqid: u16, cid: u16, aborted: bool },
    /// A command ended with an error.
    Failed {
        sqid: u16,
        cid: u16,
        status: Status,
        nsid: u32,
        lba: u64,
        /// The block cannot be read because Write Uncorrectable has marked it.
        marked: bool,
    },
    /// A doorbell (a completion queue's head if `cq`) was written with a value that its queue
    /// does not allow.
    InvalidDoorbell { qid: u16, cq: bool, value: u32 },
    /// All flushes ordered up to this number have completed; the first error of them.
    Flushed { number: u64, failed: Option<Status> },
    /// The command to abort was not found.
    AbortMissed { sqid: u16, cid: u16 },
    /// A migrating queue has left the engine: none of its commands is in flight there
    /// ([`Engine::begin_migration`]).
    Released(Box<MigratingQueues>),
    /// The queue that was to migrate stays ([`Engine::cancel_migration`]).
    MigrationCancelled,
    /// A reservation command was fetched: it ends by [`Engine::end_reservation`].
    Reservation(Box<ReservationCommand>),
    /// A command marks blocks, or removes marks: it ends by [`Engine::end_marking`].
    Marking(Box<Marking>),
    /// An invariant is broken: this one ([`Engine::broken`]).
    Broken(&'static str),
}

#[derive(Clone)]
pub(crate) struct EngineConfig {
    pub id: u16,
    /// Index of the engine's counters in [`ControllerStats::shares`].
    pub share: u16,
    pub io_queues: u16,
    pub vectors: u16,
    pub max_in_flight: u16,
    pub max_transfer: u64,
    /// Largest valid NSID.
    pub max_namespaces: u32,
    pub page: Arc<SharedPages>,
    pub stats: Arc<ControllerStats>,
    pub pending: Arc<Pending>,
    /// Properties of the controller that decide its commands.
    pub offer: commands::Offer,
    /// Marked blocks of the namespaces.
    pub marks: Arc<MarkTable>,
    /// State memory for the next process, if restart is enabled.
    pub state: Option<StateMemory>,
}

pub(crate) struct Engine {
    /// Number of the engine within its worker, for trace points.
    id: u16,
    pub dma: DmaMap,
    pub irqs: Irqs,
    pub stats: Arc<ControllerStats>,
    /// This engine's share of the I/O counters.
    io: Arc<IoStats>,
    /// Counters of commands for namespaces that do not exist.
    nowhere: Arc<IoRecord>,
    /// Number of commands to fetch before one that is timed.
    until_timed: u32,
    /// Index in the batch of the command that is timed.
    timed_place: u32,
    /// Fetch time of the command on the general path, if it is to be timed, else 0.
    fetched_at: u64,
    pub coalescing: Coalescing,
    pub events: VecDeque<Event>,
    pub namespaces: Vec<Namespace>,
    /// Index in `namespaces` by NSID; [`NO_NAMESPACE`] where there is none.
    by_nsid: Vec<u16>,
    /// Index in `namespaces` by NSID, restricted to namespaces with full access, for the fast
    /// path.
    open_by_nsid: Vec<u16>,
    /// Properties of the controller that decide its commands.
    offer: commands::Offer,
    /// Marked blocks of the namespaces.
    marks: Arc<MarkTable>,
    /// At least one namespace is closed to hosts, or has a format that the host has not enabled.
    closed: bool,
    /// At least one namespace has placement handles.
    placed: bool,
    /// Namespace index and tag of commands that are awaited.
    fences: Vec<(usize, u64)>,
    /// Detached namespaces that are not released yet.
    detached: Vec<Detached>,
    /// The volatile write cache feature; when off, every write is durable before it completes.
    pub write_cache: bool,
    /// Descriptor formats of Copy that the host has enabled, as bits.
    copy_formats: u16,
    /// The host has enabled extended protection information formats (LBAFEE).
    lbafee: bool,
    /// Memory page size in bytes (CC.MPS).
    pub page_size: u64,
    max_transfer: u64,
    doorbells: Doorbells,
    sqs: Vec<Option<Sq>>,
    cqs: Vec<Option<Cq>>,
    /// Fetching has stopped, until the controller is enabled again.
    halted: bool,
    /// Bus Master Enable. Without it no queue has its ring, and the shadow buffers are not there.
    master: bool,
    /// How often the control half has set Bus Master Enable.
    masterings: u64,
    /// Commands in flight were asked to end early, because Bus Master Enable was cleared.
    interrupting: bool,
    /// The completion queue that migrates to another engine.
    migrating: Option<u16>,
    /// Submission queues that are fetched from, in polling order.
    polled: PolledQueues,
    /// Completion queues with entries that are not signalled yet.
    dirty: Vec<u16>,
    /// Completion queues with completions that found no room.
    blocked: Vec<u16>,
    slots: Slots,
    /// Slot of the command that is being started.
    starting: Option<u16>,
    /// State memory for the records, and this engine's share of it.
    state: Option<(StateMemory, u16)>,
    /// Rows for the notes of batches.
    hot: Option<Hot>,
    /// Number of posted completions of admin commands, by all processes.
    admin_posted: u64,
    /// Commands (by slot) that the volume executes piece by piece within the call, and that have
    /// pieces left for the next round.
    parked: VecDeque<u16>,
    /// Budget of host memory for Compare, Verify and Copy.
    scratch: Budget,
    /// Namespaces that are still to be flushed on the controller's own account.
    flushes: VecDeque<usize>,
    /// Number of flushes on the controller's own account in progress, waiting ones included.
    flushing: usize,
    flush_failed: Option<Status>,
    /// Number of the last flush that was ordered.
    flush: u64,
    own: own::OwnRequests,
    now: Instant,
    busy_since: Option<Instant>,
    /// A command ended without its queue. [`Engine::broken`] is called at the end of the round,
    /// because a call in the completion path would cost each command some registers.
    queue_gone: bool,
    /// Copies of submission queue entries, while a batch of them is executed.
    entries: Box<[[u8; 64]; run::BATCH]>,
    /// Data of the current command; empty between commands.
    list: SegmentList,
    /// Deferred work of the current batch.
    long: run::LongWork,
    /// Distance to the host's processor.
    distance: Distance,
}

impl Engine {
    /// # Errors
    /// [`StateError`] when the state memory's pages cannot be mapped.
    pub fn new(config: EngineConfig, namespaces: Vec<Namespace>) -> Result<Self, StateError> {
        let hot = config.state.as_ref().map(StateMemory::hot).transpose()?;
        let hot = hot.map(Hot::new);
        let queues = config.io_queues + 1;
        let mut by_nsid = vec![NO_NAMESPACE; config.max_namespaces as usize + 1];
        for (i, ns) in namespaces.iter().enumerate() {
            if !ns.is_vacant()
                && let Some(slot) = by_nsid.get_mut(ns.config.nsid as usize)
            {
                *slot = i as u16;
            }
        }
        let io = config.stats.shares.get(usize::from(config.share)).cloned();
        let io: Arc<IoStats> = io.unwrap_or_default();
        let mut engine = Engine {
            nowhere: io.namespace(0),
            fetched_at: 0,
            until_timed: 0,
            timed_place: 0,
            id: config.id,
            dma: DmaMap::new(),
            irqs: Irqs::new(config.vectors, config.pending),
            io,
            stats: config.stats,
            coalescing: Coalescing::default(),
            events: VecDeque::new(),
            namespaces,
            open_by_nsid: by_nsid.clone(),
            by_nsid,
            offer: config.offer,
            marks: config.marks,
            closed: false,
            placed: false,
            fences: Vec::new(),
            detached: Vec::new(),
            write_cache: true,
            copy_formats: 0,
            lbafee: false,
            page_size: 4096,
            max_transfer: config.max_transfer,
            doorbells: Doorbells::new(config.page, queues),
            sqs: (0..queues).map(|_| None).collect(),
            cqs: (0..queues).map(|_| None).collect(),
            halted: false,
            master: false,
            masterings: 0,
            interrupting: false,
            migrating: None,
            polled: PolledQueues::with_capacity(usize::from(queues)),
            dirty: Vec::with_capacity(usize::from(queues)),
            blocked: Vec::with_capacity(usize::from(queues)),
            slots: Slots::new(config.id, config.max_in_flight),
            starting: None,
            state: config.state.map(|state| (state, config.share)),
            admin_posted: hot.as_ref().map_or(0, Hot::admin),
            hot,
            parked: VecDeque::with_capacity(usize::from(config.max_in_flight)),
            scratch: Budget::new(config.max_transfer),
            flushes: VecDeque::new(),
            flushing: 0,
            flush_failed: None,
            flush: 0,
            own: own::OwnRequests::default(),
            now: Instant::now(),
            busy_since: None,
            queue_gone: false,
            entries: Box::new([[0; 64]; run::BATCH]),
            list: SegmentList::with_capacity(1),
            long: run::LongWork::default(),
            distance: Distance::new(),
        };
        let all = 0..engine.namespaces.len();
        all.for_each(|index| engine.find_marks(index));
        engine.index_namespaces();
        Ok(engine)
    }

    /// Returns the index of an active namespace. An NSID that no namespace has is an invalid
    /// field; one that none can have is an invalid namespace ("NVMe Base 2.1", 3.2.1.2 to
    /// 3.2.1.4).
    pub fn namespace_index(&self, nsid: u32) -> Result<usize, Status> {
        match self.by_nsid.get(nsid as usize) {
            Some(index) if *index != NO_NAMESPACE => Ok(usize::from(*index)),
            Some(_) if nsid != 0 => Err(Status::INVALID_FIELD.with_dnr(true)),
            _ => Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(true)),
        }
    }

    /// Begins a controller-level reset: deletes all queues, and stops fetching and posting. The
    /// reset is over when [`Engine::drained`] returns `true`: only then no command can touch the
    /// guest's memory any more.
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

    /// Asks that a command end early.
    fn cancel(&mut self, tag: u64, ns: usize) {
        if let Some(ns) = self.namespaces.get_mut(ns) {
            ns.queue.cancel(tag);
            if let Some(passthrough) = &mut ns.passthrough {
                passthrough.abort(tag);
            }
        }
    }

    /// Clears the remains of the queues when all engines of the controller have stopped. Earlier,
    /// a queue that is still fetched from would take a cleared register for a doorbell.
    pub fn clear(&mut self) {
        self.doorbells.clear();
        self.irqs.reset();
    }

    /// Returns the state of the admin queue for the next process: the commands fetched, the tail,
    /// and the completions that wait for room.
    pub fn admin_queue(&self) -> Option<AdminQueue> {
        let (Some(Some(sq)), Some(Some(cq))) = (self.sqs.first(), self.cqs.first()) else {
            return None;
        };
        Some(AdminQueue {
            fetched: sq.fetched,
            tail: cq.tail,
            phase: cq.phase,
            posted: self.admin_posted,
            posting: cq.backlog.iter().map(|kept| kept.entry.ending()).collect(),
        })
    }

    /// Commands of a process that has ended are in slots of other shares.
    pub fn is_inheriting(&self) -> bool {
        self.slots.is_inheriting()
    }

    /// Returns whether no command is in flight, and no flush on the controller's own account.
    pub fn drained(&self) -> bool {
        self.slots.in_use() == 0 && self.flushing == 0
    }

    /// Enables the engine: queues may be created from now on. `page_size` is the host's, in
    /// bytes.
    fn enable(&mut self, page_size: u64) {
        self.halted = false;
        self.page_size = page_size;
    }

    /// Returns whether fetching has stopped until the controller is enabled again.
    pub fn halted(&self) -> bool {
        self.halted
    }

    /// Fetches no more commands (shutdown, fatal status); those in flight complete.
    fn stop_fetching(&mut self) {
        self.halted = true;
        self.polled.clear();
    }

    // ---- guest memory

    /// Releases rings and buffers in a range of IOVAs that was unmapped. Answer the VMM when
    /// `self.dma.quiesced()`.
    fn unmapped(&mut self, iova: u64, len: u64) {
        for sq in self.sqs.iter_mut().flatten() {
            sq.memory.unmapped(iova, len);
        }
        for (qid, cq) in (0..).zip(&mut self.cqs) {
            if let Some(cq) = cq
                && cq.memory.unmapped(iova, len)
            {
                Self::note_cq(&self.hot, qid, cq);
            }
        }
        if self.doorbells.shadowed() && self.doorbells.lie_in(iova, len) {
            // The entries are read a last time, and the registers a first time without them:
            // registers count from their next change on.
            self.look_at_all();
            self.doorbells.release();
            self.look_at_all();
        }
    }

    /// Looks up missing rings and buffers in a range of IOVAs of which some part was mapped.
    fn mapped(&mut self, iova: u64, len: u64) {
        if !self.master {
            // The lookup follows when the bit is set.
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
                Self::note_cq(&self.hot, qid, cq);
            }
        }
        if self.doorbells.lie_in(iova, len) && self.doorbells.mapped(dma) {
            self.look_at_all();
        }
    }

    /// Returns the addresses of shadow doorbells and EventIdx, set by Doorbell Buffer Config.
    pub fn shadow_buffers(&self) -> Option<(u64, u64)> {
        self.doorbells.buffers()
    }

    /// Returns the doorbell page, for a client that maps it.
    pub fn doorbell_page(&self) -> &Arc<SharedPages> {
        self.doorbells.page()
    }

    /// Returns whether shadow doorbells are in use.
    pub fn shadowed(&self) -> bool {
        self.doorbells.shadowed()
    }

    // ---- running

    /// Ends a round: posts completions that found no space before, sends interrupts. Returns
    /// whether it posted any.
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

    /// Commands that complete without waking anybody: the worker has to keep polling.
    pub fn polled_in_flight(&self) -> bool {
        self.namespaces.iter().any(Namespace::needs_polling)
    }

    /// Returns the number of the host's commands in flight, and of the controller's own flushes.
    pub fn in_flight(&self) -> usize {
        self.slots.in_use()
    }

    /// Returns the time at which a volume has to be polled next, although nothing wakes the
    /// worker: requests wait for their time.
    pub fn next_volume_deadline(&self) -> Option<Instant> {
        let queues = self.namespaces.iter();
        queues.filter_map(Namespace::deadline).min()
    }

    /// Hands completions of polled volumes to `out`.
    pub fn poll_volumes(&mut self, out: &mut Vec<volume::Completion>) {
        for ns in &mut self.namespaces {
            ns.queue.poll(&mut |completion| out.push(completion));
        }
    }
}
