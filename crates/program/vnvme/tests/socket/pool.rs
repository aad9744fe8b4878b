//! A pool: namespaces that a guest makes, in the daemon's sandbox, and their state in the next
//! process.

use crate::common::*;
use crate::keeper;
use control::Client;
use control::api::OfGuest;
use nvme::cmd::namespace::NewNamespace;
use nvme::identify::ControllerList;
use nvme::{AdminOpcode, Command, Status};
use rustix::process::Signal;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use zerocopy::IntoBytes;

/// Where the data of admin commands lie.
const AT: u64 = 0x20_0000;

struct Pooled {
    test_dir: TestDir,
    config: String,
}

impl Pooled {
    fn new(more: &str) -> Self {
        let test_dir = TestDir::new();
        fs::create_dir(test_dir.path("pool")).unwrap();
        let config = format!(
            "[process]\ncontrol = {:?}\n[[controller]]\nname = \"d\"\nsocket = {:?}\n\
             pool = {:?}\npool-capacity = \"64M\"\n{more}",
            text(&test_dir.path("control")),
            text(&test_dir.socket()),
            text(&test_dir.path("pool")),
        );
        let file = test_dir.path("vnvme.toml");
        fs::write(&file, config).unwrap();
        let config = text(&file);
        Self { test_dir, config }
    }

    fn start(&self, command: &str) -> Daemon {
        let daemon = Daemon::spawn(&[command, "--config", &self.config]);
        daemon.wait_listening(&self.test_dir.socket());
        daemon
    }

    fn host(&self) -> Host {
        Host::up(&self.test_dir.socket())
    }

    fn client(&self) -> Client {
        Client::new(vec![self.test_dir.path("control")]).unwrap()
    }

    /// Files of namespaces.
    fn files(&self) -> Vec<PathBuf> {
        let all = fs::read_dir(self.test_dir.path("pool")).unwrap();
        let all = all.map(|entry| entry.unwrap().path());
        all.filter(|path| path.extension().is_some_and(|raw| raw == "raw"))
            .collect()
    }
}

fn create(host: &mut Host, blocks: u64) -> (Status, u32) {
    let new = NewNamespace {
        nsze: blocks.into(),
        ncap: blocks.into(),
        ..Default::default()
    };
    host.ram.write_all_at(new.as_bytes(), AT).unwrap();
    let mut command = Command::new(AdminOpcode::NAMESPACE_MANAGEMENT.0, 0, 0);
    command.set_prps(RAM_BASE + AT, 0);
    let done = host.run(0, command);
    (done.status().without_flags(), done.dw0.get())
}

fn delete(host: &mut Host, nsid: u32) -> Status {
    let mut command = Command::new(AdminOpcode::NAMESPACE_MANAGEMENT.0, 0, nsid);
    command.cdw10 = 1.into();
    host.run(0, command).status().without_flags()
}

fn attachment(host: &mut Host, nsid: u32, sel: u32) -> Status {
    let list = ControllerList::from_iter([1]);
    host.ram.write_all_at(list.as_bytes(), AT).unwrap();
    let mut command = Command::new(AdminOpcode::NAMESPACE_ATTACHMENT.0, 0, nsid);
    command.cdw10 = sel.into();
    command.set_prps(RAM_BASE + AT, 0);
    host.run(0, command).status().without_flags()
}

const NONE: &str = "namespace = []\n";
const OPERATORS: &str = "namespace = [{ volume = \"mem://1M\" }]\n";

/// Another process that has it may be ending.
#[test]
fn pool_in_use_is_waited_for() {
    let pooled = Pooled::new(NONE);
    let first = pooled.start("serve");
    let test_dir = TestDir::new();
    let config = fs::read_to_string(&pooled.config).unwrap();
    let config = config
        .replace(
            &text(&pooled.test_dir.path("control")),
            &text(&test_dir.path("control")),
        )
        .replace(&text(&pooled.test_dir.socket()), &text(&test_dir.socket()));
    let file = test_dir.path("vnvme.toml");
    fs::write(&file, config).unwrap();
    let second = Daemon::spawn(&["serve", "--config", &text(&file)]);
    second.wait_log(|line| line.contains("another process has it; waiting"));
    first.end();
    second.wait_listening(&test_dir.socket());
    assert_eq!(
        create(&mut Host::up(&test_dir.socket()), 8).0,
        Status::SUCCESS
    );
    second.end();
}

#[test]
fn guest_creates_namespaces_in_sandbox() {
    let pooled = Pooled::new(OPERATORS);
    let daemon = pooled.start("serve");
    let mut host = pooled.host();
    assert_eq!(host.identify_controller().unvmcap.get(), 64 << 20);
    assert_eq!(create(&mut host, 2048), (Status::SUCCESS, 2));
    assert_eq!(create(&mut host, 4096), (Status::SUCCESS, 3));
    let (status, _) = create(&mut host, 1 << 20);
    assert_eq!(status, Status::NAMESPACE_INSUFFICIENT_CAPACITY);
    assert_eq!(attachment(&mut host, 3, 0), Status::SUCCESS);
    let data = pattern(7, 64 << 10);
    host.write(3, 128, &data);
    host.flush(3);
    assert_eq!(host.read(3, 128, data.len()), data);
    let files = pooled.files();
    assert_eq!(files.len(), 2);
    let holds = |path: &PathBuf| {
        fs::read(path)
            .unwrap()
            .windows(data.len())
            .any(|w| w == data)
    };
    assert_eq!(files.iter().filter(|path| holds(path)).count(), 1);
    // The operator sees it.
    let disk = pooled.client().disk("d").unwrap();
    let shown: Vec<_> = disk
        .namespaces
        .iter()
        .map(|ns| (ns.nsid, ns.bytes, ns.of_guest))
        .collect();
    let (there, attached) = (Some(OfGuest::Allocated), Some(OfGuest::Attached));
    assert_eq!(
        shown,
        [
            (1, 1 << 20, None),
            (2, 1 << 20, there),
            (3, 2 << 20, attached)
        ]
    );
    assert!(
        files
            .iter()
            .any(|path| *disk.namespaces[2].volume == *text(path))
    );
    let metrics = pooled.client().metrics().unwrap();
    let line = "vnvme_bytes_total{disk=\"d\",namespace=\"3\",op=\"write\"} 65536";
    assert!(metrics.contains(line), "{metrics}");
    assert_eq!(attachment(&mut host, 3, 1), Status::SUCCESS);
    assert_eq!(attachment(&mut host, 3, 0), Status::SUCCESS);
    assert_eq!(host.read(3, 128, data.len()), data);
    // The process ends, and the next one has the same.
    drop(host);
    daemon.end();
    let daemon = pooled.start("serve");
    let mut host = pooled.host();
    assert_eq!(host.read(3, 128, data.len()), data);
    assert_eq!(delete(&mut host, 1), Status::OPERATION_DENIED);
    assert_eq!(delete(&mut host, 3), Status::SUCCESS);
    assert_eq!(delete(&mut host, 2), Status::SUCCESS);
    assert_eq!(pooled.files().len(), 0);
    assert_eq!(host.identify_controller().unvmcap.get(), 64 << 20);
    drop(host);
    let ended = daemon.end();
    let bad = |line: &&String| line.contains("ERROR") || line.contains("WARN");
    let expected = |line: &&String| !line.contains("sandbox leaves open");
    let said: Vec<_> = ended.log.iter().filter(bad).filter(expected).collect();
    assert!(said.is_empty(), "{said:?}");
}

#[test]
fn guest_does_not_notice_killed_process() {
    let pooled = Pooled::new(NONE);
    let daemon = keeper::start(
        &pooled.test_dir,
        &["serve", "--config", &pooled.config, "--keeper", "process"],
    );
    let mut host = pooled.host();
    for round in 0..4u32 {
        let blocks = 1024 << round;
        assert_eq!(create(&mut host, blocks), (Status::SUCCESS, 1));
        keeper::kill_serving(&daemon);
        assert_eq!(attachment(&mut host, 1, 0), Status::SUCCESS);
        let data = pattern(round.into(), 4096);
        host.write(1, 8, &data);
        keeper::kill_serving(&daemon);
        assert_eq!(host.read(1, 8, data.len()), data);
        assert_eq!(host.identify_namespace(1).unwrap().nsze.get(), blocks);
        assert_eq!(attachment(&mut host, 1, 1), Status::SUCCESS);
        keeper::kill_serving(&daemon);
        assert_eq!(attachment(&mut host, 1, 0), Status::SUCCESS);
        assert_eq!(host.read(1, 8, data.len()), data);
        assert_eq!(delete(&mut host, 1), Status::SUCCESS);
        keeper::kill_serving(&daemon);
        assert_eq!(pooled.files().len(), 0);
    }
    drop(host);
    daemon.end();
}

/// Commands are under way when the process is killed: each has one effect, and one answer.
#[test]
fn namespace_command_in_progress_is_answered_once() {
    let pooled = Pooled::new(NONE);
    let daemon = keeper::start(
        &pooled.test_dir,
        &["serve", "--config", &pooled.config, "--keeper", "process"],
    );
    let mut host = pooled.host();
    let new = NewNamespace {
        nsze: 8.into(),
        ncap: 8.into(),
        ..Default::default()
    };
    host.ram.write_all_at(new.as_bytes(), AT).unwrap();
    for round in 0..8 {
        let mut command = Command::new(AdminOpcode::NAMESPACE_MANAGEMENT.0, 0, 0);
        command.set_prps(RAM_BASE + AT, 0);
        let cids: Vec<u16> = (0..4).map(|_| host.submit(0, command)).collect();
        keeper::kill_serving(&daemon);
        for (cid, nsid) in cids.into_iter().zip(1..) {
            let done = host.completion(0);
            let told = (
                done.cid.get(),
                done.status().without_flags(),
                done.dw0.get(),
            );
            assert_eq!(told, (cid, Status::SUCCESS, nsid), "{round}");
        }
        assert_eq!(pooled.files().len(), 4, "{round}");
        let all = host.submit(0, {
            let mut command = Command::new(AdminOpcode::NAMESPACE_MANAGEMENT.0, 0, u32::MAX);
            command.cdw10 = 1.into();
            command
        });
        keeper::kill_serving(&daemon);
        let done = host.completion(0);
        assert_eq!(
            (done.cid.get(), done.status()),
            (all, Status::SUCCESS),
            "{round}"
        );
        assert_eq!(pooled.files().len(), 0, "{round}");
    }
    drop(host);
    daemon.end();
}

#[test]
fn operator_cannot_change_guest_namespaces() {
    let pooled = Pooled::new(OPERATORS);
    let daemon = pooled.start("daemon");
    let client = pooled.client();
    let mut host = pooled.host();
    assert_eq!(create(&mut host, 2048), (Status::SUCCESS, 2));
    assert_eq!(attachment(&mut host, 2, 0), Status::SUCCESS);
    host.write(2, 0, &pattern(3, 4096));
    let refused = client.detach("d", 2).unwrap_err().to_string();
    assert!(
        refused.contains("its guest has made namespace 2"),
        "{refused}"
    );
    let volume = |nsid: Option<u32>| {
        let mut table = serde_json::Map::new();
        table.insert("volume".into(), "mem://1M".into());
        if let Some(nsid) = nsid {
            table.insert("nsid".into(), nsid.into());
        }
        table
    };
    let refused = client
        .attach("d", &volume(Some(2)))
        .unwrap_err()
        .to_string();
    assert!(refused.contains("has a namespace 2 already"), "{refused}");
    // The next number that is free is behind it, and the guest's next one behind that.
    assert_eq!(client.attach("d", &volume(None)).unwrap().nsid, 3);
    assert_eq!(create(&mut host, 8), (Status::SUCCESS, 4));
    assert_eq!(delete(&mut host, 3), Status::OPERATION_DENIED);
    client.detach("d", 3).unwrap();
    assert_eq!(host.read(2, 0, 4096), pattern(3, 4096));
    // A killed process leaves its pool to the next one.
    drop(host);
    daemon.signal(Signal::KILL);
    daemon.wait();
    let daemon = pooled.start("daemon");
    let mut host = pooled.host();
    assert_eq!(host.read(2, 0, 4096), pattern(3, 4096));
    drop(host);
    // Removing a disk closes its pool.
    pooled.client().remove("d", true).unwrap();
    let file = pooled.files();
    assert_eq!(file.len(), 2);
    daemon.end();
}

#[test]
fn invalid_pool_is_refused_with_reason() {
    for (change, said) in [
        ("pool-capacity = \"64M\"|", "needs pool-capacity"),
        (
            "pool-capacity = \"64M\"|pool-capacity = 0",
            "needs pool-capacity",
        ),
        (
            "name = \"d\"|name = \"d\"\npool-block-size = 1024",
            "512 or 4096",
        ),
        (
            "name = \"d\"|name = \"d\"\nsubsystem = \"s\"\ncntlid = 1",
            "cannot have a pool",
        ),
        ("/pool\"|/nowhere\"", "No such file"),
        ("/pool\"|/vnvme.toml\"", "not a folder"),
    ] {
        let pooled = Pooled::new(OPERATORS);
        let (from, to) = change.split_once('|').unwrap();
        let text = fs::read_to_string(&pooled.config).unwrap();
        assert!(text.contains(from), "{from}");
        fs::write(&pooled.config, text.replacen(from, to, 1)).unwrap();
        let ended = Daemon::spawn(&["serve", "--config", &pooled.config]).wait();
        let log = ended.log.join("\n");
        assert!(
            !ended.status.success() && log.contains(said),
            "{said}: {log}"
        );
    }
    // Two cannot have one.
    let pooled = Pooled::new(NONE);
    let daemon = pooled.start("serve");
    let other = pooled.test_dir.path("other.toml");
    let config = fs::read_to_string(&pooled.config).unwrap();
    let config = config
        .replace("vm.sock", "other.sock")
        .replace("/control", "/control2");
    fs::write(
        &other,
        config.replace("[process]", "[process]\nprevious-timeout = 1"),
    )
    .unwrap();
    let ended = Daemon::spawn(&["serve", "--config", &text(&other)]).wait();
    let log = ended.log.join("\n");
    assert!(
        !ended.status.success() && log.contains("another process uses this pool"),
        "{log}"
    );
    daemon.end();
}

#[test]
fn guest_cannot_fill_log_by_managing_namespaces() {
    let pooled = Pooled::new(NONE);
    let daemon = pooled.start("serve");
    let mut host = pooled.host();
    let started = std::time::Instant::now();
    for _ in 0..50 {
        let (status, nsid) = create(&mut host, 2048);
        assert_eq!(status, Status::SUCCESS);
        for sel in [0, 1] {
            assert_eq!(attachment(&mut host, nsid, sel), Status::SUCCESS);
        }
        assert_eq!(delete(&mut host, nsid), Status::SUCCESS);
    }
    drop(host);
    let kinds = [
        "the host manages namespaces",
        "namespaces were managed",
        " attached",
        " detached",
        "/pool/",
    ];
    crate::limits::ensure_few(&daemon.end().log, started, &kinds);
}
