//! The traits: a volume, one worker's queue into it, and the queue's fast path.

use crate::on_error::QueuePolicy;
use crate::{
    Allocation, AtomicWrites, Completion, CopyRequest, CopySource, Extent, FileLock, Info, Io,
    IoError, IoErrorKind, LimitHandle, OnErrorHandle, Op, Request, ShareHandle, VolumeError, Wake,
};
use dma::{Buffer, SegmentList, View};
use std::fmt::Debug;
use std::ops::{Deref, DerefMut};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// A thing to do I/O on. Shared between threads; a worker that wants to do I/O opens its own queue.
///
/// Four methods are required. The rest describe optional features of a kind of volume. A wrapper
/// names the volume inside it ([`Volume::inner`]) and has that volume's features, unless it
/// overrides a method.
pub trait Volume: Send + Sync + Debug {
    /// Returns the properties of the volume. Cheap enough for control paths, not for every request.
    fn info(&self) -> Info;

    /// Opens a queue for the calling thread, on that thread's `io`.
    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError>;

    /// Bytes that identify the volume: the same each time the same volume is opened, different for
    /// different ones. Default serial numbers and identifiers are made from them. For a file it is
    /// the canonical path, so that it outlives copying and restoring the file.
    fn id(&self) -> Vec<u8>;

    /// Identifier that the volume has by itself and shows to every host (a namespace's NGUID, a
    /// device's WWID, an image's ID in its cluster); `None` for one that has only a name on this
    /// host ([`Volume::id`]), or none.
    fn own_id(&self) -> Option<Vec<u8>> {
        self.inner()?.own_id()
    }

    /// Storage objects that hold the volume's bytes, in words for messages. Another file at the
    /// same path is another object. Empty where objects cannot be told apart.
    fn media(&self) -> Vec<String> {
        self.inner().map_or_else(Vec::new, Volume::media)
    }

    /// The volume that this one passes its requests on to; `None` for a volume that stands by
    /// itself.
    fn inner(&self) -> Option<&dyn Volume>;

    /// Returns the writes that are atomic. Only a volume that implements this promises any, a
    /// wrapper included; without it a write may take several steps. Does not change to less.
    fn atomic_writes(&self) -> AtomicWrites {
        AtomicWrites::NONE
    }

    /// Returns the location of the volume's bytes, if they lie in an object that can be opened a
    /// second time. `None`: there is no second way to reach them, or the user is responsible for
    /// it.
    fn extent(&self) -> Option<Extent> {
        self.inner()?.extent()
    }

    /// Returns the lock of the file that the volume lies in, if the lock alone decides which
    /// process may write the volume, so that it may move to another process. `None`: there is no
    /// such lock, or the volume has more files, or state in this process.
    fn file_lock(&self) -> Option<Arc<FileLock>> {
        self.inner()?.file_lock()
    }

    /// Returns the handle that changes the volume's I/O limits, if it has limits.
    fn limits(&self) -> Option<LimitHandle> {
        self.inner()?.limits()
    }

    /// Returns the handle of the error policy, if there is one that can be changed.
    fn on_error(&self) -> Option<OnErrorHandle> {
        self.inner()?.on_error()
    }

    /// The memory file that holds the volume's bytes, if they are in memory that is to outlive the
    /// process ([`MemVolume::kept`](crate::MemVolume::kept)): a process that opens the volume next
    /// needs a descriptor of it.
    fn kept_memory(&self) -> Option<BorrowedFd<'_>> {
        self.inner()?.kept_memory()
    }

    /// Whether the volume, or one below it, encrypts its data before it reaches the storage.
    fn is_encrypted(&self) -> bool {
        self.inner().is_some_and(Volume::is_encrypted)
    }

    /// Sealed memory file with the key of an encrypted volume, if a process that opens the volume
    /// next is to have it without its passphrase.
    fn kept_key(&self) -> Option<BorrowedFd<'_>> {
        self.inner()?.kept_key()
    }

    /// The volume's share of the device that it lies in, if it has one that can be changed.
    fn share(&self) -> Option<ShareHandle> {
        self.inner()?.share()
    }

    /// Changes the size of the file behind the volume, in bytes, where that is possible. Servers of
    /// the volume are notified as of any other change of its size.
    ///
    /// # Errors
    /// [`VolumeError::FixedSize`]; it cannot have this size.
    fn resize(&self, bytes: u64) -> Result<(), VolumeError> {
        let inner = self.inner().ok_or(VolumeError::FixedSize)?;
        inner.resize(bytes)
    }

    /// Fills `buffer` with the bytes from `offset` on, both multiples of the block size, and waits
    /// for them on the calling thread. `None`: that needs a queue, also of wrappers. For control
    /// paths: a process in its sandbox can make no ring.
    fn read_at(&self, _offset: u64, _buffer: &mut Buffer) -> Option<Result<(), IoError>> {
        None
    }

    /// Returns whether storage is allocated at byte `offset`, and the number of bytes from there
    /// with the same state: at least 1, at most `len`. `None`: that is unknown, also of wrappers. A
    /// hole reads as zeroes. For control paths: may take as long as the file system takes.
    fn allocation(&self, _offset: u64, _len: u64) -> Option<(Allocation, u64)> {
        None
    }

    /// Rereads the size of the storage behind the volume, which may have been resized. `true` when
    /// the size in [`Volume::info`] has changed. May take as long as the device takes to answer.
    fn refresh(&self) -> Result<bool, VolumeError> {
        self.inner().map_or(Ok(false), Volume::refresh)
    }
}

/// A worker's queue into a volume. Belongs to the thread that opened it.
///
/// All methods are required, so that the compiler reports a method that a queue or a wrapper omits.
/// They are enough for everything that a volume does; [`FastPath`] does some of it in fewer steps.
///
/// Dropping a queue cancels the requests that can be cancelled and waits for the rest. Completions
/// of its requests that have not been seen are still returned by [`Io::poll`] (or are dropped, for
/// volumes that complete by [`VolumeQueue::poll`]).
pub trait VolumeQueue {
    /// Starts a request. `Some` when it is already done (memory, null, refused requests); otherwise
    /// its completion is returned by [`Io::poll`] or [`VolumeQueue::poll`]. [`Io::flush`] and
    /// [`FastPath::push`] send the started requests: a system call is done here for one request of
    /// a burst at most.
    ///
    /// Requests may be executed in any order. A flush covers the writes whose completions have been
    /// returned.
    fn submit(&mut self, request: Request) -> Option<Completion>;

    /// Passes to `done` the completions that do not arrive through the ring; returns their number.
    /// `done` may not start new requests on this queue. Called in each of the worker's rounds. A
    /// queue whose requests all complete through the ring or in `submit` returns 0.
    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize;

    /// Returns the number of outstanding requests, and the way in which the worker learns of their
    /// completion. Called before the worker sleeps, and in rounds that found nothing to do: no
    /// system call.
    fn state(&self) -> QueueState;

    /// Tries to end the request early. Its completion is still returned, with the result that it
    /// had by then. A queue that cannot end requests early does nothing here.
    fn cancel(&mut self, tag: u64);
}

/// State of a [`VolumeQueue`]: outstanding requests, and how the worker is woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueState {
    /// Requests that the device or the kernel works on, or that [`VolumeQueue::poll`] returns
    /// later: started and not completed. Those that only wait for a limit's tokens do not count.
    pub in_flight: usize,
    /// The way in which the worker learns that it has to call [`VolumeQueue::poll`].
    pub wake: Wake,
}

impl QueueState {
    /// State of a queue without outstanding requests.
    pub const IDLE: Self = Self::of_ring(0);

    /// State with `in_flight` outstanding requests, all of which complete through the ring or wake
    /// the worker otherwise ([`Io::watch`]).
    pub const fn of_ring(in_flight: usize) -> Self {
        Self {
            in_flight,
            wake: Wake::Event,
        }
    }
}

/// The fast path into a volume: the operations of [`VolumeQueue`], in fewer steps. Optional as a
/// whole ([`OpenQueue::new`] is for queues without it), but not in parts. No method has a default:
/// a wrapper that offers the fast path must forward each method, and the compiler reports a method
/// that is added later in every wrapper.
///
/// ```compile_fail,E0046
/// # use volume::{Completion, FastPath, OpenQueue, QueueState, Request, VolumeQueue};
/// struct Wrapper(OpenQueue);
/// # impl VolumeQueue for Wrapper {
/// #     fn submit(&mut self, request: Request) -> Option<Completion> {
/// #         self.0.submit(request)
/// #     }
/// #     fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
/// #         self.0.poll(done)
/// #     }
/// #     fn state(&self) -> QueueState {
/// #         self.0.state()
/// #     }
/// #     fn cancel(&mut self, tag: u64) {
/// #         self.0.cancel(tag);
/// #     }
/// # }
/// impl FastPath for Wrapper {
///     fn push(&mut self) {
///         self.0.push();
///     }
///     // "missing: `start`, `is_immediate`, `try_now`, `prefetches`, `prefetch`, ..."
/// }
/// ```
pub trait FastPath: VolumeQueue {
    /// [`VolumeQueue::submit`] of a read or write of all of `data`, with no [`Request`] that is
    /// moved from call to call.
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion>;

    /// Ends a batch of started requests. It is sent at once when the worker's ring has nothing else
    /// in flight; requests for a busy device are sent with [`Io::flush`].
    fn push(&mut self);

    /// Whether [`FastPath::try_now`] does anything. Changes only by [`OpenQueue::update`].
    fn is_immediate(&self) -> bool;

    /// Does a read or write of all of `data` within the call, where there is nothing to wait for
    /// (memory, null, files in memory): there is no request to make, to name and to return. `None`:
    /// not this volume, or not this request; [`VolumeQueue::submit`] takes it, and nothing has
    /// happened yet.
    fn try_now(&mut self, op: Op, offset: u64, data: View<'_>) -> Option<Result<(), IoError>>;

    /// Whether [`FastPath::prefetch`] does anything. Changes only by [`OpenQueue::update`].
    fn prefetches(&self) -> bool;

    /// Hints that a request like this follows soon, most likely the next one, so that its data may
    /// be fetched meanwhile. The request is not checked yet, and may never follow. No effect but
    /// speed.
    fn prefetch(&mut self, op: Op, offset: u64, len: u64);

    /// Copies by the file system. `None`, which is the default: data is to be copied by reads and
    /// writes, because the volume is no file, or something is to be done for each request.
    fn range_copy(&mut self) -> Option<&mut dyn RangeCopy> {
        None
    }
}

/// Copies by the file system, for the queue of a volume in a file.
pub trait RangeCopy {
    /// A range of the volume, for [`RangeCopy::copy`] of this or another queue of the same worker.
    /// `None`: it does not lie in a file that takes part in such copies, and it is to be read.
    fn copy_source(&mut self, offset: u64, len: u64) -> Option<CopySource>;

    /// Has the file system copy, without reads and writes. `false`: not to this volume, or not from
    /// there, or not now; nothing has happened. `true`: [`VolumeQueue::poll`] returns a completion,
    /// without data. After an error, the range is as after a write that failed, and the copy may be
    /// done by reads and writes instead. This does not hold for
    /// [`IoErrorKind::NotDurable`](crate::IoErrorKind::NotDurable), which may concern other writes
    /// too.
    fn copy(&mut self, copy: CopyRequest) -> bool;
}

/// A queue that [`Volume::open`] has made, with or without a fast path of its own. Its users call
/// the methods of both traits, and need not check which it is. Each call is one virtual call,
/// either way.
pub struct OpenQueue {
    queue: Box<dyn FastPath>,
    /// Parts that successful requests do not touch, in one box: the queue stands beside the fields
    /// that each command reads.
    extras: Option<Box<QueueExtras>>,
}

#[derive(Default)]
struct QueueExtras {
    /// Error policy of the queue.
    policy: Option<QueuePolicy>,
    /// Layers that nobody has needed yet, the innermost first.
    dormant: Vec<Box<dyn DormantLayer>>,
}

/// Layer of a volume that costs nothing until somebody needs it (a limit, a share of the device):
/// [`OpenQueue::update`] then puts it in front of the queue.
pub(crate) trait DormantLayer {
    /// Returns whether the layer is needed by now.
    fn is_needed(&self) -> bool;

    /// Puts the layer in front of `queue`.
    fn wrap(self: Box<Self>, queue: OpenQueue) -> OpenQueue;
}

impl OpenQueue {
    /// A queue without a fast path: the calls of [`FastPath`] go to [`VolumeQueue::submit`], or do
    /// nothing where nothing is needed.
    pub fn new(queue: impl VolumeQueue + 'static) -> Self {
        Self::with_fast_path(NoFastPath(queue))
    }

    /// Creates an open queue with a fast path for requests.
    pub fn with_fast_path(queue: impl FastPath + 'static) -> Self {
        Self {
            queue: Box::new(queue),
            extras: None,
        }
    }

    fn extras(&mut self) -> &mut QueueExtras {
        self.extras.get_or_insert_default()
    }

    /// Wraps the queue in another one that `wrap` makes of it. The error policy is unchanged, and
    /// repeated requests pass through the outer queue. So do limits that are set later.
    pub fn wrapped(mut self, wrap: impl FnOnce(Self) -> Self) -> Self {
        let extras = self.extras.take();
        Self {
            extras,
            ..wrap(self)
        }
    }

    /// Adds a layer outside of the queue, which takes effect once it is needed.
    pub(crate) fn with_layer(mut self, layer: impl DormantLayer + 'static) -> Self {
        self.extras().dormant.push(Box::new(layer));
        self.update();
        self
    }

    /// Puts the layers in front of the queue that are needed by now: limits or a weight were set
    /// for the first time ([`LimitHandle::set`], [`ShareHandle::set_weight`]). Requests that have
    /// been started are not affected. Returns whether the queue has changed, and with it the
    /// results of [`FastPath::is_immediate`] and [`FastPath::prefetches`]. The owner of the queue
    /// calls this on the queue's thread after such a change, so that the path of a request needs no
    /// test.
    pub fn update(&mut self) -> bool {
        let Some(extras) = &mut self.extras else {
            return false;
        };
        if !extras.dormant.iter().any(|layer| layer.is_needed()) {
            return false;
        }
        let layers = std::mem::take(&mut extras.dormant);
        let inner = std::mem::replace(&mut self.queue, Box::new(NoFastPath(NoQueue)));
        let mut queue = Self {
            queue: inner,
            extras: None,
        };
        for layer in layers {
            if layer.is_needed() {
                queue = layer.wrap(queue);
            } else {
                queue.extras().dormant.push(layer);
            }
        }
        self.queue = queue.queue;
        self.extras().dormant = queue.extras.map_or_else(Vec::new, |extras| extras.dormant);
        true
    }

    pub(crate) fn with_policy(mut self, policy: QueuePolicy) -> Self {
        self.extras().policy = Some(policy);
        self
    }

    /// Offers a failed request to the policy, as it was submitted, with the data that its
    /// completion has returned. A front-end that gets a failed completion of a request of its
    /// client calls this, but not for one that succeeded. `Some`: the error is to be reported to
    /// the client. `None`: the volume's policy ([`OnErrorVolume`](crate::OnErrorVolume)) has the
    /// request repeated, now or later; another completion follows, under the same tag.
    #[cold]
    #[inline(never)]
    pub fn failed(&mut self, request: Request, error: IoError) -> Option<Completion> {
        let extras = self.extras.as_mut();
        match extras.and_then(|extras| extras.policy.as_mut()) {
            Some(policy) => policy.failed(&mut self.queue, request, error),
            None => Some(request.complete(Err(error))),
        }
    }

    /// Returns a source for a copy by the file system ([`RangeCopy::copy_source`]), if any.
    pub fn copy_source(&mut self, offset: u64, len: u64) -> Option<CopySource> {
        self.queue.range_copy()?.copy_source(offset, len)
    }

    /// Starts a copy by the file system ([`RangeCopy::copy`]); returns whether it was started.
    pub fn copy(&mut self, copy: CopyRequest) -> bool {
        let files = self.queue.range_copy();
        files.is_some_and(|files| files.copy(copy))
    }

    /// Whether [`OpenQueue::failed`] would keep a request. For errors of [`FastPath::try_now`],
    /// after which there is no request: a request is to be submitted instead. Otherwise the failure
    /// is counted, and the error is to be reported to the client.
    #[cold]
    pub fn keeps_failed(&self, op: Op, error: IoError) -> bool {
        let extras = self.extras.as_ref();
        let policy = extras.and_then(|extras| extras.policy.as_ref());
        policy.is_some_and(|policy| policy.takes_or_counts(op, error))
    }
}

impl Deref for OpenQueue {
    type Target = dyn FastPath;

    #[inline(always)]
    fn deref(&self) -> &(dyn FastPath + 'static) {
        &*self.queue
    }
}

impl DerefMut for OpenQueue {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut (dyn FastPath + 'static) {
        &mut *self.queue
    }
}

impl Debug for OpenQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenQueue")
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

/// Placeholder for a queue while another queue is put in front of it.
pub(crate) struct NoQueue;

impl VolumeQueue for NoQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        Some(request.complete(Err(IoErrorKind::Gone.into())))
    }

    fn poll(&mut self, _: &mut dyn FnMut(Completion)) -> usize {
        0
    }

    fn state(&self) -> QueueState {
        QueueState::IDLE
    }

    fn cancel(&mut self, _: u64) {}
}

/// The fast path of a queue that has none.
pub(crate) struct NoFastPath<Q>(pub(crate) Q);

impl<Q: VolumeQueue> VolumeQueue for NoFastPath<Q> {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        self.0.submit(request)
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        self.0.poll(done)
    }

    fn state(&self) -> QueueState {
        self.0.state()
    }

    fn cancel(&mut self, tag: u64) {
        self.0.cancel(tag);
    }
}

impl<Q: VolumeQueue> FastPath for NoFastPath<Q> {
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        self.0.submit(Request::transfer(tag, op, offset, data))
    }

    /// Does nothing: [`Io::flush`] submits the requests at the end of the round.
    fn push(&mut self) {}

    fn is_immediate(&self) -> bool {
        false
    }

    fn try_now(&mut self, _: Op, _: u64, _: View<'_>) -> Option<Result<(), IoError>> {
        None
    }

    fn prefetches(&self) -> bool {
        false
    }

    fn prefetch(&mut self, _: Op, _: u64, _: u64) {}
}
