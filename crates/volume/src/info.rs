//! Properties of a volume.

/// Kind of the storage behind a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A regular file.
    File,
    /// A block device.
    BlockDevice,
    /// Memory of this process, which is lost when the process ends.
    Memory,
    /// A null device: completes at once and stores nothing.
    Null,
}

/// Properties of a volume. All sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Info {
    /// Size of the volume. A multiple of `block_size`. Changes when the volume is resized.
    pub size: u64,
    /// Smallest unit of I/O: offset and length of every request are multiples of it (1: any are
    /// allowed). A power of two. A namespace's blocks must be at least this big.
    pub block_size: u32,
    /// Unit of I/O that the volume handles best; a power of two, a multiple of `block_size`.
    pub optimal_io: u32,
    /// Writes, zeroing and deallocation are refused.
    pub read_only: bool,
    /// A completed write is durable only after a flush, or when it was written with `fua`.
    pub volatile_cache: bool,
    /// [`Op::Deallocate`](crate::Op::Deallocate) gives space back.
    pub deallocate: bool,
    /// Unit in which space is deallocated; requests that cover no whole unit may free nothing. A
    /// power of two, or 0 where `deallocate` is false.
    pub deallocate_granularity: u32,
    /// A range reads as zeroes after a successful deallocation.
    pub zeroes_after_deallocate: bool,
    /// [`Op::WriteZeroes`](crate::Op::WriteZeroes) is expected to be faster than writing zeroes. It
    /// works either way.
    pub write_zeroes: bool,
    /// Kind of the storage behind the volume.
    pub kind: Kind,
    /// Description in one line for people: kind, access mode, and features that had to be given up.
    pub description: String,
}
