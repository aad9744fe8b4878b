//! Creation of a ring in the best mode that the kernel supports.

use crate::VolumeError;
use io_uring::{Builder, IoUring};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// Mode of an io_uring: how the kernel takes entries and delivers completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Completion work is deferred until the worker asks for it, and only one task submits. Needs
    /// Linux 6.1.
    Deferred,
    /// Completions do not interrupt the worker's thread. This mode needs Linux 5.19.
    Cooperative,
    /// The kernel's default mode.
    Plain,
    /// A kernel thread takes submitted entries, without a system call.
    Polled,
}

/// Idle time in milliseconds after which the kernel's submission thread sleeps.
const SQPOLL_IDLE: u32 = 2;

const STEPS: [(Mode, &str); 3] = [
    (Mode::Deferred, "deferred task work"),
    (
        Mode::Cooperative,
        "cooperative task work (deferred task work needs Linux 6.1)",
    ),
    (Mode::Plain, "no task work control (needs Linux 5.19)"),
];

/// Creates a ring for `entries` requests, and returns its mode. `polled`: whether a kernel thread
/// takes the submitted entries.
pub(super) fn ring(entries: u32, polled: bool) -> Result<(IoUring, Mode), VolumeError> {
    if polled {
        let ring = build(Mode::Polled, entries).map_err(|source| {
            let why = "the kernel gives no thread that polls the ring (--sqpoll; Linux 5.13, or 5.11 with CAP_SYS_NICE)";
            VolumeError::NoIoUring { why, source }
        })?;
        return Ok((ring, Mode::Polled));
    }
    let mut refused = None;
    for (mode, name) in STEPS {
        match build(mode, entries) {
            Ok(ring) => {
                if mode != Mode::Deferred {
                    note(name);
                }
                return Ok((ring, mode));
            }
            // The only error that means an unknown flag.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refused = Some(error),
            Err(error) => return Err(explain(error)),
        }
    }
    Err(explain(refused.unwrap_or_else(|| {
        io::Error::from_raw_os_error(libc::EINVAL)
    })))
}

/// Creates a ring in a given mode, if the kernel supports it. From Linux 6.6 on, the ring has no
/// index array, and entries are taken in order.
pub(super) fn build(mode: Mode, entries: u32) -> io::Result<IoUring> {
    // Twice as many completions as submissions fit (the kernel's default), so cancellations cannot
    // crowd them out.
    match builder(mode).setup_no_sqarray().build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => builder(mode).build(entries),
        result => result,
    }
}

fn builder(mode: Mode) -> Builder {
    let mut builder = IoUring::builder();
    builder.dontfork();
    match mode {
        Mode::Deferred => {
            builder
                .setup_single_issuer()
                .setup_defer_taskrun()
                .setup_taskrun_flag()
                .setup_submit_all();
        }
        Mode::Cooperative => {
            builder
                .setup_coop_taskrun()
                .setup_taskrun_flag()
                .setup_submit_all();
        }
        Mode::Plain => {}
        Mode::Polled => {
            builder.setup_sqpoll(SQPOLL_IDLE).setup_submit_all();
        }
    }
    builder
}

/// Logs a missing feature of the kernel once per process, because every worker detects it.
fn note(name: &str) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        tracing::info!("io_uring: older kernel, using {name}");
    }
}

fn explain(source: io::Error) -> VolumeError {
    let why = match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "this process may not use it; allow it with: sysctl kernel.io_uring_disabled=0 \
             (in a container, also let its seccomp profile pass io_uring_setup)"
        }
        Some(libc::ENOSYS) => {
            "this kernel was built without it, or a seccomp profile hides it \
             (containers: allow io_uring_setup, io_uring_enter and io_uring_register)"
        }
        Some(libc::ENOMEM) => {
            "the limit of locked memory is too low; raise it with: ulimit -l unlimited"
        }
        Some(libc::EMFILE | libc::ENFILE) => {
            "too many open files; raise the limit with: ulimit -n 65536"
        }
        Some(libc::EINVAL) => "the kernel is too old; Linux 5.15 or later is needed",
        _ => "the system refused to create a ring",
    };
    VolumeError::NoIoUring { why, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fallback_step_builds_ring() {
        for (mode, _) in STEPS {
            match build(mode, 8) {
                Ok(_) => {}
                Err(error) => testkit::skip(&format!("volume::io::setup: {mode:?}"), error),
            }
        }
        assert!(ring(8, false).is_ok());
    }

    #[test]
    fn forbidden_io_uring_error_names_remedy() {
        let text = explain(io::Error::from_raw_os_error(libc::EPERM)).to_string();
        assert!(text.contains("io_uring_disabled"), "{text}");
        let text = explain(io::Error::from_raw_os_error(libc::ENOSYS)).to_string();
        assert!(text.contains("seccomp"), "{text}");
    }
}
