//! What waits: Asynchronous Event Request, Abort, Keep Alive.

use crate::common::*;
use controller::ControllerConfig;
use nvme::aen::{AsyncEvent, ErrorEvent, Notice, SmartEvent};
use nvme::feature::Fid;
use nvme::log::Lid;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use volume::{Effect, Fault, OpKind};

fn aer() -> Command {
    Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0)
}

#[test]
fn events_and_event_requests_wait_for_each_other() {
    let mut h = Host::ready();
    let parked: Vec<u16> = (0..4).map(|_| h.submit(0, aer())).collect();
    h.run();
    assert!(h.reap(0).is_none(), "parked");
    assert_eq!(plain(h.admin(aer()).status()), Status::AER_LIMIT_EXCEEDED);
    // A doorbell of no queue.
    h.set32(Host::doorbell(9, false), 1);
    h.run();
    let event = h.reap(0).unwrap();
    assert_eq!(event.cid.get(), parked[0]);
    let expected = AsyncEvent::error(ErrorEvent::INVALID_DOORBELL_REGISTER);
    assert_eq!(
        (event.status(), event.dw0.get()),
        (Status::SUCCESS, expected.into_bits())
    );
    // The type is masked until its log page is read without RAE.
    h.set32(Host::doorbell(1, false), 64);
    h.run();
    assert!(h.reap(0).is_none());
    h.log(1, 64, 0, true);
    assert!(h.reap(0).is_none(), "retained");
    let mut clear = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, 0);
    clear.cdw10 = (1 | 15 << 16).into();
    clear.set_prps(PAGE, 0);
    h.submit(0, clear);
    h.run();
    let all = h.reap_all(0);
    let event = all.iter().find(|e| e.cid.get() == parked[1]).unwrap();
    let expected = AsyncEvent::error(ErrorEvent::INVALID_DOORBELL_VALUE);
    assert_eq!(event.dw0.get(), expected.into_bits());
    assert_eq!(all.len(), 2);
    // Another type is not masked by it: too hot, once that is asked for.
    h.set_feature(Fid::ASYNC_EVENT_CONFIG, 0xff);
    let mut hot = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
    hot.cdw10 = u32::from(Fid::TEMPERATURE_THRESHOLD.0).into();
    hot.cdw11 = 300.into();
    h.submit(0, hot);
    h.run();
    let all = h.reap_all(0);
    let event = all.iter().find(|e| e.cid.get() == parked[2]).unwrap();
    assert_eq!(
        event.dw0.get(),
        AsyncEvent::smart(SmartEvent::TEMPERATURE_THRESHOLD).into_bits()
    );
    let smart = h.log(2, 512, 0, true).1;
    assert_eq!(smart[0], 2, "critical warning: temperature");
    // A reset forgets what is parked.
    h.disable();
    h.enable();
    h.run();
    assert!(h.reap(0).is_none());
    assert_eq!(h.log(2, 512, 0, true).1[0], 0);
}

#[test]
fn paused_controller_posts_no_events() {
    let size = Arc::new(AtomicU64::new(1 << 20));
    let told = size.clone();
    let volume = described(mem(4 << 20), move |info| volume::Info {
        size: told.load(Ordering::Relaxed),
        ..info
    });
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    h.set_feature(Fid::ASYNC_EVENT_CONFIG, 1 << 8);
    let parked = [h.submit(0, aer()), h.submit(0, aer())];
    h.run();
    h.c.pause();
    h.run();
    assert!(h.c.is_quiet());
    size.store(2 << 20, Ordering::Relaxed);
    assert!(h.c.check_sizes());
    h.set32(Host::doorbell(9, false), 1);
    h.run();
    assert!(h.reap(0).is_none());
    assert!(h.c.is_quiet());
    h.c.unpause();
    h.run();
    let all: Vec<(u16, u32)> = h
        .reap_all(0)
        .iter()
        .map(|e| (e.cid.get(), e.dw0.get()))
        .collect();
    let resized = AsyncEvent::notice(
        Notice::NAMESPACE_ATTRIBUTE_CHANGED,
        Lid::CHANGED_NAMESPACE_LIST,
    );
    let doorbell = AsyncEvent::error(ErrorEvent::INVALID_DOORBELL_REGISTER);
    let events = [resized, doorbell].map(|event| event.into_bits());
    assert_eq!(all, [(parked[0], events[0]), (parked[1], events[1])]);
}

#[test]
fn abort_ends_parked_and_running_commands() {
    let (volume, faults) = faulty(1 << 20);
    let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
    let parked = h.submit(0, aer());
    h.run();
    // A parked request.
    let mut command = Command::new(AdminOpcode::ABORT.0, 0, 0);
    command.cdw10 = (u32::from(parked) << 16).into();
    let cid = h.submit(0, command);
    h.run();
    let (first, second) = (h.reap(0).unwrap(), h.reap(0).unwrap());
    assert_eq!(
        (first.cid.get(), plain(first.status())),
        (parked, Status::ABORT_REQUESTED)
    );
    assert_eq!((second.cid.get(), second.dw0.get()), (cid, 0));
    // What is not there.
    for target in [0x7777 << 16, 0x7777 << 16 | 1, 5, 0xffff_ffff] {
        let done = h.simple(AdminOpcode::ABORT, target);
        assert_eq!(
            (done.status(), done.dw0.get()),
            (Status::SUCCESS, 1),
            "{target:#x}"
        );
    }
    // A command in flight.
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    let read = h.rw(NvmOpcode::READ, 1, 0, 1, DATA);
    let target = h.submit(1, read);
    h.run_held(&faults, 1);
    let done = h.simple(AdminOpcode::ABORT, u32::from(target) << 16 | 1);
    assert_eq!((done.status(), done.dw0.get()), (Status::SUCCESS, 0));
    let aborted = h.reap(1).unwrap();
    assert_eq!(
        (aborted.cid.get(), plain(aborted.status())),
        (target, Status::ABORT_REQUESTED)
    );
    faults.clear();
    assert_eq!(h.io(read), Status::SUCCESS);
}

#[test]
fn abort_reaches_command_not_yet_fetched() {
    let (volume, faults) = faulty(1 << 20);
    let config = ControllerConfig {
        max_in_flight: 1,
        ..Default::default()
    };
    let mut h = Host::with(config, vec![ns(1, volume, 512)]);
    h.enable();
    h.create_pair(1, 64);
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    let read = h.rw(NvmOpcode::READ, 1, 0, 1, DATA);
    h.submit(1, read);
    let target = h.submit(1, read);
    h.run_held(&faults, 1);
    let mut command = Command::new(AdminOpcode::ABORT.0, 0, 0);
    command.cdw10 = (u32::from(target) << 16 | 1).into();
    let cid = h.submit(0, command);
    h.run_held(&faults, 1);
    assert!(h.reap(0).is_none(), "not decided before it is fetched");
    faults.clear();
    faults.release();
    h.until(|h| h.peek(0).is_some());
    let done = h.reap(0).unwrap();
    assert_eq!((done.cid.get(), done.dw0.get()), (cid, 0));
    let all = h.reap_all(1);
    assert_eq!(
        (all[0].status(), plain(all[1].status())),
        (Status::SUCCESS, Status::ABORT_REQUESTED)
    );
    // Its queue is deleted first: the Abort is answered all the same.
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    h.submit(1, read);
    let target = h.submit(1, read);
    h.run_held(&faults, 1);
    command.cdw10 = (u32::from(target) << 16 | 1).into();
    let cid = h.submit(0, command);
    let mut delete = Command::new(AdminOpcode::DELETE_IO_SQ.0, 0, 0);
    delete.cdw10 = 1.into();
    h.submit(0, delete);
    h.run_held(&faults, 1);
    let done = h.reap(0).unwrap();
    assert_eq!((done.cid.get(), done.dw0.get()), (cid, 1));
    faults.clear();
    faults.release();
    h.until(|h| h.peek(0).is_some());
    assert_eq!(h.reap(0).unwrap().status(), Status::SUCCESS);
}

#[test]
fn aborts_are_limited_and_end_with_reset() {
    let (volume, faults) = faulty(1 << 20);
    let config = ControllerConfig {
        max_in_flight: 1,
        ..Default::default()
    };
    let mut h = Host::with(config, vec![ns(1, volume, 512)]);
    h.enable();
    h.create_pair(1, 64);
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    let read = h.rw(NvmOpcode::READ, 1, 0, 1, DATA);
    let targets: Vec<u16> = (0..12).map(|_| h.submit(1, read)).collect();
    h.run_held(&faults, 1);
    for &target in &targets[1..10] {
        let mut command = Command::new(AdminOpcode::ABORT.0, 0, 0);
        command.cdw10 = (u32::from(target) << 16 | 1).into();
        h.submit(0, command);
        h.run_held(&faults, 1);
    }
    let refused = h.reap(0).unwrap();
    assert_eq!(
        plain(refused.status()),
        Status::ABORT_COMMAND_LIMIT_EXCEEDED
    );
    assert!(h.reap(0).is_none());
    h.disable();
    faults.clear();
    h.until(|h| !h.c.is_resetting());
    h.enable();
    h.create_pair(1, 64);
    assert_eq!(h.io(read), Status::SUCCESS);
    let done = h.simple(AdminOpcode::ABORT, 0x7777 << 16 | 1);
    assert_eq!(
        (done.status(), done.dw0.get()),
        (Status::SUCCESS, 1),
        "none waits any more"
    );
}

/// The clock is read again.
fn next_reading(h: &mut Host) {
    h.now += Duration::from_micros(1);
    h.run();
}

/// Runs at each time that the controller asks for, until it asks for none.
fn run_to_deadlines(h: &mut Host) {
    next_reading(h);
    while let Some(at) = h.c.deadline() {
        h.now = at;
        h.run();
    }
}

/// A process that did not run finds the timeout passed, and the doorbell still in the socket.
#[test]
fn keep_alive_that_a_late_process_reads_is_in_time() {
    let mut h = Host::ready();
    h.set_feature(Fid::KEEP_ALIVE_TIMER, 1000);
    for _ in 0..3 {
        next_reading(&mut h);
        h.now += Duration::from_secs(10);
        h.run();
        h.now = h.c.deadline().unwrap();
        h.run();
        assert_eq!(
            h.simple(AdminOpcode::KEEP_ALIVE, 0).status(),
            Status::SUCCESS
        );
        assert!(!h.csts().cfs());
    }
    // The pause may begin between the reading of the clock and the command.
    h.now += Duration::from_secs(10);
    h.run();
    assert!(!h.csts().cfs());
    assert_eq!(h.c.deadline(), Some(h.now + Duration::from_secs(1)));
    run_to_deadlines(&mut h);
    assert!(h.csts().cfs(), "the host is silent");
}

#[test]
fn keep_alive_timer_expires() {
    let mut h = Host::ready();
    assert_eq!(
        h.simple(AdminOpcode::KEEP_ALIVE, 0).status(),
        Status::SUCCESS
    );
    assert_eq!(h.c.deadline(), None);
    h.set_feature(Fid::KEEP_ALIVE_TIMER, 950);
    assert_eq!(
        h.get_feature(Fid::KEEP_ALIVE_TIMER, 0, 0).dw0.get(),
        1000,
        "rounded up"
    );
    next_reading(&mut h);
    let start = h.now;
    assert_eq!(h.c.deadline(), Some(start + Duration::from_secs(1)));
    for i in 1..5 {
        h.now = start + Duration::from_millis(900 * i);
        assert_eq!(
            h.simple(AdminOpcode::KEEP_ALIVE, 0).status(),
            Status::SUCCESS
        );
    }
    h.now += Duration::from_millis(1001);
    run_to_deadlines(&mut h);
    assert!(h.csts().cfs());
    assert_eq!(h.c.deadline(), None);
    h.disable();
    assert!(!h.csts().cfs());
    h.enable();
    h.now += Duration::from_secs(100);
    h.run();
    assert!(!h.csts().cfs(), "the timer ends with a reset");
    // And with a shutdown.
    h.set_feature(Fid::KEEP_ALIVE_TIMER, 1000);
    h.shutdown(nvme::regs::Shn::NORMAL);
    h.wait_shutdown();
    h.now += Duration::from_secs(100);
    h.run();
    assert!(!h.csts().cfs());
}
