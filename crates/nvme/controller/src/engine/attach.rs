//! Attaching and detaching namespaces while the controller runs.
//!
//! A namespace keeps its index, by which outstanding commands refer to it. New commands do not find
//! a detached namespace. When its outstanding commands have ended, it is flushed, and a placeholder
//! takes its index until another namespace is attached there.

use super::slots::RemainingWork;
use super::{Engine, NO_NAMESPACE, Namespace};
use crate::stats::IoStats;
use dma::SegmentList;
use volume::{Io, Op};

/// Detached namespace with a volume that is not closed yet.
pub(super) struct Detached {
    index: usize,
    /// Whether the flush before the volume is closed was started.
    flushed: bool,
}

impl Engine {
    /// Returns the I/O counters of this engine.
    pub fn io(&self) -> &IoStats {
        &self.io
    }

    /// Returns the attached namespaces, which commands find.
    pub fn active(&self) -> impl Iterator<Item = &Namespace> {
        let finds = |(index, ns): &(usize, &Namespace)| {
            let found = self.nsids.all.get(ns.config.nsid as usize);
            found.is_some_and(|found| usize::from(*found) == *index)
        };
        self.namespaces
            .iter()
            .enumerate()
            .filter(finds)
            .map(|(_, ns)| ns)
    }

    /// Attaches a namespace at a vacant index, or at the end of the list. Commands find the
    /// namespace from now on.
    pub fn attach(&mut self, index: usize, namespace: Namespace) {
        let nsid = namespace.config.nsid as usize;
        match self.namespaces.get_mut(index) {
            Some(place) => *place = namespace,
            None => self.namespaces.push(namespace),
        }
        if nsid > 0
            && let Some(found) = self.nsids.all.get_mut(nsid)
        {
            *found = u16::try_from(index).unwrap_or(NO_NAMESPACE);
        }
        self.find_marks(index);
        self.index_namespaces();
    }

    /// Hides the namespace at this index from new commands. Outstanding commands continue.
    pub(super) fn detach(&mut self, index: usize) {
        for found in &mut self.nsids.all {
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

    /// Requests that outstanding commands on detached namespaces end early.
    pub(super) fn end_detached_early(&mut self) {
        let detached = &self.detached;
        let concerned = |ns: usize| detached.iter().any(|gone| gone.index == ns);
        let tags = self.slots.guests_in_flight(self.own_stays());
        let tags: Vec<(u64, usize)> = tags.filter(|(_, ns)| concerned(*ns)).collect();
        for (tag, ns) in tags {
            self.cancel(tag, ns);
        }
    }

    /// Releases detached namespaces without outstanding commands, after a flush of the data they
    /// wrote. Returns whether a namespace was released.
    pub fn tidy(&mut self, io: &Io) -> bool {
        let mut waiting = std::mem::take(&mut self.detached);
        let before = waiting.len();
        waiting.retain_mut(|gone| !self.release(gone, io));
        let left = waiting.len();
        self.detached = waiting;
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
            let Some(index) = self.slots.alloc() else {
                gone.flushed = false;
                return false;
            };
            if let Some(slot) = self.slots.get(index) {
                slot.orphan = true;
                slot.ns = gone.index;
                slot.work = RemainingWork::OwnFlush;
            }
            self.flushes.started();
            self.submit(index, gone.index, Op::Flush, 0, 0, SegmentList::new());
            return false;
        }
        // An earlier flush of all namespaces may still have to flush this one.
        if self.flushes.waits_for(gone.index) {
            return false;
        }
        match Namespace::vacant(io) {
            Ok(vacant) => self.attach(gone.index, vacant),
            Err(error) => {
                tracing::debug!(%error, "a detached namespace stays open");
                return false;
            }
        }
        true
    }
}
