//! Requests that are cancelled, or given up while the server still has them.

use crate::volume::*;

/// What a guest has given up does not come on top of what it writes later, though part of it was
/// never sent.
#[test]
fn write_cancelled_while_sent_precedes_later_writes() {
    let server = serving(|number, _| match number {
        0 => Answer::Held,
        _ => Answer::Right,
    });
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    let old = worker.guest.holding(0, &[1; 4096]);
    let mut tags = vec![worker.start(WRITE, 0, 4096, old).0];
    // More than the socket takes, in the same message.
    for _ in 0..4 {
        let more = worker.guest.piece(1 << 20, 1 << 20);
        tags.push(worker.start(WRITE, 1 << 20, 1 << 20, more).0);
    }
    worker.queue.push();
    while server.count(|s| &s.requests) == 0 {
        worker.io.flush();
        worker.io.poll(&mut |_| ());
        worker.queue.poll(&mut |_| panic!("too early"));
    }
    for tag in &tags {
        worker.queue.cancel(*tag);
    }
    // Their memory is wanted: they do not wait for the server.
    let done = worker.wait(tags.len());
    assert!(done.iter().all(|c| c.result.is_err()) && server.is_held());
    let new = worker.guest.holding(4096, &[2; 4096]);
    worker.start(WRITE, 0, 4096, new);
    let until = Instant::now() + Duration::from_millis(500);
    while Instant::now() < until {
        worker.io.flush();
        worker.io.poll(&mut |_| ());
        worker
            .queue
            .poll(&mut |_| panic!("the new one overtook the old one"));
    }
    server.release();
    assert_eq!(worker.wait(1)[0].result, Ok(()));
    assert_eq!(worker.read(0, 4096).unwrap(), [2; 4096]);
}

/// What a guest has given up does not come on top of what it writes later.
#[test]
fn cancelled_write_precedes_later_writes() {
    let server = serving(|number, _| match number {
        0 => Answer::Held,
        _ => Answer::Right,
    });
    let volume = open(
        &server,
        NbdOptions {
            timeout: Duration::from_secs(60),
            connections: 2,
            ..NbdOptions::default()
        },
    );
    let mut worker = Worker::new(&volume);
    let old = worker.guest.holding(0, &[1; 4096]);
    let (tag, _) = worker.start(WRITE, 0, 4096, old);
    worker.queue.push();
    // The new one could go by the other connection, past the old one.
    let watch = volume.watch();
    let connected = || watch.look().is_some_and(|reach| reach.connected);
    while server.count(|s| &s.requests) == 0 || !connected() {
        worker.io.flush();
        worker.io.poll(&mut |_| ());
        worker.queue.poll(&mut |_| panic!("too early"));
    }
    // The memory is back once the kernel has sent it.
    worker.queue.cancel(tag);
    assert_eq!(
        worker.wait(1)[0].result.unwrap_err().kind,
        IoErrorKind::Aborted
    );
    let new = worker.guest.holding(4096, &[2; 4096]);
    worker.start(WRITE, 0, 4096, new);
    let until = Instant::now() + Duration::from_millis(200);
    while Instant::now() < until {
        worker.io.flush();
        worker.io.poll(&mut |_| ());
        worker
            .queue
            .poll(&mut |_| panic!("the new one overtook the old one"));
    }
    assert_eq!(server.count(|s| &s.requests), 1);
    server.release();
    assert_eq!(worker.wait(1)[0].result, Ok(()));
    assert_eq!(worker.read(0, 4096).unwrap(), [2; 4096]);
}

#[test]
fn requests_end_when_cancelled_in_any_state() {
    let server = serving(|number, _| match number {
        0..=100 => Answer::Never,
        _ => Answer::Right,
    });
    let volume = open(
        &server,
        NbdOptions {
            timeout: Duration::from_secs(60),
            ..NbdOptions::default()
        },
    );
    let mut worker = Worker::new(&volume);
    // More than the server's socket takes: some are sent, some are being sent, some wait.
    let mut tags = Vec::new();
    for _ in 0..20 {
        let data = worker.guest.piece(0, 1 << 20);
        tags.push(worker.start(WRITE, 0, 1 << 20, data).0);
    }
    for _ in 0..20 {
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
