//! Mediated pass-through: interface to a physical device that executes a namespace's commands
//! unchanged.

use dma::DmaMap;
use nvme::{Command, Status};
use std::time::Instant;

/// Outcome of offering a command to a real device beside the namespace's volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassthroughResult {
    /// The device executes the command; [`Passthrough::poll`] reports its completion.
    Taken,
    /// The command is not for the device: the namespace's volume executes it.
    NotMine,
    /// The command fails at once with this status and has no effect.
    Refused(Status),
}

/// A pass-through device that executes commands of a namespace. The engine offers it each command
/// as fetched from the host, without checks or translation. The namespace's volume executes the
/// commands that the device declines. Both therefore have to access the same blocks, possibly at
/// the same time. Owned by the thread of the controller's worker.
///
/// ```text
/// for each batch of a queue: begin     for each command: submit     once a round: poll
/// ```
pub trait Passthrough {
    /// Begins a batch of commands of submission queue `qid`. Returns how many may be submitted to
    /// the device now, or `None` when the volume has to execute all of them. `page_size` is the
    /// host's memory page size in bytes. Without `write_cache`, every write must be durable when it
    /// completes.
    fn begin(&mut self, qid: u16, page_size: u64, write_cache: bool) -> Option<usize>;

    /// Offers a command to the device. `command` is a copy that the host cannot modify; `token`
    /// identifies its completion.
    fn submit(
        &mut self,
        qid: u16,
        command: &Command,
        map: &DmaMap,
        token: u64,
    ) -> PassthroughResult;

    /// Notifies the device of submitted commands, and calls `done` for each completion with token,
    /// status and completion dword 0. Returns the number of completions.
    fn poll(&mut self, done: &mut dyn FnMut(u64, Status, u32)) -> usize;

    /// Returns the number of commands that are outstanding on the pass-through device.
    fn in_flight(&self) -> usize;

    /// Returns whether the worker must poll, because the device's completions do not wake it.
    fn needs_polling(&self) -> bool {
        self.in_flight() > 0
    }

    /// Returns the time by which [`Passthrough::poll`] has to be called even if nothing wakes the
    /// worker, for example to detect a late command.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Sets the namespace's size in blocks. The implementation has to keep commands beyond the end
    /// from reaching other parts of the device.
    fn resized(&mut self, blocks: u64) {
        let _ = blocks;
    }

    /// Requests that an outstanding command end early, if that is possible without involving the
    /// device.
    fn abort(&mut self, token: u64);
}
