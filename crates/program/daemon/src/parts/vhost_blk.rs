//! The names of crate `vhost-blk` that this program uses, where it is left out.

use super::{absent_frontend, missing};
use dma::Memory;
use probes::{Counter, IoRecord};
use receive::{AcceptedDescriptors, Intake, Receiver};
use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use volume::Volume;
use worker::{AcceptStats, ConnectRate, Context};

/// Error of every attempt to create an export, because this build has no vhost-user-blk.
#[derive(Debug)]
pub struct Error;

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&missing("vhost-user-blk", "vhost-user-blk"))
    }
}

impl std::error::Error for Error {}

/// Type of the same name in the crate.
pub type Attach = Box<dyn Fn(&Memory) -> Option<Box<dyn Any>>>;

/// Properties of the virtio disk as the guest sees it.
#[derive(Default)]
pub struct DiskOptions {
    pub serial: String,
    pub queues: u16,
    pub queue_size: u16,
    pub block_size: Option<u32>,
    pub write_cache: bool,
    pub lock_timeout: std::time::Duration,
}

/// Configuration of a vhost-user-blk export.
pub struct Export {
    pub volume: Arc<dyn Volume>,
    pub disk: DiskOptions,
    pub max_in_flight: usize,
    pub memory: dma::MemoryLimits,
    pub listener: OwnedFd,
    pub connects: ConnectRate,
    pub intake: Option<Intake>,
    pub attach: Option<Box<dyn Fn() -> Attach>>,
    pub resized: Option<Arc<OwnedFd>>,
    pub span: tracing::Span,
}

/// Server of a vhost-user-blk export, of which no value can exist in this build.
pub enum Backend {}

absent_frontend!(Backend, Error);

impl Backend {
    /// Fails, because this build has no vhost-user-blk.
    pub fn new(_: Export, _: &Context<'_>) -> Result<Self, Error> {
        Err(Error)
    }

    pub fn withhold(&mut self) -> bool {
        match *self {}
    }

    pub fn admit_clients(&mut self) {
        match *self {}
    }

    pub fn stats(&self) -> Arc<Stats> {
        match *self {}
    }

    pub fn peer(&self) -> Option<rustix::net::UCred> {
        match *self {}
    }

    pub fn into_sockets(self) -> (OwnedFd, Intake) {
        match self {}
    }
}

/// Returns a connection to the receiver process that accepts no descriptors.
pub fn intake(receiver: &Receiver) -> Intake {
    let wanted = AcceptedDescriptors {
        max_fds: 0,
        streams: false,
    };
    Intake::new(receiver, wanted)
}

/// Counters of a request queue of an export.
pub struct QueueStats {
    pub requests: Counter,
    pub io: IoRecord,
    pub kicks: Counter,
    pub arms: Counter,
    pub notifications: Counter,
}

/// Counters of a vhost-user-blk export.
pub struct Stats {
    pub queues: Vec<QueueStats>,
    pub connections: Counter,
    pub accepts: Arc<AcceptStats>,
    pub resubmitted: Counter,
}

impl Stats {
    pub fn is_connected(&self) -> bool {
        false
    }

    pub fn is_incoming(&self) -> bool {
        false
    }
}
