//! Processing of completion queue entries.

use std::sync::atomic::Ordering;

use nvme::Status;
use nvme::status::StatusCodeType;

use super::core::QueueCore;
use super::request::{Sink, TapResult};
use super::ring::Cqe;
use super::slots::SINGLE;
use crate::error::CommandError;

/// Number of completion queue entries in a cache line.
const CQES_PER_LINE: u32 = 4;

impl QueueCore {
    /// Publishes the number of outstanding commands, for a thread that waits until all have ended.
    #[inline]
    pub(super) fn tell_in_flight(&self) {
        let count = self.slots.in_flight() as u32;
        self.flying.store(count, Ordering::Release);
    }

    /// Passes all available completions to `done`. Returns their number.
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
            // After the first entry of a line the next line is most likely written, too.
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

    /// Consumes the completion entry at the head, if it has arrived.
    #[inline(always)]
    fn next_entry(&mut self, count: &mut usize, done: &mut impl Sink) -> Option<Cqe> {
        if self.tap.is_none() {
            return self.cq.take(self.head, self.phase);
        }
        self.tapped(count, done)
    }

    /// Consumes the completion entry at the head after a test's [`Tap`] has seen or changed it.
    #[cold]
    #[inline(never)]
    fn tapped(&mut self, count: &mut usize, done: &mut impl Sink) -> Option<Cqe> {
        let entry = nvme::Completion::from(self.cq.raw(self.head)?);
        let new = entry.phase() == self.phase;
        match self.tap.as_mut()?.look(entry, new) {
            TapResult::Nothing => None,
            TapResult::Entry(entry) => Some(entry.into()),
            TapResult::Both(first, second) => {
                *count += usize::from(self.settle(first.into(), done));
                Some(second.into())
            }
            // The head advances as for any entry. This entry matches no command, so it is ignored.
            TapResult::Lost => Some(nvme::Completion::default().into()),
        }
    }

    /// Completes the command of a completion entry. Returns whether its completion was delivered.
    #[inline(always)]
    fn settle(&mut self, entry: Cqe, done: &mut impl Sink) -> bool {
        let known = entry.sqid() == self.qid;
        let Some((index, slot)) = self.slots.named(entry.cid()).filter(|_| known) else {
            self.counters.stale += 1;
            return false;
        };
        self.counters.completions += 1;
        // Successful single commands, which are nearly all, take a short path.
        if !entry.status().is_success() || slot.parent != SINGLE {
            return self.settle_otherwise(index, entry.status(), entry.dw0, done);
        }
        done.single(slot.user_data, Ok(()), entry.dw0, &mut slot.hold);
        self.slots.end(index);
        true
    }

    /// Completes a command that failed, or that is part of a split request.
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

/// Returns whether a failed command may succeed on an immediate retry, because Do Not Retry is
/// clear (NVMe Base 2.1, 4.2.3). A transfer fails, for example, while another owner resets the
/// function. Path-related errors are left to the caller, and failed comparisons and reservation
/// conflicts are final.
fn may_pass(status: Status) -> bool {
    let is_answer = status.is(Status::COMPARE_FAILURE) || status.is(Status::RESERVATION_CONFLICT);
    let kinds = [StatusCodeType::GENERIC, StatusCodeType::MEDIA];
    !status.is_success() && !status.dnr() && !is_answer && kinds.contains(&status.sct())
}
