//! Which front-ends a round looks at: an order, and nothing of the front-ends themselves.
//!
//! Most of many disks do nothing most of the time, and a look at each of them in each round would
//! take longer than the work of those that are busy. So *hot* ones, which had work lately, are
//! looked at in every round, *idle* ones in turn, all of them within [`IDLE_TURN`] rounds. Where
//! more than [`MOST_IDLE`] are idle, those that have been so for [`ARM_AFTER`] are *armed*, as
//! before the thread's own sleep, and not looked at until what they were armed for wakes them. They
//! cost a round nothing.
//!
//! ```text
//! front-ends:  [ hot | hot | idle | idle | idle | armed | armed | armed ]
//!                            ^ hot  ^ next        ^ awake
//! ```
//!
//! A front-end changes its part by changing places with the one at the border.

use std::time::{Duration, Instant};

/// Rounds in a row without work after which a hot front-end is an idle one.
const IDLE_AFTER: u16 = 1024;
/// Rounds without work in which every idle front-end is looked at once, while others are hot; a
/// round with work counts as several.
const IDLE_TURN: usize = 32;
/// Units of work (see [`volume::Budget`]) that count as another round.
const UNITS_PER_ROUND: u32 = 8;
/// So many idle ones are always looked at: a look in sixteen rounds without work. A look takes some
/// hundred nanoseconds, which a busy front-end with a command at a time waits for.
const MOST_IDLE: usize = 2;
/// How long one is idle before it may be armed. What comes for an armed one is found by a look at
/// the sockets, within 100 us, and its guest pays for the register write.
const ARM_AFTER: Duration = Duration::from_millis(10);

/// A front-end in its place.
#[derive(Clone, Copy, Debug)]
struct Entry {
    owner: u16,
    /// Rounds in a row that found nothing, while it is hot.
    quiet: u16,
    /// When it became idle.
    since: Option<Instant>,
}

/// A worker's front-ends, by what rounds have to do with them.
#[derive(Debug, Default)]
pub(crate) struct RunQueue {
    entries: Vec<Entry>,
    /// How many are hot.
    hot: usize,
    /// How many are hot or idle.
    awake: usize,
    /// The idle one that is looked at next.
    next: usize,
    /// Looks at idle ones that are due, in parts of a look: [`IDLE_TURN`] are one.
    due: usize,
    /// The armed one whose housekeeping is next.
    next_armed: usize,
}

impl RunQueue {
    /// A front-end begins: it is hot.
    pub fn insert(&mut self, owner: u16) {
        self.remove(owner);
        self.entries.push(Entry {
            owner,
            quiet: 0,
            since: None,
        });
        self.promote(self.entries.len() - 1);
    }

    /// A front-end has gone.
    pub fn remove(&mut self, owner: u16) {
        let Some(mut at) = self.position(owner) else {
            return;
        };
        // To the end, by way of each border.
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

    /// Something has come for a front-end, most likely: the next round looks at it.
    #[inline]
    pub fn wake(&mut self, owner: u16) {
        let mut hot = self.entries.iter_mut().take(self.hot);
        if let Some(entry) = hot.find(|entry| entry.owner == owner) {
            entry.quiet = 0;
        } else if let Some(at) = self.position(owner) {
            self.promote(at);
        }
    }

    /// All of them are hot.
    pub fn wake_all(&mut self) {
        for entry in &mut self.entries {
            entry.quiet = 0;
        }
        self.hot = self.entries.len();
        self.awake = self.hot;
    }

    /// The front-end at this place, which is not hot, is hot from now on.
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

    /// How many are hot.
    #[inline]
    pub fn hot_count(&self) -> usize {
        self.hot
    }

    /// The hot ones.
    #[inline]
    pub fn hot(&self) -> impl Iterator<Item = usize> + Clone {
        let hot = self.entries.get(..self.hot).unwrap_or_default();
        hot.iter().map(|entry| entry.owner.into())
    }

    /// Those that are hot or idle.
    #[inline]
    pub fn awake(&self) -> impl Iterator<Item = usize> + Clone {
        let awake = self.entries.get(..self.awake).unwrap_or_default();
        awake.iter().map(|entry| entry.owner.into())
    }

    /// Whether it is armed.
    pub fn is_armed(&self, owner: u16) -> bool {
        let mut armed = self.entries.iter().skip(self.awake);
        armed.any(|entry| entry.owner == owner)
    }

    /// The first place of those that are armed.
    pub fn first_armed(&self) -> usize {
        self.awake
    }

    /// The armed one at a place. When it wakes, one from an earlier place takes its place.
    pub fn armed_at(&self, at: usize) -> Option<usize> {
        let entry = self.entries.get(at).filter(|_| at >= self.awake);
        entry.map(|entry| entry.owner.into())
    }

    /// The hot one at a place, from 0 on.
    #[inline(always)]
    pub fn hot_at(&self, at: usize) -> Option<usize> {
        let hot = self.entries.get(..self.hot)?;
        hot.get(at).map(|entry| entry.owner.into())
    }

    /// The hot one at this place had work.
    #[inline(always)]
    pub fn worked(&mut self, at: usize) {
        if let Some(entry) = self.entries.get_mut(at) {
            entry.quiet = 0;
        }
    }

    /// The hot one at this place had none. Whether it has been so for long.
    #[inline(always)]
    pub fn was_quiet(&mut self, at: usize) -> bool {
        self.entries.get_mut(at).is_some_and(|entry| {
            entry.quiet += 1;
            entry.quiet >= IDLE_AFTER
        })
    }

    /// The hot one at this place is idle from now on. Another one may be at its place.
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

    /// How many idle ones this round looks at, in which hot ones did so many units of work.
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

    /// The idle one whose turn it is.
    pub fn next_idle(&mut self) -> Option<usize> {
        if self.next < self.hot || self.next >= self.awake {
            self.next = self.hot;
        }
        let at = self.next;
        self.next += 1;
        let awake = self.entries.get(..self.awake)?;
        awake.get(at).map(|entry| entry.owner.into())
    }

    /// One that may be armed: there are many idle ones, and it has been idle for long.
    pub fn arms_next(&self, now: Instant) -> Option<usize> {
        if self.awake - self.hot <= MOST_IDLE {
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

    /// An idle one is not looked at from now on.
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

    /// An idle one that cannot be armed now is asked again later.
    pub fn stay(&mut self, owner: usize, now: Instant) {
        let mut idle = self.entries.iter_mut().skip(self.hot);
        if let Some(entry) = idle.find(|entry| usize::from(entry.owner) == owner) {
            entry.since = Some(now);
        }
    }

    /// The armed one whose housekeeping is next.
    pub fn next_armed(&mut self) -> Option<usize> {
        if self.next_armed < self.awake || self.next_armed >= self.entries.len() {
            self.next_armed = self.awake;
        }
        let at = self.next_armed;
        self.next_armed += 1;
        self.entries.get(at).map(|entry| entry.owner.into())
    }

    /// How many are armed.
    pub fn armed_count(&self) -> usize {
        self.entries.len() - self.awake
    }
}

#[cfg(test)]
mod tests;
