//! Interrupts end in an eventfd that the VMM gave.

use controller::IrqSink;
use eventfd::{ClientEventfd, KindError};
use rustix::io::Errno;
use std::os::fd::OwnedFd;

/// An eventfd of the VMM's as the receiver of an interrupt.
pub struct IrqEventfd(ClientEventfd);

impl IrqEventfd {
    /// Takes a descriptor that a client sent. `EINVAL` when it is no eventfd.
    pub fn new(fd: OwnedFd) -> Result<Self, Errno> {
        match ClientEventfd::new(fd) {
            Ok(eventfd) => Ok(Self(eventfd)),
            Err(KindError::WrongKind) => Err(Errno::INVAL),
            Err(KindError::System(errno)) => Err(errno),
        }
    }
}

impl IrqSink for IrqEventfd {
    #[inline]
    fn signal(&self) {
        self.0.signal();
    }
}
