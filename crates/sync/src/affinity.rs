//! Threads that a worker starts, and that are none of its processor's.

use rustix::thread::{sched_getaffinity, sched_setaffinity};

/// Has the calling thread run on every CPU that the process's first thread may use: it would
/// otherwise share the CPU that the worker was bound to which started it. Nothing depends on it.
pub fn leave_cpu() {
    if let Ok(cpus) = sched_getaffinity(Some(rustix::process::getpid())) {
        let _ = sched_setaffinity(None, &cpus);
    }
}
