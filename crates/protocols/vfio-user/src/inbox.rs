//! Received bytes and descriptors, divided into messages.
//!
//! One recvmsg takes all available bytes, often several messages. The kernel ends such a read after
//! the first packet with descriptors. They were therefore sent with the read's *last* packet, but
//! the beginning of that packet is unknown. All known clients keep the following rule: a sendmsg
//! with descriptors carries one message, or its beginning. Hence descriptors belong to the last
//! message of their read that can carry some. If there is none (a client's mistake, to be answered
//! as one), they belong to the last message.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::ops::Range;
use std::os::fd::OwnedFd;

use receive::{Read, Socket};
use zerocopy::FromBytes;

use crate::error::ConnectionError;
use crate::journal::{Arriving, Journal};
use crate::wire::{HEADER_SIZE, Header, MAX_MSG_FDS, flags};

/// Normal size of the buffer. A longer message enlarges it while that message is there.
const BASE_SIZE: usize = 16 << 10;

/// Maximum number of descriptors held for undelivered messages. They are those of a message that
/// waits for the next header, the next ones, received with a piece of that header, and those of the
/// read that brings its rest.
const MAX_HELD_FDS: usize = 3 * MAX_MSG_FDS;

/// Complete message that was received: header, payload position and descriptors.
#[derive(Debug)]
pub(crate) struct Message {
    pub header: Header,
    pub payload: Range<usize>,
    pub fds: Vec<OwnedFd>,
    /// Keeper's numbers of the descriptors, if they are kept; and the number of reads that brought
    /// them.
    pub numbers: Vec<Option<NonZeroU32>>,
    pub groups: usize,
}

/// Descriptors that one read of the socket has received.
#[derive(Debug)]
pub(crate) struct FdGroup {
    /// Range of stream offsets of the bytes that the read has received.
    read: Range<u64>,
    /// Stream offset of the message that the descriptors belong to; `None` until it is known.
    owner: Option<u64>,
    fds: Vec<OwnedFd>,
    numbers: Vec<Option<NonZeroU32>>,
}

impl FdGroup {
    /// Creates the group from descriptors that a previous process has received.
    pub fn resumed(
        read: Range<u64>,
        owner: Option<u64>,
        fds: Vec<(OwnedFd, Option<NonZeroU32>)>,
    ) -> Self {
        let (fds, numbers) = fds.into_iter().unzip();
        Self {
            read,
            owner,
            fds,
            numbers,
        }
    }
}

/// Descriptors of a message, their keeper's numbers, and the number of reads that received them.
type Fds = (Vec<OwnedFd>, Vec<Option<NonZeroU32>>, usize);

#[derive(Debug)]
pub(crate) struct Inbox {
    /// Receive buffer, which contains received bytes from `start` to `end`.
    buf: Vec<u8>,
    start: usize,
    end: usize,
    /// Stream offset of the byte `buf[start]`.
    position: u64,
    /// Stream offset at which this client's stream begins, after that of the previous client.
    origin: u64,
    groups: VecDeque<FdGroup>,
}

impl Inbox {
    pub fn new() -> Self {
        Self {
            buf: vec![0; BASE_SIZE],
            start: 0,
            end: 0,
            position: 0,
            origin: 0,
            groups: VecDeque::new(),
        }
    }

    /// Restores the state that a previous process left: bytes from this stream offset on, and
    /// descriptors.
    pub fn resumed(mut bytes: Vec<u8>, position: u64, groups: Vec<FdGroup>) -> Self {
        let end = bytes.len();
        bytes.resize(end.max(BASE_SIZE), 0);
        Self {
            buf: bytes,
            start: 0,
            end,
            position,
            // The first bytes were checked for a foreign protocol by the previous process.
            origin: u64::MAX,
            groups: groups.into(),
        }
    }

    /// Discards everything, and begins a new client's stream at this offset.
    pub fn begin(&mut self, position: u64) {
        self.position = position;
        self.origin = position;
    }

    /// Returns whether the inbox contains no part of a message.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Discards all received bytes, and closes the received descriptors.
    pub fn clear(&mut self) {
        self.position = self.position.saturating_add((self.end - self.start) as u64);
        self.start = 0;
        self.end = 0;
        self.groups.clear();
    }

    /// Returns the payload of a message from [`next`](Self::next), valid until the next
    /// [`receive`](Self::receive).
    pub fn payload(&self, payload: Range<usize>) -> &[u8] {
        self.buf.get(payload).unwrap_or_default()
    }

    /// Reads from the socket once. Must be called only when [`next`](Self::next) returns no
    /// message.
    pub fn receive(&mut self, socket: &mut Socket) -> Result<Read, ConnectionError> {
        self.make_room();
        let mut fds = Vec::new();
        let room = self.buf.get_mut(self.end..).unwrap_or_default();
        // Descriptors received with an error are closed.
        let read = socket.read(room, &mut fds)?;
        if let Read::Bytes { len, .. } = read {
            let numbers = vec![None; fds.len()];
            self.received(len, fds, numbers)?;
        }
        Ok(read)
    }

    /// Reads once as [`receive`](Self::receive) does, by way of a journal. [`Read::Waiting`] also
    /// stands for the keeper's answer.
    pub fn receive_kept(
        &mut self,
        socket: &mut Socket,
        journal: &mut Journal,
    ) -> Result<Read, ConnectionError> {
        if !journal.is_settled() {
            return Ok(Read::Waiting);
        }
        if journal.is_arriving() && !socket.hold()? {
            return Ok(Read::Waiting);
        }
        if let Some(arrived) = journal.take_arrived() {
            let Arriving {
                len, fds, numbers, ..
            } = arrived;
            let bytes = self.buf.get(self.end..).and_then(|room| room.get(..len));
            journal.take(socket, bytes.ok_or(ConnectionError::Truncated)?)?;
            self.received(len, fds, numbers)?;
            return Ok(Read::Bytes { len, more: true });
        }
        self.make_room();
        let most = self.end.saturating_add(journal.room()).min(self.buf.len());
        let mut fds = Vec::new();
        let room = self.buf.get_mut(self.end..most).unwrap_or_default();
        let read = socket.look(journal.seen(), room, &mut fds)?;
        let Read::Bytes { len, .. } = read else {
            journal.take_seen(socket)?;
            return Ok(read);
        };
        if !fds.is_empty() {
            journal.take_seen(socket)?;
            journal.arrive(len, fds);
            return if journal.is_settled() {
                self.receive_kept(socket, journal)
            } else {
                Ok(Read::Waiting)
            };
        }
        let bytes = self.buf.get(self.end..).and_then(|room| room.get(..len));
        let bytes = bytes.ok_or(ConnectionError::Truncated)?;
        if self.is_empty() && are_posted(bytes) {
            journal.see(socket, bytes)?;
        } else {
            journal.take(socket, bytes)?;
        }
        self.received(len, Vec::new(), Vec::new())?;
        Ok(read)
    }

    /// Adds `len` received bytes and their descriptors after those received before.
    fn received(
        &mut self,
        len: usize,
        fds: Vec<OwnedFd>,
        numbers: Vec<Option<NonZeroU32>>,
    ) -> Result<(), ConnectionError> {
        let read_start = self.position.saturating_add((self.end - self.start) as u64);
        self.end = self.end.saturating_add(len).min(self.buf.len());
        if !fds.is_empty() {
            let held: usize = self.groups.iter().map(|group| group.fds.len()).sum();
            if held + fds.len() > MAX_HELD_FDS {
                return Err(ConnectionError::TooManyFds);
            }
            self.groups.push_back(FdGroup {
                read: read_start..read_start.saturating_add(len as u64),
                owner: None,
                fds,
                numbers,
            });
        }
        Ok(())
    }

    /// Returns the first bytes of a client before its first message is taken.
    pub fn first_bytes(&self) -> &[u8] {
        if self.position == self.origin {
            self.buf.get(self.start..self.end).unwrap_or_default()
        } else {
            &[]
        }
    }

    /// Removes and returns the next complete message, of at most `limit` bytes.
    pub fn next(&mut self, limit: usize) -> Result<Option<Message>, ConnectionError> {
        let Some(header) = self.header_at(self.start) else {
            return Ok(None);
        };
        if header.flags & flags::TYPE_MASK != flags::COMMAND {
            return Err(ConnectionError::NotACommand {
                flags: header.flags,
            });
        }
        let size = header.message_size as usize;
        if size < HEADER_SIZE {
            return Err(ConnectionError::ShortMessage {
                size: header.message_size,
            });
        }
        if size > limit {
            return Err(ConnectionError::LongMessage {
                size: header.message_size,
                limit,
            });
        }
        if self.end - self.start < size {
            return Ok(None);
        }
        let Some((fds, numbers, groups)) = self.take_fds(size as u64) else {
            return Ok(None);
        };
        let payload = self.start + HEADER_SIZE..self.start + size;
        self.start += size;
        self.position = self.position.saturating_add(size as u64);
        Ok(Some(Message {
            header,
            payload,
            fds,
            numbers,
            groups,
        }))
    }

    /// Takes the descriptors of the message of `size` bytes at the front; `None` if their owner is
    /// not yet known.
    fn take_fds(&mut self, size: u64) -> Option<Fds> {
        let end = self.position.saturating_add(size);
        let mut ours = 0;
        while let Some(group) = self.groups.get(ours).filter(|group| group.read.start < end) {
            // A known owner does not change any more, so each read is scanned once.
            let owner = match group.owner {
                Some(owner) => owner,
                None => self.owner(&group.read)?,
            };
            if let Some(group) = self.groups.get_mut(ours) {
                group.owner = Some(owner);
            }
            if owner != self.position {
                break;
            }
            ours += 1;
        }
        let (mut fds, mut numbers) = (Vec::new(), Vec::new());
        for group in self.groups.drain(..ours) {
            fds.extend(group.fds);
            numbers.extend(group.numbers);
        }
        Some((fds, numbers, ours))
    }

    /// Returns the stream offset of the message that owns the descriptors of a read. The read
    /// overlaps the message at the front. Returns `None` if a message begins in that read and its
    /// command is not yet received.
    fn owner(&self, read: &Range<u64>) -> Option<u64> {
        let mut at = self.start;
        let mut position = self.position;
        let mut last = position;
        let mut last_able = None;
        while position < read.end {
            let header = self.header_at(at)?;
            last = position;
            if header.command.may_carry_fds() {
                last_able = Some(position);
            }
            let size = header.message_size;
            if (size as usize) < HEADER_SIZE {
                break;
            }
            at = at.saturating_add(size as usize);
            position = position.saturating_add(u64::from(size));
        }
        Some(last_able.unwrap_or(last))
    }

    fn header_at(&self, at: usize) -> Option<Header> {
        let bytes = self.buf.get(at..self.end)?;
        Header::read_from_prefix(bytes)
            .ok()
            .map(|(header, _)| header)
    }

    /// Makes room behind `end`: moves the remaining bytes to the front, and lets the buffer grow or
    /// shrink. It grows at most to twice the received bytes, so that a size in a header alone costs
    /// nothing.
    fn make_room(&mut self) {
        let held = self.end - self.start;
        if held == 0 {
            self.start = 0;
            self.end = 0;
            if self.buf.len() > BASE_SIZE {
                self.buf = vec![0; BASE_SIZE];
            }
        } else if self.start > 0 {
            self.buf.copy_within(self.start..self.end, 0);
            self.start = 0;
            self.end = held;
        }
        if self.end == self.buf.len() {
            self.buf.resize(self.buf.len().saturating_mul(2), 0);
        }
    }
}

/// Returns whether the bytes are whole messages that request no reply and carry no descriptors.
fn are_posted(mut bytes: &[u8]) -> bool {
    while let Ok((header, _)) = Header::read_from_prefix(bytes) {
        let size = header.message_size as usize;
        let is_posted = header.flags == flags::COMMAND | flags::NO_REPLY
            && !header.command.may_carry_fds()
            && size >= HEADER_SIZE;
        match bytes.get(size..) {
            Some(rest) if is_posted => bytes = rest,
            _ => return false,
        }
    }
    bytes.is_empty()
}
