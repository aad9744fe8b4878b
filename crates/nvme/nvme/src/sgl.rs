//! Scatter Gather List descriptors: NVMe Base 2.1, 4.3.2.

use zerocopy::little_endian::{U32, U64};

use crate::macros::{open_values, wire_struct};

open_values! {
    /// SGL Descriptor Type (4 bits).
    pub SglType: u8 {
        DATA_BLOCK = 0x0, "SGL Data Block descriptor";
        BIT_BUCKET = 0x1, "SGL Bit Bucket descriptor";
        SEGMENT = 0x2, "SGL Segment descriptor";
        LAST_SEGMENT = 0x3, "SGL Last Segment descriptor";
        KEYED_DATA_BLOCK = 0x4, "Keyed SGL Data Block descriptor";
        TRANSPORT_DATA_BLOCK = 0x5, "Transport SGL Data Block descriptor";
        VENDOR_SPECIFIC = 0xf, "Vendor specific";
    }
}

open_values! {
    /// SGL Descriptor Sub Type (4 bits).
    pub SglSubtype: u8 {
        ADDRESS = 0x0, "Address";
        OFFSET = 0x1, "Offset";
        TRANSPORT = 0xa, "NVMe Transport Specific";
    }
}

wire_struct! {
    /// SGL descriptor, 16 bytes.
    ///
    /// Address and length are valid for the types used over PCIe (data block, bit bucket, segment,
    /// last segment). A keyed descriptor has other fields in these bytes.
    pub struct SglDescriptor(16) {
        /// Address of the data or the segment; an offset for [`SglSubtype::OFFSET`]; reserved in a
        /// bit bucket.
        pub address @ 0: U64,
        /// Length in bytes, which must be a multiple of 16 for a segment.
        pub length @ 8: U32,
        /// Reserved bytes in the descriptor types used over PCIe.
        pub reserved @ 12: [u8; 3],
        /// SGL Identifier: type in bits 7:4, subtype in bits 3:0.
        pub identifier @ 15: u8,
    }
}

impl SglDescriptor {
    /// Creates a descriptor of any type with subtype [`SglSubtype::ADDRESS`].
    pub const fn new(ty: SglType, address: u64, length: u32) -> Self {
        Self {
            address: U64::new(address),
            length: U32::new(length),
            reserved: [0; 3],
            identifier: ty.0 << 4,
        }
    }

    /// Creates a data block descriptor: `length` bytes at `address`.
    pub const fn data_block(address: u64, length: u32) -> Self {
        Self::new(SglType::DATA_BLOCK, address, length)
    }

    /// Creates a bit bucket descriptor: `length` bytes of a read are discarded.
    pub const fn bit_bucket(length: u32) -> Self {
        Self::new(SglType::BIT_BUCKET, 0, length)
    }

    /// Creates a descriptor of a further segment that is not the last; `length` is in bytes.
    pub const fn segment(address: u64, length: u32) -> Self {
        Self::new(SglType::SEGMENT, address, length)
    }

    /// Creates a descriptor of the last segment; `length` is in bytes.
    pub const fn last_segment(address: u64, length: u32) -> Self {
        Self::new(SglType::LAST_SEGMENT, address, length)
    }

    /// Creates a descriptor of data in the command capsule, `offset` bytes after its start
    /// (Fabrics).
    pub const fn in_capsule(offset: u64, length: u32) -> Self {
        let mut descriptor = Self::new(SglType::DATA_BLOCK, offset, length);
        descriptor.identifier |= SglSubtype::OFFSET.0;
        descriptor
    }

    /// Creates a descriptor of data that the transport transfers by messages of its own (TCP).
    pub const fn transport(length: u32) -> Self {
        let mut descriptor = Self::new(SglType::TRANSPORT_DATA_BLOCK, 0, length);
        descriptor.identifier |= SglSubtype::TRANSPORT.0;
        descriptor
    }

    /// Returns the descriptor type.
    #[inline]
    pub const fn ty(&self) -> SglType {
        SglType(self.identifier >> 4)
    }

    /// Returns the descriptor subtype.
    #[inline]
    pub const fn subtype(&self) -> SglSubtype {
        SglSubtype(self.identifier & 0xf)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn sgl_descriptor_matches_wire_layout() {
        let descriptor = SglDescriptor::last_segment(0x1122_3344_5566_7788, 0x99aa_bbcc);
        assert_eq!(
            descriptor.as_bytes(),
            [
                0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0xcc, 0xbb, 0xaa, 0x99, 0, 0, 0,
                0x30
            ]
        );
        assert_eq!(descriptor.ty(), SglType::LAST_SEGMENT);
        assert_eq!(descriptor.subtype(), SglSubtype::ADDRESS);
    }

    /// Checks the descriptors of the TCP transport ("NVMe over TCP Transport 1.1", 3.5).
    #[test]
    fn fabrics_sgl_descriptors_encode() {
        let inside = SglDescriptor::in_capsule(0, 1024);
        assert_eq!((inside.identifier, inside.length.get()), (0x01, 1024));
        let outside = SglDescriptor::transport(4096);
        assert_eq!((outside.identifier, outside.length.get()), (0x5a, 4096));
    }

    #[test]
    fn unknown_sgl_types_have_no_name() {
        let descriptor = SglDescriptor {
            identifier: 0x9b,
            ..Default::default()
        };
        assert_eq!(descriptor.ty(), SglType(9));
        assert_eq!(descriptor.ty().name(), None);
        assert_eq!(descriptor.subtype(), SglSubtype(0xb));
    }
}
