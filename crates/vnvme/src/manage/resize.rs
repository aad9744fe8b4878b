//! Volumes that are given another size while they are served.

use super::Manager;
use super::bounded::bounded;
use super::change::LIMIT;
use super::refused::of_volume;
use control::Error;
use control::api::EventKind;
use std::sync::Arc;

impl Manager {
    /// Resizes a namespace's volume. Its server is told.
    pub(super) fn resize_namespace(
        self: &Arc<Self>,
        name: &str,
        nsid: u32,
        bytes: u64,
    ) -> Result<(), Error> {
        let taken = self.crew.table.take(name, "being changed")?;
        let (manager, what) = (self.clone(), format!("resizing \"{name}\""));
        bounded(&what, LIMIT, move |decision| {
            let name = taken.name.clone();
            let found = taken.running.volumes.iter().find(|(id, _)| *id == nsid);
            let volume = found.and_then(|(_, volume)| volume.upgrade());
            let Some(volume) = volume else {
                return Err(Error::not_found(format!(
                    "\"{name}\" has no namespace {nsid}"
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
