//! A queue against a vector of bytes: parallel requests over volumes that answer late and in
//! another order, that fail, and that have no room.

use crate::common::{Disk, open};
use crate::container::{Container, PASSPHRASE, noise};
use dma::{Buffer, SegmentList};
use luks::LuksVolume;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use volume::{Effect, Fault, FaultVolume, FileOptions, FileVolume, Io, IoError, IoErrorKind};
use volume::{IoOptions, MemVolume, Op, OpKind, Request, Volume};

const SIZE: usize = 6 << 20;
const HEADER: usize = 1 << 20;

/// Numbers without a pattern (xorshift).
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

fn container(below: Arc<dyn Volume>, sector: usize, discard: bool) -> LuksVolume {
    let header = Container::new(2, 64, sector).header();
    open(below, &header, PASSPHRASE, discard)
}

/// Executes random requests, several at a time on ranges that do not overlap, and compares all data
/// that is read.
fn compare(volume: &LuksVolume, seed: u64, steps: u64) {
    let size = volume.info().size as usize;
    let block = u64::from(volume.info().block_size);
    let mut disk = Disk::new(volume);
    let mut model = noise(seed, size);
    for (n, part) in model.chunks(1 << 20).enumerate() {
        disk.write((n as u64) << 20, part, false).unwrap();
    }
    let mut chance = Chance(seed + 1);
    let mut flying: BTreeMap<u64, (u64, u64, Op)> = BTreeMap::new();
    for tag in 1..=steps {
        let blocks = match chance.below(10) {
            0 => 1 + chance.below((1 << 20) / block),
            _ => 1 + chance.below(8),
        };
        let len = blocks * block;
        let offset = chance.below((size as u64 - len) / block) * block;
        let op = match chance.below(12) {
            0 => Op::Flush,
            1 => Op::WriteZeroes {
                deallocate: chance.below(2) == 0,
                fua: chance.below(2) == 0,
            },
            2..=6 => Op::Write {
                fua: chance.below(4) == 0,
            },
            _ => Op::Read,
        };
        let overlaps = |(at, len2, _): &(u64, u64, Op)| *at < offset + len && offset < at + len2;
        while flying.len() >= 24 || flying.values().any(overlaps) {
            settle(&mut disk, &mut flying, &model);
        }
        let request = match op {
            Op::Flush => Request::flush(tag),
            Op::WriteZeroes { .. } => {
                model[offset as usize..][..len as usize].fill(0);
                Request::without_data(tag, op, offset, len)
            }
            _ => {
                // Memory that begins and ends at any byte.
                let skew = chance.below(700);
                let mut buffer = Buffer::new((len + skew + 5) as usize);
                if op != Op::Read {
                    let bytes = noise(seed + tag, len as usize);
                    buffer[skew as usize..][..len as usize].copy_from_slice(&bytes);
                    model[offset as usize..][..len as usize].copy_from_slice(&bytes);
                }
                let (whole, mut data) = (SegmentList::owned(buffer), SegmentList::new());
                whole.slice(skew, len, &mut data);
                Request::transfer(tag, op, offset, data)
            }
        };
        flying.insert(tag, (offset, if op == Op::Flush { 0 } else { len }, op));
        if let Some(done) = disk.queue.submit(request) {
            finish(done, &mut flying, &model);
        }
    }
    while !flying.is_empty() {
        settle(&mut disk, &mut flying, &model);
    }
    assert_eq!(disk.queue.state().in_flight, 0);
    assert!(disk.read(0, size).unwrap() == model);
}

fn settle(disk: &mut Disk, flying: &mut BTreeMap<u64, (u64, u64, Op)>, model: &[u8]) {
    let mut all = Vec::new();
    disk.wait(&mut |done| all.push(done));
    all.into_iter().for_each(|done| finish(done, flying, model));
}

fn finish(done: volume::Completion, flying: &mut BTreeMap<u64, (u64, u64, Op)>, model: &[u8]) {
    let (offset, len, op) = flying.remove(&done.tag).expect("a known request, once");
    assert_eq!(done.result, Ok(()), "{op:?} at {offset}");
    if op == Op::Read {
        let mut bytes = vec![0; len as usize];
        assert_eq!(done.data.copy_to(0, &mut bytes), bytes.len());
        assert!(
            bytes == model[offset as usize..][..len as usize],
            "{offset}"
        );
    }
}

#[test]
fn random_requests_match_model_in_memory() {
    for sector in [512, 4096] {
        let memory = Arc::new(MemVolume::new(SIZE as u64).unwrap());
        compare(&container(memory, sector, false), 7, 400);
    }
}

#[test]
fn random_requests_match_model_in_late_volume() {
    let memory = Arc::new(MemVolume::new(SIZE as u64).unwrap());
    let late = Arc::new(FaultVolume::new(memory));
    for (op, skip) in [(OpKind::Read, 1), (OpKind::Write, 2), (OpKind::Any, 5)] {
        for n in 0..200 {
            late.faults().add(Fault {
                skip: skip + n * 3,
                times: 1,
                ..Fault::always(op, Effect::Delay(Duration::from_micros(50 + n * 7)))
            });
        }
    }
    compare(&container(late, 512, false), 8, 400);
}

#[test]
fn random_requests_match_model_in_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    for sector in [512, 4096] {
        std::fs::write(&path, vec![0; SIZE]).unwrap();
        let file = FileVolume::open(&path, FileOptions::default()).unwrap();
        compare(&container(Arc::new(file), sector, false), 9, 400);
    }
}

/// Pieces are more than the ring has places.
#[test]
fn full_ring_below_delays_pieces() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, vec![0; SIZE]).unwrap();
    let file = FileVolume::open(&path, FileOptions::default()).unwrap();
    let volume = container(Arc::new(file), 512, false);
    let io = Io::new(IoOptions {
        capacity: 2,
        ..IoOptions::default()
    });
    let queue = volume.open(&io).unwrap();
    let mut disk = Disk { queue, io };
    let plain = noise(3, 4 << 20);
    disk.write(0, &plain, true).unwrap();
    assert!(disk.read(0, plain.len()).unwrap() == plain);
}

/// The volume below has what the twin of an independent cipher has, and never the plain text.
#[test]
fn no_plain_text_reaches_the_storage() {
    let memory = Arc::new(MemVolume::new(SIZE as u64).unwrap());
    let volume = container(memory.clone(), 512, false);
    let mut disk = Disk::new(&volume);
    let mut raw = Disk::new(&*memory);
    let text = b"a secret of the guest, 32 bytes!".repeat(1 << 13);
    disk.write(4096, &text, true).unwrap();
    let zeroes = Op::WriteZeroes {
        deallocate: true,
        fua: true,
    };
    disk.range(zeroes, 1 << 20, 600 << 10).unwrap();
    assert!(
        disk.read(1 << 20, 600 << 10)
            .unwrap()
            .iter()
            .all(|byte| *byte == 0)
    );
    let below = raw.read(0, SIZE).unwrap();
    assert!(!below.windows(16).any(|window| window == &text[..16]));
    let zeroed = &below[HEADER + (1 << 20)..][..600 << 10];
    assert!(
        !zeroed
            .chunks(16)
            .any(|block| block.iter().all(|byte| *byte == 0))
    );
}

#[test]
fn deallocation_passes_only_where_allowed() {
    let (offset, len) = (64 << 10, 64 << 10);
    for discard in [false, true] {
        let memory = Arc::new(MemVolume::new(SIZE as u64).unwrap());
        let volume = container(memory.clone(), 512, discard);
        let info = volume.info();
        assert_eq!(info.deallocate, discard);
        assert_eq!(info.deallocate_granularity > 0, discard);
        assert!(!info.zeroes_after_deallocate && !info.write_zeroes);
        let mut disk = Disk::new(&volume);
        let plain = noise(4, 256 << 10);
        disk.write(0, &plain, false).unwrap();
        let done = disk.range(Op::Deallocate, offset, len);
        let below = Disk::new(&*memory).read(HEADER as u64 + offset, len as usize);
        let is_zero = below.unwrap().iter().all(|byte| *byte == 0);
        assert_eq!(is_zero, discard);
        if discard {
            done.unwrap();
        } else {
            assert_eq!(done.unwrap_err().kind, IoErrorKind::Unsupported);
            assert!(disk.read(0, plain.len()).unwrap() == plain);
        }
    }
}

#[test]
fn requests_off_blocks_or_range_are_refused() {
    let memory = Arc::new(MemVolume::new(SIZE as u64).unwrap());
    let volume = container(memory, 4096, false);
    let (size, mut disk) = (volume.info().size, Disk::new(&volume));
    let kind = |result: Result<Vec<u8>, IoError>| result.unwrap_err().kind;
    assert_eq!(kind(disk.read(512, 4096)), IoErrorKind::Invalid);
    assert_eq!(kind(disk.read(0, 512)), IoErrorKind::Invalid);
    assert_eq!(kind(disk.read(size, 4096)), IoErrorKind::OutOfRange);
    assert_eq!(
        kind(disk.read(u64::MAX - 4095, 4096)),
        IoErrorKind::OutOfRange
    );
    assert!(
        disk.queue.range_copy().is_none(),
        "a file system would copy ciphertext"
    );
}

#[test]
fn failed_pieces_fail_their_request_only() {
    let memory = Arc::new(MemVolume::new(SIZE as u64).unwrap());
    let faulty = Arc::new(FaultVolume::new(memory));
    let faults = faulty.faults();
    let volume = container(faulty, 512, false);
    let mut disk = Disk::new(&volume);
    let plain = noise(6, 4 << 20);
    disk.write(0, &plain, false).unwrap();
    for (op, nth) in [(OpKind::Read, 3), (OpKind::Write, 3), (OpKind::Flush, 1)] {
        let error = IoErrorKind::MediaRead.into();
        faults.add(Fault::nth(op, nth, Effect::FailLater(error)));
        let result = match op {
            OpKind::Read => disk.read(0, plain.len()).map(drop),
            OpKind::Write => disk.write(0, &plain, false),
            _ => disk.range(Op::Flush, 0, 0),
        };
        assert_eq!(result, Err(error), "{op:?}");
        assert_eq!(disk.queue.state().in_flight, 0);
    }
    disk.write(0, &plain, true).unwrap();
    assert!(disk.read(0, plain.len()).unwrap() == plain);
}

#[test]
fn cancelled_request_ends_once() {
    let memory = Arc::new(MemVolume::new(SIZE as u64).unwrap());
    let faulty = Arc::new(FaultVolume::new(memory));
    let faults = faulty.faults();
    let volume = container(faulty, 512, false);
    let mut disk = Disk::new(&volume);
    faults.add(Fault::always(OpKind::Any, Effect::Hold));
    let submit = |disk: &mut Disk, tag, len| {
        let data = SegmentList::owned(Buffer::new(len));
        let request = Request::transfer(tag, Op::Read, 0, data);
        assert!(disk.queue.submit(request).is_none());
    };
    submit(&mut disk, 1, 2 << 20);
    submit(&mut disk, 2, 512);
    disk.queue.cancel(1);
    let mut ended = Vec::new();
    while ended.is_empty() {
        disk.wait(&mut |done| ended.push((done.tag, done.result)));
    }
    assert_eq!(ended, [(1, Err(IoErrorKind::Aborted.into()))]);
    faults.clear();
    faults.release();
    disk.wait(&mut |done| ended.push((done.tag, done.result)));
    assert_eq!(ended[1], (2, Ok(())));
    assert_eq!(disk.queue.state().in_flight, 0);
}

/// More data is asked for than the queue's buffers hold.
#[test]
fn requests_beyond_the_budget_wait_for_buffers() {
    let memory = Arc::new(MemVolume::new(SIZE as u64).unwrap());
    let faulty = Arc::new(FaultVolume::new(memory));
    let faults = faulty.faults();
    let volume = container(faulty.clone(), 512, false);
    let mut disk = Disk::new(&volume);
    faults.add(Fault::always(OpKind::Read, Effect::Hold));
    for tag in 0..100 {
        let data = SegmentList::owned(Buffer::new(256 << 10));
        let request = Request::transfer(tag, Op::Read, (tag % 8) * (256 << 10), data);
        assert!(disk.queue.submit(request).is_none());
    }
    assert_eq!(faults.held(), 64, "16 MiB of 256 KiB each");
    faults.clear();
    let mut ended = 0;
    while ended < 100 {
        faults.release();
        disk.wait(&mut |done| {
            assert_eq!(done.result, Ok(()));
            ended += 1;
        });
    }
}

#[test]
fn size_follows_the_volume_below() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, vec![0; SIZE]).unwrap();
    let file = FileVolume::open(&path, FileOptions::default()).unwrap();
    let volume = container(Arc::new(file), 512, false);
    let before = volume.info().size;
    assert_eq!(before, (SIZE - HEADER) as u64);
    volume.resize(before + (1 << 20)).unwrap();
    assert_eq!(volume.info().size, before + (1 << 20));
    assert_eq!(path.metadata().unwrap().len(), SIZE as u64 + (1 << 20));
    Disk::new(&volume).write(before, &[1; 512], false).unwrap();
    assert!(volume.resize(100).is_err());
}
