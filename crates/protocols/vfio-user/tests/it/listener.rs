//! The listening socket's file.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vfio_user::{ListenError, Listener};

#[test]
fn socket_has_mode_0600_and_is_removed() {
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
fn listener_accepts_without_blocking() {
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

/// A kept socket belongs to the next server until this one serves.
#[test]
fn kept_socket_is_removed_by_its_owner_only() {
    let is_owner = Arc::new(AtomicBool::new(false));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let first = Listener::bind(&path).unwrap();
    let inode = first.own_file().unwrap();
    let kept = || {
        let socket = first.as_fd().try_clone_to_owned().unwrap();
        let listener = Listener::kept(socket, &path, inode).unwrap();
        listener.owned_if(is_owner.clone())
    };
    drop(kept());
    let client = UnixStream::connect(&path).unwrap();
    let next = kept();
    assert!(next.accept().unwrap().is_some());
    is_owner.store(true, Ordering::Release);
    drop(next);
    assert!(!path.exists());
    drop(client);
}

#[test]
fn live_socket_is_refused() {
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
fn stale_socket_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let listener = Listener::bind(&path).unwrap();
    let _stream = UnixStream::connect(&path).unwrap();
    assert!(listener.accept().unwrap().is_some());
}

const ELSEWHERE: &str = "LISTENER_TEST_PATH";

/// A process that listens at a path, and says so, and when a client has come.
struct Elsewhere(Child, BufReader<ChildStdout>);

impl Elsewhere {
    fn listen(path: &Path) -> Elsewhere {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "listener::listens_elsewhere",
            "--ignored",
            "--nocapture",
        ]);
        command.env(ELSEWHERE, path).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        let mut server = Elsewhere(child, said);
        server.says("listening");
        server
    }

    fn says(&mut self, word: &str) {
        let mut lines = self.1.by_ref().lines();
        assert!(lines.any(|line| line.unwrap() == word), "{word}");
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
#[ignore = "a process that another test starts: cargo test -p vnvme-vfio-user --test it listener"]
fn listens_elsewhere() {
    let listener = UnixListener::bind(std::env::var_os(ELSEWHERE).unwrap()).unwrap();
    println!("\nlistening");
    for client in listener.incoming() {
        println!("client");
        drop(client.unwrap());
    }
}

#[test]
fn ending_server_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let is_waited_for = || {
        let mut server = Elsewhere::listen(&path);
        let waits = {
            let path = path.clone();
            std::thread::spawn(move || Listener::make_room(path))
        };
        server.says("client");
        drop(server);
        match waits.join().unwrap() {
            Ok(()) => true,
            Err(ListenError::InUse(_)) => {
                fs::remove_file(&path).unwrap();
                false
            }
            Err(error) => panic!("{error}"),
        }
    };
    // A busy machine may take longer to end it than it is waited for.
    assert!((0..10).any(|_| is_waited_for()));
    let listener = Listener::bind(&path).unwrap();
    assert_eq!(listener.path(), path);
}

#[test]
fn live_server_of_other_process_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let _server = Elsewhere::listen(&path);
    for refused in [Listener::make_room(&path), Listener::bind(&path).map(drop)] {
        assert!(matches!(refused, Err(ListenError::InUse(_))));
    }
    let _client = UnixStream::connect(&path).unwrap();
}

#[test]
fn non_socket_is_left_alone() {
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
fn socket_of_other_server_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = Listener::bind(&path).unwrap();
    fs::rename(&path, dir.path().join("moved")).unwrap();
    let _other = UnixListener::bind(&path).unwrap();
    drop(listener);
    assert!(path.exists());
}

#[test]
fn bind_errors_name_path() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing").join("socket");
    let error = Listener::bind(&missing).unwrap_err();
    assert!(error.to_string().contains("missing"), "{error}");
    let long = dir.path().join("x".repeat(200));
    assert!(matches!(
        Listener::bind(&long),
        Err(ListenError::TooLong(path)) if path == long
    ));
}

#[test]
fn concurrent_binds_leave_one_working_socket() {
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

/// Any user with read access to the directory can lock it, and keep the lock.
#[test]
fn lock_on_directory_blocks_nobody() {
    use rustix::fs::{FlockOperation, flock};
    let dir = tempfile::tempdir().unwrap();
    let theirs = fs::File::open(dir.path()).unwrap();
    flock(&theirs, FlockOperation::NonBlockingLockExclusive).unwrap();
    let path = dir.path().join("socket");
    let listener = Listener::bind(&path).unwrap();
    // The lock of our own is gone when the socket is made.
    assert!(!dir.path().join("socket.lock").exists());
    drop(listener);
}

#[test]
fn lock_file_is_private_to_owner() {
    use rustix::fs::{FlockOperation, flock};
    let dir = tempfile::tempdir().unwrap();
    let (path, lock) = (dir.path().join("socket"), dir.path().join("socket.lock"));
    // What a killed server left behind is used again, and closed to others.
    fs::write(&lock, "").unwrap();
    fs::set_permissions(&lock, fs::Permissions::from_mode(0o666)).unwrap();
    drop(Listener::bind(&path).unwrap());
    assert!(!lock.exists());
    // Another process of the same user, which does not end.
    let held = fs::File::create(&lock).unwrap();
    flock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
    let mode = || fs::metadata(&lock).unwrap().permissions().mode() & 0o777;
    fs::set_permissions(&lock, fs::Permissions::from_mode(0o644)).unwrap();
    let error = Listener::bind(&path).unwrap_err();
    assert!(matches!(error, ListenError::Locked(_)), "{error}");
    assert!(error.to_string().contains("socket.lock"), "{error}");
    assert_eq!(mode(), 0o600);
    fs::remove_file(&lock).unwrap();
    // What is no file is not opened, and is left alone.
    fs::create_dir(&lock).unwrap();
    let error = Listener::bind(&path).unwrap_err();
    assert!(matches!(error, ListenError::NotALock(_)), "{error}");
    fs::remove_dir(&lock).unwrap();
    std::os::unix::fs::symlink(dir.path().join("target"), &lock).unwrap();
    let error = Listener::bind(&path).unwrap_err();
    assert!(matches!(error, ListenError::NotALock(_)), "{error}");
    assert!(!dir.path().join("target").exists());
    fs::remove_file(&lock).unwrap();
    // Nor is a file of ours that somebody has given this name, too.
    let precious = dir.path().join("precious");
    fs::write(&precious, "").unwrap();
    fs::set_permissions(&precious, fs::Permissions::from_mode(0o640)).unwrap();
    fs::hard_link(&precious, &lock).unwrap();
    let error = Listener::bind(&path).unwrap_err();
    assert!(matches!(error, ListenError::NotALock(_)), "{error}");
    let mode = fs::metadata(&precious).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o640);
    assert!(!path.exists());
}

/// Needs root, to make a file another user's.
#[test]
fn lock_file_of_other_user_is_named_with_owner() {
    let dir = tempfile::tempdir().unwrap();
    let (path, lock) = (dir.path().join("socket"), dir.path().join("socket.lock"));
    fs::write(&lock, "").unwrap();
    if std::os::unix::fs::chown(&lock, Some(12345), None).is_err() {
        return testkit::skip(
            "vfio-user::lock_file_of_other_user_is_named_with_owner",
            "only root can make another user's file",
        );
    }
    let error = Listener::bind(&path).unwrap_err();
    assert!(
        matches!(error, ListenError::ForeignLock { owner: 12345, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("12345"), "{error}");
    assert!(lock.exists());
}
