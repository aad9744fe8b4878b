//! Order in which rounds poll the front-ends, without access to the front-ends themselves.
//!
//! Most of many disks are idle most of the time, and polling each of them in each round would cost
//! more than the work of the busy ones. *Hot* front-ends, which had work lately, are polled in
//! every round. *Idle* ones are polled in turn, all of them within [`IDLE_TURN`] rounds. When more
//! than [`MAX_IDLE`] are idle, those idle for [`ARM_AFTER`] are *armed* as before the thread's own
//! sleep. Armed front-ends are not polled until an event wakes them, and cost a round nothing.
//!
//! ```text
//! front-ends:  [ hot | hot | idle | idle | idle | armed | armed | armed ]
//!                            ^ hot  ^ next        ^ awake
//! ```
//!
//! A front-end changes its state by a swap with the entry at the border.

use std::time::{Duration, Instant};

/// Number of rounds without work after which a hot front-end becomes an idle one.
const IDLE_AFTER: u16 = 1024;
/// Rounds without work in which every idle front-end is polled once, while others are hot. A round
/// with work counts as several.
const IDLE_TURN: usize = 32;
/// Units of work (see [`volume::Budget`]) that count as another round.
const UNITS_PER_ROUND: u32 = 8;
/// Number of idle front-ends that are always polled: one in sixteen rounds without work. A poll
/// takes some hundred nanoseconds, which delays a busy front-end with one command at a time.
const MAX_IDLE: usize = 2;
/// Idle time after which a front-end may be armed. Commands for an armed front-end are found by a
/// check of the sockets, within 100 us, and cost its guest a register write.
const ARM_AFTER: Duration = Duration::from_millis(10);

/// Entry of a front-end in the queue: its number, and how long it has had no work.
#[derive(Clone, Copy, Debug)]
struct Entry {
    owner: u16,
    /// Number of rounds in a row without work, while the front-end is hot.
    quiet: u16,
    /// Time at which the front-end became idle.
    since: Option<Instant>,
}

/// Order in which a worker polls its front-ends: hot (each round), idle (in turn), armed (not at
/// all).
#[derive(Debug, Default)]
pub(crate) struct RunQueue {
    entries: Vec<Entry>,
    /// Number of hot front-ends, which each round polls.
    hot: usize,
    /// Number of hot and idle front-ends together.
    awake: usize,
    /// Position of the idle front-end that is polled next.
    next: usize,
    /// Polls of idle front-ends that are due, in units of 1/[`IDLE_TURN`].
    due: usize,
    /// Position of the armed front-end that is next in housekeeping.
    next_armed: usize,
}

impl RunQueue {
    /// Adds a new front-end, which is polled in each round at first.
    pub fn insert(&mut self, owner: u16) {
        self.remove(owner);
        self.entries.push(Entry {
            owner,
            quiet: 0,
            since: None,
        });
        self.promote(self.entries.len() - 1);
    }

    /// Removes a front-end.
    pub fn remove(&mut self, owner: u16) {
        let Some(mut at) = self.position(owner) else {
            return;
        };
        // Moves the entry to the end, across each border.
        if at < self.hot {
            self.hot -= 1;
            self.entries.swap(at, self.hot);
            at = self.hot;
        }
        if at < self.awake {
            self.awake -= 1;
            self.entries.swap(at, self.awake);
            at = self.awake;
        }
        self.entries.swap_remove(at);
    }

    fn position(&self, owner: u16) -> Option<usize> {
        self.entries.iter().position(|entry| entry.owner == owner)
    }

    /// Makes a front-end hot, since an event for it has arrived: the next round polls it.
    #[inline]
    pub fn wake(&mut self, owner: u16) {
        let mut hot = self.entries.iter_mut().take(self.hot);
        if let Some(entry) = hot.find(|entry| entry.owner == owner) {
            entry.quiet = 0;
        } else if let Some(at) = self.position(owner) {
            self.promote(at);
        }
    }

    /// Makes all front-ends hot.
    pub fn wake_all(&mut self) {
        for entry in &mut self.entries {
            entry.quiet = 0;
        }
        self.hot = self.entries.len();
        self.awake = self.hot;
    }

    /// Makes the front-end at this position hot; it must not be hot yet.
    fn promote(&mut self, mut at: usize) {
        if at >= self.awake {
            self.entries.swap(at, self.awake);
            at = self.awake;
            self.awake += 1;
        }
        self.entries.swap(at, self.hot);
        if let Some(entry) = self.entries.get_mut(self.hot) {
            (entry.quiet, entry.since) = (0, None);
        }
        self.hot += 1;
    }

    /// Returns the number of hot front-ends.
    #[inline]
    pub fn hot_count(&self) -> usize {
        self.hot
    }

    /// Returns the owner numbers of the hot front-ends.
    #[inline]
    pub fn hot(&self) -> impl Iterator<Item = usize> + Clone {
        let hot = self.entries.get(..self.hot).unwrap_or_default();
        hot.iter().map(|entry| entry.owner.into())
    }

    /// Returns the owner numbers of the hot and idle front-ends.
    #[inline]
    pub fn awake(&self) -> impl Iterator<Item = usize> + Clone {
        let awake = self.entries.get(..self.awake).unwrap_or_default();
        awake.iter().map(|entry| entry.owner.into())
    }

    /// Returns whether the front-end is armed, so that it is not polled.
    pub fn is_armed(&self, owner: u16) -> bool {
        let mut armed = self.entries.iter().skip(self.awake);
        armed.any(|entry| entry.owner == owner)
    }

    /// Returns the idle front-end at a place; the first one is behind the hot ones. When it wakes,
    /// one from an earlier place takes its place.
    pub fn idle_at(&self, at: usize) -> Option<usize> {
        let awake = self.entries.get(..self.awake)?;
        let entry = awake.get(at).filter(|_| at >= self.hot);
        entry.map(|entry| entry.owner.into())
    }

    /// Returns the position of the first armed front-end.
    pub fn first_armed(&self) -> usize {
        self.awake
    }

    /// Returns the armed front-end at a place. When it wakes, one from an earlier place takes its
    /// place.
    pub fn armed_at(&self, at: usize) -> Option<usize> {
        let entry = self.entries.get(at).filter(|_| at >= self.awake);
        entry.map(|entry| entry.owner.into())
    }

    /// Returns the hot front-end at a place, counted from 0.
    #[inline(always)]
    pub fn hot_at(&self, at: usize) -> Option<usize> {
        let hot = self.entries.get(..self.hot)?;
        hot.get(at).map(|entry| entry.owner.into())
    }

    /// Records that the hot front-end at this position had work.
    #[inline(always)]
    pub fn worked(&mut self, at: usize) {
        if let Some(entry) = self.entries.get_mut(at) {
            entry.quiet = 0;
        }
    }

    /// Records that the hot front-end at this place had no work. Returns whether it has had none
    /// for long.
    #[inline(always)]
    pub fn was_quiet(&mut self, at: usize) -> bool {
        self.entries.get_mut(at).is_some_and(|entry| {
            entry.quiet += 1;
            entry.quiet >= IDLE_AFTER
        })
    }

    /// Makes the hot front-end at this place idle. Another one may then be at this place.
    pub fn demote(&mut self, at: usize, now: Instant) {
        if at >= self.hot {
            return;
        }
        self.hot -= 1;
        self.entries.swap(at, self.hot);
        if let Some(entry) = self.entries.get_mut(self.hot) {
            entry.since = Some(now);
        }
    }

    /// Returns how many idle front-ends this round polls, when the hot ones did `units` of work.
    #[inline(always)]
    pub fn idle_share(&mut self, units: u32) -> usize {
        let idle = self.awake - self.hot;
        if idle == 0 {
            0
        } else {
            self.share_of(idle, units)
        }
    }

    fn share_of(&mut self, idle: usize, units: u32) -> usize {
        if self.hot == 0 {
            self.next = 0;
            return idle;
        }
        self.due += idle * (1 + (units / UNITS_PER_ROUND) as usize);
        let share = self.due / IDLE_TURN;
        self.due %= IDLE_TURN;
        share.min(idle)
    }

    /// Returns the idle front-end that is next in turn.
    pub fn next_idle(&mut self) -> Option<usize> {
        if self.next < self.hot || self.next >= self.awake {
            self.next = self.hot;
        }
        let at = self.next;
        self.next += 1;
        let awake = self.entries.get(..self.awake)?;
        awake.get(at).map(|entry| entry.owner.into())
    }

    /// Returns a front-end that may be armed: many are idle, and this one has been idle for long.
    pub fn arms_next(&self, now: Instant) -> Option<usize> {
        if self.awake - self.hot <= MAX_IDLE {
            return None;
        }
        let mut idle = self.entries.get(self.hot..self.awake)?.iter();
        let long = |entry: &&Entry| {
            let idle = entry
                .since
                .map(|since| now.saturating_duration_since(since));
            idle.is_some_and(|idle| idle >= ARM_AFTER)
        };
        idle.find(long).map(|entry| entry.owner.into())
    }

    /// Arms an idle front-end, so that it is no longer polled.
    pub fn arm(&mut self, owner: usize) {
        let place = self
            .entries
            .iter()
            .position(|s| usize::from(s.owner) == owner);
        if let Some(at) = place.filter(|at| (self.hot..self.awake).contains(at)) {
            self.awake -= 1;
            self.entries.swap(at, self.awake);
        }
    }

    /// Restarts the idle time of a front-end that cannot be armed now, so that arming is tried
    /// again later.
    pub fn stay(&mut self, owner: usize, now: Instant) {
        let mut idle = self.entries.iter_mut().skip(self.hot);
        if let Some(entry) = idle.find(|entry| usize::from(entry.owner) == owner) {
            entry.since = Some(now);
        }
    }

    /// Returns the armed front-end that is next in housekeeping.
    pub fn next_armed(&mut self) -> Option<usize> {
        if self.next_armed < self.awake || self.next_armed >= self.entries.len() {
            self.next_armed = self.awake;
        }
        let at = self.next_armed;
        self.next_armed += 1;
        self.entries.get(at).map(|entry| entry.owner.into())
    }

    /// Returns the number of armed front-ends.
    pub fn armed_count(&self) -> usize {
        self.entries.len() - self.awake
    }
}

#[cfg(test)]
mod tests;
