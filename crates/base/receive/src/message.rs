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

/// Kinds of messages between server, receiver process and spawner.
pub(crate) mod kind {
    /// To the receiver process, with two descriptors: a listener link, and its listening socket.
    /// `value`: accepted descriptors.
    pub const LISTENER: u32 = 1;
    /// Message to the receiver process: a client's socket, of which it gets a duplicate.
    pub const OPEN: u32 = 2;
    /// The server asks for a sign of life, which the thread that reads messages gives. With the
    /// client whose answer is missing.
    pub const PING: u32 = 3;
    /// The client's socket is closed in the server.
    pub const END: u32 = 4;
    /// To the server: the peeked bytes, with their descriptors. `value`: an error number, or
    /// [`TOO_MANY_FDS`](super::TOO_MANY_FDS).
    pub const ANSWER: u32 = 5;
    /// Message to the server: the client's socket is closed, and its unread data discarded.
    pub const CLOSED: u32 = 6;
    /// Message to the spawner: start a receiver process with this control socket.
    pub const START: u32 = 7;
    /// Message of the spawner: `value` is the new process's ID, or the reason of the failure.
    pub const STARTED: u32 = 8;
    pub const FAILED: u32 = 9;
    /// To the spawner, with a socket for the answer: a request that the program defines by `value`
    /// and the bytes.
    pub const REQUEST: u32 = 17;
    /// Answer to a request: one descriptor.
    pub const FULFILLED: u32 = 18;
    /// Peek at most `value` bytes of the client's socket. All data stays in the socket, and its
    /// descriptors also stay open in the receiver process.
    pub const PEEK: u32 = 10;
    /// Message to the receiver process: the peeked bytes were read, so it closes their descriptors.
    pub const PEEKED: u32 = 11;
    /// To the receiver process, with a socket that is hung up when no other process keeps the
    /// clients' sockets any more.
    pub const KEPT: u32 = 12;
    /// To the receiver process: the server is about to end, and its clients' connections with it.
    pub const SHUT: u32 = 13;
    /// To the server: the answer to a [`PING`]. `value`: 1 if the client's answer waits until the
    /// kernel takes its descriptors, 0 otherwise.
    pub const PONG: u32 = 14;
    /// To the receiver process: another one has taken its place. It ends, and leaves the sockets
    /// as they are.
    pub const RETIRE: u32 = 15;
    /// To the receiver process: the kernel takes no more descriptors of this user.
    pub const CROWDED: u32 = 16;
}

/// Value of an answer when a client has sent more descriptors than are accepted.
pub(crate) const TOO_MANY_FDS: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct Message {
    pub kind: u32,
    pub value: u32,
    /// Number that the server has assigned to the client.
    pub client: u64,
}

impl Message {
    /// Creates a message of this kind without a value.
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

/// Message that was received, with its descriptors.
pub(crate) struct Incoming {
    pub message: Message,
    pub bytes: Vec<u8>,
    pub fds: Vec<OwnedFd>,
    /// Whether descriptors are missing because this process may not open more.
    pub incomplete: bool,
}

/// Creates a socket pair for messages: the end of the server and that of the receiver process.
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
