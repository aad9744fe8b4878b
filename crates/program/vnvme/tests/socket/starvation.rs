//! Processes of the daemon that get no processor: a stopped one stands for one that has to wait. No
//! process concludes anything from the time that another one takes, and no client is disconnected.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use control::Client;
use control::api::LimitChange;
use nvme::{NvmOpcode, Status};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};

use crate::bad_messages::{message, version};
use crate::common::*;
use crate::failure_domains::{Domain, command, controller};
use crate::keeper::{kill_serving, serving, start};
use crate::vhost_blk::{break_queue, features_of};

/// Controller Status (NVMe base specification, section 3.1.4).
const REG_CSTS: u64 = 0x1c;
/// Name of the process that receives descriptors (proc(5), `comm`).
const RECEIVER: &str = "vnvme-receiver";

/// Returns the descendants of a process that have a name.
pub fn descendants(process: u32, name: &str) -> BTreeSet<u32> {
    let mut found = BTreeSet::new();
    let children = fs::read_to_string(format!("/proc/{process}/task/{process}/children"));
    for child in children.unwrap_or_default().split_whitespace() {
        let child = child.parse().unwrap();
        let comm = fs::read_to_string(format!("/proc/{child}/comm"));
        if comm.is_ok_and(|comm| comm.trim() == name) {
            found.insert(child);
        }
        found.extend(descendants(child, name));
    }
    found
}

/// A stopped process, which continues when this is dropped.
pub struct Stopped(Pid);

/// State of a process (proc(5), field 3 of `stat`); `None` when there is none.
pub fn state(process: Pid) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero()));
    stat.ok()?.rsplit(')').next()?.trim().chars().next()
}

impl Stopped {
    pub fn new(process: u32) -> Self {
        let process = Pid::from_raw(process as i32).unwrap();
        kill_process(process, Signal::STOP).unwrap();
        eventually("it is stopped", || state(process) == Some('T'));
        Self(process)
    }

    /// It has not run meanwhile.
    pub fn is_stopped(&self) -> bool {
        state(self.0) == Some('T')
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

/// A daemon with a keeper, whose receiver process is known.
fn serve(test_dir: &TestDir, args: &[&str]) -> (Daemon, u32) {
    let socket = text(&test_dir.socket());
    let first = ["serve", "--socket", &socket, "--keeper", "process"];
    let daemon = start(test_dir, &[&first, args].concat());
    let receiver = only_receiver(&daemon);
    (daemon, receiver)
}

pub fn only_receiver(daemon: &Daemon) -> u32 {
    let mut found = BTreeSet::new();
    eventually("there is one receiver process", || {
        found = descendants(daemon.pid(), RECEIVER);
        found.len() == 1
    });
    found.pop_first().unwrap()
}

/// Address of a second piece of guest memory.
pub const MORE: u64 = 0x80_0000_0000;

/// Maps a piece of memory, reads into it, and unmaps it.
pub fn use_more_memory(host: &mut Host, data: &[u8]) {
    let more = memfd(1 << 20);
    host.link.map(MORE, 1 << 20, more.as_fd()).unwrap();
    let mut read = host.transfer(NvmOpcode::READ, 1, 0, data.len(), 4 << 20);
    read.set_prps(MORE, 0);
    assert_eq!(host.run(1, read).status(), Status::SUCCESS);
    let mut got = vec![0; data.len()];
    more.read_exact_at(&mut got, 0).unwrap();
    assert!(got == data);
    let range = vfio_user::DmaUnmapping::Range {
        iova: MORE,
        size: 1 << 20,
    };
    host.client.dma_unmap(range).unwrap();
}

#[test]
fn client_maps_memory_while_receiver_is_stopped() {
    let test_dir = TestDir::new();
    let (daemon, receiver) = serve(&test_dir, &["mem://4M"]);
    let data = pattern(1, 4096);
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &data);
    let stopped = Stopped::new(receiver);
    for _ in 0..3 {
        use_more_memory(&mut host, &data);
        host.assign_vectors(1);
    }
    assert!(stopped.is_stopped());
    // The next process's receiver process is another one, and the stopped one shuts nothing.
    kill_serving(&daemon);
    use_more_memory(&mut host, &data);
    let process = stopped.0;
    drop(stopped);
    eventually("the first receiver process ends", || {
        !matches!(state(process), Some('S' | 'R' | 'D' | 'T'))
    });
    use_more_memory(&mut host, &data);
    only_receiver(&daemon);
    drop(host);
    let ended = daemon.end();
    assert!(
        !ended.log.iter().any(|line| line.contains("ERROR")),
        "{ended:#?}"
    );
}

/// An idle client's socket stays open when the receiver process that it was entered with ends.
#[test]
fn replaced_receiver_disconnects_no_client() {
    let test_dir = TestDir::new();
    let other = text(&test_dir.path("other.sock"));
    let volumes = ["mem://4M", "--vhost-user-blk", &other, "mem://1M"];
    let socket = text(&test_dir.socket());
    let args = ["serve", "--socket", &socket, "--workers", "2"];
    let daemon = Daemon::spawn(&[&args, &volumes[..]].concat());
    daemon.wait_listening(&test_dir.socket());
    daemon.wait_listening(&test_dir.path("other.sock"));
    let receiver = only_receiver(&daemon);
    let mut host = Host::up(&test_dir.socket());
    let data = pattern(1, 4096);
    host.write(1, 0, &data);
    let stream = UnixStream::connect(test_dir.path("other.sock")).unwrap();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    features_of(&stream);
    let stopped = Stopped::new(receiver);
    use_more_memory(&mut host, &data);
    let process = stopped.0;
    drop(stopped);
    eventually("the first receiver process ends", || {
        !matches!(state(process), Some('S' | 'R' | 'D' | 'T'))
    });
    // The export's front-end, which was idle: descriptors arrive, and are used.
    let error = new_eventfd();
    break_queue(&stream, error.as_fd());
    let mut count = [0; 8];
    eventually("its queue is broken", || {
        rustix::io::read(&error, &mut count).is_ok()
    });
    use_more_memory(&mut host, &data);
    assert_eq!(daemon.count("client disconnected"), 0);
    assert_eq!(daemon.count("front-end disconnected"), 0);
    drop((host, stream));
    daemon.end();
}

#[test]
fn front_end_sends_memory_while_receiver_is_stopped() {
    let test_dir = TestDir::new();
    let socket = test_dir.path("v.sock");
    let daemon = Daemon::spawn(&["serve", "--vhost-user-blk", &text(&socket), "mem://1M"]);
    daemon.wait_listening(&socket);
    let stream = UnixStream::connect(&socket).unwrap();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    features_of(&stream);
    let stopped = Stopped::new(only_receiver(&daemon));
    let error = new_eventfd();
    break_queue(&stream, error.as_fd());
    let mut count = [0; 8];
    eventually("its queue is broken", || {
        rustix::io::read(&error, &mut count).is_ok()
    });
    assert!(stopped.is_stopped());
    features_of(&stream);
    drop((stopped, stream));
    daemon.end();
}

/// Clients attach, map and unmap memory while the keeper is stopped: their replies come, and the
/// disk is shown as not yet kept. Then the keeper runs again, and the disk outlives its process.
#[test]
fn client_attaches_while_keeper_is_stopped() {
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("control"));
    let (daemon, _) = serve(&test_dir, &["mem://4M", "--control", &control]);
    let client = Client::new(vec![test_dir.path("control")]).unwrap();
    eventually("it answers", || client.disks().is_ok());
    let is_behind = || client.disk("vm").unwrap().not_yet_kept;
    let data = pattern(1, 4096);
    for round in 0..2 {
        let keeper = Stopped::new(daemon.pid());
        let mut host = Host::up(&test_dir.socket());
        host.write(1, 0, &data);
        host.assign_vectors(2);
        use_more_memory(&mut host, &data);
        assert!(is_behind(), "round {round}");
        assert!(keeper.is_stopped());
        drop(keeper);
        eventually("it is kept", || !is_behind());
        kill_serving(&daemon);
        assert!(host.read(1, 0, data.len()) == data);
        use_more_memory(&mut host, &data);
        eventually("it answers", || client.disks().is_ok());
        // The same with a client that is attached already.
        let keeper = Stopped::new(daemon.pid());
        use_more_memory(&mut host, &data);
        use_more_memory(&mut host, &data);
        assert!(keeper.is_stopped() && is_behind());
        drop(keeper);
        eventually("it is kept", || !is_behind());
        kill_serving(&daemon);
        use_more_memory(&mut host, &data);
        eventually("it answers", || client.disks().is_ok());
    }
    let ended = daemon.end();
    let logged = |text: &str| ended.log.iter().filter(|line| line.contains(text)).count();
    // A busy machine may delay the keeper once more.
    assert!(logged("not yet kept") >= 4, "{ended:#?}");
    assert!(logged("the keeper runs again") >= 4, "{ended:#?}");
    assert_eq!(logged("ERROR"), 0, "{ended:#?}");
}

/// The serving process is killed while the keeper is stopped. The keeper then handles the messages
/// that the process has sent, and the next process goes on with the client.
#[test]
fn client_outlives_process_that_dies_while_keeper_is_stopped() {
    let test_dir = TestDir::new();
    let (daemon, _) = serve(&test_dir, &["mem://4M"]);
    let data = pattern(1, 4096);
    let keeper = Stopped::new(daemon.pid());
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &data);
    host.assign_vectors(2);
    use_more_memory(&mut host, &data);
    let more = memfd(1 << 20);
    host.link.map(MORE, 1 << 20, more.as_fd()).unwrap();
    let process = serving(daemon.pid()).unwrap();
    kill_process(process, Signal::KILL).unwrap();
    eventually("it has died", || matches!(state(process), Some('Z') | None));
    assert!(keeper.is_stopped());
    drop(keeper);
    let mut read = host.transfer(NvmOpcode::READ, 1, 0, data.len(), 4 << 20);
    read.set_prps(MORE, 0);
    assert_eq!(host.run(1, read).status(), Status::SUCCESS);
    let mut got = vec![0; data.len()];
    more.read_exact_at(&mut got, 0).unwrap();
    assert!(got == data);
    drop(host);
    let ended = daemon.end();
    let logged = |text: &str| ended.log.iter().filter(|line| line.contains(text)).count();
    assert_eq!(logged("ERROR"), 0, "{ended:#?}");
}

/// A change is recorded before it takes effect: it waits for the keeper, and fails in the end.
#[test]
fn change_without_answer_of_keeper_fails_and_has_no_effect() {
    let test_dir = TestDir::new();
    let disks = controller(&test_dir, "a", &["mem://1M"], "");
    let domain = Domain::start(test_dir, &disks);
    let mut guest = domain.host("a");
    let data = pattern(1, 4096);
    guest.write(1, 0, &data);
    let change = || command(&domain, &["limits", "a", "--iops", "50000"]);
    let limits = || domain.client.limits(&LimitChange::default()).unwrap();
    let keeper = Stopped::new(domain.daemon.pid());
    let (code, said) = change();
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("the keeper has not answered within"),
        "{said}"
    );
    assert!(keeper.is_stopped());
    assert_eq!(limits(), []);
    assert!(guest.read(1, 0, data.len()) == data);
    drop(keeper);
    let (code, said) = change();
    assert_eq!(code, Some(0), "{said}");
    domain.kill();
    assert_eq!(limits()[0].iops, 50_000);
    assert!(guest.read(1, 0, data.len()) == data);
    drop(guest);
    domain.daemon.end();
}

/// User of a daemon and of one of its clients. Root may have any number of descriptors in flight.
const USER: u32 = 54_324;
/// Path of the socket to flood, for a process that is to do so.
const FLOODS: &str = "VNVME_TEST_FLOODS";
/// User of a daemon and of a process that holds descriptors in flight.
const HOLDER: u32 = 54_325;
/// Set for a process that is to hold descriptors.
const HOLDS: &str = "VNVME_TEST_HOLDS";
/// Descriptors in a message, and messages, of the flood.
const FLOOD: usize = 50;
/// The daemon may have so many descriptors open, and in flight.
const DESCRIPTORS: u64 = 1024;

/// Sends bytes with descriptors.
fn send(
    socket: &UnixStream,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<usize, rustix::io::Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FLOOD))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )
}

/// Returns how many messages of `len` bytes a socket takes after one of `first` bytes, while nobody
/// reads.
fn capacity(first: usize, len: usize) -> usize {
    let (socket, _peer) = UnixStream::pair().unwrap();
    socket.set_nonblocking(true).unwrap();
    send(&socket, &vec![0; first], &[]).unwrap();
    std::iter::from_fn(|| send(&socket, &vec![0; len], &[]).ok()).count()
}

/// Sets the soft limit of open descriptors, which is that of descriptors in flight, too.
fn limit_descriptors(limit: Option<u64>) {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let current = limit.or(maximum);
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
}

/// Connects, reads no reply, and sends descriptors until no process of this user with the daemon's
/// limit can send any. `None`: the server was fast enough to read some of them, and has ended the
/// connection.
fn flood(path: &OsStr) -> Option<UnixStream> {
    limit_descriptors(None);
    let socket = UnixStream::connect(path).ok()?;
    send(&socket, &version(0, b"{}\0"), &[]).ok()?;
    let unread = || rustix::io::ioctl_fionread(&socket).unwrap() as usize;
    eventually("the version is answered", || unread() > 0);
    let first = unread();
    // More requests than replies of the same length fit into a socket: the server does not read on
    // behind the first one that cannot be answered.
    let info = [16u32, 0, 0, 0].map(u32::to_ne_bytes).concat();
    let request = message(4, 0, None, &info);
    let replies = capacity(first, request.len());
    for _ in 0..replies + 64 {
        send(&socket, &request, &[]).ok()?;
    }
    eventually("the server cannot send", || {
        unread() >= first + (replies - 4) * request.len()
    });
    let memory = memfd(4096);
    for _ in 0..FLOOD {
        send(&socket, b"x", &[memory.as_fd(); FLOOD]).ok()?;
    }
    limit_descriptors(Some(DESCRIPTORS));
    let (own, _peer) = UnixStream::pair().unwrap();
    let refused = send(&own, b"x", &[memory.as_fd()]);
    (refused == Err(rustix::io::Errno::TOOMANYREFS)).then_some(socket)
}

/// Not a test of its own: a client that floods a server of its user with descriptors.
#[test]
fn flooding_client() {
    let Some(path) = std::env::var_os(FLOODS) else {
        return;
    };
    let mut flooded = None;
    eventually("no descriptor can be sent", || {
        flooded = flood(&path);
        flooded.is_some()
    });
    println!("flooded");
    // The end of the connection, which the server is to cause.
    let socket = flooded.unwrap();
    let mut fds = [PollFd::new(&socket, PollFlags::empty())];
    poll(&mut fds, None).unwrap();
    println!("ended");
}

/// A client of the daemon's own user leaves no room for descriptors in flight. Its neighbour's are
/// received all the same, and the client is disconnected.
#[test]
fn flood_of_descriptors_leaves_neighbour_served() {
    let test = "flood_of_descriptors_leaves_neighbour_served";
    let Some((test_dir, program)) = crate::access::open_place(test) else {
        return;
    };
    fs::set_permissions(test_dir.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    let (flooded, late) = (test_dir.path("flooded.sock"), test_dir.path("late.sock"));
    let namespace = "namespace = [{ volume = \"mem://4M\" }]";
    let controller = |socket: &Path| {
        let socket = text(socket);
        format!("[[controller]]\nsocket = \"{socket}\"\ndoorbells = \"mapped\"\n{namespace}\n")
    };
    let config = test_dir.path("vnvme.toml");
    fs::write(
        &config,
        controller(&flooded) + &controller(&late) + &controller(&test_dir.socket()),
    )
    .unwrap();
    let args = ["serve", "--config", &text(&config)];
    let daemon = Daemon::spawn_limited_as(USER, DESCRIPTORS, &program, &args);
    for socket in [&flooded, &late, &test_dir.socket()] {
        daemon.wait_listening(socket);
    }
    let mut host = Host::up(&test_dir.socket());
    let data = pattern(1, 4096);
    host.write(1, 0, &data);
    for attaches in [false, true] {
        let mut child = Command::new("/proc/self/exe")
            .args(["--exact", "starvation::flooding_client", "--nocapture"])
            .env(FLOODS, &flooded)
            .uid(USER)
            .gid(USER)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut wait = |wanted: &str| lines.any(|line| line.unwrap().ends_with(wanted));
        assert!(wait("flooded"));
        if attaches {
            // Replies to a new client have descriptors, too.
            use_more_memory(&mut Host::up(&late), &[0; 4096]);
        }
        for _ in 0..3 {
            use_more_memory(&mut host, &data);
            host.assign_vectors(4);
        }
        assert!(wait("ended"));
        assert!(child.wait().unwrap().success());
        // The disk of the client that has flooded is free again.
        use_more_memory(&mut Host::up(&flooded), &[0; 4096]);
    }
    drop(host);
    daemon.end();
}

/// Not a test of its own: holds descriptors in flight, in its own socket, until its input ends.
#[test]
fn holder_of_descriptors() {
    if std::env::var_os(HOLDS).is_none() {
        return;
    }
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let memory = memfd(4096);
    for _ in 0..FLOOD {
        send(&ours, b"x", &[memory.as_fd(); FLOOD]).unwrap();
    }
    limit_descriptors(Some(DESCRIPTORS));
    let refused = send(&ours, b"x", &[memory.as_fd()]);
    assert_eq!(refused, Err(rustix::io::Errno::TOOMANYREFS));
    println!("full");
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// Another process of the daemon's user leaves no room for the descriptor of a reply. The reply
/// waits until there is room, and other clients are served meanwhile.
#[test]
fn reply_waits_while_kernel_takes_no_descriptor() {
    let test = "reply_waits_while_kernel_takes_no_descriptor";
    let Some((test_dir, program)) = crate::access::open_place(test) else {
        return;
    };
    fs::set_permissions(test_dir.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    let (first, second) = (test_dir.socket(), test_dir.path("second.sock"));
    let config = test_dir.path("vnvme.toml");
    let controller = |socket: &Path| {
        let socket = text(socket);
        format!(
            "[[controller]]\nsocket = \"{socket}\"\ndoorbells = \"mapped\"\nnamespace = [{{ volume = \"mem://4M\" }}]\n"
        )
    };
    fs::write(&config, controller(&first) + &controller(&second)).unwrap();
    let args = ["serve", "--workers", "1", "--config", &text(&config)];
    let daemon = Daemon::spawn_limited_as(HOLDER, DESCRIPTORS, &program, &args);
    daemon.wait_listening(&first);
    daemon.wait_listening(&second);
    let mut neighbour = Host::up(&second);
    let client = UnixStream::connect(&first).unwrap();
    client.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    send(&client, &version(0, b"{}\0"), &[]).unwrap();
    let mut header = [0; 16];
    (&client).read_exact(&mut header).unwrap();
    let rest = u32::from_le_bytes(header[4..8].try_into().unwrap()) as usize - header.len();
    (&client).read_exact(&mut vec![0; rest]).unwrap();

    let mut child = Command::new("/proc/self/exe")
        .args([
            "--exact",
            "starvation::holder_of_descriptors",
            "--nocapture",
        ])
        .env(HOLDS, "1")
        .uid(HOLDER)
        .gid(HOLDER)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().ends_with("full")));
    // DEVICE_GET_REGION_INFO of BAR0, whose reply has the page of doorbells.
    let question = [256u32, 0, 0, 0, 0, 0, 0, 0].map(u32::to_ne_bytes);
    send(&client, &message(5, 0, None, &question.concat()), &[]).unwrap();
    // The same worker answers the neighbour meanwhile.
    for _ in 0..1000 {
        neighbour.read32(REG_CSTS);
    }
    assert_eq!(rustix::io::ioctl_fionread(&client).unwrap(), 0);
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());

    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut reply = [0; 512];
    let received = recvmsg(
        &client,
        &mut [IoSliceMut::new(&mut reply)],
        &mut control,
        RecvFlags::empty(),
    );
    assert!(
        received.unwrap().bytes > header.len(),
        "the client was disconnected"
    );
    let descriptors = control.drain().map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.count(),
        _ => 0,
    });
    assert_eq!(descriptors.sum::<usize>(), 1);
    drop((neighbour, client));
    daemon.end();
}

/// Waits until the server has ended the connection of a client that sends nothing.
fn wait_disconnected(host: &Host) {
    let mut fds = [PollFd::new(&host.client, PollFlags::RDHUP)];
    let limit = Timespec::try_from(WAIT_TIMEOUT).unwrap();
    assert_eq!(poll(&mut fds, Some(&limit)), Ok(1), "it is still connected");
}

/// The keeper is stopped, and its socket has no room for all descriptors of a client. When the
/// serving process is killed then, the next one cannot continue with the client, and disconnects it
/// at once, with the reason in the log.
#[test]
fn client_unknown_to_keeper_is_disconnected_at_once_after_kill() {
    let test_dir = TestDir::new();
    let (daemon, _) = serve(&test_dir, &["mem://4M"]);
    let data = pattern(1, 4096);
    let keeper = Stopped::new(daemon.pid());
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &data);
    for _ in 0..150 {
        use_more_memory(&mut host, &data);
    }
    let process = serving(daemon.pid()).unwrap();
    kill_process(process, Signal::KILL).unwrap();
    eventually("it has died", || matches!(state(process), Some('Z') | None));
    assert!(keeper.is_stopped());
    drop(keeper);
    wait_disconnected(&host);
    daemon.wait_log(|line| line.contains("could not have this client's descriptors kept"));
    drop(host);
    let mut host = Host::up(&test_dir.socket());
    host.write(1, 0, &data);
    drop(host);
    daemon.end();
}
