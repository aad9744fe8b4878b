//! Error policies of volumes, and counters of failed requests.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What to do about a request that failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorAction {
    /// The guest is told.
    #[default]
    Report,
    /// It is repeated for 20 seconds, then the guest is told.
    Retry,
    /// It waits, and all that come later do, until the disk is resumed.
    Stop,
    /// As `stop` where no space is left, else as `report`; not for reads.
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
}

/// What becomes of a volume's requests that fail, and what has become of them so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeErrors {
    /// The disk; empty where it is not known.
    pub disk: String,
    /// The namespace.
    pub nsid: u32,
    /// Path or URL, as it was given.
    pub volume: String,
    /// What to do about reads.
    pub on_read_error: ErrorAction,
    /// What to do about everything else.
    pub on_write_error: ErrorAction,
    /// Requests wait until the disk is resumed.
    pub stopped: bool,
    /// So many wait for that.
    pub held: u64,
    /// So many wait to be repeated.
    pub waiting: u64,
    /// Reads that failed, each time that they did.
    pub read_errors: u64,
    /// Other requests.
    pub write_errors: u64,
    /// Of both, for want of space.
    pub no_space: u64,
    /// Failed requests that were begun once more.
    pub repeated: u64,
    /// Times that requests began to wait for the disk to be resumed.
    pub stops: u64,
    /// The last failure, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// When it was: milliseconds since 1970.
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

/// What to change about it: what is absent stays as it is. A change names a disk or a volume, or
/// says `all`; a request that changes nothing tells what there is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ErrorChange {
    /// The disk, by its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// The namespace of the disk; of all if it is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nsid: Option<u32>,
    /// The volume: its path or URL as it was given, all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// All there are.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
    /// What to do about reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_read_error: Option<ErrorAction>,
    /// What to do about everything else.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_write_error: Option<ErrorAction>,
    /// Requests that wait are begun again.
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
            return Err("either all volumes are meant, or those that are named".into());
        }
        if self.nsid.is_some() && self.disk.is_none() {
            return Err("a namespace is one of a disk: name that, too".into());
        }
        if self.on_read_error == Some(ErrorAction::EnospcStop) {
            return Err("a read needs no space: on-read-error is report, retry or stop".into());
        }
        if self.is_question() || self.all || self.names_one() {
            return Ok(());
        }
        Err("which volume is to change? Name its disk or itself, or say --all".into())
    }
}
