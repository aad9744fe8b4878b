//! Attempts at the network, at other processes, at rights, and at calls that nobody is to make.

use crate::*;

pub fn connect_tcp() -> io::Result<()> {
    TcpStream::connect(("127.0.0.1", port())).map(drop)
}

pub const OTHER_PORT: &str = "another port";
pub const DATAGRAM: &str = "a datagram socket";
pub const RAW_NETLINK: &str = "another family";
pub const SOCKET_IN: &str = "a socket where it is needed";
pub const SOCKET_ELSEWHERE: &str = "a socket elsewhere";

/// What only a process that needs to connect may be able to do.
pub const CONNECTIONS: &[(&str, Attempt)] = &[
    (OTHER_PORT, other_port),
    (DATAGRAM, datagram),
    (RAW_NETLINK, netlink),
    (SOCKET_IN, socket_in),
    (SOCKET_ELSEWHERE, socket_elsewhere),
];

/// Outside nobody listens there, which the host says.
pub fn other_port() -> io::Result<()> {
    match TcpStream::connect(("127.0.0.1", 1)) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
        other => other.map(drop),
    }
}

pub fn socket_of(family: AddressFamily, kind: SocketType) -> io::Result<()> {
    socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    Ok(())
}

pub fn datagram() -> io::Result<()> {
    socket_of(AddressFamily::UNIX, SocketType::DGRAM)
}

pub fn netlink() -> io::Result<()> {
    socket_of(AddressFamily::NETLINK, SocketType::RAW)
}

pub fn socket_in() -> io::Result<()> {
    std::os::unix::net::UnixStream::connect(place("removable/listens")).map(drop)
}

pub fn socket_elsewhere() -> io::Result<()> {
    std::os::unix::net::UnixStream::connect(place("there/listens")).map(drop)
}

pub fn listen_tcp() -> io::Result<()> {
    TcpListener::bind(("127.0.0.1", 0)).map(drop)
}

pub fn udp() -> io::Result<()> {
    std::net::UdpSocket::bind(("127.0.0.1", 0)).map(drop)
}

pub fn abstract_name() -> SocketAddrUnix {
    let place = place("");
    SocketAddrUnix::new_abstract_name(place.as_os_str().as_encoded_bytes()).unwrap()
}

pub fn unix_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        flags,
        None,
    )?)
}

pub fn connect_abstract() -> io::Result<()> {
    Ok(connect(unix_socket()?, &abstract_name())?)
}

pub fn signal() -> io::Result<()> {
    let outside = std::env::var(OUTSIDE).unwrap().parse().unwrap();
    Ok(rustix::process::test_kill_process(
        Pid::from_raw(outside).unwrap(),
    )?)
}

pub fn signal_thread() -> io::Result<()> {
    let outside: libc::pid_t = std::env::var(OUTSIDE).unwrap().parse().unwrap();
    // SAFETY: numbers only.
    answer(unsafe { libc::syscall(libc::SYS_tgkill, outside, outside, 0) })
}

pub fn a_socket() -> io::Result<()> {
    unix_socket().map(drop)
}

/// Outside, the kernel knows the family, which has no pairs.
pub fn pair_of_others() -> io::Result<()> {
    let flags = SocketFlags::CLOEXEC;
    match rustix::net::socketpair(AddressFamily::INET, SocketType::STREAM, flags, None) {
        Err(Errno::OPNOTSUPP) => Ok(()),
        other => Ok(other.map(drop)?),
    }
}

/// One of them could send to any socket that has a path.
pub fn pair_for_datagrams() -> io::Result<()> {
    std::os::unix::net::UnixDatagram::pair().map(drop)
}

pub fn owner_of_signals() -> io::Result<()> {
    let outside: libc::pid_t = std::env::var(OUTSIDE).unwrap().parse().unwrap();
    let file = memory_file()?;
    // SAFETY: numbers only.
    answer(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETOWN, outside) }.into())
}

pub fn affinity_of_another() -> io::Result<()> {
    let outside = Pid::from_raw(std::env::var(OUTSIDE).unwrap().parse().unwrap());
    let own = rustix::thread::sched_getaffinity(None)?;
    Ok(rustix::thread::sched_setaffinity(outside, &own)?)
}

pub fn change_owner() -> io::Result<()> {
    std::os::unix::fs::fchown(memory_file()?, Some(12345), None)
}

pub fn change_root() -> io::Result<()> {
    rustix::process::chroot("/").map_err(Into::into)
}

pub fn regain() -> io::Result<()> {
    let mut sets = rustix::thread::capabilities(None)?;
    sets.permitted |= CapabilitySet::SYS_ADMIN;
    sets.effective |= CapabilitySet::SYS_ADMIN;
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

pub fn bounded() -> io::Result<()> {
    for number in 0..40 {
        let one = CapabilitySet::from_bits_retain(1 << number);
        if rustix::thread::capability_is_in_bounding_set(one)? {
            return Ok(());
        }
    }
    Err(Errno::PERM.into())
}

/// Down and up again.
pub fn raise_limit() -> io::Result<()> {
    for maximum in [1 << 20, 1 << 21] {
        let current = Some(0);
        let maximum = Some(maximum);
        setrlimit(Resource::Memlock, Rlimit { current, maximum })?;
    }
    Ok(())
}

pub fn set_limit() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, limit)?)
}

pub fn new_privileges() -> io::Result<()> {
    if rustix::thread::no_new_privs()? {
        Err(Errno::PERM.into())
    } else {
        Ok(())
    }
}

/// Outside, the hard limit of most systems allows them.
pub fn core_dumps() -> io::Result<()> {
    let some = Rlimit {
        current: Some(4096),
        maximum: Some(4096),
    };
    match getrlimit(Resource::Core).maximum {
        Some(0) => Err(Errno::PERM.into()),
        _ => Ok(setrlimit(Resource::Core, some)?),
    }
}

pub fn fork() -> io::Result<()> {
    // SAFETY: the child ends at once.
    match unsafe { libc::fork() } {
        0 => exit(0),
        pid => answer(pid.into()),
    }
}

pub fn clone3() -> io::Result<()> {
    // SAFETY: no arguments are read, for their size is none.
    match answer(unsafe { libc::syscall(libc::SYS_clone3, 0, 0) }) {
        // As far as it can be known from outside: the call is there.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        other => other,
    }
}

pub fn ring() -> io::Result<()> {
    IoUring::new(4).map(drop)
}

pub fn map(protection: i32) -> io::Result<*mut libc::c_void> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: new memory, which nobody uses.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
    match memory {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        memory => Ok(memory),
    }
}

pub fn map_code() -> io::Result<()> {
    map(libc::PROT_READ | libc::PROT_EXEC).map(drop)
}

pub fn protect_code() -> io::Result<()> {
    let memory = map(libc::PROT_READ | libc::PROT_WRITE)?;
    // SAFETY: of its own memory.
    answer(unsafe { libc::mprotect(memory, 4096, libc::PROT_READ | libc::PROT_EXEC) }.into())
}

/// Outside it reaches the file, which knows no such call.
pub fn known_to(call: libc::c_ulong) -> io::Result<()> {
    let file = memory_file()?;
    // SAFETY: a memory file takes no argument.
    match answer(unsafe { libc::ioctl(file.as_raw_fd(), call, 0) }.into()) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => Ok(()),
        other => other,
    }
}

pub fn terminal() -> io::Result<()> {
    known_to(libc::TIOCSTI)
}

pub fn vfio_call() -> io::Result<()> {
    // VFIO_GET_API_VERSION
    known_to(0x3b64)
}

/// From one open file to another.
pub fn copy_file() -> io::Result<()> {
    let (from, to) = (memory_file()?, memory_file()?);
    rustix::fs::ftruncate(&from, 4096)?;
    rustix::fs::copy_file_range(&from, None, &to, None, 4096).map(drop)?;
    Ok(())
}

pub fn reflink() -> io::Result<()> {
    let file = memory_file()?;
    // SAFETY: the kernel finds no ranges there, outside too.
    match answer(unsafe { libc::ioctl(file.as_raw_fd(), libc::FICLONERANGE, 0) }.into()) {
        Err(error) if error.raw_os_error() == Some(libc::EFAULT) => Ok(()),
        other => other,
    }
}

pub fn dumpable() -> io::Result<()> {
    // SAFETY: numbers only.
    answer(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) }.into())
}

pub fn filter() -> io::Result<()> {
    // SAFETY: the kernel finds no filter there, outside too.
    match answer(unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, 0) }) {
        Err(error) if error.raw_os_error() == Some(libc::EFAULT) => Ok(()),
        other => other,
    }
}

pub fn memory_file() -> io::Result<OwnedFd> {
    Ok(rustix::fs::memfd_create(
        "test",
        rustix::fs::MemfdFlags::CLOEXEC,
    )?)
}

/// Threads, memory, events: that the list is not too short for what any program does. The daemon's
/// own tests run in the sandbox.
pub fn serving() -> io::Result<()> {
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
