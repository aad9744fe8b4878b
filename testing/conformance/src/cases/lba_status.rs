//! Get LBA Status, the LBA Status Information log page and its feature (NVM Command Set 1.1, 4.2.1,
//! 4.1.4.5, 4.1.3.5).

use crate::bytes::{u8_at, u16_at, u32_at, u64_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, PAGE, admin, nvm};
use crate::info::Namespace;
use crate::verdict::{Check, Expect, applies_if, require};
use nvme::{AdminOpcode as Op, NvmOpcode, Status};
use std::fmt::Debug;
use test_host::Command;

/// Action Type (ATYPE) of Get LBA Status: return tracked LBAs; [`SCAN`] would scan first.
const TRACKED: u32 = 0x11;
const SCAN: u32 = 0x10;

cases! {
    lba_status_range, ["1-n"], If("OACS bit 9 and ONCS bit 1"), Io, "NVM Command Set 1.1, 4.2.1",
        "Get LBA Status returns blocks that Write Uncorrectable has marked, cut to the range, until \
         they are written";
    lba_status_room, ["1-n"], If("OACS bit 9 and ONCS bit 1"), Io, "NVM Command Set 1.1, 4.2.1",
        "descriptors for which MNDW has no room are not returned, and CMPC says so";
    lba_status_invalid, ["1-n"], If("OACS bit 9"), Admin, "NVM Command Set 1.1, 4.2.1",
        "a reserved Action Type is Invalid Field in Command, a Starting LBA behind the end LBA Out \
         of Range";
    lba_status_log, ["1-n"], If("OACS bit 9 and ONCS bit 1"), Io,
        "NVM Command Set 1.1, 4.1.4.5, 5.2.1",
        "the log page has marked blocks, stays as it is while it is read with Retain Asynchronous \
         Event, and counts what is new";
    lba_status_interval, ["1-n"], If("OACS bit 9"), Admin, "NVM Command Set 1.1, 4.1.3.5, 5.2.1",
        "the Report Interval can be set, the Poll Interval cannot; OAES has the alert";
}

fn equal<T: PartialEq + Debug>(got: T, expected: T, what: &str) -> Check {
    require!(got == expected, "{what}: {got:?}, not {expected:?}");
    Ok(())
}

fn offered(host: &mut Host) -> Check {
    applies_if(
        host.controller()?.oacs(9),
        "OACS bit 9 is 0: there is no Get LBA Status",
    )
}

fn with_marks(host: &mut Host) -> Check<Namespace> {
    offered(host)?;
    applies_if(
        host.controller()?.oncs(1),
        "ONCS bit 1 is 0: there is no Write Uncorrectable",
    )?;
    host.namespace()
}

fn mark(host: &mut Host, ns: &Namespace, slba: u64, blocks: u32) -> Check {
    let command = nvm(NvmOpcode::WRITE_UNCORRECTABLE, ns.nsid);
    host.io(command.slba(slba).dw(12, blocks - 1))?
        .succeeds("Write Uncorrectable")
}

fn heal(host: &mut Host, ns: &Namespace, slba: u64, blocks: u64) -> Check {
    host.write(ns, slba, &vec![0x5a; (blocks * ns.block) as usize])
}

fn ask(nsid: u32, atype: u32, (slba, rl): (u64, u32), bytes: u32, at: u64) -> Command {
    admin(Op::GET_LBA_STATUS, nsid)
        .slba(slba)
        .dw(12, bytes / 4 - 1)
        .dw(13, atype << 24 | rl)
        .prp(at, 0)
}

/// Returns the reported ranges as far as they fit, and the completion condition (CMPC).
fn status(
    host: &mut Host,
    ns: &Namespace,
    atype: u32,
    range: (u64, u32),
    bytes: u32,
) -> Check<(Vec<(u64, u32)>, u8)> {
    let at = host.alloc(PAGE)?;
    host.admin(ask(ns.nsid, atype, range, bytes, at))?
        .succeeds("Get LBA Status")?;
    let list = host.get(at, PAGE as usize)?;
    let mut found = Vec::new();
    for entry in list
        .get(8..)
        .unwrap_or_default()
        .chunks_exact(16)
        .take(u32_at(&list, 0) as usize)
    {
        equal(u8_at(entry, 13) & 7, 3, "LBARS of marked blocks")?;
        found.push((u64_at(entry, 0), u32_at(entry, 8) + 1));
    }
    Ok((found, u8_at(&list, 4)))
}

fn lba_status_range(host: &mut Host) -> Check {
    let ns = with_marks(host)?;
    heal(host, &ns, 1000, 64)?;
    mark(host, &ns, 1010, 4)?;
    mark(host, &ns, 1030, 2)?;
    for atype in [TRACKED, SCAN] {
        let all = status(host, &ns, atype, (1000, 64), 4096)?;
        equal(all.0, vec![(1010, 4), (1030, 2)], "the marked ranges")?;
        equal(all.1, 2, "CMPC: complete")?;
        let part = status(host, &ns, atype, (1012, 19), 4096)?;
        equal(part.0, vec![(1012, 2), (1030, 1)], "those of a range")?;
    }
    heal(host, &ns, 1011, 20)?;
    let left = status(host, &ns, TRACKED, (1000, 64), 4096)?;
    equal(left.0, vec![(1010, 1), (1031, 1)], "what was not written")?;
    heal(host, &ns, 1000, 64)?;
    let left = status(host, &ns, TRACKED, (1000, 64), 4096)?;
    equal(left.0.len(), 0, "ranges after all was written")?;
    Ok(())
}

fn lba_status_room(host: &mut Host) -> Check {
    let ns = with_marks(host)?;
    heal(host, &ns, 1000, 64)?;
    for at in [1000, 1010, 1020] {
        mark(host, &ns, at, 1)?;
    }
    for (bytes, count, cmpc) in [(8, 0, 1), (40, 2, 1), (52, 2, 1), (56, 3, 2)] {
        let found = status(host, &ns, TRACKED, (1000, 64), bytes)?;
        equal(
            found.0.len(),
            count,
            &format!("descriptors in {bytes} bytes"),
        )?;
        equal(found.1, cmpc, &format!("CMPC with {bytes} bytes"))?;
    }
    heal(host, &ns, 1000, 64)
}

fn lba_status_invalid(host: &mut Host) -> Check {
    offered(host)?;
    let ns = host.namespace()?;
    let at = host.alloc(PAGE)?;
    for atype in [0, 1, 0x0f, 0x12, 0xff] {
        host.admin(ask(ns.nsid, atype, (0, 0), 4096, at))?
            .refused(Status::INVALID_FIELD, &format!("Action Type {atype:#x}"))?;
    }
    host.admin(ask(ns.nsid, TRACKED, (ns.blocks, 0), 4096, at))?
        .expect(Status::LBA_OUT_OF_RANGE, "a Starting LBA behind the end")
}

/// Returns the log page's generation counter, and whether it lists this block of the namespace.
fn log(host: &mut Host, rae: bool, nsid: u32, lba: u64) -> Check<(u16, bool)> {
    let at = host.alloc(PAGE)?;
    let numd = (PAGE / 4 - 1) as u32;
    let command = admin(Op::GET_LOG_PAGE, 0xffff_ffff)
        .dw(10, 0x0e | u32::from(rae) << 15 | numd << 16)
        .prp(at, 0);
    host.admin(command)?.succeeds("the LBA Status log page")?;
    let page = host.get(at, PAGE as usize)?;
    let (mut found, mut place) = (false, 16);
    for _ in 0..u32_at(&page, 4) {
        let (element, count) = (u32_at(&page, place), u32_at(&page, place + 4));
        require!(
            count < 256,
            "{count} ranges do not fit the page that was read"
        );
        place += 16;
        for _ in 0..count {
            let (start, blocks) = (
                u64_at(&page, place),
                u64::from(u32_at(&page, place + 8)) + 1,
            );
            found |= element == nsid && (start..start + blocks).contains(&lba);
            place += 16;
        }
    }
    Ok((u16_at(&page, 14), found))
}

fn lba_status_log(host: &mut Host) -> Check {
    let ns = with_marks(host)?;
    heal(host, &ns, 1000, 64)?;
    let before = log(host, false, ns.nsid, 1000)?;
    equal(before.1, false, "a block that was written")?;
    mark(host, &ns, 1000, 2)?;
    let first = log(host, true, ns.nsid, 1001)?;
    equal(
        first,
        (before.0.wrapping_add(1), true),
        "LSGC, and the block",
    )?;
    mark(host, &ns, 1020, 1)?;
    let held = log(host, true, ns.nsid, 1020)?;
    equal(held, (first.0, false), "the page while it is read")?;
    let next = log(host, false, ns.nsid, 1020)?;
    equal(next, (first.0.wrapping_add(1), true), "what came meanwhile")?;
    heal(host, &ns, 1000, 64)?;
    let after = log(host, false, ns.nsid, 1000)?;
    equal(after, (next.0, false), "what is written is not in it")?;
    Ok(())
}

fn lba_status_interval(host: &mut Host) -> Check {
    offered(host)?;
    let oaes = u32_at(&host.controller()?.0, 92);
    equal(oaes >> 13 & 1, 1, "OAES bit 13")?;
    let get = admin(Op::GET_FEATURES, 0).dw(10, 0x15);
    let first = host.admin(get)?;
    first.succeeds("Get Features")?;
    let poll = first.dw0() >> 16;
    let wanted = (poll.max(1) * 3) & 0xffff;
    let set = admin(Op::SET_FEATURES, 0)
        .dw(10, 0x15)
        .dw(11, (!poll << 16) | wanted);
    let done = host.admin(set)?;
    done.succeeds("Set Features")?;
    equal(done.dw0() >> 16, poll, "the Poll Interval is not changed")?;
    let now = host.admin(get)?;
    equal(now.dw0(), done.dw0(), "what was set is what is there")?;
    let back = admin(Op::SET_FEATURES, 0).dw(10, 0x15).dw(11, first.dw0());
    host.admin(back)?.succeeds("Set Features back")
}
