//! Disks and namespaces that come and go by the control socket of `vnvme daemon`.

use crate::common::*;
use control::api::DiskKind;
use control::{Client, ClientError};
use rustix::process::Signal;
use serde_json::{Map, Value, json};
use std::fs;
use std::sync::Barrier;

struct Managed {
    place: Place,
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
        Self::start_at(Place::new(), more)
    }

    fn start_at(place: Place, more: &[&str]) -> Self {
        let control = text(&place.path("control"));
        let allow = text(place.path("x").parent().unwrap());
        let state = text(&place.path("state.toml"));
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
        let client = Client::new(vec![place.path("control")]).unwrap();
        eventually("it answers", || client.disks().is_ok());
        Self {
            place,
            daemon,
            client,
        }
    }

    fn socket(&self, name: &str) -> std::path::PathBuf {
        self.place.path(&format!("{name}.sock"))
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
fn a_disk_comes_and_goes() {
    let m = Managed::start(&["--workers", "2"]);
    let disk = m.place.disk("a.raw", 1 << 20);
    m.add("a", &disk).unwrap();
    let before = m.descriptors();
    refused(m.add("a", "mem://1M"), "there already");
    refused(m.add("b", &disk), "a.raw");
    refused(m.add("b", "/etc/hostname"), "option allow");
    refused(m.add("b", "mem://1M?nonsense=1"), "nonsense");
    refused(m.export("c", "mem://lots"), "lots");
    assert_eq!((m.names(), m.descriptors()), (vec!["a".to_owned()], before));
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
    assert!(!m.socket("a").exists() && !m.place.path("a.sock.lock").exists());
    assert_eq!(m.place.bytes("a.raw", 0, 4096), pattern(1, 4096));
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

#[test]
fn a_namespace_is_attached_grown_and_detached_beside_a_neighbour() {
    let m = Managed::start(&[]);
    let disk = m.place.disk("n.raw", 1 << 20);
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
        m.place.bytes("n.raw", (2 << 20) - 4096, 4096),
        pattern(3, 4096)
    );
    fs::remove_file(&disk).unwrap();
    drop(host);
    assert!(m.daemon.end().status.success());
}

#[test]
fn what_is_added_is_counted_under_its_name_until_it_goes() {
    let m = Managed::start(&[]);
    let disk = m.place.disk("n.raw", 1 << 20);
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
fn a_failing_apply_changes_nothing() {
    let m = Managed::start(&[]);
    m.add("a", "mem://1M").unwrap();
    m.add("b", "mem://1M").unwrap();
    let mut host = Host::up(&m.socket("a"));
    let of = |name: &str, volume: &str| {
        let socket = text(&m.socket(name));
        json!({"socket": socket, "namespace": [{"volume": volume}]})
    };
    let missing = text(&m.place.path("missing.raw"));
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
fn of_many_that_add_the_same_name_one_does() {
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
fn what_was_added_is_there_after_a_kill() {
    let m = Managed::start(&[]);
    m.add("a", "mem://1M").unwrap();
    m.add("gone", "mem://1M").unwrap();
    m.client.remove("gone", false).unwrap();
    let Managed { place, daemon, .. } = m;
    daemon.signal(Signal::KILL);
    daemon.wait();
    let m = Managed::start_at(place, &[]);
    eventually("it is served again", || m.names() == ["a"]);
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
fn many_disks_leave_nothing_behind() {
    let m = Managed::start(&["--workers", "2"]);
    m.add("neighbour", "mem://1M").unwrap();
    let mut host = Host::up(&m.socket("neighbour"));
    let round = |count: usize| {
        for i in 0..count {
            match i % 2 {
                0 => m.add(&format!("d{i}"), "mem://64K").unwrap(),
                _ => m.export(&format!("d{i}"), "mem://64K").unwrap(),
            }
        }
        for i in 0..count {
            m.client.remove(&format!("d{i}"), false).unwrap();
        }
    };
    round(10);
    let (descriptors, memory) = (m.descriptors(), m.memory());
    round(many());
    let back = m.descriptors();
    eventually("descriptors are back", || m.descriptors() <= descriptors);
    let more = m.memory().saturating_sub(memory);
    eprintln!(
        "{} disks: {descriptors} to {back} descriptors, {more} KiB more",
        many()
    );
    assert!(more < 16 << 10, "{more} KiB more");
    host.write(1, 0, &pattern(1, 4096));
    assert_eq!(host.read(1, 0, 4096), pattern(1, 4096));
    drop(host);
    assert!(m.daemon.end().status.success());
}
