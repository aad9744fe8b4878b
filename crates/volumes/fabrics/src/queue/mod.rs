//! Queue of one worker to a namespace.
//!
//! A request becomes one command, or several where it exceeds the controller's maximum. A command
//! uses one of the paths with the best ANA state ([`Routes`]). Commands of an ended association are
//! sent again on any available path. Those that change no data are sent at once. The rest wait
//! until the association has certainly ended, because a controller that still executed them later
//! would overwrite newer writes. Requests fail when no path is usable for too long. No function
//! here blocks.

mod link;
mod routes;
mod subrequest;

use crate::connect::NamespaceProperties;
use crate::path::QueueReport;
use crate::shared::{QueueInbox, SharedVolume};
use dma::{Buffer, SegmentList, View};
pub(crate) use link::Ready;
use link::{Broken, ClosedBy, CommandResult};
use nvme::Status;
use nvme::log::AnaState;
use nvme::status::StatusCodeType;
use remote::{Remaining, SplitRequest, SplitRequests};
use routes::Routes;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use subrequest::{Answered, CommandKind, Subrequest};
use volume::{
    Completion, CopyRequest, CopySource, DrainWatch, FastPath, Info, IoError, IoErrorKind, Op,
    QueueState, Request, RingStreams, VolumeQueue, Wake,
};

/// Interval of checks for requests that have timed out.
const TIMEOUT_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Size in bytes of the buffer of zeroes that is written where the controller lacks Write Zeroes.
const ZEROES: usize = 1 << 20;
/// Number of failed connections (protocol violation or inaccessible memory) after which a command
/// that was outstanding on all of them fails.
const MAX_VIOLATIONS: u8 = 5;
/// Maximum number of retries of a command after errors that the controller marks as retryable.
const MAX_RETRIES: u8 = 5;

/// Message from the thread of a path to a worker's queue.
#[derive(Debug)]
pub(crate) enum PathMessage {
    /// A connection for this queue was established.
    Ready {
        path: usize,
        link: usize,
        ready: Ready,
    },
    /// The association has failed, so its connections must be closed.
    Broken { path: usize, epoch: u64 },
    /// The association has certainly ended at this time, and its controller executes no more
    /// commands.
    Ended {
        path: usize,
        epoch: u64,
        at: Instant,
    },
    /// The size or the ANA state of the namespace has changed.
    Look,
}

impl PathMessage {
    /// Returns a copy for another queue; `None` for a message with a connection.
    pub(crate) const fn copy(&self) -> Option<Self> {
        Some(match *self {
            Self::Ready { .. } => return None,
            Self::Broken { path, epoch } => Self::Broken { path, epoch },
            Self::Ended { path, epoch, at } => Self::Ended { path, epoch, at },
            Self::Look => Self::Look,
        })
    }
}

/// Commands of a failed association, which its controller may still execute.
struct LostCommands {
    path: usize,
    epoch: u64,
    /// Time at which the controller certainly executes no more of the commands; `None` until it is
    /// known.
    ends: Option<Instant>,
    parts: Vec<Subrequest>,
}

pub(crate) struct FabricsQueue {
    shared: Arc<SharedVolume>,
    /// Index of this queue among the volume's queues, which determines its queue identifiers.
    place: usize,
    info: Info,
    streams: RingStreams,
    inbox: Arc<QueueInbox>,
    routes: Routes,
    parents: SplitRequests,
    /// Indices of requests with commands that were not sent yet.
    waiting: VecDeque<usize>,
    /// Commands that have to be sent again, before new ones.
    again: VecDeque<Subrequest>,
    lost_commands: Vec<LostCommands>,
    /// New connections that wait for closing ones to leave their slots, with path and number.
    early: Vec<(usize, usize, Ready)>,
    /// Number of outstanding commands of cancelled requests that change data. No command is sent
    /// until they have ended, because after a reset a guest's old write must not overwrite its new
    /// one.
    given_up: usize,
    /// Indices of cancelled requests whose memory the kernel still uses.
    lent: Vec<usize>,
    /// Completions that the next poll passes to the caller.
    ended: Vec<Completion>,
    /// Empty list of ended commands, kept to reuse its memory.
    over: Vec<CommandResult>,
    zeroes: Option<SegmentList>,
    /// Time since which no path has been usable; `None` while one is.
    lost: Option<Instant>,
    /// Time at the beginning of the present round.
    now: Instant,
    ending: DrainWatch,
}

impl FabricsQueue {
    pub(crate) fn new(
        shared: Arc<SharedVolume>,
        streams: RingStreams,
        inbox: Arc<QueueInbox>,
        ending: DrainWatch,
    ) -> Self {
        let now = Instant::now();
        let place = shared.enter(&inbox);
        let each = usize::from(shared.options.queues.max(1));
        Self {
            info: shared.info(),
            routes: Routes::new(shared.paths.len(), each, shared.options.policy),
            place,
            shared,
            streams,
            inbox,
            parents: SplitRequests::default(),
            waiting: VecDeque::new(),
            again: VecDeque::new(),
            lost_commands: Vec::new(),
            early: Vec::new(),
            given_up: 0,
            lent: Vec::new(),
            ended: Vec::new(),
            over: Vec::new(),
            zeroes: None,
            lost: Some(now),
            now,
            ending,
        }
    }

    /// Sends commands of waiting requests, as long as connections have room.
    fn issue(&mut self) {
        if self.given_up > 0 {
            return;
        }
        let shared = &self.shared;
        while let Some(mut subrequest) = self.again.pop_front() {
            let Some(link) = self.routes.choose(&shared.paths) else {
                self.again.push_front(subrequest);
                return;
            };
            subrequest.since = self.now;
            if let Err(subrequest) = link.stage(subrequest, &shared.facts) {
                self.again.push_front(subrequest);
                return;
            }
        }
        while let Some(&place) = self.waiting.front() {
            let Some(link) = self.routes.choose(&shared.paths) else {
                return;
            };
            if link.begins() {
                self.now = Instant::now();
            }
            let now = self.now;
            let zeroes = &mut self.zeroes;
            let made = self.parents.get(place);
            let made = made.and_then(|parent| next(parent, place, &shared.facts, zeroes, now));
            let Some(subrequest) = made else {
                self.waiting.pop_front();
                continue;
            };
            if let Err(subrequest) = link.stage(subrequest, &shared.facts) {
                // Not reached while the link has room.
                self.again.push_back(subrequest);
            }
            let parent = self.parents.get(place);
            if parent.is_none_or(|parent| parent.todo == Remaining::Nothing) {
                self.waiting.pop_front();
            }
        }
    }

    /// Handles the outcome of a command on the path with the index `path`.
    fn over(&mut self, path: usize, epoch: u64, ended: CommandResult) {
        match ended {
            CommandResult::Answered(subrequest, answer) => self.answered(path, subrequest, answer),
            CommandResult::Lost(subrequest) => {
                if subrequest.what.changes() && !subrequest.unsent {
                    self.hold(path, epoch, subrequest)
                } else {
                    self.send_again(subrequest)
                }
            }
        }
    }

    /// Queues a command to be sent again; it was not executed, or may be repeated.
    fn send_again(&mut self, subrequest: Subrequest) {
        if subrequest.given_up {
            self.given_up -= usize::from(subrequest.what.changes());
        } else if self
            .parents
            .get(subrequest.parent)
            .is_none_or(|p| p.cancelled)
        {
            self.finish(subrequest, Err(IoErrorKind::Aborted.into()));
        } else if subrequest.violations >= MAX_VIOLATIONS {
            let failed = subrequest.what.failed();
            self.finish(subrequest, Err(failed.into()));
        } else {
            self.again.push_back(subrequest);
        }
    }

    /// Holds a command that the controller of a failed association may still execute.
    fn hold(&mut self, path: usize, epoch: u64, subrequest: Subrequest) {
        if let Some(lost_commands) = self.limbo_of(path, epoch) {
            lost_commands.parts.push(subrequest);
        }
    }

    /// Returns the held commands of an association, after creating an empty entry if there is none.
    fn limbo_of(&mut self, path: usize, epoch: u64) -> Option<&mut LostCommands> {
        let known = |lost_commands: &LostCommands| {
            lost_commands.path == path && lost_commands.epoch == epoch
        };
        let place = self
            .lost_commands
            .iter()
            .position(known)
            .unwrap_or_else(|| {
                self.lost_commands.push(LostCommands {
                    path,
                    epoch,
                    ends: None,
                    parts: Vec::new(),
                });
                self.lost_commands.len() - 1
            });
        self.lost_commands.get_mut(place)
    }

    /// Sends held commands again after their associations have certainly ended.
    fn release(&mut self) {
        let now = self.now;
        let mut place = 0;
        while let Some(lost_commands) = self.lost_commands.get(place) {
            let (path, epoch) = (lost_commands.path, lost_commands.epoch);
            let is_over = lost_commands.ends.is_some_and(|at| at <= now);
            // Connections that are still closing may add more.
            if !is_over || self.routes.has_epoch(path, epoch) {
                place += 1;
                continue;
            }
            for subrequest in self.lost_commands.swap_remove(place).parts {
                self.send_again(subrequest);
            }
        }
    }

    fn answered(&mut self, path: usize, mut subrequest: Subrequest, answer: Answered) {
        let Answered { status, corrupt } = answer;
        if subrequest.given_up {
            self.given_up -= usize::from(subrequest.what.changes());
            return;
        }
        if status.is_success() && !corrupt {
            let result = if subrequest.unstored {
                Err(IoErrorKind::Memory.into())
            } else {
                Ok(())
            };
            return self.finish(subrequest, result);
        }
        let state = match status.without_flags() {
            Status::ANA_PERSISTENT_LOSS => Some(AnaState::PERSISTENT_LOSS),
            Status::ANA_INACCESSIBLE => Some(AnaState::INACCESSIBLE),
            Status::ANA_TRANSITION => Some(AnaState::CHANGE),
            _ => None,
        };
        let retries = match status.sct() {
            _ if corrupt => true,
            StatusCodeType::GENERIC | StatusCodeType::PATH => !status.dnr(),
            _ => false,
        };
        let waited = self.now.saturating_duration_since(subrequest.made);
        if let Some(state) = state
            && waited < self.shared.options.reconnect_delay
        {
            // Does not count as a retry: the path is not used before its state is read again.
            if let Some(path) = self.shared.paths.get(path) {
                path.report(QueueReport::State(state));
            }
            return self.again.push_back(subrequest);
        }
        subrequest.tries += 1;
        if retries && subrequest.tries < MAX_RETRIES {
            return self.again.push_back(subrequest);
        }
        let error = match (corrupt, state) {
            (true, _) => subrequest.what.failed().into(),
            (false, Some(_)) => IoErrorKind::Unreachable.into(),
            (false, None) => driver::status_error(status, subrequest.what != CommandKind::Read),
        };
        self.finish(subrequest, Err(error));
    }

    /// Handles the end of a command: updates its request, and completes it after the last command.
    fn finish(&mut self, mut subrequest: Subrequest, result: Result<(), IoError>) {
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

    /// Handles received bytes and sent messages of connection `number` on the path.
    fn poll_link(&mut self, path: usize, number: usize) {
        let mut over = std::mem::take(&mut self.over);
        let Some(link) = self.routes.link(path, number) else {
            return;
        };
        let Some((epoch, qid)) = link.identity() else {
            self.over = over;
            return;
        };
        if let Err(why) = link.poll(self.now, self.shared.options.timeout, &mut over) {
            let unanswered = link.len();
            link.close(&why, self.now);
            tracing::debug!(path, qid, unanswered, "I/O queue: {why}");
            let why = why.as_str();
            self.report(path, QueueReport::Broken { epoch, why });
        }
        if let Some(link) = self.routes.link(path, number)
            && let Some(by) = link.closed(self.now, &mut over)
        {
            let by_controller = by == ClosedBy::Controller;
            self.report(
                path,
                QueueReport::Closed {
                    epoch,
                    qid,
                    by_controller,
                },
            );
        }
        for ended in over.drain(..) {
            self.over(path, epoch, ended);
        }
        self.over = over;
    }

    fn report(&self, path: usize, report: QueueReport) {
        if let Some(path) = self.shared.paths.get(path) {
            path.report(report);
        }
    }

    /// Handles the messages that threads of paths have sent to this queue.
    fn read_mail(&mut self) {
        for message in self.inbox.take() {
            match message {
                PathMessage::Ready { path, link, ready } => self.opened(path, link, ready),
                PathMessage::Broken { path, epoch } => {
                    for link in self.routes.links(path) {
                        if link.is_open() && link.identity().is_some_and(|(is, _)| is == epoch) {
                            link.close(&Broken::Association, self.now);
                        }
                    }
                    self.drop_early(path, epoch);
                }
                // Connections may still be closing: their commands arrive later.
                PathMessage::Ended { path, epoch, at } => {
                    if let Some(lost_commands) = self.limbo_of(path, epoch) {
                        lost_commands.ends = Some(at);
                    }
                }
                PathMessage::Look => {}
            }
        }
        self.info.size = self.shared.size();
    }

    fn opened(&mut self, path: usize, number: usize, ready: Ready) {
        let link = self.routes.link(path, number);
        let streams = &self.streams;
        let opened = link.map_or(Ok(()), |link| link.opened(streams, ready));
        if let Err(ready) = opened {
            // The new connection replaces one that is still closing.
            self.early.push((path, number, ready));
        }
    }

    /// Drops connections of an ended association that this queue has not used yet.
    fn drop_early(&mut self, path: usize, epoch: u64) {
        let early = std::mem::take(&mut self.early);
        for (of, number, ready) in early {
            if of == path && ready.epoch == epoch {
                let (qid, by_controller) = (ready.qid, false);
                drop(ready);
                let closed = QueueReport::Closed {
                    epoch,
                    qid,
                    by_controller,
                };
                self.report(path, closed);
            } else {
                self.early.push((of, number, ready));
            }
        }
    }

    /// Abandons the commands of the cancelled request with this index.
    fn give_up(&mut self, place: usize) {
        let Some(parent) = self.parents.get(place) else {
            return;
        };
        parent.cancelled = true;
        parent.todo = Remaining::Nothing;
        parent.result = Err(IoErrorKind::Aborted.into());
        self.waiting.retain(|waiting| *waiting != place);
        let (mut changing, mut still_lent) = (0, false);
        // The memory returns to its owner, and the request has one outstanding command less.
        let mut take = |subrequest: &mut Subrequest| {
            changing += usize::from(subrequest.what.changes());
            let list = subrequest.keep_copy();
            if subrequest.whole {
                parent.request.data = list;
            }
            parent.parts = parent.parts.saturating_sub(1);
        };
        let mut broken = Vec::new();
        for (path, link) in self.routes.all() {
            if !link.give_up(place, &mut take) {
                continue;
            }
            // The kernel sends or receives this memory until the connection ends.
            still_lent = true;
            match link.is_open().then(|| link.identity()).flatten() {
                Some((epoch, _)) => {
                    let why = Broken::GivenUp;
                    link.close(&why, self.now);
                    broken.push((
                        path,
                        QueueReport::Broken {
                            epoch,
                            why: why.as_str(),
                        },
                    ));
                }
                None => link.hurry(),
            }
        }
        // The controller of a lost association may still execute the command.
        for subrequest in self
            .lost_commands
            .iter_mut()
            .flat_map(|lost_commands| &mut lost_commands.parts)
        {
            if subrequest.parent == place && !subrequest.given_up {
                subrequest.given_up = true;
                subrequest.owed = 0;
                take(subrequest);
            }
        }
        self.given_up += changing;
        self.again.retain_mut(|subrequest| {
            if subrequest.parent != place {
                return true;
            }
            if subrequest.whole {
                parent.request.data = std::mem::take(&mut subrequest.list);
            }
            parent.parts = parent.parts.saturating_sub(1);
            false
        });
        if still_lent {
            self.lent.push(place);
        }
        for (path, report) in broken {
            self.report(path, report);
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

    /// Fails the requests that have waited too long for a usable path.
    fn fail_overdue(&mut self) {
        if self.routes.is_usable(&self.shared.paths) {
            self.lost = None;
            return;
        }
        let lost = *self.lost.get_or_insert(self.now);
        let limit = self.shared.options.reconnect_delay;
        if self.now.saturating_duration_since(lost) < limit {
            return;
        }
        self.shared.is_overdue();
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

    /// Abandons all requests if the worker ends and the controllers do not answer in time.
    fn end(&mut self, answered: bool) {
        if !self.parents.is_empty() && self.ending.is_over(answered) {
            let subsystem = &self.shared.subsystem;
            let unfinished = self.parents.len();
            tracing::error!("{subsystem}: no answer; cancelling {unfinished} requests");
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
            && self.routes.has_room(&self.shared.paths);
        issues || !self.ended.is_empty() || self.inbox.has_news() || self.routes.has_news()
    }

    /// Returns whether a time limit is running, of which no event tells the end.
    fn is_timed(&self) -> bool {
        !self.parents.is_empty()
            || !self.ended.is_empty()
            || !self.lost_commands.is_empty()
            || self.routes.is_timed()
    }
}

/// Returns the next command of a request, for a part of at most the maximum length.
fn next(
    parent: &mut SplitRequest,
    place: usize,
    facts: &NamespaceProperties,
    zeroes: &mut Option<SegmentList>,
    now: Instant,
) -> Option<Subrequest> {
    let Remaining::From(done) = parent.todo else {
        return None;
    };
    let (what, most) = match parent.request.op {
        Op::Flush => (CommandKind::Flush, 0),
        Op::Read => (CommandKind::Read, facts.max_data),
        Op::Write { fua } => (CommandKind::Write { fua }, facts.max_data),
        Op::Deallocate => (CommandKind::Deallocate, facts.max_deallocated),
        Op::WriteZeroes { deallocate, fua } if facts.write_zeroes => (
            CommandKind::WriteZeroes { fua, deallocate },
            facts.max_zeroed,
        ),
        Op::WriteZeroes { fua, .. } => (
            CommandKind::Write { fua },
            facts.max_data.min(ZEROES as u32),
        ),
    };
    let mut subrequest = Subrequest::new(place, what, now);
    if what != CommandKind::Flush {
        subrequest.offset = parent.request.offset.checked_add(done)?;
        subrequest.len = parent.piece(done, most);
    }
    if what.has_data() {
        let len = u64::from(subrequest.len);
        if !parent.request.op.has_data() {
            let zeroes = zeroes.get_or_insert_with(|| SegmentList::owned(Buffer::new(ZEROES)));
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

impl VolumeQueue for FabricsQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        if let Err(error) = request.check_info(&self.info) {
            // The namespace may have grown.
            self.info.size = self.shared.size();
            if error.kind != IoErrorKind::OutOfRange || request.check_info(&self.info).is_err() {
                return Some(request.complete(Err(error)));
            }
        }
        let facts = &self.shared.facts;
        let result = match request.op {
            Op::Flush if !facts.volatile_cache => Some(Ok(())),
            Op::Flush => None,
            _ if request.len == 0 => Some(Ok(())),
            Op::Deallocate if !facts.dataset_management => {
                Some(Err(IoErrorKind::Unsupported.into()))
            }
            _ => None,
        };
        if let Some(result) = result {
            return Some(request.complete(result));
        }
        let place = self.parents.insert(SplitRequest::new(request, false));
        self.waiting.push_back(place);
        self.issue();
        None
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        if !self.is_timed() && !self.goes_on() && self.given_up == 0 {
            return 0;
        }
        self.now = Instant::now();
        if self.inbox.has_news() {
            self.read_mail();
        }
        for path in 0..self.shared.paths.len() {
            for number in 0..self.routes.each() {
                self.poll_link(path, number);
            }
        }
        for (path, number, ready) in std::mem::take(&mut self.early) {
            self.opened(path, number, ready);
        }
        if !self.lost_commands.is_empty() {
            self.release();
        }
        if !self.lent.is_empty() {
            self.collect();
        }
        self.fail_overdue();
        self.issue();
        for (_, link) in self.routes.all() {
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
        let wake = match self.goes_on() {
            true => Wake::Poll,
            // The end of a time limit is not signalled.
            false if self.is_timed() => Wake::After(TIMEOUT_CHECK_INTERVAL),
            false => Wake::Event,
        };
        QueueState { in_flight, wake }
    }

    /// Cancels a request. One of the next rounds returns its completion, whether or not the
    /// controller answers.
    fn cancel(&mut self, tag: u64) {
        if let Some(place) = self.parents.find(tag) {
            self.give_up(place);
        }
    }
}

impl FastPath for FabricsQueue {
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        self.submit(Request::transfer(tag, op, offset, data))
    }

    /// Sends all assembled commands of each connection as one message.
    fn push(&mut self) {
        for (_, link) in self.routes.all() {
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

    fn copy_source(&mut self, _: u64, _: u64) -> Option<CopySource> {
        None
    }

    fn copy(&mut self, _: CopyRequest) -> bool {
        false
    }
}

impl Drop for FabricsQueue {
    fn drop(&mut self) {
        self.inbox.close();
        self.shared.leave(self.place);
    }
}
