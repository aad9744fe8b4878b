//! What the host driver of the program's own tests stands on.

use std::time::Duration;

#[path = "../../../crates/vnvme/tests/socket/common/host/mod.rs"]
#[allow(dead_code)]
pub mod host;

/// What is waited for this long has failed.
pub const LIMIT: Duration = Duration::from_secs(60);
