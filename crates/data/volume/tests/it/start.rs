//! The two ways into a queue: every request that is submitted can be started, with the same result.

use crate::common::{BOUND, Guest, SubmitCall, WAYS, Worker, disk, sparse};
use dma::{Access, DmaMap, Prot, Segment, SegmentList};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use volume::{
    Completion, Direct, Effect, FairGroup, FairVolume, Fault, FaultVolume, FileOptions, FileVolume,
    Io, IoCounters, IoError, IoErrorKind, IoLimits, IoOptions, LimitVolume, MemVolume, NullOptions,
    NullVolume, Op, OpKind, Rates, Request, SliceVolume, Volume,
};

const SIZE: u64 = 1 << 20;
const REACH: usize = 96 << 10;
const WRITE: Op = Op::Write { fua: false };

fn open(path: &Path, options: FileOptions) -> Arc<dyn Volume> {
    Arc::new(FileVolume::open(path, options).unwrap())
}

fn slice(volume: Arc<dyn Volume>, offset: u64, len: u64) -> Arc<dyn Volume> {
    Arc::new(SliceVolume::new(volume, offset, Some(len)).unwrap())
}

/// Every kind of volume, with how it is called. `path`: a file of [`SIZE`] bytes.
fn volumes(path: &Path) -> Vec<(&'static str, Arc<dyn Volume>)> {
    let buffered = FileOptions {
        direct: Direct::Off,
        lock: false,
        ..FileOptions::default()
    };
    let direct = FileOptions {
        direct: Direct::Auto,
        ..buffered
    };
    let read_only = FileOptions {
        read_only: true,
        ..direct
    };
    let file = || open(path, direct);
    let null = NullOptions {
        size: SIZE,
        latency: std::time::Duration::from_micros(10),
        ..NullOptions::default()
    };
    let some = IoLimits {
        iops: Rates {
            total: 1 << 20,
            ..Rates::default()
        },
        ..IoLimits::default()
    };
    let behind_all = slice(file(), 4096, SIZE - 8192);
    let behind_all = Arc::new(LimitVolume::new(behind_all, some));
    let behind_all = Arc::new(FairVolume::new(behind_all, FairGroup::new(4), 7));
    let behind_all = slice(Arc::new(FaultVolume::new(behind_all)), 4096, SIZE - 16384);
    vec![
        ("direct", file()),
        ("buffered", open(path, buffered)),
        ("read-only", open(path, read_only)),
        ("slice", slice(file(), 65536, 262144)),
        ("slice to the end", {
            Arc::new(SliceVolume::new(file(), 65536, None).unwrap())
        }),
        ("limit", Arc::new(LimitVolume::new(file(), some))),
        (
            "fair",
            Arc::new(FairVolume::new(file(), FairGroup::new(2), 7)),
        ),
        ("fault", Arc::new(FaultVolume::new(file()))),
        ("behind all", behind_all),
        ("memory", Arc::new(MemVolume::new(SIZE).unwrap())),
        ("null", Arc::new(NullVolume::new(null).unwrap())),
    ]
}

/// Outcome of a request: its data is returned, and this is the rest.
#[derive(Debug, PartialEq)]
struct Outcome {
    result: Result<(), IoError>,
    at_once: bool,
    counters: IoCounters,
}

fn outcome(worker: &mut Worker, request: Request) -> Outcome {
    let before = worker.io.counters();
    let given: Vec<Segment> = request.data.segments().to_vec();
    let Request {
        tag,
        op,
        offset,
        len,
        data,
    } = request;
    assert_eq!(len, data.len_bytes());
    let over = match worker.way {
        SubmitCall::Start => worker.queue.start(tag, op, offset, data),
        SubmitCall::Submit => worker.queue.submit(Request {
            tag,
            op,
            offset,
            len,
            data,
        }),
    };
    let at_once = over.is_some();
    let over = over.unwrap_or_else(|| worker.wait(1).remove(0));
    assert_eq!((over.tag, over.data.segments()), (tag, &given[..]));
    let now = worker.io.counters();
    Outcome {
        result: over.result,
        at_once,
        counters: IoCounters {
            requests: now.requests - before.requests,
            operations: now.operations - before.operations,
            fixed: now.fixed - before.fixed,
            bounced: now.bounced - before.bounced,
            continued: now.continued - before.continued,
            // These depend on the number of rounds.
            batches: 0,
            system_calls: 0,
        },
    }
}

/// Guest memory as a volume meets it, in its first [`REACH`] bytes.
fn shapes(guest: &Guest) -> Vec<(&'static str, SegmentList)> {
    let read_only = {
        let mut map = DmaMap::new();
        let backing = Some((guest.memory.clone(), 0));
        map.map(0, 65536, backing, Prot::RO).unwrap();
        let mut list = SegmentList::new();
        assert!(list.begin_piece(&map, 0, 4096, Access::Read));
        list
    };
    vec![
        ("a page", guest.piece(0, 4096)),
        ("pages", guest.piece(8192, 32768)),
        ("half a block", guest.piece(0, 256)),
        ("an odd address", guest.piece(65537, 8192)),
        ("pieces", guest.list(&[(0, 4096), (16384, 8192)])),
        ("odd pieces", guest.list(&[(3, 1000), (16384, 3096)])),
        ("not to be written", read_only),
        ("nothing", SegmentList::new()),
    ]
}

#[test]
fn both_start_paths_yield_same_data() {
    let directory = disk();
    let paths = ["one", "two"].map(|name| {
        let path = directory.path().join(name);
        std::fs::write(&path, vec![0x11; SIZE as usize]).unwrap();
        path
    });
    let [one, two] = paths.each_ref().map(|path| volumes(path));
    let zeroes = |deallocate| Op::WriteZeroes {
        deallocate,
        fua: true,
    };
    for ((name, submitted), (_, started)) in one.iter().zip(&two) {
        let mut submitted = Worker::by(SubmitCall::Submit, &**submitted);
        let mut started = Worker::by(SubmitCall::Start, &**started);
        let mut seed = 1;
        for op in [
            Op::Read,
            WRITE,
            Op::Write { fua: true },
            Op::Flush,
            Op::Deallocate,
            zeroes(false),
            zeroes(true),
        ] {
            for offset in [0, 4096, 512, 1, SIZE - 4096, SIZE, 1 << 40, u64::MAX - 4095] {
                for at in 0..8 {
                    let [first, second] = [&mut submitted, &mut started].map(|worker| {
                        let (shape, data) = shapes(&worker.guest).swap_remove(at);
                        worker.guest.memory.write(0, &vec![seed; REACH]).unwrap();
                        let len = data.len_bytes();
                        let request = Request {
                            tag: u64::from(seed),
                            op,
                            offset,
                            len,
                            data,
                        };
                        let outcome = outcome(worker, request);
                        let mut held = vec![0; REACH];
                        worker.guest.memory.read(0, &mut held).unwrap();
                        (shape, outcome, held)
                    });
                    let what = format!("{name}: {op:?} at {offset} with {}", first.0);
                    assert_eq!(first.1, second.1, "{what}");
                    assert!(first.2 == second.2, "{what}: other data");
                    seed = seed % 250 + 1;
                }
            }
        }
        drop((submitted, started));
        let [one, two] = paths.each_ref().map(|path| std::fs::read(path).unwrap());
        assert!(one == two, "{name}: the files differ");
        assert!(one.iter().any(|&byte| byte != 0x11), "nothing was written");
    }
}

#[test]
fn memory_is_bounced_only_when_necessary() {
    let directory = disk();
    let volume = open(&sparse(&directory, SIZE), FileOptions::default());
    if volume.info().description.contains("buffered") {
        let what = "volume::start::memory_is_bounced_only_when_necessary";
        return testkit::skip(what, "no direct I/O");
    }
    for way in WAYS {
        let mut worker = Worker::by(way, &*volume);
        for (at, bounced) in [(0, 0), (4096, 0), (4096 + 1, 1), (3, 2), (8192, 2)] {
            let data = worker.guest.piece(at, 8192);
            assert_eq!(data.copy_from(0, &[at as u8 ^ 0x5A; 8192]), 8192);
            assert_eq!(worker.run(WRITE, 16384, 8192, data).result, Ok(()));
            assert_eq!(worker.io.counters().bounced, bounced, "{way:?} at {at}");
            assert_eq!(worker.read(16384, 8192), Ok(vec![at as u8 ^ 0x5A; 8192]));
        }
        let counters = worker.io.counters();
        assert_eq!((counters.requests, counters.operations), (10, 10));
    }
}

/// A way to put one volume into another one.
type Wrapper<'a> = &'a dyn Fn(Arc<dyn Volume>) -> Arc<dyn Volume>;

/// All orders of these numbers.
fn orders(numbers: &[usize]) -> Vec<Vec<usize>> {
    if numbers.is_empty() {
        return vec![Vec::new()];
    }
    let all = (0..numbers.len()).flat_map(|at| {
        let mut rest = numbers.to_vec();
        let first = rest.remove(at);
        orders(&rest).into_iter().map(move |mut order| {
            order.push(first);
            order
        })
    });
    all.collect()
}

#[test]
fn every_wrapper_sees_requests_started_through_others() {
    let directory = disk();
    let path = sparse(&directory, SIZE);
    let limits = IoLimits {
        iops: Rates {
            total: 1,
            ..Rates::default()
        },
        burst: std::time::Duration::ZERO,
        ..IoLimits::default()
    };
    let (faults, limit) = (std::cell::RefCell::new(None), std::cell::RefCell::new(None));
    let faulty = |volume| -> Arc<dyn Volume> {
        let volume = FaultVolume::new(volume);
        *faults.borrow_mut() = Some(volume.faults());
        Arc::new(volume)
    };
    let limited = |volume| -> Arc<dyn Volume> {
        let volume = LimitVolume::new(volume, limits);
        *limit.borrow_mut() = Some(volume.handle());
        Arc::new(volume)
    };
    let fair =
        |volume| -> Arc<dyn Volume> { Arc::new(FairVolume::new(volume, FairGroup::new(1), 1)) };
    let sliced = |volume| slice(volume, 65536, 65536);
    let names = ["fault", "limit", "fair", "slice"];
    let wrappers: [Wrapper<'_>; 4] = [&faulty, &limited, &fair, &sliced];
    for order in orders(&[0, 1, 2, 3]) {
        let file = open(&path, FileOptions::default());
        let volume = order.iter().fold(file, |volume, &at| wrappers[at](volume));
        let what = format!(
            "{:?} around a file",
            order.iter().map(|&at| names[at]).collect::<Vec<_>>()
        );
        // A request that waits for the limit is not at the device: other requests get its place.
        let in_turn = order.iter().position(|&at| at == 2) < order.iter().position(|&at| at == 1);
        let faults = faults.take().unwrap();
        let mut worker = Worker::by(SubmitCall::Start, &*volume);
        // A fault hits the first, which then cost nothing or its token.
        let bad = IoError::new(IoErrorKind::MediaWrite);
        faults.add(Fault::nth(OpKind::Write, 1, Effect::Fail(bad)));
        assert_eq!(worker.write(0, &[1; 4096]), Err(bad), "{what}");
        // A request a second: most of these wait.
        let started = Instant::now();
        for block in 0..4 {
            let data = worker.guest.piece(block * 4096, 4096);
            assert_eq!(data.copy_from(0, &[block as u8 + 1; 4096]), 4096);
            let (_, over) = worker.start(WRITE, block * 4096, 4096, data);
            assert!(over.is_none(), "{what}");
            assert!(
                !in_turn || worker.io.in_flight() <= 1,
                "{what}: not its turn"
            );
        }
        // Requests that wait for their turn reach the limit one by one.
        let mut came: Vec<Completion> = Vec::new();
        let delayed = limit.take().unwrap();
        while delayed.delayed() == 0 {
            assert!(started.elapsed() < BOUND, "{what}: no limit");
            worker.io.flush();
            worker.io.poll(&mut |over| came.push(over));
            worker.queue.poll(&mut |over| came.push(over));
        }
        worker.io.end();
        while came.len() < 4 {
            came.extend(worker.wait(1));
            assert!(
                !in_turn || worker.io.in_flight() <= 1,
                "{what}: not its turn"
            );
        }
        assert!(came.iter().all(|over| over.result.is_ok()), "{what}");
        // Slices refuse ranges outside of them, and move the rest to their place.
        assert_eq!(
            worker.read(65536, 4096),
            Err(IoErrorKind::OutOfRange.into()),
            "{what}"
        );
        drop((worker, volume));
        let held = std::fs::read(&path).unwrap();
        for block in 0..4 {
            let at = 65536 + block * 4096;
            let expected = vec![block as u8 + 1; 4096];
            assert!(held[at..at + 4096] == expected, "{what}");
        }
        assert!(held[..65536].iter().all(|&byte| byte == 0), "{what}");
        std::fs::write(&path, vec![0; SIZE as usize]).unwrap();
    }
}

#[test]
fn batch_is_pushed_through_every_wrapper() {
    let directory = disk();
    let path = sparse(&directory, SIZE);
    for (name, volume) in volumes(&path) {
        let io = Io::new(IoOptions::default());
        let mut queue = volume.open(&io).unwrap();
        let guest = Guest::new(65536);
        let through_the_ring = io.event_fd().is_some();
        for tag in 0..2 {
            let over = queue.start(tag, Op::Read, tag * 4096, guest.piece(tag * 4096, 4096));
            assert_eq!(
                over.is_some(),
                volume.info().description == "memory",
                "{name}"
            );
        }
        assert_eq!(io.counters().system_calls, 0, "{name}");
        queue.push();
        let calls = u64::from(through_the_ring);
        assert_eq!(io.counters().system_calls, calls, "{name}");
        queue.push();
        assert!(io.flush());
        assert_eq!(io.counters().system_calls, calls, "{name}: sent already");
    }
}
