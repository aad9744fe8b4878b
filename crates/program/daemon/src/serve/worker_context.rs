//! State shared by all workers, and the functions that open a disk on a worker, at start-up and at
//! run time.

use crate::confine::Confinement;
use crate::confine::path_check::PathChecker;
use crate::confine::socket_maker::SocketMaker;
use crate::front::ublk::Disks;
use crate::front::vhost_blk::{FrontEnds, VhostBlk};
use crate::front::{Front, Hosts, NvmeFront, NvmeTcpListener, ServedController, Worker};
use crate::keep::{self, ControllerParts};
use crate::manage::{DiskFailure, DiskTable};
use crate::open::direct::{DirectPath, check_block_size};
use crate::open::prepare::{OpenController, OpenExport, OpenTarget, Prepared, UnavailableDisk};
use crate::open::{OpenedVolume, Opener, subsystems};
use crate::parts::ublk::{QueueSetup, QueueSetupFailed};
use crate::record::{Ids, Shown};
use crate::registry::Registry;
use crate::registry::sizes::Sizes;
use crate::serve::heap::Heap;
use crate::serve::notify::ServiceLink;
use crate::serve::options::ServeOptions;
use crate::serve::peers::{Assignment, FixedCounter, Peers};
use anyhow::{Context, Result};
use config::choices::{PathChoice, Spread};
use config::controllers::target_controller;
use config::disk::DiskSpec;
use config::identity;
use config::spec::{ControllerSpec, NamespaceSpec, NvmeTcpSpec};
use config::volumes::is_within;
use controller::{ControllerConfig, Formats, NamespaceConfig, NamespacePool};
use dma::MemoryCache;
use fabrics_target::{HostKey, Target, TargetConfig, TargetLimits, TargetListener};
use receive::Receiver;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use volume::{Extras, Io};

/// Default of the largest NSID, for controllers of a daemon and controllers with a pool.
const DAEMON_NAMESPACES: u32 = 16;

/// State that all workers of the process share.
pub struct WorkerContext {
    pub options: ServeOptions,
    pub opener: Opener,
    pub registry: Registry,
    pub sizes: Sizes,
    pub peers: Arc<Peers>,
    /// The process that receives clients' descriptors.
    pub receiver: Receiver,
    /// Maker of sockets for other users, in the sandbox.
    pub socket_maker: SocketMaker,
    /// Starter of checks whether files answer.
    pub path_checker: PathChecker,
    pub confinement: Confinement,
    /// Queues that need a ring may come to any worker, later.
    pub rings: bool,
    /// Number of controllers of all workers at the start.
    pub controllers: usize,
    /// Number of requests that all block devices may have outstanding together, at the start.
    pub tags: usize,
    /// Table of all disks of the process.
    pub table: Arc<DiskTable>,
    /// Number of requests for which each worker's io_uring reserves room for NVMe/TCP hosts.
    pub hosts: usize,
    /// ublk block devices of the process.
    pub disks: Disks,
    /// Returns the memory of removed disks to the system.
    pub heap: Heap,
    /// Connection to the service manager.
    pub service: Arc<ServiceLink>,
}

/// Front-end that a worker has begun to serve.
pub struct AddedFrontend {
    /// Number of the front-end on the worker.
    pub owner: u16,
    pub serial: String,
}

/// Logs that clients may connect. Not called on a worker's thread that serves other disks, since
/// the log's reader may be slow.
pub fn say_listening(disk: &DiskSpec, serial: &str) {
    match disk {
        DiskSpec::Controller(spec) => {
            let (socket, namespaces) = (spec.socket.display(), spec.namespaces.len());
            tracing::info!(%socket, serial, namespaces, "listening");
        }
        DiskSpec::VhostBlk(spec) => {
            let span = tracing::error_span!("export", socket = %spec.socket.display());
            span.in_scope(|| tracing::info!(serial, "listening for vhost-user-blk"));
        }
        DiskSpec::NvmeTcp(spec) => {
            let (address, namespaces) = (spec.listen(), spec.namespaces.len());
            tracing::info!(%address, serial, namespaces, "listening for NVMe over TCP");
        }
        DiskSpec::Ublk(_) => {}
    }
}

impl WorkerContext {
    /// Adds an unavailable disk to the table of disks.
    pub fn leave_out(&self, unserved: UnavailableDisk) {
        let UnavailableDisk { disk, why, since } = unserved;
        let name = disk.name();
        let failed = DiskFailure {
            why,
            since,
            was_opened: keep::was_served(&disk, &self.options.unavailable),
            _counted: Arc::new(self.registry.unserved.enter(name.clone())),
        };
        let source = self.options.source(&name);
        self.table.enter_failed(disk.completed(), source, failed);
    }

    /// Serves a controller on this worker.
    ///
    /// # Errors
    /// A text for the user.
    pub fn add_controller(
        &self,
        worker: &mut Worker,
        index: usize,
        open: OpenController,
        assignment: Assignment,
    ) -> Result<AddedFrontend> {
        let socket = open.spec.socket.clone();
        let (origin, name) = (open.spec.origin.clone(), open.spec.any_name());
        let mut serial = String::new();
        let added = worker.add(|context| {
            let one = origin.place("", served(context.owner, open, context.io, self))?;
            let stats = one.controller.stats();
            serial.clone_from(&one.controller.config().serial);
            let mut front = NvmeFront::new(one, context, index, &self.peers).context("epoll")?;
            let entry = self.registry.enter(&socket, stats, front.accepts());
            front.keep(entry, assignment);
            front.tell(&self.registry.events, name);
            Ok::<_, anyhow::Error>(Front::Nvme(Box::new(front)))
        })?;
        let owner = added.context("a worker has too many disks")?;
        worker
            .handle()
            .set_name(owner, socket.display().to_string());
        Ok(AddedFrontend { owner, serial })
    }

    /// Serves a vhost-user-blk export on this worker.
    ///
    /// # Errors
    /// A text for the user.
    pub fn add_export(
        &self,
        worker: &mut Worker,
        index: usize,
        open: OpenExport,
        in_flight: usize,
        assignment: Assignment,
    ) -> Result<AddedFrontend> {
        let (socket, origin) = (open.spec.socket.clone(), open.spec.origin.clone());
        let mut serial = String::new();
        let added = worker.add(|context| {
            let clients = FrontEnds {
                memory: self.options.clients.memory,
                connects: self.options.clients.connects,
            };
            let export = VhostBlk::new(
                open,
                in_flight,
                &clients,
                context,
                &self.opener,
                &self.registry,
                &self.sizes,
            );
            let mut export = origin.place("", export)?;
            serial.clone_from(export.serial());
            let stats = export.stats();
            let requests = move || stats.queues.iter().map(|queue| queue.requests.get()).sum();
            export.keep(self.peers.enter_fixed(index, requests), assignment);
            Ok::<_, anyhow::Error>(Front::VhostBlk(Box::new(export)))
        })?;
        let owner = added.context("a worker has too many disks")?;
        worker
            .handle()
            .set_name(owner, socket.display().to_string());
        Ok(AddedFrontend { owner, serial })
    }

    /// Serves a subsystem's listener on this worker; its hosts come to any.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn add_target(
        &self,
        worker: &mut Worker,
        open: OpenTarget,
        assignment: Assignment,
    ) -> Result<AddedFrontend> {
        let OpenTarget {
            spec,
            keys,
            listener,
            volumes,
            resized,
            shown,
        } = open;
        let (address, origin) = (spec.address(), spec.origin.clone());
        let hosts = Hosts {
            peers: self.peers.clone(),
            registry: self.registry.clone(),
            name: spec.any_name(),
            address: address.clone(),
            log: Arc::default(),
        };
        let config = self.target_config(&spec, keys, volumes, &shown, &resized);
        let config = origin.place("", config)?;
        let serial = config.controller.serial.clone();
        let target = Target::new(config);
        let added = worker.add(|context| {
            let launch = Box::new(move |new| hosts.launch(new));
            let connects = self.options.clients.connects;
            let listener = listener.into();
            let target_listener =
                TargetListener::new(target, listener, connects, Some(resized), launch, context);
            let target_listener = origin.place("", target_listener.context("listening"))?;
            let front = NvmeTcpListener::new(target_listener, assignment);
            Ok::<_, anyhow::Error>(Front::NvmeTcpListener(Box::new(front)))
        })?;
        let owner = added.context("a worker has too many disks")?;
        worker
            .handle()
            .set_name(owner, address.display().to_string());
        Ok(AddedFrontend { owner, serial })
    }

    fn target_config(
        &self,
        spec: &NvmeTcpSpec,
        keys: Vec<HostKey>,
        volumes: Vec<Prepared>,
        shown: &Shown,
        resized: &Arc<OwnedFd>,
    ) -> Result<TargetConfig> {
        let opened = volumes.into_iter().map(|volume| volume.open(&self.opener));
        let opened = opened.collect::<Result<Vec<_>>>()?;
        let serial = shown.serial.clone();
        let mut namespaces = Vec::new();
        for ((ns, place), opened) in spec.namespaces.iter().zip(1..).zip(opened) {
            if !is_within(&ns.volume) {
                self.sizes.watch(&opened.volume, resized);
            }
            let nsid = ns.nsid.unwrap_or(place);
            let ids = shown.ids(nsid);
            namespaces.push(namespace_config(ns, nsid, ids, &opened));
        }
        let subnqn = spec.subnqn.clone();
        let limits = TargetLimits::default();
        Ok(TargetConfig {
            nqn: subnqn.unwrap_or_else(|| identity::subnqn(&serial)),
            controller: target_controller(spec, serial),
            namespaces,
            address: spec.listen(),
            limits: TargetLimits {
                queues: spec.io_queues.unwrap_or(limits.queues),
                entries: spec.queue_entries.unwrap_or(limits.entries),
                associations: spec.max_hosts.map_or(limits.associations, usize::from),
                ..limits
            },
            hosts: spec.hosts.clone().map_or_else(Vec::new, |hosts| hosts.0),
            keys,
        })
    }

    /// Passes a queue of a block device to the worker with this index.
    pub fn pass_queue(&self, worker: usize, setup: QueueSetup) -> Option<FixedCounter> {
        let handle = self.peers.handle(worker)?;
        let (stats, number) = (setup.stats(), usize::from(setup.number()));
        let queue = move || stats.queues.get(number).map_or(0, |q| q.requests.get());
        let fixed = self.peers.enter_fixed(worker, queue);
        handle.post(|worker| serve_queue(worker, setup));
        Some(fixed)
    }
}

/// Opens a queue of a block device on the worker that is to serve it. The device waits for the
/// result.
fn serve_queue(worker: &mut Worker, setup: QueueSetup) {
    let name = format!("queue {} of /dev/ublkb{}", setup.number(), setup.stats().id);
    let added = worker
        .add(|context| Ok::<_, QueueSetupFailed>(Front::Ublk(Box::new(setup.open(context)?))));
    match added {
        Ok(Some(owner)) => worker.handle().set_name(owner, name),
        Ok(None) => {
            tracing::error!("no queue of a block device can be added to this worker: it is full");
        }
        Err(_) => {}
    }
}

/// Returns the configuration of a controller, as far as it does not depend on the volumes.
pub fn controller_config(spec: &ControllerSpec, serial: String) -> ControllerConfig {
    let own = spec.subnqn.clone();
    ControllerConfig {
        subnqn: Some(own.unwrap_or_else(|| identity::subnqn(&serial))),
        ..config::controllers::controller(spec, serial)
    }
}

/// Returns the configuration of a namespace with these identifiers. Its blocks have the configured
/// or recorded size, or else the volume's, at least 512 bytes.
pub fn namespace_config(
    spec: &NamespaceSpec,
    nsid: u32,
    ids: Ids,
    opened: &OpenedVolume,
) -> NamespaceConfig {
    let Ids { nguid, eui64, uuid } = ids;
    let volume = opened.volume.clone();
    let own = || volume.info().block_size.max(512);
    let config = NamespaceConfig {
        block_size: opened.block_size.unwrap_or_else(own),
        read_only: spec.is_read_only(),
        nguid,
        eui64,
        uuid,
        ..NamespaceConfig::new(nsid, volume)
    };
    opened.files.clone().shape(config)
}

fn served(
    id: u16,
    open: OpenController,
    io: &Io,
    worker_context: &WorkerContext,
) -> Result<ServedController> {
    let OpenController {
        spec,
        listener,
        intake,
        page,
        survival,
        volumes: prepared,
        resized,
        subsystem,
        pool,
        boot,
        shown,
    } = open;
    let spec = &spec;
    let paths = &worker_context.registry.paths;
    let opened = prepared
        .into_iter()
        .map(|volume| volume.open(&worker_context.opener))
        .collect::<Result<Vec<_>>>()?;
    let (mut namespaces, mut backends, mut directs) = (Vec::new(), Vec::new(), Vec::new());
    for ((ns, place), mut opened) in spec.namespaces.iter().zip(1..).zip(opened) {
        backends.extend(opened.device.take());
        // The direct path does not apply with zones, placement or metadata, because this process
        // checks writes to zones, counts writes by handles, and keeps the metadata. With several
        // formats it does not apply either, because the device's blocks have one size.
        let direct = opened.direct.take();
        directs.push(direct.filter(|_| opened.files.is_empty()));
        if !is_within(&ns.volume) {
            worker_context.sizes.watch(&opened.volume, &resized);
        }
        let nsid = ns.nsid.unwrap_or(place);
        namespaces.push(namespace_config(ns, nsid, shown.ids(nsid), &opened));
    }
    let serial = shown.serial;
    let has_metadata = |ns: &NamespaceConfig| {
        let formats = ns.formats.as_ref();
        ns.metadata.is_some() || formats.is_some_and(Formats::has_metadata)
    };
    let alone = namespaces.iter().any(has_metadata);
    let blocks: Vec<(u32, u32)> = namespaces
        .iter()
        .map(|ns| (ns.nsid, ns.block_size))
        .collect();
    // A limited volume gains nothing from another worker.
    let limited =
        |ns: &NamespaceSpec| Extras::split(&ns.volume).is_ok_and(|(_, extras)| extras.is_limited());
    let limited = spec.namespaces.iter().any(limited);
    let spread = if limited || alone || subsystem.is_some() {
        Spread::Off
    } else {
        worker_context.options.spread
    };
    let workers = match spread {
        Spread::Off => 1,
        Spread::Auto | Spread::Stir => {
            u16::try_from(worker_context.peers.count()).unwrap_or(u16::MAX)
        }
    };
    let room = match (spec.max_namespaces, &worker_context.options.daemon) {
        (Some(max), _) => max,
        (None, Some(_)) => DAEMON_NAMESPACES,
        (None, None) if pool.is_some() => DAEMON_NAMESPACES,
        (None, None) => 0,
    };
    worker_context.opener.subsystems.served(spec);
    let subsystem = subsystem.map(|subsystem| subsystems::place(spec, subsystem));
    let config = ControllerConfig {
        subsystem: subsystem.transpose()?,
        pool: pool.map(|pool| pool as Arc<dyn NamespacePool>),
        boot,
        workers,
        max_namespaces: room,
        ..controller_config(spec, serial)
    };
    let mut memories = MemoryCache::with_limits(worker_context.options.clients.memory);
    let made = ControllerParts {
        id,
        config,
        namespaces,
        io,
        page,
    };
    let (mut controller, survival) = match survival {
        Some(survival) => made.survive(survival, &mut memories, &listener)?,
        None => (made.controller()?, None),
    };
    let max_transfer = 4096 << controller.config().mdts;
    for ((ns, direct), (nsid, block_size)) in spec.namespaces.iter().zip(directs).zip(blocks) {
        let Some(direct) = direct else {
            continue;
        };
        let path = check_block_size(&direct, block_size).and_then(|()| {
            DirectPath::new(
                &direct,
                nsid,
                &spec.socket,
                max_transfer,
                paths,
                io.watcher(),
            )
        });
        match path {
            Ok(path) => {
                controller.set_passthrough(nsid, Box::new(path));
            }
            Err(error) if ns.path == Some(PathChoice::Direct) => {
                return Err(error.context(format!("{}: path=direct", ns.volume)));
            }
            Err(error) => {
                tracing::info!(volume = %ns.volume, %error, "using the generic path");
            }
        }
    }
    Ok(ServedController {
        controller,
        listener,
        intake,
        backends,
        spread,
        resized,
        limits: worker_context.options.clients,
        memories,
        survival,
    })
}
