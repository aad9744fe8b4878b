//! The Telemetry log pages: captured on request, and on a failure.

use crate::common::*;
use nvme::aen::{AsyncEvent, Notice};
use nvme::feature::Fid;
use nvme::log::{Lid, TelemetryHeader};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::sync::Arc;
use volume::{Effect, Fault, Faults, IoErrorKind, OpKind};
use zerocopy::FromBytes;

const HOST: Lid = Lid::TELEMETRY_HOST;
const OWN: Lid = Lid::TELEMETRY_CONTROLLER;

fn host() -> (Host, Arc<Faults>) {
    let (volume, faults) = faulty(1 << 20);
    (Host::ready_with(vec![ns(1, volume, 512)]), faults)
}

/// The page's first `len` bytes; `create`: captured anew. The event is retained with `rae`.
fn get(h: &mut Host, lid: Lid, len: usize, create: bool, rae: bool) -> (Status, Vec<u8>) {
    let mut command = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, 0);
    let numd = (len / 4 - 1) as u32;
    let (lid, create, rae) = (u32::from(lid.0), u32::from(create), u32::from(rae));
    command.cdw10 = (lid | create << 8 | rae << 15 | numd << 16).into();
    h.prps(&mut command, DATA, len as u64, PAGE);
    let status = h.admin(command).status();
    (status, h.read(DATA, len))
}

fn header(h: &mut Host, lid: Lid, create: bool) -> TelemetryHeader {
    let (status, page) = get(h, lid, 512, create, true);
    assert_eq!(status, Status::SUCCESS);
    let header = TelemetryHeader::read_from_bytes(&page).unwrap();
    assert_eq!(header.lid, lid);
    assert_eq!(header.da1lb, header.da2lb);
    assert_eq!(header.da1lb, header.da3lb);
    header
}

/// What data area 1 says.
fn text(h: &mut Host, lid: Lid) -> String {
    let blocks = usize::from(header(h, lid, false).da1lb.get());
    let mut all = Vec::new();
    for block in 1..=blocks {
        let (status, data) = h.log(lid.0, 512, 512 * block as u64, true);
        assert_eq!(status, Status::SUCCESS);
        all.extend(data);
    }
    let text = String::from_utf8(all).unwrap();
    text.trim_end_matches('\0').to_owned()
}

fn value<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = text.lines().filter_map(|line| line.split_once(" = "));
    lines.find(|(n, _)| *n == name).map(|(_, value)| value)
}

fn read_fails(h: &mut Host) {
    let read = h.rw(NvmOpcode::READ, 1, 8, 8, DATA);
    assert_eq!(plain(h.io(read)), Status::UNRECOVERED_READ_ERROR);
}

#[test]
fn telemetry_is_empty_at_first() {
    let (mut h, _) = host();
    for lid in [HOST, OWN] {
        let header = header(&mut h, lid, false);
        assert_eq!((header.da1lb.get(), header.tcda, header.tcdgn), (0, 0, 0));
        assert_eq!(
            plain(h.log(lid.0, 512, 1024, true).0),
            Status::INVALID_FIELD
        );
    }
}

#[test]
fn host_captures_telemetry_repeatedly() {
    let (mut h, _) = host();
    let first = header(&mut h, HOST, true);
    assert_eq!((first.thdgn_tcs, first.ths), (1, 1));
    let before = text(&mut h, HOST);
    assert!(before.starts_with("form = vnvme telemetry, form 1\n"));
    assert_eq!(value(&before, "writes"), Some("0"));
    assert_eq!(
        value(&before, "namespace.1"),
        Some("blocks 2048 of 512 bytes, read-only false")
    );
    let write = h.rw(NvmOpcode::WRITE, 1, 0, 8, DATA);
    assert_eq!(h.io(write), Status::SUCCESS);
    assert_eq!(text(&mut h, HOST), before, "as long as none is created");
    assert_eq!(header(&mut h, HOST, true).thdgn_tcs, 2);
    let after = text(&mut h, HOST);
    assert_eq!(value(&after, "writes"), Some("1"));
    assert_eq!(value(&after, "bytes_written"), Some("4096"));
    // It is not the controller's own, and a generation is never none.
    assert_eq!(header(&mut h, OWN, true).tcdgn, 0);
    for _ in 0..255 {
        assert_ne!(header(&mut h, HOST, true).thdgn_tcs, 0);
    }
    assert_eq!(header(&mut h, HOST, false).thdgn_tcs, 2);
}

#[test]
fn telemetry_is_read_in_whole_blocks() {
    let (mut h, _) = host();
    header(&mut h, HOST, true);
    for lid in [HOST, OWN] {
        for (len, offset) in [(4, 0), (508, 0), (516, 0), (512, 4), (512, 256)] {
            let status = h.log(lid.0, len, offset, true).0;
            assert_eq!(plain(status), Status::INVALID_FIELD, "{len} {offset}");
        }
    }
}

#[test]
fn first_error_is_captured_until_read() {
    let (mut h, faults) = host();
    h.set_feature(Fid::ASYNC_EVENT_CONFIG, 1 << 10);
    h.submit(0, Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0));
    h.run();
    let error = volume::IoError::from(IoErrorKind::MediaRead);
    faults.add(Fault::always(OpKind::Read, Effect::Fail(error)));
    read_fails(&mut h);
    let event = h.reap(0).unwrap();
    let expected = AsyncEvent::notice(Notice::TELEMETRY_LOG_CHANGED, OWN);
    assert_eq!(event.dw0.get(), expected.into_bits());
    let first = header(&mut h, OWN, false);
    assert_eq!((first.tcda, first.tcdgn), (1, 1));
    assert!(
        first
            .reason
            .starts_with(b"a media or data integrity error\0")
    );
    assert_eq!(
        header(&mut h, HOST, false).tcda,
        1,
        "the other page says so"
    );
    let captured = text(&mut h, OWN);
    assert_eq!(value(&captured, "media_errors"), Some("1"));
    read_fails(&mut h);
    assert_eq!(text(&mut h, OWN), captured, "not read: the first one stays");
    // The next process has it, too.
    h.die();
    assert_eq!(text(&mut h, OWN), captured);
    assert_eq!(get(&mut h, OWN, 512, false, false).0, Status::SUCCESS);
    let read = header(&mut h, OWN, false);
    assert_eq!((read.tcda, read.tcdgn), (0, 1));
    assert_eq!(text(&mut h, OWN), captured, "read, but not gone");
    read_fails(&mut h);
    let second = header(&mut h, OWN, false);
    assert_eq!((second.tcda, second.tcdgn), (1, 2));
    assert_eq!(value(&text(&mut h, OWN), "media_errors"), Some("3"));
    // It outlives a reset.
    h.disable();
    h.enable();
    assert_eq!(header(&mut h, OWN, false).tcda, 1);
}
