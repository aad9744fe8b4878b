//! What a round looks at, fetches and starts, and when: spin polls, idle queues beside busy ones,
//! batches, early starts.

use crate::common::*;
use controller::{ControllerConfig, IrqSink};
use dma::{Prot, SegmentList, View};
use nvme::regs::Shn;
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use volume::{
    Completion, Effect, FastPath, Fault, IoError, Op, OpKind, OpenQueue, QueueState, Request,
    Volume, VolumeQueue,
};

const RINGS_OF: [Ring; 3] = [Ring::Register, Ring::Mapped, Ring::Shadow];

fn read(h: &Host) -> Command {
    h.rw(NvmOpcode::READ, 1, 0, 1, DATA)
}

fn host(ring: Ring, namespace: Arc<dyn Volume>, config: ControllerConfig) -> Host {
    let config = ControllerConfig {
        mapped_doorbells: ring == Ring::Mapped,
        ..config
    };
    let mut h = Host::with(config, vec![ns(1, namespace, 512)]);
    h.enable();
    h.create_pair(1, 64);
    if ring == Ring::Shadow {
        assert_eq!(h.use_shadow(), Status::SUCCESS);
    }
    h
}

fn fetched(h: &Host, qid: u16) -> u64 {
    h.c.stats().queues[usize::from(qid)].commands.get()
}

// ---- spin polls

#[test]
fn spin_poll_sees_doorbell_without_side_effects() {
    for ring in RINGS_OF {
        let mut h = host(ring, mem(1 << 20), ControllerConfig::default());
        let command = read(&h);
        assert_eq!(h.io(command), Status::SUCCESS);
        for _ in 0..130 {
            h.run();
            assert!(!h.c.has_news(), "{ring:?}");
            h.push(1, command);
            assert!(!h.c.has_news(), "{ring:?}: it did not ring");
            h.ring_sq(1);
            assert!(h.c.has_news() && h.c.has_news(), "{ring:?}");
            let before = fetched(&h, 1);
            assert!(h.c.poll(h.now));
            assert_eq!(fetched(&h, 1), before + 1);
            assert!(!h.c.has_news(), "{ring:?}: it is fetched");
            assert!(h.reap(1).is_some());
        }
        // An idle queue is not looked at: rounds and the last look before sleep find it.
        assert!(!h.c.arm());
        h.submit(1, command);
        assert!(!h.c.has_news());
        h.run();
        assert!(h.reap(1).is_some(), "{ring:?}");
    }
}

#[test]
fn invalid_doorbell_does_not_wake_forever() {
    for ring in RINGS_OF {
        let (volume, faults) = faulty(1 << 20);
        let config = ControllerConfig {
            max_in_flight: 2,
            ..Default::default()
        };
        let mut h = host(ring, volume, config);
        let command = read(&h);
        assert_eq!(h.io(command), Status::SUCCESS);
        // Values that cannot be.
        for value in [64, 0xffff, u32::MAX] {
            h.ring_value(1, false, value);
            assert!(h.c.has_news());
            h.run();
            assert!(!h.c.has_news(), "{ring:?} {value:#x}");
        }
        let tail = h.pairs[&1].sq.tail;
        h.ring_value(1, false, tail);
        h.run();
        // No slot is free.
        faults.add(Fault::always(OpKind::Read, Effect::Hold));
        for _ in 0..8 {
            h.push(1, command);
        }
        h.ring_sq(1);
        h.run_held(&faults, 2);
        assert_eq!(h.c.in_flight(), 2);
        assert!(!h.c.has_news(), "{ring:?}");
        // Back over what was not fetched.
        h.ring_value(1, false, tail + 4);
        assert!(h.c.has_news());
        h.run_held(&faults, 2);
        assert!(!h.c.has_news(), "{ring:?}");
        h.ring_sq(1);
        faults.clear();
        faults.release();
        h.run();
        assert_eq!(h.reap_all(1).len(), 8, "{ring:?}");
        // A full completion queue.
        h.create_cq(2, 2, RINGS + 0x9000, None);
        h.create_sq(2, 2, 16, RINGS + 0x8000);
        h.pairs
            .insert(2, Pair::new(RINGS + 0x8000, RINGS + 0x9000, 16));
        for _ in 0..4 {
            h.push(2, command);
        }
        h.ring_sq(2);
        h.run();
        assert_eq!(h.c.stats().queues[2].completions.get(), 1);
        assert!(!h.c.has_news(), "{ring:?}");
        // A deleted queue, and a controller that fetches no more.
        assert_eq!(h.delete(AdminOpcode::DELETE_IO_SQ, 2), Status::SUCCESS);
        assert_eq!(h.io(command), Status::SUCCESS);
        h.ring_value(2, false, 9);
        assert!(!h.c.has_news(), "{ring:?}");
        h.shutdown(Shn::NORMAL);
        h.wait_shutdown();
        h.submit(1, command);
        assert!(!h.c.has_news(), "{ring:?}");
    }
}

#[test]
fn shadow_doorbells_are_seen_after_remap() {
    let mut h = Host::ready();
    let window = 0x100_0000_0000;
    h.c.dma_map(window, 0x4000, Some((h.low.clone(), SHADOW)), Prot::RW)
        .unwrap();
    assert_eq!(h.configure_shadow(window, window + 0x1000), Status::SUCCESS);
    h.ring = Ring::Shadow;
    let command = read(&h);
    for _ in 0..5 {
        assert_eq!(h.io(command), Status::SUCCESS);
    }
    h.c.dma_unmap(window, 0x4000).unwrap();
    h.ring = Ring::Register;
    assert_eq!(h.io(command), Status::SUCCESS);
    h.run();
    assert!(!h.c.has_news());
    // The entry is not the controller's any more.
    h.cell(SHADOW + 2 * 4).store(9u32.to_le(), Ordering::SeqCst);
    assert!(!h.c.has_news());
    h.push(1, command);
    h.ring_sq(1);
    assert!(h.c.has_news());
    h.run();
    let tail = h.pairs[&1].sq.tail;
    h.cell(SHADOW + 2 * 4).store(tail.to_le(), Ordering::SeqCst);
    h.c.dma_map(window, 0x4000, Some((h.low.clone(), SHADOW)), Prot::RW)
        .unwrap();
    h.run();
    assert!(!h.c.has_news());
    h.ring = Ring::Shadow;
    h.reap_all(1);
    assert_eq!(h.io(command), Status::SUCCESS);
    h.submit(1, command);
    assert!(h.c.has_news());
}

// ---- idle queues

/// Rounds until a queue is looked at that rings some time, and then `rounds` of them, after queue 1
/// became busy in each.
fn delay(queues: u16, qid: u16, rounds: usize) -> usize {
    let config = ControllerConfig {
        mapped_doorbells: true,
        ..Default::default()
    };
    let mut h = Host::with(config, vec![ns(1, null(1 << 20), 512)]);
    h.enable();
    for qid in 1..=queues + 1 {
        h.create_pair(qid, 8);
    }
    let command = read(&h);
    let round = |h: &mut Host| {
        h.submit(1, command);
        assert!(h.c.poll(h.now));
        assert!(h.reap(1).is_some(), "the busy one is looked at each time");
    };
    // Activity before the sleep is forgotten, except that of the busy queue.
    h.c.arm();
    for _ in 0..=64 + rounds {
        round(&mut h);
    }
    h.push(qid, command);
    h.ring_sq(qid);
    for count in 1..=64 {
        round(&mut h);
        if fetched(&h, qid) > 0 {
            return count;
        }
    }
    panic!("queue {qid} of {queues} is not looked at");
}

#[test]
fn idle_queue_is_polled_every_sixteen_rounds() {
    for queues in [1, 2, 14, 15, 16, 40] {
        for qid in [2, queues + 1] {
            let mut delays: Vec<_> = (0..16).map(|rounds| delay(queues, qid, rounds)).collect();
            delays.sort();
            let each: Vec<_> = (1..=16).collect();
            assert_eq!(delays, each, "queue {qid} of {queues}");
        }
    }
}

/// Numbers that are the same in every run.
fn random(mut seed: u64) -> impl FnMut() -> u16 {
    move || {
        seed = seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (seed >> 33) as u16
    }
}

#[test]
fn newly_busy_queues_hide_no_other() {
    let config = ControllerConfig {
        mapped_doorbells: true,
        ..Default::default()
    };
    let mut h = Host::with(config, vec![ns(1, null(1 << 20), 512)]);
    h.enable();
    for qid in 1..=40 {
        h.create_pair(qid, 8);
    }
    let command = read(&h);
    let mut random = random(1);
    let mut waits = [None; 41];
    let mut longest = 0;
    for i in 0..20_000 {
        if i % 3000 == 0 {
            h.c.arm();
        }
        // Times in which few ring, so that queues cool down, and times in which many do.
        let often = if i / 2500 % 2 == 0 { 1 } else { 4 };
        for _ in 0..random() % (often + 1) {
            let qid = 2 + random() % if often == 1 { 3 } else { 39 };
            let wait = &mut waits[usize::from(qid)];
            if wait.is_none() {
                *wait = Some(0);
                h.submit(qid, command);
            }
        }
        h.submit(1, command);
        h.c.poll(h.now);
        h.reap_all(1);
        for qid in 2..=40u16 {
            let Some(rounds) = &mut waits[usize::from(qid)] else {
                continue;
            };
            *rounds += 1;
            longest = longest.max(*rounds);
            if h.reap(qid).is_some() {
                waits[usize::from(qid)] = None;
            }
        }
    }
    // The order among them changes, so one may miss a turn.
    assert!(longest <= 32, "{longest} rounds");
}

#[test]
fn queue_with_mmio_doorbell_is_polled_next_round() {
    let mut h = Host::ready();
    for qid in 2..=40 {
        h.create_pair(qid, 8);
    }
    let command = read(&h);
    let busy = |h: &mut Host| {
        h.submit(1, command);
        h.c.poll(h.now);
        h.reap_all(1);
    };
    for round in 0..100 {
        if round % 40 == 0 {
            h.c.arm();
            (0..=round / 20).for_each(|_| busy(&mut h));
        }
        let qid = 2 + (round * 7 % 39) as u16;
        h.submit(qid, command);
        let keep_alive = Command::new(AdminOpcode::KEEP_ALIVE.0, 0, 0);
        h.submit(0, keep_alive);
        busy(&mut h);
        assert!(h.reap(qid).is_some(), "queue {qid} in round {round}");
        assert!(h.reap(0).is_some(), "the admin queue in round {round}");
    }
    // One that rings and has nothing is one among the idle again.
    for i in 0..1100 {
        let tail = h.pairs[&2].sq.tail;
        h.ring_value(2, false, tail);
        if i > 1030 {
            assert!(!h.c.has_news());
        }
        busy(&mut h);
    }
}

#[test]
fn round_after_last_check_finds_every_entry() {
    for ring in RINGS_OF {
        let mut h = host(ring, null(1 << 20), ControllerConfig::default());
        h.ring = if ring == Ring::Shadow {
            Ring::Register
        } else {
            h.ring
        };
        for qid in 2..=6 {
            h.create_pair(qid, 8);
        }
        h.ring = ring;
        let command = read(&h);
        let mut random = random(7);
        for i in 0..2000 {
            // Somewhere in the turns of the idle ones.
            for _ in 0..random() % 40 {
                h.submit(1, command);
                h.c.poll(h.now);
                h.reap_all(1);
            }
            for _ in 0..32 {
                h.c.poll(h.now);
            }
            h.reap_all(1);
            assert!(!h.c.arm() && !h.c.recheck(), "{ring:?} {i}");
            let some = random() % 63 + 1;
            let rung = |qid: &u16| some >> (qid - 1) & 1 != 0;
            for qid in (1..=6).filter(rung) {
                h.submit(qid, command);
            }
            // However often it looks before it makes a round.
            for _ in 0..=random() % 3 {
                assert!(h.c.arm(), "{ring:?} {i}: slept over");
            }
            assert!(h.c.poll(h.now));
            for qid in (1..=6).filter(rung) {
                assert_eq!(h.reap_all(qid).len(), 1, "{ring:?} {i}: queue {qid}");
            }
        }
    }
}

// ---- batches

#[test]
fn round_fetches_entries_of_every_kind() {
    let (volume, faults) = faulty(1 << 20);
    let namespaces = vec![
        ns(1, mem(1 << 20), 512),
        ns(2, volume, 512),
        ns(3, null(1 << 20), 512),
    ];
    let mut h = Host::with(ControllerConfig::default(), namespaces);
    h.enable();
    h.create_pair(1, 64);
    faults.add(Fault::always(OpKind::Write, Effect::Hold));
    // A request that is refused at once: its answer is there when it was started.
    let refused = Effect::Fail(volume::IoErrorKind::MediaRead.into());
    faults.add(Fault::nth(OpKind::Read, 2, refused));
    for turn in 0..6 {
        let kinds = [
            h.rw(NvmOpcode::READ, 1, 0, 1, DATA),
            h.rw(NvmOpcode::READ, 2, 0, 1, DATA),
            h.rw(NvmOpcode::WRITE, 2, 0, 1, DATA),
            // No such namespace, no such block, nothing plain.
            h.rw(NvmOpcode::READ, 9, 0, 1, DATA),
            h.rw(NvmOpcode::READ, 3, 1 << 40, 1, DATA),
            Command::new(NvmOpcode::FLUSH.0, 0, 1),
            h.rw(NvmOpcode::READ, 3, 0, 1, DATA),
        ];
        // Over the ring's end, too; and more than one round takes.
        let before = fetched(&h, 1);
        for i in 0..50 {
            let command = kinds[(i + turn) % kinds.len()];
            h.push(1, command);
        }
        h.ring_sq(1);
        h.c.poll(h.now);
        assert_eq!(fetched(&h, 1) - before, 32, "turn {turn}");
        h.c.poll(h.now);
        assert_eq!(fetched(&h, 1) - before, 50, "turn {turn}");
        faults.release();
        h.run();
        assert_eq!(h.reap_all(1).len(), 50, "turn {turn}");
        assert_eq!(h.c.in_flight(), 0);
    }
}

// ---- what is started early, and what is over

type Log = Arc<Mutex<Vec<&'static str>>>;

/// Notes what reaches the volume, and that a batch is complete.
struct NotedQueue(OpenQueue, Log);

impl VolumeQueue for NotedQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        self.1.lock().unwrap().push("submit");
        self.0.submit(request)
    }
    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        self.0.poll(done)
    }
    fn state(&self) -> QueueState {
        self.0.state()
    }
    fn cancel(&mut self, tag: u64) {
        self.0.cancel(tag);
    }
}

impl FastPath for NotedQueue {
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        self.1.lock().unwrap().push("start");
        self.0.start(tag, op, offset, data)
    }
    fn push(&mut self) {
        self.1.lock().unwrap().push("push");
        self.0.push();
    }
    fn is_immediate(&self) -> bool {
        false
    }
    fn try_now(&mut self, _: Op, _: u64, _: View<'_>) -> Option<Result<(), IoError>> {
        None
    }
    fn prefetches(&self) -> bool {
        false
    }
    fn prefetch(&mut self, _: Op, _: u64, _: u64) {}
}

struct Signals(Log);

impl IrqSink for Signals {
    fn signal(&self) {
        self.0.lock().unwrap().push("signal");
    }
}

#[test]
fn batch_is_pushed_after_due_interrupt() {
    let log = Log::default();
    let (volume, faults) = faulty(1 << 20);
    let queue_log = log.clone();
    let noted = opened(volume, move |volume, io| {
        let queue = NotedQueue(volume.open(io)?, queue_log.clone());
        Ok(OpenQueue::with_fast_path(queue))
    });
    let mut h = host(Ring::Register, noted, ControllerConfig::default());
    let take = || std::mem::take(&mut *log.lock().unwrap());
    h.c.set_msix(1, Some(Arc::new(Signals(log.clone()))));
    // The first command of all is timed, and so ends its batch.
    let command = read(&h);
    h.submit(1, command);
    h.run();
    assert_eq!(h.reap_all(1).len(), 1);
    take();
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    for _ in 0..3 {
        h.push(1, command);
    }
    h.ring_sq(1);
    h.c.poll(h.now);
    assert_eq!(take(), ["start", "start", "start", "push"]);
    // The requests have ended, which only a look at them shows: the next is submitted already.
    faults.release();
    for ended in over(&mut h) {
        h.c.complete(ended);
    }
    assert_eq!(h.reap_all(1).len(), 3);
    take();
    faults.clear();
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    h.submit(1, command);
    h.c.poll(h.now);
    assert_eq!(take(), ["start", "signal"]);
    h.submit(1, command);
    h.c.poll(h.now);
    assert_eq!(take(), ["start", "push"]);
}

/// Completions that the controller's volumes have, handed to nobody yet.
fn over(h: &mut Host) -> Vec<Completion> {
    h.io.flush();
    let mut done = Vec::new();
    for _ in 0..4 {
        h.c.poll_volumes(&mut done);
    }
    done
}

#[test]
fn completed_command_leaves_nothing() {
    let window = 0x100_0000_0000;
    for case in ["plain", "full", "deleted", "reset"] {
        let (volume, faults) = faulty(1 << 20);
        let config = ControllerConfig {
            max_in_flight: 1,
            ..Default::default()
        };
        let mut h = Host::with(config, vec![ns(1, stubborn(volume), 512)]);
        h.enable();
        // One completion has room.
        h.create_cq(1, 2, RINGS + 0x1000, Some(1));
        h.create_sq(1, 1, 16, RINGS);
        h.pairs.insert(1, Pair::new(RINGS, RINGS + 0x1000, 16));
        h.c.dma_map(window, 0x4000, Some((h.high.clone(), 0)), Prot::RW)
            .unwrap();
        let command = h.rw(NvmOpcode::READ, 1, 0, 1, window);
        let first = case == "full";
        if first {
            h.submit(1, command);
            h.run();
            assert_eq!(h.c.stats().queues[1].completions.get(), 1);
        }
        faults.add(Fault::always(OpKind::Read, Effect::Hold));
        h.submit(1, command);
        h.run_held(&faults, 1);
        h.c.dma_unmap(window, 0x4000).unwrap();
        assert!(!h.c.dma_quiesced() && h.c.in_flight() == 1, "{case}");
        match case {
            "deleted" => {
                let mut delete = Command::new(AdminOpcode::DELETE_IO_SQ.0, 0, 0);
                delete.cdw10 = 1.into();
                h.submit(0, delete);
                h.run_held(&faults, 1);
                assert!(h.reap(0).is_none(), "not before its command is over");
            }
            "reset" => h.disable(),
            _ => {}
        }
        faults.clear();
        faults.release();
        let done = over(&mut h);
        let [ended] = done.try_into().expect("one request is over");
        let tag = ended.tag;
        let again = || Completion {
            tag,
            result: Ok(()),
            data: SegmentList::new(),
        };
        h.c.complete(ended);
        assert_eq!(h.c.in_flight(), 0, "{case}");
        assert!(h.c.dma_quiesced() && h.c.is_drained(), "{case}");
        let posted = h.c.stats().queues[1].completions.get();
        // Once is enough.
        h.c.complete(again());
        h.run();
        assert_eq!(h.c.in_flight(), 0, "{case}");
        assert_eq!(h.c.stats().queues[1].completions.get(), posted, "{case}");
        let expected = if case == "reset" { 0 } else { 1 };
        assert_eq!(posted, expected, "{case}");
        assert_eq!(h.c.stats().host_reads(), 1 + u64::from(first), "{case}");
        match case {
            "deleted" => {
                assert_eq!(h.reap(0).unwrap().status(), Status::SUCCESS);
                continue;
            }
            "reset" => {
                h.enable();
                h.create_pair(1, 16);
            }
            _ => {
                let h = &mut h;
                for _ in 0..=usize::from(first) {
                    h.run();
                    let status = h.reap(1).unwrap().status();
                    assert_eq!(status, Status::SUCCESS, "{case}");
                    let pair = h.pairs.get_mut(&1).unwrap();
                    // Its completion queue has two entries.
                    (pair.cq.head, pair.cq.phase) =
                        (pair.cq.head % 2, pair.cq.phase ^ (pair.cq.head == 2));
                    let head = pair.cq.head;
                    h.ring_value(1, true, head);
                }
                assert!(h.peek(1).is_none(), "{case}");
            }
        }
        // The one slot serves the next, whom the old name does not end.
        faults.add(Fault::always(OpKind::Read, Effect::Hold));
        let command = read(&h);
        h.submit(1, command);
        h.run_held(&faults, 1);
        h.c.complete(again());
        h.run_held(&faults, 1);
        assert_eq!(h.c.in_flight(), 1, "{case}");
        faults.clear();
        faults.release();
        h.run();
        assert!(h.peek(1).is_some(), "{case}");
    }
}

#[test]
fn abort_completes_when_command_succeeds() {
    let (volume, faults) = faulty(1 << 20);
    let mut h = Host::ready_with(vec![ns(1, stubborn(volume), 512)]);
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    let command = read(&h);
    let cid = h.submit(1, command);
    h.run_held(&faults, 1);
    let mut abort = Command::new(AdminOpcode::ABORT.0, 0, 0);
    abort.cdw10 = (u32::from(cid) << 16 | 1).into();
    h.submit(0, abort);
    h.run_held(&faults, 1);
    assert!(h.reap(0).is_none(), "not before the command is over");
    faults.release();
    h.run();
    assert_eq!(h.reap(1).unwrap().status(), Status::SUCCESS);
    let answer = h.reap(0).expect("an answer");
    assert_eq!((answer.status(), answer.dw0.get()), (Status::SUCCESS, 1));
}
