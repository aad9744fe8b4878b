//! Inbox of a controller for messages from the other controllers of its subsystem.

use super::Token;
use nvme::Status;
use nvme::log::AnaState;
use reservations::{Access, Notification};
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::task::Waker;
use sync::Unpoisoned;

/// Message to a controller from another controller of its subsystem.
#[derive(Debug)]
pub(crate) enum ControlMessage {
    /// The host's access to a namespace has changed. The controller calls
    /// [`SharedNamespace::answer`](super::SharedNamespace::answer) when its engine has applied the
    /// change and, with `abort`, no earlier command on the namespace is outstanding.
    Access {
        nsid: u32,
        access: Access,
        abort: bool,
        number: u64,
    },
    /// The ANA state of a group has changed. The controller drops `done` when its engine has
    /// applied the change and, if the namespaces are no longer accessible, no earlier command on
    /// them is outstanding.
    Ana {
        group: u32,
        state: AnaState,
        done: Sender<()>,
    },
    /// Blocks of a namespace were marked or lost their marks, see
    /// [`SharedNamespace::take_marked`](super::SharedNamespace::take_marked).
    Marks { nsid: u32 },
    /// The erasure of a namespace has begun, changed or ended, see
    /// [`SharedNamespace::take_erasing`](super::SharedNamespace::take_erasing).
    Erasing { nsid: u32 },
    /// The controller has to notify its host of a reservation event, the one with this number.
    Notice {
        nsid: u32,
        notification: Notification,
        number: u64,
    },
    /// A reservation operation submitted by this controller has ended. The controller calls
    /// [`SharedNamespace::acknowledge`](super::SharedNamespace::acknowledge) with the token when
    /// the next process will not execute the command again.
    Done {
        nsid: u32,
        ticket: u64,
        token: Option<Token>,
        status: Status,
    },
}

/// Maximum number of notices in an inbox. Further ones are dropped while the worker reads none.
const MAX_NOTICES: usize = 1024;

/// Queue of messages to a controller from other controllers of its subsystem, in order of arrival.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    messages: Mutex<VecDeque<ControlMessage>>,
    /// Number of reservation notices that were dropped because the inbox was full.
    lost: AtomicU64,
    /// Waker of the worker that serves the controller; `None` until it is set.
    waker: Mutex<Option<Waker>>,
}

impl Inbox {
    /// Sets the waker of the controller's own worker.
    pub fn set_waker(&self, waker: Waker) {
        *self.waker.lock().unpoisoned() = Some(waker.clone());
        // Messages that arrived earlier have not woken any worker.
        waker.wake();
    }

    /// Adds a message and wakes the worker. Only notices are limited; the number of other messages
    /// is bounded by the commands and callers that wait for them.
    pub fn leave(&self, message: ControlMessage) {
        let mut messages = self.messages.lock().unpoisoned();
        if matches!(message, ControlMessage::Notice { .. }) && messages.len() >= MAX_NOTICES {
            self.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        messages.push_back(message);
        drop(messages);
        self.wake();
    }

    /// Wakes the controller's worker, because an event that it waits for may have occurred.
    pub fn wake(&self) {
        if let Some(waker) = &*self.waker.lock().unpoisoned() {
            waker.wake_by_ref();
        }
    }

    /// Returns the number of notices dropped since the last call, because the inbox was full.
    pub fn take_lost(&self) -> u64 {
        match self.lost.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.lost.swap(0, Ordering::Relaxed),
        }
    }

    pub fn take(&self) -> Option<ControlMessage> {
        self.messages.lock().unpoisoned().pop_front()
    }
}
