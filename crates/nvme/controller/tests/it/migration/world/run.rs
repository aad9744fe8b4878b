//! The workers at work: rounds in any order, sleep, and what wakes them.

use super::{OTHERS, PAIRS, PLACES, WINDOW, World};
use crate::common::*;
use nvme::{NvmOpcode, Status};
use std::collections::BTreeSet;

impl World {
    /// A process that has just begun is awake.
    fn notice_deaths(&mut self) {
        if std::mem::replace(&mut self.noticed, self.h.deaths) != self.h.deaths {
            (self.asleep, self.raced) = (false, false);
            self.wakes.take();
            self.flag.awake();
        }
    }

    pub fn wake_up(&mut self) {
        self.notice_deaths();
        if std::mem::take(&mut self.asleep) {
            self.flag.awake();
            self.wakes.take();
        }
    }

    pub fn step(&mut self, worker: usize, drain: bool) -> bool {
        self.notice_deaths();
        if worker > 0 {
            let others = self.others.clone();
            return self.h.outliving(|h| {
                let mut others = others.borrow_mut();
                let other = others.get_mut(worker - 1);
                other.is_some_and(|other| other.round(drain, h.now))
            });
        }
        if self.asleep {
            if self.wakes.take() == 0 {
                return false;
            }
            self.wake_up();
        }
        let beside = self.h.beside.take();
        self.raced = false;
        let mut worked = drain && self.flag.take();
        worked = worked && self.h.outliving(|h| h.c.drain_messages());
        worked |= self.h.round();
        self.h.beside = beside;
        worked
    }

    /// Any worker makes a round, and may drain its messages late.
    pub fn step_any(&mut self) {
        let worker = self.random() as usize % (OTHERS + 1);
        let drain = !self.random().is_multiple_of(3);
        self.step(worker, drain);
    }

    pub fn sleep(&mut self, worker: usize) {
        self.notice_deaths();
        if worker > 0 {
            if let Some(other) = self.others.borrow_mut().get_mut(worker - 1) {
                other.sleep();
            }
            return;
        }
        if self.asleep || self.raced {
            return;
        }
        let mut raced = self.flag.prepare_sleep();
        raced |= self.h.c.needs_polling() || self.h.c.is_unannounced();
        raced |= self.h.c.arm();
        raced |= self.h.c.recheck();
        self.raced = raced;
        if raced {
            self.flag.awake();
        } else {
            self.asleep = true;
        }
    }

    /// Runs all workers until nothing moves. A worker without work sleeps, and is woken not by this
    /// but by its deadline.
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

    /// Nothing moves: advances to the next deadline.
    pub fn pass_time(&mut self) {
        let others = self.others.clone();
        let mut others = others.borrow_mut();
        let own = self.h.c.deadline();
        let next = others
            .iter()
            .map(|other| other.engine.deadline())
            .chain([own]);
        let Some(next) = next.flatten().min() else {
            return;
        };
        self.h.now = self.h.now.max(next);
        for other in others.iter_mut() {
            if other.engine.deadline().is_some_and(|at| at <= self.h.now) {
                other.wake_up();
            }
        }
        if own.is_some_and(|at| at <= self.h.now) {
            self.wake_up();
        }
    }

    /// Completes everything that was submitted.
    pub fn finish(&mut self) {
        self.master();
        self.relent();
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
        self.resize(PLACES);
        let places = self.model.keys().chain(&self.marked).copied();
        let places: BTreeSet<u64> = places.collect();
        for place in places {
            if self.used.contains(&place) {
                continue;
            }
            let command = self
                .h
                .rw(NvmOpcode::READ, 1, place * 8, 8, WINDOW + place * 4096);
            self.wake_all();
            let status = self.h.command(2, command).status();
            if self.marked.contains(&place) {
                assert!(status.is(Status::UNRECOVERED_READ_ERROR), "place {place}");
                continue;
            }
            assert_eq!(status, Status::SUCCESS);
            let found = self.h.read(DATA + place * 4096, 4096);
            assert!(found == self.model[&place], "place {place}");
        }
    }

    /// Admin commands of the test wait by rounds of everything, and do not sleep.
    pub fn wake_all(&mut self) {
        self.wake_up();
        for other in self.others.borrow_mut().iter_mut() {
            other.wake_up();
        }
    }
}
