//! Random I/O with verification through the whole driver: sizes from one block to beyond MDTS, buffers at every
//! alignment, many commands in flight on two queue pairs, resets in between.

use crate::pattern::{Model, Random};
use crate::{Outcome, ensure};
use dma::Memory;
use driver::transport::Transport;
use driver::{
    Completion, Device, DmaBuffer, Doorbells, Op, Options, QueueOptions, QueuePair, Refusal,
    Request,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of the namespace that each part works on.
const PART: u64 = 4 << 20;
/// Memory for data, registered as a whole.
const MEMORY: usize = 8 << 20;
const LIMIT: Duration = Duration::from_secs(60);

/// All checks, and none of them twice with the same settings.
pub fn check(transport: &Arc<dyn Transport>) -> Outcome {
    let device = Device::open(transport.clone(), Options::default())?;
    let limits = device.limits();
    let namespace = device.namespace(1)?;
    println!("{limits:?}");
    println!("{namespace:?}");
    ensure(limits.io_queues >= 2, "fewer than two I/O queue pairs")?;
    handed_over(&device)?;
    sizes(&device)?;
    others(&device)?;
    parallel(&device)?;
    if limits.doorbell_buffers {
        shadow(&device)?;
    }
    resets(&device, transport)?;
    leave(&device)?;
    device.close();
    drop(device);
    for (name, options) in [
        (
            "MMIO doorbells only",
            Options {
                doorbells: Doorbells {
                    shadow: false,
                    ..Doorbells::default()
                },
                ..Options::default()
            },
        ),
        (
            "no SGL",
            Options {
                sgl: false,
                ..Options::default()
            },
        ),
        (
            "no interrupts, commands of 16 KiB",
            Options {
                interrupts: false,
                max_transfer: 16 << 10,
                ..Options::default()
            },
        ),
    ] {
        let device = Device::open(transport.clone(), options)?;
        let queue = device.queue(1, queue_options(false))?;
        let mut worker = Worker::new(&device, queue, 2, 77)?;
        worker.random(200)?;
        worker.finish(name)?;
        device.close();
    }
    Ok(())
}

fn queue_options(sleepy: bool) -> QueueOptions {
    QueueOptions {
        polled: false,
        depth: 32,
        interrupts: sleepy,
        // No polling: every completion has to come by its interrupt.
        poll_window: if sleepy {
            Duration::ZERO
        } else {
            Duration::from_millis(10)
        },
        // Small rings, so that they wrap often.
        entries: 0,
    }
}

/// Blocks that the kernel's driver wrote before: each 64-bit word of a 4 KiB block is the block's offset in bytes.
fn handed_over(device: &Device) -> Outcome {
    let mut queue = device.queue(1, QueueOptions::default())?;
    let mut bytes = vec![0; PART as usize];
    queue.read(0, &mut bytes)?;
    let intact = bytes.chunks_exact(4096).enumerate().all(|(i, block)| {
        let offset = (i as u64 * 4096).to_le_bytes();
        block.chunks_exact(8).all(|word| word == offset)
    });
    ensure(intact, "what the kernel's driver wrote is not there")?;
    println!("read what the kernel's driver wrote");
    Ok(())
}

/// The same, for the kernel's driver to read.
fn leave(device: &Device) -> Outcome {
    let mut queue = device.queue(1, QueueOptions::default())?;
    let word = |i: u64| (PART + (i / 512) * 4096).to_le_bytes();
    let bytes: Vec<u8> = (0..PART / 8).flat_map(word).collect();
    let block = u64::from(queue.block_size());
    queue.write(PART / block, &bytes, true)?;
    println!("left a pattern for the kernel's driver");
    Ok(())
}

/// One after the other: every size up to 64 blocks, those around MDTS and its double, and others, in memory of the driver
/// at every alignment to four bytes, and in plain memory at any alignment.
fn sizes(device: &Device) -> Outcome {
    let queue = device.queue(1, queue_options(true))?;
    let mdts = u64::from(queue.max_blocks());
    let mut worker = Worker::new(device, queue, 2, 1)?;
    let around = |n: u64| [n - 1, n, n + 1];
    let mut sizes: Vec<u64> = (1..=64).collect();
    sizes.extend(around(mdts).into_iter().chain(around(2 * mdts)));
    sizes.extend((0..40).map(|_| 1 + worker.random.below(5 * mdts / 2)));
    for (i, blocks) in sizes.iter().enumerate() {
        let lba = worker.place(*blocks);
        let at = worker.random.below(1024) as usize * 4;
        worker.write_at(lba, *blocks, at)?;
        worker.read_at(lba, *blocks, 4096 - at)?;
        if i % 4 == 0 {
            worker.plain(lba, *blocks, i % 9)?;
        }
    }
    println!(
        "sizes: {} from 1 to {} blocks, {mdts} in a command",
        sizes.len(),
        5 * mdts / 2
    );
    ensure(
        worker.queue.counters().sleeps > 0,
        "no completion by interrupt",
    )?;
    worker.finish("sizes")
}

/// Flush, Write Zeroes, Compare and Deallocate, as far as the controller has them.
fn others(device: &Device) -> Outcome {
    let limits = device.limits();
    let queue = device.queue(1, QueueOptions::default())?;
    let mut worker = Worker::new(device, queue, 2, 2)?;
    let lba = worker.place(4096);
    worker.write_at(lba, 4096, 0)?;
    worker.run(Op::Flush, 0, 0, None)?;
    if limits.write_zeroes {
        worker.run(
            Op::WriteZeroes {
                fua: true,
                deallocate: true,
            },
            lba + 7,
            3000,
            None,
        )?;
        worker.model.zero(lba + 7, 3000);
    }
    worker.read_at(lba, 4096, 0)?;
    if limits.compare {
        let same = worker.model.expected(lba, 100);
        let buffer = worker.buffer(12, same.len())?;
        buffer.write(0, &same)?;
        let buffer = worker
            .run(Op::Compare, lba, 100, Some(buffer))?
            .ok_or("no buffer")?;
        buffer.write(same.len() - 1, &[!same[same.len() - 1]])?;
        let different = worker.run(Op::Compare, lba, 100, Some(buffer));
        ensure(different.is_err(), "a difference was not noticed")?;
    }
    if limits.dataset_management {
        worker.run(Op::Deallocate, lba, 64, None)?;
        // Deallocated blocks may hold anything; they are given a meaning again.
        worker.write_at(lba, 64, 0)?;
    }
    worker.finish("flush, write zeroes, compare, deallocate")
}

/// Two queue pairs in two threads, one that polls and one that sleeps.
fn parallel(device: &Device) -> Outcome {
    std::thread::scope(|scope| {
        let workers: Vec<_> = [false, true]
            .into_iter()
            .enumerate()
            .map(|(i, sleepy)| {
                scope.spawn(move || -> Result<(), String> {
                    let run = || -> Outcome {
                        let queue = device.queue(1, queue_options(sleepy))?;
                        let mut worker = Worker::new(device, queue, 2 + i as u64, 10 + i as u64)?;
                        worker.random(600)?;
                        let sleeps = worker.queue.counters().sleeps;
                        ensure(!sleepy || sleeps > 0, "never slept")?;
                        worker.finish(if sleepy {
                            "depth 32, by interrupt"
                        } else {
                            "depth 32, polled"
                        })
                    };
                    run().map_err(|e| e.to_string())
                })
            })
            .collect();
        for worker in workers {
            worker.join().map_err(|_| "a thread panicked")??;
        }
        Ok(())
    })
}

/// With the buffers in use, a doorbell that is rung again before the controller has looked needs no register.
fn shadow(device: &Device) -> Outcome {
    let Some(buffers) = device.shadow_buffers() else {
        return ensure(false, "Doorbell Buffer Config was not accepted");
    };
    let queue = device.queue(1, queue_options(false))?;
    let mut worker = Worker::new(device, queue, 2, 3)?;
    for _ in 0..50 {
        for _ in 0..16 {
            worker.start(8)?;
            worker.queue.ring();
        }
        worker.drain()?;
    }
    // Both sides use their buffers: the controller has asked for the doorbell after the last one.
    let at = usize::from(worker.queue.qid()) * 8;
    let read = |buffer: &DmaBuffer| -> Result<u32, Box<dyn std::error::Error>> {
        let mut bytes = [0; 4];
        buffer.read(at, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    };
    let start = Instant::now();
    loop {
        let (doorbell, asked) = (read(buffers.doorbells())?, read(buffers.eventidxs())?);
        let counters = worker.queue.counters();
        let told = format!("doorbell {doorbell}, EventIdx {asked}, {counters:?}");
        if doorbell > 0 && asked == doorbell {
            break;
        }
        ensure(
            start.elapsed() < LIMIT,
            format!("the buffers are not kept: {told}"),
        )?;
        if doorbell == 0 {
            // Where the ring begins again; else nobody has written it.
            worker.start(8)?;
            worker.queue.ring();
            worker.drain()?;
        }
    }
    // Whether a doorbell was silent is a matter of time: a controller with a processor to itself looks after each.
    worker.finish("shadow doorbells")
}

/// Controller resets with commands in flight, and one of the function, which the driver has not asked for.
fn resets(device: &Device, transport: &Arc<dyn Transport>) -> Outcome {
    let queue = device.queue(1, queue_options(true))?;
    let mut worker = Worker::new(device, queue, 3, 4)?;
    for round in 0..6 {
        for _ in 0..24 {
            worker.start(64)?;
        }
        worker.queue.ring();
        match round {
            5 => transport.reset()?,
            _ => device.reset()?,
        }
        worker.drain()?;
        worker.random(30)?;
    }
    ensure(
        worker.queue.counters().recreated > 0,
        "the queue pair was never set up again",
    )?;
    ensure(device.resets() >= 6, format!("{} resets", device.resets()))?;
    worker.finish("resets under load")
}

/// A queue pair with a part of the namespace and a model of it.
struct Worker {
    queue: QueuePair,
    model: Model,
    random: Random,
    registration: driver::iova::Registration,
    in_flight: HashMap<u64, (u64, u64, bool)>,
    /// Blocks that commands in flight touch: no two of them overlap, because their order is not defined.
    busy: Vec<(u64, u64)>,
    next: u64,
    done: u64,
}

impl Worker {
    fn new(device: &Device, queue: QueuePair, part: u64, seed: u64) -> Outcome<Worker> {
        let block = queue.block_size();
        let blocks = PART / u64::from(block);
        let memory = Memory::anonymous(MEMORY)?;
        let mut worker = Worker {
            model: Model::new(part * blocks, blocks, block),
            random: Random(seed),
            registration: device.register(&memory)?,
            in_flight: HashMap::new(),
            busy: Vec::new(),
            next: 1,
            done: 0,
            queue,
        };
        // From a known state: all zeroes, written in plain memory.
        let zeroes = vec![0; PART as usize];
        worker.queue.write(worker.model.first(), &zeroes, false)?;
        Ok(worker)
    }

    fn block(&self) -> usize {
        self.queue.block_size() as usize
    }

    /// A place for some blocks.
    fn place(&mut self, blocks: u64) -> u64 {
        self.model.first() + self.random.below(self.model.blocks() - blocks + 1)
    }

    /// A buffer at an offset in the registered memory.
    fn buffer(&self, at: usize, len: usize) -> Outcome<DmaBuffer> {
        let buffer = DmaBuffer::of(&self.registration, at as u64, len as u64);
        Ok(buffer.ok_or("outside of the registered memory")?)
    }

    /// One request, waited for.
    fn run(
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

    fn write_at(&mut self, lba: u64, blocks: u64, at: usize) -> Outcome {
        let bytes = self.model.write(lba, blocks);
        let buffer = self.buffer(at, bytes.len())?;
        buffer.write(0, &bytes)?;
        self.run(Op::Write { fua: false }, lba, blocks, Some(buffer))
            .map(drop)
    }

    fn read_at(&mut self, lba: u64, blocks: u64, at: usize) -> Outcome {
        let len = blocks as usize * self.block();
        let buffer = self.buffer(at, len)?;
        buffer.fill(0xa5)?;
        let buffer = self.run(Op::Read, lba, blocks, Some(buffer))?;
        self.model.check(lba, &buffer.ok_or("no buffer")?.to_vec()?)
    }

    /// Plain memory that the device cannot reach, from any byte on.
    fn plain(&mut self, lba: u64, blocks: u64, skew: usize) -> Outcome {
        let bytes = self.model.write(lba, blocks);
        let mut memory = vec![0; bytes.len() + skew];
        memory[skew..].copy_from_slice(&bytes);
        self.queue.write(lba, &memory[skew..], true)?;
        memory.fill(0xa5);
        self.queue.read(lba, &mut memory[skew..])?;
        self.model.check(lba, &memory[skew..])
    }

    /// Starts a random read or write of up to `most` blocks that overlaps nothing in flight.
    fn start(&mut self, most: u64) -> Outcome {
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
            // Not this one; the sequence goes on.
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
                Err(refused) if refused.why == Refusal::Full => {
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
        // It also comes back with nothing, after a look at the controller or a reset.
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

    fn drain(&mut self) -> Outcome {
        while !self.in_flight.is_empty() {
            self.reap()?;
        }
        Ok(())
    }

    /// Random reads and writes at depth 32, most of them small.
    fn random(&mut self, count: u64) -> Outcome {
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
    fn finish(mut self, name: &str) -> Outcome {
        let mut bytes = vec![0; PART as usize];
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
