//! Entries of L1 and L2 tables (section "Cluster mapping").

use super::Geometry;

/// Flag of an entry for a cluster with a refcount of one, which may be written in place.
pub const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// Flag bit of an L2 entry: the guest cluster reads as zeroes, whatever the host cluster contains.
pub const ZERO: u64 = 1;
/// Mask of the host cluster offset in an L1 or L2 entry, bits 9 to 55.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Location of a guest cluster's data, decoded from an L2 entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mapping {
    /// Unallocated: reads from the backing file, or as zeroes without one.
    Unallocated,
    /// The guest cluster reads as zeroes.
    Zero {
        /// Offset in the file of a host cluster that is reserved for the guest cluster, if any.
        host: Option<u64>,
    },
    /// Uncompressed data in the image.
    Data {
        /// Offset in the file of the host cluster.
        host: u64,
        /// Whether no other entry refers to the cluster, so that it may be written in place.
        copied: bool,
    },
    /// Compressed data in the image.
    Compressed {
        /// Offset in the file of the compressed data, which need not be aligned.
        host: u64,
        /// Number of bytes that contain the compressed data, which may end before.
        len: u64,
    },
    /// The entry is invalid according to the qcow2 format.
    Invalid,
}

/// Entry of an L2 table, which maps one guest cluster, in host byte order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct L2Entry(pub u64);

impl L2Entry {
    /// Entry that no valid image contains. In memory, it stands for an invalid entry of the image.
    pub const INVALID: Self = Self(u64::MAX);

    /// Creates the entry for a host cluster that no other entry refers to.
    pub const fn data(host: u64) -> Self {
        Self(host | COPIED)
    }

    /// Creates the entry for zeroes without a host cluster.
    pub const fn zero() -> Self {
        Self(ZERO)
    }

    /// Returns the host offset of the entry's cluster if it can be read or written directly. A
    /// write requires that no other entry refers to the cluster.
    #[inline(always)]
    pub const fn plain(self, write: bool) -> Option<u64> {
        let host = self.0 & OFFSET;
        let flags = self.0 & !OFFSET;
        if host != 0 && (flags == COPIED || (flags == 0 && !write)) {
            Some(host)
        } else {
            None
        }
    }

    /// Decodes the entry for an image with this geometry.
    pub fn mapping(self, geometry: &Geometry) -> Mapping {
        if self == Self::INVALID {
            return Mapping::Invalid;
        }
        if self.0 & COMPRESSED != 0 {
            return self.compressed(geometry);
        }
        let host = self.0 & OFFSET;
        let reserved = self.0 & !(OFFSET | COPIED | ZERO);
        if reserved != 0 || host & (geometry.cluster_size() - 1) != 0 {
            return Mapping::Invalid;
        }
        match (self.0 & ZERO != 0, host) {
            // Version 2 has no such bit.
            (true, _) if geometry.version < 3 => Mapping::Invalid,
            (true, 0) => Mapping::Zero { host: None },
            (true, host) => Mapping::Zero { host: Some(host) },
            (false, 0) if self.0 != 0 => Mapping::Invalid,
            (false, 0) => Mapping::Unallocated,
            (false, host) => Mapping::Data {
                host,
                copied: self.0 & COPIED != 0,
            },
        }
    }

    /// Decodes a "Compressed Clusters Descriptor": the offset of the data, and the number of
    /// additional 512-byte sectors behind the first one.
    fn compressed(self, geometry: &Geometry) -> Mapping {
        if self.0 & COPIED != 0 {
            return Mapping::Invalid;
        }
        // From 61 down to 49: clusters have 9 to 21 bits.
        let bits = 62 - (geometry.cluster_bits - 8);
        let host = self.0 & ((1 << bits) - 1);
        let sectors = (self.0 & (COMPRESSED - 1)) >> bits;
        if host == 0 || host >> 56 != 0 {
            return Mapping::Invalid;
        }
        Mapping::Compressed {
            host,
            len: (sectors + 1) * 512 - host % 512,
        }
    }
}

/// Decodes an L1 entry: the offset of the L2 table, 0 if there is none, and whether the table may
/// be written in place. `None` when the entry is invalid. Entries of the refcount table have the
/// same form, without the flag.
pub fn table_entry(entry: u64, geometry: &Geometry) -> Option<(u64, bool)> {
    let table = entry & OFFSET;
    let reserved = entry & !(OFFSET | COPIED);
    // A flag alone leads nowhere.
    let nowhere = table == 0 && entry != 0;
    if reserved != 0 || nowhere || table & (geometry.cluster_size() - 1) != 0 {
        return None;
    }
    Some((table, entry & COPIED != 0))
}

/// Returns an L1 entry without its reserved bits, for an image that is only read. QEMU ignores
/// these bits. Entries that are invalid otherwise stay as they are.
pub fn without_reserved(entry: u64, geometry: &Geometry) -> u64 {
    let masked = entry & (OFFSET | COPIED);
    let leads = table_entry(masked, geometry).is_some_and(|(table, _)| table != 0);
    if leads { masked } else { entry }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(cluster_bits: u32, version: u32) -> Geometry {
        Geometry {
            version,
            cluster_bits,
            refcount_order: 4,
        }
    }

    #[test]
    fn entries_map_as_specified() {
        let g = geometry(16, 3);
        let of = |entry| L2Entry(entry).mapping(&g);
        assert_eq!(of(0), Mapping::Unallocated);
        assert_eq!(of(1), Mapping::Zero { host: None });
        let host = Some(0x50000);
        assert_eq!(of(0x50001 | COPIED), Mapping::Zero { host });
        let (host, copied) = (0x50000, true);
        assert_eq!(of(0x50000 | COPIED), Mapping::Data { host, copied });
        let copied = false;
        assert_eq!(of(0x50000), Mapping::Data { host, copied });
        for wrong in [0x50200, 2, COPIED, 0x50000 | 1 << 56, u64::MAX, 1 << 61] {
            assert_eq!(of(wrong), Mapping::Invalid, "{wrong:#x}");
        }
        assert_eq!(L2Entry(1).mapping(&geometry(16, 2)), Mapping::Invalid);
    }

    #[test]
    fn compressed_data_range_follows_descriptor() {
        // 62 - (16 - 8) = 54 bits of offset.
        let g = geometry(16, 3);
        let entry = L2Entry(COMPRESSED | 3 << 54 | 0x12345);
        let (host, len) = (0x12345, 4 * 512 - 0x145);
        assert_eq!(entry.mapping(&g), Mapping::Compressed { host, len });
        let copied = L2Entry(entry.0 | COPIED);
        assert_eq!(copied.mapping(&g), Mapping::Invalid);
        // 49 bits of offset, 13 of sectors: never longer than two clusters.
        let g = geometry(21, 3);
        let entry = L2Entry(COMPRESSED | ((1 << 62) - 1));
        let Mapping::Compressed { len, .. } = entry.mapping(&g) else {
            panic!("no compressed cluster");
        };
        assert!(len <= 2 << 21, "{len}");
    }

    #[test]
    fn plain_entries_need_no_allocation() {
        let g = geometry(16, 3);
        for entry in [0, 1, 0x50000, 0x50001, COPIED, 0x50200, COMPRESSED | 0x600] {
            for flags in [0, COPIED] {
                let entry = L2Entry(entry | flags);
                let mapping = entry.mapping(&g);
                for write in [false, true] {
                    let expected = match mapping {
                        Mapping::Data { host, copied } if copied || !write => Some(host),
                        _ => None,
                    };
                    // Invalid entries are replaced when a table is read.
                    if mapping != Mapping::Invalid {
                        assert_eq!(entry.plain(write), expected, "{entry:x?}");
                    }
                }
            }
        }
        assert_eq!(L2Entry::INVALID.plain(false), None);
    }

    #[test]
    fn table_addresses_are_cluster_aligned() {
        let g = geometry(16, 3);
        assert_eq!(table_entry(0, &g), Some((0, false)));
        assert_eq!(table_entry(0x30000 | COPIED, &g), Some((0x30000, true)));
        for wrong in [0x30200, 0x30001, 0x30000 | 1 << 57, COPIED] {
            assert_eq!(table_entry(wrong, &g), None, "{wrong:#x}");
        }
    }
}
