//! Disks and their namespaces.

use super::{AnaState, PathChoice};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What serves a disk.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum DiskKind {
    /// An NVMe controller, over vfio-user: a table `[[controller]]`.
    Controller,
    /// A virtio block device, over vhost-user: a table `[[vhost-user-blk]]`.
    VhostUserBlk,
    /// A subsystem for other hosts, by NVMe over TCP: a table `[[nvme-tcp]]`.
    NvmeTcp,
    /// A block device of the host, by the ublk driver: a table `[[ublk]]`.
    Ublk,
}

impl DiskKind {
    /// All there are.
    pub const ALL: [Self; 4] = [
        Self::Controller,
        Self::VhostUserBlk,
        Self::NvmeTcp,
        Self::Ublk,
    ];

    /// Returns the name, which is that of the disk's tables in a configuration file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::VhostUserBlk => "vhost-user-blk",
            Self::NvmeTcp => "nvme-tcp",
            Self::Ublk => "ublk",
        }
    }
}

impl std::fmt::Display for DiskKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What one front-end serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Disk {
    /// Its name, which no other disk of the process has.
    pub name: String,
    /// What serves it.
    pub kind: DiskKind,
    /// The Unix socket that its clients connect to; none of a ublk disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<String>,
    /// The node of a ublk disk, `/dev/ublkbN`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// A client is connected. A ublk disk has the kernel as its client, all the time.
    pub attached: bool,
    /// The client's process, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_pid: Option<i32>,
    /// Reason why the disk is unavailable: a volume or a file beside it cannot be opened. It is
    /// tried again for as long as the process runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Its namespaces, by their IDs. Of a disk that is no controller: one, with the ID 1.
    pub namespaces: Vec<Namespace>,
}

/// A volume as a client sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Namespace {
    /// Namespace ID.
    pub nsid: u32,
    /// Path or URL of its volume, as it was given.
    pub volume: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Size of a logical block in bytes.
    pub block_size: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// The path of commands that come now, where it has a direct one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathChoice>,
    /// Writes within a unit of so many bytes are atomic, where that is more than a block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub atomic_unit: Option<u32>,
    /// Its ANA group, where other disks share it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ana_group: Option<u32>,
    /// How this disk's host reaches that group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ana_state: Option<AnaState>,
    /// It is one that the guest has made, in the disk's pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_guest: Option<OfGuest>,
}

/// What a guest does with a namespace that it has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OfGuest {
    /// It has not attached it.
    Allocated,
    /// It is attached to the guest's controller.
    Attached,
}

/// The size that a namespace is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Resize {
    /// In bytes.
    pub bytes: u64,
}

/// A disk that is to be served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewDisk {
    /// What serves it.
    pub kind: DiskKind,
    /// Its table: the keys are those of the configuration file.
    #[schema(value_type = Object)]
    pub table: serde_json::Map<String, serde_json::Value>,
}
