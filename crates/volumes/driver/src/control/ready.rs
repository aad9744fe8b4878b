//! Transitions of a controller between disabled and ready (NVMe Base 2.1, 3.5.1 and 3.6), also
//! during a function reset by another owner.

use std::time::{Duration, Instant};

use nvme::Command;
use nvme::regs::{self, Cc, CcCss, Crto, Shn, Shst};

use super::Control;
use crate::admin::{csts, relax};
use crate::error::Error;
use crate::transport::Transport;

/// Number of polls of missing registers (all ones) between two attempts to wake the device.
const ROUNDS_PER_WAKE: u32 = 1024;

impl Control {
    fn ready_limit(&self, transport: &dyn Transport) -> Duration {
        let mut units = u32::from(self.cap.to());
        if self.cap.crwms()
            && let Ok(crto) = transport.read32(regs::CRTO)
            && crto != u32::MAX
        {
            units = units.max(u32::from(Crto::from_bits(crto).crwmt()));
        }
        Duration::from_millis(500) * units.max(1)
    }

    /// Waits until a disabled controller is no longer ready.
    fn await_disabled(&self, transport: &dyn Transport) -> Result<(), Error> {
        let limit = self.ready_limit(transport);
        let deadline = Instant::now() + limit;
        let mut round = 0;
        while csts(transport)?.rdy() {
            if Instant::now() >= deadline {
                return Err(Error::Ready {
                    enabling: false,
                    limit,
                });
            }
            relax(transport, round);
            round += 1;
        }
        Ok(())
    }

    /// Waits until an enabled controller is ready. Returns `false` if it is no longer enabled,
    /// because another owner has reset the function.
    fn await_enabled(&self, transport: &dyn Transport, deadline: Instant) -> Result<bool, Error> {
        let mut round = 0;
        loop {
            let csts = csts(transport)?;
            if csts.rdy() {
                return Ok(true);
            }
            if csts.cfs() {
                return Err(Error::Fatal {
                    csts: csts.into_bits(),
                });
            }
            if !Cc::from_bits(transport.read32(regs::CC)?).en() {
                return Ok(false);
            }
            if Instant::now() >= deadline {
                return Err(Error::Ready {
                    enabling: true,
                    limit: self.ready_limit(transport),
                });
            }
            relax(transport, round);
            round += 1;
        }
    }

    /// Disables the controller. After success it accesses no memory.
    pub(super) fn disable(&mut self, transport: &dyn Transport) -> Result<(), Error> {
        self.shadow_live = false;
        let result = self.disable_by_cc(transport);
        if let Err(Error::Ready { .. } | Error::Fatal { .. }) = result {
            tracing::warn!("the controller ignores CC.EN; resetting the function");
            transport.reset()?;
            transport.set_bus_master(true)?;
            return self.await_disabled(transport);
        }
        result
    }

    fn disable_by_cc(&mut self, transport: &dyn Transport) -> Result<(), Error> {
        csts(transport)?;
        let cc = Cc::from_bits(transport.read32(regs::CC)?);
        if cc.en() {
            // The controller must be ready or failed before it is disabled (NVMe Base 2.1,
            // 3.1.4.5).
            let deadline = Instant::now() + self.ready_limit(transport);
            match self.await_enabled(transport, deadline) {
                Ok(_) | Err(Error::Fatal { .. }) => {}
                Err(error) => return Err(error),
            }
            let off = cc.with_en(false).with_shn(Shn::NONE);
            transport.write32(regs::CC, off.into_bits())?;
        }
        self.await_disabled(transport)
    }

    pub(super) fn shut_down(&mut self, transport: &dyn Transport) -> Result<(), Error> {
        let status = csts(transport)?;
        if !status.rdy() || status.cfs() {
            return Ok(());
        }
        let cc = Cc::from_bits(transport.read32(regs::CC)?);
        transport.write32(regs::CC, cc.with_shn(Shn::NORMAL).into_bits())?;
        let limit = self.ready_limit(transport).max(Duration::from_secs(5));
        let deadline = Instant::now() + limit;
        let mut round = 0;
        while csts(transport)?.shst() != Shst::COMPLETE && Instant::now() < deadline {
            relax(transport, round);
            round += 1;
        }
        Ok(())
    }

    /// Enables a disabled controller with its Admin queues, and waits until it is ready.
    pub(super) fn enable(&self, transport: &dyn Transport) -> Result<(), Error> {
        let (aqa, asq, acq) = self.admin.registers();
        let css = if self.cap.css().ncss() {
            CcCss::NVM
        } else {
            CcCss::ALL_SUPPORTED
        };
        let cc = Cc::new()
            .with_css(css)
            .with_mps(self.cap.mpsmin())
            .with_iosqes(Command::SIZE_LOG2)
            .with_iocqes(nvme::Completion::SIZE_LOG2);
        let limit = self.ready_limit(transport);
        let deadline = Instant::now() + limit;
        let mut round = 0;
        // While another process resets the function, its registers are missing, writes are lost,
        // and earlier values are discarded. All registers are then written again.
        loop {
            transport.write32(regs::AQA, aqa)?;
            if transport.read32(regs::AQA)? != 0 {
                transport.write64(regs::ASQ, asq)?;
                transport.write64(regs::ACQ, acq)?;
                transport.write32(regs::CC, cc.into_bits())?;
                transport.write32(regs::CC, cc.with_en(true).into_bits())?;
                if self.await_enabled(transport, deadline)? {
                    return Ok(());
                }
            }
            if Instant::now() >= deadline {
                return Err(Error::Ready {
                    enabling: true,
                    limit,
                });
            }
            if round % ROUNDS_PER_WAKE == 0 {
                // Memory space may have been switched off permanently.
                let _ = transport.set_bus_master(true);
            }
            relax(transport, round);
            round += 1;
        }
    }
}
