//! A host with queues that are always full: it makes its commands once, and submits them repeatedly
//! by shadow doorbells.

use nvme::Command;

use super::Host;

/// A host's I/O queues as one loop fills them.
pub struct Flood {
    pub host: Host,
    /// Commands that have completed.
    pub completed: u64,
    /// Completed commands with an error.
    pub failed: u64,
}

impl Host {
    /// Fills every I/O queue with this command, over and over, `depth` at a time. Shadow doorbells
    /// are in use already.
    pub fn flood(mut self, command: Command, depth: u32) -> Flood {
        for qid in self.io_queues() {
            self.fill(qid, |_| command).unwrap();
            self.post(qid, depth).unwrap();
        }
        Flood {
            host: self,
            completed: 0,
            failed: 0,
        }
    }

    fn io_queues(&self) -> Vec<u16> {
        self.pairs.keys().copied().filter(|qid| *qid > 0).collect()
    }
}

impl Flood {
    /// Takes the completions, and submits as many commands again. Returns the number of
    /// completions.
    pub fn turn(&mut self) -> u32 {
        let mut taken = 0;
        for qid in self.host.io_queues() {
            let reaped = self.host.reap(qid).unwrap();
            let failed = reaped.iter().filter(|entry| entry.status_bits() != 0);
            self.failed += failed.count() as u64;
            self.host.post(qid, reaped.len() as u32).unwrap();
            taken += reaped.len() as u32;
        }
        self.completed += u64::from(taken);
        taken
    }
}
