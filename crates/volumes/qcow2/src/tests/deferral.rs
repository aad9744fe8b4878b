//! Deferred table entries: what first writes cost with a journal, when the entries go to the image,
//! and which journals the next process does not follow.

use super::loss::{Event, Recorder, file_id, journal_of};
use super::queues::{Worker, finish};
use crate::Qcow2Volume;
use crate::blocking::block_on;
use crate::chain::{Qcow2Options, open, open_with};
use crate::deferred::Deferred;
use crate::image::Image;
use crate::journal::Journal;
use crate::testing::{EmptyImage, see};
use crate::write::WriteTarget;
use dma::{Buffer, SegmentList};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::task::{Context, Waker};
use volume::{Direct, JournalFolder, Op, Request, Volume, Wake};

const CLUSTER: u64 = 1 << 16;

/// An image of 28 MiB over a file of sevens.
struct Backed {
    directory: tempfile::TempDir,
    path: PathBuf,
    base: Vec<u8>,
}

impl Backed {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let base = vec![7; 28 << 20];
        std::fs::write(directory.path().join("base"), &base).unwrap();
        let path = directory.path().join("disk");
        EmptyImage {
            size: 28 << 20,
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

    fn options(&self, journals: Option<&JournalFolder>) -> Qcow2Options {
        Qcow2Options {
            direct: Direct::Off,
            backing: Some(self.directory.path().to_owned()),
            journals: journals.cloned(),
            ..Qcow2Options::default()
        }
    }

    /// Writes a page to each of these clusters, in a process that is killed then.
    fn write_and_die(&self, journals: &JournalFolder, clusters: &[u64]) {
        let opened = open(&self.path, &self.options(Some(journals))).unwrap();
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

impl Worker {
    /// Writes a page of nines at this byte of the disk.
    fn write(&mut self, at: u64) {
        self.write_with(at, false);
    }

    fn write_with(&mut self, at: u64, fua: bool) {
        let data = SegmentList::owned(Buffer::from_slice(&[9; 4096]));
        self.execute(Request::transfer(1, Op::Write { fua }, at, data));
    }

    fn execute(&mut self, request: Request) {
        let Worker { io, queue } = self;
        let done = finish(io, queue.as_mut().unwrap(), |queue| queue.submit(request));
        done.result.unwrap();
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
    let journal = journal_of(&backed.path);
    let options = backed.options(Some(&journal));
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
    let journal = journal_of(&backed.path);
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
    let journal = journal_of(&backed.path);
    backed.write_and_die(&journal, &[3]);
    drop(open(&backed.path, &backed.options(None)).unwrap());
    backed.write_and_die(&journal, &[]);
    assert_eq!(backed.found(3), 7);
}

/// Another process has used the cluster of a recorded entry, and was killed, too.
#[test]
fn journal_that_contradicts_image_is_dropped() {
    let backed = Backed::new();
    let (journal, other) = (journal_of(&backed.path), journal_of(&backed.path));
    backed.write_and_die(&journal, &[3]);
    {
        let options = backed.options(Some(&other));
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

/// Another program has changed the tables and has left the journal's number in the header, against
/// the format. It has put data in place of a recorded entry's, or another table in place of the one
/// that has the entry. Nothing that it has written is overwritten.
#[test]
fn journal_that_does_not_continue_tables_is_dropped() {
    for moves_table in [false, true] {
        let backed = Backed::new();
        let journal = journal_of(&backed.path);
        backed.write_and_die(&journal, &[1]);
        // Cluster 1 is in the image, and cluster 3 only in the journal.
        backed.write_and_die(&journal, &[3]);
        let mut image = std::fs::read(&backed.path).unwrap();
        let word = |image: &[u8], at: u64| {
            let bytes = image[at as usize..].first_chunk().unwrap();
            u64::from_be_bytes(*bytes)
        };
        let (l1, copied) = (3 * CLUSTER, 1 << 63);
        let table = word(&image, l1) & !copied;
        assert_eq!((table % CLUSTER, word(&image, table + 24)), (0, 0));
        let end = (image.len() as u64).next_multiple_of(CLUSTER);
        image.resize((end + CLUSTER) as usize, 7);
        let mut put = |at: u64, value: u64| {
            image[at as usize..][..8].copy_from_slice(&value.to_be_bytes());
        };
        if moves_table {
            // The former table is the data of cluster 5.
            put(l1, end | copied);
            for n in 0..CLUSTER / 8 {
                put(end + n * 8, 0);
            }
            put(end + 40, table | copied);
        } else {
            put(table + 24, end | copied);
            image[(end + 8192) as usize..][..4096].fill(5);
        }
        std::fs::write(&backed.path, &image).unwrap();
        let before = see(&image, &backed.base).disk;
        backed.write_and_die(&journal, &[]);
        let after = std::fs::read(&backed.path).unwrap();
        let seen = see(&after, &backed.base);
        assert!(seen.wrong.is_empty(), "{:?}", seen.wrong);
        assert!(seen.disk == before, "{moves_table}");
    }
}

/// Another program has changed the image, and has died with the dirty bit set, too. Its tables do
/// not contradict the journal.
#[test]
fn journal_is_dropped_when_other_writer_has_cleared_autoclear_features() {
    for features in [0u64, 1 << 32] {
        let backed = Backed::new();
        let journal = journal_of(&backed.path);
        backed.write_and_die(&journal, &[3]);
        let file = std::fs::File::options().write(true).open(&backed.path);
        let file = file.unwrap();
        file.write_all_at(&features.to_be_bytes(), 88).unwrap();
        backed.write_and_die(&journal, &[]);
        assert_eq!(backed.found(3), 7);
    }
}

/// The journal is in the folder of the process before, and its boot is over.
#[test]
fn journal_of_earlier_boot_is_dropped() {
    let backed = Backed::new();
    let journal = journal_of(&backed.path);
    backed.write_and_die(&journal, &[3]);
    let later = JournalFolder {
        boot: Ok([2; 16]),
        ..journal.clone()
    };
    backed.write_and_die(&later, &[]);
    assert_eq!(backed.found(3), 7);
    // The journal is used again.
    backed.write_and_die(&later, &[3]);
    backed.write_and_die(&later, &[]);
    assert_eq!(backed.found(3), 9);
}

/// The folder belongs to another user for a while: opening the image would lose the entries.
#[test]
fn image_waits_while_its_journal_cannot_be_opened() {
    let backed = Backed::new();
    let journal = journal_of(&backed.path);
    backed.write_and_die(&journal, &[3]);
    let unusable = JournalFolder {
        boot: Err("another user may write it".into()),
        ..journal.clone()
    };
    let refused = open(&backed.path, &backed.options(Some(&unusable))).err();
    let text = refused.unwrap().to_string();
    assert!(text.contains("journal"), "{text}");
    backed.write_and_die(&journal, &[]);
    assert_eq!(backed.found(3), 9);
}

/// A folder in place of the journal's file stands for a file of another user.
#[test]
fn image_waits_while_journal_is_unreadable() {
    let backed = Backed::new();
    let journal = journal_of(&backed.path);
    backed.write_and_die(&journal, &[3]);
    let file = Journal::path(&journal, file_id(&backed.path));
    let moved = backed.directory.path().join("journal");
    std::fs::rename(&file, &moved).unwrap();
    std::fs::create_dir(&file).unwrap();
    let before = std::fs::read(&backed.path).unwrap();
    let refused = open(&backed.path, &backed.options(Some(&journal))).err();
    let text = refused.unwrap().to_string();
    assert!(text.contains("journal"), "{text}");
    assert!(std::fs::read(&backed.path).unwrap() == before);
    std::fs::remove_dir(&file).unwrap();
    std::fs::rename(&moved, &file).unwrap();
    backed.write_and_die(&journal, &[]);
    assert_eq!(backed.found(3), 9);
    // Nothing is lost where the image is in order: it is opened without a journal.
    std::fs::remove_file(&file).ok();
    std::fs::create_dir(&file).unwrap();
    assert!(open(&backed.path, &backed.options(Some(&journal))).is_ok());
}

/// The system reports a failed write to the disk by a flush: the next process still has the journal
/// then.
#[test]
fn replay_keeps_journal_until_its_entries_are_durable() {
    for flushes in 0.. {
        let backed = Backed::new();
        let journal = journal_of(&backed.path);
        backed.write_and_die(&journal, &[3, 4, 9]);
        let log = std::cell::RefCell::default();
        let opened = open_with(&backed.path, &backed.options(Some(&journal)), |files| {
            let recorder = Recorder::endless(&backed.path, &files);
            recorder.flushes.set(flushes);
            *log.borrow_mut() = recorder.log.clone();
            recorder
        });
        let ended = opened.is_ok();
        drop(opened);
        let log = log.into_inner();
        let log = log.borrow();
        let is_entry = |event: &Event| matches!(event, Event::Write(_, bytes) if bytes.len() == 8);
        let is_flush = |event: &Event| matches!(event, Event::Flush);
        let (first, last) = (
            log.iter().position(is_entry),
            log.iter().rposition(is_entry),
        );
        if let Some((first, last)) = first.zip(last) {
            assert!(log[..first].iter().any(is_flush), "clusters come first");
            assert!(last < log.len());
        }
        let is_durable = last.is_some_and(|last| log[last..].iter().any(is_flush));
        let found = Journal::look(&journal, file_id(&backed.path))
            .ok()
            .flatten();
        let found = found.map(|found| found.recorded().unwrap().unwrap().entries.len());
        let is_whole = found == Some(3);
        assert!(is_whole || is_durable, "flush {flushes}: {found:?}");
        backed.write_and_die(&journal, &[]);
        for cluster in [3, 4, 9] {
            assert_eq!(backed.found(cluster), 9);
        }
        if ended {
            assert!(flushes >= 3);
            return;
        }
    }
}

/// The write of an entry in place of the lost journal fails, and the guest's with it. The entry
/// leads to the cluster nevertheless, which no other write may get.
#[test]
fn cluster_stays_allocated_behind_entry_whose_write_has_failed() {
    let backed = Backed::new();
    let journal = journal_of(&backed.path);
    let opened = open(&backed.path, &backed.options(Some(&journal))).unwrap();
    let recorder = Recorder::endless(&backed.path, &opened.files);
    let target = WriteTarget::new(&opened.images, &recorder).unwrap();
    write(&target, 8192, 4096);
    let file = Journal::path(&journal, file_id(&backed.path));
    let file = std::fs::File::options().write(true).open(file);
    file.unwrap().set_len(0).unwrap();
    recorder.flushes.set(0);
    let data = SegmentList::owned(Buffer::from_slice(&[9; 4096]));
    block_on(target.write(CLUSTER + 8192, &data, false)).unwrap_err();
    // Whatever was freed is used again.
    block_on(opened.images[0].reap(&recorder)).unwrap();
    block_on(target.writer.flush(&recorder)).unwrap_err();
    block_on(target.writer.flush(&recorder)).unwrap();
    let data = SegmentList::owned(Buffer::from_slice(&[5; 4096]));
    for cluster in 2..6 {
        block_on(target.write(cluster * CLUSTER + 8192, &data, false)).unwrap();
    }
    block_on(target.writer.flush(&recorder)).unwrap();
    for (cluster, byte) in [(0, 9), (1, 9), (2, 5), (5, 5)] {
        assert_eq!(backed.found(cluster), byte);
    }
}

#[test]
fn journal_with_damaged_slot_is_dropped_and_others_are_used() {
    let (backed, other) = (Backed::new(), Backed::new());
    let journals = journal_of(&backed.path);
    backed.write_and_die(&journals, &[3, 4]);
    let files = |folder: &JournalFolder| -> Vec<_> {
        let files = std::fs::read_dir(&folder.path).unwrap();
        files.map(|file| file.unwrap().path()).collect()
    };
    let file = std::fs::File::options()
        .write(true)
        .open(&files(&journals)[0]);
    other.write_and_die(&journals, &[3]);
    assert_eq!(files(&journals).len(), 2);
    // A byte of the first slot's entry.
    file.unwrap().write_all_at(&[0x55], 128 + 8).unwrap();
    backed.write_and_die(&journals, &[]);
    other.write_and_die(&journals, &[]);
    assert_eq!((backed.found(3), backed.found(4)), (7, 7));
    assert_eq!(other.found(3), 9);
}

/// Killed after any number of the operations by which the next process begins.
#[test]
fn replay_that_is_killed_is_repeated() {
    let backed = Backed::new();
    let journal = journal_of(&backed.path);
    backed.write_and_die(&journal, &[3, 4, 9]);
    let recorded = |number| {
        let id = file_id(&backed.path);
        let journal = Journal::look(&journal, id).unwrap().unwrap();
        let found = journal.recorded().unwrap().unwrap();
        (found.number == number, found.entries.len())
    };
    // The journal keeps the entries, and the image its number, until the image has them all: the
    // image is put back as it was before each entry was written.
    let before = std::fs::read(&backed.path).unwrap();
    let number = u32::from_be_bytes(before[88..92].try_into().unwrap());
    assert_eq!(recorded(number), (true, 3));
    let journal_file = std::fs::read_dir(&journal.path).unwrap().next().unwrap();
    let journal_file = journal_file.unwrap().path();
    let journal_before = std::fs::read(&journal_file).unwrap();
    backed.write_and_die(&journal, &[]);
    let after = std::fs::read(&backed.path).unwrap();
    // Any part of the changes may be there when the next process begins: sectors from the start of
    // the file on, and from its end on.
    for share in 0..8 {
        for from_end in [false, true] {
            let mut image = before.clone();
            image.resize(after.len().max(before.len()), 0);
            let changed: Vec<usize> = (0..image.len() / 512)
                .filter(|n| image[n * 512..][..512] != after[n * 512..][..512])
                // The header is written last, when the journal is empty.
                .filter(|n| *n > 0)
                .collect();
            let count = changed.len() * share / 7;
            let part = if from_end {
                &changed[changed.len() - count..]
            } else {
                &changed[..count]
            };
            for n in part {
                image[n * 512..][..512].copy_from_slice(&after[n * 512..][..512]);
            }
            std::fs::write(&backed.path, &image).unwrap();
            std::fs::write(&journal_file, &journal_before).unwrap();
            backed.write_and_die(&journal, &[]);
            for cluster in [3, 4, 9] {
                assert_eq!(backed.found(cluster), 9, "{share} of 7");
            }
        }
    }
}

/// The journal's file belongs to an image that is open, or was not closed in order.
#[test]
fn journal_is_removed_when_image_is_closed_in_order() {
    let backed = Backed::new();
    let journal = journal_of(&backed.path);
    let has_journal = || std::fs::read_dir(&journal.path).unwrap().next().is_some();
    let options = backed.options(Some(&journal));
    let volume = Qcow2Volume::open(&backed.path, &options).unwrap();
    let Some(mut worker) = Worker::new(&volume) else {
        return;
    };
    worker.write(3 * CLUSTER + 8192);
    drop(worker);
    assert!(has_journal());
    drop(volume);
    assert!(!has_journal());
    assert_eq!(backed.found(3), 9);
    let header = std::fs::read(&backed.path).unwrap();
    assert_eq!(header[72..96], [0; 24], "all features are as they were");
    // A process that does not get to the end leaves the file.
    backed.write_and_die(&journal, &[4]);
    assert!(has_journal());
}

#[test]
fn compatible_features_stay() {
    let backed = Backed::new();
    let file = std::fs::File::options().write(true).open(&backed.path);
    file.unwrap().write_all_at(&[1], 87).unwrap();
    let journal = journal_of(&backed.path);
    backed.write_and_die(&journal, &[3]);
    backed.write_and_die(&journal, &[]);
    assert_eq!(std::fs::read(&backed.path).unwrap()[72..96], {
        let mut features = [0; 24];
        features[15] = 1;
        features
    });
}

/// Another program shortens the journal's file: the entries are written before the guest is
/// answered.
#[test]
fn entries_are_written_through_when_journal_is_lost() {
    let backed = Backed::new();
    let journal = journal_of(&backed.path);
    let opened = open(&backed.path, &backed.options(Some(&journal))).unwrap();
    let target = WriteTarget::new(&opened.images, &opened.files).unwrap();
    write(&target, 8192, 4096);
    let file = std::fs::read_dir(&journal.path).unwrap().next().unwrap();
    let file = std::fs::File::options()
        .write(true)
        .open(file.unwrap().path());
    file.unwrap().set_len(0).unwrap();
    for cluster in [1, 2] {
        write(&target, cluster * CLUSTER + 8192, 4096);
        let image = std::fs::read(&backed.path).unwrap();
        assert_eq!(
            see(&image, &backed.base).disk[(cluster * CLUSTER + 8192) as usize],
            9
        );
    }
}

#[test]
fn long_first_write_keeps_rest_of_cluster() {
    const KIB: usize = 1 << 10;
    let backed = Backed::new();
    let opened = open(&backed.path, &backed.options(None)).unwrap();
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
    let journal = journal_of(&backed.path);
    let volume = Qcow2Volume::open(&backed.path, &backed.options(Some(&journal))).unwrap();
    let Some(mut worker) = Worker::new(&volume) else {
        return;
    };
    worker.write(3 * CLUSTER + 8192);
    for _ in 0..4 {
        volume.refresh().unwrap();
        worker.settle(&mut Vec::new());
        assert_eq!(backed.found(3), 7);
    }
    // The queue does it, which wakes by itself.
    assert!(matches!(worker.queue().state().wake, Wake::After(_)));
    volume.refresh().unwrap();
    assert_eq!(backed.found(3), 7);
    worker.settle(&mut Vec::new());
    assert_eq!(backed.found(3), 9);
    assert_eq!(worker.queue().state().wake, Wake::Event);
    // Without a queue, the call does it.
    worker.write(4 * CLUSTER + 8192);
    drop(worker);
    for _ in 0..6 {
        assert_eq!(backed.found(4), 7);
        volume.refresh().unwrap();
    }
    assert_eq!(backed.found(4), 9);
}

#[test]
fn queue_writes_entries_when_many_wait() {
    let backed = Backed::new();
    let journal = journal_of(&backed.path);
    let options = Qcow2Options {
        journal_slots: 16,
        ..backed.options(Some(&journal))
    };
    let volume = Qcow2Volume::open(&backed.path, &options).unwrap();
    let Some(mut worker) = Worker::new(&volume) else {
        return;
    };
    for cluster in 0..9 {
        worker.write(cluster * CLUSTER + 8192);
    }
    // More than half of the slots are used: a task of the queue writes the entries.
    worker.settle(&mut Vec::new());
    assert_eq!(backed.found(8), 9);
}

/// A durable write into a cluster whose entry waits: the entry has to be in the image, too.
#[test]
fn durable_write_waits_for_deferred_entry() {
    let backed = Backed::new();
    let journal = journal_of(&backed.path);
    let volume = Qcow2Volume::open(&backed.path, &backed.options(Some(&journal))).unwrap();
    let Some(mut worker) = Worker::new(&volume) else {
        return;
    };
    // The first one has a table made, and the flush makes it durable.
    worker.write(8192);
    worker.execute(Request::flush(1));
    worker.write(CLUSTER + 8192);
    assert_eq!((backed.found(0), backed.found(1)), (9, 7));
    worker.write_with(CLUSTER + 8192, true);
    assert_eq!(backed.found(1), 9);
}

/// The system reports a failed flush once: here to a task that no request of the guest waits for.
#[test]
fn failed_flush_of_background_task_fails_next_flush_of_guest() {
    let backed = Backed::new();
    let journal = journal_of(&backed.path);
    let options = backed.options(Some(&journal));
    let opened = open(&backed.path, &options).unwrap();
    let recorder = Recorder::endless(&backed.path, &opened.files);
    let target = WriteTarget::new(&opened.images, &recorder).unwrap();
    write(&target, 0, 4096);
    let is_empty = || deferred(&opened.images).is_empty();
    recorder.flushes.set(0);
    block_on(target.writer.write_back(&recorder)).unwrap_err();
    // Another flush in the background cannot tell.
    block_on(target.writer.flush_all(&recorder)).unwrap();
    assert!(!target.writer.is_durable());
    block_on(target.writer.flush(&recorder)).unwrap_err();
    block_on(target.writer.flush(&recorder)).unwrap();
    assert!(target.writer.is_durable());
    assert!(is_empty(), "the image has everything");
    // The guest's own flush fails once.
    write(&target, CLUSTER, 4096);
    assert!(!is_empty(), "the image lacks an entry");
    recorder.flushes.set(0);
    block_on(target.writer.flush(&recorder)).unwrap_err();
    block_on(target.writer.flush(&recorder)).unwrap();
}

/// The queue of a task that writes entries in the background is dropped: whether the flush has
/// failed is unknown.
#[test]
fn flush_whose_task_is_dropped_counts_as_failed() {
    let backed = Backed::new();
    let journal = journal_of(&backed.path);
    let opened = open(&backed.path, &backed.options(Some(&journal))).unwrap();
    let recorder = Recorder::endless(&backed.path, &opened.files);
    let target = WriteTarget::new(&opened.images, &recorder).unwrap();
    write(&target, 0, 4096);
    let mut task = Box::pin(target.writer.write_back(&recorder));
    let mut context = Context::from_waker(Waker::noop());
    // The refcounts; then the flush begins.
    for _ in 0..2 {
        assert!(task.as_mut().poll(&mut context).is_pending());
    }
    drop(task);
    // A durable write reports it, too.
    let data = SegmentList::owned(Buffer::from_slice(&[9; 4096]));
    block_on(target.write(4096, &data, true)).unwrap_err();
    block_on(target.write(4096, &data, true)).unwrap();
    block_on(target.writer.flush(&recorder)).unwrap();
    assert!(deferred(&opened.images).is_empty());
}

/// The header may say that the image is clean, although its flush has failed.
#[test]
fn dirty_bit_is_set_again_after_failed_close() {
    let backed = Backed::new();
    let options = backed.options(None);
    let opened = open(&backed.path, &options).unwrap();
    let recorder = Recorder::endless(&backed.path, &opened.files);
    let target = WriteTarget::new(&opened.images, &recorder).unwrap();
    let is_dirty = || std::fs::read(&backed.path).unwrap()[79] & 1 == 1;
    write(&target, 0, 4096);
    assert!(is_dirty());
    recorder.flushes.set(1);
    block_on(target.writer.end(&recorder)).unwrap_err();
    assert!(!is_dirty());
    write(&target, CLUSTER, 4096);
    assert!(is_dirty());
}
