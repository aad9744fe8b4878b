//! A guest with an NVMe driver: two queue pairs under load, each with half of the namespace,
//! while the controller is reset.

use crate::pattern::{Model, Random};
use crate::worker::Worker;
use crate::{Outcome, ensure};
use dma::Memory;
use driver::{Device, DeviceTarget, Op, QueueOptions};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Memory that the controller may reach, and that no command names: a wrong
/// address has something to hit.
const BYSTANDER: usize = 4 << 20;

/// Loads the namespace, and returns its expected contents.
pub fn run(socket: &str, end: Instant) -> Outcome<Vec<u8>> {
    let target = DeviceTarget::parse(&format!("vfio-user://{socket}/1"))?;
    let device = target.open()?;
    let namespace = device.namespace(1)?;
    let block = u64::from(namespace.block_size());
    let half = namespace.blocks / 2 * block;
    let bystander = Memory::anonymous(BYSTANDER)?;
    let pages = (BYSTANDER / 4096) as u64;
    let untouched = Model::new(0, pages, 4096).write(0, pages);
    bystander.write(0, &untouched)?;
    let registration = device.register(&bystander)?;
    let ranges = [0..half, half..namespace.blocks * block];
    let failed = AtomicBool::new(false);
    let halves = std::thread::scope(|scope| -> Outcome<Vec<Vec<u8>>> {
        let workers = ranges.map(|range| {
            let (device, failed) = (&device, &failed);
            scope.spawn(move || {
                let result = load(device, range, end).map_err(|e| e.to_string());
                failed.fetch_or(result.is_err(), Ordering::Relaxed);
                result
            })
        });
        let mut random = Random(11);
        let mut resets = 0;
        while Instant::now() < end && !failed.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(500 + random.below(1500)));
            match resets % 4 {
                // A reset that the driver did not request.
                3 => device.transport().reset()?,
                _ => device.reset()?,
            }
            resets += 1;
        }
        println!("{resets} resets of the controller");
        let done = workers.map(|worker| worker.join());
        done.into_iter()
            .map(|half| Ok(half.map_err(|_| "a thread panicked")??))
            .collect()
    })?;
    let mut now = vec![0; BYSTANDER];
    bystander.read(0, &mut now)?;
    ensure(
        now == untouched,
        "memory that no command named was written to",
    )?;
    drop(registration);
    device.close();
    Ok(halves.concat())
}

fn load(device: &Device, range: Range<u64>, end: Instant) -> Outcome<Vec<u8>> {
    let queue = device.queue(
        1,
        QueueOptions {
            depth: 32,
            ..QueueOptions::default()
        },
    )?;
    let limits = device.limits();
    let seed = 1 + range.start;
    let mut worker = Worker::new(device, queue, range, seed)?;
    let mut rounds = 0;
    while Instant::now() < end {
        worker.random(100)?;
        rounds += 1;
        let blocks = 1 + worker.random.below(256);
        let lba = worker.place(blocks);
        match rounds % 6 {
            0 => drop(worker.run(Op::Flush, 0, 0, None)?),
            1 if limits.write_zeroes => {
                let op = Op::WriteZeroes {
                    fua: false,
                    deallocate: true,
                };
                worker.run(op, lba, blocks, None)?;
                worker.model.zero(lba, blocks);
            }
            2 if limits.dataset_management => {
                worker.run(Op::Deallocate, lba, blocks, None)?;
                // Deallocated blocks may hold anything; they are given a meaning again.
                worker.write_at(lba, blocks, 4)?;
            }
            // More than a command carries.
            3 => {
                let blocks = 2 * u64::from(worker.queue.max_blocks()) + 3;
                let lba = worker.place(blocks.min(worker.model.blocks()));
                worker.plain(lba, blocks.min(worker.model.blocks()), 3)?;
            }
            // Both ends of the slice.
            4 => {
                let (first, blocks) = (worker.model.first(), worker.model.blocks());
                worker.write_at(first, 1, 0)?;
                worker.write_at(first + blocks - 1, 1, 0)?;
            }
            _ => worker.read_at(lba, blocks, 0)?,
        }
    }
    let bytes = worker
        .model
        .expected(worker.model.first(), worker.model.blocks());
    worker.finish("half of the namespace")?;
    Ok(bytes)
}
