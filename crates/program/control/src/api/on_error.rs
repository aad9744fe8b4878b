//! Error policies of volumes, and counters of failed requests.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Action on a failed request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorAction {
    /// Report the error to the guest.
    #[default]
    Report,
    /// Retry for 20 seconds, then report the error.
    Retry,
    /// Hold the request and all later ones until the disk is resumed.
    Stop,
    /// `stop` when space runs out, otherwise `report`; not for reads.
    EnospcStop,
}

impl ErrorAction {
    /// Returns the name in requests and answers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Report => "report",
            Self::Retry => "retry",
            Self::Stop => "stop",
            Self::EnospcStop => "enospc-stop",
        }
    }

    /// Returns whether the action can be chosen for failed reads.
    pub const fn is_for_reads(self) -> bool {
        match self {
            Self::Report | Self::Retry | Self::Stop => true,
            Self::EnospcStop => false,
        }
    }
}

/// Error policy of a volume, with counters of its failed requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeErrors {
    /// Name of the disk; empty if unknown.
    pub disk: String,
    /// Namespace ID.
    pub nsid: u32,
    /// Path or URL, as it was given.
    pub volume: String,
    /// Action on failed reads.
    pub on_read_error: ErrorAction,
    /// Action on other failed requests.
    pub on_write_error: ErrorAction,
    /// Whether the disk is stopped: requests wait until it is resumed.
    pub stopped: bool,
    /// Requests that wait for the disk to be resumed.
    pub held: u64,
    /// Requests that wait to be retried.
    pub waiting: u64,
    /// Failed reads; each attempt counts.
    pub read_errors: u64,
    /// Other failed requests; each attempt counts.
    pub write_errors: u64,
    /// Failed requests of both kinds for lack of space.
    pub no_space: u64,
    /// Retries of failed requests.
    pub repeated: u64,
    /// Number of times that the disk was stopped.
    pub stops: u64,
    /// Last failure, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Time of the last failure, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error_ms: Option<u64>,
}

impl VolumeErrors {
    /// Returns whether no request has failed, and the policy is to report every error.
    pub fn is_plain(&self) -> bool {
        let policy = [self.on_read_error, self.on_write_error];
        policy == [ErrorAction::Report; 2] && self.read_errors + self.write_errors == 0
    }
}

/// Change of an error policy. Absent fields stay unchanged. A change names a disk, a volume or
/// `all`; a request without new values is a query.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ErrorChange {
    /// Name of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Namespace of the disk; absent for all its namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nsid: Option<u32>,
    /// Path or URL of the volume, exactly as it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// Change all volumes.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
    /// Action on failed reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_read_error: Option<ErrorAction>,
    /// Action on other failed requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_write_error: Option<ErrorAction>,
    /// Resume the disk: repeat waiting requests.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub resume: bool,
}

impl ErrorChange {
    /// Returns whether the change names a disk or a volume.
    pub fn names_one(&self) -> bool {
        self.disk.is_some() || self.volume.is_some()
    }

    /// Returns whether the request changes nothing.
    pub fn is_question(&self) -> bool {
        self.on_read_error.is_none() && self.on_write_error.is_none() && !self.resume
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
        if let Some(action) = self.on_read_error
            && !action.is_for_reads()
        {
            let action = action.name();
            return Err(format!(
                "{action} is for writes only: on-read-error is report, retry or stop"
            ));
        }
        if self.is_question() || self.all || self.names_one() {
            return Ok(());
        }
        Err("no volume is selected: name a disk or volume, or give --all".into())
    }
}
