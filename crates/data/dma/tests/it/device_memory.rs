//! Memory of the device's own among windows.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

use dma::{
    Access, DmaError, DmaMap, MapError, Memory, Prot, Ring, SegmentList, SglError, prp, sgl,
};
use proptest::prelude::*;

const PAGE: u64 = 4096;

/// RAM at 0 to 64 KiB, page `n` of it full of `n`; 16 KiB of the device's own, full of 0xd0 to
/// 0xd3, at 32 KiB.
fn map() -> (DmaMap, Memory, Memory) {
    let ram = Memory::anonymous(16 * 4096).unwrap();
    let own = Memory::anonymous(4 * 4096).unwrap();
    for page in 0..16 {
        ram.write(page * 4096, &[page as u8; 4096]).unwrap();
    }
    for page in 0..4 {
        own.write(page * 4096, &[0xd0 + page as u8; 4096]).unwrap();
    }
    let mut map = DmaMap::new();
    map.map(0, 16 * PAGE, Some((ram.clone(), 0)), Prot::RW)
        .unwrap();
    map.set_device_memory(Some((8 * PAGE, own.clone())))
        .unwrap();
    (map, ram, own)
}

fn byte(map: &DmaMap, at: u64) -> u8 {
    let mut byte = [0];
    map.read(at, &mut byte).unwrap();
    byte[0]
}

#[test]
fn device_memory_hides_windows_until_removed() {
    let (mut map, ram, own) = map();
    // Twice, for the second time finds what was remembered.
    for _ in 0..2 {
        for page in 0..16u64 {
            let wanted = match page {
                8..12 => 0xd0 + (page - 8) as u8,
                _ => page as u8,
            };
            assert_eq!(byte(&map, page * PAGE), wanted, "page {page}");
            assert_eq!(byte(&map, page * PAGE + 4095), wanted, "page {page}");
        }
    }
    map.write(9 * PAGE, &[1; 8]).unwrap();
    let mut got = [0; 8];
    own.read(4096, &mut got).unwrap();
    assert_eq!(got, [1; 8]);
    ram.read(9 * 4096, &mut got).unwrap();
    assert_eq!(got, [9; 8], "the window below is not touched");
    // Elsewhere.
    map.set_device_memory(Some((100 * PAGE, own.clone())))
        .unwrap();
    assert_eq!((byte(&map, 9 * PAGE), byte(&map, 100 * PAGE)), (9, 0xd0));
    assert_eq!(map.device_memory().unwrap().0, 100 * PAGE);
    map.set_device_memory(None).unwrap();
    let gone = map.read(100 * PAGE, &mut got);
    assert_eq!(gone, Err(DmaError::Unmapped { iova: 100 * PAGE }));
    assert!(map.device_memory().is_none());
    // The windows were there all the time.
    assert_eq!(map.windows().map(|w| w.len).sum::<u64>(), 16 * PAGE);
}

#[test]
fn window_around_device_memory_is_split() {
    let (map, _ram, own) = map();
    let of = |at: u64| {
        let window = map.window_at(at).unwrap();
        let (memory, offset) = window.backing.unwrap();
        (window.iova, window.len, memory.is_same(&own), offset)
    };
    assert_eq!(of(0), (0, 8 * PAGE, false, 0));
    assert_eq!(of(8 * PAGE - 1), (0, 8 * PAGE, false, 0));
    assert_eq!(of(8 * PAGE), (8 * PAGE, 4 * PAGE, true, 0));
    assert_eq!(of(12 * PAGE), (12 * PAGE, 4 * PAGE, false, 12 * PAGE));
    assert_eq!(of(16 * PAGE - 1), (12 * PAGE, 4 * PAGE, false, 12 * PAGE));
    assert!(map.window_at(16 * PAGE).is_none());
}

#[test]
fn transfer_across_device_memory_border_is_refused() {
    let (map, _ram, _own) = map();
    let mut list = SegmentList::new();
    let mut prps = |prp1: u64, prp2: u64, len: u64| {
        list.begin(&map);
        let walked = prp::walk(&map, prp1, prp2, len, PAGE, Access::Read, &mut list);
        (walked.map_err(|_| ()), map.is_device_memory(&list))
    };
    assert_eq!(prps(8 * PAGE, 9 * PAGE, 2 * PAGE), (Ok(()), true));
    assert_eq!(prps(2 * PAGE, 3 * PAGE, 2 * PAGE), (Ok(()), false));
    assert_eq!(prps(2 * PAGE, 9 * PAGE, 2 * PAGE).0, Err(()));
    assert_eq!(prps(11 * PAGE, 12 * PAGE, 2 * PAGE).0, Err(()));
    // One page of 8 KiB that crosses the end.
    list.begin(&map);
    let at = 11 * PAGE;
    let crossing = prp::walk(&map, at, 0, PAGE + 1, 64 << 10, Access::Read, &mut list);
    assert_eq!(crossing, Err(DmaError::Mixed.into()));
    // And its beginning.
    list.begin(&map);
    let crossing = prp::walk(
        &map,
        7 * PAGE,
        0,
        2 * PAGE,
        64 << 10,
        Access::Read,
        &mut list,
    );
    assert_eq!(crossing, Err(DmaError::Mixed.into()));
    let block = |at: u64, len: u32| {
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&at.to_le_bytes());
        descriptor[8..12].copy_from_slice(&len.to_le_bytes());
        descriptor
    };
    for (at, len, wanted) in [
        (8 * PAGE, 4 * PAGE, Ok(())),
        (8 * PAGE, 4 * PAGE + 1, Err(SglError::Dma(DmaError::Mixed))),
        (8 * PAGE - 1, 4, Err(SglError::Dma(DmaError::Mixed))),
        (12 * PAGE, 4, Ok(())),
    ] {
        list.begin(&map);
        let walked = sgl::walk(&map, block(at, len as u32), len, Access::Read, &mut list);
        assert_eq!(walked, wanted, "{len} bytes at {at:#x}");
    }
    // Structures, too.
    assert!(Ring::resolve(&map, 8 * PAGE, 256, 64, Access::Read).is_ok());
    assert!(Ring::resolve(&map, 12 * PAGE, 64, 64, Access::Read).is_ok());
    for at in [7, 9, 11] {
        let ring = Ring::resolve(&map, at * PAGE, 256, 64, Access::Read);
        assert!(matches!(ring, Err(DmaError::Mixed)), "page {at}");
        assert!(map.is_mixed(at * PAGE, 256 * 64));
    }
    assert!(map.is_mixed(0, u64::MAX) && !map.is_mixed(8 * PAGE, 4 * PAGE));
    assert!(!map.is_mixed(0, 8 * PAGE) && !map.is_mixed(12 * PAGE, u64::MAX));
}

#[test]
fn prp_and_sgl_lists_may_lie_in_device_memory() {
    let (map, ram, own) = map();
    let entries = |pages: [u64; 3]| pages.map(|page| (page * PAGE).to_le_bytes()).concat();
    let mut list = SegmentList::new();
    let mut first = |at: u64| {
        list.begin(&map);
        prp::walk(&map, 0, at, 4 * PAGE, PAGE, Access::Read, &mut list).unwrap();
        let mut bytes = [0; 4];
        for (n, byte) in bytes.iter_mut().enumerate() {
            list.copy_to(n as u64 * PAGE, std::slice::from_mut(byte));
        }
        bytes
    };
    own.write(0, &entries([1, 2, 3])).unwrap();
    assert_eq!(first(8 * PAGE), [0, 1, 2, 3]);
    ram.write(15 * 4096, &entries([4, 5, 6])).unwrap();
    assert_eq!(first(15 * PAGE), [0, 4, 5, 6]);
}

#[test]
fn commands_in_flight_keep_device_memory() {
    let (mut map, _ram, own) = map();
    let mut list = SegmentList::new();
    assert!(list.begin_piece(&map, 8 * PAGE, PAGE, Access::Write));
    let other = Memory::anonymous(4096).unwrap();
    map.set_device_memory(Some((8 * PAGE, other))).unwrap();
    drop(own);
    assert!(!map.quiesced(), "the command's memory is kept");
    let mut got = [0; 4];
    assert_eq!((list.copy_to(0, &mut got), got), (4, [0xd0; 4]));
    assert_eq!(byte(&map, 8 * PAGE), 0);
    list.clear();
    assert!(map.quiesced());
}

#[test]
fn piece_ends_at_device_memory_border() {
    let (map, _ram, _own) = map();
    let mut list = SegmentList::new();
    assert!(list.begin_piece(&map, 11 * PAGE, PAGE, Access::Read));
    assert!(!list.begin_piece(&map, 11 * PAGE, PAGE + 1, Access::Read));
    assert!(!list.begin_piece(&map, 7 * PAGE, PAGE + 1, Access::Read));
    assert!(list.begin_piece(&map, 7 * PAGE, PAGE, Access::Read));
}

#[test]
fn invalid_device_memory_is_refused() {
    let own = Memory::anonymous(8192).unwrap();
    let mut map = DmaMap::new();
    let mut set = |at, memory: &Memory| map.set_device_memory(Some((at, memory.clone())));
    assert_eq!(set(512, &own), Err(MapError::Misaligned { iova: 512 }));
    assert_eq!(set(u64::MAX - 4095, &own), Err(MapError::Overflow));
    assert_eq!(set(u64::MAX - 8191, &own), Ok(()));
    let odd = Memory::anonymous(5000).unwrap();
    assert_eq!(set(0, &odd), Err(MapError::Misaligned { iova: 0 }));
    assert_eq!(map.device_memory().unwrap().0, u64::MAX - 8191, "as before");
    let mut end = [1];
    map.read(u64::MAX, &mut end).unwrap();
    assert_eq!(end, [0]);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 4 } else { 500 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Windows and the device's memory anywhere: each byte is where a naive look finds it.
    #[test]
    fn map_with_device_memory_matches_naive_map(
        windows in prop::collection::btree_map(0..32u64, 1..6u64, 0..8),
        places in prop::collection::vec(prop::option::of(0..36u64), 1..6),
        looks in prop::collection::vec((0..40u64, 0..4096u64, 1..20_000u64), 1..40),
    ) {
        let ram = Memory::anonymous(40 * 4096).unwrap();
        let own = Memory::anonymous(4 * 4096).unwrap();
        for page in 0..40 {
            ram.write(page * 4096, &[page as u8; 4096]).unwrap();
        }
        own.write(0, &[0xdd; 4 * 4096]).unwrap();
        let mut map = DmaMap::new();
        let mut pages = [None; 48];
        for (at, len) in windows {
            let backing = Some((ram.clone(), at * PAGE));
            if map.map(at * PAGE, len.min(40 - at) * PAGE, backing, Prot::RW).is_ok() {
                let at = at as usize;
                for (n, page) in pages[at..40.min(at + len as usize)].iter_mut().enumerate() {
                    *page = Some((at + n) as u8);
                }
            }
        }
        for place in places {
            map.set_device_memory(place.map(|at| (at * PAGE, own.clone()))).unwrap();
            for (page, offset, len) in &looks {
                let at = page * PAGE + offset;
                let mut got = vec![0; *len as usize];
                let wanted: Option<Vec<u8>> = (at..at + len)
                    .map(|at| match place {
                        Some(own) if (own..own + 4).contains(&(at / PAGE)) => Some(0xdd),
                        _ => pages[(at / PAGE) as usize],
                    })
                    .collect();
                let read = map.read(at, &mut got);
                prop_assert_eq!(read.ok().map(|()| got), wanted);
            }
        }
    }
}
