//! Every wrapper over every kind, with fast paths and without, answers the same as a naive model: a
//! byte vector.

use crate::common::{SubmitCall, Worker, bytes, disk, memory, sparse};
use dma::SegmentList;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use volume::{
    AtomicVolume, AtomicWrites, Completion, Direct, FairGroup, FairVolume, FaultVolume,
    FileOptions, FileVolume, Info, Io, IoErrorKind, IoLimits, LimitVolume, MemVolume, NullOptions,
    NullVolume, OnError, OnErrorVolume, Op, OpenQueue, QueueState, Rates, Request, SliceVolume,
    Volume, VolumeError, VolumeQueue,
};

/// Size of the volumes below, in bytes.
const SIZE: u64 = 256 << 10;
/// Requests are multiples of this, in bytes: no disk has larger blocks.
const UNIT: u64 = 4096;
const STEPS: u64 = 40;

/// A wrapper without a fast path: it forwards only the required methods.
#[derive(Debug)]
struct Bare(Arc<dyn Volume>);

struct BareQueue(OpenQueue);

impl Volume for Bare {
    fn info(&self) -> Info {
        self.0.info()
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        Ok(OpenQueue::new(BareQueue(self.0.open(io)?)))
    }

    fn id(&self) -> Vec<u8> {
        self.0.id()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.0)
    }
}

impl VolumeQueue for BareQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        self.0.submit(request)
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        self.0.poll(done)
    }

    fn state(&self) -> QueueState {
        self.0.state()
    }

    fn cancel(&mut self, tag: u64) {
        self.0.cancel(tag);
    }
}

/// A volume of the crate's own, by the name of its type.
struct Kind {
    name: &'static str,
    make: Box<dyn Fn() -> Arc<dyn Volume>>,
    /// Written data can be read.
    stores: bool,
}

/// A function that wraps one volume in another.
struct Wrapper {
    name: &'static str,
    wrap: fn(Arc<dyn Volume>) -> Arc<dyn Volume>,
}

const WRAPPERS: [Wrapper; 7] = [
    Wrapper {
        name: "Bare",
        wrap: |volume| Arc::new(Bare(volume)),
    },
    Wrapper {
        name: "SliceVolume",
        wrap: |volume| {
            let len = volume.info().size - 4 * UNIT;
            Arc::new(SliceVolume::new(volume, UNIT, Some(len)).unwrap())
        },
    },
    Wrapper {
        name: "LimitVolume",
        wrap: |volume| {
            let limits = IoLimits {
                iops: Rates {
                    total: 50_000,
                    ..Rates::default()
                },
                burst: Duration::ZERO,
                ..IoLimits::default()
            };
            Arc::new(LimitVolume::new(volume, limits))
        },
    },
    Wrapper {
        name: "FairVolume",
        wrap: |volume| Arc::new(FairVolume::new(volume, FairGroup::new(2), 7)),
    },
    Wrapper {
        name: "OnErrorVolume",
        wrap: |volume| Arc::new(OnErrorVolume::new(volume, OnError::default(), "test")),
    },
    Wrapper {
        name: "AtomicVolume",
        wrap: |volume| {
            let len = AtomicVolume::journal_len(16 << 10);
            let journal = Arc::new(MemVolume::new(len).unwrap());
            Arc::new(AtomicVolume::new(volume, journal, 16 << 10).unwrap())
        },
    },
    Wrapper {
        name: "FaultVolume",
        wrap: |volume| Arc::new(FaultVolume::new(volume)),
    },
];

fn file(path: &Path, direct: Direct) -> Arc<dyn Volume> {
    let options = FileOptions {
        direct,
        ..FileOptions::default()
    };
    Arc::new(FileVolume::open(path, options).unwrap())
}

fn null(latency: Duration) -> Arc<dyn Volume> {
    let options = NullOptions {
        size: SIZE,
        read_zeroes: true,
        latency,
        ..NullOptions::default()
    };
    Arc::new(NullVolume::new(options).unwrap())
}

/// `disk` and `memory`: files of [`SIZE`] bytes there.
fn kinds(disk: &Path, memory: Option<&Path>) -> Vec<Kind> {
    let on_disk = |direct| {
        let path = disk.to_owned();
        Box::new(move || file(&path, direct)) as Box<dyn Fn() -> Arc<dyn Volume>>
    };
    let kind = |name, make, stores| Kind { name, make, stores };
    let mut kinds = vec![
        kind("FileVolume", on_disk(Direct::Auto), true),
        kind("FileVolume", on_disk(Direct::Off), true),
        kind(
            "MemVolume",
            Box::new(|| Arc::new(MemVolume::new(SIZE).unwrap())),
            true,
        ),
        kind(
            "MemVolume",
            Box::new(|| Arc::new(MemVolume::kept(SIZE, None).unwrap())),
            true,
        ),
        kind("NullVolume", Box::new(|| null(Duration::ZERO)), false),
        kind(
            "NullVolume",
            Box::new(|| null(Duration::from_micros(20))),
            false,
        ),
    ];
    if let Some(path) = memory.map(Path::to_owned) {
        let make = Box::new(move || file(&path, Direct::Off));
        kinds.push(kind("FileVolume", make, true));
    }
    kinds
}

/// Knuth's MMIX generator.
struct Random(u64);

impl Random {
    /// A number below `limit`.
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// The naive model.
struct Model {
    bytes: Vec<u8>,
    stores: bool,
}

impl Model {
    /// Returns the contents of the request's range afterwards; `None` where it is outside.
    fn run(&mut self, op: Op, offset: u64, len: u64, byte: u8) -> Option<&[u8]> {
        if op == Op::Flush {
            return Some(&[]);
        }
        let range = offset as usize..offset.checked_add(len)? as usize;
        let held = self.bytes.get_mut(range)?;
        match op {
            Op::Write { .. } if self.stores => held.fill(byte),
            Op::WriteZeroes { .. } | Op::Deallocate => held.fill(0),
            _ => {}
        }
        Some(held)
    }
}

/// Random requests, one at a time and in batches.
fn check(what: &str, volume: &dyn Volume, stores: bool, seed: u64) {
    let size = volume.info().size;
    let mut worker = Worker::new(volume);
    let mut model = Model {
        bytes: vec![0; size as usize],
        stores,
    };
    let all = Op::WriteZeroes {
        deallocate: true,
        fua: false,
    };
    worker.without_data(all, 0, size).unwrap();
    let mut random = Random(seed);
    for step in 0..STEPS {
        let what = format!("{what}, step {step}");
        if random.below(8) == 0 {
            batch(&what, &mut worker, &mut model, &mut random);
            continue;
        }
        let byte = random.below(255) as u8 + 1;
        let fua = random.below(2) == 0;
        let op = match random.below(10) {
            0..=3 => Op::Read,
            4..=6 => Op::Write { fua },
            7 => Op::WriteZeroes {
                deallocate: random.below(2) == 0,
                fua,
            },
            8 => Op::Deallocate,
            _ => Op::Flush,
        };
        // Ranges may be outside, or end there.
        let offset = random.below(size / UNIT + 2) * UNIT;
        let len = if op == Op::Flush {
            0
        } else {
            (random.below(8) + 1) * UNIT
        };
        let data = match op {
            Op::Read | Op::Write { .. } => {
                worker.guest.list(&[(UNIT, len / 2), (1 << 20, len / 2)])
            }
            _ => SegmentList::new(),
        };
        data.fill(if op == Op::Read { 0xEE } else { byte });
        worker.queue.prefetch(op, offset, len);
        let completion = match (random.below(3), op.has_data()) {
            (0, true) => worker.run_now(op, offset, len, data),
            (1, true) => {
                worker.way = SubmitCall::Start;
                worker.run(op, offset, len, data)
            }
            _ => {
                worker.way = SubmitCall::Submit;
                worker.run(op, offset, len, data)
            }
        };
        let expected = model.run(op, offset, len, byte);
        match (completion.result, expected) {
            (Ok(()), Some(held)) if op == Op::Read => {
                assert!(bytes(&completion.data) == held, "{what}: {op:?}");
            }
            (Ok(()), Some(_)) => {}
            (Err(error), None) => assert_eq!(error.kind, IoErrorKind::OutOfRange, "{what}"),
            (result, expected) => panic!(
                "{what}: {op:?} of {len} at {offset} of {size}: {result:?}, inside: {}",
                expected.is_some()
            ),
        }
        assert_eq!(worker.queue.state(), QueueState::IDLE, "{what}");
    }
    let held = worker.read(0, size).unwrap();
    assert!(held == model.bytes, "{what}: holds something else");
    // Bytes behind a slice cannot be reached by a length that overflows.
    for offset in [size, u64::MAX - UNIT + 1] {
        let data = worker.guest.piece(0, UNIT);
        let refused = worker.run_now(Op::Read, offset, UNIT, data).result;
        assert_eq!(refused, Err(IoErrorKind::OutOfRange.into()), "{what}");
    }
}

/// Writes that are started together, and reads of which one is cancelled.
fn batch(what: &str, worker: &mut Worker, model: &mut Model, random: &mut Random) {
    const COUNT: u64 = 6;
    let first = random.below(model.bytes.len() as u64 / UNIT - COUNT) * UNIT;
    for op in [Op::Write { fua: false }, Op::Read] {
        let (mut started, mut done) = (Vec::new(), Vec::new());
        for at in 0..COUNT {
            let offset = first + at * UNIT;
            let byte = random.below(255) as u8 + 1;
            let data = worker.guest.piece(at * UNIT, UNIT);
            data.fill(byte);
            worker.way = crate::common::WAYS[at as usize % 2];
            let (tag, at_once) = worker.start(op, offset, UNIT, data);
            model.run(op, offset, UNIT, byte);
            started.push((tag, offset));
            done.extend(at_once);
        }
        worker.queue.push();
        let cancelled = started[random.below(COUNT) as usize].0;
        if op == Op::Read {
            worker.queue.cancel(cancelled);
        }
        done.extend(worker.wait(COUNT as usize - done.len()));
        assert_eq!(worker.queue.state(), QueueState::IDLE, "{what}");
        for (tag, offset) in started {
            let at = done.iter().position(|completion| completion.tag == tag);
            let completion = done.swap_remove(at.expect("a completion of each"));
            let held = &model.bytes[offset as usize..][..UNIT as usize];
            match completion.result {
                Ok(()) if op == Op::Read => {
                    assert!(bytes(&completion.data) == held, "{what}: read of a batch");
                }
                Ok(()) => {}
                Err(error) => {
                    assert_eq!((op, tag), (Op::Read, cancelled), "{what}: {error}");
                    assert_eq!(error.kind, IoErrorKind::Aborted, "{what}");
                }
            }
        }
    }
}

#[test]
fn every_wrapper_over_every_kind_matches_model() {
    let on_disk = disk();
    let in_memory = memory();
    let path = sparse(&on_disk, SIZE);
    let memory = in_memory.as_ref().map(|directory| sparse(directory, SIZE));
    let mut seed = 0;
    for Kind { name, make, stores } in kinds(&path, memory.as_deref()) {
        check(name, &*make(), stores, seed);
        for outer in &WRAPPERS {
            seed += 1;
            let what = format!("{} over {name}", outer.name);
            check(&what, &*(outer.wrap)(make()), stores, seed);
            for inner in &WRAPPERS {
                seed += 1;
                let what = format!("{} over {} over {name}", outer.name, inner.name);
                let volume = (outer.wrap)((inner.wrap)(make()));
                check(&what, &*volume, stores, seed);
            }
        }
    }
}

/// A wrapper forwards the methods that it does not implement to the volume inside.
#[test]
fn wrappers_forward_missing_methods() {
    let directory = disk();
    for Wrapper { name, wrap } in &WRAPPERS {
        let path = sparse(&directory, SIZE);
        let inside = file(&path, Direct::Auto);
        let extent = inside.extent().expect("a file's place");
        let limited = LimitVolume::new(inside, IoLimits::default());
        let fair = FairVolume::new(Arc::new(limited), FairGroup::new(2), 11);
        let fair: Arc<dyn Volume> = Arc::new(fair);
        let volume = wrap(fair.clone());
        let part = volume.extent().expect(name);
        assert_eq!(part.root, extent.root, "{name}: may overlap with others");
        assert!(volume.limits().is_some(), "{name}: limits cannot be set");
        let share = volume.share().expect("a share").weight();
        assert_eq!(share, if *name == "FairVolume" { 7 } else { 11 }, "{name}");
        // Resized: a slice of fixed length is not.
        std::fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(2 * SIZE)
            .unwrap();
        let before = volume.info().size;
        let changed = volume.refresh().unwrap();
        assert_eq!(fair.info().size, 2 * SIZE, "{name}: was not asked");
        assert_eq!(changed, *name != "SliceVolume", "{name}");
        assert_eq!(volume.info().size != before, changed, "{name}");
    }
}

/// The wrappers of this crate, which keep requests whole, pass a promise on, moved to their
/// beginning. A wrapper that does not implement it passes none on.
#[test]
fn wrappers_pass_atomic_promise_on() {
    let journal = Arc::new(MemVolume::new(AtomicVolume::journal_len(64 << 10)).unwrap());
    let below = Arc::new(MemVolume::new(SIZE).unwrap());
    let promising = Arc::new(AtomicVolume::new(below, journal, 64 << 10).unwrap());
    for Wrapper { name, wrap } in &WRAPPERS {
        let expected = match *name {
            "Bare" => 0,
            "SliceVolume" => UNIT as u32,
            // The wrapper's own unit.
            "AtomicVolume" => 16 << 10,
            _ => 64 << 10,
        };
        let promise = wrap(promising.clone()).atomic_writes();
        assert_eq!(promise.unit(), expected, "{name}");
        let nothing = wrap(null(Duration::ZERO)).atomic_writes();
        assert_eq!(nothing.is_none(), *name != "AtomicVolume", "{name}");
    }
    for Kind { name, make, .. } in kinds(Path::new("/dev/null"), None) {
        if name != "FileVolume" {
            assert_eq!(make().atomic_writes(), AtomicWrites::NONE, "{name}");
        }
    }
}

/// A kind or a wrapper that is added is tried here, too.
#[test]
fn every_volume_type_is_tested() {
    fn look(directory: &Path, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                look(&path, found);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let names = text
                .lines()
                .filter_map(|line| line.strip_prefix("impl Volume for "));
            found.extend(names.map(|name| name.trim_end_matches(" {").to_owned()));
        }
    }
    let mut found = BTreeSet::new();
    look(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("src"),
        &mut found,
    );
    let here = kinds(Path::new(""), None).into_iter().map(|kind| kind.name);
    let here = here.chain(WRAPPERS.iter().map(|wrapper| wrapper.name).skip(1));
    assert_eq!(found, here.map(str::to_owned).collect());
}
