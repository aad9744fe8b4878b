//! What a remote engine tells the control half.

use crate::engine::Event;
use std::sync::atomic::{AtomicU8, AtomicU64};

/// From a remote engine to the control half.
pub(crate) struct Report {
    /// The last [`Order::Stop`](crate::engine::Order) before it: what happened before a reset
    /// concerns nobody after it.
    pub epoch: u64,
    pub event: Event,
}

/// The engine has not been opened yet, and may never be.
pub(crate) const OPENING: u8 = 0;
/// It may be given queues.
pub(crate) const OPEN: u8 = 1;
/// It could not be opened.
pub(crate) const CLOSED: u8 = 2;

/// How far a remote engine is. Written by it alone.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Progress {
    /// One of the constants above.
    pub state: AtomicU8,
    /// Orders applied.
    pub handled: AtomicU64,
    /// Orders applied when no command in flight could touch memory that they had taken away.
    pub quiesced: AtomicU64,
    /// The last reset after which nothing was in flight any more.
    pub stopped: AtomicU64,
    /// Namespaces that could not be opened, so far.
    pub refused: AtomicU64,
    /// Namespaces that were detached and have not gone yet.
    pub leaving: AtomicU64,
}
