//! Queue of one worker to an export.
//!
//! A request becomes one command, or several where it exceeds the server's maximum. A command is
//! sent on the connection with the fewest outstanding commands. Commands of a broken connection are
//! sent again on its replacement, which a thread makes, or fail when that takes too long. No
//! function here blocks.

mod link;

use crate::connect::{Inbox, connect_again};
use crate::export::SharedExport;
use crate::protocol::Command;
use crate::protocol::wire::export_flags as flags;
use dma::{Buffer, SegmentList, View};
use link::{Broken, CommandResult, Link, Subrequest};
use remote::{Remaining, SplitRequest, SplitRequests};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::{
    Completion, CopyRequest, CopySource, DrainWatch, FastPath, Info, IoError, IoErrorKind, Op,
    QueueState, Request, RingStreams, VolumeQueue, Wake,
};

/// Interval of checks for requests that have timed out.
const TIMEOUT_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Interval between attempts to start a connecting thread after one has failed.
const THREADS: Duration = Duration::from_secs(1);
/// Maximum number of data bytes of one command.
const MAX_DATA_LEN: u32 = 1 << 20;
/// Maximum number of bytes that one command zeroes or trims. A server may implement it by writing,
/// and must answer in time.
const MAX_ZEROED_BYTES: u32 = 64 << 20;
/// Size in bytes of the buffer of zeroes that is written where the server lacks Write Zeroes.
const ZEROES: usize = 1 << 20;

pub(crate) struct NbdQueue {
    shared: Arc<SharedExport>,
    info: Info,
    streams: RingStreams,
    inbox: Arc<Inbox>,
    links: Vec<Link>,
    parents: SplitRequests,
    /// Indices of requests with commands that were not sent yet.
    waiting: VecDeque<usize>,
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
    /// Time at the beginning of the present round.
    now: Instant,
    ending: DrainWatch,
}

impl NbdQueue {
    pub(crate) fn new(
        shared: Arc<SharedExport>,
        streams: RingStreams,
        inbox: Arc<Inbox>,
        ending: DrainWatch,
    ) -> Self {
        let now = Instant::now();
        let mut queue = Self {
            info: shared.info(),
            links: (0..shared.options.connections.max(1))
                .map(|_| Link::new(now))
                .collect(),
            shared,
            streams,
            inbox,
            parents: SplitRequests::default(),
            waiting: VecDeque::new(),
            given_up: 0,
            lent: Vec::new(),
            ended: Vec::new(),
            over: Vec::new(),
            zeroes: None,
            now,
            ending,
        };
        queue.shared.awaits(queue.links.len());
        let first = queue.shared.take_first();
        for number in usize::from(first.is_some())..queue.links.len() {
            queue.connect(number);
        }
        if let Some(connected) = first {
            queue.inbox.put((0, connected));
        }
        queue
    }

    /// Starts a thread that makes the next connection of link `number`.
    fn connect(&mut self, number: usize) {
        let Some(link) = self.links.get_mut(number) else {
            return;
        };
        link.forsaken = match connect_again(&self.shared, &self.inbox, number, link.failures) {
            Ok(()) => None,
            Err(error) => {
                self.shared.no_thread(&error);
                Some(self.now)
            }
        };
    }

    /// Retries to start threads for connections for which that has failed.
    fn connect_forsaken(&mut self) {
        for number in 0..self.links.len() {
            let since = self.links.get(number).and_then(|link| link.forsaken);
            if since.is_some_and(|at| self.now.saturating_duration_since(at) >= THREADS) {
                self.connect(number);
            }
        }
    }

    /// Sends commands of waiting requests, as long as connections have room.
    fn issue(&mut self) {
        if self.given_up > 0 {
            return;
        }
        for link in &mut self.links {
            while link.has_room()
                && let Some(mut subrequest) = link.again.pop_front()
            {
                subrequest.since = self.now;
                if let Err(subrequest) = link.stage(subrequest) {
                    link.again.push_front(subrequest);
                    break;
                }
            }
        }
        while let Some(&place) = self.waiting.front() {
            let links = self.links.iter_mut();
            let open = links.filter(|link| link.has_room() && link.again.is_empty());
            let Some(link) = open.min_by_key(|link| link.len()) else {
                return;
            };
            if link.begins() {
                self.now = Instant::now();
            }
            let made = self.parents.get(place).and_then(|parent| {
                let export = &self.shared.export;
                let zeroes = &mut self.zeroes;
                next(parent, place, export, zeroes, self.now)
            });
            let Some(subrequest) = made else {
                self.waiting.pop_front();
                continue;
            };
            if let Err(mut subrequest) = link.stage(subrequest) {
                // Not reached while the link has room.
                subrequest.given_up = false;
                link.again.push_back(subrequest);
            }
            let parent = self.parents.get(place);
            if parent.is_none_or(|parent| parent.todo == Remaining::Nothing) {
                self.waiting.pop_front();
            }
        }
    }

    /// Handles the end of a command: updates its request, and completes it after the last command.
    fn finish(&mut self, (mut subrequest, result): CommandResult) {
        if subrequest.given_up {
            self.given_up -= usize::from(subrequest.command.changes());
            return;
        }
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

    /// Handles received bytes and sent messages of link `number`.
    fn poll_link(&mut self, number: usize) {
        let mut over = std::mem::take(&mut self.over);
        if let Some(link) = self.links.get_mut(number) {
            if let Err(why) = link.poll(self.now, self.shared.options.timeout, &mut over) {
                self.shared.broken(&why, link.len());
                link.close(&why, self.now);
            }
            if link.closed(self.now, &mut over) {
                self.connect(number);
                self.drop_cancelled(number, &mut over);
            }
        }
        for ended in over.drain(..) {
            self.finish(ended);
        }
        self.over = over;
    }

    /// Ends the commands of cancelled requests that were to be sent again.
    fn drop_cancelled(&mut self, number: usize, over: &mut Vec<CommandResult>) {
        let Some(link) = self.links.get_mut(number) else {
            return;
        };
        for _ in 0..link.again.len() {
            let Some(subrequest) = link.again.pop_front() else {
                return;
            };
            let parent = self.parents.get(subrequest.parent);
            if parent.is_none_or(|parent| parent.cancelled) {
                over.push((subrequest, Err(IoErrorKind::Aborted.into())));
            } else {
                link.again.push_back(subrequest);
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
        parent.then_flush = false;
        parent.result = Err(IoErrorKind::Aborted.into());
        self.waiting.retain(|waiting| *waiting != place);
        let (mut changing, mut still_lent) = (0, false);
        for link in &mut self.links {
            let lent = link.give_up(place, |subrequest| {
                changing += usize::from(subrequest.command.changes());
                let list = std::mem::take(&mut subrequest.list);
                if subrequest.whole {
                    parent.request.data = list;
                }
                parent.parts = parent.parts.saturating_sub(1);
            });
            if lent {
                // The kernel sends or receives this memory until the connection ends.
                if link.is_open() {
                    self.shared.broken(&Broken::GivenUp, link.len());
                    link.close(&Broken::GivenUp, self.now);
                } else {
                    link.hurry();
                }
                still_lent = true;
            }
            link.again.retain_mut(|subrequest| {
                if subrequest.parent != place {
                    return true;
                }
                if subrequest.whole {
                    parent.request.data = std::mem::take(&mut subrequest.list);
                }
                parent.parts = parent.parts.saturating_sub(1);
                false
            });
        }
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
        let (now, limit) = (self.now, self.shared.options.reconnect_delay);
        if !self.links.iter().any(|link| link.is_overdue(now, limit)) {
            return;
        }
        let mut over = std::mem::take(&mut self.over);
        let mut again = VecDeque::new();
        for link in &mut self.links {
            if link.is_overdue(now, limit) {
                again.append(&mut link.again);
            }
        }
        match self.links.iter_mut().find(|link| link.is_open()) {
            Some(link) => link.again.append(&mut again),
            None => {
                let failed = |subrequest| (subrequest, Err(IoErrorKind::Unreachable.into()));
                over.extend(again.drain(..).map(failed));
            }
        }
        for ended in over.drain(..) {
            self.finish(ended);
        }
        self.over = over;
        if self.links.iter().all(|link| link.is_overdue(now, limit)) {
            self.shared.overdue();
            while let Some(place) = self.waiting.pop_front() {
                if let Some(parent) = self.parents.get(place) {
                    parent.fail(IoErrorKind::Unreachable.into());
                    self.end_if_over(place);
                }
            }
        }
    }

    /// Abandons all requests if the worker ends and the server does not answer in time.
    fn end(&mut self, answered: bool) {
        if !self.parents.is_empty() && self.ending.is_over(answered) {
            let server = &self.shared.server;
            let unfinished = self.parents.len();
            tracing::error!("{server}: no answer; cancelling {unfinished} requests");
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
        let issues = |link: &Link| link.has_room() && !link.again.is_empty();
        let room = || {
            self.links
                .iter()
                .any(|l| l.has_room() && l.again.is_empty())
        };
        !self.ended.is_empty()
            || self.inbox.has_news()
            || self.links.iter().any(Link::has_news)
            || (self.given_up == 0
                && ((!self.waiting.is_empty() && room()) || self.links.iter().any(issues)))
    }
}

/// Returns the next command of a request, for a part of at most the maximum length.
fn next(
    parent: &mut SplitRequest,
    place: usize,
    export: &crate::protocol::Export,
    zeroes: &mut Option<SegmentList>,
    now: Instant,
) -> Option<Subrequest> {
    let mut subrequest = Subrequest {
        parent: place,
        command: Command::Flush,
        offset: 0,
        len: 0,
        list: SegmentList::new(),
        whole: false,
        since: now,
        lent: false,
        given_up: false,
        unstored: false,
        violations: 0,
    };
    let done = match parent.todo {
        Remaining::Nothing => return None,
        Remaining::Flush => {
            (parent.todo, parent.parts) = (Remaining::Nothing, parent.parts + 1);
            return Some(subrequest);
        }
        Remaining::From(done) => done,
    };
    let durable = |fua: bool| fua && export.has(flags::SEND_FUA);
    let (command, data) = match parent.request.op {
        Op::Flush => (Command::Flush, false),
        Op::Read => (Command::Read, true),
        Op::Write { fua } => (Command::Write { fua: durable(fua) }, true),
        Op::Deallocate => (Command::Trim, false),
        Op::WriteZeroes { deallocate, fua } => {
            let fua = durable(fua);
            if export.has(flags::SEND_WRITE_ZEROES) {
                let hole = deallocate;
                (Command::WriteZeroes { fua, hole }, false)
            } else {
                (Command::Write { fua }, true)
            }
        }
    };
    subrequest.command = command;
    if command != Command::Flush {
        subrequest.offset = parent.request.offset.checked_add(done)?;
        let most = if data {
            // Both are multiples of the server's block, or the smaller one is.
            export.maximum.min(MAX_DATA_LEN)
        } else {
            MAX_ZEROED_BYTES
        };
        subrequest.len = parent.piece(done, most);
    }
    if data {
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

impl VolumeQueue for NbdQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        if let Err(error) = request.check_info(&self.info) {
            // The export may have grown.
            self.info.size = self.shared.size();
            if error.kind != IoErrorKind::OutOfRange || request.check_info(&self.info).is_err() {
                return Some(request.complete(Err(error)));
            }
        }
        let has = |flag| self.shared.has(flag);
        let result = match request.op {
            Op::Flush if !has(flags::SEND_FLUSH) => Some(Ok(())),
            Op::Flush => None,
            _ if request.len == 0 => Some(Ok(())),
            Op::Deallocate if !has(flags::SEND_TRIM) => Some(Err(IoErrorKind::Unsupported.into())),
            _ => None,
        };
        if let Some(result) = result {
            return Some(request.complete(result));
        }
        let fua = matches!(
            request.op,
            Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. }
        );
        let then_flush = fua && !has(flags::SEND_FUA) && has(flags::SEND_FLUSH);
        let place = self.parents.insert(SplitRequest::new(request, then_flush));
        self.waiting.push_back(place);
        self.issue();
        None
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        let busy = !self.parents.is_empty() || self.given_up > 0;
        let down = || self.links.iter().any(Link::is_down);
        if !busy && !self.goes_on() && !down() {
            return 0;
        }
        self.now = Instant::now();
        if self.inbox.has_news() {
            for (number, connected) in self.inbox.take() {
                if let Some(link) = self.links.get_mut(number) {
                    link.opened(&self.streams, connected);
                    self.shared.connected();
                }
            }
            self.info.size = self.shared.size();
        }
        for number in 0..self.links.len() {
            self.poll_link(number);
        }
        if !self.lent.is_empty() {
            self.collect();
        }
        self.connect_forsaken();
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
        let wake = match self.goes_on() {
            true => Wake::Poll,
            // The end of a time limit is not signalled.
            false if in_flight > 0 || self.links.iter().any(Link::is_timed) => {
                Wake::After(TIMEOUT_CHECK_INTERVAL)
            }
            false => Wake::Event,
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

impl FastPath for NbdQueue {
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

    fn copy_source(&mut self, _: u64, _: u64) -> Option<CopySource> {
        None
    }

    fn copy(&mut self, _: CopyRequest) -> bool {
        false
    }
}

impl Drop for NbdQueue {
    fn drop(&mut self) {
        let down = self.links.iter().filter(|link| link.is_down());
        self.shared.close_queue(down.count());
    }
}
