//! Namespace Management and Namespace Attachment: NVMe Base 2.1, 5.1.20 and 5.1.21.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64};

use super::admin::Csi;
use crate::identify::{Dps, Flbas, Nmic};
use crate::macros::{open_values, wire_struct};

open_values! {
    /// Select field of Namespace Management (4 bits).
    pub ManagementSelect: u8 {
        CREATE = 0, "Create";
        DELETE = 1, "Delete";
    }
}

open_values! {
    /// Select field of Namespace Attachment (4 bits).
    pub AttachmentSelect: u8 {
        ATTACH = 0, "Controller Attach";
        DETACH = 1, "Controller Detach";
    }
}

/// Dword 10 of Namespace Management.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ManagementCdw10 {
    /// Operation to execute: create or delete.
    #[bits(4)]
    pub sel: ManagementSelect,
    #[bits(28)]
    __: u32,
}

/// Dword 11 of Namespace Management.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ManagementCdw11 {
    #[bits(24)]
    __: u32,
    /// Command set of the namespace to create.
    #[bits(8)]
    pub csi: Csi,
}

/// Dword 10 of Namespace Attachment.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AttachmentCdw10 {
    /// Operation to execute: attach or detach.
    #[bits(4)]
    pub sel: AttachmentSelect,
    #[bits(28)]
    __: u32,
}

wire_struct! {
    /// Host-specified fields of a namespace to create, 4096 bytes: the fields with the same names
    /// in Identify Namespace, and those of the NVM command set ("NVM Command Set 1.1", 4.1.6).
    pub struct NewNamespace(4096, zeroed) {
        /// Namespace Size to create, in logical blocks.
        pub nsze @ 0: U64,
        /// Namespace Capacity to create, in logical blocks.
        pub ncap @ 8: U64,
        #[doc(hidden)]
        pub reserved16 @ 16: [u8; 10],
        /// Formatted LBA Size.
        pub flbas @ 26: Flbas,
        #[doc(hidden)]
        pub reserved27 @ 27: [u8; 2],
        /// End-to-end Data Protection Type Settings.
        pub dps @ 29: Dps,
        /// Namespace Multi-path I/O and Namespace Sharing Capabilities.
        pub nmic @ 30: Nmic,
        #[doc(hidden)]
        pub reserved31 @ 31: [u8; 61],
        /// ANA Group Identifier; 0 lets the controller choose.
        pub anagrpid @ 92: U32,
        #[doc(hidden)]
        pub reserved96 @ 96: [u8; 4],
        /// NVM Set Identifier; 0 lets the controller choose.
        pub nvmsetid @ 100: U16,
        /// Endurance Group Identifier; 0 lets the controller choose.
        pub endgid @ 102: U16,
        #[doc(hidden)]
        pub reserved104 @ 104: [u8; 280],
        /// Logical Block Storage Tag Mask.
        pub lbstm @ 384: U64,
        /// Number of Placement Handles.
        pub nphndls @ 392: U16,
        #[doc(hidden)]
        pub reserved394 @ 394: [u8; 118],
        /// Placement Handle List: reclaim unit handle of each placement handle.
        pub phndl @ 512: [U16; 128],
        #[doc(hidden)]
        pub reserved768 @ 768: [u8; 256],
        /// Vendor specific bytes.
        pub vs @ 1024: [u8; 3072],
    }
}

impl NewNamespace {
    /// Returns whether all reserved bytes are zero.
    pub fn reserved_is_zero(&self) -> bool {
        let zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
        zero(&self.reserved16)
            && zero(&self.reserved27)
            && zero(&self.reserved31)
            && zero(&self.reserved96)
            && zero(&self.reserved104)
            && zero(&self.reserved394)
            && zero(&self.reserved768)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::{FromBytes, IntoBytes};

    #[test]
    fn namespace_management_dwords_encode() {
        let delete = ManagementCdw10::from_bits(0x1);
        assert_eq!(delete.sel(), ManagementSelect::DELETE);
        assert_eq!(ManagementCdw11::from_bits(0x0200_0000).csi(), Csi::ZONED);
        let detach = AttachmentCdw10::from_bits(0x1);
        assert_eq!(detach.sel(), AttachmentSelect::DETACH);
    }

    #[test]
    fn new_namespace_fields_match_identify_namespace() {
        let mut new = NewNamespace {
            nsze: 0x0102.into(),
            ncap: 0x0304.into(),
            nmic: Nmic::new().with_shrns(true),
            ..Default::default()
        };
        let page = new.as_bytes();
        assert_eq!((page[0], page[8], page[30]), (2, 4, 1));
        assert!(new.reserved_is_zero());
        for at in [16, 25, 27, 31, 91, 96, 104, 383, 394, 768, 1023] {
            let mut bytes = new.as_bytes().to_vec();
            bytes[at] = 1;
            assert!(
                !NewNamespace::read_from_bytes(&bytes)
                    .unwrap()
                    .reserved_is_zero()
            );
        }
        new.vs = [7; 3072];
        assert!(new.reserved_is_zero());
    }
}
