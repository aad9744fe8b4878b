//! A worker's queue into a container.
//!
//! ```text
//! write -> pieces -> private buffer: copied once, encrypted in place -> volume below -> done
//! read  -> pieces -> volume below -> private buffer: decrypted in place, copied once -> done
//! ```
//!
//! A request of up to [`LARGEST`] bytes is one piece and stays one request below. Pieces wait for
//! buffers in the order of their requests; a longer request takes turns with the others.

use crate::pool::{LARGEST, Pool};
use crate::volume::Shared;
use dma::SegmentList;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use volume::{
    Completion, IoError, IoErrorKind, Lane, Op, OpenQueue, QueueState, Request, VolumeQueue, Wake,
};

/// Pieces of one request that the volume below works on at a time.
const MAX_PIECES: u32 = 4;
/// Interval at which a piece is offered again to a ring that had no room for it.
const RETRY_INTERVAL: Duration = Duration::from_micros(50);

/// Request of the caller.
struct Job {
    tag: u64,
    op: Op,
    offset: u64,
    len: u64,
    /// Caller's memory, which the completion returns.
    data: SegmentList,
    /// Bytes of the range for which pieces were begun.
    begun: u64,
    /// Pieces that the volume below works on.
    outstanding: u32,
    /// Whether the request waits in the queue's line for its next piece.
    is_in_line: bool,
    result: Result<(), IoError>,
}

impl Job {
    /// Returns whether no piece will begin any more.
    fn is_begun(&self) -> bool {
        self.begun >= self.len || self.result.is_err()
    }
}

/// Part of a request in the volume below.
struct Piece {
    job: usize,
    /// Byte offset in the payload.
    offset: u64,
    len: usize,
    /// Operation below.
    op: Op,
    /// Private buffer; empty for an operation without data.
    buffer: SegmentList,
}

/// Values under numbers that are used again.
struct Table<T> {
    places: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Table<T> {
    const fn new() -> Self {
        Self {
            places: Vec::new(),
            free: Vec::new(),
        }
    }

    fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    fn put(&mut self, value: T) -> usize {
        match self.free.pop() {
            Some(number) => {
                if let Some(place) = self.places.get_mut(number) {
                    *place = Some(value);
                }
                number
            }
            None => {
                self.places.push(Some(value));
                self.places.len() - 1
            }
        }
    }

    fn get(&mut self, number: usize) -> Option<&mut T> {
        self.places.get_mut(number)?.as_mut()
    }

    fn take(&mut self, number: usize) -> Option<T> {
        let value = self.places.get_mut(number)?.take()?;
        self.free.push(number);
        Some(value)
    }

    fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        let places = self.places.iter().enumerate();
        places.filter_map(|(number, place)| Some((number, place.as_ref()?)))
    }
}

pub(crate) struct LuksQueue {
    /// Queue into the volume below. Dropped before the lane and the buffers, since that ends its
    /// requests.
    below: OpenQueue,
    lane: Option<Lane>,
    shared: Arc<Shared>,
    jobs: Table<Job>,
    pieces: Table<Piece>,
    pool: Pool,
    /// Empty lists for requests below, which keep their capacity.
    lists: Vec<SegmentList>,
    /// Requests whose next piece waits for its turn or a buffer.
    line: VecDeque<usize>,
    /// Completions of the volume below that are not processed yet.
    arrived: Vec<Completion>,
    /// Pieces that the volume below had no room for.
    again: Vec<usize>,
    /// Completions for the caller.
    ended: Vec<Completion>,
}

impl LuksQueue {
    pub(crate) fn new(shared: Arc<Shared>, below: OpenQueue, lane: Option<Lane>) -> Self {
        Self {
            below,
            lane,
            shared,
            jobs: Table::new(),
            pieces: Table::new(),
            pool: Pool::default(),
            lists: Vec::new(),
            line: VecDeque::new(),
            arrived: Vec::new(),
            again: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Begins pieces of the requests in line, each in its turn, as long as there are buffers, and
    /// processes what the volume below answers at once.
    fn advance(&mut self) {
        loop {
            while let Some(&number) = self.line.front() {
                if !self.begin_piece(number) {
                    break;
                }
                self.line.pop_front();
                let Some(job) = self.jobs.get(number) else {
                    continue;
                };
                if job.is_begun() || job.outstanding >= MAX_PIECES {
                    job.is_in_line = false;
                    self.end_if_done(number);
                } else {
                    self.line.push_back(number);
                }
            }
            let Some(completion) = self.arrived.pop() else {
                return;
            };
            self.complete(completion);
        }
    }

    /// Begins the next piece of a request. Returns `false` when there is no buffer for it.
    fn begin_piece(&mut self, number: usize) -> bool {
        let Some(job) = self.jobs.get(number).filter(|job| !job.is_begun()) else {
            return true;
        };
        let (offset, rest) = (job.offset + job.begun, job.len - job.begun);
        let has_data = !matches!(job.op, Op::Flush | Op::Deallocate);
        let len = if has_data {
            rest.min(LARGEST as u64)
        } else {
            rest
        };
        let size = len as usize;
        let mut buffer = SegmentList::new();
        if has_data {
            match self.pool.take(size) {
                Some(free) => buffer = free,
                None => return false,
            }
        }
        let op = match job.op {
            Op::WriteZeroes { fua, .. } => Op::Write { fua },
            op => op,
        };
        let begun = job.begun;
        job.begun += len;
        if let Op::Write { .. } = op {
            let target = buffer.buffer().and_then(|buffer| buffer.get_mut(..size));
            let target = target.unwrap_or_default();
            let filled = if matches!(job.op, Op::WriteZeroes { .. }) {
                target.fill(0);
                target.len()
            } else {
                job.data.copy_to(begun, target)
            };
            if filled != size {
                job.result = Err(IoErrorKind::Memory.into());
                self.pool.put(buffer);
                return true;
            }
            self.shared.encrypt(offset, target);
        }
        job.outstanding += 1;
        let piece = self.pieces.put(Piece {
            job: number,
            offset,
            len: size,
            op,
            buffer,
        });
        self.send(piece);
        true
    }

    /// Sends a piece to the volume below.
    fn send(&mut self, number: usize) {
        let Some(piece) = self.pieces.get(number) else {
            return;
        };
        let mut data = self.lists.pop().unwrap_or_default();
        if piece.op.has_data() {
            piece.buffer.slice(0, piece.len as u64, &mut data);
        }
        let at = self.shared.payload.offset + piece.offset;
        let request = Request {
            tag: number as u64,
            op: piece.op,
            offset: if piece.op == Op::Flush { 0 } else { at },
            len: if piece.op == Op::Flush {
                0
            } else {
                piece.len as u64
            },
            data,
        };
        self.arrived.extend(self.below.submit(request));
    }

    /// Processes a completion of the volume below.
    fn complete(&mut self, completion: Completion) {
        let number = completion.tag as usize;
        let mut list = completion.data;
        list.clear();
        self.lists.push(list);
        if matches!(completion.result, Err(error) if error.kind == IoErrorKind::Busy) {
            self.again.push(number);
            return;
        }
        let Some(mut piece) = self.pieces.take(number) else {
            return;
        };
        let Some(job) = self.jobs.get(piece.job) else {
            return;
        };
        let mut result = completion.result;
        if piece.op == Op::Read && result.is_ok() {
            let data = piece.buffer.buffer();
            let data = data.and_then(|data| data.get_mut(..piece.len));
            let data = data.unwrap_or_default();
            self.shared.decrypt(piece.offset, data);
            let copied = job.data.copy_from(piece.offset - job.offset, data);
            if copied != piece.len {
                result = Err(IoErrorKind::Memory.into());
            }
        }
        if piece.op.has_data() {
            self.pool.put(piece.buffer);
        }
        job.outstanding -= 1;
        job.result = job.result.and(result);
        if !job.is_begun() && !job.is_in_line {
            job.is_in_line = true;
            self.line.push_back(piece.job);
        }
        self.end_if_done(piece.job);
    }

    /// Ends a request that has no outstanding piece and begins none.
    fn end_if_done(&mut self, number: usize) {
        let is_done = |job: &mut Job| job.outstanding == 0 && job.is_begun() && !job.is_in_line;
        if self.jobs.get(number).is_some_and(is_done)
            && let Some(job) = self.jobs.take(number)
        {
            self.ended.push(Completion {
                tag: job.tag,
                result: job.result,
                data: job.data,
            });
        }
    }
}

impl VolumeQueue for LuksQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        let shared = &*self.shared;
        let checked = request.check(shared.size(), shared.block_size, shared.read_only);
        if let Err(error) = checked {
            return Some(request.complete(Err(error)));
        }
        if request.op == Op::Deallocate && !shared.discard {
            return Some(request.complete(Err(IoErrorKind::Unsupported.into())));
        }
        // A flush has no range, and is one piece.
        let len = if request.op == Op::Flush {
            1
        } else {
            request.len
        };
        if len == 0 {
            return Some(request.complete(Ok(())));
        }
        let Request {
            tag,
            op,
            offset,
            data,
            ..
        } = request;
        let number = self.jobs.put(Job {
            tag,
            op,
            offset: if op == Op::Flush { 0 } else { offset },
            len,
            data,
            begun: 0,
            outstanding: 0,
            is_in_line: true,
            result: Ok(()),
        });
        self.line.push_back(number);
        self.advance();
        let done = self.ended.iter().rposition(|ended| ended.tag == tag)?;
        Some(self.ended.swap_remove(done))
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        let arrived = &mut self.arrived;
        if let Some(lane) = &self.lane {
            lane.poll(&mut |completion| arrived.push(completion));
        }
        self.below.poll(&mut |completion| arrived.push(completion));
        if !self.again.is_empty() {
            for piece in std::mem::take(&mut self.again) {
                self.send(piece);
            }
        }
        self.advance();
        let count = self.ended.len();
        self.ended.drain(..).for_each(done);
        count
    }

    fn state(&self) -> QueueState {
        let has_news = self.lane.as_ref().is_some_and(Lane::has_news);
        let wake = if has_news || !self.ended.is_empty() {
            Wake::Poll
        } else {
            let wake = self.below.state().wake;
            if self.again.is_empty() {
                wake
            } else {
                // Both are times from now on: no clock is needed.
                wake.earlier(Wake::After(RETRY_INTERVAL), std::time::Instant::now)
            }
        };
        QueueState {
            in_flight: self.jobs.len() + self.ended.len(),
            wake,
        }
    }

    fn cancel(&mut self, tag: u64) {
        let found = self.jobs.iter().find(|(_, job)| job.tag == tag);
        let Some(number) = found.map(|(number, _)| number) else {
            return;
        };
        if let Some(job) = self.jobs.get(number).filter(|job| !job.is_begun()) {
            job.result = Err(IoErrorKind::Aborted.into());
        }
        let pieces = self.pieces.iter();
        let mine = pieces.filter(|(_, piece)| piece.job == number);
        let mine: Vec<usize> = mine.map(|(number, _)| number).collect();
        for piece in mine {
            self.below.cancel(piece as u64);
        }
        // A request without a piece ends now, and leaves the line.
        self.line.retain(|waiting| *waiting != number);
        if let Some(job) = self.jobs.get(number) {
            job.is_in_line = false;
        }
        self.end_if_done(number);
    }
}
