//! Mistakes of users on the command line: the message, printed once, and the exit status.

use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};

use rustix::process::Signal;

use crate::common::*;

fn vnvme(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnvme"));
    command.args(args).env_remove("VNVME_LOG");
    command.stdin(Stdio::null()).output().unwrap()
}

/// Returns the clauses that a message has twice, because an error repeats its cause.
fn repeated(message: &str) -> Vec<&str> {
    let clauses: Vec<&str> = message.split([':', ';']).map(str::trim).collect();
    let long = clauses.iter().enumerate().filter(|(_, c)| c.len() > 10);
    let again = long.filter(|(i, clause)| clauses.iter().take(*i).any(|c| c == *clause));
    again.map(|(_, clause)| *clause).collect()
}

/// Does it; the words must stand in the last line of the message, or in all of it where the command
/// line is explained.
fn mistake(args: &[&str], status: i32, words: &[&str]) {
    let output = vnvme(args);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{args:?}: {text}");
    let line = match status {
        1 => text.lines().last().unwrap_or_default(),
        _ => &text,
    };
    for word in words {
        assert!(line.contains(word), "\"{word}\" is not in: {line}");
    }
    let twice = repeated(line);
    assert!(twice.is_empty(), "{twice:?} twice in: {line}");
}

#[test]
fn mistakes_are_explained_once() {
    let test_dir = TestDir::new();
    let socket = text(&test_dir.socket());
    let none = text(&test_dir.path("none.sock"));
    let config = test_dir.path("vnvme.toml");
    let config_text = text(&config);
    let disk = test_dir.disk("disk.raw", 1 << 20);
    let qcow2 = text(&test_dir.path("disk.qcow2"));
    // A file of an image editor, of a size that no raw disk has.
    fs::write(&qcow2, [&b"QFI\xfb\0\0\0\x03"[..], &[7; 1000]].concat()).unwrap();
    let serve = |args: &[&str], status, words: &[&str]| {
        mistake(&[&["serve", "-s", &socket], args].concat(), status, words);
    };
    let scheme = ["iscsi://", "mem://SIZE", "nvme://ADDRESS", "vfio-user:///"];
    serve(&["iscsi://a"], 1, &scheme);
    serve(
        &["file://"],
        1,
        &["no volume is named", "nvme://ADDRESS", "vfio-user:///"],
    );
    serve(&["mem://1M?size=2"], 1, &["\"size\" is unknown"]);
    serve(&["mem://lots"], 1, &["lots"]);
    serve(&["none.raw"], 1, &["none.raw", "no such file"]);
    serve(&["/dev/null"], 1, &["character device"]);
    serve(&["/"], 1, &["is a directory"]);
    serve(
        &[&qcow2],
        1,
        &["disk.qcow2", "is a qcow2 image", "?format=raw"],
    );
    serve(
        &[&format!("{disk}?format=vmdk")],
        1,
        &["format=vmdk", "it is raw, qcow2 or probe"],
    );
    serve(
        &[&format!("{disk}?partition=1")],
        1,
        &["disk.raw", "partition"],
    );
    serve(&[&format!("{disk}?offset=1T")], 1, &["does not lie within"]);
    serve(&["mem://1M?nsid=1&nsid=2"], 1, &["\"nsid\" is given twice"]);
    serve(&["mem://1M?nguid=12"], 1, &["32 hexadecimal digits"]);
    serve(
        &["nvme://here/1"],
        1,
        &["not the URL of a device, like nvme://"],
    );
    serve(
        &[&format!("vfio-user://{none}/1")],
        1,
        &["none.sock", "cannot be reached"],
    );
    serve(&["nvme://ffff:ff:1f.7/1"], 1, &["ffff:ff:1f.7"]);
    let nguid = "nguid=00112233445566778899aabbccddeeff";
    let twice = ["a", "b"].map(|_| format!("mem://1M?{nguid}"));
    serve(&[&twice[0], &twice[1]], 1, &["NGUID", "is given twice"]);
    serve(
        &["mem://1M", "--vhost-user-blk", &socket, "mem://1M"],
        1,
        &["socket", "is given twice"],
    );
    serve(
        &["mem://1M", "--control", &socket],
        1,
        &["socket", "is given twice"],
    );
    serve(
        &["mem://1M", "--control", "/none/ctl"],
        1,
        &["the folder /none does not exist"],
    );
    serve(
        &["mem://1M", "--workers", "0"],
        2,
        &["--workers", "1..=256"],
    );
    serve(
        &["mem://1M", "--workers", "257"],
        2,
        &["--workers", "1..=256"],
    );
    serve(&["mem://1M", "--workers", "99999999"], 2, &["--workers"]);
    serve(&["mem://1M", "--cpus", "100000"], 2, &["no CPU 100000"]);
    serve(
        &["mem://1M", "--log", "debg"],
        2,
        &["\"debg\"", "error, warn, info, debug"],
    );
    serve(&["mem://1M", "--idle-window", "soon"], 2, &["auto"]);

    let export = text(&test_dir.path("blk.sock"));
    let exports = |args: &[&str], status, words: &[&str]| {
        let all = ["serve", "--vhost-user-blk", &export, "mem://1M"];
        mistake(&[&all, args].concat(), status, words);
    };
    exports(
        &["--serial", "S"],
        2,
        &["--serial applies to NVMe controllers"],
    );
    exports(&["--block-size", "1000"], 1, &["1000"]);

    fs::write(
        &config,
        "[[controller]]\nsocket = \"/tmp/a\"\nserial = \"S\"\n[[controller.namespace]]\nvolume = \"mem://1M\"\n\
         [[controller]]\nsocket = \"/tmp/b\"\nserial = \"S\"\n[[controller.namespace]]\nvolume = \"mem://1M\"\n",
    )
    .unwrap();
    let from_file = |args: &[&str], status, words: &[&str]| {
        mistake(
            &[&["serve", "-c", &config_text], args].concat(),
            status,
            words,
        );
    };
    from_file(&[], 1, &["serial number S is given twice"]);
    from_file(
        &["--serial", "T"],
        2,
        &["--serial names one controller", "vnvme.toml"],
    );
    fs::write(&config, "[[controller]]\nsocket = 1\n").unwrap();
    from_file(&[], 1, &[]);
    fs::write(&config, "[[ublk]]\nvolume = \"mem://1M\"\n").unwrap();
    from_file(&["--no-write-cache"], 2, &["[[ublk]]", "write cache"]);
    mistake(
        &["serve", "-c", &none],
        1,
        &["none.sock", "no such configuration file"],
    );

    mistake(
        &["ublk", "--id", "4294967295", "mem://1M", "mem://1M"],
        1,
        &["--id", "too large"],
    );
    mistake(&["ublk", "mem://1M?nsid=2"], 1, &["\"nsid\" is unknown"]);
    mistake(
        &["ublk", "mem://1M?queues=2"],
        1,
        &["\"queues\" is unknown"],
    );
    for command in ["list", "stats", "limits", "path", "save", "events"] {
        mistake(
            &[command, "--control", &none],
            1,
            &["none.sock", "is vnvme running"],
        );
    }
    mistake(
        &["limits", "--control", &none, "--iops", "5"],
        2,
        &["no volume is selected", "--all"],
    );
    mistake(
        &["limits", "--control", &none, "v", "--all", "--iops", "5"],
        2,
        &["--all"],
    );
    mistake(
        &["path", "--control", &none, "--set", "generic"],
        2,
        &["no disk is selected", "--all"],
    );
    mistake(&["suspend", "--control", &none, "dev"], 1, &["none.sock"]);
    mistake(&["info", "none.raw"], 1, &["none.raw: no such file"]);
    mistake(
        &["info", &format!("vfio-user://{none}/1")],
        1,
        &["cannot be reached"],
    );
    mistake(&["bench", "none.raw"], 1, &["none.raw"]);
    mistake(
        &["--log", "info,contrller=debug", "stats"],
        2,
        &["\"contrller\""],
    );
}

/// An image can be served as raw where the option says so; the guest sees its bytes.
#[test]
fn image_served_as_raw_exposes_its_bytes() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", 1 << 20);
    let head = b"QFI\xfb\0\0\0\x02";
    let file = fs::OpenOptions::new().write(true).open(&disk).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, head, 0).unwrap();
    let daemon = Daemon::serve(&test_dir, &[&format!("{disk}?format=raw")]);
    let mut host = Host::up(&test_dir.socket());
    assert_eq!(&host.read(1, 0, 512)[..8], head);
    drop(host);
    daemon.end();
}

/// Starts it with a standard output that nobody reads any more.
fn unread(args: &[&str]) -> Output {
    // The reader is closed before the command begins, however short the command is.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut child = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(args)
        .stdin(Stdio::null())
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = Vec::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_end(&mut stderr)
        .unwrap();
    Output {
        status: child.wait().unwrap(),
        stdout: Vec::new(),
        stderr,
    }
}

#[test]
fn closed_output_ends_command_quietly() {
    let test_dir = TestDir::new();
    let below = text(&test_dir.path("below.sock"));
    let lower = Daemon::spawn(&["serve", "--socket", &below, "mem://4M"]);
    lower.wait_listening(&test_dir.path("below.sock"));
    let control = text(&test_dir.path("ctl"));
    let device = format!("vfio-user://{below}/1");
    let daemon = Daemon::serve(
        &test_dir,
        &["--control", &control, &device, "mem://1M?iops=0"],
    );
    let disk = test_dir.disk("bench.raw", 1 << 20);
    let bench = ["bench", &disk, "--rw", "randread", "--ios", "10"];
    let socket = text(&test_dir.socket());
    let url = format!("vfio-user://{socket}");
    for args in [
        &["list", "--control", &control][..],
        &["stats", "--control", &control],
        &["stats", "--json", "--control", &control],
        &["limits", "--control", &control],
        &["limits", "--json", "--control", &control],
        &["path", "--control", &control],
        &["info", &url],
        &["info", "--json", &url],
        &bench,
        &[&bench[..], &["--json"]].concat(),
        &["--help"],
        &["serve", "--help"],
        &["--version"],
    ] {
        let read = vnvme(args);
        assert!(
            read.status.success() && !read.stdout.is_empty(),
            "{args:?}: {read:?}"
        );
        let ended = unread(args);
        let error = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(
            ended.status.signal(),
            Some(Signal::PIPE.as_raw()),
            "{args:?}: {ended:?}"
        );
        assert!(
            !error.contains("panicked") && !error.contains("roken pipe"),
            "{args:?}: {error}"
        );
    }
    daemon.end();
    lower.end();
}

/// A daemon continues when its log has no reader any more.
#[test]
fn closed_log_ends_nothing() {
    let test_dir = TestDir::new();
    let socket = text(&test_dir.socket());
    let mut child = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["serve", "--keeper", "off", "--socket", &socket, "mem://1M"])
        .env("VNVME_CONTROL", "none")
        .env_remove("VNVME_LOG")
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    // The file is there before it listens.
    eventually("it listens", || {
        UnixStream::connect(test_dir.socket()).map(leave).is_ok()
    });
    for _ in 0..3 {
        // Each connection makes lines.
        let mut host = Host::up(&test_dir.socket());
        host.write(1, 0, &pattern(1, 4096));
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
