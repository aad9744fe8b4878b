//! Resource limits.

use rustix::io;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Limits that may never be raised again. The number of processes is excluded: that limit belongs
/// to the user, not to the process, and counts the kernel's threads for io_uring.
const UNCHANGED_LIMITS: [Resource; 2] = [Resource::Nofile, Resource::Memlock];

/// Disables core dumps, which would contain guest memory, and makes the resource limits permanent.
pub(crate) fn lower() -> io::Result<()> {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none)?;
    for resource in UNCHANGED_LIMITS {
        let Rlimit { current, .. } = getrlimit(resource);
        let maximum = current;
        setrlimit(resource, Rlimit { current, maximum })?;
    }
    Ok(())
}
