//! Memory of this process and its successors, for the data of volumes in memory.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, SeekFrom, fallocate};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::memory::system;
use crate::sigbus::Registration;
use crate::{MapError, View, backing, prefetch, racy};

/// Assumed size of a huge page in bytes. With other sizes only speed differs.
const HUGE_PAGE: usize = 2 << 20;

/// Bytes that no other process can see, initially zero, in huge pages where the system supports
/// them (transparent huge pages, on request: `madvise`). The translation of a random address is
/// then mostly cached. Pages are allocated when first written. Cloning is cheap and shares the
/// bytes. Many threads may use them at once, and see each other's writes as those of a disk:
/// overlapping writes give any mixture.
///
/// With [`PrivateMemory::kept`] the bytes are in a memory file, which a process with its descriptor
/// can map again after this one has ended. With [`PrivateMemory::reserved`] they are in huge pages
/// of the host's pool, which are allocated at once.
#[derive(Clone, Debug)]
pub struct PrivateMemory(Arc<Pages>);

/// Reference to a [`PrivateMemory`] that does not keep it alive.
#[derive(Clone, Debug)]
pub struct WeakMemory(Weak<Pages>);

impl WeakMemory {
    /// Returns the memory, if it still exists.
    pub fn upgrade(&self) -> Option<PrivateMemory> {
        self.0.upgrade().map(PrivateMemory)
    }
}

#[derive(Debug)]
struct Pages {
    /// Address of the memory, aligned to [`HUGE_PAGE`].
    ptr: *mut u8,
    len: usize,
    /// Address and length of the whole mapping, including the gap for the alignment.
    mapped: (*mut u8, usize),
    /// Registration with the SIGBUS handler; `None` only inside `drop`.
    registration: Option<Registration>,
    /// Memory file with the content, if the memory outlives the process.
    file: Option<KeptFile>,
}

#[derive(Debug)]
struct KeptFile {
    fd: OwnedFd,
    /// `None`: the file consists of huge pages, which it keeps.
    small: Option<SmallPages>,
}

/// Small pages of a memory file, which may become huge pages.
#[derive(Debug)]
struct SmallPages {
    /// For each range of a huge page's size, whether it has become a huge page.
    huge: Vec<AtomicBool>,
    /// Whether the system has turned out to support no huge pages for this memory.
    no_huge: AtomicBool,
}

// SAFETY: the mapping belongs to no thread; it is accessed by raw copies only.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // The table entry is removed first: after munmap the addresses may belong to another
        // mapping.
        self.registration = None;
        let (ptr, len) = self.mapped;
        // SAFETY: mapped by `new`, and no pointer into it outlives a call.
        let _ = unsafe { rustix::mm::munmap(ptr.cast(), len) };
    }
}

impl PrivateMemory {
    /// Creates `len` zero bytes. No memory is allocated before it is written.
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
        // This and the following calls are only advice: an error changes nothing. Core dumps leave
        // out guest data. SAFETY: the range was just mapped; the advice does not change its
        // content.
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
            file: None,
        };
        pages.registration = Some(Registration::new(start.addr(), space)?);
        Ok(PrivateMemory(Arc::new(pages)))
    }

    /// Creates bytes in a memory file, which outlives the process if another one has a descriptor
    /// of it. The file is a new one of `len` zero bytes, or the [`PrivateMemory::file`] of an
    /// earlier process, with its content.
    ///
    /// The system mostly uses no huge pages for memory files when they are written:
    /// [`PrivateMemory::collapse`] creates them.
    ///
    /// # Errors
    /// The errors of [`PrivateMemory::new`]. [`MapError::WrongKind`] or [`MapError::OutOfBacking`]
    /// when the file is not a memory file of this length.
    pub fn kept(len: usize, file: Option<OwnedFd>) -> Result<PrivateMemory, MapError> {
        let whole = rounded(len, rustix::param::page_size())?;
        let fd = match file {
            Some(fd) => reopened(fd, whole as u64)?,
            None => created(whole as u64, MemfdFlags::empty())?,
        };
        let small = SmallPages {
            huge: (0..whole.div_ceil(HUGE_PAGE))
                .map(|_| AtomicBool::new(false))
                .collect(),
            no_huge: AtomicBool::new(false),
        };
        let small = Some(small);
        Self::mapped(len, whole, KeptFile { fd, small })
    }

    /// Creates bytes in a memory file as [`PrivateMemory::kept`] does, in huge pages of 2 MiB from
    /// the host's pool (`vm.nr_hugepages`). All are allocated and zeroed before this returns, which
    /// takes about a second for some GiB, and are returned when the file is closed, not before
    /// ([`PrivateMemory::release`] zeroes them). So no later access fails for want of a page.
    ///
    /// # Errors
    /// The errors of [`PrivateMemory::kept`]. [`MapError::System`] with ENOSPC or ENOMEM: the pool
    /// has too few free pages, or a control group allows fewer.
    pub fn reserved(len: usize, file: Option<OwnedFd>) -> Result<PrivateMemory, MapError> {
        let whole = rounded(len, HUGE_PAGE)?;
        let is_new = file.is_none();
        let fd = match file {
            Some(fd) => reopened(fd, whole as u64)?,
            None => created(whole as u64, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)?,
        };
        // The mapping reserves all pages, or fails without having taken one.
        let memory = Self::mapped(len, whole, KeptFile { fd, small: None })?;
        if let Some(file) = memory.0.file.as_ref().filter(|_| is_new) {
            let all = || fallocate(&file.fd, FallocateFlags::empty(), 0, whole as u64);
            rustix::io::retry_on_intr(all).map_err(system("fallocate"))?;
        }
        Ok(memory)
    }

    /// Maps the `whole` bytes of a memory file, of which `len` are used.
    fn mapped(len: usize, whole: usize, file: KeptFile) -> Result<PrivateMemory, MapError> {
        let space = whole.checked_add(HUGE_PAGE).ok_or(MapError::Overflow)?;
        // The file is mapped at a huge page's boundary within these addresses.
        let (none, flags) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { rustix::mm::mmap_anonymous(null_mut(), space, none, flags) }
            .map_err(system("mmap"))?;
        let gap = start.addr().next_multiple_of(HUGE_PAGE) - start.addr();
        let mut pages = Pages {
            ptr: start.cast::<u8>().wrapping_add(gap),
            len,
            mapped: (start.cast(), space),
            registration: None,
            file: None,
        };
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let mut flags = MapFlags::SHARED | MapFlags::FIXED;
        if file.small.is_some() {
            flags |= MapFlags::NORESERVE;
        }
        let at = pages.ptr.cast();
        // SAFETY: the call replaces a part of the mapping that was just created, and is unused.
        unsafe { rustix::mm::mmap(at, whole, prot, flags, &file.fd, 0) }.map_err(system("mmap"))?;
        // Only advice. SAFETY: the range was just mapped; the advice does not change its content.
        let _ = unsafe { rustix::mm::madvise(at, whole, Advice::LinuxDontDump) };
        // SAFETY: as above.
        let _ = unsafe { rustix::mm::madvise(at, whole, Advice::LinuxHugepage) };
        pages.file = Some(file);
        pages.registration = Some(Registration::new(start.addr(), space)?);
        Ok(PrivateMemory(Arc::new(pages)))
    }

    /// Returns the memory file with the content, if the memory is kept ([`PrivateMemory::kept`]).
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.0.file.as_ref().map(|file| file.fd.as_fd())
    }

    /// Returns a handle that does not keep the memory alive.
    pub fn downgrade(&self) -> WeakMemory {
        WeakMemory(Arc::downgrade(&self.0))
    }

    /// Converts written parts of kept memory to huge pages, as the system does by itself for
    /// private memory. Converts at most `most` pages, and returns their number. Each takes a
    /// fraction of a millisecond, during which accesses to it wait. Affects only speed.
    pub fn collapse(&self, most: usize) -> usize {
        let file = self.0.file.as_ref();
        let Some((fd, small)) = file.and_then(|file| Some((&file.fd, file.small.as_ref()?))) else {
            return 0;
        };
        let (mut made, mut at) = (0, 0);
        // Only whole pieces with written data are considered.
        while made < most
            && !small.no_huge.load(Ordering::Relaxed)
            && let Ok(data) = rustix::fs::seek(fd, SeekFrom::Data(at))
        {
            let hole = rustix::fs::seek(fd, SeekFrom::Hole(data));
            let hole = hole.unwrap_or(data + 1).max(data + 1);
            let piece = data / HUGE_PAGE as u64;
            let last = (hole - 1) / HUGE_PAGE as u64;
            for number in piece..=last {
                made += usize::from(made < most && self.collapse_one(small, number as usize));
            }
            at = (last + 1) * HUGE_PAGE as u64;
        }
        made
    }

    fn collapse_one(&self, small: &SmallPages, number: usize) -> bool {
        // MADV_COLLAPSE of Linux 6.1, `linux/mman.h`.
        const MADV_COLLAPSE: libc::c_int = 25;
        let Some(huge) = small.huge.get(number) else {
            return false;
        };
        let (start, end) = (number * HUGE_PAGE, (number + 1) * HUGE_PAGE);
        if end > self.0.len || huge.swap(true, Ordering::Relaxed) {
            return false;
        }
        let at = self.0.ptr.wrapping_add(start).cast();
        // SAFETY: whole pages within the mapping; their content does not change.
        let result = unsafe { libc::madvise(at, HUGE_PAGE, MADV_COLLAPSE) };
        if result != 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) {
            small.no_huge.store(true, Ordering::Relaxed);
        }
        result == 0
    }

    /// Returns the size of the memory in bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Returns false, because the memory is never empty.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Returns whether the hardware lost a part of the memory ([`crate::sigbus`]). All of it is
    /// then zero, and it stays marked.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        let registration = self.0.registration.as_ref();
        registration.is_some_and(|registration| registration.slot().is_poisoned())
    }

    /// Copies the bytes from `offset` on into all of `to`. Returns the number of bytes: the length
    /// of `to`, or 0 when it is not writable or the memory too short.
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

    /// Copies all of `from` to the bytes from `offset` on. Returns the number of bytes: the length
    /// of `from`, or 0 when the memory is too short.
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

    /// Zeroes `len` bytes from `offset` on. Returns their number, or 0 when the memory is too
    /// short.
    pub fn zero(&self, offset: u64, len: u64) -> u64 {
        let Some(start) = self.at(offset, len) else {
            return 0;
        };
        // SAFETY: `at` checked the range, which fits into the address space, against the
        // mapping, which `self` keeps.
        unsafe { racy::fill(start, 0, len as usize) };
        len
    }

    /// Zeroes like [`PrivateMemory::zero`], and returns whole pages to the system, unless the
    /// memory is [reserved](PrivateMemory::reserved).
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
        // A file's pages would stay in the file.
        let advice = match &self.0.file {
            None => Advice::LinuxDontNeed,
            Some(KeptFile { small: None, .. }) => return self.zero(offset, len),
            Some(KeptFile {
                small: Some(small), ..
            }) => {
                let base = self.0.ptr.addr();
                let (start, end) = (
                    (first - base) / HUGE_PAGE,
                    (last - base).div_ceil(HUGE_PAGE),
                );
                let released = small.huge.get(start..end).unwrap_or_default();
                released
                    .iter()
                    .for_each(|huge| huge.store(false, Ordering::Relaxed));
                Advice::LinuxRemove
            }
        };
        // SAFETY: whole pages inside the range that `at` checked, of a mapping without Rust
        // references into it: they read as zeroes afterwards.
        let gone = unsafe { rustix::mm::madvise(whole, last - first, advice) };
        match gone {
            Ok(()) => {
                self.zero(offset, head)
                    + (last - first) as u64
                    + self.zero(offset + len - tail, tail)
            }
            Err(_) => self.zero(offset, len),
        }
    }

    /// Prefetches the first `LINES` cache lines of a range that is read soon, if it is that long.
    /// Affects only speed.
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

    /// Returns the address of `len` bytes at `offset`, if they are in range.
    #[inline]
    pub(crate) fn at(&self, offset: u64, len: u64) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        (end <= self.0.len as u64).then(|| self.0.ptr.wrapping_add(offset as usize))
    }
}

/// Returns a length that is not zero as a multiple of the size of a page.
fn rounded(len: usize, page: usize) -> Result<usize, MapError> {
    if len == 0 {
        return Err(MapError::Empty);
    }
    let whole = len.checked_next_multiple_of(page);
    let whole = whole.filter(|whole| isize::try_from(*whole).is_ok());
    whole.ok_or(MapError::Overflow)
}

/// Creates a memory file of `len` zero bytes with a sealed length.
fn created(len: u64, pages: MemfdFlags) -> Result<OwnedFd, MapError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | pages;
    let fd = rustix::fs::memfd_create("vnvme-volume", flags).map_err(system("memfd_create"))?;
    rustix::fs::ftruncate(&fd, len).map_err(system("ftruncate"))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&fd, seals).map_err(system("fcntl"))?;
    Ok(fd)
}

/// Checks the length and seals of a memory file that an earlier process has created.
fn reopened(fd: OwnedFd, len: u64) -> Result<OwnedFd, MapError> {
    let (fd, backing) = backing::check(fd, len)?;
    if backing.size != len {
        let size = backing.size;
        return Err(MapError::OutOfBacking { end: len, size });
    }
    let seals = rustix::fs::fcntl_get_seals(&fd).map_err(system("fcntl"))?;
    if seals.contains(SealFlags::SHRINK) {
        Ok(fd)
    } else {
        Err(MapError::WrongKind)
    }
}
