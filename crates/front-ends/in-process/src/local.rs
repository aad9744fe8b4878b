//! Front-end of a worker for a controller that is used without a socket.

use controller::Controller;
use std::convert::Infallible;
use std::time::Instant;
use volume::{Budget, Completion};
use worker::Frontend;

/// Front-end of a controller that code of the same process drives.
pub struct Local(pub(crate) Controller);

impl Frontend for Local {
    type Error = Infallible;

    #[inline]
    fn poll(&mut self, now: Instant, budget: &mut Budget) -> bool {
        self.0.poll_within(now, budget)
    }

    #[inline]
    fn complete(&mut self, completion: Completion) {
        self.0.complete(completion);
    }

    #[inline]
    fn poll_volumes(&mut self, out: &mut Vec<Completion>) {
        self.0.poll_volumes(out);
    }

    #[inline]
    fn has_news(&self) -> bool {
        self.0.has_news()
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    #[inline]
    fn must_poll(&self) -> bool {
        self.0.needs_polling()
    }

    #[inline]
    fn is_unannounced(&self) -> bool {
        self.0.is_unannounced()
    }

    #[inline]
    fn keeps_window(&self) -> bool {
        self.0.shadowed() || self.0.is_busy()
    }

    fn arm(&mut self) -> bool {
        self.0.arm()
    }

    fn needs_recheck(&self) -> bool {
        self.0.shadowed()
    }

    fn recheck(&mut self) -> bool {
        self.0.recheck()
    }

    fn deadline(&self) -> Option<Instant> {
        self.0.deadline()
    }

    fn drain_messages(&mut self) -> bool {
        self.0.drain_messages()
    }

    fn flush(&mut self) {
        self.0.flush();
    }

    fn is_drained(&self) -> bool {
        self.0.is_drained()
    }
}
