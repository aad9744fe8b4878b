//! States are kept before they count.

use crate::common::*;
use crate::reservations::world::*;
use controller::{ReservationStore, Saved};
use nvme::cmd::reservation::{Cptpl, Racqa, RegisterCdw10, Rrega, Rtype};
use nvme::feature::Fid;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use reservations::{Reservations, StoredReservations};
use std::sync::{Arc, Mutex};

/// Keeps nothing until the test decides the outcome.
#[derive(Default)]
struct Slow(Mutex<Vec<(StoredReservations, Saved)>>);

impl Slow {
    fn waiting(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    fn answer(&self, kept: bool) -> Reservations {
        let (stored, done) = self.0.lock().unwrap().remove(0);
        done(kept);
        stored.state
    }
}

struct To(Arc<Slow>);

impl ReservationStore for To {
    fn save(&self, stored: StoredReservations, done: Saved) {
        self.0.0.lock().unwrap().push((stored, done));
    }
}

fn world() -> (World, Arc<Slow>) {
    let slow = Arc::new(Slow::default());
    let store: Box<dyn ReservationStore> = Box::new(To(slow.clone()));
    (World::with(&mem(1 << 20), &[1, 2], Some(store)), slow)
}

fn settle(w: &mut World, slow: &Slow) {
    w.rounds(4);
    while slow.waiting() > 0 {
        slow.answer(true);
        w.rounds(4);
    }
}

#[test]
fn reservation_takes_effect_after_store() {
    let (mut w, slow) = world();
    for (who, key) in [(0, 1), (1, 2)] {
        let command = w.registering(who, Rrega::REGISTER, false, [0, key]);
        w.begin(who, command);
        settle(&mut w, &slow);
        assert_eq!(w.end(who).status(), Status::SUCCESS);
    }
    let command = w.acquiring(0, Racqa::ACQUIRE, Rtype::WRITE_EXCLUSIVE, [1, 0]);
    w.begin(0, command);
    w.rounds(20);
    assert!(w.hosts[0].reap(1).is_none() && slow.waiting() == 1);
    assert_eq!(w.write(1, 1, 1), Status::SUCCESS, "nobody holds it yet");
    // It cannot be kept: the host is told, and nothing has changed.
    slow.answer(false);
    assert_eq!(plain(w.end(0).status()), Status::INTERNAL_ERROR);
    assert_eq!(w.write(1, 1, 1), Status::SUCCESS);
    // The next attempt can.
    let command = w.acquiring(0, Racqa::ACQUIRE, Rtype::WRITE_EXCLUSIVE, [1, 0]);
    w.begin(0, command);
    w.rounds(4);
    let kept = slow.answer(true);
    assert!(kept.is_holder(&host_id(1)));
    assert_eq!(w.end(0).status(), Status::SUCCESS);
    assert_eq!(plain(w.write(1, 1, 1)), CONFLICT);
}

/// A host that asks and resets, again and again, takes no room.
#[test]
fn reset_during_store_leaks_nothing() {
    let (mut w, slow) = world();
    for round in 0..200 {
        for _ in 0..8 {
            let command = w.registering(1, Rrega::REPLACE, true, [0, round]);
            w.begin(1, command);
        }
        w.rounds(3);
        w.hosts[1].disable();
        w.rounds(3);
        w.hosts[1].enable();
        w.hosts[1].create_pair(1, 64);
        assert!(slow.waiting() <= 1);
    }
    // The other one's operation is behind one of these, at most.
    let command = w.registering(0, Rrega::REGISTER, false, [0, 1]);
    w.begin(0, command);
    w.rounds(4);
    slow.answer(true);
    w.rounds(4);
    assert_eq!(slow.waiting(), 1);
    slow.answer(true);
    assert_eq!(w.end(0).status(), Status::SUCCESS);
    w.rounds(4);
    assert_eq!(slow.waiting(), 0);
    assert!(w.hosts[1].reap(1).is_none(), "of before the reset");
}

#[test]
fn ptpl_is_set_by_register_and_set_features() {
    let (mut w, slow) = world();
    let get = |w: &mut World| {
        let mut command = Command::new(AdminOpcode::GET_FEATURES.0, 0, 1);
        command.cdw10 = u32::from(Fid::RESERVATION_PERSISTENCE.0).into();
        w.admin(0, command).dw0.get()
    };
    assert_eq!(get(&mut w), 0);
    let cdw10 = RegisterCdw10::new().with_cptpl(Cptpl::SET).into_bits();
    let command = w.reservation(0, NvmOpcode::RESERVATION_REGISTER, cdw10, [0, 1]);
    w.begin(0, command);
    w.rounds(4);
    assert!(slow.answer(true).ptpl());
    assert_eq!(w.end(0).status(), Status::SUCCESS);
    assert_eq!(get(&mut w), 1);
    for (nsid, on, expected) in [(1, 0, 0), (0xffff_ffff, 1, 1), (1, 1, 1)] {
        let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, nsid);
        command.cdw10 = u32::from(Fid::RESERVATION_PERSISTENCE.0).into();
        command.cdw11 = on.into();
        w.hosts[1].submit(0, command);
        w.rounds(4);
        // The last one changes nothing.
        if slow.waiting() > 0 {
            assert!(w.hosts[1].reap(0).is_none(), "it is not kept yet");
        }
        settle(&mut w, &slow);
        assert_eq!(w.hosts[1].reap(0).unwrap().status(), Status::SUCCESS);
        assert_eq!(get(&mut w), expected);
    }
    // Without a store there is none.
    let mut w = World::of(&[1, 2]);
    let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, 1);
    command.cdw10 = u32::from(Fid::RESERVATION_PERSISTENCE.0).into();
    command.cdw11 = 1.into();
    let status = w.admin(0, command).status();
    assert_eq!(plain(status), Status::INVALID_FIELD);
}
