//! Counters, written by the serving thread and read from any thread without stopping it.

use probes::{IoRecord, LogLimit, LogLimits};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tracing::Span;
use worker::AcceptStats;

pub use probes::Counter;

/// Counters of one request queue of an export.
#[derive(Debug, Default)]
pub struct QueueStats {
    /// Number of requests fetched from the queue.
    pub requests: Counter,
    /// Results of requests by kind. Requests without the status VIRTIO_BLK_S_OK are failures.
    pub io: IoRecord,
    /// Number of notifications (kicks) of the guest, each of which is an exit of the VM.
    pub kicks: Counter,
    /// Number of times that notifications were requested before the worker slept.
    pub arms: Counter,
    /// Number of interrupts sent to the guest.
    pub notifications: Counter,
}

/// Counters of an export since its creation.
#[derive(Debug)]
pub struct Stats {
    /// Counters of each queue, including queues that were never used.
    pub queues: Vec<QueueStats>,
    /// Number of front-ends that have connected.
    pub connections: Counter,
    /// Counters of the listening socket.
    pub accepts: Arc<AcceptStats>,
    /// Number of requests of an earlier connection that were started again.
    pub resubmitted: Counter,
    connected: AtomicBool,
    pub(crate) incoming: Arc<AtomicBool>,
    /// Span that identifies the export in log lines.
    pub(crate) span: Span,
    /// Limit for log lines that a client or a guest can cause.
    pub(crate) log: LogLimits,
    /// Limit for log lines about refused clients.
    pub(crate) accept_log: LogLimit,
    /// Limit for the log line about guest memory that is not shared, separate so that other lines
    /// do not suppress it.
    pub(crate) not_shared: LogLimit,
}

impl Stats {
    /// Writes a log line caused by a guest while its queues are served, where no span has been
    /// entered.
    pub(crate) fn line(&self, kind: &'static str, write: impl FnOnce(Option<u64>)) {
        self.span.in_scope(|| self.log.line(kind, write));
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
            incoming: Arc::default(),
            span,
            log: LogLimits::default(),
            accept_log: LogLimit::new(1, Duration::from_secs(10)),
            not_shared: LogLimit::new(1, Duration::from_secs(60)),
        }
    }

    /// Returns whether a front-end is connected.
    pub fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    /// Returns whether another process may write the volume: the disk has not taken its lock, or
    /// has handed it over.
    pub fn is_incoming(&self) -> bool {
        self.incoming.load(Ordering::Relaxed)
    }

    pub(crate) fn set_connected(&self, connected: bool) {
        self.connected.store(connected, Ordering::Relaxed);
    }
}
