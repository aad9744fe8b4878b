//! Host addresses of long-lived structures (a queue, a doorbell buffer).

use crate::{Access, DmaError, DmaMap, Memory};

/// Unit in which a structure may be scattered in host memory: the smallest NVMe page.
const PAGE: usize = 4096;
/// Maximum size of a structure in bytes, above that of any queue (65536 entries of 64 bytes are 4
/// MiB).
const MAX_BYTES: u64 = 256 << 20;
/// Log2 of the page size for a contiguous structure, chosen so that one page holds all of it.
const WHOLE: u32 = 48;

/// Host addresses of a structure in guest memory, by page; a single one if it is contiguous.
pub(crate) struct PageAddresses {
    pages: Box<[*mut u8]>,
    /// Page size of the structure in bytes, as a power of two.
    shift: u32,
    /// Memories that contain the structure, which stay mapped.
    keep: Vec<Memory>,
}

impl PageAddresses {
    /// Resolves `bytes` at `iova`, which must be aligned to `align` in host memory (a power of two,
    /// at most a page), and to a page if they are scattered.
    pub(crate) fn resolve(
        map: &DmaMap,
        iova: u64,
        bytes: u64,
        align: usize,
        access: Access,
    ) -> Result<PageAddresses, DmaError> {
        if bytes == 0 || bytes > MAX_BYTES {
            return Err(DmaError::Overflow);
        }
        iova.checked_add(bytes - 1).ok_or(DmaError::Overflow)?;
        if map.is_mixed(iova, bytes) {
            return Err(DmaError::Mixed);
        }
        let mut keep = Vec::new();
        if let Some(ptr) = contiguous(map, iova, bytes, align, access, &mut keep)? {
            return Ok(PageAddresses {
                pages: Box::new([ptr]),
                shift: WHOLE,
                keep,
            });
        }
        if !iova.is_multiple_of(PAGE as u64) {
            return Err(DmaError::Misaligned { iova });
        }
        let mut pages = Vec::with_capacity(bytes.div_ceil(PAGE as u64) as usize);
        for offset in (0..bytes).step_by(PAGE) {
            let at = iova + offset;
            let len = (bytes - offset).min(PAGE as u64);
            pages.push(
                contiguous(map, at, len, align, access, &mut keep)?
                    .ok_or(DmaError::Misaligned { iova: at })?,
            );
        }
        Ok(PageAddresses {
            pages: pages.into_boxed_slice(),
            shift: PAGE.trailing_zeros(),
            keep,
        })
    }

    /// Returns the host address of a byte offset, which the caller has checked against the size.
    #[inline(always)]
    pub(crate) fn at(&self, offset: usize) -> Option<*mut u8> {
        let page = self.pages.get(offset >> self.shift)?;
        Some(page.wrapping_add(offset & ((1 << self.shift) - 1)))
    }

    /// Returns the number of bytes from an offset to the end of its page.
    #[inline(always)]
    pub(crate) fn run(&self, offset: usize) -> usize {
        (1 << self.shift) - (offset & ((1 << self.shift) - 1))
    }

    /// Returns the memories that contain the structure.
    pub(crate) fn memories(&self) -> &[Memory] {
        &self.keep
    }
}

/// Returns the host address of a range that is contiguous in one memory; `None` if it is not. Adds
/// the memory to `keep`.
fn contiguous(
    map: &DmaMap,
    iova: u64,
    len: u64,
    align: usize,
    access: Access,
    keep: &mut Vec<Memory>,
) -> Result<Option<*mut u8>, DmaError> {
    let first = map.translate(iova, access)?;
    // Atomic access needs natural alignment.
    if !first.ptr.addr().is_multiple_of(align) {
        return Err(DmaError::Misaligned { iova });
    }
    let mut done = first.len;
    while done < len {
        let next = map.translate(iova + done, access)?;
        // `done` is less than `len`, which fits in host memory.
        if !std::ptr::eq(next.slot, first.slot) || next.ptr != first.ptr.wrapping_add(done as usize)
        {
            return Ok(None);
        }
        done += next.len;
    }
    let memory = map.memory_at(iova).ok_or(DmaError::Unmapped { iova })?;
    if !keep.iter().any(|kept| kept.is_same(memory)) {
        keep.push(memory.clone());
    }
    Ok(Some(first.ptr))
}
