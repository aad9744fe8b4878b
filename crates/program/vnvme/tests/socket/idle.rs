//! Idle, then one command, again and again: no wake-up is lost between EventIdx, the host's store
//! and the worker's sleep.

use crate::common::{Daemon, Lone, TestDir, stats, text};

const ROUNDS: u64 = 10_000;

/// Rounds with pauses that begin before the worker's last look and end long after it fell asleep.
fn rounds(window: &str, more: &[&str]) {
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("control"));
    let mut args = vec!["--idle-window", window, "--control", &control];
    args.extend(more);
    args.push("null://1G");
    let daemon = Daemon::serve(&test_dir, &args);
    let mut client = Lone::open(&format!("vfio-user://{}/1", text(&test_dir.socket())));
    for round in 0..ROUNDS {
        if !client.read(round % 1000) {
            daemon.kill();
            panic!("round {round} of window {window}: the wake-up was lost");
        }
        client.pause();
    }
    let stats = stats(&control);
    let io = &stats["queues"][1];
    assert!(io["commands"].as_u64().unwrap() >= ROUNDS, "{stats}");
    // Otherwise the test has shown nothing.
    assert!(
        io["arms"].as_u64().unwrap() > ROUNDS / 100,
        "the worker hardly slept: {stats}"
    );
    if !more.is_empty() {
        let moves = stats["moves"].as_u64();
        assert!(moves.unwrap() > 100, "the queue hardly moved: {stats}");
    }
    drop(client);
    daemon.end();
}

#[test]
fn sleeping_worker_is_woken_every_time() {
    rounds("0", &[]);
}

#[test]
fn polling_worker_is_woken_every_time() {
    rounds("50", &[]);
}

/// The queue migrates between the workers meanwhile.
#[test]
fn two_sleeping_workers_are_woken_every_time() {
    rounds("0", &["--workers", "2", "--spread", "stir"]);
}

#[test]
fn two_polling_workers_are_woken_every_time() {
    rounds("50", &["--workers", "2", "--spread", "stir"]);
}
