//! What the host finds: capabilities, lists, features, notifications.

use crate::common::*;
use crate::reservations::world::*;
use controller::{ConfigError, Controller, ControllerConfig, InSubsystem, Subsystem};
use nvme::cmd::reservation::{Racqa, Rrela, Rtype};
use nvme::feature::Fid;
use nvme::identify::IdentifyController;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use reservations::{HostId, Reservations};
use volume::{Io, IoOptions};
use zerocopy::FromBytes;

#[test]
fn reservation_capabilities_match_controller() {
    let mut w = World::of(&[1, 2]);
    for (who, cntlid) in [(0, 1), (1, 2)] {
        let h = &mut w.hosts[who];
        let page = h.identify(1, 0, 0).1;
        let page = IdentifyController::read_from_bytes(&page).unwrap();
        assert!(page.cmic.mctrs() && page.oncs.reservs());
        assert_eq!(page.cntlid.get(), cntlid);
        let namespace = h.identify(0, 1, 0).1;
        assert_eq!((namespace[30], namespace[31]), (1, 0xfe), "NMIC, RESCAP");
        let independent = h.identify(8, 1, 0).1;
        assert_eq!((independent[1], independent[2]), (1, 0xfe));
        for (cns, nsid) in [(0x12, 1), (0x13, 0)] {
            let list = h.identify(cns, nsid, 0).1;
            assert_eq!(list[..8], [2, 0, 1, 0, 2, 0, 0, 0], "CNS {cns:#x}");
        }
        let effects = h.log(5, 4096, 0, true).1;
        for opcode in [0x0d, 0x0e, 0x11, 0x15] {
            assert_eq!(effects[1024 + opcode * 4] & 1, 1);
        }
        let pages = h.log(0, 1024, 0, true).1;
        assert_eq!(pages[0x80 * 4] & 1, 1);
    }
    // Any other controller says nothing of it, and has none of it.
    let mut h = Host::ready();
    let page = h.identify(1, 0, 0).1;
    let page = IdentifyController::read_from_bytes(&page).unwrap();
    assert!(!page.cmic.mctrs() && !page.oncs.reservs());
    assert_eq!(h.identify(0, 1, 0).1[30..32], [0, 0]);
    for opcode in [0x0d, 0x0e, 0x11, 0x15] {
        let mut command = Command::new(opcode, 0, 1);
        command.set_prps(DATA, 0);
        assert_eq!(plain(h.io(command)), Status::INVALID_OPCODE);
    }
    assert_eq!(plain(h.log(0x80, 64, 0, true).0), Status::INVALID_LOG_PAGE);
    for fid in [0x82, 0x83] {
        let status = h.get_feature(Fid(fid), 0, 0).status();
        assert_eq!(plain(status), Status::INVALID_FIELD);
    }
}

#[test]
fn host_identifier_cannot_be_changed() {
    let mut w = World::of(&[1, 2]);
    let h = &mut w.hosts[0];
    h.get_feature(Fid::HOST_IDENTIFIER, 0, 1);
    assert_eq!(h.read(PAGE, 16), [1; 16]);
    for (id, extended, expected) in [
        ([2; 16], 1, Status::FEATURE_NOT_CHANGEABLE),
        ([1; 16], 0, Status::FEATURE_NOT_CHANGEABLE),
        ([1; 16], 1, Status::SUCCESS),
    ] {
        h.write(PAGE, &id);
        let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
        command.cdw10 = u32::from(Fid::HOST_IDENTIFIER.0).into();
        command.cdw11 = extended.into();
        command.set_prps(PAGE, 0);
        assert_eq!(plain(h.admin(command).status()), expected);
    }
    h.get_feature(Fid::HOST_IDENTIFIER, 0, 1);
    assert_eq!(h.read(PAGE, 16), [1; 16]);
}

fn aer() -> Command {
    Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0)
}

#[test]
fn reservation_notification_is_sent_once_unless_masked() {
    let mut w = World::of(&[1, 2, 3]);
    for who in 0..3 {
        w.register(who, who as u64 + 1);
    }
    w.hosts[1].submit(0, aer());
    w.hosts[2].submit(0, aer());
    // The third one does not want to be told of preempted registrations.
    let mut mask = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0xffff_ffff);
    mask.cdw10 = u32::from(Fid::RESERVATION_NOTIFICATION_MASK.0).into();
    mask.cdw11 = 0xffff_fff3_u32.into();
    assert_eq!(w.admin(2, mask).status(), Status::SUCCESS);
    let mut get = Command::new(AdminOpcode::GET_FEATURES.0, 0, 1);
    get.cdw10 = u32::from(Fid::RESERVATION_NOTIFICATION_MASK.0).into();
    assert_eq!(w.admin(2, get).dw0.get(), 0x2);
    w.acquire(0, Rtype::WRITE_EXCLUSIVE, 1);
    for victim in [2, 3] {
        let preempt = w.acquiring(0, Racqa::PREEMPT, Rtype::WRITE_EXCLUSIVE, [1, victim]);
        assert_eq!(w.command(0, preempt), Status::SUCCESS);
    }
    w.rounds(3);
    let event = w.hosts[1].reap(0).expect("it is told");
    // Type 6 (I/O command specific), information 0, log page 80h.
    assert_eq!(event.dw0.get(), 0x80_00_06);
    assert!(w.hosts[2].reap(0).is_none(), "masked");
    let (_, page) = w.hosts[1].log(0x80, 64, 0, false);
    assert_eq!(page[..16], [1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(w.hosts[1].log(0x80, 64, 0, false).1, [0; 64]);
    // It is told of others still: all registrants lose the reservation that is cleared.
    w.register(2, 3);
    let clear = w.releasing(0, Rrela::CLEAR, Rtype::NONE, 1);
    assert_eq!(w.command(0, clear), Status::SUCCESS);
    w.rounds(3);
    let event = w.hosts[2].reap(0).expect("it is told");
    assert_eq!(event.dw0.get(), 0x80_00_06);
    assert_eq!(w.hosts[2].log(0x80, 64, 0, false).1[8], 3);
    // Nobody reads: the last page has the number of the last one that found no room.
    for _ in 0..100 {
        w.register(0, 1);
        w.register(1, 2);
        w.acquire(0, Rtype::WRITE_EXCLUSIVE, 1);
        let preempt = w.acquiring(0, Racqa::PREEMPT, Rtype::WRITE_EXCLUSIVE, [1, 2]);
        w.command(0, preempt);
    }
    w.rounds(3);
    let mut last = Vec::new();
    for left in (0..64).rev() {
        last = w.hosts[1].log(0x80, 64, 0, false).1;
        assert_eq!(last[9], left);
    }
    assert_eq!(last[0], 101);
}

#[test]
fn invalid_reservation_configuration_is_refused() {
    let io = Io::new(IoOptions::default());
    let subsystem = Subsystem::new();
    subsystem.add_namespace(1, Reservations::new(false), None);
    let make = |config: ControllerConfig, nsid: u32| {
        Controller::new(0, config, vec![ns(nsid, mem(1 << 20), 512)], &io)
    };
    let first = make(config(&subsystem, 1, 1), 1).unwrap();
    assert!(matches!(
        make(config(&subsystem, 1, 2), 1),
        Err(ConfigError::DuplicateController(1))
    ));
    assert!(matches!(
        make(config(&subsystem, 2, 2), 2),
        Err(ConfigError::NotShared(2))
    ));
    let nobody = ControllerConfig {
        subsystem: Some(InSubsystem {
            subsystem: subsystem.clone(),
            host: HostId::short(0),
        }),
        ..config(&subsystem, 2, 2)
    };
    assert!(matches!(make(nobody, 1), Err(ConfigError::NoHost)));
    let many = ControllerConfig {
        workers: 2,
        ..config(&subsystem, 2, 2)
    };
    assert!(matches!(make(many, 1), Err(ConfigError::SharedWorkers)));
    assert!(make(config(&subsystem, 0xfff0, 2), 1).is_err());
    // What has failed has left nothing behind, and so has what has ended.
    assert_eq!(subsystem.controllers(), [1]);
    drop(first);
    assert!(subsystem.controllers().is_empty());
    let again = config(&subsystem, 1, 2);
    make(again, 1).unwrap();
}

/// A controller that is added later finds the reservation, and a removed one keeps its host's.
#[test]
fn reservation_belongs_to_host_not_controller() {
    let volume = mem(1 << 20);
    let mut w = World::with(&volume, &[1, 2], None);
    w.register(0, 1);
    w.acquire(0, Rtype::EXCLUSIVE_ACCESS, 1);
    w.hosts.remove(0);
    assert_eq!(plain(w.write(0, 1, 1)), CONFLICT);
    for (cntlid, host, expected) in [(3, 1, Status::SUCCESS), (4, 3, CONFLICT)] {
        let config = config(&w.subsystem, cntlid, host);
        let mut h = Host::with(config, vec![ns(1, volume.clone(), 512)]);
        h.enable();
        h.create_pair(1, 16);
        let write = h.rw(NvmOpcode::WRITE, 1, 0, 1, DATA);
        assert_eq!(plain(h.io(write)), expected);
        w.hosts.push(h);
    }
    // A reset is no end of it, nor is the end of a client.
    w.hosts[1].c.disconnect();
    assert_eq!(plain(w.write(0, 1, 1)), CONFLICT);
}
