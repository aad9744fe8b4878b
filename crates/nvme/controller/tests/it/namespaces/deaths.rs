//! The process dies at every point of every step, and the next one continues: the host finds one
//! effect of each command, and one answer.

use super::*;
use std::collections::BTreeMap;

/// What each command has to lead to: those that are active, those that are allocated.
type Step = (fn(&mut Host) -> Status, &'static [u32], &'static [u32]);

fn created(h: &mut Host) -> Status {
    let (status, nsid) = create_of(h, &new(8));
    assert_eq!(nsid, if status.is_success() { 2 } else { 0 });
    status
}

const STEPS: [Step; 6] = [
    (created, &[1], &[1, 2]),
    (|h| attach(h, 2), &[1, 2], &[1, 2]),
    (|h| detach(h, 2), &[1], &[1, 2]),
    (|h| attach(h, 2), &[1, 2], &[1, 2]),
    (|h| delete(h, 2), &[1], &[1]),
    (created, &[1], &[1, 2]),
];

/// All steps, dying at `count`th passing of a point of step `at`.
fn history(at: usize, point: Option<(&'static str, u64)>) -> (u32, BTreeMap<&'static str, u64>) {
    let (mut h, pool) = host();
    let mut passed = BTreeMap::new();
    for (number, (step, active_then, allocated_then)) in STEPS.iter().enumerate() {
        match point {
            Some((name, count)) if number == at => crash::arm(name, count),
            _ => crash::disarm(),
        }
        assert_eq!(step(&mut h), Status::SUCCESS, "{number} {point:?}");
        if number == at {
            passed = crash::passed();
        }
        crash::disarm();
        for _ in 0..4 {
            h.round();
        }
        assert!(
            h.reap(0).is_none(),
            "{number} {point:?}: it is answered twice"
        );
        assert_eq!(active(&mut h), *active_then, "{number} {point:?}");
        assert_eq!(allocated(&mut h), *allocated_then, "{number} {point:?}");
        assert_eq!(pool.namespaces().len(), allocated_then.len() - 1);
        if active_then.contains(&2) {
            assert_eq!(put(&mut h, 2, 3, number as u8), Status::SUCCESS);
            h.die();
            assert_eq!(get(&mut h, 2, 3), vec![number as u8; 512]);
        }
        assert_eq!(h.c.deadline(), None, "{number} {point:?}");
    }
    (h.deaths, passed)
}

#[test]
fn command_takes_effect_once_with_death_at_every_point() {
    let mut points = 0;
    let mut names = std::collections::BTreeSet::new();
    for at in 0..STEPS.len() {
        let (quiet, passed) = history(at, None);
        for (name, count) in passed {
            for nth in 1..=count {
                let (deaths, _) = history(at, Some((name, nth)));
                assert!(deaths > quiet, "{name} {nth}");
                points += 1;
                names.insert(name);
            }
        }
    }
    for name in [
        "controller.pool.before",
        "controller.pool.changed",
        "controller.commit.after",
    ] {
        assert!(names.contains(name), "{name} {points}");
    }
}

/// The pool has not answered when the process dies; the next one asks again.
#[test]
fn next_process_repeats_pool_request() {
    for rounds in 0..12 {
        let (mut h, pool) = host();
        pool.holds.store(true, Ordering::Relaxed);
        let command = create_command(&h, &new(8));
        let first = h.submit(0, command);
        let second = h.submit(0, command);
        for _ in 0..rounds {
            h.round();
        }
        h.die();
        pool.holds.store(false, Ordering::Relaxed);
        let mut done = Vec::new();
        h.until(|h| {
            done.extend(h.reap_all(0));
            done.len() == 2
        });
        let results: Vec<_> = done.iter().map(|d| (d.cid.get(), d.dw0.get())).collect();
        assert_eq!(results, [(first, 2), (second, 3)], "{rounds}");
        assert_eq!(allocated(&mut h), [1, 2, 3], "{rounds}");
    }
}

/// All namespaces of a pool are to be deleted that has none, and the process dies.
#[test]
fn broadcast_delete_without_namespaces_survives_death() {
    for rounds in 0..8 {
        let pool = Arc::<TestPool>::default();
        let config = ControllerConfig {
            max_namespaces: 4,
            pool: Some(pool.clone()),
            ..Default::default()
        };
        let mut h = Host::with(config, Vec::new());
        h.enable();
        let cid = h.submit(0, delete_command(ALL));
        for _ in 0..rounds {
            h.round();
        }
        h.die();
        h.until(|h| h.peek(0).is_some());
        let done = h.reap(0).unwrap();
        let told = (done.cid.get(), done.status());
        assert_eq!(told, (cid, Status::SUCCESS), "{rounds}");
        assert_eq!(create_of(&mut h, &new(8)), (Status::SUCCESS, 1), "{rounds}");
    }
}

/// Commands are in flight on a namespace that is detached, and the process dies.
#[test]
fn commands_in_flight_end_before_detach_after_death() {
    for rounds in 0..12 {
        let (mut h, pool) = host();
        create(&mut h, 8);
        assert_eq!(attach(&mut h, 2), Status::SUCCESS);
        let faults = pool.faults(2);
        faults.add(Fault::always(OpKind::Write, Effect::Hold));
        h.write(DATA, &[0x5a; 512]);
        let write = h.rw(NvmOpcode::WRITE, 2, 5, 1, DATA);
        h.submit(1, write);
        h.run_held(&faults, 1);
        let list = ControllerList::from_iter([1]);
        let command = attachment_command(&h, 2, 1, list.as_bytes());
        let cid = h.submit(0, command);
        for _ in 0..rounds {
            h.round();
        }
        faults.clear();
        h.die();
        h.until(|h| h.peek(0).is_some());
        assert_eq!(h.reap(0).unwrap().cid.get(), cid);
        assert_eq!(h.reap(1).unwrap().status(), Status::SUCCESS, "{rounds}");
        assert_eq!(active(&mut h), [1]);
        assert_eq!(attach(&mut h, 2), Status::SUCCESS);
        assert_eq!(get(&mut h, 2, 5), vec![0x5a; 512]);
    }
}

/// A random history beside a model, with deaths and resets.
#[test]
fn random_histories_with_deaths_match_model() {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 11) % below
    };
    for _ in 0..8 {
        let (mut h, pool) = host();
        // By NSID: blocks, attached, what block 0 holds.
        let mut model: BTreeMap<u32, (u64, bool, u8)> = BTreeMap::new();
        for step in 0..150u32 {
            let nsid = 2 + random(3) as u32;
            let known = model.get(&nsid).copied();
            match random(8) {
                0 | 1 => {
                    let blocks = 1 + random(3000);
                    let used: u64 = model.values().map(|(blocks, ..)| blocks).sum();
                    let free = (2..=4).find(|nsid| !model.contains_key(nsid));
                    let (status, made) = create_of(&mut h, &new(blocks));
                    match free {
                        _ if used + blocks > CAPACITY / 512 => {
                            assert_eq!(plain(status), Status::NAMESPACE_INSUFFICIENT_CAPACITY);
                        }
                        None => assert_eq!(plain(status), Status::NAMESPACE_IDENTIFIER_UNAVAILABLE),
                        Some(nsid) => {
                            assert_eq!((status, made), (Status::SUCCESS, nsid), "{step}");
                            model.insert(nsid, (blocks, false, 0));
                        }
                    }
                }
                2 => {
                    let expected = known.map_or(Status::INVALID_FIELD, |_| Status::SUCCESS);
                    assert_eq!(plain(delete(&mut h, nsid)), expected, "{step}");
                    model.remove(&nsid);
                }
                3 => {
                    let expected = match known {
                        None => Status::INVALID_FIELD,
                        Some((_, true, _)) => Status::NAMESPACE_ALREADY_ATTACHED,
                        Some(_) => Status::SUCCESS,
                    };
                    assert_eq!(plain(attach(&mut h, nsid)), expected, "{step}");
                    model.entry(nsid).and_modify(|ns| ns.1 = true);
                }
                4 => {
                    let expected = match known {
                        None => Status::INVALID_FIELD,
                        Some((_, false, _)) => Status::NAMESPACE_NOT_ATTACHED,
                        Some(_) => Status::SUCCESS,
                    };
                    assert_eq!(plain(detach(&mut h, nsid)), expected, "{step}");
                    model.entry(nsid).and_modify(|ns| ns.1 = false);
                }
                5 => {
                    let expected = match known {
                        Some((_, true, _)) => Status::SUCCESS,
                        _ => Status::INVALID_FIELD,
                    };
                    let byte = random(256) as u8;
                    assert_eq!(plain(put(&mut h, nsid, 0, byte)), expected, "{step}");
                    if let Some((_, true, holds)) = model.get_mut(&nsid) {
                        *holds = byte;
                    }
                }
                6 => h.die(),
                _ => {
                    h.disable();
                    h.until(|h| !h.csts().rdy());
                    h.enable();
                    h.create_pair(1, 16);
                }
            }
            let shown = model.iter().filter(|(_, ns)| ns.1).map(|(nsid, _)| *nsid);
            let shown: Vec<u32> = [1].into_iter().chain(shown).collect();
            assert_eq!(active(&mut h), shown, "{step}");
            let all: Vec<u32> = [1].into_iter().chain(model.keys().copied()).collect();
            assert_eq!(allocated(&mut h), all, "{step}");
            let used: u64 = model.values().map(|(blocks, ..)| blocks * 512).sum();
            assert_eq!(pool.used(), used, "{step}");
            for (nsid, (blocks, attached, holds)) in &model {
                assert_eq!(identify_ns(&mut h, 0x11, *nsid).nsze.get(), *blocks);
                if *attached {
                    assert_eq!(get(&mut h, *nsid, 0), vec![*holds; 512], "{step}");
                }
            }
        }
    }
}
