//! Uninterpreted messages with a time limit: bytes and descriptors are sent, whole messages
//! received.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    connect, recvmsg, sendmsg, socket_with,
};
use zerocopy::{FromBytes, IntoBytes};

use super::ClientError;
use crate::wire::{HEADER_SIZE, Header, MAX_MSG_FDS};

/// Maximum size in bytes of an accepted message: QEMU's transfer limit and a header.
const MAX_MESSAGE: usize = (64 << 20) + 64;

/// Message that a client has received.
#[derive(Debug)]
pub struct Frame {
    /// Header of the message.
    pub header: Header,
    /// Bytes after the header.
    pub payload: Vec<u8>,
    /// Descriptors that were received with the message.
    pub fds: Vec<OwnedFd>,
}

/// A blocking socket that sends and receives whole messages, or the raw bytes of a test.
#[derive(Debug)]
pub struct RawClient {
    socket: OwnedFd,
    timeout: Duration,
}

impl RawClient {
    /// Connects to a server's socket. `timeout` applies to each later call.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, ClientError> {
        let address = SocketAddrUnix::new(path).map_err(ClientError::Connect)?;
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(ClientError::Connect)?;
        connect(&socket, &address).map_err(ClientError::Connect)?;
        Self::from_fd(socket, timeout)
    }

    /// Creates a client from a connected Unix stream socket.
    pub fn from_fd(socket: OwnedFd, timeout: Duration) -> Result<Self, ClientError> {
        // A zero timeout would mean none to the kernel.
        let timeout = timeout.max(Duration::from_millis(1));
        ioctl_fionbio(&socket, false).map_err(ClientError::Connect)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(timeout)).map_err(ClientError::Connect)?;
        set_socket_timeout(&socket, Timeout::Send, Some(timeout)).map_err(ClientError::Connect)?;
        Ok(Self { socket, timeout })
    }

    /// Returns the time limit of a call that begins now.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// Sends bytes as they are. The descriptors are attached to the first byte.
    pub fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        let deadline = self.deadline();
        let mut rest = bytes;
        let mut fds = fds;
        while !rest.is_empty() {
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MSG_FDS * 2))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(ClientError::TooManyFds {
                    count: fds.len(),
                    limit: MAX_MSG_FDS * 2,
                });
            }
            match sendmsg(
                &self.socket,
                &[IoSlice::new(rest)],
                &mut control,
                SendFlags::NOSIGNAL,
            ) {
                Ok(n) => {
                    rest = rest.get(n..).unwrap_or_default();
                    fds = &[];
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(ClientError::TimedOut),
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(ClientError::Closed),
                Err(errno) => return Err(ClientError::Io(errno)),
            }
            if !rest.is_empty() && Instant::now() >= deadline {
                return Err(ClientError::TimedOut);
            }
        }
        Ok(())
    }

    /// Receives the next message, a command or a reply.
    pub fn recv(&mut self) -> Result<Frame, ClientError> {
        let mut payload = Vec::new();
        let (header, fds) = self.recv_into(&mut payload, self.deadline())?;
        Ok(Frame {
            header,
            payload,
            fds,
        })
    }

    /// Receives the next message; its payload is stored in a buffer that is reused.
    pub(super) fn recv_into(
        &mut self,
        payload: &mut Vec<u8>,
        deadline: Instant,
    ) -> Result<(Header, Vec<OwnedFd>), ClientError> {
        // Header and payload are read separately, so that the descriptors belong to this message.
        let mut fds = Vec::new();
        let mut head = [0; HEADER_SIZE];
        self.recv_exact(&mut head, &mut fds, deadline)?;
        let header =
            Header::read_from_bytes(&head).map_err(|_| ClientError::Malformed("header"))?;
        let size = header.message_size as usize;
        if !(HEADER_SIZE..=MAX_MESSAGE).contains(&size) {
            return Err(ClientError::Malformed("message size"));
        }
        payload.clear();
        // The buffer grows with the data that arrives, not with the size in a header.
        while payload.len() < size - HEADER_SIZE {
            let at = payload.len();
            let step = (size - HEADER_SIZE - at).min(64 << 10);
            payload.resize(at + step, 0);
            self.recv_exact(
                payload.get_mut(at..).unwrap_or_default(),
                &mut fds,
                deadline,
            )?;
        }
        Ok((header, fds))
    }

    fn recv_exact(
        &mut self,
        buf: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<(), ClientError> {
        let mut filled = 0;
        while let Some(rest) = buf.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MSG_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let message = match recvmsg(
                &self.socket,
                &mut [IoSliceMut::new(rest)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            ) {
                Ok(message) => message,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Err(ClientError::TimedOut),
                Err(Errno::CONNRESET) => return Err(ClientError::Closed),
                Err(errno) => return Err(ClientError::Io(errno)),
            };
            for ancillary in control.drain() {
                if let RecvAncillaryMessage::ScmRights(received) = ancillary {
                    fds.extend(received);
                }
            }
            if message.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_MSG_FDS {
                return Err(ClientError::Malformed("number of file descriptors"));
            }
            if message.bytes == 0 {
                return Err(ClientError::Closed);
            }
            filled += message.bytes;
            if filled < buf.len() && Instant::now() >= deadline {
                return Err(ClientError::TimedOut);
            }
        }
        Ok(())
    }

    /// Sends an error reply to a command of the server.
    pub(super) fn refuse(&mut self, command: &Header, errno: Errno) -> Result<(), ClientError> {
        let reply = Header {
            message_size: HEADER_SIZE as u32,
            flags: crate::wire::flags::REPLY | crate::wire::flags::ERROR,
            error: errno.raw_os_error().unsigned_abs(),
            ..*command
        };
        self.send(reply.as_bytes(), &[])
    }
}

impl AsFd for RawClient {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
