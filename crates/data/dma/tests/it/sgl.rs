//! The SGL walker against a naive one that reads descriptor by descriptor, on honest
//! lists and on corrupted ones.

use crate::common::{BOTH, PAGE, Space, assert_places};
use dma::sgl::{self, MAX_DESCRIPTORS, MAX_SEGMENTS, max_descriptors};
use dma::{Access, DmaError, SegmentList, SglError};
use proptest::prelude::*;

const DATA: u8 = 0x00;
const SEGMENT: u8 = 0x20;
const LAST: u8 = 0x30;

fn descriptor(kind: u8, address: u64, length: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&length.to_le_bytes());
    bytes[15] = kind;
    bytes
}

fn fields(bytes: [u8; 16]) -> (u8, u64, u32) {
    let mut address = [0; 8];
    address.copy_from_slice(&bytes[..8]);
    let mut length = [0; 4];
    length.copy_from_slice(&bytes[8..12]);
    (
        bytes[15],
        u64::from_le_bytes(address),
        u32::from_le_bytes(length),
    )
}

/// What a list describes of `len` bytes, as (address, length) of each data block.
fn naive(space: &Space, first: [u8; 16], len: u64) -> Result<Vec<(u64, u64)>, SglError> {
    let mut pieces = Vec::new();
    let mut left = len;
    let mut seen = 0u64;
    // The command's own descriptor is like a segment of one.
    let mut segment: (u8, Vec<[u8; 16]>) = (SEGMENT, vec![first]);
    for followed in 0.. {
        let (kind, descriptors) = segment;
        let mut next = None;
        for (i, bytes) in descriptors.iter().enumerate() {
            let (this, address, length) = fields(*bytes);
            let wraps = u128::from(address) + u128::from(length) > 1 << 64;
            match this {
                DATA => {
                    if wraps {
                        return Err(SglError::DataLengthInvalid);
                    }
                    let used = u64::from(length).min(left);
                    space.pieces(address, used)?;
                    left -= used;
                    pieces.push((address, used));
                }
                SEGMENT | LAST => {
                    if length == 0 || length % 16 != 0 || address % 8 != 0 {
                        return Err(SglError::InvalidSegmentDescriptor);
                    }
                    if wraps {
                        return Err(SglError::DataLengthInvalid);
                    }
                    if kind == LAST {
                        return Err(SglError::InvalidSegmentDescriptor);
                    }
                    if i + 1 != descriptors.len() {
                        return Err(SglError::InvalidDescriptorCount);
                    }
                    next = Some((this, address, length));
                }
                other => return Err(SglError::DescriptorTypeInvalid(other)),
            }
        }
        let Some((kind, address, length)) = next.filter(|_| left > 0) else {
            break;
        };
        seen += u64::from(length / 16);
        if followed == MAX_SEGMENTS || seen > u64::from(max_descriptors(len)) {
            return Err(SglError::InvalidDescriptorCount);
        }
        let mut descriptors = Vec::new();
        for i in 0..u64::from(length / 16) {
            // Bounded reading ahead: what cannot be read ends the walk only if it gets there.
            match space.bytes(address + i * 16) {
                Ok(bytes) => descriptors.push(bytes),
                Err(error) => return Err(error.into()),
            }
        }
        segment = (kind, descriptors);
    }
    if left == 0 {
        Ok(pieces)
    } else {
        Err(SglError::DataLengthInvalid)
    }
}

/// Errors may differ where the walker meets a wrong descriptor before the naive one, which reads a
/// whole segment first, meets a hole behind it.
fn check(space: &Space, first: [u8; 16], len: u64) -> Result<(), SglError> {
    let expected = naive(space, first, len);
    for access in BOTH {
        let mut list = SegmentList::new();
        list.begin(&space.map);
        let got = sgl::walk(&space.map, first, len, access, &mut list);
        match &expected {
            Ok(pieces) => {
                assert_eq!(got, Ok(()));
                let pieces: Vec<(usize, usize)> = pieces
                    .iter()
                    .flat_map(|&(at, len)| space.pieces(at, len).unwrap())
                    .collect();
                assert_places(&list, &space.memory, &pieces);
                let bound = u64::from(max_descriptors(len)) + len / PAGE + 1;
                assert!(list.count() as u64 <= bound);
            }
            Err(SglError::Dma(_)) => assert!(got.is_err()),
            Err(error) => assert_eq!(got, Err(*error)),
        }
    }
    expected.map(drop)
}

const PAGES: usize = 32;
/// Data lies in the first pages of the space, segments in the last ones, which are contiguous.
const DATA_PAGES: usize = 16;

#[derive(Clone, Debug)]
struct Request {
    base: u64,
    places: Vec<usize>,
    blocks: Vec<(u64, u32)>,
    /// How many blocks go into each segment; what is left goes into the last one.
    cuts: Vec<usize>,
    last_is_marked: bool,
    direct: bool,
}

fn request() -> impl Strategy<Value = Request> {
    let block = (
        0..DATA_PAGES as u64 * PAGE,
        prop_oneof![Just(0u32), 1..64u32, 1..9000u32],
    );
    (
        prop_oneof![
            Just(0),
            Just(0x1_0000_0000),
            Just(0u64.wrapping_sub(PAGES as u64 * PAGE))
        ],
        Just((0..DATA_PAGES).collect::<Vec<_>>()).prop_shuffle(),
        prop::collection::vec(block, 0..120),
        prop::collection::vec(0..40usize, 0..6),
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(
            |(base, places, blocks, cuts, last_is_marked, direct)| Request {
                base,
                places,
                blocks,
                cuts,
                last_is_marked,
                direct,
            },
        )
}

impl Request {
    /// Writes the segments; returns the space, the command's descriptor and the length of the data.
    fn build(&self, holes: &[usize]) -> (Space, [u8; 16], u64) {
        let mut places: Vec<Option<usize>> = self.places.iter().copied().map(Some).collect();
        places.extend((DATA_PAGES..PAGES).map(Some));
        for &hole in holes {
            places[hole] = None;
        }
        let space = Space::new(self.base, places);
        let end = DATA_PAGES as u64 * PAGE;
        let blocks: Vec<[u8; 16]> = self
            .blocks
            .iter()
            .map(|&(at, len)| descriptor(DATA, self.base + at, len.min((end - at) as u32)))
            .collect();
        let len = blocks.iter().map(|block| u64::from(fields(*block).2)).sum();
        if self.direct && blocks.len() == 1 {
            return (space, blocks[0], len);
        }
        let mut rest = &blocks[..];
        let mut segments: Vec<Vec<[u8; 16]>> = Vec::new();
        for &cut in &self.cuts {
            let (segment, after) = rest.split_at(cut.min(rest.len()));
            segments.push(segment.to_vec());
            rest = after;
        }
        segments.push(rest.to_vec());
        // An empty last segment needs something in it.
        if let Some(last) = segments.last_mut()
            && last.is_empty()
        {
            last.push(descriptor(DATA, self.base, 0));
        }
        let mut at = self.base + end;
        let mut next: Option<[u8; 16]> = None;
        for mut segment in segments.into_iter().rev() {
            let is_last = next.is_none();
            segment.extend(next);
            let bytes = segment.concat();
            space.map.write(at, &bytes).unwrap();
            let kind = if is_last && self.last_is_marked {
                LAST
            } else {
                SEGMENT
            };
            next = Some(descriptor(kind, at, bytes.len() as u32));
            at += bytes.len() as u64 + 8;
        }
        (space, next.unwrap(), len)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn valid_sgls_are_walked(request in request(), shorter in any::<u64>()) {
        let (space, first, len) = request.build(&[]);
        prop_assert_eq!(check(&space, first, len), Ok(()));
        prop_assert_eq!(check(&space, first, len + 1), Err(SglError::DataLengthInvalid));
        // The list is longer than the data.
        prop_assert_eq!(check(&space, first, len.saturating_sub(1)), Ok(()));
        prop_assert_eq!(check(&space, first, shorter % (len + 1)), Ok(()));
    }

    #[test]
    fn corrupted_sgls_are_refused(
        request in request(),
        holes in prop::collection::vec(0..DATA_PAGES, 0..2),
        wrong in prop::collection::vec((0..4000u64, any::<u8>()), 0..12),
        kinds in prop::collection::vec((0..200u64, prop_oneof![Just(DATA), Just(SEGMENT), Just(LAST), Just(0x10)]), 0..3),
        first_wrong in prop::option::of((0..16usize, any::<u8>())),
    ) {
        let (space, mut first, len) = request.build(&holes);
        let segments = request.base + DATA_PAGES as u64 * PAGE;
        for (at, byte) in wrong {
            let _ = space.map.write(segments + at, &[byte]);
        }
        for (at, kind) in kinds {
            let _ = space.map.write(segments + at * 16 + 15, &[kind]);
        }
        if let Some((at, byte)) = first_wrong {
            first[at] = byte;
        }
        let _ = check(&space, first, len);
    }
}

#[test]
fn sgl_errors_match_standard() {
    let space = Space::new(0, (0..8).map(Some).collect());
    let walk = |first, len| {
        sgl::walk(
            &space.map,
            first,
            len,
            Access::Write,
            &mut SegmentList::new(),
        )
    };
    let put =
        |at: u64, descriptors: &[[u8; 16]]| space.map.write(at, &descriptors.concat()).unwrap();

    assert_eq!(walk(descriptor(DATA, 0, 512), 512), Ok(()));
    assert_eq!(walk(descriptor(DATA, 0, 0), 0), Ok(()));
    assert_eq!(
        walk(descriptor(DATA, 0, 511), 512),
        Err(SglError::DataLengthInvalid)
    );
    assert_eq!(walk(descriptor(DATA, 0, 513), 512), Ok(()));
    for kind in [DATA, SEGMENT, LAST] {
        assert_eq!(
            walk(descriptor(kind, u64::MAX - 15, 32), 512),
            Err(SglError::DataLengthInvalid)
        );
    }
    assert_eq!(
        walk(descriptor(DATA, 0x8000, 512), 512),
        Err(SglError::Dma(DmaError::Unmapped { iova: 0x8000 }))
    );
    assert_eq!(
        walk(descriptor(0x10, 0, 512), 512),
        Err(SglError::DescriptorTypeInvalid(0x10))
    );
    assert_eq!(
        walk(descriptor(0x01, 0, 512), 512),
        Err(SglError::DescriptorTypeInvalid(0x01))
    );
    for (kind, address, length) in [(SEGMENT, 0x1000, 0), (LAST, 0x1000, 24), (LAST, 0x1004, 16)] {
        assert_eq!(
            walk(descriptor(kind, address, length), 512),
            Err(SglError::InvalidSegmentDescriptor)
        );
    }
    // A segment descriptor inside the last segment.
    put(
        0x1000,
        &[descriptor(DATA, 0, 512), descriptor(LAST, 0x2000, 16)],
    );
    put(0x2000, &[descriptor(DATA, 0, 512)]);
    assert_eq!(
        walk(descriptor(LAST, 0x1000, 32), 1024),
        Err(SglError::InvalidSegmentDescriptor)
    );
    assert_eq!(walk(descriptor(SEGMENT, 0x1000, 32), 1024), Ok(()));
    // One that is not the last of its segment.
    put(
        0x1000,
        &[descriptor(LAST, 0x2000, 16), descriptor(DATA, 0, 512)],
    );
    assert_eq!(
        walk(descriptor(SEGMENT, 0x1000, 32), 1024),
        Err(SglError::InvalidDescriptorCount)
    );
    // Absurdly long.
    assert_eq!(
        walk(descriptor(LAST, 0, 0xFFFF_FFF0), 512),
        Err(SglError::InvalidDescriptorCount)
    );
}

/// Memory behind the end of the data need not be there, nor the segments that describe it; the rest
/// of a segment that is read is checked.
#[test]
fn sgl_longer_than_data_is_cut() {
    let space = Space::new(0, (0..8).map(Some).collect());
    let walk = |first| {
        let mut list = SegmentList::new();
        sgl::walk(&space.map, first, 600, Access::Write, &mut list).map(|()| list)
    };
    let put =
        |at: u64, descriptors: &[[u8; 16]]| space.map.write(at, &descriptors.concat()).unwrap();
    let end = 0x8000;
    assert_places(
        &walk(descriptor(DATA, end - 600, u32::MAX)).unwrap(),
        &space.memory,
        &[(0x8000 - 600, 600)],
    );
    let segments = |tail: [u8; 16]| {
        put(
            0x1000,
            &[
                descriptor(DATA, 0x3000, 88),
                descriptor(DATA, end - 512, 4096),
                descriptor(DATA, end, 512),
                tail,
            ],
        );
        walk(descriptor(SEGMENT, 0x1000, 64))
    };
    for tail in [
        descriptor(DATA, 0x4000, 0),
        descriptor(DATA, end, 1),
        descriptor(SEGMENT, end, 16),
        descriptor(LAST, 0x1000, 64),
    ] {
        let list = segments(tail).unwrap();
        assert_places(&list, &space.memory, &[(0x3000, 88), (0x8000 - 512, 512)]);
    }
    for (tail, error) in [
        (
            descriptor(0x10, 0, 1),
            SglError::DescriptorTypeInvalid(0x10),
        ),
        (
            descriptor(SEGMENT, end, 8),
            SglError::InvalidSegmentDescriptor,
        ),
        (descriptor(DATA, u64::MAX, 2), SglError::DataLengthInvalid),
    ] {
        assert_eq!(segments(tail).map(drop), Err(error));
    }
}

/// A segment that points to itself, without any of the data: the walk ends by counting.
#[test]
fn circular_sgl_segments_end() {
    let space = Space::new(0, (0..2).map(Some).collect());
    let this = descriptor(SEGMENT, 0x1000, 16);
    space.map.write(0x1000, &this).unwrap();
    let walk = sgl::walk(&space.map, this, 1, Access::Read, &mut SegmentList::new());
    assert_eq!(walk, Err(SglError::InvalidDescriptorCount));
    // And one of many empty data blocks.
    for i in 0..255 {
        space.map.write(i * 16, &descriptor(DATA, 0, 0)).unwrap();
    }
    let this = descriptor(SEGMENT, 0, 4096);
    space.map.write(4080, &this).unwrap();
    let walk = sgl::walk(&space.map, this, 1, Access::Read, &mut SegmentList::new());
    assert_eq!(walk, Err(SglError::InvalidDescriptorCount));
}

/// As many descriptors as there are blocks of 512 bytes, and 256 more.
#[test]
fn sgl_descriptors_are_bounded_by_data() {
    const DATA_AT: u64 = 64 * PAGE;
    let space = Space::new(0, (0..96).map(Some).collect());
    for len in [1u64, 512, 513, 4096, 64 << 10] {
        let most = 256 + len.div_ceil(512);
        assert_eq!(u64::from(max_descriptors(len)), most);
        for count in [most, most + 1] {
            // All but the last are of one byte each, as far as it goes.
            let bytes = (count - 1).min(len - 1);
            let blocks = (0..count).map(|i| match i {
                i if i + 1 == count => descriptor(DATA, DATA_AT, (len - bytes) as u32),
                i => descriptor(DATA, DATA_AT + 2 * i, u32::from(i < bytes)),
            });
            let bytes = blocks.collect::<Vec<_>>().concat();
            space.map.write(0, &bytes).unwrap();
            let first = descriptor(LAST, 0, bytes.len() as u32);
            let walk = check(&space, first, len);
            let expected = if count > most {
                Err(SglError::InvalidDescriptorCount)
            } else {
                Ok(())
            };
            assert_eq!(walk, expected, "{len} {count}");
        }
    }
    assert_eq!(max_descriptors(u64::MAX), MAX_DESCRIPTORS);
}

#[test]
fn sgl_segments_are_bounded() {
    let space = Space::new(0, (0..4).map(Some).collect());
    let data = descriptor(DATA, 0x3000, 512);
    for count in [MAX_SEGMENTS, MAX_SEGMENTS + 1] {
        let at = |i: u32| u64::from(i) * 16;
        for i in 0..count {
            let next = if i + 1 == count {
                data
            } else {
                descriptor(SEGMENT, at(i + 1), 16)
            };
            space.map.write(at(i), &next).unwrap();
        }
        let walk = sgl::walk(
            &space.map,
            descriptor(SEGMENT, 0, 16),
            512,
            Access::Read,
            &mut SegmentList::new(),
        );
        let expected = if count <= MAX_SEGMENTS {
            Ok(())
        } else {
            Err(SglError::InvalidDescriptorCount)
        };
        assert_eq!(walk, expected);
    }
}
