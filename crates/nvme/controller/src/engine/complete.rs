//! Completions of volume requests, and the end of a command.

use super::slots::{Kind, RemainingWork, ZoneWriteKind};
use super::{Engine, Event};
use dma::SegmentList;
use nvme::Status;
use volume::{IoError, IoErrorKind, Op, Request};

/// Returns the NVMe status of a command after its volume request failed with this error.
pub(crate) fn status_of(error: IoError, write: bool) -> Status {
    match error.kind {
        IoErrorKind::MediaRead | IoErrorKind::Truncated if !write => Status::UNRECOVERED_READ_ERROR,
        IoErrorKind::MediaRead
        | IoErrorKind::MediaWrite
        | IoErrorKind::NotDurable
        | IoErrorKind::Truncated => Status::WRITE_FAULT,
        IoErrorKind::NoSpace => Status::CAPACITY_EXCEEDED.with_dnr(true),
        IoErrorKind::ReadOnly => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(true),
        IoErrorKind::OutOfRange => Status::LBA_OUT_OF_RANGE.with_dnr(true),
        IoErrorKind::Memory => Status::DATA_TRANSFER_ERROR,
        IoErrorKind::Aborted => Status::ABORT_REQUESTED,
        IoErrorKind::Gone => Status::INTERNAL_ERROR.with_dnr(true),
        // The medium is not at fault: the host may retry the command or use another path.
        IoErrorKind::Unreachable => Status::CONTROLLER_PATHING_ERROR,
        IoErrorKind::Unsupported => Status::INVALID_OPCODE.with_dnr(true),
        IoErrorKind::Busy => Status::COMMAND_INTERRUPTED,
        IoErrorKind::Invalid => Status::INTERNAL_ERROR,
    }
}

impl Engine {
    /// Handles the completion of a volume request. Stale tags are ignored.
    #[inline(never)]
    pub fn complete(&mut self, completion: volume::Completion) {
        let Some((index, slot)) = self.slots.tagged(completion.tag) else {
            return;
        };
        let plain = slot.is_plain() && matches!(slot.work, RemainingWork::Single);
        if !plain || completion.result.is_err() {
            return self.complete_other(index, completion);
        }
        let (sqid, cid, bytes, kind, ns) = (slot.sqid, slot.cid, slot.bytes, slot.kind, slot.ns);
        // The completion is posted first, so that the host can act on it while the rest is done.
        let posted = self.finish_here(sqid, cid, Status::SUCCESS, 0);
        self.count(ns, kind, bytes);
        // A plain command has used nothing of the scratch budget, to which `free_slot` would return
        // bytes.
        if posted {
            self.slots.release_with(index, completion.data);
        } else {
            self.keep_slot(index, Status::SUCCESS, 0);
        }
        if self.flushes.is_waiting() {
            self.start_flushes();
        }
    }

    /// Offers a failed request to its volume, to be retried if the volume's error policy says so.
    /// Returns `None` when the volume has taken the request, so that another completion follows.
    fn offer_again(
        &mut self,
        index: u16,
        error: IoError,
        completion: volume::Completion,
    ) -> Option<volume::Completion> {
        let Some(slot) = self.slots.get(index) else {
            return Some(completion);
        };
        // Dataset Management ranges are advice, and no host waits for an orphaned command.
        if slot.orphan
            || matches!(
                slot.work,
                RemainingWork::Ranges(_) | RemainingWork::ZoneSend(_)
            )
        {
            return Some(completion);
        }
        // A copy by the file system is not a volume request that could be retried.
        if matches!(&slot.work, RemainingWork::Copy(copying) if copying.is_with_file()) {
            return Some(completion);
        }
        let copying = slot.copying();
        let op = match (&slot.work, slot.kind) {
            (RemainingWork::Copy(_), _) => copying.map_or(Op::Flush, |(op, ..)| op),
            (RemainingWork::FlushAll(_) | RemainingWork::OwnFlush, _) | (_, Kind::Flush) => {
                Op::Flush
            }
            (_, Kind::Read | Kind::Verify) => Op::Read,
            (_, Kind::Write) => Op::Write { fua: false },
            (_, Kind::DurableWrite) => Op::Write { fua: true },
            // The slot does not store the flags of the request; these are safe in any case.
            (_, Kind::Other) => Op::WriteZeroes {
                deallocate: false,
                fua: true,
            },
        };
        let slba = slot.slba;
        let Some(ns) = self.namespaces.get_mut(slot.ns) else {
            self.broken("an outstanding command has no namespace");
            return Some(completion);
        };
        let zeroes = match slot.work {
            RemainingWork::Zeroes(bytes) => bytes,
            RemainingWork::ZoneWrite(write) => match write.kind {
                ZoneWriteKind::Zeroes(blocks) => u64::from(blocks) << ns.shift,
                _ => 0,
            },
            RemainingWork::Metadata(ref moving) => moving.zeroed(),
            _ => 0,
        };
        let request = Request {
            tag: completion.tag,
            op,
            offset: match copying {
                Some((_, offset, _)) => offset,
                None if op == Op::Flush => 0,
                None => slba << ns.shift,
            },
            len: if op.has_data() {
                completion.data.len_bytes()
            } else {
                zeroes
            },
            data: completion.data,
        };
        ns.queue.failed(request, error)
    }

    /// Handles any completion other than that of a successful plain read or write.
    #[inline(never)]
    fn complete_other(&mut self, index: u16, mut completion: volume::Completion) {
        let of_table = self.slots.get(index).is_some_and(|slot| slot.table);
        if let Err(error) = completion.result
            && !of_table
        {
            match self.offer_again(index, error, completion) {
                Some(failed) => completion = failed,
                None => return,
            }
        }
        if self.waits_for_table(index, &mut completion) {
            return;
        }
        let Some(slot) = self.slots.get(index) else {
            return self.broken("a request completes without its slot");
        };
        match &mut slot.work {
            RemainingWork::Single
            | RemainingWork::Write
            | RemainingWork::Zeroes(_)
            | RemainingWork::ZoneWrite(_) => {
                if let Err(error) = completion.result {
                    let write = !matches!(slot.kind, Kind::Read | Kind::Verify);
                    slot.status = match error.kind {
                        // The controller has cancelled the request, see `end_commands_early`. The
                        // host has to send the command again.
                        IoErrorKind::Aborted if self.bus_master.ends_commands && !slot.abort => {
                            Status::COMMAND_INTERRUPTED
                        }
                        _ => status_of(error, write),
                    };
                }
                // A list of process memory (Verify) is dropped. The slot's own list returns to the
                // slot with its capacity.
                if completion.data.buffer().is_none() {
                    slot.list = completion.data;
                }
                match slot.work {
                    RemainingWork::Write | RemainingWork::Zeroes(_) => self.end_write(index),
                    _ => self.end(index),
                }
            }
            RemainingWork::Ranges(_) => {
                self.range_done(index, completion.result);
                self.next_range(index);
            }
            RemainingWork::Compare => {
                match completion.result {
                    Err(error) => slot.status = status_of(error, false),
                    Ok(()) => {
                        let same = completion
                            .data
                            .buffer()
                            .is_some_and(|read| slot.list.equals(0, read));
                        if !same {
                            slot.status = Status::COMPARE_FAILURE;
                        }
                    }
                }
                self.end(index);
            }
            RemainingWork::Reservation | RemainingWork::Marking(_) => {
                self.broken("a command is with a volume that the control half executes");
            }
            RemainingWork::Copy(_) => self.complete_copy(index, completion, false),
            RemainingWork::ZoneSend(_) => self.zone_sent(index, completion.result),
            RemainingWork::Metadata(_) => self.complete_metadata(index, completion),
            RemainingWork::FlushAll(_) => {
                self.flush_done(index, completion.result);
                self.flush_next(index);
            }
            RemainingWork::Own(_) => self.own_completed(index, completion.result),
            RemainingWork::OwnFlush => {
                if let Err(error) = completion.result {
                    let nsid = self.namespace_of(index).map(|(_, nsid)| nsid);
                    let _disk = self.span.clone().entered();
                    if let Some(left_out) = self.log.allow("flush failed") {
                        let text = "a flush failed: completed writes may not be durable";
                        tracing::error!(nsid, %error, left_out, "{text}");
                    }
                    self.flushes.failed(status_of(error, true));
                }
                self.end(index);
            }
        }
    }

    /// Records the end of one namespace's flush, as part of a flush of all namespaces.
    pub(super) fn flush_done(&mut self, index: u16, result: Result<(), IoError>) {
        if let Err(error) = result
            && let Some(slot) = self.slots.get(index)
            && slot.status.is_success()
        {
            slot.status = status_of(error, true);
        }
    }

    /// Frees a command's slot, and returns its buffer memory to the budget for such buffers.
    pub(super) fn free_slot(&mut self, index: u16) {
        let Some(slot) = self.slots.get(index) else {
            return self.broken("a slot is freed that is not in use");
        };
        self.scratch.release(std::mem::take(&mut slot.scratch));
        self.slots.release(index);
    }

    /// Adds the elapsed time to the busy time when no command is outstanding any more. Called once
    /// per round instead of per command.
    #[inline]
    pub(super) fn count_busy(&mut self) {
        if self.slots.in_use() == 0
            && let Some(since) = self.busy_since.take()
        {
            let busy = self.now.saturating_duration_since(since);
            self.io.busy_ns.add(busy.as_nanos() as u64);
        }
    }

    /// Adds a completed read or write of `bytes` bytes to the counters of a namespace.
    #[inline]
    pub(super) fn count(&self, ns: usize, kind: Kind, bytes: u64) {
        if let Some(ns) = self.namespaces.get(ns) {
            ns.record.ended(kind as usize, bytes);
        }
    }

    /// Counts and posts the completion of a command that has ended, and frees its slot.
    pub(super) fn end(&mut self, index: u16) {
        self.end_with(index, 0);
    }

    /// Ends a command like [`Engine::end`]; `result` is dword 0 of the completion.
    pub(super) fn end_with(&mut self, index: u16, result: u32) {
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
                self.failed(sqid, cid, status, (nsid, lba));
            }
            // The slot is freed only now, because its record has to stay until the host can see the
            // completion.
            if self.finish_here(sqid, cid, status, result) {
                self.free_slot(index);
            } else {
                self.keep_slot(index, status, result);
            }
            if fetched_at != 0 {
                self.timed(ns, kind, fetched_at);
            }
            if abort {
                let aborted = status.is(Status::ABORT_REQUESTED);
                self.events
                    .push_back(Event::AbortDone { sqid, cid, aborted });
            }
        }
        if let Some(zone) = zone {
            self.zone_written(ns, zone);
        }
        if own_flush {
            self.flushes.ended(&mut self.events);
        }
        if self.flushes.is_waiting() {
            self.start_flushes();
        }
    }

    /// Flushes every namespace at the controller's own request (shutdown, write cache disabled), as
    /// soon as no command is outstanding: a flush covers only commands that completed before it
    /// began. Nothing is fetched meanwhile. [`Event::Flushed`] reports the end.
    pub(super) fn flush_all(&mut self, number: u64) {
        let Self {
            flushes,
            namespaces,
            events,
            ..
        } = self;
        flushes.request(number, namespaces, events);
        self.start_flushes();
    }

    /// Flushes all data written through this engine, for a clean exit of the process.
    /// [`Engine::drained`] returns `true` when the flush has ended.
    pub fn flush_for_exit(&mut self) {
        self.stop_fetching();
        self.flush_all(self.flushes.number());
    }

    pub(super) fn start_flushes(&mut self) {
        // A volume that completes at once re-enters this function through `end`.
        let mut waiting = self.flushes.take_waiting();
        while self.slots.in_use() + waiting.len() == self.flushes.pending()
            && let Some(&ns) = waiting.front()
            && let Some(index) = self.slots.alloc()
        {
            waiting.pop_front();
            if let Some(slot) = self.slots.get(index) {
                slot.orphan = true;
                slot.ns = ns;
                slot.work = RemainingWork::OwnFlush;
            }
            self.submit(index, ns, Op::Flush, 0, 0, SegmentList::new());
        }
        self.flushes.put_waiting(waiting);
    }
}
