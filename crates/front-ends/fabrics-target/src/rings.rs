//! A submission and completion queue in the association's memory, driven as a host would.

use crate::memory::{BASE, PAGE};
use controller::Controller;
use dma::Memory;
use nvme::{Command, Completion, regs};
use zerocopy::{FromBytes, IntoBytes};

/// Maximum number of entries of an I/O queue.
pub(crate) const MAX_QUEUE_ENTRIES: u16 = 1024;
/// Number of pages of a submission queue with the maximum number of entries.
const SQ_PAGES: u32 = MAX_QUEUE_ENTRIES as u32 * 64 / PAGE;
/// Number of pages of a queue pair with the maximum number of entries.
pub(crate) const PAGES: u32 = SQ_PAGES + MAX_QUEUE_ENTRIES as u32 * 16 / PAGE;

/// Submission queue and completion queue of the controller for one queue of an association.
#[derive(Debug)]
pub(crate) struct Rings {
    qid: u16,
    entries: u16,
    tail: u16,
    /// Submission queue tail that was last written to the doorbell.
    rung: u16,
    head: u16,
    phase: bool,
}

impl Rings {
    /// Creates rings for at most `room` outstanding commands of queue `qid`.
    pub(crate) fn new(qid: u16, room: u16) -> Self {
        Self {
            qid,
            entries: (room.saturating_add(1))
                .next_power_of_two()
                .clamp(4, MAX_QUEUE_ENTRIES),
            tail: 0,
            rung: 0,
            head: 0,
            phase: true,
        }
    }

    pub(crate) fn entries(&self) -> u16 {
        self.entries
    }

    fn place(&self) -> u64 {
        u64::from(self.qid) * u64::from(PAGES) * u64::from(PAGE)
    }

    /// Returns the device address (IOVA) of the submission queue.
    pub(crate) fn sq(&self) -> u64 {
        BASE + self.place()
    }

    /// Returns the device address (IOVA) of the completion queue.
    pub(crate) fn cq(&self) -> u64 {
        self.sq() + u64::from(SQ_PAGES) * u64::from(PAGE)
    }

    /// Sets the rings to their initial state after the controller was disabled.
    pub(crate) fn reset(&mut self, memory: &Memory) {
        (self.tail, self.rung, self.head, self.phase) = (0, 0, 0, true);
        let at = self.place() + u64::from(SQ_PAGES) * u64::from(PAGE);
        // Clears the phase bits of old entries.
        let _ = memory.write(at as usize, &[0; MAX_QUEUE_ENTRIES as usize * 16]);
    }

    /// Appends a command to the submission queue; the caller has checked that there is room.
    pub(crate) fn put(&mut self, memory: &Memory, command: &Command) {
        let at = self.place() + u64::from(self.tail) * 64;
        // The entry lies within the memory, so the write does not fail.
        let _ = memory.write(at as usize, command.as_bytes());
        self.tail = (self.tail + 1) % self.entries;
    }

    /// Writes the submission queue tail doorbell, if entries were added.
    pub(crate) fn ring(&mut self, controller: &mut Controller) {
        if self.tail != self.rung {
            self.rung = self.tail;
            let doorbell = regs::doorbell_offset(self.qid, false, 0);
            controller.bar0_write(doorbell, &u32::from(self.tail).to_le_bytes());
        }
    }

    /// Returns the controller's next completion, if it has arrived.
    pub(crate) fn take(&mut self, memory: &Memory) -> Option<Completion> {
        let mut entry = [0; 16];
        let at = self.cq() - BASE + u64::from(self.head) * 16;
        memory.read(at as usize, &mut entry).ok()?;
        let entry = Completion::read_from_bytes(&entry).ok()?;
        if entry.phase() != self.phase {
            return None;
        }
        self.head += 1;
        if self.head == self.entries {
            (self.head, self.phase) = (0, !self.phase);
        }
        Some(entry)
    }

    /// Writes the completion queue head doorbell.
    pub(crate) fn taken(&self, controller: &mut Controller) {
        let doorbell = regs::doorbell_offset(self.qid, true, 0);
        controller.bar0_write(doorbell, &u32::from(self.head).to_le_bytes());
    }
}
