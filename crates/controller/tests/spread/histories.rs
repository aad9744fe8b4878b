//! Random histories of what the host, the owner and the workers do.

use crate::common::*;
use crate::world::{OTHERS, PAIRS, PLACES, World};
use nvme::Status;
use nvme::feature::Fid;
use proptest::prelude::*;
use volume::{Effect, Fault, OpKind};

#[derive(Clone, Debug)]
enum Deed {
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
        hear: bool,
        times: u8,
    },
    Sleep {
        worker: usize,
    },
    Move {
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

fn deed() -> impl Strategy<Value = Deed> {
    let worker = 0..=OTHERS;
    prop_oneof![
        12 => (1..=5u16, any::<bool>(), 1..8u8).prop_map(|(qid, write, count)| Deed::Submit { qid, write, count }),
        8 => (1..=PAIRS, 1..20u8).prop_map(|(cqid, most)| Deed::Reap { cqid, most }),
        20 => (worker.clone(), prop::bool::weighted(0.8), 1..4u8)
            .prop_map(|(worker, hear, times)| Deed::Step { worker, hear, times }),
        6 => worker.prop_map(|worker| Deed::Sleep { worker }),
        10 => (1..=PAIRS, 0..=OTHERS as u16).prop_map(|(cqid, worker)| Deed::Move { cqid, worker }),
        2 => (1..6u64).prop_map(|nth| Deed::Hold { nth }),
        2 => Just(Deed::Release),
        1 => (0..40usize).prop_map(|nth| Deed::Abort { nth }),
        1 => (1..=PAIRS).prop_map(|qid| Deed::Remake { qid }),
        1 => Just(Deed::Unmap),
        1 => Just(Deed::Map),
        1 => Just(Deed::Shadow),
        1 => any::<bool>().prop_map(|value| Deed::Feature { value }),
        2 => prop_oneof![1..32u64, Just(PLACES)].prop_map(|places| Deed::Resize { places }),
        1 => Just(Deed::Reset),
        2 => any::<bool>().prop_map(|on| Deed::Master { on }),
    ]
}

fn play(mapped: bool, deeds: Vec<Deed>) {
    let mut w = World::new(mapped);
    for deed in deeds {
        match deed {
            Deed::Submit { qid, write, count } => (0..count).for_each(|_| w.submit(qid, write)),
            Deed::Reap { cqid, most } => {
                w.reap(cqid, most.into());
            }
            Deed::Step {
                worker,
                hear,
                times,
            } => (0..times).for_each(|_| {
                w.step(worker, hear);
            }),
            Deed::Sleep { worker } => w.sleep(worker),
            Deed::Move { cqid, worker } => {
                w.move_queue(cqid, worker);
            }
            Deed::Hold { nth } => w.faults.add(Fault::nth(OpKind::Any, nth, Effect::Hold)),
            Deed::Release => w.faults.release(),
            Deed::Abort { nth } => w.abort(nth),
            Deed::Remake { qid } => w.remake(qid),
            Deed::Unmap => w.unmap(),
            Deed::Map => w.map(),
            Deed::Shadow => {
                if w.h.ring == Ring::Shadow {
                    w.master();
                    w.wake_all();
                    assert_eq!(w.h.configure_shadow(SHADOW, EVENTIDX), Status::SUCCESS);
                }
            }
            Deed::Feature { value } => {
                w.master();
                w.wake_all();
                w.faults.clear();
                w.faults.release();
                let completion = w.h.set_feature(Fid::VOLATILE_WRITE_CACHE, value.into());
                assert_eq!(completion.status(), Status::SUCCESS);
            }
            Deed::Resize { places } => w.resize(places),
            Deed::Reset => w.reset(),
            Deed::Master { on: true } => w.master(),
            Deed::Master { on: false } => w.stop_mastering(),
        }
    }
    w.verify();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn every_command_is_done_once(mapped: bool, deeds in prop::collection::vec(deed(), 1..150)) {
        play(mapped, deeds);
    }
}

/// Entries that waited for room in a full completion queue, in a queue that is not looked at in every round: nothing tells
/// of them when there is room, but a look before the sleep.
#[test]
fn entries_that_waited_for_room_are_not_slept_over() {
    let submit = |qid, count| Deed::Submit {
        qid,
        write: false,
        count,
    };
    let reap = |cqid| Deed::Reap { cqid, most: 1 };
    let step = Deed::Step {
        worker: 0,
        hear: false,
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
            Deed::Sleep { worker: 0 },
            submit(5, 6),
            reap(3),
            Deed::Remake { qid: 2 },
            reap(1),
            submit(5, 1),
            Deed::Feature { value: false },
        ],
    );
}
