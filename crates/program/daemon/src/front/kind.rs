//! Kinds of disks, as the rest of the crate uses them: each is opened, listens, and is served on a
//! worker through the traits of this module.
//!
//! `config::disk_kinds!` lists the kinds. A kind without an implementation of [`FrontEnd`] is a
//! compile error here. Only methods about needs that most kinds lack have a default.

use super::Worker;
use super::ublk::OpenDisk;
use crate::keep::KeeperSession;
use crate::open::Opener;
use crate::open::prepare::{ListenContext, Prepared};
use crate::serve::peers::Assignment;
use crate::serve::worker_context::WorkerContext;
use anyhow::{Context, Result};
use config::choices::Spread;
use config::disk::{Disk, DiskSpec};
use sandbox::Needs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// Front-end of one kind of disk.
pub trait FrontEnd: Disk {
    /// Returns whether this build contains the front-end: a cargo feature with the kind's name.
    fn is_built(&self) -> bool {
        true
    }
    /// Returns the maximum number of descriptors of the disk and its clients, without clients'
    /// memory files.
    fn descriptors(&self) -> u64;
    /// Returns the maximum number of workers that can serve the disk at a time.
    fn max_workers(&self, spread: Spread) -> usize;
    /// Returns the use that the disk makes of workers' io_urings.
    fn ring_use(&self, spread: Spread) -> RingUse;
    /// Adds the permissions that the disk needs in the sandbox, beside those for its volumes and
    /// its socket.
    fn add_needs(&self, _needs: &mut Needs, _keeper: &KeeperSession) {}
    /// Reads the disk's own files, for `vnvme check`.
    ///
    /// # Errors
    /// The daemon would refuse the disk.
    fn check_files(&self) -> Result<()> {
        Ok(())
    }
    /// Opens the volumes, and records the disk.
    ///
    /// # Errors
    /// A sentence for the user.
    fn open(&self, opener: &Opener) -> Result<Ready>;
    /// Logs that clients may connect. Not called on a worker's thread that serves other disks,
    /// since the log's reader may be slow.
    fn say_listening(&self, serial: &str);
}

/// Use that a disk makes of the workers' io_urings.
#[derive(Clone, Copy, Debug, Default)]
pub struct RingUse {
    /// Requests that may be outstanding on the ring of the worker that serves the disk.
    pub own: usize,
    /// Requests that may be outstanding on the ring of any worker, since queues or clients of the
    /// disk may come to each.
    pub everywhere: usize,
    /// Whether each worker makes its ring at the start.
    pub is_early: bool,
}

/// Disk with open volumes, which clients cannot reach yet.
pub enum Ready {
    /// Disk that one worker serves, when it has a socket.
    Listener(Box<dyn ReadyDisk>),
    /// Block device of the host, whose queues go to several workers.
    Device(Box<OpenDisk>),
}

/// Disk with open volumes, before its socket is made.
pub trait ReadyDisk: Send {
    /// Makes the socket: a client may connect, and waits until it is served. `workers` is the
    /// number of workers among which the disk gets one.
    ///
    /// # Errors
    /// A sentence for the user.
    fn listen(
        self: Box<Self>,
        context: &ListenContext<'_>,
        workers: usize,
    ) -> Result<Box<dyn ListeningDisk>>;
}

/// Disk with open volumes and an open socket. Contains all that would delay other disks if its
/// worker had to make it.
pub trait ListeningDisk: Send {
    /// Returns the volumes.
    fn volumes(&self) -> &[Prepared];
    /// Returns the eventfd to be written to after a volume was resized.
    fn resized(&self) -> Arc<OwnedFd>;
    /// Returns whether any queue of the disk uses an io_uring.
    fn needs_ring(&self) -> bool;
    /// Serves the disk on this worker.
    ///
    /// # Errors
    /// A text for the user.
    fn serve(
        self: Box<Self>,
        worker: &mut Worker,
        seat: Seat,
        context: &WorkerContext,
    ) -> Result<AddedFrontend>;
}

/// Place of a disk on a worker.
pub struct Seat {
    /// Index of the worker.
    pub worker: usize,
    pub assignment: Assignment,
    /// Number of disks' full shares that the worker's ring is too small for: a disk with many
    /// requests divides their number by this.
    pub crowding: usize,
}

/// Front-end that a worker has begun to serve.
pub struct AddedFrontend {
    /// Number of the front-end on the worker.
    pub owner: u16,
    pub serial: String,
}

impl AddedFrontend {
    /// Names a front-end, which was added to the worker as `owner`, by the address of its disk.
    ///
    /// # Errors
    /// The worker was full.
    pub fn new(
        worker: &Worker,
        owner: Option<u16>,
        address: &Path,
        serial: String,
    ) -> Result<Self> {
        let owner = owner.context("a worker has too many disks")?;
        let name = address.display().to_string();
        worker.handle().set_name(owner, name);
        Ok(Self { owner, serial })
    }
}

macro_rules! front_end {
    ({ $disk:ident } $($(#[$doc:meta])* $kind:ident($spec:ident), $list:ident;)*) => {
        match $disk {
            $(DiskSpec::$kind(spec) => spec,)*
        }
    };
}

/// Returns the front-end of a disk.
pub fn front_end(disk: &DiskSpec) -> &dyn FrontEnd {
    config::disk_kinds!(front_end disk)
}

/// Disk that was opened, with its configuration.
pub struct OpenedDisk {
    pub disk: DiskSpec,
    pub ready: Ready,
}

impl OpenedDisk {
    /// Opens the volumes of a disk, and records it.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn new(disk: &DiskSpec, opener: &Opener) -> Result<Self> {
        let ready = front_end(disk).open(opener)?;
        let disk = disk.clone();
        Ok(Self { disk, ready })
    }
}
