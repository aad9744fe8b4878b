//! Asking the processor for memory before it is needed.

/// Bytes of a cache line, on the processors that have [`line`].
pub(crate) const LINE: usize = 64;

/// Asks for the cache line at `ptr`, to be read soon. No effect but speed, whatever `ptr` is.
#[inline(always)]
pub fn line(ptr: *const u8) {
    platform::line(ptr);
}

/// Asks for the cache line at `ptr`, to be written soon: no other processor has a copy then, and
/// stores need not wait for that one after the other. No effect but speed, whatever `ptr` is.
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
