//! Threads that a worker starts, and that are none of its processor's.

use rustix::thread::{sched_getaffinity, sched_setaffinity};

/// Lets the calling thread run on every CPU that the process's first thread may use. It would
/// otherwise share the CPU of the worker that started it. Failure is harmless.
pub fn leave_cpu() {
    if let Ok(cpus) = sched_getaffinity(Some(rustix::process::getpid())) {
        let _ = sched_setaffinity(None, &cpus);
    }
}
