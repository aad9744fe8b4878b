//! Where threads leave what they have finished, for the worker that asked for it.

use super::work::Work;
use crate::{Armed, Io, IoError};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;

/// Finished work of one queue.
#[derive(Debug)]
pub(super) struct Inbox {
    done: Mutex<Vec<Done>>,
    /// Length of `done`.
    count: AtomicUsize,
    /// The worker may be asleep: the next one to leave something wakes it.
    armed: AtomicBool,
    /// The queue has gone; threads that hang may keep this for long.
    closed: AtomicBool,
    event: OwnedFd,
}

/// Work that has been finished.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) id: u64,
    pub(super) work: Work,
    pub(super) result: Result<(), IoError>,
}

impl Inbox {
    /// One that wakes the worker of `io`.
    pub(super) fn new(io: &Io) -> std::io::Result<Arc<Self>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let inbox = Arc::new(Self {
            done: Mutex::default(),
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

    /// Leaves something.
    pub(super) fn put(&self, done: Done) {
        self.done.lock().unpoisoned().push(done);
        // In one order with `arm`: either this finds it armed, or that finds the count.
        self.count.fetch_add(1, Ordering::SeqCst);
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
        self.count.load(Ordering::SeqCst) == 0
    }

    /// Nobody takes anything any more, and nothing keeps the worker awake.
    pub(super) fn close(&self) {
        // On the thread that asks for it, too.
        self.closed.store(true, Ordering::Relaxed);
        drop(self.take());
    }

    /// Whether there is something.
    #[inline]
    pub(super) fn has_news(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// All that there is.
    pub(super) fn take(&self) -> Vec<Done> {
        let done = std::mem::take(&mut *self.done.lock().unpoisoned());
        self.count.fetch_sub(done.len(), Ordering::SeqCst);
        done
    }
}
