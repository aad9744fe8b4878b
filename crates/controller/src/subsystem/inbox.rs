//! Inbox of a controller for messages from the other controllers of its subsystem.

use nvme::Status;
use nvme::log::AnaState;
use reservations::{Access, Notification};
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::task::Waker;
use sync::Unpoisoned;

/// Message to a controller's control half.
#[derive(Debug)]
pub(crate) enum Message {
    /// The host's access to a namespace has changed.
    /// [`SharedNamespace::answer`](super::SharedNamespace::answer) is called when the engine has
    /// applied the change and, with `abort`, no earlier command is in flight there.
    Access {
        nsid: u32,
        access: Access,
        abort: bool,
        number: u64,
    },
    /// The ANA state of a group has changed. `done` is dropped when the engine has applied it
    /// and, if the namespaces are no longer accessible, no earlier command is in flight there.
    Ana {
        group: u32,
        state: AnaState,
        done: Sender<()>,
    },
    /// Blocks of a namespace were marked, or lost their marks: see
    /// [`SharedNamespace::take_marked`](super::SharedNamespace::take_marked).
    Marks { nsid: u32 },
    /// The erasure of a namespace has begun, changed or ended: see
    /// [`SharedNamespace::take_erasing`](super::SharedNamespace::take_erasing).
    Erasing { nsid: u32 },
    /// The host is to be notified.
    Notice {
        nsid: u32,
        notification: Notification,
    },
    /// An operation that this controller has submitted has ended.
    Done { ticket: u64, status: Status },
}

/// Maximum number of waiting notices: when a worker does not take them, further ones are dropped.
const MOST: usize = 1024;

/// Messages in the order of their arrival.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    messages: Mutex<VecDeque<Message>>,
    /// Number of notices for which there was no room.
    lost: AtomicU64,
    /// Wakes the controller's own worker, once set.
    waker: Mutex<Option<Waker>>,
}

impl Inbox {
    /// Sets the waker of the controller's worker.
    pub fn set_waker(&self, waker: Waker) {
        *self.waker.lock().unpoisoned() = Some(waker.clone());
        // Earlier messages have woken no worker.
        waker.wake();
    }

    /// Adds a message. The number of messages other than notices is bounded by the commands and
    /// callers that wait for them.
    pub fn leave(&self, message: Message) {
        let mut messages = self.messages.lock().unpoisoned();
        if matches!(message, Message::Notice { .. }) && messages.len() >= MOST {
            self.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        messages.push_back(message);
        drop(messages);
        self.wake();
    }

    /// Wakes the controller's worker: an event that it waits for may have occurred.
    pub fn wake(&self) {
        if let Some(waker) = &*self.waker.lock().unpoisoned() {
            waker.wake_by_ref();
        }
    }

    /// Returns the number of notices lost since the last call.
    pub fn take_lost(&self) -> u64 {
        match self.lost.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.lost.swap(0, Ordering::Relaxed),
        }
    }

    pub fn take(&self) -> Option<Message> {
        self.messages.lock().unpoisoned().pop_front()
    }
}
