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
fn open_place(test: &str) -> Option<(Place, PathBuf)> {
    if !rustix::process::geteuid().is_root() {
        testkit::skip(&format!("vnvme::access::{test}"), "it is not root");
        return None;
    }
    let place = Place::new();
    fs::set_permissions(place.path(""), Permissions::from_mode(0o755)).unwrap();
    let program = place.path("vnvme");
    put_program(env!("CARGO_BIN_EXE_vnvme"), &program);
    Some((place, program))
}

/// Owner, group and mode of a socket.
fn of(place: &Place, name: &str) -> (u32, u32, u32) {
    let found = fs::symlink_metadata(place.path(name)).unwrap();
    assert!(found.file_type().is_socket());
    (found.uid(), found.gid(), found.mode() & 0o7777)
}

#[test]
fn sockets_belong_to_whom_it_was_said() {
    let Some((place, program)) = open_place("sockets_belong_to_whom_it_was_said") else {
        return;
    };
    let export = text(&place.path("blk.sock"));
    let daemon = Daemon::serve(
        &place,
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
    daemon.wait_listening(&place.path("blk.sock"));
    // With a group and without a mode, the group may connect.
    assert_eq!(of(&place, "vm.sock"), (OWNER, GROUP, 0o660));
    assert_eq!(of(&place, "blk.sock"), (OWNER, GROUP, 0o660));
    // Behind the sandbox, they are served.
    let url = format!("vfio-user://{}", text(&place.socket()));
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
        !place.socket().exists(),
        "it is removed although it was given away"
    );
}

#[test]
fn a_file_says_it_of_all_sockets_or_of_one() {
    let place = Place::new();
    let socket = |name: &str| format!("socket = \"{}\"\n", text(&place.path(name)));
    let namespace = "[[controller.namespace]]\nvolume = \"mem://1M\"\n";
    let file = format!(
        "[process]\nsocket-mode = \"0620\"\n[[controller]]\n{}{namespace}[[controller]]\n{}\
         socket-mode = \"0606\"\n{namespace}",
        socket("a.sock"),
        socket("b.sock"),
    );
    fs::write(place.path("c.toml"), file).unwrap();
    let daemon = Daemon::spawn(&["serve", "--config", &text(&place.path("c.toml"))]);
    daemon.wait_listening(&place.path("b.sock"));
    daemon.wait_listening(&place.path("a.sock"));
    assert_eq!(of(&place, "a.sock").2, 0o620, "wider than any umask");
    assert_eq!(of(&place, "b.sock").2, 0o606);
    daemon.wait_log(|line| line.contains("WARN") && line.contains("every user of this machine"));
    assert_eq!(daemon.count("every user of this machine"), 1);
    daemon.end();
}

#[test]
fn one_that_may_not_give_a_socket_away_says_so_and_leaves_none() {
    let name = "one_that_may_not_give_a_socket_away_says_so_and_leaves_none";
    let Some((place, program)) = open_place(name) else {
        return;
    };
    fs::set_permissions(place.path(""), Permissions::from_mode(0o777)).unwrap();
    let socket = text(&place.socket());
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
    assert!(!place.socket().exists());
}
