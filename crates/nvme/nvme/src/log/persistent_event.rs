//! Persistent Event log page (NVMe Base 2.1, 5.1.12.1.14).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Lid, SanitizeStatus};
use crate::identify::{Ascii, Dps, Flbas, Fna, Nmic, Nqn, Sanicap};
use crate::macros::{open_values, wire_struct};

open_values! {
    /// Action of Get Log Page on the context of the Persistent Event log (bits 1:0 of the Log
    /// Specific Parameter).
    pub PersistentEventAction: u8 {
        READ = 0, "Read Log Data";
        ESTABLISH_AND_READ = 1, "Establish Context and Read Log Data";
        RELEASE = 2, "Release Context";
        ESTABLISH_AND_READ_HEADER = 3, "Establish Context and Read 512 Bytes of Header";
    }
}

open_values! {
    /// Persistent Event Type.
    #[derive(Unaligned)]
    pub PersistentEventType: u8 {
        SMART = 0x01, "SMART / Health Log Snapshot";
        FIRMWARE_COMMIT = 0x02, "Firmware Commit";
        TIMESTAMP_CHANGE = 0x03, "Timestamp Change";
        POWER_ON_OR_RESET = 0x04, "Power-on or Reset";
        HARDWARE_ERROR = 0x05, "NVM Subsystem Hardware Error";
        CHANGE_NAMESPACE = 0x06, "Change Namespace";
        FORMAT_START = 0x07, "Format NVM Start";
        FORMAT_COMPLETION = 0x08, "Format NVM Completion";
        SANITIZE_START = 0x09, "Sanitize Start";
        SANITIZE_COMPLETION = 0x0a, "Sanitize Completion";
        SET_FEATURE = 0x0b, "Set Feature";
        TELEMETRY_CREATED = 0x0c, "Telemetry Log Create";
        THERMAL_EXCURSION = 0x0d, "Thermal Excursion";
        SANITIZE_MEDIA_VERIFICATION = 0x0e, "Sanitize Media Verification";
    }
}

open_values! {
    /// NVM Subsystem Hardware Error Event Code.
    pub HardwareErrorCode: u16 {
        UNSAFE_SHUTDOWN = 0x08, "Unsafe Shutdown";
        CONTROLLER_FATAL = 0x09, "Controller Fatal Status";
        MEDIA = 0x0a, "Media and Data Integrity Status";
    }
}

/// RCI, Reporting Context Information.
#[bitfield(u32, repr = U32, from = U32::new, into = U32::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct ReportingContext {
    /// Reporting Context Port Identifier.
    pub rcpid: u16,
    /// Reporting Context Port Identifier Type: 1 for an NVM subsystem port.
    #[bits(2)]
    pub rcpit: u8,
    /// Reporting Context Exists: set when a context existed before the command.
    pub rce: bool,
    #[bits(13)]
    __: u16,
}

wire_struct! {
    /// Header of the Persistent Event log page, 512 bytes. Events follow, newest first.
    pub struct PersistentEventHeader(512, zeroed) {
        /// Log Identifier.
        pub lid @ 0: Lid,
        #[doc(hidden)]
        pub reserved1 @ 1: [u8; 3],
        /// Total Number of Events.
        pub tnev @ 4: U32,
        /// Total Log Length in bytes, including this header.
        pub tll @ 8: U64,
        /// Log Revision.
        pub rv @ 16: u8,
        #[doc(hidden)]
        pub reserved17 @ 17: u8,
        /// Log Header Length: number of header bytes after this field.
        pub lhl @ 18: U16,
        /// Timestamp, with the layout of the Timestamp feature.
        pub ts @ 20: [u8; 8],
        /// Power On Hours.
        pub poh @ 28: U128,
        /// Power Cycle Count.
        pub pcc @ 44: U64,
        /// PCI Vendor ID.
        pub vid @ 52: U16,
        /// PCI Subsystem Vendor ID.
        pub ssvid @ 54: U16,
        /// Serial Number.
        pub sn @ 56: Ascii<20>,
        /// Model Number.
        pub mn @ 76: Ascii<40>,
        /// NVM Subsystem NVMe Qualified Name.
        pub subnqn @ 116: Nqn,
        /// Generation Number of the context.
        pub gnum @ 372: U16,
        /// Reporting Context Information.
        pub rci @ 374: ReportingContext,
        #[doc(hidden)]
        pub reserved378 @ 378: [u8; 102],
        /// Supported Events Bitmap: type `n` is bit `n % 8` of byte `n / 8`.
        pub seb @ 480: [u8; 32],
    }
}

impl PersistentEventHeader {
    /// Log Revision of this layout.
    pub const REVISION: u8 = 3;
    /// Value of the Log Header Length field: number of header bytes after that field.
    pub const LENGTH: u16 = 512 - 20;

    /// Marks an event type as supported by the log.
    pub fn support(&mut self, ty: PersistentEventType) {
        if let Some(byte) = self.seb.get_mut(usize::from(ty.0 / 8)) {
            *byte |= 1 << (ty.0 % 8);
        }
    }
}

wire_struct! {
    /// Header of a persistent event, 24 bytes, which the event data follows.
    pub struct PersistentEvent(24) {
        /// Event Type.
        pub etype @ 0: PersistentEventType,
        /// Event Type Revision.
        pub etr @ 1: u8,
        /// Event Header Length: number of header bytes after this field.
        pub ehl @ 2: u8,
        /// Event Header Additional Information.
        pub ehai @ 3: u8,
        /// Controller Identifier.
        pub cntlid @ 4: U16,
        /// Event Timestamp, with the layout of the Timestamp feature.
        pub ets @ 6: [u8; 8],
        /// Port Identifier.
        pub pelpid @ 14: U16,
        #[doc(hidden)]
        pub reserved16 @ 16: U32,
        /// Vendor Specific Information Length.
        pub vsil @ 20: U16,
        /// Event Length: number of data bytes, including vendor specific ones.
        pub el @ 22: U16,
    }
}

impl PersistentEvent {
    /// Value of the Event Header Length field: number of header bytes after that field.
    pub const LENGTH: u8 = 24 - 3;
}

wire_struct! {
    /// Data of a Timestamp Change event, 16 bytes.
    pub struct TimestampChange(16) {
        /// Previous Timestamp.
        pub previous @ 0: [u8; 8],
        /// Milliseconds since the last controller-level reset.
        pub since_reset @ 8: U64,
    }
}

wire_struct! {
    /// Data of a Power-on or Reset event for one controller, 44 bytes.
    pub struct PowerOnOrReset(44) {
        /// Firmware Revision.
        pub fr @ 0: [u8; 8],
        /// Controller Identifier.
        pub cntlid @ 8: U16,
        /// Firmware Activation; 0 when no firmware was activated.
        pub fwact @ 10: u8,
        /// Operation in Progress: bit 0 for a format, bit 1 for a sanitize operation.
        pub operation @ 11: u8,
        #[doc(hidden)]
        pub reserved12 @ 12: [u8; 12],
        /// Controller Power Cycle: number of the power cycle.
        pub power_cycle @ 24: U32,
        /// Milliseconds since power-on.
        pub power_on_ms @ 28: U64,
        /// Controller Timestamp.
        pub timestamp @ 36: [u8; 8],
    }
}

wire_struct! {
    /// Data of an NVM Subsystem Hardware Error event without additional information, 4 bytes.
    pub struct HardwareError(4) {
        /// NVM Subsystem Hardware Error Event Code, see [`HardwareErrorCode`].
        pub code @ 0: U16,
        #[doc(hidden)]
        pub reserved2 @ 2: U16,
    }
}

wire_struct! {
    /// Data of a Change Namespace event, 48 bytes, with fields of Identify Namespace.
    pub struct ChangeNamespace(48) {
        /// Dword 10 of the Namespace Management command.
        pub cdw10 @ 0: U32,
        #[doc(hidden)]
        pub reserved4 @ 4: U32,
        /// Namespace Size.
        pub nsze @ 8: U64,
        #[doc(hidden)]
        pub reserved16 @ 16: U64,
        /// Namespace Capacity.
        pub ncap @ 24: U64,
        /// Formatted LBA Size.
        pub flbas @ 32: Flbas,
        /// End-to-end Data Protection Type Settings.
        pub dps @ 33: Dps,
        /// Namespace Multi-path I/O and Namespace Sharing Capabilities.
        pub nmic @ 34: Nmic,
        #[doc(hidden)]
        pub reserved35 @ 35: u8,
        /// ANA Group Identifier.
        pub anagrpid @ 36: U32,
        /// NVM Set Identifier.
        pub nvmsetid @ 40: U16,
        #[doc(hidden)]
        pub reserved42 @ 42: U16,
        /// Namespace ID.
        pub nsid @ 44: U32,
    }
}

wire_struct! {
    /// Data of a Format NVM Start event.
    pub struct FormatStart(12) {
        /// Namespace Identifier of the Format NVM command.
        pub nsid @ 0: U32,
        /// Format NVM Attributes.
        pub fna @ 4: Fna,
        #[doc(hidden)]
        pub reserved5 @ 5: [u8; 3],
        /// Dword 10 of the Format NVM command.
        pub cdw10 @ 8: U32,
    }
}

wire_struct! {
    /// Data of a Format NVM Completion event.
    pub struct FormatCompletion(12) {
        /// Namespace Identifier of the Format NVM command.
        pub nsid @ 0: U32,
        /// Smallest Format Progress Indicator: lowest percentage that remained to be formatted.
        pub smallest_fpi @ 4: u8,
        /// Format NVM Status; 0 for success.
        pub status @ 5: u8,
        /// Completion Information.
        pub information @ 6: U16,
        /// Status Field of the Format NVM completion.
        pub status_field @ 8: U32,
    }
}

wire_struct! {
    /// Data of a Sanitize Start event.
    pub struct SanitizeStart(12) {
        /// Sanitize Capabilities.
        pub sanicap @ 0: Sanicap,
        /// Dword 10 of the Sanitize command.
        pub cdw10 @ 4: U32,
        /// Dword 11 of the Sanitize command.
        pub cdw11 @ 8: U32,
    }
}

wire_struct! {
    /// Data of a Sanitize Completion event.
    pub struct SanitizeCompletion(8) {
        /// Sanitize Progress.
        pub sprog @ 0: U16,
        /// Sanitize Status.
        pub sstat @ 2: SanitizeStatus,
        /// Completion Information.
        pub information @ 4: U16,
        #[doc(hidden)]
        pub reserved6 @ 6: U16,
    }
}
