//! A device in simulated time: every request takes about equally long, and so many are worked on at
//! a time.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dma::{Buffer, SegmentList};
use volume::{
    Clock, Completion, Info, Io, Kind, Op, OpenQueue, QueueState, Request, Volume, VolumeError,
    VolumeQueue, Wake,
};

/// A clock that stands still until it is moved.
#[derive(Debug)]
pub struct Simulated {
    epoch: Instant,
    nanoseconds: AtomicU64,
}

impl Simulated {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            epoch: Instant::now(),
            nanoseconds: AtomicU64::new(0),
        })
    }

    pub fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds.load(Ordering::Relaxed))
    }

    /// Moves the time forward to `then`, never back.
    pub fn advance_to(&self, then: Instant) {
        let then = then.saturating_duration_since(self.epoch).as_nanos() as u64;
        self.nanoseconds.fetch_max(then, Ordering::Relaxed);
    }
}

impl Clock for Simulated {
    fn now(&self) -> Instant {
        self.epoch + self.elapsed()
    }
}

/// The device; its queues complete by being polled.
#[derive(Debug)]
pub struct Device {
    clock: Arc<Simulated>,
    latency: Duration,
    /// The unit with the next turn, and the times until which the units are busy, if they are
    /// counted.
    units: Mutex<(usize, Vec<Instant>)>,
    /// Requests in the device, and the most that there were.
    pub busy: AtomicUsize,
    pub most: AtomicUsize,
    /// When the next one will be over.
    ends: Mutex<Vec<Instant>>,
}

impl Device {
    /// A device that works on everything at once.
    pub fn new(clock: &Arc<Simulated>, latency: Duration) -> Arc<Self> {
        Self::with_units(clock, latency, 0)
    }

    /// Creates a device that works on `units` requests at a time; the rest wait in it, in the order
    /// of their arrival.
    pub fn with_units(clock: &Arc<Simulated>, latency: Duration, units: usize) -> Arc<Self> {
        Arc::new(Self {
            units: Mutex::new((0, vec![clock.now(); units])),
            clock: clock.clone(),
            latency,
            busy: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            ends: Mutex::new(Vec::new()),
        })
    }

    /// Returns the time at which a request that arrives now will be over.
    fn end(&self) -> Instant {
        let now = self.clock.now();
        let mut units = self.units.lock().unwrap();
        let (turn, units) = &mut *units;
        if units.is_empty() {
            return now + self.latency;
        }
        let count = units.len();
        let unit = &mut units[*turn % count];
        *turn += 1;
        // A fifth more or less, so that not all requests end at the same time for ever.
        let random = (*turn as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48;
        let time = self.latency.mul_f64(0.8 + 0.4 * random as f64 / 65536.0);
        *unit = now.max(*unit) + time;
        *unit
    }

    /// When the next request will be over.
    pub fn next(&self) -> Option<Instant> {
        self.ends.lock().unwrap().iter().min().copied()
    }
}

/// A way to the device.
#[derive(Debug)]
pub struct DevicePath(pub Arc<Device>);

impl Volume for DevicePath {
    fn info(&self) -> Info {
        Info {
            size: 1 << 40,
            block_size: 512,
            optimal_io: 4096,
            read_only: false,
            volatile_cache: true,
            deallocate: true,
            deallocate_granularity: 4096,
            zeroes_after_deallocate: true,
            write_zeroes: true,
            kind: Kind::Null,
            description: "simulated".into(),
        }
    }

    fn open(&self, _io: &Io) -> Result<OpenQueue, VolumeError> {
        Ok(OpenQueue::new(Queue {
            device: self.0.clone(),
            waiting: VecDeque::new(),
        }))
    }

    fn id(&self) -> Vec<u8> {
        b"simulated".to_vec()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        None
    }
}

struct Queue {
    device: Arc<Device>,
    waiting: VecDeque<(Instant, Request)>,
}

impl VolumeQueue for Queue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        let end = self.device.end();
        self.device.ends.lock().unwrap().push(end);
        let place = self.waiting.partition_point(|(other, _)| *other <= end);
        self.waiting.insert(place, (end, request));
        let busy = self.device.busy.fetch_add(1, Ordering::Relaxed) + 1;
        self.device.most.fetch_max(busy, Ordering::Relaxed);
        None
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        let (now, mut count) = (self.device.clock.now(), 0);
        while self.waiting.front().is_some_and(|(end, _)| *end <= now) {
            let (_, request) = self.waiting.pop_front().unwrap();
            let mut ends = self.device.ends.lock().unwrap();
            let at = ends.iter().position(|end| *end <= now).unwrap();
            ends.swap_remove(at);
            drop(ends);
            self.device.busy.fetch_sub(1, Ordering::Relaxed);
            count += 1;
            done(request.complete(Ok(())));
        }
        count
    }

    fn state(&self) -> QueueState {
        let first = self.waiting.front();
        QueueState {
            in_flight: self.waiting.len(),
            wake: first.map_or(Wake::Event, |(end, _)| Wake::At(*end)),
        }
    }

    fn cancel(&mut self, _: u64) {}
}

/// A client that keeps a number of requests outstanding.
pub struct Load {
    queue: OpenQueue,
    depth: usize,
    make: Box<dyn Fn(u64) -> (Op, u64)>,
    outstanding: usize,
    /// Time to make another request when one is over, and the times at which those are ready.
    think: (Arc<Simulated>, Duration),
    ready: VecDeque<Instant>,
    tag: u64,
    /// Counts of completed requests and bytes.
    pub requests: u64,
    pub bytes: u64,
}

impl Load {
    /// Creates a load. `make` returns operation and length of the n-th request.
    pub fn new(
        volume: &dyn Volume,
        io: &Io,
        depth: usize,
        make: impl Fn(u64) -> (Op, u64) + 'static,
    ) -> Self {
        Self {
            queue: volume.open(io).unwrap(),
            depth,
            make: Box::new(make),
            outstanding: 0,
            think: (Simulated::new(), Duration::ZERO),
            ready: VecDeque::new(),
            tag: 0,
            requests: 0,
            bytes: 0,
        }
    }

    /// Sets the time to make another request when one is over.
    pub fn thinking(mut self, clock: &Arc<Simulated>, time: Duration) -> Self {
        self.think = (clock.clone(), time);
        self
    }

    /// Collects completed requests. Returns whether there were any.
    pub fn collect(&mut self) -> bool {
        let (mut bytes, mut count) = (0, 0);
        self.queue.poll(&mut |completion| {
            completion.result.unwrap();
            bytes += completion.data.len_bytes();
            count += 1;
        });
        let (clock, think) = &self.think;
        if think.is_zero() {
            self.outstanding -= count;
        } else {
            self.ready
                .extend(std::iter::repeat_n(clock.now() + *think, count));
        }
        self.requests += count as u64;
        self.bytes += bytes;
        count > 0
    }

    /// Submits as much as is missing. `true` when there was anything.
    pub fn submit(&mut self) -> bool {
        while self
            .ready
            .front()
            .is_some_and(|ready| *ready <= self.think.0.now())
        {
            self.ready.pop_front();
            self.outstanding -= 1;
        }
        let (mut bytes, mut count) = (0, 0);
        let worked = self.outstanding < self.depth;
        while self.outstanding < self.depth {
            let (op, len) = (self.make)(self.tag);
            let data = if op.has_data() {
                SegmentList::owned(Buffer::new(len as usize))
            } else {
                SegmentList::new()
            };
            let tag = self.tag;
            self.tag += 1;
            // Every second one by the short way: it counts as much.
            let over = if op.has_data() && tag % 2 == 1 {
                self.queue.start(tag, op, 0, data)
            } else {
                self.queue.submit(Request {
                    tag,
                    op,
                    offset: 0,
                    len,
                    data,
                })
            };
            match over {
                None => self.outstanding += 1,
                Some(completion) => {
                    completion.result.unwrap();
                    bytes += completion.data.len_bytes();
                    count += 1;
                }
            }
        }
        self.requests += count;
        self.bytes += bytes;
        worked
    }

    /// When it wants to be looked at although nothing is over.
    pub fn deadline(&self, clock: &Simulated) -> Option<Instant> {
        let ready = self.ready.front().copied();
        let wake = self.queue.state().wake.deadline(|| clock.now());
        ready.into_iter().chain(wake).min()
    }
}

/// Runs all loads for a simulated time, as a worker would: from event to event.
pub fn run(clock: &Arc<Simulated>, device: &Device, time: Duration, loads: &mut [Load]) {
    let end = clock.elapsed() + time;
    let mut idle = 0;
    while clock.elapsed() < end {
        let mut worked = false;
        for load in loads.iter_mut() {
            worked |= load.submit();
        }
        for load in loads.iter_mut() {
            worked |= load.collect();
        }
        if worked {
            idle = 0;
            continue;
        }
        let deadlines = loads.iter().filter_map(|load| load.deadline(clock));
        let next = deadlines.chain(device.next()).min();
        let next = next.expect("everybody waits, and nothing will ever happen");
        idle = if next <= clock.now() { idle + 1 } else { 0 };
        assert!(idle < 100, "a deadline is over, and nothing happens");
        clock.advance_to(next);
    }
}
