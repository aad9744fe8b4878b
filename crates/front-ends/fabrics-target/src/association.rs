//! Association of a host: a controller with an Admin queue connection and I/O queue connections, as
//! a front-end of a worker.
//!
//! The controller is the same as for guests, with queues in memory of this process. A command
//! capsule becomes a submission queue entry, and a completion queue entry becomes a response
//! capsule. This module handles the fabrics part: Connect, properties, keep-alive, and the ANA
//! state of the namespaces.

mod frontend;
mod io_queues;

use crate::authentication::AuthResult;
use crate::decide::{Register, create, decide_io, delete};
use crate::handshake::{Connected, invalid};
use crate::link::{ConnectionEnd, Link};
use crate::memory::{AssociationMemory, BASE, PAGE};
use crate::queue::{Phase, Queue, QueueContext};
use crate::rings;
use crate::slots::QueueStep;
use crate::target::{AssociationMessage, Reservation, Target};
use controller::{Controller, ControllerConfig, ControllerStats, FabricsConfig, KeepAlive};
use dma::Prot;
use nvme::fabrics::{self, SQHD_NO_FLOW_CONTROL, status};
use nvme::regs::{self, Aqa, Cc, Csts};
use nvme::{AdminOpcode, Command, Completion, Status};
use nvme_tcp::ADMIN_IN_CAPSULE;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};
use volume::{Budget, Inbox, RingStreams};
use worker::{Context, Descriptors, Frontend};

/// Maximum number of entries of an association's Admin queue.
const ADMIN_ENTRIES: u16 = 64;
/// Time limit for a host to enable its controller after connecting.
const ENABLING: Duration = Duration::from_secs(120);
const NOT_PROVEN: &str = "the host did not authenticate in time";
/// Interval of checks on whether a controller that is ending is idle.
const ENDING_LOOK: Duration = Duration::from_millis(10);

/// Reason why an association of a host with a controller could not be created.
#[derive(Debug, thiserror::Error)]
pub enum AssociationError {
    /// The controller cannot be created.
    #[error(transparent)]
    Controller(#[from] controller::ConfigError),
    /// Memory for the data of the association's commands cannot be mapped.
    #[error("no memory for the commands of a host: {0}")]
    Memory(dma::MapError),
    /// The worker's ring could not be used for the connections.
    #[error(transparent)]
    Ring(#[from] volume::VolumeError),
    /// A descriptor could not be created or duplicated.
    #[error("a connection's descriptor: {0}")]
    Descriptor(rustix::io::Errno),
    /// The kernel has returned no random numbers.
    #[error("no random numbers: {0}")]
    Random(std::io::Error),
    /// The inbox of the association could not be created.
    #[error("no event descriptor: {0}")]
    Event(std::io::Error),
}

impl From<rustix::io::Errno> for AssociationError {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Descriptor(error)
    }
}

impl From<dma::MapError> for AssociationError {
    fn from(error: dma::MapError) -> Self {
        Self::Memory(error)
    }
}

/// A new association: the Connect command of its Admin queue has arrived and waits for an answer.
///
/// Dropping it without calling [`NewAssociation::make`] answers the host with an error.
#[derive(Debug)]
pub struct NewAssociation {
    target: Arc<Target>,
    /// Connection of the Admin queue, and the reserved place; `None` after the association was
    /// created.
    made_of: Option<(Box<Connected>, Reservation)>,
}

impl NewAssociation {
    pub(crate) const fn new(
        target: Arc<Target>,
        connected: Box<Connected>,
        reservation: Reservation,
    ) -> Self {
        Self {
            target,
            made_of: Some((connected, reservation)),
        }
    }

    /// Returns the NQN of the host.
    pub fn hostnqn(&self) -> &str {
        let made_of = self.made_of.as_ref();
        made_of.map_or("", |(connected, _)| &connected.hostnqn)
    }

    /// Creates the association on the worker that will serve it.
    ///
    /// # Errors
    /// [`AssociationError`] when a resource is missing; the host's Connect then fails.
    pub fn make(mut self, context: &Context<'_>) -> Result<Association, AssociationError> {
        let Some((connected, reservation)) = self.made_of.take() else {
            // Unreachable: only this method takes the value, and it consumes `self`.
            return Err(rustix::io::Errno::BADF.into());
        };
        match AssociationParts::new(&self.target, &connected, &reservation, context) {
            Ok(parts) => Ok(Association::new(
                parts,
                self.target.clone(),
                *connected,
                reservation,
            )),
            Err(error) => {
                self.made_of = Some((connected, reservation));
                Err(error)
            }
        }
    }
}

impl Drop for NewAssociation {
    fn drop(&mut self) {
        if let Some((connected, _)) = &self.made_of {
            connected.refuse(status::CONNECT_CONTROLLER_BUSY, 0);
            self.target.stats().refused.count();
        }
    }
}

/// Resources of an association that is being created, which are released on failure.
struct AssociationParts {
    controller: Controller,
    pool: AssociationMemory,
    admin: Queue,
    inbox: Arc<Inbox<AssociationMessage>>,
    streams: RingStreams,
    descriptors: Descriptors,
}

impl AssociationParts {
    fn new(
        target: &Target,
        connected: &Connected,
        reservation: &Reservation,
        context: &Context<'_>,
    ) -> Result<Self, AssociationError> {
        let limits = target.config.limits;
        let queues = limits.queues + 1;
        let capsule = limits.in_capsule.max(ADMIN_IN_CAPSULE).div_ceil(PAGE);
        let data = reservation.memory().div_ceil(PAGE);
        let pool =
            AssociationMemory::new(rings::PAGES * u32::from(queues), (queues, capsule), data)?;
        let config = ControllerConfig {
            cntlid: reservation.cntlid(),
            subnqn: Some(target.config.nqn.clone()),
            io_queues: limits.queues,
            // The rings are larger than the host's queues; hosts see a smaller maximum in CAP.
            queue_entries: rings::MAX_QUEUE_ENTRIES.into(),
            shadow_doorbells: false,
            mapped_doorbells: false,
            workers: 1,
            fabrics: Some(FabricsConfig {
                in_capsule: limits.in_capsule,
                queue_entries: limits.entries,
                ana: target.ana.clone(),
            }),
            ..target.config.controller.clone()
        };
        let namespaces = target.config.namespaces.clone();
        let mut controller = Controller::new(context.owner, config, namespaces, context.io)?;
        let command = nvme::pci::command::MEMORY_SPACE | nvme::pci::command::BUS_MASTER;
        controller.config_write(nvme::pci::COMMAND as u64, &command.to_le_bytes());
        let memory = pool.memory().clone();
        let len = memory.len() as u64;
        controller.dma_map(BASE, len, Some((memory, 0)), Prot::RW)?;
        let streams = context.io.streams()?;
        let inbox = Inbox::new(context.io).map_err(AssociationError::Event)?;
        let fd = rustix::io::fcntl_dupfd_cloexec(&connected.fd, 0)?;
        let link = Link::new(&streams, &context.descriptors, 0, fd, connected.limits)?;
        let entries = connected
            .connect
            .sqsize_z
            .saturating_add(1)
            .clamp(2, ADMIN_ENTRIES);
        let mut admin = Queue::new(link, &connected.limits, 0, entries, ADMIN_IN_CAPSULE, true);
        let proof = target.proof(&connected.hostnqn, Instant::now());
        admin.proof = proof.map_err(AssociationError::Random)?;
        Ok(Self {
            controller,
            pool,
            admin,
            inbox,
            streams,
            descriptors: context.descriptors.clone(),
        })
    }
}

/// Phase in the life of an association.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AssociationState {
    Open,
    /// The controller is being reset for the last time.
    Ending,
    Over,
}

/// Association of a host with a controller: the controller, its queues and connections.
pub struct Association {
    target: Arc<Target>,
    cntlid: u16,
    hostnqn: String,
    peer: Option<SocketAddr>,
    controller: Controller,
    pool: AssociationMemory,
    admin: Queue,
    io: Vec<Queue>,
    /// Connections of new I/O queues that wait until the controller can create their rings.
    early: Vec<Connected>,
    inbox: Arc<Inbox<AssociationMessage>>,
    streams: RingStreams,
    descriptors: Descriptors,
    /// Value of the property CC that the host has written last.
    cc: Cc,
    keep_alive: KeepAlive,
    began: Instant,
    /// Whether the controller is being reset while the Admin queue stays connected.
    resetting: bool,
    life: AssociationState,
    /// Whether the association counts among those of authenticated hosts.
    is_admitted: bool,
    flushing: bool,
    now: Instant,
    /// Empty list of completions of the association's own commands, kept to reuse its memory.
    own: Vec<(u16, QueueStep, Status)>,
}

impl std::fmt::Debug for Association {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Association")
            .field("cntlid", &self.cntlid)
            .field("hostnqn", &self.hostnqn)
            .field("life", &self.life)
            .finish_non_exhaustive()
    }
}

impl Association {
    /// Returns the controller ID of the association.
    pub const fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// Sets the worker that serves the association, and its waker.
    pub fn set_worker(&mut self, worker: u16, waker: Waker) {
        self.controller.set_worker(worker, waker);
    }

    fn new(
        parts: AssociationParts,
        target: Arc<Target>,
        connected: Connected,
        reservation: Reservation,
    ) -> Self {
        let now = Instant::now();
        let AssociationParts {
            controller,
            pool,
            mut admin,
            inbox,
            streams,
            descriptors,
        } = parts;
        let hostnqn = connected.hostnqn;
        let cntlid = reservation.cntlid();
        target.enter(cntlid, &inbox);
        reservation.using();
        target.stats().connections.count();
        let peer = rustix::net::getpeername(&connected.fd).ok().flatten();
        let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
        let timeout = Duration::from_millis(connected.connect.kato.into());
        let answer = fabrics::Connected::new()
            .with_cntlid(cntlid)
            .with_atr(!admin.proof.is_given());
        admin.answer(connected.cid, Status::SUCCESS, answer.into_bits().into());
        target.log.connected.line(|left_out| {
            let from = peer.map(|peer| peer.to_string()).unwrap_or_default();
            tracing::info!(
                left_out,
                cntlid,
                host = hostnqn,
                from,
                "a host has connected"
            );
        });
        Self {
            target,
            cntlid,
            hostnqn,
            peer,
            controller,
            pool,
            admin,
            io: Vec::new(),
            early: Vec::new(),
            inbox,
            streams,
            descriptors,
            cc: Cc::new(),
            keep_alive: KeepAlive::new(timeout, now),
            began: now,
            resetting: false,
            life: AssociationState::Open,
            is_admitted: false,
            flushing: false,
            now,
            own: Vec::new(),
        }
    }

    /// Returns the controller's counters.
    pub fn stats(&self) -> Arc<ControllerStats> {
        self.controller.stats()
    }

    /// Returns the NQN of the host, and the address of its Admin queue's connection.
    pub fn host(&self) -> (&str, Option<SocketAddr>) {
        (&self.hostnqn, self.peer)
    }

    fn max_transfer(&self) -> u32 {
        4096u32 << self.controller.config().mdts.min(13)
    }

    // ---- the Admin queue

    fn read_admin(&mut self) -> Result<bool, ConnectionEnd> {
        let max_transfer = self.max_transfer();
        let mut register = Register {
            cc: &mut self.cc,
            keep_alive: &mut self.keep_alive,
            now: self.now,
            io: &self.io,
            written: false,
            entries: self.target.config.limits.entries,
        };
        let mut around = QueueContext {
            controller: &mut self.controller,
            pool: &mut self.pool,
            max_transfer,
            prover: self.target.prover.as_ref(),
            inbox: &self.inbox,
        };
        let resetting = self.resetting;
        let decide = |command: &Command, controller: &mut Controller| {
            register.decide(command, controller, resetting)
        };
        let worked = self.admin.read(&mut around, decide)?;
        if let Some(why) = self.admin.refusal.take() {
            self.target.not_proven(&self.hostnqn, self.peer, &why);
        }
        if register.written {
            self.write_cc();
        }
        Ok(worked)
    }

    /// Handles a new value of the property CC, which enables, disables or shuts down the
    /// controller.
    fn write_cc(&mut self) {
        // The host's memory page size does not matter, because pages are in this process.
        let new = self.cc.with_mps(0);
        let mut bytes = [0; 4];
        self.controller.bar0_read(regs::CC, &mut bytes);
        let old = Cc::from_bits(u32::from_le_bytes(bytes));
        if old.en() && !new.en() {
            // Disabling the controller removes all I/O queues.
            let why = ConnectionEnd::Refused("the controller was disabled");
            self.io
                .iter_mut()
                .for_each(|queue| queue.close(&why, &mut self.pool));
            self.resetting = true;
        }
        if !old.en() && new.en() {
            let Self {
                admin, controller, ..
            } = self;
            admin.rings.reset(self.pool.memory());
            let entries_z = admin.rings.entries() - 1;
            let aqa = Aqa::new().with_asqs_z(entries_z).with_acqs_z(entries_z);
            controller.bar0_write(regs::AQA, &aqa.into_bits().to_le_bytes());
            controller.bar0_write(regs::ASQ, &admin.rings.sq().to_le_bytes());
            controller.bar0_write(regs::ACQ, &admin.rings.cq().to_le_bytes());
        }
        self.controller
            .bar0_write(regs::CC, &new.into_bits().to_le_bytes());
        self.after_reset();
    }

    /// Handles the end of a reset, after which the controller has no commands and no I/O queues.
    fn after_reset(&mut self) {
        if !self.resetting || self.controller.is_resetting() {
            return;
        }
        self.resetting = false;
        self.admin.forget_started(&mut self.pool);
        for queue in &mut self.io {
            if queue.phase != Phase::Gone {
                queue.phase = Phase::Gone;
            }
        }
    }

    // ---- rounds

    /// Sends the controller's completions to the host as response capsules. Returns whether there
    /// were any.
    fn respond(&mut self) -> bool {
        let max_transfer = self.max_transfer();
        let mut own = std::mem::take(&mut self.own);
        let mut around = QueueContext {
            controller: &mut self.controller,
            pool: &mut self.pool,
            max_transfer,
            prover: self.target.prover.as_ref(),
            inbox: &self.inbox,
        };
        let mut worked = false;
        for queue in &mut self.io {
            if queue.phase != Phase::Gone {
                worked |= queue.reap(&mut around, &mut own);
            }
        }
        if !self.resetting {
            worked |= self.admin.reap(&mut around, &mut own);
        }
        for (qid, step, status) in own.drain(..) {
            self.answered(qid, step, status);
        }
        self.own = own;
        self.admin.rings.ring(&mut self.controller);
        for queue in &mut self.io {
            worked |= queue.send();
        }
        worked | self.admin.send()
    }

    /// Ends the association and all its connections, for the reason `why`.
    fn end(&mut self, why: &ConnectionEnd) {
        if self.life != AssociationState::Open {
            return;
        }
        self.life = AssociationState::Ending;
        self.target.log.ended.line(|left_out| {
            let (cntlid, host) = (self.cntlid, &self.hostnqn);
            tracing::info!(left_out, cntlid, host, "a host's association ends: {why}");
        });
        self.admin.close(why, &mut self.pool);
        for queue in &mut self.io {
            queue.close(why, &mut self.pool);
        }
        self.early.clear();
        self.inbox.close();
        self.target.leave(self.cntlid);
        self.resetting = true;
        self.controller.bar0_write(regs::CC, &0u32.to_le_bytes());
        self.after_reset();
    }

    fn go_on_ending(&mut self) -> bool {
        self.after_reset();
        self.admin.drain(&mut self.pool);
        self.end_queues();
        let over = !self.controller.is_resetting()
            && self.controller.is_drained()
            && self.io.is_empty()
            && self.admin.is_quiet();
        if over {
            self.admin.release(&mut self.pool);
            self.life = AssociationState::Over;
        }
        over
    }

    fn check_time(&mut self) {
        let since = |at: Instant| self.now.saturating_duration_since(at);
        let has_timeout = !self.keep_alive.timeout().is_zero();
        if self.keep_alive.has_expired(self.now) {
            self.end(&ConnectionEnd::Refused("no Keep Alive in time"));
        } else if self.has_waited(&self.admin) {
            self.end(&ConnectionEnd::Refused(NOT_PROVEN));
        } else if !self.cc.en() && since(self.began) >= ENABLING && !has_timeout {
            self.end(&ConnectionEnd::Refused(
                "its controller was not enabled in time",
            ));
        } else {
            let mut bytes = [0; 4];
            self.controller.bar0_read(regs::CSTS, &mut bytes);
            if Csts::from_bits(u32::from_le_bytes(bytes)).cfs() && self.cc.en() {
                self.end(&ConnectionEnd::Refused("its controller has failed"));
            }
        }
        for place in 0..self.io.len() {
            let late = self.io.get(place).is_some_and(|q| self.has_waited(q));
            if late && let Some(queue) = self.io.get_mut(place) {
                queue.close(&ConnectionEnd::Refused(NOT_PROVEN), &mut self.pool);
            }
        }
    }

    /// Returns whether the host of a queue has exceeded the time limit for authentication.
    fn has_waited(&self, queue: &Queue) -> bool {
        let limit = self.target.config.limits.handshake;
        let since = queue.proof.since();
        since.is_some_and(|since| self.now.saturating_duration_since(since) >= limit)
    }

    /// Counts the association among those of authenticated hosts, once the host has authenticated.
    fn admit(&mut self) {
        if self.is_admitted || !self.admin.proof.is_given() || self.life != AssociationState::Open {
            return;
        }
        self.is_admitted = true;
        if self.target.authenticated(self.cntlid).is_err() {
            let why = "its host has as many associations as it may have, or all places are taken";
            self.end(&ConnectionEnd::Refused(why));
        }
    }

    /// Handles the result of an authentication step for the command in slot `place` of queue `qid`.
    fn proven(&mut self, qid: u16, place: u16, outcome: AuthResult) {
        let max_transfer = self.max_transfer();
        let Self {
            target,
            controller,
            pool,
            admin,
            io,
            inbox,
            ..
        } = self;
        let mut around = QueueContext {
            controller,
            pool,
            max_transfer,
            prover: target.prover.as_ref(),
            inbox,
        };
        let mut queues = std::iter::once(admin).chain(io);
        if let Some(queue) = queues.find(|q| q.qid == qid && q.phase == Phase::Open) {
            queue.proven(place, outcome, &mut around);
        }
    }

    fn read_mail(&mut self) {
        for message in self.inbox.take() {
            match message {
                AssociationMessage::Connected(connected) => {
                    self.target.passed(self.cntlid);
                    self.arrive(*connected);
                }
                AssociationMessage::Proven {
                    qid,
                    place,
                    outcome,
                } => self.proven(qid, place, *outcome),
                AssociationMessage::State => self.controller.ana_changed(),
                AssociationMessage::Sizes => {
                    self.controller.check_sizes();
                }
                AssociationMessage::Displaced => self.end(&ConnectionEnd::Refused(
                    "displaced by a newer association before its host had authenticated",
                )),
                AssociationMessage::End => self.end(&ConnectionEnd::Refused(
                    "its subsystem is not served any more",
                )),
            }
        }
    }
}

impl Drop for Association {
    fn drop(&mut self) {
        self.inbox.close();
        self.target.leave(self.cntlid);
    }
}
