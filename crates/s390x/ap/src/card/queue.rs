//! Queue of an emulated card: its messages, its reset and its interrupt bit, each with the time of
//! completion.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::outside::{InterruptTarget, Reply, RequestPart};
use crate::status::{QueueStatus, Response};

/// State of the interrupt bit, including its transitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Interrupts {
    Off,
    Enabling { target: InterruptTarget, until: u64 },
    On(InterruptTarget),
    Disabling { target: InterruptTarget, until: u64 },
}

#[derive(Debug)]
struct Message {
    id: u64,
    data: Vec<u8>,
    ready: u64,
}

/// Event of a queue that is due.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    Notify(InterruptTarget),
    Quiet,
}

#[derive(Debug)]
pub(super) struct Queue {
    depth: usize,
    /// Parts of a request that still lacks its last part.
    parts: Option<(u64, Vec<u8>)>,
    requests: VecDeque<Message>,
    replies: VecDeque<Message>,
    /// Number of bytes of the oldest reply that were already returned.
    taken: usize,
    reset: Option<u64>,
    interrupts: Interrupts,
}

impl Queue {
    pub(super) fn new(depth: usize) -> Queue {
        Queue {
            depth,
            parts: None,
            requests: VecDeque::new(),
            replies: VecDeque::new(),
            taken: 0,
            reset: None,
            interrupts: Interrupts::Off,
        }
    }

    pub(super) fn status(&self) -> QueueStatus {
        QueueStatus {
            empty: self.len() == 0,
            replies_waiting: !self.replies.is_empty(),
            full: self.len() >= self.depth,
            interrupts: self.target().is_some(),
            response: match self.reset {
                Some(_) => Response::RESET_IN_PROGRESS,
                None => Response::NORMAL,
            },
        }
    }

    fn len(&self) -> usize {
        self.requests.len() + self.replies.len()
    }

    /// Returns the notification target while the interrupt bit is one; only then may a notification
    /// be written.
    fn target(&self) -> Option<InterruptTarget> {
        match self.interrupts {
            Interrupts::On(target) | Interrupts::Disabling { target, .. } => Some(target),
            Interrupts::Off | Interrupts::Enabling { .. } => None,
        }
    }

    /// Returns the time of the queue's next event; `None` if none is expected.
    pub(super) fn due(&self) -> Option<u64> {
        let bit = match self.interrupts {
            Interrupts::Enabling { until, .. } | Interrupts::Disabling { until, .. } => Some(until),
            Interrupts::Off | Interrupts::On(_) => None,
        };
        let request = self.requests.front().map(|message| message.ready);
        [bit, self.reset, request].into_iter().flatten().min()
    }

    /// Executes the next operation that is due by `now`; `None` when nothing is. A request that
    /// becomes ready at the instant when the interrupt bit clears is handled first: the worst case
    /// of a real queue.
    pub(super) fn step(&mut self, now: u64) -> Option<Event> {
        let due = self.due().filter(|due| *due <= now)?;
        if self.requests.front().is_some_and(|m| m.ready == due) {
            let message = self.requests.pop_front()?;
            self.replies.push_back(message);
            return Some(self.notification());
        }
        if self.reset == Some(due) {
            *self = Queue::new(self.depth);
            return Some(Event::Quiet);
        }
        match self.interrupts {
            Interrupts::Enabling { target, .. } => {
                self.interrupts = Interrupts::On(target);
                // Replies that were there before are not forgotten.
                if !self.replies.is_empty() {
                    return Some(self.notification());
                }
            }
            Interrupts::Disabling { .. } => self.interrupts = Interrupts::Off,
            Interrupts::Off | Interrupts::On(_) => {}
        }
        Some(Event::Quiet)
    }

    fn notification(&self) -> Event {
        self.target().map_or(Event::Quiet, Event::Notify)
    }

    /// Starts a reset. Messages and the interrupt bit are cleared when it ends.
    pub(super) fn reset(&mut self, until: u64) -> QueueStatus {
        if self.reset.is_some() {
            return self.status();
        }
        let status = self.status();
        self.reset = Some(until);
        self.parts = None;
        // The bit does not change any more; an interrupt that was being enabled never occurs.
        if let Interrupts::Disabling { target, .. } = self.interrupts {
            self.interrupts = Interrupts::On(target);
        }
        if let Interrupts::Enabling { .. } = self.interrupts {
            self.interrupts = Interrupts::Off;
        }
        status
    }

    pub(super) fn interrupts(
        &mut self,
        target: Option<InterruptTarget>,
        until: u64,
    ) -> QueueStatus {
        let status = self.status();
        if self.reset.is_some() {
            return status;
        }
        self.interrupts = match (self.interrupts, target) {
            (Interrupts::Off, Some(target)) => Interrupts::Enabling { target, until },
            (Interrupts::On(target), None) => Interrupts::Disabling { target, until },
            (Interrupts::Off, None) | (Interrupts::On(_), Some(_)) => {
                return status.with(Response::OTHERWISE_CHANGED);
            }
            (Interrupts::Enabling { .. } | Interrupts::Disabling { .. }, _) => {
                return status.with(Response::BUSY);
            }
        };
        status
    }

    pub(super) fn enqueue(
        &mut self,
        part: RequestPart<'_>,
        largest: usize,
        ready: u64,
        compute: impl FnOnce(&[u8]) -> Vec<u8>,
    ) -> QueueStatus {
        if self.reset.is_some() {
            return self.status();
        }
        if self.len() >= self.depth {
            return self.status().with(Response::QUEUE_FULL);
        }
        let mut request = match self.parts.take() {
            Some((id, parts)) if id == part.id => parts,
            Some(other) => {
                self.parts = Some(other);
                return self.status().with(Response::NO_FIRST_PART);
            }
            None => Vec::new(),
        };
        if request.len().saturating_add(part.data.len()) > largest {
            return self.status().with(Response::MESSAGE_TOO_BIG);
        }
        request.extend_from_slice(part.data);
        if part.last {
            // There is one engine: a request is not ready before earlier ones.
            let ready = self.requests.back().map_or(ready, |m| m.ready.max(ready));
            let (id, data) = (part.id, compute(&request));
            self.requests.push_back(Message { id, data, ready });
        } else {
            self.parts = Some((part.id, request));
        }
        self.status()
    }

    pub(super) fn dequeue(&mut self, room: usize, continued: bool) -> (QueueStatus, Option<Reply>) {
        if self.reset.is_some() {
            return (self.status(), None);
        }
        let Some(message) = self.replies.front() else {
            return (self.status().with(Response::NO_PENDING_REPLY), None);
        };
        if continued && self.taken == 0 {
            return (self.status().with(Response::NO_FIRST_PART), None);
        }
        let from = if continued { self.taken } else { 0 };
        let rest = message.data.get(from..).unwrap_or_default();
        let data = rest.get(..room).unwrap_or(rest).to_vec();
        let reply = Reply {
            id: message.id,
            residual: rest.len() - data.len(),
            data,
        };
        self.taken = from + reply.data.len();
        if reply.residual == 0 {
            self.replies.pop_front();
            self.taken = 0;
        }
        (self.status(), Some(reply))
    }
}
