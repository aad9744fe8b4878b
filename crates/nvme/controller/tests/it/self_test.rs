//! Device Self-test: what is read, what the log page says, and what ends it.

use crate::common::*;
use controller::ControllerConfig;
use nvme::log::{
    Lid, SelfTestCode as Code, SelfTestLog, SelfTestOutcome as Outcome, SelfTestResult,
};
use nvme::status::StatusCodeType;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::sync::Arc;
use std::time::Duration;
use volume::{Effect, Fault, Faults, IoError, IoErrorKind, OpKind};
use zerocopy::FromBytes;

const ALL: u32 = 0xffff_ffff;

/// Runs as if a minute had passed, until one read is held.
fn run_held(h: &mut Host, faults: &Faults) {
    h.run();
    h.now += Duration::from_secs(60);
    h.run_held(faults, 1);
}

fn begin(h: &mut Host, code: Code, nsid: u32) -> Status {
    let mut command = Command::new(AdminOpcode::DEVICE_SELF_TEST.0, 0, nsid);
    command.cdw10 = u32::from(code.0).into();
    h.admin(command).status()
}

fn log(h: &mut Host) -> SelfTestLog {
    let (status, page) = h.log(Lid::DEVICE_SELF_TEST.0, 564, 0, true);
    assert_eq!(status, Status::SUCCESS);
    SelfTestLog::read_from_bytes(&page).unwrap()
}

/// Runs until the operation is over; the newest result.
fn finish(h: &mut Host) -> SelfTestResult {
    h.run();
    while let Some(due) = h.c.deadline() {
        assert!(due > h.now, "it is due, and nothing happens");
        h.now = due;
        h.run();
    }
    let log = log(h);
    assert_eq!((log.current, log.completion), (Code::NONE, 0));
    log.results[0]
}

/// Two namespaces, of 1 MiB in blocks of 512 bytes and of 32 MiB in blocks of 4096.
fn host() -> (Host, Arc<Faults>, Arc<Faults>) {
    let config = ControllerConfig {
        max_namespaces: 4,
        ..Default::default()
    };
    let ((small, of_small), (large, of_large)) = (faulty(1 << 20), faulty(32 << 20));
    let mut h = Host::with(config, vec![ns(1, small, 512), ns(3, large, 4096)]);
    h.enable();
    h.create_pair(1, 16);
    (h, of_small, of_large)
}

fn fails_at(first: u64, end: u64, kind: IoErrorKind) -> Fault {
    Fault {
        range: Some(first..end),
        ..Fault::always(OpKind::Read, Effect::FailLater(IoError::from(kind)))
    }
}

#[test]
fn self_test_log_is_empty_at_first() {
    let (mut h, ..) = host();
    let log = log(&mut h);
    assert_eq!(log.current, Code::NONE);
    for result in log.results {
        assert_eq!(result.status.outcome(), Outcome::UNUSED);
    }
}

#[test]
fn self_test_passes_and_counts_no_host_command() {
    let (mut h, ..) = host();
    let before = h.c.stats().host_reads();
    for (nth, (code, nsid)) in [
        (Code::SHORT, 1),
        (Code::EXTENDED, 3),
        (Code::SHORT, ALL),
        (Code::EXTENDED, ALL),
        (Code::SHORT, 0),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(begin(&mut h, code, nsid), Status::SUCCESS);
        let result = finish(&mut h);
        assert_eq!(result.status.code(), code);
        assert_eq!(result.status.outcome(), Outcome::PASSED, "{code} {nsid}");
        assert_eq!(
            (result.nsid.get(), result.valid.nsid()),
            (nsid, nsid != 0),
            "{nth}"
        );
        assert!(!result.valid.flba() && !result.valid.sc());
    }
    assert_eq!(h.c.stats().host_reads(), before);
    let log = log(&mut h);
    let codes = log.results.map(|result| result.status.code());
    assert_eq!(codes[..3], [Code::SHORT, Code::EXTENDED, Code::SHORT]);
    assert_eq!(log.results[5].status.outcome(), Outcome::UNUSED);
}

#[test]
fn self_test_log_keeps_twenty_newest() {
    let (mut h, ..) = host();
    for nth in 0..23 {
        let nsid = if nth % 2 == 0 { 1 } else { 3 };
        assert_eq!(begin(&mut h, Code::SHORT, nsid), Status::SUCCESS);
        finish(&mut h);
    }
    let log = log(&mut h);
    for (at, result) in log.results.iter().enumerate() {
        assert_eq!(result.nsid.get(), if at % 2 == 0 { 1 } else { 3 });
    }
}

#[test]
fn extended_self_test_finds_unreadable_block() {
    // Namespace, its blocks' size, and the blocks with a fault.
    for (nsid, size, bad) in [
        (1, 512, [777, 780]),
        (1, 512, [0, 1]),
        (1, 512, [2047, 2048]),
        (3, 4096, [8191, 8192]),
        (3, 4096, [17, 18]),
    ] {
        for asked in [nsid, ALL] {
            let (mut h, of_small, of_large) = host();
            let faults = if nsid == 1 { of_small } else { of_large };
            let [first, end] = bad.map(|block| block * size);
            faults.add(fails_at(first, end, IoErrorKind::MediaRead));
            assert_eq!(begin(&mut h, Code::EXTENDED, asked), Status::SUCCESS);
            let result = finish(&mut h);
            assert_eq!(result.status.outcome(), Outcome::FAILED_SEGMENT);
            assert_eq!(result.segment, 1);
            assert_eq!((result.nsid.get(), result.flba.get()), (nsid, bad[0]));
            let valid = result.valid;
            assert!(valid.nsid() && valid.flba() && valid.sct() && valid.sc());
            let expected = Status::UNRECOVERED_READ_ERROR;
            assert_eq!(result.sct, StatusCodeType::MEDIA.0);
            assert_eq!(result.sc, expected.sc());
        }
    }
}

#[test]
fn short_self_test_reads_both_ends() {
    for block in [0u64, 8191] {
        let (mut h, _, faults) = host();
        let range = block * 4096..(block + 1) * 4096;
        faults.add(fails_at(range.start, range.end, IoErrorKind::MediaRead));
        assert_eq!(begin(&mut h, Code::SHORT, 3), Status::SUCCESS);
        let result = finish(&mut h);
        assert_eq!(result.status.outcome(), Outcome::FAILED_SEGMENT);
        assert_eq!(result.flba.get(), block);
    }
}

#[test]
fn self_test_is_aborted() {
    let (mut h, faults, _) = host();
    assert_eq!(begin(&mut h, Code::ABORT, 0), Status::SUCCESS, "of none");
    assert_eq!(log(&mut h).results[0].status.outcome(), Outcome::UNUSED);
    // The last quarter waits.
    faults.add(Fault {
        range: Some(768 << 10..1 << 20),
        ..Fault::always(OpKind::Read, Effect::Hold)
    });
    assert_eq!(begin(&mut h, Code::EXTENDED, 1), Status::SUCCESS);
    run_held(&mut h, &faults);
    let now = log(&mut h);
    assert_eq!((now.current, now.completion), (Code::EXTENDED, 75));
    for code in [Code::SHORT, Code::EXTENDED] {
        let status = begin(&mut h, code, 1);
        assert_eq!(plain(status), Status::SELF_TEST_IN_PROGRESS);
    }
    // Hosts' commands pass by.
    let write = h.rw(NvmOpcode::WRITE, 1, 0, 8, DATA);
    assert_eq!(h.io(write), Status::SUCCESS);
    assert_eq!(begin(&mut h, Code::ABORT, 0xdead), Status::SUCCESS);
    let now = log(&mut h);
    assert_eq!(now.current, Code::NONE);
    assert_eq!(now.results[0].status.outcome(), Outcome::ABORTED);
    assert_eq!(now.results[0].status.code(), Code::EXTENDED);
    // The end of the read is none of the next operation's.
    assert_eq!(begin(&mut h, Code::SHORT, 1), Status::SUCCESS);
    faults.clear();
    faults.release();
    let result = finish(&mut h);
    assert_eq!(result.status.outcome(), Outcome::PASSED);
    assert_eq!(log(&mut h).results[2].status.outcome(), Outcome::UNUSED);
}

#[test]
fn reset_ends_short_self_test_only() {
    for (code, outcome) in [
        (Code::SHORT, Outcome::RESET),
        (Code::EXTENDED, Outcome::PASSED),
    ] {
        let (mut h, faults, _) = host();
        faults.add(Fault {
            range: Some(512 << 10..1 << 20),
            ..Fault::always(OpKind::Read, Effect::Hold)
        });
        assert_eq!(begin(&mut h, code, 1), Status::SUCCESS);
        run_held(&mut h, &faults);
        faults.clear();
        faults.release();
        h.disable();
        h.enable();
        let result = finish(&mut h);
        assert_eq!(result.status.outcome(), outcome);
        assert_eq!(log(&mut h).results[1].status.outcome(), Outcome::UNUSED);
    }
}

#[test]
fn removed_namespace_ends_own_self_test_only() {
    for (asked, outcome) in [(1, Outcome::NAMESPACE_REMOVED), (ALL, Outcome::PASSED)] {
        let (mut h, faults, _) = host();
        faults.add(Fault {
            range: Some(512 << 10..1 << 20),
            ..Fault::always(OpKind::Read, Effect::Hold)
        });
        assert_eq!(begin(&mut h, Code::EXTENDED, asked), Status::SUCCESS);
        run_held(&mut h, &faults);
        assert!(h.c.detach(1));
        faults.clear();
        faults.release();
        let result = finish(&mut h);
        assert_eq!(result.status.outcome(), outcome);
        assert_eq!(result.nsid.get(), asked);
    }
}

#[test]
fn self_test_continues_in_next_process() {
    let (mut h, faults, _) = host();
    assert_eq!(begin(&mut h, Code::SHORT, 3), Status::SUCCESS);
    finish(&mut h);
    let held = Fault {
        range: Some(512 << 10..1 << 20),
        ..Fault::always(OpKind::Read, Effect::Hold)
    };
    faults.add(held);
    assert_eq!(begin(&mut h, Code::EXTENDED, 1), Status::SUCCESS);
    run_held(&mut h, &faults);
    faults.clear();
    h.die();
    let now = log(&mut h);
    assert_eq!(now.current, Code::EXTENDED);
    assert_eq!(now.results[0].status.code(), Code::SHORT);
    let result = finish(&mut h);
    assert_eq!(result.status.outcome(), Outcome::PASSED);
    assert_eq!(result.status.code(), Code::EXTENDED);
}

#[test]
fn self_test_with_invalid_fields_is_refused() {
    let (mut h, ..) = host();
    for code in (0..16).filter(|code| ![1, 2, 0xf].contains(code)) {
        let status = begin(&mut h, Code(code), 1);
        assert_eq!(plain(status), Status::INVALID_FIELD, "{code:#x}");
        assert!(status.dnr());
    }
    for (nsid, expected) in [
        (2, Status::INVALID_FIELD),
        (4, Status::INVALID_FIELD),
        (5, Status::INVALID_NAMESPACE_OR_FORMAT),
        (0xffff_fffe, Status::INVALID_NAMESPACE_OR_FORMAT),
    ] {
        for code in [Code::SHORT, Code::EXTENDED] {
            assert_eq!(plain(begin(&mut h, code, nsid)), expected, "{nsid:#x}");
        }
    }
    let log = log(&mut h);
    assert_eq!(log.current, Code::NONE);
    assert_eq!(log.results[0].status.outcome(), Outcome::UNUSED);
}

/// Hosts look at the percentage once a second: it is to be seen.
#[test]
fn self_test_takes_three_seconds() {
    for code in [Code::SHORT, Code::EXTENDED] {
        let (mut h, ..) = host();
        assert_eq!(begin(&mut h, code, ALL), Status::SUCCESS);
        h.run();
        let start = h.now;
        assert_eq!(log(&mut h).current, code);
        for (ms, least, most) in [(1000, 30, 36), (2000, 63, 69), (2999, 95, 99)] {
            h.now = start + Duration::from_millis(ms);
            h.run();
            let log = log(&mut h);
            assert_eq!(log.current, code);
            assert!(
                (least..=most).contains(&log.completion),
                "{}",
                log.completion
            );
            let due = h.c.deadline().unwrap();
            assert!(due > h.now && due <= start + Duration::from_secs(3));
        }
        h.now = start + Duration::from_secs(3);
        h.run();
        assert_eq!(log(&mut h).results[0].status.outcome(), Outcome::PASSED);
        assert_eq!(h.c.deadline(), None);
    }
}

/// A volume that never lets a read through does not keep the worker at it.
#[test]
fn self_test_on_busy_volume_ends() {
    let (mut h, faults, _) = host();
    faults.add(fails_at(0, 1 << 20, IoErrorKind::Busy));
    assert_eq!(begin(&mut h, Code::EXTENDED, 1), Status::SUCCESS);
    let result = finish(&mut h);
    assert_eq!(result.status.outcome(), Outcome::UNKNOWN_ERROR);
    assert_eq!(result.sc, Status::COMMAND_INTERRUPTED.sc());
}

#[test]
fn identify_reports_self_test() {
    let (mut h, ..) = host();
    let (_, page) = h.identify(1, 0, 0);
    let id = nvme::identify::IdentifyController::read_from_bytes(&page).unwrap();
    assert!(id.oacs.dsts());
    assert_eq!((id.edstt.get(), id.dsto), (1, 0));
}
