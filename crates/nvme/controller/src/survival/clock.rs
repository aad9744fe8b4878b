//! Points in time by the wall clock, for use in another process or on another machine.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Returns the wall clock time in milliseconds since 1970.
pub(crate) fn wall_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}

/// Point of time in the past, which the next process can still compute from the wall clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Since {
    at: Instant,
    wall: u64,
}

impl Since {
    pub fn now() -> Self {
        Since {
            at: Instant::now(),
            wall: wall_ms(),
        }
    }

    /// Converts a wall clock time into a point in time of this process. A time in the future, by
    /// this machine's clock, becomes the present.
    pub fn from_wall(wall: u64) -> Self {
        let elapsed = Duration::from_millis(wall_ms().saturating_sub(wall));
        let now = Instant::now();
        Since {
            at: now.checked_sub(elapsed).unwrap_or(now),
            wall,
        }
    }

    pub fn instant(&self) -> Instant {
        self.at
    }

    pub fn elapsed(&self) -> Duration {
        self.at.elapsed()
    }

    /// Returns the wall clock time of that point in milliseconds since 1970.
    pub fn wall(&self) -> u64 {
        self.wall
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wall_clock_moment_survives_process() {
        let first = Since::from_wall(wall_ms() - 5000);
        let second = Since::from_wall(first.wall());
        assert_eq!(first.wall(), second.wall());
        assert!(second.elapsed() >= Duration::from_secs(5));
        assert!(second.elapsed() < Duration::from_secs(60));
        let future = Since::from_wall(u64::MAX);
        assert!(future.elapsed() < Duration::from_secs(60));
    }
}
