//! Flushes and durable writes of many at once: fewer operations of the kernel, and each ends.

use super::*;

const DURABLE: Op = Op::Write { fua: true };

fn flush(tag: u64) -> Request {
    Request::flush(tag)
}

/// Returns a ring, and a queue into a file on it.
fn opened(mode: Mode, directory: &tempfile::TempDir) -> Option<(Io, OpenQueue)> {
    let io = io(mode)?;
    let queue = file(directory).open(&io).unwrap();
    Some((io, queue))
}

#[test]
fn waiting_flushes_are_merged() {
    for mode in MODES {
        let directory = tempfile::tempdir().unwrap();
        let Some((io, mut queue)) = opened(mode, &directory) else {
            continue;
        };
        for round in 1..=50 {
            for tag in 0..16 {
                assert!(queue.submit(flush(tag)).is_none());
            }
            assert_eq!(io.in_flight(), 16);
            let mut tags: Vec<u64> = finish_tags(&io, 16);
            tags.sort_unstable();
            assert_eq!(tags, (0..16).collect::<Vec<u64>>());
            // The first fsync, and one for all later requests.
            assert_eq!(io.counters().operations, 2 * round, "{mode:?}");
            assert_eq!(io.in_flight(), 0);
        }
    }
}

/// Sends the unsent entries, and waits until `requests` requests have succeeded.
fn finish_tags(io: &Io, requests: usize) -> Vec<u64> {
    let (began, mut tags) = (Instant::now(), Vec::new());
    while tags.len() < requests {
        io.flush();
        io.poll(&mut |over| {
            assert_eq!(over.result, Ok(()));
            tags.push(over.tag);
        });
        assert!(began.elapsed() < BOUND, "{} of {requests}", tags.len());
    }
    tags
}

#[test]
fn many_durable_writes_share_one_flush() {
    let directory = tempfile::tempdir().unwrap();
    let memory = Memory::anonymous(1 << 20).unwrap();
    memory
        .segments(0, 1 << 20)
        .unwrap()
        .copy_from(0, &[7; 1 << 16]);
    for begin in WAYS {
        let Some((io, mut queue)) = opened(Mode::Deferred, &directory) else {
            return;
        };
        let fast = &mut *queue;
        for tag in 0..16 {
            assert!(begin(fast, page(tag, DURABLE, &memory, tag as usize)).is_none());
        }
        assert_eq!(finish(&io, 16), vec![Ok(()); 16]);
        let operations = io.counters().operations;
        // Sixteen writes; eight of them are synced, in two groups at least.
        assert!((18..=24).contains(&operations), "{operations}");
        // A single durable write is one operation.
        assert!(begin(fast, page(1, DURABLE, &memory, 1)).is_none());
        assert_eq!(finish(&io, 1), [Ok(())]);
        assert_eq!(io.counters().operations, operations + 1);
    }
    let bytes = std::fs::read(directory.path().join("disk.raw")).unwrap();
    assert!(bytes.iter().take(1 << 16).all(|byte| *byte == 7));
}

#[test]
fn flush_waiter_ends_when_cancelled_or_dropped() {
    for mode in MODES {
        let directory = tempfile::tempdir().unwrap();
        let Some((io, mut queue)) = opened(mode, &directory) else {
            continue;
        };
        for cancelled in 0..16 {
            for tag in 0..16 {
                assert!(queue.submit(flush(tag)).is_none());
            }
            io.flush();
            queue.cancel(cancelled);
            let (began, mut ended) = (Instant::now(), 0);
            while ended < 16 {
                io.flush();
                io.poll(&mut |over| {
                    ended += 1;
                    // No other request was cancelled.
                    assert!(over.result.is_ok() || over.tag == cancelled, "{over:?}");
                });
                assert!(began.elapsed() < BOUND, "{ended}");
            }
        }
        for tag in 0..16 {
            assert!(queue.submit(flush(tag)).is_none());
        }
        drop(queue);
        assert_eq!(io.in_flight(), io.poll(&mut |_| ()));
    }
}
