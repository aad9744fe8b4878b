//! Metadata, and the protection information in it (NVM Command Set 1.1, 2.1.6 and 5.3).

use crate::bytes::{pattern, u8_at, u16_at, u32_at};
use crate::case::{Need::*, cases};
use crate::cases::pointers::{DATA_BLOCK, LAST_SEGMENT, descriptor, sgl};
use crate::host::{Host, PAGE, admin, nvm};
use crate::info::Namespace;
use crate::verdict::{Check, Expect, applies_if, not_applicable, require, same};
use nvme::feature::Fid;
use nvme::{AdminOpcode, NvmOpcode as Op, Status};
use test_host::Command;

cases! {
    metadata_separate, ["3.1-b"], If("MC bit 1"), Io, "NVM Command Set 1.1, 2.1.6",
        "metadata in a buffer of its own is written and read, in the order of the blocks";
    metadata_extended, ["3.1-b"], If("MC bit 0"), Io, "NVM Command Set 1.1, 2.1.6",
        "metadata behind each block's data is written and read";
    metadata_pointer_errors, ["3.1-b"], If("MC bit 1"), Io, "Base 2.1, 4.1.1",
        "a metadata pointer that is no multiple of four is Invalid Field in Command";
    metadata_sgl, ["3.1-b"], If("MC bit 1, SGLS bit 19"), Io, "Base 2.1, 4.1.1, 4.3.2",
        "metadata in the pieces of an SGL is written and read, by a data block alone and by a last \
         segment";
    metadata_sgl_errors, ["3.1-b"], If("MC bit 1, SGLS bit 19"), Io, "Base 2.1, 4.3.2",
        "an SGL of metadata that is too short is Metadata SGL Length Invalid, and a descriptor of \
         no supported type SGL Descriptor Type Invalid";
    protection_made, ["3.2-a"], If("DPC"), Io, "NVM Command Set 1.1, 5.3.2.2",
        "with PRACT a write makes the tuple of its data, its block and its tag, and a read takes \
         it away";
    protection_checked, ["3.2-a"], If("DPC"), Io, "NVM Command Set 1.1, 5.3.2.4",
        "a wrong guard, application tag or reference tag has its status, and nothing is written";
    protection_unchecked, ["3.2-a"], If("DPC"), Io, "NVM Command Set 1.1, 5.3.2.4",
        "an application tag of ones is not checked, nor is what PRCHK leaves out";
    protection_initial, ["3.2-a"], If("DPC"), Io, "NVM Command Set 1.1, 5.3.3",
        "of Type 1, a reference tag that is to be checked and is not the block's number is Invalid \
         Protection Information";
    protection_copied, ["3.2-a"], If("DPC and ONCS bit 8"), Io, "NVM Command Set 1.1, 3.3.2",
        "Copy with PRACT checks the tuples of its source by the tags of the range, and makes those \
         of its destination";
    host_behavior_formats, [], If("CTRATT bit 15"), Admin,
        "Base 2.1, 5.1.25.1.14; NVM Command Set 1.1, 4.1.3.6",
        "LBA Format Extension Enable keeps its value";
    protection_enabled, ["3.2-a"], If("DPC, ELBAF is not 0"), Io,
        "NVM Command Set 1.1, 4.1.3.6.1",
        "blocks with longer guards, or with storage tags, are read and written by a host that has \
         enabled extended LBA formats (LBAFEE), and by no other";
}

/// Bit PRACT of PRINFO in dword 12: the controller inserts or strips protection information.
const PRACT: u32 = 1 << 29;
const GUARD: u32 = 1 << 28;
const APPLICATION: u32 = 1 << 27;
const REFERENCE: u32 = 1 << 26;
const ALL_CHECKS: u32 = GUARD | APPLICATION | REFERENCE;

const BLOCKS: u64 = 3;

/// Returns a namespace with metadata: interleaved with the data if `extended`, otherwise separate.
fn with_metadata(host: &mut Host, extended: bool) -> Check<Namespace> {
    for nsid in host.nsids()? {
        let ns = host.namespace_of(nsid)?;
        let is_extended = u8_at(&ns.page, 26) & 0x10 != 0;
        let protected = u8_at(&ns.page, 99) & 1 != 0;
        if ns.metadata() > 0 && is_extended == extended && !protected && ns.blocks >= 4096 {
            return Ok(ns);
        }
    }
    not_applicable("no namespace of 4096 blocks at least has such metadata")
}

/// Returns a namespace with Type 1 protection information at the end of metadata in a separate
/// buffer, with 16-bit guards and no storage tags.
fn protected(host: &mut Host) -> Check<Namespace> {
    for nsid in host.nsids()? {
        let ns = host.namespace_of(nsid)?;
        let of_type_1 = u8_at(&ns.page, 29) & 0xf == 1;
        let extended = u8_at(&ns.page, 26) & 0x10 != 0;
        if !of_type_1 || extended || ns.metadata() != 8 {
            continue;
        }
        let nvm = host.identify(5, nsid)?;
        let format = u32_at(&nvm, 12 + 4 * ns.format());
        if format & 0x1ff == 0 {
            return Ok(ns);
        }
    }
    not_applicable("no namespace has protection information of Type 1 with guards of 16 bits alone")
}

/// Returns a namespace with protection information in an extended format and a separate buffer.
fn extended_format(host: &mut Host) -> Check<Namespace> {
    for nsid in host.nsids()? {
        let ns = host.namespace_of(nsid)?;
        let protected = u8_at(&ns.page, 29) & 7 != 0;
        let interleaved = u8_at(&ns.page, 26) & 0x10 != 0;
        if !protected || interleaved || ns.blocks < 4096 {
            continue;
        }
        let nvm = host.identify(5, nsid)?;
        if u32_at(&nvm, 12 + 4 * ns.format()) & 0x1ff != 0 {
            return Ok(ns);
        }
    }
    not_applicable("no namespace has guards of more than 16 bits, or storage tags")
}

/// Returns the CRC-16/T10-DIF of the data, computed bit by bit.
fn crc(data: &[u8]) -> u16 {
    data.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc: u16, _| {
            let shifted = crc << 1;
            if crc & 0x8000 != 0 {
                shifted ^ 0x8bb7
            } else {
                shifted
            }
        })
    })
}

/// Returns the 8 bytes of protection information: guard, application tag and reference tag.
fn tuple(data: &[u8], application: u16, reference: u32) -> Vec<u8> {
    let mut bytes = crc(data).to_be_bytes().to_vec();
    bytes.extend(application.to_be_bytes());
    bytes.extend(reference.to_be_bytes());
    bytes
}

/// Creates a read or write with metadata in a separate buffer, and the expected tags.
fn command(
    host: &mut Host,
    opcode: Op,
    ns: &Namespace,
    slba: u64,
    (data, metadata): (u64, u64),
    (prinfo, tag): (u32, u16),
) -> Check<Command> {
    let (prp1, prp2) = host.prps(data, BLOCKS * ns.block)?;
    Ok(nvm(opcode, ns.nsid)
        .prp(prp1, prp2)
        .slba(slba)
        .dw(4, metadata as u32)
        .dw(5, (metadata >> 32) as u32)
        .dw(12, prinfo | (BLOCKS - 1) as u32)
        .dw(14, slba as u32)
        .dw(15, 0xffff_0000 | u32::from(tag)))
}

/// Writes blocks from the data buffer and the metadata buffer in guest memory.
fn write(
    host: &mut Host,
    ns: &Namespace,
    slba: u64,
    (data, metadata): (&[u8], &[u8]),
    how: (u32, u16),
) -> Check<test_host::Completion> {
    let at = (host.alloc(data.len() as u64)?, host.alloc(4096)?);
    host.put(at.0, data)?;
    host.put(at.1, metadata)?;
    let command = command(host, Op::WRITE, ns, slba, at, how)?;
    host.io(command)
}

/// Reads blocks, which must succeed. Returns the contents of the data and metadata buffers.
fn read(host: &mut Host, ns: &Namespace, slba: u64, how: (u32, u16)) -> Check<(Vec<u8>, Vec<u8>)> {
    let bytes = BLOCKS * ns.block;
    let at = (host.alloc(bytes)?, host.alloc(4096)?);
    host.put(at.1, &[0xa5; 4096])?;
    let command = command(host, Op::READ, ns, slba, at, how)?;
    host.io(command)?.succeeds("a read with metadata")?;
    let metadata = BLOCKS as usize * usize::from(ns.metadata());
    Ok((host.get(at.0, bytes as usize)?, host.get(at.1, metadata)?))
}

/// Returns the protection information of all blocks of the data.
fn tuples(ns: &Namespace, data: &[u8], application: u16, slba: u64) -> Vec<u8> {
    let blocks = data.chunks_exact(ns.block as usize).zip(slba as u32..);
    let one = |(block, lba)| tuple(block, application, lba);
    blocks.flat_map(one).collect()
}

fn host_behavior_formats(host: &mut Host) -> Check {
    let elbas = host.controller()?.ctratt() & 1 << 15 != 0;
    applies_if(elbas, "CTRATT bit 15 is 0")?;
    for lbafee in [1, 0] {
        host.behaves(lbafee, 0)?;
        let at = host.alloc(512)?;
        let (prp1, prp2) = host.prps(at, 512)?;
        let fid = u32::from(Fid::HOST_BEHAVIOR_SUPPORT.0);
        let get = admin(AdminOpcode::GET_FEATURES, 0).prp(prp1, prp2);
        host.admin(get.dw(10, fid))?
            .succeeds("Get Features, Host Behavior Support")?;
        same!(u8_at(&host.get(at, 512)?, 2), lbafee, "LBAFEE");
    }
    Ok(())
}

fn protection_enabled(host: &mut Host) -> Check {
    let ns = extended_format(host)?;
    require!(
        host.controller()?.ctratt() & 1 << 15 != 0,
        "namespace {} has an extended format, and CTRATT bit 15 (ELBAS) is 0",
        ns.nsid
    );
    let old = pattern(68, (BLOCKS * ns.block) as usize);
    let new = pattern(69, (BLOCKS * ns.block) as usize);
    let nothing = vec![0; BLOCKS as usize * usize::from(ns.metadata())];
    let how = (PRACT, 0xbeef);
    host.behaves(1, 0)?;
    write(host, &ns, 160, (&old, &nothing), how)?.succeeds("a write, with LBAFEE")?;
    host.behaves(0, 0)?;
    let refused = Status::INVALID_NAMESPACE_OR_FORMAT;
    write(host, &ns, 160, (&new, &nothing), how)?.refused(refused, "a write, without LBAFEE")?;
    let at = (host.alloc(BLOCKS * ns.block)?, host.alloc(4096)?);
    let reads = command(host, Op::READ, &ns, 160, at, how)?;
    host.io(reads)?.refused(refused, "a read, without LBAFEE")?;
    host.behaves(1, 0)?;
    let found = read(host, &ns, 160, how)?;
    require!(found.0 == old, "the data differ");
    host.behaves(0, 0)
}

fn metadata_separate(host: &mut Host) -> Check {
    let ns = with_metadata(host, false)?;
    let data = pattern(61, (BLOCKS * ns.block) as usize);
    let mut metadata = pattern(62, BLOCKS as usize * usize::from(ns.metadata()));
    if u8_at(&ns.page, 29) & 7 != 0 && ns.metadata() == 8 {
        metadata = tuples(&ns, &data, 0x1234, 40);
    }
    write(host, &ns, 40, (&data, &metadata), (0, 0))?.succeeds("a write with metadata")?;
    let found = read(host, &ns, 40, (0, 0))?;
    require!(found.0 == data, "the data differ");
    require!(found.1 == metadata, "the metadata differ");
    Ok(())
}

fn metadata_extended(host: &mut Host) -> Check {
    let ns = with_metadata(host, true)?;
    let bytes = ns.bytes(BLOCKS);
    let data = pattern(63, bytes as usize);
    let at = host.alloc(bytes)?;
    host.put(at, &data)?;
    let command = host.rw_command(Op::WRITE, &ns, 40, BLOCKS, at)?;
    host.io(command)?
        .succeeds("a write of extended blocks, nothing of which is to be checked")?;
    host.put(at, &vec![0; bytes as usize])?;
    let command = host.rw_command(Op::READ, &ns, 40, BLOCKS, at)?;
    host.io(command)?.succeeds("a read of extended blocks")?;
    require!(host.get(at, data.len())? == data, "the blocks differ");
    Ok(())
}

fn metadata_pointer_errors(host: &mut Host) -> Check {
    let ns = with_metadata(host, false)?;
    let at = (host.alloc(BLOCKS * ns.block)?, host.alloc(4096)?);
    for offset in 1..4 {
        let at = (at.0, at.1 + offset);
        let command = command(host, Op::READ, &ns, 40, at, (0, 0))?;
        host.io(command)?.expect(
            Status::INVALID_FIELD,
            &format!("a metadata pointer that ends with {offset}"),
        )?;
    }
    Ok(())
}

/// Returns a namespace for which metadata can be transferred through an SGL.
fn with_metadata_sgl(host: &mut Host) -> Check<Namespace> {
    let said = host.controller()?.sgls() >> 19 & 1 != 0;
    applies_if(said, "SGLS bit 19 is 0: there are no SGLs of metadata")?;
    with_metadata(host, false)
}

/// A command with its data in one data block, and the metadata pointer at this descriptor.
fn scattered(
    host: &mut Host,
    opcode: Op,
    ns: &Namespace,
    data: u64,
    first: &[u8; 16],
) -> Check<Command> {
    let pointer = host.alloc(PAGE)?;
    host.put(pointer, first)?;
    let command = command(host, opcode, ns, 60, (data, pointer), (0, 0))?;
    let whole = descriptor(data, (BLOCKS * ns.block) as u32, DATA_BLOCK);
    Ok(sgl(command, whole).flags(0x80))
}

fn metadata_sgl(host: &mut Host) -> Check {
    let ns = with_metadata_sgl(host)?;
    let data = pattern(70, (BLOCKS * ns.block) as usize);
    let mut metadata = pattern(71, BLOCKS as usize * usize::from(ns.metadata()));
    if u8_at(&ns.page, 29) & 7 != 0 && ns.metadata() == 8 {
        metadata = tuples(&ns, &data, 0x1234, 60);
    }
    let len = metadata.len() as u32;
    let (at, to, list) = (
        host.alloc(data.len() as u64)?,
        host.alloc(PAGE)?,
        host.alloc(PAGE)?,
    );
    // Three pieces in reverse order of memory, of whole dwords.
    let fits = len > 12 && len <= 1024 && len.is_multiple_of(4);
    applies_if(fits, "the metadata of three blocks is no 16 to 1024 bytes")?;
    let pieces = [(to + 1536, 4), (to + 512, len - 12), (to, 8)];
    for ((piece, len), at) in pieces.into_iter().zip(0u64..) {
        host.put(list + 16 * at, &descriptor(piece, len, DATA_BLOCK))?;
    }
    let several = descriptor(list, 48, LAST_SEGMENT);
    let whole = descriptor(to + 2048, len, DATA_BLOCK);
    for (first, how, pieces) in [
        (whole, "a data block", &[(to + 2048, len)][..]),
        (several, "a last segment", &pieces),
    ] {
        host.put(at, &data)?;
        let mut rest = metadata.as_slice();
        for (piece, len) in pieces {
            let (now, after) = rest.split_at_checked(*len as usize).unwrap_or_default();
            host.put(*piece, now)?;
            rest = after;
        }
        let write = scattered(host, Op::WRITE, &ns, at, &first)?;
        host.io(write)?
            .succeeds(&format!("a write with metadata by {how}"))?;
        let found = read(host, &ns, 60, (0, 0))?;
        require!(
            found == (data.clone(), metadata.clone()),
            "what was written by {how} differs"
        );
        host.put(to, &[0xa5; 4096])?;
        let reads = scattered(host, Op::READ, &ns, at, &first)?;
        host.io(reads)?
            .succeeds(&format!("a read with metadata by {how}"))?;
        let mut found = Vec::new();
        for (piece, len) in pieces {
            found.extend(host.get(*piece, *len as usize)?);
        }
        require!(
            found == metadata,
            "the metadata that was read by {how} differs"
        );
    }
    Ok(())
}

fn metadata_sgl_errors(host: &mut Host) -> Check {
    let ns = with_metadata_sgl(host)?;
    let (at, to) = (host.alloc(BLOCKS * ns.block)?, host.alloc(PAGE)?);
    let len = BLOCKS as u32 * u32::from(ns.metadata());
    let short = scattered(
        host,
        Op::READ,
        &ns,
        at,
        &descriptor(to, len - 4, DATA_BLOCK),
    )?;
    host.io(short)?.refused(
        Status::METADATA_SGL_LENGTH_INVALID,
        "an SGL of four bytes less than the metadata",
    )?;
    for kind in [0x60u8, 0x70, 0xe0, 0x0f] {
        let unknown = scattered(host, Op::READ, &ns, at, &descriptor(to, len, kind))?;
        host.io(unknown)?.refused(
            Status::SGL_DESCRIPTOR_TYPE_INVALID,
            &format!("a descriptor of metadata of type and subtype {kind:02x}h"),
        )?;
    }
    Ok(())
}

fn protection_made(host: &mut Host) -> Check {
    let ns = protected(host)?;
    let data = pattern(64, (BLOCKS * ns.block) as usize);
    let nothing = [0x5a; 24];
    write(host, &ns, 80, (&data, &nothing), (PRACT, 0xbeef))?.succeeds("a write with PRACT")?;
    let found = read(host, &ns, 80, (ALL_CHECKS, 0xbeef))?;
    require!(found.0 == data, "the data differ");
    let expected = tuples(&ns, &data, 0xbeef, 80);
    require!(
        found.1 == expected,
        "the tuples are {:02x?}, and should be {expected:02x?}",
        found.1
    );
    let taken = read(host, &ns, 80, (PRACT | ALL_CHECKS, 0xbeef))?;
    require!(taken.0 == data, "the data without their tuples differ");
    require!(
        taken.1 == vec![0xa5; 24],
        "metadata is transferred though PRACT takes it away"
    );
    Ok(())
}

fn protection_checked(host: &mut Host) -> Check {
    let ns = protected(host)?;
    let before = pattern(65, (BLOCKS * ns.block) as usize);
    write(host, &ns, 120, (&before, &[0; 24]), (PRACT, 7))?.succeeds("a write with PRACT")?;
    let data = pattern(66, before.len());
    let right = tuples(&ns, &data, 7, 120);
    // A byte of the second block's tuple.
    for (byte, status, what) in [
        (9, Status::GUARD_CHECK_ERROR, "a guard"),
        (
            10,
            Status::APPLICATION_TAG_CHECK_ERROR,
            "an application tag",
        ),
        (15, Status::REFERENCE_TAG_CHECK_ERROR, "a reference tag"),
    ] {
        let mut wrong = right.clone();
        if let Some(byte) = wrong.get_mut(byte) {
            *byte ^= 0x10;
        }
        let entry = write(host, &ns, 120, (&data, &wrong), (ALL_CHECKS, 7))?;
        entry.expect(status, &format!("a write with {what} that is wrong"))?;
        let found = read(host, &ns, 120, (ALL_CHECKS, 7))?;
        require!(
            found.0 == before,
            "a write with {what} that is wrong was done"
        );
    }
    write(host, &ns, 120, (&data, &right), (ALL_CHECKS, 7))?.succeeds("a write that is right")?;
    let found = read(host, &ns, 120, (ALL_CHECKS, 7))?;
    require!(found == (data, right), "what was written differs");
    Ok(())
}

fn protection_unchecked(host: &mut Host) -> Check {
    let ns = protected(host)?;
    let data = pattern(67, (BLOCKS * ns.block) as usize);
    let mut loose = tuples(&ns, &data, 0xffff, 160);
    loose.iter_mut().step_by(8).for_each(|guard| *guard ^= 1);
    write(host, &ns, 160, (&data, &loose), (ALL_CHECKS, 7))?
        .succeeds("a write whose application tags are ones")?;
    let found = read(host, &ns, 160, (ALL_CHECKS, 7))?;
    require!(found == (data.clone(), loose), "what was written differs");
    let mut wrong = tuples(&ns, &data, 8, 160);
    wrong.iter_mut().step_by(8).for_each(|guard| *guard ^= 1);
    write(host, &ns, 160, (&data, &wrong), (REFERENCE, 7))?
        .succeeds("a write of which only the reference tags are checked")?;
    let found = read(host, &ns, 160, (REFERENCE, 7))?;
    same!(
        u16_at(&found.1, 2),
        0x0800_u16,
        "the application tag as it lies"
    );
    Ok(())
}

fn protection_initial(host: &mut Host) -> Check {
    let ns = protected(host)?;
    let at = (host.alloc(BLOCKS * ns.block)?, host.alloc(4096)?);
    let other = command(host, Op::READ, &ns, 200, at, (REFERENCE, 0))?.dw(14, 201);
    host.io(other)?.expect(
        Status::INVALID_PROTECTION_INFORMATION,
        "a reference tag that is to be checked and is another block's",
    )
}

/// Creates a Copy of blocks with the tags of the range, and PRACT for both source and destination.
fn copy(host: &mut Host, ns: &Namespace, slba: u64, to: u64, tag: u16) -> Check<Command> {
    let at = host.alloc(32)?;
    let mut range = [0; 8].to_vec();
    range.extend(slba.to_le_bytes());
    range.extend((BLOCKS as u16 - 1).to_le_bytes());
    range.extend([0; 6]);
    range.extend((slba as u32).to_le_bytes());
    range.extend(tag.to_le_bytes());
    range.extend(u16::MAX.to_le_bytes());
    host.put(at, &range)?;
    let (prp1, prp2) = host.prps(at, 32)?;
    Ok(nvm(Op::COPY, ns.nsid)
        .prp(prp1, prp2)
        .slba(to)
        .dw(12, (PRACT | ALL_CHECKS) >> 14 | PRACT)
        .dw(14, to as u32)
        .dw(15, 0xffff_0000 | u32::from(tag)))
}

fn protection_copied(host: &mut Host) -> Check {
    let page = host.controller()?;
    let has_copy = page.oncs(8) && u16_at(&page.0, 534) & 1 != 0;
    applies_if(has_copy, "there is no Copy with descriptors of format 0h")?;
    let ns = protected(host)?;
    let data = pattern(69, (BLOCKS * ns.block) as usize);
    write(host, &ns, 240, (&data, &[0; 24]), (PRACT, 7))?.succeeds("a write with PRACT")?;
    let command = copy(host, &ns, 240, 280, 7)?;
    host.io(command)?.succeeds("Copy with PRACT")?;
    let found = read(host, &ns, 280, (ALL_CHECKS, 7))?;
    require!(found.0 == data, "the data differ");
    let expected = tuples(&ns, &data, 7, 280);
    require!(
        found.1 == expected,
        "the tuples are {:02x?}, and should be {expected:02x?}",
        found.1
    );
    write(host, &ns, 240, (&data, &[0; 24]), (PRACT, 8))?.succeeds("a write with PRACT")?;
    let command = copy(host, &ns, 240, 280, 7)?;
    let entry = host.io(command)?;
    entry.expect(
        Status::APPLICATION_TAG_CHECK_ERROR,
        "Copy of a range whose application tags are others",
    )?;
    same!(entry.dw0(), 0u32, "the first range that was not copied");
    let found = read(host, &ns, 280, (ALL_CHECKS, 7))?;
    require!(found == (data, expected), "the destination was changed");
    Ok(())
}
