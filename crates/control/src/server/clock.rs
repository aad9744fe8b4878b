//! Time limits of a client, by the phase of its connection.

use super::{IDLE_TIME, REQUEST_TIME};
use std::cell::Cell;
use tokio::time::Instant;

/// Phase of a client's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// No request is pending.
    Idle,
    /// The request is incomplete.
    Asking,
    /// The daemon works for it, or will: it may take its time.
    Waiting,
    /// The client has to read the answer.
    Answering,
    /// The answer is complete, and partly on its way.
    Answered,
    /// The client listens to events. There is no time limit for new events, but there is one for
    /// reading those that were sent.
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
    /// Makes the clock of a new client, which has to send a request.
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
            // The time limit of the answer continues.
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

    /// Notes that all bytes have been sent.
    pub(super) fn flushed(&self) {
        match self.phase() {
            Phase::Listening => self.deadline.set(None),
            Phase::Answered => self.enter(Phase::Idle),
            _ => {}
        }
    }
}

/// Guard of an answer, which reports to the clock on drop that the answer is complete.
pub(super) struct Complete(pub std::rc::Rc<Clock>);

impl Drop for Complete {
    fn drop(&mut self) {
        if self.0.phase() == Phase::Answering {
            self.0.enter(Phase::Answered);
        }
    }
}
