//! Parser of a server's replies: simple replies, and chunks of structured ones.
//!
//! The bytes arrive in pieces of any size. [`Replies::next`] consumes some of them and returns
//! their meaning. Everything is checked against the request, so that the caller can act on the
//! events without further checks: data lies within its request, no byte is received twice, and no
//! read ends without an error before every byte of it was received.

use super::in_flight::{Entry, InFlight};
use super::wire::{SIMPLE_REPLY, STRUCTURED_REPLY, chunk, u16_at, u32_at, u64_at};

/// Longest payload of an error chunk, in bytes: a text of 4096 bytes and the fields around it.
const LONGEST_ERROR: u32 = 4096 + 64;
/// Error chunks that a reply may have.
const MOST_ERRORS: u32 = 64;

/// Violation of the protocol by a server. The connection cannot be used any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A magic number of neither kind of reply.
    #[error("a reply begins with {0:#010x}")]
    Magic(u32),
    /// A structured reply that was not negotiated, or a simple one with data that may not be.
    #[error("a {0} reply, which was not negotiated")]
    Kind(&'static str),
    /// No request has this cookie.
    #[error("a reply to a request that was never sent, or was answered (cookie {0:#x})")]
    Cookie(u64),
    /// A type of chunk that nobody asked for.
    #[error("a chunk of the unknown type {0}")]
    Chunk(u16),
    /// A chunk whose length is invalid for its type.
    #[error("a chunk of type {kind} has {len} bytes")]
    Length {
        /// Type of the chunk.
        kind: u16,
        /// Length in bytes.
        len: u32,
    },
    /// Data outside of the requested range, or for a request that reads no data.
    #[error("data outside the requested range")]
    Range,
    /// Data of which some has come before.
    #[error("data that was already received")]
    Twice,
    /// Data in more stretches, out of order, than any server has a reason for.
    #[error("the data of a read arrives in too many pieces out of order")]
    Scattered,
    /// A read has ended, and not all of it has come.
    #[error("a read was reported as complete with bytes missing")]
    Incomplete,
    /// More error chunks than any request can have.
    #[error("too many errors for one request")]
    Errors,
}

/// Meaning of consumed bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// No event.
    More,
    /// Data of a read.
    Data {
        /// Cookie of the request.
        cookie: u64,
        /// Offset in the request, in bytes.
        at: u32,
        /// Received data.
        bytes: &'a [u8],
    },
    /// Bytes of a read that are zero.
    Hole {
        /// Cookie of the request.
        cookie: u64,
        /// Offset in the request, in bytes.
        at: u32,
        /// Length in bytes.
        len: u32,
    },
    /// A reply is complete.
    End {
        /// Cookie of the request.
        cookie: u64,
        /// The server's error, by the protocol's number.
        error: Option<u32>,
    },
}

/// Data that follows in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Cookie of the request.
    pub cookie: u64,
    /// Offset in the request, in bytes.
    pub at: u32,
    /// Number of bytes that follow.
    pub left: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// A reply or chunk begins.
    Head,
    /// Data follows.
    Data { expected: Expected, last: bool },
    /// The text of an error, which nobody reads.
    Skip { cookie: u64, left: u32, last: bool },
    /// A reply has come as a whole.
    End { cookie: u64 },
}

/// The stream of a connection's replies.
#[derive(Debug)]
pub struct Replies {
    structured: bool,
    state: State,
}

impl Replies {
    /// Creates the parser of a stream after the handshake. `structured`: structured replies were
    /// negotiated.
    pub fn new(structured: bool) -> Self {
        Self {
            structured,
            state: State::Head,
        }
    }

    /// Returns the data that follows, if all of it may be received directly into the request's
    /// memory.
    pub fn expects(&self) -> Option<Expected> {
        match self.state {
            State::Data { expected, .. } => Some(expected),
            _ => None,
        }
    }

    /// Records that `len` bytes of the expected data have been received into the request's memory.
    pub fn took(&mut self, len: u32) {
        if let State::Data { expected, last } = self.state {
            self.state = data(expected.cookie, expected.at, expected.left, len, last);
        }
    }

    /// Parses received bytes. Returns the number of bytes consumed, and their meaning. More bytes
    /// are needed if none were consumed and there is no event ([`Event::More`]).
    ///
    /// # Errors
    /// [`Violation`].
    pub fn next<'a, T>(
        &mut self,
        input: &'a [u8],
        requests: &mut InFlight<T>,
    ) -> Result<(usize, Event<'a>), Violation> {
        match self.state {
            State::Head => self.head(input, requests),
            State::Data { expected, last } => {
                let Expected { cookie, at, left } = expected;
                let most = usize::try_from(left).unwrap_or(usize::MAX);
                let bytes = input.get(..most).unwrap_or(input);
                if bytes.is_empty() {
                    return Ok((0, Event::More));
                }
                // No longer than `left`.
                self.state = data(cookie, at, left, bytes.len() as u32, last);
                Ok((bytes.len(), Event::Data { cookie, at, bytes }))
            }
            State::Skip { cookie, left, last } => {
                let used = input.len().min(left as usize);
                let left = left - used as u32;
                self.state = match left {
                    0 => ended(cookie, last),
                    left => State::Skip { cookie, left, last },
                };
                Ok((used, Event::More))
            }
            State::End { cookie } => {
                self.state = State::Head;
                let entry = find(requests, cookie)?;
                entry.ended = true;
                let whole = entry.received.is_whole(entry.asked.len);
                if entry.error.is_none() && entry.asked.read && !whole {
                    return Err(Violation::Incomplete);
                }
                let error = entry.error;
                Ok((0, Event::End { cookie, error }))
            }
        }
    }

    fn head<'a, T>(
        &mut self,
        input: &'a [u8],
        requests: &mut InFlight<T>,
    ) -> Result<(usize, Event<'a>), Violation> {
        match u32_at(input, 0) {
            None => Ok((0, Event::More)),
            Some(SIMPLE_REPLY) => self.simple(input, requests),
            Some(STRUCTURED_REPLY) if self.structured => self.chunk(input, requests),
            Some(STRUCTURED_REPLY) => Err(Violation::Kind("structured")),
            Some(other) => Err(Violation::Magic(other)),
        }
    }

    fn simple<'a, T>(
        &mut self,
        input: &'a [u8],
        requests: &mut InFlight<T>,
    ) -> Result<(usize, Event<'a>), Violation> {
        let (Some(error), Some(cookie)) = (u32_at(input, 4), u64_at(input, 8)) else {
            return Ok((0, Event::More));
        };
        let entry = find(requests, cookie)?;
        self.state = State::End { cookie };
        if error != 0 {
            entry.error.get_or_insert(error);
        } else if entry.asked.read {
            if self.structured {
                return Err(Violation::Kind("simple"));
            }
            entry.received.add(0..entry.asked.len)?;
            self.state = data(cookie, 0, entry.asked.len, 0, true);
        }
        Ok((16, Event::More))
    }

    fn chunk<'a, T>(
        &mut self,
        input: &'a [u8],
        requests: &mut InFlight<T>,
    ) -> Result<(usize, Event<'a>), Violation> {
        let fields = (u16_at(input, 4), u16_at(input, 6), u64_at(input, 8));
        let ((Some(flags), Some(kind), Some(cookie)), Some(len)) = (fields, u32_at(input, 16))
        else {
            return Ok((0, Event::More));
        };
        let entry = find(requests, cookie)?;
        let last = flags & chunk::DONE != 0;
        let wrong = Violation::Length { kind, len };
        match kind {
            // Only valid as the last chunk: without the flag a server could send such chunks
            // forever.
            chunk::NONE if len == 0 && last => {
                self.state = ended(cookie, last);
                Ok((20, Event::More))
            }
            chunk::OFFSET_DATA => {
                let data_len = len.checked_sub(8).filter(|len| *len > 0).ok_or(wrong)?;
                let Some(offset) = u64_at(input, 20) else {
                    return Ok((0, Event::More));
                };
                let at = entry.announce(offset, data_len)?;
                self.state = data(cookie, at, data_len, 0, last);
                Ok((28, Event::More))
            }
            chunk::OFFSET_HOLE => {
                if len != 12 {
                    return Err(wrong);
                }
                let (Some(offset), Some(len)) = (u64_at(input, 20), u32_at(input, 28)) else {
                    return Ok((0, Event::More));
                };
                let at = entry.announce(offset, len)?;
                self.state = ended(cookie, last);
                Ok((32, Event::Hole { cookie, at, len }))
            }
            kind if kind & chunk::ERROR != 0 => {
                if !(6..=LONGEST_ERROR).contains(&len) {
                    return Err(wrong);
                }
                let Some(error) = u32_at(input, 20) else {
                    return Ok((0, Event::More));
                };
                entry.errors += 1;
                if entry.errors > MOST_ERRORS {
                    return Err(Violation::Errors);
                }
                // Zero would be no error.
                entry.error.get_or_insert(error.max(1));
                let left = len - 4;
                self.state = State::Skip { cookie, left, last };
                Ok((24, Event::More))
            }
            chunk::NONE => Err(wrong),
            other => Err(Violation::Chunk(other)),
        }
    }
}

impl<T> Entry<T> {
    /// Checks the range of announced data; returns its offset in the request.
    fn announce(&mut self, offset: u64, len: u32) -> Result<u32, Violation> {
        let at = offset.checked_sub(self.asked.offset);
        let at = at.and_then(|at| u32::try_from(at).ok());
        let end = at.and_then(|at| at.checked_add(len));
        match (at, end) {
            (Some(at), Some(end)) if self.asked.read && len > 0 && end <= self.asked.len => {
                self.received.add(at..end)?;
                Ok(at)
            }
            _ => Err(Violation::Range),
        }
    }
}

/// Finds the request with a cookie whose reply has not ended yet.
fn find<T>(requests: &mut InFlight<T>, cookie: u64) -> Result<&mut Entry<T>, Violation> {
    let entry = requests.get(cookie).filter(|entry| !entry.ended);
    entry.ok_or(Violation::Cookie(cookie))
}

/// Returns the state after `len` of the `left` bytes from `at` on.
fn data(cookie: u64, at: u32, left: u32, len: u32, last: bool) -> State {
    let len = len.min(left);
    match left - len {
        0 => ended(cookie, last),
        left => State::Data {
            expected: Expected {
                cookie,
                at: at.saturating_add(len),
                left,
            },
            last,
        },
    }
}

/// Returns the state after a chunk.
fn ended(cookie: u64, last: bool) -> State {
    match last {
        true => State::End { cookie },
        false => State::Head,
    }
}

#[cfg(test)]
mod tests;
