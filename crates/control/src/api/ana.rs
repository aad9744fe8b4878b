//! Asymmetric Namespace Access: by which disk of a subsystem its host reaches which namespaces.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How a disk's host reaches a group of namespaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AnaState {
    /// By this disk before others.
    #[default]
    Optimized,
    /// By this disk, if by no other that is optimized.
    NonOptimized,
    /// Not by this disk, for now.
    Inaccessible,
    /// Never again by this disk.
    PersistentLoss,
    /// It is changing: commands are to be repeated. Hosts give up a disk that stays so.
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

/// What to change, and where. A request that changes nothing tells what there is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AnaChange {
    /// The disk, by its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// The group of its namespaces; all of them if it is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// How they are reached from now on. The answer comes when no command is in flight any more
    /// that the new state would have refused.
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
            (Some(_), _) => Err("which disk's state is to change? Name it".into()),
            (None, Some(_)) => Err("a group is one of a disk: name that, too".into()),
            (None, None) => Ok(()),
        }
    }
}

/// How a disk of a subsystem reaches a group of its namespaces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AnaStatus {
    /// The disk.
    pub disk: String,
    /// The subsystem that it is in.
    pub subsystem: String,
    /// Its controller ID there.
    pub cntlid: u16,
    /// The group (ANAGRPID).
    pub group: u32,
    /// How the disk's host reaches it.
    pub state: AnaState,
    /// The namespaces in it.
    pub nsids: Vec<u32>,
}
