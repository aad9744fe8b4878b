//! Paths of namespaces to a device below.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Path of a namespace's commands to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PathChoice {
    /// Commands are translated and passed on, queue to queue.
    Direct,
    /// Commands are executed through the volume.
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

/// Change of paths. A request without a new path is a query.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PathChange {
    /// Name of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Namespace of the disk; absent for all its namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nsid: Option<u32>,
    /// Path of new commands; outstanding commands complete on theirs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathChoice>,
    /// Change all namespaces of all disks.
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
            return Err("select either all disks or a named one, not both".into());
        }
        if self.nsid.is_some() && self.disk.is_none() {
            return Err("a namespace ID needs the name of its disk".into());
        }
        if self.path.is_some() && !self.all && self.disk.is_none() {
            return Err("no disk is selected: name one, or give --all".into());
        }
        Ok(())
    }
}

/// Path of a namespace that has a direct one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PathState {
    /// Name of the disk.
    pub disk: String,
    /// Namespace ID.
    pub nsid: u32,
    /// Path of new commands.
    pub path: PathChoice,
}
