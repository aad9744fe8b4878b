//! Properties of a volume.

/// Kind of storage behind a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A regular file, possibly on a network filesystem.
    File,
    /// A block device.
    BlockDevice,
    /// Memory of this process, which is lost when the process ends.
    Memory,
    /// A null device, which completes requests at once and stores nothing.
    Null,
}

/// State of a range of a volume, see [`Volume::allocation`](crate::Volume::allocation).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocation {
    /// Storage is allocated.
    Data,
    /// No storage is allocated, and the range reads as zeroes.
    Hole,
}

/// Properties of a volume. All sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Info {
    /// Size of the volume in bytes, a multiple of `block_size`. It changes when the volume is
    /// resized.
    pub size: u64,
    /// Smallest unit of I/O: offset and length of every request are multiples of it (1: no
    /// restriction). A power of two. The block size of a namespace must be at least as large.
    pub block_size: u32,
    /// Unit of I/O at which the volume performs best; a power of two and a multiple of
    /// `block_size`.
    pub optimal_io: u32,
    /// Whether writes, zeroing and deallocation are refused.
    pub read_only: bool,
    /// Whether a completed write may be lost in a power cut until a flush, unless it was written
    /// with `fua`.
    pub volatile_cache: bool,
    /// Whether [`Op::Deallocate`](crate::Op::Deallocate) frees space in the storage.
    pub deallocate: bool,
    /// Unit in which space is deallocated; requests that cover no whole unit may free nothing. A
    /// power of two, or 0 where `deallocate` is false.
    pub deallocate_granularity: u32,
    /// Whether a deallocated range reads as zeroes.
    pub zeroes_after_deallocate: bool,
    /// Whether [`Op::WriteZeroes`](crate::Op::WriteZeroes) is expected to be faster than writing
    /// zeroes. It works either way.
    pub write_zeroes: bool,
    /// Kind of the storage behind the volume.
    pub kind: Kind,
    /// Description for users in one line: kind, access mode, and unavailable features.
    pub description: String,
}
