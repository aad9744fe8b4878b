//! A part of another volume.

use crate::{
    Allocation, AtomicWrites, Completion, CopyRequest, CopySource, Extent, FastPath, Info, Io,
    IoError, IoErrorKind, Op, OpenQueue, QueueState, RangeCopy, Request, Volume, VolumeError,
    VolumeQueue,
};
use dma::{Buffer, SegmentList, View};
use std::sync::Arc;

/// A range of another volume, as a volume of its own. Nothing outside of the range can be reached
/// through it.
#[derive(Debug)]
pub struct SliceVolume {
    whole: Arc<dyn Volume>,
    range: Range,
}

/// Range of a slice in the lower volume.
#[derive(Clone, Copy, Debug)]
struct Range {
    offset: u64,
    /// Length of the slice in bytes; `None` for a slice that ends with the lower volume.
    len: Option<u64>,
}

impl Range {
    /// Translates an offset into the lower volume. A range behind the end of that volume is refused
    /// by it.
    fn place(&self, offset: u64, len: u64) -> Result<u64, IoError> {
        let end = offset.checked_add(len);
        let inside = end.is_some_and(|end| self.len.is_none_or(|len| end <= len));
        offset
            .checked_add(self.offset)
            .filter(|_| inside)
            .ok_or(IoErrorKind::OutOfRange.into())
    }
}

impl SliceVolume {
    /// `len` bytes of `whole` from byte `offset` on, or everything from there. Both edges lie on
    /// the volume's blocks.
    pub fn new(whole: Arc<dyn Volume>, offset: u64, len: Option<u64>) -> Result<Self, VolumeError> {
        let info = whole.info();
        let rest = info.size.saturating_sub(offset);
        let wanted = len.unwrap_or(rest);
        if wanted == 0 || wanted > rest {
            return Err(VolumeError::SliceRange {
                offset,
                len: wanted,
                size: info.size,
            });
        }
        if !(offset | wanted).is_multiple_of(u64::from(info.block_size.max(1))) {
            return Err(VolumeError::SliceAlignment {
                offset,
                len: wanted,
                block_size: info.block_size,
            });
        }
        let range = Range { offset, len };
        Ok(Self { whole, range })
    }

    fn size(&self, whole: u64) -> u64 {
        let rest = whole.saturating_sub(self.range.offset);
        self.range.len.map_or(rest, |len| len.min(rest))
    }
}

impl Volume for SliceVolume {
    fn info(&self) -> Info {
        let info = self.whole.info();
        let size = self.size(info.size);
        let description = format!(
            "{size} bytes from {} of {}",
            self.range.offset, info.description
        );
        Info {
            size,
            description,
            ..info
        }
    }

    fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
        Ok(OpenQueue::with_fast_path(SliceQueue {
            whole: self.whole.open(io)?,
            range: self.range,
        }))
    }

    fn read_at(&self, offset: u64, buffer: &mut Buffer) -> Option<Result<(), IoError>> {
        match self.range.place(offset, buffer.len() as u64) {
            Ok(place) => self.whole.read_at(place, buffer),
            Err(error) => Some(Err(error)),
        }
    }

    fn allocation(&self, offset: u64, len: u64) -> Option<(Allocation, u64)> {
        let place = self.range.place(offset, len).ok()?;
        self.whole.allocation(place, len)
    }

    fn id(&self) -> Vec<u8> {
        let mut id = self.whole.id();
        id.extend_from_slice(b"+");
        id.extend_from_slice(self.range.offset.to_string().as_bytes());
        id
    }

    fn own_id(&self) -> Option<Vec<u8>> {
        let whole = self.whole.own_id()?;
        Some([&whole[..], format!("+{}", self.range.offset).as_bytes()].concat())
    }

    /// Returns the promise of the lower volume, shifted by the slice's offset. Requests are never
    /// split.
    fn atomic_writes(&self) -> AtomicWrites {
        self.whole.atomic_writes().from_byte(self.range.offset)
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.whole)
    }

    fn extent(&self) -> Option<Extent> {
        Some(self.whole.extent()?.part(self.range.offset, self.range.len))
    }

    /// Refuses to resize the slice, because other slices use the rest of the lower volume.
    fn resize(&self, _: u64) -> Result<(), VolumeError> {
        Err(VolumeError::FixedSize)
    }

    fn refresh(&self) -> Result<bool, VolumeError> {
        let before = self.size(self.whole.info().size);
        self.whole.refresh()?;
        Ok(self.size(self.whole.info().size) != before)
    }
}

/// Queue of one worker into a [`SliceVolume`].
struct SliceQueue {
    whole: OpenQueue,
    range: Range,
}

impl VolumeQueue for SliceQueue {
    fn submit(&mut self, mut request: Request) -> Option<Completion> {
        if request.op != Op::Flush {
            match self.range.place(request.offset, request.len) {
                Ok(offset) => request.offset = offset,
                Err(error) => return Some(request.complete(Err(error))),
            }
        }
        self.whole.submit(request)
    }

    fn poll(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
        self.whole.poll(done)
    }

    fn state(&self) -> QueueState {
        self.whole.state()
    }

    fn cancel(&mut self, tag: u64) {
        self.whole.cancel(tag);
    }
}

impl FastPath for SliceQueue {
    fn start(&mut self, tag: u64, op: Op, offset: u64, data: SegmentList) -> Option<Completion> {
        match self.range.place(offset, data.len_bytes()) {
            Ok(offset) => self.whole.start(tag, op, offset, data),
            // A flush has no range.
            Err(_) if op == Op::Flush => self.whole.start(tag, op, offset, data),
            Err(error) => Some(Completion {
                tag,
                result: Err(error),
                data,
            }),
        }
    }

    fn push(&mut self) {
        self.whole.push();
    }

    fn is_immediate(&self) -> bool {
        self.whole.is_immediate()
    }

    fn try_now(&mut self, op: Op, offset: u64, data: View<'_>) -> Option<Result<(), IoError>> {
        match self.range.place(offset, data.len_bytes()) {
            Ok(offset) => self.whole.try_now(op, offset, data),
            Err(error) => self.is_immediate().then_some(Err(error)),
        }
    }

    fn prefetches(&self) -> bool {
        self.whole.prefetches()
    }

    fn prefetch(&mut self, op: Op, offset: u64, len: u64) {
        if let Ok(offset) = self.range.place(offset, len) {
            self.whole.prefetch(op, offset, len);
        }
    }

    fn range_copy(&mut self) -> Option<&mut dyn RangeCopy> {
        self.whole.range_copy().is_some().then_some(self)
    }
}

impl RangeCopy for SliceQueue {
    fn copy_source(&mut self, offset: u64, len: u64) -> Option<CopySource> {
        let offset = self.range.place(offset, len).ok()?;
        self.whole.copy_source(offset, len)
    }

    fn copy(&mut self, copy: CopyRequest) -> bool {
        let place = self.range.place(copy.offset, copy.source.len_bytes());
        place.is_ok_and(|offset| self.whole.copy(CopyRequest { offset, ..copy }))
    }
}
