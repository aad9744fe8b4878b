//! Attaching and detaching namespaces while the controller runs.
//!
//! A namespace keeps its index, by which outstanding commands refer to it. New commands do not find
//! a detached namespace. When its outstanding commands have ended, it is flushed, and a placeholder
//! takes its index until another namespace is attached there.

use super::namespaces::{NO_NAMESPACE, NamespaceTable};
use super::slots::Slots;
use super::{Engine, Namespace};
use volume::Io;

/// Detached namespace with a volume that is not closed yet.
pub(super) struct Detached {
    index: usize,
    /// Whether the flush before the volume is closed was started.
    flushed: bool,
}

impl NamespaceTable {
    /// Attaches a namespace at a vacant index, or at the end of the list. Commands find the
    /// namespace from now on.
    pub fn attach(&mut self, index: usize, namespace: Namespace) {
        let nsid = namespace.config.nsid as usize;
        match self.list.get_mut(index) {
            Some(place) => *place = namespace,
            None => self.list.push(namespace),
        }
        if nsid > 0
            && let Some(found) = self.all.get_mut(nsid)
        {
            *found = u16::try_from(index).unwrap_or(NO_NAMESPACE);
        }
        self.find_marks(index);
        self.index_namespaces();
    }

    /// Hides the namespace at this index from new commands. Outstanding commands continue.
    pub(super) fn detach(&mut self, index: usize) {
        for found in &mut self.all {
            if usize::from(*found) == index {
                *found = NO_NAMESPACE;
            }
        }
        self.index_namespaces();
        self.detached.push(Detached {
            index,
            flushed: false,
        });
    }

    /// Returns the number of detached namespaces with volumes that are still open.
    pub fn detached(&self) -> usize {
        self.detached.len()
    }

    /// Requests that outstanding commands end early: all of them, or with `detached` those on
    /// detached namespaces. `shared`: the controller belongs to a subsystem.
    pub(super) fn end_early(&mut self, slots: &Slots, shared: bool, detached: bool) {
        for (tag, ns) in slots.guests_in_flight(shared) {
            if !detached || self.detached.iter().any(|gone| gone.index == ns) {
                self.cancel(ns, tag);
            }
        }
    }
}

impl Engine {
    /// Releases detached namespaces without outstanding commands, after a flush of the data they
    /// wrote. Returns whether a namespace was released.
    pub fn tidy(&mut self, io: &Io) -> bool {
        let mut waiting = std::mem::take(&mut self.namespaces.detached);
        let before = waiting.len();
        waiting.retain_mut(|gone| !self.release(gone, io));
        let left = waiting.len();
        self.namespaces.detached = waiting;
        left < before
    }

    fn release(&mut self, gone: &mut Detached, io: &Io) -> bool {
        if self.slots.any_of(gone.index) {
            return false;
        }
        let Some(namespace) = self.namespaces.get(gone.index) else {
            return true;
        };
        let flush = namespace.volatile_cache && !namespace.read_only;
        if flush && !std::mem::replace(&mut gone.flushed, true) {
            gone.flushed = self.execution().flush_own(gone.index);
            if gone.flushed {
                self.flushes.started();
                self.settle();
            }
            return false;
        }
        // An earlier flush of all namespaces may still have to flush this one.
        if self.flushes.waits_for(gone.index) {
            return false;
        }
        match Namespace::vacant(io) {
            Ok(vacant) => self.namespaces.attach(gone.index, vacant),
            Err(error) => {
                tracing::debug!(%error, "a detached namespace stays open");
                return false;
            }
        }
        true
    }
}
