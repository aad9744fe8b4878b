//! IOVA windows of a device, in one worker's view.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::DeviceMemory;
use crate::dirty::DirtyLog;
use crate::epoch::Epochs;
use crate::list::Inner;
use crate::memories::Memories;
use crate::sigbus::MappingSlot;
use crate::windows::{WindowEntry, Windows};
use crate::{DmaError, MapError, Memory, Pin, SegmentList, prefetch, racy};

/// Unit of windows: their addresses, lengths and offsets into memory files are multiples of it (the
/// page size that vfio-user announces). A transfer therefore has at most one segment for each page
/// and for each piece that the guest describes.
pub const PAGE: u64 = 4096;

/// Access rights of a device in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prot {
    /// Whether the device may read guest memory.
    pub read: bool,
    /// Whether the device may write guest memory.
    pub write: bool,
}

impl Prot {
    /// Read and write access of a device.
    pub const RW: Prot = Prot {
        read: true,
        write: true,
    };
    /// Read-only access of a device.
    pub const RO: Prot = Prot {
        read: true,
        write: false,
    };

    #[inline]
    fn allows(self, access: Access) -> bool {
        match access {
            Access::Read => self.read,
            Access::Write => self.write,
        }
    }
}

/// Direction of an access, from the device's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The device reads guest memory (an NVMe Write, a submission queue, a PRP list).
    Read,
    /// The device writes guest memory (an NVMe Read, a completion queue).
    Write,
}

/// Window of guest memory in a [`DmaMap`], as [`DmaMap::windows`] returns it.
#[derive(Clone, Debug)]
pub struct Window {
    /// First guest address (IOVA) of the window.
    pub iova: u64,
    /// Length of the window in bytes.
    pub len: u64,
    /// Memory of the window and the offset into it; `None` for a window without shared memory.
    pub backing: Option<(Memory, u64)>,
    /// Access rights of the device to the window.
    pub prot: Prot,
}

/// Recently used translation of a guest address to memory.
#[derive(Clone, Copy)]
struct Cached {
    start: u64,
    /// Length of the translated range in bytes. A window cannot span all addresses, so the length
    /// fits.
    len: u64,
    host: *mut u8,
    prot: Prot,
    slot: Option<&'static MappingSlot>,
}

impl Cached {
    /// Cached translation that matches no address.
    const NONE: Cached = Cached {
        start: 0,
        len: 0,
        host: std::ptr::null_mut(),
        prot: Prot {
            read: false,
            write: false,
        },
        slot: None,
    };
}

/// Translation that was used last for one kind of access, which its window allows.
#[derive(Clone, Copy)]
struct Recent {
    start: u64,
    /// Length of the window in bytes; 0 if there is none.
    len: u64,
    host: *mut u8,
    slot: &'static MappingSlot,
}

impl Recent {
    const NONE: Recent = Recent {
        start: 0,
        len: 0,
        host: std::ptr::null_mut(),
        slot: &NO_MAPPING,
    };
}

/// Slot of [`Recent::NONE`].
static NO_MAPPING: MappingSlot = MappingSlot::new();

/// Number of cached translations: for low memory, for high memory, and two more.
const WAYS: usize = 4;

/// Host memory from a translated address to the end of its window.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    pub(crate) ptr: *mut u8,
    pub(crate) len: u64,
    pub(crate) slot: &'static MappingSlot,
}

/// Windows through which a device sees guest memory. Belongs to one worker thread (neither `Send`
/// nor `Sync`: each worker builds its own from the same [`Memory`] handles). Lookups cost O(log n).
/// The last few translations are cached, and a hit costs a few compares, no atomics. A change
/// visits at most each removed window, because memory is unmapped by another thread.
pub struct DmaMap {
    windows: Windows,
    /// Memory of the device itself (controller memory buffer), which hides windows at its
    /// addresses.
    device: Option<DeviceMemory>,
    memories: Memories,
    generation: u64,
    epochs: Epochs,
    /// Recent translations, and the index of the next to be replaced. Cleared at every change.
    tlb: [Cell<Cached>; WAYS],
    replace: Cell<usize>,
    /// Translations that were used last for reads and for writes of the device. They are separate
    /// so that a hit needs no check of the window's access rights.
    readable: Cell<Recent>,
    writable: Cell<Recent>,
    /// Log of written pages, if the guest migrates. `writable` is then empty.
    dirty: RefCell<Option<Box<DirtyLog>>>,
}

impl Default for DmaMap {
    fn default() -> DmaMap {
        DmaMap::new()
    }
}

impl DmaMap {
    /// Creates a DMA map without windows of guest memory.
    pub fn new() -> DmaMap {
        DmaMap {
            windows: Windows::default(),
            device: None,
            memories: Memories::default(),
            generation: 0,
            epochs: Epochs::new(),
            tlb: [const { Cell::new(Cached::NONE) }; WAYS],
            replace: Cell::new(0),
            readable: Cell::new(Recent::NONE),
            writable: Cell::new(Recent::NONE),
            dirty: RefCell::default(),
        }
    }

    /// Adds a window of `len` bytes at `iova`, on `backing` (a memory and an offset
    /// into it), or without memory. All three numbers are multiples of [`PAGE`].
    ///
    /// # Errors
    /// [`MapError::Empty`], [`MapError::Overflow`], [`MapError::Misaligned`] for invalid numbers;
    /// [`MapError::OutOfBacking`] when the memory is too short; [`MapError::ReadOnly`] for a
    /// writable window on read-only memory; [`MapError::Poisoned`] when its file has shrunk;
    /// [`MapError::Overlap`] with another window. The map is then unchanged.
    pub fn map(
        &mut self,
        iova: u64,
        len: u64,
        backing: Option<(Memory, u64)>,
        prot: Prot,
    ) -> Result<(), MapError> {
        let last = last(iova, len)?;
        let offset = backing.as_ref().map_or(0, |(_, offset)| *offset);
        if !(iova | len | offset).is_multiple_of(PAGE) {
            return Err(MapError::Misaligned { iova });
        }
        let mut host = std::ptr::null_mut();
        if let Some((memory, offset)) = &backing {
            let out = MapError::OutOfBacking {
                end: offset.saturating_add(len),
                size: memory.len() as u64,
            };
            let start = usize::try_from(*offset).map_err(|_| out)?;
            let bytes = usize::try_from(len).map_err(|_| out)?;
            host = memory.at(start, bytes).ok_or(out)?;
            if prot.write && !memory.is_writable() {
                return Err(MapError::ReadOnly);
            }
            if memory.is_poisoned() {
                return Err(MapError::Poisoned);
            }
        }
        if let Some(entry) = self.windows.at_or_below(last)
            && entry.last >= iova
        {
            return Err(MapError::Overlap { iova: entry.start });
        }
        let memory = backing.map(|(memory, _)| self.memories.hold(memory));
        self.windows.insert(WindowEntry {
            start: iova,
            last,
            host,
            memory,
            prot,
        });
        self.changed();
        Ok(())
    }

    /// Removes every window inside the range, and returns the sum of their lengths. Their memory
    /// stays until all currently outstanding commands have completed: see [`DmaMap::quiesced`]. A
    /// range without windows is no error: as in the kernel's VFIO, the sum is then zero and nothing
    /// changes.
    ///
    /// # Errors
    /// [`MapError::Empty`] or [`MapError::Overflow`] for an invalid range, [`MapError::Bisects`]
    /// when a window lies partly inside. The map is then unchanged.
    pub fn unmap(&mut self, iova: u64, len: u64) -> Result<u64, MapError> {
        let Some(last) = self.unmappable(iova, len)? else {
            return Ok(0);
        };
        let (mut released, mut sum) = (Vec::new(), 0u64);
        let memories = &mut self.memories;
        self.windows.remove(iova, last, |entry| {
            sum = sum.saturating_add(entry.len());
            released.extend(entry.memory.and_then(|memory| memories.release(memory)));
        });
        self.changed();
        self.epochs.retire(released);
        Ok(sum)
    }

    /// Returns the result that [`DmaMap::unmap`] would have, without changing the map.
    ///
    /// # Errors
    /// The errors of [`DmaMap::unmap`].
    pub fn unmap_size(&self, iova: u64, len: u64) -> Result<u64, MapError> {
        let last = self.unmappable(iova, len)?;
        Ok(last.map_or(0, |last| self.windows.sum(iova, last)))
    }

    /// Returns the last address of a range that contains windows, none of them in part; `None` if
    /// it contains none.
    fn unmappable(&self, iova: u64, len: u64) -> Result<Option<u64>, MapError> {
        let last = last(iova, len)?;
        let below = iova.checked_sub(1);
        if let Some(entry) = below.and_then(|below| self.windows.at_or_below(below))
            && entry.last >= iova
        {
            return Err(MapError::Bisects { iova: entry.start });
        }
        match self.windows.at_or_below(last) {
            Some(entry) if entry.start < iova => Ok(None),
            None => Ok(None),
            Some(entry) if entry.last > last => Err(MapError::Bisects { iova: entry.start }),
            Some(_) => Ok(Some(last)),
        }
    }

    /// Removes every window, and returns the saturating sum of their lengths.
    pub fn unmap_all(&mut self) -> u64 {
        if self.windows.count() == 0 {
            return 0;
        }
        let mut sum = 0u64;
        self.windows
            .clear(|entry| sum = sum.saturating_add(entry.len()));
        self.changed();
        let released = self.memories.release_all();
        self.epochs.retire(released);
        sum
    }

    /// Makes [`DmaMap::quiesced`] cover the commands that are outstanding at this call, as after an
    /// unmap. No memory is unmapped.
    pub fn fence(&mut self) {
        self.epochs.retire(Vec::new());
    }

    /// Places a whole memory of the device itself at an address (NVMe: a Controller Memory Buffer),
    /// instead of the previous one; `None` removes it. The memory hides the windows at its
    /// addresses, which become visible again when it is removed. Outstanding commands keep the
    /// previous memory.
    ///
    /// # Errors
    /// [`MapError::Overflow`] or [`MapError::Misaligned`] for an invalid address,
    /// [`MapError::ReadOnly`] for memory that is mapped read-only, [`MapError::Poisoned`] when its
    /// file has shrunk. The map is then unchanged.
    pub fn set_device_memory(&mut self, at: Option<(u64, Memory)>) -> Result<(), MapError> {
        let new = match at {
            Some((iova, memory)) => {
                let last = last(iova, memory.len() as u64)?;
                Some(DeviceMemory::new(iova, last, memory)?)
            }
            None => None,
        };
        let old = std::mem::replace(&mut self.device, new);
        self.changed();
        if let Some(old) = old {
            self.epochs.retire(vec![old.memory]);
        }
        Ok(())
    }

    /// Returns the address and the memory of the device itself (controller memory buffer), if there
    /// is any.
    pub fn device_memory(&self) -> Option<(u64, &Memory)> {
        let device = self.device.as_ref()?;
        Some((device.start, &device.memory))
    }

    /// Returns whether only a part of an address range lies in the device's own memory.
    pub fn is_mixed(&self, iova: u64, len: u64) -> bool {
        let device = self.device.as_ref();
        device.is_some_and(|device| device.is_mixed(iova, len))
    }

    /// Returns whether a list contains memory of the device itself. Then all of its memory is,
    /// unless it was composed of several transfers.
    pub fn is_device_memory(&self, list: &SegmentList) -> bool {
        let device = self.device.as_ref();
        device.is_some_and(|device| list.segments().iter().any(|s| device.has(s)))
    }

    /// Refuses a transfer of which only a part lies in the device's own memory.
    ///
    /// # Errors
    /// [`DmaError::Mixed`] for such a transfer.
    #[inline]
    pub(crate) fn unmixed(&self, list: &SegmentList) -> Result<(), DmaError> {
        match &self.device {
            None => Ok(()),
            Some(device) => device.unmixed(list),
        }
    }

    /// Begins to log the pages that are translated for writing. A log that is on already starts
    /// anew. Commands that are outstanding at this call are not in the log: the log is complete
    /// once [`DmaMap::quiesced`] returns `true`. Rings and cells that were resolved before are not
    /// logged either, see [`DmaMap::note_written`].
    pub fn start_dirty_log(&mut self) {
        *self.dirty.get_mut() = Some(Box::default());
        self.writable.set(Recent::NONE);
        self.fence();
    }

    /// Ends the log of written pages.
    pub fn stop_dirty_log(&mut self) {
        *self.dirty.get_mut() = None;
    }

    /// Returns whether written pages are logged.
    pub fn is_logging(&self) -> bool {
        self.dirty.borrow().is_some()
    }

    /// Logs pages that were written by other means than a translation, if the log is on.
    pub fn note_written(&mut self, iova: u64, len: u64) {
        if let Some(log) = self.dirty.get_mut() {
            log.mark_written(iova, len);
        }
    }

    /// Removes the pages of an address range from the log, and calls `each` with the address of
    /// every one, in order. A page is reported once all commands have ended that may have written
    /// it, so that a copy of it that is made now is complete.
    pub fn take_dirty(&mut self, iova: u64, len: u64, each: &mut dyn FnMut(u64)) {
        let (Some(log), Ok(last)) = (self.dirty.get_mut(), last(iova, len)) else {
            return;
        };
        let epochs = RefCell::new(&mut self.epochs);
        log.settle(
            || epochs.borrow().quiesced(),
            || epochs.borrow_mut().retire(Vec::new()),
        );
        log.take(iova, last, each);
        if log.is_full() {
            let windows = self.windows.between(iova, last);
            for window in windows.filter(|window| window.prot.write) {
                let pages = window.start.max(iova) / PAGE..=window.last.min(last) / PAGE;
                pages.for_each(|page| each(page * PAGE));
            }
        }
    }

    /// Returns the number of changes; rings and caches that were resolved at a different value must
    /// be resolved again.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns whether every command that was outstanding at the last unmap or [`DmaMap::fence`]
    /// has completed. An unmap may be answered only then; its memory is released by now. Later
    /// commands do not matter, so a steady load does not delay it. Rings and cells are not counted:
    /// their owner resolves them again when the generation changes.
    pub fn quiesced(&mut self) -> bool {
        self.epochs.quiesced()
    }

    /// Keeps all memory of the map, even if it is unmapped, for the duration of a command.
    /// [`SegmentList::begin`] calls it.
    #[inline]
    pub fn pin(&self) -> Pin {
        self.epochs.pin()
    }

    /// Returns the identity of this map for pins, and for callers that cache results. It is unique
    /// in this process.
    #[inline]
    pub fn id(&self) -> u64 {
        self.epochs.map()
    }

    /// Appends the host memory of `len` bytes at `iova` to `out`, which is pinned first if
    /// necessary. Adjacent host memory is merged; the range may cross windows. After an error `out`
    /// may hold a part of it.
    ///
    /// # Errors
    /// [`DmaError`] when the range is not accessible; [`DmaError::ForeignList`] when `out` holds
    /// memory that is not this map's.
    pub fn segments(
        &self,
        iova: u64,
        len: u64,
        access: Access,
        out: &mut SegmentList,
    ) -> Result<(), DmaError> {
        let out = out.attach(self).ok_or(DmaError::ForeignList)?;
        self.append(iova, len, access, out)
    }

    /// Appends like [`DmaMap::segments`], to a list that is attached to this map.
    #[inline]
    pub(crate) fn append(
        &self,
        iova: u64,
        len: u64,
        access: Access,
        out: &mut Inner,
    ) -> Result<(), DmaError> {
        self.runs(iova, len, access, |run, bytes| out.push(run, bytes, access))
    }

    /// Copies guest memory into `buf`. After an error the content of `buf` is meaningless.
    ///
    /// # Errors
    /// [`DmaError`] when the range cannot be read.
    pub fn read(&self, iova: u64, buf: &mut [u8]) -> Result<(), DmaError> {
        let mut rest = &mut *buf;
        let mut poisoned = false;
        self.runs(iova, rest.len() as u64, Access::Read, |run, bytes| {
            let (piece, after) = std::mem::take(&mut rest).split_at_mut(bytes);
            rest = after;
            // SAFETY: the run lies in a mapping for at least `bytes`, which stays
            // while `self` is borrowed.
            unsafe { racy::from_guest(run.ptr, piece) };
            poisoned |= run.slot.is_poisoned();
        })?;
        if poisoned {
            Err(DmaError::Poisoned)
        } else {
            Ok(())
        }
    }

    /// Copies `buf` into guest memory. After an error a part of it may have been copied.
    ///
    /// # Errors
    /// [`DmaError`] when the range cannot be written.
    pub fn write(&self, iova: u64, buf: &[u8]) -> Result<(), DmaError> {
        let mut rest = buf;
        let mut poisoned = false;
        self.runs(iova, rest.len() as u64, Access::Write, |run, bytes| {
            let (piece, after) = rest.split_at(bytes);
            rest = after;
            // SAFETY: the run lies in a mapping for at least `bytes`, writable since the window is
            // (checked when it was mapped), which stays while `self` is borrowed.
            unsafe { racy::to_guest(run.ptr, piece) };
            poisoned |= run.slot.is_poisoned();
        })?;
        if poisoned {
            Err(DmaError::Poisoned)
        } else {
            Ok(())
        }
    }

    /// Loads `N` adjacent pairs of 64-bit fields at `iova`: each field is one load, the pairs are
    /// not atomic. `None` when they are not aligned to 8 bytes in one window with memory:
    /// [`DmaMap::read`] decides about any other range.
    #[inline(always)]
    pub fn load_pairs64<const N: usize>(&self, iova: u64) -> Option<[[u64; 2]; N]> {
        let run = self.locate(iova, Access::Read).ok()?;
        if run.len < N as u64 * 16 || run.ptr.addr() & 7 != 0 {
            return None;
        }
        // SAFETY: the run lies in a mapping for at least `N` pairs, aligned to 8, which stays while
        // `self` is borrowed; the cells are only loaded.
        let cells: &[[AtomicU64; 2]] = unsafe { racy::cells(run.ptr, N) };
        let load = |cell: &AtomicU64| u64::from_le(cell.load(Ordering::Relaxed));
        let cells: &[_; N] = cells.first_chunk()?;
        let pairs = cells.each_ref().map(|[low, high]| [load(low), load(high)]);
        (!run.slot.is_poisoned()).then_some(pairs)
    }

    /// Stores a byte at `iova`. A later store with release ordering makes it visible. A store to
    /// memory whose file has shrunk is lost.
    ///
    /// # Errors
    /// [`DmaError`] when the address cannot be written.
    #[inline(always)]
    pub fn store8(&self, iova: u64, value: u8) -> Result<(), DmaError> {
        let run = self.locate(iova, Access::Write)?;
        // SAFETY: the run is not empty and lies in a writable mapping, which stays while `self` is
        // borrowed.
        unsafe { racy::cell8(run.ptr) }.store(value, Ordering::Relaxed);
        Ok(())
    }

    /// Prefetches the cache line at `iova` for a store. Affects only speed.
    #[inline(always)]
    pub fn prefetch_for_write(&self, iova: u64) {
        if let Ok(run) = self.locate(iova, Access::Write) {
            prefetch::line_for_write(run.ptr);
        }
    }

    /// Returns all windows in full, by address, for diagnostics and for saving state.
    pub fn windows(&self) -> impl Iterator<Item = Window> + '_ {
        self.windows.iter().map(|entry| self.window(entry))
    }

    /// Returns the window that contains `iova`, for callers that translate addresses into another
    /// space and cache a window until [`DmaMap::generation`] changes.
    ///
    /// If the device's own memory hides a part of the window, the result is the visible part around
    /// the address.
    pub fn window_at(&self, iova: u64) -> Option<Window> {
        if let Some(device) = self.device.as_ref().filter(|device| device.contains(iova)) {
            return Some(device.window());
        }
        self.entry_at(iova).map(|entry| self.window(&entry))
    }

    fn window(&self, entry: &WindowEntry) -> Window {
        let memory = entry.memory.and_then(|memory| self.memories.get(memory));
        Window {
            iova: entry.start,
            len: entry.len(),
            backing: memory.map(|memory| {
                let offset = entry.host.addr() - memory.start().addr();
                (memory.clone(), offset as u64)
            }),
            prot: entry.prot,
        }
    }

    /// Returns the number of windows of guest memory.
    pub fn window_count(&self) -> usize {
        self.windows.count()
    }

    /// Returns whether any window has memory.
    pub fn has_memory(&self) -> bool {
        self.memories.iter().next().is_some()
    }

    /// Returns whether the file of any memory in the map has shrunk.
    pub fn is_poisoned(&self) -> bool {
        self.memories.iter().any(Memory::is_poisoned)
    }

    /// Returns the memory behind `iova`, for structures that keep it mapped.
    pub(crate) fn memory_at(&self, iova: u64) -> Option<&Memory> {
        match &self.device {
            Some(device) if device.contains(iova) => Some(&device.memory),
            _ => self.memories.get(self.entry_at(iova)?.memory?),
        }
    }

    /// Returns the visible part of the window that contains an address outside of the device's own
    /// memory.
    fn entry_at(&self, iova: u64) -> Option<WindowEntry> {
        let entry = self.windows.at_or_below(iova)?;
        let entry = (iova <= entry.last).then_some(*entry)?;
        Some(match &self.device {
            None => entry,
            Some(device) => device.around(iova, entry),
        })
    }

    /// Calls `each` with every run of host memory of a range, in order, and the number of bytes to
    /// use.
    #[inline(always)]
    fn runs(
        &self,
        iova: u64,
        len: u64,
        access: Access,
        mut each: impl FnMut(Run, usize),
    ) -> Result<(), DmaError> {
        if len == 0 {
            return Ok(());
        }
        iova.checked_add(len - 1).ok_or(DmaError::Overflow)?;
        let (mut at, mut left) = (iova, len);
        loop {
            let run = self.translate(at, access)?;
            let bytes = run.len.min(left);
            // A run lies in this process's address space, so its length fits.
            each(run, bytes as usize);
            left -= bytes;
            if left == 0 {
                return Ok(());
            }
            at += bytes;
        }
    }

    /// Returns the host memory from `iova` to the end of its window, unless its file has shrunk.
    #[inline(always)]
    pub(crate) fn translate(&self, iova: u64, access: Access) -> Result<Run, DmaError> {
        let run = self.locate(iova, access)?;
        if run.slot.is_poisoned() {
            return Err(DmaError::Poisoned);
        }
        Ok(run)
    }

    /// Returns the host memory from `iova` to the end of its window.
    #[inline(always)]
    fn locate(&self, iova: u64, access: Access) -> Result<Run, DmaError> {
        let recent = self.recent(access).get();
        let offset = iova.wrapping_sub(recent.start);
        if offset < recent.len {
            // The window lies in host memory, so neither the offset nor the length can overflow.
            return Ok(Run {
                ptr: recent.host.wrapping_add(offset as usize),
                len: recent.len - offset,
                slot: recent.slot,
            });
        }
        self.locate_slow(iova, access)
    }

    #[inline(always)]
    fn recent(&self, access: Access) -> &Cell<Recent> {
        match access {
            Access::Read => &self.readable,
            Access::Write => &self.writable,
        }
    }

    #[cold]
    #[inline(never)]
    fn locate_slow(&self, iova: u64, access: Access) -> Result<Run, DmaError> {
        for cell in &self.tlb {
            let cached = cell.get();
            if iova.wrapping_sub(cached.start) < cached.len {
                return self.resolve(&cached, iova, access);
            }
        }
        let cached = match &self.device {
            Some(device) if device.contains(iova) => Cached {
                start: device.start,
                len: device.memory.len() as u64,
                host: device.memory.start(),
                prot: Prot::RW,
                slot: Some(device.memory.slot()),
            },
            _ => {
                let entry = self.entry_at(iova).ok_or(DmaError::Unmapped { iova })?;
                let memory = entry.memory.and_then(|memory| self.memories.get(memory));
                Cached {
                    start: entry.start,
                    len: entry.len(),
                    host: entry.host,
                    prot: entry.prot,
                    slot: memory.map(Memory::slot),
                }
            }
        };
        let way = self.replace.get() % WAYS;
        self.replace.set(way + 1);
        if let Some(cell) = self.tlb.get(way) {
            cell.set(cached);
        }
        self.resolve(&cached, iova, access)
    }

    /// Returns the host memory from `iova` to the end of a cached window, which is then the recent
    /// one for this access.
    fn resolve(&self, cached: &Cached, iova: u64, access: Access) -> Result<Run, DmaError> {
        if !cached.prot.allows(access) {
            return Err(DmaError::Protection { iova });
        }
        let slot = cached.slot.ok_or(DmaError::NotShared { iova })?;
        let Cached {
            start, len, host, ..
        } = *cached;
        let offset = iova - start;
        let run = Run {
            ptr: host.wrapping_add(offset as usize),
            len: len - offset,
            slot,
        };
        if access == Access::Write
            && let Some(log) = self.dirty.borrow_mut().as_mut()
        {
            log.mark(iova);
            // The next page is marked by a translation of its own.
            let len = run.len.min(PAGE - iova % PAGE);
            return Ok(Run { len, ..run });
        }
        self.recent(access).set(Recent {
            start,
            len,
            host,
            slot,
        });
        Ok(run)
    }

    fn changed(&mut self) {
        self.generation += 1;
        for cell in &self.tlb {
            cell.set(Cached::NONE);
        }
        self.readable.set(Recent::NONE);
        self.writable.set(Recent::NONE);
    }
}

impl Drop for DmaMap {
    /// Drops the map. Outstanding commands may outlive it: the last of them releases their memory.
    fn drop(&mut self) {
        self.unmap_all();
        // Removal cannot fail.
        let _ = self.set_device_memory(None);
    }
}

impl std::fmt::Debug for DmaMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DmaMap")
            .field("windows", &self.windows.count())
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

/// Returns the last address of a range of `len` bytes at `iova`, or an error if there is none.
fn last(iova: u64, len: u64) -> Result<u64, MapError> {
    let before = len.checked_sub(1).ok_or(MapError::Empty)?;
    iova.checked_add(before).ok_or(MapError::Overflow)
}
