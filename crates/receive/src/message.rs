//! Messages between server and receiver process: packets of a socket pair, each a [`Message`], with
//! bytes and descriptors behind it. Both sides are the same program.

use crate::kind::AcceptedDescriptors;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Maximum bytes that the receiver process reads at once: a packet is contiguous in the kernel.
pub(crate) const MAX_READ: usize = 32 << 10;
/// Size of a message without bytes, and of the longest.
pub(crate) const MESSAGE_LEN: usize = size_of::<Message>();
/// Maximum bytes of a request to the spawner: the path of a socket (unix(7)).
pub(crate) const MAX_REQUEST: usize = 108;
pub(crate) const MAX_PACKET_LEN: usize = MESSAGE_LEN + MAX_READ;
/// The kernel's SCM_MAX_FD: a sender cannot attach more to one call.
pub(crate) const MAX_FDS: usize = 253;

/// Kinds of messages.
pub(crate) mod kind {
    /// To the receiver process, with two descriptors: a listener link, and its listening socket.
    /// `value`: accepted descriptors.
    pub const LISTENER: u32 = 1;
    /// To the receiver process, with a client's socket.
    pub const OPEN: u32 = 2;
    /// Read at most `value` bytes from the client's socket. No other process reads until the
    /// answer.
    pub const RECEIVE: u32 = 3;
    /// The client's socket is closed in the server.
    pub const END: u32 = 4;
    /// To the server: the bytes read, with their descriptors. `value`: an error number, or
    /// [`TOO_MANY_FDS`](super::TOO_MANY_FDS).
    pub const ANSWER: u32 = 5;
    /// To the server: the client's socket is closed, including its unread data.
    pub const CLOSED: u32 = 6;
    /// To the spawner, with the control socket of a receiver process to be started.
    pub const START: u32 = 7;
    /// From the spawner: `value` is the process ID, or the reason of the failure.
    pub const STARTED: u32 = 8;
    pub const FAILED: u32 = 9;
    /// To the spawner, with a socket for the answer: a request that the program defines by `value`
    /// and the bytes.
    pub const REQUEST: u32 = 14;
    /// Answer to a request: one descriptor.
    pub const FULFILLED: u32 = 15;
    /// Reads as [`RECEIVE`], but all data stays in the client's socket, and its descriptors also
    /// stay open in the receiver process.
    pub const PEEK: u32 = 10;
    /// The peeked bytes were taken from the socket: the receiver process closes their descriptors.
    pub const PEEKED: u32 = 11;
    /// To the receiver process, with a socket that is hung up when no other process keeps the
    /// clients' sockets any more.
    pub const KEPT: u32 = 12;
    /// To the receiver process: the server is about to end, and its clients' connections with it.
    pub const SHUT: u32 = 13;
}

/// More descriptors arrived than are accepted.
pub(crate) const TOO_MANY_FDS: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct Message {
    pub kind: u32,
    pub value: u32,
    /// Number of the client, assigned by the server.
    pub client: u64,
}

impl Message {
    /// Creates a message without a value.
    pub(crate) fn plain(kind: u32) -> Self {
        Self {
            kind,
            value: 0,
            client: 0,
        }
    }
}

const STREAMS: u32 = 1 << 8;
/// Flag of a [`kind::LISTENER`]: its clients' connections end with the server, even if those of
/// other listeners are kept.
pub(crate) const ENDS: u32 = 1 << 9;

impl AcceptedDescriptors {
    pub(crate) fn to_value(self) -> u32 {
        u32::from(self.max_fds) | if self.streams { STREAMS } else { 0 }
    }

    pub(crate) fn of_value(value: u32) -> Self {
        AcceptedDescriptors {
            max_fds: value as u8,
            streams: value & STREAMS != 0,
        }
    }
}

/// A received message.
pub(crate) struct Incoming {
    pub message: Message,
    pub bytes: Vec<u8>,
    pub fds: Vec<OwnedFd>,
    /// Descriptors are missing, because this process may not open more.
    pub incomplete: bool,
}

/// Creates a socket pair for messages: the server's end and the receiver process's.
pub(crate) fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Sends a message completely, or not at all. Waits for room unless `flags` forbid it.
pub(crate) fn send(
    channel: BorrowedFd<'_>,
    message: Message,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::MSGSIZE);
    }
    let parts = [IoSlice::new(message.as_bytes()), IoSlice::new(bytes)];
    loop {
        match sendmsg(channel, &parts, &mut control, flags | SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return sent.map(|_| ()),
        }
    }
}

/// Returns the next message, of at most `ROOM` bytes; `None` at the end of the channel. Never
/// waits.
pub(crate) fn receive<const ROOM: usize>(
    channel: BorrowedFd<'_>,
) -> Result<Option<Incoming>, Errno> {
    // The buffer is on the stack: a large heap buffer among small long-lived ones would keep its
    // pages.
    let mut bytes = [0; ROOM];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        match recvmsg(
            channel,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            flags,
        ) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Ok(None),
            other => break other?,
        }
    };
    let mut fds = Vec::new();
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = ancillary {
            fds.extend(rights);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    let bytes = bytes.get(..received.bytes).unwrap_or_default();
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(Errno::MSGSIZE);
    }
    let (message, bytes) = Message::read_from_prefix(bytes).map_err(|_| Errno::PROTO)?;
    Ok(Some(Incoming {
        message,
        bytes: bytes.to_vec(),
        fds,
        incomplete: received.flags.contains(ReturnFlags::CTRUNC),
    }))
}
