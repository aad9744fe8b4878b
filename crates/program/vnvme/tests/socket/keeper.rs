//! `--keeper process`: the process that serves is killed, and its clients notice a pause.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::Command;

use crate::common::*;
use crate::storage_faults::Loop;
use crate::vhost_blk::features_of;
use control::Client;
use control::api::DiskKind;
use fuse_disk::{Fault, RequestKind};
use nvme::{NvmOpcode, Status};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testkit::huge::HugePages;

/// The process that serves under a daemon which is a keeper, if there is one.
pub fn serving(keeper: u32) -> Option<Pid> {
    let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).ok()?;
    let is_standby = |child: &&str| {
        let line = fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains("--stand-by")
    };
    let child = children
        .split_whitespace()
        .find(|child| !is_standby(child))?;
    Pid::from_raw(child.parse().ok()?)
}

const GOES_ON: &str = "this one goes on";

/// Kills the process that serves; its successor has begun when this returns.
pub fn kill_serving(daemon: &Daemon) {
    let pid = serving(daemon.pid()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    eventually("another process follows", || {
        serving(daemon.pid()).is_some_and(|next| next != pid)
    });
}

fn serve(test_dir: &TestDir, args: &[&str]) -> Daemon {
    let socket = text(&test_dir.socket());
    let first = ["serve", "--socket", &socket, "--keeper", "process"];
    start(test_dir, &[&first, args].concat())
}

/// Starts a daemon and waits until it is ready: a process that is killed before has no successor.
pub fn start(test_dir: &TestDir, args: &[&str]) -> Daemon {
    start_in(test_dir, args, &[])
}

/// Starts a daemon as [`start`] does, with more variables of its environment.
pub fn start_in(test_dir: &TestDir, args: &[&str], more: &[(&str, &str)]) -> Daemon {
    let path = test_dir.path("ready");
    let _ = fs::remove_file(&path);
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    let notify = text(&path);
    let variables = [KEEPER_AS_CONFIGURED, ("NOTIFY_SOCKET", &notify)];
    let daemon = Daemon::spawn_with_all(&[&variables, more].concat(), args);
    let mut message = [0; 64];
    let len = manager.recv(&mut message).unwrap();
    assert_eq!(&message[..len], b"READY=1\n");
    daemon
}

#[test]
fn client_does_not_notice_killed_process() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 32 << 20);
    let daemon = serve(&test_dir, &[&disk, "mem://8M", "null://1G?read-zeroes=on"]);
    let mut host = Host::attach(&test_dir.socket());
    host.assign_vectors(3);
    host.enable();
    host.create_queues(2, Some(1));
    let mut written = Vec::new();
    for round in 0..8u64 {
        let data = pattern(round + 1, 64 << 10);
        for nsid in [1, 2] {
            host.write(nsid, 128 * round, &data);
        }
        written.push(data);
        if round == 4 {
            // The process need not be able to notice.
            let pid = serving(daemon.pid()).unwrap();
            kill_process(pid, Signal::STOP).unwrap();
        }
        kill_serving(&daemon);
        // Registers, the admin queue, and both namespaces are unchanged.
        assert_eq!(host.read32(nvme::regs::CSTS) & 1, 1, "ready");
        assert_eq!(host.identify_controller().nn.get(), 3);
        for (lba, data) in (0..).step_by(128).zip(&written) {
            for nsid in [1, 2] {
                let read = host.read(nsid, lba, data.len());
                assert!(read == *data, "namespace {nsid}, round {round}");
            }
        }
        assert_eq!(host.read(3, 7, 512), [0; 512]);
        // A process that is killed before that logs nothing.
        eventually("it has said so", || {
            daemon.count(GOES_ON) == round as usize + 1
        });
    }
    assert!(host.interrupts(1) > 0);
    drop(host);
    // The next client finds the disk as one that was never killed.
    let mut host = Host::up(&test_dir.socket());
    assert!(host.read(2, 0, written[0].len()) == written[0]);
    drop(host);
    let ended = daemon.end();
    assert!(!test_dir.socket().exists());
    assert!(
        !ended.log.iter().any(|line| line.contains("ERROR")),
        "{ended:#?}"
    );
    // Data that the kernel has is in the file.
    assert!(test_dir.bytes("disk.raw", 0, written[0].len()) == written[0]);
}

#[test]
fn commands_in_flight_are_answered_once_after_kill() {
    let test_dir = TestDir::new();
    let daemon = serve(&test_dir, &["null://1G?latency=400ms&read-zeroes=on"]);
    let mut host = Host::up(&test_dir.socket());
    for _ in 0..4 {
        let mut waiting: Vec<u16> = (0..16)
            .map(|lba| {
                let read = host.transfer(NvmOpcode::READ, 1, lba, 4096, 4 << 20);
                host.submit(1, read)
            })
            .collect();
        kill_serving(&daemon);
        while !waiting.is_empty() {
            let completion = host.completion(1);
            let cid = completion.cid.get();
            let test_dir = waiting.iter().position(|waits| *waits == cid);
            waiting.remove(test_dir.unwrap_or_else(|| panic!("nobody waits for {cid}")));
            assert_eq!(completion.status(), Status::SUCCESS);
        }
        std::thread::sleep(std::time::Duration::from_millis(500));
        assert!(host.try_completion(1).is_none(), "a second answer");
    }
    drop(host);
    daemon.end();
}

/// A write of the killed process is still in flight to the disk. It would end up on top of the next
/// process's writes. The next process therefore waits for it before it answers anything.
#[test]
fn next_process_waits_for_old_write() {
    let test_dir = TestDir::new();
    let Some(disk) = breaking(
        "keeper::next_process_waits_for_old_write",
        &test_dir,
        8 << 20,
    ) else {
        return;
    };
    let Some(device) = Loop::new(&disk.path()) else {
        return;
    };
    let daemon = serve(&test_dir, &[&text(&device.0)]);
    let mut host = Host::up(&test_dir.socket());
    disk.fail(RequestKind::Write, 0..4096, 1, Fault::Held);
    let at = 4 << 20;
    host.ram.write_all_at(&pattern(1, 4096), at).unwrap();
    let write = host.transfer(NvmOpcode::WRITE, 1, 0, 4096, at);
    host.submit(1, write);
    assert!(disk.wait_held(1, WAIT_TIMEOUT));
    kill_serving(&daemon);
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert!(host.try_completion(1).is_none(), "it was not waited for");
    assert_eq!(daemon.count(GOES_ON), 0);
    assert_eq!(disk.release(), 1);
    assert_eq!(host.completion(1).status(), Status::SUCCESS);
    host.write(1, 0, &pattern(2, 4096));
    assert!(host.read(1, 0, 4096) == pattern(2, 4096));
    assert!(disk.bytes(0..4096) == pattern(2, 4096));
    drop(host);
    let ended = daemon.end();
    // By one process, which has waited: not by many, each of which found the disk in use.
    let served = ended.log.iter().filter(|line| line.contains(GOES_ON));
    let served: Vec<&String> = served.collect();
    assert!(
        served.len() == 1 && served[0].contains("restarts=1"),
        "{ended:#?}"
    );
}

#[test]
fn client_connecting_during_restart_waits() {
    let test_dir = TestDir::new();
    let daemon = serve(&test_dir, &["mem://1M"]);
    for _ in 0..3 {
        // The process does not listen yet.
        kill_serving(&daemon);
        let mut host = Host::up(&test_dir.socket());
        host.write(1, 0, &[1; 512]);
        drop(host);
    }
    daemon.end();
}

/// The next process serves the disks of the process before, not those of the changed configuration.
#[test]
fn restarted_process_serves_previous_configuration() {
    let test_dir = TestDir::new();
    let config = test_dir.path("vnvme.toml");
    let (one, other) = (test_dir.path("one.sock"), test_dir.path("other.sock"));
    let table = format!(
        "[[controller]]\nsocket = {:?}\nnamespace = [{{ volume = \"mem://1M\" }}]\n",
        text(&one)
    );
    fs::write(&config, table).unwrap();
    let control = test_dir.path("control");
    let allow = text(test_dir.path("x").parent().unwrap());
    let (config_file, control_socket) = (text(&config), text(&control));
    let args = [
        "daemon",
        "--config",
        &config_file,
        "--control",
        &control_socket,
        "--allow",
        &allow,
        "--keeper",
        "process",
    ];
    let daemon = start(&test_dir, &args);
    daemon.wait_listening(&one);
    let client = Client::new(vec![control.clone()]).unwrap();
    let table = json!({"socket": text(&other), "namespace": [{"volume": "mem://1M"}]});
    let Value::Object(table) = table else {
        unreachable!()
    };
    client.add(DiskKind::Controller, table).unwrap();
    let mut first = Host::up(&one);
    let mut second = Host::up(&other);
    first.write(1, 0, &pattern(1, 4096));
    second.write(1, 0, &pattern(2, 4096));
    fs::write(&config, "this is no TOML [").unwrap();
    for _ in 0..2 {
        kill_serving(&daemon);
        assert!(first.read(1, 0, 4096) == pattern(1, 4096));
        assert!(second.read(1, 0, 4096) == pattern(2, 4096));
        let disks = client.disks().unwrap().into_iter();
        let mut names: Vec<String> = disks.map(|disk| disk.name).collect();
        names.sort();
        assert_eq!(names, ["one", "other"]);
    }
    let mut process = Value::Null;
    // The process answers a moment before it marks that it serves: the pause is known then.
    eventually("it tells of its pause", || {
        process = all_stats(&text(&control))["measured"]["process"].clone();
        process["last_pause_ns"].as_u64().is_some_and(|ns| ns > 0)
    });
    let pid = serving(daemon.pid()).unwrap().as_raw_nonzero().get();
    assert_eq!(
        (&process["pid"], &process["keeper"]),
        (&json!(pid), &json!(daemon.pid()))
    );
    assert_eq!(process["restarts"], 2);
    client.remove("other", true).unwrap();
    kill_serving(&daemon);
    assert_eq!(client.disks().unwrap().len(), 1);
    assert!(first.read(1, 0, 4096) == pattern(1, 4096));
    drop((first, second));
    daemon.end();
    assert!(!one.exists() && !other.exists());
}

#[test]
fn volume_in_huge_pages_survives_kill() {
    let _pages = match HugePages::add(3) {
        Ok(pages) => pages,
        Err(why) => return testkit::skip("vnvme::huge", why),
    };
    let test_dir = TestDir::new();
    let daemon = serve(&test_dir, &["mem://5M?huge=2M"]);
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &pattern(1, 4096));
    for round in 2..4 {
        kill_serving(&daemon);
        assert!(host.read(1, 0, 4096) == pattern(round - 1, 4096));
        host.write(1, 0, &pattern(round, 4096));
    }
    drop(host);
    daemon.end();
}

#[test]
fn keeper_and_process_end_together() {
    let test_dir = TestDir::new();
    let daemon = serve(&test_dir, &["mem://1M"]);
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &[1; 512]);
    let pid = serving(daemon.pid()).unwrap();
    let anonymous = status_kib(daemon.pid(), "RssAnon:");
    assert!(
        anonymous < 2048,
        "the keeper has {anonymous} KiB of its own"
    );
    daemon.kill();
    eventually("the process that serves has ended", || {
        rustix::process::test_kill_process(pid).is_err()
    });
}

#[test]
fn process_failing_at_start_is_not_restarted() {
    let test_dir = TestDir::new();
    let missing = text(&test_dir.path("missing.raw"));
    let socket = text(&test_dir.socket());
    let args = [
        "serve", "--keeper", "process", "--socket", &socket, &missing,
    ];
    let ended = Daemon::spawn(&args).wait();
    assert_eq!(ended.status.code(), Some(1), "{ended:#?}");
    let said = ended.log.iter().filter(|line| line.contains("missing.raw"));
    assert_eq!(said.count(), 1, "{ended:#?}");
    // A mistake of the command line is found before there is a keeper.
    let ended = Daemon::spawn(&["serve", "--keeper", "process", "--socket"]).wait();
    assert_eq!(ended.status.code(), Some(2), "{ended:#?}");
}

#[test]
fn keeper_forwards_notifications_to_service_manager() {
    let test_dir = TestDir::new();
    let path = test_dir.path("manager");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    let socket = text(&test_dir.socket());
    let args = [
        "serve", "--keeper", "process", "--socket", &socket, "mem://1M",
    ];
    let daemon = Daemon::spawn_with("NOTIFY_SOCKET", &text(&path), &args);
    let told = || {
        let mut message = [0; 64];
        let len = manager.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..len]).into_owned()
    };
    assert_eq!(told(), "READY=1\n");
    kill_serving(&daemon);
    assert_eq!(told(), "READY=1\n");
    daemon.end();
    assert_eq!(told(), "STOPPING=1\n");
}

/// The program's file is replaced, as a package manager does, and then the process.
#[test]
fn upgrade_is_short_pause() {
    let test_dir = TestDir::new();
    let program = test_dir.path("vnvme");
    let put = |from: &str| {
        let new = test_dir.path("new");
        put_program(from, &new);
        fs::rename(&new, &program).unwrap();
        fs::metadata(&program).unwrap().ino()
    };
    put(env!("CARGO_BIN_EXE_vnvme"));
    let socket = text(&test_dir.socket());
    let args = [
        "serve", "--keeper", "process", "--socket", &socket, "mem://4M",
    ];
    let daemon = Daemon::spawn_program(&program, &args);
    daemon.wait_listening(&test_dir.socket());
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &pattern(1, 4096));
    let runs = |file: u64| {
        let exe = |pid: Pid| fs::metadata(format!("/proc/{}/exe", pid.as_raw_nonzero()));
        serving(daemon.pid()).is_some_and(|pid| exe(pid).is_ok_and(|exe| exe.ino() == file))
    };
    for round in 0..3 {
        let file = put(env!("CARGO_BIN_EXE_vnvme"));
        assert!(!runs(file));
        daemon.signal(Signal::USR2);
        eventually("the new program serves", || {
            daemon.count("upgraded:") == round + 1
        });
        assert!(runs(file));
        assert!(host.read(1, 0, 4096) == pattern(1, 4096));
        // The next process runs the same program.
        kill_serving(&daemon);
        assert!(host.read(1, 0, 4096) == pattern(1, 4096));
        assert!(runs(file));
    }
    // Another program changes nothing.
    let before = serving(daemon.pid());
    for other in ["/bin/false", "/bin/true", "/bin/echo"] {
        put(other);
        let refused = daemon.count("no upgrade:");
        daemon.signal(Signal::USR2);
        eventually("it is refused", || daemon.count("no upgrade:") > refused);
    }
    fs::remove_file(&program).unwrap();
    let refused = daemon.count("no upgrade:");
    daemon.signal(Signal::USR2);
    eventually("it is refused", || daemon.count("no upgrade:") > refused);
    assert_eq!(serving(daemon.pid()), before);
    assert!(host.read(1, 0, 4096) == pattern(1, 4096));
    drop(host);
    daemon.end();
}

/// The command reports the result, whatever the new program does.
#[test]
fn upgrade_command_reports_result() {
    let test_dir = TestDir::new();
    let program = test_dir.path("vnvme");
    let own = env!("CARGO_BIN_EXE_vnvme");
    let put = |from: &str| {
        let new = test_dir.path("new");
        put_program(from, &new);
        fs::rename(&new, &program).unwrap();
    };
    put(own);
    let (socket, control) = (text(&test_dir.socket()), text(&test_dir.path("control")));
    let args = |keeper: &'static str| {
        let (socket, control) = (socket.clone(), control.clone());
        let words = ["serve", "--keeper", keeper, "--socket"].map(str::to_owned);
        let rest = [socket, "--control".into(), control, "mem://4M".into()];
        [words, rest].concat()
    };
    let upgrade = || {
        let words = ["upgrade", "--json", "--control", &control];
        let output = Command::new(own).args(words).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        match output.status.code() {
            Some(0) => Ok(serde_json::from_slice::<Value>(&output.stdout).unwrap()),
            Some(1) => Err(said),
            code => panic!("{code:?}: {said}"),
        }
    };
    let daemon = Daemon::spawn_program(&program, &args("off"));
    daemon.wait_listening(&test_dir.socket());
    let why = upgrade().unwrap_err();
    assert!(
        why.contains("no keeper holds the disks of this process"),
        "{why}"
    );
    daemon.end();

    let daemon = Daemon::spawn_program(&program, &args("process"));
    daemon.wait_listening(&test_dir.socket());
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &pattern(1, 4096));
    eventually("it serves", || is_ready(&control));
    let said = upgrade().unwrap();
    let pid = serving(daemon.pid()).unwrap().as_raw_nonzero().get();
    assert_eq!(said["pid"], json!(pid), "{said}");
    assert!(said["pause_ns"].as_u64().is_some_and(|ns| ns > 0), "{said}");
    let name = &Client::new(vec![(&control).into()])
        .unwrap()
        .disks()
        .unwrap()[0]
        .name;
    let words = ["show", name, "--json", "--control", &control];
    let shown = Command::new(own).args(words).output().unwrap();
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    let wanted = json!({ "pid": pid, "keeper": daemon.pid() });
    assert_eq!((&shown["process"], &shown["name"]), (&wanted, &json!(name)));
    put("/bin/false");
    let why = upgrade().unwrap_err();
    assert!(why.contains("the new program does not know how"), "{why}");
    assert_eq!(serving(daemon.pid()).unwrap().as_raw_nonzero().get(), pid);
    assert!(host.read(1, 0, 4096) == pattern(1, 4096));
    drop(host);
    daemon.end();
    assert!(upgrade().is_err(), "nothing runs");
}

fn is_ready(control: &str) -> bool {
    let client = Client::new(vec![control.into()]).unwrap();
    client
        .stats()
        .is_ok_and(|stats| stats.measured.process.ready)
}

/// A keeper is the default. Block devices of the host, and configurations that can be read only
/// once, have none.
#[test]
fn keeper_is_default_where_possible() {
    let test_dir = TestDir::new();
    let socket = text(&test_dir.socket());
    let daemon = start(&test_dir, &["serve", "--socket", &socket, "mem://1M"]);
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &pattern(1, 4096));
    kill_serving(&daemon);
    assert!(host.read(1, 0, 4096) == pattern(1, 4096));
    drop(host);
    daemon.end();

    let test_dir = TestDir::new();
    let pipe = test_dir.path("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
    let table = format!(
        "[[controller]]\nsocket = {:?}\nnamespace = [{{ volume = \"mem://1M\" }}]\n",
        text(&test_dir.socket())
    );
    let path = pipe.clone();
    let writer = std::thread::spawn(move || fs::write(path, table).unwrap());
    let daemon = start(&test_dir, &["serve", "--config", &text(&pipe)]);
    writer.join().unwrap();
    assert_eq!(serving(daemon.pid()).filter(|_| is_keeper(&daemon)), None);
    daemon.wait_log(|line| line.contains("no keeper: "));
    assert_eq!(daemon.count("no keeper: "), 1, "{:?}", daemon.log());
    daemon.end();
}

/// The keeper's resources are free only a moment later, when the process that served has ended,
/// too.
#[test]
fn killed_keeper_can_be_restarted_at_once() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 8 << 20);
    let (control, socket) = (text(&test_dir.path("control")), text(&test_dir.socket()));
    let args = ["serve", "--socket", &socket, "--control", &control, &disk];
    for round in 1..6 {
        let daemon = start(&test_dir, &args);
        fs::remove_file(test_dir.path("ready")).unwrap();
        let mut host = Host::up(&test_dir.socket());
        if round > 1 {
            assert!(host.read(1, 0, 4096) == pattern(round - 1, 4096));
        }
        host.write(1, 0, &pattern(round, 4096));
        eventually("it serves", || is_ready(&control));
        daemon.kill();
    }
}

fn is_keeper(daemon: &Daemon) -> bool {
    let comm = fs::read_to_string(format!("/proc/{}/comm", daemon.pid())).unwrap();
    comm.trim() == "vnvme-keeper"
}

#[test]
fn serving_process_has_name_of_its_own() {
    let test_dir = TestDir::new();
    let daemon = serve(&test_dir, &["mem://1M"]);
    let pid = serving(daemon.pid()).unwrap().as_raw_nonzero();
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
    assert_eq!(comm.trim(), "vnvme-worker");
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap();
    assert!(line.starts_with(b"vnvme-worker\0serve\0"), "{line:?}");
    daemon.end();
}

/// Front-ends of the export connect again, to the same socket.
#[test]
fn export_beside_controller_is_restarted() {
    let test_dir = TestDir::new();
    let config = test_dir.path("vnvme.toml");
    let export = test_dir.path("export.sock");
    let table = format!(
        "[process]\nkeeper = \"process\"\n\
         [[controller]]\nsocket = {:?}\nnamespace = [{{ volume = \"mem://1M\" }}]\n\
         [[vhost-user-blk]]\nsocket = {:?}\nvolume = \"mem://1M\"\n",
        text(&test_dir.socket()),
        text(&export)
    );
    fs::write(&config, table).unwrap();
    let daemon = start(&test_dir, &["serve", "--config", &text(&config)]);
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &pattern(1, 4096));
    let file = || fs::metadata(&export).unwrap().ino();
    let first = file();
    for round in 1..4 {
        let front = UnixStream::connect(&export).unwrap();
        front.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        features_of(&front);
        kill_serving(&daemon);
        // The next process does not serve yet: a connecting client waits, and is not refused.
        let again = UnixStream::connect(&export).unwrap();
        again.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        features_of(&again);
        assert_eq!((&front).read(&mut [0; 1]).unwrap(), 0, "the end is seen");
        assert!(host.read(1, 0, 4096) == pattern(1, 4096));
        assert_eq!(file(), first, "round {round}");
    }
    drop(host);
    daemon.end();
    assert!(!export.exists() && !test_dir.socket().exists());
}

/// A removed export leaves no socket with the keeper, which would be the last to close the clients
/// that wait there.
#[test]
fn removed_export_is_not_kept() {
    let test_dir = TestDir::new();
    let config = test_dir.path("vnvme.toml");
    fs::write(&config, "").unwrap();
    let (control, export) = (test_dir.path("control"), test_dir.path("export.sock"));
    let allow = text(export.parent().unwrap());
    let (config, control_socket) = (text(&config), text(&control));
    let args = [
        "daemon",
        "--config",
        &config,
        "--control",
        &control_socket,
        "--allow",
        &allow,
        "--keeper",
        "process",
    ];
    let daemon = start(&test_dir, &args);
    let client = Client::new(vec![control.clone()]).unwrap();
    let add = || {
        let table = json!({"socket": text(&export), "volume": "null://1M"});
        let Value::Object(table) = table else {
            unreachable!()
        };
        client.add(DiskKind::VhostUserBlk, table).unwrap();
        features_of(&UnixStream::connect(&export).unwrap());
    };
    // Sockets of the file: a keeper that is queried has other descriptors for a moment.
    let kept = || {
        let table = fs::read_to_string("/proc/net/unix").unwrap();
        let listens = |line: &&str| line.ends_with(&*text(&export)) && line.contains("00010000");
        table.lines().filter(listens).count()
    };
    add();
    kill_serving(&daemon);
    features_of(&UnixStream::connect(&export).unwrap());
    assert_eq!(kept(), 1);
    client.remove("export", true).unwrap();
    eventually("nobody has it", || kept() == 0);
    // Another one at the same place is a new one.
    add();
    kill_serving(&daemon);
    features_of(&UnixStream::connect(&export).unwrap());
    daemon.end();
    assert!(!export.exists());
}

/// Data of a front-end may keep the receiver process of a killed process from ending. The
/// connections of all other front-ends end all the same.
#[test]
fn front_end_connection_ends_despite_hanging_receiver() {
    let test_dir = TestDir::new();
    let export = test_dir.path("export.sock");
    let socket = text(&export);
    let daemon = serve(
        &test_dir,
        &["mem://1M", "--vhost-user-blk", &socket, "mem://1M"],
    );
    let front = UnixStream::connect(&export).unwrap();
    front.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    features_of(&front);
    let receivers = receivers(&daemon);
    let pid = receivers[0];
    // A duplicate of its sockets that lives as long as this test.
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    let dups: Vec<_> = (3..64)
        .filter_map(|fd| {
            let flags = rustix::process::PidfdGetfdFlags::empty();
            rustix::process::pidfd_getfd(&pidfd, fd, flags).ok()
        })
        .collect();
    if dups.is_empty() {
        let what = "vnvme::keeper::front_end_connection_ends_despite_hanging_receiver";
        return testkit::skip(what, "a child's descriptors cannot be taken");
    }
    kill_serving(&daemon);
    assert_eq!((&front).read(&mut [0; 1]).unwrap(), 0, "the end is seen");
    drop(dups);
    daemon.end();
}

/// Returns the receiver process of the serving process, and the process that has started it.
fn receivers(daemon: &Daemon) -> Vec<Pid> {
    let pid = serving(daemon.pid()).unwrap().as_raw_nonzero().get();
    let all = fs::read_dir("/proc").unwrap().flatten();
    let all = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let read = |process: i32, file: &str| {
        let text = fs::read(format!("/proc/{process}/{file}")).unwrap_or_default();
        String::from_utf8_lossy(&text).into_owned()
    };
    let parent = |process: i32| {
        let status = read(process, "status");
        let line = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        line.and_then(|id| id.trim().parse::<i32>().ok())
            .unwrap_or(0)
    };
    // Another process has started it, which this one has started.
    let is_receiver = |process: &i32| {
        let is_ours = [parent(*process), parent(parent(*process))].contains(&pid);
        is_ours && read(*process, "cmdline").contains("receive-descriptors")
    };
    let receivers: Vec<Pid> = all.filter(is_receiver).filter_map(Pid::from_raw).collect();
    assert!(!receivers.is_empty());
    receivers
}

/// The receiver process of a killed process may end late, and does no harm.
#[test]
fn late_receiver_leaves_clients_alone() {
    let test_dir = TestDir::new();
    let daemon = serve(&test_dir, &["mem://1M"]);
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &pattern(1, 4096));
    for round in 1..4 {
        let receivers = receivers(&daemon);
        for receiver in &receivers {
            kill_process(*receiver, Signal::STOP).unwrap();
        }
        kill_serving(&daemon);
        assert!(host.read(1, 0, 4096) == pattern(1, 4096));
        eventually("it has said so", || daemon.count(GOES_ON) == round);
        for receiver in &receivers {
            kill_process(*receiver, Signal::CONT).unwrap();
            eventually("the receiver has ended", || {
                let status = format!("/proc/{}/status", receiver.as_raw_nonzero());
                fs::read_to_string(status).map_or(true, |status| status.contains("zombie"))
            });
        }
        assert!(host.read(1, 0, 4096) == pattern(1, 4096));
    }
    drop(host);
    daemon.end();
}
