//! PCI configuration space of an NVMe controller (NVMe over PCIe Transport 1.1, 3; PCI Express Base
//! 6.0, 7.5 to 7.7).
//!
//! The module contains only offsets and bits, for code that builds or reads the space. Offsets of a
//! capability's registers are relative to the start of the capability.

/// Class code of an NVM Express I/O controller: mass storage (01h), NVM (08h), NVMe I/O controller
/// (02h). The code is in bits 31:8 of the word at [`CLASS_REVISION`].
pub const CLASS_CODE: u32 = 0x01_08_02;
/// Class code of an NVM Express administrative controller.
pub const CLASS_CODE_ADMINISTRATIVE: u32 = 0x01_08_03;

/// Size of the conventional configuration space, in bytes.
pub const CONFIG_SIZE: usize = 256;
/// Size of the PCI Express configuration space, in bytes.
pub const EXTENDED_CONFIG_SIZE: usize = 4096;

/// Offset of the Vendor ID register, 16 bits.
pub const VENDOR_ID: usize = 0x00;
/// Offset of the Device ID register, 16 bits.
pub const DEVICE_ID: usize = 0x02;
/// Offset of the Command register, 16 bits; see [`command`].
pub const COMMAND: usize = 0x04;
/// Offset of the Status register, 16 bits; see [`status`].
pub const STATUS: usize = 0x06;
/// Offset of the word with the Revision ID in bits 7:0 and the class code in bits 31:8.
pub const CLASS_REVISION: usize = 0x08;
/// Offset of the Cache Line Size register, 8 bits.
pub const CACHE_LINE_SIZE: usize = 0x0c;
/// Offset of the Header Type register, 8 bits: 0 for a device, bit 7 for a multi-function device.
pub const HEADER_TYPE: usize = 0x0e;
/// Offset of the BAR0 register, 32 bits: lower half of the address of the controller's registers.
pub const BAR0: usize = 0x10;
/// Offset of the BAR1 register, 32 bits: upper half of the address of the controller's registers.
pub const BAR1: usize = 0x14;
/// Offset of the BAR2 register, 32 bits.
pub const BAR2: usize = 0x18;
/// Offset of the BAR3 register, 32 bits.
pub const BAR3: usize = 0x1c;
/// Offset of the BAR4 register, 32 bits.
pub const BAR4: usize = 0x20;
/// Offset of the BAR5 register, 32 bits.
pub const BAR5: usize = 0x24;
/// Offset of the Subsystem Vendor ID register, 16 bits.
pub const SUBSYSTEM_VENDOR_ID: usize = 0x2c;
/// Offset of the Subsystem ID register, 16 bits.
pub const SUBSYSTEM_ID: usize = 0x2e;
/// Offset of the Expansion ROM Base Address register, 32 bits.
pub const EXPANSION_ROM: usize = 0x30;
/// Offset of the Capabilities Pointer register, 8 bits.
pub const CAPABILITIES_POINTER: usize = 0x34;
/// Offset of the Interrupt Line register, 8 bits.
pub const INTERRUPT_LINE: usize = 0x3c;
/// Offset of the Interrupt Pin register, 8 bits: 0 none, 1 INTA.
pub const INTERRUPT_PIN: usize = 0x3d;
/// Offset of the first extended capability, a word of zeroes when there is none.
pub const EXTENDED_CAPABILITIES: usize = 0x100;

/// Low bits of a 64-bit, non-prefetchable memory BAR.
pub const BAR_MEMORY_64: u32 = 0x4;

/// Bits of the Command register.
pub mod command {
    /// Command register: I/O Space Enable.
    pub const IO_SPACE: u16 = 1 << 0;
    /// Command register: Memory Space Enable.
    pub const MEMORY_SPACE: u16 = 1 << 1;
    /// Command register: Bus Master Enable.
    pub const BUS_MASTER: u16 = 1 << 2;
    /// Command register: Parity Error Response.
    pub const PARITY_ERROR_RESPONSE: u16 = 1 << 6;
    /// Command register: SERR# Enable.
    pub const SERR: u16 = 1 << 8;
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
    /// Offset of the Power Management Capabilities (PMC) register, 16 bits.
    pub const PMC: usize = 2;
    /// Offset of the Power Management Control and Status (PMCSR) register, 16 bits.
    pub const PMCSR: usize = 4;
    /// PMC: version 3 of the PCI power management specification, in bits 2:0.
    pub const PMC_VERSION_3: u16 = 3;
    /// PMCSR: mask of the Power State, see [`D0`] and [`D3HOT`].
    pub const PMCSR_POWER_STATE: u16 = 0x3;
    /// PMCSR: No Soft Reset. A return from D3hot to D0 keeps the configuration and does not reset
    /// the function.
    pub const PMCSR_NO_SOFT_RESET: u16 = 1 << 3;
    /// PMCSR: power state D0.
    pub const D0: u16 = 0;
    /// PMCSR: power state D3hot.
    pub const D3HOT: u16 = 3;
}

/// MSI-X capability, 12 bytes, with its table and its pending bit array.
pub mod msix {
    /// Size of the capability in bytes.
    pub const SIZE: usize = 12;
    /// Offset of the Message Control (MXC) register, 16 bits.
    pub const CONTROL: usize = 2;
    /// Offset of the location of the table: offset in bits 31:3, BAR index in bits 2:0.
    pub const TABLE: usize = 4;
    /// Offset of the location of the Pending Bit Array: offset in bits 31:3, BAR index in bits 2:0.
    pub const PBA: usize = 8;
    /// Message Control: Table Size in entries, zero-based, read only.
    pub const CONTROL_TABLE_SIZE_Z: u16 = 0x7ff;
    /// Message Control: Function Mask.
    pub const CONTROL_FUNCTION_MASK: u16 = 1 << 14;
    /// Message Control: MSI-X Enable.
    pub const CONTROL_ENABLE: u16 = 1 << 15;
    /// Maximum number of entries in an MSI-X table.
    pub const MAX_ENTRIES: u16 = 2048;
    /// Size of an MSI-X table entry in bytes.
    pub const ENTRY_SIZE: usize = 16;
    /// Offset of the Message Address in a table entry, 64 bits.
    pub const ENTRY_ADDRESS: usize = 0;
    /// Offset of the Message Data in a table entry, 32 bits.
    pub const ENTRY_DATA: usize = 8;
    /// Offset of the Vector Control in a table entry, 32 bits.
    pub const ENTRY_CONTROL: usize = 12;
    /// Vector Control: Mask Bit, set at reset.
    pub const ENTRY_CONTROL_MASK: u32 = 1;
}

/// PCI Express capability, 60 bytes (version 2).
pub mod pcie {
    /// Size of the capability in bytes.
    pub const SIZE: usize = 60;
    /// Offset of the PCI Express Capabilities register, 16 bits: version in bits 3:0, device type
    /// in bits 7:4.
    pub const CAPABILITIES: usize = 2;
    /// Offset of the Device Capabilities register, 32 bits.
    pub const DEVICE_CAPABILITIES: usize = 4;
    /// Offset of the Device Control register, 16 bits.
    pub const DEVICE_CONTROL: usize = 8;
    /// Offset of the Device Status register, 16 bits.
    pub const DEVICE_STATUS: usize = 10;
    /// Offset of the Link Capabilities register, 32 bits.
    pub const LINK_CAPABILITIES: usize = 12;
    /// Offset of the Link Control register, 16 bits.
    pub const LINK_CONTROL: usize = 16;
    /// Offset of the Link Status register, 16 bits.
    pub const LINK_STATUS: usize = 18;
    /// Offset of the Device Capabilities 2 register, 32 bits.
    pub const DEVICE_CAPABILITIES_2: usize = 36;
    /// Offset of the Device Control 2 register, 16 bits.
    pub const DEVICE_CONTROL_2: usize = 40;
    /// Offset of the Link Capabilities 2 register, 32 bits.
    pub const LINK_CAPABILITIES_2: usize = 44;
    /// Offset of the Link Control 2 register, 16 bits.
    pub const LINK_CONTROL_2: usize = 48;
    /// Offset of the Link Status 2 register, 16 bits.
    pub const LINK_STATUS_2: usize = 50;
    /// PCI Express Capabilities: version 2.
    pub const VERSION_2: u16 = 2;
    /// PCI Express Capabilities: device type of a PCI Express endpoint.
    pub const TYPE_ENDPOINT: u16 = 0 << 4;
    /// PCI Express Capabilities: device type of a root complex integrated endpoint.
    pub const TYPE_INTEGRATED_ENDPOINT: u16 = 9 << 4;
    /// Device Capabilities: Role-Based Error Reporting.
    pub const DEVICE_CAPABILITIES_ROLE_BASED_ERRORS: u32 = 1 << 15;
    /// Device Capabilities: Function Level Reset Capability.
    pub const DEVICE_CAPABILITIES_FLR: u32 = 1 << 28;
    /// Device Control: Initiate Function Level Reset; reads as zero.
    pub const DEVICE_CONTROL_INITIATE_FLR: u16 = 1 << 15;
    /// Device Capabilities 2: Completion Timeout Disable Supported.
    pub const DEVICE_CAPABILITIES_2_COMPLETION_TIMEOUT_DISABLE: u32 = 1 << 4;
}

/// Extended capability identifiers.
pub mod extended_cap_id {
    /// Identifier of the Advanced Error Reporting extended capability.
    pub const ADVANCED_ERROR_REPORTING: u16 = 0x0001;
    /// Identifier of the Device Serial Number extended capability.
    pub const DEVICE_SERIAL_NUMBER: u16 = 0x0003;
    /// Identifier of the Single Root I/O Virtualization extended capability.
    pub const SR_IOV: u16 = 0x0010;
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
