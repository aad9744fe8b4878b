//! The atomicity that a volume promises for its writes.

/// Largest unit that a volume promises, in bytes. An atomic write must pass every layer in one
/// piece, and a bounce buffer of this size is always available.
pub const MAX_ATOMIC_UNIT: u32 = 64 << 10;

/// Promise of a volume about which of its writes are atomic. After a power cut or the death of the
/// process during such a write, the range holds either all of the old data or all of the new.
/// Concurrent reads and atomic writes see one or the other, too.
///
/// Sizes are in bytes. The promise covers only [`Op::Write`](crate::Op::Write), not zeroing and
/// deallocation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct AtomicWrites {
    /// Size in bytes of the units, counted from the beginning of the volume, within which every
    /// write is atomic, whatever its length. A power of two, or 0 for none.
    unit: u32,
    /// Smallest and largest size of naturally aligned writes that are atomic in addition: a power
    /// of two in length, at a multiple of that length. Linux promises this for files
    /// (`RWF_ATOMIC`).
    natural: Option<(u32, u32)>,
}

impl AtomicWrites {
    /// Promise that no write is atomic, which is the default of a volume.
    pub const NONE: Self = Self {
        unit: 0,
        natural: None,
    };

    /// Creates the promise of a device with atomic writes of up to `bytes` bytes, unless they cross
    /// a boundary. Boundaries lie every `boundary` bytes (0: none) from byte `offset` on. The unit
    /// is the largest power of two that fits these sizes, up to [`MAX_ATOMIC_UNIT`].
    #[must_use]
    pub fn within(bytes: u64, boundary: u64, offset: u64) -> Self {
        let mut unit = power_below(bytes.min(MAX_ATOMIC_UNIT.into()));
        if boundary > 0 {
            unit = unit.min(divisor(boundary)).min(divisor(offset));
        }
        Self {
            unit,
            natural: None,
        }
    }

    /// Creates the promise for naturally aligned writes: a power of two from `min` to `max` bytes
    /// in length, at a multiple of that length.
    #[must_use]
    pub fn naturally_aligned(min: u32, max: u32) -> Self {
        let max = power_below(max.min(MAX_ATOMIC_UNIT).into());
        let min = min.max(1).checked_next_power_of_two().unwrap_or(u32::MAX);
        Self {
            unit: 0,
            natural: (min <= max).then_some((min, max)),
        }
    }

    /// Returns the size in bytes of the unit within which every write is atomic, whatever its
    /// length; 0: none.
    pub fn unit(self) -> u32 {
        self.unit
    }

    /// Returns whether no write is promised to be atomic.
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }

    /// Restricts the promise to writes of at most `bytes` bytes.
    #[must_use]
    pub fn at_most(self, bytes: u32) -> Self {
        let most = power_below(bytes.into());
        let natural = self.natural.map(|(min, max)| (min, max.min(most)));
        Self {
            unit: self.unit.min(most),
            natural: natural.filter(|(min, max)| min <= max),
        }
    }

    /// Returns the promise for a part of the volume that begins at byte `offset`, in the part's own
    /// offsets.
    #[must_use]
    pub fn from_byte(self, offset: u64) -> Self {
        let most = divisor(offset);
        let natural = self.natural.map(|(min, max)| (min, max.min(most)));
        Self {
            unit: self.unit.min(most),
            natural: natural.filter(|(min, max)| min <= max),
        }
    }

    /// Returns whether a write of `len` bytes at byte `offset` is promised to be atomic.
    #[inline]
    pub fn covers(self, offset: u64, len: u64) -> bool {
        self.in_unit(offset, len) || self.is_natural(offset, len)
    }

    fn in_unit(self, offset: u64, len: u64) -> bool {
        let unit = u64::from(self.unit);
        // A power of two.
        unit > 0 && len > 0 && len <= unit && (offset & (unit - 1)) + len <= unit
    }

    fn is_natural(self, offset: u64, len: u64) -> bool {
        self.natural.is_some_and(|(min, max)| {
            (u64::from(min)..=u64::from(max)).contains(&len)
                && len.is_power_of_two()
                && offset & (len - 1) == 0
        })
    }

    /// Returns the largest unit in bytes, a power of two, within which every write of whole blocks
    /// of `block` bytes is atomic; 0 when that is no more than one block.
    ///
    /// All block-aligned writes within a unit of two blocks are naturally aligned, so a promise for
    /// naturally aligned writes suffices. A unit of four blocks also has writes of three.
    pub fn unit_of_blocks(self, block: u32) -> u32 {
        let pair = block.saturating_mul(2);
        let pair = match self.natural {
            Some((min, max)) if min <= block && pair <= max => pair,
            _ => 0,
        };
        let unit = self.unit.max(pair);
        if unit > block { unit } else { 0 }
    }
}

impl std::fmt::Display for AtomicWrites {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.unit, self.natural) {
            (0, None) => write!(f, "no atomic writes"),
            (0, Some((min, max))) => write!(
                f,
                "atomic writes of {min} to {max} bytes, aligned powers of two"
            ),
            (unit, _) => write!(f, "atomic writes within units of {unit} bytes"),
        }
    }
}

/// Returns the largest power of two that is not above `bytes`, at most 2^31; 0 for 0.
fn power_below(bytes: u64) -> u32 {
    let log = bytes.checked_ilog2().map(|log| log.min(31));
    log.map_or(0, |log| 1 << log)
}

/// Returns the largest power of two that divides `offset`, at most 2^31.
fn divisor(offset: u64) -> u32 {
    1 << offset.trailing_zeros().min(31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn atomic_unit_covers_writes_within_only() {
        let atomic = AtomicWrites::within(16 << 10, 0, 0);
        for (offset, len, covered) in [
            (0, 16384, true),
            (0, 512, true),
            (512, 3 * 512, true),
            (16384, 16384, true),
            (512, 16384, false),
            (12288, 8192, false),
            (0, 16385, false),
            (0, 32768, false),
            (0, 0, false),
            (u64::MAX - 511, 512, true),
        ] {
            assert_eq!(atomic.covers(offset, len), covered, "{offset} {len}");
            assert!(!AtomicWrites::NONE.covers(offset, len));
        }
        assert_eq!(atomic.unit_of_blocks(512), 16 << 10);
        assert_eq!(atomic.unit_of_blocks(4096), 16 << 10);
        assert_eq!(atomic.unit_of_blocks(16 << 10), 0, "no more than a block");
        assert_eq!(AtomicWrites::NONE.unit_of_blocks(512), 0);
    }

    #[test]
    fn atomic_promise_is_limited_on_request() {
        let natural = AtomicWrites::naturally_aligned;
        assert_eq!(natural(512, 64 << 10).at_most(8192), natural(512, 8192));
        assert_eq!(natural(512, 4096).at_most(8192), natural(512, 4096));
        assert!(natural(16 << 10, 64 << 10).at_most(8192).is_none());
        assert!(natural(512, 4096).at_most(0).is_none());
        assert_eq!(
            AtomicWrites::within(16 << 10, 0, 0).at_most(5000).unit(),
            4096
        );
    }

    #[test]
    fn boundaries_and_odd_sizes_reduce_unit() {
        for (bytes, boundary, offset, unit) in [
            (0, 0, 0, 0),
            (12 << 10, 0, 0, 8 << 10),
            (1 << 40, 0, 0, MAX_ATOMIC_UNIT),
            (16 << 10, 16 << 10, 0, 16 << 10),
            (16 << 10, 24 << 10, 0, 8 << 10),
            (16 << 10, 64 << 10, 4 << 10, 4 << 10),
            (16 << 10, 64 << 10, 32 << 10, 16 << 10),
            // Without boundaries there is none that could be shifted.
            (16 << 10, 0, 512, 16 << 10),
        ] {
            let atomic = AtomicWrites::within(bytes, boundary, offset);
            assert_eq!(atomic.unit, unit, "{bytes} {boundary} {offset}");
        }
    }

    #[test]
    fn naturally_aligned_promise_covers_aligned_writes_only() {
        let atomic = AtomicWrites::naturally_aligned(4096, 16 << 10);
        for (offset, len, covered) in [
            (0, 4096, true),
            (8192, 8192, true),
            (16384, 16384, true),
            (4096, 8192, false),
            (0, 12288, false),
            (0, 2048, false),
            (0, 32768, false),
        ] {
            assert_eq!(atomic.covers(offset, len), covered, "{offset} {len}");
        }
        assert_eq!(atomic.unit_of_blocks(4096), 8192);
        assert_eq!(
            atomic.unit_of_blocks(512),
            0,
            "blocks are smaller than it takes"
        );
        assert_eq!(atomic.unit_of_blocks(16 << 10), 0);
        let one = AtomicWrites::naturally_aligned(4096, 4096);
        assert_eq!(one.unit_of_blocks(4096), 0);
        for nothing in [(8192, 4096), (1, 0), (u32::MAX, u32::MAX)] {
            let nothing = AtomicWrites::naturally_aligned(nothing.0, nothing.1);
            assert!(nothing.is_none());
        }
    }

    /// A promise for a part also holds for the whole, wherever the part begins.
    #[test]
    fn promise_of_part_holds_for_whole() {
        let kinds = [
            AtomicWrites::within(16 << 10, 0, 0),
            AtomicWrites::naturally_aligned(1024, 16 << 10),
        ];
        for whole in kinds {
            for begin in (0..=64 << 10).step_by(512) {
                let part = whole.from_byte(begin);
                for offset in (0..32 << 10).step_by(512) {
                    for len in (512..=16 << 10).step_by(512) {
                        let promised = part.covers(offset, len);
                        assert!(!promised || whole.covers(begin + offset, len));
                    }
                }
            }
            assert_eq!(whole.from_byte(1 << 20), whole);
        }
        assert_eq!(kinds[0].from_byte(4096).unit, 4096);
        assert!(kinds[1].from_byte(512).is_none());
    }
}
