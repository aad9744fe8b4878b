//! The process dies, at rest and at every crash point, under load: the next one continues, no
//! command is lost or completed twice, and the volume is what the host's model says.

use crate::migration::world::{OTHERS, PAIRS, World};
use nvme::Status;
use nvme::feature::Fid;
use std::collections::BTreeMap;
use volume::{Effect, Fault, OpKind};

/// Something that may happen, chosen by the world's own random numbers.
fn act(w: &mut World) {
    match w.random() % 100 {
        0..30 => {
            let (qid, write) = (w.random() % 5 + 1, w.random().is_multiple_of(2));
            for _ in 0..w.random() % 8 {
                w.submit(qid as u16, write);
            }
        }
        30..34 => {
            let qid = w.random() % 5 + 1;
            w.submit_other(qid as u16);
        }
        34..48 => {
            let (cqid, most) = (w.random() as u16 % PAIRS + 1, w.random() as usize % 20);
            w.reap(cqid, most);
        }
        48..80 => {
            for _ in 0..w.random() % 4 {
                w.step_any();
            }
        }
        80..83 => {
            let worker = w.random() as usize % (OTHERS + 1);
            w.sleep(worker);
        }
        83..89 => {
            let (cqid, worker) = (w.random() as u16 % PAIRS + 1, w.random() % 3);
            w.migrate_queue(cqid, worker as u16);
        }
        89..91 => {
            let nth = w.random() % 6 + 1;
            w.faults.add(Fault::nth(OpKind::Any, nth, Effect::Hold));
        }
        91 => {
            let count = w.random() % 3 + 1;
            w.volume.fail_next(count);
        }
        92 => w.faults.release(),
        93 => w.policy.resume(),
        94 => {
            let nth = w.random() as usize % 40;
            w.abort(nth);
        }
        95 => {
            let qid = w.random() as u16 % PAIRS + 1;
            w.remake(qid);
        }
        96 => match w.random() % 3 {
            0 => w.unmap(),
            _ => w.map(),
        },
        97 => match w.random() % 4 {
            0 => w.reset(),
            1 => w.stop_mastering(),
            _ => w.master(),
        },
        98 => {
            w.master();
            w.wake_all();
            w.relent();
            let on = w.random() as u32 % 2;
            let completion = w.h.set_feature(Fid::VOLATILE_WRITE_CACHE, on);
            assert!(completion.status() == Status::SUCCESS);
        }
        _ => {
            let places = w.random() % 32 + 1;
            w.resize(places);
        }
    }
}

/// How many deaths at each point the walk is to see: the variable `VNVME_DEATHS`.
fn wanted_deaths() -> u32 {
    let said = std::env::var("VNVME_DEATHS").ok();
    said.map_or(2, |said| said.parse().unwrap())
}

const WORLDS: [fn(bool) -> World; 3] = [World::new, World::stubborn, World::immediate];

fn world(seed: u64) -> World {
    println!("seed {seed}");
    let make = WORLDS[seed as usize % WORLDS.len()];
    let mut w = make((seed / 3).is_multiple_of(2));
    w.seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    w
}

#[test]
fn next_process_resumes_after_death_at_rest() {
    for seed in 0..60 {
        let mut w = world(seed);
        for _ in 0..120 {
            act(&mut w);
            if w.random().is_multiple_of(8) {
                w.h.die();
            }
        }
        assert!(w.h.deaths > 2);
        w.verify();
    }
}

/// Points that the walk must not miss.
const POINTS: [&str; 24] = [
    "controller.admin.fetched",
    "controller.admin.posted",
    "controller.answer.done",
    "controller.answer.posted",
    "controller.commit.after",
    "controller.commit.before",
    "controller.hot.before",
    "controller.hot.noted",
    "controller.post.posted",
    "controller.queue.noted",
    "controller.record.ended",
    "controller.record.fields",
    "controller.record.posted",
    "controller.record.removed",
    "controller.record.written",
    "controller.recover.cq",
    "controller.recover.replay",
    "controller.recover.sq",
    "controller.start.submitted",
    "controller.submit.submitted",
    "state-memory.control.head",
    "state-memory.control.published",
    "state-memory.control.written",
    "state-memory.table.removed",
];

/// Points of the next process.
const RECOVERY: [&str; 5] = [
    "controller.recover.cq",
    "controller.recover.posted",
    "controller.recover.replay",
    "controller.recover.sq",
    "controller.record.posted",
];

/// Every point that the histories pass, and how often.
fn points() -> BTreeMap<&'static str, u64> {
    let mut points = BTreeMap::new();
    for seed in 0..30 {
        let mut w = world(seed);
        crash::disarm();
        for _ in 0..100 {
            act(&mut w);
            if w.random().is_multiple_of(20) {
                w.h.die();
            }
        }
        w.verify();
        for (name, passed) in crash::passed() {
            *points.entry(name).or_default() += passed;
        }
    }
    crash::disarm();
    points
}

#[test]
fn next_process_resumes_after_death_at_any_point() {
    let (points, wanted) = (points(), wanted_deaths());
    for name in POINTS {
        assert!(points.contains_key(name), "{name} is never passed");
    }
    for (name, passed) in points {
        let (mut deaths, mut seed) = (0, 1000);
        while deaths < wanted {
            seed += 1;
            assert!(seed < 3000, "{name}: {deaths} deaths");
            crash::disarm();
            let mut w = world(seed);
            // Passed a few times between two deaths, as often as it is passed at all.
            let spread = (passed / 60).clamp(1, 200);
            for _ in 0..80 {
                if w.random().is_multiple_of(4) {
                    crash::arm(name, w.random() % spread + 1);
                    // The next one may die while it recovers.
                    let (at, after) = (w.random() as usize % RECOVERY.len(), w.random() % 4);
                    crash::then(RECOVERY[at], after);
                }
                if w.random().is_multiple_of(40) {
                    w.h.die();
                }
                act(&mut w);
            }
            w.verify();
            deaths += w.h.crashes.get(name).unwrap_or(&0);
        }
        crash::disarm();
        println!("{name}: {deaths} deaths in {} histories", seed - 1000);
    }
}
