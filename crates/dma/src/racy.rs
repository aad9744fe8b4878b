//! All accesses of this process to memory that others write meanwhile.
//!
//! # Which memory model makes it right
//!
//! The bytes behind a [`Memory`](crate::Memory) are shared with agents that no compiler of ours
//! knows of: the guest's CPUs, the VMM, the kernel, which reads and writes them for io_uring, and
//! devices. They are no allocation of Rust's: they come from `mmap`, no slice and no reference to
//! plain data is ever made of them, and they are accessed in two ways only.
//!
//! - **Cells**, the fields of protocols: aligned integers of 2, 4 or 8 bytes, as atomics
//!   ([`cell16`], [`cell32`], [`cell64`]). Each access is one of the processor, of the whole cell;
//!   the order that the protocols need is that of the atomics (acquire, release, fences).
//! - **Copies** of bytes to and from private memory, and within guest memory ([`from_guest`],
//!   [`to_guest`], [`within_guest`], [`fill`]): calls of the C library's `memmove` and `memset`
//!   through pointers whose target the compiler does not know ([`opaque`]). So for the compiler a
//!   copy is what a copy by the kernel is, another agent's: it can neither repeat, merge nor split
//!   it, nor conclude anything from it. A byte that is written meanwhile arrives as one of the
//!   values that it had; nothing is promised of bytes beside each other, or of order. What was
//!   copied is looked at, never its source: so "once" holds, though the routine may load a byte
//!   twice.
//!
//! Threads of ours meet in guest memory, too, where a guest names one page twice: as a ring of one
//! worker, and as data of another. That is a cell beside a copy, or two copies: by the above the
//! same as a cell of ours beside a store of the guest's, and no data race of Rust code. Where two
//! structures overlap, two cells of different sizes may meet, which Rust's documentation does not
//! define for atomics on memory of its own; here each is one instruction, whatever the other does,
//! and what is loaded is checked as any value from the guest. What our own threads agree on with
//! each other never lies in guest memory.
//!
//! # What a pointer into a mapping promises
//!
//! That its addresses belong to a mapping of ours as long as somebody keeps that, and no more: the
//! page behind it may be gone (the file shrank, no huge page was left). Such an access finds
//! zeroes, and a mark that the caller looks at afterwards: module [`sigbus`](crate::sigbus).

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

/// The C library's routines, so that the compiler does not know them again: it takes a call of
/// `memmove` for an operation of its own, and would have to be told that others write there.
mod opaque {
    use super::{c_int, c_void};

    pub(super) type Copy = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void;
    pub(super) type Fill = unsafe extern "C" fn(*mut c_void, c_int, usize) -> *mut c_void;

    #[cfg(not(miri))]
    static COPY: Copy = libc::memmove;
    #[cfg(not(miri))]
    static FILL: Fill = libc::memset;
    #[cfg(miri)]
    static COPY: Copy = interpreted::copy;
    #[cfg(miri)]
    static FILL: Fill = interpreted::fill;

    #[inline(always)]
    pub(super) fn copy() -> Copy {
        // SAFETY: a valid static. A volatile load, so that its value is not known.
        unsafe { std::ptr::read_volatile(&raw const COPY) }
    }

    #[inline(always)]
    pub(super) fn fill() -> Fill {
        // SAFETY: as above.
        unsafe { std::ptr::read_volatile(&raw const FILL) }
    }

    /// The same for Miri, which does not know the C library's.
    #[cfg(miri)]
    mod interpreted {
        use super::{c_int, c_void};

        pub(super) unsafe extern "C" fn copy(
            to: *mut c_void,
            from: *const c_void,
            len: usize,
        ) -> *mut c_void {
            // SAFETY: as the caller of `memmove` promises.
            unsafe { std::ptr::copy(from.cast::<u8>(), to.cast(), len) };
            to
        }

        pub(super) unsafe extern "C" fn fill(
            to: *mut c_void,
            byte: c_int,
            len: usize,
        ) -> *mut c_void {
            // SAFETY: as the caller of `memset` promises.
            unsafe { std::ptr::write_bytes(to.cast::<u8>(), byte as u8, len) };
            to
        }
    }
}

/// Copies guest memory at `src` into `dst`.
///
/// # Safety
/// `src` must lie in a mapping, for `dst.len()` bytes.
#[inline]
pub(crate) unsafe fn from_guest(src: *const u8, dst: &mut [u8]) {
    // SAFETY: the caller vouches for `src`; `dst` is private memory.
    unsafe { opaque::copy()(dst.as_mut_ptr().cast(), src.cast(), dst.len()) };
}

/// Copies `src` into guest memory at `dst`.
///
/// # Safety
/// `dst` must lie in a writable mapping, for `src.len()` bytes.
#[inline]
pub(crate) unsafe fn to_guest(dst: *mut u8, src: &[u8]) {
    // SAFETY: the caller vouches for `dst`; `src` is private memory.
    unsafe { opaque::copy()(dst.cast(), src.as_ptr().cast(), src.len()) };
}

/// Copies between two places that may be the same guest memory.
///
/// # Safety
/// `src` must lie in a mapping for `len` bytes, `dst` in a writable one.
#[inline]
pub(crate) unsafe fn within_guest(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller vouches for both; they may overlap.
    unsafe { opaque::copy()(dst.cast(), src.cast(), len) };
}

/// Fills guest memory.
///
/// # Safety
/// `dst` must lie in a writable mapping for `len` bytes.
#[inline]
pub(crate) unsafe fn fill(dst: *mut u8, byte: u8, len: usize) {
    // SAFETY: the caller vouches for `dst`.
    unsafe { opaque::fill()(dst.cast(), c_int::from(byte), len) };
}

/// Whether guest memory at `src` holds `other`. Each byte is copied before it is compared.
///
/// # Safety
/// `src` must lie in a mapping, for `other.len()` bytes.
pub(crate) unsafe fn equal(src: *const u8, other: &[u8]) -> bool {
    const CHUNK: usize = 1024;
    let mut bytes = [0; CHUNK];
    other.chunks(CHUNK).enumerate().all(|(i, wanted)| {
        let (copied, _) = bytes.split_at_mut(wanted.len());
        // SAFETY: the chunk lies in the range that the caller vouches for.
        unsafe { from_guest(src.wrapping_add(i * CHUNK), copied) };
        *copied == *wanted
    })
}

/// The cell at `ptr`. Stores only where the mapping is writable: the callers see to it.
///
/// # Safety
/// `ptr` must lie in a mapping that is kept for `'a`, for 2 bytes, and be aligned to them.
#[inline(always)]
pub(crate) unsafe fn cell16<'a>(ptr: *mut u8) -> &'a AtomicU16 {
    // SAFETY: as the caller says; all access is as this module says.
    unsafe { AtomicU16::from_ptr(ptr.cast()) }
}

/// As [`cell16`], of 4 bytes.
///
/// # Safety
/// As there.
#[inline(always)]
pub(crate) unsafe fn cell32<'a>(ptr: *mut u8) -> &'a AtomicU32 {
    // SAFETY: as the caller says; all access is as this module says.
    unsafe { AtomicU32::from_ptr(ptr.cast()) }
}

/// As [`cell16`], of 8 bytes.
///
/// # Safety
/// As there.
#[inline(always)]
pub(crate) unsafe fn cell64<'a>(ptr: *mut u8) -> &'a AtomicU64 {
    // SAFETY: as the caller says; all access is as this module says.
    unsafe { AtomicU64::from_ptr(ptr.cast()) }
}

/// Eight cells of 8 bytes, side by side.
///
/// # Safety
/// As [`cell16`], for 64 bytes; the mapping is writable.
#[inline(always)]
pub(crate) unsafe fn row<'a>(ptr: *mut u8) -> &'a [AtomicU64; 8] {
    // SAFETY: as the caller says; a cell is as large as its integer, and all access is as this
    // module says.
    unsafe { &*ptr.cast() }
}
