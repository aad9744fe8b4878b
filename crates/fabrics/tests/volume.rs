//! The volume against a subsystem in this process: what it does, and what it makes of a controller
//! that lies, hangs and goes away.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

#[path = "../../volume/tests/common/mod.rs"]
mod common;
mod fake_target;

use common::{BOUND, Way, Worker, bytes};
use dma::SegmentList;
use fabrics::{FabricsOptions, FabricsVolume, HostIdentity, Policy, Subsystem};
use fake_target::{Answer, BLOCK as SECTOR, Setup, Target};
use nvme::identify::{Ascii, Nqn, Oncs};
use nvme::log::AnaState;
use nvme::log::discovery::{AddressFamily, DiscoveryRecord, SubsystemType, TransportType};
use nvme::{NvmOpcode, Status};
use proptest::collection::vec;
use proptest::prelude::*;
use remote::HostPort;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use volume::{
    FairGroup, FairVolume, FaultVolume, Io, IoErrorKind, IoOptions, LimitVolume, Limits, Op,
    OpenOptions, Rates, Registry, SliceVolume, Volume,
};

const WRITE: Op = Op::Write { fua: false };
const BLOCK: u64 = 4096;

/// With time-outs that no busy machine comes near; but where an association's end is not seen, that
/// is waited for.
fn options() -> FabricsOptions {
    FabricsOptions {
        kato: Duration::from_secs(20),
        ..FabricsOptions::new()
    }
}

fn subsystem(target: &Target) -> Subsystem {
    let url = target.url();
    Subsystem::parse(url.strip_prefix("nvme+tcp://").unwrap()).unwrap()
}

fn open(target: &Target, options: FabricsOptions) -> FabricsVolume {
    FabricsVolume::open(subsystem(target), options).unwrap()
}

fn serving(answer: impl Fn(usize, &nvme::Command) -> Answer + Send + Sync + 'static) -> Target {
    Target::new(Setup {
        answer: Box::new(answer),
        ..Setup::default()
    })
}

fn pattern(seed: u8, len: u64) -> Vec<u8> {
    (0..len)
        .map(|index| (index as u8).wrapping_mul(31) ^ (index >> 8) as u8 ^ seed | 1)
        .collect()
}

/// Goes on until that is so.
fn until(worker: &mut Worker, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < BOUND);
        worker.io.flush();
        worker.io.poll(&mut |_| ());
        worker.queue.poll(&mut |_| panic!("a completion too early"));
        std::thread::yield_now();
    }
}

#[test]
fn what_is_written_is_read() {
    for digests in [(false, false), (true, false), (false, true), (true, true)] {
        let target = Target::new(Setup::default());
        let options = FabricsOptions {
            header_digest: digests.0,
            data_digest: digests.1,
            ..options()
        };
        let volume = open(&target, options);
        let mut worker = Worker::new(&volume);
        for (offset, len) in [
            (0, 512),
            (4096, 4096),
            (65536, 1 << 20),
            (2 << 20, 70_144),
            (3 << 20, 8192),
            (3 << 20, 8704),
        ] {
            let data = pattern(len as u8, len);
            worker.write(offset, &data).unwrap();
            assert_eq!(
                worker.read(offset, len).unwrap(),
                data,
                "{offset} {len} {digests:?}"
            );
            let there = target.state.data.lock().unwrap();
            assert!(there[offset as usize..][..len as usize] == data[..]);
        }
        worker.without_data(Op::Flush, 0, 0).unwrap();
        assert_eq!(target.count(|s| &s.corrupt), 0);
        // What fits is in the capsule.
        let log = target.log();
        let writes = log
            .iter()
            .filter(|entry| entry.opcode == NvmOpcode::WRITE.0);
        writes.for_each(|entry| assert_eq!(entry.in_capsule, entry.len <= 8192, "{entry:?}"));
        assert!(log.iter().any(|entry| entry.opcode == NvmOpcode::FLUSH.0));
        drop(worker);
        drop(volume);
        let began = Instant::now();
        while target.count(|s| &s.shutdowns) == 0 {
            assert!(began.elapsed() < BOUND, "no shutdown in order");
        }
        // The Admin queue, and one I/O queue.
        assert_eq!(target.count(|s| &s.connections), 2);
    }
}

/// Without the answer in the data, with requests to transfer for pieces, and with short PDUs.
#[test]
fn controllers_that_do_it_otherwise() {
    let target = Target::new(Setup {
        success: false,
        r2t: 12 << 10,
        h2c_data: 4096,
        in_capsule: 0,
        mdts: 4,
        entries: 4,
        ..Setup::default()
    });
    for data_digest in [false, true] {
        let options = FabricsOptions {
            data_digest,
            header_digest: data_digest,
            ..options()
        };
        let volume = open(&target, options);
        let mut worker = Worker::new(&volume);
        let data = pattern(7, (1 << 20) + 512);
        worker.write(512, &data).unwrap();
        assert_eq!(worker.read(512, data.len() as u64).unwrap(), data);
    }
    assert_eq!(target.count(|s| &s.corrupt), 0);
    let log = target.log();
    assert!(
        log.iter()
            .all(|entry| entry.len <= 64 << 10 && !entry.in_capsule)
    );
}

#[test]
fn what_the_controller_has_is_told() {
    let target = Target::new(Setup::default());
    let volume = open(&target, options());
    let info = volume.info();
    assert_eq!((info.size, info.block_size), (4 << 20, 512));
    assert!(info.deallocate && info.write_zeroes && info.volatile_cache && !info.read_only);
    assert!(
        info.description.contains("test target, one path"),
        "{}",
        info.description
    );
    assert_eq!(volume.id(), [7; 16]);
    let mut worker = Worker::new(&volume);
    let refused = worker.read(256, 512).unwrap_err();
    assert_eq!(refused.kind, IoErrorKind::Invalid);
    let beyond = worker.read(4 << 20, 4096).unwrap_err();
    assert_eq!(beyond.kind, IoErrorKind::OutOfRange);
    let bare = Target::new(Setup {
        oncs: Oncs::new(),
        volatile_cache: false,
        read_only: true,
        ..Setup::default()
    });
    let volume = open(&bare, options());
    let info = volume.info();
    assert!(info.read_only && !info.deallocate && !info.volatile_cache && !info.write_zeroes);
    let mut worker = Worker::new(&volume);
    let refused = worker.write(0, &[1; 512]).unwrap_err();
    assert_eq!(refused.kind, IoErrorKind::ReadOnly);
    worker.without_data(Op::Flush, 0, 0).unwrap();
    assert_eq!(bare.count(|s| &s.requests), 0);
}

/// As far as a write is one command: MDTS of 1 is 8 KiB.
#[test]
fn what_the_controller_does_as_a_whole_is_promised() {
    for (atomic_z, mdts, unit) in [(0, 8, 512), (31, 8, 16 << 10), (31, 1, 8 << 10)] {
        let target = Target::new(Setup {
            atomic_z,
            mdts,
            ..Setup::default()
        });
        let volume = open(&target, options());
        assert_eq!(volume.atomic_writes().unit(), unit, "{atomic_z} {mdts}");
    }
}

#[test]
fn what_the_controller_cannot_do_is_done_otherwise_or_refused() {
    let target = Target::new(Setup {
        oncs: Oncs::new(),
        ..Setup::default()
    });
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &[7; 8192]).unwrap();
    let zeroes = Op::WriteZeroes {
        deallocate: true,
        fua: true,
    };
    worker.without_data(zeroes, 4096, (4 << 20) - 4096).unwrap();
    assert_eq!(worker.read(0, 4096).unwrap(), [7; 4096]);
    assert_eq!(worker.read(4096, 65536).unwrap(), [0; 65536]);
    let refused = worker.without_data(Op::Deallocate, 0, 4096).unwrap_err();
    assert_eq!(refused.kind, IoErrorKind::Unsupported);
    let log = target.log();
    assert!(
        log.iter()
            .skip(1)
            .any(|entry| entry.fua && entry.opcode == NvmOpcode::WRITE.0)
    );
}

#[test]
fn every_operation_reaches_the_controller() {
    let target = Target::new(Setup::default());
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &pattern(1, 1 << 20)).unwrap();
    let zeroes = Op::WriteZeroes {
        deallocate: false,
        fua: true,
    };
    worker.without_data(zeroes, 4096, 8192).unwrap();
    worker.without_data(Op::Deallocate, 65536, 4096).unwrap();
    let list = worker.guest.holding(0, &[9; 4096]);
    let done = worker.run(Op::Write { fua: true }, 0, 4096, list);
    assert_eq!(done.result, Ok(()));
    let ops: Vec<_> = target
        .log()
        .iter()
        .map(|entry| (entry.opcode, entry.len, entry.fua))
        .collect();
    assert_eq!(
        ops,
        [
            (NvmOpcode::WRITE.0, 1 << 20, false),
            (NvmOpcode::WRITE_ZEROES.0, 8192, true),
            (NvmOpcode::DATASET_MANAGEMENT.0, 4096, false),
            (NvmOpcode::WRITE.0, 4096, true),
        ]
    );
    assert_eq!(worker.read(4096, 8192).unwrap(), [0; 8192]);
    assert_eq!(worker.read(65536, 4096).unwrap(), [0; 4096]);
    assert_eq!(worker.read(0, 4096).unwrap(), [9; 4096]);
}

#[test]
fn errors_of_the_controller_reach_the_request_alone() {
    let dnr = |status: Status| Answer::Status(status.with_dnr(true));
    let target = serving(move |number, _| match number {
        0 => dnr(Status::CAPACITY_EXCEEDED),
        1 => Answer::Status(Status::UNRECOVERED_READ_ERROR),
        2 => dnr(Status::NAMESPACE_WRITE_PROTECTED),
        3 => dnr(Status::INVALID_FIELD),
        // May be repeated, and succeeds then.
        4 | 5 => Answer::Status(Status::COMMAND_INTERRUPTED),
        // Never.
        7..=11 => Answer::Status(Status::INTERNAL_ERROR),
        _ => Answer::Right,
    });
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    let kind = |result: Result<(), volume::IoError>| result.unwrap_err().kind;
    assert_eq!(kind(worker.write(0, &[1; 4096])), IoErrorKind::NoSpace);
    assert_eq!(kind(worker.read(0, 4096).map(drop)), IoErrorKind::MediaRead);
    assert_eq!(kind(worker.write(0, &[1; 4096])), IoErrorKind::ReadOnly);
    assert_eq!(kind(worker.write(0, &[1; 4096])), IoErrorKind::Invalid);
    worker.write(0, &[2; 4096]).unwrap();
    assert_eq!(target.count(|s| &s.requests), 7);
    assert_eq!(kind(worker.write(0, &[3; 4096])), IoErrorKind::MediaWrite);
    assert_eq!(target.count(|s| &s.requests), 12);
    assert_eq!(worker.read(0, 4096).unwrap(), [2; 4096]);
    assert_eq!(target.count(|s| &s.connections), 2);
}

/// Whatever the controller does with one command of many, all of them succeed, by way of another
/// association.
#[test]
fn each_kind_of_lie_costs_an_association_and_no_request() {
    let ways = [
        Answer::Close,
        Answer::CloseWithin,
        Answer::WrongCid,
        Answer::Garbage,
        Answer::TooLong,
        Answer::TooShort,
        Answer::Twice,
        Answer::R2tBeyond,
        Answer::Flood,
        Answer::Terminate,
        Answer::BadHeaderDigest,
    ];
    for answer in ways {
        for read in [true, false] {
            let of_read = matches!(answer, Answer::TooLong | Answer::TooShort);
            if of_read && !read {
                continue;
            }
            let target = serving(move |number, command| {
                let hit = (number >= 43 || !read)
                    && command.nvm_opcode()
                        == if read {
                            NvmOpcode::READ
                        } else {
                            NvmOpcode::WRITE
                        };
                match number {
                    3 if hit => answer,
                    43 if hit => answer,
                    _ => Answer::Right,
                }
            });
            let options = FabricsOptions {
                header_digest: answer == Answer::BadHeaderDigest,
                // Whether it has ended is not known of one that never stops.
                kato: Duration::from_secs(if answer == Answer::Flood { 2 } else { 60 }),
                ..options()
            };
            let volume = open(&target, options);
            let mut worker = Worker::new(&volume);
            let data = pattern(9, 40 * BLOCK);
            for at in 0..40 {
                let part = &data[(at * BLOCK) as usize..][..BLOCK as usize];
                let list = worker.guest.holding(at * BLOCK, part);
                assert!(worker.start(WRITE, at * BLOCK, BLOCK, list).1.is_none());
            }
            let done = worker.wait(40);
            assert!(
                done.iter().all(|done| done.result.is_ok()),
                "{answer:?} {read}"
            );
            drop(done);
            for at in 0..40 {
                let list = worker.guest.piece(at * BLOCK, BLOCK);
                list.fill(0xee);
                assert!(worker.start(Op::Read, at * BLOCK, BLOCK, list).1.is_none());
            }
            let mut done = worker.wait(40);
            done.sort_by_key(|done| done.tag);
            for (at, done) in done.iter().enumerate() {
                assert_eq!(done.result, Ok(()), "{answer:?} {read}");
                let part = &data[at * BLOCK as usize..][..BLOCK as usize];
                assert_eq!(bytes(&done.data), part, "{answer:?} {read} {at}");
            }
            let connections = target.count(|s| &s.connections);
            assert!(
                connections >= 4,
                "{answer:?} {read}: {connections} connections"
            );
        }
    }
}

/// A controller that asks for a byte at a time gets what it asks for, and takes no memory for it.
#[test]
fn requests_to_transfer_without_end_are_only_slow() {
    let target = serving(|number, _| match number {
        0 => Answer::R2tFlood,
        _ => Answer::Right,
    });
    let impatient = FabricsOptions {
        timeout: Duration::from_secs(2),
        ..options()
    };
    let volume = open(&target, impatient);
    let mut worker = Worker::new(&volume);
    worker.write(0, &pattern(3, 256 << 10)).unwrap();
    assert_eq!(worker.read(0, 256 << 10).unwrap(), pattern(3, 256 << 10));
}

/// A digest that does not match costs the command another try, and no connection.
#[test]
fn data_whose_digest_is_wrong_is_read_again() {
    let target = serving(|number, _| match number {
        1 | 2 => Answer::BadDataDigest,
        4.. => Answer::BadDataDigest,
        _ => Answer::Right,
    });
    let options = FabricsOptions {
        data_digest: true,
        ..options()
    };
    let volume = open(&target, options);
    let mut worker = Worker::new(&volume);
    let data = pattern(5, 128 << 10);
    worker.write(0, &data).unwrap();
    assert_eq!(worker.read(0, 128 << 10).unwrap(), data);
    assert_eq!(target.count(|s| &s.requests), 4);
    // Always.
    let error = worker.read(0, 4096).unwrap_err();
    assert_eq!(error.kind, IoErrorKind::MediaRead);
    assert_eq!(target.count(|s| &s.connections), 2);
}

/// The same with a long read, whose data goes to its memory without a copy.
#[test]
fn a_long_read_survives_the_end_of_its_connection() {
    for answer in [Answer::CloseWithin, Answer::TooLong, Answer::Garbage] {
        let target = serving(move |number, _| match number {
            1 | 2 => answer,
            _ => Answer::Right,
        });
        let volume = open(&target, options());
        let mut worker = Worker::new(&volume);
        let data = pattern(5, 1 << 20);
        worker.write(0, &data).unwrap();
        assert_eq!(worker.read(0, 1 << 20).unwrap(), data, "{answer:?}");
    }
}

#[test]
fn a_controller_that_never_says_the_truth_fails_the_request() {
    let target = serving(|_, _| Answer::Garbage);
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    let error = worker.read(0, 4096).unwrap_err();
    assert_eq!(error.kind, IoErrorKind::MediaRead);
    assert_eq!(target.count(|s| &s.requests), 5);
}

#[test]
fn a_subsystem_that_comes_back_goes_on_with_its_new_size() {
    let target = serving(|_, _| Answer::Right);
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &[1; 4096]).unwrap();
    target.stop(0);
    let list = worker.guest.holding(0, &[2; 4096]);
    assert!(worker.start(WRITE, 4096, 4096, list).1.is_none());
    // It is a slow disk.
    let later = Instant::now() + Duration::from_millis(300);
    until(&mut worker, || Instant::now() >= later);
    assert_eq!(worker.queue.state().in_flight, 1);
    target.state.data.lock().unwrap().resize(8 << 20, 0);
    target.restart(0);
    assert_eq!(worker.wait(1)[0].result, Ok(()));
    assert_eq!(
        worker.read(0, 8192).unwrap(),
        [[1; 4096], [2; 4096]].concat()
    );
    assert!(volume.refresh().unwrap() && !volume.refresh().unwrap());
    assert_eq!(volume.info().size, 8 << 20);
    assert_eq!(worker.read((8 << 20) - 4096, 4096).unwrap(), [0; 4096]);
}

#[test]
fn events_tell_of_another_size() {
    let target = Target::new(Setup::default());
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &[1; 4096]).unwrap();
    for size in [6 << 20, 2 << 20] {
        target.resize(size);
        let began = Instant::now();
        while volume.info().size != size as u64 {
            assert!(began.elapsed() < BOUND);
            std::thread::yield_now();
        }
        assert!(volume.refresh().unwrap());
        let end = size as u64;
        worker.read(end - 4096, 4096).unwrap();
        let error = worker.read(end, 4096).unwrap_err();
        assert_eq!(error.kind, IoErrorKind::OutOfRange);
    }
    assert_eq!(target.count(|s| &s.connections), 2);
}

#[test]
fn another_namespace_in_its_place_is_not_taken() {
    let target = serving(|_, _| Answer::Right);
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &[1; 4096]).unwrap();
    target.stop(0);
    target.state.nguid.store(8, Ordering::SeqCst);
    target.restart(0);
    let list = worker.guest.piece(0, 4096);
    let (tag, _) = worker.start(Op::Read, 4096, 4096, list);
    let before = target.count(|s| &s.connections);
    until(&mut worker, || {
        target.count(|s| &s.connections) >= before + 2
    });
    // A guest's reset ends it all the same.
    worker.queue.cancel(tag);
    let result = worker.wait(1)[0].result;
    assert_eq!(result.unwrap_err().kind, IoErrorKind::Aborted);
}

#[test]
fn requests_fail_when_a_subsystem_stays_away() {
    let target = serving(|_, _| Answer::Right);
    let impatient = FabricsOptions {
        reconnect_delay: Duration::from_secs(2),
        ..options()
    };
    let volume = open(&target, impatient);
    let watch = volume.watch();
    let mut worker = Worker::new(&volume);
    worker.write(0, &[1; 4096]).unwrap();
    let reach = watch.look().unwrap();
    assert!(
        reach.connected && reach.lost == 0 && target.url() == reach.server,
        "{reach:?}"
    );
    target.stop(0);
    let began = Instant::now();
    let error = worker.write(0, &[2; 4096]).unwrap_err();
    assert_eq!(error.kind, IoErrorKind::Unreachable);
    assert!(began.elapsed() >= Duration::from_millis(1900), "it waited");
    assert!(!watch.look().unwrap().connected);
    for _ in 0..100 {
        let error = worker.read(0, 4096).unwrap_err();
        assert_eq!(error.kind, IoErrorKind::Unreachable);
    }
    target.restart(0);
    let began = Instant::now();
    while worker.read(0, 4096).is_err() {
        assert!(began.elapsed() < BOUND);
    }
    let reach = watch.look().unwrap();
    assert!(reach.connected && reach.lost >= 1);
    drop(worker);
    drop(volume);
    assert_eq!(watch.look(), None);
}

/// A controller that takes commands and answers nothing is none.
#[test]
fn a_controller_that_only_takes_commands_is_lost_as_well() {
    let target = serving(|_, _| Answer::Never);
    let impatient = FabricsOptions {
        timeout: Duration::from_millis(200),
        reconnect_delay: Duration::from_secs(60),
        ..options()
    };
    let volume = open(&target, impatient);
    let mut worker = Worker::new(&volume);
    let list = worker.guest.piece(0, 4096);
    let (tag, _) = worker.start(Op::Read, 0, 4096, list);
    until(&mut worker, || target.count(|s| &s.requests) >= 3);
    worker.queue.cancel(tag);
    assert!(worker.wait(1)[0].result.is_err());
}

/// A listener that says nothing holds up nobody for longer than the time limit.
#[test]
fn a_silent_portal_is_given_up_at_the_start() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let named = Subsystem::parse(&format!("{address}/nqn.x/1")).unwrap();
    let error = FabricsVolume::open(named, options())
        .unwrap_err()
        .to_string();
    assert!(error.contains("no answer within the time limit"), "{error}");
}

// ---- paths

fn two(ana: bool) -> Target {
    Target::new(Setup {
        portals: 2,
        ana,
        ..Setup::default()
    })
}

/// Waits until all paths are there.
fn connected(volume: &FabricsVolume, worker: &mut Worker) {
    let watch = volume.watch();
    until(worker, || watch.look().is_some_and(|reach| reach.connected));
}

fn portals(target: &Target) -> [usize; 2] {
    let log = target.log();
    [0, 1].map(|portal| log.iter().filter(|entry| entry.portal == portal).count())
}

#[test]
fn paths_share_the_work_by_turns_or_by_depth() {
    for policy in [Policy::RoundRobin, Policy::QueueDepth] {
        let target = two(false);
        let volume = open(
            &target,
            FabricsOptions {
                policy,
                ..options()
            },
        );
        let mut worker = Worker::new(&volume);
        connected(&volume, &mut worker);
        for _ in 0..10 {
            for at in 0..10 {
                let list = worker.guest.piece(at * BLOCK, BLOCK);
                assert!(worker.start(Op::Read, at * BLOCK, BLOCK, list).1.is_none());
            }
            assert!(worker.wait(10).iter().all(|done| done.result.is_ok()));
        }
        let [one, other] = portals(&target);
        assert_eq!(one + other, 100);
        assert!((30..=70).contains(&one), "{policy:?}: {one} and {other}");
    }
}

#[test]
fn the_state_of_the_namespace_decides_the_path() {
    let target = two(true);
    target.set_state(1, AnaState::NON_OPTIMIZED, false);
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    connected(&volume, &mut worker);
    for _ in 0..20 {
        worker.read(0, 4096).unwrap();
    }
    assert_eq!(portals(&target), [20, 0]);
    // Told by an event.
    target.set_state(0, AnaState::INACCESSIBLE, true);
    let began = Instant::now();
    while portals(&target)[1] < 5 {
        assert!(began.elapsed() < BOUND);
        worker.read(0, 4096).unwrap();
    }
    let first = portals(&target)[0];
    for _ in 0..20 {
        worker.read(0, 4096).unwrap();
    }
    assert_eq!(portals(&target)[0], first);
    // Found out by a command: no event comes.
    target.set_state(0, AnaState::OPTIMIZED, true);
    let began = Instant::now();
    while portals(&target)[0] == first {
        assert!(began.elapsed() < BOUND);
        worker.read(0, 4096).unwrap();
    }
    target.set_state(0, AnaState::INACCESSIBLE, false);
    for _ in 0..20 {
        worker.write(0, &[1; 4096]).unwrap();
    }
    // None: it waits, until there is one again.
    target.set_state(1, AnaState::CHANGE, false);
    let list = worker.guest.piece(0, 4096);
    assert!(worker.start(Op::Read, 0, 4096, list).1.is_none());
    let later = Instant::now() + Duration::from_millis(400);
    until(&mut worker, || Instant::now() >= later);
    target.set_state(1, AnaState::OPTIMIZED, true);
    assert_eq!(worker.wait(1)[0].result, Ok(()));
}

/// One portal or the other is always being killed, and no request fails.
#[test]
fn one_of_two_paths_is_lost_again_and_again() {
    let target = Arc::new(two(false));
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    connected(&volume, &mut worker);
    let killer = target.clone();
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = stop.clone();
    let watch = volume.watch();
    let thread = std::thread::spawn(move || {
        for round in 0..12 {
            killer.stop(round % 2);
            std::thread::sleep(Duration::from_millis(50));
            killer.restart(round % 2);
            while !watch.look().unwrap().connected {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        stopped.store(true, Ordering::SeqCst);
    });
    let mut longest = Duration::ZERO;
    let mut round = 0u64;
    while !stop.load(Ordering::SeqCst) {
        round += 1;
        let began = Instant::now();
        for at in 0..8 {
            let data = pattern((round + at) as u8, BLOCK);
            let list = worker.guest.holding(at * BLOCK, &data);
            assert!(worker.start(WRITE, at * BLOCK, BLOCK, list).1.is_none());
        }
        assert!(worker.wait(8).iter().all(|done| done.result.is_ok()));
        for at in 0..8 {
            let data = pattern((round + at) as u8, BLOCK);
            assert_eq!(
                worker.read(at * BLOCK, BLOCK).unwrap(),
                data,
                "round {round}"
            );
        }
        longest = longest.max(began.elapsed());
    }
    thread.join().unwrap();
    assert!(volume.watch().look().unwrap().lost >= 12);
    println!("{round} rounds, the longest {longest:?}");
}

/// A write that a lost controller may still carry out is not sent again before that is over: here
/// the controller closes no connection, so its keep-alive time must pass. Reads do not wait.
#[test]
fn a_write_waits_for_the_real_end_of_its_association() {
    let target = Target::new(Setup {
        portals: 2,
        stubborn: true,
        answer: Box::new(|number, _| match number {
            0 | 1 => Answer::Held,
            _ => Answer::Right,
        }),
        ..Setup::default()
    });
    let options = FabricsOptions {
        kato: Duration::from_secs(2),
        timeout: Duration::from_millis(300),
        ..options()
    };
    let volume = open(&target, options);
    let mut worker = Worker::new(&volume);
    connected(&volume, &mut worker);
    let began = Instant::now();
    let list = worker.guest.holding(0, &[1; 4096]);
    let (write, _) = worker.start(WRITE, 0, 4096, list);
    let list = worker.guest.piece(8192, 4096);
    let (read, _) = worker.start(Op::Read, 8192, 4096, list);
    worker.queue.push();
    let first = worker.wait(1);
    assert_eq!((first[0].tag, first[0].result), (read, Ok(())));
    let read_after = began.elapsed();
    let second = worker.wait(1);
    assert_eq!((second[0].tag, second[0].result), (write, Ok(())));
    let after = began.elapsed();
    println!("read after {read_after:?}, write after {after:?}");
    // 300 ms until it is lost, a second in which it could close, and two from the last sign on.
    assert!(after >= Duration::from_millis(3300), "{after:?}");
    target.release();
}

/// The same where the controller closes everything: then it has ended, and nothing waits.
#[test]
fn a_write_is_sent_again_at_once_where_the_controller_has_closed() {
    let target = Target::new(Setup {
        portals: 2,
        answer: Box::new(|number, _| match number {
            0 => Answer::CloseAll,
            _ => Answer::Right,
        }),
        ..Setup::default()
    });
    let options = FabricsOptions {
        kato: Duration::from_secs(60),
        ..options()
    };
    let volume = open(&target, options.clone());
    let mut worker = Worker::new(&volume);
    connected(&volume, &mut worker);
    let began = Instant::now();
    worker.write(0, &[1; 4096]).unwrap();
    assert!(began.elapsed() < Duration::from_secs(20));
    assert_eq!(target.count(|s| &s.requests), 2);
    // One that says that it takes a second to end commands is believed.
    let target = Target::new(Setup {
        cqt: 1000,
        answer: Box::new(|number, _| match number {
            0 => Answer::CloseAll,
            _ => Answer::Right,
        }),
        ..Setup::default()
    });
    let volume = open(&target, options);
    let mut worker = Worker::new(&volume);
    let began = Instant::now();
    worker.write(0, &[1; 4096]).unwrap();
    assert!(began.elapsed() >= Duration::from_secs(1));
}

/// A controller whose Admin queue is silent is lost, though nothing is asked of it.
#[test]
fn a_path_without_work_is_kept_alive_and_watched() {
    let target = Target::new(Setup::default());
    let options = FabricsOptions {
        kato: Duration::from_secs(1),
        ..options()
    };
    let volume = open(&target, options);
    let worker = Worker::new(&volume);
    let began = Instant::now();
    while target.count(|s| &s.keep_alives) < 4 {
        assert!(began.elapsed() < BOUND);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(target.count(|s| &s.connections), 2);
    drop(worker);
}

#[test]
fn several_queues_and_workers_have_connections_of_their_own() {
    let target = Target::new(Setup::default());
    let several = FabricsOptions {
        queues: 3,
        ..options()
    };
    let volume = open(&target, several);
    let mut worker = Worker::new(&volume);
    until(&mut worker, || target.count(|s| &s.connections) >= 4);
    worker.read(0, 4096).unwrap();
    let mut other = Worker::new(&volume);
    other.write(0, &[3; 4096]).unwrap();
    until(&mut other, || target.count(|s| &s.connections) >= 7);
    assert_eq!(worker.read(0, 4096).unwrap(), [3; 4096]);
}

// ---- requests that are given up

/// What a guest has given up does not come on top of what it writes later.
#[test]
fn a_write_that_was_given_up_goes_before_all_that_follows() {
    for len in [4096, 64 << 10] {
        let target = Target::new(Setup {
            portals: 2,
            answer: Box::new(|number, _| match number {
                0 => Answer::Held,
                _ => Answer::Right,
            }),
            ..Setup::default()
        });
        let volume = open(&target, options());
        let mut worker = Worker::new(&volume);
        // The new one could go by the other path, past the old one.
        connected(&volume, &mut worker);
        let old = worker.guest.holding(0, &vec![1; len]);
        let (tag, _) = worker.start(WRITE, 0, len as u64, old);
        worker.queue.push();
        until(&mut worker, || target.count(|s| &s.requests) == 1);
        // The kernel has told that it is sent: else its connection would end.
        let later = Instant::now() + Duration::from_millis(100);
        until(&mut worker, || Instant::now() >= later);
        worker.queue.cancel(tag);
        let result = worker.wait(1)[0].result;
        assert_eq!(result.unwrap_err().kind, IoErrorKind::Aborted);
        // Its memory is another's by now, though the controller has not asked for all of it.
        let new = worker.guest.holding(0, &[2; 4096]);
        worker.start(WRITE, 0, 4096, new);
        let later = Instant::now() + Duration::from_millis(200);
        until(&mut worker, || Instant::now() >= later);
        assert_eq!(target.count(|s| &s.requests), 1);
        target.release();
        assert_eq!(worker.wait(1)[0].result, Ok(()));
        assert_eq!(worker.read(0, 4096).unwrap(), [2; 4096]);
        if len > 4096 {
            assert_eq!(worker.read(4096, 4096).unwrap(), [1; 4096], "what it was");
        }
    }
}

#[test]
fn requests_end_when_they_are_cancelled_wherever_they_are() {
    let target = serving(|number, _| match number {
        0..=100 => Answer::Never,
        _ => Answer::Right,
    });
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    let mut tags = Vec::new();
    for _ in 0..20 {
        let data = worker.guest.piece(0, 1 << 20);
        tags.push(worker.start(WRITE, 0, 1 << 20, data).0);
        let data = worker.guest.piece(0, 4096);
        tags.push(worker.start(WRITE, 0, 4096, data).0);
        let data = worker.guest.piece(0, 4096);
        tags.push(worker.start(Op::Read, 0, 4096, data).0);
    }
    worker.queue.push();
    for tag in &tags {
        worker.queue.cancel(*tag);
    }
    let done = worker.wait(tags.len());
    let aborted = |result: Result<(), volume::IoError>| {
        result.is_err_and(|error| error.kind == IoErrorKind::Aborted)
    };
    assert!(done.iter().all(|completion| aborted(completion.result)));
    assert!(done.iter().all(|completion| !completion.data.is_empty()));
    assert_eq!(worker.queue.state().in_flight, 0);
}

#[test]
fn a_worker_that_ends_does_not_wait_for_ever() {
    let target = serving(|_, _| Answer::Never);
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    worker.io = Io::new(IoOptions {
        stop_timeout: Duration::from_millis(100),
        ..IoOptions::default()
    });
    worker.queue = volume.open(&worker.io).unwrap();
    let list = worker.guest.holding(0, &[2; 4096]);
    worker.start(WRITE, 4096, 4096, list);
    worker.io.end();
    let result = worker.wait(1)[0].result;
    assert_eq!(result.unwrap_err().kind, IoErrorKind::Aborted);
    assert_eq!(worker.io.given_up().len(), 1);
}

// ---- names

#[test]
fn urls_open_it_and_errors_name_the_portals() {
    let target = Target::new(Setup::default());
    let registry = Registry::<()>::new().with(fabrics::kind(|_| ()));
    let open = |url: &str| registry.open(url, OpenOptions::default());
    let url = target.url();
    let opened = open(&format!(
        "{url}?read-only=on&offset=1M&hdgst=on&policy=queue-depth"
    ));
    let info = opened.unwrap().volume.info();
    assert_eq!((info.size, info.read_only), (3 << 20, true));
    let error = |url: &str| open(url).map(|_| ()).unwrap_err().to_string();
    let text = error("nvme+tcp://127.0.0.1:1/nqn.x/1");
    assert!(
        text.contains("127.0.0.1:1: no controller can be reached"),
        "{text}"
    );
    let text = error(&url.replace("vnvme:test", "vnvme:other"));
    assert!(text.contains("Connect Invalid Parameters"), "{text}");
    let with = |option: &str| error(&format!("{url}?{option}"));
    assert!(with("queues=17").contains("from 1 to 16"));
    assert!(with("depth=0").contains("from 1 to 1024"));
    assert!(with("kato=10ms").contains("at least 1s"));
    assert!(with("timeout=1ms").contains("at least 100ms"));
    assert!(with("policy=random").contains("round-robin or queue-depth"));
    assert!(with("hostnqn=me").contains("begins with nqn."));
    assert!(with("colour=red").contains("nvme+tcp volumes have read-only, queues"));
    // What answers is another kind of server.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        use std::io::Write;
        let (mut stream, _) = listener.accept().unwrap();
        stream
            .write_all(&b"220 mail.example.org ESMTP\r\n".repeat(10))
            .unwrap();
    });
    let text = error(&format!("nvme+tcp://{address}/nqn.x/1"));
    assert!(text.contains("breaks the protocol"), "{text}");
}

#[test]
fn discovery_tells_the_ways_to_subsystems() {
    let target = Target::new(Setup::default());
    let record = |number: u16| DiscoveryRecord {
        trtype: TransportType::TCP,
        adrfam: AddressFamily::IPV4,
        subtype: SubsystemType::NVM,
        portid: number.into(),
        trsvcid: Ascii::new("4420").unwrap(),
        traddr: Ascii::new("10.0.0.1").unwrap(),
        subnqn: Nqn::new(&format!("nqn.x:{number}")).unwrap(),
        ..DiscoveryRecord::default()
    };
    let records: Vec<_> = (0..40).map(record).collect();
    *target.state.records.lock().unwrap() = records.clone();
    let address = target.address(0);
    let place = HostPort {
        host: address.ip().to_string(),
        port: address.port(),
    };
    let identity = HostIdentity::named("nqn.2014-08.org.x:host").unwrap();
    let found = fabrics::discover(place, &identity).unwrap();
    assert_eq!(found.generation, 1);
    assert_eq!(found.records, records);
}

// ---- a model

/// One operation of the model's.
#[derive(Debug, Clone)]
struct Step {
    kind: u8,
    start: u64,
    blocks: u64,
    cuts: Vec<u64>,
    seed: u8,
}

const SIZE: u64 = 256 << 10;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let cuts = vec(prop_oneof![1..5000u64, Just(4096), Just(512)], 0..6);
    let blocks = prop_oneof![1..16u64, 1..400u64];
    let step = (0..12u8, 0..SIZE / SECTOR, blocks, cuts, any::<u8>());
    let step = step.prop_map(|(kind, start, blocks, cuts, seed)| Step {
        kind,
        start,
        blocks,
        cuts,
        seed,
    });
    vec(step, 1..40)
}

/// Guest memory for `len` bytes, in pieces that are not merged.
fn list(worker: &Worker, cuts: &[u64], len: u64) -> SegmentList {
    let (mut pieces, mut at, mut left) = (Vec::new(), 4 << 20, len);
    for cut in cuts.iter().copied().chain([len]) {
        let cut = cut.min(left);
        if cut > 0 {
            pieces.push((at, cut));
            at += cut + 7;
            left -= cut;
        }
    }
    worker.guest.list(&pieces)
}

fn check(volume: &dyn Volume, steps: &[Step]) {
    let mut worker = Worker::new(volume);
    let size = volume.info().size;
    let mut model = vec![0u8; size as usize];
    for step in steps {
        let offset = (step.start * SECTOR).min(size - SECTOR);
        let len = (step.blocks * SECTOR).min(size - offset);
        let range = offset as usize..(offset + len) as usize;
        worker.way = if step.seed & 2 == 0 {
            Way::Start
        } else {
            Way::Submit
        };
        let fua = step.seed & 1 == 1;
        match step.kind {
            0..=4 => {
                let data = pattern(step.seed, len);
                let list = list(&worker, &step.cuts, len);
                assert_eq!(list.copy_from(0, &data), data.len());
                let done = worker.run(Op::Write { fua }, offset, len, list);
                assert_eq!(done.result, Ok(()), "{step:?}");
                model[range].copy_from_slice(&data);
            }
            5..=8 => {
                let list = list(&worker, &step.cuts, len);
                list.fill(0xee);
                let done = worker.run(Op::Read, offset, len, list);
                assert_eq!(done.result, Ok(()), "{step:?}");
                assert!(bytes(&done.data) == model[range], "{step:?}");
            }
            9 | 10 => {
                let deallocate = step.kind == 9;
                let zeroes = Op::WriteZeroes { deallocate, fua };
                worker.without_data(zeroes, offset, len).unwrap();
                model[range].fill(0);
            }
            _ => worker.without_data(Op::Flush, 0, 0).unwrap(),
        }
    }
    assert!(worker.read(0, size).unwrap() == model);
}

/// A controller that closes or lies now and then, in all ways by turns.
fn unreliable(every: usize) -> Setup {
    let ways = [
        Answer::Close,
        Answer::CloseWithin,
        Answer::WrongCid,
        Answer::Garbage,
        Answer::Terminate,
    ];
    let turn = AtomicUsize::new(0);
    Setup {
        size: SIZE as usize,
        mdts: 2,
        portals: 1 + every % 2,
        answer: Box::new(move |number, _| match (number + 1).is_multiple_of(every) {
            true => ways[turn.fetch_add(1, Ordering::SeqCst) % ways.len()],
            false => Answer::Right,
        }),
        ..Setup::default()
    }
}

fn small(success: bool, in_capsule: u32) -> Setup {
    Setup {
        size: SIZE as usize,
        success,
        in_capsule,
        h2c_data: 8192,
        r2t: 20 << 10,
        ..Setup::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn it_is_a_byte_vector(
        steps in steps(),
        success in any::<bool>(),
        digests in any::<(bool, bool)>(),
        inside in 0..3u32,
    ) {
        let target = Target::new(small(success, inside * 4096));
        let options = FabricsOptions {
            header_digest: digests.0,
            data_digest: digests.1,
            ..options()
        };
        check(&open(&target, options), &steps);
        assert_eq!(target.count(|s| &s.corrupt), 0);
    }

    /// In every wrapper.
    #[test]
    fn wrapped_it_is_a_byte_vector(steps in steps(), wrapper in 0..4) {
        let target = Target::new(small(true, 8192));
        let volume: Arc<dyn Volume> = Arc::new(open(&target, options()));
        let limits = Limits {
            iops: Rates { total: 50_000, ..Rates::default() },
            burst: Duration::ZERO,
            ..Limits::default()
        };
        let volume: Arc<dyn Volume> = match wrapper {
            0 => Arc::new(SliceVolume::new(volume, 4096, Some(SIZE - 8192)).unwrap()),
            1 => Arc::new(LimitVolume::new(volume, limits)),
            2 => Arc::new(FairVolume::new(volume, FairGroup::new(2), 7)),
            _ => Arc::new(FaultVolume::new(volume)),
        };
        check(&*volume, &steps);
    }
}

proptest! {
    // Each association takes its time.
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    /// However often an association breaks.
    #[test]
    fn it_is_a_byte_vector_on_an_unreliable_controller(steps in steps(), every in 9..40usize) {
        let target = Target::new(unreliable(every));
        check(&open(&target, options()), &steps);
    }
}
