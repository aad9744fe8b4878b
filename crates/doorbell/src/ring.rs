//! Ring indices and the wrapping comparison that decides whether a doorbell is rung.

/// Whether a host that moves a shadow doorbell from `old` to `new` has to ring the register, the way Linux decides it.
///
/// True exactly when `event_idx` lies in `old..new`, walking upwards modulo 65,536. The indices themselves wrap at the
/// ring's size, not at 65,536: a wrapping move (`new < old`) therefore covers `old..=65535` and `0..new`.
#[inline]
#[must_use]
pub const fn need_event(event_idx: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event_idx).wrapping_sub(1) < new.wrapping_sub(old)
}

/// The same decision as the algorithm in the annex of NVMe Base 2.1 (B.5.2): both differences modulo the queue's depth,
/// and the register is written when the first is not greater than the second.
///
/// It rings in one case more than [`need_event`]: when `new` is `event_idx` itself.
#[inline]
#[must_use]
pub const fn need_event_annex(event_idx: u16, new: u16, old: u16, size: u32) -> bool {
    distance(event_idx as u32, new as u32, size) <= distance(old as u32, new as u32, size)
}

/// Entries between two indices of a ring of `size` entries, walking upwards from `from` to `to`: `0..size`.
///
/// Indices at or beyond `size` and a `size` of zero give 0.
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

/// The index `n` entries after `i` in a ring of `size` entries. A `size` of zero gives 0.
#[inline]
#[must_use]
pub const fn advance(i: u32, n: u32, size: u32) -> u32 {
    if size == 0 {
        return 0;
    }
    ((i as u64 + n as u64) % size as u64) as u32
}

/// The index before `i`: where EventIdx is parked for a doorbell whose newest value is `i`.
#[inline]
#[must_use]
pub const fn before(i: u32, size: u32) -> u32 {
    if i == 0 {
        size.saturating_sub(1)
    } else {
        i - 1
    }
}
