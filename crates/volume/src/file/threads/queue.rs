//! A worker's queue into a file that has threads of its own.

use super::work::Work;
use super::{Done, FileThreads};
use crate::file::Shared;
use crate::io::Ending;
use crate::{
    Completion, Inbox, Io, IoError, IoErrorKind, Op, QueueState, Request, VolumeError, VolumeQueue,
    Wake,
};
use dma::Buffer;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Limit of requests that the threads work on at one time. Further requests wait here, and hold no
/// copy.
const MOST_STARTED: usize = 64;
/// Longest read or write of a thread, in bytes: this much is copied at one time.
const PIECE: u64 = 256 << 10;
/// Bytes that a round copies, but for the last piece: the worker's other clients wait meanwhile.
const ROUND: u64 = 1 << 20;
/// Between two looks for requests that have had their time.
const LOOK: Duration = Duration::from_millis(100);

/// A request that threads work on.
struct Started {
    /// The number of the work that is under way.
    id: u64,
    request: Request,
    /// Bytes that have been moved.
    done: u64,
    /// When this piece of it was begun.
    since: Instant,
}

/// See the module's documentation.
pub(in crate::file) struct ThreadsQueue {
    shared: Arc<Shared>,
    pub(super) threads: Arc<FileThreads>,
    pub(super) inbox: Arc<Inbox<Done>>,
    waiting: VecDeque<Request>,
    started: Vec<Started>,
    /// Work that threads have finished, and no round has processed yet.
    finished: VecDeque<Done>,
    /// Requests that ended otherwise than by a thread's answer.
    ended: Vec<Completion>,
    /// When it was looked for requests that have had their time.
    looked: Instant,
    ending: Ending,
}

impl ThreadsQueue {
    /// A queue for the worker of `io`.
    pub(in crate::file) fn new(
        shared: Arc<Shared>,
        threads: Arc<FileThreads>,
        io: &Io,
    ) -> Result<Self, VolumeError> {
        let failed = |what| {
            let path = shared.path.clone();
            move |error| VolumeError::System { path, what, error }
        };
        let begun = threads.begin();
        begun.map_err(failed("has no thread for its requests"))?;
        let inbox = Inbox::new(io);
        let inbox = inbox.map_err(failed("has no event descriptor for its completions"))?;
        Ok(Self {
            shared,
            threads,
            inbox,
            waiting: VecDeque::new(),
            started: Vec::new(),
            finished: VecDeque::new(),
            ended: Vec::new(),
            looked: Instant::now(),
            ending: io.ending_watch(),
        })
    }

    /// Gives a request, or its next piece, to the threads. `Some`: it ends here.
    fn start(&mut self, request: Request, done: u64) -> Option<Completion> {
        match work(&request, done) {
            Ok(work) => {
                let id = self.threads.start(work, &self.inbox);
                self.started.push(Started {
                    id,
                    request,
                    done,
                    since: Instant::now(),
                });
                None
            }
            Err(error) => Some(request.complete(Err(error))),
        }
    }

    /// Work was finished: the end of its request, or the next piece.
    fn finish(&mut self, done: Done) -> Option<Completion> {
        let Done { id, work, result } = done;
        // An unknown number: the request was given up just then.
        let at = self.started.iter().position(|started| started.id == id)?;
        let Started { request, done, .. } = self.started.swap_remove(at);
        if let Err(error) = result {
            return Some(request.complete(Err(error)));
        }
        if request.op == Op::Read {
            let data = work.buffer.as_deref().unwrap_or_default();
            if request.data.copy_from(done, data) as u64 != work.len {
                return Some(request.complete(Err(IoErrorKind::Memory.into())));
            }
        }
        let done = done + work.len;
        if done < request.len {
            return self.start(request, done);
        }
        Some(request.complete(Ok(())))
    }

    /// Ends everything, whatever becomes of it.
    fn give_up(&mut self) {
        let started = std::mem::take(&mut self.started);
        let started = started.into_iter().map(|started| {
            self.threads.give_up(started.id);
            started.request
        });
        let all = started.chain(std::mem::take(&mut self.waiting));
        let aborted = all.map(|request| request.complete(Err(IoErrorKind::Aborted.into())));
        self.ended.extend(aborted);
    }

    /// Fails requests that have reached their time-out. The time of a request that waits here
    /// starts when it begins. A request that has ended does not count, however late its end is
    /// seen.
    fn fail_overdue(&mut self) {
        let Some(limit) = self.shared.options.timeout else {
            return;
        };
        let now = Instant::now();
        if now.saturating_duration_since(self.looked) < LOOK.min(limit) {
            return;
        }
        self.looked = now;
        let finished = &self.finished;
        let late = |one: &mut Started| {
            let is_late = now.saturating_duration_since(one.since) >= limit;
            is_late && !finished.iter().any(|done| done.id == one.id)
        };
        for late in self.started.extract_if(.., late) {
            self.threads.give_up(late.id);
            let failed = Err(IoErrorKind::Unreachable.into());
            self.ended.push(late.request.complete(failed));
        }
    }

    /// There is something for a round to do that no thread will wake it for.
    pub(super) fn goes_on(&self) -> bool {
        let startable = !self.waiting.is_empty() && self.started.len() < MOST_STARTED;
        startable || !self.finished.is_empty() || !self.ended.is_empty()
    }

    fn in_flight(&self) -> usize {
        self.waiting.len() + self.started.len() + self.ended.len()
    }

    /// The worker ends, and the file does not answer: its requests are not waited for for ever.
    fn end(&mut self, answered: bool) {
        if self.in_flight() == 0 {
            return;
        }
        if self.ending.is_over(answered) {
            let unfinished = self.in_flight();
            tracing::error!(
                "{}: no answer; cancelling {unfinished} requests",
                self.shared.path.display()
            );
            // On a read-only file no write can be lost.
            if !self.shared.read_only {
                self.ending.give_up(&self.shared.description);
            }
            self.give_up();
        }
    }
}

/// The work of a request from byte `done` on.
fn work(request: &Request, done: u64) -> Result<Work, IoError> {
    let (op, len) = match request.op {
        op if op.has_data() => (op, (request.len - done).min(PIECE)),
        op => (op, request.len),
    };
    let buffer = match op {
        Op::Write { .. } => {
            // At most a piece.
            let mut buffer = Buffer::new(len as usize);
            if request.data.copy_to(done, &mut buffer) as u64 != len {
                return Err(IoErrorKind::Memory.into());
            }
            Some(buffer)
        }
        _ => None,
    };
    Ok(Work {
        op,
        offset: request.offset + done,
        len,
        buffer,
    })
}

impl VolumeQueue for ThreadsQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        if let Some(result) = self.shared.ends_at_once(&request) {
            return Some(request.complete(result));
        }
        if self.started.len() < MOST_STARTED {
            return self.start(request, 0);
        }
        self.waiting.push_back(request);
        None
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        let news = self.inbox.has_news();
        if news {
            self.finished.extend(self.inbox.take());
        }
        if !self.started.is_empty() {
            self.fail_overdue();
        }
        if !news && !self.goes_on() && !self.ending.has_begun() {
            return 0;
        }
        let mut count = 0;
        let mut end = |completion: Completion| {
            count += 1;
            done(completion);
        };
        let mut moved = 0;
        while moved < ROUND
            && let Some(finished) = self.finished.pop_front()
        {
            moved += finished.work.copied();
            if let Some(completion) = self.finish(finished) {
                end(completion);
            }
        }
        while moved < ROUND
            && self.started.len() < MOST_STARTED
            && let Some(request) = self.waiting.pop_front()
        {
            moved += request.len.min(PIECE);
            if let Some(completion) = self.start(request, 0) {
                end(completion);
            }
        }
        if self.ending.has_begun() {
            self.end(news);
        }
        self.ended.drain(..).for_each(end);
        count
    }

    fn state(&self) -> QueueState {
        match self.goes_on() {
            false if self.shared.options.timeout.is_some() && !self.started.is_empty() => {
                QueueState {
                    in_flight: self.in_flight(),
                    wake: Wake::After(LOOK),
                }
            }
            false => QueueState::of_ring(self.in_flight()),
            true => QueueState {
                in_flight: self.in_flight(),
                wake: Wake::Poll,
            },
        }
    }

    /// Ends the request. Its completion is returned in the next round, whether the file answers or
    /// not.
    fn cancel(&mut self, tag: u64) {
        let request = if let Some(at) = self.started.iter().position(|s| s.request.tag == tag) {
            let started = self.started.swap_remove(at);
            self.threads.give_up(started.id);
            started.request
        } else if let Some(at) = self.waiting.iter().position(|request| request.tag == tag)
            && let Some(request) = self.waiting.remove(at)
        {
            request
        } else {
            return;
        };
        let aborted = request.complete(Err(IoErrorKind::Aborted.into()));
        self.ended.push(aborted);
    }
}

impl Drop for ThreadsQueue {
    fn drop(&mut self) {
        self.give_up();
        self.inbox.close();
    }
}
