//! Controller memory buffer ("NVMe Base 2.1", 8.2.1; registers: 3.1.4.11, 3.1.4.12, 3.1.4.16,
//! 3.1.4.17): memory of the controller, behind a BAR of its own, in which the host may place
//! queues, PRP lists, SGLs and data.
//!
//! The host accesses the buffer through that BAR, by messages or by mapping its file. Once the host
//! has set CMBMSC.CMSE, commands address it from CMBMSC.CBA on: in the map of every engine, the
//! buffer covers guest memory at those addresses. The host may change its contents at any time,
//! like those of guest memory.
//!
//! Each client gets a file of its own, because a disconnected client may keep its file mapped.

use super::Controller;
use crate::engine::Order;
use crate::pci;
use dma::{MapError, Memory, SharedPages};
use nvme::regs::{self, Cmbloc, Cmbmsc, Cmbsts, Cmbsz};
use std::os::fd::OwnedFd;

/// State of the controller memory buffer (CMB).
pub(crate) struct Cmb {
    /// Size of the controller memory buffer in bytes.
    size: u64,
    /// Memory of the buffer; `None` when the memory for this client could not be mapped.
    pages: Option<SharedPages>,
    cmbmsc: Cmbmsc,
}

/// Name of the buffer's memory file in `/proc/PID/maps`.
const NAME: &str = "vnvme-cmb";

/// Allocates the buffer for one client. The file is emptied when this process drops it: a
/// disconnected client may keep the file open, but keeps no pages that this process wrote.
fn pages(size: u64) -> Result<SharedPages, MapError> {
    let pages = SharedPages::named(NAME, size as usize)?;
    pages.memory().empty_at_end();
    Ok(pages)
}

impl Cmb {
    /// Creates a controller memory buffer of `size` zero bytes.
    pub(super) fn new(size: u64) -> Result<Self, MapError> {
        Ok(Cmb {
            size,
            pages: Some(pages(size)?),
            cmbmsc: Cmbmsc::new(),
        })
    }

    /// Returns the half of a controller memory buffer register (CMBLOC, CMBSZ, CMBMSC, CMBSTS) at
    /// this offset.
    pub(super) fn read_register(&self, offset: u64) -> u32 {
        let cmbmsc = self.cmbmsc.into_bits();
        match offset {
            // CMBLOC and CMBSZ are valid once the host has set CMBMSC.CRE, and zero before.
            regs::CMBLOC if self.is_shown() => Cmbloc::new()
                .with_bir(pci::CMB_BAR)
                .with_cdpmls(true)
                .with_cdpcils(true)
                .into_bits(),
            regs::CMBSZ if self.is_shown() => Cmbsz::new()
                .with_sqs(true)
                .with_cqs(true)
                .with_lists(true)
                .with_rds(true)
                .with_wds(true)
                .with_sz((self.size >> 12) as u32)
                .into_bits(),
            regs::CMBMSC => cmbmsc as u32,
            o if o == regs::CMBMSC + 4 => (cmbmsc >> 32) as u32,
            regs::CMBSTS => Cmbsts::new()
                .with_cbai(self.cmbmsc.cmse() && self.base().is_none())
                .into_bits(),
            _ => 0,
        }
    }

    fn is_shown(&self) -> bool {
        self.cmbmsc.cre() && self.pages.is_some()
    }

    /// Sets one half of the register CMBMSC; `offset` selects the half.
    pub(super) fn write_cmbmsc(&mut self, offset: u64, value: u32) {
        let (old, value) = (self.cmbmsc.into_bits(), u64::from(value));
        let new = match offset {
            // Bits 11:2 are reserved.
            regs::CMBMSC => old & !0xffff_ffff | value & !0xffc,
            _ => old & 0xffff_ffff | value << 32,
        };
        self.cmbmsc = Cmbmsc::from_bits(new);
    }

    /// Returns the controller base address of the buffer; `None` when the buffer would exceed the
    /// address space.
    fn base(&self) -> Option<u64> {
        let base = self.cmbmsc.cba() << 12;
        let last = self.size - 1;
        base.checked_add(last).map(|_| base)
    }

    /// Returns the address and memory of the buffer; `None` while commands cannot address it.
    fn place(&self) -> Option<(u64, &Memory)> {
        let base = self.base().filter(|_| self.cmbmsc.cmse())?;
        Some((base, self.pages.as_ref()?.memory()))
    }

    /// Returns the value of the register CMBMSC.
    pub(crate) fn cmbmsc(&self) -> u64 {
        self.cmbmsc.into_bits()
    }
}

impl Controller {
    /// Returns the memory of the controller memory buffer, which the present or the next client may
    /// map; `None` without such a buffer.
    pub fn cmb_pages(&self) -> Option<&SharedPages> {
        self.cmb.as_ref()?.pages.as_ref()
    }

    /// Returns the size in bytes of the BAR of the controller memory buffer; 0 without such a
    /// buffer.
    pub fn cmb_size(&self) -> u64 {
        self.cmb.as_ref().map_or(0, |cmb| cmb.size)
    }

    /// Reads from the controller memory buffer. All bits read as ones while the function does not
    /// respond.
    pub fn cmb_read(&mut self, offset: u64, data: &mut [u8]) {
        let pages = self.cmb_pages().filter(|_| self.pci.decodes_memory());
        let at = usize::try_from(offset).ok();
        let read = at
            .zip(pages)
            .map(|(at, pages)| pages.memory().read(at, data));
        if !matches!(read, Some(Ok(()))) {
            data.fill(0xff);
        }
    }

    /// Writes to the controller memory buffer. Bytes beyond the buffer are ignored, and so are all
    /// writes while the function does not decode memory.
    pub fn cmb_write(&mut self, offset: u64, data: &[u8]) {
        let pages = self.cmb_pages().filter(|_| self.pci.decodes_memory());
        if let (Ok(at), Some(pages)) = (usize::try_from(offset), pages) {
            let _ = pages.memory().write(at, data);
        }
    }

    /// Places the buffer at the address in CMBMSC in every engine.
    /// [`Controller::receivers_settled`] returns `true` when all engines have applied the change.
    pub(super) fn obey_cmbmsc(&mut self) {
        let wanted = self.cmb.as_ref().and_then(Cmb::place);
        let known = self.engine.dma.device_memory();
        let is_same = match (wanted, known) {
            (Some((base, memory)), Some((at, known))) => base == at && memory.is_same(known),
            (wanted, known) => wanted.is_none() && known.is_none(),
        };
        if is_same {
            return;
        }
        let wanted = wanted.map(|(base, memory)| (base, memory.clone()));
        // The next process looks for queues at the buffer's address in the saved state, and needs
        // none that are noted to have no memory. Queues therefore lose the buffer before the new
        // address is committed, and find it afterwards.
        if known.is_some() {
            self.order_all(|| Order::DeviceMemory(None));
        }
        if wanted.is_some() {
            self.settle();
            self.order_all(|| Order::DeviceMemory(wanted.clone()));
        }
    }

    /// Resets CMBMSC to its power-on value.
    pub(super) fn reset_cmbmsc(&mut self) {
        if let Some(cmb) = &mut self.cmb {
            cmb.cmbmsc = Cmbmsc::new();
            self.obey_cmbmsc();
        }
    }

    /// Creates a new file for the next client: the previous client keeps its own mapped.
    pub(super) fn renew_cmb(&mut self) {
        let _disk = self.in_log();
        let Some(cmb) = &mut self.cmb else {
            return;
        };
        cmb.pages = match pages(cmb.size) {
            Ok(pages) => Some(pages),
            Err(error) => {
                if let Some(left_out) = self.engine.settings.log.allow("memory buffer") {
                    let text = "no controller memory buffer for the next client";
                    tracing::error!(%error, left_out, "{text}");
                }
                None
            }
        };
    }

    /// Restores the value returned by [`Cmb::cmbmsc`] and the memory file of a previous process.
    pub(crate) fn restore_cmb(&mut self, saved: u64, file: OwnedFd) -> Result<(), MapError> {
        if let Some(cmb) = &mut self.cmb {
            let pages = SharedPages::open(file, cmb.size as usize)?;
            pages.memory().empty_at_end();
            cmb.pages = Some(pages);
            cmb.cmbmsc = Cmbmsc::from_bits(saved & !0xffc);
            let place = cmb.place().map(|(base, memory)| (base, memory.clone()));
            self.engine.apply(Order::DeviceMemory(place))?;
        }
        Ok(())
    }
}
