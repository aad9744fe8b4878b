//! The tests that the volumes of all protocols pass.

use crate::suite::{self, Limits, TestServer};
use crate::volume::*;
use nbd::protocol::wire::ESHUTDOWN;
use remote::ReachWatch;

suite::suite! { Server }

impl TestServer for Server {
    type Volume = NbdVolume;
    type Answer = Answer;
    const RIGHT: Answer = Answer::Right;
    const NEVER: Answer = Answer::Never;
    const HELD: Answer = Answer::Held;
    const GARBAGE: Answer = Answer::Garbage;

    fn faults(variant: usize, _: bool) -> Vec<Answer> {
        let mut faults = vec![
            Answer::Close,
            Answer::CloseWithin,
            Answer::WrongCookie,
            Answer::Garbage,
            Answer::TooLong,
            Answer::Never,
            Answer::Errno(ESHUTDOWN),
        ];
        if variant == 0 {
            faults.push(Answer::Flood);
        }
        faults
    }

    fn start(setup: suite::Setup<Answer>) -> Self {
        let answer = setup.answer;
        Self::new(Setup {
            size: setup.size,
            blocks: [512, 4096, setup.max_data],
            piece: setup.piece,
            structured: setup.variant == 0,
            answer: Box::new(move |number, request| answer(number, request.kind == command::READ)),
            ..Setup::default()
        })
    }

    fn open(&self, limits: Limits) -> NbdVolume {
        let options = NbdOptions {
            connections: limits.connections,
            timeout: limits.timeout,
            reconnect_delay: limits.reconnect_delay,
            ..options()
        };
        open(self, options)
    }

    fn watch(volume: &NbdVolume) -> ReachWatch {
        volume.watch()
    }

    fn stop(&mut self) {
        Self::stop(self);
    }

    fn restart(&mut self) {
        Self::start(self);
    }

    fn release(&self) {
        Self::release(self);
    }

    fn resize(&self, size: usize) {
        self.state.data.lock().unwrap().resize(size, 0);
    }

    fn replace(&self) {
        *self.state.blocks.lock().unwrap() = [8192, 8192, 1 << 20];
    }

    fn requests(&self) -> usize {
        self.count(|state| &state.requests)
    }

    fn connections(&self) -> usize {
        self.count(|state| &state.connections)
    }
}
