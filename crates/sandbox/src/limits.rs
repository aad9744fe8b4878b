//! Resource limits.

use rustix::io;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Those that are never to grow again. How many processes a user may have is not among them: the
/// limit is of the user, not of the process, and counts the kernel's threads for io_uring.
const KEPT: [Resource; 2] = [Resource::Nofile, Resource::Memlock];

/// No core dumps, which would hold guests' memory; limits stay as they are.
pub(crate) fn lower() -> io::Result<()> {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none)?;
    for resource in KEPT {
        let Rlimit { current, .. } = getrlimit(resource);
        let maximum = current;
        setrlimit(resource, Rlimit { current, maximum })?;
    }
    Ok(())
}
