//! A worker that shares its processor sleeps at once while threads work on all that is in flight.

use std::convert::Infallible;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use volume::{Budget, Completion, Io, IoOptions, SleepHint};
use worker::{Context, Frontend, Handle, IdleWindow, Options, Worker};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Looks of a worker that polls on.
const POLLS: u64 = 100_000;
/// A disk with nothing in flight has work at one look of so many, which it does at once.
const NOW_AND_THEN: u64 = 16;

/// A disk with requests in flight that nothing ever completes, or one that is busy without any.
#[derive(Default)]
struct Disk {
    in_flight: AtomicUsize,
    /// How many of them threads of this host work on.
    hinted: AtomicUsize,
    looks: AtomicU64,
    arms: AtomicU64,
}

struct Front {
    disk: Arc<Disk>,
    sleep_hint: SleepHint,
}

impl Frontend for Front {
    type Error = Infallible;

    fn poll(&mut self, _now: Instant, _budget: &mut Budget) -> bool {
        self.sleep_hint.set(self.disk.hinted.load(Ordering::SeqCst));
        let look = self.disk.looks.fetch_add(1, Ordering::SeqCst);
        self.in_flight() == 0 && look.is_multiple_of(NOW_AND_THEN)
    }

    fn complete(&mut self, _completion: Completion) {}

    fn in_flight(&self) -> usize {
        self.disk.in_flight.load(Ordering::SeqCst)
    }

    fn arm(&mut self) -> bool {
        self.disk.arms.fetch_add(1, Ordering::SeqCst);
        false
    }

    fn flush(&mut self) {}

    fn is_drained(&self) -> bool {
        true
    }
}

/// Whether a worker with these front-ends sleeps, each with requests in flight and some of them
/// with threads; its idle window has no end.
fn sleeps(shares_cpu: bool, fronts: &[(usize, usize)]) -> bool {
    let handle = Handle::new().unwrap();
    let disks: Vec<Arc<Disk>> = fronts
        .iter()
        .map(|&(in_flight, hinted)| {
            Arc::new(Disk {
                in_flight: in_flight.into(),
                hinted: hinted.into(),
                ..Disk::default()
            })
        })
        .collect();
    let (of_thread, of_worker) = (handle.clone(), disks.clone());
    let thread = std::thread::spawn(move || {
        let options = Options {
            idle_window: IdleWindow::Fixed(Duration::from_secs(3600)),
            shares_cpu,
            ..Options::default()
        };
        let io = Rc::new(Io::new(IoOptions::default()));
        let mut worker = Worker::new(io, &of_thread, options).unwrap();
        for disk in of_worker {
            let make = |context: &Context<'_>| {
                Ok::<_, Infallible>(Front {
                    disk,
                    sleep_hint: context.io.sleep_hint(),
                })
            };
            worker.add(make).unwrap();
        }
        worker.run().unwrap();
    });
    let began = Instant::now();
    let slept = loop {
        if disks
            .iter()
            .any(|disk| disk.arms.load(Ordering::SeqCst) > 0)
        {
            break true;
        }
        if disks
            .iter()
            .any(|disk| disk.looks.load(Ordering::SeqCst) > POLLS)
        {
            break false;
        }
        assert!(began.elapsed() < TIMEOUT, "it neither polls nor sleeps");
        std::thread::yield_now();
    };
    handle.post(Worker::stop);
    thread.join().unwrap();
    slept
}

#[test]
fn requests_on_threads_are_awaited_asleep() {
    assert!(sleeps(true, &[(3, 3)]));
    assert!(sleeps(true, &[(1, 1), (2, 2)]));
}

#[test]
fn other_requests_are_polled_for() {
    assert!(!sleeps(true, &[(3, 0)]), "nothing is with threads");
    assert!(!sleeps(true, &[(3, 2)]), "one is not with threads");
    assert!(!sleeps(true, &[(1, 1), (1, 0)]), "another disk's is not");
    assert!(
        !sleeps(true, &[(2, 2), (0, 0)]),
        "another disk waits for its guest"
    );
    assert!(!sleeps(false, &[(3, 3)]), "the processor is its own");
}
