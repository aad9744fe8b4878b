//! Opens the target of a benchmark by its URL or path.

use super::in_use;
use crate::bind::Host;
use anyhow::Result;
use load::device::DeviceTarget;
use load::job::Job;
use load::lane::Target;
use load::stats::Measured;
use load::uring::UringTarget;
use std::path::Path;

/// Operation that can run on a benchmark target of any type.
pub trait Visitor {
    /// Runs the operation on the target.
    fn visit<T: Target>(self, target: &T) -> Result<Measured>;
}

/// Opens the target with this URL or path, and runs the visitor on it.
pub fn with_target<V: Visitor>(text: &str, job: &Job, visitor: V) -> Result<Measured> {
    if text.contains("://") && !Path::new(text).exists() {
        visitor.visit(&DeviceTarget::open(text, job)?)
    } else {
        let path = Path::new(text);
        // The claim is kept until the load has ended. For a URL, the volume or driver makes a claim
        // of its own.
        let _claim = if job.rw.writes() {
            in_use::claim(&Host::system(), path)?
        } else {
            None
        };
        visitor.visit(&UringTarget::open(path, job.rw.writes())?)
    }
}
