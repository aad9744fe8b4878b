//! Fixed seeds, and tests of the simulation itself.

use crate::oracle::{Oracle, WriteEnd};
use crate::{Plan, format_steps, parse_steps, run, shrink};
use std::collections::BTreeMap;

/// Seeds of [`fixed_seeds_hold_every_property`], and the steps of each.
const SEEDS: std::ops::Range<u64> = 1..25;
const STEPS: u32 = 1500;

/// Events that the fixed seeds contain.
const EVENTS: &[&str] = &[
    "compare",
    "deallocate",
    "death at a crash point",
    "death between events",
    "doorbell register beside shadow",
    "fault ends",
    "fault: errors",
    "fault: gone",
    "fault: no space",
    "fault: silent",
    "fault: slow",
    "flush",
    "guest: abort",
    "guest: clean shutdown",
    "guest: controller enabled",
    "guest: controller reset",
    "guest: function reset",
    "guest: queue deleted",
    "hostile guest: action",
    "loss of power",
    "operator: limits changed",
    "operator: resume",
    "read",
    "recovery: command replayed",
    "recovery: completion was posted",
    "result: aborted",
    "result: error",
    "worker sleeps",
    "write",
    "write with FUA",
    "write zeroes",
];

#[test]
fn fixed_seeds_hold_every_property() {
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in SEEDS {
        let report = run(&Plan::new(seed, STEPS), false);
        assert_eq!(report.failure, None, "seed {seed}, {STEPS} steps");
        for (name, count) in report.counts {
            *counts.entry(name).or_default() += count;
        }
    }
    let missing = EVENTS.iter().filter(|event| !counts.contains_key(*event));
    let missing: Vec<_> = missing.collect();
    assert!(missing.is_empty(), "never: {missing:?}; {counts:?}");
}

#[test]
fn same_seed_has_same_trace() {
    let plan = Plan::new(7, STEPS);
    let (one, two) = (run(&plan, true), run(&plan, true));
    assert!(one.trace.lines().count() > 500);
    assert_eq!(one.trace, two.trace);
    assert_eq!(one.counts, two.counts);
    let other = run(&Plan::new(8, STEPS), true);
    assert_ne!(one.trace, other.trace);
}

#[test]
fn lying_disk_is_found_and_plan_is_reduced() {
    let plan = |seed| Plan {
        disks_lie: true,
        ..Plan::new(seed, 600)
    };
    let failing = (1..50)
        .map(plan)
        .find(|plan| run(plan, false).failure.is_some());
    let failing = failing.expect("flushed data is lost, and the oracle notices");
    let smaller = shrink(&failing, 60);
    assert!(smaller.steps.len() < failing.steps.len() / 2, "{smaller:?}");
    let failure = run(&smaller, false).failure.expect("it still fails");
    assert!(failure.contains("reads as"), "{failure}");
    assert_eq!(run(&smaller, false).failure, Some(failure));
}

#[test]
fn steps_are_written_and_read_as_ranges() {
    let steps = [0, 1, 2, 5, 7, 8];
    assert_eq!(format_steps(&steps), "0-2,5,7-8");
    assert_eq!(parse_steps("0-2,5,7-8").unwrap(), steps);
    assert!(parse_steps("").unwrap().is_empty());
    assert!(parse_steps("1-x").is_err());
}

#[test]
fn overlapping_writes_have_no_order() {
    let mut oracle = Oracle::new(2);
    let one = oracle.begin_write(0, &[1]);
    let two = oracle.begin_write(0, &[2]);
    oracle.end_write(one, 0, 1, WriteEnd::Done(false));
    oracle.end_write(two, 0, 1, WriteEnd::Done(false));
    let began = oracle.tick();
    assert!(oracle.may_be(0, 1, began) && oracle.may_be(0, 2, began));
    assert!(!oracle.may_be(0, 0, began));
    // The block keeps the content that a read has returned.
    oracle.check_read(0, 1, began).unwrap();
    let began = oracle.tick();
    assert!(oracle.check_read(0, 2, began).is_err());
    oracle.check_read(0, 1, began).unwrap();
}

#[test]
fn failed_write_leaves_either_content() {
    let mut oracle = Oracle::new(1);
    let write = oracle.begin_write(0, &[5]);
    oracle.end_write(write, 0, 1, WriteEnd::Unknown);
    let began = oracle.tick();
    assert!(oracle.may_be(0, 5, began) && oracle.may_be(0, 0, began));
    let write = oracle.begin_write(0, &[6]);
    oracle.end_write(write, 0, 1, WriteEnd::Done(false));
    let began = oracle.tick();
    assert!(oracle.may_be(0, 6, began) && !oracle.may_differ(0, 6, began));
}

#[test]
fn only_flushed_and_durable_writes_survive_loss_of_power() {
    let mut oracle = Oracle::new(3);
    for (lba, durable) in [(0, false), (1, true), (2, false)] {
        let write = oracle.begin_write(lba, &[9]);
        oracle.end_write(write, lba, 1, WriteEnd::Done(durable));
        if lba == 1 {
            // Covers what was completed before it.
            let began = oracle.tick();
            oracle.flushed(began);
        }
    }
    oracle.power_lost();
    let began = oracle.tick();
    let may_be_old = [0, 1, 2].map(|lba| oracle.may_be(lba, 0, began));
    assert_eq!(may_be_old, [false, false, true]);
    assert!((0..3).all(|lba| oracle.may_be(lba, 9, began)));
}

#[test]
fn flush_that_began_earlier_covers_no_later_write() {
    let mut oracle = Oracle::new(1);
    let flush = oracle.tick();
    let write = oracle.begin_write(0, &[9]);
    oracle.end_write(write, 0, 1, WriteEnd::Done(false));
    oracle.flushed(flush);
    oracle.power_lost();
    let began = oracle.tick();
    assert!(oracle.may_be(0, 0, began));
}
