//! Descriptors with a last `close` that blocks.

use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg, sockopt};

/// Sends bytes and descriptors in one packet.
pub fn send_fds(
    socket: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    let flags = flags | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags).map(|_| ())
}

/// TCP sockets with SO_LINGER and unsent data: their `close` waits for a peer that reads nothing.
/// It waits no longer when this is dropped.
pub struct Lingering {
    listener: TcpListener,
    peers: std::cell::RefCell<Vec<TcpStream>>,
}

impl Lingering {
    pub fn new() -> Lingering {
        Lingering {
            listener: TcpListener::bind("127.0.0.1:0").unwrap(),
            peers: Vec::new().into(),
        }
    }
}

impl Lingering {
    /// Makes another descriptor.
    pub fn descriptor(&self) -> OwnedFd {
        let mut socket = TcpStream::connect(self.listener.local_addr().unwrap()).unwrap();
        let (peer, _) = self.listener.accept().unwrap();
        self.peers.borrow_mut().push(peer);
        sockopt::set_socket_linger(&socket, Some(Duration::from_secs(3600))).unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 65536]).is_ok() {}
        socket.into()
    }
}
