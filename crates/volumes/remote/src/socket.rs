//! Connecting to servers within a time limit, and reading and writing with a deadline.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags};
use rustix::net::{SocketType, sockopt};
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// Connects to the first of a server's addresses that accepts the connection. The socket is in
/// non-blocking mode.
///
/// # Errors
/// The error of the last address, or a time-out at the deadline.
pub fn connect_tcp(addresses: &[SocketAddr], deadline: Instant) -> io::Result<OwnedFd> {
    let mut last = io::ErrorKind::AddrNotAvailable.into();
    let mut left = (1..=addresses.len() as u32).rev();
    let fd = addresses.iter().find_map(|address| {
        let family = match address {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        // If an address drops all packets, enough time remains for the others.
        let now = Instant::now();
        let share = deadline.saturating_duration_since(now) / left.next().unwrap_or(1);
        let until = now.checked_add(share).unwrap_or(deadline);
        open(family, until, |fd| net::connect(fd, address))
            .map_err(|error| last = error)
            .ok()
    });
    let fd = fd.ok_or(last)?;
    // Small requests are sent without delay, and keep-alive detects a dead host.
    let _ = sockopt::set_tcp_nodelay(&fd, true);
    let _ = sockopt::set_socket_keepalive(&fd, true);
    Ok(fd)
}

/// Connects to a Unix socket. The socket is in non-blocking mode.
///
/// # Errors
/// The I/O error of the connection, or a time-out at the deadline.
pub fn connect_unix(path: &Path, deadline: Instant) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    open(AddressFamily::UNIX, deadline, |fd| {
        net::connect(fd, &address)
    })
}

fn open(
    family: AddressFamily,
    deadline: Instant,
    connect: impl Fn(&OwnedFd) -> rustix::io::Result<()>,
) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = net::socket_with(family, SocketType::STREAM, flags, None)?;
    loop {
        match connect(&fd) {
            Ok(()) | Err(Errno::ISCONN) => return Ok(fd),
            Err(Errno::INPROGRESS | Errno::ALREADY) => {
                wait(&fd, PollFlags::OUT, deadline)?;
                match sockopt::socket_error(&fd)? {
                    Ok(()) => return Ok(fd),
                    Err(error) => return Err(error.into()),
                }
            }
            // The backlog of the Unix socket is full, and no event signals room in it.
            Err(Errno::AGAIN) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn wait(fd: &OwnedFd, events: PollFlags, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "no answer within the time limit",
            ));
        }
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(fd, events)], Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Non-blocking socket that is used as a blocking one, with a time limit for reads and writes.
#[derive(Debug)]
pub struct Conversation {
    fd: OwnedFd,
    deadline: Instant,
}

impl Conversation {
    /// Creates a conversation over a socket from [`connect_tcp`] or [`connect_unix`].
    pub fn new(fd: OwnedFd, deadline: Instant) -> Self {
        Self { fd, deadline }
    }

    /// Changes the time until which reads and writes must succeed.
    pub fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    /// Returns the socket of the conversation.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Returns the socket of an established connection, in blocking mode, as a ring needs it.
    ///
    /// # Errors
    /// The I/O error of changing the socket's mode.
    pub fn into_blocking(self) -> io::Result<OwnedFd> {
        rustix::io::ioctl_fionbio(&self.fd, false)?;
        Ok(self.fd)
    }
}

impl Read for Conversation {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match net::recv(&self.fd, &mut *buffer, RecvFlags::empty()) {
                Ok((_, len)) => return Ok(len),
                Err(Errno::AGAIN) => wait(&self.fd, PollFlags::IN, self.deadline)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Write for Conversation {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match net::send(self.fd.as_fd(), bytes, SendFlags::NOSIGNAL) {
                Ok(len) => return Ok(len),
                Err(Errno::AGAIN) => wait(&self.fd, PollFlags::OUT, self.deadline)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
