//! The fast path: plain reads and writes, processed in batches.
//!
//! Nearly every command is a Read or Write with PRPs, of a valid range in an existing namespace,
//! and accepted by its volume. This module executes such commands, and looks up queue, rings and
//! counters once per batch. Any other command, including every invalid one, leaves the batch for
//! the general path ([`super::io`]), which alone decides the outcome. This module only
//! distinguishes plain commands from others.

use super::distance::Distance;
use super::doorbells::{DoorbellKind, Doorbells, trace_eventidx};
use super::execution::status_of;
use super::invariant::broken;
use super::namespace::Namespace;
use super::post::refresh_head;
use super::queue::{Cq, Sq};
use super::slots::{Kind, Plain, Slots};
use super::{Engine, Events};
use dma::{Access, CqeRun, DmaMap, SegmentList, prp, sgl};
use doorbell::distance;
use nvme::cmd::io::RwCdw12;
use nvme::cmd::{Flags, Fuse, Psdt};
use nvme::{Command, Completion, NvmOpcode, Status};
use probes::{IoKind, TIMED_EVERY, cycles};
use volume::{Budget, IoError, Op};

/// Maximum number of submission queue entries copied from a ring in one batch.
pub(super) const BATCH: usize = 32;

/// Cost of a command on the general path in a round's budget, in addition to its data.
const GENERAL_UNITS: u32 = 4;
/// Cost of the SGL of a command on the general path. The number of descriptors is unknown until the
/// SGL is walked.
const SGL_UNITS: u32 = 64;

/// Reason why a batch of commands from one queue ended.
pub(super) enum BatchOutcome {
    /// The queue has no more entries, or no more can be fetched now.
    Idle,
    /// This fetched command takes the general path.
    General(Command),
    /// This fetched command fails with this status.
    Failed(Command, Status),
    /// This command was fetched, and its volume could not complete it at once.
    Refused(Command, Op, IoError),
    /// This completion belongs to a started request that the volume has completed within the call.
    Completed(volume::Completion),
}

/// A checked plain read or write.
struct ReadWrite {
    op: Op,
    access: Access,
    slba: u64,
    /// Byte offset of the read or write in the namespace.
    offset: u64,
    /// Length of the data in bytes.
    len: u64,
}

/// Memory that every batch uses.
pub(super) struct BatchMemory {
    /// Copies of the submission queue entries of the current batch.
    pub entries: Box<[[u8; 64]; BATCH]>,
    /// Guest memory segments of the current command; empty between commands.
    list: SegmentList,
    /// Budget of the current batch for commands with data in more than one page.
    pub long: LongWork,
    /// Measured distance of the host's processor.
    distance: Distance,
}

impl BatchMemory {
    pub fn new() -> Self {
        BatchMemory {
            entries: Box::new([[0; 64]; BATCH]),
            list: SegmentList::with_capacity(1),
            long: LongWork::default(),
            distance: Distance::new(),
        }
    }
}

/// Numbers that the end of a batch adds to the I/O counters.
#[derive(Default)]
struct BatchCounters {
    posted: u32,
    /// Number of writes among the completed commands.
    writes: u32,
    /// Number of data bytes of the completed commands.
    bytes: u64,
    bytes_written: u64,
}

/// Batch of submission queue entries of one queue for one namespace, and everything needed to
/// execute them.
pub(super) struct Batch<'a> {
    pub(super) entries: &'a [[u8; 64]],
    pub(super) qid: u16,
    /// NSID of the first entry. The batch ends at the first entry with a different NSID.
    pub(super) nsid: u32,
    /// Index of the namespace in the engine's table.
    pub(super) index: u16,
    pub(super) ns: &'a mut Namespace,
    pub(super) dma: &'a DmaMap,
    /// Guest memory segments of the current command; empty between commands.
    list: &'a mut SegmentList,
    max_transfer: u64,
    pub(super) page_size: u64,
    pub(super) write_cache: bool,
    pub(super) long: &'a mut LongWork,
}

/// Budget of a batch for data in more than one page, in bytes. Each segment of an SGL costs
/// [`PIECE_BYTES`] in addition; segments of PRPs are pages and count by their bytes.
#[derive(Default)]
pub(super) struct LongWork {
    /// Bytes left. At zero or less, the next command with data in more than one page ends the
    /// batch.
    left: i64,
}

const UNIT: i64 = Budget::BYTES_PER_UNIT as i64;
/// Cost in bytes of a segment of guest memory, in addition to its length.
const PIECE_BYTES: u64 = Budget::BYTES_PER_UNIT / Budget::PIECES_PER_UNIT;

impl LongWork {
    /// Begins a batch that may spend `units` units.
    pub(super) fn begin(&mut self, units: u32) {
        self.left = i64::from(units) * UNIT;
    }

    /// Returns the units spent by a batch that began with `units`.
    pub(super) fn spent(&self, units: u32) -> u32 {
        let left = self.left.div_euclid(UNIT);
        u32::try_from(i64::from(units) - left).unwrap_or(u32::MAX)
    }

    #[inline(always)]
    pub(super) fn is_over(&self) -> bool {
        self.left <= 0
    }

    /// Subtracts bytes from the budget. `bytes` is at most the largest transfer, so that the cast
    /// is lossless.
    #[inline(always)]
    pub(super) fn spend(&mut self, bytes: u64) {
        self.left -= bytes as i64;
    }
}

impl Batch<'_> {
    /// Returns the command as a plain read or write; `None` when it is not plain. The addresses of
    /// its data are not examined yet.
    #[inline(always)]
    fn plain(&self, command: &Command) -> Option<ReadWrite> {
        let cdw12 = RwCdw12::from_bits(command.cdw12.get());
        let (op, access) = match command.nvm_opcode() {
            NvmOpcode::READ => (Op::Read, Access::Write),
            NvmOpcode::WRITE => {
                let fua = cdw12.fua() || !self.write_cache;
                (Op::Write { fua }, Access::Read)
            }
            _ => return None,
        };
        let blocks = u64::from(cdw12.nlb());
        let slba = command.slba();
        let len = blocks << self.ns.shift;
        let outside = slba
            .checked_add(blocks)
            .is_none_or(|end| end > self.ns.blocks);
        if outside || len > self.max_transfer || (self.ns.read_only && op.changes()) {
            return None;
        }
        Some(ReadWrite {
            op,
            access,
            slba,
            offset: slba << self.ns.shift,
            len,
        })
    }

    /// Gives the volume a hint to prefetch data of the next entry.
    #[inline(always)]
    fn prefetch(&mut self, entry: &[u8; 64]) {
        let command: &Command = zerocopy::transmute_ref!(entry);
        if let Some(plain) = self.plain(command) {
            self.ns.queue.prefetch(plain.op, plain.offset, plain.len);
        }
    }

    /// Returns the address of the command's data if the data lies in one page, is described by
    /// PRPs, and the command is not fused.
    #[inline(always)]
    fn page(&self, command: &Command, len: u64) -> Option<u64> {
        let prp1 = command.prp1();
        let in_page = len <= self.page_size - (prp1 & (self.page_size - 1)) && prp1 & 3 == 0;
        (in_page && command.flags == Flags::new()).then_some(prp1)
    }

    /// Resolves the command's data pointer. Returns `false` when the general path has to report an
    /// error, or when the budget is spent, so that the batch ends before the command.
    #[inline(never)]
    fn walk(&mut self, command: &Command, plain: &ReadWrite) -> bool {
        if self.long.is_over() {
            return false;
        }
        let (list, dma) = (&mut *self.list, self.dma);
        list.begin(dma);
        let found = match command.flags.psdt() {
            _ if command.flags.fuse() != Fuse::NORMAL => false,
            Psdt::PRP => {
                let (prp1, prp2) = (command.prp1(), command.prp2());
                prp::walk(
                    dma,
                    prp1,
                    prp2,
                    plain.len,
                    self.page_size,
                    plain.access,
                    list,
                )
                .is_ok()
            }
            Psdt::SGL_MPTR_BUFFER | Psdt::SGL_MPTR_SGL => {
                let found = sgl::walk(dma, command.dptr.0, plain.len, plain.access, list).is_ok();
                self.long.spend(list.segments().len() as u64 * PIECE_BYTES);
                found
            }
            _ => false,
        };
        self.long.spend(plain.len);
        if !found {
            list.clear();
        }
        found
    }

    /// Executes a command with data in more than one page on a volume that completes requests at
    /// once.
    #[inline(never)]
    fn answer_long(&mut self, command: &Command, plain: &ReadWrite) -> Option<Result<(), IoError>> {
        if !self.walk(command, plain) {
            return None;
        }
        let done = self
            .ns
            .queue
            .try_now(plain.op, plain.offset, self.list.view());
        self.list.clear();
        done
    }

    /// Executes the entries on a volume that completes requests at once. Returns how many were
    /// fetched.
    #[inline(always)]
    fn answer(
        &mut self,
        sq: &Sq,
        places: &CqeRun<'_>,
        phase: bool,
        tally: &mut BatchCounters,
    ) -> (u32, BatchOutcome) {
        let (mut fetched, mut total) = (0, BatchCounters::default());
        let mut next = BatchOutcome::Idle;
        let mut rest = self.entries;
        while let Some((entry, later)) = rest.split_first() {
            rest = later;
            let command: &Command = zerocopy::transmute_ref!(entry);
            if command.nsid.get() != self.nsid {
                break;
            }
            if self.ns.prefetches
                && let Some(entry) = later.first()
            {
                self.prefetch(entry);
            }
            fetched += 1;
            let Some(plain) = self.plain(command) else {
                next = BatchOutcome::General(*command);
                break;
            };
            let ReadWrite { op, len, .. } = plain;
            let done = if let Some(prp1) = self.page(command, len) {
                match self.dma.piece(prp1, len, plain.access) {
                    Ok(Some(piece)) => self.ns.queue.try_now(op, plain.offset, piece.view()),
                    _ => None,
                }
            } else {
                self.answer_long(command, &plain)
            };
            crash::point!("controller.answer.done");
            match done {
                Some(Ok(())) => {}
                Some(Err(error)) => {
                    next = BatchOutcome::Refused(*command, op, error);
                    break;
                }
                None => {
                    next = BatchOutcome::General(*command);
                    break;
                }
            }
            total.bytes += len;
            if op.changes() {
                total.writes += 1;
                total.bytes_written += len;
            }
            let entry = Completion {
                sqhd: (sq.ahead(fetched) as u16).into(),
                sqid: self.qid.into(),
                cid: command.cid,
                status_phase: Completion::pack_status(Status::SUCCESS, phase),
                ..Default::default()
            };
            // All entries before this one were posted already.
            places.store(fetched - 1, zerocopy::transmute!(entry));
            crash::point!("controller.answer.posted");
        }
        total.posted = fetched - u32::from(!matches!(next, BatchOutcome::Idle));
        *tally = total;
        (fetched, next)
    }

    /// Starts the entries on any other volume. `number` is the number of commands fetched before.
    /// Returns how many were fetched.
    #[inline(never)]
    fn start(&mut self, slots: &mut Slots, number: u64) -> (u32, BatchOutcome) {
        let mut fetched = 0;
        for entry in self.entries {
            let command: &Command = zerocopy::transmute_ref!(entry);
            if command.nsid.get() != self.nsid {
                break;
            }
            fetched += 1;
            let Some(plain) = self.plain(command) else {
                return (fetched, BatchOutcome::General(*command));
            };
            let found = match self.page(command, plain.len) {
                Some(prp1) => {
                    let Batch { list, dma, .. } = self;
                    list.begin_piece(dma, prp1, plain.len, plain.access)
                        || self.walk(command, &plain)
                }
                None => self.walk(command, &plain),
            };
            if !found {
                return (fetched, BatchOutcome::General(*command));
            }
            let ReadWrite {
                op,
                slba,
                offset,
                len,
                ..
            } = plain;
            let plain = Plain {
                command,
                number: number + u64::from(fetched - 1),
                sqid: self.qid,
                cid: command.cid.get(),
                ns: self.index.into(),
                nsid: self.nsid,
                slba,
                bytes: len,
                kind: Kind::of_transfer(op),
            };
            let Some((tag, data)) = slots.alloc_plain(plain, self.list) else {
                self.list.clear();
                return (fetched, BatchOutcome::General(*command));
            };
            let over = self.ns.queue.start(tag, op, offset, data);
            crash::point!("controller.start.submitted");
            if let Some(over) = over {
                return (fetched, BatchOutcome::Completed(over));
            }
        }
        (fetched, BatchOutcome::Idle)
    }
}

/// Returns the number of entries that may be posted to a completion queue now. Moves EventIdx of
/// the head doorbell, so that the host need not write the register before it has consumed all of
/// them.
#[inline(always)]
fn make_room(
    controller: u16,
    cq: &mut Cq,
    cqid: u16,
    doorbells: &Doorbells,
    events: &mut Events,
) -> u32 {
    if cq.is_full() {
        refresh_head(
            cq,
            doorbells.cells(cqid, DoorbellKind::CqHead),
            events,
            cqid,
        );
    }
    let used = distance(cq.head, cq.tail, cq.size);
    let room = cq.size - 1 - used;
    // Index of the last entry that has room in the completion queue.
    let horizon = if cq.head == 0 {
        cq.size - 1
    } else {
        cq.head - 1
    };
    if room > 0
        && doorbells.shadowed()
        && cq.watch.needs_park(horizon)
        && let Some(cells) = doorbells.cells(cqid, DoorbellKind::CqHead)
    {
        let before = cq.watch.state().eventidx;
        cq.watch.park_until(cells, horizon);
        trace_eventidx(controller, cqid, DoorbellKind::CqHead, before, &cq.watch);
    }
    room
}

/// Returns the cost of a command on the general path in a round's budget.
fn general_units(command: &Command) -> u32 {
    // The cost is too high for a command without this field, which at most ends this controller's
    // part of the round. The smallest block has 512 bytes.
    let blocks = RwCdw12::from_bits(command.cdw12.get()).nlb();
    let data = Budget::units_of(u64::from(blocks) << 9, 0);
    let sgl = match command.flags.psdt() {
        Psdt::PRP => 0,
        _ => SGL_UNITS,
    };
    GENERAL_UNITS + data + sgl
}

impl Sq {
    /// Fetches the entry at the head for the general path; `command` is a copy of the entry.
    #[inline]
    fn fetch_general(&mut self, command: Command) -> (u32, BatchOutcome) {
        self.took(1);
        self.outstanding += 1;
        (1, BatchOutcome::General(command))
    }
}

impl Engine {
    /// Fetches up to `limit` entries of an I/O queue, and starts them as long as they are plain and
    /// the budget permits. Returns how many were fetched, including the one in [`BatchOutcome`].
    pub(super) fn run(&mut self, qid: u16, limit: u32) -> (u32, BatchOutcome) {
        let Some(Some(sq)) = self.queues.sqs.get_mut(usize::from(qid)) else {
            return (0, BatchOutcome::Idle);
        };
        let cqid = sq.cqid;
        let Some(Some(cq)) = self.queues.cqs.get_mut(usize::from(cqid)) else {
            broken(
                &mut self.events,
                "a submission queue has no completion queue",
            );
            return (0, BatchOutcome::Idle);
        };
        // A full completion queue stops its submission queues, so that the backlog never exceeds
        // the number of outstanding commands.
        if !cq.backlog.is_empty() || self.flushes.is_waiting() {
            return (0, BatchOutcome::Idle);
        }
        let Some(ring) = sq.memory.ring() else {
            return (0, BatchOutcome::Idle);
        };
        let pending = distance(sq.head, sq.tail, sq.size)
            .min(limit)
            .min(self.slots.free());
        if pending == 0 {
            return (0, BatchOutcome::Idle);
        }
        // Only the general path compares command identifiers with pending Aborts, and keeps
        // completions that find no room.
        let room = make_room(
            self.queues.controller,
            cq,
            cqid,
            &self.queues.doorbells,
            &mut self.events,
        );
        let short = sq.abort_on_fetch.is_empty() && !sq.deleting && room > 0;
        let Some(cq_ring) = cq.memory.ring().filter(|_| short) else {
            let command: Command = zerocopy::transmute!(ring.load64(sq.head));
            return sq.fetch_general(command);
        };
        let places = cq_ring.cqe_run(cq.tail, pending.min(room));
        // All entries are copied before the first one is used: they come from the cache of another
        // core, and the transfers overlap. Copies after the entry that ends the batch do not count
        // as fetched, and are made again in a later batch.
        let (wanted, _) = self
            .batch
            .entries
            .split_at_mut((places.len() as usize).min(BATCH));
        let begun = self.batch.distance.begin(wanted.len());
        let count = ring.load_batch(sq.head, wanted);
        if let Some(lines) = self.batch.distance.end(begun, count) {
            ring.evict(sq.head, count, lines);
        }
        let (entries, _) = self.batch.entries.split_at(count);
        let Some(first) = entries.first() else {
            return (0, BatchOutcome::Idle);
        };
        let first: &Command = zerocopy::transmute_ref!(first);
        let nsid = first.nsid.get();
        let Some((index, ns)) = self.namespaces.open_of(nsid) else {
            return sq.fetch_general(*first);
        };
        let immediate = ns.immediate;
        let mut batch = Batch {
            entries,
            qid,
            nsid,
            index,
            ns,
            dma: &self.dma,
            list: &mut self.batch.list,
            max_transfer: self.settings.max_transfer,
            page_size: self.settings.page_size,
            write_cache: self.settings.features.write_cache,
            long: &mut self.batch.long,
        };
        let mut tally = BatchCounters::default();
        let (fetched, next) = if batch.ns.passthrough.is_some()
            && let Some(room) = batch.begin_passing()
        {
            batch.pass(&mut self.slots, room, sq.fetched)
        } else if immediate {
            if let Some(hot) = &self.journal.hot
                && sq.noted_tail != cq.tail
            {
                hot.note(qid, sq, cq.tail);
            }
            batch.answer(sq, &places, cq.phase, &mut tally)
        } else {
            let started = batch.start(&mut self.slots, sq.fetched);
            // Earlier completions that are not signalled yet come first.
            if self.queues.dirty.is_empty() {
                batch.ns.queue.push();
            }
            started
        };
        self.counters.begin_busy(&self.slots);
        sq.took(fetched);
        sq.outstanding += fetched - tally.posted;
        if tally.posted > 0 {
            cq.pushed(tally.posted);
            if !std::mem::replace(&mut cq.dirty, true) {
                self.queues.dirty.push(cqid);
            }
            if let Some(queue) = self.stats.queues.get(usize::from(qid)) {
                queue.completions.add(tally.posted.into());
            }
            let record = &batch.ns.record;
            let reads = tally.posted - tally.writes;
            record.operations(IoKind::Read).add(reads.into());
            record.operations(IoKind::Write).add(tally.writes.into());
            record.bytes_read().add(tally.bytes - tally.bytes_written);
            record.bytes_written().add(tally.bytes_written);
        }
        // A command that takes the general path is neither posted nor recorded yet.
        if let Some(hot) = &self.journal.hot
            && matches!(next, BatchOutcome::Idle | BatchOutcome::Completed(_))
        {
            hot.note(qid, sq, cq.tail);
        }
        (fetched, next)
    }

    /// Runs a batch like [`Engine::run`], and measures the latency of its last command.
    #[cold]
    #[inline(never)]
    pub(super) fn run_timed(&mut self, qid: u16, limit: u32) -> (u32, BatchOutcome) {
        let Some(Some(sq)) = self.queues.sqs.get(usize::from(qid)) else {
            return self.run(qid, limit);
        };
        let (outstanding, free) = (sq.outstanding, self.slots.free());
        let pending = distance(sq.head, sq.tail, sq.size).min(free);
        // The position of the timed command differs from batch to batch.
        self.counters.sampling.place = self.counters.sampling.place.wrapping_add(1);
        let wanted = (self.counters.sampling.place % limit.max(1) + 1)
            .min(pending)
            .max(1);
        let slot = self.slots.upcoming(wanted as usize - 1);
        let begun = cycles().max(1);
        let (fetched, next) = self.run(qid, wanted);
        if fetched < wanted {
            // The batch ended before the command to be timed, so the next batch is timed instead.
            return (fetched, next);
        }
        self.counters.sampling.until_timed = fetched.saturating_add(TIMED_EVERY - 1);
        let last = self.batch.entries.get(fetched as usize - 1);
        let command: Option<&Command> = match &next {
            BatchOutcome::General(command)
            | BatchOutcome::Failed(command, _)
            | BatchOutcome::Refused(command, ..) => Some(command),
            _ => last.map(|entry| zerocopy::transmute_ref!(entry)),
        };
        let Some(command) = command else {
            return (fetched, next);
        };
        let Some(ns) = self.namespaces.of_nsid(command.nsid.get()) else {
            return (fetched, next);
        };
        let record = &ns.record;
        record.depth_seen(u64::from(outstanding) + u64::from(fetched));
        match &next {
            BatchOutcome::Idle if self.slots.free() == free => {
                let kind = match command.nvm_opcode() {
                    NvmOpcode::WRITE => IoKind::Write,
                    _ => IoKind::Read,
                };
                record.timed(kind, cycles().saturating_sub(begun));
            }
            BatchOutcome::Idle | BatchOutcome::Completed(_) => {
                if let Some(slot) = slot.and_then(|slot| self.slots.get(slot))
                    && slot.kind.io_kind().is_sampled()
                {
                    slot.fetched_at = begun;
                }
            }
            BatchOutcome::General(_) => self.counters.sampling.fetched_at = begun,
            // A failed command is not timed, because it has not done its work.
            BatchOutcome::Failed(..) | BatchOutcome::Refused(..) => {}
        }
        (fetched, next)
    }

    /// Continues on the general path with the command that ended a batch.
    pub(super) fn after_batch(&mut self, qid: u16, next: BatchOutcome, budget: &mut Budget) {
        match next {
            BatchOutcome::Idle => {}
            BatchOutcome::General(command) => {
                self.queues.note_fetched(&self.journal, qid, 1);
                budget.spend(general_units(&command));
                self.counters.time_general(&command);
                self.general(qid, &command);
            }
            BatchOutcome::Failed(command, status) => self.refuse(qid, &command, status),
            BatchOutcome::Refused(command, op, error) => {
                let ns = self.namespaces.of_nsid(command.nsid.get());
                if ns.is_some_and(|ns| ns.queue.keeps_failed(op, error)) {
                    // The command starts again on the general path, as a request that may wait.
                    self.queues.note_fetched(&self.journal, qid, 1);
                    return self.general(qid, &command);
                }
                self.refuse(qid, &command, status_of(error, op.changes()));
            }
            BatchOutcome::Completed(completion) => self.complete(completion),
        }
    }

    /// Ends a command of a batch with an error status.
    fn refuse(&mut self, qid: u16, command: &Command, status: Status) {
        self.queues.note_fetched(&self.journal, qid, 1);
        let (cid, nsid, lba) = (command.cid.get(), command.nsid.get(), command.slba());
        let failed = (qid, cid, status, (nsid, lba));
        self.counters
            .failed(&self.namespaces, &mut self.events, failed);
        self.finish(qid, cid, status, 0);
    }
}
