//! Deferred table entries: what first writes cost with a journal, when the entries go to the image,
//! and which journals the next process does not follow.

use super::loss::{Event, Recorder, journal_of};
use super::queues::{Worker, finish};
use crate::Qcow2Volume;
use crate::blocking::block_on;
use crate::chain::{Qcow2Options, open};
use crate::deferred::Deferred;
use crate::image::Image;
use crate::journal::SLOTS;
use crate::testing::{EmptyImage, see};
use crate::write::WriteTarget;
use dma::{Buffer, SegmentList};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use volume::{Direct, MemoryPlace, Op, Request, Volume};

const CLUSTER: u64 = 1 << 16;

/// An image of 64 MiB over a file of sevens.
struct Backed {
    directory: tempfile::TempDir,
    path: PathBuf,
    base: Vec<u8>,
}

impl Backed {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let base = vec![7; 64 << 20];
        std::fs::write(directory.path().join("base"), &base).unwrap();
        let path = directory.path().join("disk");
        EmptyImage {
            size: 64 << 20,
            backing: Some(("base", "raw")),
            ..EmptyImage::default()
        }
        .image(&path);
        Self {
            directory,
            path,
            base,
        }
    }

    fn options(&self, memory: MemoryPlace) -> Qcow2Options {
        Qcow2Options {
            direct: Direct::Off,
            backing: Some(self.directory.path().to_owned()),
            memory,
            ..Qcow2Options::default()
        }
    }

    /// Writes a page to each of these clusters, in a process that is killed then.
    fn write_and_die(&self, journal: &Arc<OwnedFd>, clusters: &[u64]) {
        let memory = MemoryPlace::Kept(journal.clone());
        let opened = open(&self.path, &self.options(memory)).unwrap();
        let target = WriteTarget::new(&opened.images, &opened.files).unwrap();
        for cluster in clusters {
            write(&target, cluster * CLUSTER + 8192, 4096);
        }
        assert_eq!(deferred(&opened.images).is_empty(), clusters.is_empty());
    }

    /// Returns the first byte that was written to a cluster, as the image has it.
    fn found(&self, cluster: u64) -> u8 {
        let seen = see(&std::fs::read(&self.path).unwrap(), &self.base);
        assert!(seen.wrong.is_empty(), "{:?}", seen.wrong);
        let page = (cluster * CLUSTER + 8192) as usize;
        assert_eq!((seen.disk[page - 1], seen.disk[page + 4096]), (7, 7));
        seen.disk[page]
    }
}

fn deferred(images: &[Image]) -> &Deferred {
    let writer = images[0].writer.as_ref().unwrap();
    writer.deferred.as_ref().unwrap()
}

fn write<S: crate::store::Store>(target: &WriteTarget<'_, S>, at: u64, len: usize) {
    let data = SegmentList::owned(Buffer::from_slice(&vec![9; len]));
    block_on(target.write(at, &data, false)).unwrap();
}

#[test]
fn first_writes_with_journal_share_flush() {
    let backed = Backed::new();
    let journal = journal_of(&backed.path, SLOTS);
    let options = backed.options(MemoryPlace::Kept(journal));
    let opened = open(&backed.path, &options).unwrap();
    let recorder = Recorder::endless(&backed.path, &opened.files);
    let target = WriteTarget::new(&opened.images, &recorder).unwrap();
    let counts = || {
        let events = std::mem::take(&mut *recorder.log.borrow_mut());
        let flushes = events.iter().filter(|event| matches!(event, Event::Flush));
        let flushes = flushes.count();
        (flushes, events.len() - flushes)
    };
    // The first one has a table made.
    write(&target, 0, 4096);
    counts();
    for cluster in 1..=400 {
        write(&target, cluster * CLUSTER, 4096);
    }
    assert_eq!(counts(), (0, 400), "the clusters, and nothing else");
    block_on(target.writer.flush(&recorder)).unwrap();
    // Refcounts; 401 entries in a row.
    assert_eq!(counts(), (2, 2));
    block_on(target.writer.flush(&recorder)).unwrap();
    assert_eq!(counts(), (1, 0));
}

#[test]
fn next_process_has_unflushed_first_writes() {
    let backed = Backed::new();
    let journal = journal_of(&backed.path, SLOTS);
    backed.write_and_die(&journal, &[3, 4, 9]);
    assert_eq!(backed.found(4), 7, "the entry is only in the journal");
    backed.write_and_die(&journal, &[]);
    for cluster in [3, 4, 9] {
        assert_eq!(backed.found(cluster), 9);
    }
}

/// Another program has repaired the image, and may use the clusters for other data.
#[test]
fn journal_of_repaired_image_is_dropped() {
    let backed = Backed::new();
    let journal = journal_of(&backed.path, SLOTS);
    backed.write_and_die(&journal, &[3]);
    drop(open(&backed.path, &backed.options(MemoryPlace::Process)).unwrap());
    backed.write_and_die(&journal, &[]);
    assert_eq!(backed.found(3), 7);
}

/// Another process has used the cluster of a recorded entry, and was killed, too.
#[test]
fn journal_that_contradicts_image_is_dropped() {
    let backed = Backed::new();
    let (journal, other) = (
        journal_of(&backed.path, SLOTS),
        journal_of(&backed.path, SLOTS),
    );
    backed.write_and_die(&journal, &[3]);
    {
        let options = backed.options(MemoryPlace::Kept(other));
        let opened = open(&backed.path, &options).unwrap();
        let store = Recorder::endless(&backed.path, &opened.files);
        let target = WriteTarget::new(&opened.images, &store).unwrap();
        // The host cluster that cluster 3 had is used again when it reads as zeroes.
        assert!(block_on(opened.images[0].reap(&store)).unwrap());
        block_on(target.writer.flush(&store)).unwrap();
        write(&target, 5 * CLUSTER + 8192, 4096);
        block_on(target.writer.flush(&store)).unwrap();
    }
    backed.write_and_die(&journal, &[]);
    assert_eq!((backed.found(3), backed.found(5)), (7, 9));
}

#[test]
fn journal_of_other_file_is_not_used() {
    let (backed, other) = (Backed::new(), Backed::new());
    let journal = journal_of(&other.path, SLOTS);
    other.write_and_die(&journal, &[3]);
    let options = backed.options(MemoryPlace::Kept(journal.clone()));
    let opened = open(&backed.path, &options).unwrap();
    assert!(opened.images[0].writer.as_ref().unwrap().deferred.is_none());
    drop(opened);
    // Its own image still has it.
    other.write_and_die(&journal, &[]);
    assert_eq!((backed.found(3), other.found(3)), (7, 9));
}

#[test]
fn long_first_write_keeps_rest_of_cluster() {
    const KIB: usize = 1 << 10;
    let backed = Backed::new();
    let opened = open(&backed.path, &backed.options(MemoryPlace::Process)).unwrap();
    let target = WriteTarget::new(&opened.images, &opened.files).unwrap();
    let parts = [(0, 32), (8, 32), (32, 32), (16, 16), (4, 56), (1, 15)];
    for ((from, len), cluster) in parts.into_iter().zip(0..) {
        write(&target, cluster * CLUSTER + (from * KIB) as u64, len * KIB);
    }
    let seen = see(&std::fs::read(&backed.path).unwrap(), &backed.base);
    assert!(seen.wrong.is_empty());
    for ((from, len), cluster) in parts.into_iter().zip(seen.disk.chunks(CLUSTER as usize)) {
        let expected = |at: &usize| {
            if (from..from + len).contains(&(at / KIB)) {
                9
            } else {
                7
            }
        };
        assert!(
            (0..64 * KIB).all(|at| cluster[at] == expected(&at)),
            "{from} KiB"
        );
    }
}

#[test]
fn refresh_writes_entries_that_have_waited() {
    let backed = Backed::new();
    let volume = Qcow2Volume::open(&backed.path, &backed.options(MemoryPlace::New)).unwrap();
    let Some(mut worker) = Worker::new(&volume) else {
        return;
    };
    let data = SegmentList::owned(Buffer::from_slice(&[9; 4096]));
    let write = Request::transfer(1, Op::Write { fua: false }, 3 * CLUSTER + 8192, data);
    let Worker { io, queue } = &mut worker;
    let done = finish(io, queue.as_mut().unwrap(), |queue| queue.submit(write));
    done.result.unwrap();
    for _ in 0..5 {
        assert_eq!(backed.found(3), 7);
        volume.refresh().unwrap();
    }
    volume.refresh().unwrap();
    assert_eq!(backed.found(3), 9);
}

#[test]
fn queue_writes_entries_when_many_wait() {
    let backed = Backed::new();
    let journal = journal_of(&backed.path, 16);
    let options = backed.options(MemoryPlace::Kept(journal));
    let volume = Qcow2Volume::open(&backed.path, &options).unwrap();
    let Some(mut worker) = Worker::new(&volume) else {
        return;
    };
    for cluster in 0..9 {
        let data = SegmentList::owned(Buffer::from_slice(&[9; 4096]));
        let write = Request::transfer(1, Op::Write { fua: false }, cluster * CLUSTER + 8192, data);
        let Worker { io, queue } = &mut worker;
        let done = finish(io, queue.as_mut().unwrap(), |queue| queue.submit(write));
        done.result.unwrap();
    }
    // More than half of the slots are used: a task of the queue writes the entries.
    worker.settle(&mut Vec::new());
    assert_eq!(backed.found(8), 9);
}
