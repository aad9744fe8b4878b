//! Ring indices and the wrapping comparisons that decide whether a doorbell is rung.
//!
//! # Silent positions of EventIdx
//!
//! Take a ring of `N` entries (`2 <= N <= 65,536`, indices `0..N`) and a host that moves its
//! doorbell from `old` to `new`, both indices. [`need_event`] is true exactly when EventIdx `e`
//! lies in `old..new`, walking upwards modulo 65,536:
//!
//! - `old < new`: rings when `old <= e < new`;
//! - `new < old` (the ring wraps): rings when `e >= old` or `e < new`, so it is silent
//!   only when `new <= e < old`;
//! - `new == old`: never rings.
//!
//! For `e < N` both moving cases are equivalent: *the host rings when it steps from index `e` to
//! the next one*. A host stays silent as long as it does not pass `e`, in any number of moves. Flow
//! control lets it advance at most `N - 1` entries beyond the newest value `c` that the controller
//! has seen, to `c - 1` modulo `N`. The step out of `e = c - 1` modulo `N` would be the `N`th.
//! Therefore:
//!
//! **[`before`]`(c)` keeps the host silent for every legal sequence of moves, wrapping or not,
//! until the controller has looked again.** For `c > 0` no other 16-bit value does: the move
//! straight to `c - 1` wraps and leaves only `c - 1 <= e < c`. (For `c == 0` no legal move wraps,
//! and every `e >= N - 1` is silent, [`before`]`(0) == N - 1` among them.) Values of `N` and above
//! never lie in `new..old`, so an all-ones "never" rings at every wrap; a value left behind rings
//! when the host passes it, once per `N` entries. `tests/it/arithmetic.rs` checks all of this
//! exhaustively for small rings and by random choice for big ones.
//!
//! The comparison of the standard's annex ([`need_event_annex`]) also rings when `new == e`; with
//! `e = c - 1` that is the one move that fills the ring to its last entry.

/// Returns whether a host that moves a shadow doorbell from `old` to `new` must ring the register,
/// by Linux's rule.
///
/// True exactly when `event_idx` lies in `old..new`, walking upwards modulo 65,536.
#[inline]
#[must_use]
pub const fn need_event(event_idx: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event_idx).wrapping_sub(1) < new.wrapping_sub(old)
}

/// Returns whether the host must ring by the example algorithm in the annex of NVMe Base 2.1 (B.5).
/// Both differences are taken modulo the queue's depth, and the register is written when the first
/// is not greater than the second.
///
/// Compared with [`need_event`] it rings in one more case: when `new` is `event_idx` itself.
#[inline]
#[must_use]
pub const fn need_event_annex(event_idx: u16, new: u16, old: u16, size: u32) -> bool {
    distance(event_idx as u32, new as u32, size) <= distance(old as u32, new as u32, size)
}

/// Returns the number of entries from `from` upwards to `to` in a ring of `size` entries:
/// `0..size`.
///
/// Indices at or beyond `size` give 0.
#[inline]
#[must_use]
pub const fn distance(from: u32, to: u32, size: u32) -> u32 {
    if from >= size || to >= size {
        0
    } else if to >= from {
        to - from
    } else {
        size - from + to
    }
}

/// Returns the index `n` entries after `i` in a ring of `size` entries. A `size` of zero gives 0.
#[inline]
#[must_use]
pub const fn advance(i: u32, n: u32, size: u32) -> u32 {
    if size == 0 {
        return 0;
    }
    // The remainder is below `size`, so it fits.
    ((i as u64 + n as u64) % size as u64) as u32
}

/// Returns the index before `i`: the parking position of EventIdx for a doorbell with newest value
/// `i`.
#[inline]
#[must_use]
pub const fn before(i: u32, size: u32) -> u32 {
    if i == 0 {
        size.saturating_sub(1)
    } else {
        i - 1
    }
}
