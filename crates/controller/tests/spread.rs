//! One controller's queues on several workers, all run by the test's thread in any order: whatever the host and the owner
//! do meanwhile, each command is executed once and completed once, and nothing touches memory that was taken back.

mod common;

use common::*;
use controller::{Bell, Branch, ControllerConfig};
use dma::Prot;
use nvme::cmd::admin::AbortResult;
use nvme::feature::Fid;
use nvme::regs::{Shn, Shst};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::{Effect, Fault, Faults, Io, IoOptions, OpKind};

/// Workers beside the controller's own.
const OTHERS: usize = 2;
const PAIRS: u16 = 4;
const ENTRIES: u32 = 16;
/// Places for data, a page each, in guest memory and on the volume.
const PLACES: u64 = 128;
/// The window that data lies in, over the same memory as `DATA`.
const WINDOW: u64 = 0x100_0000_0000;

/// A worker that is not the controller's.
struct Side {
    branch: Branch,
    io: Io,
    bell: Arc<Bell>,
    wakes: Arc<Count>,
    asleep: bool,
}

impl Side {
    fn wake_up(&mut self) {
        if std::mem::take(&mut self.asleep) {
            self.bell.awake();
            self.wakes.take();
        }
    }

    /// A round, unless it sleeps and nothing has woken it.
    fn round(&mut self, hear: bool, now: Instant) -> bool {
        if self.asleep {
            if self.wakes.take() == 0 {
                return false;
            }
            self.wake_up();
        }
        let mut worked = hear && self.bell.take() && self.branch.hear();
        worked |= self.branch.poll(now);
        self.io.flush();
        let mut done = Vec::new();
        self.io.poll(&mut |completion| done.push(completion));
        self.branch.poll_volumes(&mut done);
        worked |= !done.is_empty();
        for completion in done {
            self.branch.complete(completion);
        }
        worked
    }

    fn sleep(&mut self) {
        if self.asleep {
            return;
        }
        let mut raced = self.bell.doze();
        raced |= self.branch.needs_polling();
        raced |= self.branch.arm();
        raced |= self.branch.recheck();
        if raced {
            self.bell.awake();
        } else {
            self.asleep = true;
        }
    }
}

/// A command that the host waits for.
struct Waiting {
    place: u64,
    /// What a read is to find.
    read: bool,
    /// What a write leaves.
    wrote: Option<Vec<u8>>,
}

struct World {
    h: Host,
    sides: Rc<RefCell<Vec<Side>>>,
    bell: Arc<Bell>,
    wakes: Arc<Count>,
    asleep: bool,
    faults: Arc<Faults>,
    waiting: BTreeMap<(u16, u16), Waiting>,
    /// What is on the volume.
    model: BTreeMap<u64, Vec<u8>>,
    used: BTreeSet<u64>,
    mapped: bool,
    seed: u64,
}

fn config(mapped: bool) -> ControllerConfig {
    ControllerConfig {
        mapped_doorbells: mapped,
        io_queues: 8,
        workers: 1 + OTHERS as u16,
        ..ControllerConfig::default()
    }
}

impl World {
    fn new(mapped: bool) -> World {
        let (volume, faults) = faulty(8 << 20);
        let cached = Arc::new(Cached(volume));
        let mut h = Host::with(config(mapped), vec![ns(1, cached, 512)]);
        let wakes = Arc::<Count>::default();
        let bell = Arc::new(Bell::new(wakes.clone()));
        h.c.set_home(0, bell.clone());
        let mut sides = Vec::new();
        for worker in 1..=OTHERS as u16 {
            let wakes = Arc::<Count>::default();
            let bell = Arc::new(Bell::new(wakes.clone()));
            let seed = h.c.branch(worker, bell.clone()).unwrap();
            assert!(h.c.branch(worker, bell.clone()).is_none(), "one for each");
            assert_eq!(h.c.has_branch(worker), None);
            let io = Io::new(IoOptions::default());
            let branch = seed.open(10 + worker, &io).unwrap();
            assert_eq!(h.c.has_branch(worker), Some(true));
            sides.push(Side {
                branch,
                io,
                bell,
                wakes,
                asleep: false,
            });
        }
        let sides = Rc::new(RefCell::new(sides));
        let (theirs, ours) = (sides.clone(), bell.clone());
        h.beside = Some(Box::new(move |controller, now| {
            let mut worked = ours.take() && controller.hear();
            for side in theirs.borrow_mut().iter_mut() {
                worked |= side.round(true, now);
            }
            worked
        }));
        let memory = h.high.clone();
        h.c.dma_map(WINDOW, PLACES * 4096, Some((memory, 0)), Prot::RW)
            .unwrap();
        let mut world = World {
            h,
            sides,
            bell,
            wakes,
            asleep: false,
            faults,
            waiting: BTreeMap::new(),
            model: BTreeMap::new(),
            used: BTreeSet::new(),
            mapped: true,
            seed: 1,
        };
        world.up();
        world
    }

    /// Enables the controller and makes the queues: a pair each, and one more submission queue on the first's completions.
    fn up(&mut self) {
        self.h.enable();
        if !self.h.c.config().mapped_doorbells {
            assert_eq!(self.h.use_shadow(), Status::SUCCESS);
        }
        for qid in 1..=PAIRS {
            self.h.create_pair(qid, ENTRIES);
        }
        assert_eq!(self.h.create_sq(5, 1, ENTRIES, 0xa000), Status::SUCCESS);
        self.h.pairs.insert(5, Pair::new(0xa000, 0, ENTRIES));
    }

    fn random(&mut self) -> u64 {
        self.seed = self
            .seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.seed >> 33
    }

    /// A doorbell that is a message wakes the controller's worker, of course.
    fn ringing(&mut self, ring: impl FnOnce(&mut Host)) {
        let messages = |h: &Host| -> u64 {
            h.c.stats()
                .queues
                .iter()
                .map(|q| q.mmio_doorbells.get())
                .sum()
        };
        let before = messages(&self.h);
        ring(&mut self.h);
        if messages(&self.h) != before {
            self.wake_up();
        }
    }

    fn wake_up(&mut self) {
        if std::mem::take(&mut self.asleep) {
            self.bell.awake();
            self.wakes.take();
        }
    }

    fn submit(&mut self, qid: u16, write: bool) {
        let queued = self.waiting.keys().filter(|(q, _)| *q == qid).count();
        let Some(place) = (0..PLACES).find(|place| !self.used.contains(place)) else {
            return;
        };
        if queued as u32 >= ENTRIES - 1 || !self.h.pairs.contains_key(&qid) {
            return;
        }
        let opcode = if write {
            NvmOpcode::WRITE
        } else {
            NvmOpcode::READ
        };
        let command = self.h.rw(opcode, 1, place * 8, 8, WINDOW + place * 4096);
        let bytes = pattern(self.random(), 4096);
        self.h.write(DATA + place * 4096, &bytes);
        self.used.insert(place);
        let mut cid = 0;
        self.ringing(|h| cid = h.submit(qid, command));
        let waiting = Waiting {
            place,
            read: !write,
            wrote: write.then_some(bytes),
        };
        assert!(self.waiting.insert((qid, cid), waiting).is_none());
    }

    /// Takes completions of a completion queue, at most so many.
    fn reap(&mut self, cqid: u16, most: usize) -> usize {
        if !self.h.pairs.contains_key(&cqid) {
            return 0;
        }
        for reaped in 0..most {
            let mut found = None;
            self.ringing(|h| found = h.reap(cqid));
            let Some(completion) = found else {
                return reaped;
            };
            let key = (completion.sqid.get(), completion.cid.get());
            let Some(waiting) = self.waiting.remove(&key) else {
                panic!("{key:?} completed twice, or never asked for");
            };
            assert!(u32::from(completion.sqhd.get()) < ENTRIES);
            self.used.remove(&waiting.place);
            let status = completion.status();
            if status == Status::SUCCESS {
                if waiting.read {
                    let wanted = self.model.get(&waiting.place).cloned();
                    let found = self.h.read(DATA + waiting.place * 4096, 4096);
                    assert!(
                        found == wanted.unwrap_or(vec![0; 4096]),
                        "{key:?}: wrong data"
                    );
                } else if let Some(bytes) = waiting.wrote {
                    self.model.insert(waiting.place, bytes);
                }
                continue;
            }
            // Aborted, or its memory was not there; a write may have happened or not.
            let aborted = status.is(Status::ABORT_REQUESTED);
            assert!(
                aborted || status.is(Status::DATA_TRANSFER_ERROR),
                "{key:?}: {status}"
            );
            if waiting.wrote.is_some() {
                self.forget(waiting.place);
            }
        }
        most
    }

    /// Nobody knows what is in this place: it is read, behind the guest's back, when everything is at rest.
    fn forget(&mut self, place: u64) {
        // Not used again.
        self.used.insert(place);
    }

    fn step(&mut self, worker: usize, hear: bool) -> bool {
        if worker > 0 {
            let now = self.h.now;
            return self.sides.borrow_mut()[worker - 1].round(hear, now);
        }
        if self.asleep {
            if self.wakes.take() == 0 {
                return false;
            }
            self.wake_up();
        }
        let beside = self.h.beside.take();
        let mut worked = hear && self.bell.take() && self.h.c.hear();
        worked |= self.h.round();
        self.h.beside = beside;
        worked
    }

    /// Any worker makes a round, and may be late to hear what it was told.
    fn step_any(&mut self) {
        let worker = self.random() as usize % (OTHERS + 1);
        let hear = !self.random().is_multiple_of(3);
        self.step(worker, hear);
    }

    fn sleep(&mut self, worker: usize) {
        if worker > 0 {
            return self.sides.borrow_mut()[worker - 1].sleep();
        }
        if self.asleep {
            return;
        }
        let mut raced = self.bell.doze();
        raced |= self.h.c.needs_polling();
        raced |= self.h.c.arm();
        raced |= self.h.c.recheck();
        if raced {
            self.bell.awake();
        } else {
            self.asleep = true;
        }
    }

    /// Runs all workers until nothing moves. Who has nothing to do sleeps, and is not woken by this but by its time.
    fn settle(&mut self) {
        let mut idle = 0;
        while idle < 8 {
            let mut worked = false;
            for worker in 0..=OTHERS {
                let did = self.step(worker, true);
                if !did {
                    self.sleep(worker);
                }
                worked |= did;
            }
            idle = if worked { 0 } else { idle + 1 };
            if idle == 4 {
                self.pass_time();
            }
        }
    }

    /// Nothing moves: the next deadline comes.
    fn pass_time(&mut self) {
        let sides = self.sides.clone();
        let mut sides = sides.borrow_mut();
        let home = self.h.c.deadline();
        let next = sides
            .iter()
            .map(|side| side.branch.deadline())
            .chain([home]);
        let Some(next) = next.flatten().min() else {
            return;
        };
        self.h.now = self.h.now.max(next);
        for side in sides.iter_mut() {
            if side.branch.deadline().is_some_and(|at| at <= self.h.now) {
                side.wake_up();
            }
        }
        if home.is_some_and(|at| at <= self.h.now) {
            self.wake_up();
        }
    }

    /// Everything that was submitted comes to its end.
    fn finish(&mut self) {
        self.faults.clear();
        self.faults.release();
        if !self.mapped {
            self.map();
        }
        loop {
            self.settle();
            let reaped: usize = (1..=PAIRS).map(|cqid| self.reap(cqid, 1000)).sum();
            if reaped == 0 {
                break;
            }
        }
        let lost: Vec<_> = self.waiting.keys().collect();
        assert!(lost.is_empty(), "lost: {lost:?}");
    }

    /// What is on the volume is what was written, each place's last write last.
    fn verify(&mut self) {
        self.finish();
        let places: Vec<u64> = self.model.keys().copied().collect();
        for place in places {
            if self.used.contains(&place) {
                continue;
            }
            let command = self
                .h
                .rw(NvmOpcode::READ, 1, place * 8, 8, WINDOW + place * 4096);
            self.wake_all();
            assert_eq!(self.h.command(2, command).status(), Status::SUCCESS);
            let found = self.h.read(DATA + place * 4096, 4096);
            assert!(found == self.model[&place], "place {place}");
        }
    }

    /// Admin commands of the test wait by rounds of everything, and do not sleep.
    fn wake_all(&mut self) {
        self.wake_up();
        for side in self.sides.borrow_mut().iter_mut() {
            side.wake_up();
        }
    }

    fn move_queue(&mut self, cqid: u16, worker: u16) -> bool {
        // Its owner is awake when it does so.
        self.wake_up();
        self.h.c.move_queue(cqid, worker)
    }

    fn worker_of(&self, cqid: u16) -> u16 {
        let queues = self.h.c.completion_queues();
        queues.iter().find(|(q, _)| *q == cqid).unwrap().1
    }

    /// Everything in guest memory that the controller could touch.
    fn memory(&self) -> Vec<u8> {
        let mut all = self.h.read(0, LOW_SIZE as usize);
        all.extend(self.h.read(DATA, PLACES as usize * 4096));
        all
    }

    /// Disables the controller in the middle of everything; afterwards it touches nothing. Then it is enabled again.
    fn reset(&mut self) {
        self.wake_all();
        self.h.disable();
        let limit = Instant::now() + Duration::from_secs(10);
        for steps in 0.. {
            if !self.h.csts().rdy() {
                break;
            }
            if steps == 20 {
                self.faults.clear();
                self.faults.release();
            }
            self.step_any();
            assert!(Instant::now() < limit, "the reset does not end");
        }
        let memory = self.memory();
        self.faults.clear();
        self.faults.release();
        for _ in 0..40 {
            self.step_any();
        }
        assert!(self.memory() == memory, "memory touched after a reset");
        for ((..), waiting) in std::mem::take(&mut self.waiting) {
            self.used.remove(&waiting.place);
            if waiting.wrote.is_some() {
                self.forget(waiting.place);
            }
        }
        self.h.pairs.clear();
        self.up();
    }

    /// Takes the data's window away, in the middle of everything; after the answer nothing touches it.
    fn unmap(&mut self) {
        if !self.mapped {
            return;
        }
        self.wake_all();
        self.h.c.dma_unmap(WINDOW, PLACES * 4096).unwrap();
        let limit = Instant::now() + Duration::from_secs(10);
        for steps in 0.. {
            if self.h.c.dma_quiesced() {
                break;
            }
            if steps == 20 {
                self.faults.clear();
                self.faults.release();
            }
            self.step_any();
            assert!(Instant::now() < limit, "the unmap does not end");
        }
        self.mapped = false;
        let memory = self.h.read(DATA, PLACES as usize * 4096);
        self.faults.clear();
        self.faults.release();
        for _ in 0..40 {
            self.step_any();
        }
        let same = self.h.read(DATA, PLACES as usize * 4096) == memory;
        assert!(same, "memory touched after an unmap");
    }

    fn map(&mut self) {
        if self.mapped {
            return;
        }
        let memory = self.h.high.clone();
        self.h
            .c
            .dma_map(WINDOW, PLACES * 4096, Some((memory, 0)), Prot::RW)
            .unwrap();
        self.mapped = true;
        self.wake_all();
    }

    /// Deletes a pair, wherever it lives and whatever it does, and makes it again.
    fn remake(&mut self, qid: u16) {
        self.wake_all();
        self.faults.clear();
        self.faults.release();
        let sqs: Vec<u16> = if qid == 1 { vec![1, 5] } else { vec![qid] };
        for &sq in &sqs {
            assert_eq!(
                self.h.delete(AdminOpcode::DELETE_IO_SQ, sq),
                Status::SUCCESS
            );
        }
        assert_eq!(
            self.h.delete(AdminOpcode::DELETE_IO_CQ, qid),
            Status::SUCCESS
        );
        let gone: Vec<_> = self.waiting.keys().copied().collect();
        for key in gone.into_iter().filter(|(q, _)| sqs.contains(q)) {
            let waiting = self.waiting.remove(&key).unwrap();
            self.used.remove(&waiting.place);
            if waiting.wrote.is_some() {
                self.forget(waiting.place);
            }
        }
        self.h.create_pair(qid, ENTRIES);
        if qid == 1 {
            assert_eq!(self.h.create_sq(5, 1, ENTRIES, 0xa000), Status::SUCCESS);
            self.h.pairs.insert(5, Pair::new(0xa000, 0, ENTRIES));
        }
    }

    /// Aborts a command that may be anywhere.
    fn abort(&mut self, nth: usize) {
        // Those of the first completion queue, which two share, may have to wait for the host to make room there.
        let mut others = self.waiting.keys().filter(|(q, _)| ![1, 5].contains(q));
        let Some(&(sqid, cid)) = others.nth(nth) else {
            return;
        };
        self.wake_all();
        self.faults.clear();
        self.faults.release();
        let completion = self
            .h
            .simple(AdminOpcode::ABORT, u32::from(cid) << 16 | u32::from(sqid));
        assert_eq!(completion.status(), Status::SUCCESS);
    }
}

#[derive(Clone, Debug)]
enum Deed {
    Submit {
        qid: u16,
        write: bool,
        count: u8,
    },
    Reap {
        cqid: u16,
        most: u8,
    },
    Step {
        worker: usize,
        hear: bool,
        times: u8,
    },
    Sleep {
        worker: usize,
    },
    Move {
        cqid: u16,
        worker: u16,
    },
    Hold {
        nth: u64,
    },
    Release,
    Abort {
        nth: usize,
    },
    Remake {
        qid: u16,
    },
    Unmap,
    Map,
    Shadow,
    Feature {
        value: bool,
    },
    Reset,
}

fn deed() -> impl Strategy<Value = Deed> {
    let worker = 0..=OTHERS;
    prop_oneof![
        12 => (1..=5u16, any::<bool>(), 1..8u8).prop_map(|(qid, write, count)| Deed::Submit { qid, write, count }),
        8 => (1..=PAIRS, 1..20u8).prop_map(|(cqid, most)| Deed::Reap { cqid, most }),
        20 => (worker.clone(), prop::bool::weighted(0.8), 1..4u8)
            .prop_map(|(worker, hear, times)| Deed::Step { worker, hear, times }),
        6 => worker.prop_map(|worker| Deed::Sleep { worker }),
        10 => (1..=PAIRS, 0..=OTHERS as u16).prop_map(|(cqid, worker)| Deed::Move { cqid, worker }),
        2 => (1..6u64).prop_map(|nth| Deed::Hold { nth }),
        2 => Just(Deed::Release),
        1 => (0..40usize).prop_map(|nth| Deed::Abort { nth }),
        1 => (1..=PAIRS).prop_map(|qid| Deed::Remake { qid }),
        1 => Just(Deed::Unmap),
        1 => Just(Deed::Map),
        1 => Just(Deed::Shadow),
        1 => any::<bool>().prop_map(|value| Deed::Feature { value }),
        1 => Just(Deed::Reset),
    ]
}

fn play(mapped: bool, deeds: Vec<Deed>) {
    let mut w = World::new(mapped);
    for deed in deeds {
        match deed {
            Deed::Submit { qid, write, count } => (0..count).for_each(|_| w.submit(qid, write)),
            Deed::Reap { cqid, most } => {
                w.reap(cqid, most.into());
            }
            Deed::Step {
                worker,
                hear,
                times,
            } => (0..times).for_each(|_| {
                w.step(worker, hear);
            }),
            Deed::Sleep { worker } => w.sleep(worker),
            Deed::Move { cqid, worker } => {
                w.move_queue(cqid, worker);
            }
            Deed::Hold { nth } => w.faults.add(Fault::nth(OpKind::Any, nth, Effect::Hold)),
            Deed::Release => w.faults.release(),
            Deed::Abort { nth } => w.abort(nth),
            Deed::Remake { qid } => w.remake(qid),
            Deed::Unmap => w.unmap(),
            Deed::Map => w.map(),
            Deed::Shadow => {
                if w.h.ring == Ring::Shadow {
                    w.wake_all();
                    assert_eq!(w.h.configure_shadow(SHADOW, EVENTIDX), Status::SUCCESS);
                }
            }
            Deed::Feature { value } => {
                w.wake_all();
                w.faults.clear();
                w.faults.release();
                let completion = w.h.set_feature(Fid::VOLATILE_WRITE_CACHE, value.into());
                assert_eq!(completion.status(), Status::SUCCESS);
            }
            Deed::Reset => w.reset(),
        }
    }
    w.verify();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn every_command_is_done_once(mapped: bool, deeds in prop::collection::vec(deed(), 1..150)) {
        play(mapped, deeds);
    }
}

/// Entries that waited for room in a full completion queue, in a queue that is not looked at in every round: nothing tells
/// of them when there is room, but a look before the sleep.
#[test]
fn entries_that_waited_for_room_are_not_slept_over() {
    let submit = |qid, count| Deed::Submit {
        qid,
        write: false,
        count,
    };
    let reap = |cqid| Deed::Reap { cqid, most: 1 };
    let step = Deed::Step {
        worker: 0,
        hear: false,
        times: 1,
    };
    play(
        false,
        vec![
            submit(5, 7),
            submit(3, 1),
            submit(5, 1),
            submit(1, 2),
            step,
            Deed::Sleep { worker: 0 },
            submit(5, 6),
            reap(3),
            Deed::Remake { qid: 2 },
            reap(1),
            submit(5, 1),
            Deed::Feature { value: false },
        ],
    );
}

/// All queues but the first on other workers.
fn spread(w: &mut World) {
    for cqid in 2..=PAIRS {
        let worker = 1 + (cqid % OTHERS as u16);
        assert!(w.move_queue(cqid, worker));
        w.wake_all();
        w.h.run();
        assert_eq!(w.worker_of(cqid), worker);
    }
}

#[test]
fn a_queue_goes_round_all_workers_under_load() {
    let mut w = World::new(false);
    for turn in 0..60u16 {
        for qid in 1..=5 {
            (0..7).for_each(|_| w.submit(qid, turn % 2 == 0));
        }
        let (cqid, worker) = (1 + turn % PAIRS, (turn / PAIRS) % 3);
        if w.worker_of(cqid) != worker {
            assert!(w.move_queue(cqid, worker));
        }
        w.settle();
        assert_eq!(w.worker_of(cqid), worker);
        assert!(!w.h.c.is_moving());
        for cqid in 1..=PAIRS {
            w.reap(cqid, 1000);
        }
    }
    assert!(w.h.c.stats().moves.get() > 30);
    let stats = w.h.c.stats();
    let fetched: u64 = stats.queues[1..].iter().map(|q| q.commands.get()).sum();
    w.verify();
    assert_eq!(fetched, 60 * 5 * 7);
    assert_eq!(stats.queues[5].worker.get(), stats.queues[1].worker.get());
}

#[test]
fn a_queue_with_a_slow_command_stays() {
    let mut w = World::new(false);
    w.faults.add(Fault::nth(OpKind::Any, 1, Effect::Hold));
    w.submit(2, true);
    w.step(0, true);
    assert!(w.move_queue(2, 1));
    w.submit(2, true);
    for _ in 0..4 {
        w.step(0, true);
    }
    assert!(w.h.c.is_moving());
    assert!(!w.h.c.move_queue(3, 1), "one at a time");
    w.h.now += Duration::from_secs(1);
    w.step(0, true);
    assert!(!w.h.c.is_moving(), "called off");
    assert_eq!(w.worker_of(2), 0);
    w.verify();
    // The same from a branch.
    spread(&mut w);
    w.faults.add(Fault::nth(OpKind::Any, 1, Effect::Hold));
    w.submit(2, true);
    w.settle();
    assert!(w.move_queue(2, 0));
    w.h.now += Duration::from_secs(1);
    w.settle();
    assert!(!w.h.c.is_moving());
    assert_eq!(w.worker_of(2), 1);
    w.verify();
}

#[test]
fn an_unmap_waits_for_a_command_on_another_worker() {
    let mut w = World::new(true);
    spread(&mut w);
    w.faults.add(Fault::nth(OpKind::Any, 1, Effect::Hold));
    w.submit(2, false);
    let rounds = |w: &mut World| {
        for worker in (0..=OTHERS).cycle().take(100) {
            w.step(worker, true);
        }
    };
    rounds(&mut w);
    assert_eq!(w.faults.held(), 1);
    w.h.c.dma_unmap(WINDOW, PLACES * 4096).unwrap();
    rounds(&mut w);
    assert!(!w.h.c.dma_quiesced(), "the command is in flight");
    w.faults.release();
    rounds(&mut w);
    assert!(w.h.c.dma_quiesced());
}

#[test]
fn a_shutdown_flushes_on_every_worker() {
    let mut w = World::new(false);
    spread(&mut w);
    w.faults.add(Fault::nth(OpKind::Flush, 3, Effect::Hold));
    (1..=4).for_each(|qid| w.submit(qid, true));
    w.settle();
    w.h.shutdown(Shn::NORMAL);
    w.wake_up();
    for _ in 0..8 {
        (0..=OTHERS).for_each(|worker| {
            w.step(worker, true);
        });
    }
    assert_eq!(
        w.h.csts().shst(),
        Shst::OCCURRING,
        "one worker still flushes"
    );
    w.faults.release();
    w.settle();
    assert_eq!(w.h.csts().shst(), Shst::COMPLETE);
    // A reset afterwards, and everything begins again.
    w.reset();
    w.submit(3, true);
    w.verify();
}

#[test]
fn an_abort_finds_its_command_on_another_worker() {
    let mut w = World::new(false);
    spread(&mut w);
    w.faults.add(Fault::nth(OpKind::Any, 1, Effect::Hold));
    let command = w.h.rw(NvmOpcode::READ, 1, 0, 8, WINDOW);
    let cid = w.h.submit(2, command);
    w.wake_all();
    w.h.until(|h| h.c.stats().queues[2].commands.get() == 1);
    let abort = |w: &mut World, cid: u16| {
        let done = w.h.simple(AdminOpcode::ABORT, u32::from(cid) << 16 | 2);
        AbortResult::from_bits(done.dw0.get()).ianp()
    };
    assert!(abort(&mut w, cid + 100), "there is no such command");
    // The held request is cancelled, so that both end.
    assert!(!abort(&mut w, cid));
    w.h.run();
    let completion = w.h.reap(2).unwrap();
    assert!(completion.status().is(Status::ABORT_REQUESTED));
}

#[test]
fn errors_on_another_worker_are_in_the_error_log() {
    let mut w = World::new(false);
    spread(&mut w);
    w.wake_all();
    let command = Command::new(0x7f, 0, 1);
    for _ in 0..200 {
        let status = w.h.command(3, command).status();
        assert!(status.is(Status::INVALID_OPCODE), "{status}");
    }
    w.h.run();
    assert_eq!(w.h.c.stats().error_log_entries.get(), 200);
    // A doorbell outside its ring.
    w.h.ring_value(3, false, 999);
    w.h.run();
    w.submit(3, true);
    w.verify();
    w.wake_all();
    assert_eq!(w.h.c.stats().error_log_entries.get(), 201);
}

#[test]
fn the_pin_gathers_all_queues() {
    let mut w = World::new(false);
    spread(&mut w);
    let pin = Arc::<Count>::default();
    for vector in 0..w.h.c.vectors() {
        w.h.c.set_msix(vector, None);
    }
    w.h.c.set_intx(Some(pin.clone()));
    w.wake_all();
    w.h.run();
    assert!((2..=PAIRS).all(|cqid| w.worker_of(cqid) == 0));
    assert!(!w.h.c.move_queue(2, 1), "the pin is one worker's business");
    w.submit(2, true);
    w.settle();
    assert_eq!(pin.take(), 1);
    w.verify();
}

#[test]
fn interrupts_come_from_every_worker_and_wait_for_their_receivers() {
    let mut w = World::new(false);
    spread(&mut w);
    w.settle();
    w.h.quiet();
    for qid in 2..=PAIRS {
        w.submit(qid, true);
        w.settle();
        assert_eq!(w.h.vectors[usize::from(qid)].take(), 1, "queue {qid}");
    }
    w.h.c.set_msix(3, None);
    w.settle();
    w.submit(3, true);
    w.settle();
    let mut pba = [0; 1];
    w.h.c.bar0_read(controller::pci::MSIX_PBA_OFFSET, &mut pba);
    assert_eq!(pba[0], 1 << 3, "pending");
    let sink = w.h.vectors[3].clone();
    assert_eq!(sink.take(), 0);
    w.h.c.set_msix(3, Some(sink.clone()));
    w.settle();
    assert_eq!(sink.take(), 1);
    w.h.c.bar0_read(controller::pci::MSIX_PBA_OFFSET, &mut pba);
    assert_eq!(pba[0], 0);
    w.verify();
}

#[test]
fn a_disconnect_leaves_nothing_behind() {
    let mut w = World::new(true);
    spread(&mut w);
    (1..=4).for_each(|qid| w.submit(qid, false));
    w.step(1, true);
    w.h.c.disconnect();
    let limit = Instant::now() + Duration::from_secs(10);
    while w.h.c.is_resetting() {
        (0..=OTHERS).for_each(|worker| {
            w.step(worker, true);
        });
        assert!(Instant::now() < limit);
    }
    let memory = w.memory();
    w.settle();
    assert!(w.memory() == memory);
    assert!(w.h.c.completion_queues().is_empty());
}

#[test]
fn who_cannot_have_branches_has_none() {
    let mut h = Host::ready();
    let bell = Arc::new(Bell::new(Arc::<Count>::default()));
    assert!(h.c.branch(1, bell.clone()).is_none(), "no home yet");
    h.c.set_home(0, bell.clone());
    assert!(h.c.branch(1, bell).is_none(), "made for one worker");
    assert_eq!(h.c.has_branch(1), Some(false));
    assert!(!h.c.move_queue(1, 1));
    assert_eq!(h.c.completion_queues(), [(1, 0)]);
}
