//! Write Zeroes, Dataset Management, Verify and Copy (NVM Command Set 1.1, 3.3).

use crate::bytes::{pattern, u8_at, u16_at, u32_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, PAGE, nvm};
use crate::info::{ALL, Namespace};
use crate::verdict::{Check, Expect, applies_if, require, same};
use nvme::{NvmOpcode as Op, Status};
use test_host::Command;

cases! {
    write_zeroes, ["2.7-a"], If("ONCS bit 3"), Io, "NVM Command Set 1.1, 3.3.8",
        "blocks read as zero after Write Zeroes, and no others";
    write_zeroes_deallocate, ["2.7-b"], If("ONCS bit 3"), Io, "NVM Command Set 1.1, 3.3.8",
        "blocks read as zero after Write Zeroes with Deallocate, where DLFEAT offers it";
    write_zeroes_fua, ["2.7-a"], If("ONCS bit 3"), Io, "NVM Command Set 1.1, 3.3.8",
        "Write Zeroes takes Force Unit Access";
    write_zeroes_out_of_range, ["2.7-c"], If("ONCS bit 3"), Io, "NVM Command Set 1.1, 3.3.8",
        "Write Zeroes out of range is LBA Out of Range, and writes nothing";
    write_zeroes_longer_than_mdts, [], If("ONCS bit 3"), Io, "NVM Command Set 1.1, 3.3.8, 4.1.5",
        "Write Zeroes transfers no data: its length is bound by WZSL, not by MDTS";
    write_zeroes_absent, ["2.7-d"], If("ONCS bit 3 is 0"), Io, "NVM Command Set 1.1, 3.3.8",
        "without Write Zeroes it is Invalid Command Opcode";
    deallocate, ["2.2-a"], If("ONCS bit 2"), Io, "NVM Command Set 1.1, 3.3.3, 3.2.3.2.1",
        "deallocated blocks read as DLFEAT says, the same each time, and blocks beside are \
         untouched";
    deallocate_then_write, ["2.2-b"], If("ONCS bit 2"), Io, "NVM Command Set 1.1, 3.3.3",
        "deallocated blocks can be written and read";
    dataset_all_ranges, ["2.2-c"], If("ONCS bit 2"), Io, "NVM Command Set 1.1, 3.3.3",
        "256 ranges are taken in one command, all of them";
    dataset_out_of_range, ["2.2-d"], If("ONCS bit 2"), Io, "NVM Command Set 1.1, 3.3.3",
        "a range behind the last block is LBA Out of Range";
    dataset_all_namespaces, ["2.2-e"], If("ONCS bit 2 and VS 1.4"), Io, "Base 2.1, 3.2.1",
        "Dataset Management of all namespaces does not succeed";
    dataset_hints, ["2.2-f"], If("ONCS bit 2"), Io, "NVM Command Set 1.1, 3.3.3",
        "without Deallocate the attributes are hints, which change no data";
    dataset_absent, ["2.2-g"], If("ONCS bit 2 is 0"), Io, "NVM Command Set 1.1, 3.3.3",
        "without Dataset Management it is Invalid Command Opcode";
    verify_good, ["2.11-a"], If("ONCS bit 7"), Io, "NVM Command Set 1.1, 3.3.5",
        "Verify of what can be read succeeds, without a buffer";
    verify_out_of_range, ["2.11-b"], If("ONCS bit 7"), Io, "NVM Command Set 1.1, 3.3.5",
        "Verify out of range is LBA Out of Range";
    verify_limit, ["2.11-c"], If("ONCS bit 7 and VSL"), Io, "NVM Command Set 1.1, 3.3.5, 4.1.5",
        "Verify above VSL is Invalid Field in Command";
    verify_absent, ["2.11-d"], If("ONCS bit 7 is 0"), Io, "NVM Command Set 1.1, 3.3.5",
        "without Verify it is Invalid Command Opcode";
    copy_one_range, ["2.14-b"], If("ONCS bit 8"), Io, "NVM Command Set 1.1, 3.3.2",
        "Copy of one range has its data at the destination, and nothing else is changed";
    copy_many_ranges, ["2.14-c"], If("ONCS bit 8"), Io, "NVM Command Set 1.1, 3.3.2",
        "Copy of as many ranges as MSRC says has them one behind the other";
    copy_limits, ["2.14-d"], If("ONCS bit 8"), Io, "NVM Command Set 1.1, 3.3.2",
        "a range above MSSRL, a sum above MCL, and more ranges than MSRC, are Command Size Limit \
         Exceeded";
    copy_out_of_range, ["2.14-e"], If("ONCS bit 8"), Io, "NVM Command Set 1.1, 3.3.2",
        "a source or a destination behind the last block is LBA Out of Range";
    copy_format_invalid, ["2.14-f"], If("ONCS bit 8"), Io, "NVM Command Set 1.1, 3.3.2",
        "a format of descriptors that CDFS does not have is Invalid Field in Command";
    copy_overlap, ["2.14-g"], If("ONCS bit 8"), Io, "NVM Command Set 1.1, 3.3.2",
        "a destination that overlaps a source is refused, or copied rightly";
    copy_across, ["2.14-i"], If("CDFS bit 2"), Io,
        "NVM Command Set 1.1, 3.3.2; Base 2.1, 5.1.25.1.14",
        "descriptors of format 2h, once Host Behavior Support says that the host uses them, name \
         the namespace of each source";
    copy_absent, ["2.14-h"], If("ONCS bit 8 is 0"), Io, "NVM Command Set 1.1, 3.3.2",
        "without Copy it is Invalid Command Opcode";
}

fn oncs(host: &mut Host, bit: u32, what: &str) -> Check<Namespace> {
    applies_if(
        host.controller()?.oncs(bit),
        &format!("ONCS bit {bit} is 0: there is no {what}"),
    )?;
    host.namespace()
}

fn absent(host: &mut Host, bit: u32, opcode: Op) -> Check {
    applies_if(
        !host.controller()?.oncs(bit),
        &format!("ONCS bit {bit} is 1"),
    )?;
    let ns = host.namespace()?;
    let at = host.alloc(PAGE)?;
    host.io(nvm(opcode, ns.nsid).prp(at, 0))?
        .refused(Status::INVALID_OPCODE, &opcode.to_string())
}

fn filled(host: &mut Host, ns: &Namespace, slba: u64, blocks: u64) -> Check<Vec<u8>> {
    let data = pattern(slba + blocks, (blocks * ns.block) as usize);
    host.write(ns, slba, &data)?;
    Ok(data)
}

/// Returns the byte range of some blocks in a buffer that begins one block earlier.
fn part(ns: &Namespace, from: u64, to: u64) -> std::ops::Range<usize> {
    (from * ns.block) as usize..(to * ns.block) as usize
}

fn zeroes(ns: &Namespace, slba: u64, nlb_z: u32, bits: u32) -> Command {
    nvm(Op::WRITE_ZEROES, ns.nsid)
        .slba(slba)
        .dw(12, nlb_z | bits)
}

fn zeroes_with(host: &mut Host, bits: u32) -> Check {
    let ns = oncs(host, 3, "Write Zeroes")?;
    let mut expected = filled(host, &ns, 400, 48)?;
    host.io(zeroes(&ns, 408, 31, bits))?
        .succeeds("Write Zeroes of 32 blocks")?;
    if let Some(range) = expected.get_mut(part(&ns, 8, 40)) {
        range.fill(0);
    }
    host.holds(&ns, 400, &expected, "around Write Zeroes")
}

fn write_zeroes(host: &mut Host) -> Check {
    zeroes_with(host, 0)
}

fn write_zeroes_deallocate(host: &mut Host) -> Check {
    zeroes_with(host, 1 << 25)
}

fn write_zeroes_fua(host: &mut Host) -> Check {
    zeroes_with(host, 1 << 30)
}

fn write_zeroes_out_of_range(host: &mut Host) -> Check {
    let ns = oncs(host, 3, "Write Zeroes")?;
    let last = ns.blocks - 4;
    let data = filled(host, &ns, last, 4)?;
    for (slba, nlb_z) in [
        (ns.blocks, 0),
        (last, 4),
        (u64::MAX, 0),
        (u64::MAX - 3, 7),
        (last, 0xffff),
    ] {
        host.io(zeroes(&ns, slba, nlb_z, 0))?.refused(
            Status::LBA_OUT_OF_RANGE,
            &format!("Write Zeroes of {} blocks from {slba:#x} on", nlb_z + 1),
        )?;
    }
    host.holds(&ns, last, &data, "after Write Zeroes that was refused")
}

fn write_zeroes_longer_than_mdts(host: &mut Host) -> Check {
    let ns = oncs(host, 3, "Write Zeroes")?;
    let page = host.page_size;
    let wzsl = if host.read32(nvme::regs::VS)? >= 0x2_0000 {
        u8_at(&host.identify(6, 0)?, 1)
    } else {
        0
    };
    let mdts = host.controller()?.max_transfer(page).unwrap_or(1 << 20);
    applies_if(wzsl == 0, "WZSL bounds the length")?;
    let blocks = (mdts / ns.block + 1).min(0x1_0000).min(ns.blocks);
    filled(host, &ns, 0, 8)?;
    host.io(zeroes(&ns, 0, (blocks - 1) as u32, 0))?
        .succeeds(&format!("Write Zeroes of {blocks} blocks"))?;
    host.holds(&ns, 0, &vec![0; 8 * ns.block as usize], "after it")
}

fn write_zeroes_absent(host: &mut Host) -> Check {
    absent(host, 3, Op::WRITE_ZEROES)
}

/// Returns a Dataset Management command for ranges of first block and number of blocks.
fn dataset(host: &mut Host, nsid: u32, ranges: &[(u64, u32)], attributes: u32) -> Check<Command> {
    let at = host.alloc(PAGE)?;
    let mut bytes = Vec::new();
    for (slba, count) in ranges {
        bytes.extend([0; 4]);
        bytes.extend(count.to_le_bytes());
        bytes.extend(slba.to_le_bytes());
    }
    host.put(at, &bytes)?;
    Ok(nvm(Op::DATASET_MANAGEMENT, nsid)
        .prp(at, 0)
        .dw(10, ranges.len() as u32 - 1)
        .dw(11, attributes))
}

const DEALLOCATE: u32 = 4;

fn deallocate(host: &mut Host) -> Check {
    let ns = oncs(host, 2, "Dataset Management")?;
    let data = filled(host, &ns, 512, 256)?;
    let command = dataset(host, ns.nsid, &[(512 + 64, 128)], DEALLOCATE)?;
    host.io(command)?.succeeds("Deallocate of 128 blocks")?;
    let first = host.read(&ns, 512, 256)?;
    let second = host.read(&ns, 512, 256)?;
    require!(
        first == second,
        "deallocated blocks differ from one read to the next"
    );
    for (from, to) in [(0, 64), (192, 256)] {
        require!(
            first.get(part(&ns, from, to)) == data.get(part(&ns, from, to)),
            "blocks beside the range that was deallocated have changed"
        );
    }
    // DLFEAT bits 2:0: not reported, zeroes, ones. A block that was not deallocated is unchanged.
    let expected = match u8_at(&ns.page, 33) & 7 {
        1 => Some(0u8),
        2 => Some(0xff),
        _ => None,
    };
    let (here, before) = (first.get(part(&ns, 64, 192)), data.get(part(&ns, 64, 192)));
    let (here, before) = (here.unwrap_or_default(), before.unwrap_or_default());
    let size = ns.block as usize;
    for (block, old) in here.chunks_exact(size).zip(before.chunks_exact(size)) {
        let right = match expected {
            Some(byte) => block.iter().all(|b| *b == byte) || block == old,
            None => {
                block.iter().all(|b| *b == 0) || block.iter().all(|b| *b == 0xff) || block == old
            }
        };
        require!(
            right,
            "a deallocated block reads neither as DLFEAT says nor as before"
        );
    }
    Ok(())
}

fn deallocate_then_write(host: &mut Host) -> Check {
    let ns = oncs(host, 2, "Dataset Management")?;
    filled(host, &ns, 800, 64)?;
    let command = dataset(host, ns.nsid, &[(800, 64)], DEALLOCATE)?;
    host.io(command)?.succeeds("Deallocate")?;
    let data = pattern(33, 8 * ns.block as usize);
    host.write(&ns, 816, &data)?;
    host.holds(&ns, 816, &data, "written after Deallocate")
}

fn dataset_all_ranges(host: &mut Host) -> Check {
    let ns = oncs(host, 2, "Dataset Management")?;
    let data = filled(host, &ns, 1024, 512)?;
    let ranges: Vec<(u64, u32)> = (0..256).map(|n| (1024 + 2 * n, 1)).collect();
    let command = dataset(host, ns.nsid, &ranges, DEALLOCATE)?;
    host.io(command)?.succeeds("Deallocate of 256 ranges")?;
    let found = host.read(&ns, 1024, 512)?;
    for n in 0..256u64 {
        require!(
            found.get(part(&ns, 2 * n + 1, 2 * n + 2)) == data.get(part(&ns, 2 * n + 1, 2 * n + 2)),
            "block {} between two ranges has changed",
            2 * n + 1
        );
    }
    Ok(())
}

fn dataset_out_of_range(host: &mut Host) -> Check {
    let ns = oncs(host, 2, "Dataset Management")?;
    for range in [
        (ns.blocks, 1),
        (ns.blocks - 1, 2),
        (u64::MAX, 1),
        (0xffff_ffff_0000_0000, 8),
    ] {
        let command = dataset(host, ns.nsid, &[(0, 0), range], DEALLOCATE)?;
        host.io(command)?.refused(
            Status::LBA_OUT_OF_RANGE,
            &format!(
                "{} blocks from {:#x} on, of {:#x}",
                range.1, range.0, ns.blocks
            ),
        )?;
    }
    Ok(())
}

fn dataset_all_namespaces(host: &mut Host) -> Check {
    oncs(host, 2, "Dataset Management")?;
    applies_if(
        host.read32(nvme::regs::VS)? >= 0x1_0400,
        "the version is older than 1.4",
    )?;
    let command = dataset(host, ALL, &[(0, 1)], DEALLOCATE)?;
    host.io(command)?.fails("Deallocate for all namespaces")
}

fn dataset_hints(host: &mut Host) -> Check {
    let ns = oncs(host, 2, "Dataset Management")?;
    let data = filled(host, &ns, 900, 16)?;
    for attributes in [0, 1, 2, 3] {
        let command = dataset(host, ns.nsid, &[(900, 16)], attributes)?;
        host.io(command)?
            .succeeds(&format!("attributes {attributes:#x}"))?;
    }
    host.holds(&ns, 900, &data, "after hints")
}

fn dataset_absent(host: &mut Host) -> Check {
    absent(host, 2, Op::DATASET_MANAGEMENT)
}

fn verify(ns: &Namespace, slba: u64, nlb_z: u32) -> Command {
    nvm(Op::VERIFY, ns.nsid).slba(slba).dw(12, nlb_z)
}

fn verify_good(host: &mut Host) -> Check {
    let ns = oncs(host, 7, "Verify")?;
    filled(host, &ns, 0, 64)?;
    for (slba, nlb_z) in [(0, 0), (0, 63), (ns.blocks - 1, 0)] {
        host.io(verify(&ns, slba, nlb_z))?
            .succeeds(&format!("Verify of {} blocks from {slba:#x} on", nlb_z + 1))?;
    }
    Ok(())
}

fn verify_out_of_range(host: &mut Host) -> Check {
    let ns = oncs(host, 7, "Verify")?;
    for (slba, nlb_z) in [(ns.blocks, 0), (ns.blocks - 1, 1), (u64::MAX, 0)] {
        host.io(verify(&ns, slba, nlb_z))?.refused(
            Status::LBA_OUT_OF_RANGE,
            &format!("Verify of {} blocks from {slba:#x} on", nlb_z + 1),
        )?;
    }
    Ok(())
}

fn verify_limit(host: &mut Host) -> Check {
    let ns = oncs(host, 7, "Verify")?;
    applies_if(
        host.read32(nvme::regs::VS)? >= 0x2_0000,
        "the version is older than 2.0",
    )?;
    let vsl = u8_at(&host.identify(6, 0)?, 0);
    applies_if(vsl != 0, "VSL is zero: there is no limit")?;
    let most = (host.page_size << vsl.min(40)) / ns.block;
    applies_if(
        most < 0x1_0000 && most + 1 < ns.blocks,
        "no command can be above VSL",
    )?;
    host.io(verify(&ns, 0, most as u32 - 1))?
        .succeeds("Verify of VSL")?;
    host.io(verify(&ns, 0, most as u32))?
        .refused(Status::INVALID_FIELD, "Verify of one block more than VSL")
}

fn verify_absent(host: &mut Host) -> Check {
    absent(host, 7, Op::VERIFY)
}

/// Returns a Copy command with format 0h descriptors for ranges of first block and number of
/// blocks.
fn copy(host: &mut Host, ns: &Namespace, to: u64, ranges: &[(u64, u64)]) -> Check<Command> {
    let ranges: Vec<_> = ranges
        .iter()
        .map(|(slba, count)| (0, *slba, *count))
        .collect();
    copy_from(host, ns, to, &ranges)
}

/// Returns a Copy command with descriptors that name a source namespace for each range.
fn copy_from(
    host: &mut Host,
    ns: &Namespace,
    to: u64,
    ranges: &[(u32, u64, u64)],
) -> Check<Command> {
    let at = host.alloc(32 * ranges.len() as u64)?;
    let mut bytes = Vec::new();
    for (nsid, slba, count) in ranges {
        bytes.extend(nsid.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(slba.to_le_bytes());
        bytes.extend((*count as u16).wrapping_sub(1).to_le_bytes());
        bytes.extend([0; 14]);
    }
    host.put(at, &bytes)?;
    let (prp1, prp2) = host.prps(at, bytes.len() as u64)?;
    Ok(nvm(Op::COPY, ns.nsid)
        .prp(prp1, prp2)
        .slba(to)
        .dw(12, ranges.len() as u32 - 1))
}

fn copies(host: &mut Host) -> Check<Namespace> {
    let ns = oncs(host, 8, "Copy")?;
    let formats = u16_at(&host.controller()?.0, 534);
    applies_if(formats & 1 != 0, "CDFS does not have format 0h")?;
    Ok(ns)
}

fn copy_one_range(host: &mut Host) -> Check {
    let ns = copies(host)?;
    let data = filled(host, &ns, 1600, 32)?;
    let mut expected = filled(host, &ns, 1800, 64)?;
    let command = copy(host, &ns, 1816, &[(1600, 32)])?;
    host.io(command)?.succeeds("Copy of 32 blocks")?;
    if let Some(range) = expected.get_mut(part(&ns, 16, 48)) {
        range.copy_from_slice(&data);
    }
    host.holds(&ns, 1800, &expected, "around the destination of Copy")?;
    host.holds(&ns, 1600, &data, "the source of Copy")
}

fn copy_many_ranges(host: &mut Host) -> Check {
    let ns = copies(host)?;
    let count = u64::from(u8_at(&ns.page, 80)) + 1;
    let count = count.min(u32_at(&ns.page, 76).into()).min(256);
    let data = filled(host, &ns, 0, 2 * count)?;
    let ranges: Vec<(u64, u64)> = (0..count).map(|n| (2 * (count - 1 - n), 1)).collect();
    let command = copy(host, &ns, 2048, &ranges)?;
    host.io(command)?
        .succeeds(&format!("Copy of {count} ranges"))?;
    let mut expected = Vec::new();
    for (slba, _) in ranges {
        expected.extend_from_slice(data.get(part(&ns, slba, slba + 1)).unwrap_or_default());
    }
    host.holds(&ns, 2048, &expected, "the destination of Copy")
}

fn copy_limits(host: &mut Host) -> Check {
    let ns = copies(host)?;
    let (range, all) = (
        u64::from(u16_at(&ns.page, 74)),
        u64::from(u32_at(&ns.page, 76)),
    );
    let count = usize::from(u8_at(&ns.page, 80)) + 1;
    let mut tried = 0;
    if range < 0x1_0000 && range + 1 < ns.blocks {
        let command = copy(host, &ns, 0, &[(0, range + 1)])?;
        host.io(command)?
            .expect(Status::COMMAND_SIZE_LIMIT_EXCEEDED, "a range above MSSRL")?;
        tried += 1;
    }
    if count < 256 {
        let command = copy(host, &ns, 2048, &vec![(0, 1); count + 1])?;
        host.io(command)?
            .expect(Status::COMMAND_SIZE_LIMIT_EXCEEDED, "more ranges than MSRC")?;
        tried += 1;
    }
    let needed = (all / range.max(1)) as usize + 1;
    if needed <= count && range < ns.blocks {
        let command = copy(host, &ns, 0, &vec![(0, range); needed])?;
        host.io(command)?
            .expect(Status::COMMAND_SIZE_LIMIT_EXCEEDED, "a sum above MCL")?;
        tried += 1;
    }
    applies_if(tried > 0, "no command can be above the limits")
}

fn copy_out_of_range(host: &mut Host) -> Check {
    let ns = copies(host)?;
    for (to, from, count) in [
        (0, ns.blocks - 1, 2),
        (0, ns.blocks, 1),
        (ns.blocks - 1, 0, 2),
        (ns.blocks, 0, 1),
        (u64::MAX, 0, 1),
        (0, u64::MAX, 1),
    ] {
        let command = copy(host, &ns, to, &[(from, count)])?;
        host.io(command)?.refused(
            Status::LBA_OUT_OF_RANGE,
            &format!(
                "Copy of {count} blocks from {from:#x} to {to:#x}, of {:#x}",
                ns.blocks
            ),
        )?;
    }
    Ok(())
}

fn copy_format_invalid(host: &mut Host) -> Check {
    let ns = copies(host)?;
    let formats = u16_at(&host.controller()?.0, 534);
    for format in (0..16u32).filter(|format| formats >> format & 1 == 0) {
        let command = copy(host, &ns, 64, &[(0, 1)])?;
        let nr = 0;
        host.io(command.dw(12, format << 8 | nr))?.refused(
            Status::INVALID_FIELD,
            &format!("descriptors of format {format:#x}"),
        )?;
    }
    Ok(())
}

fn copy_overlap(host: &mut Host) -> Check {
    let ns = copies(host)?;
    let data = filled(host, &ns, 2400, 16)?;
    let command = copy(host, &ns, 2408, &[(2400, 16)])?;
    let entry = host.io(command)?;
    if entry.status().is_success() {
        return host.holds(&ns, 2408, &data, "the destination of Copy over its source");
    }
    entry.expect_one(
        &[Status::OVERLAPPING_IO_RANGE, Status::INVALID_FIELD],
        "Copy over its source",
    )?;
    host.holds(&ns, 2400, &data, "the source of Copy that was refused")?;
    same!(entry.dw0(), 0u32, "ranges that were copied");
    Ok(())
}

fn copy_across(host: &mut Host) -> Check {
    let ns = copies(host)?;
    let formats = u16_at(&host.controller()?.0, 534);
    applies_if(formats & 1 << 2 != 0, "CDFS does not have format 2h")?;
    let alike = |other: &Namespace| {
        other.nsid != ns.nsid
            && other.bytes(1) == ns.bytes(1)
            && other.metadata() == 0
            && other.blocks >= 4096
    };
    let mut other = None;
    for nsid in host.nsids()? {
        let found = host.namespace_of(nsid)?;
        if alike(&found) {
            other = Some(found);
            break;
        }
    }
    let own = filled(host, &ns, 2600, 8)?;
    let mut expected = own.clone();
    let mut ranges = vec![(ns.nsid, 2600, 8)];
    if let Some(other) = &other {
        expected.extend(host.read(other, 2600, 8)?);
        ranges.push((other.nsid, 2600, 8));
    }
    let command = copy_from(host, &ns, 2700, &ranges)?;
    let command = command.dw(12, 2 << 8 | (ranges.len() as u32 - 1));
    host.io(command)?.refused(
        Status::INVALID_FIELD,
        "format 2h before the host said that it uses it",
    )?;
    host.behaves(0, 1 << 2)?;
    host.io(command)?
        .succeeds("Copy by descriptors of format 2h")?;
    host.holds(&ns, 2700, &expected, "the destination of Copy by format 2h")?;
    host.behaves(0, 0)?;
    host.io(command)?.refused(
        Status::INVALID_FIELD,
        "format 2h after the host said that it does not use it",
    )
}

fn copy_absent(host: &mut Host) -> Check {
    absent(host, 8, Op::COPY)
}
