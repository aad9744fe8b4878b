//! Queue migration, and queues on other workers, as seen by the control half: where each queue is,
//! which orders its worker has received, and how a queue migrates between workers.
//!
//! A migrating queue has exactly one owner at any moment. The engine that has the queue stops
//! fetching from it (`Queues::begin_migration`), and passes it to the control half when no command
//! of the queue is outstanding. The control half passes it on to the next engine at once. An admin
//! command about queues never meets a migrating one: the migration is cancelled, and the command
//! waits until it is known which engine has the queue.

mod flush;
mod link;
mod owners;
mod queue;

use super::Controller;
use crate::config::NamespaceConfig;
use crate::engine::{EngineConfig, Event, Order};
use crate::remote::{Connection, EngineReport, OPEN, OPENING, Progress, RemoteEngineSetup};
use dma::SharedPages;
pub(super) use link::Link;
use nvme::Status;
use owners::{RemoteCq, RemoteSq};
use queue::QueueMigration;
pub(super) use queue::QueueOwner;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{channel, sync_channel};
use std::task::Waker;

/// Capacity of the channel of reports from one remote engine to the control half.
const REPORTS: usize = 64;
/// Maximum number of reports handled per call, so that logging a host's errors does not delay other
/// work.
const REPORTS_PER_DRAIN: usize = 32;

/// State of the control half about remote engines (parts of the controller on other workers) and
/// their queues.
#[derive(Default)]
pub(crate) struct Migration {
    links: Vec<Link>,
    /// Index and waker of the controller's own worker.
    own_worker: Option<(u16, Waker)>,
    cqs: BTreeMap<u16, RemoteCq>,
    sqs: BTreeMap<u16, RemoteSq>,
    migrating: Option<QueueMigration>,
    /// Doorbell Buffer Config commands that wait for remote engines: command identifier, and the
    /// number of the awaited order for each link.
    configuring: Vec<(u16, Vec<u64>)>,
    /// Whether a Doorbell Buffer Config command waits, or another controller waits for outstanding
    /// commands of this one.
    waiting: bool,
    /// Number of controller-level resets so far.
    epoch: u64,
    /// Number of flushes that the controller itself has requested so far.
    flushes: u64,
    /// Number of the last flush that the controller's own engine has completed.
    flushed_own: u64,
    /// First error of the flushes that the controller itself requested.
    flush_failed: Option<Status>,
    /// Configuration with which new remote engines are created.
    template: Option<(EngineConfig, Vec<NamespaceConfig>)>,
}

impl Migration {
    /// Creates the state without remote engines; `config` and `namespaces` apply to those created
    /// later.
    pub fn new(config: EngineConfig, namespaces: Vec<NamespaceConfig>) -> Self {
        Migration {
            template: Some((config, namespaces)),
            ..Migration::default()
        }
    }

    /// Sets the namespace at this index for remote engines that are created later.
    pub(crate) fn set_namespace(&mut self, index: usize, config: NamespaceConfig) {
        if let Some((_, namespaces)) = &mut self.template {
            match namespaces.get_mut(index) {
                Some(place) => *place = config,
                None => namespaces.push(config),
            }
        }
    }

    /// Sets the doorbell page of later remote engines.
    pub(super) fn set_doorbells(&mut self, page: Arc<SharedPages>) {
        if let Some((config, _)) = &mut self.template {
            config.page = page;
        }
    }

    /// Returns the connections to all remote engines, one for each other worker.
    pub(super) fn links(&self) -> impl Iterator<Item = &Link> {
        self.links.iter()
    }

    /// Returns, for each remote engine, the number of orders sent to it so far.
    pub(crate) fn orders(&self) -> Vec<u64> {
        self.links.iter().map(|link| link.sent).collect()
    }

    /// Returns whether each remote engine has applied this many orders ([`Migration::orders`]).
    /// Engines created later began with the effect of those orders.
    pub(crate) fn has_applied(&self, orders: &[u64]) -> bool {
        let mut links = self.links.iter().zip(orders);
        links.all(|(link, order)| !link.is_open() || link.handled() >= *order)
    }

    pub fn any_queue(&self) -> bool {
        !self.cqs.is_empty() || !self.sqs.is_empty()
    }

    /// Sends an order to the remote engine with the index `link`.
    fn send(&mut self, link: usize, order: Order) {
        if let Some(link) = self.links.get_mut(link) {
            link.send(order);
        }
    }

    /// Sends an order to all remote engines.
    pub fn send_all(&mut self, order: impl Fn() -> Order) {
        for link in &mut self.links {
            link.send(order());
        }
    }

    /// Returns whether no remote engine has an outstanding command that can access removed guest
    /// memory.
    pub fn quiesced(&self) -> bool {
        let over = |link: &Link| link.progress.quiesced.load(Ordering::Acquire) >= link.unmap;
        self.links.iter().all(|link| !link.is_open() || over(link))
    }

    /// Returns whether all remote engines have stopped signalling removed interrupt receivers, and
    /// have applied the location of the controller memory buffer.
    pub fn receivers_settled(&self) -> bool {
        let over = |link: &Link| link.handled() >= link.receiver;
        self.links.iter().all(|link| !link.is_open() || over(link))
    }

    /// Begins a controller-level reset, which deletes all queues. Returns the number of the reset.
    pub fn next_epoch(&mut self) -> u64 {
        self.epoch += 1;
        self.cqs.clear();
        self.sqs.clear();
        self.migrating = None;
        self.configuring.clear();
        self.epoch
    }

    /// Returns whether no remote engine has outstanding commands from before the last controller
    /// reset.
    pub fn stopped(&self) -> bool {
        let over = |link: &Link| link.progress.stopped.load(Ordering::Acquire) >= self.epoch;
        self.links.iter().all(|link| !link.is_open() || over(link))
    }

    /// Marks all flushes as completed: after a reset has ended, none is in progress.
    pub fn reset_completed(&mut self) {
        self.flushed_own = self.flushes;
        self.flush_failed = None;
        for link in &mut self.links {
            link.flushed = self.flushes;
        }
    }

    /// Returns the waker of the other worker whose queue uses the doorbell at `index`; `None` for
    /// the controller's own worker. Call it after the doorbell value was stored.
    pub fn waker_of(&self, index: usize) -> Option<&Waker> {
        let qid = (index / 2) as u16;
        let link = if index.is_multiple_of(2) {
            self.sqs.get(&qid)?.link
        } else {
            self.cqs.get(&qid)?.link
        };
        Some(&self.links.get(link)?.waker)
    }

    /// Returns whether a queue is migrating to another engine.
    pub(super) fn is_migrating(&self) -> bool {
        self.migrating.is_some()
    }

    /// Requests that each round check whether waiting commands can proceed.
    pub fn wait(&mut self) {
        self.waiting = true;
    }

    fn link_of(&self, worker: u16) -> Option<usize> {
        self.links.iter().position(|link| link.worker == worker)
    }
}

impl Controller {
    /// Applies an order in every engine: in the controller's own at once, in remote engines when
    /// their workers receive the message.
    pub(crate) fn order_all(&mut self, order: impl Fn() -> Order) {
        // Only a change of memory can fail, see `change_memory`.
        let _ = self.engine.apply(order());
        self.migration.send_all(order);
    }

    /// Applies an order in the engine that `place` names: the own one directly, a remote one over
    /// its channel.
    pub(super) fn order(&mut self, place: QueueOwner, order: Order) {
        match place {
            QueueOwner::Own => {
                let _ = self.engine.apply(order);
            }
            QueueOwner::Remote(link) => self.migration.send(link, order),
        }
    }

    /// Sets the index of the controller's own worker, and the waker that remote engines use to wake
    /// it. Call it before any [`Controller::remote_engine`].
    pub fn set_worker(&mut self, worker: u16, waker: Waker) {
        self.wake_for_others(waker.clone());
        self.admin.management.set_waker(waker.clone());
        self.admin.erasure.set_waker(waker.clone());
        self.migration.own_worker = Some((worker, waker));
        for queue in &self.engine.stats.queues {
            queue.worker.set(worker.into());
        }
    }

    /// Creates an engine for another worker, which `waker` wakes. Once that worker has opened the
    /// engine, queues may migrate to it. Returns `None` when [`Controller::set_worker`] was not
    /// called, when that worker already has an engine, when [`ControllerConfig::workers`] are
    /// reached, or when a namespace uses pass-through to a device, which belongs to one thread.
    ///
    /// [`ControllerConfig::workers`]: crate::ControllerConfig::workers
    pub fn remote_engine(&mut self, worker: u16, waker: Waker) -> Option<RemoteEngineSetup> {
        let (own, own_waker) = self.migration.own_worker.clone()?;
        let share = self.migration.links.len() + 1;
        let passing = |ns: &crate::engine::Namespace| ns.passthrough.is_some();
        if worker == own
            || self.migration.link_of(worker).is_some()
            || self.engine.namespaces.iter().any(passing)
            || self.engine.slots.is_inheriting()
            || !self.prepare_records(share as u16)
        {
            return None;
        }
        let io = self.engine.stats.shares.get(share)?.clone();
        let (config, namespaces) = self.migration.template.clone()?;
        let (orders, theirs) = channel();
        let (reporter, reports) = sync_channel(REPORTS);
        let progress = Arc::<Progress>::default();
        progress
            .stopped
            .store(self.migration.epoch, Ordering::Relaxed);
        let mut link = Link {
            worker,
            orders,
            reports,
            waker,
            progress: progress.clone(),
            sent: 0,
            unmap: 0,
            receiver: 0,
            flushed: self.migration.flushes,
            namespaces: 0,
        };
        // Orders that bring the new engine into the state of the earlier ones.
        for order in self.engine.catch_up() {
            link.send(order);
        }
        self.migration.links.push(link);
        Some(RemoteEngineSetup {
            config: EngineConfig {
                share: share as u16,
                io,
                ..config
            },
            namespaces,
            connection: Connection {
                orders: theirs,
                reports: reporter,
                progress,
                controller: own_waker,
                mapped_doorbells: self.config.mapped_doorbells,
                epoch: self.migration.epoch,
            },
        })
    }

    /// Returns whether queues may migrate to that worker: its engine is open. `None` while the
    /// engine is being opened.
    pub fn has_remote_engine(&self, worker: u16) -> Option<bool> {
        let link = self.migration.link_of(worker);
        let Some(link) = link.and_then(|link| self.migration.links.get(link)) else {
            return Some(false);
        };
        match link.progress.state.load(Ordering::Acquire) {
            OPENING => None,
            state => Some(state == OPEN),
        }
    }

    /// Handles the reports of remote engines. Call it when messages woke this worker. Returns
    /// whether there was anything to do.
    pub fn drain_messages(&mut self) -> bool {
        // A remote engine that had not received the new interrupt receiver may have set the
        // interrupt pending. The receiver is known now.
        self.engine.irqs.deliver_pending();
        let (mut worked, mut more) = (self.take_inbox(), false);
        // The pool or a format store may have answered.
        worked |= self.admin.management.is_running() || self.admin.erasure.is_running();
        for at in 0..self.migration.links.len() {
            let mut count = 0;
            while count < REPORTS_PER_DRAIN
                && let Some(link) = self.migration.links.get(at)
                && let Ok(report) = link.reports.try_recv()
            {
                count += 1;
                if report.epoch == self.migration.epoch {
                    self.reported(at, report);
                }
            }
            worked |= count > 0;
            more |= count == REPORTS_PER_DRAIN;
        }
        if more && let Some((_, waker)) = &self.migration.own_worker {
            waker.wake_by_ref();
        }
        self.settle();
        worked
    }

    fn reported(&mut self, at: usize, report: EngineReport) {
        self.touch();
        match report.event {
            Event::SqDrained(qid) => {
                self.migration.sq_gone(qid);
                self.sq_deleted(qid);
            }
            Event::Flushed { number, failed } => {
                self.flush_completed(QueueOwner::Remote(at), number, failed);
            }
            Event::Marking(marking) => self.change_marks(QueueOwner::Remote(at), *marking),
            event => self.event(event),
        }
    }

    /// Advances a migration, and the commands that wait for remote engines. Returns whether there
    /// was anything to do.
    #[inline]
    pub(super) fn advance_if_migrating(&mut self) -> bool {
        (self.is_migration_busy() || (self.migration.any_queue() && self.engine.irqs.pin_based()))
            && self.advance_migrations()
    }

    /// Returns whether a queue is migrating, or admin commands wait. Each round then checks whether
    /// they can proceed.
    #[inline]
    fn is_migration_busy(&self) -> bool {
        self.migration.is_migrating() || self.admission.is_waiting() || self.migration.waiting
    }

    #[cold]
    pub(super) fn advance_migrations(&mut self) -> bool {
        let mut worked = self.advance_migration();
        if self.migration.waiting {
            worked |= self.end_configuring();
            worked |= self.answer_others();
            worked |= self.end_waiting_marks();
            let migration = &self.migration;
            let waiting =
                !migration.configuring.is_empty() || self.owes_answers() || self.marks.is_waiting();
            self.migration.waiting = waiting;
        }
        worked |= self.release_held();
        // The level of the INTx pin depends on all queues, so they return to this engine.
        if self.engine.irqs.pin_based()
            && !self.is_migration_busy()
            && let Some((&cqid, _)) = self.migration.cqs.first_key_value()
        {
            worked |= self.begin_migration(cqid, QueueOwner::Own);
        }
        worked
    }
}
