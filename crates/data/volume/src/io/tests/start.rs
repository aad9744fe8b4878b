//! Requests that enter a ring by the short way, and their completions.

use super::super::job::Abilities;
use super::super::ring::RingFile;
use super::*;
use crate::{IoError, IoErrorKind};
use dma::{Access, DmaMap, Prot};
use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// Capacity of the rings here.
const CAPACITY: u64 = 16;

/// Creates guest memory of one MiB at address 0.
fn guest() -> (Memory, DmaMap) {
    let memory = Memory::anonymous(MIB as usize).unwrap();
    let mut map = DmaMap::new();
    map.map(0, MIB, Some((memory.clone(), 0)), Prot::RW)
        .unwrap();
    (memory, map)
}

fn piece(map: &DmaMap, at: u64, len: u64) -> SegmentList {
    let mut list = SegmentList::new();
    assert!(list.begin_piece(map, at, len, Access::Write));
    list
}

/// Starts to read the page of that number.
fn read(queue: &mut dyn FastPath, map: &DmaMap, page: u64) -> Option<Completion> {
    queue.start(page, Op::Read, page * 4096, piece(map, page * 4096, 4096))
}

/// Looks until nothing is left to be looked at, and the worker may sleep.
fn settle(io: &Io, mode: Mode) {
    let began = Instant::now();
    while !io.arm() {
        // The kernel's thread may have something to take.
        let busy = io.has_news() || mode == Mode::Polled;
        assert!(busy, "{mode:?}: it may not sleep and has nothing to do");
        io.poll(&mut |completion| unreachable!("{completion:?}"));
        assert!(began.elapsed() < BOUND, "it never sleeps");
    }
    io.poll(&mut |completion| unreachable!("{completion:?}"));
}

#[test]
fn only_single_request_in_flight_is_pushed() {
    for mode in MODES {
        let Some(io) = io(mode) else { continue };
        let directories = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let mut queues = directories
            .each_ref()
            .map(|directory| file(directory).open(&io).unwrap());
        let [one, other] = &mut queues;
        let (_memory, map) = guest();
        let mut batches = 0;
        // A thread of the kernel takes everything by itself.
        let mut sent = |now: u64, what: &str| {
            batches += if mode == Mode::Polled { 0 } else { now };
            let counters = io.counters();
            assert_eq!(counters.batches, batches, "{mode:?}: {what}");
            assert_eq!(counters.system_calls, batches, "{mode:?}: {what}");
            if now > 0 && mode != Mode::Polled {
                assert_eq!(io.stats().counters(), counters, "{mode:?}: {what}");
            }
        };
        one.push();
        sent(0, "nothing");
        for page in 0..3 {
            assert!(read(&mut **one, &map, page).is_none());
        }
        sent(0, "not a batch yet");
        other.push();
        sent(1, "all that the ring has");
        one.push();
        sent(0, "sent already");
        assert!(read(&mut **one, &map, 3).is_none());
        one.push();
        sent(0, "the device is at work");
        assert!(read(&mut **other, &map, 4).is_none());
        other.push();
        sent(0, "the ring is at work");
        if mode != Mode::Polled {
            assert!(io.flush());
            sent(1, "the round's end");
        }
        io.flush();
        assert!(poll_for(&io, 5).iter().all(|over| over.result.is_ok()));
        let counters = io.counters();
        assert_eq!((counters.requests, counters.operations), (5, 5));
        settle(&io, mode);
    }
}

#[test]
fn has_news_means_completion_is_available() {
    for mode in MODES {
        let Some(io) = io(mode) else { continue };
        assert!(!io.has_news(), "no request");
        let directory = tempfile::tempdir().unwrap();
        let mut queue = file(&directory).open(&io).unwrap();
        let (_memory, map) = guest();
        for turn in 0..20 {
            assert!(read(&mut *queue, &map, 1).is_none());
            // The first request waits for more; later ones, which were alone so far, do not.
            if mode != Mode::Polled && turn == 0 {
                assert!(!io.has_news(), "{mode:?}: not sent");
            }
            assert!(io.flush() || mode == Mode::Polled);
            let began = Instant::now();
            while !io.has_news() {
                assert!(began.elapsed() < BOUND, "{mode:?}");
            }
            assert_eq!(poll_for(&io, 1)[0].result, Ok(()));
            assert!(!io.has_news(), "{mode:?}: returned already");
        }
        // Nor is there anything in an entry that no slot waits for, once it has been looked at.
        for page in 0..CAPACITY {
            assert!(read(&mut *queue, &map, page).is_none());
        }
        io.flush();
        for page in 0..CAPACITY {
            queue.cancel(page);
        }
        assert_eq!(finish(&io, CAPACITY as usize).len(), CAPACITY as usize);
        settle(&io, mode);
        assert!(!io.has_news(), "{mode:?}");
        assert!(read(&mut *queue, &map, 1).is_none());
        assert_eq!(finish(&io, 1), [Ok(())], "{mode:?}");
    }
}

#[test]
fn full_ring_is_emptied_and_full_slots_refuse() {
    let Some(io) = io(Mode::Deferred) else { return };
    let directory = tempfile::tempdir().unwrap();
    let mut queue = file(&directory).open(&io).unwrap();
    let (_memory, map) = guest();
    let mut expected = IoCounters::default();
    // The ring has room for as many entries as there are slots: these fill it.
    for page in 0..CAPACITY / 2 {
        assert!(read(&mut *queue, &map, page).is_none());
        queue.cancel(page);
        (expected.requests, expected.operations) = (page + 1, page + 1);
        assert_eq!(io.counters(), expected);
    }
    (expected.batches, expected.system_calls) = (1, 1);
    for page in CAPACITY / 2..CAPACITY {
        assert!(read(&mut *queue, &map, page).is_none());
        (expected.requests, expected.operations) = (page + 1, page + 1);
        assert_eq!(io.counters(), expected);
    }
    assert_eq!(queue.state().in_flight, CAPACITY as usize);
    let refused = read(&mut *queue, &map, 99).expect("no slot is left");
    assert_eq!(refused.result, Err(IoErrorKind::Busy.into()));
    let given = piece(&map, 99 * 4096, 4096);
    assert_eq!(refused.data.segments(), given.segments());
    assert_eq!(io.counters(), expected, "it was not started");
    // A few may have been on their way to a thread of the kernel, which reports them as cancelled.
    let aborted = |error: IoError| error.kind == IoErrorKind::Aborted;
    for result in finish(&io, CAPACITY as usize) {
        assert!(result.is_ok() || result.is_err_and(aborted), "{result:?}");
    }
    settle(&io, Mode::Deferred);
}

#[test]
fn memory_is_held_exactly_while_in_kernel() {
    let Some(io) = io(Mode::Deferred) else { return };
    let directory = tempfile::tempdir().unwrap();
    let mut queue = file(&directory).open(&io).unwrap();
    for round in 0..4 {
        let (memory, mut map) = guest();
        for page in 0..4 {
            assert!(read(&mut *queue, &map, page).is_none());
        }
        map.unmap_all();
        drop(memory);
        assert!(!map.quiesced());
        if round % 2 == 0 {
            io.flush();
        } else {
            // Dropping the queue waits for the kernel, and counts the entries that it sends.
            let before = io.counters();
            drop(queue);
            queue = file(&directory).open(&io).unwrap();
            let counters = io.counters();
            assert_eq!(counters.batches - before.batches, 1);
            assert_eq!(io.stats().counters(), counters);
        }
        let mut over = poll_for(&io, 4);
        assert!(!map.quiesced());
        assert!(over.iter().all(|over| over.data.len_bytes() == 4096));
        over.truncate(1);
        assert!(!map.quiesced());
        drop(over);
        assert!(map.quiesced(), "a request keeps it still");
    }
}

/// Creates a file of 64 KiB of sevens that requires more alignment than it reports. Also returns it
/// opened without direct I/O.
fn stricter(directory: &tempfile::TempDir) -> Option<(File, RingFile)> {
    let path = directory.path().join("strict.raw");
    std::fs::write(&path, [7; 65536]).unwrap();
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let plain = options.open(&path).unwrap();
    let strict = match options.custom_flags(libc::O_DIRECT).open(&path) {
        Ok(strict) => OwnedFd::from(strict),
        Err(error) => {
            let what = "volume::io::tests::start: files with direct I/O";
            testkit::skip(what, error);
            return None;
        }
    };
    let file = RingFile {
        fd: Arc::new(strict.into()),
        direct: None,
        abilities: Arc::new(Abilities::new(true, true)),
        lane: None,
    };
    Some((plain, file))
}

#[test]
fn request_refused_by_kernel_is_bounced_at_once() {
    for mode in MODES {
        let Some(io) = io(mode) else { continue };
        let directory = tempfile::tempdir().unwrap();
        let Some((plain, strict)) = stricter(&directory) else {
            return;
        };
        let (memory, mut map) = guest();
        let ring = io.ring().unwrap();
        let file = ring.open(strict);
        for (round, op) in [(1, Op::Read), (2, WRITE), (3, Op::Write { fua: true })] {
            // A byte beside memory that the device reaches.
            let data = piece(&map, 4097, 8192);
            assert_eq!(data.copy_from(0, &[round; 8192]), 8192);
            assert!(ring.transfer(file, 5, op, 4096, data).is_none());
            io.flush();
            // The request's next operation is sent without a call.
            let over = poll_for(&io, 1).remove(0);
            let what = format!("{mode:?}: {op:?}");
            assert_eq!((over.tag, over.result), (5, Ok(())), "{what}");
            let mut held = [0; 16384];
            plain.read_exact_at(&mut held, 0).unwrap();
            let written = if op == Op::Read { 7 } else { round };
            assert!(over.data.equals(0, &[written; 8192]), "{what}");
            assert_eq!(held[4096..12288], [written; 8192], "{what}");
            assert_eq!((held[4095], held[12288]), (7, 7), "{what}");
            let counters = io.counters();
            let round = u64::from(round);
            let got = (counters.requests, counters.operations, counters.bounced);
            assert_eq!(got, (round, 2 * round, round), "{what}");
        }
        // Closing the file waits for its requests, also in the middle of one.
        let data = piece(&map, 4097, 8192);
        assert!(ring.transfer(file, 6, Op::Read, 4096, data).is_none());
        ring.close(file);
        assert_eq!(poll_for(&io, 1)[0].tag, 6);
        drop(memory);
        map.unmap_all();
        assert!(map.quiesced(), "{mode:?}");
    }
}

#[test]
fn only_transfers_in_one_pinned_buffer_are_fixed() {
    let directory = tempfile::tempdir().unwrap();
    let (io, mut queue) = pinning(&directory);
    let memory = Memory::anonymous(4 << 20).unwrap();
    let mut map = DmaMap::new();
    let backing = Some((memory.clone(), 0));
    map.map(0, 4 * MIB, backing, Prot::RW).unwrap();
    let _pinned = io.pinner().unwrap().pin(&memory, MIB, MIB).unwrap();
    let cases = [
        (MIB, 4096, true),
        (2 * MIB - 8192, 8192, true),
        (2 * MIB - 4096, 8192, false),
        (MIB - 4096, 8192, false),
        (2 * MIB, 4096, false),
        (MIB, MIB, true),
    ];
    for ((at, len, fixed), seed) in cases.into_iter().zip(1..) {
        for (op, before, after) in [(WRITE, seed, seed), (Op::Read, 0xEE, seed)] {
            let data = piece(&map, at, len);
            assert_eq!(data.fill(before), len);
            let already = io.counters().fixed;
            assert!(queue.start(1, op, 0, data).is_none());
            let now = io.counters().fixed - already;
            assert_eq!(now, u64::from(fixed), "{op:?} of {len} at {at}");
            io.flush();
            let over = poll_for(&io, 1).remove(0);
            assert_eq!(over.result, Ok(()));
            assert!(over.data.equals(0, &vec![after; len as usize]));
        }
    }
}
