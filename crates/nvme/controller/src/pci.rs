//! PCI configuration space of the controller's one function: type 0 header, power management, PCI
//! Express and MSI-X capabilities ("NVMe over PCIe Transport 1.1", 3.8).
//!
//! The space is an array of bytes beside an array of write masks. BAR sizing, which writes all ones
//! and reads back, needs no code of its own: the mask of a BAR's size bits is zero.

use crate::survival::state::Pci;
use nvme::pci::{command, status};

/// Size of the configuration space in bytes: that of a PCI Express function. The extended part is
/// empty here.
pub const CONFIG_SIZE: usize = 4096;

/// Size of BAR0 in bytes: registers, one page of doorbells, the MSI-X table, and the pending bit
/// array.
pub const BAR0_SIZE: u64 = 0x4000;
/// Offset of the doorbell page in BAR0, in bytes ("NVMe over PCIe Transport 1.1", 3.1.2).
pub const DOORBELL_OFFSET: u64 = 0x1000;
/// Size of the doorbell page, in bytes.
pub const DOORBELL_SIZE: u64 = 0x1000;
/// Offset of the MSI-X table in BAR0, in bytes.
pub const MSIX_TABLE_OFFSET: u64 = 0x2000;
/// Index of the BAR that contains only the controller memory buffer (CMBLOC.BIR).
pub const CMB_BAR: u8 = 2;
/// Offset of the MSI-X pending bit array in BAR0, in bytes.
pub const MSIX_PBA_OFFSET: u64 = 0x3000;

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const BAR0: usize = 0x10;
const BAR2: usize = 0x18;
const INTERRUPT_LINE: usize = 0x3c;
const PM_CAP: usize = 0x40;
const PM_CONTROL: usize = PM_CAP + 4;
const MSIX_CAP: usize = 0x50;
const PCIE_CAP: usize = 0x60;
const MSIX_CONTROL: usize = MSIX_CAP + 2;
const PCIE_DEVCTL: usize = PCIE_CAP + 8;
/// Initiate Function Level Reset: bit 15 of Device Control, as a bit of its upper byte.
const DEVCTL_FLR_HIGH: u8 = 0x80;

/// PCI vendor, device, subsystem and revision IDs of a controller's PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciIds {
    /// PCI vendor ID (configuration space offset 00h).
    pub vendor: u16,
    /// PCI device ID (configuration space offset 02h).
    pub device: u16,
    /// PCI subsystem vendor ID (configuration space offset 2Ch).
    pub subsystem_vendor: u16,
    /// PCI subsystem ID (configuration space offset 2Eh).
    pub subsystem: u16,
    /// PCI revision ID (configuration space offset 08h).
    pub revision: u8,
}

impl Default for PciIds {
    fn default() -> Self {
        // The project has no vendor ID of its own. Emulated devices commonly use 1234h, and NVMe
        // drivers match on the class code.
        PciIds {
            vendor: 0x1234,
            device: 0x4e56,
            subsystem_vendor: 0x1234,
            subsystem: 0x4e56,
            revision: 1,
        }
    }
}

/// Action that a write to PCI configuration space requires of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigEffect {
    /// The write requires no action of the controller.
    None,
    /// The write has initiated a Function Level Reset, which the controller has to execute.
    FunctionLevelReset,
}

/// PCI configuration space (256 bytes) of the controller's function.
pub struct ConfigSpace {
    bytes: Box<[u8; CONFIG_SIZE]>,
    mask: Box<[u8; CONFIG_SIZE]>,
    pristine: Box<[u8; CONFIG_SIZE]>,
    /// Whether Memory Space Enable was ever set since power-on or reset.
    memory_was_enabled: bool,
}

impl ConfigSpace {
    /// Creates the configuration space of a function with `vectors` MSI-X vectors (1 to 2048).
    /// `cmb_size` is the size of the controller memory buffer in bytes, a power of two from 4096;
    /// `None` without such a buffer.
    pub fn new(ids: PciIds, vectors: u16, cmb_size: Option<u64>) -> Self {
        let mut space = ConfigSpace {
            bytes: Box::new([0; CONFIG_SIZE]),
            mask: Box::new([0; CONFIG_SIZE]),
            pristine: Box::new([0; CONFIG_SIZE]),
            memory_was_enabled: false,
        };
        space.header(ids);
        if let Some(size) = cmb_size {
            // BAR2 is a 64-bit memory BAR, prefetchable because reads have no side effects.
            space.set32(BAR2, 0b1100, !(size as u32 - 1));
            space.set32(BAR2 + 4, 0, u32::MAX);
        }
        space.power_management();
        space.msix(vectors);
        space.express();
        space.pristine.copy_from_slice(&space.bytes[..]);
        space
    }

    /// Sets the bytes of a register and the mask of bits that the host may write. `at` must be a
    /// valid offset; all callers are in this module.
    fn set<const N: usize>(&mut self, at: usize, value: [u8; N], mask: [u8; N]) {
        for (i, (value, mask)) in value.into_iter().zip(mask).enumerate() {
            if let (Some(byte), Some(bits)) =
                (self.bytes.get_mut(at + i), self.mask.get_mut(at + i))
            {
                (*byte, *bits) = (value, mask);
            }
        }
    }

    fn set8(&mut self, at: usize, value: u8, mask: u8) {
        self.set(at, [value], [mask]);
    }

    fn set16(&mut self, at: usize, value: u16, mask: u16) {
        self.set(at, value.to_le_bytes(), mask.to_le_bytes());
    }

    fn set32(&mut self, at: usize, value: u32, mask: u32) {
        self.set(at, value.to_le_bytes(), mask.to_le_bytes());
    }

    /// Returns a byte of the space. `at` must be a valid offset; all callers are in this module.
    fn byte(&self, at: usize) -> u8 {
        self.bytes.get(at).copied().unwrap_or(0)
    }

    fn header(&mut self, ids: PciIds) {
        self.set16(0x00, ids.vendor, 0);
        self.set16(0x02, ids.device, 0);
        // I/O space is not decoded. The host controls memory, bus master, parity, SERR and INTx
        // disable.
        self.set16(COMMAND, 0, 0x0546);
        self.set16(STATUS, status::CAPABILITIES_LIST, 0);
        self.set8(0x08, ids.revision, 0);
        // Class 01h (mass storage), subclass 08h (non-volatile memory), interface 02h (NVM Express
        // I/O controller).
        self.set(0x09, [0x02, 0x08, 0x01], [0; 3]);
        self.set8(0x0c, 0, 0xff); // cache line size
        let size_mask = !(BAR0_SIZE as u32 - 1);
        self.set32(BAR0, 0b100, size_mask); // 64-bit memory, not prefetchable
        self.set32(BAR0 + 4, 0, u32::MAX);
        self.set16(0x2c, ids.subsystem_vendor, 0);
        self.set16(0x2e, ids.subsystem, 0);
        self.set8(0x34, PM_CAP as u8, 0);
        self.set8(INTERRUPT_LINE, 0, 0xff);
        self.set8(INTERRUPT_LINE + 1, 1, 0); // INTA#
    }

    fn power_management(&mut self) {
        self.set16(PM_CAP, 0x01 | (MSIX_CAP as u16) << 8, 0);
        self.set16(PM_CAP + 2, 0x0003, 0); // version 3, no D1, no D2, no PME
        self.set16(PM_CONTROL, 1 << 3, 0x0003); // No_Soft_Reset; power state is the host's
    }

    fn msix(&mut self, vectors: u16) {
        let size_z = vectors.clamp(1, 2048) - 1;
        self.set16(MSIX_CAP, 0x11 | (PCIE_CAP as u16) << 8, 0);
        self.set16(MSIX_CONTROL, size_z, 0xc000); // enable and function mask
        self.set32(MSIX_CAP + 4, MSIX_TABLE_OFFSET as u32, 0); // BIR 0
        self.set32(MSIX_CAP + 8, MSIX_PBA_OFFSET as u32, 0);
    }

    fn express(&mut self) {
        self.set16(PCIE_CAP, 0x10, 0);
        self.set16(PCIE_CAP + 2, 0x0002, 0); // version 2, endpoint
        self.set32(PCIE_CAP + 4, 1 << 15 | 1 << 28, 0); // role-based error reporting, FLR capable
        self.set16(PCIE_DEVCTL, 0x2810, 0x7fff); // FLR (bit 15) reads as zero
        self.set32(PCIE_CAP + 12, 0x0000_0411, 0); // link: 2.5 GT/s, x1, ASPM L0s
        self.set16(PCIE_CAP + 16, 0, 0x01fb);
        self.set16(PCIE_CAP + 18, 0x0011, 0); // link status: 2.5 GT/s, x1
        self.set32(PCIE_CAP + 36, 1 << 4, 0); // device capabilities 2: completion timeout disable
        self.set16(PCIE_CAP + 40, 0, 0x001f);
    }

    /// Reads `data.len()` bytes at `offset`. Bytes past the end read as all ones, as on a PCI bus
    /// without a responding device.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            let at = usize::try_from(offset).ok().and_then(|o| o.checked_add(i));
            *byte = at
                .and_then(|at| self.bytes.get(at))
                .copied()
                .unwrap_or(0xff);
        }
    }

    /// Stores the writable bits of `data` at `offset`, and returns the effect on the controller.
    /// Bytes past the end are ignored.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> ConfigEffect {
        let mut effect = ConfigEffect::None;
        for (i, &byte) in data.iter().enumerate() {
            let Some(at) = usize::try_from(offset).ok().and_then(|o| o.checked_add(i)) else {
                break;
            };
            let (Some(slot), Some(&mask)) = (self.bytes.get_mut(at), self.mask.get(at)) else {
                break;
            };
            *slot = (*slot & !mask) | (byte & mask);
            if at == PCIE_DEVCTL + 1 && byte & DEVCTL_FLR_HIGH != 0 {
                effect = ConfigEffect::FunctionLevelReset;
            }
        }
        self.memory_was_enabled |= self.command() & command::MEMORY_SPACE != 0;
        effect
    }

    /// Returns the bytes that the host can write, for the next process.
    pub(crate) fn save(&self) -> Pci {
        let written = (0..).zip(self.bytes.iter().zip(&self.mask[..]));
        let written = written.filter(|(_, (_, mask))| **mask != 0);
        Pci {
            bytes: written
                .map(|(at, (byte, mask))| (at, byte & mask))
                .collect(),
            memory_was_enabled: self.memory_was_enabled,
        }
    }

    /// Restores the bytes saved by [`ConfigSpace::save`], within the host's write masks.
    pub(crate) fn restore(&mut self, saved: &Pci) {
        for &(at, byte) in &saved.bytes {
            // The effect of this write occurred in the previous process.
            let _ = self.write(at.into(), &[byte]);
        }
        self.memory_was_enabled |= saved.memory_was_enabled;
    }

    /// Sets all bytes of configuration space to their power-on values.
    pub fn reset(&mut self) {
        self.bytes.copy_from_slice(&self.pristine[..]);
        self.memory_was_enabled = false;
    }

    fn command(&self) -> u16 {
        u16::from_le_bytes([self.byte(COMMAND), self.byte(COMMAND + 1)])
    }

    /// Returns whether the function is in power state D0. In D3hot it answers only configuration
    /// accesses, and sends no interrupt messages ("PCI Bus Power Management Interface 1.2", 5.4.1).
    fn is_awake(&self) -> bool {
        self.byte(PM_CONTROL) & 0x03 == 0
    }

    /// Returns whether the function may access the host's memory: Bus Master Enable is set, in D0.
    pub fn is_bus_master(&self) -> bool {
        self.command() & command::BUS_MASTER != 0 && self.is_awake()
    }

    /// Returns whether BAR0 responds to accesses: Memory Space Enable is set, in D0.
    ///
    /// BAR0 also responds while the client has never set the bit since power-on or reset. Some
    /// userspace drivers set Bus Master Enable and Interrupt Disable, but not Memory Space Enable
    /// (SPDK's vfio-user initiator); their accesses are messages that name the region, so no
    /// address is decoded. In a VM, firmware or driver sets the bit before the first access, and
    /// the VMM itself unmaps the BAR when the bit is cleared.
    pub fn decodes_memory(&self) -> bool {
        let enabled = self.command() & command::MEMORY_SPACE != 0;
        (enabled || !self.memory_was_enabled) && self.is_awake()
    }

    /// Returns whether `len` bytes at `offset` include the Interrupt Status bit of the PCI status
    /// register.
    pub fn covers_interrupt_status(offset: u64, len: usize) -> bool {
        let at = STATUS as u64;
        offset <= at && at - offset < len as u64
    }

    /// Sets or clears the Interrupt Status bit of the PCI status register, which the host cannot
    /// write.
    pub fn set_interrupt_status(&mut self, on: bool) {
        let bit = status::INTERRUPT as u8;
        let others = self.byte(STATUS) & !bit;
        self.set8(STATUS, others | if on { bit } else { 0 }, 0);
    }

    /// Returns whether MSI-X interrupts may be sent: MSI-X Enable is set, and Function Mask is
    /// clear.
    pub fn msix_enabled(&self) -> bool {
        self.byte(MSIX_CONTROL + 1) & 0xc0 == 0x80
    }

    /// Returns whether INTx must not be asserted: Interrupt Disable is set, or the power state is
    /// not D0.
    pub fn intx_disabled(&self) -> bool {
        self.command() & command::INTERRUPT_DISABLE != 0 || !self.is_awake()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read32(space: &ConfigSpace, at: u64) -> u32 {
        let mut b = [0; 4];
        space.read(at, &mut b);
        u32::from_le_bytes(b)
    }

    #[test]
    fn bar_sizing_reads_back_size() {
        let mut space = ConfigSpace::new(PciIds::default(), 65, None);
        space.write(0x10, &u32::MAX.to_le_bytes());
        space.write(0x14, &u32::MAX.to_le_bytes());
        let low = read32(&space, 0x10);
        assert_eq!(low & 0xf, 0b100);
        let bar = u64::from(read32(&space, 0x14)) << 32 | u64::from(low & !0xf);
        assert_eq!(!bar + 1, BAR0_SIZE);
        for other in [0x18, 0x1c, 0x20, 0x24, 0x30] {
            space.write(other, &u32::MAX.to_le_bytes());
            assert_eq!(read32(&space, other), 0, "register {other:#x}");
        }
    }

    #[test]
    fn cmb_has_own_bar() {
        for size in [4096, 1 << 20, 64 << 20] {
            let mut space = ConfigSpace::new(PciIds::default(), 65, Some(size));
            space.write(0x18, &u32::MAX.to_le_bytes());
            space.write(0x1c, &u32::MAX.to_le_bytes());
            let low = read32(&space, 0x18);
            assert_eq!(low & 0xf, 0b1100, "64 bits, prefetchable");
            let bar = u64::from(read32(&space, 0x1c)) << 32 | u64::from(low & !0xf);
            assert_eq!(!bar + 1, size);
            space.reset();
            assert_eq!(read32(&space, 0x18), 0b1100);
        }
    }

    #[test]
    fn capability_list_is_walkable() {
        let space = ConfigSpace::new(PciIds::default(), 65, None);
        let mut at = read32(&space, 0x34) & 0xff;
        let mut seen = Vec::new();
        while at != 0 {
            assert!(seen.len() < 8, "the list does not end");
            let cap = read32(&space, u64::from(at));
            seen.push(cap & 0xff);
            at = cap >> 8 & 0xff;
        }
        assert_eq!(seen, [0x01, 0x11, 0x10]);
        assert_eq!(
            read32(&space, 0x50) >> 16 & 0x7ff,
            64,
            "MSI-X table size is zero-based"
        );
        assert_eq!(read32(&space, 0x100), 0, "no extended capability");
    }

    #[test]
    fn config_space_keeps_read_only_bits_and_reset_restores() {
        let mut space = ConfigSpace::new(PciIds::default(), 65, None);
        let id = read32(&space, 0);
        space.write(0, &[0xff; 16]);
        assert_eq!(read32(&space, 0), id);
        assert_eq!(read32(&space, 4) & 0xffff, 0x0546);
        space.write(0x52, &0xc000u16.to_le_bytes());
        assert!(!space.msix_enabled(), "function mask");
        space.write(0x52, &0x8000u16.to_le_bytes());
        assert!(space.msix_enabled());
        space.reset();
        assert!(!space.msix_enabled());
        assert_eq!(read32(&space, 4) & 0xffff, 0);
    }

    #[test]
    fn flr_is_detected_for_every_write_width() {
        for (at, data) in [
            (0x68u64, &[0x10u8, 0xa8][..]),
            (0x69, &[0x80]),
            (0x68, &[0, 0x80, 0, 0]),
        ] {
            let mut space = ConfigSpace::new(PciIds::default(), 65, None);
            assert_eq!(space.write(at, data), ConfigEffect::FunctionLevelReset);
            let mut b = [0; 2];
            space.read(0x68, &mut b);
            assert_eq!(b[1] & 0x80, 0, "the bit reads as zero");
        }
        let mut space = ConfigSpace::new(PciIds::default(), 65, None);
        assert_eq!(space.write(0x68, &[0x10, 0x28]), ConfigEffect::None);
    }

    #[test]
    fn config_space_past_end_reads_ones() {
        let mut space = ConfigSpace::new(PciIds::default(), 1, None);
        let mut b = [0; 4];
        space.read(4094, &mut b);
        assert_eq!(b, [0, 0, 0xff, 0xff]);
        space.read(u64::MAX - 1, &mut b);
        assert_eq!(b, [0xff; 4]);
        assert_eq!(space.write(u64::MAX, &[1, 2]), ConfigEffect::None);
    }
}
