//! Counters, written by the thread that serves and read from anywhere without stopping it.

use probes::{IoRecord, LogLimit};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tracing::Span;
use worker::AcceptStats;

pub use probes::Counter;

/// Counters of one request queue.
#[derive(Debug, Default)]
pub struct QueueStats {
    /// Requests fetched.
    pub requests: Counter,
    /// What came of them, by kind. Failures are those that did not end with VIRTIO_BLK_S_OK.
    pub io: IoRecord,
    /// Times that the guest rang: an exit each.
    pub kicks: Counter,
    /// Times that the queue was armed before going to sleep.
    pub arms: Counter,
    /// Interrupts sent.
    pub notifications: Counter,
}

/// What an export did since it was made.
#[derive(Debug)]
pub struct Stats {
    /// By queue; those that were never used are there, too.
    pub queues: Vec<QueueStats>,
    /// Clients that connected.
    pub connections: Counter,
    /// Its socket.
    pub accepts: Arc<AcceptStats>,
    /// Requests of an earlier connection that were taken up again.
    pub resubmitted: Counter,
    connected: AtomicBool,
    /// Of its log lines.
    pub(crate) span: Span,
    /// For every log line that a client or a guest can cause.
    pub(crate) log: LogLimit,
    /// For those about clients that cannot come in.
    pub(crate) accept_log: LogLimit,
    /// For the line about guest memory that is not shared: other lines do not keep it from being
    /// seen.
    pub(crate) not_shared: LogLimit,
}

impl Stats {
    /// A line that a guest causes while its queues are served, where no span has been entered.
    pub(crate) fn line(&self, write: impl FnOnce(Option<u64>)) {
        self.span.in_scope(|| self.log.line(write));
    }

    pub(crate) fn new(queues: u16, span: Span, accepts: Arc<AcceptStats>) -> Stats {
        Stats {
            queues: std::iter::repeat_with(QueueStats::default)
                .take(usize::from(queues))
                .collect(),
            connections: Counter::default(),
            accepts,
            resubmitted: Counter::default(),
            connected: AtomicBool::new(false),
            span,
            log: LogLimit::default(),
            accept_log: LogLimit::new(1, Duration::from_secs(10)),
            not_shared: LogLimit::new(1, Duration::from_secs(60)),
        }
    }

    /// A client is there now.
    pub fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    pub(crate) fn set_connected(&self, connected: bool) {
        self.connected.store(connected, Ordering::Relaxed);
    }
}
