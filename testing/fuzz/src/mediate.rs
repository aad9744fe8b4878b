//! A hostile guest and VMM against a namespace on the direct path: the scripts of
//! [`mod@crate::controller`], with a device below that records every block and every address of its
//! commands.

#[path = "../../../crates/volumes/mediate/tests/it/common/model.rs"]
#[allow(dead_code)]
mod model;

use controller::{Passthrough, PassthroughResult};
use dma::{DmaMap, Memory};
use driver::iova::Registration;
use driver::{Device, Options};
use mediate::{DirectOptions, DirectQueue, Slice};
use model::{Config, Model};
use nvme::{Command, Status};
use std::sync::Arc;

/// First block of the slice, and its number of blocks; the namespace goes on behind it.
const FIRST: u64 = 24;
/// Blocks of 512 bytes.
pub(crate) const BLOCKS: u64 = 128;
/// The guest's largest transfer in bytes.
const LARGEST: u64 = 64 << 10;

/// The device, and the guest's memory as it sees it.
pub(crate) struct Below {
    model: Arc<Model>,
    registration: Registration,
    commands: u64,
}

impl Below {
    /// Makes a device with registered memory, and the path of a slice's commands to it. `how`
    /// selects the device's features.
    pub(crate) fn new(memory: &Memory, how: u8) -> Option<(Self, Box<dyn Passthrough>)> {
        let model = Model::new(Config {
            blocks: FIRST + BLOCKS + 40,
            sgl: how & 1 != 0,
            mdts: how >> 1 & 3,
            ..Config::default()
        });
        let transport: Arc<dyn driver::transport::Transport> = model.clone();
        let device = Device::open(transport, Options::default()).ok()?;
        let slice = Slice::new(&device.namespace(1).ok()?, FIRST, BLOCKS, false).ok()?;
        let options = DirectOptions {
            max_transfer: LARGEST,
            depth: if how & 8 != 0 { 3 } else { 64 },
            interrupts: false,
            ..DirectOptions::new(1, slice)
        };
        let path = Path {
            queue: DirectQueue::reserve(&device, options).ok()?,
            in_flight: 0,
        };
        let below = Below {
            registration: device.register(memory).ok()?,
            model,
            commands: 0,
        };
        below.model.take_log();
        Some((below, Box::new(path)))
    }

    /// Checks that every address given to the device belongs to the guest or to the queue pair.
    /// `is_guests` returns whether a range of the memory belongs to the guest now, or did when an
    /// outstanding command began.
    pub(crate) fn check(&mut self, is_guests: impl Fn(u64, u64) -> bool) {
        let region = self.registration.region();
        let (start, end) = (region.iova(), region.iova() + region.len());
        let anothers = |at: u64, len: u64| at < end && at.saturating_add(len) > start;
        for seen in self.model.take_log() {
            self.commands += 1;
            for &(lba, blocks) in &seen.blocks {
                let inside =
                    lba >= FIRST && lba.checked_add(blocks).is_some_and(|e| e <= FIRST + BLOCKS);
                assert!(inside, "block {lba}+{blocks}: {seen:x?}");
            }
            for &(at, len) in &seen.data {
                let inside = at >= start && at.checked_add(len).is_some_and(|e| e <= end);
                let guests = inside && is_guests(at - start, len);
                let copied = !anothers(at, len) && !self.model.in_a_ring(at, len);
                assert!(guests || copied, "data {at:#x}+{len}: {seen:x?}");
            }
            for &(at, len) in &seen.lists {
                let own = !anothers(at, len) && !self.model.in_a_ring(at, len);
                assert!(own, "a list of a guest's: {seen:x?}");
            }
        }
        let faults = self.model.faults();
        assert!(faults.is_empty(), "nothing is mapped at {faults:x?}");
    }

    /// I/O commands that reached the device.
    pub(crate) fn commands(&self) -> u64 {
        self.commands
    }
}

/// Physical queue pair shared by all virtual ones.
struct Path {
    queue: DirectQueue,
    in_flight: usize,
}

impl Passthrough for Path {
    fn begin(&mut self, _qid: u16, page_size: u64, write_cache: bool) -> Option<usize> {
        self.queue.set_page_size(page_size);
        self.queue.set_write_cache(write_cache);
        Some(self.queue.room())
    }

    fn submit(
        &mut self,
        _qid: u16,
        command: &Command,
        map: &DmaMap,
        token: u64,
    ) -> PassthroughResult {
        if !self.queue.supports(command.nvm_opcode()) {
            return PassthroughResult::NotMine;
        }
        match self.queue.submit(command, map, token) {
            Ok(()) => {
                self.in_flight += 1;
                PassthroughResult::Taken
            }
            Err(status) => PassthroughResult::Refused(status),
        }
    }

    fn poll(&mut self, done: &mut dyn FnMut(u64, Status, u32)) -> usize {
        let count = self.queue.poll(done);
        self.in_flight = self.in_flight.saturating_sub(count);
        count
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn abort(&mut self, token: u64) {
        self.queue.abort(token);
    }
}

/// Interprets the input as a script.
///
/// # Panics
/// As [`crate::controller::controller`]; and when the device gets a block outside the slice, or
/// memory that belongs neither to the guest nor to the queue pair.
pub fn mediate(data: &[u8]) {
    crate::controller::run(data, true);
}

#[cfg(test)]
mod tests {
    use crate::chance::Chance;

    #[test]
    fn random_scripts_complete_commands() {
        let mut chance = Chance::new();
        let mut commands = 0;
        for _ in 0..1500 {
            commands += crate::controller::run(&crate::controller::script(&mut chance), true).1;
        }
        // The expected rate is one command for four scripts. The more kinds of steps a script has,
        // the fewer are commands.
        assert!(
            commands > 375,
            "only {commands} commands reached the device: the scripts try nothing"
        );
    }
}
