//! Counters of the served disks. The kind of a disk defines how they are shown.

use crate::registry::Registry;
use crate::registry::snapshot::SnapshotBuilder;
use control::api::{DiskKind, SocketCounters, Stats};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use worker::AcceptStats;

/// Counters of a front-end, in the forms in which they are read.
pub trait Counters: Send + Sync {
    /// Returns the kind of front-end, by which disks are listed.
    fn kind(&self) -> DiskKind;
    /// Returns whether another process may write the disk's volume ([`DiskState::Incoming`]).
    ///
    /// [`DiskState::Incoming`]: control::api::DiskState::Incoming
    fn is_incoming(&self) -> bool {
        false
    }
    /// Returns the metrics of the disk with this address.
    fn metrics(
        &self,
        address: &Path,
        registry: &Registry,
        numbers: &mut SnapshotBuilder<'_>,
    ) -> metrics::Disk;
    /// Adds the counters to those that the management API shows.
    fn add_to(&self, stats: &mut Stats, address: &Path, registry: &Registry);
}

/// Address and counters of a disk.
pub type CountedDisk = (PathBuf, Arc<dyn Counters>);

/// Returns the counters of a listening socket in the form of the management API.
pub fn socket_counters(stats: &AcceptStats) -> SocketCounters {
    SocketCounters {
        accepted: stats.accepted(),
        delayed: stats.delayed(),
        failed: stats.failed(),
    }
}
