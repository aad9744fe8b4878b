//! Idle, then one command, again and again: no wake-up is lost between EventIdx, the host's store and the worker's sleep.

use std::process::Command;
use std::time::{Duration, Instant};

use driver::{QueueOptions, Target};

use crate::common::{Daemon, Place, text};

const ROUNDS: u64 = 10_000;
/// A command that takes longer was not seen.
const LOST: Duration = Duration::from_secs(10);
/// The driver looks at the controller now and then while it waits: a register read, which wakes a sleeping worker and so
/// would hide a lost wake-up.
const NEVER: Duration = Duration::from_secs(24 * 3600);

/// Rounds with pauses that begin before the worker's last look and end long after it fell asleep.
fn rounds(window: &str, more: &[&str]) {
    let place = Place::new();
    let control = text(&place.path("control"));
    let mut args = vec!["--idle-window", window, "--control", &control];
    args.extend(more);
    args.push("null://1G");
    let daemon = Daemon::serve(&place, &args);
    let mut target = Target::parse(&format!("vfio-user://{}/1", text(&place.socket()))).unwrap();
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
    let mut queue = device.queue(1, options).unwrap();
    let mut buffer = Some(device.allocate(4096).unwrap());
    let mut pause = 1u64;
    let mut lost = None;
    'rounds: for round in 0..ROUNDS {
        queue
            .submit_read(round % 1000, 1, buffer.take().unwrap(), round)
            .unwrap();
        queue.ring();
        let start = Instant::now();
        while buffer.is_none() {
            queue.poll(|completion| {
                assert_eq!(completion.user_data, round);
                completion.result.unwrap();
                buffer = completion.buffer;
            });
            if start.elapsed() > LOST {
                lost = Some(round);
                break 'rounds;
            }
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
    if let Some(round) = lost {
        // First the daemon: the driver would wait for one that does not wake up.
        daemon.kill();
        panic!("round {round} of window {window}: the wake-up was lost");
    }
    let stats = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["stats", "--json", &control])
        .output()
        .unwrap();
    let stats: serde_json::Value = serde_json::from_slice(&stats.stdout).unwrap();
    let io = &stats["controllers"][0]["queues"][1];
    assert!(io["commands"].as_u64().unwrap() >= ROUNDS, "{stats}");
    // Else nothing was shown.
    assert!(
        io["arms"].as_u64().unwrap() > ROUNDS / 100,
        "the worker hardly slept: {stats}"
    );
    if !more.is_empty() {
        let moves = &stats["controllers"][0]["moves"];
        assert!(
            moves.as_u64().unwrap() > 100,
            "the queue hardly moved: {stats}"
        );
    }
    drop(queue);
    drop(device);
    daemon.end();
}

#[test]
fn a_worker_that_sleeps_at_once_is_woken_every_time() {
    rounds("0", &[]);
}

#[test]
fn a_worker_that_polls_first_is_woken_every_time() {
    rounds("50", &[]);
}

/// The queue goes from one worker to the other meanwhile.
#[test]
fn two_workers_that_sleep_at_once_are_woken_every_time() {
    rounds("0", &["--workers", "2", "--spread", "stir"]);
}

#[test]
fn two_workers_that_poll_first_are_woken_every_time() {
    rounds("50", &["--workers", "2", "--spread", "stir"]);
}
