//! What is there when the process has died, or the controller was reset.

use super::*;
use std::collections::{BTreeMap, BTreeSet};

/// A format of both namespaces, in which the process dies at the `count`th passing of a point.
fn history(point: Option<(&'static str, u64)>) -> (u32, BTreeMap<&'static str, u64>) {
    let (mut h, one, three) = host();
    let before = h.deaths;
    match point {
        Some((name, count)) => crash::arm(name, count),
        None => crash::disarm(),
    }
    let cid = h.submit(0, format(ALL, 1));
    rest(&mut h);
    let passed = crash::passed();
    crash::disarm();
    let done = h.reap(0).unwrap();
    let end = (done.cid.get(), done.status());
    assert_eq!(end, (cid, Status::SUCCESS), "{point:?}");
    assert!(h.reap(0).is_none(), "{point:?}: it is answered twice");
    for _ in 0..2 {
        assert_eq!(
            (block(&mut h, 1), block(&mut h, 3)),
            (4096, 512),
            "{point:?}"
        );
        assert_eq!((one.store.kept(), three.store.kept()), (4096, 512));
        h.die();
        rest(&mut h);
    }
    assert!(is_zero(&one) && is_zero(&three), "{point:?}");
    for nsid in [1, 3] {
        fill(&mut h, nsid, 0xa5);
    }
    h.die();
    rest(&mut h);
    assert!(content(&one).iter().all(|byte| *byte == 0xa5));
    assert!(content(&three).iter().all(|byte| *byte == 0xa5));
    assert_eq!(h.c.deadline(), None, "{point:?}");
    (h.deaths - before, passed)
}

#[test]
fn format_takes_effect_with_death_at_every_point() {
    let (quiet, passed) = history(None);
    let mut names = BTreeSet::new();
    for (name, count) in passed {
        for nth in 1..=count {
            let (deaths, _) = history(Some((name, nth)));
            assert!(deaths > quiet, "{name} {nth}");
            names.insert(name);
        }
    }
    for name in [
        "controller.format.before",
        "controller.format.saved",
        "controller.format.open",
        "controller.commit.after",
    ] {
        assert!(names.contains(name), "{name}");
    }
}

/// What is written after the answer stays, wherever the process ends then.
#[test]
fn writes_after_block_size_change_survive_process() {
    for round in 0..40 {
        let (mut h, one, _) = host();
        h.submit(0, format(1, 1));
        let mut done = None;
        for _ in 0..round {
            h.round();
            done = done.or_else(|| h.reap(0));
        }
        if done.is_some() {
            assert_eq!(put(&mut h, 1, 7, 0xa5), Status::SUCCESS);
        }
        h.die();
        rest(&mut h);
        let again = h.reap(0);
        assert!(done.is_some() != again.is_some(), "{round}");
        let expected = if done.is_some() { 0xa5 } else { 0 };
        assert_eq!(get(&mut h, 1, 7), vec![expected; 4096], "{round}");
        assert_eq!(get(&mut h, 1, 6), vec![0; 4096], "{round}");
        assert_eq!(one.store.kept(), 4096);
    }
}

/// No process continues: a new controller has the one format, or the other on what is erased.
#[test]
fn new_controller_after_death_has_old_or_new_format() {
    let mut found = BTreeSet::new();
    for round in 0..24 {
        let (mut h, one, _) = host();
        h.submit(0, format(1, 1));
        for _ in 0..round {
            h.round();
        }
        let kept = one.store.kept();
        found.insert(kept);
        if kept == 4096 {
            assert!(is_zero(&one), "{round}: it counts before all is erased");
        }
        let config = NamespaceConfig {
            formats: Some(one.store.formats(512)),
            ..ns(1, one.volume.clone(), kept)
        };
        let mut h = Host::ready_with(vec![config]);
        assert_eq!(block(&mut h, 1), u64::from(kept));
        assert_eq!(h.admin(format(1, 0)).status(), Status::SUCCESS);
        assert!(is_zero(&one));
    }
    assert_eq!(found, BTreeSet::from([512, 4096]));
}

/// What counts is what is kept.
#[test]
fn format_and_reset_at_any_round_keep_stored_format() {
    let mut found = BTreeSet::new();
    for holds in [false, true] {
        for rounds in 0..24 {
            let (mut h, one, _) = host();
            if holds {
                one.store.hold();
            }
            h.submit(0, format(1, 1));
            for _ in 0..rounds {
                h.round();
            }
            reset(&mut h);
            one.store.release();
            rest(&mut h);
            assert!(h.reap(0).is_none(), "{rounds}: nobody waits any more");
            let size = block(&mut h, 1);
            assert_eq!(size, u64::from(one.store.kept()), "{rounds}");
            found.insert(size);
            fill(&mut h, 1, 0xa5);
            rest(&mut h);
            h.die();
            rest(&mut h);
            assert_eq!(size, u64::from(one.store.kept()), "{rounds}");
            assert_eq!(size, block(&mut h, 1), "{rounds}");
            assert!(content(&one).iter().all(|byte| *byte == 0xa5));
            assert_eq!(h.admin(format(1, 0)).status(), Status::SUCCESS);
            assert_eq!(block(&mut h, 1), 512);
        }
    }
    assert_eq!(found, BTreeSet::from([512, 4096]));
}

/// A reset, and then the end of the process, while it is being kept.
#[test]
fn unanswered_format_continues_in_next_process() {
    let (mut h, one, _) = host();
    one.store.hold();
    h.submit(0, format(1, 1));
    rest(&mut h);
    reset(&mut h);
    assert_eq!(plain(put(&mut h, 1, 0, 1)), Status::FORMAT_IN_PROGRESS);
    h.die();
    rest(&mut h);
    // The next one asks again, and the answer to the first is nobody's.
    assert_eq!(one.store.saves(), [4096, 4096]);
    one.store.release();
    rest(&mut h);
    assert!(h.reap(0).is_none());
    assert_eq!(get(&mut h, 1, 255), vec![0; 4096]);
}

/// A process that has kept the new format, and ends before it knows. The next one is reset before
/// all is erased again: marks are of the old blocks.
#[test]
fn next_process_drops_marks_of_old_format() {
    let (mut h, one, _) = host();
    let mark = h.rw(NvmOpcode::WRITE_UNCORRECTABLE, 1, 3, 1, DATA);
    assert_eq!(h.io(mark), Status::SUCCESS);
    one.store.hold();
    h.submit(0, format(1, 1));
    rest(&mut h);
    assert_eq!(one.store.kept(), 4096);
    h.die();
    reset(&mut h);
    one.store.release();
    rest(&mut h);
    assert_eq!(block(&mut h, 1), 4096);
    assert_eq!(one.store.saves(), [4096], "the reset has ended it");
    assert_eq!(get(&mut h, 1, 3), vec![0; 4096]);
}

/// The next process finds what is kept, whichever that is.
#[test]
fn next_process_learns_unknown_format() {
    // The format before: it is as if nothing had been asked for.
    let (mut h, one, _) = host();
    one.store.lose(true);
    one.store.fail(true);
    h.admin(format(1, 1));
    assert_eq!(plain(put(&mut h, 1, 0, 1)), Status::NAMESPACE_NOT_READY);
    h.die();
    rest(&mut h);
    assert_eq!(put(&mut h, 1, 2047, 1), Status::SUCCESS);
    // The new one: where the host waits for the answer yet, it is told that as well.
    for point in ["controller.format.open", "controller.format.saved"] {
        let (mut h, one, _) = host();
        h.set_feature(Fid::ASYNC_EVENT_CONFIG, 1 << 8);
        let mark = h.rw(NvmOpcode::WRITE_UNCORRECTABLE, 1, 3, 1, DATA);
        assert_eq!(h.io(mark), Status::SUCCESS);
        one.store.lose(true);
        let aer = Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0);
        h.submit(0, aer);
        crash::arm(point, 1);
        h.submit(0, format(1, 1));
        rest(&mut h);
        assert!(crash::passed().contains_key(point));
        crash::disarm();
        let ends: Vec<_> = h.reap_all(0).iter().map(|d| plain(d.status())).collect();
        let closed = plain(put(&mut h, 1, 255, 1)) == Status::NAMESPACE_NOT_READY;
        // Asked again, the store does not know it in this process either.
        assert_eq!(closed, point == "controller.format.saved");
        assert_eq!(ends, [Status::SUCCESS, Status::INTERNAL_ERROR], "{point}");
        let (_, changed) = h.log(Lid::CHANGED_NAMESPACE_LIST.0, 4096, 0, false);
        assert_eq!(changed[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(block(&mut h, 1), 4096);
        if !closed {
            assert_eq!(get(&mut h, 1, 3), vec![0; 4096]);
        }
    }
}
