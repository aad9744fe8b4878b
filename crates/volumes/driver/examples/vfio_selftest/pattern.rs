//! Contents of blocks that reveal a missing, torn, stale or misplaced block: each 64-bit word of a
//! block is mixed from its address and from the block's version, which a model of the namespace
//! counts.

use crate::{Outcome, ensure};

/// A small generator of pseudo-random numbers (SplitMix64): the same sequence in every run.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The versions of a range of blocks. Version 0 is all zeroes.
pub struct Model {
    first: u64,
    versions: Vec<u32>,
    block_size: usize,
    writes: u32,
}

impl Model {
    pub fn new(first: u64, blocks: u64, block_size: u32) -> Model {
        Model {
            first,
            versions: vec![0; blocks as usize],
            block_size: block_size as usize,
            writes: 0,
        }
    }

    pub fn blocks(&self) -> u64 {
        self.versions.len() as u64
    }

    pub fn first(&self) -> u64 {
        self.first
    }

    fn slots(&mut self, lba: u64, blocks: u64) -> &mut [u32] {
        let start = (lba - self.first) as usize;
        &mut self.versions[start..start + blocks as usize]
    }

    /// Returns the data of a new version of some blocks.
    pub fn write(&mut self, lba: u64, blocks: u64) -> Vec<u8> {
        self.writes += 1;
        let version = self.writes;
        self.slots(lba, blocks).fill(version);
        self.expected(lba, blocks)
    }

    /// Marks blocks as zeroes.
    pub fn zero(&mut self, lba: u64, blocks: u64) {
        self.slots(lba, blocks).fill(0);
    }

    /// Returns the expected contents of some blocks.
    pub fn expected(&self, lba: u64, blocks: u64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(blocks as usize * self.block_size);
        for lba in lba..lba + blocks {
            let version = self.versions[(lba - self.first) as usize];
            for word in 0..self.block_size as u64 / 8 {
                let value = match version {
                    0 => 0,
                    v => mix(lba << 32 ^ u64::from(v) << 8 ^ word),
                };
                bytes.extend_from_slice(&value.to_le_bytes());
            }
        }
        bytes
    }

    /// Compares read data with the expected contents.
    pub fn check(&self, lba: u64, bytes: &[u8]) -> Outcome {
        let blocks = (bytes.len() / self.block_size) as u64;
        let expected = self.expected(lba, blocks);
        if expected == bytes {
            return Ok(());
        }
        let differs = expected.iter().zip(bytes).position(|(a, b)| a != b);
        let place = differs.map(|at| lba + (at / self.block_size) as u64);
        ensure(
            false,
            format!("{blocks} blocks at {lba}: block {place:?} holds something else"),
        )
    }
}
