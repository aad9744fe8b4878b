//! The way to the keeper.

use crate::packet;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Who keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeping {
    /// The process of this number, which has started this one.
    Process(u32),
    /// systemd, in its store of this service's descriptors.
    Systemd,
}

/// The way to the keeper, for any number of threads: clones are the same.
#[derive(Clone, Debug)]
pub struct Link(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    socket: OwnedFd,
    keeping: Keeping,
    most: usize,
    kept: AtomicUsize,
}

impl Link {
    /// Over a socket that is connected to the keeper, which keeps `most` descriptors and has `kept`
    /// of them already.
    pub fn new(socket: OwnedFd, keeping: Keeping, most: usize, kept: usize) -> Self {
        Self(Arc::new(Shared {
            socket,
            keeping,
            most,
            kept: AtomicUsize::new(kept),
        }))
    }

    /// Who keeps.
    pub fn keeping(&self) -> Keeping {
        self.0.keeping
    }

    /// Descriptors that are kept, of all that have been sent.
    pub fn kept(&self) -> usize {
        self.0.kept.load(Ordering::Relaxed)
    }

    /// Most that may be.
    pub fn most(&self) -> usize {
        self.0.most
    }

    /// Takes a place for another one, if there is one left.
    pub(crate) fn take_place(&self) -> bool {
        let more = |kept| (kept < self.0.most).then_some(kept + 1);
        let order = Ordering::Relaxed;
        self.0.kept.fetch_update(order, order, more).is_ok()
    }

    pub(crate) fn return_place(&self) {
        let less = |kept: usize| Some(kept.saturating_sub(1));
        let order = Ordering::Relaxed;
        let _ = self.0.kept.fetch_update(order, order, less);
    }

    /// Tells a service manager something: lines of sd_notify(3). Never waits.
    ///
    /// # Errors
    /// It cannot be told now.
    pub fn tell(&self, lines: &str) -> Result<(), Errno> {
        self.send(lines, None)
    }

    pub(crate) fn send(&self, text: &str, fd: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        packet::send(self.0.socket.as_fd(), text, fd.as_slice())
    }
}
