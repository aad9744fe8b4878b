//! How namespaces reach a device below.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How commands of a namespace reach a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PathChoice {
    /// Translated and passed on, queue to queue.
    Direct,
    /// Through the volume.
    Generic,
}

impl PathChoice {
    /// Returns the name in requests and answers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Generic => "generic",
        }
    }
}

/// What to change, and where. A request that changes nothing tells what there is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PathChange {
    /// The disk, by its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// The namespace of the disk; all of them if it is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nsid: Option<u32>,
    /// The path that commands take from now on; those in flight end on their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathChoice>,
    /// A change is meant for all namespaces of all disks.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
}

impl PathChange {
    /// Checks that a change selects its disks explicitly, so that it reaches no more guests than
    /// intended.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn check(&self) -> Result<(), String> {
        if self.all && self.disk.is_some() {
            return Err("either all disks are meant, or one that is named".into());
        }
        if self.nsid.is_some() && self.disk.is_none() {
            return Err("a namespace is one of a disk: name that, too".into());
        }
        if self.path.is_some() && !self.all && self.disk.is_none() {
            return Err("whose path is to change? Name the disk, or say --all".into());
        }
        Ok(())
    }
}

/// The path of a namespace that has a direct one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PathState {
    /// The disk.
    pub disk: String,
    /// The namespace.
    pub nsid: u32,
    /// The path of commands that come now.
    pub path: PathChoice,
}
