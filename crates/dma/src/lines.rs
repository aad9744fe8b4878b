//! Cache lines on their way between processors.
//!
//! On some processors a line that another one has read is written again only after both have told
//! each other, and such stores wait for each other. Where two processors are far apart that is most
//! of what a queue entry costs its host. A reader who evicts the lines at once, from all
//! caches, spares the writer that: the next store finds a line that no other processor has.

/// That this processor evicts lines without waiting, and that its kind gains by it: AMD's does, on
/// which it was measured. Who has this may call [`Ring::evict`](crate::Ring::evict).
#[derive(Clone, Copy, Debug)]
pub struct Evict(());

impl Evict {
    /// `None` where lines stay where they are.
    #[must_use]
    pub fn of_processor() -> Option<Self> {
        platform::gains().then_some(Evict(()))
    }

    /// Takes the cache line at `ptr` out of all processors' caches, without waiting for it. What
    /// was written there goes to memory. No value changes.
    ///
    /// # Safety
    /// `ptr` is in a mapping that lives. Its page may be gone (the instruction faults as a load
    /// does, see module [`sigbus`](crate::sigbus)).
    #[inline(always)]
    pub(crate) unsafe fn line(self, ptr: *const u8) {
        // SAFETY: the caller's promise; and this value exists only where the instruction does.
        unsafe { platform::evict(ptr) }
    }
}

/// The processor's counter (as `probes::cycles`), read when all loads before have their values.
#[inline]
#[must_use]
pub fn cycles_after_loads() -> u64 {
    platform::cycles_after_loads()
}

#[cfg(target_arch = "x86_64")]
mod platform {
    use std::arch::asm;
    use std::arch::x86_64::__cpuid_count;

    /// EBX of CPUID leaf 7: CLFLUSHOPT ("AMD64 APM", volume 3, appendix E).
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
    /// See [`super::Evict::line`]; [`gains`] has said yes.
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
    /// It does nothing.
    #[inline(always)]
    pub unsafe fn evict(_: *const u8) {}

    pub fn cycles_after_loads() -> u64 {
        0
    }
}
