//! Parser of NBD replies: simple replies, and the chunks of structured ones.
//!
//! The bytes arrive in pieces of any size. [`Replies::next`] consumes some of them and returns
//! their meaning. Everything is checked against the request, so that the caller can act on the
//! events without further checks: data lies within its request, no byte is received twice, and a
//! read ends without an error only after every byte of it was received.

use super::in_flight::{InFlight, InFlightRequest};
use super::wire::{SIMPLE_REPLY, STRUCTURED_REPLY, chunk, u16_at, u32_at, u64_at};

/// Maximum payload of an error chunk in bytes: a text of 4096 bytes and the fields around it.
const MAX_ERROR_LEN: u32 = 4096 + 64;
/// Maximum number of error chunks in one reply.
const MAX_ERRORS: u32 = 64;

/// Violation of the NBD protocol by a server, after which the connection is unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The received magic number is not that of a reply.
    #[error("a reply begins with {0:#010x}")]
    Magic(u32),
    /// A structured reply was not negotiated, or a simple reply with data is not allowed.
    #[error("a {0} reply, which was not negotiated")]
    Kind(&'static str),
    /// No outstanding request has the cookie of the reply.
    #[error("a reply to a request that was never sent, or was answered (cookie {0:#x})")]
    Cookie(u64),
    /// A chunk of the reply has an unexpected type.
    #[error("a chunk of the unknown type {0}")]
    Chunk(u16),
    /// A chunk has a length that is invalid for its type.
    #[error("a chunk of type {kind} has {len} bytes")]
    Length {
        /// Type of the chunk.
        kind: u16,
        /// Length of the chunk in bytes.
        len: u32,
    },
    /// The reply contains data outside the requested range, or for a request without data.
    #[error("data outside the requested range")]
    Range,
    /// The reply contains a byte of the range twice.
    #[error("data that was already received")]
    Twice,
    /// The reply contains data in more separate ranges than any server needs.
    #[error("the data of a read arrives in too many pieces out of order")]
    Scattered,
    /// The reply to a read has ended before all data was received.
    #[error("a read was reported as complete with bytes missing")]
    Incomplete,
    /// The reply has more error chunks than are allowed.
    #[error("too many errors for one request")]
    Errors,
}

/// Event that the received bytes of a connection contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// The bytes complete nothing; more may be needed.
    More,
    /// Data of a read was received.
    Data {
        /// Cookie of the request.
        cookie: u64,
        /// Byte offset of the data within the request.
        at: u32,
        /// Received data.
        bytes: &'a [u8],
    },
    /// A range of a read contains zeroes, which were not transferred.
    Hole {
        /// Cookie of the request.
        cookie: u64,
        /// Byte offset of the range within the request.
        at: u32,
        /// Length of the range in bytes.
        len: u32,
    },
    /// The reply to a request is complete.
    End {
        /// Cookie of the request.
        cookie: u64,
        /// NBD error code of the server; `None` for success.
        error: Option<u32>,
    },
}

/// Data of a read that comes next on the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Cookie of the request that the data belongs to.
    pub cookie: u64,
    /// Byte offset of the data within the request.
    pub at: u32,
    /// Number of data bytes that are still to be received.
    pub left: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The header of a reply or of a chunk comes next.
    Head,
    /// Data of a read comes next.
    Data { expected: Expected, last: bool },
    /// The text of an error comes next, and is skipped.
    Skip { cookie: u64, left: u32, last: bool },
    /// The reply with this cookie was received completely.
    End { cookie: u64 },
}

/// Parser of the replies that a connection receives.
#[derive(Debug)]
pub struct Replies {
    structured: bool,
    state: State,
}

impl Replies {
    /// Creates the parser of a connection with a complete handshake. `structured`: structured
    /// replies were negotiated.
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

    /// Records that `len` bytes of the expected data were received directly into the request's
    /// memory.
    pub fn took(&mut self, len: u32) {
        if let State::Data { expected, last } = self.state {
            self.state = data(expected.cookie, expected.at, expected.left, len, last);
        }
    }

    /// Parses received bytes. Returns the number of bytes consumed, and their meaning. More bytes
    /// are needed if none were consumed and there is no event ([`Event::More`]).
    ///
    /// # Errors
    /// [`Violation`] when the server violates the protocol; the connection is then unusable.
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
                let whole = entry.received.is_whole(entry.info.len);
                if entry.error.is_none() && entry.info.read && !whole {
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
        } else if entry.info.read {
            if self.structured {
                return Err(Violation::Kind("simple"));
            }
            entry.received.add(0..entry.info.len)?;
            self.state = data(cookie, 0, entry.info.len, 0, true);
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
            // Accepted only as the last chunk; without that flag a server could send such chunks
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
                if !(6..=MAX_ERROR_LEN).contains(&len) {
                    return Err(wrong);
                }
                let Some(error) = u32_at(input, 20) else {
                    return Ok((0, Event::More));
                };
                entry.errors += 1;
                if entry.errors > MAX_ERRORS {
                    return Err(Violation::Errors);
                }
                // Zero would mean success.
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

impl<T> InFlightRequest<T> {
    /// Checks the range of data that a chunk announces. Returns its byte offset within the request.
    fn announce(&mut self, offset: u64, len: u32) -> Result<u32, Violation> {
        let at = offset.checked_sub(self.info.offset);
        let at = at.and_then(|at| u32::try_from(at).ok());
        let end = at.and_then(|at| at.checked_add(len));
        match (at, end) {
            (Some(at), Some(end)) if self.info.read && len > 0 && end <= self.info.len => {
                self.received.add(at..end)?;
                Ok(at)
            }
            _ => Err(Violation::Range),
        }
    }
}

/// Returns the outstanding request with this cookie, unless its reply has ended.
fn find<T>(requests: &mut InFlight<T>, cookie: u64) -> Result<&mut InFlightRequest<T>, Violation> {
    let entry = requests.get(cookie).filter(|entry| !entry.ended);
    entry.ok_or(Violation::Cookie(cookie))
}

/// Returns the parser's state after it has received `len` of the `left` data bytes.
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

/// Returns the parser's state after a complete chunk of the reply with this cookie.
fn ended(cookie: u64, last: bool) -> State {
    if last {
        State::End { cookie }
    } else {
        State::Head
    }
}

#[cfg(test)]
mod tests;
