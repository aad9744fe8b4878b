//! Reservation commands: NVMe Base 2.1, 7.5 to 7.8.

use bitfield_struct::bitfield;
use zerocopy::Unaligned;
use zerocopy::little_endian::{U16, U32, U64};

use crate::macros::{open_values, wire_struct};

open_values! {
    /// Reservation Type (NVMe Base 2.1, 7.5).
    #[derive(Unaligned)]
    pub Rtype: u8 {
        NONE = 0, "No reservation";
        WRITE_EXCLUSIVE = 1, "Write Exclusive";
        EXCLUSIVE_ACCESS = 2, "Exclusive Access";
        WRITE_EXCLUSIVE_REGISTRANTS_ONLY = 3, "Write Exclusive - Registrants Only";
        EXCLUSIVE_ACCESS_REGISTRANTS_ONLY = 4, "Exclusive Access - Registrants Only";
        WRITE_EXCLUSIVE_ALL_REGISTRANTS = 5, "Write Exclusive - All Registrants";
        EXCLUSIVE_ACCESS_ALL_REGISTRANTS = 6, "Exclusive Access - All Registrants";
    }
}

open_values! {
    /// Reservation Register Action (3 bits).
    pub Rrega: u8 {
        REGISTER = 0, "Register Reservation Key";
        UNREGISTER = 1, "Unregister Reservation Key";
        REPLACE = 2, "Replace Reservation Key";
    }
}

open_values! {
    /// Change Persist Through Power Loss State (2 bits).
    pub Cptpl: u8 {
        NO_CHANGE = 0, "No change to PTPL state";
        CLEAR = 2, "Clear PTPL state to 0";
        SET = 3, "Set PTPL state to 1";
    }
}

open_values! {
    /// Reservation Acquire Action (3 bits).
    pub Racqa: u8 {
        ACQUIRE = 0, "Acquire";
        PREEMPT = 1, "Preempt";
        PREEMPT_AND_ABORT = 2, "Preempt and Abort";
    }
}

open_values! {
    /// Reservation Release Action (3 bits).
    pub Rrela: u8 {
        RELEASE = 0, "Release";
        CLEAR = 1, "Clear";
    }
}

/// Dword 10 of Reservation Register.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct RegisterCdw10 {
    /// Reservation Register Action.
    #[bits(3)]
    pub rrega: Rrega,
    /// Ignore Existing Key: the current key is not compared.
    pub iekey: bool,
    /// Dispersed Namespace Reservation Support.
    pub disnsrs: bool,
    #[bits(25)]
    __: u32,
    /// Change Persist Through Power Loss State.
    #[bits(2)]
    pub cptpl: Cptpl,
}

/// Dword 10 of Reservation Acquire.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AcquireCdw10 {
    /// Reservation Acquire Action.
    #[bits(3)]
    pub racqa: Racqa,
    /// Ignore Existing Key, which this command must not set.
    pub iekey: bool,
    /// Dispersed Namespace Reservation Support.
    pub disnsrs: bool,
    #[bits(3)]
    __: u8,
    /// Type of the reservation to create.
    #[bits(8)]
    pub rtype: Rtype,
    __: u16,
}

/// Dword 10 of Reservation Release.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ReleaseCdw10 {
    /// Reservation Release Action.
    #[bits(3)]
    pub rrela: Rrela,
    /// Ignore Existing Key, which this command must not set.
    pub iekey: bool,
    /// Dispersed Namespace Reservation Support.
    pub disnsrs: bool,
    #[bits(3)]
    __: u8,
    /// Type of the reservation to release.
    #[bits(8)]
    pub rtype: Rtype,
    __: u16,
}

/// Dword 11 of Reservation Report; dword 10 is the number of dwords, zero-based.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ReportCdw11 {
    /// Extended Data Structure: requests 128-bit Host Identifiers.
    pub eds: bool,
    /// Dispersed Namespace Reservation Support.
    pub disnsrs: bool,
    #[bits(30)]
    __: u32,
}

wire_struct! {
    /// Data of Reservation Register, 16 bytes.
    pub struct RegisterData(16) {
        /// Current Reservation Key.
        pub crkey @ 0: U64,
        /// New Reservation Key.
        pub nrkey @ 8: U64,
    }
}

wire_struct! {
    /// Data of Reservation Acquire, 16 bytes.
    pub struct AcquireData(16) {
        /// Current Reservation Key.
        pub crkey @ 0: U64,
        /// Preempt Reservation Key.
        pub prkey @ 8: U64,
    }
}

wire_struct! {
    /// Data of Reservation Release, 8 bytes.
    pub struct ReleaseData(8) {
        /// Current Reservation Key.
        pub crkey @ 0: U64,
    }
}

wire_struct! {
    /// Header of the Reservation Report data, 24 bytes. [`Registrant`]s follow, or in the extended
    /// data structure 40 reserved bytes and [`RegistrantExtended`]s.
    pub struct ReservationStatus(24) {
        /// Generation, which changes with registrations.
        pub r#gen @ 0: U32,
        /// Type of the present reservation.
        pub rtype @ 4: Rtype,
        /// Number of Registrants.
        pub regstrnt @ 5: U16,
        #[doc(hidden)]
        pub reserved7 @ 7: [u8; 2],
        /// Persist Through Power Loss State: 0 for disabled, 1 for enabled.
        pub ptpls @ 9: u8,
        #[doc(hidden)]
        pub reserved10 @ 10: [u8; 14],
    }
}

/// Number of reserved bytes between header and registrants in the extended data structure.
pub const EXTENDED_STATUS_RESERVED: usize = 40;

/// CNTLID of a registrant that is associated with no controller of the subsystem at present.
pub const NO_CONTROLLER: u16 = 0xffff;

wire_struct! {
    /// Registrant with a 64-bit Host Identifier, 24 bytes.
    pub struct Registrant(24) {
        /// ID of a controller that the registrant's host uses, or [`NO_CONTROLLER`].
        pub cntlid @ 0: U16,
        /// Reservation Status: bit 0 is set for a holder of the reservation.
        pub rcsts @ 2: u8,
        #[doc(hidden)]
        pub reserved3 @ 3: [u8; 5],
        /// Host Identifier.
        pub hostid @ 8: U64,
        /// Reservation Key.
        pub rkey @ 16: U64,
    }
}

wire_struct! {
    /// Registrant with a 128-bit Host Identifier, 64 bytes.
    pub struct RegistrantExtended(64) {
        /// ID of a controller that the registrant's host uses, or [`NO_CONTROLLER`].
        pub cntlid @ 0: U16,
        /// Reservation Status: bit 0 is set for a holder of the reservation.
        pub rcsts @ 2: u8,
        #[doc(hidden)]
        pub reserved3 @ 3: [u8; 5],
        /// Reservation Key.
        pub rkey @ 8: U64,
        /// Host Identifier.
        pub hostid @ 16: [u8; 16],
        #[doc(hidden)]
        pub reserved32 @ 32: [u8; 32],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservation_dwords_encode() {
        let register = RegisterCdw10::new()
            .with_rrega(Rrega::REPLACE)
            .with_iekey(true)
            .with_cptpl(Cptpl::SET);
        assert_eq!(register.into_bits(), 0xc000_000a);
        let acquire = AcquireCdw10::new()
            .with_racqa(Racqa::PREEMPT_AND_ABORT)
            .with_rtype(Rtype::EXCLUSIVE_ACCESS_ALL_REGISTRANTS);
        assert_eq!(acquire.into_bits(), 0x0602);
        let release = ReleaseCdw10::new()
            .with_rrela(Rrela::CLEAR)
            .with_rtype(Rtype::WRITE_EXCLUSIVE);
        assert_eq!(release.into_bits(), 0x0101);
        assert_eq!(ReportCdw11::new().with_eds(true).into_bits(), 1);
    }
}
