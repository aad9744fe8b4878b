//! Waiting for completions: polling first, then sleeping.

use std::io::{self, IoSliceMut};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use super::core::QueueCore;
use super::request::Completion;

/// Minimum time for which a wait polls before it sleeps.
const MIN_WINDOW: Duration = Duration::from_micros(2);
/// Number of unsuccessful polls between two reads of the clock. Reading the clock costs as much as
/// several checks of the queue, and such a poll makes nearly ten of them.
const POLLS_PER_CLOCK: u32 = 2;

/// Adaptive time for which a wait on a queue pair polls before it sleeps.
#[derive(Debug)]
pub(crate) struct Waiter {
    window: Duration,
    longest: Duration,
    pub sleeps: u64,
}

impl Waiter {
    pub fn new(longest: Duration) -> Self {
        Self {
            window: longest / 2,
            longest,
            sleeps: 0,
        }
    }

    pub fn wait(
        &mut self,
        core: &mut QueueCore,
        timeout: Duration,
        done: &mut impl FnMut(Completion),
    ) -> io::Result<usize> {
        let start = Instant::now();
        let blind = core.eventfd.is_none() || core.shared.transport.is_stepped();
        let mut rounds = 0u32;
        loop {
            let count = core.poll(done);
            if count > 0 {
                return Ok(count);
            }
            rounds = rounds.wrapping_add(1);
            if !rounds.is_multiple_of(POLLS_PER_CLOCK) {
                continue;
            }
            let waited = start.elapsed();
            if waited >= timeout {
                return Ok(0);
            }
            if blind {
                if waited > self.longest {
                    std::thread::yield_now();
                }
            } else if waited >= self.window {
                break;
            }
        }
        // Earlier signals are consumed; later completions signal again.
        drain(core);
        let count = core.poll(done);
        if count > 0 {
            return Ok(count);
        }
        let left = timeout.saturating_sub(start.elapsed()).min(core.tick_len());
        let asleep = Instant::now();
        self.sleeps += 1;
        if let Some(eventfd) = &core.eventfd {
            let mut fds = [PollFd::new(eventfd, PollFlags::IN)];
            let left = Timespec::try_from(left).unwrap_or(Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            });
            match poll(&mut fds, Some(&left)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        let slept = asleep.elapsed();
        let count = core.poll(done);
        self.window = if count > 0 && slept <= self.longest {
            // A little more polling would have found the completion.
            (self.window * 2).clamp(MIN_WINDOW.min(self.longest), self.longest)
        } else {
            self.window / 2
        };
        if count == 0 {
            // The clock does not advance during sleep.
            core.look_after();
            return Ok(core.poll(done));
        }
        Ok(count)
    }
}

/// Consumes earlier signals of the queue's interrupt eventfd.
pub(super) fn drain(core: &QueueCore) {
    if let Some(eventfd) = &core.eventfd {
        let mut count = [0; 8];
        // An empty eventfd is no error, and the read must not block. A server at the other end of a
        // socket shares the descriptor's flags, and may have cleared O_NONBLOCK. An offset of -1
        // means the descriptor's own position, which an eventfd does not have.
        let mut buffers = [IoSliceMut::new(&mut count)];
        let flags = ReadWriteFlags::NOWAIT;
        let read = preadv2(eventfd.as_fd(), &mut buffers, u64::MAX, flags);
        if read == Err(Errno::OPNOTSUPP) {
            // Linux before 5.8 needs a plain read.
            let _ = rustix::io::read(eventfd.as_fd(), &mut count);
        }
    }
}
