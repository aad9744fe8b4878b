//! Namespaces that are attached, detached and resized while their controller runs.

use super::Manager;
use super::bounded::bounded;
use super::change::{VOLUME_TIMEOUT, close_last, controller, in_subsystem, keep};
use super::refused::failed;
use super::table::{BusyDisk, DiskServer, Next};
use crate::open::OpenedVolume;
use crate::record;
use crate::serve::worker_context::namespace_config;
use config::disk::DiskSpec;
use config::spec::NamespaceSpec;
use control::Error;
use control::api::EventKind;
use controller::{Attach, NamespacePool};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of checks on whether all workers have attached or detached a namespace.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);
/// Time after which outstanding commands on a detached namespace are ended early.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

impl Manager {
    /// Attaches a namespace to a controller, and returns the namespace ID.
    pub(super) fn attach_namespace(
        self: &Arc<Self>,
        name: &str,
        mut spec: NamespaceSpec,
    ) -> Result<u32, Error> {
        self.wait_answer_of(name, &spec)?;
        self.allow.check_volume(&spec.volume)?;
        let taken = self.worker_context.table.take(name, "being changed")?;
        let DiskSpec::Controller(disk) = &taken.spec else {
            return Err(only_controllers(name));
        };
        if taken.spec.is_in_subsystem() {
            return Err(in_subsystem(name));
        }
        let pool = self.worker_context.opener.pools.of(name);
        let pooled = pool.map_or_else(Vec::new, |pool| pool.namespaces());
        let used = |nsid: u32| {
            disk.namespaces.iter().any(|ns| ns.nsid == Some(nsid))
                || pooled.iter().any(|ns| ns.nsid == nsid)
        };
        let free = (1..=u32::MAX).find(|nsid| !used(*nsid));
        let nsid = spec.nsid.or(free).unwrap_or(1);
        if used(nsid) {
            return Err(Error::conflict(format!(
                "\"{name}\" has a namespace {nsid} already"
            )));
        }
        spec.nsid = Some(nsid);
        let mut together = disk.clone();
        together.namespaces.push(spec.clone());
        let together = DiskSpec::Controller(together);
        self.check_alone(&together)?;
        self.check_beside(name, &together)?;
        let (manager, what) = (self.clone(), format!("opening {}", spec.volume));
        bounded(&what, VOLUME_TIMEOUT, move |decision| {
            let opened = manager.worker_context.opener.open(&spec, &taken.name, nsid);
            let opened = spec.origin.place("volume", opened).map_err(failed)?;
            if !decision.commit() {
                return Err(Error::failed("it was given up"));
            }
            manager.attach_opened(taken, together, spec, opened)
        })
    }

    /// Makes a namespace with an open volume visible to the guest.
    pub(super) fn attach_opened(
        &self,
        mut taken: BusyDisk,
        together: DiskSpec,
        spec: NamespaceSpec,
        opened: OpenedVolume,
    ) -> Result<u32, Error> {
        let DiskServer::Worker { worker, owner } = taken.running.server else {
            return Err(only_controllers(&taken.name));
        };
        let next = Next::As(Box::new(together.clone()));
        let intent = self.intend(&taken.name, next)?;
        crash::point!("vnvme.attach.recorded");
        self.worker_context.registry.described.add(&together);
        let nsid = spec.nsid.unwrap_or(1);
        let volume = opened.volume.clone();
        let serial = self.on_worker(worker, move |thread, _| {
            let (controller, _) = controller(thread, owner)?.controller_mut();
            Ok(controller.config().serial.clone())
        })?;
        let records = &self.worker_context.opener.records;
        let recorded = records.attach(
            &taken.name,
            &serial,
            &record::Open {
                nsid,
                spec: &spec,
                volume: Some(&*volume),
                block_size: opened.block_size,
            },
        );
        let ids = recorded.map_err(|error| Error::conflict(format!("{error:#}")))?;
        let attached = self.on_worker(worker, move |thread, _| {
            let front = controller(thread, owner)?;
            let (controller, io) = front.controller_mut();
            let config = namespace_config(&spec, nsid, ids, &opened);
            let attached = controller.attach(config, io);
            attached.map_err(|error| Error::invalid(error.to_string()))
        });
        if let Err(error) = attached {
            records.detach(&taken.name, nsid);
            return Err(error);
        }
        loop {
            let state = self.on_worker(worker, move |thread, _| {
                Ok(controller(thread, owner)?.controller_mut().0.attaching())
            })?;
            match state {
                Attach::Done => break,
                Attach::Refused => {
                    records.detach(&taken.name, nsid);
                    return Err(Error::failed(format!(
                        "namespace {nsid}: a worker that has queues of the controller could not \
                         open the volume"
                    )));
                }
                Attach::Under => std::thread::sleep(CHECK_INTERVAL),
            }
        }
        self.worker_context
            .sizes
            .watch(&volume, &taken.running.resized);
        let weak = Arc::downgrade(&volume);
        taken.running.volumes.push((nsid, weak));
        taken.spec = together;
        taken.changed();
        intent.done();
        self.tell(EventKind::Changed, &taken.name, Some(nsid));
        Ok(nsid)
    }

    /// Detaches a namespace from the controller with this name.
    pub(super) fn detach_namespace(self: &Arc<Self>, name: &str, nsid: u32) -> Result<(), Error> {
        let taken = self.worker_context.table.take(name, "being changed")?;
        if taken.spec.is_in_subsystem() {
            return Err(in_subsystem(name));
        }
        let pool = self.worker_context.opener.pools.of(name);
        let mut pooled = pool.iter().flat_map(|pool| pool.namespaces());
        if pooled.any(|ns| ns.nsid == nsid) {
            return Err(Error::conflict(format!(
                "\"{name}\": its guest has made namespace {nsid}, and detaches it: nvme detach-ns"
            )));
        }
        let what = format!("detaching namespace {nsid} of \"{name}\"");
        let manager = self.clone();
        bounded(&what, VOLUME_TIMEOUT, move |decision| {
            decision.commit();
            manager.detach_taken(taken, nsid)
        })
    }

    /// Detaches a namespace of a disk that the caller has reserved (`taken`).
    pub(super) fn detach_taken(&self, mut taken: BusyDisk, nsid: u32) -> Result<(), Error> {
        let name = taken.name.clone();
        let mut next = taken.spec.clone();
        let (DiskSpec::Controller(disk), DiskServer::Worker { worker, owner }) =
            (&mut next, taken.running.server)
        else {
            return Err(only_controllers(&name));
        };
        let unknown = move |name: &str| {
            Error::not_found(format!(
                "\"{name}\" has no namespace {nsid}; vnvme show {name} lists its namespaces"
            ))
        };
        if disk.namespaces.iter().all(|ns| ns.nsid != Some(nsid)) {
            return Err(unknown(&name));
        }
        disk.namespaces.retain(|ns| ns.nsid != Some(nsid));
        let intent = self.intend(&name, Next::As(Box::new(next.clone())))?;
        crash::point!("vnvme.detach.recorded");
        let (gone, left) = std::mem::take(&mut taken.running.volumes)
            .into_iter()
            .partition::<Vec<_>, _>(|(id, _)| *id == nsid);
        let volumes = keep(&gone);
        let called = name.clone();
        self.on_worker(worker, move |thread, _| {
            let detached = controller(thread, owner)?.controller_mut().0.detach(nsid);
            if detached {
                Ok(())
            } else {
                Err(unknown(&called))
            }
        })?;
        self.exports.end(&name, Some(nsid));
        // The namespace is no longer listed, whatever its volume does.
        taken.spec = next;
        taken.running.volumes = left;
        taken.changed();
        self.worker_context.opener.records.detach(&name, nsid);
        intent.done();
        self.registry().settings.retain(&name, |id| id != nsid);
        let began = Instant::now();
        loop {
            let early = began.elapsed() >= DRAIN_TIMEOUT;
            let left = self.on_worker(worker, move |thread, _| {
                let (controller, io) = controller(thread, owner)?.controller_mut();
                if early {
                    controller.end_detached_early();
                }
                controller.tidy(io);
                Ok(!controller.has_detached())
            })?;
            if !left {
                break;
            }
            std::thread::sleep(CHECK_INTERVAL);
        }
        close_last(volumes);
        self.tell(EventKind::Changed, &name, Some(nsid));
        Ok(())
    }
}

fn only_controllers(name: &str) -> Error {
    Error::conflict(format!(
        "\"{name}\" is no controller, and only controllers have namespaces that come and go; for \
         another volume, remove the disk and add it again: vnvme remove {name}"
    ))
}
