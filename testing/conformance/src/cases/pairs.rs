//! Two hosts, each at its own controller of one subsystem: shared state, and fencing of one host
//! (NVMe Base 2.1, 2.4.1, 8.1.22).

use super::reservations::{
    KEY, OTHER, WRITE_EXCLUSIVE, acquire, clear, conflict, identify_host, is, kinds, ok, register,
    release, report,
};
use crate::bytes::{pattern, slice, u8_at, u16_at, u32_at, u64_at};
use crate::case::{Need::*, pair_cases};
use crate::host::{Host, PAGE, admin, nvm};
use crate::info::Namespace;
use crate::verdict::{Check, Expect, applies_if, require, same};
use nvme::{AdminOpcode, NvmOpcode as Op, Status};

pair_cases! {
    pair_identity, ["3.14-b"], If("two controllers"), "Base 2.1, 2.4.1, 5.1.13.2.1",
        "two controllers of a subsystem have its name, their own identifiers, and say that they \
         are several";
    pair_shared_data, ["3.14-c"], If("two controllers"), "Base 2.1, 2.4.1",
        "what one controller writes to a shared namespace the other one reads";
    pair_format, ["1.6-g"], If("OACS bit 1, two controllers"), "Base 2.1, 5.1.10",
        "after a format by one controller the other one has the same LBA format, and neither reads \
         the old data; commands that it executes meanwhile succeed or are Format In Progress";
    pair_format_reserved, ["1.6-h"], If("OACS bit 1, ONCS bit 5, two controllers"),
        "Base 2.1, 8.1.22",
        "a format by a host that may not write is Reservation Conflict, and erases nothing";
    pair_report, ["7.1-c"], If("ONCS bit 5, two controllers"), "Base 2.1, 7.8",
        "both hosts are in the report of either controller";
    pair_conflict, ["7.4-d"], If("ONCS bit 5, two controllers"), "Base 2.1, 7.5",
        "a second host cannot acquire what is held";
    pair_types, ["7.8-b"], If("ONCS bit 5, two controllers"), "Base 2.1, 8.1.22",
        "reads, writes and others of a host that does not hold, registered or not, under every \
         type";
    pair_all_registrants, ["7.8-c"], If("ONCS bit 5, two controllers"), "Base 2.1, 8.1.22",
        "of an all registrants reservation each registrant is a holder, and the last one ends it";
    pair_preempt, ["7.6-a"], If("ONCS bit 5, two controllers"), "Base 2.1, 8.1.22.7",
        "preemption removes the holder and makes the preempting host the holder";
    pair_preempt_registrant, ["7.6-b"], If("ONCS bit 5, two controllers"), "Base 2.1, 8.1.22.7",
        "preemption with the key of one that does not hold removes that registration only; with \
         key 0 it is Invalid Field in Command";
    pair_preempt_and_abort, ["7.6-c"], If("ONCS bit 5, two controllers"), "Base 2.1, 8.1.22.7",
        "preempt and abort fences: no write of the other host succeeds after it";
    pair_release_by_other, ["7.5-c"], If("ONCS bit 5, two controllers"), "Base 2.1, 8.1.22.6",
        "a registrant that does not hold releases nothing";
    pair_notification, ["7.9-a"], If("ONCS bit 5, two controllers"), "Base 2.1, 8.1.22.1, 5.1.12.1",
        "a host whose registration is preempted is told by an event and a log page";
}

/// Returns a namespace that both hosts share, after removing all registrations.
fn shared(a: &mut Host, b: &mut Host) -> Check<Namespace> {
    let ns = both(a, b)?;
    applies_if(
        a.controller()?.oncs(5),
        "ONCS bit 5 is 0: there are no reservations",
    )?;
    let (one, two) = (identify_host(a, 0x11)?, identify_host(b, 0x22)?);
    applies_if(one != two, "both controllers have one host")?;
    clear(a, &ns)?;
    Ok(ns)
}

/// Returns a namespace that both hosts share, and registers both hosts.
fn registered(a: &mut Host, b: &mut Host) -> Check<Namespace> {
    let ns = shared(a, b)?;
    ok(register(a, &ns, 0, [0, KEY])?, "Register by the first host")?;
    ok(
        register(b, &ns, 0, [0, OTHER])?,
        "Register by the second host",
    )?;
    Ok(ns)
}

/// Registers both hosts, and acquires a Write Exclusive reservation for the first one.
fn held(a: &mut Host, b: &mut Host) -> Check<Namespace> {
    let ns = registered(a, b)?;
    ok(
        acquire(a, &ns, 0, WRITE_EXCLUSIVE, [KEY, 0])?,
        "Acquire by the first host",
    )?;
    Ok(ns)
}

/// Returns a namespace that is attached to the controllers of both hosts.
fn both(a: &mut Host, b: &mut Host) -> Check<Namespace> {
    let ns = a.namespace()?;
    applies_if(
        u8_at(&ns.page, 30) & 1 != 0,
        "NMIC bit 0 is 0: the namespace is not shared",
    )?;
    let there = b.nsids()?.contains(&ns.nsid);
    require!(
        there,
        "shared namespace {} is not at the second controller",
        ns.nsid
    );
    let other = b.identify(0, ns.nsid)?;
    require!(
        slice(&other, 104, 128) == slice(&ns.page, 104, 128),
        "the namespace has other identifiers at the second controller"
    );
    Ok(ns)
}

fn pair_identity(a: &mut Host, b: &mut Host) -> Check {
    let (one, two) = (a.controller()?, b.controller()?);
    require!(
        slice(&one.0, 768, 1024) == slice(&two.0, 768, 1024),
        "the two controllers have different SUBNQNs"
    );
    require!(
        one.cntlid() != two.cntlid(),
        "both controllers have CNTLID {}",
        one.cntlid()
    );
    require!(
        one.cmic() & two.cmic() & 2 != 0,
        "CMIC bit 1 is 0, and there are two controllers"
    );
    require!(
        slice(&one.0, 4, 64) == slice(&two.0, 4, 64),
        "serial number or model differ"
    );
    Ok(())
}

fn pair_shared_data(a: &mut Host, b: &mut Host) -> Check {
    let ns = both(a, b)?;
    if a.controller()?.oncs(5) {
        shared(a, b)?;
    }
    for round in 0..10 {
        let data = pattern(round, 8 * ns.block as usize);
        a.write(&ns, 720, &data)?;
        b.holds(&ns, 720, &data, "read by the second controller")?;
        let data = pattern(100 + round, 8 * ns.block as usize);
        b.write(&ns, 720, &data)?;
        a.holds(&ns, 720, &data, "read by the first controller")?;
    }
    Ok(())
}

/// Formats the namespace by one controller, while the other one reads from it. How it is then.
fn format_by(by: &mut Host, other: &mut Host, ns: &Namespace, format: u32) -> Check<Namespace> {
    let data = pattern(7, 8 * ns.block as usize);
    other.write(ns, 0, &data)?;
    let command = admin(AdminOpcode::FORMAT_NVM, ns.nsid);
    let cid = by.submit(0, command.dw(10, format & 0xf | (format >> 4 & 3) << 12))?;
    let at = other.alloc(data.len() as u64)?;
    let read = other.rw_command(Op::READ, ns, 0, 1, at)?;
    let read = other.io(read)?.status().without_flags();
    require!(
        [Status::SUCCESS, Status::FORMAT_IN_PROGRESS].contains(&read),
        "a read by the other controller ended with {read}"
    );
    by.wait_for(0, cid)?.succeeds("Format NVM")?;
    let (one, two) = (by.namespace_of(ns.nsid)?, other.namespace_of(ns.nsid)?);
    same!(
        two.format() as u64,
        one.format() as u64,
        "the other's FLBAS"
    );
    same!(two.blocks, one.blocks, "the other's NSZE");
    let blocks = data.len() as u64 / two.block;
    for host in [&mut *other, &mut *by] {
        require!(
            host.read(&two, 0, blocks)? != data,
            "the old data are there after a format"
        );
    }
    other.write(&two, 0, &data)?;
    by.holds(&two, 0, &data, "after a format")?;
    Ok(two)
}

fn pair_format(a: &mut Host, b: &mut Host) -> Check {
    let ns = both(a, b)?;
    applies_if(
        a.controller()?.oacs(1) && b.controller()?.oacs(1),
        "OACS bit 1 is 0: there is no Format NVM",
    )?;
    if a.controller()?.oncs(5) {
        shared(a, b)?;
    }
    let first = ns.format() as u32;
    let formats = u32::from(u8_at(&ns.page, 25)) + 1;
    let plain = |format: &u32| {
        let at = 128 + 4 * *format as usize;
        u16_at(&ns.page, at) == 0 && u8_at(&ns.page, at + 2) >= 9
    };
    let mut others = (0..formats.min(16)).filter(|format| *format != first);
    let other = others.rfind(plain).unwrap_or(first);
    let now = format_by(a, b, &ns, other);
    // The cases that follow find the namespace as it was.
    let now = match now {
        Ok(now) => now,
        Err(verdict) => {
            let found = b.namespace_of(ns.nsid)?;
            let _ = format_by(b, a, &found, first);
            return Err(verdict);
        }
    };
    let back = format_by(b, a, &now, first)?;
    same!(back.blocks, ns.blocks, "NSZE in the first format again");
    Ok(())
}

fn pair_format_reserved(a: &mut Host, b: &mut Host) -> Check {
    applies_if(
        b.controller()?.oacs(1),
        "OACS bit 1 is 0: there is no Format NVM",
    )?;
    let ns = held(a, b)?;
    let data = pattern(8, 8 * ns.block as usize);
    a.write(&ns, 0, &data)?;
    let format = ns.format() as u32;
    let command =
        admin(AdminOpcode::FORMAT_NVM, ns.nsid).dw(10, format & 0xf | (format >> 4 & 3) << 12);
    let refused = b.admin(command)?;
    clear(a, &ns)?;
    refused.expect(
        Status::RESERVATION_CONFLICT,
        "Format NVM by a host that may not write",
    )?;
    a.holds(&ns, 0, &data, "after a format that was refused")
}

fn pair_report(a: &mut Host, b: &mut Host) -> Check {
    let ns = registered(a, b)?;
    let own = [a.controller()?.cntlid(), b.controller()?.cntlid()];
    for told in [report(a, &ns)?, report(b, &ns)?] {
        for (cntlid, key) in own.into_iter().zip([KEY, OTHER]) {
            require!(
                told.registrants
                    .iter()
                    .any(|one| one.cntlid == cntlid && one.key == key),
                "controller {cntlid} is not in the report with its key: {told:x?}"
            );
        }
        same!(told.registrants.len() as u64, 2u64, "registrants");
    }
    clear(a, &ns)
}

fn pair_conflict(a: &mut Host, b: &mut Host) -> Check {
    let ns = held(a, b)?;
    conflict(
        acquire(b, &ns, 0, WRITE_EXCLUSIVE, [OTHER, 0])?,
        "Acquire by the second host",
    )?;
    clear(a, &ns)
}

/// The status of a command of one block by a host that does not hold.
fn try_io(host: &mut Host, ns: &Namespace, opcode: Op) -> Check<Status> {
    let at = host.alloc(PAGE)?;
    let command = match opcode {
        Op::FLUSH => nvm(Op::FLUSH, ns.nsid),
        Op::WRITE_ZEROES => nvm(Op::WRITE_ZEROES, ns.nsid).slba(740),
        opcode => host.rw_command(opcode, ns, 740, 1, at)?,
    };
    Ok(host.io(command)?.status())
}

fn pair_types(a: &mut Host, b: &mut Host) -> Check {
    let ns = shared(a, b)?;
    let controller = b.controller()?;
    let mut reads = vec![Op::READ];
    let mut writes = vec![Op::WRITE, Op::FLUSH];
    if controller.oncs(0) {
        reads.push(Op::COMPARE);
    }
    if controller.oncs(3) {
        writes.push(Op::WRITE_ZEROES);
    }
    ok(register(a, &ns, 0, [0, KEY])?, "Register by the first host")?;
    for kind in kinds(&ns) {
        for registrant in [false, true] {
            if registrant {
                ok(
                    register(b, &ns, 0, [0, OTHER])?,
                    "Register by the second host",
                )?;
            }
            ok(
                acquire(a, &ns, 0, kind, [KEY, 0])?,
                &format!("Acquire of type {kind}"),
            )?;
            let (may_read, may_write) = match (kind, registrant) {
                (1, _) | (3 | 5, false) => (true, false),
                (3..=6, true) => (true, true),
                _ => (false, false),
            };
            for (opcodes, may) in [(&reads, may_read), (&writes, may_write)] {
                for opcode in opcodes {
                    let status = try_io(b, &ns, *opcode)?;
                    let refused = status.is(Status::RESERVATION_CONFLICT);
                    require!(
                        refused != may,
                        "{opcode} by a host that is {}registered, under type {kind}: expected {}, \
                         got {status}",
                        if registrant { "" } else { "not " },
                        if may {
                            "no conflict"
                        } else {
                            "Reservation Conflict"
                        }
                    );
                }
            }
            ok(release(a, &ns, 0, kind, KEY)?, "Release")?;
            if registrant {
                ok(
                    register(b, &ns, 1, [OTHER, 0])?,
                    "Unregister by the second host",
                )?;
            }
        }
    }
    clear(a, &ns)
}

fn pair_all_registrants(a: &mut Host, b: &mut Host) -> Check {
    let ns = shared(a, b)?;
    for kind in kinds(&ns).into_iter().filter(|kind| *kind >= 5) {
        ok(register(a, &ns, 0, [0, KEY])?, "Register by the first host")?;
        ok(
            register(b, &ns, 0, [0, OTHER])?,
            "Register by the second host",
        )?;
        ok(
            acquire(a, &ns, 0, kind, [KEY, 0])?,
            &format!("Acquire of type {kind}"),
        )?;
        let told = report(b, &ns)?;
        require!(
            told.registrants.iter().all(|one| one.holds),
            "not every registrant holds: {told:?}"
        );
        ok(
            register(a, &ns, 1, [KEY, 0])?,
            "Unregister by the first host",
        )?;
        same!(
            report(b, &ns)?.kind,
            kind as u8,
            "type while a registrant is left"
        );
        ok(
            register(b, &ns, 1, [OTHER, 0])?,
            "Unregister by the second host",
        )?;
        same!(report(b, &ns)?.kind, 0u8, "type when no registrant is left");
    }
    clear(a, &ns)
}

fn pair_preempt(a: &mut Host, b: &mut Host) -> Check {
    let ns = held(a, b)?;
    ok(
        acquire(b, &ns, 1, 2, [OTHER, KEY])?,
        "Preempt by the second host",
    )?;
    let told = report(b, &ns)?;
    same!(told.kind, 2u8, "type after the preemption");
    let [one] = &told.registrants[..] else {
        return crate::verdict::failed(format!("one host is left, the report is {told:?}"));
    };
    require!(one.key == OTHER && one.holds, "the report is {told:x?}");
    conflict(
        try_io(a, &ns, Op::WRITE)?,
        "a write by the host that was preempted",
    )?;
    clear(b, &ns)
}

fn pair_preempt_registrant(a: &mut Host, b: &mut Host) -> Check {
    let ns = registered(a, b)?;
    ok(
        acquire(a, &ns, 0, 3, [KEY, 0])?,
        "Acquire by the first host",
    )?;
    ok(
        acquire(a, &ns, 1, 3, [KEY, OTHER])?,
        "Preempt of the second host",
    )?;
    let told = report(a, &ns)?;
    same!(told.kind, 3u8, "type after the preemption");
    require!(
        told.registrants
            .iter()
            .all(|one| one.key == KEY && one.holds),
        "{told:x?}"
    );
    conflict(
        try_io(b, &ns, Op::WRITE)?,
        "a write by the host that was preempted",
    )?;
    is(
        acquire(a, &ns, 1, 3, [KEY, 0])?,
        Status::INVALID_FIELD,
        "Preempt with key 0, where one host holds",
    )?;
    clear(a, &ns)
}

fn pair_preempt_and_abort(a: &mut Host, b: &mut Host) -> Check {
    let ns = shared(a, b)?;
    ok(register(a, &ns, 0, [0, KEY])?, "Register by the first host")?;
    for round in 0..20u64 {
        ok(
            register(b, &ns, 0, [0, OTHER])?,
            "Register by the second host",
        )?;
        ok(
            acquire(b, &ns, 0, WRITE_EXCLUSIVE, [OTHER, 0])?,
            "Acquire by the second host",
        )?;
        let at = b.alloc(ns.block)?;
        b.put(at, &pattern(round, ns.block as usize))?;
        let write = b.rw_command(Op::WRITE, &ns, 750, 1, at)?;
        let mut sent = Vec::new();
        for _ in 0..16 {
            sent.push(b.put_command(1, write)?);
        }
        b.ring_tail(1)?;
        ok(
            acquire(a, &ns, 2, WRITE_EXCLUSIVE, [KEY, OTHER])?,
            "Preempt and Abort by the first host",
        )?;
        let data = pattern(1000 + round, ns.block as usize);
        a.write(&ns, 750, &data)?;
        for cid in sent {
            let status = b.wait_for(1, cid)?.status();
            require!(
                status.is_success()
                    || status.is(Status::RESERVATION_CONFLICT)
                    || status.is(Status::ABORTED_PREEMPT_AND_ABORT)
                    || status.is(Status::ABORT_REQUESTED),
                "a write of the host that is fenced: {status}"
            );
        }
        conflict(try_io(b, &ns, Op::WRITE)?, "a write after the fence")?;
        a.holds(&ns, 750, &data, "written after the fence")?;
        ok(release(a, &ns, 0, WRITE_EXCLUSIVE, KEY)?, "Release")?;
    }
    clear(a, &ns)
}

fn pair_release_by_other(a: &mut Host, b: &mut Host) -> Check {
    let ns = held(a, b)?;
    ok(
        release(b, &ns, 0, WRITE_EXCLUSIVE, OTHER)?,
        "Release by a registrant that does not hold",
    )?;
    same!(report(b, &ns)?.kind, WRITE_EXCLUSIVE as u8, "type after it");
    clear(a, &ns)
}

fn pair_notification(a: &mut Host, b: &mut Host) -> Check {
    let ns = registered(a, b)?;
    // Removes entries of other cases from the log.
    while u8_at(&b.log(0x80, 64)?, 8) != 0 {}
    let waiting = b.submit(0, admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0))?;
    ok(
        acquire(a, &ns, 1, WRITE_EXCLUSIVE, [KEY, OTHER])?,
        "Preempt by the first host",
    )
    .or_else(|_| {
        ok(acquire(a, &ns, 0, WRITE_EXCLUSIVE, [KEY, 0])?, "Acquire")?;
        ok(
            acquire(a, &ns, 1, WRITE_EXCLUSIVE, [KEY, OTHER])?,
            "Preempt by the first host",
        )
    })?;
    let entry = b.wait_for(0, waiting)?;
    entry.succeeds("an event request")?;
    same!(
        entry.dw0() & 7,
        6u32,
        "type of the event, I/O command specific"
    );
    same!(entry.dw0() >> 8 & 0xff, 0u32, "information of the event");
    same!(entry.dw0() >> 16 & 0xff, 0x80u32, "log page of the event");
    let log = b.log(0x80, 64)?;
    require!(u64_at(&log, 0) != 0, "the notification has no count");
    same!(
        u8_at(&log, 8),
        1u8,
        "type of the notification, registration preempted"
    );
    same!(u32_at(&log, 12), ns.nsid, "namespace of the notification");
    clear(a, &ns)
}
