//! Blocks marked by Write Uncorrectable ("NVM Command Set 1.1", 3.3.7): they cannot be read until
//! they are written.
//!
//! The marks of a namespace are one structure for all workers of a controller, and for all
//! controllers of a subsystem. Reads check it only on namespaces with marks. An engine that has
//! found marks ([`Engine::look_at_marks`]) takes the commands of that namespace off the fast
//! path, which does not check them. The controller that marks the first block notifies all
//! engines, and Write Uncorrectable completes when each of them has checked. Every later command
//! of a host is therefore checked, by any engine. Removal of the last mark notifies them, too.
//!
//! A write removes marks when its volume request has succeeded, before its completion is posted.
//! A write that was in flight when Write Uncorrectable completed may take effect before it or
//! after it: its marked blocks either all keep their marks, or all lose them.
//!
//! *Limit.* Marks take memory by ranges, not by blocks: at most [`MAX_RANGES`] for all of a
//! controller's namespaces. Write Uncorrectable may use half of them, and fails when they are used
//! up. The other half is for writes within a range, which split it. A write that would need one
//! more fails, and its blocks keep their marks: if marks were dropped instead, the host could read
//! the previous content of blocks that it has made unreadable.
//!
//! *Lifetime.* With a keeper, the next process finds the marks in the control state, or in a
//! section of the state memory if there are more than [`MAX_INLINE_RANGES`]; those of a shared
//! namespace in the state of the controller that has committed last. The volume does not store
//! them: they are lost when the disk ends.
//!
//! [`Engine::look_at_marks`]: crate::engine::Engine::look_at_marks

mod ranges;

pub(crate) use ranges::Ranges;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;

/// Maximum number of marked ranges in all namespaces of a controller. Together with the copy that
/// the host is reading, the ranges have to fit into a section of the state memory (19 bytes each).
pub(crate) const MAX_RANGES: usize = 8192;
/// Maximum number of marked ranges in a control state, the copy that the host is reading included.
/// Older versions read as many.
pub(crate) const MAX_INLINE_RANGES: usize = 2048;

/// Blocks marked by Write Uncorrectable: for each NSID, ranges of first block and number of blocks.
pub(crate) type MarkedRanges = Vec<(u32, Vec<(u64, u64)>)>;

/// Returns the number of ranges of all namespaces.
pub(crate) fn count_ranges(marks: &MarkedRanges) -> usize {
    marks.iter().map(|(_, ranges)| ranges.len()).sum()
}

/// Blocks of one namespace that Write Uncorrectable has marked as unreadable.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    any: AtomicBool,
    marked: Mutex<Marked>,
}

#[derive(Debug, Default)]
struct Marked {
    ranges: Ranges,
    /// Number of changes so far, also in earlier processes.
    changes: u64,
}

impl Marks {
    /// Restores the marks of a previous process: these ranges after so many changes.
    pub fn restore(changes: u64, ranges: &[(u64, u64)]) -> Self {
        let marks = Marks::default();
        for &(slba, blocks) in ranges {
            marks.mark(slba, blocks, MAX_RANGES);
        }
        marks.marked.lock().unpoisoned().changes = changes;
        marks
    }

    /// Returns the number of changes so far.
    pub fn changes(&self) -> u64 {
        self.marked.lock().unpoisoned().changes
    }

    /// Returns whether any block is marked.
    pub fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    fn change<R>(&self, what: impl FnOnce(&mut Ranges) -> R) -> R {
        let mut marked = self.marked.lock().unpoisoned();
        let result = what(&mut marked.ranges);
        marked.changes += 1;
        let any = !marked.ranges.is_empty();
        self.any.store(any, Ordering::Release);
        result
    }

    fn see<R>(&self, what: impl FnOnce(&Ranges) -> R) -> R {
        what(&self.marked.lock().unpoisoned().ranges)
    }

    /// Marks blocks, unless they would be one range more than `most`. Returns whether the blocks
    /// were marked.
    pub fn mark(&self, slba: u64, blocks: u64, most: usize) -> bool {
        self.change(|ranges| ranges.add(slba..slba.saturating_add(blocks), most))
    }

    /// Removes the marks of ranges that were written (first block, number of blocks), except where
    /// that would split a range and leave more than `most`. Returns whether all were removed.
    pub fn written(&self, written: &[(u64, u64)], most: usize) -> bool {
        self.change(|ranges| {
            let mut all = true;
            for &(slba, blocks) in written {
                all &= ranges.remove(slba..slba.saturating_add(blocks), most);
            }
            all
        })
    }

    /// Removes the marks beyond the end of a namespace of `blocks` blocks. Returns whether there
    /// were any.
    pub fn cut(&self, blocks: u64) -> bool {
        self.change(|ranges| {
            let any = ranges.within(blocks..u64::MAX).next().is_some();
            ranges.remove(blocks..u64::MAX, usize::MAX);
            any
        })
    }

    /// Returns the first block of the range that is marked as uncorrectable, if any.
    pub fn first(&self, slba: u64, blocks: u64) -> Option<u64> {
        if !self.any() {
            return None;
        }
        self.see(|ranges| {
            let mut found = ranges.within(slba..slba.saturating_add(blocks));
            found.next().map(|range| range.start)
        })
    }

    /// Returns the parts of the block range `within` that are marked as uncorrectable.
    pub fn within(&self, within: Range<u64>) -> Vec<Range<u64>> {
        self.see(|ranges| ranges.within(within).collect())
    }

    /// Returns all ranges marked as uncorrectable: first block and number of blocks of each.
    pub fn all(&self) -> Vec<(u64, u64)> {
        self.snapshot().1
    }

    /// Returns the number of changes so far, and all marked ranges after the last of them.
    fn snapshot(&self) -> (u64, Vec<(u64, u64)>) {
        let marked = self.marked.lock().unpoisoned();
        let ranges = marked.ranges.iter();
        let ranges = ranges.map(|range| (range.start, range.end - range.start));
        (marked.changes, ranges.collect())
    }

    /// Returns the number of marked ranges.
    pub fn len(&self) -> usize {
        if self.any() { self.see(Ranges::len) } else { 0 }
    }
}

/// Blocks marked as uncorrectable in all namespaces of a controller, by NSID.
#[derive(Debug, Default)]
pub(crate) struct MarkTable {
    namespaces: Mutex<BTreeMap<u32, Arc<Marks>>>,
}

impl MarkTable {
    /// Returns the marked blocks of a namespace. The first call for an NSID creates an empty set.
    pub fn of(&self, nsid: u32) -> Arc<Marks> {
        let mut namespaces = self.namespaces.lock().unpoisoned();
        namespaces.entry(nsid).or_default().clone()
    }

    /// Sets the marked blocks of a namespace to a set that other controllers share.
    pub fn share(&self, nsid: u32, marks: Arc<Marks>) {
        self.namespaces.lock().unpoisoned().insert(nsid, marks);
    }

    /// Removes the set of marked blocks of a namespace that no longer exists.
    pub fn forget(&self, nsid: u32) {
        self.namespaces.lock().unpoisoned().remove(&nsid);
    }

    /// Returns the sets of marked blocks of all namespaces, in ascending order of NSIDs.
    pub fn all(&self) -> Vec<(u32, Arc<Marks>)> {
        let namespaces = self.namespaces.lock().unpoisoned();
        let all = namespaces
            .iter()
            .map(|(nsid, marks)| (*nsid, marks.clone()));
        all.collect()
    }

    /// Returns all ranges marked as uncorrectable, by NSID.
    pub fn listed(&self) -> MarkedRanges {
        let all = self.all();
        let marked = all.iter().filter(|(_, marks)| marks.any());
        marked.map(|(nsid, marks)| (*nsid, marks.all())).collect()
    }

    /// Returns all marked ranges by NSID, and the number of changes of each namespace's marks.
    pub fn saved(&self) -> (MarkedRanges, Vec<(u32, u64)>) {
        let (mut ranges, mut changes) = (Vec::new(), Vec::new());
        for (nsid, marks) in self.all() {
            let (changed, marked) = marks.snapshot();
            if changed > 0 {
                changes.push((nsid, changed));
            }
            if !marked.is_empty() {
                ranges.push((nsid, marked));
            }
        }
        (ranges, changes)
    }

    /// Returns the number of marked ranges in all namespaces.
    pub fn len(&self) -> usize {
        self.all().iter().map(|(_, marks)| marks.len()).sum()
    }
}
