//! System calls without a wrapper in the libraries used: open file description locks, reads and
//! writes of guest memory, and reflinks.
#![allow(unsafe_code)]

use dma::View;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Maximum number of segments in one call (`UIO_MAXIOV`).
const MAX_SEGMENTS: usize = 1024;

/// Reads all of `view` from the file (`preadv2`), or writes all of `view` to it (`pwritev2`), with
/// `flags` (`RWF_*`).
///
/// # Errors
/// The system's error, or [`io::ErrorKind::UnexpectedEof`] when the file ends before; a part may
/// have been moved then. [`io::ErrorKind::Interrupted`] is never returned.
pub(super) fn transfer(
    fd: BorrowedFd<'_>,
    write: bool,
    view: View<'_>,
    mut offset: u64,
    flags: i32,
) -> io::Result<()> {
    for segments in view.segments().chunks(MAX_SEGMENTS) {
        let wanted: usize = segments.iter().map(dma::Segment::len).sum();
        let moved = vectored(fd, write, segments, offset, flags)?;
        if moved < wanted {
            // Rare: a signal in the middle, or the end of the file or of its space. The rest is
            // moved segment by segment.
            rest(fd, write, segments, offset, moved, flags)?;
        }
        offset += wanted as u64;
    }
    Ok(())
}

/// Transfers the bytes of the segments that are left after the first `done` bytes were transferred.
fn rest(
    fd: BorrowedFd<'_>,
    write: bool,
    segments: &[dma::Segment],
    offset: u64,
    mut done: usize,
    flags: i32,
) -> io::Result<()> {
    let total: usize = segments.iter().map(dma::Segment::len).sum();
    while done < total {
        let mut skip = done;
        let mut left = segments.iter();
        let first = left.find(|segment| match skip.checked_sub(segment.len()) {
            Some(beyond) => {
                skip = beyond;
                false
            }
            None => true,
        });
        let Some(first) = first else { break };
        let at = offset + done as u64;
        let moved = one(fd, write, first, skip, at, flags)?;
        if moved == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        done += moved;
    }
    Ok(())
}

/// Transfers one segment of memory without its first `skip` bytes, which were transferred before.
fn one(
    fd: BorrowedFd<'_>,
    write: bool,
    segment: &dma::Segment,
    skip: usize,
    offset: u64,
    flags: i32,
) -> io::Result<usize> {
    let vector = libc::iovec {
        // `skip` is less than the segment's length.
        iov_base: segment.as_ptr().wrapping_add(skip).cast(),
        iov_len: segment.len() - skip,
    };
    // SAFETY: a part of the segment, which the caller's view keeps mapped (and writable, for a
    // read).
    unsafe { call(fd, write, &raw const vector, 1, offset, flags) }
}

fn vectored(
    fd: BorrowedFd<'_>,
    write: bool,
    segments: &[dma::Segment],
    offset: u64,
    flags: i32,
) -> io::Result<usize> {
    // SAFETY: a segment has the layout of an `iovec`; the caller's view keeps the memory mapped
    // (and writable, for a read). There are at most `MAX_SEGMENTS`.
    unsafe {
        call(
            fd,
            write,
            segments.as_ptr().cast(),
            segments.len() as i32,
            offset,
            flags,
        )
    }
}

/// # Safety
/// `vectors` must be `count` vectors of mapped memory, writable for a read.
unsafe fn call(
    fd: BorrowedFd<'_>,
    write: bool,
    vectors: *const libc::iovec,
    count: i32,
    offset: u64,
    flags: i32,
) -> io::Result<usize> {
    let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    let fd = fd.as_raw_fd();
    loop {
        let moved = if write {
            // SAFETY: the caller's promise; the kernel only reads the memory.
            unsafe { libc::pwritev2(fd, vectors, count, offset, flags) }
        } else {
            // SAFETY: the caller's promise; the memory that the kernel writes to has no Rust
            // reference.
            unsafe { libc::preadv2(fd, vectors, count, offset, flags) }
        };
        if let Ok(moved) = usize::try_from(moved) {
            return Ok(moved);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Makes a range of `to` share the blocks of a range of `from` (`FICLONERANGE`), without moving
/// data.
///
/// # Errors
/// The system's error; nothing has changed then. Most file systems refuse: both files have to be on
/// the same one, which must support reflinks, and the ranges must be multiples of its blocks.
pub(super) fn reflink(
    from: BorrowedFd<'_>,
    source: u64,
    to: BorrowedFd<'_>,
    offset: u64,
    len: u64,
) -> io::Result<()> {
    let range = libc::file_clone_range {
        src_fd: from.as_raw_fd().into(),
        src_offset: source,
        // 0 would stand for everything from there on.
        src_length: len.max(1),
        dest_offset: offset,
    };
    // SAFETY: both descriptors are open, and `range` is the structure that FICLONERANGE reads; it
    // outlives the call.
    match unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONERANGE, &raw const range) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Length of the first bytes of a file that no part's lock covers. Every process that uses a part
/// holds a shared lock on them.
const PRESENCE: u64 = 512;
/// Byte that QEMU locks shared while it reads a disk image (`block/file-posix.c`).
const QEMU_READS: u64 = 100;
/// Byte that QEMU locks shared while it writes to a disk image.
const QEMU_WRITES: u64 = 101;
/// Byte that QEMU locks shared to keep other processes from reading the image. Before QEMU reads an
/// image, QEMU tests that nobody has a lock here.
const QEMU_NO_OTHER_READER: u64 = 200;
/// Byte that QEMU locks shared to keep other processes from writing the image.
const QEMU_NO_OTHER_WRITER: u64 = 201;

/// Byte that QEMU locks shared to keep other processes from resizing the image.
const QEMU_NO_OTHER_LENGTH: u64 = 203;
/// Offset beyond the end of any file, used for a lock that affects no data.
const NOWHERE: u64 = 1 << 62;

/// Returns the bytes that the `opening`th opening of a file by one writer locks in addition: one
/// that conflicts with other vnvme processes, and one that conflicts with QEMU.
pub(super) fn shared_bytes(opening: u64) -> Vec<u64> {
    let of_qemu = match opening {
        0 => Some(QEMU_NO_OTHER_WRITER),
        1 => Some(QEMU_NO_OTHER_LENGTH),
        _ => None,
    };
    of_qemu.into_iter().chain([NOWHERE + opening]).collect()
}

/// Locks a range of a file for this open file description (`F_OFD_SETLK`), shared or exclusively,
/// without waiting. Returns `false` when a conflicting lock is held.
///
/// Unlike POSIX locks, these locks are kept until the last descriptor of the description is closed,
/// and two openings in one process exclude each other. A lock on the whole file also conflicts with
/// programs that lock single bytes of disk images, such as QEMU.
pub(super) fn lock(
    fd: BorrowedFd<'_>,
    exclusive: bool,
    offset: u64,
    len: Option<u64>,
) -> io::Result<bool> {
    let kind = if exclusive {
        libc::F_WRLCK
    } else {
        libc::F_RDLCK
    };
    match set(fd, range(kind, offset, len)?) {
        Ok(()) => Ok(true),
        Err(error) => excluded(error),
    }
}

/// Releases this open file description's lock of a range.
pub(super) fn unlock(fd: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<()> {
    set(fd, range(libc::F_UNLCK, offset, Some(len))?)
}

/// Releases all locks that this open file description has on the file.
pub(super) fn unlock_all(fd: BorrowedFd<'_>) -> io::Result<()> {
    set(fd, range(libc::F_UNLCK, 0, None)?)
}

fn set(fd: BorrowedFd<'_>, range: libc::flock) -> io::Result<()> {
    // SAFETY: the descriptor is open, and `range` is a `flock` that outlives the call.
    match unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Locks all of a file, except for the bytes by which QEMU excludes readers.
///
/// Beside a writer, QEMU and its tools are refused, because they want to exclude writers. Only with
/// `-U` (`--force-share`) do they do without that: the user then accepts that the data may change
/// meanwhile. Beside a reader, other readers work in any case, and writers are refused.
pub(super) fn lock_whole(fd: BorrowedFd<'_>, exclusive: bool) -> io::Result<bool> {
    let start = (0, Some(QEMU_READS));
    let end = (QEMU_NO_OTHER_READER + 1, None);
    let between = (QEMU_READS + 1, Some(QEMU_NO_OTHER_READER - QEMU_READS - 1));
    if exclusive {
        lock_all(fd, true, &[start, between, end])
    } else {
        // Readers test the bytes between, too, which announce writers.
        Ok(!qemu_writes(fd)? && lock_all(fd, false, &[start, end])?)
    }
}

/// Locks all of these ranges, or none.
fn lock_all(
    fd: BorrowedFd<'_>,
    exclusive: bool,
    ranges: &[(u64, Option<u64>)],
) -> io::Result<bool> {
    for (number, &(offset, len)) in ranges.iter().enumerate() {
        match lock(fd, exclusive, offset, len) {
            Ok(true) => {}
            failed => {
                for &(offset, len) in ranges.iter().take(number) {
                    set(fd, range(libc::F_UNLCK, offset, len)?)?;
                }
                return failed;
            }
        }
    }
    Ok(true)
}

/// Locks a part of a file exclusively: other openings may lock other parts but not the whole file,
/// and QEMU cannot write to it.
///
/// The first bytes are left out: every user of a part has a shared lock there.
pub(super) fn lock_part(
    fd: BorrowedFd<'_>,
    exclusive: bool,
    offset: u64,
    len: Option<u64>,
) -> io::Result<bool> {
    let end = len.and_then(|len| offset.checked_add(len));
    let start = offset.max(PRESENCE);
    if qemu_writes(fd)? || !lock(fd, false, QEMU_NO_OTHER_WRITER, Some(1))? {
        return Ok(false);
    }
    match end.map(|end| end.saturating_sub(start)) {
        Some(0) => Ok(true),
        len => lock(fd, exclusive, start, len),
    }
}

/// Returns whether QEMU has the file open for writing. Locks of older versions on the whole file
/// cover QEMU's byte, too, and begin at 0.
fn qemu_writes(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(foreign_lock(fd, QEMU_WRITES)?.is_some_and(|start| start > 0))
}

/// Returns the start of another open file description's lock on a byte; `None` without one.
fn foreign_lock(fd: BorrowedFd<'_>, byte: u64) -> io::Result<Option<libc::off_t>> {
    let mut range = range(libc::F_WRLCK, byte, Some(1))?;
    // SAFETY: the descriptor is open, and `range` is a `flock` that outlives the call.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let found = range.l_type != libc::F_UNLCK as libc::c_short;
    Ok(found.then_some(range.l_start))
}

fn range(kind: i32, offset: u64, len: Option<u64>) -> io::Result<libc::flock> {
    // SAFETY: all-zero is a valid `flock`: plain integers. `l_pid` has to be 0.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    let number = |n: u64| {
        n.try_into()
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
    };
    range.l_type = kind as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    range.l_start = number(offset)?;
    // 0 stands for everything from there on.
    range.l_len = number(len.unwrap_or(0))?;
    Ok(range)
}

fn excluded(error: io::Error) -> io::Result<bool> {
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::{foreign_lock, lock};
    use crate::{Direct, FileOptions, FileVolume, PreviousProcess};
    use std::os::fd::AsFd;
    use std::time::Duration;

    /// Checks that each opening holds a part of the file's lock, so that the next process waits for
    /// the requests of every opening.
    #[test]
    fn every_opening_holds_own_part_of_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let options = FileOptions {
            image: true,
            previous: PreviousProcess {
                limit: Duration::from_millis(30),
                ..PreviousProcess::default()
            },
            ..FileOptions::default()
        };
        for last in 0..3 {
            let first = FileVolume::open(file.path(), options).unwrap();
            let [second, third] = [(); 2].map(|()| Some(first.reopen(Direct::Off).unwrap()));
            let mut all = [Some(first), second, third];
            for (number, opening) in all.iter_mut().enumerate() {
                if number != last {
                    drop(opening.take());
                }
            }
            FileVolume::open(file.path(), options).expect_err("it is in use");
            // QEMU's test before it writes: no other process may hold one of these locks.
            let asks = std::fs::File::open(file.path()).unwrap();
            let shared = |byte| lock(asks.as_fd(), false, byte, Some(1)).unwrap();
            assert!(![101, 201, 203].into_iter().all(shared), "{last}");
            drop((all, asks));
            drop(FileVolume::open(file.path(), options).unwrap());
        }
    }

    /// Locks and tests of QEMU and its tools before they use an image.
    #[derive(Clone, Copy)]
    struct Qemu {
        /// Offset of a byte for each permission that they need: reading (0), writing (1).
        needs: &'static [u64],
        /// Offset of a byte for each permission that no other process may have.
        excludes: &'static [u64],
    }

    const SHARING_READER: Qemu = Qemu {
        needs: &[0],
        excludes: &[],
    };
    const READER: Qemu = Qemu {
        needs: &[0],
        excludes: &[1, 3],
    };
    const WRITER: Qemu = Qemu {
        needs: &[0, 1, 3],
        excludes: &[1, 3],
    };

    impl Qemu {
        /// Takes the locks (`raw_apply_lock_bytes`), and tests for others (`raw_check_lock_bytes`).
        fn may_use(self, file: &std::fs::File) -> bool {
            let wanted = |byte| lock(file.as_fd(), false, byte, Some(1)).unwrap();
            let free = |byte| foreign_lock(file.as_fd(), byte).unwrap().is_none();
            self.needs.iter().all(|bit| wanted(100 + bit))
                && self.excludes.iter().all(|bit| wanted(200 + bit))
                && self.needs.iter().all(|bit| free(200 + bit))
                && self.excludes.iter().all(|bit| free(100 + bit))
        }
    }

    #[test]
    fn sharing_readers_of_qemu_work_beside_writer() {
        let options = |read_only, image| FileOptions {
            read_only,
            image,
            previous: PreviousProcess {
                limit: Duration::from_millis(30),
                ..PreviousProcess::default()
            },
            ..FileOptions::default()
        };
        for (read_only, image) in [(false, false), (false, true), (true, false)] {
            let tools = [(SHARING_READER, true), (READER, read_only), (WRITER, false)];
            // The second of the two finds the locks of the first.
            for ((qemu, works), tool_is_first) in tools
                .into_iter()
                .flat_map(|tool| [(tool, false), (tool, true)])
            {
                let file = tempfile::NamedTempFile::new().unwrap();
                file.as_file().set_len(1 << 20).unwrap();
                let open = || FileVolume::open(file.path(), options(read_only, image));
                let case = format!("{read_only} {image} {:?} {tool_is_first}", qemu.needs);
                if tool_is_first {
                    assert!(qemu.may_use(file.as_file()), "{case}");
                    assert_eq!(open().is_ok(), works, "{case}");
                } else {
                    let _volume = open().unwrap();
                    assert_eq!(qemu.may_use(file.as_file()), works, "{case}");
                }
            }
        }
    }
}
