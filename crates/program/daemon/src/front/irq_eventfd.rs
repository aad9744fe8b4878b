//! Interrupts end in an eventfd that the VMM gave.

use controller::IrqSink;
use eventfd::{ClientEventfd, KindError};
use rustix::io::Errno;
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;

/// Eventfd of a VMM as the receiver of an interrupt; KVM injects the interrupt.
pub struct IrqEventfd {
    eventfd: ClientEventfd,
    /// Number under which the keeper keeps the eventfd, if it does.
    kept: Option<NonZeroU32>,
}

impl IrqEventfd {
    /// Takes a descriptor that a client sent, and that is kept under a number, where it is.
    /// `EINVAL` when it is no eventfd.
    pub fn new(fd: OwnedFd, kept: Option<NonZeroU32>) -> Result<Self, Errno> {
        match ClientEventfd::new(fd) {
            Ok(eventfd) => Ok(Self { eventfd, kept }),
            Err(KindError::WrongKind) => Err(Errno::INVAL),
            Err(KindError::System(errno)) => Err(errno),
        }
    }
}

impl IrqSink for IrqEventfd {
    #[inline]
    fn signal(&self) {
        self.eventfd.signal();
    }

    fn kept(&self) -> Option<NonZeroU32> {
        self.kept
    }
}
