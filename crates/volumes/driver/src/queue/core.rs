//! Data path of a queue pair: submission of commands, and processing of completions.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nvme::cmd::io::{DsmCdw10, DsmCdw11, RwCdw12, WriteZeroesCdw12};
use nvme::{Command, regs};

use super::data::{self, IovaRange, Method, Shape};
use super::host_doorbell::HostDoorbell;
use super::nap::Nap;
use super::request::{Completion, Op, QueueCounters, Sink, Tap};
use super::ring::{CqRing, Lists, SqRing};
use super::slots::{SINGLE, Slots};
use super::split::{SplitRequest, SplitRequests};
use crate::buffer::DmaBuffer;
use crate::control::{DeviceState, Queues, SharedDevice};
use crate::error::{CommandError, Error, SubmitRefusal};
use crate::options::QueueOptions;
use nvme_volume::Namespace;

/// Maximum number of blocks of one command (NLB is a 16-bit zero-based field).
const MAX_BLOCKS: u64 = 1 << 16;
/// Number of submission queue entries ahead of the one being written that is prefetched. The
/// controller has read that entry, maybe on a distant processor, and may have evicted it
/// ([`dma::lines`]). Prefetching several overlaps their latencies.
const PREFETCH_DISTANCE: u32 = 8;
/// Number of short polls of the completion queue between two long ones.
const SPIN_POLLS: u32 = 8;

/// Location of a command's data in device addresses.
pub(crate) enum Data<'a> {
    None,
    /// Contiguous data at this device address.
    At(u64),
    /// Data in ranges of device addresses, beginning at the byte given last.
    Ranges(Method, &'a [IovaRange], u64),
}

/// State of an I/O queue pair, owned by its [`QueuePair`](super::QueuePair) handle.
pub(crate) struct QueueCore {
    pub shared: Arc<SharedDevice>,
    /// Number of the controller's epoch in which the queues were created; recovery changes it.
    pub epoch: u32,
    /// Whether the queue pair accepts no further command, because the device is lost or closed.
    pub dead: bool,
    /// Whether the device is suspended, so that commands are held until it resumes.
    held: bool,
    /// Number of outstanding commands, read by a thread that waits for all queue pairs to be idle.
    /// Only the owner stores it.
    pub(super) flying: Arc<AtomicU32>,
    pub qid: u16,
    pub sq: SqRing,
    pub cq: CqRing,
    pub lists: Lists,
    sq_doorbell: HostDoorbell,
    pub(super) cq_doorbell: HostDoorbell,
    pub vector: Option<u16>,
    pub eventfd: Option<OwnedFd>,
    /// Whether the owner polls instead of using interrupts, see [`QueueOptions::polled`].
    pub(super) polled: bool,
    /// Whether commands are repeated after a reset, see [`QueueOptions::repeats`].
    pub(super) repeats: bool,
    pub(super) nap: Nap,
    sq_entries: u32,
    pub(super) cq_entries: u32,
    pub(super) tail: u32,
    rung: u32,
    pub(super) head: u32,
    pub(super) phase: bool,
    /// Number of consumed completion entries that were not yet reported to the controller, and its
    /// maximum. The completion queue is larger than the submission queue by that maximum where the
    /// controller allows it, so the head doorbell is rarely written.
    pub(super) untold: u32,
    pub(super) lazy: u32,
    pub slots: Slots,
    pub parents: SplitRequests,
    nsid: u32,
    pub block_shift: u8,
    max_blocks: u32,
    shape: Shape,
    /// Present time in ticks of `tick_len`, for the age of commands. Updated only occasionally.
    pub tick: u32,
    next_tick: Instant,
    tick_len: Duration,
    /// Age of a command in ticks from which it has timed out.
    timeout_ticks: u32,
    rounds: u32,
    /// Completions without a completion queue entry, which the next poll delivers.
    pub finished: VecDeque<Completion>,
    pub tap: Option<Box<dyn Tap>>,
    stepped: bool,
    pub counters: QueueCounters,
}

impl QueueCore {
    pub fn new(
        shared: &Arc<SharedDevice>,
        namespace: &Namespace,
        options: QueueOptions,
        qid: u16,
    ) -> Result<Self, Error> {
        let limits = shared.limits;
        let depth = options.depth.clamp(1, 0x7fff);
        let sq_entries = options.entries.clamp(depth + 1, 0x8000);
        let sq_entries = sq_entries.min(limits.queue_entries).max(2);
        let cq_entries = (sq_entries * 2).min(limits.queue_entries);
        let depth = depth.min(sq_entries - 1);
        let max_blocks = (limits.max_transfer >> namespace.block_shift).clamp(1, MAX_BLOCKS);
        let largest = max_blocks << namespace.block_shift;
        let each = data::list_bytes(largest, limits.page_size) as usize;
        let area = || Error::Unusable("queue memory");
        let heap = &shared.heap;
        let sq = heap.allocate(sq_entries as usize * size_of::<Command>())?;
        let cq = heap.allocate(cq_entries as usize * size_of::<nvme::Completion>())?;
        let lists = heap.allocate(each * depth as usize)?;
        let doorbell = |is_cq, size| {
            let offset = regs::doorbell_offset(qid, is_cq, limits.dstrd);
            let behaviour = shared.options.doorbells.behaviour;
            HostDoorbell::new(&shared.transport, offset, size, behaviour)
        };
        let interrupt = if options.interrupts && limits.vectors > 0 {
            shared.lock().vector(qid)
        } else {
            None
        };
        let (vector, eventfd) = interrupt.unzip();
        let timeout = shared.options.command_timeout;
        let tick_len = (timeout / 4)
            .min(shared.options.status_interval)
            .max(Duration::from_millis(1));
        let timeout_ticks = timeout.as_nanos().div_ceil(tick_len.as_nanos());
        Ok(Self {
            epoch: shared.epoch.load(Ordering::Acquire),
            shared: shared.clone(),
            dead: false,
            held: false,
            flying: shared.new_cell(),
            qid,
            sq: SqRing::new(sq, sq_entries).ok_or_else(area)?,
            cq: CqRing::new(cq, cq_entries).ok_or_else(area)?,
            lists: Lists::new(lists, each, depth as usize).ok_or_else(area)?,
            sq_doorbell: doorbell(false, sq_entries),
            cq_doorbell: doorbell(true, cq_entries),
            vector,
            eventfd,
            polled: options.polled,
            repeats: options.repeats,
            nap: Nap::default(),
            sq_entries,
            cq_entries,
            tail: 0,
            rung: 0,
            head: 0,
            phase: true,
            untold: 0,
            lazy: (cq_entries - sq_entries).max(1),
            slots: Slots::new(depth),
            parents: SplitRequests::default(),
            nsid: namespace.nsid,
            block_shift: namespace.block_shift,
            max_blocks: max_blocks as u32,
            shape: Shape {
                page: limits.page_size,
                sgl: limits.sgl,
            },
            tick: 0,
            next_tick: Instant::now() + tick_len,
            tick_len,
            timeout_ticks: u32::try_from(timeout_ticks).unwrap_or(u32::MAX / 4) + 1,
            rounds: 0,
            finished: VecDeque::new(),
            tap: None,
            stepped: shared.transport.is_stepped(),
            counters: QueueCounters::default(),
        })
    }

    pub fn max_blocks(&self) -> u32 {
        self.max_blocks
    }

    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the length of a tick, after which an owner that sleeps should poll again.
    pub fn tick_len(&self) -> Duration {
        self.tick_len
    }

    pub fn counters(&self) -> QueueCounters {
        QueueCounters {
            register_doorbells: self.sq_doorbell.registers + self.cq_doorbell.registers,
            silent_doorbells: self.sq_doorbell.silent + self.cq_doorbell.silent,
            ..self.counters
        }
    }

    /// Creates the queues in the controller's current epoch. All outstanding commands belong to an
    /// earlier one.
    pub fn attach(&mut self) -> Result<(), Error> {
        let shared = self.shared.clone();
        let mut control = shared.lock();
        if shared.epoch.load(Ordering::Acquire) != self.epoch || shared.state() != DeviceState::Live
        {
            return Err(Error::Gone);
        }
        // The interrupt has existed since the controller was enabled, and the previous owner of
        // this queue number left it attached. Another thread may have attached it before this one
        // detached it. A shared interrupt may not be detached.
        if self.attach_interrupt() {
            self.nap = Nap::attached(self.polled && self.can_wake());
        }
        self.cq.clear();
        (self.tail, self.rung, self.head, self.phase, self.untold) = (0, 0, 0, true, 0);
        self.sq_doorbell.reset();
        self.cq_doorbell.reset();
        let stride = regs::doorbell_stride(shared.limits.dstrd) as usize;
        let at = |is_cq: usize| (2 * usize::from(self.qid) + is_cq) * stride;
        if let Some(buffers) = control.shadow_buffers()
            && shared.options.doorbells.memory != crate::options::ShadowMemory::Stale
        {
            // A stale value from an earlier queue of this number must not be read as a doorbell of
            // this one.
            for cells in [buffers.cells(at(0)), buffers.cells(at(1))]
                .iter()
                .flatten()
            {
                HostDoorbell::clear(cells);
            }
        }
        let queues = Queues {
            qid: self.qid,
            sq: self.sq.iova(),
            cq: self.cq.iova(),
            sq_entries: self.sq_entries,
            cq_entries: self.cq_entries,
            vector: self.vector,
        };
        control.create_queues(&queues, shared.options.admin_timeout)?;
        if let Some(buffers) = control.shadow(&shared) {
            self.sq_doorbell.attach(buffers.cells(at(0)));
            self.cq_doorbell.attach(buffers.cells(at(1)));
        }
        Ok(())
    }

    /// Writes a command to the submission queue, without ringing the doorbell. Operations with data
    /// are limited to [`QueueCore::max_blocks`] blocks, others to 65,536.
    #[inline]
    pub fn push(
        &mut self,
        op: Op,
        lba: u64,
        blocks: u32,
        data: Data<'_>,
        parent: u32,
        user_data: u64,
    ) -> Result<u16, SubmitRefusal> {
        if self.dead {
            return Err(SubmitRefusal::Gone);
        }
        let Some(index) = self.slots.next() else {
            return Err(SubmitRefusal::Full);
        };
        let len = u64::from(blocks) << self.block_shift;
        let list = usize::from(index);
        let (flags, dptr) = match data {
            Data::None => Default::default(),
            Data::At(iova) => self.shape.contiguous(iova, len, &self.lists, list),
            Data::Ranges(method, ranges, skip) => {
                self.shape
                    .scattered(method, ranges, skip, len, &self.lists, list)
            }
        };
        let Some(slot) = self.slots.begin(index) else {
            return Err(SubmitRefusal::Full);
        };
        let cid = slot.cid;
        let mut command = Command::new(op.opcode().0, cid, self.nsid);
        command.flags = flags;
        command.dptr = dptr;
        let nlb_z = blocks.wrapping_sub(1) as u16;
        match op {
            Op::Read | Op::Compare => {
                command.set_slba(lba);
                command.cdw12 = RwCdw12::new().with_nlb_z(nlb_z).into_bits().into();
            }
            Op::Write { fua } => {
                command.set_slba(lba);
                let cdw12 = RwCdw12::new().with_nlb_z(nlb_z).with_fua(fua);
                command.cdw12 = cdw12.into_bits().into();
            }
            Op::WriteZeroes { fua, deallocate } => {
                command.set_slba(lba);
                let cdw12 = WriteZeroesCdw12::new().with_nlb_z(nlb_z).with_fua(fua);
                command.cdw12 = cdw12.with_deac(deallocate).into_bits().into();
            }
            Op::Deallocate => {
                // The range has context attributes and length in the low word, and the first block
                // in the high one.
                self.lists.set(list, 0, u64::from(blocks) << 32);
                self.lists.set(list, 1, lba);
                command.dptr = nvme::cmd::DataPointer::prp(self.lists.iova(list, 0), 0);
                command.cdw10 = DsmCdw10::new().into_bits().into();
                command.cdw11 = DsmCdw11::new().with_ad(true).into_bits().into();
            }
            Op::Flush => {}
        }
        slot.command = command;
        slot.user_data = user_data;
        slot.parent = parent;
        slot.tick = self.tick;
        self.sq.put(self.tail, &slot.command);
        self.advance_tail();
        Ok(index)
    }

    #[inline]
    pub(super) fn advance_tail(&mut self) {
        self.tail += 1;
        if self.tail == self.sq_entries {
            self.tail = 0;
        }
        self.counters.commands += 1;
        let ahead = self.tail + PREFETCH_DISTANCE;
        self.sq
            .prefetch(ahead.checked_sub(self.sq_entries).unwrap_or(ahead));
    }

    /// Rings the submission queue doorbell for all commands submitted so far.
    #[inline]
    pub fn ring(&mut self) {
        if self.tail != self.rung {
            // A queue of an earlier epoch is not rung, because the controller would report an
            // error.
            if self.epoch != self.shared.epoch.load(Ordering::Relaxed) {
                return self.attend();
            }
            if self.held {
                return;
            }
            self.tell_in_flight();
            self.rung = self.tail;
            self.sq_doorbell.publish(self.tail);
        }
    }

    /// Rings the doorbell and delivers completions; pauses briefly when there are none. Returns
    /// their number.
    #[inline]
    pub fn poll(&mut self, done: &mut impl Sink) -> usize {
        self.look(done, true)
    }

    /// Polls as [`QueueCore::poll`] does. With `rest` false there is no pause, for an owner that
    /// polls other queues as well.
    #[inline]
    pub fn look(&mut self, done: &mut impl Sink, rest: bool) -> usize {
        self.ring();
        let mut may_rest = rest || self.stepped;
        let mut count = loop {
            let count = self.reap(done);
            // A completion that arrives during the pause is delivered at once, because its
            // submitter waits for it.
            if count > 0 || !std::mem::take(&mut may_rest) || !self.rest() {
                break count;
            }
        };
        self.rounds = self.rounds.wrapping_add(1);
        let look = if count == 0 {
            64
        } else {
            self.found(count);
            1024
        };
        if self.rounds.is_multiple_of(look) {
            self.look_after();
        }
        if self.epoch != self.shared.epoch.load(Ordering::Relaxed) {
            self.attend();
        }
        if !self.finished.is_empty() {
            while let Some(completion) = self.finished.pop_front() {
                count += 1;
                done.other(completion);
            }
        }
        if !self.parents.waiting.is_empty() {
            self.continue_parents();
            self.ring();
        }
        count
    }

    /// Pauses until the next completion entry arrives, for a limited time. Returns whether another
    /// poll is worthwhile.
    #[inline]
    fn rest(&self) -> bool {
        // A stepped controller makes progress in this call.
        if self.stepped {
            self.shared.transport.pause();
            return true;
        }
        // Without outstanding commands no completion can arrive.
        let spin_polls = if self.slots.in_flight() > 0 {
            SPIN_POLLS
        } else {
            1
        };
        (0..spin_polls).any(|_| {
            self.shared.transport.pause();
            self.cq.take(self.head, self.phase).is_some()
        })
    }

    /// Submits the outstanding command in slot `index` once more.
    pub fn repeat(&mut self, index: u16) {
        let tick = self.tick;
        if let Some(slot) = self.slots.renew(index) {
            slot.tries += 1;
            slot.tick = tick;
            self.sq.put(self.tail, &slot.command);
            self.counters.retried += 1;
            self.advance_tail();
        }
    }

    /// Starts a request that is executed as several commands. Its owner keeps the memory in place.
    pub fn begin(&mut self, parent: SplitRequest) -> Result<(), SubmitRefusal> {
        if self.dead {
            return Err(SubmitRefusal::Gone);
        }
        let index = self.parents.add(parent);
        self.parents.waiting.push_back(index);
        self.continue_parents();
        Ok(())
    }

    /// Submits further parts of split requests, as far as the queue has room.
    pub fn continue_parents(&mut self) {
        while let Some(&index) = self.parents.waiting.front() {
            let Some(parent) = self.parents.get(index) else {
                self.parents.waiting.pop_front();
                continue;
            };
            if parent.left == 0 {
                self.parents.waiting.pop_front();
                continue;
            }
            let op = parent.op;
            let most = if op.has_data() {
                u64::from(self.max_blocks)
            } else {
                MAX_BLOCKS
            };
            let blocks = parent.left.min(most) as u32;
            let (lba, offset, method) = (parent.lba, parent.offset, parent.method);
            let ranges = std::mem::take(&mut parent.ranges);
            let data = if op.has_data() {
                Data::Ranges(method, &ranges, offset)
            } else {
                Data::None
            };
            let pushed = self.push(op, lba, blocks, data, index, 0);
            let shift = self.block_shift;
            let Some(parent) = self.parents.get(index) else {
                return;
            };
            parent.ranges = ranges;
            if pushed.is_err() {
                return;
            }
            parent.lba = parent.lba.wrapping_add(u64::from(blocks));
            parent.left -= u64::from(blocks);
            parent.offset += u64::from(blocks) << shift;
            parent.in_flight += 1;
        }
    }

    /// Records the completion of a part of a split request. Returns the request's completion after
    /// the last part.
    pub fn part_done(
        &mut self,
        index: u32,
        result: Result<(), CommandError>,
    ) -> Option<Completion> {
        let parent = self.parents.get(index)?;
        parent.in_flight = parent.in_flight.saturating_sub(1);
        if let Err(error) = result {
            // The remaining parts cannot repair the failure.
            parent.left = 0;
            parent.error.get_or_insert(error);
        }
        if parent.left > 0 || parent.in_flight > 0 {
            return None;
        }
        let (user_data, error) = (parent.user_data, parent.error);
        let (buffer, _) = self.parents.end(index)?;
        Some(Completion {
            user_data,
            result: error.map_or(Ok(()), Err),
            dw0: 0,
            buffer,
        })
    }

    /// Updates the clock, and when due, looks for timed-out commands and reads the controller's
    /// status.
    pub fn look_after(&mut self) {
        if self.slots.in_flight() == 0 || self.held {
            return;
        }
        let now = Instant::now();
        if now < self.next_tick {
            return;
        }
        self.next_tick = now + self.tick_len;
        self.tick = self.tick.wrapping_add(1);
        match crate::admin::csts(&*self.shared.transport) {
            Ok(csts) if csts.cfs() => self.recover("controller fatal status"),
            Ok(csts) if !csts.rdy() => self.recover("the controller was reset by another owner"),
            Ok(_) => {
                let (tick, timeout_ticks) = (self.tick, self.timeout_ticks);
                let late = |slot: &super::slots::CommandSlot| {
                    slot.busy && tick.wrapping_sub(slot.tick) > timeout_ticks
                };
                let late = self.slots.iter().position(late);
                if let Some(index) = late {
                    self.late(index as u16);
                }
            }
            Err(_) => self.recover("the device does not answer"),
        }
    }

    /// Handles the timed-out command in slot `index`: aborts it, or resets the controller.
    fn late(&mut self, index: u16) {
        let (tick, timeout_ticks) = (self.tick, self.timeout_ticks);
        let Some(slot) = self.slots.get(index) else {
            return;
        };
        if slot.aborted {
            return self.recover("a command was answered neither itself nor after Abort");
        }
        slot.aborted = true;
        let cid = slot.cid;
        let opcode = slot.command.opcode;
        self.counters.aborts += 1;
        tracing::warn!(
            qid = self.qid,
            cid,
            opcode,
            "command timed out; aborting it"
        );
        let shared = self.shared.clone();
        let mut control = shared.lock();
        if shared.epoch.load(Ordering::Acquire) != self.epoch {
            return;
        }
        let limit = shared
            .options
            .admin_timeout
            .min(shared.options.command_timeout);
        let answer = control.abort(self.qid, cid, limit);
        drop(control);
        let grace = match answer {
            Ok(true) => (timeout_ticks / 2).max(2),
            // The controller does not know the command, so the completion is under way, or lost.
            Ok(false) => 2,
            Err(_) => return self.recover("Abort was not answered"),
        };
        if let Some(slot) = self.slots.get(index) {
            slot.tick = tick.wrapping_sub(timeout_ticks).wrapping_add(grace);
        }
    }

    fn recover(&mut self, why: &'static str) {
        // The outcome is visible in the epoch and the state.
        let _ = self.shared.recover(self.epoch, why);
        self.attend();
    }

    /// Reacts to a new epoch: the controller was reset, suspended or released, or is lost.
    #[cold]
    pub fn attend(&mut self) {
        for _ in 0..4 {
            let epoch = self.shared.epoch.load(Ordering::Acquire);
            if epoch == self.epoch {
                return;
            }
            let before = std::mem::replace(&mut self.epoch, epoch);
            match self.shared.state() {
                DeviceState::Live => {}
                DeviceState::Suspended => {
                    self.held = true;
                    return;
                }
                // The queue continues as it is until it is empty, unless an earlier reset has lost
                // it.
                DeviceState::Draining => {
                    self.dead = true;
                    if self.held || before.wrapping_add(1) != epoch {
                        self.fail_all(CommandError::Reset);
                    }
                    return;
                }
                DeviceState::GoneQuiet | DeviceState::GoneWild => {
                    self.dead = true;
                    return self.fail_all(CommandError::Gone);
                }
            }
            match self.attach() {
                Ok(()) => {
                    self.counters.recreated += 1;
                    return self.replay();
                }
                Err(error) => {
                    tracing::warn!(qid = self.qid, %error, "queue could not be created again");
                    let _ = self
                        .shared
                        .recover(epoch, "a queue could not be created again");
                }
            }
        }
        // The controller is being reset again and again. The queue pair does not exist in it, so
        // the memory is safe.
        self.dead = true;
        self.fail_all(CommandError::Reset);
    }

    /// Submits all outstanding commands again, or fails them. Every command may be repeated: it
    /// sets the contents of blocks and does not depend on them, and no caller has seen its
    /// completion.
    fn replay(&mut self) {
        // Commands are not to blame for a suspension, so it does not count as a retry.
        let held = std::mem::take(&mut self.held);
        for index in self.slots.busy() {
            let retries = self.shared.options.retries;
            match self.slots.get(index) {
                Some(slot) if held => {
                    slot.tries = slot.tries.saturating_sub(1);
                    self.repeat(index);
                }
                Some(slot) if slot.tries < retries => self.repeat(index),
                _ => self.finish(index, CommandError::Reset),
            }
        }
        self.ring();
    }

    /// Completes the command in slot `index` with an error, without a completion queue entry.
    fn finish(&mut self, index: u16, error: CommandError) {
        let Some(slot) = self.slots.get(index) else {
            return;
        };
        let (user_data, parent) = (slot.user_data, slot.parent);
        let buffer = slot.hold.take();
        self.slots.end(index);
        let buffer = self.safe(buffer);
        if parent == SINGLE {
            self.finished.push_back(Completion {
                user_data,
                result: Err(error),
                dw0: 0,
                buffer,
            });
        } else if let Some(mut completion) = self.part_done(parent, Err(error)) {
            completion.buffer = self.safe(completion.buffer);
            self.finished.push_back(completion);
        }
    }

    /// Returns `buffer` if the controller no longer accesses it. Otherwise leaks it, so that its
    /// memory is never used again.
    fn safe(&self, buffer: Option<DmaBuffer>) -> Option<DmaBuffer> {
        if self.shared.state() == DeviceState::GoneWild {
            std::mem::forget(buffer);
            return None;
        }
        buffer
    }

    fn fail_all(&mut self, error: CommandError) {
        self.held = false;
        for index in self.slots.busy() {
            self.finish(index, error);
        }
        self.tell_in_flight();
        // Split requests without outstanding parts.
        self.parents.waiting.clear();
        for index in self.parents.busy() {
            let Some(parent) = self.parents.get(index) else {
                continue;
            };
            let user_data = parent.user_data;
            if let Some((buffer, _)) = self.parents.end(index) {
                self.finished.push_back(Completion {
                    user_data,
                    result: Err(error),
                    dw0: 0,
                    buffer: self.safe(buffer),
                });
            }
        }
    }
}
