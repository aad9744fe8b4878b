//! Offsets of I/Os, and the data pattern for verification.

use crate::job::{Job, Rw};

/// Pseudorandom number generator SplitMix64: fast, and good enough to scatter I/O (Steele, Lea,
/// Flood: Fast splittable pseudorandom number generators).
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// Creates a generator; equal seeds give equal sequences.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next pseudo-random number, of 64 bits.
    #[inline]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a pseudo-random number below `n`; 0 if `n` is 0.
    #[inline]
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }
}

#[inline]
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Fills `data` with the pattern for `offset` of the target. Every 8 bytes depend on the seed and
/// on their own offset, so that stale or misplaced data is detected.
pub fn fill(data: &mut [u8], offset: u64, seed: u64) {
    for (i, word) in data.chunks_mut(8).enumerate() {
        let value = mix(seed ^ (offset + 8 * i as u64)).to_le_bytes();
        for (to, from) in word.iter_mut().zip(value) {
            *to = from;
        }
    }
}

/// Returns the offset in the target of the first 8 bytes that differ from the pattern of [`fill`].
pub(crate) fn check(data: &[u8], offset: u64, seed: u64) -> Option<u64> {
    data.chunks(8).enumerate().find_map(|(i, word)| {
        let at = offset + 8 * i as u64;
        let value = mix(seed ^ at).to_le_bytes();
        value.iter().zip(word).any(|(a, b)| a != b).then_some(at)
    })
}

/// Part of a target that one queue works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    /// Offset in bytes of the region's first byte in the target.
    pub start: u64,
    /// Number of blocks in the region, each of the job's I/O size.
    pub blocks: u64,
}

impl Region {
    /// Returns queue `index`'s part of a target of `size` bytes. Random I/O uses the whole target;
    /// sequential and verified I/O divides it, so that no queue overwrites another one's verified
    /// data.
    pub fn of(job: &Job, size: u64, index: u16) -> Region {
        let size = job.size.map_or(size, |extent| extent.of(size));
        let all = size / job.bs.max(1);
        if job.rw.is_random() && !job.verify {
            return Region {
                start: 0,
                blocks: all,
            };
        }
        let blocks = all / u64::from(job.queues.max(1));
        Region {
            start: u64::from(index) * blocks * job.bs,
            blocks,
        }
    }
}

/// Sequence of I/Os of one queue.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    random: Random,
    region: Region,
    bs: u64,
    rw: Rw,
    mix_read: u64,
    /// Next offsets of sequential reads, and of sequential writes or deallocations.
    next: [u64; 2],
}

/// An I/O that a job's sequence has generated: its direction and its place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PatternIo {
    /// Whether the I/O is a write, or a deallocation in a job that trims.
    pub write: bool,
    /// Index of the block in the region.
    pub block: u64,
    /// Offset in the target, in bytes.
    pub offset: u64,
}

impl Sequence {
    /// Creates the sequence of queue `index` on its region.
    pub fn new(job: &Job, region: Region, index: u16) -> Self {
        Self {
            random: Random::new(mix(job.seed ^ u64::from(index))),
            region,
            bs: job.bs,
            rw: job.rw,
            mix_read: u64::from(job.mix_read),
            next: [0; 2],
        }
    }

    /// Returns the next I/O of the queue.
    #[inline]
    pub fn step(&mut self) -> PatternIo {
        let write = match self.rw {
            Rw::Read | Rw::RandRead => false,
            Rw::Write | Rw::RandWrite | Rw::Trim | Rw::RandTrim => true,
            Rw::Mixed | Rw::RandMixed => self.random.below(100) >= self.mix_read,
        };
        let block = if self.rw.is_random() {
            self.random.below(self.region.blocks)
        } else {
            let [reads, others] = &mut self.next;
            let next = if write { others } else { reads };
            let block = *next;
            *next += 1;
            if *next >= self.region.blocks {
                *next = 0;
            }
            block
        };
        self.at(block, write)
    }

    /// Returns the I/O on a given block.
    pub fn at(&self, block: u64, write: bool) -> PatternIo {
        PatternIo {
            write,
            block,
            offset: self.region.start + block * self.bs,
        }
    }
}

/// Record of the blocks that a job has written, one bit for each block.
#[derive(Clone, Debug, Default)]
pub(crate) struct Written(Vec<u64>);

impl Written {
    /// Creates a record in which none of `blocks` blocks has been written.
    pub fn new(blocks: u64) -> Self {
        Self(vec![0; blocks.div_ceil(64) as usize])
    }

    /// Records that the block was written.
    pub fn set(&mut self, block: u64) {
        if let Some(word) = self.0.get_mut((block / 64) as usize) {
            *word |= 1 << (block % 64);
        }
    }

    /// Returns whether the block has been written.
    pub fn get(&self, block: u64) -> bool {
        let word = self.0.get((block / 64) as usize);
        word.is_some_and(|word| word >> (block % 64) & 1 == 1)
    }

    /// Returns the first written block from `from` on.
    pub fn next(&self, from: u64) -> Option<u64> {
        let mut index = (from / 64) as usize;
        let mut word = self.0.get(index)? & (u64::MAX << (from % 64));
        while word == 0 {
            index += 1;
            word = *self.0.get(index)?;
        }
        Some(index as u64 * 64 + u64::from(word.trailing_zeros()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_differ_by_place_and_seed() {
        let mut data = vec![0; 4097];
        fill(&mut data, 8192, 7);
        assert_eq!(check(&data, 8192, 7), None);
        assert_eq!(check(&data, 8192, 8), Some(8192), "another seed");
        assert_eq!(check(&data, 4096, 7), Some(4096), "another place");
        data[4096] ^= 1;
        assert_eq!(check(&data, 8192, 7), Some(8192 + 4096), "the last byte");
    }

    #[test]
    fn random_numbers_reach_every_block() {
        let mut random = Random::new(1);
        let mut seen = [0u32; 7];
        for _ in 0..7000 {
            seen[random.below(7) as usize] += 1;
        }
        assert!(seen.iter().all(|n| (800..1200).contains(n)), "{seen:?}");
        assert_eq!(random.below(0), 0);
    }

    #[test]
    fn sequential_queues_divide_target() {
        let job = Job {
            rw: Rw::Write,
            queues: 3,
            ..Job::default()
        };
        let size = 10 * 4096 + 100;
        let mut seen = Written::new(10);
        for index in 0..3 {
            let region = Region::of(&job, size, index);
            let mut sequence = Sequence::new(&job, region, index);
            for i in 0..4 {
                let step = sequence.step();
                assert!(step.write);
                assert_eq!(
                    seen.get(step.offset / 4096),
                    i == 3,
                    "the fourth is the first again"
                );
                seen.set(step.offset / 4096);
            }
        }
        assert_eq!((0..10).filter(|&b| seen.get(b)).count(), 9);
        assert_eq!(seen.next(0), Some(0));
        assert_eq!(seen.next(9), None);
    }

    /// Each direction continues at its own position, as in fio.
    #[test]
    fn sequential_mix_has_position_per_direction() {
        let job = Job {
            rw: Rw::Mixed,
            ..Job::default()
        };
        let mut sequence = Sequence::new(&job, Region::of(&job, 1 << 30, 0), 0);
        let (mut reads, mut writes) = (0, 0);
        for _ in 0..1000 {
            let step = sequence.step();
            let next = if step.write { &mut writes } else { &mut reads };
            assert_eq!(step.block, *next);
            *next += 1;
        }
        assert!(reads > 300 && writes > 300, "{reads} {writes}");
    }

    #[test]
    fn random_mix_matches_requested_share() {
        let job = Job {
            rw: Rw::RandMixed,
            mix_read: 70,
            ..Job::default()
        };
        let mut sequence = Sequence::new(&job, Region::of(&job, 1 << 30, 0), 0);
        let reads = (0..10_000).filter(|_| !sequence.step().write).count();
        assert!((6700..7300).contains(&reads), "{reads}");
    }
}
