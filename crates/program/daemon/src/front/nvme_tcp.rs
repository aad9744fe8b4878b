//! Volumes for other hosts, by NVMe over TCP: a listener at an address, and an association for each
//! host, on whichever worker has the fewest front-ends.

use super::controller::CountedController;
use super::kind::{AddedFrontend, FrontEnd, ListeningDisk, Ready, ReadyDisk, RingUse, Seat};
use super::{Front, Worker};
use crate::confine::descriptors::SOCKET;
use crate::open::prepare::{ListenContext, Prepared, event, listen_at};
use crate::open::{Opener, host_keys};
use crate::record::{self, Guest, Shown};
use crate::registry::Registry;
use crate::registry::counters::{CountedDisk, Counters};
use crate::registry::guarded_list::ListEntry;
use crate::registry::snapshot::SnapshotBuilder;
use crate::serve::peers::{Assignment, Peers};
use crate::serve::worker_context::{WorkerContext, namespace_config};
use anyhow::{Context as _, Result};
use config::choices::Spread;
use config::disk::{Disk, NvmeTcpSpec};
use config::identity;
use config::spec::MAX_WORKERS;
use control::EventSender;
use control::api::{DiskKind, EventKind, Stats};
use controller::ControllerStats;
use fabrics_target::{
    Association, AssociationError, HostKey, NewAssociation, Target, TargetConfig, TargetLimits,
    TargetListener, TargetStats,
};
use probes::LogLimit;
use std::net::TcpListener;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use worker::{AcceptStats, Context};

/// Room for requests of the hosts of a subsystem, on each worker's ring: as of one controller.
const HOSTS_IN_FLIGHT: usize = 4096;
/// Default number of hosts of a subsystem; the next constant is the number of I/O queues of each.
const HOSTS: u64 = 64;
const HOST_QUEUES: u64 = 16;
/// Number of descriptors of a host queue's connection: on the ring, and in the epoll set.
const HOST_QUEUE: u64 = 2;
/// Number of descriptors reserved for a host's eventfds and memory.
const HOST: u64 = 8;
/// Maximum number of connections without a Connect command, together with discovery connections.
const NEWCOMERS: u64 = 96;

impl FrontEnd for NvmeTcpSpec {
    fn descriptors(&self) -> u64 {
        let queues = self.io_queues.map_or(HOST_QUEUES, u64::from) + 1;
        let hosts = self.max_hosts.map_or(HOSTS, u64::from);
        SOCKET + NEWCOMERS + hosts * (queues * HOST_QUEUE + HOST)
    }

    fn max_workers(&self, _: Spread) -> usize {
        // Hosts come to any worker.
        usize::from(MAX_WORKERS)
    }

    fn ring_use(&self, _: Spread) -> RingUse {
        RingUse {
            own: 0,
            everywhere: HOSTS_IN_FLIGHT,
            is_early: true,
        }
    }

    fn check_files(&self) -> Result<()> {
        let keys = self.host_keys.as_deref();
        let keys = keys.map_or(Ok(()), |path| host_keys::read(path).map(drop));
        self.origin.place("host-keys", keys)
    }

    fn open(&self, opener: &Opener) -> Result<Ready> {
        let spec = self;
        let name = spec.any_name();
        // Hosts connect to the next process again.
        let guest = Guest {
            is_attached: opener.keeper.is_successor(),
            shown: None,
        };
        opener.records.begin(&name, guest);
        let keys = spec.host_keys.as_deref().map(host_keys::read).transpose();
        let keys = keys.map(Option::unwrap_or_default);
        let volumes = spec.namespaces.iter().zip(1..).map(|(namespace, place)| {
            let of = (spec.any_name(), namespace.nsid.unwrap_or(place));
            let opened = Prepared::new(namespace.clone(), of, opener);
            namespace.origin.place("volume", opened)
        });
        let volumes: Vec<Prepared> = volumes.collect::<Result<_>>()?;
        let keys = spec.origin.place("host-keys", keys)?;
        let shown = opener.records.settle(&record::OpenDisk {
            name: &name,
            kind: "nvme-tcp",
            subsystem: None,
            serial: spec.serial.as_deref(),
            subnqn: spec.subnqn.as_deref(),
            files: Vec::new(),
            namespaces: volumes.iter().map(Prepared::recorded).collect(),
        })?;
        let ready = ReadyTarget {
            volumes,
            keys,
            shown,
            spec: spec.clone(),
        };
        Ok(Ready::Listener(Box::new(ready)))
    }

    fn say_listening(&self, serial: &str) {
        let (address, namespaces) = (self.listen(), self.namespaces.len());
        tracing::info!(%address, serial, namespaces, "listening for NVMe over TCP");
    }
}

/// NVMe/TCP subsystem with open volumes, before its socket is created.
struct ReadyTarget {
    spec: NvmeTcpSpec,
    /// Secrets with which hosts authenticate.
    keys: Vec<HostKey>,
    /// Volumes of the subsystem, one for each namespace.
    volumes: Vec<Prepared>,
    /// Identifiers of the subsystem and its namespaces as hosts see them.
    shown: Shown,
}

impl ReadyDisk for ReadyTarget {
    fn listen(
        self: Box<Self>,
        context: &ListenContext<'_>,
        _workers: usize,
    ) -> Result<Box<dyn ListeningDisk>> {
        let spec = &self.spec;
        let listener = match context.opener.idle.take_tcp(spec.listen()) {
            Some(listener) => listener,
            None => spec.origin.place("listen", listen_at(spec.listen()))?,
        };
        Ok(Box::new(OpenTarget {
            listener,
            resized: event()?,
            ready: *self,
        }))
    }
}

/// NVMe/TCP subsystem with open volumes and a listening socket.
struct OpenTarget {
    listener: TcpListener,
    /// Eventfd that becomes readable when a volume was resized.
    resized: Arc<OwnedFd>,
    ready: ReadyTarget,
}

impl ListeningDisk for OpenTarget {
    fn volumes(&self) -> &[Prepared] {
        &self.ready.volumes
    }

    fn resized(&self) -> Arc<OwnedFd> {
        self.resized.clone()
    }

    fn needs_ring(&self) -> bool {
        // Hosts come to any worker.
        false
    }

    /// Serves the subsystem's listener on this worker; its hosts come to any.
    fn serve(
        self: Box<Self>,
        worker: &mut Worker,
        seat: Seat,
        worker_context: &WorkerContext,
    ) -> Result<AddedFrontend> {
        let OpenTarget {
            listener,
            resized,
            ready,
        } = *self;
        let spec = &ready.spec;
        let address = spec.address().to_path().unwrap_or_default();
        let origin = spec.origin.clone();
        let hosts = Hosts {
            peers: worker_context.peers.clone(),
            registry: worker_context.registry.clone(),
            name: spec.any_name(),
            address: address.clone(),
            log: Arc::default(),
        };
        let config = target_config(worker_context, ready, &resized);
        let config = origin.place("", config)?;
        let serial = config.controller.serial.clone();
        let target = Target::new(config);
        let counted = address.clone();
        let added = worker.add(|context| {
            let launch = Box::new(move |new| hosts.launch(new));
            let connects = worker_context.options.clients.connects;
            let listener = listener.into();
            let target_listener =
                TargetListener::new(target, listener, connects, Some(resized), launch, context);
            let target_listener = origin.place("", target_listener.context("listening"))?;
            let counters = CountedTarget {
                target: target_listener.target().clone(),
                accepts: target_listener.accepts(),
            };
            let front = NvmeTcpListener {
                target_listener,
                _assignment: seat.assignment,
                _entry: worker_context.registry.enter(&counted, counters),
            };
            Ok::<_, anyhow::Error>(Front::NvmeTcpListener(Box::new(front)))
        })?;
        AddedFrontend::new(worker, added, &address, serial)
    }
}

fn target_config(
    worker_context: &WorkerContext,
    ready: ReadyTarget,
    resized: &Arc<OwnedFd>,
) -> Result<TargetConfig> {
    let ReadyTarget {
        spec,
        keys,
        volumes,
        shown,
    } = ready;
    let opened = volumes
        .into_iter()
        .map(|volume| volume.open(worker_context, resized));
    let opened = opened.collect::<Result<Vec<_>>>()?;
    let serial = shown.serial.clone();
    let mut namespaces = Vec::new();
    for ((ns, place), opened) in spec.namespaces.iter().zip(1..).zip(opened) {
        let nsid = ns.nsid.unwrap_or(place);
        let ids = shown.ids(nsid);
        namespaces.push(namespace_config(ns, nsid, ids, &opened));
    }
    let limits = TargetLimits::default();
    Ok(TargetConfig {
        nqn: spec
            .subnqn
            .clone()
            .unwrap_or_else(|| identity::subnqn(&serial)),
        controller: spec.config(serial),
        namespaces,
        address: spec.listen(),
        limits: TargetLimits {
            queues: spec.io_queues.unwrap_or(limits.queues),
            entries: spec.queue_entries.unwrap_or(limits.entries),
            associations: spec.max_hosts.map_or(limits.associations, usize::from),
            ..limits
        },
        hosts: spec.hosts.map_or_else(Vec::new, |hosts| hosts.0),
        keys,
    })
}

/// Counters of a subsystem over all its hosts. The controller of each host is a disk of its own.
struct CountedTarget {
    target: Arc<Target>,
    accepts: Arc<AcceptStats>,
}

const _: () = assert!(
    metrics::NVME_TCP.has_all(TargetStats::NAMES),
    "each counter of TargetStats needs its row in crates/program/metrics/src/catalog.rs"
);

impl Counters for CountedTarget {
    fn kind(&self) -> DiskKind {
        DiskKind::NvmeTcp
    }

    fn metrics(
        &self,
        address: &Path,
        _registry: &Registry,
        numbers: &mut SnapshotBuilder<'_>,
    ) -> metrics::Disk {
        let counters = self.target.stats().values();
        metrics::Disk {
            name: numbers.name(address),
            kind: self.kind().to_string(),
            address: address.display().to_string(),
            connected: !self.target.hosts().is_empty(),
            connections: self.accepts.accepted(),
            counters: counters
                .map(|(name, value)| (name.to_owned(), value))
                .collect(),
            ..metrics::Disk::default()
        }
    }

    /// The management API shows the counters in the snapshot of metrics.
    fn add_to(&self, _: &mut Stats, _: &Path, _: &Registry) {}
}

/// Front-end of the listening socket of an NVMe/TCP subsystem.
pub struct NvmeTcpListener {
    target_listener: TargetListener,
    _assignment: Assignment,
    _entry: ListEntry<CountedDisk>,
}

impl NvmeTcpListener {
    /// Returns whether any host is connected to the subsystem.
    pub fn has_client(&self) -> bool {
        !self.target_listener.target().hosts().is_empty()
    }

    /// Stops listening, and disconnects all hosts of the subsystem.
    pub fn dismiss(&mut self) {
        self.target_listener.dismiss();
    }

    /// Returns the listening socket, which another thread may close.
    pub fn into_remains(self) -> OwnedFd {
        self.target_listener.into_listener()
    }
}

impl Deref for NvmeTcpListener {
    type Target = TargetListener;

    fn deref(&self) -> &TargetListener {
        &self.target_listener
    }
}

impl DerefMut for NvmeTcpListener {
    fn deref_mut(&mut self) -> &mut TargetListener {
        &mut self.target_listener
    }
}

/// Front-end of the association of one NVMe/TCP host.
pub struct NvmeTcpHost {
    association: Association,
    events: EventSender,
    /// Name of the disk, for events about the host.
    disk: String,
    host: String,
    _entered: ListEntry<Arc<ControllerStats>>,
    _entry: ListEntry<CountedDisk>,
    _assignment: Assignment,
}

/// Information by which a disk's associations are registered and assigned to workers.
#[derive(Clone)]
pub struct Hosts {
    pub peers: Arc<Peers>,
    pub registry: Registry,
    /// Name of the disk (the subsystem).
    pub name: String,
    /// Where its hosts connect.
    pub address: PathBuf,
    /// Limit for log lines about hosts that cannot be served.
    pub log: Arc<LogLimit>,
}

impl Hosts {
    /// Serves a new association on the worker with the fewest front-ends.
    pub fn launch(&self, new: NewAssociation) {
        let (worker, assignment) = self.peers.assign_any();
        let Some(handle) = self.peers.handle(worker) else {
            return;
        };
        let hosts = self.clone();
        // A worker that ends drops its jobs: the host is refused then.
        handle.post(move |thread| hosts.serve(thread, worker, new, assignment));
    }

    fn serve(
        self,
        thread: &mut Worker,
        worker: usize,
        new: NewAssociation,
        assignment: Assignment,
    ) {
        let name = format!("{} at {}", new.hostnqn(), self.address.display());
        let log = self.log.clone();
        let added = thread.add(|context| {
            let host = self.host(context, worker, new, assignment)?;
            Ok::<_, AssociationError>(Front::NvmeTcpHost(Box::new(host)))
        });
        match added {
            Ok(Some(owner)) => thread.handle().set_name(owner, name),
            Ok(None) => log.line(|left_out| {
                tracing::warn!(left_out, "{name} is refused: worker {worker} is full");
            }),
            Err(error) => log.line(|left_out| {
                tracing::warn!(left_out, "{name} is refused: {error}");
            }),
        }
    }

    fn host(
        self,
        context: &Context<'_>,
        worker: usize,
        new: NewAssociation,
        assignment: Assignment,
    ) -> Result<NvmeTcpHost, AssociationError> {
        let host = new.hostnqn().to_owned();
        let mut association = new.make(context)?;
        if let Some(handle) = self.peers.handle(worker) {
            association.set_worker(worker as u16, handle.waker());
        }
        let stats = association.stats();
        let address = self.address.join(association.cntlid().to_string());
        let accepts = Arc::new(AcceptStats::default());
        let events = self.registry.events.clone();
        events.send(EventKind::Attached, &self.name, None, Some(host.clone()));
        Ok(NvmeTcpHost {
            _entered: self.peers.enter(stats.clone()),
            _entry: self.registry.enter(
                &address,
                CountedController {
                    stats,
                    accepts,
                    incoming: Arc::default(),
                },
            ),
            _assignment: assignment,
            association,
            events,
            disk: self.name,
            host,
        })
    }
}

impl Deref for NvmeTcpHost {
    type Target = Association;

    fn deref(&self) -> &Association {
        &self.association
    }
}

impl DerefMut for NvmeTcpHost {
    fn deref_mut(&mut self) -> &mut Association {
        &mut self.association
    }
}

impl Drop for NvmeTcpHost {
    fn drop(&mut self) {
        let host = std::mem::take(&mut self.host);
        self.events
            .send(EventKind::Detached, &self.disk, None, Some(host));
    }
}
