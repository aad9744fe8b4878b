//! Policy for the requests of a file that the kernel may execute within the call that submits them.
//!
//! The kernel executes as many operations as it can in `io_uring_enter` itself, and gives those
//! that would block to a thread of its own (io-wq). Filesystems do not keep to that: ext4 reads
//! blocks of a file's extent tree from the disk within the call, for reads and for writes. On a
//! slow disk the worker, and each other volume on it, then waits for the disk. A call that took
//! long therefore makes its files suspects. One request of a suspect in each call stays in the
//! call. The thread's voluntary context switches are measured with it: they distinguish waiting
//! from a processor that other threads used. Once a request has waited, all requests of the file
//! are sent to threads of the kernel for a while, then one is tried again. Only the time of each
//! call is measured while no file is suspected.

#![allow(unsafe_code)]

use std::time::{Duration, Instant};

/// Duration above which a system call is too slow for a polling worker, whatever it submits.
pub(super) const MAX_CALL_TIME: Duration = Duration::from_micros(500);
/// Number of requests in a row that must not block before a merely suspected file is trusted again.
const SUSPECT_REQUESTS: u16 = 16;
/// Limit like [`SUSPECT_REQUESTS`] for a file that has made the worker wait. Higher, because only
/// one of many requests may meet uncached data.
const PROBATION_REQUESTS: u16 = 256;
/// Duration of a single call that bans a file at once, whether a disk or a busy processor caused
/// it.
const BLOCKING_CALL_TIME: Duration = Duration::from_millis(20);
/// Time for which a file's requests are sent to kernel threads after one has blocked the worker:
/// the minimum, the factor applied to the time of the wait, and the maximum.
const MIN_PAUSE: Duration = Duration::from_millis(50);
const FACTOR: u32 = 32;
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// State of a file that decides which requests the kernel may execute within the submitting system
/// call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The kernel may execute all requests within the system call.
    Trusted,
    /// The kernel may execute one request in each call, until `left` more requests have not
    /// blocked.
    Tried { left: u16 },
    /// The kernel may execute no request within the system call until this time.
    Banned { until: Instant },
}

/// State of one file: whether its requests are executed in the call or on kernel threads.
#[derive(Debug)]
pub(super) struct Inline {
    state: State,
    /// Whether the next system call contains a request of the file, which is not trusted yet.
    trying: bool,
    pause: Duration,
}

impl Inline {
    /// Creates the state of a newly opened file. The file starts as a suspect, because none of its
    /// data is cached yet.
    pub(super) fn new() -> Self {
        Self::at(State::Tried {
            left: SUSPECT_REQUESTS,
        })
    }

    /// Creates the state of a file that has just blocked the worker for long.
    #[cfg(test)]
    pub(super) fn banned() -> Self {
        Self::at(State::Banned {
            until: Instant::now() + MAX_PAUSE,
        })
    }

    /// Creates the state of a file on a ring that executes nothing within its system calls, so that
    /// nothing has to be measured.
    pub(super) fn always() -> Self {
        Self::at(State::Trusted)
    }

    fn at(state: State) -> Self {
        Self {
            state,
            trying: false,
            pause: MIN_PAUSE,
        }
    }

    /// Returns whether requests of the file may run within the submitting system call.
    #[inline(always)]
    pub(super) fn is_trusted(&self) -> bool {
        self.state == State::Trusted
    }

    /// Returns whether the kernel may execute the next request of an untrusted file within the
    /// call.
    pub(super) fn admit(&mut self, now: Instant) -> bool {
        if let State::Banned { until } = self.state
            && now >= until
        {
            self.state = State::Tried {
                left: PROBATION_REQUESTS,
            };
        }
        match self.state {
            State::Trusted => true,
            State::Tried { .. } => !std::mem::replace(&mut self.trying, true),
            State::Banned { .. } => false,
        }
    }

    /// Records a slow call that may have submitted requests of the file. `alone`: it submitted none
    /// of another trusted file.
    pub(super) fn suspect(&mut self, took: Duration, alone: bool, now: Instant) {
        if self.is_trusted() {
            self.state = State::Tried {
                left: SUSPECT_REQUESTS,
            };
            if alone && took >= BLOCKING_CALL_TIME {
                self.ban(took, now);
            }
        }
    }

    fn ban(&mut self, waited: Duration, now: Instant) {
        // Each time longer, and so long that trying again costs little.
        let pause = self.pause.max(waited.saturating_mul(FACTOR));
        let pause = pause.min(MAX_PAUSE);
        self.state = State::Banned { until: now + pause };
        self.pause = (self.pause * 2).min(MAX_PAUSE);
    }

    /// Records the result of a measured call. `waited`: time for which the thread slept, if it
    /// slept in the call and the call was slow.
    pub(super) fn measured(&mut self, waited: Option<Duration>, now: Instant) {
        if !std::mem::take(&mut self.trying) {
            return;
        }
        match (&mut self.state, waited) {
            (State::Tried { .. }, Some(waited)) => self.ban(waited, now),
            (State::Tried { left }, None) if *left > 1 => *left -= 1,
            (State::Tried { .. }, None) => {
                self.state = State::Trusted;
                self.pause = MIN_PAUSE;
            }
            _ => {}
        }
    }
}

/// Returns how often the calling thread has slept so far (`ru_nvcsw`).
pub(super) fn sleeps() -> i64 {
    // SAFETY: all-zero is a valid `rusage`: plain integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills in one `rusage`, which outlives the call.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_nvcsw
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(1);

    #[test]
    fn single_request_tests_suspect_file() {
        let now = Instant::now();
        let mut inline = Inline::always();
        assert!(inline.is_trusted());
        inline.suspect(SHORT, true, now);
        assert!(!inline.is_trusted());
        assert!(inline.admit(now));
        assert!(!inline.admit(now), "one is enough to be waited for");
        inline.measured(Some(SHORT), now);
        assert!(!inline.admit(now));
        // Calls without a request of the file are no evidence.
        inline.measured(None, now);
        inline.suspect(SHORT, true, now);
        assert!(!inline.admit(now + MIN_PAUSE / 2));
        assert!(inline.admit(now + MIN_PAUSE));
        inline.measured(Some(SHORT), now + MIN_PAUSE);
        assert!(!inline.admit(now + MIN_PAUSE * 2), "longer each time");
        assert!(inline.admit(now + MIN_PAUSE * 3));
    }

    #[test]
    fn inline_waits_cost_small_share_of_time() {
        let (now, long) = (Instant::now(), Duration::from_secs(1));
        let mut inline = Inline::always();
        inline.suspect(long, false, now);
        assert!(inline.admit(now), "it may have been another file");
        inline.measured(Some(long), now);
        assert!(!inline.admit(now + long * (FACTOR - 1)));
        assert!(inline.admit(now + long * FACTOR));
        let mut inline = Inline::always();
        inline.suspect(long, true, now);
        assert!(!inline.admit(now), "there is no other");
        assert!(!inline.admit(now + long * (FACTOR - 1)));
        inline.suspect(Duration::MAX, true, now);
        assert!(inline.admit(now + MAX_PAUSE));
    }

    #[test]
    fn file_without_waits_is_trusted_again() {
        let now = Instant::now();
        let mut inline = Inline::new();
        for (needed, banned) in [
            (SUSPECT_REQUESTS, false),
            (SUSPECT_REQUESTS, false),
            (PROBATION_REQUESTS, true),
        ] {
            if inline.is_trusted() {
                inline.suspect(SHORT, true, now);
            }
            if banned {
                assert!(inline.admit(now));
                inline.measured(Some(SHORT), now);
            }
            for _ in 0..needed {
                assert!(!inline.is_trusted());
                assert!(inline.admit(now + MIN_PAUSE));
                inline.measured(None, now + MIN_PAUSE);
            }
            assert!(inline.is_trusted(), "{needed}");
        }
    }

    #[test]
    fn inline_pauses_are_bounded() {
        let mut now = Instant::now();
        let mut inline = Inline::always();
        inline.suspect(SHORT, true, now);
        for _ in 0..100 {
            assert!(inline.admit(now));
            inline.measured(Some(Duration::MAX), now);
            now += MAX_PAUSE;
        }
    }

    #[test]
    fn sleeps_are_counted() {
        let before = sleeps();
        std::thread::sleep(Duration::from_millis(1));
        assert!(sleeps() > before);
    }
}
