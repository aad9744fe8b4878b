//! Chaos: hostile guests, operations of every kind and kills of every process at the same time,
//! while one well-behaved guest writes and reads its disk.
//!
//! `VNVME_CHAOS_KILLS` and `VNVME_CHAOS_SEED` lengthen and vary it: a kill takes at least 3 s. The
//! seed determines what is chosen, not when it happens.

use crate::common::*;
use crate::failure_domains::{command, controller, domain_outliving};
use crate::keeper_ends::standby_of;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use test_host::Command;

/// Number of hostile guests, each with a disk of its own.
const HOSTILE: usize = 7;
const DEFAULT_KILLS: u64 = 4;
/// Least time between two kills.
const BETWEEN_KILLS: Duration = Duration::from_secs(3);
const BLOCKS: u64 = 256;
const BLOCK: usize = 4096;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn choose<'a, T>(&mut self, among: &'a [T]) -> &'a T {
        &among[self.below(among.len() as u64) as usize]
    }
}

fn variable(name: &str, default: u64) -> u64 {
    let value = std::env::var(name).ok();
    value.map_or(default, |value| value.parse().unwrap())
}

/// One connection of a hostile guest. Where the daemon closes it, or is killed, the caller makes
/// another one.
fn attack(socket: &Path, random: &mut Random) {
    match random.below(6) {
        // Commands of any kind with any fields, and doorbells beyond the queues.
        0 => {
            let mut host = Host::up(socket);
            for _ in 0..64 {
                let mut entry = Command::new(random.next() as u8, random.below(4) as u32);
                for n in 6..16 {
                    entry = entry.dw(n, random.next() as u32);
                }
                let qid = random.below(2) as u16;
                host.push(qid, &entry).unwrap();
                host.ring(qid, false, random.below(80) as u32).unwrap();
                let _ = host.poll(qid);
            }
        }
        // Memory that comes and goes.
        1 => {
            let mut host = Host::up(socket);
            let more = memfd(1 << 20);
            for n in 0..200 {
                let iova = 1 << 40 | random.below(64) << 20;
                let _ = host.link.map(iova, 1 << 20, more.as_fd());
                if n % 16 == 0 {
                    more.set_len(random.below(1 << 20)).unwrap();
                    more.set_len(1 << 20).unwrap();
                }
            }
        }
        // No protocol at all.
        2 => {
            let mut stream = UnixStream::connect(socket).unwrap();
            let bytes: Vec<u8> = (0..4096).map(|_| random.next() as u8).collect();
            stream.write_all(&bytes).unwrap();
        }
        // A disk that looks like an image.
        3 => {
            let mut host = Host::up(socket);
            let mut block = pattern(random.next(), BLOCK);
            block[..4].copy_from_slice(random.choose(&[b"QFI\xfb", b"KDMV", b"LUKS"]).as_slice());
            host.write(1, 0, &block);
        }
        // Resets with requests in flight.
        4 => {
            let mut host = Host::up(socket);
            for _ in 0..20 {
                host.write_register(0x14, &0u32.to_le_bytes());
                host.enable();
                host.create_queues(1, None);
                let lba = random.below(8);
                let read = host.transfer(nvme::NvmOpcode::READ, 1, lba, BLOCK, 0x10_0000);
                host.submit(1, read);
            }
        }
        // Format, Sanitize, Namespace Management and Firmware, without waiting for an answer.
        _ => {
            let mut host = Host::up(socket);
            for opcode in [0x80, 0x84, 0x0d, 0x15, 0x11, 0x10, 0x81, 0x09, 0x0c] {
                let entry = Command::new(opcode, 1).dw(10, random.below(8) as u32);
                host.push(0, &entry).unwrap();
            }
            host.ring(0, false, random.below(32) as u32).unwrap();
        }
    }
}

/// Returns the processes of the daemon's group, by what they do.
fn processes(group: u32) -> Vec<(&'static str, Pid)> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // Fields after the name: state, parent, process group (proc_pid_stat(5)).
        let fields = stat.rsplit(") ").next().unwrap_or_default();
        let mut fields = fields.split(' ');
        let is_dead = fields.next() == Some("Z");
        if is_dead || fields.nth(1).and_then(|field| field.parse().ok()) != Some(group) {
            continue;
        }
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line);
        let role = match () {
            // A stand-by that has become the keeper has its arguments still.
            () if line.contains("\0keep\0") => "keeper",
            () if line.contains("start-receivers") => "spawner",
            () if line.contains("receive-descriptors") => "receiver",
            () if line.contains("check-paths") => "checker",
            () => "serving",
        };
        found.extend(Pid::from_raw(pid).map(|pid| (role, pid)));
    }
    found
}

/// The well-behaved guest: each block that it reads is the last one that it has written there.
struct Neighbour {
    host: Host,
    written: BTreeMap<u64, u64>,
    longest_read: Duration,
    longest_command: Duration,
}

impl Neighbour {
    fn turn(&mut self, random: &mut Random) {
        let (block, seed) = (random.below(BLOCKS), random.next());
        let began = Instant::now();
        self.host.write(1, block * 8, &pattern(seed, BLOCK));
        self.written.insert(block, seed);
        let block = random.below(BLOCKS);
        if self.written.contains_key(&block) {
            self.check(block);
        }
        self.longest_command = self.longest_command.max(began.elapsed());
        let began = Instant::now();
        // CSTS: ready, without a fatal state.
        assert_eq!(self.host.read32(0x1c) & 0b11, 1);
        self.longest_read = self.longest_read.max(began.elapsed());
    }

    fn check(&mut self, block: u64) {
        let seed = self.written[&block];
        let read = self.host.read(1, block * 8, BLOCK);
        assert!(read == pattern(seed, BLOCK), "block {block}");
    }
}

#[test]
fn neighbour_keeps_its_disk_among_hostile_guests_operations_and_kills() {
    let seed = variable("VNVME_CHAOS_SEED", 1);
    let kills = variable("VNVME_CHAOS_KILLS", DEFAULT_KILLS);
    let test_dir = TestDir::new();
    let good = test_dir.disk("good.raw", BLOCKS * BLOCK as u64);
    let names: Vec<String> = (0..HOSTILE).map(|n| format!("bad{n}")).collect();
    let allow = text(test_dir.path("x").parent().unwrap());
    let mut disks = format!("[process]\nallow = [\"{allow}\"]\n");
    disks += &controller(&test_dir, "good", &[&good], "");
    for name in &names {
        let file = test_dir.disk(&format!("{name}.raw"), 1 << 20);
        disks += &controller(&test_dir, name, &[&file], "");
    }
    let spare = ["spare0", "spare1"].map(|name| test_dir.disk(name, 1 << 20));
    let added = format!("socket={}", text(&test_dir.path("added.sock")));
    let domain = domain_outliving(test_dir, &disks);
    let mut neighbour = Neighbour {
        host: domain.host("good"),
        written: BTreeMap::new(),
        longest_read: Duration::ZERO,
        longest_command: Duration::ZERO,
    };
    let operations: [&[&str]; 20] = [
        &["attach", "bad0", &spare[0]],
        &["detach", "bad0", "2"],
        &["attach", "good", &spare[1]],
        &["detach", "good", "2"],
        &["add", "controller", &added, "mem://1M"],
        &["remove", "added", "--force"],
        &["remove", "bad1", "--force"],
        &["resize", "bad2", "2M"],
        &["limits", "bad3", "--iops", "1000"],
        &["limits", "good", "--weight", "5"],
        &["on-error", "good", "--on-read-error", "retry"],
        &["on-error", "bad4", "--on-write-error", "stop"],
        &["accept", "bad5"],
        &["resume", "bad6"],
        &["reload"],
        &["save"],
        &["upgrade"],
        &["list"],
        &["stats"],
        &["metrics"],
    ];
    let (stop, turns) = (&AtomicBool::new(false), &AtomicU64::new(0));
    let group = domain.daemon.pid();
    let domain = &domain;
    let (attacks, results, killed) = std::thread::scope(|scope| {
        let attackers = names.iter().enumerate().map(|(n, name)| {
            let socket = domain.test_dir.path(&format!("{name}.sock"));
            let mut random = Random(seed ^ (n as u64 + 1) << 32);
            let attacker = std::thread::Builder::new().name("attacker".into());
            let run = move || {
                let mut attacks = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    let attack = AssertUnwindSafe(|| attack(&socket, &mut random));
                    // A refusal, and the end of the process, are a panic of the host.
                    if catch_unwind(attack).is_err() {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    attacks += 1;
                }
                attacks
            };
            attacker.spawn_scoped(scope, run).unwrap()
        });
        let attackers: Vec<_> = attackers.collect();
        let operator = scope.spawn(|| {
            let mut random = Random(seed ^ 0xa11);
            let mut results: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
            while !stop.load(Ordering::Relaxed) {
                let words = *random.choose(&operations);
                let (code, said) = command(domain, words);
                assert!(!said.contains("panicked"), "{words:?}: {said}");
                let counts = results.entry(words[0]).or_default();
                let count = if code == Some(0) {
                    &mut counts.0
                } else {
                    &mut counts.1
                };
                *count += 1;
            }
            results
        });
        let killer = scope.spawn(|| {
            let mut random = Random(seed ^ 0x4111);
            let mut killed: BTreeMap<&str, u64> = BTreeMap::new();
            for _ in 0..kills {
                std::thread::sleep(BETWEEN_KILLS);
                // The neighbour is served between two kills, however busy the machine is.
                let before = turns.load(Ordering::Relaxed);
                eventually("the neighbour is served", || {
                    turns.load(Ordering::Relaxed) > before + 1
                });
                let all = processes(group);
                let mut roles: Vec<&str> = all.iter().map(|(role, _)| *role).collect();
                roles.sort_unstable();
                roles.dedup();
                let role = *random.choose(&roles);
                // A keeper that dies without a complete stand-by takes with it what it keeps
                // (docs/survival.md).
                if role == "keeper" {
                    let mut keeper = None;
                    eventually("the process knows its keeper", || {
                        let stats = domain.client.stats().ok();
                        keeper = stats.and_then(|stats| stats.measured.process.keeper);
                        keeper.is_some_and(|keeper| standby_of(keeper).is_some())
                    });
                }
                let of_role: Vec<Pid> = all
                    .iter()
                    .filter(|one| one.0 == role)
                    .map(|one| one.1)
                    .collect();
                let _ = kill_process(*random.choose(&of_role), Signal::KILL);
                *killed.entry(role).or_default() += 1;
            }
            killed
        });
        // Attackers' panics are no news; all others are printed.
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if std::thread::current().name() != Some("attacker") {
                hook(panic);
            }
        }));
        let mut random = Random(seed);
        let served = catch_unwind(AssertUnwindSafe(|| {
            while !killer.is_finished() {
                neighbour.turn(&mut random);
                turns.fetch_add(1, Ordering::Relaxed);
            }
        }));
        stop.store(true, Ordering::Relaxed);
        assert!(
            served.is_ok(),
            "the neighbour has lost its disk: {:#?}",
            domain
                .daemon
                .log()
                .iter()
                .rev()
                .take(60)
                .collect::<Vec<_>>()
        );
        let attacks: u64 = attackers.into_iter().map(|one| one.join().unwrap()).sum();
        (attacks, operator.join().unwrap(), killer.join().unwrap())
    });
    for block in neighbour.written.keys().copied().collect::<Vec<_>>() {
        neighbour.check(block);
    }
    println!(
        "seed {seed}: {} turns of the neighbour, longest register read {:?}, longest write and \
         read {:?}; {attacks} attacks; killed: {killed:?}; operations (done, refused): {results:?}",
        turns.load(Ordering::Relaxed),
        neighbour.longest_read,
        neighbour.longest_command,
    );
    assert_eq!(killed.values().sum::<u64>(), kills);
    assert!(attacks > HOSTILE as u64);
    assert!(results.values().any(|(done, _)| *done > 0));
}
