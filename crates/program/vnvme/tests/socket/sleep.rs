//! A worker sleeps while its commands are in flight on a device below, and the device's interrupt
//! wakes it every time, on the direct path as on the generic one.

use crate::common::{Daemon, Lone, TestDir, stats, text, ticks};

const ROUNDS: u64 = 4000;
/// The upper daemon looks at the device now and then, too, which would hide a lost wake-up.
const NEVER_BELOW: &str = "status-interval=86400s&timeout=400000s";

const PATHS: [&str; 2] = ["direct", "generic"];

/// A device below, a controller above with all of it, and a driver that polls.
struct Chain {
    client: Lone,
    upper: Daemon,
    lower: Daemon,
    control: String,
    _place: TestDir,
}

impl Chain {
    fn new(volume: &str, path: &str, window: &str) -> Self {
        let test_dir = TestDir::new();
        let below = text(&test_dir.path("below.sock"));
        let lower = Daemon::spawn(&["serve", "--socket", &below, "--idle-window", "0", volume]);
        lower.wait_listening(below.as_ref());
        let control = text(&test_dir.path("control"));
        let url = format!("vfio-user://{below}/1?path={path}&{NEVER_BELOW}");
        let upper = Daemon::serve(
            &test_dir,
            &["--idle-window", window, "--control", &control, &url],
        );
        Self {
            client: Lone::open(&format!("vfio-user://{}/1", text(&test_dir.socket()))),
            upper,
            lower,
            control,
            _place: test_dir,
        }
    }

    fn lost(self, what: &str) -> ! {
        self.upper.kill();
        self.lower.kill();
        panic!("{what}: the wake-up was lost");
    }

    fn over(self) {
        drop(self.client);
        self.upper.end();
        self.lower.end();
    }
}

/// Commands one at a time, with pauses that begin before the worker's last look and end long after
/// it fell asleep. At times, so many commands without pause that the device is told to disable its
/// interrupt.
fn rounds(path: &str, window: &str) {
    let mut chain = Chain::new("null://1G", path, window);
    for round in 0..ROUNDS {
        if !chain.client.read(round % 1000) {
            chain.lost(&format!("round {round} of window {window}, {path}"));
        }
        if round % 1000 >= 300 {
            chain.client.pause();
        }
    }
    let stats = stats(&chain.control);
    let io = &stats["queues"][1];
    let (commands, arms) = (io["commands"].as_u64(), io["arms"].as_u64());
    assert!(commands >= Some(ROUNDS), "{io}");
    // Otherwise the test has shown nothing.
    assert!(arms > Some(ROUNDS / 100), "the worker hardly slept: {io}");
    chain.over();
}

#[test]
fn device_wake_up_is_never_lost() {
    for path in PATHS {
        rounds(path, "0");
    }
}

#[test]
fn device_wake_up_is_never_lost_after_polling() {
    for path in PATHS {
        rounds(path, "50");
    }
}

#[test]
fn worker_uses_no_cpu_while_device_is_slow() {
    for path in PATHS {
        let mut chain = Chain::new("null://1G?latency=1s", path, "auto");
        let before = ticks(chain.upper.pid());
        for lba in 0..2 {
            if !chain.client.read(lba) {
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
