//! Random I/O with verification through the whole driver: sizes from one block to beyond MDTS,
//! buffers at every alignment, many commands in flight on two queue pairs, resets in between.

use crate::worker::{LIMIT, Worker};
use crate::{Outcome, ensure};
use driver::transport::Transport;
use driver::{Device, DmaBuffer, Doorbells, Op, Options, QueueOptions, QueuePair};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of the namespace that each part works on.
const PART: u64 = 4 << 20;

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
        let mut worker = part(&device, queue, 2, 77)?;
        worker.random(200)?;
        worker.finish(name)?;
        device.close();
    }
    Ok(())
}

/// A worker on one of the parts.
fn part(device: &Device, queue: QueuePair, part: u64, seed: u64) -> Outcome<Worker> {
    Worker::new(device, queue, part * PART..(part + 1) * PART, seed)
}

fn queue_options(sleepy: bool) -> QueueOptions {
    QueueOptions {
        repeats: false,
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

/// Blocks that the kernel's driver wrote before: each 64-bit word of a 4 KiB block is
/// the block's offset in bytes.
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

/// Writes the same pattern elsewhere, for the kernel's driver to read.
fn leave(device: &Device) -> Outcome {
    let mut queue = device.queue(1, QueueOptions::default())?;
    let word = |i: u64| (PART + (i / 512) * 4096).to_le_bytes();
    let bytes: Vec<u8> = (0..PART / 8).flat_map(word).collect();
    let block = u64::from(queue.block_size());
    queue.write(PART / block, &bytes, true)?;
    println!("left a pattern for the kernel's driver");
    Ok(())
}

/// Tests sizes one after the other: every size up to 64 blocks, sizes around MDTS and its double,
/// and further ones, in memory of the driver at every alignment to four bytes, and in plain memory
/// at any alignment.
fn sizes(device: &Device) -> Outcome {
    let queue = device.queue(1, queue_options(true))?;
    let mdts = u64::from(queue.max_blocks());
    let mut worker = part(device, queue, 2, 1)?;
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
    let mut worker = part(device, queue, 2, 2)?;
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
                        let mut worker = part(device, queue, 2 + i as u64, 10 + i as u64)?;
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

/// With the buffers in use, a doorbell that is rung again before the controller has
/// looked needs no register.
fn shadow(device: &Device) -> Outcome {
    let Some(buffers) = device.shadow_buffers() else {
        return ensure(false, "Doorbell Buffer Config was not accepted");
    };
    let queue = device.queue(1, queue_options(false))?;
    let mut worker = part(device, queue, 2, 3)?;
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
    // Whether a doorbell was silent is a matter of time: a controller with a processor
    // to itself looks after each.
    worker.finish("shadow doorbells")
}

/// Controller resets with commands in flight, and one of the function, which the
/// driver has not asked for.
fn resets(device: &Device, transport: &Arc<dyn Transport>) -> Outcome {
    let queue = device.queue(1, queue_options(true))?;
    let mut worker = part(device, queue, 3, 4)?;
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
