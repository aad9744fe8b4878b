//! Outgoing reply of a connection.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use zerocopy::IntoBytes;

use crate::wire::{HEADER_SIZE, Header, flags};

/// Size in bytes above which a buffer is freed after its message was sent.
const KEEP: usize = 64 << 10;

/// Result of sending a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendResult {
    /// The whole message was sent.
    All,
    /// The socket accepts no more bytes for now.
    Blocked,
    /// The peer has disconnected.
    PeerGone,
}

/// Holds at most one reply, so that it is bounded by the largest reply.
///
/// Each reply is its own sendmsg call: QEMU requires that a header arrives in one piece, and the
/// kernel splits a stream only inside long messages or between calls.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    buf: Vec<u8>,
    sent: usize,
    fd: Option<OwnedFd>,
}

impl Outbox {
    /// Returns whether no part of a message waits to be sent.
    pub fn is_empty(&self) -> bool {
        self.sent >= self.buf.len()
    }

    /// Starts a reply and returns the buffer, to which the payload is to be appended.
    pub fn begin(&mut self) -> &mut Vec<u8> {
        self.clear();
        self.buf.resize(HEADER_SIZE, 0);
        &mut self.buf
    }

    /// Ends the reply to `request`: on success with the payload appended since
    /// [`begin`](Self::begin), else without.
    pub fn finish(&mut self, request: &Header, result: Result<Option<OwnedFd>, Errno>) {
        let (reply_flags, error) = match result {
            Ok(fd) => {
                self.fd = fd;
                (flags::REPLY, 0)
            }
            Err(errno) => {
                self.buf.truncate(HEADER_SIZE);
                self.fd = None;
                (
                    flags::REPLY | flags::ERROR,
                    errno.raw_os_error().unsigned_abs(),
                )
            }
        };
        let header = Header {
            message_id: request.message_id,
            command: request.command,
            message_size: u32::try_from(self.buf.len()).unwrap_or(u32::MAX),
            flags: reply_flags,
            error,
        };
        if let Some(head) = self.buf.get_mut(..HEADER_SIZE) {
            head.copy_from_slice(header.as_bytes());
        }
    }

    /// Returns whether there is a reply of which no byte has been sent.
    pub fn is_unsent(&self) -> bool {
        self.sent == 0 && !self.buf.is_empty()
    }

    /// Returns the bytes of the whole reply, and its descriptor.
    pub fn whole(&self) -> (&[u8], Option<BorrowedFd<'_>>) {
        (&self.buf, self.fd.as_ref().map(AsFd::as_fd))
    }

    /// Sends as many bytes as the socket accepts.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<SendResult, Errno> {
        while let Some(rest) = self.buf.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match send_with_fd(socket, rest, self.fd.as_ref().map(AsFd::as_fd)) {
                Ok(n) => {
                    self.sent = self.sent.saturating_add(n);
                    self.fd = None;
                }
                Err(Errno::AGAIN) => return Ok(SendResult::Blocked),
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                    return Ok(SendResult::PeerGone);
                }
                Err(errno) => return Err(errno),
            }
        }
        self.clear();
        Ok(SendResult::All)
    }

    /// Discards the reply that waits to be sent.
    pub fn clear(&mut self) {
        self.buf.clear();
        if self.buf.capacity() > KEEP {
            self.buf = Vec::new();
        }
        self.sent = 0;
        self.fd = None;
    }
}

/// Sends bytes, with a descriptor attached to the first byte. Returns the number of bytes sent.
pub(crate) fn send_with_fd(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            sent => return sent,
        }
    }
}
