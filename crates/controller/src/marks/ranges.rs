//! Ordered set of block ranges, in which adjacent ranges are merged.

use std::collections::BTreeMap;
use std::ops::Range;

/// Ordered set of block ranges that neither overlap nor touch each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranges {
    /// Ranges by their first block; the value is the end, i.e. the block after the last one.
    ends: BTreeMap<u64, u64>,
    /// Sum of [`pieces`] over all ranges.
    pieces: u64,
}

/// Returns the maximum number of ranges that a range of `blocks` blocks can be split into by
/// removing blocks.
const fn pieces(blocks: u64) -> u64 {
    blocks.div_ceil(2)
}

impl Ranges {
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the maximum number of ranges that the set can be split into by removing blocks.
    pub fn pieces(&self) -> u64 {
        self.pieces
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

    /// Adds a range, unless removals could then split the set into more than `most` ranges. Returns
    /// whether the range was added.
    pub fn add(&mut self, range: Range<u64>, most: u64) -> bool {
        if range.is_empty() {
            return true;
        }
        let mut merged = range.clone();
        let mut replaced = Vec::new();
        // Ranges to merge: one that ends where the new range starts, and those that start within
        // the new range or at its end.
        let before = self.ends.range(..range.start).next_back();
        let before = before.filter(|(_, end)| **end >= range.start);
        let inside = self.ends.range(range.start..=range.end);
        for (start, end) in before.into_iter().chain(inside) {
            merged = merged.start.min(*start)..merged.end.max(*end);
            replaced.push((*start, pieces(end - start)));
        }
        let without = replaced.iter().map(|(_, pieces)| pieces).sum::<u64>();
        let all = self.pieces - without + pieces(merged.end - merged.start);
        if all > most.max(self.pieces) {
            return false;
        }
        for (start, _) in replaced {
            self.ends.remove(&start);
        }
        self.ends.insert(merged.start, merged.end);
        self.pieces = all;
        true
    }

    /// Removes a range of blocks. Returns whether the set contained any of them.
    pub fn remove(&mut self, range: Range<u64>) -> bool {
        let cut: Vec<Range<u64>> = self.within(range.clone()).collect();
        for cut in &cut {
            let Some((&start, &end)) = self.ends.range(..=cut.start).next_back() else {
                continue;
            };
            self.ends.remove(&start);
            self.pieces -= pieces(end - start);
            for rest in [start..cut.start, cut.end..end] {
                if !rest.is_empty() {
                    self.pieces += pieces(rest.end - rest.start);
                    self.ends.insert(rest.start, rest.end);
                }
            }
        }
        !cut.is_empty()
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
            most in 1..40u64,
        ) {
            let (mut now, mut model) = (Ranges::default(), BTreeSet::new());
            for (what, start, blocks) in steps {
                let range = start..start + blocks;
                if what == 0 {
                    let mut then = model.clone();
                    then.extend(range.clone());
                    let needed = ranges(&then).iter().map(|r| pieces(r.end - r.start)).sum::<u64>();
                    let fits = needed <= most || needed <= now.pieces() || range.is_empty();
                    prop_assert_eq!(now.add(range.clone(), most), fits);
                    if fits {
                        model = then;
                    }
                } else {
                    let any = model.range(range.clone()).next().is_some();
                    prop_assert_eq!(now.remove(range.clone()), any);
                    model.retain(|block| !range.contains(block));
                }
                let all = ranges(&model);
                prop_assert_eq!(now.iter().collect::<Vec<_>>(), all.clone());
                prop_assert!(all.len() as u64 <= now.pieces() && now.pieces() <= most);
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
        assert!(now.remove(u64::MAX - 1..u64::MAX));
        assert_eq!(
            now.iter().collect::<Vec<_>>(),
            [0..1, u64::MAX - 2..u64::MAX - 1]
        );
        assert_eq!(now.within(7..7).count(), 0);
    }
}
