//! Descriptors that a service manager has opened for this process (sd_listen_fds(3)).
//!
//! A process that is started with open descriptors knows them by number only: to own them is to
//! believe the environment. That is done here, once, before the process opens anything itself.
//!
//! *What it does not do.* It neither asks nor cares what they are. `unsafe` is in [`take`] alone.
//!
//! ```
//! // First of all in `main`.
//! for descriptor in inherit::take() {
//!     println!("{descriptor:?}");
//! }
//! ```
#![deny(unsafe_code)]

use rustix::io::{FdFlags, fcntl_setfd};
use std::env::var;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// The first of them (SD_LISTEN_FDS_START, systemd/sd-daemon.h).
const FIRST: RawFd = 3;
/// More are not believed: systemd keeps so many for a service at most that says how many it wants.
const MOST: RawFd = 1 << 16;

/// They belong to somebody.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// Takes what the service manager has opened for this process: nothing, where it has not, and
/// nothing again. No process that this one starts gets them.
///
/// Called before this process opens anything that it keeps: what has a number that the environment
/// names is taken for the manager's.
pub fn take() -> Vec<OwnedFd> {
    take_named().into_iter().map(|(_, fd)| fd).collect()
}

/// The same, with the names that the service manager has for them (sd_listen_fds_with_names(3));
/// they are empty where it says none.
pub fn take_named() -> Vec<(String, OwnedFd)> {
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let variable = |name| var(name).unwrap_or_default();
    let count = count(&variable("LISTEN_FDS"), &variable("LISTEN_PID"));
    // What is not open is nobody's.
    let open = |fd: &RawFd| std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok();
    let all: Vec<RawFd> = (FIRST..FIRST + count).filter(open).collect();
    let names = variable("LISTEN_FDNAMES");
    let names: Vec<&str> = names.split(':').collect();
    let own = |fd: RawFd| {
        // SAFETY: the service manager has opened it for this process, which has opened nothing yet;
        // nobody else takes it: `TAKEN`.
        #[allow(unsafe_code)]
        let descriptor = unsafe { OwnedFd::from_raw_fd(fd) };
        // It has been open without.
        let _ = fcntl_setfd(&descriptor, FdFlags::CLOEXEC);
        let index = usize::try_from(fd - FIRST).unwrap_or(usize::MAX);
        let name = names.get(index).copied().unwrap_or_default();
        (name.to_owned(), descriptor)
    };
    all.into_iter().map(own).collect()
}

/// How many, if they are meant for this process.
fn count(count: &str, process: &str) -> RawFd {
    let own = std::process::id().to_string();
    match count.parse() {
        Ok(count @ 1..=MOST) if process == own => count,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_believed_that_are_meant_for_this_process() {
        let own = std::process::id().to_string();
        for (number, process, wanted) in [
            ("1", &*own, 1),
            ("65536", &own, 65536),
            ("65537", &own, 0),
            ("0", &own, 0),
            ("-1", &own, 0),
            ("2147483647", &own, 0),
            ("many", &own, 0),
            ("", &own, 0),
            ("1", "1", 0),
            ("1", "", 0),
        ] {
            assert_eq!(count(number, process), wanted, "{number} {process}");
        }
    }
}
