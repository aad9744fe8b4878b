//! Writes to zones, and reads from them (Zoned Namespace Command Set 1.1).

use super::zoned::{
    CSI, EMPTY, FULL, IMPLICIT, MAX_WRITTEN_ZONE, any, each, effects, enable, fill, holds, is, put,
    small, with_append, write,
};
use crate::bytes::{pattern, u8_at, u32_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, PAGE, nvm};
use crate::verdict::{Check, Expect, applies_if, not_applicable, same};
use nvme::{NvmOpcode as Op, Status};

cases! {
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
}

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
        if z.ozcs & 1 != 0 {
            entry.succeeds("a read over a zone's border, which OZCS bit 0 allows")?
        } else {
            entry.expect(Status::ZONED_BOUNDARY_ERROR, "a read over a zone's border")?
        }
        let behind = host.rw_command(Op::READ, &z.ns, z.ns.blocks - 1, 2, at)?;
        host.io(behind)?
            .refused(Status::LBA_OUT_OF_RANGE, "a read behind the last zone")
    })
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
            let at = u64::from(entry.dw1()) << 32 | u64::from(entry.dw0());
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
        let Some(limit) = limit.filter(|limit| *limit <= MAX_WRITTEN_ZONE) else {
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
