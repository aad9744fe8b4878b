//! A listening socket, and how often clients may come in by it.
//!
//! A client that connects again and again costs its worker's other guests time: a socket to make, a
//! controller to reset. So a socket accepts a bounded number of connections in a second; more wait
//! in the kernel, whose queue is bounded, too. While none may come in the socket is not in the
//! epoll set: it would be ready all the time. The same holds while the system has no descriptor, or
//! no memory, for another connection, and while a front-end wants none.

use crate::descriptors::{Descriptors, Interest};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);
/// First pause after an accept that failed; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The pause doubles so often at most.
const DOUBLINGS: u32 = 4;

/// How many clients may connect to a socket in a second, all of them at once if they like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectRate(pub u32);

impl ConnectRate {
    /// As many as like: where the clients are this process's own.
    pub const UNLIMITED: Self = Self(u32::MAX);
}

impl Default for ConnectRate {
    fn default() -> Self {
        Self(50)
    }
}

/// Why no client comes in just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AcceptError {
    /// The socket's clients come too often.
    #[error("more than {0} clients have connected within a second: the next ones wait")]
    TooMany(u32),
    /// The kernel's error: it has no descriptor or memory left, for example.
    #[error(transparent)]
    System(#[from] Errno),
}

/// A token bucket: it has room for what may come in a second.
#[derive(Debug)]
pub struct ConnectPace {
    /// Between two clients, where more want to come than may.
    interval: Duration,
    /// When the bucket is, or was, full again.
    full: Option<Instant>,
}

impl ConnectPace {
    /// A full bucket.
    pub fn new(rate: ConnectRate) -> Self {
        Self {
            interval: SECOND / rate.0.max(1),
            full: None,
        }
    }

    /// When the next client may come in: `now`, or later.
    pub fn next(&self, now: Instant) -> Instant {
        let due = self
            .full
            .and_then(|full| (full + self.interval).checked_sub(SECOND));
        due.map_or(now, |due| due.max(now))
    }

    /// A client has come in.
    pub fn take(&mut self, now: Instant) {
        let full = self.full.map_or(now, |full| full.max(now));
        self.full = Some(full + self.interval);
    }
}

/// What happened at a socket, to be read from any thread.
#[derive(Debug, Default)]
pub struct AcceptStats {
    accepted: AtomicU64,
    delayed: AtomicU64,
    failed: AtomicU64,
}

impl AcceptStats {
    /// Connections accepted, those that were refused afterwards among them.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Times that clients had to wait because too many came in a second.
    pub fn delayed(&self) -> u64 {
        self.delayed.load(Ordering::Relaxed)
    }

    /// Times that a connection could not be accepted: no descriptor was left, for example.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The socket is in the epoll set.
    Watched,
    /// It comes into the set at this time.
    Paused(Instant),
    /// It stays out of the set until [`Acceptor::open`].
    Closed,
}

/// A listening socket, non-blocking, in a worker's epoll set.
#[derive(Debug)]
pub struct Acceptor<L> {
    listener: L,
    descriptors: Descriptors,
    token: u32,
    rate: ConnectRate,
    pace: ConnectPace,
    state: State,
    /// Accepts that failed since the last one that did not.
    failures: u32,
    stats: Arc<AcceptStats>,
}

impl<L: AsFd> Acceptor<L> {
    /// Waits for clients: [`Frontend::ready`](crate::Frontend::ready) is called with this token
    /// when there is one.
    ///
    /// # Errors
    /// The socket cannot be put into the epoll set.
    pub fn new(
        listener: L,
        descriptors: Descriptors,
        token: u32,
        rate: ConnectRate,
    ) -> Result<Self, Errno> {
        descriptors.add(&listener, token, Interest::Readable)?;
        Ok(Self {
            listener,
            descriptors,
            token,
            rate,
            pace: ConnectPace::new(rate),
            state: State::Watched,
            failures: 0,
            stats: Arc::default(),
        })
    }

    /// The listening socket.
    pub fn listener(&self) -> &L {
        &self.listener
    }

    /// The listening socket, which leaves the epoll set when its last descriptor is closed.
    pub fn into_listener(self) -> L {
        self.listener
    }

    /// Its counters.
    pub fn stats(&self) -> Arc<AcceptStats> {
        self.stats.clone()
    }

    /// Accepts a client, non-blocking and close-on-exec; `None` when there is none.
    ///
    /// # Errors
    /// [`AcceptError`]: none can come in now. The socket is looked at again when a pause is over.
    pub fn accept(&mut self, now: Instant) -> Result<Option<OwnedFd>, AcceptError> {
        if self.state != State::Watched {
            return Ok(None);
        }
        let next = self.pace.next(now);
        if next > now {
            AcceptStats::count(&self.stats.delayed);
            self.leave(State::Paused(next));
            return Err(AcceptError::TooMany(self.rate.0));
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match accept_with(&self.listener, flags) {
            Ok(client) => {
                self.failures = 0;
                self.pace.take(now);
                AcceptStats::count(&self.stats.accepted);
                Ok(Some(client))
            }
            // It went before it came in; the set tells of the next one.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(errno) => {
                AcceptStats::count(&self.stats.failed);
                let pause = FIRST_PAUSE * (1 << self.failures.min(DOUBLINGS));
                self.failures = self.failures.saturating_add(1);
                self.leave(State::Paused(now + pause));
                Err(errno.into())
            }
        }
    }

    /// When [`Acceptor::resume`] has something to do: for the front-end's deadline.
    pub fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Paused(until) => Some(until),
            State::Watched | State::Closed => None,
        }
    }

    /// Ends a pause that is over.
    ///
    /// # Errors
    /// The socket cannot be put into the epoll set; it is tried again later.
    #[inline]
    pub fn resume(&mut self, now: Instant) -> Result<(), Errno> {
        match self.state {
            State::Paused(until) if now >= until => self.watch(now),
            _ => Ok(()),
        }
    }

    /// Lets no client in until [`Acceptor::open`].
    pub fn close(&mut self) {
        self.leave(State::Closed);
    }

    /// Lets clients in again, if it was closed.
    ///
    /// # Errors
    /// As those of [`Acceptor::resume`].
    pub fn open(&mut self, now: Instant) -> Result<(), Errno> {
        match self.state {
            State::Closed => self.watch(now),
            State::Watched | State::Paused(_) => Ok(()),
        }
    }

    fn watch(&mut self, now: Instant) -> Result<(), Errno> {
        let added = self
            .descriptors
            .add(&self.listener, self.token, Interest::Readable);
        self.state = match added {
            Ok(()) => State::Watched,
            Err(_) => State::Paused(now + SECOND),
        };
        added
    }

    fn leave(&mut self, state: State) {
        if self.state == State::Watched {
            let _ = self.descriptors.remove(&self.listener);
        }
        self.state = state;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seconds_worth_at_once_and_then_one_in_an_interval() {
        let mut pace = ConnectPace::new(ConnectRate(4));
        let start = Instant::now();
        let at = |millis: u64| start + Duration::from_millis(millis);
        for _ in 0..4 {
            assert_eq!(pace.next(at(0)), at(0));
            pace.take(at(0));
        }
        assert_eq!(pace.next(at(0)), at(250));
        assert_eq!(pace.next(at(100)), at(250));
        pace.take(at(250));
        assert_eq!(pace.next(at(250)), at(500));
        // After a long time there is no more than a second's worth.
        for _ in 0..4 {
            assert_eq!(pace.next(at(9000)), at(9000));
            pace.take(at(9000));
        }
        assert_eq!(pace.next(at(9000)), at(9250));
    }

    #[test]
    fn a_rate_of_nothing_is_one() {
        let mut pace = ConnectPace::new(ConnectRate(0));
        let start = Instant::now();
        assert_eq!(pace.next(start), start);
        pace.take(start);
        assert_eq!(pace.next(start), start + SECOND);
    }
}
