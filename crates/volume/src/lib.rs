//! What a namespace stands on.
//!
//! This room turns reads, writes, flushes, zeroing and deallocation of byte ranges into I/O on something real. It
//! has one door, the trait [`Volume`] (a description that threads share) with its [`VolumeQueue`] (one worker's own
//! way into it), and the things behind that door: [`FileVolume`] (a raw file or block device, by io_uring),
//! [`MemVolume`], [`NullVolume`], [`SliceVolume`] (a part of another volume), [`LimitVolume`] and [`FairVolume`] (another
//! volume with limits, or with its share of a device), and [`FaultVolume`] (another volume with declared faults, for tests).
//! [`gpt`] finds partitions, [`claim`] keeps exports apart. [`open_url`] finds the right one for
//! what a user typed, in the [`Registry`] of kinds, to which a program can add its own.
//!
//! What may be touched here: files, block devices, the kernel's io_uring. What may not: NVMe. A volume counts in
//! bytes, knows neither namespaces nor queues nor status codes, and never looks at guest memory except through the
//! [`SegmentList`](dma::SegmentList) that a request owns. `unsafe` stays in the modules that talk to the kernel
//! (`io`, `file::sys`).
//!
//! # How data passes through
//!
//! A worker thread makes one [`Io`], opens each volume on it and owns all that comes back; nothing here locks.
//!
//! ```text
//! worker -> VolumeQueue::submit(Request) --done at once--> Some(Completion)      memory, null, refused requests
//!                       |
//!                       +-- slot of the worker's ring -> Io::flush (one system call for the batch)
//!                                                            |
//! worker <- Completion { tag, result, data } <- Io::poll <- kernel
//! worker <- Completion { tag, result, data } <- VolumeQueue::poll                null with a latency, held faults
//! ```
//!
//! A request owns its data segments until its completion hands them back, so that the memory stays mapped whatever
//! happens to the worker: dropping a queue or the [`Io`] waits for the kernel to let go of it first.
#![deny(unsafe_code)]

mod claim;
mod clock;
mod error;
mod fair;
mod fault;
mod file;
pub mod gpt;
mod info;
mod io;
mod limit;
mod mem;
mod null;
mod read;
mod request;
mod slice;
mod traits;
mod url;
mod wake;

pub use claim::{Extent, Overlap, claim};
pub use clock::{Clock, SystemClock};
pub use error::{IoError, IoErrorKind, VolumeError};
pub use fair::{DEFAULT_DEPTH, DEFAULT_WEIGHT, FairGroup, FairVolume, MAX_WEIGHT, ShareHandle};
pub use fault::{Effect, Fault, FaultVolume, Faults, OpKind};
pub use file::{Direct, FileOptions, FileVolume, Format};
pub use info::{Info, Kind};
pub use io::{
    Armed, Io, IoCounters, IoOptions, IoStats, PinPace, PinnedMemory, PinnedWindows, Pinner,
    Watcher,
};
pub use limit::{LimitHandle, LimitVolume, Limits, Rates};
pub use mem::MemVolume;
pub use null::{NullOptions, NullVolume};
pub use request::{Completion, Op, Request};
pub use slice::SliceVolume;
pub use traits::{FastPath, OpenQueue, QueueState, Volume, VolumeQueue};
pub use url::{
    Extras, OpenError, OpenKind, OpenOptions, Opened, Options as UrlOptions, READ_ONLY, Registry,
    Scheme, UrlOption, VolumeKind, VolumeUrl, Whole, open_url, parse_duration, parse_size,
};
pub use wake::Wake;
