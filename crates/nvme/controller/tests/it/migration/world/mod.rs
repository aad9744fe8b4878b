//! A controller, its workers, and a host that knows what it waits for and what is on the volume.

mod actions;
mod run;

use crate::common::*;
use crate::migration::other_worker::{OtherWorker, wake_flag};
use crate::migration::resize::Resizable;
use controller::ControllerConfig;
use dma::Prot;
use nvme::Status;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use volume::{ErrorAction, Faults, Io, IoOptions, OnError, OnErrorHandle, OnErrorVolume, Volume};
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
    /// It marks the place by Write Uncorrectable.
    pub marks: bool,
    /// It ends with Unrecovered Read Error where the place is marked.
    pub reads: bool,
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
    /// Places that Write Uncorrectable has marked.
    pub marked: BTreeSet<u64>,
    pub used: BTreeSet<u64>,
    /// Used places with unknown content.
    pub forgotten: BTreeSet<u64>,
    pub mapped: bool,
    pub volume: Arc<Resizable>,
    /// Requests that fail wait until the volume is resumed.
    pub policy: OnErrorHandle,
    /// Places that the namespace has.
    pub size: u64,
    pub seed: u64,
    /// Deaths of the process that the worker has noticed: it is awake then.
    pub noticed: u32,
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

/// Makes the controller's other workers, and a remote engine for each.
fn other_workers(h: &mut Host, flag: &Arc<WakeFlag>) -> Vec<OtherWorker> {
    h.c.set_worker(0, flag.clone().into());
    let mut others = Vec::new();
    for worker in 1..=OTHERS as u16 {
        let wakes = Arc::<Count>::default();
        let flag = wake_flag(&wakes);
        // Commands of the process before may be in its records' place for a while.
        let Some(setup) = h.c.remote_engine(worker, flag.clone().into()) else {
            assert!(h.deaths > 0);
            break;
        };
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
    others
}

/// When the process dies, what was given to the volume is done or is not; all workers die with it.
fn dying(
    others: &Rc<RefCell<Vec<OtherWorker>>>,
    flag: &Arc<WakeFlag>,
    faults: &Arc<Faults>,
    policy: &OnErrorHandle,
) -> Dying {
    let (others, flag) = (others.clone(), flag.clone());
    let (faults, policy) = (faults.clone(), policy.clone());
    Box::new(move |h, before| {
        if !before {
            let made = other_workers(h, &flag);
            *others.borrow_mut() = made;
            return;
        }
        if h.deaths % 2 == 0 {
            faults.release();
            policy.resume();
            let mut done = Vec::new();
            h.c.poll_volumes(&mut done);
            for other in others.borrow_mut().iter_mut() {
                other.engine.poll_volumes(&mut done);
            }
        }
        others.borrow_mut().clear();
    })
}

impl World {
    pub fn new(mapped: bool) -> World {
        let (volume, faults) = faulty(8 << 20);
        Self::on(cached(volume), faults, mapped)
    }

    /// Commands cannot be ended early.
    pub fn stubborn(mapped: bool) -> World {
        let (volume, faults) = faulty(8 << 20);
        Self::on(stubborn(volume), faults, mapped)
    }

    /// The volume answers within the call, nearly always.
    pub fn immediate(mapped: bool) -> World {
        let (_, faults) = faulty(4096);
        Self::on(mem(8 << 20), faults, mapped)
    }

    fn on(volume: Arc<dyn Volume>, faults: Arc<Faults>, mapped: bool) -> World {
        let volume = Arc::new(Resizable::new(volume, PLACES * 4096));
        let stop = OnError {
            read: ErrorAction::Stop,
            write: ErrorAction::Stop,
        };
        let served = OnErrorVolume::new(volume.clone(), stop, "test");
        let policy = served.handle();
        let mut h = Host::with(config(mapped), vec![ns(1, Arc::new(served), 512)]);
        let wakes = Arc::<Count>::default();
        let flag = wake_flag(&wakes);
        let others = Rc::new(RefCell::new(other_workers(&mut h, &flag)));
        h.dying = Some(dying(&others, &flag, &faults, &policy));
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
            marked: BTreeSet::new(),
            used: BTreeSet::new(),
            forgotten: BTreeSet::new(),
            mapped: true,
            volume,
            policy,
            size: PLACES,
            seed: 1,
            noticed: 0,
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

    /// Nothing fails any more, and nothing is held.
    pub fn relent(&self) {
        self.faults.clear();
        self.faults.release();
        self.volume.fail_next(0);
        self.policy.resume();
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
