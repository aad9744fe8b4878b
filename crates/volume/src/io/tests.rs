//! Rings of every mode that this kernel offers, also the ones that it would not choose.

use super::ring::Ring;
use super::setup::{self, Mode};
use super::*;
use crate::{FileOptions, FileVolume, Op, Request, Volume};
use dma::{Buffer, SegmentList};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

fn io(mode: Mode) -> Option<Io> {
    let options = IoOptions {
        capacity: 16,
        ..IoOptions::default()
    };
    let uring = match setup::build(mode, options.capacity) {
        Ok(uring) => uring,
        Err(error) => {
            println!("skipped: {mode:?}: {error}");
            return None;
        }
    };
    let ring = Ring::with(uring, mode, &options).unwrap();
    Some(Io {
        options,
        ring: OnceCell::from(Rc::new(ring)),
        ..Io::new(IoOptions::default())
    })
}

fn file(directory: &tempfile::TempDir) -> FileVolume {
    let path = directory.path().join("disk.raw");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    FileVolume::open(path, FileOptions::default()).unwrap()
}

fn sleep(io: &Io, seconds: i64) -> usize {
    let mut fds = [PollFd::from_borrowed_fd(
        io.event_fd().unwrap(),
        PollFlags::IN,
    )];
    poll(
        &mut fds,
        Some(&Timespec {
            tv_sec: seconds,
            tv_nsec: 0,
        }),
    )
    .unwrap()
}

#[test]
fn every_mode_completes_sleeps_and_wakes() {
    for mode in [Mode::Deferred, Mode::Cooperative, Mode::Plain] {
        let Some(io) = io(mode) else { continue };
        let directory = tempfile::tempdir().unwrap();
        let volume = file(&directory);
        let mut queue = volume.open(&io).unwrap();
        for tag in 0..100 {
            let write = tag % 2 == 0;
            let op = if write {
                Op::Write { fua: true }
            } else {
                Op::Read
            };
            let mut data = SegmentList::owned(Buffer::new(4096));
            if let (true, Some(buffer)) = (write, data.buffer()) {
                buffer.fill(tag as u8);
            }
            assert!(
                queue
                    .submit(Request {
                        tag,
                        op,
                        offset: 8192,
                        len: 4096,
                        data
                    })
                    .is_none()
            );
            let mut came = Vec::new();
            while came.is_empty() {
                if io.arm() {
                    assert_eq!(sleep(&io, 60), 1, "{mode:?}: nobody woke the worker up");
                }
                io.poll(&mut |completion| came.push(completion));
            }
            let mut completion = came.pop().unwrap();
            assert_eq!((completion.tag, completion.result), (tag, Ok(())));
            let expected = if write { tag } else { tag - 1 } as u8;
            assert!(
                completion
                    .data
                    .buffer()
                    .unwrap()
                    .iter()
                    .all(|&byte| byte == expected),
                "{mode:?}"
            );
        }
        // With nothing in flight the descriptor keeps still.
        io.poll(&mut |_| unreachable!());
        assert!(io.arm());
        assert_eq!(sleep(&io, 0), 0, "{mode:?}");
    }
}

#[test]
fn no_signal_is_paid_for_while_polling() {
    let Some(io) = io(Mode::Deferred) else { return };
    let directory = tempfile::tempdir().unwrap();
    let volume = file(&directory);
    let mut queue = volume.open(&io).unwrap();
    for tag in 0..16 {
        let data = SegmentList::owned(Buffer::new(4096));
        assert!(
            queue
                .submit(Request {
                    tag,
                    op: Op::Read,
                    offset: 0,
                    len: 4096,
                    data
                })
                .is_none()
        );
    }
    let mut came = 0;
    while came < 16 {
        io.flush();
        came += io.poll(&mut |_| {});
    }
    assert_eq!(sleep(&io, 0), 0);
}

#[test]
fn files_beyond_the_kernels_table_work_by_descriptor() {
    let io = Io::new(IoOptions {
        capacity: 16,
        ..IoOptions::default()
    });
    let directory = tempfile::tempdir().unwrap();
    let volume = file(&directory);
    let mut queues: Vec<_> = (0..100).map(|_| volume.open(&io).unwrap()).collect();
    for (tag, queue) in queues.iter_mut().enumerate() {
        let data = SegmentList::owned(Buffer::new(4096));
        let request = Request {
            tag: tag as u64,
            op: Op::Read,
            offset: 0,
            len: 4096,
            data,
        };
        assert!(queue.submit(request).is_none());
        let mut came = 0;
        while came == 0 {
            io.flush();
            came = io.poll(&mut |completion| assert_eq!(completion.result, Ok(())));
        }
    }
}
