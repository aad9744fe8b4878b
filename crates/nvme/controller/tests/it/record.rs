//! What is recorded of commands: by namespace, kind and failure, and how long they took.

use crate::common::*;
use nvme::{Command, NvmOpcode, Status};
use probes::{Failure, IoKind, IoRecord, TIMED_EVERY};
use std::sync::Arc;
use volume::{FileOptions, FileVolume};

fn file() -> (tempfile::TempDir, Arc<dyn volume::Volume>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(8 << 20).unwrap();
    let volume = FileVolume::open(&path, FileOptions::default()).unwrap();
    (dir, Arc::new(volume))
}

fn with_record<T>(h: &Host, nsid: u32, look: impl Fn(&IoRecord) -> T) -> T {
    let stats = h.c.stats();
    let mut found = stats.namespaces().filter(|(n, _)| *n == nsid);
    look(found.next().expect("a record").1)
}

fn timed(h: &Host, nsid: u32, kind: IoKind) -> u64 {
    let count = |record: &IoRecord| record.latency(kind).map_or(0, |l| l.summary().count);
    with_record(h, nsid, count)
}

fn operations(h: &Host, nsid: u32) -> [u64; 4] {
    with_record(h, nsid, |r| {
        IoKind::ALL.map(|kind| r.operations(kind).get())
    })
}

/// A command without data.
fn bare(opcode: NvmOpcode, nsid: u32) -> Command {
    Command {
        opcode: opcode.0,
        nsid: nsid.into(),
        ..Command::default()
    }
}

#[test]
fn namespace_counters_split_by_kind_and_failure() {
    let (_dir, file) = file();
    let mut h = Host::ready_with(vec![ns(1, mem(8 << 20), 512), ns(7, file, 512)]);
    for nsid in [1, 7] {
        for (opcode, times) in [(NvmOpcode::WRITE, 3), (NvmOpcode::READ, 5)] {
            for i in 0..times {
                let command = h.rw(opcode, nsid, i, 2, DATA);
                assert_eq!(h.io(command), Status::SUCCESS);
            }
        }
    }
    for _ in 0..4 {
        assert_eq!(h.io(bare(NvmOpcode::FLUSH, 7)), Status::SUCCESS);
    }
    let verify = h.rw(NvmOpcode::VERIFY, 1, 0, 1, DATA);
    assert_eq!(h.io(verify), Status::SUCCESS);
    assert_eq!(operations(&h, 1), [5, 3, 0, 1]);
    assert_eq!(operations(&h, 7), [5, 3, 4, 0]);
    let bytes = |r: &IoRecord| (r.bytes_read().get(), r.bytes_written().get());
    assert_eq!(with_record(&h, 7, bytes), (5 * 1024, 3 * 1024));
    // A flush is never left out.
    assert_eq!(timed(&h, 7, IoKind::Flush), 4);

    let beyond = h.rw(NvmOpcode::READ, 7, 1 << 40, 1, DATA);
    assert_eq!(plain(h.io(beyond)), Status::LBA_OUT_OF_RANGE);
    let unmapped = h.rw(NvmOpcode::WRITE, 1, 0, 1, 0xdead_0000_0000);
    assert_eq!(plain(h.io(unmapped)), Status::DATA_TRANSFER_ERROR);
    let nobody = h.rw(NvmOpcode::READ, 3, 0, 1, DATA);
    assert_ne!(h.io(nobody), Status::SUCCESS);
    assert_eq!(with_record(&h, 7, |r| r.failures(Failure::OutOfRange)), 1);
    assert_eq!(with_record(&h, 1, |r| r.failures(Failure::Memory)), 1);
    assert_eq!(with_record(&h, 0, IoRecord::all_failures), 1);
    assert_eq!(with_record(&h, 7, IoRecord::all_failures), 1);
}

#[test]
fn every_nth_read_is_timed_on_each_path() {
    let (_dir, file) = file();
    for volume in [mem(8 << 20), file] {
        let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
        // One at a time: the first, and the last.
        let rounds = 5;
        for _ in 0..=rounds * TIMED_EVERY {
            let command = h.rw(NvmOpcode::READ, 1, 0, 1, DATA);
            assert_eq!(h.io(command), Status::SUCCESS);
        }
        let expected = u64::from(rounds) + 1;
        assert_eq!(timed(&h, 1, IoKind::Read), expected);
        let depths = with_record(&h, 1, |r| r.depth().unwrap().summary());
        assert_eq!((depths.count, depths.max), (expected, 1));
        assert_eq!(timed(&h, 1, IoKind::Write), 0);
    }
}

#[test]
fn timed_batch_completes_every_command() {
    let (_dir, file) = file();
    for volume in [mem(8 << 20), file] {
        let mut h = Host::ready_with(vec![ns(1, volume, 512)]);
        let (batch, batches) = (12u32, 200u32);
        for _ in 0..batches {
            for i in 0..batch {
                let command = h.rw(NvmOpcode::WRITE, 1, u64::from(i), 1, DATA);
                h.push(1, command);
            }
            h.ring_sq(1);
            let mut reaped = 0;
            h.until(|h| {
                reaped += h.reap_all(1).len();
                reaped == batch as usize
            });
        }
        assert_eq!(operations(&h, 1)[1], u64::from(batch * batches));
        let found = timed(&h, 1, IoKind::Write);
        let most = u64::from(batch * batches / TIMED_EVERY + 1);
        assert!(found <= most && found >= most / 2, "{found} of {most}");
        let depths = with_record(&h, 1, |r| {
            r.depth()
                .unwrap()
                .counts()
                .map(|(d, _)| d)
                .collect::<Vec<_>>()
        });
        assert!(depths.len() > 2, "{depths:?}");
        assert!(depths.iter().all(|d| *d <= u64::from(batch)), "{depths:?}");
    }
}
