//! The worker: one thread that owns controllers, their clients' sockets and the ring of their volumes, and serves them
//! all from one loop. While there is work it polls; after an idle window it arms every doorbell and sleeps in the kernel.

use crate::balance::{Balance, Spread};
use crate::device::{NvmeDevice, Waiting};
use crate::peers::{Meter, Peers};
use crate::window::{IdleWindow, Window};
use anyhow::{Context, Result};
use controller::{Bell, Branch, Controller, tag_owner};
use driver::NvmeVolume;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vfio_user::{Connection, ConnectionError, Interest, Listener, Status};
use volume::Io;

/// Time between two looks at the sockets while polling: a system call each.
const LOOK_INTERVAL: Duration = Duration::from_micros(100);
/// Rounds between them where commands may be announced by message.
const ROUNDS_PER_LOOK: u32 = 16;
/// Rounds between two looks at the clock while polling. A round without work takes some tens of nanoseconds.
const ROUNDS_PER_CLOCK: u32 = 16;
/// Rounds without work between two offers to let another thread run, where the worker has no CPU of its own.
const ROUNDS_PER_YIELD: u32 = 16;
/// Descriptors handled after one wait.
const EVENTS: usize = 64;
/// Pause before the last look at the doorbells, for hosts without a barrier between shadow store and EventIdx load: a
/// store leaves a CPU's store buffer within this time.
const RECHECK_PAUSE: Duration = Duration::from_micros(5);
/// How long volumes may take to make everything durable when the process is asked to end.
const FLUSH_LIMIT: Duration = Duration::from_secs(60);

const TOKEN_STOP: u64 = 0;
const TOKEN_RING: u64 = 1;
/// Completions that do not come through the ring.
const TOKEN_OTHERS: u64 = 2;
const TOKEN_SIZES: u64 = 3;
const TOKEN_BELL: u64 = 4;
const TOKEN_FIRST: u64 = 5;

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
    completions: Vec<volume::Completion>,
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
            });
        }
        Ok(worker)
    }

    fn watch(&self, fd: BorrowedFd<'_>, token: u64, flags: epoll::EventFlags) -> Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), flags).context("epoll")
    }

    /// `sizes` becomes readable when a volume has been resized.
    pub fn watch_sizes(&mut self, sizes: Arc<OwnedFd>) -> Result<()> {
        self.watch(sizes.as_fd(), TOKEN_SIZES, epoll::EventFlags::IN)?;
        self.sizes = Some(sizes);
        Ok(())
    }

    fn check_sizes(&mut self) {
        if let Some(sizes) = &self.sizes {
            let _ = rustix::io::read(sizes, &mut [0; 8]);
        }
        for slot in &mut self.slots {
            slot.device.controller.check_sizes();
        }
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
                if !worked && self.shares_cpu && rounds.is_multiple_of(ROUNDS_PER_YIELD) {
                    rustix::thread::sched_yield();
                } else {
                    std::hint::spin_loop();
                }
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

    /// What is done now and then: queues go from worker to worker.
    fn tend(&mut self, now: Instant) {
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
        let mut worked = self.bell.take() && self.hear();
        for slot in &mut self.slots {
            worked |= slot.device.controller.poll(now);
        }
        for branch in &mut self.branches {
            worked |= branch.poll(now);
        }
        self.io.flush();
        let completions = &mut self.completions;
        self.io.poll(&mut |completion| completions.push(completion));
        for slot in &mut self.slots {
            slot.device.controller.poll_volumes(completions);
        }
        for branch in &mut self.branches {
            branch.poll_volumes(completions);
        }
        worked |= !self.completions.is_empty();
        for completion in self.completions.drain(..) {
            let owner = tag_owner(completion.tag);
            if let Some(slot) = self.slots.get_mut(usize::from(owner)) {
                slot.device.controller.complete(completion);
            } else if let Some(branch) = owner.checked_sub(FIRST_BRANCH)
                && let Some(branch) = self.branches.get_mut(usize::from(branch))
            {
                branch.complete(completion);
            }
        }
        for i in 0..self.slots.len() {
            worked |= self.finish_waiting(i);
        }
        worked
    }

    /// Answers a VMM that waits for an unmap or a reset, once that is over.
    fn finish_waiting(&mut self, index: usize) -> bool {
        let Some(slot) = self.slots.get_mut(index) else {
            return false;
        };
        if !slot.device.wait_is_over() {
            return false;
        }
        slot.device.waiting = Waiting::No;
        let Some(connection) = &mut slot.connection else {
            return false;
        };
        let status = connection.complete(&mut slot.device, Ok(()));
        self.after(index, status);
        true
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

    fn deadline(&self) -> Option<Instant> {
        self.slots
            .iter()
            .filter_map(|s| s.device.controller.deadline())
            .chain(self.branches.iter().filter_map(Branch::deadline))
            .min()
    }

    /// Arms everything that can wake this thread. `false` when something arrived meanwhile.
    fn prepare_sleep(&mut self) -> bool {
        // First, so that who rings after the looks below wakes this thread.
        let mut raced = self.bell.doze();
        let mut shadowed = false;
        for branch in &mut self.branches {
            raced |= branch.arm();
            shadowed |= branch.shadowed();
        }
        for slot in &mut self.slots {
            raced |= slot.device.controller.arm();
            shadowed |= slot.device.controller.shadowed();
        }
        if !self.ring_watched
            && let Some(fd) = self.io.event_fd()
        {
            match epoll::add(
                &self.epoll,
                fd,
                epoll::EventData::new_u64(TOKEN_RING),
                epoll::EventFlags::IN,
            ) {
                Ok(()) => self.ring_watched = true,
                Err(error) => {
                    tracing::warn!(%error, "the ring's completions cannot be waited for; polling")
                }
            }
        }
        if !self.others_watched
            && let Some(fd) = self.io.others_fd()
        {
            let data = epoll::EventData::new_u64(TOKEN_OTHERS);
            match epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN) {
                Ok(()) => self.others_watched = true,
                Err(error) => {
                    tracing::warn!(%error, "a device's completions cannot be waited for; polling");
                    raced |= self.slots.iter().any(|s| s.device.controller.is_busy())
                        || self.branches.iter().any(Branch::is_busy);
                }
            }
        }
        raced |= !self.io.arm() || (self.io.in_flight() > 0 && !self.ring_watched);
        if raced {
            return false;
        }
        if shadowed {
            let armed = Instant::now();
            loop {
                let over = armed.elapsed() >= RECHECK_PAUSE;
                for slot in &mut self.slots {
                    raced |= slot.device.controller.recheck();
                }
                for branch in &mut self.branches {
                    raced |= branch.recheck();
                }
                if raced || over {
                    break;
                }
                std::hint::spin_loop();
            }
        }
        !raced
    }

    /// Waits for the sockets, the ring and the end, and handles what is ready. `true` when the process is to end.
    fn look(&mut self, timeout: Option<Duration>) -> Result<bool> {
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; EVENTS];
        let timeout = timeout.map(|t| Timespec {
            tv_sec: t.as_secs() as i64,
            tv_nsec: i64::from(t.subsec_nanos()) as _,
        });
        let ready = match epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()) {
            Ok((ready, _)) => ready,
            Err(rustix::io::Errno::INTR) => return Ok(false),
            Err(error) => return Err(error).context("epoll"),
        };
        let mut tokens = [0; EVENTS];
        let count = ready.len();
        for (token, event) in tokens.iter_mut().zip(ready) {
            *token = event.data.u64();
        }
        for slot in 0..self.slots.len() {
            if self
                .slots
                .get_mut(slot)
                .is_some_and(|s| std::mem::take(&mut s.more))
            {
                self.serve(slot);
            }
        }
        for &token in tokens.iter().take(count) {
            match token {
                TOKEN_STOP => return Ok(true),
                TOKEN_RING | TOKEN_OTHERS => {}
                TOKEN_SIZES => self.check_sizes(),
                TOKEN_BELL => self.peers.woken(self.index),
                _ => {
                    let index = ((token - TOKEN_FIRST) / 2) as usize;
                    if (token - TOKEN_FIRST).is_multiple_of(2) {
                        self.accept(index)
                    } else {
                        self.serve(index)
                    }
                }
            }
        }
        Ok(false)
    }

    fn accept(&mut self, index: usize) {
        // The old client may be gone without our having noticed yet.
        self.serve(index);
        self.let_go_if_gone(index);
        let Some(slot) = self.slots.get_mut(index) else {
            return;
        };
        let socket = slot.listener.path().display().to_string();
        let fd = match slot.listener.accept() {
            Ok(Some(fd)) => fd,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(socket, %error, "accept");
                return;
            }
        };
        if slot.connection.is_some() {
            tracing::warn!(
                socket,
                "a second client was refused: this disk has one already"
            );
            return;
        }
        let connection = Connection::new(fd);
        let pid = connection.peer().ok().map(|p| p.pid.as_raw_nonzero().get());
        tracing::info!(socket, pid, "client connected");
        slot.connection = Some(connection);
        self.rewatch(index);
    }

    /// Ends the connection of a client that has closed its socket: what it left there is handled first, but nothing is
    /// waited for.
    fn let_go_if_gone(&mut self, index: usize) {
        let gone = |slot: &Slot| {
            let Some(connection) = &slot.connection else {
                return false;
            };
            let mut fds = [PollFd::new(connection, PollFlags::empty())];
            poll(&mut fds, Some(&Timespec::default())).is_ok()
                && fds[0].revents().contains(PollFlags::HUP)
        };
        if !self.slots.get(index).is_some_and(gone) {
            return;
        }
        // It cannot send more, so this ends.
        while let Some(slot) = self.slots.get_mut(index)
            && std::mem::take(&mut slot.more)
        {
            self.serve(index);
        }
        if let Some(slot) = self.slots.get_mut(index)
            && let Some(mut connection) = slot.connection.take()
        {
            tracing::info!(socket = %slot.listener.path().display(), "client disconnected");
            connection.close(&mut slot.device);
            drop(connection);
            self.rewatch(index);
        }
    }

    fn serve(&mut self, index: usize) {
        let Some(Slot {
            connection: Some(connection),
            device,
            ..
        }) = self.slots.get_mut(index)
        else {
            return;
        };
        let status = connection.on_ready(device);
        self.after(index, status);
    }

    fn after(&mut self, index: usize, status: Result<Status, ConnectionError>) {
        let Some(slot) = self.slots.get_mut(index) else {
            return;
        };
        let socket = slot.listener.path().display();
        match status {
            Ok(Status::Open | Status::Pending) => {}
            Ok(Status::MoreWork) => slot.more = true,
            Ok(Status::Closed) => {
                tracing::info!(%socket, "client disconnected");
                slot.connection = None;
            }
            Err(error) => {
                tracing::warn!(%socket, %error, "client disconnected");
                slot.connection = None;
            }
        }
        self.rewatch(index);
    }

    /// Keeps the epoll set in step with what the connection waits for.
    fn rewatch(&mut self, index: usize) {
        let Some(slot) = self.slots.get_mut(index) else {
            return;
        };
        let Some(connection) = &slot.connection else {
            // Closing its socket took it out of the set.
            slot.watched = Interest::None;
            slot.more = false;
            return;
        };
        let wanted = connection.interest();
        if wanted == slot.watched {
            return;
        }
        let data = epoll::EventData::new_u64(listener_token(index) + 1);
        let flags = match wanted {
            Interest::Writable => epoll::EventFlags::OUT,
            _ => epoll::EventFlags::IN,
        };
        let result = match (slot.watched, wanted) {
            (_, Interest::None) => epoll::delete(&self.epoll, connection),
            (Interest::None, _) => epoll::add(&self.epoll, connection, data, flags),
            _ => epoll::modify(&self.epoll, connection, data, flags),
        };
        match result {
            Ok(()) => slot.watched = wanted,
            Err(error) => tracing::error!(%error, "epoll"),
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

fn listener_token(index: usize) -> u64 {
    TOKEN_FIRST + 2 * index as u64
}
