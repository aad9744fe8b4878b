//! A zoned namespace with queues on two workers that migrate repeatedly, while its process is
//! killed during appends and resets; and a zoned namespace that disks of a subsystem share.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use control::Client;
use nvme::cmd::zone::{SendCdw13, ZoneDescriptor, Zsa};
use nvme::{Command, NvmOpcode, Status};
use rustix::process::Signal;
use zerocopy::FromBytes;

use crate::common::*;
use crate::keeper::{kill_serving, start};

const QUEUES: u16 = 4;
/// Commands in flight on each.
const DEPTH: usize = 8;
/// Bytes of each append, and of a zone.
const LEN: usize = 4096;
const ZONE: u64 = 1 << 20;
const ZONES: u64 = 8;
/// Blocks of 512 bytes.
const BLOCKS: u64 = ZONE / 512;
/// Where data of writes begins in guest memory.
const WRITES: u64 = 4 << 20;
/// Until a queue has moved from one worker to the other.
const LIMIT: Duration = Duration::from_secs(120);

fn reset(zone: u64) -> Command {
    let mut command = Command::new(NvmOpcode::ZONE_MANAGEMENT_SEND.0, 0, 1);
    command.set_slba(zone * BLOCKS);
    let cdw13 = SendCdw13::new().with_zsa(Zsa::RESET);
    command.cdw13 = cdw13.into_bits().into();
    command
}

/// Fills a zone by appends on all queues, and resets another one meanwhile; `between` is called
/// once, with many of them in flight. Returns which append is where.
fn fill(host: &mut Host, zone: u64, seed: u64, between: impl FnOnce()) -> BTreeMap<u64, u64> {
    let count = ZONE / LEN as u64;
    let mut free: Vec<u64> = (0..u64::from(QUEUES) * DEPTH as u64).collect();
    let mut waiting = BTreeMap::new();
    let mut places = BTreeMap::new();
    let (mut sent, mut between) = (0, Some(between));
    let emptied = host.submit(1, reset((zone + 1) % ZONES));
    waiting.insert((1, emptied), None);
    while (places.len() as u64) < count || !waiting.is_empty() {
        for qid in 1..=QUEUES {
            let queued = waiting.keys().filter(|(q, _)| *q == qid).count();
            if sent < count
                && queued < DEPTH
                && let Some(slot) = free.pop()
            {
                let at = WRITES + slot * LEN as u64;
                let data = pattern(seed + sent, LEN);
                host.ram.write_all_at(&data, at).unwrap();
                let start = zone * BLOCKS;
                let append = host.transfer(NvmOpcode::ZONE_APPEND, 1, start, LEN, at);
                let cid = host.submit(qid, append);
                waiting.insert((qid, cid), Some((sent, slot)));
                sent += 1;
            }
        }
        if sent == count / 2
            && let Some(between) = between.take()
        {
            between();
        }
        for qid in 1..=QUEUES {
            while let Some(done) = host.try_completion(qid) {
                assert_eq!(done.status(), Status::SUCCESS);
                let of = waiting.remove(&(qid, done.cid.get())).unwrap();
                if let Some((number, slot)) = of {
                    let lba = u64::from(done.dw1.get()) << 32 | u64::from(done.dw0.get());
                    let before = places.insert(lba, number);
                    assert!(before.is_none(), "LBA {lba} twice");
                    free.push(slot);
                }
            }
        }
    }
    places
}

/// Checks that every place of the zone belongs to one append, and has its data.
fn check(host: &mut Host, zone: u64, seed: u64, places: &BTreeMap<u64, u64>) {
    let wanted = (zone * BLOCKS..(zone + 1) * BLOCKS).step_by(LEN / 512);
    assert!(places.keys().copied().eq(wanted), "zone {zone}");
    for (lba, number) in places {
        let found = host.read(1, *lba, LEN);
        assert!(found == pattern(seed + number, LEN), "LBA {lba}");
    }
}

#[test]
fn zones_survive_kills_under_appends_and_resets() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", ZONES * ZONE);
    let table = text(&test_dir.path("disk.zones"));
    let volume = format!("{disk}?zone-size=1M&zone-table={table}");
    let (socket, control) = (text(&test_dir.socket()), text(&test_dir.path("control")));
    let args = [
        "serve",
        "--socket",
        &socket,
        "--keeper",
        "process",
        "--workers",
        "2",
        "--spread",
        "stir",
        "--control",
        &control,
        &volume,
    ];
    let daemon = start(&test_dir, &args);
    let mut host = Host::attach(&test_dir.socket());
    host.enable();
    host.use_shadow_doorbells();
    host.create_queues(QUEUES, None);
    let mut moves = 0;
    let began = Instant::now();
    for round in 0.. {
        // On a crowded machine none of the first processes may live until a queue moves.
        if round >= 3 * ZONES && (moves > 0 || began.elapsed() > LIMIT) {
            break;
        }
        let (zone, seed) = (round % ZONES, round * 1_000_003);
        let places = fill(&mut host, zone, seed, || {
            if round % 2 == 1 {
                let told = stats(&control)["moves"].as_u64();
                moves += told.unwrap();
                kill_serving(&daemon);
            }
        });
        check(&mut host, zone, seed, &places);
        let next = (zone + 1) % ZONES;
        let emptied = host.read(1, next * BLOCKS, LEN);
        assert!(emptied == vec![0; LEN], "zone {next} was reset");
    }
    assert!(moves > 0, "no queue has moved");
    drop(host);
    daemon.end();
}

// ---- disks of one subsystem

/// Two disks, `a` and `b`, on two workers; `zones` are the lines of each.
fn two_disks(test_dir: &TestDir, disk: &str, zones: [&str; 2]) -> String {
    let mut config = String::from("[process]\nworkers = 2\n");
    let table = text(&test_dir.path("disk.zones"));
    for ((name, cntlid), zones) in [("a", 1), ("b", 2)].into_iter().zip(zones) {
        config += &format!(
            "[[controller]]\nname = \"{name}\"\nsocket = {:?}\nsubsystem = \"s\"\n\
             cntlid = {cntlid}\n[[controller.namespace]]\nvolume = {disk:?}\n\
             zone-table = {table:?}\n{zones}\n",
            text(&test_dir.path(name)),
        );
    }
    let file = test_dir.path("vnvme.toml");
    fs::write(&file, config).unwrap();
    text(&file)
}

fn send(zsa: Zsa, zone: u64) -> Command {
    let mut command = Command::new(NvmOpcode::ZONE_MANAGEMENT_SEND.0, 0, 1);
    command.set_slba(zone * BLOCKS);
    command.cdw13 = SendCdw13::new().with_zsa(zsa).into_bits().into();
    command
}

fn run(host: &mut Host, command: Command) -> Status {
    host.run(1, command).status().without_flags()
}

/// A block of data is appended to a zone: where it went to.
fn append(host: &mut Host, zone: u64, byte: u8) -> Result<u64, Status> {
    host.ram.write_all_at(&[byte; LEN], WRITES).unwrap();
    let start = zone * BLOCKS;
    let command = host.transfer(NvmOpcode::ZONE_APPEND, 1, start, LEN, WRITES);
    let done = host.run(1, command);
    done.status().without_flags().into_result()?;
    Ok(u64::from(done.dw1.get()) << 32 | u64::from(done.dw0.get()))
}

/// Returns the state and write pointer of a zone, as this host reads them.
fn zone(host: &mut Host, number: u64) -> (u8, u64) {
    let at = WRITES + (1 << 20);
    let mut command = Command::new(NvmOpcode::ZONE_MANAGEMENT_RECEIVE.0, 0, 1);
    command.set_slba(number * BLOCKS);
    command.cdw12 = (128 / 4 - 1).into();
    command.cdw13 = (1 << 16).into(); // partial
    command.set_prps(RAM_BASE + at, 0);
    assert_eq!(run(host, command), Status::SUCCESS);
    let mut report = [0; 128];
    host.ram.read_exact_at(&mut report, at).unwrap();
    let zone = ZoneDescriptor::read_from_bytes(&report[64..]).unwrap();
    assert_eq!(zone.zslba.get(), number * BLOCKS);
    (zone.state(), zone.wp.get())
}

const EMPTY: u8 = 1;
const IMPLICIT: u8 = 2;
const EXPLICIT: u8 = 3;
const CLOSED: u8 = 4;

const GEOMETRY: &str = "zone-size = \"1M\"\nmax-open-zones = 2\nmax-active-zones = 4";

/// Changes of zones by one host are seen by the other one, also when one of them disconnects. The
/// next process finds them in the table.
#[test]
fn zoned_disk_is_shared_by_two_hosts() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", ZONES * ZONE);
    let file = two_disks(&test_dir, &disk, [GEOMETRY; 2]);
    let control = text(&test_dir.path("control"));
    let allow = text(test_dir.path("x").parent().unwrap());
    let args = ["daemon", "--control", &control, "--allow", &allow];
    let args = [&args[..], &["--config", &file]].concat();
    let daemon = Daemon::spawn(&args);
    daemon.wait_listening(&test_dir.path("b"));
    let up = |name: &str| Host::up(&test_dir.path(name));
    let (mut a, mut b) = (up("a"), up("b"));
    let step = (LEN / 512) as u64;
    for turn in 0..8 {
        let host = if turn % 2 == 0 { &mut a } else { &mut b };
        assert_eq!(append(host, 0, turn as u8 + 1), Ok(turn * step));
    }
    for (host, turn) in [(&mut a, 7), (&mut b, 6)] {
        assert_eq!(host.read(1, turn * step, LEN), [turn as u8 + 1; LEN]);
        assert_eq!(zone(host, 0), (IMPLICIT, 8 * step));
    }
    // Limits are of both together.
    assert_eq!(run(&mut a, send(Zsa::OPEN, 1)), Status::SUCCESS);
    assert_eq!(run(&mut b, send(Zsa::OPEN, 2)), Status::SUCCESS);
    assert_eq!(append(&mut a, 3, 1), Err(Status::TOO_MANY_OPEN_ZONES));
    assert_eq!(run(&mut a, send(Zsa::CLOSE, 2)), Status::SUCCESS);
    assert_eq!(append(&mut b, 3, 1), Ok(3 * BLOCKS));
    // A guest that disconnects, and one that connects, change nothing.
    drop(b);
    let mut b = up("b");
    let before = [
        (CLOSED, 8 * step),
        (EXPLICIT, BLOCKS),
        (CLOSED, 2 * BLOCKS),
        (IMPLICIT, 3 * BLOCKS + step),
    ];
    let all = |host: &mut Host| [0, 1, 2, 3].map(|number| zone(host, number));
    assert_eq!(all(&mut b), before);
    // The removal of a disk leaves the other one its zones.
    let client = Client::new(vec![test_dir.path("control")]).unwrap();
    client.remove("b", true).unwrap();
    assert_eq!(all(&mut a), before);
    assert_eq!(append(&mut a, 3, 9), Ok(3 * BLOCKS + step));
    drop((a, b));
    daemon.signal(Signal::KILL);
    daemon.wait();
    let daemon = Daemon::spawn(&args);
    daemon.wait_listening(&test_dir.path("b"));
    let (mut a, mut b) = (up("a"), up("b"));
    let after = [
        (CLOSED, 8 * step),
        (EMPTY, BLOCKS),
        (EMPTY, 2 * BLOCKS),
        (CLOSED, 3 * BLOCKS + 2 * step),
    ];
    assert_eq!(all(&mut b), after);
    assert_eq!(b.read(1, 3 * BLOCKS + step, LEN), [9; LEN]);
    assert_eq!(run(&mut b, send(Zsa::RESET, 0)), Status::SUCCESS);
    assert_eq!(zone(&mut a, 0), (EMPTY, 0));
    assert_eq!(a.read(1, 0, LEN), [0; LEN]);
    drop((a, b));
    daemon.end();
}

/// Both append to one zone as fast as they can, and one of them resets the other zones meanwhile.
#[test]
fn two_hosts_append_concurrently() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", ZONES * ZONE);
    let file = two_disks(&test_dir, &disk, ["zone-size = \"1M\""; 2]);
    let daemon = Daemon::spawn(&["serve", "--config", &file]);
    daemon.wait_listening(&test_dir.path("b"));
    let mut hosts = ["a", "b"].map(|name| Host::up(&test_dir.path(name)));
    let count = ZONE / LEN as u64;
    for round in 0..2 * ZONES {
        let (number, next) = (round % ZONES, (round + 1) % ZONES);
        let places: Vec<BTreeMap<u64, u8>> = std::thread::scope(|scope| {
            let threads = hosts.iter_mut().zip(1u8..).map(|(host, who)| {
                scope.spawn(move || {
                    let mut places = BTreeMap::new();
                    for turn in 0..count / 2 {
                        let byte = who + 2 * (turn % 100) as u8;
                        places.insert(append(host, number, byte).unwrap(), byte);
                        if turn == 20 * u64::from(who) {
                            // Concurrent resets of a zone may be interrupted, and have to be
                            // repeated then.
                            let ended = run(host, send(Zsa::RESET, next));
                            let known = [Status::SUCCESS, Status::COMMAND_INTERRUPTED];
                            assert!(known.contains(&ended), "{ended}");
                        }
                    }
                    places
                })
            });
            let threads: Vec<_> = threads.collect();
            let joined = threads.into_iter().map(|thread| thread.join().unwrap());
            joined.collect()
        });
        let all: BTreeMap<u64, u8> = places.into_iter().flatten().collect();
        let wanted = (number * BLOCKS..(number + 1) * BLOCKS).step_by(LEN / 512);
        assert!(all.keys().copied().eq(wanted), "zone {number}");
        for (turn, (lba, byte)) in all.into_iter().enumerate() {
            let found = hosts[turn % 2].read(1, lba, LEN);
            assert!(found == [byte; LEN], "LBA {lba}");
        }
        let emptied = hosts[0].read(1, next * BLOCKS, LEN);
        assert!(emptied == [0; LEN], "zone {next} was reset");
    }
    drop(hosts);
    daemon.end();
}

/// Zones of one namespace that are not the same are none that could be shared.
#[test]
fn disks_with_different_zones_are_refused() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", ZONES * ZONE);
    for other in [
        "zone-size = \"2M\"",
        "zone-size = \"1M\"\nmax-open-zones = 3\nmax-active-zones = 4",
        "zone-size = \"1M\"\nzone-capacity = \"512K\"",
    ] {
        let file = two_disks(&test_dir, &disk, [GEOMETRY, other]);
        let ended = Daemon::spawn(&["serve", "--config", &file]).wait();
        assert_eq!(ended.status.code(), Some(1));
        let said = ended.log.join("\n");
        assert!(said.contains("namespace 1 differs"), "{said}");
    }
    // For other hosts there are none.
    let file = test_dir.path("vnvme.toml");
    let config = format!(
        "[[nvme-tcp]]\nlisten = \"127.0.0.1:0\"\n[[nvme-tcp.namespace]]\nvolume = {disk:?}\n\
         zone-size = \"1M\"\n"
    );
    fs::write(&file, config).unwrap();
    let ended = Daemon::spawn(&["serve", "--config", &text(&file)]).wait();
    assert_eq!(ended.status.code(), Some(1));
    let said = ended.log.join("\n");
    assert!(
        said.contains("a zoned namespace is not for other hosts"),
        "{said}"
    );
}
