//! A worker beside the controller's own.

use crate::common::*;
use controller::{IrqSink, RemoteEngine};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;
use volume::{Budget, Io};
use worker::WakeFlag;

/// A worker's wake flag; `wakes` counts what would end its sleep.
pub fn wake_flag(wakes: &Arc<Count>) -> Arc<WakeFlag> {
    let wakes = wakes.clone();
    Arc::new(WakeFlag::new(move || wakes.signal()))
}

/// A worker that is not the controller's.
pub struct OtherWorker {
    pub engine: RemoteEngine,
    pub io: Rc<Io>,
    pub flag: Arc<WakeFlag>,
    pub wakes: Arc<Count>,
    pub asleep: bool,
    /// It could not sleep, and has to make a round before it tries again.
    pub raced: bool,
}

impl OtherWorker {
    pub fn wake_up(&mut self) {
        if std::mem::take(&mut self.asleep) {
            self.flag.awake();
            self.wakes.take();
        }
    }

    /// A round, unless it sleeps and nothing has woken it.
    pub fn round(&mut self, drain: bool, now: Instant) -> bool {
        if self.asleep {
            if self.wakes.take() == 0 {
                return false;
            }
            self.wake_up();
        }
        self.raced = false;
        let OtherWorker { engine, io, .. } = self;
        let mut worked = io.poll(&mut |completion| engine.complete(completion)) > 0;
        worked |= drain && self.flag.take() && self.engine.drain_messages();
        worked |= self.engine.poll(now, &mut Budget::unlimited());
        // A worker with nothing to do wakes up at this time, and at no other.
        if self.engine.deadline().is_some() {
            self.engine.tidy(now);
        }
        self.io.flush();
        let mut done = Vec::new();
        self.engine.poll_volumes(&mut done);
        worked |= !done.is_empty();
        for completion in done {
            self.engine.complete(completion);
        }
        worked
    }

    pub fn sleep(&mut self) {
        if self.asleep || self.raced {
            return;
        }
        let mut raced = self.flag.prepare_sleep();
        raced |= self.engine.needs_polling() || self.engine.is_unannounced();
        raced |= self.engine.arm();
        raced |= self.engine.recheck();
        self.raced = raced;
        if raced {
            self.flag.awake();
        } else {
            self.asleep = true;
        }
    }
}
