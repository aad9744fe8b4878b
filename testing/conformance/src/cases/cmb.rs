//! The controller memory buffer (NVMe Base 2.1, 8.2.1).

use crate::bytes::pattern;
use crate::case::{Need::*, cases};
use crate::host::{Host, PAGE, RAM_BASE, admin};
use crate::info::Namespace;
use crate::verdict::{Check, Expect, Verdict, applies_if, require, same};
use dma::Memory;
use nvme::regs;
use nvme::{AdminOpcode, NvmOpcode as Op, Status};

cases! {
    cmb_registers, [], If("CAP.CMBS"), Disabled, "Base 2.1, 3.1.4.11, 3.1.4.12, 3.1.4.16",
        "CMBLOC and CMBSZ are zero until CMBMSC.CRE is set, and then name a place in a BAR";
    cmb_base_address, [], If("CAP.CMBS"), Disabled, "Base 2.1, 3.1.4.16, 3.1.4.17",
        "CMBMSC reads as it was written, and CMBSTS.CBAI is set where the buffer does not fit";
    cmb_bar, [], If("CAP.CMBS"), Disabled, "Base 2.1, 8.2.1",
        "what the host writes to the buffer's BAR it reads there";
    cmb_submission_queue, [], If("CMBSZ.SQS"), Admin, "Base 2.1, 8.2.1",
        "a submission queue in the buffer works";
    cmb_completion_queue, [], If("CMBSZ.CQS"), Admin, "Base 2.1, 8.2.1",
        "a completion queue in the buffer works";
    cmb_data, [], If("CMBSZ.RDS and WDS"), Io, "Base 2.1, 8.2.1",
        "data is written from the buffer and read into it";
    cmb_list, [], If("CMBSZ.LISTS and CMBLOC.CDPCILS"), Io, "Base 2.1, 8.2.1",
        "a PRP list in the buffer leads to data elsewhere";
    cmb_admin_data, [], If("CMBSZ.RDS"), Admin, "Base 2.1, 8.2.1",
        "Identify writes into the buffer";
    cmb_queue_in_part, [], If("CMBLOC.CQMMS is 0"), Io, "Base 2.1, 3.1.4.11, 8.2.1",
        "a queue that crosses the buffer's end is Invalid Use of Controller Memory Buffer";
    cmb_data_in_part, [], If("CMBLOC.CDMMMS is 0"), Io, "Base 2.1, 3.1.4.11, 8.2.1",
        "data that crosses the buffer's end is Invalid Use of Controller Memory Buffer";
    cmb_controller_reset, [], If("CAP.CMBS"), Admin, "Base 2.1, 3.1.4.16, 3.7.2",
        "CMBMSC outlasts a Controller Reset";
}

/// Bit Capabilities Registers Enabled of the register CMBMSC; the other bits follow.
const CRE: u64 = 1;
const CMSE: u64 = 2;

/// Location and capabilities of the controller memory buffer, as its registers report them.
struct Buffer {
    bir: u32,
    /// Byte offset of the controller memory buffer in its BAR.
    offset: u64,
    size: u64,
    /// Values of the registers CMBLOC and CMBSZ.
    location: u32,
    supports: u32,
}

impl Buffer {
    fn find(host: &mut Host) -> Check<Buffer> {
        applies_if(host.cap.cmbs(), "CAP.CMBS is 0")?;
        host.write64(regs::CMBMSC, CRE)?;
        let (location, size) = (host.read32(regs::CMBLOC)?, host.read32(regs::CMBSZ)?);
        applies_if(size >> 12 != 0, "CMBSZ.SZ is 0")?;
        let unit = 12 + 4 * (size >> 8 & 0xf);
        require!(unit <= 36, "CMBSZ.SZU is reserved: {size:#x}");
        Ok(Buffer {
            bir: location & 7,
            offset: u64::from(location >> 12) << unit,
            size: u64::from(size >> 12) << unit,
            location,
            supports: size & 0x1f,
        })
    }

    /// Places the buffer directly before the host's memory, and returns its IOVA. Does not apply
    /// where the host cannot map it.
    fn place(&self, host: &mut Host) -> Check<u64> {
        let base = RAM_BASE.checked_sub(self.size);
        let base = base.ok_or_else(|| Verdict::NotApplicable("it is too large".into()))?;
        let region = host.client.region_info(self.bir)?;
        let Some(mapping) = region.mmap else {
            return Err(Verdict::NotApplicable("its BAR cannot be mapped".into()));
        };
        applies_if(
            self.offset == 0 && mapping.offset == 0 && mapping.areas.is_empty(),
            "it is not mapped as a whole",
        )?;
        let memory = Memory::from_fd(mapping.fd, self.size, true)
            .map_err(|error| Verdict::Failed(format!("the mapping of the BAR: {error}")))?;
        host.know_buffer(base, memory);
        host.write64(regs::CMBMSC, base | CMSE | CRE)?;
        same!(host.read32(regs::CMBSTS)?, 0u32, "CMBSTS at {base:#x}");
        // The buffer keeps its previous contents.
        let zeroes = vec![0; self.size as usize];
        host.put(base, &zeroes)?;
        Ok(base)
    }

    fn has(&self, bit: u32, name: &str) -> Check {
        applies_if(self.supports & 1 << bit != 0, &format!("CMBSZ.{name} is 0"))
    }
}

fn cmb_registers(host: &mut Host) -> Check {
    applies_if(host.cap.cmbs(), "CAP.CMBS is 0")?;
    host.write64(regs::CMBMSC, 0)?;
    for at in [regs::CMBLOC, regs::CMBSZ] {
        same!(host.read32(at)?, 0u32, "register {at:#x} without CRE");
    }
    let buffer = Buffer::find(host)?;
    require!(
        matches!(buffer.bir, 0 | 2..=5),
        "CMBLOC.BIR {} is reserved",
        buffer.bir
    );
    require!(
        buffer.supports & 4 == 0 || buffer.supports & 1 != 0,
        "CMBSZ.LISTS is 1 and SQS is 0"
    );
    let region = host.client.region_info(buffer.bir)?;
    require!(
        buffer.offset < region.size,
        "it begins at {:#x} of a BAR of {:#x} bytes",
        buffer.offset,
        region.size
    );
    // Read only.
    for at in [regs::CMBLOC, regs::CMBSZ, regs::CMBSTS] {
        let before = host.read32(at)?;
        host.write32(at, !before)?;
        same!(host.read32(at)?, before, "register {at:#x}");
    }
    host.write64(regs::CMBMSC, 0)?;
    same!(host.read32(regs::CMBSZ)?, 0u32, "CMBSZ without CRE again");
    Ok(())
}

fn cmb_base_address(host: &mut Host) -> Check {
    let buffer = Buffer::find(host)?;
    let last = u64::MAX - buffer.size + 1;
    for (base, invalid) in [(RAM_BASE << 8, 0u32), (last, 0), (!0xfff, 1)] {
        if invalid == 1 && buffer.size <= PAGE {
            continue;
        }
        let value = base | CRE | CMSE;
        // The upper half is written first, so that no unintended intermediate value takes effect.
        host.write32(regs::CMBMSC, CRE as u32)?;
        host.write32(regs::CMBMSC + 4, (value >> 32) as u32)?;
        host.write32(regs::CMBMSC, value as u32)?;
        same!(host.read64(regs::CMBMSC)?, value, "CMBMSC");
        same!(
            host.read32(regs::CMBSTS)? & 1,
            invalid,
            "CMBSTS.CBAI at {base:#x}"
        );
    }
    host.write64(regs::CMBMSC, CRE)?;
    same!(
        host.read32(regs::CMBSTS)? & 1,
        0u32,
        "CMBSTS.CBAI without CMSE"
    );
    Ok(())
}

fn cmb_bar(host: &mut Host) -> Check {
    let buffer = Buffer::find(host)?;
    let region = host.client.region_info(buffer.bir)?;
    let size = buffer.size.min(region.size.saturating_sub(buffer.offset));
    let chunk = size.min(64 << 10);
    for at in [0, size - chunk] {
        let (data, at) = (pattern(at, chunk as usize), buffer.offset + at);
        host.client.region_write(buffer.bir, at, &data)?;
        let mut found = vec![0; data.len()];
        host.client.region_read(buffer.bir, at, &mut found)?;
        require!(found == data, "at {at:#x} it reads otherwise");
    }
    Ok(())
}

/// Checks that data can be written and read through queue pair 1.
fn moves_data(host: &mut Host, ns: &Namespace, seed: u64) -> Check {
    let data = pattern(seed, (8 * ns.block) as usize);
    host.write(ns, 0, &data)?;
    let found = host.read(ns, 0, 8)?;
    require!(found == data, "the data differ");
    Ok(())
}

/// Creates queue pair 1, with one of its queues in the controller memory buffer.
fn queue_in_buffer(host: &mut Host, bit: u32, name: &str) -> Check {
    let buffer = Buffer::find(host)?;
    buffer.has(bit, name)?;
    let base = buffer.place(host)?;
    let entries = host.io_entries();
    let (mut cq, mut sq) = host.pair_commands(1, entries)?;
    match bit {
        0 => sq = sq.prp(base, 0),
        _ => cq = cq.prp(base, 0),
    }
    host.admin(cq)?.succeeds("Create I/O Completion Queue")?;
    host.know_cq(1, cq.prp1(), entries);
    host.admin(sq)?.succeeds("Create I/O Submission Queue")?;
    host.know_sq(1, sq.prp1(), entries, 1);
    let ns = host.namespace()?;
    // More commands than the queue has entries.
    for seed in 0..u64::from(entries) {
        moves_data(host, &ns, seed)?;
    }
    Ok(())
}

fn cmb_submission_queue(host: &mut Host) -> Check {
    queue_in_buffer(host, 0, "SQS")
}

fn cmb_completion_queue(host: &mut Host) -> Check {
    queue_in_buffer(host, 1, "CQS")
}

fn cmb_data(host: &mut Host) -> Check {
    let buffer = Buffer::find(host)?;
    buffer.has(3, "RDS")?;
    buffer.has(4, "WDS")?;
    let base = buffer.place(host)?;
    let ns = host.namespace()?;
    let count = (PAGE / ns.block).max(1);
    let data = pattern(61, (count * ns.block) as usize);
    host.put(base, &data)?;
    let command = host.rw_command(Op::WRITE, &ns, 0, count, base)?;
    host.io(command)?.succeeds("a write from the buffer")?;
    require!(host.read(&ns, 0, count)? == data, "the data differ");
    host.put(base, &vec![0; data.len()])?;
    let command = host.rw_command(Op::READ, &ns, 0, count, base)?;
    host.io(command)?.succeeds("a read into the buffer")?;
    require!(host.get(base, data.len())? == data, "the buffer differs");
    Ok(())
}

fn cmb_list(host: &mut Host) -> Check {
    let buffer = Buffer::find(host)?;
    buffer.has(2, "LISTS")?;
    applies_if(buffer.location & 1 << 6 != 0, "CMBLOC.CDPCILS is 0")?;
    let base = buffer.place(host)?;
    let ns = host.namespace()?;
    let count = 4 * host.page_size / ns.block;
    let data = pattern(62, (count * ns.block) as usize);
    host.write(&ns, 0, &data)?;
    let at = host.alloc(4 * host.page_size)?;
    for page in 1..4 {
        let entry = at + page * host.page_size;
        host.put(base + 8 * (page - 1), &entry.to_le_bytes())?;
    }
    let command = host.rw_command(Op::READ, &ns, 0, count, at)?;
    host.io(command.prp(at, base))?
        .succeeds("a read with a list in the buffer")?;
    require!(host.get(at, data.len())? == data, "the data differ");
    Ok(())
}

fn cmb_admin_data(host: &mut Host) -> Check {
    let expected = host.controller()?.0;
    let buffer = Buffer::find(host)?;
    buffer.has(3, "RDS")?;
    let base = buffer.place(host)?;
    host.admin(admin(AdminOpcode::IDENTIFY, 0).prp(base, 0).dw(10, 1))?
        .succeeds("Identify into the buffer")?;
    require!(
        host.get(base, PAGE as usize)? == expected,
        "Identify differs"
    );
    Ok(())
}

fn cmb_queue_in_part(host: &mut Host) -> Check {
    let buffer = Buffer::find(host)?;
    buffer.has(0, "SQS")?;
    applies_if(buffer.location & 1 << 3 == 0, "CMBLOC.CQMMS is 1")?;
    buffer.place(host)?;
    // Two pages: one in the buffer, one behind it.
    let entries = 128;
    applies_if(host.cap.mqes_z() >= entries - 1, "CAP.MQES is below 128")?;
    let (_, sq) = host.pair_commands(2, entries)?;
    let sq = sq.prp(RAM_BASE - PAGE, 0).dw(11, 1 << 16 | 1);
    host.admin(sq)?
        .expect(Status::INVALID_USE_OF_CMB, "a queue that crosses the end")
}

fn cmb_data_in_part(host: &mut Host) -> Check {
    let buffer = Buffer::find(host)?;
    buffer.has(3, "RDS")?;
    applies_if(buffer.location & 1 << 7 == 0, "CMBLOC.CDMMMS is 1")?;
    buffer.place(host)?;
    let ns = host.namespace()?;
    let page = host.page_size;
    let command = host.rw_command(Op::READ, &ns, 0, 2 * page / ns.block, RAM_BASE)?;
    host.io(command.prp(RAM_BASE - page, RAM_BASE))?
        .expect(Status::INVALID_USE_OF_CMB, "data that crosses the end")
}

fn cmb_controller_reset(host: &mut Host) -> Check {
    let buffer = Buffer::find(host)?;
    let base = buffer.place(host)?;
    host.disable()?;
    let wanted = base | CRE | CMSE;
    same!(host.read64(regs::CMBMSC)?, wanted, "CMBMSC after a reset");
    host.enable()?;
    same!(
        host.read64(regs::CMBMSC)?,
        wanted,
        "CMBMSC when enabled again"
    );
    Ok(())
}
