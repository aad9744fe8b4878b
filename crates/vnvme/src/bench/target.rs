//! Opening of a target by its URL or path.

use super::in_use;
use crate::bind::Host;
use anyhow::Result;
use load::device::DeviceTarget;
use load::job::Job;
use load::lane::Target;
use load::stats::Measured;
use load::uring::UringTarget;
use std::path::Path;

/// Something to do with a target of whatever type.
pub trait Visitor {
    /// Does it.
    fn visit<T: Target>(self, target: &T) -> Result<Measured>;
}

/// Opens the target that `text` names and runs the visitor with it.
pub fn with_target<V: Visitor>(text: &str, job: &Job, visitor: V) -> Result<Measured> {
    if text.contains("://") && !Path::new(text).exists() {
        visitor.visit(&DeviceTarget::open(text, job)?)
    } else {
        let path = Path::new(text);
        // Held until the load has ended. For a URL, the volume or driver that opens it makes its
        // own claim.
        let _claim = if job.rw.writes() {
            in_use::claim(&Host::system(), path)?
        } else {
            None
        };
        visitor.visit(&UringTarget::open(path, job.rw.writes())?)
    }
}
