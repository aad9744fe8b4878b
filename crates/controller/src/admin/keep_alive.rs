//! Keep Alive ("NVMe Base 2.1", 3.9 and 5.1.14). Over PCIe hosts need none; a timeout set by a
//! host is enforced.

use super::{AdminResult, Outcome};
use crate::controller::Controller;
use nvme::Command;
use std::time::{Duration, Instant};

/// Granularity of the timer in units of 100 ms (Identify Controller, KAS).
pub(super) const GRANULARITY_100MS: u16 = 1;

/// The keep alive timer.
#[derive(Default)]
pub(crate) struct KeepAlive {
    timeout: Duration,
    deadline: Option<Instant>,
}

impl KeepAlive {
    /// Sets the Keep Alive Timer feature, in milliseconds; zero turns the timer off.
    pub fn set(&mut self, milliseconds: u32, now: Instant) {
        // Rounded up to the granularity.
        let unit = u64::from(GRANULARITY_100MS) * 100;
        let rounded = u64::from(milliseconds).div_ceil(unit) * unit;
        self.timeout = Duration::from_millis(rounded);
        self.restart(now);
    }

    /// Stops the timer: the host's silence is allowed from now on.
    pub fn stop(&mut self) {
        self.deadline = None;
    }

    fn restart(&mut self, now: Instant) {
        self.deadline = (!self.timeout.is_zero()).then(|| now + self.timeout);
    }

    /// Returns the time at which the host has been silent for too long.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Returns the feature's value, in milliseconds.
    pub fn get(&self) -> u32 {
        u32::try_from(self.timeout.as_millis()).unwrap_or(u32::MAX)
    }
}

impl Controller {
    pub(super) fn keep_alive_command(&mut self, _: &Command) -> AdminResult {
        self.admin.keep_alive.restart(self.now);
        Ok(Outcome::Done(0))
    }

    /// Fails the controller after the host's silence: fatal status, commands are no longer
    /// fetched.
    pub(super) fn check_keep_alive(&mut self) -> bool {
        if self.admin.keep_alive.deadline.is_none_or(|d| self.now < d) || !self.is_ready() {
            return false;
        }
        self.admin.keep_alive.deadline = None;
        self.fatal("keep alive timer expired");
        true
    }

    pub(crate) fn keep_alive_deadline(&self) -> Option<Instant> {
        self.admin.keep_alive.deadline
    }
}
