//! Queue of an association: connects a TCP connection to a pair of rings of the controller.
//!
//! ```text
//! capsule -> slot -> memory (waits if there is none) -> R2T, data -> SQ ring -> controller
//!                                                                                   |
//! capsule, C2HData <- staged <---------------------------------------- CQ ring <----'
//! ```
//!
//! Without a free slot, or memory for the in-capsule data of a command, nothing more is read from
//! the connection. Commands without in-capsule data wait for memory in the order of their arrival,
//! and request their data (R2T) when they have it. Slots and memory thus bound the resources of a
//! host.

use crate::authentication::{AuthResult, AuthState, Prover, SubmittedStep, is_of_proof};
use crate::link::{ConnectionEnd, Link};
use crate::memory::{AssociationMemory, Block, PAGE, point};
use crate::rings::Rings;
use crate::slots::{Direction, QueueStep, Sender, Slot, Slots};
use crate::target::AssociationMessage;
use controller::Controller;
use dma::{DmaMap, MemoryError, SegmentList};
use nvme::sgl::{SglDescriptor, SglSubtype, SglType};
use nvme::{AdminOpcode, Command, Completion, Status, fabrics};
use nvme_tcp::{ConnectionLimits, Grants, Request, Requests, digest};
use std::collections::VecDeque;
use std::sync::Arc;
use volume::Inbox;

/// Minimum number of outstanding bytes for which data is received directly into its final memory,
/// without a copy.
const DIRECT: u32 = 16 << 10;
/// Maximum number of unused segment lists that a queue keeps for reuse.
const SPARE_LISTS: usize = 64;

/// Destination of data that a PDU announces.
#[derive(Debug, Clone, Copy)]
struct DataDestination {
    /// Index of the command's slot; `None` if the data is discarded.
    slot: Option<u16>,
    at: u32,
    /// Tag of the R2T PDU (request to transfer) that the data answers; `None` for in-capsule data.
    tag: Option<u16>,
}

/// Phase in the life of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The rings are being created; the host's Connect command, with this identifier, waits for its
    /// answer.
    Making {
        cid: u16,
    },
    Open,
    /// The connection has ended; the controller still has the rings.
    Ended,
    /// The controller is deleting the rings.
    Removing,
    /// The controller has nothing of the queue any more.
    Gone,
}

/// Parts of the association that its queues use in a call.
pub(crate) struct QueueContext<'a> {
    pub controller: &'a mut Controller,
    pub pool: &'a mut AssociationMemory,
    /// Maximum number of data bytes of one command.
    pub max_transfer: u32,
    /// Thread for slow steps of authentication, if hosts have to authenticate.
    pub prover: Option<&'a Prover>,
    pub inbox: &'a Arc<Inbox<AssociationMessage>>,
}

/// Decision about which side executes a command, and how.
pub(crate) enum CommandDecision {
    /// The controller executes the command as it is.
    Pass,
    /// The controller executes this command in place of the received one.
    PassAs(Command),
    /// The command completes at once with this status and result.
    Answer(Status, u64),
}

/// Queue of an association: the host's connection, and the rings of the controller.
pub(crate) struct Queue {
    pub link: Link,
    pub qid: u16,
    pub phase: Phase,
    pub rings: Rings,
    pub slots: Slots,
    /// State of the host's authentication on this queue.
    pub proof: AuthState,
    /// Reason why authentication has failed, until it is logged.
    pub refusal: Option<dhchap::Failure>,
    /// Error that has left incomplete data among the staged bytes, until [`Queue::read`] returns it
    /// and thereby ends the connection.
    failed: Option<MemoryError>,
    requests: Requests,
    grants: Grants<u16>,
    /// Number of entries of the host's submission queue; the head follows, if flow control is used.
    entries: u16,
    flow_control: bool,
    sqhd: u16,
    place: Option<DataDestination>,
    /// Index of the slot with the command into which the kernel receives directly, if there is one.
    direct: Option<u16>,
    /// Whether reading is paused because no memory is free for in-capsule data.
    starved: bool,
    /// Indices of the slots with commands that wait for memory, in order.
    waiting: VecDeque<u16>,
    lists: Vec<SegmentList>,
}

impl Queue {
    pub(crate) fn new(
        link: Link,
        limits: &ConnectionLimits,
        qid: u16,
        entries: u16,
        in_capsule: u32,
        flow_control: bool,
    ) -> Self {
        // A completed command keeps its slot until the response has been sent, and commands of this
        // side need slots, too.
        let room = entries
            .saturating_mul(2)
            .saturating_add(8)
            .min(crate::rings::MAX_QUEUE_ENTRIES - 1);
        Self {
            link,
            qid,
            phase: Phase::Open,
            rings: Rings::new(qid, room),
            slots: Slots::new(room),
            proof: AuthState::Given,
            refusal: None,
            failed: None,
            requests: Requests::new(limits, in_capsule),
            grants: Grants::new(room),
            entries,
            flow_control,
            sqhd: 0,
            place: None,
            direct: None,
            starved: false,
            waiting: VecDeque::new(),
            lists: Vec::new(),
        }
    }

    /// Returns whether received bytes or completed sends have to be handled.
    pub(crate) fn has_news(&self) -> bool {
        self.failed.is_some() || self.link.has_news()
    }

    /// Starts to send the staged bytes. Returns `false` if nothing can be sent.
    pub(crate) fn send(&mut self) -> bool {
        self.failed.is_none() && self.link.send()
    }

    /// Returns whether the host uses flow control for its submission queue.
    pub(crate) fn has_flow_control(&self) -> bool {
        self.flow_control
    }

    /// Returns whether the kernel is executing no operation on the connection.
    pub(crate) fn is_quiet(&self) -> bool {
        self.link.is_quiet()
    }

    // ---- from the host

    /// Handles received bytes; `decide` decides about each command. Returns whether there was work.
    pub(crate) fn read(
        &mut self,
        around: &mut QueueContext<'_>,
        mut decide: impl FnMut(&Command, &mut Controller) -> CommandDecision,
    ) -> Result<bool, ConnectionEnd> {
        if let Some(error) = self.failed.take() {
            return Err(error.into());
        }
        let mut worked = self.collect(around)?;
        if self.phase != Phase::Open {
            return Ok(worked);
        }
        if self.starved {
            self.feed_capsule(around);
        }
        // A host that has sent more than there is room for is not read from, so its hang-up is
        // detected here.
        if self.is_held_up() && self.link.has_hung_up() {
            return Err(ConnectionEnd::Closed);
        }
        loop {
            if self.is_held_up() {
                break;
            }
            let Some(bytes) = self.link.bytes() else {
                break;
            };
            let (used, request) = self.requests.next(bytes, &mut self.grants)?;
            let mut more = true;
            match request {
                Request::More => more = used > 0,
                Request::Command { command, data } => {
                    self.command(&command, data, around, &mut decide);
                }
                Request::Transfer { tag, at, .. } => {
                    let slot = self.grants.get(tag).map(|grant| grant.item);
                    let tag = Some(tag);
                    self.place = Some(DataDestination { slot, at, tag });
                }
                Request::Data(bytes) => {
                    if let Some(place) = &mut self.place {
                        let block = place.slot.and_then(|slot| self.slots.get(slot)?.block);
                        if let Some(block) = block {
                            around.pool.write(block, place.at, bytes)?;
                        }
                        place.at = place.at.saturating_add(bytes.len() as u32);
                    }
                }
                Request::DataEnd { corrupt, whole } => self.data_end(corrupt, whole, around),
                Request::Terminated(why) => return Err(ConnectionEnd::Terminated(why)),
            }
            self.link.consume(used);
            if !more {
                self.receive(around.controller.dma());
                break;
            }
            worked = true;
        }
        Ok(worked)
    }

    /// Returns whether reading must pause: for memory, for the send, or for commands to complete.
    fn is_held_up(&self) -> bool {
        self.starved || self.link.is_full() || !self.slots.has_room()
    }

    /// Handles completed sends and receives. Returns whether there were any.
    fn collect(&mut self, around: &mut QueueContext<'_>) -> Result<bool, ConnectionEnd> {
        if !self.link.has_news() {
            return Ok(false);
        }
        let (slots, lists) = (&mut self.slots, &mut self.lists);
        let pool = &mut *around.pool;
        self.link.sent(|name, list| {
            keep(lists, list);
            // Sending its data completes the command.
            if let Ok(place) = u16::try_from(name)
                && let Some(block) = slots.free(place)
            {
                pool.free(block);
            }
        })?;
        let direct = self.link.received(|list| keep(lists, list))?;
        self.direct = None;
        // At most the expected number of bytes, which has 32 bits.
        let direct = direct as u32;
        self.requests.took(direct);
        if let Some(place) = &mut self.place {
            place.at = place.at.saturating_add(direct);
        }
        Ok(true)
    }

    /// Starts the next receive, into the buffer or directly into a command's memory.
    fn receive(&mut self, map: &DmaMap) {
        let expected = self.requests.expects();
        let place = self.place.filter(|_| expected >= DIRECT);
        let whole = self.link.bytes().is_some_and(<[u8]>::is_empty);
        let mut direct = None;
        if let Some(place) = place.filter(|_| whole)
            && let Some(slot) = place.slot
            && let Some(Slot {
                block: Some(block),
                len,
                ..
            }) = self.slots.get(slot).copied()
        {
            let mut list = self.lists.pop().unwrap_or_default();
            if point(&mut list, map, block, len) {
                direct = Some((list, place.at.into(), expected.into()));
                self.direct = Some(slot);
            } else {
                keep(&mut self.lists, list);
            }
        }
        if let Some(list) = self.link.receive(direct) {
            keep(&mut self.lists, list);
        }
    }

    /// Handles a command that has arrived.
    fn command(
        &mut self,
        command: &Command,
        data: u32,
        around: &mut QueueContext<'_>,
        decide: &mut impl FnMut(&Command, &mut Controller) -> CommandDecision,
    ) {
        self.sqhd = match self.sqhd + 1 {
            head if head >= self.entries => 0,
            head => head,
        };
        self.place = (data > 0).then_some(DataDestination {
            slot: None,
            at: 0,
            tag: None,
        });
        let cid = command.cid.get();
        let transfer = transfer(command, data, around.max_transfer);
        let (direction, len) = match transfer {
            Ok(transfer) => transfer,
            Err(status) => return self.answer(cid, status.with_dnr(true), 0),
        };
        let fate = if self.proof.is_given() {
            decide(command, around.controller)
        } else {
            match self.proof.refuses(command, len) {
                Some(status) => CommandDecision::Answer(status.with_dnr(true), 0),
                None => CommandDecision::Pass,
            }
        };
        let command = match fate {
            CommandDecision::Pass => *command,
            CommandDecision::PassAs(other) => other,
            CommandDecision::Answer(status, result) => return self.answer(cid, status, result),
        };
        let slot = Slot {
            cid,
            command,
            direction,
            len,
            ..Slot::default()
        };
        let Some(slot) = self.slots.take(slot) else {
            // Not reached: a slot was free.
            return self.answer(cid, Status::INTERNAL_ERROR, 0);
        };
        match direction {
            Direction::None => self.start(slot, around),
            Direction::Out if data > 0 => {
                self.place = Some(DataDestination {
                    slot: Some(slot),
                    at: 0,
                    tag: None,
                });
                self.feed_capsule(around);
            }
            Direction::In | Direction::Out => {
                self.waiting.push_back(slot);
                self.feed(around);
            }
        }
    }

    /// Allocates memory for the in-capsule data that comes next.
    fn feed_capsule(&mut self, around: &mut QueueContext<'_>) {
        self.starved = false;
        let slot = self.place.and_then(|place| place.slot);
        if let Some(slot) = slot.and_then(|slot| self.slots.get(slot))
            && slot.block.is_none()
        {
            let block = take(around.pool, slot.len, self.qid == 0);
            slot.block = block.or_else(|| around.pool.take_reserved(self.qid, slot.len.into()));
            self.starved = slot.block.is_none();
        }
    }

    /// Allocates memory for the commands that wait for it, in their order.
    pub(crate) fn feed(&mut self, around: &mut QueueContext<'_>) {
        while let Some(&place) = self.waiting.front() {
            let Some(slot) = self.slots.get(place) else {
                self.waiting.pop_front();
                continue;
            };
            let Some(block) = take(around.pool, slot.len, self.qid == 0) else {
                return;
            };
            slot.block = Some(block);
            let (cid, len, direction) = (slot.cid, slot.len, slot.direction);
            self.waiting.pop_front();
            match direction {
                Direction::Out => match self.grants.insert(cid, 0, len, place) {
                    Ok(tag) => {
                        let r2t = self.link.writer.r2t(cid, tag, 0, len);
                        self.link.header(&r2t);
                    }
                    // Not reached: there are as many entries as slots.
                    Err(_) => self.end(place, Status::INTERNAL_ERROR, 0, around.pool),
                },
                _ => {
                    if self.qid == 0 && around.pool.clear(block).is_err() {
                        self.end(place, Status::INTERNAL_ERROR, 0, around.pool);
                        continue;
                    }
                    self.start(place, around);
                }
            }
        }
    }

    /// Handles the end of a PDU's data.
    fn data_end(&mut self, corrupt: bool, whole: bool, around: &mut QueueContext<'_>) {
        let Some(place) = self.place.take() else {
            return;
        };
        if let Some(tag) = place.tag {
            if let Some(slot) = place.slot.and_then(|slot| self.slots.get(slot)) {
                slot.corrupt |= corrupt;
            }
            if !whole {
                return;
            }
            self.grants.remove(tag);
        }
        let Some(slot) = place.slot else {
            return;
        };
        let corrupt = corrupt || self.slots.get(slot).is_some_and(|slot| slot.corrupt);
        if corrupt {
            // The host may send the command again.
            self.end(slot, Status::TRANSIENT_TRANSPORT_ERROR, 0, around.pool)
        } else {
            self.start(slot, around)
        }
    }

    /// Passes a command to the controller, after all of its data has arrived.
    fn start(&mut self, place: u16, around: &mut QueueContext<'_>) {
        let Some(slot) = self.slots.get(place) else {
            return;
        };
        if is_of_proof(slot) {
            return self.prove(place, around);
        }
        slot.started = true;
        let mut command = slot.command;
        command.cid = place.into();
        let pool = &mut *around.pool;
        match slot.block {
            None => command.set_prps(0, 0),
            Some(block) if self.qid == 0 => {
                if point_prps(&mut command, block, slot.len, pool).is_err() {
                    return self.end(place, Status::INTERNAL_ERROR, 0, pool);
                }
            }
            // The most common case, and the controller's fast path.
            Some(block) if slot.len <= PAGE => command.set_prps(block.iova(), 0),
            Some(block) => command.set_sgl(SglDescriptor::data_block(block.iova(), slot.len)),
        }
        self.rings.put(pool.memory(), &command);
    }

    /// Executes an authentication command, after its data has arrived.
    fn prove(&mut self, place: u16, around: &mut QueueContext<'_>) {
        let Some(slot) = self.slots.get(place).copied() else {
            return;
        };
        let message = match (slot.direction, slot.block) {
            (Direction::Out, Some(block)) => {
                let mut message = Vec::new();
                let read = around.pool.read(block, 0, slot.len, |bytes| {
                    message.extend_from_slice(bytes);
                });
                if read.is_err() {
                    return self.end(place, Status::INTERNAL_ERROR, 0, around.pool);
                }
                Some(message)
            }
            _ => None,
        };
        let of = (self.qid, place);
        match self.proof.step(message, of, around.prover, around.inbox) {
            Some(SubmittedStep::Done(outcome)) => self.proven(place, outcome, around),
            Some(SubmittedStep::Away) => {}
            Some(SubmittedStep::Full) => {
                self.end(place, Status::NOT_ENOUGH_RESOURCES, 0, around.pool);
            }
            None => {
                let status = Status::COMMAND_SEQUENCE_ERROR.with_dnr(true);
                self.end(place, status, 0, around.pool);
            }
        }
    }

    /// Completes an authentication command after its step has ended.
    pub(crate) fn proven(
        &mut self,
        place: u16,
        outcome: AuthResult,
        around: &mut QueueContext<'_>,
    ) {
        let Some((message, failed)) = self.proof.ended(outcome) else {
            return;
        };
        self.refusal = self.refusal.or(failed);
        let Some(slot) = self.slots.get(place).copied() else {
            return;
        };
        let status = match (&message, slot.block) {
            (None, _) => Status::SUCCESS,
            (Some(message), Some(block)) if message.len() <= slot.len as usize => {
                let pool = &around.pool;
                match pool
                    .clear(block)
                    .and_then(|()| pool.write(block, 0, message))
                {
                    Ok(_) => Status::SUCCESS,
                    Err(_) => Status::INTERNAL_ERROR,
                }
            }
            // The host's buffer is too small for the message.
            (Some(_), _) => Status::INVALID_FIELD.with_dnr(true),
        };
        let entry = Completion {
            cid: place.into(),
            status_phase: Completion::pack_status(status, false),
            ..Completion::default()
        };
        self.respond(place, &slot, entry, around);
    }

    /// Submits a command of the association itself to the controller.
    pub(crate) fn ask(
        &mut self,
        mut command: Command,
        qid: u16,
        step: QueueStep,
        pool: &AssociationMemory,
    ) -> bool {
        let slot = Slot {
            sender: Sender::Own { qid, step },
            command,
            started: true,
            ..Slot::default()
        };
        let Some(place) = self.slots.take(slot) else {
            return false;
        };
        command.cid = place.into();
        self.rings.put(pool.memory(), &command);
        true
    }

    // ---- to the host

    /// Completes a command that has no slot.
    pub(crate) fn answer(&mut self, cid: u16, status: Status, result: u64) {
        let entry = Completion {
            dw0: (result as u32).into(),
            dw1: ((result >> 32) as u32).into(),
            cid: cid.into(),
            status_phase: Completion::pack_status(status, false),
            ..Completion::default()
        };
        self.complete(entry);
    }

    fn complete(&mut self, entry: Completion) {
        let entry = Completion {
            sqhd: if self.flow_control { self.sqhd } else { 0 }.into(),
            sqid: 0.into(),
            ..entry
        };
        let capsule = self.link.writer.completion(&entry);
        self.link.header(&capsule);
    }

    /// Completes a command that was not passed to the controller.
    fn end(&mut self, place: u16, status: Status, result: u64, pool: &mut AssociationMemory) {
        let Some(slot) = self.slots.get(place) else {
            return;
        };
        let cid = slot.cid;
        if let Some(block) = self.slots.free(place) {
            pool.free(block);
        }
        self.answer(cid, status, result);
    }

    /// Sends responses for the commands that the controller has completed. Completions of this
    /// side's own commands are added to `own`. Returns `true` if there were any.
    pub(crate) fn reap(
        &mut self,
        around: &mut QueueContext<'_>,
        own: &mut Vec<(u16, QueueStep, Status)>,
    ) -> bool {
        let mut worked = false;
        while let Some(entry) = self.rings.take(around.pool.memory()) {
            worked = true;
            let place = entry.cid.get();
            let Some(slot) = self.slots.get(place).copied() else {
                continue;
            };
            if let Sender::Own { qid, step } = slot.sender {
                self.slots.free(place);
                own.push((qid, step, entry.status()));
                continue;
            }
            self.respond(place, &slot, entry, around);
        }
        if worked {
            self.rings.taken(around.controller);
        }
        worked
    }

    fn respond(
        &mut self,
        place: u16,
        slot: &Slot,
        entry: Completion,
        around: &mut QueueContext<'_>,
    ) {
        let status = entry.status();
        let entry = Completion {
            cid: slot.cid.into(),
            status_phase: Completion::pack_status(status, false),
            ..entry
        };
        let is_ended = self.phase != Phase::Open;
        let data = slot.block.filter(|_| {
            slot.direction == Direction::In && slot.len > 0 && status.is_success() && !is_ended
        });
        let Some(block) = data else {
            if let Some(block) = self.slots.free(place) {
                around.pool.free(block);
            }
            if !is_ended {
                self.complete(entry);
            }
            return;
        };
        let plain = entry.dw0.get() == 0 && entry.dw1.get() == 0;
        let success = plain && !self.flow_control && self.qid != 0;
        let (cid, len) = (slot.cid, slot.len);
        let header = self.link.writer.c2h_data(cid, 0, len, true, success);
        self.link.header(&header);
        let mut list = self.lists.pop().unwrap_or_default();
        let sums = self.link.writer.data_digest();
        if !sums && point(&mut list, around.controller.dma(), block, len) {
            // The slot is freed when the data has been sent; the controller has finished the
            // command.
            self.link.staged.data(place.into(), list);
            if let Some(slot) = self.slots.get(place) {
                slot.started = false;
            }
        } else {
            keep(&mut self.lists, list);
            let mut sum = digest::RunningDigest::new();
            let staged = &mut self.link.staged;
            let read = around.pool.read(block, 0, len, |bytes| {
                if sums {
                    sum.update(bytes);
                }
                staged.bytes(bytes);
            });
            // The header has announced the data, so the connection cannot continue without them.
            self.failed = self.failed.or(read.err());
            if sums {
                staged.bytes(&sum.value().to_le_bytes());
            }
            if let Some(block) = self.slots.free(place) {
                around.pool.free(block);
            }
        }
        if !success {
            self.complete(entry);
        }
    }

    // ---- the end

    /// Closes the connection. The controller may still execute commands of the queue.
    pub(crate) fn close(&mut self, why: &ConnectionEnd, pool: &mut AssociationMemory) {
        if !matches!(self.phase, Phase::Open | Phase::Making { .. }) {
            return;
        }
        self.phase = match self.phase {
            Phase::Making { .. } => Phase::Removing,
            _ => Phase::Ended,
        };
        let last = match why {
            ConnectionEnd::Violation(violation) => Some(violation.c2h_term_req()),
            _ => None,
        };
        let (slots, lists) = (&mut self.slots, &mut self.lists);
        self.link.end(last.as_deref(), |name, list| {
            keep(lists, list);
            if let Ok(place) = u16::try_from(name)
                && let Some(block) = slots.free(place)
            {
                pool.free(block);
            }
        });
        self.waiting.clear();
    }

    /// Takes memory from the kernel as its operations end, while the queue is ending.
    pub(crate) fn drain(&mut self, pool: &mut AssociationMemory) {
        let (slots, lists) = (&mut self.slots, &mut self.lists);
        let _ = self.link.sent(|name, list| {
            keep(lists, list);
            if let Ok(place) = u16::try_from(name)
                && let Some(block) = slots.free(place)
            {
                pool.free(block);
            }
        });
        let _ = self.link.received(|list| keep(lists, list));
    }

    /// Frees the memory of the queue. Neither the controller nor the kernel may use it any more.
    pub(crate) fn release(&mut self, pool: &mut AssociationMemory) {
        for place in self.slots.places() {
            if let Some(block) = self.slots.free(place) {
                pool.free(block);
            }
        }
    }

    /// Frees the commands that the controller had when it was reset, without answering them, while
    /// the connection stays open.
    pub(crate) fn forget_started(&mut self, pool: &mut AssociationMemory) {
        for place in self.slots.places() {
            let started = self.slots.get(place).is_some_and(|slot| slot.started);
            if started && let Some(block) = self.slots.free(place) {
                pool.free(block);
            }
        }
    }
}

fn keep(lists: &mut Vec<SegmentList>, mut list: SegmentList) {
    if lists.len() < SPARE_LISTS {
        list.clear();
        lists.push(list);
    }
}

/// Allocates memory for a command's data, including a page for the PRP list if PRPs are used.
fn take(pool: &mut AssociationMemory, len: u32, prps: bool) -> Option<Block> {
    let list = if prps && len > 2 * PAGE { PAGE } else { 0 };
    pool.take(u64::from(len.next_multiple_of(PAGE)) + u64::from(list))
}

/// Sets the PRPs of an Admin command to its data. If it has more than two pages, the PRP list is in
/// the last page of the block.
fn point_prps(
    command: &mut Command,
    block: Block,
    len: u32,
    pool: &AssociationMemory,
) -> Result<(), MemoryError> {
    let pages = u64::from(len.div_ceil(PAGE));
    let at = |page: u64| block.iova() + page * u64::from(PAGE);
    match pages {
        0 | 1 => command.set_prps(at(0), 0),
        2 => command.set_prps(at(0), at(1)),
        pages => {
            // No transfer has more pages than a list has room for.
            for page in 1..pages.min(512) {
                let offset = pages * u64::from(PAGE) + (page - 1) * 8;
                pool.write(block, offset as u32, &at(page).to_le_bytes())?;
            }
            command.set_prps(at(0), at(pages));
        }
    }
    Ok(())
}

/// Returns the direction and length of a command's data, from its opcode and SGL descriptor. `data`
/// is the length of the in-capsule data.
fn transfer(command: &Command, data: u32, most: u32) -> Result<(Direction, u32), Status> {
    // "NVMe over TCP Transport 1.1", 3.5: SGLs only.
    if command.flags.psdt() == nvme::cmd::Psdt::PRP {
        return Err(Status::INVALID_FIELD);
    }
    let sgl = command.sgl1();
    let len = sgl.length.get();
    let direction = match command.opcode & 3 {
        _ if len == 0 => Direction::None,
        1 => Direction::Out,
        2 => Direction::In,
        // Fabrics commands have bits of their own; all that have data are sent with it.
        _ if command.admin_opcode() == AdminOpcode::FABRICS => match fabrics::fctype(command) {
            Some(fabrics::Fctype::AUTHENTICATION_RECEIVE) => Direction::In,
            _ => Direction::Out,
        },
        _ => Direction::None,
    };
    let inside = (sgl.ty(), sgl.subtype()) == (SglType::DATA_BLOCK, SglSubtype::OFFSET);
    let outside =
        (sgl.ty(), sgl.subtype()) == (SglType::TRANSPORT_DATA_BLOCK, SglSubtype::TRANSPORT);
    match direction {
        _ if len > most => Err(Status::INVALID_FIELD),
        Direction::None if data == 0 => Ok((direction, 0)),
        Direction::Out if inside && sgl.address.get() != 0 => Err(Status::SGL_OFFSET_INVALID),
        Direction::Out if inside && data == len => Ok((direction, len)),
        Direction::Out | Direction::In if outside && data == 0 => Ok((direction, len)),
        Direction::Out | Direction::In if inside || outside => Err(Status::DATA_SGL_LENGTH_INVALID),
        Direction::None => Err(Status::DATA_SGL_LENGTH_INVALID),
        _ => Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
    }
}
