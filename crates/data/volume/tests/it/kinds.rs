//! Null, memory, slices and declared faults.

use crate::common::{WAYS, Worker, bytes, disk, sparse};
use dma::{Buffer, SegmentList};
use std::sync::Arc;
use std::time::Duration;
use testkit::huge::HugePages;
use volume::{
    Effect, Fault, FaultVolume, FileOptions, FileVolume, IoError, IoErrorKind, MemVolume,
    MemoryPlace, NullOptions, NullVolume, Op, OpKind, OpenError, OpenOptions, QueueState, Registry,
    SliceVolume, Volume, VolumeError, Wake,
};

const MIB: u64 = 1 << 20;
const WRITE: Op = Op::Write { fua: false };

#[test]
fn null_volume_touches_no_data() {
    let volume = NullVolume::new(NullOptions {
        size: 1 << 40,
        ..NullOptions::default()
    })
    .unwrap();
    assert_eq!(volume.info().size, 1 << 40);
    let mut worker = Worker::new(&volume);
    assert!(worker.io.event_fd().is_none(), "no ring is needed");
    assert_eq!(worker.read((1 << 40) - 4096, 4096), Ok(vec![0xEE; 4096]));
    assert_eq!(worker.write(0, &[1; 512]), Ok(()));
    assert_eq!(
        worker.read((1 << 40) - 4096, 8192),
        Err(IoErrorKind::OutOfRange.into())
    );
    assert!(!volume.info().zeroes_after_deallocate);

    let volume = NullVolume::new(NullOptions {
        size: MIB,
        read_zeroes: true,
        ..NullOptions::default()
    })
    .unwrap();
    assert_eq!(Worker::new(&volume).read(0, 4096), Ok(vec![0; 4096]));

    let volume = NullVolume::new(NullOptions {
        size: MIB,
        read_only: true,
        ..NullOptions::default()
    })
    .unwrap();
    assert_eq!(
        Worker::new(&volume).write(0, &[1; 512]),
        Err(IoErrorKind::ReadOnly.into())
    );
    assert!(matches!(
        NullVolume::new(NullOptions::default()),
        Err(VolumeError::Size { .. })
    ));
}

#[test]
fn null_volume_with_latency_completes_by_polling() {
    let latency = Duration::from_millis(2);
    let volume = NullVolume::new(NullOptions {
        size: MIB,
        latency,
        ..NullOptions::default()
    })
    .unwrap();
    let mut worker = Worker::new(&volume);
    let began = std::time::Instant::now();
    let tags: Vec<u64> = (0..8)
        .map(|_| {
            let (tag, at_once) = worker.start(Op::Flush, 0, 0, SegmentList::new());
            assert!(at_once.is_none());
            tag
        })
        .collect();
    // Long enough that the worker may sleep until the first is over.
    let QueueState { in_flight, wake } = worker.queue.state();
    let (8, Wake::At(due)) = (in_flight, wake) else {
        panic!("{in_flight} in flight, {wake:?}");
    };
    assert!(due >= began + latency && due <= std::time::Instant::now() + latency);
    let came: Vec<u64> = worker
        .wait(8)
        .iter()
        .map(|completion| completion.tag)
        .collect();
    assert_eq!(came, tags);
    assert!(began.elapsed() >= latency);
    assert_eq!(worker.queue.state(), QueueState::IDLE);
}

#[test]
fn null_volumes_of_same_name_share_device() {
    let latency = Duration::from_millis(2);
    let part = |size| {
        let options = NullOptions {
            size,
            latency,
            units: 2,
            ..NullOptions::default()
        };
        NullVolume::new(options).unwrap().named("kinds-test")
    };
    let (first, second) = (part(MIB), part(2 * MIB));
    assert_eq!(first.extent(), second.extent());
    let mut workers = [Worker::new(&first), Worker::new(&second)];
    let began = std::time::Instant::now();
    for worker in &mut workers {
        for _ in 0..3 {
            worker.start(Op::Flush, 0, 0, SegmentList::new());
        }
    }
    // Two at a time: the second one's last is in the third pair.
    workers[1].wait(3);
    assert!(began.elapsed() >= 3 * latency);
    workers[0].wait(3);
}

#[test]
fn memory_volume_is_shared_between_workers() {
    let volume = Arc::new(MemVolume::new(4 * MIB).unwrap());
    let mut here = Worker::new(&*volume);
    assert!(here.io.event_fd().is_none(), "no ring is needed");
    assert_eq!(here.write(1000, b"from here"), Ok(()));
    let there = volume.clone();
    let thread = std::thread::spawn(move || {
        let mut worker = Worker::new(&*there);
        assert_eq!(worker.read(1000, 9), Ok(b"from here".to_vec()));
        worker.write(2000, b"from there")
    });
    assert_eq!(thread.join().unwrap(), Ok(()));
    assert_eq!(here.read(2000, 10), Ok(b"from there".to_vec()));
}

/// Opens a volume whose memory is kept for a later process.
fn kept(url: &str, memory: MemoryPlace) -> Result<Arc<dyn Volume>, OpenError> {
    let options = OpenOptions {
        memory,
        ..OpenOptions::default()
    };
    Ok(Registry::<()>::new().open(url, options)?.volume)
}

#[test]
fn huge_pages_are_allocated_at_once_and_kept() {
    // More than any host has.
    let error = kept("mem://999T?huge=2M", MemoryPlace::New).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("needs 523763712 huge pages"), "{text}");
    let error = kept("mem://1M?huge=1G", MemoryPlace::New).unwrap_err();
    assert!(error.to_string().contains("huge=1G"), "{error}");

    let pages = match HugePages::add(3) {
        Ok(pages) => pages,
        Err(why) => return testkit::skip("volume::huge", why),
    };
    let all = pages.free();
    // The last page is used in part.
    let url = "mem://5M?huge=2M";
    let volume = kept(url, MemoryPlace::New).unwrap();
    assert_eq!(pages.free(), all - 3);
    assert!(!volume.info().deallocate && volume.info().write_zeroes);
    let mut worker = Worker::new(&*volume);
    let last = 5 * MIB - 4096;
    assert_eq!(worker.write(last, &[7; 4096]), Ok(()));
    assert_eq!(worker.write(0, &[8; 4 << 20]), Ok(()));
    let released = worker.without_data(Op::Deallocate, 2 * MIB, 2 * MIB);
    assert_eq!(released, Ok(()));
    assert_eq!(pages.free(), all - 3, "no other process gets them");
    let file = volume.kept_memory().unwrap().try_clone_to_owned().unwrap();
    drop((worker, volume));

    // The next process.
    let volume = kept(url, MemoryPlace::Kept(Arc::new(file))).unwrap();
    let mut worker = Worker::new(&*volume);
    assert_eq!(worker.read(last, 4096), Ok(vec![7; 4096]));
    assert_eq!(worker.read(0, 2 * MIB), Ok(vec![8; 2 << 20]));
    assert_eq!(worker.read(2 * MIB, 2 * MIB), Ok(vec![0; 2 << 20]));
    drop((worker, volume));
    assert_eq!(pages.free(), all);

    // Without a keeper there is nothing to keep.
    let volume = kept(url, MemoryPlace::Process).unwrap();
    assert!(volume.kept_memory().is_none());
    assert_eq!(Worker::new(&*volume).read(0, 4096), Ok(vec![0; 4096]));
}

#[test]
fn long_memory_request_runs_in_pieces() {
    let size = 32 * MIB;
    let volume = MemVolume::new(size).unwrap();
    let mut worker = Worker::new(&volume);
    let zeroes = |deallocate| Op::WriteZeroes {
        deallocate,
        fua: false,
    };
    let one = vec![7; MIB as usize];
    for op in [zeroes(false), zeroes(true), Op::Deallocate] {
        for at in 0..size / MIB {
            worker.write(at * MIB, &one).unwrap();
        }
        let (tag, at_once) = worker.start(op, 0, size, SegmentList::new());
        assert!(at_once.is_none(), "{op:?}");
        let state = worker.queue.state();
        assert_eq!((state.in_flight, state.wake), (1, Wake::Poll));
        // A round does a part of it, and other requests have their turn meanwhile.
        let mut done = Vec::new();
        worker
            .queue
            .poll(&mut |completion| done.push(completion.tag));
        assert!(done.is_empty(), "{op:?}");
        let last = worker.read(size - 512, 512).unwrap();
        assert_eq!(last, [7; 512], "{op:?}");
        while done.is_empty() {
            worker.queue.poll(&mut |completion| {
                assert_eq!(completion.result, Ok(()));
                done.push(completion.tag);
            });
        }
        assert_eq!((done, worker.queue.state()), (vec![tag], QueueState::IDLE));
        for at in 0..size / MIB {
            assert_eq!(
                worker.read(at * MIB, MIB),
                Ok(vec![0; MIB as usize]),
                "{op:?}"
            );
        }
    }
}

#[test]
fn long_memory_request_ends_with_worker() {
    let size = 1 << 30;
    let volume = MemVolume::new(size).unwrap();
    let mut worker = Worker::new(&volume);
    let zeroes = Op::WriteZeroes {
        deallocate: false,
        fua: false,
    };
    for _ in 0..100 {
        let (_, at_once) = worker.start(zeroes, 0, size, SegmentList::new());
        assert!(at_once.is_none());
    }
    worker
        .queue
        .poll(&mut |_| panic!("a gigabyte in one round"));
    worker.io.end();
    let mut ended = 0;
    worker.queue.poll(&mut |completion| {
        assert_eq!(completion.result, Err(IoErrorKind::Aborted.into()));
        ended += 1;
    });
    assert_eq!((ended, worker.queue.state()), (100, QueueState::IDLE));
}

#[test]
fn workers_racing_on_same_bytes_do_no_harm() {
    let volume = Arc::new(MemVolume::new(MIB).unwrap());
    let threads: Vec<_> = (0..3u8)
        .map(|seed| {
            let volume = volume.clone();
            std::thread::spawn(move || {
                let mut worker = Worker::new(&*volume);
                for round in 0..200u64 {
                    worker.write(round % 7 * 1000, &vec![seed; 65536]).unwrap();
                    worker.without_data(Op::Deallocate, 0, 512 << 10).unwrap();
                    assert!(
                        worker
                            .read(0, 128 << 10)
                            .unwrap()
                            .iter()
                            .all(|&byte| byte < 3)
                    );
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn slices_stay_within_bounds() {
    for way in WAYS {
        let whole: Arc<dyn Volume> = Arc::new(MemVolume::new(MIB).unwrap());
        let mut around = Worker::by(way, &*whole);
        around.write(0, &vec![7; MIB as usize]).unwrap();
        let slice = SliceVolume::new(whole.clone(), 4096, Some(8192)).unwrap();
        assert_eq!(slice.info().size, 8192);
        assert_ne!(slice.id(), whole.id());
        let mut worker = Worker::by(way, &slice);
        assert_eq!(worker.write(0, &[1; 8192]), Ok(()));
        assert_eq!(
            worker.without_data(
                Op::WriteZeroes {
                    deallocate: true,
                    fua: false
                },
                4096,
                4096
            ),
            Ok(())
        );
        assert_eq!(worker.without_data(Op::Flush, 0, 0), Ok(()));
        for (offset, len) in [
            (8192, 1),
            (4096, 4097),
            (u64::MAX, 1),
            (u64::MAX - 4095, 1),
            (0, 8193),
        ] {
            assert_eq!(
                worker.read(offset, len),
                Err(IoErrorKind::OutOfRange.into()),
                "{offset}+{len}"
            );
        }
        assert_eq!(around.read(0, 4096), Ok(vec![7; 4096]));
        assert_eq!(around.read(4096, 4096), Ok(vec![1; 4096]));
        assert_eq!(around.read(8192, 4096), Ok(vec![0; 4096]));
        assert_eq!(around.read(12288, 4096), Ok(vec![7; 4096]));
    }
}

#[test]
fn slices_of_files_are_block_aligned() {
    let directory = disk();
    let file = FileVolume::open(sparse(&directory, MIB), FileOptions::default()).unwrap();
    let file: Arc<dyn Volume> = Arc::new(file);
    for (offset, len) in [(1, Some(4096)), (0, Some(100)), (4097, None)] {
        let error = SliceVolume::new(file.clone(), offset, len).expect_err("not on a block");
        assert!(
            matches!(error, VolumeError::SliceAlignment { .. }),
            "{error}"
        );
    }
    for (offset, len) in [
        (MIB, None),
        (0, Some(0)),
        (4096, Some(MIB)),
        (u64::MAX, Some(1)),
    ] {
        let error = SliceVolume::new(file.clone(), offset, len).expect_err("not inside");
        assert!(matches!(error, VolumeError::SliceRange { .. }), "{error}");
    }
    // A slice without a length follows the file.
    let slice = SliceVolume::new(file, 4096, None).unwrap();
    let path = directory.path().join("disk.raw");
    std::fs::OpenOptions::new()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(2 * MIB)
        .unwrap();
    assert!(slice.refresh().unwrap());
    assert_eq!(slice.info().size, 2 * MIB - 4096);
}

/// A process in its sandbox reads headers and tables that lie in a slice.
#[test]
fn slice_of_file_is_read_without_queue() {
    let directory = disk();
    let path = sparse(&directory, MIB);
    let bytes: Vec<u8> = (0..MIB / 4096).flat_map(|n| [n as u8; 4096]).collect();
    std::fs::write(&path, bytes).unwrap();
    let file: Arc<dyn Volume> = Arc::new(FileVolume::open(path, FileOptions::default()).unwrap());
    let slice = SliceVolume::new(file.clone(), 4096, Some(8192)).unwrap();
    let read = |slice: &SliceVolume, offset, len| {
        let mut buffer = Buffer::new(len);
        let read = slice.read_at(offset, &mut buffer).expect("no queue");
        read.map(|()| buffer.to_vec())
    };
    assert_eq!(read(&slice, 0, 4096), Ok(vec![1; 4096]));
    assert_eq!(read(&slice, 4096, 4096), Ok(vec![2; 4096]));
    let outside = Err(IoErrorKind::OutOfRange.into());
    for (offset, len) in [(8192, 4096), (4096, 8192), (u64::MAX - 4095, 4096)] {
        assert_eq!(read(&slice, offset, len), outside, "{offset}+{len}");
    }
    let rest = SliceVolume::new(file, 4096, None).unwrap();
    assert_eq!(read(&rest, 8192, 4096), Ok(vec![3; 4096]));
    let memory = Arc::new(MemVolume::new(MIB).unwrap());
    let slice = SliceVolume::new(memory, 4096, None).unwrap();
    assert!(slice.read_at(0, &mut Buffer::new(4096)).is_none());
}

#[test]
fn faults_affect_named_requests_only() {
    for way in WAYS {
        let volume = FaultVolume::new(Arc::new(MemVolume::new(MIB).unwrap()));
        let faults = volume.faults();
        let mut worker = Worker::by(way, &volume);
        let full = IoError::from_errno(28, true);
        assert_eq!(full.kind, IoErrorKind::NoSpace);
        faults.add(Fault::nth(OpKind::Write, 2, Effect::Fail(full)));
        assert_eq!(worker.write(0, &[1; 512]), Ok(()));
        assert_eq!(worker.read(0, 512), Ok(vec![1; 512]));
        assert_eq!(worker.write(0, &[2; 512]), Err(full));
        assert_eq!(
            worker.read(0, 512),
            Ok(vec![1; 512]),
            "a failed write never reached the volume"
        );
        assert_eq!(worker.write(0, &[3; 512]), Ok(()));

        let bad = IoError::new(IoErrorKind::MediaRead);
        faults.add(Fault {
            range: Some(4096..4097),
            ..Fault::always(OpKind::Read, Effect::Fail(bad))
        });
        assert_eq!(
            worker.read(0, 4096),
            Ok([vec![3; 512], vec![0; 3584]].concat())
        );
        assert_eq!(worker.read(4000, 97), Err(bad));
        assert_eq!(worker.read(4096, 1), Err(bad));
        assert_eq!(worker.read(4097, 1), Ok(vec![0]));
        faults.clear();
        assert_eq!(worker.read(4096, 1), Ok(vec![0]));
    }
}

#[test]
fn faults_hold_and_delay_requests() {
    for way in WAYS {
        let directory = disk();
        let file = FileVolume::open(sparse(&directory, MIB), FileOptions::default()).unwrap();
        let volume = FaultVolume::new(Arc::new(file));
        let faults = volume.faults();
        let mut worker = Worker::by(way, &volume);
        faults.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
        faults.add(Fault::nth(OpKind::Read, 2, Effect::Hold));
        // Not in the memory that is read meanwhile: the request's memory is the guest's.
        let data = worker.guest.holding(MIB, &[5; 4096]);
        let (write, at_once) = worker.start(WRITE, 0, 4096, data);
        assert!(at_once.is_none());
        assert_eq!(
            worker.read(0, 4096),
            Ok(vec![0; 4096]),
            "held, so not written"
        );
        let data = worker.guest.list(&[(0, 4096)]);
        let (read, at_once) = worker.start(Op::Read, 0, 4096, data);
        assert!(at_once.is_none());
        let QueueState { in_flight, wake } = worker.queue.state();
        assert_eq!((faults.held(), in_flight, wake), (2, 2, Wake::Poll));
        worker.queue.cancel(read);
        let cancelled = worker.wait(1).pop().unwrap();
        assert_eq!(
            (cancelled.tag, cancelled.result),
            (read, Err(IoErrorKind::Aborted.into()))
        );
        faults.release();
        let written = worker.wait(1).pop().unwrap();
        assert_eq!((written.tag, written.result), (write, Ok(())));
        assert_eq!(faults.held(), 0);
        faults.add(Fault::always(
            OpKind::Any,
            Effect::Delay(Duration::from_millis(1)),
        ));
        let data = worker.guest.list(&[(0, 4096)]);
        let completion = worker.run(Op::Read, 0, 4096, data);
        assert_eq!(completion.result, Ok(()));
        assert_eq!(bytes(&completion.data), vec![5; 4096]);

        faults.clear();
        faults.add(Fault::always(OpKind::Flush, Effect::Hold));
        assert!(
            worker
                .start(Op::Flush, 0, 0, SegmentList::new())
                .1
                .is_none()
        );
        assert_eq!(faults.held(), 1);
        drop(worker);
        assert_eq!(faults.held(), 0);
    }
}

#[test]
fn scheduled_file_works_in_small_batches() {
    for way in WAYS {
        let directory = disk();
        let path = sparse(&directory, MIB);
        let url = |half: &str| format!("{}?{half}&weight=1&share-depth=2", path.display());
        let open = |half| volume::open_url(&url(half), volume::OpenOptions::default()).unwrap();
        let (first, second) = (open("length=512K"), open("offset=512K"));
        let mut worker = Worker::by(way, &*first);
        let mut other = second.open(&worker.io).unwrap();
        let mut over = 0;
        for block in 0..48 {
            let data = worker.guest.holding(block * 8192, &[block as u8 + 1; 8192]);
            over += usize::from(worker.start(WRITE, block * 8192, 8192, data).1.is_some());
            let request = volume::Request::transfer(
                1000 + block,
                WRITE,
                block * 8192,
                worker
                    .guest
                    .holding(MIB + block * 8192, &[block as u8 + 101; 8192]),
            );
            over += usize::from(way.begin(&mut *other, request).is_some());
        }
        assert_eq!(over, 0);
        let most = worker.io.in_flight();
        assert!(most <= 2, "{most} in the kernel");
        let mut left = 96;
        while left > 0 {
            // The order of a worker: the ring, then every queue.
            let done = worker.wait(1);
            left -= done.len();
            assert!(done.iter().all(|completion| completion.result.is_ok()));
            left -= other.poll(&mut |completion| completion.result.unwrap());
            assert!(worker.io.in_flight() <= 2);
        }
        drop((worker, other));
        let all = std::fs::read(&path).unwrap();
        for block in 0..48 {
            assert!(
                all[block * 8192..][..8192]
                    .iter()
                    .all(|&byte| byte == block as u8 + 1)
            );
            let at = (512 << 10) + block * 8192;
            assert!(
                all[at..][..8192]
                    .iter()
                    .all(|&byte| byte == block as u8 + 101)
            );
        }
    }
}
