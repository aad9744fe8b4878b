//! Queues of another worker's controller.

use controller::Branch;
use std::convert::Infallible;
use std::time::{Duration, Instant};
use volume::{Completion, PinPace};
use worker::Frontend;

/// Time between two calls to the controller's own worker while this one is busy.
const CALL_INTERVAL: Duration = Duration::from_millis(250);

/// A controller's queues on another worker than its own.
pub struct Remote {
    branch: Branch,
    /// When the controller's own worker is woken next.
    next_call: Instant,
}

impl Remote {
    pub fn new(branch: Branch) -> Self {
        Remote {
            branch,
            next_call: Instant::now(),
        }
    }
}

impl Frontend for Remote {
    type Error = Infallible;

    #[inline]
    fn poll(&mut self, now: Instant) -> bool {
        self.branch.poll(now)
    }

    #[inline]
    fn complete(&mut self, completion: Completion) {
        self.branch.complete(completion);
    }

    #[inline]
    fn poll_volumes(&mut self, out: &mut Vec<Completion>) {
        self.branch.poll_volumes(out);
    }

    #[inline]
    fn has_news(&self) -> bool {
        self.branch.has_news()
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.branch.in_flight()
    }

    #[inline]
    fn must_poll(&self) -> bool {
        self.branch.needs_polling()
    }

    #[inline]
    fn keeps_window(&self) -> bool {
        self.branch.shadowed() || self.branch.is_busy()
    }

    fn arm(&mut self) -> bool {
        self.branch.arm()
    }

    fn needs_recheck(&self) -> bool {
        self.branch.shadowed()
    }

    fn recheck(&mut self) -> bool {
        self.branch.recheck()
    }

    fn deadline(&self) -> Option<Instant> {
        self.branch.deadline()
    }

    fn drain_messages(&mut self) -> bool {
        self.branch.hear()
    }

    /// Only the controller's own worker can migrate a queue, and it may sleep while this one has
    /// too much to do.
    fn housekeeping(&mut self, now: Instant) {
        if now >= self.next_call {
            self.next_call = now + CALL_INTERVAL;
            self.branch.call_home();
        }
    }

    fn is_pinning(&self) -> bool {
        self.branch.is_pinning()
    }

    fn pin(&mut self, pace: &mut PinPace) {
        self.branch.pin_on(pace);
    }

    fn flush(&mut self) {
        self.branch.flush();
    }

    fn is_drained(&self) -> bool {
        self.branch.is_drained()
    }
}
