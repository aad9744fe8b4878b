//! What the other controllers of a subsystem have to tell one.

use nvme::Status;
use nvme::log::AnaState;
use reservations::{Access, Notification};
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::task::Waker;
use sync::Unpoisoned;

/// To a controller's control half.
#[derive(Debug)]
pub(crate) enum Message {
    /// The host may do this on a namespace from now on. To be answered by
    /// [`SharedNamespace::answer`](super::SharedNamespace::answer) when the engine knows it and,
    /// with `abort`, nothing is left that was in flight there.
    Access {
        nsid: u32,
        access: Access,
        abort: bool,
        number: u64,
    },
    /// A group's namespaces are reached so from now on. `done` is dropped when the engine knows it
    /// and, where they are not reached any more, nothing is left that was in flight there.
    Ana {
        group: u32,
        state: AnaState,
        done: Sender<()>,
    },
    /// Blocks of a namespace were marked, or are so no more: see
    /// [`SharedNamespace::take_marked`](super::SharedNamespace::take_marked).
    Marks { nsid: u32 },
    /// A namespace is being erased, or is so no more: see
    /// [`SharedNamespace::take_erasing`](super::SharedNamespace::take_erasing).
    Erasing { nsid: u32 },
    /// The host is to be told.
    Notice {
        nsid: u32,
        notification: Notification,
    },
    /// An operation is over that this controller has submitted.
    Done { ticket: u64, status: Status },
}

/// Notices that may lie there: a controller whose worker does not come is told of no more.
const MOST: usize = 1024;

/// Messages in the order in which they were left.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    messages: Mutex<VecDeque<Message>>,
    /// Notices for which there was no room.
    lost: AtomicU64,
    /// Wakes the controller's own worker, once that is known.
    waker: Mutex<Option<Waker>>,
}

impl Inbox {
    /// The controller's worker is woken by this from now on.
    pub fn set_waker(&self, waker: Waker) {
        *self.waker.lock().unpoisoned() = Some(waker.clone());
        // What was left before nobody was woken for.
        waker.wake();
    }

    /// Leaves a message. Others than notices are as many as there are commands, and callers, that
    /// wait for them.
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

    /// Wakes the controller's worker: something that it waits for may have happened.
    pub fn wake(&self) {
        if let Some(waker) = &*self.waker.lock().unpoisoned() {
            waker.wake_by_ref();
        }
    }

    /// Notices that were lost since this was asked last.
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
