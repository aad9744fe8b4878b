//! Opens the target of a benchmark by its URL or path.

use super::in_use;
use crate::bind::Host;
use anyhow::{Context, Result, bail};
use daemon::open::devices::DeviceRegistry;
use daemon::open::kinds;
use load::device::DeviceTarget;
use load::job::Job;
use load::lane::Target;
use load::stats::Measured;
use load::uring::UringTarget;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use volume::{OpenError, OpenOptions};

/// Scheme of a vhost-user-blk export's socket.
const EXPORT: &str = "vhost-user-blk";

/// Operation that can run on a benchmark target of any type.
pub trait Visitor {
    /// Runs the operation on the target.
    fn visit<T: Target>(self, target: &T) -> Result<Measured>;
}

/// Opens the target with this URL or path, and runs the visitor on it.
pub fn with_target<V: Visitor>(text: &str, job: &Job, visitor: V) -> Result<Measured> {
    let path = Path::new(text);
    if let Ok(metadata) = fs::metadata(path) {
        if metadata.file_type().is_socket() {
            bail!(
                "{text} is a socket: vfio-user://{text}/1 is namespace 1 of a controller there, \
                 {EXPORT}://{text} a vhost-user-blk export"
            );
        }
        // The claim is kept until the load has ended. For a URL, the volume or driver makes a claim
        // of its own.
        let _claim = if job.rw.writes() {
            in_use::claim(&Host::system(), path)?
        } else {
            None
        };
        return visitor.visit(&UringTarget::open(path, job.rw.writes())?);
    }
    if let Some(socket) = text
        .strip_prefix(EXPORT)
        .and_then(|rest| rest.strip_prefix(':'))
    {
        let Some(socket) = socket
            .strip_prefix("//")
            .filter(|path| path.starts_with('/'))
        else {
            bail!("{text}: an export is named by its socket, {EXPORT}:///PATH");
        };
        return with_export(Path::new(socket), job, visitor);
    }
    if driver::DeviceTarget::is_named_by(text) {
        return visitor.visit(&DeviceTarget::open(text, job)?);
    }
    let options = OpenOptions {
        read_only: !job.rw.writes(),
        ..OpenOptions::default()
    };
    let opened = kinds(DeviceRegistry::default())
        .open(text, options)
        .map_err(|error| match error {
            OpenError::Scheme { scheme, known } => OpenError::Scheme {
                scheme,
                known: format!("{known}, {EXPORT}:///SOCKET"),
            },
            error => error,
        });
    let opened = match opened {
        // Errors of a library do not name the volume.
        Err(error @ OpenError::Other(_)) => return Err(error).context(text.to_owned()),
        opened => opened?,
    };
    // Namespaces of devices below other volumes belong to what the kind has opened.
    let _attached = opened.attached;
    visitor.visit(&DeviceTarget::of_volume(text, opened.volume, job)?)
}

#[cfg(feature = "vhost-user-blk")]
fn with_export<V: Visitor>(socket: &Path, job: &Job, visitor: V) -> Result<Measured> {
    let target = load::virtio::VirtioTarget::open(socket, job);
    visitor.visit(&target.with_context(|| format!("{EXPORT}://{}", socket.display()))?)
}

#[cfg(not(feature = "vhost-user-blk"))]
fn with_export<V: Visitor>(_: &Path, _: &Job, _: V) -> Result<Measured> {
    bail!("{EXPORT}: this vnvme was built without it (cargo feature \"{EXPORT}\")")
}
