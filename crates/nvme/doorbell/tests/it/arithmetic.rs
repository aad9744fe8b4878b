//! Exhaustive checks for small rings, and random ones for large rings, of the silent positions of
//! EventIdx that `doorbell::ring` documents.

use doorbell::ring::{advance, before, distance, need_event, need_event_annex};
use proptest::prelude::*;

/// Returns whether a host that steps upwards from `old` to `new`, modulo 65,536, steps out of `e`.
/// This is the definition in words.
fn steps_out_of(e: u16, new: u16, old: u16) -> bool {
    let mut at = old;
    while at != new {
        if at == e {
            return true;
        }
        at = at.wrapping_add(1);
    }
    false
}

/// Returns whether a host's move from `from` to `to` entries (at most `size - 1`) beyond the index
/// `base` rings.
fn move_rings(e: u32, base: u32, from: u32, to: u32, size: u32) -> bool {
    let (old, new) = (advance(base, from, size), advance(base, to, size));
    need_event(e as u16, new as u16, old as u16)
}

/// Returns whether any move that a host may make before the controller's next poll rings.
fn any_legal_move_rings(e: u32, seen: u32, size: u32) -> bool {
    (0..size).any(|from| (from + 1..size).any(|to| move_rings(e, seen, from, to, size)))
}

#[test]
fn need_event_matches_walk_from_old_to_new() {
    let values: Vec<u16> = (0..9).chain(60..66).chain(65_530..=65_535).collect();
    for &e in &values {
        for &new in &values {
            for &old in &values {
                assert_eq!(
                    need_event(e, new, old),
                    steps_out_of(e, new, old),
                    "e {e} new {new} old {old}"
                );
            }
        }
    }
}

#[test]
fn move_rings_when_leaving_eventidx() {
    for size in 2..24 {
        for e in 0..size {
            for old in 0..size {
                for n in 0..size {
                    let passes = (0..n).any(|k| advance(old, k, size) == e);
                    assert_eq!(
                        move_rings(e, old, 0, n, size),
                        passes,
                        "size {size} e {e} old {old} n {n}"
                    );
                }
            }
        }
    }
}

#[test]
fn parked_watch_behind_newest_value_is_silent() {
    for size in 2..40 {
        for seen in 0..size {
            assert!(
                !any_legal_move_rings(before(seen, size), seen, size),
                "size {size} seen {seen}"
            );
        }
    }
}

#[test]
fn only_parked_value_keeps_every_host_silent() {
    for size in 2..8 {
        for seen in 0..size {
            let silent: Vec<u32> = (0..=65_535)
                .filter(|&e| !any_legal_move_rings(e, seen, size))
                .collect();
            if seen == 0 {
                assert_eq!(
                    silent,
                    (size - 1..=65_535).collect::<Vec<_>>(),
                    "size {size}"
                );
            } else {
                assert_eq!(silent, [seen - 1], "size {size} seen {seen}");
            }
        }
    }
}

#[test]
fn stale_eventidx_rings_at_wrap_or_once_per_turn() {
    for size in 2..40_u32 {
        for e in [0xffff, size, size + 1] {
            let rings: Vec<u32> = (0..size)
                .filter(|&i| move_rings(e, i, 0, 1, size))
                .collect();
            assert_eq!(rings, [size - 1], "size {size} e {e}");
        }
        for e in 0..size {
            assert_eq!(
                (0..size).filter(|&i| move_rings(e, i, 0, 1, size)).count(),
                1
            );
        }
    }
}

#[test]
fn armed_watch_at_newest_value_rings_on_every_move() {
    for size in 2..40 {
        for seen in 0..size {
            for n in 1..size {
                let new = advance(seen, n, size);
                assert!(need_event(seen as u16, new as u16, seen as u16));
                assert!(need_event_annex(seen as u16, new as u16, seen as u16, size));
            }
        }
    }
}

#[test]
fn annex_rings_in_one_additional_case() {
    for size in 2..24 {
        for e in 0..size {
            for old in 0..size {
                for new in (0..size).filter(|&new| new != old) {
                    let [e, new, old] = [e, new, old].map(|v| v as u16);
                    assert_eq!(
                        need_event_annex(e, new, old, size),
                        need_event(e, new, old) || new == e
                    );
                }
            }
        }
    }
}

#[test]
fn ring_helpers_accept_any_value() {
    assert_eq!(advance(7, 9, 0), 0);
    assert_eq!(advance(u32::MAX, u32::MAX, u32::MAX), 0);
    assert_eq!(before(0, 0), 0);
    assert_eq!(distance(9, 3, 8), 0);
    assert_eq!(distance(0, 0, 0), 0);
}

proptest! {
    #[test]
    fn parked_big_rings_stay_silent(
        size in 2_u32..=65_536,
        seen in any::<u32>(),
        cuts in proptest::collection::vec(any::<u32>(), 1..6),
    ) {
        let seen = seen % size;
        let mut cuts: Vec<u32> = cuts.into_iter().map(|c| c % size).chain([0, size - 1]).collect();
        cuts.sort_unstable();
        let e = before(seen, size);
        for pair in cuts.windows(2) {
            prop_assert!(!move_rings(e, seen, pair[0], pair[1], size));
        }
        // And one entry more would ring: the place is exact.
        prop_assert!(move_rings(e, seen, size - 1, size, size));
    }

    #[test]
    fn armed_big_rings_ring(size in 2_u32..=65_536, seen in any::<u32>(), n in any::<u32>()) {
        let seen = seen % size;
        let n = 1 + n % (size - 1);
        prop_assert!(move_rings(seen, seen, 0, n, size));
    }

    #[test]
    fn distance_inverts_advance(size in 1_u32..=65_536, i in any::<u32>(), n in any::<u32>()) {
        let (i, n) = (i % size, n % size);
        prop_assert_eq!(distance(i, advance(i, n, size), size), n);
        prop_assert_eq!(advance(before(i, size), 1, size), i);
    }
}
