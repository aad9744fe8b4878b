//! PCI configuration space, and the effects of its command register.

use super::Controller;
use crate::engine::Order;
use crate::pci::{ConfigEffect, ConfigSpace};
use std::time::{Duration, Instant};

/// Delay between clearing of Bus Master Enable and the request that outstanding commands end early.
const INTERRUPT_AFTER: Duration = Duration::from_secs(1);
/// Maximum delay between clearing of Bus Master Enable and the answer to the VMM. QEMU treats an
/// answer after 5 s as an error.
const ANSWER_AFTER: Duration = Duration::from_secs(3);

/// State after Bus Master Enable was cleared, while outstanding commands may still transfer data.
pub(super) struct Draining {
    since: Instant,
    interrupted: bool,
}

impl Controller {
    /// Reads PCI configuration space.
    pub fn config_read(&mut self, offset: u64, data: &mut [u8]) {
        if ConfigSpace::covers_interrupt_status(offset, data.len()) {
            // The host may have consumed entries since the last round.
            self.engine.end_round();
            self.pci.set_interrupt_status(self.engine.irqs.pin_status());
        }
        self.pci.read(offset, data);
    }

    /// Writes PCI configuration space. The caller answers the VMM when
    /// [`Controller::config_settled`] returns `true`. A function level reset begins at once, and
    /// has ended when [`Controller::is_resetting`] returns `false`.
    pub fn config_write(&mut self, offset: u64, data: &[u8]) {
        let master = self.engine.queues.is_master();
        if self.pci.write(offset, data) == ConfigEffect::FunctionLevelReset {
            self.function_level_reset();
        }
        self.obey_command_register();
        self.touch();
        self.settle();
        self.engine.end_round();
        if self.engine.queues.is_master() {
            self.draining = None;
        } else if master {
            self.draining = Some(Draining {
                since: Instant::now(),
                interrupted: false,
            });
        }
    }

    pub(crate) fn obey_command_register(&mut self) {
        self.engine.irqs.disable_pin(self.pci.intx_disabled());
        let on = self.pci.is_bus_master();
        if on == self.engine.queues.is_master() {
            return;
        }
        let masterings = self.engine.queues.masterings() + u64::from(on);
        self.order_all(|| Order::Master { on, masterings });
        if on {
            self.engine.irqs.deliver_pending();
        }
    }

    /// Returns whether the last write to configuration space has taken full effect: after Bus
    /// Master Enable was cleared, no outstanding command can write to the host's memory any more. A
    /// kernel that starts another one (kexec) relies on that before it reuses the memory, and often
    /// does nothing else to stop the device.
    ///
    /// Outstanding commands first get one second to complete. Then those that can be ended early
    /// are. After three seconds the function returns `true` in any case: a request that the kernel
    /// or a device below the volume holds for longer can still write to its buffer.
    pub fn config_settled(&mut self) -> bool {
        if self.draining.is_none() {
            return true;
        }
        let quiesced = self.dma_quiesced();
        let Some(draining) = &mut self.draining else {
            return true;
        };
        let elapsed = self.now.saturating_duration_since(draining.since);
        if quiesced || elapsed >= ANSWER_AFTER {
            if !quiesced && let Some(left_out) = self.engine.settings.log.allow("bus mastering") {
                tracing::warn!(
                    left_out,
                    "commands are in flight though bus mastering was disabled {ANSWER_AFTER:?} ago: their data may still \
                     reach the guest's memory"
                );
            }
            self.draining = None;
            return true;
        }
        if elapsed >= INTERRUPT_AFTER && !std::mem::replace(&mut draining.interrupted, true) {
            self.order_all(|| Order::EndCommandsEarly);
        }
        false
    }

    /// Returns the time at which [`Controller::config_settled`] has to be called again even if no
    /// event occurs.
    pub(super) fn draining_deadline(&self) -> Option<Instant> {
        let draining = self.draining.as_ref()?;
        let after = if draining.interrupted {
            ANSWER_AFTER
        } else {
            INTERRUPT_AFTER
        };
        // After this time, the waiting caller asks in each round.
        Some(draining.since + after).filter(|at| *at > self.now)
    }
}
