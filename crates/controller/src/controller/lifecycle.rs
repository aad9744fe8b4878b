//! Enable, shutdown and the kinds of reset ("NVMe Base 2.1", 3.5 to 3.7).
//!
//! A reset and a shutdown both wait for commands in flight; [`Controller::progress`] advances
//! them in each round.

use super::{BootRegisters, Cmb, Controller, MPSMAX};
use crate::engine::Order;
use crate::survival::state::Registers;
use nvme::log::HardwareErrorCode;
use nvme::regs::{Ams, Aqa, Cc, CcCss, Csts, Shn, Shst};

/// Life-cycle state of the controller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// CC.EN is 0 and no command is in flight.
    Disabled,
    /// CSTS.RDY is 1.
    Ready,
    /// A controller-level reset waits for the commands in flight.
    Resetting,
    /// CSTS.CFS is 1: only a reset helps.
    Failed,
}

/// Progress of a shutdown, in any state. A controller-level reset ends it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Shutdown {
    /// No shutdown was requested.
    No,
    /// CSTS.SHST is 01b: commands in flight end, then volumes make everything durable.
    Occurring,
    /// CSTS.SHST is 10b.
    Complete,
}

const STATES: [State; 4] = [
    State::Disabled,
    State::Ready,
    State::Resetting,
    State::Failed,
];
const SHUTDOWNS: [Shutdown; 3] = [Shutdown::No, Shutdown::Occurring, Shutdown::Complete];

impl Controller {
    /// Returns the registers and the life-cycle state to be saved.
    pub(crate) fn save_registers(&self) -> Registers {
        Registers {
            cc: self.cc.into_bits(),
            csts: self.csts.into_bits(),
            aqa: self.aqa.into_bits(),
            asq: self.asq,
            acq: self.acq,
            // Numbered from 0 on, in the order of the lists above.
            state: self.state as u8,
            shutdown: self.shutdown as u8,
            cmbmsc: self.cmb.as_ref().map(Cmb::cmbmsc),
            boot: self.boot.save(),
        }
    }

    /// Restores the registers saved by [`Controller::save_registers`].
    /// [`Controller::resume_life`] carries out their consequences. Returns `None` when the saved
    /// state is invalid.
    pub(crate) fn restore_registers(&mut self, saved: &Registers) -> Option<()> {
        self.cc = Cc::from_bits(saved.cc);
        self.csts = Csts::from_bits(saved.csts);
        self.aqa = Aqa::from_bits(saved.aqa & 0x0fff_0fff);
        (self.asq, self.acq) = (saved.asq, saved.acq);
        self.boot = BootRegisters::restore(saved.boot);
        self.state = *STATES.get(usize::from(saved.state))?;
        self.shutdown = *SHUTDOWNS.get(usize::from(saved.shutdown))?;
        if self.has_queues() && self.cc.mps() <= MPSMAX {
            let page_size = 4096 << self.cc.mps();
            self.order_all(|| Order::Enable { page_size });
        }
        Some(())
    }

    /// Returns whether the host uses the controller.
    pub(crate) fn is_ready_state(&self) -> bool {
        self.state == State::Ready
    }

    /// Returns CSTS.
    pub(crate) fn csts_bits(&self) -> u32 {
        self.csts.into_bits()
    }

    /// Commands are fetched: the self-test may read, and namespaces may be erased.
    pub(crate) fn may_test(&self) -> bool {
        self.state == State::Ready && self.shutdown == Shutdown::No && self.engine.is_master()
    }

    /// Returns whether a long-running command may be completed to the host: the controller is
    /// ready, and neither shut down nor failed.
    pub(crate) fn may_complete(&self) -> bool {
        self.state == State::Ready && self.shutdown != Shutdown::Complete
    }

    /// Resumes the activity that the restored registers imply. The queues have been restored
    /// already.
    pub(crate) fn resume_life(&mut self) {
        if self.state == State::Failed || self.shutdown != Shutdown::No {
            self.admin.keep_alive.stop();
            self.stop_fetching();
        }
        if self.shutdown == Shutdown::Occurring || !self.admin.cache_flushes.is_empty() {
            self.flush_everywhere();
        }
    }

    pub(super) fn write_cc(&mut self, new: Cc) {
        let old = std::mem::replace(&mut self.cc, new);
        match (old.en(), new.en()) {
            // A pending reset continues, and then enables the controller.
            (false, true) if self.state == State::Resetting => {}
            (false, true) => self.enable(),
            (true, false) => self.begin_reset(),
            _ => {}
        }
        if new.shn() != Shn::NONE && old.shn() != new.shn() {
            self.begin_shutdown();
        }
    }

    /// Doorbells belong to queues now.
    pub(crate) fn has_queues(&self) -> bool {
        matches!(self.state, State::Ready | State::Failed)
    }

    fn enable(&mut self) {
        // This ends a shutdown of the disabled controller.
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
            let Some(left_out) = self.admin.quiet_states.allow(self.now) else {
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
        self.state = State::Ready;
        self.csts.set_rdy(true);
        if let Some(left_out) = self.admin.quiet_states.allow(self.now) {
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
        self.state = State::Failed;
        self.csts.set_cfs(true);
        self.stop_fetching();
    }

    /// Fails the controller (CSTS.CFS), so that only a reset helps.
    pub(crate) fn fatal(&mut self, why: &str) {
        if let Some(left_out) = self.admin.quiet_states.allow(self.now) {
            tracing::warn!(left_out, why, "controller fatal status");
        }
        self.capture(why);
        self.fail();
    }

    /// A rule is broken that always holds: an error of this program, see [`Engine::broken`]. Logged
    /// once, for a controller that has failed is not failed again.
    ///
    /// [`Engine::broken`]: crate::engine::Engine::broken
    pub(super) fn broken(&mut self, what: &'static str) {
        if self.state != State::Ready {
            return;
        }
        if let Some(left_out) = self.admin.quiet_states.allow(self.now) {
            tracing::error!(left_out, what, "controller failed: a bug of vnvme");
        }
        self.capture(what);
        self.fail();
    }

    /// Checks the memory windows after a fault anywhere in the process. Data that this controller
    /// wrote to a file that shrank is lost, so the controller must not carry on.
    pub(super) fn check_memory(&mut self) -> bool {
        let faults = dma::sigbus::faults();
        if std::mem::replace(&mut self.faults, faults) == faults || !self.engine.dma.is_poisoned() {
            return false;
        }
        if self.state == State::Ready {
            self.fatal("the file behind the guest's memory shrank");
        }
        true
    }

    fn begin_reset(&mut self) {
        self.touch();
        self.queues.clear();
        self.endings.clear();
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
        self.state = State::Resetting;
        self.progress();
    }

    /// NVM Subsystem Reset, which the host sees as a power cycle; valid in any state. CSTS.NSSRO
    /// is set afterwards.
    pub(super) fn subsystem_reset(&mut self) {
        if let Some(left_out) = self.admin.quiet_states.allow(self.now) {
            tracing::info!(left_out, "NVM subsystem reset");
        }
        self.csts.set_nssro(true);
        self.reset_registers();
        self.reset_cmbmsc();
        self.begin_reset();
    }

    /// Resets the registers, for a function level reset and a device reset by the VMM, see
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
        if let Some(left_out) = self.admin.quiet_states.allow(self.now) {
            tracing::info!(left_out, "shutdown notification");
        }
        self.shutdown = Shutdown::Occurring;
        self.csts.set_shst(Shst::OCCURRING);
        // A host that shuts down falls silent.
        self.admin.keep_alive.stop();
        self.stop_fetching();
        self.flush_everywhere();
        self.progress();
    }

    /// Handles the end of a flush: all completed commands are durable.
    pub(super) fn flushed(&mut self) {
        if self.shutdown == Shutdown::Occurring {
            self.touch();
            self.shutdown = Shutdown::Complete;
            self.csts.set_shst(Shst::COMPLETE);
        }
    }

    /// Completes a reset when the commands in flight have ended. Returns whether it did.
    pub(super) fn progress(&mut self) -> bool {
        if self.state != State::Resetting || !self.engine.drained() || !self.migration.stopped() {
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
        self.state = State::Disabled;
        self.admin.last_reset = self.now;
        self.record_reset();
        if self.cc.en() {
            self.enable();
        }
        true
    }

    /// Resets the device on behalf of the VMM: registers and configuration space return to their
    /// power-on values. The reset has ended when [`Controller::is_resetting`] returns `false`.
    /// Guest memory and interrupt receivers belong to the VMM and stay.
    pub fn reset(&mut self) {
        self.reset_cmbmsc();
        self.function_level_reset();
    }

    /// Function level reset: like [`Controller::reset`], except that CMBMSC keeps its value
    /// ("NVMe Base 2.1", 3.1.4.16), because drivers do not look for the buffer again.
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

    /// Returns whether a reset waits for commands in flight.
    pub fn is_resetting(&self) -> bool {
        self.state == State::Resetting
    }
}
