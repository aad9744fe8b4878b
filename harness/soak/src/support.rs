//! What the host driver of the program's own tests stands on.

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{Shutdown, shutdown};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

#[path = "../../../crates/vnvme/tests/socket/common/host/mod.rs"]
#[allow(dead_code)]
pub mod host;

/// What is waited for this long has failed.
pub const LIMIT: Duration = Duration::from_secs(60);

pub fn memfd(size: u64) -> File {
    let file = File::from(memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(size).unwrap();
    file
}

pub fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

pub fn leave(socket: impl AsFd) {
    let _ = shutdown(socket, Shutdown::Both);
}
