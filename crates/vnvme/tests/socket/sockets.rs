//! The socket's file: its mode, and files that exist at its path already.

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;

use vfio_user::client::Client;

use crate::common::*;

fn refused(place: &Place, word: &str) {
    let socket = text(&place.socket());
    let ended = Daemon::spawn(&["serve", "--socket", &socket, "mem://1M"]).wait();
    assert_eq!(ended.status.code(), Some(1), "{ended:#?}");
    let line = ended.log.last().unwrap();
    assert!(line.contains(word) && line.contains(&socket), "{line}");
}

#[test]
fn only_its_owner_may_connect() {
    let place = Place::new();
    let daemon = Daemon::serve(&place, &["mem://1M"]);
    let meta = fs::symlink_metadata(place.socket()).unwrap();
    assert!(meta.file_type().is_socket());
    assert_eq!(meta.permissions().mode() & 0o7777, 0o600);
    daemon.end();
    assert!(!place.socket().exists());
}

#[test]
fn a_stale_socket_is_replaced() {
    let place = Place::new();
    drop(UnixListener::bind(place.socket()).unwrap());
    assert!(place.socket().exists());
    let daemon = Daemon::serve(&place, &["mem://1M"]);
    Client::connect(place.socket(), LIMIT).unwrap();
    // The socket of a killed daemon is stale.
    daemon.kill();
    assert!(place.socket().exists());
    let daemon = Daemon::serve(&place, &["mem://1M"]);
    Client::connect(place.socket(), LIMIT).unwrap();
    daemon.end();
}

#[test]
fn a_live_socket_is_left_alone() {
    let place = Place::new();
    let daemon = Daemon::serve(&place, &["mem://1M"]);
    refused(&place, "another server");
    let mut host = Host::up(&place.socket());
    host.write(1, 0, &[1; 512]);
    refused(&place, "another server");
    host.write(1, 0, &[2; 512]);
    drop(host);
    daemon.end();
}

#[test]
fn what_is_no_socket_is_left_alone() {
    let place = Place::new();
    fs::write(place.socket(), "precious").unwrap();
    refused(&place, "not a socket");
    assert_eq!(fs::read_to_string(place.socket()).unwrap(), "precious");
    fs::remove_file(place.socket()).unwrap();
    fs::create_dir(place.socket()).unwrap();
    refused(&place, "not a socket");
    fs::remove_dir(place.socket()).unwrap();
    // A link is not followed: it might point to anybody's socket.
    File::create(place.path("target")).unwrap();
    std::os::unix::fs::symlink(place.path("target"), place.socket()).unwrap();
    refused(&place, "not a socket");
    assert!(place.path("target").exists());
}

#[test]
fn paths_that_cannot_be_used() {
    let place = Place::new();
    let no_directory = text(&place.path("missing/vm.sock"));
    let too_long = text(&place.path(&"x".repeat(120)));
    for path in [no_directory, too_long] {
        let ended = Daemon::spawn(&["serve", "--socket", &path, "mem://1M"]).wait();
        assert_eq!(ended.status.code(), Some(1), "{ended:#?}");
        assert_eq!(ended.log.len(), 1, "{ended:#?}");
    }
}

#[test]
fn two_that_start_at_the_same_time() {
    for _ in 0..5 {
        let place = Place::new();
        drop(UnixListener::bind(place.socket()).unwrap());
        let socket = text(&place.socket());
        let mut both = [0, 1].map(|_| Daemon::spawn(&["serve", "--socket", &socket, "mem://1M"]));
        eventually("one listens, the other ends", || {
            let alive = both
                .iter_mut()
                .filter_map(|daemon| daemon.is_alive().then_some(()))
                .count();
            assert!(alive > 0, "both ended");
            alive == 1
        });
        Client::connect(place.socket(), LIMIT).unwrap();
        for mut daemon in both {
            if daemon.is_alive() {
                daemon.end();
            } else {
                assert_eq!(daemon.wait().status.code(), Some(1));
            }
        }
        assert!(!place.socket().exists());
    }
}
