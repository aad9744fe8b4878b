//! Parser of a controller's PDUs: responses, data, and requests to transfer (R2T).
//!
//! The bytes arrive in pieces of any size. [`Answers::next`] consumes some of them and returns
//! their meaning. Everything is checked against the command that it answers, so that the caller can
//! act on it without further checks. Data lies within its command and arrives in order, and no byte
//! is received twice. No more data is requested than the command has, and no command succeeds
//! before all of its data has been transferred.

use crate::frame::{Body, BodyContent, DataRule, Digests, Head, Shape, head};
use crate::in_flight::{InFlight, InFlightCommand};
use crate::initialize::ConnectionLimits;
use crate::pdu::{CapsuleResp, DataPdu, MAX_TERMINATE_LEN, SHORT, Terminate, flags, kind};
use crate::violation::{Terminated, Violation};
use nvme::Completion;
use zerocopy::FromBytes;

/// Event in the PDUs that a host receives from a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer<'a> {
    /// The bytes complete nothing; more may be needed.
    More,
    /// Data for the host was received.
    Data {
        /// Identifier of the command that the data belongs to.
        cid: u16,
        /// Byte offset of the data within the command's data.
        at: u32,
        /// Received data.
        bytes: &'a [u8],
    },
    /// The controller requests a part of a command's data (R2T).
    Transfer {
        /// Identifier of the command that requests data.
        cid: u16,
        /// Transfer tag (TTAG) that the controller has assigned.
        tag: u16,
        /// Byte offset within the command's data of the requested part.
        at: u32,
        /// Number of bytes that the controller requests.
        len: u32,
    },
    /// A command has completed.
    End {
        /// Identifier of the command that has completed.
        cid: u16,
        /// Completion of the command; a successful one, if the last piece of data implied it.
        completion: Completion,
        /// The digest of some data did not match, so none of the data is valid.
        corrupt: bool,
    },
    /// The controller has terminated the connection, for this reason.
    Terminated(Terminated),
}

/// Data of a command that comes next on the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Identifier of the command that the data belongs to.
    pub cid: u16,
    /// Byte offset of the data within the command's data.
    pub at: u32,
    /// Number of data bytes that are still to be received.
    pub left: u32,
}

#[derive(Debug)]
enum State {
    /// The header of a PDU comes next.
    Head,
    /// Data of a command is next; with `success`, its end completes the command.
    Data {
        cid: u16,
        at: u32,
        success: bool,
        body: Body,
    },
    /// The rest of a PDU that terminates the connection comes next, and is skipped.
    Skip(Body),
    /// The command has completed with its last data, without a response capsule.
    Success { cid: u16 },
}

/// Parser state of a connection's stream of PDUs from the controller, after initialization.
#[derive(Debug)]
pub struct Answers {
    digests: Digests,
    state: State,
}

impl Answers {
    /// Creates the parser of a connection with these negotiated parameters.
    pub fn new(limits: &ConnectionLimits) -> Self {
        Self {
            digests: limits.digests(),
            state: State::Head,
        }
    }

    /// Returns the data that follows, if all of it may be received directly into the command's
    /// memory. `None` also if a digest follows: such data is returned by [`Answers::next`] only.
    pub fn expects(&self) -> Option<Expected> {
        match &self.state {
            State::Data { cid, at, body, .. } if body.is_direct() => Some(Expected {
                cid: *cid,
                at: *at,
                left: body.left,
            }),
            _ => None,
        }
    }

    /// Records that `len` bytes of the expected data were received directly into the command's
    /// memory.
    pub fn took(&mut self, len: u32) {
        if let State::Data { at, body, .. } = &mut self.state {
            let len = len.min(body.left);
            body.took(len);
            *at = at.saturating_add(len);
        }
    }

    /// Parses received bytes. Returns the number of bytes consumed, and their meaning. More bytes
    /// are needed if none were consumed and the result is [`Answer::More`].
    ///
    /// # Errors
    /// [`Violation`] when the controller violates the protocol; the connection is then unusable.
    pub fn next<'a, T>(
        &mut self,
        input: &'a [u8],
        commands: &mut InFlight<T>,
    ) -> Result<(usize, Answer<'a>), Violation> {
        match &mut self.state {
            State::Head => self.head(input, commands),
            State::Data {
                cid,
                at,
                success,
                body,
            } => {
                let cid = *cid;
                Ok(match body.next(input) {
                    BodyContent::Nothing => (0, Answer::More),
                    BodyContent::Padding(used) => (used, Answer::More),
                    BodyContent::Data(bytes) => {
                        let here = *at;
                        *at = at.saturating_add(bytes.len() as u32);
                        let at = here;
                        (bytes.len(), Answer::Data { cid, at, bytes })
                    }
                    BodyContent::End { used, matches } => {
                        let success = *success;
                        if !matches {
                            find(commands, cid)?.corrupt = true;
                        }
                        self.state = if success {
                            State::Success { cid }
                        } else {
                            State::Head
                        };
                        match (used, success) {
                            (0, true) => return self.next(input, commands),
                            (0, false) => return self.head(input, commands),
                            (used, _) => (used, Answer::More),
                        }
                    }
                })
            }
            State::Skip(body) => Ok(match body.next(input) {
                BodyContent::Padding(used) => (used, Answer::More),
                // All bytes after the PDU are discarded.
                _ => (input.len(), Answer::More),
            }),
            State::Success { cid } => {
                let cid = *cid;
                self.state = State::Head;
                let completion = Completion {
                    cid: cid.into(),
                    ..Completion::default()
                };
                Ok((0, end(commands, cid, completion)?))
            }
        }
    }

    fn head<'a, T>(
        &mut self,
        input: &'a [u8],
        commands: &mut InFlight<T>,
    ) -> Result<(usize, Answer<'a>), Violation> {
        let Some(head) = head(input, self.digests, shape)? else {
            return Ok((0, Answer::More));
        };
        let used = head.used;
        let answer = match head.ch.kind {
            kind::CAPSULE_RESP => {
                let Ok(capsule) = CapsuleResp::read_from_bytes(head.header) else {
                    return Ok((0, Answer::More));
                };
                end(commands, capsule.completion.cid.get(), capsule.completion)?
            }
            kind::C2H_DATA => {
                self.state = data(head, commands)?;
                Answer::More
            }
            kind::R2T => transfer(&head, commands)?,
            _ => {
                let Ok(terminate) = Terminate::read_from_bytes(head.header) else {
                    return Ok((0, Answer::More));
                };
                self.state = State::Skip(head.body);
                Answer::Terminated(Terminated {
                    fes: terminate.fes.get(),
                    fei: terminate.fei.get(),
                })
            }
        };
        Ok((used, answer))
    }
}

fn shape(kind: u8) -> Option<Shape> {
    Some(match kind {
        kind::CAPSULE_RESP | kind::R2T => Shape::new(SHORT, DataRule::Never),
        kind::C2H_DATA => Shape::new(SHORT, DataRule::Always),
        kind::C2H_TERM_REQ => {
            let most = MAX_TERMINATE_LEN - SHORT as u32;
            Shape::new(SHORT, DataRule::Skipped(most)).without_digests()
        }
        _ => return None,
    })
}

/// Returns the outstanding command with this identifier.
fn find<T>(commands: &mut InFlight<T>, cid: u16) -> Result<&mut InFlightCommand<T>, Violation> {
    commands.open(cid).ok_or(Violation::Cid(cid))
}

fn piece(head: &Head<'_>) -> DataPdu {
    DataPdu::read_from_bytes(head.header).unwrap_or_default()
}

/// Handles the header of a C2HData PDU, after which data follows.
fn data<T>(head: Head<'_>, commands: &mut InFlight<T>) -> Result<State, Violation> {
    let piece = piece(&head);
    let (cid, offset, len) = (piece.cccid.get(), piece.offset.get(), piece.len.get());
    let entry = find(commands, cid)?;
    if len != head.body.left {
        return Err(head.field("data length", 16, len));
    }
    let expected = entry.received;
    let end = offset
        .checked_add(len)
        .filter(|end| *end <= entry.info.data_in);
    let Some(end) = end.filter(|_| offset == expected) else {
        return Err(Violation::Range {
            offset,
            len,
            expected,
        });
    };
    let success = head.has(flags::SUCCESS);
    // The flag is valid only with the last piece; a failing command gets a response capsule.
    if success && (!head.has(flags::LAST) || (entry.info.whole && end != entry.info.data_in)) {
        return Err(Violation::Last);
    }
    entry.received = end;
    Ok(State::Data {
        cid,
        at: offset,
        success,
        body: head.body,
    })
}

/// Handles a request to transfer (R2T).
fn transfer<T>(head: &Head<'_>, commands: &mut InFlight<T>) -> Result<Answer<'static>, Violation> {
    let piece = piece(head);
    let (cid, offset, len) = (piece.cccid.get(), piece.offset.get(), piece.len.get());
    let entry = find(commands, cid)?;
    let expected = entry.requested;
    let end = offset
        .checked_add(len)
        .filter(|end| *end <= entry.info.data_out);
    let Some(end) = end.filter(|_| offset == expected && len > 0) else {
        return Err(Violation::Range {
            offset,
            len,
            expected,
        });
    };
    entry.requested = end;
    Ok(Answer::Transfer {
        cid,
        tag: piece.ttag.get(),
        at: offset,
        len,
    })
}

/// Handles the completion of a command.
fn end<T>(
    commands: &mut InFlight<T>,
    cid: u16,
    completion: Completion,
) -> Result<Answer<'static>, Violation> {
    let entry = find(commands, cid)?;
    let info = entry.info;
    let missing =
        (info.whole && entry.received != info.data_in) || entry.requested != info.data_out;
    if completion.status().is_success() && missing {
        return Err(Violation::Incomplete);
    }
    entry.ended = true;
    Ok(Answer::End {
        cid,
        completion,
        corrupt: entry.corrupt,
    })
}

#[cfg(test)]
mod tests;
