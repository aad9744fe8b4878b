//! Reservations, by one host (NVMe Base 2.1, 7.5 to 7.8, 8.1.22).

use crate::bytes::{pattern, slice, u8_at, u16_at, u32_at, u64_at, u128_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, PAGE, admin, nvm};
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
        "each type that RESCAP has is acquired, and again by its holder; another type is a \
         conflict";
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

pub(super) const KEY: u64 = 0x1111_2222_3333_4444;
pub(super) const OTHER: u64 = 0x5555_6666_7777_8888;
pub(super) const WRITE_EXCLUSIVE: u32 = 1;

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

pub(super) fn register(
    host: &mut Host,
    ns: &Namespace,
    cdw10: u32,
    keys: [u64; 2],
) -> Check<Status> {
    reserve(host, Op::RESERVATION_REGISTER, ns, cdw10, keys)
}

pub(super) fn acquire(
    host: &mut Host,
    ns: &Namespace,
    action: u32,
    kind: u32,
    keys: [u64; 2],
) -> Check<Status> {
    reserve(host, Op::RESERVATION_ACQUIRE, ns, kind << 8 | action, keys)
}

pub(super) fn release(
    host: &mut Host,
    ns: &Namespace,
    action: u32,
    kind: u32,
    key: u64,
) -> Check<Status> {
    reserve(
        host,
        Op::RESERVATION_RELEASE,
        ns,
        kind << 8 | action,
        [key, 0],
    )
}

pub(super) fn is(found: Status, expected: Status, what: &str) -> Check {
    require!(
        found.is(expected),
        "{what}: expected {expected}, got {found}"
    );
    Ok(())
}

pub(super) fn ok(found: Status, what: &str) -> Check {
    is(found, Status::SUCCESS, what)
}

pub(super) fn conflict(found: Status, what: &str) -> Check {
    is(found, Status::RESERVATION_CONFLICT, what)
}

#[derive(Debug)]
pub(super) struct Registrant {
    pub(super) cntlid: u16,
    pub(super) holds: bool,
    pub(super) key: u64,
    pub(super) host: u128,
}

#[derive(Debug)]
pub(super) struct ReservationReport {
    pub(super) generation: u32,
    pub(super) kind: u8,
    pub(super) persists: u8,
    pub(super) registrants: Vec<Registrant>,
}

pub(super) fn report(host: &mut Host, ns: &Namespace) -> Check<ReservationReport> {
    for extended in [false, true] {
        let at = host.alloc(PAGE)?;
        let command = nvm(Op::RESERVATION_REPORT, ns.nsid)
            .prp(at, 0)
            .dw(10, 1023)
            .dw(11, extended.into());
        let entry = host.io(command)?;
        // Hosts with identifiers of 128 bits are reported by the extended form only.
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
        return Ok(ReservationReport {
            generation: u32_at(&page, 0),
            kind: u8_at(&page, 4),
            persists: u8_at(&page, 9),
            registrants: (0..count).map(entry).collect(),
        });
    }
    crate::verdict::failed("Reservation Report refuses both of its forms")
}

/// Returns a namespace that supports reservations, after removing its registrants.
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

/// Sets the Host Identifier if the host has none. Returns the identifier.
pub(super) fn identify_host(host: &mut Host, byte: u8) -> Check<u128> {
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

/// Removes all registrants and the reservation of a namespace, by commands of this host.
pub(super) fn clear(host: &mut Host, ns: &Namespace) -> Check {
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

/// Returns the numbers of the reservation types that RESCAP reports.
pub(super) fn kinds(ns: &Namespace) -> Vec<u32> {
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
    same!(entry.dw0() & 1, 1u32, "PTPL of the feature");
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
