//! Optional commands (OACS, ONCS): a command that is not offered is refused as the standard
//! requires, and one that is offered rejects wrong fields (NVMe Base 2.1, 5).

use crate::bytes::{pattern, u8_at, u16_at, u32_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, PAGE, admin, nvm};
use crate::info::{ALL, Namespace};
use crate::verdict::{Check, Expect, applies_if, failed, require, same};
use nvme::{AdminOpcode as Op, NvmOpcode, Status};
use std::time::{Duration, Instant};
use test_host::Command;

cases! {
    admin_opcodes_not_supported, ["5.4-a", "1-a"], If("LPA bit 1"), Admin, "Base 2.1, 4.2.3.1, 5",
        "every admin opcode that the log of commands does not have is Invalid Command Opcode";
    io_opcodes_not_supported, ["5.4-a", "2-a"], If("LPA bit 1"), Io, "Base 2.1, 4.2.3.1, 7",
        "every I/O opcode that the log of commands does not have is Invalid Command Opcode";
    security_absent, ["1-b"], If("OACS bit 0 is 0"), Admin, "Base 2.1, 5.1.23, 5.1.24",
        "without Security Send and Receive both are Invalid Command Opcode";
    format_absent, ["1.6-a"], If("OACS bit 1 is 0"), Admin, "Base 2.1, 5.1.10",
        "without Format NVM it is Invalid Command Opcode";
    format_invalid_format, ["1.6-b"], If("OACS bit 1"), Admin, "Base 2.1, 5.1.10",
        "a format above NLBAF is Invalid Format, and nothing is formatted";
    format_invalid_namespace, ["1.6-c"], If("OACS bit 1"), Admin, "Base 2.1, 5.1.10",
        "an NSID above NN is Invalid Namespace or Format";
    format_user_data_erase, ["1.6-d"], If("OACS bit 1"), Io, "Base 2.1, 5.1.10",
        "after a format with user data erase the old data cannot be read, and the namespace works";
    format_other_formats, ["1.6-f"], If("OACS bit 1, NLBAF"), Io, "Base 2.1, 5.1.10",
        "a format to each other LBA format without metadata, and back: FLBAS and NSZE follow, the \
         old data cannot be read, and the namespace works to its last block";
    firmware_absent, ["1-c"], If("OACS bit 2 is 0"), Admin, "Base 2.1, 5.1.8, 5.1.9",
        "without firmware download and commit both are Invalid Command Opcode";
    namespace_management_absent, ["8.2-a"], If("OACS bit 3 is 0"), Admin, "Base 2.1, 5.1",
        "without namespace management, Management and Attachment are Invalid Command Opcode";
    directives_absent, ["1-d"], If("OACS bit 5 is 0"), Admin, "Base 2.1, 5.1.6, 5.1.7",
        "without directives, Send and Receive are Invalid Command Opcode";
    management_interface_absent, ["1-e"], If("OACS bit 6 is 0"), Admin, "Base 2.1, 5.1",
        "without NVMe-MI in band, Send and Receive are Invalid Command Opcode";
    virtualization_absent, ["1-f"], If("OACS bit 7 is 0"), Admin, "Base 2.1, 5.2.6",
        "without virtualization management it is Invalid Command Opcode";
    lba_status_absent, ["1-g"], If("OACS bit 9 is 0"), Admin, "NVM Command Set 1.1, 4.2.1",
        "without Get LBA Status it is Invalid Command Opcode";
    lockdown_absent, ["1.21-a"], If("OACS bit 10 is 0"), Admin, "Base 2.1, 5.1.15",
        "without Lockdown it is Invalid Command Opcode";
    sanitize_absent, ["1.17-a"], If("SANICAP is 0"), Admin, "Base 2.1, 5.1.22",
        "without Sanitize it is Invalid Command Opcode, and its log is Invalid Log Page";
    sanitize_invalid_action, ["1.17-b"], If("SANICAP"), Admin, "Base 2.1, 5.1.22",
        "reserved actions, and those that SANICAP does not have, are Invalid Field in Command";
    sanitize_operation, ["1.17-c"], If("SANICAP"), Io, "Base 2.1, 8.1.24",
        "a sanitize operation runs, refuses reads meanwhile, ends, and its log tells all of it";
    write_uncorrectable_absent, ["2.5-a"], If("ONCS bit 1 is 0"), Io, "NVM Command Set 1.1, 3.3.7",
        "without Write Uncorrectable it is Invalid Command Opcode";
    write_uncorrectable, ["2.5-b"], If("ONCS bit 1"), Io, "NVM Command Set 1.1, 3.3.7",
        "a block that is made uncorrectable is Unrecovered Read Error until it is written";
    fused_absent, ["2.12-a"], If("FUSES is 0"), Io, "Base 2.1, 3.4.2",
        "without fused operations a command with FUSE is Invalid Field in Command";
    fused_compare_write, ["2.12-b"], If("FUSES bit 0"), Io, "Base 2.1, 3.4.2",
        "a fused Compare and Write writes where the comparison holds, and does nothing else";
    doorbell_buffer_absent, ["1-h"], If("OACS bit 8 is 0"), Admin, "Base 2.1, 5.2.5",
        "without Doorbell Buffer Config it is Invalid Command Opcode";
    doorbell_buffer_invalid, ["1-i"], If("OACS bit 8"), Admin, "Base 2.1, 5.2.5",
        "buffers that do not begin on a page are refused";
    doorbell_buffer_works, ["1-i"], If("OACS bit 8"), Io, "Base 2.1, 5.2.5, 8.2.8",
        "commands complete whose doorbells are stored in memory, and rung where EventIdx asks";
}

fn absent(host: &mut Host, bit: u32, opcodes: &[Op]) -> Check {
    applies_if(
        !host.controller()?.oacs(bit),
        &format!("OACS bit {bit} is 1"),
    )?;
    let nsid = host.nsids()?.first().copied().unwrap_or(1);
    let at = host.alloc(PAGE)?;
    for opcode in opcodes {
        for nsid in [0, nsid, ALL] {
            host.admin(admin(*opcode, nsid).prp(at, 0))?.refused(
                Status::INVALID_OPCODE,
                &format!("{opcode} for NSID {nsid:#x}"),
            )?;
        }
    }
    Ok(())
}

fn admin_opcodes_not_supported(host: &mut Host) -> Check {
    let (commands, _) = super::logs::commands(host)?;
    let at = host.alloc(PAGE)?;
    for (opcode, entry) in commands.iter().enumerate() {
        if entry & 1 == 0 {
            host.admin(Command::new(opcode as u8, 0).prp(at, 0))?
                .refused(
                    Status::INVALID_OPCODE,
                    &format!("admin opcode {opcode:02x}h"),
                )?;
        }
    }
    Ok(())
}

fn io_opcodes_not_supported(host: &mut Host) -> Check {
    let (_, commands) = super::logs::commands(host)?;
    let ns = host.namespace()?;
    let at = host.alloc(PAGE)?;
    // The log of the other command sets has their commands; this one is of the NVM command set.
    for (opcode, entry) in commands.iter().enumerate() {
        if entry & 1 == 0 {
            host.io(Command::new(opcode as u8, ns.nsid).prp(at, 0))?
                .refused(Status::INVALID_OPCODE, &format!("I/O opcode {opcode:02x}h"))?;
        }
    }
    Ok(())
}

fn security_absent(host: &mut Host) -> Check {
    absent(host, 0, &[Op::SECURITY_SEND, Op::SECURITY_RECEIVE])
}

fn format_absent(host: &mut Host) -> Check {
    absent(host, 1, &[Op::FORMAT_NVM])
}

fn format_offered(host: &mut Host) -> Check {
    applies_if(
        host.controller()?.oacs(1),
        "OACS bit 1 is 0: there is no Format NVM",
    )
}

fn format_invalid_format(host: &mut Host) -> Check {
    format_offered(host)?;
    let ns = host.namespace()?;
    let above = u32::from(u8_at(&ns.page, 25)) + 1;
    applies_if(above < 64, "every format that there can be is there")?;
    let command = admin(Op::FORMAT_NVM, ns.nsid).dw(10, above & 0xf | (above >> 4 & 3) << 12);
    host.admin(command)?.expect(
        Status::INVALID_FORMAT,
        &format!("format {above}, the first above NLBAF"),
    )
}

fn format_invalid_namespace(host: &mut Host) -> Check {
    format_offered(host)?;
    let above = host.controller()?.nn().saturating_add(1);
    for nsid in [0, above] {
        host.admin(admin(Op::FORMAT_NVM, nsid))?.expect(
            Status::INVALID_NAMESPACE_OR_FORMAT,
            &format!("Format NVM of NSID {nsid:#x}"),
        )?;
    }
    Ok(())
}

fn format_user_data_erase(host: &mut Host) -> Check {
    format_offered(host)?;
    let ns = host.namespace()?;
    let data = pattern(5, 8 * ns.block as usize);
    host.write(&ns, 0, &data)?;
    let fna = u8_at(&host.controller()?.0, 524);
    let nsid = if fna & 2 != 0 { ALL } else { ns.nsid };
    let format = ns.format() as u32;
    let command =
        admin(Op::FORMAT_NVM, nsid).dw(10, format & 0xf | 1 << 9 | (format >> 4 & 3) << 12);
    host.admin(command)?
        .succeeds("Format NVM with user data erase")?;
    require!(
        host.read(&ns, 0, 8)? != data,
        "the old data are there after user data erase"
    );
    host.write(&ns, 0, &data)?;
    host.holds(&ns, 0, &data, "after a format")
}

fn format_other_formats(host: &mut Host) -> Check {
    format_offered(host)?;
    let ns = host.namespace()?;
    let others = (0..=usize::from(u8_at(&ns.page, 25))).filter(|format| {
        let at = 128 + 4 * format;
        // A format with LBADS 0 is not available now.
        *format != ns.format() && u16_at(&ns.page, at) == 0 && u8_at(&ns.page, at + 2) >= 9
    });
    let others: Vec<usize> = others.collect();
    applies_if(
        !others.is_empty(),
        "there is no other format without metadata",
    )?;
    for format in others {
        let other = format_to(host, &ns, format);
        // The cases that follow find the namespace as it was.
        let back = format_to(host, &ns, ns.format());
        other.and(back)?;
    }
    let after = host.namespace_of(ns.nsid)?;
    same!(after.blocks, ns.blocks, "NSZE in the first format again");
    Ok(())
}

fn format_to(host: &mut Host, before: &Namespace, format: usize) -> Check {
    let data = pattern(6, 8 * before.block as usize);
    let now = host.namespace_of(before.nsid)?;
    host.write(&now, 0, &data)?;
    let fna = u8_at(&host.controller()?.0, 524);
    let nsid = if fna & 1 != 0 { ALL } else { before.nsid };
    let lbaf = format as u32;
    let command = admin(Op::FORMAT_NVM, nsid).dw(10, lbaf & 0xf | (lbaf >> 4 & 3) << 12);
    host.admin(command)?
        .succeeds(&format!("Format NVM to format {format}"))?;
    let ns = host.namespace_of(before.nsid)?;
    same!(ns.format() as u64, format as u64, "the format in FLBAS");
    let lbads = u8_at(&before.page, 128 + 4 * format + 2);
    same!(ns.block, 1u64 << lbads, "bytes of a block");
    let (old, new) = (before.blocks * before.block, ns.blocks * ns.block);
    require!(
        new <= old && old - new < 4096.max(ns.block),
        "{old} bytes became {new}"
    );
    let blocks = data.len() as u64 / ns.block;
    require!(
        host.read(&ns, 0, blocks)? != data,
        "the old data are there after a format"
    );
    let last = ns.blocks - blocks;
    host.write(&ns, last, &data)?;
    host.holds(&ns, last, &data, "at the end of the new format")?;
    let at = host.alloc(data.len() as u64)?;
    let beyond = host.rw_command(NvmOpcode::READ, &ns, last + 1, blocks, at)?;
    host.io(beyond)?
        .expect(Status::LBA_OUT_OF_RANGE, "a read beyond the last block")
}

fn firmware_absent(host: &mut Host) -> Check {
    absent(host, 2, &[Op::FIRMWARE_COMMIT, Op::FIRMWARE_IMAGE_DOWNLOAD])
}

fn namespace_management_absent(host: &mut Host) -> Check {
    absent(
        host,
        3,
        &[Op::NAMESPACE_MANAGEMENT, Op::NAMESPACE_ATTACHMENT],
    )
}

fn directives_absent(host: &mut Host) -> Check {
    absent(host, 5, &[Op::DIRECTIVE_SEND, Op::DIRECTIVE_RECEIVE])
}

fn management_interface_absent(host: &mut Host) -> Check {
    absent(host, 6, &[Op::NVME_MI_SEND, Op::NVME_MI_RECEIVE])
}

fn virtualization_absent(host: &mut Host) -> Check {
    absent(host, 7, &[Op::VIRTUALIZATION_MANAGEMENT])
}

fn lba_status_absent(host: &mut Host) -> Check {
    absent(host, 9, &[Op::GET_LBA_STATUS])
}

fn lockdown_absent(host: &mut Host) -> Check {
    absent(host, 10, &[Op::LOCKDOWN])
}

fn sanitize_absent(host: &mut Host) -> Check {
    applies_if(
        host.controller()?.sanicap() & 7 == 0,
        "SANICAP has an operation",
    )?;
    for action in [1, 2, 3, 4] {
        host.admin(admin(Op::SANITIZE, 0).dw(10, action))?.refused(
            Status::INVALID_OPCODE,
            &format!("Sanitize, action {action}"),
        )?;
    }
    let (entry, _) = host.log_raw(0x81, ALL, 512, 0, 0)?;
    entry.refused(Status::INVALID_LOG_PAGE, "the log of Sanitize")
}

/// Sanitize actions, each with its bit in SANICAP: crypto erase, block erase, overwrite.
const ACTIONS: [(u32, u32); 3] = [(0, 4), (1, 2), (2, 3)];

fn sanitize_offered(host: &mut Host) -> Check<u32> {
    let capabilities = host.controller()?.sanicap();
    applies_if(
        capabilities & 7 != 0,
        "SANICAP is zero: there is no Sanitize",
    )?;
    Ok(capabilities)
}

fn sanitize_invalid_action(host: &mut Host) -> Check {
    let capabilities = sanitize_offered(host)?;
    for action in [0, 6, 7] {
        host.admin(admin(Op::SANITIZE, 0).dw(10, action))?
            .refused(Status::INVALID_FIELD, &format!("Sanitize, action {action}"))?;
    }
    for (bit, action) in ACTIONS {
        if capabilities >> bit & 1 == 0 {
            host.admin(admin(Op::SANITIZE, 0).dw(10, action))?.refused(
                Status::INVALID_FIELD,
                &format!("Sanitize, action {action}, which SANICAP does not have"),
            )?;
        }
    }
    Ok(())
}

fn sanitize_operation(host: &mut Host) -> Check {
    let capabilities = sanitize_offered(host)?;
    let ns = host.namespace()?;
    let data = pattern(6, 8 * ns.block as usize);
    host.write(&ns, 0, &data)?;
    // Block erase first: it is over soonest.
    let order = [(1u32, 2u32), (0, 4), (2, 1 << 4 | 3)];
    let action = order.iter().find(|(bit, _)| capabilities >> bit & 1 != 0);
    let action = action.map_or(2, |(_, action)| *action);
    let begun = host.admin(admin(Op::SANITIZE, 0).dw(10, action).dw(11, 0))?;
    begun.succeeds("Sanitize")?;
    let at = host.alloc(PAGE)?;
    let read = host.rw_command(NvmOpcode::READ, &ns, 0, 1, at)?;
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let entry = host.io(read)?;
        let (log, _) = (host.log(0x81, 512)?, ());
        let state = u16_at(&log, 2) & 7;
        if state == 2 {
            entry.expect(Status::SANITIZE_IN_PROGRESS, "a read while Sanitize runs")?;
        }
        match state {
            1 | 4 => {
                same!(u16_at(&log, 0), 0xffffu16, "SPROG after the end");
                same!(u32_at(&log, 4) & 7, action & 7, "SCDW10 of the log");
                break;
            }
            2 => {}
            other => return failed(format!("SSTAT is {other}: Sanitize has not succeeded")),
        }
        require!(
            Instant::now() < deadline,
            "Sanitize has not ended within two minutes"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    require!(
        host.read(&ns, 0, 8)? != data,
        "the old data are there after Sanitize"
    );
    host.write(&ns, 0, &data)?;
    host.holds(&ns, 0, &data, "after Sanitize")
}

fn write_uncorrectable_absent(host: &mut Host) -> Check {
    applies_if(!host.controller()?.oncs(1), "ONCS bit 1 is 1")?;
    let ns = host.namespace()?;
    host.io(nvm(NvmOpcode::WRITE_UNCORRECTABLE, ns.nsid))?
        .refused(Status::INVALID_OPCODE, "Write Uncorrectable")
}

fn write_uncorrectable(host: &mut Host) -> Check {
    applies_if(
        host.controller()?.oncs(1),
        "ONCS bit 1 is 0: there is no Write Uncorrectable",
    )?;
    let ns = host.namespace()?;
    let data = pattern(7, 4 * ns.block as usize);
    host.write(&ns, 100, &data)?;
    let command = nvm(NvmOpcode::WRITE_UNCORRECTABLE, ns.nsid)
        .slba(101)
        .dw(12, 1);
    host.io(command)?
        .succeeds("Write Uncorrectable of two blocks")?;
    let at = host.alloc(64 << 10)?;
    for (slba, blocks, fails) in [
        (100, 1, false),
        (101, 1, true),
        (100, 4, true),
        (103, 1, false),
    ] {
        let read = host.rw_command(NvmOpcode::READ, &ns, slba, blocks, at)?;
        let entry = host.io(read)?;
        let what = format!("a read of {blocks} blocks from {slba} on");
        if fails {
            entry.expect(Status::UNRECOVERED_READ_ERROR, &what)?;
        } else {
            entry.succeeds(&what)?;
        }
    }
    let end = nvm(NvmOpcode::WRITE_UNCORRECTABLE, ns.nsid)
        .slba(ns.blocks)
        .dw(12, 0);
    host.io(end)?.expect(
        Status::LBA_OUT_OF_RANGE,
        "Write Uncorrectable behind the end",
    )?;
    host.write(&ns, 100, &data)?;
    host.holds(&ns, 100, &data, "after the blocks were written")
}

fn fused_absent(host: &mut Host) -> Check {
    applies_if(
        u16_at(&host.controller()?.0, 522) & 1 == 0,
        "FUSES bit 0 is 1",
    )?;
    let ns = host.namespace()?;
    let at = host.alloc(PAGE)?;
    for fuse in [1u8, 2] {
        let command = host.rw_command(NvmOpcode::READ, &ns, 0, 1, at)?.flags(fuse);
        host.io(command)?
            .refused(Status::INVALID_FIELD, &format!("a read with FUSE {fuse}"))?;
    }
    Ok(())
}

fn fused_compare_write(host: &mut Host) -> Check {
    applies_if(u16_at(&host.controller()?.0, 522) & 1 != 0, "FUSES is zero")?;
    let ns = host.namespace()?;
    let (old, new) = (pattern(8, ns.block as usize), pattern(9, ns.block as usize));
    host.write(&ns, 50, &old)?;
    let (from, to) = (host.alloc(PAGE)?, host.alloc(PAGE)?);
    for (compared, holds) in [(&new, false), (&old, true)] {
        host.put(from, compared)?;
        host.put(to, &new)?;
        let compare = host
            .rw_command(NvmOpcode::COMPARE, &ns, 50, 1, from)?
            .flags(1);
        let write = host.rw_command(NvmOpcode::WRITE, &ns, 50, 1, to)?.flags(2);
        let (first, second) = (host.put_command(1, compare)?, host.put_command(1, write)?);
        host.ring_tail(1)?;
        let (first, second) = (host.wait_for(1, first)?, host.wait_for(1, second)?);
        if holds {
            first.succeeds("a fused Compare that holds")?;
            second.succeeds("its Write")?;
        } else {
            first.expect(
                Status::COMPARE_FAILURE,
                "a fused Compare that does not hold",
            )?;
            second.expect(Status::ABORTED_FAILED_FUSED, "its Write")?;
            host.holds(&ns, 50, &old, "after a fused operation that failed")?;
        }
    }
    host.holds(&ns, 50, &new, "after a fused operation")
}

fn doorbell_buffer_absent(host: &mut Host) -> Check {
    absent(host, 8, &[Op::DOORBELL_BUFFER_CONFIG])
}

fn doorbell_buffers(host: &mut Host) -> Check {
    applies_if(
        host.controller()?.oacs(8),
        "OACS bit 8 is 0: there is no Doorbell Buffer Config",
    )
}

fn doorbell_buffer_invalid(host: &mut Host) -> Check {
    doorbell_buffers(host)?;
    let (shadow, event) = (host.alloc(PAGE)?, host.alloc(PAGE)?);
    for (prp1, prp2) in [(shadow + 8, event), (shadow, event + 0x800)] {
        host.admin(admin(Op::DOORBELL_BUFFER_CONFIG, 0).prp(prp1, prp2))?
            .expect_one(
                &[Status::INVALID_FIELD, Status::PRP_OFFSET_INVALID],
                &format!("buffers at {prp1:#x} and {prp2:#x}"),
            )?;
    }
    Ok(())
}

fn doorbell_buffer_works(host: &mut Host) -> Check {
    doorbell_buffers(host)?;
    let (shadow, event) = (host.alloc(PAGE)?, host.alloc(PAGE)?);
    host.admin(admin(Op::DOORBELL_BUFFER_CONFIG, 0).prp(shadow, event))?
        .succeeds("Doorbell Buffer Config")?;
    let ns = host.namespace()?;
    let (sq, cq) = (
        host.doorbell(1, false) - 0x1000,
        host.doorbell(1, true) - 0x1000,
    );
    let mut old = host.tail(1)?;
    for round in 0..200u32 {
        host.put_command(1, nvm(NvmOpcode::FLUSH, ns.nsid))?;
        let tail = host.tail(1)?;
        host.put(shadow + sq, &u32::from(tail).to_le_bytes())?;
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let asked = u32_at(&host.get(event + sq, 4)?, 0) as u16;
        if tail.wrapping_sub(asked).wrapping_sub(1) < tail.wrapping_sub(old) {
            host.ring_tail(1)?;
        }
        old = tail;
        let deadline = Instant::now() + Duration::from_secs(5);
        let entry = loop {
            if let Some(entry) = host.poll_quietly(1)? {
                break entry;
            }
            require!(
                Instant::now() < deadline,
                "round {round}: no completion within 5 s"
            );
        };
        entry.succeeds("a Flush by shadow doorbell")?;
        let head = (round + 1) % u32::from(host.io_entries());
        host.put(shadow + cq, &head.to_le_bytes())?;
        // The head's doorbell is rung always: that is allowed.
        host.ring_head(1)?;
    }
    Ok(())
}
