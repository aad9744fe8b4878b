//! Flexible Data Placement, and the directive that writes use it by (NVMe Base 2.1, 8.1.8, 8.1.10).

use crate::bytes::{u8_at, u16_at, u32_at, u64_at, u128_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, PAGE, admin, nvm};
use crate::info::Namespace;
use crate::verdict::{Check, Expect, applies_if, not_applicable, require, same};
use nvme::{AdminOpcode, NvmOpcode as Op, Status};
use test_host::Command;

cases! {
    directive_parameters, ["1-l"], If("OACS bit 5"), Admin, "Base 2.1, 8.1.8.2",
        "Identify is a supported and enabled directive; what is enabled is supported";
    directive_errors, ["1-l"], If("OACS bit 5"), Admin, "Base 2.1, 8.1.8.2",
        "reserved directives and operations are Invalid Field in Command";
    directive_placement, ["1-l", "9-a"], If("CTRATT bit 19"), Io, "Base 2.1, 8.1.8.4",
        "without the Data Placement directive a Placement Identifier means nothing";
    endurance_groups, ["9-a"], If("CTRATT bit 4"), Admin, "Base 2.1, 5.1.13.2.16",
        "the list of Endurance Groups is ascending, from the identifier on that is asked for";
    endurance_group_log, ["9-a"], If("CTRATT bit 4"), Admin, "Base 2.1, 5.1.12.1.10",
        "each listed Endurance Group has its log page, others are Invalid Field in Command";
    fdp_configurations, ["9-a"], If("CTRATT bit 19"), Admin, "Base 2.1, 5.1.12.1.28",
        "the descriptors of the FDP Configurations log page fill its size, and one is valid";
    fdp_usage, ["9-a"], If("CTRATT bit 19"), Admin, "Base 2.1, 5.1.12.1.29",
        "Reclaim Unit Handle Usage has the configuration's handles, with defined attributes";
    fdp_mode, ["9-a"], If("CTRATT bit 19"), Admin, "Base 2.1, 8.1.10",
        "FDP is not changed in a group with namespaces: Command Sequence Error";
    fdp_status, ["9-a"], If("CTRATT bit 19"), Io, "NVM 1.1, 3.2.1",
        "Reclaim Unit Handle Status describes each handle once, as far as the buffer goes";
    fdp_writes, ["9-a"], If("CTRATT bit 19"), Io, "Base 2.1, 8.1.10",
        "a write takes its blocks from the unit of its handle, and adds to HBMW and MBMW";
    fdp_update, ["9-a"], If("CTRATT bit 19"), Io, "Base 2.1, 7.4.1.1",
        "an update has a handle refer to another unit, and says so by an event that is enabled";
    fdp_update_errors, ["9-a"], If("CTRATT bit 19"), Io, "Base 2.1, 7.4.1.1",
        "an update with an invalid Placement Identifier is Invalid Field in Command";
    fdp_invalid_identifier, ["9-a"], If("CTRATT bit 19"), Io, "Base 2.1, 8.1.10",
        "a write with an invalid Placement Identifier is done, with an event that is enabled";
    fdp_events_feature, ["9-a"], If("CTRATT bit 19"), Io, "Base 2.1, 5.1.25.1",
        "events are enabled and disabled by handle; an invalid handle is Invalid Field in Command";
    fdp_management_errors, ["9-a"], If("CTRATT bit 19"), Io, "Base 2.1, 7.3, 7.4",
        "reserved management operations are Invalid Field in Command";
}

/// Directive type of data placement, for write commands and the Directive commands.
const PLACEMENT: u32 = 2;
const NOT_FULL: u8 = 0;
const INVALID_ID: u8 = 3;

/// Fails unless two values are equal; `what` names them in the message.
fn alike<T: PartialEq + std::fmt::Debug>(got: T, expected: T, what: &str) -> Check {
    require!(
        got == expected,
        "{what}: expected {expected:x?}, got {got:x?}"
    );
    Ok(())
}

/// Returns a namespace with placement handles, and the ID of its Endurance Group.
fn placed(host: &mut Host) -> Check<(Namespace, u16)> {
    let offered = host.controller()?.ctratt() >> 19 & 1 != 0;
    applies_if(offered, "CTRATT bit 19 is 0: there is no data placement")?;
    for nsid in host.nsids()? {
        let ns = host.namespace_of(nsid)?;
        let group = u16_at(&host.identify(0, nsid)?, 102);
        let mode = host.get_feature(0x1d, 0, 0, group.into())?;
        let enabled = group != 0 && mode.status().is_success() && mode.dw0() & 1 != 0;
        if enabled && ns.metadata() == 0 && ns.blocks >= 4096 {
            return Ok((ns, group));
        }
    }
    not_applicable("no namespace of 4096 blocks at least is in a group with data placement")
}

/// Reads a log page of an Endurance Group.
fn group_log(host: &mut Host, lid: u8, group: u16, bytes: u64, lsp: u32) -> Check<Vec<u8>> {
    let (entry, page) = get_group_log(host, lid, group, bytes, lsp)?;
    entry.succeeds(&format!(
        "Get Log Page {lid:02x}h of Endurance Group {group}"
    ))?;
    Ok(page)
}

fn get_group_log(
    host: &mut Host,
    lid: u8,
    group: u16,
    bytes: u64,
    lsp: u32,
) -> Check<(test_host::Completion, Vec<u8>)> {
    let at = host.alloc(bytes)?;
    let (prp1, prp2) = host.prps(at, bytes)?;
    let command = admin(AdminOpcode::GET_LOG_PAGE, 0)
        .prp(prp1, prp2)
        .dw(10, (bytes as u32 / 4 - 1) << 16 | lsp << 8 | u32::from(lid))
        .dw(11, u32::from(group) << 16);
    let entry = host.admin(command)?;
    Ok((entry, host.get(at, bytes as usize)?))
}

/// Placement handle: Placement Identifier, Reclaim Unit Handle, and remaining blocks (RUAMW).
type Handle = (u16, u16, u64);

fn receive(host: &mut Host, nsid: u32, operation: u32, bytes: u64) -> Check<(Command, u64)> {
    let at = host.alloc(bytes)?;
    host.put(at, &vec![0xa5; bytes as usize])?;
    let (prp1, prp2) = host.prps(at, bytes)?;
    let command = nvm(Op::IO_MANAGEMENT_RECEIVE, nsid)
        .prp(prp1, prp2)
        .dw(10, operation)
        .dw(11, (bytes / 4 - 1) as u32);
    Ok((command, at))
}

fn handles(host: &mut Host, ns: &Namespace) -> Check<Vec<Handle>> {
    let bytes = 16 + 256 * 32;
    let (command, at) = receive(host, ns.nsid, 1, bytes)?;
    host.io(command)?.succeeds("I/O Management Receive")?;
    let data = host.get(at, bytes as usize)?;
    let count = usize::from(u16_at(&data, 14)).min(256);
    require!(count > 0, "there is no handle");
    let one = |number: usize| {
        let at = 16 + number * 32;
        (
            u16_at(&data, at),
            u16_at(&data, at + 2),
            u64_at(&data, at + 8),
        )
    };
    Ok((0..count).map(one).collect())
}

/// Writes blocks from LBA 0 on, with an optional Placement Identifier.
fn write_by(host: &mut Host, ns: &Namespace, blocks: u64, placement: Option<u16>) -> Check {
    let at = host.alloc(ns.bytes(blocks))?;
    let mut command = host.rw_command(Op::WRITE, ns, 0, blocks, at)?;
    if let Some(id) = placement {
        let cdw12 = command.dword(12) | PLACEMENT << 20;
        command = command.dw(12, cdw12).dw(13, u32::from(id) << 16);
    }
    host.io(command)?
        .succeeds("Write by a Placement Identifier")
}

fn update(host: &mut Host, ns: &Namespace, ids: &[u16]) -> Check<test_host::Completion> {
    let at = host.alloc(PAGE)?;
    let data: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    host.put(at, &data)?;
    let (prp1, prp2) = host.prps(at, data.len() as u64)?;
    let command = nvm(Op::IO_MANAGEMENT_SEND, ns.nsid)
        .prp(prp1, prp2)
        .dw(10, 1 | (ids.len() as u32 - 1) << 16);
    host.io(command)
}

/// Returns a Placement Identifier that no placement handle has.
fn invalid_id(handles: &[Handle]) -> u16 {
    let used = |id: &u16| handles.iter().any(|(known, ..)| known == id);
    (0..u16::MAX).rev().find(|id| !used(id)).unwrap_or(u16::MAX)
}

/// Returns the type of each FDP host event, with its Placement Identifier.
fn events(host: &mut Host, group: u16) -> Check<Vec<(u8, u16)>> {
    let page = group_log(host, 0x23, group, 4096, 1)?;
    let count = u32_at(&page, 0) as usize;
    require!(count <= 63, "{count} events are in a page with room for 63");
    let one = |number: usize| {
        let at = 64 + number * 64;
        (u8_at(&page, at), u16_at(&page, at + 2))
    };
    Ok((0..count).map(one).collect())
}

/// Enables or disables FDP events of these types for placement handle 0.
fn set_events(host: &mut Host, ns: &Namespace, types: &[u8], on: bool) -> Check {
    set_events_of(host, ns, 0, types, on)?.succeeds("Set Features, FDP Events")
}

fn set_events_of(
    host: &mut Host,
    ns: &Namespace,
    handle: u16,
    types: &[u8],
    on: bool,
) -> Check<test_host::Completion> {
    let at = host.alloc(PAGE)?;
    host.put(at, types)?;
    let command = admin(AdminOpcode::SET_FEATURES, ns.nsid)
        .prp(at, 0)
        .dw(10, 0x1e)
        .dw(11, (types.len() as u32) << 16 | u32::from(handle))
        .dw(12, on.into());
    host.admin(command)
}

fn enable(host: &mut Host, ns: &Namespace, on: bool) -> Check {
    let at = host.alloc(PAGE)?;
    let command = admin(AdminOpcode::DIRECTIVE_SEND, ns.nsid)
        .prp(at, 0)
        .dw(11, 1)
        .dw(12, PLACEMENT << 8 | u32::from(on));
    host.admin(command)?
        .succeeds("Enable Directive, Data Placement")
}

// ---- directives

fn directives(host: &mut Host) -> Check<Vec<u32>> {
    applies_if(
        host.controller()?.oacs(5),
        "OACS bit 5 is 0: there are no directives",
    )?;
    host.nsids()
}

fn directive_parameters(host: &mut Host) -> Check {
    for nsid in directives(host)? {
        let at = host.alloc(PAGE)?;
        host.put(at, &[0xa5; PAGE as usize])?;
        let command = admin(AdminOpcode::DIRECTIVE_RECEIVE, nsid)
            .prp(at, 0)
            .dw(10, 1023)
            .dw(11, 1);
        host.admin(command)?
            .succeeds("Directive Receive, Return Parameters")?;
        let page = host.get(at, PAGE as usize)?;
        require!(u8_at(&page, 0) & 1 != 0, "Identify is not supported");
        require!(u8_at(&page, 32) & 1 != 0, "Identify is not enabled");
        for at in 0..32 {
            let more = u8_at(&page, 32 + at) & !u8_at(&page, at);
            require!(more == 0, "what is enabled is not supported: {more:#x}");
        }
        let rest = (96..4096).all(|at| u8_at(&page, at) == 0);
        require!(rest, "reserved bytes are not zero");
    }
    Ok(())
}

fn directive_errors(host: &mut Host) -> Check {
    let nsids = directives(host)?;
    let Some(nsid) = nsids.first().copied() else {
        return not_applicable("there is no namespace");
    };
    let at = host.alloc(PAGE)?;
    for (opcode, cdw11, cdw12) in [
        (AdminOpcode::DIRECTIVE_RECEIVE, 0x55u32, 0u32),
        (AdminOpcode::DIRECTIVE_RECEIVE, 0x0e01, 0),
        (AdminOpcode::DIRECTIVE_SEND, 0x55, 0x201),
        (AdminOpcode::DIRECTIVE_SEND, 0x0e01, 0x201),
        (AdminOpcode::DIRECTIVE_SEND, 1, 0x0e01),
    ] {
        let command = admin(opcode, nsid)
            .prp(at, 0)
            .dw(10, 1023)
            .dw(11, cdw11)
            .dw(12, cdw12);
        let what = format!("{opcode} with dwords {cdw11:#x} and {cdw12:#x}");
        host.admin(command)?.refused(Status::INVALID_FIELD, &what)?;
    }
    Ok(())
}

fn directive_placement(host: &mut Host) -> Check {
    let (ns, _) = placed(host)?;
    let before = handles(host, &ns)?;
    let Some((id, ..)) = before.iter().copied().find(|(id, ..)| *id != 0) else {
        return not_applicable("there is one handle only");
    };
    enable(host, &ns, false)?;
    let written = write_by(host, &ns, 1, Some(id));
    let after = handles(host, &ns);
    enable(host, &ns, true)?;
    written?;
    let of = |handles: &[Handle]| handles.iter().find(|h| h.0 == id).map(|h| h.2);
    alike(
        of(&after?),
        of(&before),
        "RUAMW of a handle that was not used",
    )?;
    Ok(())
}

// ---- endurance groups

fn groups(host: &mut Host, from: u32) -> Check<Vec<u16>> {
    let (entry, page) = host.identify_raw(0x19, 0, from)?;
    entry.succeeds("Identify, Endurance Group List")?;
    let count = usize::from(u16_at(&page, 0));
    require!(
        count <= 2047,
        "{count} groups are in a list with room for 2047"
    );
    Ok((1..=count)
        .map(|number| u16_at(&page, 2 * number))
        .collect())
}

fn endurance_groups(host: &mut Host) -> Check {
    let controller = host.controller()?;
    applies_if(controller.ctratt() >> 4 & 1 != 0, "CTRATT bit 4 is 0")?;
    let most = u16_at(&controller.0, 340);
    let all = groups(host, 0)?;
    require!(all.is_sorted(), "the list is not ascending: {all:?}");
    let within = all.iter().all(|group| (1..=most).contains(group));
    require!(within, "groups {all:?}, and ENDGIDMAX is {most}");
    for group in &all {
        let rest: Vec<u16> = all.iter().copied().filter(|g| g >= group).collect();
        alike(
            groups(host, u32::from(*group))?,
            rest,
            "the list from a group on",
        )?;
    }
    for nsid in host.nsids()? {
        let group = u16_at(&host.identify(0, nsid)?, 102);
        let listed = group == 0 || all.contains(&group);
        require!(
            listed,
            "namespace {nsid} is in group {group}, which is not listed"
        );
    }
    Ok(())
}

fn endurance_group_log(host: &mut Host) -> Check {
    let controller = host.controller()?;
    applies_if(controller.ctratt() >> 4 & 1 != 0, "CTRATT bit 4 is 0")?;
    for group in groups(host, 0)? {
        let page = group_log(host, 9, group, 512, 0)?;
        let spare = u8_at(&page, 3);
        require!(spare <= 100, "the available spare is {spare}%");
    }
    let (entry, _) = get_group_log(host, 9, 0, 512, 0)?;
    entry.refused(Status::INVALID_FIELD, "the log page of group 0")
}

// ---- placement

fn fdp_configurations(host: &mut Host) -> Check {
    let (_, group) = placed(host)?;
    let page = group_log(host, 0x20, group, 8192, 0)?;
    let (count, size) = (u16_at(&page, 0), u32_at(&page, 4) as usize);
    let (mut at, mut valid) = (16, false);
    for number in 0..=count {
        let len = usize::from(u16_at(&page, at));
        require!(
            len >= 64 && len % 8 == 0,
            "descriptor {number} has {len} bytes"
        );
        let (groups, handles) = (u32_at(&page, at + 4), u16_at(&page, at + 8));
        require!(
            groups > 0 && handles > 0,
            "descriptor {number} has no handle"
        );
        require!(u64_at(&page, at + 16) > 0, "its units have no bytes");
        for handle in 0..usize::from(handles) {
            let kind = u8_at(&page, at + 64 + 4 * handle);
            require!(matches!(kind, 1 | 2), "handle {handle} is of type {kind}");
        }
        valid |= u8_at(&page, at + 2) & 0x80 != 0;
        at += len;
    }
    require!(valid, "no configuration is valid");
    alike(at, size, "bytes of the log page")?;
    Ok(())
}

fn fdp_usage(host: &mut Host) -> Check {
    let (_, group) = placed(host)?;
    let mode = host.get_feature(0x1d, 0, 0, group.into())?.dw0();
    let page = group_log(host, 0x20, group, 8192, 0)?;
    let mut at = 16;
    for _ in 0..(mode >> 8 & 0xff) {
        at += usize::from(u16_at(&page, at));
    }
    let configured = u16_at(&page, at + 8);
    let page = group_log(host, 0x21, group, 4096, 0)?;
    same!(u16_at(&page, 0), configured, "handles in use");
    let mut used = 0;
    for handle in 0..usize::from(configured).min(500) {
        let attributes = u8_at(&page, 8 + 8 * handle);
        require!(
            attributes <= 2,
            "handle {handle} has attributes {attributes}"
        );
        used += usize::from(attributes != 0);
    }
    require!(used > 0, "no namespace uses a handle");
    Ok(())
}

fn fdp_mode(host: &mut Host) -> Check {
    let (_, group) = placed(host)?;
    let set = admin(AdminOpcode::SET_FEATURES, 0)
        .dw(10, 1 << 31 | 0x1d)
        .dw(11, group.into())
        .dw(12, 0);
    host.admin(set)?
        .refused(Status::COMMAND_SEQUENCE_ERROR, "Set Features, FDP off")?;
    let entry = host.get_feature(0x1d, 0, 0, 0)?;
    entry.refused(Status::INVALID_FIELD, "Get Features, FDP of group 0")
}

fn fdp_status(host: &mut Host) -> Check {
    let (ns, _) = placed(host)?;
    let known = handles(host, &ns)?;
    let mut ids: Vec<u16> = known.iter().map(|(id, ..)| *id).collect();
    ids.sort_unstable();
    ids.dedup();
    alike(ids.len(), known.len(), "different Placement Identifiers")?;
    // The header alone, and one byte of nothing behind it.
    let (command, at) = receive(host, ns.nsid, 1, 16)?;
    host.io(command)?
        .succeeds("I/O Management Receive of 16 bytes")?;
    let header = host.get(at, 20)?;
    alike(usize::from(u16_at(&header, 14)), known.len(), "handles")?;
    let nsid = u32::MAX;
    let (command, _) = receive(host, nsid, 1, 16)?;
    host.io(command)?
        .refused(Status::INVALID_NAMESPACE_OR_FORMAT, "NSID FFFFFFFFh")
}

fn fdp_writes(host: &mut Host) -> Check {
    let (ns, group) = placed(host)?;
    for (id, handle, _) in handles(host, &ns)? {
        // A new unit, which has room.
        update(host, &ns, &[id])?.succeeds("Reclaim Unit Handle Update")?;
        let before = handles(host, &ns)?;
        let written = group_log(host, 0x22, group, 64, 0)?;
        write_by(host, &ns, 2, Some(id))?;
        let after = handles(host, &ns)?;
        for (old, new) in before.iter().zip(&after) {
            let used = if old.0 == id { 2 } else { 0 };
            if old.1 != handle || old.0 == id {
                same!(
                    new.2 + used,
                    old.2,
                    "RUAMW of a handle, and what was written"
                );
            }
        }
        let now = group_log(host, 0x22, group, 64, 0)?;
        for at in [0, 16] {
            let more = u128_at(&now, at) - u128_at(&written, at);
            same!(more, u128::from(ns.bytes(2)), "bytes written");
        }
    }
    Ok(())
}

fn fdp_update(host: &mut Host) -> Check {
    let (ns, group) = placed(host)?;
    let known = handles(host, &ns)?;
    let Some((id, ..)) = known.first().copied() else {
        return not_applicable("there is no handle");
    };
    update(host, &ns, &[id])?.succeeds("Reclaim Unit Handle Update")?;
    set_events(host, &ns, &[NOT_FULL], true)?;
    let fresh = handles(host, &ns)?;
    write_by(host, &ns, 1, Some(id))?;
    let done = update(host, &ns, &[id])?;
    let found = events(host, group)?;
    set_events(host, &ns, &[NOT_FULL], false)?;
    done.succeeds("Reclaim Unit Handle Update")?;
    alike(
        found.last().copied(),
        Some((NOT_FULL, id)),
        "the last event",
    )?;
    alike(
        handles(host, &ns)?,
        fresh,
        "handles with units that nothing was written to",
    )?;
    Ok(())
}

fn fdp_update_errors(host: &mut Host) -> Check {
    let (ns, _) = placed(host)?;
    let known = handles(host, &ns)?;
    let invalid = invalid_id(&known);
    update(host, &ns, &[invalid])?.refused(Status::INVALID_FIELD, "an invalid identifier")
}

fn fdp_invalid_identifier(host: &mut Host) -> Check {
    let (ns, group) = placed(host)?;
    let known = handles(host, &ns)?;
    let invalid = invalid_id(&known);
    set_events(host, &ns, &[INVALID_ID], true)?;
    let written = write_by(host, &ns, 1, Some(invalid));
    let found = events(host, group)?;
    set_events(host, &ns, &[INVALID_ID], false)?;
    written?;
    alike(
        found.last().copied(),
        Some((INVALID_ID, invalid)),
        "the last event",
    )?;
    Ok(())
}

fn fdp_events_feature(host: &mut Host) -> Check {
    let (ns, _) = placed(host)?;
    let states = |host: &mut Host| -> Check<Vec<(u8, u8)>> {
        let at = host.alloc(PAGE)?;
        host.put(at, &[0; 512])?;
        let command = admin(AdminOpcode::GET_FEATURES, ns.nsid)
            .prp(at, 0)
            .dw(10, 0x1e)
            .dw(11, 255 << 16);
        let entry = host.admin(command)?;
        entry.succeeds("Get Features, FDP Events")?;
        let count = entry.dw0() as usize & 0xff;
        let data = host.get(at, 512)?;
        let one = |number: usize| (u8_at(&data, 2 * number), u8_at(&data, 2 * number + 1) & 1);
        Ok((0..count).map(one).collect())
    };
    let before = states(host)?;
    require!(
        before.is_sorted(),
        "the types are not ascending: {before:?}"
    );
    for (ty, _) in &before {
        set_events(host, &ns, &[*ty], true)?;
        require!(
            states(host)?.contains(&(*ty, 1)),
            "event {ty:#x} is not enabled"
        );
        set_events(host, &ns, &[*ty], false)?;
        require!(
            states(host)?.contains(&(*ty, 0)),
            "event {ty:#x} is not disabled"
        );
    }
    set_events_of(host, &ns, u16::MAX, &[NOT_FULL], true)?.refused(
        Status::INVALID_FIELD,
        "events of a handle that is not there",
    )
}

fn fdp_management_errors(host: &mut Host) -> Check {
    let (ns, _) = placed(host)?;
    let (receive, _) = receive(host, ns.nsid, 0x55, 64)?;
    host.io(receive)?
        .refused(Status::INVALID_FIELD, "I/O Management Receive, 55h")?;
    let at = host.alloc(PAGE)?;
    let send = nvm(Op::IO_MANAGEMENT_SEND, ns.nsid).prp(at, 0).dw(10, 0x55);
    host.io(send)?
        .refused(Status::INVALID_FIELD, "I/O Management Send, 55h")
}
