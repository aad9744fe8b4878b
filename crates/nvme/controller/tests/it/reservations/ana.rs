//! Two controllers of one host: by which of them it reaches which namespaces.

use crate::common::*;
use crate::reservations::world::*;
use controller::{MAX_ANA_GROUP, Subsystem};
use nvme::cmd::NSID_BROADCAST;
use nvme::cmd::reservation::Rtype;
use nvme::feature::Fid;
use nvme::identify::{IdentifyController, IdentifyNamespace};
use nvme::log::{AnaState, ana_groups};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use reservations::Reservations;
use std::time::Duration;
use volume::{Effect, Fault, OpKind};
use zerocopy::FromBytes;

/// Namespaces 1 and 3 are in group 1, namespace 2 is in group 7.
const GROUPS: [(u32, u32); 3] = [(1, 1), (7, 2), (1, 3)];
const REFUSING: [(AnaState, Status); 3] = [
    (AnaState::INACCESSIBLE, Status::ANA_INACCESSIBLE),
    (AnaState::PERSISTENT_LOSS, Status::ANA_PERSISTENT_LOSS),
    (AnaState::CHANGE, Status::ANA_TRANSITION),
];

fn paths() -> World {
    let subsystem = Subsystem::new();
    let volumes = GROUPS.map(|(group, nsid)| {
        subsystem.add_namespace_to(group, nsid, Reservations::new(false), None);
        (nsid, mem(1 << 20))
    });
    let made = [1, 2].map(|cntlid| {
        let namespaces = volumes
            .iter()
            .map(|(nsid, volume)| ns(*nsid, volume.clone(), 512));
        let mut host = Host::with(config(&subsystem, cntlid, 9), namespaces.collect());
        host.enable();
        host.create_pair(1, 64);
        host
    });
    World {
        hosts: made.into(),
        subsystem,
    }
}

/// Sets the state of controller `who`, which has learnt of it when this returns.
fn set(w: &mut World, who: u16, group: u32, state: AnaState) {
    let change = w.subsystem.set_ana_state(who + 1, group, state);
    w.rounds(3);
    assert!(change.wait(Duration::ZERO), "nothing is in flight");
    assert_eq!(w.subsystem.ana_state(who + 1, group), state);
}

/// Of a group: its number, its change count, its state, and its namespaces.
type Group = (u32, u64, AnaState, Vec<u32>);

/// Change count of the log page, and its groups.
fn log(w: &mut World, who: usize, rgo: bool) -> (u64, Vec<Group>) {
    let mut command = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, 0);
    command.cdw10 = (0x0c | u32::from(rgo) << 8 | 1023 << 16).into();
    command.set_prps(PAGE, 0);
    assert_eq!(w.admin(who, command).status(), Status::SUCCESS);
    let page = w.hosts[who].read(PAGE, 4096);
    let count = u64::from_le_bytes(page[..8].try_into().unwrap());
    let groups = ana_groups(&page).map(|(group, nsids)| {
        let nsids = nsids.iter().map(|nsid| nsid.get()).collect();
        (
            group.agid.get(),
            group.chgcnt.get(),
            group.state.anas(),
            nsids,
        )
    });
    (count, groups.collect())
}

fn read(w: &World, who: usize, nsid: u32) -> Command {
    w.hosts[who].rw(NvmOpcode::READ, nsid, 0, 1, DATA)
}

fn listen(w: &mut World, who: usize, config: u32) {
    let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
    command.cdw10 = u32::from(Fid::ASYNC_EVENT_CONFIG.0).into();
    command.cdw11 = config.into();
    assert_eq!(w.admin(who, command).status(), Status::SUCCESS);
    let aer = Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0);
    w.hosts[who].submit(0, aer);
}

#[test]
fn identify_reports_ana_support() {
    let mut w = paths();
    for host in &mut w.hosts {
        let page = host.identify(1, 0, 0).1;
        let page = IdentifyController::read_from_bytes(&page).unwrap();
        assert!(page.cmic.mports() && page.cmic.mctrs() && page.cmic.anars());
        assert!(page.oaes.anacn() && page.oaes.nsan());
        assert_eq!((page.anacap.into_bits(), page.anatt), (0x1f, 10));
        assert_eq!(page.anagrpmax.get(), MAX_ANA_GROUP);
        assert_eq!(page.nanagrpid.get(), MAX_ANA_GROUP);
        let pages = host.log(0, 1024, 0, true).1;
        assert_eq!(pages[0x0c * 4] & 1, 1);
        for (group, nsid) in GROUPS {
            let page = host.identify(0, nsid, 0).1;
            let page = IdentifyNamespace::read_from_bytes(&page).unwrap();
            assert_eq!((page.anagrpid.get(), page.nmic.shrns()), (group, true));
            let independent = host.identify(8, nsid, 0).1;
            assert_eq!(independent[4..8], group.to_le_bytes());
        }
    }
    // One alone has nothing of it.
    let mut alone = Host::ready();
    let page = alone.identify(1, 0, 0).1;
    let page = IdentifyController::read_from_bytes(&page).unwrap();
    assert!(!page.cmic.anars() && !page.oaes.anacn());
    assert_eq!((page.anacap.into_bits(), page.anatt), (0, 0));
    assert_eq!((page.anagrpmax.get(), page.nanagrpid.get()), (0, 0));
    assert_eq!(alone.identify(0, 1, 0).1[92..96], [0; 4]);
    assert_eq!(
        plain(alone.log(0x0c, 64, 0, true).0),
        Status::INVALID_LOG_PAGE
    );
}

#[test]
fn inaccessible_group_refuses_namespace_commands() {
    let mut w = paths();
    for (state, status) in REFUSING {
        set(&mut w, 0, 1, state);
        for nsid in [1, 3] {
            // All there are, and one that is none: nothing of a namespace can be told from here.
            for opcode in [
                0x00, 0x01, 0x02, 0x05, 0x08, 0x09, 0x0c, 0x0d, 0x0e, 0x11, 0x15,
            ] {
                let mut command = Command::new(opcode, 0, nsid);
                command.set_prps(DATA, 0);
                let ended = w.command(0, command);
                assert_eq!(ended, status, "{opcode:#x}, to be repeated elsewhere");
            }
        }
        let unknown = Command::new(0x7f, 0, 1);
        assert_eq!(plain(w.command(0, unknown)), Status::INVALID_OPCODE);
        let nowhere = read(&w, 0, 9);
        let ended = plain(w.command(0, nowhere));
        assert_ne!(ended, status);
        // A flush of all is one of those, too.
        let all = Command::new(NvmOpcode::FLUSH.0, 0, NSID_BROADCAST);
        assert_eq!(w.command(0, all), status);
        // The other group, and the other controller.
        for (who, nsid) in [(0, 2), (1, 1), (1, 2), (1, 3)] {
            let command = read(&w, who, nsid);
            assert_eq!(w.command(who, command), Status::SUCCESS);
        }
        assert_eq!(w.command(1, all), Status::SUCCESS);
        // None of it is an error of the disk.
        let log = w.hosts[0].log(1, 64, 0, true).1;
        let told = u16::from_le_bytes([log[12], log[13]]) >> 1 & 0x7ff;
        assert!(![0x301, 0x302, 0x303].contains(&told), "{told:#x}");
    }
    for reached in [AnaState::NON_OPTIMIZED, AnaState::OPTIMIZED] {
        set(&mut w, 0, 1, reached);
        assert_eq!(w.write(0, 3, 0x33), Status::SUCCESS);
        assert_eq!(w.read(1, 3), Ok(0x33));
    }
}

/// What belongs to a namespace is not there where that is not reached; what belongs to the
/// controller is.
#[test]
fn admin_commands_respect_ana_state() {
    let mut w = paths();
    let feature = |fid: Fid, nsid: u32, set: bool| {
        let opcode = if set {
            AdminOpcode::SET_FEATURES
        } else {
            AdminOpcode::GET_FEATURES
        };
        let mut command = Command::new(opcode.0, 0, nsid);
        command.cdw10 = u32::from(fid.0).into();
        command
    };
    let own = [
        Fid::ERROR_RECOVERY,
        Fid::RESERVATION_NOTIFICATION_MASK,
        Fid::RESERVATION_PERSISTENCE,
    ];
    for (state, status) in REFUSING {
        set(&mut w, 0, 7, state);
        for fid in own {
            for command in [
                feature(fid, 2, false),
                feature(fid, 2, true),
                feature(fid, NSID_BROADCAST, true),
            ] {
                assert_eq!(w.admin(0, command).status(), status, "{fid}");
            }
            let other = feature(fid, 1, false);
            assert_eq!(w.admin(0, other).status(), Status::SUCCESS);
        }
        let controller = feature(Fid::ARBITRATION, 0, false);
        assert_eq!(w.admin(0, controller).status(), Status::SUCCESS);
        // A size that the host would take for that of a removed namespace must not be 0.
        let page = w.hosts[0].identify(0, 2, 0).1;
        let page = IdentifyNamespace::read_from_bytes(&page).unwrap();
        assert_eq!((page.nsze.get(), page.ncap.get()), (2048, 2048));
        let known = state == AnaState::CHANGE;
        assert_eq!(page.nuse.get() != 0, known);
        assert_eq!(page.nvmcap.get() != 0, known);
        assert_eq!(w.hosts[0].log(2, 512, 0, true).0, Status::SUCCESS);
    }
    set(&mut w, 0, 7, AnaState::OPTIMIZED);
    for fid in own {
        let command = feature(fid, 2, false);
        assert_eq!(w.admin(0, command).status(), Status::SUCCESS);
    }
}

#[test]
fn ana_log_counts_changes_and_notifies_host() {
    let mut w = paths();
    let optimized = AnaState::OPTIMIZED;
    let all = |first: (u64, AnaState)| {
        vec![
            (1, first.0, first.1, vec![1, 3]),
            (7, 1, optimized, vec![2]),
        ]
    };
    let (before, groups) = log(&mut w, 0, false);
    assert_eq!(groups, all((1, optimized)));
    listen(&mut w, 0, 1 << 11);
    listen(&mut w, 1, 0x7ff);
    set(&mut w, 0, 1, AnaState::INACCESSIBLE);
    let event = w.hosts[0].reap(0).expect("it is told");
    // Type 2 (notice), Asymmetric Namespace Access Change, log page 0Ch.
    assert_eq!(event.dw0.get(), 0x0c_03_02);
    assert!(w.hosts[1].reap(0).is_none(), "its own have not changed");
    let (count, groups) = log(&mut w, 0, false);
    assert_eq!(groups, all((2, AnaState::INACCESSIBLE)));
    assert_eq!(count, before + 1);
    assert_eq!(log(&mut w, 1, false).1, all((1, optimized)));
    let (_, groups) = log(&mut w, 0, true);
    let only = [
        (1, 2, AnaState::INACCESSIBLE, vec![]),
        (7, 1, optimized, vec![]),
    ];
    assert_eq!(groups, only);
    // The same once more is no change of the page.
    set(&mut w, 0, 1, AnaState::INACCESSIBLE);
    assert_eq!(log(&mut w, 0, false).0, count);
    // One that has not asked for it is not told.
    set(&mut w, 1, 7, AnaState::PERSISTENT_LOSS);
    assert!(w.hosts[1].reap(0).is_none());
    assert_eq!(log(&mut w, 1, false).1[1].2, AnaState::PERSISTENT_LOSS);
    // A part of the page, and behind its end.
    let status = |w: &mut World, length, offset| w.hosts[0].log(0x0c, length, offset, true).0;
    assert_eq!(status(&mut w, 4, 16), Status::SUCCESS);
    assert_eq!(plain(status(&mut w, 4, 4096)), Status::INVALID_FIELD);
    // The state outlasts a reset, the count does not.
    w.hosts[0].disable();
    w.rounds(20);
    w.hosts[0].enable();
    w.hosts[0].create_pair(1, 64);
    let (count, groups) = log(&mut w, 0, false);
    assert_eq!((count, groups[0].2), (0, AnaState::INACCESSIBLE));
    let command = read(&w, 0, 1);
    assert_eq!(w.command(0, command), Status::ANA_INACCESSIBLE);
}

#[test]
fn commands_before_ana_change_complete_first() {
    for (state, status) in REFUSING {
        let (volume, faults) = faulty(1 << 20);
        let mut w = World::with(&volume, &[9, 9], None);
        faults.add(Fault::always(OpKind::Write, Effect::Hold));
        let late = w.rw(0, NvmOpcode::WRITE, 7, 0x77);
        w.begin(0, late);
        w.rounds(4);
        assert_eq!(faults.held(), 1);
        let change = w.subsystem.set_ana_state(1, 1, state);
        w.rounds(4);
        assert!(!change.wait(Duration::ZERO), "it is still with the volume");
        assert!(w.hosts[0].reap(1).is_none());
        // Later commands are refused although something is waited for, and succeed by the other
        // path.
        let more = w.rw(0, NvmOpcode::READ, 7, 0);
        assert_eq!(w.command(0, more), status);
        assert_eq!(w.read(1, 8), Ok(0));
        faults.clear();
        faults.release();
        assert_eq!(w.end(0).status(), Status::SUCCESS);
        w.rounds(3);
        assert!(change.wait(Duration::ZERO));
        assert_eq!(w.read(1, 7), Ok(0x77));
    }
}

/// A reservation is its host's by whichever controller; where it is in the way, too, the state of
/// the path is what is told.
#[test]
fn reservation_follows_host_to_other_controller() {
    let mut w = World::of(&[9, 9, 5]);
    w.register(0, 9);
    w.register(2, 5);
    assert_eq!(w.acquire(0, Rtype::WRITE_EXCLUSIVE, 9), Status::SUCCESS);
    set(&mut w, 0, 1, AnaState::INACCESSIBLE);
    set(&mut w, 2, 1, AnaState::INACCESSIBLE);
    assert_eq!(w.write(1, 1, 1), Status::SUCCESS);
    assert_eq!(w.write(0, 1, 2), Status::ANA_INACCESSIBLE);
    assert_eq!(w.write(2, 1, 3), Status::ANA_INACCESSIBLE);
    set(&mut w, 2, 1, AnaState::NON_OPTIMIZED);
    assert_eq!(plain(w.write(2, 1, 3)), CONFLICT);
    assert_eq!(w.read(2, 1), Ok(1));
    set(&mut w, 0, 1, AnaState::OPTIMIZED);
    assert_eq!(w.write(0, 1, 2), Status::SUCCESS);
}

#[test]
fn ana_state_may_be_set_before_controller_exists() {
    let mut w = World::of(&[9]);
    for (cntlid, group) in [(2, 1), (1, 9)] {
        let state = AnaState::NON_OPTIMIZED;
        let change = w.subsystem.set_ana_state(cntlid, group, state);
        w.rounds(2);
        assert!(change.wait(Duration::ZERO), "nobody is to be waited for");
    }
    let volume = mem(1 << 20);
    let mut late = Host::with(config(&w.subsystem, 2, 9), vec![ns(1, volume, 512)]);
    late.enable();
    late.create_pair(1, 16);
    w.hosts.push(late);
    assert_eq!(log(&mut w, 1, false).1[0].2, AnaState::NON_OPTIMIZED);
    assert_eq!(log(&mut w, 0, false).1[0].2, AnaState::OPTIMIZED);
    // A controller that is removed with commands in flight is waited for no more.
    let change = w.subsystem.set_ana_state(2, 1, AnaState::INACCESSIBLE);
    assert!(!change.wait(Duration::ZERO), "its worker has not looked");
    w.hosts.pop();
    assert!(change.wait(Duration::ZERO));
}
