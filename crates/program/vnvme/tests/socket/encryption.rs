//! Encrypted volumes: a key that is read once, and outlives the process that has read it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use crate::common::*;
use crate::failure_domains::NbdServer;
use crate::keeper::{kill_serving, start};
use control::api::DiskKind;
use control::{Client, ClientError};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::Signal;
use serde_json::{Value, json};

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

/// Writes to both ends of a disk with blocks of 4096 bytes, and reads it back.
fn use_disk(host: &mut Host, seed: u64, blocks: u64) -> [Vec<u8>; 2] {
    let written = [0, blocks - 16].map(|lba| {
        let data = pattern(seed + lba, 64 << 10);
        host.write(1, lba, &data);
        data
    });
    host.flush(1);
    check_disk(host, &written, blocks);
    written
}

fn check_disk(host: &mut Host, written: &[Vec<u8>; 2], blocks: u64) {
    for (lba, data) in [0, blocks - 16].into_iter().zip(written) {
        assert!(host.read(1, lba, data.len()) == *data, "block {lba}");
    }
}

fn attach(socket: &std::path::Path) -> Host {
    let mut host = Host::attach(socket);
    host.enable();
    host.create_queues(1, None);
    host.block = 4096;
    host
}

/// Asserts that storage has none of this data.
fn assert_encrypted(storage: &[u8], written: &[Vec<u8>]) {
    for data in written {
        let start = &data[..16];
        assert!(!storage.windows(16).any(|bytes| bytes == start));
    }
}

/// The header is read from the server, and the network has only ciphertext. The server goes away
/// and comes back, and the serving process is killed.
#[test]
fn container_on_nbd_server_is_served() {
    let test_dir = TestDir::new();
    container(&test_dir, "bad.raw");
    let Some(server) = NbdServer::start(&test_dir) else {
        return testkit::skip("vnvme::encryption::nbd", "there is no qemu-nbd");
    };
    let nbd = test_dir.path("nbd");
    let (key, writer) = pipe(&test_dir, "pipe");
    let url = format!(
        "nbd+unix:///?socket={}&luks={}",
        nbd.display(),
        key.display()
    );
    let socket = text(&test_dir.socket());
    let args = ["serve", "--socket", &socket, "--keeper", "process", &url];
    let daemon = start(&test_dir, &args);
    writer.join().unwrap();
    let mut host = attach(&test_dir.socket());
    let blocks = ((16 << 20) - PAYLOAD as u64) / 4096;
    let written = use_disk(&mut host, 1, blocks);
    let storage = fs::read(test_dir.path("bad.raw")).unwrap();
    assert!(storage.starts_with(HEADER));
    assert!(storage[PAYLOAD..][..64 << 10].iter().any(|byte| *byte != 0));
    assert_encrypted(&storage, &written);
    drop(server);
    fs::remove_file(&nbd).unwrap();
    let _server = NbdServer::start(&test_dir).unwrap();
    check_disk(&mut host, &written, blocks);
    kill_serving(&daemon);
    check_disk(&mut host, &written, blocks);
    use_disk(&mut host, 7, blocks);
    drop(host);
    daemon.end();
}

/// Daemon in its sandbox, with a keeper, whose disks are added by the management API.
struct Confined {
    daemon: Daemon,
    client: Client,
    test_dir: TestDir,
}

impl Confined {
    fn start(test_dir: TestDir) -> Self {
        let control = test_dir.path("control");
        let allow = text(test_dir.path("x").parent().unwrap());
        let server = format!("nbd+unix:///?socket={}", test_dir.path("nbd").display());
        let allow = format!("{allow},{server}");
        let (control_text, state) = (text(&control), text(&test_dir.path("state.toml")));
        let args = [
            "daemon",
            "--control",
            &control_text,
            "--allow",
            &allow,
            "--state",
            &state,
            "--keeper",
            "process",
        ];
        let daemon = start(&test_dir, &args);
        let client = Client::new(vec![control]).unwrap();
        Self {
            daemon,
            client,
            test_dir,
        }
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.test_dir.path(&format!("{name}.sock"))
    }

    fn add(&self, name: &str, volume: &str) -> Result<(), ClientError> {
        let table = json!({"socket": text(&self.socket(name)), "namespace": [{"volume": volume}]});
        let Value::Object(table) = table else {
            unreachable!("a table")
        };
        self.client.add(DiskKind::Controller, table).map(drop)
    }
}

/// The passphrase comes through a pipe, and nobody writes it a second time.
#[test]
fn containers_are_added_in_sandbox() {
    let m = Confined::start(TestDir::new());
    let size = 16 << 20;
    let plain = container(&m.test_dir, "disk.raw");
    // The container is behind another mebibyte.
    let sliced = m.test_dir.path("sliced.raw");
    let mut bytes = vec![0; 1 << 20];
    bytes.extend(fs::read(&plain).unwrap());
    fs::write(&sliced, &bytes).unwrap();
    let header = m.test_dir.path("header");
    fs::write(&header, HEADER).unwrap();
    let detached = m.test_dir.disk("detached.raw", size);
    let volumes = [
        ("plain", "disk.raw", plain),
        (
            "sliced",
            "sliced.raw",
            format!("{}?offset=1M", text(&sliced)),
        ),
        (
            "detached",
            "detached.raw",
            format!("{detached}?luks-header={}", text(&header)),
        ),
    ];
    let blocks = (size - PAYLOAD as u64) / 4096;
    let mut served = Vec::new();
    for (name, file, volume) in &volumes {
        let (key, writer) = pipe(&m.test_dir, &format!("{name}.key"));
        let sign = if volume.contains('?') { '&' } else { '?' };
        m.add(name, &format!("{volume}{sign}luks={}", key.display()))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        writer.join().unwrap();
        let mut host = attach(&m.socket(name));
        let written = use_disk(&mut host, served.len() as u64 * 100, blocks);
        let storage = fs::read(m.test_dir.path(file)).unwrap();
        assert_encrypted(&storage, &written);
        served.push((host, written));
    }
    kill_serving(&m.daemon);
    for (host, written) in &mut served {
        check_disk(host, written, blocks);
    }
    drop(served);
    m.daemon.end();
}

#[test]
fn impossible_additions_in_sandbox_name_the_remedy() {
    let test_dir = TestDir::new();
    container(&test_dir, "bad.raw");
    let Some(_server) = NbdServer::start(&test_dir) else {
        return testkit::skip("vnvme::encryption::nbd", "there is no qemu-nbd");
    };
    let m = Confined::start(test_dir);
    let key = key_file(&m.test_dir, PASSPHRASE);
    let nbd = format!("nbd+unix:///?socket={}", m.test_dir.path("nbd").display());
    let disk = container(&m.test_dir, "disk.raw");
    let refused = |volume: &str| {
        let error = m.add("a", volume).expect_err(volume).to_string();
        assert!(!m.socket("a").exists(), "{volume}");
        error
    };
    for (volume, why) in [
        (format!("{nbd}&luks={key}"), "luks-header=PATH"),
        (format!("{disk}?luks=/etc/hostname"), "option allow"),
        (
            format!("{disk}?luks={key}&luks-header=/etc/hostname"),
            "option allow",
        ),
        (format!("{disk}?luks={key}.none"), "No such file"),
        (format!("{disk}?luks=cred:disk"), "LoadCredential="),
    ] {
        let said = refused(&volume);
        assert!(said.contains(why), "{volume}: {said}");
    }
    fs::write(&key, "a wrong one").unwrap();
    let said = refused(&format!("{disk}?luks={key}"));
    assert!(said.contains("the key opens no slot"), "{said}");
    fs::write(&key, PASSPHRASE).unwrap();
    // The header that the server has, in a file here.
    let header = m.test_dir.path("header");
    fs::write(&header, HEADER).unwrap();
    m.add(
        "a",
        &format!("{nbd}&luks={key}&luks-header={}", text(&header)),
    )
    .unwrap();
    let mut host = attach(&m.socket("a"));
    let written = use_disk(&mut host, 3, ((16 << 20) - PAYLOAD as u64) / 4096);
    drop(host);
    let storage = fs::read(m.test_dir.path("bad.raw")).unwrap();
    assert!(storage.starts_with(HEADER));
    assert_encrypted(&storage, &written);
    m.daemon.end();
}
