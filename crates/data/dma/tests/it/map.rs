//! The map against a naive model: a table with one entry per byte of a small address space.

use dma::{Access, Buffer, DmaError, DmaMap, MapError, Memory, PAGE, Prot, SegmentList};
use proptest::prelude::*;

const SPACE: u64 = 16 * PAGE;
/// Windows may start anywhere in the space and be as long as it.
const TABLE: usize = 2 * SPACE as usize;
const MEMORY: u64 = 8 * PAGE;

#[derive(Clone, Debug)]
enum Op {
    Map {
        iova: u64,
        len: u64,
        backing: Option<(usize, u64)>,
        prot: Prot,
    },
    Unmap {
        iova: u64,
        len: u64,
    },
    UnmapAll,
    Read {
        iova: u64,
        len: u64,
    },
    Write {
        iova: u64,
        len: u64,
        seed: u8,
    },
    Segments {
        iova: u64,
        len: u64,
        access: Access,
    },
}

/// Of windows: most of them whole pages.
fn address() -> impl Strategy<Value = u64> {
    prop_oneof![16 => (0..SPACE / PAGE).prop_map(|i| i * PAGE), 1 => 0..SPACE]
}

fn length() -> impl Strategy<Value = u64> {
    let pages = (1..5u64).prop_map(|i| i * PAGE);
    prop_oneof![16 => pages, 1 => 0..3 * PAGE, 1 => Just(u64::MAX), 1 => Just(SPACE)]
}

/// Of transfers: any bytes.
fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![0..3 * PAGE, 0..100u64]
}

fn op() -> impl Strategy<Value = Op> {
    let prot = (any::<bool>(), any::<bool>()).prop_map(|(read, write)| Prot { read, write });
    let prot = prop_oneof![4 => Just(Prot::RW), 1 => prot];
    let backing = prop_oneof![
        12 => (0..2usize, (0..MEMORY / PAGE).prop_map(|i| i * PAGE)).prop_map(Some),
        1 => (0..2usize, any::<u64>()).prop_map(Some),
        1 => Just(None),
    ];
    let access = prop_oneof![Just(Access::Read), Just(Access::Write)];
    prop_oneof![
        6 => (address(), length(), backing, prot)
            .prop_map(|(iova, len, backing, prot)| Op::Map { iova, len, backing, prot }),
        3 => (address(), length()).prop_map(|(iova, len)| Op::Unmap { iova, len }),
        1 => Just(Op::UnmapAll),
        4 => (0..SPACE, bytes()).prop_map(|(iova, len)| Op::Read { iova, len }),
        4 => (0..SPACE, bytes(), any::<u8>()).prop_map(|(iova, len, seed)| Op::Write { iova, len, seed }),
        4 => (0..SPACE, bytes(), access).prop_map(|(iova, len, access)| Op::Segments { iova, len, access }),
    ]
}

/// One byte of the address space: which window, where in memory.
#[derive(Clone, Copy)]
struct Byte {
    window: u64,
    place: Option<(usize, usize)>,
    prot: Prot,
}

struct Model {
    base: u64,
    bytes: Vec<Option<Byte>>,
    content: [Vec<u8>; 2],
}

impl Model {
    /// Index of an address that was generated relative to the base.
    fn range(&self, iova: u64, len: u64) -> Result<std::ops::Range<usize>, MapError> {
        if len == 0 {
            return Err(MapError::Empty);
        }
        let absolute = self.base + iova;
        absolute.checked_add(len - 1).ok_or(MapError::Overflow)?;
        Ok(iova as usize..iova.saturating_add(len).min(TABLE as u64) as usize)
    }

    fn map(
        &mut self,
        iova: u64,
        len: u64,
        backing: Option<(usize, u64)>,
        prot: Prot,
    ) -> Result<(), MapError> {
        let range = self.range(iova, len)?;
        let offset = backing.map_or(0, |(_, offset)| offset);
        if [iova, len, offset].iter().any(|n| n % PAGE != 0) {
            let iova = self.base + iova;
            return Err(MapError::Misaligned { iova });
        }
        if let Some((_, offset)) = backing
            && offset.checked_add(len).is_none_or(|end| end > MEMORY)
        {
            return Err(MapError::OutOfBacking {
                end: offset.saturating_add(len),
                size: MEMORY,
            });
        }
        // The last one that is overlapped is named.
        if let Some(byte) = self.bytes[range.clone()].iter().rev().flatten().next() {
            return Err(MapError::Overlap { iova: byte.window });
        }
        for i in range.clone() {
            let place = backing.map(|(memory, offset)| (memory, offset as usize + i - range.start));
            self.bytes[i] = Some(Byte {
                window: self.base + iova,
                place,
                prot,
            });
        }
        Ok(())
    }

    /// Every window is a byte for each of its addresses: their number is the sum of the lengths.
    fn unmap(&mut self, iova: u64, len: u64) -> Result<u64, MapError> {
        let range = self.range(iova, len)?;
        let window = |i: usize| self.bytes.get(i).copied().flatten().map(|byte| byte.window);
        let bisects = |a: usize, b: usize| window(a).filter(|_| window(a) == window(b));
        if range.start > 0
            && let Some(iova) = bisects(range.start - 1, range.start)
        {
            return Err(MapError::Bisects { iova });
        }
        if let Some(iova) = bisects(range.end - 1, range.end) {
            return Err(MapError::Bisects { iova });
        }
        let sum = self.bytes[range.clone()].iter().flatten().count();
        self.bytes[range].fill(None);
        Ok(sum as u64)
    }

    /// The range is not empty, and one window's.
    fn in_one_window(&self, iova: u64, len: u64) -> bool {
        let bytes = (iova..iova + len).map(|i| self.bytes.get(i as usize).copied().flatten());
        let mut windows = bytes.map(|byte| byte.map(|byte| byte.window));
        windows
            .next()
            .is_some_and(|first| first.is_some() && windows.all(|window| window == first))
    }

    /// The places of a range as far as it can be accessed, and the error that ends it.
    fn places(
        &self,
        iova: u64,
        len: u64,
        access: Access,
    ) -> (Vec<(usize, usize)>, Result<(), DmaError>) {
        let mut places = Vec::new();
        if len > 0 && (self.base + iova).checked_add(len - 1).is_none() {
            return (places, Err(DmaError::Overflow));
        }
        for i in iova..iova + len {
            let iova = self.base + i;
            let Some(byte) = self.bytes.get(i as usize).copied().flatten() else {
                return (places, Err(DmaError::Unmapped { iova }));
            };
            let allowed = match access {
                Access::Read => byte.prot.read,
                Access::Write => byte.prot.write,
            };
            if !allowed {
                return (places, Err(DmaError::Protection { iova }));
            }
            let Some(place) = byte.place else {
                return (places, Err(DmaError::NotShared { iova }));
            };
            places.push(place);
        }
        (places, Ok(()))
    }
}

fn pattern(len: u64, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed))
        .collect()
}

fn run(base: u64, ops: Vec<Op>) {
    let memories = [
        Memory::anonymous(MEMORY as usize).unwrap(),
        Memory::anonymous(MEMORY as usize).unwrap(),
    ];
    let mut map = DmaMap::new();
    let content = [vec![0; MEMORY as usize], vec![0; MEMORY as usize]];
    let mut model = Model {
        base,
        bytes: vec![None; TABLE],
        content,
    };
    let mut list = SegmentList::new();
    let mut piece = SegmentList::new();
    for op in ops {
        let generation = map.generation();
        let mut changed = false;
        match op {
            Op::Map {
                iova,
                len,
                backing,
                prot,
            } => {
                let expected = model.map(iova, len, backing, prot);
                let backing = backing.map(|(memory, offset)| (memories[memory].clone(), offset));
                assert_eq!(map.map(base + iova, len, backing, prot), expected);
                changed = expected.is_ok();
            }
            Op::Unmap { iova, len } => {
                let expected = model.unmap(iova, len);
                assert_eq!(map.unmap(base + iova, len), expected);
                changed = expected.is_ok_and(|sum| sum > 0);
            }
            Op::UnmapAll => {
                changed = map.window_count() > 0;
                let sum = model.bytes.iter().flatten().count();
                model.bytes.fill(None);
                assert_eq!(map.unmap_all(), sum as u64);
            }
            Op::Read { iova, len } => {
                let (places, expected) = model.places(iova, len, Access::Read);
                let mut buf = vec![0; len as usize];
                assert_eq!(map.read(base + iova, &mut buf), expected);
                if expected.is_ok() {
                    let content: Vec<u8> =
                        places.iter().map(|&(m, o)| model.content[m][o]).collect();
                    assert_eq!(buf, content);
                }
            }
            Op::Write { iova, len, seed } => {
                let (places, expected) = model.places(iova, len, Access::Write);
                let data = pattern(len, seed);
                assert_eq!(map.write(base + iova, &data), expected);
                for (&(m, o), byte) in places.iter().zip(data) {
                    model.content[m][o] = byte;
                }
            }
            Op::Segments { iova, len, access } => {
                let (places, expected) = model.places(iova, len, access);
                list.begin(&map);
                assert_eq!(map.segments(base + iova, len, access, &mut list), expected);
                let starts: Vec<usize> = memories
                    .iter()
                    .map(|m| m.segment(0, 1).unwrap().as_ptr().addr())
                    .collect();
                let got: Vec<usize> = list
                    .segments()
                    .iter()
                    .flat_map(|s| (0..s.len()).map(move |i| s.as_ptr().addr() + i))
                    .collect();
                let wanted: Vec<usize> = places.iter().map(|&(m, o)| starts[m] + o).collect();
                assert_eq!(got, wanted);
                let breaks = places
                    .windows(2)
                    .filter(|p| p[0].0 != p[1].0 || p[0].1 + 1 != p[1].1)
                    .count();
                assert_eq!(list.count(), if places.is_empty() { 0 } else { breaks + 1 });
                assert_eq!(
                    list.is_writable(),
                    access == Access::Write || places.is_empty()
                );
                let mut buf = vec![0; places.len()];
                assert_eq!(list.copy_to(0, &mut buf), places.len());
                let content: Vec<u8> = places.iter().map(|&(m, o)| model.content[m][o]).collect();
                assert_eq!(buf, content);
                assert!(list.equals(0, &content));
                // Found without a walk: the same, and exactly where one window has all of it.
                let whole = expected.is_ok() && model.in_one_window(iova, len);
                assert_eq!(piece.begin_piece(&map, base + iova, len, access), whole);
                if whole {
                    assert_eq!(piece.segments(), list.segments());
                    assert_eq!(piece.is_writable(), list.is_writable());
                    assert!(piece.equals(0, &content));
                } else {
                    assert!(piece.is_empty() && piece.is_writable());
                    // It keeps nothing: others may use it.
                    let mut other = DmaMap::new();
                    let backing = Some((memories[0].clone(), 0));
                    other.map(0, MEMORY, backing, Prot::RW).unwrap();
                    assert_eq!(other.segments(0, 1, access, &mut piece), Ok(()));
                }
                assert_eq!(piece.len_bytes(), if whole { len } else { 1 });
                list.clear();
                piece.clear();
            }
        }
        assert_eq!(map.generation(), generation + u64::from(changed));
        assert!(map.quiesced());
    }
    for (memory, content) in memories.iter().zip(&model.content) {
        let mut buf = vec![0; MEMORY as usize];
        memory.read(0, &mut buf).unwrap();
        assert_eq!(&buf, content);
    }
    let starts: Vec<u64> = map.windows().map(|window| window.iova).collect();
    let mut expected: Vec<u64> = model
        .bytes
        .iter()
        .flatten()
        .map(|byte| byte.window)
        .collect();
    expected.dedup();
    assert_eq!(starts, expected);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn map_matches_model(ops in prop::collection::vec(op(), 1..60)) {
        run(0x10000, ops);
    }

    #[test]
    fn map_at_end_of_address_space_matches_model(ops in prop::collection::vec(op(), 1..60)) {
        run(u64::MAX - (SPACE - 1), ops);
    }

    #[test]
    fn segment_lists_copy_like_byte_vectors(
        cuts in prop::collection::vec((0..8u64, 1..600u64), 1..12),
        offset in 0..3000u64,
        len in 0..3000usize,
        seed in any::<u8>(),
    ) {
        // The same scattered memory as a list and as a vector; pieces of
        // different windows do not overlap.
        const ALL: usize = 16 * PAGE as usize;
        let memory = Memory::anonymous(ALL).unwrap();
        let mut map = DmaMap::new();
        let mut list = SegmentList::new();
        list.begin(&map);
        let mut places = Vec::new();
        for (i, &(gap, len)) in cuts.iter().enumerate() {
            let at = i as u64 * PAGE;
            map.map(at, PAGE, Some((memory.clone(), at)), Prot::RW).unwrap();
            map.segments(at + gap, len, Access::Write, &mut list).unwrap();
            places.extend((at + gap..at + gap + len).map(|o| o as usize));
        }
        let mut flat = vec![0u8; ALL];
        let source = pattern(len as u64, seed);
        let fits = places.len().saturating_sub(offset as usize).min(len);
        prop_assert_eq!(list.copy_from(offset, &source), fits);
        for (i, byte) in source.iter().take(fits).enumerate() {
            flat[places[offset as usize + i]] = *byte;
        }
        let mut all = vec![0; ALL];
        memory.read(0, &mut all).unwrap();
        prop_assert_eq!(&all, &flat);

        let mut back = vec![0xAA; len];
        prop_assert_eq!(list.copy_to(offset, &mut back), fits);
        prop_assert_eq!(&back[..fits], &source[..fits]);
        prop_assert_eq!(list.equals(offset, &source), fits == len);
        if fits > 0 {
            let mut other = source[..fits].to_vec();
            other[fits - 1] ^= 1;
            prop_assert!(!list.equals(offset, &other));
        }

        let mut part = SegmentList::new();
        prop_assert_eq!(list.slice(offset, len as u64, &mut part), fits as u64);
        prop_assert_eq!(part.len_bytes(), fits as u64);
        prop_assert!(part.equals(0, &source[..fits]));

        let mut bounce = SegmentList::owned(Buffer::from_slice(&pattern(2500, seed ^ 0x55)));
        let copied = part.copy_list(&bounce);
        prop_assert_eq!(copied as usize, fits.min(2500));
        prop_assert!(part.equals(0, &pattern(copied, seed ^ 0x55)));
        prop_assert_eq!(bounce.copy_list(&part) as usize, fits.min(2500));
        prop_assert_eq!(part.fill(0x77), fits as u64);
        prop_assert!(part.equals(0, &vec![0x77; fits]));
        prop_assert_eq!(bounce.buffer().unwrap().len(), 2500);
    }
}

#[test]
fn foreign_segment_list_refuses_memory() {
    let memory = Memory::anonymous(4096).unwrap();
    let (mut one, mut two) = (DmaMap::new(), DmaMap::new());
    for map in [&mut one, &mut two] {
        map.map(0, 4096, Some((memory.clone(), 0)), Prot::RW)
            .unwrap();
    }
    let mut list = SegmentList::new();
    assert_eq!(one.segments(0, 16, Access::Read, &mut list), Ok(()));
    assert_eq!(
        two.segments(0, 16, Access::Read, &mut list),
        Err(DmaError::ForeignList)
    );
    let mut list = SegmentList::owned(Buffer::new(16));
    assert_eq!(
        one.segments(0, 16, Access::Read, &mut list),
        Err(DmaError::ForeignList)
    );
    let mut list = memory.segments(0, 16).unwrap();
    assert_eq!(
        one.segments(0, 16, Access::Read, &mut list),
        Err(DmaError::ForeignList)
    );
}

#[test]
fn piece_behaves_like_segment_list() {
    let memories = [(); 2].map(|()| Memory::anonymous(4096).unwrap());
    let mut map = DmaMap::new();
    for (at, memory) in [0, 4096].into_iter().zip(&memories) {
        map.map(at, 4096, Some((memory.clone(), 0)), Prot::RW)
            .unwrap();
    }
    // One that has been used for something else.
    let mut list = SegmentList::owned(Buffer::new(16));
    assert!(list.begin_piece(&map, 100, 50, Access::Read));
    assert!(list.buffer().is_none() && !list.is_writable());
    // What follows in the same mapping belongs to the same piece; what comes
    // from another one does not.
    map.segments(150, 50, Access::Read, &mut list).unwrap();
    assert_eq!((list.count(), list.len_bytes()), (1, 100));
    map.segments(4096, 50, Access::Read, &mut list).unwrap();
    assert_eq!((list.count(), list.len_bytes()), (2, 150));
    // Nothing is left of it.
    assert!(list.begin_piece(&map, 4096, 4096, Access::Write));
    assert_eq!((list.count(), list.len_bytes()), (1, 4096));
    assert!(list.is_writable());
    assert!(!list.begin_piece(&map, 4095, 2, Access::Read));
    assert!(!list.begin_piece(&map, 0, 0, Access::Read));
    assert!(list.is_empty());
}

#[test]
fn pairs_are_loaded_from_one_window() {
    let memory = Memory::anonymous(3 * PAGE as usize).unwrap();
    let mut map = DmaMap::new();
    // The windows are adjacent, their memory is not.
    for (iova, offset) in [(PAGE, 2 * PAGE), (2 * PAGE, 0)] {
        let backing = Some((memory.clone(), offset));
        map.map(iova, PAGE, backing, Prot::RO).unwrap();
    }
    let bytes: Vec<u8> = (0..3 * PAGE).map(|i| (i * 7 + i / 256) as u8).collect();
    memory.write(0, &bytes).unwrap();
    for iova in [PAGE, PAGE + 8, 2 * PAGE - 48, 2 * PAGE, 3 * PAGE - 48] {
        let mut expected = [0; 48];
        map.read(iova, &mut expected).unwrap();
        let pairs: [[u64; 2]; 3] = map.load_pairs64(iova).unwrap();
        assert_eq!(
            pairs
                .map(|pair| pair.map(u64::to_le_bytes))
                .as_flattened()
                .as_flattened(),
            expected
        );
        assert_eq!(map.load_pairs64(iova), Some([pairs[0]]));
    }
    for iova in [
        PAGE + 4,
        2 * PAGE - 40,
        3 * PAGE - 40,
        3 * PAGE,
        u64::MAX - 7,
    ] {
        assert_eq!(map.load_pairs64::<3>(iova), None, "{iova:#x}");
    }
    // A shorter range ends within the window.
    assert!(map.load_pairs64::<2>(2 * PAGE - 40).is_some());
}

#[test]
fn segment_list_for_reading_is_never_written() {
    let memory = Memory::anonymous(4096).unwrap();
    let mut map = DmaMap::new();
    map.map(0, 4096, Some((memory.clone(), 0)), Prot::RW)
        .unwrap();
    let mut list = SegmentList::new();
    map.segments(0, 100, Access::Read, &mut list).unwrap();
    assert_eq!(list.copy_from(0, &[1; 10]), 0);
    assert_eq!(list.fill(1), 0);
    assert_eq!(
        list.copy_list(&SegmentList::owned(Buffer::from_slice(&[1; 10]))),
        0
    );
    assert!(list.equals(0, &[0; 100]));
}

#[test]
fn shared_buffer_is_not_returned() {
    let mut list = SegmentList::owned(Buffer::from_slice(&[7; 100]));
    let mut part = SegmentList::new();
    assert_eq!(list.slice(10, 20, &mut part), 20);
    assert!(list.buffer().is_none());
    assert!(list.take_buffer().is_none());
    drop(list);
    assert!(part.equals(0, &[7; 20]));
    assert_eq!(part.into_buffer().unwrap().len(), 100);
}

#[test]
fn alignment_covers_addresses_and_lengths() {
    let memory = Memory::anonymous(8192).unwrap();
    assert!(memory.segments(512, 1024).unwrap().is_aligned(511));
    assert!(!memory.segments(512, 1000).unwrap().is_aligned(511));
    assert!(!memory.segments(100, 512).unwrap().is_aligned(511));
    assert!(SegmentList::new().is_aligned(511));
}

#[test]
fn windows_may_be_adjacent_but_not_overlap() {
    let mut map = DmaMap::new();
    map.map(0x1000, 0x2000, None, Prot::RW).unwrap();
    let mut add = |iova, len| map.map(iova, len, None, Prot::RW);
    let overlap = Err(MapError::Overlap { iova: 0x1000 });
    assert_eq!(add(0x2000, 0x1000), overlap);
    assert_eq!(add(0x2000, 0x2000), overlap);
    assert_eq!(add(0, 0x2000), overlap);
    assert_eq!(add(0, 0x4000), overlap);
    assert_eq!(add(0x3000, 0x1000), Ok(()));
    assert_eq!(add(0, 0x1000), Ok(()));
}

#[test]
fn partial_page_windows_are_refused() {
    let memory = Memory::anonymous(0x4000).unwrap();
    let mut map = DmaMap::new();
    for (iova, len, offset) in [(1, PAGE, 0), (0, 1, 0), (0, PAGE, 8), (0x800, 0x800, 0x800)] {
        let refused = map.map(iova, len, Some((memory.clone(), offset)), Prot::RW);
        assert_eq!(refused, Err(MapError::Misaligned { iova }));
        if offset == 0 {
            assert_eq!(map.map(iova, len, None, Prot::RW), refused);
        }
    }
    assert_eq!(map.window_count(), 0);
}

/// Two memory files may happen to lie side by side in this process: still two segments.
#[test]
fn only_pieces_of_same_mapping_are_merged() {
    let memories: Vec<Memory> = (0..64).map(|_| Memory::anonymous(4096).unwrap()).collect();
    let start = |memory: &Memory| memory.segment(0, 1).unwrap().as_ptr().addr();
    let page = rustix::param::page_size();
    let neighbours = memories.iter().find_map(|low| {
        memories
            .iter()
            .find(|high| start(high) == start(low) + page)
            .map(|high| (low, high))
    });
    // Nothing to see where pages are larger than the files, or the kernel leaves gaps.
    let Some((low, high)) = neighbours.filter(|_| page == 4096) else {
        let what = "dma::map::only_pieces_of_same_mapping_are_merged";
        return testkit::skip(what, "no two mappings lie side by side");
    };
    let mut map = DmaMap::new();
    map.map(0, 4096, Some((low.clone(), 0)), Prot::RW).unwrap();
    map.map(4096, 4096, Some((high.clone(), 0)), Prot::RW)
        .unwrap();
    let mut list = SegmentList::new();
    map.segments(0, 8192, Access::Write, &mut list).unwrap();
    assert_eq!(list.count(), 2);
}
