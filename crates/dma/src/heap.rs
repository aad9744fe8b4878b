//! Memory that was freed, and that the allocator keeps for later.

/// Releases to the system what the allocator keeps of memory that was freed, by whichever thread.
/// Who allocates meanwhile from the same arena waits: some milliseconds, for tens of mebibytes.
/// Whether there was any; none is known of C libraries other than glibc.
pub fn release() -> bool {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it takes no pointer, and any thread may call it (malloc_trim(3)).
        let given = unsafe { libc::malloc_trim(0) };
        given == 1
    }
    #[cfg(not(target_env = "gnu"))]
    false
}
