//! Exports of disks over NBD.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Request for an export of a disk over NBD.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct NewExport {
    /// Name of the disk, and of the export.
    pub disk: String,
    /// Namespace ID; 1 if it is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nsid: Option<u32>,
    /// Address at which the export is served: `unix:` and the absolute path of a socket.
    pub nbd: String,
    /// Whether clients may write. The disk gets no other client meanwhile.
    #[serde(default)]
    pub writable: bool,
}

/// Export of a disk over NBD.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub struct Export {
    /// Name of the disk, and of the export.
    pub disk: String,
    /// Namespace ID.
    pub nsid: u32,
    /// Address of the export.
    pub nbd: String,
    /// Whether clients may write.
    pub writable: bool,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether the volume is encrypted. The export is plaintext.
    pub encrypted: bool,
    /// Number of connected clients.
    pub clients: u32,
}
