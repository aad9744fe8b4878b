//! Bit fields of the Identify Namespace data structures: NVM Command Set 1.1, 4.1.5.1;
//! NVMe Base 2.1, 5.1.13.2.8.

use bitfield_struct::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// NSFEAT, Namespace Features, of the NVM command set.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Nsfeat {
    /// Thin Provisioning: NCAP may be less than NSZE, and NUSE is maintained.
    pub thinp: bool,
    /// Namespace Supports Atomic Boundary Parameters: NAWUN, NAWUPF and NACWU are valid.
    pub nsabpns: bool,
    /// Support of the Deallocated or Unwritten Logical Block error.
    pub dae: bool,
    /// Unique Identifiers are never Reused: NGUID and EUI64 values are not used again.
    pub uidreuse: bool,
    /// Optimal Performance: values other than 0 make NPWG, NPWA and NOWS valid; bit 0 makes NPDG
    /// and NPDA valid, and bit 1 NPDGL and NPDAL.
    #[bits(2)]
    pub optperf: u8,
    /// Multiple Atomicity Mode.
    pub mam: bool,
    /// Optimal Read Performance: the read hints of CNS 05h are valid.
    pub optrperf: bool,
}

/// FLBAS, Formatted LBA Size.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Flbas {
    /// Format Index Lower: bits 3:0.
    #[bits(4)]
    pub fidxl: u8,
    /// Metadata Transferred at End of LBA: metadata is interleaved with the data (extended LBA).
    pub mtelba: bool,
    /// Format Index Upper: bits 5:4; ignored with 16 formats or fewer.
    #[bits(2)]
    pub fidxu: u8,
    #[bits(1)]
    __: u8,
}

impl Flbas {
    /// Returns the field for a format index (bits above 5:0 are dropped), with metadata in a
    /// separate buffer.
    pub const fn for_format(index: u8) -> Self {
        Self::from_bits((index & 0xf) | (index >> 4 & 3) << 5)
    }

    /// Returns the format index, 0 to 63, combined from both parts.
    pub const fn index(self) -> u8 {
        self.fidxu() << 4 | self.fidxl()
    }
}

/// MC, Metadata Capabilities.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Mc {
    /// Support of metadata interleaved with the data (extended LBA).
    pub mtelba: bool,
    /// Support of metadata in a separate buffer.
    pub mtsmptr: bool,
    #[bits(6)]
    __: u8,
}

/// PIC, Protection Information Capabilities: NVM Command Set 1.1, 4.1.5.3.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Pic {
    /// 16b Guard Protection Information Storage Tag Support (16BPISTS). Also set when another guard
    /// is supported.
    pub pists16b: bool,
    /// 16b Guard Protection Information Storage Tag Mask (16BPISTM): all bits of storage tags are
    /// compared.
    pub pistm16b: bool,
    /// Storage Tag Check Read Support: Copy can check the storage tags of the data read.
    pub stcrs: bool,
    /// Qualified Protection Information Format Support.
    pub qpifs: bool,
    #[bits(4)]
    __: u8,
}

/// DPC, End-to-end Data Protection Capabilities.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Dpc {
    /// Support of Protection Information type 1.
    pub pit1s: bool,
    /// Support of Protection Information type 2.
    pub pit2s: bool,
    /// Support of Protection Information type 3.
    pub pit3s: bool,
    /// Support of Protection Information in the first bytes of the metadata.
    pub pifb: bool,
    /// Support of Protection Information in the last bytes of the metadata.
    pub pilb: bool,
    #[bits(3)]
    __: u8,
}

/// DPS, End-to-end Data Protection Type Settings.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Dps {
    /// Protection Information type; 0 for none.
    #[bits(3)]
    pub pit: u8,
    /// Protection Information Position: set when it is in the first bytes of the metadata.
    pub pip: bool,
    #[bits(4)]
    __: u8,
}

/// NMIC, Namespace Multi-path I/O and Namespace Sharing Capabilities.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Nmic {
    /// Shared Namespace: may be attached to several controllers at the same time.
    pub shrns: bool,
    /// Dispersed Namespace: may be attached in several NVM subsystems at the same time.
    pub disns: bool,
    #[bits(6)]
    __: u8,
}

/// RESCAP, Reservation Capabilities.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Rescap {
    /// Support of Persist Through Power Loss.
    pub ptpls: bool,
    /// Support of Write Exclusive reservations.
    pub wes: bool,
    /// Support of Exclusive Access reservations.
    pub eas: bool,
    /// Support of Write Exclusive - Registrants Only reservations.
    pub weros: bool,
    /// Support of Exclusive Access - Registrants Only reservations.
    pub earos: bool,
    /// Support of Write Exclusive - All Registrants reservations.
    pub wears: bool,
    /// Support of Exclusive Access - All Registrants reservations.
    pub eaars: bool,
    /// Ignore Existing Key: has the meaning of NVMe 1.3 and later.
    pub ieks: bool,
}

/// FPI, Format Progress Indicator.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Fpi {
    /// Percentage of the namespace that remains to be formatted.
    #[bits(7)]
    pub fpr: u8,
    /// Format Progress Indicator Support.
    pub fpis: bool,
}

/// DLFEAT, Deallocate Logical Block Features.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Dlfeat {
    /// Deallocation Read Behavior: 0 not reported, 1 zeroes, 2 all bytes FFh.
    #[bits(3)]
    pub drb: u8,
    /// Write Zeroes Deallocation Support: Write Zeroes supports its Deallocate bit.
    pub wzds: bool,
    /// Guard Deallocation Status: the guard of deallocated blocks is the CRC of their data.
    pub gds: bool,
    #[bits(3)]
    __: u8,
}

/// NSATTR, Namespace Attributes.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Nsattr {
    /// Currently Write Protected.
    pub cwp: bool,
    #[bits(7)]
    __: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_index_is_split_in_flbas() {
        assert_eq!(Flbas::for_format(0x2b).into_bits(), 0xb | 2 << 5);
        assert_eq!(Flbas::for_format(63).index(), 63);
        assert_eq!(Flbas::from_bits(0x10).index(), 0);
        assert!(Flbas::from_bits(0x10).mtelba());
    }

    #[test]
    fn identify_namespace_bits_have_standard_positions() {
        assert_eq!(Nsfeat::new().with_dae(true).into_bits(), 4);
        assert_eq!(Nsfeat::new().with_optperf(3).into_bits(), 3 << 4);
        assert_eq!(Nsfeat::new().with_optrperf(true).into_bits(), 1 << 7);
        assert_eq!(Dlfeat::new().with_wzds(true).with_drb(1).into_bits(), 9);
        assert_eq!(Fpi::new().with_fpis(true).into_bits(), 0x80);
        assert_eq!(Dps::new().with_pip(true).into_bits(), 8);
        assert_eq!(Rescap::new().with_ieks(true).into_bits(), 0x80);
        assert_eq!(Nsattr::new().with_cwp(true).into_bits(), 1);
    }
}
