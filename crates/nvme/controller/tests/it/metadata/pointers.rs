//! Metadata pointers that are addresses of SGL descriptors ("NVMe Base 2.1", 4.1.1): in every shape
//! the same metadata as in one buffer, and each error its status.

use crate::common::*;
use crate::metadata::world::*;
use controller::ControllerConfig;
use nvme::cmd::Psdt;
use nvme::regs::{self, Cmbmsc};
use nvme::sgl::{SglDescriptor, SglType};
use nvme::{Command, NvmOpcode, Status};
use proptest::prelude::*;
use protection::{Guard, Layout, Type};
use zerocopy::IntoBytes;

/// Where the descriptor is to which the metadata pointer points.
const FIRST: u64 = DATA + (6 << 20);
/// Where its further segments are, and the pieces of metadata that they describe.
const SEGMENTS: u64 = DATA + (7 << 20);
const PIECES: u64 = DATA + (8 << 20);

/// The command with an SGL of one data block, and with the metadata that this descriptor describes.
fn pointed(p: &Protected, mut command: Command, first: SglDescriptor) -> Command {
    p.h.write(FIRST, first.as_bytes());
    command.set_sgl(SglDescriptor::data_block(DATA, 1 << 20));
    command.flags.set_psdt(Psdt::SGL_MPTR_SGL);
    command.mptr = FIRST.into();
    command
}

/// Lays descriptors into as many segments, each with so many pieces and the descriptor of the next
/// one; returns what describes the first of them.
fn chain(h: &Host, pieces: &[SglDescriptor], each: usize) -> SglDescriptor {
    let count = pieces.len().div_ceil(each).max(1);
    let mut next = None;
    for at in (0..count).rev() {
        let place = SEGMENTS + at as u64 * 0x1000;
        let end = pieces.len().min((at + 1) * each);
        let mut segment = pieces[at * each..end].to_vec();
        segment.extend(next);
        h.write(place, segment.as_bytes());
        let len = 16 * segment.len() as u32;
        next = Some(match next {
            None => SglDescriptor::last_segment(place, len),
            Some(_) => SglDescriptor::segment(place, len),
        });
    }
    next.unwrap()
}

proptest! {
    /// Whatever pieces the metadata has, they are written, compared and read as one buffer's, and
    /// what is behind and between them stays as it is.
    #[test]
    fn metadata_pieces_of_any_shape_work(
        // Bytes of a piece, and free ones before it.
        pieces in prop::collection::vec((0u32..40, 0u64..9), 1..24),
        each in 1usize..9,
        excess in 0u32..20,
        which in 0usize..3,
        seed in any::<u64>(),
    ) {
        let layouts = [
            usual(),
            layout(512, 64, Some((Type::Two, Guard::Bits16, true))),
            layout(512, 16, None),
        ];
        let mut p = Protected::new(layouts[which]);
        let size = u32::from(p.layout.metadata);
        // As many blocks as fit, of one at least: the last piece has what is missing, and the rest.
        let sum: u32 = pieces.iter().map(|(len, _)| len).sum();
        let blocks = (sum / size).clamp(1, 16);
        let last = (blocks * size).saturating_sub(sum) + excess;
        let (mut at, mut places) = (PIECES, Vec::new());
        for (len, free) in pieces.into_iter().chain([(last, 1)]) {
            at += free;
            places.push((at, len));
            at += u64::from(len);
        }
        let descriptors: Vec<SglDescriptor> =
            places.iter().map(|(at, len)| SglDescriptor::data_block(*at, *len)).collect();
        let first = chain(&p.h, &descriptors, each);
        let (data, metadata) = p.fill(seed, 7, blocks);
        // Scattered over the pieces; the excess is 5ah.
        let scatter = |p: &Protected, bytes: &[u8]| {
            p.h.write(PIECES, &vec![0x5a; (at - PIECES) as usize]);
            let mut rest = bytes;
            for (at, len) in &places {
                let (now, after) = rest.split_at(rest.len().min(*len as usize));
                p.h.write(*at, now);
                rest = after;
            }
            p.h.read(PIECES, (at - PIECES) as usize)
        };
        let scattered = scatter(&p, &metadata);
        let prinfo = if p.layout.protection.is_some() { ALL } else { 0 };
        for opcode in [NvmOpcode::WRITE, NvmOpcode::COMPARE] {
            let command = p.command(opcode, 7, blocks, prinfo);
            let status = p.h.io(pointed(&p, command, first));
            prop_assert_eq!(status, Status::SUCCESS);
        }
        prop_assert_eq!(p.read(7, blocks, prinfo), (data.clone(), metadata.clone()));
        scatter(&p, &vec![0; metadata.len()]);
        p.h.write(DATA, &vec![0; data.len()]);
        let command = p.command(NvmOpcode::READ, 7, blocks, prinfo);
        let status = p.h.io(pointed(&p, command, first));
        prop_assert_eq!(status, Status::SUCCESS);
        prop_assert_eq!(p.h.read(DATA, data.len()), data);
        prop_assert_eq!(p.h.read(PIECES, scattered.len()), scattered);
    }
}

/// What Linux sends from 6.13 on (`nvme_pci_setup_meta_sgls`, later `nvme_pci_setup_meta_iter`):
/// of one piece its data block; of several a last segment, right behind its descriptor.
#[test]
fn linux_metadata_sgls_work() {
    let mut p = Protected::new(usual());
    let (_, metadata) = p.fill(1, 3, 4);
    let block = SglDescriptor::data_block;
    for pieces in [
        vec![(METADATA, 32)],
        vec![(METADATA, 12), (METADATA + 12, 4), (METADATA + 16, 16)],
    ] {
        let pieces: Vec<SglDescriptor> = pieces.iter().map(|(at, len)| block(*at, *len)).collect();
        let first = match pieces[..] {
            [one] => one,
            _ => SglDescriptor::last_segment(FIRST + 16, 16 * pieces.len() as u32),
        };
        p.h.write(FIRST + 16, pieces.as_bytes());
        for opcode in [NvmOpcode::WRITE, NvmOpcode::COMPARE, NvmOpcode::READ] {
            if opcode == NvmOpcode::READ {
                p.h.write(METADATA, &[0xee; 32]);
            }
            let command = p.command(opcode, 3, 4, ALL);
            assert_eq!(p.h.io(pointed(&p, command, first)), Status::SUCCESS);
        }
        assert_eq!(p.h.read(METADATA, 32), metadata);
    }
}

#[test]
fn invalid_metadata_descriptors_are_refused() {
    let mut p = Protected::new(usual());
    let written = p.written(2, 5, 3);
    p.fill(3, 5, 3);
    let top = HIGH + HIGH_SIZE;
    let block = SglDescriptor::data_block;
    let last = SglDescriptor::last_segment;
    let segment = SglDescriptor::segment;
    // The segments that there are: 24 bytes, 23, one that leads on, one that leads on too early.
    p.h.write(
        SEGMENTS,
        [block(METADATA, 24), block(METADATA, 23)].as_bytes(),
    );
    p.h.write(
        SEGMENTS + 32,
        [last(SEGMENTS, 16), block(METADATA, 24)].as_bytes(),
    );
    p.h.write(SEGMENTS + 64, segment(SEGMENTS + 64, 16).as_bytes());
    let mut of_offset = block(0, 24);
    of_offset.identifier |= 1;
    let unknown = |ty: u8| SglDescriptor::new(SglType(ty), METADATA, 24);
    let invalid_type = Status::SGL_DESCRIPTOR_TYPE_INVALID;
    let invalid_length = Status::METADATA_SGL_LENGTH_INVALID;
    let invalid_segment = Status::INVALID_SGL_SEGMENT_DESCRIPTOR;
    let invalid_count = Status::INVALID_SGL_DESCRIPTOR_COUNT;
    let none = Status::DATA_TRANSFER_ERROR;
    let wrong = [
        // Less than the metadata, and what ends above the address space.
        (block(METADATA, 23), invalid_length, true),
        (block(METADATA, 0), invalid_length, true),
        (last(SEGMENTS + 16, 16), invalid_length, true),
        (block(u64::MAX - 22, 24), invalid_length, true),
        (segment(u64::MAX - 15, 32), invalid_length, true),
        // Types: a bit bucket, the keyed ones, what is nothing yet, an offset in no capsule.
        (SglDescriptor::bit_bucket(24), invalid_type, true),
        (
            SglDescriptor::new(SglType::KEYED_DATA_BLOCK, METADATA, 24),
            invalid_type,
            true,
        ),
        (unknown(5), invalid_type, true),
        (unknown(6), invalid_type, true),
        (unknown(15), invalid_type, true),
        (of_offset, invalid_type, true),
        // Segments.
        (last(SEGMENTS, 0), invalid_segment, true),
        (last(SEGMENTS, 17), invalid_segment, true),
        (segment(SEGMENTS + 4, 16), invalid_segment, true),
        (last(SEGMENTS + 32, 16), invalid_segment, true),
        (segment(SEGMENTS + 32, 32), invalid_count, true),
        (segment(SEGMENTS + 64, 16), invalid_count, true),
        // A descriptor for each 512 bytes, and 256.
        (last(SEGMENTS, 16 * 258), invalid_count, true),
        // No memory.
        (block(top, 24), none, false),
        (block(top - 23, 24), none, false),
        (last(top, 16), none, false),
        (last(top - 8, 16), none, false),
    ];
    for (first, wanted, dnr) in wrong {
        for opcode in [NvmOpcode::WRITE, NvmOpcode::READ, NvmOpcode::COMPARE] {
            let command = p.command(opcode, 5, 3, ALL);
            let status = p.h.io(pointed(&p, command, first));
            assert_eq!(status, wanted.with_dnr(dnr), "{first:?}");
        }
    }
    // The descriptor's own address.
    for (mptr, wanted) in [
        (FIRST + 4, Status::INVALID_FIELD),
        (FIRST + 1, Status::INVALID_FIELD),
        (top, none),
        (top - 8, none),
        (0u64.wrapping_sub(8), none),
        (0u64.wrapping_sub(16), none),
        (HIGH - 8, none),
    ] {
        for opcode in [NvmOpcode::WRITE, NvmOpcode::READ, NvmOpcode::COMPARE] {
            let command = p.command(opcode, 5, 3, ALL);
            let mut command = pointed(&p, command, block(METADATA, 24));
            // Were it read from there, it would be right.
            p.h.write(FIRST + 4, block(METADATA, 24).as_bytes());
            command.mptr = mptr.into();
            assert_eq!(plain(p.h.io(command)), wanted, "{mptr:#x}");
        }
    }
    // Pieces that the guest may not write to take no read.
    let high = p.h.high.clone();
    p.h.c
        .dma_map(2 * HIGH, 4096, Some((high, 8 << 20)), dma::Prot::RO)
        .unwrap();
    p.fill(2, 5, 3);
    p.h.write(PIECES, &p.h.read(METADATA, 24));
    for (opcode, wanted) in [
        (NvmOpcode::COMPARE, Status::SUCCESS),
        (NvmOpcode::READ, Status::DATA_TRANSFER_ERROR),
    ] {
        let command = p.command(opcode, 5, 3, ALL);
        let command = pointed(&p, command, block(2 * HIGH, 24));
        assert_eq!(plain(p.h.io(command)), wanted);
    }
    // PSDT 11b is reserved, and nothing was changed by all of this.
    let mut command = p.command(NvmOpcode::READ, 5, 3, ALL);
    command.flags.set_psdt(Psdt(3));
    assert_eq!(plain(p.h.io(command)), Status::INVALID_FIELD);
    assert_eq!(p.read(5, 3, ALL), written);
}

/// Descriptors are read before anything is written: a read over them takes their first meaning.
#[test]
fn read_over_own_descriptors_uses_first_values() {
    let mut p = Protected::new(usual());
    let (data, metadata) = p.written(4, 9, 16);
    let pieces = [
        SglDescriptor::data_block(METADATA, 100),
        SglDescriptor::data_block(PIECES, 28),
    ];
    p.clear();
    let mut command = p.command(NvmOpcode::READ, 9, 16, ALL);
    // All of it lies in the data.
    p.h.write(DATA + 256, pieces.as_bytes());
    p.h.write(DATA, SglDescriptor::last_segment(DATA + 256, 32).as_bytes());
    command.set_sgl(SglDescriptor::data_block(DATA, 8192));
    command.flags.set_psdt(Psdt::SGL_MPTR_SGL);
    command.mptr = DATA.into();
    assert_eq!(p.h.io(command), Status::SUCCESS);
    assert_eq!(p.h.read(DATA, 8192), data);
    assert_eq!(p.h.read(METADATA, 100), metadata[..100]);
    assert_eq!(p.h.read(PIECES, 28), metadata[100..]);
}

/// Where metadata is between the data, or is made and taken away, the pointer is none; a command
/// that moves no data has none, either.
#[test]
fn metadata_pointer_is_ignored_without_separate_metadata() {
    let extended = Layout {
        extended: true,
        ..usual()
    };
    for (layout, prinfo, opcodes) in [
        (
            extended,
            ALL,
            &[NvmOpcode::WRITE, NvmOpcode::READ, NvmOpcode::COMPARE][..],
        ),
        (usual(), PRACT, &[NvmOpcode::WRITE, NvmOpcode::READ]),
        (usual(), 0, &[NvmOpcode::VERIFY, NvmOpcode::WRITE_ZEROES]),
    ] {
        let mut p = Protected::new(layout);
        p.fill(5, 2, 2);
        for mptr in [FIRST, FIRST + 1, HIGH + HIGH_SIZE, u64::MAX] {
            for opcode in opcodes {
                let command = p.command(*opcode, 2, 2, prinfo);
                let mut command = pointed(&p, command, SglDescriptor::bit_bucket(1));
                command.mptr = mptr.into();
                assert_eq!(p.h.io(command), Status::SUCCESS, "{opcode:?} {mptr:#x}");
            }
        }
    }
}

/// The descriptor may lie in the controller memory buffer whatever it describes, and outside; what
/// it describes lies where the data is.
#[test]
fn metadata_descriptor_may_lie_in_cmb() {
    let mut p = Protected::new(usual());
    let on = Cmbmsc::new().with_cmse(true).with_cba(CMB >> 12);
    p.h.set64(regs::CMBMSC, on.into_bits());
    let (data, metadata) = p.fill(6, 8, 2);
    let block = SglDescriptor::data_block;
    p.h.write(CMB, &data);
    p.h.write(CMB + 0x1000, &metadata);
    let mixed = Status::INVALID_USE_OF_CMB.with_dnr(true);
    let success = Status::SUCCESS;
    for (at, pieces, wanted) in [
        (DATA, [METADATA, METADATA + 8], success),
        (DATA, [CMB + 0x1000, CMB + 0x1008], mixed),
        (DATA, [METADATA, CMB + 0x1008], mixed),
        (CMB, [METADATA, METADATA + 8], mixed),
        (CMB, [CMB + 0x1000, METADATA + 8], mixed),
        (CMB, [CMB + 0x1000, CMB + 0x1008], success),
    ] {
        let list = pieces.map(|at| block(at, 8));
        for (first, segment) in [
            (FIRST, SEGMENTS),
            (CMB + 0x2000, SEGMENTS),
            (FIRST, CMB + 0x3000),
            (CMB + 0x2000, CMB + 0x3000),
        ] {
            let mut command = p.command(NvmOpcode::WRITE, 8, 2, ALL);
            command.set_sgl(block(at, 1024));
            command.flags.set_psdt(Psdt::SGL_MPTR_SGL);
            command.mptr = first.into();
            p.h.write(first, SglDescriptor::last_segment(segment, 32).as_bytes());
            p.h.write(segment, list.as_bytes());
            assert_eq!(p.h.io(command), wanted, "{at:#x} {pieces:x?} {first:#x}");
        }
    }
    assert_eq!(p.read(8, 2, ALL), (data, metadata));
    // A descriptor of which a half is in the buffer and the other behind it (CMBLOC.CDPCILS).
    let end = CMB + (1 << 20);
    let high = p.h.high.clone();
    p.h.c
        .dma_map(end, 4096, Some((high, 8 << 20)), dma::Prot::RW)
        .unwrap();
    let command = p.command(NvmOpcode::WRITE, 8, 2, ALL);
    let both = block(METADATA, 16);
    let mut command = pointed(&p, command, both);
    p.h.write(end - 8, &both.as_bytes()[..8]);
    p.h.write(PIECES, &both.as_bytes()[8..]);
    command.mptr = (end - 8).into();
    assert_eq!(p.h.io(command), success);
}

/// SGLS bit 19, where namespaces may have metadata.
#[test]
fn identify_reports_metadata_sgl_support() {
    let said = |h: &mut Host| {
        let (status, page) = h.identify(1, 0, 0);
        assert_eq!(status, Status::SUCCESS);
        page[538]
    };
    assert_eq!(said(&mut Protected::new(usual()).h), 1 << 2 | 1 << 3);
    assert_eq!(said(&mut Host::ready()), 1 << 2 | 1 << 3);
    let workers = ControllerConfig {
        workers: 2,
        ..ControllerConfig::default()
    };
    let mut h = Host::with(workers, vec![ns(1, mem(8 << 20), 512)]);
    h.enable();
    assert_eq!(said(&mut h), 1 << 2);
}
