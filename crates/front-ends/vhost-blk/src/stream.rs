//! Messages on the client's socket.
//!
//! A sender attaches a message's descriptors to the sendmsg call of its first byte. The kernel
//! delivers descriptors with that byte and never lets one read pass it. Reading exactly a header,
//! then exactly its payload, therefore gives each message its own descriptors.

use crate::error::ClientError;
use crate::wire::{HEADER_SIZE, Header, MAX_FDS, MAX_PAYLOAD, flags};
use receive::{ForeignProtocol, Read, Socket};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// Pause before a descriptor is sent again that the kernel refused because too many descriptors of
/// this user are in flight (unix(7), ETOOMANYREFS).
const CROWDED_RETRY_DELAY: Duration = Duration::from_millis(20);

/// A whole message.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// Result of [`Stream::receive`].
#[derive(Debug)]
pub(crate) enum Received {
    Message(Message),
    /// No complete message has arrived, or the receiver process is reading the socket.
    Blocked,
    /// The peer has closed its end.
    Eof,
}

/// Connection of a front-end, as a stream of messages. No method blocks.
#[derive(Debug)]
pub(crate) struct Stream {
    socket: Socket,
    /// Part of the current message that was received.
    buf: Vec<u8>,
    have: usize,
    fds: Vec<OwnedFd>,
    /// Bytes that the socket has not accepted yet.
    out: Vec<u8>,
    sent: usize,
    out_fd: Option<OwnedFd>,
    /// The kernel refused the reply's descriptor, which is sent again at this time.
    crowded: Option<Instant>,
    /// The client's first bytes were checked.
    is_known: bool,
}

impl Stream {
    pub(crate) fn new(socket: Socket) -> Stream {
        Stream {
            socket,
            buf: vec![0; HEADER_SIZE],
            have: 0,
            fds: Vec::new(),
            out: Vec::new(),
            sent: 0,
            out_fd: None,
            crowded: None,
            is_known: false,
        }
    }

    /// Returns the next message, if it has arrived completely.
    pub(crate) fn receive(&mut self) -> Result<Received, ClientError> {
        loop {
            if self.have >= HEADER_SIZE && self.have == self.buf.len() {
                return Ok(Received::Message(self.take()?));
            }
            let Some(bytes) = self.read()? else {
                return Ok(Received::Blocked);
            };
            if bytes == 0 {
                return Ok(Received::Eof);
            }
            self.have += bytes;
            if self.have == HEADER_SIZE && self.buf.len() == HEADER_SIZE {
                self.check_protocol()?;
                let header = self.header()?;
                self.buf.resize(HEADER_SIZE + header.size as usize, 0);
            }
        }
    }

    /// Refuses a client of another protocol, with an answer in that protocol if it is known.
    fn check_protocol(&mut self) -> Result<(), ClientError> {
        if std::mem::replace(&mut self.is_known, true) {
            return Ok(());
        }
        match ForeignProtocol::of(&self.buf) {
            None | Some(ForeignProtocol::VhostUser) => Ok(()),
            Some(stranger) => {
                let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                // The client may not wait for an answer.
                let _ = send(&self.socket, &stranger.answer(&self.buf), flags);
                Err(ClientError::Stranger(stranger))
            }
        }
    }

    /// Returns the header of the current message, after checking it.
    fn header(&self) -> Result<Header, ClientError> {
        let Ok((header, _)) = Header::read_from_prefix(&self.buf) else {
            return Err(ClientError::LongMessage { size: 0 });
        };
        let known = flags::VERSION_MASK | flags::REPLY | flags::NEED_REPLY;
        if header.flags & !known != 0
            || header.flags & flags::VERSION_MASK != flags::VERSION
            || header.flags & flags::REPLY != 0
        {
            return Err(ClientError::Flags {
                flags: header.flags,
            });
        }
        if header.size as usize > MAX_PAYLOAD {
            return Err(ClientError::LongMessage { size: header.size });
        }
        Ok(header)
    }

    fn take(&mut self) -> Result<Message, ClientError> {
        let header = self.header()?;
        let mut payload = std::mem::replace(&mut self.buf, vec![0; HEADER_SIZE]);
        payload.drain(..HEADER_SIZE);
        self.have = 0;
        Ok(Message {
            header,
            payload,
            fds: std::mem::take(&mut self.fds),
        })
    }

    /// Reads the missing bytes of the header or the payload; `None` when nothing is available.
    fn read(&mut self) -> Result<Option<usize>, ClientError> {
        let room = self.buf.get_mut(self.have..).unwrap_or_default();
        let bytes = match self.socket.read(room, &mut self.fds)? {
            Read::Bytes { len, .. } => len,
            Read::Eof => 0,
            Read::Blocked | Read::Waiting => return Ok(None),
        };
        if self.fds.len() > MAX_FDS {
            return Err(ClientError::TooManyFds);
        }
        Ok(Some(bytes))
    }

    /// Returns whether the receiver process reads the socket, so that its readiness must not be
    /// awaited.
    pub(crate) fn is_receiving(&self) -> bool {
        self.socket.is_waiting()
    }

    /// Returns when to go on without an event: to check the receiver process, or to send a reply
    /// again.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.crowded.or_else(|| self.socket.deadline())
    }

    /// Sends the answer to a request of the front-end.
    pub(crate) fn reply(
        &mut self,
        request: u32,
        payload: &[u8],
        fd: Option<OwnedFd>,
    ) -> Result<(), ClientError> {
        let header = Header {
            request,
            flags: flags::VERSION | flags::REPLY,
            // All payloads of this side are short.
            size: payload.len() as u32,
        };
        self.out.extend_from_slice(header.as_bytes());
        self.out.extend_from_slice(payload);
        self.out_fd = fd;
        self.flush()?;
        crash::point!("vhost-blk.message.answered");
        Ok(())
    }

    /// Sends waiting bytes; `false` when the socket accepts no more for now. Nothing may be
    /// received until all are sent, so at most one reply ever waits.
    pub(crate) fn flush(&mut self) -> Result<bool, ClientError> {
        self.crowded = None;
        while let Some(rest) = self.out.get(self.sent..).filter(|rest| !rest.is_empty()) {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = self.out_fd.as_ref().map(|fd| [fd.as_fd()]);
            if let Some(fds) = &fds {
                control.push(SendAncillaryMessage::ScmRights(fds));
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(&self.socket, &[IoSlice::new(rest)], &mut control, flags) {
                Ok(bytes) => {
                    self.sent += bytes;
                    self.out_fd = None;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::TOOMANYREFS) => {
                    self.socket.report_crowd();
                    self.crowded = Some(Instant::now() + CROWDED_RETRY_DELAY);
                    return Ok(false);
                }
                Err(errno) => return Err(ClientError::Send(errno)),
            }
        }
        self.out.clear();
        self.sent = 0;
        self.out_fd = None;
        Ok(true)
    }

    /// Returns whether the reply waits for a time, and for no event of the socket.
    pub(crate) fn is_crowded(&self) -> bool {
        self.crowded.is_some()
    }

    /// Returns whether a reply waits for the socket.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.out.is_empty()
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
