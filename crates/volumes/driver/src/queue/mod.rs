//! I/O queue pairs.
//!
//! ```text
//! submit -> slot (CID, buffer) -> submission queue --doorbell--> controller
//! poll   <- slot (buffer)      <- completion queue <----------- controller
//! ```
//!
//! A queue pair belongs to one thread. The fast path has no lock, no allocation and no system call.
//! A doorbell is a store where the registers are mapped, and mostly unnecessary with shadow
//! doorbells. Module `core` also handles resets and time-outs, and `split` divides requests.

pub(crate) mod core;
pub(crate) mod data;
pub(crate) mod host_doorbell;
mod nap;
pub mod raw;
mod reap;
mod request;
#[allow(unsafe_code)]
pub(crate) mod ring;
mod slots;
pub(crate) mod split;
mod wait;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub use request::{Completion, Op, QueueCounters, Request, Tap, TapResult};
pub use ring::ShadowBuffers;

use crate::buffer::DmaBuffer;
use crate::control::{DeviceState, SharedDevice};
use crate::error::{CommandError, Error, RefusedRequest, SubmitRefusal};
use crate::options::QueueOptions;
use core::{Data, QueueCore};
use data::{IovaRange, Method};
use nvme_volume::Namespace;
pub(crate) use slots::SINGLE;
use split::SplitRequest;
use wait::Waiter;

/// An I/O queue pair for one namespace. It is `Send`, but only one thread uses it at once; each
/// thread creates its own.
///
/// A request owns its buffer until its completion returns it. Dropping a queue pair with
/// outstanding requests is safe: the queue is deleted, which ends them, and their memory is freed
/// only then.
pub struct QueuePair {
    /// State of the queue pair; `None` only after it was dropped.
    core: Option<Box<QueueCore>>,
    waiter: Waiter,
    bounce: Option<DmaBuffer>,
}

impl std::fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueuePair")
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

impl QueuePair {
    pub(crate) fn create(
        shared: &Arc<SharedDevice>,
        namespace: &Namespace,
        options: QueueOptions,
    ) -> Result<Self, Error> {
        let qid = shared.lock().take_qid()?;
        let made = QueueCore::new(shared, namespace, options, qid).and_then(|mut core| {
            core.attach()?;
            Ok(core)
        });
        match made {
            Ok(core) => Ok(Self {
                core: Some(Box::new(core)),
                waiter: Waiter::new(options.poll_window),
                bounce: None,
            }),
            Err(error) => {
                // An unanswered admin command may have created the queue, so its number is not used
                // again.
                if !matches!(error, Error::AdminTimeout { .. }) {
                    shared.lock().free_qid(qid);
                }
                Err(error)
            }
        }
    }

    #[inline]
    pub(crate) fn core(&mut self) -> Option<&mut QueueCore> {
        self.core.as_deref_mut()
    }

    /// Returns the maximum number of blocks of one command; the `submit_` functions accept no more.
    pub fn max_blocks(&self) -> u32 {
        self.core.as_ref().map_or(0, |core| core.max_blocks())
    }

    /// Returns the logical block size of the namespace in bytes.
    pub fn block_size(&self) -> u32 {
        self.core.as_ref().map_or(0, |core| 1 << core.block_shift)
    }

    /// Returns the maximum number of outstanding commands of the queue pair.
    pub fn depth(&self) -> usize {
        self.core.as_ref().map_or(0, |core| core.slots.count())
    }

    /// Returns the number of outstanding commands, including those not yet announced to the
    /// controller, and requests that wait to be split.
    pub fn in_flight(&self) -> usize {
        self.core.as_ref().map_or(0, |core| {
            core.slots.in_flight() + core.parents.in_flight() + core.finished.len()
        })
    }

    /// Returns the identifier of the queue pair in the controller.
    pub fn qid(&self) -> u16 {
        self.core.as_ref().map_or(0, |core| core.qid)
    }

    /// Returns the queue pair's counters.
    pub fn counters(&self) -> QueueCounters {
        let mut counters = self
            .core
            .as_ref()
            .map_or_else(QueueCounters::default, |core| core.counters());
        counters.sleeps = self.waiter.sleeps;
        counters
    }

    /// Sets a hook that sees and changes completion entries before the queue pair does, for tests.
    pub fn set_tap(&mut self, tap: Option<Box<dyn Tap>>) {
        if let Some(core) = self.core() {
            core.tap = tap;
        }
    }

    /// Submits a read of up to [`QueuePair::max_blocks`] blocks. [`QueuePair::ring`] or
    /// [`QueuePair::poll`] rings the doorbell.
    ///
    /// # Errors
    /// [`RefusedRequest`], which returns the buffer.
    #[inline]
    pub fn submit_read(
        &mut self,
        lba: u64,
        blocks: u32,
        buffer: DmaBuffer,
        user_data: u64,
    ) -> Result<(), RefusedRequest> {
        self.submit_one(Op::Read, lba, blocks, buffer, user_data)
    }

    /// Submits a write of up to [`QueuePair::max_blocks`] blocks. [`QueuePair::ring`] or
    /// [`QueuePair::poll`] rings the doorbell.
    ///
    /// # Errors
    /// [`RefusedRequest`], which returns the buffer.
    #[inline]
    pub fn submit_write(
        &mut self,
        lba: u64,
        blocks: u32,
        buffer: DmaBuffer,
        fua: bool,
        user_data: u64,
    ) -> Result<(), RefusedRequest> {
        self.submit_one(Op::Write { fua }, lba, blocks, buffer, user_data)
    }

    #[inline]
    fn submit_one(
        &mut self,
        op: Op,
        lba: u64,
        blocks: u32,
        buffer: DmaBuffer,
        user_data: u64,
    ) -> Result<(), RefusedRequest> {
        let refuse = |why, buffer| {
            Err(RefusedRequest {
                why,
                buffer: Some(buffer),
            })
        };
        let Some(core) = self.core.as_deref_mut() else {
            return refuse(SubmitRefusal::Gone, buffer);
        };
        if blocks == 0 || blocks > core.max_blocks() {
            return refuse(SubmitRefusal::Range, buffer);
        }
        if (u64::from(blocks) << core.block_shift) > buffer.len() as u64 {
            return refuse(SubmitRefusal::Buffer, buffer);
        }
        if buffer.iova() & 3 != 0 {
            return refuse(SubmitRefusal::Alignment, buffer);
        }
        match core.push(op, lba, blocks, Data::At(buffer.iova()), SINGLE, user_data) {
            Ok(index) => {
                if let Some(slot) = core.slots.get(index) {
                    slot.hold = Some(buffer);
                }
                Ok(())
            }
            Err(why) => refuse(why, buffer),
        }
    }

    /// Submits a Flush, which makes all completed writes durable.
    ///
    /// # Errors
    /// [`SubmitRefusal::Full`] when too many commands are outstanding; [`SubmitRefusal::Gone`] when
    /// the device is lost.
    pub fn submit_flush(&mut self, user_data: u64) -> Result<(), SubmitRefusal> {
        let core = self.core.as_deref_mut().ok_or(SubmitRefusal::Gone)?;
        core.push(Op::Flush, 0, 0, Data::None, SINGLE, user_data)
            .map(drop)
    }

    /// Submits a request of any size and operation; a request larger than a command is split.
    ///
    /// # Errors
    /// [`RefusedRequest`], which returns the buffer. A request that must be split is never refused
    /// as [`SubmitRefusal::Full`], because its parts are queued.
    pub fn submit(&mut self, request: Request) -> Result<(), RefusedRequest> {
        let Request {
            op,
            lba,
            blocks,
            buffer,
            user_data,
        } = request;
        let refuse = |why, buffer| Err(RefusedRequest { why, buffer });
        let Some(core) = self.core.as_deref_mut() else {
            return refuse(SubmitRefusal::Gone, buffer);
        };
        if op == Op::Flush {
            return match core.push(op, 0, 0, Data::None, SINGLE, user_data) {
                Ok(index) => {
                    if let Some(slot) = core.slots.get(index) {
                        slot.hold = buffer;
                    }
                    Ok(())
                }
                Err(why) => refuse(why, buffer),
            };
        }
        let limits = core.shared.limits;
        let supported = match op {
            Op::Compare => limits.compare,
            Op::WriteZeroes { .. } => limits.write_zeroes,
            Op::Deallocate => limits.dataset_management,
            _ => true,
        };
        if !supported {
            return refuse(SubmitRefusal::Unsupported, buffer);
        }
        let bytes = blocks.checked_mul(1 << core.block_shift);
        let Some(bytes) = bytes.filter(|_| blocks > 0 && lba.checked_add(blocks).is_some()) else {
            return refuse(SubmitRefusal::Range, buffer);
        };
        let mut ranges = Vec::new();
        if op.has_data() {
            match buffer.as_ref().map(|b| (b.iova(), b.len() as u64)) {
                Some((_, len)) if len < bytes => return refuse(SubmitRefusal::Buffer, buffer),
                Some((iova, _)) if iova & 3 != 0 => {
                    return refuse(SubmitRefusal::Alignment, buffer);
                }
                Some((iova, _)) => ranges.push(IovaRange { iova, len: bytes }),
                None => return refuse(SubmitRefusal::Buffer, None),
            }
        }
        let small = if op.has_data() {
            u64::from(core.max_blocks())
        } else {
            1 << 16
        };
        if blocks <= small {
            let data = match ranges.first() {
                Some(range) => Data::At(range.iova),
                None => Data::None,
            };
            return match core.push(op, lba, blocks as u32, data, SINGLE, user_data) {
                Ok(index) => {
                    if let Some(slot) = core.slots.get(index) {
                        slot.hold = buffer;
                    }
                    Ok(())
                }
                Err(why) => refuse(why, buffer),
            };
        }
        if core.dead {
            return refuse(SubmitRefusal::Gone, buffer);
        }
        let parent = SplitRequest {
            op,
            lba,
            left: blocks,
            offset: 0,
            ranges,
            method: Method::Prp,
            hold: buffer,
            user_data,
            in_flight: 0,
            error: None,
            busy: true,
        };
        core.begin(parent)
            .map_err(|why| RefusedRequest { why, buffer: None })
    }

    /// Rings the doorbell once for all commands submitted so far.
    #[inline]
    pub fn ring(&mut self) {
        if let Some(core) = self.core() {
            core.ring();
        }
    }

    /// Rings the doorbell, delivers completions, and returns their number. Never blocks except for
    /// recovery: a controller that must be reset is reset here, and outstanding commands are
    /// repeated.
    #[inline]
    pub fn poll(&mut self, mut done: impl FnMut(Completion)) -> usize {
        match self.core.as_deref_mut() {
            Some(core) => core.poll(&mut done),
            None => 0,
        }
    }

    /// Polls as [`QueuePair::poll`] does, but does not pause when there are no completions. For a
    /// thread that also polls something else, such as further queue pairs.
    #[inline]
    pub fn poll_restless(&mut self, mut done: impl FnMut(Completion)) -> usize {
        match self.core.as_deref_mut() {
            Some(core) => core.look(&mut done, false),
            None => 0,
        }
    }

    /// Polls, then sleeps, until a command completes or the time has passed. The polling time
    /// adapts: it grows while completions arrive soon after the thread fell asleep, and shrinks
    /// otherwise.
    ///
    /// # Errors
    /// The I/O error of the system call that waits.
    pub fn wait(
        &mut self,
        timeout: std::time::Duration,
        mut done: impl FnMut(Completion),
    ) -> std::io::Result<usize> {
        match self.core.as_deref_mut() {
            Some(core) => self.waiter.wait(core, timeout, &mut done),
            None => Ok(0),
        }
    }

    /// Returns the eventfd of the queue's interrupt for the user's own event loop. It becomes
    /// readable when a completion is posted: read it (8 bytes), then call [`QueuePair::poll`] until
    /// there are no completions, then wait again. `None` without interrupts.
    pub fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.core.as_ref()?.eventfd.as_ref()?.as_fd())
    }

    /// Executes a request and waits for it. Its `user_data` must differ from those of outstanding
    /// requests. Further completions that arrive meanwhile are delivered by the next poll.
    ///
    /// # Errors
    /// [`RefusedRequest`] when the request cannot be submitted.
    pub fn execute(&mut self, request: Request) -> Result<Completion, RefusedRequest> {
        let mine = request.user_data;
        self.submit(request)?;
        let (mut found, mut others) = (None, Vec::new());
        while found.is_none() && self.in_flight() > 0 {
            let tick = self
                .core
                .as_ref()
                .map_or_else(Default::default, |c| c.tick_len());
            let waited = self.wait(tick, |completion| {
                if completion.user_data == mine && found.is_none() {
                    found = Some(completion);
                } else {
                    others.push(completion);
                }
            });
            if waited.is_err() {
                std::thread::yield_now();
            }
        }
        if let Some(core) = self.core() {
            core.finished.extend(others);
        }
        found.ok_or(RefusedRequest {
            why: SubmitRefusal::Gone,
            buffer: None,
        })
    }

    /// Reads blocks into a slice, through a bounce buffer, and waits for them. The length of
    /// `bytes` must be a multiple of the block size.
    ///
    /// # Errors
    /// [`BlockingError`] when a command is refused or fails, or no bounce buffer can be allocated.
    pub fn read(&mut self, lba: u64, bytes: &mut [u8]) -> Result<(), BlockingError> {
        let mut lba = lba;
        let chunk = self.chunk(bytes.len())?;
        for piece in bytes.chunks_mut(chunk) {
            let blocks = self.transfer(Op::Read, lba, piece.len(), |_| true)?;
            let bounce = self.bounce.as_ref().ok_or(CommandError::Gone)?;
            bounce.read(0, piece).map_err(|_| CommandError::Gone)?;
            lba = lba.saturating_add(blocks);
        }
        Ok(())
    }

    /// Writes blocks from a slice, through a bounce buffer, and waits for them. The length of
    /// `bytes` must be a multiple of the block size.
    ///
    /// # Errors
    /// [`BlockingError`] when a command is refused or fails, or no bounce buffer can be allocated.
    pub fn write(&mut self, lba: u64, bytes: &[u8], fua: bool) -> Result<(), BlockingError> {
        let mut lba = lba;
        let chunk = self.chunk(bytes.len())?;
        for piece in bytes.chunks(chunk) {
            let copy = |bounce: &DmaBuffer| bounce.write(0, piece).is_ok();
            let blocks = self.transfer(Op::Write { fua }, lba, piece.len(), copy)?;
            lba = lba.saturating_add(blocks);
        }
        Ok(())
    }

    /// Returns the length in bytes of the next command of a bounced transfer.
    fn chunk(&self, len: usize) -> Result<usize, BlockingError> {
        let block = self.block_size() as usize;
        if block == 0 || !len.is_multiple_of(block) {
            return Err(SubmitRefusal::Range.into());
        }
        Ok(self.max_blocks() as usize * block)
    }

    fn transfer(
        &mut self,
        op: Op,
        lba: u64,
        len: usize,
        fill: impl FnOnce(&DmaBuffer) -> bool,
    ) -> Result<u64, BlockingError> {
        let block = self.block_size().max(1) as usize;
        let buffer = match self.bounce.take() {
            Some(buffer) if buffer.len() >= len => buffer,
            _ => {
                let core = self.core.as_ref().ok_or(SubmitRefusal::Gone)?;
                core.shared.heap.allocate(len.max(64 << 10))?
            }
        };
        if !fill(&buffer) {
            return Err(CommandError::Gone.into());
        }
        let blocks = (len / block) as u64;
        let completion = self.execute(Request {
            op,
            lba,
            blocks,
            buffer: Some(buffer),
            user_data: BLOCKING,
        });
        let completion = completion.map_err(|refused| refused.why)?;
        self.bounce = completion.buffer;
        if let Some(core) = self.core() {
            core.counters.bounced += 1;
            core.counters.bounced_bytes += len as u64;
        }
        completion.result?;
        Ok(blocks)
    }
}

/// User data of blocking transfers; other requests must not use it while one is outstanding.
const BLOCKING: u64 = u64::MAX;

/// Reason why a blocking read or write failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BlockingError {
    /// The command was refused before its submission.
    #[error(transparent)]
    Refused(#[from] SubmitRefusal),
    /// The command was submitted and failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// No bounce buffer could be allocated.
    #[error(transparent)]
    Memory(#[from] crate::iova::MapFailure),
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let Some(mut core) = self.core.take() else {
            return;
        };
        // The next queue pair of this number expects the interrupt to be attached.
        core.attach_interrupt();
        let QueueCore {
            shared,
            epoch,
            qid,
            sq,
            cq,
            lists,
            slots,
            parents,
            ..
        } = *core;
        let holds = (slots.into_holds(), parents.into_holds());
        let memory = (sq, cq, lists, holds);
        let mut control = shared.lock();
        match shared.state() {
            DeviceState::Live | DeviceState::Draining => {}
            // A disabled controller has no queues.
            DeviceState::Suspended => return control.free_qid(qid),
            DeviceState::GoneQuiet => return,
            DeviceState::GoneWild => return std::mem::forget(memory),
        }
        // Queues of an earlier epoch do not exist after a reset.
        if shared.epoch.load(Ordering::Acquire) != epoch {
            return control.free_qid(qid);
        }
        match control.delete_queues(qid, shared.options.admin_timeout) {
            Ok(()) => control.free_qid(qid),
            Err(error) => {
                tracing::warn!(qid, %error, "queue could not be deleted; its memory is kept until the next reset");
                control.bury(Box::new(memory));
            }
        }
    }
}
