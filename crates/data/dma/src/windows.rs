//! Windows of a map, sorted by address.
//!
//! A client may have tens of thousands of them (a guest behind a virtual IOMMU maps page by page),
//! and adds and removes them, one or all, while other clients wait. They are therefore stored in
//! chunks, sorted arrays of some hundred windows each. Adding or removing a window moves only its
//! chunk's entries. Removing a range drops chunks, after a look at each window in it.

use crate::Prot;

/// Maximum number of windows in a chunk of the sorted list.
const CHUNK: usize = 256;

/// Window of guest memory, as a DMA map stores it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowEntry {
    /// First guest address (IOVA) of the window.
    pub(crate) start: u64,
    /// Last guest address of the window, inclusive, because it may be the end of the address space.
    pub(crate) last: u64,
    /// Host address of the window's first byte; null for a window without memory.
    pub(crate) host: *mut u8,
    /// Number of the window's memory in the map; `None` for a window without memory.
    pub(crate) memory: Option<u32>,
    pub(crate) prot: Prot,
}

impl WindowEntry {
    /// Returns the length of the window in bytes.
    pub(crate) fn len(&self) -> u64 {
        // The value was passed in as a length, so it fits.
        self.last - self.start + 1
    }
}

/// Sorted set of windows that do not overlap.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    /// First guest address of each chunk of windows.
    firsts: Vec<u64>,
    /// Chunks of windows, sorted by address; none of them is empty.
    chunks: Vec<Vec<WindowEntry>>,
    count: usize,
}

impl Windows {
    /// Returns the number of windows.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Returns all windows, sorted by address.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &WindowEntry> {
        self.chunks.iter().flatten()
    }

    /// Returns the windows that lie in a range of addresses, both inclusive, at least in part.
    pub(crate) fn between(&self, first: u64, last: u64) -> impl Iterator<Item = &WindowEntry> {
        let from = self.firsts.partition_point(|start| *start <= first);
        let chunks = self.chunks.get(from.saturating_sub(1)..);
        let windows = chunks.unwrap_or_default().iter().flatten();
        windows
            .skip_while(move |window| window.last < first)
            .take_while(move |window| window.start <= last)
    }

    /// Returns the window with the highest first address that is not above `iova`.
    pub(crate) fn at_or_below(&self, iova: u64) -> Option<&WindowEntry> {
        let chunk = self.firsts.partition_point(|first| *first <= iova);
        let chunk = self.chunks.get(chunk.checked_sub(1)?)?;
        let at = chunk.partition_point(|entry| entry.start <= iova);
        chunk.get(at.checked_sub(1)?)
    }

    /// Adds a window that overlaps no existing one, as the caller has checked.
    pub(crate) fn insert(&mut self, entry: WindowEntry) {
        self.count += 1;
        let start = entry.start;
        let behind = self.firsts.partition_point(|first| *first <= start);
        // A window before all chunks is stored in the first one.
        let at = behind.saturating_sub(1);
        let Some(chunk) = self.chunks.get_mut(at) else {
            self.firsts.push(start);
            self.chunks.push(vec![entry]);
            return;
        };
        let place = chunk.partition_point(|known| known.start < start);
        chunk.insert(place, entry);
        let split = (chunk.len() > CHUNK).then(|| {
            // Windows are often mapped in the order of their addresses: the chunks stay full then.
            let keep = if place == CHUNK { CHUNK } else { CHUNK / 2 };
            chunk.split_off(keep)
        });
        if let (Some(first), Some(entry)) = (self.firsts.get_mut(at), chunk.first()) {
            *first = entry.start;
        }
        if let Some(upper) = split
            && let Some(entry) = upper.first()
        {
            self.firsts.insert(at + 1, entry.start);
            self.chunks.insert(at + 1, upper);
        }
    }

    /// Returns the sum of the lengths of all windows that begin between two addresses, both
    /// inclusive.
    pub(crate) fn sum(&self, first: u64, last: u64) -> u64 {
        let from = self.firsts.partition_point(|start| *start <= first);
        let from = from.saturating_sub(1);
        let to = self.firsts.partition_point(|start| *start <= last);
        let chunks = self.chunks.get(from..to).unwrap_or_default();
        let inside = |entry: &&WindowEntry| entry.start >= first && entry.start <= last;
        let lens = chunks.iter().flatten().filter(inside).map(WindowEntry::len);
        lens.fold(0, u64::saturating_add)
    }

    /// Removes all windows that begin between two addresses, both inclusive, after a call of
    /// `each`.
    pub(crate) fn remove(&mut self, first: u64, last: u64, mut each: impl FnMut(&WindowEntry)) {
        let from = self.firsts.partition_point(|start| *start <= first);
        let from = from.saturating_sub(1);
        let to = self.firsts.partition_point(|start| *start <= last);
        let mut removed = 0;
        for chunk in self.chunks.get_mut(from..to).unwrap_or_default() {
            let range = chunk.partition_point(|entry| entry.start < first)
                ..chunk.partition_point(|entry| entry.start <= last);
            removed += range.len();
            chunk.drain(range).for_each(|entry| each(&entry));
        }
        self.count -= removed;
        self.forget_empty(from, to);
    }

    /// Removes all windows, after calling `each` for each of them.
    pub(crate) fn clear(&mut self, mut each: impl FnMut(&WindowEntry)) {
        self.iter().for_each(&mut each);
        *self = Windows::default();
    }

    /// Removes empty chunks from `from` to before `to`, and merges small ones with their
    /// predecessors.
    fn forget_empty(&mut self, from: usize, to: usize) {
        // Only the first and the last of a range of chunks can have anything left.
        let kept: Vec<Vec<WindowEntry>> = match self.chunks.get(from..to) {
            Some(_) => self
                .chunks
                .drain(from..to)
                .filter(|c| !c.is_empty())
                .collect(),
            None => return,
        };
        self.firsts.drain(from..to);
        for (i, chunk) in kept.into_iter().enumerate() {
            if let Some(first) = chunk.first() {
                self.firsts.insert(from + i, first.start);
                self.chunks.insert(from + i, chunk);
            }
        }
        self.merge(from);
    }

    /// Joins neighbours around a chunk if both are small, so that frequent changes do not leave
    /// many chunks of few windows.
    fn merge(&mut self, at: usize) {
        for lower in [at + 1, at, at.saturating_sub(1)] {
            let [Some(a), Some(b)] = [lower, lower + 1].map(|i| self.chunks.get(i).map(Vec::len))
            else {
                continue;
            };
            if a + b > CHUNK / 2 {
                continue;
            }
            let upper = self.chunks.remove(lower + 1);
            self.firsts.remove(lower + 1);
            if let Some(chunk) = self.chunks.get_mut(lower) {
                chunk.extend(upper);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn entry(start: u64, len: u64) -> WindowEntry {
        WindowEntry {
            start,
            last: start + (len - 1),
            host: std::ptr::null_mut(),
            memory: Some(start as u32),
            prot: Prot::RW,
        }
    }

    impl Windows {
        fn check(&self, model: &BTreeMap<u64, u64>) {
            let got: Vec<(u64, u64)> = self.iter().map(|e| (e.start, e.last)).collect();
            let wanted: Vec<(u64, u64)> = model.iter().map(|(a, b)| (*a, *b)).collect();
            assert_eq!(got, wanted);
            assert_eq!(self.count(), model.len());
            assert_eq!(self.firsts.len(), self.chunks.len());
            for (first, chunk) in self.firsts.iter().zip(&self.chunks) {
                assert_eq!(*first, chunk[0].start);
                assert!(chunk.len() <= CHUNK);
            }
            // Neighbours are not both small: their number is bounded by that of the windows.
            assert!(self.chunks.len() <= 2 + 8 * self.count / CHUNK + 2);
        }
    }

    #[derive(Clone, Debug)]
    enum Op {
        Insert { start: u64, many: u64, step: u64 },
        Remove { first: u64, last: u64 },
        Clear,
        Find { at: u64 },
        Sum { first: u64, last: u64 },
    }

    const SPACE: u64 = 4000;

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            6 => (0..SPACE, 1..400u64, 1..5u64)
                .prop_map(|(start, many, step)| Op::Insert { start, many, step }),
            3 => (0..SPACE, 0..SPACE)
                .prop_map(|(a, b)| Op::Remove { first: a.min(b), last: a.max(b) }),
            3 => (0..SPACE, 0..300u64).prop_map(|(a, b)| Op::Remove { first: a, last: a + b }),
            3 => (0..SPACE, 0..3u64).prop_map(|(a, b)| Op::Remove { first: a, last: a + b }),
            1 => Just(Op::Remove { first: 0, last: u64::MAX }),
            1 => Just(Op::Clear),
            6 => (0..2 * SPACE).prop_map(|at| Op::Find { at }),
            3 => (0..SPACE, 0..SPACE)
                .prop_map(|(a, b)| Op::Sum { first: a.min(b), last: a.max(b) }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 2 } else { 300 },
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn windows_behave_like_sorted_map(ops in prop::collection::vec(op(), 1..40)) {
            let (mut windows, mut model) = (Windows::default(), BTreeMap::new());
            for op in ops {
                match op {
                    Op::Insert { start, many, step } => {
                        for start in (0..many).map(|i| start + i * step) {
                            if model.contains_key(&start) {
                                continue;
                            }
                            model.insert(start, start);
                            windows.insert(entry(start, 1));
                        }
                    }
                    Op::Remove { first, last } => {
                        let mut gone = Vec::new();
                        windows.remove(first, last, |entry| gone.push(entry.start));
                        let wanted: Vec<u64> = model.range(first..=last).map(|(a, _)| *a).collect();
                        model.retain(|start, _| !wanted.contains(start));
                        prop_assert_eq!(gone, wanted);
                    }
                    Op::Clear => {
                        let mut gone = 0;
                        windows.clear(|_| gone += 1);
                        prop_assert_eq!(gone, model.len());
                        model.clear();
                    }
                    Op::Find { at } => {
                        let found = windows.at_or_below(at).map(|entry| entry.start);
                        prop_assert_eq!(found, model.range(..=at).next_back().map(|(a, _)| *a));
                    }
                    Op::Sum { first, last } => {
                        let wanted = model.range(first..=last).count() as u64;
                        prop_assert_eq!(windows.sum(first, last), wanted);
                    }
                }
                windows.check(&model);
            }
        }
    }

    #[test]
    fn sparse_windows_merge_into_few_chunks() {
        let mut windows = Windows::default();
        (0..20_000).for_each(|start| windows.insert(entry(start, 1)));
        for start in (0..20_000).filter(|start| start % 200 != 0) {
            windows.remove(start, start, |_| ());
        }
        let left = (0..20_000).step_by(200).map(|start| (start, start));
        windows.check(&left.collect());
    }

    #[test]
    fn windows_include_ends_of_address_space() {
        let mut windows = Windows::default();
        windows.insert(entry(u64::MAX, 1));
        windows.insert(entry(0, u64::MAX));
        assert_eq!(
            windows.at_or_below(u64::MAX).map(|e| e.start),
            Some(u64::MAX)
        );
        assert_eq!(windows.at_or_below(u64::MAX - 1).map(|e| e.start), Some(0));
        windows.remove(u64::MAX, u64::MAX, |_| ());
        assert_eq!(windows.count(), 1);
        windows.remove(0, u64::MAX, |_| ());
        assert!(windows.at_or_below(u64::MAX).is_none());
    }
}
