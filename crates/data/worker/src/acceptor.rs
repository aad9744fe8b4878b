//! A listening socket with a limit on new connections per second.
//!
//! A client that reconnects in a loop costs the worker's other guests time: a socket to create, a
//! controller to reset. An [`Acceptor`] therefore accepts a bounded number of connections per
//! second; further ones wait in the kernel's backlog, which is bounded, too. A socket that may not
//! accept is taken out of the epoll set, where it would be ready all the time. The same holds while
//! the system has no descriptor or memory for another connection, and while a front-end wants no
//! client.

use crate::descriptors::{Descriptors, Interest};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);
/// Pause after the first failed accept; it doubles with each further failure.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Maximum number of times that the pause after failed accepts doubles.
const DOUBLINGS: u32 = 4;

/// Maximum number of clients that may connect to a socket in a second, also all at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectRate(pub u32);

impl ConnectRate {
    /// Rate without a limit, for sockets whose clients are in this process.
    pub const UNLIMITED: Self = Self(u32::MAX);
}

impl Default for ConnectRate {
    fn default() -> Self {
        Self(50)
    }
}

/// Reason why a socket accepts no client at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AcceptError {
    /// Clients connect faster than the socket's rate allows.
    #[error("more than {0} clients have connected within a second: the next ones wait")]
    TooMany(u32),
    /// Error of the kernel, for example because no descriptor or memory is left.
    #[error(transparent)]
    System(#[from] Errno),
}

/// Rate limit of new connections: a token bucket that holds the connections of one second.
#[derive(Debug)]
pub struct ConnectPace {
    /// Time between two connections at the maximum rate.
    interval: Duration,
    /// Time at which the token bucket will be full again, or was last full; `None` for a full one.
    full: Option<Instant>,
}

impl ConnectPace {
    /// Creates the rate limit with all connections of one second available.
    pub fn new(rate: ConnectRate) -> Self {
        Self {
            interval: SECOND / rate.0.max(1),
            full: None,
        }
    }

    /// Returns when the next client may connect: `now`, or later.
    pub fn next(&self, now: Instant) -> Instant {
        let due = self
            .full
            .and_then(|full| (full + self.interval).checked_sub(SECOND));
        due.map_or(now, |due| due.max(now))
    }

    /// Counts a client that has connected against the rate limit.
    pub fn take(&mut self, now: Instant) {
        let full = self.full.map_or(now, |full| full.max(now));
        self.full = Some(full + self.interval);
    }
}

/// Connection counters of a socket, readable from any thread.
#[derive(Debug, Default)]
pub struct AcceptStats {
    accepted: AtomicU64,
    delayed: AtomicU64,
    failed: AtomicU64,
}

impl AcceptStats {
    /// Returns the number of accepted connections, including those that were refused afterwards.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Returns how many times clients had to wait because of the rate limit.
    pub fn delayed(&self) -> u64 {
        self.delayed.load(Ordering::Relaxed)
    }

    /// Returns the number of failed accepts, for example because no descriptor was left.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The worker watches the socket for clients in its epoll set.
    Watched,
    /// The worker watches the socket again from this time on, after a pause.
    Paused(Instant),
    /// The worker does not watch the socket until [`Acceptor::open`].
    Closed,
}

/// Listening socket of a front-end, with the rate limit and pauses of accepting clients.
#[derive(Debug)]
pub struct Acceptor<L> {
    listener: L,
    descriptors: Descriptors,
    token: u32,
    rate: ConnectRate,
    pace: ConnectPace,
    state: State,
    /// Number of failed accepts in a row.
    failures: u32,
    stats: Arc<AcceptStats>,
}

impl<L: AsFd> Acceptor<L> {
    /// Adds the socket to the epoll set. [`Frontend::ready`](crate::Frontend::ready) is called with
    /// this token when a client connects.
    ///
    /// # Errors
    /// The kernel's error when the socket cannot be added to the epoll set.
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

    /// Returns the listening socket.
    pub fn listener(&self) -> &L {
        &self.listener
    }

    /// Returns the listening socket, which leaves the epoll set when its last descriptor is closed.
    pub fn into_listener(self) -> L {
        self.listener
    }

    /// Returns the counters of accepted and delayed connections.
    pub fn stats(&self) -> Arc<AcceptStats> {
        self.stats.clone()
    }

    /// Accepts a client, non-blocking and close-on-exec; `None` when there is none.
    ///
    /// # Errors
    /// [`AcceptError`] when no client can be accepted now. The socket is polled again after a
    /// pause.
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
            // The client disconnected before it was accepted; epoll reports the next one.
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

    /// Returns when [`Acceptor::resume`] is due, for the front-end's deadline.
    pub fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Paused(until) => Some(until),
            State::Watched | State::Closed => None,
        }
    }

    /// Returns the socket to the epoll set if its pause is over.
    ///
    /// # Errors
    /// The kernel's error when the socket cannot be added to the epoll set; the next call tries
    /// again.
    #[inline]
    pub fn resume(&mut self, now: Instant) -> Result<(), Errno> {
        match self.state {
            State::Paused(until) if now >= until => self.watch(now),
            _ => Ok(()),
        }
    }

    /// Stops accepting clients until [`Acceptor::open`].
    pub fn close(&mut self) {
        self.leave(State::Closed);
    }

    /// Accepts clients again after [`Acceptor::close`].
    ///
    /// # Errors
    /// The errors of [`Acceptor::resume`].
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
    fn connect_rate_allows_burst_then_one_per_interval() {
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
        // After a long pause the bucket holds one second's worth of clients.
        for _ in 0..4 {
            assert_eq!(pace.next(at(9000)), at(9000));
            pace.take(at(9000));
        }
        assert_eq!(pace.next(at(9000)), at(9250));
    }

    #[test]
    fn zero_connect_rate_means_one() {
        let mut pace = ConnectPace::new(ConnectRate(0));
        let start = Instant::now();
        assert_eq!(pace.next(start), start);
        pace.take(start);
        assert_eq!(pace.next(start), start + SECOND);
    }
}
