//! Queue of one worker to an image.

use crate::ffi::ImageOperation;
use crate::volume::SharedVolume;
use dma::{Buffer, SegmentList};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use volume::{
    Completion, DrainWatch, Inbox, Info, Io, IoError, IoErrorKind, Op, QueueState, Request,
    SleepHint, VolumeQueue, Wake,
};

/// Maximum number of parts of requests that the library executes for a queue.
const MAX_REQUESTS: usize = 512;
/// Maximum number of bytes in parts that the library is executing at a time.
const MAX_BYTES: u64 = 64 << 20;
/// Maximum length in bytes of a part of a request that transfers data.
const PIECE: u64 = 1 << 20;
/// Maximum length in bytes of a part without data: a few hundred objects.
const RANGE: u64 = 1 << 30;
/// Number of bytes that a round copies before it ends, apart from the last part.
const ROUND: u64 = 1 << 20;

/// Event that a thread of the library has sent to a worker's queue.
#[derive(Debug)]
pub(crate) enum LibraryEvent {
    /// The connection to the image was established.
    Connected,
    /// A part of a request has completed, with the library's result and the buffer of a read.
    Part(Subrequest, isize, Option<Buffer>),
}

/// Part of a request that the library is executing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Subrequest {
    place: usize,
    generation: u64,
    /// Byte offset of the part in the request's memory.
    at: u64,
    len: u64,
    /// Whether the part changes data of the image.
    changes: bool,
    /// Whether the part transfers data.
    data: bool,
}

/// Request of a worker, with the state of its parts.
struct SplitRequest {
    request: Request,
    generation: u64,
    /// Number of bytes for which parts were submitted to the library.
    given: u64,
    /// Whether all parts of the request were submitted to the library.
    is_given: bool,
    parts: usize,
    result: Result<(), IoError>,
}

pub(crate) struct RbdQueue {
    shared: Arc<SharedVolume>,
    info: Info,
    inbox: Arc<Inbox<LibraryEvent>>,
    parents: Vec<Option<SplitRequest>>,
    free: Vec<usize>,
    count: usize,
    generation: u64,
    /// Indices of requests with parts that were not submitted yet.
    waiting: VecDeque<usize>,
    finished: VecDeque<LibraryEvent>,
    /// Number of parts that the library executes; their bytes are the next field.
    in_flight: usize,
    bytes: u64,
    /// Number of outstanding parts of cancelled requests that change data.
    given_up: usize,
    ended: Vec<Completion>,
    ending: DrainWatch,
    sleep_hint: SleepHint,
    /// Number of outstanding requests other than reads.
    changes: usize,
}

impl RbdQueue {
    pub(crate) fn new(shared: Arc<SharedVolume>, inbox: Arc<Inbox<LibraryEvent>>, io: &Io) -> Self {
        Self {
            info: shared.info(),
            shared,
            inbox,
            parents: Vec::new(),
            free: Vec::new(),
            count: 0,
            generation: 0,
            waiting: VecDeque::new(),
            finished: VecDeque::new(),
            in_flight: 0,
            bytes: 0,
            given_up: 0,
            ended: Vec::new(),
            ending: io.ending_watch(),
            sleep_hint: io.sleep_hint(),
            changes: 0,
        }
    }

    /// Submits parts of requests to the library, as far as the limits allow.
    fn issue(&mut self) {
        while self.can_issue()
            && let Some(&place) = self.waiting.front()
        {
            let more = self.next(place);
            if !more {
                self.waiting.pop_front();
            }
        }
    }

    fn can_issue(&self) -> bool {
        self.given_up == 0
            && self.in_flight < MAX_REQUESTS
            && self.bytes < MAX_BYTES
            && self.shared.image().is_some()
    }

    /// Submits the next part of the request with this index. Returns whether more parts are left.
    fn next(&mut self, place: usize) -> bool {
        let Some(image) = self.shared.image().cloned() else {
            return true;
        };
        let Some(parent) = self.parents.get_mut(place).and_then(Option::as_mut) else {
            return false;
        };
        let Request {
            op, offset, len, ..
        } = parent.request;
        let most = if op.has_data() { PIECE } else { RANGE };
        let now = (len - parent.given).min(most);
        let at = parent.given;
        let subrequest = Subrequest {
            place,
            generation: parent.generation,
            at,
            len: now,
            changes: op.changes() && op != Op::Flush,
            data: op.has_data(),
        };
        parent.given += now;
        parent.is_given = parent.given >= len;
        let is_given = parent.is_given;
        let mut piece = SegmentList::new();
        let work = match op {
            Op::Read => ImageOperation::Read(Buffer::new(now as usize)),
            Op::Write { .. } if self.shared.copies() && now == len => {
                ImageOperation::Write(&parent.request.data)
            }
            Op::Write { .. } if self.shared.copies() => {
                parent.request.data.slice(at, now, &mut piece);
                ImageOperation::Write(&piece)
            }
            Op::Write { .. } => {
                let mut buffer = Buffer::new(now as usize);
                parent.request.data.copy_to(at, &mut buffer);
                ImageOperation::WriteBuffer(buffer)
            }
            Op::Flush => ImageOperation::Flush,
            Op::Deallocate => ImageOperation::Discard(now),
            Op::WriteZeroes { deallocate, .. } => ImageOperation::Zeroes {
                len: now,
                thick: !deallocate,
            },
        };
        let inbox = self.inbox.clone();
        let done = Box::new(move |answer: isize, buffer: Option<Buffer>| {
            inbox.put(LibraryEvent::Part(subrequest, answer, buffer));
        });
        let started = image.start(offset + at, work, done);
        crate::ffi::drop_last(image);
        match started {
            Ok(()) => {
                parent.parts += 1;
                self.shared.started.fetch_add(1, Ordering::Relaxed);
                self.in_flight += 1;
                self.bytes += if op.has_data() { now } else { 0 };
            }
            Err(error) => {
                parent.is_given = true;
                parent.result = Err(IoError::from_errno(
                    error.raw_os_error().unwrap_or(0),
                    op.changes(),
                ));
                self.end_if_over(place);
                return false;
            }
        }
        !is_given
    }

    /// Handles the completion of a request's part by the library.
    fn finish(&mut self, done: LibraryEvent) {
        let LibraryEvent::Part(subrequest, answer, buffer) = done else {
            return;
        };
        self.shared.ended.fetch_add(1, Ordering::Relaxed);
        self.in_flight -= 1;
        self.bytes -= if subrequest.data { subrequest.len } else { 0 };
        let place = subrequest.place;
        let parent = self.parents.get_mut(place).and_then(Option::as_mut);
        let Some(parent) = parent.filter(|parent| parent.generation == subrequest.generation)
        else {
            self.given_up -= usize::from(subrequest.changes);
            return;
        };
        let op = parent.request.op;
        parent.parts -= 1;
        let result = match (answer, buffer) {
            (..0, _) => {
                let errno = i32::try_from(answer.unsigned_abs()).unwrap_or(0);
                Err(IoError::from_errno(errno, op.changes()))
            }
            (_, Some(buffer))
                if op == Op::Read && answer.unsigned_abs() as u64 == subrequest.len =>
            {
                if parent.request.data.copy_from(subrequest.at, &buffer) as u64 == subrequest.len {
                    Ok(())
                } else {
                    Err(IoErrorKind::Memory.into())
                }
            }
            // A read that returns less than requested fails: the image shrank, or the library is
            // wrong.
            _ if op == Op::Read => Err(IoErrorKind::MediaRead.into()),
            _ => Ok(()),
        };
        if let Err(error) = result {
            self.shared.log.line(|left_out| {
                tracing::error!(left_out, "{}: {error}", self.shared.text);
            });
            parent.result = Err(error);
            parent.is_given = true;
        }
        self.end_if_over(place);
    }

    fn end_if_over(&mut self, place: usize) {
        let parent = self.parents.get_mut(place);
        let over = |parent: &SplitRequest| parent.is_given && parent.parts == 0;
        if let Some(slot) = parent.filter(|slot| slot.as_ref().is_some_and(over))
            && let Some(parent) = slot.take()
        {
            self.forget(place, parent.request.op);
            self.ended.push(parent.request.complete(parent.result));
        }
    }

    /// Updates the counters after the request with this index was removed.
    fn forget(&mut self, place: usize, op: Op) {
        self.free.push(place);
        self.count -= 1;
        self.changes -= usize::from(op.changes());
        self.waiting.retain(|waiting| *waiting != place);
        self.hint_sleep();
    }

    /// Sets the hint for sleeping. A single read completes soon, so polling for it saves a wake-up.
    /// Several reads keep the library's threads busy, and changes wait for the cluster's disks.
    fn hint_sleep(&mut self) {
        let polled = self.count == 1 && self.changes == 0;
        self.sleep_hint.set(if polled { 0 } else { self.count });
    }

    /// Completes a cancelled request at once, whether or not the library has ended its parts.
    fn give_up(&mut self, place: usize) {
        let Some(parent) = self.parents.get_mut(place).and_then(Option::take) else {
            return;
        };
        let op = parent.request.op;
        self.forget(place, op);
        if op.changes() && op != Op::Flush {
            self.given_up += parent.parts;
        }
        let aborted = parent.request.complete(Err(IoErrorKind::Aborted.into()));
        self.ended.push(aborted);
    }

    /// Abandons the requests when the worker ends and the cluster does not answer.
    fn end(&mut self, answered: bool) {
        if self.count > 0 && self.ending.is_over(answered) {
            let (text, unfinished) = (&self.shared.text, self.count);
            tracing::error!("{text}: no answer; cancelling {unfinished} requests");
            if !self.info.read_only {
                self.ending.give_up(&self.info.description);
            }
            for place in 0..self.parents.len() {
                self.give_up(place);
            }
        }
    }

    /// Returns whether the next round has work to do even without an event.
    fn goes_on(&self) -> bool {
        !self.ended.is_empty()
            || !self.finished.is_empty()
            || self.inbox.has_news()
            || (!self.waiting.is_empty() && self.can_issue())
    }
}

impl VolumeQueue for RbdQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        if let Err(error) = request.check_info(&self.info) {
            // The image may have grown.
            self.info.size = self.shared.size();
            if error.kind != IoErrorKind::OutOfRange || request.check_info(&self.info).is_err() {
                return Some(request.complete(Err(error)));
            }
        }
        let op = request.op;
        match op {
            Op::Flush if self.info.read_only => return Some(request.complete(Ok(()))),
            op if op != Op::Flush && request.len == 0 => return Some(request.complete(Ok(()))),
            _ => {}
        }
        self.generation += 1;
        let parent = SplitRequest {
            request,
            generation: self.generation,
            given: 0,
            is_given: false,
            parts: 0,
            result: Ok(()),
        };
        let place = self.free.pop().unwrap_or_else(|| {
            self.parents.push(None);
            self.parents.len() - 1
        });
        if let Some(free) = self.parents.get_mut(place) {
            *free = Some(parent);
        }
        self.count += 1;
        self.changes += usize::from(op.changes());
        self.hint_sleep();
        self.waiting.push_back(place);
        self.issue();
        None
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        let news = self.inbox.has_news();
        if !news && !self.goes_on() && !self.ending.has_begun() {
            return 0;
        }
        if news {
            self.finished.extend(self.inbox.take());
            self.info.size = self.shared.size();
        }
        let mut moved = 0;
        while moved < ROUND
            && let Some(finished) = self.finished.pop_front()
        {
            if let LibraryEvent::Part(subrequest, _, Some(_)) = &finished {
                moved += subrequest.len;
            }
            self.finish(finished);
        }
        self.issue();
        if self.ending.has_begun() {
            self.end(news);
        }
        let count = self.ended.len();
        self.ended.drain(..).for_each(done);
        count
    }

    fn state(&self) -> QueueState {
        let in_flight = self.count + self.ended.len();
        if self.goes_on() {
            QueueState {
                in_flight,
                wake: Wake::Poll,
            }
        } else {
            QueueState::of_ring(in_flight)
        }
    }

    /// Cancels a request. The next round returns its completion, whether or not the cluster
    /// answers.
    fn cancel(&mut self, tag: u64) {
        let is =
            |parent: &Option<SplitRequest>| parent.as_ref().is_some_and(|p| p.request.tag == tag);
        if let Some(place) = self.parents.iter().position(is) {
            self.give_up(place);
        }
    }
}

impl Drop for RbdQueue {
    fn drop(&mut self) {
        self.inbox.close();
    }
}
