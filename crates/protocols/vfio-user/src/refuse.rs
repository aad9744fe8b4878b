//! Error reply to a client that is not accepted, if it has already sent its first request.

use crate::wire::{Command, HEADER_SIZE, Header, flags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::os::fd::AsFd;
use zerocopy::{FromBytes, IntoBytes};

/// Answers the `VFIO_USER_VERSION` that waits in a client's socket with an error. A client that has
/// not sent it yet only finds the socket closed. Nothing is read from the socket, in particular no
/// descriptors. Never blocks.
pub fn refuse(socket: impl AsFd, errno: Errno) {
    let socket = socket.as_fd();
    let mut first = [0; HEADER_SIZE];
    let peeked = recv(socket, &mut first, RecvFlags::PEEK | RecvFlags::DONTWAIT);
    let Ok(header) = Header::read_from_bytes(&first) else {
        return;
    };
    let whole = peeked.is_ok_and(|(len, _)| len == HEADER_SIZE);
    if !whole || header.command != Command::VERSION {
        return;
    }
    let reply = Header {
        message_size: HEADER_SIZE as u32,
        flags: flags::REPLY | flags::ERROR,
        error: errno.raw_os_error().unsigned_abs(),
        ..header
    };
    let quiet = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    // The client is refused whether or not the reply is sent.
    let _ = send(socket, reply.as_bytes(), quiet);
}
