//! Locks of a volume's units, shared by all workers.
//!
//! A write that is promised to be atomic has its unit for itself; all other requests share theirs
//! with each other. Units are counted by stripes: two that fall on the same one wait for each other
//! without need, and nothing worse.
//!
//! No call waits here. A request that does not get all of its stripes keeps those that it has and
//! asks again. It takes them in ascending order, and one that wants a unit for itself holds nothing
//! while it waits, so no two wait for each other.

use std::sync::atomic::{AtomicU32, Ordering};

const STRIPES: u64 = if cfg!(test) { 8 } else { 1024 };
/// Bit of a stripe's lock value: one request owns the stripe exclusively.
const OWNED: u32 = 1 << 31;
/// Bit of a stripe's lock value: a request waits to own the stripe. No further request may share
/// it.
const WANTED: u32 = 1 << 30;

/// Locks of all stripes. Each value is the number of requests that share the stripe, or [`OWNED`],
/// with [`WANTED`] added.
#[derive(Debug)]
pub(super) struct Locks {
    stripes: Box<[AtomicU32]>,
    unit_shift: u32,
}

/// Stripes that a request needs, and those of them that it has locked. [`Locks::release`] must be
/// called with it at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hold {
    /// Stripe of the first unit in the range; `count` is the number of consecutive units.
    first: u64,
    count: u64,
    owned: bool,
    /// Number of stripes that the request has locked so far, in ascending order.
    have: u64,
}

impl Hold {
    /// Locks of a request without a range, such as a flush: none are needed.
    pub(super) const NOTHING: Self = Self {
        first: 0,
        count: 0,
        owned: false,
        have: 0,
    };

    /// Returns the stripe that is locked at position `number` of the order of locking.
    fn stripe(&self, number: u64) -> u64 {
        if self.count == STRIPES {
            return number;
        }
        // Stripes behind the wrap-around are first: the order is ascending.
        let wrapped = (self.first + self.count).saturating_sub(STRIPES);
        match number.checked_sub(wrapped) {
            None => number,
            Some(number) => self.first + number,
        }
    }
}

impl Locks {
    /// Creates locks of a volume's write units of `unit` bytes, a power of two.
    pub(super) fn new(unit: u32) -> Self {
        Self {
            stripes: (0..STRIPES).map(|_| AtomicU32::new(0)).collect(),
            unit_shift: unit.trailing_zeros(),
        }
    }

    /// Returns an unlocked hold on the stripes of a request's range. `owned`: the request needs
    /// exclusive access to the unit in which its range lies.
    pub(super) fn hold(&self, offset: u64, len: u64, owned: bool) -> Hold {
        let first = offset >> self.unit_shift;
        let last = offset.saturating_add(len.saturating_sub(1)) >> self.unit_shift;
        let count = (last - first).saturating_add(1).min(STRIPES);
        Hold {
            first: first % STRIPES,
            count: if len == 0 { 0 } else { count },
            owned,
            have: 0,
        }
    }

    fn at(&self, hold: &Hold, number: u64) -> Option<&AtomicU32> {
        self.stripes.get(hold.stripe(number) as usize)
    }

    /// Takes the missing stripes as far as they are free. Returns whether the request has all of
    /// them.
    pub(super) fn take(&self, hold: &mut Hold) -> bool {
        while hold.have < hold.count {
            let Some(stripe) = self.at(hold, hold.have) else {
                return false;
            };
            let taken = if hold.owned {
                own(stripe)
            } else {
                share(stripe)
            };
            if !taken {
                return false;
            }
            hold.have += 1;
        }
        true
    }

    /// Releases the stripes that a request has locked, and its claim on those that it waits for.
    pub(super) fn release(&self, hold: Hold) {
        for number in 0..hold.have {
            if let Some(stripe) = self.at(&hold, number) {
                if hold.owned {
                    // A request that still wants the stripe sets the bit again.
                    stripe.fetch_and(!OWNED, Ordering::Release)
                } else {
                    stripe.fetch_sub(1, Ordering::Release)
                };
            }
        }
        if hold.owned
            && hold.have < hold.count
            && let Some(stripe) = self.at(&hold, hold.have)
        {
            stripe.fetch_and(!WANTED, Ordering::Release);
        }
    }
}

/// Locks a stripe in shared mode, unless a request owns it or waits to. Acquire and release
/// ordering: the previous holder's accesses are complete before the next holder's begin.
fn share(stripe: &AtomicU32) -> bool {
    let free = |state: u32| (state & (OWNED | WANTED) == 0).then_some(state + 1);
    let (taken, failed) = (Ordering::Acquire, Ordering::Relaxed);
    stripe.fetch_update(taken, failed, free).is_ok()
}

fn own(stripe: &AtomicU32) -> bool {
    let free = |state: u32| (state & !WANTED == 0).then_some(OWNED);
    let (taken, failed) = (Ordering::Acquire, Ordering::Relaxed);
    if stripe.fetch_update(taken, failed, free).is_ok() {
        return true;
    }
    stripe.fetch_or(WANTED, Ordering::Relaxed);
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: u64 = 16 << 10;

    fn free(locks: &Locks) -> bool {
        let state = |stripe: &AtomicU32| stripe.load(Ordering::Relaxed);
        locks.stripes.iter().all(|stripe| state(stripe) == 0)
    }

    #[test]
    fn owner_is_alone_in_unit() {
        let locks = Locks::new(UNIT as u32);
        let mut owner = locks.hold(UNIT + 512, 512, true);
        let mut reader = locks.hold(0, 4 * UNIT, false);
        let mut other = locks.hold(0, UNIT, false);
        assert!(locks.take(&mut owner));
        assert!(locks.take(&mut other), "another unit");
        assert!(!locks.take(&mut reader));
        let mut second = locks.hold(UNIT, UNIT, true);
        assert!(!locks.take(&mut second));
        locks.release(owner);
        // The second owner has marked the stripe as wanted, so no reader gets in before.
        assert!(!locks.take(&mut second) || second.have == 1);
        assert_eq!(second.have, 1);
        assert!(!locks.take(&mut reader));
        locks.release(second);
        assert!(locks.take(&mut reader));
        for hold in [reader, other] {
            locks.release(hold);
        }
        assert!(free(&locks));
    }

    #[test]
    fn waiting_owner_is_not_overtaken() {
        let locks = Locks::new(UNIT as u32);
        let (mut one, mut two) = (locks.hold(0, UNIT, false), locks.hold(0, UNIT, false));
        let mut owner = locks.hold(0, UNIT, true);
        assert!(locks.take(&mut one));
        assert!(!locks.take(&mut owner));
        assert!(!locks.take(&mut two), "a reader that came later");
        // The owner is cancelled: no request waits any more.
        locks.release(owner);
        assert!(locks.take(&mut two));
        locks.release(one);
        locks.release(two);
        assert!(free(&locks));
    }

    #[test]
    fn each_stripe_is_locked_once_in_order() {
        let locks = Locks::new(UNIT as u32);
        for first in 0..STRIPES {
            for units in 0..=STRIPES + 3 {
                let mut hold = locks.hold(first * UNIT, units * UNIT, false);
                let order: Vec<u64> = (0..hold.count).map(|n| hold.stripe(n)).collect();
                assert!(order.is_sorted_by(|a, b| a < b), "{order:?}");
                let wanted: std::collections::BTreeSet<u64> =
                    (first..first + units).map(|unit| unit % STRIPES).collect();
                assert!(order.iter().eq(&wanted), "{first} {units}: {order:?}");
                assert!(locks.take(&mut hold));
                locks.release(hold);
            }
        }
        assert!(free(&locks));
        let mut all = locks.hold(0, u64::MAX, false);
        assert!(locks.take(&mut all));
        locks.release(all);
        assert!(free(&locks));
    }
}
