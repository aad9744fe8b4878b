//! The worker's event loop.

use crate::accounts::{ALONE_UNITS, Accounts, Counter};
use crate::armed::Armed;
use crate::contention::{CpuContention, GAP};
use crate::descriptors::{Descriptors, OWN, Token};
use crate::meter::{Meter, TimeUse};
use crate::pace::Pace;
use crate::run_queue::RunQueue;
use crate::unannounced::{DEFAULT_MAX_POLL_INTERVAL, IntervalPolling};
use crate::watchdog::{Activity, Pulse};
use crate::window::IdleWindow;
use crate::{Error, Frontend, Handle};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};
use volume::{Budget, Completion, Io, PinPace};

/// Time between two checks of the sockets while polling; each check is a system call.
const LOOK_INTERVAL: Duration = Duration::from_micros(100);
/// Rounds between two checks of the sockets, while recently busy front-ends may receive commands by
/// message.
const ROUNDS_PER_LOOK: u32 = 8;
/// Rounds between two checks of the sockets, while only idle front-ends may receive commands by
/// message.
const ROUNDS_PER_IDLE_LOOK: u32 = 128;
/// Rounds between two readings of the clock while polling. A round without work takes some tens of
/// nanoseconds, and the pause between two rounds about the same.
const ROUNDS_PER_CLOCK: u32 = 8;
/// Number of short polls between two rounds without work; fewer are made with several front-ends.
const SPIN_POLLS: u32 = 6;
/// Rounds without work after which a worker without its own CPU yields to other threads.
const ROUNDS_PER_YIELD: u32 = 8;
/// Length of a nap between rounds without work, for a worker whose processor other threads want.
const YIELD_TIME: Duration = Duration::from_micros(50);
/// Maximum time without a completion while volumes make all data durable, when the worker is asked
/// to end.
const FLUSH_LIMIT: Duration = Duration::from_secs(60);
/// Pause between two rounds while the worker only waits for a flush.
const FLUSH_PAUSE: Duration = Duration::from_micros(50);
/// Maximum number of epoll events handled after one wait.
const EVENTS: usize = 64;

pub(crate) const TOKEN_STOP: u32 = 0;
pub(crate) const TOKEN_RING: u32 = 1;
/// epoll token of sources of completions other than the ring.
pub(crate) const TOKEN_OTHERS: u32 = 2;
pub(crate) const TOKEN_WAKE: u32 = 3;

/// Polling and sleeping behaviour of a worker.
#[derive(Debug, Default)]
pub struct Options {
    /// Time for which a worker polls on after the last work.
    pub idle_window: IdleWindow,
    /// Maximum interval between two polls of idle front-ends with unannounced commands
    /// ([`Frontend::is_unannounced`]); zero: such front-ends are polled without pause. `None`
    /// stands for [`DEFAULT_MAX_POLL_INTERVAL`].
    pub max_poll_interval: Option<Duration>,
    /// Whether the worker shares its CPU with other threads. While it polls without finding work,
    /// it then yields periodically. The next work may depend on another thread, for example one of
    /// a VMM that delivers an interrupt.
    pub shares_cpu: bool,
    /// Descriptor that becomes readable when the worker is to end, as an alternative to
    /// [`Worker::stop`].
    pub stop: Option<OwnedFd>,
}

/// Resources of a worker that a new front-end gets.
pub struct Context<'a> {
    /// The front-end's number on this worker: the upper 16 bits of its volume requests' tags.
    pub owner: u16,
    /// io_uring of the worker, on which the front-end opens its volumes.
    pub io: &'a Rc<Io>,
    /// Registration of the front-end's descriptors in the worker's epoll set.
    pub descriptors: Descriptors,
    /// Waker that makes the worker call [`Frontend::drain_messages`], for threads that work for the
    /// front-end.
    pub waker: Waker,
}

/// Callback that receives a removed front-end and the result of closing it.
type Removed<F> = Box<dyn FnOnce(F, Result<(), <F as Frontend>::Error>)>;

/// Slot for one front-end in the worker's list.
pub(crate) struct FrontendSlot<F: Frontend> {
    /// Number that events for the slot's present front-end carry; each new front-end gets another
    /// one.
    number: u32,
    /// Callback for the end of the front-end's removal, if it is being removed.
    pub(crate) leaving: Option<Removed<F>>,
}

/// State of the worker's loop between two turns.
pub(crate) struct LoopPosition {
    pub(crate) now: Instant,
    last_look: Instant,
    rounds: u32,
}

/// Event loop of a thread that serves front-ends. The thread itself creates it and runs it.
pub struct Worker<F: Frontend> {
    /// Front-ends by their number on the worker.
    pub(crate) fronts: Vec<Option<F>>,
    /// Slots of the front-ends, by the same number; as many as `fronts`.
    pub(crate) slots: Vec<FrontendSlot<F>>,
    /// Order in which rounds poll the front-ends.
    pub(crate) run_queue: RunQueue,
    /// State of the armed front-ends, which rounds do not poll.
    pub(crate) armed: Armed,
    /// State of polling at intervals.
    pub(crate) unannounced: IntervalPolling,
    generation: u16,
    /// Number of front-ends that are being removed.
    leaving: usize,
    pub(crate) io: Rc<Io>,
    pub(crate) epoll: Rc<OwnedFd>,
    pub(crate) handle: Handle<F>,
    stop: Option<OwnedFd>,
    stopping: bool,
    pub(crate) ring_watched: bool,
    pub(crate) others_watched: bool,
    meter: Meter,
    pace: Pace,
    crowd: CpuContention,
    shares_cpu: bool,
    /// Pace at which guest memory is pinned between rounds.
    pub(crate) pace_of_pins: PinPace,
    pub(crate) completions: Vec<Completion>,
    pub(crate) turns: LoopPosition,
    /// Time accounts by which front-ends with work share the thread.
    pub(crate) accounts: Accounts,
    /// Present activity of the worker, for the watchdog. Dropped last.
    pub(crate) pulse: OwnPulse,
}

/// A worker's pulse, which reports at the end that nothing of the worker is left.
pub(crate) struct OwnPulse(Arc<Pulse>);

impl std::ops::Deref for OwnPulse {
    type Target = Pulse;

    #[inline(always)]
    fn deref(&self) -> &Pulse {
        &self.0
    }
}

impl Drop for OwnPulse {
    fn drop(&mut self) {
        self.enter(Activity::Ended);
    }
}

impl<F: Frontend> Drop for Worker<F> {
    fn drop(&mut self) {
        self.handle.close();
        self.pulse.enter(Activity::Dropping);
    }
}

/// Delivers a completed request to its front-end.
#[inline]
pub(crate) fn complete<F: Frontend>(fronts: &mut [Option<F>], completion: Completion) {
    let owner = (completion.tag >> 48) as usize;
    if let Some(Some(front)) = fronts.get_mut(owner) {
        front.complete(completion);
    }
}

impl<F: Frontend + 'static> Worker<F> {
    /// Creates a worker without front-ends. `io` is this thread's; `handle` was made for this
    /// worker.
    ///
    /// # Errors
    /// [`Error::System`] when the kernel refuses the epoll set or a descriptor in it.
    pub fn new(io: Rc<Io>, handle: &Handle<F>, options: Options) -> Result<Self, Error<F::Error>> {
        Self::with_counter(io, handle, options, Counter::of_processor())
    }

    /// Creates a worker with a counter other than the processor's.
    pub(crate) fn with_counter(
        io: Rc<Io>,
        handle: &Handle<F>,
        options: Options,
        counter: Counter,
    ) -> Result<Self, Error<F::Error>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC);
        let now = Instant::now();
        let worker = Worker {
            fronts: Vec::new(),
            slots: Vec::new(),
            run_queue: RunQueue::default(),
            armed: Armed::default(),
            unannounced: IntervalPolling::new(
                options
                    .max_poll_interval
                    .unwrap_or(DEFAULT_MAX_POLL_INTERVAL),
                now,
            ),
            generation: 0,
            leaving: 0,
            io,
            epoll: Rc::new(epoll.map_err(Error::system("epoll_create1"))?),
            handle: handle.clone(),
            stop: options.stop,
            stopping: false,
            ring_watched: false,
            others_watched: false,
            meter: Meter::new(now),
            pace: Pace::new(options.idle_window, now),
            crowd: CpuContention::new(now),
            shares_cpu: options.shares_cpu,
            pace_of_pins: PinPace::default(),
            completions: Vec::with_capacity(1024),
            turns: LoopPosition {
                now,
                last_look: now,
                rounds: 0,
            },
            accounts: Accounts::new(counter),
            pulse: OwnPulse(handle.pulse().clone()),
        };
        if let Some(stop) = &worker.stop {
            worker.watch(stop.as_fd(), TOKEN_STOP)?;
        }
        worker.watch(handle.wake_fd(), TOKEN_WAKE)?;
        worker.handle.load().begin(now);
        worker.pulse.attach();
        Ok(worker)
    }

    /// Adds a descriptor of the worker itself to the epoll set.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, token: u32) -> Result<(), Error<F::Error>> {
        let own = Descriptors::new(self.epoll.clone(), OWN);
        let added = own.add(fd, token, crate::Interest::Readable);
        added.map_err(Error::system("epoll_ctl"))
    }

    /// Creates a front-end and serves it from now on. Returns its owner number, which stays the
    /// same.
    ///
    /// # Errors
    /// The error of `make`. With 65,535 front-ends no number is left, and the result is `Ok(None)`
    /// without a call of `make`.
    pub fn add<E>(
        &mut self,
        make: impl FnOnce(&Context<'_>) -> Result<F, E>,
    ) -> Result<Option<u16>, E> {
        let vacant = self.fronts.iter().position(Option::is_none);
        let at = vacant.unwrap_or(self.fronts.len());
        let Ok(owner) = u16::try_from(at) else {
            return Ok(None);
        };
        self.generation = self.generation.wrapping_add(1) & 0x7fff;
        let number = u32::from(self.generation) << 16 | u32::from(owner);
        self.handle.forget_name(owner);
        let front = make(&Context {
            owner,
            io: &self.io,
            descriptors: Descriptors::new(self.epoll.clone(), number),
            waker: self.handle.waker(),
        })?;
        let slot = FrontendSlot {
            number,
            leaving: None,
        };
        match (self.fronts.get_mut(at), self.slots.get_mut(at)) {
            (Some(empty), Some(old)) => {
                *empty = Some(front);
                *old = slot;
            }
            _ => {
                self.fronts.push(Some(front));
                self.slots.push(slot);
            }
        }
        self.accounts.open(at);
        self.run_queue.insert(owner);
        Ok(Some(owner))
    }

    /// Removes a front-end: it fetches nothing more, completes outstanding requests, makes all data
    /// durable, and is closed. Rounds continue meanwhile. `removed` then receives the front-end on
    /// this thread, and can hand an expensive drop to another one. Returns `false` when there is no
    /// front-end of this number, or its removal has begun.
    pub fn remove(
        &mut self,
        owner: u16,
        removed: impl FnOnce(F, Result<(), F::Error>) + 'static,
    ) -> bool {
        let at = usize::from(owner);
        let (Some(Some(front)), Some(slot)) = (self.fronts.get_mut(at), self.slots.get_mut(at))
        else {
            return false;
        };
        if slot.leaving.is_some() {
            return false;
        }
        slot.leaving = Some(Box::new(removed));
        front.flush();
        self.leaving += 1;
        self.run_queue.wake(owner);
        true
    }

    /// Returns the front-ends that the worker serves, with their numbers.
    pub fn fronts(&mut self) -> impl Iterator<Item = (u16, &mut F)> {
        // The caller may change any of them, so rounds must poll all.
        self.run_queue.wake_all();
        let owners = 0..=u16::MAX;
        let fronts = owners.zip(&mut self.fronts);
        fronts.filter_map(|(owner, front)| Some((owner, front.as_mut()?)))
    }

    /// Returns a reference to the front-end with the number `owner`.
    #[inline]
    pub fn front(&self, owner: u16) -> Option<&F> {
        self.fronts.get(usize::from(owner))?.as_ref()
    }

    /// Returns a mutable reference to the front-end with the number `owner`.
    #[inline]
    pub fn front_mut(&mut self, owner: u16) -> Option<&mut F> {
        self.run_queue.wake(owner);
        self.fronts.get_mut(usize::from(owner))?.as_mut()
    }

    /// Returns the worker's handle for other threads.
    pub fn handle(&self) -> &Handle<F> {
        &self.handle
    }

    /// Returns the io_uring on which all volumes of the worker are opened.
    pub fn io(&self) -> &Rc<Io> {
        &self.io
    }

    /// Ends the worker after the current turn, as a readable descriptor [`Options::stop`] does.
    pub fn stop(&mut self) {
        self.stopping = true;
    }

    /// Serves until asked to end, then makes all data durable and closes all front-ends.
    ///
    /// # Errors
    /// * [`Error::System`] when the loop cannot continue.
    /// * [`Error::NotDurable`] when volumes exceed the time limit.
    /// * The first error of a front-end that was closed.
    pub fn run(&mut self) -> Result<(), Error<F::Error>> {
        self.serve()?;
        self.finish()
    }

    /// Serves until asked to end, and leaves everything in its present state.
    ///
    /// # Errors
    /// [`Error::System`] when the loop cannot continue.
    pub fn serve(&mut self) -> Result<(), Error<F::Error>> {
        self.pulse.enter(Activity::Round);
        while !self.turn()? {}
        Ok(())
    }

    /// Runs one turn of the loop: a round, then overdue tasks, then sleep when there is nothing to
    /// poll for. Returns `true` when the worker is to end.
    #[inline]
    fn turn(&mut self) -> Result<bool, Error<F::Error>> {
        let due = self.tick();
        let worked = self.round_and_measure();
        if self.stopping {
            return Ok(true);
        }
        if worked || self.must_poll() || (self.pace.polls(self.turns.now) && self.keeps_window()) {
            return self.poll_on(worked, due);
        }
        if self.prepare_sleep() {
            let asleep = Instant::now();
            self.measure(asleep);
            let timeout = self.deadline().map(|d| d.saturating_duration_since(asleep));
            self.pulse.enter(Activity::Asleep);
            self.handle.load().fall_asleep(asleep);
            if self.look(timeout)? {
                return Ok(true);
            }
            self.pace.slept();
            self.crowd.slept();
            self.handle.flag().awake();
            self.turns.now = Instant::now();
            self.handle.load().wake_up(self.turns.now);
            self.meter.skip(self.turns.now);
            self.housekeeping();
            return Ok(false);
        }
        self.handle.flag().awake();
        self.turns.now = Instant::now();
        // A loop that is often kept from sleep still looks at the sockets in time.
        self.poll_on(true, due)
    }

    /// Runs one turn without sleep, for a thread with a loop of its own: a check of the sockets,
    /// and a round. When the round found no work, everything is armed, so that the thread may
    /// sleep. Returns `true` when the worker is to end, which [`Worker::run`] then does.
    ///
    /// # Errors
    /// [`Error::System`] when waiting for descriptors fails.
    pub fn poll_once(&mut self) -> Result<bool, Error<F::Error>> {
        self.turns.now = Instant::now();
        if self.look(Some(Duration::ZERO))? || self.stopping {
            return Ok(true);
        }
        if !self.round() {
            self.prepare_sleep();
        }
        self.handle.flag().awake();
        Ok(self.stopping)
    }

    /// Runs the part of a turn that serves commands, for a thread that polls on its own account (a
    /// benchmark, a test). Sockets are not read, and the thread does not sleep. Returns `true` when
    /// there was work.
    #[inline]
    pub fn step(&mut self) -> bool {
        self.tick();
        self.round_and_measure()
    }

    /// Reads the clock in one turn of several. Returns `true` when a check of the sockets is due.
    #[inline]
    fn tick(&mut self) -> bool {
        self.turns.rounds = self.turns.rounds.wrapping_add(1);
        if !self.turns.rounds.is_multiple_of(ROUNDS_PER_CLOCK) {
            return false;
        }
        self.pulse.beat();
        let now = Instant::now();
        let passed = now.saturating_duration_since(self.turns.now);
        if passed > GAP {
            self.gap(passed, now);
        }
        self.turns.now = now;
        self.measure(now);
        let due = now.duration_since(self.turns.last_look) >= LOOK_INTERVAL;
        if due {
            self.housekeeping();
        }
        due
    }

    fn measure(&mut self, now: Instant) {
        match self.meter.tick(now) {
            TimeUse::Nothing => {}
            TimeUse::Polling(polling) => self.handle.load().set_polling(polling),
            TimeUse::Working { busy, polling } => {
                self.handle.load().set_busy(busy);
                self.handle.load().set_polling(polling);
            }
        }
    }

    #[inline]
    fn round_and_measure(&mut self) -> bool {
        let worked = self.round();
        self.meter.round(worked);
        if worked {
            self.pace.worked(self.turns.now);
        }
        worked
    }

    /// Ends a turn that is followed by another one without sleep.
    #[inline]
    fn poll_on(&mut self, worked: bool, due: bool) -> Result<bool, Error<F::Error>> {
        let look = due || self.has_more() || self.expects_messages();
        if look {
            self.turns.last_look = self.turns.now;
            if self.look(Some(Duration::ZERO))? {
                return Ok(true);
            }
            if due {
                self.arm_idle();
            }
        }
        if !worked {
            if self.shares_cpu && self.turns.rounds.is_multiple_of(ROUNDS_PER_YIELD) {
                if self.crowd.is_there(self.turns.now) {
                    return self.nap();
                }
                rustix::thread::sched_yield();
            } else if !self.shares_cpu && (self.io.in_flight() > 0 || self.io.sleep_hints() > 0) {
                // The kernel's threads of the ring inherit the worker's processor, and a volume's
                // own threads may: a flush would wait for the end of the worker's time slice.
                rustix::thread::sched_yield();
            }
            self.spin_poll();
        }
        Ok(false)
    }

    /// Handles a pause of the thread, or a long round, of the duration `passed`.
    #[cold]
    #[inline(never)]
    fn gap(&mut self, passed: Duration, now: Instant) {
        self.pace.gap(passed, now);
        if self.shares_cpu {
            let own = clock_gettime(ClockId::ThreadCPUTime);
            // No negative number.
            if let Ok(own) = Duration::try_from(own) {
                self.crowd.gap(passed, now, own);
            }
        }
    }

    /// Pauses while other threads want the processor. Nothing is armed, so hosts need not ring; a
    /// ready descriptor ends the pause.
    #[cold]
    fn nap(&mut self) -> Result<bool, Error<F::Error>> {
        let before = Instant::now();
        self.measure(before);
        let ended = self.look(Some(YIELD_TIME))?;
        let now = Instant::now();
        self.handle
            .load()
            .napped(now.saturating_duration_since(before));
        self.pace.napped(before, now);
        self.crowd.slept();
        self.turns.now = now;
        self.turns.last_look = now;
        self.meter.skip(now);
        Ok(ended)
    }

    /// Returns whether commands may arrive by message and a check of the sockets is due.
    #[inline]
    fn expects_messages(&self) -> bool {
        let rounds = self.turns.rounds;
        if !rounds.is_multiple_of(ROUNDS_PER_LOOK) {
            return false;
        }
        self.of(self.run_queue.hot()).any(F::is_trapped)
            || (rounds.is_multiple_of(ROUNDS_PER_IDLE_LOOK) && self.awake().any(F::is_trapped))
    }

    /// Spins between two rounds without work, and polls the most frequent and urgent sources:
    /// doorbells of recently busy queues, and completions of the ring. A round takes several times
    /// as long.
    #[inline]
    fn spin_poll(&self) {
        let fronts = || self.of(self.run_queue.hot());
        let in_flight = fronts().map(F::in_flight).sum::<usize>();
        let looks = if in_flight > self.io.in_flight() {
            // The ring holds only part of the requests. Rounds alone find completions of a device
            // below, polled or not, and requests that wait for a time.
            1
        } else {
            // The limit keeps many front-ends from delaying each other's rounds.
            SPIN_POLLS.div_ceil(self.run_queue.hot_count().max(1) as u32)
        };
        for _ in 0..looks {
            std::hint::spin_loop();
            if self.io.has_news() || fronts().any(F::has_news) {
                return;
            }
        }
    }

    fn housekeeping(&mut self) {
        self.pulse.enter(Activity::Housekeeping);
        if self.turns.now >= self.pace_of_pins.next()
            && let Some(front) = self.fronts.iter_mut().flatten().find(|f| f.is_pinning())
        {
            front.pin(&mut self.pace_of_pins);
        }
        for at in self.run_queue.awake() {
            if let Some(Some(front)) = self.fronts.get_mut(at) {
                front.housekeeping(self.turns.now);
            }
        }
        self.poll_unannounced();
        self.armed_housekeeping();
    }

    /// Returns the front-ends with the numbers `owners`.
    #[inline]
    pub(crate) fn of(&self, owners: impl Iterator<Item = usize>) -> impl Iterator<Item = &F> {
        owners.filter_map(|at| self.fronts.get(at)?.as_ref())
    }

    /// Returns the front-ends that rounds poll.
    #[inline]
    pub(crate) fn awake(&self) -> impl Iterator<Item = &F> {
        self.of(self.run_queue.awake())
    }

    /// Handles a raised wake flag: runs jobs and reads messages of other threads. Returns whether
    /// there were any.
    pub(crate) fn drain_messages(&mut self) -> bool {
        self.pulse.enter(Activity::Messages);
        let mut worked = false;
        // Jobs are taken singly: a job that runs rounds of its own leaves the next ones their
        // order.
        while let Some(job) = self.handle.next_job() {
            worked = true;
            job(self);
        }
        for (owner, front) in (0..).zip(&mut self.fronts) {
            if front.as_mut().is_some_and(F::drain_messages) {
                worked = true;
                self.run_queue.wake(owner);
            }
        }
        worked | self.poll_armed()
    }

    /// Runs one round over all front-ends and the ring. Returns whether there was work.
    #[inline]
    fn round(&mut self) -> bool {
        if self.accounts.is_shared() {
            let worked = self.shared_round();
            if worked {
                // A shared round takes some time.
                self.look_soon();
            }
            return worked | (self.leaving > 0 && self.finish_removals());
        }
        // Completions are first, because the guest waits for them.
        let fronts = &mut self.fronts;
        let completed = self.io.poll(&mut |completion| complete(fronts, completion));
        let mut worked = completed > 0;
        worked |= self.handle.flag().take() && self.drain_messages();
        let now = self.turns.now;
        let (mut long, mut units, mut slot) = (false, 0u32, 0);
        while let Some(at) = self.run_queue.hot_at(slot) {
            slot += 1;
            let Some(Some(front)) = self.fronts.get_mut(at) else {
                continue;
            };
            self.pulse.enter(Activity::Polling(at as u16));
            let mut budget = Budget::new(ALONE_UNITS);
            if front.poll(now, &mut budget) {
                worked = true;
                long |= budget.is_spent();
                units = units.saturating_add(budget.spent());
                self.accounts.worked_alone(at);
                self.run_queue.worked(slot - 1);
            } else if self.run_queue.was_quiet(slot - 1) {
                slot -= usize::from(self.demote(slot - 1));
            }
        }
        for _ in 0..self.run_queue.idle_share(units) {
            worked |= self.visit_idle();
        }
        if long {
            self.look_soon();
        }
        self.pulse.enter(Activity::Submitting);
        self.io.flush();
        for at in self.run_queue.hot() {
            if let Some(Some(front)) = self.fronts.get_mut(at) {
                front.poll_volumes(&mut self.completions);
            }
        }
        worked |= !self.completions.is_empty();
        for completion in self.completions.drain(..) {
            complete(&mut self.fronts, completion);
        }
        let mut ended = false;
        for owner in self.run_queue.hot() {
            if let Some(Some(front)) = self.fronts.get_mut(owner) {
                self.pulse.enter(Activity::Finishing(owner as u16));
                worked |= front.finish_round();
                ended |= front.has_ended();
            }
        }
        self.pulse.enter(Activity::Round);
        worked |= ended && self.remove_ended();
        worked | (self.leaving > 0 && self.finish_removals())
    }

    /// Makes the next turn read the clock, and check the sockets if that is due.
    fn look_soon(&mut self) {
        self.turns.rounds |= ROUNDS_PER_CLOCK - 1;
    }

    /// Closes front-ends that are being removed and have no outstanding request. Returns whether
    /// there were any.
    fn finish_removals(&mut self) -> bool {
        let mut worked = false;
        for (at, (front, slot)) in self.fronts.iter_mut().zip(&mut self.slots).enumerate() {
            if slot.leaving.is_none() || !front.as_ref().is_some_and(F::is_drained) {
                continue;
            }
            worked = true;
            self.leaving -= 1;
            self.pulse.enter(Activity::Closing(at as u16));
            self.run_queue.remove(at as u16);
            if let (Some(mut front), Some(removed)) = (front.take(), slot.leaving.take()) {
                let closed = front.close();
                removed(front, closed);
            }
        }
        worked
    }

    /// Removes front-ends that have ended by themselves. Returns whether there were any.
    pub(crate) fn remove_ended(&mut self) -> bool {
        let ended = |f: &Option<F>| f.as_ref().is_some_and(F::has_ended);
        let mut worked = false;
        for at in 0..self.fronts.len() {
            let owner = u16::try_from(at).unwrap_or(u16::MAX);
            if self.fronts.get(at).is_some_and(ended) {
                worked |= self.remove(owner, |_, _| ());
            }
        }
        worked
    }

    /// Returns whether the thread must keep polling, because a source of completions cannot wake
    /// it.
    #[inline]
    fn must_poll(&self) -> bool {
        let mut fronts = self.awake();
        self.leaving > 0
            || fronts.any(|front| front.must_poll() || front.has_more())
            || self.polls_unannounced()
    }

    /// Returns whether it is worthwhile to poll on after the last work instead of sleeping.
    #[inline]
    fn keeps_window(&self) -> bool {
        if self.shares_cpu && self.io.sleep_hints() > 0 && self.only_hinted() {
            return false;
        }
        self.io.in_flight() > 0 || self.awake().any(F::keeps_window)
    }

    /// Returns whether all outstanding requests depend on threads that want this processor, and no
    /// recently busy front-end waits for anything else.
    fn only_hinted(&self) -> bool {
        let mut in_flight = 0;
        let all_wait = self.of(self.run_queue.hot()).all(|front| {
            in_flight += front.in_flight();
            front.in_flight() > 0
        });
        all_wait && in_flight <= self.io.sleep_hints()
    }

    /// Waits for descriptors, at most for `timeout`, and handles the ready ones. Returns `true`
    /// when the worker is to end.
    fn look(&mut self, timeout: Option<Duration>) -> Result<bool, Error<F::Error>> {
        let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; EVENTS];
        let timeout = timeout.map(|t| Timespec {
            tv_sec: t.as_secs() as i64,
            tv_nsec: i64::from(t.subsec_nanos()) as _,
        });
        let waited = epoll::wait(&self.epoll, &mut events[..], timeout.as_ref());
        // The beat is first, since the time asleep is no time of the worker.
        self.pulse.beat();
        let ready = match waited {
            Ok((ready, _)) => ready,
            Err(Errno::INTR) => return Ok(false),
            Err(error) => return Err(Error::system("epoll_wait")(error)),
        };
        self.pulse.enter(Activity::Round);
        self.accounts.skip();
        self.read_on();
        for event in ready {
            let Token { front, token, once } = Token::of(event);
            if front != OWN {
                self.ready(front, token, once);
                continue;
            }
            match token {
                TOKEN_STOP => return Ok(true),
                TOKEN_WAKE => self.handle.woken(),
                // The next round finds the completions.
                _ => {}
            }
        }
        Ok(false)
    }

    /// Returns whether a front-end that may work in this round has unread messages.
    #[inline]
    fn has_more(&self) -> bool {
        self.run_queue.awake().any(|at| {
            let front = self.fronts.get(at).and_then(Option::as_ref);
            front.is_some_and(F::has_more)
                && (!self.accounts.is_shared() || self.accounts.may_work(at))
        })
    }

    /// Lets front-ends continue to read their sockets, for at most a quantum each.
    fn read_on(&mut self) {
        for at in self.run_queue.awake() {
            let Some(Some(front)) = self.fronts.get_mut(at) else {
                continue;
            };
            if !front.has_more() {
                continue;
            }
            let begun = self.accounts.now();
            while front.has_more() && self.accounts.may_read(at, begun) {
                self.pulse.enter(Activity::Socket(at as u16));
                front.read_on();
                self.accounts.read(at);
            }
        }
    }

    fn ready(&mut self, number: u32, token: u32, once: bool) {
        // The lower half is the slot. An event for a former front-end of the slot is dropped.
        let at = usize::from(number as u16);
        let may_work = !self.accounts.is_shared() || self.accounts.may_work(at);
        if self.slots.get(at).is_some_and(|p| p.number == number)
            && let Some(Some(front)) = self.fronts.get_mut(at)
            // Otherwise the next look reports the event again.
            && (once || may_work)
        {
            self.pulse.enter(Activity::Socket(number as u16));
            self.run_queue.wake(number as u16);
            front.ready(token);
            self.accounts.read(at);
            // An overdrawn front-end waits with events that are reported once, too.
            if may_work {
                self.accounts.tell(at);
            }
        }
    }

    /// Ends the worker: makes all data durable, then disconnects the clients.
    fn finish(&mut self) -> Result<(), Error<F::Error>> {
        tracing::info!("ending: making everything durable");
        self.run_queue.wake_all();
        self.io.end();
        for (front, slot) in self.fronts.iter_mut().zip(&self.slots) {
            if let (Some(front), None) = (front, &slot.leaving) {
                front.flush();
            }
        }
        let mut limit = Instant::now() + FLUSH_LIMIT;
        while !self.fronts.iter().flatten().all(F::is_drained) {
            self.pulse.beat();
            self.turns.now = Instant::now();
            // Sockets are no longer read. Slow completions are waited for as long as they keep
            // arriving.
            if self.round() {
                limit = self.turns.now + FLUSH_LIMIT;
            }
            if self.turns.now >= limit {
                return Err(Error::NotDurable(FLUSH_LIMIT));
            }
            std::thread::sleep(FLUSH_PAUSE);
        }
        let mut result = Ok(());
        for (owner, front) in self.fronts.iter_mut().enumerate() {
            self.pulse.enter(Activity::Closing(owner as u16));
            let closed = front.take().map_or(Ok(()), |mut front| front.close());
            result = result.and(closed.map_err(Error::Frontend));
        }
        let given_up = self.io.given_up();
        if !given_up.is_empty() {
            return Err(Error::GivenUp(given_up.join("; ")));
        }
        result
    }
}
