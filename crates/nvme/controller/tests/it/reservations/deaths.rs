//! The process dies at every point of a reservation command, and the next one continues: each
//! command takes effect once and completes once, each notice arrives once, and a fenced host stays
//! fenced.

use crate::common::*;
use crate::reservations::world::*;
use controller::{ReservationStore, Saved, Subsystem};
use nvme::cmd::reservation::{Racqa, Rrega, Rrela, Rtype};
use nvme::feature::Fid;
use nvme::{AdminOpcode, Command, Status};
use reservations::{Reservations, StoredReservations};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Store that outlives the process, and that a dead process cannot change.
#[derive(Clone)]
struct Lasting {
    stored: Arc<Mutex<StoredReservations>>,
    is_alive: Arc<AtomicBool>,
}

impl Lasting {
    fn new() -> Self {
        let stored = StoredReservations::from(Reservations::new(true));
        Lasting {
            stored: Arc::new(Mutex::new(stored)),
            is_alive: Arc::new(AtomicBool::new(true)),
        }
    }

    fn stored(&self) -> StoredReservations {
        self.stored.lock().unwrap().clone()
    }
}

impl ReservationStore for Lasting {
    fn save(&self, stored: StoredReservations, done: Saved) {
        if self.is_alive.load(Ordering::Relaxed) {
            *self.stored.lock().unwrap() = stored;
            done(true);
        }
    }
}

/// Two hosts whose process dies.
struct Mortal {
    w: World,
    store: Lasting,
    /// Host whose controller the next process continues first.
    first: usize,
    deaths: u32,
}

impl Mortal {
    fn new(first: usize) -> Self {
        let store = Lasting::new();
        let kept: Box<dyn ReservationStore> = Box::new(store.clone());
        Mortal {
            w: World::with(&mem(1 << 20), &[1, 2], Some(kept)),
            store,
            first,
            deaths: 0,
        }
    }

    /// Ends the process, and continues with the next one.
    fn die(&mut self) {
        self.deaths += 1;
        self.store.is_alive.store(false, Ordering::Relaxed);
        self.store.is_alive = Arc::new(AtomicBool::new(true));
        let subsystem = Subsystem::new();
        self.w
            .hosts
            .iter()
            .for_each(|host| subsystem.expect(&host.state));
        let kept: Box<dyn ReservationStore> = Box::new(self.store.clone());
        subsystem.add_namespace(1, self.store.stored(), Some(kept));
        for who in [self.first, 1 - self.first] {
            let host = &mut self.w.hosts[who];
            host.restore_as(config(&subsystem, who as u16 + 1, who as u8 + 1));
            host.told();
            // Nobody waits for the other controller.
            for _ in 0..4 {
                host.round_once();
            }
        }
        self.w.subsystem = subsystem;
    }

    /// Rounds of both workers until all is done, also after a death.
    fn run(&mut self) {
        let mut quiet = 0;
        while quiet < 4 {
            let hosts = &mut self.w.hosts;
            let round = catch_unwind(AssertUnwindSafe(|| {
                let all = hosts.iter_mut();
                all.fold(false, |worked, host| {
                    host.c.drain_messages() | host.round_once() | worked
                })
            }));
            quiet = match round {
                Ok(false) => quiet + 1,
                Ok(true) => 0,
                Err(panic) => {
                    let crashed = panic.downcast::<crash::Crashed>();
                    crashed.unwrap_or_else(|panic| resume_unwind(panic));
                    self.die();
                    0
                }
            };
        }
    }
}

type Step = fn(&World) -> (usize, u16, Command);

const STEPS: [Step; 13] = [
    |w| (0, 1, w.registering(0, Rrega::REGISTER, false, [0, 0xa])),
    |w| (1, 1, w.registering(1, Rrega::REGISTER, false, [0, 0xb])),
    |w| {
        (
            1,
            1,
            w.acquiring(1, Racqa::ACQUIRE, Rtype::WRITE_EXCLUSIVE, [0xb, 0]),
        )
    },
    // The other host is told that it is no registrant any more.
    |w| {
        (
            0,
            1,
            w.acquiring(
                0,
                Racqa::PREEMPT_AND_ABORT,
                Rtype::EXCLUSIVE_ACCESS,
                [0xa, 0xb],
            ),
        )
    },
    |w| (1, 1, w.registering(1, Rrega::REPLACE, true, [0, 0xb])),
    |w| (0, 1, w.registering(0, Rrega::REPLACE, false, [0xa, 0xc])),
    |w| {
        (
            0,
            1,
            w.releasing(0, Rrela::RELEASE, Rtype::EXCLUSIVE_ACCESS, 0xc),
        )
    },
    |_| (1, 0, persist(true)),
    |w| {
        let rtype = Rtype::WRITE_EXCLUSIVE_REGISTRANTS_ONLY;
        (0, 1, w.acquiring(0, Racqa::ACQUIRE, rtype, [0xc, 0]))
    },
    // The other host is told of the release.
    |w| (0, 1, w.registering(0, Rrega::UNREGISTER, false, [0xc, 0])),
    |w| (0, 1, w.registering(0, Rrega::REGISTER, false, [0, 0xd])),
    // The other host is told that all is cleared.
    |w| (0, 1, w.releasing(0, Rrela::CLEAR, Rtype::NONE, 0xd)),
    |w| (0, 1, w.registering(0, Rrega::REGISTER, false, [0, 0xe])),
];

fn persist(ptpl: bool) -> Command {
    let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, 1);
    command.cdw10 = u32::from(Fid::RESERVATION_PERSISTENCE.0).into();
    command.cdw11 = u32::from(ptpl).into();
    command
}

/// Observations of the hosts after a step.
#[derive(Debug, PartialEq)]
struct Seen {
    report: Vec<u8>,
    stored: Reservations,
    events: Vec<u32>,
    pages: Vec<Vec<u8>>,
    can_write: [bool; 2],
}

/// Executes all steps, or dies at `count`th passing of a point of step `at` and executes two more.
fn history(
    first: usize,
    at: usize,
    point: Option<(&'static str, u64)>,
) -> (Vec<Seen>, u32, BTreeMap<&'static str, u64>) {
    let mut m = Mortal::new(first);
    let event = Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0);
    m.w.hosts[1].submit(0, event);
    m.run();
    let (mut seen, mut passed) = (Vec::new(), BTreeMap::new());
    // Two steps later, a wrong state would have shown.
    let steps = match point {
        Some(_) => (at + 3).min(STEPS.len()),
        None => STEPS.len(),
    };
    for (number, step) in STEPS.iter().take(steps).enumerate() {
        let (who, qid, command) = step(&m.w);
        let cid = m.w.hosts[who].submit(qid, command);
        match point {
            Some((name, count)) if number == at => crash::arm(name, count),
            _ => crash::disarm(),
        }
        m.run();
        if number == at {
            passed = crash::passed();
        }
        crash::disarm();
        // Events of the other host, and the answer.
        let mut events = Vec::new();
        let all = m.w.hosts[1].reap_all(0);
        let mut ended = m.w.hosts[who].reap_all(1);
        for completion in all {
            if (who, qid) == (1, 0) && completion.cid.get() == cid {
                ended.push(completion);
            } else {
                events.push(completion.dw0.get());
                m.w.hosts[1].submit(0, event);
            }
        }
        let ended: Vec<_> = ended
            .iter()
            .map(|end| (end.cid.get(), end.status()))
            .collect();
        assert_eq!(ended, [(cid, Status::SUCCESS)], "{number} {point:?}");
        let mut pages = Vec::new();
        loop {
            let page = m.w.hosts[1].log(0x80, 64, 0, false).1;
            if page[8] == 0 {
                break;
            }
            pages.push(page);
        }
        // The host that was told of more by the read.
        for completion in m.w.hosts[1].reap_all(0) {
            events.push(completion.dw0.get());
            m.w.hosts[1].submit(0, event);
        }
        let (status, report) = m.w.report(0, true, 512);
        assert_eq!(status, Status::SUCCESS, "{number} {point:?}");
        let can_write = [0, 1].map(|who| m.w.write(who, 1, 1).is_success());
        let stored = m.store.stored().state;
        seen.push(Seen {
            report,
            stored,
            events,
            pages,
            can_write,
        });
    }
    (seen, m.deaths, passed)
}

#[test]
fn reservation_command_takes_effect_once_with_death_at_every_point() {
    let mut names = BTreeSet::new();
    let (expected, ..) = history(0, 0, None);
    let told: usize = expected.iter().map(|seen| seen.pages.len()).sum();
    assert_eq!(told, 3, "{expected:?}");
    for at in 0..STEPS.len() {
        let (_, _, passed) = history(0, at, None);
        for (name, count) in passed {
            for nth in 1..=count {
                for first in [0, 1] {
                    let (seen, deaths, _) = history(first, at, Some((name, nth)));
                    assert_eq!(deaths, 1, "step {at}, {name} {nth}");
                    for (step, (seen, expected)) in seen.iter().zip(&expected).enumerate() {
                        let place = format!("step {at}, {name} {nth}, host {first} first");
                        assert_eq!(seen, expected, "{place}: after step {step}");
                    }
                    names.insert(name);
                }
            }
        }
    }
    for name in [
        "controller.reservation.executed",
        "controller.reservation.stored",
        "controller.reservation.answered",
        "controller.record.written",
        "controller.record.posted",
        "controller.commit.before",
        "controller.commit.after",
    ] {
        assert!(names.contains(name), "{name} is never passed: {names:?}");
    }
}
