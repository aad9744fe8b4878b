//! Volumes that are given another size while they are served.

use super::Manager;
use super::bounded::bounded;
use super::change::VOLUME_TIMEOUT;
use super::refused::of_volume;
use config::disk::DiskSpec;
use control::Error;
use control::api::EventKind;
use std::sync::Arc;

/// Names the table of a namespace that is made for its size, if it has one.
pub(super) fn fixed_by(disk: &DiskSpec, nsid: u32) -> Option<&'static str> {
    let (_, namespace) = disk.numbered().find(|(id, _)| *id == nsid)?;
    let zones = namespace.zone_size.is_some().then_some("zones");
    let has_metadata = namespace.metadata.is_some() || namespace.metadata_size.is_some();
    zones.or(has_metadata.then_some("metadata"))
}

impl Manager {
    /// Resizes a namespace's volume, and notifies the thread that serves it.
    pub(super) fn resize_namespace(
        self: &Arc<Self>,
        name: &str,
        nsid: u32,
        bytes: u64,
    ) -> Result<(), Error> {
        let taken = self.worker_context.table.take(name, "being changed")?;
        if let Some(why) = fixed_by(&taken.spec, nsid) {
            return Err(Error::conflict(format!(
                "namespace {nsid} of \"{name}\" has {why}, kept for each block of its size: it \
                 cannot be resized"
            )));
        }
        let (manager, what) = (self.clone(), format!("resizing \"{name}\""));
        bounded(&what, VOLUME_TIMEOUT, move |decision| {
            let name = taken.name.clone();
            let found = taken.running.volumes.iter().find(|(id, _)| *id == nsid);
            let volume = found.and_then(|(_, volume)| volume.upgrade());
            let Some(volume) = volume else {
                return Err(Error::not_found(format!(
                    "\"{name}\" has no namespace {nsid}; vnvme show {name} lists its namespaces"
                )));
            };
            let shrinks = bytes < volume.info().size;
            if shrinks && manager.is_attached(&taken.running) {
                return Err(Error::conflict(format!(
                    "\"{name}\" cannot shrink while a client is attached: what lies behind the new \
                     end would be lost"
                )));
            }
            if !decision.commit() {
                return Err(Error::failed("it was given up"));
            }
            let resized = volume.resize(bytes);
            resized.map_err(|error| Error {
                kind: of_volume(&error),
                message: format!("namespace {nsid}: {error}"),
            })?;
            let _ = rustix::io::write(&*taken.running.resized, &1u64.to_ne_bytes());
            manager.tell(EventKind::Resized, &name, Some(nsid));
            Ok(())
        })
    }
}
