//! Memory of this process alone, or of those that come after it: what a volume in memory keeps its
//! data in.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use rustix::fs::{MemfdFlags, SealFlags, SeekFrom};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::memory::system;
use crate::sigbus::Registration;
use crate::{MapError, View, backing, prefetch, racy};

/// Where the processor and the system have huge pages of other sizes, this
/// is only a matter of speed.
const HUGE_PAGE: usize = 2 << 20;

/// Bytes that no other process can see, zero at first, in huge pages where the system gives them
/// (transparent huge pages, on request: `madvise`): a random access then mostly finds its address
/// translation at hand. Taken from the system when first written, a whole page at a time. Cloning
/// is cheap and shares the bytes; they are for many threads at once, which see each other's writes
/// as those of a disk: of overlapping ones any mixture.
///
/// With [`PrivateMemory::kept`] they are in a memory file, which a process that has its
/// descriptor can map again after this one has ended.
#[derive(Clone, Debug)]
pub struct PrivateMemory(Arc<Pages>);

/// Does not keep the memory.
#[derive(Clone, Debug)]
pub struct WeakMemory(Weak<Pages>);

impl WeakMemory {
    /// The memory, if somebody has it still.
    pub fn upgrade(&self) -> Option<PrivateMemory> {
        self.0.upgrade().map(PrivateMemory)
    }
}

#[derive(Debug)]
struct Pages {
    /// Aligned to [`HUGE_PAGE`].
    ptr: *mut u8,
    len: usize,
    /// The whole mapping, with what alignment took.
    mapped: (*mut u8, usize),
    /// None only inside `drop`.
    registration: Option<Registration>,
    /// Where the bytes are, if not in this process alone.
    file: Option<KeptFile>,
}

#[derive(Debug)]
struct KeptFile {
    fd: OwnedFd,
    /// Of each piece of a huge page's size: whether it has become one.
    huge: Vec<AtomicBool>,
    /// The system makes none.
    no_huge: AtomicBool,
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
            file: None,
        };
        pages.registration = Some(Registration::new(start.addr(), space)?);
        Ok(PrivateMemory(Arc::new(pages)))
    }

    /// The same in a memory file, which outlives the process if another one has a descriptor of
    /// it: in a new one of `len` zero bytes, or in the one that [`PrivateMemory::file`] was of an
    /// earlier process, with what that has left there.
    ///
    /// The system mostly gives memory files no huge pages when they are written:
    /// [`PrivateMemory::collapse`] makes them.
    ///
    /// # Errors
    /// As [`PrivateMemory::new`]; [`MapError::WrongKind`], [`MapError::OutOfBacking`]: the file is
    /// no such file of this length.
    pub fn kept(len: usize, file: Option<OwnedFd>) -> Result<PrivateMemory, MapError> {
        if len == 0 {
            return Err(MapError::Empty);
        }
        let whole = len
            .checked_next_multiple_of(rustix::param::page_size())
            .filter(|whole| isize::try_from(*whole).is_ok())
            .ok_or(MapError::Overflow)?;
        let space = whole.checked_add(HUGE_PAGE).ok_or(MapError::Overflow)?;
        let fd = match file {
            Some(fd) => reopened(fd, whole as u64)?,
            None => created(whole as u64)?,
        };
        // Addresses, of which the file gets those from a huge page's boundary on.
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
        let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
        let at = pages.ptr.cast();
        // SAFETY: it replaces a part of the mapping that was just made, which nobody uses.
        unsafe { rustix::mm::mmap(at, whole, prot, flags, &fd, 0) }.map_err(system("mmap"))?;
        // Only advice. SAFETY: the range was just mapped; the advice does not change its content.
        let _ = unsafe { rustix::mm::madvise(at, whole, Advice::LinuxDontDump) };
        // SAFETY: as above.
        let _ = unsafe { rustix::mm::madvise(at, whole, Advice::LinuxHugepage) };
        pages.file = Some(KeptFile {
            fd,
            huge: (0..whole.div_ceil(HUGE_PAGE))
                .map(|_| AtomicBool::new(false))
                .collect(),
            no_huge: AtomicBool::new(false),
        });
        pages.registration = Some(Registration::new(start.addr(), space)?);
        Ok(PrivateMemory(Arc::new(pages)))
    }

    /// The file that the bytes are in, if they are kept ([`PrivateMemory::kept`]).
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.0.file.as_ref().map(|file| file.fd.as_fd())
    }

    /// A handle that does not keep the memory.
    pub fn downgrade(&self) -> WeakMemory {
        WeakMemory(Arc::downgrade(&self.0))
    }

    /// Makes huge pages of what was written to memory that is kept, as the system does by itself
    /// for memory of one process: at most `most` of them; returns how many. Takes a fraction of a
    /// millisecond for each, for which a thread that wants that piece waits. No effect but speed.
    pub fn collapse(&self, most: usize) -> usize {
        let Some(file) = self.0.file.as_ref() else {
            return 0;
        };
        let (mut made, mut at) = (0, 0);
        // Where something was written, and only whole pieces.
        while made < most
            && !file.no_huge.load(Ordering::Relaxed)
            && let Ok(data) = rustix::fs::seek(&file.fd, SeekFrom::Data(at))
        {
            let hole = rustix::fs::seek(&file.fd, SeekFrom::Hole(data));
            let hole = hole.unwrap_or(data + 1).max(data + 1);
            let piece = data / HUGE_PAGE as u64;
            let last = (hole - 1) / HUGE_PAGE as u64;
            for number in piece..=last {
                made += usize::from(made < most && self.collapse_one(file, number as usize));
            }
            at = (last + 1) * HUGE_PAGE as u64;
        }
        made
    }

    fn collapse_one(&self, file: &KeptFile, number: usize) -> bool {
        // Of Linux 6.1, `linux/mman.h`.
        const MADV_COLLAPSE: libc::c_int = 25;
        let Some(huge) = file.huge.get(number) else {
            return false;
        };
        let (start, end) = (number * HUGE_PAGE, (number + 1) * HUGE_PAGE);
        if end > self.0.len || huge.swap(true, Ordering::Relaxed) {
            return false;
        }
        let at = self.0.ptr.wrapping_add(start).cast();
        // SAFETY: whole pages within the mapping; what they hold does not change.
        let result = unsafe { libc::madvise(at, HUGE_PAGE, MADV_COLLAPSE) };
        if result != 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) {
            file.no_huge.store(true, Ordering::Relaxed);
        }
        result == 0
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
        // A file's pages would stay in the file.
        let advice = match &self.0.file {
            None => Advice::LinuxDontNeed,
            Some(file) => {
                let base = self.0.ptr.addr();
                let (start, end) = (
                    (first - base) / HUGE_PAGE,
                    (last - base).div_ceil(HUGE_PAGE),
                );
                let released = file.huge.get(start..end).unwrap_or_default();
                released
                    .iter()
                    .for_each(|huge| huge.store(false, Ordering::Relaxed));
                Advice::LinuxRemove
            }
        };
        // SAFETY: whole pages inside the range that `at` checked, of a mapping that nobody has
        // references into: they read as zeroes afterwards.
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

/// A new memory file of so many bytes, which stays of that length.
fn created(len: u64) -> Result<OwnedFd, MapError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("vnvme-volume", flags).map_err(system("memfd_create"))?;
    rustix::fs::ftruncate(&fd, len).map_err(system("ftruncate"))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&fd, seals).map_err(system("fcntl"))?;
    Ok(fd)
}

/// One that an earlier process has made.
fn reopened(fd: OwnedFd, len: u64) -> Result<OwnedFd, MapError> {
    let (fd, backing) = backing::check(fd, len)?;
    if backing.size != len {
        let size = backing.size;
        return Err(MapError::OutOfBacking { end: len, size });
    }
    let seals = rustix::fs::fcntl_get_seals(&fd).map_err(system("fcntl"))?;
    match seals.contains(SealFlags::SHRINK) {
        true => Ok(fd),
        false => Err(MapError::WrongKind),
    }
}
