//! A volume that stores nothing, for measuring the cost of all other layers.

use crate::request::check_range;
use crate::{
    Completion, Extent, FastPath, Info, Io, IoError, IoErrorKind, Kind, Op, OpenQueue, QueueState,
    Request, Volume, VolumeError, VolumeQueue, Wake,
};
use dma::{SegmentList, View};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use sync::Unpoisoned;

/// Properties of a [`NullVolume`]: size, latency and access.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NullOptions {
    /// Size of the volume in bytes.
    pub size: u64,
    /// Whether reads fill their data with zeroes. Otherwise the reader's memory keeps its former
    /// contents.
    pub read_zeroes: bool,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Time after which each request completes, through [`VolumeQueue::poll`]; zero: immediately,
    /// in `submit`.
    pub latency: Duration,
    /// Maximum number of requests in progress at one time, over all queues; 0: no limit. Further
    /// requests wait in the order of submission. Has no effect without a latency.
    pub units: usize,
}

/// Latency from which the worker sleeps until a request completes, instead of polling.
const WORTH_SLEEPING: Duration = Duration::from_micros(100);

/// A volume that completes every request without storing data.
///
/// A read leaves the reader's buffer unchanged unless [`NullOptions::read_zeroes`] is set; written
/// data is discarded.
#[derive(Debug)]
pub struct NullVolume {
    options: NullOptions,
    /// Device name and service units, if several volumes simulate one named device.
    device: Option<Arc<Units>>,
    root: Option<String>,
}

/// Units of a simulated device, which processes that many requests at a time, each for the same
/// time. The n-th request begins when the one `units` before it has completed.
#[derive(Debug)]
struct Units {
    epoch: Instant,
    next: AtomicUsize,
    /// For each service unit, the time until which it is busy, in nanoseconds since the epoch.
    busy: Box<[AtomicU64]>,
}

impl Units {
    fn new(count: usize) -> Self {
        Self {
            epoch: Instant::now(),
            next: AtomicUsize::new(0),
            busy: (0..count).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Returns the completion time of a request that is started now; `None` when there are no
    /// units.
    fn end(&self, now: Instant, latency: Duration) -> Option<Instant> {
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let (now, latency) = (
            nanoseconds(now.saturating_duration_since(self.epoch)),
            nanoseconds(latency),
        );
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        let unit = self.busy.get(turn % self.busy.len().max(1))?;
        let end = |until: u64| until.max(now).saturating_add(latency);
        let before = unit.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |until| {
            Some(end(until))
        });
        let end = end(before.unwrap_or(0));
        self.epoch.checked_add(Duration::from_nanos(end))
    }
}

/// Simulated devices of this process, by name.
static DEVICES: Mutex<Vec<(String, Weak<Units>)>> = Mutex::new(Vec::new());

impl NullVolume {
    /// Creates a read-only volume of 512 bytes that takes the place of a missing one.
    pub fn placeholder() -> Self {
        Self {
            options: NullOptions {
                size: 512,
                read_only: true,
                ..NullOptions::default()
            },
            device: None,
            root: None,
        }
    }

    /// Creates a null volume with this size and behaviour.
    pub fn new(options: NullOptions) -> Result<Self, VolumeError> {
        if options.size == 0 {
            return Err(VolumeError::Size {
                size: 0,
                why: "it must hold at least one block",
            });
        }
        let device = (options.units > 0).then(|| Arc::new(Units::new(options.units)));
        Ok(Self {
            options,
            device,
            root: None,
        })
    }

    /// Makes this volume a part of a named device. All volumes with the same device name in this
    /// process share its units (as many as the first volume requested), and must not overlap.
    pub fn named(mut self, name: &str) -> Self {
        self.root = Some(format!("null device {name}"));
        let Some(mine) = &self.device else {
            return self;
        };
        let mut devices = DEVICES.lock().unpoisoned();
        devices.retain(|(_, device)| device.strong_count() > 0);
        let known = devices.iter().find(|(known, _)| known == name);
        match known.and_then(|(_, device)| device.upgrade()) {
            Some(known) => self.device = Some(known),
            None => devices.push((name.into(), Arc::downgrade(mine))),
        }
        drop(devices);
        self
    }
}

impl Volume for NullVolume {
    fn info(&self) -> Info {
        Info {
            size: self.options.size,
            block_size: 1,
            optimal_io: 4096,
            read_only: self.options.read_only,
            volatile_cache: false,
            deallocate: !self.options.read_only,
            deallocate_granularity: if self.options.read_only { 0 } else { 4096 },
            // A read does not even touch the buffer, unless the option is set.
            zeroes_after_deallocate: self.options.read_zeroes,
            write_zeroes: true,
            kind: Kind::Null,
            description: match (self.options.read_zeroes, self.options.latency) {
                (false, Duration::ZERO) => "null".into(),
                (true, Duration::ZERO) => "null, reads zeroes".into(),
                (false, latency) => format!("null, latency {latency:?}"),
                (true, latency) => format!("null, reads zeroes, latency {latency:?}"),
            },
        }
    }

    fn open(&self, _io: &Io) -> Result<OpenQueue, VolumeError> {
        Ok(OpenQueue::with_fast_path(NullQueue {
            immediate: self.options.latency.is_zero(),
            options: self.options,
            device: self.device.clone(),
            waiting: VecDeque::new(),
        }))
    }

    fn id(&self) -> Vec<u8> {
        format!("null:{}", self.options.size).into_bytes()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        None
    }

    fn extent(&self) -> Option<Extent> {
        self.root.clone().map(Extent::whole)
    }
}

/// Queue of one worker into a [`NullVolume`].
struct NullQueue {
    options: NullOptions,
    /// Whether requests complete within `submit`, without a latency.
    immediate: bool,
    device: Option<Arc<Units>>,
    /// Outstanding requests with their completion times, in the order of submission.
    waiting: VecDeque<(Instant, Request)>,
}

impl NullQueue {
    fn finish(options: &NullOptions, request: Request) -> Completion {
        if request.op == Op::Read && options.read_zeroes {
            request.data.fill(0);
        }
        request.complete(Ok(()))
    }
}

impl VolumeQueue for NullQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        if let Err(error) = request.check(self.options.size, 1, self.options.read_only) {
            return Some(request.complete(Err(error)));
        }
        if self.options.latency.is_zero() {
            return Some(Self::finish(&self.options, request));
        }
        // The deadline of a latency beyond the clock's range is now: the latency is an option of
        // the user's own.
        let now = Instant::now();
        let latency = self.options.latency;
        let end = match &self.device {
            Some(device) => device.end(now, latency),
            None => now.checked_add(latency),
        };
        self.waiting.push_back((end.unwrap_or(now), request));
        None
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        if self.waiting.is_empty() {
            return 0;
        }
        let now = Instant::now();
        let mut count = 0;
        while self
            .waiting
            .front()
            .is_some_and(|(deadline, _)| *deadline <= now)
        {
            if let Some((_, request)) = self.waiting.pop_front() {
                done(Self::finish(&self.options, request));
                count += 1;
            }
        }
        count
    }

    fn state(&self) -> QueueState {
        let wake = match self.waiting.front() {
            None => Wake::Event,
            Some((end, _)) if self.options.latency >= WORTH_SLEEPING => Wake::At(*end),
            Some(_) => Wake::Poll,
        };
        QueueState {
            in_flight: self.waiting.len(),
            wake,
        }
    }

    /// Does nothing, because requests complete after their latency anyway.
    fn cancel(&mut self, _: u64) {}
}

impl FastPath for NullQueue {
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        self.submit(Request::transfer(tag, op, offset, data))
    }

    fn push(&mut self) {}

    fn is_immediate(&self) -> bool {
        self.immediate
    }

    fn try_now(&mut self, op: Op, offset: u64, data: View<'_>) -> Option<Result<(), IoError>> {
        let options = &self.options;
        if !self.immediate {
            return None;
        }
        let len = data.len_bytes();
        if let Err(error) = check_range(op, offset, len, options.size, 1, options.read_only) {
            return Some(Err(error));
        }
        if op == Op::Read {
            if !data.is_writable() {
                return Some(Err(IoErrorKind::Invalid.into()));
            }
            if options.read_zeroes {
                data.fill(0);
            }
        }
        Some(Ok(()))
    }

    fn prefetches(&self) -> bool {
        false
    }

    fn prefetch(&mut self, _: Op, _: u64, _: u64) {}
}
