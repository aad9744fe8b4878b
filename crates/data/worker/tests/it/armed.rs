//! Many front-ends of which one is busy: the idle ones are not polled, and are found by every kind
//! of event.

use rustix::event::{EventfdFlags, eventfd};
use std::convert::Infallible;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use volume::{Armed, Budget, Completion, Inbox, Io, IoOptions};
use worker::{Context, Frontend, Handle, Interest, Options, Worker};

const TIMEOUT: Duration = Duration::from_secs(60);
const IDLE: usize = 40;

/// State of a test front-end, and the test's control over it.
#[derive(Default)]
struct Disk {
    /// Commands that its guest has submitted.
    submitted: AtomicU64,
    done: AtomicU64,
    looks: AtomicU64,
    /// A submission must be announced.
    armed: AtomicBool,
    /// Microseconds from the next arming to the deadline; 0 for none.
    due: AtomicU64,
    /// The front-end always has work, until this is cleared.
    busy: AtomicBool,
    /// The guest announces nothing, whether the front-end is armed or not.
    unannounced: AtomicBool,
    /// Inbox of messages from other threads for the volume, and the number taken.
    news: OnceLock<Arc<Inbox<()>>>,
    taken: AtomicU64,
    /// Number of times that the socket was found readable.
    rung: AtomicU64,
}

impl Disk {
    /// Submits a command. The guest uses no barrier beside a controller that may just be arming,
    /// and announces too often. Returns `true` when it must announce.
    fn submit(&self) -> bool {
        self.submitted.fetch_add(1, Ordering::SeqCst);
        self.armed.load(Ordering::SeqCst)
    }
}

struct Front {
    disk: Arc<Disk>,
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
        let busy = self.disk.busy.load(Ordering::Relaxed);
        budget.spend(u32::from(busy));
        busy || found || expired.is_some()
    }

    fn complete(&mut self, _completion: Completion) {}

    fn poll_volumes(&mut self, _out: &mut Vec<Completion>) {
        if let Some(news) = self.disk.news.get().filter(|news| news.has_news()) {
            let taken = news.take().len() as u64;
            self.disk.taken.fetch_add(taken, Ordering::SeqCst);
        }
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn is_unannounced(&self) -> bool {
        self.disk.unannounced.load(Ordering::Relaxed)
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
        self.disk.rung.fetch_add(1, Ordering::SeqCst);
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
                disk.busy.store(at == 0, Ordering::Relaxed);
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
            for (disk, rings) in worker_disks {
                let make = |context: &Context<'_>| {
                    context
                        .descriptors
                        .add(&rings, 1, Interest::Readable)
                        .unwrap();
                    disk.news.set(Inbox::new(context.io).unwrap()).ok();
                    Ok::<_, Infallible>(Front {
                        disk,
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

    /// Returns the front-ends that a busy worker has not polled for many rounds.
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

    /// Takes the work of the busy front-end away: the worker sleeps soon.
    fn rest(&self) {
        self.disks[0].0.busy.store(false, Ordering::Relaxed);
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
fn most_idle_front_ends_are_not_polled() {
    let world = World::begin(|_, _| ());
    assert!(world.lull().len() >= IDLE - 8);
}

#[test]
fn doorbell_wakes_its_front_end() {
    let world = World::begin(|_, _| ());
    for at in world.lull() {
        assert!(world.disks[at].0.submit(), "{at} has no EventIdx");
        world.announce(at);
        wait_for(|| world.is_done(at));
    }
}

#[test]
fn wake_flag_polls_all_front_ends() {
    let world = World::begin(|_, _| ());
    let armed = world.lull();
    for &at in &armed {
        world.disks[at].0.submit();
    }
    // Not announced: another thread raises the wake flag.
    world.handle.waker().wake();
    wait_for(|| armed.iter().all(|&at| world.is_done(at)));
}

#[test]
fn deadline_wakes_armed_front_end() {
    let world = World::begin(|_, disk| disk.due.store(50_000, Ordering::SeqCst));
    // Front-ends that are still polled need not be armed for the deadline.
    wait_for(|| {
        let woken = |(disk, _): &&(Arc<Disk>, _)| disk.due.load(Ordering::SeqCst) == 0;
        world.disks.iter().filter(woken).count() >= IDLE - 8
    });
}

/// A server is reachable again while nothing waits for it.
#[test]
fn news_for_idle_volume_is_taken() {
    let world = World::begin(|_, _| ());
    let armed = world.lull();
    let leave = |at: usize| world.disks[at].0.news.get().unwrap().put(());
    let is_taken = |at: usize| world.disks[at].0.taken.load(Ordering::SeqCst) == 1;
    // The message is found on the way to sleep.
    leave(armed[0]);
    world.rest();
    wait_for(|| is_taken(armed[0]));
    // The messages wake the worker.
    std::thread::sleep(Duration::from_millis(50));
    for &at in &armed[1..] {
        leave(at);
        wait_for(|| is_taken(at));
    }
}

/// An obstacle to sleep does not keep the thread from other work.
#[test]
fn volume_with_constant_news_does_not_starve_sockets() {
    let world = World::begin(|_, _| ());
    let armed = world.lull();
    world.handle.post(|worker| {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let event = eventfd(0, flags).unwrap();
        worker.io().watch(event.as_fd(), || Armed::Waiting).unwrap();
    });
    world.rest();
    std::thread::sleep(Duration::from_millis(50));
    for at in armed {
        world.announce(at);
        wait_for(|| world.disks[at].0.rung.load(Ordering::SeqCst) == 1);
    }
}

/// Guests that submit at any moment, while front-ends are being armed: no command is lost.
#[test]
fn command_during_arming_is_found() {
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

fn unannounced(_: usize, disk: &Disk) {
    disk.unannounced.store(true, Ordering::Relaxed);
}

#[test]
fn thread_sleeps_between_polls_of_unannounced_front_ends() {
    let world = World::begin(unannounced);
    world.rest();
    for round in 0..20 {
        let (asleep, wake_ups) = (world.handle.load().asleep(), world.handle.load().wake_ups());
        // Nothing but the clock ends a sleep, so polls follow each other.
        wait_for(|| {
            world.handle.load().wake_ups() > wake_ups + 2 && world.handle.load().asleep() > asleep
        });
        world.disks[1 + round].0.submit();
        wait_for(|| world.is_done(1 + round));
    }
}

#[test]
fn unannounced_commands_are_found_while_others_keep_thread_awake() {
    let world = World::begin(unannounced);
    for _ in 0..3 {
        for at in world.lull() {
            world.disks[at].0.submit();
            wait_for(|| world.is_done(at));
        }
    }
}
