//! Commands, their checks, and what is refused.

use crate::common::*;
use crate::metadata::world::*;
use controller::{Controller, ControllerConfig, MetadataState, NamespaceConfig};
use dma::Prot;
use nvme::identify::{IdentifyNamespace, NvmNamespace};
use nvme::regs::{self, Cmbmsc};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use protection::{Guard, Layout, Type};
use std::sync::Arc;
use volume::{Io, IoOptions};
use zerocopy::FromBytes;

const LAYOUTS: [(u32, u16, Guard); 6] = [
    (512, 8, Guard::Bits16),
    (4096, 8, Guard::Bits16),
    (512, 64, Guard::Bits16),
    (4096, 16, Guard::Bits32),
    (4096, 16, Guard::Bits64),
    (4096, 64, Guard::Bits64),
];

fn each(mut what: impl FnMut(&mut Protected, Type)) {
    for (block, metadata, guard) in LAYOUTS {
        for kind in [Type::One, Type::Two, Type::Three] {
            for (first, extended) in [(false, false), (true, false), (false, true)] {
                let layout = Layout {
                    extended,
                    ..layout(block, metadata, Some((kind, guard, first)))
                };
                what(&mut Protected::new(layout), kind);
            }
        }
    }
}

fn checks(kind: Type) -> u32 {
    match kind {
        Type::Three => GUARD | APPLICATION,
        _ => ALL,
    }
}

/// What was written with its tuples is read with them, by every kind of protection; compared, and
/// verified.
#[test]
fn protected_data_is_written_read_and_verified() {
    each(|p, kind| {
        let prinfo = checks(kind);
        let (data, metadata) = p.fill(1, 5, 3);
        assert_eq!(p.status(NvmOpcode::WRITE, 5, 3, prinfo), Status::SUCCESS);
        assert_eq!(p.status(NvmOpcode::COMPARE, 5, 3, prinfo), Status::SUCCESS);
        assert_eq!(p.status(NvmOpcode::VERIFY, 5, 3, prinfo), Status::SUCCESS);
        assert_eq!(p.read(5, 3, prinfo), (data.clone(), metadata));
        let mut below = vec![0; data.len()];
        crate::metadata::lasting::raw(p, 5, &mut below);
        assert_eq!(below, data);
    });
}

/// With PRACT the controller makes tuples and takes them away, or leaves them in larger metadata.
#[test]
fn pract_generates_and_strips_tuples() {
    each(|p, kind| {
        let (data, mut metadata) = p.fill(2, 9, 2);
        if p.layout.is_tuple_only() {
            p.h.write(DATA, &data);
        }
        assert_eq!(p.status(NvmOpcode::WRITE, 9, 2, PRACT), Status::SUCCESS);
        p.protect(&data, &mut metadata, 9);
        assert_eq!(p.read(9, 2, checks(kind)), (data.clone(), metadata));
        p.clear();
        let status = p.status(NvmOpcode::READ, 9, 2, PRACT | checks(kind));
        assert_eq!(status, Status::SUCCESS);
        if p.layout.is_tuple_only() {
            assert_eq!(p.h.read(DATA, data.len()), data);
            assert_eq!(p.h.read(DATA + data.len() as u64, 16), [0xee; 16]);
            assert_eq!(p.h.read(METADATA, 64), [0xee; 64]);
        } else {
            assert_eq!(p.got(2).0, data)
        }
        // Those of zeroes, too; and there are none of the host's to be checked.
        for check in [GUARD, APPLICATION, REFERENCE] {
            for prinfo in [check, PRACT | check] {
                let status = p.status(NvmOpcode::WRITE_ZEROES, 9, 2, prinfo);
                assert_eq!(status, Status::INVALID_PROTECTION_INFORMATION);
            }
        }
        assert_eq!(p.read(9, 2, checks(kind)).0, data);
        let status = p.status(NvmOpcode::WRITE_ZEROES, 9, 2, PRACT);
        assert_eq!(status, Status::SUCCESS);
        let (zeroes, _) = p.read(9, 2, checks(kind));
        assert!(zeroes.iter().all(|byte| *byte == 0));
    });
}

/// Each wrong field has its status, and writes nothing; with its check off it is written, and found
/// when it is read.
#[test]
fn wrong_protection_field_has_own_status() {
    each(|p, kind| {
        let guard = p.layout.protection.unwrap().guard;
        let start = if p.layout.protection.unwrap().first {
            0
        } else {
            usize::from(p.layout.metadata) - guard.tuple()
        };
        let tags = start + usize::from(guard.bits()) / 8;
        let last = start + guard.tuple() - 1;
        for (at, prinfo, wanted) in [
            (start, GUARD, Status::GUARD_CHECK_ERROR),
            (tags, APPLICATION, Status::APPLICATION_TAG_CHECK_ERROR),
            (last, REFERENCE, Status::REFERENCE_TAG_CHECK_ERROR),
        ] {
            if kind == Type::Three && prinfo == REFERENCE {
                continue;
            }
            let (old, before) = p.fill(3, 20, 2);
            let status = p.status(NvmOpcode::WRITE, 20, 2, checks(kind));
            assert_eq!(status, Status::SUCCESS);
            let (data, mut metadata) = p.fill(4, 20, 2);
            let second = usize::from(p.layout.metadata);
            metadata[second + at] ^= 1;
            p.put(&data, &metadata);
            assert_eq!(p.status(NvmOpcode::WRITE, 20, 2, prinfo), wanted);
            assert_eq!(p.read(20, 2, checks(kind)), (old, before));
            p.put(&data, &metadata);
            let others = checks(kind) & !prinfo;
            assert_eq!(p.status(NvmOpcode::WRITE, 20, 2, others), Status::SUCCESS);
            p.clear();
            for opcode in [NvmOpcode::READ, NvmOpcode::VERIFY, NvmOpcode::COMPARE] {
                assert_eq!(p.status(opcode, 20, 2, prinfo), wanted);
                assert_eq!(p.h.read(DATA, 64), [0xee; 64]);
            }
            assert_eq!(p.read(20, 2, others), (data, metadata));
        }
    });
}

/// What a block has that was never written is not checked.
#[test]
fn unwritten_blocks_are_not_checked() {
    each(|p, kind| {
        let (data, metadata) = p.read(0, 4, checks(kind));
        assert!(data.iter().all(|byte| *byte == 0));
        let guard = p.layout.protection.unwrap().guard;
        let ones = metadata.iter().filter(|byte| **byte == 0xff).count();
        assert_eq!(ones, 4 * guard.tuple());
    });
    let mut p = Protected::new(layout(512, 16, None));
    assert_eq!(p.read(0, 1, 0).1, [0; 16]);
    // Without protection the field is none.
    let (data, metadata) = p.fill(9, 3, 2);
    assert_eq!(
        p.status(NvmOpcode::WRITE, 3, 2, ALL | PRACT),
        Status::SUCCESS
    );
    assert_eq!(p.read(3, 2, ALL), (data, metadata.clone()));
    let mut other = metadata;
    other[17] ^= 1;
    p.h.write(METADATA, &other);
    assert_eq!(
        p.status(NvmOpcode::COMPARE, 3, 2, 0),
        Status::COMPARE_FAILURE
    );
}

#[test]
fn invalid_protection_fields_are_refused() {
    let mut p = Protected::new(usual());
    let invalid = Status::INVALID_PROTECTION_INFORMATION;
    p.fill(1, 5, 1);
    // Of Type 1 the reference tag is the block's number.
    let mut command = p.command(NvmOpcode::WRITE, 5, 1, REFERENCE);
    command.cdw14 = 6.into();
    assert_eq!(plain(p.h.io(command)), invalid);
    for opcode in [NvmOpcode::COMPARE, NvmOpcode::VERIFY] {
        assert_eq!(p.status(opcode, 5, 1, PRACT), invalid);
    }
    let mut third = Protected::new(layout(512, 8, Some((Type::Three, Guard::Bits16, false))));
    assert_eq!(third.status(NvmOpcode::READ, 5, 1, REFERENCE), invalid);
    // Metadata pointers.
    for (mptr, wanted) in [
        (METADATA + 2, Status::INVALID_FIELD),
        (HIGH + HIGH_SIZE, Status::DATA_TRANSFER_ERROR),
        (HIGH + HIGH_SIZE - 4, Status::DATA_TRANSFER_ERROR),
        (u64::MAX - 3, Status::DATA_TRANSFER_ERROR),
    ] {
        for opcode in [NvmOpcode::WRITE, NvmOpcode::READ, NvmOpcode::COMPARE] {
            let mut command = p.command(opcode, 5, 1, 0);
            command.mptr = mptr.into();
            assert_eq!(plain(p.h.io(command)), wanted, "{mptr:#x}");
        }
        // It is not looked at where nothing is there.
        let mut command = p.command(NvmOpcode::READ, 5, 1, PRACT);
        command.mptr = mptr.into();
        assert_eq!(p.h.io(command), Status::SUCCESS);
    }
    for (slba, blocks) in [(BLOCKS, 1), (BLOCKS - 1, 2), (u64::MAX, 1)] {
        for opcode in [NvmOpcode::READ, NvmOpcode::WRITE, NvmOpcode::WRITE_ZEROES] {
            let status = p.status(opcode, slba, blocks, 0);
            assert_eq!(status, Status::LBA_OUT_OF_RANGE);
        }
    }
    let status = p.status(NvmOpcode::WRITE_UNCORRECTABLE, 0, 1, 0);
    assert_eq!(status, Status::INVALID_OPCODE);
    assert_eq!(p.read(5, 1, 0).0, [0; 512]);
}

/// Deallocation is advice that is not taken: blocks keep their data, and their metadata.
#[test]
fn deallocated_blocks_keep_data_and_metadata() {
    let mut p = Protected::new(usual());
    let written = p.fill(1, 8, 2);
    assert_eq!(p.status(NvmOpcode::WRITE, 8, 2, ALL), Status::SUCCESS);
    let mut range = [0; 16];
    range[4] = 2;
    range[8] = 8;
    p.h.write(DATA, &range);
    let mut command = Command::new(NvmOpcode::DATASET_MANAGEMENT.0, 0, 1);
    command.cdw11 = 4.into();
    command.set_prps(DATA, 0);
    assert_eq!(p.h.io(command), Status::SUCCESS);
    assert_eq!(p.read(8, 2, ALL), written);
}

#[test]
fn identify_reports_protection() {
    for (block, metadata, guard) in LAYOUTS {
        let layout = layout(block, metadata, Some((Type::Two, guard, true)));
        let mut p = Protected::new(layout);
        let (status, page) = p.h.identify(0, 1, 0);
        assert_eq!(status, Status::SUCCESS);
        let ns = IdentifyNamespace::read_from_bytes(&page).unwrap();
        assert_eq!(ns.formatted().unwrap().ms.get(), metadata);
        assert_eq!((ns.flbas.into_bits(), ns.mc.into_bits()), (0, 2));
        assert_eq!((ns.dpc.into_bits(), ns.dps.into_bits()), (2 | 8, 2 | 8));
        assert_eq!(ns.nsze.get(), BLOCKS);
        let (status, page) = p.h.identify(5, 1, 0);
        assert_eq!(status, Status::SUCCESS);
        let nvm = NvmNamespace::read_from_bytes(&page).unwrap();
        let format = match guard {
            Guard::Bits16 => 0,
            Guard::Bits32 => 16 | 1 << 7,
            Guard::Bits64 => 2 << 7,
        };
        let mask = if guard == Guard::Bits32 { 0xffff } else { 0 };
        assert_eq!((nvm.elbaf[0].get(), nvm.lbstm.get()), (format, mask));
        // 16BPISTS where there is another guard; STCRS where there is a storage tag.
        let pic = match guard {
            Guard::Bits16 => 0,
            Guard::Bits32 => 5,
            Guard::Bits64 => 1,
        };
        assert_eq!(nvm.pic.into_bits(), pic);
    }
    let mut p = Protected::new(Layout {
        extended: true,
        ..usual()
    });
    let ns = IdentifyNamespace::read_from_bytes(&p.h.identify(0, 1, 0).1).unwrap();
    assert_eq!((ns.flbas.into_bits(), ns.mc.into_bits()), (0x10, 1));
}

/// Format NVM keeps the format, and forgets the metadata with the data.
#[test]
fn format_nvm_erases_data_and_metadata() {
    let mut p = Protected::new(usual());
    p.fill(1, 8, 2);
    assert_eq!(p.status(NvmOpcode::WRITE, 8, 2, ALL), Status::SUCCESS);
    let mut format = Command::new(AdminOpcode::FORMAT_NVM.0, 0, 1);
    for other in [0, 2 << 5, 1 << 5 | 1 << 4, 1 << 5 | 1 << 8, 1 << 5 | 1] {
        format.cdw10 = other.into();
        let status = p.h.admin(format).status();
        assert_eq!(plain(status), Status::INVALID_FORMAT, "{other:#x}");
    }
    format.cdw10 = (1 << 5).into();
    assert_eq!(p.h.admin(format).status(), Status::SUCCESS);
    let (data, metadata) = p.read(8, 2, ALL);
    assert_eq!((data, metadata), (vec![0; 1024], vec![0xff; 16]));
    p.h.die();
    assert_eq!(p.read(8, 2, ALL).1, [0xff; 16]);
}

#[test]
fn controller_without_metadata_support_refuses_namespace() {
    let io = Io::new(IoOptions::default());
    let state = |layout| Arc::new(MetadataState::in_memory(layout, BLOCKS).unwrap());
    let config = || NamespaceConfig {
        metadata: Some(state(usual())),
        ..ns(1, mem(BLOCKS * 512), 512)
    };
    let error = |controller: ControllerConfig, ns| {
        let made = Controller::new(0, controller, vec![ns], &io);
        made.err().unwrap().to_string()
    };
    let workers = ControllerConfig {
        workers: 2,
        ..Default::default()
    };
    assert!(error(workers, config()).contains("has metadata"));
    let short = NamespaceConfig {
        volume: mem(BLOCKS * 256),
        ..config()
    };
    assert!(error(Default::default(), short).contains("need 32768 bytes"));
    let large = NamespaceConfig {
        block_size: 4096,
        ..config()
    };
    assert!(error(Default::default(), large).contains("of blocks of 512"));
}

/// Data and metadata of a command lie in the controller memory buffer, or outside (CMBLOC.CDMMMS).
#[test]
fn data_and_metadata_lie_both_in_cmb_or_outside() {
    let mut p = Protected::new(usual());
    let on = Cmbmsc::new().with_cmse(true).with_cba(CMB >> 12);
    p.h.set64(regs::CMBMSC, on.into_bits());
    let (data, metadata) = p.fill(1, 8, 2);
    p.h.write(CMB, &data);
    p.h.write(CMB + 0x1000, &metadata);
    let mut command = p.command(NvmOpcode::WRITE, 8, 2, ALL);
    for (at, metadata_at, allowed) in [
        (CMB, METADATA, false),
        (DATA, CMB + 0x1000, false),
        (CMB, CMB + 0x1000, true),
        (DATA, METADATA, true),
    ] {
        command.set_prps(at, 0);
        command.mptr = metadata_at.into();
        let wanted = if allowed {
            Status::SUCCESS
        } else {
            Status::INVALID_USE_OF_CMB.with_dnr(true)
        };
        assert_eq!(p.h.io(command), wanted, "{at:#x} {metadata_at:#x}");
    }
    // The metadata alone crosses the end.
    command.mptr = (CMB + (1 << 20) - 8).into();
    let around = p.h.high.clone();
    p.h.c
        .dma_map(CMB + (1 << 20), 4096, Some((around, 0)), Prot::RW)
        .unwrap();
    let status = p.h.io(command);
    assert_eq!(plain(status), Status::INVALID_USE_OF_CMB);
    assert_eq!(p.read(8, 2, ALL), (data, metadata));
}
