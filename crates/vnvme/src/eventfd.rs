//! Interrupts end in an eventfd that the VMM gave.

use controller::IrqSink;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, OwnedFd};

/// An eventfd as the receiver of an interrupt.
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Takes a descriptor that a client sent. `EINVAL` when it is no eventfd: a write to anything
    /// else could block, or do who knows what.
    pub fn new(fd: OwnedFd) -> Result<Self, Errno> {
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let target = rustix::fs::readlink(link, Vec::new())?;
        if !target.to_bytes().starts_with(b"anon_inode:[eventfd") {
            return Err(Errno::INVAL);
        }
        // A client that lets the counter run full must not block this thread, which serves others
        // too.
        let flags = fcntl_getfl(&fd)?;
        if !flags.contains(OFlags::NONBLOCK) {
            fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        }
        Ok(EventFd(fd))
    }
}

impl IrqSink for EventFd {
    fn signal(&self) {
        // Full: the client has an interrupt to handle in any case.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_eventfds_are_taken_and_a_full_one_does_not_block() {
        let file = rustix::fs::memfd_create("no eventfd", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(matches!(EventFd::new(file), Err(Errno::INVAL)));
        let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let reader = fd.try_clone().unwrap();
        let sink = EventFd::new(fd).unwrap();
        sink.signal();
        sink.signal();
        let mut count = [0; 8];
        rustix::io::read(&reader, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 2);
        rustix::io::write(&reader, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        sink.signal();
    }
}
