//! Reservations (NVMe Base 2.1, 7.5 to 7.8, 8.1.22), and what two controllers of a subsystem share.

use crate::bytes::{pattern, slice, u8_at, u16_at, u32_at, u64_at, u128_at};
use crate::case::{Need::*, cases, pair_cases};
use crate::host::{Fields, Host, PAGE, admin, nvm};
use crate::info::Namespace;
use crate::verdict::{Check, Expect, applies_if, not_applicable, require, same};
use nvme::{AdminOpcode, NvmOpcode as Op, Status};

cases! {
    reservation_absent, ["7-b"], If("ONCS bit 5 is 0"), Io, "Base 2.1, 7.5 to 7.8",
        "without reservations their commands are Invalid Command Opcode";
    reservation_report_empty, ["7.1-1"], If("ONCS bit 5"), Io, "Base 2.1, 7.8",
        "the report of a namespace without registrants has none, and no reservation";
    reservation_report_registrant, ["7.1-a"], If("ONCS bit 5"), Io, "Base 2.1, 7.8",
        "the report has the registrant: controller, key, host, and whether it holds";
    reservation_report_generation, ["7.1-b"], If("ONCS bit 5"), Io, "Base 2.1, 7.8",
        "the generation counts registrations, and not acquisitions or releases";
    reservation_register, ["7.2-a"], If("ONCS bit 5"), Io, "Base 2.1, 7.6",
        "a host registers, and again with its key; another key is Reservation Conflict";
    reservation_replace_key, ["7.2-b"], If("ONCS bit 5"), Io, "Base 2.1, 7.6",
        "a key is replaced by who knows it, or with IEKEY; a wrong one is Reservation Conflict";
    reservation_register_invalid, ["7.2-c"], If("ONCS bit 5"), Io, "Base 2.1, 7.6",
        "reserved register actions are Invalid Field in Command";
    reservation_ptpl, ["7.2-d"], If("RESCAP"), Io, "Base 2.1, 7.6, 5.1.25.1",
        "persistence is set and read where RESCAP offers it, refused where not";
    reservation_unregister, ["7.3-a"], If("ONCS bit 5"), Io, "Base 2.1, 7.6",
        "a registrant unregisters, and who is none is Reservation Conflict";
    reservation_unregister_holder, ["7.3-b"], If("ONCS bit 5"), Io, "Base 2.1, 8.1.22.4",
        "when the holder unregisters its reservation is released";
    reservation_acquire, ["7.4-a"], If("ONCS bit 5"), Io, "Base 2.1, 7.5",
        "each type that RESCAP has is acquired, and again by its holder; another type is a conflict";
    reservation_acquire_refused, ["7.4-b"], If("ONCS bit 5"), Io, "Base 2.1, 7.5",
        "who is not registered, or has another key, gets Reservation Conflict";
    reservation_acquire_invalid, ["7.4-c"], If("ONCS bit 5"), Io, "Base 2.1, 7.5",
        "reserved types and actions are Invalid Field in Command";
    reservation_release, ["7.5-a"], If("ONCS bit 5"), Io, "Base 2.1, 7.7",
        "the holder releases; with another type it is Invalid Field in Command";
    reservation_release_none, ["7.5-b"], If("ONCS bit 5"), Io, "Base 2.1, 7.7, 8.1.22.6",
        "a release without a reservation succeeds for a registrant, and is a conflict for others";
    reservation_clear, ["7.7-1"], If("ONCS bit 5"), Io, "Base 2.1, 8.1.22.8",
        "Clear releases the reservation and removes all registrants";
    reservation_holder_io, ["7.8-a"], If("ONCS bit 5"), Io, "Base 2.1, 8.1.22",
        "the holder reads and writes under every type";
    reservation_outlasts_reset, ["7-c"], If("ONCS bit 5"), Io, "Base 2.1, 8.1.22",
        "a controller reset changes neither registrants nor reservation";
}

pair_cases! {
    pair_identity, ["3.14-b"], If("two controllers"), "Base 2.1, 2.4.1, 5.1.13.2.1",
        "two controllers of a subsystem have its name, their own identifiers, and say that they are \
         several";
    pair_shared_data, ["3.14-c"], If("two controllers"), "Base 2.1, 2.4.1",
        "what one controller writes to a shared namespace the other one reads";
    pair_report, ["7.1-c"], If("ONCS bit 5, two controllers"), "Base 2.1, 7.8",
        "both hosts are in the report of either controller";
    pair_conflict, ["7.4-d"], If("ONCS bit 5, two controllers"), "Base 2.1, 7.5",
        "a second host cannot acquire what is held";
    pair_types, ["7.8-b"], If("ONCS bit 5, two controllers"), "Base 2.1, 8.1.22",
        "reads, writes and others of a host that does not hold, registered or not, under every type";
    pair_all_registrants, ["7.8-c"], If("ONCS bit 5, two controllers"), "Base 2.1, 8.1.22",
        "of an all registrants reservation each registrant is a holder, and the last one ends it";
    pair_preempt, ["7.6-a"], If("ONCS bit 5, two controllers"), "Base 2.1, 8.1.22.7",
        "preemption removes the holder and makes the preempting host the holder";
    pair_preempt_registrant, ["7.6-b"], If("ONCS bit 5, two controllers"), "Base 2.1, 8.1.22.7",
        "preemption with the key of one that does not hold removes that registration only; with key \
         0 it is Invalid Field in Command";
    pair_preempt_and_abort, ["7.6-c"], If("ONCS bit 5, two controllers"), "Base 2.1, 8.1.22.7",
        "preempt and abort fences: no write of the other host succeeds after it";
    pair_release_by_other, ["7.5-c"], If("ONCS bit 5, two controllers"), "Base 2.1, 8.1.22.6",
        "a registrant that does not hold releases nothing";
    pair_notification, ["7.9-a"], If("ONCS bit 5, two controllers"), "Base 2.1, 8.1.22.1, 5.1.12.1",
        "a host whose registration is preempted is told by an event and a log page";
}

const KEY: u64 = 0x1111_2222_3333_4444;
const OTHER: u64 = 0x5555_6666_7777_8888;
const WRITE_EXCLUSIVE: u32 = 1;

fn reserve(
    host: &mut Host,
    opcode: Op,
    ns: &Namespace,
    cdw10: u32,
    keys: [u64; 2],
) -> Check<Status> {
    let at = host.alloc(PAGE)?;
    host.put(at, keys.map(u64::to_le_bytes).as_flattened())?;
    let entry = host.io(nvm(opcode, ns.nsid).prp(at, 0).dw(10, cdw10))?;
    Ok(entry.status())
}

fn register(host: &mut Host, ns: &Namespace, cdw10: u32, keys: [u64; 2]) -> Check<Status> {
    reserve(host, Op::RESERVATION_REGISTER, ns, cdw10, keys)
}

fn acquire(
    host: &mut Host,
    ns: &Namespace,
    action: u32,
    kind: u32,
    keys: [u64; 2],
) -> Check<Status> {
    reserve(host, Op::RESERVATION_ACQUIRE, ns, kind << 8 | action, keys)
}

fn release(host: &mut Host, ns: &Namespace, action: u32, kind: u32, key: u64) -> Check<Status> {
    reserve(
        host,
        Op::RESERVATION_RELEASE,
        ns,
        kind << 8 | action,
        [key, 0],
    )
}

fn is(found: Status, expected: Status, what: &str) -> Check {
    require!(
        found.is(expected),
        "{what}: expected {expected}, got {found}"
    );
    Ok(())
}

fn ok(found: Status, what: &str) -> Check {
    is(found, Status::SUCCESS, what)
}

fn conflict(found: Status, what: &str) -> Check {
    is(found, Status::RESERVATION_CONFLICT, what)
}

#[derive(Debug)]
struct Registrant {
    cntlid: u16,
    holds: bool,
    key: u64,
    host: u128,
}

#[derive(Debug)]
struct Report {
    generation: u32,
    kind: u8,
    persists: u8,
    registrants: Vec<Registrant>,
}

fn report(host: &mut Host, ns: &Namespace) -> Check<Report> {
    for extended in [false, true] {
        let at = host.alloc(PAGE)?;
        let command = nvm(Op::RESERVATION_REPORT, ns.nsid)
            .prp(at, 0)
            .dw(10, 1023)
            .dw(11, extended.into());
        let entry = host.io(command)?;
        // Hosts with identifiers of 128 bits are told of by the extended form only.
        if !extended
            && entry
                .status()
                .is(Status::HOST_IDENTIFIER_INCONSISTENT_FORMAT)
        {
            continue;
        }
        entry.succeeds("Reservation Report")?;
        let page = host.get(at, PAGE as usize)?;
        let (first, size) = if extended { (64, 64) } else { (24, 24) };
        let count = usize::from(u16_at(&page, 5));
        require!(
            first + size * count <= page.len(),
            "there are {count} registrants"
        );
        let entry = |n: usize| {
            let bytes = slice(&page, first + n * size, first + (n + 1) * size);
            Registrant {
                cntlid: u16_at(bytes, 0),
                holds: u8_at(bytes, 2) & 1 != 0,
                key: u64_at(bytes, if extended { 8 } else { 16 }),
                host: if extended {
                    u128_at(bytes, 16)
                } else {
                    u64_at(bytes, 8).into()
                },
            }
        };
        return Ok(Report {
            generation: u32_at(&page, 0),
            kind: u8_at(&page, 4),
            persists: u8_at(&page, 9),
            registrants: (0..count).map(entry).collect(),
        });
    }
    crate::verdict::failed("Reservation Report refuses both of its forms")
}

/// A namespace that can be reserved, without registrants.
fn fresh(host: &mut Host) -> Check<Namespace> {
    applies_if(
        host.controller()?.oncs(5),
        "ONCS bit 5 is 0: there are no reservations",
    )?;
    identify_host(host, 0x11)?;
    let ns = host.namespace()?;
    applies_if(
        u8_at(&ns.page, 31) & 0x7e != 0,
        "RESCAP has no type of reservation",
    )?;
    clear(host, &ns)?;
    Ok(ns)
}

/// Gives the host an identifier if it has none; one that was configured stays.
fn identify_host(host: &mut Host, byte: u8) -> Check<u128> {
    let at = host.alloc(PAGE)?;
    let get = admin(AdminOpcode::GET_FEATURES, 0)
        .prp(at, 0)
        .dw(10, 0x81)
        .dw(11, 1);
    if host.admin(get)?.status().is_success() {
        let found = u128_at(&host.get(at, 16)?, 0);
        if found != 0 {
            return Ok(found);
        }
    }
    host.put(at, &[byte; 16])?;
    let set = admin(AdminOpcode::SET_FEATURES, 0)
        .prp(at, 0)
        .dw(10, 0x81)
        .dw(11, 1);
    host.admin(set)?
        .succeeds("Set Features 81h, the host identifier")?;
    Ok(u128::from_le_bytes([byte; 16]))
}

/// Removes every registrant and any reservation, by registering.
fn clear(host: &mut Host, ns: &Namespace) -> Check {
    // IEKEY with another key: where the host is registered already, the key is replaced.
    if !register(host, ns, 0, [0, KEY])?.is_success() {
        ok(
            register(host, ns, 2 | 8, [0, KEY])?,
            "replacing the key with IEKEY",
        )?;
    }
    ok(release(host, ns, 1, 0, KEY)?, "Clear")
}

fn registered(host: &mut Host) -> Check<Namespace> {
    let ns = fresh(host)?;
    ok(register(host, &ns, 0, [0, KEY])?, "Register")?;
    Ok(ns)
}

/// Types that RESCAP has.
fn kinds(ns: &Namespace) -> Vec<u32> {
    let rescap = u32::from(u8_at(&ns.page, 31));
    (1..=6).filter(|kind| rescap >> kind & 1 != 0).collect()
}

fn reservation_absent(host: &mut Host) -> Check {
    applies_if(!host.controller()?.oncs(5), "there are reservations")?;
    let ns = host.namespace()?;
    let all = [
        Op::RESERVATION_REGISTER,
        Op::RESERVATION_REPORT,
        Op::RESERVATION_ACQUIRE,
        Op::RESERVATION_RELEASE,
    ];
    let at = host.alloc(PAGE)?;
    for opcode in all {
        host.io(nvm(opcode, ns.nsid).prp(at, 0).dw(10, 8))?
            .refused(Status::INVALID_OPCODE, &opcode.to_string())?;
    }
    Ok(())
}

fn reservation_report_empty(host: &mut Host) -> Check {
    let ns = fresh(host)?;
    let report = report(host, &ns)?;
    require!(
        report.registrants.is_empty() && report.kind == 0,
        "the report after Clear is {report:?}"
    );
    Ok(())
}

fn reservation_report_registrant(host: &mut Host) -> Check {
    let own = host.controller()?.cntlid();
    let ns = registered(host)?;
    let id = identify_host(host, 0x11)?;
    let told = report(host, &ns)?;
    let [one] = &told.registrants[..] else {
        return crate::verdict::failed(format!("one host is registered, the report is {told:?}"));
    };
    same!(one.cntlid, own, "controller of the registrant");
    same!(one.key, KEY, "key of the registrant");
    require!(
        one.host == id || one.host == id as u64 as u128,
        "host of the registrant: {told:x?}"
    );
    require!(!one.holds, "the registrant holds, and nobody has acquired");
    ok(acquire(host, &ns, 0, WRITE_EXCLUSIVE, [KEY, 0])?, "Acquire")?;
    let told = report(host, &ns)?;
    same!(told.kind, WRITE_EXCLUSIVE as u8, "type of the reservation");
    require!(
        told.registrants.iter().all(|one| one.holds),
        "the holder does not hold: {told:?}"
    );
    clear(host, &ns)
}

fn reservation_report_generation(host: &mut Host) -> Check {
    let ns = fresh(host)?;
    let before = report(host, &ns)?.generation;
    ok(register(host, &ns, 0, [0, KEY])?, "Register")?;
    let after = report(host, &ns)?.generation;
    same!(after, before.wrapping_add(1), "generation after Register");
    ok(acquire(host, &ns, 0, WRITE_EXCLUSIVE, [KEY, 0])?, "Acquire")?;
    ok(release(host, &ns, 0, WRITE_EXCLUSIVE, KEY)?, "Release")?;
    same!(
        report(host, &ns)?.generation,
        after,
        "generation after Acquire and Release"
    );
    ok(release(host, &ns, 1, 0, KEY)?, "Clear")?;
    same!(
        report(host, &ns)?.generation,
        after.wrapping_add(1),
        "generation after Clear"
    );
    Ok(())
}

fn reservation_register(host: &mut Host) -> Check {
    let ns = registered(host)?;
    ok(
        register(host, &ns, 0, [0, KEY])?,
        "Register with the key that is registered",
    )?;
    conflict(
        register(host, &ns, 0, [0, OTHER])?,
        "Register with another key",
    )?;
    let told = report(host, &ns)?;
    require!(
        told.registrants.iter().all(|one| one.key == KEY),
        "the key has changed: {told:x?}"
    );
    clear(host, &ns)
}

fn reservation_replace_key(host: &mut Host) -> Check {
    let ns = registered(host)?;
    conflict(
        register(host, &ns, 2, [OTHER, OTHER])?,
        "Replace with a wrong current key",
    )?;
    ok(register(host, &ns, 2, [KEY, OTHER])?, "Replace")?;
    let told = report(host, &ns)?;
    require!(
        told.registrants.iter().all(|one| one.key == OTHER),
        "the key: {told:x?}"
    );
    ok(register(host, &ns, 2 | 8, [0, KEY])?, "Replace with IEKEY")?;
    let told = report(host, &ns)?;
    require!(
        told.registrants.iter().all(|one| one.key == KEY),
        "the key: {told:x?}"
    );
    clear(host, &ns)
}

fn reservation_register_invalid(host: &mut Host) -> Check {
    let ns = fresh(host)?;
    for action in 3..8 {
        is(
            register(host, &ns, action, [0, KEY])?,
            Status::INVALID_FIELD,
            &format!("register action {action}"),
        )?;
    }
    Ok(())
}

fn reservation_ptpl(host: &mut Host) -> Check {
    let ns = fresh(host)?;
    let offered = u8_at(&ns.page, 31) & 1 != 0;
    let status = register(host, &ns, 3 << 30, [0, KEY])?;
    if !offered {
        require!(
            !status.is_success(),
            "persistence was set, and RESCAP does not offer it"
        );
        return Ok(());
    }
    ok(status, "Register with CPTPL 11b")?;
    same!(report(host, &ns)?.persists, 1u8, "PTPLS of the report");
    let entry = host.get_feature(0x83, 0, ns.nsid, 0)?;
    entry.succeeds("Get Features 83h")?;
    same!(entry.dw0.get() & 1, 1u32, "PTPL of the feature");
    ok(
        register(host, &ns, 2 << 30, [0, KEY])?,
        "Register with CPTPL 10b",
    )?;
    same!(report(host, &ns)?.persists, 0u8, "PTPLS of the report");
    clear(host, &ns)
}

fn reservation_unregister(host: &mut Host) -> Check {
    let ns = registered(host)?;
    conflict(
        register(host, &ns, 1, [OTHER, 0])?,
        "Unregister with a wrong key",
    )?;
    ok(register(host, &ns, 1, [KEY, 0])?, "Unregister")?;
    let told = report(host, &ns)?;
    require!(
        told.registrants.is_empty(),
        "the host is registered still: {told:?}"
    );
    conflict(
        register(host, &ns, 1, [KEY, 0])?,
        "Unregister by no registrant",
    )
}

fn reservation_unregister_holder(host: &mut Host) -> Check {
    let ns = registered(host)?;
    ok(acquire(host, &ns, 0, WRITE_EXCLUSIVE, [KEY, 0])?, "Acquire")?;
    ok(register(host, &ns, 1, [KEY, 0])?, "Unregister")?;
    let told = report(host, &ns)?;
    require!(
        told.kind == 0 && told.registrants.is_empty(),
        "the report is {told:?}"
    );
    Ok(())
}

fn reservation_acquire(host: &mut Host) -> Check {
    let ns = registered(host)?;
    let kinds = kinds(&ns);
    for kind in &kinds {
        ok(
            acquire(host, &ns, 0, *kind, [KEY, 0])?,
            &format!("Acquire of type {kind}"),
        )?;
        same!(
            report(host, &ns)?.kind,
            *kind as u8,
            "type of the reservation"
        );
        ok(
            acquire(host, &ns, 0, *kind, [KEY, 0])?,
            "Acquire again by the holder",
        )?;
        if let Some(other) = kinds.iter().find(|other| *other != kind) {
            conflict(
                acquire(host, &ns, 0, *other, [KEY, 0])?,
                "Acquire of another type",
            )?;
        }
        ok(release(host, &ns, 0, *kind, KEY)?, "Release")?;
        same!(report(host, &ns)?.kind, 0u8, "type after the release");
    }
    clear(host, &ns)
}

fn reservation_acquire_refused(host: &mut Host) -> Check {
    let ns = fresh(host)?;
    conflict(
        acquire(host, &ns, 0, WRITE_EXCLUSIVE, [KEY, 0])?,
        "Acquire by no registrant",
    )?;
    ok(register(host, &ns, 0, [0, KEY])?, "Register")?;
    conflict(
        acquire(host, &ns, 0, WRITE_EXCLUSIVE, [OTHER, 0])?,
        "Acquire with another key",
    )?;
    same!(report(host, &ns)?.kind, 0u8, "type of the reservation");
    clear(host, &ns)
}

fn reservation_acquire_invalid(host: &mut Host) -> Check {
    let ns = registered(host)?;
    for kind in [0, 7, 0x80] {
        is(
            acquire(host, &ns, 0, kind, [KEY, 0])?,
            Status::INVALID_FIELD,
            &format!("Acquire of type {kind}"),
        )?;
    }
    for action in 3..8 {
        is(
            acquire(host, &ns, action, WRITE_EXCLUSIVE, [KEY, 0])?,
            Status::INVALID_FIELD,
            &format!("acquire action {action}"),
        )?;
    }
    clear(host, &ns)
}

fn reservation_release(host: &mut Host) -> Check {
    let ns = registered(host)?;
    let kinds = kinds(&ns);
    let Some(kind) = kinds.first().copied() else {
        return not_applicable("RESCAP has no type");
    };
    ok(acquire(host, &ns, 0, kind, [KEY, 0])?, "Acquire")?;
    let other = if kind == 1 { 2 } else { 1 };
    is(
        release(host, &ns, 0, other, KEY)?,
        Status::INVALID_FIELD,
        "Release of another type",
    )?;
    conflict(
        release(host, &ns, 0, kind, OTHER)?,
        "Release with another key",
    )?;
    same!(
        report(host, &ns)?.kind,
        kind as u8,
        "type after releases that were refused"
    );
    ok(release(host, &ns, 0, kind, KEY)?, "Release")?;
    same!(report(host, &ns)?.kind, 0u8, "type after the release");
    clear(host, &ns)
}

fn reservation_release_none(host: &mut Host) -> Check {
    let ns = fresh(host)?;
    conflict(
        release(host, &ns, 0, WRITE_EXCLUSIVE, KEY)?,
        "Release by no registrant",
    )?;
    ok(register(host, &ns, 0, [0, KEY])?, "Register")?;
    ok(
        release(host, &ns, 0, WRITE_EXCLUSIVE, KEY)?,
        "Release of nothing",
    )?;
    clear(host, &ns)
}

fn reservation_clear(host: &mut Host) -> Check {
    let ns = registered(host)?;
    ok(acquire(host, &ns, 0, WRITE_EXCLUSIVE, [KEY, 0])?, "Acquire")?;
    conflict(
        release(host, &ns, 1, WRITE_EXCLUSIVE, OTHER)?,
        "Clear with another key",
    )?;
    ok(release(host, &ns, 1, 0, KEY)?, "Clear")?;
    let told = report(host, &ns)?;
    require!(
        told.kind == 0 && told.registrants.is_empty(),
        "the report is {told:?}"
    );
    Ok(())
}

fn reservation_holder_io(host: &mut Host) -> Check {
    let ns = registered(host)?;
    for kind in kinds(&ns) {
        ok(
            acquire(host, &ns, 0, kind, [KEY, 0])?,
            &format!("Acquire of type {kind}"),
        )?;
        let data = pattern(kind.into(), ns.block as usize);
        host.write(&ns, 700, &data)?;
        host.holds(&ns, 700, &data, &format!("the holder under type {kind}"))?;
        ok(release(host, &ns, 0, kind, KEY)?, "Release")?;
    }
    clear(host, &ns)
}

fn reservation_outlasts_reset(host: &mut Host) -> Check {
    let ns = registered(host)?;
    ok(acquire(host, &ns, 0, WRITE_EXCLUSIVE, [KEY, 0])?, "Acquire")?;
    host.disable()?;
    host.enable()?;
    let entries = host.io_entries();
    host.create_pair(1, entries)?;
    identify_host(host, 0x11)?;
    let told = report(host, &ns)?;
    same!(
        told.kind,
        WRITE_EXCLUSIVE as u8,
        "type after a controller reset"
    );
    require!(
        told.registrants
            .iter()
            .any(|one| one.key == KEY && one.holds),
        "{told:x?}"
    );
    clear(host, &ns)
}

/// A shared namespace, both hosts without registrations.
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

/// A namespace that both have.
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

fn pair_report(a: &mut Host, b: &mut Host) -> Check {
    let ns = shared(a, b)?;
    ok(register(a, &ns, 0, [0, KEY])?, "Register by the first host")?;
    ok(
        register(b, &ns, 0, [0, OTHER])?,
        "Register by the second host",
    )?;
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
    let ns = shared(a, b)?;
    ok(register(a, &ns, 0, [0, KEY])?, "Register by the first host")?;
    ok(
        register(b, &ns, 0, [0, OTHER])?,
        "Register by the second host",
    )?;
    ok(
        acquire(a, &ns, 0, WRITE_EXCLUSIVE, [KEY, 0])?,
        "Acquire by the first host",
    )?;
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
    let ns = shared(a, b)?;
    ok(register(a, &ns, 0, [0, KEY])?, "Register by the first host")?;
    ok(
        register(b, &ns, 0, [0, OTHER])?,
        "Register by the second host",
    )?;
    ok(
        acquire(a, &ns, 0, WRITE_EXCLUSIVE, [KEY, 0])?,
        "Acquire by the first host",
    )?;
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
    let ns = shared(a, b)?;
    ok(register(a, &ns, 0, [0, KEY])?, "Register by the first host")?;
    ok(
        register(b, &ns, 0, [0, OTHER])?,
        "Register by the second host",
    )?;
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
    let ns = shared(a, b)?;
    ok(register(a, &ns, 0, [0, KEY])?, "Register by the first host")?;
    ok(
        register(b, &ns, 0, [0, OTHER])?,
        "Register by the second host",
    )?;
    ok(
        acquire(a, &ns, 0, WRITE_EXCLUSIVE, [KEY, 0])?,
        "Acquire by the first host",
    )?;
    ok(
        release(b, &ns, 0, WRITE_EXCLUSIVE, OTHER)?,
        "Release by a registrant that does not hold",
    )?;
    same!(report(b, &ns)?.kind, WRITE_EXCLUSIVE as u8, "type after it");
    clear(a, &ns)
}

fn pair_notification(a: &mut Host, b: &mut Host) -> Check {
    let ns = shared(a, b)?;
    ok(register(a, &ns, 0, [0, KEY])?, "Register by the first host")?;
    ok(
        register(b, &ns, 0, [0, OTHER])?,
        "Register by the second host",
    )?;
    // What other cases have left in the log.
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
        entry.dw0.get() & 7,
        6u32,
        "type of the event, I/O command specific"
    );
    same!(
        entry.dw0.get() >> 8 & 0xff,
        0u32,
        "information of the event"
    );
    same!(
        entry.dw0.get() >> 16 & 0xff,
        0x80u32,
        "log page of the event"
    );
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
