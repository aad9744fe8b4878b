//! Workers beside other threads on their processor: the kernel's, which work on their requests, and
//! those of other programs.

use std::convert::Infallible;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use volume::{
    Budget, Completion, Direct, FileOptions, FileVolume, Io, IoOptions, OpenQueue, Request, Volume,
};
use worker::{Context, Frontend, Handle, IdleWindow, Options, Worker};

/// Flushes, one at a time.
const FLUSHES: u64 = 1000;
/// Looks for one flush, at most: the kernel's thread runs when the worker lets it (0.05 to 0.5
/// looks were measured), or when the worker's time slice ends (1.4 to 27).
const LOOKS_PER_FLUSH: u64 = 2;
const TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Default)]
struct Counts {
    looks: AtomicU64,
    flushes: AtomicU64,
}

/// Flushes a file again as soon as its last flush has ended.
struct Flusher {
    queue: OpenQueue,
    tag: u64,
    in_flight: usize,
    counts: Arc<Counts>,
}

impl Frontend for Flusher {
    type Error = Infallible;

    fn poll(&mut self, _now: Instant, _budget: &mut Budget) -> bool {
        if self.in_flight > 0 || self.counts.flushes.load(Ordering::SeqCst) >= FLUSHES {
            self.counts.looks.fetch_add(1, Ordering::SeqCst);
            return false;
        }
        self.in_flight = 1;
        let done = self.queue.submit(Request::flush(self.tag));
        if let Some(done) = done {
            self.complete(done);
        }
        true
    }

    fn complete(&mut self, completion: Completion) {
        completion.result.unwrap();
        self.in_flight = 0;
        self.counts.flushes.fetch_add(1, Ordering::SeqCst);
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn flush(&mut self) {}

    fn is_drained(&self) -> bool {
        true
    }
}

/// Files in memory have nothing to wait for: a flush takes as long as its thread waits for the
/// processor.
#[test]
fn flush_does_not_wait_for_end_of_time_slice() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, [0; 4096]).unwrap();
    let options = FileOptions {
        direct: Direct::Off,
        ..FileOptions::default()
    };
    let volume = FileVolume::open(&path, options).unwrap();
    let counts = Arc::new(Counts::default());
    let handle = Handle::new().unwrap();
    let (of_thread, of_worker) = (handle.clone(), counts.clone());
    let thread = std::thread::spawn(move || {
        pin_to_first_processor();
        let options = Options {
            idle_window: IdleWindow::Fixed(Duration::from_secs(3600)),
            shares_cpu: false,
            ..Options::default()
        };
        let io = Rc::new(Io::new(IoOptions::default()));
        let mut worker = Worker::new(io, &of_thread, options).unwrap();
        let make = |context: &Context<'_>| {
            Ok::<_, Infallible>(Flusher {
                queue: volume.open(context.io).unwrap(),
                tag: u64::from(context.owner) << 48,
                in_flight: 0,
                counts: of_worker,
            })
        };
        worker.add(make).unwrap();
        worker.run().unwrap();
    });
    let began = Instant::now();
    while counts.flushes.load(Ordering::SeqCst) < FLUSHES {
        assert!(began.elapsed() < TIMEOUT, "the flushes do not end");
        assert!(!thread.is_finished(), "the worker has ended");
        std::thread::sleep(Duration::from_millis(1));
    }
    let looks = counts.looks.load(Ordering::SeqCst);
    handle.post(Worker::stop);
    thread.join().unwrap();
    assert!(
        looks < FLUSHES * LOOKS_PER_FLUSH,
        "{looks} looks for {FLUSHES} flushes"
    );
}

/// Has nothing to do, and is polled all the time.
struct Polled;

impl Frontend for Polled {
    type Error = Infallible;

    fn poll(&mut self, _now: Instant, _budget: &mut Budget) -> bool {
        false
    }

    fn complete(&mut self, _completion: Completion) {}

    fn in_flight(&self) -> usize {
        0
    }

    fn must_poll(&self) -> bool {
        true
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn flush(&mut self) {}

    fn is_drained(&self) -> bool {
        true
    }
}

fn pin_to_first_processor() {
    let mut one = CpuSet::new();
    let all = sched_getaffinity(None).unwrap();
    let first = (0..CpuSet::MAX_CPU).find(|&cpu| all.is_set(cpu));
    one.set(first.unwrap());
    sched_setaffinity(None, &one).unwrap();
}

/// A worker that is always polled has no sleep but its naps beside other threads.
#[test]
fn naps_beside_other_threads_count_as_sleep() {
    let handle = Handle::new().unwrap();
    let of_thread = handle.clone();
    let began = Instant::now();
    let thread = std::thread::spawn(move || {
        pin_to_first_processor();
        let options = Options {
            idle_window: IdleWindow::Fixed(Duration::from_secs(3600)),
            shares_cpu: true,
            ..Options::default()
        };
        let io = Rc::new(Io::new(IoOptions::default()));
        let mut worker = Worker::new(io, &of_thread, options).unwrap();
        worker.add(|_| Ok::<_, Infallible>(Polled)).unwrap();
        worker.run().unwrap();
    });
    let is_over = Arc::new(AtomicBool::new(false));
    let of_rival = is_over.clone();
    let rival = std::thread::spawn(move || {
        pin_to_first_processor();
        while !of_rival.load(Ordering::SeqCst) {
            std::hint::spin_loop();
        }
    });
    while handle.load().asleep() < Duration::from_millis(20) {
        assert!(began.elapsed() < TIMEOUT, "no nap is counted");
        assert!(!thread.is_finished(), "the worker has ended");
        std::thread::sleep(Duration::from_millis(1));
    }
    handle.post(Worker::stop);
    thread.join().unwrap();
    is_over.store(true, Ordering::SeqCst);
    rival.join().unwrap();
}
