//! Messages from other threads to a worker.

use crate::{Armed, Io};
use rustix::event::{EventfdFlags, eventfd};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;

/// Queue of items from other threads to a queue of one worker. Adding an item wakes the worker if
/// it sleeps.
///
/// The worker checks it in each round ([`Inbox::has_news`] costs a load). No system call is made
/// while the worker polls.
pub struct Inbox<T> {
    left: Mutex<Vec<T>>,
    /// Number of items in `left`, readable without the lock.
    count: AtomicUsize,
    /// Whether the worker may be asleep, so that the next added item has to wake it.
    armed: AtomicBool,
    /// Whether the queue was dropped. Threads that hang may hold the inbox for long after that.
    closed: AtomicBool,
    event: OwnedFd,
}

impl<T> fmt::Debug for Inbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox")
            .field("count", &self.count)
            .field("closed", &self.closed)
            .finish_non_exhaustive()
    }
}

impl<T: Send + 'static> Inbox<T> {
    /// Creates an inbox that wakes the worker of `io`.
    ///
    /// # Errors
    /// The system's error when the eventfd cannot be created or watched.
    pub fn new(io: &Io) -> std::io::Result<Arc<Self>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let inbox = Arc::new(Self {
            left: Mutex::default(),
            count: AtomicUsize::new(0),
            armed: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            event: eventfd(0, flags)?,
        });
        let mine = Arc::downgrade(&inbox);
        io.watch(inbox.event.as_fd(), move || match mine.upgrade() {
            None => Armed::Gone,
            Some(inbox) if inbox.closed.load(Ordering::Relaxed) => Armed::Gone,
            Some(inbox) if inbox.arm() => Armed::Quiet,
            Some(_) => Armed::Waiting,
        })?;
        Ok(inbox)
    }

    /// Adds an item, and wakes the worker if it sleeps.
    pub fn put(&self, item: T) {
        self.left.lock().unpoisoned().push(item);
        // In one order with `arm`: either this finds it armed, or that finds the count.
        self.count.fetch_add(1, Ordering::SeqCst);
        if self.armed.swap(false, Ordering::SeqCst) {
            // The eventfd is this process's own and non-blocking; full means signalled.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Prepares the worker's sleep. Returns `false` when the inbox contains items, so that the
    /// worker must not sleep.
    fn arm(&self) -> bool {
        // An error means that the counter is 0: another event has ended the last sleep.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        self.armed.store(true, Ordering::SeqCst);
        self.count.load(Ordering::SeqCst) == 0
    }

    /// Closes the inbox: its contents are dropped, and it no longer keeps the worker awake.
    pub fn close(&self) {
        // On the thread that asks for it, too.
        self.closed.store(true, Ordering::Relaxed);
        drop(self.take());
    }

    /// Returns whether the inbox contains any item, without taking its lock.
    #[inline]
    pub fn has_news(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Removes and returns all items in the order in which they were added.
    pub fn take(&self) -> Vec<T> {
        let left = std::mem::take(&mut *self.left.lock().unpoisoned());
        self.count.fetch_sub(left.len(), Ordering::SeqCst);
        left
    }
}
