//! A token bucket as a single number: the time until which its tokens are spent (the "virtual
//! scheduling" form of the generic cell rate algorithm, ITU-T I.371, annex A).
//!
//! A bucket of a rate spends `1 / rate` of time for each token. The spent time may lie ahead of now
//! by the burst; a request is let through as long as it does not, whatever its own size, so that a
//! request larger than the burst passes, and the next ones wait for it. One atomic number needs no
//! lock and gives the time of the next try.

use std::sync::atomic::{AtomicU64, Ordering};

/// Units of time in a nanosecond: fine enough for a byte at tens of gigabytes a second; 64 bits
/// hold nine years.
pub(super) const PER_NANOSECOND: u64 = 64;
/// Fraction bits of the cost of a token.
const FRACTION: u32 = 24;

/// A bucket of one rate.
#[derive(Debug, Default)]
pub(super) struct Bucket {
    /// Tokens per second, as it was set; 0: no limit.
    rate: AtomicU64,
    /// Time that a token costs, in units shifted left by [`FRACTION`]; 0: nothing.
    cost: AtomicU64,
    /// Until when the tokens are spent, in units since the handle was made.
    spent: AtomicU64,
}

impl Bucket {
    /// Sets the rate in tokens per second; tokens spent at the old rate are forgiven.
    pub(super) fn set(&self, rate: u64) {
        let second = u128::from(1_000_000_000 * PER_NANOSECOND) << FRACTION;
        let cost = match rate {
            0 => 0,
            rate => u64::try_from(second / u128::from(rate))
                .unwrap_or(u64::MAX)
                .max(1),
        };
        self.rate.store(rate, Ordering::Relaxed);
        self.spent.store(0, Ordering::Relaxed);
        self.cost.store(cost, Ordering::Relaxed);
    }

    /// Tokens per second; 0: no limit.
    pub(super) fn rate(&self) -> u64 {
        self.rate.load(Ordering::Relaxed)
    }

    /// Returns the time from which on a request may pass.
    pub(super) fn ready(&self, burst: u64) -> u64 {
        match self.cost.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.spent.load(Ordering::Relaxed).saturating_sub(burst),
        }
    }

    /// Spends tokens.
    pub(super) fn take(&self, now: u64, tokens: u64) {
        let cost = self.cost.load(Ordering::Relaxed);
        if cost == 0 {
            return;
        }
        let time = (u128::from(cost) * u128::from(tokens)) >> FRACTION;
        let time = u64::try_from(time).unwrap_or(u64::MAX);
        let spend = |spent: u64| Some(spent.max(now).saturating_add(time));
        // Another worker may spend at the same time: both count.
        let _ = self
            .spent
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend);
    }
}
