//! Errors by origin: the VMM that maps memory ([`MapError`]), the guest that addresses memory
//! ([`DmaError`]), or the host that accesses a memory directly ([`MemoryError`]).

use rustix::io::Errno;

/// Reason why a memory file or a window was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// The file is not in memory (memfd, tmpfs, hugetlbfs). Its pages may come from a disk, another
    /// process or another machine, and waiting for them would block other clients.
    #[error(
        "not a memory file: use a memfd (QEMU: memory-backend-memfd,share=on), or a file on tmpfs \
         (/dev/shm) or hugetlbfs"
    )]
    WrongKind,
    /// A system call failed.
    #[error("{call}: {errno}")]
    System {
        /// Name of the system call that failed.
        call: &'static str,
        /// Error number of the system call.
        errno: Errno,
    },
    /// The range exceeds its backing file or memory.
    #[error("range ends at {end:#x}, its backing at {size:#x}")]
    OutOfBacking {
        /// Offset in the backing of the first byte after the range.
        end: u64,
        /// Size of the backing in bytes.
        size: u64,
    },
    /// The length of the range is zero.
    #[error("zero length")]
    Empty,
    /// The sum of address and length exceeds 64 bits.
    #[error("range overflows")]
    Overflow,
    /// The new window overlaps the one at `iova`.
    #[error("overlaps the window at {iova:#x}")]
    Overlap {
        /// First address (IOVA) of the existing window.
        iova: u64,
    },
    /// The range to unmap covers only part of the window at `iova`.
    #[error("bisects the window at {iova:#x}")]
    Bisects {
        /// First address (IOVA) of the existing window.
        iova: u64,
    },
    /// Write access was requested for memory that is mapped, or opened, read-only.
    #[error("memory is read-only")]
    ReadOnly,
    /// A window's address, length or offset is not a multiple of [`crate::PAGE`].
    #[error("address {iova:#x}, length or file offset is not a multiple of 4096")]
    Misaligned {
        /// First address (IOVA) of the window.
        iova: u64,
    },
    /// The client has reached its limit of mapped memory files.
    #[error("the client has mapped {limit} memory files, as many as it may")]
    TooManyMappings {
        /// Maximum number of memory files of the client.
        limit: u64,
    },
    /// The client's memory files would exceed its limit in total size.
    #[error("the client's memory files would have more than {limit} bytes")]
    TooManyBytes {
        /// Maximum total size of the client's memory files in bytes.
        limit: u64,
    },
    /// All clients' memory files would exceed the limit of address space.
    #[error("the memory files of all clients would take more than {limit} bytes of addresses")]
    AddressSpaceFull {
        /// Maximum total size of all clients' memory files in bytes.
        limit: u64,
    },
    /// [`crate::sigbus::MAX_MAPPINGS`] memory files are mapped already.
    #[error("too many memory files are mapped")]
    TableFull,
    /// The memory's file has shrunk, and its content is lost.
    #[error("memory file shrank")]
    Poisoned,
}

/// Reason why a device's access to guest memory failed. An IOVA in it is that of the first
/// inaccessible byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DmaError {
    /// The guest address lies in no window.
    #[error("no window at {iova:#x}")]
    Unmapped {
        /// First guest address (IOVA) that cannot be accessed.
        iova: u64,
    },
    /// The window has no accessible memory (RAM that is not shared, a ROM, another device's BAR).
    #[error("window at {iova:#x} has no shared memory")]
    NotShared {
        /// First guest address (IOVA) that cannot be accessed.
        iova: u64,
    },
    /// The window does not allow this kind of access.
    #[error("access to {iova:#x} not permitted")]
    Protection {
        /// First guest address (IOVA) that cannot be accessed.
        iova: u64,
    },
    /// Address plus length does not fit in 64 bits, or a structure exceeds the maximum size.
    #[error("range overflows")]
    Overflow,
    /// A structure that needs atomic access ([`crate::Ring`], [`crate::Cells`]) lies unaligned in
    /// host memory, or one of its pages is scattered.
    #[error("structure at {iova:#x} is misaligned")]
    Misaligned {
        /// Guest address (IOVA) of the misaligned page or structure.
        iova: u64,
    },
    /// The memory's file has shrunk, and its content is lost.
    #[error("memory file shrank")]
    Poisoned,
    /// Only a part of the transfer or structure lies in the device's own memory
    /// ([`crate::DmaMap::set_device_memory`]).
    #[error("a part of it lies in the device's own memory")]
    Mixed,
    /// The segment list holds host memory, or another map's memory.
    #[error("segment list belongs to other memory")]
    ForeignList,
}

/// Reason why direct access of the host to a [`crate::Memory`] failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// Offset plus length exceeds the memory.
    #[error("out of the memory's range")]
    OutOfRange,
    /// The memory is mapped read-only.
    #[error("memory is read-only")]
    ReadOnly,
    /// The pages of the range could not be allocated in advance.
    #[error("pages cannot be allocated")]
    NotPopulated,
    /// The memory's file has shrunk, and its content is lost.
    #[error("memory file shrank")]
    Poisoned,
}
