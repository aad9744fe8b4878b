//! What the thread waits for: the descriptors in its epoll set, and what each of them means.

use super::Worker;
use anyhow::{Context, Result};
use rustix::event::{Timespec, epoll};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// Descriptors handled after one wait.
const EVENTS: usize = 64;

pub(super) const TOKEN_STOP: u64 = 0;
pub(super) const TOKEN_RING: u64 = 1;
/// Completions that do not come through the ring.
pub(super) const TOKEN_OTHERS: u64 = 2;
pub(super) const TOKEN_SIZES: u64 = 3;
pub(super) const TOKEN_BELL: u64 = 4;
pub(super) const TOKEN_FIRST: u64 = 5;

/// The token of a controller's listener; that of its connection is the next one.
pub(super) fn listener_token(index: usize) -> u64 {
    TOKEN_FIRST + 2 * index as u64
}

impl Worker {
    /// Puts a descriptor into the epoll set.
    pub(super) fn watch(
        &self,
        fd: BorrowedFd<'_>,
        token: u64,
        flags: epoll::EventFlags,
    ) -> Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), flags).context("epoll")
    }

    /// `sizes` becomes readable when a volume has been resized.
    pub fn watch_sizes(&mut self, sizes: Arc<OwnedFd>) -> Result<()> {
        self.watch(sizes.as_fd(), TOKEN_SIZES, epoll::EventFlags::IN)?;
        self.sizes = Some(sizes);
        Ok(())
    }

    fn check_sizes(&mut self) {
        if let Some(sizes) = &self.sizes {
            let _ = rustix::io::read(sizes, &mut [0; 8]);
        }
        for slot in &mut self.slots {
            slot.device.controller.check_sizes();
        }
    }

    /// Waits for the sockets, the ring and the end, and handles what is ready. `true` when the process is to end.
    pub(super) fn look(&mut self, timeout: Option<Duration>) -> Result<bool> {
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; EVENTS];
        let timeout = timeout.map(|t| Timespec {
            tv_sec: t.as_secs() as i64,
            tv_nsec: i64::from(t.subsec_nanos()) as _,
        });
        let ready = match epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()) {
            Ok((ready, _)) => ready,
            Err(rustix::io::Errno::INTR) => return Ok(false),
            Err(error) => return Err(error).context("epoll"),
        };
        let mut tokens = [0; EVENTS];
        let count = ready.len();
        for (token, event) in tokens.iter_mut().zip(ready) {
            *token = event.data.u64();
        }
        for slot in 0..self.slots.len() {
            if self
                .slots
                .get_mut(slot)
                .is_some_and(|s| std::mem::take(&mut s.more))
            {
                self.serve(slot);
            }
        }
        for &token in tokens.iter().take(count) {
            match token {
                TOKEN_STOP => return Ok(true),
                TOKEN_RING | TOKEN_OTHERS => {}
                TOKEN_SIZES => self.check_sizes(),
                TOKEN_BELL => self.peers.woken(self.index),
                _ => {
                    let index = ((token - TOKEN_FIRST) / 2) as usize;
                    if (token - TOKEN_FIRST).is_multiple_of(2) {
                        self.accept(index)
                    } else {
                        self.serve(index)
                    }
                }
            }
        }
        Ok(false)
    }
}
