//! A zoned namespace with queues on two workers, moved from one to the other all the time, whose
//! process is killed under appends and resets.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use nvme::cmd::zone::{SendCdw13, Zsa};
use nvme::{Command, NvmOpcode, Status};

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

/// Every place of the zone is one append's, whose data is there.
fn check(host: &mut Host, zone: u64, seed: u64, places: &BTreeMap<u64, u64>) {
    let wanted = (zone * BLOCKS..(zone + 1) * BLOCKS).step_by(LEN / 512);
    assert!(places.keys().copied().eq(wanted), "zone {zone}");
    for (lba, number) in places {
        let found = host.read(1, *lba, LEN);
        assert!(found == pattern(seed + number, LEN), "LBA {lba}");
    }
}

#[test]
fn appends_and_resets_of_two_workers_that_are_killed() {
    let place = Place::new();
    let disk = place.disk("disk.raw", ZONES * ZONE);
    let table = text(&place.path("disk.zones"));
    let volume = format!("{disk}?zone-size=1M&zone-table={table}");
    let (socket, control) = (text(&place.socket()), text(&place.path("control")));
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
    let daemon = start(&place, &args);
    let mut host = Host::attach(&place.socket());
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
