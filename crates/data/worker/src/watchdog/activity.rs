//! Activities of a worker.

/// Current activity of a worker. Variants with a number concern the front-end with that owner
/// number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// The worker has not begun its first round.
    Starting,
    /// Completions are collected, or the worker is between two steps.
    Round,
    /// Jobs and messages posted by other threads are handled.
    Messages,
    /// Commands are fetched and started.
    Polling(u16),
    /// Started requests are submitted to the kernel (`io_uring_enter`).
    Submitting,
    /// Completions are published, the guest is interrupted, deferred messages are answered.
    Finishing(u16),
    /// A client's messages are handled.
    Socket(u16),
    /// Work that is not urgent: memory is pinned, queues are migrated.
    Housekeeping,
    /// A front-end is closed.
    Closing(u16),
    /// The worker waits for an event.
    Asleep,
    /// The worker has ended and is being dropped.
    Dropping,
    /// The worker has ended.
    Ended,
}

impl Activity {
    pub(super) const fn code(self) -> u32 {
        let (kind, owner) = match self {
            Self::Starting => (0, 0),
            Self::Round => (1, 0),
            Self::Messages => (2, 0),
            Self::Polling(owner) => (3, owner),
            Self::Submitting => (4, 0),
            Self::Finishing(owner) => (5, owner),
            Self::Socket(owner) => (6, owner),
            Self::Housekeeping => (7, 0),
            Self::Closing(owner) => (8, owner),
            Self::Asleep => (9, 0),
            Self::Dropping => (10, 0),
            Self::Ended => (11, 0),
        };
        kind << 16 | owner as u32
    }

    pub(super) fn of(code: u32) -> Self {
        let owner = code as u16;
        match code >> 16 {
            0 => Self::Starting,
            2 => Self::Messages,
            3 => Self::Polling(owner),
            4 => Self::Submitting,
            5 => Self::Finishing(owner),
            6 => Self::Socket(owner),
            7 => Self::Housekeeping,
            8 => Self::Closing(owner),
            9 => Self::Asleep,
            10 => Self::Dropping,
            11 => Self::Ended,
            _ => Self::Round,
        }
    }

    /// Returns the number of the front-end that the activity concerns, if it concerns one.
    pub fn owner(self) -> Option<u16> {
        match self {
            Self::Polling(owner)
            | Self::Finishing(owner)
            | Self::Socket(owner)
            | Self::Closing(owner) => Some(owner),
            _ => None,
        }
    }

    /// Returns whether the activity may last for any time.
    pub(super) fn may_last(self) -> bool {
        matches!(self, Self::Starting | Self::Asleep | Self::Ended)
    }
}

/// Formats the activity for a log message; the front-end's name follows.
impl std::fmt::Display for Activity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Starting => "starting",
            Self::Round => "collecting completions",
            Self::Messages => "in messages of other threads",
            Self::Polling(_) => "fetching commands",
            Self::Submitting => "in io_uring_enter",
            Self::Finishing(_) => "completing commands and interrupting",
            Self::Socket(_) => "in messages of the client",
            Self::Housekeeping => "housekeeping",
            Self::Closing(_) => "closing",
            Self::Asleep => "asleep",
            Self::Dropping => "closing what is left",
            Self::Ended => "ended",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activity_codes_round_trip() {
        let owners = [0, 1, u16::MAX];
        let of_owner = owners.into_iter().flat_map(|owner| {
            [
                Activity::Polling(owner),
                Activity::Finishing(owner),
                Activity::Socket(owner),
                Activity::Closing(owner),
            ]
        });
        let others = [
            Activity::Starting,
            Activity::Round,
            Activity::Messages,
            Activity::Submitting,
            Activity::Housekeeping,
            Activity::Asleep,
            Activity::Dropping,
            Activity::Ended,
        ];
        let all: Vec<_> = of_owner.chain(others).collect();
        for activity in &all {
            assert_eq!(Activity::of(activity.code()), *activity);
        }
        let mut words: Vec<_> = all.iter().map(Activity::to_string).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), 12);
    }
}
