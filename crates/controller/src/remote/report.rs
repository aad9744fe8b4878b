//! Reports of a remote engine to the control half.

use crate::engine::Event;
use std::sync::atomic::{AtomicU8, AtomicU64};

/// Event report of a remote engine to the control half.
pub(crate) struct Report {
    /// Number of the last [`Order::Stop`](crate::engine::Order) before the event: events before a
    /// reset are ignored after it.
    pub epoch: u64,
    pub event: Event,
}

/// The engine has not been opened yet, and may never be.
pub(crate) const OPENING: u8 = 0;
/// The engine may be given queues.
pub(crate) const OPEN: u8 = 1;
/// The engine could not be opened.
pub(crate) const CLOSED: u8 = 2;

/// Progress of a remote engine, which alone writes it.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Progress {
    /// [`OPENING`], [`OPEN`] or [`CLOSED`].
    pub state: AtomicU8,
    /// Number of orders applied.
    pub handled: AtomicU64,
    /// Number of orders applied when no command in flight could touch memory that they had taken
    /// away.
    pub quiesced: AtomicU64,
    /// Number of the last reset after which no command was in flight any more.
    pub stopped: AtomicU64,
    /// Number of namespaces that could not be opened, so far.
    pub refused: AtomicU64,
    /// Detached namespaces that are not released yet.
    pub leaving: AtomicU64,
}
