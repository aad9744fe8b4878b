//! AP cards emulated in software: queues with the timing of real ones, and a [`Coprocessor`] that
//! computes.
//!
//! Resets, changes of the interrupt bit and processing of requests take time ([`Latency`]), as on a
//! real machine. The response to an instruction reports that an operation has started, and a later
//! TAPQ that it is complete. Time advances only in [`Cards::advance`], which executes all
//! operations that are due; every instruction calls it first.

mod queue;

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::information::{Configuration, Hardware};
use crate::matrix::{Apqn, Mask, Matrix};
use crate::outside::{Clock, InterruptTarget, Queues, Reply, RequestPart};
use crate::status::{QueueStatus, Response};

use queue::{Event, Queue};

/// Processor of the requests to a card's queues.
pub trait Coprocessor {
    /// Adapter type and facility bits; the domains and the depth are filled in by [`Cards`].
    fn hardware(&self) -> Hardware;

    /// Processes a request and returns the reply; an invalid request gets an error reply.
    fn process(&mut self, request: &[u8]) -> Vec<u8>;
}

/// Receiver of notifications that a queue of an emulated card has changed.
pub trait Notify {
    /// Makes the notification byte non-zero and the subclass pending.
    fn notify(&mut self, apqn: Apqn, target: InterruptTarget);
}

/// Durations of an emulated card's operations, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Latency {
    /// Duration of a queue's reset in nanoseconds.
    pub reset: u64,
    /// Nanoseconds between AQIC (interruption control) and the change of the queue's interrupt bit.
    pub interrupts: u64,
    /// Duration of a request in nanoseconds, from the queue to its reply.
    pub request: u64,
}

/// Configuration of a set of cards.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Domains that every card has, one queue each.
    pub domains: Mask,
    /// Number of requests and replies that a queue holds, 1 to 16.
    pub depth: u8,
    /// Maximum length of a request in bytes.
    pub largest_request: usize,
    /// Durations of the operations of each card.
    pub latency: Latency,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Configured,
    Deconfigured,
    Checkstopped,
}

#[derive(Debug)]
struct Card<P> {
    coprocessor: P,
    state: State,
}

/// A set of emulated cards.
#[derive(Debug)]
pub struct Cards<C, N, P> {
    clock: C,
    notify: N,
    layout: Layout,
    cards: BTreeMap<u8, Card<P>>,
    queues: BTreeMap<Apqn, Queue>,
}

impl<C: Clock, N: Notify, P: Coprocessor> Cards<C, N, P> {
    /// Creates a set without cards; `layout` applies to each card that is plugged in later.
    pub fn new(layout: Layout, clock: C, notify: N) -> Cards<C, N, P> {
        let layout = Layout {
            depth: layout.depth.clamp(1, 16),
            ..layout
        };
        Cards {
            clock,
            notify,
            layout,
            cards: BTreeMap::new(),
            queues: BTreeMap::new(),
        }
    }

    /// Plugs a card in as adapter number `adapter`; `coprocessor` answers its requests.
    pub fn plug(&mut self, adapter: u8, coprocessor: P) {
        let state = State::Configured;
        self.cards.insert(adapter, Card { coprocessor, state });
        for domain in self.layout.domains.iter() {
            let queue = Queue::new(usize::from(self.layout.depth));
            self.queues.insert(Apqn::new(adapter, domain), queue);
        }
    }

    /// Unplugs the card with this adapter number; messages in its queues are lost.
    pub fn unplug(&mut self, adapter: u8) {
        self.cards.remove(&adapter);
        self.queues.retain(|apqn, _| apqn.adapter() != adapter);
    }

    /// Deconfigures a card, or configures it again. Its queues are reset at once.
    pub fn configure(&mut self, adapter: u8, on: bool) {
        let state = if on {
            State::Configured
        } else {
            State::Deconfigured
        };
        self.set_state(adapter, state);
    }

    /// Puts a card into the check-stop state; a later [`Cards::configure`] brings it back.
    pub fn checkstop(&mut self, adapter: u8) {
        self.set_state(adapter, State::Checkstopped);
    }

    fn set_state(&mut self, adapter: u8, state: State) {
        if let Some(card) = self.cards.get_mut(&adapter) {
            card.state = state;
            let depth = usize::from(self.layout.depth);
            for (apqn, queue) in &mut self.queues {
                if apqn.adapter() == adapter {
                    *queue = Queue::new(depth);
                }
            }
        }
    }

    /// Returns the numbers of all existing queues of the set.
    pub fn queues(&self) -> impl Iterator<Item = Apqn> {
        self.queues.keys().copied()
    }

    /// Executes all operations that are due. Returns the time of the next one, if any is pending.
    pub fn advance(&mut self) -> Option<u64> {
        let now = self.clock.now();
        let mut next = None;
        for (apqn, queue) in &mut self.queues {
            while let Some(event) = queue.step(now) {
                if let Event::Notify(target) = event {
                    self.notify.notify(*apqn, target);
                }
            }
            next = [next, queue.due()].into_iter().flatten().min();
        }
        next
    }

    /// Executes an instruction on an operational queue, or returns the status that explains why it
    /// is not.
    fn with(
        &mut self,
        apqn: Apqn,
        body: impl FnOnce(&mut Queue, &mut P, Now) -> QueueStatus,
    ) -> QueueStatus {
        self.advance();
        let card = self.cards.get_mut(&apqn.adapter());
        let (Some(card), Some(queue)) = (card, self.queues.get_mut(&apqn)) else {
            return QueueStatus::of(Response::QUEUE_NOT_AVAILABLE);
        };
        let status = match card.state {
            State::Configured => {
                let time = self.clock.now();
                let layout = self.layout;
                body(queue, &mut card.coprocessor, Now { time, layout })
            }
            State::Deconfigured => QueueStatus::of(Response::DECONFIGURED),
            State::Checkstopped => QueueStatus::of(Response::CHECKSTOPPED),
        };
        // Operations without latency are completed at once.
        self.advance();
        status
    }

    fn reset(&mut self, apqn: Apqn) -> QueueStatus {
        self.with(apqn, |queue, _, now| {
            queue.reset(now.time + now.layout.latency.reset)
        })
    }
}

/// Time of an instruction, and the configuration of the cards.
struct Now {
    time: u64,
    layout: Layout,
}

impl<C: Clock, N: Notify, P: Coprocessor> Queues for Cards<C, N, P> {
    fn tapq(&mut self, apqn: Apqn) -> (QueueStatus, Hardware) {
        let mut hardware = Hardware::default();
        let status = self.with(apqn, |queue, coprocessor, now| {
            hardware = Hardware {
                domains_0based: highest(now.layout.domains),
                depth_0based: now.layout.depth - 1,
                ..coprocessor.hardware()
            };
            queue.status()
        });
        (status, hardware)
    }

    fn rapq(&mut self, apqn: Apqn) -> QueueStatus {
        self.reset(apqn)
    }

    fn zapq(&mut self, apqn: Apqn) -> QueueStatus {
        // A reset of these cards clears everything, so zeroizing is the same as a reset.
        self.reset(apqn)
    }

    fn aqic(&mut self, apqn: Apqn, target: Option<InterruptTarget>) -> QueueStatus {
        self.with(apqn, |queue, _, now| {
            queue.interrupts(target, now.time + now.layout.latency.interrupts)
        })
    }

    fn qci(&mut self) -> Configuration {
        let adapters = self.cards.iter();
        let adapters = adapters.filter(|(_, card)| card.state == State::Configured);
        let matrix = Matrix {
            adapters: adapters.map(|(adapter, _)| *adapter).collect(),
            domains: self.layout.domains,
            control_domains: self.layout.domains,
        };
        Configuration {
            adapters_0based: highest(matrix.adapters),
            domains_0based: highest(matrix.domains),
            matrix,
        }
    }

    fn nqap(&mut self, apqn: Apqn, part: RequestPart<'_>) -> QueueStatus {
        self.with(apqn, |queue, coprocessor, now| {
            if part.special {
                return queue.status().with(Response::FACILITY_NOT_INSTALLED);
            }
            let ready = now.time + now.layout.latency.request;
            let compute = |request: &[u8]| coprocessor.process(request);
            queue.enqueue(part, now.layout.largest_request, ready, compute)
        })
    }

    fn dqap(&mut self, apqn: Apqn, room: usize, continued: bool) -> (QueueStatus, Option<Reply>) {
        let mut reply = None;
        let status = self.with(apqn, |queue, _, _| {
            let (status, got) = queue.dequeue(room, continued);
            reply = got;
            status
        });
        (status, reply)
    }
}

fn highest(mask: Mask) -> u8 {
    mask.iter().last().unwrap_or(0)
}
