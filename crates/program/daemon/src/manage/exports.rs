//! Exports of disks over NBD: begun and ended by request.

use super::Manager;
use super::bounded::{Decision, bounded};
use super::change::{CHECK_INTERVAL, VOLUME_TIMEOUT, attached, client, ending};
use super::refused::failed;
use super::resize::fixed_by;
use super::table::{BusyDisk, DiskServer};
use crate::export::{END_TIMEOUT, ExportServer, Exported, Pump, PumpLink};
use crate::front::{Front, Handle};
use crate::open::prepare::ListenContext;
use anyhow::Context as _;
use control::Error;
use control::api::{Export, NewExport};
use std::any::Any;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use sync::Unpoisoned;
use vfio_user::Listener;
use volume::Volume;

/// Maximum number of exports of a process: each has threads and descriptors of its own.
const MAX_EXPORTS: usize = 16;
/// Maximum time to wait for the outstanding commands of a disk's last client.
const QUIET_TIMEOUT: Duration = Duration::from_secs(5);
/// Start of the address of a Unix socket.
const UNIX: &str = "unix:";

/// Exports of a process.
#[derive(Default)]
pub(super) struct Exports(Mutex<ExportList>);

#[derive(Default)]
struct ExportList {
    running: Vec<RunningExport>,
    /// Whether the process is ending, so that no export may begin.
    is_closed: bool,
}

/// Result of [`Exports::end`].
pub(super) struct EndedExports {
    count: usize,
    /// Whether all requests of their clients have ended.
    are_over: bool,
}

/// Export that is being served.
struct RunningExport {
    /// Description of the export, without the number of clients.
    shown: Export,
    /// Socket of the disk, if it has one.
    disk_socket: Option<PathBuf>,
    server: ExportServer,
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
    /// Ends the exports of a disk, or those of one of its namespaces.
    pub(super) fn end(&self, disk: &str, nsid: Option<u32>) -> EndedExports {
        let ended: Vec<RunningExport> = {
            let mut exports = self.0.lock().unpoisoned();
            let is_meant = |export: &mut RunningExport| {
                export.shown.disk == disk && nsid.is_none_or(|nsid| nsid == export.shown.nsid)
            };
            exports.running.extract_if(.., is_meant).collect()
        };
        // Not under the lock: outstanding requests are waited for.
        EndedExports {
            count: ended.len(),
            are_over: end_all(&ended),
        }
    }
}

/// Ends exports. Returns whether all their requests have ended.
fn end_all(exports: &[RunningExport]) -> bool {
    let until = Instant::now() + END_TIMEOUT;
    exports.iter().for_each(|export| export.server.close());
    exports
        .iter()
        .for_each(|export| export.server.disconnect(until));
    let mut are_over = true;
    for export in exports {
        if !export.server.wait_end(until) {
            let disk = &export.shown.disk;
            tracing::warn!(disk, "requests of an export that has ended are outstanding");
            are_over = false;
        }
    }
    are_over
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
        let running = exports.running.iter();
        let running = running.filter(|export| !export.server.has_ended());
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
        let ended = self.exports.end(disk, None);
        if ended.count == 0 {
            self.ensure_known(disk)?;
            return Err(Error::not_found(format!("\"{disk}\" has no export")));
        }
        tracing::info!(disk, "no longer exported");
        if ended.are_over {
            return Ok(());
        }
        Err(Error::failed(format!(
            "\"{disk}\" is no longer exported, but its volume has not answered all requests of \
             the export; until then, a disk that was exported for writing accepts no guest"
        )))
    }

    /// Ends the exports of disks whose volumes have been handed to another process, which writes
    /// them. Waits for nothing.
    pub fn end_exports_handed_over(&self) {
        let ended: Vec<RunningExport> = {
            let mut exports = self.exports.0.lock().unpoisoned();
            let is_handed_over =
                |export: &mut RunningExport| self.is_incoming(export.disk_socket.as_deref());
            exports.running.extract_if(.., is_handed_over).collect()
        };
        for export in ended {
            let disk = &export.shown.disk;
            tracing::warn!(
                disk,
                "an export ends: another process may write the volume now"
            );
            export.server.close();
            sync::discard(export);
        }
    }

    /// Removes the sockets of all exports and disconnects their clients, at the end of the process.
    pub fn close_exports(&self) {
        let exports = {
            let mut exports = self.exports.0.lock().unpoisoned();
            exports.is_closed = true;
            std::mem::take(&mut exports.running)
        };
        let until = Instant::now() + END_TIMEOUT;
        exports.iter().for_each(|export| export.server.close());
        exports
            .iter()
            .for_each(|export| export.server.disconnect(until));
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
        self.check_free(socket)?;
        let room = Listener::make_room(socket);
        room.map_err(|error| failed(error.into()))?;
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
        let disk_socket = taken.spec.socket().map(Path::to_owned);
        // Until the export is in the list, the disk can be neither removed nor changed.
        let (withheld, _taken) = if new.writable {
            (Some(self.withhold(taken)?), None)
        } else {
            (None, Some(taken))
        };
        let listener = self.listen_for_export(socket)?;
        // The pump keeps guests away as long as its requests are outstanding.
        let until_end = withheld.map(|disk| Box::new(disk) as Box<dyn Any + Send>);
        let (link, end) = self.pump(volume, &name, until_end)?;
        let exported = Exported {
            name,
            writable: new.writable,
        };
        let pump = link.clone();
        let server = ExportServer::start(exported, listener, link, end);
        let server = server.inspect_err(|_| pump.close()).map_err(failed)?;
        let export = RunningExport {
            shown,
            disk_socket,
            server,
        };
        let shown = export.shown();
        {
            let mut exports = self.exports.0.lock().unpoisoned();
            if exports.is_closed {
                drop(exports);
                return Err(ending());
            }
            exports.running.push(export);
        }
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
            return Err(may_be_written(name));
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
        let exports = &self.exports.0.lock().unpoisoned().running;
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

    /// Checks that no disk and not the control socket has this path, whether anyone listens there
    /// now or not.
    fn check_free(&self, socket: &Path) -> Result<(), Error> {
        let path = self.allow.real(socket);
        let is_it = |other: &Path| self.allow.real(other) == path;
        let control = self.worker_context.options.control.as_deref();
        if control.is_some_and(is_it) {
            let socket = socket.display();
            return Err(Error::conflict(format!(
                "{socket} is the control socket: choose another path for the export"
            )));
        }
        let disks = self.worker_context.table.all();
        let mut disks = disks.iter();
        let disk = disks.find(|(_, entry)| entry.spec.socket().is_some_and(is_it));
        disk.map_or(Ok(()), |(name, _)| {
            let socket = socket.display();
            Err(Error::conflict(format!(
                "{socket} is the socket of \"{name}\": choose another path for the export"
            )))
        })
    }

    /// Keeps clients from a disk that has none, and of which no command is outstanding.
    fn withhold(&self, taken: BusyDisk) -> Result<WithheldDisk, Error> {
        let name = taken.name.clone();
        let DiskServer::Worker { worker, owner } = taken.running.server else {
            return Err(only_sockets(&name));
        };
        let began = Instant::now();
        loop {
            let called = name.clone();
            let (is_withheld, is_attached) =
                self.on_worker(worker, move |thread, _| match thread.front_mut(owner) {
                    Some(front) => match front {
                        Front::Nvme(_) | Front::VhostBlk(_) => {
                            Ok((front.withhold(), client(front).is_some()))
                        }
                        _ => Err(only_sockets(&called)),
                    },
                    None => Err(Error::not_found(format!("\"{called}\" is gone"))),
                })?;
            if is_withheld {
                break;
            }
            if is_attached {
                return Err(attached(&name));
            }
            if self.is_incoming(taken.spec.socket()) {
                return Err(may_be_written(&name));
            }
            if began.elapsed() >= QUIET_TIMEOUT {
                return Err(Error::conflict(format!(
                    "\"{name}\" has no client, but commands are outstanding, or its volume is \
                     being handed to another process"
                )));
            }
            std::thread::sleep(CHECK_INTERVAL);
        }
        let worker = self.worker_context.peers.handle(worker);
        let worker = worker.ok_or_else(ending)?.clone();
        Ok(WithheldDisk {
            worker,
            owner,
            _taken: taken,
        })
    }

    fn listen_for_export(&self, socket: &Path) -> Result<Listener, Error> {
        let context = ListenContext {
            usual: &self.process.access,
            receiver: &self.worker_context.receiver,
            maker: self
                .allow
                .is_confined()
                .then_some(&self.worker_context.socket_maker),
            opener: &self.worker_context.opener,
        };
        let listener = context.bind_new(socket, &self.process.access);
        listener.map_err(failed)
    }

    /// Starts the front-end of an export on the worker that has the fewest.
    fn pump(
        &self,
        volume: Arc<dyn Volume>,
        name: &str,
        until_end: Option<Box<dyn Any + Send>>,
    ) -> Result<(Arc<PumpLink>, Receiver<Infallible>), Error> {
        let (worker, assignment) = self.worker_context.peers.assign_any();
        let name = format!("export of {name}");
        self.on_worker(worker, move |thread, _| {
            let mut made = None;
            let added = thread.add(|context| {
                let (pump, link, end) = Pump::new(volume, context, assignment, until_end)?;
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

fn may_be_written(name: &str) -> Error {
    Error::conflict(format!(
        "another process may still write the volume of \"{name}\""
    ))
}

fn only_sockets(name: &str) -> Error {
    Error::unsupported(format!(
        "only controllers and vhost-user-blk disks can be restored while they are served: \
         \"{name}\" is of another kind"
    ))
}
