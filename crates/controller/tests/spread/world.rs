//! A controller, its workers, and a host that knows what it waits for and what is on the volume.

use crate::common::*;
use crate::side::Side;
use controller::{Bell, ControllerConfig};
use dma::Prot;
use nvme::{AdminOpcode, NvmOpcode, Status};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::{Faults, Io, IoOptions};

/// Workers beside the controller's own.
pub const OTHERS: usize = 2;
pub const PAIRS: u16 = 4;
pub const ENTRIES: u32 = 16;
/// Places for data, a page each, in guest memory and on the volume.
pub const PLACES: u64 = 128;
/// The window that data lies in, over the same memory as `DATA`.
pub const WINDOW: u64 = 0x100_0000_0000;

/// A command that the host waits for.
pub struct Waiting {
    pub place: u64,
    /// What a read is to find.
    pub read: bool,
    /// What a write leaves.
    pub wrote: Option<Vec<u8>>,
}

pub struct World {
    pub h: Host,
    pub sides: Rc<RefCell<Vec<Side>>>,
    pub bell: Arc<Bell>,
    pub wakes: Arc<Count>,
    pub asleep: bool,
    pub faults: Arc<Faults>,
    pub waiting: BTreeMap<(u16, u16), Waiting>,
    /// What is on the volume.
    pub model: BTreeMap<u64, Vec<u8>>,
    pub used: BTreeSet<u64>,
    pub mapped: bool,
    pub seed: u64,
}

pub fn config(mapped: bool) -> ControllerConfig {
    ControllerConfig {
        mapped_doorbells: mapped,
        io_queues: 8,
        workers: 1 + OTHERS as u16,
        ..ControllerConfig::default()
    }
}

impl World {
    pub fn new(mapped: bool) -> World {
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
    pub fn up(&mut self) {
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

    pub fn random(&mut self) -> u64 {
        self.seed = self
            .seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.seed >> 33
    }

    /// A doorbell that is a message wakes the controller's worker, of course.
    pub fn ringing(&mut self, ring: impl FnOnce(&mut Host)) {
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

    pub fn wake_up(&mut self) {
        if std::mem::take(&mut self.asleep) {
            self.bell.awake();
            self.wakes.take();
        }
    }

    pub fn submit(&mut self, qid: u16, write: bool) {
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
    pub fn reap(&mut self, cqid: u16, most: usize) -> usize {
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
    pub fn forget(&mut self, place: u64) {
        // Not used again.
        self.used.insert(place);
    }

    pub fn step(&mut self, worker: usize, hear: bool) -> bool {
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
    pub fn step_any(&mut self) {
        let worker = self.random() as usize % (OTHERS + 1);
        let hear = !self.random().is_multiple_of(3);
        self.step(worker, hear);
    }

    pub fn sleep(&mut self, worker: usize) {
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
    pub fn settle(&mut self) {
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
    pub fn pass_time(&mut self) {
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
    pub fn finish(&mut self) {
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
    pub fn verify(&mut self) {
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
    pub fn wake_all(&mut self) {
        self.wake_up();
        for side in self.sides.borrow_mut().iter_mut() {
            side.wake_up();
        }
    }

    pub fn move_queue(&mut self, cqid: u16, worker: u16) -> bool {
        // Its owner is awake when it does so.
        self.wake_up();
        self.h.c.move_queue(cqid, worker)
    }

    pub fn worker_of(&self, cqid: u16) -> u16 {
        let queues = self.h.c.completion_queues();
        queues.iter().find(|(q, _)| *q == cqid).unwrap().1
    }

    /// Everything in guest memory that the controller could touch.
    pub fn memory(&self) -> Vec<u8> {
        let mut all = self.h.read(0, LOW_SIZE as usize);
        all.extend(self.h.read(DATA, PLACES as usize * 4096));
        all
    }

    /// Disables the controller in the middle of everything; afterwards it touches nothing. Then it is enabled again.
    pub fn reset(&mut self) {
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
    pub fn unmap(&mut self) {
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

    pub fn map(&mut self) {
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
    pub fn remake(&mut self, qid: u16) {
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
    pub fn abort(&mut self, nth: usize) {
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
