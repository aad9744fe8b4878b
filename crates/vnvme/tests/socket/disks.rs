//! Disks that cannot be served: one line that helps, and exit status 1.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;

use crate::common::*;

/// Checks that a disk is refused; all words must stand in one line.
fn refused(place: &Place, args: &[&str], words: &[&str]) {
    let socket = text(&place.socket());
    let mut all = vec!["serve", "--socket", &socket];
    all.extend(args);
    let ended = Daemon::spawn(&all).wait();
    assert_eq!(ended.status.code(), Some(1), "{ended:#?}");
    let line = ended.log.last().expect("a reason");
    for word in words {
        assert!(line.contains(word), "\"{word}\" is not in: {line}");
    }
    let errors = ended.log.iter().filter(|line| !line.contains("INFO"));
    assert_eq!(errors.count(), 1, "one line: {:#?}", ended.log);
    assert!(!place.socket().exists(), "the socket is left behind");
}

#[test]
fn each_bad_disk_has_a_line_of_its_own() {
    let place = Place::new();
    let missing = text(&place.path("missing.raw"));
    refused(
        &place,
        &[&missing],
        &["missing.raw", "no such file", "truncate -s"],
    );
    let directory = text(&place.path("."));
    refused(&place, &[&directory], &["is a directory"]);
    let empty = place.disk("empty.raw", 0);
    refused(&place, &[&empty], &["empty.raw", "is empty", "truncate -s"]);
    let odd = place.disk("odd.raw", 1_000_001);
    refused(&place, &[&odd], &["odd.raw", "1000001", "multiple of 512"]);
    let odd = place.disk("odd4k.raw", 4096 * 3 + 512);
    refused(
        &place,
        &["--block-size", "4096", &odd],
        &["odd4k.raw", "multiple of 4096"],
    );
    refused(&place, &["/dev/null"], &["/dev/null", "character device"]);
    refused(&place, &["iscsi://host/1"], &["iscsi"]);
    refused(&place, &["mem://12Q"], &["12Q"]);
    let good = place.disk("good.raw", 1 << 20);
    refused(&place, &["--block-size", "1000", &good], &["1000"]);
    refused(&place, &[&good, &missing], &["missing.raw", "no such file"]);
    refused(&place, &[&good, &good], &["good.raw", "in use"]);
    refused(
        &place,
        &["--io-queues", "129", &good],
        &["io-queues", "129", "1 to 128"],
    );
    refused(
        &place,
        &["--serial", "a serial number that is too long", &good],
        &["serial", "20"],
    );
    refused(
        &place,
        &["mem://1M?nsid=2", "mem://1M?nsid=2"],
        &["2", "twice"],
    );
}

/// Root may write any file, so as root the test checks little.
#[test]
fn a_disk_that_may_not_be_written() {
    let place = Place::new();
    let disk = place.disk("disk.raw", 1 << 20);
    fs::set_permissions(&disk, fs::Permissions::from_mode(0o444)).unwrap();
    if File::options().write(true).open(&disk).is_err() {
        refused(
            &place,
            &[&disk],
            &["disk.raw", "permission denied", "--read-only"],
        );
    }
    let daemon = Daemon::serve(&place, &["--read-only", &disk]);
    let mut host = Host::up(&place.socket());
    assert!(host.read(1, 0, 4096) == [0; 4096]);
    drop(host);
    daemon.end();
}

#[test]
fn a_disk_that_another_daemon_serves() {
    let place = Place::new();
    let other = Place::new();
    let disk = place.disk("disk.raw", 1 << 20);
    let first = Daemon::serve(&place, &[&disk]);
    let pid = first.pid().to_string();
    refused(&other, &[&disk], &["disk.raw", "in use", &pid]);
    refused(
        &other,
        &["--read-only", &disk],
        &["disk.raw", "in use", &pid],
    );
    first.end();
    // Readers share it.
    let first = Daemon::serve(&place, &["--read-only", &disk]);
    let second = Daemon::serve(&other, &["--read-only", &disk]);
    let third = Place::new();
    refused(&third, &[&disk], &["disk.raw", "in use", "read-only"]);
    second.end();
    first.kill();
    // A killed daemon holds nothing.
    Daemon::serve(&other, &[&disk]).end();
}

#[test]
fn wrong_command_lines_have_status_2() {
    for args in [
        &["serve"][..],
        &["serve", "--socket", "/tmp/x"],
        &["serve", "disk.raw"],
        &[
            "serve",
            "--socket",
            "/tmp/x",
            "--doorbells",
            "maybe",
            "mem://1M",
        ],
        &["server"],
        &[],
    ] {
        let ended = Daemon::spawn(args).wait();
        assert_eq!(ended.status.code(), Some(2), "{args:?}: {ended:#?}");
        assert!(!ended.log.is_empty());
    }
}

#[test]
fn bad_configurations() {
    let place = Place::new();
    let config = place.path("vnvme.toml");
    for (content, words) in [
        ("", &["vnvme.toml"][..]),
        ("controller = []", &["no [[controller]]"]),
        ("[[controller]]\nsocket = \"/tmp/x\"", &["namespace"]),
        (
            "[[controller]]\nsocket = \"/tmp/x\"\nnamespace = []",
            &["no volume"],
        ),
        (
            "[[controller]]\nsoket = \"/tmp/x\"\nnamespace = []",
            &["soket"],
        ),
        ("not toml at all", &["vnvme.toml"]),
    ] {
        fs::write(&config, content).unwrap();
        let ended = Daemon::spawn(&["serve", "--config", &text(&config)]).wait();
        assert_eq!(ended.status.code(), Some(1), "{content:?}: {ended:#?}");
        let log = ended.log.join("\n");
        assert!(
            words.iter().all(|word| log.contains(word)),
            "{words:?}: {log}"
        );
    }
    let missing = text(&place.path("missing.toml"));
    let ended = Daemon::spawn(&["serve", "--config", &missing]).wait();
    assert_eq!(ended.status.code(), Some(1));
    assert!(ended.log.join("\n").contains("missing.toml"));
}
