//! The worker: one thread that owns controllers, their clients' sockets and the ring of their volumes, and serves them
//! all from one loop. While there is work it polls; after an idle window it arms every doorbell and sleeps in the kernel.

mod clients;
mod events;
mod sleep;

use crate::balance::{Balance, Spread};
use crate::device::NvmeDevice;
use crate::peers::{Meter, Peers};
use crate::window::{IdleWindow, Window};
use anyhow::{Context, Result};
use controller::{Bell, Branch, Controller, tag_owner};
use driver::NvmeVolume;
use events::{TOKEN_BELL, TOKEN_STOP, listener_token};
use probes::LogLimit;
use rustix::event::epoll;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vfio_user::{Connection, Interest, Listener};
use volume::{Io, PinPace};

/// Time between two looks at the sockets while polling: a system call each.
const LOOK_INTERVAL: Duration = Duration::from_micros(100);
/// Rounds between them where commands may be announced by message.
const ROUNDS_PER_LOOK: u32 = 8;
/// Rounds between two looks at the clock while polling. A round without work takes some tens of nanoseconds, and what is
/// between two as long again.
const ROUNDS_PER_CLOCK: u32 = 8;
/// Short looks at a controller between two rounds without work; fewer where there are several.
const GLANCES: u32 = 6;
/// Rounds without work between two offers to let another thread run, where the worker has no CPU of its own.
const ROUNDS_PER_YIELD: u32 = 8;
/// How long volumes may take to make everything durable when the process is asked to end.
const FLUSH_LIMIT: Duration = Duration::from_secs(60);

/// In the tags of volume requests, branches have numbers from here on.
const FIRST_BRANCH: u16 = 0x8000;
/// Time between two calls for the homes of the queues that a busy worker has.
const CALL_INTERVAL: Duration = Duration::from_millis(250);

/// A controller and the socket that it is served on.
pub struct Served {
    pub controller: Controller,
    pub listener: Listener,
    /// Devices below it, which reach guest memory themselves.
    pub backends: Vec<Arc<NvmeVolume>>,
    /// What becomes of its queues.
    pub spread: Spread,
}

struct Slot {
    device: NvmeDevice,
    balance: Balance,
    listener: Listener,
    connection: Option<Connection>,
    /// What the socket is in the epoll set for.
    watched: Interest,
    /// The connection's budget was used up: there is more to read.
    more: bool,
    /// For the log lines that clients cause by coming and going.
    log: LogLimit,
}

/// How a worker polls and sleeps.
#[derive(Clone, Copy, Debug)]
pub struct WorkerOptions {
    /// How long polling goes on after the last work.
    pub idle_window: IdleWindow,
    /// The worker has no CPU of its own: while it polls in vain, others that want to run are let on now and then. It may be
    /// they that the next work is waiting for: a VMM's thread that hands on an interrupt.
    pub shares_cpu: bool,
    /// Its number among the workers.
    pub index: usize,
}

pub struct Worker {
    slots: Vec<Slot>,
    /// Queues of other workers' controllers.
    branches: Vec<Branch>,
    index: usize,
    peers: Arc<Peers>,
    bell: Arc<Bell>,
    meter: Meter,
    /// When the branches' homes are called next.
    next_call: Instant,
    io: Io,
    epoll: OwnedFd,
    /// Readable when the process is asked to end.
    stop: OwnedFd,
    /// Readable when a volume has been resized.
    sizes: Option<Arc<OwnedFd>>,
    ring_watched: bool,
    others_watched: bool,
    window: Window,
    shares_cpu: bool,
    /// Of guest memory that is being pinned.
    pace: PinPace,
    completions: Vec<volume::Completion>,
}

/// A request is over: whoever started it is told.
#[inline]
fn complete(slots: &mut [Slot], branches: &mut [Branch], completion: volume::Completion) {
    let owner = tag_owner(completion.tag);
    if let Some(slot) = slots.get_mut(usize::from(owner)) {
        slot.device.controller.complete(completion);
    } else if let Some(branch) = owner.checked_sub(FIRST_BRANCH)
        && let Some(branch) = branches.get_mut(usize::from(branch))
    {
        branch.complete(completion);
    }
}

impl Worker {
    /// `served` in the order of their ids; `io` is the one that their volumes were opened on. The worker ends when `stop`
    /// becomes readable.
    pub fn new(
        served: Vec<Served>,
        io: Io,
        stop: OwnedFd,
        options: WorkerOptions,
        peers: &Arc<Peers>,
    ) -> Result<Self> {
        let index = options.index;
        let bell = peers.bell(index).context("a worker without a bell")?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("epoll")?;
        let mut worker = Worker {
            slots: Vec::new(),
            branches: Vec::new(),
            index,
            peers: peers.clone(),
            bell: bell.clone(),
            meter: Meter::new(Instant::now()),
            next_call: Instant::now(),
            io,
            epoll,
            stop,
            sizes: None,
            ring_watched: false,
            others_watched: false,
            window: Window::new(options.idle_window),
            shares_cpu: options.shares_cpu,
            pace: PinPace::default(),
            completions: Vec::with_capacity(1024),
        };
        worker.watch(worker.stop.as_fd(), TOKEN_STOP, epoll::EventFlags::IN)?;
        if let Some(wake) = peers.wake_fd(index) {
            worker.watch(wake, TOKEN_BELL, epoll::EventFlags::IN)?;
        }
        for (
            i,
            Served {
                mut controller,
                listener,
                backends,
                spread,
            },
        ) in served.into_iter().enumerate()
        {
            worker.watch(listener.as_fd(), listener_token(i), epoll::EventFlags::IN)?;
            controller.set_home(index as u16, bell.clone());
            peers.enter(controller.stats());
            let balance = Balance::new(spread, index, peers.clone(), &controller);
            let mut device = NvmeDevice::new(controller, backends);
            device.set_pinner(worker.io.pinner());
            worker.slots.push(Slot {
                balance,
                device,
                listener,
                connection: None,
                watched: Interest::None,
                more: false,
                log: LogLimit::default(),
            });
        }
        Ok(worker)
    }

    /// Serves until asked to end, then makes everything durable.
    pub fn run(&mut self) -> Result<()> {
        let mut now = Instant::now();
        let mut last_work = now;
        let mut slept = false;
        let mut last_look = now;
        let mut rounds = 0u32;
        loop {
            rounds = rounds.wrapping_add(1);
            let mut due = false;
            if rounds.is_multiple_of(ROUNDS_PER_CLOCK) {
                now = Instant::now();
                due = now.duration_since(last_look) >= LOOK_INTERVAL;
                self.meter.tick(now, self.index, &self.peers);
                if due {
                    self.tend(now);
                }
            }
            let worked = self.round(now);
            self.meter.round(worked);
            if worked {
                if std::mem::take(&mut slept) {
                    self.window.woken(now.duration_since(last_work));
                }
                last_work = now;
            }
            if worked || self.must_poll() || now.duration_since(last_work) < self.window() {
                due |= self.slots.iter().any(|s| s.more);
                due |= rounds.is_multiple_of(ROUNDS_PER_LOOK) && self.any_trapped();
                if due {
                    last_look = now;
                    if self.look(Some(Duration::ZERO))? {
                        break;
                    }
                }
                if worked {
                    continue;
                }
                if self.shares_cpu && rounds.is_multiple_of(ROUNDS_PER_YIELD) {
                    rustix::thread::sched_yield();
                }
                self.glance();
                continue;
            }
            if self.prepare_sleep() {
                let asleep = Instant::now();
                self.meter.tick(asleep, self.index, &self.peers);
                let timeout = self.deadline().map(|d| d.saturating_duration_since(asleep));
                if self.look(timeout)? {
                    break;
                }
                slept = true;
            }
            self.bell.awake();
            now = Instant::now();
            if slept {
                self.meter.skip(now);
                self.tend(now);
            }
        }
        self.finish()
    }

    /// A moment between two rounds without work, with an eye on what comes most often and hurries most: doorbells of queues
    /// that were busy lately, and completions of the ring. A round takes several times as long as one such look.
    fn glance(&self) {
        let controllers = || self.slots.iter().map(|s| &s.device.controller);
        let in_flight = controllers().map(Controller::in_flight).sum::<usize>()
            + self.branches.iter().map(Branch::in_flight).sum::<usize>();
        let glances = if in_flight > self.io.in_flight() {
            // Some are not in the ring: only rounds find what a device below has completed, polled or not, and what waits for
            // its time.
            1
        } else {
            // So that many controllers do not keep each other from their rounds.
            GLANCES.div_ceil((self.slots.len() + self.branches.len()).max(1) as u32)
        };
        for _ in 0..glances {
            std::hint::spin_loop();
            if self.io.has_news()
                || controllers().any(Controller::has_news)
                || self.branches.iter().any(Branch::has_news)
            {
                return;
            }
        }
    }

    /// Clients that do not use shadow doorbells, or not yet, announce their commands on the socket.
    fn any_trapped(&self) -> bool {
        let trapped = |s: &Slot| {
            let controller = &s.device.controller;
            s.connection.is_some()
                && !controller.shadowed()
                && !controller.config().mapped_doorbells
        };
        self.slots.iter().any(trapped)
    }

    /// Some guest's memory is not pinned yet.
    fn is_pinning(&self) -> bool {
        self.slots.iter().any(|s| s.device.is_pinning())
            || self.branches.iter().any(Branch::is_pinning)
    }

    /// Pins a piece of the first guest's memory that waits for it.
    fn pin_on(&mut self) {
        if let Some(slot) = self.slots.iter_mut().find(|s| s.device.is_pinning()) {
            slot.device.pin_on(&mut self.pace);
        } else if let Some(branch) = self.branches.iter_mut().find(|b| b.is_pinning()) {
            branch.pin_on(&mut self.pace);
        }
    }

    /// What is done now and then: guest memory is pinned, queues go from worker to worker.
    fn tend(&mut self, now: Instant) {
        if now >= self.pace.next() {
            self.pin_on();
        }
        for slot in &mut self.slots {
            slot.balance.tend(&mut slot.device.controller, now);
        }
        if self.branches.is_empty() || now < self.next_call {
            return;
        }
        self.next_call = now + CALL_INTERVAL;
        // Their homes may sleep while this worker has too much to do, and only they can move a queue.
        for branch in &self.branches {
            branch.call_home();
        }
    }

    /// Other workers have left something.
    fn hear(&mut self) -> bool {
        let mut worked = false;
        for seed in self.peers.seeds(self.index) {
            worked = true;
            let id = FIRST_BRANCH.saturating_add(self.branches.len() as u16);
            match seed.open(id, &self.io) {
                Ok(branch) => self.branches.push(branch),
                Err(error) => {
                    tracing::warn!(%error, "queues cannot go to worker {}", self.index);
                }
            }
        }
        for branch in &mut self.branches {
            worked |= branch.hear();
        }
        for slot in &mut self.slots {
            worked |= slot.device.controller.hear();
        }
        worked
    }

    /// One round over all controllers and the ring.
    fn round(&mut self, now: Instant) -> bool {
        // What is over first: its host waits for it.
        let (slots, branches) = (&mut self.slots, &mut self.branches);
        let over = self
            .io
            .poll(&mut |completion| complete(slots, branches, completion));
        let mut worked = over > 0;
        worked |= self.bell.take() && self.hear();
        for slot in &mut self.slots {
            worked |= slot.device.controller.poll(now);
        }
        for branch in &mut self.branches {
            worked |= branch.poll(now);
        }
        self.io.flush();
        for slot in &mut self.slots {
            slot.device.controller.poll_volumes(&mut self.completions);
        }
        for branch in &mut self.branches {
            branch.poll_volumes(&mut self.completions);
        }
        worked |= !self.completions.is_empty();
        for completion in self.completions.drain(..) {
            complete(&mut self.slots, &mut self.branches, completion);
        }
        for i in 0..self.slots.len() {
            worked |= self.finish_waiting(i);
        }
        worked
    }

    /// Memory is polled only where a doorbell can be found in memory, or a completion comes without a wake-up.
    fn must_poll(&self) -> bool {
        self.slots
            .iter()
            .any(|s| s.device.controller.needs_polling() || s.more)
            || self.branches.iter().any(Branch::needs_polling)
    }

    fn window(&self) -> Duration {
        let useful = self.io.in_flight() > 0
            || self.slots.iter().any(|s| {
                let controller = &s.device.controller;
                controller.shadowed() || controller.is_busy()
            })
            || self.branches.iter().any(|b| b.shadowed() || b.is_busy());
        if useful {
            self.window.get()
        } else {
            Duration::ZERO
        }
    }

    /// The process is to end: clients are let go, everything is made durable.
    fn finish(&mut self) -> Result<()> {
        tracing::info!("ending: making everything durable");
        self.io.end();
        for slot in &mut self.slots {
            slot.device.controller.flush();
        }
        // Each worker does that for what went through it.
        for branch in &mut self.branches {
            branch.flush();
        }
        let limit = Instant::now() + FLUSH_LIMIT;
        while !(self.slots.iter().all(|s| s.device.controller.is_drained())
            && self.branches.iter().all(Branch::is_drained))
        {
            self.round(Instant::now());
            anyhow::ensure!(
                Instant::now() < limit,
                "volumes did not become durable within {FLUSH_LIMIT:?}"
            );
            std::thread::sleep(Duration::from_micros(100));
        }
        for slot in &mut self.slots {
            if let Some(mut connection) = slot.connection.take() {
                connection.close(&mut slot.device);
            }
        }
        Ok(())
    }
}
