//! Blocks that may be unreadable: the LBA Status Information log page (NVM Command Set 1.1,
//! 4.1.4.5), and the LBA Status Descriptor List that Get LBA Status returns (4.2.1).

use zerocopy::Unaligned;
use zerocopy::little_endian::{U16, U32, U64};

use crate::cmd::admin::LbaStatusAction;
use crate::macros::{open_values, wire_struct};

wire_struct! {
    /// Header of the LBA Status Information log page, 16 bytes. Elements follow, each with its
    /// range descriptors.
    pub struct LbaStatusHeader(16) {
        /// LBA Status Log Page Length, in bytes.
        pub lslplen @ 0: U32,
        /// Number of LBA Status Log Namespace Elements.
        pub nlslne @ 4: U32,
        /// Estimate of Unrecoverable Logical Blocks in all elements; all ones when unknown.
        pub estulb @ 8: U32,
        #[doc(hidden)]
        pub reserved12 @ 12: [u8; 2],
        /// LBA Status Generation Counter.
        pub lsgc @ 14: U16,
    }
}

wire_struct! {
    /// LBA Status Log Namespace Element, without its range descriptors.
    pub struct LbaStatusElement(16) {
        /// Namespace Element Identifier: the NSID.
        pub neid @ 0: U32,
        /// Number of LBA Range Descriptors; all ones when the element concerns the whole namespace.
        pub nlrd @ 4: U32,
        /// Recommended Action Type for Get LBA Status.
        pub ratype @ 8: LbaStatusAction,
        #[doc(hidden)]
        pub reserved9 @ 9: [u8; 7],
    }
}

wire_struct! {
    /// LBA Range Descriptor of the LBA Status Information log page, 16 bytes.
    pub struct LbaRangeDescriptor(16) {
        /// Range Starting LBA.
        pub rslba @ 0: U64,
        /// Range Number of Logical Blocks, zero-based.
        pub rnlb_z @ 8: U32,
        #[doc(hidden)]
        pub reserved12 @ 12: [u8; 4],
    }
}

open_values! {
    /// Completion Condition of Get LBA Status.
    #[derive(Unaligned)]
    pub LbaStatusCondition: u8 {
        NOT_INDICATED = 0, "not indicated";
        INCOMPLETE = 1, "incomplete";
        COMPLETE = 2, "complete";
    }
}

wire_struct! {
    /// Header of an LBA Status Descriptor List, 8 bytes, which descriptors follow.
    pub struct LbaStatusListHeader(8) {
        /// Number of LBA Status Descriptors.
        pub nlsd @ 0: U32,
        /// Completion Condition.
        pub cmpc @ 4: LbaStatusCondition,
        #[doc(hidden)]
        pub reserved5 @ 5: [u8; 3],
    }
}

open_values! {
    /// LBA Range Status (bits 2:0 of a descriptor's status).
    #[derive(Unaligned)]
    pub LbaRangeStatus: u8 {
        MAY_BE_UNREADABLE = 0, "each block may be unreadable, or not";
        UNREADABLE = 1, "each block has a media error or was written by Write Uncorrectable";
        ALLOCATED = 2, "a block at least is allocated";
        WRITE_UNCORRECTABLE = 3, "each block was written by Write Uncorrectable";
    }
}

wire_struct! {
    /// LBA Status Descriptor Entry, 16 bytes.
    pub struct LbaStatusDescriptor(16) {
        /// Descriptor Starting LBA.
        pub dslba @ 0: U64,
        /// Number of Logical Blocks, zero-based.
        pub nlb_z @ 8: U32,
        #[doc(hidden)]
        pub reserved12 @ 12: u8,
        /// Status of the range: LBA Range Status.
        pub stas @ 13: LbaRangeStatus,
        #[doc(hidden)]
        pub reserved14 @ 14: [u8; 2],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn lba_status_list_encodes() {
        let header = LbaStatusListHeader {
            nlsd: 2.into(),
            cmpc: LbaStatusCondition::COMPLETE,
            ..Default::default()
        };
        assert_eq!(header.as_bytes(), [2, 0, 0, 0, 2, 0, 0, 0]);
        let entry = LbaStatusDescriptor {
            dslba: 0x1234.into(),
            nlb_z: 7.into(),
            stas: LbaRangeStatus::WRITE_UNCORRECTABLE,
            ..Default::default()
        };
        assert_eq!(
            entry.as_bytes(),
            [0x34, 0x12, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 3, 0, 0]
        );
    }

    #[test]
    fn lba_status_element_encodes() {
        let element = LbaStatusElement {
            neid: 5.into(),
            nlrd: 1.into(),
            ratype: LbaStatusAction::TRACKED,
            ..Default::default()
        };
        assert_eq!(
            element.as_bytes(),
            [5, 0, 0, 0, 1, 0, 0, 0, 0x11, 0, 0, 0, 0, 0, 0, 0]
        );
    }
}
