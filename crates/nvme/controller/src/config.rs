//! Configuration of a controller: identity, limits, namespaces.

use crate::cloud::Cloud;
use crate::control::BootImage;
use crate::engine::commands::Offer;
use crate::fabrics::FabricsConfig;
use crate::formats::Formats;
use crate::metadata::MetadataState;
use crate::pci::PciIds;
use crate::placed::PlacementState;
use crate::pool::NamespacePool;
use crate::subsystem::{MAX_CNTLID, Subsystem};
use crate::zoned::ZonedState;
use nvme::identify::Ascii;
use probes::LogLimits;
use reservations::HostId;
use std::sync::Arc;
use std::time::Duration;
use volume::Volume;

/// Most I/O queue pairs of a controller. The doorbell page has room for 511, the MSI-X table for
/// 255.
pub const MAX_IO_QUEUES: u16 = 128;
/// Default number of I/O queue pairs. A process with another number could not take over a
/// controller from one with this number.
pub const DEFAULT_IO_QUEUES: u16 = 64;
/// Minimum size of a controller memory buffer in bytes.
pub const MIN_CMB_SIZE: u64 = 4 << 10;
/// Maximum size of a controller memory buffer in bytes.
pub const MAX_CMB_SIZE: u64 = 64 << 20;
/// Maximum number of entries of a submission or completion queue.
pub const MAX_QUEUE_ENTRIES: u32 = 4096;

/// A controller's identity and limits. [`ControllerConfig::default`] is a good disk for a VM.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    /// Name of the disk in log lines; the serial number when empty.
    pub name: String,
    /// Model number, up to 40 printable ASCII characters (Identify Controller, MN).
    pub model: String,
    /// Serial number, up to 20 printable ASCII characters (Identify Controller, SN).
    pub serial: String,
    /// Firmware revision, up to 8 printable ASCII characters (Identify Controller, FR).
    pub firmware: String,
    /// NVM Subsystem NQN, up to 223 bytes; made from the serial number when `None`.
    pub subnqn: Option<String>,
    /// PCI vendor, device and subsystem IDs.
    pub pci: PciIds,
    /// Controller ID (CNTLID), up to [`MAX_CNTLID`]; unique in its subsystem.
    pub cntlid: u16,
    /// Subsystem shared with other controllers, if any: all namespaces are shared then.
    pub subsystem: Option<InSubsystem>,
    /// Number of I/O queue pairs that the host can create, 1 to [`MAX_IO_QUEUES`].
    pub io_queues: u16,
    /// Maximum number of entries of each queue (CAP.MQES), a power of two from 2 to
    /// [`MAX_QUEUE_ENTRIES`].
    pub queue_entries: u32,
    /// Maximum transfer size of a command: 4 KiB shifted left by this (MDTS). 1 to 13.
    pub mdts: u8,
    /// The doorbell page is written by the client directly, without a message: the owner has to
    /// poll.
    pub mapped_doorbells: bool,
    /// Whether the controller supports shadow doorbells (the command Doorbell Buffer Config).
    pub shadow_doorbells: bool,
    /// Size in bytes of a controller memory buffer, a power of two from 4 KiB to 64 MiB; `None`:
    /// there is none. Not where hosts reach the controller over a network.
    pub cmb_size: Option<u64>,
    /// Content of the two Boot Partitions; `None`: the controller has none. Not where hosts reach
    /// the controller over a network.
    pub boot: Option<BootImage>,
    /// Whether the volatile write cache is enabled after power-on, for volumes that have one.
    pub write_cache: bool,
    /// Maximum number of namespaces (NN); at least the highest NSID of those configured.
    pub max_namespaces: u32,
    /// Maximum number of commands in flight in volumes, over all queues.
    pub max_in_flight: u16,
    /// Maximum number of workers that have queues of the controller, its own included; see
    /// [`Controller::remote_engine`](crate::Controller::remote_engine).
    pub workers: u16,
    /// Maximum duration of a controller reset (CAP.TO), rounded up to 500 ms.
    pub reset_timeout: Duration,
    /// Settings of a controller that hosts reach over a network.
    pub fabrics: Option<FabricsConfig>,
    /// Content of the vendor specific bytes. Model number and PCI IDs are not set by this.
    pub cloud: Option<Cloud>,
    /// Pool from which the host creates namespaces (Namespace Management, which is not offered
    /// otherwise). Namespaces attached to the controller are present from the beginning. A
    /// controller with a pool is in no subsystem of several, and no other hosts reach it.
    pub pool: Option<Arc<dyn NamespacePool>>,
    /// Limits of the log lines that the host can cause. Controllers of one disk share them.
    pub log: Arc<LogLimits>,
}

/// Membership of a controller in an NVM subsystem that has several controllers.
#[derive(Clone, Debug)]
pub struct InSubsystem {
    /// Subsystem that the controller belongs to.
    pub subsystem: Arc<Subsystem>,
    /// The host that uses the controller (Host Identifier). The host cannot change it: otherwise
    /// a guest could pass for another one, and use its reservations.
    pub host: HostId,
}

impl Default for ControllerConfig {
    fn default() -> Self {
        ControllerConfig {
            name: String::new(),
            model: "vnvme virtual NVMe disk".into(),
            serial: "vnvme0".into(),
            firmware: env!("CARGO_PKG_VERSION").into(),
            subnqn: None,
            pci: PciIds::default(),
            cntlid: 1,
            subsystem: None,
            io_queues: DEFAULT_IO_QUEUES,
            queue_entries: MAX_QUEUE_ENTRIES,
            mdts: 8,
            mapped_doorbells: false,
            shadow_doorbells: true,
            cmb_size: None,
            boot: None,
            write_cache: true,
            max_namespaces: 0,
            max_in_flight: 512,
            workers: 1,
            reset_timeout: Duration::from_secs(30),
            fabrics: None,
            cloud: None,
            pool: None,
            log: Arc::default(),
        }
    }
}

/// Configuration of a namespace: an NSID, and the volume that stores its blocks.
///
/// [`NamespaceConfig::new`] chooses everything else; the methods named `with_` change it:
///
/// ```
/// use controller::NamespaceConfig;
/// use std::sync::Arc;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let volume = Arc::new(volume::MemVolume::new(64 << 20)?);
/// let namespace = NamespaceConfig::new(1, volume)
///     .with_block_size(4096)
///     .with_nguid([0x5a; 16])
///     .with_read_only(true);
/// assert_eq!((namespace.nsid, namespace.block_size), (1, 4096));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct NamespaceConfig {
    /// Namespace ID (NSID), starting at 1.
    pub nsid: u32,
    /// Volume that stores the blocks.
    pub volume: Arc<dyn Volume>,
    /// Logical block size in bytes: 512 or 4096. With several formats, that of the stored one.
    pub block_size: u32,
    /// Whether the namespace is read-only: writes fail with Namespace is Write Protected.
    pub read_only: bool,
    /// Namespace Globally Unique Identifier; zeroes if the namespace has none.
    pub nguid: [u8; 16],
    /// IEEE Extended Unique Identifier; zeroes if the namespace has none.
    pub eui64: [u8; 8],
    /// Namespace UUID; zeroes if the namespace has none.
    pub uuid: [u8; 16],
    /// Zones of a zoned namespace. All workers share them, and in a subsystem all controllers
    /// that have the namespace: each of them is created with the same ones.
    pub zones: Option<Arc<ZonedState>>,
    /// Placement handles (Flexible Data Placement), if the namespace has any: those of one
    /// controller. The namespace has no zones then.
    pub placement: Option<Arc<PlacementState>>,
    /// Metadata of the blocks, if they have any: on one worker, of one controller. The namespace
    /// has neither zones nor placement handles then.
    pub metadata: Option<Arc<MetadataState>>,
    /// LBA formats that the host may choose from (Format NVM); `None`: a single one. With several
    /// formats, the namespace has neither zones nor placement handles, and metadata only if some
    /// formats have.
    pub formats: Option<Formats>,
}

impl NamespaceConfig {
    /// Returns a writable namespace of a volume with the volume's block size, but no less than 512
    /// bytes, and without identifiers, zones, placement handles, metadata and formats.
    pub fn new(nsid: u32, volume: Arc<dyn Volume>) -> Self {
        Self {
            nsid,
            block_size: volume.info().block_size.max(512),
            volume,
            read_only: false,
            nguid: [0; 16],
            eui64: [0; 8],
            uuid: [0; 16],
            zones: None,
            placement: None,
            metadata: None,
            formats: None,
        }
    }

    /// Sets the logical block size in bytes: 512 or 4096.
    #[must_use]
    pub fn with_block_size(self, block_size: u32) -> Self {
        Self { block_size, ..self }
    }

    /// Sets whether the namespace is read-only.
    #[must_use]
    pub fn with_read_only(self, read_only: bool) -> Self {
        Self { read_only, ..self }
    }

    /// Sets the Namespace Globally Unique Identifier. A namespace needs an identifier that no other
    /// one has, on any host, for the guest's paths below `/dev/disk/by-id`.
    #[must_use]
    pub fn with_nguid(self, nguid: [u8; 16]) -> Self {
        Self { nguid, ..self }
    }

    /// Sets the IEEE Extended Unique Identifier.
    #[must_use]
    pub fn with_eui64(self, eui64: [u8; 8]) -> Self {
        Self { eui64, ..self }
    }

    /// Sets the Namespace UUID.
    #[must_use]
    pub fn with_uuid(self, uuid: [u8; 16]) -> Self {
        Self { uuid, ..self }
    }

    /// Makes the namespace a zoned one.
    #[must_use]
    pub fn with_zones(self, zones: Arc<ZonedState>) -> Self {
        let zones = Some(zones);
        Self { zones, ..self }
    }

    /// Adds placement handles.
    #[must_use]
    pub fn with_placement(self, placement: Arc<PlacementState>) -> Self {
        let placement = Some(placement);
        Self { placement, ..self }
    }

    /// Adds metadata to the blocks.
    #[must_use]
    pub fn with_metadata(self, metadata: Arc<MetadataState>) -> Self {
        let metadata = Some(metadata);
        Self { metadata, ..self }
    }

    /// Sets the LBA formats that the host may choose from.
    #[must_use]
    pub fn with_formats(self, formats: Formats) -> Self {
        let formats = Some(formats);
        Self { formats, ..self }
    }
}

/// Reason why the configuration of a controller or a namespace is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A text field is too long or holds characters that the standard does not allow.
    #[error("{field} \"{value}\": at most {max} printable ASCII characters are allowed")]
    Text {
        /// Name of the configuration field that is too long.
        field: &'static str,
        /// Configured value of the field.
        value: String,
        /// Maximum length of the field in bytes.
        max: usize,
    },
    /// A text field begins with a space. Identify data is left justified (NVMe Base 2.1, 1.4.2),
    /// and hosts remove or keep such a space as they like.
    #[error("{field} \"{value}\": begins with a space, which hosts show differently; remove it")]
    LeadingSpace {
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        value: String,
    },
    /// A number is out of range.
    #[error("{field} is {value}: {allowed}")]
    Range {
        /// Name of the configuration field with the invalid value.
        field: &'static str,
        /// Configured value of the field.
        value: u64,
        /// Description of the allowed values, for the error message.
        allowed: &'static str,
    },
    /// Two namespaces of the configuration have the same ID.
    #[error("namespace {0} is configured twice")]
    DuplicateNamespace(u32),
    /// Two controllers of the subsystem have the same controller ID.
    #[error("controller {0} is in the subsystem already")]
    DuplicateController(u16),
    /// A controller of a subsystem can only have namespaces of that subsystem.
    #[error("namespace {0} is none of the controller's subsystem")]
    NotShared(u32),
    /// The Host Identifier of a controller in a subsystem is all zeroes, which identifies no
    /// host.
    #[error("the host of a controller in a subsystem has no identifier")]
    NoHost,
    /// A controller of a subsystem must be served by a single worker, but the configuration has
    /// several.
    #[error("a controller in a subsystem has one worker")]
    SharedWorkers,
    /// A namespace pool can belong to only one controller, which cannot be part of a subsystem.
    #[error(
        "a controller with a pool of namespaces is in no subsystem, and no other hosts reach it"
    )]
    SharedPool,
    /// A controller memory buffer needs a PCI function, which a controller for network hosts does
    /// not have.
    #[error("a controller that hosts reach over a network has no controller memory buffer")]
    FabricsMemory,
    /// Boot Partitions need PCI registers, which a controller for network hosts does not have.
    #[error("a controller that hosts reach over a network has no Boot Partitions")]
    FabricsBoot,
    /// The size of a volume is no whole number of blocks, or less than one block.
    #[error(
        "namespace {nsid}: a volume of {size} bytes does not divide into blocks of {block_size} bytes"
    )]
    OddSize {
        /// ID of the namespace with the unsuitable volume.
        nsid: u32,
        /// Size of the volume in bytes.
        size: u64,
        /// Block size of the namespace in bytes.
        block_size: u32,
    },
    /// The volume needs larger blocks than the namespace has.
    #[error(
        "namespace {nsid}: the volume needs blocks of at least {needed} bytes, {block_size} were asked for"
    )]
    BlockSize {
        /// ID of the namespace with too small blocks.
        nsid: u32,
        /// Minimum block size that the volume requires, in bytes.
        needed: u32,
        /// Block size of the namespace in bytes.
        block_size: u32,
    },
    /// A zoned namespace is not available to hosts that connect over a network.
    #[error("namespace {0} has zones: no other hosts reach it over a network")]
    SharedZones(u32),
    /// The controllers of a subsystem that have a namespace have the same zones of it, or none.
    #[error("namespace {0} has other zones than another controller of its subsystem has of it")]
    OtherZones(u32),
    /// A namespace with placement handles can belong to only one controller, which network hosts
    /// cannot reach.
    #[error(
        "namespace {0} has placement handles: its controller is in no subsystem, no other hosts \
         reach it, and it has no zones"
    )]
    SharedPlacement(u32),
    /// The placement handles and the namespace have different block sizes.
    #[error("namespace {nsid}: its placement handles are of blocks of {block} bytes")]
    PlacementBlock {
        /// ID of the namespace with placement handles.
        nsid: u32,
        /// Block size in bytes in which the placement handles count.
        block: u32,
    },
    /// A namespace with metadata can belong to only one controller, served by a single worker.
    #[error(
        "namespace {0} has metadata: its controller has one worker, is in no subsystem, no other \
         hosts reach it, and it has neither zones nor placement handles"
    )]
    SharedMetadata(u32),
    /// Zones and placement handles require a single LBA format, and so does metadata unless all
    /// formats have metadata.
    #[error(
        "namespace {0} can have several LBA formats only without zones, placement handles, and \
         metadata that is of one format"
    )]
    FixedFormat(u32),
    /// The metadata and the namespace have different block sizes.
    #[error("namespace {nsid}: its metadata is of blocks of {block} bytes")]
    MetadataBlock {
        /// ID of the namespace with metadata.
        nsid: u32,
        /// Block size in bytes for which the metadata was created.
        block: u32,
    },
    /// The volume is smaller than the zones, or than the blocks with metadata, require.
    #[error("namespace {nsid}: its blocks or zones need {needed} bytes, and the volume has {size}")]
    ZonesSize {
        /// ID of the namespace with zones or metadata.
        nsid: u32,
        /// Size in bytes that the zones or the blocks require.
        needed: u64,
        /// Size of the volume in bytes.
        size: u64,
    },
    /// A volume could not be opened.
    #[error("namespace {nsid}: {error}")]
    Volume {
        /// ID of the namespace that the volume belongs to.
        nsid: u32,
        /// Reason why the volume could not be opened.
        error: volume::VolumeError,
    },
    /// The namespace ID is above the maximum (NN), which is fixed when the controller starts.
    #[error(
        "namespace {nsid}: this controller has room for namespaces 1 to {max}; max-namespaces gives \
         it more when it starts"
    )]
    NoRoom {
        /// ID of the namespace to attach.
        nsid: u32,
        /// Largest namespace ID that the controller can have (NN).
        max: u32,
    },
    /// Another namespace is being attached; only one can be attached at a time.
    #[error("another namespace of this controller is being attached")]
    Attaching,
    /// The state memory, from which another process would take over, cannot be used.
    #[error(transparent)]
    State(#[from] state_memory::StateError),
    /// Memory for the controller memory buffer could not be allocated.
    #[error("controller memory buffer: {0}")]
    MemoryBuffer(dma::MapError),
    /// Memory for the doorbell page could not be allocated.
    #[error("doorbell page: {0}")]
    Memory(dma::MapError),
}

impl From<dma::MapError> for ConfigError {
    fn from(error: dma::MapError) -> Self {
        Self::Memory(error)
    }
}

fn text(field: &'static str, value: &str, max: usize) -> Result<(), ConfigError> {
    let value = value.to_owned();
    if value.len() > max || !value.bytes().all(|b| (0x20..0x7f).contains(&b)) {
        return Err(ConfigError::Text { field, value, max });
    }
    if value.starts_with(' ') {
        return Err(ConfigError::LeadingSpace { field, value });
    }
    Ok(())
}

fn range(
    field: &'static str,
    value: u64,
    ok: bool,
    allowed: &'static str,
) -> Result<(), ConfigError> {
    if ok {
        return Ok(());
    }
    Err(ConfigError::Range {
        field,
        value,
        allowed,
    })
}

impl ControllerConfig {
    /// Returns the maximum number of data bytes of one command (MDTS).
    pub fn max_transfer(&self) -> u64 {
        4096 << self.mdts
    }

    /// Returns whether Format NVM is offered: other hosts can be kept out of the namespaces
    /// meanwhile. This is not so with a fabric, because its controllers do not know of each
    /// other.
    pub(crate) fn erases(&self) -> bool {
        self.fabrics.is_none()
    }

    /// Returns whether Sanitize is offered. It would have to erase namespaces of a pool that no
    /// controller has, too, and those of a subsystem that only other controllers have, also in
    /// the next process.
    pub(crate) fn sanitizes(&self) -> bool {
        self.erases() && self.pool.is_none() && self.subsystem.is_none()
    }

    /// Returns whether the controller may have namespaces with metadata, from the beginning or
    /// attached later. It then supports extended protection information formats (ELBAS).
    pub(crate) fn may_have_metadata(&self) -> bool {
        self.subsystem.is_none() && self.fabrics.is_none() && self.workers <= 1
    }

    /// Returns the properties that decide the I/O commands of such a controller, apart from its
    /// namespaces. Blocks that other hosts reach over a network cannot be marked: their
    /// controllers do not know of each other.
    pub(crate) fn offer(&self) -> Offer {
        Offer {
            shared: self.subsystem.is_some(),
            marks: self.fabrics.is_none(),
            placed: false,
        }
    }

    /// Returns the serial number in the form of the standard (SN). [`ControllerConfig::check`]
    /// refuses texts that have no such form; so with the two others.
    pub(crate) fn sn(&self) -> Ascii<20> {
        Ascii::new(&self.serial).unwrap_or_default()
    }

    /// Returns the model number (MN).
    pub(crate) fn mn(&self) -> Ascii<40> {
        Ascii::new(&self.model).unwrap_or_default()
    }

    /// Returns the firmware revision (FR).
    pub(crate) fn fr(&self) -> Ascii<8> {
        Ascii::new(&self.firmware).unwrap_or_default()
    }

    /// Checks every field of the controller's configuration.
    pub fn check(&self) -> Result<(), ConfigError> {
        text("model", &self.model, 40)?;
        text("serial", &self.serial, 20)?;
        text("firmware", &self.firmware, 8)?;
        if let Some(nqn) = &self.subnqn {
            text("subnqn", nqn, 223)?;
        }
        let queues = self.io_queues;
        range(
            "io_queues",
            queues.into(),
            (1..=MAX_IO_QUEUES).contains(&queues),
            "1 to 128 are allowed",
        )?;
        let entries = self.queue_entries;
        let ok = entries.is_power_of_two() && (2..=MAX_QUEUE_ENTRIES).contains(&entries);
        range(
            "queue_entries",
            entries.into(),
            ok,
            "a power of two from 2 to 4096 is allowed",
        )?;
        range(
            "mdts",
            self.mdts.into(),
            (1..=13).contains(&self.mdts),
            "1 (8 KiB) to 13 (32 MiB) are allowed",
        )?;
        let limit = self.max_in_flight;
        range(
            "max_in_flight",
            limit.into(),
            (1..=4096).contains(&limit),
            "1 to 4096 are allowed",
        )?;
        let cntlid = self.cntlid;
        range(
            "cntlid",
            cntlid.into(),
            cntlid <= MAX_CNTLID,
            "0 to 65519 are allowed",
        )?;
        if let Some(size) = self.cmb_size {
            range(
                "cmb_size",
                size,
                size.is_power_of_two() && (MIN_CMB_SIZE..=MAX_CMB_SIZE).contains(&size),
                "a power of two from 4 KiB to 64 MiB is allowed",
            )?;
            if self.fabrics.is_some() {
                return Err(ConfigError::FabricsMemory);
            }
        }
        if self.boot.is_some() && self.fabrics.is_some() {
            return Err(ConfigError::FabricsBoot);
        }
        if self.subsystem.is_some() && self.workers > 1 {
            return Err(ConfigError::SharedWorkers);
        }
        if self.pool.is_some() && (self.subsystem.is_some() || self.fabrics.is_some()) {
            return Err(ConfigError::SharedPool);
        }
        // SeaBIOS and other firmware identify every NSID up to NN.
        let nn = self.max_namespaces;
        range(
            "max_namespaces",
            nn.into(),
            nn <= 1024,
            "0 to 1024 are allowed",
        )
    }
}

impl NamespaceConfig {
    /// Returns whether the blocks have metadata, or can have it: such a namespace lives on one
    /// worker.
    pub(crate) fn may_have_metadata(&self) -> bool {
        let formats = self.formats.as_ref();
        self.metadata.is_some() || formats.is_some_and(Formats::has_metadata)
    }

    /// Returns the file that is flushed after the volume, in this format or in another possible
    /// one.
    pub(crate) fn table_file(&self) -> Option<&Arc<dyn Volume>> {
        let table = self.table().map(|(table, _)| table);
        table.or_else(|| self.formats.as_ref()?.file())
    }

    /// Returns the file that is flushed after the volume, and whether the file is lost.
    pub(crate) fn table(&self) -> Option<(&Arc<dyn Volume>, bool)> {
        let zones = self.zones.as_ref().and_then(|zones| zones.table());
        let of_zones = zones.map(|table| (table.volume(), table.is_lost()));
        of_zones.or_else(|| self.metadata.as_ref()?.file())
    }

    /// Returns the number of blocks of the namespace, if it does not depend on the volume's size.
    pub(crate) fn fixed_blocks(&self) -> Option<u64> {
        let zones = self.zones.as_ref().map(|zones| zones.blocks());
        zones.or_else(|| Some(self.metadata.as_ref()?.blocks()))
    }

    /// Checks whether a controller with the configuration `config` can have this namespace.
    pub(crate) fn check_for(&self, config: &ControllerConfig) -> Result<(), ConfigError> {
        let alone = config.subsystem.is_none() && config.fabrics.is_none();
        if self.zones.is_some() && config.fabrics.is_some() {
            return Err(ConfigError::SharedZones(self.nsid));
        }
        let plain = self.zones.is_none() && self.placement.is_none();
        if self.may_have_metadata() && !(config.may_have_metadata() && plain) {
            return Err(ConfigError::SharedMetadata(self.nsid));
        }
        let fixed =
            |formats: &Formats| !plain || self.metadata.is_some() && !formats.has_metadata();
        if self.formats.as_ref().is_some_and(fixed) {
            return Err(ConfigError::FixedFormat(self.nsid));
        }
        if self.placement.is_none() || (alone && self.zones.is_none()) {
            Ok(())
        } else {
            Err(ConfigError::SharedPlacement(self.nsid))
        }
    }

    /// Checks the block size, volume size and NSID of the namespace.
    pub fn check(&self) -> Result<(), ConfigError> {
        let (nsid, block_size) = (self.nsid, self.block_size);
        range(
            "nsid",
            nsid.into(),
            (1..=1024).contains(&nsid),
            "1 to 1024 are allowed",
        )?;
        range(
            "block_size",
            block_size.into(),
            matches!(block_size, 512 | 4096),
            "512 and 4096 are allowed",
        )?;
        let info = self.volume.info();
        if info.block_size > block_size {
            let needed = info.block_size;
            return Err(ConfigError::BlockSize {
                nsid,
                needed,
                block_size,
            });
        }
        let size = info.size;
        if size == 0 || !size.is_multiple_of(u64::from(block_size)) {
            return Err(ConfigError::OddSize {
                nsid,
                size,
                block_size,
            });
        }
        let placement = self.placement.as_ref();
        let block = placement.map_or(block_size, |state| state.get().geometry().block);
        if block != block_size {
            return Err(ConfigError::PlacementBlock { nsid, block });
        }
        let layout = self.metadata.as_ref().map(|metadata| *metadata.layout());
        if let Some(layout) = layout.filter(|layout| layout.block != block_size) {
            let block = layout.block;
            return Err(ConfigError::MetadataBlock { nsid, block });
        }
        let needed = self.fixed_blocks().unwrap_or_default();
        let needed = needed.saturating_mul(block_size.into());
        if needed > size {
            return Err(ConfigError::ZonesSize { nsid, needed, size });
        }
        Ok(())
    }
}
