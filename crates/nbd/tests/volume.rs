//! The volume against a server in this process: what it does, and what it makes of a server that
//! lies, hangs and goes away.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

#[path = "../../volume/tests/common/mod.rs"]
mod common;
mod server;

use common::{BOUND, Way, Worker, bytes};
use dma::{Access, DmaMap, Memory, Prot, SegmentList};
use nbd::protocol::wire::{command, export_flags as flags};
use nbd::{NbdOptions, NbdVolume, Server as Named};
use proptest::collection::vec;
use proptest::prelude::*;
use server::{ALL, Answer, Server, Setup};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use volume::{
    FairGroup, FairVolume, FaultVolume, FileOptions, FileVolume, Io, IoErrorKind, IoOptions,
    LimitVolume, Limits, MemVolume, Op, OpenOptions, Rates, Registry, SliceVolume, Volume,
};

const WRITE: Op = Op::Write { fua: false };
const BLOCK: u64 = 4096;

/// With time-outs that no busy machine comes near.
fn options() -> NbdOptions {
    NbdOptions::default()
}

/// For tests that wait for a time-out, and lose nothing when it comes early.
fn short() -> NbdOptions {
    NbdOptions {
        timeout: Duration::from_secs(1),
        ..options()
    }
}

fn open(server: &Server, options: NbdOptions) -> NbdVolume {
    let named = Named::unix("/", server.path.to_str().unwrap()).unwrap();
    NbdVolume::open(named, options).unwrap()
}

fn serving(answer: impl Fn(usize, &server::Request) -> Answer + Send + Sync + 'static) -> Server {
    Server::new(Setup {
        answer: Box::new(answer),
        ..Setup::default()
    })
}

fn pattern(seed: u8, len: u64) -> Vec<u8> {
    (0..len)
        .map(|index| (index as u8).wrapping_mul(31) ^ (index >> 8) as u8 ^ seed | 1)
        .collect()
}

#[test]
fn what_is_written_is_read() {
    for structured in [true, false] {
        let server = Server::new(Setup {
            structured,
            ..Setup::default()
        });
        let volume = open(&server, options());
        let mut worker = Worker::new(&volume);
        for (offset, len) in [(0, 512), (4096, 4096), (65536, 1 << 20), (1 << 20, 70_144)] {
            let data = pattern(len as u8, len);
            worker.write(offset, &data).unwrap();
            assert_eq!(worker.read(offset, len).unwrap(), data, "{offset} {len}");
            let there = server.state.data.lock().unwrap();
            assert!(there[offset as usize..][..len as usize] == data[..]);
        }
        worker.without_data(Op::Flush, 0, 0).unwrap();
        assert_eq!(server.count(|s| &s.flushes), 1);
        drop(worker);
        assert_eq!(server.count(|s| &s.connections), 1);
    }
}

#[test]
fn what_the_server_has_is_told() {
    let server = Server::new(Setup {
        blocks: [4096, 8192, 1 << 20],
        ..Setup::default()
    });
    let volume = open(&server, options());
    let info = volume.info();
    assert_eq!((info.size, info.block_size), (2 << 20, 4096));
    assert_eq!((info.optimal_io, info.deallocate_granularity), (8192, 8192));
    assert!(info.deallocate && info.write_zeroes && info.volatile_cache && !info.read_only);
    let mut worker = Worker::new(&volume);
    let refused = worker.read(512, 4096).unwrap_err();
    assert_eq!(refused.kind, IoErrorKind::Invalid);
    assert_eq!(
        worker.read(2 << 20, 4096).unwrap_err().kind,
        IoErrorKind::OutOfRange
    );
    let bare = Server::new(Setup {
        flags: flags::HAS_FLAGS | flags::READ_ONLY,
        ..Setup::default()
    });
    let volume = open(&bare, options());
    let info = volume.info();
    assert!(info.read_only && !info.deallocate && !info.volatile_cache && !info.write_zeroes);
    let mut worker = Worker::new(&volume);
    assert_eq!(
        worker.write(0, &[1; 512]).unwrap_err().kind,
        IoErrorKind::ReadOnly
    );
    assert_eq!(bare.count(|s| &s.requests), 0);
}

#[test]
fn long_requests_become_several() {
    let server = Server::new(Setup {
        blocks: [512, 4096, 64 << 10],
        ..Setup::default()
    });
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    let data = pattern(3, (1 << 20) + 512);
    worker.write(512, &data).unwrap();
    assert_eq!(worker.read(512, data.len() as u64).unwrap(), data);
    let log = server.state.log.lock().unwrap();
    assert_eq!(
        log.iter().filter(|entry| entry.0 == command::WRITE).count(),
        17
    );
}

#[test]
fn durability_is_asked_for_as_the_server_knows_it() {
    let fua = Op::Write { fua: true };
    let zeroes = Op::WriteZeroes {
        deallocate: false,
        fua: true,
    };
    for known in [true, false] {
        let server = Server::new(Setup {
            flags: if known { ALL } else { ALL & !flags::SEND_FUA },
            ..Setup::default()
        });
        let volume = open(&server, options());
        let mut worker = Worker::new(&volume);
        let data = worker.guest.holding(0, &[9; 4096]);
        assert_eq!(worker.run(fua, 0, 4096, data).result, Ok(()));
        worker.without_data(zeroes, 4096, 4096).unwrap();
        let counts = (server.count(|s| &s.fuas), server.count(|s| &s.flushes));
        assert_eq!(counts, if known { (2, 0) } else { (0, 2) });
        let log = server.state.log.lock().unwrap();
        let zeroed = log.iter().find(|entry| entry.0 == command::WRITE_ZEROES);
        let no_hole = zeroed.unwrap().1 & command::NO_HOLE;
        assert_ne!(no_hole, 0, "space that was not to be deallocated");
    }
}

#[test]
fn what_the_server_cannot_do_is_done_otherwise_or_refused() {
    let server = Server::new(Setup {
        flags: flags::HAS_FLAGS,
        ..Setup::default()
    });
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &[7; 8192]).unwrap();
    let zeroes = Op::WriteZeroes {
        deallocate: true,
        fua: false,
    };
    worker.without_data(zeroes, 4096, (2 << 20) - 4096).unwrap();
    assert_eq!(worker.read(0, 4096).unwrap(), [7; 4096]);
    assert_eq!(worker.read(4096, 65536).unwrap(), [0; 65536]);
    let refused = worker.without_data(Op::Deallocate, 0, 4096).unwrap_err();
    assert_eq!(refused.kind, IoErrorKind::Unsupported);
    worker.without_data(Op::Flush, 0, 0).unwrap();
    assert_eq!(server.count(|s| &s.flushes), 0);
}

#[test]
fn errors_of_the_server_reach_the_request_alone() {
    let server = serving(|number, _| match number {
        0 => Answer::Errno(28),
        1 => Answer::Errno(5),
        2 => Answer::Errno(0xffff_ffff),
        3 => Answer::Errno(1),
        4 => Answer::Errno(22),
        5 => Answer::Errno(12),
        _ => Answer::Right,
    });
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    assert_eq!(
        worker.write(0, &[1; 4096]).unwrap_err().kind,
        IoErrorKind::NoSpace
    );
    assert_eq!(
        worker.read(0, 4096).unwrap_err().kind,
        IoErrorKind::MediaRead
    );
    assert_eq!(
        worker.read(0, 4096).unwrap_err().kind,
        IoErrorKind::MediaRead
    );
    for kind in [
        IoErrorKind::ReadOnly,
        IoErrorKind::Invalid,
        IoErrorKind::Busy,
    ] {
        assert_eq!(worker.write(0, &[1; 4096]).unwrap_err().kind, kind);
    }
    assert_eq!(worker.read(0, 4096).unwrap(), [0; 4096]);
    assert_eq!(server.count(|s| &s.connections), 1);
}

/// Each lie ends its connection; the request is sent again on the next, and answered there.
#[test]
fn after_a_lie_or_an_end_requests_are_sent_again() {
    for answer in [
        Answer::Close,
        Answer::CloseWithin,
        Answer::WrongCookie,
        Answer::Garbage,
        Answer::TooLong,
        Answer::Flood,
        Answer::Never,
        Answer::Errno(nbd::protocol::wire::ESHUTDOWN),
    ] {
        for structured in [true, false] {
            if !structured && matches!(answer, Answer::Flood) {
                continue;
            }
            let server = Server::new(Setup {
                structured,
                answer: Box::new(move |number, _| match number {
                    3 => answer,
                    _ => Answer::Right,
                }),
                ..Setup::default()
            });
            let limits = if answer == Answer::Never {
                short()
            } else {
                options()
            };
            let volume = open(&server, limits);
            let mut worker = Worker::new(&volume);
            let data = pattern(9, 40 * BLOCK);
            let mut tags = Vec::new();
            for at in 0..40 {
                let part = &data[(at * BLOCK) as usize..][..BLOCK as usize];
                let list = worker.guest.holding(at * BLOCK, part);
                let (tag, done) = worker.start(WRITE, at * BLOCK, BLOCK, list);
                assert!(done.is_none());
                tags.push(tag);
            }
            let mut done = worker.wait(40);
            done.sort_by_key(|completion| completion.tag);
            for (completion, tag) in done.iter().zip(&tags) {
                assert_eq!(
                    (completion.tag, completion.result),
                    (*tag, Ok(())),
                    "{answer:?}"
                );
            }
            drop(done);
            for at in [0, 20, 39] {
                let part = &data[(at * BLOCK) as usize..][..BLOCK as usize];
                assert_eq!(worker.read(at * BLOCK, BLOCK).unwrap(), part, "{answer:?}");
            }
            let second = server.count(|s| &s.connections);
            assert!(second >= 2, "{answer:?} {structured}: {second} connections");
        }
    }
}

/// The same with a long read, whose data goes to its memory without a copy.
#[test]
fn a_long_read_survives_the_end_of_its_connection() {
    for answer in [Answer::CloseWithin, Answer::TooLong, Answer::Garbage] {
        let server = serving(move |number, _| match number {
            1 | 2 => answer,
            _ => Answer::Right,
        });
        let volume = open(&server, options());
        let mut worker = Worker::new(&volume);
        let data = pattern(5, 1 << 20);
        worker.write(0, &data).unwrap();
        assert_eq!(worker.read(0, 1 << 20).unwrap(), data, "{answer:?}");
    }
}

#[test]
fn a_server_that_never_says_the_truth_fails_the_request() {
    let server = serving(|_, _| Answer::Garbage);
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    assert_eq!(
        worker.read(0, 4096).unwrap_err().kind,
        IoErrorKind::MediaRead
    );
    assert_eq!(server.count(|s| &s.connections), 5);
}

#[test]
fn a_server_that_comes_back_goes_on() {
    let mut server = serving(|_, _| Answer::Right);
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &[1; 4096]).unwrap();
    server.stop();
    let list = worker.guest.holding(0, &[2; 4096]);
    let (_, done) = worker.start(WRITE, 4096, 4096, list);
    assert!(done.is_none());
    // It is a slow disk.
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        worker.io.flush();
        worker
            .io
            .poll(&mut |_| panic!("a completion without a server"));
        worker
            .queue
            .poll(&mut |_| panic!("a completion without a server"));
    }
    assert_eq!(worker.queue.state().in_flight, 1);
    // It has grown.
    server.state.data.lock().unwrap().resize(4 << 20, 0);
    server.start();
    assert_eq!(worker.wait(1)[0].result, Ok(()));
    assert_eq!(
        worker.read(0, 8192).unwrap(),
        [[1; 4096], [2; 4096]].concat()
    );
    assert!(volume.refresh().unwrap() && !volume.refresh().unwrap());
    assert_eq!(volume.info().size, 4 << 20);
    assert_eq!(worker.read((4 << 20) - 4096, 4096).unwrap(), [0; 4096]);
}

#[test]
fn another_export_in_its_place_is_not_taken() {
    let mut server = serving(|_, _| Answer::Right);
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &[1; 4096]).unwrap();
    server.stop();
    *server.state.blocks.lock().unwrap() = [8192, 8192, 1 << 20];
    server.start();
    let list = worker.guest.piece(0, 4096);
    let (tag, _) = worker.start(Op::Read, 4096, 4096, list);
    let before = server.count(|s| &s.connections);
    let began = Instant::now();
    while server.count(|s| &s.connections) < before + 2 {
        assert!(began.elapsed() < BOUND);
        worker.io.flush();
        worker.io.poll(&mut |_| ());
        worker
            .queue
            .poll(&mut |_| panic!("answered by another export"));
    }
    // A guest's reset ends it all the same.
    worker.queue.cancel(tag);
    assert_eq!(
        worker.wait(1)[0].result.unwrap_err().kind,
        IoErrorKind::Aborted
    );
}

/// The requests of a server that stays away wait, then fail; and they are carried out again when it
/// is back. The watch tells how it is.
#[test]
fn requests_fail_when_a_server_stays_away() {
    let mut server = serving(|_, _| Answer::Right);
    let impatient = NbdOptions {
        reconnect_delay: Duration::from_secs(3),
        ..options()
    };
    let volume = open(&server, impatient);
    let watch = volume.watch();
    let mut worker = Worker::new(&volume);
    worker.write(0, &[1; 4096]).unwrap();
    let reach = watch.look().unwrap();
    assert!(reach.connected && reach.lost == 0);
    assert!(
        server
            .url()
            .starts_with(reach.server.split('?').next().unwrap())
    );
    server.stop();
    // One that was with the server or on its way, one that waits.
    let began = Instant::now();
    assert_eq!(
        worker.write(0, &[2; 4096]).unwrap_err().kind,
        IoErrorKind::Unreachable
    );
    assert!(began.elapsed() >= Duration::from_millis(2900), "it waited");
    assert!(!watch.look().unwrap().connected);
    // From now on nothing waits, until the server is back.
    for _ in 0..100 {
        let error = worker.read(0, 4096).unwrap_err();
        assert_eq!(error.kind, IoErrorKind::Unreachable);
    }
    let flush = worker.without_data(Op::Flush, 0, 0);
    assert_eq!(flush.unwrap_err().kind, IoErrorKind::Unreachable);
    server.start();
    let began = Instant::now();
    while worker.read(0, 4096).is_err() {
        assert!(began.elapsed() < BOUND);
    }
    let reach = watch.look().unwrap();
    assert!(reach.connected && reach.lost >= 1);
    // The pause is counted from the next loss on.
    server.stop();
    server.start();
    worker.write(0, &[3; 4096]).unwrap();
    drop(worker);
    drop(volume);
    assert_eq!(watch.look(), None);
}

/// A server that takes connections and requests and answers nothing is no server.
#[test]
fn a_server_that_only_listens_is_lost_as_well() {
    let server = serving(|_, _| Answer::Never);
    let impatient = NbdOptions {
        timeout: Duration::from_millis(200),
        reconnect_delay: Duration::from_secs(1),
        ..NbdOptions::default()
    };
    let volume = open(&server, impatient);
    let mut worker = Worker::new(&volume);
    assert_eq!(
        worker.read(0, 4096).unwrap_err().kind,
        IoErrorKind::Unreachable
    );
    assert!(server.count(|s| &s.connections) >= 2, "it was tried again");
}

/// The server may end at any byte of the handshake of the next connection.
#[test]
fn a_handshake_that_ends_at_any_byte_is_made_again() {
    let server = serving(|number, _| match number {
        1 => Answer::Close,
        _ => Answer::Right,
    });
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &[1; 4096]).unwrap();
    *server.state.cuts.lock().unwrap() = vec![115, 100, 70, 39, 38, 18, 17, 16, 8, 1, 0];
    worker.write(0, &[2; 4096]).unwrap();
    assert_eq!(worker.read(0, 4096).unwrap(), [2; 4096]);
    let cuts = server.state.cuts.lock().unwrap();
    assert!(cuts.is_empty(), "{cuts:?}");
    // The first one, those, and the last one.
    assert!(server.count(|s| &s.connections) >= 13);
}

/// A server that says nothing holds up nobody for longer than the time limit.
#[test]
fn a_silent_server_is_given_up_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("silent");
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let named = Named::unix("/", path.to_str().unwrap()).unwrap();
    let error = NbdVolume::open(named, options()).unwrap_err().to_string();
    assert!(error.contains("no answer within the time limit"), "{error}");
    let name = "x".repeat(4097);
    let server = serving(|_, _| Answer::Right);
    let named = Named::unix(&format!("/{name}"), server.path.to_str().unwrap()).unwrap();
    let error = NbdVolume::open(named, options()).unwrap_err().to_string();
    assert!(error.contains("at most 4096 bytes"), "{error}");
}

/// Guest memory that is not there any more fails its requests, and not the disk.
#[test]
fn memory_that_was_cut_short_fails_its_request() {
    let server = serving(|_, _| Answer::Right);
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &pattern(1, 64 << 10)).unwrap();
    let file = rustix::fs::memfd_create("cut", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 1 << 20).unwrap();
    let memory = Memory::from_fd(file.try_clone().unwrap(), 1 << 20, true).unwrap();
    let mut map = DmaMap::new();
    let prot = Prot {
        read: true,
        write: true,
    };
    map.map(0, 1 << 20, Some((memory, 0)), prot).unwrap();
    rustix::fs::ftruncate(&file, 4096).unwrap();
    // The kernel sends it. (A copy by the processor finds zeroes there, as with any volume.)
    for len in [8192, 64 << 10] {
        let mut list = SegmentList::new();
        assert!(list.begin_piece(&map, 0, len, Access::Write));
        let result = worker.run(WRITE, 0, len, list).result;
        assert_eq!(result.unwrap_err().kind, IoErrorKind::Memory, "{len}");
    }
    assert_eq!(worker.read(0, 4096).unwrap(), pattern(1, 64 << 10)[..4096]);
}

/// A disk of the same worker does its work, whatever the server does.
#[test]
fn a_server_is_no_trouble_for_other_disks() {
    for answer in [Answer::Never, Answer::Flood, Answer::Garbage, Answer::Close] {
        let server = serving(move |_, _| answer);
        let volume = open(&server, options());
        let mut worker = Worker::new(&volume);
        let other = MemVolume::new(1 << 20).unwrap();
        let directory = common::disk();
        let path = common::sparse(&directory, 1 << 20);
        let file = FileVolume::open(&path, FileOptions::default()).unwrap();
        let mut others = [&other as &dyn Volume, &file].map(|v| v.open(&worker.io).unwrap());
        for at in 0..20 {
            let list = worker.guest.piece(at * BLOCK, BLOCK);
            worker.start(Op::Read, at * BLOCK, BLOCK, list);
        }
        worker.queue.push();
        let (mut done, mut asked) = (0, 0);
        let began = Instant::now();
        while done < 2000 {
            assert!(began.elapsed() < BOUND, "{answer:?}: {done} of 2000");
            if asked == done {
                let queue = &mut others[asked % 2];
                let list = worker.guest.piece(1 << 20, BLOCK);
                asked += 1;
                let tag = 1 << 40 | asked as u64;
                let request = volume::Request::transfer(tag, WRITE, 4096, list);
                done += usize::from(queue.submit(request).is_some());
            }
            worker.io.flush();
            worker.io.poll(&mut |completion| {
                assert_eq!(completion.result, Ok(()));
                done += 1;
            });
            worker.queue.poll(&mut |_| ());
        }
    }
}

/// What a guest has given up does not come on top of what it writes later, though part of it was
/// never sent.
#[test]
fn a_write_that_was_given_up_while_it_was_sent_goes_before_all_that_follows() {
    let server = serving(|number, _| match number {
        0 => Answer::Held,
        _ => Answer::Right,
    });
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    let old = worker.guest.holding(0, &[1; 4096]);
    let mut tags = vec![worker.start(WRITE, 0, 4096, old).0];
    // More than the socket takes, in the same message.
    for _ in 0..4 {
        let more = worker.guest.piece(1 << 20, 1 << 20);
        tags.push(worker.start(WRITE, 1 << 20, 1 << 20, more).0);
    }
    worker.queue.push();
    while server.count(|s| &s.requests) == 0 {
        worker.io.flush();
        worker.io.poll(&mut |_| ());
        worker.queue.poll(&mut |_| panic!("too early"));
    }
    for tag in &tags {
        worker.queue.cancel(*tag);
    }
    // Their memory is wanted: they do not wait for the server.
    let done = worker.wait(tags.len());
    assert!(done.iter().all(|c| c.result.is_err()) && server.is_held());
    let new = worker.guest.holding(4096, &[2; 4096]);
    worker.start(WRITE, 0, 4096, new);
    let until = Instant::now() + Duration::from_millis(500);
    while Instant::now() < until {
        worker.io.flush();
        worker.io.poll(&mut |_| ());
        worker
            .queue
            .poll(&mut |_| panic!("the new one overtook the old one"));
    }
    server.release();
    assert_eq!(worker.wait(1)[0].result, Ok(()));
    assert_eq!(worker.read(0, 4096).unwrap(), [2; 4096]);
}

/// What a guest has given up does not come on top of what it writes later.
#[test]
fn a_write_that_was_given_up_goes_before_all_that_follows() {
    let server = serving(|number, _| match number {
        0 => Answer::Held,
        _ => Answer::Right,
    });
    let volume = open(
        &server,
        NbdOptions {
            timeout: Duration::from_secs(60),
            connections: 2,
            ..NbdOptions::default()
        },
    );
    let mut worker = Worker::new(&volume);
    let old = worker.guest.holding(0, &[1; 4096]);
    let (tag, _) = worker.start(WRITE, 0, 4096, old);
    worker.queue.push();
    // The new one could go by the other connection, past the old one.
    let watch = volume.watch();
    let connected = || watch.look().is_some_and(|reach| reach.connected);
    while server.count(|s| &s.requests) == 0 || !connected() {
        worker.io.flush();
        worker.io.poll(&mut |_| ());
        worker.queue.poll(&mut |_| panic!("too early"));
    }
    // The memory is back once the kernel has sent it.
    worker.queue.cancel(tag);
    assert_eq!(
        worker.wait(1)[0].result.unwrap_err().kind,
        IoErrorKind::Aborted
    );
    let new = worker.guest.holding(4096, &[2; 4096]);
    worker.start(WRITE, 0, 4096, new);
    let until = Instant::now() + Duration::from_millis(200);
    while Instant::now() < until {
        worker.io.flush();
        worker.io.poll(&mut |_| ());
        worker
            .queue
            .poll(&mut |_| panic!("the new one overtook the old one"));
    }
    assert_eq!(server.count(|s| &s.requests), 1);
    server.release();
    assert_eq!(worker.wait(1)[0].result, Ok(()));
    assert_eq!(worker.read(0, 4096).unwrap(), [2; 4096]);
}

#[test]
fn requests_end_when_they_are_cancelled_wherever_they_are() {
    let server = serving(|number, _| match number {
        0..=100 => Answer::Never,
        _ => Answer::Right,
    });
    let volume = open(
        &server,
        NbdOptions {
            timeout: Duration::from_secs(60),
            ..NbdOptions::default()
        },
    );
    let mut worker = Worker::new(&volume);
    // More than the server's socket takes: some are sent, some are being sent, some wait.
    let mut tags = Vec::new();
    for _ in 0..20 {
        let data = worker.guest.piece(0, 1 << 20);
        tags.push(worker.start(WRITE, 0, 1 << 20, data).0);
    }
    for _ in 0..20 {
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
fn several_connections_share_the_work_where_that_is_allowed() {
    let server = Server::new(Setup::default());
    let several = NbdOptions {
        connections: 3,
        ..options()
    };
    let volume = open(&server, several);
    let mut worker = Worker::new(&volume);
    let began = Instant::now();
    while server.count(|s| &s.connections) < 3 {
        assert!(began.elapsed() < BOUND);
        worker.read(0, 4096).unwrap();
    }
    // A second worker has its own.
    let mut other = Worker::new(&volume);
    other.write(0, &[3; 4096]).unwrap();
    other.without_data(Op::Flush, 0, 0).unwrap();
    assert_eq!(worker.read(0, 4096).unwrap(), [3; 4096]);
    // Where it is not allowed, there is one of everything.
    let server = Server::new(Setup {
        flags: ALL & !flags::CAN_MULTI_CONN,
        ..Setup::default()
    });
    let named = || Named::unix("/", server.path.to_str().unwrap()).unwrap();
    let error = NbdVolume::open(named(), several).unwrap_err().to_string();
    assert!(
        error.contains("does not allow several connections"),
        "{error}"
    );
    let volume = open(&server, options());
    let io = Io::new(IoOptions::default());
    let first = volume.open(&io).unwrap();
    let error = volume.open(&io).unwrap_err().to_string();
    assert!(error.contains("NBD_FLAG_CAN_MULTI_CONN"), "{error}");
    drop(first);
    assert!(volume.open(&io).is_ok());
}

#[test]
fn a_worker_that_ends_does_not_wait_for_ever() {
    let server = serving(|_, _| Answer::Never);
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    worker.io = Io::new(IoOptions {
        stop_timeout: Duration::from_millis(100),
        ..IoOptions::default()
    });
    worker.queue = volume.open(&worker.io).unwrap();
    let list = worker.guest.holding(0, &[2; 4096]);
    worker.start(WRITE, 4096, 4096, list);
    worker.io.end();
    assert_eq!(
        worker.wait(1)[0].result.unwrap_err().kind,
        IoErrorKind::Aborted
    );
    assert_eq!(worker.io.given_up().len(), 1);
}

#[test]
fn urls_open_it_and_errors_name_the_server() {
    let server = Server::new(Setup::default());
    let mut registry = Registry::<()>::new();
    for kind in nbd::kinds(|_| ()) {
        registry = registry.with(kind);
    }
    let open = |url: &str| registry.open(url, OpenOptions::default());
    let opened = open(&format!("{}&read-only=on&offset=1M", server.url())).unwrap();
    assert_eq!(opened.volume.info().size, 1 << 20);
    assert!(opened.volume.info().read_only);
    let error = |url: &str| open(url).map(|_| ()).unwrap_err().to_string();
    let gone = server.path.with_extension("gone");
    let text = error(&server::url(&gone));
    let name = gone.to_str().unwrap();
    assert!(
        text.contains(name) && text.contains("no server can be reached"),
        "{text}"
    );
    assert!(error("nbd+unix:///x").contains("socket=PATH"));
    assert!(error("nbd://").contains("names the server's host"));
    assert!(error("nbd://127.0.0.1:1/x").contains("nbd://127.0.0.1:1/x: no server"));
    let with = |option: &str| error(&format!("{}&{option}", server.url()));
    assert!(with("connections=17").contains("from 1 to 16"));
    assert!(with("timeout=1ms").contains("at least 100ms"));
    assert!(with("reconnect-delay=999ms").contains("at least 1s"));
    assert!(with("colour=red").contains("nbd+unix volumes have read-only, socket"));
    // What answers is another kind of server.
    let stranger = tempfile::tempdir().unwrap();
    let path = stranger.path().join("x");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        use std::io::Write;
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"220 mail.example.org ESMTP\r\n").unwrap();
    });
    assert!(error(&server::url(&path)).contains("no NBD server"));
}

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
const UNIT: u64 = 512;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let cuts = vec(prop_oneof![1..5000u64, Just(4096), Just(512)], 0..6);
    let blocks = prop_oneof![1..16u64, 1..400u64];
    let step = (0..12u8, 0..SIZE / UNIT, blocks, cuts, any::<u8>());
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
        let offset = (step.start * UNIT).min(size - UNIT);
        let len = (step.blocks * UNIT).min(size - offset);
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

/// A server that closes or lies now and then, in all ways by turns.
fn unreliable(every: usize) -> Setup {
    let ways = [
        Answer::Close,
        Answer::CloseWithin,
        Answer::WrongCookie,
        Answer::Garbage,
    ];
    let turn = AtomicUsize::new(0);
    Setup {
        size: SIZE as usize,
        blocks: [512, 4096, 16 << 10],
        structured: every.is_multiple_of(2),
        answer: Box::new(move |number, _| match (number + 1).is_multiple_of(every) {
            true => ways[turn.fetch_add(1, Ordering::SeqCst) % ways.len()],
            false => Answer::Right,
        }),
        ..Setup::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn it_is_a_byte_vector(steps in steps(), structured in any::<bool>()) {
        let server = Server::new(Setup { structured, size: SIZE as usize, ..Setup::default() });
        check(&open(&server, options()), &steps);
    }

    /// In every wrapper.
    #[test]
    fn wrapped_it_is_a_byte_vector(steps in steps(), wrapper in 0..4) {
        let server = Server::new(Setup { size: SIZE as usize, ..Setup::default() });
        let volume: Arc<dyn Volume> = Arc::new(open(&server, options()));
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
    // Each connection takes its time.
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    /// However often the connection breaks.
    #[test]
    fn it_is_a_byte_vector_on_an_unreliable_server(steps in steps(), every in 9..40usize) {
        let server = Server::new(unreliable(every));
        check(&open(&server, options()), &steps);
    }
}
