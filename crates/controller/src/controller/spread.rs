//! Queues on other workers, as the control half sees them: where each lives, what its worker was told, and how a queue
//! goes from one worker to another.
//!
//! A move has one owner at each moment. The engine that has the queue lets it go (`Engine::leave`), hands it to the control
//! half, and that hands it on at once. An admin command about queues never meets one that is on its way: the move is
//! called off, and the command held until it is known on which side the queue ended up.

use super::Controller;
use super::lifecycle::{Shutdown, State};
use crate::bell::Bell;
use crate::branch::{BranchSeed, OPEN, OPENING, Order, Parts, Progress, Report};
use crate::config::NamespaceConfig;
use crate::engine::{EngineConfig, Event, Parcel, Sq};
use crate::irq::IrqSink;
use nvme::{AdminOpcode, Command, Status};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::time::{Duration, Instant};

/// Reports of one branch that may be under way.
const REPORTS: usize = 64;
/// Of these, so many are heard at a time: there is more to do than to listen to a host's errors.
const HEARD: usize = 32;
/// Orders of one branch that may be under way before admin commands wait for it.
const ORDERS: u64 = 256;
/// A queue whose commands in flight take longer than this stays where it is: nothing is fetched from it meanwhile.
const PATIENCE: Duration = Duration::from_millis(50);

/// The control half's end of a branch.
struct Link {
    worker: u16,
    orders: Sender<Order>,
    reports: Receiver<Report>,
    bell: Arc<Bell>,
    progress: Arc<Progress>,
    /// Orders given.
    sent: u64,
    /// Of these, the last one that took memory away.
    unmap: u64,
    /// And the last one about a receiver of interrupts.
    receiver: u64,
    /// The last flush that it has answered.
    flushed: u64,
}

impl Link {
    fn send(&mut self, order: Order) {
        // A branch that could not be opened has no queues and hears nothing.
        if self.orders.send(order).is_ok() {
            self.sent += 1;
            self.bell.ring();
        }
    }

    /// It may have queues and commands.
    fn is_open(&self) -> bool {
        self.progress.state.load(Ordering::Acquire) == OPEN
    }

    fn handled(&self) -> u64 {
        self.progress.handled.load(Ordering::Acquire)
    }
}

/// A completion queue that lives elsewhere.
struct RemoteCq {
    link: usize,
    /// Submission queues that complete there.
    users: u16,
}

/// A submission queue that lives elsewhere.
struct RemoteSq {
    link: usize,
    cqid: u16,
}

/// Where a queue lives: with the control half, or with a branch.
type Place = Option<usize>;

struct Move {
    cqid: u16,
    from: Place,
    to: Place,
    since: Instant,
    /// It was called off.
    off: bool,
}

/// The control half's knowledge of its branches.
#[derive(Default)]
pub(crate) struct Spread {
    links: Vec<Link>,
    /// This controller's own worker.
    home: Option<(u16, Arc<Bell>)>,
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
    flushed_here: u64,
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

    pub fn cq_exists(&self, qid: u16) -> bool {
        self.cqs.contains_key(&qid)
    }

    pub fn sq_exists(&self, qid: u16) -> bool {
        self.sqs.contains_key(&qid)
    }

    pub fn cq_in_use(&self, qid: u16) -> bool {
        self.cqs.get(&qid).is_some_and(|cq| cq.users > 0)
    }

    /// Tells one branch.
    fn tell(&mut self, link: usize, order: Order) {
        if let Some(link) = self.links.get_mut(link) {
            link.send(order);
        }
    }

    /// Tells all of them.
    pub fn tell_all(&mut self, order: impl Fn() -> Order) {
        for link in &mut self.links {
            link.send(order());
        }
    }

    /// Tells all of them to take memory away.
    pub fn unmap(&mut self, order: impl Fn() -> Order) {
        for link in &mut self.links {
            link.send(order());
            link.unmap = link.sent;
        }
    }

    /// No branch has a command in flight that can touch memory that was taken away.
    pub fn quiesced(&self) -> bool {
        let over = |link: &Link| link.progress.quiesced.load(Ordering::Acquire) >= link.unmap;
        self.links.iter().all(|link| !link.is_open() || over(link))
    }

    /// Tells all of them who receives a vector's interrupts.
    pub fn set_vector(&mut self, vector: u16, sink: &Option<Arc<dyn IrqSink>>) {
        for link in &mut self.links {
            link.send(Order::Vector(vector, sink.clone()));
            link.receiver = link.sent;
        }
    }

    /// No branch signals receivers any more that were taken away.
    pub fn receivers_settled(&self) -> bool {
        let over = |link: &Link| link.handled() >= link.receiver;
        self.links.iter().all(|link| !link.is_open() || over(link))
    }

    /// Nothing of before the last reset is in flight on any branch.
    pub fn stopped(&self) -> bool {
        let over = |link: &Link| link.progress.stopped.load(Ordering::Acquire) >= self.epoch;
        self.links.iter().all(|link| !link.is_open() || over(link))
    }

    /// A controller-level reset begins.
    pub fn stop(&mut self) {
        self.epoch += 1;
        self.cqs.clear();
        self.sqs.clear();
        self.moving = None;
        self.held.clear();
        self.configuring.clear();
        let epoch = self.epoch;
        self.tell_all(|| Order::Stop(epoch));
    }

    /// It is over: no flush is under way either.
    pub fn reset_over(&mut self) {
        self.flushed_here = self.flushes;
        self.flush_failed = None;
        for link in &mut self.links {
            link.flushed = self.flushes;
        }
    }

    /// Deletes a submission queue of a branch. `false` when there is no such queue.
    pub fn delete_sq(&mut self, qid: u16) -> bool {
        let Some(link) = self.sqs.get(&qid).map(|sq| sq.link) else {
            return false;
        };
        self.tell(link, Order::DeleteSq(qid));
        true
    }

    /// Deletes a completion queue of a branch. `false` when there is no such queue.
    pub fn delete_cq(&mut self, qid: u16) -> bool {
        let Some(cq) = self.cqs.remove(&qid) else {
            return false;
        };
        self.tell(cq.link, Order::DeleteCq(qid));
        true
    }

    /// Aborts a command of a branch's queue. `false` when there is no such queue.
    pub fn abort(&mut self, sqid: u16, cid: u16) -> bool {
        let Some(link) = self.sqs.get(&sqid).map(|sq| sq.link) else {
            return false;
        };
        self.tell(link, Order::Abort { sqid, cid });
        true
    }

    /// A submission queue of a branch is gone.
    fn sq_gone(&mut self, qid: u16) {
        if let Some(sq) = self.sqs.remove(&qid)
            && let Some(cq) = self.cqs.get_mut(&sq.cqid)
        {
            cq.users = cq.users.saturating_sub(1);
        }
    }

    /// The bell of the worker that a doorbell's queue lives on, if that is another one: to be rung after the doorbell was
    /// stored.
    pub fn bell_of(&self, index: usize) -> Option<&Bell> {
        let qid = (index / 2) as u16;
        let link = if index.is_multiple_of(2) {
            self.sqs.get(&qid)?.link
        } else {
            self.cqs.get(&qid)?.link
        };
        Some(&self.links.get(link)?.bell)
    }

    /// Something goes on that wants a look in every round.
    #[inline]
    fn is_busy(&self) -> bool {
        self.moving.is_some() || !self.held.is_empty() || !self.configuring.is_empty()
    }

    /// A branch has so many orders before it that no admin command may give more.
    fn is_behind(&self) -> bool {
        let behind = |link: &Link| link.is_open() && link.sent > link.handled() + ORDERS;
        self.links.iter().any(behind)
    }

    fn link_of(&self, worker: u16) -> Option<usize> {
        self.links.iter().position(|link| link.worker == worker)
    }
}

/// Whether the command may look at queues, or change them.
fn concerns_queues(command: &Command) -> bool {
    matches!(
        command.admin_opcode(),
        AdminOpcode::CREATE_IO_CQ
            | AdminOpcode::CREATE_IO_SQ
            | AdminOpcode::DELETE_IO_CQ
            | AdminOpcode::DELETE_IO_SQ
            | AdminOpcode::ABORT
            | AdminOpcode::DOORBELL_BUFFER_CONFIG
            | AdminOpcode::SET_FEATURES
    )
}

impl Controller {
    // ---- for the owner

    /// Names this controller's worker, and says how its branches wake it. To be called before any [`Controller::branch`].
    pub fn set_home(&mut self, worker: u16, bell: Arc<Bell>) {
        self.spread.home = Some((worker, bell));
        for queue in &self.engine.stats.queues {
            queue.worker.set(worker.into());
        }
    }

    /// Makes a branch for another worker, whose bell this is. Once it is opened there, queues may go to it. `None` when that
    /// cannot be: no home was named, there is a branch for that worker already, [`ControllerConfig::workers`] are reached,
    /// or a namespace has a direct path to a device, which belongs to one thread.
    ///
    /// [`ControllerConfig::workers`]: crate::ControllerConfig::workers
    pub fn branch(&mut self, worker: u16, bell: Arc<Bell>) -> Option<BranchSeed> {
        let (home, home_bell) = self.spread.home.clone()?;
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
            bell,
            progress: progress.clone(),
            sent: 0,
            unmap: 0,
            receiver: 0,
            flushed: self.spread.flushes,
        };
        // What it has missed.
        for window in self.engine.dma.windows() {
            link.send(Order::Map {
                iova: window.iova,
                len: window.len,
                backing: window.backing,
                prot: window.prot,
            });
        }
        for (vector, sink) in self.engine.irqs.sinks() {
            link.send(Order::Vector(vector, Some(sink)));
        }
        link.send(Order::Features {
            write_cache: self.engine.write_cache,
            coalescing: self.engine.coalescing,
        });
        link.send(Order::Enable {
            page_size: self.engine.page_size,
        });
        if let Some((shadow, eventidx)) = self.engine.shadow_buffers() {
            link.send(Order::Shadow { shadow, eventidx });
        }
        if self.engine.halted() {
            link.send(Order::StopFetching);
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
                home: home_bell,
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

    fn send_queue(&mut self, cqid: u16, to: Place) -> bool {
        let spread = &mut self.spread;
        if cqid == 0
            || spread.is_busy()
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

    /// Hears the branches. To be called when this worker's [`Bell`] was rung. Returns whether there was anything.
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
        if more && let Some((_, bell)) = &self.spread.home {
            bell.ring();
        }
        heard
    }

    fn reported(&mut self, at: usize, report: Report) {
        match report.event {
            Event::SqDrained(qid) => {
                self.spread.sq_gone(qid);
                self.sq_deleted(qid);
            }
            Event::Flushed { failed } => {
                // Not one that a reset has waited for already, though it was told of only afterwards.
                if let Some(link) = self.spread.links.get_mut(at)
                    && report.flush > link.flushed
                {
                    link.flushed = report.flush;
                    self.flush_answered(failed);
                }
            }
            event => self.event(event),
        }
    }

    // ---- for the rounds

    /// Goes on with moves, and with commands that wait for branches. Returns whether there was anything.
    #[inline]
    pub(super) fn tend(&mut self) -> bool {
        (self.spread.is_busy() || (self.spread.any_queue() && self.engine.irqs.pin_based()))
            && self.tend_busy()
    }

    #[cold]
    fn tend_busy(&mut self) -> bool {
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
        let configuring = std::mem::take(&mut self.spread.configuring);
        for (cid, wanted) in configuring {
            let links = self.spread.links.iter().zip(&wanted);
            if links
                .clone()
                .all(|(link, wanted)| !link.is_open() || link.handled() >= *wanted)
            {
                self.engine.finish(0, cid, Status::SUCCESS, 0);
                worked = true;
            } else {
                self.spread.configuring.push((cid, wanted));
            }
        }
        while let Some(command) = self.spread.held.front().copied()
            && !self.must_hold(&command)
        {
            self.spread.held.pop_front();
            self.admin_command(&command);
            worked = true;
        }
        // The pin's level is decided by looking at all queues in one place.
        if self.engine.irqs.pin_based()
            && !self.spread.is_busy()
            && let Some((&cqid, _)) = self.spread.cqs.first_key_value()
        {
            worked |= self.send_queue(cqid, None);
        }
        worked
    }

    /// When [`Controller::tend`] has something to do though nothing happens.
    pub(super) fn move_deadline(&self) -> Option<Instant> {
        let moving = self.spread.moving.as_ref().filter(|moving| !moving.off)?;
        Some(moving.since + PATIENCE)
    }

    fn must_hold(&self, command: &Command) -> bool {
        (self.spread.moving.is_some() && concerns_queues(command)) || self.spread.is_behind()
    }

    /// Runs an admin command, or holds it until no queue that it may be about is on its way.
    pub(super) fn admin_or_hold(&mut self, command: &Command) {
        if self.spread.held.is_empty() && !self.must_hold(command) {
            return self.admin_command(command);
        }
        self.spread.held.push_back(*command);
        self.call_off();
        self.tend_busy();
    }

    /// The queue that is on its way stays where it is, unless it has left already.
    fn call_off(&mut self) {
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

    pub(super) fn queue_stayed(&mut self) {
        self.spread.moving = None;
    }

    /// Hands a queue that has left one engine to the next.
    pub(super) fn queue_left(&mut self, parcel: Box<Parcel>) {
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

    // ---- for the admin commands

    /// Creates a submission queue where its completion queue is. `false` when the queue's memory is not there.
    pub(crate) fn create_sq(&mut self, qid: u16, cqid: u16, iova: u64, size: u32) -> bool {
        let Some(cq) = self.spread.cqs.get_mut(&cqid) else {
            self.place(qid, None);
            return self.engine.create_sq(qid, cqid, iova, size);
        };
        let Some(sq) = self.engine.make_sq(qid, cqid, iova, size) else {
            return false;
        };
        cq.users += 1;
        let link = cq.link;
        self.spread.sqs.insert(qid, RemoteSq { link, cqid });
        self.place(qid, Some(link));
        let sq: Box<Sq> = Box::new(sq.detached());
        self.spread.tell(link, Order::InstallSq(qid, sq));
        true
    }

    fn place(&self, qid: u16, place: Place) {
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

    /// Doorbell Buffer Config in all engines. `None` when a buffer's memory is not there; else whether it is done: if not, the
    /// command completes when every branch has followed.
    pub(crate) fn configure_shadow(
        &mut self,
        cid: u16,
        shadow: u64,
        eventidx: u64,
    ) -> Option<bool> {
        if !self.engine.configure_shadow(shadow, eventidx) {
            return None;
        }
        let spread = &mut self.spread;
        spread.tell_all(|| Order::Shadow { shadow, eventidx });
        if !spread.any_queue() {
            return Some(true);
        }
        let wanted = spread.links.iter().map(|link| link.sent).collect();
        spread.configuring.push((cid, wanted));
        Some(false)
    }

    /// Hands the engines what they need of the features.
    pub(crate) fn apply_features(&mut self) {
        self.admin.features.apply(&mut self.engine);
        let (write_cache, coalescing) = (self.engine.write_cache, self.engine.coalescing);
        self.spread.tell_all(|| Order::Features {
            write_cache,
            coalescing,
        });
    }

    /// Flushes every namespace, in every engine: each waits for its own commands in flight, and flushes what they wrote.
    pub(crate) fn flush_everywhere(&mut self) {
        self.spread.flushes += 1;
        let number = self.spread.flushes;
        self.spread.tell_all(|| Order::Flush(number));
        self.engine.flush_all();
    }

    /// This engine's flushes are over.
    pub(super) fn flushed_here(&mut self, failed: Option<Status>) {
        self.spread.flushed_here = self.spread.flushes;
        self.flush_answered(failed);
    }

    fn flush_answered(&mut self, failed: Option<Status>) {
        let spread = &mut self.spread;
        if let Some(status) = failed {
            spread.flush_failed.get_or_insert(status);
        }
        let flushes = spread.flushes;
        let over = |link: &Link| !link.is_open() || link.flushed >= flushes;
        if spread.flushed_here == flushes && spread.links.iter().all(over) {
            let failed = spread.flush_failed.take();
            self.flushed();
            self.cache_flushed(failed);
        }
    }
}
