use super::*;
use std::collections::BTreeSet;

fn of(count: u16) -> Roster {
    let mut roster = Roster::default();
    (0..count).for_each(|owner| roster.insert(owner));
    roster
}

/// A round in which the front-ends of `busy` have work, which all others have not. Those that it
/// looked at.
fn round(roster: &mut Roster, busy: &[usize], now: Instant) -> Vec<usize> {
    let (mut seen, mut place) = (Vec::new(), 0);
    while let Some(at) = roster.hot_at(place) {
        seen.push(at);
        if busy.contains(&at) {
            roster.worked(place);
        } else if roster.was_quiet(place) {
            roster.cool(place, now);
            continue;
        }
        place += 1;
    }
    for _ in 0..roster.idle_share(0) {
        let at = roster.next_idle().unwrap();
        seen.push(at);
        if busy.contains(&at) {
            roster.wake(at as u16);
        }
    }
    roster.check();
    seen
}

impl Roster {
    /// Each front-end has one seat, and the borders are in order.
    fn check(&self) {
        assert!(self.hot <= self.awake && self.awake <= self.seats.len());
        let owners: BTreeSet<u16> = self.seats.iter().map(|seat| seat.owner).collect();
        assert_eq!(owners.len(), self.seats.len(), "{self:?}");
    }

    /// All but these are armed.
    fn lull(&mut self, busy: &[usize], now: Instant) {
        for _ in 0..=COOL_AFTER {
            round(self, busy, now);
        }
        while let Some(at) = self.arms_next(now + ARM_AFTER) {
            self.arm(at);
            self.check();
        }
    }
}

#[test]
fn without_a_hot_one_each_round_looks_at_all_that_are_awake() {
    let (mut roster, now) = (of(5), Instant::now());
    for round_number in 0..2 * COOL_AFTER {
        let mut seen = round(&mut roster, &[], now);
        seen.sort_unstable();
        // Twice in the round in which they cool.
        seen.dedup();
        assert_eq!(seen, [0, 1, 2, 3, 4], "{round_number}");
    }
    assert_eq!(roster.hot_count(), 0);
}

#[test]
fn idle_ones_are_looked_at_in_turn_and_found() {
    let (mut roster, now) = (of(40), Instant::now());
    for _ in 0..=COOL_AFTER {
        round(&mut roster, &[7], now);
    }
    assert_eq!(roster.hot_count(), 1);
    let mut seen = BTreeSet::new();
    for _ in 0..=IDLE_TURN {
        let looked = round(&mut roster, &[7], now);
        assert_eq!(looked[0], 7);
        assert!(looked.len() <= 3, "{looked:?}");
        seen.extend(looked);
    }
    assert_eq!(seen.len(), 40);
    // One of them gets work: it is hot within a turn.
    for _ in 0..=IDLE_TURN {
        round(&mut roster, &[7, 30], now);
    }
    assert_eq!(roster.hot().collect::<BTreeSet<_>>(), [7, 30].into());
}

#[test]
fn a_round_with_much_work_looks_at_all_idle_ones() {
    let (mut roster, now) = (of(9), Instant::now());
    for _ in 0..=COOL_AFTER {
        round(&mut roster, &[0], now);
    }
    assert_eq!(roster.idle_share(UNITS_PER_ROUND * IDLE_TURN as u32), 8);
    assert_eq!(roster.idle_share(u32::MAX), 8);
}

#[test]
fn of_many_idle_ones_most_are_armed_and_cost_nothing() {
    let (mut roster, now) = (of(200), Instant::now());
    assert_eq!(roster.arms_next(now + ARM_AFTER), None, "all are hot");
    roster.lull(&[3], now);
    assert_eq!(roster.hot_count(), 1);
    assert_eq!(roster.awake().count(), 1 + MOST_IDLE);
    assert_eq!(roster.armed_count(), 199 - MOST_IDLE);
    let looks: usize = (0..1600).map(|_| round(&mut roster, &[3], now).len()).sum();
    assert!(looks <= 1600 + 1600 / 4 + 1, "{looks}");
    // One wakes, and is looked at in the next round.
    let sleeper = roster.armed_at(roster.first_armed() + 50).unwrap();
    assert!(roster.is_armed(sleeper as u16));
    roster.wake(sleeper as u16);
    roster.check();
    assert!(!roster.is_armed(sleeper as u16));
    assert!(round(&mut roster, &[3], now).contains(&sleeper));
}

#[test]
fn those_that_wake_while_all_armed_ones_are_looked_at_hide_none() {
    let (mut roster, now) = (of(60), Instant::now());
    roster.lull(&[3], now);
    let armed = roster.armed_count();
    let (mut seen, mut place) = (BTreeSet::new(), roster.first_armed());
    while let Some(at) = roster.armed_at(place) {
        assert!(seen.insert(at), "{at} twice");
        if at % 3 == 0 {
            roster.wake(at as u16);
        }
        roster.check();
        place += 1;
    }
    assert_eq!(seen.len(), armed);
}

#[test]
fn they_come_and_go_in_any_part() {
    let (mut roster, now) = (of(40), Instant::now());
    roster.lull(&[3], now);
    let mut state = 88_172_645_463_325_252u64;
    let mut there: BTreeSet<u16> = (0..40).collect();
    for step in 0..10_000 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let owner = (state % 50) as u16;
        match state >> 32 & 3 {
            0 => {
                roster.insert(owner);
                there.insert(owner);
            }
            1 => {
                roster.remove(owner);
                there.remove(&owner);
            }
            2 => roster.wake(owner),
            _ => drop(round(&mut roster, &[3], now)),
        }
        roster.check();
        let seats: BTreeSet<u16> = roster.seats.iter().map(|seat| seat.owner).collect();
        assert_eq!(seats, there, "{step}");
        if step % 100 == 0 {
            roster.lull(&[3], now);
        }
    }
    roster.wake_all();
    assert_eq!(roster.hot_count(), there.len());
}
