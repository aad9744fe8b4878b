//! Start-time fair queueing with a bounded depth (Goyal, Vin, Cheng 1996; SFQ(D): Jin, Chase, Kaur 2004).
//!
//! Each flow has a start tag: the virtual time at which its next request would begin if the flow had had exactly its
//! share so far. The flow with the smallest one is served next; that tag is the virtual time then. A flow that had
//! nothing to do begins at the virtual time, or a device full of requests before it: it saves nothing else up.
//!
//! While several flows are busy, places are given away only when the worker polls, once in a round: then all of them have
//! had the chance to submit again, and whoever is behind is not passed over just because his completions came last.

use crate::{Completion, IoErrorKind, Op, Request, VolumeQueue};
use std::collections::VecDeque;
use std::time::Instant;

/// Cheapest request, in bytes: small ones cost the device as much as these.
const LEAST: u64 = 4096;
/// Fraction bits of virtual time, so that weights divide it well.
const FRACTION: u32 = 16;

/// One slice's queue in a scheduler.
pub(super) struct Flow {
    queue: Box<dyn VolumeQueue>,
    weight: u32,
    waiting: VecDeque<Request>,
    /// Virtual time at which the next request starts: its predecessor's end, or later.
    start: u128,
    /// It had requests in the last round.
    busy: bool,
    /// Completions that came while another flow's turn was taken, and cancelled requests.
    done: VecDeque<Completion>,
    /// Recycled.
    spare: VecDeque<Completion>,
}

impl Flow {
    pub(super) fn new(queue: Box<dyn VolumeQueue>, weight: u32) -> Self {
        Self {
            queue,
            weight: weight.max(1),
            waiting: VecDeque::new(),
            start: 0,
            busy: false,
            done: VecDeque::new(),
            spare: VecDeque::new(),
        }
    }
}

/// All flows of a group on one worker.
pub(super) struct Scheduler {
    flows: Vec<Option<Flow>>,
    /// Start tag of the request that was started last.
    now: u128,
    depth: usize,
}

/// What a request costs, in bytes.
fn cost(request: &Request) -> u64 {
    match request.op {
        Op::Read | Op::Write { .. } => request.len.max(LEAST),
        _ => LEAST,
    }
}

/// Virtual time that `cost` bytes take at a weight.
fn time(cost: u64, weight: u32) -> u128 {
    (u128::from(cost) << FRACTION) / u128::from(weight)
}

impl Scheduler {
    pub(super) fn new(depth: usize) -> Self {
        Self {
            flows: Vec::new(),
            now: 0,
            depth,
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
        self.flows.get_mut(index)?.take()
    }

    fn flow(&self, index: usize) -> Option<&Flow> {
        self.flows.get(index)?.as_ref()
    }

    fn flow_mut(&mut self, index: usize) -> Option<&mut Flow> {
        self.flows.get_mut(index)?.as_mut()
    }

    /// Takes a request, and starts it at once if nobody else is there.
    pub(super) fn submit(&mut self, index: usize, request: Request) -> Option<Completion> {
        let (tag, now) = (request.tag, self.now);
        let others = self.flows.iter().enumerate();
        let alone = others
            .filter(|(i, _)| *i != index)
            .all(|(_, flow)| flow.as_ref().is_none_or(|flow| !flow.busy));
        let full = time(LEAST * self.depth as u64, 1);
        let Some(flow) = self.flow_mut(index) else {
            return Some(request.complete(Err(IoErrorKind::Gone.into())));
        };
        if flow.waiting.is_empty() {
            let earliest = now.saturating_sub(full / u128::from(flow.weight));
            flow.start = flow.start.max(earliest);
        }
        flow.waiting.push_back(request);
        flow.busy = true;
        if !alone {
            return None;
        }
        self.start();
        // Done at once, and nobody has come before: the caller gets it directly.
        let flow = self.flow_mut(index)?;
        match flow.done.back() {
            Some(done) if done.tag == tag => flow.done.pop_back(),
            _ => None,
        }
    }

    /// Starts as many requests as there are places, each of the flow that is behind the most.
    fn start(&mut self) {
        let flows = || self.flows.iter().flatten();
        if flows().all(|flow| flow.waiting.is_empty()) {
            return;
        }
        let mut busy: usize = flows().map(|flow| flow.queue.in_flight()).sum();
        while busy < self.depth {
            let waiting = self.flows.iter_mut().flatten();
            let waiting = waiting.filter(|flow| !flow.waiting.is_empty());
            let Some(flow) = waiting.min_by_key(|flow| flow.start) else {
                return;
            };
            let Some(request) = flow.waiting.pop_front() else {
                return;
            };
            self.now = flow.start;
            flow.start += time(cost(&request), flow.weight);
            match flow.queue.submit(request) {
                Some(completion) => flow.done.push_back(completion),
                None => busy += 1,
            }
        }
    }

    /// Gives free places away, then answers what is over of a flow: what becomes free by that waits for the next round.
    pub(super) fn poll(&mut self, index: usize) -> VecDeque<Completion> {
        self.start();
        for flow in self.flows.iter_mut().flatten() {
            flow.busy = !flow.waiting.is_empty() || flow.queue.in_flight() > 0;
        }
        if let Some(Flow { queue, done, .. }) = self.flow_mut(index) {
            queue.poll(&mut |completion| done.push_back(completion));
        }
        match self.flow_mut(index) {
            Some(flow) => std::mem::replace(&mut flow.done, std::mem::take(&mut flow.spare)),
            None => VecDeque::new(),
        }
    }

    /// Takes an emptied list back.
    pub(super) fn recycle(&mut self, index: usize, list: VecDeque<Completion>) {
        if let Some(flow) = self.flow_mut(index) {
            flow.spare = list;
        }
    }

    pub(super) fn polled_in_flight(&self, index: usize) -> usize {
        let count = |flow: &Flow| flow.queue.polled_in_flight() + flow.done.len();
        self.flow(index).map_or(0, count)
    }

    pub(super) fn in_flight(&self, index: usize) -> usize {
        let count = |flow: &Flow| flow.queue.in_flight() + flow.done.len() + flow.waiting.len();
        self.flow(index).map_or(0, count)
    }

    pub(super) fn next_deadline(&self, index: usize) -> Option<Instant> {
        let flow = self.flow(index)?;
        let busy = || -> usize {
            self.flows
                .iter()
                .flatten()
                .map(|flow| flow.queue.in_flight())
                .sum()
        };
        if !flow.waiting.is_empty() && busy() < self.depth {
            // There are places for the next round.
            return Some(Instant::now());
        }
        flow.queue.next_deadline()
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
