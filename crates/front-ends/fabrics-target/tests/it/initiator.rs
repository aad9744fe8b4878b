//! This project's initiator against its own target: two workers, in two threads.

use crate::worker_common;

use crate::common::{NQN, Served, Setup};
use fabrics::{FabricsOptions, FabricsVolume, HostIdentity, Subsystem, discover};
use nvme::log::AnaState;
use proptest::collection::vec;
use proptest::prelude::*;
use remote::HostPort;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use volume::{FileOptions, FileVolume, MemVolume, Op, Volume};
use worker_common::{BOUND, Worker, bytes};

fn options() -> FabricsOptions {
    FabricsOptions {
        kato: Duration::from_secs(60),
        ..FabricsOptions::new()
    }
}

fn open(urls: &[&Served], options: FabricsOptions) -> FabricsVolume {
    let portals: Vec<String> = urls
        .iter()
        .map(|served| served.address.to_string())
        .collect();
    let name = format!("{}/{NQN}/1", portals.join(","));
    FabricsVolume::open(Subsystem::parse(&name).unwrap(), options).unwrap()
}

fn pattern(seed: u8, len: u64) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed | 1)
        .collect()
}

#[test]
fn discovery_finds_volume() {
    let served = Served::new(Setup::memory(4 << 20));
    let place = HostPort {
        host: served.address.ip().to_string(),
        port: served.address.port(),
    };
    let identity = HostIdentity::named("nqn.2014-08.org.x:h").unwrap();
    let found = discover(place, &identity).unwrap();
    assert_eq!(found.records.len(), 1);
    assert_eq!(found.records[0].subnqn.as_str(), Some(NQN));
    let volume = open(&[&served], options());
    assert_eq!(volume.info().size, 4 << 20);
    assert!(volume.info().write_zeroes);
    assert_eq!(volume.id(), [1; 16]);
}

#[test]
fn initiator_works_with_files_memory_and_digests() {
    let directory = worker_common::disk();
    let path = worker_common::sparse(&directory, 8 << 20);
    for digests in 0..4 {
        let file: Arc<dyn Volume> =
            Arc::new(FileVolume::open(&path, FileOptions::default()).unwrap());
        let memory: Arc<dyn Volume> = Arc::new(MemVolume::new(8 << 20).unwrap());
        for below in [file, memory] {
            let served = Served::new(Setup::new(below));
            let options = FabricsOptions {
                header_digest: digests & 1 != 0,
                data_digest: digests & 2 != 0,
                ..options()
            };
            let volume = open(&[&served], options);
            let mut worker = Worker::new(&volume);
            for (offset, len) in [
                (0, 4096),
                (65536, 1 << 20),
                (2 << 20, 12288),
                (3 << 20, 2 << 20),
            ] {
                let data = pattern(digests, len);
                worker.write(offset, &data).unwrap();
                assert_eq!(worker.read(offset, len).unwrap(), data);
            }
            worker.without_data(Op::Flush, 0, 0).unwrap();
            drop(worker);
            drop(volume);
            served.wait_for_hosts(0);
        }
    }
}

#[test]
fn initiator_follows_ana_state_between_targets() {
    let below: Arc<dyn Volume> = Arc::new(MemVolume::new(1 << 20).unwrap());
    let served = [0, 1].map(|_| Served::new(Setup::new(below.clone())));
    let volume = open(&[&served[0], &served[1]], options());
    let mut worker = Worker::new(&volume);
    let reads = |target: &Served| target.target.stats().connections.get();
    let watch = volume.watch();
    let began = Instant::now();
    while !watch.look().unwrap().connected {
        assert!(began.elapsed() < BOUND);
        worker.read(0, 4096).unwrap();
    }
    assert!(reads(&served[0]) >= 2 && reads(&served[1]) >= 2);
    for round in 0..6u8 {
        let [up, down] = [usize::from(round) % 2, 1 - usize::from(round) % 2];
        served[up].target.set_ana_state(AnaState::OPTIMIZED);
        served[down].target.set_ana_state(AnaState::INACCESSIBLE);
        for at in 0..20 {
            let data = pattern(round, 4096);
            worker.write(at * 4096, &data).unwrap();
            assert_eq!(worker.read(at * 4096, 4096).unwrap(), data);
        }
    }
}

/// Targets end and come back under load: no request fails, and what is read is what was written.
#[test]
fn restarted_targets_fail_no_request() {
    let below: Arc<dyn Volume> = Arc::new(MemVolume::new(1 << 20).unwrap());
    let make = |address| {
        let setup = Setup::new(below.clone());
        match address {
            Some(address) => Served::at(address, setup),
            None => Served::new(setup),
        }
    };
    let mut served = [make(None), make(None)];
    let volume = open(&[&served[0], &served[1]], options());
    let watch = volume.watch();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let thread = std::thread::spawn(move || {
        let mut worker = Worker::new(&volume);
        let (mut rounds, mut longest) = (0u64, Duration::ZERO);
        while !stopped.load(Ordering::SeqCst) {
            rounds += 1;
            let began = Instant::now();
            for at in 0..16 {
                let data = pattern((rounds + at) as u8, 4096);
                let list = worker.guest.holding(at * 4096, &data);
                let op = Op::Write { fua: false };
                assert!(worker.start(op, at * 4096, 4096, list).1.is_none());
            }
            assert!(worker.wait(16).iter().all(|done| done.result.is_ok()));
            for at in 0..16 {
                let list = worker.guest.piece(at * 4096, 4096);
                list.fill(0);
                worker.start(Op::Read, at * 4096, 4096, list);
            }
            let mut done = worker.wait(16);
            done.sort_by_key(|done| done.tag);
            for (at, done) in (0..16).zip(&done) {
                assert_eq!(done.result, Ok(()));
                assert_eq!(bytes(&done.data), pattern((rounds + at) as u8, 4096));
            }
            longest = longest.max(began.elapsed());
        }
        println!("{rounds} rounds of 32 requests, the longest took {longest:?}");
    });
    for round in 0..10 {
        let began = Instant::now();
        while !watch.look().unwrap().connected {
            assert!(began.elapsed() < BOUND);
            std::thread::sleep(Duration::from_millis(1));
        }
        let place = round % 2;
        let address = served[place].address;
        served[place].stop();
        served[place] = make(Some(address));
    }
    stop.store(true, Ordering::SeqCst);
    thread.join().unwrap();
}

const SIZE: u64 = 256 << 10;

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn volume_matches_byte_vector(
        steps in vec((0..10u8, 0..SIZE / 512, 1..300u64, any::<u8>()), 1..60),
        digests in any::<(bool, bool)>(),
        queues in 1..3u16,
    ) {
        let served = Served::new(Setup::memory(SIZE));
        let options = FabricsOptions {
            header_digest: digests.0,
            data_digest: digests.1,
            queues,
            ..options()
        };
        let volume = open(&[&served], options);
        let mut worker = Worker::new(&volume);
        let mut model = vec![0u8; SIZE as usize];
        for (kind, start, blocks, seed) in steps {
            let offset = start * 512;
            let len = (blocks * 512).min(SIZE - offset);
            let range = offset as usize..(offset + len) as usize;
            match kind {
                0..=4 => {
                    let data = pattern(seed, len);
                    worker.write(offset, &data).unwrap();
                    model[range].copy_from_slice(&data);
                }
                5..=7 => prop_assert!(worker.read(offset, len).unwrap() == model[range]),
                8 => {
                    let zeroes = Op::WriteZeroes { deallocate: seed & 1 != 0, fua: seed & 2 != 0 };
                    worker.without_data(zeroes, offset, len).unwrap();
                    model[range].fill(0);
                }
                _ => worker.without_data(Op::Flush, 0, 0).unwrap(),
            }
        }
        prop_assert!(worker.read(0, SIZE).unwrap() == model);
    }
}
