//! A model of the protocol: both roles over loom's atomics, every
//! interleaving of bounded histories.
//!
//! What is checked in each: *no lost wake-up* (a controller that sleeps although the host
//! published, and that nobody wakes), *no missed entry* (at the end it has all of them) and *no
//! phantom entry* (each entry that it fetched has the content that the host gave it in this life of
//! the queue). Every history starts on cells that hold what an earlier queue left.
//!
//! The mutants take away one fence, one order, one look or one store each, through
//! [`model::Faulty`], below the very code that runs in production, and assert that a model notices.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

#[path = "loom/mod.rs"]
mod model;

use doorbell::{HostBehaviour, ProtocolAccess};
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use model::{Controller, Fault, Host, STALE, World, check, check_bounded, fails};
use std::sync::Arc;

/// Scenario of a host and a controller.
#[derive(Clone, Copy)]
struct History {
    size: u32,
    /// Number of entries that both sides pass before the race, which determines its position in the
    /// ring.
    turned: u32,
    /// Moves of the host, in entries.
    moves: &'static [u32],
    behaviour: HostBehaviour,
    fault: Fault,
}

const BASE: History = History {
    size: 4,
    turned: 1,
    moves: &[1, 1],
    behaviour: HostBehaviour::LINUX,
    fault: Fault::None,
};

impl History {
    fn start(self) -> (World, Host, Controller) {
        let world = World::new(self.size, self.fault);
        let mut controller = Controller::create(&world, true, 0);
        let mut host = Host::new(&world, self.behaviour, 0);
        for _ in 0..self.turned {
            host.submit(1);
            // It ends polling, with EventIdx parked and the wake-up, if there was one, consumed.
            controller.serve_until(host.published);
            if host.rings > 0 {
                world.sleep();
                host.rings = 0;
            }
        }
        (world, host, controller)
    }

    fn spawn(self, world: &World, mut host: Host) -> thread::JoinHandle<Host> {
        let world = world.clone();
        thread::spawn(move || {
            for &n in self.moves {
                host.submit(n);
            }
            world.over();
            host
        })
    }

    /// Runs the scenario until the controller may sleep. When both sides rest, the controller has
    /// all entries or will be woken.
    fn until_idle(self) {
        let (world, host, mut controller) = self.start();
        let host = self.spawn(&world, host);
        controller.serve_until_idle();
        let host = host.join().unwrap();
        assert!(
            controller.fetched == host.published || host.rings > 0,
            "lost wake-up"
        );
        controller.serve_until_idle();
        assert_eq!(controller.fetched, host.published, "missed entry");
    }

    /// Runs the scenario until the controller, which sleeps and is woken, has all entries.
    fn until_done(self) {
        let (world, host, mut controller) = self.start();
        let total = host.published + self.moves.iter().sum::<u32>();
        let host = self.spawn(&world, host);
        controller.serve_until(total);
        host.join().unwrap();
    }
}

impl History {
    /// Runs the scenario like [`History::until_idle`], with a controller that polls only after a
    /// spin poll found news.
    fn spun_until_idle(self) {
        let (world, host, mut controller) = self.start();
        let host = self.spawn(&world, host);
        controller.spin_until_idle();
        let host = host.join().unwrap();
        assert!(
            controller.fetched == host.published || host.rings > 0,
            "lost wake-up"
        );
        controller.spin_until_idle();
        assert_eq!(controller.fetched, host.published, "missed entry");
    }
}

// ---- the protocol holds

#[test]
fn spin_poll_matches_poll() {
    for behaviour in [HostBehaviour::LINUX, HostBehaviour::ALWAYS_RINGS] {
        for turned in [0, 3] {
            check_bounded(3, move || {
                History {
                    turned,
                    behaviour,
                    ..BASE
                }
                .spun_until_idle()
            });
        }
    }
    check(|| {
        History {
            moves: &[1],
            behaviour: HostBehaviour::REGISTER_ONLY,
            ..BASE
        }
        .spun_until_idle()
    });
}

#[test]
fn every_interleaving_of_one_move_wakes() {
    for turned in 0..4 {
        check(move || {
            History {
                turned,
                moves: &[1],
                ..BASE
            }
            .until_idle()
        });
    }
}

#[test]
fn every_interleaving_of_two_moves_across_wrap_wakes() {
    check(move || History { turned: 3, ..BASE }.until_idle());
}

#[test]
fn sleeping_worker_wakes_again() {
    for behaviour in [
        HostBehaviour::STANDARD,
        HostBehaviour::LINUX,
        HostBehaviour::ANNEX,
        HostBehaviour::ALWAYS_RINGS,
    ] {
        for turned in [0, 2, 3] {
            for moves in [&[1, 1][..], &[2, 1], &[1, 2]] {
                check_bounded(3, move || {
                    History {
                        turned,
                        moves,
                        behaviour,
                        ..BASE
                    }
                    .until_done()
                });
            }
        }
    }
}

#[test]
fn three_moves_through_wrap_wake() {
    for turned in [1, 2, 3] {
        check_bounded(3, move || {
            History {
                turned,
                moves: &[1, 1, 1],
                ..BASE
            }
            .until_done()
        });
    }
}

#[test]
fn register_only_hosts_are_woken_and_served() {
    for turned in [0, 3] {
        let history = History {
            turned,
            behaviour: HostBehaviour::REGISTER_ONLY,
            ..BASE
        };
        check_bounded(4, move || history.until_done());
    }
}

#[test]
fn barrierless_hosts_are_found_by_recheck() {
    let history = History {
        moves: &[1],
        behaviour: HostBehaviour::BARRIERLESS,
        ..BASE
    };
    assert!(
        fails(move || history.until_idle()),
        "if not, the barrier were not needed"
    );
    check(move || {
        let (world, host, mut controller) = history.start();
        let host = history.spawn(&world, host);
        controller.serve_until_idle();
        // Later: the host's store has left its store buffer.
        let host = host.join().unwrap();
        while !controller.recheck() {}
        assert_eq!(controller.fetched, host.published);
    });
}

// ---- a queue's life

/// Runs a scenario in which a queue is used, deleted and created again, with stale cells and
/// entries. The controller creates the queue while the host waits for the command's completion.
fn recreation(first: &'static [u32], behaviour: HostBehaviour, fault: Fault) {
    let history = History {
        turned: 0,
        moves: first,
        behaviour,
        fault,
        ..BASE
    };
    let (world, host, mut controller) = history.start();
    let first_life = history.spawn(&world, host);
    controller.serve_until(first.iter().sum());
    first_life.join().unwrap();
    drop(controller);

    let created = Arc::new(AtomicBool::new(false));
    let host = thread::spawn({
        let (world, created) = (world.clone(), created.clone());
        move || {
            let mut host = Host::new(&world, behaviour, 100);
            if created.load(Ordering::Acquire) {
                host.submit(1);
            }
            host
        }
    });
    let mut controller = Controller::create(&world, true, 100);
    created.store(true, Ordering::Release);
    controller.serve_until_idle();
    let mut host = host.join().unwrap();
    let rings = host.rings;
    assert!(
        controller.fetched == host.published || rings > 0,
        "lost wake-up"
    );
    controller.serve_until_idle();
    // Both sides rest; one more command must wake the controller.
    host.submit(1);
    assert!(host.rings > rings, "lost wake-up of a resting queue");
    controller.serve_until_idle();
    assert_eq!(controller.fetched, host.published, "missed entry");
}

#[test]
fn recreation_on_stale_cells_wakes() {
    for behaviour in [
        HostBehaviour::STANDARD,
        HostBehaviour::LINUX,
        HostBehaviour::REGISTER_ONLY,
    ] {
        check_bounded(3, move || recreation(&[1], behaviour, Fault::None));
        check_bounded(3, move || recreation(&[2, 1], behaviour, Fault::None));
    }
}

/// Runs a scenario in which Doorbell Buffer Config is executed while the host submits by register.
/// The host uses the shadow entry after it has seen the completion.
fn config(behaviour: HostBehaviour, fault: Fault) {
    let world = World::new(4, fault);
    let mut controller = Controller::create(&world, false, 0);
    let completed = Arc::new(AtomicBool::new(false));
    let host = thread::spawn({
        let (world, completed) = (world.clone(), completed.clone());
        move || {
            let mut host = Host::new(&world, behaviour, 0);
            for _ in 0..3 {
                host.shadowed = completed.load(Ordering::Acquire);
                host.submit(1);
            }
            world.over();
        }
    });
    controller.poll();
    controller.attach();
    completed.store(true, Ordering::Release);
    controller.serve_until(3);
    host.join().unwrap();
}

#[test]
fn config_on_live_queue_wakes() {
    for behaviour in [
        HostBehaviour::STANDARD,
        HostBehaviour::LINUX,
        HostBehaviour::ANNEX,
    ] {
        check_bounded(3, move || config(behaviour, Fault::None));
    }
}

/// Checks that a new queue's values are found, even when the ring has come round so that the entry
/// holds its initial value again.
#[test]
fn entry_back_at_first_value_is_seen() {
    check(|| {
        let world = World::new(4, Fault::None);
        let mut controller = Controller::create(&world, true, 0);
        let mut host = Host::new(&world, HostBehaviour::LINUX, 0);
        let host = thread::spawn(move || {
            host.submit(1);
            host
        });
        controller.poll_without_parking();
        let mut host = host.join().unwrap();
        if controller.fetched == 1 {
            host.submit(3);
            controller.poll_without_parking();
            assert_eq!(controller.fetched, 4, "missed entries");
        }
    });
}

/// Value that the host stores into the buffers' memory after the reset of the controller.
const REUSED: u32 = 0xdead;

/// Runs a scenario in which the host resets the controller while the worker serves, waits for
/// CSTS.RDY = 0, and reuses the buffers' memory. The worker then serves a new queue by registers.
fn reset(worker_keeps_cells: bool) {
    let world = World::new(4, Fault::None);
    let reset = Arc::new(AtomicBool::new(false));
    let ready = Arc::new(Mutex::new(true));
    let worker = thread::spawn({
        let (world, reset, ready) = (world.clone(), reset.clone(), ready.clone());
        move || {
            let mut controller = Controller::create(&world, true, 0);
            while !reset.load(Ordering::Acquire) {
                if !controller.poll() && controller.arm() {
                    world.sleep();
                }
            }
            let mut next = Controller::create(&world, worker_keeps_cells, 0);
            *ready.lock().unwrap() = false;
            // A round of the next life, as on any queue.
            next.poll();
            next.arm();
        }
    });
    reset.store(true, Ordering::Release);
    world.kick();
    let reused = !*ready.lock().unwrap();
    if reused {
        world.entry.store(REUSED, Ordering::Relaxed);
        world.eventidx.store(REUSED, Ordering::Relaxed);
    }
    worker.join().unwrap();
    if reused {
        assert_eq!(world.entry.load(Ordering::Relaxed), REUSED);
        assert_eq!(world.eventidx.load(Ordering::Relaxed), REUSED);
    }
}

#[test]
fn reset_ends_use_of_buffers() {
    check_bounded(3, || reset(false));
    assert!(
        fails(|| reset(true)),
        "the model notices a store after the reset"
    );
}

/// Runs a scenario with a full CQ that was parked, and completions that wait for room. The host's
/// next head must wake the controller; later heads must not ring.
fn full_cq(size: u32, behaviour: HostBehaviour, fault: Fault) {
    let world = World::new(size, fault);
    let mut controller = Controller::create(&world, true, 0);
    let mut host = Host::new(&world, behaviour, 0);
    // The first head finds EventIdx armed by the creation.
    host.consume(1);
    world.sleep();
    assert_eq!(controller.wait_for_room(1), 1);
    controller.park_until(0);
    let rings = host.rings;

    // The tail goes to 0: full.
    let host = thread::spawn({
        let world = world.clone();
        move || {
            host.consume(1);
            world.over();
            host
        }
    });
    let head = controller.wait_for_room(0);
    assert_eq!(head, 2 % size, "only what the host consumed is free");
    let mut host = host.join().unwrap();
    assert!(host.rings <= rings + 1);

    // One completion more is posted; the host consumes all there is.
    controller.park_until(1);
    let rings = host.rings;
    host.consume(size - 1);
    assert_eq!(host.rings, rings, "a ring without need");
    assert_eq!(controller.wait_for_room(1), 1, "all free again");
}

#[test]
fn full_cq_is_always_rung() {
    for behaviour in [HostBehaviour::STANDARD, HostBehaviour::LINUX] {
        for size in [2, 3, 4] {
            check(move || full_cq(size, behaviour, Fault::None));
        }
    }
}

// ---- mutants: without any one of these the protocol fails, and the models show it

fn mutant_of_submission(fault: Fault) -> bool {
    fails(move || History { fault, ..BASE }.until_done())
}

#[test]
fn mutants_of_host_fail() {
    assert!(
        mutant_of_submission(Fault::Omit(ProtocolAccess::HostFence)),
        "host's full fence"
    );
    assert!(
        mutant_of_submission(Fault::Relax(ProtocolAccess::HostShadow)),
        "host's release of the shadow entry"
    );
    let register = |fault| {
        fails(move || {
            History {
                fault,
                behaviour: HostBehaviour::REGISTER_ONLY,
                ..BASE
            }
            .until_done()
        })
    };
    assert!(
        register(Fault::Relax(ProtocolAccess::HostRegister)),
        "host's release of the register"
    );
}

#[test]
fn mutants_of_controller_fail() {
    assert!(
        mutant_of_submission(Fault::Omit(ProtocolAccess::ArmFence)),
        "full fence after arming"
    );
    assert!(
        mutant_of_submission(Fault::Omit(ProtocolAccess::ArmShadow)),
        "the look after arming"
    );
    assert!(
        mutant_of_submission(Fault::Omit(ProtocolAccess::ArmEventIdx)),
        "arming"
    );
    assert!(
        mutant_of_submission(Fault::Relax(ProtocolAccess::PollShadow)),
        "acquire of the shadow entry"
    );
    assert!(
        mutant_of_submission(Fault::Relax(ProtocolAccess::ArmShadow)),
        "acquire of the look after arming"
    );
    let register = |fault| {
        fails(move || {
            History {
                fault,
                behaviour: HostBehaviour::REGISTER_ONLY,
                ..BASE
            }
            .until_done()
        })
    };
    assert!(
        register(Fault::Relax(ProtocolAccess::PollRegister)),
        "acquire of the register"
    );
    assert!(
        register(Fault::Relax(ProtocolAccess::ArmRegister)),
        "acquire of the register after arming"
    );
}

#[test]
fn mutants_of_queue_lifecycle_fail() {
    assert_eq!(STALE, 2, "an index of the ring: stale, but not invalid");
    let fault = Fault::Omit(ProtocolAccess::Initialise);
    assert!(
        fails(move || recreation(&[2, 1], HostBehaviour::LINUX, fault)),
        "first values of the cells"
    );
    assert!(
        fails(move || config(HostBehaviour::LINUX, fault)),
        "first values of the cells, on a live queue"
    );
}

#[test]
fn mutants_of_full_cq_fail() {
    for step in [
        ProtocolAccess::ArmFence,
        ProtocolAccess::ArmShadow,
        ProtocolAccess::ArmEventIdx,
        ProtocolAccess::HostFence,
    ] {
        assert!(
            fails(move || full_cq(3, HostBehaviour::LINUX, Fault::Omit(step))),
            "{step:?}"
        );
    }
}

#[test]
fn mutant_models_without_fault_pass() {
    assert!(!mutant_of_submission(Fault::None));
    assert!(!fails(|| recreation(
        &[2, 1],
        HostBehaviour::LINUX,
        Fault::None
    )));
    assert!(!fails(|| full_cq(3, HostBehaviour::LINUX, Fault::None)));
}
