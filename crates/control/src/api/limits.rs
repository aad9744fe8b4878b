//! Limits and weights of volumes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Limits of one volume; per second, 0: none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeLimits {
    /// The disk; empty where it is not known.
    #[serde(default)]
    pub disk: String,
    /// The namespace.
    #[serde(default)]
    pub nsid: u32,
    /// Path or URL, as it was given.
    pub volume: String,
    /// Requests.
    pub iops: u64,
    /// Reads.
    pub read_iops: u64,
    /// Writes.
    pub write_iops: u64,
    /// Bytes.
    pub bps: u64,
    /// Bytes read.
    pub read_bps: u64,
    /// Bytes written.
    pub write_bps: u64,
    /// Microseconds whose work may be done at once after a pause.
    pub burst_us: u64,
    /// Requests that had to wait for the limits so far.
    pub delayed: u64,
    /// Microseconds for which they have waited, added up; those that still wait do not count yet.
    #[serde(default)]
    pub throttled_us: u64,
    /// Weight among the slices of its device; absent where it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Requests of those slices in the device while several want it, as found out, and at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_depth: Option<(usize, usize)>,
}

/// Which limits to change, and how: what is absent stays as it is. A change names a disk or a
/// volume, or says `all`; a request that changes nothing tells what there is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LimitChange {
    /// The disk, by its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// The namespace of the disk; of all if it is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nsid: Option<u32>,
    /// The volume: its path or URL as it was given, all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// All that can be changed that way.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
    /// Requests per second; 0: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Reads per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<u64>,
    /// Writes per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<u64>,
    /// Bytes per second; 0: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps: Option<u64>,
    /// Bytes read per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_bps: Option<u64>,
    /// Bytes written per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_bps: Option<u64>,
    /// After a pause, as much may be done at once as the limits allow in so many microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_us: Option<u64>,
    /// Share of the device, 1 to 10000, among its slices that have a weight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

impl LimitChange {
    /// Returns the selection of the change, without its new values.
    fn target(&self) -> Self {
        Self {
            disk: self.disk.clone(),
            nsid: self.nsid,
            volume: self.volume.clone(),
            all: self.all,
            ..Self::default()
        }
    }

    /// Returns whether the change names a disk or a volume.
    pub fn names_one(&self) -> bool {
        self.disk.is_some() || self.volume.is_some()
    }

    /// Returns whether the request changes nothing.
    pub fn is_question(&self) -> bool {
        *self == self.target()
    }

    /// Returns whether the change concerns limits, not only the weight.
    pub fn wants_limits(&self) -> bool {
        !Self {
            weight: None,
            ..self.clone()
        }
        .is_question()
    }

    /// Checks that a change selects its volumes explicitly, so that it reaches no more guests than
    /// intended.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn check(&self) -> Result<(), String> {
        if self.all && self.names_one() {
            return Err("either all volumes are meant, or those that are named".into());
        }
        if self.nsid.is_some() && self.disk.is_none() {
            return Err("a namespace is one of a disk: name that, too".into());
        }
        if self.is_question() || self.all || self.names_one() {
            return Ok(());
        }
        Err("which volume is to change? Name its disk or itself, or say --all".into())
    }
}
