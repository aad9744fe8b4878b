//! Opening of volumes from a user's options, for every worker and every kind of front-end.

pub mod devices;
pub(crate) mod direct;
pub(crate) mod host_keys;
pub(crate) mod journals;
pub(crate) mod pools;
pub(crate) mod prepare;
pub(crate) mod removal;
pub(crate) mod subsystems;

use crate::confine::Unconfined;
use crate::confine::sockets::IdleSockets;
use crate::keep::{self, KeeperSession, KeptServers};
use crate::open::devices::DeviceRegistry;
use crate::open::direct::Direct;
use crate::open::journals::Journals;
use crate::open::pools::{DiskPool, Pools};
use crate::open::removal::RemovalWatch;
use crate::open::subsystems::Subsystems;
use crate::parts::qcow2;
use crate::record::Records;
use crate::registry::limits::LimitRegistry;
use crate::registry::on_error::OnErrorRegistry;
use crate::registry::settings::Settings;
use crate::serve::options::ServeOptions;
use anyhow::{Context, Result, bail, ensure};
use config::choices::{PathChoice, SandboxMode};
use config::spec::{ControllerSpec, NamespaceSpec};
use config::volumes::{self, CONTROLLER, KINDS, Kind, ensure_decryptable, is_within};
use control::EventSender;
use controller::{Controller, ControllerConfig, NamespaceConfig};
use driver::{ControllerAddress, Device, DeviceTarget, NvmeVolume, Options, QueueOptions};
use in_process::{self, Host};
use mediate::Slice;
use namespace_files::{BlockSizes, NamespaceFiles};
use remote::{ConnectionKeeper, volume_kinds};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;
use volume::{
    BareVolume, PreviousProcess, Registry, Scheme, Volume, VolumeKind, VolumeUrl, open_url,
};
use volume::{Extras, Io, IoOptions, OnError, OnErrorVolume, OpenError, OpenOptions};

/// Opened volume of a namespace, with everything that the namespace's options add to it.
pub struct OpenedVolume {
    /// Volume that stores the blocks.
    pub volume: Arc<dyn Volume>,
    /// NVMe device of the volume, if the volume is on one and the device accesses guest memory
    /// directly.
    pub device: Option<Arc<NvmeVolume>>,
    /// Configuration of the direct path to the device, if commands can take it.
    pub direct: Option<Direct>,
    /// State of the namespace in files beside the volume.
    pub files: NamespaceFiles,
    /// Block size in bytes that is configured or recorded; `None` for the block size of the volume.
    pub block_size: Option<u32>,
}

/// The kinds of volumes that this program knows: those of `volume`, and devices, which are entered
/// in `registry`.
pub fn kinds(registry: DeviceRegistry) -> Registry<DeviceNamespace> {
    all_kinds(registry, SandboxMode::default(), Arc::default(), None)
}

fn all_kinds(
    registry: DeviceRegistry,
    sandbox: SandboxMode,
    within: Arc<InnerVolumes>,
    kept: Option<KeptServers>,
) -> Registry<DeviceNamespace> {
    let servers = registry.clone();
    let kept = kept.map(|kept| Arc::new(kept) as Arc<dyn ConnectionKeeper>);
    let devices = Arc::new(Devices {
        registry,
        sandbox,
        open: Mutex::default(),
    });
    let registry = Registry::new().with_encryption(Box::new(luks::open));
    KINDS.iter().fold(registry, |registry, kind| match kind {
        Kind::Remote(kind) => {
            let servers = servers.clone();
            let entered = move |server| servers.enter_server(server);
            volume_kinds(*kind, entered, kept.clone()).fold(registry, Registry::with)
        }
        Kind::Image(_) => registry.with_format(qcow2::kind()),
        Kind::Device(schemes) => {
            let kinds = schemes
                .iter()
                .map(|scheme| device_kind(*scheme, devices.clone()));
            kinds.fold(registry, Registry::with)
        }
        Kind::Within(_) => registry.with(controller_kind(within.clone())),
    })
}

/// Returns the kind of volume that consists of a namespace of an NVMe device.
fn device_kind(scheme: Scheme, devices: Arc<Devices>) -> VolumeKind<DeviceNamespace> {
    let open = move |url: &str, read_only| -> Result<DeviceNamespace> {
        let target = DeviceTarget::parse(url)?;
        DeviceNamespace::new(
            devices.device(&target)?,
            target.nsid,
            target.queue,
            read_only || target.read_only,
            target.name(),
        )
        .with_context(|| url.to_owned())
    };
    VolumeKind::new(scheme, move |url: &mut VolumeUrl<'_>, options| {
        let below = open(url.take_text(), options.read_only);
        let below = below.map_err(|error| OpenError::Other(error.into()))?;
        Ok(BareVolume::attached(below.volume.clone(), below))
    })
}

/// Opener of volumes for all workers of the process, which share devices that can be opened only
/// once. A device is shared by all its served namespaces and slices on all workers.
pub struct Opener {
    /// Session with the keeper, from which disks continue.
    pub keeper: Arc<KeeperSession>,
    /// Sockets of the disks that are unavailable.
    pub idle: IdleSockets,
    /// Registry of the volumes' I/O limits, through which they are changed.
    limits: LimitRegistry,
    /// Registry of the volumes' error policies, through which they are changed.
    on_error: OnErrorRegistry,
    /// Settings that were changed at run time, which a volume gets when it is opened.
    pub settings: Settings,
    /// Limits of the wait for the previous process of a file.
    pub previous: PreviousProcess,
    kinds: Registry<DeviceNamespace>,
    /// Volumes below the volumes that workers open, such as the backing files of images.
    within: Arc<InnerVolumes>,
    /// Namespaces that disks of a subsystem share.
    pub subsystems: Subsystems,
    /// Pools in which guests create namespaces.
    pub pools: Pools,
    /// Block sizes of namespaces for which the guest has chosen the LBA format.
    pub block_sizes: BlockSizes,
    /// Sender of events about the opened volumes.
    events: EventSender,
    /// Records of the disks, with which opened volumes are compared.
    pub records: Records,
    /// Folder for the journals of images.
    journals: Journals,
}

impl Opener {
    /// Creates the opener of a process with these options; `registry` lists the opened volumes.
    pub fn new(
        _outside: &Unconfined,
        registry: &crate::registry::Registry,
        options: &ServeOptions,
    ) -> Self {
        let within = Arc::default();
        let devices = registry.devices.clone();
        volumes::remotes().for_each(|kind| kind.prepare());
        Self {
            keeper: registry.keeper.clone(),
            idle: IdleSockets::default(),
            limits: registry.limits.clone(),
            on_error: registry.on_error.clone(),
            settings: registry.settings.clone(),
            previous: options.previous,
            kinds: all_kinds(
                devices,
                options.sandbox,
                Arc::clone(&within),
                KeptServers::new(&registry.keeper, options.previous.limit),
            ),
            within,
            subsystems: Subsystems::default(),
            pools: Pools::default(),
            block_sizes: BlockSizes::default(),
            events: registry.events.clone(),
            records: Records::open(options, &registry.keeper),
            journals: Journals::new(options),
        }
    }

    /// Opens the volume below one that only its serving thread may open ([`Opener::open`]): of the
    /// disk of this name, under this number. `false` for all other volumes.
    pub fn open_below(&self, spec: &NamespaceSpec, disk: &str, nsid: u32) -> Result<bool> {
        if !is_within(&spec.volume) {
            return Ok(false);
        }
        ensure_decryptable(&spec.volume)?;
        let within = self.within.clone();
        let raw = self.records.known(disk, nsid, spec).is_raw;
        let below = VolumeKind::new(CONTROLLER, move |url: &mut VolumeUrl<'_>, _| {
            let options = OpenOptions {
                raw,
                ..OpenOptions::default()
            };
            let inner = open_url(url.name, options)?;
            within.put(url.name, inner.clone());
            url.take_text();
            Ok(BareVolume::new(inner))
        });
        let kinds = Registry::<()>::new().with(below);
        kinds.open(&spec.volume, OpenOptions::default())?;
        Ok(true)
    }

    /// Opens the namespace pool of a disk; `None` if the disk has none.
    pub fn open_pool(&self, spec: &ControllerSpec) -> Result<Option<Arc<DiskPool>>> {
        let opened = self.pools.open(
            spec,
            (&self.limits, &self.on_error, &self.settings),
            &self.events,
            self.previous,
        );
        spec.origin.place("pool", opened)
    }

    /// Opens the volume of a namespace: of the disk of this name, under this number.
    pub fn open(&self, spec: &NamespaceSpec, disk: &str, nsid: u32) -> Result<OpenedVolume> {
        self.open_as(spec, disk, nsid, false)
    }

    /// Opens the volume of a namespace as [`Opener::open`] does, without its lock.
    pub fn open_incoming(
        &self,
        spec: &NamespaceSpec,
        disk: &str,
        nsid: u32,
    ) -> Result<OpenedVolume> {
        self.open_as(spec, disk, nsid, true)
    }

    fn open_as(
        &self,
        spec: &NamespaceSpec,
        disk: &str,
        nsid: u32,
        incoming: bool,
    ) -> Result<OpenedVolume> {
        let url = &*spec.volume;
        let place = keep::memory_place(&self.keeper, disk, nsid);
        // A file may have such a name.
        if let Some(why) = volumes::remotes().find_map(|kind| kind.foreign_url(url))
            && !Path::new(url).exists()
        {
            bail!("{url}: {why}");
        }
        ensure_decryptable(url)?;
        let known = self.records.known(disk, nsid, spec);
        if known.was_served {
            ensure_files(spec)?;
        }
        let spec = &NamespaceSpec {
            block_size: spec.block_size.or(known.block_size),
            ..spec.clone()
        };
        let open = |raw| {
            let options = OpenOptions {
                read_only: spec.is_read_only(),
                block_size: spec.block_size,
                previous: self.previous,
                memory: place.memory(),
                key_memory: place.key_memory(),
                journals: self.journals.of(url),
                raw,
                incoming,
                is_check: false,
            };
            self.kinds.open(url, options)
        };
        let mut opened = open(known.is_raw)?;
        let media = opened.volume.media();
        if known.is_raw && !known.media.is_empty() && known.media != media {
            // Another file than the one whose guest may have written a signature.
            drop(opened);
            opened = open(false)?;
        }
        let opened = match opened.attached {
            Some(below) => below.opened(spec, opened.volume, &opened.extras)?,
            None => OpenedVolume {
                volume: opened.volume,
                device: None,
                direct: None,
                files: NamespaceFiles::default(),
                block_size: None,
            },
        };
        let volume = place.keep(opened.volume, url);
        let volume = OnErrorVolume::new(volume, spec.on_error(), url);
        let volume: Arc<dyn Volume> = Arc::new(volume);
        let files = NamespaceFiles::open(spec, &volume, self.previous)?;
        self.block_sizes.enter(disk, nsid, &files);
        let opened = OpenedVolume {
            volume,
            files,
            block_size: spec.block_size,
            ..opened
        };
        let mut opened = opened;
        if let Some(direct) = &mut opened.direct {
            direct.volume = Arc::downgrade(&opened.volume);
        }
        self.settings.apply(disk, nsid, &*opened.volume);
        self.limits.enter(url, &opened.volume);
        self.on_error.enter(url, &opened.volume);
        tracing::info!(volume = url, "{}", opened.volume.info().description);
        Ok(opened)
    }
}

/// Refuses a namespace that an earlier process has served if a file beside the volume is missing. A
/// new file would lose state that the guest relies on.
fn ensure_files(spec: &NamespaceSpec) -> Result<()> {
    for (key, path) in spec.kept_files() {
        let found = path.metadata();
        let found = found.with_context(|| format!("{key}: {}", path.display()))?;
        let is_empty = found.is_file() && found.len() == 0;
        ensure!(
            !is_empty,
            "{key}: {} is empty, and had a content when the disk was served; restore it, or remove \
             the disk and add it again",
            path.display()
        );
    }
    Ok(())
}

/// NVMe devices that the process has open.
struct Devices {
    /// Registry through which devices are suspended and resumed.
    registry: DeviceRegistry,
    sandbox: SandboxMode,
    open: Mutex<Vec<(ControllerAddress, Device, Option<RemovalWatch>)>>,
}

impl Devices {
    /// Returns the NVMe device, which is opened at the first call.
    fn device(&self, target: &DeviceTarget) -> Result<Device> {
        // Another worker that panicked while it held the lock left a whole list.
        let mut devices = self.open.lock().unpoisoned();
        if let Some((_, device, _)) = devices.iter().find(|(place, ..)| *place == target.place) {
            return Ok(device.clone());
        }
        let device = target.open()?;
        let watch = RemovalWatch::start(&device, &target.name(), self.sandbox).unwrap_or_else(|error| {
            tracing::warn!(device = target.name(), %error, "the kernel's request for the device will not be seen");
            None
        });
        self.registry.enter(&device_name(&target.place), &device);
        devices.push((target.place.clone(), device.clone(), watch));
        Ok(device)
    }
}

/// Returns the URL of an NVMe device, without a namespace.
fn device_name(place: &ControllerAddress) -> String {
    match place {
        ControllerAddress::Pci(bdf) => format!("nvme://{bdf}"),
        ControllerAddress::Socket(path) => format!("vfio-user://{}", path.display()),
    }
}

/// Volumes below those that their workers open, by name. The main thread, which may open files,
/// opens them, and the workers take them.
#[derive(Default)]
struct InnerVolumes(Mutex<Vec<(String, Arc<dyn Volume>)>>);

impl InnerVolumes {
    fn put(&self, name: &str, volume: Arc<dyn Volume>) {
        self.0.lock().unpoisoned().push((name.to_owned(), volume));
    }

    fn take(&self, name: &str) -> Option<Arc<dyn Volume>> {
        let mut list = self.0.lock().unpoisoned();
        let at = list.iter().position(|(known, _)| known == name)?;
        Some(list.swap_remove(at).1)
    }
}

/// Volumes behind a controller in this very thread: devices without a CPU of their own.
fn controller_kind(within: Arc<InnerVolumes>) -> VolumeKind<DeviceNamespace> {
    let count = AtomicU64::new(1);
    VolumeKind::new(CONTROLLER, move |url: &mut VolumeUrl<'_>, options| {
        let inner = match within.take(url.name) {
            Some(inner) => inner,
            None => open_url(url.name, OpenOptions::default())?,
        };
        let number = count.fetch_add(1, Ordering::Relaxed);
        let below = open_within(url.take_text(), inner, options.read_only, number);
        let below = below.map_err(|error| OpenError::Other(error.into()))?;
        Ok(BareVolume::attached(below.volume.clone(), below))
    })
}

fn open_within(
    whole: &str,
    volume: Arc<dyn Volume>,
    read_only: bool,
    number: u64,
) -> Result<DeviceNamespace> {
    let namespace = NamespaceConfig {
        read_only: volume.info().read_only,
        nguid: [1; 16],
        eui64: [1; 8],
        ..NamespaceConfig::new(1, volume)
    };
    let io = Io::new(IoOptions::default());
    let config = ControllerConfig {
        mapped_doorbells: true,
        shadow_doorbells: false,
        ..ControllerConfig::default()
    };
    let controller = Controller::new(0, config, vec![namespace], &io)?;
    let transport = in_process::local(Host::new(controller, io)?);
    DeviceNamespace::new(
        Device::open(transport, Options::default())?,
        1,
        // The volume works only while this thread polls.
        QueueOptions {
            interrupts: false,
            ..QueueOptions::default()
        },
        read_only,
        format!("{whole}, number {number}"),
    )
    .with_context(|| whole.to_owned())
}

/// Namespace of an NVMe device, opened as a volume.
pub struct DeviceNamespace {
    device: Device,
    nsid: u32,
    queue: QueueOptions,
    read_only: bool,
    /// The namespace as a volume of the userspace NVMe driver.
    volume: Arc<NvmeVolume>,
}

impl DeviceNamespace {
    fn new(
        device: Device,
        nsid: u32,
        queue: QueueOptions,
        read_only: bool,
        name: String,
    ) -> Result<Self> {
        let volume = NvmeVolume::new(device.clone(), nsid, queue, read_only, name)?;
        Ok(Self {
            device,
            nsid,
            queue,
            read_only,
            volume: Arc::new(volume),
        })
    }

    /// Returns the opened namespace with `volume`, the layer on top of this one that the URL asked
    /// for.
    fn opened(
        self,
        spec: &NamespaceSpec,
        volume: Arc<dyn Volume>,
        extras: &Extras,
    ) -> Result<OpenedVolume> {
        let Self {
            device,
            nsid,
            queue,
            read_only,
            volume: below,
        } = self;
        let url = &*spec.volume;
        let on_error = spec.on_error() != OnError::default();
        if extras.is_limited() || on_error {
            ensure!(
                spec.path != Some(PathChoice::Direct),
                "{url}: limits and weights are kept on the generic path only, and so is what \
                 becomes of requests that fail"
            );
            return Ok(OpenedVolume {
                volume,
                device: Some(below),
                direct: None,
                files: NamespaceFiles::default(),
                block_size: None,
            });
        }
        // The slice has the same blocks as the volume.
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
            volume: Arc::downgrade(&volume),
        };
        Ok(OpenedVolume {
            volume,
            device: Some(below),
            direct: Some(direct),
            files: NamespaceFiles::default(),
            block_size: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opener_with(devices: DeviceRegistry) -> Opener {
        let mut registry = crate::registry::Registry::default();
        registry.devices = devices;
        let options = ServeOptions {
            sandbox: SandboxMode::Off,
            ..ServeOptions::new(config::spec::ProcessSpec::default(), 1)
        };
        Opener::new(&Unconfined::at_start(), &registry, &options)
    }

    fn error(url: &str) -> String {
        let registry = DeviceRegistry::default();
        let opener = opener_with(registry);
        let spec = config::options::url::parse(url).unwrap();
        let Err(error) = opener.open(&spec, "disk", 1) else {
            panic!("{url} was opened");
        };
        format!("{error:#}")
    }

    /// Crate `config` states the options without opening anything; the registry has the kinds.
    #[test]
    fn options_of_all_kinds_are_known_to_configuration() {
        let kinds = kinds(DeviceRegistry::default());
        for option in kinds.schemes().flat_map(|scheme| scheme.options) {
            let mut known = config::volumes::option_names();
            assert!(known.any(|name| name == option.name), "{}", option.name);
        }
    }

    #[test]
    fn unknown_volume_error_lists_every_kind() {
        for url in ["iscsi://host/1", "file://"] {
            let text = error(url);
            for scheme in ["file", "mem", "null", "nvme", "vfio-user"] {
                assert!(text.contains(&format!("{scheme}://")), "{scheme}: {text}");
            }
            assert!(text.contains("controller+URL"), "{text}");
        }
    }

    #[test]
    fn tls_is_refused_with_reason() {
        for url in ["nbds://host/x", "nbds+unix:///x?socket=/s"] {
            assert!(error(url).contains("TLS is not supported"), "{url}");
        }
    }

    #[test]
    fn qemu_server_names_are_answered_with_native_form() {
        for url in ["nbd:unix:/run/s:exportname=x", "nbd:localhost:10809"] {
            assert!(error(url).contains("nbd+unix:///EXPORT"), "{url}");
        }
        // Paths may begin so.
        assert!(error("/nowhere/nbd:x").contains("nowhere"));
        assert!(!error("nbds.raw").contains("TLS"));
    }

    #[test]
    fn volume_behind_controller_works_like_others() {
        let opener = opener_with(DeviceRegistry::default());
        let open = |url: &str| opener.open(&config::options::url::parse(url).unwrap(), "disk", 1);
        let opened = open("controller+null://1M?offset=64K").unwrap();
        assert_eq!(opened.volume.info().size, (1 << 20) - (64 << 10));
        assert!(opened.device.is_some() && opened.direct.is_some());
        assert!(error("controller+null://lots").contains("lots"));
        assert!(error("controller+null://1M?colour=red").contains("null volumes have"));
    }

    #[test]
    fn device_urls_are_checked_like_others() {
        let text = error("nvme://0000:ff:1f.7/1?colour=red");
        let known = "nvme volumes have read-only, queues, depth";
        assert!(text.contains(known) && text.contains("partlabel"), "{text}");
        assert!(error("nvme://0000:ff:1f.7/1?depth=1&depth=2").contains("given twice"));
        assert!(error("nvme://0000:ff:1f.7/1?depth=0").contains("from 1 to 32767"));
        assert!(error("nvme://nowhere/1").contains("not the URL of a device"));
        let text = error("vfio-user:///no/such.sock/1?offset=1M");
        assert!(text.contains("vfio-user:///no/such.sock/1: "), "{text}");
    }
}
