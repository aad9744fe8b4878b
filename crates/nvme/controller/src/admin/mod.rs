//! Admin commands ("NVMe Base 2.1", 5): dispatch and shared parts. [`table`] lists all of them,
//! and describes how to add one.

mod abort;
mod answers;
mod erase;
mod events;
mod features;
mod identify;
mod keep_alive;
mod lba_status;
mod logs;
mod management;
mod notifications;
mod persistent_events;
mod placement;
mod queues;
mod resize;
mod self_test;
pub(crate) mod table;
mod telemetry;
#[cfg(test)]
mod toy;

use crate::config::ControllerConfig;
use crate::control::Controller;
use crate::engine::dma_status;
use abort::Aborts;
use dma::{Access, SegmentList};
pub(crate) use erase::Erasure;
pub(crate) use events::AsyncEvents;
pub(crate) use features::Features;
pub use keep_alive::KeepAlive;
pub(crate) use lba_status::LbaStatus;
pub(crate) use logs::Logs;
pub(crate) use management::Management;
pub(crate) use notifications::Notifications;
use nvme::cmd::{Fuse, Psdt};
use nvme::{AdminOpcode, Command, Status};
pub(crate) use persistent_events::{EventLog, PersistentEvents};
pub(crate) use self_test::{SelfTest, TestSelection};
use std::time::Instant;
pub(crate) use telemetry::Telemetry;
use volume::Budget;

/// Outcome of an admin command that did not fail.
pub(crate) enum AdminOutcome {
    /// The command is complete; the value is dword 0 of its completion.
    Done(u32),
    /// The command continues, and a later step posts its completion.
    Later,
}

/// Result of an admin command's handler; the error is the status of the completion.
pub(crate) type AdminResult = Result<AdminOutcome, Status>;

pub(crate) const INVALID_FIELD: Status = Status::INVALID_FIELD.with_dnr(true);

/// State of a controller's admin commands: features, logs, events and operations in progress.
pub(crate) struct Admin {
    pub features: Features,
    pub logs: Logs,
    pub events: AsyncEvents,
    pub aborts: Aborts,
    pub notifications: Notifications,
    pub keep_alive: KeepAlive,
    /// Delete I/O Submission Queue commands that wait until their queue has no outstanding command:
    /// queue ID, and command identifier.
    pub deletions: Vec<(u16, u16)>,
    /// Command identifiers of Set Features commands that wait for the flush after the write cache
    /// was disabled.
    pub cache_flushes: Vec<u16>,
    pub telemetry: Telemetry,
    pub self_test: SelfTest,
    pub erasure: Erasure,
    pub management: Management,
    pub persistent_events: PersistentEvents,
    pub lba_status: LbaStatus,
    /// Latest time at which an NVM Subsystem Reset begins that the host has requested.
    pub subsystem_reset: Option<Instant>,
    /// Time of the last controller-level reset, or of power-on.
    pub last_reset: Instant,
    /// Time of the earliest check among keep alive timer, alert about marked blocks, requested
    /// reset, self-test, erasure and namespace management, so that each round makes a single
    /// comparison. See [`Admin::rearm`].
    timer: Option<Instant>,
    made: Instant,
}

impl Admin {
    pub fn new(config: &ControllerConfig) -> Self {
        Admin {
            features: Features::new(config),
            logs: Logs::new(),
            events: AsyncEvents::default(),
            aborts: Aborts::default(),
            notifications: Notifications::default(),
            keep_alive: KeepAlive::default(),
            deletions: Vec::new(),
            cache_flushes: Vec::new(),
            telemetry: Telemetry::default(),
            self_test: SelfTest::default(),
            erasure: Erasure::default(),
            management: Management::default(),
            persistent_events: PersistentEvents::of(config),
            lba_status: LbaStatus::new(),
            subsystem_reset: None,
            last_reset: Instant::now(),
            timer: None,
            made: Instant::now(),
        }
    }

    /// Handles a controller-level reset: drops parked commands, and resets features to their
    /// defaults. Logs stay.
    pub fn reset(&mut self, config: &ControllerConfig) {
        self.features = Features::new(config);
        self.events = AsyncEvents::default();
        self.aborts = Aborts::default();
        self.keep_alive = KeepAlive::default();
        self.deletions.clear();
        self.cache_flushes.clear();
        self.self_test.reset(self.logs.power_on_hours());
        self.persistent_events.reset();
        self.management.reset();
        self.lba_status.reset();
        self.subsystem_reset = None;
        self.rearm();
    }

    /// Recomputes the time of the earliest check, after a change of the keep alive timer, the
    /// self-test, the erasure, namespace management, or the alert about marked blocks.
    pub fn rearm(&mut self) {
        let busy = self.self_test.is_running()
            || self.erasure.is_running()
            || self.management.is_running();
        self.timer = if busy {
            // This time is in the past, so that each round makes the checks.
            Some(self.made)
        } else {
            self.next_timer()
        };
    }
}

impl Controller {
    /// Makes the checks that are due: requested reset, keep alive, alerts, self-test, erasure and
    /// namespace management. Returns whether there was anything to do.
    #[inline]
    pub(crate) fn check_timers(&mut self, budget: &mut Budget) -> bool {
        self.admin.timer.is_some_and(|at| self.now >= at) && self.timers(budget)
    }

    #[cold]
    fn timers(&mut self, budget: &mut Budget) -> bool {
        if self.is_paused() {
            // The clock stands still for the host. `Controller::unpause` arms the timer.
            self.admin.timer = None;
            return false;
        }
        let _disk = self.in_log();
        let mut worked = self.check_subsystem_reset();
        worked |= self.check_keep_alive();
        worked |= self.check_lba_alert();
        worked |= self.go_on_testing(budget);
        worked |= self.go_on_erasing(budget);
        worked |= self.go_on_managing();
        self.admin.rearm();
        worked
    }

    /// Executes an admin command and posts its completion, unless the completion follows later.
    pub(crate) fn admin_command(&mut self, command: &Command) {
        let cid = command.cid.get();
        let opcode = command.admin_opcode();
        tracing::trace!(%opcode, cid, nsid = command.nsid.get(), cdw10 = command.cdw10.get(), "admin command");
        // SGLs are only for I/O queues ("NVMe over PCIe Transport 1.1", 3.2.1); fused operations
        // are not supported.
        let result = if command.flags.fuse() != Fuse::NORMAL || command.flags.psdt() != Psdt::PRP {
            Err(INVALID_FIELD)
        } else {
            self.dispatch(opcode, command)
        };
        match result {
            Ok(AdminOutcome::Done(dw0)) => self.finish_admin(cid, Status::SUCCESS, dw0),
            Ok(AdminOutcome::Later) => {}
            Err(status) => {
                self.failed(0, cid, status, command.nsid.get(), 0);
                self.finish_admin(cid, status, 0);
            }
        }
    }

    fn dispatch(&mut self, opcode: AdminOpcode, command: &Command) -> AdminResult {
        let handler = table::handler(opcode, self);
        let handler = handler.ok_or(Status::INVALID_OPCODE.with_dnr(true))?;
        handler(self, command)
    }

    /// Resolves the command's data pointer into segments of guest memory, `len` bytes in total.
    fn admin_data(
        &self,
        command: &Command,
        len: usize,
        access: Access,
    ) -> Result<SegmentList, Status> {
        let mut list = SegmentList::new();
        list.begin(&self.engine.dma);
        let (prp1, prp2) = (command.prp1(), command.prp2());
        let page = self.engine.settings.page_size;
        match dma::prp::walk(
            &self.engine.dma,
            prp1,
            prp2,
            len as u64,
            page,
            access,
            &mut list,
        ) {
            Ok(()) => Ok(list),
            Err(dma::prp::PrpError::OffsetInvalid { .. }) => {
                Err(Status::PRP_OFFSET_INVALID.with_dnr(true))
            }
            Err(dma::prp::PrpError::Dma(error)) => Err(dma_status(error)),
        }
    }

    /// Writes `data` to the guest memory of the command's data pointer.
    fn write_host(&self, command: &Command, data: &[u8]) -> Result<(), Status> {
        if data.is_empty() {
            return Ok(());
        }
        let list = self.admin_data(command, data.len(), Access::Write)?;
        list.copy_from(0, data);
        Ok(())
    }

    /// Reads `data` from the guest memory of the command's data pointer, once.
    fn read_host(&self, command: &Command, data: &mut [u8]) -> Result<(), Status> {
        let list = self.admin_data(command, data.len(), Access::Read)?;
        list.copy_to(0, data);
        Ok(())
    }
}
