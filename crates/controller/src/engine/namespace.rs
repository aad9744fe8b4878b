//! A namespace as the data path sees it.

use super::commands::Sort;
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

/// A namespace with its worker's queue into the volume.
pub(crate) struct Namespace {
    pub config: NamespaceConfig,
    pub queue: OpenQueue,
    /// What this worker did for it.
    pub record: Arc<IoRecord>,
    /// Takes commands before the volume does.
    pub passthrough: Option<Box<dyn Passthrough>>,
    /// The volume does reads and writes at once.
    pub immediate: bool,
    /// The volume takes prefetch hints.
    pub prefetches: bool,
    /// Logical block size in bytes, as a power of two.
    pub shift: u32,
    /// Size in logical blocks.
    pub blocks: u64,
    pub read_only: bool,
    /// The volume loses completed writes with the power, unless flushed.
    pub volatile_cache: bool,
    /// What the host may do on it.
    pub access: Access,
    /// How the controller reaches it.
    pub ana: AnaState,
    /// Commands on it end with this: it is being erased, or was not wholly.
    pub closed: Option<Status>,
    /// Blocks that Write Uncorrectable has marked.
    pub marks: Arc<Marks>,
    /// There were some when the engine looked last: commands take the general way, which checks
    /// them.
    pub watched: bool,
    /// Its zones are in use: behind the queue, which has nothing in flight when it is dropped.
    _zones: Option<ZonesInUse>,
}

impl Namespace {
    /// Commands are in flight whose end wakes nobody.
    pub fn needs_polling(&self) -> bool {
        let passthrough = self.passthrough.as_ref();
        self.queue.state().wake == Wake::Poll || passthrough.is_some_and(|p| p.needs_polling())
    }

    /// It is being formatted, and its metadata is stored nowhere any more: the format has a new
    /// file made.
    pub fn loses_table(&self) -> bool {
        let formats = self.config.formats.as_ref();
        let renews = formats.is_some_and(Formats::has_metadata);
        let metadata = self.config.metadata.as_ref();
        let lost = metadata.is_some_and(|metadata| metadata.is_lost());
        self.closed == Some(Status::FORMAT_IN_PROGRESS) && renews && lost
    }

    /// The namespace has these blocks. Where it has grown, the host may know that before this
    /// worker, which is told by a message: before anything is refused, the volume is asked.
    pub fn covers(&self, slba: u64, blocks: u64) -> bool {
        let within = |size| slba.checked_add(blocks).is_some_and(|end| end <= size);
        within(self.blocks)
            || !self.is_fixed() && within(self.config.volume.info().size >> self.shift)
    }

    /// It has zones.
    #[inline]
    pub fn is_zoned(&self) -> bool {
        self.config.zones.is_some()
    }

    /// It has placement handles.
    #[inline]
    pub fn is_placed(&self) -> bool {
        self.config.placement.is_some()
    }

    /// Its blocks have metadata.
    #[inline]
    pub fn has_metadata(&self) -> bool {
        self.config.metadata.is_some()
    }

    /// Its protection information has an extended format.
    pub fn has_extended_format(&self) -> bool {
        let metadata = self.config.metadata.as_deref();
        let protection = metadata.and_then(|metadata| metadata.layout().protection);
        protection.is_some_and(|protection| protection.is_extended_format())
    }

    /// It has as many blocks as it was made with, and what is in them stays: others keep account of
    /// it.
    pub fn is_fixed(&self) -> bool {
        self.is_zoned() || self.has_metadata()
    }

    /// Which handlers its commands have.
    pub fn sort(&self) -> Sort {
        match (self.is_zoned(), self.has_metadata()) {
            (true, _) => Sort::Zoned,
            (_, true) => Sort::Metadata,
            _ => Sort::Plain,
        }
    }

    /// Its volume has so many blocks now.
    pub fn resized(&mut self, blocks: u64) {
        self.blocks = blocks;
        if let Some(passthrough) = &mut self.passthrough {
            passthrough.resized(blocks);
        }
    }

    /// It has so many blocks like that now, with this metadata. Nothing is in flight on it.
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

    /// When to look at them next, though nothing wakes the worker.
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

    /// What a place is configured with that no namespace has.
    pub fn nothing() -> NamespaceConfig {
        NamespaceConfig {
            nsid: 0,
            volume: Arc::new(NullVolume::placeholder()),
            block_size: 512,
            read_only: true,
            nguid: [0; 16],
            eui64: [0; 8],
            zones: None,
            placement: None,
            metadata: None,
            formats: None,
        }
    }

    /// A place that no namespace has.
    pub fn vacant(io: &Io) -> Result<Self, ConfigError> {
        Self::make(Self::nothing(), io, Arc::default())
    }

    /// No namespace is here.
    pub fn is_vacant(&self) -> bool {
        self.config.nsid == 0
    }

    /// For a worker's part of a controller, whose counters `stats` are.
    pub fn open(config: NamespaceConfig, io: &Io, stats: &IoStats) -> Result<Self, ConfigError> {
        config.check()?;
        Self::open_or_vacant(config, io, stats)
    }

    /// The same of a configuration that was checked, or is of a vacant place.
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
