//! Lists of identifiers: NVMe Base 2.1, 4.6 and 5.1.13.2.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::wire_struct;

wire_struct! {
    /// Namespace List, 4096 bytes: ascending NSIDs, ended by a zero or the end of the page (NVMe
    /// Base 2.1, 4.6.2).
    ///
    /// Identify returns this list for CNS 02h, 07h, 10h and 1Ah. The Changed Namespace List log
    /// page has the same format.
    pub struct NsidList(4096, zeroed) {
        /// Identifiers; unused entries are zero.
        pub nsid @ 0: [U32; 1024],
    }
}

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

wire_struct! {
    /// Controller List, 4096 bytes (NVMe Base 2.1, 4.6.1), which Identify returns for CNS 12h and
    /// 13h.
    pub struct ControllerList(4096, zeroed) {
        /// Number of Identifiers.
        pub numid @ 0: U16,
        /// Controller IDs in ascending order, of which the first `numid` are valid.
        pub cntlid @ 2: [U16; 2047],
    }
}

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

wire_struct! {
    /// Endurance Group List (CNS 19h), 4096 bytes (NVMe Base 2.1, 5.1.13.2.16).
    pub struct EnduranceGroupList(4096, zeroed) {
        /// Number of Identifiers.
        pub numid @ 0: U16,
        /// Endurance Group identifiers in ascending order, of which the first `numid` are valid.
        pub endgid @ 2: [U16; 2047],
    }
}

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

wire_struct! {
    /// Identify I/O Command Set data structure (CNS 1Ch), 4096 bytes.
    pub struct IoCommandSets(4096, zeroed) {
        /// Supported combinations, one of which the I/O Command Set Profile feature selects by its
        /// index.
        pub combinations @ 0: [IoCommandSetVector; 512],
    }
}

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
