//! Interrupt control of a queue pair that mostly polls.
//!
//! A device sends an interrupt for every batch of completions, whether or not a thread sleeps, and
//! MSI-X has no cheap mask. A queue pair with a polling owner therefore detaches its interrupt
//! after a number of completions without sleep, and attaches it before the next sleep. A slow
//! device, with a sleep for every command, keeps its interrupt; a busy device is not disturbed.

use std::os::fd::AsFd;

use super::core::QueueCore;
use super::wait;

/// Number of completions without a sleep after which the interrupt is detached. Attaching and
/// detaching are system calls or messages of some microseconds.
const DETACH_AFTER: u32 = 256;

/// Interrupt state of a queue pair that is polled
/// ([`QueueOptions::polled`](crate::QueueOptions::polled)).
#[derive(Debug, Default)]
pub(super) struct Nap {
    /// Number of completions until the interrupt is detached; 0 if it is already detached, or
    /// always stays attached.
    pub left: u32,
    /// Whether the interrupt's eventfd is detached, so that interrupts cost nothing while polling.
    pub detached: bool,
}

impl Nap {
    /// Creates the state in which the interrupt is attached.
    pub fn attached(polled: bool) -> Self {
        Self {
            left: if polled { DETACH_AFTER } else { 0 },
            detached: false,
        }
    }
}

impl QueueCore {
    /// Counts `count` completions, and detaches the interrupt when the owner has not slept for
    /// long.
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
        // If the transport cannot detach the vector, the interrupts continue.
        let detached = self.shared.transport.set_vector(vector, None);
        self.nap.detached = detached.is_ok();
    }

    /// Attaches the interrupt's eventfd again before a sleep. Returns `false` if that fails.
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

    /// Returns whether the interrupt can wake an owner that sleeps on several sources: the
    /// interrupt exists, and no other queue pair consumes its signals.
    pub(super) fn can_wake(&self) -> bool {
        let private = self.shared.limits.vectors > self.shared.limits.io_queues;
        self.eventfd.is_some() && private && !self.shared.transport.is_stepped()
    }

    /// Prepares the owner for sleep. Returns `true` if nothing is pending and later completions
    /// will signal the eventfd.
    pub(super) fn arm(&mut self) -> bool {
        self.ring();
        // The clock does not advance during sleep.
        self.look_after();
        // An owner without outstanding commands has no other way to notice a reset or a lost
        // device.
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
        // Another thread's changes to the device are noticed at the deadline, since they are not
        // signalled.
        !self.is_pending()
    }

    /// Returns whether a completion is ready, with or without a completion entry.
    fn is_pending(&self) -> bool {
        self.cq.take(self.head, self.phase).is_some() || !self.finished.is_empty()
    }
}
