//! Files as they are met: missing, locked, full, shortened, dropped in flight.

use crate::common::{WAYS, Worker, bytes, disk, memory, sparse};
use dma::SegmentList;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;
use volume::{
    Completion, Direct, FileOptions, FileVolume, Io, IoErrorKind, IoOptions, Op, Request, Volume,
    VolumeError,
};

const MIB: u64 = 1 << 20;

fn open(path: &Path) -> FileVolume {
    FileVolume::open(path, FileOptions::default()).expect("the file opens")
}

fn read_only() -> FileOptions {
    FileOptions {
        read_only: true,
        ..FileOptions::default()
    }
}

fn refused(path: impl AsRef<Path>, options: FileOptions) -> String {
    FileVolume::open(path, options)
        .expect_err("this must not open")
        .to_string()
}

#[test]
fn open_errors_name_reason() {
    let directory = disk();
    let text = refused(directory.path().join("none"), FileOptions::default());
    assert!(
        text.contains("no such file") && text.contains("truncate -s"),
        "{text}"
    );
    let text = refused(directory.path(), FileOptions::default());
    assert!(text.contains("is a directory"), "{text}");
    let text = refused("/dev/null", FileOptions::default());
    assert!(text.contains("character device"), "{text}");
    let text = refused(sparse(&directory, 0), FileOptions::default());
    assert!(
        text.contains("is empty") && text.contains("truncate -s"),
        "{text}"
    );
    let text = refused(sparse(&directory, 1000), FileOptions::default());
    assert!(
        text.contains("1000 bytes") && text.contains("truncate -s %512"),
        "{text}"
    );
    let wanted = FileOptions {
        block_size: Some(4096),
        ..FileOptions::default()
    };
    let text = refused(sparse(&directory, 4096 + 512), wanted);
    assert!(text.contains("truncate -s %4096"), "{text}");
    let text = refused(
        sparse(&directory, MIB),
        FileOptions {
            block_size: Some(1000),
            ..wanted
        },
    );
    assert!(text.contains("power of two"), "{text}");

    let fifo = directory.path().join("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    if made.is_ok_and(|status| status.success()) {
        let text = refused(&fifo, FileOptions::default());
        assert!(text.contains("FIFO"), "{text}");
    } else {
        testkit::skip("volume::file: a FIFO is refused", "no mkfifo");
    }
}

#[test]
fn second_user_is_refused() {
    let directory = disk();
    let path = sparse(&directory, MIB);
    let writer = open(&path);
    let error = FileVolume::open(&path, FileOptions::default()).expect_err("two writers");
    assert!(matches!(error, VolumeError::Locked { .. }), "{error}");
    let error = FileVolume::open(&path, read_only()).expect_err("a reader beside a writer");
    assert!(matches!(error, VolumeError::Locked { .. }), "{error}");
    let unlocked = FileOptions {
        lock: false,
        ..FileOptions::default()
    };
    drop(FileVolume::open(&path, unlocked).expect("lock=off is allowed"));

    // The lock lives as long as anything uses the file: also a queue, after its volume.
    let worker = Worker::new(&writer);
    drop(writer);
    assert!(FileVolume::open(&path, FileOptions::default()).is_err());
    drop(worker);
    let first = FileVolume::open(&path, read_only()).expect("readers");
    let second = FileVolume::open(&path, read_only()).expect("share");
    let error =
        FileVolume::open(&path, FileOptions::default()).expect_err("a writer beside readers");
    assert!(error.to_string().contains("in use by"), "{error}");
    drop((first, second));
    open(&path);
}

#[test]
fn lock_holder_is_named() {
    let directory = disk();
    let path = sparse(&directory, MIB);
    // `flock` (the program) uses another kind of lock, so this process holds ours. A sleeping shell
    // has the file open, too, and is found.
    let _writer = open(&path);
    let file = std::fs::File::open(&path).unwrap();
    let mut sleeper = std::process::Command::new("sleep")
        .arg("60")
        .stdin(file)
        .spawn()
        .expect("sleep runs");
    let text = refused(&path, FileOptions::default());
    let _ = sleeper.kill();
    let _ = sleeper.wait();
    assert!(
        text.contains(&format!("process {} (sleep)", sleeper.id())),
        "{text}"
    );
}

#[test]
fn read_only_file_is_never_written() {
    for way in WAYS {
        let directory = disk();
        let path = sparse(&directory, MIB);
        let volume = FileVolume::open(&path, read_only()).unwrap();
        assert!(volume.info().read_only && !volume.info().deallocate);
        let mut worker = Worker::by(way, &volume);
        let read_only = Err(IoErrorKind::ReadOnly.into());
        assert_eq!(worker.write(0, &[1; 4096]), read_only);
        assert_eq!(worker.without_data(Op::Deallocate, 0, 4096), read_only);
        assert_eq!(
            worker.without_data(
                Op::WriteZeroes {
                    deallocate: false,
                    fua: false
                },
                0,
                4096
            ),
            read_only
        );
        assert_eq!(worker.without_data(Op::Flush, 0, 0), Ok(()));
        assert_eq!(worker.read(0, 4096), Ok(vec![0; 4096]));
    }
}

#[test]
fn out_of_range_requests_are_refused() {
    for way in WAYS {
        let directory = disk();
        let volume = open(&sparse(&directory, MIB));
        let mut worker = Worker::by(way, &volume);
        assert_eq!(worker.read(MIB, 4096), Err(IoErrorKind::OutOfRange.into()));
        assert_eq!(
            worker.read(MIB - 4096, 8192),
            Err(IoErrorKind::OutOfRange.into())
        );
        assert_eq!(
            worker.read(u64::MAX - 4095, 4096),
            Err(IoErrorKind::OutOfRange.into())
        );
        assert_eq!(worker.read(1, 4096), Err(IoErrorKind::Invalid.into()));
        assert_eq!(worker.read(0, 100), Err(IoErrorKind::Invalid.into()));
        let short = worker.guest.list(&[(0, 512)]);
        assert_eq!(
            worker.run(Op::Read, 0, 4096, short).result,
            Err(IoErrorKind::Invalid.into())
        );
        // Empty ranges are no mistake.
        assert_eq!(worker.read(MIB, 0), Ok(vec![]));
        assert_eq!(worker.without_data(Op::Deallocate, 0, 0), Ok(()));
        assert_eq!(worker.io.in_flight(), 0);
    }
}

#[test]
fn unaligned_memory_is_bounced() {
    for way in WAYS {
        let directory = disk();
        let volume = open(&sparse(&directory, 4 * MIB));
        if !volume.is_direct() {
            testkit::skip("volume::file::unaligned_memory_is_bounced", "no direct I/O");
            return;
        }
        let mut worker = Worker::by(way, &volume);
        let data: Vec<u8> = (0..3 * MIB).map(|index| (index / 7) as u8).collect();
        let aligned = worker.guest.holding(0, &data);
        assert_eq!(
            worker
                .run(Op::Write { fua: false }, 0, 3 * MIB, aligned)
                .result,
            Ok(())
        );
        assert_eq!(worker.io.counters().bounced, 0);
        // Longer than the largest bounce buffer: moved in pieces.
        let unaligned = worker.guest.list(&[(3, 100), (MIB + 1, 3 * MIB - 100)]);
        unaligned.fill(0xEE);
        let completion = worker.run(Op::Read, 0, 3 * MIB, unaligned);
        assert_eq!(completion.result, Ok(()));
        assert!(bytes(&completion.data) == data);
        assert_eq!(worker.io.counters().bounced, 1);
        assert!(worker.io.counters().continued >= 2);
    }
}

#[test]
fn batch_needs_one_system_call() {
    for way in WAYS {
        let directory = disk();
        let volume = open(&sparse(&directory, MIB));
        let mut worker = Worker::by(way, &volume);
        for index in 0..32 {
            let data = worker.guest.list(&[(index * 4096, 4096)]);
            assert!(worker.start(Op::Read, index * 4096, 4096, data).1.is_none());
        }
        assert_eq!(worker.io.counters().system_calls, 0);
        assert_eq!(worker.io.in_flight(), 32);
        assert!(worker.io.flush());
        assert!(worker.io.flush());
        assert_eq!(worker.io.counters().system_calls, 1);
        let mut tags: Vec<u64> = worker
            .wait(32)
            .iter()
            .map(|completion| completion.tag)
            .collect();
        tags.sort_unstable();
        assert_eq!(tags, (1..=32).collect::<Vec<_>>());
    }
}

#[test]
fn requests_beyond_capacity_are_refused_and_not_lost() {
    for way in WAYS {
        let directory = disk();
        let volume = open(&sparse(&directory, MIB));
        let io = Io::new(IoOptions {
            capacity: 4,
            ..IoOptions::default()
        });
        let mut worker = Worker::by(way, &volume);
        worker.queue = volume.open(&io).unwrap();
        worker.io = io;
        for _ in 0..worker.io.capacity() {
            assert!(
                worker
                    .start(Op::Flush, 0, 0, SegmentList::new())
                    .1
                    .is_none()
            );
        }
        let data = worker.guest.list(&[(0, 4096)]);
        let refused = worker
            .start(Op::Read, 0, 4096, data)
            .1
            .expect("refused at once");
        assert_eq!(refused.result, Err(IoErrorKind::Busy.into()));
        assert_eq!(refused.data.len_bytes(), 4096);
        assert!(
            worker
                .wait(4)
                .iter()
                .all(|completion| completion.result.is_ok())
        );
        assert_eq!(worker.read(0, 4096), Ok(vec![0; 4096]));
    }
}

#[test]
fn deallocation_frees_space() {
    let directory = disk();
    let path = sparse(&directory, 4 * MIB);
    let volume = open(&path);
    if !volume.info().deallocate {
        let what = "volume::file::deallocation_frees_space";
        testkit::skip(what, "the filesystem punches no holes");
        return;
    }
    let mut worker = Worker::new(&volume);
    let data = vec![0xA5; MIB as usize];
    for index in 0..4 {
        assert_eq!(worker.write(index * MIB, &data), Ok(()));
    }
    assert_eq!(worker.without_data(Op::Flush, 0, 0), Ok(()));
    let blocks = || std::fs::metadata(&path).unwrap().blocks() * 512;
    let full = blocks();
    assert!(full >= 4 * MIB, "{full}");
    assert_eq!(worker.without_data(Op::Deallocate, MIB, MIB), Ok(()));
    assert!(blocks() <= full - MIB, "{} of {full}", blocks());
    assert!(worker.read(MIB, MIB).unwrap().iter().all(|&byte| byte == 0));
    assert!(worker.read(0, MIB).unwrap() == data);
    assert!(worker.read(2 * MIB, MIB).unwrap() == data);
    // Zeroing gives space back only where that is allowed.
    let before = blocks();
    assert_eq!(
        worker.without_data(
            Op::WriteZeroes {
                deallocate: false,
                fua: false
            },
            2 * MIB,
            MIB
        ),
        Ok(())
    );
    assert_eq!(blocks(), before);
    assert_eq!(
        worker.without_data(
            Op::WriteZeroes {
                deallocate: true,
                fua: true
            },
            2 * MIB,
            MIB
        ),
        Ok(())
    );
    assert!(blocks() <= before - MIB, "{} of {before}", blocks());
    assert!(
        worker
            .read(2 * MIB, MIB)
            .unwrap()
            .iter()
            .all(|&byte| byte == 0)
    );
    assert!(worker.read(3 * MIB, MIB).unwrap() == data);
}

#[test]
fn zeroes_are_written_where_unsupported() {
    // A filesystem in memory punches holes but zeroes no ranges in place.
    let Some(directory) = memory() else { return };
    let volume = open(&sparse(&directory, 8 * MIB));
    let mut worker = Worker::new(&volume);
    let data = vec![0x5A; 4 << 20];
    assert_eq!(worker.write(0, &data), Ok(()));
    let before = worker.io.counters().operations;
    let op = Op::WriteZeroes {
        deallocate: false,
        fua: true,
    };
    assert_eq!(worker.without_data(op, 512, 3 * MIB), Ok(()));
    // Refused once, three pieces of zeroes, one fdatasync.
    assert_eq!(worker.io.counters().operations - before, 5);
    let content = worker.read(0, 4 * MIB).unwrap();
    assert!(
        content[512..512 + 3 * MIB as usize]
            .iter()
            .all(|&byte| byte == 0)
    );
    assert_eq!(content[..512], data[..512]);
    assert!(
        content[512 + 3 * MIB as usize..]
            .iter()
            .all(|&byte| byte == 0x5A)
    );
    // The refusal is remembered.
    let before = worker.io.counters().operations;
    assert_eq!(
        worker.without_data(
            Op::WriteZeroes {
                deallocate: false,
                fua: false
            },
            0,
            MIB
        ),
        Ok(())
    );
    assert_eq!(worker.io.counters().operations - before, 1);
}

fn opened(path: &Path, direct: Direct) -> FileVolume {
    let options = FileOptions {
        direct,
        ..FileOptions::default()
    };
    FileVolume::open(path, options).unwrap()
}

#[test]
fn shrunk_file_gives_errors_and_no_stale_data() {
    for way in WAYS {
        for direct in [Direct::Auto, Direct::Off] {
            let directory = disk();
            let path = sparse(&directory, MIB);
            let volume = opened(&path, direct);
            let mut worker = Worker::by(way, &volume);
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(MIB / 2 + 100).unwrap();
            assert_eq!(worker.read(MIB / 2 - 4096, 4096), Ok(vec![0; 4096]));
            assert_eq!(
                worker.read(MIB / 2 + 4096, 4096),
                Err(IoErrorKind::Truncated.into())
            );
            assert_eq!(
                worker.read(MIB / 2 - 4096, 8192),
                Err(IoErrorKind::Truncated.into())
            );
            // A read of this range through a bounce buffer.
            let unaligned = worker.guest.list(&[(1, 8192)]);
            let completion = worker.run(Op::Read, MIB / 2 - 4096, 8192, unaligned);
            assert_eq!(completion.result, Err(IoErrorKind::Truncated.into()));
            let error = volume.refresh().expect_err("an odd size");
            assert!(matches!(error, VolumeError::OddSize { .. }), "{error}");
            assert_eq!(volume.info().size, MIB);
            file.set_len(2 * MIB).unwrap();
            assert!(volume.refresh().unwrap());
            assert!(!volume.refresh().unwrap());
            assert_eq!(volume.info().size, 2 * MIB);
            assert_eq!(worker.read(2 * MIB - 4096, 4096), Ok(vec![0; 4096]));
        }
    }
}

#[test]
fn segments_beyond_iov_limit_are_split() {
    for way in WAYS {
        let directory = disk();
        let volume = open(&sparse(&directory, 4 * MIB));
        let mut worker = Worker::by(way, &volume);
        // Every second KiB of memory: none can be merged.
        let pieces: Vec<(u64, u64)> = (0..3000).map(|index| (index * 1024, 512)).collect();
        let len = 3000 * 512;
        let data: Vec<u8> = (0..len).map(|index| (index % 251) as u8).collect();
        let list = worker.guest.list(&pieces);
        assert_eq!(list.count(), 3000);
        list.copy_from(0, &data);
        assert_eq!(
            worker.run(Op::Write { fua: false }, 0, len, list).result,
            Ok(())
        );
        let list = worker.guest.list(&pieces);
        list.fill(0);
        let completion = worker.run(Op::Read, 0, len, list);
        assert_eq!(completion.result, Ok(()));
        assert!(bytes(&completion.data) == data);
        let (head, tail) = data.split_at(MIB as usize);
        assert!(worker.read(0, MIB).unwrap() == head);
        assert!(worker.read(MIB, len - MIB).unwrap() == tail);
    }
}

#[test]
fn dropped_queue_waits_for_kernel() {
    for way in WAYS {
        let directory = disk();
        let volume = open(&sparse(&directory, 16 * MIB));
        let mut worker = Worker::by(way, &volume);
        for round in 0..20u64 {
            let mut other = volume.open(&worker.io).unwrap();
            for index in 0..16 {
                let data = worker.guest.list(&[(index * 65536, 65536)]);
                let op = if index % 2 == 0 {
                    Op::Write {
                        fua: index % 4 == 0,
                    }
                } else {
                    Op::Read
                };
                let request = Request::transfer(1000 + index, op, index * 65536, data);
                assert!(way.begin(&mut *other, request).is_none());
            }
            if round % 2 == 0 {
                worker.io.flush();
            }
            drop(other);
            // No request is left to the kernel, and no completion is lost.
            assert_eq!(worker.io.in_flight(), 16);
            let mut came: Vec<Completion> = Vec::new();
            assert_eq!(worker.io.poll(&mut |completion| came.push(completion)), 16);
            for completion in &came {
                assert!(
                    matches!(
                        completion.result,
                        Ok(())
                            | Err(volume::IoError {
                                kind: IoErrorKind::Aborted,
                                ..
                            })
                    ),
                    "{completion:?}"
                );
            }
            assert_eq!(worker.io.in_flight(), 0);
            // The other queue into the same file continues.
            assert!(worker.read(0, 4096).is_ok());
        }
        // Everything at once: first the ring's owner, then the queue.
        let data = worker.guest.list(&[(0, 65536)]);
        assert!(worker.start(Op::Read, 0, 65536, data).1.is_none());
        worker.io.flush();
        let Worker {
            queue, io, guest, ..
        } = worker;
        drop(io);
        drop(guest);
        drop(queue);
    }
}

#[test]
fn cancelled_request_still_completes() {
    for way in WAYS {
        let directory = disk();
        let volume = open(&sparse(&directory, 16 * MIB));
        let mut worker = Worker::by(way, &volume);
        for index in 0..32 {
            let data = worker.guest.list(&[(index * 65536, 65536)]);
            assert!(
                worker
                    .start(Op::Write { fua: true }, index * 65536, 65536, data)
                    .1
                    .is_none()
            );
        }
        for tag in 1..=32 {
            worker.queue.cancel(tag);
        }
        worker.queue.cancel(99);
        for completion in worker.wait(32) {
            match completion.result {
                Ok(()) => {}
                Err(error) => assert_eq!(error.kind, IoErrorKind::Aborted, "{error}"),
            }
        }
        assert!(worker.write(0, &[1; 4096]).is_ok());
    }
}

#[test]
fn sleeping_worker_is_woken() {
    for way in WAYS {
        let directory = disk();
        let volume = open(&sparse(&directory, MIB));
        let mut worker = Worker::by(way, &volume);
        assert!(worker.io.event_fd().is_some());
        let began = Instant::now();
        for round in 0..200u64 {
            let data = worker.guest.list(&[(0, 4096)]);
            let op = if round % 2 == 0 {
                Op::Write { fua: false }
            } else {
                Op::Flush
            };
            let (len, data) = if op == Op::Flush {
                (0, SegmentList::new())
            } else {
                (4096, data)
            };
            assert!(worker.start(op, 0, len, data).1.is_none());
            let mut came = 0;
            while came == 0 {
                // Only sleeping: no poll happens before the event is signalled.
                if worker.io.arm() {
                    crate::common::sleep(&worker.io);
                }
                came = worker
                    .io
                    .poll(&mut |completion| assert_eq!(completion.result, Ok(())));
                assert!(began.elapsed() < crate::common::BOUND);
            }
        }
        // With nothing in flight there is nothing to wake up for.
        assert!(worker.io.arm());
    }
}

#[test]
fn requests_may_start_during_completion() {
    for way in WAYS {
        let directory = disk();
        let volume = open(&sparse(&directory, MIB));
        let Worker {
            mut queue,
            io,
            guest,
            ..
        } = Worker::by(way, &volume);
        let request = |tag| Request::transfer(tag, Op::Read, 0, guest.list(&[(0, 4096)]));
        assert!(way.begin(&mut *queue, request(1)).is_none());
        let mut last = 0;
        let began = Instant::now();
        while last < 100 {
            assert!(began.elapsed() < crate::common::BOUND);
            io.flush();
            io.poll(&mut |completion| {
                assert_eq!(completion.result, Ok(()));
                last = completion.tag;
                if last < 100 {
                    assert!(way.begin(&mut *queue, request(last + 1)).is_none());
                }
            });
        }
        assert_eq!(io.in_flight(), 0);
    }
}

#[test]
fn read_into_read_only_memory_fails() {
    for way in WAYS {
        let directory = disk();
        let volume = open(&sparse(&directory, MIB));
        let mut worker = Worker::by(way, &volume);
        let mut map = dma::DmaMap::new();
        let rights = dma::Prot {
            read: true,
            write: false,
        };
        map.map(0, 4096, Some((worker.guest.memory.clone(), 0)), rights)
            .unwrap();
        let mut list = SegmentList::new();
        list.begin(&map);
        map.segments(0, 4096, dma::Access::Read, &mut list).unwrap();
        assert_eq!(
            worker.run(Op::Read, 0, 4096, list).result,
            Err(IoErrorKind::Invalid.into())
        );
    }
}

#[test]
fn lost_memory_has_own_error() {
    for way in WAYS {
        for direct in [Direct::Auto, Direct::Off] {
            let directory = disk();
            let path = sparse(&directory, MIB);
            std::fs::write(&path, vec![0x77; MIB as usize]).unwrap();
            let volume = opened(&path, direct);
            let mut worker = Worker::by(way, &volume);
            rustix::fs::ftruncate(worker.guest.memory.fd(), 0).unwrap();
            for op in [Op::Read, Op::Write { fua: false }] {
                let list = worker.guest.list(&[(0, 8192)]);
                let result = worker.run(op, 0, 8192, list).result;
                assert_eq!(
                    result.map_err(|error| error.kind),
                    Err(IoErrorKind::Memory),
                    "{op:?}"
                );
            }
        }
    }
}

#[test]
fn images_of_other_formats_are_refused_unless_raw() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.img");
    let bytes = [&b"QFI\xfb\0\0\0\x03"[..], &[0; 4088]].concat();
    std::fs::write(&path, bytes).unwrap();
    for direct in [Direct::Auto, Direct::Off] {
        let probed = FileOptions {
            direct,
            ..FileOptions::default()
        };
        let text = refused(&path, probed);
        assert!(
            text.contains("is a qcow2 image") && text.contains("?format=raw"),
            "{text}"
        );
        let raw = FileOptions {
            format: volume::Format::Raw,
            ..probed
        };
        assert_eq!(FileVolume::open(&path, raw).unwrap().info().size, 4096);
    }
    // Whatever its size: the advice for a raw disk would spoil the image.
    for size in [100, 1000] {
        std::fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(size)
            .unwrap();
        let text = refused(&path, FileOptions::default());
        assert!(
            text.contains("qcow2") && !text.contains("truncate"),
            "{text}"
        );
    }
    let url = |options: &str| {
        let url = format!("file://{}{options}", path.display());
        volume::open_url(&url, volume::OpenOptions::default()).map(drop)
    };
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(4096)
        .unwrap();
    assert!(url("").unwrap_err().to_string().contains("qcow2"));
    url("?format=raw").unwrap();
    let wrong = url("?format=qcow2").unwrap_err().to_string();
    assert!(wrong.contains("it is raw, qcow2 or probe"), "{wrong}");
}
