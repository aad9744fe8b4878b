//! Messages with descriptors over a socket that keeps their bounds.

use crate::text::MAX_TEXT;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Maximum number of descriptors in one message.
pub(crate) const MAX_FDS: usize = 128;

/// Received message: text and descriptors.
#[derive(Debug)]
pub(crate) struct Packet {
    pub text: Vec<u8>,
    pub fds: Vec<OwnedFd>,
    /// Whether the message was cut, because it or its number of descriptors was too large, or this
    /// process may not open another descriptor.
    pub cut: bool,
}

/// Returns the next message; `None` at the end of the connection. With MSG_PEEK it stays in the
/// socket, and its descriptors are duplicates.
///
/// # Errors
/// EAGAIN if no message has arrived and `flags` contain MSG_DONTWAIT.
pub(crate) fn receive(socket: BorrowedFd<'_>, flags: RecvFlags) -> Result<Option<Packet>, Errno> {
    let mut text = [0; MAX_TEXT];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        match recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut text)],
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
    // An empty message is no message: nobody sends one.
    if received.bytes == 0 && fds.is_empty() {
        return Ok(None);
    }
    let cut = ReturnFlags::TRUNC | ReturnFlags::CTRUNC;
    Ok(Some(Packet {
        text: text.get(..received.bytes).unwrap_or_default().to_vec(),
        fds,
        cut: received.flags.intersects(cut),
    }))
}

/// Sends a message whole, or not at all. Never waits.
///
/// # Errors
/// EAGAIN if the socket has no room.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    text: &str,
    fds: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::MSGSIZE);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    loop {
        match sendmsg(
            socket,
            &[IoSlice::new(text.as_bytes())],
            &mut control,
            flags,
        ) {
            Err(Errno::INTR) => {}
            sent => return sent.map(|_| ()),
        }
    }
}
