//! Result of applying a configuration.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Changes that were made to apply a configuration, or would be made. Each list has names of disks,
/// sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    /// Whether the changes were only planned.
    pub dry_run: bool,
    /// Added disks.
    pub added: Vec<String>,
    /// Removed disks.
    pub removed: Vec<String>,
    /// Disks changed in place.
    pub changed: Vec<String>,
    /// Unchanged disks.
    pub unchanged: Vec<String>,
    /// Impossible changes. If there are any, nothing was changed.
    pub refused: Vec<Refusal>,
}

impl Plan {
    /// Returns whether the plan changes nothing and refuses nothing.
    pub fn is_empty(&self) -> bool {
        self.added.is_empty()
            && self.removed.is_empty()
            && self.changed.is_empty()
            && self.refused.is_empty()
    }
}

/// An impossible change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Refusal {
    /// Name of the disk; `[process]` for options of the process.
    pub disk: String,
    /// Reason, as text.
    pub reason: String,
}
