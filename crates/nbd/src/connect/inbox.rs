//! Where a thread leaves a connection that it has made, for the worker that waits for it.

use super::socket::Connected;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;
use volume::{Armed, Io};

/// Connections for one queue.
#[derive(Debug)]
pub(crate) struct Inbox {
    made: Mutex<Vec<(usize, Connected)>>,
    news: AtomicBool,
    /// The worker may be asleep: the next one to leave something wakes it.
    armed: AtomicBool,
    event: OwnedFd,
}

impl Inbox {
    /// One that wakes the worker of `io`.
    pub(crate) fn new(io: &Io) -> std::io::Result<Arc<Self>> {
        let inbox = Arc::new(Self {
            made: Mutex::default(),
            news: AtomicBool::new(false),
            armed: AtomicBool::new(false),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        let mine = Arc::downgrade(&inbox);
        io.watch(inbox.event.as_fd(), move || match mine.upgrade() {
            None => Armed::Gone,
            Some(inbox) if inbox.arm() => Armed::Quiet,
            Some(_) => Armed::Waiting,
        })?;
        Ok(inbox)
    }

    /// Leaves a connection for the link of this number.
    pub(crate) fn put(&self, link: usize, connected: Connected) {
        self.made.lock().unpoisoned().push((link, connected));
        // In one order with `arm`: either this finds it armed, or that finds the news.
        self.news.store(true, Ordering::SeqCst);
        if self.armed.swap(false, Ordering::SeqCst) {
            // It is this process's own and non-blocking; full means signalled.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// The worker wants to sleep. `false`: there is something.
    fn arm(&self) -> bool {
        // Nothing there: something else has ended the last sleep.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        self.armed.store(true, Ordering::SeqCst);
        !self.news.load(Ordering::SeqCst)
    }

    /// Whether there is something.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        self.news.load(Ordering::Relaxed)
    }

    /// All that there is.
    pub(crate) fn take(&self) -> Vec<(usize, Connected)> {
        self.news.store(false, Ordering::SeqCst);
        std::mem::take(&mut *self.made.lock().unpoisoned())
    }
}
