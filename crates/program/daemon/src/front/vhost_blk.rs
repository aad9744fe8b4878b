//! `vhost-user-blk` exports: a volume for a guest with a virtio driver.

use crate::keep::KeptSocket;
use crate::open::prepare::OpenExport;
use crate::open::{OpenedVolume, Opener};
use crate::parts::vhost_blk::{Attach, Backend, DiskOptions, Export};
use crate::registry::guarded_list::ListEntry;
use crate::registry::sizes::Sizes;
use crate::registry::{Registry, VhostBlkEntry};
use crate::serve::peers::{Assignment, FixedCounter};
use anyhow::{Context as _, Result};
use config::volumes::is_within;
use dma::MemoryLimits;
use driver::NvmeVolume;
use probes::LogLimit;
use receive::Intake;
use rustix::net::UCred;
use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vfio_user::Listener;
use worker::{ConnectRate, Context};

/// Limits that apply to every front-end of the vhost-user-blk exports.
pub struct FrontEnds {
    /// Limits of each front-end's memory files.
    pub memory: MemoryLimits,
    /// Maximum rate of connections to each socket.
    pub connects: ConnectRate,
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
    _entry: ListEntry<VhostBlkEntry>,
    kept: Option<(FixedCounter, Assignment)>,
    serial: String,
}

impl VhostBlk {
    /// Creates the export on the worker that serves it.
    pub fn new(
        open: OpenExport,
        max_in_flight: usize,
        clients: &FrontEnds,
        context: &Context<'_>,
        opener: &Opener,
        registry: &Registry,
        sizes: &Sizes,
    ) -> Result<Self> {
        let OpenExport {
            spec,
            kept: kept_socket,
            listener,
            socket,
            intake,
            volume,
            span,
            resized,
            shown,
        } = open;
        let _entered = span.clone().entered();
        let OpenedVolume {
            volume,
            device,
            block_size,
            ..
        } = volume.open(opener)?;
        let serial = shown.serial;
        let defaults = DiskOptions::default();
        let disk = DiskOptions {
            serial,
            queues: spec.queues.unwrap_or(defaults.queues),
            queue_size: spec.queue_size.unwrap_or(defaults.queue_size),
            block_size,
            write_cache: spec.write_cache.unwrap_or(defaults.write_cache),
        };
        let serial = disk.serial.clone();
        let resized = if is_within(&spec.namespace.volume) {
            None
        } else {
            sizes.watch(&volume, &resized);
            Some(resized)
        };
        let export = Export {
            volume,
            disk,
            listener: socket,
            max_in_flight,
            memory: clients.memory,
            connects: clients.connects,
            intake: Some(intake),
            attach: device.map(attach),
            resized,
            span,
        };
        let backend =
            Backend::new(export, context).with_context(|| spec.namespace.volume.clone())?;
        let entry = registry.enter_vhost_blk(&spec.socket, backend.stats());
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
    /// Stores registrations that end together with the export.
    pub fn keep(&mut self, fixed: FixedCounter, assignment: Assignment) {
        self.kept = Some((fixed, assignment));
    }

    /// Returns the serial number of the disk.
    pub fn serial(&self) -> &String {
        &self.serial
    }

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
