//! Zoned namespaces (Zoned Namespace Command Set 1.1): discovery, reports and writes for the cases.

use crate::bytes::{pattern, u8_at, u16_at, u32_at, u64_at};
use crate::host::{Enable, Host, PAGE, admin, nvm};
use crate::info::Namespace;
use crate::verdict::{Check, Expect, applies_if, not_applicable, require, same};
use nvme::cmd::zone::Zsa;
use nvme::{AdminOpcode, NvmOpcode as Op, regs};
use test_host::{Command, Completion};

/// Zone state Empty, as in bits 7:4 of ZS; the other states follow.
pub(super) const EMPTY: u8 = 0x1;
pub(super) const IMPLICIT: u8 = 0x2;
pub(super) const EXPLICIT: u8 = 0x3;
pub(super) const CLOSED: u8 = 0x4;
pub(super) const FULL: u8 = 0xe;

/// Identifier of the Zoned Namespace Command Set, as in dword 11 of Identify.
pub(super) const CSI: u32 = 2 << 24;
/// Zone attribute bit: the zone has a Zone Random Write Area.
pub(super) const ZRWAV: u8 = 1 << 3;
/// Maximum size in bytes of a zone that the cases write completely.
pub(super) const MAX_WRITTEN_ZONE: u64 = 16 << 20;

/// Zoned namespace that the cases test.
pub(super) struct Zoned {
    pub(super) ns: Namespace,
    /// Zone size in blocks.
    pub(super) size: u64,
    pub(super) count: u64,
    /// Capacity in blocks of the first zone that can be written.
    pub(super) capacity: u64,
    /// Maximum number of active zones, and of open ones; `None` for no limit.
    pub(super) active: Option<u32>,
    pub(super) open: Option<u32>,
    pub(super) ozcs: u16,
    /// Size of a zone descriptor extension in bytes.
    pub(super) extension: u64,
    /// Zone Random Write Areas: number, size in blocks, and flush granularity in blocks.
    pub(super) areas: (u64, u64, u64),
    pub(super) explicit_flush: bool,
}

/// Descriptor of a zone, as Zone Management Receive reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Zone {
    pub(super) kind: u8,
    pub(super) state: u8,
    pub(super) attributes: u8,
    pub(super) capacity: u64,
    pub(super) start: u64,
    pub(super) pointer: u64,
}

impl Zoned {
    pub(super) fn start(&self, zone: u64) -> u64 {
        zone * self.size
    }

    pub(super) fn has_areas(&self) -> bool {
        self.ozcs >> 1 & 1 != 0
    }
}

/// Enables the controller with all I/O command sets, and creates queue pair 1.
pub(super) fn enable(host: &mut Host) -> Check {
    applies_if(host.cap.css().iocss(), "CAP.CSS bit 6 is 0")?;
    let mut how = Enable::default();
    how.cc = how.cc.with_css(regs::CcCss::ALL_SUPPORTED);
    how.cc = how.cc.with_mps(host.cap.mpsmin());
    host.enable_with(how)?;
    let entries = host.io_entries();
    host.create_pair(1, entries)
}

/// Returns the NSIDs of the active zoned namespaces.
pub(super) fn listed(host: &mut Host) -> Check<Vec<u32>> {
    let (entry, page) = host.identify_raw(7, 0, CSI)?;
    if !entry.status().is_success() {
        return not_applicable("the controller does not have the command set");
    }
    let all = page.chunks_exact(4).map(|chunk| u32_at(chunk, 0));
    Ok(all.take_while(|nsid| *nsid != 0).collect())
}

/// Enables the controller and returns the NSIDs of its zoned namespaces; does not apply without
/// any.
pub(super) fn present(host: &mut Host) -> Check<Vec<u32>> {
    enable(host)?;
    let all = listed(host)?;
    applies_if(!all.is_empty(), "there is no zoned namespace")?;
    Ok(all)
}

pub(super) fn zoned(host: &mut Host, nsid: u32) -> Check<Zoned> {
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

/// Executes a check on every writable zoned namespace, after emptying its zones.
pub(super) fn each(
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

/// Accepts any zoned namespace.
pub(super) fn any(_: &Zoned) -> bool {
    true
}

/// Returns whether the zones are small enough to be written completely.
pub(super) fn small(z: &Zoned) -> bool {
    z.capacity * z.ns.block <= MAX_WRITTEN_ZONE
}

pub(super) fn areas(z: &Zoned) -> bool {
    z.has_areas()
}

pub(super) fn send_command(z: &Zoned, zsa: Zsa, slba: u64) -> Command {
    nvm(Op::ZONE_MANAGEMENT_SEND, z.ns.nsid)
        .slba(slba)
        .dw(13, zsa.0.into())
}

pub(super) fn send(host: &mut Host, z: &Zoned, zsa: Zsa, zone: u64) -> Check<Completion> {
    host.io(send_command(z, zsa, z.start(zone)))
}

pub(super) fn done(host: &mut Host, z: &Zoned, zsa: Zsa, zone: u64) -> Check {
    send(host, z, zsa, zone)?.succeeds(&format!("{zsa} of zone {zone}"))
}

pub(super) fn send_all(host: &mut Host, z: &Zoned, zsa: Zsa) -> Check<Completion> {
    host.io(send_command(z, zsa, 0).dw(13, 1 << 8 | u32::from(zsa.0)))
}

/// Opens a zone with a Zone Random Write Area (Open Zone with ZRWAA).
pub(super) fn open_with_area(host: &mut Host, z: &Zoned, zone: u64) -> Check<Completion> {
    let command = send_command(z, Zsa::OPEN, z.start(zone));
    host.io(command.dw(13, 1 << 9 | u32::from(Zsa::OPEN.0)))
}

pub(super) fn receive(z: &Zoned, slba: u64, bytes: u64, cdw13: u32, at: (u64, u64)) -> Command {
    nvm(Op::ZONE_MANAGEMENT_RECEIVE, z.ns.nsid)
        .slba(slba)
        .prp(at.0, at.1)
        .dw(12, (bytes / 4 - 1) as u32)
        .dw(13, cdw13)
}

/// Reads a report with a buffer of limited size; returns its number of zones and its descriptors.
pub(super) fn report(
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

pub(super) fn zone(host: &mut Host, z: &Zoned, zone: u64) -> Check<Zone> {
    let (_, zones) = report(host, z, z.start(zone), 128, 0)?;
    let first = zones.into_iter().next();
    first.ok_or_else(|| {
        let text = format!("the report from zone {zone} on is empty");
        crate::verdict::Verdict::Failed(text)
    })
}

/// Checks that a zone has this state, and the write pointer `written` blocks after its start.
pub(super) fn is(host: &mut Host, z: &Zoned, number: u64, state: u8, written: u64) -> Check {
    let found = zone(host, z, number)?;
    same!(found.state, state, "the state of zone {number}");
    if state != FULL {
        let pointer = z.start(number) + written;
        same!(found.pointer, pointer, "the write pointer of zone {number}");
    }
    Ok(())
}

pub(super) fn write(
    host: &mut Host,
    z: &Zoned,
    slba: u64,
    blocks: u64,
    seed: u64,
) -> Check<Completion> {
    put(host, z, Op::WRITE, slba, blocks, seed)
}

pub(super) fn put(
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

pub(super) fn holds(host: &mut Host, z: &Zoned, slba: u64, blocks: u64, seed: u64) -> Check {
    let bytes = pattern(seed, (blocks * z.ns.block) as usize);
    host.holds(&z.ns, slba, &bytes, "a zone")
}

/// Writes zone `number` from LBA `from` on, until `left` blocks of its capacity remain.
pub(super) fn fill(host: &mut Host, z: &Zoned, number: u64, mut from: u64, left: u64) -> Check {
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

/// Returns the Commands Supported and Effects log page of the Zoned Namespace Command Set.
pub(super) fn effects(host: &mut Host) -> Check<Vec<u8>> {
    let at = host.alloc(PAGE)?;
    let command = admin(AdminOpcode::GET_LOG_PAGE, 0)
        .prp(at, 0)
        .dw(10, 1023 << 16 | 5)
        .dw(14, CSI);
    host.admin(command)?.succeeds("Get Log Page 05h, CSI 02h")?;
    host.get(at, PAGE as usize)
}

/// Ends the case as not applicable if Zone Append is not supported.
pub(super) fn with_append(host: &mut Host) -> Check {
    present(host)?;
    let effects = u32_at(&effects(host)?, 1024 + 4 * usize::from(Op::ZONE_APPEND.0));
    applies_if(effects & 1 != 0, "there is no Zone Append")?;
    host.disable()
}
