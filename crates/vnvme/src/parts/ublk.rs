//! The names of crate `ublk` that this program uses, where it is left out.

use super::{absent_frontend, missing};
use dma::Memory;
use probes::{Counter, IoRecord};
use std::any::Any;
use std::sync::Arc;
use volume::Volume;
use worker::Context;

/// Why there is no block device.
#[derive(Debug)]
pub struct UblkError;

impl std::fmt::Display for UblkError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&missing("ublk", "ublk"))
    }
}

impl std::error::Error for UblkError {}

/// A queue.
pub enum Queue {}

absent_frontend!(Queue, UblkError);

/// A queue that is to be served.
pub enum QueueSetup {}

impl QueueSetup {
    pub fn stats(&self) -> Arc<DiskStats> {
        match *self {}
    }

    pub fn number(&self) -> u16 {
        match *self {}
    }

    /// Never called.
    pub fn open(self, _: &Context<'_>) -> Result<Queue, QueueSetupFailed> {
        match self {}
    }
}

/// Why a queue could not be made.
#[derive(Debug)]
pub enum QueueSetupFailed {}

/// How a disk is made.
#[expect(dead_code, reason = "it is said, and not looked at")]
pub struct DiskOptions {
    pub id: Option<u32>,
    pub queues: u16,
    pub depth: u16,
    pub block_size: Option<u32>,
    pub recover: bool,
}

/// A disk that is not served yet.
pub enum NewDisk {}

impl NewDisk {
    /// Refuses.
    pub fn new(_: Arc<dyn Volume>, _: DiskOptions) -> Result<Self, UblkError> {
        Err(UblkError)
    }

    /// Never called.
    pub fn start(
        self,
        _: &mut dyn FnMut(&Memory) -> Box<dyn Any + Send>,
        _: &mut dyn FnMut(QueueSetup),
    ) -> Result<Disk, UblkError> {
        match self {}
    }
}

/// A disk.
pub enum Disk {}

impl Disk {
    pub fn id(&self) -> u32 {
        match *self {}
    }

    pub fn stats(&self) -> Arc<DiskStats> {
        match *self {}
    }

    pub fn is_alive(&self) -> bool {
        match *self {}
    }

    pub fn resize(&mut self) -> Result<bool, UblkError> {
        match *self {}
    }

    pub fn stop(self) -> Result<(), UblkError> {
        match self {}
    }
}

/// Refuses.
pub fn remove(_: u32) -> Result<(), UblkError> {
    Err(UblkError)
}

/// Counters of a queue.
pub struct QueueStats {
    pub requests: Counter,
    pub io: IoRecord,
    pub sleeps: Counter,
}

/// Counters of a disk.
pub struct DiskStats {
    pub id: u32,
    pub queues: Vec<QueueStats>,
}
