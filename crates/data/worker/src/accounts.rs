//! Deficit round robin over the front-ends that want the thread, in ticks of the processor's
//! counter.
//!
//! Each round gives each front-end a [`QUANTUM`]. The cost of a turn is known only when the turn is
//! over. A front-end is charged with all its work: commands, completions, messages, its part of the
//! system calls that submit. An overdrawn front-end is left out of the following rounds until each
//! of its neighbours has had as much. A front-end with long pieces of work therefore gets no more
//! of the thread than one with short pieces. Credit is not saved up while a front-end is idle.
//!
//! When only overdrawn front-ends have work, the first of them continues at once. The exception is
//! a neighbour that had work within [`ANTICIPATION`]: its guest, with one command at a time, may be
//! about to send the next one. The thread then waits, and the waiting time is charged to the
//! neighbour. A front-end that is alone is never slowed down.
//!
//! The counter is not read at all while only one front-end has work: see [`Accounts::is_shared`].
//!
//! Reading the counter takes 20 to 40 cycles on x86-64 (more in a virtual machine whose hypervisor
//! traps it, which none does by default) and as long on AArch64. The virtual counter of AArch64 may
//! run at 24 to 62 MHz only; a quantum then is some hundred ticks, which is still precise enough.

use std::time::Duration;

/// Time that a front-end may use in a round, and that a guest waits for each other busy guest. A
/// much shorter quantum would be dominated by a turn's own cost: two readings of the counter, and a
/// system call for volumes that are files.
pub(crate) const QUANTUM: Duration = Duration::from_micros(25);
/// Maximum debt; more is forgiven at once. No piece of work takes this long: only a machine or
/// thread that was suspended does.
const MAX_DEBT: Duration = Duration::from_millis(100);
/// Time that a guest with one command at a time may take before its next command, at the cost of
/// overdrawn front-ends. They wait this long, and no longer than they have overdrawn. Most guests
/// that poll take less; guests that sleep until an interrupt take about as long.
const ANTICIPATION: Duration = Duration::from_micros(50);
/// Time with work from one front-end only after which the counter is no longer read.
const HOLD: Duration = Duration::from_millis(10);

/// Units of a budget between two readings of the counter, while several front-ends have work.
pub(crate) const SHARED_UNITS: u32 = 32;
/// Units of a budget between two readings of the counter, while only one front-end has work. The
/// limit bounds the round, so that a second busy front-end is noticed soon.
pub(crate) const ALONE_UNITS: u32 = 512;
/// Divisor of a front-end's quantum: a poll that takes longer than the result has found work.
const LOOKS_PER_QUANTUM: u64 = 8;
/// Started units from which the ring is submitted on their owners' account. Fewer units wait for
/// those of other front-ends, to share one system call and its cost.
const FLUSH_UNITS: u32 = 16;

/// A turn that takes less than this fraction of a quantum, and completes its work, is a light one.
const LIGHT_PER_QUANTUM: u64 = 8;
/// Maximum number of front-ends with short turns that are served between the pieces of others' long
/// turns.
const MAX_LIGHT: usize = 4;

/// Number of fair shares of the thread that a light front-end may use between the pieces of heavier
/// ones. With one command at a time it would otherwise wait for the share of each of them, a
/// multiple of its command's own time.
const LIGHT_SHARES: u64 = 2;

/// Index that stands for no front-end.
const NO_FRONTEND: usize = usize::MAX;

/// Cycle counter of the processor (or of a test), and its rate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counter {
    pub read: fn() -> u64,
    pub per_second: f64,
}

impl Counter {
    /// Returns the processor's counter. The first call calibrates it against the clock, which takes
    /// ten milliseconds.
    pub fn of_processor() -> Self {
        Self {
            read: probes::cycles,
            per_second: probes::cycles_per_second(),
        }
    }

    fn ticks(self, time: Duration) -> u64 {
        (time.as_secs_f64() * self.per_second) as u64
    }
}

/// Processor time that one front-end has used and may still use, in ticks of the counter.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    /// Number of ticks that the front-end has used, minus the quanta granted since.
    spent: u64,
    /// Whether this round leaves the front-end out, because its quantum was used up when the round
    /// began.
    left_out: bool,
    /// Whether the front-end had work in this round.
    active: bool,
    /// Counter value at the end of the last round in which the front-end had work.
    active_at: u64,
    /// Ticks of the last turn with work; the maximum if that turn left work undone.
    turn: u64,
    /// Whether the front-end was served between the pieces of others' long turns in this round.
    interrupted: bool,
    /// Whether the front-end was notified of a ready descriptor, and has had no turn since.
    told: bool,
}

/// Time accounts of a worker's front-ends, by which busy front-ends share the thread fairly.
#[derive(Debug)]
pub(crate) struct Accounts {
    counter: Counter,
    quantum: u64,
    most: u64,
    anticipation: u64,
    hold: u64,
    /// Time account of each front-end, by its number on the worker.
    accounts: Vec<Account>,
    /// Number of the front-end that had work last.
    last: usize,
    shared: bool,
    /// Counter value up to which all time was charged to front-ends or skipped.
    mark: u64,
    /// Counter value at the end of the last round.
    settled: u64,
    /// Counter value when the front-end with work last changed, or one was left out.
    changed: u64,
    /// Number of front-ends that get no turn in this round, because their quantum is used up.
    left_out: u32,
    /// Numbers of the front-ends with recent work and short turns, see [`Accounts::light_at`].
    light: Vec<usize>,
    /// Number of front-ends that had work in the last round, or were left out of it.
    active: u64,
    /// Units of work that each front-end has started and that are not submitted yet.
    unsent: Vec<(usize, u32)>,
    unsent_units: u32,
}

impl Accounts {
    pub fn new(counter: Counter) -> Self {
        Self {
            counter,
            quantum: counter.ticks(QUANTUM),
            most: counter.ticks(QUANTUM + MAX_DEBT),
            anticipation: counter.ticks(ANTICIPATION),
            hold: counter.ticks(HOLD),
            accounts: Vec::new(),
            last: NO_FRONTEND,
            shared: false,
            mark: 0,
            settled: 0,
            changed: 0,
            left_out: 0,
            light: Vec::with_capacity(MAX_LIGHT + 1),
            active: 0,
            unsent: Vec::new(),
            unsent_units: 0,
        }
    }

    /// Opens the account of a new front-end, at an index that a former one may have had.
    pub fn open(&mut self, at: usize) {
        if self.accounts.len() <= at {
            self.accounts.resize(at + 1, Account::default());
        }
        if let Some(account) = self.accounts.get_mut(at) {
            *account = Account::default();
        }
    }

    /// Returns whether several front-ends have, or recently had, work. Only then are the calls
    /// below made.
    #[inline(always)]
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// Records work of front-end `at` while no other front-end has work.
    #[inline(always)]
    pub fn worked_alone(&mut self, at: usize) {
        if self.last != at {
            self.another(at);
        }
    }

    #[cold]
    #[inline(never)]
    fn another(&mut self, at: usize) {
        if self.last != NO_FRONTEND {
            let now = (self.counter.read)();
            (self.mark, self.settled, self.changed) = (now, now, now);
            self.accounts.fill(Account::default());
            self.unsent.clear();
            self.unsent_units = 0;
            self.left_out = 0;
            self.light.clear();
            self.active = 0;
            self.shared = true;
        }
        self.last = at;
    }

    /// Returns whether the front-end may handle more messages; `begun` is the counter value at its
    /// first one.
    pub fn may_read(&self, at: usize, begun: u64) -> bool {
        if self.shared {
            self.may_work(at)
        } else {
            self.now().saturating_sub(begun) < self.quantum
        }
    }

    /// Charges the front-end for the messages and descriptor events that it has handled.
    pub fn read(&mut self, at: usize) {
        if self.shared {
            self.charge(at);
            self.worked(at);
        } else {
            self.worked_alone(at);
        }
    }

    /// Returns the present value of the counter, in ticks.
    pub fn now(&self) -> u64 {
        (self.counter.read)()
    }

    /// Records that a front-end that may work was notified of a descriptor. It then has one turn
    /// even if its quantum is used up meanwhile. Without that turn a slow notification would be
    /// repeated again and again, and its work never done.
    pub fn tell(&mut self, at: usize) {
        if let Some(account) = self.accounts.get_mut(at) {
            account.told = true;
        }
    }

    /// Takes the notification that [`Accounts::tell`] recorded, and returns whether there was one.
    pub fn was_told(&mut self, at: usize) -> bool {
        let account = self.accounts.get_mut(at);
        account.is_some_and(|account| std::mem::take(&mut account.told))
    }

    /// Charges the time since the last charge to no front-end.
    pub fn skip(&mut self) {
        self.mark = self.now();
    }

    /// Returns whether front-end `at` may work in this round: a part of its quantum is left.
    pub fn may_work(&self, at: usize) -> bool {
        let account = self.accounts.get(at);
        account.is_none_or(|account| !account.left_out && account.spent < self.quantum)
    }

    /// Returns whether front-end `at` gets no turn in this round, because its quantum is used up.
    pub fn is_left_out(&self, at: usize) -> bool {
        self.accounts.get(at).is_some_and(|a| a.left_out)
    }

    /// Returns the ticks that front-end `at` has used, minus the quanta granted since.
    pub fn spent(&self, at: usize) -> u64 {
        self.accounts.get(at).map_or(0, |account| account.spent)
    }

    /// Ends a turn with work. `spent_before`: the front-end's [`Accounts::spent`] at the start of
    /// the turn. `undone`: the turn has left work.
    pub fn end_turn(&mut self, at: usize, spent_before: u64, undone: bool) {
        if let Some(account) = self.accounts.get_mut(at) {
            account.turn = if undone {
                u64::MAX
            } else {
                account.spent.saturating_sub(spent_before)
            };
        }
    }

    /// Returns the front-end at this place of the light list, for example one with one command at a
    /// time. Light front-ends are served between two pieces of heavier ones, so that none waits for
    /// everyone's quantum.
    #[inline]
    pub fn light_at(&self, place: usize) -> Option<usize> {
        self.light.get(place).copied()
    }

    /// Returns whether the front-end has used at most [`LIGHT_SHARES`] fair shares of this round so
    /// far. Asking more often does not give it more time.
    #[inline]
    pub fn may_interrupt(&self, at: usize) -> bool {
        let elapsed = self.mark.saturating_sub(self.settled);
        let account = self.accounts.get(at);
        account.is_some_and(|a| {
            !a.left_out && a.spent.saturating_mul(self.active) <= elapsed * LIGHT_SHARES
        })
    }

    /// Records that front-end `at` was served between the pieces of others' long turns.
    pub fn interrupted(&mut self, at: usize) {
        if let Some(account) = self.accounts.get_mut(at) {
            account.interrupted = true;
        }
    }

    /// Charges the time since the last charge to this front-end. Returns `true` when it exceeds the
    /// cost of a look that finds nothing.
    pub fn charge(&mut self, at: usize) -> bool {
        let ticks = self.elapsed();
        self.add(at, ticks);
        ticks > self.quantum / LOOKS_PER_QUANTUM
    }

    /// Returns the ticks since the last charge, all of which count as charged now.
    fn elapsed(&mut self) -> u64 {
        let now = self.now();
        // Processors' counters may differ slightly: after a migration the value may be before the
        // mark.
        now.saturating_sub(std::mem::replace(&mut self.mark, now))
    }

    fn add(&mut self, at: usize, ticks: u64) {
        if let Some(account) = self.accounts.get_mut(at) {
            account.spent = account.spent.saturating_add(ticks).min(self.most);
        }
    }

    /// Records that front-end `at` had work in this round.
    pub fn worked(&mut self, at: usize) {
        if let Some(account) = self.accounts.get_mut(at) {
            account.active = true;
        }
        if self.last != at {
            self.last = at;
            self.changed = self.mark;
        }
    }

    /// Returns whether the front-end had work in this round.
    pub fn is_active(&self, at: usize) -> bool {
        self.accounts.get(at).is_some_and(|account| account.active)
    }

    /// Adds units that the front-end has started. Returns `true` when they are to be submitted.
    pub fn started(&mut self, at: usize, units: u32) -> bool {
        self.unsent.push((at, units));
        self.unsent_units = self.unsent_units.saturating_add(units);
        self.unsent_units >= FLUSH_UNITS
    }

    /// Divides the time of a submission among the front-ends that started units, in proportion to
    /// their units.
    pub fn sent(&mut self) {
        let ticks = self.elapsed();
        let units = u64::from(std::mem::take(&mut self.unsent_units)).max(1);
        while let Some((at, part)) = self.unsent.pop() {
            self.add(at, ticks / units * u64::from(part));
        }
    }

    /// Returns whether any front-end got no turn because its quantum was used up.
    #[inline]
    pub fn anyone_left_out(&self) -> bool {
        self.shared && self.left_out > 0
    }

    /// Ends a round. Each front-end that the round polled is granted its quantum.
    pub fn settle(&mut self, all: impl Iterator<Item = usize> + Clone) {
        let now = self.now();
        let elapsed = now.saturating_sub(std::mem::replace(&mut self.settled, now));
        let (mut served, mut active) = (0, 0);
        for at in all.clone() {
            let Some(account) = self.accounts.get_mut(at).filter(|a| a.active) else {
                continue;
            };
            account.active_at = now;
            if !account.left_out {
                served += account.spent.min(self.quantum);
                active += 1;
            }
        }
        self.active = active + u64::from(self.left_out);
        // Share that each of the served front-ends had, at most a quantum.
        let paid = match active {
            0 if self.expects(now, all.clone()) => elapsed,
            0 => self.least_debt(all.clone()),
            active => served / active,
        };
        if active > 0 && self.left_out > 0 {
            self.changed = now;
        }
        // The round took longer than the quanta, because some front-ends have overdrawn. A
        // front-end that kept to its share owes nothing.
        let part = elapsed
            .checked_div(self.active)
            .unwrap_or(0)
            .max(self.quantum);
        self.left_out = 0;
        self.light.clear();
        for at in all {
            self.consider(at, now);
            let Some(account) = self.accounts.get_mut(at) else {
                continue;
            };
            let given = match (account.left_out, account.interrupted) {
                (true, _) => paid,
                (false, true) => part.saturating_mul(LIGHT_SHARES),
                (false, false) => self.quantum,
            };
            account.interrupted = false;
            account.spent = account.spent.saturating_sub(given);
            account.left_out = account.spent >= self.quantum;
            account.active = false;
            self.left_out += u32::from(account.left_out);
        }
        self.shared = now.saturating_sub(self.changed) <= self.hold;
    }

    /// Adds front-end `at` to those with the shortest turns, if it belongs to them.
    fn consider(&mut self, at: usize, now: u64) {
        let turn = |at: usize| self.accounts.get(at).map_or(u64::MAX, |a| a.turn);
        let lately = |a: &Account| now.saturating_sub(a.active_at) <= self.hold;
        let own = turn(at);
        if own >= self.quantum / LIGHT_PER_QUANTUM || !self.accounts.get(at).is_some_and(lately) {
            return;
        }
        let place = self.light.partition_point(|&other| turn(other) <= own);
        if place < MAX_LIGHT {
            self.light.insert(place, at);
            self.light.truncate(MAX_LIGHT);
        }
    }

    /// Returns whether a front-end that may work had work lately: its guest may be about to send
    /// more.
    fn expects(&self, now: u64, all: impl Iterator<Item = usize>) -> bool {
        let lately = |a: &Account| now.saturating_sub(a.active_at) <= self.anticipation;
        let mut accounts = all.filter_map(|at| self.accounts.get(at));
        accounts.any(|a| !a.left_out && lately(a))
    }

    /// Returns the number of ticks that must be granted until the first left-out front-end may work
    /// again.
    fn least_debt(&self, all: impl Iterator<Item = usize>) -> u64 {
        let accounts = all.filter_map(|at| self.accounts.get(at));
        let left_out = accounts.filter(|a| a.left_out);
        let least = left_out.map(|a| a.spent).min().unwrap_or(0);
        least.saturating_sub(self.quantum).saturating_add(1)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)] // A test fails by a panic.
mod tests;
