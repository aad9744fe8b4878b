//! Every access of this process to memory with concurrent external writers.
//!
//! # Memory model
//!
//! The bytes behind a [`Memory`](crate::Memory) are shared with agents outside the compiler's view:
//! the guest's CPUs, the VMM, the kernel, which reads and writes them for io_uring, and devices.
//! They are no allocation of Rust's: they come from `mmap`, and no slice of them and no reference
//! to plain data is ever created. They are accessed in two ways only.
//!
//! - **Cells**, the fields of protocols: aligned integers of 1, 2, 4 or 8 bytes, as atomics
//!   ([`cell8`], [`cell16`], [`cell32`], [`cell64`]). Each access is a single one of the processor,
//!   of the whole cell. The protocols' order is that of the atomics (acquire, release, fences).
//! - **Copies** of bytes to and from private memory, and within guest memory ([`from_guest`],
//!   [`to_guest`], [`within_guest`], [`fill`]): calls of the C library's `memmove` and `memset`
//!   through pointers with a target that is unknown to the compiler ([`opaque`]). For the compiler
//!   such a copy equals a copy by the kernel, another agent: it can neither repeat, merge nor split
//!   it, nor conclude anything from it. A byte that is written meanwhile arrives as one of its
//!   values. Nothing is guaranteed about neighbouring bytes, or about order. Only the copy is
//!   examined, never its source: "once" therefore holds, though the routine may load a byte twice.
//!
//! Threads of this process meet in guest memory, too, where a guest uses one page twice: as a ring
//! of one worker, and as data of another. That is a cell beside a copy, or two copies. By the above
//! it equals a cell of this process beside a store of the guest, and is no data race of Rust code.
//! If two structures overlap, two cells of different sizes may meet. Rust's documentation does not
//! define that for atomics on memory of its own. Here each access is one instruction, regardless of
//! the other, and every loaded value is checked as any value from the guest. State that threads of
//! this process share with each other never lies in guest memory.
//!
//! # Guarantee of a pointer into a mapping
//!
//! Its addresses belong to a mapping of this process while an owner keeps that mapping. Nothing
//! more is guaranteed: the page behind it may be missing (the file has shrunk, no huge page was
//! left). Such an access reads zeroes, and sets a mark that the caller checks afterwards: module
//! [`sigbus`](crate::sigbus).

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// The C library's routines, hidden from the compiler. It treats a call of `memmove` as an
/// operation of its own, and would assume that no other agent writes there.
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
        // SAFETY: a valid static. The load is volatile, so that its value is unknown to the
        // compiler.
        unsafe { std::ptr::read_volatile(&raw const COPY) }
    }

    #[inline(always)]
    pub(super) fn fill() -> Fill {
        // SAFETY: as above.
        unsafe { std::ptr::read_volatile(&raw const FILL) }
    }

    /// Substitutes for Miri, which does not support these C library routines.
    #[cfg(miri)]
    mod interpreted {
        use super::{c_int, c_void};

        pub(super) unsafe extern "C" fn copy(
            to: *mut c_void,
            from: *const c_void,
            len: usize,
        ) -> *mut c_void {
            // SAFETY: the caller of `memmove` guarantees the ranges.
            unsafe { std::ptr::copy(from.cast::<u8>(), to.cast(), len) };
            to
        }

        pub(super) unsafe extern "C" fn fill(
            to: *mut c_void,
            byte: c_int,
            len: usize,
        ) -> *mut c_void {
            // SAFETY: the caller of `memset` guarantees the range.
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

/// Returns whether guest memory at `src` holds `other`. Each byte is copied before it is compared.
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

/// Returns the 1-byte cell at `ptr`, like [`cell16`].
///
/// # Safety
/// The conditions of [`cell16`], for 1 byte.
#[inline(always)]
pub(crate) unsafe fn cell8<'a>(ptr: *mut u8) -> &'a AtomicU8 {
    // SAFETY: the caller guarantees the address; every access follows the rules of this module.
    unsafe { AtomicU8::from_ptr(ptr) }
}

/// Returns the cell at `ptr`. Callers store only if the mapping is writable.
///
/// # Safety
/// `ptr` must lie in a mapping that is kept for `'a`, for 2 bytes, and be aligned to them.
#[inline(always)]
pub(crate) unsafe fn cell16<'a>(ptr: *mut u8) -> &'a AtomicU16 {
    // SAFETY: the caller guarantees the address; every access follows the rules of this module.
    unsafe { AtomicU16::from_ptr(ptr.cast()) }
}

/// Returns the 4-byte cell at `ptr`, like [`cell16`].
///
/// # Safety
/// The conditions of [`cell16`], for 4 bytes.
#[inline(always)]
pub(crate) unsafe fn cell32<'a>(ptr: *mut u8) -> &'a AtomicU32 {
    // SAFETY: the caller guarantees the address; every access follows the rules of this module.
    unsafe { AtomicU32::from_ptr(ptr.cast()) }
}

/// Returns the 8-byte cell at `ptr`, like [`cell16`].
///
/// # Safety
/// The conditions of [`cell16`], for 8 bytes.
#[inline(always)]
pub(crate) unsafe fn cell64<'a>(ptr: *mut u8) -> &'a AtomicU64 {
    // SAFETY: the caller guarantees the address; every access follows the rules of this module.
    unsafe { AtomicU64::from_ptr(ptr.cast()) }
}

/// Returns `count` adjacent cells, or arrays of cells, of type `T`.
///
/// # Safety
/// `T` is a cell or an array of cells; the conditions of [`cell16`] hold for `count` times its
/// size, and for its alignment.
#[inline(always)]
pub(crate) unsafe fn cells<'a, T>(ptr: *mut u8, count: usize) -> &'a [T] {
    // SAFETY: the caller guarantees the address; a cell is as large as its integer, and every
    // access follows the rules of this module.
    unsafe { std::slice::from_raw_parts(ptr.cast(), count) }
}

/// Returns eight adjacent cells of 8 bytes.
///
/// # Safety
/// The conditions of [`cell16`], for 64 bytes; the mapping is writable.
#[inline(always)]
pub(crate) unsafe fn row<'a>(ptr: *mut u8) -> &'a [AtomicU64; 8] {
    // SAFETY: the caller guarantees the address; a cell is as large as its integer, and every
    // access follows the rules of this module.
    unsafe { &*ptr.cast() }
}
