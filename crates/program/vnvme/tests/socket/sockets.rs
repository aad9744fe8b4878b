//! The socket's file: its mode, and files that exist at its path already.

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;

use vfio_user::client::Client;

use crate::common::*;

fn refused(test_dir: &TestDir, word: &str) {
    let socket = text(&test_dir.socket());
    let ended = Daemon::spawn(&["serve", "--socket", &socket, "mem://1M"]).wait();
    assert_eq!(ended.status.code(), Some(1), "{ended:#?}");
    let line = ended.log.last().unwrap();
    assert!(line.contains(word) && line.contains(&socket), "{line}");
}

#[test]
fn only_socket_owner_may_connect() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let meta = fs::symlink_metadata(test_dir.socket()).unwrap();
    assert!(meta.file_type().is_socket());
    assert_eq!(meta.permissions().mode() & 0o7777, 0o600);
    daemon.end();
    assert!(!test_dir.socket().exists());
}

#[test]
fn stale_socket_is_replaced() {
    let test_dir = TestDir::new();
    drop(UnixListener::bind(test_dir.socket()).unwrap());
    assert!(test_dir.socket().exists());
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    Client::connect(test_dir.socket(), WAIT_TIMEOUT).unwrap();
    // The socket of a killed daemon is stale.
    daemon.kill();
    assert!(test_dir.socket().exists());
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    Client::connect(test_dir.socket(), WAIT_TIMEOUT).unwrap();
    daemon.end();
}

#[test]
fn live_socket_is_left_alone() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    refused(&test_dir, "another server");
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &[1; 512]);
    refused(&test_dir, "another server");
    host.write(1, 0, &[2; 512]);
    drop(host);
    daemon.end();
}

#[test]
fn non_socket_is_left_alone() {
    let test_dir = TestDir::new();
    fs::write(test_dir.socket(), "precious").unwrap();
    refused(&test_dir, "not a socket");
    assert_eq!(fs::read_to_string(test_dir.socket()).unwrap(), "precious");
    fs::remove_file(test_dir.socket()).unwrap();
    fs::create_dir(test_dir.socket()).unwrap();
    refused(&test_dir, "not a socket");
    fs::remove_dir(test_dir.socket()).unwrap();
    // A link is not followed: it might point to anybody's socket.
    File::create(test_dir.path("target")).unwrap();
    std::os::unix::fs::symlink(test_dir.path("target"), test_dir.socket()).unwrap();
    refused(&test_dir, "not a socket");
    assert!(test_dir.path("target").exists());
}

#[test]
fn unusable_socket_path_is_refused() {
    let test_dir = TestDir::new();
    let no_directory = text(&test_dir.path("missing/vm.sock"));
    let too_long = text(&test_dir.path(&"x".repeat(120)));
    for path in [no_directory, too_long] {
        let ended = Daemon::spawn(&["serve", "--socket", &path, "mem://1M"]).wait();
        assert_eq!(ended.status.code(), Some(1), "{ended:#?}");
        assert_eq!(ended.log.len(), 1, "{ended:#?}");
    }
}

#[test]
fn concurrent_starts_leave_one_server() {
    for _ in 0..5 {
        let test_dir = TestDir::new();
        drop(UnixListener::bind(test_dir.socket()).unwrap());
        let socket = text(&test_dir.socket());
        let mut both = [0, 1].map(|_| Daemon::spawn(&["serve", "--socket", &socket, "mem://1M"]));
        eventually("one listens, the other ends", || {
            let alive = both
                .iter_mut()
                .filter_map(|daemon| daemon.is_alive().then_some(()))
                .count();
            assert!(alive > 0, "both ended");
            alive == 1
        });
        Client::connect(test_dir.socket(), WAIT_TIMEOUT).unwrap();
        for mut daemon in both {
            if daemon.is_alive() {
                daemon.end();
            } else {
                assert_eq!(daemon.wait().status.code(), Some(1));
            }
        }
        assert!(!test_dir.socket().exists());
    }
}
