//! The listening socket's file.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};

use vfio_user::{ListenError, Listener};

#[test]
fn made_with_mode_0600_and_removed_in_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cntrl");
    let listener = Listener::bind(&path).unwrap();
    let metadata = fs::symlink_metadata(&path).unwrap();
    assert!(metadata.file_type().is_socket());
    assert_eq!(metadata.permissions().mode() & 0o7777, 0o600);
    assert_eq!(listener.path(), path);
    drop(listener);
    assert!(!path.exists());
}

#[test]
fn accepts_without_blocking() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = Listener::bind(&path).unwrap();
    assert!(listener.accept().unwrap().is_none());
    let _a = UnixStream::connect(&path).unwrap();
    let _b = UnixStream::connect(&path).unwrap();
    let socket = listener.accept().unwrap().unwrap();
    assert!(listener.accept().unwrap().is_some());
    assert!(listener.accept().unwrap().is_none());
    let connection = vfio_user::Connection::new(socket);
    assert_eq!(
        connection.peer().unwrap().pid.as_raw_nonzero().get() as u32,
        std::process::id()
    );
}

#[test]
fn a_live_socket_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let first = Listener::bind(&path).unwrap();
    assert!(matches!(Listener::bind(&path), Err(ListenError::InUse(_))));
    // The probe is an ordinary connection, which its server sees come and go.
    assert!(path.exists());
    drop(first);
    Listener::bind(&path).unwrap();
}

#[test]
fn a_stale_socket_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let listener = Listener::bind(&path).unwrap();
    let _stream = UnixStream::connect(&path).unwrap();
    assert!(listener.accept().unwrap().is_some());
}

#[test]
fn what_is_not_a_socket_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "precious").unwrap();
    assert!(matches!(
        Listener::bind(&file),
        Err(ListenError::NotASocket(_))
    ));
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    assert!(matches!(
        Listener::bind(&link),
        Err(ListenError::NotASocket(_))
    ));
    assert!(matches!(
        Listener::bind(dir.path()),
        Err(ListenError::NotASocket(_))
    ));
}

#[test]
fn anothers_socket_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = Listener::bind(&path).unwrap();
    fs::rename(&path, dir.path().join("moved")).unwrap();
    let _other = UnixListener::bind(&path).unwrap();
    drop(listener);
    assert!(path.exists());
}

#[test]
fn errors_name_the_path() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing").join("socket");
    let error = Listener::bind(&missing).unwrap_err();
    assert!(error.to_string().contains("missing"), "{error}");
    let long = dir.path().join("x".repeat(200));
    assert!(matches!(
        Listener::bind(&long),
        Err(ListenError::System { .. })
    ));
}

#[test]
fn many_at_once_leave_one_that_works() {
    const THREADS: usize = 8;
    for round in 0..100 {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        // All find the stale file at the same time.
        let barrier = std::sync::Barrier::new(THREADS);
        let made: Vec<_> = std::thread::scope(|scope| {
            let bind = || {
                barrier.wait();
                Listener::bind(&path)
            };
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(bind)).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        let (made, refused): (Vec<_>, Vec<_>) = made.into_iter().partition(Result::is_ok);
        assert_eq!(made.len(), 1, "round {round}: {refused:?}");
        for error in refused.into_iter().filter_map(Result::err) {
            assert!(matches!(error, ListenError::InUse(_)), "{error}");
        }
        let listener = made.into_iter().flatten().next().unwrap();
        // Connections of the others, who looked whether the socket is live, stand before ours.
        while listener.accept().unwrap().is_some() {}
        let _stream = UnixStream::connect(&path).unwrap();
        assert!(listener.accept().unwrap().is_some(), "round {round}");
    }
}
