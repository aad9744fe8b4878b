//! Limits and weights of volumes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Limits of a volume per second; 0 for no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeLimits {
    /// Name of the disk; empty if unknown.
    #[serde(default)]
    pub disk: String,
    /// Namespace ID.
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
    /// Burst after a pause, in microseconds of work at the limits' rates.
    pub burst_us: u64,
    /// Requests delayed by the limits so far.
    pub delayed: u64,
    /// Sum of the delays in microseconds, without requests that still wait.
    #[serde(default)]
    pub throttled_us: u64,
    /// Weight among the slices of the device, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Outstanding requests of the weighted slices in the device while several compete: measured
    /// depth, and maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_depth: Option<(usize, usize)>,
}

/// Change of limits. Absent fields stay unchanged. A change names a disk, a volume or `all`; a
/// request without new values is a query.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LimitChange {
    /// Name of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Namespace of the disk; absent for all its namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nsid: Option<u32>,
    /// Path or URL of the volume, exactly as it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// Change all volumes that can be changed this way.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
    /// Requests per second; 0 for no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Reads per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<u64>,
    /// Writes per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<u64>,
    /// Bytes per second; 0 for no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps: Option<u64>,
    /// Bytes read per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_bps: Option<u64>,
    /// Bytes written per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_bps: Option<u64>,
    /// Burst after a pause, in microseconds of work at the limits' rates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_us: Option<u64>,
    /// Share of the device among its slices with a weight, 1 to 10000.
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
            return Err("select either all volumes or named ones, not both".into());
        }
        if self.nsid.is_some() && self.disk.is_none() {
            return Err("a namespace ID needs the name of its disk".into());
        }
        if self.is_question() || self.all || self.names_one() {
            return Ok(());
        }
        Err("no volume is selected: name a disk or volume, or give --all".into())
    }
}
