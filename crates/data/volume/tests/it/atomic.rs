//! Promised atomic writes are atomic when the power is cut at any moment, when a queue is dropped
//! in the middle, and for reads at the same time. The disk below tears every write that it may
//! tear.

use dma::{Buffer, SegmentList};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use volume::{
    AtomicVolume, AtomicWrites, Completion, Info, Io, IoErrorKind, Kind, Op, OpenQueue, QueueState,
    Request, Volume, VolumeError, VolumeQueue, Wake,
};

const SECTOR: usize = 512;
const UNIT: usize = 16 << 10;
const UNITS: usize = 12;
const SIZE: usize = UNIT * UNITS;
/// Number of requests in flight.
const DEPTH: usize = 6;

/// Pseudorandom number generator (Knuth's MMIX).
#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    /// Returns a number below `limit`.
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// Power supply, shared by all disks of a machine.
#[derive(Debug)]
struct Power {
    /// Number of operations that the disks may still begin or end before the power cut.
    left: AtomicU64,
    random: Mutex<Random>,
}

impl Power {
    fn is_off(&self) -> bool {
        self.left.load(Ordering::Relaxed) == 0
    }

    /// Uses up one operation. Returns whether there is still power.
    fn spend(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        left > 1
    }

    fn below(&self, limit: usize) -> usize {
        self.random.lock().unwrap().below(limit)
    }
}

/// Contents of a disk.
#[derive(Debug)]
struct Medium {
    /// Bytes that a read returns.
    now: Vec<u8>,
    /// Bytes that survive a power cut, apart from the writes in `volatile`.
    durable: Vec<u8>,
    /// Writes in the cache, in order.
    volatile: Vec<(usize, Vec<u8>)>,
}

/// A disk that executes requests in any order, in two halves each, until the power is cut. Each
/// sector of an outstanding or cached write then survives or not, unless the disk promises atomic
/// writes.
#[derive(Debug)]
struct Disk {
    medium: Mutex<Medium>,
    power: Arc<Power>,
    promise: AtomicWrites,
    /// Whether the next writes fail.
    fails: AtomicBool,
    writes: AtomicU64,
}

impl Disk {
    fn new(power: &Arc<Power>, size: usize, promise: AtomicWrites) -> Arc<Self> {
        Arc::new(Self {
            medium: Mutex::new(Medium {
                now: vec![0; size],
                durable: vec![0; size],
                volatile: Vec::new(),
            }),
            power: power.clone(),
            promise,
            fails: AtomicBool::new(false),
            writes: AtomicU64::new(0),
        })
    }

    /// Tears a write that has lost its end.
    fn tear(&self, durable: &mut [u8], offset: usize, data: &[u8]) {
        let whole = self.promise.covers(offset as u64, data.len() as u64);
        let all = self.power.below(2) == 0;
        for (number, sector) in data.chunks(SECTOR).enumerate() {
            let there = if whole { all } else { self.power.below(2) == 0 };
            if there {
                let at = offset + number * SECTOR;
                durable[at..at + SECTOR].copy_from_slice(sector);
            }
        }
    }

    /// Restores the power.
    fn restart(&self) {
        let medium = &mut *self.medium.lock().unwrap();
        for (offset, data) in std::mem::take(&mut medium.volatile) {
            self.tear(&mut medium.durable, offset, &data);
        }
        medium.now.clone_from(&medium.durable);
    }
}

impl Volume for Disk {
    fn info(&self) -> Info {
        Info {
            size: self.medium.lock().unwrap().now.len() as u64,
            block_size: SECTOR as u32,
            optimal_io: 4096,
            read_only: false,
            volatile_cache: true,
            deallocate: false,
            deallocate_granularity: 0,
            zeroes_after_deallocate: false,
            write_zeroes: false,
            kind: Kind::BlockDevice,
            description: "a disk".into(),
        }
    }

    fn open(&self, _: &Io) -> Result<OpenQueue, VolumeError> {
        unreachable!("opened by its Arc");
    }

    fn id(&self) -> Vec<u8> {
        b"disk".to_vec()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        None
    }

    fn atomic_writes(&self) -> AtomicWrites {
        self.promise
    }
}

/// Reference to a disk, as a volume that its queues share.
#[derive(Debug)]
struct Below(Arc<Disk>);

impl Volume for Below {
    fn info(&self) -> Info {
        self.0.info()
    }

    fn open(&self, _: &Io) -> Result<OpenQueue, VolumeError> {
        Ok(OpenQueue::new(DiskQueue {
            disk: self.0.clone(),
            flying: Vec::new(),
        }))
    }

    fn id(&self) -> Vec<u8> {
        self.0.id()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        None
    }

    fn atomic_writes(&self) -> AtomicWrites {
        self.0.promise
    }
}

struct DiskQueue {
    disk: Arc<Disk>,
    flying: Vec<(Request, Vec<u8>)>,
}

impl DiskQueue {
    /// Applies the first or the second half of a request.
    fn half(&self, request: &Request, data: &mut [u8], second: bool) {
        let medium = &mut *self.disk.medium.lock().unwrap();
        let at = request.offset as usize;
        let whole = self.disk.promise.covers(request.offset, request.len);
        let middle = match request.op {
            Op::Write { .. } if whole => 0,
            _ => data.len() / 2 / SECTOR * SECTOR,
        };
        let range = if second {
            middle..data.len()
        } else {
            0..middle
        };
        let on_disk = &mut medium.now[at..][range.clone()];
        match request.op {
            Op::Read => data[range].copy_from_slice(on_disk),
            Op::Write { .. } => on_disk.copy_from_slice(&data[range]),
            _ => {}
        }
    }

    fn end(&mut self, index: usize) -> Completion {
        let (request, mut data) = self.flying.swap_remove(index);
        self.half(&request, &mut data, true);
        let mut medium = self.disk.medium.lock().unwrap();
        let at = request.offset as usize;
        match request.op {
            Op::Read => {
                request.data.copy_from(0, &data);
            }
            Op::Write { fua: true } => {
                medium.durable[at..][..data.len()].copy_from_slice(&data);
                // Cached data of these bytes is older.
                for (from, old) in &mut medium.volatile {
                    let first = at.max(*from);
                    let end = (at + data.len()).min(*from + old.len());
                    if first < end {
                        old[first - *from..end - *from]
                            .copy_from_slice(&data[first - at..end - at]);
                    }
                }
            }
            Op::Write { fua: false } => medium.volatile.push((at, data)),
            _ => {
                for (at, data) in std::mem::take(&mut medium.volatile) {
                    medium.durable[at..][..data.len()].copy_from_slice(&data);
                }
            }
        }
        request.complete(Ok(()))
    }
}

impl VolumeQueue for DiskQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        let write = matches!(request.op, Op::Write { .. });
        self.disk
            .writes
            .fetch_add(u64::from(write), Ordering::Relaxed);
        if write && self.disk.fails.load(Ordering::Relaxed) {
            return Some(request.complete(Err(IoErrorKind::MediaWrite.into())));
        }
        let mut data = vec![0; request.len as usize];
        if write {
            request.data.copy_to(0, &mut data);
        }
        if self.disk.power.spend() {
            self.half(&request, &mut data, false);
        }
        self.flying.push((request, data));
        None
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        let mut count = 0;
        for _ in 0..self.flying.len() {
            let index = self.disk.power.below(self.flying.len());
            if self.disk.power.below(3) == 0 && self.disk.power.spend() {
                let completion = self.end(index);
                done(completion);
                count += 1;
            }
        }
        count
    }

    fn state(&self) -> QueueState {
        QueueState {
            in_flight: self.flying.len(),
            wake: Wake::Poll,
        }
    }

    fn cancel(&mut self, _: u64) {}
}

impl Drop for DiskQueue {
    /// While there is power, some outstanding requests are still done, and the rest in part.
    fn drop(&mut self) {
        for (request, data) in std::mem::take(&mut self.flying) {
            if !matches!(request.op, Op::Write { .. }) {
                continue;
            }
            let medium = &mut *self.disk.medium.lock().unwrap();
            let at = request.offset as usize;
            if self.disk.power.is_off() {
                // Behind earlier writes.
                medium.volatile.push((at, data));
            } else {
                self.disk.tear(&mut medium.now, at, &data);
                let now = medium.now[at..][..data.len()].to_vec();
                medium.volatile.push((at, now));
            }
        }
    }
}

fn apply(content: &[u8], at: usize, data: &[u8]) -> Vec<u8> {
    let mut content = content.to_vec();
    content[at..at + data.len()].copy_from_slice(data);
    content
}

/// Possible contents of a unit, and an outstanding write of it.
struct Unit {
    may_be: Vec<Vec<u8>>,
    write: Option<(usize, Vec<u8>)>,
}

impl Unit {
    /// Records whether the outstanding write has taken effect, or `None` if unknown.
    fn settle(&mut self, happened: Option<bool>) {
        let Some((at, data)) = self.write.take() else {
            return;
        };
        let after: Vec<Vec<u8>> = self.may_be.iter().map(|c| apply(c, at, &data)).collect();
        match happened {
            Some(true) => self.may_be = after,
            Some(false) => {}
            None => self.may_be.extend(after),
        }
    }

    /// Checks the contents returned by a read.
    fn found(&mut self, content: &[u8]) -> bool {
        let known = self.may_be.iter().any(|may| may == content);
        self.may_be = vec![content.to_vec()];
        known
    }
}

enum SentRequest {
    Write(usize),
    /// Read of a unit, which may return one of these contents.
    Read(usize, Vec<Vec<u8>>),
    /// Request over several units of the last third, for which nothing is promised.
    Other,
}

struct Load {
    units: Vec<Unit>,
    asked: HashMap<u64, (usize, SentRequest)>,
    next: u64,
    /// Number of units found torn, by reads or after a cut.
    torn: usize,
    checked: usize,
}

impl Load {
    fn new() -> Self {
        let unit = || Unit {
            may_be: vec![vec![0; UNIT]],
            write: None,
        };
        Self {
            units: (0..UNITS).map(|_| unit()).collect(),
            asked: HashMap::new(),
            next: 0,
            torn: 0,
            checked: 0,
        }
    }

    fn request(&mut self, queue: usize, power: &Power) -> Option<Request> {
        self.next += 1;
        let tag = self.next;
        let idle = |load: &Self, unit: usize| load.units[unit].write.is_none();
        let reads = |load: &Self, unit: usize| {
            let mut asked = load.asked.values();
            asked.any(|(_, asked)| matches!(asked, SentRequest::Read(of, _) if *of == unit))
        };
        let (op, at, data, asked) = match power.below(10) {
            0..=5 => {
                let unit = power.below(UNITS * 2 / 3);
                // A single write of a unit at a time, and no reads that would allow more than two
                // results.
                if !idle(self, unit) || reads(self, unit) {
                    return None;
                }
                let sectors = UNIT / SECTOR;
                let first = power.below(sectors);
                let count = 1 + power.below(sectors - first);
                let mut data = vec![0; count * SECTOR];
                let stamp = tag.to_le_bytes();
                for (byte, stamp) in data.iter_mut().zip(stamp.iter().cycle()) {
                    *byte = *stamp;
                }
                let fua = DURABLE.with(std::cell::Cell::get) || power.below(2) == 0;
                self.units[unit].write = Some((first * SECTOR, data.clone()));
                let at = unit * UNIT + first * SECTOR;
                (Op::Write { fua }, at, data, SentRequest::Write(unit))
            }
            6..=7 => {
                let unit = power.below(UNITS * 2 / 3);
                let mut may_be = self.units[unit].may_be.clone();
                if let Some((at, data)) = &self.units[unit].write {
                    let after: Vec<_> = may_be.iter().map(|c| apply(c, *at, data)).collect();
                    may_be.extend(after);
                }
                (
                    Op::Read,
                    unit * UNIT,
                    vec![0; UNIT],
                    SentRequest::Read(unit, may_be),
                )
            }
            8 => {
                let at = UNIT * (UNITS * 2 / 3 - 1) + UNIT / 2;
                let op = match power.below(2) {
                    0 => Op::Read,
                    _ => {
                        // Not of the units that are checked.
                        let data = vec![power.below(255) as u8; 2 * UNIT];
                        let at = UNIT * (UNITS * 2 / 3) + SECTOR;
                        self.asked.insert(tag, (queue, SentRequest::Other));
                        let data = SegmentList::owned(Buffer::from_slice(&data));
                        let op = Op::Write { fua: false };
                        return Some(Request::transfer(tag, op, at as u64, data));
                    }
                };
                (op, at, vec![0; 2 * UNIT], SentRequest::Other)
            }
            _ => {
                self.asked.insert(tag, (queue, SentRequest::Other));
                let nothing = SegmentList::new();
                return Some(Request::transfer(tag, Op::Flush, 0, nothing));
            }
        };
        self.asked.insert(tag, (queue, asked));
        let data = SegmentList::owned(Buffer::from_slice(&data));
        Some(Request::transfer(tag, op, at as u64, data))
    }

    fn completed(&mut self, done: &Completion) {
        match self.asked.remove(&done.tag) {
            Some((_, SentRequest::Write(unit))) => {
                assert_eq!(done.result, Ok(()));
                self.units[unit].settle(Some(true));
            }
            Some((_, SentRequest::Read(_, may_be))) => {
                assert_eq!(done.result, Ok(()));
                let mut found = vec![0; UNIT];
                done.data.copy_to(0, &mut found);
                self.checked += 1;
                self.torn += usize::from(!may_be.contains(&found));
            }
            _ => {}
        }
    }

    /// Removes the requests of a queue that was dropped.
    fn forget(&mut self, queue: usize) {
        for (_, (_, asked)) in self.asked.extract_if(|_, (of, _)| *of == queue) {
            if let SentRequest::Write(unit) = asked {
                self.units[unit].settle(None);
            }
        }
    }

    /// Checks the contents of the disk after a power cut.
    fn check(&mut self, bytes: &[u8]) {
        let promised = self.units.iter_mut().take(UNITS * 2 / 3);
        for (unit, content) in promised.zip(bytes.chunks(UNIT)) {
            unit.settle(None);
            self.checked += 1;
            if !unit.found(content) {
                self.torn += 1;
            }
        }
    }
}

/// Source of the units' atomicity.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum By {
    Journal,
    /// No journal.
    Nothing,
}

/// Two workers load a volume; the power is cut again and again, queues go and come. Answers how
/// often a unit was torn, of how many looks at one, and how many entries were repeated.
fn cut_again_and_again(by: By, promise: AtomicWrites, cuts: u64, seed: u64) -> (usize, usize) {
    let power = Arc::new(Power {
        left: AtomicU64::new(u64::MAX),
        random: Mutex::new(Random(seed)),
    });
    let disk = Disk::new(&power, SIZE, promise);
    let len = AtomicVolume::journal_len(UNIT as u32) as usize;
    let journal = Disk::new(&power, len, AtomicWrites::NONE);
    let workers = [(); 2].map(|()| Io::new(Default::default()));
    let mut load = Load::new();
    for _ in 0..cuts {
        let (below, beside) = (Below(disk.clone()), Below(journal.clone()));
        let volume: Arc<dyn Volume> = match by {
            By::Nothing => Arc::new(below),
            By::Journal => {
                let (below, beside) = (Arc::new(below), Arc::new(beside));
                Arc::new(AtomicVolume::new(below, beside, UNIT as u32).unwrap())
            }
        };
        // A few cuts happen before the journal has been read again.
        let most = [100, 1000, 3000][power.below(3)];
        let left = 1 + power.below(most) as u64;
        power.left.store(left, Ordering::Relaxed);
        let mut queues = workers.each_ref().map(|io| Some(volume.open(io).unwrap()));
        while !power.is_off() {
            for number in 0..2 {
                let mine = load.asked.values().filter(|(queue, _)| *queue == number);
                if mine.count() < DEPTH
                    && let Some(request) = load.request(number, &power)
                {
                    let queue = queues[number].as_mut().unwrap();
                    if let Some(done) = queue.submit(request) {
                        load.completed(&done);
                    }
                }
                let mut arrived = Vec::new();
                let queue = queues[number].as_mut().unwrap();
                queue.poll(&mut |completion| arrived.push(completion));
                for done in arrived {
                    load.completed(&done);
                }
                // A queue that is dropped without the journal leaves torn writes.
                if by == By::Journal && power.below(300) == 0 {
                    queues[number] = None;
                    load.forget(number);
                    queues[number] = Some(volume.open(&workers[number]).unwrap());
                }
            }
        }
        drop((queues, volume));
        for number in 0..2 {
            load.forget(number);
        }
        disk.restart();
        journal.restart();
        // Another process opens the volume, reads all of it, and closes it.
        power.left.store(u64::MAX, Ordering::Relaxed);
        let bytes = match by {
            By::Nothing => disk.medium.lock().unwrap().now.clone(),
            By::Journal => {
                let (below, beside) = (Below(disk.clone()), Below(journal.clone()));
                let (below, beside) = (Arc::new(below), Arc::new(beside));
                let volume = AtomicVolume::new(below, beside, UNIT as u32).unwrap();
                // Not always: the next opening may find entries that this one leaves.
                if power.below(4) == 0 {
                    continue;
                }
                let io = Io::new(Default::default());
                read(&mut volume.open(&io).unwrap(), 0, SIZE)
            }
        };
        load.check(&bytes);
    }
    (load.torn, load.checked)
}

fn finish(queue: &mut OpenQueue, request: Request) -> Completion {
    let mut done = queue.submit(request);
    while done.is_none() {
        queue.poll(&mut |completion| done = Some(completion));
    }
    done.unwrap()
}

fn read(queue: &mut OpenQueue, offset: u64, len: usize) -> Vec<u8> {
    let data = SegmentList::owned(Buffer::new(len));
    let done = finish(queue, Request::transfer(1, Op::Read, offset, data));
    assert_eq!(done.result, Ok(()));
    let mut bytes = vec![0; len];
    done.data.copy_to(0, &mut bytes);
    bytes
}

fn write(queue: &mut OpenQueue, offset: u64, data: &[u8]) -> Completion {
    let data = SegmentList::owned(Buffer::from_slice(data));
    let op = Op::Write { fua: false };
    finish(queue, Request::transfer(1, op, offset, data))
}

#[test]
fn journal_prevents_torn_units() {
    for seed in 0..2 {
        let (torn, checked) = cut_again_and_again(By::Journal, AtomicWrites::NONE, 150, seed);
        assert!(checked > 1000, "{checked}");
        assert_eq!(torn, 0, "of {checked}, seed {seed}");
    }
}

/// Writes that the disk does as a whole do not pass through the journal, and the rest does.
#[test]
fn journal_with_partial_disk_atomicity_prevents_torn_units() {
    for promise in [
        AtomicWrites::within(8 << 10, 0, 0),
        AtomicWrites::within(16 << 10, 0, 0),
    ] {
        let (torn, checked) = cut_again_and_again_durably(promise);
        assert_eq!(torn, 0, "of {checked}, {promise}");
    }
}

/// The check itself can fail: a disk that tears, without a journal.
#[test]
fn units_without_journal_are_torn() {
    let (torn, checked) = cut_again_and_again(By::Nothing, AtomicWrites::NONE, 150, 0);
    assert!(torn > checked / 100, "{torn} of {checked}");
}

/// A write to such a disk is volatile until a flush; every one is therefore made durable here.
fn cut_again_and_again_durably(promise: AtomicWrites) -> (usize, usize) {
    DURABLE.with(|durable| durable.set(true));
    cut_again_and_again(By::Journal, promise, 100, 9)
}

thread_local! {
    static DURABLE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

struct Setup {
    disk: Arc<Disk>,
    journal: Arc<Disk>,
    io: Io,
}

impl Setup {
    fn new(promise: AtomicWrites) -> Self {
        let power = Arc::new(Power {
            left: AtomicU64::new(u64::MAX),
            random: Mutex::new(Random(1)),
        });
        let len = AtomicVolume::journal_len(UNIT as u32) as usize;
        Self {
            disk: Disk::new(&power, SIZE, promise),
            journal: Disk::new(&power, len, AtomicWrites::NONE),
            io: Io::new(Default::default()),
        }
    }

    fn open(&self) -> OpenQueue {
        let (below, beside) = (Below(self.disk.clone()), Below(self.journal.clone()));
        let volume = AtomicVolume::new(Arc::new(below), Arc::new(beside), UNIT as u32);
        volume.unwrap().open(&self.io).unwrap()
    }

    /// Writes that the disk and the journal have seen.
    fn writes(&self) -> (u64, u64) {
        let of = |disk: &Disk| disk.writes.swap(0, Ordering::Relaxed);
        (of(&self.disk), of(&self.journal))
    }
}

#[test]
fn only_unpromised_writes_use_journal() {
    let setup = Setup::new(AtomicWrites::naturally_aligned(4096, 8192));
    let mut queue = setup.open();
    let unit = UNIT as u64;
    for (offset, len, journal) in [
        (0, 4096, 0),
        (8192, 8192, 0),
        (0, UNIT, 2),
        (512, 512, 2),
        (4096, 12 << 10, 2),
        (unit - 512, 1024, 0),
        (0, 2 * UNIT, 0),
    ] {
        let bytes = vec![7; len];
        assert_eq!(write(&mut queue, offset, &bytes).result, Ok(()));
        assert_eq!(setup.writes(), (1, journal), "{offset} {len}");
        assert_eq!(read(&mut queue, offset, len), bytes);
    }
    // A write that the volume refuses never gets there.
    for (offset, len) in [(SIZE as u64, 512), (256, 512)] {
        assert!(write(&mut queue, offset, &vec![7; len]).result.is_err());
        assert_eq!(setup.writes().1, 0);
    }
}

#[test]
fn failed_journal_fails_write_only() {
    let setup = Setup::new(AtomicWrites::NONE);
    let mut queue = setup.open();
    assert_eq!(write(&mut queue, 0, &[1; UNIT]).result, Ok(()));
    setup.journal.fails.store(true, Ordering::Relaxed);
    let failed = write(&mut queue, 0, &[2; UNIT]).result;
    assert_eq!(failed.unwrap_err().kind, IoErrorKind::MediaWrite);
    assert_eq!(read(&mut queue, 0, UNIT), [1; UNIT]);
    // The slot may hold the entry all the same, and could not be emptied: data that the next
    // opening might repeat must not be overwritten.
    setup.journal.fails.store(false, Ordering::Relaxed);
    for offset in [0, 3 * UNIT as u64 + 512] {
        let refused = write(&mut queue, offset, &[3; UNIT]).result;
        assert_eq!(refused.unwrap_err().kind, IoErrorKind::MediaWrite);
    }
    drop(queue);
    let mut queue = setup.open();
    assert_eq!(write(&mut queue, 0, &[3; UNIT]).result, Ok(()));
    assert_eq!(read(&mut queue, 0, UNIT), [3; UNIT]);
}

/// A write that the disk fails may be there in part. Nobody reads that part, before the next
/// opening and after it, while the disk goes on to fail writes.
#[test]
fn write_failed_in_place_is_read_from_journal() {
    let setup = Setup::new(AtomicWrites::NONE);
    let mut queue = setup.open();
    assert_eq!(write(&mut queue, 0, &[1; 2 * UNIT]).result, Ok(()));
    setup.disk.fails.store(true, Ordering::Relaxed);
    for _ in 0..3 {
        let failed = write(&mut queue, 512, &[2; 1024]).result;
        assert_eq!(failed.unwrap_err().kind, IoErrorKind::MediaWrite);
        for _ in 0..2 {
            let expected = [&[1; 512][..], &[2; 1024], &[1; 512]].concat();
            assert_eq!(read(&mut queue, 0, 2048), expected);
            assert_eq!(read(&mut queue, 1024, 1024), expected[1024..]);
            assert_eq!(read(&mut queue, 512, 512), [2; 512]);
            assert_eq!(read(&mut queue, 1536, UNIT), [1; UNIT]);
            drop(queue);
            queue = setup.open();
        }
    }
    // A change of its blocks fails, with or without the journal, as long as the disk does.
    for len in [512, 2 * UNIT] {
        let refused = write(&mut queue, 512, &vec![3; len]).result;
        assert_eq!(refused.unwrap_err().kind, IoErrorKind::MediaWrite);
    }
    assert_eq!(read(&mut queue, 512, 1024), [2; 1024]);
    setup.disk.fails.store(false, Ordering::Relaxed);
    setup.writes();
    assert_eq!(write(&mut queue, UNIT as u64, &[4; 512]).result, Ok(()));
    assert_eq!(setup.writes(), (1, 2), "blocks of no pending write");
    assert_eq!(write(&mut queue, 512, &[3; 512]).result, Ok(()));
    assert_eq!(
        setup.writes(),
        (2, 3),
        "the entry is repeated and ended first"
    );
    let expected = [&[1; 512][..], &[3; 512], &[2; 512], &[1; 512]].concat();
    for _ in 0..2 {
        assert_eq!(read(&mut queue, 0, 2048), expected);
        drop(queue);
        queue = setup.open();
    }
}

/// With an entry in every slot, a write has to end one of them first. None of them waits forever.
#[test]
fn failed_writes_in_every_slot_do_not_block_others() {
    let setup = Setup::new(AtomicWrites::NONE);
    let mut queue = setup.open();
    setup.disk.fails.store(true, Ordering::Relaxed);
    let count = 70;
    for number in 0..count {
        let at = (number * SECTOR) as u64;
        let failed = write(&mut queue, at, &[number as u8 + 1; SECTOR]).result;
        assert_eq!(failed.unwrap_err().kind, IoErrorKind::MediaWrite);
    }
    let expected = |number: usize| if number < 64 { number as u8 + 1 } else { 0 };
    for round in 0..3 {
        for number in 0..count {
            let found = read(&mut queue, (number * SECTOR) as u64, SECTOR);
            assert_eq!(found, [expected(number); SECTOR], "{round} {number}");
        }
        if round == 1 {
            setup.disk.fails.store(false, Ordering::Relaxed);
        }
        drop(queue);
        queue = setup.open();
    }
    assert_eq!(write(&mut queue, 0, &[99; SECTOR]).result, Ok(()));
    drop(queue);
    assert_eq!(read(&mut setup.open(), 0, SECTOR), [99; SECTOR]);
}

#[test]
fn writes_beyond_journal_slots_wait() {
    let setup = Setup::new(AtomicWrites::NONE);
    let mut queue = setup.open();
    let count = 300u64;
    let mut results = Vec::new();
    for tag in 0..count {
        // Within few units, too.
        let at = tag % 32 * SECTOR as u64 + tag % 3 * UNIT as u64;
        let data = SegmentList::owned(Buffer::from_slice(&[tag as u8; SECTOR]));
        let op = Op::Write { fua: false };
        assert!(queue.submit(Request::transfer(tag, op, at, data)).is_none());
    }
    queue.cancel(count - 1);
    while results.len() < count as usize {
        queue.poll(&mut |done| results.push((done.tag, done.result.is_ok())));
    }
    results.sort_unstable();
    let expected = (0..count).map(|tag| (tag, tag != count - 1));
    assert!(results.into_iter().eq(expected), "the last was waiting");
    assert_eq!(queue.state().in_flight, 0);
}

#[test]
fn journal_file_is_created_and_recognized() {
    use std::path::{Path, PathBuf};
    let dir = tempfile::tempdir().unwrap();
    let disk = |name: &str| -> PathBuf {
        let path = dir.path().join(name);
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        path
    };
    let open = |path: &Path, options: &str| {
        let url = format!("{}?{options}", path.display());
        volume::open_url(&url, Default::default())
    };
    let said = |path: &Path, options: &str| open(path, options).unwrap_err().to_string();
    let (first, second) = (disk("first.raw"), disk("second.raw"));
    // The temporary directory of some machines is not on a suitable disk.
    let volume = match open(&first, "atomic=16K") {
        Err(error) if error.to_string().contains("on disks of this machine") => {
            return testkit::skip("volume: a journal's file", error);
        }
        volume => volume.unwrap(),
    };
    assert_eq!(volume.atomic_writes().unit(), 16 << 10);
    let journal = dir.path().join("first.raw.atomic");
    let len = std::fs::metadata(&journal).unwrap().len();
    assert_eq!(len, AtomicVolume::journal_len(16 << 10));
    let io = Io::new(Default::default());
    let mut queue = volume.open(&io).unwrap();
    let data = SegmentList::owned(Buffer::from_slice(&[9; 3 * 512]));
    let op = Op::Write { fua: false };
    let mut done = queue.submit(Request::transfer(1, op, 512, data));
    while done.is_none() {
        io.flush();
        io.poll(&mut |_| panic!("it is the lane's"));
        queue.poll(&mut |completion| done = Some(completion));
    }
    assert_eq!(done.unwrap().result, Ok(()));
    assert_eq!(std::fs::read(&first).unwrap()[512..4 * 512], [9; 3 * 512]);
    // The journal belongs to one volume.
    let shared = format!("atomic=16K&atomic-journal={}", journal.display());
    assert!(said(&second, &shared).contains("in use"));
    drop((queue, volume));
    assert!(open(&first, "atomic=16K").is_ok());
    // An empty journal may be used by another volume, or for another unit.
    assert!(open(&second, &shared).is_ok());
    let other = format!("atomic=64K&atomic-journal={}", journal.display());
    assert!(said(&second, &other).contains("longer"));
    // A journal with entries belongs to its volume.
    let head = std::fs::read(&journal).unwrap();
    std::fs::write(&journal, vec![1; len as usize]).unwrap();
    assert!(said(&first, "atomic=16K").contains("other data"));
    std::fs::write(&journal, head).unwrap();
    for (options, why) in [
        ("atomic=3K", "a power of two from 4K to 64K"),
        ("atomic=128K", "a power of two from 4K to 64K"),
        ("atomic=on", "a power of two from 4K to 64K"),
        ("atomic=16K&read-only=on", "no effect"),
        ("atomic=auto&atomic-journal=/tmp/x", "no effect"),
        ("atomic=off&atomic-journal=/tmp/x", "no effect"),
    ] {
        let said = said(&second, options);
        assert!(said.contains(why), "{options}: {said}");
    }
    assert!(open(&second, "atomic=off").is_ok());
    assert_eq!(
        open(&second, "atomic=off").unwrap().atomic_writes(),
        AtomicWrites::NONE
    );
    // A journal without more.
    let alone = format!("atomic-journal={}", dir.path().join("alone").display());
    let alone = open(&second, &alone).unwrap();
    assert_eq!(alone.atomic_writes().unit(), 16 << 10);
    // A part of it counts from its own beginning.
    let part = open(&first, "atomic=16K&offset=8K&length=64K").unwrap();
    assert_eq!(part.atomic_writes().unit(), 8 << 10);
}
