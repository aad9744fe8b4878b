//! Limits in simulated time: the rate and time of requests, and changes of both.

use std::sync::Arc;
use std::time::Duration;

use crate::simulated::{Device, DevicePath, Load, Simulated, run};
use proptest::prelude::*;
use volume::{
    Clock, Io, IoErrorKind, IoLimits, LimitHandle, LimitVolume, Op, QueueState, Rates, Volume, Wake,
};

const TEN_SECONDS: Duration = Duration::from_secs(10);
const WRITE: Op = Op::Write { fua: false };

struct Bench {
    clock: Arc<Simulated>,
    device: Arc<Device>,
    volume: LimitVolume,
    io: Io,
}

impl Bench {
    fn new(limits: IoLimits) -> Self {
        let clock = Simulated::new();
        let device = Device::new(&clock, Duration::from_micros(80));
        let volume =
            LimitVolume::with_clock(Arc::new(DevicePath(device.clone())), limits, clock.clone());
        let io = Io::new(Default::default());
        Self {
            clock,
            device,
            volume,
            io,
        }
    }

    fn handle(&self) -> LimitHandle {
        self.volume.handle()
    }

    fn load(&self, depth: usize, make: impl Fn(u64) -> (Op, u64) + 'static) -> Load {
        Load::new(&self.volume, &self.io, depth, make)
    }

    fn run(&self, time: Duration, loads: &mut [Load]) {
        run(&self.clock, &self.device, time, loads);
    }
}

fn total(rate: u64) -> Rates {
    Rates {
        total: rate,
        ..Rates::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Over ten seconds a limited volume stays within 2% of its limits, and reaches the one that
    /// binds.
    #[test]
    fn limits_are_reached_and_never_exceeded(
        iops in 500u64..20_000,
        bps in 2_000_000u64..200_000_000,
        depth in 4usize..128,
        shift in 0u32..5,
    ) {
        let bench = Bench::new(IoLimits { iops: total(iops), bps: total(bps), ..IoLimits::default() });
        let len = 4096u64 << shift;
        let mut loads = [bench.load(depth, move |n| (if n % 3 == 0 { WRITE } else { Op::Read }, len))];
        bench.run(TEN_SECONDS, &mut loads);
        let (requests, bytes) = (loads[0].requests as f64 / 10.0, loads[0].bytes as f64 / 10.0);
        prop_assert!(requests <= iops as f64 * 1.02, "{requests} requests of {iops}");
        prop_assert!(bytes <= bps as f64 * 1.02, "{bytes} bytes of {bps}");
        let reached = (requests / iops as f64).max(bytes / bps as f64);
        prop_assert!(reached >= 0.98, "{reached} of the limit: {requests} of {iops}, {bytes} of {bps}");
    }
}

#[test]
fn reads_and_writes_have_separate_limits() {
    let iops = Rates {
        total: 0,
        read: 1000,
        write: 200,
    };
    let bench = Bench::new(IoLimits {
        iops,
        ..IoLimits::default()
    });
    let mut loads = [
        bench.load(8, |_| (Op::Read, 4096)),
        bench.load(8, |_| (WRITE, 4096)),
        bench.load(8, |_| (Op::Deallocate, 1 << 20)),
    ];
    bench.run(TEN_SECONDS, &mut loads);
    let [reads, writes, discards] = loads.map(|load| load.requests);
    assert!((9_800..=10_200).contains(&reads), "{reads}");
    assert!(
        (1_960..=2_040).contains(&(writes + discards)),
        "{writes} + {discards}"
    );
}

#[test]
fn workers_share_one_limit() {
    let bench = Bench::new(IoLimits {
        iops: total(1000),
        ..IoLimits::default()
    });
    let other = Io::new(Default::default());
    let mut loads = [
        bench.load(8, |_| (Op::Read, 4096)),
        Load::new(&bench.volume, &other, 8, |_| (Op::Read, 4096)),
    ];
    bench.run(TEN_SECONDS, &mut loads);
    let both: u64 = loads.iter().map(|load| load.requests).sum();
    assert!((9_800..=10_200).contains(&both), "{both}");
}

#[test]
fn burst_credit_is_bounded() {
    let burst = Duration::from_secs(1);
    let bench = Bench::new(IoLimits {
        iops: total(100),
        burst,
        ..IoLimits::default()
    });
    // Long after the start, 1000 at once: those of a second pass, and one; the rest pass by and by.
    bench
        .clock
        .advance_to(std::time::Instant::now() + Duration::from_secs(3600));
    let mut loads = [bench.load(1000, |_| (Op::Read, 4096))];
    bench.run(Duration::from_millis(1), &mut loads);
    assert_eq!(loads[0].requests, 101);
    bench.run(Duration::from_secs(1), &mut loads);
    assert!(
        (200..=202).contains(&loads[0].requests),
        "{}",
        loads[0].requests
    );
}

#[test]
fn oversized_request_delays_next() {
    let bench = Bench::new(IoLimits {
        bps: total(1 << 20),
        ..IoLimits::default()
    });
    let mut loads = [bench.load(1, |_| (Op::Read, 4 << 20))];
    bench.run(Duration::from_millis(3_900), &mut loads);
    assert_eq!(loads[0].requests, 1);
    bench.run(Duration::from_millis(200), &mut loads);
    assert_eq!(loads[0].requests, 2);
}

#[test]
fn limits_change_while_requests_are_held() {
    let bench = Bench::new(IoLimits {
        iops: total(1),
        ..IoLimits::default()
    });
    let mut loads = [bench.load(64, |_| (Op::Read, 4096))];
    bench.run(Duration::from_secs(2), &mut loads);
    assert!(loads[0].requests <= 3, "{}", loads[0].requests);
    assert!(bench.handle().delayed() >= 61);
    bench.handle().set(IoLimits {
        iops: total(10_000),
        ..IoLimits::default()
    });
    assert_eq!(bench.handle().get().iops.total, 10_000);
    bench.run(Duration::from_secs(1), &mut loads);
    // A tenth of a second may pass until it is noticed.
    assert!(
        (8_900..=10_600).contains(&loads[0].requests),
        "{}",
        loads[0].requests
    );
    // Requests of the first two seconds have waited for as long, the rest for some milliseconds.
    let throttled = bench.handle().throttled().as_secs();
    assert!((115..=200).contains(&throttled), "{throttled} s");
    bench.handle().set(IoLimits::default());
    let before = loads[0].requests;
    bench.run(Duration::from_secs(1), &mut loads);
    let free = loads[0].requests - before;
    assert!(free > 700_000, "64 outstanding, 80 us each: {free}");
}

#[test]
fn flushes_and_end_ignore_limit() {
    let bench = Bench::new(IoLimits {
        iops: total(1),
        ..IoLimits::default()
    });
    let mut flushes = [
        bench.load(1, |_| (Op::Flush, 0)),
        bench.load(4, |_| (WRITE, 4096)),
    ];
    bench.run(Duration::from_millis(100), &mut flushes);
    assert!(flushes[0].requests > 1000);
    assert_eq!(flushes[1].requests, 1);
    bench.io.end();
    bench.run(Duration::from_millis(100), &mut flushes);
    assert!(flushes[1].requests > 1000);
}

#[test]
fn limited_requests_are_cancelled() {
    let bench = Bench::new(IoLimits {
        iops: total(1),
        burst: Duration::ZERO,
        ..IoLimits::default()
    });
    let mut queue = bench.volume.open(&bench.io).unwrap();
    let request = |tag| volume::Request::without_data(tag, Op::Deallocate, 0, 4096);
    for tag in 0..3 {
        assert!(queue.submit(request(tag)).is_none());
    }
    // A request that the limit has let through ends; the rest wait for it.
    assert_eq!(queue.state().in_flight, 1);
    bench.clock.advance_to(bench.device.next().unwrap());
    let mut over = Vec::new();
    queue.poll(&mut |completion| over.push((completion.tag, completion.result)));
    assert_eq!(over, [(0, Ok(()))]);
    let QueueState { in_flight, wake } = queue.state();
    assert_eq!(in_flight, 0);
    let nap = wake.deadline(|| bench.clock.now()).unwrap() - bench.clock.now();
    assert!(
        nap <= Duration::from_millis(100),
        "a change of limits would go unnoticed for {nap:?}"
    );
    queue.cancel(1);
    assert_eq!(queue.state().wake, Wake::Poll, "a completion to collect");
    over.clear();
    queue.poll(&mut |completion| over.push((completion.tag, completion.result)));
    assert_eq!(over, [(1, Err(IoErrorKind::Aborted.into()))]);
    // A second on, the third one, not the one between.
    bench
        .clock
        .advance_to(std::time::Instant::now() + Duration::from_secs(2));
    over.clear();
    queue.poll(&mut |completion| over.push((completion.tag, completion.result)));
    assert_eq!(over, []);
    let ends = Wake::At(bench.device.next().unwrap());
    assert_eq!((queue.state().in_flight, queue.state().wake), (1, ends));
}

/// A volume without limits has the inner volume's own queues, with its fast path, until the first
/// limit is set. Requests that have been started are completed by the new queue.
#[test]
fn dormant_limits_take_effect_while_requests_are_in_flight() {
    let volume = volume::open_url("null://1M", Default::default()).unwrap();
    let io = Io::new(Default::default());
    let mut queue = volume.open(&io).unwrap();
    assert!(queue.is_immediate());
    assert!(!queue.update(), "nothing has changed");
    let limits = volume.limits().unwrap();
    assert!(!limits.is_limited() && !limits.is_configured());
    limits.set(IoLimits {
        iops: total(1),
        burst: Duration::ZERO,
        ..IoLimits::default()
    });
    assert!(queue.is_immediate(), "noticed by the queue's owner only");
    assert!(queue.update() && !queue.update());
    assert!(!queue.is_immediate());
    assert!(!volume.open(&io).unwrap().is_immediate());

    let clock = Simulated::new();
    let device = Device::new(&clock, Duration::from_micros(80));
    let volume = LimitVolume::dormant(Arc::new(DevicePath(device.clone())));
    let mut queue = volume.open(&io).unwrap();
    let request = |tag| volume::Request::without_data(tag, Op::Read, 0, 4096);
    assert!(queue.submit(request(1)).is_none());
    volume.handle().set(IoLimits {
        iops: total(1),
        burst: Duration::ZERO,
        ..IoLimits::default()
    });
    assert!(queue.update());
    for tag in 2..5 {
        assert!(queue.submit(request(tag)).is_none());
    }
    // One token was there.
    assert_eq!(volume.handle().delayed(), 2);
    assert_eq!(queue.state().in_flight, 2);
    queue.cancel(3);
    queue.cancel(4);
    let mut done = Vec::new();
    while done.len() < 4 {
        if let Some(next) = device.next() {
            clock.advance_to(next);
        }
        queue.poll(&mut |completion| done.push(completion.tag));
    }
    done.sort_unstable();
    assert_eq!(done, [1, 2, 3, 4]);
}
