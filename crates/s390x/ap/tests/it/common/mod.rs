//! A small world for the tests: guest pages, subclasses, time that only moves when told, and cards
//! with scripted answers. What must never happen is noted as a fault at the moment when it happens.

// Each test program uses its own part of this module.
#![allow(dead_code)]

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use ap::card::{Cards, Coprocessor, Latency, Layout, Notify};
use ap::outside::{
    CannotPin, CannotRegister, Clock, GuestPage, HostAddress, HostSubclass, InterruptTarget,
    PAGE_SIZE, Pages, Queues, Reply, RequestPart, Subclasses,
};
use ap::{Apqn, Configuration, Hardware, Mask, Mediated, Outside, QueueStatus, Response, Subclass};

/// Where the host has the guest's memory.
const HOST: u64 = 0x7000_0000_0000;

/// Everything outside of the device.
#[derive(Default)]
pub struct World {
    pub now: Cell<u64>,
    /// Pages that can be pinned.
    pub mapped: RefCell<BTreeSet<GuestPage>>,
    pub pins: RefCell<BTreeMap<GuestPage, u32>>,
    pub subclasses: RefCell<BTreeMap<Subclass, u32>>,
    /// Registering a subclass fails.
    pub no_subclass: Cell<bool>,
    /// Queues that accepted to turn interrupts on and not since to turn them off; whether
    /// the bit was seen to be one.
    on: RefCell<BTreeMap<Apqn, bool>>,
    /// Queues with an interrupt bit that was seen to have cleared.
    cleared: RefCell<BTreeSet<Apqn>>,
    /// Notifications, in order.
    pub written: RefCell<Vec<(Apqn, InterruptTarget)>>,
    /// What must not happen.
    pub faults: RefCell<Vec<String>>,
}

impl World {
    fn fault(&self, what: String) {
        self.faults.borrow_mut().push(what);
    }
}

fn count_down<K: Ord + Copy + std::fmt::Debug>(counts: &RefCell<BTreeMap<K, u32>>, key: K) -> bool {
    let mut counts = counts.borrow_mut();
    match counts.get_mut(&key) {
        Some(1) => counts.remove(&key).is_some(),
        Some(count) => {
            *count -= 1;
            true
        }
        None => false,
    }
}

#[derive(Clone)]
pub struct Shared(pub Rc<World>);

impl Pages for Shared {
    fn pin(&mut self, page: GuestPage) -> Result<HostAddress, CannotPin> {
        if !self.0.mapped.borrow().contains(&page) {
            return Err(CannotPin);
        }
        *self.0.pins.borrow_mut().entry(page).or_default() += 1;
        Ok(HostAddress(HOST + page.0 * PAGE_SIZE))
    }

    fn unpin(&mut self, page: GuestPage) {
        if !count_down(&self.0.pins, page) {
            self.0.fault(format!("{page:?} unpinned once too often"));
        }
    }
}

impl Subclasses for Shared {
    fn register(&mut self, subclass: Subclass) -> Result<HostSubclass, CannotRegister> {
        if self.0.no_subclass.get() {
            return Err(CannotRegister);
        }
        *self.0.subclasses.borrow_mut().entry(subclass).or_default() += 1;
        Ok(HostSubclass(3))
    }

    fn unregister(&mut self, subclass: Subclass) {
        if !count_down(&self.0.subclasses, subclass) {
            self.0
                .fault(format!("{subclass:?} unregistered once too often"));
        }
    }
}

impl Clock for Shared {
    fn now(&self) -> u64 {
        self.0.now.get()
    }

    fn wait(&mut self, nanoseconds: u64) {
        self.0.now.set(self.0.now.get() + nanoseconds);
    }
}

impl Notify for Shared {
    fn notify(&mut self, apqn: Apqn, target: InterruptTarget) {
        let page = GuestPage((target.notification.0 - HOST) / PAGE_SIZE);
        if !self.0.pins.borrow().contains_key(&page) {
            self.0.fault(format!(
                "{apqn} wrote its byte to {page:?}, which is not pinned"
            ));
        }
        if !self.0.mapped.borrow().contains(&page) {
            self.0.fault(format!(
                "{apqn} wrote its byte to {page:?}, which is not mapped"
            ));
        }
        if self.0.cleared.borrow().contains(&apqn) {
            self.0.fault(format!(
                "{apqn} wrote its byte after its interrupt bit was zero"
            ));
        }
        self.0.written.borrow_mut().push((apqn, target));
    }
}

/// Answers with the request's bytes in reverse.
pub struct Reverse;

impl Coprocessor for Reverse {
    fn hardware(&self) -> Hardware {
        Hardware {
            facilities: Hardware::ACCELERATOR,
            kind: Hardware::CEX8,
            ..Hardware::default()
        }
    }

    fn process(&mut self, request: &[u8]) -> Vec<u8> {
        request.iter().rev().copied().collect()
    }
}

pub type TestCards = Cards<Shared, Shared, Reverse>;

/// Cards that are listened to.
pub struct Watched {
    pub cards: TestCards,
    world: Rc<World>,
}

impl Watched {
    /// A bit of zero says that it cleared, unless it was yet to be set.
    fn saw(&self, apqn: Apqn, status: QueueStatus) {
        let tells = [Response::NORMAL, Response::RESET_IN_PROGRESS].contains(&status.response);
        let mut on = self.world.on.borrow_mut();
        match on.get_mut(&apqn) {
            Some(seen) if status.interrupts => *seen = true,
            Some(false) => {}
            _ if tells && !status.interrupts => {
                self.world.cleared.borrow_mut().insert(apqn);
            }
            _ => {}
        }
    }

    fn told_off(&self, apqn: Apqn, status: QueueStatus) -> QueueStatus {
        if matches!(status.response.0, 0x00 | 0x02 | 0x07) {
            self.world.on.borrow_mut().remove(&apqn);
        }
        status
    }
}

impl Queues for Watched {
    fn tapq(&mut self, apqn: Apqn) -> (QueueStatus, Hardware) {
        let answer = self.cards.tapq(apqn);
        self.saw(apqn, answer.0);
        answer
    }

    fn rapq(&mut self, apqn: Apqn) -> QueueStatus {
        let status = self.cards.rapq(apqn);
        self.told_off(apqn, status)
    }

    fn zapq(&mut self, apqn: Apqn) -> QueueStatus {
        let status = self.cards.zapq(apqn);
        self.told_off(apqn, status)
    }

    fn aqic(&mut self, apqn: Apqn, target: Option<InterruptTarget>) -> QueueStatus {
        if target.is_none() {
            let status = self.cards.aqic(apqn, None);
            return self.told_off(apqn, status);
        }
        // What was due before this instruction belongs to the time before it.
        self.cards.advance();
        let before = self.world.cleared.borrow_mut().remove(&apqn);
        let status = self.cards.aqic(apqn, target);
        if status.response == Response::NORMAL {
            self.world.on.borrow_mut().insert(apqn, false);
        } else if before {
            self.world.cleared.borrow_mut().insert(apqn);
        }
        status
    }

    fn qci(&mut self) -> Configuration {
        self.cards.qci()
    }

    fn nqap(&mut self, apqn: Apqn, part: RequestPart<'_>) -> QueueStatus {
        self.cards.nqap(apqn, part)
    }

    fn dqap(&mut self, apqn: Apqn, room: usize, continued: bool) -> (QueueStatus, Option<Reply>) {
        self.cards.dqap(apqn, room, continued)
    }
}

pub type Device = Mediated<Shared, Shared, Shared, Watched>;

pub const ADAPTERS: [u8; 2] = [1, 9];
pub const DOMAINS: [u8; 2] = [6, 71];
/// Guest pages 0 to 5 exist.
pub const PAGES: u64 = 6;

pub fn all_queues() -> impl Iterator<Item = Apqn> {
    ADAPTERS
        .into_iter()
        .flat_map(|a| DOMAINS.map(|d| Apqn::new(a, d)))
}

pub fn millis(ms: u64) -> u64 {
    ms * 1_000_000
}

/// A device with two cards of two domains, all of it bound and assigned, with a guest.
pub fn device(latency: Latency) -> (Device, Rc<World>) {
    let world = Rc::new(World::default());
    world.mapped.borrow_mut().extend((0..PAGES).map(GuestPage));
    let shared = || Shared(Rc::clone(&world));
    let layout = Layout {
        domains: Mask::from_iter(DOMAINS),
        depth: 3,
        largest_request: 100,
        latency,
    };
    let mut cards = Cards::new(layout, shared(), shared());
    for adapter in ADAPTERS {
        cards.plug(adapter, Reverse);
    }
    let mut device = Mediated::new(Outside {
        pages: shared(),
        subclasses: shared(),
        clock: shared(),
        queues: Watched {
            cards,
            world: Rc::clone(&world),
        },
    });
    ADAPTERS.into_iter().for_each(|a| device.assign_adapter(a));
    DOMAINS.into_iter().for_each(|d| device.assign_domain(d));
    all_queues().for_each(|apqn| device.bind(apqn));
    device.attach().unwrap();
    (device, world)
}
