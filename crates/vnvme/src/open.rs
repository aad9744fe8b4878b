//! From what a user named to an opened volume, for every worker and every way to serve it.

use crate::devices::DeviceRegistry;
use crate::direct::{Direct, PathChoice};
use crate::give_back::Watch;
use crate::limits::LimitRegistry;
use crate::spec::NamespaceSpec;
use anyhow::{Context, Result, ensure};
use controller::{Controller, ControllerConfig, NamespaceConfig};
use driver::{Device, NvmeVolume, Options, Place, QueueOptions, Target};
use in_process::{self, Host};
use mediate::Slice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use volume::{Extras, Io, IoOptions, OpenOptions, Volume, open_url};

/// An opened volume.
pub struct Opened {
    pub volume: Arc<dyn Volume>,
    /// The device below, if it is one that reaches guest memory itself.
    pub device: Option<Arc<NvmeVolume>>,
    /// The direct path to it, if that is possible.
    pub direct: Option<Direct>,
}

/// Opens volumes for all workers of the process, so that they share what can be opened only once: a device, however many
/// of its namespaces and slices are served, and by whichever worker.
pub struct Opener {
    /// Where limits of volumes are entered, to be changed.
    limits: LimitRegistry,
    /// Where devices are entered, to be suspended and resumed.
    registry: DeviceRegistry,
    devices: Mutex<Vec<(Place, Device, Option<Watch>)>>,
}

impl Opener {
    pub fn new(limits: LimitRegistry, registry: DeviceRegistry) -> Self {
        Self {
            limits,
            registry,
            devices: Mutex::default(),
        }
    }

    /// Opens the volume of a namespace.
    pub fn open(&self, spec: &NamespaceSpec) -> Result<Opened> {
        let url = &spec.volume;
        let opened = if url.starts_with("nvme://") || url.starts_with("vfio-user://") {
            self.open_device(spec)?
        } else if is_within(url) {
            open_within(spec)?
        } else {
            let options = OpenOptions {
                read_only: spec.read_only,
                block_size: spec.block_size,
            };
            Opened {
                volume: open_url(url, options)?,
                device: None,
                direct: None,
            }
        };
        self.limits.enter(url, &*opened.volume);
        tracing::info!(volume = url, "{}", opened.volume.info().description);
        Ok(opened)
    }

    fn open_device(&self, spec: &NamespaceSpec) -> Result<Opened> {
        let url = &spec.volume;
        let (whole, extras) = Extras::split(url)?;
        let target = Target::parse(&whole)?;
        let (read_only, name) = (spec.read_only || target.read_only, target.name());
        let device = self.device(&target)?;
        let below = Below {
            device,
            nsid: target.nsid,
            queue: target.queue,
            read_only,
            name,
        };
        below.open(spec, &extras)
    }

    /// The device, opened when it is first asked for.
    fn device(&self, target: &Target) -> Result<Device> {
        // Another worker that panicked while it held the lock left a whole list.
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, device, _)) = devices.iter().find(|(place, ..)| *place == target.place) {
            return Ok(device.clone());
        }
        let device = target.open()?;
        let watch = Watch::start(&device, &target.name()).unwrap_or_else(|error| {
            tracing::warn!(device = target.name(), %error, "requests for the device are not heard");
            None
        });
        self.registry.enter(&device_name(&target.place), &device);
        devices.push((target.place.clone(), device.clone(), watch));
        Ok(device)
    }
}

/// A device's URL, without a namespace.
fn device_name(place: &Place) -> String {
    match place {
        Place::Pci(bdf) => format!("nvme://{bdf}"),
        Place::Socket(path) => format!("vfio-user://{}", path.display()),
    }
}

/// Before the URL of a volume: that volume behind a controller in the thread that opens it, which is driven like a device.
const WITHIN: &str = "controller+";

/// The volume is behind a controller in the thread that opens it: nobody else may call it.
pub fn is_within(url: &str) -> bool {
    url.starts_with(WITHIN)
}

/// A controller in this very thread, for measurements: a device without a CPU of its own.
fn open_within(spec: &NamespaceSpec) -> Result<Opened> {
    static COUNT: AtomicU64 = AtomicU64::new(1);
    let (whole, extras) = Extras::split(&spec.volume)?;
    let inner = whole.strip_prefix(WITHIN).unwrap_or(&whole);
    let volume = open_url(inner, OpenOptions::default())?;
    let namespace = NamespaceConfig {
        nsid: 1,
        block_size: volume.info().block_size.max(512),
        read_only: volume.info().read_only,
        nguid: [1; 16],
        eui64: [1; 8],
        volume,
    };
    let io = Io::new(IoOptions::default());
    let config = ControllerConfig {
        mapped_doorbells: true,
        shadow_doorbells: false,
        ..ControllerConfig::default()
    };
    let controller = Controller::new(0, config, vec![namespace], &io)?;
    let transport = in_process::local(Host::new(controller, io)?);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let below = Below {
        device: Device::open(transport, Options::default())?,
        nsid: 1,
        // It works only while this thread polls.
        queue: QueueOptions {
            interrupts: false,
            ..QueueOptions::default()
        },
        read_only: spec.read_only,
        name: format!("{whole}, number {number}"),
    };
    below.open(spec, &extras)
}

/// A namespace of a device.
struct Below {
    device: Device,
    nsid: u32,
    queue: QueueOptions,
    read_only: bool,
    name: String,
}

impl Below {
    fn open(self, spec: &NamespaceSpec, extras: &Extras) -> Result<Opened> {
        let Self {
            device,
            nsid,
            queue,
            read_only,
            name,
        } = self;
        let url = &spec.volume;
        let below = NvmeVolume::new(device.clone(), nsid, queue, read_only, name)
            .with_context(|| url.clone())?;
        let below = Arc::new(below);
        let volume = extras.apply(below.clone(), url)?;
        if extras.is_limited() {
            ensure!(
                spec.path != Some(PathChoice::Direct),
                "{url}: limits and weights are kept on the generic path only"
            );
            return Ok(Opened {
                volume,
                device: Some(below),
                direct: None,
            });
        }
        // The same blocks that the volume stands on.
        let namespace = device.namespace(nsid)?;
        let block = u64::from(namespace.block_size());
        let extent = volume.extent().context("the volume has no place")?;
        let first = extent.offset / block;
        let rest = namespace.blocks.saturating_sub(first);
        let blocks = extent.len.map_or(rest, |len| len / block);
        let direct = Direct {
            slice: Slice::new(&namespace, first, blocks, read_only)?,
            device,
            depth: queue.depth,
            interrupts: queue.interrupts,
            choice: spec.path.unwrap_or(PathChoice::Direct),
        };
        Ok(Opened {
            volume,
            device: Some(below),
            direct: Some(direct),
        })
    }
}
