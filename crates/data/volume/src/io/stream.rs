//! Connections on a worker's ring, over which bytes and requests' memory are sent and received.
//!
//! For volumes with data that arrives over a socket. At most one operation in each direction is in
//! flight. The memory that it uses (bytes, segments of guest memory) is moved into the operation
//! and returned when the kernel has finished with it, so that it cannot be freed meanwhile. Results
//! are not returned by [`Io::poll`](crate::Io::poll): the owner fetches them in
//! [`VolumeQueue::poll`](crate::VolumeQueue::poll). The ring's event wakes the worker for them.

use super::ring::Ring;
use dma::SegmentList;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

/// Maximum number of memory segments in one send or receive (`UIO_MAXIOV`).
const MAX_PIECES: usize = 1024;

/// Part of a message to send on a connection.
#[derive(Debug, Clone, Copy)]
enum MessagePart {
    /// Number of bytes that come next from the message's own buffer.
    Bytes(usize),
    /// Memory of the next request in the message's list.
    List,
}

/// Message to send on a connection: bytes, and memory of requests between them.
#[derive(Debug, Default)]
pub struct Outgoing {
    bytes: Vec<u8>,
    parts: Vec<MessagePart>,
    lists: Vec<(u64, SegmentList)>,
    len: u64,
    sent: u64,
}

impl Outgoing {
    /// Creates an empty message.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends bytes to the message, by copying them.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.len += bytes.len() as u64;
        match self.parts.last_mut() {
            Some(MessagePart::Bytes(len)) => *len += bytes.len(),
            _ => self.parts.push(MessagePart::Bytes(bytes.len())),
        }
    }

    /// Appends all of a request's memory. `name` identifies it when it is returned.
    pub fn data(&mut self, name: u64, list: SegmentList) {
        self.len += list.len_bytes();
        self.parts.push(MessagePart::List);
        self.lists.push((name, list));
    }

    /// Returns the number of bytes of the message that have not been sent.
    pub fn left(&self) -> u64 {
        self.len - self.sent
    }

    /// Records that `sent` further bytes of the message have been sent.
    pub fn advance(&mut self, sent: u64) {
        self.sent = self.sent.saturating_add(sent).min(self.len);
    }

    /// Returns whether the message still contains the memory that was added as `name`.
    pub fn holds(&self, name: u64) -> bool {
        self.lists.iter().any(|(held, _)| *held == name)
    }

    /// Empties the message, but keeps its allocations. Calls `back` with each request's memory and
    /// its name.
    pub fn clear(&mut self, mut back: impl FnMut(u64, SegmentList)) {
        for (name, list) in self.lists.drain(..) {
            back(name, list);
        }
        self.bytes.clear();
        self.parts.clear();
        (self.len, self.sent) = (0, 0);
    }

    /// Builds vectors for the unsent bytes after the first `more` of them, as many as one operation
    /// can take. The pointers are valid as long as the message is not changed.
    pub(super) fn vectors(&self, more: u64, vectors: &mut Vec<libc::iovec>) {
        vectors.clear();
        let mut skip = self.sent.saturating_add(more);
        let mut bytes = self.bytes.as_slice();
        let mut lists = self.lists.iter();
        for part in &self.parts {
            match part {
                MessagePart::Bytes(len) => {
                    let (these, others) = bytes.split_at_checked(*len).unwrap_or((bytes, &[]));
                    bytes = others;
                    piece(vectors, &mut skip, these.as_ptr().cast_mut(), these.len());
                }
                MessagePart::List => {
                    let segments = lists.next().map_or(&[][..], |(_, list)| list.segments());
                    for segment in segments {
                        piece(vectors, &mut skip, segment.as_ptr(), segment.len());
                    }
                }
            }
            if vectors.len() >= MAX_PIECES {
                break;
            }
        }
        vectors.truncate(MAX_PIECES);
    }
}

/// Appends `len` bytes at `at` to the I/O vectors, without the first `skip` bytes.
fn piece(vectors: &mut Vec<libc::iovec>, skip: &mut u64, at: *mut u8, len: usize) {
    if *skip >= len as u64 {
        *skip -= len as u64;
        return;
    }
    // Less than the piece's length.
    let skipped = std::mem::take(skip) as usize;
    vectors.push(libc::iovec {
        iov_base: at.wrapping_add(skipped).cast(),
        iov_len: len - skipped,
    });
}

/// Destination of received bytes: the memory of a request first, if it is known that its data is
/// next, then a buffer.
#[derive(Debug)]
pub struct Incoming {
    /// Memory of the request whose data is next, the position in it, and the number of bytes.
    pub direct: Option<(SegmentList, u64, u64)>,
    buffer: Vec<u8>,
    filled: usize,
    used: usize,
}

impl Incoming {
    /// Creates a destination for received bytes with a buffer of `buffer` bytes.
    pub fn new(buffer: usize) -> Self {
        Self {
            direct: None,
            buffer: vec![0; buffer],
            filled: 0,
            used: 0,
        }
    }

    /// Returns the bytes that were received into the buffer and have not been consumed.
    pub fn bytes(&self) -> &[u8] {
        self.buffer.get(self.used..self.filled).unwrap_or_default()
    }

    /// Marks the first `used` received bytes as consumed.
    pub fn consume(&mut self, used: usize) {
        self.used = self.used.saturating_add(used).min(self.filled);
    }

    /// Discards all received bytes and the request's memory.
    pub fn clear(&mut self) {
        (self.filled, self.used, self.direct) = (0, 0, None);
    }

    /// Records that `len` bytes were received. Returns the number of those that were stored in the
    /// request's memory.
    pub fn received(&mut self, len: u64) -> u64 {
        let direct = self.direct.as_ref().map_or(0, |(_, _, left)| *left);
        let direct = direct.min(len);
        let room = self.buffer.len() - self.filled;
        self.filled += usize::try_from(len - direct).unwrap_or(room).min(room);
        direct
    }

    /// Makes room in the buffer, and builds vectors for the next bytes. There is no vector when
    /// there is no room. The pointers are valid as long as the destination is not changed.
    pub(super) fn vectors(&mut self, vectors: &mut Vec<libc::iovec>) {
        vectors.clear();
        self.buffer.copy_within(self.used..self.filled, 0);
        (self.filled, self.used) = (self.filled - self.used, 0);
        if let Some((list, from, len)) = &self.direct {
            let (mut skip, mut left) = (*from, *len);
            for segment in list.segments() {
                if left == 0 || vectors.len() >= MAX_PIECES {
                    break;
                }
                let before = vectors.len();
                piece(vectors, &mut skip, segment.as_ptr(), segment.len());
                if let Some(last) = vectors.get_mut(before) {
                    last.iov_len = last
                        .iov_len
                        .min(usize::try_from(left).unwrap_or(usize::MAX));
                    left -= last.iov_len as u64;
                }
            }
            if left > 0 {
                // The bytes behind these pieces are not for the buffer.
                return;
            }
        }
        let Some(room) = self.buffer.get_mut(self.filled..) else {
            return;
        };
        if !room.is_empty() && vectors.len() < MAX_PIECES {
            vectors.push(libc::iovec {
                iov_base: room.as_mut_ptr().cast(),
                iov_len: room.len(),
            });
        }
    }
}

/// Handle that adds connections to a worker's ring.
#[derive(Clone, Debug)]
pub struct RingStreams(pub(super) Rc<Ring>);

impl RingStreams {
    /// Adds a connected socket to the ring. It must be in blocking mode: otherwise the kernel would
    /// not wait for it.
    pub fn open(&self, connected: OwnedFd) -> RingStream {
        RingStream {
            stream: self.0.open_stream(connected),
            ring: self.0.clone(),
        }
    }
}

/// A connected stream socket on a worker's ring; see [`Io::streams`](crate::Io::streams). Dropping
/// it shuts the connection down. The socket is closed when the kernel has completed the operations
/// in flight.
pub struct RingStream {
    ring: Rc<Ring>,
    stream: usize,
}

impl fmt::Debug for RingStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RingStream").field(&self.stream).finish()
    }
}

impl RingStream {
    /// Starts to send the rest of the message.
    ///
    /// # Errors
    /// `outgoing` when another message is being sent, or the ring is full for now.
    pub fn send(&self, outgoing: Outgoing) -> Result<(), Outgoing> {
        self.ring.stream_send(self.stream, outgoing)
    }

    /// Returns the message and the number of bytes sent: once for each [`RingStream::send`], after
    /// it has ended.
    pub fn sent(&self) -> Option<(Outgoing, io::Result<u64>)> {
        self.ring.stream_sent(self.stream)
    }

    /// Starts to receive whatever bytes arrive; the result may be shorter than the room for it.
    ///
    /// # Errors
    /// `incoming` when another receive is in progress, there is no room, or the ring is full for
    /// now.
    pub fn receive(&self, incoming: Incoming) -> Result<(), Incoming> {
        self.ring.stream_receive(self.stream, incoming)
    }

    /// Returns the destination and the number of received bytes (0: the peer has closed the
    /// connection): once for each [`RingStream::receive`], after it has ended. The caller passes
    /// the number to [`Incoming::received`].
    pub fn received(&self) -> Option<(Incoming, io::Result<u64>)> {
        self.ring.stream_received(self.stream)
    }

    /// Cancels the operations in flight, but keeps the connection. The memory is returned in one of
    /// the next rounds, with the number of bytes moved by then or `ECANCELED`.
    pub fn cancel(&self) {
        self.ring.stream_cancel(self.stream);
        self.ring.flush();
    }

    /// Returns whether a send or a receive has ended.
    pub fn has_news(&self) -> bool {
        self.ring.stream_has_news(self.stream)
    }

    /// Submits the started sends and receives to the kernel now.
    pub fn push(&self) {
        self.ring.flush();
    }

    /// Ends the sending direction. The peer sees the end, and its remaining bytes can still be
    /// received.
    pub fn end_sending(&self) {
        self.ring
            .stream_shut_down(self.stream, rustix::net::Shutdown::Write);
    }

    /// Shuts the connection down, so that its operations in flight end soon.
    pub fn shut_down(&self) {
        self.ring
            .stream_shut_down(self.stream, rustix::net::Shutdown::Both);
    }
}

impl Drop for RingStream {
    fn drop(&mut self) {
        self.ring.close_stream(self.stream);
    }
}
