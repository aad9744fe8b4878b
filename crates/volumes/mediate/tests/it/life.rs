//! The device's life under guests: late answers, resets, suspension, removal, a request to give it
//! back; and guests' memory that comes and goes meanwhile.

use crate::common::model::{Config, Fate, Model};
use crate::common::*;
use dma::{Memory, Prot};
use driver::transport::Transport;
use driver::{Device, Error, Options};
use mediate::Slice;
use nvme::{NvmOpcode, Status};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

const MEMORY: u64 = 1 << 20;

fn impatient() -> Options {
    Options {
        command_timeout: Duration::from_millis(60),
        admin_timeout: Duration::from_secs(1),
        ..Options::default()
    }
}

fn guest(options: Options) -> (Arc<Model>, Device, Guest) {
    let model = Model::new(Config::default());
    let device = open(&model, options);
    let slice = Slice::new(&device.namespace(1).unwrap(), 100, 1000, false).unwrap();
    let guest = Guest::new(&device, slice, MEMORY);
    (model, device, guest)
}

/// Eight writes of a page each, in flight.
fn write_eight(guest: &mut Guest, seed: u8) -> Vec<u64> {
    (0..8u64)
        .map(|i| {
            guest.write_memory(BASE + i * PAGE, &[seed + i as u8; PAGE as usize]);
            let write = rw(NvmOpcode::WRITE, i * 8, 8, BASE + i * PAGE, 0);
            guest.submit(&write).unwrap()
        })
        .collect()
}

fn check_eight(model: &Model, seed: u8) {
    let disk = model.disk();
    for i in 0..8usize {
        let at = (100 + i * 8) * 512;
        assert!(disk[at..at + 4096].iter().all(|&b| b == seed + i as u8));
    }
}

#[test]
fn suspended_commands_are_repeated_on_resume() {
    let (model, device, mut guest) = guest(impatient());
    for round in 0..10u8 {
        model.freeze(true);
        let mut tokens = write_eight(&mut guest, round * 20);
        guest.queue.ring();
        device.suspend().unwrap();
        assert!(device.is_suspended() && !device.is_gone());
        // The device is not there, and nobody minds: not the commands in flight, however
        // long it takes, not new ones.
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(if round == 0 { 300 } else { 1 }) {
            guest.poll();
        }
        let flush = nvme::Command::new(NvmOpcode::FLUSH.0, 0, 1);
        tokens.push(guest.submit(&flush).unwrap());
        guest.poll();
        assert!(guest.ended.is_empty());
        assert!(matches!(device.health(), Err(Error::Suspended)));
        let other = mediate::DirectOptions::new(1, guest.slice);
        assert!(mediate::DirectQueue::reserve(&device, other).is_err());
        // The one that suspended it does something to it.
        Transport::reset(&*model).unwrap();
        model.freeze(false);
        device.resume().unwrap();
        for token in tokens {
            assert_eq!(guest.wait(token).0, Status::SUCCESS);
        }
        check_eight(&model, round * 20);
    }
    assert_eq!(device.resets(), 0);
    assert!(model.faults().is_empty());
}

#[test]
fn closed_suspended_queue_is_gone() {
    let (model, device, mut guest) = guest(Options::default());
    model.freeze(true);
    let tokens = write_eight(&mut guest, 1);
    guest.poll();
    device.suspend().unwrap();
    guest.poll();
    device.close();
    for token in tokens {
        assert_eq!(guest.wait(token).0, Status::INTERNAL_ERROR.with_dnr(true));
    }
    assert!(device.resume().is_err());
}

#[test]
fn unanswered_commands_are_repeated_after_reset() {
    let (model, device, mut guest) = guest(impatient());
    let swallowed = AtomicU32::new(0);
    model.hook(move |_| {
        // The third and the fifth of the first eight.
        match swallowed.fetch_add(1, Ordering::Relaxed) {
            2 | 4 => Fate::Swallow,
            _ => Fate::Execute,
        }
    });
    for token in write_eight(&mut guest, 60) {
        assert_eq!(guest.wait(token).0, Status::SUCCESS);
    }
    check_eight(&model, 60);
    assert!(device.resets() >= 1);
    assert!(model.faults().is_empty());
    // For ever: the guest is told.
    model.hook(|_| Fate::Swallow);
    let read = rw(NvmOpcode::READ, 0, 8, BASE, 0);
    assert_eq!(guest.run(&read), Status::ABORT_REQUESTED);
    model.unhook();
    assert_eq!(guest.run(&read), Status::SUCCESS);
}

#[test]
fn device_removal_fails_commands_cleanly() {
    let (model, _device, mut guest) = guest(impatient());
    model.freeze(true);
    let tokens = write_eight(&mut guest, 1);
    guest.poll();
    model.vanish();
    let gone = Status::INTERNAL_ERROR.with_dnr(true);
    for token in tokens {
        assert_eq!(guest.wait(token).0, gone);
    }
    let read = rw(NvmOpcode::READ, 0, 8, BASE, 0);
    assert_eq!(guest.submit(&read), Err(gone));
    assert_eq!(guest.queue.in_flight(), 0);
    // Nothing keeps the guest's memory.
    guest.map.unmap_all();
    assert!(guest.map.quiesced());
}

#[test]
fn device_release_waits_for_commands_in_flight() {
    for stuck in [false, true] {
        let (model, device, mut guest) = guest(Options::default());
        assert!(
            device.request_eventfd().unwrap().is_none(),
            "no such interrupt here"
        );
        model.freeze(true);
        let tokens = write_eight(&mut guest, 3);
        guest.poll();
        let over = Arc::new(AtomicBool::new(false));
        let giver = {
            let over = over.clone();
            let limit = if stuck { 100 } else { 60_000 };
            std::thread::spawn(move || {
                let drained = device.release(Duration::from_millis(limit));
                over.store(true, Ordering::Release);
                drained
            })
        };
        let gone = Status::INTERNAL_ERROR.with_dnr(true);
        let read = rw(NvmOpcode::READ, 0, 8, BASE, 0);
        // Nothing new is taken, what is in flight goes on.
        let start = Instant::now();
        let mut more = Vec::new();
        loop {
            assert!(start.elapsed() < LIMIT);
            match guest.submit(&read) {
                Ok(token) => more.push(token),
                Err(status) if status == gone => break,
                Err(status) => assert_eq!(status, Status::COMMAND_INTERRUPTED),
            }
            guest.poll();
        }
        assert!(stuck || !over.load(Ordering::Acquire));
        if !stuck {
            model.freeze(false);
        }
        for token in tokens.into_iter().chain(more) {
            let expected = if stuck { gone } else { Status::SUCCESS };
            assert_eq!(guest.wait(token).0, expected);
        }
        assert_eq!(giver.join().unwrap(), !stuck);
        assert_eq!(guest.submit(&read), Err(gone));
    }
}

#[test]
fn unmap_waits_for_earlier_commands() {
    let (model, _device, mut guest) = guest(Options::default());
    model.freeze(true);
    let near = guest.submit(&rw(NvmOpcode::READ, 0, 8, BASE, 0)).unwrap();
    let mut far = rw(NvmOpcode::READ, 0, 64, 0, 0);
    prps(&guest, &mut far, BASE + 0x1_0000, 64 * 512, BASE + 0x8_0000);
    let far = guest.submit(&far).unwrap();
    guest.poll();
    guest.map.unmap(BASE, MEMORY).unwrap();
    assert!(!guest.map.quiesced());
    // What comes later does not matter.
    let backing = Some((guest.memory.clone(), 0));
    guest.map.map(BASE, MEMORY, backing, Prot::RW).unwrap();
    let later = guest.submit(&rw(NvmOpcode::READ, 0, 8, BASE, 0)).unwrap();
    assert!(!guest.map.quiesced());
    // Nor does the registration go before them.
    let before = model.mappings();
    guest.registration = None;
    guest.poll();
    assert_eq!(model.mappings(), before);
    model.freeze(false);
    for token in [near, far, later] {
        assert_eq!(guest.wait(token).0, Status::SUCCESS);
    }
    assert!(guest.map.quiesced());
    guest.poll();
    assert_eq!(model.mappings(), before - 1);
    assert!(model.faults().is_empty());
}

#[test]
fn memory_changes_while_commands_run() {
    let (model, device, mut guest) = guest(Options::default());
    let mut random = Random(3);
    let size = 16 * PAGE;
    // Windows of memory of their own, some of it registered; page `i` of
    // window `w` holds its own bytes.
    let window = |w: u64| 0x4000_0000 + w * 0x100_0000;
    let mut windows: Vec<Option<(Memory, Option<driver::iova::Registration>)>> =
        (0..6).map(|_| None).collect();
    for round in 0..4000u64 {
        let w = random.below(6);
        match windows[w as usize].take() {
            None => {
                let memory = Memory::anonymous(size as usize).unwrap();
                let backing = Some((memory.clone(), 0));
                guest.map.map(window(w), size, backing, Prot::RW).unwrap();
                let registered = random.below(3) > 0;
                let registration = registered.then(|| device.register(&memory).unwrap());
                windows[w as usize] = Some((memory, registration));
            }
            Some(gone) => {
                guest.map.unmap(window(w), size).unwrap();
                if random.below(2) == 0 {
                    guest.drain();
                    assert!(guest.map.quiesced());
                }
                drop(gone);
            }
        }
        for _ in 0..4 {
            let w = random.below(6);
            let (page, lba) = (random.below(14), random.below(100) * 8);
            let write = rw(
                NvmOpcode::WRITE,
                lba,
                16,
                window(w) + page * PAGE,
                window(w) + page * PAGE + PAGE,
            );
            match guest.submit(&write) {
                Ok(_) => assert!(windows[w as usize].is_some()),
                Err(status) => {
                    assert!(windows[w as usize].is_none());
                    assert_eq!(status, Status::DATA_TRANSFER_ERROR);
                }
            }
        }
        if round % 3 == 0 {
            guest.poll();
        }
        assert!(
            guest
                .ended
                .drain()
                .all(|(_, (status, _))| status.is_success())
        );
    }
    guest.drain();
    assert!(model.faults().is_empty(), "{:x?}", model.faults());
    let stats = guest.queue.stats();
    assert!(stats.bounced() > 100 && stats.commands() > 2 * stats.bounced());
}

#[test]
fn dropped_queue_waits_for_commands_in_flight() {
    let (model, device, mut guest) = guest(impatient());
    let tokens = write_eight(&mut guest, 9);
    assert_eq!(tokens.len(), 8);
    drop(guest);
    check_eight(&model, 9);
    // Its queue pair is free again.
    for _ in 0..20 {
        let slice = Slice::whole(&device.namespace(1).unwrap(), true).unwrap();
        drop(Guest::new(&device, slice, MEMORY));
    }
}
