//! The way to sleep: everything that can wake the thread is armed, and looked at once more.

use super::Worker;
use super::events::{TOKEN_OTHERS, TOKEN_RING};
use controller::Branch;
use rustix::event::epoll;
use std::time::{Duration, Instant};

/// Pause before the last look at the doorbells, for hosts without a barrier between shadow store and EventIdx load: a
/// store leaves a CPU's store buffer within this time.
const RECHECK_PAUSE: Duration = Duration::from_micros(5);

impl Worker {
    /// When to wake up though nothing happens.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.slots
            .iter()
            .filter_map(|s| s.device.controller.deadline())
            .chain(self.branches.iter().filter_map(Branch::deadline))
            .chain(self.is_pinning().then(|| self.pace.next()))
            .min()
    }

    /// Arms everything that can wake this thread. `false` when something arrived meanwhile.
    pub(super) fn prepare_sleep(&mut self) -> bool {
        // First, so that who rings after the looks below wakes this thread.
        let mut raced = self.bell.doze();
        let mut shadowed = false;
        for branch in &mut self.branches {
            raced |= branch.arm();
            shadowed |= branch.shadowed();
        }
        for slot in &mut self.slots {
            raced |= slot.device.controller.arm();
            shadowed |= slot.device.controller.shadowed();
        }
        if !self.ring_watched
            && let Some(fd) = self.io.event_fd()
        {
            match epoll::add(
                &self.epoll,
                fd,
                epoll::EventData::new_u64(TOKEN_RING),
                epoll::EventFlags::IN,
            ) {
                Ok(()) => self.ring_watched = true,
                Err(error) => {
                    tracing::warn!(%error, "the ring's completions cannot be waited for; polling")
                }
            }
        }
        if !self.others_watched
            && let Some(fd) = self.io.others_fd()
        {
            let data = epoll::EventData::new_u64(TOKEN_OTHERS);
            match epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN) {
                Ok(()) => self.others_watched = true,
                Err(error) => {
                    tracing::warn!(%error, "a device's completions cannot be waited for; polling");
                    raced |= self.slots.iter().any(|s| s.device.controller.is_busy())
                        || self.branches.iter().any(Branch::is_busy);
                }
            }
        }
        raced |= !self.io.arm() || (self.io.in_flight() > 0 && !self.ring_watched);
        if raced {
            return false;
        }
        if shadowed {
            let armed = Instant::now();
            loop {
                let over = armed.elapsed() >= RECHECK_PAUSE;
                for slot in &mut self.slots {
                    raced |= slot.device.controller.recheck();
                }
                for branch in &mut self.branches {
                    raced |= branch.recheck();
                }
                if raced || over {
                    break;
                }
                std::hint::spin_loop();
            }
        }
        !raced
    }
}
