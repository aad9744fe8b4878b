//! State shared by all workers.

use crate::confine::Confinement;
use crate::confine::path_check::PathChecker;
use crate::confine::socket_maker::SocketMaker;
use crate::front::ublk::Disks;
use crate::manage::{DiskFailure, DiskTable};
use crate::open::prepare::UnavailableDisk;
use crate::open::{OpenedVolume, Opener};
use crate::record::Ids;
use crate::registry::Registry;
use crate::registry::sizes::Sizes;
use crate::serve::heap::Heap;
use crate::serve::notify::ServiceLink;
use crate::serve::options::ServeOptions;
use crate::serve::peers::Peers;
use config::spec::NamespaceSpec;
use controller::NamespaceConfig;
use receive::Receiver;
use std::sync::Arc;

/// State that all workers of the process share.
pub struct WorkerContext {
    pub options: ServeOptions,
    pub opener: Opener,
    pub registry: Registry,
    pub sizes: Sizes,
    pub peers: Arc<Peers>,
    /// The process that receives clients' descriptors.
    pub receiver: Receiver,
    /// Maker of sockets for other users, in the sandbox.
    pub socket_maker: SocketMaker,
    /// Starter of checks whether files answer.
    pub path_checker: PathChecker,
    pub confinement: Confinement,
    /// Queues that need a ring may come to any worker, later.
    pub rings: bool,
    /// Number of requests for which each worker's io_uring reserves room, since queues or clients
    /// of disks may come to any worker.
    pub requests: usize,
    /// Table of all disks of the process.
    pub table: Arc<DiskTable>,
    /// ublk block devices of the process.
    pub disks: Disks,
    /// Returns the memory of removed disks to the system.
    pub heap: Heap,
    /// Connection to the service manager.
    pub service: Arc<ServiceLink>,
}

impl WorkerContext {
    /// Adds an unavailable disk to the table of disks.
    pub fn leave_out(&self, unserved: UnavailableDisk) {
        let UnavailableDisk { disk, why, since } = unserved;
        let name = disk.name();
        let failed = DiskFailure {
            why,
            since,
            was_opened: self
                .opener
                .keeper
                .was_served(&disk, &self.options.unavailable),
            _counted: Arc::new(self.registry.unserved.enter(name.clone())),
        };
        let source = self.options.source(&name);
        self.table.enter_failed(disk.completed(), source, failed);
    }
}

/// Returns the configuration of a namespace with these identifiers. Its blocks have the configured
/// or recorded size, or else the volume's, at least 512 bytes.
pub fn namespace_config(
    spec: &NamespaceSpec,
    nsid: u32,
    ids: Ids,
    opened: &OpenedVolume,
) -> NamespaceConfig {
    let Ids { nguid, eui64, uuid } = ids;
    let volume = opened.volume.clone();
    let own = || volume.info().block_size.max(512);
    let config = NamespaceConfig {
        block_size: opened.block_size.unwrap_or_else(own),
        read_only: spec.is_read_only(),
        nguid,
        eui64,
        uuid,
        ..NamespaceConfig::new(nsid, volume)
    };
    opened.files.clone().shape(config)
}
