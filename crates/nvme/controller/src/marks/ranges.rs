//! Ordered set of block ranges, in which adjacent ranges are merged.

use std::collections::BTreeMap;
use std::ops::Range;

/// Ordered set of block ranges that neither overlap nor touch each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranges {
    /// Ranges by their first block; the value is the end, i.e. the block after the last one.
    ends: BTreeMap<u64, u64>,
}

impl Ranges {
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the number of ranges.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> {
        self.ends.iter().map(|(start, end)| *start..*end)
    }

    /// Returns the parts of the set's ranges that lie in `within`.
    pub fn within(&self, within: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let before = self.ends.range(..within.start).next_back();
        let before = before.filter(|(_, end)| **end > within.start);
        let inside = if within.is_empty() {
            self.ends.range(0..0)
        } else {
            self.ends.range(within.clone())
        };
        let all = before.filter(|_| !within.is_empty()).into_iter();
        all.chain(inside)
            .map(move |(start, end)| (*start).max(within.start)..(*end).min(within.end))
    }

    /// Adds a range, unless the set would then have more than `most` ranges and more than before.
    /// Returns whether the range was added.
    pub fn add(&mut self, range: Range<u64>, most: usize) -> bool {
        if range.is_empty() {
            return true;
        }
        let mut merged = range.clone();
        // Ranges to merge: one that ends where the new range starts, and those that start within
        // the new range or at its end.
        let before = self.ends.range(..range.start).next_back();
        let before = before.filter(|(_, end)| **end >= range.start);
        let inside = self.ends.range(range.start..=range.end);
        let replaced: Vec<(u64, u64)> = before
            .into_iter()
            .chain(inside)
            .map(|(start, end)| (*start, *end))
            .collect();
        if replaced.is_empty() && self.len() >= most {
            return false;
        }
        for (start, end) in replaced {
            merged = merged.start.min(start)..merged.end.max(end);
            self.ends.remove(&start);
        }
        self.ends.insert(merged.start, merged.end);
        true
    }

    /// Removes a range of blocks, unless that would split a range and leave more than `most`
    /// ranges. Returns whether the range was removed.
    pub fn remove(&mut self, range: Range<u64>, most: usize) -> bool {
        let cut: Vec<Range<u64>> = self.within(range).collect();
        for cut in &cut {
            let Some((&start, &end)) = self.ends.range(..=cut.start).next_back() else {
                continue;
            };
            // Only a removal within a single range splits it, and then there is no other cut.
            if start < cut.start && cut.end < end && self.len() >= most {
                return false;
            }
            self.ends.remove(&start);
            for rest in [start..cut.start, cut.end..end] {
                if !rest.is_empty() {
                    self.ends.insert(rest.start, rest.end);
                }
            }
        }
        true
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing)] // A test fails by a panic.
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Returns the ranges that a set of block numbers consists of.
    fn ranges(set: &BTreeSet<u64>) -> Vec<Range<u64>> {
        let mut all: Vec<Range<u64>> = Vec::new();
        for &block in set {
            match all.last_mut() {
                Some(last) if last.end == block => last.end += 1,
                _ => all.push(block..block + 1),
            }
        }
        all
    }

    proptest! {
        #[test]
        fn ranges_behave_like_block_set(
            steps in prop::collection::vec((0..3u8, 0..64u64, 0..20u64), 1..80),
            most in 1..12usize,
        ) {
            let (mut now, mut model) = (Ranges::default(), BTreeSet::new());
            for (what, start, blocks) in steps {
                let range = start..start + blocks;
                let mut then = model.clone();
                if what == 0 {
                    then.extend(range.clone());
                } else {
                    then.retain(|block| !range.contains(block));
                }
                let needed = ranges(&then).len();
                let fits = needed <= most || needed <= now.len();
                let done = match what {
                    0 => now.add(range.clone(), most),
                    _ => now.remove(range.clone(), most),
                };
                prop_assert_eq!(done, fits);
                if fits {
                    model = then;
                }
                let all = ranges(&model);
                prop_assert_eq!(now.iter().collect::<Vec<_>>(), all.clone());
                prop_assert!(now.len() == all.len() && all.len() <= most);
                let part: BTreeSet<u64> = model.range(start..start + 5).copied().collect();
                let found: Vec<_> = now.within(start..start + 5).collect();
                prop_assert_eq!(found, ranges(&part));
            }
        }
    }

    #[test]
    fn ranges_include_first_and_last_block() {
        let mut now = Ranges::default();
        assert!(now.add(u64::MAX - 2..u64::MAX, 8));
        assert!(now.add(0..1, 8));
        assert_eq!(now.within(0..u64::MAX).count(), 2);
        assert!(now.remove(u64::MAX - 1..u64::MAX, 8));
        assert_eq!(
            now.iter().collect::<Vec<_>>(),
            [0..1, u64::MAX - 2..u64::MAX - 1]
        );
        assert_eq!(now.within(7..7).count(), 0);
    }
}
