//! Keep Alive ("NVMe Base 2.1", 3.9 and 5.1.14). Hosts do not need it over PCIe, but a timeout that
//! a host sets is enforced.

use super::{AdminOutcome, AdminResult};
use crate::control::Controller;
use nvme::Command;
use std::time::{Duration, Instant};

/// Granularity of the Keep Alive Timer in units of 100 ms (KAS of Identify Controller).
pub(super) const GRANULARITY_100MS: u16 = 1;
/// Number of checks for commands of the host after the timeout, before the timer expires.
const LAST_LOOKS: u8 = 2;
/// Interval between these checks, in which a worker reads its sockets (every 100 us while it
/// polls).
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// Timer that expires when the host sends no command for longer than its Keep Alive Timeout.
///
/// The clock alone cannot distinguish a silent host from a pause of this process, for example while
/// other processes used its processor. The timeout may have passed although a command of the host
/// waits in a queue or a socket, and the last reading of the clock may be older than the pause. The
/// time therefore counts from the first reading after a command, and the timer expires only after
/// two more checks of queues and sockets.
#[derive(Debug, Default)]
pub struct KeepAlive {
    timeout: Duration,
    deadline: Option<Instant>,
    phase: Phase,
}

#[derive(Debug, Default)]
enum Phase {
    /// The host has sent a command since the last reading of the clock, from which the timeout
    /// counts.
    #[default]
    Noted,
    /// The timeout runs, and the host has sent no command since it began.
    Runs,
    /// The timeout has passed, and this number of checks has found no command.
    Looked(u8),
}

impl KeepAlive {
    /// Creates a timer that begins now. A timeout of zero disables it.
    pub fn new(timeout: Duration, now: Instant) -> Self {
        let mut timer = Self::default();
        timer.set(timeout, now);
        timer
    }

    /// Changes the Keep Alive Timeout and restarts the timer. A timeout of zero disables it.
    pub fn set(&mut self, timeout: Duration, now: Instant) {
        self.timeout = timeout;
        self.restart(now);
    }

    /// Restarts the timer after a command of the host. `now` is the last reading of the clock.
    pub fn restart(&mut self, now: Instant) {
        self.phase = Phase::Noted;
        self.deadline = (!self.timeout.is_zero()).then_some(now);
    }

    /// Stops the Keep Alive Timer, after which a host that sends no command is no error.
    pub fn stop(&mut self) {
        self.deadline = None;
    }

    /// Returns the time at which [`KeepAlive::has_expired`] has to be called next.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Returns the Keep Alive Timeout; zero while the timer is disabled.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns whether the host has been silent for longer than its timeout.
    pub fn has_expired(&mut self, now: Instant) -> bool {
        let Some(deadline) = self.deadline.filter(|at| now >= *at) else {
            return false;
        };
        self.deadline = match self.phase {
            Phase::Noted if now == deadline => return false,
            Phase::Noted => {
                self.phase = Phase::Runs;
                now.checked_add(self.timeout)
            }
            Phase::Looked(LAST_LOOKS) => {
                self.deadline = None;
                return true;
            }
            Phase::Runs => {
                self.phase = Phase::Looked(1);
                now.checked_add(LOOK_INTERVAL)
            }
            Phase::Looked(looks) => {
                self.phase = Phase::Looked(looks + 1);
                now.checked_add(LOOK_INTERVAL)
            }
        };
        false
    }
}

impl Controller {
    /// Sets the Keep Alive Timer feature in milliseconds, rounded up to the granularity.
    pub(crate) fn set_keep_alive(&mut self, milliseconds: u32) {
        let unit = u64::from(GRANULARITY_100MS) * 100;
        let rounded = u64::from(milliseconds).div_ceil(unit) * unit;
        let timeout = Duration::from_millis(rounded);
        self.admin.keep_alive.set(timeout, self.now);
    }

    /// Returns the value of the Keep Alive Timer feature in milliseconds.
    pub(crate) fn keep_alive(&self) -> u32 {
        let timeout = self.admin.keep_alive.timeout();
        u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX)
    }

    pub(super) fn keep_alive_command(&mut self, _: &Command) -> AdminResult {
        self.admin.keep_alive.restart(self.now);
        Ok(AdminOutcome::Done(0))
    }

    /// Checks the timer. If it has expired, the controller enters the fatal state and fetches no
    /// more commands. Returns whether there was anything to do.
    pub(super) fn check_keep_alive(&mut self) -> bool {
        let deadline = self.admin.keep_alive.deadline();
        if deadline.is_none_or(|at| self.now < at) || !self.is_ready() {
            return false;
        }
        // The next round polls the admin queue, however busy other queues are.
        self.engine.queues.expect(0);
        if self.admin.keep_alive.has_expired(self.now) {
            self.fatal("keep alive timer expired");
        }
        self.admin.keep_alive.deadline() != deadline
    }

    pub(crate) fn keep_alive_deadline(&self) -> Option<Instant> {
        self.admin.keep_alive.deadline()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(1);

    /// Time from one reading of the clock to the next.
    const NEXT: Duration = Duration::from_micros(1);

    #[test]
    fn timer_expires_after_silence_through_two_more_looks() {
        let start = Instant::now();
        let mut timer = KeepAlive::new(TIMEOUT, start);
        let mut now = start + NEXT;
        assert!(!timer.has_expired(now));
        now += TIMEOUT;
        assert_eq!(timer.deadline(), Some(now));
        for _ in 0..2 {
            assert!(!timer.has_expired(now));
            // A second check at the same time does not count.
            assert!(!timer.has_expired(now));
            now += LOOK_INTERVAL;
            assert_eq!(timer.deadline(), Some(now));
        }
        assert!(timer.has_expired(now));
        assert_eq!(timer.deadline(), None);
    }

    #[test]
    fn command_that_is_read_after_a_pause_restarts_the_timer() {
        let mut now = Instant::now();
        let mut timer = KeepAlive::new(TIMEOUT, now);
        for _ in 0..3 {
            assert!(!timer.has_expired(now + NEXT));
            now += TIMEOUT * 100;
            assert!(!timer.has_expired(now));
            now += LOOK_INTERVAL;
            assert!(!timer.has_expired(now));
            timer.restart(now);
        }
    }

    #[test]
    fn time_before_the_clock_was_read_again_does_not_count() {
        let before = Instant::now();
        let mut timer = KeepAlive::new(TIMEOUT, before);
        assert!(!timer.has_expired(before));
        let after = before + TIMEOUT * 100;
        assert!(!timer.has_expired(after));
        assert_eq!(timer.deadline(), Some(after + TIMEOUT));
    }

    #[test]
    fn timer_without_timeout_never_expires() {
        let start = Instant::now();
        let mut timer = KeepAlive::new(Duration::ZERO, start);
        for seconds in 0..5 {
            assert!(!timer.has_expired(start + TIMEOUT * seconds));
        }
    }
}
