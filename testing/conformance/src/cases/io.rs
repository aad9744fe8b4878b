//! Read, Write, Flush and Compare (NVM Command Set 1.1, 3.3; NVMe Base 2.1, 7.2).

use crate::bytes::pattern;
use crate::case::{Need::*, cases};
use crate::host::{Host, PAGE, nvm};
use crate::info::{ALL, Namespace};
use crate::verdict::{Check, Expect, applies_if, require};
use nvme::{NvmOpcode as Op, Status};
use test_host::Command;

cases! {
    read_valid, ["2.3-1"], Always, Io, "NVM Command Set 1.1, 3.3.4",
        "reads return what was written: one block, several, the first and the last";
    read_slba_out_of_range, ["2.3-2"], Always, Io, "NVM Command Set 1.1, 3.3.4",
        "a read that begins behind the last block is LBA Out of Range";
    read_length_out_of_range, ["2.3-3"], Always, Io, "NVM Command Set 1.1, 3.3.4",
        "a read that ends behind the last block is LBA Out of Range";
    read_out_of_range_and_too_long, ["2.3-4"], If("MDTS"), Io, "NVM Command Set 1.1, 3.3.4",
        "a read that is out of range and above MDTS is either error";
    read_slba_high_dword, ["2.3-5"], Always, Io, "NVM Command Set 1.1, 3.3.4",
        "the upper half of SLBA counts: FFFFFFFF00000000h is LBA Out of Range";
    read_fua, ["2.3-a"], Always, Io, "NVM Command Set 1.1, 3.3.4",
        "Force Unit Access and Limited Retry are taken";
    read_nsid_invalid, ["2.3-b"], Always, Io, "Base 2.1, 3.2.1.2",
        "a read of NSID 0, of one above NN, and of all, is Invalid Namespace or Format";
    read_leaves_rest, [], Always, Io, "NVM Command Set 1.1, 3.3.4",
        "a read changes no byte of memory beside its buffer";
    write_valid, ["2.4-1"], Always, Io, "NVM Command Set 1.1, 3.3.6",
        "a write is read by what follows, and changes no block beside it";
    write_slba_out_of_range, ["2.4-2"], Always, Io, "NVM Command Set 1.1, 3.3.6",
        "a write that begins behind the last block is LBA Out of Range";
    write_length_out_of_range, ["2.4-3"], Always, Io, "NVM Command Set 1.1, 3.3.6",
        "a write that ends behind the last block is LBA Out of Range, and writes nothing";
    write_out_of_range_and_too_long, ["2.4-4"], If("MDTS"), Io, "NVM Command Set 1.1, 3.3.6",
        "a write that is out of range and above MDTS is either error";
    write_slba_high_dword, ["2.4-5"], Always, Io, "NVM Command Set 1.1, 3.3.6",
        "the upper half of SLBA counts, and block 0 is not written instead";
    write_fua, ["2.4-a"], Always, Io, "NVM Command Set 1.1, 3.3.6",
        "a write with Force Unit Access is read by what follows";
    write_nsid_invalid, ["2.4-b"], Always, Io, "Base 2.1, 3.2.1.2",
        "a write to NSID 0, to one above NN, and to all, is Invalid Namespace or Format";
    write_leaves_other_namespaces, [], If("two namespaces"), Io, "Base 2.1, 3.2.1",
        "a write changes its namespace only";
    transfer_largest, ["2-b"], If("MDTS"), Io, "Base 2.1, 5.1.13.2.1",
        "a transfer as long as MDTS succeeds, one block more is Invalid Field in Command";
    flush_namespace, ["2.6-b"], Always, Io, "Base 2.1, 7.2",
        "Flush of a namespace succeeds after writes, and data are there";
    flush_all, ["2.6-c"], Always, Io, "Base 2.1, 7.2, 5.1.13.2.1",
        "Flush of all namespaces does what VWC bits 2:1 say";
    flush_nsid_invalid, ["2.6-d"], Always, Io, "Base 2.1, 3.2.1.2",
        "Flush of an NSID above NN is Invalid Namespace or Format";
    compare_equal, ["2.1-a"], If("ONCS bit 0"), Io, "NVM Command Set 1.1, 3.3.1",
        "Compare with what was written succeeds";
    compare_differs, ["2.1-b"], If("ONCS bit 0"), Io, "NVM Command Set 1.1, 3.3.1",
        "Compare with one bit that differs, anywhere, is Compare Failure";
    compare_out_of_range, ["2.1-c"], If("ONCS bit 0"), Io, "NVM Command Set 1.1, 3.3.1",
        "Compare out of range is LBA Out of Range";
    compare_out_of_range_and_too_long, ["2.1-4"], If("ONCS bit 0 and MDTS"), Io,
        "NVM Command Set 1.1, 3.3.1", "Compare out of range and above MDTS is either error";
    compare_leaves_buffer, [], If("ONCS bit 0"), Io, "NVM Command Set 1.1, 3.3.1",
        "Compare changes neither its buffer nor the blocks";
    compare_absent, ["2.1-d"], If("ONCS bit 0 is 0"), Io, "NVM Command Set 1.1, 3.3.1",
        "without Compare it is Invalid Command Opcode";
}

/// Creates a command for blocks that may not exist, with a buffer of one page.
fn plain(opcode: Op, ns: &Namespace, slba: u64, nlb_z: u32, at: u64) -> Command {
    nvm(opcode, ns.nsid)
        .prp(at, at + PAGE)
        .slba(slba)
        .dw(12, nlb_z)
}

fn read_valid(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    for (slba, blocks) in [
        (0, 1),
        (1, 7),
        (ns.blocks - 9, 9),
        (ns.blocks - 1, 1),
        (77, 64),
    ] {
        let data = pattern(slba ^ blocks, (blocks * ns.block) as usize);
        host.write(&ns, slba, &data)?;
        host.holds(&ns, slba, &data, &format!("{blocks} blocks"))?;
    }
    Ok(())
}

fn slba_out_of_range(host: &mut Host, opcode: Op) -> Check {
    let ns = host.namespace()?;
    let at = host.alloc(2 * PAGE)?;
    for slba in [ns.blocks, ns.blocks + 1, u64::MAX, u64::MAX - 1, 1 << 63] {
        host.io(plain(opcode, &ns, slba, 0, at))?.refused(
            Status::LBA_OUT_OF_RANGE,
            &format!("LBA {slba:#x} of {:#x}", ns.blocks),
        )?;
    }
    Ok(())
}

fn length_out_of_range(host: &mut Host, opcode: Op) -> Check {
    let ns = host.namespace()?;
    let at = host.alloc(2 * PAGE)?;
    for (slba, nlb_z) in [(ns.blocks - 1, 1), (ns.blocks - 3, 7)] {
        host.io(plain(opcode, &ns, slba, nlb_z, at))?.refused(
            Status::LBA_OUT_OF_RANGE,
            &format!(
                "{} blocks from {slba:#x} on, of {:#x}",
                nlb_z + 1,
                ns.blocks
            ),
        )?;
    }
    Ok(())
}

fn out_of_range_and_too_long(host: &mut Host, opcode: Op) -> Check {
    let page = host.page_size;
    let ns = host.namespace()?;
    let Some(most) = host.controller()?.max_transfer(page) else {
        return crate::verdict::not_applicable("MDTS is zero: there is no limit");
    };
    let blocks = most / ns.block + 1;
    applies_if(
        blocks <= 0x1_0000,
        "no command can have more blocks than MDTS allows",
    )?;
    let at = host.alloc(2 * PAGE)?;
    host.io(plain(opcode, &ns, ns.blocks, (blocks - 1) as u32, at))?
        .expect_one(
            &[Status::INVALID_FIELD, Status::LBA_OUT_OF_RANGE],
            &format!("{blocks} blocks behind the last one"),
        )
}

fn slba_high_dword(host: &mut Host, opcode: Op) -> Check {
    let ns = host.namespace()?;
    let data = pattern(1, ns.block as usize);
    host.write(&ns, 0, &data)?;
    let at = host.alloc(2 * PAGE)?;
    for slba in [0xffff_ffff_0000_0000u64, 1 << 32] {
        applies_if(slba >= ns.blocks, "the namespace is as large as that")?;
        host.io(plain(opcode, &ns, slba, 0, at))?
            .refused(Status::LBA_OUT_OF_RANGE, &format!("LBA {slba:#x}"))?;
    }
    host.holds(&ns, 0, &data, "LBA 0")
}

fn nsid_invalid(host: &mut Host, opcode: Op) -> Check {
    let ns = host.namespace()?;
    let above = host.controller()?.nn().saturating_add(1);
    let at = host.alloc(2 * PAGE)?;
    for nsid in [0, above, 0xffff_fffe, ALL] {
        let mut command = plain(opcode, &ns, 0, 0, at);
        command = command.dw(1, nsid);
        host.io(command)?.refused(
            Status::INVALID_NAMESPACE_OR_FORMAT,
            &format!("NSID {nsid:#x}"),
        )?;
    }
    Ok(())
}

fn read_slba_out_of_range(host: &mut Host) -> Check {
    slba_out_of_range(host, Op::READ)
}

fn read_length_out_of_range(host: &mut Host) -> Check {
    length_out_of_range(host, Op::READ)
}

fn read_out_of_range_and_too_long(host: &mut Host) -> Check {
    out_of_range_and_too_long(host, Op::READ)
}

fn read_slba_high_dword(host: &mut Host) -> Check {
    slba_high_dword(host, Op::READ)
}

fn read_fua(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let data = pattern(2, ns.block as usize);
    host.write(&ns, 9, &data)?;
    for bits in [1u32 << 30, 1 << 31, 3 << 30] {
        let at = host.alloc(PAGE)?;
        host.io(plain(Op::READ, &ns, 9, bits, at))?
            .succeeds(&format!("a read with {bits:#x} in dword 12"))?;
        require!(host.get(at, ns.block as usize)? == data, "the data differ");
    }
    Ok(())
}

fn read_nsid_invalid(host: &mut Host) -> Check {
    nsid_invalid(host, Op::READ)
}

fn read_leaves_rest(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let at = host.alloc(4 * PAGE)?;
    host.put(at, &[0xa5; 4 * PAGE as usize])?;
    let from = at + PAGE + 512;
    host.write(&ns, 3, &pattern(4, ns.block as usize))?;
    let command = host.rw_command(Op::READ, &ns, 3, 1, from)?;
    host.io(command)?.succeeds("a read of one block")?;
    let all = host.get(at, 4 * PAGE as usize)?;
    let (begin, end) = ((from - at) as usize, (from - at + ns.block) as usize);
    let beside = all
        .iter()
        .enumerate()
        .find(|(i, byte)| !(begin..end).contains(i) && **byte != 0xa5);
    require!(
        beside.is_none(),
        "byte {:#x} beside the buffer has changed",
        beside.map_or(0, |(i, _)| i)
    );
    Ok(())
}

fn write_valid(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let background = pattern(10, 40 * ns.block as usize);
    host.write(&ns, 0, &background)?;
    let data = pattern(11, 5 * ns.block as usize);
    host.write(&ns, 17, &data)?;
    let (from, to) = (17 * ns.block as usize, 22 * ns.block as usize);
    let mut expected = background;
    if let Some(part) = expected.get_mut(from..to) {
        part.copy_from_slice(&data);
    }
    host.holds(&ns, 0, &expected, "around a write")
}

fn write_slba_out_of_range(host: &mut Host) -> Check {
    slba_out_of_range(host, Op::WRITE)
}

fn write_length_out_of_range(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let data = pattern(12, 3 * ns.block as usize);
    host.write(&ns, ns.blocks - 3, &data)?;
    length_out_of_range(host, Op::WRITE)?;
    host.holds(&ns, ns.blocks - 3, &data, "after writes that were refused")
}

fn write_out_of_range_and_too_long(host: &mut Host) -> Check {
    out_of_range_and_too_long(host, Op::WRITE)
}

fn write_slba_high_dword(host: &mut Host) -> Check {
    slba_high_dword(host, Op::WRITE)
}

fn write_fua(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    for (seed, bits) in [(13, 1u32 << 30), (14, 1 << 31)] {
        let data = pattern(seed, ns.block as usize);
        let at = host.alloc(PAGE)?;
        host.put(at, &data)?;
        host.io(plain(Op::WRITE, &ns, 12, bits, at))?
            .succeeds(&format!("a write with {bits:#x} in dword 12"))?;
        host.holds(&ns, 12, &data, "after it")?;
    }
    Ok(())
}

fn write_nsid_invalid(host: &mut Host) -> Check {
    nsid_invalid(host, Op::WRITE)
}

fn write_leaves_other_namespaces(host: &mut Host) -> Check {
    let mut all = Vec::new();
    for nsid in host.nsids()? {
        let ns = host.namespace_of(nsid)?;
        if ns.metadata() == 0 && ns.page.get(99).copied().unwrap_or(1) & 1 == 0 {
            all.push(ns);
        }
    }
    applies_if(
        all.len() >= 2,
        "there is one namespace only that can be written",
    )?;
    for ns in &all {
        host.write(ns, 5, &pattern(ns.nsid.into(), ns.block as usize))?;
    }
    for ns in &all {
        let data = pattern(ns.nsid.into(), ns.block as usize);
        host.holds(ns, 5, &data, &format!("namespace {}", ns.nsid))?;
    }
    Ok(())
}

fn transfer_largest(host: &mut Host) -> Check {
    let page = host.page_size;
    let ns = host.namespace()?;
    let Some(most) = host.controller()?.max_transfer(page) else {
        return crate::verdict::not_applicable("MDTS is zero: there is no limit");
    };
    let blocks = (most / ns.block).min(0x1_0000);
    applies_if(blocks + 1 < ns.blocks, "the namespace is smaller than MDTS")?;
    applies_if(
        most <= 16 << 20,
        "MDTS is above what the case has memory for",
    )?;
    let data = pattern(15, (blocks * ns.block) as usize);
    host.write(&ns, 1, &data)?;
    host.holds(&ns, 1, &data, "a transfer of MDTS")?;
    if blocks < 0x1_0000 {
        let at = host.alloc((blocks + 1) * ns.block)?;
        for opcode in [Op::READ, Op::WRITE] {
            let command = host.rw_command(opcode, &ns, 1, blocks + 1, at)?;
            host.io(command)?.refused(
                Status::INVALID_FIELD,
                &format!("{} blocks, above MDTS", blocks + 1),
            )?;
        }
        host.holds(&ns, 1, &data, "after a write that was too long")?;
    }
    Ok(())
}

fn flush_namespace(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let data = pattern(16, 4 * ns.block as usize);
    host.write(&ns, 60, &data)?;
    host.io(nvm(Op::FLUSH, ns.nsid))?.succeeds("Flush")?;
    host.holds(&ns, 60, &data, "after Flush")
}

fn flush_all(host: &mut Host) -> Check {
    let behaviour = host.controller()?.vwc() >> 1 & 3;
    let entry = host.io(nvm(Op::FLUSH, ALL))?;
    match behaviour {
        3 => entry.succeeds("Flush of all namespaces, which VWC offers"),
        2 => entry.refused(
            Status::INVALID_NAMESPACE_OR_FORMAT,
            "Flush of all namespaces, which VWC does not offer",
        ),
        _ => Ok(()),
    }
}

fn flush_nsid_invalid(host: &mut Host) -> Check {
    let above = host.controller()?.nn().saturating_add(1);
    for nsid in [0, above] {
        host.io(nvm(Op::FLUSH, nsid))?.refused(
            Status::INVALID_NAMESPACE_OR_FORMAT,
            &format!("Flush of NSID {nsid:#x}"),
        )?;
    }
    Ok(())
}

fn compares(host: &mut Host) -> Check {
    applies_if(
        host.controller()?.oncs(0),
        "ONCS bit 0 is 0: there is no Compare",
    )
}

fn compare_equal(host: &mut Host) -> Check {
    compares(host)?;
    let ns = host.namespace()?;
    for blocks in [1, 9, 64] {
        let data = pattern(17, (blocks * ns.block) as usize);
        host.write(&ns, 200, &data)?;
        let at = host.alloc(data.len() as u64)?;
        host.put(at, &data)?;
        let command = host.rw_command(Op::COMPARE, &ns, 200, blocks, at)?;
        host.io(command)?
            .succeeds(&format!("Compare of {blocks} blocks"))?;
    }
    Ok(())
}

fn compare_differs(host: &mut Host) -> Check {
    compares(host)?;
    let ns = host.namespace()?;
    let len = 9 * ns.block as usize;
    let data = pattern(18, len);
    host.write(&ns, 300, &data)?;
    for at in [0, ns.block as usize, len / 2, len - 1] {
        let mut other = data.clone();
        if let Some(byte) = other.get_mut(at) {
            *byte ^= 0x10;
        }
        let buffer = host.alloc(len as u64)?;
        host.put(buffer, &other)?;
        let command = host.rw_command(Op::COMPARE, &ns, 300, 9, buffer)?;
        host.io(command)?.expect(
            Status::COMPARE_FAILURE,
            &format!("Compare, byte {at:#x} differs"),
        )?;
    }
    Ok(())
}

fn compare_out_of_range(host: &mut Host) -> Check {
    compares(host)?;
    slba_out_of_range(host, Op::COMPARE)?;
    length_out_of_range(host, Op::COMPARE)?;
    slba_high_dword(host, Op::COMPARE)
}

fn compare_out_of_range_and_too_long(host: &mut Host) -> Check {
    compares(host)?;
    out_of_range_and_too_long(host, Op::COMPARE)
}

fn compare_leaves_buffer(host: &mut Host) -> Check {
    compares(host)?;
    let ns = host.namespace()?;
    let (data, other) = (
        pattern(19, ns.block as usize),
        pattern(20, ns.block as usize),
    );
    host.write(&ns, 310, &data)?;
    let at = host.alloc(PAGE)?;
    host.put(at, &other)?;
    let command = host.rw_command(Op::COMPARE, &ns, 310, 1, at)?;
    host.io(command)?
        .expect(Status::COMPARE_FAILURE, "Compare")?;
    require!(
        host.get(at, other.len())? == other,
        "Compare has changed its buffer"
    );
    host.holds(&ns, 310, &data, "after Compare")
}

fn compare_absent(host: &mut Host) -> Check {
    applies_if(!host.controller()?.oncs(0), "there is Compare")?;
    let ns = host.namespace()?;
    let at = host.alloc(2 * PAGE)?;
    host.io(plain(Op::COMPARE, &ns, 0, 0, at))?
        .refused(Status::INVALID_OPCODE, "Compare")
}
