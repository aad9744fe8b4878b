//! Namespace Management and Namespace Attachment ("NVMe Base 2.1", 5.1.21 and 5.1.20): namespaces
//! that a host makes, of a pool ([`NamespacePool`]), one command after the other.
//!
//! | command | 1 | 2 | 3 |
//! |---|---|---|---|
//! | create | | the pool makes it | |
//! | attach | | the pool opens it, and keeps that it is attached | the engines open it |
//! | detach | no command finds it, those in flight end | the pool keeps that | |
//! | delete | the same, if it is attached | the pool removes it | |
//!
//! What is to be done is committed before the first step, and the pool's steps are in a later
//! round. So a process that dies leaves a command that the next one does again from its beginning:
//! each step names the namespace by its NGUID, and has no effect when it was done before. A reset
//! of the controller takes the host's interest away, but what was begun is done.
//!
//! Namespaces of the configuration are not the host's to delete or to detach: Operation Denied.

use super::{AdminResult, INVALID_FIELD, Outcome};
use crate::config::ConfigError;
use crate::controller::{Attach, Controller};
use crate::engine::Namespace;
use crate::pool::{NamespacePool, PoolChange, PoolError, PooledNamespace};
use crate::survival::state::{HeldCommand, ManagementState};
use nvme::cmd::NSID_BROADCAST;
use nvme::cmd::admin::Csi;
use nvme::cmd::namespace::{
    AttachmentCdw10, AttachmentSelect, ManagementCdw10, ManagementCdw11, ManagementSelect,
    NewNamespace,
};
use nvme::identify::{ControllerList, Dps, Nmic};
use nvme::{Command, Status};
use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::{Duration, Instant};
use sync::Unpoisoned;
use volume::Io;
use zerocopy::{FromZeros, IntoBytes};

/// After this time, commands in flight on a namespace that goes end early.
const GRACE: Duration = Duration::from_secs(5);
/// Between two looks at what does not tell of its end.
const LOOK: Duration = Duration::from_millis(2);

const DENIED: Status = Status::OPERATION_DENIED.with_dnr(true);
const CONTROLLERS: Status = Status::CONTROLLER_LIST_INVALID.with_dnr(true);
const INVALID_NAMESPACE: Status = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(true);

/// What a command is to do. Namespaces by their NGUIDs.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Task {
    Create {
        nsid: u32,
        blocks: u64,
        nguid: [u8; 16],
        shared: bool,
    },
    /// The first is at work.
    Delete(VecDeque<[u8; 16]>),
    Attach([u8; 16]),
    Detach([u8; 16]),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The task is to be committed.
    Begin,
    /// It is.
    Ready,
    /// Commands in flight on the namespace end, from this time on; early, if `true`.
    Leaving(Instant, bool),
    /// The pool is at work: the number of the change.
    Changing(u64),
    /// It is to be opened by all engines.
    Show,
    Showing,
    /// One of them could not.
    NotShown,
}

struct Running {
    /// The command, unless a reset was meanwhile.
    cid: Option<u16>,
    nsid: u32,
    task: Task,
    stage: Stage,
    failed: Option<Status>,
    /// What is to be deleted, as it was.
    before: Option<PooledNamespace>,
}

/// Ends of changes, by their numbers.
#[derive(Default)]
struct Answers {
    answers: Mutex<VecDeque<(u64, Result<(), PoolError>)>>,
    /// Wakes the controller's worker, once that is known.
    waker: Mutex<Option<Waker>>,
}

impl Answers {
    fn leave(&self, number: u64, result: Result<(), PoolError>) {
        self.answers.lock().unpoisoned().push_back((number, result));
        self.wake();
    }

    fn wake(&self) {
        if let Some(waker) = &*self.waker.lock().unpoisoned() {
            waker.wake_by_ref();
        }
    }

    /// The end of the change of this number; those before are forgotten.
    fn take(&self, number: u64) -> Option<Result<(), PoolError>> {
        let mut answers = self.answers.lock().unpoisoned();
        while let Some((answered, result)) = answers.pop_front() {
            if answered == number {
                return Some(result);
            }
        }
        None
    }
}

/// The command at work, and those that wait for it.
#[derive(Default)]
pub(crate) struct Management {
    running: Option<Running>,
    waiting: VecDeque<Command>,
    answers: Arc<Answers>,
    /// Of the last change.
    number: u64,
    /// When to look again.
    look: Option<Instant>,
}

impl Management {
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Commands without a completion.
    pub fn outstanding(&self) -> usize {
        let running = self.running.as_ref().and_then(|running| running.cid);
        usize::from(running.is_some()) + self.waiting.len()
    }

    /// A controller-level reset: no command waits any more.
    pub fn reset(&mut self) {
        self.waiting.clear();
        if let Some(running) = &mut self.running {
            running.cid = None;
        }
    }

    pub fn set_waker(&self, waker: Waker) {
        *self.answers.waker.lock().unpoisoned() = Some(waker);
    }

    pub fn save(&self) -> Option<ManagementState> {
        let running = self.running.as_ref();
        if running.is_none() && self.waiting.is_empty() {
            return None;
        }
        let mut state = ManagementState {
            waiting: self.waiting.iter().map(HeldCommand::new).collect(),
            ..ManagementState::default()
        };
        let Some(running) = running else {
            return Some(state);
        };
        state.cid = running.cid;
        state.nsid = running.nsid;
        state.failed = running.failed.map(Status::into_bits);
        let nguids = match &running.task {
            Task::Create {
                blocks,
                nguid,
                shared,
                ..
            } => {
                (state.task, state.blocks, state.shared) = (1, *blocks, *shared);
                nguid.to_vec()
            }
            Task::Delete(nguids) => {
                state.task = 2;
                nguids.iter().flatten().copied().collect()
            }
            Task::Attach(nguid) => {
                state.task = 3;
                nguid.to_vec()
            }
            Task::Detach(nguid) => {
                state.task = 4;
                nguid.to_vec()
            }
        };
        state.nguids = nguids;
        Some(state)
    }

    /// As [`Management::save`] said: from the beginning. `None`: there is no such task.
    pub fn restore(saved: &ManagementState) -> Option<Self> {
        let (nguids, rest) = saved.nguids.as_chunks::<16>();
        let task = match (saved.task, nguids) {
            (0, []) => None,
            (1, [nguid]) => Some(Task::Create {
                nsid: saved.nsid,
                blocks: saved.blocks,
                nguid: *nguid,
                shared: saved.shared,
            }),
            // None: of a pool that had none, when all of it was to be deleted.
            (2, _) => Some(Task::Delete(nguids.iter().copied().collect())),
            (3, [nguid]) => Some(Task::Attach(*nguid)),
            (4, [nguid]) => Some(Task::Detach(*nguid)),
            _ => return None,
        };
        let waiting = saved.waiting.iter().map(HeldCommand::command);
        rest.is_empty().then_some(Management {
            running: task.map(|task| Running {
                cid: saved.cid,
                nsid: saved.nsid,
                task,
                stage: Stage::Begin,
                failed: saved.failed.map(Status::from_bits),
                before: None,
            }),
            waiting: waiting.collect::<Option<_>>()?,
            ..Management::default()
        })
    }
}

impl Controller {
    // ---- the commands

    /// Namespace Management or Namespace Attachment. One is at work at a time.
    pub(super) fn manage(&mut self, command: &Command) -> AdminResult {
        if let Some(status) = self.admin.erasure.hinders() {
            return Err(status);
        }
        let Some(pool) = self.config.pool.clone() else {
            return Err(Status::INVALID_OPCODE.with_dnr(true));
        };
        if self.admin.management.is_running() {
            self.admin.management.waiting.push_back(*command);
            self.touch();
            return Ok(Outcome::Later);
        }
        let task = match command.admin_opcode() {
            nvme::AdminOpcode::NAMESPACE_MANAGEMENT => {
                match ManagementCdw10::from_bits(command.cdw10.get()).sel() {
                    ManagementSelect::CREATE => self.create_task(command, &*pool)?,
                    ManagementSelect::DELETE => self.delete_task(command, &*pool)?,
                    _ => return Err(INVALID_FIELD),
                }
            }
            _ => self.attachment_task(command, &*pool)?,
        };
        let nsid = match task {
            Task::Create { nsid, .. } => nsid,
            _ => command.nsid.get(),
        };
        tracing::info!(nsid, ?task, "the host manages namespaces");
        self.admin.management.running = Some(Running {
            cid: Some(command.cid.get()),
            nsid,
            task,
            stage: Stage::Begin,
            failed: None,
            before: None,
        });
        self.admin.rearm();
        self.touch();
        Ok(Outcome::Later)
    }

    fn create_task(&mut self, command: &Command, pool: &dyn NamespacePool) -> Result<Task, Status> {
        if command.nsid.get() != 0 {
            return Err(INVALID_FIELD);
        }
        if ManagementCdw11::from_bits(command.cdw11.get()).csi() != Csi::NVM {
            return Err(Status::IO_COMMAND_SET_NOT_SUPPORTED.with_dnr(true));
        }
        let mut new = NewNamespace::new_zeroed();
        self.read_host(command, new.as_mut_bytes())?;
        // One format, as each namespace has here: without metadata and so without protection
        // information.
        if new.flbas.into_bits() != 0 || new.dps != Dps::new() {
            return Err(Status::INVALID_FORMAT.with_dnr(true));
        }
        let shared = new.nmic.shrns();
        if !new.reserved_is_zero() || new.nmic != Nmic::new().with_shrns(shared) {
            return Err(INVALID_FIELD);
        }
        if new.anagrpid.get() != 0 {
            return Err(Status::ANA_GROUP_IDENTIFIER_INVALID.with_dnr(true));
        }
        let sets = [new.nvmsetid, new.endgid, new.nphndls];
        if sets.iter().any(|id| id.get() != 0) || new.lbstm.get() != 0 {
            return Err(INVALID_FIELD);
        }
        let blocks = new.nsze.get();
        if blocks == 0 || new.ncap.get() > blocks {
            return Err(INVALID_FIELD);
        }
        if new.ncap.get() != blocks {
            return Err(Status::THIN_PROVISIONING_NOT_SUPPORTED.with_dnr(true));
        }
        let bytes = u128::from(blocks) * u128::from(pool.block_size());
        if bytes > u128::from(pool.capacity().saturating_sub(pool.used())) {
            self.admin.logs.information = u64::try_from(bytes).unwrap_or(u64::MAX);
            return Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY.with_dnr(true));
        }
        let taken = pool.namespaces();
        let is_free = |nsid: &u32| {
            !self.has_or_awaits(*nsid) && taken.iter().all(|other| other.nsid != *nsid)
        };
        let nsid = (1..=self.config.max_namespaces).find(is_free);
        let nsid = nsid.ok_or(Status::NAMESPACE_IDENTIFIER_UNAVAILABLE.with_dnr(true))?;
        Ok(Task::Create {
            nsid,
            blocks,
            nguid: pool.new_nguid().ok_or(Status::INTERNAL_ERROR)?,
            shared,
        })
    }

    fn delete_task(&self, command: &Command, pool: &dyn NamespacePool) -> Result<Task, Status> {
        let nsid = command.nsid.get();
        if nsid != NSID_BROADCAST {
            let found = self.pooled_or_denied(nsid, pool)?;
            return Ok(Task::Delete([found.nguid].into()));
        }
        let pooled = pool.namespaces();
        let is_pooled = |nsid: u32| pooled.iter().any(|ns| ns.nsid == nsid);
        // All or none.
        if !self.engine.active().all(|ns| is_pooled(ns.config.nsid)) {
            return Err(DENIED);
        }
        Ok(Task::Delete(pooled.iter().map(|ns| ns.nguid).collect()))
    }

    fn attachment_task(&self, command: &Command, pool: &dyn NamespacePool) -> Result<Task, Status> {
        let attaches = match AttachmentCdw10::from_bits(command.cdw10.get()).sel() {
            AttachmentSelect::ATTACH => true,
            AttachmentSelect::DETACH => false,
            _ => return Err(INVALID_FIELD),
        };
        let nsid = command.nsid.get();
        let found = match self.pooled_or_denied(nsid, pool) {
            Err(status) if status == DENIED && attaches => {
                return Err(Status::NAMESPACE_ALREADY_ATTACHED.with_dnr(true));
            }
            found => found?,
        };
        let mut list = ControllerList::new_zeroed();
        self.read_host(command, list.as_mut_bytes())?;
        // It is the only controller of its subsystem.
        if list.numid.get() != 1 || list.iter().next() != Some(self.config.cntlid) {
            return Err(CONTROLLERS);
        }
        let is_attached = found.attached.contains(&self.config.cntlid);
        match (attaches, is_attached) {
            (true, false) => Ok(Task::Attach(found.nguid)),
            (false, true) => Ok(Task::Detach(found.nguid)),
            (true, true) => Err(Status::NAMESPACE_ALREADY_ATTACHED.with_dnr(true)),
            (false, false) => Err(Status::NAMESPACE_NOT_ATTACHED.with_dnr(true)),
        }
    }

    /// The namespace of this ID, if it is the pool's; one that is not is not the host's to manage.
    fn pooled_or_denied(
        &self,
        nsid: u32,
        pool: &dyn NamespacePool,
    ) -> Result<PooledNamespace, Status> {
        if nsid == NSID_BROADCAST {
            return Err(INVALID_FIELD);
        }
        if nsid == 0 || nsid > self.config.max_namespaces {
            return Err(INVALID_NAMESPACE);
        }
        let found = pool.namespaces().into_iter().find(|ns| ns.nsid == nsid);
        match found {
            Some(found) => Ok(found),
            None if self.has_or_awaits(nsid) => Err(DENIED),
            None => Err(INVALID_FIELD),
        }
    }

    // ---- their steps

    /// Goes on with the command at work. `true`: there was something to do.
    pub(super) fn go_on_managing(&mut self) -> bool {
        let Some(running) = &mut self.admin.management.running else {
            return false;
        };
        match running.stage {
            Stage::Begin => {
                running.stage = Stage::Ready;
                self.touch();
                true
            }
            Stage::Ready => {
                self.begin_task();
                true
            }
            Stage::Leaving(since, early) => self.leave(since, early),
            Stage::Changing(number) => match self.admin.management.answers.take(number) {
                None => false,
                Some(result) => {
                    self.changed_pool(result);
                    true
                }
            },
            // It needs the worker's ring: `show_pooled`.
            Stage::Show => {
                self.ask_for_tidy();
                false
            }
            Stage::NotShown => {
                self.not_shown();
                true
            }
            Stage::Showing => {
                self.ask_for_tidy();
                match self.attaching() {
                    Attach::Under => false,
                    Attach::Done => {
                        self.end_managing();
                        true
                    }
                    Attach::Refused => {
                        self.not_shown();
                        true
                    }
                }
            }
        }
    }

    fn set_stage(&mut self, stage: Stage) {
        if let Some(running) = &mut self.admin.management.running {
            running.stage = stage;
        }
        self.admin.management.look = None;
    }

    /// The worker is to call `tidy`, now and then.
    fn ask_for_tidy(&mut self) {
        let management = &mut self.admin.management;
        if management.look.is_none_or(|at| self.now >= at) {
            management.look = Some(self.now + LOOK);
            management.answers.wake();
        }
    }

    /// The namespace that the task is about now.
    fn task_namespace(&self) -> Option<PooledNamespace> {
        let wanted = match &self.admin.management.running.as_ref()?.task {
            Task::Create { nguid, .. } | Task::Attach(nguid) | Task::Detach(nguid) => *nguid,
            Task::Delete(nguids) => *nguids.front()?,
        };
        let all = self.config.pool.as_ref()?.namespaces();
        all.into_iter().find(|ns| ns.nguid == wanted)
    }

    /// The engines have this very namespace.
    fn is_shown(&self, pooled: &PooledNamespace) -> bool {
        let index = self.engine.namespace_index(pooled.nsid).ok();
        let ns = index.and_then(|index| self.engine.namespaces.get(index));
        ns.is_some_and(|ns| ns.config.nguid == pooled.nguid)
    }

    fn begin_task(&mut self) {
        let running = self.admin.management.running.as_ref();
        let Some(task) = running.map(|running| running.task.clone()) else {
            return;
        };
        let leaves = matches!(task, Task::Delete(_) | Task::Detach(_));
        match self.task_namespace() {
            Some(pooled) if leaves && self.is_shown(&pooled) => {
                self.set_stage(Stage::Leaving(self.now, false));
                self.detach(pooled.nsid);
                self.ask_for_tidy();
            }
            _ => self.change_pool(),
        }
    }

    fn leave(&mut self, since: Instant, early: bool) -> bool {
        if self.has_detached() {
            self.change_pool();
            return true;
        }
        if !early && self.now.saturating_duration_since(since) >= GRACE {
            self.set_stage(Stage::Leaving(since, true));
            self.end_detached_early();
        }
        // What has ended is closed there.
        self.ask_for_tidy();
        false
    }

    /// The pool's turn.
    fn change_pool(&mut self) {
        let cntlid = self.config.cntlid;
        let running = self.admin.management.running.as_ref();
        let (Some(running), Some(pool)) = (running, self.config.pool.clone()) else {
            return;
        };
        let change = match &running.task {
            Task::Create {
                nsid,
                blocks,
                nguid,
                shared,
            } => PoolChange::Create {
                nsid: *nsid,
                blocks: *blocks,
                nguid: *nguid,
                shared: *shared,
            },
            Task::Delete(nguids) => match nguids.front() {
                Some(nguid) => PoolChange::Delete { nguid: *nguid },
                None => return self.end_managing(),
            },
            Task::Attach(nguid) if running.failed.is_none() => PoolChange::Attach {
                nguid: *nguid,
                cntlid,
            },
            Task::Attach(nguid) | Task::Detach(nguid) => PoolChange::Detach {
                nguid: *nguid,
                cntlid,
            },
        };
        let before = self.task_namespace();
        if let Some(running) = &mut self.admin.management.running {
            running.before = before;
        }
        self.admin.management.number += 1;
        let number = self.admin.management.number;
        let answers = Arc::downgrade(&self.admin.management.answers);
        self.set_stage(Stage::Changing(number));
        let done = move |result| {
            if let Some(answers) = answers.upgrade() {
                answers.leave(number, result);
            }
        };
        crash::point!("controller.pool.before");
        pool.change(change, Box::new(done));
    }

    /// The pool has made a change, or has not.
    fn changed_pool(&mut self, result: Result<(), PoolError>) {
        crash::point!("controller.pool.changed");
        let namespace = self.task_namespace();
        let is_there = namespace.as_ref().is_some_and(|ns| self.is_shown(ns));
        self.record_change(namespace.as_ref(), result);
        let Some(running) = &mut self.admin.management.running else {
            return;
        };
        if let Err(error) = result {
            running.failed.get_or_insert(match error {
                PoolError::NoSpace => Status::NAMESPACE_INSUFFICIENT_CAPACITY,
                PoolError::Failed => Status::INTERNAL_ERROR,
            });
        }
        match (&mut running.task, result) {
            (Task::Attach(_), Ok(())) if running.failed.is_none() => match (namespace, is_there) {
                (Some(_), false) => self.set_stage(Stage::Show),
                (Some(_), true) => self.end_managing(),
                // Somebody has deleted it who has not asked the controller.
                (None, _) => {
                    running.failed = Some(Status::INTERNAL_ERROR);
                    self.end_managing();
                }
            },
            (Task::Delete(nguids), Ok(())) => {
                nguids.pop_front();
                match nguids.is_empty() {
                    true => self.end_managing(),
                    false => self.set_stage(Stage::Begin),
                }
            }
            // It is kept that it is attached: so the host finds it, too.
            (Task::Delete(_) | Task::Detach(_), Err(_)) => {
                let attached = |ns: &PooledNamespace| ns.attached.contains(&self.config.cntlid);
                match namespace.as_ref().is_some_and(attached) && !is_there {
                    true => self.set_stage(Stage::Show),
                    false => self.end_managing(),
                }
            }
            _ => self.end_managing(),
        }
        self.touch();
    }

    /// A namespace was created or deleted: the log has it.
    fn record_change(&mut self, now: Option<&PooledNamespace>, result: Result<(), PoolError>) {
        let running = self.admin.management.running.as_mut();
        let Some(running) = running.filter(|_| result.is_ok()) else {
            return;
        };
        let before = running.before.take();
        let (select, namespace) = match &running.task {
            Task::Create { .. } => (ManagementSelect::CREATE, now.cloned()),
            // Of one that was gone already nothing is known.
            Task::Delete(_) => (ManagementSelect::DELETE, before),
            Task::Attach(_) | Task::Detach(_) => return,
        };
        if let Some(namespace) = namespace {
            let cdw10 = ManagementCdw10::new().with_sel(select).into_bits();
            self.record_namespace_change(cdw10, &namespace);
        }
    }

    /// The engines open what the pool has opened.
    pub(crate) fn show_pooled(&mut self, io: &Io) {
        let running = self.admin.management.running.as_ref();
        if running.is_none_or(|running| running.stage != Stage::Show) {
            return;
        }
        let config = self.task_namespace().and_then(|pooled| pooled.config());
        let attached = match config {
            Some(config) => self.attach(config, io),
            None => return self.set_stage(Stage::NotShown),
        };
        match attached {
            Ok(()) => self.set_stage(Stage::Showing),
            // Another one is on its way.
            Err(ConfigError::Attaching) => {}
            Err(error) => {
                tracing::error!(%error, "a namespace of the pool cannot be attached");
                // Not here: the round that follows tells the host.
                self.set_stage(Stage::NotShown);
            }
        }
    }

    /// An engine could not open it.
    fn not_shown(&mut self) {
        let Some(running) = &mut self.admin.management.running else {
            return;
        };
        running.failed.get_or_insert(Status::INTERNAL_ERROR);
        match running.task {
            // It is to be kept that it is not attached.
            Task::Attach(_) => self.change_pool(),
            _ => self.end_managing(),
        }
    }

    /// The command is over, and the next one begins.
    fn end_managing(&mut self) {
        let Some(running) = self.admin.management.running.take() else {
            return;
        };
        let status = running.failed.unwrap_or(Status::SUCCESS);
        let (nsid, task) = (running.nsid, running.task);
        tracing::info!(nsid, ?task, %status, "namespaces were managed");
        if let Some(cid) = running.cid {
            let result = match task {
                Task::Create { nsid, .. } if status.is_success() => nsid,
                _ => 0,
            };
            if !status.is_success() {
                self.failed(0, cid, status, nsid, 0);
            }
            self.finish_admin(cid, status, result);
        }
        self.touch();
        while !self.admin.management.is_running()
            && let Some(next) = self.admin.management.waiting.pop_front()
        {
            self.admin_command(&next);
        }
        self.admin.rearm();
    }

    /// When to go on with a command, though nothing else happens.
    pub(crate) fn management_deadline(&self) -> Option<Instant> {
        let management = &self.admin.management;
        match management.running.as_ref()?.stage {
            Stage::Begin | Stage::Ready | Stage::NotShown => Some(self.now),
            Stage::Changing(_) => None,
            Stage::Leaving(..) | Stage::Show | Stage::Showing => {
                Some(management.look.unwrap_or(self.now))
            }
        }
    }

    // ---- what the host finds

    /// The namespaces of the pool.
    pub(super) fn pooled(&self) -> Vec<PooledNamespace> {
        let pool = self.config.pool.as_ref();
        pool.map_or_else(Vec::new, |pool| pool.namespaces())
    }

    /// The namespaces that are not of the pool. Hosts ask for what is made of them as often as they
    /// like, on a thread that is not theirs alone.
    pub(super) fn not_pooled(&self) -> impl Iterator<Item = &Namespace> {
        let pooled: BTreeSet<_> = self.pooled().iter().map(|pooled| pooled.nguid).collect();
        let active = self.engine.active();
        active.filter(move |ns| !pooled.contains(&ns.config.nguid))
    }

    /// Namespaces of the pool that the host does not find.
    pub(super) fn not_attached(&self) -> Vec<PooledNamespace> {
        let mut all = self.pooled();
        all.retain(|pooled| !self.is_shown(pooled));
        all
    }

    /// Bytes that all namespaces may have, and those that none has.
    pub(super) fn pool_capacity(&self) -> (u128, u128) {
        let Some(pool) = &self.config.pool else {
            return (0, 0);
        };
        let (capacity, used) = (pool.capacity(), pool.used());
        // It may have been larger.
        (
            capacity.max(used).into(),
            capacity.saturating_sub(used).into(),
        )
    }
}
