//! What the host and the owner do, and what has to hold then.

use super::{ENTRIES, PLACES, WINDOW, Waiting, World};
use crate::common::*;
use dma::Prot;
use nvme::pci::command::BUS_MASTER;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::time::{Duration, Instant};

impl World {
    pub fn submit(&mut self, qid: u16, write: bool) {
        let queued = self.waiting.keys().filter(|(q, _)| *q == qid).count();
        let Some(place) = (0..PLACES).find(|place| !self.used.contains(place)) else {
            return;
        };
        if queued as u32 >= ENTRIES - 1 || !self.h.pairs.contains_key(&qid) {
            return;
        }
        let opcode = if write {
            NvmOpcode::WRITE
        } else {
            NvmOpcode::READ
        };
        let command = self.h.rw(opcode, 1, place * 8, 8, WINDOW + place * 4096);
        let bytes = pattern(self.random(), 4096);
        self.h.write(DATA + place * 4096, &bytes);
        let wrote = write.then_some(bytes);
        self.submitted(qid, command, place, !write, wrote);
    }

    fn submitted(
        &mut self,
        qid: u16,
        command: Command,
        place: u64,
        read: bool,
        wrote: Option<Vec<u8>>,
    ) -> u16 {
        self.used.insert(place);
        let mut cid = 0;
        self.ringing(|h| cid = h.submit(qid, command));
        let waiting = Waiting {
            place,
            read,
            marks: false,
            reads: read,
            wrote,
            inside: Some(place < self.size),
        };
        assert!(self.waiting.insert((qid, cid), waiting).is_none());
        cid
    }

    /// A command that is neither a read nor a write.
    pub fn submit_other(&mut self, qid: u16) {
        let queued = self.waiting.keys().filter(|(q, _)| *q == qid).count();
        let Some(place) = (0..self.size).find(|place| !self.used.contains(place)) else {
            return;
        };
        if queued as u32 >= ENTRIES - 1 || !self.h.pairs.contains_key(&qid) {
            return;
        }
        let memory = DATA + place * 4096;
        let command = |h: &mut Host, opcode| h.rw(opcode, 1, place * 8, 8, WINDOW + place * 4096);
        let zeroes = vec![0; 4096];
        let kind = self.random() % 7;
        let (command, wrote) = match kind {
            0 => (command(&mut self.h, NvmOpcode::WRITE_ZEROES), Some(zeroes)),
            1 => {
                let there = self.model.get(&place).unwrap_or(&zeroes);
                self.h.write(memory, there);
                (command(&mut self.h, NvmOpcode::COMPARE), None)
            }
            2 => (command(&mut self.h, NvmOpcode::VERIFY), None),
            3 => {
                let mut range = [0; 16];
                range[4] = 8;
                range[8..].copy_from_slice(&(place * 8).to_le_bytes());
                self.h.write(memory, &range);
                let mut command = Command::new(NvmOpcode::DATASET_MANAGEMENT.0, 0, 1);
                command.set_prps(WINDOW + place * 4096, 0);
                command.cdw11 = 4.into();
                // What is there afterwards is not promised.
                self.forget(place);
                (command, None)
            }
            4 => (Command::new(NvmOpcode::FLUSH.0, 0, 1), None),
            _ => (
                command(&mut self.h, NvmOpcode::WRITE_UNCORRECTABLE),
                Some(Vec::new()),
            ),
        };
        let cid = self.submitted(qid, command, place, false, wrote);
        if let Some(waiting) = self.waiting.get_mut(&(qid, cid)) {
            waiting.marks = kind > 4;
            waiting.reads = matches!(kind, 1 | 2);
        }
    }

    /// Takes completions of a completion queue, at most so many.
    pub fn reap(&mut self, cqid: u16, most: usize) -> usize {
        if !self.h.pairs.contains_key(&cqid) {
            return 0;
        }
        for reaped in 0..most {
            let mut found = None;
            self.ringing(|h| found = h.reap(cqid));
            let Some(completion) = found else {
                return reaped;
            };
            let key = (completion.sqid.get(), completion.cid.get());
            let Some(waiting) = self.waiting.remove(&key) else {
                panic!("{key:?} completed twice, or never asked for");
            };
            assert!(u32::from(completion.sqhd.get()) < ENTRIES);
            if !self.forgotten.contains(&waiting.place) {
                self.used.remove(&waiting.place);
            }
            let status = completion.status();
            if status.is(Status::LBA_OUT_OF_RANGE) {
                assert_ne!(waiting.inside, Some(true), "{key:?}: refused");
                if waiting.wrote.is_some() && self.h.deaths > 0 {
                    // A process that has died may have done it before the resize.
                    self.forget(waiting.place);
                }
                continue;
            }
            if status.is(Status::UNRECOVERED_READ_ERROR) {
                let marked = self.marked.contains(&waiting.place);
                // A resize takes marks away.
                let marked = marked || waiting.inside.is_none();
                assert!(waiting.reads && marked, "{key:?}: unreadable");
                continue;
            }
            if status == Status::SUCCESS {
                assert_ne!(waiting.inside, Some(false), "{key:?}: behind the end");
                let marked = self.marked.contains(&waiting.place);
                assert!(!waiting.reads || !marked, "{key:?}: was marked");
                if waiting.marks {
                    match waiting.inside {
                        // It was marked before the resize, or after it.
                        None => self.forget(waiting.place),
                        Some(_) => {
                            self.marked.insert(waiting.place);
                        }
                    }
                    continue;
                }
                if waiting.read {
                    let wanted = self.model.get(&waiting.place).cloned();
                    let found = self.h.read(DATA + waiting.place * 4096, 4096);
                    assert!(
                        found == wanted.unwrap_or(vec![0; 4096]),
                        "{key:?}: wrong data"
                    );
                } else if let Some(bytes) = waiting.wrote {
                    self.model.insert(waiting.place, bytes);
                    self.marked.remove(&waiting.place);
                }
                continue;
            }
            // Aborted, or its memory was not there; a write may have happened or not. So with one
            // that is to be done again when the function may not reach memory.
            let interrupted = status.is(Status::COMMAND_INTERRUPTED) && self.h.deaths > 0;
            let aborted = status.is(Status::ABORT_REQUESTED) || interrupted;
            assert!(
                aborted || status.is(Status::DATA_TRANSFER_ERROR),
                "{key:?}: {status}"
            );
            if waiting.wrote.is_some() {
                self.forget(waiting.place);
            }
        }
        most
    }

    /// Nobody knows what is in this place: it is read, behind the guest's back, when everything is
    /// at rest.
    pub fn forget(&mut self, place: u64) {
        // Not used again.
        self.used.insert(place);
        self.forgotten.insert(place);
    }

    pub fn migrate_queue(&mut self, cqid: u16, worker: u16) -> bool {
        // Its owner is awake when it does so.
        self.wake_up();
        self.h.c.migrate_queue(cqid, worker)
    }

    /// Disables the controller in the middle of everything; afterwards it touches nothing. Then it
    /// is enabled again.
    pub fn reset(&mut self) {
        self.wake_all();
        self.h.disable();
        let limit = Instant::now() + Duration::from_secs(10);
        for steps in 0.. {
            if !self.h.csts().rdy() {
                break;
            }
            if steps == 20 {
                self.relent();
            }
            self.step_any();
            assert!(Instant::now() < limit, "the reset does not end");
        }
        let memory = self.memory();
        self.relent();
        for _ in 0..40 {
            self.step_any();
        }
        assert!(self.memory() == memory, "memory touched after a reset");
        for ((..), waiting) in std::mem::take(&mut self.waiting) {
            if !self.forgotten.contains(&waiting.place) {
                self.used.remove(&waiting.place);
            }
            if waiting.wrote.is_some() {
                self.forget(waiting.place);
            }
        }
        self.h.pairs.clear();
        self.up();
    }

    /// The volume gets another size, and the controller notices. What is behind the end is there
    /// again when it grows.
    pub fn resize(&mut self, places: u64) {
        self.wake_up();
        for waiting in self.waiting.values_mut() {
            if (waiting.place < self.size) != (waiting.place < places) {
                waiting.inside = None;
            }
        }
        self.volume.resize(places * 4096);
        let deaths = self.h.deaths;
        let changed = self.h.outliving(|h| h.c.check_sizes());
        // One that dies in it has it before it begins again.
        assert_eq!(changed, places != self.size && self.h.deaths == deaths);
        self.size = places;
        // What is behind the end is marked no more.
        self.marked.retain(|place| *place < places);
    }

    /// Takes the data's window away, in the middle of everything; after the answer nothing touches
    /// it.
    pub fn unmap(&mut self) {
        if !self.mapped {
            return;
        }
        self.wake_all();
        let mut deaths = self.h.deaths;
        let size = self.h.c.dma_unmap_size(WINDOW, PLACES * 4096);
        assert_eq!(size, self.h.c.dma_unmap(WINDOW, PLACES * 4096));
        assert_eq!(size, Ok(PLACES * 4096));
        let limit = Instant::now() + Duration::from_secs(10);
        for steps in 0.. {
            let quiesced = self.h.outliving(|h| h.c.dma_quiesced());
            if std::mem::replace(&mut deaths, self.h.deaths) != self.h.deaths {
                // The request was not answered.
                self.h.c.dma_unmap(WINDOW, PLACES * 4096).unwrap();
                continue;
            }
            if quiesced {
                break;
            }
            if steps == 20 {
                self.relent();
            }
            self.step_any();
            assert!(Instant::now() < limit, "the unmap does not end");
        }
        self.mapped = false;
        let memory = self.h.read(DATA, PLACES as usize * 4096);
        self.relent();
        for _ in 0..40 {
            self.step_any();
        }
        let same = self.h.read(DATA, PLACES as usize * 4096) == memory;
        assert!(same, "memory touched after an unmap");
    }

    pub fn map(&mut self) {
        if self.mapped {
            return;
        }
        let memory = self.h.high.clone();
        let deaths = self.h.deaths;
        let mapped = self.h.outliving(|h| {
            let backing = Some((memory.clone(), 0));
            h.c.dma_map(WINDOW, PLACES * 4096, backing, Prot::RW)
        });
        // One that dies in it may have it already.
        assert!(mapped.is_ok() || self.h.deaths != deaths);
        self.mapped = true;
        self.wake_all();
    }

    /// Clears Bus Master Enable, in the middle of everything; after the answer nothing touches
    /// memory, and nothing is signalled.
    pub fn stop_mastering(&mut self) {
        self.wake_all();
        self.h.set_command(BUS_MASTER, false);
        let mut deaths = self.h.deaths;
        let limit = Instant::now() + Duration::from_secs(10);
        for steps in 0.. {
            if std::mem::replace(&mut deaths, self.h.deaths) != self.h.deaths {
                // The request was not answered.
                self.h.set_command(BUS_MASTER, false);
            }
            if self.h.c.config_settled() {
                break;
            }
            if steps == 20 {
                self.relent();
            }
            self.step_any();
            assert!(Instant::now() < limit, "commands in flight do not end");
        }
        self.wake_all();
        let memory = self.memory();
        self.h.quiet();
        self.relent();
        for _ in 0..40 {
            self.step_any();
        }
        assert!(self.memory() == memory, "memory touched without the bit");
        assert!(
            self.h.vectors.iter().all(|v| v.take() == 0),
            "signalled without the bit"
        );
    }

    /// Sets it, which is also what admin commands wait for.
    pub fn master(&mut self) {
        self.wake_up();
        self.h.set_command(BUS_MASTER, true);
    }

    /// Deletes a pair, wherever it lives and whatever it does, and makes it again.
    pub fn remake(&mut self, qid: u16) {
        self.master();
        self.wake_all();
        self.relent();
        let sqs: Vec<u16> = if qid == 1 { vec![1, 5] } else { vec![qid] };
        for &sq in &sqs {
            assert_eq!(
                self.h.delete(AdminOpcode::DELETE_IO_SQ, sq),
                Status::SUCCESS
            );
        }
        assert_eq!(
            self.h.delete(AdminOpcode::DELETE_IO_CQ, qid),
            Status::SUCCESS
        );
        let gone: Vec<_> = self.waiting.keys().copied().collect();
        for key in gone.into_iter().filter(|(q, _)| sqs.contains(q)) {
            let waiting = self.waiting.remove(&key).unwrap();
            if !self.forgotten.contains(&waiting.place) {
                self.used.remove(&waiting.place);
            }
            if waiting.wrote.is_some() {
                self.forget(waiting.place);
            }
        }
        self.h.create_pair(qid, ENTRIES);
        if qid == 1 {
            assert_eq!(self.h.create_sq(5, 1, ENTRIES, 0xa000), Status::SUCCESS);
            self.h.pairs.insert(5, Pair::new(0xa000, 0, ENTRIES));
        }
    }

    /// Aborts a command that may be anywhere.
    pub fn abort(&mut self, nth: usize) {
        // Those of the first completion queue, which two share, may have to wait for the host to
        // make room there.
        let mut others = self.waiting.keys().filter(|(q, _)| ![1, 5].contains(q));
        let Some(&(sqid, cid)) = others.nth(nth) else {
            return;
        };
        self.master();
        self.wake_all();
        self.relent();
        let completion = self
            .h
            .simple(AdminOpcode::ABORT, u32::from(cid) << 16 | u32::from(sqid));
        assert_eq!(completion.status(), Status::SUCCESS);
    }
}
