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
//! section of the state memory if there are more than [`MAX_INLINE_RANGES`]. The volume does not
//! store them: they are lost when the disk ends.
//!
//! [`Engine::look_at_marks`]: crate::engine::Engine::look_at_marks

mod ranges;

pub(crate) use ranges::Ranges;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use sync::Unpoisoned;

/// Maximum number of marked ranges in all namespaces of a controller. Together with the copy that
/// the host is reading, the ranges have to fit into a section of the state memory (19 bytes each).
pub(crate) const MAX_RANGES: usize = 8192;
/// Maximum number of marked ranges in a control state, the copy that the host is reading included.
/// Older versions read as many.
pub(crate) const MAX_INLINE_RANGES: usize = 2048;

/// Ranges of marked blocks by NSID: first block and number of blocks.
pub(crate) type MarkedRanges = Vec<(u32, Vec<(u64, u64)>)>;

/// Returns the number of ranges of all namespaces.
pub(crate) fn count_ranges(marks: &MarkedRanges) -> usize {
    marks.iter().map(|(_, ranges)| ranges.len()).sum()
}

/// Marked blocks of one namespace.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    any: AtomicBool,
    ranges: Mutex<Ranges>,
}

impl Marks {
    /// Returns whether any block is marked.
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

    /// Returns the first marked block of a range.
    pub fn first(&self, slba: u64, blocks: u64) -> Option<u64> {
        if !self.any() {
            return None;
        }
        let ranges = self.ranges();
        let mut found = ranges.within(slba..slba.saturating_add(blocks));
        found.next().map(|range| range.start)
    }

    /// Returns the marked parts of a block range.
    pub fn within(&self, within: Range<u64>) -> Vec<Range<u64>> {
        self.ranges().within(within).collect()
    }

    /// Returns all marked ranges: first block and number of blocks.
    pub fn all(&self) -> Vec<(u64, u64)> {
        let ranges = self.ranges();
        let all = ranges
            .iter()
            .map(|range| (range.start, range.end - range.start));
        all.collect()
    }

    /// Returns the number of marked ranges.
    pub fn len(&self) -> usize {
        if self.any() { self.ranges().len() } else { 0 }
    }
}

/// Marks of a controller's namespaces, by NSID.
#[derive(Debug, Default)]
pub(crate) struct MarkTable {
    namespaces: Mutex<BTreeMap<u32, Arc<Marks>>>,
}

impl MarkTable {
    /// Returns the marks of a namespace, which are created empty at the first call.
    pub fn of(&self, nsid: u32) -> Arc<Marks> {
        let mut namespaces = self.namespaces.lock().unpoisoned();
        namespaces.entry(nsid).or_default().clone()
    }

    /// Sets the marks of a namespace, which other controllers share.
    pub fn share(&self, nsid: u32, marks: Arc<Marks>) {
        self.namespaces.lock().unpoisoned().insert(nsid, marks);
    }

    /// Drops the marks of a namespace that was removed.
    pub fn forget(&self, nsid: u32) {
        self.namespaces.lock().unpoisoned().remove(&nsid);
    }

    /// Returns the marks of all namespaces in ascending order of NSIDs.
    pub fn all(&self) -> Vec<(u32, Arc<Marks>)> {
        let namespaces = self.namespaces.lock().unpoisoned();
        let all = namespaces
            .iter()
            .map(|(nsid, marks)| (*nsid, marks.clone()));
        all.collect()
    }

    /// Returns all marked ranges, by NSID.
    pub fn listed(&self) -> MarkedRanges {
        let all = self.all();
        let marked = all.iter().filter(|(_, marks)| marks.any());
        marked.map(|(nsid, marks)| (*nsid, marks.all())).collect()
    }

    /// Returns the number of marked ranges in all namespaces.
    pub fn len(&self) -> usize {
        self.all().iter().map(|(_, marks)| marks.len()).sum()
    }
}
