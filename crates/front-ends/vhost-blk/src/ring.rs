//! The memory of a split virtqueue (virtio 1.2, 2.7): descriptor table, available ring, used ring.

use crate::log::UsedRingLog;
use dma::{Access, Area, DmaError, DmaMap, Field16, Fields16, Pairs32, Pairs64};

const DESCRIPTOR_BYTES: usize = 16;
/// Size in bytes of the fields `flags` and `idx` before the entries of both rings.
const RING_HEADER: usize = 4;
const FLAGS: usize = 0;
const IDX: usize = 2;
const USED_ENTRY: usize = 8;

/// Flag VIRTQ_AVAIL_F_NO_INTERRUPT of the available ring: the driver wants no interrupts.
const NO_INTERRUPT: u16 = 1;
/// Flag VIRTQ_USED_F_NO_NOTIFY of the used ring: the device needs no notifications.
const NO_NOTIFY: u16 = 1;

/// Flags of a virtqueue descriptor (virtio 1.2, 2.7.5).
pub(crate) mod flag {
    pub(crate) const NEXT: u16 = 1;
    pub(crate) const WRITE: u16 = 2;
    pub(crate) const INDIRECT: u16 = 4;
}

/// Virtqueue descriptor as the guest has written it, without any check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

impl Descriptor {
    /// Creates a descriptor from the two halves of its 16 bytes.
    #[inline]
    pub(crate) fn from_words(low: u64, high: u64) -> Descriptor {
        Descriptor {
            addr: low,
            len: high as u32,
            flags: (high >> 32) as u16,
            next: (high >> 48) as u16,
        }
    }
}

/// Guest-physical addresses of the three parts of a virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingAddress {
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
}

/// Returns the sizes in bytes of the three parts, for a queue of `size` entries. With EVENT_IDX
/// both rings have one more field.
pub(crate) fn part_sizes(size: u16, event_idx: bool) -> (usize, usize, usize) {
    let entries = usize::from(size);
    let event = if event_idx { 2 } else { 0 };
    (
        entries * DESCRIPTOR_BYTES,
        RING_HEADER + entries * 2 + event,
        RING_HEADER + entries * USED_ENTRY + event,
    )
}

/// Virtqueue in guest memory. Ring indices increase modulo 65,536.
#[derive(Debug)]
pub(crate) struct Ring {
    descriptors: Area,
    available: Area,
    used: Area,
    /// Number of entries of the virtqueue, a power of two.
    size: u16,
}

impl Ring {
    /// Returns the virtqueue at these addresses, of which each part must lie in one piece of
    /// memory.
    pub(crate) fn resolve(
        map: &DmaMap,
        at: RingAddress,
        size: u16,
        event_idx: bool,
    ) -> Result<Ring, DmaError> {
        let (descriptors, available, used) = part_sizes(size, event_idx);
        Ok(Ring {
            descriptors: Area::resolve(map, at.descriptors, descriptors, 8, Access::Read)?,
            available: Area::resolve(map, at.available, available, 2, Access::Read)?,
            used: Area::resolve(map, at.used, used, 4, Access::Write)?,
            size,
        })
    }

    /// Returns the generation of the memory map when the virtqueue was resolved.
    pub(crate) fn generation(&self) -> u64 {
        self.descriptors.generation()
    }

    /// Returns whether a part of the virtqueue's memory has been lost.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.descriptors.is_poisoned() || self.available.is_poisoned() || self.used.is_poisoned()
    }

    /// Returns the entries of the virtqueue for many accesses; `None` unless each part is
    /// contiguous in host memory.
    #[inline]
    pub(crate) fn entries(&self) -> Option<RingEntries<'_>> {
        let size = usize::from(self.size);
        Some(RingEntries {
            descriptors: self.descriptors.pairs64(0, size)?,
            available: self.available.fields16(RING_HEADER, size)?,
            used: self.used.pairs32_mut(RING_HEADER, size)?,
            used_idx: self.used.field16_mut(IDX)?,
            mask: self.size.wrapping_sub(1),
        })
    }

    #[inline]
    fn slot(&self, index: u16) -> usize {
        usize::from(index & (self.size - 1))
    }

    /// Returns the descriptor at this index, read once; `None` outside the table.
    #[inline]
    pub(crate) fn descriptor(&self, index: u16) -> Option<Descriptor> {
        if index >= self.size {
            return None;
        }
        let at = usize::from(index) * DESCRIPTOR_BYTES;
        let [low, high] = self.descriptors.load_pair64(at);
        Some(Descriptor::from_words(low, high))
    }

    /// Returns the driver's index of the next available entry; the entries before it are visible.
    #[inline]
    pub(crate) fn available_idx(&self) -> u16 {
        self.available.load16_acquire(IDX)
    }

    /// Returns the head index of the descriptor chain in entry `index` of the available ring.
    #[inline]
    pub(crate) fn available_head(&self, index: u16) -> u16 {
        self.available.load16(RING_HEADER + self.slot(index) * 2)
    }

    /// Returns whether the driver suppresses interrupts (without EVENT_IDX).
    #[inline]
    pub(crate) fn no_interrupt(&self) -> bool {
        self.available.load16(FLAGS) & NO_INTERRUPT != 0
    }

    /// Returns the used index at which an interrupt is requested (with EVENT_IDX).
    #[inline]
    pub(crate) fn used_event(&self) -> u16 {
        self.available
            .load16(RING_HEADER + usize::from(self.size) * 2)
    }

    /// Writes entry `index` of the used ring: head index and number of bytes written.
    #[inline]
    pub(crate) fn set_used(&self, index: u16, head: u16, len: u32) {
        let at = RING_HEADER + self.slot(index) * USED_ENTRY;
        self.used.store_pair32(at, [u32::from(head), len]);
    }

    /// Marks the used entries from index `old` to before `new`, and the used index, as written.
    #[cold]
    pub(crate) fn mark_used(&self, log: &UsedRingLog, old: u16, new: u16) {
        let count = new.wrapping_sub(old).min(self.size);
        let first = old & (self.size - 1);
        let to_end = count.min(self.size - first);
        for (first, count) in [(first, to_end), (0, count - to_end)] {
            let at = RING_HEADER + usize::from(first) * USED_ENTRY;
            log.mark(at as u64, (usize::from(count) * USED_ENTRY) as u64);
        }
        log.mark(IDX as u64, 2);
        if let Some(signal) = &log.signal {
            signal.send();
        }
    }

    /// Returns the range in the used ring, as offset and length in bytes, that
    /// [`Ring::set_available_event`] writes, or without EVENT_IDX [`Ring::set_notify`].
    pub(crate) fn notify_field(&self, event_idx: bool) -> (u64, u64) {
        let event = RING_HEADER + usize::from(self.size) * USED_ENTRY;
        (if event_idx { event } else { FLAGS } as u64, 2)
    }

    /// Returns the used index that was published last.
    #[inline]
    pub(crate) fn used_idx(&self) -> u16 {
        self.used.load16(IDX)
    }

    /// Asks the driver for a notification when it passes the available index `index` (with
    /// EVENT_IDX).
    #[inline]
    pub(crate) fn set_available_event(&self, index: u16) {
        self.used
            .store16(RING_HEADER + usize::from(self.size) * USED_ENTRY, index);
    }

    /// Asks the driver for notifications, or for none (without EVENT_IDX).
    #[inline]
    pub(crate) fn set_notify(&self, wanted: bool) {
        self.used.store16(FLAGS, if wanted { 0 } else { NO_NOTIFY });
    }
}

/// The used index of a virtqueue.
pub(crate) trait UsedIndex {
    /// Publishes the entries of the used ring before `index`.
    fn publish_used(&self, index: u16);
}

impl UsedIndex for Ring {
    #[inline]
    fn publish_used(&self, index: u16) {
        self.used.store16_release(IDX, index);
    }
}

impl UsedIndex for RingEntries<'_> {
    #[inline(always)]
    fn publish_used(&self, index: u16) {
        self.used_idx.store_release(index);
    }
}

/// Entries of a contiguous virtqueue: the descriptors, both rings without their headers, and the
/// used index.
#[derive(Clone, Copy)]
pub(crate) struct RingEntries<'a> {
    descriptors: Pairs64<'a>,
    available: Fields16<'a>,
    used: Pairs32<'a>,
    used_idx: Field16<'a>,
    mask: u16,
}

impl RingEntries<'_> {
    #[inline(always)]
    fn slot(&self, index: u16) -> usize {
        usize::from(index & self.mask)
    }

    /// Returns both halves of the descriptor at this index, read once; `None` outside the table.
    #[inline(always)]
    pub(crate) fn descriptor(&self, index: u16) -> Option<[u64; 2]> {
        self.descriptors.load(usize::from(index))
    }

    /// Returns the head index in entry `index` of the available ring.
    #[inline(always)]
    pub(crate) fn available_head(&self, index: u16) -> Option<u16> {
        self.available.load(self.slot(index))
    }

    /// Writes entry `index` of the used ring: head index and number of bytes written.
    #[inline(always)]
    pub(crate) fn set_used(&self, index: u16, head: u16, len: u32) {
        self.used.store(self.slot(index), [u32::from(head), len]);
    }

    /// Prefetches the first descriptor of the chain in entry `index` of the available ring, for a
    /// request that is fetched soon. Affects only speed.
    #[inline(always)]
    pub(crate) fn prefetch_chain(&self, index: u16) {
        if let Some(head) = self.available_head(index) {
            self.descriptors.prefetch(usize::from(head));
        }
    }

    /// Prefetches entry `index` of the used ring, for a request that is answered soon. Affects only
    /// speed.
    #[inline(always)]
    pub(crate) fn prefetch_used(&self, index: u16) {
        self.used.prefetch(self.slot(index));
    }
}

/// Returns whether a side that moves an index from `old` to `new` must signal its peer, which asked
/// for an event at `event` (2.7.10: `vring_need_event`).
#[inline]
pub(crate) fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dma::{Memory, Prot};

    fn map(memory: &Memory) -> DmaMap {
        let mut map = DmaMap::new();
        let len = memory.len() as u64;
        map.map(0x1000, len, Some((memory.clone(), 0)), Prot::RW)
            .unwrap();
        map
    }

    #[test]
    fn ring_parts_follow_virtio_layout() {
        let memory = Memory::anonymous(0x3000).unwrap();
        let map = map(&memory);
        let at = RingAddress {
            descriptors: 0x1000,
            available: 0x1040,
            used: 0x2000,
        };
        let ring = Ring::resolve(&map, at, 4, true).unwrap();
        // Descriptor 1; available: idx 6, entry 5 (slot 1), used_event.
        let descriptor: Vec<u8> = [
            0x1122u64.to_le_bytes(),
            0x0003_0002_0000_0040u64.to_le_bytes(),
        ]
        .concat();
        memory.write(16, &descriptor).unwrap();
        memory.write(0x40 + 2, &6u16.to_le_bytes()).unwrap();
        memory.write(0x40 + 4 + 2, &3u16.to_le_bytes()).unwrap();
        memory.write(0x40 + 4 + 8, &9u16.to_le_bytes()).unwrap();
        assert_eq!(
            ring.descriptor(1),
            Some(Descriptor {
                addr: 0x1122,
                len: 0x40,
                flags: 2,
                next: 3
            })
        );
        assert_eq!(ring.descriptor(4), None);
        assert_eq!(ring.available_idx(), 6);
        assert_eq!(ring.available_head(5), 3);
        assert_eq!(ring.used_event(), 9);
        ring.set_used(6, 2, 0x201);
        ring.publish_used(7);
        ring.set_available_event(0x55aa);
        let mut used = [0; 40];
        memory.read(0x1000, &mut used).unwrap();
        assert_eq!(used[2..4], [7, 0]);
        assert_eq!(used[4 + 16..4 + 24], [2, 0, 0, 0, 1, 2, 0, 0]);
        assert_eq!(used[4 + 32..4 + 34], [0xaa, 0x55]);
        assert_eq!(ring.used_idx(), 7);
    }

    #[test]
    fn ring_entries_equal_single_accesses() {
        let memory = Memory::anonymous(0x3000).unwrap();
        let map = map(&memory);
        let at = RingAddress {
            descriptors: 0x1000,
            available: 0x1040,
            used: 0x2000,
        };
        let ring = Ring::resolve(&map, at, 4, true).unwrap();
        let bytes: Vec<u8> = (0..0x3000u32).map(|i| (i * 7 + i / 256) as u8).collect();
        memory.write(0, &bytes).unwrap();
        let entries = ring.entries().unwrap();
        for index in [0, 1, 3, 4, 7, u16::MAX] {
            let descriptor = entries.descriptor(index);
            let descriptor = descriptor.map(|[low, high]| Descriptor::from_words(low, high));
            assert_eq!(descriptor, ring.descriptor(index));
            let head = entries.available_head(index);
            assert_eq!(head, Some(ring.available_head(index)));
        }
        entries.set_used(6, 2, 0x201);
        entries.publish_used(0x1234);
        assert_eq!(ring.used_idx(), 0x1234);
        let mut used = [0; 8];
        memory.read(0x1000 + 4 + 16, &mut used).unwrap();
        assert_eq!(used, [2, 0, 0, 0, 1, 2, 0, 0]);
    }

    #[test]
    fn scattered_ring_has_single_accesses_only() {
        let memory = Memory::anonymous(0x5000).unwrap();
        let mut map = DmaMap::new();
        for (iova, len, offset) in [(0x1000, 0x1000, 0x4000), (0x2000, 0x4000, 0)] {
            let backing = Some((memory.clone(), offset));
            map.map(iova, len, backing, Prot::RW).unwrap();
        }
        let contiguous = RingAddress {
            descriptors: 0x2000,
            available: 0x3000,
            used: 0x4000,
        };
        let scattered = RingAddress {
            descriptors: 0x1000,
            ..contiguous
        };
        let ring = |at| Ring::resolve(&map, at, 512, true).unwrap();
        assert!(ring(contiguous).entries().is_some());
        assert!(ring(scattered).entries().is_none());
        memory.write(0x10, &[0x44; 16]).unwrap();
        let descriptor = ring(scattered).descriptor(257).unwrap();
        assert_eq!(descriptor.len, 0x4444_4444);
    }

    #[test]
    fn ring_outside_memory_is_refused() {
        let memory = Memory::anonymous(0x3000).unwrap();
        let map = map(&memory);
        let good = RingAddress {
            descriptors: 0x1000,
            available: 0x2000,
            used: 0x3000,
        };
        assert!(Ring::resolve(&map, good, 64, true).is_ok());
        // 64 entries: 1024, 134 (with event) and 518 bytes.
        for bad in [
            RingAddress {
                descriptors: 0x4000 - 1008,
                ..good
            },
            RingAddress {
                available: 0x4000 - 132,
                ..good
            },
            RingAddress {
                used: 0x4000 - 516,
                ..good
            },
            RingAddress {
                used: 0x4000,
                ..good
            },
            RingAddress {
                used: u64::MAX - 3,
                ..good
            },
            RingAddress {
                used: 0x2001,
                ..good
            },
            RingAddress {
                descriptors: 0x1004,
                ..good
            },
        ] {
            assert!(Ring::resolve(&map, bad, 64, true).is_err(), "{bad:x?}");
        }
        let edge = RingAddress {
            used: 0x4000 - 516,
            ..good
        };
        assert!(
            Ring::resolve(&map, edge, 64, false).is_ok(),
            "no event field"
        );
    }

    #[test]
    fn need_event_follows_event_idx() {
        // Passing the event signals, reaching it does not.
        assert!(need_event(5, 6, 5));
        assert!(need_event(5, 9, 4));
        assert!(!need_event(5, 5, 4));
        assert!(!need_event(4, 9, 5));
        assert!(need_event(0xffff, 0, 0xffff));
        assert!(!need_event(7, 7, 7));
    }
}
