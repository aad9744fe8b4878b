//! Readiness of a descriptor, asked without waiting.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use std::os::fd::AsFd;

/// Returns which of the `wanted` events a descriptor has at this moment; `HUP` and `ERR` are always
/// among the answers (poll(2)).
///
/// A signal does not change the answer. With a time limit of zero, too, poll(2) fails with `EINTR`
/// when a signal arrives during the call. A caller that takes this failure for an answer sees a
/// closed descriptor, or none of the messages that wait.
///
/// Without memory for the call the answer is no event.
///
/// ```
/// use rustix::event::PollFlags;
/// use std::io::Write;
/// use std::os::unix::net::UnixStream;
///
/// let (ours, mut theirs) = UnixStream::pair()?;
/// assert!(sync::readiness(&ours, PollFlags::IN).is_empty());
/// theirs.write_all(b"x")?;
/// assert_eq!(sync::readiness(&ours, PollFlags::IN), PollFlags::IN);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn readiness(fd: impl AsFd, wanted: PollFlags) -> PollFlags {
    let mut fds = [PollFd::new(&fd, wanted)];
    match retry_on_intr(|| poll(&mut fds, Some(&Timespec::default()))) {
        Ok(1..) => fds[0].revents(),
        Ok(_) | Err(_) => PollFlags::empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn closed_peer_is_reported_without_being_asked_for() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert!(readiness(&ours, PollFlags::empty()).is_empty());
        drop(theirs);
        assert_eq!(readiness(&ours, PollFlags::empty()), PollFlags::HUP);
    }
}
