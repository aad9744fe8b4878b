//! NVMe controllers over vfio-user as a kind of disk: opening, state that outlives the process, and
//! the controller that the front-end ([`NvmeFront`]) serves.

use super::kind::{AddedFrontend, FrontEnd, ListeningDisk, Ready, ReadyDisk, RingUse, Seat};
use super::live::HandOver;
use super::{Front, NvmeFront, ServedController, Worker, intake};
use crate::confine::descriptors::SOCKET;
use crate::keep::{
    ControllerParts, Identity, InitialDescriptors, KeeperSession, PreviousDisk, Survival,
};
use crate::open::direct::{DirectPath, check_block_size, cycles};
use crate::open::pools::DiskPool;
use crate::open::prepare::{ListenContext, Prepared, event};
use crate::open::{Opener, subsystems};
use crate::record::{self, Shown};
use crate::registry::Registry;
use crate::registry::counters::{Counters, socket_counters};
use crate::registry::snapshot::SnapshotBuilder;
use crate::serve::worker_context::{WorkerContext, namespace_config};
use anyhow::{Context, Result, anyhow};
use config::choices::{PathChoice, Spread};
use config::disk::{ControllerSpec, Disk, DoorbellMode};
use config::identity;
use config::spec::{MAX_WORKERS, NamespaceSpec};
use control::api::{self, ControllerCounters, DiskKind, QueueCounters, Stats};
use controller::{
    BootImage, ControllerConfig, ControllerStats, DEFAULT_IO_QUEUES, DoorbellPage, Formats,
    MAX_BOOT_IMAGE, NamespaceConfig, NamespacePool, QueueStats, Subsystem,
};
use dma::MemoryCache;
use metrics::{Namespace, Queue};
use receive::Intake;
use rustix::fs::OFlags;
use sandbox::Needs;
use state_memory::Layout;
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vfio_user::wire::MAX_MSG_FDS;
use vfio_user::{Journal, Listener};
use volume::{Extras, Io};
use worker::AcceptStats;

/// Default of the largest NSID, for controllers of a daemon and controllers with a pool.
const DAEMON_NAMESPACES: u32 = 16;

/// Number of descriptors reserved for those that a controller's client sends in incomplete
/// messages.
const INCOMPLETE: u64 = 3 * MAX_MSG_FDS as u64;

impl FrontEnd for ControllerSpec {
    fn descriptors(&self) -> u64 {
        // A vector for each queue pair, including the Admin queue's, and the pin.
        let vectors = u64::from(self.io_queues.unwrap_or(DEFAULT_IO_QUEUES)) + 2;
        SOCKET + INCOMPLETE + vectors
    }

    fn max_workers(&self, spread: Spread) -> usize {
        match spread {
            Spread::Off => 1,
            Spread::Auto | Spread::Stir => usize::from(MAX_WORKERS),
        }
    }

    fn ring_use(&self, spread: Spread) -> RingUse {
        let requests = usize::from(ControllerConfig::default().max_in_flight);
        let (own, everywhere) = match spread {
            Spread::Off => (requests, 0),
            Spread::Auto | Spread::Stir => (0, requests),
        };
        RingUse {
            own,
            everywhere,
            is_early: false,
        }
    }

    fn add_needs(&self, needs: &mut Needs, keeper: &KeeperSession) {
        // A client that maps the doorbell page or a controller memory buffer gets an open file of
        // its own (vfio-user's witness).
        let maps = self.doorbells == Some(DoorbellMode::Mapped) || self.cmb_size.is_some();
        needs.reopen |= keeper.is_kept() && maps;
    }

    fn check_files(&self) -> Result<()> {
        boot_image(self).map(drop)
    }

    fn open(&self, opener: &Opener) -> Result<Ready> {
        let spec = self;
        let name = spec.any_name();
        let guest = opener.keeper.client_of(&Identity::of(spec));
        let guest_shown = guest.shown.clone();
        opener.records.begin(&name, guest.clone());
        // A namespace of a subsystem is opened under the subsystem's name.
        opener.records.begin(&subsystems::memory_owner(spec), guest);
        let subsystem = opener.subsystems.of(spec, &opener.keeper);
        // A client of the previous process goes on at once, so that the disk had the lock.
        let is_incoming = spec.incoming.unwrap_or(false) && guest_shown.is_none();
        let volumes = spec.namespaces.iter().zip(1..).map(|(namespace, place)| {
            let nsid = namespace.nsid.unwrap_or(place);
            let of = (spec.any_name(), nsid);
            if is_incoming {
                let opened = Prepared::incoming(namespace.clone(), of, opener);
                return namespace.origin.place("volume", opened);
            }
            let opened = match &subsystem {
                Some(subsystem) => subsystems::open(opener, subsystem, spec, namespace, nsid)
                    .map(|opened| Prepared::opened(namespace.clone(), of, opened)),
                None => Prepared::new(namespace.clone(), of, opener),
            };
            namespace.origin.place("volume", opened)
        });
        let volumes: Vec<Prepared> = volumes.collect::<Result<_>>()?;
        let (pool, boot) = (opener.open_pool(spec)?, boot_image(spec)?);
        let shown = opener.records.settle(&record::OpenDisk {
            name: &name,
            kind: "controller",
            subsystem: spec.subsystem.as_deref(),
            serial: spec.serial.as_deref(),
            subnqn: spec.subnqn.as_deref(),
            files: spec.own_files(),
            namespaces: volumes.iter().map(Prepared::recorded).collect(),
        })?;
        let ends = if volumes.iter().all(Prepared::outlives_its_process) {
            opener.subsystems.ends_with_process(spec)
        } else {
            Some("it has a namespace on a controller")
        };
        let ready = ReadyController {
            volumes,
            pool,
            boot,
            shown,
            ends,
            spec: spec.clone(),
            subsystem,
        };
        Ok(Ready::Listener(Box::new(ready)))
    }

    fn say_listening(&self, serial: &str) {
        let (socket, namespaces) = (self.socket.display(), self.namespaces.len());
        tracing::info!(%socket, serial, namespaces, "listening");
    }
}

/// Controller with open volumes, before its socket is created.
struct ReadyController {
    spec: ControllerSpec,
    volumes: Vec<Prepared>,
    /// Subsystem that the controller belongs to, if any.
    subsystem: Option<Arc<Subsystem>>,
    /// Reason why the disk ends with its process; `None` if it does not.
    ends: Option<&'static str>,
    /// Pool of the namespaces that the guest makes.
    pool: Option<Arc<DiskPool>>,
    boot: Option<BootImage>,
    shown: Shown,
}

impl ReadyDisk for ReadyController {
    fn listen(
        self: Box<Self>,
        context: &ListenContext<'_>,
        workers: usize,
    ) -> Result<Box<dyn ListeningDisk>> {
        let spec = &self.spec;
        let identity = Identity::of(spec);
        let keeper = &context.opener.keeper;
        let left = keeper.left_of(&identity);
        let kept = left.as_ref().and_then(PreviousDisk::listener);
        let listener = context.bind(&spec.socket, &spec.access, &spec.origin, kept)?;
        let mut intake = intake(context.receiver);
        intake.connect(listener.as_fd()).context("receiver")?;
        let layout = || Layout {
            session: vfio_user::SESSION,
            ..controller::state_layout(&ControllerConfig {
                workers: u16::try_from(workers).unwrap_or(u16::MAX),
                ..controller_config(spec, String::new())
            })
        };
        let (page, survival) = match self.ends {
            None => survive(keeper, &identity, left, layout, &listener)?,
            Some(why) => {
                end_with_process(keeper, &identity, left, why);
                (DoorbellPage::new()?, None)
            }
        };
        Ok(Box::new(OpenController {
            listener,
            intake,
            page,
            survival,
            resized: event()?,
            ready: *self,
        }))
    }
}

/// Reads the content of the disk's Boot Partitions, if it has any.
fn boot_image(spec: &ControllerSpec) -> Result<Option<BootImage>> {
    let read = |path: &PathBuf| {
        let what = || format!("boot partition {}", path.display());
        // A pipe would keep everybody waiting.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(path)
            .with_context(what)?;
        if !file.metadata().with_context(what)?.is_file() {
            return Err(anyhow!("{} is not a regular file", what()));
        }
        let mut bytes = Vec::new();
        let limit = MAX_BOOT_IMAGE as u64 + 1;
        file.take(limit)
            .read_to_end(&mut bytes)
            .with_context(what)?;
        BootImage::new(&bytes).with_context(what)
    };
    let read = spec.boot_partition.as_ref().map(read).transpose();
    spec.origin.place("boot-partition", read)
}

/// Controller with an open socket and open volumes.
struct OpenController {
    listener: Listener,
    /// Connection to the receiver process, which receives descriptors from clients.
    intake: Intake,
    page: DoorbellPage,
    /// State of the disk that survives this process; `None` without a keeper.
    survival: Option<Survival>,
    /// Eventfd that becomes readable when a volume was resized.
    resized: Arc<OwnedFd>,
    ready: ReadyController,
}

impl ListeningDisk for OpenController {
    fn volumes(&self) -> &[Prepared] {
        &self.ready.volumes
    }

    fn resized(&self) -> Arc<OwnedFd> {
        self.resized.clone()
    }

    fn needs_ring(&self) -> bool {
        self.volumes().iter().any(Prepared::needs_ring) || self.ready.pool.is_some()
    }

    fn serve(
        self: Box<Self>,
        worker: &mut Worker,
        seat: Seat,
        worker_context: &WorkerContext,
    ) -> Result<AddedFrontend> {
        let spec = &self.ready.spec;
        let (socket, origin, name) = (spec.socket.clone(), spec.origin.clone(), spec.any_name());
        let mut serial = String::new();
        let added = worker.add(|context| {
            let one = origin.place("", served(context.owner, *self, context.io, worker_context))?;
            let stats = one.controller.stats();
            let incoming = one.hand_over.as_ref().map(|it| it.shown.clone());
            serial.clone_from(&one.controller.config().serial);
            let mut front = NvmeFront::new(one, context, seat.worker, &worker_context.peers)
                .context("epoll")?;
            let accepts = front.accepts();
            let incoming = incoming.unwrap_or_default();
            let counted = CountedController {
                stats,
                accepts,
                incoming,
            };
            let entry = worker_context.registry.enter(&socket, counted);
            front.keep(entry, seat.assignment);
            front.tell(&worker_context.registry.events, name);
            Ok::<_, anyhow::Error>(Front::Nvme(Box::new(front)))
        })?;
        AddedFrontend::new(worker, added, &socket, serial)
    }
}

/// Counters of a controller and of the connections to it.
pub struct CountedController {
    pub stats: Arc<ControllerStats>,
    pub accepts: Arc<AcceptStats>,
    /// Whether another process may write the controller's volume.
    pub incoming: Arc<AtomicBool>,
}

impl Counters for CountedController {
    fn is_incoming(&self) -> bool {
        self.incoming.load(Ordering::Relaxed)
    }

    fn kind(&self) -> DiskKind {
        DiskKind::Controller
    }

    fn metrics(
        &self,
        address: &Path,
        registry: &Registry,
        numbers: &mut SnapshotBuilder<'_>,
    ) -> metrics::Disk {
        let direct = registry.paths.of(address);
        let mut namespaces: BTreeMap<u32, Namespace> = BTreeMap::new();
        for (nsid, record) in self.stats.namespaces() {
            // Commands to missing namespaces are listed only if there were any.
            if nsid > 0 || record.all_failures() > 0 {
                let namespace = namespaces
                    .entry(nsid)
                    .or_insert_with(|| Namespace::new(nsid));
                namespace.add(record, numbers.ns_per_cycle);
            }
        }
        for (nsid, namespace) in &mut namespaces {
            namespace.volume = numbers.described.volume(address, *nsid);
            if let Some(path) = direct.iter().find(|path| path.nsid == *nsid) {
                namespace.direct = Some(path.path == api::PathChoice::Direct);
                namespace.direct_commands = path.lanes.iter().map(|lane| lane.commands).sum();
                namespace.direct_bounced = path.lanes.iter().map(|lane| lane.bounced).sum();
            }
        }
        let queues = (0..).zip(&self.stats.queues).map(|(id, queue)| Queue {
            id,
            worker: Some(queue.worker.get()),
            // Read first, so that counters that are read later are not smaller.
            completions: queue.completions.get(),
            commands: queue.commands.get(),
            mmio_doorbells: queue.mmio_doorbells.get(),
            shadow_doorbells: queue.shadow_doorbells.get(),
            arms: queue.arms.get(),
            interrupts: queue.interrupts.get(),
        });
        let used = |queue: &Queue| queue.commands.saturating_add(queue.mmio_doorbells) > 0;
        metrics::Disk {
            name: numbers.name(address),
            kind: self.kind().to_string(),
            address: address.display().to_string(),
            connected: self.stats.connected.get() > 0,
            connections: self.accepts.accepted(),
            resets: self.stats.resets.get(),
            migrations: self.stats.migrations.get(),
            namespaces: namespaces.into_values().collect(),
            queues: queues.filter(used).collect(),
            ..metrics::Disk::default()
        }
    }

    fn add_to(&self, stats: &mut Stats, address: &Path, registry: &Registry) {
        let queue = |(qid, q): (usize, &QueueStats)| QueueCounters {
            qid,
            commands: q.commands.get(),
            completions: q.completions.get(),
            mmio_doorbells: q.mmio_doorbells.get(),
            shadow_doorbells: q.shadow_doorbells.get(),
            arms: q.arms.get(),
            interrupts: q.interrupts.get(),
            interrupt_cycles: cycles(q.interrupt_summary()),
            worker: q.worker.get(),
        };
        stats.controllers.push(ControllerCounters {
            name: registry.described.name(address),
            socket: address.display().to_string(),
            clients: socket_counters(&self.accepts),
            host_reads: self.stats.host_reads(),
            host_writes: self.stats.host_writes(),
            bytes_read: self.stats.bytes_read(),
            bytes_written: self.stats.bytes_written(),
            errors: self.stats.error_log_entries.get(),
            resets: self.stats.resets.get(),
            moves: self.stats.migrations.get(),
            queues: self
                .stats
                .queues
                .iter()
                .enumerate()
                .map(queue)
                .filter(|q| q.commands + q.mmio_doorbells > 0)
                .collect(),
            direct: registry.paths.of(address),
        });
    }
}

/// Returns a controller's doorbell page and kept state. Continues from the state of a previous
/// process if its controller has a client.
fn survive(
    keeper: &Arc<KeeperSession>,
    identity: &Identity,
    left: Option<PreviousDisk>,
    layout: impl Fn() -> Layout,
    listener: &Listener,
) -> Result<(DoorbellPage, Option<Survival>)> {
    let Some(mut keeper_client) = keeper.client() else {
        return Ok((DoorbellPage::new()?, None));
    };
    let mut before = None;
    if let Some(left) = left {
        match Journal::client_in(&left.state.session()) {
            Some(_) => match Survival::resume(keeper, left, identity, layout()) {
                Ok((survival, Some(page))) => {
                    let page = DoorbellPage::from_fd(page)?;
                    return Ok((page, Some(survival)));
                }
                Ok((survival, None)) => {
                    let left = survival.left.into_iter();
                    left.for_each(|left| left.discard(&mut keeper_client, "its page was not kept"));
                }
                Err(refused) => {
                    let (left, why) = *refused;
                    left.discard(&mut keeper_client, &format!("{why:#}"));
                }
            },
            // A client that has not sent anything yet finds the same disk as before.
            None => before = Some(left),
        }
    }
    let page = DoorbellPage::new()?;
    let first = InitialDescriptors {
        page: Some(page.as_fd()),
        listener,
        client: before.as_mut().and_then(PreviousDisk::take_client),
    };
    let made = Survival::new(keeper, identity, layout(), first);
    // Not before the client is kept as the new one's.
    if let Some(before) = before {
        before.discard(&mut keeper_client, "it was about to be accepted");
    }
    match made {
        Ok(survival) => Ok((page, Some(survival))),
        Err(error) => {
            let (disk, error) = (&identity.name, format_args!("{error:#}"));
            tracing::error!(disk, error, "this disk will not outlive its process");
            Ok((page, None))
        }
    }
}

/// Gives up the kept state of a disk, including the state that a previous process has left.
fn end_with_process(
    keeper: &KeeperSession,
    identity: &Identity,
    left: Option<PreviousDisk>,
    why: &str,
) {
    let Some(mut keeper_client) = keeper.client() else {
        return;
    };
    let disk = &identity.name;
    tracing::warn!(disk, "this disk will not outlive its process: {why}");
    if let Some(left) = left {
        left.discard(&mut keeper_client, why);
    }
}

/// Returns the configuration of a controller, as far as it does not depend on the volumes.
fn controller_config(spec: &ControllerSpec, serial: String) -> ControllerConfig {
    let own = spec.subnqn.clone();
    ControllerConfig {
        subnqn: Some(own.unwrap_or_else(|| identity::subnqn(&serial))),
        ..spec.config(serial)
    }
}

fn served(
    id: u16,
    open: OpenController,
    io: &Io,
    worker_context: &WorkerContext,
) -> Result<ServedController> {
    let OpenController {
        listener,
        intake,
        page,
        survival,
        resized,
        ready,
    } = open;
    let ReadyController {
        spec,
        volumes: prepared,
        subsystem,
        pool,
        boot,
        shown,
        ..
    } = ready;
    let spec = &spec;
    let paths = &worker_context.registry.paths;
    let opened = prepared
        .into_iter()
        .map(|volume| volume.open(worker_context, &resized))
        .collect::<Result<Vec<_>>>()?;
    let hand_over = match &*opened {
        [only] if only.volume.file_lock().is_some() && only.files.is_empty() => Some(HandOver {
            volume: only.volume.clone(),
            is_incoming: spec.incoming.unwrap_or(false),
            shown: Arc::default(),
        }),
        _ => None,
    };
    let (mut namespaces, mut backends, mut directs) = (Vec::new(), Vec::new(), Vec::new());
    for ((ns, place), mut opened) in spec.namespaces.iter().zip(1..).zip(opened) {
        backends.extend(opened.device.take());
        // The direct path does not apply with zones, placement or metadata, because this process
        // checks writes to zones, counts writes by handles, and keeps the metadata. With several
        // formats it does not apply either, because the device's blocks have one size.
        let direct = opened.direct.take();
        directs.push(direct.filter(|_| opened.files.is_empty()));
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
    let incoming = spec.incoming.unwrap_or(false);
    let spread = if limited || alone || incoming || subsystem.is_some() {
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
        hand_over,
    })
}
