//! Speed at which one core copies blocks out of a volume in memory, without any queue: the lower
//! bound for a command that moves data.

use crate::results::median;
use anyhow::{Context, Result, anyhow, ensure};
use dma::Memory;
use load::pin;
use std::time::{Duration, Instant};
use volume::{Io, IoOptions, MemVolume, Op, Volume};

/// Size of one copied block in bytes.
const BLOCK: u64 = 4096;
/// Number of destinations that blocks are copied to, in turn.
const PLACES: u64 = 32;
/// Number of blocks between two readings of the clock.
const ROUNDS: u64 = 512;

/// A completely written volume in memory, for repeated measurements.
pub struct Copying {
    volume: MemVolume,
    size: u64,
}

impl Copying {
    /// Creates the volume with `size` bytes, and writes all of it.
    pub fn new(size: u64) -> Result<Self> {
        let copying = Self {
            volume: MemVolume::new(size)?,
            size,
        };
        copying.run(|blocks, step| {
            (0..blocks).for_each(|block| step(Op::Write { fua: false }, block));
            0.0
        })?;
        Ok(copying)
    }

    /// Measures for about `span` how long `cpu` takes to copy one block at a random offset, in
    /// nanoseconds. The result is the median over short intervals.
    pub fn measure(&self, cpu: usize, span: Duration) -> Result<f64> {
        std::thread::scope(|scope| {
            let copying = scope.spawn(|| {
                pin(&[cpu], 0)?;
                self.run(|blocks, step| {
                    let (mut stretches, start) = (Vec::new(), Instant::now());
                    let mut state = 1u64;
                    while start.elapsed() < span {
                        let before = Instant::now();
                        for _ in 0..ROUNDS {
                            // Knuth's MMIX generator; its high bits are the random ones.
                            state = state
                                .wrapping_mul(6_364_136_223_846_793_005)
                                .wrapping_add(1_442_695_040_888_963_407);
                            step(Op::Read, (state >> 32) % blocks);
                        }
                        stretches.push(before.elapsed().as_nanos() as f64 / ROUNDS as f64);
                    }
                    median(&stretches)
                })
            });
            copying
                .join()
                .map_err(|_| anyhow!("copying ended by a bug"))?
        })
    }

    /// Calls `with` with the number of blocks, and a function that reads or writes one.
    fn run(&self, with: impl FnOnce(u64, &mut dyn FnMut(Op, u64)) -> f64) -> Result<f64> {
        let io = Io::new(IoOptions::default());
        let mut queue = self.volume.open(&io)?;
        let memory = Memory::anonymous((PLACES * BLOCK) as usize)?;
        let places = (0..PLACES).map(|place| {
            let list = memory.segments((place * BLOCK) as usize, BLOCK as usize);
            list.context("the memory is too short")
        });
        let places = places.collect::<Result<Vec<_>>>()?;
        let (mut done, mut failed) = (0, false);
        let nanos = with(self.size / BLOCK, &mut |op, block| {
            let place = places.get(done % places.len());
            done += 1;
            let moved = place.and_then(|place| queue.try_now(op, block * BLOCK, place.view()));
            failed |= !matches!(moved, Some(Ok(())));
        });
        ensure!(!failed, "a block was not copied");
        Ok(nanos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copying_is_measured() {
        let copying = Copying::new(4 << 20).unwrap();
        let nanos = copying.measure(0, Duration::from_millis(5)).unwrap();
        assert!(nanos > 1.0 && nanos < 1e7, "{nanos}");
        assert!(copying.measure(usize::MAX, Duration::ZERO).is_err());
    }
}
