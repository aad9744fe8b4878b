//! Exports of disks over NBD: begun and ended by request.

use super::Manager;
use super::bounded::{Decision, bounded};
use super::change::{VOLUME_TIMEOUT, attached};
use super::refused::failed;
use super::resize::fixed_by;
use super::table::{BusyDisk, DiskServer};
use crate::export::{ExportServer, Exported, Pump, PumpLink};
use crate::front::{Front, Handle};
use crate::open::prepare::{ListenContext, make_room};
use anyhow::Context as _;
use config::access::SocketAccess;
use config::origin::Origin;
use control::Error;
use control::api::{Export, NewExport};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;
use vfio_user::Listener;
use volume::Volume;

/// Maximum number of exports of a process: each has threads and descriptors of its own.
const MAX_EXPORTS: usize = 16;
/// Start of the address of a Unix socket.
const UNIX: &str = "unix:";

/// Exports of a process.
#[derive(Default)]
pub(super) struct Exports(Mutex<Vec<RunningExport>>);

/// Export that is being served.
struct RunningExport {
    /// Description of the export, without the number of clients.
    shown: Export,
    server: ExportServer,
    /// Disk of a writable export. Dropped after the server.
    _withheld: Option<WithheldDisk>,
}

impl RunningExport {
    fn shown(&self) -> Export {
        Export {
            // At most a few.
            clients: u32::try_from(self.server.clients()).unwrap_or(u32::MAX),
            ..self.shown.clone()
        }
    }
}

impl Exports {
    /// Ends the exports of a disk, or those of one of its namespaces. Returns their number.
    pub(super) fn end(&self, disk: &str, nsid: Option<u32>) -> usize {
        let ended: Vec<RunningExport> = {
            let mut exports = self.0.lock().unpoisoned();
            let is_meant = |export: &mut RunningExport| {
                export.shown.disk == disk && nsid.is_none_or(|nsid| nsid == export.shown.nsid)
            };
            exports.extract_if(.., is_meant).collect()
        };
        // Not under the lock: clients and outstanding requests are waited for.
        ended.len()
    }
}

/// Disk that accepts no clients and does not change. Dropping this lets clients connect again.
struct WithheldDisk {
    worker: Handle,
    owner: u16,
    /// Reservation of the disk, which ends after clients are admitted.
    _taken: BusyDisk,
}

impl Drop for WithheldDisk {
    fn drop(&mut self) {
        let owner = self.owner;
        self.worker.post(move |thread| {
            if let Some(front) = thread.front_mut(owner) {
                front.admit_clients();
            }
        });
    }
}

/// Returns the path of a `unix:` address.
fn socket_of(address: &str) -> Result<PathBuf, Error> {
    let path = address.strip_prefix(UNIX).map(Path::new);
    let path = path.filter(|path| path.is_absolute());
    path.map(Path::to_owned).ok_or_else(|| {
        Error::invalid(format!(
            "\"{address}\": an export is served at unix:PATH, where PATH is absolute"
        ))
    })
}

impl Manager {
    /// Returns all exports, sorted by disk.
    pub fn exports(&self) -> Vec<Export> {
        let exports = self.exports.0.lock().unpoisoned();
        let running = exports.iter().filter(|export| !export.server.has_ended());
        let mut shown: Vec<Export> = running.map(RunningExport::shown).collect();
        shown.sort_by(|one, other| (&one.disk, &one.nbd).cmp(&(&other.disk, &other.nbd)));
        shown
    }

    /// Exports a disk.
    ///
    /// # Errors
    /// See [`control::Daemon::export`].
    pub fn export(self: &Arc<Self>, new: &NewExport) -> Result<Export, Error> {
        let socket = socket_of(&new.nbd)?;
        self.allow.check_path(&socket)?;
        let change = if new.writable {
            "being restored: vnvme unexport ends that"
        } else {
            "being exported"
        };
        let taken = self.worker_context.table.take(&new.disk, change)?;
        let what = format!("exporting \"{}\"", new.disk);
        let (manager, new) = (self.clone(), new.clone());
        bounded(&what, VOLUME_TIMEOUT, move |decision| {
            manager.export_taken(taken, &new, &socket, decision)
        })
    }

    /// Ends the exports of a disk.
    ///
    /// # Errors
    /// See [`control::Daemon::unexport`].
    pub fn unexport(&self, disk: &str) -> Result<(), Error> {
        if self.exports.end(disk, None) == 0 {
            self.ensure_known(disk)?;
            return Err(Error::not_found(format!("\"{disk}\" has no export")));
        }
        tracing::info!(disk, "no longer exported");
        Ok(())
    }

    /// Removes the sockets of all exports and disconnects their clients, at the end of the process.
    pub fn close_exports(&self) {
        let mut exports = self.exports.0.lock().unpoisoned();
        exports.iter_mut().for_each(|export| export.server.close());
    }

    fn export_taken(
        &self,
        taken: BusyDisk,
        new: &NewExport,
        socket: &Path,
        decision: &Decision,
    ) -> Result<Export, Error> {
        let (name, nsid) = (taken.name.clone(), new.nsid.unwrap_or(1));
        let volume = self.volume_to_export(&taken, nsid, new.writable)?;
        self.check_exports(&name, new.writable)?;
        let origin = Origin::default();
        make_room(socket, &origin, &self.worker_context.opener).map_err(failed)?;
        if !decision.commit() {
            return Err(Error::failed("it was given up"));
        }
        let info = volume.info();
        let shown = Export {
            disk: name.clone(),
            nsid,
            nbd: new.nbd.clone(),
            writable: new.writable,
            bytes: info.size,
            encrypted: volume.is_encrypted(),
            clients: 0,
        };
        // Until the export is in the list, the disk can be neither removed nor changed.
        let (withheld, _taken) = if new.writable {
            (Some(self.withhold(taken)?), None)
        } else {
            (None, Some(taken))
        };
        let listener = self.listen_for_export(socket, &origin)?;
        let (link, end) = self.pump(&volume, &name)?;
        let exported = Exported {
            name,
            volume,
            writable: new.writable,
        };
        let pump = link.clone();
        let server = ExportServer::start(exported, listener, link, end);
        let server = server.inspect_err(|_| pump.close()).map_err(failed)?;
        let export = RunningExport {
            shown,
            server,
            _withheld: withheld,
        };
        let shown = export.shown();
        self.exports.0.lock().unpoisoned().push(export);
        let (disk, nbd) = (&shown.disk, &shown.nbd);
        tracing::info!(disk, nsid, nbd, writable = shown.writable, "exported");
        Ok(shown)
    }

    /// Returns the volume of a namespace, if it can be exported.
    fn volume_to_export(
        &self,
        taken: &BusyDisk,
        nsid: u32,
        writable: bool,
    ) -> Result<Arc<dyn Volume>, Error> {
        let name = &taken.name;
        let mut open = taken.running.volumes.iter();
        let found = open.find(|(id, _)| *id == nsid);
        let volume = found.and_then(|(_, volume)| volume.upgrade());
        let configured = taken.spec.numbered().find(|(id, _)| *id == nsid);
        let Some(volume) = volume else {
            return Err(match configured {
                Some((_, spec)) => Error::conflict(format!(
                    "{} is open on its worker alone: it cannot be exported",
                    spec.volume
                )),
                None => Error::not_found(format!(
                    "\"{name}\" has no namespace {nsid}; vnvme show {name} lists its namespaces"
                )),
            });
        };
        if self.is_incoming(taken.spec.socket()) {
            return Err(Error::conflict(format!(
                "another process may still write the volume of \"{name}\""
            )));
        }
        if !writable {
            return Ok(volume);
        }
        if taken.spec.is_in_subsystem() {
            return Err(Error::unsupported(format!(
                "\"{name}\" shares its namespaces with other disks: it cannot be restored while it \
                 is served"
            )));
        }
        let is_read_only = configured.is_some_and(|(_, spec)| spec.is_read_only());
        if is_read_only || volume.info().read_only {
            return Err(Error::conflict(format!(
                "namespace {nsid} of \"{name}\" is read-only: no export of it is writable"
            )));
        }
        if let Some(state) = fixed_by(&taken.spec, nsid) {
            return Err(Error::unsupported(format!(
                "namespace {nsid} of \"{name}\" has {state}, which a copy of its blocks does not \
                 contain: it cannot be restored this way"
            )));
        }
        Ok(volume)
    }

    /// Checks that there is room for another export, and that a writable one is a disk's only one.
    fn check_exports(&self, disk: &str, writable: bool) -> Result<(), Error> {
        let exports = self.exports.0.lock().unpoisoned();
        if exports.len() >= MAX_EXPORTS {
            return Err(Error::conflict(format!(
                "there are {MAX_EXPORTS} exports, and not more at a time"
            )));
        }
        if writable && exports.iter().any(|export| export.shown.disk == disk) {
            return Err(Error::conflict(format!(
                "\"{disk}\" is exported already: end that first, vnvme unexport {disk}"
            )));
        }
        Ok(())
    }

    /// Keeps clients from a disk that has none.
    fn withhold(&self, taken: BusyDisk) -> Result<WithheldDisk, Error> {
        let name = taken.name.clone();
        let DiskServer::Worker { worker, owner } = taken.running.server else {
            return Err(only_sockets(&name));
        };
        let is_withheld =
            self.on_worker(worker, move |thread, _| match thread.front_mut(owner) {
                Some(front) => match front {
                    Front::Nvme(_) | Front::VhostBlk(_) => Ok(front.withhold()),
                    _ => Err(only_sockets(&name)),
                },
                None => Err(Error::not_found(format!("\"{name}\" is gone"))),
            })?;
        if !is_withheld {
            return Err(attached(&taken.name));
        }
        let worker = self.worker_context.peers.handle(worker);
        let worker = worker.ok_or_else(super::change::ending)?.clone();
        Ok(WithheldDisk {
            worker,
            owner,
            _taken: taken,
        })
    }

    fn listen_for_export(&self, socket: &Path, origin: &Origin) -> Result<Listener, Error> {
        let context = ListenContext {
            usual: &self.process.access,
            receiver: &self.worker_context.receiver,
            maker: self
                .allow
                .is_confined()
                .then_some(&self.worker_context.socket_maker),
            opener: &self.worker_context.opener,
        };
        let access = SocketAccess::default();
        context.bind(socket, &access, origin, None).map_err(failed)
    }

    /// Starts the front-end of an export on the worker that has the fewest.
    fn pump(
        &self,
        volume: &Arc<dyn Volume>,
        name: &str,
    ) -> Result<(Arc<PumpLink>, Receiver<Infallible>), Error> {
        let (worker, assignment) = self.worker_context.peers.assign_any();
        let (volume, name) = (volume.clone(), format!("export of {name}"));
        self.on_worker(worker, move |thread, _| {
            let mut made = None;
            let added = thread.add(|context| {
                let (pump, link, end) = Pump::new(&*volume, context, assignment)?;
                made = Some((link, end));
                Ok::<_, volume::VolumeError>(Front::Export(Box::new(pump)))
            });
            let owner = added.map_err(|error| failed(error.into()))?;
            if let Some(owner) = owner {
                thread.handle().set_name(owner, name);
            }
            made.context("a worker has too many disks").map_err(failed)
        })
    }
}

fn only_sockets(name: &str) -> Error {
    Error::unsupported(format!(
        "only controllers and vhost-user-blk disks can be restored while they are served: \
         \"{name}\" is of another kind"
    ))
}
