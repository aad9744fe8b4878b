//! A token bucket as a single number: the time until which its tokens are spent (the "virtual
//! scheduling" form of the generic cell rate algorithm, ITU-T I.371, annex A).
//!
//! Each token costs `1 / rate` of time. The spent time may be ahead of the current time by at most
//! the burst; until then requests pass, whatever their size. So a request larger than the burst
//! passes, and the next ones wait for it. One atomic number needs no lock, and also tells when to
//! try again.

use std::sync::atomic::{AtomicU64, Ordering};

/// Units of time in a nanosecond: fine enough for one byte at tens of gigabytes per second, while
/// 64 bits hold nine years.
pub(super) const PER_NANOSECOND: u64 = 64;
/// Number of fraction bits in the time that a token costs.
const FRACTION: u32 = 24;

/// Token bucket that enforces one rate limit.
#[derive(Debug, Default)]
pub(super) struct Bucket {
    /// Rate limit in tokens per second; 0 for no limit.
    rate: AtomicU64,
    /// Time that a token costs, in units shifted left by [`FRACTION`]; 0: no limit.
    cost: AtomicU64,
    /// Time until which the tokens are spent, in units since the epoch.
    spent: AtomicU64,
}

impl Bucket {
    /// Sets the rate in tokens per second. Tokens spent at the old rate are forgiven.
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

    /// Returns the rate limit in tokens per second; 0 for no limit.
    pub(super) fn rate(&self) -> u64 {
        self.rate.load(Ordering::Relaxed)
    }

    /// Returns the time from which a request may pass; `burst` is the time by which tokens
    /// accumulate.
    pub(super) fn ready(&self, burst: u64) -> u64 {
        match self.cost.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.spent.load(Ordering::Relaxed).saturating_sub(burst),
        }
    }

    /// Spends `tokens` tokens at time `now`.
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
