//! A host whose queues are always full: it makes its commands once, and rings for them again and
//! again by shadow doorbells.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use dma::Memory;
use nvme::Command;
use nvme::regs::doorbell_offset;
use std::os::unix::fs::FileExt;
use zerocopy::IntoBytes;

use super::{ENTRIES, Host, RAM_SIZE};

/// A host's I/O queues as one loop fills them.
pub struct Flood {
    pub host: Host,
    ram: Memory,
    /// Commands that have completed.
    pub completed: u64,
    /// Of them, those with an error.
    pub failed: u64,
}

impl Host {
    /// Fills every I/O queue with this command, over and over, `depth` at a time. Shadow doorbells
    /// are in use already.
    pub fn flood(mut self, command: Command, depth: u32) -> Flood {
        let ram = self.ram.as_fd().try_clone_to_owned().unwrap();
        let ram = Memory::from_fd(ram, RAM_SIZE, true).unwrap();
        for qid in 1..self.queues.len() {
            for entry in 0..ENTRIES {
                let mut command = command;
                command.cid = (entry as u16).into();
                let at = self.queues[qid].sq + u64::from(entry) * 64;
                self.ram.write_all_at(command.as_bytes(), at).unwrap();
            }
            let queue = &mut self.queues[qid];
            queue.tail = (queue.tail + depth) % ENTRIES;
            let tail = queue.tail;
            self.ring(doorbell_offset(qid as u16, false, 0), tail);
        }
        Flood {
            host: self,
            ram,
            completed: 0,
            failed: 0,
        }
    }
}

impl Flood {
    /// Takes what has completed, and asks for as much again. Returns how many commands completed.
    pub fn turn(&mut self) -> u32 {
        let mut taken = 0;
        for qid in 1..self.host.queues.len() {
            let queue = &mut self.host.queues[qid];
            let (before, tail) = (queue.head, queue.tail);
            loop {
                // The completion's last four bytes: identifier, phase, status.
                let at = queue.cq + u64::from(queue.head) * 16 + 12;
                let cell = self.ram.atomic_u32(at as usize).unwrap();
                let last = u32::from_le(cell.load(Ordering::Acquire));
                if (last >> 16 & 1 != 0) != queue.phase {
                    break;
                }
                self.failed += u64::from(last >> 17 != 0);
                queue.head = (queue.head + 1) % ENTRIES;
                queue.phase ^= queue.head == 0;
            }
            let count = (queue.head + ENTRIES - before) % ENTRIES;
            if count == 0 {
                continue;
            }
            queue.tail = (tail + count) % ENTRIES;
            let (head, tail) = (queue.head, queue.tail);
            self.host.ring(doorbell_offset(qid as u16, true, 0), head);
            self.host.ring(doorbell_offset(qid as u16, false, 0), tail);
            taken += count;
        }
        self.completed += u64::from(taken);
        taken
    }
}
