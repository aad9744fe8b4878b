//! Asymmetric Namespace Access log page (NVMe Base 2.1, 5.1.12.1.13).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::macros::{open_values, wire_struct};

open_values! {
    /// Asymmetric Namespace Access State (NVMe Base 2.1, 8.1.1.3, 4 bits).
    pub AnaState: u8 {
        OPTIMIZED = 1, "ANA Optimized";
        NON_OPTIMIZED = 2, "ANA Non-Optimized";
        INACCESSIBLE = 3, "ANA Inaccessible";
        PERSISTENT_LOSS = 4, "ANA Persistent Loss";
        CHANGE = 15, "ANA Change";
    }
}

wire_struct! {
    /// Header of the ANA log page, 16 bytes. [`AnaGroup`]s follow, each with its NSIDs (4 bytes
    /// each).
    pub struct AnaHeader(16) {
        /// Change Count.
        pub chgcnt @ 0: U64,
        /// Number of ANA Group Descriptors.
        pub nagd @ 8: U16,
        #[doc(hidden)]
        pub reserved10 @ 10: [u8; 6],
    }
}

/// Byte 16 of an ANA Group Descriptor.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct AnaGroupState {
    /// Asymmetric Namespace Access State.
    #[bits(4)]
    pub anas: AnaState,
    #[bits(4)]
    __: u8,
}

wire_struct! {
    /// ANA Group Descriptor without its NSIDs, 32 bytes.
    pub struct AnaGroup(32) {
        /// ANA Group ID.
        pub agid @ 0: U32,
        /// Number of NSID Values.
        pub nnsid @ 4: U32,
        /// Change Count of this group.
        pub chgcnt @ 8: U64,
        /// ANA state of the group.
        pub state @ 16: AnaGroupState,
        #[doc(hidden)]
        pub reserved17 @ 17: [u8; 15],
    }
}

/// Returns the groups of an ANA log page with the NSIDs of their namespaces, up to the first group
/// that the bytes do not contain completely.
pub fn ana_groups(page: &[u8]) -> impl Iterator<Item = (AnaGroup, &[U32])> {
    let header = AnaHeader::read_from_prefix(page).ok();
    let (mut left, mut rest) = match header {
        Some((header, rest)) => (header.nagd.get(), rest),
        None => (0, &[][..]),
    };
    core::iter::from_fn(move || {
        left = left.checked_sub(1)?;
        let (group, behind) = AnaGroup::read_from_prefix(rest).ok()?;
        let count = usize::try_from(group.nnsid.get()).ok()?;
        let (nsids, behind) = <[U32]>::ref_from_prefix_with_elems(behind, count).ok()?;
        rest = behind;
        Some((group, nsids))
    })
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::vec::Vec;

    use super::*;

    fn page(said: u16) -> Vec<u8> {
        let mut page = AnaHeader {
            chgcnt: 7.into(),
            nagd: said.into(),
            ..AnaHeader::default()
        }
        .as_bytes()
        .to_vec();
        for (agid, state, nsids) in [(1u32, 1, &[1u32, 5][..]), (2, 0x13, &[]), (9, 15, &[2])] {
            let group = AnaGroup {
                agid: agid.into(),
                nnsid: (nsids.len() as u32).into(),
                state: AnaGroupState::from_bits(state),
                ..AnaGroup::default()
            };
            page.extend(group.as_bytes());
            page.extend(nsids.iter().flat_map(|nsid| nsid.to_le_bytes()));
        }
        page
    }

    #[test]
    fn ana_groups_have_their_namespaces() {
        let page = page(3);
        let found: Vec<_> = ana_groups(&page)
            .map(|(group, nsids)| {
                let nsids: Vec<u32> = nsids.iter().map(|nsid| nsid.get()).collect();
                (group.agid.get(), group.state.anas(), nsids)
            })
            .collect();
        assert_eq!(
            found,
            [
                (1, AnaState::OPTIMIZED, [1, 5].to_vec()),
                (2, AnaState::INACCESSIBLE, Vec::new()),
                (9, AnaState::CHANGE, [2].to_vec()),
            ]
        );
    }

    #[test]
    fn truncated_ana_group_is_skipped() {
        let whole = page(3);
        for len in 0..whole.len() {
            let count = ana_groups(&whole[..len]).count();
            let expected = match len {
                0..56 => 0,
                56..88 => 1,
                88..124 => 2,
                _ => 3,
            };
            assert_eq!(count, expected, "{len}");
        }
        assert_eq!(ana_groups(&page(1)).count(), 1);
        assert_eq!(ana_groups(&page(u16::MAX)).count(), 3);
    }
}
