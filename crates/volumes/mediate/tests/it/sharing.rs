//! Virtual queue pairs that share a physical one.

use crate::common::model::{Config, Model};
use crate::common::*;
use driver::{Device, Error, Options};
use mediate::{DirectOptions, DirectQueue, QueuePairPool, Slice};
use nvme::{NvmOpcode, Status};
use std::sync::Arc;

const MEMORY: u64 = 1 << 20;

fn device(io_queues: u16) -> (Arc<Model>, Device) {
    let model = Model::new(Config {
        io_queues,
        ..Config::default()
    });
    let device = open(&model, Options::default());
    (model, device)
}

fn slice(device: &Device, n: u64) -> Slice {
    Slice::new(&device.namespace(1).unwrap(), n * 100, 100, false).unwrap()
}

#[test]
fn pool_assigns_least_used_queue() {
    let (model, device) = device(2);
    let mut pool = QueuePairPool::new(device.clone());
    let mut guests: Vec<Guest> = (0..5)
        .map(|n| {
            let slice = slice(&device, n);
            let queue = pool.queue(DirectOptions::new(1, slice)).unwrap();
            Guest::on(&device, queue, slice, MEMORY)
        })
        .collect();
    model.take_log();
    for (n, guest) in guests.iter_mut().enumerate() {
        guest.write_memory(BASE, &[n as u8 + 1; 4096]);
        let write = rw(NvmOpcode::WRITE, 0, 8, BASE, 0);
        assert_eq!(guest.run(&write), Status::SUCCESS);
    }
    let qids: Vec<u16> = model.take_log().iter().map(|seen| seen.qid).collect();
    let mut counts = [0; 3];
    qids.iter().for_each(|qid| counts[usize::from(*qid)] += 1);
    counts.sort_unstable();
    assert_eq!(counts, [0, 2, 3]);
    let disk = model.disk();
    for n in 0..5 {
        assert!(disk[n * 51_200..][..4096].iter().all(|&b| b == n as u8 + 1));
    }
    // Another worker finds none.
    let other = QueuePairPool::new(device.clone()).queue(DirectOptions::new(1, slice(&device, 9)));
    assert!(matches!(other, Err(Error::NoQueue { allowed: 2 })));
    // They are released with the last user.
    guests.clear();
    QueuePairPool::new(device.clone())
        .queue(DirectOptions::new(1, slice(&device, 9)))
        .unwrap();
}

/// Two guests on one physical queue pair of this depth.
fn two(device: &Device, depth: u32) -> (Guest, Guest) {
    let mut options = DirectOptions::new(1, slice(device, 0));
    options.depth = depth;
    let first = Guest::with(device, options, MEMORY);
    let second = slice(device, 1);
    let queue: DirectQueue = first.queue.share(DirectOptions::new(1, second)).unwrap();
    let second = Guest::on(device, queue, second, MEMORY);
    (first, second)
}

/// As much as there is room for.
fn fill(guest: &mut Guest) -> usize {
    let mut count = 0;
    while guest.queue.room() > 0 {
        guest.submit(&rw(NvmOpcode::READ, 0, 8, BASE, 0)).unwrap();
        count += 1;
    }
    guest.queue.ring();
    count
}

#[test]
fn queue_share_depends_on_active_users() {
    let (model, device) = device(2);
    let (mut greedy, mut late) = two(&device, 64);
    model.freeze(true);
    assert_eq!(fill(&mut greedy), 64);
    // Nothing is left, but the other queue is seen.
    assert_eq!(fill(&mut late), 0);
    let mut served = (0, 0);
    for _ in 0..200 {
        model.freeze(false);
        for guest in [&mut greedy, &mut late] {
            guest.poll();
        }
        served.0 += greedy.ended.drain().count();
        served.1 += late.ended.drain().count();
        model.freeze(true);
        // The first one takes what there is: its share, not more.
        fill(&mut greedy);
        fill(&mut late);
        assert!(greedy.queue.in_flight() <= 64 && late.queue.in_flight() <= 32);
    }
    let share = served.1 as f64 / (served.0 + served.1) as f64;
    assert!((0.45..=0.55).contains(&share), "{served:?}");
    // When it has gone, the other has all again.
    model.freeze(false);
    late.drain();
    drop(late);
    greedy.drain();
    model.freeze(true);
    assert_eq!(fill(&mut greedy), 64);
    model.freeze(false);
    greedy.drain();
}

#[test]
fn completions_polled_by_other_reach_owner() {
    let (model, device) = device(1);
    let (mut one, mut other) = two(&device, 32);
    for _ in 0..100 {
        let mine = one.submit(&rw(NvmOpcode::READ, 0, 8, BASE, 0)).unwrap();
        let its = other.submit(&rw(NvmOpcode::READ, 0, 8, BASE, 0)).unwrap();
        while !one.ended.contains_key(&mine) {
            one.poll();
        }
        // The other's came at the same time, and waits.
        assert!(other.ended.is_empty());
        other.queue.poll(&mut |token, status, _| {
            assert_eq!((token, status), (its, Status::SUCCESS));
        });
        assert_eq!(other.queue.in_flight(), 0);
        one.ended.clear();
    }
    // One that goes with commands in flight leaves nothing behind.
    model.freeze(true);
    fill(&mut other);
    drop(other);
    model.freeze(false);
    while one.queue.room() == 0 {
        one.poll();
    }
    assert_eq!(
        one.run(&rw(NvmOpcode::READ, 0, 8, BASE, 0)),
        Status::SUCCESS
    );
    one.drain();
    assert_eq!(one.queue.room(), 32);
}

/// A guest with so many places on a device that takes no more than 8 KiB at a time.
fn splitting(depth: u32) -> (std::sync::Arc<Model>, Guest) {
    let model = Model::new(Config {
        mdts: 1,
        ..Config::default()
    });
    let device = open(&model, Options::default());
    let slice = Slice::whole(&device.namespace(1).unwrap(), false).unwrap();
    let mut options = DirectOptions::new(1, slice);
    options.depth = depth;
    let guest = Guest::with(&device, options, MEMORY);
    (model, guest)
}

#[test]
fn split_command_waits_for_room_and_is_aborted() {
    let (model, mut guest) = splitting(4);
    // 32 parts of 8 KiB, four at a time.
    let mut write = rw(NvmOpcode::WRITE, 16, 512, 0, 0);
    let bytes: Vec<u8> = (0..512 * 512u32).map(|i| ((i * 7) >> 4) as u8).collect();
    guest.write_memory(BASE + 0x200, &bytes);
    prps(&guest, &mut write, BASE + 0x200, 512 * 512, BASE + 0xf_0000);
    model.take_log();
    assert_eq!(guest.run(&write), Status::SUCCESS);
    assert_eq!(model.take_log().len(), 32);
    assert!(model.disk()[16 * 512..][..bytes.len()] == bytes);
    // A part fails: the rest does not even begin.
    let mut count = 0;
    model.hook(move |_| {
        count += 1;
        if count == 6 {
            crate::common::model::Fate::End(Status::WRITE_FAULT, 0)
        } else {
            crate::common::model::Fate::Execute
        }
    });
    assert_eq!(guest.run(&write), Status::WRITE_FAULT);
    assert!(model.take_log().len() < 12);
    model.unhook();
    // Called off while most of it waits.
    model.freeze(true);
    let token = guest.submit(&write).unwrap();
    guest.poll();
    assert_eq!(guest.queue.room(), 0);
    assert!(guest.queue.abort(token) && !guest.queue.abort(token + 1));
    model.freeze(false);
    assert_eq!(guest.wait(token).0, Status::ABORT_REQUESTED);
    guest.drain();
    assert_eq!(guest.queue.room(), 4);
}

#[test]
fn batch_of_split_commands_fits_reported_room() {
    let (model, mut guest) = splitting(6);
    // Each large one is 8 parts of 8 KiB: more than there is place for all together.
    let mut batch = Vec::new();
    for n in 0..3 {
        let at = BASE + n * 0x1_0000;
        guest.write_memory(at, &[n as u8 + 1; 0x1_0000]);
        let mut large = rw(NvmOpcode::WRITE, n * 128, 128, 0, 0);
        prps(&guest, &mut large, at, 0x1_0000, BASE + 0xf_0000 + n * PAGE);
        batch.push(large);
        batch.push(rw(NvmOpcode::READ, 600, 8, BASE + 0x8_0000, 0));
    }
    for _ in 0..3 {
        assert_eq!(guest.queue.room(), 6);
        let tokens: Vec<u64> = batch
            .iter()
            .map(|command| guest.submit(command).unwrap())
            .collect();
        guest.queue.ring();
        for token in tokens {
            assert_eq!(guest.wait(token).0, Status::SUCCESS);
        }
        for n in 0..3usize {
            let written = &model.disk()[n * 0x1_0000..][..0x1_0000];
            assert!(written.iter().all(|&b| b == n as u8 + 1));
        }
        model.set_disk(0, &[0; 3 * 0x1_0000]);
    }
}
