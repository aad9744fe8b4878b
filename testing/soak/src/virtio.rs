//! A guest with a virtio driver, behind a vhost-user front-end: two queues, each with half of the
//! disk; they are stopped with requests in flight, and the connection ends with requests in flight
//! that the next one takes up.

#[path = "../../../crates/front-ends/vhost-blk/tests/it/common/mod.rs"]
mod common;

use crate::pattern::{Model, Random};
use crate::{Outcome, ensure};
use common::driver::{DISCARD, FLUSH, SLOTS, WRITE_ZEROES, segment};
use common::{Client, Data, Driver, MEMORY, Req};
use dma::Memory;
use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};
use vhost::VhostBackend;

const SECTOR: u64 = 512;
const QUEUES: usize = 2;
/// Maximum sectors of a request: the driver's buffer size.
const MAX_REQUEST_SECTORS: u64 = 80;

/// A queue, its half of the disk, and its outstanding requests.
struct Half {
    driver: Driver,
    model: Model,
    random: Random,
    /// By slot: first sector and sectors.
    in_flight: HashMap<u16, (u64, u64)>,
    done: u64,
}

/// Loads the disk, and returns its expected contents.
pub fn run(socket: &Path, end: Instant) -> Outcome<Vec<u8>> {
    let memory = Memory::anonymous(MEMORY)?;
    let mut client = Client::at(socket, 0, memory.clone());
    client.track(QUEUES as u16, None);
    let sectors = client.capacity();
    let mut halves: Vec<Half> = (0..QUEUES as u64)
        .map(|i| {
            let (from, to) = (sectors / 2 * i, sectors / 2 * (i + 1) + sectors % 2 * i);
            Half {
                driver: client.queue(i as usize),
                model: Model::new(from, to - from, SECTOR as u32),
                random: Random(i + 3),
                in_flight: HashMap::new(),
                done: 0,
            }
        })
        .collect();
    for half in &mut halves {
        half.zero_all()?;
    }
    let mut random = Random(1);
    let mut next = Instant::now() + Duration::from_secs(1);
    let (mut stops, mut connections) = (0, 1);
    while Instant::now() < end {
        for half in &mut halves {
            half.post();
        }
        if Instant::now() >= next {
            next = Instant::now() + Duration::from_millis(500 + random.below(1500));
            if random.below(2) == 0 {
                stops += 1;
                for half in &mut halves {
                    let base = client.frontend.get_vring_base(half.driver.index)?;
                    client.start(&half.driver, u16::try_from(base)?);
                }
            } else {
                connections += 1;
                let kept = client.inflight.take();
                drop(client);
                client = Client::at(socket, 0, memory.clone());
                client.track(QUEUES as u16, kept);
                ensure(client.capacity() == sectors, "another size")?;
                for half in &mut halves {
                    half.driver.reconnect();
                    client.start(&half.driver, half.driver.used_idx());
                }
            }
        }
        for half in &mut halves {
            half.finish()?;
            half.other()?;
        }
    }
    println!("{stops} stops of the queues, {connections} connections");
    let mut bytes = Vec::new();
    for half in &mut halves {
        half.read_all()?;
        half.driver.ok(Req::new(FLUSH, 0, Data::None));
        println!("{} requests, {} kicks", half.done, half.driver.kicks);
        bytes.extend(half.model.expected(half.model.first(), half.model.blocks()));
    }
    Ok(bytes)
}

impl Half {
    fn place(&mut self) -> (u64, u64) {
        let count = 1 + self.random.below(MAX_REQUEST_SECTORS);
        let blocks = self.model.blocks();
        (
            self.model.first() + self.random.below(blocks - count + 1),
            count,
        )
    }

    /// Reads and writes that overlap nothing in flight.
    fn post(&mut self) {
        for _ in 0..SLOTS {
            let (lba, count) = self.place();
            let overlaps = |(first, n): &(u64, u64)| lba < first + n && *first < lba + count;
            if self.driver.free_slots() == 0 || self.in_flight.values().any(overlaps) {
                continue;
            }
            let data;
            let mut request = if self.random.below(2) == 0 {
                data = self.model.write(lba, count);
                Req::write(lba, &data)
            } else {
                Req::read(lba, (count * SECTOR) as usize)
            };
            if self.random.below(2) == 0 {
                request = request.indirect();
            }
            let slot = self.driver.post(request);
            self.in_flight.insert(slot, (lba, count));
        }
        self.driver.ring();
    }

    fn finish(&mut self) -> Outcome {
        while !self.in_flight.is_empty() {
            let (slot, status, data) = self.driver.finish();
            let (lba, count) = self
                .in_flight
                .remove(&slot)
                .ok_or("nobody asked for that")?;
            ensure(status == 0, format!("status {status} at sector {lba}"))?;
            self.done += 1;
            if !data.is_empty() {
                ensure(data.len() as u64 == count * SECTOR, "another length")?;
                self.model.check(lba, &data)?;
            }
        }
        Ok(())
    }

    /// Now and then a request of another kind.
    fn other(&mut self) -> Outcome {
        let (lba, count) = self.place();
        match self.random.below(16) {
            0 => drop(self.driver.ok(Req::new(FLUSH, 0, Data::None))),
            1 => self.zero(lba, count),
            2 => {
                let range = segment(lba, count as u32, 0);
                self.driver.ok(Req::new(DISCARD, 0, Data::Out(&range)));
                // Discarded sectors may hold anything; they are given a meaning again.
                self.zero(lba, count);
            }
            _ => {}
        }
        Ok(())
    }

    fn zero(&mut self, lba: u64, count: u64) {
        let range = segment(lba, count as u32, 0);
        self.driver.ok(Req::new(WRITE_ZEROES, 0, Data::Out(&range)));
        self.model.zero(lba, count);
    }

    fn chunks(&self) -> Vec<(u64, u64)> {
        let (first, end) = (self.model.first(), self.model.first() + self.model.blocks());
        let starts = (first..end).step_by(MAX_REQUEST_SECTORS as usize);
        starts
            .map(|lba| (lba, MAX_REQUEST_SECTORS.min(end - lba)))
            .collect()
    }

    fn zero_all(&mut self) -> Outcome {
        for (lba, count) in self.chunks() {
            self.zero(lba, count);
        }
        Ok(())
    }

    fn read_all(&mut self) -> Outcome {
        for (lba, count) in self.chunks() {
            let data = self.driver.ok(Req::read(lba, (count * SECTOR) as usize));
            self.model.check(lba, &data)?;
        }
        Ok(())
    }
}
