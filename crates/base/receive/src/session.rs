//! The receiver process's state of a client.

use crate::kind::{AcceptedDescriptors, is_harmless};
use crate::message::{self, MAX_FDS, MAX_READ, Message, TOO_MANY_FDS};
use rustix::event::PollFlags;
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, recv, recvmsg,
};
use std::fs::File;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use sync::{Unpoisoned, readiness};

/// Pauses before an answer with descriptors is sent again, while the kernel takes none.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// Descriptors of the receiver process that its clients' threads share.
pub(crate) struct Common {
    /// Replacement for a descriptor that is not harmless.
    pub stand_in: OwnedFd,
    /// An eventfd: too many descriptors are in flight.
    pub crowded: OwnedFd,
    /// Folder `/proc/self/fdinfo`. It is held open, because a rule of Landlock that allows its
    /// files is for this inode.
    pub info: Option<OwnedFd>,
}

/// A client's socket, and the channel for answers. It is dropped on a thread that may hang.
pub(crate) struct Session {
    client: u64,
    /// Duplicate of the client's socket; `None` only inside `drop`.
    socket: Option<OwnedFd>,
    channel: Arc<OwnedFd>,
    wanted: AcceptedDescriptors,
    common: Arc<Common>,
    /// Descriptors of peeked messages that are still in the socket, held so that the server that
    /// takes them is not the last to close them.
    looked: Mutex<Arc<Vec<OwnedFd>>>,
    /// Held by the reading thread until all received descriptors are closed. A client therefore has
    /// at most one thread that hangs and one that waits, for any number of messages.
    reading: Mutex<()>,
    /// The answer waits until the kernel takes its descriptors.
    crowded: AtomicBool,
}

/// Result of a peek.
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
        common: Arc<Common>,
    ) -> Session {
        Session {
            client,
            socket: Some(socket),
            channel,
            wanted,
            common,
            looked: Mutex::default(),
            reading: Mutex::new(()),
            crowded: AtomicBool::new(false),
        }
    }

    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(OwnedFd::as_fd)
    }

    /// Peeks at available data, and answers; the descriptors stay open until
    /// [`Session::take_looked`].
    pub(crate) fn look(&self, most: u32) {
        let _reading = self.reading.lock().unpoisoned();
        let (value, taken) = self.peek(most);
        let fds = Arc::new(taken.fds);
        // Descriptors of an earlier peek, with an answer that was too late for the server, are
        // closed last.
        let _before = {
            let mut looked = self.looked.lock().unpoisoned();
            std::mem::replace(&mut *looked, fds.clone())
        };
        self.answer(value, &taken.bytes, &fds);
    }

    /// Discards the data in a socket that is shut down, on a thread that may hang.
    pub(crate) fn empty(&self) {
        let mut bytes = [0; 4096];
        while let Some(socket) = self.socket()
            && recv(socket, &mut bytes[..], RecvFlags::DONTWAIT).is_ok_and(|(_, len)| len > 0)
        {
        }
    }

    /// Takes the descriptors to be [closed](Session::close) after a peek.
    pub(crate) fn take_looked(&self) -> Arc<Vec<OwnedFd>> {
        std::mem::take(&mut *self.looked.lock().unpoisoned())
    }

    /// Closes descriptors after a peek, on a thread that may hang.
    pub(crate) fn close(&self, looked: Arc<Vec<OwnedFd>>) {
        let _reading = self.reading.lock().unpoisoned();
        drop(looked);
    }

    fn peek(&self, most: u32) -> (u32, ReadResult) {
        match self.take((most as usize).min(MAX_READ)) {
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
        let mut pause = FIRST_PAUSE;
        while let Err(errno) = self.say(message::kind::ANSWER, value, bytes, &passed) {
            self.crowded.store(true, Ordering::Relaxed);
            // Other processes of this user may have too many descriptors in flight (unix(7),
            // ETOOMANYREFS). The client waits meanwhile: this thread is its own.
            let may_pass = matches!(errno, Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM);
            if !may_pass || self.is_left() {
                let _ = self.say(message::kind::ANSWER, code(errno), &[], &[]);
                break;
            }
            let _ = rustix::io::write(&self.common.crowded, &1u64.to_ne_bytes());
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        self.crowded.store(false, Ordering::Relaxed);
    }

    /// Returns whether the answer waits until the kernel takes its descriptors.
    pub(crate) fn is_crowded(&self) -> bool {
        self.crowded.load(Ordering::Relaxed)
    }

    /// Returns whether the client or the server has gone.
    fn is_left(&self) -> bool {
        let is_hung_up =
            |fd: BorrowedFd<'_>| readiness(fd, PollFlags::empty()).contains(PollFlags::HUP);
        self.socket().is_none_or(is_hung_up) || is_hung_up(self.channel.as_fd())
    }

    /// Returns the number of descriptors that wait in the client's socket. A kernel before 5.10
    /// does not tell.
    pub(crate) fn waiting(&self) -> usize {
        let (Some(socket), Some(folder)) = (self.socket(), &self.common.info) else {
            return 0;
        };
        let name = socket.as_raw_fd().to_string();
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = openat(folder, name, flags, Mode::empty()).ok();
        let info = file.and_then(|file| std::io::read_to_string(File::from(file)).ok());
        let info = info.unwrap_or_default();
        let waiting = info.lines().find_map(|line| line.strip_prefix("scm_fds:"));
        waiting.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
    }

    /// Returns the descriptor if it is harmless, otherwise its replacement.
    fn harmless<'a>(&'a self, fd: &'a OwnedFd) -> BorrowedFd<'a> {
        if is_harmless(fd.as_fd(), self.wanted) {
            fd.as_fd()
        } else {
            self.common.stand_in.as_fd()
        }
    }

    fn take(&self, most: usize) -> Result<ReadResult, Errno> {
        let socket = self.socket().ok_or(Errno::NOTCONN)?;
        let mut bytes = vec![0; most];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
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
