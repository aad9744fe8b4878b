//! Requests that are given up.

use super::*;
use volume::{Io, IoOptions};

/// What a guest has given up does not come on top of what it writes later.
#[test]
fn cancelled_write_precedes_later_writes() {
    for len in [4096, 64 << 10] {
        let target = Target::new(Setup {
            portals: 2,
            answer: Box::new(|number, _| match number {
                0 => Answer::Held,
                _ => Answer::Right,
            }),
            ..Setup::default()
        });
        let volume = open(&target, options());
        let mut worker = Worker::new(&volume);
        // The new one could go by the other path, past the old one.
        connected(&volume, &mut worker);
        let old = worker.guest.holding(0, &vec![1; len]);
        let (tag, _) = worker.start(WRITE, 0, len as u64, old);
        worker.queue.push();
        until(&mut worker, || target.count(|s| &s.requests) == 1);
        // The kernel has told that it is sent: else its connection would end.
        let later = Instant::now() + Duration::from_millis(100);
        until(&mut worker, || Instant::now() >= later);
        worker.queue.cancel(tag);
        let result = worker.wait(1)[0].result;
        assert_eq!(result.unwrap_err().kind, IoErrorKind::Aborted);
        // Its memory is another's by now, though the controller has not asked for all of it.
        let new = worker.guest.holding(0, &[2; 4096]);
        worker.start(WRITE, 0, 4096, new);
        let later = Instant::now() + Duration::from_millis(200);
        until(&mut worker, || Instant::now() >= later);
        assert_eq!(target.count(|s| &s.requests), 1);
        target.release();
        assert_eq!(worker.wait(1)[0].result, Ok(()));
        assert_eq!(worker.read(0, 4096).unwrap(), [2; 4096]);
        if len > 4096 {
            assert_eq!(worker.read(4096, 4096).unwrap(), [1; 4096], "has changed");
        }
    }
}

#[test]
fn requests_end_when_cancelled_in_any_state() {
    let target = serving(|number, _| match number {
        0..=100 => Answer::Never,
        _ => Answer::Right,
    });
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    let mut tags = Vec::new();
    for _ in 0..20 {
        let data = worker.guest.piece(0, 1 << 20);
        tags.push(worker.start(WRITE, 0, 1 << 20, data).0);
        let data = worker.guest.piece(0, 4096);
        tags.push(worker.start(WRITE, 0, 4096, data).0);
        let data = worker.guest.piece(0, 4096);
        tags.push(worker.start(Op::Read, 0, 4096, data).0);
    }
    worker.queue.push();
    for tag in &tags {
        worker.queue.cancel(*tag);
    }
    let done = worker.wait(tags.len());
    let aborted = |result: Result<(), volume::IoError>| {
        result.is_err_and(|error| error.kind == IoErrorKind::Aborted)
    };
    assert!(done.iter().all(|completion| aborted(completion.result)));
    assert!(done.iter().all(|completion| !completion.data.is_empty()));
    assert_eq!(worker.queue.state().in_flight, 0);
}

#[test]
fn ending_worker_stops_waiting() {
    let target = serving(|_, _| Answer::Never);
    let volume = open(&target, options());
    let mut worker = Worker::new(&volume);
    worker.io = Io::new(IoOptions {
        stop_timeout: Duration::from_millis(100),
        ..IoOptions::default()
    });
    worker.queue = volume.open(&worker.io).unwrap();
    let list = worker.guest.holding(0, &[2; 4096]);
    worker.start(WRITE, 4096, 4096, list);
    worker.io.end();
    let result = worker.wait(1)[0].result;
    assert_eq!(result.unwrap_err().kind, IoErrorKind::Aborted);
    assert_eq!(worker.io.given_up().len(), 1);
}
