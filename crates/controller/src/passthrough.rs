//! The seam to a device that takes a namespace's commands as they are: mediation.

use dma::DmaMap;
use nvme::{Command, Status};
use std::time::Instant;

/// What became of a command that was offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passed {
    /// It is on its way; [`Passthrough::poll`] tells its end.
    Taken,
    /// Not a command for the device: the namespace's volume executes it.
    NotMine,
    /// The host is told this at once. Nothing has happened.
    Refused(Status),
}

/// A way of a namespace's commands to a device below, beside the namespace's volume: the engine
/// offers it commands as they were fetched, unchecked and untranslated. Commands that it does not
/// take go to the volume, which must stand on the same blocks; the two may be at work at once.
/// Belongs to the controller's worker.
///
/// ```text
/// for each batch of a queue: begin     for each command: submit     once a round: poll
/// ```
pub trait Passthrough {
    /// A batch of commands of submission queue `qid` follows. How many may be submitted now;
    /// `None`: all of them go to the volume. `page_size` is the host's memory page in bytes;
    /// without `write_cache`, every write is to be durable when it completes.
    fn begin(&mut self, qid: u16, page_size: u64, write_cache: bool) -> Option<usize>;

    /// Offers a command, in a copy that the host cannot reach. `token` comes back with its end.
    fn submit(&mut self, qid: u16, command: &Command, map: &DmaMap, token: u64) -> Passed;

    /// Tells the device of what was submitted, and passes on what has completed: token, status,
    /// dword 0 of the completion. Returns how many that was.
    fn poll(&mut self, done: &mut dyn FnMut(u64, Status, u32)) -> usize;

    /// Commands that were taken and are not over.
    fn in_flight(&self) -> usize;

    /// Nothing wakes the worker when these are over: it has to poll.
    fn needs_polling(&self) -> bool {
        self.in_flight() > 0
    }

    /// When to poll at the latest, though nothing wakes the worker: a command may be late.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// The namespace has so many blocks now. What is beyond the end is not to reach the device's
    /// other parts.
    fn resized(&mut self, blocks: u64) {
        let _ = blocks;
    }

    /// Asks that a command end early, if that is possible without the device.
    fn abort(&mut self, token: u64);
}
