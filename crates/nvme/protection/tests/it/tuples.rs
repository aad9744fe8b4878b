//! Protection tuples: published check values, and the detection of changed bytes.

use proptest::prelude::*;
use protection::{
    Checks, Guard, Layout, LayoutError, Mismatch, Protection, StorageTag, Tags, Type,
};

const GUARDS: [Guard; 3] = [Guard::Bits16, Guard::Bits32, Guard::Bits64];
const TYPES: [Type; 3] = [Type::One, Type::Two, Type::Three];

fn tags(block: u128) -> Tags {
    Tags {
        application: 0xa55a,
        mask: 0xffff,
        block,
    }
}

/// Creates a protection format with the smallest storage tag.
fn with(kind: Type, guard: Guard, first: bool) -> Protection {
    Protection {
        kind,
        guard,
        storage: StorageTag::least(guard),
        first,
    }
}

fn made(kind: Type, guard: Guard, first: bool, data: &[u8], size: usize) -> (Protection, Vec<u8>) {
    let protection = with(kind, guard, first);
    let mut metadata = vec![0x5c; size];
    protection.generate(data, &mut metadata, tags(7));
    (protection, metadata)
}

/// Checks the published values of CRC-16/T10-DIF and CRC-32C, and those for 4096 bytes that "NVM
/// Command Set 1.1", 5.3.1.3, lists for CRC-64/NVME.
#[test]
fn guards_match_published_values() {
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
fn tuple_fields_have_standard_offsets() {
    let block = 0x0001_1122_3344_5566_7788_u128;
    for (guard, size, rest) in [
        (Guard::Bits16, 8, vec![0x55, 0x66, 0x77, 0x88]),
        (Guard::Bits32, 16, block.to_be_bytes()[6..].to_vec()),
        (Guard::Bits64, 16, block.to_be_bytes()[10..].to_vec()),
    ] {
        let protection = with(Type::Two, guard, false);
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
fn reference_tags_increment_and_wrap() {
    for guard in GUARDS {
        let of = |kind| with(kind, guard, false);
        let mask = of(Type::One).reference_mask();
        let last = u128::from(mask);
        assert_eq!(of(Type::One).tags_of(last, 1), 0);
        assert_eq!(of(Type::Two).tags_of(5, 3), 8);
        assert_eq!(of(Type::Three).tags_of(5, 3), 5);
        assert!(of(Type::One).is_initial(u128::from(3 & mask), 3));
        assert!(!of(Type::One).is_initial(4, 3));
        assert!(of(Type::Two).is_initial(4, 3));
    }
    let storage = 0xabcd_u128 << 64;
    let wide = with(Type::One, Guard::Bits32, false);
    let all = storage | u128::from(u64::MAX);
    assert_eq!(wide.tags_of(all, 1), storage);
}

#[test]
fn escapes_and_masks_skip_checks() {
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
fn invalid_layouts_are_refused() {
    let tuples = |guard| Some(with(Type::One, guard, false));
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
    for (guard, bits, fits) in [
        (Guard::Bits16, 0, true),
        (Guard::Bits16, 32, true),
        (Guard::Bits16, 33, false),
        (Guard::Bits32, 15, false),
        (Guard::Bits32, 16, true),
        (Guard::Bits32, 64, true),
        (Guard::Bits32, 65, false),
        (Guard::Bits64, 0, true),
        (Guard::Bits64, 48, true),
        (Guard::Bits64, 49, false),
        (Guard::Bits64, 255, false),
    ] {
        let storage = StorageTag::of(bits);
        let protection = Protection {
            storage,
            ..with(Type::One, guard, false)
        };
        let (least, most) = guard.storage_bits();
        let guard = guard.bits();
        let wanted = if fits {
            Ok(())
        } else {
            Err(LayoutError::StorageTag {
                bits,
                guard,
                least,
                most,
            })
        };
        assert_eq!(layout(4096, 16, Some(protection)), wanted);
    }
    let storage = StorageTag {
        bits: 12,
        mask: 0x1001,
    };
    let protection = Protection {
        storage,
        ..with(Type::One, Guard::Bits16, false)
    };
    let wide = Err(LayoutError::StorageMask {
        mask: 0x1001,
        bits: 12,
    });
    assert_eq!(layout(512, 8, Some(protection)), wide);
    assert_eq!(Guard::of(17), None);
    assert_eq!(Type::of(0), None);
}

/// Checks the standard's examples for the division of dwords 2, 3 and 14: a storage tag of 32 bits
/// with a 32-bit guard, and one of 18 bits with a 64-bit guard ("NVM Command Set 1.1", 5.3.1.4.1).
#[test]
fn storage_tags_match_standard_examples() {
    for (guard, bits, dwords, storage, reference) in [
        (
            Guard::Bits32,
            32,
            [0xffff_1122, 0x3344_5566, 0x7788_99aa],
            0x1122_3344,
            0x5566_7788_99aa_u64,
        ),
        (
            Guard::Bits64,
            18,
            [0xffff_ffff, 0xffff_a5a5, 0x8000_0007 | 0x4000_0000],
            0xa5a5 << 2 | 3,
            7,
        ),
        (
            Guard::Bits16,
            0,
            [u32::MAX, u32::MAX, 0x1234_5678],
            0,
            0x1234_5678,
        ),
        (
            Guard::Bits16,
            8,
            [u32::MAX, u32::MAX, 0x1234_5678],
            0x12,
            0x34_5678,
        ),
        (
            Guard::Bits16,
            32,
            [u32::MAX, u32::MAX, 0x1234_5678],
            0x1234_5678,
            0,
        ),
        (
            Guard::Bits32,
            64,
            [1, 2, 0x0003_0004],
            0x1_0000_0002_0003,
            4,
        ),
    ] {
        let protection = Protection {
            storage: StorageTag::of(bits),
            ..with(Type::Two, guard, false)
        };
        let [cdw2, cdw3, cdw14] = dwords;
        let all = guard.command_tags(cdw2, cdw3, cdw14);
        let mask = protection.reference_mask();
        assert_eq!(all as u64 & mask, reference, "{guard:?} {bits}");
        assert_eq!(all >> mask.count_ones(), storage, "{guard:?} {bits}");
        // The reference tag counts, and the storage tag stays.
        let last = storage << mask.count_ones() | u128::from(mask);
        let wrapped = storage << mask.count_ones();
        assert_eq!(protection.tags_of(last, 1), wrapped, "{guard:?} {bits}");
    }
}

/// Checks that each bit of a storage tag of any size is compared if the mask contains it and the
/// command enables the check.
#[test]
fn storage_tag_comparison_respects_mask() {
    for guard in GUARDS {
        let (least, most) = guard.storage_bits();
        for (kind, bits) in TYPES
            .iter()
            .flat_map(|kind| (least..=most).map(|b| (*kind, b)))
        {
            let all = StorageTag::of(bits);
            let storage = StorageTag {
                mask: all.mask & 0x5a5a_5a5a_5a5a_5a5a,
                ..all
            };
            let with = |storage| Protection {
                storage,
                ..with(kind, guard, true)
            };
            let (full, masked) = (with(all), with(storage));
            let references = full.reference_mask().count_ones();
            let reference = u128::from(full.reference_mask() & 1);
            let value = u128::from(0x0123_4567_89ab_cdef & all.mask) << references | reference;
            let mut metadata = [0; 16];
            full.generate(&[1; 512], &mut metadata, tags(value));
            let check = |protection: Protection, block, checks| {
                protection.check(&[1; 512], &metadata, tags(block), checks)
            };
            assert_eq!(check(full, value, Checks::ALL), Ok(()));
            for bit in 0..bits {
                let other = value ^ 1 << (u32::from(bit) + references);
                let wrong = Err(Mismatch::Storage);
                assert_eq!(check(full, other, Checks::ALL), wrong, "{bit} of {bits}");
                let of_mask = storage.mask >> bit & 1 != 0;
                let wanted = if of_mask { wrong } else { Ok(()) };
                assert_eq!(check(masked, other, Checks::ALL), wanted, "{bit} of {bits}");
                let unchecked = Checks {
                    storage: false,
                    ..Checks::ALL
                };
                assert_eq!(check(full, other, unchecked), Ok(()), "{bit} of {bits}");
            }
        }
    }
}

/// Checks that the reference tag consists only of the bits below the storage tag, and that none is
/// checked when there are no such bits.
#[test]
fn reference_tag_excludes_storage_tag_bits() {
    let with = |kind, bits| Protection {
        storage: StorageTag::of(bits),
        ..with(kind, Guard::Bits16, false)
    };
    let one = with(Type::One, 16);
    assert!(one.is_initial(0xabcd_0003, 0x77_0003));
    assert!(!one.is_initial(0xabcd_0003, 4));
    let none = with(Type::One, 32);
    assert!(none.is_initial(0xabcd_0003, 4));
    assert_eq!(none.tags_of(0xffff_ffff, 9), 0xffff_ffff);
    // Of Type 3 an application tag of ones escapes with a reference tag of ones: none is that, too.
    for (bits, block, escapes) in [
        (0, 0xffff_ffff, true),
        (0, 0xff_ffff, false),
        (8, 0xff_ffff, true),
        (8, 0xff_fffe, false),
        (32, 0, true),
    ] {
        let three = with(Type::Three, bits);
        let mut metadata = [0; 8];
        let tags = |application| Tags {
            application,
            ..tags(block)
        };
        three.generate(&[1; 512], &mut metadata, tags(0xffff));
        let found = three.check(&[2; 512], &metadata, tags(0), Checks::ALL);
        let wanted = if escapes {
            Ok(())
        } else {
            Err(Mismatch::Guard)
        };
        assert_eq!(found, wanted, "{bits} {block:#x}");
    }
    // What is found first: guard, application tag, storage tag, reference tag.
    let mut metadata = [0; 8];
    let right = tags(0xabcd_0003);
    one.generate(&[1; 512], &mut metadata, right);
    let wrong = Tags {
        application: 1,
        block: 0xabce_0004,
        ..right
    };
    let check = |data, checks| one.check(&[data; 512], &metadata, wrong, checks);
    let mut checks = Checks::ALL;
    assert_eq!(check(2, checks), Err(Mismatch::Guard));
    checks.guard = false;
    assert_eq!(check(2, checks), Err(Mismatch::Application));
    checks.application = false;
    assert_eq!(check(2, checks), Err(Mismatch::Storage));
    checks.storage = false;
    assert_eq!(check(2, checks), Err(Mismatch::Reference));
    checks.reference = false;
    assert_eq!(check(2, checks), Ok(()));
}

proptest! {
    /// Checks that a change of any bit in data, metadata or tags fails the matching check, and only
    /// if that check is enabled.
    #[test]
    fn any_changed_bit_is_detected(
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

    /// Checks that metadata that is too short is neither changed nor accepted.
    #[test]
    fn short_metadata_has_no_tuple(len in 0..8_usize) {
        let (protection, metadata) = made(Type::One, Guard::Bits16, false, &[0; 512], len);
        prop_assert!(metadata.iter().all(|byte| *byte == 0x5c));
        let found = protection.check(&[0; 512], &metadata, tags(7), Checks::ALL);
        prop_assert_eq!(found, Err(Mismatch::Guard));
    }
}
