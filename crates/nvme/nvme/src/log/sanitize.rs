//! Sanitize Status log page (NVMe Base 2.1, 5.1.12.1.33).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::{open_values, wire_struct};

open_values! {
    /// Sanitize Operation Status (3 bits).
    pub SanitizeOutcome: u8 {
        NEVER = 0, "never sanitized";
        COMPLETED = 1, "completed successfully";
        IN_PROGRESS = 2, "in progress";
        FAILED = 3, "failed";
        COMPLETED_DEALLOCATED = 4,
            "completed successfully, with blocks deallocated that were not to be";
    }
}

/// SSTAT, Sanitize Status.
#[bitfield(u16, repr = U16, from = U16::new, into = U16::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct SanitizeStatus {
    /// Sanitize Operation Status.
    #[bits(3)]
    pub sos: SanitizeOutcome,
    /// Overwrite Passes Completed.
    #[bits(5)]
    pub opc: u8,
    /// Global Data Erased: nothing was written since the last successful sanitize operation.
    pub gde: bool,
    /// Media Verification Canceled by the host or the controller.
    pub mvcncld: bool,
    #[bits(6)]
    __: u8,
}

/// Value of an estimated time that is not reported.
const NOT_REPORTED: U32 = U32::new(u32::MAX);

wire_struct! {
    /// Sanitize Status log page, 512 bytes.
    pub struct SanitizeLog(512, zeroed) {
        /// Sanitize Progress in units of 1/65,536; all ones when no operation is in progress.
        pub sprog @ 0: U16,
        /// Sanitize Status.
        pub sstat @ 2: SanitizeStatus,
        /// Dword 10 of the last Sanitize command that began an operation.
        pub scdw10 @ 4: U32,
        /// Estimated times in seconds, each all ones when not reported: Overwrite, Block Erase and
        /// Crypto Erase, these three without deallocation, and the state after them.
        pub estimates @ 8: [U32; 7],
        #[doc(hidden)]
        pub reserved36 @ 36: [u8; 476],
    }
}

impl SanitizeLog {
    /// Value of Sanitize Progress (SPROG) when no operation is in progress.
    pub const NO_PROGRESS: u16 = u16::MAX;

    /// Creates a log page without an operation in progress and without estimated times.
    pub fn at_rest() -> Self {
        Self {
            sprog: Self::NO_PROGRESS.into(),
            estimates: [NOT_REPORTED; 7],
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sanitize_status_bits_encode() {
        let status = SanitizeStatus::new()
            .with_sos(SanitizeOutcome::FAILED)
            .with_opc(2)
            .with_gde(true);
        assert_eq!(status.into_bits().get(), 0x0113);
        assert_eq!(
            SanitizeLog::at_rest().as_bytes().get(..4),
            Some(&[0xff, 0xff, 0, 0][..])
        );
    }
}
