//! Sets of clusters, as ranges of their numbers.

use std::collections::BTreeMap;
use std::ops::Range;

/// Set of numbers (of clusters), stored as ranges.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Ranges {
    /// First number and exclusive end of each range. No two ranges touch.
    ranges: BTreeMap<u64, u64>,
    count: u64,
}

impl Ranges {
    /// Adds a range of numbers, none of which is in the set.
    pub(crate) fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        self.count += range.end - range.start;
        let (mut start, mut end) = (range.start, range.end);
        if let Some((&before, &to)) = self.ranges.range(..start).next_back()
            && to == start
        {
            self.ranges.remove(&before);
            start = before;
        }
        if let Some(to) = self.ranges.remove(&end) {
            end = to;
        }
        self.ranges.insert(start, end);
    }

    /// Removes and returns the first range, limited to `most` numbers.
    pub(crate) fn take(&mut self, most: u64) -> Option<Range<u64>> {
        let (start, end) = self.ranges.pop_first()?;
        let taken = end.min(start.saturating_add(most.max(1)));
        if taken < end {
            self.ranges.insert(taken, end);
        }
        self.count -= taken - start;
        Some(start..taken)
    }

    /// Returns the number of elements in the set.
    pub(crate) fn len(&self) -> u64 {
        self.count
    }

    /// Returns the ranges of the set in ascending order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.ranges.iter().map(|(&start, &end)| start..end)
    }

    /// Adds the ranges of another set.
    pub(crate) fn extend(&mut self, other: Ranges) {
        for range in other.iter() {
            self.insert(range);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn ranges_match_set(
            steps in prop::collection::vec((any::<bool>(), 0u64..60, 1u64..9), 1..80),
        ) {
            let (mut ranges, mut naive) = (Ranges::default(), BTreeSet::new());
            for (adds, start, len) in steps {
                if adds {
                    for number in start..start + len {
                        if naive.insert(number) {
                            ranges.insert(number..number + 1);
                        }
                    }
                } else if let Some(taken) = ranges.take(len) {
                    prop_assert!(taken.end - taken.start <= len);
                    prop_assert_eq!(Some(&taken.start), naive.iter().next());
                    for number in taken {
                        prop_assert!(naive.remove(&number));
                    }
                } else {
                    prop_assert!(naive.is_empty());
                }
                prop_assert_eq!(ranges.len(), naive.len() as u64);
                let all: Vec<u64> = ranges.iter().flatten().collect();
                prop_assert_eq!(all, naive.iter().copied().collect::<Vec<_>>());
                let touch = ranges.iter().zip(ranges.iter().skip(1)).any(|(a, b)| a.end >= b.start);
                prop_assert!(!touch);
            }
        }
    }
}
