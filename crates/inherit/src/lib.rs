//! Descriptors that a service manager passed to this process (sd_listen_fds(3)).
//!
//! A process that is started with open descriptors knows only their numbers, so taking ownership
//! means trusting the environment. [`take`] does that once, before the process opens anything
//! itself.
//!
//! *Scope.* The type of the descriptors is not checked. `unsafe` is confined to [`take`].
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

/// Number of the first passed descriptor (SD_LISTEN_FDS_START, systemd/sd-daemon.h).
const FIRST: RawFd = 3;
/// Maximum number of descriptors that is accepted, above systemd's limit for a service.
const MOST: RawFd = 1 << 16;

/// The descriptors were already taken.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// Takes ownership of the descriptors that the service manager passed; returns none without a
/// service manager, and none on later calls. They are closed in child processes.
///
/// Must be called before this process opens anything that it keeps: every open descriptor with a
/// number that the environment names is assumed to be the manager's.
pub fn take() -> Vec<OwnedFd> {
    take_named().into_iter().map(|(_, fd)| fd).collect()
}

/// Takes the descriptors as [`take`] does, and returns them with the service manager's names for
/// them (sd_listen_fds_with_names(3)); the names are empty if it gives none.
pub fn take_named() -> Vec<(String, OwnedFd)> {
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let variable = |name| var(name).unwrap_or_default();
    let count = count(&variable("LISTEN_FDS"), &variable("LISTEN_PID"));
    // A number that is not open belongs to nobody.
    let open = |fd: &RawFd| std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok();
    let all: Vec<RawFd> = (FIRST..FIRST + count).filter(open).collect();
    let names = variable("LISTEN_FDNAMES");
    let names: Vec<&str> = names.split(':').collect();
    let own = |fd: RawFd| {
        // SAFETY: the service manager has opened it for this process, which has opened nothing yet;
        // nobody else takes it: `TAKEN`.
        #[allow(unsafe_code)]
        let descriptor = unsafe { OwnedFd::from_raw_fd(fd) };
        // The descriptor was passed without this flag.
        let _ = fcntl_setfd(&descriptor, FdFlags::CLOEXEC);
        let index = usize::try_from(fd - FIRST).unwrap_or(usize::MAX);
        let name = names.get(index).copied().unwrap_or_default();
        (name.to_owned(), descriptor)
    };
    all.into_iter().map(own).collect()
}

/// Returns the number of descriptors, or 0 if they are meant for another process.
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
