//! Classification of harmless descriptors without a call to their file system.
//!
//! An allow list: its kinds cannot block the thread that closes them.
//!
//! - **Memory files**: files with seals (fcntl(2), F_GET_SEALS), that is memfds and files on tmpfs
//!   and hugetlbfs. Other file systems may ask a process or a machine, in `fstat`, at `close` and
//!   in each page fault.
//! - **eventfds**, by the kernel's name for them.
//! - Optionally, **connected Unix stream sockets**, after their receiving side is shut down and
//!   emptied: no descriptor with a blocking close can be left in them.

use rustix::fs::{fcntl_get_seals, readlink};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, Shutdown, SocketType, getpeername, recv, shutdown, sockopt,
};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Descriptors that clients of a protocol may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptedDescriptors {
    /// Maximum number of descriptors in one read, at most 253 (the kernel's SCM_MAX_FD).
    pub max_fds: u8,
    /// Unix stream sockets are accepted, besides memory files and eventfds. They are for writing
    /// only.
    pub streams: bool,
}

/// Returns whether the descriptor is harmless and of an accepted kind.
///
/// Called by the receiver process: for a Unix stream socket it may block.
pub fn is_harmless(fd: BorrowedFd<'_>, wanted: AcceptedDescriptors) -> bool {
    is_memory(fd) || is_eventfd(fd) || (wanted.streams && made_harmless(fd))
}

/// Returns whether the descriptor is a memfd, or a file on tmpfs or hugetlbfs.
pub fn is_memory(fd: impl AsFd) -> bool {
    fcntl_get_seals(fd).is_ok()
}

/// Returns whether the descriptor is an eventfd. Files with a path have names that begin with a
/// slash.
pub fn is_eventfd(fd: impl AsFd) -> bool {
    let link = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    readlink(link, Vec::new()).is_ok_and(|name| name.to_bytes() == b"anon_inode:[eventfd]")
}

/// Returns whether the descriptor is a connected Unix stream socket. It stays connected: it cannot
/// start to listen.
pub fn is_stream(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
        && sockopt::socket_type(fd) == Ok(SocketType::STREAM)
        && getpeername(fd).is_ok()
}

/// Makes a connected Unix stream socket harmless. Returns `false` for any other descriptor.
fn made_harmless(fd: BorrowedFd<'_>) -> bool {
    if !is_stream(fd)
        // Otherwise a read leaves out out-of-band data.
        || sockopt::set_socket_oobinline(fd, true).is_err()
        || shutdown(fd, Shutdown::Read).is_err()
    {
        return false;
    }
    // The peer can send nothing more. Its earlier messages may hold descriptors: they are closed
    // here.
    let mut bytes = [0; 4096];
    loop {
        match recv(fd, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return true,
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};
    use rustix::net::{
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, sendmsg, socketpair,
    };
    use std::io::{IoSlice, Write};
    use std::mem::MaybeUninit;
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};

    const WANTED: AcceptedDescriptors = AcceptedDescriptors {
        max_fds: 8,
        streams: true,
    };

    #[test]
    fn memory_files_and_eventfds_are_harmless() {
        let memory = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
        let sealable = memfd_create("memory", MemfdFlags::ALLOW_SEALING).unwrap();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let no_streams = AcceptedDescriptors {
            streams: false,
            ..WANTED
        };
        for fd in [&memory, &sealable, &event] {
            assert!(is_harmless(fd.as_fd(), WANTED));
            assert!(is_harmless(fd.as_fd(), no_streams));
        }
        assert!(is_memory(&memory) && !is_eventfd(&memory));
        assert!(is_eventfd(&event) && !is_memory(&event));
        let stream = UnixStream::pair().unwrap().0;
        assert!(is_harmless(stream.as_fd(), WANTED));
        assert!(!is_harmless(stream.as_fd(), no_streams));
    }

    #[test]
    fn other_descriptor_kinds_are_harmful() {
        let directory = tempfile::tempdir().unwrap();
        // The file system of the directory is unknown to the test.
        let null = open("/dev/null", OFlags::RDWR, Mode::empty()).unwrap();
        let proc = open("/proc/self/status", OFlags::RDONLY, Mode::empty()).unwrap();
        let path = open("/proc/self/exe", OFlags::PATH, Mode::empty()).unwrap();
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::empty());
        let listener = UnixListener::bind(directory.path().join("socket")).unwrap();
        let unconnected = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None);
        let flags = SocketFlags::CLOEXEC;
        let packets = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let connected = TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        let kinds = [
            ("a device", null),
            ("procfs", proc),
            ("a path", path),
            ("a pipe", pipe),
            ("an epoll set", epoll.unwrap()),
            ("a listening Unix socket", listener.into()),
            ("an unconnected Unix socket", unconnected.unwrap()),
            ("a Unix socket of packets", packets.unwrap().0),
            (
                "a Unix socket of datagrams",
                UnixDatagram::pair().unwrap().0.into(),
            ),
            ("a listening TCP socket", tcp.into()),
            ("a TCP socket", connected.into()),
            ("a UDP socket", udp.into()),
        ];
        for (what, fd) in &kinds {
            assert!(!is_harmless(fd.as_fd(), WANTED), "{what}");
        }
        // The name is the eventfd's, except for the directory before it.
        let name = directory.path().join("anon_inode:[eventfd]");
        std::fs::write(&name, "").unwrap();
        assert!(!is_eventfd(std::fs::File::open(name).unwrap()));
    }

    #[test]
    fn stream_socket_is_drained_and_stays_empty() {
        let (mut peer, stream) = UnixStream::pair().unwrap();
        let file = memfd_create("left", MemfdFlags::CLOEXEC).unwrap();
        let send = |flags| {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [file.as_fd()];
            control.push(SendAncillaryMessage::ScmRights(&fds));
            sendmsg(&peer, &[IoSlice::new(&[1, 2, 3])], &mut control, flags)
        };
        for flags in [SendFlags::empty(), SendFlags::OOB, SendFlags::empty()] {
            send(flags).unwrap();
        }
        assert!(is_harmless(stream.as_fd(), WANTED));
        let unread = rustix::io::ioctl_fionread(&stream).unwrap();
        assert_eq!(unread, 0);
        assert_eq!(send(SendFlags::NOSIGNAL), Err(Errno::PIPE));
        // The socket can still be written.
        (&stream).write_all(&[7]).unwrap();
        let mut byte = [0];
        std::io::Read::read_exact(&mut peer, &mut byte).unwrap();
        assert_eq!(byte, [7]);
    }
}
