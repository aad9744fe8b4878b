//! `vnvme serve`: from a specification to running controllers.

use crate::identity;
use crate::signals::stop_descriptor;
use crate::spec::{ControllerSpec, DoorbellMode, NamespaceSpec, hex};
use crate::worker::{Served, Worker, WorkerOptions};
use anyhow::{Context, Result, ensure};
use controller::{Controller, ControllerConfig, NamespaceConfig};
use std::sync::Arc;
use std::time::Duration;
use vfio_user::Listener;
use volume::{Io, IoOptions, OpenOptions, Volume, open_url};

/// Options of the whole process.
pub struct ServeOptions {
    /// How long to poll after the last work.
    pub idle_window: Duration,
}

fn open_volume(spec: &NamespaceSpec) -> Result<Arc<dyn Volume>> {
    let options = OpenOptions {
        read_only: spec.read_only,
        block_size: spec.block_size,
        ..OpenOptions::default()
    };
    let volume = open_url(&spec.volume, options)?;
    tracing::info!(volume = spec.volume, "{}", volume.info().description);
    Ok(volume)
}

/// A namespace's block size: what was asked for, else what the volume wants, 512 bytes at least.
fn block_size(spec: &NamespaceSpec, volume: &dyn Volume) -> u32 {
    spec.block_size
        .unwrap_or_else(|| volume.info().block_size.max(512))
}

fn config(spec: &ControllerSpec, serial: String) -> ControllerConfig {
    let default = ControllerConfig::default();
    ControllerConfig {
        model: spec.model.clone().unwrap_or(default.model),
        serial,
        firmware: spec.firmware.clone().unwrap_or(default.firmware),
        subnqn: spec.subnqn.clone(),
        io_queues: spec.io_queues.unwrap_or(default.io_queues),
        queue_entries: spec.queue_entries.unwrap_or(default.queue_entries),
        mdts: spec.mdts.unwrap_or(default.mdts),
        mapped_doorbells: spec.doorbells == DoorbellMode::Mapped,
        shadow_doorbells: spec.shadow_doorbells,
        write_cache: spec.write_cache,
        ..ControllerConfig::default()
    }
}

fn controller(id: u16, spec: &ControllerSpec, io: &Io) -> Result<Controller> {
    ensure!(!spec.namespaces.is_empty(), "no volume to serve");
    let volumes = spec
        .namespaces
        .iter()
        .map(open_volume)
        .collect::<Result<Vec<_>>>()?;
    let ids: Vec<Vec<u8>> = volumes.iter().map(|v| v.id()).collect();
    let serial = spec
        .serial
        .clone()
        .unwrap_or_else(|| identity::serial(&ids));
    let mut namespaces = Vec::new();
    for (i, (ns, volume)) in spec.namespaces.iter().zip(volumes).enumerate() {
        let nsid = ns.nsid.unwrap_or(i as u32 + 1);
        let id = volume.id();
        namespaces.push(NamespaceConfig {
            nsid,
            block_size: block_size(ns, &*volume),
            read_only: ns.read_only,
            nguid: match &ns.nguid {
                Some(text) => hex("nguid", text)?,
                None => identity::nguid(&serial, nsid, &id),
            },
            eui64: match &ns.eui64 {
                Some(text) => hex("eui64", text)?,
                None => identity::eui64(&serial, nsid, &id),
            },
            volume,
        });
    }
    Ok(Controller::new(id, config(spec, serial), namespaces, io)?)
}

/// Serves until SIGTERM or SIGINT.
pub fn serve(specs: &[ControllerSpec], options: &ServeOptions) -> Result<()> {
    let stop = stop_descriptor()?;
    let in_flight = u32::from(ControllerConfig::default().max_in_flight) * specs.len() as u32;
    let io = Io::new(IoOptions {
        capacity: in_flight.clamp(512, 16384),
        ..IoOptions::default()
    });
    let mut served = Vec::new();
    for (id, spec) in specs.iter().enumerate() {
        let id = u16::try_from(id).context("too many controllers")?;
        // The socket comes first: whoever serves it already has the volumes, too, and is the better explanation.
        let listener = Listener::bind(&spec.socket)?;
        let controller = controller(id, spec, &io)?;
        served.push(Served {
            controller,
            listener,
        });
    }
    for (spec, served) in specs.iter().zip(&served) {
        tracing::info!(
            socket = %spec.socket.display(),
            serial = served.controller.config().serial,
            namespaces = spec.namespaces.len(),
            "listening"
        );
    }
    Worker::new(
        served,
        io,
        stop,
        WorkerOptions {
            idle_window: options.idle_window,
        },
    )?
    .run()
}
