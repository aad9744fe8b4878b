//! Descriptors that a front-end sends for kicks and interrupts: eventfds, and nothing else.

use crate::error::Refusal;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::os::fd::{AsRawFd, OwnedFd};
use worker::{Descriptors, Interest};

/// `EINVAL` for what is no eventfd: a write to anything else could block, or do who knows what.
fn check(fd: &OwnedFd) -> Result<(), Refusal> {
    let system = |call| move |errno| Refusal::System { call, errno };
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let target = rustix::fs::readlink(link, Vec::new()).map_err(system("readlink"))?;
    if !target.to_bytes().starts_with(b"anon_inode:[eventfd") {
        return Err(Refusal::WrongKind);
    }
    // A front-end that lets the counter run full must not block this thread.
    let flags = fcntl_getfl(fd).map_err(system("fcntl"))?;
    if !flags.contains(OFlags::NONBLOCK) {
        fcntl_setfl(fd, flags | OFlags::NONBLOCK).map_err(system("fcntl"))?;
    }
    Ok(())
}

/// Where interrupts (or errors) go.
#[derive(Debug)]
pub(crate) struct Signal(OwnedFd);

impl Signal {
    pub(crate) fn new(fd: OwnedFd) -> Result<Signal, Refusal> {
        check(&fd)?;
        Ok(Signal(fd))
    }

    pub(crate) fn send(&self) {
        // Full: the front-end has something to handle in any case.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// Where kicks come from: in a worker's epoll set for as long as this lives. It is never read: each
/// kick is an edge of its own.
#[derive(Debug)]
pub(crate) struct Kick {
    fd: OwnedFd,
    descriptors: Descriptors,
}

impl Kick {
    /// Puts the descriptor into the set, under `token`.
    pub(crate) fn new(fd: OwnedFd, descriptors: &Descriptors, token: u32) -> Result<Kick, Refusal> {
        check(&fd)?;
        let added = descriptors.add(&fd, token, Interest::Edge);
        added.map_err(|errno| Refusal::System {
            call: "epoll_ctl",
            errno,
        })?;
        Ok(Kick {
            fd,
            descriptors: descriptors.clone(),
        })
    }
}

impl Drop for Kick {
    fn drop(&mut self) {
        // Closing alone would leave it in the set: the front-end holds the same file.
        let _ = self.descriptors.remove(&self.fd);
    }
}
