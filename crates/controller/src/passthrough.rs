//! Mediated pass-through: interface to a device that executes a namespace's commands unchanged.

use dma::DmaMap;
use nvme::{Command, Status};
use std::time::Instant;

/// Outcome of offering a command to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passed {
    /// The device has the command; [`Passthrough::poll`] reports its end.
    Taken,
    /// Not a command for the device: the namespace's volume executes it.
    NotMine,
    /// The command is completed at once with this status, and had no effect.
    Refused(Status),
}

/// A path of a namespace's commands to a physical device, beside the namespace's volume: the
/// engine offers it commands as they were fetched, unchecked and untranslated. Commands that it
/// does not take are executed by the volume, which must be on the same blocks; both may work at
/// once. Belongs to the controller's worker.
///
/// ```text
/// for each batch of a queue: begin     for each command: submit     once a round: poll
/// ```
pub trait Passthrough {
    /// Begins a batch of commands of submission queue `qid`. Returns how many may be submitted
    /// now; `None`: all of them are for the volume. `page_size` is the host's memory page in
    /// bytes; without `write_cache`, every write must be durable when it completes.
    fn begin(&mut self, qid: u16, page_size: u64, write_cache: bool) -> Option<usize>;

    /// Offers a command, in a copy that the host cannot reach. `token` identifies its completion.
    fn submit(&mut self, qid: u16, command: &Command, map: &DmaMap, token: u64) -> Passed;

    /// Notifies the device of submitted commands, and reports completions: token, status, dword 0
    /// of the completion. Returns their number.
    fn poll(&mut self, done: &mut dyn FnMut(u64, Status, u32)) -> usize;

    /// Returns the number of commands in flight on the device.
    fn in_flight(&self) -> usize;

    /// Returns whether the worker has to poll, because completions do not wake it.
    fn needs_polling(&self) -> bool {
        self.in_flight() > 0
    }

    /// Returns the latest time of the next poll, although nothing wakes the worker: a command may
    /// be late.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Sets the namespace's number of blocks. Commands beyond the end must not reach other parts
    /// of the device.
    fn resized(&mut self, blocks: u64) {
        let _ = blocks;
    }

    /// Asks that a command end early, if that is possible without the device.
    fn abort(&mut self, token: u64);
}
