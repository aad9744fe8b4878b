//! Lists of identifiers: NVMe Base 2.1, 4.6 and 5.1.13.2.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::{wire_layout, zeroed_default};

/// Namespace List, 4096 bytes: ascending NSIDs, ended by a zero or the end of the page (NVMe Base
/// 2.1, 4.6.2).
///
/// Identify returns this list for CNS 02h, 07h, 10h and 1Ah. The Changed Namespace List log page
/// has the same format.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct NsidList {
    /// Identifiers; unused entries are zero.
    pub nsid: [U32; 1024],
}

wire_layout!(NsidList, 4096, nsid @ 0);

impl NsidList {
    /// Maximum number of NSIDs in a list.
    pub const CAPACITY: usize = 1024;

    /// Returns the NSIDs up to the first zero.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.nsid
            .iter()
            .map(|nsid| nsid.get())
            .take_while(|&nsid| nsid != 0)
    }
}

impl FromIterator<u32> for NsidList {
    /// Creates a list of the first [`NsidList::CAPACITY`] NSIDs in the given order. The standard
    /// requires ascending order.
    fn from_iter<I: IntoIterator<Item = u32>>(nsids: I) -> Self {
        let mut list = Self::new_zeroed();
        for (entry, nsid) in list.nsid.iter_mut().zip(nsids) {
            entry.set(nsid);
        }
        list
    }
}

/// Controller List, 4096 bytes (NVMe Base 2.1, 4.6.1), which Identify returns for CNS 12h and 13h.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ControllerList {
    /// Number of Identifiers.
    pub numid: U16,
    /// Controller IDs in ascending order, of which the first `numid` are valid.
    pub cntlid: [U16; 2047],
}

wire_layout!(ControllerList, 4096, numid @ 0, cntlid @ 2);

impl ControllerList {
    /// Maximum number of controller IDs in a list.
    pub const CAPACITY: usize = 2047;

    /// Returns the first `numid` controller IDs, at most [`ControllerList::CAPACITY`].
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        self.cntlid
            .iter()
            .map(|cntlid| cntlid.get())
            .take(self.numid.get().into())
    }
}

impl FromIterator<u16> for ControllerList {
    /// Creates a list of the first [`ControllerList::CAPACITY`] controller IDs in the given order.
    /// The standard requires ascending order.
    fn from_iter<I: IntoIterator<Item = u16>>(cntlids: I) -> Self {
        let mut list = Self::new_zeroed();
        let mut numid = 0;
        for (entry, cntlid) in list.cntlid.iter_mut().zip(cntlids) {
            entry.set(cntlid);
            numid += 1;
        }
        list.numid.set(numid);
        list
    }
}

/// Endurance Group List (CNS 19h), 4096 bytes (NVMe Base 2.1, 5.1.13.2.16).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct EnduranceGroupList {
    /// Number of Identifiers.
    pub numid: U16,
    /// Endurance Group identifiers in ascending order, of which the first `numid` are valid.
    pub endgid: [U16; 2047],
}

wire_layout!(EnduranceGroupList, 4096, numid @ 0, endgid @ 2);

impl FromIterator<u16> for EnduranceGroupList {
    /// Creates a list of as many identifiers as fit, in the given order. The standard requires
    /// ascending order.
    fn from_iter<I: IntoIterator<Item = u16>>(identifiers: I) -> Self {
        let mut list = Self::new_zeroed();
        let mut numid = 0;
        for (entry, endgid) in list.endgid.iter_mut().zip(identifiers) {
            entry.set(endgid);
            numid += 1;
        }
        list.numid.set(numid);
        list
    }
}

/// Combination of command sets that may be used together (NVMe Base 2.1, 5.1.13.2.19).
#[bitfield(u64, repr = U64, from = U64::new, into = U64::get)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct IoCommandSetVector {
    /// Whether the combination includes the NVM Command Set.
    pub nvm: bool,
    /// Whether the combination includes the Key Value Command Set.
    pub kv: bool,
    /// Whether the combination includes the Zoned Namespace Command Set.
    pub zns: bool,
    /// Whether the combination includes the Subsystem Local Memory Command Set.
    pub slm: bool,
    /// Whether the combination includes the Computational Programs Command Set.
    pub cp: bool,
    #[bits(59)]
    __: u64,
}

/// Identify I/O Command Set data structure (CNS 1Ch), 4096 bytes.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IoCommandSets {
    /// Supported combinations, one of which the I/O Command Set Profile feature selects by its
    /// index.
    pub combinations: [IoCommandSetVector; 512],
}

wire_layout!(IoCommandSets, 4096, combinations @ 0);

/// Namespace Granularity Descriptor, 16 bytes.
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
pub struct Granularity {
    /// Namespace Size Granularity, in bytes.
    pub nszegran: U64,
    /// Namespace Capacity Granularity, in bytes.
    pub ncapgran: U64,
}

/// Namespace Granularity List (CNS 16h), 4096 bytes (NVMe Base 2.1, 5.1.13.2.13).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct GranularityList {
    /// Namespace Granularity Attributes: bit 0 is set when each LBA format has a descriptor of its
    /// own.
    pub attributes: U32,
    /// Number of Descriptors, zero-based.
    pub nod_z: u8,
    #[doc(hidden)]
    pub reserved5: [u8; 27],
    /// Granularity descriptors, of which the first `nod_z + 1` are valid.
    pub descriptors: [Granularity; 16],
    #[doc(hidden)]
    pub reserved288: [u8; 3808],
}

wire_layout!(Granularity, 16, nszegran @ 0, ncapgran @ 8);
wire_layout!(GranularityList, 4096, attributes @ 0, nod_z @ 4, descriptors @ 32);

/// Entry of the UUID List, 32 bytes. An all-zero UUID ends the list.
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
pub struct UuidEntry {
    /// Identifier Association in bits 1:0: 0 none, 1 PCI vendor, 2 PCI subsystem vendor.
    pub header: u8,
    #[doc(hidden)]
    pub reserved1: [u8; 15],
    /// UUID, big endian.
    pub uuid: [u8; 16],
}

/// UUID List (CNS 17h), 4096 bytes (NVMe Base 2.1, 5.1.13.2.14).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct UuidList {
    #[doc(hidden)]
    pub reserved0: [u8; 32],
    /// Entries of the list; UUID Index 1 refers to the first.
    pub entries: [UuidEntry; 127],
}

wire_layout!(UuidEntry, 32, header @ 0, uuid @ 16);
wire_layout!(UuidList, 4096, entries @ 32);

/// Domain Attributes Entry, 128 bytes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Domain {
    /// Domain Identifier.
    pub did: U16,
    #[doc(hidden)]
    pub reserved2: [u8; 14],
    /// Total Domain Capacity, in bytes.
    pub tdc: U128,
    /// Unallocated Domain Capacity, in bytes.
    pub udc: U128,
    /// Max Endurance Group Domain Capacity, in bytes.
    pub megdc: U128,
    #[doc(hidden)]
    pub reserved64: [u8; 64],
}

/// Domain List (CNS 18h), 4096 bytes (NVMe Base 2.1, 5.1.13.2.15).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DomainList {
    /// Number of entries.
    pub nument: u8,
    #[doc(hidden)]
    pub reserved1: [u8; 127],
    /// Entries in ascending order of DID, of which the first `nument` are valid.
    pub entries: [Domain; 31],
}

wire_layout!(Domain, 128, did @ 0, tdc @ 16, udc @ 32, megdc @ 48);
wire_layout!(DomainList, 4096, nument @ 0, entries @ 128);

/// NVM Set Attributes Entry, 128 bytes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct NvmSet {
    /// NVM Set Identifier.
    pub nvmsetid: U16,
    /// Endurance Group Identifier.
    pub endgid: U16,
    #[doc(hidden)]
    pub reserved4: [u8; 4],
    /// Random 4 KiB Read Typical, in units of 100 ns.
    pub rr4kt: U32,
    /// Optimal Write Size, in bytes.
    pub ows: U32,
    /// Total NVM Set Capacity, in bytes.
    pub tnvmsetcap: U128,
    /// Unallocated NVM Set Capacity, in bytes.
    pub unvmsetcap: U128,
    #[doc(hidden)]
    pub reserved48: [u8; 80],
}

/// NVM Set List (CNS 04h), 4096 bytes (NVMe Base 2.1, 5.1.13.2.4).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct NvmSetList {
    /// Number of Identifiers.
    pub numid: u8,
    #[doc(hidden)]
    pub reserved1: [u8; 127],
    /// Entries in ascending order of NVMSETID, of which the first `numid` are valid.
    pub entries: [NvmSet; 31],
}

wire_layout!(NvmSet, 128, nvmsetid @ 0, endgid @ 2, rr4kt @ 8, ows @ 12, tnvmsetcap @ 16, unvmsetcap @ 32);
wire_layout!(NvmSetList, 4096, numid @ 0, entries @ 128);

zeroed_default!(
    NsidList,
    ControllerList,
    EnduranceGroupList,
    IoCommandSets,
    GranularityList,
    UuidList,
    Domain,
    DomainList,
    NvmSet,
    NvmSetList,
);

#[cfg(test)]
mod tests {
    extern crate std;
    use std::vec::Vec;

    use super::*;

    #[test]
    fn nsid_list_ends_at_zero_or_page_end() {
        let list: NsidList = [1, 2, 0x0102_0304].into_iter().collect();
        assert_eq!(list.as_bytes()[8..12], [4, 3, 2, 1]);
        assert_eq!(list.iter().collect::<Vec<_>>(), [1, 2, 0x0102_0304]);
        let full: NsidList = (1..5000).collect();
        assert_eq!(full.iter().count(), NsidList::CAPACITY);
        assert_eq!(NsidList::default().iter().count(), 0);
    }

    #[test]
    fn controller_list_stores_count() {
        let list: ControllerList = [7, 9].into_iter().collect();
        assert_eq!(list.as_bytes()[..6], [2, 0, 7, 0, 9, 0]);
        assert_eq!(list.iter().collect::<Vec<_>>(), [7, 9]);
        let full: ControllerList = (0..5000).collect();
        assert_eq!(full.numid.get(), 2047);
        // Count of a faulty device, larger than the number of entries in the page.
        let wrong = ControllerList {
            numid: u16::MAX.into(),
            ..full
        };
        assert_eq!(wrong.iter().count(), ControllerList::CAPACITY);
    }

    #[test]
    fn command_set_vector_bits_match_csi() {
        assert_eq!(IoCommandSetVector::new().with_nvm(true).as_bytes()[0], 1);
        assert_eq!(
            IoCommandSetVector::new().with_zns(true).as_bytes()[0],
            1 << 2
        );
    }
}
