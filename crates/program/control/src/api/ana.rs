//! Asymmetric Namespace Access (ANA): the states in which the disks of a subsystem offer shared
//! namespaces.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// ANA state: how a disk's host reaches a group of namespaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AnaState {
    /// Hosts prefer this disk.
    #[default]
    Optimized,
    /// Hosts use this disk when none is optimized.
    NonOptimized,
    /// The group is unusable through this disk for now.
    Inaccessible,
    /// The group is unusable through this disk for ever.
    PersistentLoss,
    /// The state is changing: hosts repeat their commands, and give up a disk that stays in this
    /// state.
    Change,
}

impl AnaState {
    /// Returns the name in requests and answers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Optimized => "optimized",
            Self::NonOptimized => "non-optimized",
            Self::Inaccessible => "inaccessible",
            Self::PersistentLoss => "persistent-loss",
            Self::Change => "change",
        }
    }
}

/// Change of a disk's ANA states. A request without a new state is a query.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AnaChange {
    /// Name of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// ANA group (ANAGRPID); absent for all groups of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// New state. The answer follows when no outstanding command remains that the new state
    /// refuses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<AnaState>,
}

impl AnaChange {
    /// Checks that a change names a disk, so that no guest loses all of its paths by one request.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn check(&self) -> Result<(), String> {
        if self.disk.is_some() {
            return Ok(());
        }
        match (self.state, self.group) {
            (Some(_), _) => Err("no disk is selected: name the disk whose state to change".into()),
            (None, Some(_)) => Err("an ANA group needs the name of its disk".into()),
            (None, None) => Ok(()),
        }
    }
}

/// State of an ANA group as seen through a disk of a subsystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AnaStatus {
    /// Name of the disk.
    pub disk: String,
    /// Name of the disk's subsystem.
    pub subsystem: String,
    /// Controller ID of the disk in the subsystem.
    pub cntlid: u16,
    /// ANA group (ANAGRPID).
    pub group: u32,
    /// State of the group.
    pub state: AnaState,
    /// Namespaces of the group.
    pub nsids: Vec<u32>,
}
