//! Owner, group and mode of sockets, as other users find them.

use std::fs::{self, Permissions};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::Signal;

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

/// Makes a folder that [`OWNER`] may write to.
fn run_folder(test_dir: &TestDir) -> PathBuf {
    let folder = test_dir.path("run");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
    chown(&folder, Some(OWNER), Some(OWNER)).unwrap();
    folder
}

/// A packaged daemon on a libvirt host: an ordinary user, in its sandbox, and a member of the group
/// that its sockets are for. Disks are added by a reload, and by a request.
#[test]
fn sandboxed_daemon_gives_added_sockets_to_configured_group() {
    let name = "sandboxed_daemon_gives_added_sockets_to_configured_group";
    let Some((test_dir, program)) = open_place(name) else {
        return;
    };
    if let Err(error) = Command::new("setpriv").arg("--version").output() {
        testkit::skip(
            &format!("vnvme::access::{name}"),
            format!("setpriv: {error}"),
        );
        return;
    }
    let folder = text(&run_folder(&test_dir));
    let config = text(&test_dir.path("c.toml"));
    let process = format!("[process]\nsocket-group = {GROUP}\nallow = [\"{folder}\"]\n");
    let disk = |name: &str, more: &str| {
        format!(
            "[[controller]]\nsocket = \"{folder}/{name}.sock\"\n{more}\
             namespace = [{{ volume = \"mem://1M\" }}]\n"
        )
    };
    let write = |text: String| {
        fs::write(&config, text).unwrap();
        fs::set_permissions(&config, Permissions::from_mode(0o644)).unwrap();
    };
    write(process.clone() + &disk("a", ""));
    let control = format!("{folder}/control");
    let (user, group) = (OWNER.to_string(), GROUP.to_string());
    let daemon = Daemon::spawn_program(
        Path::new("setpriv"),
        &[
            "--reuid",
            &user,
            "--regid",
            &user,
            "--groups",
            &group,
            &text(&program),
            "daemon",
            "--config",
            &config,
            "--control",
            &control,
            "--keeper",
            "off",
        ],
    );
    daemon.wait_listening(&test_dir.path("run/a.sock"));
    let groups = |name: &str| of(&test_dir, &format!("run/{name}.sock"));
    assert_eq!(groups("a"), (OWNER, GROUP, 0o660));

    write(process.clone() + &disk("a", "") + &disk("b", ""));
    daemon.signal(Signal::HUP);
    daemon.wait_listening(&test_dir.path("run/b.sock"));
    let run = |words: &[&str]| {
        let mut command = Command::new(&program);
        command.args(words).args(["--control", &control]);
        let output = command.output().unwrap();
        let told = [output.stdout, output.stderr].concat();
        (
            output.status.success(),
            String::from_utf8_lossy(&told).into_owned(),
        )
    };
    let socket = format!("socket={folder}/c.sock");
    let (added, told) = run(&["add", "controller", "mem://1M", &socket]);
    assert!(added, "{told}");
    for name in ["b", "c"] {
        assert_eq!(groups(name), (OWNER, GROUP, 0o660), "{name}");
        // A client is served.
        let mut host = Host::up(&test_dir.path(&format!("run/{name}.sock")));
        host.write(1, 0, &pattern(1, 4096));
    }

    // An access control that the configuration did not have at the start.
    for more in ["socket-owner=0", "socket-group=7"] {
        let (added, told) = run(&[
            "add",
            "controller",
            "mem://1M",
            &format!("socket={folder}/d.sock"),
            more,
        ]);
        assert!(!added && told.contains("into [process]"), "{more}: {told}");
        assert!(!test_dir.path("run/d.sock").exists());
    }
    write(process + &disk("a", ""));
    daemon.signal(Signal::HUP);
    eventually("it is removed", || !test_dir.path("run/b.sock").exists());
    daemon.end();
    assert!(!test_dir.path("run/c.sock").exists());
}

/// Root's daemon has the right to give sockets to any user.
#[test]
fn sandboxed_daemon_of_root_gives_added_socket_to_configured_owner() {
    let name = "sandboxed_daemon_of_root_gives_added_socket_to_configured_owner";
    let Some((test_dir, _)) = open_place(name) else {
        return;
    };
    let folder = text(&test_dir.path(""));
    let config = text(&test_dir.path("c.toml"));
    let process = format!(
        "[process]\nallow = [\"{folder}\"]\nsocket-owner = {OWNER}\nsocket-group = {GROUP}\n\
         socket-mode = \"0606\"\n"
    );
    fs::write(&config, process).unwrap();
    let control = text(&test_dir.path("control"));
    let daemon = Daemon::spawn(&["daemon", "--config", &config, "--control", &control]);
    eventually("it answers", || UnixStream::connect(&control).is_ok());
    let socket = format!("socket={folder}/a.sock");
    let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args([
            "add",
            "controller",
            "mem://1M",
            &socket,
            "--control",
            &control,
        ])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(of(&test_dir, "a.sock"), (OWNER, GROUP, 0o606));
    daemon.end();
    assert!(!test_dir.path("a.sock").exists());
}

/// The process that makes sockets, as a compromised serving process would use it.
struct Maker {
    child: std::process::Child,
    requests: Option<OwnedFd>,
}

impl Maker {
    /// `below` is the folder of sockets; there is one access control, for [`GROUP`].
    fn start(below: &Path) -> Self {
        let flags = SocketFlags::CLOEXEC;
        let (requests, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(["start-receivers", "--sandbox=on"])
            .arg(format!("--sockets-below={}", below.display()))
            .arg(format!("--socket-access=:{GROUP}:660"))
            .stdin(Stdio::from(theirs))
            .spawn()
            .unwrap();
        Self {
            child,
            requests: Some(requests),
        }
    }

    /// Returns the socket, or the error number.
    fn request(&self, number: u32, path: &Path) -> Result<OwnedFd, i32> {
        /// Kinds of messages (crate `receive`).
        const REQUEST: u32 = 17;
        const FULFILLED: u32 = 18;

        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let mut message = [REQUEST, number, 0, 0].map(u32::to_ne_bytes).concat();
        message.extend(text(path).as_bytes());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = [theirs.as_fd()];
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        let requests = self.requests.as_ref().unwrap();
        let bytes = [IoSlice::new(&message)];
        sendmsg(requests, &bytes, &mut ancillary, SendFlags::empty()).unwrap();
        drop(theirs);
        set_socket_timeout(&ours, Timeout::Recv, Some(WAIT_TIMEOUT)).unwrap();
        let mut answer = [0; 16];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let bytes = &mut [IoSliceMut::new(&mut answer)];
        recvmsg(&ours, bytes, &mut ancillary, RecvFlags::empty()).unwrap();
        let word = |at: usize| u32::from_ne_bytes(answer[at..at + 4].try_into().unwrap());
        let descriptor = ancillary.drain().find_map(|one| match one {
            RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
            _ => None,
        });
        match word(0) {
            FULFILLED => Ok(descriptor.unwrap()),
            _ => Err(word(4) as i32),
        }
    }
}

impl Drop for Maker {
    fn drop(&mut self) {
        self.requests = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn compromised_server_gets_only_configured_sockets() {
    let Some((test_dir, _)) = open_place("compromised_server_gets_only_configured_sockets") else {
        return;
    };
    let run = test_dir.path("run");
    let beside = test_dir.path("beside");
    for folder in [&run, &beside] {
        fs::create_dir(folder).unwrap();
    }
    let maker = Maker::start(&run);
    maker.request(0, &run.join("a.sock")).unwrap();
    assert_eq!(of(&test_dir, "run/a.sock"), (0, GROUP, 0o660));

    // A socket of another program, which its user alone may connect to; and a file.
    let _listener = UnixListener::bind(run.join("other.sock")).unwrap();
    fs::set_permissions(run.join("other.sock"), Permissions::from_mode(0o600)).unwrap();
    fs::write(run.join("file"), "kept").unwrap();
    symlink(&beside, run.join("link")).unwrap();
    symlink(beside.join("target"), run.join("to-nothing")).unwrap();
    for (number, path, error) in [
        (1, run.join("b.sock"), libc::EPERM),
        (u32::MAX - 1, run.join("b.sock"), libc::EPERM),
        (0, run.join("a.sock"), libc::EADDRINUSE),
        (0, run.join("other.sock"), libc::EADDRINUSE),
        (0, run.join("file"), libc::EADDRINUSE),
        (0, run.join("to-nothing"), libc::EADDRINUSE),
        (0, beside.join("b.sock"), libc::EACCES),
        (0, run.join("link/b.sock"), libc::EACCES),
        (0, run.join("../beside/b.sock"), libc::EACCES),
        (0, run.join("none/b.sock"), libc::ENOENT),
        (0, "b.sock".into(), libc::EINVAL),
        (0, "".into(), libc::EINVAL),
    ] {
        let answer = maker.request(number, &path).map(drop);
        assert_eq!(answer, Err(error), "{number} {path:?}");
    }
    assert_eq!(of(&test_dir, "run/other.sock"), (0, 0, 0o600));
    assert_eq!(fs::read_to_string(run.join("file")).unwrap(), "kept");
    assert_eq!(fs::read_dir(&beside).unwrap().count(), 0);
    // Files of each kind of request that was refused: none is left.
    assert_eq!(fs::read_dir(&run).unwrap().count(), 5);
}
