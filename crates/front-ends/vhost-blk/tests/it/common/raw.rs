//! A socket without manners.
#![allow(unsafe_code)] // An ioctl that rustix has no function for.

use super::Served;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

pub struct Raw(pub UnixStream);

impl Raw {
    pub fn connect(served: &Served) -> Raw {
        let socket = UnixStream::connect(&served.path).unwrap();
        socket.set_read_timeout(Some(super::TIMEOUT)).unwrap();
        Raw(socket)
    }

    pub fn bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        // A server that has hung up already is fine.
        let _ = sendmsg(
            &self.0,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        );
    }

    /// Bytes that were sent and that the server has not read yet (unix(7), `SIOCOUTQ`).
    pub fn unread(&self) -> i32 {
        const SIOCOUTQ: rustix::ioctl::Opcode = 0x5411;
        // SAFETY: the request writes one `int`.
        let getter = unsafe { rustix::ioctl::Getter::<SIOCOUTQ, i32>::new() };
        // SAFETY: as above; it changes nothing.
        unsafe { rustix::ioctl::ioctl(&self.0, getter) }.unwrap()
    }

    /// Whether bytes from the server are there to be read.
    pub fn is_answered(&self) -> bool {
        rustix::io::ioctl_fionread(&self.0).unwrap() > 0
    }

    pub fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = request.to_ne_bytes().to_vec();
        bytes.extend(flags.to_ne_bytes());
        bytes.extend((payload.len() as u32).to_ne_bytes());
        bytes.extend(payload);
        bytes
    }

    pub fn send(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.bytes(&Raw::message(request, 1, payload), fds);
    }

    /// The payload of the next reply; `None` when the server has hung up.
    pub fn reply(&mut self) -> Option<Vec<u8>> {
        let mut header = [0; 12];
        self.0.read_exact(&mut header).ok()?;
        let size = u32::from_ne_bytes(header[8..12].try_into().unwrap());
        let mut payload = vec![0; size as usize];
        self.0.read_exact(&mut payload).ok()?;
        Some(payload)
    }

    pub fn ask(&mut self, request: u32) -> Option<u64> {
        self.send(request, &[], &[]);
        Some(u64::from_ne_bytes(self.reply()?.try_into().ok()?))
    }
}
