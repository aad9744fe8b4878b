//! Hosts that mean harm: whatever one sends, its own commands fail, and the others' go on.

use crate::common::*;
use crate::reservations::world::*;
use nvme::cmd::reservation::{Racqa, Rrega, Rtype};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use volume::{Effect, Fault, OpKind};

const ALL: [NvmOpcode; 4] = [
    NvmOpcode::RESERVATION_REGISTER,
    NvmOpcode::RESERVATION_REPORT,
    NvmOpcode::RESERVATION_ACQUIRE,
    NvmOpcode::RESERVATION_RELEASE,
];

#[test]
fn reservation_command_with_invalid_fields_changes_nothing() {
    let mut w = World::of(&[1, 2]);
    w.register(0, 1);
    let before = w.report(0, true, 4096).1;
    for opcode in ALL {
        for (nsid, expected) in [
            (0, Status::INVALID_NAMESPACE_OR_FORMAT),
            (2, Status::INVALID_NAMESPACE_OR_FORMAT),
            (0xffff_ffff, Status::INVALID_NAMESPACE_OR_FORMAT),
        ] {
            let mut command = w.reservation(1, opcode, 0, [0, 0]);
            command.nsid = nsid.into();
            assert_eq!(plain(w.command(1, command)), expected, "{opcode} {nsid:#x}");
        }
        // Where no memory is, or half of it.
        for prp in [
            HIGH + HIGH_SIZE,
            HIGH + HIGH_SIZE - 8,
            1 << 60,
            LOW_SIZE - 4,
        ] {
            let mut command = w.reservation(1, opcode, 0x100, [0, 0]);
            command.set_prps(prp, 1 << 60);
            if opcode == NvmOpcode::RESERVATION_REPORT {
                command.cdw10 = 15.into();
            }
            assert!(!w.command(1, command).is_success(), "{opcode} {prp:#x}");
        }
    }
    // Reserved actions and types.
    for (opcode, cdw10) in [
        (NvmOpcode::RESERVATION_REGISTER, 3),
        (NvmOpcode::RESERVATION_REGISTER, 1 << 30),
        (NvmOpcode::RESERVATION_ACQUIRE, 0x103),
        (NvmOpcode::RESERVATION_ACQUIRE, 0),
        (NvmOpcode::RESERVATION_ACQUIRE, 0x700),
        (NvmOpcode::RESERVATION_ACQUIRE, 0x108),
        (NvmOpcode::RESERVATION_RELEASE, 2),
        (NvmOpcode::RESERVATION_RELEASE, 0x108),
    ] {
        let command = w.reservation(1, opcode, cdw10, [0, 0]);
        let status = plain(w.command(1, command));
        assert_eq!(status, Status::INVALID_FIELD, "{opcode} {cdw10:#x}");
    }
    assert_eq!(w.report(0, true, 4096).1, before);
}

#[test]
fn report_is_truncated_to_requested_length() {
    let mut w = World::of(&[1, 2]);
    w.register(0, 1);
    let whole = w.report(0, true, 4096).1;
    for bytes in [4, 8, 24, 60, 64, 128, 8192] {
        let (status, part) = w.report(0, true, bytes);
        assert_eq!(status, Status::SUCCESS);
        let same = (bytes as usize).min(128);
        assert_eq!(part[..same], whole[..same], "{bytes}");
        assert!(part[same..].iter().all(|byte| *byte == 0xee));
    }
    // The longest that can be asked for: only what there is is written.
    let mut command = Command::new(NvmOpcode::RESERVATION_REPORT.0, 0, 1);
    command.cdw10 = u32::MAX.into();
    command.cdw11 = 1.into();
    command.set_prps(REPORT, 0);
    assert_eq!(w.command(0, command), Status::SUCCESS);
}

/// A host registers under its one name only, however often it asks: no room is taken by it.
#[test]
fn host_registers_once() {
    let mut w = World::of(&[1, 2]);
    for key in 0..600 {
        let command = w.registering(1, Rrega::REPLACE, true, [0, key]);
        assert_eq!(w.command(1, command), Status::SUCCESS);
    }
    assert_eq!(w.report(0, true, 4096).1[5..7], [1, 0]);
    assert_eq!(w.register(0, 1), Status::SUCCESS);
}

/// Queues are deleted, commands aborted, controllers reset, while a preemption waits for a write.
#[test]
fn waiting_reservation_command_completes_once() {
    for what in 0..4 {
        let (volume, faults) = faulty(1 << 20);
        let mut w = World::with(&volume, &[1, 2], None);
        w.register(0, 1);
        w.register(1, 2);
        w.acquire(0, Rtype::WRITE_EXCLUSIVE_REGISTRANTS_ONLY, 1);
        faults.add(Fault::always(OpKind::Write, Effect::Hold));
        let late = w.rw(1, NvmOpcode::WRITE, 7, 0x77);
        w.begin(1, late);
        w.rounds(4);
        let preempt = w.acquiring(0, Racqa::PREEMPT_AND_ABORT, Rtype::WRITE_EXCLUSIVE, [1, 2]);
        let cid = w.begin(0, preempt);
        w.rounds(4);
        match what {
            0 => {
                let mut abort = Command::new(AdminOpcode::ABORT.0, 0, 0);
                abort.cdw10 = (u32::from(cid) << 16 | 1).into();
                w.hosts[0].submit(0, abort);
            }
            1 => {
                let mut delete = Command::new(AdminOpcode::DELETE_IO_SQ.0, 0, 0);
                delete.cdw10 = 1.into();
                w.hosts[0].submit(0, delete);
            }
            2 => w.hosts[0].disable(),
            _ => w.hosts[0].c.reset(),
        }
        w.rounds(20);
        if what < 2 {
            assert!(w.hosts[0].reap(1).is_none() && w.hosts[0].reap(0).is_none());
        } else {
            // Nothing of it is in flight below: the reset need not wait.
            assert!(!w.hosts[0].c.is_resetting());
        }
        faults.clear();
        faults.release();
        w.rounds(20);
        if what < 2 {
            assert_eq!(w.hosts[0].reap(1).unwrap().status(), Status::SUCCESS);
            assert!(w.hosts[0].reap(1).is_none());
            assert_eq!(w.hosts[0].reap(0).unwrap().status(), Status::SUCCESS);
        } else {
            w.hosts[0].enable();
            w.hosts[0].create_pair(1, 64);
        }
        // It was carried out in any case.
        assert_eq!(w.end(1).status(), Status::SUCCESS);
        assert_eq!(plain(w.write(1, 1, 1)), CONFLICT);
    }
}

/// Reservation commands as far as the queue holds them, from all at once.
#[test]
fn concurrent_reservation_commands_are_serialized() {
    let mut w = World::of(&[1, 2, 3]);
    for who in 0..3 {
        w.register(who, who as u64 + 1);
    }
    for round in 0..20 {
        for who in 0..3 {
            for at in 0..50u64 {
                let key = who as u64 + 1;
                let rtype = Rtype(((round + at) % 6 + 1) as u8);
                let victim = at % 4;
                let racqa = Racqa((at % 3) as u8);
                let command = w.acquiring(who, racqa, rtype, [key, victim]);
                w.hosts[who].push(1, command);
            }
            w.hosts[who].ring_sq(1);
        }
        w.rounds(600);
        for who in 0..3 {
            assert_eq!(w.hosts[who].reap_all(1).len(), 50, "{round}");
            let command = w.registering(who, Rrega::REPLACE, true, [0, who as u64 + 1]);
            w.command(who, command);
        }
    }
}
