//! Tells a client that is not taken why, as far as it has asked already.

use crate::wire::{Command, HEADER_SIZE, Header, flags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::os::fd::AsFd;
use zerocopy::{FromBytes, IntoBytes};

/// Answers the `VFIO_USER_VERSION` that waits in the socket of a client with an error. One that has
/// not sent it yet finds the socket closed, which says less. Nothing is taken out of the socket,
/// descriptors among it least of all; never blocks.
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
    // It is refused in any case.
    let _ = send(socket, reply.as_bytes(), quiet);
}
