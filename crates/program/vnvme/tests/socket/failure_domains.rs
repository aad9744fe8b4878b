//! Failure domains: whatever happens to a disk's volume, all other disks of the daemon are served,
//! also by the next process after a kill.

use crate::common::*;
use crate::keeper::{kill_serving, serving, start, start_in};
use control::api::EventKind;
use control::{Client, Received};
use fuse_disk::{Disk, op};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use std::fs::{self, OpenOptions};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};

/// A daemon with a keeper, and with disks from a configuration file.
pub struct Domain {
    pub test_dir: TestDir,
    pub daemon: Daemon,
    pub client: Client,
}

/// Starts a daemon whose processes outlive the one that was started: its stand-by may take its
/// place.
pub fn domain_outliving(test_dir: TestDir, disks: &str) -> Domain {
    let (config, control) = (test_dir.path("vnvme.toml"), test_dir.path("control"));
    fs::write(&config, disks).unwrap();
    let (config, control) = (text(&config), text(&control));
    let args = ["daemon", "--keeper", "process", "--config", &config];
    let args = [&args[..], &["--control", &control]].concat();
    let daemon = Daemon::spawn_outliving(&[KEEPER_AS_CONFIGURED], &args);
    let client = Client::new(vec![test_dir.path("control")]).unwrap();
    eventually("it answers", || client.disks().is_ok());
    Domain {
        test_dir,
        daemon,
        client,
    }
}

/// A controller with these volumes, and more lines of its table.
pub fn controller(test_dir: &TestDir, name: &str, volumes: &[&str], more: &str) -> String {
    let socket = text(&test_dir.path(&format!("{name}.sock")));
    let volumes = volumes
        .iter()
        .map(|url| format!("{{ volume = \"{url}\" }}"));
    let volumes: Vec<String> = volumes.collect();
    format!(
        "[[controller]]\nname = \"{name}\"\nsocket = \"{socket}\"\n{more}\nnamespace = [{}]\n",
        volumes.join(", ")
    )
}

impl Domain {
    pub fn start(test_dir: TestDir, disks: &str) -> Self {
        Self::start_with(test_dir, disks, &[])
    }

    /// Starts a daemon with more options.
    pub fn start_with(test_dir: TestDir, disks: &str, options: &[&str]) -> Self {
        Self::start_in(test_dir, disks, options, &[])
    }

    /// Starts a daemon with more options, and with more variables of its environment.
    pub fn start_in(
        test_dir: TestDir,
        disks: &str,
        options: &[&str],
        variables: &[(&str, &str)],
    ) -> Self {
        let config = test_dir.path("vnvme.toml");
        fs::write(&config, disks).unwrap();
        let (config, control) = (text(&config), text(&test_dir.path("control")));
        let args = ["--config", &config, "--control", &control];
        let args = [&["daemon", "--keeper", "process"], &args[..], options].concat();
        let daemon = start_in(&test_dir, &args, variables);
        let client = Client::new(vec![test_dir.path("control")]).unwrap();
        eventually("it answers", || client.disks().is_ok());
        Self {
            test_dir,
            daemon,
            client,
        }
    }

    /// Waits until a disk is served again.
    pub fn wait_served(&self, name: &str) {
        eventually("it is served again", || self.error(name).is_none());
    }

    pub fn host(&self, name: &str) -> Host {
        Host::up(&self.test_dir.path(&format!("{name}.sock")))
    }

    /// Why a disk is not served, if it is not.
    pub fn error(&self, name: &str) -> Option<String> {
        self.client.disk(name).unwrap().error
    }

    /// Kills the process that serves; the next one has been started when this returns.
    fn kill_without_answer(&self) {
        kill_serving(&self.daemon);
    }

    /// Kills the process that serves; the next one answers when this returns.
    pub fn kill(&self) {
        kill_serving(&self.daemon);
        eventually("the next process answers", || self.client.disks().is_ok());
    }
}

/// Guests write into their disks whatever they like: also that they are images.
#[test]
fn raw_disk_with_image_signature_is_served_after_kill() {
    let test_dir = TestDir::new();
    let files = ["a.raw", "b.raw"].map(|name| test_dir.disk(name, 1 << 20));
    let disks = ["a", "b"].iter().zip(&files);
    let disks: String = disks
        .map(|(name, file)| controller(&test_dir, name, &[file], ""))
        .collect();
    let domain = Domain::start(test_dir, &disks);
    let (mut guest, mut other) = (domain.host("a"), domain.host("b"));
    other.write(1, 0, &pattern(1, 4096));
    for signature in [
        &b"QFI\xfb\x00\x00\x00\x03"[..],
        b"KDMV\x01\x00\x00\x00",
        b"COWD\x01\x00\x00\x00",
        b"vhdxfile",
        b"conectix",
        b"QED\0",
        b"LUKS\xba\xbe\x00\x01",
    ] {
        let mut block = vec![0; 4096];
        block[..signature.len()].copy_from_slice(signature);
        guest.write(1, 0, &block);
        domain.kill();
        assert_eq!((domain.error("a"), domain.error("b")), (None, None));
        assert!(guest.read(1, 0, 4096) == block, "{signature:?}");
        assert!(other.read(1, 0, 4096) == pattern(1, 4096));
    }
    drop((guest, other));
    domain.daemon.end();
}

/// A read of a guest, which may complete late.
pub struct Reading {
    host: Receiver<(Host, Vec<u8>)>,
}

impl Reading {
    pub fn start(mut host: Host, nsid: u32) -> Self {
        let (tell, told) = channel();
        std::thread::spawn(move || {
            let read = host.read(nsid, 0, 4096);
            let _ = tell.send((host, read));
        });
        Self { host: told }
    }

    pub fn waits(&self) -> bool {
        self.host.try_recv().is_err()
    }

    pub fn end(self) -> (Host, Vec<u8>) {
        self.host.recv_timeout(WAIT_TIMEOUT).unwrap()
    }
}

/// A kind of volume that can be broken and mended while a daemon has it.
struct Kind {
    name: &'static str,
    /// The volume's URL, and more lines of its disk's table.
    make: fn(&TestDir) -> Option<String>,
    break_it: fn(&TestDir),
    mend: fn(&TestDir),
    /// Words of the message.
    words: &'static str,
}

pub fn hide(test_dir: &TestDir, name: &str) {
    fs::rename(
        test_dir.path(name),
        test_dir.path(&format!("{name}.hidden")),
    )
    .unwrap();
}

pub fn show(test_dir: &TestDir, name: &str) {
    fs::rename(
        test_dir.path(&format!("{name}.hidden")),
        test_dir.path(name),
    )
    .unwrap();
}

/// Replaces the content of a file, which [`show`] restores.
pub fn replace(test_dir: &TestDir, name: &str, bytes: &[u8]) {
    hide(test_dir, name);
    fs::write(test_dir.path(name), bytes).unwrap();
}

fn raw(test_dir: &TestDir) -> Option<String> {
    Some(test_dir.disk("bad.raw", 4 << 20))
}

pub fn qcow2(test_dir: &TestDir) -> Option<String> {
    let path = text(&test_dir.path("bad.qcow2"));
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", &path, "4M"])
        .status();
    if made.is_ok_and(|status| status.success()) {
        Some(format!("qcow2://{path}"))
    } else {
        None
    }
}

/// Sets or clears the corrupt bit of a qcow2 image.
pub fn set_corrupt(test_dir: &TestDir, is_corrupt: bool) {
    let image = OpenOptions::new()
        .read(true)
        .write(true)
        .open(test_dir.path("bad.qcow2"))
        .unwrap();
    let mut byte = [0];
    image.read_exact_at(&mut byte, 79).unwrap();
    byte[0] = byte[0] & !2 | u8::from(is_corrupt) << 1;
    image.write_all_at(&byte, 79).unwrap();
}

const KINDS: [Kind; 5] = [
    Kind {
        name: "a file that is missing",
        make: raw,
        break_it: |test_dir| hide(test_dir, "bad.raw"),
        mend: |test_dir| show(test_dir, "bad.raw"),
        words: "bad.raw: no such file",
    },
    Kind {
        name: "a file that was cut",
        make: raw,
        break_it: |test_dir| replace(test_dir, "bad.raw", &[7; 1000]),
        mend: |test_dir| show(test_dir, "bad.raw"),
        words: "bad.raw: ",
    },
    Kind {
        name: "a file that is empty",
        make: raw,
        break_it: |test_dir| replace(test_dir, "bad.raw", &[]),
        mend: |test_dir| show(test_dir, "bad.raw"),
        words: "bad.raw: ",
    },
    Kind {
        name: "an image that is corrupt",
        make: qcow2,
        break_it: |test_dir| set_corrupt(test_dir, true),
        mend: |test_dir| set_corrupt(test_dir, false),
        words: "corrupt",
    },
    Kind {
        name: "an image that is missing",
        make: qcow2,
        break_it: |test_dir| hide(test_dir, "bad.qcow2"),
        mend: |test_dir| show(test_dir, "bad.qcow2"),
        words: "bad.qcow2: ",
    },
];

/// A disk waits for its volume if that cannot be opened after a crash; all other disks are served
/// at once.
#[test]
fn unopenable_disk_after_kill_waits_without_affecting_others() {
    for kind in KINDS {
        let test_dir = TestDir::new();
        let Some(volume) = (kind.make)(&test_dir) else {
            testkit::skip(
                "vnvme::failure_domains",
                format_args!("{}: no tool", kind.name),
            );
            continue;
        };
        let good = test_dir.disk("good.raw", 1 << 20);
        let disks = controller(&test_dir, "bad", &["mem://1M", &volume], "")
            + &controller(&test_dir, "good", &[&good], "");
        let domain = Domain::start(test_dir, &disks);
        let (mut bad, mut good) = (domain.host("bad"), domain.host("good"));
        bad.write(1, 0, &pattern(3, 4096));
        bad.write(2, 0, &pattern(2, 4096));
        bad.flush(2);
        good.write(1, 0, &pattern(1, 4096));
        (kind.break_it)(&domain.test_dir);
        domain.kill();
        let reading = Reading::start(bad, 2);
        // The second process finds the state that the first one has not touched.
        for _ in 0..2 {
            assert!(good.read(1, 0, 4096) == pattern(1, 4096), "{}", kind.name);
            let why = domain.error("bad").unwrap_or_default();
            assert!(why.contains(kind.words), "{}: {why}", kind.name);
            assert!(!why.contains("what was configured"), "{why}");
            assert_eq!(domain.error("good"), None);
            domain.kill();
        }
        let unserved = domain.client.stats().unwrap().measured.unserved;
        assert_eq!(unserved, ["bad"]);
        let mut message = String::new();
        let each = |received| match received {
            Received::Event(event) if event.kind == EventKind::Error && event.disk == "bad" => {
                message = event.message.unwrap_or_default();
                ControlFlow::Break(())
            }
            _ => ControlFlow::Continue(()),
        };
        domain.client.events(|| (), each).unwrap();
        assert!(message.contains("unavailable: "), "{message}");
        assert!(reading.waits());
        assert!(good.read(1, 0, 4096) == pattern(1, 4096));
        (kind.mend)(&domain.test_dir);
        let (mut bad, read) = reading.end();
        assert!(read == pattern(2, 4096), "{}", kind.name);
        assert!(bad.read(1, 0, 4096) == pattern(3, 4096), "its memory");
        domain.wait_served("bad");
        eventually("it is not counted any more", || {
            let stats = domain.client.stats().unwrap();
            stats.measured.unserved.is_empty()
        });
        // The disk survives the next process, too.
        domain.kill();
        assert!(bad.read(2, 0, 4096) == pattern(2, 4096));
        drop((bad, good));
        domain.daemon.end();
    }
}

/// Runs a command of the program against a daemon: its exit code, and all its output.
pub fn command(domain: &Domain, words: &[&str]) -> (Option<i32>, String) {
    let control = text(&domain.test_dir.path("control"));
    let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(words)
        .args(["--control", &control])
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    (output.status.code(), said)
}

/// At its first start a daemon serves the disks that it can open, and the rest as soon as it can.
#[test]
fn daemon_starts_without_missing_volume_and_serves_later() {
    let test_dir = TestDir::new();
    let good = test_dir.disk("good.raw", 1 << 20);
    let bad = text(&test_dir.path("bad.raw"));
    let export = text(&test_dir.path("export.sock"));
    let disks = controller(&test_dir, "bad", &[&bad], "")
        + &controller(&test_dir, "good", &[&good], "")
        + &format!("[[vhost-user-blk]]\nsocket = \"{export}\"\nvolume = \"{bad}.2\"\n");
    let domain = Domain::start(test_dir, &disks);
    let mut good = domain.host("good");
    good.write(1, 0, &pattern(1, 4096));
    for name in ["bad", "export"] {
        let why = domain.error(name).unwrap_or_default();
        assert!(why.contains("no such file"), "{name}: {why}");
    }
    let (code, list) = command(&domain, &["list"]);
    assert_eq!(code, Some(0));
    assert!(list.contains("bad is not served: "), "{list}");
    let metrics = domain.client.metrics().unwrap();
    let unserved = "vnvme_disk_unserved{disk=\"bad\"} 1";
    assert!(metrics.contains(unserved), "{metrics}");
    // An image is detected when the file appears, since no process has opened it as a raw disk.
    fs::write(&bad, b"QFI\xfb\0\0\0\x03").unwrap();
    eventually("it is found to be an image", || {
        domain
            .error("bad")
            .unwrap_or_default()
            .contains("qcow2 image")
    });
    domain.kill();
    let why = domain.error("bad").unwrap_or_default();
    assert!(why.contains("qcow2 image"), "{why}");
    domain.test_dir.disk("bad.raw", 1 << 20);
    domain.test_dir.disk("bad.raw.2", 1 << 20);
    // A client that connects meanwhile waits.
    let mut bad = domain.host("bad");
    bad.write(1, 0, &pattern(2, 4096));
    domain.wait_served("export");
    domain.kill();
    assert!(bad.read(1, 0, 4096) == pattern(2, 4096));
    assert!(good.read(1, 0, 4096) == pattern(1, 4096));
    drop((bad, good));
    domain.daemon.end();
    assert!(!fs::exists(export).unwrap());
}

/// `vnvme serve` is typed by hand: it refuses at its first start, but not when it continues.
#[test]
fn serve_with_missing_volume_refuses_first_start_and_survives_kill() {
    let test_dir = TestDir::new();
    let (good, bad) = (
        test_dir.disk("good.raw", 1 << 20),
        test_dir.disk("bad.raw", 1 << 20),
    );
    let disks =
        controller(&test_dir, "bad", &[&bad], "") + &controller(&test_dir, "good", &[&good], "");
    let config = test_dir.path("vnvme.toml");
    fs::write(&config, disks).unwrap();
    let config = text(&config);
    let args = ["serve", "--config", &config, "--keeper", "process"];
    hide(&test_dir, "bad.raw");
    let ended = Daemon::spawn(&args).wait();
    assert_eq!(ended.status.code(), Some(1), "{ended:#?}");
    let said = ended
        .log
        .iter()
        .any(|line| line.contains("bad.raw: no such file"));
    assert!(said, "{ended:#?}");
    show(&test_dir, "bad.raw");
    let daemon = start(&test_dir, &args);
    let [mut bad, mut good] = ["bad", "good"].map(|name| {
        let mut host = Host::up(&test_dir.path(&format!("{name}.sock")));
        host.write(1, 0, &pattern(1, 4096));
        host
    });
    hide(&test_dir, "bad.raw");
    kill_serving(&daemon);
    assert!(good.read(1, 0, 4096) == pattern(1, 4096));
    let reading = Reading::start(bad, 1);
    daemon.wait_log(|line| line.contains("the disk is unavailable") && line.contains("bad"));
    assert!(reading.waits());
    show(&test_dir, "bad.raw");
    let read;
    (bad, read) = reading.end();
    assert!(read == pattern(1, 4096));
    drop((bad, good));
    daemon.end();
}

/// The memory of rings is limited for all processes of a user, and that of an ended process is
/// released late.
#[test]
fn clients_stay_attached_while_new_process_waits_for_memory_of_its_ring() {
    let test_dir = TestDir::new();
    let files = ["a", "b"].map(|name| test_dir.disk(&format!("{name}.raw"), 1 << 20));
    let disks: String = ["a", "b"]
        .iter()
        .zip(&files)
        .map(|(name, file)| controller(&test_dir, name, &[file], ""))
        .collect();
    let domain = Domain::start(test_dir, &disks);
    let mut guests = ["a", "b"].map(|name| domain.host(name));
    for (guest, seed) in guests.iter_mut().zip(1..) {
        guest.write(1, 0, &pattern(seed, 4096));
    }
    let keeper = Pid::from_raw(domain.daemon.pid().try_into().unwrap()).unwrap();
    let before = getrlimit(Resource::Memlock);
    let limit = |process, limit| prlimit(Some(process), Resource::Memlock, limit).map(drop);
    let none = Rlimit {
        current: Some(0),
        ..before
    };
    limit(keeper, none).unwrap();
    domain.kill_without_answer();
    let waits = |line: &str| line.contains("waiting for an io_uring") || line.contains("goes on");
    domain.daemon.wait_log(waits);
    if domain.daemon.count("waiting for an io_uring") == 0 {
        testkit::skip(
            "vnvme::failure_domains: memory of rings",
            "this kernel does not count it as locked memory",
        );
    }
    limit(keeper, before).unwrap();
    // The next process has the keeper's limit.
    domain.kill_without_answer();
    for (guest, seed) in guests.iter_mut().zip(1..) {
        assert!(guest.read(1, 0, 4096) == pattern(seed, 4096));
    }
    assert_eq!(domain.daemon.count("client is disconnected"), 0);
    drop(guests);
    domain.daemon.end();
}

/// An upgrade has every disk that the old process serves served by the new one, or does not happen.
#[test]
fn upgrade_with_unopenable_disk_is_rolled_back() {
    let test_dir = TestDir::new();
    let (good, bad) = (
        test_dir.disk("good.raw", 1 << 20),
        test_dir.disk("bad.raw", 1 << 20),
    );
    let disks =
        controller(&test_dir, "bad", &[&bad], "") + &controller(&test_dir, "good", &[&good], "");
    let domain = Domain::start(test_dir, &disks);
    let (mut bad, mut good) = (domain.host("bad"), domain.host("good"));
    bad.write(1, 0, &pattern(2, 4096));
    good.write(1, 0, &pattern(1, 4096));
    hide(&domain.test_dir, "bad.raw");
    let (code, said) = command(&domain, &["upgrade"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("back to the program before"), "{said}");
    assert!(said.contains("disk bad cannot be served"), "{said}");
    assert!(said.contains("bad.raw: no such file"), "{said}");
    assert!(good.read(1, 0, 4096) == pattern(1, 4096));
    let why = domain.error("bad").unwrap_or_default();
    assert!(why.contains("no such file"), "{why}");
    // A disk that is unavailable already does not matter for the upgrade.
    let (code, said) = command(&domain, &["upgrade"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(good.read(1, 0, 4096) == pattern(1, 4096));
    assert!(domain.error("bad").is_some());
    show(&domain.test_dir, "bad.raw");
    assert!(bad.read(1, 0, 4096) == pattern(2, 4096));
    // Since the disk is served again, it does matter.
    let is_again = |line: &str| line.contains("is served again") && line.contains("bad");
    domain.daemon.wait_log(is_again);
    hide(&domain.test_dir, "bad.raw");
    let (code, said) = command(&domain, &["upgrade"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("disk bad cannot be served"), "{said}");
    show(&domain.test_dir, "bad.raw");
    domain.wait_served("bad");
    let (code, said) = command(&domain, &["upgrade"]);
    assert_eq!(code, Some(0), "{said}");
    for (host, seed) in [(&mut bad, 2), (&mut good, 1)] {
        assert!(host.read(1, 0, 4096) == pattern(seed, 4096));
    }
    drop((bad, good));
    domain.daemon.end();
}

/// An unavailable disk can be removed or reconfigured: its client is disconnected by the removal,
/// and stays with the reconfiguration.
#[test]
fn unavailable_disk_can_be_removed_and_reconfigured() {
    let test_dir = TestDir::new();
    let files = ["a", "b", "c"].map(|name| test_dir.disk(&format!("{name}.raw"), 1 << 20));
    let describe =
        |test_dir: &TestDir, name: &str, file: &str| controller(test_dir, name, &[file], "");
    let disks: String = ["a", "b", "c"]
        .iter()
        .zip(&files)
        .map(|(name, file)| describe(&test_dir, name, file))
        .collect();
    let domain = Domain::start(test_dir, &disks);
    let [a, b, mut c] = ["a", "b", "c"].map(|name| {
        let mut host = domain.host(name);
        host.write(1, 0, &pattern(1, 4096));
        host
    });
    hide(&domain.test_dir, "a.raw");
    hide(&domain.test_dir, "b.raw");
    domain.kill();
    drop(a);
    domain.client.remove("a", false).unwrap();
    assert!(!domain.test_dir.path("a.sock").exists());
    // A configuration with the same change is applied.
    let reload = || {
        let plan = domain.client.reload().unwrap();
        assert!(plan.refused.is_empty(), "{plan:?}");
        plan
    };
    let rest =
        describe(&domain.test_dir, "b", &files[1]) + &describe(&domain.test_dir, "c", &files[2]);
    fs::write(domain.test_dir.path("vnvme.toml"), rest).unwrap();
    assert_eq!(reload().unchanged, ["b", "c"]);
    assert!(c.read(1, 0, 4096) == pattern(1, 4096));
    let names = domain.client.disks().unwrap().into_iter();
    let names: Vec<String> = names.map(|disk| disk.name).collect();
    assert_eq!(names, ["b", "c"]);
    drop(b);
    let rest = describe(&domain.test_dir, "c", &files[2]);
    fs::write(domain.test_dir.path("vnvme.toml"), rest).unwrap();
    assert_eq!(reload().removed, ["b"]);
    assert!(!domain.test_dir.path("b.sock").exists());
    drop(c);
    domain.daemon.end();
}

/// An unavailable disk leaves nothing behind when a daemon ends in order.
#[test]
fn end_with_unavailable_disk_leaves_no_socket() {
    let test_dir = TestDir::new();
    let bad = test_dir.disk("bad.raw", 1 << 20);
    let never = text(&test_dir.path("never.raw"));
    let export = text(&test_dir.path("export.sock"));
    let disks = controller(&test_dir, "bad", &[&bad], "")
        + &controller(&test_dir, "never", &[&never], "")
        + &format!("[[vhost-user-blk]]\nsocket = \"{export}\"\nvolume = \"{bad}?read-only=on\"\n");
    let disks = disks.replace(
        &format!("volume = \"{bad}\""),
        &format!("volume = \"{bad}?read-only=on\""),
    );
    let domain = Domain::start(test_dir, &disks);
    let host = domain.host("bad");
    hide(&domain.test_dir, "bad.raw");
    domain.kill();
    for name in ["bad", "never", "export"] {
        assert!(domain.error(name).is_some());
        assert!(domain.test_dir.path(&format!("{name}.sock")).exists());
    }
    drop(host);
    let Domain {
        test_dir, daemon, ..
    } = domain;
    daemon.end();
    for name in ["bad", "never", "export"] {
        assert!(!test_dir.path(&format!("{name}.sock")).exists(), "{name}");
    }
}

/// An NBD server, which ends with this.
pub struct NbdServer(Child);

impl NbdServer {
    pub fn start(test_dir: &TestDir) -> Option<Self> {
        let (socket, file) = (text(&test_dir.path("nbd")), text(&test_dir.path("bad.raw")));
        let args = ["--persistent", "--format=raw", "--shared=8", "--socket"];
        let child = Command::new("qemu-nbd")
            .args(args)
            .args([&socket, &file])
            .spawn()
            .ok()?;
        eventually("the server listens", || fs::exists(&socket).unwrap());
        Some(Self(child))
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn disk_of_lost_nbd_server_waits_for_server() {
    let test_dir = TestDir::new();
    test_dir.disk("bad.raw", 4 << 20);
    let Some(server) = NbdServer::start(&test_dir) else {
        return testkit::skip("vnvme::failure_domains::nbd", "there is no qemu-nbd");
    };
    let url = format!("nbd+unix:///?socket={}", text(&test_dir.path("nbd")));
    let good = test_dir.disk("good.raw", 1 << 20);
    let disks =
        controller(&test_dir, "bad", &[&url], "") + &controller(&test_dir, "good", &[&good], "");
    let domain = Domain::start(test_dir, &disks);
    let (mut bad, mut good) = (domain.host("bad"), domain.host("good"));
    bad.write(1, 0, &pattern(2, 4096));
    bad.flush(1);
    good.write(1, 0, &pattern(1, 4096));
    drop(server);
    fs::remove_file(domain.test_dir.path("nbd")).unwrap();
    domain.kill();
    assert!(good.read(1, 0, 4096) == pattern(1, 4096));
    assert!(domain.error("bad").is_some());
    let reading = Reading::start(bad, 1);
    let server = NbdServer::start(&domain.test_dir);
    let (bad, read) = reading.end();
    assert!(read == pattern(2, 4096));
    drop((bad, good));
    domain.daemon.end();
    drop(server);
}

/// However many processes die before they serve: the keeper starts the next one.
#[test]
fn disks_survive_repeated_deaths_at_start() {
    let test_dir = TestDir::new();
    let files = ["a.raw", "b.raw"].map(|name| test_dir.disk(name, 1 << 20));
    let disks = ["a", "b"].iter().zip(&files);
    let disks: String = disks
        .map(|(name, file)| controller(&test_dir, name, &[file], ""))
        .collect();
    let domain = Domain::start(test_dir, &disks);
    let mut hosts = ["a", "b"].map(|name| domain.host(name));
    for host in &mut hosts {
        host.write(1, 0, &pattern(1, 4096));
    }
    // The first process served; none of the later ones does.
    let mut last = None;
    for _ in 0..11 {
        eventually("the next process has been started", || {
            serving(domain.daemon.pid()).is_some_and(|pid| Some(pid) != last)
        });
        last = serving(domain.daemon.pid());
        kill_process(last.unwrap(), Signal::KILL).unwrap();
    }
    for host in &mut hosts {
        assert!(host.read(1, 0, 4096) == pattern(1, 4096));
    }
    domain.wait_served("a");
    domain.wait_served("b");
    assert!(domain.daemon.count("the next one is started in") > 0);
    drop(hosts);
    domain.daemon.end();
}

/// A process dies again and again while it recovers a disk: the next one leaves that disk out, and
/// tries it later.
#[test]
fn disk_killing_process_is_left_out_and_retried() {
    let test_dir = TestDir::new();
    test_dir.disk("bad.raw", 4 << 20);
    let Some(server) = NbdServer::start(&test_dir) else {
        return testkit::skip("vnvme::failure_domains::dies", "there is no qemu-nbd");
    };
    let url = format!("nbd+unix:///?socket={}", text(&test_dir.path("nbd")));
    let good = test_dir.disk("good.raw", 1 << 20);
    let disks =
        controller(&test_dir, "bad", &[&url], "") + &controller(&test_dir, "good", &[&good], "");
    let domain = Domain::start(test_dir, &disks);
    let (mut bad, mut good) = (domain.host("bad"), domain.host("good"));
    bad.write(1, 0, &pattern(2, 4096));
    bad.flush(1);
    good.write(1, 0, &pattern(1, 4096));
    drop(server);
    fs::remove_file(domain.test_dir.path("nbd")).unwrap();
    // A server that accepts connections, and sends nothing: opening the disk waits.
    let silent = UnixListener::bind(domain.test_dir.path("nbd")).unwrap();
    let mut connections = Vec::new();
    domain.kill_without_answer();
    for _ in 0..2 {
        connections.push(silent.accept().unwrap());
        domain.kill_without_answer();
    }
    assert!(good.read(1, 0, 4096) == pattern(1, 4096));
    let why = domain.error("bad").unwrap_or_default();
    assert!(
        why.contains("have died while they recovered this disk"),
        "{why}"
    );
    assert_eq!(domain.error("good"), None);
    drop((silent, connections));
    fs::remove_file(domain.test_dir.path("nbd")).unwrap();
    let server = NbdServer::start(&domain.test_dir);
    assert!(bad.read(1, 0, 4096) == pattern(2, 4096));
    domain.wait_served("bad");
    // A successful recovery resets the count of deaths.
    domain.kill();
    assert_eq!(domain.error("bad"), None);
    drop((bad, good));
    domain.daemon.end();
    drop(server);
}

/// Whatever an operator has changed: the next process accepts it, also one of another version.
#[test]
fn disks_and_guests_survive_every_operation() {
    let test_dir = TestDir::new();
    let files = ["a", "b", "c", "d"].map(|name| test_dir.disk(&format!("{name}.raw"), 1 << 20));
    let [a, b, c, d] = &files;
    let disks = controller(&test_dir, "a", &[a], "") + &controller(&test_dir, "b", &[b], "");
    let allow = text(test_dir.path("x").parent().unwrap());
    let domain = Domain::start(
        test_dir,
        &format!("[process]\nallow = [\"{allow}\"]\n{disks}"),
    );
    let (mut guest, mut other) = (domain.host("a"), domain.host("b"));
    guest.write(1, 0, &pattern(1, 4096));
    other.write(1, 0, &pattern(2, 4096));
    let socket = format!("socket={}", text(&domain.test_dir.path("c.sock")));
    let limited = format!("{c}?iops=200000");
    let state = text(&domain.test_dir.path("saved.toml"));
    for (words, nsid, size) in [
        (&["attach", "a", &limited][..], 2, 1 << 20),
        (&["resize", "a", "2M", "--nsid", "2"], 2, 2 << 20),
        (
            &["limits", "a", "--nsid", "2", "--iops", "100000"],
            2,
            2 << 20,
        ),
        (&["on-error", "a", "--on-read-error", "stop"], 2, 2 << 20),
        (&["detach", "a", "2"], 1, 1 << 20),
        (&["resize", "a", "2M"], 1, 2 << 20),
        (&["add", "controller", &socket, d], 1, 2 << 20),
        (&["remove", "c"], 1, 2 << 20),
        (&["detach", "a", "1"], 0, 0),
        (&["attach", "a", a], 1, 2 << 20),
        (&["reload"], 1, 2 << 20),
    ] {
        let (code, said) = command(&domain, words);
        assert_eq!(code, Some(0), "{words:?}: {said}");
        for round in 0..2 {
            match round {
                0 => domain.kill(),
                _ => {
                    let (code, said) = command(&domain, &["upgrade"]);
                    assert_eq!(code, Some(0), "{words:?}: {said}");
                }
            }
            let disks = domain.client.disks().unwrap();
            let errors = disks.into_iter().filter_map(|disk| disk.error);
            assert_eq!(errors.collect::<Vec<_>>(), [""; 0], "{words:?}");
            assert!(other.read(1, 0, 4096) == pattern(2, 4096), "{words:?}");
            if nsid > 0 {
                let blocks = guest.identify_namespace(nsid).unwrap().nsze.get();
                assert_eq!(blocks, size / 512, "{words:?}");
                assert!(guest.read(1, 0, 4096) == pattern(1, 4096), "{words:?}");
            }
        }
        let (code, saved) = command(&domain, &["save"]);
        assert_eq!(code, Some(0), "{words:?}: {saved}");
        fs::write(&state, saved).unwrap();
        let check = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(["check", &state])
            .output();
        let check = check.unwrap();
        assert!(check.status.success(), "{words:?}: {check:?}");
    }
    drop((guest, other));
    domain.daemon.end();
}

/// Files beside volumes: those of each disk, by the names of the disk and the file.
pub const BESIDE: [(&str, &str, &str); 7] = [
    ("zones", "zones.table", "zone-size = \"64K\", zone-table"),
    ("metadata", "metadata.table", "metadata-size = 8, metadata"),
    ("format", "format.file", "format-file"),
    ("fdp", "fdp.table", "fdp-handles = 4, fdp-table"),
    ("atomic", "atomic.journal", "?atomic=16K&atomic-journal="),
    ("boot", "boot.bin", "boot-partition"),
    ("pool", "pool", "pool"),
];

/// Disks that each have a file beside their volume, and one that has none.
pub fn with_files(test_dir: &TestDir) -> String {
    let good = test_dir.disk("good.raw", 1 << 20);
    fs::write(test_dir.path("boot.bin"), pattern(7, 10_000)).unwrap();
    fs::create_dir(test_dir.path("pool")).unwrap();
    let mut disks = controller(test_dir, "good", &[&good], "");
    for (name, file, key) in BESIDE {
        let (volume, file) = (
            test_dir.disk(&format!("{name}.raw"), 4 << 20),
            text(&test_dir.path(file)),
        );
        let of_namespace = format!("{{ volume = \"{volume}\", {key} = \"{file}\" }}");
        let (more, namespace) = match name {
            "atomic" => (
                String::new(),
                format!("{{ volume = \"{volume}{key}{file}\" }}"),
            ),
            "boot" => (
                format!("{key} = \"{file}\"\n"),
                format!("{{ volume = \"{volume}\" }}"),
            ),
            "pool" => (
                format!("{key} = \"{file}\"\npool-capacity = \"1M\"\n"),
                format!("{{ volume = \"{volume}\" }}"),
            ),
            _ => (String::new(), of_namespace),
        };
        let socket = text(&test_dir.path(&format!("{name}.sock")));
        disks += &format!(
            "[[controller]]\nname = \"{name}\"\nsocket = \"{socket}\"\n{more}\
             namespace = [{namespace}]\n"
        );
    }
    disks
}

/// A file beside a volume that is missing, empty or damaged makes its own disk unavailable, and is
/// not made anew; no other disk notices.
#[test]
fn damaged_file_beside_volume_makes_own_disk_unavailable() {
    let test_dir = TestDir::new();
    let disks = with_files(&test_dir);
    let domain = Domain::start(test_dir, &disks);
    let mut good = domain.host("good");
    good.write(1, 0, &pattern(1, 4096));
    for damage in ["missing", "empty", "damaged"] {
        // Bytes of a Boot Partition are never wrong, and a pool is a folder.
        let meant = BESIDE.iter().filter(|(name, ..)| match damage {
            "missing" => true,
            "empty" => *name != "pool",
            _ => !["pool", "boot"].contains(name),
        });
        let meant: Vec<_> = meant.collect();
        for (name, file, _) in &meant {
            assert_eq!(domain.error(name), None, "{damage}");
            match damage {
                "missing" => hide(&domain.test_dir, file),
                "empty" => replace(&domain.test_dir, file, &[]),
                _ => replace(&domain.test_dir, file, &[0xa5; 1 << 16]),
            }
        }
        domain.kill();
        assert!(good.read(1, 0, 4096) == pattern(1, 4096), "{damage}");
        assert_eq!(domain.error("good"), None, "{damage}");
        for (name, file, _) in &meant {
            let why = domain.error(name).unwrap_or_default();
            assert!(why.contains(file), "{name}, {damage}: {why}");
        }
        let unserved = domain.client.stats().unwrap().measured.unserved;
        assert_eq!(unserved.len(), meant.len(), "{damage}: {unserved:?}");
        for (_, file, _) in &meant {
            show(&domain.test_dir, file);
        }
        for (name, ..) in &meant {
            domain.wait_served(name);
        }
    }
    drop(good);
    domain.daemon.end();
}

/// A volume that has tables for each of its blocks keeps its size: by the API, and where somebody
/// cuts its file all the same.
#[test]
fn volume_with_zones_or_metadata_is_not_resized_and_cut_file_is_unavailable() {
    let test_dir = TestDir::new();
    let disks = with_files(&test_dir);
    let domain = Domain::start(test_dir, &disks);
    let mut good = domain.host("good");
    good.write(1, 0, &pattern(1, 4096));
    for name in ["zones", "metadata"] {
        let (code, said) = command(&domain, &["resize", name, "8M"]);
        assert_eq!(code, Some(1), "{name}: {said}");
        let words = format!("namespace 1 of \"{name}\" has {name}");
        assert!(said.contains(&words), "{said}");
        let file = domain.test_dir.path(&format!("{name}.raw"));
        let file = OpenOptions::new().write(true).open(file).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 4 << 20);
        file.set_len(8 << 20).unwrap();
        domain.kill();
        assert!(good.read(1, 0, 4096) == pattern(1, 4096));
        let why = domain.error(name).unwrap_or_default();
        assert!(why.contains(&format!("{name}.table")), "{name}: {why}");
        file.set_len(4 << 20).unwrap();
        domain.wait_served(name);
    }
    drop(good);
    domain.daemon.end();
}

/// Returns a daemon of two disks: "bad" on a FUSE file system, "good" on a file. `None` where FUSE
/// cannot be mounted. The file system answers nothing at the start if `is_silent`.
fn beside_fuse(test: &str, is_silent: bool) -> Option<(Disk, Domain)> {
    let test_dir = TestDir::new();
    let fuse = breaking(&format!("failure_domains::{test}"), &test_dir, 1 << 20)?;
    if is_silent {
        fuse.silence(None);
    }
    let good = test_dir.disk("good.raw", 1 << 20);
    let disks = controller(&test_dir, "bad", &[&text(&fuse.path())], "")
        + &controller(&test_dir, "good", &[&good], "");
    let domain = Domain::start(test_dir, &disks);
    Some((fuse, domain))
}

/// A file system that does not answer while the next process looks for a file, asks for its
/// attributes, or opens it. It has not answered for a while when the process before is killed.
#[test]
fn disk_whose_file_system_hangs_after_kill_waits_without_holding_up_others() {
    let test = "disk_whose_file_system_hangs_after_kill_waits_without_holding_up_others";
    for request in [op::LOOKUP, op::GETATTR, op::OPEN] {
        let Some((fuse, domain)) = beside_fuse(test, false) else {
            return;
        };
        let (mut bad, mut good) = (domain.host("bad"), domain.host("good"));
        good.write(1, 0, &pattern(1, 4096));
        bad.write(1, 0, &pattern(2, 4096));
        bad.flush(1);
        fuse.silence(Some(request));
        // All sizes are asked for, and then those that are asked for after them.
        for size in [2 << 20, 3 << 20] {
            let file = domain.test_dir.path("good.raw");
            let file = OpenOptions::new().write(true).open(file).unwrap();
            file.set_len(size).unwrap();
            eventually("the size is seen", || {
                domain.client.disk("good").unwrap().namespaces[0].bytes == size
            });
        }
        domain.kill();
        assert!(good.read(1, 0, 4096) == pattern(1, 4096), "{request}");
        let why = domain.error("bad").unwrap_or_default();
        assert!(why.contains("has been opening for"), "{request}: {why}");
        let (code, said) = command(&domain, &["list"]);
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains("has been opening for"), "{said}");
        // No process waits for the file system: the next one is there at once.
        assert!(fuse.wait_held(2, WAIT_TIMEOUT), "{request}");
        domain.kill();
        assert!(good.read(1, 0, 4096) == pattern(1, 4096), "{request}");
        for words in [&["upgrade"][..], &["reload"]] {
            let (code, said) = command(&domain, words);
            assert_eq!(code, Some(0), "{request}, {words:?}: {said}");
            assert!(good.read(1, 0, 4096) == pattern(1, 4096), "{request}");
        }
        let reading = Reading::start(bad, 1);
        fuse.release();
        let (bad, read) = reading.end();
        assert!(read == pattern(2, 4096), "{request}");
        domain.wait_served("bad");
        domain.kill();
        assert!(good.read(1, 0, 4096) == pattern(1, 4096), "{request}");
        assert_eq!(domain.error("bad"), None, "{request}");
        drop((bad, good));
        domain.daemon.end();
        drop(fuse);
    }
}

/// A file system that answers nothing when the daemon starts.
#[test]
fn daemon_starts_beside_hanging_file_system_and_removes_its_disk() {
    let test = "daemon_starts_beside_hanging_file_system_and_removes_its_disk";
    for is_removed in [true, false] {
        let Some((fuse, domain)) = beside_fuse(test, true) else {
            return;
        };
        let mut good = domain.host("good");
        good.write(1, 0, &pattern(1, 4096));
        let why = domain.error("bad").unwrap_or_default();
        assert!(why.contains("has been opening for"), "{why}");
        domain.kill();
        assert!(good.read(1, 0, 4096) == pattern(1, 4096));
        if is_removed {
            let (code, said) = command(&domain, &["remove", "bad"]);
            assert_eq!(code, Some(0), "{said}");
            assert!(domain.client.disk("bad").is_err());
        }
        drop(good);
        domain.daemon.end();
        drop(fuse);
    }
}

/// The process dies after it has recorded that a namespace is attached or detached, and before its
/// controller is told. The next process completes the change, and the client stays.
#[test]
fn client_stays_when_process_dies_while_namespace_is_attached_or_detached() {
    for point in ["detach", "attach"] {
        let test_dir = TestDir::new();
        let files = ["a.raw", "b.raw", "c.raw"].map(|name| test_dir.disk(name, 1 << 20));
        let path = test_dir.path("crash");
        fs::write(&path, format!("vnvme.{point}.recorded:1\n")).unwrap();
        let disks = controller(&test_dir, "a", &[&files[0], &files[1]], "");
        let variables = [("VNVME_CRASH", &*text(&path))];
        let folder = text(&test_dir.path(""));
        let domain = Domain::start_in(test_dir, &disks, &["--allow", &folder], &variables);
        let mut guest = domain.host("a");
        guest.write(1, 0, &pattern(1, 4096));
        guest.write(2, 0, &pattern(2, 4096));
        let changed = match point {
            "detach" => domain.client.detach("a", 2),
            _ => {
                let table = serde_json::json!({ "volume": files[2] });
                let table = table.as_object().unwrap();
                domain.client.attach("a", table).map(drop)
            }
        };
        assert!(changed.is_err(), "{point}: the process was to die");
        domain
            .daemon
            .wait_log(|line| line.contains("this one goes on"));
        assert!(guest.read(1, 0, 4096) == pattern(1, 4096), "{point}");
        let (second, third) = (guest.identify_namespace(2), guest.identify_namespace(3));
        let third = third.unwrap().nsze.get();
        match point {
            "detach" => assert_eq!((second.unwrap().nsze.get(), third), (0, 0)),
            _ => {
                assert!(guest.read(2, 0, 4096) == pattern(2, 4096));
                assert_eq!(third, 2048);
            }
        }
        // The namespace can be attached again, and another kill changes nothing.
        eventually("it answers", || domain.client.disks().is_ok());
        if point == "detach" {
            let table = serde_json::json!({ "volume": files[1], "nsid": 2 });
            let table = table.as_object().unwrap();
            domain.client.attach("a", table).unwrap();
        }
        domain.kill();
        assert!(guest.read(2, 0, 4096) == pattern(2, 4096), "{point}");
        let told = domain.daemon.count("client is disconnected");
        assert_eq!(told, 0, "{point}");
        drop(guest);
        domain.daemon.end();
    }
}
