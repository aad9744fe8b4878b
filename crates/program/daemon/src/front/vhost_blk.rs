//! `vhost-user-blk` exports: a volume for a guest with a virtio driver.

use super::kind::{AddedFrontend, FrontEnd, ListeningDisk, Ready, ReadyDisk, RingUse, Seat};
use super::{Front, Worker};
use crate::confine::descriptors::SOCKET;
use crate::keep::{KeptSocket, LeftSocket};
use crate::open::prepare::{ListenContext, Prepared, event};
use crate::open::{OpenedVolume, Opener};
use crate::parts::vhost_blk::{self, Attach, Backend, DiskOptions, Export};
use crate::record::{self, Guest, Shown};
use crate::registry::Registry;
use crate::registry::counters::{CountedDisk, Counters, socket_counters};
use crate::registry::guarded_list::ListEntry;
use crate::registry::snapshot::SnapshotBuilder;
use crate::serve::peers::{Assignment, FixedCounter};
use crate::serve::worker_context::WorkerContext;
use anyhow::{Context as _, Result};
use config::choices::Spread;
use config::disk::VhostBlkSpec;
use config::volumes::{self, is_within};
use control::api::{DiskKind, Stats, VhostBlkCounters, VhostBlkQueueCounters};
use driver::NvmeVolume;
use metrics::{Namespace, Queue};
use probes::LogLimit;
use receive::Intake;
use rustix::net::UCred;
use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::slice;
use std::sync::Arc;
use vfio_user::Listener;
use worker::Context;

/// Requests of one export that may be with its volume, where the worker's ring has room for all.
const IN_FLIGHT: usize = 1024;
/// Default number of request queues of an export; the next constant is the number of descriptors of
/// each.
const QUEUES: u64 = 128;
const QUEUE: u64 = 3;
/// Number of descriptors reserved for those that a front-end sends in an incomplete message.
const INCOMPLETE_REQUEST: u64 = 32;

impl FrontEnd for VhostBlkSpec {
    fn is_built(&self) -> bool {
        cfg!(feature = "vhost-user-blk")
    }

    fn descriptors(&self) -> u64 {
        let queues = self.queues.map_or(QUEUES, u64::from);
        SOCKET + INCOMPLETE_REQUEST + queues * QUEUE
    }

    fn max_workers(&self, _: Spread) -> usize {
        1
    }

    fn ring_use(&self, _: Spread) -> RingUse {
        RingUse {
            own: IN_FLIGHT,
            ..RingUse::default()
        }
    }

    fn open(&self, opener: &Opener) -> Result<Ready> {
        let spec = self;
        let span = tracing::error_span!("export", socket = %spec.socket.display());
        let entered = span.clone().entered();
        let name = spec.any_name();
        // A front-end that had the export connects again: nobody else knows whether there is one.
        let guest = Guest {
            is_attached: opener.keeper.is_successor()
                && opener.keeper.export_listens_at(&spec.socket),
            shown: None,
        };
        opener.records.begin(&name, guest);
        let volume = if spec.incoming.unwrap_or(false) {
            Prepared::incoming(spec.namespace.clone(), (name.clone(), 1), opener)
        } else {
            Prepared::new(spec.namespace.clone(), (name.clone(), 1), opener)
        };
        let volume = spec.origin.place("volume", volume)?;
        let shown = opener.records.settle(&record::OpenDisk {
            name: &name,
            kind: "vhost-user-blk",
            subsystem: None,
            serial: spec.serial.as_deref(),
            subnqn: None,
            files: Vec::new(),
            namespaces: vec![volume.recorded()],
        })?;
        drop(entered);
        let ready = ReadyExport {
            spec: spec.clone(),
            volume,
            span,
            shown,
        };
        Ok(Ready::Listener(Box::new(ready)))
    }

    fn say_listening(&self, serial: &str) {
        let span = tracing::error_span!("export", socket = %self.socket.display());
        span.in_scope(|| tracing::info!(serial, "listening for vhost-user-blk"));
    }
}

/// vhost-user-blk export with an open volume, before its socket is created.
struct ReadyExport {
    spec: VhostBlkSpec,
    volume: Prepared,
    /// Span that names the export in log messages.
    span: tracing::Span,
    /// Identifiers of the disk as the guest sees them.
    shown: Shown,
}

impl ReadyDisk for ReadyExport {
    fn listen(
        self: Box<Self>,
        context: &ListenContext<'_>,
        _workers: usize,
    ) -> Result<Box<dyn ListeningDisk>> {
        let spec = &self.spec;
        let keeper = &context.opener.keeper;
        let left = keeper.left_socket(&spec.socket);
        let kept = left.as_ref().and_then(LeftSocket::listener);
        let listener = context.bind(&spec.socket, &spec.access, &spec.origin, kept)?;
        let kept = KeptSocket::new(keeper, &listener, left);
        let remote = volumes::remote(&spec.namespace.volume);
        if keeper.is_kept() && remote.is_some_and(|kind| !kind.is_fenced()) {
            let volume = spec.namespace.volume.to_string();
            tracing::warn!(
                volume,
                "should this process be killed, what it was sending may arrive later than what the \
                 next one sends"
            );
        }
        let socket = listener.as_fd().try_clone_to_owned().context("socket")?;
        let mut intake = vhost_blk::intake(context.receiver);
        intake.connect(socket.as_fd()).context("receiver")?;
        Ok(Box::new(OpenExport {
            kept,
            listener,
            socket,
            intake,
            resized: event()?,
            ready: *self,
        }))
    }
}

/// vhost-user-blk export with an open socket and an open volume.
struct OpenExport {
    /// Registration of the listening socket with the keeper, as long as the export is served.
    kept: Option<KeptSocket>,
    /// Listening socket. Dropping it removes the socket's file.
    listener: Listener,
    /// Duplicate of the listening socket's descriptor.
    socket: OwnedFd,
    /// Connection to the receiver process, which receives descriptors from clients.
    intake: Intake,
    /// Eventfd that becomes readable when the volume was resized.
    resized: Arc<OwnedFd>,
    ready: ReadyExport,
}

impl ListeningDisk for OpenExport {
    fn volumes(&self) -> &[Prepared] {
        slice::from_ref(&self.ready.volume)
    }

    fn resized(&self) -> Arc<OwnedFd> {
        self.resized.clone()
    }

    fn needs_ring(&self) -> bool {
        self.ready.volume.needs_ring()
    }

    fn serve(
        self: Box<Self>,
        worker: &mut Worker,
        seat: Seat,
        worker_context: &WorkerContext,
    ) -> Result<AddedFrontend> {
        let spec = &self.ready.spec;
        let (socket, origin) = (spec.socket.clone(), spec.origin.clone());
        let in_flight = IN_FLIGHT / seat.crowding;
        let mut serial = String::new();
        let added = worker.add(|context| {
            let export = VhostBlk::new(*self, in_flight, context, worker_context);
            let mut export = origin.place("", export)?;
            serial.clone_from(&export.serial);
            let stats = export.stats();
            let requests = move || stats.queues.iter().map(|queue| queue.requests.get()).sum();
            let fixed = worker_context.peers.enter_fixed(seat.worker, requests);
            export.kept = Some((fixed, seat.assignment));
            Ok::<_, anyhow::Error>(Front::VhostBlk(Box::new(export)))
        })?;
        AddedFrontend::new(worker, added, &socket, serial)
    }
}

/// Counters of an export.
struct CountedExport(Arc<vhost_blk::Stats>);

impl Counters for CountedExport {
    fn kind(&self) -> DiskKind {
        DiskKind::VhostUserBlk
    }

    fn is_incoming(&self) -> bool {
        self.0.is_incoming()
    }

    fn metrics(
        &self,
        address: &Path,
        _registry: &Registry,
        numbers: &mut SnapshotBuilder<'_>,
    ) -> metrics::Disk {
        let mut namespace = Namespace::new(1);
        namespace.volume = numbers.described.volume(address, 1);
        for queue in &self.0.queues {
            namespace.add(&queue.io, numbers.ns_per_cycle);
        }
        let queues = (0..).zip(&self.0.queues).map(|(id, queue)| Queue {
            id,
            completions: queue.io.all_operations(),
            commands: queue.requests.get(),
            mmio_doorbells: queue.kicks.get(),
            arms: queue.arms.get(),
            interrupts: queue.notifications.get(),
            ..Queue::default()
        });
        let used = |queue: &Queue| queue.commands.saturating_add(queue.mmio_doorbells) > 0;
        metrics::Disk {
            name: numbers.name(address),
            kind: self.kind().to_string(),
            address: address.display().to_string(),
            connected: self.0.is_connected(),
            connections: self.0.connections.get(),
            namespaces: vec![namespace],
            queues: queues.filter(used).collect(),
            ..metrics::Disk::default()
        }
    }

    fn add_to(&self, stats: &mut Stats, address: &Path, registry: &Registry) {
        let queue = |(queue, q): (usize, &vhost_blk::QueueStats)| VhostBlkQueueCounters {
            queue,
            requests: q.requests.get(),
            bytes_read: q.io.bytes_read().get(),
            bytes_written: q.io.bytes_written().get(),
            errors: q.io.all_failures(),
            kicks: q.kicks.get(),
            arms: q.arms.get(),
            notifications: q.notifications.get(),
        };
        stats.vhost_user_blk.push(VhostBlkCounters {
            name: registry.described.name(address),
            socket: address.display().to_string(),
            connected: self.0.is_connected(),
            clients: socket_counters(&self.0.accepts),
            connections: self.0.connections.get(),
            resubmitted: self.0.resubmitted.get(),
            queues: self
                .0
                .queues
                .iter()
                .enumerate()
                .map(queue)
                .filter(|q| q.requests + q.kicks > 0)
                .collect(),
        });
    }
}

/// vhost-user-blk export that a worker serves.
pub struct VhostBlk {
    /// Kept listening socket, for as long as the export is served. This field is dropped first.
    kept_socket: Option<KeptSocket>,
    /// Listener; its drop removes the socket's file. It is closed before the back-end's
    /// connection to the receiver process: the last to close it also closes clients that wait to be
    /// accepted.
    file: Listener,
    backend: Backend,
    _entry: ListEntry<CountedDisk>,
    kept: Option<(FixedCounter, Assignment)>,
    serial: String,
}

impl VhostBlk {
    /// Creates the export on the worker that serves it.
    fn new(
        open: OpenExport,
        max_in_flight: usize,
        context: &Context<'_>,
        worker_context: &WorkerContext,
    ) -> Result<Self> {
        let OpenExport {
            kept: kept_socket,
            listener,
            socket,
            intake,
            resized,
            ready,
        } = open;
        let ReadyExport {
            spec,
            volume,
            span,
            shown,
        } = ready;
        let _entered = span.clone().entered();
        let OpenedVolume {
            volume,
            device,
            block_size,
            ..
        } = volume.open(worker_context, &resized)?;
        let serial = shown.serial;
        let defaults = DiskOptions::default();
        let disk = DiskOptions {
            serial,
            queues: spec.queues.unwrap_or(defaults.queues),
            queue_size: spec.queue_size.unwrap_or(defaults.queue_size),
            block_size,
            write_cache: spec.write_cache.unwrap_or(defaults.write_cache),
            lock_timeout: defaults.lock_timeout,
        };
        let serial = disk.serial.clone();
        let export = Export {
            volume,
            disk,
            listener: socket,
            max_in_flight,
            memory: worker_context.options.clients.memory,
            connects: worker_context.options.clients.connects,
            intake: Some(intake),
            attach: device.map(attach),
            resized: (!is_within(&spec.namespace.volume)).then_some(resized),
            span,
        };
        let backend =
            Backend::new(export, context).with_context(|| spec.namespace.volume.clone())?;
        let counted = CountedExport(backend.stats());
        let entry = worker_context.registry.enter(&spec.socket, counted);
        Ok(VhostBlk {
            backend,
            _entry: entry,
            kept: None,
            serial,
            kept_socket,
            file: listener,
        })
    }
}

impl VhostBlk {
    /// Returns the parts that need not be closed on the worker's thread, in the order of their
    /// drop.
    pub fn into_remains(self) -> (Option<KeptSocket>, Listener, (OwnedFd, Intake)) {
        (self.kept_socket, self.file, self.backend.into_sockets())
    }

    /// Returns whether a front-end is connected.
    pub fn has_client(&self) -> bool {
        self.backend.stats().is_connected()
    }

    /// Returns process and user of the front-end at the time of its connect.
    pub fn client(&self) -> Option<UCred> {
        self.backend.peer()
    }
}

impl Deref for VhostBlk {
    type Target = Backend;

    fn deref(&self) -> &Backend {
        &self.backend
    }
}

impl DerefMut for VhostBlk {
    fn deref_mut(&mut self) -> &mut Backend {
        &mut self.backend
    }
}

/// Returns a function that registers each client's memory with the device below the volume.
fn attach(device: Arc<NvmeVolume>) -> Box<dyn Fn() -> Attach> {
    let copied = Arc::new(LogLimit::default());
    Box::new(move || {
        let (device, copied) = (device.clone(), copied.clone());
        Box::new(move |memory| match device.register(memory) {
            Ok(registration) => Some(Box::new(registration) as Box<dyn Any>),
            Err(error) => {
                copied.line(|left_out| {
                    let text = "guest memory is copied on its way to a device";
                    tracing::warn!(%error, left_out, "{text}");
                });
                None
            }
        })
    })
}
