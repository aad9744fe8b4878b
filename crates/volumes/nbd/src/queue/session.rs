//! NBD on one connection: requests, replies, and the results of commands.

use crate::protocol::wire::{EINVAL, ENOMEM, EOVERFLOW, ESHUTDOWN};
use crate::protocol::{self, Command, InFlight, Replies, RequestInfo};
use remote::ConnectionGuard;
use remote::queue::{Event, Expected, Failure, Session, Subrequest};
use std::time::Duration;
use volume::{IoError, IoErrorKind, Op, Outgoing};

/// Maximum number of outstanding commands on a connection.
const DEPTH: u32 = 128;

/// Error code in a reply; `None` for success.
pub(super) type Answer = Option<u32>;

/// Reason of the protocol for the end of a connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NbdFailure {
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the server breaks the protocol: {0}")]
    Violation(protocol::Violation),
}

impl From<protocol::Violation> for NbdFailure {
    fn from(violation: protocol::Violation) -> Self {
        Self::Violation(violation)
    }
}

impl Failure for NbdFailure {
    const PEER: &'static str = "server";

    fn is_blamed(&self) -> bool {
        matches!(self, Self::Violation(_))
    }
}

/// State of the protocol on one connection.
pub(crate) struct NbdSession {
    in_flight: InFlight<Subrequest<Answer>>,
    replies: Replies,
    /// Keeper's guard of the connection.
    _kept: Option<ConnectionGuard>,
}

impl NbdSession {
    pub(super) fn new(structured: bool, kept: Option<ConnectionGuard>) -> Self {
        Self {
            in_flight: InFlight::new(DEPTH),
            replies: Replies::new(structured),
            _kept: kept,
        }
    }
}

fn command(op: Op) -> Command {
    match op {
        Op::Read => Command::Read,
        Op::Write { fua } => Command::Write { fua },
        Op::Flush => Command::Flush,
        Op::Deallocate => Command::Trim,
        Op::WriteZeroes { deallocate, fua } => {
            let hole = deallocate;
            Command::WriteZeroes { fua, hole }
        }
    }
}

impl Session for NbdSession {
    type Answer = Answer;
    type Failure = NbdFailure;
    const CLOSING: Duration = Duration::from_secs(5);
    const REQUESTS_DATA: bool = false;

    fn outstanding(&self) -> usize {
        self.in_flight.len()
    }

    fn is_full(&self) -> bool {
        self.in_flight.is_full()
    }

    fn get(&mut self, name: u64) -> Option<&mut Subrequest<Answer>> {
        self.in_flight.get(name).map(|entry| &mut entry.item)
    }

    fn remove(&mut self, name: u64) -> Option<Subrequest<Answer>> {
        self.in_flight.remove(name).map(|entry| entry.item)
    }

    fn commands(&mut self) -> impl Iterator<Item = &mut Subrequest<Answer>> {
        self.in_flight.iter_mut().map(|(_, entry)| &mut entry.item)
    }

    fn drain(&mut self) -> impl Iterator<Item = Subrequest<Answer>> {
        self.in_flight.drain().map(|entry| entry.item)
    }

    fn stage(
        &mut self,
        subrequest: Subrequest<Answer>,
        message: &mut Outgoing,
    ) -> Result<(), Subrequest<Answer>> {
        let Subrequest {
            op, offset, len, ..
        } = subrequest;
        let read = op == Op::Read;
        let info = RequestInfo { read, offset, len };
        let cookie = self.in_flight.insert(info, subrequest)?;
        message.bytes(&command(op).header(cookie, offset, len));
        if matches!(op, Op::Write { .. })
            && let Some(subrequest) = self.get(cookie)
        {
            subrequest.lent += 1;
            message.data(cookie, std::mem::take(&mut subrequest.list));
        }
        Ok(())
    }

    fn next<'a>(
        &mut self,
        input: &'a [u8],
        _: &mut Outgoing,
    ) -> Result<(usize, Event<'a, Answer>), NbdFailure> {
        let (used, event) = self.replies.next(input, &mut self.in_flight)?;
        let event = match event {
            protocol::Event::More => Event::More,
            protocol::Event::Data { cookie, at, bytes } => {
                let name = cookie;
                Event::Data { name, at, bytes }
            }
            protocol::Event::Hole { cookie, at, len } => {
                let name = cookie;
                Event::Hole { name, at, len }
            }
            // The command was not executed, and is sent again on the next connection.
            protocol::Event::End { error, .. } if error == Some(ESHUTDOWN) => {
                return Err(NbdFailure::ShuttingDown);
            }
            protocol::Event::End { cookie, error } => Event::End {
                name: cookie,
                answer: error,
            },
        };
        Ok((used, event))
    }

    fn expects(&self) -> Option<Expected> {
        let protocol::Expected { cookie, at, left } = self.replies.expects()?;
        let name = cookie;
        Some(Expected { name, at, left })
    }

    fn took(&mut self, len: u32) {
        self.replies.took(len);
    }

    /// Adds NBD_CMD_DISC when the queue drops the connection.
    fn farewell(&self, why: Option<&NbdFailure>, message: &mut Outgoing) {
        if why.is_none() {
            message.bytes(&Command::Disconnect.header(0, 0, 0));
        }
    }
}

/// Returns the result of a command with this NBD error code in its reply.
pub(super) fn result(answer: Answer, subrequest: &Subrequest<Answer>) -> Result<(), IoError> {
    let Some(error) = answer else {
        return Ok(());
    };
    // The protocol's error numbers are those of Linux.
    Err(match i32::try_from(error) {
        // The server rejected the request, or had no memory: the medium is not at fault.
        Ok(EINVAL | EOVERFLOW) => IoErrorKind::Invalid.into(),
        Ok(ENOMEM) => IoErrorKind::Busy.into(),
        Ok(errno @ 1..=4095) if subrequest.op == Op::Flush => IoError::of_sync(errno),
        Ok(errno @ 1..=4095) => match IoError::from_errno(errno, subrequest.op != Op::Read) {
            IoError {
                kind: IoErrorKind::MediaWrite,
                ..
            } if subrequest.op == (Op::Write { fua: true }) => IoError::of_sync(errno),
            error => error,
        },
        _ => subrequest.failed().into(),
    })
}
