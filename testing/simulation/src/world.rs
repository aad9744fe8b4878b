//! A run: a host, its guests, and the steps in which something happens to one of them.

use crate::disk::{Disk, Fault, SECTOR};
use crate::guest::{Guest, GuestConfig, Ring};
use crate::hostile::Hostile;
use crate::machine::{Machine, SeatConfig, Stack};
use crate::random::Random;
use crate::trace::Trace;
use anyhow::{Result, bail};
use controller::ControllerConfig;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use volume::{AtomicVolume, ErrorAction, IoLimits, OnError, Rates};

/// Virtual time within which everything completes after the last fault.
const MAX_FINISH: Duration = Duration::from_secs(120);
/// Bytes of a guest's namespace.
const NAMESPACE: u64 = 32 << 10;
/// Index of the disk of the first guest and of the hostile one, which fails.
const FAILING: usize = 0;
/// Index of the disk of the second guest, which never fails.
const QUIET: usize = 1;
/// Index of the disk with the journal of atomic writes. It fails, too.
const JOURNAL: usize = 2;

/// Steps to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Seed of all choices.
    pub seed: u64,
    /// Numbers of the steps, in ascending order.
    pub steps: Vec<u32>,
    /// Whether the disks ignore flushes, so that the run fails: for tests of the simulation.
    pub disks_lie: bool,
}

impl Plan {
    /// Returns the plan of a seed with its first `steps` steps.
    pub fn new(seed: u64, steps: u32) -> Self {
        Self {
            seed,
            steps: (0..steps).collect(),
            disks_lie: false,
        }
    }
}

/// Result of a run.
#[derive(Debug)]
pub struct Report {
    /// Property that did not hold; `None` when all did.
    pub failure: Option<String>,
    /// Number of events by name.
    pub counts: BTreeMap<&'static str, u64>,
    /// Number of I/O commands of the model guests.
    pub commands: u64,
    /// Lines of the trace, if they were asked for.
    pub trace: String,
}

/// Kinds of steps, with their weights in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Guest(usize),
    Hostile,
    Round,
    Disk,
    Time,
    Fault,
    Heal,
    Death,
    CrashPoint,
    PowerLoss,
    Limits,
    Resume,
}

struct World {
    machine: Machine,
    guests: Vec<Guest>,
    hostile: Hostile,
    weights: Vec<(u64, Event)>,
}

/// Runs a plan. A trace is kept if `traces`.
pub fn run(plan: &Plan, traces: bool) -> Report {
    let mut world = None;
    let result = catch_unwind(AssertUnwindSafe(|| {
        let world = world.insert(World::new(plan, traces)?);
        for step in &plan.steps {
            world.step(plan.seed, *step)?;
        }
        world.finish(plan.seed)
    }));
    crash::disarm();
    let failure = match result {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(format!("{error:#}")),
        Err(panic) => Some(format!("panic: {}", panic_message(&*panic))),
    };
    let Some(mut world) = world else {
        return Report {
            failure: failure.or_else(|| Some("no world".into())),
            counts: BTreeMap::new(),
            commands: 0,
            trace: String::new(),
        };
    };
    let commands = world.guests.iter().map(|guest| guest.submitted).sum();
    let trace = std::mem::take(&mut world.machine.trace);
    if failure
        .as_ref()
        .is_some_and(|failure| failure.starts_with("panic"))
    {
        // Destructors of a broken controller may panic, too.
        std::mem::forget(world);
    }
    Report {
        failure,
        counts: trace.counts.clone(),
        commands,
        trace: trace.into_text(),
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    text.unwrap_or_else(|| "of an unknown type".into())
}

impl World {
    fn new(plan: &Plan, traces: bool) -> Result<Self> {
        let seed = plan.seed;
        let mut random = Random::new(seed, u64::MAX);
        let has_cache = !random.one_in(4);
        let quiet_cache = !random.one_in(4);
        let journal_sectors = AtomicVolume::journal_len(4096) as usize / SECTOR;
        let sectors = NAMESPACE as usize / SECTOR;
        let disks = vec![
            Disk::new("failing", 2 * sectors, has_cache),
            Disk::new("quiet", sectors, quiet_cache),
            Disk::new("journal", journal_sectors, has_cache),
        ];
        for disk in &disks {
            disk.set_lying(plan.disks_lie);
        }
        let on_error = OnError {
            read: action(&mut random),
            write: action(&mut random),
        };
        let stacks = [
            Stack {
                slice: Some((0, NAMESPACE)),
                journal: random.one_in(4).then_some(JOURNAL),
                limits: limits(&mut random),
                on_error,
            },
            Stack {
                limits: limits(&mut random),
                ..Stack::default()
            },
            Stack {
                slice: Some((NAMESPACE, NAMESPACE)),
                ..Stack::default()
            },
        ];
        let rings = [Ring::Register, Ring::Mapped, Ring::Shadow];
        let mut seats = Vec::new();
        let mut guests = Vec::new();
        for (seat, (stack, disk)) in stacks
            .into_iter()
            .zip([FAILING, QUIET, FAILING])
            .enumerate()
        {
            let ring = *random.pick(&rings).unwrap_or(&Ring::Register);
            let config = ControllerConfig {
                serial: format!("disk{seat}"),
                io_queues: 3,
                queue_entries: 32,
                mapped_doorbells: ring == Ring::Mapped,
                max_in_flight: 8 << random.below(4),
                ..ControllerConfig::default()
            };
            seats.push(SeatConfig {
                config,
                stack,
                disk,
                is_hostile: seat == 2,
            });
            guests.push(GuestConfig {
                seat,
                blocks: NAMESPACE / SECTOR as u64,
                queues: 1 + random.below(3) as u16,
                ring,
                has_cache: if disk == QUIET {
                    quiet_cache
                } else {
                    has_cache
                },
            });
        }
        guests.pop();
        let weights = weights(&mut random);
        let mut trace = Trace::new(traces);
        trace.set_prefix(|| "start:".into());
        trace.say(|| format!("seed {seed}: {guests:?}"));
        let mut machine = Machine::new(disks, seats, trace, random)?;
        machine.event = 1;
        let guests: Result<_> = guests
            .into_iter()
            .map(|guest| Guest::new(guest, &machine))
            .collect();
        Ok(Self {
            machine,
            guests: guests?,
            hostile: Hostile::new(2),
            weights,
        })
    }

    fn step(&mut self, seed: u64, step: u32) -> Result<()> {
        let machine = &mut self.machine;
        machine.random = Random::new(seed, step.into());
        machine.event += 1;
        machine.trace.set_prefix(|| format!("{step}:"));
        let time = Duration::from_nanos(1000 + machine.random.below(40_000));
        machine.advance(time);
        let Some(event) = machine.random.weighted(&self.weights) else {
            return Ok(());
        };
        match event {
            Event::Guest(guest) => {
                if let Some(guest) = self.guests.get_mut(guest) {
                    guest.act(machine)?;
                }
            }
            Event::Hostile => self.hostile.act(machine)?,
            Event::Round => machine.round()?,
            Event::Disk => {
                let disks = machine.disks().iter().enumerate();
                let busy = disks.filter(|(_, disk)| disk.outstanding() > 0);
                let busy: Vec<usize> = busy.map(|(at, _)| at).collect();
                for _ in 0..=machine.random.below(3) {
                    if let Some(disk) = machine.random.pick(&busy) {
                        machine.step_disk(*disk);
                    }
                }
            }
            Event::Time => {
                let by = Duration::from_micros(100 << machine.random.below(10));
                machine.trace.count("time passes");
                machine.advance(by);
            }
            Event::Fault => {
                let disk = *machine.random.pick(&[FAILING, JOURNAL]).unwrap_or(&FAILING);
                let slow = Duration::from_micros(10 << machine.random.below(12));
                let (name, fault) = match machine.random.below(5) {
                    0 => ("fault: errors", Fault::Errors),
                    1 => ("fault: no space", Fault::Full),
                    2 => ("fault: slow", Fault::Slow(slow)),
                    3 => ("fault: silent", Fault::Silent),
                    _ => ("fault: gone", Fault::Gone),
                };
                machine.trace.count(name);
                machine.set_fault(disk, fault);
            }
            Event::Heal => self.heal(),
            Event::Death => {
                machine.trace.count("death between events");
                machine.die("killed")?;
            }
            Event::CrashPoint => machine.arm_crash_point(),
            Event::PowerLoss => self.lose_power()?,
            Event::Limits => {
                let seat = machine.random.below(2) as usize;
                let limits = limits(&mut machine.random);
                machine.trace.count("operator: limits changed");
                machine.set_limits(seat, limits)?;
            }
            Event::Resume => {
                machine.trace.count("operator: resume");
                machine.resume();
            }
        }
        self.machine.check_limits()
    }

    fn heal(&mut self) {
        for disk in [FAILING, JOURNAL] {
            let fault = self.machine.disks().get(disk).map(Disk::fault);
            if fault.is_some_and(|fault| fault != Fault::None) {
                self.machine.trace.count("fault ends");
                self.machine.set_fault(disk, Fault::None);
            }
        }
    }

    fn lose_power(&mut self) -> Result<()> {
        self.machine.trace.count("loss of power");
        self.machine.lose_power()?;
        for guest in &mut self.guests {
            guest.power_lost(&self.machine)?;
        }
        Ok(())
    }

    /// Ends all faults, waits for every command, and reads all blocks, before and after a loss of
    /// power.
    fn finish(&mut self, seed: u64) -> Result<()> {
        self.machine.random = Random::new(seed, u64::from(u32::MAX) + 1);
        self.machine.trace.set_prefix(|| "end:".into());
        crash::disarm();
        self.heal();
        for seat in 0..2 {
            self.machine.set_limits(seat, IoLimits::default())?;
        }
        for guest in &mut self.guests {
            guest.set_finishing(true);
        }
        if !self.machine.needs_restart() {
            self.settle()?;
        }
        self.machine.event += 1;
        self.machine.die("killed at the end")?;
        self.machine.event += 1;
        self.settle()?;
        self.read_all()?;
        self.lose_power()?;
        self.machine.event += 1;
        self.settle()?;
        self.read_all()
    }

    fn read_all(&mut self) -> Result<()> {
        for n in 0..self.guests.len() {
            let mut lba = 0;
            while let Some(guest) = self.guests.get_mut(n)
                && lba < guest.blocks()
            {
                lba = guest.read_from(&mut self.machine, lba)?;
                self.settle()?;
            }
        }
        Ok(())
    }

    /// Runs until the guests wait for nothing.
    fn settle(&mut self) -> Result<()> {
        let machine = &mut self.machine;
        let limit = machine.clock.elapsed() + MAX_FINISH;
        while !self.guests.iter().all(Guest::is_idle) {
            for guest in &mut self.guests {
                guest.act(machine)?;
            }
            machine.round()?;
            let mut moved = machine.is_awake();
            for disk in 0..machine.disks().len() {
                moved |= machine.step_disk(disk);
            }
            let by = if moved { 10 } else { 10_000 };
            machine.advance(Duration::from_micros(by));
            if machine.random.one_in(16) {
                machine.resume();
            }
            if machine.clock.elapsed() >= limit {
                let waits = self.guests.iter().map(Guest::waits_for);
                let waits: Vec<String> = waits.collect();
                bail!(
                    "commands are not completed within {MAX_FINISH:?}: {}",
                    waits.join(" | ")
                );
            }
        }
        Ok(())
    }
}

/// Chooses which rare events a run has, so that each is frequent in some runs.
fn weights(random: &mut Random) -> Vec<(u64, Event)> {
    let mut weights = vec![
        (300, Event::Guest(0)),
        (150, Event::Guest(1)),
        (350, Event::Round),
        (400, Event::Disk),
        (10, Event::Time),
    ];
    let rare = [
        (60, Event::Hostile),
        (2, Event::Fault),
        (6, Event::Death),
        (10, Event::CrashPoint),
        (1, Event::PowerLoss),
        (3, Event::Limits),
    ];
    for (weight, event) in rare {
        let factor = match random.below(4) {
            0 => 0,
            1 => 1,
            2 => 2,
            _ => 4,
        };
        weights.push((weight * factor, event));
    }
    weights.extend([(8, Event::Heal), (4, Event::Resume)]);
    weights
}

fn action(random: &mut Random) -> ErrorAction {
    let actions = [
        (6, ErrorAction::Report),
        (2, ErrorAction::Retry),
        (1, ErrorAction::Stop),
        (1, ErrorAction::EnospcStop),
    ];
    random.weighted(&actions).unwrap_or_default()
}

fn limits(random: &mut Random) -> IoLimits {
    let rate = |random: &mut Random| match random.below(4) {
        0 => 2000 + random.below(20_000),
        _ => 0,
    };
    let iops = Rates {
        total: rate(random),
        read: 0,
        write: rate(random),
    };
    IoLimits {
        iops,
        burst: Duration::from_millis(1 + random.below(10)),
        ..IoLimits::default()
    }
}
