//! How long a client may take for what it does.

use super::{IDLE_TIME, REQUEST_TIME};
use std::cell::Cell;
use tokio::time::Instant;

/// What a client is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It asks for nothing.
    Idle,
    /// Its request is incomplete.
    Asking,
    /// The daemon works for it, or will: it may take its time.
    Waiting,
    /// It is to take the answer.
    Answering,
    /// The answer is complete, and partly on its way.
    Answered,
    /// It listens to events: it may take its time, but not for those that have happened.
    Listening,
}

/// The phase of a client, and when that is to have ended. All parts of its connection share it, on
/// one thread.
#[derive(Debug)]
pub(super) struct Clock {
    phase: Cell<Phase>,
    deadline: Cell<Option<Instant>>,
}

impl Clock {
    /// Of a client that has just come: it is to ask.
    pub(super) fn new() -> Self {
        Self {
            phase: Cell::new(Phase::Asking),
            deadline: Cell::new(Some(Instant::now() + REQUEST_TIME)),
        }
    }

    pub(super) fn phase(&self) -> Phase {
        self.phase.get()
    }

    /// When the client is dropped, whatever it does.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline.get()
    }

    /// A new phase begins.
    pub(super) fn enter(&self, phase: Phase) {
        self.phase.set(phase);
        self.deadline.set(match phase {
            Phase::Idle => Some(Instant::now() + IDLE_TIME),
            Phase::Asking | Phase::Answering => Some(Instant::now() + REQUEST_TIME),
            // The time for the answer goes on.
            Phase::Answered => self.deadline.get(),
            Phase::Waiting | Phase::Listening => None,
        });
    }

    /// Bytes have come.
    pub(super) fn read(&self) {
        if self.phase() == Phase::Idle {
            self.enter(Phase::Asking);
        }
    }

    /// There is no room for bytes that are to go.
    pub(super) fn blocked(&self) {
        if self.phase() == Phase::Listening && self.deadline().is_none() {
            self.deadline.set(Some(Instant::now() + REQUEST_TIME));
        }
    }

    /// All bytes that were to go have gone.
    pub(super) fn flushed(&self) {
        match self.phase() {
            Phase::Listening => self.deadline.set(None),
            Phase::Answered => self.enter(Phase::Idle),
            _ => {}
        }
    }
}

/// Tells a clock when it is dropped that the answer is complete.
pub(super) struct Complete(pub std::rc::Rc<Clock>);

impl Drop for Complete {
    fn drop(&mut self) {
        if self.0.phase() == Phase::Answering {
            self.0.enter(Phase::Answered);
        }
    }
}
