//! Controller registers in BAR0 ("NVMe Base 2.1", 3.1.4; "NVMe over PCIe Transport 1.1", 3.1).

use super::Controller;
use crate::pci;
use nvme::regs::{self, Aqa, Cc, Crto, Csts, Vs};

impl Controller {
    /// Reads BAR0 at any offset and length. Unassigned offsets read as zeroes. All bits read as
    /// ones while the function does not decode memory.
    pub fn bar0_read(&mut self, offset: u64, data: &mut [u8]) {
        if !self.pci.decodes_memory() {
            return data.fill(0xff);
        }
        if (pci::MSIX_PBA_OFFSET..pci::BAR0_SIZE).contains(&offset) {
            return self
                .engine
                .irqs
                .read_pba((offset - pci::MSIX_PBA_OFFSET) as usize, data);
        }
        if offset <= regs::CSTS && regs::CSTS - offset < data.len() as u64 {
            self.begin_subsystem_reset();
        }
        for (i, byte) in data.iter_mut().enumerate() {
            let at = offset.saturating_add(i as u64);
            *byte = (self.read_register(at & !3) >> (8 * (at & 3))) as u8;
        }
    }

    fn read_register(&self, offset: u64) -> u32 {
        let low = |v: u64| v as u32;
        let high = |v: u64| (v >> 32) as u32;
        match offset {
            regs::CAP => low(self.cap.into_bits()),
            o if o == regs::CAP + 4 => high(self.cap.into_bits()),
            regs::VS => Vs::V2_1.into_bits(),
            regs::INTMS | regs::INTMC => self.engine.irqs.intms(),
            regs::CC => self.cc.into_bits(),
            regs::CSTS => self.csts.into_bits(),
            regs::AQA => self.aqa.into_bits(),
            regs::ASQ => low(self.asq),
            o if o == regs::ASQ + 4 => high(self.asq),
            regs::ACQ => low(self.acq),
            o if o == regs::ACQ + 4 => high(self.acq),
            o if (regs::CMBLOC..=regs::CMBSZ).contains(&o)
                || (regs::CMBMSC..=regs::CMBSTS).contains(&o) =>
            {
                self.cmb.as_ref().map_or(0, |cmb| cmb.read_register(o))
            }
            o if (regs::BPINFO..regs::CMBMSC).contains(&o) => self.read_boot_register(o),
            // Controller Ready With Media Timeout equals CAP.TO, in units of 500 ms.
            regs::CRTO => Crto::new().with_crwmt(u16::from(self.cap.to())).into_bits(),
            _ => 0,
        }
    }

    /// Writes BAR0. Registers accept whole dwords, one or two per write; "NVMe over PCIe Transport
    /// 1.1", 3.1 leaves other writes undefined, and they are ignored. All writes are ignored while
    /// the function does not decode memory.
    pub fn bar0_write(&mut self, offset: u64, data: &[u8]) {
        if !self.pci.decodes_memory() {
            return;
        }
        if !offset.is_multiple_of(4) || !matches!(data.len(), 4 | 8) {
            tracing::trace!(
                offset,
                len = data.len(),
                "register write of an odd shape ignored"
            );
            return;
        }
        for (i, dword) in data.chunks_exact(4).enumerate() {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(dword);
            self.write_register(
                offset.saturating_add(4 * i as u64),
                u32::from_le_bytes(bytes),
            );
        }
        if self.cmb.is_some() && offset < pci::DOORBELL_OFFSET {
            self.obey_cmbmsc();
        }
        self.settle();
    }

    fn write_register(&mut self, offset: u64, value: u32) {
        let low = |old: u64| old & !0xffff_ffff | u64::from(value);
        let high = |old: u64| old & 0xffff_ffff | u64::from(value) << 32;
        // The engine handles doorbell writes, and reports invalid values itself.
        if offset < pci::DOORBELL_OFFSET {
            self.touch();
            self.begin_subsystem_reset();
        }
        match offset {
            regs::INTMS => self.engine.irqs.intms_set(value),
            regs::INTMC => {
                self.engine.irqs.intms_clear(value);
                self.engine.end_round();
            }
            regs::CC => self.write_cc(Cc::from_bits(value)),
            // Writing 1 clears CSTS.NSSRO.
            regs::CSTS if Csts::from_bits(value).nssro() => {
                self.csts.set_nssro(false);
            }
            regs::NSSR if value == regs::NSSR_MAGIC => {
                self.request_subsystem_reset();
            }
            regs::AQA => self.aqa = Aqa::from_bits(value & 0x0fff_0fff),
            regs::ASQ => self.asq = low(self.asq) & !0xfff,
            o if o == regs::ASQ + 4 => self.asq = high(self.asq),
            regs::ACQ => self.acq = low(self.acq) & !0xfff,
            o if o == regs::ACQ + 4 => self.acq = high(self.acq),
            o if (regs::BPINFO..regs::CMBMSC).contains(&o) => self.write_boot_register(o, value),
            o if o & !4 == regs::CMBMSC => {
                if let Some(cmb) = &mut self.cmb {
                    cmb.write_cmbmsc(o, value);
                }
            }
            pci::DOORBELL_OFFSET..pci::MSIX_TABLE_OFFSET => {
                let index = ((offset - pci::DOORBELL_OFFSET) / 4) as usize;
                if !self.has_queues() {
                    return;
                }
                let queues = &mut self.engine.queues;
                if let Some(waker) = self.migration.waker_of(index) {
                    queues.store_doorbell(index, value);
                    waker.wake_by_ref();
                } else if !queues.write_doorbell(index, value) {
                    self.invalid_doorbell_register(index, value);
                }
            }
            _ => {}
        }
    }
}
