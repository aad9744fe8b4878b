//! One host takes another one's rights away: from the end of that command on nothing of the other
//! host's reaches the namespace.

use crate::common::*;
use crate::reservations::world::*;
use controller::{Controller, Subsystem};
use nvme::cmd::io::CopyRange;
use nvme::cmd::reservation::{Racqa, Rrela, Rtype};
use nvme::feature::Fid;
use nvme::log::AnaState;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use reservations::Reservations;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Wake, Waker};
use volume::{Effect, Fault, OpKind};
use zerocopy::IntoBytes;

#[test]
fn hosts_fence_each_other_repeatedly() {
    let mut w = World::of(&[1, 2]);
    for turn in 0..steps("VNVME_FENCING_LOOPS", 1_000) {
        let (fencing, fenced) = ((turn % 2) as usize, (1 - turn % 2) as usize);
        let (key, victim) = (turn * 2 + 1, turn * 2 + 2);
        let rtype = Rtype((turn % 6 + 1) as u8);
        assert_eq!(w.register(fencing, key), Status::SUCCESS);
        assert_eq!(w.register(fenced, victim), Status::SUCCESS);
        assert_eq!(w.acquire(fenced, rtype, victim), Status::SUCCESS);
        let (byte, block) = (turn as u8, turn % 32);
        assert_eq!(w.write(fenced, block, byte), Status::SUCCESS);
        let victim = if rtype.0 > 4 { 0 } else { victim };
        let fence = w.acquiring(fencing, Racqa::PREEMPT_AND_ABORT, rtype, [key, victim]);
        assert_eq!(w.command(fencing, fence), Status::SUCCESS);
        // The fenced host writes nothing, not even right after the fence's completion.
        assert_eq!(plain(w.write(fenced, block, !byte)), CONFLICT);
        for command in [NvmOpcode::FLUSH, NvmOpcode::WRITE_ZEROES] {
            let command = w.rw(fenced, command, block, 0);
            assert_eq!(plain(w.command(fenced, command)), CONFLICT);
        }
        let read = w.read(fenced, block).map_err(plain);
        let expected = if rtype.0.is_multiple_of(2) {
            Err(CONFLICT)
        } else {
            Ok(byte)
        };
        assert_eq!(read, expected, "{rtype:?}");
        assert_eq!(w.read(fencing, block), Ok(byte));
        assert_eq!(w.write(fencing, block, byte), Status::SUCCESS);
        let clear = w.releasing(fencing, Rrela::CLEAR, Rtype::NONE, key);
        assert_eq!(w.command(fencing, clear), Status::SUCCESS);
        assert_eq!(w.write(fenced, block, byte), Status::SUCCESS);
    }
}

/// Copy reads its sources, whatever the namespace is that it writes.
#[test]
fn copy_from_reserved_namespace_is_refused() {
    for (rtype, expected) in [
        (Rtype::EXCLUSIVE_ACCESS, CONFLICT),
        (Rtype::WRITE_EXCLUSIVE, Status::SUCCESS),
    ] {
        let mut w = World::with_more(&[mem(1 << 20), mem(1 << 20)], &[1, 2], None);
        let mut behavior = [0; 512];
        behavior[4] = 1 << 2;
        w.hosts[1].write(PAGE, &behavior);
        let mut says = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
        says.cdw10 = u32::from(Fid::HOST_BEHAVIOR_SUPPORT.0).into();
        says.set_prps(PAGE, 0);
        assert_eq!(w.admin(1, says).status(), Status::SUCCESS);
        let range = CopyRange {
            snsid: 1.into(),
            ..CopyRange::default()
        };
        w.hosts[1].write(PAGE, range.as_bytes());
        let mut copy = Command::new(NvmOpcode::COPY.0, 0, 2);
        copy.set_prps(PAGE, 0);
        copy.cdw12 = (2 << 8).into();
        assert_eq!(w.command(1, copy), Status::SUCCESS);
        assert_eq!(w.register(0, 1), Status::SUCCESS);
        assert_eq!(w.acquire(0, rtype, 1), Status::SUCCESS);
        assert_eq!(plain(w.command(1, copy)), expected, "{rtype:?}");
        let _ = w.subsystem.set_ana_state(2, 1, AnaState::INACCESSIBLE);
        assert_eq!(w.command(1, copy), Status::ANA_INACCESSIBLE);
    }
}

#[test]
fn preempt_and_abort_waits_for_commands_in_flight() {
    let (volume, faults) = faulty(1 << 20);
    let mut w = World::with(&volume, &[1, 2], None);
    w.register(0, 1);
    w.register(1, 2);
    faults.add(Fault::always(OpKind::Write, Effect::Hold));
    let late = w.rw(1, NvmOpcode::WRITE, 7, 0x77);
    w.begin(1, late);
    w.rounds(4);
    assert_eq!(faults.held(), 1);
    let rtype = Rtype::WRITE_EXCLUSIVE;
    // Without abort nothing is waited for.
    w.register(0, 1);
    assert_eq!(w.acquire(0, rtype, 1), Status::SUCCESS);
    let fence = w.acquiring(0, Racqa::PREEMPT_AND_ABORT, rtype, [1, 2]);
    w.begin(0, fence);
    w.rounds(50);
    assert!(
        w.hosts[0].reap(1).is_none(),
        "the late write may still happen"
    );
    // New commands are refused meanwhile, and the reservation is reported.
    let more = w.rw(1, NvmOpcode::WRITE, 8, 0x88);
    w.begin(1, more);
    assert_eq!(plain(w.end(1).status()), CONFLICT);
    faults.clear();
    faults.release();
    assert_eq!(w.end(0).status(), Status::SUCCESS);
    assert_eq!(w.end(1).status(), Status::SUCCESS);
    assert_eq!(w.read(0, 7), Ok(0x77));
    assert_eq!(w.write(0, 7, 1), Status::SUCCESS);
    w.rounds(20);
    assert_eq!(w.read(0, 7), Ok(1), "nothing comes later");
}

/// A reset of the fenced controller does not take its write back from the volume.
#[test]
fn preempt_and_abort_waits_through_reset_and_disconnect() {
    for ends in [false, true] {
        let (volume, faults) = faulty(1 << 20);
        let volume = stubborn(volume);
        let mut w = World::with(&volume, &[1, 2], None);
        w.register(0, 1);
        w.register(1, 2);
        faults.add(Fault::always(OpKind::Write, Effect::Hold));
        let late = w.rw(1, NvmOpcode::WRITE, 7, 0x77);
        w.begin(1, late);
        w.rounds(4);
        let preempt = w.acquiring(0, Racqa::PREEMPT_AND_ABORT, Rtype::EXCLUSIVE_ACCESS, [1, 2]);
        w.begin(0, preempt);
        w.rounds(4);
        w.hosts[1].disable();
        w.rounds(50);
        assert!(w.hosts[0].reap(1).is_none(), "it is still with the volume");
        if ends {
            w.hosts[1].c.disconnect();
            w.rounds(50);
            assert!(w.hosts[0].reap(1).is_none(), "it is still with the volume");
        }
        faults.clear();
        faults.release();
        assert_eq!(w.end(0).status(), Status::SUCCESS);
        // The next guest has no rights either.
        if !ends {
            w.rounds(20);
            w.hosts[1].enable();
            w.hosts[1].create_pair(1, 64);
        }
    }
}

/// Two workers: what one has written after its fence is never overwritten by the other, whatever
/// that was doing.
#[test]
fn fenced_host_writes_nothing_after_fence() {
    struct Flag(AtomicBool, std::thread::Thread);
    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Release);
            self.1.unpark();
        }
    }
    /// A worker's round.
    fn round(h: &mut Host, flag: &Flag) {
        if flag.0.swap(false, Ordering::AcqRel) {
            h.c.drain_messages();
        }
        h.round();
    }
    fn woken(c: &mut Controller, number: u16) -> Arc<Flag> {
        let flag = Arc::new(Flag(AtomicBool::new(false), std::thread::current()));
        c.set_worker(number, Waker::from(flag.clone()));
        flag
    }
    fn one(subsystem: &Arc<Subsystem>, volume: &Arc<dyn volume::Volume>, number: u16) -> World {
        let config = config(subsystem, number, number as u8);
        let mut h = Host::with(config, vec![ns(1, volume.clone(), 512)]);
        h.enable();
        h.create_pair(1, 64);
        World {
            subsystem: subsystem.clone(),
            hosts: vec![h],
        }
    }
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    fn done(w: &mut World, flag: &Flag) -> Status {
        loop {
            round(&mut w.hosts[0], flag);
            if let Some(done) = w.hosts[0].reap(1) {
                return done.status();
            }
            std::thread::yield_now();
        }
    }

    let loops = steps("VNVME_FENCING_LOOPS", 200);
    let subsystem = Subsystem::new();
    subsystem.add_namespace(1, Reservations::new(false), None);
    let volume = mem(1 << 20);
    let (over, writes) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        // It writes 0xff wherever it may, as fast as it can, and registers again when it may not.
        scope.spawn(|| {
            let mut w = one(&subsystem, &volume, 2);
            let flag = woken(&mut w.hosts[0].c, 2);
            while !over.load(Ordering::Relaxed) {
                let command = w.rw(0, NvmOpcode::WRITE, 3, 0xff);
                w.begin(0, command);
                match plain(done(&mut w, &flag)) {
                    Status::SUCCESS => writes.fetch_add(1, Ordering::Relaxed),
                    CONFLICT => 0,
                    other => panic!("{other}"),
                };
                let command =
                    w.registering(0, nvme::cmd::reservation::Rrega::REPLACE, true, [0, 2]);
                w.begin(0, command);
                done(&mut w, &flag);
            }
            // What waits for this controller has its answer.
            while !w.hosts[0].c.is_drained() {
                round(&mut w.hosts[0], &flag);
            }
        });
        // The other one ends with this one, if that fails, too.
        let _over = Over(&over);
        let mut w = one(&subsystem, &volume, 1);
        let flag = woken(&mut w.hosts[0].c, 1);
        let run = |command: nvme::Command, w: &mut World| {
            w.begin(0, command);
            plain(done(w, &flag))
        };
        for turn in 0..loops {
            let command = w.registering(0, nvme::cmd::reservation::Rrega::REPLACE, true, [0, 1]);
            assert_eq!(run(command, &mut w), Status::SUCCESS);
            // The other one registers again, so the type is one that excludes registrants.
            let command = w.acquiring(0, Racqa::ACQUIRE, Rtype::WRITE_EXCLUSIVE, [1, 0]);
            assert_eq!(run(command, &mut w), Status::SUCCESS);
            let command = w.acquiring(0, Racqa::PREEMPT_AND_ABORT, Rtype::WRITE_EXCLUSIVE, [1, 2]);
            run(command, &mut w);
            let byte = (turn % 0xff) as u8;
            let command = w.rw(0, NvmOpcode::WRITE, 3, byte);
            assert_eq!(run(command, &mut w), Status::SUCCESS);
            for _ in 0..8 {
                let command = w.rw(0, NvmOpcode::READ, 3, 0);
                assert_eq!(run(command, &mut w), Status::SUCCESS);
                assert_eq!(w.hosts[0].read(DATA + 3 * 512, 512), [byte; 512], "{turn}");
            }
            let before = writes.load(Ordering::Relaxed);
            let command = w.releasing(0, Rrela::RELEASE, Rtype::WRITE_EXCLUSIVE, 1);
            assert_eq!(run(command, &mut w), Status::SUCCESS);
            // It may write now, and does.
            while writes.load(Ordering::Relaxed) == before {
                round(&mut w.hosts[0], &flag);
                std::thread::yield_now();
            }
        }
        over.store(true, Ordering::Relaxed);
        // The other one may wait for an operation of its own that concerns this one.
        for _ in 0..1_000 {
            round(&mut w.hosts[0], &flag);
            std::thread::yield_now();
        }
    });
}
