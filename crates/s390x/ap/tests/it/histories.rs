//! Random histories: whatever guest, host and hardware do, and in whatever order,
//! these hold after every step.
//!
//! - Pins balance: a page is pinned as often as registrations name it.
//! - Each subclass is registered as often as registrations name it.
//! - No notification byte is written after the interrupt bit has cleared, to a page that is not
//!   pinned, or to one that was unmapped.
//! - Once everything has settled, a queue with an interrupt bit of one has exactly the registration
//!   that the guest asked for, and one with a zero bit has none (unless hardware cleared it behind
//!   the mediated device's back).
//! - When the guest is gone, nothing is held.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use ap::card::Latency;
use ap::outside::{GuestPage, PAGE_SIZE, Queues, RequestPart};
use ap::{Apqn, InterruptControl, Response, Subclass};
use proptest::prelude::*;

use crate::common::{ADAPTERS, DOMAINS, Device, PAGES, World, all_queues, device, millis};

#[derive(Clone, Debug)]
enum Step {
    Enable(Apqn, Subclass, u64),
    Disable(Apqn),
    Test(Apqn),
    Reset(Apqn),
    Zeroize(Apqn),
    Request(Apqn),
    Reply(Apqn),
    /// The guest resets a queue, and the hardware interprets it.
    ResetUnseen(Apqn),
    Unmap(u64, u64),
    Map(u64),
    UnassignAdapter(u8),
    AssignAdapter(u8),
    UnassignDomain(u8),
    AssignDomain(u8),
    Remove(Apqn),
    Bind(Apqn),
    Deconfigure(u8),
    Configure(u8),
    Detach,
    Attach,
    Subclasses(bool),
    Pass(u64),
    Poll,
}

fn queue() -> impl Strategy<Value = Apqn> {
    prop::sample::select(all_queues().collect::<Vec<_>>())
}

fn step() -> impl Strategy<Value = Step> {
    let subclass = (0..3_u8).prop_map(Subclass::new);
    // Some addresses lie beyond the guest's memory.
    let address = (0..PAGES + 1, 0..PAGE_SIZE).prop_map(|(page, byte)| page * PAGE_SIZE + byte);
    let (adapter, domain) = (
        prop::sample::select(&ADAPTERS),
        prop::sample::select(&DOMAINS),
    );
    prop_oneof![
        8 => (queue(), subclass, address).prop_map(|(q, s, a)| Step::Enable(q, s, a)),
        4 => queue().prop_map(Step::Disable),
        2 => queue().prop_map(Step::Test),
        2 => queue().prop_map(Step::Reset),
        1 => queue().prop_map(Step::Zeroize),
        8 => queue().prop_map(Step::Request),
        2 => queue().prop_map(Step::Reply),
        2 => queue().prop_map(Step::ResetUnseen),
        2 => (0..PAGES, 1..3_u64).prop_map(|(first, count)| Step::Unmap(first, count)),
        1 => (0..PAGES).prop_map(Step::Map),
        1 => adapter.clone().prop_map(Step::UnassignAdapter),
        2 => adapter.clone().prop_map(Step::AssignAdapter),
        1 => domain.clone().prop_map(Step::UnassignDomain),
        2 => domain.prop_map(Step::AssignDomain),
        1 => queue().prop_map(Step::Remove),
        2 => queue().prop_map(Step::Bind),
        1 => adapter.clone().prop_map(Step::Deconfigure),
        2 => adapter.prop_map(Step::Configure),
        1 => Just(Step::Detach),
        3 => Just(Step::Attach),
        1 => any::<bool>().prop_map(Step::Subclasses),
        6 => (0..60_u64).prop_map(|ms| Step::Pass(millis(ms))),
        2 => Just(Step::Poll),
    ]
}

/// Times up to more than what the device waits for, so that queues are late.
fn latency() -> impl Strategy<Value = Latency> {
    (0..250_u64, 0..250_u64, 0..150_u64).prop_map(|(reset, interrupts, request)| Latency {
        reset: millis(reset),
        interrupts: millis(interrupts),
        request: millis(request),
    })
}

/// What the guest asked for, and where hardware may have turned interrupts off unseen.
#[derive(Default)]
struct Model {
    asked: BTreeMap<Apqn, (GuestPage, Subclass)>,
    unseen: BTreeSet<Apqn>,
}

fn run(device: &mut Device, world: &World, model: &mut Model, step: &Step) {
    let now = |ns: u64| world.now.set(world.now.get() + ns);
    match *step {
        Step::Enable(apqn, subclass, notification) => {
            let control = InterruptControl::Enable {
                subclass,
                notification,
            };
            if device.aqic(apqn, control).response == Response::NORMAL {
                model
                    .asked
                    .insert(apqn, (GuestPage::of(notification), subclass));
                model.unseen.remove(&apqn);
            }
        }
        Step::Disable(apqn) => drop(device.aqic(apqn, InterruptControl::Disable)),
        Step::Test(apqn) => drop(device.tapq(apqn)),
        Step::Reset(apqn) => drop(device.rapq(apqn)),
        Step::Zeroize(apqn) => drop(device.zapq(apqn)),
        Step::Request(apqn) => {
            let part = RequestPart {
                id: 7,
                data: b"abc",
                last: true,
                special: false,
            };
            device.nqap(apqn, part);
        }
        Step::Reply(apqn) => drop(device.dqap(apqn, 100, false)),
        Step::ResetUnseen(apqn) => {
            if device.owns(apqn) {
                device.outside().queues.rapq(apqn);
                model.unseen.insert(apqn);
            }
        }
        Step::Unmap(first, count) => {
            // Only an unmap that was agreed to happens.
            if device.unmap(GuestPage(first), count).is_ok() {
                let gone = |page: &GuestPage| page.0 >= first && page.0 < first + count;
                world.mapped.borrow_mut().retain(|page| !gone(page));
            }
        }
        Step::Map(page) => drop(world.mapped.borrow_mut().insert(GuestPage(page))),
        Step::UnassignAdapter(adapter) => drop(device.unassign_adapter(adapter)),
        Step::AssignAdapter(adapter) => device.assign_adapter(adapter),
        Step::UnassignDomain(domain) => drop(device.unassign_domain(domain)),
        Step::AssignDomain(domain) => device.assign_domain(domain),
        Step::Remove(apqn) => drop(device.remove(apqn)),
        Step::Bind(apqn) => device.bind(apqn),
        Step::Deconfigure(adapter) => {
            device.outside().queues.cards.configure(adapter, false);
            let here = all_queues().filter(|q| q.adapter() == adapter);
            model.unseen.extend(here);
        }
        Step::Configure(adapter) => {
            device.outside().queues.cards.configure(adapter, true);
            model
                .unseen
                .extend(all_queues().filter(|q| q.adapter() == adapter));
        }
        Step::Detach => drop(device.detach()),
        Step::Attach => drop(device.attach()),
        Step::Subclasses(work) => world.no_subclass.set(!work),
        Step::Pass(ns) => now(ns),
        Step::Poll => drop(device.poll()),
    }
}

/// What holds at any moment.
fn always(device: &Device, world: &World) -> Result<(), TestCaseError> {
    prop_assert!(
        world.faults.borrow().is_empty(),
        "{:?}",
        world.faults.borrow()
    );
    let (mut pins, mut subclasses) = (BTreeMap::new(), BTreeMap::new());
    for (page, subclass) in all_queues().filter_map(|apqn| device.registration(apqn)) {
        *pins.entry(page).or_insert(0_u32) += 1;
        *subclasses.entry(subclass).or_insert(0_u32) += 1;
    }
    prop_assert_eq!(&pins, &*world.pins.borrow(), "pins");
    prop_assert_eq!(&subclasses, &*world.subclasses.borrow(), "subclasses");
    Ok(())
}

/// What holds when all that was begun has ended.
fn settled(device: &mut Device, world: &Rc<World>, model: &Model) -> Result<(), TestCaseError> {
    for _ in 0..3 {
        world.now.set(world.now.get() + millis(1000));
        let _ = device.poll();
    }
    always(device, world)?;
    for apqn in all_queues() {
        let (status, _) = device.outside().queues.tapq(apqn);
        let held = device.registration(apqn);
        if status.interrupts {
            prop_assert_eq!(held, model.asked.get(&apqn).copied(), "{} is enabled", apqn);
        } else if !model.unseen.contains(&apqn) {
            prop_assert!(held.is_none(), "{apqn} is not enabled and holds {held:?}");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_histories_match_model(latency in latency(), steps in prop::collection::vec(step(), 1..60)) {
        let (mut device, world) = device(latency);
        let mut model = Model::default();
        for (i, step) in steps.iter().enumerate() {
            run(&mut device, &world, &mut model, step);
            always(&device, &world).map_err(|e| TestCaseError::fail(format!("step {i} {step:?}: {e}")))?;
        }
        settled(&mut device, &world, &model)?;
        for _ in 0..20 {
            if device.detach().is_ok() && device.poll().is_ok() {
                break;
            }
        }
        always(&device, &world)?;
        prop_assert!(world.pins.borrow().is_empty(), "{:?} at the end", world.pins.borrow());
        prop_assert!(world.subclasses.borrow().is_empty());
    }

    /// The same without anything unseen: then each subclass's count is the number of
    /// its enabled queues, exactly.
    #[test]
    fn registrations_equal_enabled_queues(
        latency in latency(),
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let (mut device, world) = device(latency);
        let mut model = Model::default();
        for step in &steps {
            if !matches!(step, Step::ResetUnseen(_) | Step::Deconfigure(_) | Step::Configure(_)) {
                run(&mut device, &world, &mut model, step);
            }
        }
        settled(&mut device, &world, &model)?;
        let mut enabled = BTreeMap::new();
        for apqn in all_queues() {
            if device.outside().queues.tapq(apqn).0.interrupts {
                *enabled.entry(model.asked[&apqn].1).or_insert(0_u32) += 1;
            }
        }
        prop_assert_eq!(&enabled, &*world.subclasses.borrow());
    }
}
