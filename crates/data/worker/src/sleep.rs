//! Preparation of sleep: all wake-up sources are armed, and polled once more.

use crate::Frontend;
use crate::worker_loop::{TOKEN_OTHERS, TOKEN_RING, Worker};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// Pause before the last check of the doorbells, for hosts without a barrier between shadow store
/// and EventIdx load. A store leaves a CPU's store buffer within this time.
const RECHECK_PAUSE: Duration = Duration::from_micros(5);

impl<F: Frontend + 'static> Worker<F> {
    /// Returns the time at which the worker has to wake up even without an event.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let pinning = self.awake().any(F::is_pinning);
        let pinning = pinning.then(|| self.pace_of_pins.next());
        let awake = self.awake().filter_map(F::deadline);
        let others = self.armed.deadline.into_iter();
        let others = others.chain(self.next_interval_poll());
        awake.chain(pinning).chain(others).min()
    }

    /// Arms all wake-up sources of this thread. Returns `false` when work arrived meanwhile, so
    /// that the thread must not sleep.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        // The flag is first, so that a message after the looks below wakes this thread.
        let mut raced = self.handle.flag().prepare_sleep();
        let mut recheck = false;
        self.wake_unconfirmed();
        // Front-ends that are not awake are armed already.
        for at in self.run_queue.awake() {
            if let Some(Some(front)) = self.fronts.get_mut(at) {
                raced |= front.arm();
                recheck |= front.needs_recheck();
            }
        }
        if !self.ring_watched
            && let Some(fd) = self.io.event_fd()
        {
            self.ring_watched = self.waits_for(fd, TOKEN_RING, "the ring");
        }
        if !self.others_watched
            && let Some(fd) = self.io.others_fd()
        {
            self.others_watched = self.waits_for(fd, TOKEN_OTHERS, "a device");
            raced |= !self.others_watched && self.is_busy();
        }
        if !self.io.arm() {
            raced = true;
            // The owner of the completion is not known here; rounds find the events of the awake
            // front-ends.
            self.visit_armed();
        }
        raced |= self.io.in_flight() > 0 && !self.ring_watched;
        if raced {
            return false;
        }
        !(recheck && self.recheck())
    }

    fn is_busy(&self) -> bool {
        self.awake().any(|front| front.in_flight() > 0)
    }

    fn waits_for(&self, fd: BorrowedFd<'_>, token: u32, of: &str) -> bool {
        match self.watch(fd, token) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, "waiting for completions of {of} failed; polling");
                false
            }
        }
    }

    /// Polls the armed sources for as long as a host's store may take to become visible. Returns
    /// `true` when work arrived.
    fn recheck(&mut self) -> bool {
        let armed = Instant::now();
        loop {
            // The clock first: the last look is one after the whole pause.
            let last = armed.elapsed() >= RECHECK_PAUSE;
            let mut raced = false;
            for at in self.run_queue.awake() {
                if let Some(Some(front)) = self.fronts.get_mut(at) {
                    raced |= front.recheck();
                }
            }
            if raced || last {
                return raced;
            }
            std::hint::spin_loop();
        }
    }
}
