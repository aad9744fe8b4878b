//! Return of freed memory from the allocator to the system.

/// Returns freed memory of all threads from the allocator to the system. Allocations from the same
/// arena wait meanwhile, for some milliseconds per tens of mebibytes. Returns whether any memory
/// was returned; always `false` with C libraries other than glibc.
pub fn release() -> bool {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: malloc_trim(3) takes no pointer, and any thread may call it.
        let given = unsafe { libc::malloc_trim(0) };
        given == 1
    }
    #[cfg(not(target_env = "gnu"))]
    false
}
