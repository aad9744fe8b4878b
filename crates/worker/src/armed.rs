//! Front-ends that have nothing to do, beside others that keep the thread awake: looked at in turn,
//! and in the end not at all.
//!
//! In the end they are armed as before the thread's own sleep, and what would wake the thread for
//! one wakes it: a descriptor, the wake flag, its deadline.

use crate::Frontend;
use crate::accounts::{ALONE_UNITS, SHARED_UNITS};
use crate::watchdog::Activity;
use crate::worker_loop::{Worker, complete};
use std::time::{Duration, Instant};
use volume::Budget;

/// What is due sooner is waited for awake.
const SOON: Duration = Duration::from_millis(1);
/// Calls of [`Frontend::housekeeping`] of those that are awake for one of each that is armed.
const HOUSEKEEPING_TURN: usize = 16;

/// What the worker knows of front-ends that are armed.
#[derive(Debug, Default)]
pub(crate) struct Armed {
    /// Armed, but a host without a barrier may have rung unseen: it is looked at once more.
    unconfirmed: Option<u16>,
    /// The earliest deadline of those that are armed, or an earlier time.
    pub(crate) deadline: Option<Instant>,
    /// Other threads have sent something: everyone's housekeeping is due.
    messages: bool,
}

impl Armed {
    /// One of them has this deadline.
    fn is_due_at(&mut self, deadline: Option<Instant>) {
        self.deadline = self.deadline.into_iter().chain(deadline).min();
    }
}

impl<F: Frontend + 'static> Worker<F> {
    /// The hot front-end at this place of the run queue has had no work for long. Whether it is
    /// idle from now on.
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
        self.run_queue.demote(place, self.turns.now);
        true
    }

    /// Looks at the idle front-end whose turn it is.
    #[inline(never)]
    pub(crate) fn visit_idle(&mut self) -> bool {
        let at = self.run_queue.next_idle();
        at.is_some_and(|at| self.visit(at))
    }

    /// Looks at a front-end that is not hot, which it is when there was something to do.
    fn visit(&mut self, at: usize) -> bool {
        let Some(Some(front)) = self.fronts.get_mut(at) else {
            return false;
        };
        self.pulse.enter(Activity::Polling(at as u16));
        let shared = self.accounts.is_shared();
        let mut budget = Budget::new(if shared { SHARED_UNITS } else { ALONE_UNITS });
        let mut worked = front.poll(self.turns.now, &mut budget) || front.in_flight() > 0;
        // Volumes have news though nothing is in flight: a server that can be reached again.
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

    /// The wake flag was up. What it was for is found by a round over all front-ends.
    pub(crate) fn poll_armed(&mut self) -> bool {
        self.armed.messages = true;
        self.visit_armed()
    }

    /// Looks at every one that is armed.
    #[cold]
    pub(crate) fn visit_armed(&mut self) -> bool {
        let (mut worked, mut place) = (false, self.run_queue.first_armed());
        while let Some(at) = self.run_queue.armed_at(place) {
            worked |= self.visit(at);
            place += 1;
        }
        worked
    }

    /// The one that is armed and not confirmed is to be armed again, or looked at.
    pub(crate) fn wake_unconfirmed(&mut self) {
        if let Some(owner) = self.armed.unconfirmed.take() {
            self.run_queue.wake(owner);
        }
    }

    /// Now and then, while the thread polls: an idle front-end is armed, if it may be.
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
        let stays = front.must_poll()
            || front.in_flight() > 0
            || front.has_more()
            || front.is_pinning()
            || front.has_ended()
            || self.places.get(at).is_none_or(|p| p.leaving.is_some())
            || front.deadline().is_some_and(|at| at <= now + SOON);
        if stays {
            self.run_queue.stay(at, now);
        } else if front.arm() {
            self.run_queue.wake(at as u16);
        } else {
            self.run_queue.arm(at);
            self.armed.unconfirmed = Some(at as u16);
        }
    }

    /// What is not urgent, and what is due, of those that are armed.
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

    /// Wakes front-ends whose time has come.
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
