//! What the host is told of blocks that it cannot read.

use crate::common::*;
use crate::uncorrectable::{die, mark, read, write};
use nvme::aen::AsyncEvent;
use nvme::cmd::admin::{GetLbaStatusCdw13, LbaStatusAction};
use nvme::feature::{AsyncEventConfig, Fid, LbaStatusAttributes};
use nvme::log::{
    LbaRangeDescriptor, LbaRangeStatus, LbaStatusCondition, LbaStatusDescriptor, LbaStatusElement,
    LbaStatusHeader, LbaStatusListHeader, Lid,
};
use nvme::{AdminOpcode, Command, Completion, NvmOpcode, Status};
use std::time::Duration;
use zerocopy::FromBytes;

const MIB: u64 = 1 << 20;
const LOG: u8 = Lid::LBA_STATUS.0;

/// Get LBA Status of `rl` blocks, into so many bytes.
fn command(nsid: u32, slba: u64, rl: u16, atype: LbaStatusAction, bytes: u32) -> Command {
    let mut command = Command::new(AdminOpcode::GET_LBA_STATUS.0, 0, nsid);
    command.set_slba(slba);
    command.cdw12 = (bytes / 4 - 1).into();
    let cdw13 = GetLbaStatusCdw13::new().with_rl(rl).with_atype(atype);
    command.cdw13 = cdw13.into_bits().into();
    command.set_prps(PAGE, 0);
    command
}

/// The descriptors of namespace 1, and whether these are all.
pub fn status(h: &mut Host, slba: u64, rl: u16, bytes: u32) -> (Vec<(u64, u32)>, bool) {
    h.write(PAGE, &[0xee; 4096]);
    let done = h.admin(command(1, slba, rl, LbaStatusAction::TRACKED, bytes));
    assert_eq!(done.status(), Status::SUCCESS);
    let list = h.read(PAGE, 4096);
    let header = LbaStatusListHeader::read_from_bytes(&list[..8]).unwrap();
    let count = header.nlsd.get() as usize;
    let entries = list[8..].chunks_exact(16).take(count).map(|entry| {
        let entry = LbaStatusDescriptor::read_from_bytes(entry).unwrap();
        assert_eq!(entry.stas, LbaRangeStatus::WRITE_UNCORRECTABLE);
        (entry.dslba.get(), entry.nlb_z.get() + 1)
    });
    assert!(list[8 + 16 * count..].iter().all(|byte| *byte == 0xee));
    (
        entries.collect(),
        header.cmpc == LbaStatusCondition::COMPLETE,
    )
}

#[test]
fn identify_and_logs_report_write_uncorrectable() {
    let mut h = Host::ready();
    let page = h.identify(1, 0, 0).1;
    assert_eq!(page[520] & 2, 2, "ONCS");
    assert_eq!(page[257] & 2, 2, "OACS");
    assert_eq!(page[93] & 0x20, 0x20, "OAES");
    let page = h.identify(6, 0, 0).1;
    assert_eq!((page[2], page[1], page[18]), (0, 0, 0), "WUSL, WZSL, AOCS");
}

#[test]
fn get_lba_status_returns_marked_blocks() {
    let mut h = Host::ready_with(vec![ns(1, mem(MIB), 512), ns(2, mem(MIB), 512)]);
    assert_eq!(status(&mut h, 0, 0, 4096), (vec![], true));
    for (slba, blocks) in [(10, 3), (13, 2), (100, 1), (2040, 8)] {
        assert_eq!(mark(&mut h, slba, blocks), Status::SUCCESS);
    }
    let all = vec![(10, 5), (100, 1), (2040, 8)];
    assert_eq!(status(&mut h, 0, 0, 4096), (all.clone(), true));
    assert_eq!(status(&mut h, 0, 2048, 4096), (all, true));
    // What is not in the range is cut off.
    assert_eq!(status(&mut h, 12, 88, 4096), (vec![(12, 3)], true));
    assert_eq!(status(&mut h, 0, 11, 4096), (vec![(10, 1)], true));
    assert_eq!(status(&mut h, 15, 85, 4096), (vec![], true));
    assert_eq!(status(&mut h, 2047, 1, 4096), (vec![(2047, 1)], true));
    // As many as there is room for.
    for (bytes, count, complete) in [(8, 0, false), (24, 1, false), (36, 1, false), (56, 3, true)] {
        let (found, all) = status(&mut h, 0, 0, bytes);
        assert_eq!((found.len(), all), (count, complete), "{bytes}");
    }
    // Not even for the header.
    let done = h.admin(command(1, 0, 0, LbaStatusAction::SCAN, 4));
    assert_eq!(done.status(), Status::SUCCESS);
    let found = h.read(PAGE, 8);
    assert_eq!(u32::from_le_bytes(found[..4].try_into().unwrap()), 0);
    // What is written is marked no more.
    assert_eq!(write(&mut h, 11, 2), Status::SUCCESS);
    let left = vec![(10, 1), (13, 2), (100, 1)];
    assert_eq!(status(&mut h, 0, 200, 4096), (left, true));
    let other = h.admin(command(2, 0, 0, LbaStatusAction::SCAN, 64));
    assert_eq!(other.status(), Status::SUCCESS);
    assert_eq!(h.read(PAGE, 5), [0, 0, 0, 0, 2]);
}

#[test]
fn invalid_get_lba_status_is_refused() {
    let mut h = Host::ready_with(vec![ns(1, mem(MIB), 512)]);
    let tracked = LbaStatusAction::TRACKED;
    for (nsid, slba, rl, atype, wanted) in [
        (1, 0, 0, LbaStatusAction::ALLOCATED, Status::INVALID_FIELD),
        (1, 0, 0, LbaStatusAction(0), Status::INVALID_FIELD),
        (1, 0, 0, LbaStatusAction(0xff), Status::INVALID_FIELD),
        (1, 2048, 0, tracked, Status::LBA_OUT_OF_RANGE),
        (1, 2047, 2, tracked, Status::LBA_OUT_OF_RANGE),
        (1, u64::MAX, 0, tracked, Status::LBA_OUT_OF_RANGE),
        (1, u64::MAX, 0xffff, tracked, Status::LBA_OUT_OF_RANGE),
        (0, 0, 0, tracked, Status::INVALID_NAMESPACE_OR_FORMAT),
        (2, 0, 0, tracked, Status::INVALID_NAMESPACE_OR_FORMAT),
        (u32::MAX, 0, 0, tracked, Status::INVALID_NAMESPACE_OR_FORMAT),
    ] {
        let done = h.admin(command(nsid, slba, rl, atype, 4096)).status();
        assert_eq!(
            (plain(done), done.dnr()),
            (wanted, true),
            "{nsid} {slba} {rl}"
        );
    }
    let mut nowhere = command(1, 0, 0, tracked, 4096);
    nowhere.set_prps(LOW_SIZE, 0);
    assert_eq!(
        plain(h.admin(nowhere).status()),
        Status::DATA_TRANSFER_ERROR
    );
    // As large as it can be said: no more is written than there is.
    let mut large = command(1, 0, 0, tracked, 4);
    large.cdw12 = u32::MAX.into();
    assert_eq!(h.admin(large).status(), Status::SUCCESS);
}

/// Header, and namespaces with their ranges.
type Page = (LbaStatusHeader, Vec<(u32, Vec<(u64, u32)>)>);

fn page(h: &mut Host, rae: bool) -> Page {
    let (status, bytes) = h.log(LOG, 8192, 0, rae);
    assert_eq!(status, Status::SUCCESS);
    let header = LbaStatusHeader::read_from_bytes(&bytes[..16]).unwrap();
    let mut rest = &bytes[16..header.lslplen.get() as usize];
    let mut elements = Vec::new();
    while !rest.is_empty() {
        let element = LbaStatusElement::read_from_bytes(&rest[..16]).unwrap();
        assert_eq!(element.ratype, LbaStatusAction::TRACKED);
        let (these, later) = rest[16..].split_at(element.nlrd.get() as usize * 16);
        let ranges = these.chunks_exact(16).map(|range| {
            let range = LbaRangeDescriptor::read_from_bytes(range).unwrap();
            (range.rslba.get(), range.rnlb_z.get() + 1)
        });
        elements.push((element.neid.get(), ranges.collect()));
        rest = later;
    }
    assert_eq!(header.nlslne.get() as usize, elements.len());
    (header, elements)
}

#[test]
fn lba_status_log_is_stable_while_read() {
    let mut h = Host::ready_with(vec![ns(1, mem(MIB), 512), ns(3, mem(MIB), 512)]);
    let (header, elements) = page(&mut h, false);
    assert_eq!((header.estulb.get(), header.lsgc.get()), (0, 0));
    assert!(elements.is_empty());
    assert_eq!(mark(&mut h, 8, 2), Status::SUCCESS);
    assert_eq!(mark(&mut h, 800, 1), Status::SUCCESS);
    let other = h.rw(NvmOpcode::WRITE_UNCORRECTABLE, 3, 5, 1, 0);
    assert_eq!(h.io(other), Status::SUCCESS);
    let all = vec![(1, vec![(8, 2), (800, 1)]), (3, vec![(5, 1)])];
    let (header, elements) = page(&mut h, true);
    assert_eq!((header.estulb.get(), header.lsgc.get()), (4, 1));
    assert_eq!(elements, all);
    // It stays so, in the next process, too; parts are parts of it.
    assert_eq!(mark(&mut h, 900, 1), Status::SUCCESS);
    assert_eq!(write(&mut h, 800, 1), Status::SUCCESS);
    die(&mut h);
    let (header, elements) = page(&mut h, true);
    assert_eq!((header.lsgc.get(), &elements), (1, &all));
    let (status, part) = h.log(LOG, 16, 32, true);
    assert_eq!(status, Status::SUCCESS);
    assert_eq!(part[..8], 8u64.to_le_bytes());
    // Without Retain Asynchronous Event it says what is newer by its number.
    let (header, elements) = page(&mut h, false);
    let now = vec![(1, vec![(8, 2), (900, 1)]), (3, vec![(5, 1)])];
    assert_eq!((header.lsgc.get(), &elements), (2, &now));
    die(&mut h);
    let (header, elements) = page(&mut h, true);
    assert_eq!((header.lsgc.get(), &elements), (2, &now));
    // A reset begins to read anew; nothing is marked less.
    assert_eq!(write(&mut h, 8, 2), Status::SUCCESS);
    h.disable();
    h.until(|h| !h.csts().rdy());
    h.write(ACQ, &[0; 32 * 16]);
    h.enable();
    h.create_pair(1, 64);
    let (header, elements) = page(&mut h, false);
    let now = vec![(1, vec![(900, 1)]), (3, vec![(5, 1)])];
    assert_eq!((header.lsgc.get(), elements), (2, now));
    assert_eq!(read(&mut h, 900, 1), Status::UNRECOVERED_READ_ERROR);
}

#[test]
fn report_interval_is_clamped() {
    let mut h = Host::ready();
    let fid = Fid::LBA_STATUS_INFORMATION_ATTRIBUTES;
    let value = |done: Completion| {
        assert_eq!(done.status(), Status::SUCCESS);
        let value = LbaStatusAttributes::from_bits(done.dw0.get());
        (value.lsiri(), value.lsipi())
    };
    assert_eq!(value(h.get_feature(fid, 0, 0)), (10, 10));
    // The poll interval is not the host's.
    assert_eq!(value(h.set_feature(fid, 77 << 16 | 300)), (300, 10));
    die(&mut h);
    assert_eq!(value(h.get_feature(fid, 0, 0)), (300, 10));
    assert_eq!(value(h.get_feature(fid, 1, 0)), (10, 10), "default");
    assert_eq!(value(h.set_feature(fid, 3)), (10, 10));
    assert_eq!(value(h.set_feature(fid, 0xffff)), (0xffff, 10));
}

/// Time passes.
fn later(h: &mut Host, seconds: u64) {
    h.now += Duration::from_secs(seconds);
    h.run();
}

#[test]
fn lba_status_alert_is_sent_when_due() {
    let mut h = Host::ready();
    let event = AsyncEvent::from_bits(0x000e_0502).into_bits();
    let ask = |h: &mut Host| {
        h.submit(0, Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0));
        h.run();
    };
    let wanted = AsyncEventConfig::new().with_lsian(true).into_bits();
    ask(&mut h);
    assert_eq!(mark(&mut h, 8, 1), Status::SUCCESS);
    later(&mut h, 60);
    assert!(h.reap(0).is_none(), "not wanted");
    // At once, for the interval is over.
    let done = h.set_feature(Fid::ASYNC_EVENT_CONFIG, wanted);
    assert_eq!(done.status(), Status::SUCCESS);
    later(&mut h, 0);
    assert_eq!(h.reap(0).unwrap().dw0.get(), event);
    // Once for what the host has not read.
    ask(&mut h);
    assert_eq!(mark(&mut h, 80, 1), Status::SUCCESS);
    later(&mut h, 60);
    assert!(h.reap(0).is_none());
    // The interval begins when it has.
    page(&mut h, false);
    h.set_feature(Fid::LBA_STATUS_INFORMATION_ATTRIBUTES, 300);
    h.now = std::time::Instant::now();
    assert_eq!(mark(&mut h, 90, 1), Status::SUCCESS);
    later(&mut h, 20);
    assert!(h.reap(0).is_none());
    let due = h.c.deadline().unwrap() - h.now;
    assert!(due <= Duration::from_secs(10), "{due:?}");
    die(&mut h);
    later(&mut h, 11);
    assert_eq!(h.reap(0).unwrap().dw0.get(), event);
    // Nothing that is unreadable no more.
    page(&mut h, false);
    ask(&mut h);
    h.now = std::time::Instant::now();
    assert_eq!(mark(&mut h, 91, 1), Status::SUCCESS);
    for slba in [8, 80, 90, 91] {
        assert_eq!(write(&mut h, slba, 1), Status::SUCCESS);
    }
    later(&mut h, 60);
    assert!(h.reap(0).is_none());
    assert_eq!(h.c.deadline(), None);
}

/// What a host can have at the most leaves room for all else that the next process finds.
#[test]
fn marks_on_maximum_namespaces_survive_process() {
    let all = (1..=1024).map(|nsid| ns(nsid, mem(4096), 512)).collect();
    let mut h = Host::ready_with(all);
    for nsid in 1..=1024 {
        let command = h.rw(NvmOpcode::WRITE_UNCORRECTABLE, nsid, 3, 1, 0);
        assert_eq!(h.io(command), Status::SUCCESS, "{nsid}");
    }
    let (status, before) = h.log(LOG, 16 + 32 * 1024, 0, true);
    assert_eq!(status, Status::SUCCESS);
    assert_eq!(before[16 + 32 * 1023..][..4], 1024u32.to_le_bytes());
    assert!(h.c.survives());
    die(&mut h);
    assert!(h.c.survives());
    assert_eq!(h.log(LOG, 16 + 32 * 1024, 0, true).1, before);
}
