//! A client with one command at a time and pauses in between, which detects a lost wake-up.

use driver::{Device, DeviceTarget, DmaBuffer, QueueOptions, QueuePair};
use std::time::{Duration, Instant};

/// A command that takes longer was not seen.
const LOST: Duration = Duration::from_secs(10);
/// The driver looks at the controller now and then while it waits: a register read, which wakes a
/// sleeping worker and so would hide a lost wake-up.
const NEVER: Duration = Duration::from_secs(24 * 3600);

pub struct Lone {
    queue: QueuePair,
    buffer: Option<DmaBuffer>,
    pause: u64,
    // The last field: dropped after its queue.
    _device: Device,
}

impl Lone {
    /// Opens a namespace of 512-byte blocks or more: `vfio-user://SOCKET/1`.
    pub fn open(url: &str) -> Self {
        let mut target = DeviceTarget::parse(url).unwrap();
        target.options.status_interval = NEVER;
        target.options.command_timeout = NEVER;
        let device = target.open().unwrap();
        let options = QueueOptions {
            depth: 4,
            // Few entries, so that the queue wraps often.
            entries: 5,
            interrupts: false,
            ..QueueOptions::default()
        };
        Self {
            queue: device.queue(1, options).unwrap(),
            buffer: Some(device.allocate(4096).unwrap()),
            pause: 1,
            _device: device,
        }
    }

    /// Reads a block, polling. `false`: the command was not seen. The server is then to be killed
    /// before this client is dropped, which would wait for it.
    #[must_use]
    pub fn read(&mut self, lba: u64) -> bool {
        let buffer = self.buffer.take().unwrap();
        self.queue.submit_read(lba, 1, buffer, lba).unwrap();
        self.queue.ring();
        let start = Instant::now();
        while self.buffer.is_none() && start.elapsed() < LOST {
            let buffer = &mut self.buffer;
            self.queue.poll(|completion| {
                assert_eq!(completion.user_data, lba);
                completion.result.unwrap();
                *buffer = completion.buffer;
            });
        }
        self.buffer.is_some()
    }

    /// 0 to 127 microseconds, in no order: from before the worker's last look until long after it
    /// fell asleep.
    pub fn pause(&mut self) {
        self.pause = self
            .pause
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let pause = Duration::from_micros(self.pause >> 57);
        let start = Instant::now();
        while start.elapsed() < pause {
            std::hint::spin_loop();
        }
    }
}

/// The figures of a controller, as `vnvme stats` shows them.
pub fn stats(control: &str) -> serde_json::Value {
    all_stats(control)["controllers"][0].clone()
}

/// Returns all output of `vnvme stats`.
pub fn all_stats(control: &str) -> serde_json::Value {
    let stats = std::process::Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["stats", "--json", "--control", control])
        .output()
        .unwrap();
    serde_json::from_slice(&stats.stdout).unwrap()
}
