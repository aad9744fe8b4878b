//! Rings of every mode that this kernel offers, also the ones that it would not choose.

use super::ring::Ring;
use super::setup::{self, Mode};
use super::*;
use crate::{FastPath, FileOptions, FileVolume, Op, OpenQueue, Request, Volume};
use dma::{Buffer, Memory, SegmentList};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::time::{Duration, Instant};

mod blocking;
mod durable;
mod start;

/// Only a hang takes this long.
const BOUND: Duration = Duration::from_secs(60);
/// The modes of a ring.
const MODES: [Mode; 4] = [Mode::Deferred, Mode::Cooperative, Mode::Plain, Mode::Polled];

/// A way to hand a read or write of all of its data to a queue.
type Begin = fn(&mut dyn FastPath, Request) -> Option<Completion>;

/// All ways.
const WAYS: [Begin; 2] = [
    |queue, request| queue.submit(request),
    |queue, request| queue.start(request.tag, request.op, request.offset, request.data),
];

fn io(mode: Mode) -> Option<Io> {
    let options = IoOptions {
        capacity: 16,
        ..IoOptions::default()
    };
    let uring = match setup::build(mode, options.capacity) {
        Ok(uring) => uring,
        Err(error) => {
            testkit::skip(&format!("volume::io::tests: {mode:?}"), error);
            return None;
        }
    };
    let io = Io::new(options);
    let ring = Ring::with(uring, mode, &options, io.stats()).unwrap();
    Some(Io {
        ring: OnceCell::from(Rc::new(ring)),
        ..io
    })
}

fn file(directory: &tempfile::TempDir) -> FileVolume {
    let path = directory.path().join("disk.raw");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    FileVolume::open(path, FileOptions::default()).unwrap()
}

fn sleep(io: &Io, seconds: i64) -> usize {
    let mut fds = [PollFd::from_borrowed_fd(
        io.event_fd().unwrap(),
        PollFlags::IN,
    )];
    poll(
        &mut fds,
        Some(&Timespec {
            tv_sec: seconds,
            tv_nsec: 0,
        }),
    )
    .unwrap()
}

#[test]
fn every_mode_completes_sleeps_and_wakes() {
    for (mode, begin) in MODES
        .into_iter()
        .flat_map(|mode| WAYS.map(|begin| (mode, begin)))
    {
        let Some(io) = io(mode) else { continue };
        let directory = tempfile::tempdir().unwrap();
        let volume = file(&directory);
        let mut queue = volume.open(&io).unwrap();
        for tag in 0..100 {
            let write = tag % 2 == 0;
            let op = if write {
                Op::Write { fua: true }
            } else {
                Op::Read
            };
            let mut data = SegmentList::owned(Buffer::new(4096));
            if let (true, Some(buffer)) = (write, data.buffer()) {
                buffer.fill(tag as u8);
            }
            let request = Request::transfer(tag, op, 8192, data);
            assert!(begin(&mut *queue, request).is_none());
            let (began, mut came) = (Instant::now(), Vec::new());
            while came.is_empty() {
                assert!(began.elapsed() < BOUND, "{mode:?}: nothing comes");
                if io.arm() {
                    assert_eq!(io.stats().counters(), io.counters(), "asleep");
                    assert_eq!(sleep(&io, 60), 1, "{mode:?}: nothing woke the worker up");
                } else {
                    // A worker that may not sleep has something to do, or the kernel's thread has
                    // something to take.
                    assert!(io.has_news() || mode == Mode::Polled, "{mode:?}");
                }
                io.poll(&mut |completion| came.push(completion));
            }
            let mut completion = came.pop().unwrap();
            assert_eq!((completion.tag, completion.result), (tag, Ok(())));
            let expected = if write { tag } else { tag - 1 } as u8;
            assert!(
                completion
                    .data
                    .buffer()
                    .unwrap()
                    .iter()
                    .all(|&byte| byte == expected),
                "{mode:?}"
            );
        }
        // With nothing in flight the descriptor keeps still.
        assert!(!io.has_news(), "{mode:?}");
        io.poll(&mut |_| unreachable!());
        assert!(io.arm());
        assert_eq!(sleep(&io, 0), 0, "{mode:?}");
    }
}

/// A file without atomic writes in the kernel refuses `RWF_ATOMIC`. The refusal shows that the flag
/// was set for every promised write, on every path, from pinned memory and from several pieces,
/// too.
#[test]
fn promised_writes_are_atomic_or_refused() {
    let directory = tempfile::tempdir().unwrap();
    let volume = file(&directory);
    if !volume.atomic_writes().is_none() {
        return testkit::skip("volume: refused atomic writes", "this disk has them");
    }
    let promise = crate::AtomicWrites::naturally_aligned(4096, 16384);
    let volume = volume.promising(promise);
    let io = Io::new(IoOptions {
        fixed_buffers: true,
        ..IoOptions::default()
    });
    let mut queue = volume.open(&io).unwrap();
    let memory = Memory::anonymous(1 << 20).unwrap();
    let pinned = io.pinner().and_then(|pinner| pinner.pin(&memory, 0, MIB));
    let mut map = dma::DmaMap::new();
    let prot = dma::Prot {
        read: true,
        write: true,
    };
    map.map(0, MIB, Some((memory, 0)), prot).unwrap();
    // Pieces of the given sizes, not side by side.
    let pieces = |sizes: &[u64]| {
        let mut all = SegmentList::new();
        all.begin(&map);
        for (place, size) in (0..).zip(sizes) {
            let (at, access) = (place * (128 << 10), dma::Access::Write);
            map.segments(at, *size, access, &mut all).unwrap();
        }
        all
    };
    let mut refused = |begin: Begin, op, offset, data: SegmentList| {
        let request = Request::transfer(7, op, offset, data);
        let at_once = begin(&mut *queue, request);
        queue.push();
        let done = at_once.unwrap_or_else(|| poll_for(&io, 1).remove(0));
        done.result.is_err()
    };
    for begin in WAYS {
        for fua in [false, true] {
            let op = Op::Write { fua };
            for len in [4096, 8192, 16384] {
                assert!(refused(begin, op, 16384, pieces(&[len])));
                assert!(refused(begin, op, 16384, pieces(&[len / 2, len / 2])));
            }
            for (offset, len) in [(4096, 8192), (0, 12288), (0, 32768)] {
                assert!(!refused(begin, op, offset, pieces(&[len])));
            }
        }
        assert!(!refused(begin, Op::Read, 0, pieces(&[8192])));
    }
    drop(pinned);
}

#[test]
fn polling_costs_no_eventfd_signal() {
    let Some(io) = io(Mode::Deferred) else { return };
    let directory = tempfile::tempdir().unwrap();
    let volume = file(&directory);
    let mut queue = volume.open(&io).unwrap();
    for tag in 0..16 {
        let data = SegmentList::owned(Buffer::new(4096));
        assert!(
            queue
                .submit(Request::transfer(tag, Op::Read, 0, data))
                .is_none()
        );
    }
    assert_eq!(finish(&io, 16), [Ok(()); 16]);
    assert_eq!(sleep(&io, 0), 0);
}

#[test]
fn files_beyond_kernel_table_work_by_descriptor() {
    let io = Io::new(IoOptions {
        capacity: 16,
        ..IoOptions::default()
    });
    let directory = tempfile::tempdir().unwrap();
    let volume = file(&directory);
    let mut queues: Vec<_> = (0..100).map(|_| volume.open(&io).unwrap()).collect();
    for (tag, queue) in queues.iter_mut().enumerate() {
        let data = SegmentList::owned(Buffer::new(4096));
        let request = Request::transfer(tag as u64, Op::Read, 0, data);
        assert!(queue.submit(request).is_none());
        assert_eq!(finish(&io, 1), [Ok(())]);
    }
}

/// Returns a ring that pins memory, and a file on it.
fn pinning(directory: &tempfile::TempDir) -> (Io, OpenQueue) {
    let io = Io::new(IoOptions {
        capacity: 16,
        fixed_buffers: true,
        ..IoOptions::default()
    });
    let queue = file(directory).open(&io).unwrap();
    io.ring().unwrap().trust();
    (io, queue)
}

/// Polls until `count` requests have completed, without sending any.
fn poll_for(io: &Io, count: usize) -> Vec<Completion> {
    let (began, mut over) = (Instant::now(), Vec::new());
    while over.len() < count {
        io.poll(&mut |completion| over.push(completion));
        assert!(
            began.elapsed() < BOUND,
            "{} of {count} have completed",
            over.len()
        );
    }
    over
}

/// Sends the unsent entries, and waits until `requests` requests have completed.
fn finish(io: &Io, requests: usize) -> Vec<Result<(), crate::IoError>> {
    let (began, mut results) = (Instant::now(), Vec::new());
    while results.len() < requests {
        io.flush();
        io.poll(&mut |completion| results.push(completion.result));
        assert!(began.elapsed() < BOUND, "{} of {requests}", results.len());
    }
    results
}

/// Creates a request of one page, from or to page `page` of the memory and of the file.
fn page(tag: u64, op: Op, memory: &Memory, page: usize) -> Request {
    Request::transfer(
        tag,
        op,
        4096 * page as u64,
        memory.segments(4096 * page, 4096).unwrap(),
    )
}

const WRITE: Op = Op::Write { fua: false };
const MIB: u64 = 1 << 20;

#[test]
fn pinned_memory_is_used_until_unpinned() {
    let directory = tempfile::tempdir().unwrap();
    let (io, mut queue) = pinning(&directory);
    let pinner = io.pinner().unwrap();
    let memory = Memory::anonymous(4 << 20).unwrap();
    for (round, begin) in (0..50u8).zip(WAYS.into_iter().cycle()) {
        let pinned = pinner.pin(&memory, MIB, MIB).expect("memfds can be pinned");
        assert_eq!(io.pinned(), 1);
        let fixed = io.counters().fixed;
        // Pages 256 to 511 are pinned; the rest are not.
        for index in 0..8 {
            let at = 256 - 4 + index;
            memory
                .write(4096 * at, &[round ^ index as u8; 4096])
                .unwrap();
            let mut request = page(index as u64, WRITE, &memory, at);
            request.offset = 4096 * index as u64;
            assert!(begin(&mut *queue, request).is_none());
        }
        if round % 4 < 2 {
            // Sent or not: the next request must not meet an empty place.
            io.flush();
        }
        drop(pinned);
        assert_eq!(io.pinned(), 0);
        assert_eq!(io.counters().fixed - fixed, 4);
        assert_eq!(finish(&io, 8), vec![Ok(()); 8]);
        // With nothing pinned, the same bytes are read.
        for index in 0..8 {
            let mut request = page(index as u64, Op::Read, &memory, index);
            request.offset = 4096 * index as u64;
            assert!(begin(&mut *queue, request).is_none());
        }
        assert_eq!(finish(&io, 8), vec![Ok(()); 8]);
        assert_eq!(io.counters().fixed - fixed, 4);
        let mut bytes = [0; 4096];
        for index in 0..8 {
            memory.read(4096 * index, &mut bytes).unwrap();
            assert_eq!(bytes, [round ^ index as u8; 4096]);
        }
    }
}

#[test]
fn reused_addresses_are_not_taken_for_old_memory() {
    let directory = tempfile::tempdir().unwrap();
    let (io, mut queue) = pinning(&directory);
    let pinner = io.pinner().unwrap();
    for round in 1..20u8 {
        // If nothing kept it mapped, the kernel would give the next memory the same addresses.
        let memory = Memory::anonymous(MIB as usize).unwrap();
        let pinned = pinner.pin(&memory, 0, MIB).unwrap();
        memory.write(0, &[round; 4096]).unwrap();
        assert!(queue.submit(page(1, WRITE, &memory, 0)).is_none());
        assert_eq!(finish(&io, 1), [Ok(())]);
        drop(memory);
        let other = Memory::anonymous(MIB as usize).unwrap();
        assert!(queue.submit(page(2, Op::Read, &other, 0)).is_none());
        assert_eq!(finish(&io, 1), [Ok(())]);
        let mut bytes = [0; 4096];
        other.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [round; 4096]);
        drop(pinned);
    }
}

#[test]
fn shrunk_pinned_memory_does_no_harm() {
    let directory = tempfile::tempdir().unwrap();
    let (io, mut queue) = pinning(&directory);
    let memory = Memory::anonymous(2 << 20).unwrap();
    memory.write(0, &[7; 8192]).unwrap();
    let pinned = io.pinner().unwrap().pin(&memory, 0, 2 * MIB).unwrap();
    rustix::fs::ftruncate(memory.fd(), 4096).unwrap();
    // The kernel has the old pages still: these belong to no other memory.
    assert!(queue.submit(page(1, WRITE, &memory, 1)).is_none());
    assert!(queue.submit(page(2, Op::Read, &memory, 100)).is_none());
    assert_eq!(finish(&io, 2), [Ok(()), Ok(())]);
    drop(pinned);
    // Without them there is nothing: an error, not an end of the process.
    assert!(queue.submit(page(3, WRITE, &memory, 2)).is_none());
    let failed = finish(&io, 1).remove(0).unwrap_err();
    assert_eq!(failed.kind, crate::IoErrorKind::Memory);
    // Memory that cannot be pinned is not; other memory can be.
    assert!(io.pinner().unwrap().pin(&memory, 0, 2 * MIB).is_none());
    let other = Memory::anonymous(2 << 20).unwrap();
    assert!(io.pinner().unwrap().pin(&other, 0, 2 * MIB).is_some());
}

#[test]
fn mapped_window_is_pinned_in_steps() {
    let directory = tempfile::tempdir().unwrap();
    let (io, mut queue) = pinning(&directory);
    let mut windows = PinnedWindows::new(io.pinner());
    let memory = Memory::anonymous(32 << 20).unwrap();
    let used = |queue: &mut dyn FastPath, index: usize| {
        let before = io.counters().fixed;
        let mut request = page(1, WRITE, &memory, index);
        request.offset = 0;
        assert!(queue.submit(request).is_none());
        assert_eq!(finish(&io, 1), [Ok(())]);
        io.counters().fixed > before
    };
    let pages = memory.len() / 4096;
    // The unmap happens before anything is pinned, when a part of it is, and when all is.
    for pieces in [0, 3, memory.len() / super::fixed::MAX_BUFFER_LEN] {
        let mut pace = PinPace::default();
        windows.mapped(0x1000_0000, memory.len() as u64, &memory, 0);
        assert_eq!((io.pinned(), windows.is_pinning()), (0, true));
        assert!(!used(&mut *queue, 0));
        let mut steps = 0;
        while io.pinned() < pieces {
            pace.step(&mut windows);
            steps += 1;
        }
        assert!(
            steps >= 2 * pieces,
            "pages are allocated by steps of their own"
        );
        assert_eq!(used(&mut *queue, 0), pieces > 0);
        let all = pieces == memory.len() / super::fixed::MAX_BUFFER_LEN;
        assert_eq!(used(&mut *queue, pages - 1), all);
        assert_eq!(windows.is_pinning(), !all);
        windows.unmapped(0x1000_0000, memory.len() as u64);
        assert_eq!((io.pinned(), windows.is_pinning()), (0, false));
        // No window is left to be pinned.
        pace.step(&mut windows);
        assert_eq!(io.pinned(), 0);
        assert!(!used(&mut *queue, 0));
    }
}

#[test]
fn unpinnable_memory_works_unpinned() {
    let directory = tempfile::tempdir().unwrap();
    let (io, mut queue) = pinning(&directory);
    let pinner = io.pinner().unwrap();
    let memory = Memory::anonymous(2 << 20).unwrap();
    assert!(
        pinner.pin(&memory, 0, 4096).is_none(),
        "too small to be worth a place"
    );
    assert!(
        pinner.pin(&memory, MIB, 2 * MIB).is_none(),
        "behind the end"
    );
    assert!(pinner.pin(&memory, u64::MAX, MIB).is_none());
    // More windows than places: some go without, all work, and places come back.
    for _ in 0..2 {
        let many: Vec<_> = (0..300)
            .filter_map(|_| pinner.pin(&memory, 0, MIB))
            .collect();
        assert_eq!(many.len(), usize::from(super::fixed::PLACES));
        drop(many);
        assert_eq!(io.pinned(), 0);
    }
    // A part of a window that does not fit leaves nothing behind.
    assert!(queue.submit(page(1, Op::Read, &memory, 0)).is_none());
    assert_eq!(finish(&io, 1), [Ok(())]);
    assert_eq!(io.counters().fixed, 0);
    let plain = Io::new(IoOptions::default());
    let elsewhere = tempfile::tempdir().unwrap();
    let _queue = file(&elsewhere).open(&plain).unwrap();
    assert!(plain.pinner().is_none(), "not asked for");
}

#[test]
fn batch_needs_one_system_call_or_two_when_idle() {
    let Some(io) = io(Mode::Deferred) else { return };
    let directory = tempfile::tempdir().unwrap();
    let volume = file(&directory);
    let mut queue = volume.open(&io).unwrap();
    let memory = Memory::anonymous(1 << 20).unwrap();
    for round in 0..20 {
        let before = io.counters();
        let calls = |io: &Io| {
            let now = io.counters();
            let batches = now.batches - before.batches;
            assert_eq!(now.system_calls - before.system_calls, batches);
            batches
        };
        for tag in 0..16 {
            let early = u64::from(round > 0 && tag >= 4);
            assert_eq!(calls(&io), early, "after {tag} requests of round {round}");
            assert!(
                queue
                    .submit(page(tag, Op::Read, &memory, tag as usize))
                    .is_none()
            );
        }
        let early = calls(&io);
        assert!(io.flush());
        assert!(io.flush(), "there is nothing left to send");
        assert_eq!(calls(&io), early + 1);
        // Completions that are there are returned without a call.
        let began = Instant::now();
        while !io.ring().unwrap().has_arrivals() {
            io.ring().unwrap().enter();
            assert!(began.elapsed() < BOUND);
        }
        let calls = io.counters().system_calls;
        assert!(io.poll(&mut |completion| assert_eq!(completion.result, Ok(()))) > 0);
        assert_eq!(io.counters().system_calls, calls);
        let rest = poll_for(&io, io.in_flight());
        assert!(rest.iter().all(|over| over.result.is_ok()));
        assert_eq!(io.stats().counters().requests, io.counters().requests);
    }
}

#[test]
fn sqpoll_thread_takes_requests_without_call() {
    let io = Io::new(IoOptions {
        capacity: 16,
        sqpoll: true,
        ..IoOptions::default()
    });
    let directory = tempfile::tempdir().unwrap();
    let mut queue = match file(&directory).open(&io) {
        Ok(queue) => queue,
        Err(error) => {
            assert!(error.to_string().contains("--sqpoll"), "{error}");
            let what = "volume::io::tests::sqpoll_thread_takes_requests_without_call";
            return testkit::skip(what, error);
        }
    };
    let memory = Memory::anonymous(1 << 20).unwrap();
    for tag in 0..1000 {
        assert!(queue.submit(page(tag, Op::Read, &memory, 3)).is_none());
        assert_eq!(finish(&io, 1), [Ok(())]);
    }
    let counters = io.counters();
    assert!(counters.batches >= 1000, "{counters:?}");
    // Only a sleep of the thread costs a call.
    assert!(counters.system_calls < counters.batches, "{counters:?}");
}

#[test]
fn memory_beyond_memlock_limit_works_unpinned() {
    use rustix::process::{Resource, getrlimit};
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let Some(limit) = getrlimit(Resource::Memlock)
        .current
        .filter(|&limit| limit < 1 << 30)
    else {
        let what = "volume::io::tests::memory_beyond_memlock_limit_works_unpinned";
        return testkit::skip(what, "this process may lock as much memory as it wants");
    };
    // Capabilities of this thread alone: with IPC_LOCK there is no limit.
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, sets).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let (io, mut queue) = pinning(&directory);
    // In pieces of which the first may fit: all or nothing.
    let len = limit + super::fixed::MAX_BUFFER_LEN as u64;
    let memory = Memory::anonymous(len as usize).unwrap();
    assert!(io.pinner().unwrap().pin(&memory, 0, len).is_none());
    assert_eq!(io.pinned(), 0);
    assert!(queue.submit(page(1, WRITE, &memory, 5)).is_none());
    assert_eq!(finish(&io, 1), [Ok(())]);
    assert_eq!(io.counters().fixed, 0);
    let error = std::io::Error::from_raw_os_error(libc::ENOMEM);
    assert!(super::core::why_not_pinned(&error).contains("ulimit -l"));
}
