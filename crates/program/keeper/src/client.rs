//! Requests of one owner of descriptors, a disk, to the keeper.

use crate::link::{Keeping, Link};
use crate::text;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use state_memory::Ticket;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use sync::readiness;

/// Time after which an answer is late. A keeper that is late is slow, and not dead: clients are
/// answered meanwhile, and everything is kept when the keeper runs again.
const LATE_AFTER: Duration = Duration::from_secs(1);
/// Longest wait of a caller that serves no client ([`KeeperClient::settle`]).
const SETTLE_TIMEOUT: Duration = Duration::from_secs(25);
/// Interval of checks in such a wait.
const CHECK_INTERVAL: Duration = Duration::from_micros(200);
/// Until a message is sent again for which there was no room. A service manager's socket takes ten.
const SEND_RETRY_INTERVAL: Duration = Duration::from_millis(1);
/// Time until a message is sent again to a keeper that is late.
const LATE_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Why nothing more is kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeepError {
    /// No answer has come: it does not run, or has refused something.
    #[error("the keeper has not answered within {} s", .0.as_secs())]
    Late(Duration),
    /// The keeper has ended, or accepts no messages.
    #[error("the keeper cannot be reached: {0}")]
    Unreachable(Errno),
    /// The maximum number of kept descriptors is reached.
    #[error(
        "{most} descriptors are kept already, and more may not be (FileDescriptorStoreMax=, \
         ulimit -n)"
    )]
    Full {
        /// Maximum number of descriptors that the keeper keeps.
        most: usize,
    },
    /// This process has no descriptor left for the pipe on which the keeper answers.
    #[error("a pipe: {0}")]
    Pipe(Errno),
}

/// Message to the keeper that waits for room in the socket.
#[derive(Debug)]
struct Message {
    text: String,
    fd: Option<OwnedFd>,
    /// Name of the kept descriptor that this message asks the keeper to close.
    removes: Option<String>,
}

#[derive(Debug)]
struct Barrier {
    ticket: Ticket,
    /// Read end of a pipe. The keeper closes the other end to answer the barrier.
    reader: OwnedFd,
    since: Instant,
}

/// Requests to the keeper for one owner's descriptors. No call waits: the owner calls
/// [`advance`](Self::advance) when [`fd`](Self::fd) is hung up, and at the
/// [`deadline`](Self::deadline).
#[derive(Debug)]
pub struct KeeperClient {
    link: Link,
    waiting: VecDeque<Message>,
    barriers: VecDeque<Barrier>,
    issued: Ticket,
    answered: Ticket,
    /// The next answer was late at the last look.
    late: bool,
    failed: Option<KeepError>,
}

impl KeeperClient {
    /// Creates a client of the keeper that has sent no messages.
    pub fn new(link: &Link) -> Self {
        Self {
            link: link.clone(),
            waiting: VecDeque::new(),
            barriers: VecDeque::new(),
            issued: Ticket::ANSWERED,
            answered: Ticket::ANSWERED,
            late: false,
            failed: None,
        }
    }

    /// Returns the connection to the keeper.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Asks the keeper to keep a descriptor under a unique name. It is certainly kept when a later
    /// barrier is answered.
    ///
    /// # Errors
    /// [`KeepError`]. After the first error every further request fails with it.
    pub fn store(&mut self, name: &str, fd: BorrowedFd<'_>) -> Result<(), KeepError> {
        self.check()?;
        if !self.link.enter(name) {
            let most = self.link.most();
            return Err(self.fail(KeepError::Full { most }));
        }
        self.send(text::store(name), Some(fd), None)
    }

    /// Asks the keeper to close the descriptor of this name. That is certainly done when a later
    /// barrier is answered.
    ///
    /// # Errors
    /// The errors of [`KeeperClient::store`].
    pub fn remove(&mut self, name: &str) -> Result<(), KeepError> {
        self.check()?;
        self.send(text::remove(name), None, Some(name))
    }

    /// Asks whether all has been done that was asked for before.
    ///
    /// # Errors
    /// The errors of [`KeeperClient::store`].
    pub fn barrier(&mut self) -> Result<Ticket, KeepError> {
        self.check()?;
        let pipe = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK);
        let (reader, writer) = pipe.map_err(|errno| self.fail(KeepError::Pipe(errno)))?;
        self.send(text::BARRIER.to_owned(), Some(writer.as_fd()), None)?;
        self.issued = Ticket(self.issued.0 + 1);
        self.barriers.push_back(Barrier {
            ticket: self.issued,
            reader,
            since: Instant::now(),
        });
        Ok(self.issued)
    }

    /// Returns whether the keeper has answered the barrier with this number, and all earlier ones.
    pub fn is_answered(&self, ticket: Ticket) -> bool {
        self.answered >= ticket
    }

    /// Returns whether any barrier has not been answered yet.
    pub fn is_waiting(&self) -> bool {
        self.failed.is_none() && (!self.waiting.is_empty() || !self.barriers.is_empty())
    }

    /// Returns the number of the barrier that is answered next, if any is waiting.
    pub fn next_answer(&self) -> Option<Ticket> {
        self.barriers.front().map(|barrier| barrier.ticket)
    }

    /// Returns the descriptor that is hung up when the next answer has arrived. It changes after
    /// each answer.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.barriers.front().map(|barrier| barrier.reader.as_fd())
    }

    /// Returns the time at which [`KeeperClient::advance`] has to be called at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        let barrier = self.barriers.front().filter(|_| !self.late);
        let late = barrier.map(|barrier| barrier.since + LATE_AFTER);
        let pause = if self.late {
            LATE_RETRY_INTERVAL
        } else {
            SEND_RETRY_INTERVAL
        };
        let retry = (!self.waiting.is_empty()).then(|| Instant::now() + pause);
        late.into_iter().chain(retry).min()
    }

    /// Returns whether the next answer was late at the last [`advance`](Self::advance).
    pub fn is_late(&self) -> bool {
        self.late
    }

    /// Returns whether the keeper reads all requests, even if this process ends now: a keeper
    /// process handles the messages in its socket before it starts the next process. systemd
    /// ignores messages of a process that has ended.
    pub fn is_sent(&self) -> bool {
        self.waiting.is_empty() && matches!(self.link.keeping(), Keeping::Process(_))
    }

    /// Returns the number of messages for which there was no room yet.
    pub fn backlog(&self) -> usize {
        self.waiting.len()
    }

    /// Waits until the barrier of this ticket is answered. Only for times when no client is served.
    ///
    /// # Errors
    /// [`KeepError`]: from now on nothing is kept any more.
    pub fn settle(&mut self, ticket: Ticket) -> Result<(), KeepError> {
        let end = Instant::now() + SETTLE_TIMEOUT;
        while !self.is_answered(ticket) {
            let now = Instant::now();
            self.advance(now)?;
            if now >= end {
                return Err(self.fail(KeepError::Late(SETTLE_TIMEOUT)));
            }
            std::thread::sleep(CHECK_INTERVAL);
        }
        Ok(())
    }

    /// Sends waiting messages, and checks for answers. Returns whether one has arrived.
    ///
    /// # Errors
    /// [`KeepError`]: from now on nothing is kept any more.
    pub fn advance(&mut self, now: Instant) -> Result<bool, KeepError> {
        self.check()?;
        while let Some(message) = self.waiting.front() {
            match self
                .link
                .send(&message.text, message.fd.as_ref().map(AsFd::as_fd))
            {
                Ok(()) => {
                    if let Some(removed) = &message.removes {
                        self.link.leave(removed);
                    }
                    self.waiting.pop_front();
                }
                Err(errno) if is_full(errno) => break,
                Err(errno) => return Err(self.fail(KeepError::Unreachable(errno))),
            }
        }
        let before = self.answered;
        while let Some(barrier) = self.barriers.front()
            && is_hung_up(&barrier.reader)
        {
            self.answered = barrier.ticket;
            self.barriers.pop_front();
        }
        let late = |barrier: &Barrier| now.saturating_duration_since(barrier.since) >= LATE_AFTER;
        self.late = self.barriers.front().is_some_and(late);
        Ok(self.answered != before)
    }

    fn check(&self) -> Result<(), KeepError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn fail(&mut self, error: KeepError) -> KeepError {
        self.waiting.clear();
        self.barriers.clear();
        self.failed.get_or_insert(error).clone()
    }

    fn send(
        &mut self,
        text: String,
        fd: Option<BorrowedFd<'_>>,
        removes: Option<&str>,
    ) -> Result<(), KeepError> {
        if self.waiting.is_empty() {
            match self.link.send(&text, fd) {
                Ok(()) => {
                    removes.into_iter().for_each(|name| self.link.leave(name));
                    return Ok(());
                }
                Err(errno) if is_full(errno) => {}
                Err(errno) => return Err(self.fail(KeepError::Unreachable(errno))),
            }
        }
        let fd = fd.map(|fd| fd.try_clone_to_owned()).transpose();
        let fd = fd.map_err(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::MFILE);
            self.fail(KeepError::Pipe(errno))
        })?;
        let removes = removes.map(str::to_owned);
        self.waiting.push_back(Message { text, fd, removes });
        Ok(())
    }
}

/// There is no room now, but there will be: ETOOMANYREFS where too many descriptors are in flight
/// (unix(7)).
fn is_full(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS | Errno::NOMEM
    )
}

fn is_hung_up(reader: &OwnedFd) -> bool {
    readiness(reader, PollFlags::empty()).contains(PollFlags::HUP)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::{self, Packet};
    use crate::store::{MessageResult, Store};
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};

    fn event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC).unwrap()
    }

    fn pair(kind: SocketType, most: usize) -> (Link, OwnedFd) {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        (Link::new(ours, Keeping::Systemd, most, []), theirs)
    }

    fn next(keeper: &OwnedFd) -> Option<Packet> {
        packet::receive(keeper.as_fd(), RecvFlags::DONTWAIT)
            .ok()
            .flatten()
    }

    #[test]
    fn stores_arrive_in_order_before_barrier_reply() {
        // systemd's socket takes few messages at a time.
        for kind in [SocketType::SEQPACKET, SocketType::DGRAM] {
            let (link, keeper) = pair(kind, 1000);
            let mut client = KeeperClient::new(&link);
            let names: Vec<String> = (0..300).map(|n| format!("d1.{n}")).collect();
            for name in &names {
                client.store(name, event().as_fd()).unwrap();
            }
            client.remove("d1.7").unwrap();
            let ticket = client.barrier().unwrap();
            let mut store = Store::new(1000);
            let mut barriers = 0;
            while barriers == 0 {
                assert!(!client.is_answered(ticket));
                assert!(client.is_waiting());
                client.advance(Instant::now()).unwrap();
                while let Some(packet) = next(&keeper) {
                    barriers += usize::from(packet.text == text::BARRIER.as_bytes());
                    assert_eq!(store.handle(packet), MessageResult::Handled);
                }
            }
            assert!(client.advance(Instant::now()).unwrap());
            assert!(client.is_answered(ticket));
            assert!(!client.is_waiting() && client.fd().is_none() && client.deadline().is_none());
            assert_eq!(store.all().len(), 299);
            assert_eq!((link.kept(), link.names().len()), (299, 299));
        }
    }

    #[test]
    fn late_keeper_is_waited_for() {
        let (link, keeper) = pair(SocketType::SEQPACKET, 10);
        let mut client = KeeperClient::new(&link);
        client.store("a", event().as_fd()).unwrap();
        let ticket = client.barrier().unwrap();
        let now = Instant::now();
        assert_eq!(client.advance(now), Ok(false));
        assert!(!client.is_late());
        let deadline = client.deadline().unwrap();
        assert!(deadline <= now + LATE_AFTER);
        // An hour later nothing has failed, and nobody looks again without a reason.
        for now in [deadline, deadline + Duration::from_secs(3600)] {
            assert_eq!(client.advance(now), Ok(false));
            assert!(client.is_late() && client.is_waiting() && !client.is_answered(ticket));
            assert_eq!(client.deadline(), None);
        }
        assert_eq!(client.store("b", event().as_fd()), Ok(()));
        let mut store = Store::new(10);
        while let Some(packet) = next(&keeper) {
            assert_eq!(store.handle(packet), MessageResult::Handled);
        }
        assert_eq!(client.advance(deadline), Ok(true));
        assert!(client.is_answered(ticket) && !client.is_late() && !client.is_waiting());
        assert_eq!(store.all().len(), 2);
    }

    #[test]
    fn lost_keeper_is_noticed() {
        let (link, keeper) = pair(SocketType::SEQPACKET, 10);
        let mut client = KeeperClient::new(&link);
        drop(keeper);
        let stored = client.store("a", event().as_fd());
        assert!(
            matches!(stored, Err(KeepError::Unreachable(_))),
            "{stored:?}"
        );
    }

    #[test]
    fn full_store_refuses_locally() {
        let (link, keeper) = pair(SocketType::SEQPACKET, 2);
        let (mut one, mut other) = (KeeperClient::new(&link), KeeperClient::new(&link));
        one.store("a", event().as_fd()).unwrap();
        other.store("b", event().as_fd()).unwrap();
        let full = Err(KeepError::Full { most: 2 });
        assert_eq!(one.store("c", event().as_fd()), full);
        // A name that is kept already needs no room.
        assert_eq!(other.store("a", event().as_fd()), Ok(()));
        // The other client continues.
        other.remove("b").unwrap();
        other.store("d", event().as_fd()).unwrap();
        let come = std::iter::from_fn(|| next(&keeper)).count();
        assert_eq!(come, 5);
    }
}
