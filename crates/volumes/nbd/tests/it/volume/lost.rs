//! A server that lies, ends, returns, or stays away.

use crate::volume::*;

/// Each lie ends its connection; the request is sent again on the next, and answered there.
#[test]
fn requests_are_resent_after_violation_or_close() {
    for answer in [
        Answer::Close,
        Answer::CloseWithin,
        Answer::WrongCookie,
        Answer::Garbage,
        Answer::TooLong,
        Answer::Flood,
        Answer::Never,
        Answer::Errno(nbd::protocol::wire::ESHUTDOWN),
    ] {
        for structured in [true, false] {
            if !structured && matches!(answer, Answer::Flood) {
                continue;
            }
            let server = Server::new(Setup {
                structured,
                answer: Box::new(move |number, _| match number {
                    3 => answer,
                    _ => Answer::Right,
                }),
                ..Setup::default()
            });
            let limits = if answer == Answer::Never {
                short()
            } else {
                options()
            };
            let volume = open(&server, limits);
            let mut worker = Worker::new(&volume);
            let data = pattern(9, 40 * BLOCK);
            let mut tags = Vec::new();
            for at in 0..40 {
                let part = &data[(at * BLOCK) as usize..][..BLOCK as usize];
                let list = worker.guest.holding(at * BLOCK, part);
                let (tag, done) = worker.start(WRITE, at * BLOCK, BLOCK, list);
                assert!(done.is_none());
                tags.push(tag);
            }
            let mut done = worker.wait(40);
            done.sort_by_key(|completion| completion.tag);
            for (completion, tag) in done.iter().zip(&tags) {
                assert_eq!(
                    (completion.tag, completion.result),
                    (*tag, Ok(())),
                    "{answer:?}"
                );
            }
            drop(done);
            for at in [0, 20, 39] {
                let part = &data[(at * BLOCK) as usize..][..BLOCK as usize];
                assert_eq!(worker.read(at * BLOCK, BLOCK).unwrap(), part, "{answer:?}");
            }
            let second = server.count(|s| &s.connections);
            assert!(second >= 2, "{answer:?} {structured}: {second} connections");
        }
    }
}

/// The same with a long read, which receives its data without a copy.
#[test]
fn long_read_survives_lost_connection() {
    for answer in [Answer::CloseWithin, Answer::TooLong, Answer::Garbage] {
        let server = serving(move |number, _| match number {
            1 | 2 => answer,
            _ => Answer::Right,
        });
        let volume = open(&server, options());
        let mut worker = Worker::new(&volume);
        let data = pattern(5, 1 << 20);
        worker.write(0, &data).unwrap();
        assert_eq!(worker.read(0, 1 << 20).unwrap(), data, "{answer:?}");
    }
}

#[test]
fn permanently_violating_server_fails_request() {
    let server = serving(|_, _| Answer::Garbage);
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    assert_eq!(
        worker.read(0, 4096).unwrap_err().kind,
        IoErrorKind::MediaRead
    );
    // The next connection may be there already.
    assert_eq!(server.count(|s| &s.requests), 5);
}

#[test]
fn requests_continue_when_server_returns() {
    let mut server = serving(|_, _| Answer::Right);
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &[1; 4096]).unwrap();
    server.stop();
    let list = worker.guest.holding(0, &[2; 4096]);
    let (_, done) = worker.start(WRITE, 4096, 4096, list);
    assert!(done.is_none());
    // It is a slow disk.
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        worker.io.flush();
        worker
            .io
            .poll(&mut |_| panic!("a completion without a server"));
        worker
            .queue
            .poll(&mut |_| panic!("a completion without a server"));
    }
    assert_eq!(worker.queue.state().in_flight, 1);
    // It has grown.
    server.state.data.lock().unwrap().resize(4 << 20, 0);
    server.start();
    assert_eq!(worker.wait(1)[0].result, Ok(()));
    assert_eq!(
        worker.read(0, 8192).unwrap(),
        [[1; 4096], [2; 4096]].concat()
    );
    assert!(volume.refresh().unwrap() && !volume.refresh().unwrap());
    assert_eq!(volume.info().size, 4 << 20);
    assert_eq!(worker.read((4 << 20) - 4096, 4096).unwrap(), [0; 4096]);
}

#[test]
fn other_export_under_same_name_is_refused() {
    let mut server = serving(|_, _| Answer::Right);
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &[1; 4096]).unwrap();
    server.stop();
    *server.state.blocks.lock().unwrap() = [8192, 8192, 1 << 20];
    server.start();
    let list = worker.guest.piece(0, 4096);
    let (tag, _) = worker.start(Op::Read, 4096, 4096, list);
    let before = server.count(|s| &s.connections);
    let began = Instant::now();
    while server.count(|s| &s.connections) < before + 2 {
        assert!(began.elapsed() < BOUND);
        worker.io.flush();
        worker.io.poll(&mut |_| ());
        worker
            .queue
            .poll(&mut |_| panic!("answered by another export"));
    }
    // A guest's reset ends it all the same.
    worker.queue.cancel(tag);
    assert_eq!(
        worker.wait(1)[0].result.unwrap_err().kind,
        IoErrorKind::Aborted
    );
}

/// The requests of a server that stays away wait, then fail; and they are carried out again when it
/// is back. The watch tells how it is.
#[test]
fn requests_fail_when_server_stays_away() {
    let mut server = serving(|_, _| Answer::Right);
    let impatient = NbdOptions {
        reconnect_delay: Duration::from_secs(5),
        ..options()
    };
    let volume = open(&server, impatient);
    let watch = volume.watch();
    let mut worker = Worker::new(&volume);
    worker.write(0, &[1; 4096]).unwrap();
    let reach = watch.look().unwrap();
    assert!(reach.connected && reach.lost == 0);
    assert!(
        server
            .url()
            .starts_with(reach.server.split('?').next().unwrap())
    );
    server.stop();
    // One that was with the server or on its way, one that waits.
    let began = Instant::now();
    assert_eq!(
        worker.write(0, &[2; 4096]).unwrap_err().kind,
        IoErrorKind::Unreachable
    );
    assert!(began.elapsed() >= Duration::from_millis(4900), "it waited");
    assert!(!watch.look().unwrap().connected);
    // From now on nothing waits, until the server is back.
    for _ in 0..100 {
        let error = worker.read(0, 4096).unwrap_err();
        assert_eq!(error.kind, IoErrorKind::Unreachable);
    }
    let flush = worker.without_data(Op::Flush, 0, 0);
    assert_eq!(flush.unwrap_err().kind, IoErrorKind::Unreachable);
    server.start();
    let began = Instant::now();
    while worker.read(0, 4096).is_err() {
        assert!(began.elapsed() < BOUND);
    }
    let reach = watch.look().unwrap();
    assert!(reach.connected && reach.lost >= 1);
    // The pause is counted from the next loss on.
    server.stop();
    server.start();
    worker.write(0, &[3; 4096]).unwrap();
    drop(worker);
    drop(volume);
    assert_eq!(watch.look(), None);
}

/// A server that takes connections and requests and answers nothing is no server.
#[test]
fn server_without_answers_counts_as_lost() {
    let server = serving(|_, _| Answer::Never);
    let impatient = NbdOptions {
        timeout: Duration::from_millis(200),
        reconnect_delay: Duration::from_secs(3),
        ..NbdOptions::default()
    };
    let volume = open(&server, impatient);
    let mut worker = Worker::new(&volume);
    assert_eq!(
        worker.read(0, 4096).unwrap_err().kind,
        IoErrorKind::Unreachable
    );
    assert!(server.count(|s| &s.connections) >= 2, "it was tried again");
}

/// The server may end at any byte of the handshake of the next connection.
#[test]
fn handshake_cut_at_any_byte_is_repeated() {
    let server = serving(|number, _| match number {
        1 => Answer::Close,
        _ => Answer::Right,
    });
    let volume = open(&server, options());
    let mut worker = Worker::new(&volume);
    worker.write(0, &[1; 4096]).unwrap();
    *server.state.cuts.lock().unwrap() = vec![115, 100, 70, 39, 38, 18, 17, 16, 8, 1, 0];
    worker.write(0, &[2; 4096]).unwrap();
    assert_eq!(worker.read(0, 4096).unwrap(), [2; 4096]);
    let cuts = server.state.cuts.lock().unwrap();
    assert!(cuts.is_empty(), "{cuts:?}");
    // The first one, those, and the last one.
    assert!(server.count(|s| &s.connections) >= 13);
}

/// A server that says nothing holds up nobody for longer than the time limit.
#[test]
fn silent_server_times_out_at_open() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("silent");
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let named = Named::unix("/", path.to_str().unwrap()).unwrap();
    let error = NbdVolume::open(named, options()).unwrap_err().to_string();
    assert!(error.contains("no answer within the time limit"), "{error}");
    let name = "x".repeat(4097);
    let server = serving(|_, _| Answer::Right);
    let named = Named::unix(&format!("/{name}"), server.path.to_str().unwrap()).unwrap();
    let error = NbdVolume::open(named, options()).unwrap_err().to_string();
    assert!(error.contains("longer than 4096 bytes"), "{error}");
}
