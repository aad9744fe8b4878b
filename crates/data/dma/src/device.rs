//! Memory of the device itself, which appears at some of its addresses (NVMe Base 2.1, 8.2.1:
//! Controller Memory Buffer). The host can write to it at any time, as to its own memory.

use crate::map::{PAGE, Prot, Window};
use crate::windows::WindowEntry;
use crate::{DmaError, MapError, Memory, Segment, SegmentList};

/// Address range and memory of the device itself (controller memory buffer), which hides guest
/// memory there.
pub(crate) struct DeviceMemory {
    /// First address of the device's memory.
    pub(crate) start: u64,
    /// Last address of the device's memory, inclusive.
    last: u64,
    pub(crate) memory: Memory,
}

impl DeviceMemory {
    /// Places a whole memory at `start` to `last`; the caller has checked that the range has the
    /// memory's length.
    pub(crate) fn new(start: u64, last: u64, memory: Memory) -> Result<DeviceMemory, MapError> {
        if !(start | memory.len() as u64).is_multiple_of(PAGE) {
            return Err(MapError::Misaligned { iova: start });
        }
        if !memory.is_writable() {
            return Err(MapError::ReadOnly);
        }
        if memory.is_poisoned() {
            return Err(MapError::Poisoned);
        }
        Ok(DeviceMemory {
            start,
            last,
            memory,
        })
    }

    pub(crate) fn contains(&self, iova: u64) -> bool {
        (self.start..=self.last).contains(&iova)
    }

    /// Returns whether only a part of an address range lies in the device's memory.
    pub(crate) fn is_mixed(&self, iova: u64, len: u64) -> bool {
        let last = iova.saturating_add(len.saturating_sub(1));
        let touches = iova <= self.last && last >= self.start;
        touches && !(self.contains(iova) && self.contains(last))
    }

    /// Returns the visible part of a window around an address outside the device's memory.
    pub(crate) fn around(&self, iova: u64, mut entry: WindowEntry) -> WindowEntry {
        if iova < self.start {
            // `iova` is lower, so there is an address before the start.
            entry.last = entry.last.min(self.start - 1);
        } else if entry.start <= self.last {
            // Less than `iova`, so there is an address behind.
            let hidden = self.last - entry.start + 1;
            entry.start += hidden;
            if !entry.host.is_null() {
                entry.host = entry.host.wrapping_add(hidden as usize);
            }
        }
        entry
    }

    pub(crate) fn window(&self) -> Window {
        Window {
            iova: self.start,
            len: self.memory.len() as u64,
            backing: Some((self.memory.clone(), 0)),
            prot: Prot::RW,
        }
    }

    /// Returns whether a segment lies in the device's memory. A segment never spans two memories.
    pub(crate) fn has(&self, segment: &Segment) -> bool {
        let offset = segment
            .as_ptr()
            .addr()
            .wrapping_sub(self.memory.start().addr());
        offset < self.memory.len()
    }

    /// Returns an error for a transfer of which only a part lies in the device's memory.
    #[cold]
    #[inline(never)]
    pub(crate) fn unmixed(&self, list: &SegmentList) -> Result<(), DmaError> {
        let mut here = list.segments().iter().map(|segment| self.has(segment));
        let first = here.next().unwrap_or_default();
        if here.all(|here| here == first) {
            Ok(())
        } else {
            Err(DmaError::Mixed)
        }
    }
}
