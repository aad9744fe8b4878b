//! Both roles in one thread: every kind of host against `Watch`, through all events in the life of
//! a queue.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use doorbell::{
    Armed, Cells, HostBehaviour, Invalid, Publisher, Ring, Shadow, Source, Watch, WatchState,
    advance, before, distance,
};
use proptest::prelude::*;

/// Memory of one doorbell. Values are stored little-endian, as in guest memory.
#[derive(Default)]
struct Memory {
    register: AtomicU32,
    entry: AtomicU32,
    eventidx: AtomicU32,
}

impl Memory {
    fn of_an_earlier_life(value: u32) -> Self {
        let cell = || AtomicU32::new(value.to_le());
        Self {
            register: cell(),
            entry: cell(),
            eventidx: cell(),
        }
    }

    fn shadow(&self) -> Option<Shadow<'_, AtomicU32>> {
        Some(Shadow {
            doorbell: &self.entry,
            eventidx: &self.eventidx,
        })
    }

    fn cells(&self) -> Cells<'_, AtomicU32> {
        Cells {
            register: &self.register,
            shadow: self.shadow(),
        }
    }

    fn registers_only(&self) -> Cells<'_, AtomicU32> {
        Cells {
            register: &self.register,
            shadow: None,
        }
    }

    /// Moves the host's doorbell. Returns whether the host rang the register.
    fn publish(&self, host: &mut Publisher, new: u32) -> bool {
        let rings = host.publish(self.shadow(), new as u16) == Ring::Register;
        if rings {
            self.register.store(new.to_le(), Relaxed);
        }
        rings
    }

    fn snapshot(&self) -> [u32; 3] {
        [&self.register, &self.entry, &self.eventidx].map(|cell| cell.load(Relaxed))
    }
}

/// Moves a host around a ring many times in steps of `step` entries, with a poll of the controller
/// after each step. Returns the number of rings.
fn rings_while_polling(size: u32, step: u32, behaviour: HostBehaviour) -> u32 {
    let memory = Memory::default();
    let mut host = Publisher::with_behaviour(size, behaviour);
    let mut watch = Watch::create(size, memory.cells());
    let mut tail = 0;
    let mut rings = 0;
    for turn in 0..6 * size {
        tail = advance(tail, step, size);
        let rang = memory.publish(&mut host, tail);
        // The very first move meets EventIdx armed.
        rings += u32::from(rang && turn > 0);
        assert_eq!(watch.poll(memory.cells()), Ok(tail));
        watch.park(memory.cells());
    }
    rings
}

#[test]
fn park_keeps_small_rings_silent_at_any_step() {
    for size in 2..40 {
        for step in 1..size {
            for behaviour in [
                HostBehaviour::STANDARD,
                HostBehaviour::LINUX,
                HostBehaviour::BARRIERLESS,
            ] {
                assert_eq!(
                    rings_while_polling(size, step, behaviour),
                    0,
                    "size {size} step {step}"
                );
            }
            if step < size - 1 {
                assert_eq!(
                    rings_while_polling(size, step, HostBehaviour::ANNEX),
                    0,
                    "annex, size {size} step {step}"
                );
            }
        }
    }
}

#[test]
fn park_keeps_big_rings_silent_for_three_quarters_of_ring() {
    for size in [128, 129, 1000, 1024, 4096] {
        for step in [1, 2, 3, 7, size / 4, size / 2, size * 3 / 4 - 1] {
            assert_eq!(
                rings_while_polling(size, step, HostBehaviour::LINUX),
                0,
                "size {size} step {step}"
            );
            assert_eq!(
                rings_while_polling(size, step, HostBehaviour::ANNEX),
                0,
                "size {size} step {step}"
            );
        }
        // Beyond, with nearly a whole ring published at each look: at most one ring per look.
        assert!(rings_while_polling(size, size - 1, HostBehaviour::LINUX) <= 6 * size);
    }
}

#[test]
fn park_stores_rarely_in_big_rings() {
    let memory = Memory::default();
    let size = 1024;
    let mut host = Publisher::new(size);
    let mut watch = Watch::create(size, memory.cells());
    let mut stores = 0;
    for n in 1..=size * 10 {
        let before_park = memory.eventidx.load(Relaxed);
        memory.publish(&mut host, n % size);
        assert_eq!(watch.poll(memory.cells()), Ok(n % size));
        watch.park(memory.cells());
        stores += u32::from(memory.eventidx.load(Relaxed) != before_park);
    }
    assert!(stores <= 40, "{stores} stores in ten turns");
}

#[test]
fn cq_head_rings_only_when_cq_is_full() {
    for size in 2..20_u32 {
        for burst in 1..size {
            let memory = Memory::default();
            let mut host = Publisher::with_behaviour(size, HostBehaviour::LINUX);
            let mut watch = Watch::create(size, memory.cells());
            let (mut tail, mut consumed, mut first) = (0, 0, true);
            for _ in 0..8 * size {
                // Post `burst` entries, looking at the head only when there seems to be no room.
                for _ in 0..burst {
                    if advance(tail, 1, size) == watch.current() {
                        let head = watch.poll(memory.cells()).unwrap();
                        if advance(tail, 1, size) == head {
                            // Really full: armed, the host's next head rings.
                            assert_eq!(watch.arm(memory.cells()), Ok(Armed::Idle));
                            consumed = advance(consumed, 1, size);
                            assert!(
                                memory.publish(&mut host, consumed),
                                "a full CQ gets its ring"
                            );
                            assert_eq!(watch.recheck(memory.cells()), Ok(Armed::Raced(consumed)));
                        }
                    }
                    tail = advance(tail, 1, size);
                    watch.park_until(memory.cells(), tail);
                }
                // The host consumes everything but one, so that the CQ fills up at times.
                while advance(consumed, 1, size) != tail && consumed != tail {
                    consumed = advance(consumed, 1, size);
                    let rang = memory.publish(&mut host, consumed);
                    assert!(
                        !rang || first,
                        "size {size} burst {burst}: rang at {consumed} with room left"
                    );
                    first = false;
                    watch.poll(memory.cells()).unwrap();
                    watch.park_until(memory.cells(), tail);
                }
            }
        }
    }
}

#[test]
fn cq_head_lag_costs_no_ring() {
    let size = 16;
    let memory = Memory::default();
    let mut host = Publisher::with_behaviour(size, HostBehaviour::LINUX);
    let mut watch = Watch::create(size, memory.cells());
    memory.publish(&mut host, 1);
    assert_eq!(watch.poll(memory.cells()), Ok(1));
    let (mut tail, mut head) = (1, 1);
    for n in 0..1000_u32 {
        if advance(tail, 1, size) == watch.current() {
            assert_eq!(watch.poll(memory.cells()), Ok(head));
        }
        tail = advance(tail, 1, size);
        watch.park_until(memory.cells(), tail);
        if n % 5 == 4 {
            head = tail;
            assert!(!memory.publish(&mut host, head), "entry {n}");
        }
    }
}

#[test]
fn register_only_hosts_are_served_beside_shadow_cells() {
    let memory = Memory::of_an_earlier_life(3);
    let mut host = Publisher::with_behaviour(8, HostBehaviour::REGISTER_ONLY);
    let mut watch = Watch::create(8, memory.cells());
    assert_eq!(watch.poll(memory.cells()), Ok(0));
    for n in 1..40 {
        assert!(memory.publish(&mut host, n % 8));
        assert_eq!(watch.poll(memory.cells()), Ok(n % 8));
        watch.park(memory.cells());
    }
    assert!(!watch.shadow_live());
}

#[test]
fn register_only_queue_writes_no_cell_without_buffers() {
    let memory = Memory::default();
    let mut watch = Watch::create(8, memory.registers_only());
    memory.register.store(5_u32.to_le(), Relaxed);
    let snapshot = memory.snapshot();
    assert_eq!(watch.poll(memory.registers_only()), Ok(5));
    watch.park(memory.registers_only());
    assert_eq!(watch.arm(memory.registers_only()), Ok(Armed::Idle));
    assert_eq!(memory.snapshot(), snapshot);
}

#[test]
fn late_register_writes_are_ignored() {
    let memory = Memory::default();
    let mut host = Publisher::with_behaviour(8, HostBehaviour::ALWAYS_RINGS);
    let mut watch = Watch::create(8, memory.cells());
    let _ = host.publish(memory.shadow(), 1);
    let _ = host.publish(memory.shadow(), 2);
    assert_eq!(watch.poll(memory.cells()), Ok(2));
    // The two register writes arrive only now, one after the other.
    for late in [1_u32, 2] {
        memory.register.store(late.to_le(), Relaxed);
        assert_eq!(watch.poll(memory.cells()), Ok(2));
        assert_eq!(watch.arm(memory.cells()), Ok(Armed::Idle));
    }
}

#[test]
fn recreation_ignores_cells_of_earlier_queue() {
    for stale in [0, 1, 5, 7, 8, u32::MAX] {
        for behaviour in [
            HostBehaviour::STANDARD,
            HostBehaviour::LINUX,
            HostBehaviour::ANNEX,
            HostBehaviour::REGISTER_ONLY,
        ] {
            let memory = Memory::of_an_earlier_life(stale);
            let mut watch = Watch::create(8, memory.cells());
            let mut host = Publisher::with_behaviour(8, behaviour);
            assert_eq!(watch.poll(memory.cells()), Ok(0), "no phantom entry");
            assert_eq!(watch.arm(memory.cells()), Ok(Armed::Idle));
            assert!(
                memory.publish(&mut host, 1),
                "the first move wakes a sleeping worker"
            );
            assert_eq!(watch.recheck(memory.cells()), Ok(Armed::Raced(1)));
        }
    }
}

#[test]
fn recreation_rings_before_first_poll() {
    let memory = Memory::of_an_earlier_life(5);
    let _watch = Watch::create(8, memory.cells());
    let mut host = Publisher::with_behaviour(8, HostBehaviour::LINUX);
    assert!(memory.publish(&mut host, 3));
}

#[test]
fn config_on_live_queue_moves_from_register_to_shadow() {
    for garbage in [0, 2, 3, 6, 77] {
        for behaviour in [
            HostBehaviour::STANDARD,
            HostBehaviour::LINUX,
            HostBehaviour::ANNEX,
        ] {
            let memory = Memory::default();
            memory.entry.store(garbage, Relaxed);
            memory.eventidx.store(garbage, Relaxed);
            let mut host = Publisher::with_behaviour(8, behaviour);
            let mut watch = Watch::create(8, memory.registers_only());
            // Without buffers the host rings each time.
            for tail in [2_u32, 5] {
                assert_eq!(host.publish::<AtomicU32>(None, tail as u16), Ring::Register);
                memory.register.store(tail.to_le(), Relaxed);
            }
            assert_eq!(watch.poll(memory.registers_only()), Ok(5));
            watch.attach(memory.shadow().unwrap());
            assert_eq!(
                watch.poll(memory.cells()),
                Ok(5),
                "garbage in the buffer is no doorbell"
            );
            // One more register write of the time before, then the host has seen the completion.
            memory.register.store(6_u32.to_le(), Relaxed);
            let _ = host.publish::<AtomicU32>(None, 6);
            assert_eq!(watch.poll(memory.cells()), Ok(6));
            let _ = memory.publish(&mut host, 7);
            assert_eq!(watch.poll(memory.cells()), Ok(7));
            assert!(watch.shadow_live());
        }
    }
}

#[test]
fn config_on_wrapping_queue_loses_no_value() {
    let memory = Memory::default();
    let mut host = Publisher::new(4);
    let mut watch = Watch::create(4, memory.registers_only());
    watch.attach(memory.shadow().unwrap()); // the entry holds 0
    for tail in [1_u32, 2, 3] {
        assert_eq!(host.publish::<AtomicU32>(None, tail as u16), Ring::Register);
        memory.register.store(tail.to_le(), Relaxed);
        assert_eq!(watch.poll(memory.cells()), Ok(tail));
        watch.park(memory.cells());
    }
    // The first value in the entry is 0 again, so the entry does not change: the ring must tell.
    assert!(memory.publish(&mut host, 0));
    assert_eq!(watch.poll(memory.cells()), Ok(0));
    let _ = memory.publish(&mut host, 1);
    assert_eq!(watch.poll(memory.cells()), Ok(1));
    assert!(watch.shadow_live());
}

#[test]
fn config_repeated_moves_to_other_buffers() {
    let (old, new) = (Memory::default(), Memory::of_an_earlier_life(6));
    let mut host = Publisher::with_behaviour(8, HostBehaviour::LINUX);
    let mut watch = Watch::create(8, old.cells());
    old.publish(&mut host, 3);
    assert_eq!(watch.poll(old.cells()), Ok(3));
    let cells = Cells {
        register: &old.register,
        shadow: new.shadow(),
    };
    watch.attach(new.shadow().unwrap());
    let untouched = old.snapshot();
    assert_eq!(watch.poll(cells), Ok(3));
    assert_eq!(host.publish(new.shadow(), 5), Ring::Register);
    assert_eq!(watch.poll(cells), Ok(5));
    watch.park(cells);
    assert_eq!(watch.arm(cells), Ok(Armed::Idle));
    assert_eq!(old.snapshot(), untouched);
}

#[test]
fn unmapped_buffers_leave_register_and_return() {
    let memory = Memory::default();
    let mut host = Publisher::with_behaviour(8, HostBehaviour::LINUX);
    let mut watch = Watch::create(8, memory.cells());
    assert!(memory.publish(&mut host, 1)); // the register holds 1 from now on
    watch.poll(memory.cells()).unwrap();
    watch.park(memory.cells());
    assert!(!memory.publish(&mut host, 5));
    assert_eq!(watch.poll(memory.cells()), Ok(5));
    // Gone: the old ring of 1 is no tail, a new one is.
    assert_eq!(watch.poll(memory.registers_only()), Ok(5));
    assert_eq!(watch.poll(memory.registers_only()), Ok(5));
    memory.register.store(6_u32.to_le(), Relaxed);
    assert_eq!(watch.poll(memory.registers_only()), Ok(6));
    // Back, with what the host published meanwhile.
    memory.entry.store(7_u32.to_le(), Relaxed);
    assert_eq!(watch.poll(memory.cells()), Ok(7));
}

#[test]
fn invalid_values_are_reported_once_and_never_returned() {
    let memory = Memory::default();
    let mut watch = Watch::create(8, memory.cells());
    for value in [8, 9, 0xffff, 0x1_0000, u32::MAX] {
        memory.entry.store(u32::to_le(value), Relaxed);
        assert_eq!(
            watch.poll(memory.cells()),
            Err(Invalid {
                value,
                source: Source::Shadow
            })
        );
        assert_eq!(watch.poll(memory.cells()), Ok(0));
        assert_eq!(watch.arm(memory.cells()), Ok(Armed::Idle));
    }
    memory.entry.store(2_u32.to_le(), Relaxed);
    assert_eq!(watch.poll(memory.cells()), Ok(2));

    let mut watch = Watch::create(8, memory.registers_only());
    memory.register.store(8_u32.to_le(), Relaxed);
    assert_eq!(
        watch.poll(memory.registers_only()),
        Err(Invalid {
            value: 8,
            source: Source::Register
        })
    );
    assert_eq!(watch.poll(memory.registers_only()), Ok(0));
}

#[test]
fn eventidx_is_little_endian_index() {
    let memory = Memory::default();
    let mut watch = Watch::create(4096, memory.cells());
    memory.entry.store(0x0123_u32.to_le(), Relaxed);
    assert_eq!(watch.poll(memory.cells()), Ok(0x123));
    assert_eq!(watch.arm(memory.cells()), Ok(Armed::Idle));
    assert_eq!(
        memory.eventidx.load(Relaxed).to_le_bytes(),
        [0x23, 0x01, 0, 0]
    );
}

proptest! {
    /// Checks for any host, ring and order of polls that the controller reads the last published
    /// value, that no host rings needlessly, and that the next move rings after the controller was
    /// armed and idle.
    #[test]
    fn random_histories_ring_only_when_needed(
        size in prop_oneof![2_u32..9, 9_u32..300, 4096_u32..=4096],
        which in 0_usize..4,
        stale in any::<u32>(),
        steps in proptest::collection::vec((any::<u32>(), 0_u8..4), 1..200),
    ) {
        let behaviour = [
            HostBehaviour::STANDARD, HostBehaviour::LINUX, HostBehaviour::ANNEX, HostBehaviour::ALWAYS_RINGS,
        ][which];
        let memory = Memory::of_an_earlier_life(stale);
        let mut watch = Watch::create(size, memory.cells());
        let mut host = Publisher::with_behaviour(size, behaviour);
        let (mut tail, mut armed) = (0, true);
        for (n, then) in steps {
            // The host may fill the ring up to one entry behind what the controller has fetched.
            let room = size - 1 - distance(watch.current(), tail, size);
            let n = n % (room + 1);
            if n > 0 {
                tail = advance(tail, n, size);
                let rang = memory.publish(&mut host, tail);
                if armed {
                    prop_assert!(rang, "lost wake-up");
                }
                let far = distance(watch.current(), tail, size) > if size < 128 { size - 2 } else { size - 2 - size / 4 };
                if rang && behaviour != HostBehaviour::ALWAYS_RINGS {
                    prop_assert!(armed || far, "needless ring");
                }
                armed = false;
            }
            let news = watch.has_news(memory.cells());
            prop_assert!(news || watch.current() == tail, "a move is no news");
            match then {
                0 => {}
                1 | 2 => {
                    let fresh = watch.current() != tail;
                    let before = watch.state();
                    prop_assert_eq!(watch.poll(memory.cells()), Ok(tail));
                    prop_assert_eq!(news, watch.state() != before);
                    if fresh || then == 2 {
                        watch.park(memory.cells());
                    }
                    armed = memory.eventidx.load(Relaxed) == tail.to_le();
                }
                _ => {
                    let fresh = watch.current() != tail;
                    match watch.arm(memory.cells()) {
                        Ok(Armed::Idle) => { prop_assert!(!fresh); armed = true; }
                        Ok(Armed::Raced(found)) => {
                            prop_assert!(fresh);
                            prop_assert_eq!(found, tail);
                            watch.park(memory.cells());
                        }
                        Err(invalid) => prop_assert!(false, "{invalid}"),
                    }
                }
            }
            let state = watch.state();
            prop_assert!(state.eventidx < size && state.current < size);
            // A controller that is restarted here goes on as if nothing had happened.
            watch = Watch::from_state(state).unwrap();
        }
    }

    /// Checks for any contents of the cells that `has_news` is true exactly when a poll finds a new
    /// value.
    #[test]
    fn has_news_matches_poll(
        size in prop_oneof![1_u32..6, 128_u32..=128],
        attached in any::<bool>(),
        steps in proptest::collection::vec((0_u8..5, 0_u32..8, any::<bool>(), any::<bool>()), 1..100),
    ) {
        let memory = Memory::of_an_earlier_life(3);
        let first = if attached { memory.cells() } else { memory.registers_only() };
        let mut watch = Watch::create(size, first);
        for (place, value, shadowed, polls) in steps {
            match place {
                0 | 1 => memory.entry.store(value.to_le(), Relaxed),
                2 | 3 => memory.register.store(value.to_le(), Relaxed),
                _ => {}
            }
            let cells = if shadowed { memory.cells() } else { memory.registers_only() };
            let news = watch.has_news(cells);
            prop_assert_eq!(watch.has_news(cells), news, "to ask changes nothing");
            if !polls {
                continue;
            }
            let before = watch.state();
            let found = watch.poll(cells);
            prop_assert_eq!(news, watch.state() != before, "{:?}", found);
            prop_assert!(news || found == Ok(before.current));
            prop_assert!(!watch.has_news(cells), "news for ever");
        }
    }

    #[test]
    fn contradicting_watch_states_are_refused(size in any::<u32>(), current in any::<u32>(), eventidx in any::<u32>()) {
        let state = WatchState { size, current, last_shadow: 0, last_register: 0, shadow_live: false, eventidx };
        let sound = size <= 65_536 && current < size && eventidx < size;
        prop_assert_eq!(Watch::from_state(state).is_some(), sound);
        let _ = before(current, size);
    }
}
