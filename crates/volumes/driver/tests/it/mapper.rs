//! The IOVA space with mappings in it, against a transport that remembers what is mapped.

use crate::common::Random;
use dma::Memory;
use driver::iova::{MapFailure, Mapper, Region};
use driver::transport::{DmaLimits, DoorbellCell, Mapping, Source, Transport, TransportError};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// What a transport would have mapped.
#[derive(Debug)]
struct Fake {
    ranges: Vec<RangeInclusive<u64>>,
    limit: usize,
    /// The kernel's own limit, if it is lower than what was announced.
    really: usize,
    mapped: Mutex<BTreeMap<u64, (u64, usize)>>,
    refuse_unmap: AtomicBool,
}

impl Fake {
    fn new(ranges: Vec<RangeInclusive<u64>>, limit: usize) -> Arc<Self> {
        Arc::new(Self {
            ranges,
            limit,
            really: limit,
            mapped: Mutex::default(),
            refuse_unmap: AtomicBool::new(false),
        })
    }
    fn count(&self) -> usize {
        self.mapped.lock().unwrap().len()
    }
}

impl Transport for Fake {
    fn read32(&self, _: u64) -> Result<u32, TransportError> {
        Ok(0)
    }
    fn write32(&self, _: u64, _: u32) -> Result<(), TransportError> {
        Ok(())
    }
    fn doorbell(&self, _: u64) -> Option<DoorbellCell> {
        None
    }
    fn dma_limits(&self) -> DmaLimits {
        DmaLimits {
            iova_ranges: self.ranges.clone(),
            max_mappings: self.limit,
            page_size: 4096,
            host_ranges: false,
        }
    }
    fn map(&self, mapping: Mapping<'_>) -> Result<(), TransportError> {
        let Source::File { .. } = mapping.source else {
            return Err(TransportError::NeedsSharedMemory);
        };
        let (start, end) = (mapping.iova, mapping.iova + mapping.len);
        assert!(
            self.ranges
                .iter()
                .any(|r| r.contains(&start) && r.contains(&(end - 1))),
            "outside what is allowed"
        );
        assert_eq!((mapping.iova | mapping.len) % 4096, 0);
        let mut mapped = self.mapped.lock().unwrap();
        if mapped.len() >= self.really {
            return Err(TransportError::NoMappings);
        }
        if let Some((at, (len, _))) = mapped.range(..end).next_back() {
            assert!(at + len <= start, "overlap at {start:#x}");
        }
        mapped.insert(
            start,
            (mapping.len, mapping.source.host(mapping.len).unwrap()),
        );
        Ok(())
    }
    fn unmap(&self, iova: u64, len: u64) -> Result<(), TransportError> {
        if self.refuse_unmap.load(Ordering::Relaxed) {
            return Err(TransportError::Gone("no answer".into()));
        }
        let before = self
            .mapped
            .lock()
            .unwrap()
            .remove(&iova)
            .expect("unmapped twice, or never mapped");
        assert_eq!(before.0, len);
        Ok(())
    }
    fn msix_vectors(&self) -> u16 {
        0
    }
    fn set_msix(&self, _: &[Option<BorrowedFd<'_>>]) -> Result<(), TransportError> {
        Ok(())
    }
    fn set_bus_master(&self, _: bool) -> Result<(), TransportError> {
        Ok(())
    }
    fn reset(&self) -> Result<(), TransportError> {
        Ok(())
    }
}

const PAGE: u64 = 4096;

#[test]
fn random_mappings_match_transport() {
    let operations = if cfg!(debug_assertions) {
        100_000
    } else {
        2_000_000
    };
    let fake = Fake::new(vec![0x10_0000..=0x1f_ffff, 0x4000_0000..=0x400f_ffff], 120);
    let mapper = Mapper::new(fake.clone());
    let memory = Memory::anonymous(4 << 20).unwrap();
    let mut held: Vec<(Arc<Region>, u64, u64)> = Vec::new();
    let mut random = Random(5);
    let (mut full, mut made) = (0u64, 0u64);
    for _ in 0..operations {
        let eager = (made / 300) % 2 == 0;
        if held.len() < 2 || random.below(10) < if eager { 6 } else { 3 } {
            let most = if random.below(8) == 0 { 40 } else { 4 };
            let pages = 1 + random.below(most);
            let offset = random.below(1024 - pages) * PAGE;
            let len = pages * PAGE;
            let mapped = if random.below(3) == 0 {
                mapper.map(&memory, offset, len)
            } else {
                mapper.map_temporary(&memory, offset, len)
            };
            match mapped {
                Ok(region) => {
                    made += 1;
                    assert!(region.len() >= len);
                    let known = *fake
                        .mapped
                        .lock()
                        .unwrap()
                        .get(&region.iova())
                        .expect("not mapped");
                    let host = Source::File {
                        memory: &memory,
                        offset,
                    }
                    .host(len)
                    .unwrap();
                    assert_eq!(known, (region.len(), host), "mapped elsewhere");
                    held.push((region, offset, len));
                }
                Err(
                    MapFailure::NoSpace { .. } | MapFailure::Transport(TransportError::NoMappings),
                ) => {
                    full += 1;
                    held.truncate(held.len() / 2);
                }
                Err(other) => panic!("{other}"),
            }
        } else {
            let at = random.below(held.len() as u64) as usize;
            held.swap_remove(at);
        }
        for (region, ..) in held.first().into_iter().chain(held.last()) {
            assert!(
                fake.mapped.lock().unwrap().contains_key(&region.iova()),
                "evicted while in use"
            );
        }
    }
    let counters = mapper.counters();
    assert!(
        full > 0 && counters.evicted > 100 && counters.reused > 100,
        "{full} {counters:?}"
    );
    assert_eq!((counters.lost, counters.mappings), (0, fake.count()));
    drop(held);
    mapper.trim();
    while mapper.counters().temporary > 0 {
        mapper.trim();
    }
    assert_eq!((fake.count(), mapper.counters().mappings), (0, 0), "leak");
}

#[test]
fn kernel_mapping_limit_is_met_by_eviction() {
    let fake = Fake::new(vec![0..=(1 << 40) - 1], 65_535);
    let mapper = Mapper::new(fake.clone());
    let memory = Memory::anonymous(70_000 * 4096).unwrap();
    for page in 0..70_000 {
        mapper.map_temporary(&memory, page * PAGE, PAGE).unwrap();
    }
    let counters = mapper.counters();
    assert!(
        fake.count() <= 65_535 && counters.evicted >= 70_000 - 65_535,
        "{counters:?}"
    );
    // The oldest went, the newest stayed.
    let reused = counters.reused;
    mapper.map_temporary(&memory, 69_999 * PAGE, PAGE).unwrap();
    mapper.map_temporary(&memory, 0, PAGE).unwrap();
    assert_eq!(mapper.counters().reused, reused + 1);
}

#[test]
fn unannounced_mapping_limit_is_met() {
    let fake = Arc::new(Fake {
        really: 8,
        ..Arc::into_inner(Fake::new(vec![0..=u64::MAX], 1000)).unwrap()
    });
    let mapper = Mapper::new(fake.clone());
    let memory = Memory::anonymous(64 * 4096).unwrap();
    for page in 0..64 {
        mapper.map_temporary(&memory, page * PAGE, PAGE).unwrap();
    }
    let fixed: Vec<_> = (0..8)
        .map(|page| mapper.map(&memory, page * PAGE, PAGE).unwrap())
        .collect();
    assert!(matches!(
        mapper.map(&memory, 0, PAGE),
        Err(MapFailure::Transport(TransportError::NoMappings))
    ));
    drop(fixed);
    assert!(mapper.map(&memory, 0, PAGE).is_ok());
}

#[test]
fn registered_memory_is_found_by_range() {
    let fake = Fake::new(vec![0..=u64::MAX], 1000);
    let mapper = Mapper::new(fake.clone());
    let memory = Memory::anonymous(16 * 4096).unwrap();
    let start = memory.segment(0, 1).unwrap().as_ptr().addr();
    assert!(mapper.table().is_empty());
    let generation = mapper.generation();
    let registration = mapper.register(&memory).unwrap();
    assert_ne!(mapper.generation(), generation);
    let table = mapper.table();
    let iova = registration.region().iova();
    for (at, len, found) in [
        (0, 1, true),
        (5, 16 * 4096 - 5, true),
        (0, 16 * 4096, true),
        (0, 16 * 4096 + 1, false),
        (16 * 4096 - 1, 2, false),
        (16 * 4096, 1, false),
        (3, 0, false),
        (1, u64::MAX, false),
    ] {
        let hit = table.find(start + at, len).map(|(_, iova)| iova);
        assert_eq!(hit, found.then_some(iova + at as u64), "{at} {len}");
    }
    assert!(table.find(start - 1, 1).is_none() && table.find(0, 1).is_none());
    drop(registration);
    assert!(mapper.table().is_empty());
    // The old table still keeps it mapped, as commands that use it would.
    assert_eq!(fake.count(), 1);
    drop(table);
    assert_eq!(fake.count(), 0);
}

#[test]
fn range_failing_to_unmap_is_never_reused() {
    let fake = Fake::new(vec![0x1000..=0x8fff], 1000);
    let mapper = Mapper::new(fake.clone());
    let memory = Memory::anonymous(8 * 4096).unwrap();
    let region = mapper.map(&memory, 0, 4 * PAGE).unwrap();
    let lost = region.iova();
    fake.refuse_unmap.store(true, Ordering::Relaxed);
    drop(region);
    fake.refuse_unmap.store(false, Ordering::Relaxed);
    assert_eq!(mapper.counters().lost, 1);
    let other = mapper.map(&memory, 0, 4 * PAGE).unwrap();
    assert_ne!(other.iova(), lost);
    assert!(matches!(
        mapper.map(&memory, 0, PAGE),
        Err(MapFailure::NoSpace { .. })
    ));
}

#[test]
fn disconnected_device_gets_no_mappings() {
    let fake = Fake::new(vec![0..=u64::MAX], 1000);
    let mapper = Mapper::new(fake.clone());
    let memory = Memory::anonymous(8 * 4096).unwrap();
    let held = mapper.map(&memory, 0, PAGE).unwrap();
    mapper.map_temporary(&memory, PAGE, PAGE).unwrap();
    assert!(mapper.cut_off());
    assert_eq!(fake.count(), 0);
    assert!(mapper.map(&memory, 0, PAGE).is_err());
    drop(held);
    assert_eq!(mapper.counters().lost, 0);
}

#[test]
fn invalid_ranges_are_refused() {
    let mapper = Mapper::new(Fake::new(vec![0..=u64::MAX], 1000));
    let memory = Memory::anonymous(8 * 4096).unwrap();
    for (offset, len) in [
        (0, 0),
        (1, PAGE),
        (0, 100),
        (8 * PAGE, PAGE),
        (0, 9 * PAGE),
        (u64::MAX - 4095, PAGE),
    ] {
        assert!(
            matches!(mapper.map(&memory, offset, len), Err(MapFailure::Range)),
            "{offset} {len}"
        );
        assert!(mapper.map_temporary(&memory, offset, len).is_err());
    }
}
