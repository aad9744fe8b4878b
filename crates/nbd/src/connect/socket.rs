//! A connection to a server, up to the end of the handshake, within a time limit.

use super::address::{Address, Server};
use crate::protocol::{Export, HandshakeError, negotiate};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags};
use rustix::net::{SocketType, sockopt};
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Why there is no connection, in words that name the server.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nobody answers there.
    #[error("{server}: no server can be reached ({error}); start it, or correct the address")]
    Unreachable {
        /// Who was asked.
        server: String,
        /// What the system says.
        error: io::Error,
    },
    /// It answers, but gives no export.
    #[error("{server}: {error}")]
    Handshake {
        /// Who was asked.
        server: String,
        /// What came of it.
        error: HandshakeError,
    },
    /// The host's name has no address.
    #[error("{server}: the host's name has no address ({error})")]
    Name {
        /// Who was to be asked.
        server: String,
        /// What the resolver says.
        error: io::Error,
    },
    /// After the connection broke the server has something else than before.
    #[error("{server}: is not what it was before: {what}")]
    Changed {
        /// Who was asked.
        server: String,
        /// What has changed.
        what: &'static str,
    },
}

/// A connection whose handshake is over. It is in blocking mode.
#[derive(Debug)]
pub struct Connected {
    /// The socket.
    pub fd: OwnedFd,
    /// The export behind it.
    pub export: Export,
    /// Dropped when it is over, for a keeper that has been told of it.
    pub kept: Option<Kept>,
}

/// What a [`ConnectionKeeper`] keeps beside a connection; dropped when that is over.
pub type Kept = Box<dyn std::any::Any + Send>;

/// Keeps connections open for the next process, which ends them before it sends anything on its own
/// ([`end_previous`](super::end_previous)).
pub trait ConnectionKeeper: Send + Sync + std::fmt::Debug {
    /// A connection to `server` is to be kept: called before anything is sent on it, by a thread
    /// that may wait. `None`: it cannot be, and is used all the same.
    fn keep(&self, server: &str, connection: BorrowedFd<'_>) -> Option<Kept>;
}

/// Connects to a server and asks for its export; `addresses` are those of its host.
///
/// # Errors
/// [`ConnectError`], after `limit` at the latest.
pub fn connect(
    server: &Server,
    addresses: &[SocketAddr],
    limit: Duration,
) -> Result<Connected, ConnectError> {
    let began = Instant::now();
    let deadline = began.checked_add(limit).unwrap_or(began);
    let unreachable = |error: io::Error| ConnectError::Unreachable {
        server: server.to_string(),
        error,
    };
    let fd = match &server.address {
        Address::Unix(path) => {
            let address = SocketAddrUnix::new(path.as_path());
            let address = address.map_err(|error| unreachable(error.into()))?;
            open(AddressFamily::UNIX, deadline, |fd| {
                net::connect(fd, &address)
            })
            .map_err(unreachable)?
        }
        Address::Tcp { .. } => {
            let mut last = io::ErrorKind::AddrNotAvailable.into();
            let mut left = (1..=addresses.len() as u32).rev();
            let fd = addresses.iter().find_map(|address| {
                let family = match address {
                    SocketAddr::V4(_) => AddressFamily::INET,
                    SocketAddr::V6(_) => AddressFamily::INET6,
                };
                // One that swallows everything leaves the others their share of the time.
                let now = Instant::now();
                let share = deadline.saturating_duration_since(now) / left.next().unwrap_or(1);
                let until = now.checked_add(share).unwrap_or(deadline);
                open(family, until, |fd| net::connect(fd, address))
                    .map_err(|error| last = error)
                    .ok()
            });
            let fd = fd.ok_or_else(|| unreachable(last))?;
            // Requests go out when they are there, and a dead host is found out.
            let _ = sockopt::set_tcp_nodelay(&fd, true);
            let _ = sockopt::set_socket_keepalive(&fd, true);
            fd
        }
    };
    let mut conversation = Conversation { fd, deadline };
    let export = negotiate(&mut conversation, &server.export);
    let export = export.map_err(|error| ConnectError::Handshake {
        server: server.to_string(),
        error,
    })?;
    let fd = conversation.fd;
    // A ring waits for it then.
    rustix::io::ioctl_fionbio(&fd, false).map_err(|error| unreachable(error.into()))?;
    Ok(Connected {
        fd,
        export,
        kept: None,
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
            // A Unix socket's queue of connections is full, and nothing tells when it is not.
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

/// A non-blocking socket that is waited for until the deadline.
struct Conversation {
    fd: OwnedFd,
    deadline: Instant,
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
