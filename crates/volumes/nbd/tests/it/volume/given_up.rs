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
