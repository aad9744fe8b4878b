//! Support for the shared host driver of the program's tests.

use std::time::Duration;

#[path = "../../../crates/program/vnvme/tests/socket/common/host/mod.rs"]
#[allow(dead_code)]
pub mod host;

/// Time limit of every wait.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
