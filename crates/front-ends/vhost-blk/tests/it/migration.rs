//! Live migration: the dirty log, and the volume's way from one process to another. Both sides run
//! in this process, each with an opening of the file of its own, whose locks exclude each other.

use crate::common::driver::{GET_ID, SIZE, SLOTS};
use crate::common::*;
use dma::Memory;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tempfile::TempDir;
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VringConfigData};
use vhost_blk::DiskOptions;
use volume::{
    Effect, Fault, FaultVolume, FileOptions, FileVolume, IoErrorKind, Kind, OpKind, OpenOptions,
    Registry, Volume,
};

const PAGE: u64 = 4096;
const F_LOG_ALL: u64 = 1 << 26;
/// Guest page, outside of memory, at whose start the tests place the used ring in the log.
const USED_PAGE: u64 = 3000;
/// Size of a log with bits for more pages than the guest has.
const LOG: u64 = 512;

fn options() -> DiskOptions {
    DiskOptions {
        queues: 2,
        lock_timeout: Duration::from_millis(300),
        ..DiskOptions::default()
    }
}

/// Folders whose files are served by the fast path, and by io_uring.
fn folders() -> Vec<TempDir> {
    let in_memory = tempfile::tempdir_in("/dev/shm").unwrap();
    vec![in_memory, tempfile::tempdir().unwrap()]
}

fn incoming(path: &Path) -> Arc<dyn Volume> {
    let options = OpenOptions {
        incoming: true,
        ..OpenOptions::default()
    };
    let opened = Registry::<()>::new().open(path.to_str().unwrap(), options);
    opened.unwrap().volume
}

fn region(log: &Memory, size: u64) -> VhostUserDirtyLogRegion {
    VhostUserDirtyLogRegion {
        mmap_size: size,
        mmap_offset: 0,
        mmap_handle: log.fd().as_raw_fd(),
    }
}

/// Turns logging on as QEMU does. `used_at`: the address of the used ring in the log.
fn log_on(client: &mut Client, driver: &Driver, used_at: u64) -> Memory {
    let log = Memory::anonymous(4096).unwrap();
    client
        .frontend
        .set_log_base(0, Some(region(&log, LOG)))
        .unwrap();
    client
        .frontend
        .set_features(client.features | F_LOG_ALL)
        .unwrap();
    let config = VringConfigData {
        queue_max_size: SIZE,
        queue_size: SIZE,
        flags: 1,
        desc_table_addr: USER_BASE + driver.descriptors(),
        used_ring_addr: USER_BASE + driver.used(),
        avail_ring_addr: USER_BASE + driver.available(),
        log_addr: Some(used_at),
    };
    client
        .frontend
        .set_vring_addr(driver.index, &config)
        .unwrap();
    log
}

/// Takes the marked pages out of the log.
fn take(log: &Memory) -> BTreeSet<u64> {
    let mut pages = BTreeSet::new();
    for word in 0..LOG / 8 {
        let bits = log.atomic_u64(word as usize * 8).unwrap();
        let bits = u64::from_le(bits.swap(0, Ordering::SeqCst));
        pages.extend(
            (0..64)
                .filter(|bit| bits >> bit & 1 != 0)
                .map(|bit| word * 64 + bit),
        );
    }
    pages
}

/// Waits until these pages are marked, and finds no others.
fn assert_marked(what: &str, log: &Memory, pages: impl IntoIterator<Item = u64>) {
    let pages: BTreeSet<u64> = pages.into_iter().collect();
    let mut found = BTreeSet::new();
    eventually(what, || {
        found.extend(take(log));
        found.is_superset(&pages)
    });
    assert_eq!(found, pages, "{what}");
}

fn page_of(driver: &Driver, slot: u16) -> u64 {
    driver.slot(slot) / PAGE
}

#[test]
fn exactly_written_pages_are_logged() {
    // Begin of the used ring before `USED_PAGE`, such that the page before has the fields: flags
    // and index; flags and index; all but the event; flags. The other page has the rest.
    for (event_idx, before) in [(true, 4), (false, 4), (true, 516), (false, 2)] {
        for dir in folders() {
            for indirect in [false, true] {
                let (_, volume) = file_volume(&dir, 2);
                let served = Served::at(dir.path().join("s"), volume, options());
                let without = if event_idx { 0 } else { F_EVENT_IDX };
                let mut client = Client::connect(&served, F_LOG_ALL | without);
                let mut driver = client.queue(0);
                let way = |req: Req<'static>| if indirect { req.indirect() } else { req };
                driver.ok(way(Req::read(0, 8192)));
                let log = log_on(&mut client, &driver, USED_PAGE * PAGE - before);
                let used = [USED_PAGE - 1, USED_PAGE];
                static BYTES: [u8; 8192] = [7; 8192];
                let beyond = 4096;
                for (what, req, data_pages, status) in [
                    ("read", Req::read(0, 8192), 2, 0),
                    ("short read", Req::read(8, 512), 1, 0),
                    ("write", Req::write(0, &BYTES), 0, 0),
                    ("serial number", Req::new(GET_ID, 0, Data::In(5000)), 1, 0),
                    ("failed read", Req::read(beyond, 4096), 0, 1),
                ] {
                    let slot = driver.post(way(req));
                    driver.ring();
                    let (_, ended, _) = driver.finish();
                    assert_eq!(ended, status, "{what}");
                    let first = page_of(&driver, slot);
                    let pages = used.into_iter().chain(first..=first + data_pages);
                    assert_marked(what, &log, pages);
                }
                // Without the log nothing is marked.
                client.frontend.set_features(client.features).unwrap();
                client.start_log_off(&driver);
                take(&log);
                driver.ok(way(Req::read(0, 8192)));
                at_the_queues(&mut driver);
                assert_eq!(take(&log), BTreeSet::new());
            }
        }
    }
}

impl Client {
    /// Ends logging of a queue's used ring.
    fn start_log_off(&mut self, driver: &Driver) {
        let config = VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            flags: 0,
            desc_table_addr: USER_BASE + driver.descriptors(),
            used_ring_addr: USER_BASE + driver.used(),
            avail_ring_addr: USER_BASE + driver.available(),
            log_addr: None,
        };
        self.frontend.set_vring_addr(driver.index, &config).unwrap();
    }
}

#[test]
fn requests_from_before_log_are_logged_when_they_complete() {
    let dir = tempfile::tempdir().unwrap();
    let volume = FaultVolume::new(file_volume(&dir, 2).1);
    let faults = volume.faults();
    let served = Served::start(Arc::new(volume), options());
    for indirect in [false, true] {
        let mut client = Client::connect(&served, F_LOG_ALL);
        let mut driver = client.queue(0);
        faults.add(Fault::always(OpKind::Read, Effect::Hold));
        let req = Req::read(0, 12288);
        let slot = driver.post(if indirect { req.indirect() } else { req });
        driver.ring();
        eventually("it is held", || faults.held() == 1);
        let log = log_on(&mut client, &driver, USED_PAGE * PAGE);
        faults.clear();
        faults.release();
        assert_eq!(driver.finish().1, 0);
        let first = page_of(&driver, slot);
        assert_marked("read", &log, (first..=first + 3).chain([USED_PAGE]));
    }
}

#[test]
fn unusable_logs_end_the_connection() {
    let dir = tempfile::tempdir().unwrap();
    let (_, volume) = file_volume(&dir, 2);
    let served = Served::at(dir.path().join("s"), volume, options());
    let log = Memory::anonymous(4096).unwrap();
    let sealed = memfd_create("log", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&sealed, 4096).unwrap();
    fcntl_add_seals(&sealed, SealFlags::WRITE).unwrap();
    let socket = std::os::unix::net::UnixStream::pair().unwrap().0;
    let log_fd = log.fd().as_raw_fd();
    for (what, mmap_size, mmap_offset, mmap_handle) in [
        (
            "smaller than memory",
            MEMORY as u64 / PAGE / 8 - 1,
            0,
            log_fd,
        ),
        ("empty", 0, 0, log_fd),
        ("larger than its file", 4097, 0, log_fd),
        ("behind its file", 512, 4096, log_fd),
        ("unaligned", 512, 4, log_fd),
        ("overflowing", u64::MAX - 8, 4096, log_fd),
        ("sealed", 512, 0, sealed.as_fd().as_raw_fd()),
        ("socket", 512, 0, socket.as_raw_fd()),
    ] {
        let client = Client::connect(&served, F_LOG_ALL);
        let region = VhostUserDirtyLogRegion {
            mmap_size,
            mmap_offset,
            mmap_handle,
        };
        let refused = client.frontend.set_log_base(0, Some(region));
        refused.expect_err(what);
    }
    let mut client = Client::connect(&served, F_LOG_ALL);
    let mut driver = client.queue(0);
    driver.ok(Req::read(0, 4096));
}

#[test]
fn log_that_shrinks_stops_queue_only() {
    for dir in folders() {
        let (_, volume) = file_volume(&dir, 2);
        let served = Served::at(dir.path().join("s"), volume, options());
        let mut client = Client::connect(&served, F_LOG_ALL);
        let mut driver = client.queue(0);
        let log = log_on(&mut client, &driver, USED_PAGE * PAGE);
        driver.ok(Req::read(0, 4096));
        ftruncate(log.fd(), 0).unwrap();
        driver.post(Req::read(0, 4096));
        driver.ring();
        eventually("the error is signalled", || driver.err.read().is_ok());
        drop(client);
        let mut client = Client::connect(&served, F_LOG_ALL);
        client.queue(0).ok(Req::read(0, 4096));
    }
}

#[test]
fn only_volume_that_can_be_handed_over_offers_log() {
    let dir = tempfile::tempdir().unwrap();
    let (path, locked) = file_volume(&dir, 2);
    let features = |volume: Arc<dyn Volume>| {
        let served = Served::start(volume, options());
        Client::connect(&served, 0).features & F_LOG_ALL
    };
    assert_ne!(features(locked), 0);
    let unlocked = FileOptions {
        lock: false,
        ..FileOptions::default()
    };
    let unlocked = FileVolume::open(&path, unlocked).unwrap();
    assert_eq!(features(Arc::new(unlocked)), 0);
    let memory = volume::MemVolume::new(1 << 20).unwrap();
    assert_eq!(memory.info().kind, Kind::Memory);
    assert_eq!(features(Arc::new(memory)), 0);
}

/// Guest that reads and writes its disk, and verifies what it has read.
struct Guest {
    driver: Driver,
    /// Seed of the data in each slot's part of the disk.
    seeds: Vec<u64>,
    next_seed: u64,
    /// Requests that are outstanding: whether each slot's is a write.
    outstanding: Vec<Option<bool>>,
    /// Slots' parts of the disk, in the order of their requests.
    parts: Vec<u64>,
}

/// Bytes of a guest's request.
const BYTES: usize = 8192;

impl Guest {
    fn new(driver: Driver) -> Guest {
        Guest {
            driver,
            seeds: vec![0; usize::from(SLOTS)],
            next_seed: 1,
            outstanding: vec![None; usize::from(SLOTS)],
            parts: vec![0; usize::from(SLOTS)],
        }
    }

    /// Makes requests, alternating between writes and reads of parts that no other request uses.
    fn post(&mut self, count: usize) {
        for _ in 0..count.min(self.driver.free_slots()) {
            self.next_seed += 1;
            let busy: Vec<u64> = (0..self.parts.len())
                .filter(|slot| self.outstanding[*slot].is_some())
                .map(|slot| self.parts[slot])
                .collect();
            let all = self.seeds.len() as u64;
            let mut part = self.next_seed / 2 % all;
            while busy.contains(&part) {
                part = (part + 1) % all;
            }
            let (sector, writes) = (part * 64, self.next_seed.is_multiple_of(2));
            let slot = if writes {
                self.seeds[part as usize] = self.next_seed;
                let bytes = pattern(self.next_seed, BYTES);
                self.driver.post(Req::write(sector, &bytes))
            } else {
                self.driver.post(Req::read(sector, BYTES).indirect())
            };
            self.outstanding[usize::from(slot)] = Some(writes);
            self.parts[usize::from(slot)] = part;
        }
        self.driver.ring();
    }

    /// Waits for an outstanding request, and verifies its data.
    fn finish(&mut self) {
        let (slot, status, data) = self.driver.finish();
        assert_eq!(status, 0);
        let slot = usize::from(slot);
        let seed = self.seeds[self.parts[slot] as usize];
        if self.outstanding[slot].take() == Some(false) && seed != 0 {
            assert!(data == pattern(seed, BYTES), "wrong data");
        }
    }

    fn finish_all(&mut self) {
        while self.outstanding.iter().any(Option::is_some) {
            self.finish();
        }
    }

    fn verify_disk(&self, path: &Path) {
        let disk = std::fs::read(path).unwrap();
        for (part, seed) in self
            .seeds
            .iter()
            .enumerate()
            .filter(|(_, seed)| **seed != 0)
        {
            let at = part * 64 * 512;
            assert!(disk[at..at + BYTES] == pattern(*seed, BYTES), "part {part}");
        }
    }
}

fn copy(from: &Memory, to: &Memory, pages: impl IntoIterator<Item = u64>) {
    let mut bytes = [0; PAGE as usize];
    for page in pages {
        let at = (page * PAGE) as usize;
        from.read(at, &mut bytes).unwrap();
        to.write(at, &bytes).unwrap();
    }
}

/// Takes the pages that the guest and the device have written.
fn dirty(guest: &Guest, log: &Memory) -> BTreeSet<u64> {
    let mut pages = std::mem::take(&mut *guest.driver.written.borrow_mut());
    pages.extend(take(log));
    pages
}

/// Migrates a guest under load, to a copy of its memory.
fn migrate(mut source: Client, guest: &mut Guest, to: &Served) -> Client {
    let used = guest.driver.used();
    guest.post(4);
    let log = log_on(&mut source, &guest.driver, used);
    let target = Memory::anonymous(MEMORY).unwrap();
    let mut destination = Client::with_memory(to, F_LOG_ALL, target.clone());
    copy(&source.memory, &target, 0..MEMORY as u64 / PAGE);
    guest.driver.written.borrow_mut().clear();
    // The guest's writes during the first copy are in it: it runs on this thread.
    for _ in 0..3 {
        guest.post(5);
        copy(&source.memory, &target, dirty(guest, &log));
        guest.finish();
        guest.finish();
    }
    guest.post(3);
    let base = source.frontend.get_vring_base(0).unwrap();
    copy(&source.memory, &target, dirty(guest, &log));
    let (mut here, mut there) = (vec![0; MEMORY], vec![0; MEMORY]);
    source.memory.read(0, &mut here).unwrap();
    target.read(0, &mut there).unwrap();
    let differs =
        (0..MEMORY / 4096).find(|page| here[page * 4096..][..4096] != there[page * 4096..][..4096]);
    assert_eq!(differs, None, "a page was not logged");
    destination.track(1, None);
    guest.driver.move_to(&target);
    destination.start(&guest.driver, base as u16);
    guest.post(2);
    destination
}

#[test]
fn guest_migrates_back_and_forth_under_load() {
    for dir in folders() {
        let (path, volume) = file_volume(&dir, 2);
        let sides = [
            Served::at(dir.path().join("a"), volume, options()),
            Served::at(dir.path().join("b"), incoming(&path), options()),
        ];
        let mut client = Client::connect(&sides[0], F_LOG_ALL);
        client.track(1, None);
        let mut guest = Guest::new(client.queue(0));
        for turn in 0..30 {
            let (from, to) = (&sides[turn % 2], &sides[(turn + 1) % 2]);
            assert!(!from.stats.is_incoming() && to.stats.is_incoming());
            client = migrate(client, &mut guest, to);
            guest.finish_all();
            eventually("the volume moves", || {
                from.stats.is_incoming() && !to.stats.is_incoming()
            });
        }
        guest.verify_disk(&path);
    }
}

#[test]
fn cancelled_migration_returns_volume_to_source() {
    let dir = tempfile::tempdir().unwrap();
    let (path, volume) = file_volume(&dir, 2);
    let a = Served::at(dir.path().join("a"), volume, options());
    let b = Served::at(dir.path().join("b"), incoming(&path), options());
    let mut source = Client::connect(&a, F_LOG_ALL);
    let mut driver = source.queue(0);
    driver.ok(Req::read(0, 4096));
    let used = driver.used();
    let _log = log_on(&mut source, &driver, used);
    // Another ring still runs: the volume stays.
    let second = source.queue(1);
    source.frontend.get_vring_base(0).unwrap();
    assert!(!a.stats.is_incoming());
    source.frontend.get_vring_base(1).unwrap();
    drop(second);
    assert!(a.stats.is_incoming());
    // Cancelled before the destination began.
    let base = driver.next;
    source.start(&driver, base);
    driver.ok(Req::read(0, 4096));
    assert!(!a.stats.is_incoming());
    // The destination begins and ends again.
    source.frontend.get_vring_base(0).unwrap();
    let mut destination = Client::connect(&b, F_LOG_ALL);
    destination.queue(0).ok(Req::read(0, 4096));
    assert!(!b.stats.is_incoming());
    drop(destination);
    eventually("the destination releases the volume", || {
        b.stats.is_incoming()
    });
    let base = driver.next;
    source.start(&driver, base);
    driver.ok(Req::read(0, 4096));
    assert!(!a.stats.is_incoming());
}

#[test]
fn only_one_side_writes() {
    let dir = tempfile::tempdir().unwrap();
    let (path, volume) = file_volume(&dir, 2);
    let a = Served::at(dir.path().join("a"), volume, options());
    let b = Served::at(dir.path().join("b"), incoming(&path), options());
    let mut source = Client::connect(&a, F_LOG_ALL);
    let mut driver = source.queue(0);
    driver.ok(Req::write(0, &pattern(1, 4096)));
    // The source has the lock: the destination gets nothing, and its front-end is told.
    let mut early = Client::connect(&b, F_LOG_ALL);
    let mut other = Driver::new(&early.memory, 0, 0, early.features);
    early.start(&other, 0);
    other.post(Req::write(0, &pattern(2, 4096)));
    other.ring();
    eventually("it is disconnected", || {
        early.frontend.get_features().is_err()
    });
    assert!(b.stats.is_incoming());
    drop(early);
    // The source has released the lock, and the destination has begun.
    let used = driver.used();
    let _log = log_on(&mut source, &driver, used);
    let base = source.frontend.get_vring_base(0).unwrap();
    let mut destination = Client::connect(&b, F_LOG_ALL);
    let mut moved = destination.queue(0);
    moved.ok(Req::write(0, &pattern(3, 4096)));
    source.start(&driver, base as u16);
    driver.post(Req::write(0, &pattern(4, 4096)));
    driver.ring();
    eventually("it is disconnected", || {
        source.frontend.get_features().is_err()
    });
    assert!(a.stats.is_incoming());
    assert_eq!(moved.ok(Req::read(0, 4096)), pattern(3, 4096));
    assert_eq!(std::fs::read(&path).unwrap()[..4096], pattern(3, 4096));
    // The destination ends without a word: the source may continue.
    drop(destination);
    b.stop();
    drop(source);
    let mut source = Client::connect(&a, F_LOG_ALL);
    let mut driver = source.queue(0);
    assert_eq!(driver.ok(Req::read(0, 4096)), pattern(3, 4096));
}

#[test]
fn failed_flush_keeps_volume() {
    let dir = tempfile::tempdir().unwrap();
    let (path, volume) = file_volume(&dir, 2);
    let volume = FaultVolume::new(volume);
    let faults = volume.faults();
    let a = Served::at(dir.path().join("a"), Arc::new(volume), options());
    let mut source = Client::connect(&a, F_LOG_ALL);
    let mut driver = source.queue(0);
    driver.ok(Req::write(0, &pattern(1, 4096)));
    let used = driver.used();
    let _log = log_on(&mut source, &driver, used);
    faults.add(Fault::always(OpKind::Flush, Effect::Hold));
    // The front-end is answered although the flush takes long.
    source.frontend.get_vring_base(0).unwrap();
    assert!(!a.stats.is_incoming() && !incoming(&path).file_lock().unwrap().try_lock().unwrap());
    faults.clear();
    faults.release();
    let base = driver.next;
    source.start(&driver, base);
    driver.ok(Req::read(0, 4096));
    let error = IoErrorKind::NotDurable.into();
    faults.add(Fault::always(OpKind::Flush, Effect::Fail(error)));
    source.frontend.get_vring_base(0).unwrap();
    assert!(!a.stats.is_incoming() && !incoming(&path).file_lock().unwrap().try_lock().unwrap());
    faults.clear();
}
