//! Mapped device registers. `unsafe` covers the mapping and the volatile accesses inside it.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};

use rustix::mm::{MapFlags, ProtFlags};

/// Registers that are mapped into this process: a part of BAR0 of a VFIO device.
/// Accesses are volatile, of 32 or 64 bits, and little endian on the bus. Offsets count
/// from the start of the mapping.
#[derive(Debug)]
pub struct Registers {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is not bound to a thread, and every access to it is one volatile access of a
// whole register.
unsafe impl Send for Registers {}
// SAFETY: as above.
unsafe impl Sync for Registers {}

impl Registers {
    /// Maps `len` bytes of `fd` from `offset` on (both multiples of the page
    /// size), for reading and writing.
    pub fn map(fd: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base =
            unsafe { rustix::mm::mmap(null_mut(), len, prot, MapFlags::SHARED, fd, offset)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { base, len })
    }

    /// Releases the device: replaces the registers with memory full of ones, as if the device were
    /// lost. Later doorbell writes have no effect.
    pub fn detach(&self) -> io::Result<()> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        let base = self.base.as_ptr();
        // SAFETY: replaces our own mapping, whole, by another one of the same length and rights;
        // accesses to it by other threads are volatile, of mapped memory before and after.
        unsafe { rustix::mm::mmap_anonymous(base.cast(), self.len, prot, flags)? };
        for offset in (0..self.len / 8).map(|word| word * 8) {
            self.write64(offset, u64::MAX);
        }
        Ok(())
    }

    /// Returns the length of the mapped registers in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the mapping is empty, which it never is.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether a 32-bit register exists at `offset`: inside the mapping, and aligned.
    pub fn is_register(&self, offset: usize) -> bool {
        offset.is_multiple_of(4) && offset.checked_add(4).is_some_and(|end| end <= self.len)
    }

    fn is_register64(&self, offset: usize) -> bool {
        offset.is_multiple_of(8) && offset.checked_add(8).is_some_and(|end| end <= self.len)
    }

    #[inline]
    fn at<T>(&self, offset: usize) -> *mut T {
        self.base.as_ptr().wrapping_add(offset).cast()
    }

    /// Reads a 32-bit register; all ones, as from a device that is lost, for an invalid offset.
    #[inline]
    pub fn read32(&self, offset: usize) -> u32 {
        if !self.is_register(offset) {
            return u32::MAX;
        }
        // SAFETY: inside the mapping and aligned, as just checked; the
        // mapping lives as long as `self`.
        let value = unsafe { self.at::<u32>(offset).read_volatile() };
        barrier_after_read();
        u32::from_le(value)
    }

    /// Writes a 32-bit register, after all earlier memory writes of this thread. An invalid offset
    /// is ignored.
    #[inline]
    pub fn write32(&self, offset: usize, value: u32) {
        if !self.is_register(offset) {
            return;
        }
        barrier_before_write();
        // SAFETY: inside the mapping and aligned, as just checked; the
        // mapping lives as long as `self`.
        unsafe { self.at::<u32>(offset).write_volatile(value.to_le()) }
    }

    /// Reads a 64-bit register in one access; all ones for an invalid offset.
    #[inline]
    pub fn read64(&self, offset: usize) -> u64 {
        if !self.is_register64(offset) {
            return u64::MAX;
        }
        // SAFETY: inside the mapping and aligned, as just checked; the
        // mapping lives as long as `self`.
        let value = unsafe { self.at::<u64>(offset).read_volatile() };
        barrier_after_read();
        u64::from_le(value)
    }

    /// Writes a 64-bit register in one access. An invalid offset is ignored.
    #[inline]
    pub fn write64(&self, offset: usize, value: u64) {
        if !self.is_register64(offset) {
            return;
        }
        barrier_before_write();
        // SAFETY: inside the mapping and aligned, as just checked; the
        // mapping lives as long as `self`.
        unsafe { self.at::<u64>(offset).write_volatile(value.to_le()) }
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and only `self` has a pointer into it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Orders normal stores before a following store to device memory. On AArch64 a device is an
/// observer of the outer shareable domain, which no language-level fence covers. Elsewhere (x86-64)
/// stores are not reordered.
#[inline]
fn barrier_before_write() {
    std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier instruction touches nothing.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags));
    }
}

/// Orders a read of a device register before later reads of memory.
#[inline]
fn barrier_after_read() {
    std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier instruction touches nothing.
    unsafe {
        std::arch::asm!("dmb oshld", options(nostack, preserves_flags));
    }
}
