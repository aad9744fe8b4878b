//! Random histories of what the host, the owner and the workers do.

use crate::common::*;
use crate::migration::world::{OTHERS, PAIRS, PLACES, World};
use nvme::Status;
use nvme::feature::Fid;
use proptest::prelude::*;
use volume::{Effect, Fault, OpKind};

#[derive(Clone, Debug)]
enum Action {
    Submit {
        qid: u16,
        write: bool,
        count: u8,
    },
    Reap {
        cqid: u16,
        most: u8,
    },
    Step {
        worker: usize,
        drain: bool,
        times: u8,
    },
    Sleep {
        worker: usize,
    },
    QueueMigration {
        cqid: u16,
        worker: u16,
    },
    Hold {
        nth: u64,
    },
    Release,
    Abort {
        nth: usize,
    },
    Remake {
        qid: u16,
    },
    Unmap,
    Map,
    Shadow,
    Feature {
        value: bool,
    },
    Resize {
        places: u64,
    },
    Reset,
    Master {
        on: bool,
    },
}

fn action() -> impl Strategy<Value = Action> {
    let worker = 0..=OTHERS;
    prop_oneof![
        12 => (1..=5u16, any::<bool>(), 1..8u8).prop_map(|(qid, write, count)| Action::Submit { qid, write, count }),
        8 => (1..=PAIRS, 1..20u8).prop_map(|(cqid, most)| Action::Reap { cqid, most }),
        20 => (worker.clone(), prop::bool::weighted(0.8), 1..4u8)
            .prop_map(|(worker, drain, times)| Action::Step { worker, drain, times }),
        6 => worker.prop_map(|worker| Action::Sleep { worker }),
        10 => (1..=PAIRS, 0..=OTHERS as u16).prop_map(|(cqid, worker)| Action::QueueMigration { cqid, worker }),
        2 => (1..6u64).prop_map(|nth| Action::Hold { nth }),
        2 => Just(Action::Release),
        1 => (0..40usize).prop_map(|nth| Action::Abort { nth }),
        1 => (1..=PAIRS).prop_map(|qid| Action::Remake { qid }),
        1 => Just(Action::Unmap),
        1 => Just(Action::Map),
        1 => Just(Action::Shadow),
        1 => any::<bool>().prop_map(|value| Action::Feature { value }),
        2 => prop_oneof![1..32u64, Just(PLACES)].prop_map(|places| Action::Resize { places }),
        1 => Just(Action::Reset),
        2 => any::<bool>().prop_map(|on| Action::Master { on }),
    ]
}

fn play(mapped: bool, actions: Vec<Action>) {
    let mut w = World::new(mapped);
    for action in actions {
        match action {
            Action::Submit { qid, write, count } => (0..count).for_each(|_| w.submit(qid, write)),
            Action::Reap { cqid, most } => {
                w.reap(cqid, most.into());
            }
            Action::Step {
                worker,
                drain,
                times,
            } => (0..times).for_each(|_| {
                w.step(worker, drain);
            }),
            Action::Sleep { worker } => w.sleep(worker),
            Action::QueueMigration { cqid, worker } => {
                w.migrate_queue(cqid, worker);
            }
            Action::Hold { nth } => w.faults.add(Fault::nth(OpKind::Any, nth, Effect::Hold)),
            Action::Release => w.faults.release(),
            Action::Abort { nth } => w.abort(nth),
            Action::Remake { qid } => w.remake(qid),
            Action::Unmap => w.unmap(),
            Action::Map => w.map(),
            Action::Shadow => {
                if w.h.ring == Ring::Shadow {
                    w.master();
                    w.wake_all();
                    assert_eq!(w.h.configure_shadow(SHADOW, EVENTIDX), Status::SUCCESS);
                }
            }
            Action::Feature { value } => {
                w.master();
                w.wake_all();
                w.faults.clear();
                w.faults.release();
                let completion = w.h.set_feature(Fid::VOLATILE_WRITE_CACHE, value.into());
                assert_eq!(completion.status(), Status::SUCCESS);
            }
            Action::Resize { places } => w.resize(places),
            Action::Reset => w.reset(),
            Action::Master { on: true } => w.master(),
            Action::Master { on: false } => w.stop_mastering(),
        }
    }
    w.verify();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn random_commands_complete_once(mapped: bool, actions in prop::collection::vec(action(), 1..150)) {
        play(mapped, actions);
    }
}

/// Entries that waited for room in a full completion queue, in a queue that is not looked at in
/// every round: nothing tells of them when there is room, but a look before the sleep.
#[test]
fn entries_waiting_for_cq_room_wake_worker() {
    let submit = |qid, count| Action::Submit {
        qid,
        write: false,
        count,
    };
    let reap = |cqid| Action::Reap { cqid, most: 1 };
    let step = Action::Step {
        worker: 0,
        drain: false,
        times: 1,
    };
    play(
        false,
        vec![
            submit(5, 7),
            submit(3, 1),
            submit(5, 1),
            submit(1, 2),
            step,
            Action::Sleep { worker: 0 },
            submit(5, 6),
            reap(3),
            Action::Remake { qid: 2 },
            reap(1),
            submit(5, 1),
            Action::Feature { value: false },
        ],
    );
}
