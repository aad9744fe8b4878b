//! From what a user named to an opened volume, for every worker and every way to serve it.

use crate::direct::{Direct, PathChoice};
use crate::limits::LimitRegistry;
use crate::spec::NamespaceSpec;
use anyhow::{Context, Result, ensure};
use driver::{Device, NvmeVolume, Place, Target};
use mediate::Slice;
use std::sync::{Arc, Mutex, PoisonError};
use volume::{Extras, OpenOptions, Volume, open_url};

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
    devices: Mutex<Vec<(Place, Device)>>,
}

impl Opener {
    pub fn new(limits: LimitRegistry) -> Self {
        Self {
            limits,
            devices: Mutex::default(),
        }
    }

    /// Opens the volume of a namespace.
    pub fn open(&self, spec: &NamespaceSpec) -> Result<Opened> {
        let url = &spec.volume;
        let opened = if url.starts_with("nvme://") || url.starts_with("vfio-user://") {
            self.open_device(spec)?
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
        if let Some(limits) = opened.volume.limits() {
            self.limits.enter(url, limits);
        }
        tracing::info!(volume = url, "{}", opened.volume.info().description);
        Ok(opened)
    }

    fn open_device(&self, spec: &NamespaceSpec) -> Result<Opened> {
        let url = &spec.volume;
        let (whole, extras) = Extras::split(url)?;
        let target = Target::parse(&whole)?;
        let (read_only, name) = (spec.read_only || target.read_only, target.name());
        let device = self.device(&target)?;
        let below = NvmeVolume::new(device.clone(), target.nsid, target.queue, read_only, name)
            .with_context(|| url.clone())?;
        let below = Arc::new(below);
        let volume = extras.apply(below.clone(), url)?;
        let direct = if extras.is_limited() {
            ensure!(
                spec.path != Some(PathChoice::Direct),
                "{url}: limits and weights are kept on the generic path only"
            );
            None
        } else {
            Some(direct(spec, device, &target, &*volume, read_only)?)
        };
        Ok(Opened {
            volume,
            device: Some(below),
            direct,
        })
    }

    /// The device, opened when it is first asked for.
    fn device(&self, target: &Target) -> Result<Device> {
        // Another worker that panicked while it held the lock left a whole list.
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, device)) = devices.iter().find(|(place, _)| *place == target.place) {
            return Ok(device.clone());
        }
        let device = target.open()?;
        devices.push((target.place.clone(), device.clone()));
        Ok(device)
    }
}

/// The direct path to the same blocks that the volume stands on.
fn direct(
    spec: &NamespaceSpec,
    device: Device,
    target: &Target,
    volume: &dyn Volume,
    read_only: bool,
) -> Result<Direct> {
    let namespace = device.namespace(target.nsid)?;
    let block = u64::from(namespace.block_size());
    let extent = volume.extent().context("the volume has no place")?;
    let first = extent.offset / block;
    let rest = namespace.blocks.saturating_sub(first);
    let blocks = extent.len.map_or(rest, |len| len / block);
    Ok(Direct {
        slice: Slice::new(&namespace, first, blocks, read_only)?,
        device,
        depth: target.queue.depth,
        choice: spec.path.unwrap_or(PathChoice::Direct),
    })
}
