//! Command dwords of the NVM command set: NVM Command Set 1.1, 3.3.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::{open_values, wire_layout, wire_struct};

open_values! {
    /// Directive Type of a write command (NVMe Base 2.1, 8.1.8).
    pub DirectiveType: u8 {
        IDENTIFY = 0, "Identify";
        STREAMS = 1, "Streams";
        DATA_PLACEMENT = 2, "Data Placement";
    }
}

/// Protection Information field (NVM Command Set 1.1, 3.3), 4 bits.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Prinfo {
    /// Check the Logical Block Reference Tag (PRCHK bit 0).
    pub prchk_reftag: bool,
    /// Check the Logical Block Application Tag (PRCHK bit 1).
    pub prchk_apptag: bool,
    /// Check the Guard (PRCHK bit 2).
    pub prchk_guard: bool,
    /// Protection Information Action: insert on write, strip on read.
    pub pract: bool,
    #[bits(4)]
    __: u8,
}

/// Dword 12 of Read, Write, Compare and Verify. The starting LBA is [`crate::Command::slba`].
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct RwCdw12 {
    /// Number of Logical Blocks, zero-based.
    pub nlb_z: u16,
    /// Command Extension Type.
    #[bits(4)]
    pub cetype: u8,
    /// Directive Type, only for Write.
    #[bits(4)]
    pub dtype: DirectiveType,
    /// Storage Tag Check: the controller has to check the storage tag.
    pub stc: bool,
    #[bits(1)]
    __: u8,
    /// Protection Information field: action and checks.
    #[bits(4)]
    pub prinfo: Prinfo,
    /// Force Unit Access: the data has to be on non-volatile media when the command completes.
    pub fua: bool,
    /// Limited Retry: the controller should make limited efforts to recover from errors.
    pub lr: bool,
}

impl RwCdw12 {
    /// Returns the number of logical blocks, 1 to 65,536.
    #[inline]
    pub const fn nlb(self) -> u32 {
        self.nlb_z() as u32 + 1
    }
}

/// Dword 12 of Write Zeroes (NVM Command Set 1.1, 3.3.8).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct WriteZeroesCdw12 {
    /// Number of Logical Blocks, zero-based.
    pub nlb_z: u16,
    /// Command Extension Type.
    #[bits(4)]
    pub cetype: u8,
    /// Directive Type.
    #[bits(3)]
    pub dtype: DirectiveType,
    /// Namespace Zeroes: if `deac` is also set, the whole namespace is zeroed.
    pub nsz: bool,
    /// Storage Tag Check: the controller has to check the storage tag.
    pub stc: bool,
    /// Deallocate: the controller should deallocate the blocks.
    pub deac: bool,
    /// Protection Information field: action and checks.
    #[bits(4)]
    pub prinfo: Prinfo,
    /// Force Unit Access: the zeroes have to be on non-volatile media when the command completes.
    pub fua: bool,
    /// Limited Retry: the controller should make limited efforts to recover from errors.
    pub lr: bool,
}

impl WriteZeroesCdw12 {
    /// Returns the number of logical blocks, 1 to 65,536.
    #[inline]
    pub const fn nlb(self) -> u32 {
        self.nlb_z() as u32 + 1
    }
}

/// Dword 13 of Read, Write and Compare: Dataset Management hints, and the directive.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct RwCdw13 {
    /// Dataset Management hints (access frequency, latency, sequential, incompressible).
    pub dsm: u8,
    /// Upper bits of the Command Extension Value, or reserved.
    pub reserved: u8,
    /// Directive Specific, only for Write: for example a placement identifier.
    pub dspec: u16,
}

/// Dword 10 of Dataset Management (NVM Command Set 1.1, 3.3.3).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct DsmCdw10 {
    /// Number of Ranges, zero-based.
    pub nr_z: u8,
    #[bits(24)]
    __: u32,
}

impl DsmCdw10 {
    /// Returns the number of ranges, 1 to 256.
    #[inline]
    pub const fn nr(self) -> u16 {
        self.nr_z() as u16 + 1
    }
}

/// Dword 11 of Dataset Management.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct DsmCdw11 {
    /// Integral Dataset for Read: the ranges will be read as one object.
    pub idr: bool,
    /// Integral Dataset for Write: the ranges will be written as one object.
    pub idw: bool,
    /// Deallocate: the controller may deallocate the ranges.
    pub ad: bool,
    #[bits(29)]
    __: u32,
}

wire_struct! {
    /// A range of Dataset Management, 16 bytes (NVM Command Set 1.1, 3.3.3.1).
    pub struct DsmRange(16) {
        /// Context Attributes: access hints for the range.
        pub cattr @ 0: U32,
        /// Length in logical blocks, not zero-based.
        pub nlb @ 4: U32,
        /// Starting LBA of the range.
        pub slba @ 8: U64,
    }
}

/// Maximum number of ranges per Dataset Management command.
pub const DSM_MAX_RANGES: usize = 256;

/// Dword 12 of Copy (NVM Command Set 1.1, 3.3.2).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct CopyCdw12 {
    /// Number of Ranges, zero-based.
    pub nr_z: u8,
    /// Copy Descriptor Format of the source ranges.
    #[bits(4)]
    pub cdfe: u8,
    /// Protection Information field for the data read.
    #[bits(4)]
    pub prinfor: Prinfo,
    #[bits(4)]
    __: u8,
    /// Directive Type.
    #[bits(4)]
    pub dtype: u8,
    /// Storage Tag Check for the data written.
    pub stcw: bool,
    /// Storage Tag Check for the data read.
    pub stcr: bool,
    /// Protection Information field for the data written.
    #[bits(4)]
    pub prinfow: Prinfo,
    /// Force Unit Access, for the data written.
    pub fua: bool,
    /// Limited Retry: the controller should make limited efforts to recover from errors.
    pub lr: bool,
}

impl CopyCdw12 {
    /// Returns the number of source ranges, 1 to 256.
    #[inline]
    pub const fn nr(self) -> u16 {
        self.nr_z() as u16 + 1
    }
}

/// A source range of Copy in Copy Descriptor Format 0h or 2h, 32 bytes (NVM Command Set 1.1,
/// 3.3.2). Fields that exist only in format 2h are reserved in format 0h.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct CopyRange {
    /// Source Namespace Identifier, only in format 2h.
    pub snsid: U32,
    #[doc(hidden)]
    pub reserved_4: [u8; 4],
    /// Starting LBA of the source range.
    pub slba: U64,
    /// Number of Logical Blocks, zero-based.
    pub nlb_z: U16,
    #[doc(hidden)]
    pub reserved_18: [u8; 4],
    /// Source Options, only in format 2h: [`CopyRange::FAST_COPY_ONLY`].
    pub sopt: U16,
    /// Expected Initial Logical Block Reference Tag, with the storage tag, if any, in the upper
    /// bits.
    pub eilbrt: U32,
    /// Expected Logical Block Application Tag.
    pub elbat: U16,
    /// Expected Logical Block Application Tag Mask.
    pub elbatm: U16,
}

impl CopyRange {
    /// Bit of [`CopyRange::sopt`]: the range must not be copied by reads and writes, but only by a
    /// faster method.
    pub const FAST_COPY_ONLY: u16 = 1;
}

wire_layout!(
    CopyRange,
    32,
    snsid @ 0,
    slba @ 8,
    nlb_z @ 16,
    sopt @ 22,
    eilbrt @ 24,
    elbat @ 28,
    elbatm @ 30,
);

/// A source range of Copy in Copy Descriptor Format 1h or 3h, 40 bytes (NVM Command Set 1.1,
/// 3.3.2), for namespaces with guards of 32 or 64 bits. Fields that exist only in format 3h are
/// reserved in format 1h.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct CopyRangeLong {
    /// Source Namespace Identifier, only in format 3h.
    pub snsid: U32,
    #[doc(hidden)]
    pub reserved_4: [u8; 4],
    /// Starting LBA of the source range.
    pub slba: U64,
    /// Number of Logical Blocks, zero-based.
    pub nlb_z: U16,
    #[doc(hidden)]
    pub reserved_18: [u8; 4],
    /// Source Options, only in format 3h: [`CopyRange::FAST_COPY_ONLY`].
    pub sopt: U16,
    #[doc(hidden)]
    pub reserved_24: [u8; 2],
    /// Expected Logical Block Tags: storage tag and initial reference tag, big-endian.
    pub elbt: [u8; 10],
    /// Expected Logical Block Application Tag.
    pub elbat: U16,
    /// Expected Logical Block Application Tag Mask.
    pub elbatm: U16,
}

wire_layout!(
    CopyRangeLong,
    40,
    snsid @ 0,
    slba @ 8,
    nlb_z @ 16,
    sopt @ 22,
    elbt @ 26,
    elbat @ 36,
    elbatm @ 38,
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_write_dword_12_encodes() {
        assert_eq!(RwCdw12::new().with_nlb_z(0xffff).into_bits(), 0xffff);
        assert_eq!(RwCdw12::from_bits(0xffff).nlb(), 65536);
        assert_eq!(
            RwCdw12::new()
                .with_dtype(DirectiveType::STREAMS)
                .into_bits(),
            1 << 20
        );
        assert_eq!(RwCdw12::new().with_stc(true).into_bits(), 1 << 24);
        let pract = Prinfo::new().with_pract(true);
        assert_eq!(RwCdw12::new().with_prinfo(pract).into_bits(), 1 << 29);
        let reftag = Prinfo::new().with_prchk_reftag(true);
        assert_eq!(RwCdw12::new().with_prinfo(reftag).into_bits(), 1 << 26);
        assert_eq!(RwCdw12::new().with_fua(true).into_bits(), 1 << 30);
        assert_eq!(RwCdw12::new().with_lr(true).into_bits(), 1 << 31);
    }

    #[test]
    fn write_zeroes_dword_12_encodes() {
        assert_eq!(WriteZeroesCdw12::new().with_nsz(true).into_bits(), 1 << 23);
        assert_eq!(WriteZeroesCdw12::new().with_deac(true).into_bits(), 1 << 25);
        assert_eq!(WriteZeroesCdw12::new().with_fua(true).into_bits(), 1 << 30);
    }

    #[test]
    fn copy_dwords_encode() {
        assert_eq!(CopyCdw12::from_bits(0xff).nr(), 256);
        assert_eq!(CopyCdw12::new().with_cdfe(1).into_bits(), 1 << 8);
        let pract = Prinfo::new().with_pract(true);
        assert_eq!(CopyCdw12::new().with_prinfor(pract).into_bits(), 1 << 15);
        assert_eq!(CopyCdw12::new().with_prinfow(pract).into_bits(), 1 << 29);
        assert_eq!(CopyCdw12::new().with_stcw(true).into_bits(), 1 << 24);
        assert_eq!(CopyCdw12::new().with_stcr(true).into_bits(), 1 << 25);
        assert_eq!(CopyCdw12::new().with_fua(true).into_bits(), 1 << 30);
    }

    #[test]
    fn dataset_management_dwords_encode() {
        assert_eq!(DsmCdw10::from_bits(0xff).nr(), 256);
        assert_eq!(DsmCdw11::new().with_idr(true).into_bits(), 1);
        assert_eq!(DsmCdw11::new().with_idw(true).into_bits(), 2);
        assert_eq!(DsmCdw11::new().with_ad(true).into_bits(), 4);
    }
}
