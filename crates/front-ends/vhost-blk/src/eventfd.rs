//! Descriptors that a front-end sends for kicks and interrupts: eventfds, and nothing else.

use crate::error::RequestRefusal;
use eventfd::{ClientEventfd, KindError};
use std::os::fd::OwnedFd;
use worker::{Descriptors, Interest};

impl From<KindError> for RequestRefusal {
    fn from(error: KindError) -> Self {
        match error {
            KindError::WrongKind => RequestRefusal::WrongKind,
            KindError::System(errno) => RequestRefusal::System {
                call: "readlink",
                errno,
            },
        }
    }
}

/// Eventfd by which the back-end interrupts the guest or reports errors.
#[derive(Debug)]
pub(crate) struct Signal(ClientEventfd);

impl Signal {
    pub(crate) fn new(fd: OwnedFd) -> Result<Signal, RequestRefusal> {
        Ok(Signal(ClientEventfd::new(fd)?))
    }

    #[inline]
    pub(crate) fn send(&self) {
        self.0.signal();
    }
}

/// Source of kicks, in a worker's epoll set during its lifetime. The descriptor is never read (each
/// kick is an edge of its own), because the front-end could make a read block.
#[derive(Debug)]
pub(crate) struct Kick {
    fd: ClientEventfd,
    descriptors: Descriptors,
}

impl Kick {
    /// Adds the eventfd to the epoll set under `token`.
    pub(crate) fn new(
        fd: OwnedFd,
        descriptors: &Descriptors,
        token: u32,
    ) -> Result<Kick, RequestRefusal> {
        let fd = ClientEventfd::new(fd)?;
        let added = descriptors.add(&fd, token, Interest::Edge);
        added.map_err(|errno| RequestRefusal::System {
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
        // Closing alone would leave the descriptor in the set: the front-end holds the same file.
        let _ = self.descriptors.remove(&self.fd);
    }
}
