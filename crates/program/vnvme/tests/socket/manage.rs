//! Disks and namespaces that come and go by the control socket of `vnvme daemon`.

use crate::common::*;
use control::api::DiskKind;
use control::{Client, ClientError};
use nvme::{AdminOpcode, Command, Status};
use rustix::process::Signal;
use serde_json::{Map, Value, json};
use std::fs;
use std::sync::Barrier;

struct Managed {
    test_dir: TestDir,
    daemon: Daemon,
    client: Client,
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => panic!("{other} is no object"),
    }
}

impl Managed {
    fn start(more: &[&str]) -> Self {
        Self::start_at(TestDir::new(), more)
    }

    fn start_at(test_dir: TestDir, more: &[&str]) -> Self {
        let control = text(&test_dir.path("control"));
        let allow = text(test_dir.path("x").parent().unwrap());
        let state = text(&test_dir.path("state.toml"));
        let args = [
            "daemon",
            "--control",
            &control,
            "--allow",
            &allow,
            "--state",
            &state,
        ];
        let daemon = Daemon::spawn_with_descriptors(16_384, &[&args, more].concat());
        let client = Client::new(vec![test_dir.path("control")]).unwrap();
        eventually("it answers", || client.disks().is_ok());
        Self {
            test_dir,
            daemon,
            client,
        }
    }

    fn socket(&self, name: &str) -> std::path::PathBuf {
        self.test_dir.path(&format!("{name}.sock"))
    }

    fn add(&self, name: &str, volume: &str) -> Result<(), ClientError> {
        let socket = text(&self.socket(name));
        let table = json!({"socket": socket, "namespace": [{"volume": volume}]});
        let added = self.client.add(DiskKind::Controller, object(table))?;
        assert_eq!((&*added.name, added.attached), (name, false));
        Ok(())
    }

    fn export(&self, name: &str, volume: &str) -> Result<(), ClientError> {
        let socket = text(&self.socket(name));
        let table = json!({"socket": socket, "volume": volume});
        self.client
            .add(DiskKind::VhostUserBlk, object(table))
            .map(drop)
    }

    fn names(&self) -> Vec<String> {
        let disks = self.client.disks().unwrap();
        disks.into_iter().map(|disk| disk.name).collect()
    }

    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.daemon.pid()))
            .unwrap()
            .count()
    }

    /// Resident memory in KiB.
    fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.daemon.pid())).unwrap();
        let line = status
            .lines()
            .find(|line| line.starts_with("VmRSS:"))
            .unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

fn refused<T: std::fmt::Debug>(result: Result<T, ClientError>, words: &str) {
    let said = result.expect_err(words).to_string();
    assert!(said.contains(words), "{words}: {said}");
}

#[test]
fn disk_is_added_and_removed() {
    let m = Managed::start(&["--workers", "2"]);
    let disk = m.test_dir.disk("a.raw", 1 << 20);
    m.add("a", &disk).unwrap();
    let before = m.daemon.settled_descriptors();
    refused(m.add("a", "mem://1M"), "there already");
    refused(m.add("b", &disk), "a.raw");
    refused(m.add("b", "/etc/hostname"), "option allow");
    refused(m.add("b", "mem://1M?nonsense=1"), "nonsense");
    refused(m.export("c", "mem://lots"), "lots");
    assert_eq!(m.names(), ["a"]);
    // The connection of the last request may not be closed yet.
    eventually("nothing is left open", || m.descriptors() <= before);
    assert!(
        !m.socket("b").exists() && !m.socket("c").exists(),
        "nothing half done"
    );
    let mut host = Host::up(&m.socket("a"));
    host.write(1, 0, &pattern(1, 4096));
    assert!(m.client.disk("a").unwrap().attached);
    refused(m.client.remove("a", false), "a client is attached");
    assert_eq!(host.read(1, 0, 4096), pattern(1, 4096), "it goes on");
    m.export("c", "mem://1M").unwrap();
    m.client.remove("c", false).unwrap();
    // By force, with a client that still has it.
    m.client.remove("a", true).unwrap();
    assert_eq!(m.names(), Vec::<String>::new());
    refused(m.client.remove("a", true), "no disk");
    assert!(!m.socket("a").exists() && !m.test_dir.path("a.sock.lock").exists());
    assert_eq!(m.test_dir.bytes("a.raw", 0, 4096), pattern(1, 4096));
    drop(host);
    // The file is free at once.
    m.add("a", &disk).unwrap();
    let mut host = Host::up(&m.socket("a"));
    assert_eq!(host.read(1, 0, 4096), pattern(1, 4096));
    let saved = m.client.save().unwrap();
    assert!(
        saved.contains("a.raw") && saved.contains("[[controller]]"),
        "{saved}"
    );
    drop(host);
    assert!(m.daemon.end().status.success());
}

/// Mistakes of an operator are refused with an error text, and leave nothing behind.
#[test]
fn mistakes_are_reported_and_leave_nothing() {
    let m = Managed::start(&[]);
    m.test_dir.disk("plain", 512);
    fs::create_dir(m.test_dir.path("folder")).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", m.test_dir.path("link")).unwrap();
    let fifo = m.test_dir.path("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    assert!(made.unwrap().success());
    m.add("a", "mem://1M").unwrap();
    let (names, open) = (m.names(), m.daemon.settled_descriptors());
    let of = |name: &str| text(&m.test_dir.path(name));
    let socket = of("x.sock");
    let with = |table: &[(&str, Value)]| {
        let mut all = object(json!({"socket": socket, "namespace": [{"volume": "mem://1M"}]}));
        let table = table.iter().cloned();
        all.extend(table.map(|(key, value)| (key.to_owned(), value)));
        m.client.add(DiskKind::Controller, all)
    };
    let volume = |url: &str| ("namespace", json!([{ "volume": url }]));
    let long = "x".repeat(5000);
    for (table, words) in [
        (("sokcet", json!("/x")), "did you mean `socket`?"),
        (("name", json!("")), "is empty"),
        (("name", json!("..")), "has a special meaning in paths"),
        (("name", json!("a\nb")), "control character"),
        (("name", json!(long)), "255 bytes"),
        (("name", json!("a")), "there already"),
        (("socket", json!("")), "option allow"),
        (("socket", json!("relative.sock")), "option allow"),
        (("socket", json!(of("plain"))), "not a socket"),
        (("socket", json!(of("folder"))), "not a socket"),
        (("socket", json!(of("a.sock"))), "there already"),
        (("socket", json!(of("control"))), "given twice"),
        (
            ("socket", json!(of("no/x.sock"))),
            "does not exist; make it",
        ),
        (("socket", json!(of(&long[..200]))), "too long"),
        (("socket", json!(of("a\nb.sock"))), "control character"),
        (("namespace", json!([])), "no volume"),
        (volume(""), "option allow"),
        (volume(&of("missing")), "no such file"),
        (volume(&of("fifo")), "is a FIFO"),
        (volume(&of("folder")), "is a directory"),
        (volume(&of("link")), "option allow"),
        (volume("mem://lots"), "lots"),
        (volume("mem://999999T"), "no memory"),
        (volume("nvme://0000:00:00.0/1"), "cannot be added"),
        (volume("vfio-user:///x/1"), "cannot be added"),
        (("io-queues", json!(100_000)), "io-queues"),
        (("max-namespaces", json!(1u64 << 32)), "max-namespaces"),
        (("serial", json!("\n")), "printable"),
    ] {
        refused(with(&[table]), words);
        assert_eq!(m.names(), names, "{words}");
        // The connection of the last request may not be closed yet.
        eventually(words, || m.descriptors() <= open);
        assert!(!m.socket("x").exists(), "{words}");
    }
    refused(m.client.remove("", false), "");
    refused(m.client.remove("../disks/b", false), "no disk");
    refused(m.client.resize("a", 1, 0), "");
    refused(m.client.detach("a", 0), "");
    // A name with a slash has its place in addresses.
    with(&[("name", json!("a/b ?"))]).unwrap();
    m.client.remove("a/b ?", false).unwrap();
    assert_eq!(m.names(), names);
    eventually("nothing is left open", || m.descriptors() <= open);
    assert!(m.daemon.end().status.success());
}

/// Disks are added and removed as fast as possible, from many sides, with clients in between.
#[test]
fn flood_of_changes_leaves_nothing() {
    let m = Managed::start(&["--workers", "2"]);
    let disk = m.test_dir.disk("f.raw", 1 << 20);
    m.add("neighbour", "mem://1M").unwrap();
    let mut host = Host::up(&m.socket("neighbour"));
    host.write(1, 0, &pattern(1, 4096));
    let flood = |seed: u64| {
        let mut random = seed;
        for _ in 0..40 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let name = format!("f{}", (random >> 40) % 4);
            let volume = ["mem://1M", &disk][(random >> 50) as usize % 2];
            // Any of them may find that another one was first.
            match (random >> 33) % 6 {
                0 | 1 => {
                    let socket = text(&m.socket(&name));
                    let table = json!({"socket": socket, "namespace": [{"volume": volume}]});
                    drop(m.client.add(DiskKind::Controller, object(table)));
                }
                2 => drop(m.export(&name, volume)),
                3 => drop(m.client.remove(&name, true)),
                4 => drop(
                    m.client
                        .attach(&name, &object(json!({"volume": "mem://1M"}))),
                ),
                _ => drop(std::os::unix::net::UnixStream::connect(m.socket(&name))),
            }
        }
    };
    let rest = |turn: u64| {
        std::thread::scope(|scope| {
            for seed in 0..6 {
                let flood = &flood;
                scope.spawn(move || flood(turn * 6 + seed + 1));
            }
        });
        for name in m.names().iter().filter(|name| *name != "neighbour") {
            m.client.remove(name, true).unwrap();
        }
        m.descriptors()
    };
    let first = rest(0);
    for turn in 1..3 {
        rest(turn);
        eventually("descriptors are back", || m.descriptors() <= first);
        assert_eq!(m.names(), ["neighbour"]);
        assert_eq!(host.read(1, 0, 4096), pattern(1, 4096), "it goes on");
    }
    // The file is nobody's.
    m.add("f0", &disk).unwrap();
    drop(host);
    assert!(m.daemon.end().status.success());
}

#[test]
fn namespace_is_attached_resized_and_detached_beside_neighbour() {
    let m = Managed::start(&[]);
    let disk = m.test_dir.disk("n.raw", 1 << 20);
    m.add("a", "mem://1M").unwrap();
    let mut host = Host::up(&m.socket("a"));
    host.write(1, 0, &pattern(1, 4096));
    let attach = |table: Value| m.client.attach("a", &object(table));
    let namespace = attach(json!({"volume": disk})).unwrap();
    assert_eq!((namespace.nsid, namespace.bytes), (2, 1 << 20));
    host.write(2, 0, &pattern(2, 4096));
    refused(attach(json!({"volume": "mem://1M", "nsid": 2})), "already");
    refused(
        attach(json!({"volume": "mem://1M", "nsid": 17})),
        "max-namespaces",
    );
    let grown = m.client.resize("a", 2, 2 << 20).unwrap();
    assert_eq!(grown.bytes, 2 << 20);
    refused(m.client.resize("a", 2, 1 << 20), "cannot shrink");
    refused(m.client.resize("a", 1, 4 << 20), "cannot be changed");
    eventually("the guest sees it", || {
        host.identify_namespace(2).unwrap().nsze.get() == (2 << 20) / 512
    });
    host.write(2, (2 << 20) / 512 - 8, &pattern(3, 4096));
    m.client.detach("a", 2).unwrap();
    assert_eq!(host.identify_namespace(2).unwrap().nsze.get(), 0);
    refused(m.client.detach("a", 2), "no namespace 2");
    assert_eq!(
        host.read(1, 0, 4096),
        pattern(1, 4096),
        "the neighbour goes on"
    );
    assert_eq!(
        m.test_dir.bytes("n.raw", (2 << 20) - 4096, 4096),
        pattern(3, 4096)
    );
    fs::remove_file(&disk).unwrap();
    drop(host);
    assert!(m.daemon.end().status.success());
}

#[test]
fn added_disk_is_counted_under_its_name() {
    let m = Managed::start(&[]);
    let disk = m.test_dir.disk("n.raw", 1 << 20);
    let socket = text(&m.socket("a"));
    let limited = "mem://1M?iops=0";
    let table = json!({"name": "root", "socket": socket, "namespace": [{"volume": limited}]});
    m.client.add(DiskKind::Controller, object(table)).unwrap();
    let namespace = json!({"volume": disk});
    m.client.attach("root", &object(namespace)).unwrap();
    let mut host = Host::up(&m.socket("a"));
    host.write(1, 0, &pattern(1, 4096));
    host.write(2, 0, &pattern(2, 4096));
    let stats = m.client.stats().unwrap();
    assert_eq!(stats.controllers[0].name, "root");
    assert_eq!(stats.volumes.len(), 1, "limits");
    let measured = &stats.measured.disks[0];
    let volumes = measured.namespaces.iter().map(|ns| ns.volume.clone());
    assert_eq!(volumes.collect::<Vec<_>>(), [limited.to_owned(), disk]);
    assert_eq!(measured.name, "root");
    drop(host);
    m.client.remove("root", true).unwrap();
    let stats = m.client.stats().unwrap();
    assert!(stats.controllers.is_empty() && stats.measured.disks.is_empty());
    assert!(stats.volumes.is_empty(), "{:?}", stats.volumes);
    assert!(m.daemon.end().status.success());
}

#[test]
fn failed_apply_changes_nothing() {
    let m = Managed::start(&[]);
    m.add("a", "mem://1M").unwrap();
    m.add("b", "mem://1M").unwrap();
    let mut host = Host::up(&m.socket("a"));
    let of = |name: &str, volume: &str| {
        let socket = text(&m.socket(name));
        json!({"socket": socket, "namespace": [{"volume": volume}]})
    };
    let missing = text(&m.test_dir.path("missing.raw"));
    let bad = json!({"controller": [of("a", "mem://1M"), of("c", "mem://1M"), of("d", &missing)]});
    refused(m.client.apply(&object(bad), false), "nothing was changed");
    assert_eq!(m.names(), ["a", "b"]);
    let without = json!({"controller": [of("c", "mem://1M")]});
    let plan = m.client.apply(&object(without), false).unwrap();
    assert!(
        plan.refused[0].reason.contains("a client is attached"),
        "{plan:?}"
    );
    assert_eq!(m.names(), ["a", "b"]);
    let good = object(json!({"controller": [of("a", "mem://1M"), of("c", "mem://1M")]}));
    let plan = m.client.apply(&good, true).unwrap();
    assert_eq!(
        (plan.added, plan.removed),
        (vec!["c".to_owned()], vec!["b".to_owned()])
    );
    assert_eq!(m.names(), ["a", "b"], "a dry run");
    m.client.apply(&good, false).unwrap();
    assert_eq!(m.names(), ["a", "c"]);
    assert_eq!(host.read(1, 0, 512), [0; 512]);
    drop(host);
    assert!(m.daemon.end().status.success());
}

#[test]
fn concurrent_adds_of_same_name_succeed_once() {
    let m = Managed::start(&["--workers", "2"]);
    for _ in 0..5 {
        let barrier = Barrier::new(4);
        let added = std::thread::scope(|scope| {
            let threads = [(); 4].map(|()| {
                scope.spawn(|| {
                    barrier.wait();
                    m.add("a", "mem://1M").is_ok()
                })
            });
            let ends = threads.into_iter().map(|thread| thread.join().unwrap());
            ends.filter(|added| *added).count()
        });
        assert_eq!(added, 1);
        m.client.remove("a", false).unwrap();
    }
    assert!(m.daemon.end().status.success());
}

#[test]
fn added_disk_survives_kill() {
    let m = Managed::start(&[]);
    m.add("a", "mem://1M").unwrap();
    m.add("gone", "mem://1M").unwrap();
    m.client.remove("gone", false).unwrap();
    let Managed {
        test_dir, daemon, ..
    } = m;
    daemon.signal(Signal::KILL);
    daemon.wait();
    let m = Managed::start_at(test_dir, &[]);
    assert_eq!(m.names(), ["a"]);
    drop(Host::up(&m.socket("a")));
    eventually("it is free", || !m.client.disk("a").unwrap().attached);
    m.client.remove("a", false).unwrap();
    assert!(m.daemon.end().status.success());
}

/// How many disks come and go; VNVME_MANY sets another number.
fn many() -> usize {
    let set = std::env::var("VNVME_MANY").ok();
    set.map_or(50, |text| text.parse().unwrap())
}

#[test]
fn many_disks_leave_nothing() {
    let m = Managed::start(&["--workers", "2"]);
    m.add("neighbour", "mem://1M").unwrap();
    let mut host = Host::up(&m.socket("neighbour"));
    // Resident memory while all are there.
    let round = |count: usize| {
        for i in 0..count {
            match i % 2 {
                0 => m.add(&format!("d{i}"), "mem://64K").unwrap(),
                _ => m.export(&format!("d{i}"), "mem://64K").unwrap(),
            }
        }
        let memory = m.memory();
        for i in 0..count {
            m.client.remove(&format!("d{i}"), false).unwrap();
        }
        memory
    };
    round(10);
    let (descriptors, memory) = (m.descriptors(), m.memory());
    let most = round(many());
    let back = m.descriptors();
    eventually("descriptors are back", || m.descriptors() <= descriptors);
    let more = m.memory().saturating_sub(memory);
    eprintln!(
        "{} disks: {descriptors} to {back} descriptors, {more} KiB more",
        many()
    );
    assert!(more < 16 << 10, "{more} KiB more");
    assert!(most > memory + 512, "{most} KiB is no more than {memory}");
    let half = memory + (most - memory) / 2;
    eventually("memory is released", || m.memory() < half);
    host.write(1, 0, &pattern(1, 4096));
    assert_eq!(host.read(1, 0, 4096), pattern(1, 4096));
    drop(host);
    assert!(m.daemon.end().status.success());
}

/// The running configuration is written into the configuration file by an operator. The disk is
/// served once after the next start, and is removed when the configuration loses it.
#[test]
fn saved_disk_belongs_to_configuration() {
    let test_dir = TestDir::new();
    let config = test_dir.path("vnvme.toml");
    fs::write(&config, "").unwrap();
    let config = text(&config);
    let state = test_dir.path("state.toml");
    let kept = |name: &str| {
        let text = fs::read_to_string(&state).unwrap();
        text.contains(&format!("{name}.sock"))
    };
    let disks_of = |m: &Managed| {
        let saved = m.client.save().unwrap();
        let disks = saved.find("[process]").unwrap_or(saved.len());
        saved[..disks].to_owned()
    };
    let m = Managed::start_at(test_dir, &["--config", &config]);
    m.add("a", "mem://1M").unwrap();
    let only_a = disks_of(&m);
    m.add("b", "mem://1M").unwrap();
    assert!(kept("a") && kept("b"));
    // By a reload, at once.
    fs::write(&config, only_a).unwrap();
    m.client.reload().unwrap();
    assert!(!kept("a") && kept("b"));
    assert_eq!(m.names(), ["a", "b"]);
    // By the next start.
    fs::write(&config, disks_of(&m)).unwrap();
    let Managed {
        test_dir, daemon, ..
    } = m;
    assert!(daemon.end().status.success());
    assert!(kept("b"));
    let m = Managed::start_at(test_dir, &["--config", &config]);
    assert_eq!(m.names(), ["a", "b"]);
    assert!(!kept("b"));
    m.daemon.wait_log(|line| line.contains("disks=\"b\""));
    assert_eq!(m.daemon.count("disks=\"b\""), 1);
    m.add("c", "mem://1M").unwrap();
    let plan = m.client.apply(&object(json!({})), false).unwrap();
    assert!(plan.refused[0].reason.contains("is empty"), "{plan:?}");
    let plan = m
        .client
        .apply(&object(json!({"process": {}})), true)
        .unwrap();
    assert_eq!(plan.removed, ["a", "b", "c"]);
    m.client.remove("a", false).unwrap();
    m.client.remove("b", false).unwrap();
    assert!(kept("c"));
    assert!(m.daemon.end().status.success());
}

/// Kept disks that can no longer be served are reported, and all other disks are served. The
/// configuration takes precedence.
#[test]
fn broken_saved_disk_blocks_no_other() {
    let test_dir = TestDir::new();
    let config = test_dir.path("vnvme.toml");
    fs::write(&config, "").unwrap();
    let config = text(&config);
    let m = Managed::start_at(test_dir, &["--config", &config]);
    let (gone, taken) = (
        m.test_dir.disk("gone.raw", 1 << 20),
        m.test_dir.disk("taken.raw", 1 << 20),
    );
    m.add("a", &m.test_dir.disk("a.raw", 1 << 20)).unwrap();
    m.add("b", &gone).unwrap();
    m.export("c", &taken).unwrap();
    m.export("d", "mem://1M").unwrap();
    m.export("e", "mem://1M").unwrap();
    let Managed {
        test_dir, daemon, ..
    } = m;
    assert!(daemon.end().status.success());
    let before = fs::read_to_string(test_dir.path("state.toml")).unwrap();
    // The volume of the first disk is missing. The configuration has another disk's volume by now,
    // and the socket of a third. A regular file is at the socket's path of the fourth.
    fs::remove_file(&gone).unwrap();
    fs::write(test_dir.path("d.sock"), "no socket").unwrap();
    let configured = |name: &str, socket: &str, volume: &str| {
        let socket = text(&test_dir.path(socket));
        format!(
            "[[controller]]\nname = \"{name}\"\nsocket = \"{socket}\"\n\
             namespace = [{{ volume = \"{volume}\" }}]\n"
        )
    };
    let both = configured("x", "x.sock", &taken) + &configured("y", "e.sock", "mem://1M");
    fs::write(&config, &both).unwrap();
    let m = Managed::start_at(test_dir, &["--config", &config]);
    assert_eq!(m.names(), ["a", "b", "c", "d", "e", "x", "y"]);
    let why = |name: &str| m.client.disk(name).unwrap().error.unwrap_or_default();
    for (name, words) in [
        ("b", "gone.raw: no such file"),
        ("c", "taken.raw"),
        ("d", "exists and is not a socket"),
        ("e", "e.sock is given twice"),
    ] {
        assert!(why(name).contains(words), "{name}: {}", why(name));
        let logged = format!("disk=\"{name}\"");
        m.daemon
            .wait_log(|line| line.contains("ERROR") && line.contains(&logged));
    }
    for name in ["a", "x", "y"] {
        assert_eq!(why(name), "");
    }
    let mut host = Host::up(&m.socket("a"));
    host.write(1, 0, &pattern(1, 4096));
    let unserved = m.client.stats().unwrap().measured.unserved;
    assert_eq!(unserved, ["e", "b", "c", "d"]);
    let control = text(&m.test_dir.path("control"));
    let list = std::process::Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["list", "--control", &control])
        .output()
        .unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    assert!(list.contains("\nb is not served: "), "{list}");
    // The only possible operation is its removal; it is kept until then.
    refused(m.client.resize("b", 1, 1 << 20), "not served");
    refused(m.add("b", "mem://1M"), "vnvme remove b forgets it");
    m.export("f", "mem://1M").unwrap();
    let state = || fs::read_to_string(m.test_dir.path("state.toml")).unwrap();
    for line in before.lines().filter(|line| line.starts_with("name")) {
        assert!(state().contains(line), "{line}: {}", state());
    }
    m.client.remove("c", false).unwrap();
    m.client.remove("d", false).unwrap();
    // An attempt to open the disk that began before its removal still counts until it ends.
    eventually("removed disks are not counted", || {
        m.client.stats().unwrap().measured.unserved == ["e", "b"]
    });
    assert!(!state().contains("c.sock") && state().contains("b.sock"));
    // Once its volume is back, the next start serves it.
    m.test_dir.disk("gone.raw", 1 << 20);
    drop(host);
    let Managed {
        test_dir, daemon, ..
    } = m;
    assert!(daemon.end().status.success());
    let m = Managed::start_at(test_dir, &["--config", &config]);
    assert_eq!(m.client.disk("b").unwrap().error, None);
    drop(Host::up(&m.socket("b")));
    // A disk of the configuration behaves the same.
    let Managed {
        test_dir, daemon, ..
    } = m;
    assert!(daemon.end().status.success());
    fs::remove_file(&taken).unwrap();
    let kept = fs::read_to_string(test_dir.path("state.toml")).unwrap();
    let m = Managed::start_at(test_dir, &["--config", &config]);
    let why = m.client.disk("x").unwrap().error.unwrap_or_default();
    assert!(why.contains("taken.raw: no such file"), "{why}");
    assert_eq!(m.client.disk("b").unwrap().error, None);
    let state = fs::read_to_string(m.test_dir.path("state.toml")).unwrap();
    assert_eq!(state, kept);
}

/// A client that sends a request while a daemon starts gets all disks, or the answer that the
/// daemon is starting.
#[test]
fn first_answer_of_daemon_has_all_disks() {
    let test_dir = TestDir::new();
    let config = test_dir.path("vnvme.toml");
    let count = 64;
    let disks = (0..count).map(|i| {
        let socket = text(&test_dir.path(&format!("d{i}.sock")));
        format!("[[vhost-user-blk]]\nsocket = \"{socket}\"\nvolume = \"mem://1M\"\n")
    });
    fs::write(&config, disks.collect::<String>()).unwrap();
    let control = text(&test_dir.path("control"));
    let args = ["daemon", "--config", &text(&config), "--control", &control];
    let daemon = Daemon::spawn_with_descriptors(16_384, &args);
    let client = Client::new(vec![test_dir.path("control")]).unwrap();
    let mut first = None;
    eventually("it answers", || {
        first = client.disks().ok();
        first.is_some()
    });
    assert_eq!(first.unwrap().len(), count);
    daemon.end();
}

/// Each daemon would write only the disks that it serves itself.
#[test]
fn state_file_of_other_daemon_is_refused() {
    let m = Managed::start(&[]);
    m.add("a", "mem://1M").unwrap();
    let state = text(&m.test_dir.path("state.toml"));
    let control = text(&m.test_dir.path("second"));
    let args = ["daemon", "--control", &control, "--state", &state];
    let second = Daemon::spawn(&args).wait();
    assert_eq!(second.status.code(), Some(1), "{second:?}");
    let last = second.log.last().unwrap();
    assert!(
        last.contains(&format!(
            "state {state}: another vnvme daemon keeps its disks there"
        )),
        "{last}"
    );
    assert_eq!(m.names(), ["a"]);
    // The lock ends with the process, however that ends.
    let Managed {
        test_dir, daemon, ..
    } = m;
    daemon.kill();
    let m = Managed::start_at(test_dir, &[]);
    assert_eq!(m.names(), ["a"]);
    assert!(m.daemon.end().status.success());
    let nowhere = text(&TestDir::new().path("none/state.toml"));
    let args = ["daemon", "--control", "none", "--state", &nowhere];
    let ended = Daemon::spawn(&args).wait();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let last = ended.log.last().unwrap();
    assert!(
        last.contains("what is added cannot be kept there"),
        "{last}"
    );
}

/// Unreadable state: the daemon does not start without the added disks, and leaves the file
/// unchanged for repair.
#[test]
fn damaged_state_is_reported_and_kept() {
    for (damaged, words) in [
        (
            "[[controller]]\nsocket = \"/x",
            "state.toml: TOML parse error at line 2",
        ),
        (
            "[[ublk]]\nname = \"a\"\nvolume = \"mem://1M\"\n\
             [[ublk]]\nname = \"a\"\nvolume = \"mem://1M\"\n",
            "two disks are called \"a\"",
        ),
        (
            "[[controller]]\nsocket = \"/x\"\nsokcet = 1\n",
            "state.toml: TOML parse error",
        ),
        (
            "[process]\nworkers = 2\n",
            "[process] belongs into the configuration",
        ),
        ("\0\0\0\0", "state.toml: TOML parse error at line 1"),
    ] {
        let test_dir = TestDir::new();
        let (state, control) = (test_dir.path("state.toml"), text(&test_dir.path("control")));
        fs::write(&state, damaged).unwrap();
        let args = ["daemon", "--control", &control, "--state", &text(&state)];
        let ended = Daemon::spawn(&args).wait();
        assert_eq!(ended.status.code(), Some(1), "{ended:?}");
        assert!(
            ended.log.iter().any(|line| line.contains(words)),
            "{words}: {ended:?}"
        );
        assert_eq!(fs::read_to_string(&state).unwrap(), damaged);
    }
}

/// `vnvme apply` of an invalid configuration, and the limits of sizes and namespaces.
#[test]
fn limits_are_reported_and_lose_nothing() {
    let m = Managed::start(&[]);
    let disk = m.test_dir.disk("n.raw", 1 << 20);
    m.add("a", &disk).unwrap();
    let control = text(&m.test_dir.path("control"));
    let apply = |file: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_vnvme"));
        let output = command
            .args(["apply", "--control", &control, file])
            .output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(1), "{file}: {output:?}");
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
    };
    let file = text(&m.test_dir.path("f.toml"));
    for (content, words) in [
        ("", "the configuration is empty"),
        ("# nothing yet\n", "the configuration is empty"),
        ("[[controller]]\nsocket = \"/x", "line 2"),
        ("[[controller]]\n", "missing field"),
        ("\u{0}", "line 1"),
    ] {
        fs::write(&file, content).unwrap();
        let said = apply(&file);
        assert!(
            said.contains(words) && !said.contains("refused: :"),
            "{content:?}: {said}"
        );
    }
    fs::write(&file, [0xff, 0xfe]).unwrap();
    assert!(apply(&file).contains("UTF-8"));
    assert!(apply("/nowhere/f.toml").contains("no such configuration file"));
    assert!(apply("/").contains("has no file *.toml"));
    assert_eq!(m.names(), ["a"]);
    let mut host = Host::up(&m.socket("a"));
    host.write(1, 0, &pattern(1, 4096));
    for (bytes, words) in [
        (0, "cannot shrink"),
        (1, "cannot shrink"),
        ((1 << 20) - 512, "cannot shrink"),
        ((1 << 20) + 1, "512"),
        (u64::MAX, ""),
        (u64::MAX - 511, "cannot be resized"),
        (1 << 63, "cannot be resized"),
    ] {
        refused(m.client.resize("a", 1, bytes), words);
        assert_eq!(fs::metadata(&disk).unwrap().len(), 1 << 20, "{bytes}");
    }
    refused(m.client.resize("a", 2, 1 << 20), "no namespace 2");
    refused(m.client.resize("b", 1, 1 << 20), "no disk");
    // The last namespace: the controller stays, and gets another one.
    m.client.detach("a", 1).unwrap();
    refused(m.client.resize("a", 1, 2 << 20), "no namespace 1");
    assert_eq!(m.client.disk("a").unwrap().namespaces.len(), 0);
    drop(host);
    eventually("it is free", || !m.client.disk("a").unwrap().attached);
    let mut host = Host::up(&m.socket("a"));
    let again = json!({"volume": disk});
    assert_eq!(m.client.attach("a", &object(again)).unwrap().nsid, 1);
    assert_eq!(host.read(1, 0, 4096), pattern(1, 4096));
    drop(host);
    // Without a client it may shrink, but not to nothing.
    eventually("it is free", || !m.client.disk("a").unwrap().attached);
    refused(m.client.resize("a", 1, 0), "");
    assert_eq!(m.client.resize("a", 1, 512).unwrap().bytes, 512);
    assert!(m.daemon.end().status.success());
}

/// A namespace that is attached later has its formats, too. The operator sees the format that the
/// guest has chosen.
#[test]
fn namespace_is_attached_with_chosen_format() {
    let m = Managed::start(&[]);
    m.add("a", "mem://1M").unwrap();
    let disk = m.test_dir.disk("formatted.raw", 4 << 20);
    let file = text(&m.test_dir.path("format"));
    let mut host = Host::up(&m.socket("a"));
    let table = || object(json!({"volume": disk, "nsid": 2, "format-file": file}));
    for before in [512, 4096] {
        let attached = m.client.attach("a", &table()).unwrap();
        assert_eq!(attached.block_size, before);
        let ns = host.identify_namespace(2).unwrap();
        assert_eq!(
            (ns.nsze.get(), ns.nlbaf_z),
            ((4 << 20) / u64::from(before), 1)
        );
        let mut format = Command::new(AdminOpcode::FORMAT_NVM.0, 0, 2);
        format.cdw10 = 1.into();
        assert_eq!(host.run(0, format).status(), Status::SUCCESS);
        let ns = host.identify_namespace(2).unwrap();
        assert_eq!((ns.nsze.get(), ns.flbas.index()), (1024, 1));
        let shown = m.client.disk("a").unwrap();
        let sizes: Vec<_> = shown.namespaces.iter().map(|ns| ns.block_size).collect();
        assert_eq!(sizes, [512, 4096]);
        m.client.detach("a", 2).unwrap();
    }
}
