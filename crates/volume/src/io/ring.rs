//! The ring itself: slots that own requests while the kernel works on them.
//!
//! The one rule that makes this safe: whatever an entry in the ring points to (the request's segments, the bounce
//! buffer, the I/O vectors, the zero buffer, the file) belongs to a slot, and a slot is emptied only when the kernel
//! has posted the completion of its one operation. Nothing is freed while the kernel may still write to it, not even
//! when queues are dropped: [`Ring::close`] waits.
#![allow(unsafe_code)]

use super::IoCounters;
use super::job::{Abilities, Job, Next, Step};
use super::pool::BouncePool;
use super::setup::{self, Mode};
use crate::{Completion, IoError, IoErrorKind, IoOptions, Op, Request, VolumeError};
use dma::{Buffer, Segment};
use io_uring::{IoUring, opcode, squeue, types};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Most files that get a place in the kernel's table of registered files; others go by descriptor.
const REGISTERED_FILES: u32 = 64;
/// Most segments in one operation (`UIO_MAXIOV`); requests with more take several operations.
const MAX_SEGMENTS: usize = 1024;
/// Most bytes in one operation: below the kernel's own limit of 2 GiB less a page, and a multiple of every block.
const MAX_BYTES: u64 = 1 << 30;
/// Size of the buffer from which zeroes are written.
const ZEROES: usize = 1 << 20;
/// Marks completions that no slot waits for.
const NOBODY: u64 = u64::MAX;

/// A file as the ring needs to know it.
#[derive(Debug)]
pub(crate) struct RingFile {
    /// The open file, kept open while the ring uses it.
    pub(crate) fd: Arc<OwnedFd>,
    /// What direct I/O demands, or `None` for buffered I/O.
    pub(crate) direct: Option<Alignment>,
    /// What the file supports.
    pub(crate) abilities: Arc<Abilities>,
}

/// What direct I/O demands; both are powers of two, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Alignment {
    /// Of addresses in memory.
    pub(crate) memory: u32,
    /// Of offsets and lengths.
    pub(crate) block: u32,
}

impl RingFile {
    /// The request's memory can be handed to the kernel as it is.
    fn reaches(&self, request: &Request) -> bool {
        let Some(Alignment { memory, block }) = self.direct else {
            return true;
        };
        let (memory, block) = (memory as usize - 1, block as usize - 1);
        request
            .data
            .segments()
            .iter()
            .all(|segment| segment.as_ptr().addr() & memory == 0 && segment.len() & block == 0)
    }

    fn unit(&self) -> u64 {
        self.direct
            .map_or(1, |alignment| u64::from(alignment.block.max(1)))
    }
}

struct OpenFile {
    file: RingFile,
    /// Its index in the kernel's table.
    registered: Option<u32>,
}

/// A place for one request in flight.
#[derive(Default)]
struct Slot {
    job: Option<Job>,
    /// I/O vectors of the current operation, where they are not the request's own: what remains after a part of the
    /// data has moved.
    vectors: Vec<libc::iovec>,
    /// Tells this use of the slot from earlier ones.
    generation: u32,
}

/// A worker's ring. Interior mutability, so that every queue on it can hold it; all borrows end inside this module,
/// never while a caller's code runs.
pub(crate) struct Ring {
    core: RefCell<Core>,
    event: OwnedFd,
    /// The kernel has been asked to signal `event`.
    armed: Cell<bool>,
}

struct Core {
    uring: IoUring,
    mode: Mode,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Requests that ended while nobody polled; room for all slots.
    ready: VecDeque<Completion>,
    /// Entries written to the ring and not yet sent.
    unsent: usize,
    /// Some of them continue requests: they are sent without waiting for the worker to ask.
    urgent: bool,
    files: Vec<Option<OpenFile>>,
    /// Free places in the kernel's table of files.
    places: Vec<u32>,
    bounce: BouncePool,
    zeroes: Option<Buffer>,
    counters: IoCounters,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("event", &self.event)
            .finish_non_exhaustive()
    }
}

impl Ring {
    /// A ring for this thread.
    pub(crate) fn new(options: &IoOptions) -> Result<Self, VolumeError> {
        let (uring, mode) = setup::ring(options.capacity.clamp(1, super::MAX_CAPACITY))?;
        Self::with(uring, mode, options)
    }

    /// The same on a given ring of the kernel's.
    pub(super) fn with(
        uring: IoUring,
        mode: Mode,
        options: &IoOptions,
    ) -> Result<Self, VolumeError> {
        let capacity = options.capacity.clamp(1, super::MAX_CAPACITY);
        let event = event(&uring).map_err(|source| VolumeError::NoIoUring {
            why: "no event descriptor for it",
            source,
        })?;
        let places = match uring.submitter().register_files_sparse(REGISTERED_FILES) {
            Ok(()) => (0..REGISTERED_FILES).rev().collect(),
            Err(error) => {
                tracing::debug!("io_uring: no registered files ({error}), using descriptors");
                Vec::new()
            }
        };
        let mut slots = Vec::new();
        slots.resize_with(capacity as usize, Slot::default);
        let mut core = Core {
            uring,
            mode,
            slots,
            free: (0..capacity).rev().collect(),
            ready: VecDeque::with_capacity(capacity as usize),
            unsent: 0,
            urgent: false,
            files: Vec::new(),
            places,
            bounce: BouncePool::new(options.bounce_bytes),
            zeroes: None,
            counters: IoCounters::default(),
        };
        core.signal(false);
        Ok(Self {
            core: RefCell::new(core),
            event,
            armed: Cell::new(false),
        })
    }

    /// Makes a file known; the result names it from now on.
    pub(crate) fn open(&self, file: RingFile) -> usize {
        let core = &mut *self.core.borrow_mut();
        let registered = core.places.pop().filter(|&place| {
            match core
                .uring
                .submitter()
                .register_files_update(place, &[file.fd.as_raw_fd()])
            {
                Ok(_) => true,
                Err(error) => {
                    tracing::debug!(
                        "io_uring: file not registered ({error}), using its descriptor"
                    );
                    false
                }
            }
        });
        let open = OpenFile { file, registered };
        match core.files.iter().position(Option::is_none) {
            Some(index) => {
                core.files[index] = Some(open);
                index
            }
            None => {
                core.files.push(Some(open));
                core.files.len() - 1
            }
        }
    }

    /// Forgets a file: cancels its requests, waits until the kernel has finished with all of them, and keeps their
    /// completions for the next [`Ring::poll`].
    pub(crate) fn close(&self, file: usize) {
        let core = &mut *self.core.borrow_mut();
        core.finish(Some(file));
        let Some(open) = core.files.get_mut(file).and_then(Option::take) else {
            return;
        };
        if let Some(place) = open.registered
            && core
                .uring
                .submitter()
                .register_files_update(place, &[-1])
                .is_ok()
        {
            core.places.push(place);
        }
    }

    /// Starts a request on a file. `Some`: it could not be started.
    pub(crate) fn submit(&self, file: usize, request: Request) -> Option<Completion> {
        self.core.borrow_mut().begin(file, request)
    }

    /// Tries to end a request early.
    pub(crate) fn cancel(&self, file: usize, tag: u64) {
        let core = &mut *self.core.borrow_mut();
        let found = core.slots.iter().position(|slot| {
            slot.job
                .as_ref()
                .is_some_and(|job| job.file == file && job.request.tag == tag)
        });
        if let Some(index) = found {
            core.cancel(index);
        }
    }

    /// Requests started and not handed out.
    pub(crate) fn in_flight(&self) -> usize {
        let core = self.core.borrow();
        core.slots.len() - core.free.len() + core.ready.len()
    }

    /// Sends what has been started. `true` when all of it has been taken.
    pub(crate) fn flush(&self) -> bool {
        self.core.borrow_mut().send()
    }

    /// Hands out completions.
    pub(crate) fn poll(&self, done: &mut dyn FnMut(Completion)) -> usize {
        if self.armed.take() {
            self.core.borrow_mut().signal(false);
            self.drain();
        }
        let mut asked = false;
        let mut count = 0;
        // `done` may start requests that are finished before this loop is: a bound keeps it from going on for ever.
        let limit = self.core.borrow().slots.len();
        while count < limit {
            // The borrow ends with the statement: `done` may come back here by `submit`.
            let next = self.core.borrow_mut().reap();
            match next {
                Some(completion) => {
                    count += 1;
                    done(completion);
                }
                None if !asked && self.core.borrow_mut().kernel_has_work() => {
                    asked = true;
                    self.core.borrow_mut().enter();
                }
                None => break,
            }
        }
        let core = &mut *self.core.borrow_mut();
        if core.urgent {
            core.send();
        }
        count
    }

    /// Prepares for sleep; see [`crate::Io::arm`].
    pub(crate) fn arm(&self) -> bool {
        let core = &mut *self.core.borrow_mut();
        if !core.send() || !core.ready.is_empty() {
            return false;
        }
        self.drain();
        self.armed.set(true);
        core.signal(true);
        // The kernel queues the work and then looks whether to signal; this side asks for the signal and then looks
        // for work. With a full fence on both sides, one of them sees the other.
        fence(Ordering::SeqCst);
        if core.free.len() == core.slots.len() {
            return true;
        }
        if core.mode == Mode::Deferred {
            core.run_deferred();
        }
        !core.kernel_has_work() && core.uring.completion().is_empty()
    }

    /// The descriptor to sleep on.
    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// What has passed through.
    pub(crate) fn counters(&self) -> IoCounters {
        self.core.borrow().counters
    }

    fn drain(&self) {
        // Nothing to read is the usual case and no error.
        let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
    }
}

/// An event descriptor that the ring signals.
fn event(uring: &IoUring) -> io::Result<OwnedFd> {
    use rustix::event::{EventfdFlags, eventfd};
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    uring.submitter().register_eventfd(event.as_raw_fd())?;
    Ok(event)
}

impl Core {
    fn begin(&mut self, file: usize, request: Request) -> Option<Completion> {
        let Some(open) = self.files.get(file).and_then(Option::as_ref) else {
            return Some(request.complete(Err(IoErrorKind::Gone.into())));
        };
        let Some(index) = self.free.pop() else {
            return Some(request.complete(Err(IoErrorKind::Busy.into())));
        };
        let reachable = !request.op.has_data() || open.file.reaches(&request);
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.job = Some(Job::new(request, file, reachable, &open.file.abilities));
        self.counters.requests += 1;
        match self.operate(index as usize) {
            Ok(()) => None,
            Err(kind) => self.end(index as usize, Err(kind.into())),
        }
    }

    /// Puts the operation that a slot needs next into the ring.
    fn operate(&mut self, index: usize) -> Result<(), IoErrorKind> {
        let entry = self
            .entry(index)?
            .user_data(name(index, self.slots[index].generation));
        self.counters.operations += 1;
        self.push(&entry)
    }

    fn entry(&mut self, index: usize) -> Result<squeue::Entry, IoErrorKind> {
        let Slot { job, vectors, .. } = &mut self.slots[index];
        let job = job.as_mut().ok_or(IoErrorKind::Gone)?;
        let open = self
            .files
            .get(job.file)
            .and_then(Option::as_ref)
            .ok_or(IoErrorKind::Gone)?;
        let target = match open.registered {
            Some(place) => Target::Place(place),
            None => Target::Descriptor(open.file.fd.as_raw_fd()),
        };
        let offset = job
            .request
            .offset
            .checked_add(job.done)
            .ok_or(IoErrorKind::OutOfRange)?;
        let (write, flags) = match job.request.op {
            Op::Read => (false, 0),
            Op::Write { fua: true } => (true, libc::RWF_DSYNC),
            _ => (true, 0),
        };
        Ok(match job.step {
            Step::Data => {
                let data = &job.request.data;
                match data.segments() {
                    [one] if job.done == 0 => {
                        target.contiguous(write, one.as_ptr(), one.len() as u64, offset, flags)
                    }
                    many if job.done == 0 && many.len() <= MAX_SEGMENTS => {
                        target.transfer(write, data.as_iovecs(), many.len(), offset, flags)
                    }
                    many => {
                        remaining(vectors, many, job.done);
                        target.transfer(write, vectors.as_ptr(), vectors.len(), offset, flags)
                    }
                }
            }
            Step::Bounce => {
                if job.bounce.is_none() {
                    job.bounce = Some(self.bounce.take(job.left()));
                    self.counters.bounced += 1;
                }
                let len = job.load_bounce().ok_or(IoErrorKind::Memory)?;
                let buffer = job.bounce.as_mut().ok_or(IoErrorKind::Memory)?;
                target.contiguous(write, buffer.as_mut_ptr(), len as u64, offset, flags)
            }
            Step::Zeroes => {
                let zeroes = self.zeroes.get_or_insert_with(|| Buffer::new(ZEROES));
                let len = job.left().min(zeroes.len() as u64);
                target.contiguous(true, zeroes.as_mut_ptr(), len, offset, flags)
            }
            Step::Punch => target.fallocate(
                libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                offset,
                job.left(),
            ),
            Step::ZeroRange => target.fallocate(
                libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
                offset,
                job.left(),
            ),
            Step::Sync => target.sync(),
        })
    }

    fn push(&mut self, entry: &squeue::Entry) -> Result<(), IoErrorKind> {
        for _ in 0..2 {
            // SAFETY: everything that the entry points to belongs to a slot (or to the ring: the zero buffer, which
            // lives as long) and stays there until the completion has been seen; see the module's documentation.
            if unsafe { self.uring.submission().push(entry) }.is_ok() {
                self.unsent += 1;
                return Ok(());
            }
            // Full only when cancellations came on top of a request in every slot.
            self.send();
        }
        Err(IoErrorKind::Busy)
    }

    /// Sends what is unsent. `true` when nothing is left.
    fn send(&mut self) -> bool {
        if self.unsent > 0 {
            self.enter();
        }
        self.unsent == 0
    }

    /// One system call: sends, and lets the kernel do what it has put off.
    fn enter(&mut self) {
        self.counters.system_calls += 1;
        let result = self.uring.submit();
        self.sent(result.map(drop));
    }

    /// After a system call: what is left to send.
    fn sent(&mut self, result: io::Result<()>) {
        self.unsent = self.uring.submission().len();
        self.urgent &= self.unsent > 0;
        if let Err(error) = result {
            match error.raw_os_error() {
                // For now: interrupted, short of memory, completions to be taken first. The next call tries again.
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => {}
                _ => tracing::error!("io_uring: submission failed: {error}"),
            }
        }
    }

    /// The kernel waits for a system call before it can post completions.
    fn kernel_has_work(&mut self) -> bool {
        let submission = self.uring.submission();
        submission.taskrun() || submission.cq_overflow()
    }

    /// Lets the kernel run the completion work that it holds back in [`Mode::Deferred`].
    fn run_deferred(&mut self) {
        const GETEVENTS: u32 = 1;
        self.counters.system_calls += 1;
        // SAFETY: nothing is submitted and nothing waited for; there is no argument that could be wrong.
        let result = unsafe {
            self.uring
                .submitter()
                .enter::<libc::sigset_t>(0, 0, GETEVENTS, None)
        };
        self.sent(result.map(drop));
    }

    /// Switches the event descriptor. In the other modes it always signals: only with deferred work is there a system
    /// call before sleeping that orders this store before the kernel's look at the flag.
    fn signal(&mut self, on: bool) {
        if self.mode == Mode::Deferred {
            let completion = self.uring.completion();
            if on {
                completion.enable_eventfd();
            } else {
                completion.disable_eventfd();
            }
        }
    }

    /// The next completion that has arrived.
    fn reap(&mut self) -> Option<Completion> {
        if let Some(completion) = self.ready.pop_front() {
            return Some(completion);
        }
        loop {
            let (user_data, result) = self.posted()?;
            if let Some(completion) = self.answer(user_data, result) {
                return Some(completion);
            }
        }
    }

    /// The next entry that the kernel has posted: user data and result.
    fn posted(&mut self) -> Option<(u64, i32)> {
        let entry = self.uring.completion().next()?;
        Some((entry.user_data(), entry.result()))
    }

    /// The kernel's answer to one operation: the request's end, or its next operation.
    fn answer(&mut self, user_data: u64, answer: i32) -> Option<Completion> {
        let index = user_data as u32 as usize;
        let slot = self.slots.get_mut(index)?;
        if user_data == NOBODY || name(index, slot.generation) != user_data {
            return None;
        }
        let job = slot.job.as_mut()?;
        let next = match self.files.get(job.file).and_then(Option::as_ref) {
            Some(open) => job.advance(answer, open.file.unit(), &open.file.abilities),
            None => Next::Done(Err(IoErrorKind::Gone.into())),
        };
        match next {
            Next::Done(result) => self.end(index, result),
            Next::Again => {
                self.counters.continued += 1;
                self.urgent = true;
                match self.operate(index) {
                    Ok(()) => None,
                    Err(kind) => self.end(index, Err(kind.into())),
                }
            }
        }
    }

    /// Empties a slot.
    fn end(&mut self, index: usize, result: Result<(), IoError>) -> Option<Completion> {
        let mut job = self.slots.get_mut(index)?.job.take()?;
        if let Some(buffer) = job.bounce.take() {
            self.bounce.put(buffer);
        }
        self.free.push(index as u32);
        Some(job.request.complete(result))
    }

    fn cancel(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        let Some(job) = slot.job.as_mut() else { return };
        if std::mem::replace(&mut job.cancelled, true) {
            return;
        }
        let target = name(index, slot.generation);
        // Not to be had for lack of room: the request then ends by itself.
        let _ = self.push(&opcode::AsyncCancel::new(target).build().user_data(NOBODY));
    }

    /// Ends the requests of a file (or all), and waits for the kernel to let go of them.
    fn finish(&mut self, file: Option<usize>) {
        let concerns = |slot: &Slot| {
            slot.job
                .as_ref()
                .is_some_and(|job| file.is_none_or(|file| job.file == file))
        };
        for index in 0..self.slots.len() {
            if concerns(&self.slots[index]) {
                self.cancel(index);
            }
        }
        let mut failures = 0;
        while self.slots.iter().any(concerns) {
            self.counters.system_calls += 1;
            let result = self.uring.submitter().submit_and_wait(1);
            failures = if result.is_ok() { 0 } else { failures + 1 };
            self.sent(result.map(drop));
            while let Some((user_data, result)) = self.posted() {
                if let Some(completion) = self.answer(user_data, result) {
                    self.ready.push_back(completion);
                }
            }
            if failures > 1_000_000 {
                // The kernel neither finishes nor waits. What it may still write to must never be used for anything
                // else, so it is given up.
                tracing::error!("io_uring: requests do not end; giving up their memory");
                for slot in self.slots.iter_mut().filter(|slot| concerns(slot)) {
                    std::mem::forget(slot.job.take());
                    std::mem::forget(std::mem::take(&mut slot.vectors));
                }
                std::mem::forget(self.zeroes.take());
            }
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // Every queue closes its file, so nothing is left; but this is the last moment at which it could be waited for.
        self.finish(None);
    }
}

/// What the kernel calls an operation of a slot.
fn name(index: usize, generation: u32) -> u64 {
    u64::from(generation) << 32 | index as u64
}

/// Makes `vectors` what remains of `segments` after `done` bytes.
fn remaining(vectors: &mut Vec<libc::iovec>, segments: &[Segment], done: u64) {
    vectors.clear();
    let mut skip = done;
    for segment in segments {
        if vectors.len() == MAX_SEGMENTS {
            break;
        }
        let len = segment.len() as u64;
        if skip >= len {
            skip -= len;
            continue;
        }
        // `skip` is less than the segment's length.
        let (base, rest) = (
            segment.as_ptr().wrapping_add(skip as usize),
            segment.len() - skip as usize,
        );
        vectors.push(libc::iovec {
            iov_base: base.cast(),
            iov_len: rest,
        });
        skip = 0;
    }
}

/// How the kernel finds the file.
#[derive(Clone, Copy)]
enum Target {
    Place(u32),
    Descriptor(i32),
}

/// Builds an entry for either way to name the file.
macro_rules! entry {
    ($target:expr, |$file:ident| $build:expr) => {
        match $target {
            Target::Place(place) => {
                let $file = types::Fixed(place);
                $build
            }
            Target::Descriptor(descriptor) => {
                let $file = types::Fd(descriptor);
                $build
            }
        }
    };
}

impl Target {
    /// Read or write of several pieces of memory.
    fn transfer(
        self,
        write: bool,
        first: *const libc::iovec,
        count: usize,
        offset: u64,
        flags: i32,
    ) -> squeue::Entry {
        // At most MAX_SEGMENTS.
        let count = count as u32;
        if write {
            entry!(self, |file| opcode::Writev::new(file, first, count)
                .offset(offset)
                .rw_flags(flags)
                .build())
        } else {
            entry!(self, |file| opcode::Readv::new(file, first, count)
                .offset(offset)
                .rw_flags(flags)
                .build())
        }
    }

    /// Read or write of one piece of memory; only its first [`MAX_BYTES`], when it is longer.
    fn contiguous(
        self,
        write: bool,
        at: *mut u8,
        len: u64,
        offset: u64,
        flags: i32,
    ) -> squeue::Entry {
        let len = len.min(MAX_BYTES) as u32;
        if write {
            entry!(self, |file| opcode::Write::new(file, at, len)
                .offset(offset)
                .rw_flags(flags)
                .build())
        } else {
            entry!(self, |file| opcode::Read::new(file, at, len)
                .offset(offset)
                .rw_flags(flags)
                .build())
        }
    }

    fn fallocate(self, mode: i32, offset: u64, len: u64) -> squeue::Entry {
        entry!(self, |file| opcode::Fallocate::new(file, len)
            .offset(offset)
            .mode(mode)
            .build())
    }

    fn sync(self) -> squeue::Entry {
        entry!(self, |file| opcode::Fsync::new(file)
            .flags(types::FsyncFlags::DATASYNC)
            .build())
    }
}
