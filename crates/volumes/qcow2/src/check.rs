//! Correction of an image's refcounts by the references in its tables, for images that were not
//! closed cleanly.
//!
//! A process that is killed while it writes an image leaves clusters that are counted and not used,
//! and after a loss of power perhaps some that are used and not counted. References are right in
//! any case (section "Header", dirty bit), so they are counted anew.

use crate::format::{Geometry, L2Entry, Mapping, table_entry};
use crate::refcounts::Refcounts;
use crate::tables::numbers;
use std::io;
use std::ops::Range;

/// Maximum number of clusters of an image that can be checked. Each count takes two bytes.
const MAX_CLUSTERS: u64 = 1 << 28;

/// Reason why an image's refcounts cannot be corrected.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckError {
    #[error("cluster {0} is used by two parts of the image")]
    Twice(u64),
    #[error("an entry of its tables is against the rules")]
    Entry,
    #[error("cluster {0} is used, and the refcount table has no place for it")]
    Uncounted(u64),
    #[error("it is too large to be checked here")]
    TooLarge,
    #[error("it cannot be read: {0}")]
    Read(io::Error),
}

/// Refcount errors that a check of an image has found.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RefcountErrors {
    /// Number of clusters with a refcount that nothing uses (leaked clusters).
    pub(crate) leaked: u64,
    /// Number of clusters in use with too low a refcount.
    pub(crate) uncounted: u64,
}

/// Number of references to each cluster that a check has found.
struct Counts {
    counts: Vec<u16>,
}

impl Counts {
    fn add(&mut self, clusters: Range<u64>, shared: bool) -> Result<(), CheckError> {
        if clusters.end > MAX_CLUSTERS {
            return Err(CheckError::TooLarge);
        }
        let end = usize::try_from(clusters.end).map_err(|_| CheckError::TooLarge)?;
        if self.counts.len() < end {
            self.counts.resize(end, 0);
        }
        for cluster in clusters {
            // The vector was resized to hold this range above.
            let Some(count) = self.counts.get_mut(cluster as usize) else {
                return Err(CheckError::TooLarge);
            };
            // Data that is not compressed is one's own; the other mark stands for that.
            if *count == OWN || (*count > 0 && !shared) {
                return Err(CheckError::Twice(cluster));
            }
            *count = if shared {
                (*count + 1).min(OWN - 1)
            } else {
                OWN
            };
        }
        Ok(())
    }
}

/// Reference count in a check of a cluster that must not be shared.
const OWN: u16 = u16::MAX;

/// Tables of an image other than the L2 tables, as needed by a check.
pub(crate) struct Skeleton<'a> {
    pub(crate) geometry: Geometry,
    pub(crate) l1: &'a [u64],
    /// Clusters of the header, the L1 table and the refcount table.
    pub(crate) parts: Vec<Range<u64>>,
}

/// Counts all references, and sets the refcounts accordingly. `read` fills a buffer from a byte
/// offset of the image.
pub(crate) fn check(
    skeleton: &Skeleton<'_>,
    refcounts: &mut Refcounts,
    mut read: impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> Result<RefcountErrors, CheckError> {
    let geometry = &skeleton.geometry;
    let bits = geometry.cluster_bits;
    let mut counts = Counts { counts: Vec::new() };
    for part in &skeleton.parts {
        counts.add(part.clone(), false)?;
    }
    for (_, block) in refcounts.blocks() {
        counts.add(block.at >> bits..(block.at >> bits) + 1, false)?;
    }
    let mut table = vec![0; 1 << bits];
    for &entry in skeleton.l1 {
        let (at, _) = table_entry(entry, geometry).ok_or(CheckError::Entry)?;
        if at == 0 {
            continue;
        }
        counts.add(at >> bits..(at >> bits) + 1, false)?;
        read(at, &mut table).map_err(CheckError::Read)?;
        for entry in numbers(&table) {
            match L2Entry(entry).mapping(geometry) {
                Mapping::Invalid => return Err(CheckError::Entry),
                Mapping::Data { host, .. } | Mapping::Zero { host: Some(host) } => {
                    counts.add(host >> bits..(host >> bits) + 1, false)?;
                }
                Mapping::Compressed { host, len } => {
                    counts.add(host >> bits..((host + len - 1) >> bits) + 1, true)?;
                }
                Mapping::Unallocated | Mapping::Zero { host: None } => {}
            }
        }
    }
    correct(refcounts, &counts.counts)
}

fn correct(refcounts: &mut Refcounts, counts: &[u16]) -> Result<RefcountErrors, CheckError> {
    let mut found = RefcountErrors::default();
    let covered = refcounts.covered();
    let counted = covered.iter().cloned().flatten();
    let most = refcounts.most();
    let changes: Vec<(u64, u64, u64)> = counted
        .filter_map(|cluster| {
            let index = usize::try_from(cluster).ok();
            let used = index
                .and_then(|index| counts.get(index))
                .copied()
                .unwrap_or(0);
            let used = if used == OWN {
                1
            } else {
                u64::from(used).min(most)
            };
            let was = refcounts.get(cluster);
            (was != used).then_some((cluster, was, used))
        })
        .collect();
    for (cluster, count) in counts.iter().enumerate() {
        let cluster = cluster as u64;
        if *count > 0 && !refcounts.counts(cluster) {
            return Err(CheckError::Uncounted(cluster));
        }
    }
    for (cluster, was, used) in changes {
        if was > used {
            found.leaked += 1
        } else {
            found.uncounted += 1
        }
        refcounts.set(cluster, used);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::COPIED;

    const GEOMETRY: Geometry = Geometry {
        version: 3,
        cluster_bits: 9,
        refcount_order: 4,
    };

    /// Checks an image with these clusters. 0: header, 1: refcount table, 2: its block, 3: L1, 4:
    /// an L2 table with `entries`.
    fn check_with(
        entries: &[u64],
        counted: &[u64],
    ) -> Result<(RefcountErrors, Refcounts), CheckError> {
        let mut refcounts = Refcounts::new(GEOMETRY, 64, None);
        refcounts.enter(0, 2 << 9, vec![0; 512].into());
        for &cluster in counted {
            refcounts.set(cluster, 1);
        }
        let skeleton = Skeleton {
            geometry: GEOMETRY,
            l1: &[4 << 9 | COPIED, 0],
            parts: vec![0..1, 1..2, 3..4],
        };
        let found = check(&skeleton, &mut refcounts, |at, bytes| {
            assert_eq!((at, bytes.len()), (4 << 9, 512));
            let (chunks, _) = bytes.as_chunks_mut::<8>();
            chunks.iter_mut().for_each(|chunk| *chunk = [0; 8]);
            for (chunk, entry) in chunks.iter_mut().zip(entries) {
                *chunk = entry.to_be_bytes();
            }
            Ok(())
        })?;
        Ok((found, refcounts))
    }

    const PARTS: [u64; 5] = [0, 1, 2, 3, 4];

    #[test]
    fn refcounts_are_corrected_to_usage() {
        let data = |cluster: u64| cluster << 9 | COPIED;
        let counted = [&PARTS[..], &[7, 9]].concat();
        let (found, refcounts) = check_with(&[data(6), data(7), 0, 1], &counted).unwrap();
        assert_eq!(
            found,
            RefcountErrors {
                leaked: 1,
                uncounted: 1
            }
        );
        let counts: Vec<u64> = (0..10).map(|cluster| refcounts.get(cluster)).collect();
        assert_eq!(counts, [1, 1, 1, 1, 1, 0, 1, 1, 0, 0]);
        let (found, _) = check_with(&[data(7)], &[&PARTS[..], &[7]].concat()).unwrap();
        assert_eq!(found, RefcountErrors::default());
    }

    #[test]
    fn compressed_clusters_may_share_host_cluster() {
        let compressed = |byte: u64, sectors: u64| 1 << 62 | sectors << 61 | byte;
        let entries = [compressed(0xc10, 0), compressed(0xd00, 1)];
        let (_, refcounts) = check_with(&entries, &PARTS).unwrap();
        assert_eq!((refcounts.get(6), refcounts.get(7)), (2, 1));
    }

    #[test]
    fn damaged_image_is_refused_unchanged() {
        let data = |cluster: u64| cluster << 9 | COPIED;
        let error = |entries: &[u64]| check_with(entries, &PARTS).err().unwrap().to_string();
        assert!(error(&[data(6), data(6)]).contains("cluster 6"));
        assert!(
            error(&[data(1)]).contains("cluster 1"),
            "the refcount table"
        );
        assert!(error(&[data(4)]).contains("cluster 4"), "the table itself");
        assert!(error(&[data(6), 1 << 62 | 6 << 9]).contains("cluster 6"));
        assert!(error(&[2]).contains("against the rules"));
        assert!(error(&[data(1000)]).contains("no place"));
        assert!(error(&[data(1 << 40)]).contains("too large"));
    }
}
