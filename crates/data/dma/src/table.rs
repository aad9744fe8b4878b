//! Host addresses of long-lived structures (a queue, a doorbell buffer).

use crate::{Access, DmaError, DmaMap, Memory};

/// Unit in which a structure may be scattered in host memory: the smallest NVMe page.
const PAGE: usize = 4096;
/// Maximum size of a structure in bytes, above that of any queue (65536 entries of 64 bytes are 4
/// MiB).
const MAX_BYTES: u64 = 256 << 20;

/// Host addresses of a structure in guest memory: a single one if it is contiguous, otherwise one
/// for each page.
pub(crate) struct PageAddresses {
    /// Address of a contiguous structure; null if the structure is scattered.
    start: *mut u8,
    /// Addresses of the pages of a scattered structure.
    pages: Box<[*mut u8]>,
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
        if let Some(start) = contiguous(map, iova, bytes, align, access, &mut keep)? {
            return Ok(PageAddresses {
                start,
                pages: Box::default(),
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
            start: std::ptr::null_mut(),
            pages: pages.into_boxed_slice(),
            keep,
        })
    }

    /// Returns the host address of a byte offset, which the caller has checked against the size.
    #[inline(always)]
    pub(crate) fn at(&self, offset: usize) -> Option<*mut u8> {
        if !self.start.is_null() {
            return Some(self.start.wrapping_add(offset));
        }
        self.scattered_at(offset)
    }

    #[cold]
    #[inline(never)]
    fn scattered_at(&self, offset: usize) -> Option<*mut u8> {
        let page = self.pages.get(offset / PAGE)?;
        Some(page.wrapping_add(offset % PAGE))
    }

    /// Returns the number of bytes from an offset to the end of its page, or a larger number than
    /// the structure has bytes if the structure is contiguous.
    #[inline(always)]
    pub(crate) fn run(&self, offset: usize) -> usize {
        if self.start.is_null() {
            PAGE - offset % PAGE
        } else {
            usize::MAX
        }
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
