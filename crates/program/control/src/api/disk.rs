//! Disks and their namespaces.

use super::{AnaState, PathChoice};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Kind of a disk, by its front-end.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum DiskKind {
    /// NVMe controller over vfio-user: a table `[[controller]]`.
    Controller,
    /// virtio block device over vhost-user: a table `[[vhost-user-blk]]`.
    VhostUserBlk,
    /// Subsystem for other hosts over NVMe/TCP: a table `[[nvme-tcp]]`.
    NvmeTcp,
    /// Block device of the host, by the ublk driver: a table `[[ublk]]`.
    Ublk,
}

impl DiskKind {
    /// Returns the name, which is that of the disk's tables in a configuration file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::VhostUserBlk => "vhost-user-blk",
            Self::NvmeTcp => "nvme-tcp",
            Self::Ublk => "ublk",
        }
    }

    /// Returns a short description of the kind.
    pub const fn description(self) -> &'static str {
        match self {
            Self::Controller => "NVMe controller over vfio-user",
            Self::VhostUserBlk => "virtio block device over vhost-user",
            Self::NvmeTcp => "NVMe/TCP subsystem for other hosts",
            Self::Ublk => "Block device of this host",
        }
    }
}

impl std::fmt::Display for DiskKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// State of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DiskState {
    /// The disk is served, and no client is connected.
    #[default]
    Free,
    /// The disk is served, and a client is connected.
    Attached,
    /// The disk is served, but another process may write its volume: the disk waits for a guest
    /// that migrates to it, or its guest has migrated away.
    Incoming,
    /// The disk is not served; `error` has the reason.
    Unavailable,
}

impl DiskState {
    /// Returns the name, which is that in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Attached => "attached",
            Self::Incoming => "incoming",
            Self::Unavailable => "unavailable",
        }
    }
}

/// Process that is connected to a disk's socket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskClient {
    /// Process ID at the time of its connect.
    pub pid: i32,
    /// User ID at the time of its connect.
    pub uid: u32,
    /// Name of the program. The command line looks it up in `/proc`, which the serving process
    /// cannot read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

/// A disk with its namespaces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Disk {
    /// Name of the disk, unique in the process.
    pub name: String,
    /// Kind of the disk.
    pub kind: DiskKind,
    /// Unix socket of the disk; absent for a ublk disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<String>,
    /// Device node of a ublk disk, `/dev/ublkbN`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Whether a client is connected. The client of a ublk disk is the kernel, always.
    pub attached: bool,
    /// The keeper is slow: the client is served, and its state is kept as soon as the keeper runs.
    /// If both processes die before that, the client loses the disk.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub not_yet_kept: bool,
    /// The keeper and its stand-bys have ended: the client loses the disk when the serving process
    /// ends.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub not_kept: bool,
    /// State of the disk.
    #[serde(default)]
    pub state: DiskState,
    /// Process ID of the client, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_pid: Option<i32>,
    /// Client of the disk's Unix socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<DiskClient>,
    /// Serial number that the guest sees, once the disk has been opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Reason why the disk is unavailable: a volume or a file beside it cannot be opened. The
    /// process retries for as long as it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Namespaces, sorted by ID. A vhost-user-blk or ublk disk has one, with ID 1.
    pub namespaces: Vec<Namespace>,
}

/// A volume as a client sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Namespace {
    /// Namespace ID.
    pub nsid: u32,
    /// Path or URL of the volume, as it was given.
    pub volume: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Size of a logical block in bytes.
    pub block_size: u32,
    /// NGUID of the namespace, 32 hexadecimal digits; absent for disks without namespaces and
    /// where the disk has not been opened yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nguid: Option<String>,
    /// Whether the volume encrypts its data before it reaches the storage.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypted: bool,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Path of new commands, if the namespace has a direct one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathChoice>,
    /// Size in bytes of the units within which writes are atomic, if larger than a block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub atomic_unit: Option<u32>,
    /// ANA group, if other disks share the namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ana_group: Option<u32>,
    /// State of the ANA group as seen through this disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ana_state: Option<AnaState>,
    /// State of a namespace that the guest created in the disk's pool; absent for a configured
    /// namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_guest: Option<OfGuest>,
    /// Failing requests of the volume; absent while there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<Trouble>,
}

/// Failing requests of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Trouble {
    /// Effect on the guest.
    pub state: TroubleState,
    /// Number of waiting requests; of failed ones if they do not wait.
    pub requests: u64,
    /// Last error.
    pub error: String,
}

/// Effect of failing requests on the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum TroubleState {
    /// All requests wait until the disk is resumed.
    Stopped,
    /// Failed requests are repeated.
    Retrying,
    /// The guest has got errors within the last minute.
    Failing,
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            requests, error, ..
        } = self;
        match self.state {
            TroubleState::Stopped => {
                write!(
                    f,
                    "STOPPED: {requests} requests wait for vnvme resume: {error}"
                )
            }
            TroubleState::Retrying => write!(f, "{requests} requests are repeated: {error}"),
            TroubleState::Failing => {
                write!(f, "the guest gets errors, {requests} so far: {error}")
            }
        }
    }
}

/// State of a namespace that the guest created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OfGuest {
    /// Not attached to the guest's controller.
    Allocated,
    /// Attached to the guest's controller.
    Attached,
}

/// New size of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Resize {
    /// Size in bytes.
    pub bytes: u64,
}

/// A disk to add.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewDisk {
    /// Kind of the disk.
    pub kind: DiskKind,
    /// Table of the disk, with the keys of the configuration file.
    #[schema(value_type = Object)]
    pub table: serde_json::Map<String, serde_json::Value>,
}
