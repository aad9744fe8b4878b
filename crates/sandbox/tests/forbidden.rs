//! Each rule is broken: by a process that is in the sandbox, and, to see that the attempt would
//! succeed otherwise, by one that is not.
//!
//! A process cannot leave the sandbox, so each attempt has one of its own: this program again, with
//! the test [`child`] alone.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test fails by a panic.
#![allow(unsafe_code)] // Some calls that are forbidden have no safe form.

use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;
use sandbox::{Connect, Needs, Sandbox};
use std::fs::{self, File};
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, exit};

/// How the attempt is named to the child.
const TRY: &str = "SANDBOX_TRY";
/// Which of the two steps the child takes before it.
const STEP: &str = "SANDBOX_STEP";
/// A directory with those of [`DIRECTORIES`]; a file `one/beside`, and a link `open/link` to
/// `there/file`.
const PLACE: &str = "SANDBOX_PLACE";
/// Each has a file `file`.
const DIRECTORIES: [&str; 7] = [
    "there",
    "removable",
    "readable",
    "open",
    "open/inside",
    "one",
    "look",
];
/// A port that somebody listens on, and a process that is not in the sandbox.
const PORT: &str = "SANDBOX_PORT";
const OUTSIDE: &str = "SANDBOX_OUTSIDE";
/// The process needs to connect to that port, and to sockets in a directory.
const CONNECTS: &str = "SANDBOX_CONNECTS";

/// What the child is to start before it enters: a thread of that name.
const EARLY: &str = "early";

/// What the child ends with when the attempt has succeeded, or when there was none.
const DONE: i32 = 200;
const BROKEN: i32 = 201;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// [`Sandbox::enter`] alone.
    Enter,
    /// [`Sandbox::seal`] alone.
    Seal,
    /// Both.
    Both,
    /// Both, of a process that opens files while it runs.
    Later,
    /// [`sandbox::leave_nothing`].
    Thread,
    /// [`sandbox::leave_user`].
    Starter,
    /// None: to see that the attempt can succeed.
    Outside,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Done,
    Refused(Errno),
    Killed,
}

/// What is attempted. A file is named from [`PLACE`].
type Attempt = fn() -> io::Result<()>;

struct Case {
    name: &'static str,
    attempt: Attempt,
    step: Step,
    end: End,
    /// What it takes outside, and not every test has.
    needs: CapabilitySet,
}

const fn case(name: &'static str, attempt: Attempt, step: Step, end: End) -> Case {
    Case {
        name,
        attempt,
        step,
        end,
        needs: CapabilitySet::empty(),
    }
}

const fn with(needs: CapabilitySet, case: Case) -> Case {
    Case { needs, ..case }
}

const DENIED: End = End::Refused(Errno::ACCESS);
const FORBIDDEN: End = End::Refused(Errno::PERM);
const ELSEWHERE: End = End::Refused(Errno::XDEV);

use Step::{Both, Enter, Later, Seal, Starter, Thread};

/// Files, by Landlock.
const FILES: &[Case] = &[
    case("read", read_file, Enter, DENIED),
    case("read a system file", read_passwd, Enter, DENIED),
    case("write", write_file, Enter, DENIED),
    case("truncate", truncate_file, Enter, DENIED),
    case("create", create_file, Enter, DENIED),
    case("make a directory", make_directory, Enter, DENIED),
    case("list", list_directory, Enter, DENIED),
    case("rename", rename_file, Enter, DENIED),
    case("remove elsewhere", remove_elsewhere, Enter, DENIED),
    case(
        "remove where it may",
        remove_where_allowed,
        Enter,
        End::Done,
    ),
    case(
        "read where it may remove",
        read_where_allowed,
        Enter,
        DENIED,
    ),
    case(
        "read where it may read",
        read_where_it_may,
        Enter,
        End::Done,
    ),
    case(
        "write where it may read",
        write_where_it_may_read,
        Enter,
        DENIED,
    ),
    case(
        "make a socket where it may remove",
        socket_where_allowed,
        Enter,
        DENIED,
    ),
    case("execute", execute, Enter, DENIED),
    case("read in a thread", read_in_thread, Enter, DENIED),
    case("read by a ring", read_by_ring, Enter, DENIED),
    case(
        "read by a ring's worker",
        read_by_ring_worker,
        Enter,
        DENIED,
    ),
    case("read by a polled ring", read_by_polled_ring, Enter, DENIED),
    case("read, early thread", read_file, Thread, DENIED),
    case("connect, early thread", connect_tcp, Thread, DENIED),
];

/// What is opened later, by Landlock and by the list of calls: each is tried with all that a
/// process keeps which serves more while it runs ([`Needs::open_below`], [`Needs::read_below`]).
const LATER: &[Case] = &[
    case("read below", later_read, Later, End::Done),
    case("write below", later_write, Later, End::Done),
    case("create below", later_create, Later, End::Done),
    case("replace below", later_replace, Later, End::Done),
    case("remove below", later_remove, Later, End::Done),
    case("list below", later_list, Later, End::Done),
    case("listen below", later_listen, Later, End::Done),
    case("connect below", later_connect, Later, End::Done),
    case("read a file of the list", later_read_one, Later, End::Done),
    case("read beside it", later_read_beside, Later, DENIED),
    case("read outside", read_file, Later, DENIED),
    case("read a system file", read_passwd, Later, DENIED),
    case("write outside", write_file, Later, DENIED),
    case("create outside", create_file, Later, DENIED),
    case("list outside", list_directory, Later, DENIED),
    case("remove outside", remove_elsewhere, Later, DENIED),
    case("listen outside", later_listen_outside, Later, DENIED),
    case("read by a link", later_read_link, Later, DENIED),
    case("write by a link", later_write_link, Later, DENIED),
    case("read by dots", later_read_dots, Later, DENIED),
    case("write by dots", later_write_dots, Later, DENIED),
    case("move out", later_move_out, Later, DENIED),
    case("move in", later_move_in, Later, DENIED),
    // EXDEV: for Landlock another directory is another file system.
    case("move between directories", later_move, Later, ELSEWHERE),
    case("a second name inside", later_link_in, Later, FORBIDDEN),
    case("a link", later_symlink, Later, FORBIDDEN),
    case("a directory", later_directory, Later, FORBIDDEN),
    case("a FIFO", later_fifo, Later, FORBIDDEN),
    case("a device", later_device, Later, FORBIDDEN),
    case("execute below", execute_here, Later, End::Killed),
    case("read where it may read", later_read_only, Later, End::Done),
    case("write there", later_write_read_only, Later, DENIED),
    case("create there", later_create_read_only, Later, DENIED),
    case("remove there", later_remove_read_only, Later, DENIED),
    case("another owner", later_owner, Later, FORBIDDEN),
    case(
        "another mode by a path",
        later_mode_by_path,
        Later,
        FORBIDDEN,
    ),
    case("a mode", later_mode, Later, End::Done),
    case(
        "a mode of another user's rights",
        later_set_user,
        Later,
        FORBIDDEN,
    ),
    case("TCP", connect_tcp, Later, FORBIDDEN),
    case("UDP", udp, Later, FORBIDDEN),
    case("abstract socket", connect_abstract, Later, FORBIDDEN),
    case("datagrams", later_datagrams, Later, FORBIDDEN),
    case("a ring", ring, Later, FORBIDDEN),
    case("input to the terminal", terminal, Later, FORBIDDEN),
    case("a process", fork, Later, FORBIDDEN),
];

/// The network and other processes, by Landlock.
const OTHERS: &[Case] = &[
    case("connect", connect_tcp, Enter, DENIED),
    case("listen", listen_tcp, Enter, DENIED),
    case(
        "connect to an abstract socket",
        connect_abstract,
        Enter,
        FORBIDDEN,
    ),
    case("signal", signal, Enter, FORBIDDEN),
];

/// Capabilities and limits.
const RIGHTS: &[Case] = &[
    with(
        CapabilitySet::CHOWN,
        case("change an owner", change_owner, Enter, FORBIDDEN),
    ),
    with(
        CapabilitySet::SYS_CHROOT,
        case("change the root", change_root, Enter, FORBIDDEN),
    ),
    with(
        CapabilitySet::SYS_ADMIN,
        case("regain a capability", regain, Enter, FORBIDDEN),
    ),
    with(
        CapabilitySet::SYS_ADMIN,
        case("regain, early thread", regain, Thread, FORBIDDEN),
    ),
    with(
        CapabilitySet::SETPCAP,
        case("have one in the bounding set", bounded, Enter, FORBIDDEN),
    ),
    with(
        CapabilitySet::SYS_RESOURCE,
        case("raise a hard limit", raise_limit, Enter, FORBIDDEN),
    ),
    case("have new privileges", new_privileges, Enter, FORBIDDEN),
    case("have core dumps", core_dumps, Enter, FORBIDDEN),
    case(
        "have new privileges, early thread",
        new_privileges,
        Thread,
        FORBIDDEN,
    ),
];

/// What a process may that starts others, which need all that its user may.
const STARTING: &[Case] = &[
    case("read", read_file, Starter, End::Done),
    case("execute", execute, Starter, End::Done),
    case("become another program", execute_here, Starter, End::Done),
    case("have new privileges", new_privileges, Starter, FORBIDDEN),
    with(
        CapabilitySet::SYS_CHROOT,
        case("change the root", change_root, Starter, End::Killed),
    ),
];

/// System calls.
const CALLS: &[Case] = &[
    case("read", read_file, Seal, FORBIDDEN),
    case("list", list_directory, Seal, FORBIDDEN),
    case("read where it could", read_where_it_may, Both, FORBIDDEN),
    case("rename", rename_file, Seal, FORBIDDEN),
    case("make a directory", make_directory, Seal, FORBIDDEN),
    case("TCP", connect_tcp, Seal, FORBIDDEN),
    case("UDP", udp, Seal, FORBIDDEN),
    case("abstract socket", connect_abstract, Seal, FORBIDDEN),
    case("signal", signal, Seal, FORBIDDEN),
    case("signal to a thread", signal_thread, Seal, FORBIDDEN),
    case("a socket", a_socket, Seal, FORBIDDEN),
    case("a pair of other sockets", pair_of_others, Seal, FORBIDDEN),
    case("a pair for datagrams", pair_for_datagrams, Seal, FORBIDDEN),
    case(
        "signals of a file to another",
        owner_of_signals,
        Seal,
        FORBIDDEN,
    ),
    case("another's CPUs", affinity_of_another, Seal, FORBIDDEN),
    case("a process", fork, Seal, FORBIDDEN),
    case(
        "a process by the newer call",
        clone3,
        Seal,
        End::Refused(Errno::NOSYS),
    ),
    case("a ring", ring, Seal, FORBIDDEN),
    case("code in new memory", map_code, Seal, FORBIDDEN),
    case("code in memory", protect_code, Seal, FORBIDDEN),
    case("set a limit", set_limit, Seal, FORBIDDEN),
    case("input to the terminal", terminal, Seal, FORBIDDEN),
    case("a device's call", vfio_call, Seal, FORBIDDEN),
    case("become dumpable", dumpable, Seal, FORBIDDEN),
    case("another filter", filter, Seal, FORBIDDEN),
    case("become another program", execute_here, Seal, End::Killed),
    case("what serving takes", serving, Both, End::Done),
];

/// Whose callers end at once.
const NEVER: &[(&str, libc::c_long)] = &[
    ("execve", libc::SYS_execve),
    ("execveat", libc::SYS_execveat),
    ("ptrace", libc::SYS_ptrace),
    ("process_vm_readv", libc::SYS_process_vm_readv),
    ("process_vm_writev", libc::SYS_process_vm_writev),
    ("pidfd_getfd", libc::SYS_pidfd_getfd),
    ("mount", libc::SYS_mount),
    ("umount2", libc::SYS_umount2),
    ("move_mount", libc::SYS_move_mount),
    ("fsopen", libc::SYS_fsopen),
    ("pivot_root", libc::SYS_pivot_root),
    ("chroot", libc::SYS_chroot),
    ("open_by_handle_at", libc::SYS_open_by_handle_at),
    ("setns", libc::SYS_setns),
    ("unshare", libc::SYS_unshare),
    ("setuid", libc::SYS_setuid),
    ("setresgid", libc::SYS_setresgid),
    ("capset", libc::SYS_capset),
    ("bpf", libc::SYS_bpf),
    ("perf_event_open", libc::SYS_perf_event_open),
    ("userfaultfd", libc::SYS_userfaultfd),
    ("keyctl", libc::SYS_keyctl),
    ("init_module", libc::SYS_init_module),
    ("finit_module", libc::SYS_finit_module),
    ("kexec_load", libc::SYS_kexec_load),
    ("reboot", libc::SYS_reboot),
    ("swapon", libc::SYS_swapon),
    ("clock_settime", libc::SYS_clock_settime),
];

fn place(name: &str) -> PathBuf {
    PathBuf::from(std::env::var_os(PLACE).unwrap()).join(name)
}

fn read_file() -> io::Result<()> {
    File::open(place("there/file")).map(drop)
}

fn read_passwd() -> io::Result<()> {
    File::open("/etc/passwd").map(drop)
}

fn write_file() -> io::Result<()> {
    File::options()
        .append(true)
        .open(place("there/file"))
        .map(drop)
}

fn truncate_file() -> io::Result<()> {
    let path = std::ffi::CString::new(place("there/file").into_os_string().into_encoded_bytes());
    let path = path.unwrap();
    // SAFETY: the path ends with a NUL byte.
    answer(unsafe { libc::truncate(path.as_ptr(), 0) }.into())
}

fn create_file() -> io::Result<()> {
    File::create(place("there/new")).map(drop)
}

fn make_directory() -> io::Result<()> {
    fs::create_dir(place("there/directory"))
}

fn list_directory() -> io::Result<()> {
    fs::read_dir(place("there")).map(drop)
}

fn rename_file() -> io::Result<()> {
    fs::rename(place("there/file"), place("there/other"))
}

fn remove_elsewhere() -> io::Result<()> {
    fs::remove_file(place("there/file"))
}

fn remove_where_allowed() -> io::Result<()> {
    fs::remove_file(place("removable/file"))
}

fn read_where_allowed() -> io::Result<()> {
    File::open(place("removable/file")).map(drop)
}

fn read_where_it_may() -> io::Result<()> {
    File::open(place("readable/file")).map(drop)
}

fn write_where_it_may_read() -> io::Result<()> {
    let file = place("readable/file");
    File::options().append(true).open(file).map(drop)
}

fn socket_where_allowed() -> io::Result<()> {
    let path = place("removable/socket");
    std::os::unix::net::UnixListener::bind(path).map(drop)
}

fn later_read() -> io::Result<()> {
    File::open(place("open/inside/file")).map(drop)
}

fn append(name: &str) -> io::Result<()> {
    File::options().append(true).open(place(name)).map(drop)
}

fn later_write() -> io::Result<()> {
    append("open/file")
}

fn later_create() -> io::Result<()> {
    File::create(place("open/inside/new")).map(drop)
}

fn later_replace() -> io::Result<()> {
    fs::rename(place("open/file"), place("open/other"))
}

fn later_remove() -> io::Result<()> {
    fs::remove_file(place("open/file"))
}

fn later_list() -> io::Result<()> {
    fs::read_dir(place("open/inside")).map(drop)
}

fn later_listen() -> io::Result<()> {
    UnixListener::bind(place("open/socket")).map(drop)
}

fn later_listen_outside() -> io::Result<()> {
    UnixListener::bind(place("there/socket")).map(drop)
}

fn later_connect() -> io::Result<()> {
    let _listener = UnixListener::bind(place("open/socket"))?;
    UnixStream::connect(place("open/socket")).map(drop)
}

fn later_read_one() -> io::Result<()> {
    File::open(place("one/file")).map(drop)
}

fn later_read_beside() -> io::Result<()> {
    File::open(place("one/beside")).map(drop)
}

fn later_read_link() -> io::Result<()> {
    File::open(place("open/link")).map(drop)
}

fn later_write_link() -> io::Result<()> {
    append("open/link")
}

fn later_read_dots() -> io::Result<()> {
    File::open(place("open/inside/../../there/file")).map(drop)
}

fn later_write_dots() -> io::Result<()> {
    append("open/../there/file")
}

fn later_move_out() -> io::Result<()> {
    fs::rename(place("open/file"), place("readable/out"))
}

fn later_move_in() -> io::Result<()> {
    fs::rename(place("there/file"), place("open/in"))
}

fn later_move() -> io::Result<()> {
    fs::rename(place("open/file"), place("open/inside/file"))
}

fn later_link_in() -> io::Result<()> {
    fs::hard_link(place("there/file"), place("open/in"))
}

fn later_symlink() -> io::Result<()> {
    std::os::unix::fs::symlink("/etc", place("open/etc"))
}

fn later_directory() -> io::Result<()> {
    fs::create_dir(place("open/directory"))
}

fn make_node(kind: rustix::fs::FileType) -> io::Result<()> {
    use rustix::fs::{CWD, Mode, mknodat};
    Ok(mknodat(CWD, place("open/node"), kind, Mode::RUSR, 0)?)
}

fn later_fifo() -> io::Result<()> {
    make_node(rustix::fs::FileType::Fifo)
}

/// The one of overlayfs, which anybody may make.
fn later_device() -> io::Result<()> {
    make_node(rustix::fs::FileType::CharacterDevice)
}

fn later_read_only() -> io::Result<()> {
    File::open(place("look/file")).map(drop)?;
    fs::read_dir(place("look")).map(drop)
}

fn later_write_read_only() -> io::Result<()> {
    append("look/file")
}

fn later_create_read_only() -> io::Result<()> {
    File::create(place("look/new")).map(drop)
}

fn later_remove_read_only() -> io::Result<()> {
    fs::remove_file(place("look/file"))
}

fn later_owner() -> io::Result<()> {
    std::os::unix::fs::chown(place("open/file"), None, None)
}

fn mode(bits: u32) -> fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(bits)
}

fn later_mode_by_path() -> io::Result<()> {
    fs::set_permissions(place("open/file"), mode(0o666))
}

fn later_mode() -> io::Result<()> {
    File::open(place("open/file"))?.set_permissions(mode(0o640))
}

/// Who executes it would have this user's rights.
fn later_set_user() -> io::Result<()> {
    File::open(place("open/file"))?.set_permissions(mode(0o4755))
}

fn later_datagrams() -> io::Result<()> {
    std::os::unix::net::UnixDatagram::unbound().map(drop)
}

fn execute() -> io::Result<()> {
    Command::new("/bin/true").status().map(drop)
}

fn execute_here() -> io::Result<()> {
    use std::os::unix::process::CommandExt;
    Err(Command::new("/bin/sh").args(["-c", "exit 200"]).exec())
}

fn read_in_thread() -> io::Result<()> {
    std::thread::spawn(read_file).join().unwrap()
}

/// An openat by a ring that is made here, as a worker's is.
fn by_ring(mut ring: IoUring, flags: squeue::Flags) -> io::Result<()> {
    let path = std::ffi::CString::new("/etc/passwd").unwrap();
    let open = opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path.as_ptr()).flags(libc::O_RDONLY);
    let entry = open.build().flags(flags);
    // SAFETY: the path lives until the answer is there.
    unsafe { ring.submission().push(&entry) }.unwrap();
    ring.submit_and_wait(1)?;
    let result = ring.completion().next().unwrap().result();
    match result {
        0.. => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

fn read_by_ring() -> io::Result<()> {
    by_ring(IoUring::new(4)?, squeue::Flags::empty())
}

fn read_by_ring_worker() -> io::Result<()> {
    by_ring(IoUring::new(4)?, squeue::Flags::ASYNC)
}

fn read_by_polled_ring() -> io::Result<()> {
    by_ring(
        IoUring::builder().setup_sqpoll(10).build(4)?,
        squeue::Flags::empty(),
    )
}

fn port() -> u16 {
    std::env::var(PORT).unwrap().parse().unwrap()
}

fn connect_tcp() -> io::Result<()> {
    TcpStream::connect(("127.0.0.1", port())).map(drop)
}

const OTHER_PORT: &str = "another port";
const DATAGRAM: &str = "a datagram socket";
const RAW_NETLINK: &str = "another family";
const SOCKET_IN: &str = "a socket where it is needed";
const SOCKET_ELSEWHERE: &str = "a socket elsewhere";

/// What only a process that needs to connect may be able to do.
const CONNECTIONS: &[(&str, Attempt)] = &[
    (OTHER_PORT, other_port),
    (DATAGRAM, datagram),
    (RAW_NETLINK, netlink),
    (SOCKET_IN, socket_in),
    (SOCKET_ELSEWHERE, socket_elsewhere),
];

/// Outside nobody listens there, which the host says.
fn other_port() -> io::Result<()> {
    match TcpStream::connect(("127.0.0.1", 1)) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
        other => other.map(drop),
    }
}

fn socket_of(family: AddressFamily, kind: SocketType) -> io::Result<()> {
    socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    Ok(())
}

fn datagram() -> io::Result<()> {
    socket_of(AddressFamily::UNIX, SocketType::DGRAM)
}

fn netlink() -> io::Result<()> {
    socket_of(AddressFamily::NETLINK, SocketType::RAW)
}

fn socket_in() -> io::Result<()> {
    std::os::unix::net::UnixStream::connect(place("removable/listens")).map(drop)
}

fn socket_elsewhere() -> io::Result<()> {
    std::os::unix::net::UnixStream::connect(place("there/listens")).map(drop)
}

fn listen_tcp() -> io::Result<()> {
    TcpListener::bind(("127.0.0.1", 0)).map(drop)
}

fn udp() -> io::Result<()> {
    std::net::UdpSocket::bind(("127.0.0.1", 0)).map(drop)
}

fn abstract_name() -> SocketAddrUnix {
    let place = place("");
    SocketAddrUnix::new_abstract_name(place.as_os_str().as_encoded_bytes()).unwrap()
}

fn unix_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        flags,
        None,
    )?)
}

fn connect_abstract() -> io::Result<()> {
    Ok(connect(unix_socket()?, &abstract_name())?)
}

fn signal() -> io::Result<()> {
    let outside = std::env::var(OUTSIDE).unwrap().parse().unwrap();
    Ok(rustix::process::test_kill_process(
        Pid::from_raw(outside).unwrap(),
    )?)
}

fn signal_thread() -> io::Result<()> {
    let outside: libc::pid_t = std::env::var(OUTSIDE).unwrap().parse().unwrap();
    // SAFETY: numbers only.
    answer(unsafe { libc::syscall(libc::SYS_tgkill, outside, outside, 0) })
}

fn a_socket() -> io::Result<()> {
    unix_socket().map(drop)
}

/// Outside, the kernel knows the family, which has no pairs.
fn pair_of_others() -> io::Result<()> {
    let flags = SocketFlags::CLOEXEC;
    match rustix::net::socketpair(AddressFamily::INET, SocketType::STREAM, flags, None) {
        Err(Errno::OPNOTSUPP) => Ok(()),
        other => Ok(other.map(drop)?),
    }
}

/// One of them could send to any socket that has a path.
fn pair_for_datagrams() -> io::Result<()> {
    std::os::unix::net::UnixDatagram::pair().map(drop)
}

fn owner_of_signals() -> io::Result<()> {
    let outside: libc::pid_t = std::env::var(OUTSIDE).unwrap().parse().unwrap();
    let file = memory_file()?;
    // SAFETY: numbers only.
    answer(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETOWN, outside) }.into())
}

fn affinity_of_another() -> io::Result<()> {
    let outside = Pid::from_raw(std::env::var(OUTSIDE).unwrap().parse().unwrap());
    let own = rustix::thread::sched_getaffinity(None)?;
    Ok(rustix::thread::sched_setaffinity(outside, &own)?)
}

fn change_owner() -> io::Result<()> {
    std::os::unix::fs::fchown(memory_file()?, Some(12345), None)
}

fn change_root() -> io::Result<()> {
    rustix::process::chroot("/").map_err(Into::into)
}

fn regain() -> io::Result<()> {
    let mut sets = rustix::thread::capabilities(None)?;
    sets.permitted |= CapabilitySet::SYS_ADMIN;
    sets.effective |= CapabilitySet::SYS_ADMIN;
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

fn bounded() -> io::Result<()> {
    for number in 0..40 {
        let one = CapabilitySet::from_bits_retain(1 << number);
        if rustix::thread::capability_is_in_bounding_set(one)? {
            return Ok(());
        }
    }
    Err(Errno::PERM.into())
}

/// Down and up again.
fn raise_limit() -> io::Result<()> {
    for maximum in [1 << 20, 1 << 21] {
        let current = Some(0);
        let maximum = Some(maximum);
        setrlimit(Resource::Memlock, Rlimit { current, maximum })?;
    }
    Ok(())
}

fn set_limit() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, limit)?)
}

fn new_privileges() -> io::Result<()> {
    match rustix::thread::no_new_privs()? {
        true => Err(Errno::PERM.into()),
        false => Ok(()),
    }
}

/// Outside, the hard limit of most systems allows them.
fn core_dumps() -> io::Result<()> {
    let some = Rlimit {
        current: Some(4096),
        maximum: Some(4096),
    };
    match getrlimit(Resource::Core).maximum {
        Some(0) => Err(Errno::PERM.into()),
        _ => Ok(setrlimit(Resource::Core, some)?),
    }
}

/// What a system call without a result answers.
fn answer(result: libc::c_long) -> io::Result<()> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

fn fork() -> io::Result<()> {
    // SAFETY: the child ends at once.
    match unsafe { libc::fork() } {
        0 => exit(0),
        pid => answer(pid.into()),
    }
}

fn clone3() -> io::Result<()> {
    // SAFETY: no arguments are read, for their size is none.
    match answer(unsafe { libc::syscall(libc::SYS_clone3, 0, 0) }) {
        // As far as it can be known from outside: the call is there.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        other => other,
    }
}

fn ring() -> io::Result<()> {
    IoUring::new(4).map(drop)
}

fn map(protection: i32) -> io::Result<*mut libc::c_void> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: new memory, which nobody uses.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
    match memory {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        memory => Ok(memory),
    }
}

fn map_code() -> io::Result<()> {
    map(libc::PROT_READ | libc::PROT_EXEC).map(drop)
}

fn protect_code() -> io::Result<()> {
    let memory = map(libc::PROT_READ | libc::PROT_WRITE)?;
    // SAFETY: of its own memory.
    answer(unsafe { libc::mprotect(memory, 4096, libc::PROT_READ | libc::PROT_EXEC) }.into())
}

/// Outside it reaches the file, which knows no such call.
fn known_to(call: libc::c_ulong) -> io::Result<()> {
    let file = memory_file()?;
    // SAFETY: a memory file takes no argument.
    match answer(unsafe { libc::ioctl(file.as_raw_fd(), call, 0) }.into()) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => Ok(()),
        other => other,
    }
}

fn terminal() -> io::Result<()> {
    known_to(libc::TIOCSTI)
}

fn vfio_call() -> io::Result<()> {
    // VFIO_GET_API_VERSION
    known_to(0x3b64)
}

fn dumpable() -> io::Result<()> {
    // SAFETY: numbers only.
    answer(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) }.into())
}

fn filter() -> io::Result<()> {
    // SAFETY: the kernel finds no filter there, outside too.
    match answer(unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, 0) }) {
        Err(error) if error.raw_os_error() == Some(libc::EFAULT) => Ok(()),
        other => other,
    }
}

fn memory_file() -> io::Result<OwnedFd> {
    Ok(rustix::fs::memfd_create(
        "test",
        rustix::fs::MemfdFlags::CLOEXEC,
    )?)
}

/// Threads, memory, events: that the list is not too short for what any program does. The daemon's
/// own tests run in the sandbox.
fn serving() -> io::Result<()> {
    let thread = std::thread::Builder::new().name("thread".into());
    let thread = thread.spawn(|| {
        std::thread::sleep(std::time::Duration::from_millis(1));
        vec![1u8; 4 << 20].len()
    })?;
    assert_eq!(thread.join().unwrap(), 4 << 20);
    let file = memory_file()?;
    rustix::fs::ftruncate(&file, 4096)?;
    std::os::unix::net::UnixStream::pair()?;
    let pair = SocketType::SEQPACKET;
    rustix::net::socketpair(AddressFamily::UNIX, pair, SocketFlags::CLOEXEC, None)?;
    rustix::thread::sched_setaffinity(None, &rustix::thread::sched_getaffinity(None)?)?;
    rustix::fs::fcntl_setfl(&file, rustix::fs::fcntl_getfl(&file)?)?;
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
    getrlimit(Resource::Nofile);
    let mut map = std::collections::HashMap::new();
    map.insert(1, 2);
    Ok(())
}

fn all() -> impl Iterator<Item = &'static Case> {
    let all = FILES.iter().chain(LATER).chain(OTHERS);
    all.chain(RIGHTS).chain(STARTING).chain(CALLS)
}

/// In a process of its own: enters the sandbox, tries, and ends with what became of it.
#[test]
#[ignore = "the process that the other tests start"]
fn child() {
    let Ok(name) = std::env::var(TRY) else {
        return;
    };
    let step = std::env::var(STEP).unwrap();
    let later = match &*step {
        "Later" => Needs {
            open_below: vec![place("open"), place("one/file"), place("not there")],
            read_below: vec![place("look")],
            ..Needs::default()
        },
        _ => Needs::default(),
    };
    let connect = match std::env::var(CONNECTS).is_ok() {
        true => vec![Connect::Tcp(port()), Connect::UnixIn(place("removable"))],
        false => Vec::new(),
    };
    let sandbox = Sandbox::new(Needs {
        remove_in: vec![place("removable")],
        read_in: vec![place("readable"), place("not there")],
        connect,
        ..later
    });
    if name == EARLY {
        let thread = std::thread::Builder::new().name(EARLY.into());
        let hour = std::time::Duration::from_secs(3600);
        thread.spawn(move || std::thread::sleep(hour)).unwrap();
        let outside = sandbox.enter().unwrap().outside;
        let is_named = outside.iter().any(|name| name == EARLY);
        exit(if is_named { DONE } else { BROKEN });
    }
    if ["Enter", "Both", "Later"].contains(&&*step) {
        sandbox.enter().unwrap();
    }
    if ["Seal", "Both", "Later"].contains(&&*step) {
        sandbox.seal().unwrap();
    }
    if step == "Thread" {
        sandbox::leave_nothing().unwrap();
    }
    if step == "Starter" {
        sandbox::leave_user().unwrap();
    }
    if let Some((_, number)) = NEVER.iter().find(|(never, _)| *never == name) {
        // SAFETY: it does not come to that: the process ends.
        unsafe { libc::syscall(*number, 0, 0, 0, 0, 0, 0) };
        exit(DONE);
    }
    let case = all().map(|case| (case.name, case.attempt));
    let mut case = case.chain(CONNECTIONS.iter().copied());
    let case = case.find(|(of, _)| *of == name);
    let end = case.map_or(BROKEN, |(_, attempt)| match attempt() {
        Ok(()) => DONE,
        Err(error) => error.raw_os_error().unwrap_or(BROKEN),
    });
    exit(end)
}

/// What becomes of an attempt.
fn tried(name: &str, step: Step) -> End {
    tried_with(name, step, false)
}

/// The same of a process that may need to connect.
fn tried_with(name: &str, step: Step, connects: bool) -> End {
    let place = tempfile::tempdir().unwrap();
    for directory in DIRECTORIES {
        fs::create_dir(place.path().join(directory)).unwrap();
        fs::write(place.path().join(directory).join("file"), "x").unwrap();
    }
    fs::write(place.path().join("one/beside"), "x").unwrap();
    let link = place.path().join("open/link");
    std::os::unix::fs::symlink(place.path().join("there/file"), link).unwrap();
    let tcp = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = tcp.local_addr().unwrap().port().to_string();
    let abstract_socket = unix_socket().unwrap();
    let name_of = place.path().join("");
    let address =
        SocketAddrUnix::new_abstract_name(name_of.as_os_str().as_encoded_bytes()).unwrap();
    bind(&abstract_socket, &address).unwrap();
    listen(&abstract_socket, 4).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    if connects {
        command.env(CONNECTS, "1");
    }
    let _listeners = ["there", "removable"].map(|directory| {
        let path = place.path().join(directory).join("listens");
        std::os::unix::net::UnixListener::bind(path).unwrap()
    });
    let status = command
        .args(["child", "--exact", "--ignored", "--test-threads=1"])
        .env(TRY, name)
        .env(STEP, format!("{step:?}"))
        .env(PLACE, place.path())
        .env(PORT, port)
        .env(OUTSIDE, std::process::id().to_string())
        .output()
        .unwrap();
    match (status.status.code(), status.status.signal()) {
        (Some(DONE), _) => End::Done,
        (None, Some(libc::SIGSYS)) => End::Killed,
        (Some(code @ 1..DONE), _) if code != 101 => End::Refused(Errno::from_raw_os_error(code)),
        _ => panic!("{name}, {step:?}: {status:?}"),
    }
}

fn check(cases: &[Case]) {
    let held = rustix::thread::capabilities(None).unwrap().effective;
    let mut wrong = Vec::new();
    for case in cases {
        if !held.contains(case.needs) {
            let why = format!("needs {:?}", case.needs);
            testkit::skip(&format!("sandbox: {}", case.name), why);
            continue;
        }
        let end = tried(case.name, case.step);
        if end != case.end {
            wrong.push(format!(
                "{}, {:?}: {end:?}, not {:?}",
                case.name, case.step, case.end
            ));
        }
        let outside = tried(case.name, Step::Outside);
        if outside != End::Done {
            wrong.push(format!("{}, outside: {outside:?}", case.name));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Whether the kernel enforces this ABI of Landlock.
fn landlock(abi: u32, what: &str) -> bool {
    // SAFETY: asks for a number (LANDLOCK_CREATE_RULESET_VERSION).
    let known = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) };
    let has = known >= i64::from(abi);
    if !has {
        testkit::skip(what, format!("the kernel's Landlock is no ABI {abi}"));
    }
    has
}

#[test]
fn no_file_is_reached_by_its_path() {
    // Truncation came with the third.
    if landlock(3, "sandbox: files") {
        check(FILES);
    }
}

#[test]
fn what_is_opened_later_is_below_what_was_named() {
    // Moves between directories came with the second, truncation with the third.
    if landlock(3, "sandbox: what is opened later") {
        check(LATER);
    }
}

#[test]
fn neither_the_network_nor_other_processes_are_reached() {
    if landlock(6, "sandbox: network and processes") {
        check(OTHERS);
    }
}

#[test]
fn rights_do_not_come_back() {
    check(RIGHTS);
}

#[test]
fn only_listed_calls_are_made() {
    check(CALLS);
}

#[test]
fn a_process_that_starts_others_keeps_its_users_rights() {
    check(STARTING);
    for (name, _) in NEVER {
        let end = match ["execve", "execveat", "capset"].contains(name) {
            true => End::Done,
            false => End::Killed,
        };
        assert_eq!(tried(name, Step::Starter), end, "{name}");
    }
}

/// Who needs to connect may do that, to where it was said, and with no other kind of socket.
#[test]
fn only_what_is_needed_is_connected_to() {
    assert_eq!(tried_with("TCP", Step::Seal, true), End::Done);
    for (name, end) in [
        (DATAGRAM, End::Refused(Errno::PERM)),
        (RAW_NETLINK, End::Refused(Errno::PERM)),
    ] {
        assert_eq!(tried_with(name, Step::Seal, true), end, "{name}");
        assert_eq!(tried(name, Step::Outside), End::Done, "{name}, outside");
    }
    if landlock(6, "sandbox: network and processes") {
        assert_eq!(tried_with("TCP", Step::Both, true), End::Done);
        let refused = End::Refused(Errno::ACCESS);
        assert_eq!(tried_with(OTHER_PORT, Step::Both, true), refused);
        assert_eq!(tried(OTHER_PORT, Step::Outside), End::Done);
        assert_eq!(tried_with(SOCKET_IN, Step::Both, true), End::Done);
    }
    if landlock(9, "sandbox: sockets by their paths") {
        let refused = End::Refused(Errno::ACCESS);
        assert_eq!(tried_with(SOCKET_ELSEWHERE, Step::Both, true), refused);
    }
}

/// It keeps everything, and so the report names it.
#[test]
fn a_thread_that_was_there_before_is_named() {
    assert_eq!(tried(EARLY, Step::Enter), End::Done);
}

#[test]
fn some_calls_end_the_process() {
    for (name, _) in NEVER {
        assert_eq!(tried(name, Step::Seal), End::Killed, "{name}");
    }
}
