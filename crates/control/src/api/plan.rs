//! Result of applying a configuration.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What was done to make what is served be what a configuration says; or what would be done. Each
/// list has names of disks, sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    /// It was only asked what would be done.
    pub dry_run: bool,
    /// New.
    pub added: Vec<String>,
    /// Gone.
    pub removed: Vec<String>,
    /// Changed in place.
    pub changed: Vec<String>,
    /// As they were.
    pub unchanged: Vec<String>,
    /// What cannot be done. Where there is any of it, nothing was done.
    pub refused: Vec<Refusal>,
}

impl Plan {
    /// There is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.added.is_empty()
            && self.removed.is_empty()
            && self.changed.is_empty()
            && self.refused.is_empty()
    }
}

/// What cannot be done to a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Refusal {
    /// The disk; `[process]` for options of the process.
    pub disk: String,
    /// Why, in words.
    pub reason: String,
}
