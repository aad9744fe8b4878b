//! A queue pair that reads and writes at random, with a model of its blocks' contents.

use crate::pattern::{Model, Random};
use crate::{Outcome, ensure};
use dma::Memory;
use driver::{Completion, Device, DmaBuffer, Op, QueuePair, Request, SubmitRefusal};
use std::collections::HashMap;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Memory for data, registered as a whole.
const MEMORY: usize = 8 << 20;
/// Time limit of a request.
pub const LIMIT: Duration = Duration::from_secs(60);

/// A queue pair with a part of the namespace and a model of it.
pub struct Worker {
    pub queue: QueuePair,
    pub model: Model,
    pub random: Random,
    registration: driver::iova::Registration,
    in_flight: HashMap<u64, (u64, u64, bool)>,
    /// Blocks that commands in flight touch: no two of them overlap, because
    /// their order is not defined.
    busy: Vec<(u64, u64)>,
    next: u64,
    done: u64,
}

impl Worker {
    /// For a range of bytes of the queue pair's namespace, which is zeroes from then on.
    pub fn new(device: &Device, queue: QueuePair, bytes: Range<u64>, seed: u64) -> Outcome<Worker> {
        let block = queue.block_size();
        let shift = u64::from(block);
        let blocks = (bytes.end - bytes.start) / shift;
        let memory = Memory::anonymous(MEMORY)?;
        let mut worker = Worker {
            model: Model::new(bytes.start / shift, blocks, block),
            random: Random(seed),
            registration: device.register(&memory)?,
            in_flight: HashMap::new(),
            busy: Vec::new(),
            next: 1,
            done: 0,
            queue,
        };
        // From a known state: all zeroes, written in plain memory.
        let zeroes = vec![0; (bytes.end - bytes.start) as usize];
        worker.queue.write(worker.model.first(), &zeroes, false)?;
        Ok(worker)
    }

    fn block(&self) -> usize {
        self.queue.block_size() as usize
    }

    /// A place for some blocks.
    pub fn place(&mut self, blocks: u64) -> u64 {
        self.model.first() + self.random.below(self.model.blocks() - blocks + 1)
    }

    /// A buffer at an offset in the registered memory.
    pub fn buffer(&self, at: usize, len: usize) -> Outcome<DmaBuffer> {
        let buffer = DmaBuffer::of(&self.registration, at as u64, len as u64);
        Ok(buffer.ok_or("outside of the registered memory")?)
    }

    /// Executes one request and waits for it.
    pub fn run(
        &mut self,
        op: Op,
        lba: u64,
        blocks: u64,
        buffer: Option<DmaBuffer>,
    ) -> Outcome<Option<DmaBuffer>> {
        let request = Request {
            op,
            lba,
            blocks,
            buffer,
            user_data: 0,
        };
        let completion = self.queue.execute(request)?;
        completion
            .result
            .map_err(|e| format!("{op:?} of {blocks} blocks at {lba}: {e}"))?;
        self.done += 1;
        Ok(completion.buffer)
    }

    pub fn write_at(&mut self, lba: u64, blocks: u64, at: usize) -> Outcome {
        let bytes = self.model.write(lba, blocks);
        let buffer = self.buffer(at, bytes.len())?;
        buffer.write(0, &bytes)?;
        self.run(Op::Write { fua: false }, lba, blocks, Some(buffer))
            .map(drop)
    }

    pub fn read_at(&mut self, lba: u64, blocks: u64, at: usize) -> Outcome {
        let len = blocks as usize * self.block();
        let buffer = self.buffer(at, len)?;
        buffer.fill(0xa5)?;
        let buffer = self.run(Op::Read, lba, blocks, Some(buffer))?;
        self.model.check(lba, &buffer.ok_or("no buffer")?.to_vec()?)
    }

    /// Plain memory that the device cannot reach, from any byte on.
    pub fn plain(&mut self, lba: u64, blocks: u64, skew: usize) -> Outcome {
        let bytes = self.model.write(lba, blocks);
        let mut memory = vec![0; bytes.len() + skew];
        memory[skew..].copy_from_slice(&bytes);
        self.queue.write(lba, &memory[skew..], true)?;
        memory.fill(0xa5);
        self.queue.read(lba, &mut memory[skew..])?;
        self.model.check(lba, &memory[skew..])
    }

    /// Starts a random read or write of up to `most` blocks that overlaps nothing in flight.
    pub fn start(&mut self, most: u64) -> Outcome {
        let blocks = 1 + self.random.below(most);
        let lba = self.place(blocks);
        let overlaps = |(first, count): &(u64, u64)| lba < first + count && *first < lba + blocks;
        let slot = (self.next % 32) as usize;
        let room = MEMORY / 32;
        let len = blocks as usize * self.block();
        let taken = self
            .in_flight
            .keys()
            .any(|key| (*key % 32) as usize == slot);
        if taken || self.busy.iter().any(overlaps) || len + 4096 > room {
            // This size does not fit now; the random sequence continues.
            self.next += u64::from(taken);
            return Ok(());
        }
        let at = slot * room + self.random.below(1024) as usize * 4;
        let buffer = self.buffer(at, len)?;
        let write = self.random.below(2) == 0;
        let op = if write {
            buffer.write(0, &self.model.write(lba, blocks))?;
            Op::Write { fua: false }
        } else {
            buffer.fill(0xa5)?;
            Op::Read
        };
        let user_data = self.next;
        self.next += 1;
        let mut buffer = Some(buffer);
        while buffer.is_some() {
            let request = Request {
                op,
                lba,
                blocks,
                buffer: buffer.take(),
                user_data,
            };
            match self.queue.submit(request) {
                Ok(()) => {}
                // The parts of larger requests have taken all slots.
                Err(refused) if refused.why == SubmitRefusal::Full => {
                    buffer = refused.buffer;
                    self.reap()?;
                }
                Err(refused) => return Err(refused.into()),
            }
        }
        self.in_flight.insert(user_data, (lba, blocks, write));
        self.busy.push((lba, blocks));
        Ok(())
    }

    fn complete(&mut self, completion: Completion) -> Outcome {
        let known = self.in_flight.remove(&completion.user_data);
        let (lba, blocks, write) = known.ok_or("a completion of nothing in flight")?;
        self.busy.retain(|range| *range != (lba, blocks));
        completion
            .result
            .map_err(|e| format!("{blocks} blocks at {lba}: {e}"))?;
        self.done += 1;
        let buffer = completion.buffer.ok_or("no buffer")?;
        if write {
            Ok(())
        } else {
            self.model.check(lba, &buffer.to_vec()?)
        }
    }

    fn reap(&mut self) -> Outcome {
        let deadline = Instant::now() + LIMIT;
        let mut done = Vec::new();
        // The wait also returns without a completion, after a look at the controller or a reset.
        while done.is_empty() {
            ensure(
                Instant::now() < deadline,
                format!(
                    "nothing completed within {LIMIT:?}: {:?}",
                    self.queue.counters()
                ),
            )?;
            self.queue.wait(LIMIT, |completion| done.push(completion))?;
        }
        done.into_iter()
            .try_for_each(|completion| self.complete(completion))
    }

    pub fn drain(&mut self) -> Outcome {
        while !self.in_flight.is_empty() {
            self.reap()?;
        }
        Ok(())
    }

    /// Random reads and writes at depth 32, most of them small.
    pub fn random(&mut self, count: u64) -> Outcome {
        let most = ((MEMORY / 32 - 4096) / self.block()) as u64;
        for _ in 0..count {
            let most = if self.random.below(4) == 0 { most } else { 16 };
            self.start(most)?;
            while self.in_flight.len() >= 24 {
                self.reap()?;
            }
        }
        self.drain()
    }

    /// Everything once more, from the disk.
    pub fn finish(mut self, name: &str) -> Outcome {
        let mut bytes = vec![0; self.model.blocks() as usize * self.block()];
        self.queue.read(self.model.first(), &mut bytes)?;
        self.model.check(self.model.first(), &bytes)?;
        println!(
            "{name}: {} requests; {:?}",
            self.done,
            self.queue.counters()
        );
        Ok(())
    }
}
