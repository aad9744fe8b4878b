//! Rate limit for log messages that a client or a guest can cause, so that they cannot fill the
//! disk.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A limit that allows a burst of log messages, and then one in each interval.
///
/// A limit of messages per second would not suffice: a VMM that reconnects endlessly causes a few
/// messages per second, for ever.
#[derive(Debug)]
pub struct LogLimit {
    burst: u32,
    interval: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Number of log messages that may be written now without waiting.
    tokens: u32,
    /// Time since which the permission for the next message is accumulating; `None` when the limit
    /// is unused.
    since: Option<Instant>,
    left_out: u64,
}

impl Default for LogLimit {
    /// Creates a limit that allows ten messages at once, then one every ten seconds.
    fn default() -> Self {
        Self::new(10, Duration::from_secs(10))
    }
}

impl LogLimit {
    /// Creates a limit that allows `burst` messages at once, then one in each `interval`.
    pub const fn new(burst: u32, interval: Duration) -> Self {
        Self {
            burst,
            interval,
            state: Mutex::new(State {
                tokens: burst,
                since: None,
                left_out: 0,
            }),
        }
    }

    /// Calls `write` unless the limit is reached. The argument is the number of messages suppressed
    /// since the last one, if any, as a field for `tracing`.
    pub fn line(&self, write: impl FnOnce(Option<u64>)) {
        if let Some(left_out) = self.allow() {
            write(left_out);
        }
    }

    /// Returns the argument of [`LogLimit::line`] if a message may be written now.
    pub fn allow(&self) -> Option<Option<u64>> {
        let left_out = self.take(Instant::now())?;
        Some((left_out > 0).then_some(left_out))
    }

    fn take(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let since = *state.since.get_or_insert(now);
        let nanos = self.interval.as_nanos().max(1);
        let earned = now.saturating_duration_since(since).as_nanos() / nanos;
        let earned = u32::try_from(earned).unwrap_or(u32::MAX);
        state.tokens = state.tokens.saturating_add(earned).min(self.burst);
        if state.tokens == self.burst {
            state.since = Some(now);
        } else if earned > 0 {
            // The elapsed part of the next interval counts for it.
            let passed = self.interval.checked_mul(earned);
            state.since = Some(passed.and_then(|t| since.checked_add(t)).unwrap_or(now));
        }
        if state.tokens == 0 {
            state.left_out += 1;
            return None;
        }
        state.tokens -= 1;
        Some(std::mem::take(&mut state.left_out))
    }
}

/// Default limits of a disk's log messages, one for each kind of message, so that one kind does not
/// suppress another.
#[derive(Debug, Default)]
pub struct LogLimits(Mutex<Vec<(&'static str, LogLimit)>>);

impl LogLimits {
    /// Returns the argument of [`LogLimit::line`] if a message of this kind may be written now. The
    /// kind is a name that the program's text gives.
    pub fn allow(&self, kind: &'static str) -> Option<Option<u64>> {
        let mut limits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, limit)) = limits.iter().find(|(known, _)| *known == kind) {
            return limit.allow();
        }
        let limit = LogLimit::default();
        let allowed = limit.allow();
        limits.push((kind, limit));
        allowed
    }

    /// Calls `write` unless the limit of this kind is reached, like [`LogLimit::line`].
    pub fn line(&self, kind: &'static str, write: impl FnOnce(Option<u64>)) {
        if let Some(left_out) = self.allow(kind) {
            write(left_out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_limit_allows_burst_then_one_line_per_interval() {
        let limit = LogLimit::new(3, Duration::from_secs(10));
        let start = Instant::now();
        let at = |seconds: u64| limit.take(start + Duration::from_secs(seconds));
        assert_eq!([at(0), at(0), at(0)], [Some(0); 3]);
        assert_eq!([at(0), at(1), at(9)], [None; 3]);
        // A line each 0.3 s would be 33 in an interval; one is written, with their number.
        assert_eq!(at(10), Some(3));
        assert_eq!([at(10), at(19)], [None; 2]);
        assert_eq!(at(20), Some(2));
        // After a long pause there is no more than a burst.
        assert_eq!([at(1000), at(1000), at(1000)], [Some(0); 3]);
        assert_eq!(at(1000), None);
        assert_eq!(at(1010), Some(1));
        let mut lines = 0;
        limit.line(|_| lines += 1);
        assert_eq!(lines, 0, "the time of this process is earlier");
    }

    #[test]
    fn kinds_of_messages_do_not_suppress_each_other() {
        let limits = LogLimits::default();
        let mut lines = 0;
        (0..100).for_each(|_| limits.line("one", |_| lines += 1));
        assert_eq!(lines, 10);
        let mut others = Vec::new();
        limits.line("other", |left_out| others.push(left_out));
        assert_eq!(others, [None]);
        assert_eq!(limits.allow("one"), None);
    }
}
