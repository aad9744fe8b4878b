//! Storage tags ("NVM Command Set 1.1", 5.3.1.4 and 5.3.3): where they are compared, with which
//! bits, and where they are not.

use crate::common::{DATA, plain};
use crate::metadata::world::*;
use nvme::identify::NvmNamespace;
use nvme::{Command, NvmOpcode, Status};
use protection::{Guard, Layout, StorageTag, Type};
use zerocopy::FromBytes;

const WRONG: Status = Status::STORAGE_TAG_CHECK_ERROR;
const INVALID: Status = Status::INVALID_PROTECTION_INFORMATION;
const LOOKS: [NvmOpcode; 3] = [NvmOpcode::READ, NvmOpcode::COMPARE, NvmOpcode::VERIFY];

/// Block, metadata, guard, and bits of the storage tag.
const SIZES: [(u32, u16, Guard, u8); 8] = [
    (512, 8, Guard::Bits16, 1),
    (4096, 8, Guard::Bits16, 16),
    (512, 64, Guard::Bits16, 32),
    (4096, 16, Guard::Bits32, 16),
    (4096, 16, Guard::Bits32, 37),
    (4096, 64, Guard::Bits32, 64),
    (4096, 16, Guard::Bits64, 18),
    (4096, 16, Guard::Bits64, 48),
];

/// Each size, type and place, with a storage tag that has its highest and lowest bit.
fn each(mut what: impl FnMut(&mut Protected, u32)) {
    for (block, metadata, guard, bits) in SIZES {
        for kind in [Type::One, Type::Two, Type::Three] {
            for (first, extended) in [(false, false), (true, true)] {
                let layout = Layout {
                    extended,
                    ..layout(block, metadata, Some((kind, guard, first)))
                };
                let mut p = Protected::new(stored(layout, StorageTag::of(bits)));
                p.storage = right(bits);
                let checks = match kind {
                    Type::Three => GUARD | APPLICATION,
                    _ => ALL,
                };
                what(&mut p, checks);
            }
        }
    }
}

fn right(bits: u8) -> u64 {
    let mask = StorageTag::of(bits).mask;
    (0x8123_4567_89ab_cdef & mask) | 1 << (bits - 1) | 1
}

/// Such tags with one bit changed.
fn wrong(p: &Protected) -> [u64; 2] {
    let bits = p.layout.protection.unwrap().storage.bits;
    [p.storage ^ 1, p.storage ^ 1 << (bits - 1)]
}

/// One more byte than the tuple's last one, in the metadata.
fn tuple_end(p: &Protected) -> usize {
    let protection = p.layout.protection.unwrap();
    if protection.first {
        protection.guard.tuple()
    } else {
        p.layout.metadata.into()
    }
}

/// The right tag is taken; with a wrong one nothing is read, compared or verified, unless the check
/// is off.
#[test]
fn read_checks_storage_tag() {
    each(|p, checks| {
        let own = p.storage;
        let (data, metadata) = p.fill(1, 5, 3);
        let status = p.status(NvmOpcode::WRITE, 5, 3, checks | STC);
        assert_eq!(status, Status::SUCCESS, "{:?}", p.layout);
        assert_eq!(p.read(5, 3, checks | STC), (data.clone(), metadata.clone()));
        for opcode in LOOKS {
            assert_eq!(p.status(opcode, 5, 3, checks | STC), Status::SUCCESS);
        }
        for other in wrong(p) {
            p.storage = other;
            for opcode in LOOKS {
                p.clear();
                assert_eq!(p.status(opcode, 5, 3, checks | STC), WRONG, "{opcode:?}");
                // It is a check of its own.
                assert_eq!(p.status(opcode, 5, 3, STC), WRONG, "{opcode:?}");
                assert_eq!(p.h.read(DATA, 64), [0xee; 64]);
            }
            assert_eq!(p.status(NvmOpcode::READ, 5, 3, PRACT | STC), WRONG);
            assert_eq!(p.read(5, 3, checks), (data.clone(), metadata.clone()));
            assert_eq!(p.status(NvmOpcode::VERIFY, 5, 3, checks), Status::SUCCESS);
            assert_eq!(p.status(NvmOpcode::COMPARE, 5, 3, checks), Status::SUCCESS);
            p.storage = own;
        }
    });
}

/// A write with another tag in the second block than the command's writes nothing; with the check
/// off it is written, and found by those that check.
#[test]
fn write_checks_storage_tag() {
    each(|p, checks| {
        let own = p.storage;
        let before = p.fill(1, 20, 2);
        let status = p.status(NvmOpcode::WRITE, 20, 2, checks | STC);
        assert_eq!(status, Status::SUCCESS);
        for other in wrong(p) {
            let (data, mut metadata) = p.fill(2, 20, 2);
            p.storage = other;
            let (_, others) = p.fill(2, 20, 2);
            p.storage = own;
            let second = usize::from(p.layout.metadata);
            metadata[second..].copy_from_slice(&others[second..]);
            p.put(&data, &metadata);
            assert_eq!(p.status(NvmOpcode::WRITE, 20, 2, checks | STC), WRONG);
            assert_eq!(p.read(20, 2, checks | STC), before);
            p.put(&data, &metadata);
            let status = p.status(NvmOpcode::WRITE, 20, 2, checks);
            assert_eq!(status, Status::SUCCESS);
            assert_eq!(
                p.status(NvmOpcode::READ, 20, 1, checks | STC),
                Status::SUCCESS
            );
            assert_eq!(p.status(NvmOpcode::READ, 20, 2, checks | STC), WRONG);
            assert_eq!(p.read(20, 2, checks), (data, metadata));
            p.put(&before.0, &before.1);
            let status = p.status(NvmOpcode::WRITE, 20, 2, checks | STC);
            assert_eq!(status, Status::SUCCESS);
        }
    });
}

/// The tuples that Compare has from the host are checked as a write's are.
#[test]
fn compare_checks_storage_tag_on_both_sides() {
    each(|p, checks| {
        let (data, metadata) = p.fill(1, 20, 2);
        let status = p.status(NvmOpcode::WRITE, 20, 2, checks | STC);
        assert_eq!(status, Status::SUCCESS);
        let (end, guard) = (tuple_end(p), p.layout.protection.unwrap().guard);
        let start = end - guard.tuple();
        let tags = start + usize::from(guard.bits()) / 8;
        // Bits of the second block's tuple: guard, application tag, storage tag, reference tag.
        let size = usize::from(p.layout.metadata);
        let mut cases = vec![
            (start, 1, GUARD, Status::GUARD_CHECK_ERROR),
            (tags, 1, APPLICATION, Status::APPLICATION_TAG_CHECK_ERROR),
            (tags + 2, 0x80, STC, WRONG),
        ];
        let protection = p.layout.protection.unwrap();
        if protection.kind != Type::Three && protection.reference_mask() != 0 {
            let wrong = Status::REFERENCE_TAG_CHECK_ERROR;
            cases.push((end - 1, 1, REFERENCE, wrong));
        }
        for (at, bit, check, wanted) in cases {
            let mut other = metadata.clone();
            other[size + at] ^= bit;
            p.put(&data, &other);
            let status = p.status(NvmOpcode::COMPARE, 20, 2, check);
            assert_eq!(status, wanted, "{:?}", p.layout);
            // They are not compared.
            let others = (checks | STC) & !check;
            let status = p.status(NvmOpcode::COMPARE, 20, 2, others);
            assert_eq!(status, Status::SUCCESS, "{:?}", p.layout);
        }
        let mut other = data.clone();
        other[100] ^= 1;
        p.put(&other, &metadata);
        let status = p.status(NvmOpcode::COMPARE, 20, 2, STC);
        assert_eq!(status, Status::COMPARE_FAILURE);
    });
}

/// With PRACT the command's storage tag is in the tuples that are made.
#[test]
fn pract_sets_storage_tag() {
    each(|p, checks| {
        let (data, mut metadata) = p.fill(1, 9, 2);
        if p.layout.is_tuple_only() {
            p.h.write(DATA, &data);
        }
        let status = p.status(NvmOpcode::WRITE, 9, 2, PRACT | STC);
        assert_eq!(status, Status::SUCCESS);
        p.protect(&data, &mut metadata, 9);
        assert_eq!(p.read(9, 2, checks | STC), (data, metadata));
        let status = p.status(NvmOpcode::READ, 9, 2, PRACT | checks | STC);
        assert_eq!(status, Status::SUCCESS);
        // Those of zeroes, too, which has nothing to check.
        let status = p.status(NvmOpcode::WRITE_ZEROES, 9, 2, PRACT | STC);
        assert_eq!(status, INVALID);
        assert_eq!(p.status(NvmOpcode::WRITE_ZEROES, 9, 2, STC), INVALID);
        [p.storage, _] = wrong(p);
        let status = p.status(NvmOpcode::WRITE_ZEROES, 9, 2, PRACT);
        assert_eq!(status, Status::SUCCESS);
        let (zeroes, metadata) = p.read(9, 2, checks | STC);
        assert!(zeroes.iter().all(|byte| *byte == 0));
        let mut wanted = vec![0; metadata.len()];
        p.protect(&zeroes, &mut wanted, 9);
        assert_eq!(metadata, wanted);
    });
}

/// Bits that the mask has not are not compared, on no side of any command.
#[test]
fn storage_tag_mask_limits_comparison() {
    let usual = layout(512, 8, Some((Type::One, Guard::Bits16, false)));
    let long = layout(4096, 16, Some((Type::Two, Guard::Bits64, true)));
    for (layout, format) in [(usual, 0), (long, 1)] {
        let storage = StorageTag {
            bits: 16,
            mask: 0xff00,
        };
        let mut p = Protected::new(stored(layout, storage));
        p.storage = 0xa55a;
        p.fill(1, 5, 2);
        let write = |p: &mut Protected, storage| {
            p.storage = storage;
            p.status(NvmOpcode::WRITE, 5, 2, ALL | STC)
        };
        assert_eq!(write(&mut p, 0xa45a), WRONG);
        assert_eq!(write(&mut p, 0x255a), WRONG);
        assert_eq!(write(&mut p, 0xa5a5), Status::SUCCESS);
        for (storage, status) in [
            (0xa5a5, Status::SUCCESS),
            (0xa500, Status::SUCCESS),
            (0xa45a, WRONG),
            (0x255a, WRONG),
        ] {
            p.storage = storage;
            for opcode in LOOKS {
                // Memory of the host's has what was written, with 0xa55a.
                assert_eq!(p.status(opcode, 5, 2, ALL | STC), status, "{storage:#x}");
            }
            p.storage = 0xa55a;
            let range = From {
                storage: p.placed(storage),
                ..from(5, 2)
            };
            let command = p.copy(format, 40, [ALL, GUARD], &[range]);
            assert_eq!(copied(&mut p, command, STCR), (status, 0), "{storage:#x}");
            p.storage = storage;
            let command = p.copy(format, 40, [GUARD; 2], &[from(5, 2)]);
            assert_eq!(copied(&mut p, command, STC), (status, 0), "{storage:#x}");
        }
    }
}

/// An application tag of ones has nothing checked, of Type 3 with a reference tag of ones, if there
/// is one; nor has a block that was never written.
#[test]
fn escaped_application_tag_skips_checks() {
    each(|p, checks| {
        let own = p.storage;
        let protection = p.layout.protection.unwrap();
        let (data, written) = p.fill(1, 5, 1);
        let (end, mask) = (tuple_end(p), protection.reference_mask());
        let tags = end - protection.guard.tuple() + usize::from(protection.guard.bits()) / 8;
        let mut escaped = written.clone();
        escaped[tags..tags + 2].fill(0xff);
        for ones in [false, true] {
            if ones {
                // All of the reference tag's bits.
                let space = &mut escaped[tags + 2..end];
                let bytes = u128::from(mask).to_be_bytes();
                let bytes = bytes.iter().skip(16 - space.len());
                space
                    .iter_mut()
                    .zip(bytes)
                    .for_each(|(to, byte)| *to |= byte);
            }
            let escapes = protection.kind != Type::Three || ones || mask == 0;
            [p.storage, _] = wrong(p);
            p.put(&data, &escaped);
            let status = p.status(NvmOpcode::WRITE, 5, 1, STC);
            let wanted = if escapes { Status::SUCCESS } else { WRONG };
            assert_eq!(status, wanted, "{:?}", p.layout);
            assert_eq!(p.status(NvmOpcode::WRITE, 5, 1, 0), Status::SUCCESS);
            for opcode in LOOKS {
                assert_eq!(p.status(opcode, 5, 1, STC), wanted, "{:?}", p.layout);
            }
            p.storage = own;
        }
        assert_eq!(
            p.status(NvmOpcode::READ, 30, 4, checks | STC),
            Status::SUCCESS
        );
    });
}

/// Where there is no storage tag, the bit says nothing, nor do the dwords.
#[test]
fn storage_tag_check_without_tag_is_ignored() {
    let plain_blocks = layout(512, 8, None);
    let long = layout(4096, 16, Some((Type::One, Guard::Bits64, false)));
    for layout in [usual(), long, plain_blocks] {
        let mut p = Protected::new(layout);
        p.fill(1, 5, 2);
        let mut opcodes = vec![NvmOpcode::WRITE, NvmOpcode::WRITE_ZEROES, NvmOpcode::WRITE];
        opcodes.extend(LOOKS);
        for opcode in opcodes {
            let mut command = p.command(opcode, 5, 2, STC);
            command.cdw2 = u32::MAX.into();
            command.cdw3 = (command.cdw3.get() | 0xffff_0000).into();
            assert_eq!(plain(p.h.io(command)), Status::SUCCESS, "{opcode:?}");
        }
        let format = u32::from(layout.block == 4096);
        let command = p.copy(format, 40, [GUARD; 2], &[from(5, 2)]);
        assert_eq!(copied(&mut p, command, STCR | STC), (Status::SUCCESS, 0));
    }
}

/// The reference tag has what bits remain, and where none do, its check says nothing.
#[test]
fn reference_tag_uses_remaining_bits() {
    for (kind, bits, wanted) in [
        (Type::One, 24, INVALID),
        (Type::One, 32, Status::SUCCESS),
        (Type::Two, 24, Status::REFERENCE_TAG_CHECK_ERROR),
        (Type::Two, 32, Status::SUCCESS),
        (Type::Three, 24, INVALID),
        (Type::Three, 32, Status::SUCCESS),
    ] {
        let layout = layout(512, 8, Some((kind, Guard::Bits16, false)));
        let mut p = Protected::new(stored(layout, StorageTag::of(bits)));
        p.storage = right(bits);
        p.fill(1, 5, 2);
        assert_eq!(p.status(NvmOpcode::WRITE, 5, 2, STC), Status::SUCCESS);
        let mut command = p.command(NvmOpcode::READ, 5, 2, REFERENCE);
        command.cdw14 = (command.cdw14.get() ^ 2).into();
        assert_eq!(plain(p.h.io(command)), wanted, "{kind:?} {bits}");
    }
}

fn copied(p: &mut Protected, mut command: Command, checks: u32) -> (Status, u32) {
    command.cdw12 = (command.cdw12.get() | checks).into();
    p.copied(command)
}

/// Copy checks what it reads by the tags of its ranges, what it writes by its own, and makes tuples
/// with its own; a range that fails is not copied, and those before it are.
#[test]
fn copy_checks_and_sets_storage_tag() {
    each(|p, checks| {
        let own = p.storage;
        let format = u32::from(p.layout.protection.unwrap().guard != Guard::Bits16);
        let (one, two) = (p.written(1, 8, 2), p.written(2, 20, 1));
        let placed = p.placed(own);
        let mask = p.layout.protection.unwrap().reference_mask();
        let good = |slba, blocks| From {
            storage: placed,
            reference: slba & mask,
            ..from(slba, blocks)
        };
        let all = STC | STCR;
        let tags = GUARD | APPLICATION;
        let ranges = [good(8, 2), good(20, 1)];
        let command = p.copy(format, 40, [checks, tags], &ranges);
        assert_eq!(
            copied(p, command, all),
            (Status::SUCCESS, 0),
            "{:?}",
            p.layout
        );
        assert!(p.read(40, 2, GUARD | STC) == one);
        assert!(p.read(42, 1, GUARD | STC) == two);
        let before = p.read(51, 2, 0);
        for other in wrong(p) {
            // Of the second range.
            let bad = From {
                storage: p.placed(other),
                ..good(20, 1)
            };
            let command = p.copy(format, 50, [checks, tags], &[good(8, 1), bad, good(9, 1)]);
            assert_eq!(copied(p, command, all), (WRONG, 1), "{:?}", p.layout);
            assert!(p.read(51, 2, 0) == before);
            assert_eq!(p.status(NvmOpcode::READ, 50, 1, STC), Status::SUCCESS);
            assert_eq!(copied(p, command, STC), (Status::SUCCESS, 0));
            let command = p.copy(format, 51, [0, 0], &[from(0, 2)]);
            assert_eq!(copied(p, command, 0), (Status::SUCCESS, 0));
            // Of the destination.
            p.storage = other;
            let command = p.copy(format, 51, [checks, tags], &ranges[..1]);
            assert_eq!(copied(p, command, all), (WRONG, 0), "{:?}", p.layout);
            assert!(p.read(51, 2, 0) == before);
            assert_eq!(copied(p, command, STCR), (Status::SUCCESS, 0));
            // It is made anew.
            let command = p.copy(format, 51, [PRACT | checks, PRACT], &ranges[..1]);
            assert_eq!(copied(p, command, all), (Status::SUCCESS, 0));
            let (data, mut metadata) = one.clone();
            p.protect(&data, &mut metadata, 51);
            assert!(p.read(51, 2, checks | STC) == (data, metadata));
            p.storage = own;
            let command = p.copy(format, 51, [0, 0], &[from(0, 2)]);
            assert_eq!(copied(p, command, 0), (Status::SUCCESS, 0));
        }
    });
}

#[test]
fn identify_reports_storage_tag() {
    for (block, metadata, guard, bits) in SIZES {
        let mask = StorageTag::of(bits).mask & 0x5555_5555_5555_5555;
        for storage in [StorageTag::of(bits), StorageTag { bits, mask }] {
            let layout = layout(block, metadata, Some((Type::One, guard, false)));
            let mut p = Protected::new(stored(layout, storage));
            let (status, page) = p.h.identify(5, 1, 0);
            assert_eq!(status, Status::SUCCESS);
            let nvm = NvmNamespace::read_from_bytes(&page).unwrap();
            let format = match guard {
                Guard::Bits16 => 0,
                Guard::Bits32 => 1 << 7,
                Guard::Bits64 => 2 << 7,
            };
            assert_eq!(nvm.elbaf[0].get(), format | u32::from(bits));
            assert_eq!(nvm.lbstm.get(), storage.mask);
            // 16BPISTS and STCRS; of the mask, each bit may be either (16BPISTM, PIFA).
            assert_eq!((nvm.pic.into_bits(), nvm.pifa), (5, 0));
        }
    }
}
