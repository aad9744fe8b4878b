//! I/O commands: data arrives where it belongs, and what is wrong gets its status.

use crate::common::*;
use controller::ControllerConfig;
use nvme::cmd::{Fuse, Psdt};
use nvme::sgl::{SglDescriptor, SglType};
use nvme::{Command, NvmOpcode, Status};
use proptest::prelude::*;
use std::sync::Arc;
use volume::{Effect, Fault, FileOptions, FileVolume, IoErrorKind, MemVolume, OpKind};
use zerocopy::IntoBytes;

const LIST: u64 = HIGH + (12 << 20);
const BACK: u64 = HIGH + (6 << 20);

fn file_volume() -> (tempfile::TempDir, Arc<dyn volume::Volume>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(8 << 20)
        .unwrap();
    let volume = FileVolume::open(&path, FileOptions::default()).unwrap();
    (dir, Arc::new(volume))
}

#[test]
fn prps_of_every_size_transfer_data() {
    let (_dir, file) = file_volume();
    let mut h = Host::ready_with(vec![
        ns(1, mem(8 << 20), 512),
        ns(2, mem(8 << 20), 4096),
        ns(3, file, 512),
    ]);
    for (nsid, shift) in [(1, 9), (2, 12), (3, 9)] {
        for (blocks, offset, list_offset) in [
            (1, 0, 0),
            (1, 512, 0),
            (1, 4092, 0),
            (8, 4, 8),
            (16, 0, 4080),
            (17, 1024, 0),
            (256, 2048, 4088),
            (2048, 0, 2048),
            (2048, 512, 4080),
        ] {
            let len = u64::from(blocks) << shift;
            if len > 1 << 20 {
                continue;
            }
            let data = pattern(len + offset, len as usize);
            h.write(DATA, &vec![0xcc; 3 << 20]);
            h.write(DATA + offset, &data);
            let mut write = h.rw(NvmOpcode::WRITE, nsid, 5, blocks, 0);
            h.prps(&mut write, DATA + offset, len, LIST + list_offset);
            assert_eq!(h.io(write), Status::SUCCESS, "{nsid} {blocks} {offset}");
            h.write(BACK, &vec![0xdd; 2 << 20]);
            let mut read = h.rw(NvmOpcode::READ, nsid, 5, blocks, 0);
            h.prps(&mut read, BACK + offset, len, LIST + list_offset);
            assert_eq!(h.io(read), Status::SUCCESS);
            let back = h.read(BACK, 2 << 20);
            let (at, end) = (offset as usize, (offset + len) as usize);
            assert!(back[at..end] == data[..], "{nsid} {blocks} {offset}");
            assert!(
                back[..at].iter().chain(&back[end..]).all(|&b| b == 0xdd),
                "beside the buffer"
            );
        }
        // Larger than MDTS.
        let blocks = ((1 << 20) >> shift) + 1;
        for opcode in [
            NvmOpcode::READ,
            NvmOpcode::WRITE,
            NvmOpcode::COMPARE,
            NvmOpcode::VERIFY,
        ] {
            let mut command = h.rw(opcode, nsid, 0, blocks, 0);
            h.prps(&mut command, DATA, u64::from(blocks) << shift, LIST);
            assert_eq!(plain(h.io(command)), Status::INVALID_FIELD);
        }
    }
}

fn sgl(h: &Host, command: &mut Command, at: u64, descriptors: &[SglDescriptor]) {
    h.write(at, descriptors.as_bytes());
    command.set_sgl(SglDescriptor::last_segment(
        at,
        16 * descriptors.len() as u32,
    ));
}

#[test]
fn sgls_of_every_shape_transfer_data() {
    let mut h = Host::ready();
    let block = SglDescriptor::data_block;
    let data = pattern(9, 1 << 20);
    h.write(DATA, &data);
    let mut write = h.rw(NvmOpcode::WRITE, 1, 0, 2048, 0);
    write.set_sgl(block(DATA, 1 << 20));
    assert_eq!(h.io(write), Status::SUCCESS);
    // In pieces of odd sizes, over two segments.
    let mut read = h.rw(NvmOpcode::READ, 1, 0, 8, 0);
    let second = [block(BACK + 3, 1001), block(BACK + 1004, 2996)];
    h.write(LIST + 4096, second.as_bytes());
    let first = [
        block(BACK + 8192, 99),
        block(BACK + 4000, 0),
        SglDescriptor::last_segment(LIST + 4096, 32),
    ];
    h.write(LIST, first.as_bytes());
    read.set_sgl(SglDescriptor::segment(LIST, 48));
    assert_eq!(h.io(read), Status::SUCCESS);
    let mut got = h.read(BACK + 8192, 99);
    got.extend(h.read(BACK + 3, 3997));
    assert!(got == data[..4096]);
    read.flags.set_psdt(Psdt::SGL_MPTR_SGL);
    assert_eq!(h.io(read), Status::SUCCESS);
    let bad = |h: &mut Host, descriptors: &[SglDescriptor], expected: Status| {
        let mut read = h.rw(NvmOpcode::READ, 1, 0, 8, 0);
        sgl(h, &mut read, LIST, descriptors);
        assert_eq!(plain(h.io(read)), expected, "{descriptors:?}");
    };
    bad(
        &mut h,
        &[block(BACK, 4095)],
        Status::DATA_SGL_LENGTH_INVALID,
    );
    bad(
        &mut h,
        &[SglDescriptor::new(SglType::KEYED_DATA_BLOCK, BACK, 4096)],
        Status::SGL_DESCRIPTOR_TYPE_INVALID,
    );
    bad(
        &mut h,
        &[SglDescriptor::bit_bucket(4096)],
        Status::SGL_DESCRIPTOR_TYPE_INVALID,
    );
    bad(
        &mut h,
        &[block(HIGH + HIGH_SIZE - 1, 4096)],
        Status::DATA_TRANSFER_ERROR,
    );
    bad(
        &mut h,
        &[block(u64::MAX, 4096)],
        Status::DATA_SGL_LENGTH_INVALID,
    );
    bad(
        &mut h,
        &[SglDescriptor::last_segment(LIST, 16)],
        Status::INVALID_SGL_SEGMENT_DESCRIPTOR,
    );
    read.set_sgl(SglDescriptor::last_segment(LIST, 17));
    assert_eq!(plain(h.io(read)), Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
    // A loop of segments ends.
    h.write(LIST, SglDescriptor::segment(LIST, 16).as_bytes());
    read.set_sgl(SglDescriptor::segment(LIST, 16));
    assert_eq!(plain(h.io(read)), Status::INVALID_SGL_DESCRIPTOR_COUNT);
}

/// Every command with data takes an SGL that is longer, and leaves what is behind the data alone:
/// on the general way, on the one for batches, and on a volume that answers later.
#[test]
fn sgl_longer_than_data_is_accepted() {
    let (_dir, file) = file_volume();
    let mut h = Host::ready_with(vec![ns(1, mem(8 << 20), 512), ns(2, file, 512)]);
    let (status, page) = h.identify(1, 0, 0);
    assert_eq!(status, Status::SUCCESS);
    assert_eq!(page[538] & 1 << 2, 1 << 2, "SGLS bit 18");
    let block = SglDescriptor::data_block;
    let top = HIGH + HIGH_SIZE;
    let data = pattern(5, 512);
    for nsid in [1, 2] {
        // Descriptors, and where their data lies. Behind `top` the guest has no memory.
        let shapes: [(&[SglDescriptor], u64); 4] = [
            (&[block(DATA, 4096)], DATA),
            (&[block(top - 512, u32::MAX)], top - 512),
            (&[block(DATA, 512), block(top, 512)], DATA),
            (&[block(DATA, 0), block(DATA, 1024), block(DATA, 512)], DATA),
        ];
        for (descriptors, at) in shapes {
            let command = |h: &mut Host, opcode: NvmOpcode| {
                let mut command = h.rw(opcode, nsid, 3, 1, 0);
                match descriptors {
                    [one] => command.set_sgl(*one),
                    _ => sgl(h, &mut command, LIST, descriptors),
                }
                h.io(command)
            };
            let behind = (at + 1024 <= top).then_some(at + 512);
            let fill = |h: &mut Host| {
                if let Some(behind) = behind {
                    h.write(behind, &[0xa5; 512]);
                }
            };
            fill(&mut h);
            h.write(at, &data);
            assert_eq!(command(&mut h, NvmOpcode::WRITE), Status::SUCCESS);
            assert_eq!(command(&mut h, NvmOpcode::COMPARE), Status::SUCCESS);
            h.write(at, &[0; 512]);
            assert_eq!(command(&mut h, NvmOpcode::READ), Status::SUCCESS);
            assert!(h.read(at, 512) == data, "{descriptors:?}");
            if let Some(behind) = behind {
                assert!(h.read(behind, 512) == [0xa5; 512], "{descriptors:?}");
            }
            // The block behind on the disk was not written either.
            let next = h.rw(NvmOpcode::READ, nsid, 4, 1, BACK);
            assert_eq!(h.io(next), Status::SUCCESS);
            assert!(h.read(BACK, 512) == [0; 512]);
        }
        // One range of 16 bytes, at the start of a page.
        let mut range = [0; 16];
        range[4..8].copy_from_slice(&1u32.to_le_bytes());
        range[8] = 3;
        h.write(DATA, &range);
        let mut trim = Command::new(NvmOpcode::DATASET_MANAGEMENT.0, 0, nsid);
        trim.cdw11 = 4.into();
        trim.set_sgl(block(DATA, 4096));
        assert_eq!(h.io(trim), Status::SUCCESS);
        let read = h.rw(NvmOpcode::READ, nsid, 3, 1, BACK);
        assert_eq!(h.io(read), Status::SUCCESS);
        assert!(h.read(BACK, 512) == [0; 512]);
        trim.set_sgl(block(DATA, 15));
        assert_eq!(plain(h.io(trim)), Status::DATA_SGL_LENGTH_INVALID);
    }
    // Admin commands have PRPs, whatever the length ("NVMe Base 2.1", 4.1).
    let mut identify = Command::new(nvme::AdminOpcode::IDENTIFY.0, 0, 0);
    identify.cdw10 = 1.into();
    identify.set_sgl(block(DATA, 8192));
    assert_eq!(plain(h.admin(identify).status()), Status::INVALID_FIELD);
}

#[test]
fn invalid_io_command_is_refused() {
    let mut h = Host::with(
        ControllerConfig {
            max_namespaces: 4,
            ..Default::default()
        },
        vec![ns(1, mem(1 << 20), 512)],
    );
    h.enable();
    h.create_pair(1, 64);
    for opcode in [3, 6, 7, 0x0a, 0x0d, 0x15, 0x21, 0x7d, 0x80, 0xff] {
        let status = h.io(Command::new(opcode, 0, 1));
        assert_eq!(plain(status), Status::INVALID_OPCODE, "{opcode:#x}");
    }
    let opcodes = [
        NvmOpcode::READ,
        NvmOpcode::WRITE,
        NvmOpcode::WRITE_ZEROES,
        NvmOpcode::COMPARE,
        NvmOpcode::VERIFY,
        NvmOpcode::WRITE_UNCORRECTABLE,
    ];
    for opcode in opcodes {
        for (slba, blocks) in [
            (2048, 1),
            (2047, 2),
            (0, 2049),
            (u64::MAX, 1),
            (u64::MAX - 7, 8),
            (u64::MAX >> 9, 1),
            (1 << 55, 1),
        ] {
            let command = h.rw(opcode, 1, slba, blocks, DATA);
            assert_eq!(
                plain(h.io(command)),
                Status::LBA_OUT_OF_RANGE,
                "{opcode} {slba:#x}"
            );
        }
        for (nsid, expected) in [
            (0, Status::INVALID_NAMESPACE_OR_FORMAT),
            (2, Status::INVALID_FIELD), // inactive
            (5, Status::INVALID_NAMESPACE_OR_FORMAT),
            (u32::MAX, Status::INVALID_NAMESPACE_OR_FORMAT),
        ] {
            let command = h.rw(opcode, nsid, 0, 1, DATA);
            assert_eq!(plain(h.io(command)), expected, "{opcode} {nsid}");
        }
        for fuse in [1, 2, 3] {
            let mut command = h.rw(opcode, 1, 0, 1, DATA);
            command.flags.set_fuse(Fuse(fuse));
            assert_eq!(plain(h.io(command)), Status::INVALID_FIELD);
        }
    }
    for opcode in [
        NvmOpcode::READ,
        NvmOpcode::WRITE,
        NvmOpcode::COMPARE,
        NvmOpcode::DATASET_MANAGEMENT,
    ] {
        let mut command = h.rw(opcode, 1, 0, 1, DATA);
        command.flags.set_psdt(Psdt(3));
        assert_eq!(plain(h.io(command)), Status::INVALID_FIELD, "PSDT 3");
        for (prp1, prp2, expected) in [
            (DATA + 1, 0, Status::PRP_OFFSET_INVALID),
            (DATA + 2, 0, Status::PRP_OFFSET_INVALID),
            (HIGH + HIGH_SIZE, 0, Status::DATA_TRANSFER_ERROR),
            (LOW_SIZE, 0, Status::DATA_TRANSFER_ERROR),
            (!3, 0, Status::DATA_TRANSFER_ERROR),
        ] {
            let mut command = h.rw(opcode, 1, 0, 1, 0);
            command.set_prps(prp1, prp2);
            assert_eq!(plain(h.io(command)), expected, "{opcode} {prp1:#x}");
        }
    }
    for (prp2, expected) in [
        (DATA + 8, Status::PRP_OFFSET_INVALID), // two pages: no list
        (HIGH + HIGH_SIZE, Status::DATA_TRANSFER_ERROR),
    ] {
        let mut command = h.rw(NvmOpcode::READ, 1, 0, 16, 0);
        command.set_prps(DATA, prp2);
        assert_eq!(plain(h.io(command)), expected);
    }
    // Lists: unaligned, with an unaligned entry, away, and one that goes in circles.
    let mut command = h.rw(NvmOpcode::READ, 1, 0, 2048, 0);
    for (list, entry, expected) in [
        (LIST + 4, DATA, Status::PRP_OFFSET_INVALID),
        (LIST, DATA + 4, Status::PRP_OFFSET_INVALID),
        (LIST, LOW_SIZE, Status::DATA_TRANSFER_ERROR),
        (HIGH + HIGH_SIZE, DATA, Status::DATA_TRANSFER_ERROR),
    ] {
        for i in 0..512 {
            h.write(LIST + 8 * i, &entry.to_le_bytes());
        }
        command.set_prps(DATA, list);
        assert_eq!(plain(h.io(command)), expected, "{list:#x} {entry:#x}");
    }
    for i in 0..512 {
        h.write(LIST + 8 * i, &(LIST + 4096 - 8).to_le_bytes());
    }
    command.set_prps(DATA, LIST + 4096 - 8);
    assert_eq!(
        plain(h.io(command)),
        Status::PRP_OFFSET_INVALID,
        "the chain points into itself"
    );
    let read = h.rw(NvmOpcode::READ, 1, 0, 1, DATA);
    assert_eq!(h.io(read), Status::SUCCESS, "and the queue lives");
}

#[test]
fn flush_write_zeroes_and_deallocate_work() {
    let mut h = Host::ready_with(vec![ns(1, mem(4 << 20), 512), ns(2, mem(4 << 20), 4096)]);
    assert_eq!(
        h.io(Command::new(NvmOpcode::FLUSH.0, 0, 1)),
        Status::SUCCESS
    );
    assert_eq!(
        h.io(Command::new(NvmOpcode::FLUSH.0, 0, u32::MAX)),
        Status::SUCCESS
    );
    for nsid in [0, 3] {
        assert_eq!(
            plain(h.io(Command::new(NvmOpcode::FLUSH.0, 0, nsid))),
            Status::INVALID_NAMESPACE_OR_FORMAT
        );
    }
    let data = pattern(1, 1 << 20);
    h.write(DATA, &data);
    for deac in [0, 1 << 25] {
        let mut write = h.rw(NvmOpcode::WRITE, 1, 0, 2048, 0);
        h.prps(&mut write, DATA, 1 << 20, LIST);
        assert_eq!(h.io(write), Status::SUCCESS);
        let mut zero = h.rw(NvmOpcode::WRITE_ZEROES, 1, 100, 700, 0);
        zero.cdw12 = (699 | deac).into();
        assert_eq!(h.io(zero), Status::SUCCESS);
        let mut read = h.rw(NvmOpcode::READ, 1, 0, 2048, 0);
        h.prps(&mut read, BACK, 1 << 20, LIST);
        assert_eq!(h.io(read), Status::SUCCESS);
        let mut expected = data.clone();
        expected[100 * 512..800 * 512].fill(0);
        assert!(h.read(BACK, 1 << 20) == expected);
    }
    // The largest Write Zeroes is not limited by MDTS.
    let zero = h.rw(NvmOpcode::WRITE_ZEROES, 1, 0, 8192, 0);
    assert_eq!(h.io(zero), Status::SUCCESS);
}

#[test]
fn dataset_management_deallocates_256_ranges() {
    let mut h = Host::ready();
    let data = pattern(2, 1 << 20);
    h.write(DATA, &data);
    let mut write = h.rw(NvmOpcode::WRITE, 1, 0, 2048, 0);
    h.prps(&mut write, DATA, 1 << 20, LIST);
    assert_eq!(h.io(write), Status::SUCCESS);
    let range = |nlb: u32, slba: u64| {
        let mut raw = [0; 16];
        raw[4..8].copy_from_slice(&nlb.to_le_bytes());
        raw[8..].copy_from_slice(&slba.to_le_bytes());
        raw
    };
    let at = PAGE + 8;
    for i in 0..256 {
        h.write(at + 16 * i, &range((i % 3) as u32, 8 * i));
    }
    let mut dsm = Command::new(NvmOpcode::DATASET_MANAGEMENT.0, 0, 1);
    dsm.cdw10 = 255.into();
    dsm.set_prps(at, PAGE + 4096);
    assert_eq!(h.io(dsm), Status::SUCCESS, "hints only");
    dsm.cdw11 = 4.into();
    assert_eq!(h.io(dsm), Status::SUCCESS);
    let mut read = h.rw(NvmOpcode::READ, 1, 0, 2048, 0);
    h.prps(&mut read, BACK, 1 << 20, LIST);
    assert_eq!(h.io(read), Status::SUCCESS);
    let mut expected = data;
    for i in 0..256 {
        expected[i * 4096..i * 4096 + (i % 3) * 512].fill(0);
    }
    assert!(h.read(BACK, 1 << 20) == expected);
    // One range of them is outside: nothing happens.
    for (nlb, slba) in [
        (1, 1 << 60),
        (u32::MAX, 0),
        (1, u64::MAX),
        (2, (8 << 11) - 1),
    ] {
        h.write(at + 16 * 200, &range(nlb, slba));
        assert_eq!(plain(h.io(dsm)), Status::LBA_OUT_OF_RANGE);
    }
    assert_eq!(h.io(read), Status::SUCCESS);
    assert!(h.read(BACK, 1 << 20) == expected);
}

#[test]
fn compare_and_verify_check_data() {
    let mut h = Host::ready();
    let data = pattern(4, 65536);
    h.write(DATA, &data);
    let mut command = h.rw(NvmOpcode::WRITE, 1, 16, 128, 0);
    h.prps(&mut command, DATA, 65536, LIST);
    assert_eq!(h.io(command), Status::SUCCESS);
    command.opcode = NvmOpcode::COMPARE.0;
    assert_eq!(h.io(command), Status::SUCCESS);
    for at in [0, 1, 4095, 4096, 65535] {
        let mut other = data.clone();
        other[at] ^= 1;
        h.write(DATA, &other);
        assert_eq!(plain(h.io(command)), Status::COMPARE_FAILURE, "byte {at}");
    }
    let verify = h.rw(NvmOpcode::VERIFY, 1, 0, 2048, 0);
    assert_eq!(h.io(verify), Status::SUCCESS);
    assert_eq!(h.c.stats().media_errors.get(), 0);
}

#[test]
fn compare_memory_is_bounded() {
    let (volume, faults) = faulty(8 << 20);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    let mut compare = h.rw(NvmOpcode::COMPARE, 1, 0, 2048, 0);
    h.prps(&mut compare, DATA, 1 << 20, LIST);
    for _ in 0..20 {
        h.submit(1, compare);
    }
    h.run_held(&faults, 16);
    let refused = h.reap_all(1);
    assert_eq!(refused.len(), 4);
    for done in refused {
        assert_eq!(done.status(), Status::COMMAND_INTERRUPTED, "may be retried");
    }
    faults.clear();
    faults.release();
    // Reads of that length go on in pieces.
    h.until(|h| h.c.in_flight() == 0);
    assert_eq!(h.reap_all(1).len(), 16);
    for _ in 0..17 {
        assert_eq!(h.io(compare), Status::SUCCESS, "released");
    }
}

#[test]
fn read_only_namespace_refuses_writes() {
    let mut configured = ns(1, mem(1 << 20), 512);
    configured.read_only = true;
    let by_volume = ns(
        2,
        Arc::new(MemVolume::new(1 << 20).unwrap().read_only()),
        512,
    );
    let mut h = Host::ready_with(vec![configured, by_volume]);
    for nsid in [1, 2] {
        for opcode in [NvmOpcode::WRITE, NvmOpcode::WRITE_ZEROES] {
            let command = h.rw(opcode, nsid, 0, 1, DATA);
            assert_eq!(plain(h.io(command)), Status::NAMESPACE_WRITE_PROTECTED);
        }
        let mut dsm = Command::new(NvmOpcode::DATASET_MANAGEMENT.0, 0, nsid);
        dsm.cdw11 = 4.into();
        dsm.set_prps(PAGE, 0);
        assert_eq!(plain(h.io(dsm)), Status::NAMESPACE_WRITE_PROTECTED);
        for opcode in [NvmOpcode::READ, NvmOpcode::VERIFY, NvmOpcode::FLUSH] {
            let command = h.rw(opcode, nsid, 0, 1, DATA);
            assert_eq!(h.io(command), Status::SUCCESS);
        }
        assert_eq!(h.identify(0, nsid, 0).1[99] & 1, 1, "NSATTR says so");
    }
}

#[test]
fn volume_errors_map_to_status() {
    use IoErrorKind as E;
    let (volume, faults) = faulty(1 << 20);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    for (opcode, error, expected, media) in [
        (
            NvmOpcode::READ,
            E::MediaRead,
            Status::UNRECOVERED_READ_ERROR,
            1,
        ),
        (
            NvmOpcode::COMPARE,
            E::MediaRead,
            Status::UNRECOVERED_READ_ERROR,
            1,
        ),
        (
            NvmOpcode::VERIFY,
            E::Truncated,
            Status::UNRECOVERED_READ_ERROR,
            1,
        ),
        (NvmOpcode::WRITE, E::MediaWrite, Status::WRITE_FAULT, 1),
        (NvmOpcode::FLUSH, E::MediaWrite, Status::WRITE_FAULT, 1),
        (
            NvmOpcode::WRITE_ZEROES,
            E::MediaWrite,
            Status::WRITE_FAULT,
            1,
        ),
        (NvmOpcode::WRITE, E::NoSpace, Status::CAPACITY_EXCEEDED, 0),
        (
            NvmOpcode::WRITE,
            E::ReadOnly,
            Status::NAMESPACE_WRITE_PROTECTED,
            0,
        ),
        (NvmOpcode::WRITE, E::Memory, Status::DATA_TRANSFER_ERROR, 0),
        (NvmOpcode::READ, E::Gone, Status::INTERNAL_ERROR, 0),
        (NvmOpcode::READ, E::Busy, Status::COMMAND_INTERRUPTED, 0),
        (NvmOpcode::READ, E::OutOfRange, Status::LBA_OUT_OF_RANGE, 0),
        (
            NvmOpcode::READ,
            E::Unreachable,
            Status::CONTROLLER_PATHING_ERROR,
            0,
        ),
    ] {
        let before = h.c.stats().media_errors.get();
        faults.add(Fault::nth(OpKind::Any, 1, Effect::Fail(error.into())));
        let command = h.rw(opcode, 1, 0, 1, DATA);
        assert_eq!(plain(h.io(command)), expected, "{opcode} {error:?}");
        h.run();
        assert_eq!(
            h.c.stats().media_errors.get() - before,
            media,
            "{opcode} {error:?}"
        );
        assert_eq!(h.io(command), Status::SUCCESS);
    }
    // Deallocation is advice.
    let mut dsm = Command::new(NvmOpcode::DATASET_MANAGEMENT.0, 0, 1);
    dsm.cdw11 = 4.into();
    h.write(PAGE, &[0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    dsm.set_prps(PAGE, 0);
    faults.add(Fault::nth(
        OpKind::Deallocate,
        1,
        Effect::Fail(E::Unsupported.into()),
    ));
    assert_eq!(h.io(dsm), Status::SUCCESS);
    faults.add(Fault::nth(
        OpKind::Deallocate,
        1,
        Effect::Fail(E::MediaWrite.into()),
    ));
    assert_eq!(plain(h.io(dsm)), Status::WRITE_FAULT);
    // One namespace of a flush of all fails.
    faults.add(Fault::nth(
        OpKind::Flush,
        1,
        Effect::Fail(E::NoSpace.into()),
    ));
    assert_eq!(
        plain(h.io(Command::new(NvmOpcode::FLUSH.0, 0, u32::MAX))),
        Status::CAPACITY_EXCEEDED
    );
}

/// A volume's policy has each kind of command repeated as it was, and told nobody.
#[test]
fn failed_commands_are_repeated_unchanged() {
    use volume::{ErrorAction, OnError, OnErrorVolume, Op};
    for fail in [Effect::Fail, Effect::FailLater] {
        let ops: Arc<std::sync::Mutex<Vec<Op>>> = Arc::default();
        let noted = spy(&ops);
        let faulty = volume::FaultVolume::new(noted);
        let faults = faulty.faults();
        let retry = OnError {
            read: ErrorAction::Retry,
            write: ErrorAction::Retry,
        };
        let volume = OnErrorVolume::new(Arc::new(faulty), retry, "test");
        let status = volume.handle();
        let mut h = Host::ready_with(vec![ns(1, Arc::new(volume), 512)]);
        let data = pattern(7, 4096);
        h.write(DATA, &data);
        let take = || std::mem::take(&mut *ops.lock().unwrap());
        let mut durable = h.rw(NvmOpcode::WRITE, 1, 8, 8, DATA);
        durable.cdw12 = (durable.cdw12.get() | 1 << 30).into();
        let zeroes = Op::WriteZeroes {
            deallocate: false,
            fua: true,
        };
        for (command, op) in [
            (
                h.rw(NvmOpcode::WRITE, 1, 8, 8, DATA),
                Op::Write { fua: false },
            ),
            (durable, Op::Write { fua: true }),
            (h.rw(NvmOpcode::COMPARE, 1, 8, 8, DATA), Op::Read),
            (h.rw(NvmOpcode::READ, 1, 8, 8, BACK), Op::Read),
            (h.rw(NvmOpcode::VERIFY, 1, 8, 8, 0), Op::Read),
            (h.rw(NvmOpcode::WRITE_ZEROES, 1, 16, 8, 0), zeroes),
        ] {
            take();
            faults.add(Fault::nth(OpKind::Any, 1, fail(IoErrorKind::Gone.into())));
            assert_eq!(h.io(command), Status::SUCCESS, "{op:?}");
            assert_eq!(take(), [op]);
        }
        assert_eq!(h.read(BACK, 4096), data);
        let told = status.status();
        assert_eq!(
            (told.read_errors, told.write_errors, told.repeated),
            (3, 3, 6)
        );
        assert_eq!(h.c.stats().media_errors.get(), 0);
        assert_eq!(h.c.stats().error_log_entries.get(), 0);
        assert_eq!(h.c.stats().host_writes(), 2);
    }
}

/// Volume that notes the requests it gets.
fn spy(ops: &Arc<std::sync::Mutex<Vec<volume::Op>>>) -> Arc<dyn volume::Volume> {
    let ops = ops.clone();
    opened(cached(mem(1 << 20)), move |volume, io| {
        let queue = SpyQueue(volume.open(io)?, ops.clone());
        Ok(volume::OpenQueue::new(queue))
    })
}

struct SpyQueue(volume::OpenQueue, Arc<std::sync::Mutex<Vec<volume::Op>>>);

impl volume::VolumeQueue for SpyQueue {
    fn submit(&mut self, request: volume::Request) -> Option<volume::Completion> {
        self.1.lock().unwrap().push(request.op);
        self.0.submit(request)
    }
    fn poll(&mut self, done: &mut dyn FnMut(volume::Completion)) -> usize {
        self.0.poll(done)
    }
    fn state(&self) -> volume::QueueState {
        self.0.state()
    }
    fn cancel(&mut self, tag: u64) {
        self.0.cancel(tag);
    }
}

#[test]
fn fua_writes_through() {
    use volume::Op;
    let ops: Arc<std::sync::Mutex<Vec<Op>>> = Arc::default();
    let noted = spy(&ops);
    let mut h = Host::ready_with(vec![ns(1, noted, 512)]);
    let take = || std::mem::take(&mut *ops.lock().unwrap());
    let mut write = h.rw(NvmOpcode::WRITE, 1, 0, 1, DATA);
    let zero = h.rw(NvmOpcode::WRITE_ZEROES, 1, 0, 1, 0);
    h.io(write);
    h.io(zero);
    write.cdw12 = (1 << 30).into();
    h.io(write);
    let zeroes = |fua| Op::WriteZeroes {
        deallocate: false,
        fua,
    };
    assert_eq!(
        take(),
        [
            Op::Write { fua: false },
            zeroes(false),
            Op::Write { fua: true }
        ]
    );
    h.set_feature(nvme::feature::Fid::VOLATILE_WRITE_CACHE, 0);
    assert_eq!(take(), [Op::Flush]);
    write.cdw12 = 0.into();
    h.io(write);
    h.io(zero);
    assert_eq!(take(), [Op::Write { fua: true }, zeroes(true)]);
    h.set_feature(nvme::feature::Fid::VOLATILE_WRITE_CACHE, 1);
    h.io(write);
    assert_eq!(take(), [Op::Write { fua: false }]);
    // Off by configuration.
    let config = ControllerConfig {
        write_cache: false,
        ..Default::default()
    };
    let noted = spy(&ops);
    let mut h = Host::with(config, vec![ns(1, noted, 512)]);
    for _ in 0..2 {
        h.enable();
        h.create_pair(1, 16);
        h.io(write);
        assert_eq!(take(), [Op::Write { fua: true }]);
        h.disable();
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u32, u64, bool),
    Read(u64, u32, u64, bool),
    Zero(u64, u32, bool),
    Trim(u64, u32),
    Compare(u64, u32),
    Flush,
    Reset,
}

fn step() -> impl Strategy<Value = Step> {
    let place = (0u64..300, 1u32..40);
    prop_oneof![
        4 => (place.clone(), 0u64..1024, any::<bool>()).prop_map(|((l, n), o, s)| Step::Write(l, n, o * 4, s)),
        4 => (place.clone(), 0u64..1024, any::<bool>()).prop_map(|((l, n), o, s)| Step::Read(l, n, o * 4, s)),
        1 => (place.clone(), any::<bool>()).prop_map(|((l, n), d)| Step::Zero(l, n, d)),
        1 => place.clone().prop_map(|(l, n)| Step::Trim(l, n)),
        1 => place.prop_map(|(l, n)| Step::Compare(l, n)),
        1 => Just(Step::Flush),
        1 => Just(Step::Reset),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Whatever commands run, the disk is what a plain array of bytes would be.
    #[test]
    fn random_commands_match_byte_array(steps in proptest::collection::vec(step(), 1..60), shift in prop_oneof![Just(9u32), Just(12)], ring in 0..3) {
        let blocks = 256u64;
        let size = (blocks << shift) as usize;
        let config = ControllerConfig { mapped_doorbells: ring == 1, ..Default::default() };
        let mut h = Host::with(config, vec![ns(1, mem(size as u64), 1 << shift)]);
        h.enable();
        h.create_pair(1, 4);
        if ring == 2 {
            prop_assert_eq!(h.use_shadow(), Status::SUCCESS);
        }
        let mut disk = vec![0u8; size];
        for (i, step) in steps.into_iter().enumerate() {
            let (slba, nlb) = match step {
                Step::Write(l, n, ..) | Step::Read(l, n, ..) | Step::Zero(l, n, _) | Step::Trim(l, n) | Step::Compare(l, n) => (l, n),
                _ => (0, 1),
            };
            let fits = slba + u64::from(nlb) <= blocks;
            let len = (u64::from(nlb) << shift) as usize;
            let at = (slba << shift) as usize;
            let range = at..at + len;
            let expected = if fits { Status::SUCCESS } else { Status::LBA_OUT_OF_RANGE };
            match step {
                Step::Write(_, _, offset, sgl) | Step::Read(_, _, offset, sgl) => {
                    let write = matches!(step, Step::Write(..));
                    let opcode = if write { NvmOpcode::WRITE } else { NvmOpcode::READ };
                    let mut command = h.rw(opcode, 1, slba, nlb, 0);
                    if sgl {
                        command.set_sgl(SglDescriptor::data_block(DATA + offset, len as u32));
                    } else {
                        h.prps(&mut command, DATA + offset, len as u64, LIST);
                    }
                    let data = pattern(i as u64, len);
                    h.write(DATA + offset, &data);
                    prop_assert_eq!(plain(h.io(command)), expected);
                    if fits && write {
                        disk[range].copy_from_slice(&data);
                    } else {
                        let now = h.read(DATA + offset, len);
                        let wanted = if fits { &disk[range] } else { &data[..] };
                        prop_assert!(now == wanted);
                    }
                }
                Step::Zero(_, _, deac) => {
                    let mut command = h.rw(NvmOpcode::WRITE_ZEROES, 1, slba, nlb, 0);
                    command.cdw12 = ((nlb - 1) | u32::from(deac) << 25).into();
                    prop_assert_eq!(plain(h.io(command)), expected);
                    if fits { disk[range].fill(0); }
                }
                Step::Trim(..) => {
                    let mut raw = [0; 16];
                    raw[4..8].copy_from_slice(&nlb.to_le_bytes());
                    raw[8..].copy_from_slice(&slba.to_le_bytes());
                    h.write(PAGE, &raw);
                    let mut command = Command::new(NvmOpcode::DATASET_MANAGEMENT.0, 0, 1);
                    command.cdw11 = 4.into();
                    command.set_prps(PAGE, 0);
                    prop_assert_eq!(plain(h.io(command)), expected);
                    if fits { disk[range].fill(0); }
                }
                Step::Compare(..) => {
                    let mut command = h.rw(NvmOpcode::COMPARE, 1, slba, nlb, 0);
                    h.prps(&mut command, DATA, len as u64, LIST);
                    if fits { h.write(DATA, &disk[range]); }
                    prop_assert_eq!(plain(h.io(command)), expected);
                }
                Step::Flush => prop_assert_eq!(h.io(Command::new(NvmOpcode::FLUSH.0, 0, 1)), Status::SUCCESS),
                Step::Reset => {
                    let shadow = h.ring == Ring::Shadow;
                    h.disable();
                    h.enable();
                    h.create_pair(1, 4);
                    if shadow { prop_assert_eq!(h.use_shadow(), Status::SUCCESS); }
                }
            }
        }
    }
}
