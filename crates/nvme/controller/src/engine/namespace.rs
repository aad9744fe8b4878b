//! A namespace in the data path.

use super::commands::NamespaceType;
use super::zoned::with_table;
use crate::config::{ConfigError, NamespaceConfig};
use crate::formats::{BlockFormat, Formats};
use crate::marks::Marks;
use crate::metadata::MetadataState;
use crate::passthrough::Passthrough;
use crate::stats::IoStats;
use crate::zoned::ZonesInUse;
use nvme::Status;
use nvme::log::AnaState;
use probes::IoRecord;
use reservations::Access;
use std::sync::Arc;
use std::time::Instant;
use volume::{Io, NullVolume, OpenQueue, Wake};

/// A namespace as one worker's engine uses it: configuration, and the worker's queue into the
/// volume.
pub(crate) struct Namespace {
    pub config: NamespaceConfig,
    pub queue: OpenQueue,
    /// Counters of the I/O commands on the namespace that this worker executes.
    pub record: Arc<IoRecord>,
    /// Path to a real device that executes commands instead of the volume, if there is one.
    pub passthrough: Option<Box<dyn Passthrough>>,
    /// Whether the volume completes reads and writes within the call that starts them.
    pub immediate: bool,
    /// Whether the volume uses prefetch hints for coming reads and writes.
    pub prefetches: bool,
    /// Logical block size in bytes, as a power of two.
    pub shift: u32,
    /// Size of the namespace in logical blocks.
    pub blocks: u64,
    pub read_only: bool,
    /// Whether a power failure loses completed writes of the volume unless they were flushed.
    pub volatile_cache: bool,
    /// Access rights that reservations leave to the host.
    pub access: Access,
    /// ANA state of this controller's path to the namespace.
    pub ana: AnaState,
    /// Status of all commands while the namespace is closed: it is being erased, or was not
    /// erased completely.
    pub closed: Option<Status>,
    /// Blocks that Write Uncorrectable has marked.
    pub marks: Arc<Marks>,
    /// There were marked blocks at the engine's last check: commands take the general path, which
    /// checks the marks.
    pub watched: bool,
    /// Keeps the zones in use. Declared after the queue, which has nothing in flight when it is
    /// dropped.
    _zones: Option<ZonesInUse>,
}

impl Namespace {
    /// Returns whether commands are in flight that complete without waking a thread.
    pub fn needs_polling(&self) -> bool {
        let passthrough = self.passthrough.as_ref();
        self.queue.state().wake == Wake::Poll || passthrough.is_some_and(|p| p.needs_polling())
    }

    /// Returns whether the namespace is being formatted while its metadata file is lost: the
    /// format creates a new one.
    pub fn loses_table(&self) -> bool {
        let formats = self.config.formats.as_ref();
        let renews = formats.is_some_and(Formats::has_metadata);
        let metadata = self.config.metadata.as_ref();
        let lost = metadata.is_some_and(|metadata| metadata.is_lost());
        self.closed == Some(Status::FORMAT_IN_PROGRESS) && renews && lost
    }

    /// Returns whether the namespace has these blocks. The host may know of growth before this
    /// worker, which learns of it by a message; so the volume is asked before a command is
    /// refused.
    pub fn covers(&self, slba: u64, blocks: u64) -> bool {
        let within = |size| slba.checked_add(blocks).is_some_and(|end| end <= size);
        within(self.blocks)
            || !self.is_fixed() && within(self.config.volume.info().size >> self.shift)
    }

    /// Returns whether the namespace has zones.
    #[inline]
    pub fn is_zoned(&self) -> bool {
        self.config.zones.is_some()
    }

    /// Returns whether the namespace has placement handles.
    #[inline]
    pub fn is_placed(&self) -> bool {
        self.config.placement.is_some()
    }

    /// Returns whether the blocks have metadata.
    #[inline]
    pub fn has_metadata(&self) -> bool {
        self.config.metadata.is_some()
    }

    /// Returns whether the protection information has an extended format.
    pub fn has_extended_format(&self) -> bool {
        let metadata = self.config.metadata.as_deref();
        let protection = metadata.and_then(|metadata| metadata.layout().protection);
        protection.is_some_and(|protection| protection.is_extended_format())
    }

    /// Returns whether the number of blocks is fixed and their content stays: zones or metadata
    /// describe each block.
    pub fn is_fixed(&self) -> bool {
        self.is_zoned() || self.has_metadata()
    }

    /// Returns the kind of the namespace, which decides the handlers of its commands.
    pub fn sort(&self) -> NamespaceType {
        match (self.is_zoned(), self.has_metadata()) {
            (true, _) => NamespaceType::Zoned,
            (_, true) => NamespaceType::Metadata,
            _ => NamespaceType::Plain,
        }
    }

    /// Sets the number of blocks after the volume was resized.
    pub fn resized(&mut self, blocks: u64) {
        self.blocks = blocks;
        if let Some(passthrough) = &mut self.passthrough {
            passthrough.resized(blocks);
        }
    }

    /// Takes over changed settings of the volume.
    pub fn update_volume(&mut self) {
        if self.queue.update() {
            self.immediate = self.queue.is_immediate();
            self.prefetches = self.queue.prefetches();
        }
    }

    /// Sets a new format, metadata and number of blocks. No command is in flight on the
    /// namespace.
    pub fn reformatted(
        &mut self,
        format: BlockFormat,
        metadata: Option<Arc<MetadataState>>,
        blocks: u64,
    ) {
        self.config.block_size = format.block;
        self.config.metadata = metadata;
        if let Some(formats) = &mut self.config.formats {
            formats.set(format);
        }
        self.shift = format.block.trailing_zeros();
        self.resized(blocks);
    }

    /// Returns the time at which the namespace has to be checked even if no event occurs, if any.
    pub fn deadline(&self) -> Option<Instant> {
        let passed = self.passthrough.as_ref().and_then(|p| p.deadline());
        self.queue
            .state()
            .wake
            .deadline(Instant::now)
            .into_iter()
            .chain(passed)
            .min()
    }

    /// Returns the configuration of a vacant entry.
    pub fn nothing() -> NamespaceConfig {
        NamespaceConfig {
            block_size: 512,
            read_only: true,
            ..NamespaceConfig::new(0, Arc::new(NullVolume::placeholder()))
        }
    }

    /// Creates a vacant entry.
    pub fn vacant(io: &Io) -> Result<Self, ConfigError> {
        Self::make(Self::nothing(), io, Arc::default())
    }

    /// Returns whether the entry is vacant.
    pub fn is_vacant(&self) -> bool {
        self.config.nsid == 0
    }

    /// Opens a namespace for one worker of a controller; `stats` are that worker's counters.
    pub fn open(config: NamespaceConfig, io: &Io, stats: &IoStats) -> Result<Self, ConfigError> {
        config.check()?;
        Self::open_or_vacant(config, io, stats)
    }

    /// Opens a namespace with a checked configuration, or a vacant entry.
    pub fn open_or_vacant(
        config: NamespaceConfig,
        io: &Io,
        stats: &IoStats,
    ) -> Result<Self, ConfigError> {
        let record = match config.nsid {
            0 => Arc::default(),
            nsid => stats.namespace(nsid),
        };
        Self::make(config, io, record)
    }

    fn make(config: NamespaceConfig, io: &Io, record: Arc<IoRecord>) -> Result<Self, ConfigError> {
        let nsid = config.nsid;
        let queue = config
            .volume
            .open(io)
            .map_err(|error| ConfigError::Volume { nsid, error })?;
        let info = config.volume.info();
        let shift = config.block_size.trailing_zeros();
        let fixed = config.fixed_blocks();
        let table = config.table_file();
        let queue = match table {
            None => queue,
            Some(table) => {
                with_table(queue, table, io).map_err(|error| ConfigError::Volume { nsid, error })?
            }
        };
        let cached = table.is_some_and(|table| table.info().volatile_cache);
        Ok(Namespace {
            record,
            shift,
            blocks: fixed.unwrap_or(info.size >> shift),
            read_only: config.read_only || info.read_only,
            volatile_cache: info.volatile_cache || cached,
            immediate: queue.is_immediate(),
            prefetches: queue.prefetches(),
            queue,
            passthrough: None,
            access: Access::FULL,
            ana: AnaState::OPTIMIZED,
            closed: None,
            marks: Arc::default(),
            watched: false,
            _zones: config.zones.as_ref().map(ZonesInUse::new),
            config,
        })
    }
}
