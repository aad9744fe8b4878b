//! Physical Region Pages (NVMe Base 2.1, 4.3.1): the two pointers of a command and the list behind
//! the second.

use crate::list::Inner;
use crate::{Access, DmaError, DmaMap, SegmentList};

/// Reason why a PRP pair or list was refused. Each variant is named after its status in the
/// standard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrpError {
    /// PRP Offset Invalid (13h): an entry's offset is not zero where it must be, or not aligned.
    #[error("PRP entry {prp:#x} has an invalid offset")]
    OffsetInvalid {
        /// Value of the invalid PRP entry.
        prp: u64,
    },
    /// An address of data or of a list cannot be accessed (Data Transfer Error, 04h).
    #[error(transparent)]
    Dma(#[from] DmaError),
}

/// Number of list entries copied at once: those of a 256 KiB transfer in 4 KiB pages.
const CHUNK: usize = 64;

/// Appends the memory of `len` bytes that `prp1` and `prp2` describe to `out`. `page_size` is the
/// host's memory page (CC.MPS), a power of two from 4096 on.
///
/// PRP1 may start inside a page, aligned to a dword. PRP2 describes the data beyond its page: the
/// second page, if the rest fits in one, otherwise a pointer to a list. A list may start inside a
/// page (aligned to a qword) and ends with that page. If more data is left, the page's last entry
/// points to the next list page. Every other entry is aligned to a page.
///
/// All of the data lies in the device's own memory ([`DmaMap::set_device_memory`]), or none of it;
/// lists may lie in either.
///
/// Each entry is copied once, before it is examined, and their number is bounded by `len`. Only
/// segments in `out` are allocated. After an error `out` may hold a part of them.
///
/// # Errors
/// [`PrpError`] when an entry is invalid or an address cannot be accessed.
#[inline]
pub fn walk(
    map: &DmaMap,
    prp1: u64,
    prp2: u64,
    len: u64,
    page_size: u64,
    access: Access,
    out: &mut SegmentList,
) -> Result<(), PrpError> {
    walk_any(map, prp1, prp2, len, page_size, access, out)?;
    Ok(map.unmixed(out)?)
}

/// Walks the PRPs like [`walk`], without the check for mixed guest and device memory.
#[inline]
fn walk_any(
    map: &DmaMap,
    prp1: u64,
    prp2: u64,
    len: u64,
    page_size: u64,
    access: Access,
    out: &mut SegmentList,
) -> Result<(), PrpError> {
    if len == 0 {
        return Ok(());
    }
    // An invalid page size is the caller's mistake; the smallest page is always a safe reading.
    debug_assert!(
        page_size.is_power_of_two() && page_size >= 4096,
        "page size {page_size}"
    );
    let page_size = if page_size.is_power_of_two() {
        page_size.max(4096)
    } else {
        4096
    };
    let mask = page_size - 1;
    if prp1 & 3 != 0 {
        return Err(PrpError::OffsetInvalid { prp: prp1 });
    }
    let out = out.attach(map).ok_or(DmaError::ForeignList)?;
    let first = len.min(page_size - (prp1 & mask));
    map.append(prp1, first, access, out)?;
    let left = len - first;
    if left == 0 {
        return Ok(());
    }
    rest(map, prp2, left, page_size, access, out)
}

/// Appends the data after the first page, by the second PRP entry.
fn rest(
    map: &DmaMap,
    prp2: u64,
    left: u64,
    page_size: u64,
    access: Access,
    out: &mut Inner,
) -> Result<(), PrpError> {
    if left <= page_size {
        return page(map, prp2, left, page_size - 1, access, out);
    }
    if prp2 & 7 != 0 {
        return Err(PrpError::OffsetInvalid { prp: prp2 });
    }
    list(map, prp2, left, page_size, access, out)
}

/// Appends the data page that one PRP entry names.
#[inline]
fn page(
    map: &DmaMap,
    prp: u64,
    len: u64,
    mask: u64,
    access: Access,
    out: &mut Inner,
) -> Result<(), PrpError> {
    if prp & mask != 0 {
        return Err(PrpError::OffsetInvalid { prp });
    }
    Ok(map.append(prp, len, access, out)?)
}

/// Appends the data pages that a chain of PRP lists names.
fn list(
    map: &DmaMap,
    list: u64,
    len: u64,
    page_size: u64,
    access: Access,
    out: &mut Inner,
) -> Result<(), PrpError> {
    let mask = page_size - 1;
    let (mut at, mut left) = (list, len);
    loop {
        // Entries from here to the end of the list's page. A list page after the first is a whole
        // page, so each turn but the first describes data: `left` decreases, and a circular chain
        // ends with it.
        let room = (page_size - (at & mask)) / 8;
        let needed = left.div_ceil(page_size);
        let chained = needed > room;
        let mut entries = if chained { room } else { needed };
        let mut bytes = [0; CHUNK * 8];
        while entries > 0 {
            let count = entries.min(CHUNK as u64);
            let (chunk, _) = bytes.split_at_mut(count as usize * 8);
            map.read(at, chunk)?;
            entries -= count;
            at = at.wrapping_add(count * 8);
            let (copied, _) = chunk.as_chunks::<8>();
            let (data, last) = match copied.split_last() {
                Some((last, data)) if chained && entries == 0 => (data, Some(last)),
                _ => (copied, None),
            };
            // Consecutive entries, as those of huge pages, are translated together.
            let (mut start, mut pending) = (0u64, 0);
            for entry in data {
                let (prp, bytes) = (u64::from_le_bytes(*entry), left.min(page_size));
                if prp & mask == 0 && start.checked_add(pending) == Some(prp) {
                    pending += bytes;
                } else {
                    map.append(start, pending, access, out)?;
                    if prp & mask != 0 {
                        return Err(PrpError::OffsetInvalid { prp });
                    }
                    (start, pending) = (prp, bytes);
                }
                left -= bytes;
            }
            map.append(start, pending, access, out)?;
            if let Some(next) = last {
                at = u64::from_le_bytes(*next);
            }
        }
        if !chained {
            return Ok(());
        }
        if at & mask != 0 {
            return Err(PrpError::OffsetInvalid { prp: at });
        }
    }
}
