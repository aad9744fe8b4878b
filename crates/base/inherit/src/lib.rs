//! Descriptors that a service manager has opened for this process (sd_listen_fds(3)).
//!
//! A process started with open descriptors knows them by number only, from the environment. This
//! crate takes ownership of them once, before the process opens anything itself.
//!
//! *Limits.* Descriptors are not inspected.
//!
//! A program that replaces another one in the same process gets descriptors in the same way, and
//! finds signals blocked ([`replace_program`]).
//!
//! `unsafe` is in [`take_named`], [`replace_program`] and [`unblock_signals`].
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
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

/// Number of the first inherited descriptor (SD_LISTEN_FDS_START, systemd/sd-daemon.h).
const FIRST: RawFd = 3;
/// Maximum number of descriptors; systemd keeps at most as many for a service
/// (FileDescriptorStoreMax=).
const MAX_DESCRIPTORS: RawFd = 1 << 16;

/// Whether the descriptors have been taken.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// Takes the descriptors that the service manager has opened for this process; empty without such
/// descriptors, and at any later call. Child processes do not inherit them.
///
/// Must be called before this process opens any descriptor: a descriptor whose number the
/// environment names is assumed to be the manager's.
pub fn take() -> Vec<OwnedFd> {
    take_named().into_iter().map(|(_, fd)| fd).collect()
}

/// Takes the descriptors with their names from the service manager (sd_listen_fds_with_names(3)); a
/// name is empty if the manager gave none.
pub fn take_named() -> Vec<(String, OwnedFd)> {
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let variable = |name| var(name).unwrap_or_default();
    let count = count(&variable("LISTEN_FDS"), &variable("LISTEN_PID"));
    // Numbers without an open descriptor are ignored.
    let open = |fd: &RawFd| std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok();
    let all: Vec<RawFd> = (FIRST..FIRST + count).filter(open).collect();
    let names = variable("LISTEN_FDNAMES");
    let names: Vec<&str> = names.split(':').collect();
    let own = |fd: RawFd| {
        // SAFETY: the service manager has opened the descriptor for this process, which has opened
        // nothing yet; `TAKEN` ensures that it is taken once.
        #[allow(unsafe_code)]
        let descriptor = unsafe { OwnedFd::from_raw_fd(fd) };
        // The manager passes descriptors without this flag.
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
        Ok(count @ 1..=MAX_DESCRIPTORS) if process == own => count,
        _ => 0,
    }
}

/// Replaces the program of this process (execve(2)). Signals stay blocked until the new program
/// calls [`unblock_signals`]: before it handles them, they would end it. `may_go` is called when
/// they are blocked, and must not allocate: `false` gives up with `ErrorKind::Interrupted`. Returns
/// only if the program is not executed.
pub fn replace_program(
    command: &mut Command,
    may_go: impl Fn() -> bool + Send + Sync + 'static,
) -> io::Error {
    let block = move || match mask(libc::SIG_BLOCK) {
        0 if may_go() => Ok(()),
        0 => Err(io::ErrorKind::Interrupted.into()),
        error => Err(io::Error::from_raw_os_error(error)),
    };
    // SAFETY: the closure makes system calls only. `exec` calls it in this process, without a fork.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(block);
    }
    let error = command.exec();
    unblock_signals();
    error
}

/// Unblocks all signals of this thread, after [`replace_program`] has blocked them.
pub fn unblock_signals() {
    // The only error is an unknown `how`.
    let _ = mask(libc::SIG_UNBLOCK);
}

/// Blocks or unblocks all signals of this thread.
fn mask(how: libc::c_int) -> libc::c_int {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is there, and is initialized by the call.
    #[allow(unsafe_code)]
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
    }
    // SAFETY: the set is initialized, and is read only. The previous mask is not asked for.
    #[allow(unsafe_code)]
    unsafe {
        libc::pthread_sigmask(how, all.as_ptr(), std::ptr::null_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_descriptors_of_own_process_are_inherited() {
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
