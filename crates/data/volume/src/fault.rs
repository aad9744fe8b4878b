//! Fault injection: a wrapper that fails, delays or holds chosen requests.
//!
//! Tests insert it below the layer under test, which then sees the behaviour of a failing disk.

use crate::{
    AtomicWrites, Completion, FastPath, Info, Io, IoError, IoErrorKind, Op, OpenQueue, QueueState,
    Request, Volume, VolumeError, VolumeQueue, Wake,
};
use dma::{SegmentList, View};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use sync::Unpoisoned;

/// Kinds of requests that a fault affects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OpKind {
    /// Requests of every kind.
    #[default]
    Any,
    /// Reads.
    Read,
    /// Write requests.
    Write,
    /// Flush requests.
    Flush,
    /// Requests that zero a range.
    WriteZeroes,
    /// Requests that deallocate a range.
    Deallocate,
}

impl OpKind {
    fn matches(self, op: Op) -> bool {
        match self {
            Self::Any => true,
            Self::Read => op == Op::Read,
            Self::Write => matches!(op, Op::Write { .. }),
            Self::Flush => op == Op::Flush,
            Self::WriteZeroes => matches!(op, Op::WriteZeroes { .. }),
            Self::Deallocate => op == Op::Deallocate,
        }
    }
}

/// Effect of an injected fault on a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The request fails at once, and never reaches the volume.
    Fail(IoError),
    /// The request fails with a later completion, as on a disk that has worked on it. It never
    /// reaches the volume.
    FailLater(IoError),
    /// The request reaches the volume after this delay.
    Delay(Duration),
    /// The request is held until [`Faults::release`] is called, then reaches the volume.
    Hold,
}

/// Injected fault for tests: which requests are affected, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Kind of requests that the fault affects.
    pub op: OpKind,
    /// Byte range that a request must touch to be affected; `None`: any request. Flushes have no
    /// range.
    pub range: Option<Range<u64>>,
    /// Number of matching requests that pass unaffected before the fault takes effect.
    pub skip: u64,
    /// Number of requests that the fault affects before it is removed.
    pub times: u64,
    /// Effect of the fault on each affected request.
    pub effect: Effect,
}

impl Fault {
    /// Creates a fault that affects all requests of a kind, until it is cleared.
    pub fn always(op: OpKind, effect: Effect) -> Self {
        Self {
            op,
            range: None,
            skip: 0,
            times: u64::MAX,
            effect,
        }
    }

    /// Creates a fault that affects only the `nth` request of a kind from now on, counted from 1.
    pub fn nth(op: OpKind, nth: u64, effect: Effect) -> Self {
        Self {
            op,
            range: None,
            skip: nth.saturating_sub(1),
            times: 1,
            effect,
        }
    }

    fn concerns(&self, request: &Request) -> bool {
        self.op.matches(request.op)
            && self.range.as_ref().is_none_or(|range| {
                request.op != Op::Flush
                    && request.offset < range.end
                    && request.offset.saturating_add(request.len) > range.start
            })
    }
}

/// Injected faults of a [`FaultVolume`]. Any thread may add and remove them.
#[derive(Debug, Default)]
pub struct Faults {
    list: Mutex<Vec<Fault>>,
    /// Number of calls of [`Faults::release`] so far.
    releases: AtomicU64,
    held: AtomicUsize,
}

impl Faults {
    /// Adds a fault. Faults that were added earlier apply first.
    pub fn add(&self, fault: Fault) {
        self.list.lock().unpoisoned().push(fault);
    }

    /// Removes all faults. Requests that a fault is holding stay held.
    pub fn clear(&self) {
        self.list.lock().unpoisoned().clear();
    }

    /// Passes the requests that faults are holding on to the volume.
    pub fn release(&self) {
        self.releases.fetch_add(1, Ordering::Release);
    }

    /// Returns the number of requests that faults are holding now.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Acquire)
    }

    /// Returns the effect of the first matching fault on a request, and counts the request; `None`
    /// if no fault matches.
    fn strike(&self, request: &Request) -> Option<Effect> {
        let mut list = self.list.lock().unpoisoned();
        let mut struck = None;
        for fault in list.iter_mut().filter(|fault| fault.concerns(request)) {
            if fault.skip > 0 {
                fault.skip -= 1;
            } else if fault.times > 0 && struck.is_none() {
                fault.times -= 1;
                struck = Some(fault.effect);
            }
        }
        list.retain(|fault| fault.times > 0);
        struck
    }
}

/// A wrapper around a volume that injects faults, for tests.
#[derive(Debug)]
pub struct FaultVolume {
    volume: Arc<dyn Volume>,
    faults: Arc<Faults>,
}

impl FaultVolume {
    /// Wraps `volume`, initially without faults.
    pub fn new(volume: Arc<dyn Volume>) -> Self {
        Self {
            volume,
            faults: Arc::default(),
        }
    }

    /// Returns the list of injected faults, to which a test adds its own.
    pub fn faults(&self) -> Arc<Faults> {
        self.faults.clone()
    }
}

impl Volume for FaultVolume {
    fn info(&self) -> Info {
        self.volume.info()
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        Ok(OpenQueue::with_fast_path(FaultQueue {
            queue: self.volume.open(io)?,
            faults: self.faults.clone(),
            releases: self.faults.releases.load(Ordering::Acquire),
            held: Vec::new(),
            delayed: Vec::new(),
            failed: Vec::new(),
        }))
    }

    fn id(&self) -> Vec<u8> {
        self.volume.id()
    }

    /// Returns the promise of the inner volume. Faults fail or delay requests but never split them.
    fn atomic_writes(&self) -> AtomicWrites {
        self.volume.atomic_writes()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.volume)
    }
}

/// Queue of one worker into a [`FaultVolume`].
struct FaultQueue {
    queue: OpenQueue,
    faults: Arc<Faults>,
    /// Value of [`Faults::releases`] when it was last checked.
    releases: u64,
    held: Vec<Request>,
    delayed: Vec<(Instant, Request)>,
    /// Requests that a fault lets fail in the next round, with their errors.
    failed: Vec<(Request, IoError)>,
}

impl VolumeQueue for FaultQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        match self.faults.strike(&request) {
            None => self.queue.submit(request),
            Some(Effect::Fail(error)) => Some(request.complete(Err(error))),
            Some(Effect::FailLater(error)) => {
                self.failed.push((request, error));
                None
            }
            Some(Effect::Delay(delay)) => {
                let now = Instant::now();
                self.delayed
                    .push((now.checked_add(delay).unwrap_or(now), request));
                None
            }
            Some(Effect::Hold) => {
                self.held.push(request);
                self.faults.held.fetch_add(1, Ordering::AcqRel);
                None
            }
        }
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        let mut count = self.queue.poll(done);
        for (request, error) in self.failed.drain(..) {
            count += 1;
            done(request.complete(Err(error)));
        }
        let mut due = Vec::new();
        let releases = self.faults.releases.load(Ordering::Acquire);
        if self.releases != releases {
            self.releases = releases;
            self.faults
                .held
                .fetch_sub(self.held.len(), Ordering::AcqRel);
            due.append(&mut self.held);
        }
        if !self.delayed.is_empty() {
            let now = Instant::now();
            due.extend(
                self.delayed
                    .extract_if(.., |(deadline, _)| *deadline <= now)
                    .map(|(_, request)| request),
            );
        }
        for request in due {
            if let Some(completion) = self.queue.submit(request) {
                count += 1;
                done(completion);
            }
        }
        count
    }

    fn state(&self) -> QueueState {
        let own = self.held.len() + self.delayed.len() + self.failed.len();
        let QueueState { in_flight, wake } = self.queue.state();
        QueueState {
            in_flight: in_flight + own,
            wake: if own > 0 { Wake::Poll } else { wake },
        }
    }

    fn cancel(&mut self, tag: u64) {
        let aborted = IoErrorKind::Aborted.into();
        if let Some(index) = self.held.iter().position(|request| request.tag == tag) {
            self.failed.push((self.held.swap_remove(index), aborted));
            self.faults.held.fetch_sub(1, Ordering::AcqRel);
        } else if let Some(index) = self
            .delayed
            .iter()
            .position(|(_, request)| request.tag == tag)
        {
            self.failed
                .push((self.delayed.swap_remove(index).1, aborted));
        } else {
            self.queue.cancel(tag);
        }
    }
}

/// Copies use reads and writes, which faults can affect.
impl FastPath for FaultQueue {
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        self.submit(Request::transfer(tag, op, offset, data))
    }

    fn push(&mut self) {
        self.queue.push();
    }

    /// Returns false: a fault may delay a request, so each must be submitted.
    fn is_immediate(&self) -> bool {
        false
    }

    fn try_now(&mut self, _: Op, _: u64, _: View<'_>) -> Option<Result<(), IoError>> {
        None
    }

    fn prefetches(&self) -> bool {
        self.queue.prefetches()
    }

    fn prefetch(&mut self, op: Op, offset: u64, len: u64) {
        self.queue.prefetch(op, offset, len);
    }
}

impl Drop for FaultQueue {
    fn drop(&mut self) {
        self.faults
            .held
            .fetch_sub(self.held.len(), Ordering::AcqRel);
    }
}
