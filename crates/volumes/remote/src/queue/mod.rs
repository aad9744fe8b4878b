//! Queue of one worker to a volume on a server, for any [`Protocol`].
//!
//! A request becomes one command, or several where it exceeds the server's maximum. A command is
//! sent on one of the connections that the protocol makes. Commands of an ended connection are sent
//! again when the protocol permits it, or fail when the server is lost for too long. No function
//! here blocks.

mod link;
mod protocol;
mod subrequest;

use crate::split_requests::{Remaining, SplitRequest, SplitRequests};
use dma::{Buffer, SegmentList, View};
use link::CommandResult;
pub use link::{Broken, ClosedBy, Link};
pub use protocol::{Command, Event, Expected, Failure, Outcome, Protocol, Session};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use subrequest::Blame;
pub use subrequest::Subrequest;
use volume::{
    Completion, DrainWatch, FastPath, Inbox, Info, IoError, IoErrorKind, Op, QueueState, Request,
    RingStreams, VolumeQueue, Wake,
};

/// Interval of checks for requests that have timed out.
const TIMEOUT_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Size in bytes of the buffer of zeroes that is written where the server cannot write zeroes.
const ZEROES: u32 = 1 << 20;
/// Number of failed connections (protocol violation or inaccessible memory) after which a command
/// that was outstanding on all of them fails.
const MAX_VIOLATIONS: u8 = 5;

/// Maximum lengths of commands, and the time limit for their answers.
#[derive(Debug, Clone, Copy)]
pub struct CommandLimits {
    /// Maximum number of data bytes of one command.
    pub data: u32,
    /// Maximum number of bytes that one command can zero.
    pub zeroed: u32,
    /// Maximum number of bytes that one command can deallocate.
    pub deallocated: u32,
    /// Whether the server supports Force Unit Access. Otherwise a flush follows a durable write.
    pub fua: bool,
    /// A command that is not answered for so long ends its connection.
    pub timeout: Duration,
}

/// Queue of one worker to a volume on a server. The fields are dropped in order: the protocol
/// records the end of the queue before the connections end.
pub struct RemoteQueue<P: Protocol> {
    protocol: P,
    info: Info,
    limits: CommandLimits,
    streams: RingStreams,
    inbox: Arc<Inbox<P::Message>>,
    links: Vec<Link<P::Session>>,
    parents: SplitRequests,
    /// Indices of requests with commands that were not sent yet.
    waiting: VecDeque<usize>,
    /// Commands that have to be sent again, before new ones.
    again: VecDeque<Command<P>>,
    /// Number of outstanding commands of cancelled requests that change data. No command is sent
    /// until they have ended, because after a reset a guest's old write must not overwrite its new
    /// one.
    given_up: usize,
    /// Indices of cancelled requests whose memory the kernel still uses.
    lent: Vec<usize>,
    /// Completions that the next poll passes to the caller.
    ended: Vec<Completion>,
    /// Empty list of ended commands, kept to reuse its memory.
    over: Vec<CommandResult<<P::Session as Session>::Answer>>,
    zeroes: Option<SegmentList>,
    /// Time at the beginning of the present round.
    now: Instant,
    ending: DrainWatch,
}

impl<P: Protocol> RemoteQueue<P> {
    /// Creates a queue with `links` connections, all of which are down. New ones arrive as messages
    /// in `inbox`.
    pub fn new(
        protocol: P,
        links: usize,
        info: Info,
        limits: CommandLimits,
        streams: RingStreams,
        inbox: Arc<Inbox<P::Message>>,
        ending: DrainWatch,
    ) -> Self {
        Self {
            protocol,
            info,
            limits,
            streams,
            inbox,
            links: (0..links).map(|_| Link::new()).collect(),
            parents: SplitRequests::default(),
            waiting: VecDeque::new(),
            again: VecDeque::new(),
            given_up: 0,
            lent: Vec::new(),
            ended: Vec::new(),
            over: Vec::new(),
            zeroes: None,
            now: Instant::now(),
            ending,
        }
    }

    /// Sends commands of waiting requests, as long as connections have room.
    fn issue(&mut self) {
        if self.given_up > 0 {
            return;
        }
        while !self.again.is_empty() {
            let number = self.protocol.choose(&self.links);
            let Some(link) = number.and_then(|number| self.links.get_mut(number)) else {
                return;
            };
            let Some(mut subrequest) = self.again.pop_front() else {
                break;
            };
            subrequest.since = self.now;
            if let Err(subrequest) = link.stage(subrequest) {
                return self.again.push_front(subrequest);
            }
        }
        while let Some(&place) = self.waiting.front() {
            let number = self.protocol.choose(&self.links);
            let Some(link) = number.and_then(|number| self.links.get_mut(number)) else {
                return;
            };
            if link.begins() {
                self.now = Instant::now();
            }
            let Some(subrequest) = self.next(place) else {
                self.waiting.pop_front();
                continue;
            };
            if let Some(link) = number.and_then(|number| self.links.get_mut(number))
                && let Err(subrequest) = link.stage(subrequest)
            {
                // Not reached while the link has room.
                self.again.push_back(subrequest);
            }
            let parent = self.parents.get(place);
            if parent.is_none_or(|parent| parent.todo == Remaining::Nothing) {
                self.waiting.pop_front();
            }
        }
    }

    /// Returns the next command of a request, for a part of at most the maximum length.
    fn next(&mut self, place: usize) -> Option<Command<P>> {
        let parent = self.parents.get(place)?;
        let limits = self.limits;
        let done = match parent.todo {
            Remaining::Nothing => return None,
            Remaining::Flush => {
                (parent.todo, parent.parts) = (Remaining::Nothing, parent.parts + 1);
                return Some(Subrequest::new(place, Op::Flush, self.now));
            }
            Remaining::From(done) => done,
        };
        let (op, most) = match parent.request.op {
            Op::Flush => (Op::Flush, 0),
            Op::Read => (Op::Read, limits.data),
            Op::Write { fua } => {
                let fua = fua && limits.fua;
                (Op::Write { fua }, limits.data)
            }
            Op::Deallocate => (Op::Deallocate, limits.deallocated),
            Op::WriteZeroes { deallocate, fua } => {
                let fua = fua && limits.fua;
                if self.info.write_zeroes {
                    (Op::WriteZeroes { deallocate, fua }, limits.zeroed)
                } else {
                    (Op::Write { fua }, limits.data.min(ZEROES))
                }
            }
        };
        let mut subrequest = Subrequest::new(place, op, self.now);
        if op != Op::Flush {
            subrequest.offset = parent.request.offset.checked_add(done)?;
            subrequest.len = parent.piece(done, most);
        }
        if op.has_data() {
            let len = u64::from(subrequest.len);
            if !parent.request.op.has_data() {
                let zeroes = || SegmentList::owned(Buffer::new(ZEROES as usize));
                let zeroes = self.zeroes.get_or_insert_with(zeroes);
                zeroes.slice(0, len, &mut subrequest.list);
            } else if len == parent.request.len {
                subrequest.whole = true;
                subrequest.list = std::mem::take(&mut parent.request.data);
            } else {
                parent.request.data.slice(done, len, &mut subrequest.list);
            }
        }
        parent.issued(done, subrequest.len);
        Some(subrequest)
    }

    /// Handles received bytes and sent messages of link `number`.
    fn poll_link(&mut self, number: usize) {
        let mut over = std::mem::take(&mut self.over);
        let mut by = None;
        if let Some(link) = self.links.get_mut(number) {
            let polled = link.poll(self.now, self.limits.timeout, &mut over);
            if !over.is_empty() {
                self.protocol.note_answers(number);
            }
            if let Err(why) = polled {
                self.protocol.broken(number, link, &why, self.now);
                link.close(&why, self.now);
            }
            by = link.closed(self.now, &mut over);
        }
        for ended in over.drain(..) {
            match ended {
                CommandResult::Answered(subrequest, answer) => {
                    self.answered(number, subrequest, answer);
                }
                CommandResult::Lost(subrequest) => self.lost(number, subrequest),
            }
        }
        self.over = over;
        if let Some(by) = by
            && let Some(link) = self.links.get_mut(number)
        {
            if let Some(session) = link.session() {
                self.protocol.closed(number, session, by, self.now);
            }
            link.reset();
        }
    }

    fn answered(
        &mut self,
        number: usize,
        mut subrequest: Command<P>,
        answer: <P::Session as Session>::Answer,
    ) {
        if subrequest.given_up {
            self.given_up -= usize::from(subrequest.changes());
            return;
        }
        let outcome = self
            .protocol
            .outcome(number, &mut subrequest, answer, self.now);
        match outcome {
            Outcome::Again => self.again.push_back(subrequest),
            Outcome::Ended(Ok(())) if subrequest.unstored => {
                self.finish(subrequest, Err(IoErrorKind::Memory.into()));
            }
            Outcome::Ended(result) => self.finish(subrequest, result),
        }
    }

    /// Handles a command whose connection was closed before the answer.
    fn lost(&mut self, number: usize, subrequest: Command<P>) {
        let Some(session) = self.links.get(number).and_then(Link::session) else {
            return;
        };
        if let Some(subrequest) = self.protocol.lost(number, session, subrequest) {
            self.send_again(subrequest);
        }
    }

    /// Queues a command to be sent again; it was not executed, or may be repeated.
    fn send_again(&mut self, subrequest: Command<P>) {
        if subrequest.given_up {
            self.given_up -= usize::from(subrequest.changes());
            return;
        }
        let parent = self.parents.get(subrequest.parent);
        if parent.is_none_or(|parent| parent.cancelled) {
            self.finish(subrequest, Err(IoErrorKind::Aborted.into()));
        } else if subrequest.violations >= MAX_VIOLATIONS {
            let kind = match subrequest.blame {
                Blame::Memory => IoErrorKind::Memory,
                Blame::Server => subrequest.failed(),
            };
            self.finish(subrequest, Err(kind.into()));
        } else {
            self.again.push_back(subrequest);
        }
    }

    /// Handles the end of a command: updates its request, and completes it after the last command.
    fn finish(&mut self, mut subrequest: Command<P>, result: Result<(), IoError>) {
        let place = subrequest.parent;
        let Some(parent) = self.parents.get(place) else {
            return;
        };
        if subrequest.whole {
            parent.request.data = std::mem::take(&mut subrequest.list);
        }
        let result = if parent.cancelled {
            Err(IoErrorKind::Aborted.into())
        } else {
            result
        };
        parent.answered(result);
        if parent.is_over() && parent.result.is_ok() && std::mem::take(&mut parent.then_flush) {
            parent.todo = Remaining::Flush;
            self.waiting.push_back(place);
            return;
        }
        self.end_if_over(place);
    }

    fn end_if_over(&mut self, place: usize) {
        let is_over = self.parents.get(place).is_some_and(|p| p.is_over());
        if is_over && let Some(parent) = self.parents.remove(place) {
            // The request fails, so its remaining commands are not sent.
            self.waiting.retain(|waiting| *waiting != place);
            self.ended.push(parent.request.complete(parent.result));
        }
    }

    /// Abandons the commands of the cancelled request with this index.
    fn give_up(&mut self, place: usize) {
        let Some(parent) = self.parents.get(place) else {
            return;
        };
        parent.cancelled = true;
        parent.fail(IoErrorKind::Aborted.into());
        parent.result = Err(IoErrorKind::Aborted.into());
        self.waiting.retain(|waiting| *waiting != place);
        let (mut changing, mut still_lent) = (0, false);
        // The memory returns to its owner, and the request has one outstanding command less.
        let mut take = |subrequest: &mut Command<P>| {
            let list = subrequest.keep_copy();
            if subrequest.whole {
                parent.request.data = list;
            }
            parent.parts = parent.parts.saturating_sub(1);
        };
        for (number, link) in self.links.iter_mut().enumerate() {
            let lent = link.give_up(place, |subrequest| {
                changing += usize::from(subrequest.changes());
                take(subrequest);
            });
            if !lent {
                continue;
            }
            // The kernel sends or receives this memory until the connection ends.
            still_lent = true;
            if link.is_open() {
                self.protocol
                    .broken(number, link, &Broken::GivenUp, self.now);
                link.close(&Broken::GivenUp, self.now);
            } else {
                link.hurry();
            }
        }
        // The server of a lost connection may still execute the command.
        for subrequest in self.protocol.held() {
            if subrequest.parent == place && !subrequest.given_up {
                changing += usize::from(subrequest.changes());
                subrequest.given_up = true;
                subrequest.owed = 0;
                take(subrequest);
            }
        }
        self.again.retain_mut(|subrequest| {
            if subrequest.parent == place {
                subrequest.owed = 0;
                take(subrequest);
            }
            subrequest.parent != place
        });
        self.given_up += changing;
        if still_lent {
            self.lent.push(place);
        }
        self.end_if_over(place);
    }

    /// Completes the cancelled requests for which the kernel has returned the memory.
    fn collect(&mut self) {
        for place in std::mem::take(&mut self.lent) {
            // Another request may use this index by now.
            if self.parents.get(place).is_some_and(|p| p.cancelled) {
                self.give_up(place);
            }
        }
    }

    /// Fails the requests that have waited too long for the server.
    fn fail_overdue(&mut self) {
        let resends = !self.again.is_empty();
        if !self.protocol.is_overdue(&self.links, resends, self.now) {
            return;
        }
        while let Some(subrequest) = self.again.pop_front() {
            self.finish(subrequest, Err(IoErrorKind::Unreachable.into()));
        }
        while let Some(place) = self.waiting.pop_front() {
            if let Some(parent) = self.parents.get(place) {
                parent.fail(IoErrorKind::Unreachable.into());
                self.end_if_over(place);
            }
        }
    }

    /// Abandons all requests if the worker ends and the server does not answer in time.
    fn end(&mut self, answered: bool) {
        if !self.parents.is_empty() && self.ending.is_over(answered) {
            self.protocol.log_cancelled(self.parents.len());
            if !self.info.read_only {
                self.ending.give_up(&self.info.description);
            }
            for tag in self.parents.tags() {
                self.cancel(tag);
            }
        }
    }

    /// Returns whether the next round has work to do even without an event.
    fn goes_on(&self) -> bool {
        let issues = self.given_up == 0
            && !(self.waiting.is_empty() && self.again.is_empty())
            && self.protocol.has_room(&self.links);
        issues
            || !self.ended.is_empty()
            || self.inbox.has_news()
            || self.links.iter().any(Link::has_news)
    }

    /// Returns whether a time limit is running, of which no event tells the end.
    fn is_timed(&self) -> bool {
        !self.parents.is_empty()
            || !self.ended.is_empty()
            || self.given_up > 0
            || self.links.iter().any(Link::is_timed)
            || self.protocol.is_timed()
    }
}

impl<P: Protocol> VolumeQueue for RemoteQueue<P> {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        if let Err(error) = request.check_info(&self.info) {
            // The volume may have grown.
            self.info.size = self.protocol.size();
            if error.kind != IoErrorKind::OutOfRange || request.check_info(&self.info).is_err() {
                return Some(request.complete(Err(error)));
            }
        }
        let result = match request.op {
            Op::Flush if !self.info.volatile_cache => Some(Ok(())),
            Op::Flush => None,
            _ if request.len == 0 => Some(Ok(())),
            Op::Deallocate if !self.info.deallocate => Some(Err(IoErrorKind::Unsupported.into())),
            _ => None,
        };
        if let Some(result) = result {
            return Some(request.complete(result));
        }
        let fua = matches!(
            request.op,
            Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. }
        );
        let then_flush = fua && !self.limits.fua && self.info.volatile_cache;
        let place = self.parents.insert(SplitRequest::new(request, then_flush));
        self.waiting.push_back(place);
        self.issue();
        None
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        if !self.is_timed() && !self.goes_on() {
            return 0;
        }
        self.now = Instant::now();
        let (links, streams, now) = (&mut self.links, &self.streams, self.now);
        if self.inbox.has_news() {
            for message in self.inbox.take() {
                self.protocol.receive(message, links, streams, now);
            }
            self.info.size = self.protocol.size();
        }
        for number in 0..self.links.len() {
            self.poll_link(number);
        }
        let (links, streams) = (&mut self.links, &self.streams);
        self.protocol.make_connections(links, streams, now);
        for subrequest in self.protocol.released(&self.links, now) {
            self.send_again(subrequest);
        }
        if !self.lent.is_empty() {
            self.collect();
        }
        self.fail_overdue();
        self.issue();
        for link in &mut self.links {
            link.send();
        }
        if self.ending.has_begun() {
            self.end(!self.ended.is_empty());
        }
        let count = self.ended.len();
        self.ended.drain(..).for_each(done);
        count
    }

    fn state(&self) -> QueueState {
        let in_flight = self.parents.len() + self.ended.len();
        let wake = if self.goes_on() {
            Wake::Poll
        } else if self.is_timed() {
            // The end of a time limit is not signalled.
            Wake::After(TIMEOUT_CHECK_INTERVAL)
        } else {
            Wake::Event
        };
        QueueState { in_flight, wake }
    }

    /// Cancels a request. One of the next rounds returns its completion, whether or not the server
    /// answers.
    fn cancel(&mut self, tag: u64) {
        if let Some(place) = self.parents.find(tag) {
            self.give_up(place);
        }
    }
}

impl<P: Protocol> FastPath for RemoteQueue<P> {
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        self.submit(Request::transfer(tag, op, offset, data))
    }

    /// Sends all assembled commands of each connection as one message.
    fn push(&mut self) {
        for link in &mut self.links {
            if link.send() {
                link.push();
            }
        }
    }

    fn is_immediate(&self) -> bool {
        false
    }

    fn try_now(&mut self, _: Op, _: u64, _: View<'_>) -> Option<Result<(), IoError>> {
        None
    }

    fn prefetches(&self) -> bool {
        false
    }

    fn prefetch(&mut self, _: Op, _: u64, _: u64) {}
}

impl<P: Protocol> Drop for RemoteQueue<P> {
    fn drop(&mut self) {
        self.inbox.close();
    }
}
