//! Record of the received byte ranges of a read.
//!
//! Each byte must arrive exactly once, so that a completed read contains no old content of the
//! request's memory. Servers mostly answer in order, and then nothing is allocated here.

use super::reply::Violation;
use std::ops::Range;

/// Maximum number of separate ranges: the blocks of the longest read, in the worst order. Each new
/// range is compared with all of them.
const MAX_RANGES: usize = 256;

/// Ranges of a read that were received, relative to the first byte of the read.
#[derive(Debug, Default)]
pub(super) struct Received {
    /// Largest contiguous range that was received. It usually grows at its end.
    main: Range<u32>,
    /// Received ranges that do not touch `main`; they may touch each other.
    apart: Vec<Range<u32>>,
}

impl Received {
    /// Adds a range of at least one byte.
    ///
    /// # Errors
    /// [`Violation::Twice`] when part of it was already received; [`Violation::Scattered`] when
    /// there are too many separate ranges.
    pub(super) fn add(&mut self, new: Range<u32>) -> Result<(), Violation> {
        let overlaps = |known: &Range<u32>| new.start < known.end && known.start < new.end;
        if overlaps(&self.main) || self.apart.iter().any(overlaps) {
            return Err(Violation::Twice);
        }
        if !self.main.is_empty() && !self.join(&new) {
            if self.apart.len() >= MAX_RANGES {
                return Err(Violation::Scattered);
            }
            self.apart.push(new);
            return Ok(());
        }
        if self.main.is_empty() {
            self.main = new;
        }
        // The new range may connect `main` with a separate one.
        while let Some(at) = self.apart.iter().position(|known| self.touches(known)) {
            let known = self.apart.swap_remove(at);
            self.join(&known);
        }
        Ok(())
    }

    /// Returns whether all of the first `len` bytes have been received, and no others.
    pub(super) fn is_whole(&self, len: u32) -> bool {
        self.apart.is_empty() && self.main == (0..len)
    }

    fn touches(&self, other: &Range<u32>) -> bool {
        other.start == self.main.end || other.end == self.main.start
    }

    fn join(&mut self, other: &Range<u32>) -> bool {
        let joins = self.touches(other);
        if other.start == self.main.end {
            self.main.end = other.end;
        } else if joins {
            self.main.start = other.start;
        }
        joins
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn disjoint_ranges_are_limited() {
        let mut received = Received::default();
        let apart = |number: u32| number * 2..number * 2 + 1;
        let most = MAX_RANGES as u32;
        for number in 0..=most {
            assert_eq!(received.add(apart(number)), Ok(()));
        }
        assert_eq!(received.add(apart(most + 1)), Err(Violation::Scattered));
        // A range that joins two others frees an entry.
        assert_eq!(received.add(1..2), Ok(()));
        assert_eq!(received.add(apart(most + 1)), Ok(()));
    }

    proptest! {
        /// Compares the record with a model that marks each byte.
        #[test]
        fn every_byte_is_received_once(
            pieces in proptest::collection::vec((0..64u32, 1..16u32), 0..40),
        ) {
            let mut received = Received::default();
            let mut marks = [false; 80];
            for (start, len) in pieces {
                let range = start as usize..(start + len) as usize;
                let twice = marks[range.clone()].contains(&true);
                let expected = if twice { Err(Violation::Twice) } else { Ok(()) };
                prop_assert_eq!(received.add(start..start + len), expected);
                if !twice {
                    marks[range].fill(true);
                }
                let end = marks.iter().position(|mark| !mark).unwrap_or(marks.len());
                let whole = !marks[end..].contains(&true);
                prop_assert_eq!(received.is_whole(end as u32), whole && end > 0 || marks == [false; 80]);
            }
        }
    }
}
