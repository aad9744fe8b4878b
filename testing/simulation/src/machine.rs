//! The host: its disks, the process that serves them, and everything that outlives that process.

use crate::clock::VirtualClock;
use crate::disk::{Disk, DiskEvent, Fault};
use crate::random::Random;
use crate::trace::Trace;
use anyhow::{Context, Result, ensure};
use controller::{
    Controller, ControllerConfig, DoorbellPage, IrqSink, NamespaceConfig, Recovery,
    RetainedObjects, state_layout,
};
use dma::{Memory, Prot};
use state_memory::StateMemory;
use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use volume::{
    AtomicVolume, Clock, Io, IoLimits, IoOptions, LimitHandle, LimitVolume, OnError, OnErrorHandle,
    OnErrorVolume, SliceVolume, Volume,
};

/// Size of each guest's memory in bytes.
pub const GUEST_MEMORY: usize = 1 << 20;
/// Unit of atomic writes in bytes, where a disk has a journal.
const ATOMIC_UNIT: u32 = 4096;
/// Number under which the first vector of a controller is kept; guest memory has the number 1.
const FIRST_VECTOR: u32 = 100;
/// Deaths by one crash point after another before the run counts as stuck.
const MAX_DEATHS_IN_A_ROW: u32 = 100;

/// Offsets of registers in BAR0 (NVMe Base 2.1, 3.1.4).
pub mod reg {
    /// Controller Configuration (CC).
    pub const CC: u64 = 0x14;
    /// Controller Status (CSTS).
    pub const CSTS: u64 = 0x1c;
    /// Admin Queue Attributes (AQA).
    pub const AQA: u64 = 0x24;
    /// Admin Submission Queue Base Address (ASQ).
    pub const ASQ: u64 = 0x28;
    /// Admin Completion Queue Base Address (ACQ).
    pub const ACQ: u64 = 0x30;
}

/// Receiver of an interrupt, which outlives the process.
#[derive(Debug, Default)]
struct Vector {
    number: u32,
    signals: AtomicU32,
}

impl IrqSink for Vector {
    fn signal(&self) {
        self.signals.fetch_add(1, Ordering::Relaxed);
    }

    fn kept(&self) -> Option<NonZeroU32> {
        NonZeroU32::new(self.number)
    }
}

/// Layers of volumes between a namespace and its disk.
#[derive(Clone, Debug, Default)]
pub struct Stack {
    /// Range of the disk in bytes, offset and length; `None` for all of it.
    pub slice: Option<(u64, u64)>,
    /// Index of the disk with the journal of atomic writes, if there is one.
    pub journal: Option<usize>,
    /// I/O limits.
    pub limits: IoLimits,
    /// Error policy.
    pub on_error: OnError,
}

/// A virtual disk: everything that outlives the process that serves it.
pub struct Seat {
    config: ControllerConfig,
    /// Layers of its volume.
    pub stack: Stack,
    /// Index of its disk.
    pub disk: usize,
    is_hostile: bool,
    memory: Memory,
    vectors: Vec<Arc<Vector>>,
    state: StateMemory,
    page: OwnedFd,
    /// Event after which no command can fail, unless a fault begins again.
    trusted_from: u64,
    /// Number of requests that had arrived at the disk, and the time, when the limits were set.
    limited_from: (u64, Duration),
}

/// Configuration of a virtual disk.
pub struct SeatConfig {
    /// Configuration of its controller.
    pub config: ControllerConfig,
    /// Layers of its volume.
    pub stack: Stack,
    /// Index of its disk.
    pub disk: usize,
    /// Whether its guest may write anything to its rings, so that a process may refuse the state
    /// that it finds there. The disk then begins anew, as for a new client.
    pub is_hostile: bool,
}

struct Handles {
    limits: LimitHandle,
    on_error: OnErrorHandle,
}

/// The process: all that is lost when it dies. Controllers are dropped before their ring.
struct Process {
    controllers: Vec<Controller>,
    handles: Vec<Handles>,
    io: Io,
}

/// Objects that the keeper holds for one controller.
struct Retained<'a>(&'a Seat);

impl RetainedObjects for Retained<'_> {
    fn memory(&mut self, number: NonZeroU32, end: u64, _: bool) -> Option<Memory> {
        let memory = &self.0.memory;
        (number.get() == 1 && memory.len() as u64 >= end).then(|| memory.clone())
    }

    fn receiver(&mut self, number: NonZeroU32) -> Option<Arc<dyn IrqSink>> {
        let vector = number.get().checked_sub(FIRST_VECTOR)?;
        let vector: Arc<dyn IrqSink> = self.0.vectors.get(vector as usize)?.clone();
        Some(vector)
    }
}

/// A host.
pub struct Machine {
    /// The virtual clock.
    pub clock: VirtualClock,
    /// Lines and counts of the run.
    pub trace: Trace,
    /// Random numbers of the current step.
    pub random: Random,
    /// Number of the current event.
    pub event: u64,
    disks: Vec<Disk>,
    seats: Vec<Seat>,
    process: Option<Process>,
    generation: u64,
    is_awake: bool,
    seen_points: BTreeSet<&'static str>,
}

impl Machine {
    /// Starts a host with these disks and virtual disks.
    ///
    /// # Errors
    /// The host has no memory, or a configuration is refused.
    pub fn new(
        disks: Vec<Disk>,
        seats: Vec<SeatConfig>,
        trace: Trace,
        random: Random,
    ) -> Result<Self> {
        crash::disarm();
        let mut machine = Self {
            clock: VirtualClock::new(),
            trace,
            random,
            event: 0,
            disks,
            seats: Vec::new(),
            process: None,
            generation: 0,
            is_awake: true,
            seen_points: BTreeSet::new(),
        };
        for seat in seats {
            let seat = new_seat(seat)?;
            machine.seats.push(seat);
        }
        machine.boot()?;
        Ok(machine)
    }

    /// Starts the process without state of an earlier one.
    fn boot(&mut self) -> Result<()> {
        let io = Io::new(IoOptions::default());
        let mut controllers = Vec::new();
        let mut handles = Vec::new();
        for (n, seat) in self.seats.iter().enumerate() {
            let (namespace, handle) = self.namespace(seat)?;
            let state = seat.state.clone();
            let controller = new_controller(n as u16, seat, state, namespace, &io)?;
            controllers.push(controller);
            handles.push(handle);
        }
        self.process = Some(Process {
            controllers,
            handles,
            io,
        });
        self.is_awake = true;
        self.limits_begin();
        Ok(())
    }

    /// Opens the volume of a virtual disk for the current process.
    fn namespace(&self, seat: &Seat) -> Result<(NamespaceConfig, Handles)> {
        let disk = self.disks.get(seat.disk).context("no such disk")?;
        let mut volume: Arc<dyn Volume> = Arc::new(disk.volume(self.generation));
        if let Some((offset, len)) = seat.stack.slice {
            volume = Arc::new(SliceVolume::new(volume, offset, Some(len))?);
        }
        if let Some(journal) = seat.stack.journal {
            let journal = self.disks.get(journal).context("no such journal")?;
            let journal = Arc::new(journal.volume(self.generation));
            volume = Arc::new(AtomicVolume::new(volume, journal, ATOMIC_UNIT)?);
        }
        let clock: Arc<dyn Clock> = Arc::new(self.clock.clone());
        let limited = LimitVolume::with_clock(volume, seat.stack.limits, clock.clone());
        let limits = limited.handle();
        let policy = seat.stack.on_error;
        let volume = OnErrorVolume::with_clock(Arc::new(limited), policy, disk.name(), clock);
        let on_error = volume.handle();
        let namespace = NamespaceConfig {
            block_size: 512,
            nguid: [1; 16],
            ..NamespaceConfig::new(1, Arc::new(volume))
        };
        Ok((namespace, Handles { limits, on_error }))
    }

    /// Starts the next process from what the one before has left. The dead process is dropped
    /// afterwards: it had no chance to do anything.
    fn restore(&mut self) -> Result<()> {
        let io = Io::new(IoOptions::default());
        let mut controllers = Vec::new();
        let mut handles = Vec::new();
        let mut renewed = Vec::new();
        let mut recovered = Recovery::default();
        for (n, seat) in self.seats.iter().enumerate() {
            let (namespace, handle) = self.namespace(seat)?;
            let restored = Controller::restore(
                n as u16,
                seat.config.clone(),
                vec![namespace.clone()],
                &io,
                DoorbellPage::from_fd(seat.page.try_clone()?)?,
                StateMemory::open(seat.state.fd().try_clone_to_owned()?)?,
                &mut Retained(seat),
            );
            let (controller, recovery) = match restored {
                Ok(restored) => restored,
                Err(error) if seat.is_hostile => {
                    self.trace.count("hostile guest: state refused");
                    self.trace
                        .say(|| format!("state of {n} is refused: {error}"));
                    let state = StateMemory::create(state_layout(&seat.config))?;
                    renewed.push((n, state.clone()));
                    let controller = new_controller(n as u16, seat, state, namespace, &io)?;
                    (controller, Recovery::default())
                }
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("controller {n} cannot be restored"));
                }
            };
            controllers.push(controller);
            handles.push(handle);
            recovered.replayed += recovery.replayed;
            recovered.ended += recovery.ended;
            recovered.posted += recovery.posted;
        }
        for (n, state) in renewed {
            if let Some(seat) = self.seats.get_mut(n) {
                seat.state = state;
            }
        }
        for (name, number) in [
            ("recovery: command replayed", recovered.replayed),
            ("recovery: ended command posted", recovered.ended),
            ("recovery: completion was posted", recovered.posted),
        ] {
            if number > 0 {
                *self.trace.counts.entry(name).or_default() += number as u64;
            }
        }
        self.trace.say(|| format!("restored: {recovered:?}"));
        self.process = Some(Process {
            controllers,
            handles,
            io,
        });
        self.is_awake = true;
        self.limits_begin();
        Ok(())
    }

    /// Kills the process, and starts the next one.
    ///
    /// # Errors
    /// The next process refuses the state that it finds.
    pub fn die(&mut self, why: &'static str) -> Result<()> {
        let mut why = why;
        for _ in 0..MAX_DEATHS_IN_A_ROW {
            self.trace.say(|| format!("process dies: {why}"));
            self.seen_points.extend(crash::passed().keys());
            self.generation += 1;
            for disk in &self.disks {
                disk.kill(self.generation, &mut self.random);
            }
            let dead = self.process.take();
            let restored = catch_unwind(AssertUnwindSafe(|| self.restore()));
            drop(dead);
            match restored {
                Ok(restored) => {
                    self.trust_again();
                    return restored;
                }
                Err(panic) => why = self.crashed(panic),
            }
        }
        anyhow::bail!("no process lives")
    }

    /// Ends the host by a loss of power, and starts it again. Guests begin with zeroed memory.
    ///
    /// # Errors
    /// A process cannot start on what the disks hold.
    pub fn lose_power(&mut self) -> Result<()> {
        self.trace.say(|| "power fails".into());
        self.generation += 1;
        for disk in &self.disks {
            disk.lose_power(self.generation, &mut self.random);
        }
        drop(self.process.take());
        for seat in std::mem::take(&mut self.seats) {
            let trusted_from = seat.trusted_from;
            let mut seat = new_seat(SeatConfig {
                config: seat.config,
                stack: seat.stack,
                disk: seat.disk,
                is_hostile: seat.is_hostile,
            })?;
            seat.trusted_from = trusted_from;
            self.seats.push(seat);
        }
        crash::disarm();
        self.trust_again();
        self.boot()
    }

    /// Counts the panic of a crash point and returns its name; any other panic continues.
    fn crashed(&mut self, panic: Box<dyn std::any::Any + Send>) -> &'static str {
        match panic.downcast::<crash::Crashed>() {
            Ok(crashed) => {
                self.trace.count("death at a crash point");
                crashed.0
            }
            Err(panic) => resume_unwind(panic),
        }
    }

    /// Chooses a crash point that was passed before, at which the process dies soon.
    pub fn arm_crash_point(&mut self) {
        self.seen_points.extend(crash::passed().keys());
        let points: Vec<&'static str> = self.seen_points.iter().copied().collect();
        if let Some(point) = self.random.pick(&points) {
            let pass = 1 + self.random.below(8);
            self.trace.say(|| format!("armed: {point}, pass {pass}"));
            crash::arm(point, pass);
        }
    }

    fn controller(&mut self, seat: usize) -> Result<&mut Controller> {
        let process = self.process.as_mut().context("no process")?;
        process.controllers.get_mut(seat).context("no such disk")
    }

    /// Calls a controller for its client. The call is repeated when the process dies in it.
    ///
    /// # Errors
    /// The next process refuses the state that it finds.
    pub fn call<R>(&mut self, seat: usize, mut act: impl FnMut(&mut Controller) -> R) -> Result<R> {
        self.is_awake = true;
        for _ in 0..MAX_DEATHS_IN_A_ROW {
            let controller = self.controller(seat)?;
            match catch_unwind(AssertUnwindSafe(|| act(controller))) {
                Ok(result) => return Ok(result),
                Err(panic) => {
                    let why = self.crashed(panic);
                    self.die(why)?;
                }
            }
        }
        anyhow::bail!("no process lives")
    }

    /// Stores a doorbell in the page that the client has mapped.
    pub fn store_doorbell(&mut self, seat: usize, offset: u64, value: u32) -> Result<()> {
        let controller = self.controller(seat)?;
        let cell = controller.bar0_pages().cell(offset as usize / 4);
        let cell = cell.context("no such doorbell")?;
        cell.store(value.to_le(), Ordering::Release);
        Ok(())
    }

    /// Reads a register of four bytes.
    pub fn read32(&mut self, seat: usize, offset: u64) -> Result<u32> {
        self.call(seat, |controller| {
            let mut bytes = [0; 4];
            controller.bar0_read(offset, &mut bytes);
            u32::from_le_bytes(bytes)
        })
    }

    /// Writes a register of four bytes.
    pub fn write32(&mut self, seat: usize, offset: u64, value: u32) -> Result<()> {
        self.call(seat, |controller| {
            controller.bar0_write(offset, &value.to_le_bytes());
        })
    }

    /// Runs a round of the worker, unless it sleeps: completions of disks, every controller in
    /// turn, and the preparation of its sleep when there was nothing to do.
    ///
    /// # Errors
    /// The process has died, and the next one refuses the state that it finds.
    pub fn round(&mut self) -> Result<()> {
        if !self.is_awake {
            return Ok(());
        }
        let now = self.clock.now();
        let sleeps = self.random.one_in(2);
        let process = self.process.as_mut().context("no process")?;
        let result = catch_unwind(AssertUnwindSafe(|| round(process, now, sleeps)));
        match result {
            Ok(is_awake) => {
                self.is_awake = is_awake;
                if !is_awake {
                    self.trace.count("worker sleeps");
                    self.trace.say(|| "worker sleeps".into());
                }
                Ok(())
            }
            Err(panic) => {
                let why = self.crashed(panic);
                self.die(why)
            }
        }
    }

    /// Returns whether the worker is awake.
    pub fn is_awake(&self) -> bool {
        self.is_awake
    }

    /// Moves the clock, and wakes the worker if one of its deadlines has passed.
    pub fn advance(&mut self, by: Duration) {
        self.clock.advance(by);
        let (now, elapsed) = (self.clock.now(), self.clock.elapsed());
        for disk in &self.disks {
            disk.set_now(elapsed);
        }
        if let Some(process) = &self.process {
            let mut deadlines = process.controllers.iter().filter_map(Controller::deadline);
            self.is_awake |= deadlines.any(|deadline| deadline <= now);
        }
    }

    /// Lets a disk do one thing.
    pub fn step_disk(&mut self, disk: usize) -> bool {
        let Some(disk) = self.disks.get(disk) else {
            return false;
        };
        let Some(event) = disk.step(&mut self.random) else {
            return false;
        };
        self.is_awake |= matches!(event, DiskEvent::Completed(..));
        self.trace
            .say(|| format!("disk {}: {event:?}", disk.name()));
        true
    }

    /// Returns the host's disks.
    pub fn disks(&self) -> &[Disk] {
        &self.disks
    }

    /// Returns a virtual disk.
    pub fn seat(&self, seat: usize) -> Result<&Seat> {
        self.seats.get(seat).context("no such virtual disk")
    }

    /// Returns the memory of a guest.
    pub fn memory(&self, seat: usize) -> Result<Memory> {
        Ok(self.seat(seat)?.memory.clone())
    }

    /// Takes the interrupts of a vector. Returns whether there were any.
    pub fn take_interrupt(&self, seat: usize, vector: u16) -> bool {
        let vectors = self.seats.get(seat).map(|seat| &seat.vectors);
        let vector = vectors.and_then(|vectors| vectors.get(usize::from(vector)));
        vector.is_some_and(|vector| vector.signals.swap(0, Ordering::Relaxed) > 0)
    }

    // ---- faults

    /// Makes a disk fail, or work again.
    pub fn set_fault(&mut self, disk: usize, fault: Fault) {
        let Some(at) = self.disks.get(disk) else {
            return;
        };
        at.set_fault(fault);
        self.trace.say(|| format!("disk {}: {fault:?}", at.name()));
        let event = self.event;
        for seat in &mut self.seats {
            if seat.disk == disk || seat.stack.journal == Some(disk) {
                let is_sticky = seat.stack.journal.is_some();
                // A journal that could not be read or written stays closed in this process.
                seat.trusted_from = if fault == Fault::None && !is_sticky {
                    event
                } else {
                    u64::MAX
                };
            }
        }
    }

    /// A new process trusts the disks that work.
    fn trust_again(&mut self) {
        for seat in &mut self.seats {
            let used = [Some(seat.disk), seat.stack.journal];
            let mut disks = used.iter().flatten().filter_map(|at| self.disks.get(*at));
            if seat.trusted_from == u64::MAX && disks.all(|disk| disk.fault() == Fault::None) {
                seat.trusted_from = self.event;
            }
        }
    }

    /// Whether a disk's journal of atomic writes has failed, which lasts until the next process.
    pub fn needs_restart(&self) -> bool {
        let mut seats = self.seats.iter();
        seats.any(|seat| seat.trusted_from == u64::MAX)
    }

    /// Whether a command that was submitted at this event may fail because of a disk.
    pub fn may_fail(&self, seat: usize, since: u64) -> bool {
        let seat = self.seats.get(seat);
        seat.is_none_or(|seat| since <= seat.trusted_from && seat.trusted_from > 0)
    }

    // ---- the operator

    fn limits_begin(&mut self) {
        let now = self.clock.elapsed();
        for seat in &mut self.seats {
            let arrived = self.disks.get(seat.disk).map_or(0, Disk::arrived);
            seat.limited_from = (arrived, now);
        }
    }

    /// Changes the I/O limits of a virtual disk.
    pub fn set_limits(&mut self, seat: usize, limits: IoLimits) -> Result<()> {
        let now = self.clock.elapsed();
        let at = self.seats.get_mut(seat).context("no such virtual disk")?;
        at.stack.limits = limits;
        let arrived = self.disks.get(at.disk).map_or(0, Disk::arrived);
        at.limited_from = (arrived, now);
        let process = self.process.as_ref().context("no process")?;
        let handles = process.handles.get(seat).context("no such disk")?;
        handles.limits.set(limits);
        self.trace.say(|| format!("limits of {seat}: {limits:?}"));
        self.call(seat, |controller| controller.update_volumes())
    }

    /// Repeats the requests that an error policy holds.
    pub fn resume(&mut self) {
        self.trace.say(|| "operator resumes all disks".into());
        for handles in self.process.iter().flat_map(|process| &process.handles) {
            handles.on_error.resume();
        }
        self.is_awake = true;
    }

    /// Checks that no more requests have reached a disk than the limits allow.
    ///
    /// # Errors
    /// The limits were exceeded.
    pub fn check_limits(&self) -> Result<()> {
        for (n, seat) in self.seats.iter().enumerate() {
            let limits = seat.stack.limits;
            let shares = self
                .seats
                .iter()
                .filter(|one| one.disk == seat.disk)
                .count()
                > 1;
            if limits.iops.total == 0 || seat.stack.journal.is_some() || shares {
                continue;
            }
            let arrived = self.disks.get(seat.disk).map_or(0, Disk::arrived);
            let (before, since) = seat.limited_from;
            let time = self.clock.elapsed().saturating_sub(since) + limits.burst;
            let allowed = time.as_nanos() * u128::from(limits.iops.total) / 1_000_000_000 + 2;
            let did = u128::from(arrived - before);
            ensure!(
                did <= allowed,
                "disk {n}: {did} requests in {time:?}, at {} per second",
                limits.iops.total
            );
        }
        Ok(())
    }
}

/// Runs a round. Returns whether the worker stays awake.
fn round(process: &mut Process, now: std::time::Instant, sleeps: bool) -> bool {
    let Process {
        controllers, io, ..
    } = process;
    let mut worked = false;
    let mut done = Vec::new();
    for controller in controllers.iter_mut() {
        controller.poll_volumes(&mut done);
        worked |= !done.is_empty();
        for completion in done.drain(..) {
            controller.complete(completion);
        }
        worked |= controller.poll(now);
    }
    if worked || !sleeps || controllers.iter().any(Controller::needs_polling) {
        return true;
    }
    // All of them, as the worker does.
    let news = controllers.iter_mut().map(Controller::arm);
    let news: Vec<bool> = news.collect();
    io.flush();
    news.into_iter().any(|news| news)
}

/// Makes a controller for a client that begins anew.
fn new_controller(
    n: u16,
    seat: &Seat,
    state: StateMemory,
    namespace: NamespaceConfig,
    io: &Io,
) -> Result<Controller> {
    let page = DoorbellPage::from_fd(seat.page.try_clone()?)?;
    let config = seat.config.clone();
    let mut controller = Controller::with_state(n, config, vec![namespace], io, page, state)?;
    let memory = Some((seat.memory.clone(), 0));
    controller.dma_map(0, GUEST_MEMORY as u64, memory, Prot::RW)?;
    for (vector, sink) in seat.vectors.iter().enumerate() {
        controller.set_msix(vector as u16, Some(sink.clone()));
    }
    Ok(controller)
}

fn new_seat(seat: SeatConfig) -> Result<Seat> {
    let SeatConfig {
        config,
        stack,
        disk,
        is_hostile,
    } = seat;
    let memory = Memory::anonymous(GUEST_MEMORY)?;
    memory.set_kept(NonZeroU32::MIN);
    let vector = |n: u16| Vector {
        number: FIRST_VECTOR + u32::from(n),
        ..Vector::default()
    };
    let vectors = (0..=config.io_queues).map(|n| Arc::new(vector(n)));
    let page = DoorbellPage::new()?;
    Ok(Seat {
        vectors: vectors.collect(),
        state: StateMemory::create(state_layout(&config))?,
        page: page.as_fd().try_clone_to_owned()?,
        config,
        stack,
        disk,
        is_hostile,
        memory,
        trusted_from: 0,
        limited_from: (0, Duration::ZERO),
    })
}
