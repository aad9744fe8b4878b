//! A worker whose commands are at work on a device below sleeps, and the device's interrupt wakes it every time, on the
//! direct path as on the generic one.

use std::time::{Duration, Instant};

use driver::{Device, DmaBuffer, QueueOptions, QueuePair, Target};

use crate::common::{Daemon, Place, text, ticks};

const ROUNDS: u64 = 4000;
/// A command that takes longer was not seen.
const LOST: Duration = Duration::from_secs(10);
/// Drivers look at the controller now and then while they wait, which would hide a lost wake-up, at either place.
const NEVER: Duration = Duration::from_secs(24 * 3600);
const NEVER_BELOW: &str = "status-interval=86400s&timeout=400000s";

const PATHS: [&str; 2] = ["direct", "generic"];

/// A device below, a controller above with all of it, and a driver that polls.
struct Chain {
    lower: Daemon,
    upper: Daemon,
    control: String,
    queue: QueuePair,
    buffer: Option<DmaBuffer>,
    _device: Device,
    _place: Place,
}

impl Chain {
    fn new(volume: &str, path: &str, window: &str) -> Self {
        let place = Place::new();
        let below = text(&place.path("below.sock"));
        let lower = Daemon::spawn(&["serve", "--socket", &below, "--idle-window", "0", volume]);
        lower.wait_listening(below.as_ref());
        let control = text(&place.path("control"));
        let url = format!("vfio-user://{below}/1?path={path}&{NEVER_BELOW}");
        let upper = Daemon::serve(
            &place,
            &["--idle-window", window, "--control", &control, &url],
        );
        let above = format!("vfio-user://{}/1", text(&place.socket()));
        let mut target = Target::parse(&above).unwrap();
        target.options.status_interval = NEVER;
        target.options.command_timeout = NEVER;
        let device = target.open().unwrap();
        let options = QueueOptions {
            depth: 4,
            // So that it wraps often.
            entries: 5,
            interrupts: false,
            ..QueueOptions::default()
        };
        Self {
            queue: device.queue(1, options).unwrap(),
            buffer: Some(device.allocate(4096).unwrap()),
            lower,
            upper,
            control,
            _device: device,
            _place: place,
        }
    }

    fn start(&mut self, lba: u64) {
        let buffer = self.buffer.take().unwrap();
        self.queue.submit_read(lba, 1, buffer, lba).unwrap();
        self.queue.ring();
    }

    /// Polls until the command is over, or is known to be lost.
    fn end(&mut self) -> bool {
        let start = Instant::now();
        while self.buffer.is_none() && start.elapsed() < LOST {
            let buffer = &mut self.buffer;
            self.queue.poll(|completion| {
                completion.result.unwrap();
                *buffer = completion.buffer;
            });
        }
        self.buffer.is_some()
    }

    /// First the daemons: the driver would wait for one that does not wake up.
    fn lost(self, what: &str) -> ! {
        self.upper.kill();
        self.lower.kill();
        panic!("{what}: the wake-up was lost");
    }

    fn over(self) {
        drop((self.queue, self.buffer, self._device));
        self.upper.end();
        self.lower.end();
    }
}

/// Counters of the upper controller's I/O queue.
fn counters(control: &str) -> serde_json::Value {
    let stats = std::process::Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["stats", "--json", control])
        .output()
        .unwrap();
    let stats: serde_json::Value = serde_json::from_slice(&stats.stdout).unwrap();
    stats["controllers"][0]["queues"][1].clone()
}

/// Commands one at a time, with pauses that begin before the worker's last look and end long after it fell asleep; and now
/// and then so many without pause that the device is told to interrupt nobody.
fn rounds(path: &str, window: &str) {
    let mut chain = Chain::new("null://1G", path, window);
    let mut pause = 1u64;
    for round in 0..ROUNDS {
        chain.start(round % 1000);
        if !chain.end() {
            chain.lost(&format!("round {round} of window {window}, {path}"));
        }
        if round % 1000 < 300 {
            continue;
        }
        // 0 to 127 microseconds, in no order.
        pause = pause
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let pause = Duration::from_micros(pause >> 57);
        let start = Instant::now();
        while start.elapsed() < pause {
            std::hint::spin_loop();
        }
    }
    let io = counters(&chain.control);
    let (commands, arms) = (io["commands"].as_u64(), io["arms"].as_u64());
    assert!(commands >= Some(ROUNDS), "{io}");
    // Else nothing was shown.
    assert!(arms > Some(ROUNDS / 100), "the worker hardly slept: {io}");
    chain.over();
}

#[test]
fn no_wake_up_of_a_device_is_lost() {
    for path in PATHS {
        rounds(path, "0");
    }
}

#[test]
fn no_wake_up_of_a_device_is_lost_after_polling() {
    for path in PATHS {
        rounds(path, "50");
    }
}

#[test]
fn a_worker_costs_no_processor_time_while_a_slow_device_works() {
    for path in PATHS {
        let mut chain = Chain::new("null://1G?latency=1s", path, "auto");
        let before = ticks(chain.upper.pid());
        for lba in 0..2 {
            chain.start(lba);
            if !chain.end() {
                chain.lost(path);
            }
        }
        // Two seconds; polling would have used up to 200 of them.
        let used = ticks(chain.upper.pid()) - before;
        println!("{path}: {used} ticks of the processor for two seconds of waiting");
        assert!(used < 20, "{path}: {used} ticks");
        chain.over();
    }
}
