//! Reports of zones, their descriptor extensions, and the log page of changed zones (Zoned
//! Namespace Command Set 1.1).

use super::zoned::{
    CLOSED, EMPTY, EXPLICIT, FULL, IMPLICIT, any, done, each, is, present, receive, report,
    send_command, write, zoned,
};
use crate::bytes::{pattern, u16_at, u32_at, u64_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, PAGE};
use crate::verdict::{Check, Expect, applies_if, require, same};
use nvme::Status;
use nvme::cmd::zone::Zsa;

cases! {
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
    zone_extension, [], If("ZDES"), Disabled, "ZNS 1.1, 5.3",
        "the extension that an empty zone is given is in extended reports, and closes it";
    zone_no_extension, [], If("ZNS"), Disabled, "ZNS 1.1, 5.3",
        "without extensions, to set one is Invalid Field in Command";
    zone_changed_list, [], If("OAES bit 27"), Disabled, "ZNS 1.1, 4.1.4",
        "the Changed Zone List log page has zones' beginnings, each once";
}

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
            // Further zones may be worn out.
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
    let all = present(host)?;
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
