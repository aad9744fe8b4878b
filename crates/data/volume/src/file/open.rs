//! Opening a file or block device: every way in which that fails gets its own words.

use super::device::Device;
use super::exclusive::{self, ClaimRefused};
use super::fence::Fence;
use super::format::{self, HeadKind};
use super::sys;
use super::{Direct, FileOptions, Format};
use crate::io::ring::Alignment;
use crate::{Allocation, AtomicWrites, VolumeError};
use dma::Buffer;
use rustix::fs::{self, AtFlags, FallocateFlags, FileType, Mode, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

/// Block sizes in bytes that a volume can have.
const BLOCK_SIZES: std::ops::RangeInclusive<u32> = 512..=65536;
/// Length in bytes of a direct read that is a multiple of every common block size.
const LARGEST_BLOCK: usize = 4096;
/// Block size in bytes of a file for which none was chosen.
const DEFAULT_BLOCK: u32 = 512;

/// File or block device that was opened, with its properties.
pub(super) struct OpenedFile {
    pub(super) fd: OwnedFd,
    pub(super) size: u64,
    /// Alignment that direct I/O requires; `None` for buffered I/O.
    pub(super) direct: Option<Alignment>,
    /// Reason why I/O is buffered although direct I/O was preferred.
    pub(super) buffered_because: Option<String>,
    pub(super) block_size: u32,
    pub(super) optimal_io: u32,
    pub(super) punch: bool,
    pub(super) punch_granularity: u32,
    /// Writes that the kernel promises to be atomic.
    pub(super) atomic: AtomicWrites,
    pub(super) device: bool,
    /// Whether the file is on a filesystem in memory (tmpfs).
    pub(super) in_memory: bool,
    /// On a filesystem that is not known to keep its files on disks of this machine.
    pub(super) may_hang: bool,
    pub(super) id: Vec<u8>,
    /// Identifier of a block device that is equal on every host that sees the device.
    pub(super) own_id: Option<Vec<u8>>,
    /// Distinguishes the file from another one at the same path; `None` where that is impossible.
    pub(super) medium: Option<String>,
    /// Name of the file or device, equal for every path by which it can be opened.
    pub(super) root: String,
    /// Exclusive claim of this process on a block device.
    pub(super) exclusive: Option<Arc<OwnedFd>>,
}

/// Opens the file or block device at `path`, and determines its properties.
pub(super) fn open(path: &Path, options: &FileOptions) -> Result<OpenedFile, VolumeError> {
    if let Some(block_size) = options.block_size
        && !(block_size.is_power_of_two() && BLOCK_SIZES.contains(&block_size))
    {
        return Err(VolumeError::BlockSize { block_size });
    }
    // Looked at before it is opened: opening a FIFO would wait for its other end.
    let stat =
        fs::stat(path).map_err(|errno| failed(path, options, errno, "cannot be examined"))?;
    let kind = kind(path, FileType::from_raw_mode(stat.st_mode))?;
    let is_device = kind == FileType::BlockDevice;
    let device = if is_device {
        Device::find(fs::major(stat.st_rdev), fs::minor(stat.st_rdev))
    } else {
        None
    };
    if !options.read_only && device.as_ref().is_some_and(Device::read_only) {
        return Err(VolumeError::ReadOnlyMedium { path: path.into() });
    }
    let exclusive = if is_device && !options.read_only && options.lock {
        Some(claim(path, stat.st_rdev, options)?)
    } else {
        None
    };
    let (fd, mut refused) = open_fd(path, options)?;
    let now = fs::fstat(&fd).map_err(|errno| system(path, errno, "cannot be examined"))?;
    if FileType::from_raw_mode(now.st_mode) != kind {
        return Err(system(path, Errno::STALE, "changed while it was opened"));
    }
    let size = size(path, fd.as_fd(), is_device)?;
    // An image may have an empty backing file, which reads as zeroes.
    if size == 0 && !(options.image && options.read_only) {
        return Err(VolumeError::Empty { path: path.into() });
    }
    // Before the size is looked at: another format may have any, and a raw disk's advice would
    // spoil it.
    if options.format == Format::Probe && !options.image {
        match head_kind(path, fd.as_fd()) {
            Some(HeadKind::Image(format)) => {
                return Err(VolumeError::ImageFormat {
                    path: path.into(),
                    format,
                });
            }
            Some(HeadKind::Encrypted) => tracing::warn!(
                path = %path.display(),
                "this file is encrypted with LUKS, and its guest sees the encrypted bytes; to have \
                 the host decrypt it, serve the device of cryptsetup open instead; where the guest \
                 has the passphrase, ?format=raw ends this warning"
            ),
            None => {}
        }
    }
    let smallest = options.block_size.unwrap_or(DEFAULT_BLOCK);
    if !options.image {
        check_size(path, size, smallest)?;
    }

    let mut direct = None;
    if options.direct != Direct::Off && refused.is_none() {
        match alignment(fd.as_fd(), is_device) {
            // A device's blocks are its own; what direct I/O needs of a file may change with the
            // file's place on the disk (a copy that shares blocks), and its guest keeps its blocks.
            Ok(found)
                if found.block > smallest
                    && (options.block_size.is_some()
                        || !is_device && options.direct != Direct::On) =>
            {
                let needed = found.block;
                refused = Some(format!(
                    "it needs blocks of {needed} bytes (block-size={needed}), and the disk has \
                     blocks of {smallest}"
                ));
            }
            Ok(found) if size % u64::from(found.block) != 0 && !options.image => {
                refused = Some(format!(
                    "the size of {size} bytes is not a multiple of its block size of {} bytes",
                    found.block
                ));
            }
            Ok(found) => direct = Some(found),
            Err(why) => refused = Some(why),
        }
    }
    if let Some(why) = &refused {
        if options.direct == Direct::On {
            return Err(VolumeError::DirectUnsupported {
                path: path.into(),
                why: why.clone(),
            });
        }
        buffered(path, fd.as_fd())?;
    }
    let buffered = if options.image && !is_device {
        1
    } else {
        smallest.min(DEFAULT_BLOCK)
    };
    let block_size = direct.map_or(buffered, |direct| direct.block);
    // An image's volume writes its own tables beside the data.
    let atomic = if options.atomic > 0 && direct.is_some() && !options.read_only && !options.image {
        atomic_writes(fd.as_fd(), is_device).at_most(options.atomic)
    } else {
        AtomicWrites::NONE
    };
    let punch = !options.read_only
        && match &device {
            Some(device) => device.punches(),
            None => !is_device && punches(fd.as_fd(), size),
        };
    // A filesystem's blocks are the unit of its holes; `st_blksize` is their size on all common
    // ones.
    let file_unit = power(u64::try_from(now.st_blksize).unwrap_or(0), block_size);
    let unit =
        |of_device: Option<u64>| of_device.map_or(file_unit, |bytes| power(bytes, block_size));
    Ok(OpenedFile {
        size,
        direct,
        buffered_because: refused,
        block_size,
        optimal_io: unit(device.as_ref().and_then(Device::optimal_io)),
        punch,
        punch_granularity: if punch {
            unit(device.as_ref().and_then(Device::discard_granularity))
        } else {
            0
        },
        atomic,
        device: is_device,
        in_memory: !is_device && in_memory(fd.as_fd()),
        may_hang: !is_device && !is_local(fd.as_fd()),
        id: identity(path, device.as_ref()),
        own_id: device.as_ref().and_then(own_id),
        medium: medium(fd.as_fd(), &now, device.as_ref()),
        root: root(&now, is_device),
        exclusive,
        fd,
    })
}

/// Returns the kind of content that the first bytes of the file show. An unreadable file has none.
fn head_kind(path: &Path, fd: BorrowedFd<'_>) -> Option<HeadKind> {
    let mut head = Buffer::new(LARGEST_BLOCK);
    let read = rustix::io::pread(fd, &mut head[..], 0).or_else(|errno| match errno {
        // Direct I/O in blocks that are larger still.
        Errno::INVAL => {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
            let buffered = fs::open(path, flags, Mode::empty())?;
            rustix::io::pread(buffered, &mut head[..], 0)
        }
        errno => Err(errno),
    });
    let head = head.get(..read.ok()?.min(format::HEAD))?;
    format::detect(head)
}

/// Returns the current size of the file or block device in bytes.
pub(super) fn size(path: &Path, fd: BorrowedFd<'_>, device: bool) -> Result<u64, VolumeError> {
    let unknown = |errno| system(path, errno, "has no size");
    if device {
        // A block device's end is its size. Nothing else uses the descriptor's position.
        fs::seek(fd, SeekFrom::End(0)).map_err(unknown)
    } else {
        let stat = fs::fstat(fd).map_err(unknown)?;
        Ok(u64::try_from(stat.st_size).unwrap_or(0))
    }
}

/// Returns the state of a file at `offset` and the number of bytes from there that have it, at most
/// `len`. `None`: the file system does not say.
pub(super) fn allocation(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Option<(Allocation, u64)> {
    // The descriptor's position is used here and for the size alone.
    let data = match fs::seek(fd, SeekFrom::Data(offset)) {
        Ok(data) => data,
        // No data up to the end of the file.
        Err(Errno::NXIO) => return Some((Allocation::Hole, len.max(1))),
        Err(_) => return None,
    };
    let (state, end) = if data > offset {
        (Allocation::Hole, data)
    } else {
        let hole = fs::seek(fd, SeekFrom::Hole(offset)).ok()?;
        (Allocation::Data, hole)
    };
    // A file that changes meanwhile may have no such range any more.
    let run = end.checked_sub(offset).filter(|run| *run > 0)?;
    Some((state, run.min(len)))
}

/// Returns the size of a file or device, as far as it is known without waiting for a FUSE file
/// system: a thread that waits for one cannot be killed, and would keep its process from ending.
/// The kernel knows of changes on this host, and has asked for others when the file was last read.
pub(super) fn known_size(
    path: &Path,
    fd: BorrowedFd<'_>,
    device: bool,
) -> Result<u64, VolumeError> {
    if device || filesystem(fd) != Some(FUSE) {
        return size(path, fd, device);
    }
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = fs::statx(fd, c"", flags, StatxFlags::SIZE);
    let stat = stat.map_err(|errno| system(path, errno, "has no size"))?;
    Ok(stat.stx_size)
}

/// Checks that the size is a multiple of the block size, both in bytes.
pub(super) fn check_size(path: &Path, size: u64, block_size: u32) -> Result<(), VolumeError> {
    if size.is_multiple_of(u64::from(block_size)) {
        return Ok(());
    }
    Err(VolumeError::OddSize {
        path: path.into(),
        size,
        block_size,
    })
}

fn kind(path: &Path, kind: FileType) -> Result<FileType, VolumeError> {
    let what = match kind {
        FileType::RegularFile | FileType::BlockDevice => return Ok(kind),
        FileType::Directory => return Err(VolumeError::IsDirectory { path: path.into() }),
        FileType::CharacterDevice => "character device",
        FileType::Fifo => "FIFO",
        FileType::Socket => "socket",
        _ => "file of unknown type",
    };
    Err(VolumeError::WrongType {
        path: path.into(),
        what,
    })
}

/// Opens the file with O_DIRECT; if the filesystem refuses it, without, and returns the reason.
fn open_fd(path: &Path, options: &FileOptions) -> Result<(OwnedFd, Option<String>), VolumeError> {
    let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY;
    flags |= if options.read_only {
        OFlags::RDONLY
    } else {
        OFlags::RDWR
    };
    let open = |flags| fs::open(path, flags, Mode::empty());
    if options.direct != Direct::Off {
        match open(flags | OFlags::DIRECT) {
            Err(Errno::INVAL) => {
                let fd = open(flags)
                    .map_err(|errno| failed(path, options, errno, "cannot be opened"))?;
                return Ok((fd, Some("the filesystem does not know it".into())));
            }
            result => {
                let fd =
                    result.map_err(|errno| failed(path, options, errno, "cannot be opened"))?;
                return Ok((fd, None));
            }
        }
    }
    let fd = open(flags).map_err(|errno| failed(path, options, errno, "cannot be opened"))?;
    Ok((fd, None))
}

fn failed(path: &Path, options: &FileOptions, errno: Errno, what: &'static str) -> VolumeError {
    let (path, read_only) = (path.to_path_buf(), options.read_only);
    match errno {
        Errno::NOENT => VolumeError::NotFound { path },
        Errno::ACCESS | Errno::PERM => VolumeError::Permission { path, read_only },
        Errno::ROFS => VolumeError::ReadOnlyMedium { path },
        Errno::ISDIR => VolumeError::IsDirectory { path },
        Errno::BUSY | Errno::TXTBSY => VolumeError::Locked {
            path,
            holder: "the system (mounted, swap, or part of another device)".into(),
            read_only,
        },
        errno => system(&path, errno, what),
    }
}

fn system(path: &Path, errno: Errno, what: &'static str) -> VolumeError {
    VolumeError::System {
        path: path.into(),
        what,
        error: errno.into(),
    }
}

/// Locks the file, as soon as the process that had it before has left it ([`fence`](super::fence)).
pub(super) fn lock(
    path: &Path,
    options: &FileOptions,
    fd: BorrowedFd<'_>,
    offset: u64,
    len: Option<u64>,
) -> Result<(), VolumeError> {
    let read_only = options.read_only;
    let whole = (offset, len) == (0, None);
    let fence = Fence::new(path, whole, options.previous);
    lock_by(path, fence, read_only, || {
        if whole {
            sys::lock_whole(fd, !read_only)
        } else {
            sys::lock_part(fd, !read_only, offset, len)
        }
    })
}

/// Two openings of a file that the first has locked exclusively share that lock from now on.
/// `number`: of the other opening, from 0.
pub(super) fn share_lock(
    path: &Path,
    options: &FileOptions,
    number: u64,
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
) -> Result<(), VolumeError> {
    for byte in sys::shared_bytes(number) {
        let fence = Fence::new(path, false, options.previous);
        sys::unlock(from, byte, 1).map_err(|error| VolumeError::LockUnsupported {
            path: path.into(),
            error,
        })?;
        lock_by(path, fence, false, || sys::lock(to, true, byte, Some(1)))?;
    }
    Ok(())
}

fn lock_by(
    path: &Path,
    mut fence: Fence<'_>,
    read_only: bool,
    lock: impl Fn() -> io::Result<bool>,
) -> Result<(), VolumeError> {
    loop {
        match lock() {
            Ok(true) => {
                fence.passed();
                return Ok(());
            }
            Ok(false) => fence.wait(read_only)?,
            Err(error) => {
                return Err(VolumeError::LockUnsupported {
                    path: path.into(),
                    error,
                });
            }
        }
    }
}

/// The process's claim on a block device, which one that ends gives up a moment later.
fn claim(path: &Path, device: u64, options: &FileOptions) -> Result<Arc<OwnedFd>, VolumeError> {
    let mut fence = Fence::new(path, false, options.previous);
    loop {
        match exclusive::claim(path, device) {
            Ok(claim) => return Ok(claim),
            Err(ClaimRefused(Errno::BUSY)) if options.previous.taken_over => fence.wait(false)?,
            Err(ClaimRefused(errno)) => {
                return Err(failed(path, options, errno, "cannot be opened"));
            }
        }
    }
}

/// Returns the alignment that direct I/O on this file requires, or the reason why it is impossible.
fn alignment(fd: BorrowedFd<'_>, device: bool) -> Result<Alignment, String> {
    let statx = fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    let told = statx.ok().filter(|statx| {
        StatxFlags::from_bits_retain(statx.stx_mask).contains(StatxFlags::DIOALIGN)
    });
    if let Some(told) = told {
        if told.stx_dio_offset_align == 0 {
            return Err("the filesystem has none for this file".into());
        }
        let block = power(u64::from(told.stx_dio_offset_align), DEFAULT_BLOCK);
        let memory = told
            .stx_dio_mem_align
            .checked_next_power_of_two()
            .unwrap_or(block)
            .max(1);
        return try_read(fd, block).map(|()| Alignment { memory, block });
    }
    if in_memory(fd) {
        return Err("the file lives in memory".into());
    }
    // Before Linux 6.1, and on filesystems that do not report it, the alignment is found out by
    // trying.
    let logical = if device {
        fs::ioctl_blksszget(fd).ok()
    } else {
        None
    };
    let first = power(u64::from(logical.unwrap_or(DEFAULT_BLOCK)), DEFAULT_BLOCK);
    try_read(fd, first)
        .map(|()| first)
        .or_else(|_| try_read(fd, 4096).map(|()| 4096))
        .map(|block| Alignment {
            memory: block,
            block,
        })
}

/// Flag STATX_WRITE_ATOMIC of `statx`, since Linux 6.11.
const WRITE_ATOMIC: StatxFlags = StatxFlags::from_bits_retain(0x1_0000);

/// Returns the writes that the kernel does as a whole with `RWF_ATOMIC` (statx(2)).
///
/// The kernel's promise is for a power cut. Whether a read at the same time finds all or nothing
/// depends on the layers below. A device gets such a write, and a read within its range, as one
/// command each, and so does ext4's, which has the range in one extent. XFS may write elsewhere and
/// then move extents one by one, and an unknown filesystem may do anything.
fn atomic_writes(fd: BorrowedFd<'_>, device: bool) -> AtomicWrites {
    if !device && filesystem(fd) != Some(EXT) {
        return AtomicWrites::NONE;
    }
    match fs::statx(fd, c"", AtFlags::EMPTY_PATH, WRITE_ATOMIC) {
        Ok(told) => promised(&told),
        Err(_) => AtomicWrites::NONE,
    }
}

/// Returns the writes that the kernel promises to be atomic, from the fields of `statx`.
fn promised(told: &fs::Statx) -> AtomicWrites {
    let mask = StatxFlags::from_bits_retain(told.stx_mask);
    if !mask.contains(WRITE_ATOMIC) || told.stx_atomic_write_segments_max == 0 {
        return AtomicWrites::NONE;
    }
    // Above `unit_max_opt` a filesystem emulates the writes that the device cannot do, slowly.
    let (most, fast) = (
        told.stx_atomic_write_unit_max,
        told.stx_atomic_write_unit_max_opt,
    );
    let max = if fast == 0 { most } else { most.min(fast) };
    match told.stx_atomic_write_unit_min {
        0 => AtomicWrites::NONE,
        min => AtomicWrites::naturally_aligned(min, max),
    }
}

// Filesystems by their numbers in `linux/magic.h`, and those of bcachefs and ZFS.
const TMPFS: u32 = 0x0102_1994;
const RAMFS: u32 = 0x8584_58f6;
const HUGETLBFS: u32 = 0x9584_58f6;
const EXT: u32 = 0xef53;
const XFS: u32 = 0x5846_5342;
const BTRFS: u32 = 0x9123_683e;
const F2FS: u32 = 0xf2f5_2010;
const BCACHEFS: u32 = 0xca45_1a4e;
const ZFS: u32 = 0x2fc1_2fc1;
const OVERLAY: u32 = 0x794c_7630;
const NFS: u32 = 0x6969;
const CEPH: u32 = 0x00c3_6400;
const FUSE: u32 = 0x6573_5546;

/// Returns the type (magic number) of the filesystem that a file is on.
fn filesystem(fd: BorrowedFd<'_>) -> Option<u32> {
    // The kernel's magic numbers have 32 bits; the field may be a wider, signed type.
    fs::fstatfs(fd).ok().map(|stat| stat.f_type as u32)
}

/// Returns whether the file is on a filesystem in memory, where O_DIRECT has no use.
fn in_memory(fd: BorrowedFd<'_>) -> bool {
    matches!(filesystem(fd), Some(TMPFS | RAMFS))
}

/// Returns whether the file is on disks of this machine, or in its memory. Other filesystems (FUSE,
/// NFS, CIFS, Ceph and later ones) depend on another process or machine for an answer.
fn is_local(fd: BorrowedFd<'_>) -> bool {
    matches!(
        filesystem(fd),
        Some(TMPFS | RAMFS | HUGETLBFS | EXT | XFS | BTRFS | F2FS | BCACHEFS | ZFS)
    )
}

/// Returns whether a file keeps its inode number while nobody has it open. File systems of FUSE and
/// FAT may number a file anew each time.
fn has_lasting_inodes(fd: BorrowedFd<'_>) -> bool {
    is_local(fd) || matches!(filesystem(fd), Some(OVERLAY | NFS | CEPH))
}

/// Reads the first `block` bytes directly. A medium that cannot be read is no reason against direct
/// I/O.
fn try_read(fd: BorrowedFd<'_>, block: u32) -> Result<(), String> {
    let mut buffer = Buffer::new(block as usize);
    match rustix::io::pread(fd, &mut buffer[..], 0) {
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Err(format!("a read of {block} bytes is refused")),
        _ => Ok(()),
    }
}

/// Turns direct I/O off on an open file.
fn buffered(path: &Path, fd: BorrowedFd<'_>) -> Result<(), VolumeError> {
    let unchanged = |errno| system(path, errno, "cannot be switched to buffered I/O");
    let flags = fs::fcntl_getfl(fd).map_err(unchanged)?;
    if flags.contains(OFlags::DIRECT) {
        fs::fcntl_setfl(fd, flags - OFlags::DIRECT).map_err(unchanged)?;
    }
    Ok(())
}

/// Tries whether holes can be punched, behind the end of the file, where there is nothing to lose.
fn punches(fd: BorrowedFd<'_>, size: u64) -> bool {
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fs::fallocate(fd, hole, size, u64::from(DEFAULT_BLOCK)).is_ok()
}

/// Returns the largest power of two that is at most `bytes`, but at least `least`.
fn power(bytes: u64, least: u32) -> u32 {
    let bytes = u32::try_from(bytes).unwrap_or(0).max(least);
    // Down to a power of two: a larger unit would promise too much.
    1 << bytes.max(1).ilog2()
}

/// Returns a name for the file made of its device and inode numbers, equal for all its paths.
fn root(stat: &fs::Stat, device: bool) -> String {
    if device {
        let (major, minor) = (fs::major(stat.st_rdev), fs::minor(stat.st_rdev));
        return format!("block device {major}:{minor}");
    }
    let (major, minor) = (fs::major(stat.st_dev), fs::minor(stat.st_dev));
    format!("file {} on device {major}:{minor}", stat.st_ino)
}

fn own_id(device: &Device) -> Option<Vec<u8>> {
    let name = device.lasting_name()?;
    Some(format!("device:{name}").into_bytes())
}

/// Describes the opened file so that another file at its path is described differently. An inode's
/// number is used again after the file is removed, so its time of creation is part of it.
fn medium(fd: BorrowedFd<'_>, stat: &fs::Stat, device: Option<&Device>) -> Option<String> {
    if let Some(device) = device {
        let name = device.lasting_name();
        let name = name.or_else(|| Some(format!("attachment {}", device.attachment()?)))?;
        return Some(format!("block device {name}"));
    }
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || !has_lasting_inodes(fd) {
        return None;
    }
    let (major, minor) = (fs::major(stat.st_dev), fs::minor(stat.st_dev));
    let mut text = format!("inode {} on device {major}:{minor}", stat.st_ino);
    let statx = fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BTIME);
    if let Ok(told) = statx
        && StatxFlags::from_bits_retain(told.stx_mask).contains(StatxFlags::BTIME)
    {
        let made = told.stx_btime;
        text += &format!(", created {}.{:09}", made.tv_sec, made.tv_nsec);
    }
    Some(text)
}

fn identity(path: &Path, device: Option<&Device>) -> Vec<u8> {
    use std::os::unix::ffi::OsStrExt;
    if let Some(id) = device.and_then(own_id) {
        return id;
    }
    let path = path.canonicalize().unwrap_or_else(|_| path.into());
    [b"file:".as_slice(), path.as_os_str().as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers of kernels: those that do not know the question leave everything at zero.
    #[test]
    fn unreported_kernel_atomicity_is_not_promised() {
        let here = tempfile::tempfile().unwrap();
        let any = fs::statx(here.as_fd(), c"", AtFlags::EMPTY_PATH, WRITE_ATOMIC).unwrap();
        let natural = AtomicWrites::naturally_aligned;
        for (mask, min, max, opt, segments, expected) in [
            (WRITE_ATOMIC, 4096, 65536, 0, 1, natural(4096, 65536)),
            (WRITE_ATOMIC, 4096, 65536, 16384, 1, natural(4096, 16384)),
            (WRITE_ATOMIC, 512, 4096, 0, 1, natural(512, 4096)),
            (StatxFlags::empty(), 4096, 65536, 0, 1, AtomicWrites::NONE),
            (WRITE_ATOMIC, 0, 0, 0, 0, AtomicWrites::NONE),
            (WRITE_ATOMIC, 0, 65536, 0, 1, AtomicWrites::NONE),
            (WRITE_ATOMIC, 4096, 65536, 0, 0, AtomicWrites::NONE),
        ] {
            let mut told = any;
            told.stx_mask = mask.bits();
            told.stx_atomic_write_unit_min = min;
            told.stx_atomic_write_unit_max = max;
            told.stx_atomic_write_unit_max_opt = opt;
            told.stx_atomic_write_segments_max = segments;
            assert_eq!(promised(&told), expected);
        }
    }

    #[test]
    fn only_known_filesystems_are_local() {
        let here = tempfile::tempfile().unwrap();
        if filesystem(here.as_fd()) == Some(OVERLAY) {
            println!("skipped: the temporary directory is on overlayfs");
        } else {
            assert!(is_local(here.as_fd()));
        }
        // Neither disk nor memory: the kernel makes its contents.
        let proc = std::fs::File::open("/proc/self/stat").unwrap();
        assert!(!is_local(proc.as_fd()));
    }
}
