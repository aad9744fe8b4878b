//! A controller, its workers, and a host that knows what it waits for and what is on the volume.

mod actions;
mod run;

use crate::common::*;
use crate::other_worker::{OtherWorker, wake_flag};
use crate::resize::Resizable;
use controller::ControllerConfig;
use dma::Prot;
use nvme::Status;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use volume::{Faults, Io, IoOptions, Volume};
use worker::WakeFlag;

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
    /// The namespace had its place when the command was submitted; none when it was resized since.
    pub inside: Option<bool>,
}

pub struct World {
    pub h: Host,
    pub others: Rc<RefCell<Vec<OtherWorker>>>,
    pub flag: Arc<WakeFlag>,
    pub wakes: Arc<Count>,
    pub asleep: bool,
    /// See [`OtherWorker::raced`].
    pub raced: bool,
    pub faults: Arc<Faults>,
    pub waiting: BTreeMap<(u16, u16), Waiting>,
    /// What is on the volume.
    pub model: BTreeMap<u64, Vec<u8>>,
    pub used: BTreeSet<u64>,
    pub mapped: bool,
    pub volume: Arc<Resizable>,
    /// Places that the namespace has.
    pub size: u64,
    pub seed: u64,
}

pub fn config(mapped: bool) -> ControllerConfig {
    ControllerConfig {
        mapped_doorbells: mapped,
        io_queues: 8,
        max_namespaces: 4,
        workers: 1 + OTHERS as u16,
        ..ControllerConfig::default()
    }
}

impl World {
    pub fn new(mapped: bool) -> World {
        let (volume, faults) = faulty(8 << 20);
        Self::on(Arc::new(Cached(volume)), faults, mapped)
    }

    /// Commands cannot be ended early.
    pub fn stubborn(mapped: bool) -> World {
        let (volume, faults) = faulty(8 << 20);
        Self::on(Arc::new(Stubborn(volume)), faults, mapped)
    }

    fn on(volume: Arc<dyn Volume>, faults: Arc<Faults>, mapped: bool) -> World {
        let volume = Arc::new(Resizable::new(volume, PLACES * 4096));
        let mut h = Host::with(config(mapped), vec![ns(1, volume.clone(), 512)]);
        let wakes = Arc::<Count>::default();
        let flag = wake_flag(&wakes);
        h.c.set_worker(0, flag.clone().into());
        let mut others = Vec::new();
        for worker in 1..=OTHERS as u16 {
            let wakes = Arc::<Count>::default();
            let flag = wake_flag(&wakes);
            let setup = h.c.remote_engine(worker, flag.clone().into()).unwrap();
            assert!(
                h.c.remote_engine(worker, flag.clone().into()).is_none(),
                "one for each"
            );
            assert_eq!(h.c.has_remote_engine(worker), None);
            let io = Rc::new(Io::new(IoOptions::default()));
            let engine = setup.open(10 + worker, &io).unwrap();
            assert_eq!(h.c.has_remote_engine(worker), Some(true));
            others.push(OtherWorker {
                engine,
                io,
                flag,
                wakes,
                asleep: false,
                raced: false,
            });
        }
        let others = Rc::new(RefCell::new(others));
        let (theirs, ours) = (others.clone(), flag.clone());
        h.beside = Some(Box::new(move |controller, now| {
            let mut worked = ours.take() && controller.drain_messages();
            for other in theirs.borrow_mut().iter_mut() {
                worked |= other.round(true, now);
            }
            worked
        }));
        let memory = h.high.clone();
        h.c.dma_map(WINDOW, PLACES * 4096, Some((memory, 0)), Prot::RW)
            .unwrap();
        let mut world = World {
            h,
            others,
            flag,
            wakes,
            asleep: false,
            raced: false,
            faults,
            waiting: BTreeMap::new(),
            model: BTreeMap::new(),
            used: BTreeSet::new(),
            mapped: true,
            volume,
            size: PLACES,
            seed: 1,
        };
        world.up();
        world
    }

    /// Enables the controller and makes the queues: a pair each, and one more submission queue on
    /// the first's completions.
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
}
