//! Queues of another worker's controller.

use controller::RemoteEngine;
use std::convert::Infallible;
use std::time::{Duration, Instant};
use volume::{Budget, Completion, PinPace};
use worker::Frontend;

/// Interval at which a busy worker wakes the worker that has the controller's control half.
const CALL_INTERVAL: Duration = Duration::from_millis(250);

/// Front-end of a controller's queues on a worker that does not have its control half.
pub struct Remote {
    engine: RemoteEngine,
    /// Time at which the controller's own worker is woken next.
    next_call: Instant,
    /// Whether a flush was requested at the end of the worker, which is needed only once.
    flushed: bool,
}

impl Remote {
    pub fn new(engine: RemoteEngine) -> Self {
        Remote {
            engine,
            next_call: Instant::now(),
            flushed: false,
        }
    }
}

impl Frontend for Remote {
    type Error = Infallible;

    #[inline]
    fn poll(&mut self, now: Instant, budget: &mut Budget) -> bool {
        self.engine.poll(now, budget)
    }

    #[inline]
    fn complete(&mut self, completion: Completion) {
        self.engine.complete(completion);
    }

    #[inline]
    fn poll_volumes(&mut self, out: &mut Vec<Completion>) {
        self.engine.poll_volumes(out);
    }

    fn update_volumes(&mut self) {
        self.engine.update_volumes();
    }

    #[inline]
    fn has_news(&self) -> bool {
        self.engine.has_news()
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.engine.in_flight()
    }

    #[inline]
    fn must_poll(&self) -> bool {
        self.engine.needs_polling()
    }

    #[inline]
    fn is_unannounced(&self) -> bool {
        self.engine.is_unannounced()
    }

    #[inline]
    fn keeps_window(&self) -> bool {
        self.engine.shadowed() || self.engine.is_busy()
    }

    fn arm(&mut self) -> bool {
        self.engine.arm()
    }

    fn needs_recheck(&self) -> bool {
        self.engine.shadowed()
    }

    fn recheck(&mut self) -> bool {
        self.engine.recheck()
    }

    fn deadline(&self) -> Option<Instant> {
        self.engine.deadline()
    }

    fn drain_messages(&mut self) -> bool {
        self.engine.drain_messages()
    }

    /// Only the controller's own worker can migrate a queue, and it may sleep while this one has
    /// too much to do.
    fn housekeeping(&mut self, now: Instant) {
        self.engine.tidy(now);
        if now >= self.next_call {
            self.next_call = now + CALL_INTERVAL;
            self.engine.wake_controller();
        }
    }

    fn is_pinning(&self) -> bool {
        self.engine.is_pinning()
    }

    fn pin(&mut self, pace: &mut PinPace) {
        self.engine.pin_on(pace);
    }

    fn flush(&mut self) {
        self.flushed = true;
        self.engine.flush();
    }

    fn is_drained(&self) -> bool {
        self.engine.is_drained()
    }

    /// Returns whether the controller was removed. The worker then removes this engine, unless the
    /// worker itself ends.
    fn has_ended(&self) -> bool {
        self.engine.has_ended() && !self.flushed
    }
}
