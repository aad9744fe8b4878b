//! Transfer of cache lines between processors.
//!
//! On some processors a store to a line that another processor has read must wait for a message
//! from that processor, and such stores wait for each other. Between distant processors that is
//! most of the host's cost of a queue entry. A reader that evicts the lines at once, from all
//! caches, saves the writer that cost: the next store finds a line that no other processor has.

/// Proof that this processor evicts cache lines without waiting, and benefits from it. AMD
/// processors do, as measured. Required by [`Ring::evict`](crate::Ring::evict).
#[derive(Clone, Copy, Debug)]
pub struct Evict(());

impl Evict {
    /// Returns the eviction instruction of this processor; `None` if eviction has no benefit on it.
    #[must_use]
    pub fn of_processor() -> Option<Self> {
        platform::gains().then_some(Evict(()))
    }

    /// Evicts the cache line at `ptr` from all processors' caches, without waiting. Modified data
    /// is written to memory. No value changes.
    ///
    /// # Safety
    /// `ptr` is in an existing mapping. Its page may be missing (the instruction faults as a load
    /// does, see module [`sigbus`](crate::sigbus)).
    #[inline(always)]
    pub(crate) unsafe fn line(self, ptr: *const u8) {
        // SAFETY: the caller's promise; and this value exists only where the instruction does.
        unsafe { platform::evict(ptr) }
    }
}

/// Returns the processor's cycle counter (as `probes::cycles`), read after all earlier loads have
/// completed.
#[inline]
#[must_use]
pub fn cycles_after_loads() -> u64 {
    platform::cycles_after_loads()
}

#[cfg(target_arch = "x86_64")]
mod platform {
    use std::arch::asm;
    use std::arch::x86_64::__cpuid_count;

    /// Bit of EBX in CPUID leaf 7: the processor has CLFLUSHOPT ("AMD64 APM", volume 3, appendix
    /// E).
    const CLFLUSHOPT: u32 = 1 << 23;

    #[allow(unused_unsafe)] // Safe functions since Rust 1.94.
    pub fn gains() -> bool {
        // SAFETY: every 64-bit processor has the instruction, and leaf 0.
        let vendor = unsafe { __cpuid_count(0, 0) };
        if vendor.eax < 7 || vendor.ebx.to_le_bytes() != *b"Auth" {
            return false;
        }
        // SAFETY: there is a leaf 7.
        unsafe { __cpuid_count(7, 0) }.ebx & CLFLUSHOPT != 0
    }

    /// # Safety
    /// See [`super::Evict::line`]; [`gains`] has returned `true`.
    #[inline(always)]
    pub unsafe fn evict(ptr: *const u8) {
        // SAFETY: the processor has the instruction, and the line is mapped; it changes no value.
        unsafe { asm!("clflushopt [{}]", in(reg) ptr, options(nostack, preserves_flags)) }
    }

    #[inline]
    pub fn cycles_after_loads() -> u64 {
        let (low, high): (u64, u64);
        // SAFETY: LFENCE waits for loads, RDTSC reads the counter; both are in every 64-bit
        // processor.
        unsafe {
            asm!("lfence", "rdtsc", out("rax") low, out("rdx") high, options(nostack, nomem));
        }
        high << 32 | low
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod platform {
    pub fn gains() -> bool {
        false
    }

    /// # Safety
    /// No requirement: the function has no effect.
    #[inline(always)]
    pub unsafe fn evict(_: *const u8) {}

    pub fn cycles_after_loads() -> u64 {
        0
    }
}
