//! A host that asks for more than the workers can keep up with.

use crate::migration::rules::migrate_to_others;
use crate::migration::world::{ENTRIES, OTHERS, World};
use nvme::feature::Fid;
use nvme::{AdminOpcode, Command, Status};
use volume::{Effect, Fault, IoError, IoErrorKind, OpKind};

/// Errors on another worker may come as fast as they are reported: the controller's own worker does
/// other things in between.
#[test]
fn error_reports_are_drained_in_shares() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.settle();
    w.wake_all();
    w.flag.take();
    let worker = usize::from(w.worker_of(3));
    let errors = 3 * u64::from(ENTRIES - 1);
    for _ in 0..3 {
        for _ in 1..ENTRIES {
            w.h.submit(3, Command::new(0x7f, 0, 1));
        }
        (0..4).for_each(|_| {
            w.step(worker, true);
        });
        assert_eq!(w.h.reap_all(3).len(), ENTRIES as usize - 1);
    }
    let reported = |w: &World| w.h.c.stats().error_log_entries.get();
    assert!(w.flag.take() && w.h.c.drain_messages());
    let first = reported(&w);
    assert!(0 < first && first < errors, "{first} of {errors} at once");
    while w.flag.take() {
        w.h.c.drain_messages();
    }
    assert_eq!(reported(&w), errors);
}

/// Commands that are held until it is known where a queue is take room; a host that does not wait
/// for their completions gets no more of it than so many.
#[test]
fn held_admin_commands_are_bounded() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.wake_all();
    let worker = w.worker_of(2);
    assert!(w.migrate_queue(2, 0));
    assert!(w.h.c.is_migrating());
    // The worker that has the queue does not drain its messages meanwhile.
    let beside = w.h.beside.take();
    let mut sent = 0u64;
    let before = w.h.c.stats().queues[0].commands.get();
    let fetched = |w: &World| w.h.c.stats().queues[0].commands.get() - before;
    for _ in 0..200 {
        // As many as the queue takes, whatever was completed.
        while sent - fetched(&w) < 31 {
            let mut command = Command::new(AdminOpcode::ABORT.0, 0, 0);
            command.cdw10 = (0xffff << 16 | 2).into();
            w.h.submit(0, command);
            sent += 1;
        }
        w.step(0, true);
    }
    assert!(fetched(&w) <= 256, "{} are held", fetched(&w));
    assert!(w.h.peek(0).is_none());
    // All are answered in the end.
    w.h.beside = beside;
    let mut answered = 0;
    for _ in 0..100_000 {
        if answered == sent {
            break;
        }
        w.wake_all();
        (0..=OTHERS).for_each(|worker| {
            w.step(worker, true);
        });
        answered += w.h.reap_all(0).len() as u64;
    }
    assert_eq!(answered, sent);
    assert_eq!(w.worker_of(2), worker, "the migration was cancelled");
    w.verify();
}

/// A flush that a reset had to wait for, and that failed, is reported only when the next one is
/// under way.
#[test]
fn flush_from_before_reset_does_not_affect_next() {
    let mut w = World::new(false);
    migrate_to_others(&mut w);
    w.settle();
    w.wake_all();
    let beside = w.h.beside.take();
    let steps = |w: &mut World, drain: bool| {
        for _ in 0..8 {
            (1..=OTHERS).for_each(|worker| {
                w.step(worker, true);
            });
            w.step(0, drain);
        }
    };
    // A flush begins when the write is over, which the reset cancels.
    w.faults.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
    w.submit(2, true);
    steps(&mut w, false);
    assert_eq!(w.faults.held(), 1);
    let error = IoError::from(IoErrorKind::MediaWrite);
    w.faults
        .add(Fault::always(OpKind::Flush, Effect::Fail(error)));
    let feature = |w: &mut World, on: u32| {
        let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
        command.cdw10 = u32::from(Fid::VOLATILE_WRITE_CACHE.0).into();
        command.cdw11 = on.into();
        w.h.submit(0, command)
    };
    // The flush is ordered, and the reset right after it.
    feature(&mut w, 0);
    w.step(0, false);
    w.h.disable();
    steps(&mut w, false);
    assert!(!w.h.csts().rdy());
    w.faults.clear();
    w.h.enable();
    feature(&mut w, 0);
    // What was reported before is taken first.
    w.step(0, false);
    w.step(0, true);
    steps(&mut w, true);
    let completion = w.h.reap(0).unwrap();
    assert_eq!(completion.status(), Status::SUCCESS);
    w.h.beside = beside;
}

/// A worker that is late gets no more orders by admin commands than so many.
#[test]
fn admin_commands_wait_for_late_worker() {
    let mut w = World::new(false);
    w.wake_all();
    let beside = w.h.beside.take();
    let features = |w: &mut World| {
        let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
        command.cdw10 = u32::from(Fid::VOLATILE_WRITE_CACHE.0).into();
        command.cdw11 = 1.into();
        w.h.submit(0, command);
        w.step(0, true);
        w.h.reap(0).is_some()
    };
    let done = (0..1000).take_while(|_| features(&mut w)).count();
    assert!((200..300).contains(&done), "{done}");
    w.h.beside = beside;
    w.h.until(|h| h.reap(0).is_some());
    assert!(features(&mut w));
}
