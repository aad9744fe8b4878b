//! A zoned namespace of a controller with queues on three workers, all run by the test's thread.

use crate::common::*;
use crate::zones::other_worker::{OtherWorker, wake_flag};
use crate::zones::world::*;
use controller::ControllerConfig;
use nvme::Command;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use volume::{Io, IoOptions};
use worker::WakeFlag;
use zones::{Geometry, Zones};

/// Workers beside the controller's own.
pub const OTHERS: u16 = 2;
/// Queue pairs, from 1 on.
pub const PAIRS: u16 = 3;

type Others = Rc<RefCell<Vec<OtherWorker>>>;

pub struct Team {
    pub z: Zoned,
    others: Others,
    flag: Arc<WakeFlag>,
}

/// Makes those workers that are not there. Commands of a process before may be in their records'
/// place for a while.
fn make_others(h: &mut Host, others: &mut Vec<OtherWorker>) {
    for worker in 1 + others.len() as u16..=OTHERS {
        let wakes = Arc::<Count>::default();
        let flag = wake_flag(&wakes);
        let Some(setup) = h.c.remote_engine(worker, flag.clone().into()) else {
            assert!(h.deaths > 0);
            return;
        };
        let io = Rc::new(Io::new(IoOptions::default()));
        others.push(OtherWorker {
            engine: setup.open(10 + worker, &io).unwrap(),
            io,
            flag,
            wakes,
            asleep: false,
            raced: false,
        });
    }
}

impl Team {
    pub fn config() -> ControllerConfig {
        ControllerConfig {
            io_queues: PAIRS,
            // Without, all queues stay with the controller's worker.
            mapped_doorbells: true,
            workers: 1 + OTHERS,
            ..ControllerConfig::default()
        }
    }

    pub fn new(geometry: Geometry) -> Self {
        Self::with(geometry, Zones::new(geometry).unwrap())
    }

    pub fn with(geometry: Geometry, zones: Zones) -> Self {
        let mut z = Zoned::of(Self::config(), geometry, zones);
        let flag = wake_flag(&Arc::default());
        z.h.c.set_worker(0, flag.clone().into());
        let others = Others::default();
        make_others(&mut z.h, &mut others.borrow_mut());
        let (theirs, ours) = (others.clone(), flag.clone());
        z.h.beside = Some(Box::new(move |controller, now| {
            let mut worked = ours.take() && controller.drain_messages();
            for other in theirs.borrow_mut().iter_mut() {
                worked |= other.round(true, now);
            }
            worked
        }));
        let (theirs, ours) = (others.clone(), flag.clone());
        let (data, file) = (z.data.clone(), z.file.clone());
        // What volumes were given is done or is not; all workers die with the process.
        z.h.dying = Some(Box::new(move |h, before| {
            if !before {
                h.c.set_worker(0, ours.clone().into());
                return make_others(h, &mut theirs.borrow_mut());
            }
            if h.deaths.is_multiple_of(2) {
                data.release();
                file.release();
                let mut done = Vec::new();
                h.c.poll_volumes(&mut done);
                for other in theirs.borrow_mut().iter_mut() {
                    other.engine.poll_volumes(&mut done);
                }
            }
            theirs.borrow_mut().clear();
        }));
        for qid in 2..=PAIRS {
            z.h.create_pair(qid, 64);
        }
        let mut team = Team { z, others, flag };
        team.spread();
        team
    }

    /// Each queue pair on a worker of its own: 1 on the controller's.
    pub fn spread(&mut self) {
        make_others(&mut self.z.h, &mut self.others.borrow_mut());
        for qid in 1..=PAIRS {
            let moves = self.z.h.c.migrate_queue(qid, qid - 1);
            assert!(moves || qid == 1, "queue {qid}");
            self.z.h.until(|h| {
                let queues = h.c.completion_queues();
                queues.contains(&(qid, qid - 1))
            });
        }
    }

    /// A round of one worker.
    pub fn step(&mut self, worker: u16) {
        let h = &mut self.z.h;
        if let Some(other) = usize::from(worker).checked_sub(1) {
            let others = self.others.clone();
            h.outliving(|h| {
                let mut others = others.borrow_mut();
                others.get_mut(other).map(|other| other.round(true, h.now))
            });
            return;
        }
        let beside = h.beside.take();
        if self.flag.take() {
            h.outliving(|h| h.c.drain_messages());
        }
        h.round();
        h.beside = beside;
        make_others(h, &mut self.others.borrow_mut());
    }

    pub fn rounds(&mut self, count: usize) {
        for _ in 0..count {
            self.z.h.round();
        }
    }

    /// Runs a command to its end on that queue.
    pub fn command(&mut self, qid: u16, command: Command) -> nvme::Completion {
        self.z.h.command(qid, command)
    }

    /// The completion of the one command that is in flight on that queue.
    pub fn reap(&mut self, qid: u16) -> nvme::Completion {
        let mut done = None;
        self.z.h.until(|h| {
            done = h.reap(qid);
            done.is_some()
        });
        done.unwrap()
    }
}
