//! Queues and doorbell buffers in scattered guest memory.

use std::sync::atomic::Ordering;

use crate::common::{PAGE, Space};
use dma::{Access, Cells, DmaError, DmaMap, Memory, Prot, Ring};
use proptest::prelude::*;

fn entry64(i: u32) -> [u8; 64] {
    std::array::from_fn(|byte| (i as usize * 7 + byte) as u8)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ring_entries_are_at_device_addresses(
        places in Just((0..8usize).collect::<Vec<_>>()).prop_shuffle(),
        contiguous in any::<bool>(),
        entries in 2..512u32,
        submission in any::<bool>(),
    ) {
        let places = if contiguous { (0..8).collect() } else { places };
        let space = Space::new(0x10000, places.into_iter().map(Some).collect());
        let size = if submission { 64usize } else { 16 };
        let ring = Ring::resolve(&space.map, 0x10000, entries, size, Access::Write).unwrap();
        for i in 0..entries {
            let at = 0x10000 + u64::from(i) * size as u64;
            let mut cqe = [0; 16];
            cqe.copy_from_slice(&entry64(i + 1)[..16]);
            if submission {
                ring.store64(i, entry64(i));
                let mut seen = [0; 64];
                space.map.read(at, &mut seen).unwrap();
                prop_assert_eq!(seen, entry64(i));
                prop_assert_eq!(ring.load64(i), entry64(i));
                // Calls for entries of another size do nothing.
                ring.store_cqe(i, cqe);
                prop_assert_eq!(ring.load64(i), entry64(i));
            } else {
                ring.store_cqe(i, cqe);
                let mut seen = [0; 16];
                space.map.read(at, &mut seen).unwrap();
                prop_assert_eq!(seen, cqe);
                prop_assert_eq!(ring.load_cqe(i), cqe);
                prop_assert_eq!(ring.load64(i), [0; 64]);
            }
            ring.prefetch(i);
        }
        // What lies behind the ring is not touched.
        let end = 0x10000 + u64::from(entries) * size as u64;
        if end < 0x10000 + 8 * PAGE {
            let mut rest = vec![0xFF; (0x10000 + 8 * PAGE - end) as usize];
            ring.store64(entries, [0xEE; 64]);
            ring.store_cqe(entries, [0xEE; 16]);
            space.map.read(end, &mut rest).unwrap();
            prop_assert!(rest.iter().all(|&byte| byte == 0));
        }
        prop_assert_eq!(ring.load64(entries), [0; 64]);
        prop_assert_eq!(ring.load_cqe(u32::MAX), [0; 16]);
    }

    #[test]
    fn batch_matches_single_entries(
        places in Just((0..8usize).collect::<Vec<_>>()).prop_shuffle(),
        contiguous in any::<bool>(),
        entries in 2..512u32,
        from in 0..520u32,
        wanted in 0..70usize,
    ) {
        let places = if contiguous { (0..8).collect() } else { places };
        let space = Space::new(0x10000, places.into_iter().map(Some).collect());
        let ring = Ring::resolve(&space.map, 0x10000, entries, 64, Access::Write).unwrap();
        for i in 0..entries {
            ring.store64(i, entry64(i));
        }
        let mut batch = vec![[0xAA; 64]; wanted];
        let count = ring.load_batch(from, &mut batch);
        let left = entries.saturating_sub(from) as usize;
        prop_assert!(count <= left.min(wanted));
        // To the end of the ring, or of a page where pages are scattered; at
        // least one, if there is one.
        let page = (64 - from as usize % 64).min(left);
        prop_assert!(count == left.min(wanted) || (!contiguous && count >= page.min(wanted)));
        for (i, entry) in batch.iter().enumerate() {
            let expected = if i < count { entry64(from + i as u32) } else { [0xAA; 64] };
            prop_assert_eq!(*entry, expected);
        }

        let ring = Ring::resolve(&space.map, 0x10000, entries, 16, Access::Write).unwrap();
        (0..entries).for_each(|i| ring.store_cqe(i, [0; 16]));
        let run = ring.cqe_run(from, wanted as u32);
        prop_assert!(run.len() as usize <= left.min(wanted));
        prop_assert_eq!(run.is_empty(), left.min(wanted) == 0);
        // One too many is not stored.
        (0..=run.len()).for_each(|i| run.store(i, [i as u8 + 1; 16]));
        for i in 0..entries {
            let stored = i.checked_sub(from).filter(|&at| at < run.len());
            prop_assert_eq!(ring.load_cqe(i), [stored.map_or(0, |at| at as u8 + 1); 16]);
        }
        let read_only = Ring::resolve(&space.map, 0x10000, entries, 16, Access::Read).unwrap();
        prop_assert!(read_only.cqe_run(0, 1).is_empty());
    }

    #[test]
    fn cells_are_at_device_addresses(
        places in Just((0..4usize).collect::<Vec<_>>()).prop_shuffle(),
        count in 1..4096usize,
    ) {
        let space = Space::new(0, places.into_iter().map(Some).collect());
        let cells = Cells::resolve(&space.map, 0, count, Access::Read).unwrap();
        for i in (0..count).step_by(61) {
            cells.get(i).unwrap().store(i as u32 ^ 0x5555, Ordering::Relaxed);
            prop_assert_eq!(u32::from_le_bytes(space.bytes(i as u64 * 4).unwrap()), i as u32 ^ 0x5555);
        }
        prop_assert!(cells.get(count).is_none());
        prop_assert!(cells.get(usize::MAX).is_none());
    }
}

#[test]
fn invalid_rings_are_refused() {
    let memory = Memory::anonymous(64 * 1024).unwrap();
    let mut map = DmaMap::new();
    map.map(0, 4096, Some((memory.clone(), 0)), Prot::RW)
        .unwrap();
    map.map(4096, 4096, Some((memory.clone(), 8192)), Prot::RO)
        .unwrap();
    map.map(8192, 4096, None, Prot::RW).unwrap();
    map.map(0u64.wrapping_sub(4096), 4096, Some((memory, 0)), Prot::RW)
        .unwrap();
    let ring =
        |iova, entries, size, access| Ring::resolve(&map, iova, entries, size, access).map(drop);
    assert_eq!(ring(0, 64, 64, Access::Write), Ok(()));
    assert_eq!(ring(0, 128, 64, Access::Read), Ok(()));
    assert_eq!(
        ring(0, 128, 64, Access::Write),
        Err(DmaError::Protection { iova: 4096 })
    );
    assert_eq!(
        ring(0, 129, 64, Access::Read),
        Err(DmaError::NotShared { iova: 8192 })
    );
    assert_eq!(
        ring(0x30000, 1, 64, Access::Read),
        Err(DmaError::Unmapped { iova: 0x30000 })
    );
    assert_eq!(ring(0, 0, 64, Access::Read), Err(DmaError::Overflow));
    assert_eq!(ring(0, 4, 48, Access::Read), Err(DmaError::Overflow));
    assert_eq!(
        ring(0, u32::MAX, 4096, Access::Read),
        Err(DmaError::Overflow)
    );
    assert_eq!(
        ring(0u64.wrapping_sub(4096), 65, 64, Access::Read),
        Err(DmaError::Overflow)
    );
    assert_eq!(ring(0u64.wrapping_sub(4096), 64, 64, Access::Read), Ok(()));
    // One that is not aligned; a scattered ring that starts inside a page.
    assert_eq!(
        ring(4, 4, 64, Access::Read),
        Err(DmaError::Misaligned { iova: 4 })
    );
    assert_eq!(ring(8, 4, 64, Access::Read), Ok(()));
    assert_eq!(
        ring(64, 100, 64, Access::Read),
        Err(DmaError::Misaligned { iova: 64 })
    );
    assert_eq!(ring(64, 63, 64, Access::Read), Ok(()));
    assert_eq!(
        Cells::resolve(&map, 0, usize::MAX, Access::Read).map(drop),
        Err(DmaError::Overflow)
    );
    assert_eq!(
        Cells::resolve(&map, 0, 0, Access::Read).map(drop),
        Err(DmaError::Overflow)
    );
}

#[test]
fn ring_for_reading_is_not_stored_to() {
    let memory = Memory::anonymous(4096).unwrap();
    let read_only =
        Memory::from_fd(memory.fd().try_clone_to_owned().unwrap(), 4096, false).unwrap();
    let mut map = DmaMap::new();
    map.map(0, 4096, Some((read_only, 0)), Prot::RO).unwrap();
    let ring = Ring::resolve(&map, 0, 64, 64, Access::Read).unwrap();
    ring.store64(0, [1; 64]);
    ring.store_cqe(0, [1; 16]);
    assert_eq!(ring.load64(0), [0; 64]);
    memory.write(64, &[9; 64]).unwrap();
    assert_eq!(ring.load64(1), [9; 64]);
    assert_eq!(
        Cells::resolve(&map, 0, 4, Access::Read).map(drop),
        Err(DmaError::Protection { iova: 0 })
    );
}

#[test]
fn ring_outlives_its_window() {
    let memory = Memory::anonymous(4096).unwrap();
    let mut map = DmaMap::new();
    map.map(0, 4096, Some((memory.clone(), 0)), Prot::RW)
        .unwrap();
    let ring = Ring::resolve(&map, 0, 64, 64, Access::Write).unwrap();
    let cells = Cells::resolve(&map, 0, 16, Access::Write).unwrap();
    map.unmap_all();
    assert!(map.quiesced());
    assert_ne!(ring.generation(), map.generation());
    drop(map);
    memory.write(0, &[5; 64]).unwrap();
    drop(memory);
    assert_eq!(ring.load64(0), [5; 64]);
    assert_eq!(cells.get(0).unwrap().load(Ordering::Relaxed), 0x0505_0505);
}

/// A host that sees the new phase sees the whole completion, on another thread
/// and through another mapping.
#[test]
fn completion_phase_is_written_last() {
    const ENTRIES: u64 = 8;
    const ROUNDS: u64 = 100_000;
    let memory = Memory::anonymous(4096).unwrap();
    let host = Memory::from_fd(memory.fd().try_clone_to_owned().unwrap(), 4096, true).unwrap();
    let ring = |memory| {
        let mut map = DmaMap::new();
        map.map(0, 4096, Some((memory, 0)), Prot::RW).unwrap();
        Ring::resolve(&map, 0, ENTRIES as u32, 16, Access::Write).unwrap()
    };
    let (device, host) = (ring(memory.clone()), ring(host));
    // How many completions the host has taken; tells the device that there is room.
    let taken = std::sync::atomic::AtomicU64::new(0);
    let phase = |n: u64| 1 - (n / ENTRIES) as u8 % 2;
    let torn = std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..ROUNDS {
                while n.saturating_sub(taken.load(Ordering::Acquire)) >= ENTRIES {
                    std::thread::yield_now();
                }
                let mut cqe = [0; 16];
                cqe[..8].copy_from_slice(&n.to_le_bytes());
                cqe[8..12].copy_from_slice(&(n as u32).to_le_bytes());
                cqe[14] = phase(n);
                device.store_cqe((n % ENTRIES) as u32, cqe);
            }
        });
        let mut spins = 0u32;
        for n in 0..ROUNDS {
            let cqe = loop {
                let cqe = host.load_cqe((n % ENTRIES) as u32);
                if cqe[14] & 1 == phase(n) {
                    break cqe;
                }
                // Mostly spinning: the closer the look, the better the chance to see
                // a completion half posted.
                spins = spins.wrapping_add(1);
                if spins.is_multiple_of(4096) {
                    std::thread::yield_now();
                }
            };
            if cqe[..8] != n.to_le_bytes() || cqe[8..12] != (n as u32).to_le_bytes() {
                taken.store(ROUNDS, Ordering::Release);
                return Some((n, cqe));
            }
            taken.store(n + 1, Ordering::Release);
        }
        None
    });
    assert_eq!(torn, None);
}
