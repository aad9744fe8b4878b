use super::*;
use std::collections::BTreeSet;

fn of(count: u16) -> RunQueue {
    let mut run_queue = RunQueue::default();
    (0..count).for_each(|owner| run_queue.insert(owner));
    run_queue
}

/// Runs a round in which only the front-ends of `busy` have work. Returns the polled front-ends.
fn round(run_queue: &mut RunQueue, busy: &[usize], now: Instant) -> Vec<usize> {
    let (mut seen, mut place) = (Vec::new(), 0);
    while let Some(at) = run_queue.hot_at(place) {
        seen.push(at);
        if busy.contains(&at) {
            run_queue.worked(place);
        } else if run_queue.was_quiet(place) {
            run_queue.demote(place, now);
            continue;
        }
        place += 1;
    }
    for _ in 0..run_queue.idle_share(0) {
        let at = run_queue.next_idle().unwrap();
        seen.push(at);
        if busy.contains(&at) {
            run_queue.wake(at as u16);
        }
    }
    run_queue.check();
    seen
}

impl RunQueue {
    /// Checks that each front-end has one entry, and that the borders are in order.
    fn check(&self) {
        assert!(self.hot <= self.awake && self.awake <= self.entries.len());
        let owners: BTreeSet<u16> = self.entries.iter().map(|entry| entry.owner).collect();
        assert_eq!(owners.len(), self.entries.len(), "{self:?}");
    }

    /// Arms all front-ends except `busy`.
    fn lull(&mut self, busy: &[usize], now: Instant) {
        for _ in 0..=IDLE_AFTER {
            round(self, busy, now);
        }
        while let Some(at) = self.arms_next(now + ARM_AFTER) {
            self.arm(at);
            self.check();
        }
    }
}

#[test]
fn round_without_hot_front_end_polls_all_awake() {
    let (mut run_queue, now) = (of(5), Instant::now());
    for round_number in 0..2 * IDLE_AFTER {
        let mut seen = round(&mut run_queue, &[], now);
        seen.sort_unstable();
        // Front-ends are polled twice in the round that demotes them.
        seen.dedup();
        assert_eq!(seen, [0, 1, 2, 3, 4], "{round_number}");
    }
    assert_eq!(run_queue.hot_count(), 0);
}

#[test]
fn idle_front_ends_are_polled_in_turn() {
    let (mut run_queue, now) = (of(40), Instant::now());
    for _ in 0..=IDLE_AFTER {
        round(&mut run_queue, &[7], now);
    }
    assert_eq!(run_queue.hot_count(), 1);
    let mut seen = BTreeSet::new();
    for _ in 0..=IDLE_TURN {
        let looked = round(&mut run_queue, &[7], now);
        assert_eq!(looked[0], 7);
        assert!(looked.len() <= 3, "{looked:?}");
        seen.extend(looked);
    }
    assert_eq!(seen.len(), 40);
    // An idle front-end with new work is hot within a turn.
    for _ in 0..=IDLE_TURN {
        round(&mut run_queue, &[7, 30], now);
    }
    assert_eq!(run_queue.hot().collect::<BTreeSet<_>>(), [7, 30].into());
}

#[test]
fn long_round_polls_all_idle_front_ends() {
    let (mut run_queue, now) = (of(9), Instant::now());
    for _ in 0..=IDLE_AFTER {
        round(&mut run_queue, &[0], now);
    }
    assert_eq!(run_queue.idle_share(UNITS_PER_ROUND * IDLE_TURN as u32), 8);
    assert_eq!(run_queue.idle_share(u32::MAX), 8);
}

#[test]
fn most_of_many_idle_front_ends_are_armed() {
    let (mut run_queue, now) = (of(200), Instant::now());
    assert_eq!(run_queue.arms_next(now + ARM_AFTER), None, "all are hot");
    run_queue.lull(&[3], now);
    assert_eq!(run_queue.hot_count(), 1);
    assert_eq!(run_queue.awake().count(), 1 + MAX_IDLE);
    assert_eq!(run_queue.armed_count(), 199 - MAX_IDLE);
    let looks: usize = (0..1600)
        .map(|_| round(&mut run_queue, &[3], now).len())
        .sum();
    assert!(looks <= 1600 + 1600 / 4 + 1, "{looks}");
    // An armed front-end wakes, and is polled in the next round.
    let sleeper = run_queue.armed_at(run_queue.first_armed() + 50).unwrap();
    assert!(run_queue.is_armed(sleeper as u16));
    run_queue.wake(sleeper as u16);
    run_queue.check();
    assert!(!run_queue.is_armed(sleeper as u16));
    assert!(round(&mut run_queue, &[3], now).contains(&sleeper));
}

#[test]
fn armed_front_ends_waking_during_scan_hide_none() {
    let (mut run_queue, now) = (of(60), Instant::now());
    run_queue.lull(&[3], now);
    let armed = run_queue.armed_count();
    let (mut seen, mut place) = (BTreeSet::new(), run_queue.first_armed());
    while let Some(at) = run_queue.armed_at(place) {
        assert!(seen.insert(at), "{at} twice");
        if at % 3 == 0 {
            run_queue.wake(at as u16);
        }
        run_queue.check();
        place += 1;
    }
    assert_eq!(seen.len(), armed);
}

#[test]
fn front_ends_are_added_and_removed_in_any_state() {
    let (mut run_queue, now) = (of(40), Instant::now());
    run_queue.lull(&[3], now);
    let mut state = 88_172_645_463_325_252u64;
    let mut there: BTreeSet<u16> = (0..40).collect();
    for step in 0..10_000 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let owner = (state % 50) as u16;
        match state >> 32 & 3 {
            0 => {
                run_queue.insert(owner);
                there.insert(owner);
            }
            1 => {
                run_queue.remove(owner);
                there.remove(&owner);
            }
            2 => run_queue.wake(owner),
            _ => drop(round(&mut run_queue, &[3], now)),
        }
        run_queue.check();
        let entries: BTreeSet<u16> = run_queue.entries.iter().map(|entry| entry.owner).collect();
        assert_eq!(entries, there, "{step}");
        if step % 100 == 0 {
            run_queue.lull(&[3], now);
        }
    }
    run_queue.wake_all();
    assert_eq!(run_queue.hot_count(), there.len());
}
