//! Namespaces that a host makes of a pool: Namespace Management, Namespace Attachment.

mod deaths;
mod pool;

use crate::common::*;
use controller::{ConfigError, Controller, ControllerConfig, NamespacePool, PoolChange, PoolError};
use nvme::aen::{AsyncEvent, Notice};
use nvme::cmd::namespace::NewNamespace;
use nvme::feature::Fid;
use nvme::identify::{ControllerList, IdentifyController, IdentifyNamespace};
use nvme::log::{
    ChangeNamespace, Lid, PersistentEvent, PersistentEventHeader, PersistentEventType,
};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use pool::{CAPACITY, TestPool};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use volume::{Effect, Fault, Io, IoOptions, OpKind};
use zerocopy::{FromBytes, IntoBytes};

const ALL: u32 = 0xffff_ffff;
/// Where the data of commands lies.
const NEW: u64 = 0x5000;

/// A host with a namespace of the configuration (1), and a pool.
fn host() -> (Host, Arc<TestPool>) {
    let pool = Arc::<TestPool>::default();
    let h = host_with(&pool);
    (h, pool)
}

fn host_with(pool: &Arc<TestPool>) -> Host {
    let config = ControllerConfig {
        max_namespaces: 4,
        pool: Some(pool.clone()),
        ..Default::default()
    };
    let mut h = Host::with(config, vec![ns(1, mem(1 << 20), 512)]);
    h.enable();
    h.create_pair(1, 16);
    h
}

fn new(blocks: u64) -> NewNamespace {
    NewNamespace {
        nsze: blocks.into(),
        ncap: blocks.into(),
        ..Default::default()
    }
}

fn create_command(h: &Host, new: &NewNamespace) -> Command {
    h.write(NEW, new.as_bytes());
    let mut command = Command::new(AdminOpcode::NAMESPACE_MANAGEMENT.0, 0, 0);
    command.set_prps(NEW, 0);
    command
}

/// Creates a namespace: its status and NSID.
fn create_of(h: &mut Host, new: &NewNamespace) -> (Status, u32) {
    let command = create_command(h, new);
    let done = h.admin(command);
    (done.status(), done.dw0.get())
}

fn create(h: &mut Host, blocks: u64) -> u32 {
    let (status, nsid) = create_of(h, &new(blocks));
    assert_eq!(status, Status::SUCCESS);
    nsid
}

fn delete_command(nsid: u32) -> Command {
    let mut command = Command::new(AdminOpcode::NAMESPACE_MANAGEMENT.0, 0, nsid);
    command.cdw10 = 1.into();
    command
}

fn delete(h: &mut Host, nsid: u32) -> Status {
    h.admin(delete_command(nsid)).status()
}

fn attachment_command(h: &Host, nsid: u32, sel: u32, list: &[u8]) -> Command {
    let mut page = vec![0; 4096];
    page[..list.len()].copy_from_slice(list);
    h.write(NEW, &page);
    let mut command = Command::new(AdminOpcode::NAMESPACE_ATTACHMENT.0, 0, nsid);
    command.cdw10 = sel.into();
    command.set_prps(NEW, 0);
    command
}

fn attachment(h: &mut Host, nsid: u32, sel: u32, cntlids: &[u16]) -> Status {
    let list = ControllerList::from_iter(cntlids.iter().copied());
    let command = attachment_command(h, nsid, sel, list.as_bytes());
    h.admin(command).status()
}

fn attach(h: &mut Host, nsid: u32) -> Status {
    attachment(h, nsid, 0, &[1])
}

fn detach(h: &mut Host, nsid: u32) -> Status {
    attachment(h, nsid, 1, &[1])
}

fn list(h: &mut Host, cns: u8) -> Vec<u32> {
    let (status, page) = h.identify(cns, 0, 0);
    assert_eq!(status, Status::SUCCESS);
    let nsids = page.chunks_exact(4);
    let nsids = nsids.map(|raw| u32::from_le_bytes(raw.try_into().unwrap()));
    nsids.take_while(|nsid| *nsid != 0).collect()
}

fn active(h: &mut Host) -> Vec<u32> {
    list(h, 0x02)
}

fn allocated(h: &mut Host) -> Vec<u32> {
    list(h, 0x10)
}

fn identify_ns(h: &mut Host, cns: u8, nsid: u32) -> IdentifyNamespace {
    let (status, page) = h.identify(cns, nsid, 0);
    assert_eq!(status, Status::SUCCESS);
    IdentifyNamespace::read_from_bytes(&page).unwrap()
}

fn identify(h: &mut Host) -> IdentifyController {
    let (status, page) = h.identify(1, 0, 0);
    assert_eq!(status, Status::SUCCESS);
    IdentifyController::read_from_bytes(&page).unwrap()
}

fn put(h: &mut Host, nsid: u32, slba: u64, byte: u8) -> Status {
    h.write(DATA, &[byte; 512]);
    let command = h.rw(NvmOpcode::WRITE, nsid, slba, 1, DATA);
    h.io(command)
}

fn get(h: &mut Host, nsid: u32, slba: u64) -> Vec<u8> {
    let command = h.rw(NvmOpcode::READ, nsid, slba, 1, DATA);
    assert_eq!(h.io(command), Status::SUCCESS, "{nsid} {slba}");
    h.read(DATA, 512)
}

#[test]
fn namespace_is_created_used_and_deleted() {
    let (mut h, pool) = host();
    let before = identify(&mut h);
    assert!(before.oacs.nms());
    assert_eq!(before.unvmcap.get(), u128::from(CAPACITY));
    assert_eq!(before.tnvmcap.get(), u128::from(CAPACITY + (1 << 20)));
    let nsid = create(&mut h, 2048);
    assert_eq!(nsid, 2);
    assert_eq!(
        identify(&mut h).unvmcap.get(),
        u128::from(CAPACITY - (1 << 20))
    );
    // It is there, but not for this controller.
    assert_eq!((active(&mut h), allocated(&mut h)), (vec![1], vec![1, 2]));
    assert_eq!(identify_ns(&mut h, 0, 2), IdentifyNamespace::default());
    let new = identify_ns(&mut h, 0x11, 2);
    assert_eq!((new.nsze.get(), new.nvmcap.get()), (2048, 1 << 20));
    assert_eq!(plain(put(&mut h, 2, 0, 1)), Status::INVALID_FIELD);
    assert_eq!(attach(&mut h, 2), Status::SUCCESS);
    assert_eq!(
        (active(&mut h), allocated(&mut h)),
        (vec![1, 2], vec![1, 2])
    );
    let shown = identify_ns(&mut h, 0, 2);
    assert_eq!(
        (shown.nsze, shown.nguid, shown.eui64),
        (new.nsze, new.nguid, new.eui64)
    );
    assert_eq!(identify_ns(&mut h, 0x11, 2), shown);
    let (status, page) = h.identify(0x12, 2, 0);
    assert_eq!((status, &page[..4]), (Status::SUCCESS, &[1, 0, 1, 0][..]));
    assert_eq!(put(&mut h, 2, 2047, 0x5a), Status::SUCCESS);
    assert_eq!(detach(&mut h, 2), Status::SUCCESS);
    assert_eq!((active(&mut h), allocated(&mut h)), (vec![1], vec![1, 2]));
    let (_, page) = h.identify(0x12, 2, 0);
    assert_eq!(page[..2], [0, 0]);
    // The data is there when the namespace is attached again.
    assert_eq!(attach(&mut h, 2), Status::SUCCESS);
    assert_eq!(get(&mut h, 2, 2047), vec![0x5a; 512]);
    assert_eq!(delete(&mut h, 2), Status::SUCCESS);
    assert_eq!((active(&mut h), allocated(&mut h)), (vec![1], vec![1]));
    assert!(pool.namespaces().is_empty());
    let after = identify(&mut h);
    assert_eq!(after.unvmcap, before.unvmcap);
    assert_eq!(after.tnvmcap, before.tnvmcap);
    // Its number is free again, and the next one is another.
    assert_eq!(create(&mut h, 8), 2);
    assert_ne!(identify_ns(&mut h, 0x11, 2).nguid, new.nguid);
    assert_eq!(h.c.deadline(), None);
}

#[test]
fn identify_reports_common_capabilities() {
    let (mut h, _) = host();
    let common = identify_ns(&mut h, 0, ALL);
    assert_eq!((common.nsze.get(), common.lbaf[0].lbads), (0, 9));
    assert_eq!((common.nlbaf_z, common.lbaf[1].lbads), (1, 12));
    let mut h = Host::ready();
    let (status, _) = h.identify(0, ALL, 0);
    assert_eq!(plain(status), Status::INVALID_NAMESPACE_OR_FORMAT);
    assert_eq!(identify(&mut h).unvmcap.get(), 0);
}

#[test]
fn host_is_notified_of_attach_and_detach() {
    let (mut h, _) = host();
    let nsid = create(&mut h, 8);
    h.set_feature(Fid::ASYNC_EVENT_CONFIG, 1 << 8);
    for sel in [0, 1] {
        let aer = Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0);
        let aer = h.submit(0, aer);
        let list = ControllerList::from_iter([1]);
        let command = attachment_command(&h, nsid, sel, list.as_bytes());
        let cid = h.submit(0, command);
        let mut done = Vec::new();
        h.until(|h| {
            done.extend(h.reap_all(0));
            done.len() == 2
        });
        done.sort_by_key(|done| done.cid.get());
        assert_eq!((done[0].cid.get(), done[1].cid.get()), (aer, cid));
        let notice = Notice::NAMESPACE_ATTRIBUTE_CHANGED;
        let notice = AsyncEvent::notice(notice, Lid::CHANGED_NAMESPACE_LIST);
        assert_eq!(done[0].dw0.get(), notice.into_bits());
        let (_, changed) = h.log(Lid::CHANGED_NAMESPACE_LIST.0, 4096, 0, false);
        assert_eq!(changed[..8], [2, 0, 0, 0, 0, 0, 0, 0]);
    }
}

#[test]
fn create_with_invalid_fields_is_refused() {
    let (mut h, pool) = host();
    let good = new(8);
    let with = |change: fn(&mut NewNamespace)| {
        let mut new = new(8);
        change(&mut new);
        new
    };
    let per_field: [(NewNamespace, Status); 18] = [
        (new(0), Status::INVALID_FIELD),
        (
            with(|new| new.ncap = 7.into()),
            Status::THIN_PROVISIONING_NOT_SUPPORTED,
        ),
        (
            with(|new| new.ncap = 0.into()),
            Status::THIN_PROVISIONING_NOT_SUPPORTED,
        ),
        (with(|new| new.ncap = 9.into()), Status::INVALID_FIELD),
        (with(|new| new.flbas = 2.into()), Status::INVALID_FORMAT),
        (with(|new| new.flbas = 0x10.into()), Status::INVALID_FORMAT),
        (with(|new| new.dps = 1.into()), Status::INVALID_FORMAT),
        (with(|new| new.nmic = 2.into()), Status::INVALID_FIELD),
        (with(|new| new.nmic = 0x80.into()), Status::INVALID_FIELD),
        (
            with(|new| new.anagrpid = 1.into()),
            Status::ANA_GROUP_IDENTIFIER_INVALID,
        ),
        (with(|new| new.nvmsetid = 1.into()), Status::INVALID_FIELD),
        (with(|new| new.endgid = 1.into()), Status::INVALID_FIELD),
        (with(|new| new.nphndls = 1.into()), Status::INVALID_FIELD),
        (with(|new| new.lbstm = 1.into()), Status::INVALID_FIELD),
        (with(|new| new.reserved16[0] = 1), Status::INVALID_FIELD),
        (with(|new| new.reserved768[255] = 1), Status::INVALID_FIELD),
        (new(u64::MAX), Status::NAMESPACE_INSUFFICIENT_CAPACITY),
        (
            new(CAPACITY / 512 + 1),
            Status::NAMESPACE_INSUFFICIENT_CAPACITY,
        ),
    ];
    for (at, (new, expected)) in per_field.iter().enumerate() {
        let (status, _) = create_of(&mut h, new);
        assert_eq!(plain(status), *expected, "{at}");
        assert!(status.dnr(), "{at}");
    }
    // The newest error says how much it would take.
    let (_, errors) = h.log(Lid::ERROR_INFORMATION.0, 64, 0, false);
    assert_eq!(errors[32..40], (CAPACITY + 512).to_le_bytes());
    for (nsid, cdw10, cdw11, expected) in [
        (1, 0, 0, Status::INVALID_FIELD),
        (ALL, 0, 0, Status::INVALID_FIELD),
        (0, 2, 0, Status::INVALID_FIELD),
        (0, 15, 0, Status::INVALID_FIELD),
        (0, 0, 1 << 24, Status::IO_COMMAND_SET_NOT_SUPPORTED),
        (0, 0, 2 << 24, Status::IO_COMMAND_SET_NOT_SUPPORTED),
    ] {
        let mut command = create_command(&h, &good);
        command.nsid = nsid.into();
        command.cdw10 = cdw10.into();
        command.cdw11 = (cdw11 as u32).into();
        let status = h.admin(command).status();
        assert_eq!(plain(status), expected, "{nsid:#x} {cdw10} {cdw11:#x}");
    }
    assert_eq!(allocated(&mut h), [1]);
    assert!(pool.changes.lock().unwrap().is_empty());
    // What is a vendor's is nobody's here.
    let vendors = with(|new| new.vs = [7; 3072]);
    let shared = with(|new| new.nmic = 1.into());
    assert_eq!(create_of(&mut h, &vendors), (Status::SUCCESS, 2));
    assert_eq!(create_of(&mut h, &shared), (Status::SUCCESS, 3));
    assert!(identify_ns(&mut h, 0x11, 3).nmic.shrns());
    assert_eq!(attach(&mut h, 3), Status::SUCCESS);
    assert!(identify_ns(&mut h, 0, 3).nmic.shrns());
    // The data is where the host said, or nowhere.
    let mut nowhere = create_command(&h, &good);
    nowhere.set_prps(0xdead_0000_0000, 0);
    assert_eq!(
        plain(h.admin(nowhere).status()),
        Status::DATA_TRANSFER_ERROR
    );
}

#[test]
fn namespaces_are_limited_by_nsid_and_capacity() {
    let (mut h, _) = host();
    for nsid in 2..=4 {
        assert_eq!(create(&mut h, 8), nsid);
    }
    let (status, _) = create_of(&mut h, &new(8));
    assert_eq!(plain(status), Status::NAMESPACE_IDENTIFIER_UNAVAILABLE);
    assert_eq!(delete(&mut h, 3), Status::SUCCESS);
    let left = (CAPACITY - 2 * 8 * 512) / 512;
    let (status, _) = create_of(&mut h, &new(left + 1));
    assert_eq!(plain(status), Status::NAMESPACE_INSUFFICIENT_CAPACITY);
    assert_eq!(create(&mut h, left), 3);
    assert_eq!(identify(&mut h).unvmcap.get(), 0);
}

#[test]
fn configured_namespaces_cannot_be_managed() {
    let (mut h, _) = host();
    let nsid = create(&mut h, 8);
    assert_eq!(plain(delete(&mut h, 1)), Status::OPERATION_DENIED);
    assert_eq!(plain(delete(&mut h, ALL)), Status::OPERATION_DENIED);
    assert_eq!(plain(detach(&mut h, 1)), Status::OPERATION_DENIED);
    assert_eq!(plain(attach(&mut h, 1)), Status::NAMESPACE_ALREADY_ATTACHED);
    assert_eq!(allocated(&mut h), [1, nsid]);
    assert_eq!(put(&mut h, 1, 0, 1), Status::SUCCESS);
}

#[test]
fn broadcast_delete_removes_all_namespaces() {
    let pool = Arc::<TestPool>::default();
    let config = ControllerConfig {
        max_namespaces: 4,
        pool: Some(pool.clone()),
        ..Default::default()
    };
    let mut h = Host::with(config, Vec::new());
    h.enable();
    h.create_pair(1, 16);
    assert_eq!(delete(&mut h, ALL), Status::SUCCESS, "of none");
    for nsid in 1..=4 {
        assert_eq!(create(&mut h, 8), nsid);
    }
    assert_eq!(attach(&mut h, 2), Status::SUCCESS);
    assert_eq!(attach(&mut h, 4), Status::SUCCESS);
    assert_eq!(delete(&mut h, ALL), Status::SUCCESS);
    assert_eq!((active(&mut h), allocated(&mut h)), (vec![], vec![]));
    assert_eq!(create(&mut h, CAPACITY / 512), 1);
}

#[test]
fn invalid_nsid_or_controller_list_is_refused() {
    let (mut h, pool) = host();
    create(&mut h, 8);
    for (nsid, expected) in [
        (0, Status::INVALID_NAMESPACE_OR_FORMAT),
        (3, Status::INVALID_FIELD),
        (5, Status::INVALID_NAMESPACE_OR_FORMAT),
        (0xffff_fffe, Status::INVALID_NAMESPACE_OR_FORMAT),
    ] {
        assert_eq!(plain(delete(&mut h, nsid)), expected, "{nsid:#x}");
        assert_eq!(plain(attach(&mut h, nsid)), expected, "{nsid:#x}");
        assert_eq!(plain(detach(&mut h, nsid)), expected, "{nsid:#x}");
    }
    assert_eq!(plain(attach(&mut h, ALL)), Status::INVALID_FIELD);
    let invalid = Status::CONTROLLER_LIST_INVALID;
    for sel in [0, 1] {
        for cntlids in [&[][..], &[2], &[1, 1], &[1, 2], &[0, 1], &[0xffff]] {
            assert_eq!(
                plain(attachment(&mut h, 2, sel, cntlids)),
                invalid,
                "{cntlids:?}"
            );
        }
        for numid in [2048u16, 0xffff] {
            let list = [numid.to_le_bytes(), [1, 0]].concat();
            let command = attachment_command(&h, 2, sel, &list);
            assert_eq!(plain(h.admin(command).status()), invalid, "{numid}");
        }
    }
    for sel in [2, 15] {
        assert_eq!(
            plain(attachment(&mut h, 2, sel, &[1])),
            Status::INVALID_FIELD
        );
    }
    assert_eq!(plain(detach(&mut h, 2)), Status::NAMESPACE_NOT_ATTACHED);
    assert_eq!(attach(&mut h, 2), Status::SUCCESS);
    assert_eq!(plain(attach(&mut h, 2)), Status::NAMESPACE_ALREADY_ATTACHED);
    assert_eq!(detach(&mut h, 2), Status::SUCCESS);
    assert_eq!(plain(detach(&mut h, 2)), Status::NAMESPACE_NOT_ATTACHED);
    assert_eq!(delete(&mut h, 2), Status::SUCCESS);
    assert_eq!(plain(delete(&mut h, 2)), Status::INVALID_FIELD, "twice");
    assert!(pool.namespaces().is_empty());
}

#[test]
fn namespace_commands_without_pool_are_invalid() {
    let mut h = Host::ready();
    assert!(!identify(&mut h).oacs.nms());
    let (status, _) = create_of(&mut h, &new(8));
    assert_eq!(plain(status), Status::INVALID_OPCODE);
    assert_eq!(plain(attach(&mut h, 1)), Status::INVALID_OPCODE);
}

#[test]
fn detach_waits_for_commands_in_flight() {
    for deletes in [false, true] {
        let (mut h, pool) = host();
        let nsid = create(&mut h, 8);
        assert_eq!(attach(&mut h, nsid), Status::SUCCESS);
        let faults = pool.faults(nsid);
        faults.add(Fault::always(OpKind::Write, Effect::Hold));
        let write = h.rw(NvmOpcode::WRITE, nsid, 0, 1, DATA);
        h.submit(1, write);
        h.run_held(&faults, 1);
        let command = if deletes {
            delete_command(nsid)
        } else {
            let list = ControllerList::from_iter([1]);
            attachment_command(&h, nsid, 1, list.as_bytes())
        };
        let cid = h.submit(0, command);
        for _ in 0..20 {
            h.round();
        }
        assert!(h.reap(0).is_none(), "it has not waited");
        assert_eq!(pool.changes.lock().unwrap().len(), 2);
        // No new command finds it, and others go on.
        assert_eq!(active(&mut h), [1]);
        assert_eq!(allocated(&mut h), [1, 2]);
        h.submit(1, h.rw(NvmOpcode::READ, nsid, 0, 1, DATA));
        h.until(|h| h.peek(1).is_some());
        assert_eq!(plain(h.reap(1).unwrap().status()), Status::INVALID_FIELD);
        faults.clear();
        faults.release();
        h.until(|h| h.peek(0).is_some());
        let done = h.reap(0).unwrap();
        assert_eq!((done.cid.get(), done.status()), (cid, Status::SUCCESS));
        assert_eq!(h.reap(1).unwrap().status(), Status::SUCCESS);
        assert_eq!(pool.namespaces().is_empty(), deletes);
        assert!(pool.namespaces().iter().all(|ns| ns.attached.is_empty()));
    }
}

/// A volume that does not answer.
#[test]
fn detach_ends_hanging_commands() {
    let (mut h, pool) = host();
    let nsid = create(&mut h, 8);
    assert_eq!(attach(&mut h, nsid), Status::SUCCESS);
    let faults = pool.faults(nsid);
    faults.add(Fault::always(OpKind::Write, Effect::Hold));
    let write = h.rw(NvmOpcode::WRITE, nsid, 0, 1, DATA);
    h.submit(1, write);
    h.run_held(&faults, 1);
    h.submit(0, delete_command(nsid));
    for _ in 0..20 {
        h.round();
    }
    assert!(h.reap(0).is_none());
    assert!(
        h.c.deadline()
            .is_some_and(|at| at <= h.now + Duration::from_millis(2))
    );
    h.now += Duration::from_secs(6);
    h.until(|h| h.peek(0).is_some());
    assert_eq!(h.reap(0).unwrap().status(), Status::SUCCESS);
    assert!(!h.reap(1).unwrap().status().is_success());
    assert!(pool.namespaces().is_empty());
}

#[test]
fn namespace_commands_run_in_order() {
    let (mut h, pool) = host();
    pool.holds.store(true, Ordering::Relaxed);
    let command = create_command(&h, &new(8));
    let mut cids = vec![h.submit(0, command), h.submit(0, command)];
    cids.push(h.submit(0, delete_command(2)));
    cids.push(h.submit(0, delete_command(2)));
    // Others do not wait.
    assert_eq!(
        plain(delete(&mut host().0, 9)),
        Status::INVALID_NAMESPACE_OR_FORMAT
    );
    let (status, _) = h.identify(1, 0, 0);
    assert_eq!(status, Status::SUCCESS);
    let mut done = Vec::new();
    h.until(|h| {
        pool.release();
        done.extend(h.reap_all(0));
        done.len() == 4
    });
    let found: Vec<u16> = done.iter().map(|done| done.cid.get()).collect();
    assert_eq!(found, cids);
    let results: Vec<_> = done
        .iter()
        .map(|d| (plain(d.status()), d.dw0.get()))
        .collect();
    let ok = Status::SUCCESS;
    assert_eq!(
        results,
        [(ok, 2), (ok, 3), (ok, 0), (Status::INVALID_FIELD, 0)]
    );
    assert_eq!(allocated(&mut h), [1, 3]);
}

#[test]
fn pool_errors_map_to_status() {
    let (mut h, pool) = host();
    let fail = |error| *pool.fails.lock().unwrap() = error;
    for (error, expected) in [
        (PoolError::NoSpace, Status::NAMESPACE_INSUFFICIENT_CAPACITY),
        (PoolError::Failed, Status::INTERNAL_ERROR),
    ] {
        fail(Some(error));
        assert_eq!(plain(create_of(&mut h, &new(8)).0), expected);
    }
    fail(None);
    let nsid = create(&mut h, 8);
    fail(Some(PoolError::Failed));
    assert_eq!(plain(attach(&mut h, nsid)), Status::INTERNAL_ERROR);
    assert_eq!(active(&mut h), [1]);
    fail(None);
    assert_eq!(attach(&mut h, nsid), Status::SUCCESS);
    assert_eq!(put(&mut h, nsid, 1, 0x5a), Status::SUCCESS);
    // What is kept is what the host finds.
    fail(Some(PoolError::Failed));
    assert_eq!(plain(detach(&mut h, nsid)), Status::INTERNAL_ERROR);
    assert_eq!(active(&mut h), [1, nsid]);
    assert_eq!(get(&mut h, nsid, 1), vec![0x5a; 512]);
    assert_eq!(plain(delete(&mut h, nsid)), Status::INTERNAL_ERROR);
    assert_eq!(active(&mut h), [1, nsid]);
    assert_eq!(get(&mut h, nsid, 1), vec![0x5a; 512]);
    fail(None);
    assert_eq!(delete(&mut h, nsid), Status::SUCCESS);
    // One that no engine can open is attached nowhere.
    let nsid = create(&mut h, 8);
    pool.closed.store(true, Ordering::Relaxed);
    assert_eq!(plain(attach(&mut h, nsid)), Status::INTERNAL_ERROR);
    assert!(pool.namespaces().iter().all(|ns| ns.attached.is_empty()));
    assert_eq!(active(&mut h), [1]);
    pool.closed.store(false, Ordering::Relaxed);
    assert_eq!(attach(&mut h, nsid), Status::SUCCESS);
}

/// A pool that is full keeps the format before. After another error it may have kept either: the
/// namespace is closed until one is kept.
#[test]
fn failed_format_in_pool_keeps_or_closes_namespace() {
    let (mut h, pool) = host();
    let fail = |error| *pool.fails.lock().unwrap() = error;
    let nsid = create(&mut h, 8);
    assert_eq!(attach(&mut h, nsid), Status::SUCCESS);
    let errors = [
        (PoolError::NoSpace, Status::SUCCESS),
        (PoolError::Failed, Status::NAMESPACE_NOT_READY),
    ];
    for (error, written) in errors {
        fail(Some(error));
        let status = h.admin(format(nsid, 1)).status();
        assert_eq!(plain(status), Status::INTERNAL_ERROR, "{error:?}");
        fail(None);
        assert_eq!(plain(put(&mut h, nsid, 1, 0x5a)), written, "{error:?}");
    }
    assert_eq!(h.admin(format(nsid, 0)).status(), Status::SUCCESS);
    assert_eq!(put(&mut h, nsid, 1, 0x5a), Status::SUCCESS);
}

/// Nobody waits for the command any more, but what it has begun is done.
#[test]
fn create_completes_despite_reset() {
    let (mut h, pool) = host();
    pool.holds.store(true, Ordering::Relaxed);
    let command = create_command(&h, &new(8));
    h.submit(0, command);
    h.submit(0, command);
    for _ in 0..8 {
        h.round();
    }
    h.disable();
    h.until(|h| !h.csts().rdy());
    h.enable();
    h.create_pair(1, 16);
    pool.holds.store(false, Ordering::Relaxed);
    pool.release();
    for _ in 0..8 {
        h.round();
    }
    assert!(h.reap(0).is_none());
    assert_eq!(allocated(&mut h), [1, 2], "the second has not begun");
    assert_eq!(attach(&mut h, 2), Status::SUCCESS);
    assert_eq!(h.c.deadline(), None);
}

#[test]
fn erase_and_management_exclude_each_other() {
    let (mut h, pool) = host();
    let nsid = create(&mut h, 2048);
    assert_eq!(attach(&mut h, nsid), Status::SUCCESS);
    assert_eq!(put(&mut h, nsid, 7, 0x5a), Status::SUCCESS);
    // Others of the pool would be left out.
    assert_eq!(identify(&mut h).sanicap.into_bits(), 0);
    let mut sanitize = Command::new(AdminOpcode::SANITIZE.0, 0, 0);
    sanitize.cdw10 = 2.into();
    assert_eq!(plain(h.admin(sanitize).status()), Status::INVALID_OPCODE);
    let faults = pool.faults(nsid);
    faults.add(Fault::always(OpKind::WriteZeroes, Effect::Hold));
    h.submit(0, Command::new(AdminOpcode::FORMAT_NVM.0, 0, nsid));
    h.run_held(&faults, 1);
    assert_eq!(plain(delete(&mut h, nsid)), Status::FORMAT_IN_PROGRESS);
    faults.clear();
    faults.release();
    h.until(|h| h.peek(0).is_some());
    assert_eq!(h.reap(0).unwrap().status(), Status::SUCCESS);
    assert_eq!(get(&mut h, nsid, 7), vec![0; 512]);
    assert_eq!(delete(&mut h, nsid), Status::SUCCESS);
}

#[test]
fn attached_namespaces_are_present_at_start() {
    let (mut h, pool) = host();
    for nsid in 2..=3 {
        assert_eq!(create(&mut h, 8), nsid);
    }
    assert_eq!(attach(&mut h, 3), Status::SUCCESS);
    assert_eq!(put(&mut h, 3, 7, 0x5a), Status::SUCCESS);
    drop(h);
    let mut h = host_with(&pool);
    assert_eq!(
        (active(&mut h), allocated(&mut h)),
        (vec![1, 3], vec![1, 2, 3])
    );
    assert_eq!(get(&mut h, 3, 7), vec![0x5a; 512]);
    // Two cannot have one number.
    let config = h.c.config().clone();
    let io = Io::new(IoOptions::default());
    let clash = Controller::new(0, config, vec![ns(3, mem(1 << 20), 512)], &io);
    assert!(matches!(
        clash.err(),
        Some(ConfigError::DuplicateNamespace(3))
    ));
}

#[test]
fn namespace_from_elsewhere_keeps_its_nsid() {
    let (mut h, _) = host();
    let Host { c, io, .. } = &mut h;
    c.attach(ns(2, mem(1 << 20), 512), io).unwrap();
    assert_eq!(create(&mut h, 8), 3);
    assert_eq!(attach(&mut h, 3), Status::SUCCESS);
    assert!(h.c.detach(2));
    h.run();
    assert_eq!(plain(delete(&mut h, 2)), Status::INVALID_FIELD);
    assert_eq!(create(&mut h, 8), 2);
}

#[test]
fn pool_gets_each_change_once() {
    let (mut h, pool) = host();
    let nsid = create(&mut h, 8);
    assert_eq!(attach(&mut h, nsid), Status::SUCCESS);
    assert_eq!(delete(&mut h, nsid), Status::SUCCESS);
    let changes = pool.changes.lock().unwrap();
    let kinds: Vec<u8> = changes
        .iter()
        .map(|change| match change {
            PoolChange::Create { .. } => 1,
            PoolChange::Attach { .. } => 2,
            PoolChange::Detach { .. } => 3,
            PoolChange::Delete { .. } => 4,
            PoolChange::Format { .. } => 5,
        })
        .collect();
    assert_eq!(kinds, [1, 2, 4]);
    assert!(Instant::now() >= h.now - Duration::from_secs(1));
}

#[test]
fn create_and_delete_are_in_persistent_event_log() {
    let (mut h, _) = host();
    let nsid = create(&mut h, 24);
    assert_eq!(attach(&mut h, nsid), Status::SUCCESS);
    assert_eq!(delete(&mut h, nsid), Status::SUCCESS);
    let mut command = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, ALL);
    let lid = u32::from(Lid::PERSISTENT_EVENT.0);
    // Establish a context, and read 4096 bytes.
    command.cdw10 = (lid | 1 << 8 | 1023 << 16).into();
    command.set_prps(PAGE, 0);
    assert_eq!(h.admin(command).status(), Status::SUCCESS);
    let page = h.read(PAGE, 4096);
    let header = PersistentEventHeader::read_from_bytes(&page[..512]).unwrap();
    assert_eq!(header.seb[0] >> 6 & 1, 1, "the type is supported");
    let (mut rest, mut found) = (&page[512..header.tll.get() as usize], Vec::new());
    while !rest.is_empty() {
        let (event, after) = PersistentEvent::read_from_prefix(rest).unwrap();
        let (data, after) = after.split_at(event.el.get().into());
        if event.etype == PersistentEventType::CHANGE_NAMESPACE {
            let data = ChangeNamespace::read_from_bytes(data).unwrap();
            found.push((data.cdw10.get(), data.nsze.get(), data.nsid.get()));
        }
        rest = after;
    }
    assert_eq!(found, [(1, 24, nsid), (0, 24, nsid)], "the newest first");
}

/// A guest that has made many namespaces may ask for their capacity all the time: what that costs
/// does not grow with the square of their number.
#[test]
fn pool_queries_do_not_grow_with_attachments() {
    let (mut h, pool) = host();
    let asked = |h: &mut Host| {
        pool.asked.store(0, Ordering::Relaxed);
        identify(h);
        let identified = pool.asked.swap(0, Ordering::Relaxed);
        allocated(h);
        (identified, pool.asked.load(Ordering::Relaxed))
    };
    let before = asked(&mut h);
    for nsid in 2..=4 {
        assert_eq!(create(&mut h, 8), nsid);
        assert_eq!(attach(&mut h, nsid), Status::SUCCESS);
    }
    assert!(before.0 > 0 && before.1 > 0);
    assert_eq!(asked(&mut h), before);
}

fn format(nsid: u32, lbaf: u32) -> Command {
    let mut command = Command::new(AdminOpcode::FORMAT_NVM.0, 0, nsid);
    command.cdw10 = lbaf.into();
    command
}

/// Bytes of a block, and how many there are.
fn shape(h: &mut Host, cns: u8, nsid: u32) -> (u32, u64) {
    let ns = identify_ns(h, cns, nsid);
    let format = ns.formatted().unwrap();
    (format.block_size().unwrap(), ns.nsze.get())
}

#[test]
fn namespace_is_created_with_requested_format() {
    let (mut h, pool) = host();
    let large = NewNamespace {
        flbas: 1.into(),
        ..new(256)
    };
    assert_eq!(create_of(&mut h, &large), (Status::SUCCESS, 2));
    assert_eq!(shape(&mut h, 0x11, 2), (4096, 256));
    // All that is left, and more than that.
    let rest = (CAPACITY - (1 << 20)) / 4096;
    let too_large = NewNamespace {
        flbas: 1.into(),
        ..new(rest + 1)
    };
    let (status, _) = create_of(&mut h, &too_large);
    let expected = Status::NAMESPACE_INSUFFICIENT_CAPACITY;
    assert_eq!(plain(status), expected);
    assert_eq!(attach(&mut h, 2), Status::SUCCESS);
    assert_eq!(shape(&mut h, 0, 2), (4096, 256));
    h.write(DATA, &[0x5a; 4096]);
    let command = h.rw(NvmOpcode::WRITE, 2, 255, 1, DATA);
    assert_eq!(h.io(command), Status::SUCCESS);
    let command = h.rw(NvmOpcode::WRITE, 2, 256, 1, DATA);
    assert_eq!(plain(h.io(command)), Status::LBA_OUT_OF_RANGE);
    let used = pool.used();
    // The host formats it, and the pool keeps that.
    for (lbaf, expected) in [(0, (512, 2048)), (1, (4096, 256)), (0, (512, 2048))] {
        assert_eq!(h.admin(format(2, lbaf)).status(), Status::SUCCESS);
        assert_eq!(shape(&mut h, 0, 2), expected);
        let kept = &pool.namespaces()[0];
        assert_eq!((kept.block_size, kept.blocks), expected);
        assert_eq!(pool.used(), used);
    }
    assert_eq!(put(&mut h, 2, 2047, 0xa5), Status::SUCCESS);
    assert_eq!(get(&mut h, 2, 0), vec![0; 512]);
    h.die();
    assert_eq!(shape(&mut h, 0, 2), (512, 2048));
    assert_eq!(get(&mut h, 2, 2047), vec![0xa5; 512]);
    assert_eq!(detach(&mut h, 2), Status::SUCCESS);
    assert_eq!(shape(&mut h, 0x11, 2), (512, 2048));
    // The one of the configuration has one format.
    assert_eq!(
        plain(h.admin(format(1, 1)).status()),
        Status::INVALID_FORMAT
    );
}

/// What is not a whole number of larger blocks has no such format.
#[test]
fn namespace_of_odd_size_has_one_format() {
    let (mut h, _) = host();
    assert_eq!(create(&mut h, 9), 2);
    assert_eq!(identify_ns(&mut h, 0x11, 2).nlbaf_z, 0);
    assert_eq!(attach(&mut h, 2), Status::SUCCESS);
    assert_eq!(identify_ns(&mut h, 0, 2).nlbaf_z, 0);
    assert_eq!(
        plain(h.admin(format(2, 1)).status()),
        Status::INVALID_FORMAT
    );
    assert_eq!(h.admin(format(2, 0)).status(), Status::SUCCESS);
}

/// A command at work that changes the pool has its turn first.
#[test]
fn format_and_create_are_serialized_in_pool() {
    let (mut h, pool) = host();
    assert_eq!(create(&mut h, 8), 2);
    assert_eq!(attach(&mut h, 2), Status::SUCCESS);
    pool.holds.store(true, Ordering::Relaxed);
    let command = create_command(&h, &new(8));
    let made = h.submit(0, command);
    let formatted = h.submit(0, format(2, 1));
    for _ in 0..40 {
        h.round();
    }
    let changes = pool.changes.lock().unwrap().len();
    assert_eq!(changes, 3, "one at a time");
    pool.holds.store(false, Ordering::Relaxed);
    pool.release();
    let mut done = Vec::new();
    h.until(|h| {
        done.extend(h.reap_all(0));
        done.len() == 2
    });
    let cids: Vec<u16> = done.iter().map(|done| done.cid.get()).collect();
    assert_eq!(cids, [made, formatted]);
    assert!(done.iter().all(|done| done.status().is_success()));
    assert_eq!(shape(&mut h, 0, 2), (4096, 1));
}
