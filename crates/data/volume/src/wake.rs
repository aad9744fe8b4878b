//! Wake-up of a worker for a queue that has to be polled.

use std::time::{Duration, Instant};

/// How a worker learns that it has to call a queue's
/// [`VolumeQueue::poll`](crate::VolumeQueue::poll).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// A descriptor wakes the worker: that of the ring ([`Io::event_fd`](crate::Io::event_fd)), or
    /// one that the queue has passed to [`Io::watch`](crate::Io::watch). Also used when nothing is
    /// in flight.
    Event,
    /// After this time; a wake-up before that is not guaranteed.
    After(Duration),
    /// The queue is called at this time; a wake-up before that is not guaranteed.
    At(Instant),
    /// The queue is called all the time, because no wake-up arrives.
    Poll,
}

impl Wake {
    /// Combines the requirements of two parts of a queue. `now` is called only when the time is
    /// needed.
    #[must_use]
    pub fn earlier(self, other: Self, now: impl FnOnce() -> Instant) -> Self {
        match (self, other) {
            (Self::Poll, _) | (_, Self::Poll) => Self::Poll,
            (Self::Event, wake) | (wake, Self::Event) => wake,
            (Self::After(one), Self::After(two)) => Self::After(one.min(two)),
            (Self::At(one), Self::At(two)) => Self::At(one.min(two)),
            (Self::At(at), Self::After(time)) | (Self::After(time), Self::At(at)) => {
                Self::At(after(now(), time).min(at))
            }
        }
    }

    /// Returns the time of the next poll when no wake-up arrives; `None` when one arrives, or when
    /// the worker must not sleep.
    pub fn deadline(self, now: impl FnOnce() -> Instant) -> Option<Instant> {
        match self {
            Self::Event | Self::Poll => None,
            Self::After(time) => Some(after(now(), time)),
            Self::At(at) => Some(at),
        }
    }
}

/// Returns `now + time`, or `now` when that is beyond the clock's range: waking early is harmless.
fn after(now: Instant, time: Duration) -> Instant {
    now.checked_add(time).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_wake_serves_both() {
        let now = Instant::now();
        let (soon, late) = (Duration::from_millis(1), Duration::from_secs(1));
        let wakes = [
            Wake::Event,
            Wake::After(soon),
            Wake::After(late),
            Wake::At(now + soon),
            Wake::At(now + late),
            Wake::Poll,
        ];
        for one in wakes {
            for two in wakes {
                let both = one.earlier(two, || now);
                let polls = one == Wake::Poll || two == Wake::Poll;
                assert_eq!(both == Wake::Poll, polls, "{one:?} {two:?}");
                if polls {
                    continue;
                }
                let deadlines = [one, two].map(|wake| wake.deadline(|| now));
                let earliest = deadlines.into_iter().flatten().min();
                assert_eq!(both.deadline(|| now), earliest, "{one:?} {two:?}");
            }
        }
    }
}
