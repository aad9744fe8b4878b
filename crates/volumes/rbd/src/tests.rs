//! The volume with a library that answers wrongly, late or never.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

#[path = "../../../data/volume/tests/it/common/mod.rs"]
mod common;

use crate::ffi::fake::{FakeImage, RIGHT};
use crate::{Name, RbdError, RbdOptions, RbdVolume, Settings};
use common::{BOUND, Worker, bytes};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};
use volume::{Io, IoErrorKind, IoOptions, Op, Volume};

const WRITE: Op = Op::Write { fua: false };
const SIZE: u64 = 8 << 20;

fn open_with(name: &str, options: RbdOptions) -> Result<RbdVolume, RbdError> {
    let (image, snapshot) = match name.split_once('@') {
        Some((image, snapshot)) => (image, Some(snapshot.into())),
        None => (name, None),
    };
    let name = Name {
        pool: "pool".into(),
        namespace: String::new(),
        image: image.into(),
        snapshot,
    };
    let settings = Settings {
        conf: None,
        id: "admin".into(),
        keyring: None,
        ports: None,
    };
    RbdVolume::open(name, settings, options)
}

fn open(name: &str) -> (Arc<FakeImage>, RbdVolume) {
    let image = FakeImage::new(name, SIZE);
    (image, open_with(name, RbdOptions::default()).unwrap())
}

/// The cluster's identifier and that of the image are equal for every host that opens the image.
#[test]
fn own_identifier_is_that_of_image_in_its_cluster() {
    let own_id = |volume: &RbdVolume| String::from_utf8(volume.own_id().unwrap()).unwrap();
    let (_image, here) = open("shared");
    let there = open_with("shared", RbdOptions::default()).unwrap();
    assert_eq!(own_id(&here), "rbd:fsid/id-shared");
    assert_eq!(own_id(&here), own_id(&there));
    assert_eq!(here.media(), there.media());
    let (_image, other) = open("other");
    assert_ne!(own_id(&here), own_id(&other));
    let options = RbdOptions {
        read_only: true,
        ..RbdOptions::default()
    };
    let snapshot = open_with("shared@monday", options).unwrap();
    assert_eq!(own_id(&snapshot), "rbd:fsid/id-shared@monday");
}

/// Rounds of the worker's for a moment, in which nothing ends.
fn nothing_ends(worker: &mut Worker) {
    let until = Instant::now() + Duration::from_millis(200);
    while Instant::now() < until {
        worker.queue.poll(&mut |_| panic!("too early"));
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn written_data_is_read_back() {
    let (image, volume) = open("written");
    let mut worker = Worker::new(&volume);
    let data: Vec<u8> = (0..3 << 20).map(|at: u32| (at / 512) as u8).collect();
    let list = worker.guest.holding(0, &data);
    // Several parts, and several reads.
    worker.start(WRITE, 4096, data.len() as u64, list);
    assert_eq!(worker.wait(1)[0].result, Ok(()));
    assert!(image.started.load(SeqCst) >= 3);
    assert_eq!(worker.read(4096, data.len() as u64).unwrap(), data);
}

#[test]
fn discarded_and_zeroed_ranges_read_zero() {
    let (image, volume) = open("ranges");
    let mut worker = Worker::new(&volume);
    image.data.lock().unwrap().fill(7);
    let zeroes = Op::WriteZeroes {
        deallocate: false,
        fua: false,
    };
    assert_eq!(worker.without_data(Op::Deallocate, 4096, 4096), Ok(()));
    assert_eq!(worker.without_data(zeroes, 8192, 512), Ok(()));
    assert_eq!(worker.without_data(Op::Flush, 0, 0), Ok(()));
    let data = image.data.lock().unwrap();
    assert!(data[4096..8704].iter().all(|byte| *byte == 0));
    assert!(
        data[..4096]
            .iter()
            .chain(&data[8704..])
            .all(|byte| *byte == 7)
    );
}

#[test]
fn wrong_answer_fails_own_request_only() {
    let (image, volume) = open("wrong");
    let mut worker = Worker::new(&volume);
    for (answer, kind) in [
        (-i64::from(libc::EIO), IoErrorKind::MediaRead),
        (-i64::from(libc::ESHUTDOWN), IoErrorKind::Gone),
        (i64::MIN, IoErrorKind::MediaRead),
        // Less, or more, than was asked for.
        (0, IoErrorKind::MediaRead),
        (4095, IoErrorKind::MediaRead),
        (4097, IoErrorKind::MediaRead),
        (RIGHT - 1, IoErrorKind::MediaRead),
    ] {
        image.answer.store(answer, SeqCst);
        assert_eq!(worker.read(0, 4096).unwrap_err().kind, kind, "{answer}");
        image.answer.store(RIGHT, SeqCst);
        assert!(worker.read(0, 4096).is_ok());
    }
    image.refused.store(-i64::from(libc::EROFS), SeqCst);
    let list = worker.guest.holding(0, &[1; 4096]);
    worker.start(WRITE, 0, 4096, list);
    assert_eq!(
        worker.wait(1)[0].result.unwrap_err().kind,
        IoErrorKind::ReadOnly
    );
    image.refused.store(0, SeqCst);
    assert_eq!(worker.read(0, 4096).unwrap(), [0; 4096]);
}

#[test]
fn only_single_read_is_polled() {
    let (image, volume) = open("asleep");
    let mut worker = Worker::new(&volume);
    image.holds.store(true, SeqCst);
    let list = || worker.guest.piece(0, 4096);
    let [one, two, three] = [list(), list(), list()];
    worker.start(Op::Read, 0, 4096, one);
    assert_eq!(worker.io.sleep_hints(), 0, "a read alone is polled for");
    let (second, _) = worker.start(Op::Read, 4096, 4096, two);
    assert_eq!(worker.io.sleep_hints(), 2);
    worker.queue.cancel(second);
    worker.wait(1);
    assert_eq!(worker.io.sleep_hints(), 0);
    image.release();
    assert_eq!(worker.wait(1)[0].result, Ok(()));
    image.holds.store(true, SeqCst);
    worker.start(WRITE, 0, 4096, three);
    assert_eq!(worker.io.sleep_hints(), 1, "a write waits for disks");
    image.release();
    assert_eq!(worker.wait(1)[0].result, Ok(()));
    assert_eq!(worker.io.sleep_hints(), 0);
}

#[test]
fn cancelled_write_precedes_later_writes() {
    let (image, volume) = open("given-up");
    let mut worker = Worker::new(&volume);
    assert!(worker.read(0, 4096).is_ok());
    image.holds.store(true, SeqCst);
    let old = worker.guest.holding(0, &[1; 4096]);
    let (tag, _) = worker.start(WRITE, 0, 4096, old);
    worker.queue.cancel(tag);
    assert_eq!(
        worker.wait(1)[0].result.unwrap_err().kind,
        IoErrorKind::Aborted
    );
    let started = image.started.load(SeqCst);
    let new = worker.guest.holding(4096, &[2; 4096]);
    worker.start(WRITE, 0, 4096, new);
    nothing_ends(&mut worker);
    assert_eq!(
        image.started.load(SeqCst),
        started,
        "it overtook the old one"
    );
    image.release();
    assert_eq!(worker.wait(1)[0].result, Ok(()));
    assert_eq!(worker.read(0, 4096).unwrap(), [2; 4096]);
}

#[test]
fn cancelled_read_touches_no_foreign_memory() {
    let (image, volume) = open("late-read");
    let mut worker = Worker::new(&volume);
    assert!(worker.read(0, 4096).is_ok());
    image.data.lock().unwrap()[..4096].fill(9);
    image.holds.store(true, SeqCst);
    let list = worker.guest.holding(0, &[5; 4096]);
    let (tag, _) = worker.start(Op::Read, 0, 4096, list);
    worker.queue.cancel(tag);
    assert_eq!(
        worker.wait(1)[0].result.unwrap_err().kind,
        IoErrorKind::Aborted
    );
    image.release();
    nothing_ends(&mut worker);
    assert_eq!(bytes(&worker.guest.piece(0, 4096)), [5; 4096]);
}

#[test]
fn ending_worker_stops_waiting() {
    let (image, volume) = open("end");
    let mut worker = Worker::new(&volume);
    worker.io = Io::new(IoOptions {
        stop_timeout: Duration::from_millis(100),
        ..IoOptions::default()
    });
    worker.queue = volume.open(&worker.io).unwrap();
    image.holds.store(true, SeqCst);
    let list = worker.guest.holding(0, &[1; 4096]);
    worker.start(WRITE, 0, 4096, list);
    worker.io.end();
    // Poll repeatedly, as a worker that ends does.
    let (began, mut ended) = (Instant::now(), None);
    while ended.is_none() {
        assert!(began.elapsed() < BOUND, "it waits");
        worker.queue.poll(&mut |done| ended = Some(done.result));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(ended.unwrap().unwrap_err().kind, IoErrorKind::Aborted);
    image.release();
}

#[test]
fn resize_and_silent_cluster_are_noticed() {
    let (image, volume) = open("size");
    let mut worker = Worker::new(&volume);
    assert!(worker.read(0, 4096).is_ok());
    assert!(!volume.refresh().unwrap());
    image.resize(SIZE * 2);
    assert!(volume.refresh().unwrap());
    assert_eq!(volume.info().size, SIZE * 2);
    assert!(worker.read(SIZE, 4096).is_ok());
    let watch = volume.watch();
    assert!(watch.look().unwrap().connected);
    image.holds.store(true, SeqCst);
    let list = worker.guest.holding(0, &[0; 4096]);
    worker.start(Op::Read, 0, 4096, list);
    while watch.look().unwrap().connected {
        volume.refresh().unwrap();
        std::thread::sleep(Duration::from_millis(10));
    }
    image.release();
    assert_eq!(worker.wait(1)[0].result, Ok(()));
    volume.refresh().unwrap();
    let reach = watch.look().unwrap();
    assert!(reach.connected && reach.lost == 1, "{reach:?}");
}

#[test]
fn requests_wait_without_cluster() {
    let image = FakeImage::new("away", SIZE);
    image.away.store(true, SeqCst);
    let mut options = RbdOptions {
        wait: Duration::from_millis(100),
        ..RbdOptions::default()
    };
    let error = open_with("away", options).unwrap_err();
    assert!(error.to_string().contains("size="), "{error}");
    options.size = Some(SIZE / 2);
    let volume = open_with("away", options).unwrap();
    assert_eq!(volume.info().size, SIZE / 2);
    let mut worker = Worker::new(&volume);
    let list = worker.guest.holding(0, &[1; 4096]);
    let (_, done) = worker.start(WRITE, 0, 4096, list);
    assert!(done.is_none());
    nothing_ends(&mut worker);
    image.away.store(false, SeqCst);
    assert_eq!(worker.wait(1)[0].result, Ok(()));
    assert_eq!(volume.info().size, SIZE);
    let error = open_with("nothing", options).unwrap_err();
    assert!(error.to_string().contains("rbd ls"), "{error}");
}
