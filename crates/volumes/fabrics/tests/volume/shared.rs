//! The tests that the volumes of all protocols pass.

use super::*;
use remote::ReachWatch;
use suite::{Limits, TestServer};

suite::suite! { Target }

impl TestServer for Target {
    type Volume = FabricsVolume;
    type Answer = Answer;
    const RIGHT: Answer = Answer::Right;
    const NEVER: Answer = Answer::Never;
    const HELD: Answer = Answer::Held;
    const GARBAGE: Answer = Answer::Garbage;

    fn faults(_: usize, read: bool) -> Vec<Answer> {
        let mut faults = vec![
            Answer::Close,
            Answer::CloseWithin,
            Answer::WrongCid,
            Answer::Garbage,
            Answer::Twice,
            Answer::R2tBeyond,
            Answer::Terminate,
            Answer::Never,
        ];
        if read {
            faults.extend([Answer::TooLong, Answer::TooShort]);
        }
        faults
    }

    fn start(setup: suite::Setup<Answer>) -> Self {
        let answer = setup.answer;
        Self::new(Setup {
            size: setup.size,
            mdts: (setup.max_data / 4096).ilog2() as u8,
            piece: setup.piece,
            portals: 1 + setup.variant,
            answer: Box::new(move |number, command| {
                answer(number, command.nvm_opcode() == NvmOpcode::READ)
            }),
            ..Setup::default()
        })
    }

    fn open(&self, limits: Limits) -> FabricsVolume {
        let options = FabricsOptions {
            queues: limits.connections as u16,
            timeout: limits.timeout,
            reconnect_delay: limits.reconnect_delay,
            ..options()
        };
        open(self, options)
    }

    fn watch(volume: &FabricsVolume) -> ReachWatch {
        volume.watch()
    }

    fn stop(&mut self) {
        Self::stop(self, 0);
    }

    fn restart(&mut self) {
        Self::restart(self, 0);
    }

    fn release(&self) {
        Self::release(self);
    }

    fn resize(&self, size: usize) {
        self.state.data.lock().unwrap().resize(size, 0);
    }

    fn replace(&self) {
        self.state.nguid.store(8, Ordering::SeqCst);
    }

    fn requests(&self) -> usize {
        self.count(|state| &state.requests)
    }

    fn connections(&self) -> usize {
        self.count(|state| &state.connections)
    }
}
