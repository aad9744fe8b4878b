//! Interrupts for a thread that mostly polls.
//!
//! A device sends an interrupt for every batch of completions, whether a thread sleeps or not;
//! MSI-X has no mask that costs nothing to move. So a queue pair whose owner polls detaches its
//! interrupt once a number of completions were found without sleep in between, and takes it again
//! before the next sleep. A device so slow that its owner sleeps for every command keeps it; one
//! that is busy is left alone.

use std::os::fd::AsFd;

use super::core::QueueCore;
use super::wait;

/// Completions found since the last sleep, after which the interrupt is detached: attaching and
/// detaching it are system calls, or messages, of some microseconds.
const ENOUGH: u32 = 256;

/// What a queue pair with [`QueueOptions::polled`](crate::QueueOptions::polled)
/// knows of its interrupt.
#[derive(Debug, Default)]
pub(super) struct Nap {
    /// Completions until the interrupt is detached; zero: it has been, or is not to be.
    pub left: u32,
    /// It has been.
    pub detached: bool,
}

impl Nap {
    /// The interrupt is there.
    pub fn attached(polled: bool) -> Self {
        Self {
            left: if polled { ENOUGH } else { 0 },
            detached: false,
        }
    }
}

impl QueueCore {
    /// Completions were found: whether the interrupt is worth its price.
    #[inline]
    pub(super) fn found(&mut self, count: usize) {
        if self.nap.left == 0 {
            return;
        }
        self.nap.left = self.nap.left.saturating_sub(count as u32);
        if self.nap.left == 0 {
            self.detach();
        }
    }

    #[cold]
    fn detach(&mut self) {
        let Some(vector) = self.vector else {
            return;
        };
        // A transport that cannot do it goes on interrupting.
        let detached = self.shared.transport.set_vector(vector, None);
        self.nap.detached = detached.is_ok();
    }

    /// Takes the interrupt again. `false`: it is not to be had.
    pub(super) fn attach_interrupt(&mut self) -> bool {
        let (Some(vector), Some(eventfd)) = (self.vector, &self.eventfd) else {
            return false;
        };
        if !self.nap.detached {
            return true;
        }
        let fd = Some(eventfd.as_fd());
        match self.shared.transport.set_vector(vector, fd) {
            Ok(()) => {
                self.nap.detached = false;
                true
            }
            Err(error) => {
                tracing::debug!(qid = self.qid, %error, "no interrupt; polling");
                false
            }
        }
    }

    /// Whether its interrupt can wake an owner that waits for several things: it is there, and no
    /// other queue pair's owner takes its signals back.
    pub(super) fn can_wake(&self) -> bool {
        let private = self.shared.limits.vectors > self.shared.limits.io_queues;
        self.eventfd.is_some() && private && !self.shared.transport.is_stepped()
    }

    /// Before the owner sleeps. `true`: nothing waits, and what completes from now on signals.
    pub(super) fn arm(&mut self) -> bool {
        self.ring();
        // Asleep the clock of rounds stands still.
        self.look_after();
        // Of a reset, or a device that is gone, an owner without commands learns nowhere else.
        self.attend();
        if !self.can_wake() {
            return self.slots.in_flight() == 0 && !self.is_pending();
        }
        if self.slots.in_flight() > 0 {
            if !self.attach_interrupt() {
                return false;
            }
            self.nap = Nap::attached(self.polled);
        }
        wait::drain(self);
        // What another thread does to the device meanwhile is seen at the
        // deadline: nothing signals it.
        !self.is_pending()
    }

    /// Whether an entry waits at the head, or something came about otherwise.
    fn is_pending(&self) -> bool {
        self.cq.take(self.head, self.phase).is_some() || !self.finished.is_empty()
    }
}
