//! Interrupts of a queue pair that mostly polls.
//!
//! A device sends an interrupt for every batch of completions, whether or not a thread sleeps, and
//! MSI-X has no cheap mask. A queue pair with a polling owner therefore detaches its interrupt
//! after a number of completions without sleep, and attaches it before the next sleep. A slow
//! device, with a sleep for every command, keeps its interrupt; a busy device is not disturbed.

use std::os::fd::AsFd;

use super::core::QueueCore;
use super::wait;

/// Completions since the last sleep after which the interrupt is detached. Attaching and detaching
/// are system calls or messages of some microseconds.
const ENOUGH: u32 = 256;

/// Interrupt state of a queue pair with [`QueueOptions::polled`](crate::QueueOptions::polled).
#[derive(Debug, Default)]
pub(super) struct Nap {
    /// Completions until the interrupt is detached; zero if it already is, or stays attached.
    pub left: u32,
    /// The interrupt is detached.
    pub detached: bool,
}

impl Nap {
    /// Creates the state of an attached interrupt.
    pub fn attached(polled: bool) -> Self {
        Self {
            left: if polled { ENOUGH } else { 0 },
            detached: false,
        }
    }
}

impl QueueCore {
    /// Counts completions, and detaches the interrupt when it is no longer worth its cost.
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
        // A transport without this ability continues to interrupt.
        let detached = self.shared.transport.set_vector(vector, None);
        self.nap.detached = detached.is_ok();
    }

    /// Attaches the interrupt again. Returns `false` if that is impossible.
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

    /// Returns whether the interrupt can wake an owner that waits for several sources. It must
    /// exist, and no other queue pair may consume its signals.
    pub(super) fn can_wake(&self) -> bool {
        let private = self.shared.limits.vectors > self.shared.limits.io_queues;
        self.eventfd.is_some() && private && !self.shared.transport.is_stepped()
    }

    /// Prepares the owner's sleep. Returns `true` if nothing is pending and later completions
    /// signal the eventfd.
    pub(super) fn arm(&mut self) -> bool {
        self.ring();
        // The clock of rounds stops during sleep.
        self.look_after();
        // An owner without commands has no other way to notice a reset, or a device that is lost.
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

    /// Returns whether an entry waits at the head, or a completion without an entry does.
    fn is_pending(&self) -> bool {
        self.cq.take(self.head, self.phase).is_some() || !self.finished.is_empty()
    }
}
