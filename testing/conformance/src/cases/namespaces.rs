//! Namespace Management and Namespace Attachment (NVMe Base 2.1, 5.1.20, 5.1.21, 8.1.15).

use crate::bytes::{pattern, u8_at, u16_at, u32_at, u64_at, u128_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, PAGE, admin};
use crate::info::ALL;
use crate::verdict::{Check, Expect, applies_if, failed, require, same};
use nvme::{AdminOpcode as Op, NvmOpcode, Status};
use test_host::Command;

cases! {
    namespace_life, ["8.2-b"], If("OACS bit 3"), Io, "Base 2.1, 5.1.20, 5.1.21",
        "a namespace is created, attached, holds data, is detached and deleted; the lists tell of \
         each step";
    namespace_capacity, ["8.3-a"], If("OACS bit 3"), Admin, "Base 2.1, 5.1.21",
        "UNVMCAP goes down and up; what is more than that is Namespace Insufficient Capacity";
    namespace_create_invalid, ["8.3-a"], If("OACS bit 3"), Admin, "Base 2.1, 5.1.21",
        "wrong sizes, formats and selections are refused, and nothing is created";
    namespace_create_formats, ["8.3-a"], If("OACS bit 3"), Io, "Base 2.1, 5.1.21",
        "a namespace is created with each LBA format without metadata that is common to all, and \
         holds data";
    namespace_attach_invalid, ["8.3-a"], If("OACS bit 3"), Admin, "Base 2.1, 5.1.20",
        "attached twice, detached twice, wrong lists and namespaces: each has its status";
    namespace_deleted_attached, ["8.2-b"], If("OACS bit 3"), Io, "Base 2.1, 5.1.21",
        "a namespace that is attached is detached by its deletion";
}

/// Size in blocks of the namespaces that these cases create.
const BLOCKS: u64 = 2048;

fn offered(host: &mut Host) -> Check {
    applies_if(
        host.controller()?.oacs(3),
        "OACS bit 3 is 0: there is no namespace management",
    )
}

fn unallocated(host: &mut Host) -> Check<u128> {
    Ok(u128_at(&host.controller()?.0, 296))
}

fn create_command(host: &mut Host, nsze: u64, ncap: u64, flbas: u8) -> Check<Command> {
    let at = host.alloc(PAGE)?;
    let mut data = vec![0; PAGE as usize];
    let fields = [nsze.to_le_bytes(), ncap.to_le_bytes()];
    for (to, from) in data.iter_mut().zip(fields.as_flattened()) {
        *to = *from;
    }
    if let Some(byte) = data.get_mut(26) {
        *byte = flbas;
    }
    host.put(at, &data)?;
    Ok(admin(Op::NAMESPACE_MANAGEMENT, 0).prp(at, 0))
}

fn create(host: &mut Host, blocks: u64) -> Check<u32> {
    let command = create_command(host, blocks, blocks, 0)?;
    let done = host.admin(command)?;
    done.succeeds("Namespace Management, create")?;
    let nsid = done.dw0();
    require!(
        nsid != 0 && nsid <= host.controller()?.nn(),
        "the new namespace has the NSID {nsid:#x}"
    );
    Ok(nsid)
}

fn delete(host: &mut Host, nsid: u32) -> Check {
    let command = admin(Op::NAMESPACE_MANAGEMENT, nsid).dw(10, 1);
    host.admin(command)?
        .succeeds("Namespace Management, delete")
}

fn attachment(host: &mut Host, nsid: u32, sel: u32, cntlids: &[u16]) -> Check<Command> {
    let at = host.alloc(PAGE)?;
    let mut data = vec![0; PAGE as usize];
    let count = cntlids.len() as u16;
    let all = [count].into_iter().chain(cntlids.iter().copied());
    for (to, from) in data.chunks_exact_mut(2).zip(all) {
        to.copy_from_slice(&from.to_le_bytes());
    }
    host.put(at, &data)?;
    Ok(admin(Op::NAMESPACE_ATTACHMENT, nsid).prp(at, 0).dw(10, sel))
}

fn own(host: &mut Host, nsid: u32, sel: u32) -> Check<Command> {
    let cntlid = host.controller()?.cntlid();
    attachment(host, nsid, sel, &[cntlid])
}

fn attach(host: &mut Host, nsid: u32) -> Check {
    let command = own(host, nsid, 0)?;
    host.admin(command)?
        .succeeds("Namespace Attachment, attach")
}

fn detach(host: &mut Host, nsid: u32) -> Check {
    let command = own(host, nsid, 1)?;
    host.admin(command)?
        .succeeds("Namespace Attachment, detach")
}

/// Checks whether the Identify list with this CNS contains the namespace, as `wanted`.
fn listed(host: &mut Host, cns: u8, nsid: u32, wanted: bool) -> Check {
    let page = host.identify(cns, 0)?;
    let found = (0..1024).any(|at| u32_at(&page, at * 4) == nsid);
    require!(
        found == wanted,
        "namespace {nsid} is {} the list of CNS {cns:02x}h",
        if found { "in" } else { "not in" }
    );
    Ok(())
}

fn namespace_life(host: &mut Host) -> Check {
    offered(host)?;
    let nsid = create(host, BLOCKS)?;
    listed(host, 0x10, nsid, true)?;
    listed(host, 0x02, nsid, false)?;
    let allocated = host.identify(0x11, nsid)?;
    same!(u64_at(&allocated, 0), BLOCKS, "NSZE of CNS 11h");
    let inactive = host.identify(0x00, nsid)?;
    require!(
        inactive.iter().all(|byte| *byte == 0),
        "Identify tells of a namespace that is not attached"
    );
    attach(host, nsid)?;
    listed(host, 0x02, nsid, true)?;
    let ns = host.namespace_of(nsid)?;
    same!(u64_at(&ns.page, 0), BLOCKS, "NSZE");
    let controllers = host.identify(0x12, nsid)?;
    same!(u8_at(&controllers, 0), 1u8, "controllers of it");
    let data = pattern(21, 8 * ns.block as usize);
    host.write(&ns, BLOCKS - 8, &data)?;
    host.holds(&ns, BLOCKS - 8, &data, "of a new namespace")?;
    detach(host, nsid)?;
    listed(host, 0x02, nsid, false)?;
    listed(host, 0x10, nsid, true)?;
    attach(host, nsid)?;
    host.holds(&ns, BLOCKS - 8, &data, "after it was detached")?;
    detach(host, nsid)?;
    delete(host, nsid)?;
    listed(host, 0x10, nsid, false)
}

fn namespace_capacity(host: &mut Host) -> Check {
    offered(host)?;
    let before = unallocated(host)?;
    let nsid = create(host, BLOCKS)?;
    let page = host.identify(0x11, nsid)?;
    let bytes = u128_at(&page, 48);
    let less = unallocated(host)?;
    require!(
        less <= before - bytes,
        "UNVMCAP {before} became {less} for {bytes} bytes"
    );
    let many = less / u128::from(BLOCKS.max(512)) + (1 << 40);
    let many = u64::try_from(many).unwrap_or(u64::MAX);
    let command = create_command(host, many, many, 0)?;
    host.admin(command)?.expect(
        Status::NAMESPACE_INSUFFICIENT_CAPACITY,
        "a namespace of more than UNVMCAP",
    )?;
    delete(host, nsid)?;
    same!(unallocated(host)?, before, "UNVMCAP after the deletion");
    Ok(())
}

fn namespace_create_invalid(host: &mut Host) -> Check {
    offered(host)?;
    let before = host.identify(0x10, 0)?;
    let command = create_command(host, 0, 0, 0)?;
    host.admin(command)?
        .expect(Status::INVALID_FIELD, "a namespace of no block")?;
    let command = create_command(host, BLOCKS, BLOCKS + 1, 0)?;
    host.admin(command)?
        .expect(Status::INVALID_FIELD, "NCAP above NSZE")?;
    let command = create_command(host, BLOCKS, BLOCKS, 0x0f)?;
    host.admin(command)?
        .expect(Status::INVALID_FORMAT, "a format that there is not")?;
    let command = create_command(host, BLOCKS, BLOCKS, 0)?;
    host.admin(command.dw(11, 0xff << 24))?.expect(
        Status::IO_COMMAND_SET_NOT_SUPPORTED,
        "a command set that there is not",
    )?;
    let command = create_command(host, BLOCKS, BLOCKS, 0)?;
    host.admin(command.dw(10, 0xf))?
        .expect(Status::INVALID_FIELD, "a reserved selection")?;
    if host.identify(0x10, 0)? != before {
        return failed("a namespace was created all the same");
    }
    Ok(())
}

fn namespace_create_formats(host: &mut Host) -> Check {
    offered(host)?;
    let common = host.identify(0x00, ALL)?;
    for format in 0..=usize::from(u8_at(&common, 25)).min(15) {
        let at = 128 + 4 * format;
        let (ms, lbads) = (u16_at(&common, at), u8_at(&common, at + 2));
        if ms != 0 || lbads == 0 {
            continue;
        }
        let command = create_command(host, BLOCKS, BLOCKS, format as u8)?;
        let done = host.admin(command)?;
        done.succeeds(&format!("a namespace of format {format}"))?;
        let nsid = done.dw0();
        attach(host, nsid)?;
        let ns = host.namespace_of(nsid)?;
        same!(ns.block, 1u64 << lbads, "bytes of a block");
        same!(ns.blocks, BLOCKS, "NSZE");
        let data = pattern(22, ns.block as usize);
        host.write(&ns, BLOCKS - 1, &data)?;
        host.holds(&ns, BLOCKS - 1, &data, "of a new namespace")?;
        delete(host, nsid)?;
    }
    Ok(())
}

fn namespace_attach_invalid(host: &mut Host) -> Check {
    offered(host)?;
    let nsid = create(host, BLOCKS)?;
    let cntlid = host.controller()?.cntlid();
    let command = own(host, nsid, 1)?;
    host.admin(command)?
        .expect(Status::NAMESPACE_NOT_ATTACHED, "detached before attached")?;
    attach(host, nsid)?;
    let command = own(host, nsid, 0)?;
    host.admin(command)?
        .expect(Status::NAMESPACE_ALREADY_ATTACHED, "attached twice")?;
    for cntlids in [&[0xfff0][..], &[cntlid, cntlid]] {
        let command = attachment(host, nsid, 1, cntlids)?;
        host.admin(command)?.expect(
            Status::CONTROLLER_LIST_INVALID,
            &format!("the controllers {cntlids:x?}"),
        )?;
    }
    let command = own(host, nsid, 0xf)?;
    host.admin(command)?
        .expect(Status::INVALID_FIELD, "a reserved selection")?;
    let above = host.controller()?.nn().saturating_add(1);
    for nsid in [0, above] {
        let command = own(host, nsid, 0)?;
        host.admin(command)?.expect(
            Status::INVALID_NAMESPACE_OR_FORMAT,
            &format!("Namespace Attachment of NSID {nsid:#x}"),
        )?;
    }
    let command = own(host, ALL, 0)?;
    require!(
        !host.admin(command)?.status().is_success(),
        "all namespaces were attached by the NSID FFFFFFFFh"
    );
    delete(host, nsid)
}

fn namespace_deleted_attached(host: &mut Host) -> Check {
    offered(host)?;
    let nsid = create(host, BLOCKS)?;
    attach(host, nsid)?;
    let ns = host.namespace_of(nsid)?;
    host.write(&ns, 0, &pattern(22, ns.block as usize))?;
    delete(host, nsid)?;
    listed(host, 0x02, nsid, false)?;
    listed(host, 0x10, nsid, false)?;
    let at = host.alloc(ns.block)?;
    let read = host.rw_command(NvmOpcode::READ, &ns, 0, 1, at)?;
    require!(
        !host.io(read)?.status().is_success(),
        "a namespace that was deleted can be read"
    );
    Ok(())
}
