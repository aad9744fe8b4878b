//! Start-time fair queueing with a bounded depth (Goyal, Vin, Cheng 1996; SFQ(D): Jin, Chase, Kaur
//! 2004).
//!
//! Each share has a start tag: the virtual time at which its next request would begin if it had had
//! exactly its share so far. The one with the smallest is served next; that tag is the virtual time
//! then.
//!
//! Each thread serves its own queues, and leaves places to queues of other threads that are further
//! behind and wait. While several queues are busy, places are assigned only when the worker polls,
//! once in a round. By then all of them have had the chance to submit again, and a slice that is
//! behind is not passed over because its completions arrived last.

use super::group::{FlowEntry, Group, MIN_COST};
use crate::{Completion, IoErrorKind, Op, OpenQueue, QueueState, Request, Wake};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Longest sleep of a thread while requests wait for device slots. Other threads release slots
/// without a notification.
const NAP: Duration = Duration::from_micros(50);

/// Queue of one volume in the scheduler of a thread: waiting requests, and the inner queue.
pub(super) struct Flow {
    queue: OpenQueue,
    entry: Arc<FlowEntry>,
    waiting: VecDeque<Request>,
    /// Whether the volume had requests on this thread in the last round.
    busy: bool,
    /// Completions that arrived while another volume was polled, and those of cancelled requests.
    done: VecDeque<Completion>,
    /// Empty list of completions, kept to reuse its memory.
    spare: VecDeque<Completion>,
}

impl Flow {
    pub(super) fn new(queue: OpenQueue, entry: Arc<FlowEntry>) -> Self {
        Self {
            queue,
            entry,
            waiting: VecDeque::new(),
            busy: false,
            done: VecDeque::new(),
            spare: VecDeque::new(),
        }
    }
}

/// Scheduler of one thread for all volumes of a group, which decides which request starts next.
pub(super) struct Scheduler {
    group: Arc<Group>,
    flows: Vec<Option<Flow>>,
    /// Number of device slots that requests of this thread occupy.
    taken: usize,
    /// Queues of other threads into volumes of the group, as last read.
    others: Vec<Arc<FlowEntry>>,
    generation: usize,
    /// Whether no other queue of the group, on any thread, had requests recently.
    alone: bool,
}

/// Returns the cost in bytes as which a request counts towards its volume's share.
fn cost(request: &Request) -> u64 {
    match request.op {
        Op::Read | Op::Write { .. } => request.len.max(MIN_COST),
        _ => MIN_COST,
    }
}

impl Scheduler {
    pub(super) fn new(group: Arc<Group>) -> Self {
        Self {
            group,
            flows: Vec::new(),
            taken: 0,
            others: Vec::new(),
            generation: 0,
            alone: true,
        }
    }

    pub(super) fn enter(&mut self, flow: Flow) -> usize {
        if let Some(index) = self.flows.iter().position(Option::is_none) {
            if let Some(place) = self.flows.get_mut(index) {
                *place = Some(flow);
            }
            return index;
        }
        self.flows.push(Some(flow));
        self.flows.len() - 1
    }

    pub(super) fn leave(&mut self, index: usize) -> Option<Flow> {
        let flow = self.flows.get_mut(index)?.take()?;
        self.group.leave(&flow.entry);
        Some(flow)
    }

    fn flow(&self, index: usize) -> Option<&Flow> {
        self.flows.get(index)?.as_ref()
    }

    fn flow_mut(&mut self, index: usize) -> Option<&mut Flow> {
        self.flows.get_mut(index)?.as_mut()
    }

    /// Accepts a request of volume `index`, and starts it at once if no other volume is active.
    pub(super) fn submit(&mut self, index: usize, request: Request) -> Option<Completion> {
        let tag = request.tag;
        let others = self.flows.iter().enumerate();
        let alone = others
            .filter(|(i, _)| *i != index)
            .all(|(_, flow)| flow.as_ref().is_none_or(|flow| !flow.busy));
        let alone = alone && self.alone;
        let group = self.group.clone();
        let Some(flow) = self.flow_mut(index) else {
            return Some(request.complete(Err(IoErrorKind::Gone.into())));
        };
        if flow.waiting.is_empty() {
            // All of its requests may have ended at once: it is not idle for that.
            let keeping_up = flow.busy || flow.entry.was_busy(group.clock());
            group.begin(&flow.entry.share, keeping_up);
        }
        flow.waiting.push_back(request);
        flow.busy = true;
        if !alone {
            return None;
        }
        self.start();
        // Done at once, and none has come before: the caller gets it directly.
        let flow = self.flow_mut(index)?;
        match flow.done.back() {
            Some(done) if done.tag == tag => flow.done.pop_back(),
            _ => None,
        }
    }

    /// Submits the accumulated requests of volume `index` to its inner queue as a batch.
    pub(super) fn push(&mut self, index: usize) {
        if let Some(flow) = self.flow_mut(index) {
            flow.queue.push();
        }
    }

    /// Releases the device slots of requests that have completed since the last call.
    pub(super) fn settle(&mut self) {
        let flows = self.flows.iter().flatten();
        let busy: usize = flows.map(|flow| flow.queue.state().in_flight).sum();
        // A flow that leaves is not among them any more, and its requests have completed.
        self.group.release(self.taken.saturating_sub(busy));
        self.taken = self.taken.min(busy);
    }

    /// Publishes this thread's waiting requests, so that other threads leave slots to them.
    fn tell(&self) {
        if self.others.is_empty() {
            return;
        }
        let now = self.group.clock();
        for flow in self.flows.iter().flatten() {
            let waits = !flow.waiting.is_empty();
            flow.entry.see_waiting(if waits { now } else { 0 });
        }
    }

    /// Publishes this thread's state to the others, and updates the list of other threads' queues.
    fn look_around(&mut self) {
        if let Some(all) = self.group.entries(&mut self.generation) {
            let own = |entry: &Arc<FlowEntry>| {
                let mut flows = self.flows.iter().flatten();
                flows.any(|flow| Arc::ptr_eq(&flow.entry, entry))
            };
            self.others = all.into_iter().filter(|entry| !own(entry)).collect();
        }
        let own = || self.flows.iter().flatten().map(|flow| &flow.entry);
        if own().count() + self.others.len() <= 1 {
            self.alone = true;
            return;
        }
        let now = self.group.clock();
        for flow in self.flows.iter().flatten().filter(|flow| flow.busy) {
            flow.entry.see_busy(now);
        }
        // Lately, not now: depths are compared only while they count.
        let all = own().chain(&self.others);
        self.alone = all.filter(|entry| entry.was_busy(now)).count() <= 1;
        if !self.alone {
            self.group.tune(now);
        }
    }

    /// Starts waiting requests while the device has room, always from the flow that is furthest
    /// behind. If that flow belongs to another thread, the slot is left to it.
    fn start(&mut self) {
        self.settle();
        if self.flows.iter().flatten().all(|f| f.waiting.is_empty()) {
            return;
        }
        let now = if self.others.is_empty() {
            0
        } else {
            self.group.clock()
        };
        let base = self.flows.iter().flatten().map(|f| f.entry.share.start());
        let Some(base) = base.reduce(|a, b| {
            if a.wrapping_sub(b).cast_signed() < 0 {
                a
            } else {
                b
            }
        }) else {
            return;
        };
        loop {
            let waiting = self.flows.iter_mut().flatten();
            let waiting = waiting.filter(|flow| !flow.waiting.is_empty());
            // Distances from the one that is behind the most keep their order when the virtual time
            // begins again.
            let first = waiting.min_by_key(|flow| flow.entry.share.start().wrapping_sub(base));
            let Some(flow) = first else {
                break;
            };
            let start = flow.entry.share.start();
            if self
                .others
                .iter()
                .any(|other| other.goes_before(start, now))
            {
                break;
            }
            if !self.group.take(self.alone) {
                break;
            }
            let Some(request) = flow.waiting.pop_front() else {
                self.group.release(1);
                break;
            };
            self.group.charge(&flow.entry.share, cost(&request));
            match flow.queue.submit(request) {
                Some(completion) => {
                    self.group.release(1);
                    flow.done.push_back(completion);
                }
                None => self.taken += 1,
            }
        }
    }

    /// Starts waiting requests, then returns a flow's completions. Slots released by these
    /// completions are assigned in the next round.
    pub(super) fn poll(&mut self, index: usize) -> VecDeque<Completion> {
        self.look_around();
        self.start();
        self.tell();
        for flow in self.flows.iter_mut().flatten() {
            flow.busy = !flow.waiting.is_empty() || flow.queue.state().in_flight > 0;
        }
        if let Some(Flow { queue, done, .. }) = self.flow_mut(index) {
            queue.poll(&mut |completion| done.push_back(completion));
        }
        match self.flow_mut(index) {
            Some(flow) => std::mem::replace(&mut flow.done, std::mem::take(&mut flow.spare)),
            None => VecDeque::new(),
        }
    }

    /// Accepts an emptied list of completions for reuse.
    pub(super) fn recycle(&mut self, index: usize, list: VecDeque<Completion>) {
        if let Some(flow) = self.flow_mut(index) {
            flow.spare = list;
        }
    }

    pub(super) fn state(&self, index: usize) -> QueueState {
        let Some(flow) = self.flow(index) else {
            return QueueState::IDLE;
        };
        let QueueState { in_flight, wake } = flow.queue.state();
        QueueState {
            in_flight: in_flight + flow.done.len() + flow.waiting.len(),
            wake: if flow.done.is_empty() {
                wake.earlier(self.next_place(flow), || self.group.now())
            } else {
                Wake::Poll
            },
        }
    }

    /// Returns when the next waiting request of a volume may find room in the device.
    fn next_place(&self, flow: &Flow) -> Wake {
        if flow.waiting.is_empty() {
            return Wake::Event;
        }
        // Places of this thread that are free now are given away in the next round.
        let flows = self.flows.iter().flatten();
        let busy: usize = flows.map(|flow| flow.queue.state().in_flight).sum();
        if busy < self.taken || self.group.has_place(self.alone) {
            Wake::After(Duration::ZERO)
        } else if busy > 0 && self.others.is_empty() {
            // All places that are taken are its own. With none of them, another flow has come since
            // it looked around.
            Wake::Event
        } else {
            Wake::After(NAP)
        }
    }

    pub(super) fn prefetches(&self, index: usize) -> bool {
        self.flow(index).is_some_and(|flow| flow.queue.prefetches())
    }

    pub(super) fn prefetch(&mut self, index: usize, op: Op, offset: u64, len: u64) {
        if let Some(flow) = self.flow_mut(index) {
            flow.queue.prefetch(op, offset, len);
        }
    }

    /// Returns the number of queues of other threads that this scheduler knows.
    #[cfg(test)]
    pub(super) fn others(&self) -> usize {
        self.others.len()
    }

    pub(super) fn cancel(&mut self, index: usize, tag: u64) {
        let Some(flow) = self.flow_mut(index) else {
            return;
        };
        let position = flow.waiting.iter().position(|request| request.tag == tag);
        match position.and_then(|at| flow.waiting.remove(at)) {
            Some(request) => {
                let aborted = request.complete(Err(IoErrorKind::Aborted.into()));
                flow.done.push_back(aborted);
            }
            None => flow.queue.cancel(tag),
        }
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.group.release(self.taken);
    }
}
