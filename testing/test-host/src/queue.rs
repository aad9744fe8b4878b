//! The host's side of queues, and doorbells.

use crate::entry::admin;
use crate::{Command, Completion, GuestMemory};
use anyhow::Result;
use std::sync::atomic::{Ordering, fence};
use zerocopy::{FromZeros, IntoBytes};

/// Submission queue of the host, with the index at which the next command is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sq {
    /// IOVA of the queue's first entry.
    pub iova: u64,
    /// Number of entries of the queue.
    pub size: u32,
    /// Index of the entry for the next command.
    pub tail: u32,
}

impl Sq {
    /// Creates an empty queue.
    pub fn new(iova: u64, size: u32) -> Self {
        let tail = 0;
        Self { iova, size, tail }
    }

    /// Writes an entry at index `at`, regardless of the tail.
    pub fn put(&self, memory: &impl GuestMemory, at: u32, entry: &Command) -> Result<()> {
        memory.write(self.iova + 64 * u64::from(at), entry.as_bytes())
    }

    /// Writes an entry at the tail and moves the tail.
    pub fn push(&mut self, memory: &impl GuestMemory, entry: &Command) -> Result<()> {
        self.put(memory, self.tail, entry)?;
        self.tail = (self.tail + 1) % self.size;
        Ok(())
    }
}

/// Completion queue of the host, with the index and phase of the next completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cq {
    /// IOVA of the queue's first entry.
    pub iova: u64,
    /// Number of entries of the queue.
    pub size: u32,
    /// Index of the entry in which the controller writes the next completion.
    pub head: u32,
    /// Phase Tag that the next completion will have.
    pub phase: bool,
}

impl Cq {
    /// Creates an empty queue of `size` entries at `iova`; its memory must be zero.
    pub fn new(iova: u64, size: u32) -> Self {
        Self {
            iova,
            size,
            head: 0,
            phase: true,
        }
    }

    /// Returns the next entry if the controller has written it.
    pub fn peek(&self, memory: &impl GuestMemory) -> Result<Option<Completion>> {
        let at = self.iova + 16 * u64::from(self.head);
        // The dword with the Phase Tag is loaded first; the rest of the entry was written before
        // it.
        let last = memory.cell(at + 12)?.load(Ordering::Acquire);
        if (u32::from_le(last) >> 16 & 1 != 0) != self.phase {
            return Ok(None);
        }
        let mut entry = Completion::new_zeroed();
        memory.read(at, entry.as_mut_bytes())?;
        Ok(Some(entry))
    }

    /// Moves the head past the next entry.
    pub fn advance(&mut self) {
        self.head = (self.head + 1) % self.size;
        self.phase ^= self.head == 0;
    }

    /// Consumes the next entry if the controller has written it.
    pub fn pop(&mut self, memory: &impl GuestMemory) -> Result<Option<Completion>> {
        let entry = self.peek(memory)?;
        if entry.is_some() {
            self.advance();
        }
        Ok(entry)
    }
}

/// Submission queue with its completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Submission queue of the pair.
    pub sq: Sq,
    /// Completion queue of the pair.
    pub cq: Cq,
    /// Submission queue head, as reported by the newest completion.
    pub sq_head: u32,
}

impl Pair {
    /// Creates a pair of empty queues with `size` entries each, at the IOVAs `sq` and `cq`.
    pub fn new(sq: u64, cq: u64, size: u32) -> Self {
        Self {
            sq: Sq::new(sq, size),
            cq: Cq::new(cq, size),
            sq_head: 0,
        }
    }

    /// Returns the number of free submission queue entries, as far as the controller has reported
    /// them fetched.
    pub fn free(&self) -> u32 {
        let sq = &self.sq;
        (self.sq_head + 2 * sq.size - 1 - sq.tail) % sq.size
    }

    /// Zeroes the completion queue's memory.
    pub fn clear(&self, memory: &impl GuestMemory) -> Result<()> {
        memory.write(self.cq.iova, &vec![0; 16 * self.cq.size as usize])
    }

    /// Consumes the next completion, and records the submission queue head.
    pub fn pop(&mut self, memory: &impl GuestMemory) -> Result<Option<Completion>> {
        let entry = self.cq.pop(memory)?;
        if let Some(entry) = &entry {
            self.sq_head = entry.sqhd().into();
        }
        Ok(entry)
    }

    /// Returns the commands that create both queues with contiguous memory: the completion queue
    /// first (NVMe Base 2.1, 5.2.1 and 5.2.2).
    pub fn create(&self, qid: u16, vector: Option<u16>) -> [Command; 2] {
        let size = |entries: u32| entries.wrapping_sub(1) << 16 | u32::from(qid);
        let (ien, iv) = (vector.is_some(), vector.unwrap_or(0));
        let cq = Command::new(admin::CREATE_IO_CQ, 0)
            .prp(self.cq.iova, 0)
            .dw(10, size(self.cq.size))
            .dw(11, u32::from(iv) << 16 | u32::from(ien) << 1 | 1);
        let sq = Command::new(admin::CREATE_IO_SQ, 0)
            .prp(self.sq.iova, 0)
            .dw(10, size(self.sq.size))
            .dw(11, u32::from(qid) << 16 | 1);
        [cq, sq]
    }
}

/// Offset in BAR0 of the first doorbell.
const DOORBELLS: u64 = 0x1000;

/// Offset in BAR0 of a submission queue's tail doorbell or a completion queue's head doorbell (NVMe
/// over PCIe Transport 1.1, 3.1.2.1).
pub fn doorbell(qid: u16, cq: bool, dstrd: u8) -> u64 {
    DOORBELLS + (2 * u64::from(qid) + u64::from(cq)) * (4 << dstrd)
}

/// Shadow doorbells and EventIdx in guest memory (NVMe Base 2.1, 5.2.5 and B.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shadow {
    /// IOVA of the page of shadow doorbells.
    pub doorbells: u64,
    /// IOVA of the page of EventIdx values.
    pub event_idx: u64,
}

impl Shadow {
    /// Stores a doorbell's value in the shadow buffer; `offset` is the doorbell's offset in BAR0.
    /// Returns whether the register must be written, too.
    pub fn store(&self, memory: &impl GuestMemory, offset: u64, value: u32) -> Result<bool> {
        let at = offset - DOORBELLS;
        let shadow = memory.cell(self.doorbells + at)?;
        let old = u32::from_le(shadow.swap(value.to_le(), Ordering::Release)) as u16;
        fence(Ordering::SeqCst);
        let event = memory.cell(self.event_idx + at)?.load(Ordering::Relaxed);
        let (event, new) = (u32::from_le(event) as u16, value as u16);
        Ok(new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old))
    }

    /// Returns the command that makes the controller use both pages.
    pub fn configure(&self) -> Command {
        Command::new(admin::DOORBELL_BUFFER_CONFIG, 0).prp(self.doorbells, self.event_idx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Windows;
    use dma::Memory;

    fn memory() -> Windows {
        Windows::new(0x1000, Memory::anonymous(16 << 10).unwrap())
    }

    #[test]
    fn completion_queue_wraps_with_phase() {
        let (memory, mut cq) = (memory(), Cq::new(0x1000, 2));
        assert_eq!(cq.pop(&memory).unwrap(), None);
        for (turn, phase) in [(0, 1), (1, 1), (2, 0), (3, 0), (4, 1)] {
            let mut entry = [0; 16];
            (entry[12], entry[14]) = (turn, phase);
            memory
                .write(0x1000 + 16 * u64::from(turn % 2), &entry)
                .unwrap();
            let popped = cq.pop(&memory).unwrap().expect("a new entry");
            assert_eq!(popped.cid(), u16::from(turn));
            assert_eq!(cq.pop(&memory).unwrap(), None);
        }
    }

    #[test]
    fn shadow_doorbell_passing_event_idx_needs_register() {
        let memory = memory();
        let shadow = Shadow {
            doorbells: 0x1000,
            event_idx: 0x2000,
        };
        let offset = doorbell(1, false, 0);
        assert!(shadow.store(&memory, offset, 1).unwrap());
        assert!(!shadow.store(&memory, offset, 2).unwrap());
        memory.write(0x2008, &3u32.to_le_bytes()).unwrap();
        assert!(!shadow.store(&memory, offset, 3).unwrap());
        assert!(shadow.store(&memory, offset, 5).unwrap());
    }

    #[test]
    fn create_queue_commands_encode_size_vector_and_cq() {
        let [cq, sq] = Pair::new(0x4000, 0x5000, 64).create(3, Some(7));
        assert_eq!(cq.as_bytes()[40..48], [3, 0, 63, 0, 3, 0, 7, 0]);
        assert_eq!(sq.as_bytes()[40..48], [3, 0, 63, 0, 1, 0, 3, 0]);
        assert_eq!((cq.prp1(), sq.prp1()), (0x5000, 0x4000));
    }
}
