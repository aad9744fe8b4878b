//! Counters at the control socket, and their values for shadow doorbells.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Command, Output};
use std::time::Duration;

use rustix::thread::CapabilitySet;

use crate::common::*;

fn stats(control: &str, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["stats", "--control", control])
        .args(more)
        .output()
        .unwrap()
}

/// The first controller's counters.
fn counters(control: &str) -> serde_json::Value {
    let output = stats(control, &["--json"]);
    assert!(output.status.success(), "{output:?}");
    let all: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    all["controllers"][0].clone()
}

#[test]
fn counters_are_reported() {
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("control.sock"));
    let daemon = Daemon::serve(&test_dir, &["--control", &control, "mem://4M"]);
    let mode = std::fs::metadata(&control).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(counters(&control)["host_reads"], 0);
    let mut host = Host::up(&test_dir.socket());
    for i in 0..5 {
        host.write(1, i, &pattern(i, 4096));
        host.read(1, i, 8192);
    }
    host.read(1, 0, 512);
    let told = counters(&control);
    assert_eq!(told["socket"], text(&test_dir.socket()));
    assert_eq!(
        (&told["host_reads"], &told["host_writes"]),
        (&6.into(), &5.into())
    );
    assert_eq!(told["bytes_read"], 5 * 8192 + 512);
    assert_eq!(told["bytes_written"], 5 * 4096);
    assert_eq!(told["queues"][1]["qid"], 1);
    assert_eq!(told["queues"][1]["commands"], 11);
    assert_eq!(told["queues"][1]["completions"], 11);
    let table = stats(&control, &[]);
    assert!(table.status.success());
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(
        table.contains("reads 6") && table.contains("writes 5"),
        "{table}"
    );
    drop(host);
    daemon.end();
    assert!(!test_dir.path("control.sock").exists());
    let nobody = stats(&control, &[]);
    assert_eq!(nobody.status.code(), Some(1));
    let line = String::from_utf8(nobody.stderr).unwrap();
    assert!(
        line.contains(&control) && line.contains("running"),
        "{line}"
    );
}

#[test]
fn malformed_control_request_is_refused() {
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("control.sock"));
    let daemon = Daemon::serve(&test_dir, &["--control", &control, "mem://1M"]);
    let noise = pattern(1, 100_000);
    for request in [
        &b"{\"method\":\"stats\"}\n"[..],
        b"GET /v1/reboot HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PUT /v1/stats HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\r\n\r\n",
        b"no HTTP",
        &noise,
        b"",
    ] {
        let mut stream = UnixStream::connect(&control).unwrap();
        stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        // The server may close before everything is written.
        let _ = stream.write_all(request);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(!String::from_utf8_lossy(&answer).contains("controllers"));
    }
    assert_eq!(counters(&control)["resets"], 0);
    daemon.end();
}

/// The host rings by stores, and by a message only when EventIdx asks for it. Pauses of all lengths
/// around the idle window let the store meet the worker in every state: polling, arming, asleep. A
/// lost wake-up is a command without an end.
#[test]
fn shadow_doorbells_wake_sleeping_worker() {
    const COMMANDS: u64 = 3000;
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("control.sock"));
    let daemon = Daemon::serve(
        &test_dir,
        &["--control", &control, "--idle-window", "30", "mem://4M"],
    );
    for round in 0..2u64 {
        let mut host = Host::up(&test_dir.socket());
        host.use_shadow_doorbells();
        let mut random = pattern(round, COMMANDS as usize).into_iter();
        for i in 0..COMMANDS {
            let data = pattern(i, 512);
            if i % 16 == 0 {
                host.write(1, i % 64, &data);
                assert!(host.read(1, i % 64, 512) == data);
            } else {
                host.flush(1);
            }
            match random.next().unwrap() {
                pause @ 0..100 => std::thread::sleep(Duration::from_micros(u64::from(pause))),
                100 => std::thread::sleep(Duration::from_millis(2)),
                _ => {}
            }
        }
        let queue = &counters(&control)["queues"][1];
        let [commands, mmio, shadow] = ["commands", "mmio_doorbells", "shadow_doorbells"]
            .map(|name| queue[name].as_u64().unwrap());
        assert!(commands >= COMMANDS && shadow > 0, "{queue}");
        assert!(mmio < 2 * commands, "every doorbell was a message: {queue}");
        // After a reset the old buffers mean nothing: doorbells are messages again.
        host.client.reset().unwrap();
        host.enable();
        host.create_queues(1, None);
        host.write(1, 0, &pattern(1, 512));
        assert!(host.shadow_pages_are_zero(), "old buffers were written");
    }
    daemon.end();
}

fn ask_for_stats(stream: &UnixStream) -> String {
    let mut stream = stream;
    let request = b"GET /v1/stats HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    stream.write_all(request).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Clients that send nothing, half a request, or a byte at a time do not keep another client from
/// the counters.
#[test]
fn slow_control_clients_block_no_other() {
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("control.sock"));
    let args = [
        "--control",
        &control,
        "--client-connects",
        "100000",
        "mem://1M",
    ];
    let daemon = Daemon::serve(&test_dir, &args);
    let connect = || {
        let stream = UnixStream::connect(&control).unwrap();
        stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        stream
    };
    assert!(ask_for_stats(&connect()).contains("controllers"));
    // The worker serves, and the main thread has the descriptors that it waits with: nothing more
    // is opened.
    drop(Host::up(&test_dir.socket()));
    let before = daemon.settled_descriptors();
    let first = connect();
    let slow: Vec<UnixStream> = (0..20).map(|_| connect()).collect();
    for stream in &slow {
        (&*stream).write_all(b"GET /v1/sta").unwrap();
    }
    let start = std::time::Instant::now();
    for _ in 0..20 {
        assert!(ask_for_stats(&connect()).contains("controllers"));
    }
    // Sequential service, with two seconds for each client, would take longer.
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
    // A thousand silent clients: the oldest are dropped.
    for round in 0..1000 {
        let stream = connect();
        if round % 100 == 0 {
            assert!(ask_for_stats(&connect()).contains("controllers"));
        }
        drop(stream);
    }
    let many: Vec<UnixStream> = (0..200).map(|_| connect()).collect();
    assert!(ask_for_stats(&connect()).contains("controllers"));
    assert!(descriptors(daemon.pid()) <= before + 64 + 8);
    // A client that takes longer than two seconds is dropped, whatever it sends meanwhile.
    assert_eq!((&first).read(&mut [0; 1]).unwrap(), 0);
    let late = connect();
    let mut bytes = b"GET /v1/stats HTTP/1.1\r\nX: y\r\n"
        .iter()
        .chain(std::iter::repeat(&b' '));
    eventually("it is dropped", || {
        std::thread::sleep(Duration::from_millis(50));
        let byte = [*bytes.next().unwrap()];
        (&late).write_all(&byte).is_err()
    });
    drop((slow, many));
    daemon.wait_descriptors(before);
    daemon.end();
}

#[test]
fn replaced_control_socket_is_left_alone_at_end() {
    let test_dir = TestDir::new();
    let control = test_dir.path("control.sock");
    let args = ["--control", &text(&control), "mem://1M"];
    for replaced in ["a file", "a directory", "a link"] {
        let daemon = Daemon::serve(&test_dir, &args);
        std::fs::remove_file(&control).unwrap();
        std::fs::remove_file(test_dir.socket()).unwrap();
        for path in [&control, &test_dir.socket()] {
            match replaced {
                "a file" => std::fs::write(path, "precious").unwrap(),
                "a directory" => std::fs::create_dir(path).unwrap(),
                _ => std::os::unix::fs::symlink("/etc/passwd", path).unwrap(),
            }
        }
        daemon.end();
        for path in [&control, &test_dir.socket()] {
            let left = std::fs::symlink_metadata(path).expect(replaced);
            if left.is_dir() {
                std::fs::remove_dir(path).unwrap()
            } else {
                std::fs::remove_file(path).unwrap()
            }
        }
    }
}

fn vnvme(control: &str, args: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(args)
        .env("VNVME_CONTROL", control)
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

/// Starts three disks with names that begin alike.
fn three(test_dir: &TestDir) -> (Daemon, String) {
    let control = text(&test_dir.path("control.sock"));
    let mut config = format!("[process]\ncontrol = {control:?}\n");
    for name in ["vm10.sock", "vm1.sock"] {
        let socket = text(&test_dir.path(name));
        let namespace = "[[controller.namespace]]\nvolume = \"mem://1M?iops=0\"\n";
        config += &format!("[[controller]]\nsocket = {socket:?}\n{namespace}");
    }
    let socket = text(&test_dir.path("m1"));
    config += &format!("[[vhost-user-blk]]\nsocket = {socket:?}\nvolume = \"mem://2M\"\n");
    let path = test_dir.path("config.toml");
    std::fs::write(&path, config).unwrap();
    let daemon = Daemon::spawn(&["serve", "--config", &text(&path)]);
    daemon.wait_listening(&test_dir.path("m1"));
    (daemon, control)
}

#[test]
fn disks_are_selected_exactly_and_listed_in_order() {
    let test_dir = TestDir::new();
    let (daemon, control) = three(&test_dir);
    let (code, table) = vnvme(&control, &["list"]);
    assert_eq!(code, Some(0), "{table}");
    let names: Vec<_> = table
        .lines()
        .map(|line| line.split(' ').next().unwrap())
        .collect();
    assert_eq!(names, ["NAME", "m1", "vm1", "vm10"], "{table}");
    let (_, list) = vnvme(&control, &["list", "--json"]);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    assert_eq!(list[0]["kind"], "vhost-user-blk");
    assert_eq!(list[1]["socket"], text(&test_dir.path("vm1.sock")));
    let (_, stats) = vnvme(&control, &["stats", "vm1", "--json"]);
    let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
    assert_eq!(stats["controllers"].as_array().unwrap().len(), 1);
    assert_eq!(stats["controllers"][0]["name"], "vm1");
    let (_, table) = vnvme(&control, &["stats"]);
    assert!(
        table.find("vm1 ").unwrap() < table.find("vm10 ").unwrap(),
        "{table}"
    );
    let (_, one) = vnvme(&control, &["show", "vm10", "--json"]);
    let one: serde_json::Value = serde_json::from_str(&one).unwrap();
    assert_eq!(one["name"], "vm10");
    for wrong in ["vm", "m", "10", "vm1.sock", "VM1", ""] {
        for verb in ["show", "stats", "remove"] {
            let (code, said) = vnvme(&control, &[verb, wrong]);
            assert_eq!(code, Some(1), "{verb} {wrong:?}: {said}");
        }
        let (code, said) = vnvme(&control, &["limits", wrong, "--iops", "1"]);
        assert_eq!(code, Some(1), "limits {wrong:?}: {said}");
    }
    let (_, said) = vnvme(&control, &["show", "vm"]);
    assert!(said.contains("no disk is called \"vm\""), "{said}");
    daemon.end();
}

/// Completions of a shell: commands, options, and disks of the running process.
#[test]
fn shell_completes_names_of_running_disks() {
    let test_dir = TestDir::new();
    let (daemon, control) = three(&test_dir);
    let complete = |words: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .arg("--")
            .args(words)
            .env("COMPLETE", "bash")
            .env("_CLAP_COMPLETE_INDEX", (words.len() - 1).to_string())
            .env("_CLAP_IFS", "\n")
            .env("VNVME_CONTROL", &control)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(complete(&["vnvme", "show", "vm1"]), "vm1\nvm10");
    assert_eq!(complete(&["vnvme", "stats", "m"]), "m1");
    assert!(complete(&["vnvme", "susp"]).contains("suspend"));
    assert!(complete(&["vnvme", "limits", "--read-i"]).contains("--read-iops"));
    let (code, script) = vnvme(&control, &["completion", "bash"]);
    assert!(code == Some(0) && script.contains("COMPLETE"), "{script}");
    daemon.end();
    // Without a process there are no names, and no error on the command line.
    assert_eq!(complete(&["vnvme", "show", "vm1"]), "");
}

#[test]
fn foreign_socket_is_told_from_control_socket() {
    let test_dir = TestDir::new();
    let (daemon, control) = three(&test_dir);
    for wrong in ["vm1.sock", "m1"] {
        let socket = text(&test_dir.path(wrong));
        for verb in [&["stats"][..], &["list"], &["limits", "vm1", "--iops", "1"]] {
            let (code, said) = vnvme(&socket, verb);
            assert!(
                code == Some(1) && said.contains("socket of a disk"),
                "{verb:?}: {said}"
            );
        }
    }
    // Also where the disk has a client.
    let host = Host::up(&test_dir.path("vm1.sock"));
    let (code, said) = vnvme(&text(&test_dir.path("vm1.sock")), &["list"]);
    assert!(
        code == Some(1) && said.contains("socket of a disk"),
        "{said}"
    );
    // The other way round.
    assert!(vfio_user::client::Client::connect(&control, WAIT_TIMEOUT).is_err());
    daemon.wait_log(|line| line.contains("does not speak HTTP"));
    drop(host);
    daemon.end();
}

/// The default socket, when no option sets one, and its owner.
#[test]
fn default_control_socket_belongs_to_first_daemon() {
    let test_dir = TestDir::new();
    let usual = test_dir.path("control.sock");
    let directory = text(usual.parent().unwrap());
    let spawn = |name: &str| {
        let socket = text(&test_dir.path(name));
        let variables = [("RUNTIME_DIRECTORY", &*directory), ("VNVME_CONTROL", "")];
        let daemon = Daemon::spawn_with_all(&variables, &["serve", "-s", &socket, "mem://1M"]);
        daemon.wait_listening(&test_dir.path(name));
        daemon
    };
    let first = spawn("a");
    let second = spawn("b");
    second.wait_log(|line| line.contains("no control socket") && line.contains("another server"));
    let (_, table) = vnvme(&text(&usual), &["list"]);
    assert!(table.contains("\na ") && !table.contains("\nb "), "{table}");
    let host = Host::up(&test_dir.path("b"));
    drop(host);
    second.end();
    first.end();
    assert!(!usual.exists());
}

/// Events for a listener: connected and disconnected clients, errors, limits.
#[test]
fn events_are_reported_immediately() {
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("control.sock"));
    let volume = "mem://1M?iops=2&burst=1ms";
    let daemon = Daemon::serve(&test_dir, &["--control", &control, volume]);
    let mut listening = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["events", "--json", "--control", &control])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let (told, tell) = std::sync::mpsc::channel();
    let stdout = std::io::BufReader::new(listening.stdout.take().unwrap());
    let reader = std::thread::spawn(move || {
        for line in std::io::BufRead::lines(stdout).map_while(Result::ok) {
            let event: serde_json::Value = serde_json::from_str(&line).unwrap();
            let _ = told.send(event);
        }
    });
    // The listener does not report its start: clients connect until an event arrives.
    let mut first = None;
    eventually("it listens", || {
        drop(Host::attach(&test_dir.socket()));
        first = tell.recv_timeout(Duration::from_millis(100)).ok();
        first.is_some()
    });
    assert_eq!(first.unwrap()["disk"], "vm");
    let mut host = Host::up(&test_dir.socket());
    let wait = |kind: &str| {
        eventually(kind, || {
            tell.recv_timeout(WAIT_TIMEOUT)
                .is_ok_and(|event| event["kind"] == kind)
        });
    };
    wait("attached");
    for i in 0..4 {
        host.write(1, i, &pattern(i, 512));
    }
    wait("limited");
    let status = host.write_with(1, 1 << 40, &[0; 512], false);
    assert!(!status.is_success());
    wait("error");
    drop(host);
    wait("detached");
    daemon.end();
    // The daemon's end is the listener's.
    eventually("the listener ends", || {
        listening.try_wait().unwrap().is_some()
    });
    reader.join().unwrap();
}

/// Another user of the group: asks, and changes nothing. One of no group does not get in.
#[test]
fn group_may_query_and_change_nothing() {
    let held = rustix::thread::capabilities(None).unwrap().effective;
    let needed = CapabilitySet::SETUID | CapabilitySet::SETGID | CapabilitySet::CHOWN;
    if !held.contains(needed) {
        testkit::skip("vnvme: the control socket as another user", "needs root");
        return;
    }
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("control.sock"));
    let args = [
        "--control",
        &control,
        "--control-group",
        "54321",
        "mem://1M?iops=7",
    ];
    let daemon = Daemon::serve(&test_dir, &args);
    let questions = test_dir.path("control-ro.sock");
    let metadata = std::fs::metadata(&questions).unwrap();
    assert_eq!(metadata.permissions().mode() & 0o777, 0o660);
    assert_eq!(std::os::unix::fs::MetadataExt::gid(&metadata), 54321);
    // A user of the group reaches both, and this program.
    let all = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(test_dir.path("."), all).unwrap();
    let program = test_dir.path("vnvme");
    put_program(env!("CARGO_BIN_EXE_vnvme"), &program);
    let ask = |group: u32, socket: &str, args: &[&str]| {
        let mut command = Command::new(&program);
        std::os::unix::process::CommandExt::uid(&mut command, 65534);
        std::os::unix::process::CommandExt::gid(&mut command, group);
        let output = command
            .args(args)
            .args(["--control", socket])
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).unwrap())
    };
    let questions = text(&questions);
    let (good, told) = ask(54321, &questions, &["limits"]);
    assert!(good && told.contains("requests/s          7"), "{told}");
    let (good, told) = ask(54321, &questions, &["limits", "vm", "--iops", "1"]);
    assert!(!good && told.contains("read-only"), "{told}");
    for (group, socket) in [(54321, &control), (54322, &questions), (54322, &control)] {
        let (good, told) = ask(group, socket, &["list"]);
        assert!(
            !good && told.contains("permission denied"),
            "{group} {socket}: {told}"
        );
    }
    assert!(limits_are(&control, 7));
    daemon.end();
    assert!(!std::fs::exists(&questions).unwrap());
}

fn limits_are(control: &str, iops: u64) -> bool {
    let (_, told) = vnvme(control, &["limits", "--json"]);
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    told[0]["iops"] == iops
}

/// Runs a command on a control socket, and returns its output as JSON.
fn json(control: &str, args: &[&str]) -> serde_json::Value {
    let (code, said) = vnvme(control, &[args, &["--json"]].concat());
    assert_eq!(code, Some(0), "{said}");
    serde_json::from_str(&said).unwrap()
}

#[test]
fn listed_disk_has_identity_state_and_client() {
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("ctl"));
    let nguid = "00112233445566778899aabbccddeeff";
    let volume = format!("mem://1M?nguid={nguid}");
    let args = ["--control", &control, "--serial", "S123", &volume];
    let daemon = Daemon::serve(&test_dir, &args);
    let free = json(&control, &["show", "vm"]);
    assert_eq!(free["state"], "free", "{free}");
    assert!(free.get("client").is_none(), "{free}");
    let host = Host::up(&test_dir.socket());
    let listed = json(&control, &["list"])[0].clone();
    let shown = json(&control, &["show", "vm"]);
    let comm = std::fs::read_to_string("/proc/self/comm").unwrap();
    for disk in [&listed, &shown] {
        assert_eq!(disk["state"], "attached", "{disk}");
        assert_eq!(disk["serial"], "S123", "{disk}");
        assert_eq!(disk["client_pid"], std::process::id(), "{disk}");
        assert_eq!(disk["client"]["pid"], std::process::id(), "{disk}");
        let uid = rustix::process::geteuid().as_raw();
        assert_eq!(disk["client"]["uid"], uid, "{disk}");
        assert_eq!(disk["client"]["program"], comm.trim_end(), "{disk}");
        assert_eq!(disk["namespaces"][0]["nguid"], nguid, "{disk}");
        assert_eq!(disk["namespaces"][0]["volume"], "mem://1M", "{disk}");
    }
    let client = format!("{} (pid {}, uid ", comm.trim_end(), std::process::id());
    for command in [&["list"][..], &["show", "vm"]] {
        let (_, said) = vnvme(&control, command);
        for words in ["attached", "S123", nguid, "mem://1M", &client] {
            assert!(said.contains(words), "{words}: {said}");
        }
    }
    daemon.wait_log(|line| line.contains("controller enabled") && line.contains("disk{name=vm}"));
    drop(host);
    daemon.end();
}

#[test]
fn fatal_error_has_format_of_log() {
    let test_dir = TestDir::new();
    let socket = text(&test_dir.socket());
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["serve", "--log-format", "json", "-s", &socket, "/none.raw"])
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let last = said.lines().last().unwrap();
    let line: serde_json::Value = serde_json::from_str(last).unwrap();
    assert_eq!(line["level"], "ERROR", "{said}");
    let message = line["fields"]["message"].as_str().unwrap();
    assert!(message.contains("/none.raw: no such file"), "{said}");
    assert!(line["timestamp"].as_str().unwrap().ends_with('Z'), "{said}");
}

#[test]
fn user_without_runtime_folder_is_told_of_control_option() {
    if !rustix::process::geteuid().is_root() {
        testkit::skip(
            "vnvme::control::user_without_runtime_folder_is_told_of_control_option",
            "only root can start a process of another user",
        );
        return;
    }
    let test_dir = TestDir::new();
    let program = test_dir.path("vnvme");
    put_program(env!("CARGO_BIN_EXE_vnvme"), &program);
    let everyone = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(test_dir.path(""), everyone).unwrap();
    let socket = text(&test_dir.socket());
    // A process of a test has no control socket, unless the variable is empty.
    let script = "unset XDG_RUNTIME_DIR RUNTIME_DIRECTORY; VNVME_CONTROL= exec \"$0\" \"$@\"";
    let program = text(&program);
    let args = ["serve", "--keeper", "off", "-s", &socket, "mem://1M"];
    let shell = std::path::Path::new("/bin/sh");
    let all = [&["-c", script, &program], &args[..]].concat();
    let daemon = Daemon::spawn_as(65534, shell, &all);
    let line = daemon.wait_log(|line| line.contains("no control socket"));
    assert!(
        line.contains("WARN") && line.contains("--control PATH"),
        "{line}"
    );
    daemon.wait_listening(&test_dir.socket());
    daemon.end();
}
