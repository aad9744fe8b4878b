//! One view over several instances: `--all` of `vnvme list`, `top` and `metrics`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::process::{Command, Output, Stdio};

use rustix::process::Signal;
use serde_json::Value;

use crate::access::open_place;
use crate::common::*;

/// Starts an instance whose control socket is in this subdirectory of the run directory.
pub fn instance(run: &TestDir, name: &str) -> Daemon {
    let folder = run.path(name);
    fs::create_dir_all(&folder).unwrap();
    let (socket, control) = (folder.join("disk.sock"), folder.join("control.sock"));
    let (at, control) = (text(&socket), text(&control));
    let daemon = Daemon::spawn(&["serve", "-s", &at, "--control", &control, "mem://1M"]);
    daemon.wait_listening(&socket);
    eventually("the instance answers", || stats_of(&control));
    daemon
}

fn stats_of(control: &str) -> bool {
    let client = control::Client::new(vec![control.into()]).unwrap();
    client.stats().is_ok()
}

/// Starts a command for all instances of a run directory.
fn start(run: &str, words: &[&str]) -> std::process::Child {
    Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(words)
        .args(["--all", "--control", run])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn ended(child: std::process::Child) -> (Option<i32>, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = child.wait_with_output().unwrap();
    let [stdout, stderr] = [stdout, stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    (status.code(), stdout, stderr)
}

/// Returns the fields `instance` of a list.
fn names<'a>(answer: &'a Value, list: &str) -> Vec<&'a str> {
    let list = answer[list].as_array().unwrap().iter();
    list.map(|one| one["instance"].as_str().unwrap()).collect()
}

#[test]
fn instances_without_answer_are_named_and_others_are_shown() {
    let run = TestDir::new();
    let [first, frozen, last] = ["", "vm0", "vm1"].map(|name| instance(&run, name));
    fs::create_dir(run.path("vm2")).unwrap();
    drop(UnixListener::bind(run.path("vm2/control.sock")).unwrap());
    frozen.signal(Signal::STOP);
    let folder = text(run.path("").as_path());
    let folder = folder.trim_end_matches('/');
    let commands: [&[&str]; 5] = [
        &["list"],
        &["list", "--json"],
        &["metrics"],
        &["top", "--once", "--interval", "100ms"],
        &["top", "--json", "--interval", "100ms"],
    ];
    let started = commands.map(|words| start(folder, words));
    let [list, list_json, metrics, top, top_json] = started.map(ended);
    for (words, (code, _, said)) in commands
        .iter()
        .zip([&list, &list_json, &metrics, &top, &top_json])
    {
        assert_eq!(*code, Some(1), "{words:?}: {said}");
        let reasons = [
            format!("vnvme@vm0 does not answer: {folder}/vm0/control.sock: no answer within"),
            format!(
                "vnvme@vm2 does not answer: {folder}/vm2/control.sock: the process that created \
                 this socket has ended"
            ),
        ];
        for reason in reasons {
            assert!(said.contains(&reason), "{words:?}: {said}");
        }
        assert_eq!(
            said.matches("does not answer").count(),
            2,
            "{words:?}: {said}"
        );
    }
    let rows: Vec<String> = list.1.lines().skip(1).map(first_words).collect();
    assert_eq!(rows, ["vnvme disk", "vnvme@vm1 disk"], "{}", list.1);
    let json: Value = serde_json::from_str(&list_json.1).unwrap();
    assert_eq!(names(&json, "disks"), ["vnvme", "vnvme@vm1"]);
    assert_eq!(names(&json, "unanswered"), ["vnvme@vm0", "vnvme@vm2"]);
    assert_eq!(json["disks"][1]["name"], "disk");
    assert_eq!(
        json["unanswered"][1]["control"],
        format!("{folder}/vm2/control.sock")
    );
    for line in [
        "vnvme_instance_up{instance=\"vnvme\"} 1",
        "vnvme_instance_up{instance=\"vnvme@vm0\"} 0",
        "vnvme_instance_up{instance=\"vnvme@vm1\"} 1",
        "vnvme_instance_up{instance=\"vnvme@vm2\"} 0",
        "vnvme_disk_connected{instance=\"vnvme\",disk=\"disk\"} 0",
        "vnvme_disk_connected{instance=\"vnvme@vm1\",disk=\"disk\"} 0",
    ] {
        assert!(
            metrics.1.lines().any(|found| found == line),
            "{line}: {}",
            metrics.1
        );
    }
    let types = metrics
        .1
        .matches("# TYPE vnvme_disk_connected gauge")
        .count();
    assert_eq!(types, 1, "{}", metrics.1);
    assert!(top.1.starts_with("2 disks "), "{}", top.1);
    for name in ["\nvnvme/disk ", "\nvnvme@vm1/disk "] {
        assert!(top.1.contains(name), "{}", top.1);
    }
    let json: Value = serde_json::from_str(&top_json.1).unwrap();
    assert_eq!(names(&json, "instances"), ["vnvme", "vnvme@vm1"]);
    assert_eq!(
        json["instances"][1]["snapshots"][1]["disks"][0]["name"],
        "disk"
    );
    assert_eq!(names(&json, "unanswered"), ["vnvme@vm0", "vnvme@vm2"]);

    // All instances answer again: the exit code says so.
    frozen.signal(Signal::CONT);
    fs::remove_file(run.path("vm2/control.sock")).unwrap();
    let (code, shown, said) = ended(start(folder, &["list"]));
    assert_eq!((code, said.as_str()), (Some(0), ""), "{shown}");
    assert_eq!(shown.lines().count(), 4, "{shown}");
    for daemon in [first, frozen, last] {
        daemon.end();
    }
    let (code, shown, said) = ended(start(folder, &["list"]));
    assert_eq!((code, shown.as_str()), (Some(1), ""), "{said}");
    assert!(
        said.contains(&format!("no control.sock in {folder}")) && said.contains("--control"),
        "{said}"
    );
}

/// Returns the first two words of a line.
fn first_words(line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().take(2).collect();
    words.join(" ")
}

/// An instance of another user, whose directory may not be searched.
#[test]
fn instance_without_permission_is_named_and_others_are_shown() {
    let name = "instance_without_permission_is_named_and_others_are_shown";
    let Some((run, program)) = open_place(name) else {
        return;
    };
    let daemon = instance(&run, "vm0");
    fs::create_dir(run.path("vm1")).unwrap();
    let permissions = |path: &str, mode| {
        fs::set_permissions(run.path(path), fs::Permissions::from_mode(mode)).unwrap();
    };
    permissions("vm0/control.sock", 0o666);
    permissions("vm1", 0o700);
    let folder = text(run.path("").as_path());
    let mut command = Command::new("setpriv");
    let words = ["--reuid", "65534", "--clear-groups"];
    let command = command.args(words).arg(&program);
    let output = command
        .args(["list", "--all", "--control", &folder])
        .output();
    let output = output.unwrap();
    let [shown, said] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(shown.contains("vnvme@vm0  disk"), "{shown}{said}");
    let reason = "vnvme@vm1 does not answer: ";
    assert!(
        said.contains(reason) && said.contains("permission denied"),
        "{said}"
    );
    daemon.end();
}
