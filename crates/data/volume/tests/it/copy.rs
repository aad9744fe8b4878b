//! Copies by the file system: the copied data, and the volumes that do not take part.

use crate::common::{Worker, disk, memory, sparse};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use volume::{
    AtomicVolume, Completion, CopyRequest, Direct, FairGroup, FairVolume, FaultVolume, FileCopy,
    FileOptions, FileVolume, IoErrorKind, IoLimits, LimitVolume, MemVolume, NullOptions,
    NullVolume, OnError, OnErrorVolume, PreviousProcess, Rates, SliceVolume, Volume,
};

const MIB: u64 = 1 << 20;
/// Size of the files in bytes.
const SIZE: u64 = 4 * MIB;
/// Places and lengths are multiples of this, in bytes: no disk has larger blocks.
const UNIT: u64 = 4096;
const TAG: u64 = 1 << 40;

fn options(copy: FileCopy, direct: Direct) -> FileOptions {
    FileOptions {
        copy,
        direct,
        previous: PreviousProcess {
            limit: Duration::ZERO,
            ..PreviousProcess::default()
        },
        ..FileOptions::default()
    }
}

fn file(path: &Path, copy: FileCopy) -> FileVolume {
    FileVolume::open(path, options(copy, Direct::Auto)).unwrap()
}

fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let mut numbers = Numbers(seed);
    let words = (0..len / 8).flat_map(|_| numbers.next().to_le_bytes());
    words.collect()
}

/// splitmix64.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Starts a copy; whether it was taken.
fn start(from: &mut Worker, source: u64, to: &mut Worker, offset: u64, len: u64) -> bool {
    let Some(source) = from.queue.copy_source(source, len) else {
        return false;
    };
    assert_eq!(source.len_bytes(), len);
    to.queue.copy(CopyRequest {
        tag: TAG,
        source,
        offset,
        fua: false,
    })
}

/// A copy from start to end; none: it was not taken.
fn copy(
    from: &mut Worker,
    source: u64,
    to: &mut Worker,
    offset: u64,
    len: u64,
) -> Option<Completion> {
    let taken = start(from, source, to, offset, len);
    assert_eq!(to.queue.state().in_flight, usize::from(taken));
    taken.then(|| {
        let done = to.wait(1).pop().unwrap();
        assert_eq!((done.tag, to.queue.state().in_flight), (TAG, 0));
        done
    })
}

/// Reads and writes before and after a copy, through the page cache or past it, agree with the
/// copy. The next process's reads agree as well.
#[test]
fn file_copy_agrees_with_reads_and_writes() {
    let directories = [Some(disk()), memory()];
    for (directory, direct) in directories
        .iter()
        .flatten()
        .flat_map(|directory| [(directory, Direct::Auto), (directory, Direct::Off)])
    {
        let paths = [0, 1].map(|number| {
            let path = directory.path().join(format!("{direct:?}{number}.raw"));
            let file = std::fs::File::create(&path).unwrap();
            file.set_len(SIZE).unwrap();
            path
        });
        let volumes = paths
            .each_ref()
            .map(|path| FileVolume::open(path, options(FileCopy::On, direct)).unwrap());
        let mut workers = volumes.each_ref().map(|volume| Worker::new(volume));
        let mut model = [1, 2].map(|seed| pattern(seed, SIZE));
        for (worker, bytes) in workers.iter_mut().zip(&model) {
            worker.write(0, bytes).unwrap();
        }
        let mut numbers = Numbers(direct as u64);
        let (mut copied, mut all) = ([0; 2], 0);
        for step in 0..120 {
            let len = (1 + numbers.below(128)) * UNIT;
            let [a, b] = [(); 2].map(|()| numbers.below((SIZE - len) / UNIT) * UNIT);
            let (at, to) = (a as usize, b as usize);
            let (from, dest) = ((step % 2) as usize, (step / 2 % 2) as usize);
            match numbers.below(4) {
                // Fills the page cache of either side, by the guest or by another reader.
                0 => {
                    let read = workers[from].read(a, len).unwrap();
                    assert!(read == model[from][at..at + len as usize]);
                    std::fs::read(&paths[dest]).unwrap();
                }
                1 => {
                    let bytes = pattern(step, len);
                    workers[from].write(a, &bytes).unwrap();
                    model[from][at..at + len as usize].copy_from_slice(&bytes);
                }
                _ if from == dest && a.abs_diff(b) < len => continue,
                _ => {
                    let range = at..at + len as usize;
                    let done = if from == dest {
                        let source = workers[from].queue.copy_source(a, len).unwrap();
                        let copy = CopyRequest {
                            tag: TAG,
                            source,
                            offset: b,
                            fua: step % 3 == 0,
                        };
                        let taken = workers[dest].queue.copy(copy);
                        taken.then(|| workers[dest].wait(1).pop().unwrap())
                    } else {
                        let [one, two] = &mut workers;
                        match from {
                            0 => copy(one, a, two, b, len),
                            _ => copy(two, a, one, b, len),
                        }
                    };
                    assert_eq!(done.is_some(), len >= 64 << 10, "{len}");
                    let Some(done) = done else { continue };
                    assert_eq!(done.result, Ok(()), "{direct:?} {step}");
                    let bytes = model[from][range].to_vec();
                    model[dest][to..to + len as usize].copy_from_slice(&bytes);
                    copied[dest] += len;
                    all += 1;
                    let read = workers[dest].read(b, len).unwrap();
                    assert!(read == bytes, "{direct:?} {step}");
                }
            }
        }
        assert!(all > 20, "{all}");
        for (number, worker) in workers.iter_mut().enumerate() {
            assert!(worker.read(0, SIZE).unwrap() == model[number]);
            assert!(std::fs::read(&paths[number]).unwrap() == model[number]);
            let done = volumes[number].copied();
            assert_eq!(done.reflinked + done.copied, copied[number]);
        }
    }
}

/// Layers that have work for each read or write refuse the copy; the rest pass it on.
#[test]
fn file_copy_passes_some_layers_only() {
    let directory = disk();
    let make = |name: &str, copy| {
        let path = directory.path().join(name);
        std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
        Arc::new(file(&path, copy))
    };
    let source = make("source", FileCopy::On);
    let mut from = Worker::new(&*source);
    let bytes = pattern(3, SIZE);
    from.write(0, &bytes).unwrap();
    let limits = |iops| IoLimits {
        iops: Rates {
            total: iops,
            ..Rates::default()
        },
        ..IoLimits::default()
    };
    let plain: Arc<dyn Volume> = make("plain", FileCopy::On);
    let slice = SliceVolume::new(plain.clone(), MIB, Some(2 * MIB)).unwrap();
    let limited = Arc::new(LimitVolume::new(plain.clone(), IoLimits::default()));
    let passing: [Arc<dyn Volume>; 4] = [
        plain.clone(),
        Arc::new(slice),
        limited.clone(),
        Arc::new(OnErrorVolume::new(plain.clone(), OnError::default(), "a")),
    ];
    for (number, volume) in passing.iter().enumerate() {
        let mut to = Worker::new(&**volume);
        let (source, len) = (MIB * number as u64 / 2, MIB);
        let done = copy(&mut from, source, &mut to, 512 << 10, len).unwrap();
        assert_eq!(done.result, Ok(()), "{number}");
        let (source, len) = (source as usize, len as usize);
        let read = to.read(512 << 10, len as u64).unwrap();
        assert!(read == bytes[source..source + len], "{number}");
        // And from there.
        let done = copy(&mut to, 512 << 10, &mut from, 3 * MIB, MIB).unwrap();
        assert_eq!(done.result, Ok(()), "{number}");
        assert!(from.read(3 * MIB, MIB).unwrap() == read);
    }
    let mut to = Worker::new(&*limited);
    limited.handle().set(limits(1000));
    assert!(!start(&mut from, 0, &mut to, 0, MIB), "a limit");
    assert!(to.queue.copy_source(0, MIB).is_none(), "a limit");
    limited.handle().set(IoLimits::default());
    assert!(copy(&mut from, 0, &mut to, 0, MIB).is_some());
    drop(to);
    let journal = MemVolume::new(16 * MIB).unwrap();
    let not: [Arc<dyn Volume>; 7] = [
        make("off", FileCopy::Off),
        Arc::new(MemVolume::new(SIZE).unwrap()),
        Arc::new(
            NullVolume::new(NullOptions {
                size: SIZE,
                ..NullOptions::default()
            })
            .unwrap(),
        ),
        Arc::new(FaultVolume::new(plain.clone())),
        Arc::new(FairVolume::new(plain.clone(), FairGroup::new(4), 1)),
        Arc::new(AtomicVolume::new(plain.clone(), Arc::new(journal), 16 << 10).unwrap()),
        Arc::new(MemVolume::new(SIZE).unwrap().read_only()),
    ];
    for volume in &not {
        let mut to = Worker::new(&**volume);
        assert!(!start(&mut from, 0, &mut to, 0, MIB), "{volume:?}");
        assert!(to.queue.copy_source(0, MIB).is_none(), "{volume:?}");
        assert_eq!(to.queue.state().in_flight, 0);
    }
}

#[test]
fn invalid_file_copy_is_refused() {
    let directory = disk();
    let path = sparse(&directory, SIZE);
    let only = options(FileCopy::On, Direct::Off);
    let read_only = FileVolume::open(
        &path,
        FileOptions {
            read_only: true,
            ..only
        },
    )
    .unwrap();
    let other = tempfile::NamedTempFile::new_in(directory.path()).unwrap();
    other.as_file().set_len(SIZE).unwrap();
    let writable = FileVolume::open(other.path(), only).unwrap();
    let slice = SliceVolume::new(Arc::new(writable), MIB, Some(MIB)).unwrap();
    let (mut from, mut to) = (Worker::new(&read_only), Worker::new(&slice));
    for (source, offset, len) in [
        (SIZE, 0, MIB),
        (SIZE - UNIT, 0, MIB),
        (u64::MAX, 0, MIB),
        (u64::MAX - UNIT + 1, 0, MIB),
        (1, 0, MIB),
        (0, 1, MIB),
        (0, 0, MIB + 1),
        (0, UNIT, MIB),
        (0, MIB, MIB),
        (0, u64::MAX - MIB + 1, MIB),
        (0, 0, 2 * MIB),
        (0, 0, u64::MAX),
        (0, 0, 0),
        (0, 0, UNIT),
    ] {
        assert!(
            !start(&mut from, source, &mut to, offset, len),
            "{source} {offset} {len}"
        );
    }
    assert!(!start(&mut to, 0, &mut from, 0, MIB), "read-only");
    assert!(other.as_file().metadata().unwrap().len() == SIZE);
    assert_eq!(copy(&mut from, 0, &mut to, 0, MIB).unwrap().result, Ok(()));
}

/// The caller reads and writes after each of these; a copy that can never succeed is not tried
/// again.
#[test]
fn unsupported_file_copy_fails() {
    let directory = disk();
    let path = sparse(&directory, SIZE);
    let source = file(&path, FileCopy::On);
    let mut from = Worker::new(&source);
    let to = tempfile::NamedTempFile::new_in(directory.path()).unwrap();
    to.as_file().set_len(SIZE).unwrap();
    let volume = file(to.path(), FileCopy::On);
    let mut to = Worker::new(&volume);
    let backing = std::fs::File::options().write(true).open(&path).unwrap();
    backing.set_len(2 * MIB).unwrap();
    let cut = copy(&mut from, MIB, &mut to, 0, 2 * MIB).unwrap().result;
    assert_eq!(cut.unwrap_err().kind, IoErrorKind::Truncated);
    let gone = copy(&mut from, 2 * MIB, &mut to, 0, MIB).unwrap().result;
    assert_eq!(gone.unwrap_err().kind, IoErrorKind::Truncated);
    backing.set_len(SIZE).unwrap();
    assert_eq!(
        copy(&mut from, MIB, &mut to, 0, 2 * MIB).unwrap().result,
        Ok(())
    );
    // Onto itself.
    for (from, offset) in [(0, MIB), (MIB, 0), (0, 0)] {
        let source = to.queue.copy_source(from, 2 * MIB).unwrap();
        let copy = CopyRequest {
            tag: TAG,
            source,
            offset,
            fua: false,
        };
        assert!(!to.queue.copy(copy), "{from} {offset}");
    }
    let Some(elsewhere) = memory() else { return };
    let elsewhere = file(&sparse(&elsewhere, SIZE), FileCopy::On);
    let mut elsewhere = Worker::new(&elsewhere);
    let error = copy(&mut from, 0, &mut elsewhere, 0, MIB).unwrap().result;
    assert_eq!(error.unwrap_err().errno, libc::EXDEV);
    assert!(!start(&mut from, 0, &mut elsewhere, 0, MIB), "tried again");
    assert_eq!(elsewhere.queue.state().in_flight, 0);
}

/// With `reflink` on one of the sides nothing else is done.
#[test]
fn reflink_option_on_either_side_forbids_copying() {
    let directory = disk();
    for modes in [
        [FileCopy::Reflink, FileCopy::On],
        [FileCopy::On, FileCopy::Reflink],
        [FileCopy::Reflink; 2],
    ] {
        let files = [0, 1].map(|number| {
            let path = directory.path().join(format!("{modes:?}{number}"));
            std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
            file(&path, modes[number])
        });
        let [mut from, mut to] = files.each_ref().map(|file| Worker::new(file));
        let result = copy(&mut from, 0, &mut to, 0, MIB).unwrap().result;
        let copied = files[1].copied();
        assert_eq!(copied.copied, 0);
        match copied.reflinked {
            0 => {
                assert_eq!(result.unwrap_err().kind, IoErrorKind::Unsupported);
                assert!(!start(&mut from, 0, &mut to, 0, MIB), "tried again");
            }
            reflinked => assert_eq!((reflinked, result), (MIB, Ok(()))),
        }
    }
}

/// No data is written for a queue that was dropped, and its file is free for the next opening.
#[test]
fn dropped_queue_waits_for_its_copies() {
    let directory = disk();
    let path = sparse(&directory, 64 * MIB);
    let source = file(&path, FileCopy::On);
    let mut from = Worker::new(&source);
    let to = tempfile::NamedTempFile::new_in(directory.path()).unwrap();
    to.as_file().set_len(64 * MIB).unwrap();
    for round in 0..8u8 {
        let volume = file(to.path(), FileCopy::On);
        let mut worker = Worker::new(&volume);
        // Enough for running and waiting copies.
        for _ in 0..5 {
            assert!(start(&mut from, 0, &mut worker, 0, 64 * MIB));
        }
        drop((worker, volume));
        let all = vec![round; 64 << 20];
        to.as_file().write_all_at(&all, 0).unwrap();
        let volume = file(to.path(), FileCopy::On);
        drop(volume);
        assert!(std::fs::read(to.path()).unwrap() == all);
    }
}

#[test]
fn cancelled_and_other_copies_all_end() {
    let directory = disk();
    let path = sparse(&directory, 64 * MIB);
    let source = file(&path, FileCopy::On);
    let mut from = Worker::new(&source);
    let to = tempfile::NamedTempFile::new_in(directory.path()).unwrap();
    to.as_file().set_len(64 * MIB).unwrap();
    let volume = file(to.path(), FileCopy::On);
    let mut to = Worker::new(&volume);
    for tag in 0..12 {
        let source = from.queue.copy_source(0, 32 * MIB).unwrap();
        let offset = tag % 2 * 32 * MIB;
        let copy = CopyRequest {
            tag,
            source,
            offset,
            fua: true,
        };
        assert!(to.queue.copy(copy));
    }
    assert_eq!(to.queue.state().in_flight, 12);
    for tag in 2..12 {
        to.queue.cancel(tag);
        to.queue.cancel(tag);
    }
    let mut tags: Vec<u64> = to
        .wait(12)
        .into_iter()
        .map(|done| {
            let aborted = Err(IoErrorKind::Aborted.into());
            assert!(done.result == Ok(()) || (done.tag > 1 && done.result == aborted));
            done.tag
        })
        .collect();
    tags.sort_unstable();
    assert_eq!(tags, (0..12).collect::<Vec<_>>());
    assert_eq!(to.queue.state().in_flight, 0);
}
