//! Server side of a listener link: the socket pair to the receiver process for one listening
//! socket.

use crate::message::{self, MAX_PACKET_LEN, MAX_READ, Message, TOO_MANY_FDS};
use crate::{ReadError, kind::AcceptedDescriptors};
use rustix::io::Errno;
use rustix::net::SendFlags;
use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit of an answer, in periods. Descriptors are checked within microseconds; a longer check
/// hangs.
const PERIODS: u32 = 4;
const PERIOD: Duration = Duration::from_millis(500);

/// Remaining time limit of an answer. Any time without a check counts as one period only, because
/// the receiver process may have had no processor in that time either.
#[derive(Clone, Copy, Debug)]
struct AnswerLimit {
    since: Instant,
    periods: u32,
}

impl AnswerLimit {
    fn new(now: Instant) -> Self {
        AnswerLimit {
            since: now,
            periods: PERIODS,
        }
    }

    /// Returns the time of the next check.
    fn deadline(&self) -> Instant {
        self.since + PERIOD
    }

    /// Checks a missing answer. Returns whether it is overdue now.
    fn is_over(&mut self, now: Instant) -> bool {
        if now >= self.deadline() {
            self.since = now;
            self.periods = self.periods.saturating_sub(1);
        }
        self.periods == 0
    }
}

/// Bytes and descriptors that the receiver process has read.
#[derive(Debug)]
pub(crate) struct ReceivedData {
    pub bytes: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// Request to the receiver process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asking {
    /// Take at most this many bytes from the socket.
    Receive(u32),
    /// Peek at this many bytes of the socket.
    Look(u32),
}

/// Request to the receiver process of which the answer is missing.
#[derive(Debug)]
enum PendingRead {
    /// Request to be sent as soon as there is a receiver process.
    Unasked(AnswerLimit, Asking),
    /// Request that was sent.
    Asked(AnswerLimit, Asking),
    Come(Result<ReceivedData, ReadError>),
}

impl PendingRead {
    fn deadline(&self) -> Option<Instant> {
        match self {
            PendingRead::Unasked(limit, _) | PendingRead::Asked(limit, _) => Some(limit.deadline()),
            PendingRead::Come(_) => None,
        }
    }
}

/// Current client of the listening socket.
#[derive(Debug)]
struct CurrentClient {
    client: u64,
    socket: Arc<OwnedFd>,
    /// The receiver process has a duplicate of the socket.
    registered: bool,
    awaited: Option<PendingRead>,
}

/// Server side of the link to the receiver process for one listening socket. The thread that serves
/// the socket uses it.
#[derive(Debug)]
pub(crate) struct ListenerLink {
    /// Channel to the receiver process; `None` while there is none.
    channel: Option<Arc<OwnedFd>>,
    wanted: AcceptedDescriptors,
    last_client: u64,
    present: Option<CurrentClient>,
    /// Clients of a protocol without descriptors. The receiver process has duplicates of their
    /// sockets.
    plain: HashSet<u64>,
    /// Disconnected clients for which the receiver process still has to close the socket.
    leaving: HashSet<u64>,
    /// Disconnected clients of which the receiver process was not told yet.
    untold: Vec<u64>,
}

fn at_most(most: usize) -> u32 {
    u32::try_from(most.min(MAX_READ)).unwrap_or(u32::MAX)
}

impl Drop for ListenerLink {
    fn drop(&mut self) {
        // If the clients' sockets are kept, the receiver process does not treat the end of this
        // process as the end of the connections.
        self.send(message::kind::SHUT, 0, 0, None);
    }
}

impl ListenerLink {
    pub(crate) fn new(wanted: AcceptedDescriptors) -> ListenerLink {
        ListenerLink {
            channel: None,
            wanted,
            last_client: 0,
            present: None,
            plain: HashSet::new(),
            leaving: HashSet::new(),
            untold: Vec::new(),
        }
    }

    pub(crate) fn wanted(&self) -> AcceptedDescriptors {
        self.wanted
    }

    pub(crate) fn is_open(&self) -> bool {
        self.channel.is_some()
    }

    pub(crate) fn leaving(&self) -> usize {
        self.leaving.len()
    }

    /// Uses a new receiver process.
    pub(crate) fn open(&mut self, channel: Arc<OwnedFd>) {
        self.channel = Some(channel);
        self.register();
    }

    /// Handles the end of the receiver process, and of everything that it held.
    fn lose(&mut self) {
        self.channel = None;
        self.plain.clear();
        self.leaving.clear();
        self.untold.clear();
        if let Some(present) = &mut self.present {
            present.registered = false;
            // The process may or may not have taken bytes from the socket.
            match present.awaited {
                Some(PendingRead::Asked(_, Asking::Receive(_))) => {
                    present.awaited = Some(PendingRead::Come(Err(ReadError::ReceiverGone)));
                }
                // A peek takes nothing.
                Some(PendingRead::Asked(limit, look)) => {
                    present.awaited = Some(PendingRead::Unasked(limit, look));
                }
                _ => {}
            }
        }
    }

    /// Sends a message without waiting: the receiver process reads messages at once, and few are
    /// outstanding.
    fn send(&mut self, kind: u32, value: u32, client: u64, fd: Option<BorrowedFd<'_>>) -> bool {
        let Some(channel) = self.channel.clone() else {
            return false;
        };
        let message = Message {
            kind,
            value,
            client,
        };
        match message::send(
            channel.as_fd(),
            message,
            &[],
            fd.as_slice(),
            SendFlags::DONTWAIT,
        ) {
            Ok(()) => true,
            Err(Errno::PIPE | Errno::CONNRESET) => {
                self.lose();
                false
            }
            Err(errno) => {
                tracing::debug!(%errno, "message to the process that receives descriptors");
                false
            }
        }
    }

    fn next_client(&mut self) -> u64 {
        self.last_client += 1;
        self.last_client
    }

    /// Registers a new client, which must be the only one. Returns its number.
    pub(crate) fn enter(&mut self, socket: Arc<OwnedFd>) -> u64 {
        let client = self.next_client();
        self.present = Some(CurrentClient {
            client,
            socket,
            registered: false,
            awaited: None,
        });
        self.register();
        client
    }

    /// Gives the receiver process a duplicate of the present client's socket.
    fn register(&mut self) {
        let Some(present) = &self.present else {
            return;
        };
        let (client, socket) = (present.client, present.socket.clone());
        let sent = self.send(message::kind::OPEN, 0, client, Some(socket.as_fd()));
        if let Some(present) = &mut self.present {
            present.registered = sent;
            if let Some(PendingRead::Unasked(limit, asking)) = present.awaited {
                self.ask_with(client, limit, asking);
            }
        }
    }

    fn ask_with(&mut self, client: u64, limit: AnswerLimit, asking: Asking) {
        let registered = self.present.as_ref().is_some_and(|p| p.registered);
        let (kind, most) = match asking {
            Asking::Receive(most) => (message::kind::RECEIVE, most),
            Asking::Look(most) => (message::kind::PEEK, most),
        };
        let asked = registered && self.send(kind, most, client, None);
        if let Some(present) = &mut self.present {
            present.awaited = Some(if asked {
                PendingRead::Asked(limit, asking)
            } else {
                PendingRead::Unasked(limit, asking)
            });
        }
    }

    /// Has the receiver process close the socket of a client that is not served. Returns the socket
    /// if that is impossible.
    pub(crate) fn dismiss(&mut self, socket: OwnedFd) -> Option<OwnedFd> {
        let client = self.next_client();
        if !self.send(message::kind::OPEN, 0, client, Some(socket.as_fd())) {
            return Some(socket);
        }
        drop(socket);
        self.end(client);
        None
    }

    /// Registers a client of a protocol without descriptors; there may be many. `None` if the
    /// receiver process cannot get a duplicate of its socket.
    pub(crate) fn enter_plain(&mut self, socket: BorrowedFd<'_>) -> Option<u64> {
        let client = self.next_client();
        let sent = self.send(message::kind::OPEN, 0, client, Some(socket));
        sent.then(|| {
            self.plain.insert(client);
            client
        })
    }

    /// Removes a client of a protocol without descriptors, as [`ListenerLink::leave`].
    pub(crate) fn leave_plain(&mut self, client: u64) -> bool {
        self.dispatch();
        self.plain.remove(&client)
    }

    /// Reports that the server has closed its end of a registered client's socket.
    pub(crate) fn end(&mut self, client: u64) {
        let sent = self.send(message::kind::END, 0, client, None);
        if self.is_open() {
            self.leaving.insert(client);
            if !sent {
                self.untold.push(client);
            }
        }
    }

    /// Removes the client. Returns `true` if the receiver process has a duplicate of its socket:
    /// [`ListenerLink::end`] must follow after the server's own is closed.
    pub(crate) fn leave(&mut self, client: u64) -> bool {
        // A receiver process that has ended unnoticed holds nothing.
        self.dispatch();
        let present = self.present.take_if(|present| present.client == client);
        present.is_some_and(|present| present.registered)
    }

    /// Requests `most` bytes of the client's socket.
    pub(crate) fn ask(&mut self, client: u64, most: usize) {
        self.ask_with(
            client,
            AnswerLimit::new(Instant::now()),
            Asking::Receive(at_most(most)),
        );
    }

    /// Requests a peek at `most` bytes, which stay in the socket.
    pub(crate) fn ask_look(&mut self, client: u64, most: usize) {
        self.ask_with(
            client,
            AnswerLimit::new(Instant::now()),
            Asking::Look(at_most(most)),
        );
    }

    /// Tells the receiver process that the peeked bytes were read from the socket.
    pub(crate) fn looked(&mut self, client: u64) {
        self.send(message::kind::PEEKED, 0, client, None);
    }

    /// Returns whether the receiver process holds the peeked descriptors, as far as known.
    pub(crate) fn holds(&mut self, client: u64) -> bool {
        self.dispatch();
        let present = self.present.as_ref().filter(|p| p.client == client);
        present.is_some_and(|present| present.registered)
    }

    /// Returns the time at which the answer has to be checked for again; `None` without a request.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let awaited = self.present.as_ref()?.awaited.as_ref()?;
        awaited.deadline()
    }

    /// Takes the answer, if it has arrived.
    pub(crate) fn answer(&mut self, client: u64) -> Result<Option<ReceivedData>, ReadError> {
        let present = self.present.as_mut().filter(|p| p.client == client);
        let Some(present) = present else {
            return Err(ReadError::ReceiverGone);
        };
        let now = Instant::now();
        let (mut limit, asking, asked) = match present.awaited.take() {
            Some(PendingRead::Come(answer)) => return answer.map(Some),
            Some(PendingRead::Asked(limit, asking)) => (limit, asking, true),
            Some(PendingRead::Unasked(limit, asking)) => (limit, asking, false),
            None => return Ok(None),
        };
        let is_over = limit.is_over(now);
        match asked {
            true if is_over => return Err(ReadError::Stuck),
            true => present.awaited = Some(PendingRead::Asked(limit, asking)),
            false if is_over => return Err(ReadError::ReceiverGone),
            false => present.awaited = Some(PendingRead::Unasked(limit, asking)),
        }
        Ok(None)
    }

    /// Handles the messages of the receiver process. Returns `false` when the process has ended.
    pub(crate) fn dispatch(&mut self) -> bool {
        for client in std::mem::take(&mut self.untold) {
            self.end(client);
        }
        while let Some(channel) = self.channel.clone() {
            let incoming = match message::receive::<MAX_PACKET_LEN>(channel.as_fd()) {
                Ok(Some(incoming)) => incoming,
                Err(Errno::AGAIN) => return true,
                Ok(None) | Err(_) => {
                    self.lose();
                    return false;
                }
            };
            let Message {
                kind,
                value,
                client,
            } = incoming.message;
            match kind {
                message::kind::ANSWER => {
                    let answer = match value {
                        TOO_MANY_FDS => Err(ReadError::TooManyFds),
                        0 if incoming.incomplete => Err(ReadError::TooManyFds),
                        0 => Ok(ReceivedData {
                            bytes: incoming.bytes,
                            fds: incoming.fds,
                        }),
                        errno => Err(ReadError::System(Errno::from_raw_os_error(errno as i32))),
                    };
                    // Late answers are dropped. Descriptors in them are harmless.
                    if let Some(present) = &mut self.present
                        && present.client == client
                        && matches!(present.awaited, Some(PendingRead::Asked(..)))
                    {
                        present.awaited = Some(PendingRead::Come(answer));
                    }
                }
                message::kind::CLOSED => {
                    self.leaving.remove(&client);
                    self.plain.remove(&client);
                    if let Some(present) = self.present.as_mut().filter(|p| p.client == client) {
                        present.registered = false;
                    }
                }
                _ => {}
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_times_out_after_four_periods() {
        let began = Instant::now();
        let mut limit = AnswerLimit::new(began);
        for quarter in 1..PERIODS {
            let deadline = began + quarter * PERIOD;
            assert_eq!(limit.deadline(), deadline);
            assert!(!limit.is_over(deadline - Duration::from_millis(1)));
            assert!(!limit.is_over(deadline));
        }
        assert!(limit.is_over(began + PERIODS * PERIOD));
    }

    #[test]
    fn unobserved_time_counts_as_one_period() {
        let began = Instant::now();
        let mut limit = AnswerLimit::new(began);
        let awake = began + Duration::from_secs(3600);
        for quarter in 0..PERIODS - 1 {
            assert!(!limit.is_over(awake + quarter * PERIOD), "{quarter}");
        }
        assert!(limit.is_over(awake + (PERIODS - 1) * PERIOD));
    }
}
