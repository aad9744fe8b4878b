//! Connection of a queue on the worker's ring: sends PDUs and receives bytes.

use dma::SegmentList;
use nvme_tcp::{ConnectionLimits, Header, Writer};
use rustix::event::PollFlags;
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use sync::readiness;
use volume::{Incoming, Outgoing, RingStream, RingStreams};
use worker::{Descriptors, Interest};

/// Size in bytes of the receive buffer of a connection.
const BUFFER: usize = 128 << 10;
/// Maximum number of staged bytes while a message is being sent; above it nothing more is received.
const STAGED: u64 = 1 << 20;

/// Reason why the connection of a queue ends.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectionEnd {
    #[error("the host has closed the connection")]
    Closed,
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the host breaks the protocol: {0}")]
    Violation(nvme_tcp::Violation),
    #[error("the host ends the connection: {0}")]
    Terminated(nvme_tcp::Terminated),
    #[error("the association's memory is inaccessible")]
    Memory(#[from] dma::MemoryError),
    #[error("{0}")]
    Refused(&'static str),
    #[error("host {host} asks for the subsystem {asked}, and this is {here}")]
    OtherSubsystem {
        host: String,
        asked: String,
        here: String,
    },
    #[error("host {host} may not connect: its NQN is not in hosts, or has no secret in host-keys")]
    NotListed { host: String },
}

/// Returns a name from the network as text for the log, without control characters.
pub(crate) fn shown(name: &str) -> String {
    name.escape_debug().to_string()
}

impl From<nvme_tcp::Violation> for ConnectionEnd {
    fn from(error: nvme_tcp::Violation) -> Self {
        Self::Violation(error)
    }
}

/// Connection of a host on the worker's ring.
pub(crate) struct Link {
    stream: RingStream,
    /// Duplicate of the socket in the epoll set, where received bytes wake the front-end.
    watched: OwnedFd,
    pub(crate) writer: Writer,
    /// Receive buffer of the connection; `None` while the kernel uses it.
    incoming: Option<Incoming>,
    /// Message of PDUs that is being assembled.
    pub(crate) staged: Outgoing,
    /// Message buffer to be reused; `None` while the kernel uses it.
    spare: Option<Outgoing>,
    /// Rest of a message that could not be sent because the ring had no room.
    rest: Option<Outgoing>,
    /// `told`: epoll has reported the socket, and it was not checked since. `ending`: the
    /// connection is being ended.
    told: bool,
    ending: bool,
}

impl Link {
    /// Adds a connection with a non-blocking socket to the ring.
    pub(crate) fn new(
        streams: &RingStreams,
        descriptors: &Descriptors,
        token: u32,
        fd: OwnedFd,
        limits: ConnectionLimits,
    ) -> Result<Self, Errno> {
        // The ring waits for a blocking socket.
        rustix::io::ioctl_fionbio(&fd, false)?;
        let watched = rustix::io::fcntl_dupfd_cloexec(&fd, 0)?;
        descriptors.add(&watched, token, Interest::Edge)?;
        Ok(Self {
            stream: streams.open(fd),
            watched,
            writer: Writer::new(limits),
            incoming: Some(Incoming::new(BUFFER)),
            staged: Outgoing::new(),
            spare: Some(Outgoing::new()),
            rest: None,
            told: false,
            ending: false,
        })
    }

    /// Returns whether bytes were received, or a message can be sent.
    pub(crate) fn has_news(&self) -> bool {
        let sends = self.rest.is_some() || (self.staged.left() > 0 && self.spare.is_some());
        self.stream.has_news() || (!self.ending && sends)
    }

    /// Handles an epoll event of the socket: bytes have arrived, or the host has hung up.
    pub(crate) fn tell(&mut self) {
        self.told = true;
    }

    /// Returns whether the host has hung up while no receive is outstanding.
    pub(crate) fn has_hung_up(&mut self) -> bool {
        if self.incoming.is_none() || !std::mem::take(&mut self.told) {
            return false;
        }
        let ends = PollFlags::HUP | PollFlags::ERR | PollFlags::RDHUP;
        readiness(&self.watched, ends).intersects(ends)
    }

    /// Returns whether too much is waiting to be sent for further commands to be received.
    pub(crate) fn is_full(&self) -> bool {
        self.staged.left() >= STAGED
    }

    /// Appends a PDU header to the assembled message.
    pub(crate) fn header(&mut self, header: &Header) {
        self.staged.bytes(header);
    }

    /// Starts to send the assembled message. Returns `false` if it is empty.
    pub(crate) fn send(&mut self) -> bool {
        if self.ending {
            return false;
        }
        if let Some(rest) = self.rest.take() {
            self.rest = self.stream.send(rest).err();
            return true;
        }
        if self.staged.left() == 0 {
            return false;
        }
        let Some(spare) = self.spare.take() else {
            return false;
        };
        let outgoing = std::mem::replace(&mut self.staged, spare);
        if let Err(outgoing) = self.stream.send(outgoing) {
            // The ring is full: the next round tries again.
            let spare = std::mem::replace(&mut self.staged, outgoing);
            self.spare = Some(spare);
        }
        true
    }

    /// Handles a completed send. Passes memory that the kernel no longer uses to `back`.
    pub(crate) fn sent(&mut self, back: impl FnMut(u64, SegmentList)) -> Result<(), ConnectionEnd> {
        let Some((mut outgoing, sent)) = self.stream.sent() else {
            return Ok(());
        };
        outgoing.advance(*sent.as_ref().unwrap_or(&0));
        if sent.is_ok() && outgoing.left() > 0 && !self.ending {
            // Where the ring is full, the next round tries again.
            self.rest = self.stream.send(outgoing).err();
            return Ok(());
        }
        outgoing.clear(back);
        self.spare = Some(outgoing);
        sent?;
        Ok(())
    }

    /// Handles a completed receive. Returns the number of bytes that were received directly into a
    /// command's memory, which is passed to `back`.
    pub(crate) fn received(
        &mut self,
        mut back: impl FnMut(SegmentList),
    ) -> Result<u64, ConnectionEnd> {
        let Some((mut incoming, received)) = self.stream.received() else {
            return Ok(0);
        };
        let result = match received {
            Ok(0) => Err(ConnectionEnd::Closed),
            Ok(len) => Ok(incoming.received(len)),
            Err(error) => Err(error.into()),
        };
        if let Some((list, ..)) = incoming.direct.take() {
            back(list);
        }
        self.incoming = Some(incoming);
        result
    }

    /// Returns the received bytes in the buffer; `None` while the kernel uses the buffer.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        self.incoming.as_ref().map(Incoming::bytes)
    }

    /// Removes the first `used` received bytes from the buffer.
    pub(crate) fn consume(&mut self, used: usize) {
        if let Some(incoming) = &mut self.incoming {
            incoming.consume(used);
        }
    }

    /// Starts the next receive, first into the memory `direct`. Returns that memory if the ring is
    /// full.
    pub(crate) fn receive(
        &mut self,
        direct: Option<(SegmentList, u64, u64)>,
    ) -> Option<SegmentList> {
        let Some(mut incoming) = self.incoming.take() else {
            return direct.map(|(list, ..)| list);
        };
        incoming.direct = direct;
        if let Err(mut incoming) = self.stream.receive(incoming) {
            let list = incoming.direct.take().map(|(list, ..)| list);
            self.incoming = Some(incoming);
            return list;
        }
        None
    }

    /// Returns whether the kernel is executing no operation on the connection.
    pub(crate) fn is_quiet(&self) -> bool {
        self.incoming.is_some() && self.spare.is_some()
    }

    /// Ends the connection without sending the staged bytes. `last` is sent if that is possible
    /// without blocking.
    pub(crate) fn end(&mut self, last: Option<&[u8]>, mut back: impl FnMut(u64, SegmentList)) {
        if std::mem::replace(&mut self.ending, true) {
            return;
        }
        self.staged.clear(&mut back);
        if let Some(last) = last
            && self.spare.is_some()
        {
            let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
            let _ = rustix::net::send(&self.watched, last, flags);
        }
        if let Some(mut rest) = self.rest.take() {
            rest.clear(back);
            self.spare = Some(rest);
        }
        self.stream.shut_down();
    }
}
