//! A server that lies, ends, returns, or stays away.

use crate::volume::*;

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
