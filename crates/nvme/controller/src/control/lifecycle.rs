//! Enable, shutdown and resets of the controller ("NVMe Base 2.1", 3.5 to 3.7).
//!
//! Both a reset and a shutdown wait for outstanding commands; [`Controller::progress`] advances
//! them in each round.

use super::{BootRegisters, Cmb, Controller, MPSMAX};
use crate::engine::Order;
use crate::survival::state::Registers;
use nvme::Status;
use nvme::aen::{AsyncEvent, ErrorEvent};
use nvme::log::HardwareErrorCode;
use nvme::regs::{Ams, Aqa, Cc, CcCss, Csts, Shn, Shst};
use std::time::{Duration, Instant};

/// Time within which the host has to read CSTS after it has requested an NVM Subsystem Reset. The
/// reset begins then in any case.
const SUBSYSTEM_RESET_DELAY: Duration = Duration::from_millis(200);

/// Life-cycle state of the controller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LifecycleState {
    /// CC.EN is 0 and no command is outstanding.
    Disabled,
    /// CSTS.RDY is 1: commands are processed.
    Ready,
    /// A controller-level reset waits for outstanding commands.
    Resetting,
    /// CSTS.CFS is 1, until a reset.
    Failed,
}

/// Progress of a shutdown, in any life-cycle state. A controller-level reset ends the shutdown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Shutdown {
    /// No shutdown was requested since the last controller-level reset.
    No,
    /// CSTS.SHST is 01b: outstanding commands complete, then volumes are flushed.
    Occurring,
    /// CSTS.SHST is 10b: the shutdown is complete.
    Complete,
}

const STATES: [LifecycleState; 4] = [
    LifecycleState::Disabled,
    LifecycleState::Ready,
    LifecycleState::Resetting,
    LifecycleState::Failed,
];
const SHUTDOWNS: [Shutdown; 3] = [Shutdown::No, Shutdown::Occurring, Shutdown::Complete];

impl Controller {
    /// Returns the registers and the life-cycle state, for the next process.
    pub(crate) fn save_registers(&self) -> Registers {
        Registers {
            cc: self.cc.into_bits(),
            csts: self.csts.into_bits(),
            aqa: self.aqa.into_bits(),
            asq: self.asq,
            acq: self.acq,
            // Enum discriminants: 0 for the first variant, in the order of declaration.
            state: self.state as u8,
            shutdown: self.shutdown as u8,
            cmbmsc: self.cmb.as_ref().map(Cmb::cmbmsc),
            boot: self.boot.save(),
            subsystem_reset: self.admin.subsystem_reset.is_some(),
        }
    }

    /// Restores the registers saved by [`Controller::save_registers`]; [`Controller::resume_life`]
    /// then acts on them. Returns `None` when the saved state is invalid.
    pub(crate) fn restore_registers(&mut self, saved: &Registers) -> Option<()> {
        self.cc = Cc::from_bits(saved.cc);
        self.csts = Csts::from_bits(saved.csts);
        self.aqa = Aqa::from_bits(saved.aqa & 0x0fff_0fff);
        (self.asq, self.acq) = (saved.asq, saved.acq);
        self.boot = BootRegisters::restore(saved.boot);
        self.admin.subsystem_reset = saved.subsystem_reset.then_some(self.now);
        self.admin.rearm();
        self.state = *STATES.get(usize::from(saved.state))?;
        self.shutdown = *SHUTDOWNS.get(usize::from(saved.shutdown))?;
        if self.has_queues() && self.cc.mps() <= MPSMAX {
            let page_size = 4096 << self.cc.mps();
            self.order_all(|| Order::Enable { page_size });
        }
        Some(())
    }

    /// Returns whether the controller is ready for the host's commands (CSTS.RDY).
    pub(crate) fn is_ready_state(&self) -> bool {
        self.state == LifecycleState::Ready
    }

    /// Returns the bits of the CSTS register.
    pub(crate) fn csts_bits(&self) -> u32 {
        self.csts.into_bits()
    }

    /// Returns whether commands are fetched, so that the self-test may read and namespaces may be
    /// erased.
    pub(crate) fn may_test(&self) -> bool {
        self.state == LifecycleState::Ready
            && self.shutdown == Shutdown::No
            && self.engine.queues.is_master()
    }

    /// Returns whether a long-running command may be completed to the host: the controller is
    /// ready, and neither shut down nor failed.
    pub(crate) fn may_complete(&self) -> bool {
        self.state == LifecycleState::Ready && self.shutdown != Shutdown::Complete
    }

    /// Resumes the activity that the restored registers imply. Call it after the queues are
    /// restored.
    pub(crate) fn resume_life(&mut self) {
        if self.state == LifecycleState::Failed || self.shutdown != Shutdown::No {
            self.admin.keep_alive.stop();
            self.stop_fetching();
        }
        if self.shutdown == Shutdown::Occurring || !self.admin.cache_flushes.is_empty() {
            self.flush_everywhere();
        }
    }

    pub(super) fn write_cc(&mut self, new: Cc) {
        let _disk = self.in_log();
        let old = std::mem::replace(&mut self.cc, new);
        match (old.en(), new.en()) {
            // The pending reset continues, and the controller is enabled afterwards.
            (false, true) if self.state == LifecycleState::Resetting => {}
            (false, true) => self.enable(),
            (true, false) => self.begin_reset(),
            _ => {}
        }
        if new.shn() != Shn::NONE && old.shn() != new.shn() {
            self.begin_shutdown();
        }
    }

    /// Returns whether doorbell writes belong to existing queues.
    pub(crate) fn has_queues(&self) -> bool {
        matches!(self.state, LifecycleState::Ready | LifecycleState::Failed)
    }

    fn enable(&mut self) {
        // CC.EN was set after a shutdown of the disabled controller, which ends that shutdown.
        self.shutdown = Shutdown::No;
        self.csts.set_shst(Shst::NORMAL);
        let cc = self.cc;
        let page = 4096u64 << cc.mps();
        let sane = cc.mps() <= MPSMAX
            && matches!(cc.css(), CcCss::NVM | CcCss::ALL_SUPPORTED)
            && cc.ams() == Ams::ROUND_ROBIN
            && self.aqa.asqs_z() > 0
            && self.aqa.acqs_z() > 0
            && self.asq.is_multiple_of(page)
            && self.acq.is_multiple_of(page);
        self.order_all(|| Order::Enable { page_size: page });
        let (asqs, acqs) = (
            u32::from(self.aqa.asqs_z()) + 1,
            u32::from(self.aqa.acqs_z()) + 1,
        );
        let made = sane
            && self.create_cq(0, self.acq, acqs, Some(0))
            && self.create_sq(0, 0, self.asq, asqs);
        if !made {
            self.fail();
            let Some(left_out) = self.engine.settings.log.allow("not enabled") else {
                return;
            };
            let shared = self.engine.dma.has_memory();
            tracing::warn!(
                left_out,
                cc = cc.into_bits(),
                aqa = self.aqa.into_bits(),
                asq = self.asq,
                acq = self.acq,
                "controller cannot be enabled: {}",
                if !sane {
                    "the host asks for something that was not offered"
                } else if shared {
                    "its admin queues lie in memory that the guest did not map"
                } else {
                    "no guest memory is shared (QEMU: -object memory-backend-memfd,id=mem,size=...,share=on \
                     -machine memory-backend=mem)"
                }
            );
            return;
        }
        self.state = LifecycleState::Ready;
        self.awaits_first_command = true;
        self.csts.set_rdy(true);
        if let Some(left_out) = self.engine.settings.log.allow("enabled") {
            tracing::info!(
                left_out,
                queue_entries = asqs,
                page_size = page,
                "controller enabled"
            );
        }
    }

    fn stop_fetching(&mut self) {
        self.order_all(|| Order::StopFetching);
    }

    fn fail(&mut self) {
        self.record_hardware_error(HardwareErrorCode::CONTROLLER_FATAL);
        self.state = LifecycleState::Failed;
        self.csts.set_cfs(true);
        self.stop_fetching();
    }

    /// Sets the controller to the fatal state (CSTS.CFS), which only a reset ends.
    pub(crate) fn fatal(&mut self, why: &str) {
        let _disk = self.in_log();
        if let Some(left_out) = self.engine.settings.log.allow("fatal") {
            tracing::warn!(left_out, why, "controller fatal status");
        }
        self.capture(why);
        self.fail();
    }

    /// Fails the controller because an invariant of this program is violated, see
    /// [`Engine::broken`]. Logged only once, because a failed controller does not fail again.
    ///
    /// [`Engine::broken`]: crate::engine::Engine::broken
    pub(super) fn broken(&mut self, what: &'static str) {
        if self.state != LifecycleState::Ready {
            return;
        }
        let _disk = self.in_log();
        if let Some(left_out) = self.engine.settings.log.allow("broken") {
            tracing::error!(left_out, what, "controller failed: a bug of vnvme");
        }
        self.capture(what);
        self.fail();
    }

    /// Checks the guest memory windows after a memory fault anywhere in the process. Fails the
    /// controller when the file behind a window was truncated, because data that the controller
    /// wrote there is lost. Returns whether that was found.
    pub(super) fn check_memory(&mut self) -> bool {
        let faults = dma::sigbus::faults();
        if std::mem::replace(&mut self.faults, faults) == faults || !self.engine.dma.is_poisoned() {
            return false;
        }
        if self.state == LifecycleState::Ready {
            self.fatal("the file behind the guest's memory shrank");
        }
        true
    }

    fn begin_reset(&mut self) {
        self.touch();
        self.queues.clear();
        self.endings.clear();
        self.hand_over = None;
        self.admission.clear();
        let epoch = self.migration.next_epoch();
        self.order_all(|| Order::Stop(epoch));
        self.engine.irqs.reset();
        self.engine.stats.resets.add(1);
        self.admin.reset(&self.config);
        self.reset_erasure();
        self.reset_sharing();
        self.marks.reset();
        self.apply_features();
        self.shutdown = Shutdown::No;
        self.state = LifecycleState::Resetting;
        self.progress();
    }

    /// Handles the host's request of an NVM Subsystem Reset.
    ///
    /// A real device takes its PCI Express link down ("NVMe Base 2.1", 3.7.1), and hosts notice
    /// that. A virtual function cannot: Linux, from 6.11 on, reads CSTS once without looking at the
    /// value, goes on as before, and notices the reset when a command times out. The controller
    /// therefore asks the host for a controller reset by an asynchronous event, and begins its own
    /// reset when the host reads CSTS, because Linux ignores events until shortly before.
    pub(super) fn request_subsystem_reset(&mut self) {
        if self.state != LifecycleState::Ready || self.admin.events.parked() == 0 {
            return self.subsystem_reset();
        }
        let now = self.now.max(Instant::now());
        self.admin.subsystem_reset = Some(now + SUBSYSTEM_RESET_DELAY);
        self.admin.rearm();
    }

    /// Begins the requested NVM Subsystem Reset if the host has not read CSTS in time. Returns
    /// whether the reset begins.
    pub(crate) fn check_subsystem_reset(&mut self) -> bool {
        let due = self.admin.subsystem_reset;
        due.is_some_and(|at| self.now >= at) && self.begin_subsystem_reset()
    }

    /// Begins the NVM Subsystem Reset that the host has requested, if any. Returns whether the
    /// reset begins.
    pub(super) fn begin_subsystem_reset(&mut self) -> bool {
        if self.admin.subsystem_reset.take().is_none() {
            return false;
        }
        if let Some(cid) = self.admin.events.take_oldest() {
            let event = AsyncEvent::error(ErrorEvent::PERSISTENT_INTERNAL_ERROR);
            self.finish_admin(cid, Status::SUCCESS, event.into_bits());
            // The completion and its interrupt precede the reset.
            self.settle();
            self.engine.end_round();
        }
        self.subsystem_reset();
        self.settle();
        true
    }

    /// Performs an NVM Subsystem Reset, which the host sees as a power cycle and which is valid in
    /// any state. CSTS.NSSRO is set afterwards.
    pub(super) fn subsystem_reset(&mut self) {
        let _disk = self.in_log();
        if let Some(left_out) = self.engine.settings.log.allow("subsystem reset") {
            tracing::info!(left_out, "NVM subsystem reset");
        }
        self.csts.set_nssro(true);
        self.reset_registers();
        self.reset_cmbmsc();
        self.begin_reset();
    }

    /// Resets the registers. Shared by the function level reset and the VMM's device reset, see
    /// [`Controller::reset`].
    fn reset_registers(&mut self) {
        self.cc = Cc::new();
        self.aqa = Aqa::new();
        self.asq = 0;
        self.acq = 0;
        self.boot = BootRegisters::default();
    }

    fn begin_shutdown(&mut self) {
        if self.shutdown != Shutdown::No {
            return;
        }
        if let Some(left_out) = self.engine.settings.log.allow("shutdown") {
            tracing::info!(left_out, "shutdown notification");
        }
        self.shutdown = Shutdown::Occurring;
        self.csts.set_shst(Shst::OCCURRING);
        // A host that shuts down the controller stops sending Keep Alive.
        self.admin.keep_alive.stop();
        self.stop_fetching();
        self.flush_everywhere();
        self.progress();
    }

    /// Completes the shutdown when all volumes are flushed: the host's completed writes are
    /// durable.
    pub(super) fn flushed(&mut self) {
        if self.shutdown == Shutdown::Occurring {
            self.touch();
            self.shutdown = Shutdown::Complete;
            self.csts.set_shst(Shst::COMPLETE);
        }
    }

    /// Completes a reset when no command is outstanding any more. Returns whether the reset
    /// completed.
    pub(super) fn progress(&mut self) -> bool {
        if self.state != LifecycleState::Resetting
            || !self.engine.drained()
            || !self.migration.stopped()
        {
            return false;
        }
        self.touch();
        self.engine.clear();
        self.migration.reset_completed();
        self.open_left();
        self.csts = Csts::new()
            .with_nssro(self.csts.nssro())
            .with_shst(match self.shutdown {
                Shutdown::No => Shst::NORMAL,
                Shutdown::Occurring => Shst::OCCURRING,
                Shutdown::Complete => Shst::COMPLETE,
            });
        self.state = LifecycleState::Disabled;
        self.admin.last_reset = self.now;
        self.record_reset();
        if self.cc.en() {
            self.enable();
        }
        true
    }

    /// Resets the device on behalf of the VMM: registers and configuration space return to their
    /// power-on values. [`Controller::is_resetting`] returns `false` when the reset has ended.
    /// Guest memory and interrupt receivers belong to the VMM and stay.
    pub fn reset(&mut self) {
        self.reset_cmbmsc();
        self.function_level_reset();
    }

    /// Performs a function level reset. Unlike [`Controller::reset`], this keeps CMBMSC ("NVMe Base
    /// 2.1", 3.1.4.16), because drivers do not look for the controller memory buffer again.
    pub(super) fn function_level_reset(&mut self) {
        if self.has_queues() && self.shutdown != Shutdown::Complete {
            self.engine.stats.unsafe_shutdowns.add(1);
            self.record_hardware_error(HardwareErrorCode::UNSAFE_SHUTDOWN);
        }
        self.reset_registers();
        self.csts.set_nssro(false);
        self.pci.reset();
        self.obey_command_register();
        self.begin_reset();
        self.settle();
    }

    /// Returns whether a reset still waits for outstanding commands.
    pub fn is_resetting(&self) -> bool {
        self.state == LifecycleState::Resetting
    }
}
