//! CPU affinity of threads that a worker starts.

use rustix::thread::{sched_getaffinity, sched_setaffinity};

/// Resets the calling thread's CPU affinity to that of the process's first thread. A thread started
/// by a pinned worker would otherwise share the worker's CPU. Failure is harmless.
pub fn leave_cpu() {
    if let Ok(cpus) = sched_getaffinity(Some(rustix::process::getpid())) {
        let _ = sched_setaffinity(None, &cpus);
    }
}
