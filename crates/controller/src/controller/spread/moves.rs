//! A queue on its way from one worker to another.

use super::commands::{RemoteCq, RemoteSq};
use crate::controller::Controller;
use crate::controller::lifecycle::{Shutdown, State};
use crate::engine::{Order, Parcel};
use std::time::{Duration, Instant};

/// A queue whose commands in flight take longer than this stays where it is: nothing is fetched from it meanwhile.
const PATIENCE: Duration = Duration::from_millis(50);

/// The engine that a queue is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::controller) enum Place {
    /// The controller's own.
    Own,
    /// That of the branch behind this link.
    Branch(usize),
}

pub(super) struct Move {
    pub cqid: u16,
    pub from: Place,
    pub to: Place,
    pub since: Instant,
    /// It was called off.
    pub off: bool,
}

impl Controller {
    /// Completion queues, which are what can move, and the worker of each. The admin queue is not among them.
    pub fn completion_queues(&self) -> Vec<(u16, u16)> {
        let mut all: Vec<(u16, u16)> = Vec::new();
        if let Some((home, _)) = &self.spread.home {
            all.extend(self.engine.io_cqs().map(|cqid| (cqid, *home)));
        }
        for (&cqid, cq) in &self.spread.cqs {
            if let Some(link) = self.spread.links.get(cq.link) {
                all.push((cqid, link.worker));
            }
        }
        all
    }

    /// Submission queues that complete in `cqid`.
    pub fn submission_queues(&self, cqid: u16) -> Vec<u16> {
        let there = self.spread.sqs.iter();
        let there = there.filter_map(|(&qid, sq)| (sq.cqid == cqid).then_some(qid));
        self.engine
            .users_of(cqid)
            .into_iter()
            .chain(there)
            .collect()
    }

    /// Queues may go to other workers: the controller runs, interrupts are messages, and doorbells need not all pass through
    /// this worker.
    pub fn may_spread(&self) -> bool {
        self.state == State::Ready
            && self.shutdown == Shutdown::No
            && !self.engine.irqs.pin_based()
            && (self.engine.shadowed() || self.config.mapped_doorbells)
    }

    /// A queue is on its way from one worker to another.
    pub fn is_moving(&self) -> bool {
        self.spread.moving.is_some()
    }

    /// Sends a completion queue, with its submission queues, to another worker. It goes as soon as its commands in flight are
    /// over; if that takes long, it stays. `false` when it cannot go there now.
    pub fn move_queue(&mut self, cqid: u16, worker: u16) -> bool {
        let home = self.spread.home.as_ref().map(|(home, _)| *home);
        let to = if home == Some(worker) {
            Place::Own
        } else {
            if !self.may_spread() || self.has_branch(worker) != Some(true) {
                return false;
            }
            match self.spread.link_of(worker) {
                Some(link) => Place::Branch(link),
                None => return false,
            }
        };
        self.send_queue(cqid, to)
    }

    pub(super) fn send_queue(&mut self, cqid: u16, to: Place) -> bool {
        if cqid == 0
            || self.spread.is_busy()
            || !self.engine.is_master()
            || self.state != State::Ready
            || self.shutdown != Shutdown::No
        {
            return false;
        }
        let Some(from) = self.place_of_cq(cqid).filter(|from| *from != to) else {
            return false;
        };
        self.order(from, Order::Recall(cqid));
        self.spread.moving = Some(Move {
            cqid,
            from,
            to,
            since: self.now,
            off: false,
        });
        true
    }

    /// Goes on with a move from here, and calls one off that takes too long. Returns whether there was anything.
    pub(super) fn go_on_moving(&mut self) -> bool {
        let mut worked = false;
        if self.spread.moving.is_some()
            && let Some(parcel) = self.engine.depart()
        {
            self.queue_left(parcel);
            worked = true;
        }
        if let Some(moving) = &self.spread.moving
            && self.now.saturating_duration_since(moving.since) >= PATIENCE
        {
            self.call_off();
        }
        worked
    }

    /// When [`Controller::tend`] has something to do though nothing happens.
    pub(in crate::controller) fn move_deadline(&self) -> Option<Instant> {
        let moving = self.spread.moving.as_ref().filter(|moving| !moving.off)?;
        Some(moving.since + PATIENCE)
    }

    /// The queue that is on its way stays where it is, unless it has left already.
    pub(super) fn call_off(&mut self) {
        let Some(moving) = &mut self.spread.moving else {
            return;
        };
        if std::mem::replace(&mut moving.off, true) {
            return;
        }
        let from = moving.from;
        self.order(from, Order::Stay);
    }

    pub(in crate::controller) fn queue_stayed(&mut self) {
        self.spread.moving = None;
    }

    /// Hands a queue that has left one engine to the next.
    pub(in crate::controller) fn queue_left(&mut self, parcel: Box<Parcel>) {
        let Some(moving) = self.spread.moving.take() else {
            return;
        };
        let cqid = parcel.cqid;
        debug_assert_eq!(moving.cqid, cqid);
        self.spread.cqs.remove(&cqid);
        self.spread.sqs.retain(|_, sq| sq.cqid != cqid);
        let qids: Vec<u16> = parcel.sqs.iter().map(|(qid, _)| *qid).collect();
        let mut to = moving.to;
        if let Place::Branch(link) = to {
            // Interrupts may have changed to the pin meanwhile.
            if self.may_spread() {
                let users = qids.len() as u16;
                self.spread.cqs.insert(cqid, RemoteCq { link, users });
                let there = qids.iter().map(|&qid| (qid, RemoteSq { link, cqid }));
                self.spread.sqs.extend(there);
            } else {
                to = Place::Own;
            }
        }
        self.order(to, Order::Adopt(parcel));
        self.engine.stats.moves.add(1);
        for qid in qids {
            self.note_worker(qid, to);
        }
    }

    /// Tells of a submission queue's worker in its counters.
    pub(super) fn note_worker(&self, qid: u16, place: Place) {
        let worker = match place {
            Place::Branch(link) => self.spread.links.get(link).map(|link| link.worker),
            Place::Own => self.spread.home.as_ref().map(|(home, _)| *home),
        };
        if let (Some(queue), Some(worker)) =
            (self.engine.stats.queues.get(usize::from(qid)), worker)
        {
            queue.worker.set(worker.into());
        }
    }
}
