//! Descriptors that a host passes to the server, and how it disconnects.

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{Shutdown, shutdown};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

/// A memory file.
pub fn memfd(size: u64) -> File {
    let file = File::from(memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(size).unwrap();
    file
}

pub fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// Ends a connection. Closing the socket is not enough where other tests start processes: between
/// its fork and its exec such a process holds a copy.
pub fn leave(socket: impl AsFd) {
    let _ = shutdown(socket, Shutdown::Both);
}
