//! Random histories of writes, appends, resets and other actions of several queues on the same
//! zones, and whether what is in the zones can be explained by them.

use crate::common::*;
use crate::zones::world::*;
use nvme::cmd::zone::Zsa;
use nvme::{Command, Completion, NvmOpcode, Status};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use volume::Faults;
use zones::{Geometry, Zones};

/// Memory of a queue's command, for at most two pages of data.
pub fn place(number: u64) -> u64 {
    DATA + number * 8192
}

/// Owners of queues on the zones: one host with several, or several hosts with one each.
pub trait Served {
    /// Queues, which are numbered from 1 on.
    const QUEUES: u16;

    /// The host behind a queue.
    fn host(&mut self, queue: u16) -> &mut Host;

    /// Its queue of that host.
    fn qid(queue: u16) -> u16;

    /// A round of everything.
    fn round(&mut self);

    /// The zones in the table.
    fn kept(&self) -> Zones;

    /// The zones as they are reported, which the table says, too.
    fn check_states(&mut self);

    fn blocks(&mut self, slba: u64, blocks: u32) -> Vec<u8>;

    /// Of the data, and of the table's file.
    fn faults(&self) -> [Arc<Faults>; 2];
}

/// A write to zones, with data in the memory of that number.
pub fn writing(h: &Host, opcode: NvmOpcode, slba: u64, blocks: u32, number: u64) -> Command {
    let mut command = h.rw(opcode, 1, slba, blocks, place(number));
    let len = u64::from(blocks) * BLOCK;
    h.prps(&mut command, place(number), len, PAGE);
    command
}

/// What a host has sent and waits for.
struct Sent {
    at: u64,
    what: What,
}

enum What {
    /// A write, or an append (whose place is not known), of a zone.
    Write {
        zone: u32,
        slba: Option<u64>,
        blocks: u64,
        id: u64,
    },
    /// A reset of a zone, or of all.
    Reset(Option<u32>),
    Other,
}

/// A write that is over.
struct Written {
    zone: u32,
    /// `None`: nobody was told.
    slba: Option<u64>,
    blocks: u64,
    id: u64,
    sent: u64,
    done: u64,
    /// Its host knows that it was done. Otherwise it may have been, or not.
    known: bool,
}

/// A reset that was done.
struct WasReset {
    zone: Option<u32>,
    sent: u64,
    done: u64,
}

pub struct History<T> {
    pub t: T,
    geometry: Geometry,
    waiting: BTreeMap<(u16, u16), Sent>,
    written: Vec<Written>,
    resets: Vec<WasReset>,
    /// Zones that may have gaps, left by commands without a completion.
    torn: BTreeSet<u32>,
    time: u64,
    seed: u64,
    /// Writes and resets that were done.
    pub successes: [u32; 2],
}

/// Returns the content of a block, which names its write.
fn block(id: u64, number: u64) -> Vec<u8> {
    let words = [id + 1, number].map(u64::to_le_bytes).concat();
    words.repeat(32)
}

/// The zones that histories are about.
const ZONES: u32 = 4;

impl<T: Served> History<T> {
    pub fn new(t: T, geometry: Geometry, seed: u64) -> Self {
        History {
            t,
            geometry,
            waiting: BTreeMap::new(),
            written: Vec::new(),
            resets: Vec::new(),
            torn: BTreeSet::new(),
            time: 0,
            seed: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            successes: [0; 2],
        }
    }

    pub fn random(&mut self, below: u64) -> u64 {
        self.seed = self
            .seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 33) % below
    }

    fn tick(&mut self) -> u64 {
        self.time += 1;
        self.time
    }

    pub fn submit(&mut self) {
        let queue = self.random(u64::from(T::QUEUES)) as u16 + 1;
        let queued = self.waiting.keys().filter(|(q, _)| *q == queue).count();
        if queued >= 12 {
            return;
        }
        let (zone, blocks) = (self.random(u64::from(ZONES)) as u32, 1 + self.random(12));
        let start = u64::from(zone) * self.geometry.size;
        let id = self.tick();
        let (command, what) = match self.random(20) {
            choice @ 0..14 => {
                let bytes: Vec<u8> = (0..blocks).flat_map(|number| block(id, number)).collect();
                let append = choice < 7;
                // Where the host thinks that the zone is written next, or a little behind that.
                let written = self.t.kept().get(zone).unwrap().written;
                let slba = if append {
                    start
                } else {
                    start + written + [0, 0, 0, blocks][self.random(4) as usize]
                };
                let opcode = if append {
                    NvmOpcode::ZONE_APPEND
                } else {
                    NvmOpcode::WRITE
                };
                let h = self.t.host(queue);
                h.write(place(id % 512), &bytes);
                let command = writing(h, opcode, slba, blocks as u32, id % 512);
                let slba = (!append).then_some(slba);
                let what = What::Write {
                    zone,
                    slba,
                    blocks,
                    id,
                };
                (command, what)
            }
            14..17 => (send(Zsa::RESET, start, false), What::Reset(Some(zone))),
            17 => (send(Zsa::RESET, 0, true), What::Reset(None)),
            _ => {
                let actions = [Zsa::OPEN, Zsa::CLOSE, Zsa::FINISH];
                let zsa = actions[self.random(3) as usize];
                let all = self.random(4) == 0;
                (send(zsa, start, all), What::Other)
            }
        };
        let cid = self.t.host(queue).submit(T::qid(queue), command);
        let before = self.waiting.insert((queue, cid), Sent { at: id, what });
        assert!(before.is_none());
    }

    pub fn reap(&mut self) {
        for queue in 1..=T::QUEUES {
            for done in self.t.host(queue).reap_all(T::qid(queue)) {
                self.ended(queue, &done);
            }
        }
    }

    fn ended(&mut self, queue: u16, done: &Completion) {
        let sent = self.waiting.remove(&(queue, done.cid.get())).unwrap();
        let time = self.tick();
        let status = plain(done.status());
        if status != Status::SUCCESS {
            let known = [
                Status::ZONE_INVALID_WRITE,
                Status::ZONE_IS_FULL,
                Status::ZONED_BOUNDARY_ERROR,
                Status::TOO_MANY_OPEN_ZONES,
                Status::TOO_MANY_ACTIVE_ZONES,
                Status::INVALID_ZONE_STATE_TRANSITION,
                Status::COMMAND_INTERRUPTED,
            ];
            assert!(known.contains(&status), "{status}");
            if let What::Write { slba: None, .. } = sent.what {
                // An append has no place of its own choice.
                assert_ne!(status, Status::ZONE_INVALID_WRITE);
            }
            return;
        }
        match sent.what {
            What::Write {
                zone,
                slba,
                blocks,
                id,
            } => {
                self.successes[0] += 1;
                let slba = slba.unwrap_or_else(|| placed(done).unwrap());
                self.written.push(Written {
                    zone,
                    slba: Some(slba),
                    blocks,
                    id,
                    sent: sent.at,
                    done: time,
                    known: true,
                });
            }
            What::Reset(zone) => {
                self.successes[1] += 1;
                self.resets.push(WasReset {
                    zone,
                    sent: sent.at,
                    done: time,
                });
            }
            What::Other => {}
        }
    }

    /// What this queue waits for is over, and its host will not be told how it ended. Returns how
    /// many commands that were.
    pub fn lose(&mut self, queue: u16) -> usize {
        let time = self.tick();
        let of = |(key, _): &(&(u16, u16), &mut Sent)| key.0 == queue;
        let lost: Vec<Sent> = {
            let keys: Vec<_> = self
                .waiting
                .iter_mut()
                .filter(of)
                .map(|(k, _)| *k)
                .collect();
            let lost = keys.iter().filter_map(|key| self.waiting.remove(key));
            lost.collect()
        };
        let count = lost.len();
        for Sent { at, what } in lost {
            match what {
                What::Write {
                    zone,
                    slba,
                    blocks,
                    id,
                } => {
                    self.torn.insert(zone);
                    self.written.push(Written {
                        zone,
                        slba,
                        blocks,
                        id,
                        sent: at,
                        done: time,
                        known: false,
                    });
                }
                What::Reset(zone) => {
                    self.torn.extend(match zone {
                        Some(zone) => zone..zone + 1,
                        None => 0..ZONES,
                    });
                    // The unfinished reset need not have discarded anything.
                    let (sent, done) = (0, time);
                    self.resets.push(WasReset { zone, sent, done });
                }
                What::Other => {}
            }
        }
        count
    }

    /// Nothing waits any more.
    pub fn settle(&mut self) {
        crash::disarm();
        for faults in self.t.faults() {
            faults.clear();
            faults.release();
        }
        for _ in 0..10_000 {
            self.reap();
            if self.waiting.is_empty() {
                break;
            }
            self.t.round();
        }
        assert!(self.waiting.is_empty(), "{:?}", self.waiting.keys());
    }

    /// Completes everything, and checks that the zones' content can be explained: each block before
    /// a write pointer is a write's, none behind it is anybody's; a write without a later reset is
    /// there, and one that was over before a reset began is not.
    pub fn verify(&mut self) {
        self.settle();
        self.t.check_states();
        let (kept, geometry) = (self.t.kept(), self.geometry);
        assert!(kept.open() <= geometry.max_open.unwrap());
        assert!(kept.active() <= geometry.max_active.unwrap());
        let mut there: BTreeMap<u64, u64> = BTreeMap::new();
        for number in 0..ZONES {
            let zone = kept.get(number).unwrap();
            let start = u64::from(number) * geometry.size;
            let bytes = self.t.blocks(start, geometry.capacity as u32);
            for (at, found) in (0..).zip(bytes.chunks_exact(512)) {
                let id = u64::from_le_bytes(*found.first_chunk().unwrap());
                if at >= zone.written {
                    assert_eq!(id, 0, "zone {number}: {at} is behind {zone:?}");
                    continue;
                }
                if id == 0 {
                    let torn = self.torn.contains(&number);
                    assert!(torn, "zone {number}: {at} is lost, {zone:?}");
                    continue;
                }
                let mut of = self.written.iter().filter(|w| w.id == id - 1);
                let of = of.next().expect("of a write that is not known to be done");
                assert_eq!(of.zone, number);
                if let Some(slba) = of.slba {
                    assert_eq!(found, block(of.id, start + at - slba), "zone {number}");
                }
                *there.entry(of.id).or_default() += 1;
            }
        }
        for write in &self.written {
            let torn = self.torn.contains(&write.zone);
            let resets = self.resets.iter();
            let mut resets = resets.filter(|r| r.zone.is_none_or(|zone| zone == write.zone));
            let present = there.get(&write.id);
            assert!(torn || present.is_none_or(|blocks| *blocks == write.blocks));
            let present = present.is_some();
            let must_go = resets.clone().any(|reset| reset.sent > write.done);
            let may_go = torn || !write.known || resets.any(|reset| reset.done > write.sent);
            let (id, zone) = (write.id, write.zone);
            assert!(!(present && must_go), "zone {zone}: {id} was reset");
            assert!(present || may_go, "zone {zone}: {id} is lost");
        }
        self.written.retain(|write| there.contains_key(&write.id));
        self.resets.clear();
        for write in &mut self.written {
            (write.sent, write.done) = (0, 0);
        }
        let has_data = |zone: &u32| kept.get(*zone).unwrap().written > 0;
        self.torn.retain(has_data);
    }

    /// All zones are reset: nothing is torn any more.
    pub fn reset_all(&mut self) {
        let queue = self.random(u64::from(T::QUEUES)) as u16 + 1;
        let at = self.tick();
        let command = send(Zsa::RESET, 0, true);
        let cid = self.t.host(queue).submit(T::qid(queue), command);
        let what = What::Reset(None);
        self.waiting.insert((queue, cid), Sent { at, what });
        self.settle();
    }
}
