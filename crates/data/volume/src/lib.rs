//! Volumes, on which namespaces are stored, and I/O on them.
//!
//! This crate turns reads, writes, flushes, zeroing and deallocation of byte ranges into I/O on
//! real storage: a file or block device by io_uring ([`FileVolume`]), memory ([`MemVolume`]), or
//! nothing ([`NullVolume`]). A volume may wrap another one: a part of it ([`SliceVolume`]), with
//! limits ([`LimitVolume`]), with its share of a device ([`FairVolume`]), with a policy for
//! requests that fail ([`OnErrorVolume`]), with declared faults for tests ([`FaultVolume`]).
//! [`gpt`] finds partitions, [`claim()`] keeps exports apart. [`open_url`] opens a user's URL by
//! the [`Registry`] of kinds, to which a program can add its own.
//!
//! This crate accesses files, block devices and the kernel's io_uring, but nothing of NVMe. A
//! volume counts in bytes, knows neither namespaces nor queues nor status codes, and never looks at
//! guest memory except through the [`SegmentList`](dma::SegmentList) that a request owns. `unsafe`
//! stays in the modules that talk to the kernel (`io`, `file::sys`).
//!
//! # How data passes through
//!
//! A worker thread makes one [`Io`], opens each volume on it and owns the queues; nothing here
//! locks.
//!
//! ```text
//! worker -> VolumeQueue::submit(Request) --done at once--> Some(Completion)
//!                       |
//!                       +-- slot of the worker's ring -> Io::flush (one system call for the batch)
//!                                                            |
//! worker <- Completion { tag, result, data } <- Io::poll <- kernel
//! worker <- Completion { tag, result, data } <- VolumeQueue::poll   (null with a latency, faults)
//! ```
//!
//! A request owns its data segments until its completion returns them, so that the memory stays
//! mapped whatever happens to the worker: dropping a queue or the [`Io`] waits until the kernel has
//! completed everything.
//!
//! # Write a volume
//!
//! A [`Volume`] describes itself and opens a queue for each worker; its [`VolumeQueue`] has four
//! methods, none of which has a default. This one reads as zeroes and refuses the rest:
//!
//! ```
//! use volume::{
//!     Completion, Info, Io, IoErrorKind, Kind, Op, OpenQueue, QueueState, Request, Volume,
//!     VolumeError, VolumeQueue,
//! };
//!
//! #[derive(Debug)]
//! struct Zeroes(u64);
//!
//! impl Volume for Zeroes {
//!     fn info(&self) -> Info {
//!         Info {
//!             size: self.0,
//!             block_size: 512,
//!             optimal_io: 4096,
//!             read_only: true,
//!             volatile_cache: false,
//!             deallocate: false,
//!             deallocate_granularity: 0,
//!             zeroes_after_deallocate: false,
//!             write_zeroes: false,
//!             kind: Kind::Null,
//!             description: "zeroes".into(),
//!         }
//!     }
//!
//!     fn open(&self, _: &Io) -> Result<OpenQueue, VolumeError> {
//!         Ok(OpenQueue::new(Queue(self.info())))
//!     }
//!
//!     fn id(&self) -> Vec<u8> {
//!         b"zeroes".to_vec()
//!     }
//!
//!     fn inner(&self) -> Option<&dyn Volume> {
//!         None // A wrapper says which volume it wraps.
//!     }
//! }
//!
//! struct Queue(Info);
//!
//! impl VolumeQueue for Queue {
//!     fn submit(&mut self, request: Request) -> Option<Completion> {
//!         let result = request.check_info(&self.0); // Range, alignment, right to write.
//!         if result.is_ok() && request.op == Op::Read {
//!             request.data.fill(0);
//!         }
//!         Some(request.complete(result)) // `None`: it completes later.
//!     }
//!
//!     fn poll(&mut self, _: &mut dyn FnMut(Completion)) -> usize {
//!         0 // Nothing completes later.
//!     }
//!
//!     fn state(&self) -> QueueState {
//!         QueueState::IDLE
//!     }
//!
//!     fn cancel(&mut self, _: u64) {}
//! }
//!
//! let mut queue = Zeroes(1 << 20).open(&Io::new(Default::default()))?;
//! let data = dma::SegmentList::owned(dma::Buffer::new(4096));
//! let done = queue.start(7, Op::Read, 0, data).expect("at once");
//! assert_eq!((done.tag, done.result), (7, Ok(())));
//! let done = queue.start(8, Op::Write { fua: false }, 0, done.data).expect("at once");
//! assert_eq!(done.result.unwrap_err().kind, IoErrorKind::ReadOnly);
//! # Ok::<(), VolumeError>(())
//! ```
//!
//! [`OpenQueue`] is the queue that callers use: it answers the calls of the fast path, too
//! ([`FastPath`]), whether the queue has one or not. A queue that has one is returned by
//! [`OpenQueue::with_fast_path`]. Put the kind into the [`Registry`], and users can name it.
#![deny(unsafe_code)]

mod atomic;
mod budget;
mod claim;
mod clock;
mod error;
mod fair;
mod fault;
mod file;
pub mod gpt;
mod inbox;
mod info;
mod io;
mod limit;
mod mem;
mod null;
mod on_error;
mod ownership;
mod read;
mod request;
mod slice;
mod traits;
mod url;
mod wait_log;
mod wake;

pub use atomic::{AtomicVolume, AtomicWrites, MAX_ATOMIC_UNIT};
pub use budget::Budget;
pub use claim::{Extent, Overlap, claim};
pub use clock::{Clock, SystemClock};
pub use error::{IoError, IoErrorKind, VolumeError};
pub use fair::{DEFAULT_DEPTH, DEFAULT_WEIGHT, FairGroup, FairVolume, MAX_WEIGHT, ShareHandle};
pub use fault::{Effect, Fault, FaultVolume, Faults, OpKind};
pub use file::{
    CopiedBytes, CopyRequest, CopySource, Direct, FileCopy, FileLock, FileOptions, FileVolume,
    Format, PreviousProcess,
};
pub use inbox::Inbox;
pub use info::{Allocation, Info, Kind};
pub use io::{
    Armed, DrainWatch, Incoming, Io, IoCounters, IoOptions, IoStats, Lane, Outgoing, PinPace,
    PinnedMemory, PinnedWindows, Pinner, RingStream, RingStreams, SleepHint, Watcher,
};
pub use limit::{IoLimits, LimitHandle, LimitVolume, Rates};
pub use mem::MemVolume;
pub use null::{NullOptions, NullVolume};
pub use on_error::{ErrorAction, OnError, OnErrorHandle, OnErrorStatus, OnErrorVolume, RETRY_FOR};
pub use ownership::{Change, Ownership};
pub use read::{ReadError, read_blocking};
pub use request::{Completion, Op, Request};
pub use slice::SliceVolume;
pub use traits::{FastPath, OpenQueue, QueueState, RangeCopy, Volume, VolumeQueue};
pub use url::{
    BareVolume, Encryption, Extras, JournalFolder, MemoryPlace, OpenEncrypted, OpenError, OpenKind,
    OpenOptions, OpenedUrl, Options as UrlOptions, READ_ONLY, Registry, Scheme, UrlOption,
    VolumeKind, VolumeUrl, journal_of_url, open_url, parse_count, parse_duration, parse_number,
    parse_size, path_of_name, path_of_url, similar,
};
pub use wait_log::WaitLog;
pub use wake::Wake;
