//! Interrupts end in an eventfd that the VMM gave.

use controller::IrqSink;
use eventfd::{ClientEventfd, KindError};
use rustix::io::Errno;
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;

/// An eventfd of the VMM's as the receiver of an interrupt.
pub struct IrqEventfd {
    eventfd: ClientEventfd,
    /// Under which it is kept, if it is.
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
