//! Prefetch of memory into the processor's caches.

/// Size of a cache line in bytes, on the processors that support [`line`].
pub(crate) const LINE: usize = 64;

/// Prefetches the cache line at `ptr` for a read. Affects only speed, for any value of `ptr`.
#[inline(always)]
pub fn line(ptr: *const u8) {
    platform::line(ptr);
}

/// Prefetches the cache line at `ptr` for a write: no other processor keeps a copy, so later stores
/// need not wait one by one. Affects only speed, for any value of `ptr`.
#[inline(always)]
pub fn line_for_write(ptr: *const u8) {
    platform::line_for_write(ptr);
}

#[cfg(target_arch = "x86_64")]
mod platform {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

    #[inline(always)]
    pub fn line(ptr: *const u8) {
        // SAFETY: a prefetch does not access memory architecturally.
        unsafe { _mm_prefetch::<{ _MM_HINT_T0 }>(ptr.cast()) }
    }

    #[inline(always)]
    pub fn line_for_write(ptr: *const u8) {
        // SAFETY: a prefetch does not access memory architecturally. 64-bit processors without
        // PREFETCHW do nothing for its opcode ("Intel SDM", volume 2; "AMD64 APM", volume 3).
        unsafe {
            std::arch::asm!(
                "prefetchw [{}]",
                in(reg) ptr,
                options(nostack, preserves_flags, readonly)
            );
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod platform {
    use std::arch::asm;

    #[inline(always)]
    pub fn line(ptr: *const u8) {
        // SAFETY: a prefetch does not access memory architecturally.
        unsafe {
            asm!("prfm pldl1keep, [{}]", in(reg) ptr, options(nostack, preserves_flags, readonly));
        }
    }

    #[inline(always)]
    pub fn line_for_write(ptr: *const u8) {
        // SAFETY: a prefetch does not access memory architecturally.
        unsafe {
            asm!("prfm pstl1keep, [{}]", in(reg) ptr, options(nostack, preserves_flags, readonly));
        }
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod platform {
    pub fn line(_: *const u8) {}

    pub fn line_for_write(_: *const u8) {}
}
