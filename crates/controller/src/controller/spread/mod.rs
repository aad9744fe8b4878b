//! Queues on other workers, as the control half sees them: where each lives, what its worker was told, and how a queue
//! goes from one worker to another.
//!
//! A move has one owner at each moment. The engine that has the queue lets it go (`Engine::leave`), hands it to the control
//! half, and that hands it on at once. An admin command about queues never meets one that is on its way: the move is
//! called off, and the command held until it is known on which side the queue ended up.

mod commands;
mod flush;
mod link;
mod moves;

use super::Controller;
use crate::branch::{BranchSeed, OPEN, OPENING, Parts, Progress, Report};
use crate::config::NamespaceConfig;
use crate::engine::{EngineConfig, Event, Order};
use commands::{RemoteCq, RemoteSq};
use link::Link;
use moves::Move;
pub(super) use moves::Place;
use nvme::{Command, Status};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{channel, sync_channel};
use std::task::Waker;

/// Reports of one branch that may be under way.
const REPORTS: usize = 64;
/// Of these, so many are heard at a time: there is more to do than to listen to a host's errors.
const HEARD: usize = 32;

/// The control half's knowledge of its branches.
#[derive(Default)]
pub(crate) struct Spread {
    links: Vec<Link>,
    /// This controller's own worker.
    home: Option<(u16, Waker)>,
    cqs: BTreeMap<u16, RemoteCq>,
    sqs: BTreeMap<u16, RemoteSq>,
    moving: Option<Move>,
    /// Admin commands that wait until no queue is on its way.
    held: VecDeque<Command>,
    /// Doorbell Buffer Config commands that wait for the branches: for each link the order that it waits for.
    configuring: Vec<(u16, Vec<u64>)>,
    /// Controller-level resets so far.
    epoch: u64,
    /// Flushes on the controller's own account so far.
    flushes: u64,
    /// The last flush that this engine has answered.
    flushed_own: u64,
    /// The first error of those flushes.
    flush_failed: Option<Status>,
    /// What a new branch is made of.
    template: Option<(EngineConfig, Vec<NamespaceConfig>)>,
}

impl Spread {
    /// Without branches; they will be made of this.
    pub fn new(config: EngineConfig, namespaces: Vec<NamespaceConfig>) -> Self {
        Spread {
            template: Some((config, namespaces)),
            ..Spread::default()
        }
    }

    pub fn any_queue(&self) -> bool {
        !self.cqs.is_empty() || !self.sqs.is_empty()
    }

    /// Sends an order to one branch.
    fn send(&mut self, link: usize, order: Order) {
        if let Some(link) = self.links.get_mut(link) {
            link.send(order);
        }
    }

    /// Sends an order to all of them.
    pub fn send_all(&mut self, order: impl Fn() -> Order) {
        for link in &mut self.links {
            link.send(order());
        }
    }

    /// No branch has a command in flight that can touch memory that was taken away.
    pub fn quiesced(&self) -> bool {
        let over = |link: &Link| link.progress.quiesced.load(Ordering::Acquire) >= link.unmap;
        self.links.iter().all(|link| !link.is_open() || over(link))
    }

    /// No branch signals receivers any more that were taken away.
    pub fn receivers_settled(&self) -> bool {
        let over = |link: &Link| link.handled() >= link.receiver;
        self.links.iter().all(|link| !link.is_open() || over(link))
    }

    /// A controller-level reset begins: no queue is left. Returns its number.
    pub fn next_epoch(&mut self) -> u64 {
        self.epoch += 1;
        self.cqs.clear();
        self.sqs.clear();
        self.moving = None;
        self.held.clear();
        self.configuring.clear();
        self.epoch
    }

    /// Nothing of before the last reset is in flight on any branch.
    pub fn stopped(&self) -> bool {
        let over = |link: &Link| link.progress.stopped.load(Ordering::Acquire) >= self.epoch;
        self.links.iter().all(|link| !link.is_open() || over(link))
    }

    /// It is over: no flush is under way either.
    pub fn reset_over(&mut self) {
        self.flushed_own = self.flushes;
        self.flush_failed = None;
        for link in &mut self.links {
            link.flushed = self.flushes;
        }
    }

    /// The bell of the worker that a doorbell's queue lives on, if that is another one: to be rung after the doorbell was
    /// stored.
    pub fn waker_of(&self, index: usize) -> Option<&Waker> {
        let qid = (index / 2) as u16;
        let link = if index.is_multiple_of(2) {
            self.sqs.get(&qid)?.link
        } else {
            self.cqs.get(&qid)?.link
        };
        Some(&self.links.get(link)?.waker)
    }

    /// Something goes on that wants a look in every round.
    #[inline]
    fn is_busy(&self) -> bool {
        self.moving.is_some() || !self.held.is_empty() || !self.configuring.is_empty()
    }

    fn link_of(&self, worker: u16) -> Option<usize> {
        self.links.iter().position(|link| link.worker == worker)
    }
}

impl Controller {
    /// Has every engine apply an order: this controller's own at once, the others when their workers drain
    /// their messages.
    pub(crate) fn order_all(&mut self, order: impl Fn() -> Order) {
        // Only a change of memory can fail, see `change_memory`.
        let _ = self.engine.apply(order());
        self.spread.send_all(order);
    }

    /// Has one engine apply an order.
    fn order(&mut self, place: Place, order: Order) {
        match place {
            Place::Own => {
                let _ = self.engine.apply(order);
            }
            Place::Branch(link) => self.spread.send(link, order),
        }
    }

    /// Names this controller's worker, and says how its branches wake it. To be called before any [`Controller::branch`].
    pub fn set_home(&mut self, worker: u16, waker: Waker) {
        self.spread.home = Some((worker, waker));
        for queue in &self.engine.stats.queues {
            queue.worker.set(worker.into());
        }
    }

    /// Makes a branch for another worker, which `waker` wakes. Once it is opened there, queues may
    /// go to it. `None` when that cannot be: no home was named, there is a branch for that worker
    /// already, [`ControllerConfig::workers`] are reached, or a namespace has a direct path to a
    /// device, which belongs to one thread.
    ///
    /// [`ControllerConfig::workers`]: crate::ControllerConfig::workers
    pub fn branch(&mut self, worker: u16, waker: Waker) -> Option<BranchSeed> {
        let (home, home_waker) = self.spread.home.clone()?;
        let share = self.spread.links.len() + 1;
        let passing = |ns: &crate::engine::Namespace| ns.passthrough.is_some();
        if worker == home
            || self.spread.link_of(worker).is_some()
            || share >= self.engine.stats.shares.len()
            || self.engine.namespaces.iter().any(passing)
        {
            return None;
        }
        let (config, namespaces) = self.spread.template.clone()?;
        let (orders, theirs) = channel();
        let (reporter, reports) = sync_channel(REPORTS);
        let progress = Arc::<Progress>::default();
        progress.stopped.store(self.spread.epoch, Ordering::Relaxed);
        let mut link = Link {
            worker,
            orders,
            reports,
            waker,
            progress: progress.clone(),
            sent: 0,
            unmap: 0,
            receiver: 0,
            flushed: self.spread.flushes,
        };
        // What it has missed.
        for order in self.engine.catch_up() {
            link.send(order);
        }
        self.spread.links.push(link);
        Some(BranchSeed {
            config: EngineConfig {
                share: share as u16,
                ..config
            },
            namespaces,
            parts: Parts {
                orders: theirs,
                reports: reporter,
                progress,
                home: home_waker,
                mapped_doorbells: self.config.mapped_doorbells,
                epoch: self.spread.epoch,
            },
        })
    }

    /// Whether queues may go to that worker. `None`: not yet, its branch is being opened.
    pub fn has_branch(&self, worker: u16) -> Option<bool> {
        let link = self.spread.link_of(worker);
        let Some(link) = link.and_then(|link| self.spread.links.get(link)) else {
            return Some(false);
        };
        match link.progress.state.load(Ordering::Acquire) {
            OPENING => None,
            state => Some(state == OPEN),
        }
    }

    /// Hears the branches. To be called when this worker was woken for messages. Returns whether
    /// there was anything.
    pub fn hear(&mut self) -> bool {
        // One that had not heard of a receiver yet has left an interrupt pending; now it has heard.
        self.engine.irqs.deliver_pending();
        let (mut heard, mut more) = (false, false);
        for at in 0..self.spread.links.len() {
            let mut count = 0;
            while count < HEARD
                && let Some(link) = self.spread.links.get(at)
                && let Ok(report) = link.reports.try_recv()
            {
                count += 1;
                if report.epoch == self.spread.epoch {
                    self.reported(at, report);
                }
            }
            heard |= count > 0;
            more |= count == HEARD;
        }
        if more && let Some((_, waker)) = &self.spread.home {
            waker.wake_by_ref();
        }
        heard
    }

    fn reported(&mut self, at: usize, report: Report) {
        match report.event {
            Event::SqDrained(qid) => {
                self.spread.sq_gone(qid);
                self.sq_deleted(qid);
            }
            Event::Flushed { number, failed } => {
                self.flush_ended(Place::Branch(at), number, failed);
            }
            event => self.event(event),
        }
    }

    /// Goes on with moves, and with commands that wait for branches. Returns whether there was anything.
    #[inline]
    pub(super) fn tend(&mut self) -> bool {
        (self.spread.is_busy() || (self.spread.any_queue() && self.engine.irqs.pin_based()))
            && self.tend_busy()
    }

    #[cold]
    fn tend_busy(&mut self) -> bool {
        let mut worked = self.go_on_moving();
        worked |= self.end_configuring();
        worked |= self.release_held();
        // The pin's level is decided by looking at all queues in one place.
        if self.engine.irqs.pin_based()
            && !self.spread.is_busy()
            && let Some((&cqid, _)) = self.spread.cqs.first_key_value()
        {
            worked |= self.send_queue(cqid, Place::Own);
        }
        worked
    }
}
