//! Format NVM and Sanitize: what is erased, what waits meanwhile, and what ends it.

use crate::common::*;
use controller::ControllerConfig;
use nvme::cmd::admin::{SanitizeAction, SanitizeCdw10};
use nvme::identify::{IdentifyController, IdentifyNamespace};
use nvme::log::{Lid, SanitizeLog, SanitizeOutcome, SelfTestCode, SelfTestLog, SelfTestOutcome};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::sync::Arc;
use std::time::Instant;
use volume::{Effect, Fault, Faults, IoError, IoErrorKind, OpKind};
use zerocopy::FromBytes;

const ALL: u32 = 0xffff_ffff;
const BLOCK_ERASE: SanitizeCdw10 = SanitizeCdw10::new().with_sanact(SanitizeAction::BLOCK_ERASE);
const OVERWRITE: SanitizeCdw10 = SanitizeCdw10::new().with_sanact(SanitizeAction::OVERWRITE);
const EXIT: SanitizeCdw10 = SanitizeCdw10::new().with_sanact(SanitizeAction::EXIT_FAILURE_MODE);

/// Two namespaces, of 1 MiB in blocks of 512 bytes and of 12 MiB in blocks of 4096, full of data.
fn host() -> (Host, Arc<Faults>, Arc<Faults>) {
    let config = ControllerConfig {
        max_namespaces: 4,
        ..Default::default()
    };
    let ((small, of_small), (large, of_large)) = (faulty(1 << 20), faulty(12 << 20));
    let mut h = Host::with(config, vec![ns(1, small, 512), ns(3, large, 4096)]);
    h.enable();
    h.create_pair(1, 16);
    for nsid in [1, 3] {
        for slba in places(nsid) {
            assert_eq!(put(&mut h, nsid, slba, 0x5a), Status::SUCCESS);
        }
    }
    (h, of_small, of_large)
}

/// Blocks that are looked at: both ends, and some between.
fn places(nsid: u32) -> [u64; 4] {
    match nsid {
        1 => [0, 7, 1024, 2047],
        _ => [0, 1023, 1024, 3071],
    }
}

fn len(nsid: u32) -> usize {
    if nsid == 1 { 512 } else { 4096 }
}

fn put(h: &mut Host, nsid: u32, slba: u64, byte: u8) -> Status {
    h.write(DATA, &vec![byte; len(nsid)]);
    let command = h.rw(NvmOpcode::WRITE, nsid, slba, 1, DATA);
    h.io(command)
}

fn get(h: &mut Host, nsid: u32, slba: u64) -> Vec<u8> {
    let command = h.rw(NvmOpcode::READ, nsid, slba, 1, DATA);
    assert_eq!(h.io(command), Status::SUCCESS, "{nsid} {slba}");
    h.read(DATA, len(nsid))
}

fn holds(h: &mut Host, nsid: u32, pattern: [u8; 4]) {
    for slba in places(nsid) {
        assert_eq!(
            get(h, nsid, slba),
            pattern.repeat(len(nsid) / 4),
            "{nsid} {slba}"
        );
    }
}

fn format(nsid: u32, cdw10: u32) -> Command {
    let mut command = Command::new(AdminOpcode::FORMAT_NVM.0, 0, nsid);
    command.cdw10 = cdw10.into();
    command
}

fn sanitize(h: &mut Host, cdw10: SanitizeCdw10, pattern: u32) -> Status {
    let mut command = Command::new(AdminOpcode::SANITIZE.0, 0, 0);
    command.cdw10 = cdw10.into_bits().into();
    command.cdw11 = pattern.into();
    h.admin(command).status()
}

fn log(h: &mut Host) -> SanitizeLog {
    let (status, page) = h.log(Lid::SANITIZE_STATUS.0, 512, 0, false);
    assert_eq!(status, Status::SUCCESS);
    SanitizeLog::read_from_bytes(&page).unwrap()
}

fn outcome(h: &mut Host) -> SanitizeOutcome {
    log(h).sstat.sos()
}

fn remaining(h: &mut Host, nsid: u32) -> u8 {
    let (status, page) = h.identify(0, nsid, 0);
    assert_eq!(status, Status::SUCCESS);
    let fpi = IdentifyNamespace::read_from_bytes(&page).unwrap().fpi;
    assert!(fpi.fpis());
    fpi.fpr()
}

/// Runs until nothing is left to be done.
fn rest(h: &mut Host) {
    // A process may have begun since.
    h.now = h.now.max(Instant::now());
    h.until(|h| !h.round() && h.c.in_flight() == 0 && h.c.deadline().is_none());
}

/// A controller-level reset, to its end.
fn reset(h: &mut Host) {
    h.disable();
    h.until(|h| !h.csts().rdy());
    h.enable();
    h.create_pair(1, 16);
}

fn held(op: OpKind) -> Fault {
    Fault::always(op, Effect::Hold)
}

fn fails(op: OpKind, kind: IoErrorKind) -> Fault {
    Fault::always(op, Effect::FailLater(IoError::from(kind)))
}

#[test]
fn format_erases_one_namespace_or_all() {
    for (asked, erased, left) in [
        (1, &[1][..], &[3][..]),
        (3, &[3], &[1]),
        (ALL, &[1, 3], &[]),
    ] {
        for ses in [0, 1] {
            let (mut h, ..) = host();
            assert_eq!(h.admin(format(asked, ses << 9)).status(), Status::SUCCESS);
            for &nsid in erased {
                holds(&mut h, nsid, [0; 4]);
            }
            for &nsid in left {
                holds(&mut h, nsid, [0x5a; 4]);
            }
            rest(&mut h);
            assert_eq!(h.c.deadline(), None);
        }
    }
}

#[test]
fn namespace_is_closed_during_format() {
    let (mut h, _, faults) = host();
    faults.add(Fault {
        skip: 1,
        ..held(OpKind::WriteZeroes)
    });
    let cid = h.submit(0, format(3, 0));
    h.run_held(&faults, 1);
    assert!(h.reap(0).is_none());
    assert_eq!((remaining(&mut h, 3), remaining(&mut h, 1)), (66, 0));
    let in_progress = Status::FORMAT_IN_PROGRESS;
    assert_eq!(plain(put(&mut h, 3, 0, 1)), in_progress);
    for opcode in [NvmOpcode::READ, NvmOpcode::FLUSH, NvmOpcode::WRITE_ZEROES] {
        let command = h.rw(opcode, 3, 0, 1, DATA);
        assert_eq!(plain(h.io(command)), in_progress, "{opcode}");
    }
    let flush_all = Command::new(NvmOpcode::FLUSH.0, 0, ALL);
    assert_eq!(plain(h.io(flush_all)), in_progress);
    // Others go on, and there is one at a time.
    holds(&mut h, 1, [0x5a; 4]);
    for nsid in [1, 3, ALL] {
        assert_eq!(plain(h.admin(format(nsid, 0)).status()), in_progress);
    }
    assert_eq!(plain(sanitize(&mut h, BLOCK_ERASE, 0)), in_progress);
    faults.clear();
    faults.release();
    rest(&mut h);
    let done = h.reap(0).unwrap();
    assert_eq!((done.cid.get(), done.status()), (cid, Status::SUCCESS));
    assert_eq!(remaining(&mut h, 3), 0);
    holds(&mut h, 3, [0; 4]);
    assert_eq!(put(&mut h, 3, 0, 1), Status::SUCCESS);
}

/// A late write would be there after the format.
#[test]
fn format_waits_for_commands_in_flight() {
    let (mut h, faults, _) = host();
    faults.add(held(OpKind::Write));
    let write = h.rw(NvmOpcode::WRITE, 1, 7, 1, DATA);
    h.submit(1, write);
    h.run_held(&faults, 1);
    h.submit(0, format(1, 0));
    h.run();
    assert!(h.reap(0).is_none(), "it has not waited");
    faults.clear();
    faults.release();
    rest(&mut h);
    assert_eq!(h.reap(0).unwrap().status(), Status::SUCCESS);
    assert_eq!(h.reap(1).unwrap().status(), Status::SUCCESS);
    holds(&mut h, 1, [0; 4]);
}

#[test]
fn format_writes_zeroes_where_volume_cannot_zero() {
    let (mut h, faults, _) = host();
    faults.add(fails(OpKind::WriteZeroes, IoErrorKind::Unsupported));
    assert_eq!(h.admin(format(ALL, 0)).status(), Status::SUCCESS);
    holds(&mut h, 1, [0; 4]);
    holds(&mut h, 3, [0; 4]);
}

#[test]
fn volume_error_fails_format() {
    for (op, kind, expected) in [
        (
            OpKind::WriteZeroes,
            IoErrorKind::MediaWrite,
            Status::WRITE_FAULT,
        ),
        (
            OpKind::WriteZeroes,
            IoErrorKind::NoSpace,
            Status::CAPACITY_EXCEEDED,
        ),
        (
            OpKind::WriteZeroes,
            IoErrorKind::Busy,
            Status::COMMAND_INTERRUPTED,
        ),
        (OpKind::Flush, IoErrorKind::NotDurable, Status::WRITE_FAULT),
    ] {
        let (mut h, faults, _) = host();
        // The flush before is of what was written before.
        faults.add(Fault {
            skip: u64::from(op == OpKind::Flush),
            ..fails(op, kind)
        });
        let status = h.admin(format(1, 0)).status();
        assert_eq!(plain(status), expected);
        faults.clear();
        assert_eq!(put(&mut h, 1, 0, 1), Status::SUCCESS);
        assert_eq!(h.admin(format(1, 0)).status(), Status::SUCCESS);
        holds(&mut h, 1, [0; 4]);
    }
}

#[test]
fn format_with_invalid_fields_is_refused() {
    let (mut h, ..) = host();
    for (nsid, cdw10, expected) in [
        (0, 0, Status::INVALID_NAMESPACE_OR_FORMAT),
        (2, 0, Status::INVALID_FIELD),
        (5, 0, Status::INVALID_NAMESPACE_OR_FORMAT),
        (0xffff_fffe, 0, Status::INVALID_NAMESPACE_OR_FORMAT),
        (1, 1, Status::INVALID_FORMAT),
        (1, 15, Status::INVALID_FORMAT),
        (1, 1 << 12, Status::INVALID_FORMAT),
        (1, 1 << 5, Status::INVALID_FORMAT),
        (1, 2 << 9, Status::INVALID_FIELD),
        (1, 7 << 9, Status::INVALID_FIELD),
    ] {
        let status = h.admin(format(nsid, cdw10)).status();
        assert_eq!(plain(status), expected, "{nsid:#x} {cdw10:#x}");
        assert!(status.dnr());
    }
    for cdw10 in [0, 4, 5, 6, 7, 2 | 1 << 10] {
        let status = sanitize(&mut h, SanitizeCdw10::from_bits(cdw10), 0);
        assert_eq!(plain(status), Status::INVALID_FIELD, "{cdw10:#x}");
    }
    assert_eq!(
        sanitize(&mut h, EXIT, 0),
        Status::SUCCESS,
        "nothing has failed"
    );
    assert_eq!(outcome(&mut h), SanitizeOutcome::NEVER);
    holds(&mut h, 1, [0x5a; 4]);
    holds(&mut h, 3, [0x5a; 4]);
}

#[test]
fn format_of_read_only_namespace_is_refused() {
    let mut read_only = ns(2, mem(1 << 20), 512);
    read_only.read_only = true;
    let mut h = Host::ready_with(vec![ns(1, mem(1 << 20), 512), read_only]);
    assert_eq!(put(&mut h, 1, 0, 0x5a), Status::SUCCESS);
    for nsid in [2, ALL] {
        let status = h.admin(format(nsid, 0)).status();
        assert_eq!(plain(status), Status::NAMESPACE_WRITE_PROTECTED);
    }
    let status = sanitize(&mut h, BLOCK_ERASE, 0);
    assert_eq!(plain(status), Status::NAMESPACE_WRITE_PROTECTED);
    assert_eq!(get(&mut h, 1, 0), vec![0x5a; 512]);
    assert_eq!(h.admin(format(1, 0)).status(), Status::SUCCESS);
    assert_eq!(get(&mut h, 1, 0), vec![0; 512]);
}

/// Nothing of it is left that could erase what the host writes then.
#[test]
fn format_is_ended_by_reset() {
    let (mut h, _, faults) = host();
    faults.add(Fault {
        skip: 1,
        ..held(OpKind::WriteZeroes)
    });
    h.submit(0, format(3, 0));
    h.run_held(&faults, 1);
    faults.clear();
    faults.release();
    reset(&mut h);
    rest(&mut h);
    assert!(h.reap(0).is_none());
    for slba in places(3) {
        assert_eq!(put(&mut h, 3, slba, 0xa5), Status::SUCCESS);
    }
    rest(&mut h);
    holds(&mut h, 3, [0xa5; 4]);
    assert_eq!(remaining(&mut h, 3), 0);
}

#[test]
fn format_is_continued_by_next_process() {
    for skip in 0..3 {
        let (mut h, _, faults) = host();
        faults.add(Fault {
            skip,
            ..held(OpKind::WriteZeroes)
        });
        let cid = h.submit(0, format(3, 0));
        h.run_held(&faults, 1);
        faults.clear();
        h.die();
        assert_eq!(plain(put(&mut h, 3, 0, 1)), Status::FORMAT_IN_PROGRESS);
        rest(&mut h);
        let done = h.reap(0).unwrap();
        assert_eq!((done.cid.get(), done.status()), (cid, Status::SUCCESS));
        assert!(h.reap(0).is_none());
        holds(&mut h, 3, [0; 4]);
        holds(&mut h, 1, [0x5a; 4]);
    }
}

/// In whichever round the process ends: what is written after the answer stays.
#[test]
fn writes_after_format_survive_process() {
    for round in 0..40 {
        let (mut h, ..) = host();
        h.submit(0, format(1, 0));
        let mut done = None;
        for _ in 0..round {
            h.round();
            done = done.or_else(|| h.reap(0));
        }
        if done.is_some() {
            assert_eq!(put(&mut h, 1, 7, 0xa5), Status::SUCCESS);
        }
        h.die();
        rest(&mut h);
        let again = h.reap(0);
        assert!(done.is_some() != again.is_some(), "{round}");
        let expected = if done.is_some() { 0xa5 } else { 0 };
        assert_eq!(get(&mut h, 1, 7), vec![expected; 512], "{round}");
        assert_eq!(get(&mut h, 1, 0), vec![0; 512], "{round}");
    }
}

#[test]
fn sanitize_runs_in_background() {
    let (mut h, _, faults) = host();
    let aer = Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0);
    let aer = h.submit(0, aer);
    faults.add(Fault {
        skip: 1,
        ..held(OpKind::WriteZeroes)
    });
    assert_eq!(
        sanitize(&mut h, BLOCK_ERASE.with_ause(true), 0),
        Status::SUCCESS
    );
    h.run_held(&faults, 1);
    let now = log(&mut h);
    assert_eq!(now.sstat.sos(), SanitizeOutcome::IN_PROGRESS);
    // 1 and 4 of 13 MiB.
    assert_eq!(
        now.sprog.get(),
        (5 << 16) as u16 / 13 + ((5u32 << 16) / 13) as u16
    );
    assert_eq!(now.scdw10.get(), BLOCK_ERASE.with_ause(true).into_bits());
    let in_progress = Status::SANITIZE_IN_PROGRESS;
    for nsid in [1, 3] {
        assert_eq!(plain(put(&mut h, nsid, 0, 1)), in_progress);
        assert_eq!(plain(h.admin(format(nsid, 0)).status()), in_progress);
    }
    for cdw10 in [BLOCK_ERASE, OVERWRITE, EXIT] {
        assert_eq!(plain(sanitize(&mut h, cdw10, 0)), in_progress);
    }
    let mut test = Command::new(AdminOpcode::DEVICE_SELF_TEST.0, 0, ALL);
    test.cdw10 = 1.into();
    assert_eq!(plain(h.admin(test).status()), in_progress);
    faults.clear();
    faults.release();
    rest(&mut h);
    let event = h.reap(0).unwrap();
    assert_eq!(event.cid.get(), aer);
    assert_eq!(event.dw0.get(), 0x0081_0106);
    let now = log(&mut h);
    assert_eq!(now.sstat.sos(), SanitizeOutcome::COMPLETED);
    assert_eq!(now.sprog.get(), 0xffff);
    holds(&mut h, 1, [0; 4]);
    holds(&mut h, 3, [0; 4]);
    assert_eq!(h.c.deadline(), None);
}

#[test]
fn overwrite_inverts_pattern_for_last_pass() {
    let pattern = 0x0403_0201u32;
    for (passes, inverts, before) in [
        (1, true, None),
        (2, true, Some(!pattern)),
        (3, true, Some(!pattern)),
        (3, false, Some(pattern)),
    ] {
        let (mut h, faults, _) = host();
        // The last pass's write of the first namespace's end waits: all else of it was done before.
        faults.add(Fault {
            range: Some((1 << 20) - 512..1 << 20),
            skip: passes - 1,
            ..held(OpKind::Write)
        });
        let cdw10 = OVERWRITE.with_owpass(passes as u8).with_oipbp(inverts);
        assert_eq!(sanitize(&mut h, cdw10, pattern), Status::SUCCESS);
        h.run_held(&faults, 1);
        assert_eq!(u64::from(log(&mut h).sstat.opc()), passes - 1);
        let mut last = vec![0; 512];
        read_volume(&h, 1, (1 << 20) - 512, &mut last);
        let expected = before.map_or([0x5a; 4], u32::to_le_bytes);
        assert_eq!(last, expected.repeat(128));
        faults.clear();
        faults.release();
        rest(&mut h);
        let now = log(&mut h);
        assert_eq!(now.sstat.sos(), SanitizeOutcome::COMPLETED);
        assert_eq!(u64::from(now.sstat.opc()), passes);
        holds(&mut h, 1, pattern.to_le_bytes());
        holds(&mut h, 3, pattern.to_le_bytes());
    }
}

/// Below the controller, and beside its faults.
fn read_volume(h: &Host, nsid: u32, offset: u64, data: &mut [u8]) {
    let config = h.c.namespaces().find(|ns| ns.nsid == nsid).unwrap();
    let memory = config.volume.inner().unwrap();
    let io = volume::Io::new(volume::IoOptions::default());
    let mut queue = memory.open(&io).unwrap();
    let done = queue.submit(volume::Request::transfer(
        0,
        volume::Op::Read,
        offset,
        dma::SegmentList::owned(dma::Buffer::new(data.len())),
    ));
    let mut done = done.unwrap();
    assert_eq!(done.result, Ok(()));
    data.copy_from_slice(done.data.buffer().unwrap());
}

#[test]
fn failed_sanitize_keeps_namespaces_closed() {
    for unrestricted in [true, false] {
        let (mut h, _, faults) = host();
        faults.add(fails(OpKind::WriteZeroes, IoErrorKind::MediaWrite));
        let cdw10 = BLOCK_ERASE.with_ause(unrestricted);
        assert_eq!(sanitize(&mut h, cdw10, 0), Status::SUCCESS);
        rest(&mut h);
        assert_eq!(outcome(&mut h), SanitizeOutcome::FAILED);
        let failed = Status::SANITIZE_FAILED;
        let refused = |h: &mut Host| {
            for nsid in [1, 3] {
                assert_eq!(plain(put(h, nsid, 0, 1)), failed);
                assert_eq!(plain(h.admin(format(nsid, 0)).status()), failed);
            }
        };
        refused(&mut h);
        reset(&mut h);
        refused(&mut h);
        h.die();
        refused(&mut h);
        let exit = sanitize(&mut h, EXIT, 0);
        if unrestricted {
            assert_eq!(exit, Status::SUCCESS);
            holds(&mut h, 3, [0x5a; 4]);
            assert_eq!(
                outcome(&mut h),
                SanitizeOutcome::FAILED,
                "it stays the last one"
            );
            h.die();
            holds(&mut h, 3, [0x5a; 4]);
            assert_eq!(sanitize(&mut h, EXIT, 0), Status::SUCCESS, "once more");
            faults.clear();
            continue;
        }
        assert_eq!(plain(exit), failed);
        let status = sanitize(&mut h, BLOCK_ERASE.with_ause(true), 0);
        assert_eq!(plain(status), failed);
        // It fails again; then it does not.
        assert_eq!(sanitize(&mut h, BLOCK_ERASE, 0), Status::SUCCESS);
        rest(&mut h);
        refused(&mut h);
        faults.clear();
        assert_eq!(
            sanitize(&mut h, OVERWRITE.with_owpass(1), 0x1111_1111),
            Status::SUCCESS
        );
        rest(&mut h);
        assert_eq!(outcome(&mut h), SanitizeOutcome::COMPLETED);
        holds(&mut h, 3, [0x11; 4]);
    }
}

#[test]
fn sanitize_continues_after_reset_and_process() {
    for dies in [false, true] {
        for skip in 0..3 {
            let (mut h, _, faults) = host();
            faults.add(Fault {
                skip,
                ..held(OpKind::WriteZeroes)
            });
            assert_eq!(sanitize(&mut h, BLOCK_ERASE, 0), Status::SUCCESS);
            h.run_held(&faults, 1);
            faults.clear();
            if dies {
                h.die();
            } else {
                faults.release();
                h.disable();
                // It waits for the host.
                rest(&mut h);
                h.enable();
                h.create_pair(1, 16);
            }
            rest(&mut h);
            assert_eq!(outcome(&mut h), SanitizeOutcome::COMPLETED);
            holds(&mut h, 1, [0; 4]);
            holds(&mut h, 3, [0; 4]);
        }
    }
}

/// Whatever the round of the reset: flushes of the controller's own are lost by it.
#[test]
fn sanitize_survives_reset_at_any_round() {
    for rounds in 0..24 {
        let (mut h, ..) = host();
        assert_eq!(sanitize(&mut h, BLOCK_ERASE, 0), Status::SUCCESS);
        for _ in 0..rounds {
            h.round();
        }
        reset(&mut h);
        rest(&mut h);
        assert_eq!(outcome(&mut h), SanitizeOutcome::COMPLETED, "{rounds}");
        holds(&mut h, 3, [0; 4]);
    }
}

#[test]
fn format_fails_when_namespace_is_removed() {
    let (mut h, _, faults) = host();
    faults.add(held(OpKind::WriteZeroes));
    h.submit(0, format(3, 0));
    h.run_held(&faults, 1);
    assert!(h.c.detach(3));
    faults.clear();
    faults.release();
    rest(&mut h);
    let done = h.reap(0).unwrap();
    assert_eq!(plain(done.status()), Status::INVALID_NAMESPACE_OR_FORMAT);
    holds(&mut h, 1, [0x5a; 4]);
}

#[test]
fn self_test_ends_when_namespace_is_erased() {
    for (erases, tested, expected) in [
        (format(1, 0), 1, SelfTestOutcome::FORMATTED),
        (format(1, 0), ALL, SelfTestOutcome::FORMATTED),
        (format(1, 0), 3, SelfTestOutcome::UNUSED),
    ] {
        let (mut h, small, large) = host();
        let faults = if tested == 3 { large } else { small };
        faults.add(held(OpKind::Read));
        let mut test = Command::new(AdminOpcode::DEVICE_SELF_TEST.0, 0, tested);
        test.cdw10 = u32::from(SelfTestCode::EXTENDED.0).into();
        assert_eq!(h.admin(test).status(), Status::SUCCESS);
        h.run_held(&faults, 1);
        let cid = h.submit(0, erases);
        for _ in 0..4 {
            h.round();
        }
        let (_, page) = h.log(Lid::DEVICE_SELF_TEST.0, 564, 0, true);
        let log = SelfTestLog::read_from_bytes(&page).unwrap();
        assert_eq!(log.results[0].status.outcome(), expected);
        faults.clear();
        faults.release();
        h.until(|h| h.peek(0).is_some());
        let done = h.reap(0).unwrap();
        assert_eq!((done.cid.get(), done.status()), (cid, Status::SUCCESS));
        holds(&mut h, 1, [0; 4]);
    }
}

#[test]
fn identify_reports_format_and_sanitize_support() {
    let (mut h, ..) = host();
    let (_, page) = h.identify(1, 0, 0);
    let id = IdentifyController::read_from_bytes(&page).unwrap();
    assert!(id.oacs.fnvms());
    assert_eq!(id.fna.into_bits(), 0);
    let sanicap = id.sanicap;
    assert!(sanicap.bes() && sanicap.ows() && !sanicap.ces() && !sanicap.ndi());
    assert_eq!(sanicap.nodmmas(), 1);
}
