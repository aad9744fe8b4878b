//! Disks that cannot be served: one line that helps, and exit status 1.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;

use crate::common::*;

/// Checks that a disk is refused; all words must stand in one line.
fn refused(test_dir: &TestDir, args: &[&str], words: &[&str]) {
    let socket = text(&test_dir.socket());
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
    assert!(!test_dir.socket().exists(), "the socket is left behind");
}

#[test]
fn each_unusable_disk_has_own_error() {
    let test_dir = TestDir::new();
    let missing = text(&test_dir.path("missing.raw"));
    refused(
        &test_dir,
        &[&missing],
        &["missing.raw", "no such file", "truncate -s"],
    );
    let directory = text(&test_dir.path("."));
    refused(&test_dir, &[&directory], &["is a directory"]);
    let empty = test_dir.disk("empty.raw", 0);
    refused(
        &test_dir,
        &[&empty],
        &["empty.raw", "is empty", "truncate -s"],
    );
    let odd = test_dir.disk("odd.raw", 1_000_001);
    refused(
        &test_dir,
        &[&odd],
        &["odd.raw", "1000001", "multiple of 512"],
    );
    let odd = test_dir.disk("odd4k.raw", 4096 * 3 + 512);
    refused(
        &test_dir,
        &["--block-size", "4096", &odd],
        &["odd4k.raw", "multiple of 4096"],
    );
    refused(
        &test_dir,
        &["/dev/null"],
        &["/dev/null", "character device"],
    );
    refused(&test_dir, &["iscsi://host/1"], &["iscsi"]);
    refused(&test_dir, &["mem://12Q"], &["12Q"]);
    let good = test_dir.disk("good.raw", 1 << 20);
    refused(&test_dir, &["--block-size", "1000", &good], &["1000"]);
    refused(
        &test_dir,
        &[&good, &missing],
        &["missing.raw", "no such file"],
    );
    refused(&test_dir, &[&good, &good], &["good.raw", "in use"]);
    refused(
        &test_dir,
        &["--io-queues", "129", &good],
        &["io-queues", "129", "1 to 128"],
    );
    refused(
        &test_dir,
        &["--serial", "a serial number that is too long", &good],
        &["serial", "20"],
    );
    refused(
        &test_dir,
        &["mem://1M?nsid=2", "mem://1M?nsid=2"],
        &["2", "twice"],
    );
}

/// Root may write any file, so as root the test checks little.
#[test]
fn write_protected_disk_is_refused() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    fs::set_permissions(&disk, fs::Permissions::from_mode(0o444)).unwrap();
    if File::options().write(true).open(&disk).is_err() {
        refused(
            &test_dir,
            &[&disk],
            &["disk.raw", "permission denied", "--read-only"],
        );
    }
    let daemon = Daemon::serve(&test_dir, &["--read-only", &disk]);
    let mut host = Host::up(&test_dir.socket());
    assert!(host.read(1, 0, 4096) == [0; 4096]);
    drop(host);
    daemon.end();
}

#[test]
fn disk_of_other_daemon_is_refused() {
    let test_dir = TestDir::new();
    let other = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    let first = Daemon::serve(&test_dir, &[&disk]);
    let pid = first.pid().to_string();
    refused(&other, &[&disk], &["disk.raw", "in use", &pid]);
    refused(
        &other,
        &["--read-only", &disk],
        &["disk.raw", "in use", &pid],
    );
    first.end();
    // Readers share it.
    let first = Daemon::serve(&test_dir, &["--read-only", &disk]);
    let second = Daemon::serve(&other, &["--read-only", &disk]);
    let third = TestDir::new();
    refused(&third, &[&disk], &["disk.raw", "in use", "read-only"]);
    second.end();
    first.kill();
    // A killed daemon holds nothing.
    Daemon::serve(&other, &[&disk]).end();
}

#[test]
fn invalid_command_lines_exit_with_status_2() {
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
fn invalid_configuration_is_refused() {
    let test_dir = TestDir::new();
    let config = test_dir.path("vnvme.toml");
    for (content, words) in [
        ("", &["vnvme.toml"][..]),
        ("controller = []", &["describes no disk", "[[controller]]"]),
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
    let missing = text(&test_dir.path("missing.toml"));
    let ended = Daemon::spawn(&["serve", "--config", &missing]).wait();
    assert_eq!(ended.status.code(), Some(1));
    assert!(ended.log.join("\n").contains("missing.toml"));
}
