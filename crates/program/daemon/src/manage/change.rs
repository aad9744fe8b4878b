//! Addition and removal of disks while the process runs.
//!
//! Calls that may hang run on a thread of their own ([`bounded`]): a volume is opened there, never
//! on a worker. A worker gets an open volume by a job, and makes its front-end. A removed front-end
//! drains on its worker, while all other front-ends continue.

use super::Manager;
use super::bounded::{Decision, bounded};
use super::refused::failed;
use super::table::{BusyDisk, DiskServer, Next, ReservedName, ServedDisk, Source};
use crate::confine::path_check::opening_for;
use crate::front::kind::{AddedFrontend, OpenedDisk, Ready, Seat, front_end};
use crate::front::{Front, NvmeFront, Worker};
use crate::open::prepare::{ListenContext, by_nsid, make_room};
use crate::serve::worker_context::WorkerContext;
use config::disk::{Address, DiskSpec};
use config::spec::{ControllerSpec, NamespaceSpec};
use control::Error;
use control::api::{DiskClient, EventKind};
use rustix::net::UCred;
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};
use volume::Volume;

/// Maximum time that opening or closing a volume may take before the change is given up.
pub(super) const VOLUME_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum time to wait for the last user of a removed disk's volume to close it.
const CLOSED: Duration = Duration::from_secs(10);
/// Divisor of the requests that a disk with many may have outstanding: it shares the worker's ring
/// with front-ends that are added and removed.
const CROWDING: usize = 4;
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(2);

/// Returns the error for changes after the end of the process has begun.
pub(super) fn ending() -> Error {
    Error::conflict("the process is ending")
}

impl Manager {
    /// Returns an error for a disk that is known to fail, before its volumes are opened.
    pub(super) fn admit(&self, spec: &DiskSpec) -> Result<(), Error> {
        if spec.is_in_subsystem() {
            return Err(in_subsystem(&spec.name()));
        }
        if let Address::Tcp(_) = spec.address() {
            return Err(Error::unsupported(format!(
                "{}: addresses for other hosts are listened at from the start only: write the disk \
                 into the configuration, and start the daemon again",
                spec.name()
            )));
        }
        self.wait_answer(spec)?;
        self.allow.check(spec)?;
        let table = self.worker_context.table.served();
        let others = table.iter().map(|(_, entry)| &entry.spec);
        let all = DiskSpec::specs(others.chain(std::iter::once(spec)));
        let room = self.room.check(&all);
        room.map_err(|error| Error::conflict(format!("{error:#}")))
    }

    /// Waits until the files of a disk answer another process. A thread of this process that hangs
    /// in a file system would keep the process from ending.
    ///
    /// # Errors
    /// The files do not answer within [`VOLUME_TIMEOUT`].
    pub(super) fn wait_answer(&self, disk: &DiskSpec) -> Result<(), Error> {
        let check = self.worker_context.path_checker.start(disk);
        let check = check.map_err(Error::failed)?;
        if check.is_none_or(|mut check| check.wait(VOLUME_TIMEOUT)) {
            return Ok(());
        }
        let (name, why) = (disk.name(), opening_for(VOLUME_TIMEOUT));
        Err(Error::failed(format!("\"{name}\" {why}")))
    }

    /// Waits until the files of a namespace answer, as [`Manager::wait_answer`].
    ///
    /// # Errors
    /// As [`Manager::wait_answer`].
    pub(super) fn wait_answer_of(&self, disk: &str, spec: &NamespaceSpec) -> Result<(), Error> {
        self.wait_answer(&DiskSpec::Controller(ControllerSpec {
            name: Some(disk.to_owned()),
            namespaces: vec![spec.clone()],
            ..ControllerSpec::default()
        }))
    }

    /// Opens a disk's volumes.
    pub(super) fn open(&self, spec: &DiskSpec) -> Result<OpenedDisk, Error> {
        let opener = &self.worker_context.opener;
        if let Some(socket) = spec.socket() {
            make_room(socket, spec.origin(), opener).map_err(failed)?;
        }
        OpenedDisk::new(spec, opener).map_err(failed)
    }

    /// Serves a disk with open volumes.
    pub(super) fn serve(&self, opened: OpenedDisk) -> Result<ServedDisk, Error> {
        let (worker, assignment) = self.worker_context.peers.assign_any();
        let context = ListenContext {
            usual: &self.process.access,
            receiver: &self.worker_context.receiver,
            maker: self
                .allow
                .is_confined()
                .then_some(&self.worker_context.socket_maker),
            opener: &self.worker_context.opener,
        };
        let ready = match opened.ready {
            Ready::Listener(ready) => ready,
            Ready::Device(open) => {
                drop(assignment);
                let added = self.worker_context.disks.add(*open, &self.worker_context);
                return added.map_err(failed);
            }
        };
        let workers = self.worker_context.peers.count();
        let open = ready.listen(&context, workers).map_err(failed)?;
        let (volumes, resized) = (by_nsid(open.volumes()), open.resized());
        let seat = Seat {
            worker,
            assignment,
            crowding: CROWDING,
        };
        let AddedFrontend { owner, serial } =
            self.on_worker(worker, move |thread, worker_context| {
                let added = open.serve(thread, seat, worker_context);
                added.map_err(failed)
            })?;
        front_end(&opened.disk).say_listening(&serial);
        Ok(ServedDisk {
            server: DiskServer::Worker { worker, owner },
            volumes,
            resized,
        })
    }

    /// Runs a job on a worker, and waits for its result.
    pub(super) fn on_worker<T: Send + 'static>(
        &self,
        worker: usize,
        job: impl FnOnce(&mut Worker, &WorkerContext) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let handle = self
            .worker_context
            .peers
            .handle(worker)
            .ok_or_else(ending)?;
        let (told, answer) = mpsc::channel();
        let worker_context = self.worker_context.clone();
        handle.post(move |thread| {
            let _ = told.send(job(thread, &worker_context));
        });
        // A worker that ends drops its jobs.
        answer.recv().map_err(|_| ending())?
    }

    /// Adds a disk.
    pub(super) fn add_disk(
        self: &Arc<Self>,
        spec: DiskSpec,
        source: Source,
    ) -> Result<String, Error> {
        self.admit(&spec)?;
        let reserved = self.worker_context.table.reserve(spec.clone(), source)?;
        self.worker_context.registry.described.add(&spec);
        let (manager, what) = (self.clone(), format!("opening \"{}\"", spec.name()));
        bounded(&what, VOLUME_TIMEOUT, move |decision| {
            let served = manager.open(&spec);
            let served = served.and_then(|ready| manager.serve_reserved(ready, reserved, decision));
            if served.is_err() {
                manager.worker_context.opener.records.remove(&spec.name());
            }
            served
        })
    }

    /// Serves a disk under its reserved name.
    pub(super) fn serve_reserved(
        &self,
        ready: OpenedDisk,
        reserved: ReservedName,
        decision: &Decision,
    ) -> Result<String, Error> {
        if !decision.commit() {
            return Err(Error::failed("it was given up"));
        }
        let intent = reserved.next().map(|(name, next)| self.intend(&name, next));
        let intent = intent.transpose()?;
        let running = self.serve(ready)?;
        let name = reserved.serve(running);
        if let Some(intent) = intent {
            intent.done();
        }
        self.tell(EventKind::Added, &name, None);
        Ok(name)
    }

    /// Removes a disk.
    pub(super) fn remove_disk(self: &Arc<Self>, name: &str, force: bool) -> Result<(), Error> {
        if let Some(spec) = self.forget_unavailable(name)? {
            self.give_up(&spec);
            self.registry().settings.retain(name, |_| false);
            return Ok(());
        }
        let taken = self.worker_context.table.take(name, "being removed")?;
        let (manager, what) = (self.clone(), format!("removing \"{name}\""));
        bounded(&what, VOLUME_TIMEOUT, move |decision| {
            decision.commit();
            let name = taken.name.clone();
            manager.remove_taken(taken, force)?;
            manager.registry().settings.retain(&name, |_| false);
            Ok(())
        })
    }

    /// Removes a disk if it is unavailable. Its kept descriptors stay until [`Manager::give_up`].
    ///
    /// # Errors
    /// The removal cannot be recorded.
    pub(super) fn forget_unavailable(&self, name: &str) -> Result<Option<DiskSpec>, Error> {
        if self.worker_context.table.unavailable(name).is_none() {
            return Ok(None);
        }
        let intent = self.intend(name, Next::Gone)?;
        let Some(entry) = self.worker_context.table.forget(name) else {
            return Ok(None);
        };
        intent.done();
        self.worker_context.opener.records.remove(name);
        tracing::info!(disk = name, "removed; it was not served");
        self.tell(EventKind::Removed, name, None);
        Ok(Some(entry.spec))
    }

    /// Removes a disk that the caller has reserved (`taken`) for this change.
    pub(super) fn remove_taken(&self, taken: BusyDisk, force: bool) -> Result<(), Error> {
        let name = taken.name.clone();
        if !force {
            match taken.running.server {
                DiskServer::Ublk(id) => self.worker_context.disks.check_unused(id)?,
                DiskServer::Worker { .. } if self.is_attached(&taken.running) => {
                    return Err(attached(&name));
                }
                DiskServer::Worker { .. } => {}
            }
        }
        let intent = self.intend(&name, Next::Gone)?;
        // Other disks of its subsystem go on with them.
        let volumes = if taken.spec.is_in_subsystem() {
            Vec::new()
        } else {
            keep(&taken.running.volumes)
        };
        let pool = self.worker_context.opener.pools.of(&name);
        match taken.running.server {
            DiskServer::Worker { worker, owner } => {
                let (told, removed) = mpsc::channel();
                let called = name.clone();
                self.on_worker(worker, move |thread, _| {
                    let Some(front) = thread.front_mut(owner) else {
                        return Err(Error::not_found(format!("\"{called}\" is gone")));
                    };
                    if client(front).is_some() && !force {
                        return Err(attached(&called));
                    }
                    front.dismiss();
                    thread.remove(owner, move |front, end| {
                        let end = end.map_err(|error| error.to_string());
                        let _ = told.send((front.into_remains(), end));
                    });
                    Ok(())
                })?;
                self.exports.end(&name, None);
                // The front-end drains. If its worker ends meanwhile, the worker closes it.
                if let Ok((remains, end)) = removed.recv() {
                    drop(remains);
                    if let Err(error) = end {
                        tracing::error!(disk = name, error, "not everything may be durable");
                    }
                }
            }
            DiskServer::Ublk(id) => {
                self.worker_context.disks.remove(id, force)?;
                self.exports.end(&name, None);
            }
        }
        close_last(volumes);
        close_last(pool.into_iter().collect());
        self.worker_context.heap.freed();
        self.worker_context.opener.records.remove(&name);
        taken.gone();
        intent.done();
        tracing::info!(disk = name, "removed");
        self.tell(EventKind::Removed, &name, None);
        Ok(())
    }

    /// A client has the disk.
    pub(super) fn is_attached(&self, running: &ServedDisk) -> bool {
        self.client(running).is_some()
    }

    /// Returns the client of the disk; `Some(None)` for one without a process of its own: the
    /// kernel, a host.
    pub(super) fn client(&self, running: &ServedDisk) -> Option<Option<DiskClient>> {
        match running.server {
            DiskServer::Worker { worker, owner } => self
                .on_worker(worker, move |thread, _| {
                    Ok(thread.front_mut(owner).and_then(client))
                })
                .unwrap_or(None),
            DiskServer::Ublk(id) => self.worker_context.disks.is_open(id).then_some(None),
        }
    }

    /// Closes the kept descriptors of a disk that was unavailable and has been removed.
    pub(super) fn give_up(&self, spec: &DiskSpec) {
        self.keeper().give_up(spec, "the disk was removed");
        self.worker_context.opener.idle.release(spec);
    }

    /// Returns whether the attached client is not yet kept, because the keeper is late.
    pub(super) fn is_behind(&self, running: &ServedDisk) -> bool {
        let DiskServer::Worker { worker, owner } = running.server else {
            return false;
        };
        let behind = self.on_worker(worker, move |thread, _| {
            let front = thread.front_mut(owner);
            Ok(matches!(front, Some(Front::Nvme(front)) if front.is_behind()))
        });
        behind.unwrap_or(false)
    }
}

/// Returns the error for changes of a disk in a subsystem, which stays as it was at the start.
pub(super) fn in_subsystem(name: &str) -> Error {
    Error::unsupported(format!(
        "\"{name}\" is in a subsystem: such disks and their namespaces belong into the configuration \
         that the process starts with, and can only be removed while it runs"
    ))
}

/// Returns the error for the removal of a disk with an attached client.
pub(super) fn attached(name: &str) -> Error {
    Error::conflict(format!(
        "a client is attached to \"{name}\": detach it first, or force the removal. (To take a \
         disk from a running guest, detach its namespace; QEMU ends when a vfio-user device is \
         unplugged.)"
    ))
}

/// Returns the client of a front-end, as [`Manager::client`].
pub(super) fn client(front: &mut Front) -> Option<Option<DiskClient>> {
    let process = |peer: UCred| DiskClient {
        pid: peer.pid.as_raw_nonzero().get(),
        uid: peer.uid.as_raw(),
        program: None,
    };
    front.client().map(|client| client.map(process))
}

/// Returns the controller of the front-end with this number, if it is a controller.
pub(super) fn controller(thread: &mut Worker, owner: u16) -> Result<&mut NvmeFront, Error> {
    match thread.front_mut(owner) {
        Some(Front::Nvme(front)) => Ok(front),
        _ => Err(Error::conflict(
            "only a controller has namespaces that come and go",
        )),
    }
}

/// Returns strong references that keep these volumes open until [`close_last`].
pub(super) fn keep(volumes: &[(u32, Weak<dyn Volume>)]) -> Vec<Arc<dyn Volume>> {
    let volumes = volumes.iter();
    volumes.filter_map(|(_, volume)| volume.upgrade()).collect()
}

/// Closes volumes after all other owners have: queues of all workers, and threads that query a
/// size. The caller's thread, and no worker, then waits while memory is freed or a file is closed.
pub(super) fn close_last<T: ?Sized>(volumes: Vec<Arc<T>>) {
    let limit = Instant::now() + CLOSED;
    while volumes.iter().any(|volume| Arc::strong_count(volume) > 1) {
        if Instant::now() >= limit {
            tracing::warn!("a volume that was removed has not been closed yet");
            return;
        }
        std::thread::sleep(CHECK_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::{self, ThreadId};

    struct Closed(mpsc::Sender<ThreadId>);

    impl Drop for Closed {
        fn drop(&mut self) {
            let _ = self.0.send(thread::current().id());
        }
    }

    #[test]
    fn volume_held_by_worker_is_closed_by_remover() {
        let (told, closed) = mpsc::channel();
        let volume = Arc::new(Closed(told));
        let (waits, go_on) = mpsc::channel::<()>();
        let workers = volume.clone();
        let worker = thread::spawn(move || {
            let _ = go_on.recv();
            drop(workers);
        });
        let remover = thread::spawn(move || close_last(vec![volume]));
        thread::sleep(CHECK_INTERVAL * 3);
        waits.send(()).unwrap();
        let id = remover.thread().id();
        remover.join().unwrap();
        worker.join().unwrap();
        assert_eq!(closed.try_recv(), Ok(id));
    }
}
