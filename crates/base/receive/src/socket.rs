//! Client sockets.

use crate::error::ReadError;
use crate::listener_link::ListenerLink;
use crate::message::MAX_FDS;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, Shutdown, recv, recvmsg,
    shutdown,
};
use rustix::pipe::{SpliceFlags, splice};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use sync::Unpoisoned;

/// Maximum number of bytes that may stay in a socket while [`Socket::look`] looks behind them. Each
/// such look copies them again.
pub const MAX_SEEN: usize = 1024;

/// Result of a read from a client's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// Bytes were read, perhaps with descriptors.
    Bytes {
        /// Number of bytes read, at least 1.
        len: usize,
        /// A further read may return more at once: this one was ended by the buffer or by
        /// descriptors, not by an empty socket.
        more: bool,
    },
    /// Nothing can be read from the socket at present.
    Blocked,
    /// The receiver process reads. Until it has answered the socket itself must not be polled: see
    /// [`Socket::is_waiting`].
    Waiting,
    /// The peer has closed its end.
    Eof,
}

/// A client's Unix stream socket. No read blocks, even if the socket is blocking.
#[derive(Debug)]
pub struct Socket(SocketMode);

#[derive(Debug)]
enum SocketMode {
    InPlace { socket: OwnedFd, max_fds: usize },
    Receiver(Received),
}

#[derive(Debug)]
struct Received {
    /// Socket of the client; `None` only inside `drop`.
    socket: Option<Arc<OwnedFd>>,
    link: Arc<Mutex<ListenerLink>>,
    client: u64,
    waiting: bool,
    /// Number of bytes in the socket that the receiver process has peeked at: it holds the
    /// descriptors among them. 0: none.
    looked: usize,
}

fn fds_of(control: &mut RecvAncillaryBuffer<'_>, fds: &mut Vec<OwnedFd>) {
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = ancillary {
            fds.extend(received);
        }
    }
}

/// Reads from the socket once, with room for descriptors. The first `seen` bytes, at most
/// [`MAX_SEEN`], are left out of the buffer, and of the returned number.
fn read_with(
    socket: BorrowedFd<'_>,
    seen: usize,
    buf: &mut [u8],
    control: &mut RecvAncillaryBuffer<'_>,
    flags: RecvFlags,
) -> Result<Option<(usize, ReturnFlags)>, ReadError> {
    let flags = flags | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    if seen > 0 {
        let mut before = [0; MAX_SEEN];
        let before = before.get_mut(..seen).unwrap_or_default();
        let mut parts = [IoSliceMut::new(before), IoSliceMut::new(buf)];
        let read = read_parts(socket, &mut parts, control, flags)?;
        return Ok(read.and_then(|(len, flags)| Some((len.checked_sub(seen)?, flags))));
    }
    read_parts(socket, &mut [IoSliceMut::new(buf)], control, flags)
}

fn read_parts(
    socket: BorrowedFd<'_>,
    parts: &mut [IoSliceMut<'_>],
    control: &mut RecvAncillaryBuffer<'_>,
    flags: RecvFlags,
) -> Result<Option<(usize, ReturnFlags)>, ReadError> {
    loop {
        match recvmsg(socket, parts, control, flags) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::CONNRESET) => return Ok(Some((0, ReturnFlags::empty()))),
            Err(errno) => return Err(ReadError::System(errno)),
            Ok(message) => return Ok(Some((message.bytes, message.flags))),
        }
    }
}

/// Content of a client's socket that a peek has found.
pub(crate) enum SocketContent {
    Nothing,
    /// The peer has closed its end.
    Eof,
    /// This number of bytes, without descriptors.
    Bytes(usize),
    /// This number of bytes, some of them with descriptors.
    WithFds(usize),
}

/// Peeks into a socket without taking anything from it. The kernel ends a read behind the first
/// packet with descriptors, and reports that they were cut off if there is no room for them. They
/// stay in the socket: a peek only lends them, so none is closed.
///
/// The first `seen` bytes in the socket, at most [`MAX_SEEN`], were found before, and are left out.
/// While there are any, the end of the stream is not seen.
pub(crate) fn look(
    socket: BorrowedFd<'_>,
    seen: usize,
    buf: &mut [u8],
) -> Result<SocketContent, ReadError> {
    let mut none = RecvAncillaryBuffer::new(&mut []);
    let found = read_with(socket, seen, buf, &mut none, RecvFlags::PEEK)?;
    Ok(match found {
        None => SocketContent::Nothing,
        Some((len, flags)) if flags.contains(ReturnFlags::CTRUNC) => SocketContent::WithFds(len),
        Some((0, _)) if seen > 0 => SocketContent::Nothing,
        Some((0, _)) => SocketContent::Eof,
        Some((len, _)) => SocketContent::Bytes(len),
    })
}

/// Reads exactly the `len` bytes that a peek has just found without descriptors.
pub(crate) fn take(socket: BorrowedFd<'_>, buf: &mut [u8], len: usize) -> Result<Read, ReadError> {
    let full = len == buf.len();
    let seen = buf.get_mut(..len).unwrap_or_default();
    loop {
        match recv(socket, &mut *seen, RecvFlags::DONTWAIT) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(ReadError::System(errno)),
            Ok((_, taken)) => {
                return Ok(Read::Bytes {
                    len: taken,
                    more: taken < len || full,
                });
            }
        }
    }
}

impl Socket {
    /// Wraps the socket of a client that is trusted not to send blocking descriptors. They are
    /// received by this process, at most `max_fds` (up to 253) with one read, and this process
    /// closes them.
    pub fn in_place(socket: OwnedFd, max_fds: usize) -> Socket {
        Socket(SocketMode::InPlace { socket, max_fds })
    }

    pub(crate) fn received(socket: OwnedFd, link: &Arc<Mutex<ListenerLink>>) -> Socket {
        let socket = Arc::new(socket);
        let client = link.lock().unpoisoned().enter(socket.clone());
        Socket(SocketMode::Receiver(Received {
            socket: Some(socket),
            link: link.clone(),
            client,
            waiting: false,
            looked: 0,
        }))
    }

    /// Reads once into `buf`, which must not be empty, and appends the received descriptors to
    /// `fds`. After [`Read::Waiting`] the next call's buffer must not be shorter.
    ///
    /// # Errors
    /// [`ReadError`] when the stream cannot be read any more.
    pub fn read(&mut self, buf: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<Read, ReadError> {
        match &mut self.0 {
            SocketMode::InPlace { socket, max_fds } => {
                read_in_place(socket.as_fd(), *max_fds, 0, buf, fds, RecvFlags::empty())
            }
            SocketMode::Receiver(received) => received.read(buf, fds),
        }
    }

    /// Peeks as [`Socket::read`] reads, but leaves the data in the socket, from where
    /// [`Socket::consume`] takes it.
    ///
    /// `seen`: number of bytes from earlier looks that are still in the socket, at most
    /// [`MAX_SEEN`]. They have no descriptors, and are not returned again. [`Read::Blocked`] then
    /// stands also for descriptors behind them, and for the end of the stream: both are seen when
    /// these bytes have been consumed.
    ///
    /// # Errors
    /// [`ReadError`] when the stream cannot be read any more.
    pub fn look(
        &mut self,
        seen: usize,
        buf: &mut [u8],
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Read, ReadError> {
        match &mut self.0 {
            SocketMode::InPlace { socket, max_fds } => {
                read_in_place(socket.as_fd(), *max_fds, seen, buf, fds, RecvFlags::PEEK)
            }
            SocketMode::Receiver(received) => received.look(seen, buf, fds),
        }
    }

    /// Returns whether the receiver process holds the peeked descriptors, so that the bytes may be
    /// consumed. Otherwise that process was replaced since: the next one peeks again, and this is
    /// to be called again as for [`Read::Waiting`].
    ///
    /// # Errors
    /// [`ReadError`] when the stream cannot be read any more.
    pub fn hold(&mut self) -> Result<bool, ReadError> {
        match &mut self.0 {
            SocketMode::InPlace { .. } => Ok(true),
            SocketMode::Receiver(received) => received.hold(),
        }
    }

    /// Moves the next bytes from the socket into a pipe, at most `len`. The kernel takes from the
    /// socket exactly the bytes that it puts into the pipe, even if this process dies meanwhile.
    /// Returns their number.
    ///
    /// # Errors
    /// [`ReadError`]: EAGAIN when the pipe is full. Also when the receiver process has ended,
    /// because this process would otherwise close the peeked descriptors itself.
    pub fn consume(&mut self, pipe: BorrowedFd<'_>, len: usize) -> Result<usize, ReadError> {
        if let SocketMode::Receiver(received) = &self.0
            && received.looked > 0
            && !received.link.lock().unpoisoned().holds(received.client)
        {
            return Err(ReadError::ReceiverGone);
        }
        loop {
            match splice(self.as_fd(), None, pipe, None, len, SpliceFlags::NONBLOCK) {
                Err(Errno::INTR) => {}
                Err(errno) => return Err(ReadError::System(errno)),
                Ok(moved) => return Ok(moved),
            }
        }
    }

    /// Records that all peeked bytes have been consumed.
    pub fn consumed(&mut self) {
        if let SocketMode::Receiver(received) = &mut self.0
            && std::mem::take(&mut received.looked) > 0
        {
            received.link.lock().unpoisoned().looked(received.client);
        }
    }

    /// Reports that the kernel takes no more descriptors of this user in flight: clients are looked
    /// for in whose sockets too many wait.
    pub fn report_crowd(&self) {
        if let SocketMode::Receiver(received) = &self.0 {
            received.link.lock().unpoisoned().report_crowd();
        }
    }

    /// Returns whether the receiver process reads. [`Intake::ready`](crate::Intake) handles its
    /// answer; the next [`Socket::read`] returns it.
    pub fn is_waiting(&self) -> bool {
        matches!(
            &self.0,
            SocketMode::Receiver(Received { waiting: true, .. })
        )
    }

    /// Returns the time limit of the missing answer, at which [`Socket::read`] must be called.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.0 {
            SocketMode::Receiver(Received {
                waiting: true,
                link,
                ..
            }) => link.lock().unpoisoned().deadline(),
            _ => None,
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            SocketMode::InPlace { socket, .. } => socket.as_fd(),
            SocketMode::Receiver(received) => received.as_fd(),
        }
    }
}

fn read_in_place(
    socket: BorrowedFd<'_>,
    max_fds: usize,
    seen: usize,
    buf: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    flags: RecvFlags,
) -> Result<Read, ReadError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let Some((len, flags)) = read_with(socket, seen, buf, &mut control, flags)? else {
        return Ok(Read::Blocked);
    };
    let before = fds.len();
    fds_of(&mut control, fds);
    let received = fds.len() - before;
    if flags.contains(ReturnFlags::CTRUNC) || received > max_fds {
        return Err(ReadError::TooManyFds);
    }
    Ok(match len {
        0 if seen > 0 => Read::Blocked,
        0 => Read::Eof,
        len => Read::Bytes {
            len,
            more: len == buf.len() || received > 0,
        },
    })
}

impl Received {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Some(socket) => socket.as_fd(),
            None => unreachable!("only a dropped client has no socket"),
        }
    }

    /// Takes the available bytes; those with descriptors after the receiver process has peeked at
    /// them.
    fn read(&mut self, buf: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<Read, ReadError> {
        if !self.waiting {
            match look(self.as_fd(), 0, buf)? {
                SocketContent::Nothing => return Ok(Read::Blocked),
                SocketContent::Eof => return Ok(Read::Eof),
                SocketContent::Bytes(len) => return take(self.as_fd(), buf, len),
                SocketContent::WithFds(len) => {
                    self.ask(len);
                    return Ok(Read::Waiting);
                }
            }
        }
        let mut peeked = Vec::new();
        let Read::Bytes { len, .. } = self.take_answer(buf, &mut peeked)? else {
            return Ok(if self.waiting {
                Read::Waiting
            } else {
                Read::Eof
            });
        };
        if !self.hold()? {
            return Ok(Read::Waiting);
        }
        // The kernel closes the descriptors of the bytes that are taken here: not for the last
        // time, because the receiver process holds them.
        let mut none = RecvAncillaryBuffer::new(&mut []);
        let room = buf.get_mut(..len).unwrap_or_default();
        let taken = read_with(self.as_fd(), 0, room, &mut none, RecvFlags::empty())?;
        let Some((len @ 1.., flags)) = taken else {
            // The peeked bytes have disappeared: another process reads the socket.
            return Err(ReadError::System(Errno::IO));
        };
        self.looked = 0;
        self.link.lock().unpoisoned().looked(self.client);
        // A peek that fills its buffer also lends the descriptors of a later packet. The same read
        // without a peek ends before that packet, and reports no lost descriptors.
        if flags.contains(ReturnFlags::CTRUNC) {
            fds.append(&mut peeked);
        }
        Ok(Read::Bytes { len, more: true })
    }

    fn look(
        &mut self,
        seen: usize,
        buf: &mut [u8],
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Read, ReadError> {
        if self.waiting {
            return self.take_answer(buf, fds);
        }
        match look(self.as_fd(), seen, buf)? {
            SocketContent::Nothing => Ok(Read::Blocked),
            // The receiver process peeks from the front of the socket.
            SocketContent::WithFds(_) if seen > 0 => Ok(Read::Blocked),
            SocketContent::Eof => Ok(Read::Eof),
            SocketContent::Bytes(len) => Ok(Read::Bytes {
                len,
                more: len == buf.len(),
            }),
            SocketContent::WithFds(len) => {
                self.ask(len);
                Ok(Read::Waiting)
            }
        }
    }

    fn ask(&mut self, len: usize) {
        self.link.lock().unpoisoned().ask(self.client, len);
        self.waiting = true;
    }

    /// See [`Socket::hold`].
    fn hold(&mut self) -> Result<bool, ReadError> {
        if self.looked == 0 {
            return Ok(true);
        }
        let mut link = self.link.lock().unpoisoned();
        if self.waiting {
            match link.answer(self.client)? {
                // The bytes are those that were seen before.
                Some(_) => self.waiting = false,
                None => return Ok(false),
            }
        }
        if !link.holds(self.client) {
            link.ask(self.client, self.looked);
            self.waiting = true;
        }
        Ok(!self.waiting)
    }

    fn take_answer(&mut self, buf: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<Read, ReadError> {
        let Some(taken) = self.link.lock().unpoisoned().answer(self.client)? else {
            return Ok(Read::Waiting);
        };
        self.waiting = false;
        let len = taken.bytes.len();
        let Some(room) = buf.get_mut(..len) else {
            return Err(ReadError::System(Errno::MSGSIZE));
        };
        room.copy_from_slice(&taken.bytes);
        fds.extend(taken.fds);
        self.looked = len;
        Ok(match len {
            0 => Read::Eof,
            len => Read::Bytes { len, more: true },
        })
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else {
            return;
        };
        // The client sees the end now, even if closing takes time.
        let _ = shutdown(&socket, Shutdown::Both);
        let mut link = self.link.lock().unpoisoned();
        if link.leave(self.client) {
            // The receiver process has a duplicate until it is notified, so this is not the last
            // close.
            drop(socket);
            link.end(self.client);
        } else {
            sync::discard(socket);
        }
    }
}
