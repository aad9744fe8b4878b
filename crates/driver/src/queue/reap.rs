//! Completion entries, and the commands that they end.

use std::sync::atomic::Ordering;

use nvme::Status;
use nvme::status::StatusCodeType;

use super::core::QueueCore;
use super::request::{Look, Sink};
use super::ring::Cqe;
use super::slots::SINGLE;
use crate::error::CommandError;

/// Completions in a cache line.
const CQES_PER_LINE: u32 = 4;

impl QueueCore {
    /// Says how many commands are in flight.
    #[inline]
    pub(super) fn tell_in_flight(&self) {
        let count = self.slots.in_flight() as u32;
        self.flying.store(count, Ordering::Release);
    }

    /// Delivers what has completed. Returns how many commands that was.
    #[inline(always)]
    pub(super) fn reap(&mut self, done: &mut impl Sink) -> usize {
        let mut count = 0;
        let mut consumed = 0;
        while let Some(entry) = self.next_entry(&mut count, done) {
            self.head += 1;
            if self.head == self.cq_entries {
                (self.head, self.phase) = (0, !self.phase);
            }
            consumed += 1;
            // The first entry of a line is taken: the next line is most likely written, too.
            if self.head % CQES_PER_LINE == 1 {
                self.cq.prefetch(self.head + CQES_PER_LINE - 1);
            }
            count += usize::from(self.settle(entry, done));
        }
        if consumed > 0 {
            self.tell_in_flight();
            self.untold += consumed;
            if self.untold >= self.lazy {
                self.untold = 0;
                self.cq_doorbell.publish(self.head);
            }
        }
        count
    }

    /// The entry at the head, if it is there.
    #[inline(always)]
    fn next_entry(&mut self, count: &mut usize, done: &mut impl Sink) -> Option<Cqe> {
        if self.tap.is_none() {
            return self.cq.take(self.head, self.phase);
        }
        self.tapped(count, done)
    }

    /// The entry at the head as a tap shows it.
    #[cold]
    #[inline(never)]
    fn tapped(&mut self, count: &mut usize, done: &mut impl Sink) -> Option<Cqe> {
        let entry = nvme::Completion::from(self.cq.raw(self.head)?);
        let new = entry.phase() == self.phase;
        match self.tap.as_mut()?.look(entry, new) {
            Look::Nothing => None,
            Look::Entry(entry) => Some(entry.into()),
            Look::Both(first, second) => {
                *count += usize::from(self.settle(first.into(), done));
                Some(second.into())
            }
            // The head moves on as for any entry; this one belongs to no queue, so to nobody.
            Look::Lost => Some(nvme::Completion::default().into()),
        }
    }

    /// One entry's command has completed. Whether it was delivered.
    #[inline(always)]
    fn settle(&mut self, entry: Cqe, done: &mut impl Sink) -> bool {
        let known = entry.sqid() == self.qid;
        let Some((index, slot)) = self.slots.named(entry.cid()).filter(|_| known) else {
            self.counters.stale += 1;
            return false;
        };
        self.counters.completions += 1;
        // What nearly every entry says takes a short way, with nothing on it but that.
        if !entry.status().is_success() || slot.parent != SINGLE {
            return self.settle_otherwise(index, entry.status(), entry.dw0, done);
        }
        done.single(slot.user_data, Ok(()), entry.dw0, &mut slot.hold);
        self.slots.end(index);
        true
    }

    /// The end of a command that failed, or that is a part of a request.
    #[inline(never)]
    fn settle_otherwise(
        &mut self,
        index: u16,
        status: Status,
        dw0: u32,
        done: &mut impl Sink,
    ) -> bool {
        let Some(slot) = self.slots.get(index) else {
            return false;
        };
        let aborted = slot.aborted && status.is(Status::ABORT_REQUESTED);
        if (aborted || self.repeats && may_pass(status)) && slot.tries < self.shared.options.retries
        {
            self.repeat(index);
            return false;
        }
        let result = if status.is_success() {
            Ok(())
        } else if aborted {
            Err(CommandError::TimedOut)
        } else {
            Err(CommandError::Status(status))
        };
        if slot.parent == SINGLE {
            done.single(slot.user_data, result, dw0, &mut slot.hold);
            self.slots.end(index);
            return true;
        }
        let parent = slot.parent;
        self.slots.end(index);
        match self.part_done(parent, result) {
            Some(completion) => {
                done.other(completion);
                true
            }
            None => false,
        }
    }
}

/// Whether a failed command may succeed when it is repeated at once, as its controller says (DNR,
/// NVMe Base 2.1, 4.2.3): a transfer fails, for one, while the function is reset by another owner.
/// Another path is not this queue pair's business, and what a comparison or a reservation has found
/// is an answer.
fn may_pass(status: Status) -> bool {
    let is_answer = status.is(Status::COMPARE_FAILURE) || status.is(Status::RESERVATION_CONFLICT);
    let kinds = [StatusCodeType::GENERIC, StatusCodeType::MEDIA];
    !status.is_success() && !status.dnr() && !is_answer && kinds.contains(&status.sct())
}
