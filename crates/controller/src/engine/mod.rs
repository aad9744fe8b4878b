//! The data half of a controller: queues, commands in flight, completions, interrupts. Owned by one worker thread.
//!
//! ```text
//! doorbell cells -> fetch (batch) -> I/O command -> dma walk -> volume
//!                       |                                         |
//!                       `-> admin command -> control half         v
//! interrupts <- completion queue <- post <------------------- completion
//! ```
//!
//! The control half ([`crate::Controller`]) creates and deletes queues here and is told what happened by [`Event`]s.

mod doorbells;
mod io;
mod namespace;
mod queue;
mod slots;

use crate::irq::Irqs;
use crate::stats::ControllerStats;
use dma::{Access, DmaMap, SharedPages};
use doorbell::{Armed, Watch};
use doorbells::{Doorbells, Which};
use nvme::{Command, Completion, Status};
use queue::{Backlogged, Cq, QueueMemory, Sq};
use slots::Slots;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

pub(crate) use namespace::Namespace;
pub use slots::tag_owner;

/// Entries fetched from one queue before the next one has its turn.
const FETCH_BATCH: u32 = 32;

/// Something that the control half has to know.
pub(crate) enum Event {
    /// An admin command was fetched.
    Admin(Command),
    /// A queue that was being deleted has no command left.
    SqDrained(u16),
    /// A command that an Abort waits for is over.
    AbortDone { sqid: u16, cid: u16, aborted: bool },
    /// A command ended with an error.
    Failed {
        sqid: u16,
        cid: u16,
        status: Status,
        nsid: u32,
        lba: u64,
    },
    /// A doorbell was written with a value outside its queue.
    InvalidDoorbell { qid: u16, value: u32 },
}

/// Interrupt coalescing ("NVMe Base 2.1", 5.1.25.1.6): not for the admin queue, not for vectors that opted out.
#[derive(Default)]
pub(crate) struct Coalescing {
    /// Completions that are worth an interrupt; 0 and 1 mean no coalescing.
    pub threshold: u32,
    /// Longest delay of an interrupt; zero means no coalescing.
    pub time: Duration,
    /// Vectors with coalescing disabled.
    pub disabled: u128,
}

impl Coalescing {
    fn applies(&self, qid: u16, vector: u16) -> bool {
        qid != 0
            && self.threshold > 1
            && !self.time.is_zero()
            && self.disabled >> vector.min(127) & 1 == 0
    }
}

pub(crate) struct EngineConfig {
    pub id: u16,
    pub io_queues: u16,
    pub vectors: u16,
    pub max_in_flight: u16,
    pub max_transfer: u64,
    pub page: Arc<SharedPages>,
}

pub(crate) struct Engine {
    pub dma: DmaMap,
    pub irqs: Irqs,
    pub stats: Arc<ControllerStats>,
    pub coalescing: Coalescing,
    pub events: VecDeque<Event>,
    pub namespaces: Vec<Namespace>,
    /// The volatile write cache feature; when off, every write is durable before it completes.
    pub write_cache: bool,
    /// Memory page size in bytes (CC.MPS).
    pub page_size: u64,
    max_transfer: u64,
    doorbells: Doorbells,
    sqs: Vec<Option<Sq>>,
    cqs: Vec<Option<Cq>>,
    /// Submission queues that exist, in the order of their turns.
    active: Vec<u16>,
    slots: Slots,
    now: Instant,
    busy_since: Option<Instant>,
}

impl Engine {
    pub fn new(config: EngineConfig, namespaces: Vec<Namespace>) -> Self {
        let queues = config.io_queues + 1;
        Engine {
            dma: DmaMap::new(),
            irqs: Irqs::new(config.vectors),
            stats: Arc::new(ControllerStats::new(config.io_queues)),
            coalescing: Coalescing::default(),
            events: VecDeque::new(),
            namespaces,
            write_cache: true,
            page_size: 4096,
            max_transfer: config.max_transfer,
            doorbells: Doorbells::new(config.page, queues),
            sqs: (0..queues).map(|_| None).collect(),
            cqs: (0..queues).map(|_| None).collect(),
            active: Vec::with_capacity(usize::from(queues)),
            slots: Slots::new(config.id, config.max_in_flight),
            now: Instant::now(),
            busy_since: None,
        }
    }

    // ---- queues, for the control half

    pub fn cq_exists(&self, qid: u16) -> bool {
        self.cqs.get(usize::from(qid)).is_some_and(Option::is_some)
    }

    pub fn sq_exists(&self, qid: u16) -> bool {
        self.sqs.get(usize::from(qid)).is_some_and(Option::is_some)
    }

    pub fn cq_in_use(&self, qid: u16) -> bool {
        matches!(self.cqs.get(usize::from(qid)), Some(Some(cq)) if cq.users > 0)
    }

    pub fn any_io_queue(&self) -> bool {
        self.sqs.iter().skip(1).any(Option::is_some) || self.cqs.iter().skip(1).any(Option::is_some)
    }

    /// `false` when the queue's memory is not there, or there is no such queue.
    pub fn create_cq(&mut self, qid: u16, iova: u64, size: u32, vector: Option<u16>) -> bool {
        let Some(memory) = QueueMemory::new(&self.dma, iova, size, 16, Access::Write) else {
            return false;
        };
        let Some(cells) = self.doorbells.cells(qid, Which::CqHead) else {
            return false;
        };
        let cq = Cq::new(memory, Watch::create(size, cells), vector);
        self.cqs
            .get_mut(usize::from(qid))
            .map(|slot| *slot = Some(cq))
            .is_some()
    }

    /// `false` when the queue's memory is not there, or there is no such queue. The completion queue must exist.
    pub fn create_sq(&mut self, qid: u16, cqid: u16, iova: u64, size: u32) -> bool {
        let Some(memory) = QueueMemory::new(&self.dma, iova, size, 64, Access::Read) else {
            return false;
        };
        let Some(cells) = self.doorbells.cells(qid, Which::SqTail) else {
            return false;
        };
        let sq = Sq::new(cqid, memory, Watch::create(size, cells));
        let Some(slot) = self.sqs.get_mut(usize::from(qid)) else {
            return false;
        };
        *slot = Some(sq);
        self.active.retain(|&q| q != qid);
        self.active.push(qid);
        if let Some(cq) = self.cq(cqid) {
            cq.users += 1;
        }
        true
    }

    /// The queue is gone when [`Event::SqDrained`] says so: commands already fetched come to their end first.
    pub fn delete_sq(&mut self, qid: u16) {
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) else {
            return;
        };
        sq.deleting = true;
        self.active.retain(|&q| q != qid);
        // The host does not look at this queue's completions any more: those that found no space are dropped, so that a
        // full completion queue cannot hold up the deletion.
        if let Some(Some(cq)) = self.cqs.get_mut(usize::from(sq.cqid)) {
            let before = cq.backlog.len();
            cq.backlog.retain(|b| b.sqid != qid);
            sq.outstanding = sq
                .outstanding
                .saturating_sub((before - cq.backlog.len()) as u32);
        }
        self.sq_drained(qid);
    }

    fn sq_drained(&mut self, qid: u16) {
        let Some(slot) = self.sqs.get_mut(usize::from(qid)) else {
            return;
        };
        if let Some(sq) = slot
            && sq.deleting
            && sq.outstanding == 0
        {
            let cqid = sq.cqid;
            *slot = None;
            if let Some(cq) = self.cq(cqid) {
                cq.users = cq.users.saturating_sub(1);
            }
            self.events.push_back(Event::SqDrained(qid));
        }
    }

    pub fn delete_cq(&mut self, qid: u16) {
        if let Some(slot) = self.cqs.get_mut(usize::from(qid)) {
            *slot = None;
        }
    }

    fn cq(&mut self, qid: u16) -> Option<&mut Cq> {
        self.cqs.get_mut(usize::from(qid))?.as_mut()
    }

    /// Doorbell Buffer Config. `false` when a buffer's memory is not there.
    pub fn configure_shadow(&mut self, shadow: u64, eventidx: u64) -> bool {
        if self
            .doorbells
            .configure(&self.dma, shadow, eventidx)
            .is_err()
        {
            return false;
        }
        self.attach_all();
        true
    }

    fn attach_all(&mut self) {
        for (qid, sq) in self.sqs.iter_mut().enumerate() {
            if let Some(sq) = sq
                && let Some(shadow) = self
                    .doorbells
                    .cells(qid as u16, Which::SqTail)
                    .and_then(|c| c.shadow)
            {
                sq.watch.attach(shadow);
            }
        }
        for (qid, cq) in self.cqs.iter_mut().enumerate() {
            if let Some(cq) = cq
                && let Some(shadow) = self
                    .doorbells
                    .cells(qid as u16, Which::CqHead)
                    .and_then(|c| c.shadow)
            {
                cq.watch.attach(shadow);
                cq.armed = false;
            }
        }
    }

    /// A controller-level reset begins: no queue is left, nothing more is fetched or posted. It is over when
    /// [`Engine::drained`] says so: only then no command can touch the guest's memory any more.
    pub fn stop(&mut self) {
        self.sqs.iter_mut().for_each(|q| *q = None);
        self.cqs.iter_mut().for_each(|q| *q = None);
        self.active.clear();
        self.events.clear();
        self.doorbells.reset();
        self.irqs.reset();
        self.slots.orphan_all();
        let in_flight: Vec<(u64, usize)> = self.slots.in_flight().collect();
        for (tag, ns) in in_flight {
            if let Some(ns) = self.namespaces.get_mut(ns) {
                ns.queue.cancel(tag);
            }
        }
    }

    /// No command is in flight.
    pub fn drained(&self) -> bool {
        self.slots.in_use() == 0
    }

    /// Fetches no more I/O commands (shutdown, fatal status); those in flight complete.
    pub fn stop_fetching(&mut self) {
        self.active.clear();
    }

    // ---- guest memory

    /// A range of IOVAs is about to go: rings and buffers in it are let go. Answer the VMM when
    /// `self.dma.quiesced()`.
    pub fn unmapped(&mut self, iova: u64, len: u64) {
        self.sqs
            .iter_mut()
            .flatten()
            .for_each(|sq| sq.memory.unmapped(iova, len));
        self.cqs
            .iter_mut()
            .flatten()
            .for_each(|cq| cq.memory.unmapped(iova, len));
        self.doorbells.unmapped(iova, len);
    }

    /// Something was mapped: rings and buffers that had gone are looked for.
    pub fn mapped(&mut self) {
        let dma = &self.dma;
        self.sqs
            .iter_mut()
            .flatten()
            .for_each(|sq| sq.memory.mapped(dma));
        self.cqs
            .iter_mut()
            .flatten()
            .for_each(|cq| cq.memory.mapped(dma));
        self.doorbells.mapped(dma);
    }

    // ---- doorbells

    /// The doorbell page, for a client that maps it.
    pub fn doorbell_page(&self) -> &Arc<SharedPages> {
        self.doorbells.page()
    }

    /// A doorbell register was written by message. `false` when it belongs to no queue.
    pub fn write_doorbell(&mut self, index: usize, value: u32) -> bool {
        let qid = (index / 2) as u16;
        let which = if index % 2 == 0 {
            Which::SqTail
        } else {
            Which::CqHead
        };
        let exists = match which {
            Which::SqTail => self.sq_exists(qid),
            Which::CqHead => self.cq_exists(qid),
        };
        if let Some(queue) = self.stats.queues.get(usize::from(qid)) {
            queue.mmio_doorbells.add(1);
        }
        if exists && let Some(cell) = self.doorbells.register(qid, which) {
            cell.store(value, std::sync::atomic::Ordering::Release);
        }
        exists
    }

    // ---- running

    /// Fetches and starts what the host submitted. Returns whether there was anything.
    pub fn poll(&mut self, now: Instant) -> bool {
        self.now = now;
        let mut worked = false;
        for i in 0..self.active.len() {
            if let Some(&qid) = self.active.get(i) {
                worked |= self.poll_sq(qid);
            }
        }
        worked
    }

    /// Ends a round: posts completions that found no space before, sends interrupts. Returns whether it posted any.
    pub fn end_round(&mut self) -> bool {
        let posted = self.post_backlogs();
        self.send_interrupts();
        posted
    }

    fn poll_sq(&mut self, qid: u16) -> bool {
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) else {
            return false;
        };
        let Some(cells) = self.doorbells.cells(qid, Which::SqTail) else {
            return false;
        };
        let stats = self.stats.queues.get(usize::from(qid));
        match sq.watch.poll(cells) {
            Ok(tail) => {
                if tail != sq.tail {
                    sq.tail = tail;
                    if let Some(stats) = stats
                        && sq.watch.shadow_live()
                    {
                        stats.shadow_doorbells.add(1);
                    }
                    sq.watch.park(cells);
                }
            }
            Err(invalid) => self.events.push_back(Event::InvalidDoorbell {
                qid,
                value: invalid.value,
            }),
        }
        if sq.is_empty() {
            return false;
        }
        self.fetch(qid) > 0
    }

    fn fetch(&mut self, qid: u16) -> u32 {
        let mut fetched = 0;
        while fetched < FETCH_BATCH {
            let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) else {
                break;
            };
            // A full completion queue stops its submission queues: so the backlog never grows beyond what is in flight.
            let stalled = !matches!(self.cqs.get(usize::from(sq.cqid)), Some(Some(cq)) if cq.backlog.is_empty());
            if sq.is_empty() || stalled || (qid != 0 && !self.slots.any_free()) {
                break;
            }
            let Some(ring) = sq.memory.ring() else {
                break;
            };
            // Read once; only the copy is looked at.
            let raw = ring.load64(sq.head);
            sq.advance_head();
            sq.outstanding += 1;
            fetched += 1;
            let Ok(command) = Command::read_from_bytes(&raw) else {
                break;
            };
            if qid == 0 {
                self.events.push_back(Event::Admin(command));
                continue;
            }
            let cid = command.cid.get();
            if let Some(at) = sq.abort_on_fetch.iter().position(|&c| c == cid) {
                sq.abort_on_fetch.swap_remove(at);
                self.finish(qid, cid, Status::ABORT_REQUESTED, 0);
                self.events.push_back(Event::AbortDone {
                    sqid: qid,
                    cid,
                    aborted: true,
                });
                continue;
            }
            self.execute(qid, &command);
        }
        if fetched > 0
            && let Some(stats) = self.stats.queues.get(usize::from(qid))
        {
            stats.commands.add(fetched.into());
        }
        fetched
    }

    /// Ends a command: its completion is posted, or kept until there is space.
    pub fn finish(&mut self, sqid: u16, cid: u16, status: Status, result: u32) {
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(sqid)) else {
            return;
        };
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(sq.cqid)) else {
            return;
        };
        let mut entry = Completion {
            dw0: result.into(),
            sqhd: (sq.head as u16).into(),
            sqid: sqid.into(),
            cid: cid.into(),
            ..Default::default()
        };
        entry.set_status(status);
        let cells = self.doorbells.cells(sq.cqid, Which::CqHead);
        if cq.backlog.is_empty() && post(cq, cells, entry, &mut self.events, sq.cqid) {
            sq.outstanding = sq.outstanding.saturating_sub(1);
            if let Some(stats) = self.stats.queues.get(usize::from(sqid)) {
                stats.completions.add(1);
            }
            if sq.deleting {
                self.sq_drained(sqid);
            }
        } else if sq.deleting {
            // Nobody looks for this completion, see delete_sq.
            sq.outstanding = sq.outstanding.saturating_sub(1);
            self.sq_drained(sqid);
        } else {
            cq.backlog.push_back(Backlogged { sqid, entry });
        }
    }

    fn post_backlogs(&mut self) -> bool {
        let mut worked = false;
        for qid in 0..self.cqs.len() as u16 {
            let Some(Some(cq)) = self.cqs.get_mut(usize::from(qid)) else {
                continue;
            };
            while let Some(next) = cq.backlog.front() {
                let cells = self.doorbells.cells(qid, Which::CqHead);
                let (sqid, entry) = (next.sqid, next.entry);
                if !post(cq, cells, entry, &mut self.events, qid) {
                    break;
                }
                cq.backlog.pop_front();
                worked = true;
                if let Some(Some(sq)) = self.sqs.get_mut(usize::from(sqid)) {
                    sq.outstanding = sq.outstanding.saturating_sub(1);
                }
                if let Some(stats) = self.stats.queues.get(usize::from(sqid)) {
                    stats.completions.add(1);
                }
            }
        }
        worked
    }

    fn send_interrupts(&mut self) {
        if self.irqs.pin_based() {
            self.send_pin();
            return;
        }
        for qid in 0..self.cqs.len() as u16 {
            let Some(Some(cq)) = self.cqs.get_mut(usize::from(qid)) else {
                continue;
            };
            if cq.unsignalled == 0 {
                continue;
            }
            let Some(vector) = cq.vector else {
                cq.unsignalled = 0;
                continue;
            };
            if self.coalescing.applies(qid, vector) && cq.unsignalled < self.coalescing.threshold {
                let since = *cq.unsignalled_since.get_or_insert(self.now);
                if self.now.saturating_duration_since(since) < self.coalescing.time {
                    continue;
                }
            }
            cq.unsignalled = 0;
            cq.unsignalled_since = None;
            self.irqs.trigger(vector);
            if let Some(stats) = self.stats.queues.get(usize::from(qid)) {
                stats.interrupts.add(1);
            }
        }
    }

    /// The pin is high while any queue with interrupts enabled has entries that the host did not consume.
    fn send_pin(&mut self) {
        let mut level = false;
        for qid in 0..self.cqs.len() as u16 {
            let Some(Some(cq)) = self.cqs.get_mut(usize::from(qid)) else {
                continue;
            };
            cq.unsignalled = 0;
            if cq.has_unconsumed() {
                refresh_head(
                    cq,
                    self.doorbells.cells(qid, Which::CqHead),
                    &mut self.events,
                    qid,
                );
            }
            level |= cq.vector.is_some() && cq.has_unconsumed();
        }
        self.irqs.set_level(level);
    }

    /// Before the worker sleeps: arms EventIdx of every queue, so that the host's next doorbell is a register write.
    /// `true` when something arrived meanwhile: do not sleep.
    pub fn arm(&mut self) -> bool {
        let mut raced = false;
        for i in 0..self.active.len() {
            let Some(&qid) = self.active.get(i) else {
                break;
            };
            let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) else {
                continue;
            };
            let Some(cells) = self.doorbells.cells(qid, Which::SqTail) else {
                continue;
            };
            if cells.shadow.is_some()
                && let Some(stats) = self.stats.queues.get(usize::from(qid))
            {
                stats.arms.add(1);
            }
            match sq.watch.arm(cells) {
                Ok(Armed::Idle) => {}
                Ok(Armed::Raced(_)) => raced = true,
                Err(invalid) => self.events.push_back(Event::InvalidDoorbell {
                    qid,
                    value: invalid.value,
                }),
            }
        }
        raced || !self.events.is_empty()
    }

    /// One more look after [`Engine::arm`], a little later, for hosts that lack the barrier between their shadow store
    /// and their EventIdx load. `true` when something arrived.
    pub fn recheck(&mut self) -> bool {
        let mut raced = false;
        for i in 0..self.active.len() {
            if let Some(&qid) = self.active.get(i)
                && let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid))
                && let Some(cells) = self.doorbells.cells(qid, Which::SqTail)
            {
                raced |= !matches!(sq.watch.recheck(cells), Ok(Armed::Idle));
            }
        }
        raced
    }

    /// Shadow doorbells are in use.
    pub fn shadowed(&self) -> bool {
        self.doorbells.shadowed()
    }

    /// When the next delayed interrupt is due.
    pub fn next_interrupt(&self) -> Option<Instant> {
        let since = self
            .cqs
            .iter()
            .flatten()
            .filter_map(|cq| cq.unsignalled_since)
            .min()?;
        Some(since + self.coalescing.time)
    }

    /// Commands that complete without waking anybody: the worker has to keep polling.
    pub fn polled_in_flight(&self) -> bool {
        self.namespaces
            .iter()
            .any(|ns| ns.queue.polled_in_flight() > 0)
    }

    /// Hands completions of polled volumes to `out`.
    pub fn poll_volumes(&mut self, out: &mut Vec<volume::Completion>) {
        for ns in &mut self.namespaces {
            ns.queue.poll(&mut |completion| out.push(completion));
        }
    }

    // ---- abort

    /// Tries to end a command early.
    pub fn abort(&mut self, sqid: u16, cid: u16) -> AbortOutcome {
        if let Some(index) = self.slots.find(sqid, cid) {
            let tag = self.slots.tag(index);
            if let Some(slot) = self.slots.get(index) {
                slot.abort = true;
                if let Some(ns) = self.namespaces.get_mut(slot.ns) {
                    ns.queue.cancel(tag);
                }
            }
            return AbortOutcome::Pending;
        }
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(sqid)) else {
            return AbortOutcome::NotFound;
        };
        let Some(ring) = sq.memory.ring() else {
            return AbortOutcome::NotFound;
        };
        let mut at = sq.head;
        while at != sq.tail {
            let raw = ring.load64(at);
            if u16::from_le_bytes([raw[2], raw[3]]) == cid && sq.abort_on_fetch.len() < 64 {
                sq.abort_on_fetch.push(cid);
                return AbortOutcome::Pending;
            }
            at = if at + 1 == sq.size { 0 } else { at + 1 };
        }
        AbortOutcome::NotFound
    }
}

/// What became of [`Engine::abort`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AbortOutcome {
    /// No such command.
    NotFound,
    /// [`Event::AbortDone`] follows.
    Pending,
}

type DoorbellCells<'a> = Option<doorbell::Cells<'a, AtomicU32>>;

/// Posts an entry. `false` when the queue is full, or its memory gone.
#[inline]
fn post(
    cq: &mut Cq,
    cells: DoorbellCells<'_>,
    entry: Completion,
    events: &mut VecDeque<Event>,
    qid: u16,
) -> bool {
    if cq.is_full() && !make_room(cq, cells, events, qid) {
        return false;
    }
    // The host cannot consume further than this: up to there it need not ring.
    if let Some(cells) = cells {
        cq.watch.park_until(cells, cq.next_tail());
    }
    cq.push(entry)
}

/// Reads the newest head of a completion queue.
fn refresh_head(cq: &mut Cq, cells: DoorbellCells<'_>, events: &mut VecDeque<Event>, qid: u16) {
    let Some(cells) = cells else {
        return;
    };
    match cq.watch.poll(cells) {
        Ok(head) => cq.head = head,
        Err(invalid) => events.push_back(Event::InvalidDoorbell {
            qid,
            value: invalid.value,
        }),
    }
}

/// Looks for room in a full completion queue. If there is none, arms its EventIdx, so that the host's next head brings
/// a doorbell.
fn make_room(
    cq: &mut Cq,
    cells: DoorbellCells<'_>,
    events: &mut VecDeque<Event>,
    qid: u16,
) -> bool {
    refresh_head(cq, cells, events, qid);
    if cq.is_full()
        && !std::mem::replace(&mut cq.armed, true)
        && let Some(cells) = cells
        && let Ok(Armed::Raced(head)) = cq.watch.arm(cells)
    {
        cq.head = head;
    }
    cq.armed &= cq.is_full();
    !cq.is_full()
}
