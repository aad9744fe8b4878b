//! The names of crate `ublk` that this program uses, where it is left out.

use super::{absent_frontend, missing};
use dma::Memory;
use probes::{Counter, IoRecord};
use std::any::Any;
use std::sync::Arc;
use volume::Volume;
use worker::Context;

/// Error of every attempt to create a block device, because this build has no ublk.
#[derive(Debug)]
pub struct UblkError;

impl std::fmt::Display for UblkError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&missing("ublk", "ublk"))
    }
}

impl std::error::Error for UblkError {}

/// Queue of a block device, of which no value can exist in this build.
pub enum Queue {}

absent_frontend!(Queue, UblkError);

/// Queue of a block device before it is served, of which no value can exist in this build.
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

/// Error of opening a queue, of which no value can exist in this build.
#[derive(Debug)]
pub enum QueueSetupFailed {}

/// Options of a block device, which this build ignores.
#[expect(dead_code, reason = "it is said, and not looked at")]
pub struct DiskOptions {
    pub id: Option<u32>,
    pub queues: u16,
    pub depth: u16,
    pub block_size: Option<u32>,
    pub recover: bool,
}

/// Block device before it is served, of which no value can exist in this build.
pub enum NewDisk {}

impl NewDisk {
    /// Fails, because this build has no ublk.
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

/// Served block device, of which no value can exist in this build.
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

/// Fails, because this build has no ublk.
pub fn remove(_: u32) -> Result<(), UblkError> {
    Err(UblkError)
}

/// Counters of a queue of a block device.
pub struct QueueStats {
    pub requests: Counter,
    pub io: IoRecord,
    pub sleeps: Counter,
}

/// Counters of a block device.
pub struct DiskStats {
    pub id: u32,
    pub queues: Vec<QueueStats>,
}
