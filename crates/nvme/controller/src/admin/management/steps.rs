//! Execution of the current Namespace Management or Namespace Attachment command.

use super::{CHECK_INTERVAL, DRAIN_TIMEOUT, Stage, Task};
use crate::config::ConfigError;
use crate::control::{Attach, Controller};
use crate::engine::Namespace;
use crate::pool::{PoolChange, PoolError, PooledNamespace};
use nvme::Status;
use nvme::cmd::namespace::{ManagementCdw10, ManagementSelect};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;
use volume::Io;

impl Controller {
    /// Advances the current management command. Returns whether there was anything to do.
    pub(in crate::admin) fn go_on_managing(&mut self) -> bool {
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
            // Opening a namespace needs the worker's ring, see `show_pooled`.
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

    /// Makes the worker call `tidy` soon, which releases detached namespaces.
    fn ask_for_tidy(&mut self) {
        let management = &mut self.admin.management;
        if management.look.is_none_or(|at| self.now >= at) {
            management.look = Some(self.now + CHECK_INTERVAL);
            management.answers.wake();
        }
    }

    /// Returns the pool's namespace that the current management command creates, deletes or
    /// attaches.
    fn task_namespace(&self) -> Option<PooledNamespace> {
        let wanted = match &self.admin.management.running.as_ref()?.task {
            Task::Create { nguid, .. } | Task::Attach(nguid) | Task::Detach(nguid) => *nguid,
            Task::Delete(nguids) => *nguids.front()?,
        };
        let all = self.config.pool.as_ref()?.namespaces();
        all.into_iter().find(|ns| ns.nguid == wanted)
    }

    /// Returns whether the controller's engines have this namespace open, compared by NGUID.
    fn is_shown(&self, pooled: &PooledNamespace) -> bool {
        let ns = self.engine.namespaces.of_nsid(pooled.nsid);
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
        if !early && self.now.saturating_duration_since(since) >= DRAIN_TIMEOUT {
            self.set_stage(Stage::Leaving(since, true));
            self.end_detached_early();
        }
        // Periodic calls of `tidy` close namespaces without outstanding commands.
        self.ask_for_tidy();
        false
    }

    /// Starts the pool's step of the current command.
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
                block_size,
                nguid,
                shared,
            } => PoolChange::Create {
                nsid: *nsid,
                blocks: *blocks,
                // Earlier versions, which supported one format, did not save the block size.
                block_size: match block_size {
                    0 => pool.block_size(),
                    size => *size,
                },
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

    /// Handles the pool's result of the change that the current management command has requested.
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
                // The namespace was deleted, but not by this controller.
                (None, _) => {
                    running.failed = Some(Status::INTERNAL_ERROR);
                    self.end_managing();
                }
            },
            (Task::Delete(nguids), Ok(())) => {
                nguids.pop_front();
                if nguids.is_empty() {
                    self.end_managing()
                } else {
                    self.set_stage(Stage::Begin)
                }
            }
            // The namespace is still stored as attached, so the host has to find it.
            (Task::Delete(_) | Task::Detach(_), Err(_)) => {
                let attached = |ns: &PooledNamespace| ns.attached.contains(&self.config.cntlid);
                if namespace.as_ref().is_some_and(attached) && !is_there {
                    self.set_stage(Stage::Show)
                } else {
                    self.end_managing()
                }
            }
            _ => self.end_managing(),
        }
        self.touch();
    }

    /// Records the creation or deletion of a namespace in the persistent event log.
    fn record_change(&mut self, now: Option<&PooledNamespace>, result: Result<(), PoolError>) {
        let running = self.admin.management.running.as_mut();
        let Some(running) = running.filter(|_| result.is_ok()) else {
            return;
        };
        let before = running.before.take();
        let (select, namespace) = match &running.task {
            Task::Create { .. } => (ManagementSelect::CREATE, now.cloned()),
            // A namespace that was already removed cannot be described.
            Task::Delete(_) => (ManagementSelect::DELETE, before),
            Task::Attach(_) | Task::Detach(_) => return,
        };
        if let Some(namespace) = namespace {
            let cdw10 = ManagementCdw10::new().with_sel(select).into_bits();
            self.record_namespace_change(cdw10, &namespace);
        }
    }

    /// Opens a namespace in the engines, after the pool has opened it.
    pub(crate) fn show_pooled(&mut self, io: &Io) {
        let running = self.admin.management.running.as_ref();
        if running.is_none_or(|running| running.stage != Stage::Show) {
            return;
        }
        let pool = self.config.pool.clone();
        let config = pool.and_then(|pool| self.task_namespace()?.config(&pool));
        let attached = match config {
            Some(config) => self.attach(config, io),
            None => return self.set_stage(Stage::NotShown),
        };
        match attached {
            Ok(()) => self.set_stage(Stage::Showing),
            // Another namespace is being attached.
            Err(ConfigError::Attaching) => {}
            Err(error) => {
                if let Some(left_out) = self.engine.settings.log.allow("pool not attached") {
                    tracing::error!(%error, left_out, "a namespace of the pool cannot be attached");
                }
                // The next round notifies the host.
                self.set_stage(Stage::NotShown);
            }
        }
    }

    /// Handles the failure of an engine to open the namespace. For an attachment, the pool then
    /// stores that the namespace is not attached.
    fn not_shown(&mut self) {
        let Some(running) = &mut self.admin.management.running else {
            return;
        };
        running.failed.get_or_insert(Status::INTERNAL_ERROR);
        match running.task {
            // The pool has to store that the namespace is not attached.
            Task::Attach(_) => self.change_pool(),
            _ => self.end_managing(),
        }
    }

    /// Completes the current management command, and begins the next one.
    fn end_managing(&mut self) {
        let Some(running) = self.admin.management.running.take() else {
            return;
        };
        let status = running.failed.unwrap_or(Status::SUCCESS);
        let (nsid, task) = (running.nsid, running.task);
        if let Some(left_out) = self.engine.settings.log.allow("managed namespaces") {
            tracing::info!(nsid, ?task, %status, left_out, "namespaces were managed");
        }
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

    /// Returns the time at which the current command continues even if no event occurs.
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

    // ---- namespaces reported to the host

    /// Returns all namespaces of the pool.
    pub(in crate::admin) fn pooled(&self) -> Vec<PooledNamespace> {
        let pool = self.config.pool.as_ref();
        pool.map_or_else(Vec::new, |pool| pool.namespaces())
    }

    /// Returns the namespaces that do not belong to the pool. As an iterator, because hosts can
    /// request lists of them arbitrarily often, on a thread that serves other hosts, too.
    pub(in crate::admin) fn not_pooled(&self) -> impl Iterator<Item = &Namespace> {
        let pooled: BTreeSet<_> = self.pooled().iter().map(|pooled| pooled.nguid).collect();
        let active = self.active();
        active.filter(move |ns| !pooled.contains(&ns.config.nguid))
    }

    /// Returns the pool's namespaces that are not attached to this controller.
    pub(in crate::admin) fn not_attached(&self) -> Vec<PooledNamespace> {
        let mut all = self.pooled();
        all.retain(|pooled| !self.is_shown(pooled));
        all
    }

    /// Returns total and unallocated capacity of the pool, in bytes.
    pub(in crate::admin) fn pool_capacity(&self) -> (u128, u128) {
        let Some(pool) = &self.config.pool else {
            return (0, 0);
        };
        let (capacity, used) = (pool.capacity(), pool.used());
        // The pool may have been larger when its namespaces were created.
        (
            capacity.max(used).into(),
            capacity.saturating_sub(used).into(),
        )
    }
}
