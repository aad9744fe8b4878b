//! Blocks that Write Uncorrectable has marked ("NVM Command Set 1.1", 3.3.7): they cannot be read
//! until they are written.
//!
//! The marks of a namespace are one structure for all workers of a controller, and for all
//! controllers of a subsystem. Reads look at it only where there are marks: an engine that has
//! looked ([`Engine::look_at_marks`]) and found some takes the commands of that namespace out of
//! the short way, which knows nothing of this. Who marks the first block tells all engines, and
//! Write Uncorrectable completes when each of them has looked: a command that a host sends then is
//! checked, wherever it is sent. What takes the last mark away tells them, too.
//!
//! A write takes marks away when its volume has done it, before its completion is posted; one that
//! fails does not. A write that was in flight when Write Uncorrectable completed may have come
//! before it or after it: its blocks are marked or are not, but for all of its blocks that were
//! marked it is the same.
//!
//! *How many.* A range of marks can be cut into half as many as it has blocks. So much is counted
//! for it when it is marked ([`PIECES`] for all of a controller's namespaces), so that no write
//! that cuts one can meet a limit.
//!
//! *How long.* The next process of a keeper finds the marks in the control state. Nothing keeps
//! them beside the volume: when the disk ends, they do.
//!
//! [`Engine::look_at_marks`]: crate::engine::Engine::look_at_marks

mod ranges;

pub(crate) use ranges::Ranges;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use sync::Unpoisoned;

/// Ranges that there may be, of all namespaces of a controller: with what the host is reading of
/// them they must leave room in the control state, which has 128 KiB.
pub(crate) const PIECES: u64 = 1024;

/// Ranges of marked blocks by NSID: first blocks, and how many.
pub(crate) type Listed = Vec<(u32, Vec<(u64, u64)>)>;
/// Blocks of one Write Uncorrectable command, at most.
pub(crate) const MOST_BLOCKS: u64 = 2 * PIECES;

/// The marked blocks of a namespace.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    any: AtomicBool,
    ranges: Mutex<Ranges>,
}

impl Marks {
    /// There are some.
    pub fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    fn change<R>(&self, what: impl FnOnce(&mut Ranges) -> R) -> R {
        let mut ranges = self.ranges();
        let result = what(&mut ranges);
        self.any.store(!ranges.is_empty(), Ordering::Release);
        result
    }

    fn ranges(&self) -> MutexGuard<'_, Ranges> {
        self.ranges.lock().unpoisoned()
    }

    /// Marks blocks, unless there could be more than `most` ranges then.
    pub fn mark(&self, slba: u64, blocks: u64, most: u64) -> bool {
        self.change(|ranges| ranges.add(slba..slba.saturating_add(blocks), most))
    }

    /// These ranges (first block, blocks) were written. `true`: some of it was marked.
    pub fn written(&self, written: &[(u64, u64)]) -> bool {
        self.change(|ranges| {
            let mut any = false;
            for &(slba, blocks) in written {
                any |= ranges.remove(slba..slba.saturating_add(blocks));
            }
            any
        })
    }

    /// The namespace has so many blocks. `true`: behind them some were marked.
    pub fn cut(&self, blocks: u64) -> bool {
        self.change(|ranges| ranges.remove(blocks..u64::MAX))
    }

    /// The lowest marked block of a range.
    pub fn first(&self, slba: u64, blocks: u64) -> Option<u64> {
        if !self.any() {
            return None;
        }
        let ranges = self.ranges();
        let mut found = ranges.within(slba..slba.saturating_add(blocks));
        found.next().map(|range| range.start)
    }

    /// The marked blocks of a range.
    pub fn within(&self, within: Range<u64>) -> Vec<Range<u64>> {
        self.ranges().within(within).collect()
    }

    /// All of them: first blocks, and how many.
    pub fn all(&self) -> Vec<(u64, u64)> {
        let ranges = self.ranges();
        let all = ranges
            .iter()
            .map(|range| (range.start, range.end - range.start));
        all.collect()
    }

    /// What counts to [`PIECES`].
    pub fn pieces(&self) -> u64 {
        self.ranges().pieces()
    }
}

/// The marks of a controller's namespaces, by NSID.
#[derive(Debug, Default)]
pub(crate) struct MarkTable {
    namespaces: Mutex<BTreeMap<u32, Arc<Marks>>>,
}

impl MarkTable {
    /// Those of a namespace.
    pub fn of(&self, nsid: u32) -> Arc<Marks> {
        let mut namespaces = self.namespaces.lock().unpoisoned();
        namespaces.entry(nsid).or_default().clone()
    }

    /// A namespace has these, which it shares with other controllers.
    pub fn share(&self, nsid: u32, marks: Arc<Marks>) {
        self.namespaces.lock().unpoisoned().insert(nsid, marks);
    }

    /// The namespace is gone.
    pub fn forget(&self, nsid: u32) {
        self.namespaces.lock().unpoisoned().remove(&nsid);
    }

    /// Those of all namespaces, in the order of their NSIDs.
    pub fn all(&self) -> Vec<(u32, Arc<Marks>)> {
        let namespaces = self.namespaces.lock().unpoisoned();
        let all = namespaces
            .iter()
            .map(|(nsid, marks)| (*nsid, marks.clone()));
        all.collect()
    }

    /// All marked ranges.
    pub fn listed(&self) -> Listed {
        let all = self.all();
        let marked = all.iter().filter(|(_, marks)| marks.any());
        marked.map(|(nsid, marks)| (*nsid, marks.all())).collect()
    }

    /// How many ranges there can be.
    pub fn pieces(&self) -> u64 {
        self.all().iter().map(|(_, marks)| marks.pieces()).sum()
    }
}
