//! Parser of the kernel's variable-length answers: a fixed part, then a chain of capabilities
//! (`struct vfio_info_cap_header`).
//!
//! Buffers are plain bytes in host byte order, read with bounds checks: a truncated answer is an
//! error, not an access beyond it.

use std::mem::{offset_of, size_of};
use std::ops::Range;
use vfio_bindings::bindings::vfio::{
    VFIO_IOMMU_INFO_CAPS, VFIO_IOMMU_INFO_PGSIZES, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE,
    VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL, VFIO_REGION_INFO_CAP_SPARSE_MMAP, VFIO_REGION_INFO_FLAG_CAPS,
    VFIO_REGION_INFO_FLAG_MMAP, vfio_info_cap_header, vfio_iommu_type1_info,
    vfio_iommu_type1_info_dma_avail, vfio_iova_range, vfio_region_info,
    vfio_region_sparse_mmap_area,
};

/// PCI region of a device, as `VFIO_DEVICE_GET_REGION_INFO` describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Size of the region in bytes; 0 for a region that does not exist.
    pub size: u64,
    /// Offset of the region in the device's file.
    pub offset: u64,
    /// Parts of the region that can be mapped, as byte ranges from its start.
    pub mappable: Vec<Range<u64>>,
}

/// IOMMU of a type1 container, as `VFIO_IOMMU_GET_INFO` describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Type1 {
    /// Supported page sizes: bit N stands for 2^N bytes.
    pub page_sizes: u64,
    /// Mappable IOVAs, without the reserved ones; `None` from kernels that do not report them
    /// (before 5.4).
    pub ranges: Option<Vec<(u64, u64)>>,
    /// Number of mappings that can still be added; `None` from kernels that do not report it
    /// (before 5.11).
    pub available: Option<u32>,
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let part = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes(part.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let part = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_ne_bytes(part.try_into().ok()?))
}

/// Returns the capabilities of a chain, each with its identifier and the bytes from its header to
/// the end of the answer. `None` when the chain leaves the answer or does not end.
fn chain(bytes: &[u8], first: u32) -> Option<Vec<(u16, &[u8])>> {
    let mut found = Vec::new();
    let mut at = first;
    while at != 0 {
        let cap = bytes.get(usize::try_from(at).ok()?..)?;
        let id = cap.get(..2)?.try_into().ok()?;
        found.push((u16::from_ne_bytes(id), cap));
        if found.len() > bytes.len() / size_of::<vfio_info_cap_header>() {
            return None;
        }
        at = u32_at(cap, offset_of!(vfio_info_cap_header, next))?;
    }
    Some(found)
}

fn find<'a>(caps: &[(u16, &'a [u8])], id: u32) -> Option<&'a [u8]> {
    caps.iter()
        .find(|(found, _)| u32::from(*found) == id)
        .map(|(_, cap)| *cap)
}

/// Reads `count` pairs of 64-bit numbers from byte `at` on; `None` when there are fewer.
fn pairs(bytes: &[u8], at: usize, count: u32) -> Option<Vec<(u64, u64)>> {
    let count = usize::try_from(count).ok()?;
    let end = at.checked_add(count.checked_mul(16)?)?;
    let pairs = bytes.get(at..end)?.chunks_exact(16);
    pairs
        .map(|pair| Some((u64_at(pair, 0)?, u64_at(pair, 8)?)))
        .collect()
}

// Both arrays are arrays of pairs.
const _: () = assert!(size_of::<vfio_iova_range>() == 16);
const _: () = assert!(size_of::<vfio_region_sparse_mmap_area>() == 16);
/// Offset of the count in both capabilities with an array: header, count, four bytes of padding,
/// array.
const COUNT: usize = 8;
const ARRAY: usize = 16;

/// Parses the answer to `VFIO_DEVICE_GET_REGION_INFO`.
pub fn region(bytes: &[u8]) -> Option<Region> {
    let flags = u32_at(bytes, offset_of!(vfio_region_info, flags))?;
    let size = u64_at(bytes, offset_of!(vfio_region_info, size))?;
    let offset = u64_at(bytes, offset_of!(vfio_region_info, offset))?;
    let first = u32_at(bytes, offset_of!(vfio_region_info, cap_offset))?;
    let mut mappable = Vec::new();
    if flags & VFIO_REGION_INFO_FLAG_MMAP != 0 {
        let caps = match flags & VFIO_REGION_INFO_FLAG_CAPS {
            0 => Vec::new(),
            _ => chain(bytes, first)?,
        };
        match find(&caps, VFIO_REGION_INFO_CAP_SPARSE_MMAP) {
            None => mappable.push(0..size),
            Some(cap) => {
                for (start, len) in pairs(cap, ARRAY, u32_at(cap, COUNT)?)? {
                    let end = start.checked_add(len).filter(|end| *end <= size)?;
                    if len > 0 {
                        mappable.push(start..end);
                    }
                }
            }
        }
    }
    Some(Region {
        size,
        offset,
        mappable,
    })
}

/// Parses the answer to `VFIO_IOMMU_GET_INFO`.
pub fn type1(bytes: &[u8]) -> Option<Type1> {
    let flags = u32_at(bytes, offset_of!(vfio_iommu_type1_info, flags))?;
    let page_sizes = match flags & VFIO_IOMMU_INFO_PGSIZES {
        0 => 4096,
        _ => u64_at(bytes, offset_of!(vfio_iommu_type1_info, iova_pgsizes))?,
    };
    let mut info = Type1 {
        page_sizes,
        ranges: None,
        available: None,
    };
    if flags & VFIO_IOMMU_INFO_CAPS != 0 {
        let caps = chain(
            bytes,
            u32_at(bytes, offset_of!(vfio_iommu_type1_info, cap_offset))?,
        )?;
        if let Some(cap) = find(&caps, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE) {
            let ranges = pairs(cap, ARRAY, u32_at(cap, COUNT)?)?;
            if ranges.iter().any(|(start, last)| start > last) {
                return None;
            }
            info.ranges = Some(ranges);
        }
        if let Some(cap) = find(&caps, VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL) {
            let at = offset_of!(vfio_iommu_type1_info_dma_avail, avail);
            info.available = Some(u32_at(cap, at)?);
        }
    }
    Some(info)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn put(bytes: &mut Vec<u8>, words: &[u32]) {
        for word in words {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
    }

    /// Builds the first eight bytes of a capability: identifier, version 1, offset of the next one.
    fn header(id: u32, next: u32) -> [u32; 2] {
        let mut bytes = [0; 4];
        bytes[..2].copy_from_slice(&u16::try_from(id).unwrap().to_ne_bytes());
        bytes[2..].copy_from_slice(&1u16.to_ne_bytes());
        [u32::from_ne_bytes(bytes), next]
    }

    fn range(bytes: &mut Vec<u8>, a: u64, b: u64) {
        bytes.extend_from_slice(&a.to_ne_bytes());
        bytes.extend_from_slice(&b.to_ne_bytes());
    }

    /// Builds a typical answer on x86: two ranges around the window of interrupt messages, then the
    /// number of remaining mappings.
    fn type1_answer() -> Vec<u8> {
        let mut bytes = Vec::new();
        let flags = VFIO_IOMMU_INFO_CAPS | VFIO_IOMMU_INFO_PGSIZES;
        put(&mut bytes, &[84, flags]);
        bytes.extend_from_slice(&0x4020_1000u64.to_ne_bytes());
        put(&mut bytes, &[24, 0]);
        put(&mut bytes, &header(1, 72));
        put(&mut bytes, &[2, 0]);
        range(&mut bytes, 0, 0xfedf_ffff);
        range(&mut bytes, 0xfef0_0000, 0x7f_ffff_ffff);
        put(&mut bytes, &header(3, 0));
        put(&mut bytes, &[65535]);
        bytes
    }

    fn region_answer(flags: u32, areas: &[(u64, u64)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        put(&mut bytes, &[0, flags, 0, 32]);
        range(&mut bytes, 0x4000, 0);
        let count = u32::try_from(areas.len()).unwrap();
        put(&mut bytes, &header(3, 40));
        put(&mut bytes, &header(1, 0));
        put(&mut bytes, &[count, 0]);
        for (start, len) in areas {
            range(&mut bytes, *start, *len);
        }
        bytes
    }

    #[test]
    fn type1_info_has_ranges_and_available_mappings() {
        let info = type1(&type1_answer()).unwrap();
        let ranges = vec![(0, 0xfedf_ffff), (0xfef0_0000, 0x7f_ffff_ffff)];
        assert_eq!(info.ranges, Some(ranges));
        assert_eq!(info.available, Some(65535));
        assert_eq!(info.page_sizes, 0x4020_1000);
        let mut old = type1_answer();
        old[4..8].copy_from_slice(&0u32.to_ne_bytes());
        let info = type1(&old).unwrap();
        assert_eq!((info.ranges, info.available), (None, None));
        assert_eq!(info.page_sizes, 4096);
    }

    #[test]
    fn region_info_has_mappable_areas() {
        let all = VFIO_REGION_INFO_FLAG_MMAP | VFIO_REGION_INFO_FLAG_CAPS;
        let sparse = region(&region_answer(all, &[(0, 0x2000), (0x3000, 0x1000)])).unwrap();
        assert_eq!(sparse.size, 0x4000);
        assert_eq!(sparse.mappable, [0..0x2000, 0x3000..0x4000]);
        let plain = region(&region_answer(VFIO_REGION_INFO_FLAG_MMAP, &[])).unwrap();
        assert_eq!(plain.mappable, vec![0..0x4000; 1]);
        let none = region(&region_answer(0, &[])).unwrap();
        assert_eq!(none.mappable, []);
        for outside in [(0x3000, 0x2000), (u64::MAX, 2)] {
            assert_eq!(region(&region_answer(all, &[outside])), None);
        }
    }

    #[test]
    fn truncated_answer_is_refused() {
        let whole = type1_answer();
        for len in 0..whole.len() {
            assert_eq!(type1(&whole[..len]), None, "{len}");
        }
    }

    #[test]
    fn circular_capability_chain_ends() {
        let mut bytes = type1_answer();
        bytes[76..80].copy_from_slice(&24u32.to_ne_bytes());
        assert_eq!(type1(&bytes), None);
    }

    proptest! {
        #[test]
        fn random_answer_causes_no_panic(
            mut bytes in proptest::collection::vec(0..=64u8, 0..200), at in 0..200usize, word: u32,
        ) {
            if let Some(place) = bytes.get_mut(at..).and_then(|rest| rest.get_mut(..4)) {
                place.copy_from_slice(&word.to_ne_bytes());
            }
            let _ = (region(&bytes), type1(&bytes));
        }
    }
}
