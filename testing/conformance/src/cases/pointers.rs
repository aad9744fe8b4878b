//! Data pointers: PRP entries and lists, SGLs (NVMe Base 2.1, 4.3).

use crate::bytes::pattern;
use crate::case::{Need::*, cases};
use crate::host::{Host, PAGE, admin};
use crate::info::{ALL, Namespace};
use crate::verdict::{Check, Expect, applies_if, require};
use nvme::{AdminOpcode, NvmOpcode as Op, Status};
use test_host::Command;

cases! {
    prp_offset, ["5.1"], Always, Io, "Base 2.1, 4.3.1",
        "the first PRP entry may begin anywhere in its page, on a dword";
    prp_offset_identify, ["5.1"], Always, Admin, "Base 2.1, 4.3.1, 5.1.13",
        "Identify into a buffer that begins within a page uses both entries";
    prp_second_ignored, ["5.1"], Always, Io, "Base 2.1, 4.3.1",
        "the second PRP entry does not count where the first is enough";
    prp_second_offset, ["5-a"], Always, Io, "Base 2.1, 4.3.1",
        "a second PRP entry that is no page's beginning is PRP Offset Invalid";
    prp_list_offset_invalid, ["5-a"], Always, Io, "Base 2.1, 4.3.1",
        "an entry of a list that is no page's beginning is PRP Offset Invalid";
    prp_list, ["5-b"], Always, Io, "Base 2.1, 4.3.1",
        "a list of scattered pages is taken in its order";
    prp_list_within_page, ["5-b"], Always, Io, "Base 2.1, 4.3.1",
        "a list may begin anywhere in its page, on a qword, and goes on in the page that its last \
         entry names";
    prp_list_exact_end, ["5-b"], Always, Io, "Base 2.1, 4.3.1",
        "the last entry of a page is data where it is the last one needed";
    prp_unmapped, ["5.4-b"], Always, Io, "Base 2.1, 4.2.3.1",
        "a transfer to memory that is not there fails, and the controller goes on";
    psdt_reserved, ["5-c"], Always, Io, "Base 2.1, 4.1.1",
        "the reserved value of PSDT is Invalid Field in Command";
    admin_sgl, ["10-h"], Always, Admin, "PCIe Transport 1.1, 3.2.1",
        "an admin command with an SGL is Invalid Field in Command";
    sgl_absent, ["3.10-a"], If("SGLS is 0"), Io, "Base 2.1, 4.1.1, 5.1.13.2.1",
        "without SGLs a command with one is Invalid Field in Command";
    sgl_data_block, ["3.10-b"], If("SGLS"), Io, "Base 2.1, 4.3.2",
        "one data block descriptor describes a transfer, of any dword";
    sgl_segments, ["3.10-c"], If("SGLS"), Io, "Base 2.1, 4.3.2",
        "a segment and a last segment of several descriptors are taken in their order";
    sgl_too_short, ["3.10-d"], If("SGLS"), Io, "Base 2.1, 4.3.2",
        "an SGL shorter than the transfer is Data SGL Length Invalid";
    sgl_longer, ["3.10-e"], If("SGLS"), Io, "Base 2.1, 4.3.2, 5.1.13.2.1",
        "an SGL longer than the transfer is taken where SGLS bit 18 says so, refused otherwise";
    sgl_type_invalid, ["3.10-f"], If("SGLS"), Io, "Base 2.1, 4.3.2",
        "a descriptor of a type that is not supported is SGL Descriptor Type Invalid";
    sgl_segment_invalid, ["3.10-g"], If("SGLS"), Io, "Base 2.1, 4.3.2",
        "a segment whose length is no multiple of 16, or zero, and a last segment that leads on, \
         are refused";
    sgl_bit_bucket, ["3.10-h"], If("SGLS bit 16"), Io, "Base 2.1, 4.3.2",
        "bit buckets leave out data of a read";
    metadata_pointer_ignored, ["3.1-a"], Always, Io, "Base 2.1, 4.1.1; NVM Command Set 1.1, 2.1.6",
        "the metadata pointer does not count where there is no metadata";
}

fn rw(opcode: Op, ns: &Namespace, slba: u64, blocks: u64) -> Command {
    test_host::Command::new(opcode.0, ns.nsid)
        .slba(slba)
        .dw(12, (blocks - 1) as u32)
}

/// Returns the number of logical blocks that fit into `pages` memory pages.
fn blocks(host: &Host, ns: &Namespace, pages: u64) -> u64 {
    pages * host.page_size / ns.block
}

fn prp_offset(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let count = blocks(host, &ns, 2);
    let data = pattern(41, (count * ns.block) as usize);
    host.write(&ns, 0, &data)?;
    for offset in [0u64, 4, 512, 2048, 4092] {
        let at = host.alloc(4 * PAGE)? + offset;
        let command = host.rw_command(Op::READ, &ns, 0, count, at)?;
        host.io(command)?
            .succeeds(&format!("a read to offset {offset:#x}"))?;
        require!(
            host.get(at, data.len())? == data,
            "the data at offset {offset:#x} differ"
        );
    }
    Ok(())
}

fn prp_offset_identify(host: &mut Host) -> Check {
    let expected = host.controller()?.0;
    for offset in [4u64, 1024, 4092] {
        let (first, second) = (host.alloc(PAGE)?, host.alloc(2 * PAGE)? + PAGE);
        host.admin(
            admin(AdminOpcode::IDENTIFY, 0)
                .prp(first + offset, second)
                .dw(10, 1),
        )?
        .succeeds(&format!("Identify to offset {offset:#x}"))?;
        let mut found = host.get(first + offset, (PAGE - offset) as usize)?;
        found.extend(host.get(second, offset as usize)?);
        require!(found == expected, "Identify to offset {offset:#x} differs");
    }
    Ok(())
}

fn prp_second_ignored(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    host.write(&ns, 0, &pattern(42, ns.block as usize))?;
    let at = host.alloc(PAGE)?;
    for second in [0xffff_ffff_ffff_f003u64, 1] {
        host.io(rw(Op::READ, &ns, 0, 1).prp(at, second))?
            .succeeds(&format!(
                "a read of one block with {second:#x} as its second entry"
            ))?;
    }
    Ok(())
}

fn prp_second_offset(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let count = blocks(host, &ns, 2);
    let at = host.alloc(4 * PAGE)?;
    host.put(at, &[0xa5; 4 * PAGE as usize])?;
    host.io(rw(Op::READ, &ns, 0, count).prp(at, at + PAGE + 512))?
        .expect(Status::PRP_OFFSET_INVALID, "a second entry at offset 200h")
}

fn prp_list_offset_invalid(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let count = blocks(host, &ns, 4);
    let (at, list) = (host.alloc(8 * PAGE)?, host.alloc(PAGE)?);
    for wrong in 0..3u64 {
        for entry in 0..3u64 {
            let offset = if entry == wrong { 256 } else { 0 };
            host.put(
                list + 8 * entry,
                &(at + (entry + 1) * PAGE + offset).to_le_bytes(),
            )?;
        }
        host.io(rw(Op::READ, &ns, 0, count).prp(at, list))?.expect(
            Status::PRP_OFFSET_INVALID,
            &format!("entry {wrong} of a list at offset 100h"),
        )?;
    }
    Ok(())
}

/// Writes a PRP list to guest memory at IOVA `at`.
fn put_list(host: &Host, at: u64, entries: &[u64]) -> Check {
    let bytes: Vec<u8> = entries
        .iter()
        .flat_map(|entry| entry.to_le_bytes())
        .collect();
    host.put(at, &bytes)
}

/// Returns the IOVAs of `count` memory pages that are not in ascending order.
fn scattered(host: &mut Host, count: u64) -> Check<Vec<u64>> {
    let at = host.alloc(2 * count * PAGE)?;
    Ok((0..count)
        .map(|n| at + (count - 1 - n) * 2 * PAGE)
        .collect())
}

fn read_scattered(host: &mut Host, ns: &Namespace, pages: &[u64], prp2: u64, what: &str) -> Check {
    let count = blocks(host, ns, pages.len() as u64);
    let data = pattern(43 + pages.len() as u64, (count * ns.block) as usize);
    host.write(ns, 64, &data)?;
    let first = pages.first().copied().unwrap_or(0);
    host.io(rw(Op::READ, ns, 64, count).prp(first, prp2))?
        .succeeds(what)?;
    for (page, data) in pages.iter().zip(data.chunks_exact(PAGE as usize)) {
        require!(
            host.get(*page, PAGE as usize)? == data,
            "{what}: a page differs"
        );
    }
    Ok(())
}

fn prp_list(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let pages = scattered(host, 17)?;
    let list = host.alloc(PAGE)?;
    put_list(host, list, pages.get(1..).unwrap_or_default())?;
    read_scattered(host, &ns, &pages, list, "a list of scattered pages")
}

fn prp_list_within_page(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let pages = scattered(host, 20)?;
    let (list, next) = (host.alloc(PAGE)?, host.alloc(PAGE)?);
    // Five entries to the page's end: four of data, and the pointer to the next list.
    let at = list + PAGE - 40;
    put_list(host, at, pages.get(1..5).unwrap_or_default())?;
    put_list(host, at + 32, &[next])?;
    put_list(host, next, pages.get(5..).unwrap_or_default())?;
    read_scattered(host, &ns, &pages, at, "a list of two pages")
}

fn prp_list_exact_end(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let pages = scattered(host, 6)?;
    let list = host.alloc(PAGE)?;
    let at = list + PAGE - 40;
    put_list(host, at, pages.get(1..).unwrap_or_default())?;
    read_scattered(host, &ns, &pages, at, "a list that ends with its page")
}

fn prp_unmapped(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let nowhere = 0x7_0000_0000u64;
    host.io(rw(Op::READ, &ns, 0, 1).prp(nowhere, 0))?
        .fails("a read to no memory")?;
    host.io(rw(Op::WRITE, &ns, 0, 1).prp(nowhere, 0))?
        .fails("a write from no memory")?;
    let count = blocks(host, &ns, 4);
    let at = host.alloc(PAGE)?;
    host.io(rw(Op::READ, &ns, 0, count).prp(at, nowhere))?
        .fails("a read whose list is in no memory")?;
    host.admin(admin(AdminOpcode::IDENTIFY, 0).prp(nowhere, 0).dw(10, 1))?
        .fails("Identify to no memory")?;
    require!(!host.csts()?.cfs(), "CSTS.CFS is set");
    host.read(&ns, 0, 1)?;
    Ok(())
}

fn psdt_reserved(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let at = host.alloc(PAGE)?;
    host.io(rw(Op::READ, &ns, 0, 1).prp(at, 0).flags(0xc0))?
        .refused(Status::INVALID_FIELD, "a read with PSDT 11b")
}

fn admin_sgl(host: &mut Host) -> Check {
    let at = host.alloc(PAGE)?;
    let command = sgl(
        admin(AdminOpcode::IDENTIFY, ALL).dw(10, 1),
        descriptor(at, PAGE as u32, 0),
    );
    host.admin(command)?
        .refused(Status::INVALID_FIELD, "Identify with an SGL")
}

/// Returns the 16 bytes of an SGL descriptor with this address, length, type and subtype.
pub(super) fn descriptor(address: u64, length: u32, kind: u8) -> [u8; 16] {
    let mut bytes = [0; 16];
    let parts = address
        .to_le_bytes()
        .into_iter()
        .chain(length.to_le_bytes());
    for (byte, value) in bytes.iter_mut().zip(parts) {
        *byte = value;
    }
    let [.., last] = &mut bytes;
    *last = kind;
    bytes
}

pub(super) const DATA_BLOCK: u8 = 0x00;
const BIT_BUCKET: u8 = 0x10;
const SEGMENT: u8 = 0x20;
pub(super) const LAST_SEGMENT: u8 = 0x30;

/// Returns the command with this first SGL descriptor as its data pointer (PSDT 01b).
pub(super) fn sgl(command: Command, first: [u8; 16]) -> Command {
    let word = |n: usize| crate::bytes::u32_at(&first, 4 * n);
    command
        .flags(0x40)
        .dw(6, word(0))
        .dw(7, word(1))
        .dw(8, word(2))
        .dw(9, word(3))
}

fn sgls(host: &mut Host) -> Check<(Namespace, u32)> {
    let sgls = host.controller()?.sgls();
    applies_if(sgls & 3 != 0, "SGLS bits 1:0 are 0: there are no SGLs")?;
    Ok((host.namespace()?, sgls))
}

fn sgl_absent(host: &mut Host) -> Check {
    applies_if(host.controller()?.sgls() & 3 == 0, "there are SGLs")?;
    let ns = host.namespace()?;
    let at = host.alloc(PAGE)?;
    let command = sgl(
        rw(Op::READ, &ns, 0, 1),
        descriptor(at, ns.block as u32, DATA_BLOCK),
    );
    host.io(command)?
        .refused(Status::INVALID_FIELD, "a read with an SGL")
}

fn sgl_data_block(host: &mut Host) -> Check {
    let (ns, _) = sgls(host)?;
    let data = pattern(51, 9 * ns.block as usize);
    let at = host.alloc(PAGE + data.len() as u64)? + 52;
    host.put(at, &data)?;
    let whole = descriptor(at, data.len() as u32, DATA_BLOCK);
    host.io(sgl(rw(Op::WRITE, &ns, 40, 9), whole))?
        .succeeds("a write with one descriptor")?;
    host.holds(&ns, 40, &data, "written by an SGL")?;
    let to = host.alloc(PAGE + data.len() as u64)? + 20;
    let whole = descriptor(to, data.len() as u32, DATA_BLOCK);
    host.io(sgl(rw(Op::READ, &ns, 40, 9), whole))?
        .succeeds("a read with one descriptor")?;
    require!(
        host.get(to, data.len())? == data,
        "the data that were read by an SGL differ"
    );
    Ok(())
}

fn sgl_segments(host: &mut Host) -> Check {
    let (ns, _) = sgls(host)?;
    let data = pattern(52, 8 * ns.block as usize);
    host.write(&ns, 50, &data)?;
    let len = data.len() as u32;
    let (to, first, last) = (
        host.alloc(2 * data.len() as u64)?,
        host.alloc(PAGE)?,
        host.alloc(PAGE)?,
    );
    // Three pieces in reverse order of memory: 12 bytes, all but 512 of the rest, 500.
    let pieces @ [one, two, three] = [(to + u64::from(len), 12), (to + 512, len - 512), (to, 500)];
    host.put(first, &descriptor(one.0, one.1, DATA_BLOCK))?;
    host.put(first + 16, &descriptor(last, 32, LAST_SEGMENT))?;
    host.put(last, &descriptor(two.0, two.1, DATA_BLOCK))?;
    host.put(last + 16, &descriptor(three.0, three.1, DATA_BLOCK))?;
    host.io(sgl(
        rw(Op::READ, &ns, 50, 8),
        descriptor(first, 32, SEGMENT),
    ))?
    .succeeds("a read with two segments")?;
    let mut found = Vec::new();
    for (at, len) in pieces {
        found.extend(host.get(at, len as usize)?);
    }
    require!(found == data, "the data that were read by segments differ");
    // A last segment alone.
    host.put(last, &descriptor(to, len / 2, DATA_BLOCK))?;
    host.put(
        last + 16,
        &descriptor(to + u64::from(len), len - len / 2, DATA_BLOCK),
    )?;
    host.io(sgl(
        rw(Op::READ, &ns, 50, 8),
        descriptor(last, 32, LAST_SEGMENT),
    ))?
    .succeeds("a read with a last segment")?;
    let mut found = host.get(to, (len / 2) as usize)?;
    found.extend(host.get(to + u64::from(len), (len - len / 2) as usize)?);
    require!(
        found == data,
        "the data that were read by a last segment differ"
    );
    Ok(())
}

fn sgl_too_short(host: &mut Host) -> Check {
    let (ns, _) = sgls(host)?;
    let at = host.alloc(4 * PAGE)?;
    let short = descriptor(at, 2 * ns.block as u32 - 4, DATA_BLOCK);
    host.io(sgl(rw(Op::READ, &ns, 0, 2), short))?.expect(
        Status::DATA_SGL_LENGTH_INVALID,
        "an SGL of four bytes less than two blocks",
    )
}

fn sgl_longer(host: &mut Host) -> Check {
    let (ns, sgls) = sgls(host)?;
    let at = host.alloc(4 * PAGE)?;
    let long = descriptor(at, 2 * ns.block as u32, DATA_BLOCK);
    let entry = host.io(sgl(rw(Op::READ, &ns, 0, 1), long))?;
    if sgls >> 18 & 1 != 0 {
        entry.succeeds("an SGL of two blocks for one")
    } else {
        entry.expect(
            Status::DATA_SGL_LENGTH_INVALID,
            "an SGL of two blocks for one",
        )
    }
}

fn sgl_type_invalid(host: &mut Host) -> Check {
    let (ns, sgls) = sgls(host)?;
    let at = host.alloc(PAGE)?;
    let mut kinds = vec![0x60u8, 0x70, 0xe0, 0x0f];
    if sgls & 4 == 0 {
        kinds.push(0x40);
    }
    if sgls >> 16 & 1 == 0 {
        kinds.push(BIT_BUCKET);
    }
    for kind in kinds {
        let first = descriptor(at, ns.block as u32, kind);
        host.io(sgl(rw(Op::READ, &ns, 0, 1), first))?.refused(
            Status::SGL_DESCRIPTOR_TYPE_INVALID,
            &format!("a descriptor of type and subtype {kind:02x}h"),
        )?;
    }
    Ok(())
}

fn sgl_segment_invalid(host: &mut Host) -> Check {
    let (ns, _) = sgls(host)?;
    let (at, list) = (host.alloc(PAGE)?, host.alloc(PAGE)?);
    host.put(list, &descriptor(at, ns.block as u32, DATA_BLOCK))?;
    for (kind, length) in [(LAST_SEGMENT, 0u32), (LAST_SEGMENT, 24), (SEGMENT, 8)] {
        host.io(sgl(rw(Op::READ, &ns, 0, 1), descriptor(list, length, kind)))?
            .expect_one(
                &[
                    Status::INVALID_SGL_SEGMENT_DESCRIPTOR,
                    Status::INVALID_SGL_DESCRIPTOR_COUNT,
                ],
                &format!("a segment of {length} bytes"),
            )?;
    }
    // A last segment that leads on.
    host.put(list, &descriptor(at, ns.block as u32 / 2, DATA_BLOCK))?;
    host.put(list + 16, &descriptor(list + 64, 16, LAST_SEGMENT))?;
    host.put(list + 64, &descriptor(at, ns.block as u32 / 2, DATA_BLOCK))?;
    host.io(sgl(
        rw(Op::READ, &ns, 0, 1),
        descriptor(list, 32, LAST_SEGMENT),
    ))?
    .expect(
        Status::INVALID_SGL_SEGMENT_DESCRIPTOR,
        "a last segment that leads to another",
    )
}

fn sgl_bit_bucket(host: &mut Host) -> Check {
    let (ns, sgls) = sgls(host)?;
    applies_if(
        sgls >> 16 & 1 != 0,
        "SGLS bit 16 is 0: there are no bit buckets",
    )?;
    let data = pattern(53, 2 * ns.block as usize);
    host.write(&ns, 70, &data)?;
    let (to, list) = (host.alloc(PAGE)?, host.alloc(PAGE)?);
    host.put(list, &descriptor(0, ns.block as u32, BIT_BUCKET))?;
    host.put(list + 16, &descriptor(to, ns.block as u32, DATA_BLOCK))?;
    host.io(sgl(
        rw(Op::READ, &ns, 70, 2),
        descriptor(list, 32, LAST_SEGMENT),
    ))?
    .succeeds("a read with a bit bucket")?;
    let second = data.get(ns.block as usize..).unwrap_or_default();
    require!(
        host.get(to, ns.block as usize)? == second,
        "the data behind a bit bucket differ"
    );
    Ok(())
}

fn metadata_pointer_ignored(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let data = pattern(54, ns.block as usize);
    host.write(&ns, 80, &data)?;
    let at = host.alloc(PAGE)?;
    let command = rw(Op::READ, &ns, 80, 1)
        .prp(at, 0)
        .dw(4, 0xffff_f000)
        .dw(5, 0x7fff_ffff);
    host.io(command)?
        .succeeds("a read with a metadata pointer to no memory")?;
    require!(host.get(at, data.len())? == data, "the data differ");
    Ok(())
}
