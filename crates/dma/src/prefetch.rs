//! Asking the processor for memory before it is needed.

/// Bytes of a cache line, on the processors that have [`line`].
pub(crate) const LINE: usize = 64;

/// Asks for the cache line at `ptr`, to be read soon. No effect but speed, whatever `ptr` is.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn line(ptr: *const u8) {
    // SAFETY: a prefetch does not access memory architecturally.
    unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(ptr.cast()) }
}

#[cfg(target_arch = "aarch64")]
#[inline]
pub(crate) fn line(ptr: *const u8) {
    // SAFETY: a prefetch does not access memory architecturally.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) ptr, options(nostack, preserves_flags, readonly))
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[inline]
pub(crate) fn line(_: *const u8) {}
