//! Shares of one device in simulated time.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::simulated::{Device, DevicePath, Load, Simulated, run};
use proptest::prelude::*;
use volume::{
    Clock, FairGroup, FairVolume, Io, IoErrorKind, IoLimits, LimitVolume, NullOptions, NullVolume,
    Op, Rates, Volume, Wake,
};

const LATENCY: Duration = Duration::from_micros(100);
const TIME: Duration = Duration::from_millis(300);

/// A slice: its weight, its load's depth, the length of its requests.
type Slice = (u32, usize, u64);

/// Bytes that each slice gets of a device that does `depth` requests at a time.
fn shares(depth: usize, slices: &[Slice]) -> Vec<u64> {
    let clock = Simulated::new();
    let device = Device::new(&clock, LATENCY);
    let group = FairGroup::with_clock(depth, clock.clone());
    let io = Io::new(Default::default());
    let load = |&(weight, depth, len): &Slice| {
        let volume = FairVolume::new(Arc::new(DevicePath(device.clone())), group.clone(), weight);
        Load::new(&volume, &io, depth, move |_| (Op::Read, len))
    };
    let mut loads: Vec<Load> = slices.iter().map(load).collect();
    run(&clock, &device, TIME, &mut loads);
    let most = device.most.load(Ordering::Relaxed);
    assert!(most <= depth, "{most} in the device of {depth}");
    loads.iter().map(|load| load.bytes).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Two equal slices. One that wants more than half gets within 10% of it, and one that wants
    /// less gets all that it wants. Little of the wanted part of the device is left unused: smaller
    /// depths are tried, and their greatest cost is not missed.
    #[test]
    fn equal_slices_share_equally(device in 2usize..64, a in 1usize..=128, b in 1usize..=128) {
        let got = shares(device, &[(100, a, 4096), (100, b, 4096)]);
        let each = TIME.as_micros() as f64 / LATENCY.as_micros() as f64 * 4096.0;
        let (a, b) = (a.min(device) as f64 * each, b.min(device) as f64 * each);
        let half = device as f64 * each / 2.0;
        let (got_a, got_b) = (got[0] as f64, got[1] as f64);
        for (mine, wanted, other) in [(got_a, a, b), (got_b, b, a)] {
            let due = wanted.min((2.0 * half - other).max(half));
            prop_assert!(mine >= due * 0.87, "{mine} of {due}");
            if wanted > half && other > half {
                prop_assert!((0.9..=1.1).contains(&(mine / half)), "{mine} of {half}");
            }
        }
        let used = got_a + got_b;
        prop_assert!(used >= (2.0 * half).min(a + b) * 0.92, "{used}");
    }

    /// Weights, and requests of other lengths: bytes in proportion.
    #[test]
    fn bytes_follow_weight(weight in 1u32..8, shift in 0u32..5) {
        let len = 4096u64 << shift;
        let got = shares(16, &[(100 * weight, 64, 4096), (100, 64, len), (100, 64, 4096)]);
        let ratio = got[0] as f64 / got[2] as f64 / f64::from(weight);
        prop_assert!((0.9..=1.1).contains(&ratio), "{ratio}: {got:?}");
        let ratio = got[1] as f64 / got[2] as f64;
        prop_assert!((0.85..=1.15).contains(&ratio), "{ratio}: {got:?}");
    }
}

#[test]
fn deeper_load_wins_without_scheduler() {
    // The device's own behaviour when it is given everything: this shows that the tests above can
    // fail.
    let got = shares(1000, &[(100, 8, 4096), (100, 128, 4096)]);
    assert!(got[1] > 10 * got[0], "{got:?}");
}

#[test]
fn idle_time_earns_no_credit() {
    let clock = Simulated::new();
    let device = Device::new(&clock, LATENCY);
    let group = FairGroup::with_clock(8, clock.clone());
    let io = Io::new(Default::default());
    let volume =
        |weight| FairVolume::new(Arc::new(DevicePath(device.clone())), group.clone(), weight);
    let load = |volume: &FairVolume| Load::new(volume, &io, 32, |_| (Op::Read, 4096));
    let (first, second) = (volume(100), volume(100));
    let mut loads = vec![load(&first)];
    run(&clock, &device, TIME, &mut loads);
    loads.push(load(&second));
    let before = loads[0].requests;
    run(&clock, &device, TIME, &mut loads);
    let (first, second) = (loads[0].requests - before, loads[1].requests);
    assert!(first.abs_diff(second) < first / 10, "{first} {second}");
}

#[test]
fn limited_slice_leaves_rest_to_others() {
    let clock = Simulated::new();
    let device = Device::new(&clock, LATENCY);
    let group = FairGroup::with_clock(8, clock.clone());
    let io = Io::new(Default::default());
    let volume = || FairVolume::new(Arc::new(DevicePath(device.clone())), group.clone(), 100);
    let limits = IoLimits {
        iops: Rates {
            total: 1000,
            ..Rates::default()
        },
        ..IoLimits::default()
    };
    let limited = LimitVolume::with_clock(Arc::new(volume()), limits, clock.clone());
    let mut loads = [
        Load::new(&limited, &io, 64, |_| (Op::Read, 4096)),
        Load::new(&volume(), &io, 64, |_| (Op::Read, 4096)),
    ];
    run(&clock, &device, Duration::from_secs(10), &mut loads);
    assert!(
        (9_800..=10_200).contains(&loads[0].requests),
        "{}",
        loads[0].requests
    );
    assert!(loads[1].requests > 770_000, "{}", loads[1].requests);
}

/// Without data, but with work for the device.
fn request(tag: u64) -> volume::Request {
    volume::Request::without_data(tag, Op::Deallocate, 0, 4096)
}

#[test]
fn queues_join_leave_and_cancel() {
    let clock = Simulated::new();
    let device = Device::new(&clock, LATENCY);
    let group = FairGroup::with_clock(2, clock.clone());
    let io = Io::new(Default::default());
    let volume = FairVolume::new(Arc::new(DevicePath(device.clone())), group, 1);
    let mut first = volume.open(&io).unwrap();
    let second = volume.open(&io).unwrap();
    for tag in 0..4 {
        assert!(first.submit(request(tag)).is_none());
    }
    let end = Wake::At(device.next().unwrap());
    let state = first.state();
    assert_eq!((state.in_flight, state.wake), (4, end));
    first.cancel(3);
    assert_eq!(first.state().wake, Wake::Poll, "a completion to collect");
    drop(second);
    let mut over = Vec::new();
    first.poll(&mut |completion| over.push((completion.tag, completion.result)));
    assert_eq!(over, [(3, Err(IoErrorKind::Aborted.into()))]);
    let mut third = volume.open(&io).unwrap();
    assert!(third.submit(request(9)).is_none());
    clock.advance_to(device.next().unwrap());
    over.clear();
    first.poll(&mut |completion| over.push((completion.tag, completion.result)));
    assert_eq!(over, [(0, Ok(())), (1, Ok(()))]);
    assert_eq!(
        third.state().wake,
        Wake::After(Duration::ZERO),
        "there are places, and nothing else would wake the worker"
    );
    assert_eq!(third.poll(&mut |_| ()), 0);
    assert_eq!(
        device.busy.load(Ordering::Relaxed),
        2,
        "both places are given away"
    );
    clock.advance_to(device.next().unwrap());
    over.clear();
    third.poll(&mut |completion| over.push((completion.tag, completion.result)));
    assert_eq!(over, [(9, Ok(()))]);
}

#[test]
fn queue_without_place_is_woken() {
    let clock = Simulated::new();
    let device = Device::new(&clock, LATENCY);
    let group = FairGroup::with_clock(2, clock.clone());
    let volume = || FairVolume::new(Arc::new(DevicePath(device.clone())), group.clone(), 100);
    let (first, second) = (volume(), volume());
    let (first_io, second_io) = (Io::new(Default::default()), Io::new(Default::default()));
    let mut first = first.open(&first_io).unwrap();
    assert_eq!(first.poll(&mut |_| ()), 0);
    // Another thread begins after this one has updated its list.
    let mut second = second.open(&second_io).unwrap();
    for tag in 0..2 {
        assert!(second.submit(request(tag)).is_none());
    }
    assert_eq!(second.state().in_flight, 2);
    assert!(first.submit(request(9)).is_none());
    assert_eq!(first.state().in_flight, 1);
    let wake = first.state().wake;
    let deadline = wake.deadline(|| clock.now());
    let deadline = deadline.expect("nothing tells it that a place is free again");
    clock.advance_to(device.next().unwrap().max(deadline));
    assert_eq!(second.poll(&mut |_| ()), 2);
    assert_eq!(second.poll(&mut |_| ()), 0);
    first.poll(&mut |_| ());
    assert_eq!(first.state().wake, Wake::At(device.next().unwrap()));
}

#[test]
fn threads_exchange_places_without_lost_wake_up() {
    const REQUESTS: u64 = 1000;
    let group = FairGroup::new(2);
    let start = std::time::Instant::now();
    let load = |weight: u32| {
        let options = NullOptions {
            size: 1 << 20,
            latency: Duration::from_micros(50),
            ..NullOptions::default()
        };
        let volume = Arc::new(NullVolume::new(options).unwrap());
        let volume = FairVolume::new(volume, group.clone(), weight);
        let io = Io::new(Default::default());
        let (mut begun, mut over) = (0, 0);
        // Threads come and go: each round is a queue of its own.
        for round in 1..=4 {
            let mut queue = volume.open(&io).unwrap();
            while over < round * REQUESTS / 4 {
                while begun < round * REQUESTS / 4 && begun - over < 8 {
                    begun += 1;
                    let request = volume::Request::flush(begun);
                    assert!(queue.submit(request).is_none());
                }
                let before = over;
                queue.poll(&mut |_| over += 1);
                let wake = queue.state().wake;
                if over == before && wake != Wake::Poll {
                    let deadline = wake.deadline(std::time::Instant::now);
                    let deadline = deadline.expect("nothing wakes it");
                    std::thread::sleep(
                        deadline.saturating_duration_since(std::time::Instant::now()),
                    );
                }
                assert!(start.elapsed() < Duration::from_secs(60), "{over}");
            }
        }
        assert_eq!(over, REQUESTS);
    };
    std::thread::scope(|scope| {
        for weight in [1, 100, 100, 3000] {
            let load = &load;
            scope.spawn(move || load(weight));
        }
    });
}

/// Runs two slices of a device with `units` units, with the loads' depths and weights, on one
/// thread or two. Returns the requests of each in a second, after one in which they find the
/// device's depth.
fn settled(units: usize, depths: [usize; 2], weights: [u32; 2], one_thread: bool) -> [u64; 2] {
    let clock = Simulated::new();
    let device = Device::with_units(&clock, LATENCY, units);
    let group = FairGroup::with_clock(32, clock.clone());
    let first = Io::new(Default::default());
    let second = Io::new(Default::default());
    let load = |at: usize, io: &Io| {
        let volume = FairVolume::new(
            Arc::new(DevicePath(device.clone())),
            group.clone(),
            weights[at],
        );
        Load::new(&volume, io, depths[at], |_| (Op::Read, 4096))
            .thinking(&clock, Duration::from_micros(10))
    };
    let second = if one_thread { &first } else { &second };
    let mut loads = [load(0, &first), load(1, second)];
    run(&clock, &device, Duration::from_secs(1), &mut loads);
    let before = [loads[0].requests, loads[1].requests];
    run(&clock, &device, Duration::from_secs(1), &mut loads);
    [loads[0].requests - before[0], loads[1].requests - before[1]]
}

#[test]
fn shallow_load_gets_share_of_queueing_device() {
    // All of the first slice's requests are in the device at once, and each waits there behind the
    // other's: the scheduler has none to prefer. Only a smaller depth helps.
    for one_thread in [true, false] {
        for (units, few) in [(1, 4), (2, 4), (4, 6), (8, 8)] {
            let got = settled(units, [few, 64], [100, 100], one_thread);
            let all = (got[0] + got[1]) as f64;
            let share = got[0] as f64 / all;
            let case = format!("{units} units, {few} requests, one thread {one_thread}: {got:?}");
            assert!((0.45..=0.55).contains(&share), "{case}");
            assert!(all > 0.9 * units as f64 * 10_000.0, "{case}");
        }
        let got = settled(2, [64, 16], [100, 300], one_thread);
        let share = got[1] as f64 / (got[0] + got[1]) as f64;
        assert!(
            (0.72..=0.78).contains(&share),
            "{got:?} one thread {one_thread}"
        );
    }
}

#[test]
fn light_load_slows_nobody() {
    // A device of many units has no use for a smaller depth, whatever the first one loses.
    for one_thread in [true, false] {
        let got = settled(32, [1, 64], [100, 100], one_thread);
        assert!(got[0] > 7_500, "{got:?}");
        assert!(got[0] + got[1] > 290_000, "{got:?}");
    }
}
