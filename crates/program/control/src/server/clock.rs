//! Time limits of a client, by the phase of its connection.

use super::{IDLE_TIME, REQUEST_TIME};
use std::cell::Cell;
use tokio::time::Instant;

/// Phase of a client's connection, which determines its time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The client has not begun to send a request.
    Idle,
    /// The client has sent a part of its request.
    Asking,
    /// The daemon executes the request, without a time limit.
    Waiting,
    /// The client has to read the answer.
    Answering,
    /// The answer is complete, but not all of it was sent.
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
    /// Creates the clock of a new client, which has to send a request.
    pub(super) fn new() -> Self {
        Self {
            phase: Cell::new(Phase::Asking),
            deadline: Cell::new(Some(Instant::now() + REQUEST_TIME)),
        }
    }

    pub(super) fn phase(&self) -> Phase {
        self.phase.get()
    }

    /// Returns the time at which the client is disconnected, unless it makes progress.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline.get()
    }

    /// Records that a new phase of the connection begins.
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

    /// Records that bytes were received from the client.
    pub(super) fn read(&self) {
        if self.phase() == Phase::Idle {
            self.enter(Phase::Asking);
        }
    }

    /// Records that the client's socket accepts no further bytes.
    pub(super) fn blocked(&self) {
        if self.phase() == Phase::Listening && self.deadline().is_none() {
            self.deadline.set(Some(Instant::now() + REQUEST_TIME));
        }
    }

    /// Records that all bytes of the answer have been sent.
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
