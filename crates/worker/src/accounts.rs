//! Whose time it is, while several front-ends want the thread: deficit round robin by the
//! processor's counter.
//!
//! Each round gives each front-end a [`QUANTUM`]. What a turn takes is known only when it is over:
//! a front-end is charged with all that was done for it (commands, completions, messages, its part
//! of the system calls that submit), and what it has overdrawn is missing in the rounds that
//! follow: it is left out until each of the others has had as much, so that one whose pieces of
//! work are long gets no more of the thread than one whose pieces are short. Nothing is saved up:
//! who was idle has no credit.
//!
//! When nobody has work but those who are left out, the first of them goes on at once. Not so when
//! another one had work a moment ago ([`ANTICIPATION`]): its guest, with one command at a time, may
//! be just about to send the next one. Then the thread waits, and this time counts as the other's.
//! So a front-end that is alone is never slowed.
//!
//! As long as only one front-end has work the counter is not read at all: [`Accounts::is_shared`].
//!
//! Reading the counter takes 20 to 40 cycles on x86-64 (more in a virtual machine whose hypervisor
//! traps it, which none does by default) and as long on AArch64. There the virtual counter may
//! count at 24 to 62 MHz only: a quantum is some hundred ticks then, which is still good enough.

use std::time::Duration;

/// What a front-end may use of a round. It is what a guest waits for each other one that is busy.
/// Much shorter, and a turn's own cost would show: two readings of the counter, and a system call
/// where files are concerned.
pub(crate) const QUANTUM: Duration = Duration::from_micros(25);
/// More debt than this is forgiven at once: no piece of work takes so long. What does is a machine,
/// or a thread, that stood still.
const MOST_DEBT: Duration = Duration::from_millis(100);
/// How long a guest with one command at a time may think before its next one, at the cost of those
/// who have overdrawn: they wait so long, and no longer than they have overdrawn. Most guests that
/// poll take less, and those that sleep until an interrupt comes take about as long.
const ANTICIPATION: Duration = Duration::from_micros(50);
/// How long only one front-end has work before the counter is not read any more.
const HOLD: Duration = Duration::from_millis(10);

/// Units of a budget between two looks at the counter, while several front-ends have work.
pub(crate) const SHARED_UNITS: u32 = 32;
/// The same of a front-end that has the thread for itself: bounds the round, so that the next one
/// is seen soon.
pub(crate) const ALONE_UNITS: u32 = 512;
/// What takes longer than this part of a quantum is more than a look that finds nothing.
const LOOKS_PER_QUANTUM: u64 = 8;
/// What was started on the ring is sent on its owners' account from so many units on. Less than
/// that waits for that of others, to go with it in one system call, whose time they share.
const FLUSH_UNITS: u32 = 16;

/// A turn that takes less than this part of a quantum, and leaves nothing undone, is a light one.
const LIGHT_PER_QUANTUM: u64 = 8;
/// So many front-ends with light turns are looked at between the pieces of others.
const MOST_LIGHT: usize = 4;

/// A front-end with light turns may have so many times its fair part of the thread between the
/// pieces of others: one with a command at a time would wait for all others' parts else, as many
/// times its command's own time as there are others.
const LIGHT_SHARES: u64 = 2;

/// No front-end.
const NOBODY: usize = usize::MAX;

/// A counter of time, and its rate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counter {
    pub read: fn() -> u64,
    pub per_second: f64,
}

impl Counter {
    /// The processor's. Compares it with the clock when it is first asked for, which takes ten
    /// milliseconds.
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

/// What one front-end has used and owes, in the counter's ticks.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    /// Used, less the quanta that it was given since.
    spent: u64,
    /// This round leaves it out: it began with nothing left of its quantum.
    left_out: bool,
    /// It had work in this round.
    active: bool,
    /// The end of the last round in which it had work.
    active_at: u64,
    /// What its last turn with work took; as much as can be where that left something undone.
    turn: u64,
    /// It was served between the pieces of others in this round.
    interrupted: bool,
    /// It was told of a descriptor, and has had no turn since.
    told: bool,
}

/// The accounts of a worker's front-ends.
#[derive(Debug)]
pub(crate) struct Accounts {
    counter: Counter,
    quantum: u64,
    most: u64,
    anticipation: u64,
    hold: u64,
    /// By owner.
    accounts: Vec<Account>,
    /// The front-end that had work last.
    last: usize,
    shared: bool,
    /// Everything before this moment is in the accounts, or was nobody's.
    mark: u64,
    /// The last end of a round.
    settled: u64,
    /// When another one than before had work, or one was left out.
    changed: u64,
    /// Front-ends that the last round left out.
    left_out: u32,
    /// Front-ends that had work lately, and whose turns are light, see [`Accounts::light_at`].
    light: Vec<usize>,
    /// How many front-ends had work in the last round, or were left out of it.
    active: u64,
    /// Started and not sent: by whom, and how much.
    unsent: Vec<(usize, u32)>,
    unsent_units: u32,
}

impl Accounts {
    pub fn new(counter: Counter) -> Self {
        Self {
            counter,
            quantum: counter.ticks(QUANTUM),
            most: counter.ticks(QUANTUM + MOST_DEBT),
            anticipation: counter.ticks(ANTICIPATION),
            hold: counter.ticks(HOLD),
            accounts: Vec::new(),
            last: NOBODY,
            shared: false,
            mark: 0,
            settled: 0,
            changed: 0,
            left_out: 0,
            light: Vec::with_capacity(MOST_LIGHT + 1),
            active: 0,
            unsent: Vec::new(),
            unsent_units: 0,
        }
    }

    /// A front-end begins, in a place that another one may have had.
    pub fn open(&mut self, at: usize) {
        if self.accounts.len() <= at {
            self.accounts.resize(at + 1, Account::default());
        }
        if let Some(account) = self.accounts.get_mut(at) {
            *account = Account::default();
        }
    }

    /// Several front-ends have work, or had lately: all calls below are made.
    #[inline(always)]
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// While the thread is not shared: this front-end had work.
    #[inline(always)]
    pub fn worked_alone(&mut self, at: usize) {
        if self.last != at {
            self.another(at);
        }
    }

    #[cold]
    #[inline(never)]
    fn another(&mut self, at: usize) {
        if self.last != NOBODY {
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

    /// The front-end may handle more messages, of which it began the first one at that moment of
    /// the counter.
    pub fn may_read(&self, at: usize, begun: u64) -> bool {
        match self.shared {
            true => self.may_work(at),
            false => self.now().saturating_sub(begun) < self.quantum,
        }
    }

    /// It has handled messages, or what else its descriptors tell.
    pub fn read(&mut self, at: usize) {
        if self.shared {
            self.charge(at);
            self.worked(at);
        } else {
            self.worked_alone(at);
        }
    }

    /// The counter now.
    pub fn now(&self) -> u64 {
        (self.counter.read)()
    }

    /// The front-end, which may work, has been told of a descriptor: it has a turn for that, though
    /// it may have used its quantum up meanwhile. Else it would be told again and again, if that
    /// takes long enough, and never come to what it was told of.
    pub fn tell(&mut self, at: usize) {
        if let Some(account) = self.accounts.get_mut(at) {
            account.told = true;
        }
    }

    /// It was told of something since it was last asked for that.
    pub fn was_told(&mut self, at: usize) -> bool {
        let account = self.accounts.get_mut(at);
        account.is_some_and(|account| std::mem::take(&mut account.told))
    }

    /// The time since the last call of this kind was nobody's.
    pub fn skip(&mut self) {
        self.mark = self.now();
    }

    /// The front-end may work: it has something left of its quantum.
    pub fn may_work(&self, at: usize) -> bool {
        let account = self.accounts.get(at);
        account.is_none_or(|account| !account.left_out && account.spent < self.quantum)
    }

    /// This round leaves the front-end out.
    pub fn is_left_out(&self, at: usize) -> bool {
        self.accounts.get(at).is_some_and(|a| a.left_out)
    }

    /// What the front-end has used, less the quanta that it was given since.
    pub fn spent(&self, at: usize) -> u64 {
        self.accounts.get(at).map_or(0, |account| account.spent)
    }

    /// A turn with work has ended, which the front-end began when it had spent so much. It may have
    /// left something undone.
    pub fn end_turn(&mut self, at: usize, spent_before: u64, undone: bool) {
        if let Some(account) = self.accounts.get_mut(at) {
            account.turn = match undone {
                true => u64::MAX,
                false => account.spent.saturating_sub(spent_before),
            };
        }
    }

    /// One of the front-ends that need little, as one with a command at a time: they are looked at
    /// between two pieces of others' work, so that none waits for the quanta of all others.
    #[inline]
    pub fn light_at(&self, place: usize) -> Option<usize> {
        self.light.get(place).copied()
    }

    /// The front-end has used no more of this round than [`LIGHT_SHARES`] fair parts, so far. It
    /// does not get more of the time by that it asks more often.
    #[inline]
    pub fn may_interrupt(&self, at: usize) -> bool {
        let elapsed = self.mark.saturating_sub(self.settled);
        let account = self.accounts.get(at);
        account.is_some_and(|a| {
            !a.left_out && a.spent.saturating_mul(self.active) <= elapsed * LIGHT_SHARES
        })
    }

    /// The front-end was served between the pieces of others.
    pub fn interrupted(&mut self, at: usize) {
        if let Some(account) = self.accounts.get_mut(at) {
            account.interrupted = true;
        }
    }

    /// The time since the last call of this kind was this front-end's. `true` when it was more than
    /// a look that finds nothing takes.
    pub fn charge(&mut self, at: usize) -> bool {
        let ticks = self.elapsed();
        self.add(at, ticks);
        ticks > self.quantum / LOOKS_PER_QUANTUM
    }

    /// The time since everything was in the accounts, which it is with this call.
    fn elapsed(&mut self) -> u64 {
        let now = self.now();
        // Where the processors' counters differ a little, a thread that moved may be before it.
        now.saturating_sub(std::mem::replace(&mut self.mark, now))
    }

    fn add(&mut self, at: usize, ticks: u64) {
        if let Some(account) = self.accounts.get_mut(at) {
            account.spent = account.spent.saturating_add(ticks).min(self.most);
        }
    }

    /// The front-end had work.
    pub fn worked(&mut self, at: usize) {
        if let Some(account) = self.accounts.get_mut(at) {
            account.active = true;
        }
        if self.last != at {
            self.last = at;
            self.changed = self.mark;
        }
    }

    /// It had work in this round.
    pub fn is_active(&self, at: usize) -> bool {
        self.accounts.get(at).is_some_and(|account| account.active)
    }

    /// The front-end has started so much. `true` when it is to be sent.
    pub fn started(&mut self, at: usize, units: u32) -> bool {
        self.unsent.push((at, units));
        self.unsent_units = self.unsent_units.saturating_add(units);
        self.unsent_units >= FLUSH_UNITS
    }

    /// What was started has been sent, which took the time since the last call: each of those who
    /// have started something has its part of it.
    pub fn sent(&mut self) {
        let ticks = self.elapsed();
        let units = u64::from(std::mem::take(&mut self.unsent_units)).max(1);
        while let Some((at, part)) = self.unsent.pop() {
            self.add(at, ticks / units * u64::from(part));
        }
    }

    /// Some front-end has to wait until it may work again.
    #[inline]
    pub fn anyone_left_out(&self) -> bool {
        self.shared && self.left_out > 0
    }

    /// A round has ended: each of those that it looked at gets its quantum.
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
        // What each of the others had, at most a quantum.
        let paid = match active {
            0 if self.expects(now, all.clone()) => elapsed,
            0 => self.least_debt(all.clone()),
            active => served / active,
        };
        if active > 0 && self.left_out > 0 {
            self.changed = now;
        }
        // A round that took longer than the quanta, for others have overdrawn theirs: who kept to
        // its part of the time owes nothing.
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

    /// Remembers the front-end among those with the lightest turns, if it belongs there.
    fn consider(&mut self, at: usize, now: u64) {
        let turn = |at: usize| self.accounts.get(at).map_or(u64::MAX, |a| a.turn);
        let lately = |a: &Account| now.saturating_sub(a.active_at) <= self.hold;
        let own = turn(at);
        if own >= self.quantum / LIGHT_PER_QUANTUM || !self.accounts.get(at).is_some_and(lately) {
            return;
        }
        let place = self.light.partition_point(|&other| turn(other) <= own);
        if place < MOST_LIGHT {
            self.light.insert(place, at);
            self.light.truncate(MOST_LIGHT);
        }
    }

    /// A front-end that may work has had work lately: its guest may be about to send more.
    fn expects(&self, now: u64, all: impl Iterator<Item = usize>) -> bool {
        let lately = |a: &Account| now.saturating_sub(a.active_at) <= self.anticipation;
        let mut accounts = all.filter_map(|at| self.accounts.get(at));
        accounts.any(|a| !a.left_out && lately(a))
    }

    /// What lets the first one of those who are left out work again.
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
