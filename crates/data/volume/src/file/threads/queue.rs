//! A worker's queue into a file that is accessed by its own threads.

use super::work::ThreadWork;
use super::{FileThreads, FinishedWork};
use crate::file::FileState;
use crate::io::DrainWatch;
use crate::{
    Completion, Inbox, Io, IoError, IoErrorKind, Op, QueueState, Request, VolumeError, VolumeQueue,
    Wake,
};
use dma::Buffer;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Limit for requests that the threads work on at one time. Further requests wait in the queue,
/// without a copy of their data.
const MAX_STARTED: usize = 64;
/// Longest read or write of a thread in bytes, which is also the size of a copy's buffer.
const PIECE: u64 = 256 << 10;
/// Number of bytes after which a round copies no more, so that other front-ends of the worker are
/// served.
const ROUND: u64 = 1 << 20;
/// Interval between two checks for requests that have timed out.
const TIMEOUT_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Request that threads are working on, possibly in several pieces.
struct Started {
    /// ID of the work that threads execute for the request now.
    id: u64,
    request: Request,
    /// Number of bytes of the request that were transferred.
    done: u64,
    /// Start time of the piece of work in progress, for the timeout.
    since: Instant,
}

/// Queue of one worker into a file that may hang; see the module's documentation.
pub(in crate::file) struct ThreadsQueue {
    shared: Arc<FileState>,
    pub(super) threads: Arc<FileThreads>,
    pub(super) inbox: Arc<Inbox<FinishedWork>>,
    waiting: VecDeque<Request>,
    started: Vec<Started>,
    /// Work that threads have finished and that no round has processed.
    finished: VecDeque<FinishedWork>,
    /// Completions of requests that ended otherwise than by a thread's result.
    ended: Vec<Completion>,
    /// Time of the last check for requests that have timed out.
    looked: Instant,
    ending: DrainWatch,
}

impl ThreadsQueue {
    /// Creates a queue for the worker of `io`.
    pub(in crate::file) fn new(
        shared: Arc<FileState>,
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

    /// Passes a request, or its next piece, to the threads. Returns the completion of a request
    /// that ends here.
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

    /// Processes finished work: completes the request, or starts the request's next piece.
    fn finish(&mut self, done: FinishedWork) -> Option<Completion> {
        let FinishedWork { id, work, result } = done;
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

    /// Ends all requests with an error, including those whose system calls still hang.
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

    /// Fails requests that have timed out. For requests waiting in the queue, the time starts when
    /// they are passed to a thread. A request is never failed after its result has arrived.
    fn fail_overdue(&mut self) {
        let Some(limit) = self.shared.options.timeout else {
            return;
        };
        let now = Instant::now();
        if now.saturating_duration_since(self.looked) < TIMEOUT_CHECK_INTERVAL.min(limit) {
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

    /// Returns whether a round has work to do that no thread will wake the worker for.
    pub(super) fn goes_on(&self) -> bool {
        let startable = !self.waiting.is_empty() && self.started.len() < MAX_STARTED;
        startable || !self.finished.is_empty() || !self.ended.is_empty()
    }

    fn in_flight(&self) -> usize {
        self.waiting.len() + self.started.len() + self.ended.len()
    }

    /// Gives up the outstanding requests when the worker ends and the file has not answered in
    /// time.
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

/// Creates the work that continues a request after its first `done` bytes.
fn work(request: &Request, done: u64) -> Result<ThreadWork, IoError> {
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
    Ok(ThreadWork {
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
        if self.started.len() < MAX_STARTED {
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
            && self.started.len() < MAX_STARTED
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
                    wake: Wake::After(TIMEOUT_CHECK_INTERVAL),
                }
            }
            false => QueueState::of_ring(self.in_flight()),
            true => QueueState {
                in_flight: self.in_flight(),
                wake: Wake::Poll,
            },
        }
    }

    /// Ends the request. Its completion is returned in the next round, even while the system call
    /// hangs.
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
