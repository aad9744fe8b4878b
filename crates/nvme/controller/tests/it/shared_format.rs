//! Format NVM of a namespace that controllers of a subsystem share: the others are kept out of it
//! meanwhile, and find its new blocks.

use crate::formats::store;
use crate::reservations::world;

use crate::common::*;
use controller::{NamespaceConfig, Subsystem};
use nvme::cmd::NSID_BROADCAST;
use nvme::cmd::reservation::{Racqa, Rrega, Rtype};
use nvme::feature::Fid;
use nvme::identify::{IdentifyController, IdentifyNamespace};
use nvme::log::{AnaState, Lid, SelfTestCode, SelfTestLog, SelfTestOutcome};
use nvme::regs::Shn;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use reservations::Reservations;
use std::sync::Arc;
use std::time::Duration;
use store::TestStore;
use volume::{Effect, Fault, Faults, OpKind, Volume};
use world::*;
use zerocopy::FromBytes;

const SIZE: u64 = 1 << 20;
const FORMAT_IN_PROGRESS: Status = Status::FORMAT_IN_PROGRESS;
const NOT_READY: Status = Status::NAMESPACE_NOT_READY;

/// Two hosts, each with a controller, and what is below their namespaces 1 and 2.
struct Below {
    volume: Arc<dyn Volume>,
    faults: Arc<Faults>,
    store: Arc<TestStore>,
}

fn namespaces(all: &[Below]) -> Vec<NamespaceConfig> {
    let made = (1..).zip(all).map(|(nsid, below)| NamespaceConfig {
        formats: Some(below.store.formats(512)),
        ..ns(nsid, below.volume.clone(), 512)
    });
    made.collect()
}

fn host(subsystem: &Arc<Subsystem>, cntlid: u16, all: &[Below]) -> Host {
    let config = config(subsystem, cntlid, cntlid as u8);
    let mut host = Host::with(config, namespaces(all));
    host.enable();
    host.create_pair(1, 64);
    host
}

fn two() -> (World, Vec<Below>) {
    two_in([(1, 1), (2, 1)])
}

/// The same with namespaces in these ANA groups.
fn two_in(groups: [(u32, u32); 2]) -> (World, Vec<Below>) {
    let subsystem = Subsystem::new();
    let all = groups.map(|(nsid, group)| {
        subsystem.add_namespace_to(group, nsid, Reservations::new(false), None);
        let (volume, faults) = faulty(SIZE);
        let store = TestStore::new(512);
        Below {
            volume,
            faults,
            store,
        }
    });
    let hosts = [1, 2].map(|cntlid| host(&subsystem, cntlid, &all)).into();
    let mut w = World { hosts, subsystem };
    for block in [0, 1, 2047] {
        assert_eq!(w.write(1, block, 0x5a), Status::SUCCESS);
    }
    (w, all.into())
}

fn format(nsid: u32, cdw10: u32) -> Command {
    let mut command = Command::new(AdminOpcode::FORMAT_NVM.0, 0, nsid);
    command.cdw10 = cdw10.into();
    command
}

fn hold(below: &Below, op: OpKind) {
    below.faults.add(Fault::always(op, Effect::Hold));
}

fn release(below: &Below) {
    below.faults.clear();
    below.faults.release();
}

/// Rounds until one holds back so many requests.
fn until_held(w: &mut World, below: &Below, count: usize) {
    for _ in 0..1000 {
        w.round();
        if below.faults.held() == count {
            return;
        }
    }
    panic!("{} are held", below.faults.held());
}

fn identify(w: &mut World, who: usize, nsid: u32) -> IdentifyNamespace {
    let mut command = Command::new(AdminOpcode::IDENTIFY.0, 0, nsid);
    command.set_prps(PAGE, 0);
    assert_eq!(w.admin(who, command).status(), Status::SUCCESS);
    let page = w.hosts[who].read(PAGE, 4096);
    IdentifyNamespace::read_from_bytes(&page).unwrap()
}

/// Bytes of a block, as a host finds it.
fn block(w: &mut World, who: usize, nsid: u32) -> u64 {
    let ns = identify(w, who, nsid);
    let size = u64::from(ns.formatted().unwrap().block_size().unwrap());
    assert_eq!((ns.nsze.get() * size, ns.ncap), (SIZE, ns.nsze));
    size
}

fn refused(status: Status) -> Result<u8, Status> {
    Err(status)
}

fn plainly(result: Result<u8, Status>) -> Result<u8, Status> {
    result.map_err(plain)
}

#[test]
fn format_erases_for_all_hosts() {
    let (mut w, below) = two();
    assert_eq!(w.read(0, 1), Ok(0x5a));
    assert_eq!(w.admin(0, format(1, 0)).status(), Status::SUCCESS);
    // Whichever host's command is first: nothing is left of what it had to wait for.
    for who in [1, 0] {
        for block in [0, 1, 2047] {
            assert_eq!(w.read(who, block), Ok(0));
            assert_eq!(w.write(who, block, 0x10 + who as u8), Status::SUCCESS);
            assert_eq!(w.read(1 - who, block), Ok(0x10 + who as u8));
        }
        assert_eq!(w.admin(who, format(1, 0)).status(), Status::SUCCESS);
    }
    assert_eq!(below[0].store.saves(), Vec::<u32>::new());
}

#[test]
fn namespace_is_closed_to_others_during_format() {
    let (mut w, below) = two();
    hold(&below[0], OpKind::WriteZeroes);
    let cid = w.hosts[0].submit(0, format(1, 0));
    until_held(&mut w, &below[0], 1);
    for who in [0, 1] {
        assert_eq!(plainly(w.read(who, 1)), refused(FORMAT_IN_PROGRESS));
        assert_eq!(plain(w.write(who, 1, 1)), FORMAT_IN_PROGRESS);
        // Both see that it is going on.
        assert_eq!(identify(&mut w, who, 1).fpi.fpr(), 100);
        assert_eq!(identify(&mut w, who, 2).fpi.fpr(), 0);
        // And nobody begins another one.
        for nsid in [1, NSID_BROADCAST] {
            let status = w.admin(who, format(nsid, 0)).status();
            assert_eq!(plain(status), FORMAT_IN_PROGRESS, "{who} {nsid:#x}");
        }
    }
    // Other namespaces are not concerned, and were not left closed by what was refused.
    let command = w.hosts[1].rw(NvmOpcode::READ, 2, 0, 1, DATA);
    assert_eq!(w.command(1, command), Status::SUCCESS);
    release(&below[0]);
    w.rounds(20);
    let done = w.hosts[0].reap(0).unwrap();
    assert_eq!((done.cid.get(), done.status()), (cid, Status::SUCCESS));
    for who in [1, 0] {
        assert_eq!(w.read(who, 1), Ok(0));
        assert_eq!(identify(&mut w, who, 1).fpi.fpr(), 0);
    }
}

/// A format of several takes none where it cannot have all.
#[test]
fn refused_format_leaves_namespaces_open() {
    let (mut w, below) = two();
    hold(&below[1], OpKind::WriteZeroes);
    w.hosts[0].submit(0, format(2, 0));
    until_held(&mut w, &below[1], 1);
    let status = w.admin(1, format(NSID_BROADCAST, 0)).status();
    assert_eq!(plain(status), FORMAT_IN_PROGRESS);
    for who in [0, 1] {
        assert_eq!(w.read(who, 1), Ok(0x5a));
        assert_eq!(identify(&mut w, who, 1).fpi.fpr(), 0);
    }
    assert_eq!(w.admin(1, format(1, 0)).status(), Status::SUCCESS);
}

/// What the other controllers test is not what is erased.
#[test]
fn self_test_by_other_host_ends() {
    let test = |nsid: u32| {
        let mut test = Command::new(AdminOpcode::DEVICE_SELF_TEST.0, 0, nsid);
        test.cdw10 = u32::from(SelfTestCode::EXTENDED.0).into();
        test
    };
    let outcome = |w: &mut World| {
        let (_, page) = w.hosts[1].log(Lid::DEVICE_SELF_TEST.0, 564, 0, true);
        let log = SelfTestLog::read_from_bytes(&page).unwrap();
        log.results[0].status.outcome()
    };
    for (tested, expected) in [
        (1, SelfTestOutcome::FORMATTED),
        (NSID_BROADCAST, SelfTestOutcome::FORMATTED),
        (2, SelfTestOutcome::UNUSED),
    ] {
        let (mut w, below) = two();
        assert_eq!(w.admin(1, test(tested)).status(), Status::SUCCESS);
        hold(&below[0], OpKind::WriteZeroes);
        w.hosts[0].submit(0, format(1, 0));
        until_held(&mut w, &below[0], 1);
        assert_eq!(outcome(&mut w), expected, "{tested:#x}");
        // None begins meanwhile, but of what is not erased.
        for nsid in [1, NSID_BROADCAST] {
            let status = w.admin(1, test(nsid)).status();
            assert_eq!(plain(status), FORMAT_IN_PROGRESS);
        }
        let status = plain(w.admin(1, test(2)).status());
        let runs = expected == SelfTestOutcome::UNUSED;
        let of_another = [Status::SUCCESS, Status::SELF_TEST_IN_PROGRESS];
        assert_eq!(status, of_another[usize::from(runs)]);
        release(&below[0]);
        w.rounds(20);
        assert_eq!(w.hosts[0].reap(0).unwrap().status(), Status::SUCCESS);
        let mut abort = test(2);
        abort.cdw10 = u32::from(SelfTestCode::ABORT.0).into();
        assert_eq!(w.admin(1, abort).status(), Status::SUCCESS);
        assert_eq!(w.admin(1, test(1)).status(), Status::SUCCESS);
    }
}

/// A volume that does not answer delays commands that wait for its namespace, and no others.
#[test]
fn format_ignores_fence_of_other_namespace() {
    let (mut w, below) = two();
    let third = host(&w.subsystem, 3, &below);
    w.hosts.push(third);
    for (who, key) in [(0, 1), (1, 2)] {
        let mut register = w.registering(who, Rrega::REGISTER, false, [0, key]);
        register.nsid = 2.into();
        assert_eq!(w.command(who, register), Status::SUCCESS);
    }
    hold(&below[1], OpKind::Write);
    let mut write = w.rw(1, NvmOpcode::WRITE, 7, 0x77);
    write.nsid = 2.into();
    w.begin(1, write);
    until_held(&mut w, &below[1], 1);
    let rtype = Rtype::WRITE_EXCLUSIVE;
    let mut preempt = w.acquiring(0, Racqa::PREEMPT_AND_ABORT, rtype, [1, 2]);
    preempt.nsid = 2.into();
    w.begin(0, preempt);
    w.rounds(20);
    assert!(w.hosts[0].reap(1).is_none(), "it waits for the write");
    // The other one is formatted meanwhile.
    let cid = w.hosts[2].submit(0, format(1, 0));
    w.rounds(20);
    let done = w.hosts[2].reap(0).unwrap();
    assert_eq!((done.cid.get(), done.status()), (cid, Status::SUCCESS));
    assert!(w.hosts[0].reap(1).is_none(), "it still does");
    release(&below[1]);
    w.rounds(20);
    assert_eq!(w.hosts[0].reap(1).unwrap().status(), Status::SUCCESS);
    assert!(w.hosts[1].reap(1).is_some());
}

/// When the command ends, all controllers know the new blocks, also one with a busy worker.
#[test]
fn format_ends_when_all_controllers_have_reopened() {
    let (mut w, below) = two();
    hold(&below[0], OpKind::WriteZeroes);
    w.hosts[0].submit(0, format(1, 1));
    until_held(&mut w, &below[0], 1);
    release(&below[0]);
    for _ in 0..100 {
        w.hosts[0].c.drain_messages();
        w.hosts[0].round();
    }
    assert_eq!(below[0].store.kept(), 4096);
    assert!(w.hosts[0].reap(0).is_none());
    w.rounds(3);
    assert_eq!(w.hosts[0].reap(0).unwrap().status(), Status::SUCCESS);
    assert_eq!(block(&mut w, 1, 1), 4096);
}

#[test]
fn format_waits_for_commands_of_other_hosts() {
    let (mut w, below) = two();
    hold(&below[0], OpKind::Write);
    w.begin(1, w.rw(1, NvmOpcode::WRITE, 7, 0x77));
    until_held(&mut w, &below[0], 1);
    hold(&below[0], OpKind::WriteZeroes);
    w.hosts[0].submit(0, format(1, 0));
    w.rounds(50);
    // Nothing is erased yet: it would be written over.
    assert_eq!(below[0].faults.held(), 1);
    assert!(w.hosts[0].reap(0).is_none());
    release(&below[0]);
    w.rounds(20);
    assert_eq!(w.hosts[1].reap(1).unwrap().status(), Status::SUCCESS);
    assert_eq!(w.hosts[0].reap(0).unwrap().status(), Status::SUCCESS);
    assert_eq!(w.read(0, 7), Ok(0));
    assert_eq!(w.read(1, 7), Ok(0));
}

#[test]
fn format_changes_blocks_for_all_hosts() {
    let (mut w, below) = two();
    let aer = Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0);
    w.hosts[1].set_feature(Fid::ASYNC_EVENT_CONFIG, 1 << 8);
    w.hosts[1].submit(0, aer);
    assert_eq!(w.admin(0, format(1, 1)).status(), Status::SUCCESS);
    let told = w.hosts[1].reap(0).unwrap();
    assert_eq!(
        told.dw0.get() >> 16 & 0xff,
        u32::from(Lid::CHANGED_NAMESPACE_LIST.0)
    );
    assert_eq!(below[0].store.kept(), 4096);
    for who in [1, 0] {
        assert_eq!((block(&mut w, who, 1), block(&mut w, who, 2)), (4096, 512));
        w.hosts[who].write(DATA, &[0xa0 + who as u8; 4096]);
        let command = w.hosts[who].rw(NvmOpcode::WRITE, 1, 255, 1, DATA);
        assert_eq!(w.command(who, command), Status::SUCCESS);
        let other = 1 - who;
        let command = w.hosts[other].rw(NvmOpcode::READ, 1, 255, 1, DATA);
        assert_eq!(w.command(other, command), Status::SUCCESS);
        assert_eq!(w.hosts[other].read(DATA, 4096), [0xa0 + who as u8; 4096]);
        let beyond = w.hosts[who].rw(NvmOpcode::READ, 1, 256, 1, DATA);
        assert_eq!(plain(w.command(who, beyond)), Status::LBA_OUT_OF_RANGE);
    }
    // And back, by the other one.
    assert_eq!(w.admin(1, format(1, 0)).status(), Status::SUCCESS);
    assert_eq!((block(&mut w, 0, 1), block(&mut w, 1, 1)), (512, 512));
    assert_eq!(w.read(0, 2047), Ok(0));
    assert_eq!(below[0].store.saves(), [4096, 512]);
}

/// A controller that is added while a namespace is erased, and one that is added after it: its
/// configuration says what was before.
#[test]
fn later_controller_sees_format_state() {
    let (mut w, below) = two();
    hold(&below[0], OpKind::WriteZeroes);
    w.hosts[0].submit(0, format(1, 1));
    until_held(&mut w, &below[0], 1);
    let third = host(&w.subsystem, 3, &below);
    w.hosts.push(third);
    assert_eq!(plainly(w.read(2, 0)), refused(FORMAT_IN_PROGRESS));
    release(&below[0]);
    w.rounds(20);
    assert_eq!(w.hosts[0].reap(0).unwrap().status(), Status::SUCCESS);
    let fourth = host(&w.subsystem, 4, &below);
    w.hosts.push(fourth);
    for who in [3, 2, 1, 0] {
        assert_eq!(block(&mut w, who, 1), 4096);
        let command = w.hosts[who].rw(NvmOpcode::READ, 1, 255, 1, DATA);
        assert_eq!(w.command(who, command), Status::SUCCESS);
    }
}

/// What it still erases would go over what another one writes.
#[test]
fn reset_reopens_namespace_after_writes_end() {
    let (mut w, below) = two();
    hold(&below[0], OpKind::WriteZeroes);
    w.hosts[0].submit(0, format(1, 1));
    until_held(&mut w, &below[0], 1);
    w.hosts[0].disable();
    w.rounds(20);
    assert!(w.hosts[0].csts().rdy());
    assert_eq!(plain(w.write(1, 0, 0x66)), FORMAT_IN_PROGRESS);
    release(&below[0]);
    w.rounds(20);
    assert!(!w.hosts[0].csts().rdy());
    assert_eq!(w.write(1, 0, 0x66), Status::SUCCESS);
    w.rounds(20);
    assert_eq!(w.read(1, 0), Ok(0x66));
    // It has the old blocks, to both.
    w.hosts[0].enable();
    w.hosts[0].create_pair(1, 64);
    assert_eq!((block(&mut w, 0, 1), block(&mut w, 1, 1)), (512, 512));
    assert_eq!(w.read(0, 0), Ok(0x66));
    assert_eq!(w.admin(1, format(1, 1)).status(), Status::SUCCESS);
    assert_eq!((block(&mut w, 0, 1), block(&mut w, 1, 1)), (4096, 4096));
}

#[test]
fn removed_controller_reopens_namespace() {
    let (mut w, below) = two();
    hold(&below[0], OpKind::WriteZeroes);
    w.hosts[0].submit(0, format(1, 1));
    until_held(&mut w, &below[0], 1);
    w.hosts.remove(0);
    below[0].faults.clear();
    w.rounds(3);
    assert_eq!(block(&mut w, 0, 1), 512);
    assert_eq!(w.write(0, 0, 0x66), Status::SUCCESS);
    assert_eq!(w.read(0, 0), Ok(0x66));
    assert_eq!(w.admin(0, format(1, 1)).status(), Status::SUCCESS);
    assert_eq!(block(&mut w, 0, 1), 4096);
}

/// Nobody knows then which blocks the next process finds.
#[test]
fn controller_removed_during_store_leaves_namespace_closed() {
    let (mut w, below) = two();
    below[0].store.hold();
    w.hosts[0].submit(0, format(1, 1));
    w.rounds(50);
    assert_eq!(below[0].store.saves(), [4096]);
    w.hosts.remove(0);
    below[0].store.release();
    w.rounds(3);
    assert_eq!(plainly(w.read(0, 0)), refused(NOT_READY));
    let later = host(&w.subsystem, 3, &below);
    w.hosts.push(later);
    assert_eq!(plainly(w.read(1, 0)), refused(NOT_READY));
    // Another one that is kept opens it, also where it is the one that they know.
    assert_eq!(w.admin(1, format(1, 0)).status(), Status::SUCCESS);
    assert_eq!(below[0].store.saves(), [4096, 512]);
    for who in [0, 1] {
        assert_eq!((block(&mut w, who, 1), w.read(who, 0)), (512, Ok(0)));
    }
}

#[test]
fn unknown_format_closes_namespace_to_all() {
    let (mut w, below) = two();
    below[0].store.lose(true);
    let status = w.admin(0, format(1, 1)).status();
    assert_eq!(plain(status), Status::INTERNAL_ERROR);
    for who in [1, 0] {
        assert_eq!(plainly(w.read(who, 0)), refused(NOT_READY));
    }
    below[0].store.lose(false);
    assert_eq!(w.admin(1, format(1, 0)).status(), Status::SUCCESS);
    for who in [0, 1] {
        assert_eq!((block(&mut w, who, 1), w.read(who, 0)), (512, Ok(0)));
    }
    // One that is not kept leaves it as it was.
    below[0].store.fail(true);
    let status = w.admin(0, format(1, 1)).status();
    assert_eq!(plain(status), Status::INTERNAL_ERROR);
    for who in [0, 1] {
        assert_eq!((block(&mut w, who, 1), w.read(who, 0)), (512, Ok(0)));
    }
}

#[test]
fn format_by_reserved_out_host_is_refused() {
    let (mut w, _) = two();
    assert_eq!(w.register(0, 1), Status::SUCCESS);
    assert_eq!(w.acquire(0, Rtype::WRITE_EXCLUSIVE, 1), Status::SUCCESS);
    for nsid in [1, NSID_BROADCAST] {
        let status = w.admin(1, format(nsid, 0)).status();
        assert_eq!(plain(status), CONFLICT, "{nsid:#x}");
    }
    assert_eq!(w.read(1, 1), Ok(0x5a));
    assert_eq!(w.admin(1, format(2, 0)).status(), Status::SUCCESS);
    assert_eq!(w.admin(0, format(1, 0)).status(), Status::SUCCESS);
    assert_eq!(w.read(1, 1), Ok(0));
    // Nor can a controller format a namespace that is inaccessible to it.
    let change = w.subsystem.set_ana_state(1, 1, AnaState::INACCESSIBLE);
    w.rounds(3);
    assert!(change.wait(Duration::ZERO));
    let status = w.admin(0, format(1, 0)).status();
    assert_eq!(plain(status), Status::ANA_INACCESSIBLE);
}

/// A host that hangs in the middle of it keeps nobody out for ever.
#[test]
fn preempted_host_ends_format() {
    for master in [true, false] {
        let (mut w, below) = two();
        for who in [0, 1] {
            assert_eq!(w.register(who, 1 + who as u64), Status::SUCCESS);
        }
        assert_eq!(w.acquire(0, Rtype::WRITE_EXCLUSIVE, 1), Status::SUCCESS);
        hold(&below[0], OpKind::WriteZeroes);
        w.hosts[0].submit(0, format(1, 1));
        until_held(&mut w, &below[0], 1);
        if !master {
            w.hosts[0].set_command(4, false);
        }
        let (action, rtype) = (Racqa::PREEMPT_AND_ABORT, Rtype::WRITE_EXCLUSIVE);
        let preempt = w.acquiring(1, action, rtype, [2, 1]);
        w.begin(1, preempt);
        w.rounds(50);
        // What is in flight is waited for.
        assert!(w.hosts[1].reap(1).is_none());
        assert_eq!(plain(w.write(1, 0, 0x65)), FORMAT_IN_PROGRESS);
        release(&below[0]);
        let done = w.end(1);
        assert_eq!(done.status(), Status::SUCCESS);
        // By then it is open, whether the other's worker does anything more or not.
        let write = w.rw(1, NvmOpcode::WRITE, 0, 0x66);
        assert_eq!(w.hosts[1].io(write), Status::SUCCESS);
        w.rounds(50);
        assert_eq!((block(&mut w, 1, 1), w.read(1, 0)), (512, Ok(0x66)));
        if master {
            let ended = w.hosts[0].reap(0).unwrap().status();
            assert_eq!(plain(ended), Status::ABORTED_PREEMPT_AND_ABORT);
        }
        assert_eq!(below[0].store.saves(), Vec::<u32>::new());
    }
}

/// A reset after the end, before all know of it: by then another one erases.
#[test]
fn reset_does_not_reopen_namespace_erased_by_other() {
    let (mut w, below) = two();
    let third = host(&w.subsystem, 3, &below);
    w.hosts.push(third);
    hold(&below[0], OpKind::WriteZeroes);
    w.hosts[0].submit(0, format(1, 0));
    until_held(&mut w, &below[0], 1);
    release(&below[0]);
    // The second one does not say that it has opened it: its worker is busy.
    for _ in 0..20 {
        for who in [0, 2] {
            w.hosts[who].c.drain_messages();
            w.hosts[who].round();
        }
    }
    assert!(w.hosts[0].reap(0).is_none());
    hold(&below[0], OpKind::WriteZeroes);
    let erases = w.hosts[2].submit(0, format(1, 1));
    let rounds = |w: &mut World, all: [usize; 4]| {
        for who in all {
            w.hosts[who].c.drain_messages();
            w.hosts[who].round();
        }
    };
    rounds(&mut w, [2; 4]);
    // It knows that, and has not ended its own command.
    w.hosts[0].c.drain_messages();
    w.hosts[0].disable();
    rounds(&mut w, [2, 0, 2, 0]);
    assert!(!w.hosts[0].csts().rdy());
    w.hosts[0].enable();
    w.hosts[0].create_pair(1, 64);
    assert_eq!(plain(w.write(0, 0, 0x66)), FORMAT_IN_PROGRESS);
    release(&below[0]);
    w.rounds(50);
    let done = w.hosts[2].reap(0).unwrap();
    assert_eq!((done.cid.get(), done.status()), (erases, Status::SUCCESS));
    for who in 0..3 {
        assert_eq!(block(&mut w, who, 1), 4096);
    }
}

/// It would take the blocks that it knows for those that are kept.
#[test]
fn format_from_outdated_controller_is_refused() {
    for (nsid, cdw10) in [(1, 0), (1, 1), (NSID_BROADCAST, 0)] {
        let (mut w, below) = two();
        w.hosts[0].submit(0, format(1, 1));
        // The other one's worker has looked at its messages once, when it was closed.
        for _ in 0..50 {
            w.hosts[0].c.drain_messages();
            w.hosts[0].round();
            if below[0].store.saves().is_empty() {
                w.hosts[1].c.drain_messages();
                w.hosts[1].round();
            }
        }
        assert_eq!(below[0].store.kept(), 4096);
        w.hosts[1].submit(0, format(nsid, cdw10));
        w.hosts[1].round();
        let refused = w.hosts[1].reap(0).unwrap().status();
        assert_eq!(plain(refused), FORMAT_IN_PROGRESS, "{nsid:#x} {cdw10}");
        w.rounds(10);
        assert_eq!(w.hosts[0].reap(0).unwrap().status(), Status::SUCCESS);
        for who in [0, 1] {
            assert_eq!((block(&mut w, who, 1), block(&mut w, who, 2)), (4096, 512));
        }
        let status = w.admin(1, format(1, 0)).status();
        assert_eq!(status, Status::SUCCESS);
        assert_eq!((block(&mut w, 0, 1), below[0].store.kept()), (512, 512));
    }
}

/// A format that one controller does not know stays unknown when another controller is removed.
#[test]
fn unknown_format_stays_closed_after_controller_removal() {
    let (mut w, below) = two();
    below[0].store.lose(true);
    let status = w.admin(0, format(1, 1)).status();
    assert_eq!(plain(status), Status::INTERNAL_ERROR);
    hold(&below[0], OpKind::WriteZeroes);
    w.rounds(3);
    w.hosts[1].submit(0, format(1, 0));
    until_held(&mut w, &below[0], 1);
    w.hosts.remove(1);
    below[0].faults.clear();
    w.rounds(3);
    assert_eq!(plainly(w.read(0, 0)), refused(NOT_READY));
}

/// After an ANA change, its caller may use the volume in another way.
#[test]
fn ana_change_ends_format() {
    for (nsid, ends) in [(1, true), (2, false)] {
        let (mut w, all) = two_in([(1, 5), (2, 6)]);
        let below = &all[nsid as usize - 1];
        hold(below, OpKind::WriteZeroes);
        w.hosts[0].submit(0, format(nsid, 0));
        until_held(&mut w, below, 1);
        let change = w.subsystem.set_ana_state(1, 5, AnaState::INACCESSIBLE);
        w.rounds(20);
        assert_eq!(change.wait(Duration::ZERO), !ends);
        release(below);
        w.rounds(20);
        let expected = if ends {
            Status::ANA_INACCESSIBLE
        } else {
            Status::SUCCESS
        };
        assert_eq!(plain(w.hosts[0].reap(0).unwrap().status()), expected);
        let change = w.subsystem.set_ana_state(1, 5, AnaState::OPTIMIZED);
        w.rounds(3);
        assert!(change.wait(Duration::ZERO));
        // One that is being kept is waited for.
        below.store.hold();
        w.hosts[0].submit(0, format(nsid, 1));
        w.rounds(20);
        let change = w.subsystem.set_ana_state(1, 5, AnaState::INACCESSIBLE);
        w.rounds(20);
        assert_eq!(change.wait(Duration::ZERO), !ends);
        below.store.release();
        w.rounds(20);
        assert!(w.hosts[0].reap(0).unwrap().status().is_success());
        // By the other path it is open.
        let read = w.hosts[1].rw(NvmOpcode::READ, nsid, 0, 1, DATA);
        assert_eq!(w.command(1, read), Status::SUCCESS);
    }
}

/// Neither waits for the other one to open what it has not ended itself.
#[test]
fn hosts_end_each_others_formats() {
    let (mut w, below) = two();
    let of = |nsid: u32, mut command: Command| {
        command.nsid = nsid.into();
        command
    };
    let rtype = Rtype::WRITE_EXCLUSIVE;
    for nsid in [1, 2] {
        for (who, key) in [(0, 1), (1, 2)] {
            let register = w.registering(who, Rrega::REGISTER, false, [0, key]);
            assert_eq!(w.command(who, of(nsid, register)), Status::SUCCESS);
        }
        let who = nsid as usize - 1;
        let acquire = w.acquiring(who, Racqa::ACQUIRE, rtype, [nsid.into(), 0]);
        assert_eq!(w.command(who, of(nsid, acquire)), Status::SUCCESS);
        hold(&below[who], OpKind::WriteZeroes);
        w.hosts[who].submit(0, format(nsid, 0));
        until_held(&mut w, &below[who], 1);
    }
    for (who, nsid, keys) in [(0, 2, [1, 2]), (1, 1, [2, 1])] {
        let preempt = w.acquiring(who, Racqa::PREEMPT_AND_ABORT, rtype, keys);
        w.begin(who, of(nsid, preempt));
    }
    w.rounds(20);
    release(&below[0]);
    release(&below[1]);
    w.rounds(50);
    for who in [0, 1] {
        assert_eq!(w.hosts[who].reap(1).unwrap().status(), Status::SUCCESS);
        let ended = w.hosts[who].reap(0).unwrap().status();
        assert_eq!(plain(ended), Status::ABORTED_PREEMPT_AND_ABORT);
    }
}

/// Others wait for the namespace, not for a host that has hung or is removed.
#[test]
fn format_does_not_wait_for_dead_host() {
    type End = fn(&mut Host);
    let ends: [(&str, End); 3] = [
        ("no bus master", |h| h.set_command(4, false)),
        ("shutdown", |h| h.shutdown(Shn::NORMAL)),
        ("fatal", |h| {
            // Silence through each look of the timer.
            for _ in 0..4 {
                h.now += Duration::from_secs(2);
                h.round();
            }
        }),
    ];
    for (what, end) in ends {
        let (mut w, below) = two();
        w.hosts[0].set_feature(Fid::KEEP_ALIVE_TIMER, 1000);
        hold(&below[0], OpKind::WriteZeroes);
        w.hosts[0].submit(0, format(1, 1));
        until_held(&mut w, &below[0], 1);
        end(&mut w.hosts[0]);
        w.rounds(5);
        assert_eq!(w.hosts[0].csts().cfs(), what == "fatal");
        assert_eq!(plainly(w.read(1, 0)), refused(FORMAT_IN_PROGRESS), "{what}");
        release(&below[0]);
        w.rounds(50);
        assert_eq!(block(&mut w, 1, 1), 4096, "{what}");
        let command = w.hosts[1].rw(NvmOpcode::WRITE, 1, 0, 1, DATA);
        assert_eq!(w.command(1, command), Status::SUCCESS, "{what}");
    }
}

/// All of a subsystem would have to be sanitized.
#[test]
fn sanitize_of_shared_namespace_is_refused() {
    let (mut w, _) = two();
    let mut command = Command::new(AdminOpcode::SANITIZE.0, 0, 0);
    command.cdw10 = 2.into();
    let status = w.admin(0, command).status();
    assert_eq!(plain(status), Status::INVALID_OPCODE);
    let (_, page) = w.hosts[0].identify(1, 0, 0);
    let data = IdentifyController::read_from_bytes(&page).unwrap();
    assert!(data.oacs.fnvms());
    assert_eq!(data.sanicap.into_bits(), 0);
}

/// What a controller's host has begun.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Formats {
    Nobody,
    /// This one's command is not over.
    Begun(usize),
    /// It was reset on the way.
    Left(usize),
}

/// Writes, reads, formats and resets of three hosts beside a model: what one has written is there
/// until a format has ended well, and a format that is under way refuses all.
#[test]
fn random_histories_match_model() {
    let (mut w, below) = two();
    let third = host(&w.subsystem, 3, &below);
    w.hosts.push(third);
    let mut chance = 0x9e37_79b9_7f4a_7c15u64;
    let mut below_of = move |end: u64| {
        chance ^= chance << 13;
        chance ^= chance >> 7;
        chance ^= chance << 17;
        (chance >> 16) % end
    };
    // `None`: what was there, or zeroes.
    let mut blocks = [Some(0x5a), Some(0x5a), Some(0), Some(0)].map(|byte: Option<u8>| byte);
    let mut formats = Formats::Nobody;
    let (mut refusals, mut whole, mut left) = (0, 0, 0);
    for step in 0..steps("VNVME_FORMAT_STEPS", 4000) {
        let who = below_of(3) as usize;
        let block = below_of(4);
        // A host in a reset has no queues.
        let away = formats == Formats::Left(who);
        match below_of(10) {
            0..3 if !away => {
                let byte = 1 + below_of(255) as u8;
                match plain(w.write(who, block, byte)) {
                    Status::SUCCESS if formats == Formats::Nobody => {
                        blocks[block as usize] = Some(byte);
                    }
                    FORMAT_IN_PROGRESS if formats != Formats::Nobody => refusals += 1,
                    status => panic!("step {step}: {formats:?}: {status}"),
                }
            }
            3..6 if !away => match (plainly(w.read(who, block)), blocks[block as usize]) {
                (Ok(byte), Some(known)) if formats == Formats::Nobody => {
                    assert_eq!(byte, known, "step {step}");
                }
                (Ok(byte), None) if formats == Formats::Nobody => {
                    blocks[block as usize] = Some(byte);
                }
                (Err(FORMAT_IN_PROGRESS), _) if formats != Formats::Nobody => refusals += 1,
                (read, _) => panic!("step {step}: {formats:?}: {read:?}"),
            },
            6 if formats == Formats::Nobody => {
                hold(&below[0], OpKind::WriteZeroes);
                w.hosts[who].submit(0, format(1, 0));
                until_held(&mut w, &below[0], 1);
                formats = Formats::Begun(who);
            }
            6 if !away => {
                let status = w.admin(who, format(1, 0)).status();
                assert_eq!(plain(status), FORMAT_IN_PROGRESS, "step {step}");
            }
            7 if formats == Formats::Begun(who) => {
                w.hosts[who].disable();
                formats = Formats::Left(who);
            }
            7 if !away => {
                // Of one that erases nothing: nothing changes for the others.
                w.hosts[who].disable();
                w.rounds(3);
                w.hosts[who].enable();
                w.hosts[who].create_pair(1, 64);
            }
            8 => match std::mem::replace(&mut formats, Formats::Nobody) {
                Formats::Nobody => {}
                Formats::Begun(who) => {
                    release(&below[0]);
                    w.rounds(20);
                    let done = w.hosts[who].reap(0).unwrap();
                    assert_eq!(done.status(), Status::SUCCESS, "step {step}");
                    blocks.fill(Some(0));
                    whole += 1;
                }
                Formats::Left(who) => {
                    release(&below[0]);
                    w.rounds(20);
                    w.hosts[who].enable();
                    w.hosts[who].create_pair(1, 64);
                    blocks.fill(None);
                    left += 1;
                }
            },
            _ => w.round(),
        }
    }
    println!("{whole} formats, {left} left, {refusals} commands refused");
    assert!(whole > 50 && left > 10 && refusals > 100);
}
