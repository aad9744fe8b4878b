//! A machine that loses its power, or a process that is killed, between any two operations of any
//! tasks: flushed data is there, unflushed data is old or new, and nothing else is ever seen.

use super::Chance;
use crate::blocking::{Blocking, block_on};
use crate::chain::{Qcow2Options, open};
use crate::image::Image;
use crate::journal::{FileId, SLOTS};
use crate::store::{Access, IoOutcome, Store};
use crate::testing::{EmptyImage, see};
use crate::write::WriteTarget;
use dma::{Buffer, SegmentList};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use volume::{Direct, IoErrorKind, JournalFolder, Op};

const SECTOR: usize = 512;

/// Effect of an operation on the file.
pub(super) enum Event {
    Write(u64, Vec<u8>),
    Flush,
}

/// Executes operations when they are polled the second time, and records their effects.
#[derive(Clone)]
pub(super) struct Recorder {
    pub(super) files: Blocking,
    file: Rc<std::fs::File>,
    pub(super) log: Rc<RefCell<Vec<Event>>>,
    /// Number of operations until everything stops.
    left: Rc<Cell<u64>>,
    /// Number of flushes that succeed until one fails.
    pub(super) flushes: Rc<Cell<u64>>,
}

impl Store for Recorder {
    type Shield = ();

    fn start(&self, access: Access) -> impl Future<Output = IoOutcome> + 'static {
        let this = self.clone();
        let mut access = Some(access);
        let mut polled = false;
        std::future::poll_fn(move |context: &mut Context<'_>| {
            if !std::mem::replace(&mut polled, true) {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            let Some(left) = this.left.get().checked_sub(1) else {
                // No operation is left: this one is never executed.
                return Poll::Pending;
            };
            this.left.set(left);
            Poll::Ready(this.carry_out(access.take().unwrap()))
        })
    }

    fn is_cancelled(&self) -> bool {
        false
    }

    fn shield(&self) {}
}

impl Recorder {
    /// Creates a store that never stops.
    pub(super) fn endless(path: &Path, files: &Blocking) -> Self {
        let file = std::fs::File::options().write(true).open(path).unwrap();
        Self {
            files: files.clone(),
            file: Rc::new(file),
            log: Rc::default(),
            left: Rc::new(Cell::new(u64::MAX)),
            flushes: Rc::new(Cell::new(u64::MAX)),
        }
    }

    fn carry_out(&self, access: Access) -> IoOutcome {
        let bytes = match access.op {
            Op::Read => None,
            Op::Flush => {
                let Some(left) = self.flushes.get().checked_sub(1) else {
                    self.flushes.set(u64::MAX);
                    return (Err(IoErrorKind::NotDurable.into()), access.data);
                };
                self.flushes.set(left);
                self.log.borrow_mut().push(Event::Flush);
                return (Ok(()), access.data);
            }
            Op::Write { .. } => {
                let mut bytes = vec![0; access.len as usize];
                access.data.copy_to(0, &mut bytes);
                Some(bytes)
            }
            Op::WriteZeroes { .. } | Op::Deallocate => Some(vec![0; access.len as usize]),
        };
        match bytes {
            None => block_on(self.files.start(access)),
            Some(bytes) => {
                self.file.write_all_at(&bytes, access.at).unwrap();
                self.log.borrow_mut().push(Event::Write(access.at, bytes));
                (Ok(()), access.data)
            }
        }
    }
}

/// Sector of the disk, as the guest knows it.
#[derive(Clone, Debug)]
struct Sector {
    /// Values that a reader may find after the stop; each is a number that fills the sector.
    possible: Vec<u64>,
    now: u64,
    /// Time of the last change, and whether a change is in progress.
    changed: u64,
    busy: bool,
}

#[derive(Clone, Copy, Debug)]
enum Work {
    Write {
        start: usize,
        count: usize,
        value: u64,
        fua: bool,
    },
    Zero {
        start: usize,
        count: usize,
        deallocate: bool,
    },
    Flush,
    /// Write of deferred entries in the background.
    WriteBack,
}

fn fill(value: u64, count: usize) -> Vec<u8> {
    value.to_le_bytes().repeat(count * SECTOR / 8)
}

type BoxedTask = Pin<Box<dyn Future<Output = ()>>>;

/// Runs a disk until it stops. Of its unflushed sectors, `loss` in a hundred are lost then.
fn live(seed: u64, loss: u64) {
    let mut chance = Chance::new(seed);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    let cluster_bits = [9, 12, 13][chance.below(3) as usize];
    let sectors = [900, 3000][chance.below(2) as usize];
    let is_backed = chance.one_in(2);
    // Clusters of zeroes behind it, of something else, and of both.
    let has_holes = chance.one_in(2);
    let behind = |n: usize| {
        if has_holes && !(n / 12).is_multiple_of(3) {
            0
        } else {
            1_000_000 + n as u64
        }
    };
    let below: Vec<u8> = if is_backed {
        let len = sectors - 100 * chance.below(4) as usize;
        (0..len).flat_map(|n| fill(behind(n), 1)).collect()
    } else {
        Vec::new()
    };
    std::fs::write(directory.path().join("base"), &below).unwrap();
    let image = EmptyImage {
        size: (sectors * SECTOR) as u64,
        cluster_bits,
        refcount_order: [3, 4, 6][chance.below(3) as usize],
        backing: is_backed.then_some(("base", "raw")),
    };
    if is_backed && chance.one_in(2) {
        image.image(&directory.path().join("between"));
        EmptyImage {
            backing: Some(("between", "qcow2")),
            ..image
        }
        .image(&path);
    } else {
        image.image(&path)
    }
    let options = Qcow2Options {
        direct: Direct::Off,
        backing: Some(directory.path().to_owned()),
        ..Qcow2Options::default()
    };
    let slots = [None, Some(8), Some(64), Some(SLOTS)][chance.below(4) as usize];
    let options = Qcow2Options {
        journals: slots.map(|_| journal_of(&path)),
        journal_slots: slots.unwrap_or(SLOTS),
        ..options
    };
    let opened = open(&path, &options).unwrap();
    let start = std::fs::read(&path).unwrap();
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let recorder = Recorder {
        files: opened.files.clone(),
        file: Rc::new(file),
        log: Rc::default(),
        left: Rc::new(Cell::new(chance.below(3000))),
        flushes: Rc::new(Cell::new(u64::MAX)),
    };
    let images = Arc::new(opened.images);
    let mut disk: Vec<Sector> = (0..sectors)
        .map(|n| {
            let now = if n * SECTOR < below.len() {
                behind(n)
            } else {
                0
            };
            Sector {
                possible: vec![now],
                now,
                changed: 0,
                busy: false,
            }
        })
        .collect();
    run(&mut chance, &images, &recorder, &mut disk);
    drop(images);
    let log = std::mem::take(&mut *recorder.log.borrow_mut());
    drop((recorder, opened.files));
    let torn = tear(&mut chance, start, &log, loss);
    if loss == 0 {
        // The kernel has everything: the file itself.
        assert_eq!(torn, std::fs::read(&path).unwrap(), "seed {seed}");
        let seen = see(&torn, &below);
        assert!(seen.wrong.is_empty(), "seed {seed}: {:?}", seen.wrong);
        assert!(seen.dirty || seen.leaked == 0, "seed {seed}");
    }
    std::fs::write(&path, &torn).unwrap();
    let options = match loss {
        0 => options,
        // The journal is lost with everything else in memory, or is one of an earlier boot.
        _ => Qcow2Options {
            journals: options
                .journals
                .filter(|_| chance.one_in(2))
                .map(|folder| JournalFolder {
                    boot: Ok([2; 16]),
                    ..folder
                }),
            ..options
        },
    };
    drop(open(&path, &options).unwrap_or_else(|error| panic!("seed {seed}: {error}")));
    let seen = see(&std::fs::read(&path).unwrap(), &below);
    assert!(seen.wrong.is_empty(), "seed {seed}: {:?}", seen.wrong);
    assert_eq!((seen.leaked, seen.dirty), (0, false), "seed {seed}");
    for (n, sector) in disk.iter().enumerate() {
        let found = &seen.disk[n * SECTOR..][..SECTOR];
        let is = |value: &u64| *found == *fill(*value, 1);
        let fine = match loss {
            // Whatever was answered is there.
            0 if !sector.busy => is(&sector.now),
            _ => sector.possible.iter().any(is),
        };
        assert!(
            fine,
            "seed {seed}, loss {loss}, clusters of 2^{cluster_bits}, backed {is_backed}: sector {n} \
             is {:x?}, and may be {sector:?}",
            &found[..8]
        );
    }
}

/// Returns the identity of the image's file at `path`.
pub(super) fn file_id(path: &Path) -> FileId {
    let file = std::fs::metadata(path).unwrap();
    (file.dev(), file.ino())
}

/// Creates a folder for the journal of the image at `path`, beside it.
pub(super) fn journal_of(path: &Path) -> JournalFolder {
    let folder = tempfile::tempdir_in(path.parent().unwrap()).unwrap();
    JournalFolder {
        path: folder.keep(),
        boot: Ok([1; 16]),
    }
}

/// Runs tasks until no operation is left.
fn run(chance: &mut Chance, images: &Arc<Vec<Image>>, recorder: &Recorder, disk: &mut [Sector]) {
    let mut running: Vec<(Work, u64, BoxedTask)> = Vec::new();
    let mut context = Context::from_waker(Waker::noop());
    let mut time = 0;
    // Tasks that wait for a lock or another task are polled without effect. Tasks with an operation
    // outstanding at the end never continue.
    let mut idle = 0;
    while idle < 200 {
        time += 1;
        idle += u64::from(recorder.left.get() == 0);
        if running.len() < 6 && chance.one_in(3) && recorder.left.get() > 0 {
            let work = begin(chance, disk, time);
            if let Some(work) = work {
                running.push((work, time, task(images, recorder, work)));
            }
        }
        if running.is_empty() {
            continue;
        }
        let at = chance.below(running.len() as u64) as usize;
        let (work, began, future) = &mut running[at];
        if future.as_mut().poll(&mut context).is_ready() {
            end(disk, *work, *began, time);
            drop(running.swap_remove(at));
        }
        // Makes freed clusters usable again.
        if chance.one_in(50) && recorder.left.get() > 0 {
            let (images, recorder) = (images.clone(), recorder.clone());
            let mut reap = Box::pin(async move { images[0].reap(&recorder).await.map(drop) });
            while recorder_goes_on(&mut reap, &mut context) {}
        }
        if chance.one_in(3) {
            let writer = images[0].writer.as_ref().unwrap();
            let seen = writer.epochs.join();
            drop(seen);
        }
    }
}

fn recorder_goes_on(
    reap: &mut Pin<Box<impl Future<Output = Result<(), volume::IoError>>>>,
    context: &mut Context<'_>,
) -> bool {
    thread_local!(static TRIES: Cell<u32> = const { Cell::new(0) });
    let goes_on = reap.as_mut().poll(context).is_pending();
    TRIES.set(if goes_on { TRIES.get() + 1 } else { 0 });
    goes_on && TRIES.get() % 1000 != 999
}

fn task(images: &Arc<Vec<Image>>, recorder: &Recorder, work: Work) -> BoxedTask {
    let (images, store) = (images.clone(), recorder.clone());
    Box::pin(async move {
        let target = WriteTarget::new(&images, &store).unwrap();
        let done = match work {
            Work::Write {
                start,
                count,
                value,
                fua,
            } => {
                let data = SegmentList::owned(Buffer::from_slice(&fill(value, count)));
                target.write((start * SECTOR) as u64, &data, fua).await
            }
            Work::Zero {
                start,
                count,
                deallocate,
            } => {
                let op = Op::WriteZeroes {
                    deallocate,
                    fua: false,
                };
                target
                    .zero((start * SECTOR) as u64, (count * SECTOR) as u64, op)
                    .await
            }
            Work::Flush => target.writer.flush(&store).await,
            Work::WriteBack => target.writer.write_back(&store).await,
        };
        done.unwrap();
    })
}

fn begin(chance: &mut Chance, disk: &mut [Sector], time: u64) -> Option<Work> {
    if chance.one_in(8) {
        return Some(Work::Flush);
    }
    if chance.one_in(16) {
        return Some(Work::WriteBack);
    }
    let start = chance.below(disk.len() as u64) as usize;
    let most = [1, 8, 40, 200][chance.below(4) as usize];
    let count = (1 + chance.below(most) as usize).min(disk.len() - start);
    let range = &mut disk[start..start + count];
    if range.iter().any(|sector| sector.busy) {
        return None;
    }
    let work = match chance.below(4) {
        0 => Work::Zero {
            start,
            count,
            deallocate: chance.one_in(2),
        },
        _ => Work::Write {
            start,
            count,
            value: time,
            fua: chance.one_in(8),
        },
    };
    let value = match work {
        Work::Write { value, .. } => value,
        _ => 0,
    };
    for sector in range {
        sector.busy = true;
        sector.possible.push(value);
        sector.changed = u64::MAX;
    }
    Some(work)
}

/// Completes a request to the guest.
fn end(disk: &mut [Sector], work: Work, began: u64, time: u64) {
    let (start, count, value, fua) = match work {
        Work::Write {
            start,
            count,
            value,
            fua,
        } => (start, count, value, fua),
        Work::Zero { start, count, .. } => (start, count, 0, false),
        Work::Flush => {
            for sector in disk.iter_mut().filter(|sector| sector.changed < began) {
                sector.possible = vec![sector.now];
            }
            return;
        }
        Work::WriteBack => return,
    };
    for sector in &mut disk[start..start + count] {
        (sector.busy, sector.now, sector.changed) = (false, value, time);
        if fua {
            sector.possible = vec![value];
        }
    }
}

/// Returns the file after a loss: all flushed data, and some sectors of the rest.
fn tear(chance: &mut Chance, start: Vec<u8>, log: &[Event], loss: u64) -> Vec<u8> {
    let mut file = start;
    let durable = log
        .iter()
        .rposition(|event| matches!(event, Event::Flush))
        .unwrap_or(0);
    for (number, event) in log.iter().enumerate() {
        let Event::Write(at, bytes) = event else {
            continue;
        };
        let mut at = *at as usize;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let len = rest.len().min(SECTOR - at % SECTOR);
            let (piece, more) = rest.split_at(len);
            if number < durable || loss == 0 || chance.below(100) >= loss {
                if file.len() < at + len {
                    file.resize(at + len, 0);
                }
                file[at..at + len].copy_from_slice(piece);
            }
            (at, rest) = (at + len, more);
        }
    }
    file
}

fn lives(loss: u64) {
    let count = match std::env::var("VNVME_LIVES") {
        Ok(text) => text.parse().unwrap(),
        Err(_) => 40,
    };
    for seed in 0..count {
        live(seed, loss);
    }
}

#[test]
fn killed_process_loses_nothing() {
    lives(0);
}

#[test]
fn flushed_data_survives_power_loss() {
    lives(50);
}

#[test]
fn flushed_data_survives_loss_of_all_else() {
    lives(100);
}

#[test]
fn partial_writeback_exposes_no_other_data() {
    lives(5);
}

/// Returns how often a write waits for the disk. The write is `len` bytes long and the first one
/// into its cluster. The raw file below the empty image contains `behind` after the written bytes,
/// and `last` at the cluster's end.
fn flushes(behind: u8, last: u8, len: usize) -> usize {
    let directory = tempfile::tempdir().unwrap();
    let mut base = vec![behind; 512 << 10];
    for cluster in base.chunks_mut(1 << 16) {
        cluster[0xffff] = last;
    }
    std::fs::write(directory.path().join("base"), base).unwrap();
    for (name, backing) in [("between", ("base", "raw")), ("disk", ("between", "qcow2"))] {
        EmptyImage {
            backing: Some(backing),
            ..EmptyImage::default()
        }
        .image(&directory.path().join(name));
    }
    let path = directory.path().join("disk");
    let options = Qcow2Options {
        direct: Direct::Off,
        backing: Some(directory.path().to_owned()),
        ..Qcow2Options::default()
    };
    let opened = open(&path, &options).unwrap();
    let recorder = Recorder::endless(&path, &opened.files);
    let target = WriteTarget::new(&opened.images, &recorder).unwrap();
    // The first one has a table made.
    let counts = [0, 2 << 16].map(|at| {
        let data = SegmentList::owned(Buffer::from_slice(&vec![9; len]));
        block_on(target.write(at, &data, false)).unwrap();
        let events = recorder.log.borrow();
        let flushes = events.iter().filter(|event| matches!(event, Event::Flush));
        flushes.count()
    });
    counts[1] - counts[0]
}

#[test]
fn only_replaced_data_waits_for_flush() {
    for len in [4096, 1 << 16] {
        assert_eq!(flushes(7, 7, len), 1, "{len} bytes in the place of others");
    }
    assert_eq!(flushes(0, 0, 4096), 0, "zeroes are found as they are read");
    assert_eq!(flushes(0, 7, 4096), 1, "all of a cluster is looked at");
    // Data that is replaced as a whole is not read.
    assert_eq!(flushes(0, 0, 1 << 16), 1);
}

/// Checks that backing files are never written.
#[test]
fn backing_files_are_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let base = directory.path().join("base");
    std::fs::write(&base, vec![7; 1 << 20]).unwrap();
    let path = directory.path().join("disk");
    EmptyImage {
        backing: Some(("base", "raw")),
        ..EmptyImage::default()
    }
    .image(&path);
    let options = Qcow2Options {
        backing: Some(base.clone()),
        ..Qcow2Options::default()
    };
    let opened = open(&path, &options).unwrap();
    let target = WriteTarget::new(&opened.images, &opened.files).unwrap();
    let data = SegmentList::owned(Buffer::from_slice(&[9; 4096]));
    block_on(target.write(4096, &data, true)).unwrap();
    drop(opened);
    check_content(&path, &base);
}

fn check_content(path: &Path, base: &Path) {
    let below = std::fs::read(base).unwrap();
    assert!(below.iter().all(|&byte| byte == 7));
    let seen = see(&std::fs::read(path).unwrap(), &below);
    assert!(seen.disk[..4096].iter().all(|&byte| byte == 7));
    assert!(seen.disk[4096..8192].iter().all(|&byte| byte == 9));
    assert!(seen.disk[8192..1 << 20].iter().all(|&byte| byte == 7));
    assert!(seen.disk[1 << 20..].iter().all(|&byte| byte == 0));
    assert!(seen.wrong.is_empty() && seen.leaked == 0);
}
