//! Queues of one controller on two workers, migrated repeatedly: no command is lost or completes
//! twice.

use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, Instant};

use driver::{DeviceTarget, QueueOptions};
use nvme::{NvmOpcode, Status};
use vfio_user::DmaUnmapping;

use crate::common::*;

const QUEUES: u16 = 6;
/// Commands in flight on each.
const DEPTH: u64 = 16;
/// Bytes of each.
const LEN: usize = 4096;
/// Where data of writes begins in guest memory, and that of reads.
const WRITES: u64 = 4 << 20;
const READS: u64 = 8 << 20;

fn counters(control: &str) -> serde_json::Value {
    let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["stats", "--json", "--control", control])
        .output()
        .unwrap();
    let all: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    all["controllers"][0].clone()
}

/// The place of a command, in blocks of `LEN`.
fn place_of(qid: u16, slot: u64) -> u64 {
    u64::from(qid) * DEPTH + slot
}

/// Submits one command for each place, all in flight together; each completes once.
fn load(host: &mut Host, opcode: NvmOpcode, base: u64, between: impl FnOnce(&mut Host)) {
    let mut waiting = Vec::new();
    for slot in 0..DEPTH {
        for qid in 1..=QUEUES {
            let at = place_of(qid, slot);
            let lba = at * (LEN / host.block) as u64;
            let command = host.transfer(opcode, 1, lba, LEN, base + at * LEN as u64);
            waiting.push((qid, host.submit(qid, command)));
        }
    }
    between(host);
    while !waiting.is_empty() {
        for qid in 1..=QUEUES {
            let mine = waiting.iter().any(|(q, _)| *q == qid);
            let completion = if mine {
                Some(host.completion(qid))
            } else {
                host.try_completion(qid)
            };
            let Some(completion) = completion else {
                continue;
            };
            let key = (qid, completion.cid.get());
            let at = waiting.iter().position(|waits| *waits == key);
            let at = at.unwrap_or_else(|| panic!("{key:?} completed twice, or never asked for"));
            waiting.swap_remove(at);
            assert_eq!(completion.status(), Status::SUCCESS, "{key:?}");
        }
    }
}

fn write_all(host: &mut Host, seed: u64, between: impl FnOnce(&mut Host)) {
    for qid in 1..=QUEUES {
        for slot in 0..DEPTH {
            let at = place_of(qid, slot);
            let data = pattern(seed + at, LEN);
            let to = WRITES + at * LEN as u64;
            host.ram.write_all_at(&data, to).unwrap();
        }
    }
    load(host, NvmOpcode::WRITE, WRITES, between);
}

fn read_all(host: &mut Host, seed: u64) {
    load(host, NvmOpcode::READ, READS, |_| {});
    let mut data = vec![0; LEN];
    for qid in 1..=QUEUES {
        for slot in 0..DEPTH {
            let at = place_of(qid, slot);
            let from = READS + at * LEN as u64;
            host.ram.read_exact_at(&mut data, from).unwrap();
            assert!(data == pattern(seed + at, LEN), "queue {qid}, slot {slot}");
        }
    }
}

fn ready(host: &mut Host, shadow: bool) {
    host.enable();
    if shadow {
        host.use_shadow_doorbells();
    }
    host.create_queues(QUEUES, None);
}

fn stirred(test_dir: &TestDir, mapped: bool, rounds: u64) {
    let control = text(&test_dir.path("control"));
    // A volume that answers at once, or one that does not.
    let disk = if mapped {
        "mem://16M".to_owned()
    } else {
        test_dir.disk("disk.raw", 16 << 20)
    };
    let mut args = vec!["--workers", "2", "--spread", "stir", "--control", &control];
    args.extend(["--idle-window", "20"]);
    if mapped {
        args.extend(["--doorbells", "mapped"]);
    }
    args.push(&disk);
    let daemon = Daemon::serve(test_dir, &args);
    let connect = || {
        let mut host = Host::attach(&test_dir.socket());
        if mapped {
            host.map_doorbells();
        }
        ready(&mut host, !mapped);
        host
    };
    let mut host = connect();
    for round in 0..rounds {
        let seed = round * 1_000_003;
        // All of guest memory is unmapped under load, with rings and shadow doorbells, and mapped
        // again.
        write_all(&mut host, seed, |host| {
            if round % 3 == 1 {
                host.client.dma_unmap(DmaUnmapping::All).unwrap();
                host.map_ram();
            }
        });
        read_all(&mut host, seed);
        match round % 5 {
            // A reset with all commands in flight; data that was written before stays.
            2 => {
                for qid in 1..=QUEUES {
                    let command = host.transfer(NvmOpcode::READ, 1, 0, LEN, READS);
                    (0..DEPTH).for_each(|_| {
                        host.submit(qid, command);
                    });
                }
                ready(&mut host, !mapped);
                read_all(&mut host, seed);
            }
            // The VMM dies with everything in flight.
            4 => {
                for qid in 1..=QUEUES {
                    let command = host.transfer(NvmOpcode::READ, 1, 0, LEN, READS);
                    (0..DEPTH).for_each(|_| {
                        host.submit(qid, command);
                    });
                }
                drop(host);
                host = connect();
                read_all(&mut host, seed);
            }
            _ => {}
        }
    }
    let told = counters(&control);
    assert!(told["moves"].as_u64().unwrap() > rounds, "{told}");
    drop(host);
    daemon.end();
}

#[test]
fn queues_migrate_under_load_with_shadow_doorbells() {
    stirred(&TestDir::new(), false, 25);
}

#[test]
fn queues_migrate_under_load_with_mapped_doorbells() {
    stirred(&TestDir::new(), true, 25);
}

/// Commands that take about as long as a move waits for them: many moves are called off, some are
/// not.
#[test]
fn queues_with_slow_commands_lose_no_command() {
    for latency in ["40ms", "60ms"] {
        let test_dir = TestDir::new();
        let volume = format!("null://1G?latency={latency}");
        let args = ["--workers", "2", "--spread", "stir", &volume];
        let daemon = Daemon::serve(&test_dir, &args);
        let mut host = Host::attach(&test_dir.socket());
        ready(&mut host, true);
        for round in 0..12 {
            write_all(&mut host, round, |_| {});
            if round % 4 == 3 {
                ready(&mut host, true);
            }
        }
        drop(host);
        daemon.end();
    }
}

#[test]
fn writes_on_every_worker_are_durable_at_end() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 16 << 20);
    let args = ["--workers", "3", "--spread", "stir", &disk];
    let daemon = Daemon::serve(&test_dir, &args);
    let mut host = Host::attach(&test_dir.socket());
    ready(&mut host, true);
    for round in 0..10 {
        write_all(&mut host, round, |_| {});
    }
    daemon.end();
    for qid in 1..=QUEUES {
        for slot in 0..DEPTH {
            let at = place_of(qid, slot);
            let found = test_dir.bytes("disk.raw", at * LEN as u64, LEN);
            assert!(found == pattern(9 + at, LEN), "queue {qid}, slot {slot}");
        }
    }
}

/// A device below learns of a flush from each worker that the queues were on.
#[test]
fn every_worker_flushes_at_end() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 16 << 20);
    let path = |name| text(&test_dir.path(name));
    let (below, lower_control, control) = (path("below.sock"), path("below.ctl"), path("control"));
    let lower = ["serve", "--socket", &below, "--control", &lower_control];
    let lower = Daemon::spawn(&[&lower[..], &[&disk]].concat());
    lower.wait_listening(below.as_ref());
    // Blocks of another size than the device's rule the direct path out, which is for one worker.
    let url = format!("vfio-user://{below}/1?block-size=4096");
    let args = ["--workers", "2", "--spread", "stir", "--control", &control];
    let upper = Daemon::serve(&test_dir, &[&args[..], &[&url]].concat());
    let mut host = Host::attach(&test_dir.socket());
    host.block = 4096;
    ready(&mut host, true);
    eventually("queues move", || {
        write_all(&mut host, 1, |_| {});
        counters(&control)["moves"].as_u64().unwrap() > 0
    });
    let flushes = || {
        let told = counters(&lower_control);
        let io = told["queues"].as_array().unwrap();
        let io = io.iter().filter(|q| q["qid"] != 0);
        let commands: u64 = io.map(|q| q["commands"].as_u64().unwrap()).sum();
        let (reads, writes) = (told["host_reads"].as_u64(), told["host_writes"].as_u64());
        commands - reads.unwrap() - writes.unwrap()
    };
    assert_eq!(flushes(), 0);
    upper.end();
    assert_eq!(flushes(), 2);
    lower.end();
}

/// A worker copies as fast as it can, and another one is idle: half of the queues migrate.
#[test]
fn busy_worker_moves_queues_to_idle_worker() {
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("control"));
    let args = ["--workers", "2", "--control", &control, "mem://64M"];
    let daemon = Daemon::serve(&test_dir, &args);
    let target =
        DeviceTarget::parse(&format!("vfio-user://{}/1", text(&test_dir.socket()))).unwrap();
    let device = target.open().unwrap();
    let options = QueueOptions {
        depth: 8,
        interrupts: false,
        ..QueueOptions::default()
    };
    let mut queues: Vec<_> = (0..4).map(|_| device.queue(1, options).unwrap()).collect();
    let len = 256 << 10;
    for queue in &mut queues {
        for i in 0..8 {
            let buffer = device.allocate(len).unwrap();
            queue.submit_read(0, (len / 512) as u32, buffer, i).unwrap();
        }
        queue.ring();
    }
    let start = Instant::now();
    let mut next_look = start;
    loop {
        for queue in &mut queues {
            let mut back = Vec::new();
            queue.poll(|completion| {
                completion.result.unwrap();
                back.extend(
                    completion
                        .buffer
                        .map(|buffer| (completion.user_data, buffer)),
                );
            });
            if back.is_empty() {
                continue;
            }
            for (i, buffer) in back {
                queue.submit_read(0, (len / 512) as u32, buffer, i).unwrap();
            }
            queue.ring();
        }
        if Instant::now() < next_look {
            continue;
        }
        next_look = Instant::now() + Duration::from_millis(100);
        let told = counters(&control);
        let io = told["queues"].as_array().unwrap();
        let workers: Vec<u64> = io
            .iter()
            .filter(|q| q["qid"] != 0)
            .map(|q| q["worker"].as_u64().unwrap())
            .collect();
        if workers.contains(&0) && workers.contains(&1) {
            break;
        }
        // How busy a worker is shows late on a machine that is busy with something else.
        assert!(start.elapsed() < 4 * WAIT_TIMEOUT, "nothing moved: {told}");
    }
    drop(queues);
    drop(device);
    daemon.end();
}

/// A limit is no reason to look for another worker.
#[test]
fn queues_of_limited_volume_stay() {
    let test_dir = TestDir::new();
    let [control, config] = ["control", "vnvme.toml"].map(|name| text(&test_dir.path(name)));
    // A disk with the same volume and without a limit is served, too: its queues do migrate
    // meanwhile.
    let volumes = ["mem://16M", "mem://16M?iops=100000"];
    let sockets = ["free.sock", "limited.sock"].map(|name| test_dir.path(name));
    let tables = volumes.iter().zip(&sockets).map(|(volume, socket)| {
        format!(
            "[[controller]]\nsocket = {socket:?}\n[[controller.namespace]]\nvolume = {volume:?}\n"
        )
    });
    std::fs::write(&config, tables.collect::<String>()).unwrap();
    let args = [
        "serve",
        "--config",
        &config,
        "--workers",
        "2",
        "--spread",
        "stir",
    ];
    let daemon = Daemon::spawn(&[&args[..], &["--control", &control]].concat());
    let mut hosts = sockets.each_ref().map(|socket| {
        daemon.wait_listening(socket);
        let mut host = Host::attach(socket);
        ready(&mut host, true);
        host
    });
    let moves = || {
        let told = all_stats(&control);
        [0, 1].map(|at| told["controllers"][at]["moves"].as_u64().unwrap())
    };
    let mut round = 0;
    eventually("the queues of the disk without a limit move", || {
        for host in &mut hosts {
            write_all(host, round, |_| {});
        }
        round += 1;
        round >= 5 && moves()[0] > 10
    });
    assert_eq!(moves()[1], 0);
    drop(hosts);
    daemon.end();
}
