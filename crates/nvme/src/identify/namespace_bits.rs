//! Bit fields of the Identify Namespace data structures: NVM Command Set 1.1, 4.1.5.1;
//! NVMe Base 2.1, 5.1.13.2.8.

use bitfield_struct::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// NSFEAT, Namespace Features, of the NVM command set.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Nsfeat {
    /// Thin Provisioning: NCAP may be less than NSZE, and NUSE is tracked.
    pub thinp: bool,
    /// Namespace Supports Atomic Boundary Parameters: NAWUN, NAWUPF and NACWU hold.
    pub nsabpns: bool,
    /// Deallocated or unwritten logical block error support.
    pub dae: bool,
    /// Unique Identifiers are never Reused: NGUID and EUI64.
    pub uidreuse: bool,
    /// Optimal Performance: NPWG, NPWA and NOWS hold when not 0; NPDG and NPDA with bit 0,
    /// NPDGL and NPDAL with bit 1.
    #[bits(2)]
    pub optperf: u8,
    /// Multiple Atomicity Mode.
    pub mam: bool,
    /// Optimal Read Performance: the read hints of CNS 05h hold.
    pub optrperf: bool,
}

/// FLBAS, Formatted LBA Size.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Flbas {
    /// Format Index Lower: bits 3:0.
    #[bits(4)]
    pub fidxl: u8,
    /// Metadata follows each block's data.
    pub mtelba: bool,
    /// Format Index Upper: bits 5:4; ignored with 16 formats or fewer.
    #[bits(2)]
    pub fidxu: u8,
    #[bits(1)]
    __: u8,
}

impl Flbas {
    /// The field for this format index (bits above 5:0 are dropped), metadata in a separate buffer.
    pub const fn for_format(index: u8) -> Self {
        Self::from_bits((index & 0xf) | (index >> 4 & 3) << 5)
    }

    /// The format index, 0 to 63, both parts put together.
    pub const fn index(self) -> u8 {
        self.fidxu() << 4 | self.fidxl()
    }
}

/// MC, Metadata Capabilities.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Mc {
    /// Metadata as a part of an extended data LBA.
    pub mtelba: bool,
    /// Metadata in a separate buffer.
    pub mtsmptr: bool,
    #[bits(6)]
    __: u8,
}

/// PIC, Protection Information Capabilities: NVM Command Set 1.1, 4.1.5.3.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Pic {
    /// 16b Guard Protection Information Storage Tag Support (16BPISTS); also set where another
    /// guard is supported.
    pub pists16b: bool,
    /// 16b Guard Protection Information Storage Tag Mask (16BPISTM): all bits are compared.
    pub pistm16b: bool,
    /// Storage Tag Check Read Support: Copy checks the storage tags of the data read.
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
    /// Protection Information type 1.
    pub pit1s: bool,
    /// Protection Information type 2.
    pub pit2s: bool,
    /// Protection Information type 3.
    pub pit3s: bool,
    /// Protection Information in the first bytes of the metadata.
    pub pifb: bool,
    /// Protection Information in the last bytes of the metadata.
    pub pilb: bool,
    #[bits(3)]
    __: u8,
}

/// DPS, End-to-end Data Protection Type Settings.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Dps {
    /// Protection Information type, 0 for none.
    #[bits(3)]
    pub pit: u8,
    /// Protection Information Position: set for the first bytes of the metadata.
    pub pip: bool,
    #[bits(4)]
    __: u8,
}

/// NMIC, Namespace Multi-path I/O and Namespace Sharing Capabilities.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Nmic {
    /// Shared Namespace: may be attached to two or more controllers.
    pub shrns: bool,
    /// Dispersed Namespace: may be attached in two or more NVM subsystems.
    pub disns: bool,
    #[bits(6)]
    __: u8,
}

/// RESCAP, Reservation Capabilities.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Rescap {
    /// Persist Through Power Loss.
    pub ptpls: bool,
    /// Write Exclusive.
    pub wes: bool,
    /// Exclusive Access.
    pub eas: bool,
    /// Write Exclusive - Registrants Only.
    pub weros: bool,
    /// Exclusive Access - Registrants Only.
    pub earos: bool,
    /// Write Exclusive - All Registrants.
    pub wears: bool,
    /// Exclusive Access - All Registrants.
    pub eaars: bool,
    /// Ignore Existing Key as of revision 1.3.
    pub ieks: bool,
}

/// FPI, Format Progress Indicator.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct Fpi {
    /// Percentage that remains to be formatted.
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
    /// Write Zeroes Deallocation Support: the Deallocate bit of Write Zeroes.
    pub wzds: bool,
    /// Guard Deallocation Status: the guard of deallocated blocks is their CRC.
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
    fn format_index_is_split() {
        assert_eq!(Flbas::for_format(0x2b).into_bits(), 0xb | 2 << 5);
        assert_eq!(Flbas::for_format(63).index(), 63);
        assert_eq!(Flbas::from_bits(0x10).index(), 0);
        assert!(Flbas::from_bits(0x10).mtelba());
    }

    #[test]
    fn bit_positions() {
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
