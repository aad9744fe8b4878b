//! The process that outlives a keeper, and closes its kept descriptors.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use std::io;
use std::os::fd::AsFd;

/// Waits until a process has ended and closed all of its own descriptors: then the caller is the
/// last holder of those that it has inherited from there. The process is given by a descriptor
/// (`pidfd_open(2)`), which is readable only after that.
///
/// # Errors
/// The process cannot be waited for.
pub fn outlive(process: impl AsFd) -> io::Result<()> {
    let mut fds = [PollFd::new(&process, PollFlags::IN)];
    retry_on_intr(|| poll(&mut fds, None))?;
    Ok(())
}
