//! Namespaces that are resized while their queues are on several workers.

use crate::migration::rules::migrate_to_others;
use crate::migration::world::{OTHERS, PAIRS, PLACES, WINDOW, World};
use dma::{SegmentList, View};
use nvme::{NvmOpcode, Status};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use volume::{
    Completion, FastPath, Info, Io, IoError, IoErrorKind, Op, OpenQueue, QueueState, Request,
    Volume, VolumeError, VolumeQueue,
};

/// The first part of another volume: its owner says how much of it.
#[derive(Debug)]
pub struct Resizable {
    volume: Arc<dyn Volume>,
    bytes: Arc<AtomicU64>,
    asked: AtomicU64,
    failures: Arc<AtomicU64>,
}

impl Resizable {
    pub fn new(volume: Arc<dyn Volume>, bytes: u64) -> Self {
        Resizable {
            volume,
            bytes: Arc::new(AtomicU64::new(bytes)),
            asked: AtomicU64::new(0),
            failures: Arc::default(),
        }
    }

    /// How often it was asked for its size.
    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    /// Fails the next `count` requests, like a lost disk.
    pub fn fail_next(&self, count: u64) {
        self.failures.store(count, Ordering::Relaxed);
    }

    pub fn resize(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }
}

impl Volume for Resizable {
    fn info(&self) -> Info {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let size = self.bytes.load(Ordering::Relaxed);
        Info {
            size,
            ..self.volume.info()
        }
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        let (queue, bytes) = (self.volume.open(io)?, self.bytes.clone());
        let (immediate, failures) = (queue.is_immediate(), self.failures.clone());
        let queue = Queue {
            queue,
            bytes,
            failures,
        };
        Ok(if immediate {
            OpenQueue::with_fast_path(queue)
        } else {
            OpenQueue::new(queue)
        })
    }

    fn id(&self) -> Vec<u8> {
        self.volume.id()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.volume)
    }
}

struct Queue {
    queue: OpenQueue,
    bytes: Arc<AtomicU64>,
    failures: Arc<AtomicU64>,
}

impl Queue {
    fn fails(&self) -> bool {
        let failures = self.failures.load(Ordering::Relaxed);
        self.failures
            .store(failures.saturating_sub(1), Ordering::Relaxed);
        failures > 0
    }
}

impl FastPath for Queue {
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        self.submit(Request::transfer(tag, op, offset, data))
    }

    fn push(&mut self) {
        self.queue.push();
    }

    fn is_immediate(&self) -> bool {
        self.queue.is_immediate()
    }

    fn try_now(&mut self, op: Op, offset: u64, data: View<'_>) -> Option<Result<(), IoError>> {
        let end = offset + data.len_bytes();
        let within = end <= self.bytes.load(Ordering::Relaxed);
        if within && self.fails() {
            return Some(Err(IoErrorKind::Gone.into()));
        }
        within.then(|| self.queue.try_now(op, offset, data))?
    }

    fn prefetches(&self) -> bool {
        self.queue.prefetches()
    }

    fn prefetch(&mut self, op: Op, offset: u64, len: u64) {
        self.queue.prefetch(op, offset, len);
    }
}

impl VolumeQueue for Queue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        let end = request.offset + request.len;
        if request.op != Op::Flush && end > self.bytes.load(Ordering::Relaxed) {
            return Some(request.complete(Err(IoErrorKind::OutOfRange.into())));
        }
        // No policy holds a flush that has failed, or ranges.
        let held = !matches!(request.op, Op::Flush | Op::Deallocate);
        if held && self.fails() {
            return Some(request.complete(Err(IoErrorKind::Gone.into())));
        }
        self.queue.submit(request)
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        self.queue.poll(done)
    }

    fn state(&self) -> QueueState {
        self.queue.state()
    }

    fn cancel(&mut self, tag: u64) {
        self.queue.cancel(tag);
    }
}

/// Reads a page of the volume in every queue; the workers drain their messages before, or do not.
fn read_everywhere(w: &mut World, place: u64, drain: bool) {
    let inside = place < w.size;
    for qid in 1..=PAIRS {
        let at = WINDOW + place % PLACES * 4096;
        let command = w.h.rw(NvmOpcode::READ, 1, place * 8, 8, at);
        w.h.submit(qid, command);
        // Beside queues that were busy lately, one that was not has its turn within so many rounds.
        for _ in 0..16 {
            for worker in 0..=OTHERS {
                w.step(worker, drain);
            }
        }
        let status = w.h.reap(qid).unwrap().status();
        let right = if inside {
            status == Status::SUCCESS
        } else {
            status.is(Status::LBA_OUT_OF_RANGE)
        };
        assert!(
            right,
            "{place} of {}, queue {qid}, drain: {drain}: {status}",
            w.size
        );
    }
}

/// The host knows the new size as soon as the controller does: it holds in every queue, however
/// late a worker is told of it.
#[test]
fn new_size_holds_on_every_worker_at_once() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.wake_all();
    for size in [PLACES / 2, PLACES, 1, 2, PLACES] {
        let before = w.size;
        w.resize(size);
        for drain in [false, true] {
            for place in [0, size - 1, before - 1, size, before, PLACES] {
                read_everywhere(&mut w, place, drain);
            }
        }
    }
    w.verify();
}

/// A worker that knows the new size need not ask the volume.
#[test]
fn every_worker_learns_new_size() {
    let mut w = World::new(true);
    migrate_to_others(&mut w);
    // More than its engine was opened with.
    w.resize(2 * PLACES);
    w.wake_all();
    w.h.run();
    let asked = w.volume.asked();
    read_everywhere(&mut w, 2 * PLACES - 1, true);
    assert_eq!(w.volume.asked(), asked);
    w.verify();
}
