//! I/O Management Receive and Send (NVMe Base 2.1, 7.3 and 7.4), and their data about reclaim unit
//! handles (NVM Command Set 1.1, 3.2).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64};

use crate::macros::{open_values, wire_struct};

open_values! {
    /// Management Operation of I/O Management Receive.
    pub ReceiveOperation: u8 {
        NONE = 0, "No Action";
        HANDLE_STATUS = 1, "Reclaim Unit Handle Status";
    }
}

open_values! {
    /// Management Operation of I/O Management Send.
    pub SendOperation: u8 {
        NONE = 0, "No Action";
        HANDLE_UPDATE = 1, "Reclaim Unit Handle Update";
    }
}

/// Dword 10 of I/O Management Receive; dword 11 is the number of dwords, zero-based.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct IoManagementReceiveCdw10 {
    /// Management Operation.
    #[bits(8)]
    pub mo: ReceiveOperation,
    __: u8,
    /// Management Operation Specific.
    pub mos: u16,
}

/// Dword 10 of I/O Management Send.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct IoManagementSendCdw10 {
    /// Management Operation.
    #[bits(8)]
    pub mo: SendOperation,
    __: u8,
    /// Management Operation Specific. For a reclaim unit handle update: the number of placement
    /// identifiers, zero-based.
    pub mos: u16,
}

wire_struct! {
    /// Header of the Reclaim Unit Handle Status data, 16 bytes, which descriptors follow.
    pub struct HandleStatusHeader(16) {
        #[doc(hidden)]
        pub reserved0 @ 0: [u8; 14],
        /// Number of Reclaim Unit Handle Status Descriptors.
        pub nruhsd @ 14: U16,
    }
}

wire_struct! {
    /// Reclaim Unit Handle Status Descriptor, 32 bytes.
    pub struct HandleStatus(32) {
        /// Placement Identifier.
        pub pid @ 0: U16,
        /// Reclaim Unit Handle Identifier.
        pub ruhid @ 2: U16,
        /// Estimated Active Reclaim Unit Time Remaining in seconds; 0 when not reported.
        pub earutr @ 4: U32,
        /// Reclaim Unit Available Media Writes, in logical blocks.
        pub ruamw @ 8: U64,
        #[doc(hidden)]
        pub reserved16 @ 16: [u8; 16],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placement_dword_10_encodes() {
        let send = IoManagementSendCdw10::new()
            .with_mo(SendOperation::HANDLE_UPDATE)
            .with_mos(3);
        assert_eq!(send.into_bits(), 0x3_0001);
        let receive = IoManagementReceiveCdw10::new().with_mo(ReceiveOperation::HANDLE_STATUS);
        assert_eq!(receive.into_bits(), 1);
    }
}
