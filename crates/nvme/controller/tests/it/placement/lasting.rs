//! What the next process finds.

use crate::common::*;
use crate::placement::host::*;
use nvme::{NvmOpcode, Status};
use placement::{EventSet, Placement, Writer, table};
use volume::{Effect, Fault, OpKind};

/// Writes in flight when the process dies are done by the next one, and counted once.
#[test]
fn writes_of_dead_process_are_counted_once() {
    let mut p = Placed::new();
    p.data.add(Fault::always(OpKind::Write, Effect::Hold));
    for id in 0..3 {
        let write = p.command(NvmOpcode::WRITE, u64::from(id) * 8, 8, PLACED, id);
        p.h.submit(1, write);
    }
    let faults = p.data.clone();
    p.h.run_held(&faults, 3);
    p.data.clear();
    p.h.die();
    assert_eq!(p.h.recovery.replayed, 3);
    let mut done = Vec::new();
    p.h.until(|h| {
        done.extend(h.reap_all(1));
        done.len() == 3
    });
    assert!(done.iter().all(|done| done.status().is_success()));
    assert_eq!(p.left(), [56, 56, 56]);
    assert_eq!(p.bytes(), (24 * 512, 24 * 512));
}

/// A process that begins anew finds all of it in the table.
#[test]
fn placement_survives_cold_start() {
    let pages = pages();
    let mut p = Placed::with(pages.clone());
    assert_eq!(p.set_events(1, 0, &[0, 3], true), Status::SUCCESS);
    assert_eq!(p.write(Some(77), 5), Status::SUCCESS);
    assert_eq!(p.write(Some(2), 70), Status::SUCCESS);
    assert_eq!(p.update(&[0]), Status::SUCCESS);
    assert_eq!(p.enable(1, false), Status::SUCCESS);
    let (events, left, bytes) = (p.events(), p.left(), p.bytes());
    assert_eq!((events.len(), left[2]), (2, 58));
    let mut p = Placed::with(pages);
    assert_eq!((p.left(), p.bytes()), (left, bytes));
    let again = p.events();
    let what = |event: &nvme::log::FdpEvent| (event.fdpet, event.pid, event.ruhid);
    assert!(again.iter().map(what).eq(events.iter().map(what)));
    assert_eq!(p.get_events(1, 0, 0, 0).unwrap().1[3], (3, 1));
    assert_eq!(p.directives(1), (5, 1, 4));
}

/// Random commands of a process that dies wherever it may. A write is not counted where the process
/// has died between its record and its count, and in all other cases once.
#[test]
fn random_commands_with_deaths_count_once() {
    const POINTS: [&str; 8] = [
        "controller.placement.recorded",
        "controller.placement.counted",
        "controller.placement.renewed",
        "controller.record.fields",
        "controller.record.written",
        "controller.record.removed",
        "controller.submit.submitted",
        "controller.post.posted",
    ];
    const UNCOUNTED: [&str; 2] = ["controller.placement.recorded", "controller.record.written"];
    let mut p = Placed::new();
    let identity = placement::Identity { namespace: [0; 16] };
    let model = Placement::new(GEOMETRY, table::empty(GEOMETRY, identity)).unwrap();
    let every = placement::SUPPORTED_EVENTS;
    let every = every
        .into_iter()
        .fold(EventSet::NONE, |all, ty| all.with(ty).unwrap());
    let types: Vec<u8> = placement::SUPPORTED_EVENTS.iter().map(|ty| ty.0).collect();
    for handle in 0..3 {
        assert_eq!(p.set_events(1, handle, &types, true), Status::SUCCESS);
        model.record_events(handle, every, true);
    }
    let (mut seed, mut lost, mut events) = (7u64, 0, 0);
    let mut random = |below: u64| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    for step in 0..3000u64 {
        match random(3) {
            0 => crash::arm(POINTS[random(8) as usize], random(2) + 1),
            1 => p.h.die(),
            _ => {}
        }
        let crashes = |p: &Placed| UNCOUNTED.map(|at| p.h.crashes.get(at).copied().unwrap_or(0));
        let (before, media) = (crashes(&p), model.media_bytes());
        let blocks = 1 + random(100);
        match random(4) {
            0 => {
                let handle = random(3) as u16;
                assert_eq!(p.update(&[handle]), Status::SUCCESS, "step {step}");
                events += u64::from(model.renew(handle).is_some());
            }
            1 => {
                let zeroes = p.command(NvmOpcode::WRITE_ZEROES, 0, blocks as u32, PLACED, 1);
                assert_eq!(plain(p.h.io(zeroes)), Status::SUCCESS, "step {step}");
                model.write(1, blocks, Writer::Host);
            }
            _ => {
                let id = (random(4) < 3).then(|| random(3) as u16);
                assert_eq!(p.write(id, blocks as u32), Status::SUCCESS, "step {step}");
                model.write(model.choose(id).handle, blocks, Writer::Host);
            }
        }
        crash::disarm();
        let written = model.media_bytes() - media;
        let (host, found) = p.bytes();
        assert_eq!(host, found);
        let missing = u128::from(model.media_bytes()) - found - lost;
        if missing > 0 {
            assert_ne!(crashes(&p), before, "step {step}");
            assert_eq!(missing, u128::from(written), "step {step}");
            lost += missing;
            // From here on both are alike again.
            for (handle, left) in (0..).zip(p.left()) {
                model.renew(handle);
                model.write(handle, GEOMETRY.unit - left, Writer::Controller);
                lost += u128::from(GEOMETRY.unit - left) * 512;
            }
            continue;
        }
        for (handle, left) in (0..).zip(p.left()) {
            assert_eq!(left, model.left(handle), "handle {handle}, step {step}");
        }
        assert_eq!(p.events().len() as u64, events.min(63), "step {step}");
    }
    for point in POINTS {
        let count = p.h.crashes.get(point);
        assert!(count.is_some_and(|n| *n > 2), "{point}: {:?}", p.h.crashes);
    }
    assert!(lost > 0);
}
