//! Many front-ends of which one is busy: the others are not looked at, and found when something
//! comes for them, in whatever way.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

use rustix::event::{EventfdFlags, eventfd};
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use volume::{Budget, Completion, Io, IoOptions};
use worker::{Context, Frontend, Handle, Interest, Options, Worker};

const TIMEOUT: Duration = Duration::from_secs(60);
const IDLE: usize = 40;

/// What the test knows of a front-end, and does to it.
#[derive(Default)]
struct Disk {
    /// Commands that its guest has submitted.
    submitted: AtomicU64,
    done: AtomicU64,
    looks: AtomicU64,
    /// A submission is to be announced.
    armed: AtomicBool,
    /// Microseconds from the next arming on to its deadline; none: 0.
    due: AtomicU64,
}

impl Disk {
    /// A guest that uses no barrier beside a controller that may just be arming: it announces too
    /// often. `true` when it has to.
    fn submit(&self) -> bool {
        self.submitted.fetch_add(1, Ordering::SeqCst);
        self.armed.load(Ordering::SeqCst)
    }
}

struct Front {
    disk: Arc<Disk>,
    /// Always has work.
    busy: bool,
    rings: Arc<OwnedFd>,
    deadline: Option<Instant>,
}

impl Frontend for Front {
    type Error = Infallible;

    fn poll(&mut self, _now: Instant, budget: &mut Budget) -> bool {
        self.disk.looks.fetch_add(1, Ordering::Relaxed);
        let submitted = self.disk.submitted.load(Ordering::SeqCst);
        let expired = self.deadline.take_if(|at| *at <= Instant::now());
        let found = self.disk.done.swap(submitted, Ordering::SeqCst) != submitted;
        if found {
            self.disk.armed.store(false, Ordering::SeqCst);
        }
        if expired.is_some() {
            self.disk.due.store(0, Ordering::SeqCst);
        }
        budget.spend(u32::from(self.busy));
        self.busy || found || expired.is_some()
    }

    fn complete(&mut self, _completion: Completion) {}

    fn in_flight(&self) -> usize {
        0
    }

    fn arm(&mut self) -> bool {
        self.disk.armed.store(true, Ordering::SeqCst);
        let due = self.disk.due.load(Ordering::SeqCst);
        self.deadline = (due > 0).then(|| Instant::now() + Duration::from_micros(due));
        self.disk.submitted.load(Ordering::SeqCst) != self.disk.done.load(Ordering::SeqCst)
    }

    fn needs_recheck(&self) -> bool {
        true
    }

    fn recheck(&mut self) -> bool {
        self.disk.submitted.load(Ordering::SeqCst) != self.disk.done.load(Ordering::SeqCst)
    }

    fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    fn ready(&mut self, _token: u32) {
        rustix::io::read(&self.rings, &mut [0; 8]).unwrap();
    }

    fn flush(&mut self) {}

    fn is_drained(&self) -> bool {
        true
    }
}

struct World {
    handle: Handle<Front>,
    disks: Vec<(Arc<Disk>, Arc<OwnedFd>)>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl World {
    /// Front-ends of which the first one always has work.
    fn begin(prepare: impl Fn(usize, &Disk)) -> Self {
        let handle = Handle::new().unwrap();
        let disks: Vec<_> = (0..=IDLE)
            .map(|at| {
                let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
                let disk = Arc::<Disk>::default();
                prepare(at, &disk);
                (disk, Arc::new(eventfd(0, flags).unwrap()))
            })
            .collect();
        let (of_thread, worker_disks) = (handle.clone(), disks.clone());
        let thread = std::thread::spawn(move || {
            let io = Rc::new(Io::new(IoOptions::default()));
            let options = Options {
                shares_cpu: true,
                ..Options::default()
            };
            let mut worker = Worker::new(io, &of_thread, options).unwrap();
            for (at, (disk, rings)) in worker_disks.into_iter().enumerate() {
                let make = |context: &Context<'_>| {
                    context
                        .descriptors
                        .add(&rings, 1, Interest::Readable)
                        .unwrap();
                    Ok::<_, Infallible>(Front {
                        disk,
                        busy: at == 0,
                        rings: rings.clone(),
                        deadline: None,
                    })
                };
                worker.add(make).unwrap();
            }
            worker.run().unwrap();
        });
        World {
            handle,
            disks,
            thread: Some(thread),
        }
    }

    fn looks(&self) -> Vec<u64> {
        let looks = |(disk, _): &(Arc<Disk>, _)| disk.looks.load(Ordering::Relaxed);
        self.disks.iter().map(looks).collect()
    }

    /// Those that a busy worker has not looked at for many rounds.
    fn armed(&self) -> Vec<usize> {
        let before = self.looks();
        wait_for(|| self.looks()[0] > before[0] + 2000);
        let after = self.looks();
        (1..=IDLE).filter(|&at| before[at] == after[at]).collect()
    }

    /// Waits until most are armed.
    fn lull(&self) -> Vec<usize> {
        let mut armed = Vec::new();
        wait_for(|| {
            armed = self.armed();
            armed.len() >= IDLE - 8
        });
        armed
    }

    fn is_done(&self, at: usize) -> bool {
        let disk = &self.disks[at].0;
        disk.submitted.load(Ordering::SeqCst) == disk.done.load(Ordering::SeqCst)
    }

    fn announce(&self, at: usize) {
        rustix::io::write(&self.disks[at].1, &1u64.to_ne_bytes()).unwrap();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.handle.post(Worker::stop);
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.unwrap();
        }
    }
}

fn wait_for(mut what: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !what() {
        assert!(begun.elapsed() < TIMEOUT, "it never happens");
        std::thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn most_idle_front_ends_are_not_looked_at() {
    let world = World::begin(|_, _| ());
    assert!(world.lull().len() >= IDLE - 8);
}

#[test]
fn a_ring_wakes_the_one_that_is_rung_for() {
    let world = World::begin(|_, _| ());
    for at in world.lull() {
        assert!(world.disks[at].0.submit(), "{at} has no EventIdx");
        world.announce(at);
        wait_for(|| world.is_done(at));
    }
}

#[test]
fn a_wake_flag_has_all_of_them_looked_at() {
    let world = World::begin(|_, _| ());
    let armed = world.lull();
    for &at in &armed {
        world.disks[at].0.submit();
    }
    // Not announced: another thread says that there is something to be looked for.
    world.handle.waker().wake();
    wait_for(|| armed.iter().all(|&at| world.is_done(at)));
}

#[test]
fn a_deadline_wakes() {
    let world = World::begin(|_, disk| disk.due.store(50_000, Ordering::SeqCst));
    // Those that are still looked at need not be armed for it.
    wait_for(|| {
        let woken = |(disk, _): &&(Arc<Disk>, _)| disk.due.load(Ordering::SeqCst) == 0;
        world.disks.iter().filter(woken).count() >= IDLE - 8
    });
}

/// Guests that submit at any moment, while front-ends are being armed: no command is lost.
#[test]
fn what_comes_while_one_is_being_armed_is_found() {
    let world = World::begin(|_, _| ());
    let mut state = 88_172_645_463_325_252u64;
    let end = Instant::now() + Duration::from_millis(1500);
    while Instant::now() < end {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let at = 1 + (state % IDLE as u64) as usize;
        if world.disks[at].0.submit() {
            world.announce(at);
        }
        wait_for(|| world.is_done(at));
        std::thread::sleep(Duration::from_micros(state >> 32 & 0xfff));
    }
}
