//! The receiver process's state of a client.

use crate::kind::{AcceptedDescriptors, is_harmless};
use crate::message::{self, MAX_FDS, MAX_READ, Message, TOO_MANY_FDS};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, recvmsg,
};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;

/// A client's socket, and the channel for answers. It is dropped on a thread that may hang.
pub(crate) struct Session {
    client: u64,
    /// Duplicate of the client's socket; `None` only inside `drop`.
    socket: Option<OwnedFd>,
    channel: Arc<OwnedFd>,
    wanted: AcceptedDescriptors,
    /// Replacement for a descriptor that is not harmless.
    stand_in: Arc<OwnedFd>,
    /// Descriptors of peeked messages that are still in the socket, held so that the server that
    /// takes them is not the last to close them.
    looked: Mutex<Arc<Vec<OwnedFd>>>,
    /// Held by the reading thread until all received descriptors are closed. A client therefore has
    /// at most one thread that hangs and one that waits, for any number of messages.
    reading: Mutex<()>,
}

/// Result of a read.
#[derive(Default)]
struct ReadResult {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// Whether the client has sent more descriptors than are accepted, so that none is passed on.
    too_many: bool,
}

impl Session {
    pub(crate) fn new(
        client: u64,
        socket: OwnedFd,
        channel: Arc<OwnedFd>,
        wanted: AcceptedDescriptors,
        stand_in: Arc<OwnedFd>,
    ) -> Session {
        Session {
            client,
            socket: Some(socket),
            channel,
            wanted,
            stand_in,
            looked: Mutex::default(),
            reading: Mutex::new(()),
        }
    }

    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(OwnedFd::as_fd)
    }

    /// Reads once, and answers. Descriptors that the server does not get are closed last.
    pub(crate) fn receive(&self, most: u32) {
        let _reading = self.reading.lock().unpoisoned();
        let (value, taken) = self.read(most, RecvFlags::empty());
        self.answer(value, &taken.bytes, &taken.fds);
    }

    /// Peeks at available data, and answers; the descriptors stay open until
    /// [`Session::take_looked`].
    pub(crate) fn look(&self, most: u32) {
        let _reading = self.reading.lock().unpoisoned();
        let (value, taken) = self.read(most, RecvFlags::PEEK);
        let fds = Arc::new(taken.fds);
        // Descriptors of an earlier peek, with an answer that was too late for the server, are
        // closed last.
        let _before = {
            let mut looked = self.looked.lock().unpoisoned();
            std::mem::replace(&mut *looked, fds.clone())
        };
        self.answer(value, &taken.bytes, &fds);
    }

    /// Takes the descriptors to be closed after a peek, on a thread that may hang.
    pub(crate) fn take_looked(&self) -> Arc<Vec<OwnedFd>> {
        std::mem::take(&mut *self.looked.lock().unpoisoned())
    }

    fn read(&self, most: u32, flags: RecvFlags) -> (u32, ReadResult) {
        match self.take((most as usize).min(MAX_READ), flags) {
            Ok(taken) if taken.too_many => (TOO_MANY_FDS, taken),
            Ok(taken) => (0, taken),
            Err(errno) => (code(errno), ReadResult::default()),
        }
    }

    fn answer(&self, value: u32, bytes: &[u8], fds: &[OwnedFd]) {
        let passed: Vec<BorrowedFd<'_>> = match value {
            0 => fds.iter().map(|fd| self.harmless(fd)).collect(),
            _ => Vec::new(),
        };
        if let Err(errno) = self.say(message::kind::ANSWER, value, bytes, &passed) {
            // The answer is lost, and with it the client's position in its stream.
            let _ = self.say(message::kind::ANSWER, code(errno), &[], &[]);
        }
    }

    /// Returns the descriptor if it is harmless, otherwise its replacement.
    fn harmless<'a>(&'a self, fd: &'a OwnedFd) -> BorrowedFd<'a> {
        if is_harmless(fd.as_fd(), self.wanted) {
            fd.as_fd()
        } else {
            self.stand_in.as_fd()
        }
    }

    fn take(&self, most: usize, flags: RecvFlags) -> Result<ReadResult, Errno> {
        let socket = self.socket().ok_or(Errno::NOTCONN)?;
        let mut bytes = vec![0; most];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = flags | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = loop {
            match recvmsg(
                socket,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut control,
                flags,
            ) {
                Err(Errno::INTR) => {}
                other => break other?,
            }
        };
        let mut fds = Vec::new();
        for ancillary in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = ancillary {
                fds.extend(rights);
            }
        }
        let cut = received.flags.contains(ReturnFlags::CTRUNC);
        bytes.truncate(received.bytes);
        Ok(ReadResult {
            bytes,
            too_many: cut || fds.len() > usize::from(self.wanted.max_fds),
            fds,
        })
    }

    /// Sends an answer, and waits until the server has room: only this client's thread does.
    fn say(
        &self,
        kind: u32,
        value: u32,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Errno> {
        let message = Message {
            kind,
            value,
            client: self.client,
        };
        message::send(
            self.channel.as_fd(),
            message,
            bytes,
            fds,
            SendFlags::empty(),
        )
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Closing the socket also closes its unread descriptors: this is where a thread may hang.
        self.socket = None;
        let _ = self.say(message::kind::CLOSED, 0, &[], &[]);
    }
}

fn code(errno: Errno) -> u32 {
    errno.raw_os_error().unsigned_abs()
}
