//! Queue of one worker into an image.
//!
//! A request for clusters that are adjacent in one file of the chain is passed to that file's queue
//! unchanged, under its own tag. This costs two more memory accesses than a raw file, and the
//! completion bypasses this module. Every other request becomes a task.

use crate::deferred::Deferred;
use crate::format::L2Entry;
use crate::image::Image;
use crate::lanes::{For, Lanes, Tasks};
use crate::read::read;
use crate::tables::{L1, Slice};
use crate::write::WriteTarget;
use crate::{epoch::OldestEpoch, image::Writer};
use dma::{SegmentList, View};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use volume::{
    Completion, FastPath, Info, Io, IoError, IoErrorKind, Op, OpenQueue, QueueState, Request,
    Volume, VolumeError, VolumeQueue, Wake,
};

/// Maximum number of times that one round polls tasks.
const STEPS: usize = 64;
/// Length in bytes up to which a read of zeroes completes within the call.
const MAX_INLINE_ZEROES: u64 = 128 << 10;
/// Interval of checks for reusable clusters while the queue is idle.
const REMOVED_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Interval at which an idle queue looks whether table entries have waited for long.
const DEFERRED_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Number of rounds between checks for reusable clusters while tasks are active.
const REMOVED_CHECK_ROUNDS: u32 = 256;
/// Maximum number of L2 slices of a layer that one queue caches.
const MAX_CACHED_SLICES: usize = 4096;

/// Cache of L2 slices in a queue, by slice number, without locks.
struct AtHand {
    slices: Vec<Option<(u64, Arc<Slice>)>>,
    l1: Arc<L1>,
    l1_count: u32,
}

/// Image of the backing chain as a worker's queue accesses it.
struct Layer {
    data: OpenQueue,
    /// L2 slices cached in this queue; `None` for a raw file.
    at_hand: Option<AtHand>,
    has_threads: bool,
}

/// Location of a request's data, as far as cached L2 entries show it.
enum Located {
    /// The data is in the file of the layer with this index, from this offset on.
    File(usize, u64),
    /// The range reads as zeroes.
    Zero,
    /// Unknown without a read of tables, which a task has to do.
    Task,
}

/// Location of a whole range within one layer, from cached L2 entries.
enum CachedLocation {
    Data(u64),
    Zero,
    Below,
}

/// Queue of one worker into an image; see the module's documentation.
pub(crate) struct ImageQueue {
    // Field order: tasks and their operations are dropped before everything else.
    tasks: Tasks,
    layers: Vec<Layer>,
    /// Second queue into the image's file, for requests that began in odd epochs.
    odd: Option<OpenQueue>,
    images: Arc<Vec<Image>>,
    info: Info,
    ended: Vec<Completion>,
    /// Epoch of the requests in each of the two queues.
    epochs: [u64; 2],
    parity: usize,
    /// Whether the queue has published that no request is outstanding.
    idle: Cell<bool>,
    rounds: u32,
    /// Oldest epoch that this queue publishes, if it has outstanding requests.
    seen: Option<Arc<OldestEpoch>>,
}

impl ImageQueue {
    pub(crate) fn new(images: Arc<Vec<Image>>, info: Info, io: &Io) -> Result<Self, VolumeError> {
        let lanes = Lanes::new(io)?;
        let mut layers = Vec::new();
        for image in images.iter() {
            let data = image.data.open(lanes.io())?;
            let tables = match &image.tables_file {
                Some(file) => file.open(lanes.io())?,
                None => image.data.open(lanes.io())?,
            };
            lanes.add(data, tables);
            layers.push(Layer {
                data: image.data.open(io)?,
                at_hand: image.tables.as_ref().map(|tables| AtHand {
                    slices: vec![None; slices(image)],
                    l1: tables.l1(),
                    l1_count: tables.l1_count(),
                }),
                has_threads: image.data.has_threads(),
            });
        }
        let image = images.first();
        let writer = image.and_then(|image| image.writer.as_ref());
        let odd = match (image, writer) {
            (Some(image), Some(_)) => Some(image.data.open(io)?),
            _ => None,
        };
        let tasks = Tasks::new(io, lanes).map_err(|error| VolumeError::System {
            path: image.map(|image| image.path.clone()).unwrap_or_default(),
            what: "has no event descriptor for its tasks",
            error,
        })?;
        Ok(Self {
            tasks,
            layers,
            odd,
            seen: writer.map(|writer| writer.epochs.join()),
            images,
            info,
            ended: Vec::new(),
            epochs: [0; 2],
            parity: 0,
            idle: Cell::new(true),
            rounds: 0,
        })
    }

    fn writer(&self) -> Option<&Writer> {
        self.images.first()?.writer.as_ref()
    }

    fn deferred(&self) -> Option<&Deferred> {
        self.writer()?.deferred.as_ref()
    }

    /// Publishes that a request is outstanding, before its L2 entry is looked up.
    #[inline]
    fn begin(&mut self) {
        if self.idle.get() {
            self.leave_idle();
        }
    }

    #[cold]
    fn leave_idle(&mut self) {
        self.idle.set(false);
        if let (Some(seen), Some(writer)) = (
            &self.seen,
            self.images.first().and_then(|i| i.writer.as_ref()),
        ) {
            self.epochs = [seen.begin(&writer.epochs); 2];
        }
    }

    /// Returns the location of a range, if it lies in one piece and the cached tables suffice.
    #[inline]
    fn locate(&mut self, write: bool, offset: u64, len: u64) -> Located {
        let layers = self.layers.iter_mut().zip(self.images.iter()).enumerate();
        for (number, (layer, image)) in layers {
            match layer.find(image, write, offset, len) {
                Some(CachedLocation::Data(at)) => return Located::File(number, at),
                Some(CachedLocation::Below) if !write => {}
                Some(CachedLocation::Zero) if !write => return Located::Zero,
                _ => return Located::Task,
            }
        }
        Located::Zero
    }

    /// Returns the queue into the file of a layer.
    #[inline]
    fn file(&mut self, layer: usize) -> Option<&mut OpenQueue> {
        match (&mut self.odd, layer, self.parity) {
            (Some(odd), 0, 1) => Some(odd),
            _ => Some(&mut self.layers.get_mut(layer)?.data),
        }
    }

    /// Starts a read or write of a range that was checked.
    #[inline]
    fn transfer(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        self.begin();
        let len = data.len_bytes();
        let located = match op {
            // Entries and tables that lead to the data have to be durable, too.
            Op::Write { fua: true } if self.writer().is_some_and(|w| !w.is_durable()) => {
                Located::Task
            }
            _ => self.locate(op != Op::Read, offset, len),
        };
        match located {
            Located::File(layer, at) => {
                if let Some(file) = self.file(layer) {
                    return file.start(tag, op, at, data);
                }
            }
            Located::Zero if len <= MAX_INLINE_ZEROES => {
                let result = if data.fill(0) == len {
                    Ok(())
                } else {
                    Err(IoErrorKind::Memory.into())
                };
                return Some(Completion { tag, result, data });
            }
            _ => {}
        }
        self.task(tag, op, offset, len, data)
    }

    /// Starts a task for a request that takes more than one operation.
    fn task(
        &mut self,
        tag: u64,
        op: Op,
        offset: u64,
        len: u64,
        data: SegmentList,
    ) -> Option<Completion> {
        let images = self.images.clone();
        self.tasks
            .spawn(For::Guest(tag), data, self.parity, move |store, data| {
                Box::pin(async move {
                    match op {
                        Op::Read => read(&images, &store, 0, offset, &data).await,
                        Op::Write { fua } => {
                            let target = WriteTarget::new(&images, &store)?;
                            target.write(offset, &data, fua).await
                        }
                        Op::Flush => {
                            let target = WriteTarget::new(&images, &store)?;
                            target.writer.flush(&store).await
                        }
                        op => {
                            let target = WriteTarget::new(&images, &store)?;
                            target.zero(offset, len, op).await
                        }
                    }
                })
            })
    }

    /// Returns the number of outstanding requests that began in epochs with this lowest bit.
    fn in_flight_of(&self, parity: usize) -> usize {
        let file = match (parity, &self.odd) {
            (1, Some(odd)) => odd.state().in_flight,
            (1, None) => 0,
            _ => self
                .layers
                .first()
                .map_or(0, |layer| layer.data.state().in_flight),
        };
        file + self.tasks.of_parity(parity)
    }

    /// Enters the next epoch as soon as no request of the one before is outstanding.
    fn advance(&mut self) {
        let (Some(seen), Some(writer)) = (self.seen.clone(), self.writer()) else {
            return;
        };
        let now = writer.epochs.now();
        let [even, odd] = self.epochs;
        if self.idle.get() || (even == odd && even == now) {
            return;
        }
        let other = 1 - self.parity;
        if self.in_flight_of(other) > 0 {
            return;
        }
        let current = if self.parity == 0 { even } else { odd };
        if current == now || self.in_flight_of(self.parity) == 0 {
            self.epochs = [now; 2];
            seen.advance(now);
            return;
        }
        // Outstanding requests stay on their opening of the file; new ones use the other opening.
        self.epochs = if self.parity == 0 {
            [even, now]
        } else {
            [now, odd]
        };
        self.parity = other;
        seen.advance(current);
    }

    /// Starts a task that makes freed clusters reusable, unless one is running.
    fn reap(&mut self) {
        self.rounds = self.rounds.wrapping_add(1);
        if !self.rounds.is_multiple_of(REMOVED_CHECK_ROUNDS) && self.tasks.len() > 0 {
            return;
        }
        let Some(writer) = self.writer() else {
            return;
        };
        if writer.reaping.swap(true, Ordering::AcqRel) {
            return;
        }
        let images = self.images.clone();
        self.tasks.spawn(
            For::Nobody,
            SegmentList::new(),
            self.parity,
            move |store, _| {
                Box::pin(async move {
                    let target = WriteTarget::new(&images, &store)?;
                    let _turn = Reaping(target.writer);
                    while target.image.reap(&store).await? {
                        crate::wait::pause().await;
                    }
                    Ok(())
                })
            },
        );
    }
}

impl ImageQueue {
    /// Starts a task that writes deferred entries to the image.
    #[cold]
    fn write_back(&mut self) {
        let images = self.images.clone();
        let nothing = SegmentList::new();
        self.tasks
            .spawn(For::Nobody, nothing, self.parity, move |store, _| {
                Box::pin(async move {
                    let target = WriteTarget::new(&images, &store)?;
                    target.writer.write_back(&store).await
                })
            });
    }
}

/// Guard of the task that makes freed clusters reusable.
struct Reaping<'a>(&'a Writer);

impl Drop for Reaping<'_> {
    fn drop(&mut self) {
        self.0.reaping.store(false, Ordering::Release);
    }
}

/// Returns the number of slices of an image that a queue caches, a power of two.
fn slices(image: &Image) -> usize {
    let Some(tables) = &image.tables else {
        return 0;
    };
    let bytes = 1u64 << (tables.slice_bits() + image.geometry.cluster_bits);
    let all = usize::try_from(image.size().div_ceil(bytes)).unwrap_or(usize::MAX);
    let most = (tables.most() / 4).clamp(1, MAX_CACHED_SLICES);
    all.min(most).next_power_of_two()
}

impl Layer {
    /// Returns the location of a whole range within the layer, if it lies in one piece and the
    /// cached tables suffice.
    #[inline]
    fn find(
        &mut self,
        image: &Image,
        write: bool,
        offset: u64,
        len: u64,
    ) -> Option<CachedLocation> {
        let size = image.size();
        let end = offset + len;
        if end > size {
            return (offset >= size).then_some(CachedLocation::Zero);
        }
        let Some(at_hand) = &mut self.at_hand else {
            return Some(CachedLocation::Data(offset));
        };
        let tables = image.tables.as_ref()?;
        let (bits, slice_bits) = (image.geometry.cluster_bits, tables.slice_bits());
        let cluster = offset >> bits;
        let number = cluster >> slice_bits;
        let index = (cluster & ((1 << slice_bits) - 1)) as usize;
        let slice = match at_hand.slice(number) {
            Some(slice) => slice,
            None => match at_hand.fetch(image, number)? {
                Some(slice) => slice,
                None => {
                    let end_of_slice = (number + 1) << (slice_bits + bits);
                    return (end <= end_of_slice).then_some(CachedLocation::Below);
                }
            },
        };
        let entry = slice.get(index);
        let within = offset & ((1 << bits) - 1);
        let first = (1 << bits) - within;
        match entry.plain(write) {
            Some(host) => {
                if len > first && !goes_on(slice, index, host, write, len - first, bits) {
                    return None;
                }
                Some(CachedLocation::Data(host + within))
            }
            None if write => None,
            // Entries without a host cluster: only unallocated and zero clusters are handled here.
            None => {
                let last = index + ((within + len - 1) >> bits) as usize;
                let mut all = index..=last;
                let entry = match entry {
                    L2Entry(0) => CachedLocation::Below,
                    L2Entry(crate::format::ZERO) => CachedLocation::Zero,
                    _ => return None,
                };
                all.all(|at| slice.get(at) == slice.get(index))
                    .then_some(entry)
            }
        }
    }
}

/// Returns whether the clusters after the one at `index` are adjacent to it in the file, for `len`
/// more bytes.
#[cold]
fn goes_on(slice: &Slice, index: usize, host: u64, write: bool, len: u64, bits: u32) -> bool {
    let clusters = len.div_ceil(1 << bits);
    (1..=clusters).all(|n| slice.get(index + n as usize).plain(write) == Some(host + (n << bits)))
}

impl AtHand {
    #[inline]
    fn slice(&self, number: u64) -> Option<&Slice> {
        let place = number as usize & self.slices.len().wrapping_sub(1);
        match self.slices.get(place) {
            Some(Some((known, slice))) if *known == number => Some(slice),
            _ => None,
        }
    }

    /// Looks up a slice in the cache shared by all queues. `Some(None)`: there is no table. `None`:
    /// the slice has to be read from the file.
    #[cold]
    fn fetch(&mut self, image: &Image, number: u64) -> Option<Option<&Slice>> {
        let tables = image.tables.as_ref()?;
        if tables.l1_count() != self.l1_count {
            self.l1_count = tables.l1_count();
            self.l1 = tables.l1();
        }
        if self.l1.get(tables.l1_index(number)) == 0 {
            return Some(None);
        }
        let slice = tables.cached(number)?;
        let place = number as usize & self.slices.len().wrapping_sub(1);
        let place = self.slices.get_mut(place)?;
        let (_, slice) = place.insert((number, slice));
        Some(Some(slice))
    }
}

impl VolumeQueue for ImageQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        if let Err(error) = request.check_info(&self.info) {
            // The disk may have grown.
            let size = self.images.first().map_or(0, Image::size);
            self.info.size = size;
            if error.kind != IoErrorKind::OutOfRange || request.check_info(&self.info).is_err() {
                return Some(request.complete(Err(error)));
            }
        }
        match request.op {
            Op::Flush if self.info.read_only => return Some(request.complete(Ok(()))),
            op if op != Op::Flush && request.len == 0 => return Some(request.complete(Ok(()))),
            _ => {}
        }
        let Request {
            tag,
            op,
            offset,
            len,
            data,
        } = request;
        if op.has_data() {
            return self.transfer(tag, op, offset, data);
        }
        self.begin();
        self.task(tag, op, offset, len, data)
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        let mut count = 0;
        let mut end = |completion: Completion| {
            count += 1;
            done(completion);
        };
        for layer in self.layers.iter_mut().filter(|layer| layer.has_threads) {
            layer.data.poll(&mut end);
        }
        if let Some(odd) = &mut self.odd
            && self.layers.first().is_some_and(|layer| layer.has_threads)
        {
            odd.poll(&mut end);
        }
        if self.tasks.len() > 0 {
            self.tasks.poll(STEPS, &mut end);
        }
        self.ended.drain(..).for_each(end);
        self.advance();
        if self.deferred().is_some_and(Deferred::is_due) {
            self.begin();
            self.write_back();
        }
        if self.writer().is_some_and(Writer::has_limbo) {
            self.begin();
            self.reap();
        }
        count
    }

    fn state(&self) -> QueueState {
        let threads = self.layers.iter().any(|layer| layer.has_threads);
        let mut wake = Wake::Event;
        let mut in_flight = self.tasks.len() + self.ended.len();
        let files = self.layers.iter().map(|layer| &layer.data).chain(&self.odd);
        for file in files {
            let state = file.state();
            in_flight += state.in_flight;
            if threads && state.wake == Wake::Poll {
                wake = Wake::Poll;
            }
        }
        if self.tasks.len() > 0 && (self.tasks.has_ready() || self.tasks.lanes.has_news())
            || !self.ended.is_empty()
        {
            wake = Wake::Poll;
        }
        if in_flight == 0 && self.tasks.lanes.busy() == 0 {
            if let Some(seen) = &self.seen
                && !self.idle.replace(true)
            {
                seen.idle();
            }
            if self.writer().is_some_and(Writer::has_limbo) {
                wake = Wake::After(REMOVED_CHECK_INTERVAL);
            } else if self.deferred().is_some_and(|deferred| !deferred.is_empty()) {
                wake = Wake::After(DEFERRED_CHECK_INTERVAL);
            }
        }
        QueueState { in_flight, wake }
    }

    fn cancel(&mut self, tag: u64) {
        if let Some(completion) = self.tasks.cancel(tag) {
            self.ended.push(completion);
            return;
        }
        for layer in &mut self.layers {
            layer.data.cancel(tag);
        }
        if let Some(odd) = &mut self.odd {
            odd.cancel(tag);
        }
    }
}

impl FastPath for ImageQueue {
    #[inline]
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        let len = data.len_bytes();
        let is_fine = offset
            .checked_add(len)
            .is_some_and(|end| end <= self.info.size)
            && (offset | len) & (u64::from(self.info.block_size) - 1) == 0
            && len > 0
            && match op {
                Op::Read => data.is_writable(),
                Op::Write { .. } => !self.info.read_only,
                _ => false,
            };
        if is_fine {
            self.transfer(tag, op, offset, data)
        } else {
            self.submit(Request::transfer(tag, op, offset, data))
        }
    }

    fn push(&mut self) {
        // All of them are on one ring.
        if let Some(layer) = self.layers.first_mut() {
            layer.data.push();
        }
    }

    fn is_immediate(&self) -> bool {
        self.layers
            .first()
            .is_some_and(|layer| layer.data.is_immediate())
    }

    fn try_now(&mut self, op: Op, offset: u64, data: View<'_>) -> Option<Result<(), IoError>> {
        let len = data.len_bytes();
        let is_fine = offset
            .checked_add(len)
            .is_some_and(|end| end <= self.info.size)
            && (offset | len) & (u64::from(self.info.block_size) - 1) == 0
            && len > 0;
        let writes = op.changes();
        if !is_fine || (writes && self.info.read_only) || (op == Op::Read && !data.is_writable()) {
            return None;
        }
        if op == (Op::Write { fua: true }) && self.writer().is_some_and(|w| !w.is_durable()) {
            return None;
        }
        self.begin();
        match self.locate(writes, offset, len) {
            Located::File(layer, at) => self.file(layer)?.try_now(op, at, data),
            Located::Zero if len <= MAX_INLINE_ZEROES => {
                data.fill(0);
                Some(Ok(()))
            }
            _ => None,
        }
    }

    fn prefetches(&self) -> bool {
        false
    }

    fn prefetch(&mut self, _: Op, _: u64, _: u64) {}
}
