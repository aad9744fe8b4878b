//! Copies between guest memory and private memory, by raw pointer only.
//!
//! The guest may write while we read. From the compiler's side that is another process: the
//! copy is an opaque `memcpy`/`memmove` of bytes that have no invalid values, and nobody
//! looks at the source twice.

/// Copies guest memory at `src` into `dst`.
///
/// # Safety
/// `src` must be mapped for `dst.len()` bytes.
#[inline]
pub(crate) unsafe fn from_guest(src: *const u8, dst: &mut [u8]) {
    // SAFETY: the caller vouches for `src`; `dst` is private memory, so the two cannot overlap.
    unsafe { std::ptr::copy_nonoverlapping(src, dst.as_mut_ptr(), dst.len()) }
}

/// Copies `src` into guest memory at `dst`.
///
/// # Safety
/// `dst` must be mapped writable for `src.len()` bytes.
#[inline]
pub(crate) unsafe fn to_guest(dst: *mut u8, src: &[u8]) {
    // SAFETY: the caller vouches for `dst`; `src` is private memory, so the two cannot overlap.
    unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst, src.len()) }
}

/// Copies between two places that may be the same guest memory.
///
/// # Safety
/// `src` must be mapped for `len` bytes, `dst` mapped writable for `len` bytes.
#[inline]
pub(crate) unsafe fn within_guest(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller vouches for both; overlap is allowed.
    unsafe { std::ptr::copy(src, dst, len) }
}

/// Fills guest memory.
///
/// # Safety
/// `dst` must be mapped writable for `len` bytes.
#[inline]
pub(crate) unsafe fn fill(dst: *mut u8, byte: u8, len: usize) {
    // SAFETY: the caller vouches for `dst`.
    unsafe { std::ptr::write_bytes(dst, byte, len) }
}

/// Whether guest memory at `src` holds `other`.
///
/// # Safety
/// `src` must be mapped for `other.len()` bytes.
#[inline]
pub(crate) unsafe fn equal(src: *const u8, other: &[u8]) -> bool {
    // SAFETY: the caller vouches for `src`; memcmp makes no reference to it.
    unsafe { libc::memcmp(src.cast(), other.as_ptr().cast(), other.len()) == 0 }
}
