//! Tuples: published check values, and what a change of any byte comes to.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]

use proptest::prelude::*;
use protection::{Checks, Guard, Layout, LayoutError, Mismatch, Protection, Tags, Type};

const GUARDS: [Guard; 3] = [Guard::Bits16, Guard::Bits32, Guard::Bits64];
const TYPES: [Type; 3] = [Type::One, Type::Two, Type::Three];

fn tags(block: u128) -> Tags {
    Tags {
        application: 0xa55a,
        mask: 0xffff,
        block,
    }
}

fn made(kind: Type, guard: Guard, first: bool, data: &[u8], size: usize) -> (Protection, Vec<u8>) {
    let protection = Protection { kind, guard, first };
    let mut metadata = vec![0x5c; size];
    protection.generate(data, &mut metadata, tags(7));
    (protection, metadata)
}

/// The catalogue's check values of CRC-16/T10-DIF and CRC-32C, and those of 4096 bytes that "NVM
/// Command Set 1.1", 5.3.1.3, prints of CRC-64/NVME.
#[test]
fn guards_have_the_published_values() {
    let of = |guard, data: &[u8]| made(Type::One, guard, true, data, 16).1;
    assert_eq!(of(Guard::Bits16, b"123456789")[..2], [0xd0, 0xdb]);
    let crc = 0xe306_9283_u32.to_be_bytes();
    assert_eq!(of(Guard::Bits32, b"123456789")[..4], crc);
    let ascending: Vec<u8> = (0..4096).map(|at| at as u8).collect();
    let descending: Vec<u8> = ascending.iter().map(|byte| !byte).collect();
    for (data, crc) in [
        (vec![0; 4096], 0x6482_d367_eb22_b64e_u64),
        (vec![0xff; 4096], 0xc0dd_ba73_02ec_a3ac),
        (ascending, 0x3e72_9f5f_6750_449c),
        (descending, 0x9a2d_f64b_8e9e_517e),
    ] {
        assert_eq!(of(Guard::Bits64, &data)[..8], crc.to_be_bytes());
    }
}

#[test]
fn fields_are_where_the_formats_have_them() {
    let block = 0x0001_1122_3344_5566_7788_u128;
    for (guard, size, rest) in [
        (Guard::Bits16, 8, vec![0x55, 0x66, 0x77, 0x88]),
        (Guard::Bits32, 16, block.to_be_bytes()[6..].to_vec()),
        (Guard::Bits64, 16, block.to_be_bytes()[10..].to_vec()),
    ] {
        let protection = Protection {
            kind: Type::Two,
            guard,
            first: false,
        };
        let mut metadata = vec![0; size];
        protection.generate(&[1; 512], &mut metadata, tags(block));
        let at = size - rest.len();
        assert_eq!(metadata[at - 2..at], [0xa5, 0x5a]);
        assert_eq!(metadata[at..], rest);
    }
    // 80 bits of a command's dwords, of which 48 and 32 are what the other formats have.
    let tags = |guard: Guard| guard.command_tags(0xffff_0001, 0x1122_3344, 0x5566_7788);
    assert_eq!(tags(Guard::Bits32), block);
    assert_eq!(tags(Guard::Bits64), 0x3344_5566_7788);
    assert_eq!(tags(Guard::Bits16), 0x5566_7788);
}

#[test]
fn reference_tags_count_and_wrap() {
    for guard in GUARDS {
        let mask = guard.reference_mask();
        let of = |kind| Protection {
            kind,
            guard,
            first: false,
        };
        let last = u128::from(mask);
        assert_eq!(of(Type::One).tags_of(last, 1), 0);
        assert_eq!(of(Type::Two).tags_of(5, 3), 8);
        assert_eq!(of(Type::Three).tags_of(5, 3), 5);
        assert!(of(Type::One).is_initial(u128::from(3 & mask), 3));
        assert!(!of(Type::One).is_initial(4, 3));
        assert!(of(Type::Two).is_initial(4, 3));
    }
    let storage = 0xabcd_u128 << 64;
    let wide = Protection {
        kind: Type::One,
        guard: Guard::Bits32,
        first: false,
    };
    let all = storage | u128::from(u64::MAX);
    assert_eq!(wide.tags_of(all, 1), storage);
}

#[test]
fn escapes_and_masks() {
    for guard in GUARDS {
        for kind in TYPES {
            let (protection, mut metadata) = made(kind, guard, false, &[0; 512], 16);
            let len = metadata.len();
            let start = len - guard.tuple();
            let at = start + usize::from(guard.bits()) / 8;
            metadata[at..at + 2].fill(0xff);
            let check =
                |metadata: &[u8]| protection.check(&[9; 512], metadata, tags(0), Checks::ALL);
            let escaped = check(&metadata);
            match kind {
                Type::Three => assert_eq!(escaped, Err(Mismatch::Guard)),
                _ => assert_eq!(escaped, Ok(())),
            }
            metadata[at + 2..].fill(0xff);
            assert_eq!(check(&metadata), Ok(()));
        }
    }
    let (protection, metadata) = made(Type::One, Guard::Bits16, false, &[0; 512], 8);
    let other = Tags {
        application: 0xa500,
        mask: 0xff00,
        block: 7,
    };
    let check = |tags| protection.check(&[0; 512], &metadata, tags, Checks::ALL);
    assert_eq!(check(other), Ok(()));
    let mask = 0xff01;
    assert_eq!(check(Tags { mask, ..other }), Ok(()));
    let mask = 0xff02;
    let found = check(Tags { mask, ..other });
    assert_eq!(found, Err(Mismatch::Application));
}

#[test]
fn layouts() {
    let tuples = |guard| {
        Some(Protection {
            kind: Type::One,
            guard,
            first: false,
        })
    };
    let layout = |block, metadata, protection| {
        let extended = false;
        Layout {
            block,
            metadata,
            extended,
            protection,
        }
        .check()
    };
    for metadata in [8, 16, 64] {
        assert_eq!(layout(512, metadata, None), Ok(()));
        assert_eq!(layout(4096, metadata, tuples(Guard::Bits16)), Ok(()));
    }
    let metadata = 8;
    assert_eq!(layout(512, 9, None), Err(LayoutError::Metadata(9)));
    assert_eq!(layout(513, 8, None), Err(LayoutError::Block(513)));
    for guard in [32, 64] {
        let protection = tuples(Guard::of(guard).unwrap());
        let room = LayoutError::Room { guard, metadata };
        assert_eq!(layout(4096, 8, protection), Err(room));
        let small = Err(LayoutError::SmallBlock(guard));
        assert_eq!(layout(512, 16, protection), small);
        assert_eq!(layout(4096, 16, protection), Ok(()));
    }
    assert_eq!(Guard::of(17), None);
    assert_eq!(Type::of(0), None);
}

proptest! {
    /// A tuple is right; with any bit of data, metadata or tags changed, the check that is of it
    /// fails, and only if it is asked for.
    #[test]
    fn any_changed_bit_is_found(
        guard in prop::sample::select(&GUARDS[..]),
        kind in prop::sample::select(&TYPES[..]),
        first: bool,
        room in prop::sample::select(&[16_usize, 64][..]),
        data in prop::collection::vec(any::<u8>(), 512),
        bit in 0..512 * 8_usize,
        tag in 0..32_u32,
    ) {
        let (protection, metadata) = made(kind, guard, first, &data, room);
        let check = |data: &[u8], metadata: &[u8], tags, checks| {
            protection.check(data, metadata, tags, checks)
        };
        prop_assert_eq!(check(&data, &metadata, tags(7), Checks::ALL), Ok(()));
        let mut other = data.clone();
        other[bit / 8] ^= 1 << (bit % 8);
        let found = check(&other, &metadata, tags(7), Checks::ALL);
        prop_assert_eq!(found, Err(Mismatch::Guard));
        let unguarded = Checks { guard: false, ..Checks::ALL };
        prop_assert_eq!(check(&other, &metadata, tags(7), unguarded), Ok(()));
        prop_assert_eq!(check(&other, &metadata, tags(8), Checks::default()), Ok(()));
        let wrong = check(&data, &metadata, tags(7 ^ 1 << tag), Checks::ALL);
        match kind {
            Type::Three => prop_assert_eq!(wrong, Ok(())),
            _ => prop_assert_eq!(wrong, Err(Mismatch::Reference)),
        }
        // Metadata before the tuple is guarded, and behind it is not.
        if guard.tuple() < room {
            let mut other = metadata.clone();
            let at = if first { room - 1 } else { 0 };
            other[at] ^= 1;
            let found = check(&data, &other, tags(7), Checks::ALL);
            let wanted = if first { Ok(()) } else { Err(Mismatch::Guard) };
            prop_assert_eq!(found, wanted);
        }
    }

    /// Metadata that is too short has nothing made in it, and is no tuple.
    #[test]
    fn short_metadata_is_no_tuple(len in 0..8_usize) {
        let (protection, metadata) = made(Type::One, Guard::Bits16, false, &[0; 512], len);
        prop_assert!(metadata.iter().all(|byte| *byte == 0x5c));
        let found = protection.check(&[0; 512], &metadata, tags(7), Checks::ALL);
        prop_assert_eq!(found, Err(Mismatch::Guard));
    }
}
