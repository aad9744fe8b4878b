//! Zoned namespaces (Zoned Namespace Command Set 1.1): what they say of themselves, what may be
//! written where, reports, and what Zone Management Send makes of zones.

use crate::bytes::{pattern, u8_at, u16_at, u32_at, u64_at};
use crate::case::{Need::*, cases};
use crate::host::{Enable, Fields, Host, PAGE, admin, nvm};
use crate::info::Namespace;
use crate::verdict::{Check, Expect, applies_if, not_applicable, require, same};
use nvme::cmd::zone::Zsa;
use nvme::{AdminOpcode, Command, Completion, NvmOpcode as Op, Status, regs};

cases! {
    zns_lists, [], If("ZNS"), Disabled, "ZNS 1.1, 4.1.5",
        "zoned namespaces are in the list of their command set, and their descriptors say so; a \
         combination of Identify has the command set";
    zns_namespace, [], If("ZNS"), Disabled, "ZNS 1.1, 4.1.5.1",
        "the namespace consists of whole zones, open resources are no more than active ones, and \
         reserved bytes are zero";
    zns_controller, [], If("ZNS"), Disabled, "ZNS 1.1, 4.1.5.2",
        "ZASL is no larger than MDTS, and reserved bytes are zero";
    zns_commands, [], If("ZNS"), Disabled, "ZNS 1.1, 2.2.1",
        "the log page of supported commands has the mandatory ones of the command set";
    zns_hidden, [], If("ZNS"), Disabled, "Base 2.1, 5.1.13.2.3",
        "with CC.CSS of the NVM command set alone zoned namespaces are in no list";
    zone_report, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.2",
        "a report has all zones, one behind the other; empty ones are written from their beginning";
    zone_report_partial, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.2",
        "of a partial report the number is that of the descriptors that fit, else of all zones";
    zone_report_from, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.2",
        "a report begins with the zone that the LBA lies in; one behind the namespace is refused";
    zone_report_states, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.2",
        "a report of the zones in a state has those and no other";
    zone_report_lengths, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.2",
        "whatever the buffer's length is, nothing is written behind it";
    zone_report_errors, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.2",
        "reserved receive actions and fields are Invalid Field in Command, and so is an extended \
         report without extensions";
    zone_write, [], If("ZNS"), Disabled, "ZNS 1.1, 2.1.1",
        "a write at the write pointer opens the zone and moves the pointer, and its data is read";
    zone_write_elsewhere, [], If("ZNS"), Disabled, "ZNS 1.1, 3.3.7",
        "a write before or behind the write pointer is Zone Invalid Write, and changes nothing";
    zone_write_boundary, [], If("ZNS"), Disabled, "ZNS 1.1, 3.3.7",
        "a write beyond the zone's capacity is Zone Boundary Error, to a full zone Zone Is Full";
    zone_write_zeroes, [], If("ONCS bit 3"), Disabled, "ZNS 1.1, 3.3.9",
        "Write Zeroes moves the write pointer, and is refused elsewhere as a write is";
    zone_read, [], If("ZNS"), Disabled, "ZNS 1.1, 3.3.5",
        "a read goes over a zone's border if OZCS bit 0 says so, else it is Zone Boundary Error";
    zone_append, [], If("Zone Append"), Disabled, "ZNS 1.1, 3.4.1",
        "appends that are in flight together have a place each, which the completion says";
    zone_append_errors, [], If("Zone Append"), Disabled, "ZNS 1.1, 3.4.1",
        "an append that does not name a zone's beginning is Invalid Field in Command; beyond the \
         namespace, the capacity, and to a full zone it is refused as a write is";
    zone_append_limit, [], If("ZASL or MDTS"), Disabled, "ZNS 1.1, 4.1.5.2",
        "an append larger than ZASL (or MDTS) is Invalid Field in Command";
    zone_open_close, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.3.1",
        "Open Zone opens empty and closed zones, Close Zone closes open ones, a write opens a \
         closed one, and the write pointer stays";
    zone_finish, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.3.1",
        "Finish Zone makes empty, open and closed zones full";
    zone_reset, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.3.1",
        "Reset Zone makes open, closed and full zones empty, to be written from their beginning";
    zone_transitions, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.3.1",
        "what a state does not allow is Invalid Zone State Transition, and changes nothing";
    zone_select_all, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.3",
        "with Select All an action is for the zones in its states, whatever the LBA is";
    zone_send_errors, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.3",
        "reserved actions, and an LBA that is no zone's first, are Invalid Field in Command; one \
         behind the namespace is LBA Out of Range";
    zone_open_limit, [], If("MOR"), Disabled, "ZNS 1.1, 2.1.1",
        "no more zones are opened than MOR says; one that a write has opened gives its place";
    zone_active_limit, [], If("MAR"), Disabled, "ZNS 1.1, 2.1.1",
        "no more zones are active than MAR says; one that is finished or reset is so no more";
    zone_extension, [], If("ZDES"), Disabled, "ZNS 1.1, 5.3",
        "the extension that an empty zone is given is in extended reports, and closes it";
    zone_no_extension, [], If("ZNS"), Disabled, "ZNS 1.1, 5.3",
        "without extensions, to set one is Invalid Field in Command";
    zone_changed_list, [], If("OAES bit 27"), Disabled, "ZNS 1.1, 4.1.4",
        "the Changed Zone List log page has zones' beginnings, each once";
    zrwa_open, [], If("OZCS bit 1"), Disabled, "ZNS 1.1, Zone Random Write Area",
        "an empty zone is opened with an area, which its descriptor says; one that is active is \
         Invalid Zone Operation Request";
    zrwa_writes, [], If("OZCS bit 1"), Disabled, "ZNS 1.1, Zone Random Write Area",
        "within the area blocks are written in any order, and again, and the write pointer stays";
    zrwa_implicit_flush, [], If("OZCS bit 1"), Disabled, "ZNS 1.1, Zone Random Write Area",
        "a write that ends behind the area takes the write pointer along by the granularity, and \
         one beyond twice the area is Zone Invalid Write";
    zrwa_explicit_flush, [], If("ZRWACAP bit 0"), Disabled, "ZNS 1.1, Zone Random Write Area",
        "an explicit flush moves the write pointer; one that is no multiple of the granularity, \
         or not of the area, is refused";
    zrwa_append, [], If("OZCS bit 1"), Disabled, "ZNS 1.1, Zone Random Write Area",
        "an append to a zone with an area is Invalid Zone Operation Request";
    zrwa_lasts, [], If("OZCS bit 1"), Disabled, "ZNS 1.1, Zone Random Write Area",
        "a closed zone keeps its area; one that is finished or reset has none";
    zrwa_limit, [], If("OZCS bit 1"), Disabled, "ZNS 1.1, Zone Random Write Area",
        "no more zones have areas than NUMZRWA says; one that is reset gives its own back";
}

/// Zone states, in bits 7:4 of ZS.
const EMPTY: u8 = 0x1;
const IMPLICIT: u8 = 0x2;
const EXPLICIT: u8 = 0x3;
const CLOSED: u8 = 0x4;
const FULL: u8 = 0xe;

/// The command set's CSI, at its place in dword 11 of Identify.
const CSI: u32 = 2 << 24;
/// A zone's attribute: it has a Zone Random Write Area.
const ZRWAV: u8 = 1 << 3;
/// A zone of more bytes is not written from its beginning to its end.
const MOST: u64 = 16 << 20;

/// A zoned namespace.
struct Zoned {
    ns: Namespace,
    /// Blocks of a zone.
    size: u64,
    count: u64,
    /// Blocks of the first zone that can be written.
    capacity: u64,
    /// MAR and MOR, as numbers.
    active: Option<u32>,
    open: Option<u32>,
    ozcs: u16,
    /// Of a zone's descriptor extension, bytes.
    extension: u64,
    /// Zone Random Write Areas: how many, their size, and the granularity, in blocks.
    areas: (u64, u64, u64),
    explicit_flush: bool,
}

/// A zone's descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Zone {
    kind: u8,
    state: u8,
    attributes: u8,
    capacity: u64,
    start: u64,
    pointer: u64,
}

impl Zoned {
    fn start(&self, zone: u64) -> u64 {
        zone * self.size
    }

    fn has_areas(&self) -> bool {
        self.ozcs >> 1 & 1 != 0
    }
}

/// Enables the controller with all command sets, and makes queue pair 1.
fn enable(host: &mut Host) -> Check {
    applies_if(host.cap.css().iocss(), "CAP.CSS bit 6 is 0")?;
    let mut how = Enable::default();
    how.cc = how.cc.with_css(regs::CcCss::ALL_SUPPORTED);
    how.cc = how.cc.with_mps(host.cap.mpsmin());
    host.enable_with(how)?;
    let entries = host.io_entries();
    host.create_pair(1, entries)
}

/// The NSIDs of active zoned namespaces.
fn listed(host: &mut Host) -> Check<Vec<u32>> {
    let (entry, page) = host.identify_raw(7, 0, CSI)?;
    if !entry.status().is_success() {
        return not_applicable("the controller does not have the command set");
    }
    let all = page.chunks_exact(4).map(|chunk| u32_at(chunk, 0));
    Ok(all.take_while(|nsid| *nsid != 0).collect())
}

fn zoned(host: &mut Host, nsid: u32) -> Check<Zoned> {
    let ns = host.namespace_of(nsid)?;
    let (entry, page) = host.identify_raw(5, nsid, CSI)?;
    entry.succeeds("Identify CNS 05h of a zoned namespace")?;
    let at = 2816 + 16 * ns.format();
    let limit = |field: u32| (field != u32::MAX).then(|| field + 1);
    let size = u64_at(&page, at);
    require!(size > 0, "ZSZE is 0");
    let mut found = Zoned {
        size,
        count: ns.blocks / size,
        capacity: 0,
        active: limit(u32_at(&page, 4)),
        open: limit(u32_at(&page, 8)),
        ozcs: u16_at(&page, 2),
        extension: u64::from(u8_at(&page, at + 8)) * 64,
        areas: (
            u64::from(u32_at(&page, 44)).saturating_add(1),
            u16_at(&page, 50).into(),
            u16_at(&page, 48).into(),
        ),
        explicit_flush: u8_at(&page, 52) & 1 != 0,
        ns,
    };
    found.capacity = zone(host, &found, 0)?.capacity;
    Ok(found)
}

/// Does this with every zoned namespace that can be written, when all its zones are empty.
fn each(
    host: &mut Host,
    has: impl Fn(&Zoned) -> bool,
    what: impl Fn(&mut Host, &Zoned) -> Check,
) -> Check {
    enable(host)?;
    let mut any = false;
    for nsid in listed(host)? {
        let found = zoned(host, nsid)?;
        let protected = u8_at(&found.ns.page, 99) & 1 != 0;
        let plain = found.ns.metadata() == 0 && found.count >= 8;
        if protected || !plain || !has(&found) {
            continue;
        }
        any = true;
        send_all(host, &found, Zsa::RESET)?.succeeds("Reset Zone of all zones")?;
        what(host, &found)?;
        send_all(host, &found, Zsa::RESET)?.succeeds("Reset Zone of all zones")?;
    }
    applies_if(
        any,
        "no zoned namespace of 8 zones can be written and has this",
    )
}

/// Any zoned namespace.
fn any(_: &Zoned) -> bool {
    true
}

/// One whose zones are written to their ends.
fn small(z: &Zoned) -> bool {
    z.capacity * z.ns.block <= MOST
}

fn areas(z: &Zoned) -> bool {
    z.has_areas()
}

// ---- commands

fn send_command(z: &Zoned, zsa: Zsa, slba: u64) -> Command {
    nvm(Op::ZONE_MANAGEMENT_SEND, z.ns.nsid)
        .slba(slba)
        .dw(13, zsa.0.into())
}

fn send(host: &mut Host, z: &Zoned, zsa: Zsa, zone: u64) -> Check<Completion> {
    host.io(send_command(z, zsa, z.start(zone)))
}

fn done(host: &mut Host, z: &Zoned, zsa: Zsa, zone: u64) -> Check {
    send(host, z, zsa, zone)?.succeeds(&format!("{zsa} of zone {zone}"))
}

fn send_all(host: &mut Host, z: &Zoned, zsa: Zsa) -> Check<Completion> {
    host.io(send_command(z, zsa, 0).dw(13, 1 << 8 | u32::from(zsa.0)))
}

/// Open Zone with ZRWAA.
fn open_with_area(host: &mut Host, z: &Zoned, zone: u64) -> Check<Completion> {
    let command = send_command(z, Zsa::OPEN, z.start(zone));
    host.io(command.dw(13, 1 << 9 | u32::from(Zsa::OPEN.0)))
}

fn receive(z: &Zoned, slba: u64, bytes: u64, cdw13: u32, at: (u64, u64)) -> Command {
    nvm(Op::ZONE_MANAGEMENT_RECEIVE, z.ns.nsid)
        .slba(slba)
        .prp(at.0, at.1)
        .dw(12, (bytes / 4 - 1) as u32)
        .dw(13, cdw13)
}

/// A report in a buffer of so many bytes: its number of zones, and its descriptors.
fn report(
    host: &mut Host,
    z: &Zoned,
    slba: u64,
    bytes: u64,
    cdw13: u32,
) -> Check<(u64, Vec<Zone>)> {
    let at = host.alloc(bytes)?;
    let prps = host.prps(at, bytes)?;
    let command = receive(z, slba, bytes, cdw13, prps);
    host.io(command)?.succeeds("Report Zones")?;
    let data = host.get(at, bytes as usize)?;
    let rest = data.get(64..).unwrap_or_default().chunks_exact(64);
    let zones = rest.map(|one| Zone {
        kind: u8_at(one, 0) & 0xf,
        state: u8_at(one, 1) >> 4,
        attributes: u8_at(one, 2),
        capacity: u64_at(one, 8),
        start: u64_at(one, 16),
        pointer: u64_at(one, 24),
    });
    let number = u64_at(&data, 0);
    let fit = usize::try_from(number).unwrap_or(usize::MAX);
    Ok((number, zones.take(fit).collect()))
}

fn zone(host: &mut Host, z: &Zoned, zone: u64) -> Check<Zone> {
    let (_, zones) = report(host, z, z.start(zone), 128, 0)?;
    let first = zones.into_iter().next();
    first.ok_or_else(|| {
        let text = format!("the report from zone {zone} on is empty");
        crate::verdict::Verdict::Failed(text)
    })
}

/// A zone is in this state, and its write pointer so many blocks behind its first one.
fn is(host: &mut Host, z: &Zoned, number: u64, state: u8, written: u64) -> Check {
    let found = zone(host, z, number)?;
    same!(found.state, state, "the state of zone {number}");
    if state != FULL {
        let pointer = z.start(number) + written;
        same!(found.pointer, pointer, "the write pointer of zone {number}");
    }
    Ok(())
}

fn write(host: &mut Host, z: &Zoned, slba: u64, blocks: u64, seed: u64) -> Check<Completion> {
    put(host, z, Op::WRITE, slba, blocks, seed)
}

fn put(
    host: &mut Host,
    z: &Zoned,
    opcode: Op,
    slba: u64,
    blocks: u64,
    seed: u64,
) -> Check<Completion> {
    let bytes = pattern(seed, (blocks * z.ns.block) as usize);
    let at = host.alloc(bytes.len() as u64)?;
    host.put(at, &bytes)?;
    let command = host.rw_command(opcode, &z.ns, slba, blocks, at)?;
    host.io(command)
}

fn holds(host: &mut Host, z: &Zoned, slba: u64, blocks: u64, seed: u64) -> Check {
    let bytes = pattern(seed, (blocks * z.ns.block) as usize);
    host.holds(&z.ns, slba, &bytes, "a zone")
}

/// Writes a zone from there on, until so many blocks are left.
fn fill(host: &mut Host, z: &Zoned, number: u64, mut from: u64, left: u64) -> Check {
    let piece = (64 << 10) / z.ns.block;
    let at = host.alloc(64 << 10)?;
    while from < z.capacity - left {
        let blocks = piece.min(z.capacity - left - from);
        let slba = z.start(number) + from;
        let command = host.rw_command(Op::WRITE, &z.ns, slba, blocks, at)?;
        host.io(command)?.succeeds("a write at the write pointer")?;
        from += blocks;
    }
    Ok(())
}

/// Commands Supported and Effects, of the command set.
fn effects(host: &mut Host) -> Check<Vec<u8>> {
    let at = host.alloc(PAGE)?;
    let command = admin(AdminOpcode::GET_LOG_PAGE, 0)
        .prp(at, 0)
        .dw(10, 1023 << 16 | 5)
        .dw(14, CSI);
    host.admin(command)?.succeeds("Get Log Page 05h, CSI 02h")?;
    host.get(at, PAGE as usize)
}

// ---- Identify

fn zns_lists(host: &mut Host) -> Check {
    enable(host)?;
    let zoned = listed(host)?;
    applies_if(!zoned.is_empty(), "there is no zoned namespace")?;
    let all = host.nsids()?;
    for nsid in &all {
        let page = host.identify(3, *nsid)?;
        let mut at = 0;
        let mut csi = None;
        while u8_at(&page, at) != 0 {
            if u8_at(&page, at) == 4 {
                csi = Some(u8_at(&page, at + 4));
            }
            at += 4 + usize::from(u8_at(&page, at + 1));
        }
        let is_zoned = zoned.contains(nsid);
        require!(
            (csi == Some(2)) == is_zoned,
            "namespace {nsid}: its descriptor has CSI {csi:?}, the list of CSI 02h {zoned:?}"
        );
        if !is_zoned {
            let (entry, _) = host.identify_raw(5, *nsid, CSI)?;
            entry.fails("Identify CNS 05h, CSI 02h of a namespace without zones")?;
        }
    }
    let within = zoned.iter().all(|nsid| all.contains(nsid));
    require!(within, "zoned namespaces {zoned:?}, active ones {all:?}");
    let (entry, page) = host.identify_raw(0x1c, 0, 0)?;
    entry.succeeds("Identify, I/O Command Set data structure")?;
    let mut combinations = page.chunks_exact(8).map(|chunk| u64_at(chunk, 0));
    require!(
        combinations.any(|sets| sets >> 2 & 1 != 0),
        "no combination has the command set"
    );
    Ok(())
}

fn zns_namespace(host: &mut Host) -> Check {
    enable(host)?;
    let all = listed(host)?;
    applies_if(!all.is_empty(), "there is no zoned namespace")?;
    for nsid in all {
        let z = zoned(host, nsid)?;
        same!(z.ns.blocks % z.size, 0u32, "blocks behind the last zone");
        if let Some(active) = z.active {
            let open = z.open.unwrap_or(u32::MAX);
            require!(open <= active, "MOR is {open}, and MAR {active}");
        }
        let (_, page) = host.identify_raw(5, nsid, CSI)?;
        same!(u16_at(&page, 0) >> 2, 0u16, "reserved bits of ZOC");
        same!(u16_at(&page, 2) >> 2, 0u16, "reserved bits of OZCS");
        let reserved = page.get(53..2816).unwrap_or_default();
        require!(
            reserved.iter().all(|byte| *byte == 0),
            "reserved bytes are not zero"
        );
        let (_, size, granularity) = z.areas;
        if z.has_areas() {
            require!(
                granularity > 0 && size > 0 && size % granularity == 0,
                "ZRWASZ is {size}, and ZRWAFG {granularity}"
            );
        } else {
            require!(
                page.get(44..53).is_some_and(|all| all == [0; 9]),
                "fields of Zone Random Write Areas, which are not supported"
            );
        }
    }
    Ok(())
}

fn zns_controller(host: &mut Host) -> Check {
    enable(host)?;
    let all = listed(host)?;
    applies_if(!all.is_empty(), "there is no zoned namespace")?;
    let (entry, page) = host.identify_raw(6, 0, CSI)?;
    entry.succeeds("Identify CNS 06h, CSI 02h")?;
    let mdts = u8_at(&host.controller()?.0, 77);
    let zasl = u8_at(&page, 0);
    require!(mdts == 0 || zasl <= mdts, "ZASL is {zasl}, and MDTS {mdts}");
    let reserved = page.get(1..).unwrap_or_default();
    require!(
        reserved.iter().all(|byte| *byte == 0),
        "reserved bytes are not zero"
    );
    Ok(())
}

fn zns_commands(host: &mut Host) -> Check {
    enable(host)?;
    applies_if(!listed(host)?.is_empty(), "there is no zoned namespace")?;
    let page = effects(host)?;
    for opcode in [
        Op::FLUSH,
        Op::WRITE,
        Op::READ,
        Op::ZONE_MANAGEMENT_SEND,
        Op::ZONE_MANAGEMENT_RECEIVE,
    ] {
        let effects = u32_at(&page, 1024 + 4 * usize::from(opcode.0));
        same!(effects & 1, 1u32, "CSUPP of {opcode}");
    }
    Ok(())
}

fn zns_hidden(host: &mut Host) -> Check {
    enable(host)?;
    let zoned = listed(host)?;
    applies_if(!zoned.is_empty(), "there is no zoned namespace")?;
    applies_if(host.cap.css().ncss(), "CAP.CSS bit 0 is 0")?;
    host.disable()?;
    host.enable()?;
    let all = host.nsids()?;
    let seen = zoned.iter().find(|nsid| all.contains(nsid));
    require!(seen.is_none(), "namespace {seen:?} is in the active list");
    Ok(())
}

// ---- reports

fn zone_report(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        let fit = z.count.min(500);
        let (number, zones) = report(host, z, 0, 64 * (1 + fit), 0)?;
        same!(number, z.count, "the number of zones");
        for (number, zone) in (0..).zip(zones) {
            let start = z.start(number);
            same!(zone.start, start, "ZSLBA of zone {number}");
            same!(zone.kind, 2u8, "the type of zone {number}");
            let capacity = zone.capacity;
            require!(
                (1..=z.size).contains(&capacity),
                "ZCAP of zone {number} is {capacity}, and ZSZE {}",
                z.size
            );
            if zone.state == EMPTY {
                same!(
                    zone.pointer,
                    start,
                    "the write pointer of empty zone {number}"
                );
            }
        }
        Ok(())
    })
}

fn zone_report_partial(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        for room in 1..4 {
            let bytes = 64 * (1 + room) + 60;
            let (number, zones) = report(host, z, 0, bytes, 1 << 16)?;
            same!(number, room, "the number of a partial report");
            same!(zones.len() as u64, room, "its descriptors");
            let (number, _) = report(host, z, 0, bytes, 0)?;
            same!(
                number,
                z.count,
                "the number of a report that is not partial"
            );
        }
        let (number, _) = report(host, z, z.start(z.count - 1), 4096, 1 << 16)?;
        same!(
            number,
            1u32,
            "the number of a partial report with more room"
        );
        Ok(())
    })
}

fn zone_report_from(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        for slba in [z.start(2), z.start(2) + 1, z.start(3) - 1] {
            let (number, zones) = report(host, z, slba, 4096, 0)?;
            same!(
                number,
                z.count - 2,
                "the number of zones from LBA {slba:#x} on"
            );
            let first = zones.first().map_or(0, |zone| zone.start);
            same!(first, z.start(2), "the first zone from LBA {slba:#x} on");
        }
        let at = host.alloc(PAGE)?;
        let command = receive(z, z.ns.blocks, 4096, 0, (at, 0));
        host.io(command)?.expect(
            Status::LBA_OUT_OF_RANGE,
            "a report from behind the last zone on",
        )
    })
}

fn zone_report_states(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        write(host, z, z.start(1), 1, 1)?.succeeds("a write")?;
        done(host, z, Zsa::OPEN, 2)?;
        done(host, z, Zsa::FINISH, 3)?;
        done(host, z, Zsa::OPEN, 4)?;
        done(host, z, Zsa::CLOSE, 4)?;
        let of = [EMPTY, IMPLICIT, EXPLICIT, CLOSED, FULL, 0xd, 0xf];
        let mut sum = 0;
        for (filter, state) in (1u32..).zip(of) {
            let (number, zones) = report(host, z, 0, 4096, filter << 8)?;
            let other = zones.iter().find(|zone| zone.state != state);
            require!(
                other.is_none(),
                "a report of zones in state {state:x}h has {other:x?}"
            );
            // Others may be worn out.
            if ![EMPTY, 0xd, 0xf].contains(&state) {
                same!(number, 1u32, "zones in state {state:x}h");
            }
            sum += number;
        }
        same!(sum, z.count, "zones in all states together");
        Ok(())
    })
}

fn zone_report_lengths(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        for bytes in [4u64, 8, 60, 64, 68, 124, 128, 192] {
            let at = host.alloc(PAGE)?;
            host.put(at, &[0xa5; PAGE as usize])?;
            let command = receive(z, 0, bytes, 0, (at, 0));
            host.io(command)?
                .succeeds(&format!("a report of {bytes} bytes"))?;
            let page = host.get(at, PAGE as usize)?;
            let behind = page.get(bytes as usize..).unwrap_or_default();
            require!(
                behind.iter().all(|byte| *byte == 0xa5),
                "a report of {bytes} bytes has written behind them"
            );
            let number = u32_at(&page, 0);
            same!(
                number,
                z.count as u32,
                "the number in a report of {bytes} bytes"
            );
        }
        Ok(())
    })
}

fn zone_report_errors(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        let at = host.alloc(PAGE)?;
        let mut wrong = vec![(0x55u32, "a reserved action"), (0x5500, "reserved states")];
        if z.extension == 0 {
            wrong.push((1, "an extended report"));
        }
        for (cdw13, what) in wrong {
            let command = receive(z, 0, 4096, cdw13, (at, 0));
            host.io(command)?.refused(Status::INVALID_FIELD, what)?;
        }
        Ok(())
    })
}

// ---- writes and reads

fn zone_write(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        let start = z.start(1);
        write(host, z, start, 2, 1)?.succeeds("a write to an empty zone")?;
        is(host, z, 1, IMPLICIT, 2)?;
        write(host, z, start + 2, 3, 2)?.succeeds("a write at the write pointer")?;
        is(host, z, 1, IMPLICIT, 5)?;
        holds(host, z, start, 2, 1)?;
        holds(host, z, start + 2, 3, 2)?;
        is(host, z, 0, EMPTY, 0)
    })
}

fn zone_write_elsewhere(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        let start = z.start(1);
        let behind = write(host, z, start + 1, 1, 9)?;
        behind.refused(
            Status::ZONE_INVALID_WRITE,
            "a write behind the write pointer",
        )?;
        is(host, z, 1, EMPTY, 0)?;
        write(host, z, start, 4, 1)?.succeeds("a write to an empty zone")?;
        for offset in [0, 3, 5] {
            let what = format!("a write to block {offset} of a zone with 4 blocks");
            let entry = write(host, z, start + offset, 1, 9)?;
            entry.refused(Status::ZONE_INVALID_WRITE, &what)?;
        }
        is(host, z, 1, IMPLICIT, 4)?;
        holds(host, z, start, 4, 1)
    })
}

fn zone_write_boundary(host: &mut Host) -> Check {
    each(host, small, |host, z| {
        fill(host, z, 1, 0, 2)?;
        let end = z.start(1) + z.capacity;
        let entry = write(host, z, end - 2, 3, 9)?;
        entry.refused(Status::ZONED_BOUNDARY_ERROR, "a write beyond ZCAP")?;
        is(host, z, 1, IMPLICIT, z.capacity - 2)?;
        write(host, z, end - 2, 2, 1)?.succeeds("a write up to ZCAP")?;
        is(host, z, 1, FULL, 0)?;
        for slba in [z.start(1), end - 1] {
            let entry = write(host, z, slba, 1, 9)?;
            entry.refused(Status::ZONE_IS_FULL, "a write to a full zone")?;
        }
        holds(host, z, end - 2, 2, 1)
    })
}

fn zone_write_zeroes(host: &mut Host) -> Check {
    enable(host)?;
    let has = u32_at(&effects(host)?, 1024 + 4 * usize::from(Op::WRITE_ZEROES.0));
    applies_if(has & 1 != 0, "zoned namespaces have no Write Zeroes")?;
    host.disable()?;
    each(host, any, |host, z| {
        let zeroes = |slba: u64, blocks: u32| {
            nvm(Op::WRITE_ZEROES, z.ns.nsid)
                .slba(slba)
                .dw(12, blocks - 1)
        };
        let start = z.start(1);
        host.io(zeroes(start + 1, 1))?.refused(
            Status::ZONE_INVALID_WRITE,
            "Write Zeroes behind the write pointer",
        )?;
        host.io(zeroes(start, 4))?
            .succeeds("Write Zeroes at the write pointer")?;
        is(host, z, 1, IMPLICIT, 4)?;
        write(host, z, start + 4, 1, 1)?.succeeds("a write behind them")?;
        let none = vec![0; (4 * z.ns.block) as usize];
        host.holds(&z.ns, start, &none, "Write Zeroes")
    })
}

fn zone_read(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        let at = host.alloc(4 * z.ns.block)?;
        let across = host.rw_command(Op::READ, &z.ns, z.start(1) - 2, 4, at)?;
        let entry = host.io(across)?;
        match z.ozcs & 1 != 0 {
            true => entry.succeeds("a read over a zone's border, which OZCS bit 0 allows")?,
            false => entry.expect(Status::ZONED_BOUNDARY_ERROR, "a read over a zone's border")?,
        }
        let behind = host.rw_command(Op::READ, &z.ns, z.ns.blocks - 1, 2, at)?;
        host.io(behind)?
            .refused(Status::LBA_OUT_OF_RANGE, "a read behind the last zone")
    })
}

// ---- Zone Append

/// The case does not apply where there is no Zone Append.
fn with_append(host: &mut Host) -> Check {
    enable(host)?;
    applies_if(!listed(host)?.is_empty(), "there is no zoned namespace")?;
    let effects = u32_at(&effects(host)?, 1024 + 4 * usize::from(Op::ZONE_APPEND.0));
    applies_if(effects & 1 != 0, "there is no Zone Append")?;
    host.disable()
}

fn zone_append(host: &mut Host) -> Check {
    with_append(host)?;
    each(host, any, |host, z| {
        let start = z.start(1);
        let mut sent = Vec::new();
        for seed in 1..9u64 {
            let blocks = 1 + seed % 3;
            let bytes = pattern(seed, (blocks * z.ns.block) as usize);
            let at = host.alloc(bytes.len() as u64)?;
            host.put(at, &bytes)?;
            let command = host.rw_command(Op::ZONE_APPEND, &z.ns, start, blocks, at)?;
            sent.push((host.put_command(1, command)?, blocks, seed));
        }
        host.ring_tail(1)?;
        let mut places = Vec::new();
        for (cid, blocks, seed) in sent {
            let entry = host.wait_for(1, cid)?;
            entry.succeeds("an append")?;
            let at = u64::from(entry.dw1.get()) << 32 | u64::from(entry.dw0.get());
            places.push((at, blocks, seed));
        }
        places.sort_unstable();
        let mut next = start;
        for (at, blocks, seed) in places {
            same!(at, next, "where an append went to");
            holds(host, z, at, blocks, seed)?;
            next += blocks;
        }
        is(host, z, 1, IMPLICIT, next - start)
    })
}

fn zone_append_errors(host: &mut Host) -> Check {
    with_append(host)?;
    each(host, small, |host, z| {
        let start = z.start(1);
        let entry = put(host, z, Op::ZONE_APPEND, start + 1, 1, 9)?;
        entry.refused(
            Status::INVALID_FIELD,
            "an append that names no zone's first block",
        )?;
        let entry = put(host, z, Op::ZONE_APPEND, z.ns.blocks, 1, 9)?;
        entry.refused(Status::LBA_OUT_OF_RANGE, "an append behind the last zone")?;
        is(host, z, 1, EMPTY, 0)?;
        fill(host, z, 1, 0, 2)?;
        let entry = put(host, z, Op::ZONE_APPEND, start, 3, 9)?;
        entry.refused(Status::ZONED_BOUNDARY_ERROR, "an append beyond ZCAP")?;
        put(host, z, Op::ZONE_APPEND, start, 2, 1)?.succeeds("an append up to ZCAP")?;
        is(host, z, 1, FULL, 0)?;
        let entry = put(host, z, Op::ZONE_APPEND, start, 1, 9)?;
        entry.refused(Status::ZONE_IS_FULL, "an append to a full zone")
    })
}

fn zone_append_limit(host: &mut Host) -> Check {
    with_append(host)?;
    each(host, any, |host, z| {
        let (entry, page) = host.identify_raw(6, 0, CSI)?;
        entry.succeeds("Identify CNS 06h, CSI 02h")?;
        let page_size = PAGE << host.cap.mpsmin();
        let limit = match u8_at(&page, 0) {
            0 => host.controller()?.max_transfer(page_size),
            zasl => Some(page_size << zasl.min(40)),
        };
        let Some(limit) = limit.filter(|limit| *limit <= MOST) else {
            return not_applicable("neither ZASL nor MDTS is a limit of 16 MiB at most");
        };
        let blocks = limit / z.ns.block;
        if blocks >= 65536 || blocks > z.capacity {
            return not_applicable("the limit is beyond what a command or a zone has");
        }
        let entry = put(host, z, Op::ZONE_APPEND, z.start(1), blocks, 1)?;
        entry.succeeds("an append as large as ZASL")?;
        let entry = put(host, z, Op::ZONE_APPEND, z.start(2), blocks + 1, 1)?;
        entry.refused(Status::INVALID_FIELD, "an append larger than ZASL")?;
        is(host, z, 2, EMPTY, 0)
    })
}

// ---- Zone Management Send

fn zone_open_close(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        done(host, z, Zsa::OPEN, 1)?;
        is(host, z, 1, EXPLICIT, 0)?;
        write(host, z, z.start(1), 2, 1)?.succeeds("a write to an open zone")?;
        is(host, z, 1, EXPLICIT, 2)?;
        done(host, z, Zsa::CLOSE, 1)?;
        is(host, z, 1, CLOSED, 2)?;
        done(host, z, Zsa::CLOSE, 1)?;
        done(host, z, Zsa::OPEN, 1)?;
        is(host, z, 1, EXPLICIT, 2)?;
        done(host, z, Zsa::CLOSE, 1)?;
        write(host, z, z.start(1) + 2, 1, 2)?.succeeds("a write to a closed zone")?;
        is(host, z, 1, IMPLICIT, 3)?;
        done(host, z, Zsa::OPEN, 1)?;
        is(host, z, 1, EXPLICIT, 3)?;
        holds(host, z, z.start(1), 2, 1)
    })
}

fn zone_finish(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        write(host, z, z.start(2), 2, 1)?.succeeds("a write")?;
        done(host, z, Zsa::OPEN, 3)?;
        done(host, z, Zsa::OPEN, 4)?;
        done(host, z, Zsa::CLOSE, 4)?;
        for number in 1..5 {
            done(host, z, Zsa::FINISH, number)?;
            is(host, z, number, FULL, 0)?;
            let entry = write(host, z, z.start(number), 1, 9)?;
            entry.refused(Status::ZONE_IS_FULL, "a write to a zone that was finished")?;
        }
        holds(host, z, z.start(2), 2, 1)
    })
}

fn zone_reset(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        for number in [2, 4] {
            write(host, z, z.start(number), 2, 1)?.succeeds("a write")?;
        }
        done(host, z, Zsa::OPEN, 3)?;
        done(host, z, Zsa::CLOSE, 4)?;
        done(host, z, Zsa::FINISH, 5)?;
        for number in 1..6 {
            done(host, z, Zsa::RESET, number)?;
            is(host, z, number, EMPTY, 0)?;
            write(host, z, z.start(number), 1, 7)?.succeeds("a write to a zone that was reset")?;
            holds(host, z, z.start(number), 1, 7)?;
            done(host, z, Zsa::RESET, number)?;
        }
        Ok(())
    })
}

fn zone_transitions(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        write(host, z, z.start(2), 2, 1)?.succeeds("a write")?;
        done(host, z, Zsa::FINISH, 3)?;
        for (zsa, number, state, written) in [
            (Zsa::CLOSE, 1, EMPTY, 0),
            (Zsa::OFFLINE, 1, EMPTY, 0),
            (Zsa::OFFLINE, 2, IMPLICIT, 2),
            (Zsa::OPEN, 3, FULL, 0),
            (Zsa::CLOSE, 3, FULL, 0),
            (Zsa::OFFLINE, 3, FULL, 0),
        ] {
            let what = format!("{zsa} of a zone in state {state:x}h");
            let entry = send(host, z, zsa, number)?;
            entry.refused(Status::INVALID_ZONE_STATE_TRANSITION, &what)?;
            is(host, z, number, state, written)?;
        }
        Ok(())
    })
}

fn zone_select_all(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        let states = |host: &mut Host, wanted: [u8; 3], what: &str| {
            for (number, state) in (1..).zip(wanted) {
                let found = zone(host, z, number)?.state;
                same!(found, state, "zone {number} after {what}");
            }
            Ok(())
        };
        write(host, z, z.start(1), 2, 1)?.succeeds("a write")?;
        done(host, z, Zsa::OPEN, 2)?;
        // The LBA is no zone's first, and does not count.
        let all = |zsa: Zsa| send_command(z, zsa, z.start(1) + 1).dw(13, 0x100 | u32::from(zsa.0));
        host.io(all(Zsa::CLOSE))?.succeeds("Close Zone of all")?;
        states(host, [CLOSED, CLOSED, EMPTY], "Close Zone of all")?;
        host.io(all(Zsa::OPEN))?.succeeds("Open Zone of all")?;
        states(host, [EXPLICIT, EXPLICIT, EMPTY], "Open Zone of all")?;
        done(host, z, Zsa::CLOSE, 2)?;
        host.io(all(Zsa::FINISH))?.succeeds("Finish Zone of all")?;
        states(host, [FULL, FULL, EMPTY], "Finish Zone of all")?;
        host.io(all(Zsa::OFFLINE))?
            .succeeds("Offline Zone of all")?;
        states(host, [FULL, FULL, EMPTY], "Offline Zone of all")?;
        write(host, z, z.start(3), 1, 1)?.succeeds("a write")?;
        host.io(all(Zsa::RESET))?.succeeds("Reset Zone of all")?;
        states(host, [EMPTY; 3], "Reset Zone of all")?;
        for number in 1..4 {
            is(host, z, number, EMPTY, 0)?;
        }
        Ok(())
    })
}

fn zone_send_errors(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        for zsa in [Zsa(0), Zsa(0x55), Zsa(0xff)] {
            let entry = send(host, z, zsa, 1)?;
            entry.refused(Status::INVALID_FIELD, "a reserved action")?;
        }
        for zsa in [Zsa::OPEN, Zsa::FINISH, Zsa::RESET] {
            let inside = send_command(z, zsa, z.start(1) + 1);
            host.io(inside)?
                .refused(Status::INVALID_FIELD, "an LBA that is no zone's first")?;
            let behind = send_command(z, zsa, z.ns.blocks);
            host.io(behind)?
                .refused(Status::LBA_OUT_OF_RANGE, "an LBA behind the last zone")?;
        }
        is(host, z, 1, EMPTY, 0)
    })
}

fn zone_open_limit(host: &mut Host) -> Check {
    let limited = |z: &Zoned| {
        z.open
            .is_some_and(|open| u64::from(open) + 2 <= z.count.min(64))
    };
    each(host, limited, |host, z| {
        let open = u64::from(z.open.unwrap_or(0));
        for number in 0..open {
            done(host, z, Zsa::OPEN, number)?;
        }
        let too_many = match z.active == z.open {
            true => &[Status::TOO_MANY_OPEN_ZONES, Status::TOO_MANY_ACTIVE_ZONES][..],
            false => &[Status::TOO_MANY_OPEN_ZONES][..],
        };
        let entry = send(host, z, Zsa::OPEN, open)?;
        entry.expect_one(too_many, "Open Zone beyond MOR")?;
        let entry = write(host, z, z.start(open), 1, 1)?;
        entry.expect_one(too_many, "a write to an empty zone beyond MOR")?;
        is(host, z, open, EMPTY, 0)?;
        done(host, z, Zsa::FINISH, 0)?;
        // One that a write has opened is closed for another one.
        write(host, z, z.start(open), 1, 1)?.succeeds("a write that opens the last zone")?;
        if z.active.is_none_or(|active| u64::from(active) > open) {
            write(host, z, z.start(open + 1), 1, 1)?
                .succeeds("a write where a zone is implicitly open")?;
            is(host, z, open, CLOSED, 1)?;
        }
        Ok(())
    })
}

fn zone_active_limit(host: &mut Host) -> Check {
    let limited = |z: &Zoned| {
        let active = z.active.map(u64::from);
        active.is_some_and(|active| active + 2 <= z.count.min(64))
    };
    each(host, limited, |host, z| {
        let active = u64::from(z.active.unwrap_or(0));
        for number in 0..active {
            write(host, z, z.start(number), 1, 1)?.succeeds("a write to an empty zone")?;
            done(host, z, Zsa::CLOSE, number)?;
        }
        let entry = write(host, z, z.start(active), 1, 1)?;
        entry.expect(Status::TOO_MANY_ACTIVE_ZONES, "a write beyond MAR")?;
        let entry = send(host, z, Zsa::OPEN, active)?;
        entry.expect(Status::TOO_MANY_ACTIVE_ZONES, "Open Zone beyond MAR")?;
        is(host, z, active, EMPTY, 0)?;
        done(host, z, Zsa::FINISH, 0)?;
        write(host, z, z.start(active), 1, 1)?.succeeds("a write after Finish Zone")?;
        done(host, z, Zsa::RESET, 1)?;
        write(host, z, z.start(active + 1), 1, 1)?.succeeds("a write after Reset Zone")
    })
}

// ---- extensions and changes

fn zone_extension(host: &mut Host) -> Check {
    each(
        host,
        |z| z.extension > 0,
        |host, z| {
            let bytes = pattern(5, z.extension as usize);
            let at = host.alloc(z.extension)?;
            host.put(at, &bytes)?;
            let (prp1, prp2) = host.prps(at, z.extension)?;
            let set = send_command(z, Zsa::SET_DESCRIPTOR_EXTENSION, z.start(1)).prp(prp1, prp2);
            host.io(set)?.succeeds("Set Zone Descriptor Extension")?;
            is(host, z, 1, CLOSED, 0)?;
            let room = 128 + z.extension;
            let at = host.alloc(room)?;
            let prps = host.prps(at, room)?;
            let command = receive(z, z.start(1), room, 1, prps);
            host.io(command)?.succeeds("Extended Report Zones")?;
            let data = host.get(at, room as usize)?;
            require!(
                data.get(128..) == Some(&bytes[..]),
                "the extension in the report differs"
            );
            Ok(())
        },
    )
}

fn zone_no_extension(host: &mut Host) -> Check {
    each(
        host,
        |z| z.extension == 0,
        |host, z| {
            let at = host.alloc(PAGE)?;
            let set = send_command(z, Zsa::SET_DESCRIPTOR_EXTENSION, z.start(1)).prp(at, 0);
            host.io(set)?
                .refused(Status::INVALID_FIELD, "Set Zone Descriptor Extension")?;
            is(host, z, 1, EMPTY, 0)
        },
    )
}

fn zone_changed_list(host: &mut Host) -> Check {
    enable(host)?;
    let all = listed(host)?;
    applies_if(!all.is_empty(), "there is no zoned namespace")?;
    let oaes = u32_at(&host.controller()?.0, 92);
    applies_if(oaes >> 27 & 1 != 0, "OAES bit 27 is 0")?;
    for nsid in all {
        let z = zoned(host, nsid)?;
        let (entry, page) = host.log_raw(0xbf, nsid, PAGE, 0, 0)?;
        entry.succeeds("Get Log Page BFh")?;
        let count = usize::from(u16_at(&page, 0));
        let listed = count.min(511);
        let starts = page.chunks_exact(8).skip(1).take(listed);
        let starts: Vec<u64> = starts.map(|chunk| u64_at(chunk, 0)).collect();
        let right = starts
            .iter()
            .all(|start| start % z.size == 0 && *start < z.ns.blocks);
        require!(right, "{starts:x?} are no zones' first blocks");
        let mut once = starts.clone();
        once.sort_unstable();
        once.dedup();
        same!(
            once.len() as u64,
            starts.len() as u64,
            "zones that are listed once"
        );
    }
    Ok(())
}

// ---- Zone Random Write Areas

fn zrwa_open(host: &mut Host) -> Check {
    each(host, areas, |host, z| {
        open_with_area(host, z, 1)?.succeeds("Open Zone with ZRWAA")?;
        is(host, z, 1, EXPLICIT, 0)?;
        same!(zone(host, z, 1)?.attributes & ZRWAV, ZRWAV, "ZRWAV");
        write(host, z, z.start(2), 1, 1)?.succeeds("a write")?;
        let entry = open_with_area(host, z, 2)?;
        let invalid = Status::INVALID_ZONE_OPERATION_REQUEST;
        entry.refused(invalid, "Open Zone with ZRWAA of a zone that is written")?;
        same!(
            zone(host, z, 2)?.attributes & ZRWAV,
            0u8,
            "ZRWAV of that zone"
        );
        Ok(())
    })
}

fn zrwa_writes(host: &mut Host) -> Check {
    each(host, areas, |host, z| {
        let (start, (_, size, _)) = (z.start(1), z.areas);
        applies_if(size >= 4, "ZRWASZ is less than 4 blocks")?;
        open_with_area(host, z, 1)?.succeeds("Open Zone with ZRWAA")?;
        for (seed, offset) in [(1, size - 1), (2, 0), (3, 2), (4, 0), (5, size - 1)] {
            let what = format!("a write to block {offset} of an area of {size}");
            write(host, z, start + offset, 1, seed)?.succeeds(&what)?;
            is(host, z, 1, EXPLICIT, 0)?;
        }
        for (seed, offset) in [(4, 0), (3, 2), (5, size - 1)] {
            holds(host, z, start + offset, 1, seed)?;
        }
        Ok(())
    })
}

fn zrwa_implicit_flush(host: &mut Host) -> Check {
    each(host, areas, |host, z| {
        let (start, (_, size, granularity)) = (z.start(1), z.areas);
        let roomy = z.capacity > 3 * size + granularity;
        applies_if(roomy, "a zone has no room for three areas")?;
        open_with_area(host, z, 1)?.succeeds("Open Zone with ZRWAA")?;
        write(host, z, start, 1, 1)?.succeeds("a write in the area")?;
        write(host, z, start + size, 1, 2)?.succeeds("a write behind the area")?;
        is(host, z, 1, EXPLICIT, granularity)?;
        let before = write(host, z, start + granularity - 1, 1, 9)?;
        let invalid = Status::ZONE_INVALID_WRITE;
        before.refused(invalid, "a write before the write pointer")?;
        let beyond = write(host, z, start + granularity + 2 * size, 1, 9)?;
        beyond.refused(invalid, "a write beyond twice the area")?;
        is(host, z, 1, EXPLICIT, granularity)?;
        let last = start + granularity + 2 * size - 1;
        write(host, z, last, 1, 3)?.succeeds("a write to the last block of twice the area")?;
        is(host, z, 1, EXPLICIT, granularity + size)?;
        holds(host, z, start, 1, 1)?;
        holds(host, z, start + size, 1, 2)?;
        holds(host, z, last, 1, 3)
    })
}

fn zrwa_explicit_flush(host: &mut Host) -> Check {
    let flushes = |z: &Zoned| z.has_areas() && z.explicit_flush;
    each(host, flushes, |host, z| {
        let (start, (_, size, granularity)) = (z.start(1), z.areas);
        let flush = |lba: u64| send_command(z, Zsa::FLUSH_ZRWA, lba);
        let invalid = Status::INVALID_ZONE_OPERATION_REQUEST;
        host.io(flush(start))?
            .refused(invalid, "a flush of a zone without an area")?;
        open_with_area(host, z, 1)?.succeeds("Open Zone with ZRWAA")?;
        write(host, z, start, 1, 1)?.succeeds("a write in the area")?;
        if granularity > 1 {
            host.io(flush(start + granularity - 2))?.refused(
                Status::INVALID_FIELD,
                "a flush of a part of the granularity",
            )?;
        }
        host.io(flush(start + size))?
            .refused(invalid, "a flush beyond the area")?;
        is(host, z, 1, EXPLICIT, 0)?;
        host.io(flush(start + granularity - 1))?
            .succeeds("a flush of the granularity")?;
        is(host, z, 1, EXPLICIT, granularity)?;
        host.io(flush(start + granularity - 1))?
            .refused(invalid, "a flush before the write pointer")?;
        host.io(flush(start + granularity + size - 1))?
            .succeeds("a flush of all of the area")?;
        is(host, z, 1, EXPLICIT, granularity + size)?;
        holds(host, z, start, 1, 1)
    })
}

fn zrwa_append(host: &mut Host) -> Check {
    with_append(host)?;
    each(host, areas, |host, z| {
        open_with_area(host, z, 1)?.succeeds("Open Zone with ZRWAA")?;
        let entry = put(host, z, Op::ZONE_APPEND, z.start(1), 1, 9)?;
        let invalid = Status::INVALID_ZONE_OPERATION_REQUEST;
        entry.refused(invalid, "an append to a zone with an area")?;
        is(host, z, 1, EXPLICIT, 0)
    })
}

fn zrwa_lasts(host: &mut Host) -> Check {
    each(host, areas, |host, z| {
        let has = |host: &mut Host, wanted: u8, what: &str| {
            same!(zone(host, z, 1)?.attributes & ZRWAV, wanted, "ZRWAV {what}");
            Ok(())
        };
        open_with_area(host, z, 1)?.succeeds("Open Zone with ZRWAA")?;
        done(host, z, Zsa::CLOSE, 1)?;
        has(host, ZRWAV, "of the closed zone")?;
        write(host, z, z.start(1) + 1, 1, 1)?.succeeds("a write in a closed zone's area")?;
        is(host, z, 1, IMPLICIT, 0)?;
        has(host, ZRWAV, "of the zone that is open again")?;
        done(host, z, Zsa::FINISH, 1)?;
        has(host, 0, "of the finished zone")?;
        done(host, z, Zsa::RESET, 1)?;
        has(host, 0, "of the zone that was reset")
    })
}

fn zrwa_limit(host: &mut Host) -> Check {
    let limited = |z: &Zoned| {
        let more = |limit: Option<u32>| limit.is_none_or(|limit| u64::from(limit) > z.areas.0);
        z.has_areas() && z.areas.0 + 2 <= z.count.min(64) && more(z.open) && more(z.active)
    };
    each(host, limited, |host, z| {
        for number in 0..z.areas.0 {
            open_with_area(host, z, number)?.succeeds("Open Zone with ZRWAA")?;
        }
        let next = z.areas.0;
        let entry = open_with_area(host, z, next)?;
        let none = Status::ZRWA_RESOURCES_UNAVAILABLE;
        entry.expect(none, "Open Zone with ZRWAA beyond NUMZRWA")?;
        is(host, z, next, EMPTY, 0)?;
        done(host, z, Zsa::RESET, 0)?;
        open_with_area(host, z, next)?.succeeds("Open Zone with ZRWAA after Reset Zone")?;
        done(host, z, Zsa::FINISH, next)?;
        open_with_area(host, z, 0)?.succeeds("Open Zone with ZRWAA after Finish Zone")
    })
}
