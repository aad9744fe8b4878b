//! Parser of a host's PDUs: command capsules and data.
//!
//! The bytes arrive in pieces of any size. [`Requests::next`] consumes some of them and returns
//! their meaning. In-capsule data is at most as long as negotiated. Other data answers a request to
//! transfer (R2T), and must be its next piece.

use crate::frame::{Body, BodyContent, DataRule, Digests, Shape, head};
use crate::grants::Grants;
use crate::initialize::ConnectionLimits;
use crate::pdu::{CAPSULE, CapsuleCmd, DataPdu, MAX_TERMINATE_LEN, SHORT, Terminate, flags, kind};
use crate::violation::{Terminated, Violation};
use nvme::Command;
use zerocopy::FromBytes;

/// Event in the PDUs that a controller receives from a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request<'a> {
    /// The bytes complete nothing; more may be needed.
    More,
    /// A command, with `data` bytes of in-capsule data to follow.
    Command {
        /// Command in the capsule.
        command: Command,
        /// Number of bytes of in-capsule data that follow.
        data: u32,
    },
    /// Data follows that the controller has requested by R2T.
    Transfer {
        /// Transfer tag of the request that the data answers.
        tag: u16,
        /// Byte offset of the data within the command's data.
        at: u32,
        /// Number of data bytes that follow.
        len: u32,
    },
    /// Data of the command or of the requested transfer that was returned last.
    Data(&'a [u8]),
    /// All data that was announced has arrived.
    DataEnd {
        /// Whether the digest does not match, so that the data is invalid.
        corrupt: bool,
        /// Whether the requested transfer is complete.
        whole: bool,
    },
    /// The host has terminated the connection, for this reason.
    Terminated(Terminated),
}

#[derive(Debug)]
enum State {
    /// The header of a PDU comes next.
    Head,
    /// Data comes next. `whole` is whether its end completes the requested transfer.
    Data { body: Body, whole: bool },
    /// The rest of a PDU that terminates the connection comes next, and is skipped.
    Skip(Body),
}

/// Parser state of a connection's stream of PDUs from the host, after initialization.
#[derive(Debug)]
pub struct Requests {
    digests: Digests,
    in_capsule: u32,
    h2c_data: u32,
    state: State,
}

impl Requests {
    /// Creates the parser of a connection with these negotiated parameters. `in_capsule` is the
    /// maximum in-capsule data in bytes.
    pub fn new(limits: &ConnectionLimits, in_capsule: u32) -> Self {
        Self {
            digests: limits.digests(),
            in_capsule,
            h2c_data: limits.h2c_data,
            state: State::Head,
        }
    }

    /// Returns the number of data bytes that follow, if all of them may be received directly into
    /// the request's memory. 0 also if a digest follows: such data is returned by
    /// [`Requests::next`] only.
    pub fn expects(&self) -> u32 {
        match &self.state {
            State::Data { body, .. } if body.is_direct() => body.left,
            _ => 0,
        }
    }

    /// Records that `len` bytes of the expected data were received directly into the request's
    /// memory.
    pub fn took(&mut self, len: u32) {
        if let State::Data { body, .. } = &mut self.state {
            body.took(len);
        }
    }

    /// Parses received bytes. Returns the number of bytes consumed, and their meaning. More bytes
    /// are needed if none were consumed and the result is [`Request::More`].
    ///
    /// # Errors
    /// [`Violation`] when the host violates the protocol; the connection is then unusable.
    pub fn next<'a, T>(
        &mut self,
        input: &'a [u8],
        grants: &mut Grants<T>,
    ) -> Result<(usize, Request<'a>), Violation> {
        match &mut self.state {
            State::Head => self.head(input, grants),
            State::Data { body, whole } => Ok(match body.next(input) {
                BodyContent::Nothing => (0, Request::More),
                BodyContent::Padding(used) => (used, Request::More),
                BodyContent::Data(bytes) => (bytes.len(), Request::Data(bytes)),
                BodyContent::End { used, matches } => {
                    let whole = *whole;
                    self.state = State::Head;
                    let corrupt = !matches;
                    (used, Request::DataEnd { corrupt, whole })
                }
            }),
            State::Skip(body) => Ok(match body.next(input) {
                BodyContent::Padding(used) => (used, Request::More),
                // All bytes after the PDU are discarded.
                _ => (input.len(), Request::More),
            }),
        }
    }

    fn head<'a, T>(
        &mut self,
        input: &'a [u8],
        grants: &mut Grants<T>,
    ) -> Result<(usize, Request<'a>), Violation> {
        let Some(head) = head(input, self.digests, shape)? else {
            return Ok((0, Request::More));
        };
        let used = head.used;
        let request = match head.ch.kind {
            kind::CAPSULE_CMD => {
                let Ok(capsule) = CapsuleCmd::read_from_bytes(head.header) else {
                    return Ok((0, Request::More));
                };
                let data = head.body.left;
                if data > self.in_capsule {
                    return Err(Violation::Limit(data));
                }
                if data > 0 {
                    let (body, whole) = (head.body, false);
                    self.state = State::Data { body, whole };
                }
                let command = capsule.command;
                Request::Command { command, data }
            }
            kind::H2C_DATA => {
                let piece = DataPdu::read_from_bytes(head.header).unwrap_or_default();
                let (at, len) = (piece.offset.get(), piece.len.get());
                if len != head.body.left {
                    return Err(head.field("data length", 16, len));
                }
                if len > self.h2c_data {
                    return Err(Violation::Limit(len));
                }
                let tag = piece.ttag.get();
                let whole = grants.announce(tag, piece.cccid.get(), at, len)?;
                // A host that sets LAST too early would never send the rest.
                if head.has(flags::LAST) && !whole {
                    return Err(Violation::Last);
                }
                let body = head.body;
                self.state = State::Data { body, whole };
                Request::Transfer { tag, at, len }
            }
            _ => {
                let Ok(terminate) = Terminate::read_from_bytes(head.header) else {
                    return Ok((0, Request::More));
                };
                self.state = State::Skip(head.body);
                Request::Terminated(Terminated {
                    fes: terminate.fes.get(),
                    fei: terminate.fei.get(),
                })
            }
        };
        Ok((used, request))
    }
}

fn shape(kind: u8) -> Option<Shape> {
    Some(match kind {
        kind::CAPSULE_CMD => Shape::new(CAPSULE, DataRule::Maybe),
        kind::H2C_DATA => Shape::new(SHORT, DataRule::Always),
        kind::H2C_TERM_REQ => {
            let most = MAX_TERMINATE_LEN - SHORT as u32;
            Shape::new(SHORT, DataRule::Skipped(most)).without_digests()
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
