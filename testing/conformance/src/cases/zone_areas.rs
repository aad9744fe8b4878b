//! Zone Random Write Areas (Zoned Namespace Command Set 1.1).

use super::zoned::{
    EMPTY, EXPLICIT, IMPLICIT, ZRWAV, Zoned, areas, done, each, holds, is, open_with_area, put,
    send_command, with_append, write, zone,
};
use crate::case::{Need::*, cases};
use crate::host::Host;
use crate::verdict::{Check, Expect, applies_if, same};
use nvme::cmd::zone::Zsa;
use nvme::{NvmOpcode as Op, Status};

cases! {
    zrwa_open, [], If("OZCS bit 1"), Disabled, "ZNS 1.1, Zone Random Write Area",
        "an empty zone is opened with an area, which its descriptor says; one that is active is \
         Invalid Zone Operation Request";
    zrwa_writes, [], If("OZCS bit 1"), Disabled, "ZNS 1.1, Zone Random Write Area",
        "within the area blocks are written in any order, and again, and the write pointer stays";
    zrwa_implicit_flush, [], If("OZCS bit 1"), Disabled, "ZNS 1.1, Zone Random Write Area",
        "a write that ends behind the area moves the write pointer by the granularity, and \
         one beyond twice the area is Zone Invalid Write";
    zrwa_explicit_flush, [], If("ZRWACAP bit 0"), Disabled, "ZNS 1.1, Zone Random Write Area",
        "an explicit flush moves the write pointer; one that is no multiple of the granularity, \
         or not of the area, is refused";
    zrwa_append, [], If("OZCS bit 1"), Disabled, "ZNS 1.1, Zone Random Write Area",
        "an append to a zone with an area is Invalid Zone Operation Request";
    zrwa_lasts, [], If("OZCS bit 1"), Disabled, "ZNS 1.1, Zone Random Write Area",
        "a closed zone keeps its area; one that is finished or reset has none";
    zrwa_limit, [], If("OZCS bit 1"), Disabled, "ZNS 1.1, Zone Random Write Area",
        "no more zones have areas than NUMZRWA says; Reset Zone releases one";
}

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
