//! A controller on a thread of its own that sleeps: each command wakes it.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

use controller::{Controller, ControllerConfig, NamespaceConfig};
use driver::{Device, DmaBuffer, Options, QueueOptions, QueuePair};
use in_process::Host;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::{Io, IoOptions, NullOptions, NullVolume};
use worker::IdleWindow;

const ROUNDS: u64 = 10_000;
/// A command that takes longer was not seen.
const LOST: Duration = Duration::from_secs(60);
/// The driver looks at the controller now and then while it waits: a register read, which wakes a
/// sleeping worker and so would hide a lost wake-up.
const NEVER: Duration = Duration::from_secs(24 * 3600);

fn host(idle_window: IdleWindow) -> Host {
    let null = NullOptions {
        size: 1 << 30,
        ..NullOptions::default()
    };
    let namespace = NamespaceConfig {
        block_size: 512,
        nguid: [1; 16],
        eui64: [1; 8],
        ..NamespaceConfig::new(1, Arc::new(NullVolume::new(null).unwrap()))
    };
    let io = Io::new(IoOptions::default());
    let config = ControllerConfig::default();
    let controller = Controller::new(0, config, vec![namespace], &io).unwrap();
    Host::with_idle_window(controller, io, idle_window).unwrap()
}

/// Reads a block, polling. `false`: the command was not seen.
fn read(queue: &mut QueuePair, buffer: &mut Option<DmaBuffer>, lba: u64) -> bool {
    let given = buffer.take().unwrap();
    queue.submit_read(lba, 1, given, lba).unwrap();
    queue.ring();
    let start = Instant::now();
    while buffer.is_none() && start.elapsed() < LOST {
        queue.poll(|completion| {
            completion.result.unwrap();
            *buffer = completion.buffer;
        });
    }
    buffer.is_some()
}

fn rounds(window: Duration) {
    let make = move || Ok::<_, Infallible>(host(IdleWindow::Fixed(window)));
    let transport = in_process::spawn(make).unwrap();
    let options = Options {
        status_interval: NEVER,
        command_timeout: NEVER,
        ..Options::default()
    };
    let device = Device::open(transport.clone(), options).unwrap();
    let options = QueueOptions {
        depth: 4,
        entries: 5,
        interrupts: false,
        ..QueueOptions::default()
    };
    let mut queue = device.queue(1, options).unwrap();
    let mut buffer = Some(device.allocate(4096).unwrap());
    let mut pause = 1u64;
    for round in 0..ROUNDS {
        if !read(&mut queue, &mut buffer, round % 1000) {
            // Dropping them would wait for the command.
            std::mem::forget((queue, device));
            panic!("round {round}: the wake-up was lost");
        }
        pause = pause
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        // Mostly when the worker is about to fall asleep, sometimes long after that.
        let nanos = match round % 8 {
            0 => pause >> 47,
            _ => window.as_nanos() as u64 + (pause >> 51),
        };
        let until = Instant::now() + Duration::from_nanos(nanos);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
    }
    let arms = transport.with(|host| host.controller().stats().queues[1].arms.get());
    // Else nothing was shown.
    let arms = arms.unwrap();
    assert!(arms > ROUNDS / 100, "the worker hardly slept: {arms}");
}

#[test]
fn sleeping_worker_is_woken_every_time() {
    rounds(Duration::ZERO);
}

#[test]
fn polling_worker_is_woken_every_time() {
    rounds(Duration::from_micros(50));
}
