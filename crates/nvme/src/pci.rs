//! PCI configuration space of an NVMe controller: NVMe over PCIe Transport 1.1, 3; PCI Express Base
//! 6.0, 7.5 to 7.7.
//!
//! Offsets and bits only, for code that builds or reads the space. Offsets of a capability are
//! relative to its start.

/// Class code of an NVM Express I/O controller: mass storage (01h), NVM (08h), NVMe I/O controller
/// (02h), as in bits 23:0 of the word at [`CLASS_REVISION`] shifted right by 8.
pub const CLASS_CODE: u32 = 0x01_08_02;
/// Class code of an NVM Express administrative controller.
pub const CLASS_CODE_ADMINISTRATIVE: u32 = 0x01_08_03;

/// Size of the conventional configuration space, in bytes.
pub const CONFIG_SIZE: usize = 256;
/// Size of the PCI Express configuration space, in bytes.
pub const EXTENDED_CONFIG_SIZE: usize = 4096;

/// Vendor ID, 16 bits.
pub const VENDOR_ID: usize = 0x00;
/// Device ID, 16 bits.
pub const DEVICE_ID: usize = 0x02;
/// Command, 16 bits; see [`command`].
pub const COMMAND: usize = 0x04;
/// Status, 16 bits; see [`status`].
pub const STATUS: usize = 0x06;
/// Revision ID in bits 7:0, class code in bits 31:8.
pub const CLASS_REVISION: usize = 0x08;
/// Cache Line Size, 8 bits.
pub const CACHE_LINE_SIZE: usize = 0x0c;
/// Header Type, 8 bits: 0 for a device, bit 7 for a multi-function device.
pub const HEADER_TYPE: usize = 0x0e;
/// BAR0, 32 bits: lower half of the address of the controller's registers.
pub const BAR0: usize = 0x10;
/// BAR1, 32 bits: upper half of the address of the controller's registers.
pub const BAR1: usize = 0x14;
/// BAR2, 32 bits.
pub const BAR2: usize = 0x18;
/// BAR3, 32 bits.
pub const BAR3: usize = 0x1c;
/// BAR4, 32 bits.
pub const BAR4: usize = 0x20;
/// BAR5, 32 bits.
pub const BAR5: usize = 0x24;
/// Subsystem Vendor ID, 16 bits.
pub const SUBSYSTEM_VENDOR_ID: usize = 0x2c;
/// Subsystem ID, 16 bits.
pub const SUBSYSTEM_ID: usize = 0x2e;
/// Expansion ROM address, 32 bits.
pub const EXPANSION_ROM: usize = 0x30;
/// Capabilities Pointer, 8 bits.
pub const CAPABILITIES_POINTER: usize = 0x34;
/// Interrupt Line, 8 bits.
pub const INTERRUPT_LINE: usize = 0x3c;
/// Interrupt Pin, 8 bits: 0 none, 1 INTA.
pub const INTERRUPT_PIN: usize = 0x3d;
/// First extended capability; a word of zeroes when there is none.
pub const EXTENDED_CAPABILITIES: usize = 0x100;

/// Low bits of a 64-bit, non-prefetchable memory BAR.
pub const BAR_MEMORY_64: u32 = 0x4;

/// Bits of the Command register.
pub mod command {
    /// I/O Space Enable.
    pub const IO_SPACE: u16 = 1 << 0;
    /// Memory Space Enable.
    pub const MEMORY_SPACE: u16 = 1 << 1;
    /// Bus Master Enable.
    pub const BUS_MASTER: u16 = 1 << 2;
    /// Parity Error Response.
    pub const PARITY_ERROR_RESPONSE: u16 = 1 << 6;
    /// SERR# Enable.
    pub const SERR: u16 = 1 << 8;
    /// Interrupt Disable: no INTx.
    pub const INTERRUPT_DISABLE: u16 = 1 << 10;
}

/// Bits of the Status register.
pub mod status {
    /// Interrupt Status: INTx is asserted.
    pub const INTERRUPT: u16 = 1 << 3;
    /// Capabilities List.
    pub const CAPABILITIES_LIST: u16 = 1 << 4;
}

/// Capability identifiers.
pub mod cap_id {
    /// Power Management.
    pub const POWER_MANAGEMENT: u8 = 0x01;
    /// MSI.
    pub const MSI: u8 = 0x05;
    /// Vendor specific.
    pub const VENDOR_SPECIFIC: u8 = 0x09;
    /// PCI Express.
    pub const PCI_EXPRESS: u8 = 0x10;
    /// MSI-X.
    pub const MSI_X: u8 = 0x11;
}

/// Power Management capability, 8 bytes.
pub mod pm {
    /// Size in bytes.
    pub const SIZE: usize = 8;
    /// Power Management Capabilities (PMC), 16 bits.
    pub const PMC: usize = 2;
    /// Power Management Control and Status (PMCSR), 16 bits.
    pub const PMCSR: usize = 4;
    /// PMC: version 3 of the PCI power management specification, in bits 2:0.
    pub const PMC_VERSION_3: u16 = 3;
    /// PMCSR: Power State, 0 for D0 and 3 for D3hot.
    pub const PMCSR_POWER_STATE: u16 = 0x3;
    /// PMCSR: No Soft Reset: a return from D3hot to D0 keeps the configuration and does not reset.
    pub const PMCSR_NO_SOFT_RESET: u16 = 1 << 3;
    /// Power state D0.
    pub const D0: u16 = 0;
    /// Power state D3hot.
    pub const D3HOT: u16 = 3;
}

/// MSI-X capability, 12 bytes, its table and its pending bits.
pub mod msix {
    /// Size of the capability in bytes.
    pub const SIZE: usize = 12;
    /// Message Control (MXC), 16 bits.
    pub const CONTROL: usize = 2;
    /// Table offset in bits 31:3, BAR index in bits 2:0.
    pub const TABLE: usize = 4;
    /// Pending Bit Array offset in bits 31:3, BAR index in bits 2:0.
    pub const PBA: usize = 8;
    /// Control: Table Size in entries, zero-based; read only.
    pub const CONTROL_TABLE_SIZE_Z: u16 = 0x7ff;
    /// Control: Function Mask.
    pub const CONTROL_FUNCTION_MASK: u16 = 1 << 14;
    /// Control: MSI-X Enable.
    pub const CONTROL_ENABLE: u16 = 1 << 15;
    /// Maximum number of entries in a table.
    pub const MAX_ENTRIES: u16 = 2048;
    /// Size of a table entry in bytes.
    pub const ENTRY_SIZE: usize = 16;
    /// Entry: Message Address, 64 bits.
    pub const ENTRY_ADDRESS: usize = 0;
    /// Entry: Message Data, 32 bits.
    pub const ENTRY_DATA: usize = 8;
    /// Entry: Vector Control, 32 bits.
    pub const ENTRY_CONTROL: usize = 12;
    /// Vector Control: Mask Bit, set at reset.
    pub const ENTRY_CONTROL_MASK: u32 = 1;
}

/// PCI Express capability, 60 bytes (version 2).
pub mod pcie {
    /// Size in bytes.
    pub const SIZE: usize = 60;
    /// PCI Express Capabilities, 16 bits: version in bits 3:0, device type in bits 7:4.
    pub const CAPABILITIES: usize = 2;
    /// Device Capabilities, 32 bits.
    pub const DEVICE_CAPABILITIES: usize = 4;
    /// Device Control, 16 bits.
    pub const DEVICE_CONTROL: usize = 8;
    /// Device Status, 16 bits.
    pub const DEVICE_STATUS: usize = 10;
    /// Link Capabilities, 32 bits.
    pub const LINK_CAPABILITIES: usize = 12;
    /// Link Control, 16 bits.
    pub const LINK_CONTROL: usize = 16;
    /// Link Status, 16 bits.
    pub const LINK_STATUS: usize = 18;
    /// Device Capabilities 2, 32 bits.
    pub const DEVICE_CAPABILITIES_2: usize = 36;
    /// Device Control 2, 16 bits.
    pub const DEVICE_CONTROL_2: usize = 40;
    /// Link Capabilities 2, 32 bits.
    pub const LINK_CAPABILITIES_2: usize = 44;
    /// Link Control 2, 16 bits.
    pub const LINK_CONTROL_2: usize = 48;
    /// Link Status 2, 16 bits.
    pub const LINK_STATUS_2: usize = 50;
    /// Capabilities: version 2.
    pub const VERSION_2: u16 = 2;
    /// Capabilities: device type, PCI Express endpoint.
    pub const TYPE_ENDPOINT: u16 = 0 << 4;
    /// Capabilities: device type, root complex integrated endpoint.
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
    /// Advanced Error Reporting.
    pub const ADVANCED_ERROR_REPORTING: u16 = 0x0001;
    /// Device Serial Number.
    pub const DEVICE_SERIAL_NUMBER: u16 = 0x0003;
    /// Single Root I/O Virtualization.
    pub const SR_IOV: u16 = 0x0010;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn class_code_is_the_one_that_drivers_match() {
        let word = CLASS_CODE << 8;
        assert_eq!(word.to_le_bytes(), [0, 0x02, 0x08, 0x01]);
    }
}
