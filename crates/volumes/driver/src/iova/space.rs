//! Allocator of address ranges; freed ranges are merged with their neighbours.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// End of a free range from which an allocation is taken. Long-lived ranges use the low end and
/// short-lived ones the high end, so that short-lived ranges do not fragment the space of
/// long-lived ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeEnd {
    /// Allocate at the low end of the address space.
    Low,
    /// Allocate at the high end of the address space.
    High,
}

/// Free ranges of an address space. Allocation takes the smallest range that fits, in O(log n);
/// freeing merges with the neighbours. All addresses and lengths are multiples of the granule.
#[derive(Clone, Debug)]
pub struct Space {
    granule: u64,
    /// Length in bytes of each free address range, by its first address.
    by_address: BTreeMap<u64, u64>,
    /// Length and first address of each free range, in this order.
    by_length: BTreeSet<(u64, u64)>,
    free: u64,
}

impl Space {
    /// Creates an address space from ranges (inclusive, as the kernel reports them). They must be
    /// disjoint, and are trimmed to whole granules; adjacent ones are merged. `granule` is a power
    /// of two. Address 0 is excluded: devices accept it, but in a trace it looks like a mistake.
    pub fn new(ranges: &[RangeInclusive<u64>], granule: u64) -> Self {
        let granule = granule.next_power_of_two();
        let mut space = Self {
            granule,
            by_address: BTreeMap::new(),
            by_length: BTreeSet::new(),
            free: 0,
        };
        for range in ranges {
            let Some(start) = (*range.start()).max(1).checked_next_multiple_of(granule) else {
                continue;
            };
            // The end as an exclusive bound; a range up to the last address loses its last granule.
            let end = range.end().saturating_add(1) & !(granule - 1);
            if start < end {
                space.free(start, end - start);
            }
        }
        space
    }

    /// Returns the unit of addresses and lengths, in bytes.
    pub fn granule(&self) -> u64 {
        self.granule
    }

    /// Returns the total number of free bytes.
    pub fn free_bytes(&self) -> u64 {
        self.free
    }

    /// Returns the number of free ranges.
    pub fn fragments(&self) -> usize {
        self.by_address.len()
    }

    /// Returns the length of the largest free range.
    pub fn largest(&self) -> u64 {
        self.by_length.last().map_or(0, |&(len, _)| len)
    }

    /// Allocates `len` bytes (rounded up to granules), and returns the first address; `None` when
    /// no free range is long enough.
    pub fn allocate(&mut self, len: u64, end: RangeEnd) -> Option<u64> {
        let len = len.max(1).checked_next_multiple_of(self.granule)?;
        let &(size, start) = self.by_length.range((len, 0)..).next()?;
        self.remove(start, size);
        let rest = size - len;
        let (at, left) = match end {
            RangeEnd::Low => (start, start + len),
            RangeEnd::High => (start + rest, start),
        };
        if rest > 0 {
            self.insert(left, rest);
        }
        Some(at)
    }

    /// Frees a range. Returns `false` and changes nothing when part of it is already free, or it
    /// does not consist of whole granules.
    pub fn free(&mut self, start: u64, len: u64) -> bool {
        let Some(end) = start.checked_add(len) else {
            return false;
        };
        if len == 0 || (start | len) & (self.granule - 1) != 0 {
            return false;
        }
        let before = self.by_address.range(..end).next_back();
        let before = before.map(|(&at, &size)| (at, size));
        let (mut start, mut len) = (start, len);
        let merged_before = match before {
            Some((at, size)) if at + size > start => return false,
            Some((at, size)) if at + size == start => Some((at, size)),
            _ => None,
        };
        if let Some((at, size)) = merged_before {
            self.remove(at, size);
            start = at;
            len += size;
        }
        if let Some(&size) = self.by_address.get(&end) {
            self.remove(end, size);
            len += size;
        }
        self.insert(start, len);
        true
    }

    fn insert(&mut self, start: u64, len: u64) {
        self.by_address.insert(start, len);
        self.by_length.insert((len, start));
        self.free += len;
    }

    fn remove(&mut self, start: u64, len: u64) {
        self.by_address.remove(&start);
        self.by_length.remove(&(len, start));
        self.free -= len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model of the allocator: one bit for each granule.
    struct Bits {
        used: Vec<bool>,
        base: u64,
        granule: u64,
    }

    impl Bits {
        fn index(&self, address: u64) -> usize {
            ((address - self.base) / self.granule) as usize
        }

        fn set(&mut self, address: u64, len: u64, to: bool) {
            let from = self.index(address);
            for bit in &mut self.used[from..from + (len / self.granule) as usize] {
                assert_ne!(*bit, to, "overlap or double free at {address:#x}");
                *bit = to;
            }
        }

        /// Returns the number of free runs, the total of free granules, and the longest run in
        /// granules.
        fn runs(&self) -> (usize, u64, u64) {
            let (mut runs, mut total, mut longest) = (0, 0, 0);
            for run in self.used.chunk_by(|a, b| a == b) {
                if !run[0] {
                    runs += 1;
                    total += run.len() as u64;
                    longest = longest.max(run.len() as u64);
                }
            }
            (runs, total, longest)
        }
    }

    /// A fast pseudorandom generator (Marsaglia's xorshift64), so that most time is spent in the
    /// allocator.
    struct Random(u64);
    impl Random {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }
        fn below(&mut self, n: u64) -> u64 {
            self.next() % n
        }
    }

    /// Number of random operations: tens of millions in an optimised build, fewer in a debug build.
    const OPERATIONS: u64 = if cfg!(debug_assertions) {
        1_000_000
    } else {
        24_000_000
    };

    #[test]
    fn random_operations_match_bitmap() {
        let granule = 4096;
        let first: RangeInclusive<u64> = 1 << 20..=(1 << 20) + 2000 * 4096 - 1;
        let second: RangeInclusive<u64> = 1 << 33..=(1 << 33) + 47 * 4096 - 1;
        let mut space = Space::new(&[first.clone(), second.clone()], granule);
        let mut bits = Bits {
            used: vec![false; 2000],
            base: *first.start(),
            granule,
        };
        let mut far = Bits {
            used: vec![false; 47],
            base: *second.start(),
            granule,
        };
        let mut held: Vec<(u64, u64)> = Vec::new();
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let mut refused = 0u64;
        for step in 0..OPERATIONS {
            // The test alternates phases of mostly allocating and mostly freeing, to pass through
            // every fill level.
            let eager = (step / 3000) % 2 == 0;
            let allocate = random.below(10) < if eager { 7 } else { 3 };
            if allocate || held.is_empty() {
                let pages = match random.below(20) {
                    0 => 1 + random.below(300),
                    1..4 => 1 + random.below(40),
                    _ => 1 + random.below(4),
                };
                let end = if random.below(2) == 0 {
                    RangeEnd::Low
                } else {
                    RangeEnd::High
                };
                let len = pages * granule;
                match space.allocate(len, end) {
                    Some(at) => {
                        let model = if at >= *second.start() {
                            &mut far
                        } else {
                            &mut bits
                        };
                        model.set(at, len, true);
                        held.push((at, len));
                    }
                    None => {
                        refused += 1;
                        let longest = bits.runs().2.max(far.runs().2);
                        assert!(
                            longest < pages,
                            "refused {pages} with a run of {longest} free"
                        );
                    }
                }
            } else {
                let (at, len) = held.swap_remove(random.below(held.len() as u64) as usize);
                let model = if at >= *second.start() {
                    &mut far
                } else {
                    &mut bits
                };
                model.set(at, len, false);
                assert!(space.free(at, len));
            }
            if step % 4096 == 0 {
                let ((a, b, c), (x, y, z)) = (bits.runs(), far.runs());
                assert_eq!(space.fragments(), a + x, "not coalesced");
                assert_eq!(space.free_bytes(), (b + y) * granule, "leak");
                assert_eq!(space.largest(), c.max(z) * granule);
            }
        }
        assert!(refused > OPERATIONS / 10_000, "the space was never full");
        for (at, len) in held {
            assert!(space.free(at, len));
        }
        assert_eq!((space.fragments(), space.free_bytes()), (2, 2047 * granule));
    }

    #[test]
    fn invalid_free_changes_nothing() {
        let mut space = Space::new(&[0x1000..=0xffff], 0x1000);
        let at = space.allocate(0x3000, RangeEnd::Low).unwrap();
        for (start, len) in [
            (at + 0x3000, 0x1000),
            (at, 0x4000),
            (at + 1, 0x1000),
            (at, 0),
            (u64::MAX - 0xfff, 0x2000),
        ] {
            assert!(!space.free(start, len), "{start:#x} {len:#x}");
        }
        assert!(space.free(at, 0x3000));
        assert!(!space.free(at, 0x3000));
        assert_eq!(space.largest(), 0xf000);
    }

    #[test]
    fn space_includes_ends_of_address_space() {
        let space = Space::new(&[0..=u64::MAX], 4096);
        assert_eq!(space.largest(), u64::MAX - 4095 - 4096);
        assert_eq!(Space::new(&[0..=4095, 5000..=8190], 4096).largest(), 0);
        let touching = Space::new(&[0x1000..=0x1fff, 0x2000..=0x2fff], 4096);
        assert_eq!((touching.fragments(), touching.largest()), (1, 0x2000));
    }
}
