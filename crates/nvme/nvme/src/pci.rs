//! PCI configuration space of an NVMe controller (NVMe over PCIe Transport 1.1, 3; PCI Express Base
//! 6.0, 7.5 to 7.7).
//!
//! The module contains only offsets and bits, for code that builds or reads the space. Offsets of a
//! capability's registers are relative to the start of the capability.

/// Class code of an NVM Express I/O controller: mass storage (01h), NVM (08h), NVMe I/O controller
/// (02h).
pub const CLASS_CODE: u32 = 0x01_08_02;

/// Size of the conventional configuration space, in bytes.
pub const CONFIG_SIZE: usize = 256;

/// Offset of the Vendor ID register, 16 bits.
pub const VENDOR_ID: usize = 0x00;
/// Offset of the Device ID register, 16 bits.
pub const DEVICE_ID: usize = 0x02;
/// Offset of the Command register, 16 bits; see [`command`].
pub const COMMAND: usize = 0x04;
/// Offset of the Status register, 16 bits; see [`status`].
pub const STATUS: usize = 0x06;
/// Offset of the BAR0 register, 32 bits: lower half of the address of the controller's registers.
pub const BAR0: usize = 0x10;
/// Offset of the BAR1 register, 32 bits: upper half of the address of the controller's registers.
pub const BAR1: usize = 0x14;
/// Offset of the BAR2 register, 32 bits.
pub const BAR2: usize = 0x18;
/// Offset of the Capabilities Pointer register, 8 bits.
pub const CAPABILITIES_POINTER: usize = 0x34;
/// Offset of the Interrupt Line register, 8 bits.
pub const INTERRUPT_LINE: usize = 0x3c;

/// Bits of the Command register.
pub mod command {
    /// Command register: Memory Space Enable.
    pub const MEMORY_SPACE: u16 = 1 << 1;
    /// Command register: Bus Master Enable.
    pub const BUS_MASTER: u16 = 1 << 2;
    /// Command register: Interrupt Disable, which forbids INTx.
    pub const INTERRUPT_DISABLE: u16 = 1 << 10;
}

/// Bits of the Status register.
pub mod status {
    /// Status register: Interrupt Status, set while INTx is pending.
    pub const INTERRUPT: u16 = 1 << 3;
    /// Status register: Capabilities List is present.
    pub const CAPABILITIES_LIST: u16 = 1 << 4;
}

/// Capability identifiers.
pub mod cap_id {
    /// Identifier of the Power Management capability.
    pub const POWER_MANAGEMENT: u8 = 0x01;
    /// Identifier of the MSI capability.
    pub const MSI: u8 = 0x05;
    /// Identifier of a vendor specific capability.
    pub const VENDOR_SPECIFIC: u8 = 0x09;
    /// Identifier of the PCI Express capability.
    pub const PCI_EXPRESS: u8 = 0x10;
    /// Identifier of the MSI-X capability.
    pub const MSI_X: u8 = 0x11;
}

/// Power Management capability, 8 bytes.
pub mod pm {
    /// Size of the capability in bytes.
    pub const SIZE: usize = 8;
    /// Offset of the Power Management Control and Status (PMCSR) register, 16 bits.
    pub const PMCSR: usize = 4;
    /// PMCSR: power state D0.
    pub const D0: u16 = 0;
}

/// MSI-X capability, 12 bytes, with its table and its pending bit array.
pub mod msix {
    /// Size of the capability in bytes.
    pub const SIZE: usize = 12;
    /// Offset of the Message Control (MXC) register, 16 bits.
    pub const CONTROL: usize = 2;
    /// Offset of the location of the table: offset in bits 31:3, BAR index in bits 2:0.
    pub const TABLE: usize = 4;
    /// Message Control: Function Mask.
    pub const CONTROL_FUNCTION_MASK: u16 = 1 << 14;
    /// Message Control: MSI-X Enable.
    pub const CONTROL_ENABLE: u16 = 1 << 15;
    /// Maximum number of entries in an MSI-X table.
    pub const MAX_ENTRIES: u16 = 2048;
}

/// PCI Express capability, 60 bytes (version 2).
pub mod pcie {
    /// Size of the capability in bytes.
    pub const SIZE: usize = 60;
    /// Offset of the PCI Express Capabilities register, 16 bits: version in bits 3:0, device type
    /// in bits 7:4.
    pub const CAPABILITIES: usize = 2;
    /// Offset of the Device Control register, 16 bits.
    pub const DEVICE_CONTROL: usize = 8;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn class_code_matches_drivers() {
        let word = CLASS_CODE << 8;
        assert_eq!(word.to_le_bytes(), [0, 0x02, 0x08, 0x01]);
    }
}
