//! Requests that failed and wait to be repeated: a queue that is put in front of a volume's own
//! queue at its first failure.

use super::{Completion, Effect, MAX_SLEEP, OnErrorState, RETRY_FOR, Request};
use crate::traits::{NoFastPath, NoQueue};
use crate::{FastPath, IoError, IoErrorKind, Op, QueueState, RangeCopy, VolumeQueue, Wake};
use dma::{SegmentList, View};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Pause before a request is repeated for the first time. Each further pause is twice as long as
/// the one before, up to a maximum.
const MIN_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of remembered tags of requests that have failed finally.
const MAX_ENDED_TAGS: usize = 4096;

/// Failed request that waits to be repeated.
struct HeldRequest {
    request: Request,
    /// Error of the last failure; `None` when the request arrived while the volume was stopped.
    error: Option<IoError>,
    /// Time at which the request failed first.
    since: Instant,
    /// Time at which the request is repeated, if the policy does so.
    again_at: Instant,
    /// Number of times that the request has failed.
    failures: u32,
}

/// Failed request that was submitted again, under the tag used for the repetition.
struct Repeated {
    tag: u64,
    since: Instant,
    at: Instant,
    failures: u32,
}

#[derive(Default)]
struct Lists {
    waiting: VecDeque<HeldRequest>,
    repeated: Vec<Repeated>,
    /// Tags of requests with a final failure. The front-end offers such a request to the policy
    /// once more, and then reports the error.
    over: Vec<u64>,
}

/// Error policy that applies to the requests of one queue.
pub(crate) struct QueuePolicy {
    shared: Arc<OnErrorState>,
    /// Whether the worker is ending, so that no request waits any more.
    ending: Rc<Cell<bool>>,
    /// Failed requests of the queue; `None` until the first failure.
    lists: Option<Rc<RefCell<Lists>>>,
}

impl QueuePolicy {
    pub(crate) fn new(shared: Arc<OnErrorState>, ending: Rc<Cell<bool>>) -> Self {
        Self {
            shared,
            ending,
            lists: None,
        }
    }

    /// Counts a failure for which there is no request, unless the policy handles it. Returns
    /// whether it does, so that a request is to be submitted.
    pub(crate) fn takes_or_counts(&self, op: Op, error: IoError) -> bool {
        let takes = self.takes(op, error);
        if !takes {
            self.shared.count(op, error);
            self.shared.reported(op, error);
        }
        takes
    }

    /// Returns whether the policy handles a failure with this error, instead of reporting it to the
    /// guest.
    fn takes(&self, op: Op, error: IoError) -> bool {
        !self.ending.get() && self.shared.effect(op, error) != Effect::Report
    }

    /// Decides about a failed request. Returns its completion when the failure is to be reported.
    /// Otherwise keeps the request for repetition; the first one puts a queue in front.
    pub(crate) fn failed(
        &mut self,
        queue: &mut Box<dyn FastPath>,
        request: Request,
        error: IoError,
    ) -> Option<Completion> {
        if let Some(lists) = &self.lists
            && lists.borrow_mut().is_over(request.tag)
        {
            return Some(request.complete(Err(error)));
        }
        self.shared.count(request.op, error);
        if !self.takes(request.op, error) {
            self.shared.reported(request.op, error);
            return Some(request.complete(Err(error)));
        }
        let lists = self.lists.get_or_insert_with(|| {
            let lists = Rc::<RefCell<Lists>>::default();
            let own: Box<dyn FastPath> = Box::new(NoFastPath(NoQueue));
            let front = HeldQueue {
                queue: std::mem::replace(queue, own),
                shared: self.shared.clone(),
                ending: self.ending.clone(),
                lists: lists.clone(),
                resumes: self.shared.resumes(),
                ended: Vec::new(),
                told: (0, 0),
            };
            *queue = Box::new(front);
            lists
        });
        lists.borrow_mut().take(&self.shared, request, error);
        None
    }
}

impl Lists {
    fn take(&mut self, shared: &OnErrorState, request: Request, error: IoError) {
        let now = shared.clock.now();
        let known = self.repeated.iter().position(|one| one.tag == request.tag);
        let known = known.map(|at| self.repeated.swap_remove(at));
        self.repeated
            .retain(|one| now.saturating_duration_since(one.at) < RETRY_FOR);
        let (since, failures) = known.map_or((now, 0), |one| (one.since, one.failures));
        let pause = MIN_PAUSE.saturating_mul(1 << failures.min(16));
        let again_at = now.checked_add(pause.min(MAX_PAUSE)).unwrap_or(now);
        if shared.effect(request.op, error) == Effect::Stop && !self.is_stopped(shared) {
            shared.stopped(request.op, error);
        }
        self.waiting.push_back(HeldRequest {
            request,
            error: Some(error),
            since,
            again_at,
            failures: failures.saturating_add(1),
        });
    }

    /// Records that the failure of the request with this tag is final and is reported.
    fn ended(&mut self, tag: u64) {
        // A request of a disconnected client is never offered.
        if self.over.len() >= MAX_ENDED_TAGS {
            self.over.remove(0);
        }
        self.over.push(tag);
    }

    /// Returns whether the failure of the request with this tag is final, and removes the record.
    fn is_over(&mut self, tag: u64) -> bool {
        let at = self.over.iter().position(|over| *over == tag);
        at.map(|at| self.over.swap_remove(at)).is_some()
    }

    /// Returns whether any request waits until the operator resumes the volume.
    fn is_stopped(&self, shared: &OnErrorState) -> bool {
        self.waiting.iter().any(|one| one.is_stopped(shared))
    }
}

impl HeldRequest {
    fn is_stopped(&self, shared: &OnErrorState) -> bool {
        self.error
            .is_some_and(|error| shared.effect(self.request.op, error) == Effect::Stop)
    }
}

/// Decision whether a failed request waits on, is submitted again, or fails.
enum HeldDecision {
    Waits,
    Begins,
    Fails(IoError),
}

/// Queue in front of a volume's own queue, in which failed requests wait.
struct HeldQueue {
    queue: Box<dyn FastPath>,
    shared: Arc<OnErrorState>,
    ending: Rc<Cell<bool>>,
    lists: Rc<RefCell<Lists>>,
    /// Value of the counter [`OnErrorState::resumes`] when it was last checked.
    resumes: u64,
    /// Completions of waiting requests that were cancelled.
    ended: Vec<Completion>,
    /// Numbers of held and of waiting requests that this queue has added to the shared counters.
    told: (usize, usize),
}

impl HeldQueue {
    fn is_stopped(&self) -> bool {
        !self.ending.get() && self.lists.borrow().is_stopped(&self.shared)
    }

    /// Queues a request that arrives while the volume is stopped, behind the request that stopped
    /// it.
    fn hold(&mut self, request: Request) {
        let now = self.shared.clock.now();
        self.lists.borrow_mut().waiting.push_back(HeldRequest {
            request,
            error: None,
            since: now,
            again_at: now,
            failures: 0,
        });
    }

    fn next(&self, one: &HeldRequest, now: Instant, resumed: bool, stopped: bool) -> HeldDecision {
        let Some(error) = one.error else {
            return if stopped && !resumed {
                HeldDecision::Waits
            } else {
                HeldDecision::Begins
            };
        };
        if self.ending.get() {
            return HeldDecision::Fails(error);
        }
        match self.shared.effect(one.request.op, error) {
            Effect::Report => HeldDecision::Fails(error),
            _ if resumed => HeldDecision::Begins,
            Effect::Stop => HeldDecision::Waits,
            Effect::Retry => match now.saturating_duration_since(one.since) {
                time if time >= RETRY_FOR => HeldDecision::Fails(error),
                _ if now >= one.again_at => HeldDecision::Begins,
                _ => HeldDecision::Waits,
            },
        }
    }

    /// Decides about each waiting request once. A request that fails again waits again.
    fn go_on(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        let resumes = self.shared.resumes();
        let resumed = std::mem::replace(&mut self.resumes, resumes) != resumes;
        let (now, stopped) = (self.shared.clock.now(), self.is_stopped());
        let mut count = 0;
        let number = self.lists.borrow().waiting.len();
        for _ in 0..number {
            let Some(one) = self.lists.borrow_mut().waiting.pop_front() else {
                break;
            };
            match self.next(&one, now, resumed, stopped) {
                HeldDecision::Waits => self.lists.borrow_mut().waiting.push_back(one),
                HeldDecision::Fails(error) => {
                    self.shared.reported(one.request.op, error);
                    count += 1;
                    self.lists.borrow_mut().ended(one.request.tag);
                    done(one.request.complete(Err(error)));
                }
                HeldDecision::Begins => {
                    if let Some(completion) = self.begin(one, now) {
                        count += 1;
                        done(completion);
                    }
                }
            }
        }
        self.tell();
        count
    }

    fn begin(&mut self, one: HeldRequest, now: Instant) -> Option<Completion> {
        let Request {
            tag,
            op,
            offset,
            len,
            ..
        } = one.request;
        if one.error.is_some() {
            self.shared.repeated.fetch_add(1, Ordering::Relaxed);
            self.lists.borrow_mut().repeated.push(Repeated {
                tag,
                since: one.since,
                at: now,
                failures: one.failures,
            });
        }
        let Completion { tag, result, data } = self.queue.submit(one.request)?;
        let request = Request {
            tag,
            op,
            offset,
            len,
            data,
        };
        match result {
            Err(error) if self.shared.effect(op, error) != Effect::Report => {
                self.shared.count(op, error);
                self.lists.borrow_mut().take(&self.shared, request, error);
                None
            }
            result => Some(request.complete(result)),
        }
    }

    /// Updates the shared counters of held and waiting requests.
    fn tell(&mut self) {
        let stopped = self.is_stopped();
        let number = self.lists.borrow().waiting.len();
        let now = if stopped { (number, 0) } else { (0, number) };
        let (held, waiting) = std::mem::replace(&mut self.told, now);
        // Wrapping: other queues' parts are kept.
        let change = |counter: &std::sync::atomic::AtomicUsize, from: usize, to: usize| {
            counter.fetch_add(to.wrapping_sub(from), Ordering::Relaxed);
        };
        change(&self.shared.held, held, now.0);
        change(&self.shared.waiting, waiting, now.1);
    }
}

impl VolumeQueue for HeldQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        if self.is_stopped() {
            self.hold(request);
            return None;
        }
        self.queue.submit(request)
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        let mut count = self.queue.poll(done);
        for completion in self.ended.drain(..) {
            count += 1;
            done(completion);
        }
        let waits = !self.lists.borrow().waiting.is_empty();
        if waits || self.told != (0, 0) {
            count += self.go_on(done);
        }
        count
    }

    fn state(&self) -> QueueState {
        let QueueState { in_flight, wake } = self.queue.state();
        let lists = self.lists.borrow();
        let stopped = lists.is_stopped(&self.shared);
        let own = lists.waiting.len() + self.ended.len();
        let next = match lists.waiting.iter().map(|one| one.again_at).min() {
            _ if !self.ended.is_empty() || (own > 0 && self.ending.get()) => Wake::Poll,
            None => Wake::Event,
            // Another policy, or the word to go on, is noticed by then.
            Some(_) if stopped => Wake::After(MAX_SLEEP),
            Some(at) => Wake::After(MAX_SLEEP).earlier(Wake::At(at), || self.shared.clock.now()),
        };
        QueueState {
            in_flight: in_flight + own,
            wake: wake.earlier(next, || self.shared.clock.now()),
        }
    }

    fn cancel(&mut self, tag: u64) {
        let mut lists = self.lists.borrow_mut();
        let at = lists.waiting.iter().position(|one| one.request.tag == tag);
        match at.and_then(|at| lists.waiting.remove(at)) {
            Some(one) => {
                let aborted = Err(IoErrorKind::Aborted.into());
                self.ended.push(one.request.complete(aborted));
            }
            None => self.queue.cancel(tag),
        }
    }
}

impl FastPath for HeldQueue {
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        if self.is_stopped() {
            self.hold(Request::transfer(tag, op, offset, data));
            return None;
        }
        self.queue.start(tag, op, offset, data)
    }

    fn push(&mut self) {
        self.queue.push();
    }

    fn is_immediate(&self) -> bool {
        self.queue.is_immediate()
    }

    fn try_now(&mut self, op: Op, offset: u64, data: View<'_>) -> Option<Result<(), IoError>> {
        if self.is_stopped() {
            None
        } else {
            self.queue.try_now(op, offset, data)
        }
    }

    fn prefetches(&self) -> bool {
        self.queue.prefetches()
    }

    fn prefetch(&mut self, op: Op, offset: u64, len: u64) {
        self.queue.prefetch(op, offset, len);
    }

    /// If a copy by the file system fails, the caller repeats it with reads and writes, to which
    /// the policy applies.
    fn range_copy(&mut self) -> Option<&mut dyn RangeCopy> {
        if self.is_stopped() {
            None
        } else {
            self.queue.range_copy()
        }
    }
}

impl Drop for HeldQueue {
    fn drop(&mut self) {
        self.lists.borrow_mut().waiting.clear();
        self.tell();
    }
}
