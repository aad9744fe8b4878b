//! Log pages: NVMe Base 2.1, 5.1.12.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Status;
use crate::identify::Ascii;
use crate::macros::{open_values, wire_layout, wire_struct};

mod ana;
pub mod discovery;
mod effects;
mod endurance_group;
mod lba_status;
mod persistent_event;
mod placement;
mod reservation;
mod sanitize;
mod self_test;
mod telemetry;

pub use ana::{AnaGroup, AnaGroupState, AnaHeader, AnaState, ana_groups};
pub use effects::{
    CommandEffects, CommandsSupported, FeatureEffects, FeaturesSupported, LidSupported,
    SupportedLogPages,
};
pub use endurance_group::EnduranceGroup;
pub use lba_status::{
    LbaRangeDescriptor, LbaRangeStatus, LbaStatusCondition, LbaStatusDescriptor, LbaStatusElement,
    LbaStatusHeader, LbaStatusListHeader,
};
pub use persistent_event::{
    ChangeNamespace, FormatCompletion, FormatStart, HardwareError, HardwareErrorCode,
    PersistentEvent, PersistentEventAction, PersistentEventHeader, PersistentEventType,
    PowerOnOrReset, ReportingContext, SanitizeCompletion, SanitizeStart, TimestampChange,
};
pub use placement::{
    FDP_EVENTS, FdpAttributes, FdpConfiguration, FdpConfigurations, FdpEvent, FdpEventFlags,
    FdpEventType, FdpEventsHeader, FdpStatistics, HandleUsage, HandleUsageHeader,
    ReclaimUnitHandle, ReclaimUnitHandleAttributes, ReclaimUnitHandleType,
};
pub use reservation::{ReservationNotification, ReservationNotificationType};
pub use sanitize::{SanitizeLog, SanitizeOutcome, SanitizeStatus};
pub use self_test::{
    SelfTestCode, SelfTestLog, SelfTestOutcome, SelfTestResult, SelfTestStatus, ValidDiagnostics,
};
pub use telemetry::{TELEMETRY_BLOCK, TelemetryHeader};

/// Changed Namespace List log page. The first entry is FFFFFFFFh when more namespaces have changed
/// than fit (NVMe Base 2.1, 5.1.12.1.5).
pub use crate::identify::NsidList as ChangedNamespaceList;

open_values! {
    /// Log Page Identifier (NVMe Base 2.1, 5.1.12).
    #[derive(Unaligned)]
    pub Lid: u8 {
        SUPPORTED_LOG_PAGES = 0x00, "Supported Log Pages";
        ERROR_INFORMATION = 0x01, "Error Information";
        SMART = 0x02, "SMART / Health Information";
        FIRMWARE_SLOT = 0x03, "Firmware Slot Information";
        CHANGED_NAMESPACE_LIST = 0x04, "Changed Attached Namespace List";
        COMMANDS_SUPPORTED = 0x05, "Commands Supported and Effects";
        DEVICE_SELF_TEST = 0x06, "Device Self-test";
        TELEMETRY_HOST = 0x07, "Telemetry Host-Initiated";
        TELEMETRY_CONTROLLER = 0x08, "Telemetry Controller-Initiated";
        ENDURANCE_GROUP = 0x09, "Endurance Group Information";
        PREDICTABLE_LATENCY = 0x0a, "Predictable Latency Per NVM Set";
        PREDICTABLE_LATENCY_AGGREGATE = 0x0b, "Predictable Latency Event Aggregate";
        ANA = 0x0c, "Asymmetric Namespace Access";
        PERSISTENT_EVENT = 0x0d, "Persistent Event Log";
        LBA_STATUS = 0x0e, "LBA Status Information";
        ENDURANCE_GROUP_AGGREGATE = 0x0f, "Endurance Group Event Aggregate";
        MEDIA_UNIT_STATUS = 0x10, "Media Unit Status";
        SUPPORTED_CAPACITY_CONFIGURATION = 0x11, "Supported Capacity Configuration List";
        FEATURES_SUPPORTED = 0x12, "Feature Identifiers Supported and Effects";
        MI_COMMANDS_SUPPORTED = 0x13, "NVMe-MI Commands Supported and Effects";
        LOCKDOWN = 0x14, "Command and Feature Lockdown";
        BOOT_PARTITION = 0x15, "Boot Partition";
        ROTATIONAL_MEDIA = 0x16, "Rotational Media Information";
        DISPERSED_NAMESPACE_SUBSYSTEMS = 0x17, "Dispersed Namespace Participating NVM Subsystems";
        MANAGEMENT_ADDRESS_LIST = 0x18, "Management Address List";
        RECEIVER_EYE_OPENING = 0x19, "Physical Interface Receiver Eye Opening Measurement";
        REACHABILITY_GROUPS = 0x1a, "Reachability Groups";
        REACHABILITY_ASSOCIATIONS = 0x1b, "Reachability Associations";
        CHANGED_ALLOCATED_NAMESPACE_LIST = 0x1c, "Changed Allocated Namespace List";
        FDP_CONFIGURATIONS = 0x20, "FDP Configurations";
        RECLAIM_UNIT_HANDLE_USAGE = 0x21, "Reclaim Unit Handle Usage";
        FDP_STATISTICS = 0x22, "FDP Statistics";
        FDP_EVENTS = 0x23, "FDP Events";
        DISCOVERY = 0x70, "Discovery";
        HOST_DISCOVERY = 0x71, "Host Discovery";
        AVE_DISCOVERY = 0x72, "AVE Discovery";
        PULL_MODEL_DDC_REQUEST = 0x73, "Pull Model DDC Request";
        RESERVATION_NOTIFICATION = 0x80, "Reservation Notification";
        SANITIZE_STATUS = 0x81, "Sanitize Status";
        CHANGED_ZONE_LIST = 0xbf, "Changed Zone List";
    }
}

wire_struct! {
    /// Entry of the Error Information log, 64 bytes (NVMe Base 2.1, 5.1.12.1.2). The newest entry
    /// is the first.
    pub struct ErrorInformation(64) {
        /// Error Count: sequence number of the error, starting at 1; 0 for an unused entry.
        pub error_count @ 0: U64,
        /// Submission Queue ID; FFFFh when the error concerns no particular command.
        pub sqid @ 8: U16,
        /// Command ID; FFFFh when the error concerns no particular command.
        pub cid @ 10: U16,
        /// Status in bits 15:1, phase tag in bit 0; see [`Self::status`].
        pub status_phase @ 12: U16,
        /// Parameter Error Location.
        pub pel @ 14: ParameterErrorLocation,
        /// First LBA at which the error occurred.
        pub lba @ 16: U64,
        /// Namespace that the error concerns.
        pub nsid @ 24: U32,
        /// Vendor Specific Information Available: a log page identifier; 0 for none.
        pub vsia @ 28: u8,
        /// Transport Type; 0 when the error is independent of the transport.
        pub trtype @ 29: u8,
        /// Command Set Indicator, valid if `lpver` is 1.
        pub csi @ 30: u8,
        /// Opcode, valid if `lpver` is 1.
        pub opc @ 31: u8,
        /// Command Specific Information.
        pub csinfo @ 32: U64,
        /// Transport Type Specific Information.
        pub ttsi @ 40: U16,
        #[doc(hidden)]
        pub reserved42 @ 42: [u8; 21],
        /// Log Page Version: 1 since NVMe 2.1.
        pub lpver @ 63: u8,
    }
}

impl ErrorInformation {
    /// Returns the status of the command, without the phase tag.
    pub const fn status(&self) -> Status {
        Status::from_bits(self.status_phase.get() >> 1)
    }

    /// Sets the status, with a phase tag of zero.
    pub const fn set_status(&mut self, status: Status) {
        self.status_phase = U16::new(status.into_bits() << 1);
    }
}

/// Parameter Error Location: first invalid byte and bit of the command.
#[bitfield(u16, repr = U16, from = U16::new, into = U16::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct ParameterErrorLocation {
    /// Index of the byte in the command, 0 to 63.
    pub byte: u8,
    /// Index of the bit in that byte, 0 to 7.
    #[bits(3)]
    pub bit: u8,
    #[bits(5)]
    __: u8,
}

impl ParameterErrorLocation {
    /// Value when the error does not concern a parameter of the command.
    pub const NONE: Self = Self(U16::new(0xffff));
}

wire_struct! {
    /// SMART / Health Information log, 512 bytes (NVMe Base 2.1, 5.1.12.1.3).
    pub struct Smart(512, zeroed) {
        /// Critical Warning.
        pub cw @ 0: CriticalWarning,
        /// Composite Temperature, in kelvins.
        pub ctemp @ 1: U16,
        /// Available Spare, in percent.
        pub avsp @ 3: u8,
        /// Available Spare Threshold, in percent.
        pub avspt @ 4: u8,
        /// Percentage Used, 0 to 255.
        pub pused @ 5: u8,
        /// Endurance Group Critical Warning Summary.
        pub egcws @ 6: u8,
        #[doc(hidden)]
        pub reserved7 @ 7: [u8; 25],
        /// Data Units Read; see [`data_units`].
        pub dur @ 32: U128,
        /// Data Units Written; see [`data_units`].
        pub duw @ 48: U128,
        /// Host Read Commands: Read and Compare.
        pub hrc @ 64: U128,
        /// Host Write Commands.
        pub hwc @ 80: U128,
        /// Controller Busy Time, in minutes.
        pub cbt @ 96: U128,
        /// Power Cycles.
        pub pwrc @ 112: U128,
        /// Power On Hours.
        pub poh @ 128: U128,
        /// Unsafe Shutdowns.
        pub upl @ 144: U128,
        /// Media and Data Integrity Errors.
        pub mdie @ 160: U128,
        /// Number of Error Information Log Entries over the life of the controller.
        pub neile @ 176: U128,
        /// Warning Composite Temperature Time, in minutes.
        pub wctt @ 192: U32,
        /// Critical Composite Temperature Time, in minutes.
        pub cctt @ 196: U32,
        /// Temperature Sensors 1 to 8, in kelvins; 0 for a sensor that does not exist.
        pub tsen @ 200: [U16; 8],
        /// Thermal Management Temperature 1 Transition Count.
        pub tmt1tc @ 216: U32,
        /// Thermal Management Temperature 2 Transition Count.
        pub tmt2tc @ 220: U32,
        /// Total Time For Thermal Management Temperature 1, in seconds.
        pub ttmt1 @ 224: U32,
        /// Total Time For Thermal Management Temperature 2, in seconds.
        pub ttmt2 @ 228: U32,
        #[doc(hidden)]
        pub reserved232 @ 232: [u8; 280],
    }
}

/// Converts bytes to the unit of DUR and DUW in the SMART log: thousands of 512 bytes, rounded up.
pub const fn data_units(bytes: u128) -> u128 {
    bytes.div_ceil(512_000)
}

/// Critical Warning bits of the SMART log, and selection of those that cause events.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct CriticalWarning {
    /// Whether the available spare is below its threshold.
    pub ascbt: bool,
    /// Whether a temperature is outside its thresholds.
    pub ttc: bool,
    /// Whether the reliability of the NVM subsystem is degraded.
    pub ndr: bool,
    /// Whether all media are read only.
    pub amro: bool,
    /// Whether the backup of volatile memory has failed.
    pub vmbf: bool,
    /// Whether the Persistent Memory Region is read only or unreliable.
    pub pmrro: bool,
    #[bits(2)]
    __: u8,
}

wire_struct! {
    /// Firmware Slot Information log, 512 bytes (NVMe Base 2.1, 5.1.12.1.4).
    pub struct FirmwareSlot(512, zeroed) {
        /// Active Firmware Info.
        pub afi @ 0: ActiveFirmware,
        #[doc(hidden)]
        pub reserved1 @ 1: [u8; 7],
        /// Firmware Revision of slots 1 to 7; all zeroes for an empty slot.
        pub frs @ 8: [Ascii<8>; 7],
        #[doc(hidden)]
        pub reserved64 @ 64: [u8; 448],
    }
}

/// Header of the Boot Partition log, 16 bytes (NVMe Base 2.1, 5.1.12.1.19), which the contents of
/// the partition follow.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct BootPartitionHeader {
    /// Log Page Identifier.
    pub lid: Lid,
    #[doc(hidden)]
    pub reserved1: [u8; 3],
    /// Boot Partition Information ([`crate::regs::Bpinfo`]), without Boot Read Status.
    pub bpinfo: U32,
    #[doc(hidden)]
    pub reserved8: [u8; 8],
}

wire_layout!(BootPartitionHeader, 16, lid @ 0, bpinfo @ 4);

/// Active Firmware Info.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct ActiveFirmware {
    /// Slot of the running firmware, 1 to 7.
    #[bits(3)]
    pub current: u8,
    #[bits(1)]
    __: u8,
    /// Slot that the next Controller Level Reset activates; 0 when not reported.
    #[bits(3)]
    pub next: u8,
    #[bits(1)]
    __: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smart_log_matches_wire_layout() {
        let smart = Smart {
            ctemp: 0x0123.into(),
            duw: data_units(512_001).into(),
            neile: (1u128 << 64).into(),
            ..Default::default()
        };
        let page = smart.as_bytes();
        assert_eq!(page[1..3], [0x23, 0x01]);
        assert_eq!(page[48], 2);
        assert_eq!(page[184], 1);
        assert_eq!(Smart::read_from_bytes(page).unwrap(), smart);
    }

    #[test]
    fn data_units_are_rounded_up() {
        assert_eq!(data_units(0), 0);
        assert_eq!(data_units(1), 1);
        assert_eq!(data_units(512_000), 1);
        assert_eq!(data_units(512_001), 2);
        assert_eq!(data_units(u128::MAX), u128::MAX / 512_000 + 1);
    }

    #[test]
    fn error_log_entry_encodes() {
        let mut entry = ErrorInformation {
            pel: ParameterErrorLocation::NONE,
            ..Default::default()
        };
        let status = Status::INVALID_FIELD.with_dnr(true);
        entry.set_status(status);
        assert_eq!(entry.as_bytes()[12..16], [0x04, 0x80, 0xff, 0xff]);
        assert_eq!(entry.status(), status);
        let cdw11_bit_1 = ParameterErrorLocation::new().with_byte(44).with_bit(1);
        assert_eq!(cdw11_bit_1.as_bytes(), [44, 1]);
    }

    #[test]
    fn firmware_slot_log_encodes() {
        let mut log = FirmwareSlot {
            afi: ActiveFirmware::new().with_current(1),
            ..Default::default()
        };
        log.frs[0] = Ascii::new("1.0").unwrap();
        assert_eq!(log.as_bytes()[..12], *b"\x01\0\0\0\0\0\0\x001.0 ");
        assert_eq!(ActiveFirmware::new().with_next(7).into_bits(), 0x70);
    }
}
