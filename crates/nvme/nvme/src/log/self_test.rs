//! Device Self-test log page (NVMe Base 2.1, 5.1.12.1.7).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::{open_values, wire_struct};

open_values! {
    /// Self-test Code of Device Self-test (NVMe Base 2.1, 5.1.5).
    #[derive(Unaligned)]
    pub SelfTestCode: u8 {
        NONE = 0x0, "no operation";
        SHORT = 0x1, "short device self-test operation";
        EXTENDED = 0x2, "extended device self-test operation";
        HOST_INITIATED_REFRESH = 0x3, "Host-Initiated Refresh operation";
        VENDOR = 0xe, "vendor specific operation";
        ABORT = 0xf, "abort of the operation in progress";
    }
}

open_values! {
    /// Result of a device self-test operation.
    #[derive(Unaligned)]
    pub SelfTestOutcome: u8 {
        PASSED = 0x0, "completed without error";
        ABORTED = 0x1, "aborted by a Device Self-test command";
        RESET = 0x2, "aborted by a Controller Level Reset";
        NAMESPACE_REMOVED = 0x3, "aborted, as a namespace was removed";
        FORMATTED = 0x4, "aborted by a Format NVM command";
        UNKNOWN_ERROR = 0x5, "a fatal error, or an unknown one";
        FAILED = 0x6, "a segment failed, and which one is not known";
        FAILED_SEGMENT = 0x7, "a segment failed";
        ABORTED_UNKNOWN = 0x8, "aborted for an unknown reason";
        SANITIZED = 0x9, "aborted by a sanitize operation";
        UNUSED = 0xf, "the entry is not used";
    }
}

/// First byte of a self-test result: outcome and Self-test Code.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct SelfTestStatus {
    /// Device Self-test Result.
    #[bits(4)]
    pub outcome: SelfTestOutcome,
    /// Self-test Code of the command that started the operation.
    #[bits(4)]
    pub code: SelfTestCode,
}

/// Validity of the fields of a self-test result.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct ValidDiagnostics {
    /// Whether the namespace ID is valid.
    pub nsid: bool,
    /// Whether the failing LBA is valid.
    pub flba: bool,
    /// Whether the Status Code Type is valid.
    pub sct: bool,
    /// Whether the Status Code is valid.
    pub sc: bool,
    #[bits(4)]
    __: u8,
}

wire_struct! {
    /// Result of one device self-test operation, 28 bytes.
    pub struct SelfTestResult(28) {
        /// Outcome of the test, and the Self-test Code.
        pub status @ 0: SelfTestStatus,
        /// Number of the first segment that failed.
        pub segment @ 1: u8,
        /// Validity of the following fields.
        pub valid @ 2: ValidDiagnostics,
        #[doc(hidden)]
        pub reserved3 @ 3: u8,
        /// Power On Hours at the end of the test.
        pub poh @ 4: U64,
        /// Namespace in which the failure occurred, or which was tested.
        pub nsid @ 12: U32,
        /// LBA of a failure.
        pub flba @ 16: U64,
        /// Status Code Type of the failure.
        pub sct @ 24: u8,
        /// Status Code of the failure.
        pub sc @ 25: u8,
        #[doc(hidden)]
        pub vendor @ 26: U16,
    }
}

impl SelfTestResult {
    /// Creates an entry without a result.
    pub fn unused() -> Self {
        Self {
            status: SelfTestStatus::new().with_outcome(SelfTestOutcome::UNUSED),
            ..Self::default()
        }
    }
}

wire_struct! {
    /// Device Self-test log page, 564 bytes.
    pub struct SelfTestLog(564, zeroed) {
        /// Self-test Code of the operation in progress, if any.
        pub current @ 0: SelfTestCode,
        /// Progress of the operation in percent.
        pub completion @ 1: u8,
        #[doc(hidden)]
        pub reserved2 @ 2: [u8; 2],
        /// Results of earlier operations, newest first.
        pub results @ 4: [SelfTestResult; 20],
    }
}
