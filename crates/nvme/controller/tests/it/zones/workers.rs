//! Queues on several workers: what they share of zones, and what the next process finds of it.

use crate::common::*;
use crate::zones::history::*;
use crate::zones::other_worker::wake_flag;
use crate::zones::team::*;
use crate::zones::world::*;
use nvme::cmd::zone::Zsa;
use nvme::{Command, NvmOpcode, Status};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use volume::{Budget, Effect, Fault, Faults, Io, IoOptions, OpKind};
use zones::{Geometry, Zones};

fn write(t: &Team, opcode: NvmOpcode, slba: u64, blocks: u32, number: u64) -> Command {
    writing(&t.z.h, opcode, slba, blocks, number)
}

/// Appends of all workers that are in flight together, each with a place and data of its own.
#[test]
fn concurrent_appends_of_workers_get_distinct_places() {
    let mut t = Team::new(GEOMETRY);
    t.z.data.add(Fault::always(OpKind::Write, Effect::Hold));
    let mut sent = Vec::new();
    for number in 0..9u64 {
        let (qid, blocks) = (number as u16 % PAIRS + 1, 1 + number as u32 % 4);
        t.z.h
            .write(place(number), &pattern(number, blocks as usize * 512));
        let append = write(&t, NvmOpcode::ZONE_APPEND, 64, blocks, number);
        sent.push((qid, t.z.h.submit(qid, append), number, blocks));
    }
    let faults = t.z.data.clone();
    t.z.h.run_held(&faults, 9);
    assert_eq!(t.z.kept().get(1).unwrap().written, 21);
    t.z.data.clear();
    t.z.data.release();
    let mut done = BTreeMap::new();
    t.z.h.until(|h| {
        for qid in 1..=PAIRS {
            let reaped = h.reap_all(qid);
            done.extend(reaped.iter().map(|d| ((qid, d.cid.get()), placed(d))));
        }
        done.len() == 9
    });
    let mut taken = [false; 21];
    for (qid, cid, seed, blocks) in sent {
        let at = done[&(qid, cid)].unwrap();
        assert_eq!(t.z.blocks(at, blocks), pattern(seed, blocks as usize * 512));
        for block in at..at + u64::from(blocks) {
            let taken = &mut taken[(block - 64) as usize];
            assert!(!std::mem::replace(taken, true), "{block} twice");
        }
    }
    assert_eq!(taken, [true; 21]);
    assert_eq!(t.z.states()[1], (IMPLICIT, 64 + 21));
}

/// A write that another worker's volume still has would overwrite data that is written after the
/// reset.
#[test]
fn zone_reset_waits_for_writes_of_other_workers() {
    for all in [false, true] {
        let mut t = Team::new(GEOMETRY);
        t.z.data.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
        t.z.h.write(place(0), &pattern(1, 8 * 512));
        let first = write(&t, NvmOpcode::WRITE, 0, 8, 0);
        t.z.h.submit(2, first);
        let faults = t.z.data.clone();
        t.z.h.run_held(&faults, 1);
        t.z.h.submit(3, send(Zsa::RESET, 0, all));
        t.rounds(50);
        assert!(t.z.h.peek(3).is_none(), "it has not waited");
        // Commands that arrive meanwhile are to be sent again, whichever worker receives them.
        for qid in 1..=2 {
            let refused = write(&t, NvmOpcode::WRITE, 8, 1, 1);
            let refused = [refused, send(Zsa::FINISH, 0, false)];
            for command in refused {
                let status = plain(t.command(qid, command).status());
                assert_eq!(status, Status::COMMAND_INTERRUPTED);
            }
        }
        let other = write(&t, NvmOpcode::WRITE, 64, 1, 1);
        assert_eq!(t.command(1, other).status(), Status::SUCCESS);
        t.z.data.release();
        assert_eq!(t.reap(2).status(), Status::SUCCESS);
        assert_eq!(t.reap(3).status(), Status::SUCCESS);
        assert_eq!(t.z.states()[0], (EMPTY, 0));
        assert_eq!(t.z.blocks(0, 8), vec![0; 8 * 512]);
    }
}

/// Zones that another worker has opened count, and give their places.
#[test]
fn zone_limits_are_shared_by_workers() {
    let mut t = Team::new(GEOMETRY);
    for (qid, zone) in [(1, 0), (2, 64)] {
        let open = send(Zsa::OPEN, zone, false);
        assert_eq!(t.command(qid, open).status(), Status::SUCCESS);
    }
    let third = write(&t, NvmOpcode::WRITE, 128, 1, 0);
    let refused = plain(t.command(3, third).status());
    assert_eq!(refused, Status::TOO_MANY_OPEN_ZONES);
    let close = send(Zsa::CLOSE, 0, false);
    assert_eq!(t.command(3, close).status(), Status::SUCCESS);
    assert_eq!(t.command(3, third).status(), Status::SUCCESS);
    let fourth = write(&t, NvmOpcode::WRITE, 192, 1, 0);
    let refused = plain(t.command(1, fourth).status());
    assert_eq!(refused, Status::TOO_MANY_ACTIVE_ZONES);
    let finish = send(Zsa::FINISH, 0, true);
    assert_eq!(t.command(1, finish).status(), Status::SUCCESS);
    for qid in [2, 3] {
        let full = write(&t, NvmOpcode::WRITE, 129, 1, 0);
        let refused = plain(t.command(qid, full).status());
        assert_eq!(refused, Status::ZONE_IS_FULL);
    }
    // Reads are refused by all as soon as one worker has taken a zone offline.
    let mut worn = zones::Zones::new(GEOMETRY).unwrap();
    worn.set_worn(5, false);
    let mut t = Team::with(GEOMETRY, worn);
    for qid in 1..=PAIRS {
        let read = write(&t, NvmOpcode::READ, 5 * 64, 1, 0);
        assert_eq!(t.command(qid, read).status(), Status::SUCCESS);
    }
    let offline = send(Zsa::OFFLINE, 5 * 64, false);
    assert_eq!(t.command(2, offline).status(), Status::SUCCESS);
    for qid in 1..=PAIRS {
        let read = write(&t, NvmOpcode::READ, 5 * 64 - 1, 2, 0);
        let refused = plain(t.command(qid, read).status());
        assert_eq!(refused, Status::ZONE_IS_OFFLINE);
    }
}

/// One worker's area is all workers': blocks in any order, and flushes under writes in flight.
#[test]
fn zrwa_is_shared_by_workers() {
    let mut t = Team::new(RANDOM);
    assert_eq!(t.z.open_with_zrwa(64), Status::SUCCESS);
    t.z.data.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
    t.z.h.write(place(0), &pattern(1, 4 * 512));
    let held = write(&t, NvmOpcode::WRITE, 64 + 4, 4, 0);
    t.z.h.submit(3, held);
    let faults = t.z.data.clone();
    t.z.h.run_held(&faults, 1);
    t.z.h.write(place(1), &pattern(2, 4 * 512));
    let first = write(&t, NvmOpcode::WRITE, 64, 4, 1);
    assert_eq!(t.command(2, first).status(), Status::SUCCESS);
    let flush = send(Zsa::FLUSH_ZRWA, 64 + 7, false);
    assert_eq!(t.command(1, flush).status(), Status::SUCCESS);
    let behind = plain(t.command(2, first).status());
    assert_eq!(behind, Status::ZONE_INVALID_WRITE);
    let again = open_with_zrwa(128);
    let refused = plain(t.command(2, again).status());
    assert_eq!(refused, Status::ZRWA_RESOURCES_UNAVAILABLE);
    t.z.data.release();
    assert_eq!(t.reap(3).status(), Status::SUCCESS);
    assert_eq!(t.z.states()[1], (EXPLICIT, 64 + 8));
    assert_eq!(t.z.blocks(64, 4), pattern(2, 4 * 512));
    assert_eq!(t.z.blocks(68, 4), pattern(1, 4 * 512));
}

/// What one worker makes durable is what all have written: words of the table are there before a
/// write completes.
#[test]
fn flush_covers_writes_of_all_workers() {
    let mut t = Team::new(GEOMETRY);
    t.z.file.add(Fault::always(OpKind::Flush, Effect::Hold));
    let first = write(&t, NvmOpcode::WRITE, 0, 3, 0);
    assert_eq!(t.command(2, first).status(), Status::SUCCESS);
    t.z.h.submit(3, Command::new(NvmOpcode::FLUSH.0, 0, 1));
    let faults = t.z.file.clone();
    t.z.h.run_held(&faults, 1);
    assert!(t.z.h.peek(3).is_none());
    assert_eq!(t.z.kept().get(0).unwrap().written, 3);
    t.z.file.release();
    assert_eq!(t.reap(3).status(), Status::SUCCESS);
}

/// What a worker has done to a zone after another one's action is not undone by that action's being
/// begun again in the next process.
#[test]
fn completed_zone_action_is_not_repeated_by_next_process() {
    for zsa in [Zsa::RESET, Zsa::FINISH] {
        let mut t = Team::new(GEOMETRY);
        t.z.h.write(place(0), &pattern(1, 8 * 512));
        let first = write(&t, NvmOpcode::WRITE, 0, 8, 0);
        assert_eq!(t.command(2, first).status(), Status::SUCCESS);
        // It is done, and waits for the table.
        t.z.file.add(Fault::nth(OpKind::Flush, 1, Effect::Hold));
        t.z.h.submit(3, send(zsa, 0, false));
        let faults = t.z.file.clone();
        t.z.h.run_held(&faults, 1);
        if zsa == Zsa::FINISH {
            let reset = send(Zsa::RESET, 0, false);
            assert_eq!(t.command(1, reset).status(), Status::SUCCESS);
        }
        t.z.h.write(place(0), &pattern(2, 8 * 512));
        assert_eq!(t.command(2, first).status(), Status::SUCCESS);
        t.z.file.clear();
        t.z.h.die();
        assert_eq!(t.z.h.recovery.replayed, 1, "{zsa}");
        assert_eq!(t.reap(3).status(), Status::SUCCESS);
        assert_eq!(t.z.states()[0], (IMPLICIT, 8), "{zsa}");
        assert_eq!(t.z.blocks(0, 8), pattern(2, 8 * 512), "{zsa}");
    }
}

/// The next process does not know which worker's command was first. A reset that waited for writes
/// waits for them again, whichever of them is begun first.
#[test]
fn repeated_zone_reset_waits_for_writes() {
    // In the order of each worker's own records the reset is the first, and the last.
    for (before, count) in [(2, 20), (3, 20)] {
        let mut t = Team::new(GEOMETRY);
        for number in 0..count {
            let other = write(&t, NvmOpcode::WRITE, 64 + number, 1, 0);
            assert_eq!(t.command(before, other).status(), Status::SUCCESS);
        }
        t.z.data.add(Fault::always(OpKind::Write, Effect::Hold));
        t.z.h.write(place(0), &pattern(1, 8 * 512));
        for (number, slba) in [(0, 0), (1, 8)] {
            let held = write(&t, NvmOpcode::WRITE, slba, 8, number);
            t.z.h.submit(2, held);
        }
        let faults = t.z.data.clone();
        t.z.h.run_held(&faults, 2);
        t.z.h.submit(3, send(Zsa::RESET, 0, false));
        t.rounds(50);
        t.z.data.clear();
        t.z.h.die();
        assert_eq!(t.z.h.recovery.replayed, 3);
        for qid in [2, 2, 3] {
            assert_eq!(t.reap(qid).status(), Status::SUCCESS);
        }
        assert_eq!(t.z.states()[0], (EMPTY, 0));
        assert_eq!(t.z.blocks(0, 16), vec![0; 16 * 512]);
    }
}

/// A reset of all is begun again when a zone is not empty any more that was so when it was taken:
/// it takes that one, too, when the write is over.
#[test]
fn repeated_reset_of_all_includes_written_zone() {
    let mut t = Team::new(GEOMETRY);
    let first = write(&t, NvmOpcode::WRITE, 64, 8, 0);
    assert_eq!(t.command(1, first).status(), Status::SUCCESS);
    t.z.data
        .add(Fault::nth(OpKind::WriteZeroes, 1, Effect::Hold));
    t.z.h.submit(3, send(Zsa::RESET, 0, true));
    let faults = t.z.data.clone();
    t.z.h.run_held(&faults, 1);
    t.z.data.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
    t.z.h.write(place(0), &pattern(1, 8 * 512));
    let other = write(&t, NvmOpcode::WRITE, 0, 8, 0);
    // Behind many others of its worker, so that the reset is begun again before it.
    for _ in 0..8 {
        let read = write(&t, NvmOpcode::READ, 0, 1, 1);
        assert_eq!(t.command(2, read).status(), Status::SUCCESS);
    }
    t.z.h.submit(2, other);
    t.z.h.run_held(&faults, 2);
    t.z.data.clear();
    t.z.h.die();
    assert_eq!(t.z.h.recovery.replayed, 2);
    for qid in [2, 3] {
        assert_eq!(t.reap(qid).status(), Status::SUCCESS);
    }
    assert_eq!(t.z.states()[..2], [(EMPTY, 0), (EMPTY, 64)]);
    assert_eq!(t.z.blocks(0, 72), vec![0; 72 * 512]);
}

/// Threads that append to the same zones at the same time.
#[test]
fn worker_threads_append_concurrently() {
    const COUNT: u64 = 8000;
    let geometry = Geometry {
        zones: 4,
        size: 1 << 20,
        capacity: 1 << 20,
        max_open: None,
        max_active: None,
        zrwa: None,
    };
    let state = zones::Zones::new(geometry).unwrap();
    let config = with_zones(ns(1, null(1 << 40), 512), state, None);
    let mut h = Host::with(Team::config(), vec![config]);
    let flag = wake_flag(&Arc::default());
    h.c.set_worker(0, flag.clone().into());
    let theirs = wake_flag(&Arc::default());
    let setup = h.c.remote_engine(1, theirs.clone().into()).unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    let their_end = ended.clone();
    let other = std::thread::spawn(move || {
        let io = Rc::new(Io::new(IoOptions::default()));
        let mut engine = setup.open(11, &io).unwrap();
        while !their_end.load(Ordering::Acquire) {
            if theirs.take() {
                engine.drain_messages();
            }
            engine.poll(Instant::now(), &mut Budget::unlimited());
            let mut done = Vec::new();
            engine.poll_volumes(&mut done);
            done.into_iter().for_each(|done| engine.complete(done));
        }
    });
    h.beside = Some(Box::new(move |controller, _| {
        flag.take() && controller.drain_messages()
    }));
    enable(&mut h);
    h.create_pair(2, 64);
    h.until(|h| h.c.has_remote_engine(1) == Some(true));
    assert!(h.c.migrate_queue(2, 1));
    h.until(|h| h.c.completion_queues().contains(&(2, 1)));
    let (mut sent, mut places) = ([0u64; 2], [vec![], vec![], vec![], vec![]]);
    let mut in_flight = [0u64; 2];
    h.until(|h| {
        for qid in 1..=2u16 {
            let queue = usize::from(qid) - 1;
            while in_flight[queue] < 40 && sent[queue] < COUNT {
                let zone = sent[queue] / 16 % 4;
                let append = h.rw(NvmOpcode::ZONE_APPEND, 1, zone << 20, 1, DATA);
                h.push(qid, append);
                (sent[queue], in_flight[queue]) = (sent[queue] + 1, in_flight[queue] + 1);
            }
            h.ring_sq(qid);
            for done in h.reap_all(qid) {
                let at = placed(&done).unwrap();
                places[(at >> 20) as usize].push(at & 0xf_ffff);
                in_flight[queue] -= 1;
            }
        }
        places.iter().map(Vec::len).sum::<usize>() as u64 == 2 * COUNT
    });
    ended.store(true, Ordering::Release);
    other.join().unwrap();
    for mut places in places {
        places.sort_unstable();
        let wanted: Vec<u64> = (0..places.len() as u64).collect();
        assert!(places == wanted, "a place twice, or none");
    }
}

// ---- histories

impl Served for Team {
    const QUEUES: u16 = PAIRS;

    fn host(&mut self, _: u16) -> &mut Host {
        &mut self.z.h
    }

    fn qid(queue: u16) -> u16 {
        queue
    }

    fn round(&mut self) {
        self.z.h.round();
    }

    fn kept(&self) -> Zones {
        self.z.kept()
    }

    fn check_states(&mut self) {
        self.z.states();
    }

    fn blocks(&mut self, slba: u64, blocks: u32) -> Vec<u8> {
        self.z.blocks(slba, blocks)
    }

    fn faults(&self) -> [Arc<Faults>; 2] {
        [self.z.data.clone(), self.z.file.clone()]
    }
}

const POINTS: [&str; 12] = [
    "controller.zone.recorded",
    "controller.zone.taken",
    "controller.zone.sent",
    "controller.zone.changed",
    "controller.zone.reset",
    "controller.record.applied",
    "controller.record.fields",
    "controller.record.written",
    "controller.record.posted",
    "controller.record.removed",
    "controller.submit.submitted",
    "controller.recover.replay",
];

/// Commands of a host with queues on three workers, many in flight, of processes that die wherever
/// they may.
#[test]
fn random_histories_of_workers_with_deaths_match_model() {
    let geometry = Geometry {
        max_open: Some(3),
        max_active: Some(3),
        ..GEOMETRY
    };
    let mut crashes: BTreeMap<&str, u32> = BTreeMap::new();
    let (mut deaths, mut successes) = (0, [0; 2]);
    for seed in 0..60u64 {
        let mut w = History::new(Team::new(geometry), geometry, seed);
        w.successes = successes;
        for _ in 0..6 {
            for _ in 0..80 {
                match w.random(100) {
                    0..40 => w.submit(),
                    40..80 => {
                        let worker = w.random(u64::from(OTHERS) + 1) as u16;
                        w.t.step(worker);
                    }
                    80..90 => w.reap(),
                    90..92 => {
                        let kinds = [OpKind::Write, OpKind::WriteZeroes];
                        let kind = kinds[w.random(2) as usize];
                        let nth = 1 + w.random(4);
                        w.t.z.data.add(Fault::nth(kind, nth, Effect::Hold));
                    }
                    92 => {
                        let nth = 1 + w.random(2);
                        w.t.z.file.add(Fault::nth(OpKind::Flush, nth, Effect::Hold));
                    }
                    93..95 => {
                        w.t.z.data.release();
                        w.t.z.file.release();
                    }
                    95..98 => {
                        let qid = w.random(u64::from(PAIRS)) as u16 + 1;
                        let worker = w.random(u64::from(OTHERS) + 1) as u16;
                        w.t.z.h.c.migrate_queue(qid, worker);
                    }
                    98 => {
                        let point = POINTS[w.random(POINTS.len() as u64) as usize];
                        crash::arm(point, w.random(6) + 1);
                        // The next one may die while it begins commands again.
                        crash::then("controller.recover.replay", w.random(3) + 1);
                    }
                    _ => w.t.z.h.die(),
                }
            }
            w.verify();
        }
        for (point, times) in &w.t.z.h.crashes {
            *crashes.entry(point).or_default() += times;
        }
        deaths += w.t.z.h.deaths;
        successes = w.successes;
    }
    println!("{deaths} deaths, {successes:?} writes and resets, {crashes:?}");
    assert!(deaths > 300 && successes[0] > 2000 && successes[1] > 300);
    for point in POINTS {
        assert!(crashes.get(point).is_some_and(|n| *n > 1), "{point}");
    }
}
