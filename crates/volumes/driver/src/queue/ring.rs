//! Memory of queues, PRP lists and shadow doorbells. `unsafe` covers the accesses: each is to a
//! checked offset in memory that the area keeps mapped.
//!
//! The device writes to this memory at any time, and may be hostile: its values are copied once,
//! and treated as untrusted data.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use dma::prefetch;
use nvme::{Command, Completion, Status};
use zerocopy::{IntoBytes, little_endian::U16};

use crate::buffer::DmaBuffer;

/// Memory area of a ring or list that is accessed through a raw pointer.
#[derive(Debug)]
struct Area {
    base: NonNull<u8>,
    /// DMA buffer that keeps `base` mapped.
    buffer: DmaBuffer,
}

// SAFETY: `base` points into memory that `buffer` keeps, and that any thread may access.
unsafe impl Send for Area {}
// SAFETY: through `&Area` memory is accessed by atomics, or by exclusive owners of a ring (`&mut`).
unsafe impl Sync for Area {}

impl Area {
    fn new(buffer: DmaBuffer) -> Option<Self> {
        let (memory, offset) = buffer.memory()?;
        let piece = memory.segment(offset, buffer.len())?;
        let base = NonNull::new(piece.as_ptr())?;
        (memory.is_writable() && base.as_ptr().addr().is_multiple_of(64))
            .then_some(Self { base, buffer })
    }
}

/// Submission queue memory, as the driver writes it.
#[derive(Debug)]
pub(crate) struct SqRing {
    area: Area,
    entries: u32,
}

impl SqRing {
    /// Creates a submission queue of `entries` entries; `None` if the buffer is too short.
    pub fn new(buffer: DmaBuffer, entries: u32) -> Option<Self> {
        let fits = entries > 0 && buffer.len() >= entries as usize * size_of::<Command>();
        let area = Area::new(buffer)?;
        fits.then_some(Self { area, entries })
    }

    pub fn iova(&self) -> u64 {
        self.area.buffer.iova()
    }

    /// Prefetches the cache line of an entry that will soon be written.
    #[inline(always)]
    pub fn prefetch(&self, index: u32) {
        let at = index as usize * size_of::<Command>();
        prefetch::line_for_write(self.area.base.as_ptr().wrapping_add(at));
    }

    /// Writes a command to an entry; an invalid index is ignored. The controller sees the command
    /// after the doorbell is rung.
    #[inline]
    pub fn put(&mut self, index: u32, command: &Command) {
        if index >= self.entries {
            return;
        }
        let to = self
            .area
            .base
            .as_ptr()
            .wrapping_add(index as usize * size_of::<Command>());
        // SAFETY: entry `index` lies inside the area (checked here and in `new`), which is
        // writable; a command on the stack or in a slot does not overlap it.
        unsafe { to.copy_from_nonoverlapping(command.as_bytes().as_ptr(), size_of::<Command>()) }
    }
}

/// Completion queue entry as numbers, which stay in registers. A [`Completion`] is bytes, and would
/// pass through memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cqe {
    pub dw0: u32,
    dw1: u32,
    /// Dword 2 of the entry: SQ Head Pointer and SQ Identifier.
    dw2: u32,
    /// Dword 3 of the entry: Command Identifier, Phase Tag and Status.
    dw3: u32,
}

impl Cqe {
    #[inline(always)]
    pub fn sqid(self) -> u16 {
        (self.dw2 >> 16) as u16
    }

    #[inline(always)]
    pub fn cid(self) -> u16 {
        self.dw3 as u16
    }

    #[inline(always)]
    pub fn status(self) -> Status {
        Status::from_bits((self.dw3 >> 17) as u16)
    }
}

impl From<Cqe> for Completion {
    fn from(entry: Cqe) -> Self {
        Self {
            dw0: entry.dw0.into(),
            dw1: entry.dw1.into(),
            sqhd: (entry.dw2 as u16).into(),
            sqid: entry.sqid().into(),
            cid: entry.cid().into(),
            status_phase: ((entry.dw3 >> 16) as u16).into(),
        }
    }
}

impl From<Completion> for Cqe {
    fn from(entry: Completion) -> Self {
        let pair = |low: U16, high: U16| u32::from(high.get()) << 16 | u32::from(low.get());
        Self {
            dw0: entry.dw0.get(),
            dw1: entry.dw1.get(),
            dw2: pair(entry.sqhd, entry.sqid),
            dw3: pair(entry.cid, entry.status_phase),
        }
    }
}

/// Completion queue memory, as the driver reads it.
#[derive(Debug)]
pub(crate) struct CqRing {
    area: Area,
    entries: u32,
}

impl CqRing {
    /// Creates a completion queue of `entries` entries; `None` if the buffer is too short.
    pub fn new(buffer: DmaBuffer, entries: u32) -> Option<Self> {
        let fits = entries > 0 && buffer.len() >= entries as usize * size_of::<Completion>();
        let area = Area::new(buffer)?;
        fits.then_some(Self { area, entries })
    }

    pub fn iova(&self) -> u64 {
        self.area.buffer.iova()
    }

    /// Returns the entry at this index if its phase tag equals `phase`.
    #[inline(always)]
    pub fn take(&self, index: u32, phase: bool) -> Option<Cqe> {
        let entry = self.entry(index)?;
        let dw3 = self.dword(entry, 3, Ordering::Acquire);
        if (dw3 >> 16 & 1 != 0) != phase {
            return None;
        }
        Some(self.rest(entry, dw3))
    }

    /// Returns the entry at this index, whatever its phase tag.
    pub fn raw(&self, index: u32) -> Option<Cqe> {
        let entry = self.entry(index)?;
        let dw3 = self.dword(entry, 3, Ordering::Acquire);
        Some(self.rest(entry, dw3))
    }

    /// Prefetches the cache line of an entry that will soon be read.
    #[inline(always)]
    pub fn prefetch(&self, index: u32) {
        let at = index as usize * size_of::<Completion>();
        prefetch::line(self.area.base.as_ptr().wrapping_add(at));
    }

    #[inline(always)]
    fn entry(&self, index: u32) -> Option<usize> {
        (index < self.entries).then_some(index as usize * size_of::<Completion>())
    }

    #[inline(always)]
    fn dword(&self, entry: usize, dword: usize, order: Ordering) -> u32 {
        let at = self.area.base.as_ptr().wrapping_add(entry + 4 * dword);
        // SAFETY: a dword of an entry inside the area, aligned to 4 since the area is to 64; it is
        // accessed by atomics or by the device only.
        u32::from_le(unsafe { AtomicU32::from_ptr(at.cast()) }.load(order))
    }

    #[inline(always)]
    fn rest(&self, entry: usize, dw3: u32) -> Cqe {
        Cqe {
            dw0: self.dword(entry, 0, Ordering::Relaxed),
            dw1: self.dword(entry, 1, Ordering::Relaxed),
            dw2: self.dword(entry, 2, Ordering::Relaxed),
            dw3,
        }
    }

    /// Zeroes all entries before the queue is created again; the controller must not be using it.
    pub fn clear(&mut self) {
        let _ = self.area.buffer.fill(0);
    }
}

/// DMA memory with one list for each command: PRP list, SGL segment or Dataset Management ranges.
#[derive(Debug)]
pub(crate) struct Lists {
    area: Area,
    /// Size of each list in bytes.
    each: usize,
    count: usize,
}

impl Lists {
    pub fn new(buffer: DmaBuffer, each: usize, count: usize) -> Option<Self> {
        let fits = each.is_multiple_of(8) && each.checked_mul(count)? <= buffer.len();
        let area = Area::new(buffer)?;
        fits.then_some(Self { area, each, count })
    }

    /// Returns the size in bytes of each command's list.
    pub fn each(&self) -> usize {
        self.each
    }

    /// Returns the device address of byte `at` of a list.
    #[inline]
    pub fn iova(&self, list: usize, at: usize) -> u64 {
        self.area.buffer.iova() + (list * self.each + at) as u64
    }

    /// Sets 64-bit word `index` of a list; an invalid index is ignored.
    #[inline]
    pub fn set(&self, list: usize, index: usize, value: u64) {
        if list >= self.count || index >= self.each / 8 {
            return;
        }
        let at = self
            .area
            .base
            .as_ptr()
            .wrapping_add(list * self.each + index * 8);
        // SAFETY: inside the area (checked here and in `new`), aligned to 8 since the area is to 64
        // and lists are multiples of 8; accessed by atomics or by the device only.
        unsafe { AtomicU64::from_ptr(at.cast()) }.store(value.to_le(), Ordering::Relaxed);
    }
}

/// The two buffers of Doorbell Buffer Config (NVMe Base 2.1, 5.2.5), one memory page each.
#[derive(Debug)]
pub struct ShadowBuffers {
    doorbells: Area,
    eventidxs: Area,
}

impl ShadowBuffers {
    pub(crate) fn new(doorbells: DmaBuffer, eventidxs: DmaBuffer) -> Option<Self> {
        Some(Self {
            doorbells: Area::new(doorbells)?,
            eventidxs: Area::new(eventidxs)?,
        })
    }

    pub(crate) fn clear(&self) {
        let _ = self.doorbells.buffer.fill(0);
        let _ = self.eventidxs.buffer.fill(0);
    }

    /// Returns the Shadow Doorbell buffer.
    pub fn doorbells(&self) -> &DmaBuffer {
        &self.doorbells.buffer
    }

    /// Returns the EventIdx buffer.
    pub fn eventidxs(&self) -> &DmaBuffer {
        &self.eventidxs.buffer
    }

    /// Returns the cells of the doorbell at this byte offset in both buffers; `None` if the offset
    /// exceeds them.
    pub(crate) fn cells(self: &Arc<Self>, offset: usize) -> Option<ShadowCells> {
        let cell = |area: &Area| {
            let inside = offset.is_multiple_of(4) && offset.checked_add(4)? <= area.buffer.len();
            inside.then(|| area.base.as_ptr().wrapping_add(offset).cast::<u32>())
        };
        Some(ShadowCells {
            doorbell: NonNull::new(cell(&self.doorbells)?)?,
            eventidx: NonNull::new(cell(&self.eventidxs)?)?,
            _keep: self.clone(),
        })
    }
}

/// Cells of one shadow doorbell: its value and its EventIdx.
#[derive(Debug)]
pub(crate) struct ShadowCells {
    doorbell: NonNull<u32>,
    eventidx: NonNull<u32>,
    _keep: Arc<ShadowBuffers>,
}

// SAFETY: the cells lie in memory that `_keep` keeps; they are accessed by atomics only.
unsafe impl Send for ShadowCells {}
// SAFETY: as above.
unsafe impl Sync for ShadowCells {}

impl ShadowCells {
    #[inline]
    pub fn get(&self) -> doorbell::Shadow<'_, AtomicU32> {
        doorbell::Shadow {
            // SAFETY: in range and aligned (checked in `cells`), kept by `_keep`.
            doorbell: unsafe { AtomicU32::from_ptr(self.doorbell.as_ptr()) },
            // SAFETY: as above.
            eventidx: unsafe { AtomicU32::from_ptr(self.eventidx.as_ptr()) },
        }
    }
}
