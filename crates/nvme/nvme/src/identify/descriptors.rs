//! Namespace Identification Descriptor list (CNS 03h): NVMe Base 2.1, 5.1.13.2.3, figure 315.

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::cmd::admin::Csi;
use crate::macros::{open_values, wire_layout, zeroed_default};

open_values! {
    /// Namespace Identifier Type.
    #[derive(Unaligned)]
    pub Nidt: u8 {
        EUI64 = 1, "IEEE Extended Unique Identifier";
        NGUID = 2, "Namespace Globally Unique Identifier";
        UUID = 3, "Namespace UUID";
        CSI = 4, "Command Set Identifier";
    }
}

/// A descriptor of the Namespace Identification Descriptor list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Descriptor<'a> {
    /// EUI-64, big endian.
    Eui64([u8; 8]),
    /// NGUID, big endian.
    Nguid([u8; 16]),
    /// UUID, big endian.
    Uuid([u8; 16]),
    /// Command set of the namespace.
    Csi(Csi),
    /// A descriptor of an unknown type, or of a known type with a wrong length.
    Other {
        /// Namespace Identifier Type.
        nidt: Nidt,
        /// Namespace Identifier.
        nid: &'a [u8],
    },
}

/// Namespace Identification Descriptor list, 4096 bytes: consecutive descriptors, ended by one of
/// length zero.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
pub struct NamespaceDescriptors(pub [u8; 4096]);

wire_layout!(NamespaceDescriptors, 4096);
zeroed_default!(NamespaceDescriptors);

/// Number of bytes of a descriptor before its identifier: NIDT, NIDL and two reserved bytes.
const HEADER: usize = 4;

impl NamespaceDescriptors {
    /// Creates a list of these descriptors. Left out are those that do not fit into the page, and
    /// those with an identifier that is empty or longer than 255 bytes. The four types that the
    /// standard defines always fit.
    pub fn new<'a>(descriptors: impl IntoIterator<Item = Descriptor<'a>>) -> Self {
        let mut list = Self::new_zeroed();
        let mut rest: &mut [u8] = &mut list.0;
        for descriptor in descriptors {
            let csi;
            let (nidt, nid) = match &descriptor {
                Descriptor::Eui64(eui64) => (Nidt::EUI64, eui64.as_slice()),
                Descriptor::Nguid(nguid) => (Nidt::NGUID, nguid.as_slice()),
                Descriptor::Uuid(uuid) => (Nidt::UUID, uuid.as_slice()),
                Descriptor::Csi(value) => {
                    csi = [value.0];
                    (Nidt::CSI, csi.as_slice())
                }
                Descriptor::Other { nidt, nid } => (*nidt, *nid),
            };
            let Ok(nidl @ 1..) = u8::try_from(nid.len()) else {
                continue;
            };
            if rest.len() < HEADER + nid.len() {
                continue;
            }
            let (entry, after) = rest.split_at_mut(HEADER + nid.len());
            let (header, body) = entry.split_at_mut(HEADER);
            header.copy_from_slice(&[nidt.0, nidl, 0, 0]);
            body.copy_from_slice(nid);
            rest = after;
        }
        list
    }

    /// Returns the descriptors up to the end mark, or to one that would exceed the page.
    pub fn iter(&self) -> Descriptors<'_> {
        Descriptors { rest: &self.0 }
    }
}

impl<'a> IntoIterator for &'a NamespaceDescriptors {
    type Item = Descriptor<'a>;
    type IntoIter = Descriptors<'a>;

    fn into_iter(self) -> Descriptors<'a> {
        self.iter()
    }
}

/// Iterator over the descriptors of a [`NamespaceDescriptors`] list.
#[derive(Clone, Debug)]
pub struct Descriptors<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Descriptors<'a> {
    type Item = Descriptor<'a>;

    fn next(&mut self) -> Option<Descriptor<'a>> {
        let (&[nidt, nidl, _, _], body) = self.rest.split_first_chunk::<HEADER>()?;
        if nidl == 0 {
            self.rest = &[];
            return None;
        }
        let (nid, after) = body.split_at_checked(nidl.into())?;
        self.rest = after;
        let nidt = Nidt(nidt);
        let other = Descriptor::Other { nidt, nid };
        Some(match nidt {
            Nidt::EUI64 => nid.try_into().map_or(other, Descriptor::Eui64),
            Nidt::NGUID => nid.try_into().map_or(other, Descriptor::Nguid),
            Nidt::UUID => nid.try_into().map_or(other, Descriptor::Uuid),
            Nidt::CSI => <[u8; 1]>::try_from(nid).map_or(other, |[csi]| Descriptor::Csi(Csi(csi))),
            _ => other,
        })
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::vec::Vec;

    use super::*;

    #[test]
    fn descriptors_match_figure_315() {
        let list = NamespaceDescriptors::new([
            Descriptor::Eui64([1, 2, 3, 4, 5, 6, 7, 8]),
            Descriptor::Csi(Csi::NVM),
        ]);
        assert_eq!(list.0[..12], [1, 8, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(list.0[12..17], [4, 1, 0, 0, 0]);
        assert!(list.0[17..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn descriptors_round_trip() {
        let descriptors = [
            Descriptor::Nguid([7; 16]),
            Descriptor::Uuid([9; 16]),
            Descriptor::Eui64([3; 8]),
            Descriptor::Other {
                nidt: Nidt(0x77),
                nid: &[1, 2, 3],
            },
            Descriptor::Csi(Csi::ZONED),
        ];
        let list = NamespaceDescriptors::new(descriptors);
        assert_eq!(list.iter().collect::<Vec<_>>(), descriptors);
    }

    #[test]
    fn descriptors_of_wrong_length_are_preserved() {
        let mut list = NamespaceDescriptors::default();
        list.0[..4].copy_from_slice(&[1, 3, 0, 0]);
        let only = list.iter().collect::<Vec<_>>();
        assert_eq!(
            only,
            [Descriptor::Other {
                nidt: Nidt::EUI64,
                nid: &[0, 0, 0]
            }]
        );
    }

    #[test]
    fn descriptor_list_without_end_stops_at_page() {
        let full = NamespaceDescriptors([0xff; 4096]);
        assert_eq!(full.iter().count(), 4096 / (4 + 255));
        let nid = [1u8; 255];
        let many = (0..100).map(|_| Descriptor::Other {
            nidt: Nidt(9),
            nid: &nid,
        });
        assert_eq!(NamespaceDescriptors::new(many).iter().count(), 15);
        // Fifteen of 259 bytes leave 211: an identifier of 207 bytes is the longest
        // that fits beside its header.
        for (last, count) in [(207, 16), (208, 15)] {
            let nids = core::iter::repeat_n(&nid[..], 15).chain([&nid[..last]]);
            let list =
                NamespaceDescriptors::new(nids.map(|nid| Descriptor::Other { nidt: Nidt(9), nid }));
            assert_eq!(list.iter().count(), count);
        }
        let long = [1u8; 256];
        let unfit = [&long[..], &[]].map(|nid| Descriptor::Other { nidt: Nidt(9), nid });
        assert_eq!(NamespaceDescriptors::new(unfit).iter().count(), 0);
    }
}
