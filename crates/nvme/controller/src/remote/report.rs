//! Reports and progress of a remote engine, for the control half.

use crate::engine::Event;
use std::sync::atomic::{AtomicU8, AtomicU64};

/// Message of a remote engine to the control half of its controller.
pub(crate) struct EngineReport {
    /// Number of the last reset ([`Order::Stop`](crate::engine::Order)) that the engine had begun
    /// at the time of the event. The control half ignores events from before the latest reset.
    pub epoch: u64,
    pub event: Event,
}

/// State of a remote engine that has not been opened yet, and perhaps never will be.
pub(crate) const OPENING: u8 = 0;
/// State of a remote engine that is ready to receive queues.
pub(crate) const OPEN: u8 = 1;
/// State of a remote engine that could not be opened on its worker.
pub(crate) const CLOSED: u8 = 2;

/// Progress of a remote engine: written only by the engine, read by the control half.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Progress {
    /// State of the remote engine: [`OPENING`], [`OPEN`] or [`CLOSED`].
    pub state: AtomicU8,
    /// Number of orders of the control half that the engine has applied so far.
    pub handled: AtomicU64,
    /// Number of orders applied at the last moment when no outstanding command could access memory
    /// that those orders had removed.
    pub quiesced: AtomicU64,
    /// Number of the last controller reset whose outstanding commands have all ended in this
    /// engine.
    pub stopped: AtomicU64,
    /// Number of namespaces that the engine could not open so far.
    pub refused: AtomicU64,
    /// Number of detached namespaces that the engine has not closed yet.
    pub leaving: AtomicU64,
}
