//! What a worker serves.

use std::time::Instant;
use volume::{Budget, Completion, PinPace};

/// A source of commands, as a [`Worker`](crate::Worker) sees it: an NVMe controller behind a
/// socket, queues of another worker's controller, a vhost-user-blk export, a queue of a ublk disk,
/// a controller inside this process.
///
/// All calls come from the worker's thread. None of them may block. One call of [`Frontend::poll`]
/// does what its budget is for, [`Frontend::ready`] and [`Frontend::read_on`] handle a few
/// messages: after each the worker looks at the time, so that a flood at one front-end does not
/// starve another.
///
/// A program that serves several kinds makes an enum of them and implements the trait by a `match`:
/// then no call on the way of a command is virtual.
pub trait Frontend {
    /// Why it could not end as it should.
    type Error: std::error::Error + 'static;

    /// Fetches new commands and starts them, as far as the budget goes; completes what needs no
    /// volume. `true` when there was anything to do. `now` is a few rounds old at most.
    fn poll(&mut self, now: Instant, budget: &mut Budget) -> bool;

    /// A request has completed. The upper 16 bits of its tag are this front-end's
    /// [`Context::owner`](crate::Context::owner).
    fn complete(&mut self, completion: Completion);

    /// Collects completions that do not come through the ring.
    fn poll_volumes(&mut self, out: &mut Vec<Completion>) {
        let _ = out;
    }

    /// Ends a round, when all completions are in: shows the guest what was answered, answers
    /// messages that had to wait. `true` when there was anything to do.
    fn finish_round(&mut self) -> bool {
        false
    }

    /// A short look between two rounds, at what is most urgent: `true` when [`Frontend::poll`]
    /// would find something. It may miss things: a round comes soon.
    #[inline]
    fn has_news(&self) -> bool {
        false
    }

    /// Requests that are with volumes, through the ring or otherwise.
    fn in_flight(&self) -> usize;

    /// Commands or completions come without anything that could wake the thread: it must not sleep.
    fn must_poll(&self) -> bool {
        false
    }

    /// Polling on for a while after the last work may spare a wake-up: its guest submits by memory,
    /// or has commands in flight.
    fn keeps_window(&self) -> bool {
        self.in_flight() > 0
    }

    /// It stopped in the middle of what its socket has: [`Frontend::read_on`] goes on with it.
    fn has_more(&self) -> bool {
        false
    }

    /// Its guest announces commands by messages on a socket: the sockets are looked at often.
    fn is_trapped(&self) -> bool {
        false
    }

    /// Asks to be woken for the next command (EventIdx, `avail_event`): store, full fence, look
    /// again. `true` when something arrived meanwhile.
    fn arm(&mut self) -> bool;

    /// After [`Frontend::arm`], its host may lack the full barrier between publishing a command and
    /// looking whether to ring: the worker looks again for a few microseconds.
    fn needs_recheck(&self) -> bool {
        false
    }

    /// The last looks before sleep, see [`Frontend::needs_recheck`]. `true` when something arrived.
    fn recheck(&mut self) -> bool {
        false
    }

    /// When to look at it again though nothing wakes the thread.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// The worker's wake flag was up: looks into the channels that other threads write to. `true`
    /// when there was anything.
    fn drain_messages(&mut self) -> bool {
        false
    }

    /// Called now and then while the thread is awake (100 us or more between two calls), and after
    /// each sleep: for what is not urgent.
    fn housekeeping(&mut self, now: Instant) {
        let _ = now;
    }

    /// Guest memory waits to be pinned (fixed buffers): [`Frontend::pin`] is to be called.
    fn is_pinning(&self) -> bool {
        false
    }

    /// Pins a piece of it. The worker's front-ends share one `pace`, which keeps the pieces short.
    fn pin(&mut self, pace: &mut PinPace) {
        let _ = pace;
    }

    /// A descriptor that it put into the epoll set is ready, under this token.
    fn ready(&mut self, token: u32) {
        let _ = token;
    }

    /// Goes on with what its socket has, see [`Frontend::has_more`].
    fn read_on(&mut self) {}

    /// The worker ends: fetches nothing more, completes what is in flight, and makes everything
    /// durable. Rounds go on until [`Frontend::is_drained`].
    fn flush(&mut self);

    /// Nothing is in flight, and no flush.
    fn is_drained(&self) -> bool;

    /// Closes what its client has, after everything is durable.
    ///
    /// # Errors
    /// What kept it from being durable, for example.
    fn close(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }

    /// It has nothing to do any more, and will not have: the worker removes it.
    fn has_ended(&self) -> bool {
        false
    }
}
