//! Distribution of events to listeners. The sender waits for none of them.

use crate::api::{Event, EventKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{Receiver, Sender, channel};

/// Maximum number of events that are kept for a slow listener; older ones are dropped.
const MAX_QUEUED_EVENTS: usize = 1024;

/// Sender of events to all listeners of the management API. Clones have the same listeners.
#[derive(Clone, Debug)]
pub struct EventSender {
    sender: Sender<Event>,
    sequence: Arc<AtomicU64>,
}

impl EventSender {
    /// Creates a sender without listeners.
    pub fn new() -> Self {
        Self {
            sender: channel(MAX_QUEUED_EVENTS).0,
            sequence: Arc::default(),
        }
    }

    /// Sends an event of a disk, from any thread. It waits for no listener, and costs almost
    /// nothing without listeners. Not for events of single commands.
    pub fn send(&self, kind: EventKind, disk: &str, nsid: Option<u32>, message: Option<String>) {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed) + 1;
        if !self.has_listeners() {
            return;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let event = Event {
            sequence,
            time_ms: now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(u64::MAX)),
            kind,
            disk: disk.to_owned(),
            nsid,
            message,
        };
        // The call fails if the last listener has disconnected.
        let _ = self.sender.send(event);
    }

    /// Returns whether anything listens to the events.
    pub fn has_listeners(&self) -> bool {
        self.sender.receiver_count() > 0
    }

    /// Returns a receiver of events from now on.
    pub fn receiver(&self) -> EventReceiver {
        EventReceiver(self.sender.subscribe())
    }
}

impl Default for EventSender {
    fn default() -> Self {
        Self::new()
    }
}

/// Message that a listener receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received {
    /// An event has occurred.
    Event(Event),
    /// The listener was too slow, and this number of events was dropped.
    Lost(u64),
}

/// A listener's end. One that does not take its events loses the oldest, and keeps nobody.
#[derive(Debug)]
pub struct EventReceiver(Receiver<Event>);

impl EventReceiver {
    /// Waits for the next event; `None` when no more can follow.
    pub async fn next(&mut self) -> Option<Received> {
        match self.0.recv().await {
            Ok(event) => Some(Received::Event(event)),
            Err(RecvError::Lagged(count)) => Some(Received::Lost(count)),
            Err(RecvError::Closed) => None,
        }
    }

    /// Returns the next event if it has arrived already, without waiting.
    pub fn try_next(&mut self) -> Option<Received> {
        use tokio::sync::broadcast::error::TryRecvError;
        match self.0.try_recv() {
            Ok(event) => Some(Received::Event(event)),
            Err(TryRecvError::Lagged(count)) => Some(Received::Lost(count)),
            Err(TryRecvError::Empty | TryRecvError::Closed) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_listener_blocks_nobody_and_learns_of_lost_events() {
        let sender = EventSender::new();
        sender.send(EventKind::Added, "before", None, None);
        let (mut slow, mut prompt) = (sender.receiver(), sender.receiver());
        for number in 0..5000u32 {
            sender.send(EventKind::Attached, "vm0", Some(number), None);
            let Some(Received::Event(event)) = prompt.try_next() else {
                panic!("event {number} is not there");
            };
            assert_eq!(
                (event.nsid, event.sequence),
                (Some(number), u64::from(number) + 2)
            );
        }
        assert_eq!(prompt.try_next(), None);
        assert_eq!(slow.try_next(), Some(Received::Lost(5000 - 1024)));
        let Some(Received::Event(event)) = slow.try_next() else {
            panic!("what is kept is gone");
        };
        assert_eq!(event.nsid, Some(5000 - 1024));
    }
}
