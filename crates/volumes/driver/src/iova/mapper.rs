//! DMA mappings of a device: permanent and temporary regions, and the table that finds registered
//! memory by address.
//!
//! A [`Region`] owns one mapping. While any holder exists (a buffer, an outstanding command, a
//! queue), the device may access its memory. When the last holder drops the region, the mapping is
//! removed first, then the addresses are freed, then the memory. Only that order keeps a device
//! from writing into reused memory.
//!
//! Temporary regions stay mapped after use, for the next transfer to the same memory, until room is
//! needed. The least recently used ones are then unmapped. Reaching the kernel's limit on mappings,
//! or the end of a small aperture, thus costs an unmap instead of failing the transfer.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use dma::{Memory, Prot};

use super::{RangeEnd, Space};
use crate::transport::{DmaLimits, Mapping, Source, Transport, TransportError};
use sync::Unpoisoned;

/// Number of unused temporary mappings that are removed at once to make room for another.
const EVICT: usize = 16;

/// Reason why memory could not be mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapFailure {
    /// The range exceeds its memory, is empty, or is not aligned to the granularity of mappings.
    #[error("not a range of whole pages inside its memory")]
    Range,
    /// No free range of addresses is long enough, even after unmapping unused temporary regions.
    #[error("no free IOVA range of {len} bytes")]
    NoSpace {
        /// Length in bytes of the mapping that found no room.
        len: u64,
    },
    /// The transport refused the mapping.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The driver cannot allocate memory in its own process.
    #[error("no memory for DMA")]
    Memory(#[from] dma::MapError),
}

/// Owner of the memory behind a DMA mapping.
#[derive(Debug)]
enum RegionOwner {
    Memory(Memory),
    /// Memory that the user has promised to keep in place (see [`Mapper::register_host`]).
    Promised,
}

/// DMA mapping, which is removed from the device when this value is dropped.
#[derive(Debug)]
pub struct Region {
    mapper: Arc<Mapper>,
    iova: u64,
    len: u64,
    /// Address of the mapped memory in this process.
    host: usize,
    /// Byte offset of the mapped range in its memory.
    offset: u64,
    keep: RegionOwner,
}

impl Region {
    /// Returns the first device address (IOVA) of the mapping.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// Returns the length of the mapping in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the region is empty, which it never is.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the mapping's first byte in this process.
    pub fn host(&self) -> usize {
        self.host
    }

    /// Returns the memory and the region's offset in it; `None` when the memory was given by
    /// address.
    pub fn memory(&self) -> Option<(&Memory, u64)> {
        match &self.keep {
            RegionOwner::Memory(memory) => Some((memory, self.offset)),
            RegionOwner::Promised => None,
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let mapper = self.mapper.clone();
        mapper.unmap(self);
    }
}

/// Registration of memory with a mapper. While it exists, requests can use the memory by its
/// address.
#[derive(Debug)]
pub struct Registration {
    region: Arc<Region>,
}

impl Registration {
    /// Returns the DMA mapping of the registered memory.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }
}

impl Drop for Registration {
    /// Removes the memory from the table. The mapping is removed when the last command that uses it
    /// has completed.
    fn drop(&mut self) {
        let mapper = self.region.mapper.clone();
        mapper.forget(&self.region);
    }
}

/// Snapshot of the registered memory, for lookups without a lock.
#[derive(Debug, Default)]
pub struct RegionTable {
    /// DMA mappings, sorted by their address in this process.
    regions: Vec<Arc<Region>>,
}

impl RegionTable {
    /// Returns the region that holds all `len` bytes at this address of the process, and their
    /// address for the device; `None` when no region does.
    #[inline]
    pub fn find(&self, host: usize, len: u64) -> Option<(&Arc<Region>, u64)> {
        let after = self.regions.partition_point(|region| region.host <= host);
        let region = self.regions.get(after.checked_sub(1)?)?;
        let offset = (host - region.host) as u64;
        let end = offset.checked_add(len)?;
        (len > 0 && end <= region.len).then_some((region, region.iova + offset))
    }

    /// Returns the number of registered regions.
    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// Returns whether no memory is registered.
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }
}

/// Counters of a mapper.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapperCounters {
    /// Number of DMA mappings that exist now.
    pub mappings: usize,
    /// Number of temporary DMA mappings that exist now.
    pub temporary: usize,
    /// Number of DMA mappings created so far.
    pub mapped: u64,
    /// Number of requests for temporary mappings that an existing mapping served.
    pub reused: u64,
    /// Number of temporary mappings that were unmapped to make room.
    pub evicted: u64,
    /// Number of mappings that could not be removed; their memory and addresses are never used
    /// again.
    pub lost: u64,
}

struct Temporary {
    region: Arc<Region>,
    used: u64,
}

struct Inner {
    space: Space,
    /// Temporary DMA mappings, by their address in this process.
    temporary: BTreeMap<usize, Temporary>,
    clock: u64,
    table: Arc<RegionTable>,
    counters: MapperCounters,
    /// Length in bytes of each mapping in the transport, by its first IOVA.
    live: BTreeMap<u64, u64>,
    /// Whether the device's access to memory was revoked: no mapping exists or can be added.
    cut: bool,
}

/// DMA mappings of one device, which all its users share.
pub struct Mapper {
    transport: Arc<dyn Transport>,
    limits: DmaLimits,
    inner: Mutex<Inner>,
    /// Number of changes of the table of registered memory.
    generation: AtomicU64,
}

impl std::fmt::Debug for Mapper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapper")
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

impl Mapper {
    /// Creates a mapper that has no mappings yet.
    pub fn new(transport: Arc<dyn Transport>) -> Arc<Self> {
        let limits = transport.dma_limits();
        Arc::new(Self {
            inner: Mutex::new(Inner {
                space: Space::new(&limits.iova_ranges, limits.page_size),
                temporary: BTreeMap::new(),
                clock: 0,
                table: Arc::default(),
                counters: MapperCounters::default(),
                live: BTreeMap::new(),
                cut: false,
            }),
            transport,
            limits,
            generation: AtomicU64::new(0),
        })
    }

    /// Returns the transport's limits of DMA mappings.
    pub fn limits(&self) -> &DmaLimits {
        &self.limits
    }

    /// Returns the counters of existing and created DMA mappings.
    pub fn counters(&self) -> MapperCounters {
        self.lock().counters
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every update is complete before a panic can occur.
        self.inner.lock().unpoisoned()
    }

    /// Maps `len` bytes of a memory from `offset` on, until the region is dropped.
    ///
    /// # Errors
    /// [`MapFailure`] when the range is invalid, no address space is left, or the transport
    /// refuses.
    pub fn map(
        self: &Arc<Self>,
        memory: &Memory,
        offset: u64,
        len: u64,
    ) -> Result<Arc<Region>, MapFailure> {
        let prot = Prot {
            read: true,
            write: memory.is_writable(),
        };
        self.map_source(
            RegionOwner::Memory(memory.clone()),
            offset,
            len,
            prot,
            RangeEnd::Low,
        )
    }

    /// Maps a part of a memory for one or a few transfers, or returns an existing mapping. The
    /// mapping is cached until room is needed and nothing holds the region.
    ///
    /// # Errors
    /// [`MapFailure`] when the range is invalid, no address space is left, or the transport
    /// refuses.
    pub fn map_temporary(
        self: &Arc<Self>,
        memory: &Memory,
        offset: u64,
        len: u64,
    ) -> Result<Arc<Region>, MapFailure> {
        let source = Source::File { memory, offset };
        let host = source.host(len).ok_or(MapFailure::Range)?;
        {
            let mut inner = self.lock();
            inner.clock += 1;
            let clock = inner.clock;
            if let Some(known) = inner.temporary.get_mut(&host)
                && known.region.len >= len
            {
                known.used = clock;
                let region = known.region.clone();
                inner.counters.reused += 1;
                return Ok(region);
            }
        }
        let prot = Prot {
            read: true,
            write: memory.is_writable(),
        };
        let keep = RegionOwner::Memory(memory.clone());
        let region = self.map_source(keep, offset, len, prot, RangeEnd::High)?;
        let mut inner = self.lock();
        let used = inner.clock;
        let entry = Temporary {
            region: region.clone(),
            used,
        };
        let before = inner.temporary.insert(host, entry);
        inner.counters.temporary = inner.temporary.len();
        drop(inner);
        // Unmapping takes the lock.
        drop(before);
        Ok(region)
    }

    /// Maps all of a memory and registers its addresses, so that transfers to and from it need no
    /// copy.
    ///
    /// # Errors
    /// [`MapFailure`] when the memory cannot be mapped.
    pub fn register(self: &Arc<Self>, memory: &Memory) -> Result<Registration, MapFailure> {
        // Only whole pages count. The file's last page may be partial, and is mapped all the same.
        let granule = self.limits.page_size;
        let len = (memory.len() as u64) & !(granule - 1);
        Ok(self.known(self.map(memory, 0, len)?))
    }

    /// Maps memory of this process at an address that is a multiple of the granularity, and
    /// registers its addresses. Only on transports with [`DmaLimits::host_ranges`].
    ///
    /// # Safety
    /// The memory must stay mapped, and be accessed by raw pointers or atomics only, until the
    /// registration and every buffer and command derived from it are dropped.
    ///
    /// # Errors
    /// [`MapFailure`] when the range is not aligned or cannot be mapped.
    #[allow(unsafe_code)]
    pub unsafe fn register_host(
        self: &Arc<Self>,
        address: usize,
        len: u64,
        prot: Prot,
    ) -> Result<Registration, MapFailure> {
        if !self.limits.host_ranges {
            return Err(TransportError::NeedsSharedMemory.into());
        }
        let region = self.map_source(
            RegionOwner::Promised,
            address as u64,
            len,
            prot,
            RangeEnd::Low,
        )?;
        Ok(self.known(region))
    }

    fn known(&self, region: Arc<Region>) -> Registration {
        let mut inner = self.lock();
        let mut regions = inner.table.regions.clone();
        let at = regions.partition_point(|other| other.host <= region.host);
        regions.insert(at, region.clone());
        inner.table = Arc::new(RegionTable { regions });
        self.generation.fetch_add(1, Ordering::Release);
        Registration { region }
    }

    fn forget(&self, region: &Arc<Region>) {
        let mut inner = self.lock();
        let mut regions = inner.table.regions.clone();
        regions.retain(|other| !Arc::ptr_eq(other, region));
        let before = std::mem::replace(&mut inner.table, Arc::new(RegionTable { regions }));
        self.generation.fetch_add(1, Ordering::Release);
        drop(inner);
        drop(before);
    }

    /// Returns a number that changes whenever [`Mapper::table`] changes.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Returns the current table of registered memory. Holding it keeps its regions mapped.
    pub fn table(&self) -> Arc<RegionTable> {
        self.lock().table.clone()
    }

    fn map_source(
        self: &Arc<Self>,
        keep: RegionOwner,
        offset: u64,
        len: u64,
        prot: Prot,
        end: RangeEnd,
    ) -> Result<Arc<Region>, MapFailure> {
        let source = match &keep {
            RegionOwner::Memory(memory) => Source::File { memory, offset },
            RegionOwner::Promised => Source::Host {
                address: usize::try_from(offset).map_err(|_| MapFailure::Range)?,
            },
        };
        if len == 0 || (offset | len) & (self.limits.page_size - 1) != 0 {
            return Err(MapFailure::Range);
        }
        let host = source.host(len).ok_or(MapFailure::Range)?;
        let iova = loop {
            let iova = self.reserve(len, end)?;
            let mapping = Mapping {
                iova,
                len,
                source,
                prot,
            };
            match self.transport.map(mapping) {
                Ok(()) => break iova,
                Err(error) => {
                    let mut inner = self.lock();
                    inner.space.free(iova, len);
                    inner.counters.mappings -= 1;
                    drop(inner);
                    // Another user of the same container may have used up the kernel's limit.
                    if !matches!(error, TransportError::NoMappings) || !self.evict(EVICT) {
                        return Err(error.into());
                    }
                }
            }
        };
        let mut inner = self.lock();
        inner.counters.mapped += 1;
        inner.live.insert(iova, len);
        drop(inner);
        Ok(Arc::new(Region {
            mapper: self.clone(),
            iova,
            len,
            host,
            offset,
            keep,
        }))
    }

    /// Reserves an IOVA range and one of the kernel's mappings, evicting temporary regions when
    /// there is no room.
    fn reserve(&self, len: u64, end: RangeEnd) -> Result<u64, MapFailure> {
        loop {
            {
                let mut inner = self.lock();
                if inner.cut {
                    return Err(TransportError::Gone("it was cut off".into()).into());
                }
                if inner.counters.mappings < self.limits.max_mappings
                    && let Some(iova) = inner.space.allocate(len, end)
                {
                    inner.counters.mappings += 1;
                    return Ok(iova);
                }
            }
            if !self.evict(EVICT) {
                let full = self.lock().counters.mappings >= self.limits.max_mappings;
                return Err(if full {
                    TransportError::NoMappings.into()
                } else {
                    MapFailure::NoSpace { len }
                });
            }
        }
    }

    /// Removes up to `count` unused temporary mappings. Returns `false` when there is none.
    fn evict(&self, count: usize) -> bool {
        let mut inner = self.lock();
        let mut unused: Vec<(u64, usize)> = inner
            .temporary
            .iter()
            .filter(|(_, entry)| Arc::strong_count(&entry.region) == 1)
            .map(|(host, entry)| (entry.used, *host))
            .collect();
        unused.sort_unstable();
        // Evicts a share of a large cache, so that many mappings pay for finding the oldest.
        unused.truncate(count.max(unused.len() / 8));
        let victims: Vec<Temporary> = unused
            .iter()
            .filter_map(|(_, host)| inner.temporary.remove(host))
            .collect();
        inner.counters.evicted += victims.len() as u64;
        inner.counters.temporary = inner.temporary.len();
        drop(inner);
        // Unmapping takes the lock.
        !victims.is_empty()
    }

    /// Removes all unused temporary mappings.
    pub fn trim(&self) {
        self.evict(usize::MAX);
    }

    /// Revokes the device's access to all memory, even during transfers. For a device that no
    /// longer answers. Returns `true` when the device certainly has no access any more. No mapping
    /// can be added afterwards.
    pub fn cut_off(&self) -> bool {
        let mut inner = self.lock();
        inner.cut = true;
        let transport = &self.transport;
        inner
            .live
            .retain(|&iova, &mut len| transport.unmap(iova, len).is_err());
        inner.live.is_empty()
    }

    fn unmap(&self, region: &mut Region) {
        let mut inner = self.lock();
        // Regions that are not live were unmapped when the device was cut off.
        let live = inner.live.remove(&region.iova).is_some();
        drop(inner);
        let result = if live {
            self.transport.unmap(region.iova, region.len)
        } else {
            Ok(())
        };
        let mut inner = self.lock();
        inner.counters.mappings = inner.counters.mappings.saturating_sub(1);
        match result {
            Ok(()) => {
                inner.space.free(region.iova, region.len);
            }
            Err(error) => {
                inner.counters.lost += 1;
                drop(inner);
                tracing::warn!(
                    iova = format_args!("{:#x}", region.iova),
                    len = region.len,
                    %error,
                    "memory could not be unmapped from the device; it is not used again"
                );
                let keep = std::mem::replace(&mut region.keep, RegionOwner::Promised);
                std::mem::forget(keep);
            }
        }
    }
}
