//! Tests that the volume of every protocol passes: a server that violates the protocol, hangs,
//! answers in small pieces, and disappears, and requests that are cancelled meanwhile. A protocol's
//! tests include this module, implement [`TestServer`], and instantiate [`suite`].

mod model;

use crate::common::{BOUND, Worker, bytes, disk, sparse};
use dma::{Access, DmaMap, Memory, Prot, SegmentList};
pub use model::{check, check_unreliable, check_wrapped, steps};
use remote::{ConnectionState, ReachWatch};
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use volume::{FileOptions, FileVolume, Io, IoError, IoErrorKind, IoOptions, MemVolume, Op, Volume};

pub const WRITE: Op = Op::Write { fua: false };
pub const BLOCK: u64 = 4096;

/// Time limits and connections of a volume.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub timeout: Duration,
    pub reconnect_delay: Duration,
    /// Number of connections of a worker, on each path.
    pub connections: usize,
}

impl Default for Limits {
    /// Returns limits that no busy machine reaches.
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            reconnect_delay: Duration::from_secs(300),
            connections: 1,
        }
    }
}

/// Answer to a request by its number, and by whether it is a read.
pub type Answers<A> = dyn Fn(usize, bool) -> A + Send + Sync;

/// Properties of a server.
pub struct Setup<A> {
    pub size: usize,
    /// Maximum number of data bytes of a command.
    pub max_data: u32,
    /// Number of bytes that the server writes at once.
    pub piece: usize,
    /// Variant of the protocol or of the server's paths, 0 or 1.
    pub variant: usize,
    pub answer: Box<Answers<A>>,
}

/// Server of a protocol in this process.
pub trait TestServer: Sized {
    type Volume: Volume;
    type Answer: Copy + std::fmt::Debug + PartialEq + Send + Sync + 'static;
    /// Correct answer.
    const RIGHT: Self::Answer;
    /// No answer; further requests are read.
    const NEVER: Self::Answer;
    /// Correct answer after [`TestServer::release`].
    const HELD: Self::Answer;
    /// Bytes that are no answer.
    const GARBAGE: Self::Answer;

    /// Returns the answers that end a connection, to a read or to a write.
    fn faults(variant: usize, read: bool) -> Vec<Self::Answer>;
    fn start(setup: Setup<Self::Answer>) -> Self;
    fn open(&self, limits: Limits) -> Self::Volume;
    fn watch(volume: &Self::Volume) -> ReachWatch;
    /// Stops the server, as if it were killed.
    fn stop(&mut self);
    /// Starts the stopped server again, at the same address.
    fn restart(&mut self);
    fn release(&self);
    fn resize(&self, size: usize);
    /// Replaces the volume by another one under the same name.
    fn replace(&self);
    /// Returns the number of requests that have arrived.
    fn requests(&self) -> usize;
    /// Returns the number of connections that were accepted.
    fn connections(&self) -> usize;
}

pub fn setup<T: TestServer>(
    answer: impl Fn(usize, bool) -> T::Answer + Send + Sync + 'static,
) -> Setup<T::Answer> {
    Setup {
        size: 2 << 20,
        max_data: 1 << 20,
        piece: usize::MAX,
        variant: 0,
        answer: Box::new(answer),
    }
}

fn serving<T: TestServer>(answer: impl Fn(usize, bool) -> T::Answer + Send + Sync + 'static) -> T {
    T::start(setup::<T>(answer))
}

/// Stream of a server that writes at most `piece` bytes at once.
pub struct Pieces<S> {
    pub stream: S,
    pub piece: usize,
}

impl<S: Read> Read for Pieces<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buffer)
    }
}

impl<S: Write> Write for Pieces<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = bytes.len().min(self.piece);
        if len < bytes.len() {
            std::thread::yield_now();
        }
        self.stream.write(&bytes[..len])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

pub fn pattern(seed: u8, len: u64) -> Vec<u8> {
    (0..len)
        .map(|index| (index as u8).wrapping_mul(31) ^ (index >> 8) as u8 ^ seed | 1)
        .collect()
}

/// Runs the worker until `holds` returns `true`.
pub fn until(worker: &mut Worker, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < BOUND);
        worker.io.flush();
        worker.io.poll(&mut |_| ());
        worker.queue.poll(&mut |_| panic!("a completion too early"));
        std::thread::yield_now();
    }
}

/// Runs the worker for a time in which no request may complete.
fn nothing_completes(worker: &mut Worker, time: Duration) {
    let later = Instant::now() + time;
    until(worker, || Instant::now() >= later);
}

/// Returns the connection state once all connections are established.
pub fn reached(watch: &ReachWatch) -> ConnectionState {
    let began = Instant::now();
    loop {
        let reach = watch.look().unwrap();
        if reach.connected {
            return reach;
        }
        assert!(began.elapsed() < BOUND, "{reach:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn is_aborted(result: Result<(), IoError>) -> bool {
    result.is_err_and(|error| error.kind == IoErrorKind::Aborted)
}

pub fn faulty_answer_costs_connection_and_no_request<T: TestServer>() {
    for (variant, read) in [(0, true), (0, false), (1, true), (1, false)] {
        for fault in T::faults(variant, read) {
            let count = AtomicUsize::new(0);
            let answer = move |_, is_read: bool| {
                if is_read == read && count.fetch_add(1, Ordering::SeqCst) == 3 {
                    fault
                } else {
                    T::RIGHT
                }
            };
            let server = T::start(Setup {
                variant,
                ..setup::<T>(answer)
            });
            let mut limits = Limits::default();
            if fault == T::NEVER {
                limits.timeout = Duration::from_secs(1);
            }
            let volume = server.open(limits);
            let mut worker = Worker::new(&volume);
            let data = pattern(9, 40 * BLOCK);
            let part = |at: u64| &data[(at * BLOCK) as usize..][..BLOCK as usize];
            for at in 0..40 {
                let list = worker.guest.holding(at * BLOCK, part(at));
                assert!(worker.start(WRITE, at * BLOCK, BLOCK, list).1.is_none());
            }
            let done = worker.wait(40);
            assert!(
                done.iter().all(|done| done.result.is_ok()),
                "{fault:?} {read}"
            );
            drop(done);
            for at in 0..40 {
                let list = worker.guest.piece(at * BLOCK, BLOCK);
                list.fill(0xee);
                assert!(worker.start(Op::Read, at * BLOCK, BLOCK, list).1.is_none());
            }
            let mut done = worker.wait(40);
            done.sort_by_key(|done| done.tag);
            for (at, done) in (0..).zip(&done) {
                assert_eq!(done.result, Ok(()), "{fault:?} {read}");
                assert_eq!(bytes(&done.data), part(at), "{fault:?} {read} {at}");
            }
            // With a second path, a path's thread may count the loss later.
            let watch = T::watch(&volume);
            until(&mut worker, || watch.look().unwrap().lost >= 1);
        }
    }
}

/// A long read receives its data without a copy.
pub fn long_read_survives_lost_connection<T: TestServer>() {
    for answer in T::faults(0, true) {
        if answer == T::NEVER {
            continue;
        }
        let server: T = serving(move |number, _| match number {
            1 | 2 => answer,
            _ => T::RIGHT,
        });
        let volume = server.open(Limits::default());
        let mut worker = Worker::new(&volume);
        let data = pattern(5, 1 << 20);
        worker.write(0, &data).unwrap();
        assert_eq!(worker.read(0, 1 << 20).unwrap(), data, "{answer:?}");
    }
}

pub fn answers_in_small_pieces_are_assembled<T: TestServer>() {
    for (variant, piece) in [(0, 1), (1, 7)] {
        let server = T::start(Setup {
            piece,
            variant,
            ..setup::<T>(|_, _| T::RIGHT)
        });
        let volume = server.open(Limits::default());
        let mut worker = Worker::new(&volume);
        let data = pattern(3, 20 << 10);
        worker.write(0, &data).unwrap();
        assert_eq!(worker.read(0, 20 << 10).unwrap(), data);
        for at in 0..8 {
            let list = worker.guest.piece(at * 512, 512);
            assert!(worker.start(Op::Read, at * 512, 512, list).1.is_none());
        }
        let mut done = worker.wait(8);
        done.sort_by_key(|done| done.tag);
        for (done, part) in done.iter().zip(data.chunks(512)) {
            assert_eq!((done.result, &bytes(&done.data)[..]), (Ok(()), part));
        }
        assert_eq!(T::watch(&volume).look().unwrap().lost, 0);
    }
}

pub fn permanently_violating_server_fails_request<T: TestServer>() {
    let server: T = serving(|_, _| T::GARBAGE);
    let volume = server.open(Limits::default());
    let mut worker = Worker::new(&volume);
    let error = worker.read(0, 4096).unwrap_err();
    assert_eq!(error.kind, IoErrorKind::MediaRead);
    assert_eq!(server.requests(), 5);
}

/// Guest memory that was truncated fails the requests that use it, and not the disk.
pub fn truncated_guest_memory_fails_own_request<T: TestServer>() {
    let server: T = serving(|_, _| T::RIGHT);
    let volume = server.open(Limits::default());
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
    // The kernel sends the memory. (A copy by the processor reads zeroes, as with any volume.)
    for len in [8192, 64 << 10] {
        let mut list = SegmentList::new();
        assert!(list.begin_piece(&map, 0, len, Access::Write));
        let result = worker.run(WRITE, 0, len, list).result;
        assert_eq!(result.unwrap_err().kind, IoErrorKind::Memory, "{len}");
    }
    assert_eq!(worker.read(0, 4096).unwrap(), pattern(1, 64 << 10)[..4096]);
}

/// A disk of the same worker does its work, whatever the server does.
pub fn misbehaving_server_does_not_affect_other_disks<T: TestServer>() {
    for answer in T::faults(0, true) {
        let server: T = serving(move |_, _| answer);
        let volume = server.open(Limits::default());
        let mut worker = Worker::new(&volume);
        let other = MemVolume::new(1 << 20).unwrap();
        let directory = disk();
        let path = sparse(&directory, 1 << 20);
        let file = FileVolume::open(&path, FileOptions::default()).unwrap();
        let mut others = [&other as &dyn Volume, &file].map(|v| v.open(&worker.io).unwrap());
        for at in 0..20 {
            let list = worker.guest.piece(at * BLOCK, BLOCK);
            worker.start(Op::Read, at * BLOCK, BLOCK, list);
        }
        worker.queue.push();
        let (mut done, mut asked) = (0, 0);
        let began = Instant::now();
        while done < 1000 {
            assert!(began.elapsed() < BOUND, "{answer:?}: {done} of 1000");
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

/// Requests wait for a server that was stopped, and continue when it returns, here with a larger
/// volume.
pub fn requests_continue_when_server_returns<T: TestServer>() {
    let mut server: T = serving(|_, _| T::RIGHT);
    let volume = server.open(Limits::default());
    let mut worker = Worker::new(&volume);
    worker.write(0, &[1; 4096]).unwrap();
    server.stop();
    let list = worker.guest.holding(0, &[2; 4096]);
    assert!(worker.start(WRITE, 4096, 4096, list).1.is_none());
    nothing_completes(&mut worker, Duration::from_millis(300));
    assert_eq!(worker.queue.state().in_flight, 1);
    server.resize(4 << 20);
    server.restart();
    assert_eq!(worker.wait(1)[0].result, Ok(()));
    let both = [[1; 4096], [2; 4096]].concat();
    assert_eq!(worker.read(0, 8192).unwrap(), both);
    assert!(volume.refresh().unwrap() && !volume.refresh().unwrap());
    assert_eq!(volume.info().size, 4 << 20);
    assert_eq!(worker.read((4 << 20) - 4096, 4096).unwrap(), [0; 4096]);
}

pub fn other_volume_under_same_name_is_refused<T: TestServer>() {
    let mut server: T = serving(|_, _| T::RIGHT);
    let volume = server.open(Limits::default());
    let mut worker = Worker::new(&volume);
    worker.write(0, &[1; 4096]).unwrap();
    server.stop();
    server.replace();
    server.restart();
    let list = worker.guest.piece(0, 4096);
    let (tag, _) = worker.start(Op::Read, 8192, 4096, list);
    let before = server.connections();
    until(&mut worker, || server.connections() >= before + 2);
    // A guest's reset ends the request all the same.
    worker.queue.cancel(tag);
    assert!(is_aborted(worker.wait(1)[0].result));
}

/// Requests wait for a server that stays away, then fail, and succeed again when it is back.
pub fn requests_fail_when_server_stays_away<T: TestServer>() {
    let mut server: T = serving(|_, _| T::RIGHT);
    let volume = server.open(Limits {
        reconnect_delay: Duration::from_secs(5),
        ..Limits::default()
    });
    let watch = T::watch(&volume);
    let mut worker = Worker::new(&volume);
    worker.write(0, &[1; 4096]).unwrap();
    let reach = reached(&watch);
    assert_eq!(reach.lost, 0, "{reach:?}");
    server.stop();
    let began = Instant::now();
    let error = worker.write(0, &[2; 4096]).unwrap_err();
    assert_eq!(error.kind, IoErrorKind::Unreachable);
    assert!(began.elapsed() >= Duration::from_millis(4900), "it waited");
    assert!(!watch.look().unwrap().connected);
    // From now on nothing waits, until the server is back.
    for _ in 0..100 {
        let error = worker.read(0, 4096).unwrap_err();
        assert_eq!(error.kind, IoErrorKind::Unreachable);
    }
    let flush = worker.without_data(Op::Flush, 0, 0);
    assert_eq!(flush.unwrap_err().kind, IoErrorKind::Unreachable);
    server.restart();
    let began = Instant::now();
    while worker.read(0, 4096).is_err() {
        assert!(began.elapsed() < BOUND);
    }
    let reach = reached(&watch);
    assert!(reach.lost >= 1, "{reach:?}");
    // The delay is counted from the next loss on.
    server.stop();
    server.restart();
    worker.write(0, &[3; 4096]).unwrap();
    drop(worker);
    drop(volume);
    assert_eq!(watch.look(), None);
}

/// The write of a cancelled request is not executed after a later one, though another connection is
/// free for that.
pub fn cancelled_write_precedes_later_writes<T: TestServer>() {
    for len in [4096, 64 << 10] {
        let server = T::start(Setup {
            variant: 1,
            ..setup::<T>(|number, _| match number {
                0 => T::HELD,
                _ => T::RIGHT,
            })
        });
        let volume = server.open(Limits {
            connections: 2,
            ..Limits::default()
        });
        let mut worker = Worker::new(&volume);
        let watch = T::watch(&volume);
        until(&mut worker, || {
            watch.look().is_some_and(|reach| reach.connected)
        });
        let old = worker.guest.holding(0, &vec![1; len]);
        let (tag, _) = worker.start(WRITE, 0, len as u64, old);
        worker.queue.push();
        until(&mut worker, || server.requests() == 1);
        // Usually the kernel has sent the memory by then: otherwise the connection ends.
        nothing_completes(&mut worker, Duration::from_millis(100));
        worker.queue.cancel(tag);
        assert!(is_aborted(worker.wait(1)[0].result));
        // The memory is reused, though the server may not have requested all of it.
        let new = worker.guest.holding(0, &[2; 4096]);
        worker.start(WRITE, 0, 4096, new);
        nothing_completes(&mut worker, Duration::from_millis(200));
        assert_eq!(server.requests(), 1);
        server.release();
        assert_eq!(worker.wait(1)[0].result, Ok(()));
        assert_eq!(worker.read(0, 4096).unwrap(), [2; 4096]);
        if len > 4096 {
            assert_eq!(worker.read(4096, 4096).unwrap(), [1; 4096], "has changed");
        }
    }
}

/// Requests end when they are cancelled, whether they are sent, being sent, or waiting.
pub fn requests_end_when_cancelled_in_any_state<T: TestServer>() {
    let server: T = serving(|number, _| match number {
        0..=100 => T::NEVER,
        _ => T::RIGHT,
    });
    let volume = server.open(Limits::default());
    let mut worker = Worker::new(&volume);
    let mut tags = Vec::new();
    // The first writes exceed the server's socket.
    for round in 0..40 {
        let len = if round < 20 { 1 << 20 } else { 4096 };
        for op in [WRITE, Op::Read] {
            let data = worker.guest.piece(0, len);
            tags.push(worker.start(op, 0, len, data).0);
        }
    }
    worker.queue.push();
    for tag in &tags {
        worker.queue.cancel(*tag);
    }
    let done = worker.wait(tags.len());
    assert!(done.iter().all(|completion| is_aborted(completion.result)));
    assert!(done.iter().all(|completion| !completion.data.is_empty()));
    assert_eq!(worker.queue.state().in_flight, 0);
}

pub fn ending_worker_stops_waiting<T: TestServer>() {
    let server: T = serving(|_, _| T::NEVER);
    let volume = server.open(Limits {
        connections: 1,
        ..Limits::default()
    });
    let io = Io::new(IoOptions {
        stop_timeout: Duration::from_millis(100),
        ..IoOptions::default()
    });
    let mut worker = Worker::new(&MemVolume::new(4096).unwrap());
    worker.io = io;
    worker.queue = volume.open(&worker.io).unwrap();
    let list = worker.guest.holding(0, &[2; 4096]);
    worker.start(WRITE, 4096, 4096, list);
    worker.io.end();
    assert!(is_aborted(worker.wait(1)[0].result));
    assert_eq!(worker.io.given_up().len(), 1);
}

/// Instantiates the tests for a protocol's [`TestServer`].
macro_rules! suite {
    ($server:ty: $($test:ident)*) => {
        $(#[test] fn $test() { crate::suite::$test::<$server>() })*
    };
    ($server:ty) => {
        crate::suite::suite! { $server:
            faulty_answer_costs_connection_and_no_request
            long_read_survives_lost_connection
            answers_in_small_pieces_are_assembled
            permanently_violating_server_fails_request
            truncated_guest_memory_fails_own_request
            misbehaving_server_does_not_affect_other_disks
            requests_continue_when_server_returns
            other_volume_under_same_name_is_refused
            requests_fail_when_server_stays_away
            cancelled_write_precedes_later_writes
            requests_end_when_cancelled_in_any_state
            ending_worker_stops_waiting
        }

        proptest::proptest! {
            #![proptest_config(proptest::prelude::ProptestConfig {
                cases: 24,
                ..proptest::prelude::ProptestConfig::default()
            })]

            #[test]
            fn wrapped_volume_matches_byte_vector(
                steps in crate::suite::steps(), wrapper in 0..4, variant in 0..2usize
            ) {
                crate::suite::check_wrapped::<$server>(&steps, wrapper, variant);
            }
        }

        proptest::proptest! {
            // Each connection takes its time.
            #![proptest_config(proptest::prelude::ProptestConfig {
                cases: 6,
                ..proptest::prelude::ProptestConfig::default()
            })]

            #[test]
            fn volume_on_unreliable_server_matches_byte_vector(
                steps in crate::suite::steps(), every in 9..40usize
            ) {
                crate::suite::check_unreliable::<$server>(&steps, every);
            }
        }
    };
}
pub(crate) use suite;
