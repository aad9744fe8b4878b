//! Admin commands: what each answers, and what it answers when it is wrong.

use crate::common::*;
use controller::ControllerConfig;
use nvme::cmd::{Fuse, Psdt};
use nvme::feature::Fid;
use nvme::identify::{IdentifyController, IdentifyNamespace};
use nvme::log::{ErrorInformation, FirmwareSlot, Smart};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use volume::{Effect, Fault, IoErrorKind, OpKind};
use zerocopy::FromBytes;

fn three() -> Host {
    let config = ControllerConfig {
        max_namespaces: 8,
        ..Default::default()
    };
    let mut h = Host::with(
        config,
        vec![
            ns(1, mem(1 << 20), 512),
            ns(5, mem(2 << 20), 4096),
            ns(3, null(1 << 30), 4096),
        ],
    );
    h.enable();
    h
}

fn word(page: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(page[at..at + 4].try_into().unwrap())
}

#[test]
fn identify_controller_reports_capabilities() {
    let mut h = three();
    let (status, page) = h.identify(1, 0, 0);
    assert_eq!(status, Status::SUCCESS);
    let id = IdentifyController::read_from_bytes(&page).unwrap();
    assert_eq!(id.nn.get(), 8);
    assert_eq!(id.mdts, 8);
    assert_eq!((page[512], page[513]), (0x66, 0x44), "SQES and CQES");
    assert_eq!(id.tnvmcap.get(), (3 << 20) + (1 << 30));
    assert_eq!(&page[4..24], b"vnvme0              ");
    assert!(id.oacs.dbcs());
    assert_eq!(id.kas.get(), 1);
    let nqn = std::str::from_utf8(&page[768..1024])
        .unwrap()
        .trim_end_matches('\0');
    assert!(nqn.starts_with("nqn.2014-08.org.nvmexpress:uuid:"), "{nqn}");
    assert_eq!(nqn.len(), 32 + 36);
    assert_eq!(
        three().identify(1, 0, 0).1[768..1024],
        page[768..1024],
        "stable"
    );
}

#[test]
fn identify_namespace_reports_size_and_block() {
    let mut h = three();
    for (nsid, blocks, shift) in [(1, 2048, 9), (5, 512, 12), (3, 1 << 18, 12)] {
        let (status, page) = h.identify(0, nsid, 0);
        assert_eq!(status, Status::SUCCESS);
        let id = IdentifyNamespace::read_from_bytes(&page).unwrap();
        assert_eq!(
            (id.nsze.get(), id.ncap.get(), id.nuse.get()),
            (blocks, blocks, blocks)
        );
        assert_eq!(page[128 + 2], shift, "LBADS");
        assert_eq!(page[104..120], [nsid as u8; 16], "NGUID");
    }
    // In range, but nothing there: zeroes. Out of range: an error.
    let (status, page) = h.identify(0, 2, 0);
    assert_eq!(
        (status, page.iter().any(|&b| b != 0)),
        (Status::SUCCESS, false)
    );
    for nsid in [0, 9, 0xffff_fffe, 0xffff_ffff] {
        for cns in [0, 3, 5, 8, 0x11] {
            let status = h.identify(cns, nsid, 0).0;
            assert_eq!(
                plain(status),
                Status::INVALID_NAMESPACE_OR_FORMAT,
                "{cns:#x} {nsid:#x}"
            );
        }
    }
    for cns in [2, 7, 0x10, 0x1a] {
        let (status, page) = h.identify(cns, 0, 0);
        assert_eq!(status, Status::SUCCESS);
        assert_eq!(
            [
                word(&page, 0),
                word(&page, 4),
                word(&page, 8),
                word(&page, 12)
            ],
            [1, 3, 5, 0]
        );
        let (_, page) = h.identify(cns, 3, 0);
        assert_eq!([word(&page, 0), word(&page, 4)], [5, 0]);
        assert_eq!(h.identify(cns, 0xffff_fffd, 0).0, Status::SUCCESS);
        let status = h.identify(cns, 0xffff_fffe, 0).0;
        assert_eq!(plain(status), Status::INVALID_NAMESPACE_OR_FORMAT);
    }
}

/// Without a volume that promises more, a block is what is atomic.
#[test]
fn identify_without_atomic_volume_has_no_atomic_fields() {
    let mut h = three();
    for nsid in [1, 5, 3] {
        let page = h.identify(0, nsid, 0).1;
        let id = IdentifyNamespace::read_from_bytes(&page).unwrap();
        assert!(!id.nsfeat.nsabpns());
        assert_eq!(page[34..46], [0; 12], "NAWUN to NABSPF");
    }
}

#[test]
fn identify_reports_descriptors_and_lists() {
    let mut h = three();
    let (status, page) = h.identify(3, 5, 0);
    assert_eq!(status, Status::SUCCESS);
    assert_eq!(
        (page[0], page[1], &page[4..20]),
        (2, 16, &[5; 16][..]),
        "NGUID descriptor"
    );
    assert_eq!((page[20], page[21], page[24]), (4, 1, 0), "CSI descriptor");
    let (status, page) = h.identify(6, 0, 0);
    assert_eq!((status, page[0]), (Status::SUCCESS, 8), "VSL");
    for cns in [5, 8, 0x1b, 0x1f] {
        assert_eq!(h.identify(cns, 1, 0).0, Status::SUCCESS, "{cns:#x}");
    }
    let (_, page) = h.identify(8, 1, 0);
    assert_eq!(page[14] & 1, 1, "NRDY");
    for (cns, nsid) in [(0x12, 1), (0x13, 0)] {
        let (status, page) = h.identify(cns, nsid, 0);
        assert_eq!(status, Status::SUCCESS);
        assert_eq!(page[..4], [1, 0, 1, 0], "one controller, ID 1");
    }
    let (_, page) = h.identify(0x12, 2, 0);
    assert_eq!(page[..4], [0; 4]);
    assert_eq!(h.identify(0x14, 0, 0).0, Status::SUCCESS);
    assert_eq!(h.identify(0x15, 0, 0).0, Status::SUCCESS);
    let (status, page) = h.identify(0x1c, 0, 0);
    assert_eq!((status, page[0]), (Status::SUCCESS, 1), "NVM command set");
    for (cns, cdw11) in [
        (4, 0),
        (9, 0),
        (0x17, 0),
        (0x42, 0),
        (0xff, 0),
        (5, 2 << 24),
        (6, 1 << 24),
        (7, 2 << 24),
    ] {
        let status = h.identify(cns, 1, cdw11).0;
        assert_eq!(plain(status), Status::INVALID_FIELD, "{cns:#x} {cdw11:#x}");
    }
}

#[test]
fn invalid_admin_command_is_refused() {
    let mut h = Host::ready();
    for opcode in [0x0b, 0x0d, 0x10, 0x81, 0xc0, 0xff] {
        let status = h.admin(Command::new(opcode, 0, 0)).status();
        assert_eq!(plain(status), Status::INVALID_OPCODE, "{opcode:#x}");
        assert!(status.dnr());
    }
    let identify = |prp1, prp2| {
        let mut command = Command::new(AdminOpcode::IDENTIFY.0, 0, 0);
        command.cdw10 = 1.into();
        command.set_prps(prp1, prp2);
        command
    };
    for fuse in [1, 2, 3] {
        let mut command = identify(PAGE, 0);
        command.flags.set_fuse(Fuse(fuse));
        assert_eq!(plain(h.admin(command).status()), Status::INVALID_FIELD);
    }
    for psdt in [1, 2, 3] {
        let mut command = identify(PAGE, 0);
        command.flags.set_psdt(Psdt(psdt));
        assert_eq!(plain(h.admin(command).status()), Status::INVALID_FIELD);
    }
    assert_eq!(
        h.admin(identify(PAGE + 0x800, PAGE + 0x1000)).status(),
        Status::SUCCESS
    );
    assert_eq!(&h.read(PAGE + 0x800 + 24, 5), b"vnvme");
    assert_eq!(
        plain(h.admin(identify(PAGE + 2, PAGE + 0x1000)).status()),
        Status::PRP_OFFSET_INVALID
    );
    assert_eq!(
        plain(h.admin(identify(PAGE + 4, PAGE + 0x1004)).status()),
        Status::PRP_OFFSET_INVALID
    );
    for bad in [LOW_SIZE, !4095, HIGH - 4096] {
        assert_eq!(
            plain(h.admin(identify(bad, 0)).status()),
            Status::DATA_TRANSFER_ERROR
        );
    }
    let config = ControllerConfig {
        shadow_doorbells: false,
        ..Default::default()
    };
    let mut h = Host::with(config, vec![]);
    h.enable();
    assert_eq!(
        plain(h.configure_shadow(SHADOW, EVENTIDX)),
        Status::INVALID_OPCODE
    );
}

#[test]
fn invalid_create_queue_is_refused() {
    let mut h = Host::ready();
    let raw = |opcode: AdminOpcode, cdw10: u32, cdw11: u32, prp1: u64| {
        let mut command = Command::new(opcode.0, 0, 0);
        command.cdw10 = cdw10.into();
        command.cdw11 = cdw11.into();
        command.set_prps(prp1, 0);
        command
    };
    let (cq, sq) = (AdminOpcode::CREATE_IO_CQ, AdminOpcode::CREATE_IO_SQ);
    let at = RINGS + 8 * RING_STEP;
    for (opcode, cdw10, cdw11, prp1, expected) in [
        (cq, 15 << 16, 1, at, Status::INVALID_QUEUE_IDENTIFIER),
        (cq, 15 << 16 | 65, 1, at, Status::INVALID_QUEUE_IDENTIFIER),
        (
            cq,
            15 << 16 | 0xffff,
            1,
            at,
            Status::INVALID_QUEUE_IDENTIFIER,
        ),
        (cq, 15 << 16 | 1, 1, at, Status::INVALID_QUEUE_IDENTIFIER), // exists
        (cq, 2, 1, at, Status::INVALID_QUEUE_SIZE),
        (cq, 4096 << 16 | 2, 1, at, Status::INVALID_QUEUE_SIZE),
        (cq, 0xffff << 16 | 2, 1, at, Status::INVALID_QUEUE_SIZE),
        (cq, 15 << 16 | 2, 0, at, Status::INVALID_FIELD), // not contiguous
        (
            cq,
            15 << 16 | 2,
            3 | 65 << 16,
            at,
            Status::INVALID_INTERRUPT_VECTOR,
        ),
        (cq, 15 << 16 | 2, 1, at + 8, Status::PRP_OFFSET_INVALID),
        (cq, 15 << 16 | 2, 1, LOW_SIZE, Status::DATA_TRANSFER_ERROR),
        (
            cq,
            4095 << 16 | 2,
            1,
            LOW_SIZE - 4096,
            Status::DATA_TRANSFER_ERROR,
        ),
        (
            sq,
            15 << 16,
            1 << 16 | 1,
            at,
            Status::INVALID_QUEUE_IDENTIFIER,
        ),
        (
            sq,
            15 << 16 | 65,
            1 << 16 | 1,
            at,
            Status::INVALID_QUEUE_IDENTIFIER,
        ),
        (
            sq,
            15 << 16 | 1,
            1 << 16 | 1,
            at,
            Status::INVALID_QUEUE_IDENTIFIER,
        ),
        (sq, 15 << 16 | 2, 1, at, Status::INVALID_QUEUE_IDENTIFIER), // CQID 0
        (
            sq,
            15 << 16 | 2,
            65 << 16 | 1,
            at,
            Status::INVALID_QUEUE_IDENTIFIER,
        ),
        (
            sq,
            15 << 16 | 2,
            9 << 16 | 1,
            at,
            Status::COMPLETION_QUEUE_INVALID,
        ),
        (sq, 2, 1 << 16 | 1, at, Status::INVALID_QUEUE_SIZE),
        (sq, 15 << 16 | 2, 1 << 16, at, Status::INVALID_FIELD),
        (
            sq,
            15 << 16 | 2,
            1 << 16 | 1,
            at + 64,
            Status::PRP_OFFSET_INVALID,
        ),
        (
            sq,
            15 << 16 | 2,
            1 << 16 | 1,
            HIGH - 4096,
            Status::DATA_TRANSFER_ERROR,
        ),
    ] {
        let status = h.admin(raw(opcode, cdw10, cdw11, prp1)).status();
        assert_eq!(
            plain(status),
            expected,
            "{opcode} {cdw10:#x} {cdw11:#x} {prp1:#x}"
        );
    }
    for qid in [0, 2, 65, 0xffff] {
        for opcode in [AdminOpcode::DELETE_IO_SQ, AdminOpcode::DELETE_IO_CQ] {
            assert_eq!(
                plain(h.delete(opcode, qid)),
                Status::INVALID_QUEUE_IDENTIFIER
            );
        }
    }
    assert_eq!(
        plain(h.delete(AdminOpcode::DELETE_IO_CQ, 1)),
        Status::INVALID_QUEUE_DELETION
    );
    assert_eq!(h.delete(AdminOpcode::DELETE_IO_SQ, 1), Status::SUCCESS);
    assert_eq!(h.delete(AdminOpcode::DELETE_IO_CQ, 1), Status::SUCCESS);
    h.create_pair(1, 2);
    let read = h.rw(NvmOpcode::READ, 1, 0, 1, DATA);
    for _ in 0..5 {
        assert_eq!(h.io(read), Status::SUCCESS);
    }
}

#[test]
fn queue_deletion_ends_commands_in_flight() {
    let (volume, faults) = faulty(1 << 20);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    let read = h.rw(NvmOpcode::READ, 1, 0, 1, DATA);
    h.submit(1, read);
    h.submit(1, read);
    h.run_held(&faults, 2);
    let mut delete = Command::new(AdminOpcode::DELETE_IO_SQ.0, 0, 0);
    delete.cdw10 = 1.into();
    let cid = h.submit(0, delete);
    let again = h.submit(0, delete);
    h.run_held(&faults, 2);
    let refused = h.reap(0).unwrap();
    assert_eq!(refused.cid.get(), again);
    assert_eq!(plain(refused.status()), Status::INVALID_QUEUE_IDENTIFIER);
    assert!(h.reap(0).is_none(), "it waits for the commands");
    faults.release();
    h.until(|h| h.peek(0).is_some());
    let done = h.reap(0).unwrap();
    assert_eq!((done.cid.get(), done.status()), (cid, Status::SUCCESS));
    assert_eq!(h.reap_all(1).len(), 2, "they completed before");
    assert_eq!(h.delete(AdminOpcode::DELETE_IO_CQ, 1), Status::SUCCESS);
}

#[test]
fn number_of_queues_is_negotiated() {
    let mut h = three();
    assert_eq!(
        h.get_feature(Fid::NUMBER_OF_QUEUES, 0, 0).dw0.get(),
        63 << 16 | 63
    );
    let done = h.set_feature(Fid::NUMBER_OF_QUEUES, 3 << 16 | 3);
    assert_eq!(
        (done.status(), done.dw0.get()),
        (Status::SUCCESS, 63 << 16 | 63)
    );
    for bad in [0xffff, 0xffff_0000, u32::MAX] {
        assert_eq!(
            plain(h.set_feature(Fid::NUMBER_OF_QUEUES, bad).status()),
            Status::INVALID_FIELD
        );
    }
    h.create_pair(1, 16);
    let late = h.set_feature(Fid::NUMBER_OF_QUEUES, 0).status();
    assert_eq!(plain(late), Status::COMMAND_SEQUENCE_ERROR);
}

#[test]
fn features_keep_values_until_reset() {
    let mut h = Host::ready_with(vec![ns(1, cached(mem(1 << 20)), 512)]);
    for (fid, select, value, default) in [
        (Fid::ARBITRATION, 0, 0x0102_0303, 5),
        (Fid::TEMPERATURE_THRESHOLD, 0, 360, 343),
        (Fid::TEMPERATURE_THRESHOLD, 1 << 20, 250, 0),
        (Fid::VOLATILE_WRITE_CACHE, 0, 0, 1),
        (Fid::INTERRUPT_COALESCING, 0, 0x0307, 0),
        (Fid::INTERRUPT_VECTOR_CONFIG, 7, 7 | 1 << 16, 7),
        (Fid::WRITE_ATOMICITY, 0, 1, 0),
        (Fid::ASYNC_EVENT_CONFIG, 0, 0x11f, 0),
        (Fid::KEEP_ALIVE_TIMER, 0, 120_000, 0),
    ] {
        assert_eq!(h.get_feature(fid, 0, select).dw0.get(), default, "{fid}");
        assert_eq!(
            h.set_feature(fid, select | value).status(),
            Status::SUCCESS,
            "{fid}"
        );
        assert_eq!(h.get_feature(fid, 0, select).dw0.get(), value, "{fid}");
        for other in [1, 2] {
            assert_eq!(
                h.get_feature(fid, other, select).dw0.get(),
                default,
                "{fid}: default, saved"
            );
        }
        assert_eq!(
            h.get_feature(fid, 3, select).dw0.get() & 5,
            4,
            "{fid}: changeable, not saveable"
        );
        assert_eq!(
            plain(h.get_feature(fid, 4, select).status()),
            Status::INVALID_FIELD
        );
        let mut save = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
        save.cdw10 = (u32::from(fid.0) | 1 << 31).into();
        assert_eq!(plain(h.admin(save).status()), Status::FEATURE_NOT_SAVEABLE);
        let mut of_a_namespace = Command::new(AdminOpcode::SET_FEATURES.0, 0, 1);
        of_a_namespace.cdw10 = u32::from(fid.0).into();
        assert_eq!(
            plain(h.admin(of_a_namespace).status()),
            Status::FEATURE_NOT_NAMESPACE_SPECIFIC
        );
    }
    h.disable();
    h.enable();
    assert_eq!(
        h.get_feature(Fid::TEMPERATURE_THRESHOLD, 0, 0).dw0.get(),
        343
    );
    assert_eq!(h.get_feature(Fid::VOLATILE_WRITE_CACHE, 0, 0).dw0.get(), 1);
    for (fid, value) in [
        (Fid::POWER_MANAGEMENT, 1),
        (Fid::TEMPERATURE_THRESHOLD, 1 << 16 | 300),
        (Fid::TEMPERATURE_THRESHOLD, 2 << 20 | 300),
        (Fid::INTERRUPT_VECTOR_CONFIG, 65),
        (Fid(0x00), 0),
        (Fid::HOST_MEMORY_BUFFER, 1),
        (Fid(0xc0), 1),
    ] {
        assert_eq!(
            plain(h.set_feature(fid, value).status()),
            Status::INVALID_FIELD,
            "{fid}"
        );
    }
    assert_eq!(
        h.set_feature(Fid::POWER_MANAGEMENT, 0).status(),
        Status::SUCCESS
    );
    assert_eq!(
        plain(h.set_feature(Fid::IO_COMMAND_SET_PROFILE, 1).status()),
        Status::IO_COMMAND_SET_COMBINATION_REJECTED
    );
    for select in [1 << 16, 9 << 16, 2 << 20] {
        let status = h
            .get_feature(Fid::TEMPERATURE_THRESHOLD, 0, select)
            .status();
        assert_eq!(plain(status), Status::INVALID_FIELD, "{select:#x}");
    }
    // No volume has a cache: there is nothing to turn off.
    let mut h = Host::ready();
    assert_eq!(
        plain(h.get_feature(Fid::VOLATILE_WRITE_CACHE, 0, 0).status()),
        Status::INVALID_FIELD
    );
}

#[test]
fn features_with_data_and_per_namespace_are_kept() {
    let mut h = three();
    let set = |h: &mut Host, fid: Fid, nsid: u32, cdw11: u32| {
        let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, nsid);
        command.cdw10 = u32::from(fid.0).into();
        command.cdw11 = cdw11.into();
        command.set_prps(PAGE, 0);
        h.admin(command).status()
    };
    h.write(PAGE, &0x0123_4567_89ab_u64.to_le_bytes());
    assert_eq!(
        h.get_feature(Fid::TIMESTAMP, 0, 0).status(),
        Status::SUCCESS
    );
    assert_eq!(h.read(PAGE + 6, 1)[0] >> 1 & 7, 0, "counted from the reset");
    h.write(PAGE, &0x0123_4567_89ab_u64.to_le_bytes());
    assert_eq!(set(&mut h, Fid::TIMESTAMP, 0, 0), Status::SUCCESS);
    assert_eq!(
        h.get_feature(Fid::TIMESTAMP, 0, 0).status(),
        Status::SUCCESS
    );
    let read = u64::from_le_bytes(h.read(PAGE, 8).try_into().unwrap());
    assert_eq!(read >> 49 & 7, 1, "set by the host");
    assert!((0x0123_4567_89ab..0x0123_4567_89ab + 600_000).contains(&(read & 0xffff_ffff_ffff)));
    h.write(PAGE, &pattern(3, 16));
    assert_eq!(set(&mut h, Fid::HOST_IDENTIFIER, 0, 1), Status::SUCCESS);
    h.write(PAGE, &[0; 16]);
    assert_eq!(
        h.get_feature(Fid::HOST_IDENTIFIER, 0, 1).status(),
        Status::SUCCESS
    );
    assert_eq!(h.read(PAGE, 16), pattern(3, 16));
    // Error recovery is each namespace's own.
    let get = |h: &mut Host, nsid: u32| {
        let mut command = Command::new(AdminOpcode::GET_FEATURES.0, 0, nsid);
        command.cdw10 = u32::from(Fid::ERROR_RECOVERY.0).into();
        let done = h.admin(command);
        (plain(done.status()), done.dw0.get())
    };
    assert_eq!(set(&mut h, Fid::ERROR_RECOVERY, 3, 44), Status::SUCCESS);
    assert_eq!(
        (get(&mut h, 3), get(&mut h, 5)),
        ((Status::SUCCESS, 44), (Status::SUCCESS, 0))
    );
    assert_eq!(
        set(&mut h, Fid::ERROR_RECOVERY, u32::MAX, 7),
        Status::SUCCESS
    );
    assert_eq!(
        (get(&mut h, 1).1, get(&mut h, 3).1, get(&mut h, 5).1),
        (7, 7, 7)
    );
    assert_eq!(
        plain(set(&mut h, Fid::ERROR_RECOVERY, 1, 1 << 16)),
        Status::INVALID_FIELD,
        "DULBE"
    );
    // NSIDs that are none ("NVMe Base 2.1", 4.4): nothing is set, whichever value is asked for.
    for (nsid, status) in [
        (0, Status::INVALID_NAMESPACE_OR_FORMAT),
        (9, Status::INVALID_NAMESPACE_OR_FORMAT),
        (2, Status::INVALID_FIELD),
    ] {
        assert_eq!(plain(set(&mut h, Fid::ERROR_RECOVERY, nsid, 5)), status);
        assert_eq!(get(&mut h, nsid).0, status);
    }
    assert_eq!(get(&mut h, u32::MAX).0, Status::INVALID_NAMESPACE_OR_FORMAT);
    assert_eq!((get(&mut h, 1).1, get(&mut h, 5).1), (7, 7));
    for select in [0, 1, 2] {
        assert_eq!(
            plain(h.get_feature(Fid::ERROR_RECOVERY, select, 0).status()),
            Status::INVALID_NAMESPACE_OR_FORMAT
        );
    }
    // Changeable, and each namespace's own.
    let capabilities = h.get_feature(Fid::ERROR_RECOVERY, 3, 0);
    assert_eq!(capabilities.status(), Status::SUCCESS);
    assert_eq!(capabilities.dw0.get(), 0b110);
    // A feature of the controller can be read by any NSID, and set by none but 0 and FFFFFFFFh.
    for nsid in [0, 1, 2, u32::MAX] {
        let mut read = Command::new(AdminOpcode::GET_FEATURES.0, 0, nsid);
        read.cdw10 = u32::from(Fid::ARBITRATION.0).into();
        assert_eq!(h.admin(read).status(), Status::SUCCESS, "{nsid:#x}");
        let expected = match nsid {
            0 | u32::MAX => Status::SUCCESS,
            _ => Status::FEATURE_NOT_NAMESPACE_SPECIFIC,
        };
        assert_eq!(plain(set(&mut h, Fid::ARBITRATION, nsid, 5)), expected);
    }
}

#[test]
fn disabling_write_cache_makes_writes_durable() {
    let (volume, faults) = faulty(1 << 20);
    let mut h = Host::ready_with(vec![ns(1, cached(volume), 512)]);
    faults.add(Fault::always(OpKind::Any, Effect::Hold));
    let write = h.rw(NvmOpcode::WRITE, 1, 0, 1, DATA);
    h.submit(1, write);
    h.run_held(&faults, 1);
    let mut off = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
    off.cdw10 = u32::from(Fid::VOLATILE_WRITE_CACHE.0).into();
    h.submit(0, off);
    h.run_held(&faults, 1);
    assert!(h.reap(0).is_none());
    faults.release();
    h.run_held(&faults, 1);
    assert!(
        h.reap(1).is_some() && h.reap(0).is_none(),
        "now the flush is held"
    );
    faults.clear();
    faults.release();
    h.until(|h| h.peek(0).is_some());
    assert_eq!(h.reap(0).unwrap().status(), Status::SUCCESS);
    // A flush that fails is told.
    assert_eq!(
        h.set_feature(Fid::VOLATILE_WRITE_CACHE, 1).status(),
        Status::SUCCESS
    );
    faults.add(Fault::nth(
        OpKind::Flush,
        1,
        Effect::Fail(IoErrorKind::MediaWrite.into()),
    ));
    assert_eq!(
        plain(h.set_feature(Fid::VOLATILE_WRITE_CACHE, 0).status()),
        Status::WRITE_FAULT
    );
}

#[test]
fn log_pages_are_read_whole_and_in_parts() {
    let mut h = Host::ready();
    for (lid, len) in [
        (0, 1024),
        (1, 4096),
        (2, 512),
        (3, 512),
        (4, 4096),
        (5, 4096),
        (0x12, 1024),
    ] {
        let (status, all) = h.log(lid, len, 0, true);
        assert_eq!(status, Status::SUCCESS, "{lid:#x}");
        let (status, part) = h.log(lid, 64, 128, true);
        assert_eq!(status, Status::SUCCESS, "{lid:#x}");
        if lid != 2 {
            assert_eq!(part, all[128..192], "{lid:#x}");
        }
        assert_eq!(
            plain(h.log(lid, 64, 2, true).0),
            Status::INVALID_FIELD,
            "{lid:#x}: offset"
        );
        assert_eq!(
            plain(h.log(lid, 64, 1 << 20, true).0),
            Status::INVALID_FIELD
        );
        assert_eq!(plain(h.log(lid, 64, !3, true).0), Status::INVALID_FIELD);
        let supported = h.log(0, 1024, 0, true).1;
        assert_eq!(word(&supported, usize::from(lid) * 4) & 1, 1, "{lid:#x}");
    }
    for lid in [9, 0xa, 0x70, 0x80, 0xc0, 0xff] {
        assert_eq!(
            plain(h.log(lid, 64, 0, true).0),
            Status::INVALID_LOG_PAGE,
            "{lid:#x}"
        );
    }
    assert_eq!(
        plain(h.log(2, 1 << 20, 0, true).0),
        Status::INVALID_FIELD,
        "far too long"
    );
    let effects = h.log(5, 4096, 0, true).1;
    assert_eq!(word(&effects, 4 * 6) & 1, 1, "Identify");
    assert_eq!(word(&effects, 4 * 0x7c) & 1, 1, "Doorbell Buffer Config");
    assert_eq!(word(&effects, 1024 + 4) & 3, 3, "Write changes content");
    assert_eq!(
        word(&effects, 1024 + 4 * 3),
        0,
        "what is no command is not there"
    );
    assert_eq!(word(&effects, 1024 + 4 * 4) & 3, 3, "Write Uncorrectable");
    let mut of_a_namespace = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, 1);
    of_a_namespace.cdw10 = (2 | 127 << 16).into();
    of_a_namespace.set_prps(PAGE, 0);
    assert_eq!(
        plain(h.admin(of_a_namespace).status()),
        Status::INVALID_FIELD
    );
}

#[test]
fn error_log_lists_newest_first() {
    let mut h = Host::ready();
    let before = h.c.stats().error_log_entries.get();
    let mut cids = Vec::new();
    for i in 0..70 {
        let read = h.rw(NvmOpcode::READ, 1, 1 << 40 | i, 1, DATA);
        cids.push(h.submit(1, read));
        h.run();
        assert_eq!(plain(h.reap(1).unwrap().status()), Status::LBA_OUT_OF_RANGE);
    }
    assert_eq!(h.c.stats().error_log_entries.get() - before, 70);
    let (_, log) = h.log(1, 4096, 0, true);
    for (i, raw) in log.chunks_exact(64).enumerate() {
        let entry = ErrorInformation::read_from_bytes(raw).unwrap();
        assert_eq!(entry.error_count.get(), 70 - i as u64);
        assert_eq!(entry.cid.get(), cids[69 - i]);
        assert_eq!((entry.sqid.get(), entry.nsid.get()), (1, 1));
        assert_eq!(plain(entry.status()), Status::LBA_OUT_OF_RANGE);
        assert_eq!(entry.lba.get(), 1 << 40 | (69 - i as u64));
    }
    h.disable();
    h.enable();
    assert_eq!(h.log(1, 64, 0, true).1, log[..64], "logs outlive a reset");
}

#[test]
fn smart_log_counts_commands() {
    let mut h = Host::ready();
    let smart = |h: &mut Host| Smart::read_from_bytes(&h.log(2, 512, 0, true).1).unwrap();
    for _ in 0..3 {
        let read = h.rw(NvmOpcode::READ, 1, 0, 8, DATA);
        assert_eq!(h.io(read), Status::SUCCESS);
    }
    let write = h.rw(NvmOpcode::WRITE, 1, 0, 8, DATA);
    assert_eq!(h.io(write), Status::SUCCESS);
    let compare = h.rw(NvmOpcode::COMPARE, 1, 0, 8, DATA);
    assert_eq!(h.io(compare), Status::SUCCESS);
    let verify = h.rw(NvmOpcode::VERIFY, 1, 0, 8, 0);
    assert_eq!(h.io(verify), Status::SUCCESS);
    let refused = h.rw(NvmOpcode::READ, 1, 1 << 50, 8, DATA);
    assert!(!h.io(refused).is_success());
    let log = smart(&mut h);
    assert_eq!((log.hrc.get(), log.hwc.get()), (4, 1));
    assert_eq!((log.dur.get(), log.duw.get()), (1, 1));
    assert_eq!(h.c.stats().bytes_read(), 5 * 4096);
    assert_eq!(h.c.stats().bytes_written(), 4096);
    assert_eq!(
        (
            log.mdie.get(),
            log.neile.get(),
            log.pwrc.get(),
            log.upl.get()
        ),
        (0, 1, 1, 0)
    );
    assert_eq!((log.ctemp.get(), log.avsp), (310, 100));
}

/// The one slot has the program's version, which Identify Controller says, too; it can neither be
/// written nor changed to ("NVMe Base 2.1", 5.1.12.1.4).
#[test]
fn firmware_slot_has_program_version() {
    let mut h = three();
    let (status, page) = h.log(3, 512, 0, false);
    assert_eq!(status, Status::SUCCESS);
    let log = FirmwareSlot::read_from_bytes(&page).unwrap();
    assert_eq!((log.afi.current(), log.afi.next()), (1, 0));
    let version = format!("{:8}", env!("CARGO_PKG_VERSION"));
    assert_eq!(&page[8..16], version.as_bytes());
    assert!(page[16..].iter().all(|byte| *byte == 0), "other slots");
    let (_, page) = h.identify(1, 0, 0);
    let id = IdentifyController::read_from_bytes(&page).unwrap();
    assert_eq!(&page[64..72], version.as_bytes());
    assert!(id.frmw.ffsro() && id.frmw.nofs() == 1 && !id.frmw.fawr());
}

/// Commands that would change firmware, keys or what other hosts may do are refused
/// whatever their fields are, with Do Not Retry, and nothing that Identify Controller says has a
/// host try them.
#[test]
fn unsupported_admin_commands_are_refused() {
    use AdminOpcode as Op;
    let mut h = three();
    h.create_pair(1, 16);
    let data = pattern(7, 512);
    h.write(DATA, &data);
    let write = h.rw(NvmOpcode::WRITE, 1, 0, 1, DATA);
    assert_eq!(h.io(write), Status::SUCCESS);
    let mut refused = 0;
    for opcode in [
        Op::FIRMWARE_COMMIT,
        Op::FIRMWARE_IMAGE_DOWNLOAD,
        Op::SECURITY_SEND,
        Op::SECURITY_RECEIVE,
        Op::LOCKDOWN,
    ] {
        for nsid in [0, 1, 2, 0xffff_ffff] {
            for dword in [0, 1, 0x200, u32::MAX] {
                let mut command = Command::new(opcode.0, 0, nsid);
                command.set_prps(PAGE, 0);
                (command.cdw10, command.cdw11) = (dword.into(), dword.into());
                let status = h.admin(command).status();
                assert_eq!(status, Status::INVALID_OPCODE.with_dnr(true), "{opcode}");
                refused += 1;
            }
        }
    }
    // Each of them is in the error log, and none has done anything.
    let (_, page) = h.log(2, 512, 0, false);
    let smart = Smart::read_from_bytes(&page).unwrap();
    assert_eq!(smart.neile.get(), refused);
    h.write(DATA, &[0; 512]);
    let read = h.rw(NvmOpcode::READ, 1, 0, 1, DATA);
    assert_eq!((h.io(read), h.read(DATA, 512)), (Status::SUCCESS, data));
    let (_, page) = h.identify(1, 0, 0);
    let id = IdentifyController::read_from_bytes(&page).unwrap();
    let oacs = id.oacs;
    assert!(!oacs.ssrs() && !oacs.fwds() && !oacs.cfls());
    assert_eq!(id.rpmbs.get(), 0);
}
