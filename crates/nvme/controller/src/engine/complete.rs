//! The start and the end of commands outside of batches, and completions of volume requests.

use super::own::OwnRequest;
use super::slots::{Kind, Outcome, RemainingWork, Starting, ZoneWriteKind};
use super::{Engine, Event, Execution, ReservationEnd, commands};
use crate::ana;
use nvme::cmd::Fuse;
use nvme::{Command, Status};
use volume::{Budget, Completion};

impl Engine {
    /// Returns the parts of the engine that commands use. [`Engine::settle`] has to follow.
    pub(super) fn execution(&mut self) -> Execution<'_> {
        Execution {
            slots: &mut self.slots,
            namespaces: &mut self.namespaces,
            dma: &self.dma,
            settings: &self.settings,
            bus_master: &self.queues.bus_master,
            events: &mut self.events,
        }
    }

    /// Handles the outcomes of commands that were executed.
    pub(super) fn settle(&mut self) {
        while let Some(outcome) = self.slots.outcomes.pop_front() {
            match outcome {
                Outcome::Completed(completion) => {
                    self.complete_one(completion);
                }
                Outcome::Ended(index, result) => self.end(index, result),
            }
        }
    }

    /// Starts an I/O command that was fetched from queue `sqid`.
    pub(super) fn execute(&mut self, sqid: u16, command: &Command) {
        let sort = self.namespaces.sort_of(command.nsid.get());
        let offer = self.offer();
        self.slots.starting = Starting {
            number: self.queues.last_fetched(sqid),
            fetched_at: self.counters.sampling.fetched_at,
            slot: None,
        };
        let result = match commands::handler(command.nvm_opcode(), offer, sort) {
            // Fused operations are not supported (Identify Controller, FUSES).
            _ if command.flags.fuse() != Fuse::NORMAL => Err(Status::INVALID_FIELD.with_dnr(true)),
            Some(start) => match self.namespaces.barred(command, offer.shared) {
                Some(barred) => Err(barred),
                None => start(&mut self.execution(), sqid, command),
            },
            None => Err(Status::INVALID_OPCODE.with_dnr(true)),
        };
        self.counters.begin_busy(&self.slots);
        if let Err(status) = result {
            let (cid, nsid) = (command.cid.get(), command.nsid.get());
            let (namespaces, counters) = (&self.namespaces, &self.counters);
            let lba = namespaces.first_unreadable(command, status);
            if ana::is_refusal(status) {
                counters.passed_by(namespaces, status, nsid);
            } else {
                let failed = (sqid, cid, status, (nsid, lba));
                counters.failed(namespaces, &mut self.events, failed);
            }
            match self.slots.starting.slot {
                Some(index) => self.finish_slot(index, cid, status, 0),
                None => self.end_reserved(sqid, cid, status, 0),
            }
        }
        self.settle();
    }

    /// Continues parked commands with half of the round's budget. The other half is for the queues.
    #[cold]
    pub(super) fn go_on(&mut self, budget: &mut Budget) {
        let rest = budget.left() / 2;
        let mut waiting = Vec::new();
        while budget.left() > rest
            && let Some(index) = self.slots.parked.pop_front()
        {
            if self.execution().go_on(index, budget) {
                waiting.push(index);
            }
            self.settle();
        }
        self.slots.parked.extend(waiting);
    }

    /// Handles the completion of a volume request. Stale tags are ignored. Not inlined: `make cost`
    /// counts its instructions by its name.
    #[inline(never)]
    pub fn complete(&mut self, completion: Completion) {
        if self.complete_one(completion) {
            self.settle();
        }
    }

    /// Handles the completion of a volume request. Returns whether there may be outcomes.
    #[inline(always)]
    fn complete_one(&mut self, completion: Completion) -> bool {
        let Some((index, slot)) = self.slots.tagged(completion.tag) else {
            return false;
        };
        let plain = slot.is_plain() && matches!(slot.work, RemainingWork::Single);
        if !plain || completion.result.is_err() {
            self.execution().complete(index, completion);
            return true;
        }
        let (sqid, cid, bytes, kind, ns) = (slot.sqid, slot.cid, slot.bytes, slot.kind, slot.ns);
        // The completion is posted first, so that the host can act on it while the rest is done.
        let posted = self.post(sqid, cid, Status::SUCCESS, 0);
        self.count(ns, kind, bytes);
        // A plain command has used nothing of the scratch budget, to which [`Engine::free_slot`]
        // would return bytes.
        if posted {
            self.slots.release_with(index, completion.data);
        } else {
            self.keep_slot(index, Status::SUCCESS, 0);
        }
        self.start_flushes()
    }

    /// Posts the completion of a command with a slot, see [`Queues::finish`].
    ///
    /// [`Queues::finish`]: super::queues::Queues::finish
    #[inline(always)]
    #[must_use]
    fn post(&mut self, sqid: u16, cid: u16, status: Status, result: u64) -> bool {
        let events = &mut self.events;
        self.queues.finish(events, (sqid, cid), status, result)
    }

    #[cold]
    #[inline(never)]
    fn keep_slot(&mut self, index: u16, status: Status, result: u64) {
        let (slots, events) = (&mut self.slots, &mut self.events);
        self.queues.keep_slot(slots, events, index, status, result);
    }

    /// Handles the completions of pass-through devices. Returns whether there were any.
    pub(super) fn poll_passed(&mut self) -> bool {
        let mut worked = false;
        for at in 0..self.namespaces.len() {
            let Some(namespace) = self.namespaces.get_mut(at) else {
                break;
            };
            // The device is moved out of the engine, because handling a completion changes the
            // engine.
            let Some(mut passthrough) = namespace.passthrough.take() else {
                continue;
            };
            let done = &mut |tag, status, result| {
                self.passed_completed(tag, status, result);
                self.settle();
            };
            worked |= passthrough.poll(done) > 0;
            if let Some(namespace) = self.namespaces.get_mut(at) {
                namespace.passthrough = Some(passthrough);
            }
        }
        worked
    }

    /// Handles the completion of a command by a pass-through device. Stale tags are ignored.
    fn passed_completed(&mut self, tag: u64, status: Status, result: u32) {
        let Some((index, slot)) = self.slots.tagged(tag) else {
            return;
        };
        if slot.status.is_success() {
            slot.status = status;
        }
        if slot.is_plain() && slot.status.is_success() {
            let (sqid, cid, bytes, kind, ns) =
                (slot.sqid, slot.cid, slot.bytes, slot.kind, slot.ns);
            self.count(ns, kind, bytes);
            let result = u64::from(result);
            if self.post(sqid, cid, Status::SUCCESS, result) {
                // A plain command has used nothing of the scratch budget, to which `free_slot`
                // would return bytes.
                self.slots.release_empty(index);
            } else {
                self.keep_slot(index, Status::SUCCESS, result);
            }
            self.start_flushes();
            return;
        }
        self.end(index, result);
    }

    /// Frees a command's slot, and returns its buffer memory to the budget for such buffers.
    fn free_slot(&mut self, index: u16) {
        if !self.slots.discard(index) {
            self.broken("a slot is freed that is not in use");
        }
    }

    /// Adds a completed read or write of `bytes` bytes to the counters of a namespace.
    #[inline]
    fn count(&self, ns: usize, kind: Kind, bytes: u64) {
        if let Some(ns) = self.namespaces.get(ns) {
            ns.record.ended(kind as usize, bytes);
        }
    }

    /// Ends a command without a slot. Its completion is posted, or kept until its queue has room.
    pub fn finish(&mut self, sqid: u16, cid: u16, status: Status, result: u32) {
        self.finish_with(sqid, cid, status, result.into());
    }

    /// Ends a command that has no slot; `result` is dwords 0 and 1 of the completion.
    fn finish_with(&mut self, sqid: u16, cid: u16, status: Status, result: u64) {
        let before = self.queues.admin_tail();
        if !self.post(sqid, cid, status, result) {
            let (slots, events) = (&mut self.slots, &mut self.events);
            let command = (sqid, cid);
            self.queues
                .keep_without_slot(slots, events, command, status, result);
        }
        if sqid == 0 && self.queues.admin_tail() != before {
            self.journal.count_admin();
        }
    }

    /// Ends a command without a slot, or with only the slot reserved for a replayed command.
    pub(super) fn end_reserved(&mut self, sqid: u16, cid: u16, status: Status, result: u64) {
        let Some(index) = self.slots.take_reserved() else {
            return self.finish_with(sqid, cid, status, result);
        };
        if let Some(slot) = self.slots.get(index) {
            (slot.sqid, slot.cid) = (sqid, cid);
        }
        self.finish_slot(index, cid, status, result);
    }

    fn finish_slot(&mut self, index: u16, cid: u16, status: Status, result: u64) {
        let Some(slot) = self.slots.get(index) else {
            return self.broken("a command without its slot ends");
        };
        let sqid = slot.sqid;
        if self.post(sqid, cid, status, result) {
            self.free_slot(index);
        } else {
            self.keep_slot(index, status, result);
        }
    }

    /// Counts and posts the completion of a command that has ended, and frees its slot.
    /// `result` is dword 0 of the completion.
    fn end(&mut self, index: u16, result: u32) {
        let Some(slot) = self.slots.get(index) else {
            return self.broken("a command ends without its slot");
        };
        let (sqid, cid, status, nsid, lba) =
            (slot.sqid, slot.cid, slot.status, slot.nsid, slot.slba);
        let (kind, orphan, abort) = (slot.kind, slot.orphan, slot.abort);
        let (result, zone) = match slot.work {
            RemainingWork::ZoneWrite(write) => match write.kind {
                ZoneWriteKind::Append if status.is_success() => (lba, Some(write.zone)),
                _ => (0, Some(write.zone)),
            },
            _ => (u64::from(result), None),
        };
        let bytes = if status.is_success() { slot.bytes } else { 0 };
        let own_flush = matches!(slot.work, RemainingWork::OwnFlush);
        let own = own_flush || matches!(slot.work, RemainingWork::Own(_));
        let (ns, fetched_at) = (slot.ns, slot.fetched_at);
        match kind {
            Kind::Read | Kind::Write => self.count(ns, kind, bytes),
            Kind::DurableWrite => self.count(ns, Kind::Write, bytes),
            _ if own => {}
            Kind::Verify | Kind::Flush | Kind::Other => {
                if let Some(ns) = self.namespaces.get(ns) {
                    let record = &ns.record;
                    record.operations(kind.io_kind()).add(1);
                    record.bytes_read().add(bytes);
                }
            }
        }
        if orphan {
            self.free_slot(index);
        } else {
            if !status.is_success() {
                let failed = (sqid, cid, status, (nsid, lba));
                self.counters
                    .failed(&self.namespaces, &mut self.events, failed);
            }
            // The slot is freed only now, because its record has to stay until the host can see the
            // completion.
            if self.post(sqid, cid, status, result) {
                self.free_slot(index);
            } else {
                self.keep_slot(index, status, result);
            }
            if fetched_at != 0
                && let Some(ns) = self.namespaces.get(ns)
            {
                let cycles = probes::cycles().saturating_sub(fetched_at);
                ns.record.timed(kind.io_kind(), cycles);
            }
            if abort {
                let aborted = status.is(Status::ABORT_REQUESTED);
                self.events
                    .push_back(Event::AbortDone { sqid, cid, aborted });
            }
        }
        // A write counts as outstanding on its zone until its record is removed.
        if let Some(zone) = zone {
            match self.namespaces.zones_of(ns) {
                Ok(zoned) => zoned.end_write(zone),
                Err(_) => self.broken("a zone was written where there are none"),
            }
        }
        if own_flush {
            if !status.is_success() {
                self.flushes.failed(status);
            }
            self.flushes.ended(&mut self.events);
        }
        self.start_flushes();
    }

    /// Returns whether a request of the controller itself can begin now. If not, the worker is
    /// woken when the request or flush that prevents it ends.
    pub fn may_begin_own(&self) -> bool {
        !self.slots.own.in_flight && self.flushes.pending() == 0 && self.slots.free() > 0
    }

    /// Begins a request of the controller itself, see [`Execution::begin_own`]. Returns `None` when
    /// none can begin now.
    pub fn begin_own(&mut self, request: OwnRequest) -> Option<u64> {
        let begun = self
            .may_begin_own()
            .then(|| self.execution().begin_own(request))?;
        self.settle();
        begun
    }

    /// Ends a reservation command, if it is still outstanding.
    pub fn end_reservation(&mut self, end: ReservationEnd) {
        self.execution().end_reservation(end);
        self.settle();
    }

    /// Flushes every namespace at the controller's own request (shutdown, write cache disabled), as
    /// soon as no command is outstanding: a flush covers only commands that completed before it
    /// began. Nothing is fetched meanwhile. [`Event::Flushed`] reports the end.
    pub(super) fn flush_all(&mut self, number: u64) {
        let (namespaces, events) = (&self.namespaces, &mut self.events);
        self.flushes.request(number, namespaces, events);
        self.start_flushes();
        self.settle();
    }

    /// Flushes all data written through this engine, for a clean exit of the process.
    /// [`Engine::drained`] returns `true` when the flush has ended.
    pub fn flush_for_exit(&mut self) {
        self.queues.stop_fetching();
        self.flush_all(self.flushes.number());
    }

    /// Starts the flushes that wait, once no command is outstanding. Returns whether any waited.
    #[inline(always)]
    fn start_flushes(&mut self) -> bool {
        let waits = self.flushes.is_waiting();
        if waits {
            self.start_waiting_flushes();
        }
        waits
    }

    #[cold]
    fn start_waiting_flushes(&mut self) {
        while let Some(ns) = self.flushes.next(self.slots.in_use())
            && self.execution().flush_own(ns)
        {
            self.flushes.started_first();
        }
    }
}
