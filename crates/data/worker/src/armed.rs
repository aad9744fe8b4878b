//! Armed front-ends, which have been idle for long and are not polled while busy front-ends keep
//! the thread awake.
//!
//! Idle front-ends are polled in turn. After a long idle time they are armed, in the same way as
//! before the thread's own sleep. The same events wake them: a ready descriptor, the wake flag,
//! their deadline.

use crate::Frontend;
use crate::accounts::{ALONE_UNITS, SHARED_UNITS};
use crate::watchdog::Activity;
use crate::worker_loop::{Worker, complete};
use std::time::{Duration, Instant};
use volume::Budget;

/// Time to the next deadline below which the thread polls on instead of arming front-ends and
/// sleeping.
const NEAR_DEADLINE: Duration = Duration::from_millis(1);
/// Number of housekeeping calls to awake front-ends for each such call to an armed one.
const HOUSEKEEPING_TURN: usize = 16;

/// State of the armed front-ends: those that wake the worker and are not polled.
#[derive(Debug, Default)]
pub(crate) struct Armed {
    /// Armed front-end that is polled once more, because a host without a memory barrier may have
    /// rung its doorbell unseen.
    unconfirmed: Option<u16>,
    /// Time before which no armed front-end has a deadline; `None` if none has one.
    pub(crate) deadline: Option<Instant>,
    /// Whether other threads have sent messages, so that all armed front-ends have to be called.
    messages: bool,
}

impl Armed {
    /// Lowers the earliest deadline to that of a newly armed front-end.
    fn is_due_at(&mut self, deadline: Option<Instant>) {
        self.deadline = self.deadline.into_iter().chain(deadline).min();
    }
}

impl<F: Frontend + 'static> Worker<F> {
    /// Demotes the hot front-end at this place of the run queue after a long time without work.
    /// Returns whether it is idle now.
    #[cold]
    pub(crate) fn demote(&mut self, place: usize) -> bool {
        let Some(at) = self.run_queue.hot_at(place) else {
            return false;
        };
        let front = self.fronts.get(at).and_then(Option::as_ref);
        if front.is_some_and(|front| front.in_flight() > 0 || front.has_more()) {
            self.run_queue.worked(place);
            return false;
        }
        self.accounts.open(at);
        if front.is_some_and(F::is_unannounced) {
            self.unannounced.became_idle(self.turns.now);
        }
        self.run_queue.demote(place, self.turns.now);
        true
    }

    /// Polls the next idle front-end. Returns whether it had work.
    #[inline(never)]
    pub(crate) fn visit_idle(&mut self) -> bool {
        let at = self.run_queue.next_idle();
        at.is_some_and(|at| self.visit(at))
    }

    /// Polls a front-end that is not hot, and makes it hot if it has work.
    pub(crate) fn visit(&mut self, at: usize) -> bool {
        let Some(Some(front)) = self.fronts.get_mut(at) else {
            return false;
        };
        self.pulse.enter(Activity::Polling(at as u16));
        let shared = self.accounts.is_shared();
        let mut budget = Budget::new(if shared { SHARED_UNITS } else { ALONE_UNITS });
        let mut worked = front.poll(self.turns.now, &mut budget) || front.in_flight() > 0;
        // Volumes can have events while nothing is in flight, for example a server that is
        // reachable again.
        front.poll_volumes(&mut self.completions);
        worked |= !self.completions.is_empty();
        for completion in self.completions.drain(..) {
            complete(&mut self.fronts, completion);
        }
        let Some(Some(front)) = self.fronts.get_mut(at) else {
            return worked;
        };
        let finished = front.finish_round();
        if worked || finished || front.has_ended() {
            if shared {
                self.accounts.charge(at);
                self.accounts.worked(at);
            } else {
                self.accounts.worked_alone(at);
            }
            self.run_queue.wake(at as u16);
            return true;
        }
        false
    }

    /// Handles a raised wake flag: polls all armed front-ends, because the flag does not tell which
    /// one it concerns.
    pub(crate) fn poll_armed(&mut self) -> bool {
        self.armed.messages = true;
        self.visit_armed()
    }

    /// Polls each armed front-end once. Returns whether any had work.
    #[cold]
    pub(crate) fn visit_armed(&mut self) -> bool {
        let (mut worked, mut place) = (false, self.run_queue.first_armed());
        while let Some(at) = self.run_queue.armed_at(place) {
            worked |= self.visit(at);
            place += 1;
        }
        worked
    }

    /// Wakes the armed front-end that still has to be confirmed, which is then armed again or
    /// polled.
    pub(crate) fn wake_unconfirmed(&mut self) {
        if let Some(owner) = self.armed.unconfirmed.take() {
            self.run_queue.wake(owner);
        }
    }

    /// Arms an idle front-end if possible; called periodically while the thread polls.
    pub(crate) fn arm_idle(&mut self) {
        if let Some(owner) = self.armed.unconfirmed.take()
            && self.run_queue.is_armed(owner)
            && let Some(Some(front)) = self.fronts.get_mut(usize::from(owner))
        {
            if front.needs_recheck() && front.recheck() {
                self.run_queue.wake(owner);
            } else {
                self.armed.is_due_at(front.deadline());
            }
        }
        let now = self.turns.now;
        let Some(at) = self.run_queue.arms_next(now) else {
            return;
        };
        let Some(Some(front)) = self.fronts.get_mut(at) else {
            return;
        };
        let unannounced = front.is_unannounced();
        let stays = front.must_poll()
            || (unannounced && self.unannounced.is_continuous(now))
            || front.in_flight() > 0
            || front.has_more()
            || front.is_pinning()
            || front.has_ended()
            || self.slots.get(at).is_none_or(|p| p.leaving.is_some())
            || front.deadline().is_some_and(|at| at <= now + NEAR_DEADLINE);
        if stays {
            self.run_queue.stay(at, now);
        } else if front.arm() {
            self.run_queue.wake(at as u16);
        } else {
            if unannounced {
                self.unannounced.armed(at as u16);
            }
            self.run_queue.arm(at);
            self.armed.unconfirmed = Some(at as u16);
        }
    }

    /// Does the due housekeeping of armed front-ends, and wakes those with a passed deadline.
    pub(crate) fn armed_housekeeping(&mut self) {
        let armed = self.run_queue.armed_count();
        if armed == 0 {
            self.armed = Armed::default();
            return;
        }
        let now = self.turns.now;
        let all = std::mem::take(&mut self.armed.messages);
        let share = if all {
            armed
        } else {
            armed.div_ceil(HOUSEKEEPING_TURN)
        };
        for _ in 0..share {
            if let Some(at) = self.run_queue.next_armed()
                && let Some(Some(front)) = self.fronts.get_mut(at)
            {
                front.housekeeping(now);
                self.armed.is_due_at(front.deadline());
            }
        }
        if self.armed.deadline.is_some_and(|at| now >= at) {
            self.wake_due(now);
        }
    }

    /// Makes those armed front-ends hot again whose deadline has passed.
    #[cold]
    fn wake_due(&mut self, now: Instant) {
        let (mut next, mut place) = (None, self.run_queue.first_armed());
        while let Some(at) = self.run_queue.armed_at(place) {
            let front = self.fronts.get(at).and_then(Option::as_ref);
            match front.and_then(F::deadline) {
                Some(due) if due <= now => self.run_queue.wake(at as u16),
                due => next = next.into_iter().chain(due).min(),
            }
            place += 1;
        }
        self.armed.deadline = next;
    }
}
