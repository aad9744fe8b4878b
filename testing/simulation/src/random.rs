//! Random numbers of a step. Every step has a generator of its own, so that a plan without some of
//! its steps makes the same choices in the others.

use rand_core::{Rng, SeedableRng};
use rand_xorshift::XorShiftRng;

/// Generator of one step of a seed.
#[derive(Debug)]
pub struct Random(XorShiftRng);

impl Random {
    /// Creates the generator of a step.
    pub fn new(seed: u64, step: u64) -> Self {
        // An odd constant spreads the steps over the whole range of seeds.
        let mixed = seed ^ step.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self(XorShiftRng::seed_from_u64(mixed))
    }

    /// Returns a number below `n`; 0 when `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        let wide = u128::from(self.0.next_u64()) * u128::from(n);
        (wide >> 64) as u64
    }

    /// Returns any 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns `true` in one of `n` cases.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Returns an item of a slice; `None` when it is empty.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        items.get(self.below(items.len() as u64) as usize)
    }

    /// Returns an item with a probability in proportion to its weight; `None` when all are 0.
    pub fn weighted<T: Copy>(&mut self, items: &[(u64, T)]) -> Option<T> {
        let mut at = self.below(items.iter().map(|(weight, _)| weight).sum());
        items.iter().find_map(|(weight, item)| {
            if at < *weight {
                return Some(*item);
            }
            at -= weight;
            None
        })
    }
}
