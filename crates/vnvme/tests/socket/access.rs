//! Owner, group and mode of sockets, as other users find them.

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::common::*;

/// Users and groups that nobody has.
const OWNER: u32 = 54_321;
const GROUP: u32 = 54_322;
const STRANGER: u32 = 54_323;

/// Makes a directory that other users may enter, with the program where they may execute it.
/// `None`, and a note, where this is not root.
pub fn open_place(test: &str) -> Option<(TestDir, PathBuf)> {
    if !rustix::process::geteuid().is_root() {
        testkit::skip(&format!("vnvme::access::{test}"), "it is not root");
        return None;
    }
    let test_dir = TestDir::new();
    fs::set_permissions(test_dir.path(""), Permissions::from_mode(0o755)).unwrap();
    let program = test_dir.path("vnvme");
    put_program(env!("CARGO_BIN_EXE_vnvme"), &program);
    Some((test_dir, program))
}

/// Owner, group and mode of a socket.
fn of(test_dir: &TestDir, name: &str) -> (u32, u32, u32) {
    let found = fs::symlink_metadata(test_dir.path(name)).unwrap();
    assert!(found.file_type().is_socket());
    (found.uid(), found.gid(), found.mode() & 0o7777)
}

#[test]
fn sockets_get_configured_owner_and_mode() {
    let Some((test_dir, program)) = open_place("sockets_get_configured_owner_and_mode") else {
        return;
    };
    let export = text(&test_dir.path("blk.sock"));
    let daemon = Daemon::serve(
        &test_dir,
        &[
            "--socket-owner",
            &OWNER.to_string(),
            "--socket-group",
            &GROUP.to_string(),
            "--vhost-user-blk",
            &export,
            "mem://1M",
            "mem://1M",
        ],
    );
    daemon.wait_listening(&test_dir.path("blk.sock"));
    // With a group and without a mode, the group may connect.
    assert_eq!(of(&test_dir, "vm.sock"), (OWNER, GROUP, 0o660));
    assert_eq!(of(&test_dir, "blk.sock"), (OWNER, GROUP, 0o660));
    // Behind the sandbox, they are served.
    let url = format!("vfio-user://{}", text(&test_dir.socket()));
    let as_user = |user: u32, group: u32| {
        let mut command = Command::new(&program);
        command.args(["info", &url]).uid(user).gid(group);
        command.stdin(Stdio::null()).output().unwrap()
    };
    for (user, group, may) in [
        (OWNER, STRANGER, true),
        (STRANGER, GROUP, true),
        (STRANGER, STRANGER, false),
    ] {
        let output = as_user(user, group);
        assert_eq!(output.status.success(), may, "{user}:{group}: {output:?}");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(may || error.contains("Permission denied"), "{error}");
    }
    daemon.end();
    assert!(
        !test_dir.socket().exists(),
        "it is removed although it was given away"
    );
}

#[test]
fn configuration_sets_socket_mode_for_all_or_one() {
    let test_dir = TestDir::new();
    let socket = |name: &str| format!("socket = \"{}\"\n", text(&test_dir.path(name)));
    let namespace = "[[controller.namespace]]\nvolume = \"mem://1M\"\n";
    let file = format!(
        "[process]\nsocket-mode = \"0620\"\n[[controller]]\n{}{namespace}[[controller]]\n{}\
         socket-mode = \"0606\"\n{namespace}",
        socket("a.sock"),
        socket("b.sock"),
    );
    fs::write(test_dir.path("c.toml"), file).unwrap();
    let daemon = Daemon::spawn(&["serve", "--config", &text(&test_dir.path("c.toml"))]);
    daemon.wait_listening(&test_dir.path("b.sock"));
    daemon.wait_listening(&test_dir.path("a.sock"));
    assert_eq!(of(&test_dir, "a.sock").2, 0o620, "wider than any umask");
    assert_eq!(of(&test_dir, "b.sock").2, 0o606);
    daemon.wait_log(|line| line.contains("WARN") && line.contains("every user of this machine"));
    assert_eq!(daemon.count("every user of this machine"), 1);
    daemon.end();
}

#[test]
fn forbidden_socket_owner_is_refused_and_leaves_no_socket() {
    let name = "forbidden_socket_owner_is_refused_and_leaves_no_socket";
    let Some((test_dir, program)) = open_place(name) else {
        return;
    };
    fs::set_permissions(test_dir.path(""), Permissions::from_mode(0o777)).unwrap();
    let socket = text(&test_dir.socket());
    let owner = OWNER.to_string();
    let args = [
        "serve",
        "--socket",
        &socket,
        "--socket-owner",
        &owner,
        "mem://1M",
    ];
    let ended = Daemon::spawn_as(STRANGER, &program, &args).wait();
    assert_eq!(ended.status.code(), Some(1));
    let last = ended.log.last().unwrap();
    let wanted = format!(
        "vnvme: {socket}: the socket cannot be given to that owner or group: a process without the \
         right to (CAP_CHOWN) can only give it to a group that it is a member of"
    );
    assert_eq!(*last, wanted);
    assert!(!test_dir.socket().exists());
}
