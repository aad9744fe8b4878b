//! Mapped memory files.

use std::mem::ManuallyDrop;
use std::num::NonZeroU32;
use std::os::fd::AsRawFd;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::net::RecvFlags;

use crate::backing::{self, Backing};
use crate::pace::Standstill;
use crate::quota::{Account, Charge};
use crate::sigbus::{MappingSlot, Registration};
use crate::{MapError, MemoryError, Segment, SegmentList, racy};

/// A memory file that is mapped once, as a whole. Cloning is cheap and shares the mapping: every
/// window on the file and every long-lived ring in it holds a clone. A background thread unmaps it
/// after the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Memory(pub(crate) Arc<Mapping>);

#[derive(Debug)]
pub(crate) struct Mapping {
    ptr: *mut u8,
    /// Size of the file in bytes when it was mapped.
    len: usize,
    writable: bool,
    slot: &'static MappingSlot,
    /// Number under which the keeper holds the file ([`Memory::kept`]); 0 if it does not.
    kept: AtomicU32,
    pages: ManuallyDrop<Pages>,
}

// SAFETY: the mapping belongs to no thread; it is accessed by module `racy` only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Unmapping gigabytes takes time, and so does closing the last descriptor of a file.
        // SAFETY: taken here only, and not used afterwards.
        sync::discard(unsafe { ManuallyDrop::take(&mut self.pages) });
    }
}

/// Resources of a mapping, dropped in the order of these fields.
struct Pages {
    ptr: *mut u8,
    /// Size of the file in bytes, rounded up to whole pages.
    len: usize,
    /// Registration with the SIGBUS handler; `None` only inside `drop`.
    registration: Option<Registration>,
    /// Flag of [`Memory::empty_at_end`].
    empties: AtomicBool,
    fd: OwnedFd,
    /// Charge of the mapping to the client's limits, released when it is dropped.
    charge: Charge,
}

// SAFETY: a mapping belongs to no thread.
unsafe impl Send for Pages {}
// SAFETY: shared access exposes its descriptor only.
unsafe impl Sync for Pages {}

/// Number of bytes unmapped at once: other mmap calls of the process wait for about a millisecond.
const UNMAP: usize = 64 << 20;

impl Drop for Pages {
    fn drop(&mut self) {
        // The table entry is removed first: after munmap the addresses may belong to another
        // mapping.
        self.registration = None;
        let standstill = Standstill::begin();
        let mut done = 0;
        while done < self.len {
            let left = self.len - done;
            let step = left.min(UNMAP);
            let start = self.ptr.wrapping_add(done).cast();
            // SAFETY: the range was mapped by `map_file`, and every holder of a pointer into it
            // held a clone of the dropped `Memory`.
            let unmapped = unsafe { rustix::mm::munmap(start, step) };
            done += step;
            if unmapped.is_err() {
                // The step may be smaller than a huge page.
                // SAFETY: as above.
                let _ = unsafe { rustix::mm::munmap(start, left) };
                break;
            }
        }
        if let Some(account) = self.charge.account() {
            standstill.charge(account.pace());
        }
        if self.empties.load(Ordering::Relaxed) {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(&self.fd, flags, 0, self.len as u64);
        }
    }
}

impl std::fmt::Debug for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pages")
            .field("len", &self.len)
            .field("fd", &self.fd)
            .finish_non_exhaustive()
    }
}

/// Returns a function that converts the error of a system call named `call`.
pub(crate) fn system(call: &'static str) -> impl Fn(rustix::io::Errno) -> MapError {
    move |errno| MapError::System { call, errno }
}

impl Memory {
    /// Maps a memory file: a memfd, or a file on tmpfs or hugetlbfs. `len_needed` is the required
    /// length (offset plus size of the intended window). The whole file is mapped at its present
    /// size. Clients' files are mapped by [`MemoryCache`](crate::MemoryCache), which bounds their
    /// total.
    ///
    /// # Errors
    /// [`MapError::WrongKind`] when the file is not in memory, [`MapError::OutOfBacking`] when it
    /// is shorter than `len_needed`, [`MapError::Empty`] when it has no bytes,
    /// [`MapError::TableFull`] or [`MapError::AddressSpaceFull`] at the process's limits,
    /// [`MapError::System`] when a system call fails (`EACCES`: not opened for this access).
    pub fn from_fd(fd: OwnedFd, len_needed: u64, writable: bool) -> Result<Memory, MapError> {
        let (fd, backing) = backing::check(fd, len_needed)?;
        Memory::map_file(fd, backing, writable, None)
    }

    /// Creates a memfd of `len` zero bytes, for tests and for hosts in the same process.
    ///
    /// # Errors
    /// [`MapError::Empty`] for a length of 0, [`MapError::TableFull`] or
    /// [`MapError::AddressSpaceFull`] at the process's limits, [`MapError::System`] when a system
    /// call fails.
    pub fn anonymous(len: usize) -> Result<Memory, MapError> {
        if len == 0 {
            return Err(MapError::Empty);
        }
        let fd = rustix::fs::memfd_create(
            "vnvme-memory",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )
        .map_err(system("memfd_create"))?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(system("ftruncate"))?;
        Memory::of_our_own(fd)
    }

    /// Maps a memfd that this process has created.
    pub(crate) fn of_our_own(fd: OwnedFd) -> Result<Memory, MapError> {
        let (fd, backing) = backing::check(fd, 0)?;
        Memory::map_file(fd, backing, true, None)
    }

    /// Maps a file that has passed the checks for memory files.
    pub(crate) fn map_file(
        fd: OwnedFd,
        backing: Backing,
        writable: bool,
        account: Option<&Arc<Account>>,
    ) -> Result<Memory, MapError> {
        match Memory::map_pages(&fd, backing.size, writable, account) {
            Ok((ptr, mapped, registration, charge)) => Ok(Memory(Arc::new(Mapping {
                ptr,
                // The size fits, because the file was mapped.
                len: backing.size as usize,
                writable,
                slot: registration.slot(),
                kept: AtomicU32::new(0),
                pages: ManuallyDrop::new(Pages {
                    ptr,
                    len: mapped,
                    registration: Some(registration),
                    empties: AtomicBool::new(false),
                    fd,
                    charge,
                }),
            }))),
            Err(error) => {
                sync::discard(fd);
                Err(error)
            }
        }
    }

    /// Maps the pages of a checked file, and registers them with the SIGBUS handler.
    fn map_pages(
        fd: &OwnedFd,
        size: u64,
        writable: bool,
        account: Option<&Arc<Account>>,
    ) -> Result<(*mut u8, usize, Registration, Charge), MapError> {
        let len = usize::try_from(size)
            .ok()
            .and_then(|len| len.checked_next_multiple_of(rustix::param::page_size()))
            .ok_or(MapError::Overflow)?;
        let charge = Charge::take(account, len as u64)?;
        let prot = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // Without NORESERVE, mapping a hugetlbfs file would reserve huge pages that its owner may
        // never use.
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let ptr = unsafe { rustix::mm::mmap(null_mut(), len, prot, flags, fd, 0) }
            .map_err(system("mmap"))?;
        // Guest memory is left out of core dumps. This is only advice: an error changes nothing.
        // SAFETY: the range was just mapped; the advice does not change its content.
        let _ = unsafe { rustix::mm::madvise(ptr, len, Advice::LinuxDontDump) };
        match Registration::new(ptr as usize, len) {
            Ok(registration) => Ok((ptr.cast(), len, registration, charge)),
            Err(error) => {
                // SAFETY: just mapped, and not published.
                let _ = unsafe { rustix::mm::munmap(ptr, len) };
                Err(error)
            }
        }
    }

    /// Allocates the pages of a range, as writes to all of them would, without changing their
    /// content.
    ///
    /// # Errors
    /// * [`MemoryError::OutOfRange`] when the range exceeds the memory.
    /// * [`MemoryError::ReadOnly`] when the memory is mapped read-only.
    /// * [`MemoryError::NotPopulated`] when the kernel cannot (before Linux 5.14), no memory is
    ///   left, or the file has shrunk.
    pub fn populate(&self, offset: usize, len: usize) -> Result<(), MemoryError> {
        if !self.0.writable {
            return Err(MemoryError::ReadOnly);
        }
        let ptr = self.at(offset, len).ok_or(MemoryError::OutOfRange)?;
        // madvise(2) requires whole pages. A mapping begins at a page, so its last page is whole,
        // too.
        let before = offset % rustix::param::page_size();
        let (start, len) = (ptr.wrapping_sub(before), len + before);
        // SAFETY: `at` checked the range against the mapping, which `self` keeps; the advice does
        // not change its content, and reports a missing page as an error instead of a signal.
        unsafe { rustix::mm::madvise(start.cast(), len, Advice::LinuxPopulateWrite) }
            .map_err(|_| MemoryError::NotPopulated)
    }

    /// Returns the memory's file, to be passed on or queried.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.pages.fd.as_fd()
    }

    /// Frees the file's pages when the last handle is dropped: processes that still map it keep no
    /// data that this process has written.
    pub fn empty_at_end(&self) {
        self.0.pages.empties.store(true, Ordering::Relaxed);
    }

    /// Records the number under which another process keeps the file, for the next process.
    pub fn set_kept(&self, number: NonZeroU32) {
        self.0.kept.store(number.get(), Ordering::Relaxed);
    }

    /// Returns the number under which another process keeps the file, if one does.
    pub fn kept(&self) -> Option<NonZeroU32> {
        NonZeroU32::new(self.0.kept.load(Ordering::Relaxed))
    }

    /// Returns the size of the file in bytes when it was mapped.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Returns false, because an empty file cannot be mapped.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Returns whether the memory is mapped for writing, too.
    pub fn is_writable(&self) -> bool {
        self.0.writable
    }

    /// Returns whether the file has shrunk and an access missed its page (see [`crate::sigbus`]).
    /// The memory is then private zeroes without connection to the guest, permanently.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.0.slot.is_poisoned()
    }

    /// Returns whether two handles share one mapping.
    pub fn is_same(&self, other: &Memory) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Copies from the memory at `offset`.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] when the range exceeds the memory. [`MemoryError::Poisoned`]
    /// when the file has shrunk; the content of `buf` is then meaningless.
    pub fn read(&self, offset: usize, buf: &mut [u8]) -> Result<(), MemoryError> {
        let ptr = self.at(offset, buf.len()).ok_or(MemoryError::OutOfRange)?;
        // SAFETY: `at` checked the range against the mapping, which `self` keeps.
        unsafe { racy::from_guest(ptr, buf) };
        self.intact()
    }

    /// Copies into the memory at `offset`.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] when the range exceeds the memory, [`MemoryError::ReadOnly`]
    /// when it is mapped read-only, [`MemoryError::Poisoned`] when the file has shrunk.
    pub fn write(&self, offset: usize, buf: &[u8]) -> Result<(), MemoryError> {
        if !self.0.writable {
            return Err(MemoryError::ReadOnly);
        }
        let ptr = self.at(offset, buf.len()).ok_or(MemoryError::OutOfRange)?;
        // SAFETY: `at` checked the range against the mapping, which `self`
        // keeps and which is writable.
        unsafe { racy::to_guest(ptr, buf) };
        self.intact()
    }

    /// Receives bytes from a socket directly into the memory (recv(2)), and returns their number.
    /// Even if this process dies meanwhile, each byte is either in the memory or still in the
    /// socket.
    ///
    /// # Errors
    /// `EFAULT` when the range exceeds the memory, or is not writable; otherwise the error of
    /// recv(2).
    pub fn receive(
        &self,
        socket: BorrowedFd<'_>,
        offset: usize,
        len: usize,
        flags: RecvFlags,
    ) -> Result<usize, Errno> {
        let ptr = self.at(offset, len).filter(|_| self.0.writable);
        let ptr = ptr.ok_or(Errno::FAULT)?;
        // The flags have the width of C's type.
        let flags = flags.bits() as libc::c_int;
        // SAFETY: `at` checked the range against the mapping, which `self` keeps and which is
        // writable; the kernel checks the descriptor.
        let got = unsafe { libc::recv(socket.as_raw_fd(), ptr.cast(), len, flags) };
        usize::try_from(got).map_err(|_| {
            let error = std::io::Error::last_os_error();
            Errno::from_io_error(&error).unwrap_or(Errno::IO)
        })
    }

    /// Returns the 32-bit cell at `offset`, if it is aligned, in range and writable.
    pub fn atomic_u32(&self, offset: usize) -> Option<&AtomicU32> {
        let ptr = self
            .at(offset, 4)
            .filter(|_| self.0.writable && offset.is_multiple_of(4))?;
        // SAFETY: in range, aligned (a mapping starts at a page), writable, and kept by `self` for
        // the reference's life.
        Some(unsafe { racy::cell32(ptr) })
    }

    /// Returns the 64-bit cell at `offset`, if it is aligned, in range and writable.
    pub fn atomic_u64(&self, offset: usize) -> Option<&AtomicU64> {
        let ptr = self
            .at(offset, 8)
            .filter(|_| self.0.writable && offset.is_multiple_of(8))?;
        // SAFETY: as in `atomic_u32`.
        Some(unsafe { racy::cell64(ptr) })
    }

    /// Returns a range of the memory as a bare [`Segment`], which does not keep the memory mapped.
    pub fn segment(&self, offset: usize, len: usize) -> Option<Segment> {
        self.at(offset, len).map(|ptr| Segment::new(ptr, len))
    }

    /// Returns a range of the memory as a list of one segment, which keeps the memory mapped. For
    /// users in the same process that access a volume or a driver without any IOVA.
    pub fn segments(&self, offset: usize, len: usize) -> Option<SegmentList> {
        SegmentList::of_memory(self, offset, len)
    }

    /// Returns the address of `len` bytes at `offset`, if they are in range.
    #[inline]
    pub(crate) fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        (end <= self.0.len).then(|| self.0.ptr.wrapping_add(offset))
    }

    /// Returns the address of the memory's first byte in this process.
    pub(crate) fn start(&self) -> *mut u8 {
        self.0.ptr
    }

    #[inline]
    pub(crate) fn slot(&self) -> &'static MappingSlot {
        self.0.slot
    }

    fn intact(&self) -> Result<(), MemoryError> {
        if self.is_poisoned() {
            Err(MemoryError::Poisoned)
        } else {
            Ok(())
        }
    }
}
