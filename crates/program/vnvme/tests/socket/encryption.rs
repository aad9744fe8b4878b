//! Encrypted volumes: a key that is read once, and outlives the process that has read it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use crate::common::*;
use crate::keeper::{kill_serving, start};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::Signal;
use serde_json::Value;

/// Header of a container that cryptsetup has made, with its key slots; see the tests of crate
/// `luks`. Its payload begins at 1 MiB and has sectors of 4096 bytes.
const HEADER: &[u8] = include_bytes!("../../../../volumes/luks/tests/fixtures/header");
const PASSPHRASE: &str = "correct horse";
const PAYLOAD: usize = 1 << 20;

/// Makes a named pipe, and a thread that writes the passphrase to its first reader.
fn pipe(test_dir: &TestDir, name: &str) -> (PathBuf, std::thread::JoinHandle<()>) {
    let path = test_dir.path(name);
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let writer = path.clone();
    let writer = std::thread::spawn(move || fs::write(writer, PASSPHRASE).unwrap());
    (path, writer)
}

fn key_file(test_dir: &TestDir, key: &str) -> String {
    let path = test_dir.path("key");
    fs::write(&path, key).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    text(&path)
}

fn container(test_dir: &TestDir, name: &str) -> String {
    let mut bytes = HEADER.to_vec();
    bytes.resize(16 << 20, 0);
    let path = test_dir.path(name);
    fs::write(&path, bytes).unwrap();
    text(&path)
}

/// The passphrases come through pipes, and nobody writes them a second time.
#[test]
fn restarted_process_needs_no_passphrase() {
    let test_dir = TestDir::new();
    let (one, first) = pipe(&test_dir, "one");
    let (two, second) = pipe(&test_dir, "two");
    let header = test_dir.path("header");
    fs::write(&header, HEADER).unwrap();
    let (socket, control) = (text(&test_dir.socket()), text(&test_dir.path("control")));
    let disk = container(&test_dir, "disk.raw");
    let args = [
        "serve",
        "--socket",
        &socket,
        "--control",
        &control,
        "--keeper",
        "process",
        &format!("{disk}?luks={}", one.display()),
        &format!(
            "mem://8M?luks={}&luks-header={}",
            two.display(),
            header.display()
        ),
    ];
    let daemon = start(&test_dir, &args);
    first.join().unwrap();
    second.join().unwrap();
    let mut host = Host::attach(&test_dir.socket());
    host.enable();
    host.create_queues(2, None);
    host.block = 4096;
    let mut written = Vec::new();
    for round in 0..4u64 {
        let data = pattern(round + 1, 64 << 10);
        for nsid in [1, 2] {
            host.write(nsid, 16 * round, &data);
        }
        written.push(data);
        if round == 2 {
            let before = daemon.count("upgraded:");
            daemon.signal(Signal::USR2);
            eventually("the next process serves", || {
                daemon.count("upgraded:") > before
            });
        } else {
            kill_serving(&daemon);
        }
        for (lba, data) in (0..).step_by(16).zip(&written) {
            for nsid in [1, 2] {
                let read = host.read(nsid, lba, data.len());
                assert!(read == *data, "namespace {nsid}, round {round}");
            }
        }
    }
    // The storage has other bytes, and its header is as it was.
    let raw = test_dir.bytes("disk.raw", 0, PAYLOAD + (256 << 10));
    assert!(raw.starts_with(HEADER));
    for data in &written {
        let start = &data[..16];
        assert!(!raw.windows(16).any(|bytes| bytes == start));
    }
    let listed = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["list", "--json", "--control", &control])
        .output()
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let json: Value = serde_json::from_str(&listed).unwrap();
    let disks = json
        .as_array()
        .or_else(|| json["disks"].as_array())
        .unwrap();
    for namespace in disks[0]["namespaces"].as_array().unwrap() {
        assert_eq!(namespace["encrypted"], Value::Bool(true), "{listed}");
    }
    assert!(!listed.contains(PASSPHRASE));
    drop(host);
    let ended = daemon.end();
    assert!(!ended.log.iter().any(|line| line.contains(PASSPHRASE)));
    let described = |line: &String| line.contains("LUKS2, aes-xts-plain64 with 256 bits");
    assert!(ended.log.iter().any(described), "{ended:#?}");
}

#[test]
fn wrong_keys_and_impossible_volumes_are_refused() {
    let test_dir = TestDir::new();
    let (disk, key) = (
        container(&test_dir, "disk.raw"),
        key_file(&test_dir, "wrong"),
    );
    let socket = text(&test_dir.socket());
    let refused = |volume: &str| {
        let args = ["serve", "--socket", &socket, "--keeper", "off", volume];
        let ended = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(args)
            .output()
            .unwrap();
        assert!(!ended.status.success(), "{volume} is served");
        String::from_utf8_lossy(&ended.stderr).into_owned()
    };
    for (volume, why) in [
        (format!("{disk}?luks={key}"), "the key opens no slot"),
        (format!("{disk}?luks={key}.none"), "No such file"),
        (format!("{disk}?luks=cred:disk"), "LoadCredential="),
        (
            format!("{disk}?luks-discard=on"),
            "only together with luks=KEYSOURCE",
        ),
        (format!("mem://1M?luks={key}"), "there is no LUKS header"),
        (
            format!("controller+mem://1M?luks={key}"),
            "luks= is not possible",
        ),
        (
            format!("nvme://0000:ff:1f.7/1?luks={key}"),
            "luks= is not possible",
        ),
    ] {
        let said = refused(&volume);
        assert!(said.contains(why), "{volume}: {said}");
        assert!(!said.contains("wrong\n"), "{said}");
    }
}

/// A check reads no key: it would take it from a pipe.
#[test]
fn check_leaves_the_key_unread() {
    let test_dir = TestDir::new();
    let (disk, key) = (
        container(&test_dir, "disk.raw"),
        key_file(&test_dir, "wrong"),
    );
    let config = test_dir.path("vnvme.toml");
    let check = |volume: &str| {
        let socket = text(&test_dir.socket());
        let table = format!("[[controller]]\nsocket = \"{socket}\"\n[[controller.namespace]]\n");
        fs::write(&config, format!("{table}volume = \"{volume}\"\n")).unwrap();
        let checked = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(["check", &text(&config)])
            .output()
            .unwrap();
        (
            checked.status.success(),
            String::from_utf8_lossy(&checked.stderr).into_owned(),
        )
    };
    let fifo = test_dir.path("pipe");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    for fine in [key.clone(), text(&fifo), "cred:disk".to_owned()] {
        let (is_fine, said) = check(&format!("{disk}?luks={fine}"));
        assert!(is_fine, "{fine}: {said}");
    }
    for (bad, why) in [
        (format!("{disk}?luks={key}.none"), "No such file"),
        (
            format!("{disk}?luks={key}&luks-header=/none"),
            "luks-header=/none",
        ),
        (format!("mem://1M?luks={key}"), "there is no LUKS header"),
    ] {
        let (is_fine, said) = check(&bad);
        assert!(!is_fine && said.contains(why), "{bad}: {said}");
    }
}
