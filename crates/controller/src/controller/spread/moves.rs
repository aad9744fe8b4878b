//! A queue on its way from one worker to another.

use super::commands::{RemoteCq, RemoteSq};
use crate::branch::Order;
use crate::controller::Controller;
use crate::controller::lifecycle::{Shutdown, State};
use crate::engine::Parcel;
use std::time::{Duration, Instant};

/// A queue whose commands in flight take longer than this stays where it is: nothing is fetched from it meanwhile.
const PATIENCE: Duration = Duration::from_millis(50);

/// Where a queue lives: with the control half, or with a branch.
pub(super) type Place = Option<usize>;

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
            None
        } else {
            if !self.may_spread() || self.has_branch(worker) != Some(true) {
                return false;
            }
            self.spread.link_of(worker)
        };
        self.send_queue(cqid, to)
    }

    pub(super) fn send_queue(&mut self, cqid: u16, to: Place) -> bool {
        let spread = &mut self.spread;
        if cqid == 0
            || spread.is_busy()
            || !self.engine.is_master()
            || self.state != State::Ready
            || self.shutdown != Shutdown::No
        {
            return false;
        }
        let from = match spread.cqs.get(&cqid) {
            Some(cq) => Some(cq.link),
            None if self.engine.cq_exists(cqid) => None,
            None => return false,
        };
        if from == to {
            return false;
        }
        match from {
            Some(link) => spread.tell(link, Order::Recall(cqid)),
            None if !self.engine.leave(cqid) => return false,
            None => {}
        }
        spread.moving = Some(Move {
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
        match moving.from {
            Some(link) => self.spread.tell(link, Order::Stay),
            None => {
                self.engine.stay();
                self.spread.moving = None;
            }
        }
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
        if moving.from.is_some() {
            self.spread.cqs.remove(&cqid);
            self.spread.sqs.retain(|_, sq| sq.cqid != cqid);
        }
        let mut worker = self.spread.home.as_ref().map(|(home, _)| *home);
        let qids: Vec<u16> = parcel.sqs.iter().map(|(qid, _)| *qid).collect();
        match moving.to {
            // Interrupts may have changed to the pin meanwhile.
            Some(link) if self.may_spread() => {
                worker = self.spread.links.get(link).map(|link| link.worker);
                let users = qids.len() as u16;
                self.spread.cqs.insert(cqid, RemoteCq { link, users });
                for &qid in &qids {
                    self.spread.sqs.insert(qid, RemoteSq { link, cqid });
                }
                self.spread.tell(link, Order::Adopt(parcel));
            }
            _ => self.engine.adopt(*parcel),
        }
        let stats = &self.engine.stats;
        stats.moves.add(1);
        for qid in qids {
            if let (Some(queue), Some(worker)) = (stats.queues.get(usize::from(qid)), worker) {
                queue.worker.set(worker.into());
            }
        }
    }

    pub(super) fn place(&self, qid: u16, place: Place) {
        let worker = match place {
            Some(link) => self.spread.links.get(link).map(|link| link.worker),
            None => self.spread.home.as_ref().map(|(home, _)| *home),
        };
        if let (Some(queue), Some(worker)) =
            (self.engine.stats.queues.get(usize::from(qid)), worker)
        {
            queue.worker.set(worker.into());
        }
    }
}
