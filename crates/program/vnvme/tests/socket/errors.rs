//! Mistakes of users, each with the whole message and the exit status. [`crate::mistakes`] has
//! more, with words of their messages.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use vfio_user::client::{Client, ClientError};

mod messages;

use crate::common::*;
use messages::{COMMANDS, MISTAKES, REFUSED, TWO};

/// Returns the command lines of a text, each with the lines that follow it.
fn cases(text: &str) -> impl Iterator<Item = (&str, Vec<&str>)> {
    text.split("\n$").skip(1).map(|case| {
        let (args, rest) = case.split_once('\n').unwrap();
        let rest = rest.lines().filter(|line| !line.starts_with('#'));
        (args.trim(), rest.collect())
    })
}

#[test]
fn each_mistake_has_own_message_and_exit_status() {
    let test_dir = TestDir::new();
    let dir = test_dir.path("");
    fs::File::create(test_dir.path("disk.raw"))
        .and_then(|file| file.set_len(1 << 20))
        .unwrap();
    fs::write(test_dir.path("empty.toml"), "# nothing\n").unwrap();
    // Which CPUs there are depends on the machine.
    let cpus = |line: &str| match line.split_once("; it may use ") {
        Some((words, _)) => format!("{words}; it may use CPUS"),
        None => line.to_owned(),
    };
    let mut wrong = Vec::new();
    for (args, mut lines) in cases(MISTAKES) {
        let (status, message) = lines.pop().unwrap().split_once(' ').unwrap();
        let status: i32 = status.parse().unwrap();
        let file = lines
            .iter()
            .map(|line| line.strip_prefix("| ").unwrap().to_owned() + "\n");
        let file: String = file.collect();
        fs::write(test_dir.path("c.toml"), format!("{TWO}{file}")).unwrap();
        let mut words: Vec<&str> = args.split_whitespace().collect();
        if !words.first().is_some_and(|word| COMMANDS.contains(word)) {
            words.insert(0, "serve");
        }
        let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(&words)
            .current_dir(&dir)
            .env_remove("VNVME_LOG")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        // Usage follows the error of a command line; the log may precede the rest.
        let line = match status {
            2 => text.lines().next(),
            _ => text.lines().rfind(|line| !line.is_empty()),
        };
        let found = (output.status.code(), cpus(line.unwrap_or_default()));
        if found != (Some(status), message.to_owned()) {
            wrong.push(format!(
                "{args} {file:?}\n  wanted {status} {message}\n  found  {found:?}"
            ));
        }
        assert!(
            !test_dir.path("a.sock").exists(),
            "{args}: its socket is left"
        );
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(cases(MISTAKES).count() > 90);
}

/// The hint after an error of the command line shows the correct form.
#[test]
fn key_given_as_option_gets_hint() {
    for (args, tip) in [
        (
            "add controller --socket /run/a mem://1M",
            "words here: socket=VALUE",
        ),
        (
            "add controller --io-queue=9 mem://1M",
            "words here: io-queues=VALUE",
        ),
        ("add ublk mem://1M --queues 2", "words here: queues=VALUE"),
        ("attach a mem://1M --nsid 2", "words here: nsid=VALUE"),
        // Options that there are have clap's own tip.
        (
            "attach a mem://1M --contrl x",
            "a similar argument exists: '--control'",
        ),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(args.split_whitespace())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args}: {told}");
        assert!(told.contains(tip), "{args}: {told}");
        let to_pass = told.contains("as a value, use '--");
        assert!(!to_pass, "no volume is meant: {told}");
    }
}

/// A controller, one of a file, an export.
const SERVED: &str = "\
[[controller]]
name = \"a\"
socket = \"DIR/a.sock\"
namespace = [{ volume = \"mem://1M\" }]
[[controller]]
name = \"f\"
socket = \"DIR/f.sock\"
namespace = [{ volume = \"DIR/disk.raw\" }]
[[vhost-user-blk]]
name = \"b\"
socket = \"DIR/b.sock\"
volume = \"mem://1M\"
";

#[test]
fn change_refused_by_daemon_changes_nothing() {
    let test_dir = TestDir::new();
    let dir = text(&test_dir.path("x"));
    let dir = dir.strip_suffix("/x").unwrap();
    fs::File::create(test_dir.path("disk.raw"))
        .and_then(|file| file.set_len(1 << 20))
        .unwrap();
    let served = SERVED.replace("DIR", dir);
    fs::write(test_dir.path("served.toml"), &served).unwrap();
    let more = format!(
        "{served}[[controller]]\nsocket = \"{dir}/new.sock\"\nnamespace = [{{ volume = \"mem://1M\" }}]\n\
         [[controller]]\nsocket = \"{dir}/q.sock\"\nnamespace = [{{ volume = \"{dir}/none.raw\" }}]\n"
    );
    fs::write(test_dir.path("more.toml"), more).unwrap();
    let control = text(&test_dir.path("ctl"));
    let config = text(&test_dir.path("served.toml"));
    let args = [
        "daemon",
        "--config",
        &config,
        "--control",
        &control,
        "--allow",
        dir,
    ];
    let daemon = Daemon::spawn(&args);
    for socket in ["a.sock", "f.sock", "b.sock"] {
        daemon.wait_listening(&test_dir.path(socket));
    }
    let run = |line: &str| {
        let words = line.replace("DIR", dir);
        let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(words.split_whitespace())
            .current_dir(dir)
            .env("VNVME_CONTROL", &control)
            .env_remove("VNVME_LOG")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        let last = told.lines().rfind(|line| !line.is_empty());
        let last = last.unwrap_or_default().replace(dir, "DIR");
        (output.status.code(), last, output.stdout)
    };
    let (status, _, before) = run("list --json");
    assert_eq!(status, Some(0));
    let mut wrong = Vec::new();
    for (line, message) in cases(REFUSED) {
        let (status, found, _) = run(line);
        if status != Some(1) || [found.as_str()] != message[..] {
            wrong.push(format!(
                "{line}\n  wanted {message:?}\n  found  {status:?} {found}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // A reload of an invalid configuration.
    fs::write(test_dir.path("served.toml"), "[[controler]]\n").unwrap();
    let (status, found, _) = run("reload");
    assert_eq!(status, Some(1));
    assert!(found.contains("did you mean `controller`"), "{found}");
    let (_, _, after) = run("list --json");
    assert_eq!(String::from_utf8(after), String::from_utf8(before));
    for socket in ["new.sock", "q.sock"] {
        assert!(!test_dir.path(socket).exists(), "{socket} is left");
    }
    daemon.end();
}

/// A path that is longer than a socket's address has room for.
#[test]
fn socket_path_too_long_is_explained() {
    let test_dir = TestDir::new();
    let long = format!("{}/{}.sock", text(&test_dir.path("")), "a".repeat(200));
    let socket = text(&test_dir.socket());
    for args in [
        &["serve", "-s", &long, "mem://1M"][..],
        &["serve", "-s", &socket, "--control", &long, "mem://1M"],
        &["list", "--control", &long],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(args)
            .env("VNVME_CONTROL", "none")
            .output()
            .unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(
            told.contains("the path of a socket has at most 107 bytes"),
            "{told}"
        );
        assert!(!test_dir.socket().exists());
    }
}

/// The client's whole answer.
fn answer(test_dir: &TestDir, socket: &str, request: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(test_dir.path(socket)).unwrap();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    stream.write_all(request).unwrap();
    let mut all = Vec::new();
    let mut piece = [0; 4096];
    // Unread bytes make the end of the connection an error.
    while let Ok(len @ 1..) = stream.read(&mut piece) {
        all.extend_from_slice(&piece[..len]);
    }
    all
}

#[test]
fn clients_at_wrong_socket_are_named_and_answered() {
    let test_dir = TestDir::new();
    let export = text(&test_dir.path("blk.sock"));
    let daemon = Daemon::serve(
        &test_dir,
        &["--vhost-user-blk", &export, "mem://1M", "mem://1M"],
    );
    daemon.wait_listening(&test_dir.path("blk.sock"));
    let get = b"GET /v1/stats HTTP/1.1\r\nHost: x\r\n\r\n";
    for socket in ["vm.sock", "blk.sock"] {
        for request in [&get[..], b"{\"method\":\"stats\"}\n"] {
            let told = String::from_utf8(answer(&test_dir, socket, request)).unwrap();
            assert!(
                told.starts_with("HTTP/1.1 421 Misdirected Request\r\n"),
                "{told}"
            );
            assert!(told.ends_with("not a control socket\"}\n"), "{told}");
        }
    }
    daemon.wait_log(|line| line.contains("vm.sock") && line.contains("for a control socket"));
    daemon.wait_log(|line| line.contains("blk.sock") && line.contains("for a control socket"));

    // vhost-user has no errors that a client would read; it only sees the end.
    let words = |words: [u32; 3]| words.map(u32::to_ne_bytes).concat();
    assert!(answer(&test_dir, "vm.sock", &words([1, 1, 0])).is_empty());
    daemon.wait_log(|line| line.contains("vm.sock") && line.contains("it speaks vhost-user"));

    let refused = Client::connect(test_dir.path("blk.sock"), WAIT_TIMEOUT);
    let Err(ClientError::Refused { errno, .. }) = refused else {
        panic!("{:?}", refused.err());
    };
    assert_eq!(errno, Some(vfio_user::Errno::PROTONOSUPPORT));
    daemon.wait_log(|line| line.contains("blk.sock") && line.contains("it speaks vfio-user"));

    let mut host = Host::up(&test_dir.socket());
    assert!(
        host.read(1, 0, 4096) == vec![0; 4096],
        "the right one is served"
    );
    drop(host);
    daemon.end();
}

#[test]
fn daemon_end_names_attached_clients() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    let host = Host::up(&test_dir.socket());
    let ended = daemon.end();
    let line = ended
        .log
        .iter()
        .find(|line| line.contains("a client is attached"));
    let line = line.expect("it is said");
    let pid = format!("pid={}", std::process::id());
    assert!(
        line.contains("WARN") && line.contains("vm.sock") && line.contains(&pid),
        "{line}"
    );
    drop(host);
    // A disk without a client causes no such line.
    let daemon = Daemon::serve(&test_dir, &["mem://1M"]);
    drop(Host::up(&test_dir.socket()));
    daemon.wait_log(|line| line.contains("client disconnected"));
    let ended = daemon.end();
    assert!(!ended.log.iter().any(|line| line.contains("is attached")));
}

#[test]
fn workers_sharing_cpus_cause_warning() {
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["--workers", "3", "--cpus", "0-0", "mem://1M"]);
    daemon.wait_log(|line| line.contains("WARN") && line.contains("3 workers share 1 CPUs"));
    daemon.end();
    let daemon = Daemon::serve(&test_dir, &["--workers", "1", "--cpus", "0-0", "mem://1M"]);
    assert_eq!(daemon.count("workers share"), 0);
    daemon.end();
    let daemon = Daemon::serve(&test_dir, &["--workers", "1", "--cpus", "0,0", "mem://1M"]);
    let line = daemon.wait_log(|line| line.contains("no worker is on CPU 0"));
    assert!(
        line.contains("WARN") && line.contains("--workers"),
        "{line}"
    );
    daemon.end();
}

#[test]
fn encrypted_file_served_as_raw_is_reported() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    let file = fs::OpenOptions::new().write(true).open(&disk).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"LUKS\xba\xbe\0\x02", 0).unwrap();
    let daemon = Daemon::serve(&test_dir, &[&disk]);
    let line = daemon.wait_log(|line| line.contains("encrypted with LUKS"));
    assert!(
        line.contains("WARN") && line.contains("cryptsetup open"),
        "{line}"
    );
    daemon.end();
    let daemon = Daemon::serve(&test_dir, &[&format!("{disk}?format=raw")]);
    assert_eq!(daemon.count("LUKS"), 0);
    daemon.end();
}

/// No client can connect to a disk that will not be served because another disk's volume is
/// missing.
#[test]
fn sockets_are_created_after_all_volumes_are_open() {
    let test_dir = TestDir::new();
    let test = "errors::sockets_are_created_after_all_volumes_are_open";
    let Some(fuse) = breaking(test, &test_dir, 1 << 20) else {
        return;
    };
    let one = |socket: &str, volume: &str| {
        let socket = text(&test_dir.path(socket));
        format!(
            "[[controller]]\nsocket = \"{socket}\"\nnamespace = [{{ volume = \"{volume}\" }}]\n"
        )
    };
    let file = one("a.sock", "mem://1M") + &one("b.sock", &text(&fuse.path()));
    fs::write(test_dir.path("c.toml"), file).unwrap();
    fuse.silence(Some(fuse_disk::op::OPEN));
    let daemon = Daemon::spawn(&["serve", "--config", &text(&test_dir.path("c.toml"))]);
    assert!(fuse.wait_held(1, WAIT_TIMEOUT));
    assert!(!test_dir.path("a.sock").exists());
    fuse.release();
    daemon.wait_listening(&test_dir.path("a.sock"));
    daemon.wait_listening(&test_dir.path("b.sock"));
    daemon.end();
}
