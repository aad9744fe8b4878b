//! Queues on real rings: random requests, many at a time, against a byte vector; cancelled ones;
//! clusters that are freed and used again.

use super::Chance;
use crate::Qcow2Volume;
use crate::chain::Qcow2Options;
use crate::lanes::{For, Lanes, Tasks};
use crate::store::Store;
use crate::testing::{EmptyImage, see};
use dma::{Buffer, SegmentList};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use volume::{
    Completion, Direct, FileOptions, FileVolume, Io, IoErrorKind, IoOptions, Op, OpenQueue,
    Request, Volume,
};

/// A queue with its ring, as in a worker.
#[derive(Debug)]
pub struct Worker {
    pub io: Io,
    pub queue: Option<OpenQueue>,
}

impl Worker {
    /// Opens a queue; `None` when io_uring is unavailable.
    pub fn new(volume: &dyn Volume) -> Option<Self> {
        Self::with_capacity(volume, 64)
    }

    /// Opens a queue on a ring with room for this number of operations.
    fn with_capacity(volume: &dyn Volume, capacity: u32) -> Option<Self> {
        let io = Io::new(IoOptions {
            capacity,
            ..IoOptions::default()
        });
        let queue = volume.open(&io).ok()?;
        Some(Self {
            io,
            queue: Some(queue),
        })
    }

    pub fn queue(&mut self) -> &mut OpenQueue {
        self.queue.as_mut().unwrap()
    }

    /// Runs a round, as a worker does.
    pub fn round(&mut self, done: &mut Vec<Completion>) {
        self.io.poll(&mut |completion| done.push(completion));
        if let Some(queue) = &mut self.queue {
            queue.poll(&mut |completion| done.push(completion));
        }
        self.io.flush();
    }

    /// Runs rounds until nothing is in flight.
    pub fn settle(&mut self, done: &mut Vec<Completion>) {
        loop {
            self.round(done);
            if self.queue().state().in_flight == 0 && self.io.in_flight() == 0 {
                return;
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Before its ring.
        self.queue = None;
    }
}

/// Submits one request, and waits for its completion.
pub fn finish(
    io: &Io,
    queue: &mut OpenQueue,
    start: impl FnOnce(&mut OpenQueue) -> Option<Completion>,
) -> Completion {
    let mut done = start(queue);
    while done.is_none() {
        io.flush();
        io.poll(&mut |completion| done = Some(completion));
        queue.poll(&mut |completion| done = Some(completion));
    }
    done.unwrap()
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut chance = Chance::new(seed);
    let mut bytes = vec![0; len];
    for chunk in bytes.chunks_mut(8) {
        let word = chance.next().to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
    bytes
}

struct Case {
    _directory: tempfile::TempDir,
    dir: PathBuf,
    path: PathBuf,
    below: Vec<u8>,
    options: Qcow2Options,
}

impl Case {
    fn new(chance: &mut Chance, size: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let dir = directory.path().canonicalize().unwrap();
        let path = dir.join("disk");
        let is_backed = chance.one_in(2);
        let below = if is_backed {
            pattern(chance.next(), (size - chance.below(4) * 100_000) as usize)
        } else {
            Vec::new()
        };
        std::fs::write(dir.join("base"), &below).unwrap();
        EmptyImage {
            size,
            cluster_bits: [9, 12, 16, 16, 18][chance.below(5) as usize],
            refcount_order: [3, 4, 4, 5, 6][chance.below(5) as usize],
            backing: is_backed.then_some(("base", "raw")),
        }
        .image(&path);
        let options = Qcow2Options {
            direct: [Direct::Off, Direct::Auto][chance.below(2) as usize],
            backing: Some(dir.clone()),
            l2_cache: [64 << 10, 32 << 20][chance.below(2) as usize],
            ..Qcow2Options::default()
        };
        Self {
            _directory: directory,
            dir,
            path,
            below,
            options,
        }
    }

    fn open(&self) -> Qcow2Volume {
        Qcow2Volume::open(&self.path, &self.options).unwrap()
    }

    /// Copies the image as a kill would leave it, which may only have wrong counts.
    fn copy(&self) -> PathBuf {
        let copy = self.dir.join("copy");
        std::fs::copy(&self.path, &copy).unwrap();
        let seen = see(&std::fs::read(&copy).unwrap(), &self.below);
        assert!(seen.wrong.is_empty(), "{:?}", seen.wrong);
        copy
    }
}

const SIZE: u64 = 6 << 20;

/// Effect of a request on the model when it ends.
struct Expect {
    op: Op,
    offset: usize,
    bytes: Vec<u8>,
}

#[test]
fn random_requests_match_byte_array() {
    let seeds = match std::env::var("VNVME_LIVES") {
        Ok(text) => text.parse().unwrap(),
        Err(_) => 3,
    };
    for seed in 0..seeds {
        if !random(seed) {
            return testkit::skip("qcow2: random requests", "there is no io_uring");
        }
    }
}

fn random(seed: u64) -> bool {
    println!("seed {seed}");
    let mut chance = Chance::new(seed);
    let case = Case::new(&mut chance, SIZE);
    let mut model = case.below.clone();
    model.resize(SIZE as usize, 0);
    for _ in 0..2 {
        let volume = case.open();
        let mut size = volume.info().size as usize;
        let mut workers = Vec::new();
        for _ in 0..1 + chance.below(2) {
            // Rings that are full now and then.
            let capacity = [8, 64][chance.below(2) as usize];
            let Some(worker) = Worker::with_capacity(&volume, capacity) else {
                return false;
            };
            workers.push(worker);
        }
        let unit = volume.info().block_size as usize;
        for _ in 0..20 {
            batch(&mut chance, &volume, &mut workers, &mut model[..size], unit);
            if chance.one_in(6) {
                let grown = size + (chance.below(40) as usize + 1) * 4096 * 8;
                match volume.resize(grown as u64) {
                    Ok(()) => {
                        size = grown;
                        model.resize(size, 0);
                    }
                    Err(error) => assert!(
                        error.to_string().contains("backing file is larger"),
                        "seed {seed}: {error}"
                    ),
                }
                assert_eq!(volume.info().size, size as u64);
            }
            if chance.one_in(8) {
                let copy = case.copy();
                let options = Qcow2Options {
                    ..case.options.clone()
                };
                let copied = Qcow2Volume::open(&copy, &options).unwrap();
                let mut all = Buffer::new(size);
                copied.read_at(0, &mut all).unwrap().unwrap();
                assert!(all[..] == model[..], "seed {seed}: the copy differs");
                drop(copied);
                let seen = see(&std::fs::read(&copy).unwrap(), &case.below);
                assert_eq!((seen.leaked, seen.wrong.len(), seen.dirty), (0, 0, false));
            }
        }
        drop(workers);
        drop(volume);
        let seen = see(&std::fs::read(&case.path).unwrap(), &case.below);
        assert!(seen.wrong.is_empty(), "seed {seed}: {:?}", seen.wrong);
        assert_eq!((seen.leaked, seen.dirty), (0, false), "seed {seed}");
        assert!(seen.disk == model, "seed {seed}: the image differs");
    }
    true
}

/// Runs several concurrent requests on disjoint ranges, which may lie in the same clusters.
fn batch(
    chance: &mut Chance,
    volume: &Qcow2Volume,
    workers: &mut [Worker],
    model: &mut [u8],
    unit: usize,
) {
    let zeroes = volume.info().zeroes_after_deallocate;
    let mut taken: Vec<(usize, usize)> = Vec::new();
    let mut expect = Vec::new();
    let mut done = Vec::new();
    for tag in 0..1 + chance.below(24) {
        let most = [unit, 4096, 65536, 400_000][chance.below(4) as usize].max(unit);
        let len = (1 + chance.below((most / unit) as u64) as usize) * unit;
        let start = chance.below((model.len() / unit) as u64) as usize * unit;
        let len = len.min(model.len() - start);
        if taken
            .iter()
            .any(|&(from, to)| start < to && from < start + len)
        {
            continue;
        }
        taken.push((start, start + len));
        let fua = chance.one_in(4);
        let op = match chance.below(8) {
            0..=2 => Op::Read,
            3..=5 => Op::Write { fua },
            6 => Op::WriteZeroes {
                deallocate: chance.one_in(2),
                fua,
            },
            _ if zeroes => Op::Deallocate,
            _ => Op::Flush,
        };
        let bytes = match op {
            Op::Read => model[start..start + len].to_vec(),
            Op::Write { .. } => pattern(chance.next(), len),
            Op::Flush => Vec::new(),
            _ => vec![0; len],
        };
        let data = match op {
            Op::Write { .. } => SegmentList::owned(Buffer::from_slice(&bytes)),
            Op::Read => SegmentList::owned(Buffer::from_slice(&pattern(tag, len))),
            _ => SegmentList::new(),
        };
        let request = Request {
            tag: expect.len() as u64,
            op,
            offset: start as u64,
            len: if op == Op::Flush { 0 } else { len as u64 },
            data,
        };
        expect.push(Expect {
            op,
            offset: start,
            bytes,
        });
        let which = chance.below(workers.len() as u64) as usize;
        // A worker takes no commands while its ring is full.
        while workers[which].io.in_flight() >= workers[which].io.capacity() {
            workers
                .iter_mut()
                .for_each(|worker| worker.round(&mut done));
        }
        done.extend(workers[which].queue().submit(request));
    }
    let mut idle = 0;
    while done.len() < expect.len() {
        let before = done.len();
        workers
            .iter_mut()
            .for_each(|worker| worker.round(&mut done));
        // The kernel may take any time for an operation. Without one, each round makes progress.
        let works = workers.iter().any(|worker| worker.io.in_flight() > 0);
        let goes_on = works || done.len() > before || volume.has_threads();
        idle = if goes_on { 0 } else { idle + 1 };
        assert!(
            idle < 100_000,
            "{} of {} completions: {workers:?}",
            done.len(),
            expect.len()
        );
    }
    assert_eq!(done.len(), expect.len());
    for Completion { tag, result, data } in done {
        let Expect { op, offset, bytes } = &expect[tag as usize];
        result.unwrap_or_else(|error| panic!("{op:?} at {offset}: {error}"));
        match op {
            Op::Read => assert!(data.equals(0, bytes), "{offset}, {} bytes", bytes.len()),
            _ => model[*offset..offset + bytes.len()].copy_from_slice(bytes),
        }
    }
}

/// Operations of tasks wait until the ring has room.
#[test]
fn requests_on_full_ring_end() {
    let Some((_directory, _path, volume)) = image(EmptyImage::default()) else {
        return;
    };
    let Some(mut worker) = Worker::with_capacity(&volume, 2) else {
        return testkit::skip("qcow2: full ring", "there is no io_uring");
    };
    let mut done = Vec::new();
    for tag in 0..32 {
        let data = SegmentList::owned(Buffer::from_slice(&[9; 4096]));
        let write = Request::transfer(tag, Op::Write { fua: false }, tag << 16, data);
        done.extend(worker.queue().submit(write));
    }
    worker.settle(&mut done);
    assert_eq!(done.len(), 32);
    done.into_iter().for_each(|end| end.result.unwrap());
}

fn image(make: EmptyImage<'_>) -> Option<(tempfile::TempDir, PathBuf, Qcow2Volume)> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    make.image(&path);
    let volume = Qcow2Volume::open(&path, &Qcow2Options::default()).unwrap();
    Some((directory, path, volume))
}

fn write(worker: &mut Worker, offset: u64, byte: u8, len: usize) {
    let data = SegmentList::owned(Buffer::from_slice(&vec![byte; len]));
    let Worker { io, queue } = worker;
    let queue = queue.as_mut().unwrap();
    let done = finish(io, queue, |queue| {
        queue.start(1, Op::Write { fua: false }, offset, data)
    });
    done.result.unwrap();
}

fn plain(worker: &mut Worker, op: Op, offset: u64, len: u64) {
    let request = Request::without_data(2, op, offset, len);
    let Worker { io, queue } = worker;
    let done = finish(io, queue.as_mut().unwrap(), |queue| queue.submit(request));
    done.result.unwrap();
}

fn len(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

#[test]
fn freed_clusters_are_reused() {
    let Some((_directory, path, volume)) = image(EmptyImage::default()) else {
        return;
    };
    let Some(mut worker) = Worker::new(&volume) else {
        return testkit::skip("qcow2: clusters used again", "there is no io_uring");
    };
    let clusters = 100;
    let mut longest = 0;
    for round in 0..8 {
        for n in 0..clusters {
            write(&mut worker, n << 16, round + 1, 4096);
        }
        longest = longest.max(len(&path));
        if round == 1 {
            // With the first ones, which were not ready for the second round.
            assert!(longest < (2 * clusters + 20) << 16, "{longest}");
        }
        plain(&mut worker, Op::Deallocate, 0, clusters << 16);
        let mut done = Vec::new();
        while volume_has_limbo(&volume) {
            worker.round(&mut done);
        }
        worker.settle(&mut done);
        plain(&mut worker, Op::Flush, 0, 0);
    }
    assert!(
        longest < (clusters + 20) << 16,
        "the file has grown to {longest} bytes"
    );
}

fn volume_has_limbo(volume: &Qcow2Volume) -> bool {
    volume.has_limbo()
}

/// Checks that an idle queue does not delay the reuse of freed clusters, and that one with
/// outstanding requests does.
#[test]
fn idle_queue_delays_no_reuse() {
    let Some((_directory, _path, volume)) = image(EmptyImage::default()) else {
        return;
    };
    let (Some(mut one), Some(mut two)) = (Worker::new(&volume), Worker::new(&volume)) else {
        return testkit::skip("qcow2: queues at rest", "there is no io_uring");
    };
    write(&mut one, 0, 1, 65536);
    write(&mut two, 1 << 20, 1, 65536);
    // The worker would sleep now, and does not poll the queue again.
    let mut done = Vec::new();
    two.settle(&mut done);
    assert_eq!(two.queue().state().in_flight, 0);
    plain(&mut one, Op::Deallocate, 0, 65536);
    for _ in 0..1_000_000 {
        one.round(&mut done);
        let _ = one.queue().state();
        if !volume_has_limbo(&volume) {
            return;
        }
    }
    panic!("it waits for the other one");
}

#[test]
fn cancelled_request_ends_and_frees_clusters() {
    let Some((_directory, path, volume)) = image(EmptyImage::default()) else {
        return;
    };
    let Some(mut worker) = Worker::new(&volume) else {
        return testkit::skip("qcow2: cancelled requests", "there is no io_uring");
    };
    for round in 0..200u64 {
        let mut done = Vec::new();
        let offset = (round % 100) << 16;
        for tag in 0..4 {
            let data = SegmentList::owned(Buffer::from_slice(&[7; 8192]));
            let op = Op::Write {
                fua: round % 2 == 0,
            };
            done.extend(worker.queue().start(tag, op, offset + tag * 8192, data));
        }
        for _ in 0..round % 13 {
            worker.round(&mut done);
        }
        for tag in 0..4 {
            worker.queue().cancel(tag);
        }
        worker.settle(&mut done);
        let mut tags: Vec<u64> = done.iter().map(|completion| completion.tag).collect();
        tags.sort_unstable();
        assert_eq!(tags, [0, 1, 2, 3], "round {round}");
        for completion in done {
            let result = completion.result;
            let fine = result.is_ok() || result.is_err_and(|e| e.kind == IoErrorKind::Aborted);
            assert!(fine, "{result:?}");
        }
    }
    for n in 0..100 {
        write(&mut worker, n << 16, 9, 65536);
    }
    drop(worker);
    drop(volume);
    let seen = see(&std::fs::read(&path).unwrap(), &[]);
    assert!(seen.wrong.is_empty(), "{:?}", seen.wrong);
    assert_eq!((seen.leaked, seen.dirty), (0, false));
    assert!(seen.disk[..100 << 16].iter().all(|&byte| byte == 9));
}

/// Checks that a queue dropped with outstanding requests leaves a consistent image.
#[test]
fn dropped_queue_leaves_image_consistent() {
    for rounds in 0..30 {
        let Some((_directory, path, volume)) = image(EmptyImage::default()) else {
            return;
        };
        let Some(mut worker) = Worker::new(&volume) else {
            return testkit::skip("qcow2: queues that go", "there is no io_uring");
        };
        let mut done = Vec::new();
        for tag in 0..20 {
            let data = SegmentList::owned(Buffer::from_slice(&[7; 8192]));
            let op = Op::Write { fua: tag % 3 == 0 };
            done.extend(worker.queue().start(tag, op, tag * 40960, data));
        }
        for _ in 0..rounds {
            worker.round(&mut done);
        }
        drop(worker);
        let mut other = Worker::new(&volume).unwrap();
        for n in 0..20 {
            let data = SegmentList::owned(Buffer::new(512));
            let Worker { io, queue } = &mut other;
            let read = finish(io, queue.as_mut().unwrap(), |q| {
                q.start(1, Op::Read, n * 40960, data)
            });
            // A read that was cut short may leave an unusable entry, until the next start.
            let _ = read.result;
        }
        drop(other);
        drop(volume);
        let seen = see(&std::fs::read(&path).unwrap(), &[]);
        assert!(seen.wrong.is_empty(), "{rounds}: {:?}", seen.wrong);
        assert!(seen.leaked == 0 || seen.dirty, "{rounds}");
        drop(Qcow2Volume::open(&path, &Qcow2Options::default()).unwrap());
        let seen = see(&std::fs::read(&path).unwrap(), &[]);
        assert_eq!((seen.leaked, seen.wrong.len(), seen.dirty), (0, 0, false));
    }
}

/// Guard that a task holds, as it holds locks. When dropped, it notes whether the ring has an
/// operation in flight.
struct InFlightAtDrop(Rc<Io>, Rc<Cell<Option<bool>>>);

impl Drop for InFlightAtDrop {
    fn drop(&mut self) {
        self.1.set(Some(self.0.in_flight() > 0));
    }
}

/// Another queue that gets the task's locks may write the same tables.
#[test]
fn dropped_task_keeps_its_locks_until_its_operations_have_ended() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let volume = FileVolume::open(file.path(), FileOptions::default()).unwrap();
    let io = Rc::new(Io::new(IoOptions::default()));
    let Ok(lanes) = Lanes::new(&io) else {
        return;
    };
    let open = || volume.open(lanes.io()).unwrap();
    lanes.add(open(), open());
    let mut tasks = Tasks::new(&io, lanes.clone()).unwrap();
    let seen = Rc::new(Cell::new(None));
    let guard = InFlightAtDrop(io.clone(), seen.clone());
    tasks.spawn(For::Nobody, SegmentList::new(), 0, move |store, _| {
        Box::pin(async move {
            let _guard = guard;
            store.write(0, &[1; 4096]).await
        })
    });
    assert!(io.in_flight() > 0);
    drop(lanes);
    drop(tasks);
    assert_eq!(seen.get(), Some(false));
}
