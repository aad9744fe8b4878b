//! The way to the keeper.

use crate::packet;
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;

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
    /// Of what the keeper may have by now.
    names: Mutex<BTreeSet<String>>,
}

impl Link {
    /// Over a socket that is connected to the keeper, which keeps `most` descriptors and has those
    /// of these names already.
    pub fn new(
        socket: OwnedFd,
        keeping: Keeping,
        most: usize,
        kept: impl IntoIterator<Item = String>,
    ) -> Self {
        Self(Arc::new(Shared {
            socket,
            keeping,
            most,
            names: Mutex::new(kept.into_iter().collect()),
        }))
    }

    /// Names of all that the keeper may have by now, and has not been told to close.
    pub fn names(&self) -> Vec<String> {
        let names = self.0.names.lock().unpoisoned();
        names.iter().cloned().collect()
    }

    /// Takes a place for what is stored under this name, if there is one left, or it has one.
    pub(crate) fn enter(&self, name: &str) -> bool {
        let mut names = self.0.names.lock().unpoisoned();
        if !names.contains(name) {
            if names.len() >= self.0.most {
                return false;
            }
            names.insert(name.to_owned());
        }
        true
    }

    /// The keeper has been told to close it.
    pub(crate) fn leave(&self, name: &str) {
        self.0.names.lock().unpoisoned().remove(name);
    }

    /// Who keeps.
    pub fn keeping(&self) -> Keeping {
        self.0.keeping
    }

    /// Descriptors that are kept, of all that have been sent.
    pub fn kept(&self) -> usize {
        self.0.names.lock().unpoisoned().len()
    }

    /// Most that may be.
    pub fn most(&self) -> usize {
        self.0.most
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
