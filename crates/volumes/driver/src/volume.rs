//! NVMe namespaces as volumes: `vnvme serve nvme://...` gives a VM a disk on a real device.
//!
//! A worker's queue into the volume is a queue pair of its own. Guest memory registered with the
//! device is accessed directly; other memory is copied through bounce buffers, which are counted.
//! Completions are polled. The queue pair's interrupt wakes a sleeping worker, if the queue pair
//! has one of its own.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;

use dma::SegmentList;
use nvme_volume::{Atomicity, Namespace, status_error};
use volume::{
    Armed, AtomicWrites, Completion, Extent, Info, Io, IoError, IoErrorKind, Kind, OpenQueue,
    QueueState, Request, Volume, VolumeError, VolumeQueue, Wake,
};

use crate::buffer::DmaBuffer;
use crate::control::DeviceState;
use crate::device::Device;
use crate::error::{CommandError, Error, SubmitRefusal};
use crate::iova::{Registration, Tables};
use crate::options::QueueOptions;
use crate::queue::core::Data;
use crate::queue::data::{IovaRange, Method};
use crate::queue::split::SplitRequest;
use crate::queue::{Op, QueuePair};

/// Size of the zero buffer that is written repeatedly if the controller lacks Write Zeroes.
const ZEROES: u64 = 1 << 20;
/// Maximum length in bytes of one request that zeroes by writing the zero buffer.
const MAX_ZEROED: u64 = 1 << 30;
/// Number of bounce buffers kept for later transfers, and the size from which they are not kept.
const MAX_SPARE_BUFFERS: usize = 64;
const KEPT_BYTES: usize = 1 << 20;

/// Namespace of an NVMe device as a [`Volume`].
#[derive(Debug)]
pub struct NvmeVolume {
    device: Device,
    nsid: u32,
    read_only: bool,
    options: QueueOptions,
    name: String,
}

impl NvmeVolume {
    /// Creates a volume on a namespace. `name` is its name in error messages.
    ///
    /// # Errors
    /// [`Error::Namespace`] when the namespace does not exist or is not usable.
    pub fn new(
        device: Device,
        nsid: u32,
        options: QueueOptions,
        read_only: bool,
        name: String,
    ) -> Result<Self, Error> {
        device.namespace(nsid)?;
        Ok(Self {
            device,
            nsid,
            read_only,
            options: QueueOptions {
                polled: true,
                repeats: true,
                ..options
            },
            name,
        })
    }

    /// Returns the device of the volume.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Registers guest memory, so that transfers to and from it need no copy while the registration
    /// exists.
    ///
    /// # Errors
    /// [`crate::iova::MapFailure`] when the memory cannot be mapped.
    pub fn register(&self, memory: &dma::Memory) -> Result<Registration, crate::iova::MapFailure> {
        self.device.register(memory)
    }

    /// Returns the properties of the namespace; size 0 when it no longer exists.
    fn namespace(&self) -> Namespace {
        self.device.namespace(self.nsid).unwrap_or(Namespace {
            nsid: self.nsid,
            block_shift: 9,
            blocks: 0,
            zeroes_after_deallocate: false,
            write_protected: true,
            deallocate_granularity: 0,
            eui64: [0; 8],
            nguid: [0; 16],
            atomicity: Atomicity::default(),
        })
    }

    /// Has the worker woken for completions. Returns whether that works; otherwise the worker polls
    /// while there are requests.
    fn wake(&self, queue: &Rc<RefCell<QueuePair>>, io: &Io) -> bool {
        let mine = Rc::downgrade(queue);
        let queue = queue.borrow();
        let Some(eventfd) = queue.eventfd().filter(|_| queue.can_wake()) else {
            return false;
        };
        let watched = io.watch(eventfd, move || match mine.upgrade() {
            None => Armed::Gone,
            Some(queue) => {
                let quiet = queue.try_borrow_mut().is_ok_and(|mut queue| queue.arm());
                if quiet { Armed::Quiet } else { Armed::Waiting }
            }
        });
        if let Err(error) = &watched {
            tracing::warn!(device = self.name, %error, "waiting for the device's interrupt \
                                                        failed; polling");
        }
        watched.is_ok()
    }

    fn error(
        &self,
        what: &'static str,
        error: impl std::error::Error + Send + Sync + 'static,
    ) -> VolumeError {
        VolumeError::System {
            path: PathBuf::from(&self.name),
            what,
            error: std::io::Error::other(error),
        }
    }
}

impl Volume for NvmeVolume {
    fn info(&self) -> Info {
        let namespace = self.namespace();
        let limits = self.device.limits();
        let read_only = self.read_only || namespace.write_protected;
        let deallocate = limits.dataset_management && !read_only;
        let block = namespace.block_size();
        let granularity = namespace
            .deallocate_granularity
            .max(1)
            .saturating_mul(block)
            .checked_next_power_of_two()
            .unwrap_or(block);
        Info {
            size: namespace.bytes(),
            block_size: block,
            optimal_io: block.max(4096),
            read_only,
            volatile_cache: limits.volatile_cache,
            deallocate,
            deallocate_granularity: if deallocate { granularity } else { 0 },
            zeroes_after_deallocate: namespace.zeroes_after_deallocate,
            write_zeroes: limits.write_zeroes,
            kind: Kind::BlockDevice,
            description: format!("NVMe namespace {} of {}", self.nsid, self.name),
        }
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        let queue = self.device.queue(self.nsid, self.options);
        let queue = queue.map_err(|error| self.error("queue pair", error))?;
        let mapper = self.device.mapper();
        let queue = Rc::new(RefCell::new(queue));
        Ok(OpenQueue::new(Queue {
            wakes: self.wake(&queue, io),
            tables: Tables::new(mapper),
            device: self.device.clone(),
            nsid: self.nsid,
            read_only: self.read_only,
            info: self.info(),
            queue,
            pending: Vec::new(),
            free: Vec::new(),
            spare: Vec::new(),
            ranges: Vec::new(),
            over: Vec::new(),
            zeroes: None,
            resets: self.device.resets(),
        }))
    }

    fn id(&self) -> Vec<u8> {
        let namespace = self.namespace();
        if namespace.nguid != [0; 16] {
            return namespace.nguid.to_vec();
        }
        let id = self.device.identify();
        let serial = String::from_utf8_lossy(id.sn.trimmed()).into_owned();
        format!("nvme:{serial}:{}", self.nsid).into_bytes()
    }

    fn own_id(&self) -> Option<Vec<u8>> {
        Some(self.id())
    }

    fn media(&self) -> Vec<String> {
        let id = self.id();
        let id = id.iter().map(|byte| format!("{byte:02x}"));
        vec![format!("namespace {}", id.collect::<String>())]
    }

    fn inner(&self) -> Option<&dyn Volume> {
        None
    }

    /// The device's guarantee for a command applies to a write of one command, which is repeated as
    /// a whole.
    fn atomic_writes(&self) -> AtomicWrites {
        let most = self.device.limits().max_transfer;
        let namespace = self.device.namespace(self.nsid);
        namespace.map_or(AtomicWrites::NONE, |namespace| {
            namespace.atomic_writes(&self.device.identify(), most)
        })
    }

    fn extent(&self) -> Option<Extent> {
        Some(Extent::whole(self.name.clone()))
    }

    fn refresh(&self) -> Result<bool, VolumeError> {
        let before = self.namespace().bytes();
        let serviced = self.device.service();
        serviced.map_err(|error| self.error("events", error))?;
        Ok(self.namespace().bytes() != before)
    }
}

/// Outstanding request of a worker to the device.
struct Pending {
    tag: u64,
    read: bool,
    write: bool,
    data: SegmentList,
    bounce: Option<DmaBuffer>,
    /// Number of the table of registered memory that the request's addresses are from.
    table: u64,
}

/// Queue of one worker into an [`NvmeVolume`], on a queue pair of its own.
struct Queue {
    device: Device,
    nsid: u32,
    read_only: bool,
    info: Info,
    /// Shared with the worker's look before it sleeps; borrowed only for the duration of a call.
    queue: Rc<RefCell<QueuePair>>,
    /// Whether the queue pair's interrupt wakes a worker that sleeps.
    wakes: bool,
    tables: Tables,
    /// Outstanding requests, by the user data of their commands.
    pending: Vec<Option<Pending>>,
    free: Vec<usize>,
    spare: Vec<DmaBuffer>,
    /// Empty list of address ranges, kept to reuse its memory.
    ranges: Vec<IovaRange>,
    /// Empty list of completions, kept to reuse its memory.
    over: Vec<crate::queue::Completion>,
    zeroes: Option<DmaBuffer>,
    resets: u64,
}

impl Queue {
    /// Resolves the data's device addresses. Returns the method of describing them, if the device
    /// sees all of the data.
    fn resolve(&mut self, data: &SegmentList) -> Option<Method> {
        self.ranges.clear();
        for segment in data.segments() {
            let len = segment.len() as u64;
            let (_, iova) = self.tables.current().find(segment.as_ptr().addr(), len)?;
            match self.ranges.last_mut() {
                Some(last) if last.iova + last.len == iova => last.len += len,
                _ => self.ranges.push(IovaRange { iova, len }),
            }
        }
        let mut queue = self.queue.borrow_mut();
        let core = queue.core()?;
        core.shape().method(&self.ranges, core.lists.each())
    }

    fn bounce(&mut self, len: usize) -> Result<DmaBuffer, IoErrorKind> {
        if let Some(at) = self.spare.iter().position(|spare| spare.len() >= len) {
            return Ok(self.spare.swap_remove(at));
        }
        let size = if len <= KEPT_BYTES {
            len.next_power_of_two().max(4096)
        } else {
            len
        };
        self.device.allocate(size).map_err(|error| {
            tracing::warn!(%error, "no bounce buffer");
            IoErrorKind::Memory
        })
    }

    /// Starts a checked request. On an error nothing has happened, and the request is returned.
    fn start(&mut self, request: Request) -> Result<(), (IoErrorKind, Request)> {
        use volume::Op as V;
        let limits = self.device.limits();
        let shift = self.queue.borrow_mut().core().map(|core| core.block_shift);
        let Some(shift) = shift else {
            return Err((IoErrorKind::Gone, request));
        };
        let op = match request.op {
            V::Read => Op::Read,
            V::Write { fua } => Op::Write { fua },
            V::Flush => Op::Flush,
            V::WriteZeroes { deallocate, fua } if limits.write_zeroes => {
                Op::WriteZeroes { fua, deallocate }
            }
            V::WriteZeroes { fua, .. } if request.len <= MAX_ZEROED => Op::Write { fua },
            V::Deallocate if limits.dataset_management => Op::Deallocate,
            V::WriteZeroes { .. } | V::Deallocate => {
                return Err((IoErrorKind::Unsupported, request));
            }
        };
        let mut bounce = None;
        let mut method = Method::Prp;
        if request.op.has_data() {
            match self.resolve(&request.data) {
                Some(found) => method = found,
                None => {
                    let buffer = match self.bounce(request.len as usize) {
                        Ok(buffer) => buffer,
                        Err(kind) => return Err((kind, request)),
                    };
                    if op != Op::Read && !copy(&request.data, &buffer, request.len, true) {
                        return Err((IoErrorKind::Memory, request));
                    }
                    let (iova, len) = (buffer.iova(), request.len);
                    self.ranges.clear();
                    self.ranges.push(IovaRange { iova, len });
                    bounce = Some(buffer);
                }
            }
        } else if op.has_data() {
            // Zeroes are written repeatedly from the same buffer.
            if self.zeroes.is_none() {
                self.zeroes = self.device.allocate(ZEROES as usize).ok();
            }
            let Some(iova) = self.zeroes.as_ref().map(DmaBuffer::iova) else {
                return Err((IoErrorKind::Memory, request));
            };
            self.ranges.clear();
            let mut left = request.len;
            while left > 0 {
                let len = left.min(ZEROES);
                self.ranges.push(IovaRange { iova, len });
                left -= len;
            }
        }
        let Request {
            tag,
            offset,
            len,
            data,
            op: kind,
        } = request;
        if bounce.is_some()
            && let Some(core) = self.queue.borrow_mut().core()
        {
            core.counters.bounced += 1;
            core.counters.bounced_bytes += len;
        }
        let pending = Pending {
            tag,
            read: op == Op::Read,
            write: kind.changes(),
            data,
            bounce,
            table: self.tables.number(),
        };
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.pending.push(None);
                self.pending.len() - 1
            }
        };
        let (lba, blocks) = (offset >> shift, len >> shift);
        match self.push(op, lba, blocks, method, index as u64) {
            Ok(()) => {
                self.tables.hold();
                if let Some(place) = self.pending.get_mut(index) {
                    *place = Some(pending);
                }
                Ok(())
            }
            Err(_) => {
                self.free.push(index);
                let data = pending.data;
                let request = Request {
                    tag,
                    op: kind,
                    offset,
                    len,
                    data,
                };
                Err((IoErrorKind::Gone, request))
            }
        }
    }

    fn push(
        &mut self,
        op: Op,
        lba: u64,
        blocks: u64,
        method: Method,
        user_data: u64,
    ) -> Result<(), SubmitRefusal> {
        let mut queue = self.queue.borrow_mut();
        let core = queue.core().ok_or(SubmitRefusal::Gone)?;
        let most = if op.has_data() {
            u64::from(core.max_blocks())
        } else {
            1 << 16
        };
        if blocks <= most {
            let data = match &self.ranges[..] {
                _ if !op.has_data() => Data::None,
                [only] => Data::At(only.iova),
                ranges => Data::Ranges(method, ranges, 0),
            };
            let single = crate::queue::SINGLE;
            match core.push(op, lba, blocks as u32, data, single, user_data) {
                Err(SubmitRefusal::Full) => {}
                other => return other.map(drop),
            }
        }
        if op == Op::Flush {
            // A flush has no parts. It waits as a request of one block, which is ignored.
            return core.begin(parent(op, 0, 1, Vec::new(), method, user_data));
        }
        let ranges = if op.has_data() {
            self.ranges.clone()
        } else {
            Vec::new()
        };
        core.begin(parent(op, lba, blocks, ranges, method, user_data))
    }

    fn finish(&mut self, done: crate::queue::Completion) -> Option<Completion> {
        let index = usize::try_from(done.user_data).ok()?;
        let mut pending = self.pending.get_mut(index)?.take()?;
        self.free.push(index);
        self.tables.release(pending.table);
        let mut result = done.result.map_err(|error| io_error(error, pending.write));
        let state = self
            .queue
            .borrow_mut()
            .core()
            .map(|core| core.shared.state());
        if state == Some(DeviceState::GoneWild) {
            // The device may still write there: that memory is never used again.
            std::mem::forget(std::mem::take(&mut pending.data));
            std::mem::forget(pending.bounce.take());
        }
        if let Some(buffer) = pending.bounce.take() {
            let len = pending.data.len_bytes();
            if pending.read && result.is_ok() && !copy(&pending.data, &buffer, len, false) {
                result = Err(IoErrorKind::Memory.into());
            }
            if self.spare.len() < MAX_SPARE_BUFFERS && buffer.len() <= KEPT_BYTES {
                self.spare.push(buffer);
            }
        }
        Some(Completion {
            tag: pending.tag,
            result,
            data: pending.data,
        })
    }

    /// Fetches the newest table of registered memory, and the namespace's size after a reset.
    fn keep_up(&mut self) {
        self.tables.keep_up();
        if self.device.resets() != self.resets {
            self.resets = self.device.resets();
            self.refresh_size();
        }
    }

    fn refresh_size(&mut self) {
        if let Ok(namespace) = self.device.namespace(self.nsid) {
            self.info.size = namespace.bytes();
            self.info.read_only = self.read_only || namespace.write_protected;
        }
    }
}

fn parent(
    op: Op,
    lba: u64,
    left: u64,
    ranges: Vec<IovaRange>,
    method: Method,
    user_data: u64,
) -> SplitRequest {
    SplitRequest {
        op,
        lba,
        left,
        offset: 0,
        ranges,
        method,
        hold: None,
        user_data,
        in_flight: 0,
        error: None,
        busy: true,
    }
}

/// Copies between a request's memory and a bounce buffer. Returns `false` when the copy was
/// incomplete.
fn copy(data: &SegmentList, buffer: &DmaBuffer, len: u64, into: bool) -> bool {
    let Ok(bytes) = usize::try_from(len) else {
        return false;
    };
    let piece = buffer
        .memory()
        .and_then(|(memory, at)| memory.segments(at, bytes));
    piece.is_some_and(|piece| {
        let copied = if into {
            piece.copy_list(data)
        } else {
            data.copy_list(&piece)
        };
        copied == len
    })
}

fn io_error(error: CommandError, write: bool) -> IoError {
    match error {
        CommandError::Gone => IoErrorKind::Gone.into(),
        CommandError::TimedOut | CommandError::Reset => IoErrorKind::Aborted.into(),
        CommandError::Status(status) => status_error(status, write),
    }
}

impl VolumeQueue for Queue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        if let Err(error) = request.check_info(&self.info) {
            // The namespace may have grown.
            self.refresh_size();
            if error.kind != IoErrorKind::OutOfRange || request.check_info(&self.info).is_err() {
                return Some(request.complete(Err(error)));
            }
        }
        if request.len == 0 && request.op != volume::Op::Flush {
            return Some(request.complete(Ok(())));
        }
        match self.start(request) {
            Ok(()) => None,
            Err((kind, request)) => Some(request.complete(Err(kind.into()))),
        }
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        self.keep_up();
        if self.in_flight() == 0 {
            return 0;
        }
        let mut over = std::mem::take(&mut self.over);
        // The poll takes no rest, because the caller polls further disks.
        self.queue
            .borrow_mut()
            .poll_restless(|completion| over.push(completion));
        let count = over.len();
        for completion in over.drain(..) {
            if let Some(completion) = self.finish(completion) {
                done(completion);
            }
        }
        self.over = over;
        count
    }

    fn state(&self) -> QueueState {
        let in_flight = self.in_flight();
        QueueState {
            in_flight,
            wake: if in_flight > 0 && !self.wakes {
                Wake::Poll
            } else {
                // A command may reach its time-out, which is not signalled.
                let time_out = self.queue.borrow().until_tick();
                time_out.map_or(Wake::Event, Wake::After)
            },
        }
    }

    /// Does nothing: commands end when the device answers, or when they time out.
    fn cancel(&mut self, _: u64) {}
}

impl Queue {
    fn in_flight(&self) -> usize {
        self.pending.len() - self.free.len()
    }
}

impl Drop for Queue {
    /// The requests' memory must not be freed before the device is done with it. The wait ends:
    /// unanswered commands time out, and then the controller is reset, or given up.
    fn drop(&mut self) {
        while self.in_flight() > 0 {
            if self.poll(&mut |completion| drop(completion)) == 0 {
                std::hint::spin_loop();
            }
        }
    }
}
