//! Memory of this process alone: what a volume in memory keeps its data in.

use std::ptr::null_mut;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::memory::system;
use crate::sigbus::Registration;
use crate::{MapError, View, prefetch, racy};

/// Where the processor and the system have huge pages of other sizes, this
/// is only a matter of speed.
const HUGE_PAGE: usize = 2 << 20;

/// Bytes that no other process can see, zero at first, in huge pages where the system gives them
/// (transparent huge pages, on request: `madvise`): a random access then mostly finds its address
/// translation at hand. Taken from the system when first written, a whole page at a time. Cloning
/// is cheap and shares the bytes; they are for many threads at once, which see each other's writes
/// as those of a disk: of overlapping ones any mixture.
#[derive(Clone, Debug)]
pub struct PrivateMemory(Arc<Pages>);

#[derive(Debug)]
struct Pages {
    /// Aligned to [`HUGE_PAGE`].
    ptr: *mut u8,
    len: usize,
    /// The whole mapping, with what alignment took.
    mapped: (*mut u8, usize),
    /// None only inside `drop`.
    registration: Option<Registration>,
}

// SAFETY: the mapping belongs to no thread; it is accessed by raw copies only.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // First out of the table: after munmap the addresses may belong to another mapping.
        self.registration = None;
        let (ptr, len) = self.mapped;
        // SAFETY: mapped by `new`, and nobody has a pointer into it beyond a call.
        let _ = unsafe { rustix::mm::munmap(ptr.cast(), len) };
    }
}

impl PrivateMemory {
    /// `len` zero bytes. No memory is taken before it is written.
    ///
    /// # Errors
    /// [`MapError::Empty`], [`MapError::Overflow`],
    /// [`MapError::TableFull`] or [`MapError::System`].
    pub fn new(len: usize) -> Result<PrivateMemory, MapError> {
        if len == 0 {
            return Err(MapError::Empty);
        }
        let space = len
            .checked_next_multiple_of(rustix::param::page_size())
            .and_then(|len| len.checked_add(HUGE_PAGE))
            .filter(|len| isize::try_from(*len).is_ok())
            .ok_or(MapError::Overflow)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { rustix::mm::mmap_anonymous(null_mut(), space, prot, flags) }
            .map_err(system("mmap"))?;
        // Only advice, here and below: an error changes nothing. A core dump is no place for a
        // guest's data. SAFETY: the range was just mapped; the advice does not change its content.
        let _ = unsafe { rustix::mm::madvise(start, space, Advice::LinuxDontDump) };
        // SAFETY: as above.
        let _ = unsafe { rustix::mm::madvise(start, space, Advice::LinuxHugepage) };
        let start: *mut u8 = start.cast();
        let gap = start.addr().next_multiple_of(HUGE_PAGE) - start.addr();
        let mut pages = Pages {
            ptr: start.wrapping_add(gap),
            len,
            mapped: (start, space),
            registration: None,
        };
        pages.registration = Some(Registration::new(start.addr(), space)?);
        Ok(PrivateMemory(Arc::new(pages)))
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Always false.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Whether the hardware lost a part of it ([`crate::sigbus`]). It is then all
    /// zeroes, and stays marked.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        let registration = self.0.registration.as_ref();
        registration.is_some_and(|registration| registration.slot().is_poisoned())
    }

    /// Copies the bytes from `offset` on into all of `to`; returns the number of bytes copied: its
    /// length, or none when it is not writable or the memory too short.
    #[inline]
    pub fn copy_out(&self, offset: u64, to: View<'_>) -> u64 {
        if !to.is_writable() {
            return 0;
        }
        let bytes = to.len_bytes();
        let Some(start) = self.at(offset, bytes) else {
            return 0;
        };
        to.beside(start, |ours, segment| {
            // SAFETY: `at` checked the range against the mapping, which `self` keeps; the view
            // keeps its segment, which may be written.
            unsafe { racy::within_guest(segment.as_ptr(), ours, segment.len()) }
        });
        bytes
    }

    /// Copies all of `from` to the bytes from `offset` on; returns the number of bytes copied: its
    /// length, or none when the memory is too short.
    #[inline]
    pub fn copy_in(&self, offset: u64, from: View<'_>) -> u64 {
        let bytes = from.len_bytes();
        let Some(start) = self.at(offset, bytes) else {
            return 0;
        };
        from.beside(start, |ours, segment| {
            // SAFETY: as in `copy_out`; all of the mapping is writable.
            unsafe { racy::within_guest(ours, segment.as_ptr(), segment.len()) }
        });
        bytes
    }

    /// Zeroes `len` bytes from `offset` on; returns their number, or none
    /// when the memory is too short.
    pub fn zero(&self, offset: u64, len: u64) -> u64 {
        let Some(start) = self.at(offset, len) else {
            return 0;
        };
        // SAFETY: `at` checked the range, which fits into the address space, against the
        // mapping, which `self` keeps.
        unsafe { racy::fill(start, 0, len as usize) };
        len
    }

    /// As [`PrivateMemory::zero`], giving whole pages back to the system.
    pub fn release(&self, offset: u64, len: u64) -> u64 {
        let Some(start) = self.at(offset, len) else {
            return 0;
        };
        let page = rustix::param::page_size();
        let (from, to) = (start.addr(), start.addr() + len as usize);
        let (first, last) = (from.next_multiple_of(page), to - to % page);
        if first >= last {
            return self.zero(offset, len);
        }
        let head = (first - from) as u64;
        let tail = (to - last) as u64;
        let whole = start.wrapping_add(first - from).cast();
        // SAFETY: whole pages inside the range that `at` checked, of a private mapping that nobody
        // has references into: they read as zeroes afterwards.
        let gone = unsafe { rustix::mm::madvise(whole, last - first, Advice::LinuxDontNeed) };
        match gone {
            Ok(()) => {
                self.zero(offset, head)
                    + (last - first) as u64
                    + self.zero(offset + len - tail, tail)
            }
            Err(_) => self.zero(offset, len),
        }
    }

    /// Asks the processor to fetch the first `LINES` cache lines of a range that is read soon, if
    /// it is as long as that. No effect but speed.
    #[inline]
    pub fn prefetch<const LINES: usize>(&self, offset: u64, len: u64) {
        if len >= (LINES * prefetch::LINE) as u64
            && let Some(start) = self.at(offset, len)
        {
            for line in 0..LINES {
                prefetch::line(start.wrapping_add(line * prefetch::LINE));
            }
        }
    }

    /// The address of `len` bytes at `offset`, if they are in range.
    #[inline]
    pub(crate) fn at(&self, offset: u64, len: u64) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        (end <= self.0.len as u64).then(|| self.0.ptr.wrapping_add(offset as usize))
    }
}
