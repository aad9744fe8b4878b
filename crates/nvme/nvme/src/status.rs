//! Status of a completion: NVMe Base 2.1, 4.2.3; NVM Command Set 1.1, 3.

use core::fmt;

use bitfield_struct::bitfield;

use crate::macros::open_values;

open_values! {
    /// Status Code Type (NVMe Base 2.1, 4.2.3, 3 bits).
    pub StatusCodeType: u8 {
        GENERIC = 0, "Generic Command Status";
        COMMAND_SPECIFIC = 1, "Command Specific Status";
        MEDIA = 2, "Media and Data Integrity Errors";
        PATH = 3, "Path Related Status";
        VENDOR_SPECIFIC = 7, "Vendor Specific";
    }
}

/// Status of a completion: 15 bits without the phase tag, bits 31:17 of dword 3 shifted to bit 0.
///
/// The constants have `dnr` and `more` clear. Whether a retry can succeed depends on the case, so
/// the caller sets `dnr` where needed (`Status::INVALID_FIELD.with_dnr(true)`). `==` compares all
/// bits; [`Status::is`] compares only type and code.
#[bitfield(u16)]
#[derive(PartialEq, Eq, Hash)]
pub struct Status {
    /// Status Code; its meaning depends on `sct`.
    pub sc: u8,
    /// Status Code Type.
    #[bits(3)]
    pub sct: StatusCodeType,
    /// Command Retry Delay: 0 for none, otherwise the index of CRDT1 to CRDT3.
    #[bits(2)]
    pub crd: u8,
    /// More: the Error Information log has an entry about this command.
    pub more: bool,
    /// Do Not Retry: the same command would fail again.
    pub dnr: bool,
    #[bits(1)]
    __: u8,
}

impl Status {
    /// Creates a status from its type and code, with all flags clear.
    pub const fn code(sct: StatusCodeType, sc: u8) -> Self {
        Self::new().with_sct(sct).with_sc(sc)
    }

    /// Returns whether the command succeeded (generic type, code 0).
    #[inline]
    pub const fn is_success(self) -> bool {
        self.is(Self::SUCCESS)
    }

    /// Returns whether type and code equal those of `other`; flags are ignored.
    #[inline]
    pub const fn is(self, other: Self) -> bool {
        (self.into_bits() ^ other.into_bits()) & 0x7ff == 0
    }

    /// Returns type and code with all flags cleared.
    #[inline]
    pub const fn without_flags(self) -> Self {
        Self::from_bits(self.into_bits() & 0x7ff)
    }

    /// Returns `Ok` for success, otherwise the status as the error.
    #[inline]
    pub const fn into_result(self) -> Result<(), Self> {
        if self.is_success() { Ok(()) } else { Err(self) }
    }
}

impl core::error::Error for Status {}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name)?,
            None => write!(f, "{}, code {:#04x}", self.sct(), self.sc())?,
        }
        if self.dnr() {
            f.write_str(" (do not retry)")?;
        }
        Ok(())
    }
}

macro_rules! statuses {
    ($($sct:ident { $($constant:ident = $sc:literal, $text:literal;)* })*) => {
        impl Status {
            $($(
                #[doc = concat!($text, ".")]
                pub const $constant: Self = Self::code(StatusCodeType::$sct, $sc);
            )*)*

            /// Returns the standard's name of the status; `None` for a code that it does not
            /// define.
            ///
            /// Command specific codes from 80h on are those of the NVM and Zoned Namespace command
            /// sets.
            pub const fn name(self) -> Option<&'static str> {
                match (self.sct(), self.sc()) {
                    $($((StatusCodeType::$sct, $sc) => Some($text),)*)*
                    _ => None,
                }
            }

            /// All statuses that have a name, for tables and tests.
            pub const ALL: &'static [Self] = &[$($(Self::$constant,)*)*];
        }
    };
}

statuses! {
    GENERIC {
        SUCCESS = 0x00, "Successful Completion";
        INVALID_OPCODE = 0x01, "Invalid Command Opcode";
        INVALID_FIELD = 0x02, "Invalid Field in Command";
        CID_CONFLICT = 0x03, "Command ID Conflict";
        DATA_TRANSFER_ERROR = 0x04, "Data Transfer Error";
        ABORTED_POWER_LOSS = 0x05, "Commands Aborted due to Power Loss Notification";
        INTERNAL_ERROR = 0x06, "Internal Error";
        ABORT_REQUESTED = 0x07, "Command Abort Requested";
        ABORTED_SQ_DELETION = 0x08, "Command Aborted due to SQ Deletion";
        ABORTED_FAILED_FUSED = 0x09, "Command Aborted due to Failed Fused Command";
        ABORTED_MISSING_FUSED = 0x0a, "Command Aborted due to Missing Fused Command";
        INVALID_NAMESPACE_OR_FORMAT = 0x0b, "Invalid Namespace or Format";
        COMMAND_SEQUENCE_ERROR = 0x0c, "Command Sequence Error";
        INVALID_SGL_SEGMENT_DESCRIPTOR = 0x0d, "Invalid SGL Segment Descriptor";
        INVALID_SGL_DESCRIPTOR_COUNT = 0x0e, "Invalid Number of SGL Descriptors";
        DATA_SGL_LENGTH_INVALID = 0x0f, "Data SGL Length Invalid";
        METADATA_SGL_LENGTH_INVALID = 0x10, "Metadata SGL Length Invalid";
        SGL_DESCRIPTOR_TYPE_INVALID = 0x11, "SGL Descriptor Type Invalid";
        INVALID_USE_OF_CMB = 0x12, "Invalid Use of Controller Memory Buffer";
        PRP_OFFSET_INVALID = 0x13, "PRP Offset Invalid";
        ATOMIC_WRITE_UNIT_EXCEEDED = 0x14, "Atomic Write Unit Exceeded";
        OPERATION_DENIED = 0x15, "Operation Denied";
        SGL_OFFSET_INVALID = 0x16, "SGL Offset Invalid";
        HOST_IDENTIFIER_INCONSISTENT_FORMAT = 0x18, "Host Identifier Inconsistent Format";
        KEEP_ALIVE_TIMER_EXPIRED = 0x19, "Keep Alive Timer Expired";
        KEEP_ALIVE_TIMEOUT_INVALID = 0x1a, "Keep Alive Timeout Invalid";
        ABORTED_PREEMPT_AND_ABORT = 0x1b, "Command Aborted due to Preempt and Abort";
        SANITIZE_FAILED = 0x1c, "Sanitize Failed";
        SANITIZE_IN_PROGRESS = 0x1d, "Sanitize In Progress";
        SGL_DATA_BLOCK_GRANULARITY_INVALID = 0x1e, "SGL Data Block Granularity Invalid";
        NOT_SUPPORTED_FOR_QUEUE_IN_CMB = 0x1f, "Command Not Supported for Queue in CMB";
        NAMESPACE_WRITE_PROTECTED = 0x20, "Namespace is Write Protected";
        COMMAND_INTERRUPTED = 0x21, "Command Interrupted";
        TRANSIENT_TRANSPORT_ERROR = 0x22, "Transient Transport Error";
        PROHIBITED_BY_LOCKDOWN = 0x23, "Command Prohibited by Command and Feature Lockdown";
        ADMIN_COMMAND_MEDIA_NOT_READY = 0x24, "Admin Command Media Not Ready";
        INVALID_KEY_TAG = 0x25, "Invalid Key Tag";
        HOST_DISPERSED_NAMESPACE_NOT_ENABLED = 0x26, "Host Dispersed Namespace Support Not Enabled";
        HOST_IDENTIFIER_NOT_INITIALIZED = 0x27, "Host Identifier Not Initialized";
        INCORRECT_KEY = 0x28, "Incorrect Key";
        FDP_DISABLED = 0x29, "FDP Disabled";
        INVALID_PLACEMENT_HANDLE_LIST = 0x2a, "Invalid Placement Handle List";
        LBA_OUT_OF_RANGE = 0x80, "LBA Out of Range";
        CAPACITY_EXCEEDED = 0x81, "Capacity Exceeded";
        NAMESPACE_NOT_READY = 0x82, "Namespace Not Ready";
        RESERVATION_CONFLICT = 0x83, "Reservation Conflict";
        FORMAT_IN_PROGRESS = 0x84, "Format In Progress";
    }
    COMMAND_SPECIFIC {
        COMPLETION_QUEUE_INVALID = 0x00, "Completion Queue Invalid";
        INVALID_QUEUE_IDENTIFIER = 0x01, "Invalid Queue Identifier";
        INVALID_QUEUE_SIZE = 0x02, "Invalid Queue Size";
        ABORT_COMMAND_LIMIT_EXCEEDED = 0x03, "Abort Command Limit Exceeded";
        AER_LIMIT_EXCEEDED = 0x05, "Asynchronous Event Request Limit Exceeded";
        INVALID_FIRMWARE_SLOT = 0x06, "Invalid Firmware Slot";
        INVALID_FIRMWARE_IMAGE = 0x07, "Invalid Firmware Image";
        INVALID_INTERRUPT_VECTOR = 0x08, "Invalid Interrupt Vector";
        INVALID_LOG_PAGE = 0x09, "Invalid Log Page";
        INVALID_FORMAT = 0x0a, "Invalid Format";
        FIRMWARE_NEEDS_CONVENTIONAL_RESET = 0x0b, "Firmware Activation Requires Conventional Reset";
        INVALID_QUEUE_DELETION = 0x0c, "Invalid Queue Deletion";
        FEATURE_NOT_SAVEABLE = 0x0d, "Feature Identifier Not Saveable";
        FEATURE_NOT_CHANGEABLE = 0x0e, "Feature Not Changeable";
        FEATURE_NOT_NAMESPACE_SPECIFIC = 0x0f, "Feature Not Namespace Specific";
        FIRMWARE_NEEDS_SUBSYSTEM_RESET = 0x10, "Firmware Activation Requires NVM Subsystem Reset";
        FIRMWARE_NEEDS_CONTROLLER_RESET = 0x11, "Firmware Activation Requires Controller Level Reset";
        FIRMWARE_MAXIMUM_TIME_VIOLATION = 0x12, "Firmware Activation Requires Maximum Time Violation";
        FIRMWARE_ACTIVATION_PROHIBITED = 0x13, "Firmware Activation Prohibited";
        OVERLAPPING_RANGE = 0x14, "Overlapping Range";
        NAMESPACE_INSUFFICIENT_CAPACITY = 0x15, "Namespace Insufficient Capacity";
        NAMESPACE_IDENTIFIER_UNAVAILABLE = 0x16, "Namespace Identifier Unavailable";
        NAMESPACE_ALREADY_ATTACHED = 0x18, "Namespace Already Attached";
        NAMESPACE_IS_PRIVATE = 0x19, "Namespace Is Private";
        NAMESPACE_NOT_ATTACHED = 0x1a, "Namespace Not Attached";
        THIN_PROVISIONING_NOT_SUPPORTED = 0x1b, "Thin Provisioning Not Supported";
        CONTROLLER_LIST_INVALID = 0x1c, "Controller List Invalid";
        SELF_TEST_IN_PROGRESS = 0x1d, "Device Self-test In Progress";
        BOOT_PARTITION_WRITE_PROHIBITED = 0x1e, "Boot Partition Write Prohibited";
        INVALID_CONTROLLER_IDENTIFIER = 0x1f, "Invalid Controller Identifier";
        INVALID_SECONDARY_CONTROLLER_STATE = 0x20, "Invalid Secondary Controller State";
        INVALID_CONTROLLER_RESOURCE_COUNT = 0x21, "Invalid Number of Controller Resources";
        INVALID_RESOURCE_IDENTIFIER = 0x22, "Invalid Resource Identifier";
        SANITIZE_PROHIBITED_PMR_ENABLED = 0x23, "Sanitize Prohibited While Persistent Memory Region is Enabled";
        ANA_GROUP_IDENTIFIER_INVALID = 0x24, "ANA Group Identifier Invalid";
        ANA_ATTACH_FAILED = 0x25, "ANA Attach Failed";
        INSUFFICIENT_CAPACITY = 0x26, "Insufficient Capacity";
        NAMESPACE_ATTACHMENT_LIMIT_EXCEEDED = 0x27, "Namespace Attachment Limit Exceeded";
        LOCKDOWN_NOT_SUPPORTED = 0x28, "Prohibition of Command Execution Not Supported";
        IO_COMMAND_SET_NOT_SUPPORTED = 0x29, "I/O Command Set Not Supported";
        IO_COMMAND_SET_NOT_ENABLED = 0x2a, "I/O Command Set Not Enabled";
        IO_COMMAND_SET_COMBINATION_REJECTED = 0x2b, "I/O Command Set Combination Rejected";
        INVALID_IO_COMMAND_SET = 0x2c, "Invalid I/O Command Set";
        IDENTIFIER_UNAVAILABLE = 0x2d, "Identifier Unavailable";
        NAMESPACE_IS_DISPERSED = 0x2e, "Namespace Is Dispersed";
        INVALID_DISCOVERY_INFORMATION = 0x2f, "Invalid Discovery Information";
        ZONING_DATA_STRUCTURE_LOCKED = 0x30, "Zoning Data Structure Locked";
        ZONING_DATA_STRUCTURE_NOT_FOUND = 0x31, "Zoning Data Structure Not Found";
        INSUFFICIENT_DISCOVERY_RESOURCES = 0x32, "Insufficient Discovery Resources";
        REQUESTED_FUNCTION_DISABLED = 0x33, "Requested Function Disabled";
        ZONEGROUP_ORIGINATOR_INVALID = 0x34, "ZoneGroup Originator Invalid";
        INVALID_HOST = 0x35, "Invalid Host";
        INVALID_NVM_SUBSYSTEM = 0x36, "Invalid NVM Subsystem";
        INVALID_CONTROLLER_DATA_QUEUE = 0x37, "Invalid Controller Data Queue";
        NOT_ENOUGH_RESOURCES = 0x38, "Not Enough Resources";
        CONTROLLER_SUSPENDED = 0x39, "Controller Suspended";
        CONTROLLER_NOT_SUSPENDED = 0x3a, "Controller Not Suspended";
        CONTROLLER_DATA_QUEUE_FULL = 0x3b, "Controller Data Queue Full";
        CONFLICTING_ATTRIBUTES = 0x80, "Conflicting Attributes";
        INVALID_PROTECTION_INFORMATION = 0x81, "Invalid Protection Information";
        ATTEMPTED_WRITE_TO_READ_ONLY_RANGE = 0x82, "Attempted Write to Read Only Range";
        COMMAND_SIZE_LIMIT_EXCEEDED = 0x83, "Command Size Limit Exceeded";
        INCOMPATIBLE_NAMESPACE_OR_FORMAT = 0x85, "Incompatible Namespace or Format";
        FAST_COPY_NOT_POSSIBLE = 0x86, "Fast Copy Not Possible";
        OVERLAPPING_IO_RANGE = 0x87, "Overlapping I/O Range";
        INVALID_ZONE_OPERATION_REQUEST = 0xb6, "Invalid Zone Operation Request";
        ZRWA_RESOURCES_UNAVAILABLE = 0xb7, "ZRWA Resources Unavailable";
        ZONED_BOUNDARY_ERROR = 0xb8, "Zoned Boundary Error";
        ZONE_IS_FULL = 0xb9, "Zone Is Full";
        ZONE_IS_READ_ONLY = 0xba, "Zone Is Read Only";
        ZONE_IS_OFFLINE = 0xbb, "Zone Is Offline";
        ZONE_INVALID_WRITE = 0xbc, "Zone Invalid Write";
        TOO_MANY_ACTIVE_ZONES = 0xbd, "Too Many Active Zones";
        TOO_MANY_OPEN_ZONES = 0xbe, "Too Many Open Zones";
        INVALID_ZONE_STATE_TRANSITION = 0xbf, "Invalid Zone State Transition";
    }
    MEDIA {
        WRITE_FAULT = 0x80, "Write Fault";
        UNRECOVERED_READ_ERROR = 0x81, "Unrecovered Read Error";
        GUARD_CHECK_ERROR = 0x82, "End-to-end Guard Check Error";
        APPLICATION_TAG_CHECK_ERROR = 0x83, "End-to-end Application Tag Check Error";
        REFERENCE_TAG_CHECK_ERROR = 0x84, "End-to-end Reference Tag Check Error";
        COMPARE_FAILURE = 0x85, "Compare Failure";
        ACCESS_DENIED = 0x86, "Access Denied";
        DEALLOCATED_OR_UNWRITTEN_BLOCK = 0x87, "Deallocated or Unwritten Logical Block";
        STORAGE_TAG_CHECK_ERROR = 0x88, "End-to-End Storage Tag Check Error";
    }
    PATH {
        INTERNAL_PATH_ERROR = 0x00, "Internal Path Error";
        ANA_PERSISTENT_LOSS = 0x01, "Asymmetric Access Persistent Loss";
        ANA_INACCESSIBLE = 0x02, "Asymmetric Access Inaccessible";
        ANA_TRANSITION = 0x03, "Asymmetric Access Transition";
        CONTROLLER_PATHING_ERROR = 0x60, "Controller Pathing Error";
        HOST_PATHING_ERROR = 0x70, "Host Pathing Error";
        ABORTED_BY_HOST = 0x71, "Command Aborted By Host";
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::{format, string::ToString};

    use super::*;

    #[test]
    fn status_bits_match_completion_without_phase() {
        // Dword 3: SC 24:17, SCT 27:25, CRD 29:28, M 30, DNR 31.
        let dw3 = |status: Status| u32::from(status.into_bits()) << 17;
        assert_eq!(dw3(Status::new().with_sc(0xff)), 0xff << 17);
        assert_eq!(dw3(Status::new().with_sct(StatusCodeType(7))), 7 << 25);
        assert_eq!(dw3(Status::new().with_crd(3)), 3 << 28);
        assert_eq!(dw3(Status::new().with_more(true)), 1 << 30);
        assert_eq!(dw3(Status::new().with_dnr(true)), 1 << 31);
    }

    #[test]
    fn status_codes_have_standard_numbers() {
        // Numbers (SCT << 8 | SC) that hosts print in their logs.
        for (status, number) in [
            (Status::INVALID_OPCODE, 0x001),
            (Status::INVALID_FIELD, 0x002),
            (Status::INVALID_NAMESPACE_OR_FORMAT, 0x00b),
            (Status::PRP_OFFSET_INVALID, 0x013),
            (Status::NAMESPACE_WRITE_PROTECTED, 0x020),
            (Status::LBA_OUT_OF_RANGE, 0x080),
            (Status::CAPACITY_EXCEEDED, 0x081),
            (Status::COMPLETION_QUEUE_INVALID, 0x100),
            (Status::AER_LIMIT_EXCEEDED, 0x105),
            (Status::INVALID_LOG_PAGE, 0x109),
            (Status::COMMAND_SIZE_LIMIT_EXCEEDED, 0x183),
            (Status::COMPARE_FAILURE, 0x285),
            (Status::ABORTED_BY_HOST, 0x371),
        ] {
            assert_eq!(status.into_bits(), number, "{status}");
        }
    }

    #[test]
    fn codes_and_names_are_unique() {
        for (i, a) in Status::ALL.iter().enumerate() {
            for b in &Status::ALL[i + 1..] {
                assert_ne!(a, b);
                assert_ne!(a.name(), b.name());
            }
        }
    }

    #[test]
    fn known_statuses_display_names_and_unknown_numbers() {
        assert_eq!(
            Status::INVALID_FIELD.to_string(),
            "Invalid Field in Command"
        );
        assert_eq!(
            Status::LBA_OUT_OF_RANGE.with_dnr(true).to_string(),
            "LBA Out of Range (do not retry)"
        );
        let vendor = Status::code(StatusCodeType::VENDOR_SPECIFIC, 0xc1);
        assert_eq!(vendor.to_string(), "Vendor Specific, code 0xc1");
        let reserved = Status::code(StatusCodeType(5), 1);
        assert_eq!(format!("{reserved}"), "0x05, code 0x01");
    }

    #[test]
    fn status_comparison_ignores_flags() {
        let status = Status::INVALID_FIELD
            .with_dnr(true)
            .with_more(true)
            .with_crd(2);
        assert!(status.is(Status::INVALID_FIELD));
        assert_ne!(status, Status::INVALID_FIELD);
        assert_eq!(status.without_flags(), Status::INVALID_FIELD);
        assert_eq!(status.into_result(), Err(status));
        assert!(Status::SUCCESS.with_more(true).is_success());
        // Equal codes of different types are different statuses.
        assert!(!Status::INVALID_OPCODE.is(Status::INVALID_QUEUE_IDENTIFIER));
        assert!(!Status::COMPLETION_QUEUE_INVALID.is_success());
    }
}
