//! What can go wrong, by who caused it: the VMM that maps ([`MapError`]), the guest that addresses
//! ([`DmaError`]), or the host that uses a memory directly ([`MemoryError`]).

use rustix::io::Errno;

/// A memory file or a window was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// The file is not in memory (memfd, tmpfs, hugetlbfs): its pages may come from a disk, another
    /// process or another machine, and waiting for them would hold up other clients.
    #[error(
        "not a memory file: use a memfd (QEMU: memory-backend-memfd,share=on), or a file on tmpfs \
         (/dev/shm) or hugetlbfs"
    )]
    WrongKind,
    /// A system call failed.
    #[error("{call}: {errno}")]
    System {
        /// The system call's name.
        call: &'static str,
        /// Its error.
        errno: Errno,
    },
    /// The range ends after its backing file or memory does.
    #[error("range ends at {end:#x}, its backing at {size:#x}")]
    OutOfBacking {
        /// First byte after the range, as an offset into the backing.
        end: u64,
        /// Size of the backing in bytes.
        size: u64,
    },
    /// A length of zero.
    #[error("zero length")]
    Empty,
    /// Address plus length does not fit in 64 bits.
    #[error("range overflows")]
    Overflow,
    /// The new window overlaps the one at `iova`.
    #[error("overlaps the window at {iova:#x}")]
    Overlap {
        /// Start of the existing window.
        iova: u64,
    },
    /// The range to unmap covers only part of the window at `iova`.
    #[error("bisects the window at {iova:#x}")]
    Bisects {
        /// Start of the existing window.
        iova: u64,
    },
    /// Write access was asked for memory that is mapped, or opened, read-only.
    #[error("memory is read-only")]
    ReadOnly,
    /// A window's address, length or offset is not a multiple of [`crate::PAGE`].
    #[error("address {iova:#x}, length or file offset is not a multiple of 4096")]
    Misaligned {
        /// Start of the window.
        iova: u64,
    },
    /// The client has mapped as many memory files as it may.
    #[error("the client has mapped {limit} memory files, as many as it may")]
    TooManyMappings {
        /// Their number.
        limit: u64,
    },
    /// The client's memory files would be larger than they may be, together.
    #[error("the client's memory files would have more than {limit} bytes")]
    TooManyBytes {
        /// Bytes that they may have.
        limit: u64,
    },
    /// All clients' memory files would take more of the address space than they may.
    #[error("the memory files of all clients would take more than {limit} bytes of addresses")]
    AddressSpaceFull {
        /// Bytes that they may take.
        limit: u64,
    },
    /// [`crate::sigbus::MAX_MAPPINGS`] memory files are mapped already.
    #[error("too many memory files are mapped")]
    TableFull,
    /// The memory's file shrank, its content is lost.
    #[error("memory file shrank")]
    Poisoned,
}

/// A device's access to guest memory failed. An IOVA in it is that of the first byte
/// that could not be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DmaError {
    /// No window there.
    #[error("no window at {iova:#x}")]
    Unmapped {
        /// First byte that failed.
        iova: u64,
    },
    /// A window is there, but without memory (RAM that is not shared, a ROM, another device's BAR).
    #[error("window at {iova:#x} has no shared memory")]
    NotShared {
        /// First byte that failed.
        iova: u64,
    },
    /// The window does not allow this kind of access.
    #[error("access to {iova:#x} not permitted")]
    Protection {
        /// First byte that failed.
        iova: u64,
    },
    /// Address plus length does not fit in 64 bits, or a structure is larger than any queue can be.
    #[error("range overflows")]
    Overflow,
    /// A structure that needs atomic access ([`crate::Ring`], [`crate::Cells`]) lies unaligned in
    /// host memory, or one of its pages is scattered.
    #[error("structure at {iova:#x} is misaligned")]
    Misaligned {
        /// Start of the misaligned page or structure.
        iova: u64,
    },
    /// The memory's file shrank, its content is lost.
    #[error("memory file shrank")]
    Poisoned,
    /// A transfer, or a structure, lies in the device's own memory in part only
    /// ([`crate::DmaMap::set_device_memory`]).
    #[error("a part of it lies in the device's own memory")]
    Mixed,
    /// The segment list holds host memory, or another map's memory.
    #[error("segment list belongs to other memory")]
    ForeignList,
}

/// A host's own access to a [`crate::Memory`] failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// Offset plus length lies outside the memory.
    #[error("out of the memory's range")]
    OutOfRange,
    /// The memory is mapped read-only.
    #[error("memory is read-only")]
    ReadOnly,
    /// Its pages could not be allocated ahead of their use.
    #[error("pages cannot be allocated")]
    NotPopulated,
    /// The memory's file shrank, its content is lost.
    #[error("memory file shrank")]
    Poisoned,
}
