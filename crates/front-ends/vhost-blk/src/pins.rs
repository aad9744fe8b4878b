//! Kernel pins of guest memory for the ring's requests (fixed buffers).
//!
//! A message only marks memory to be pinned. The worker pins it in short steps, between messages
//! and rounds, so that nothing waits for it. Requests to a piece that is not pinned yet take the
//! usual path. Pieces are aligned to offsets in the memory's file. A table of regions with
//! different borders (firmware often changes them) therefore keeps most of them.

use crate::wire::Region;
use dma::Memory;
use volume::{PinPace, PinnedWindows, Pinner};

/// Size of a piece in bytes, unless the guest is large: some milliseconds to pin.
const PIECE: u64 = 64 << 20;
/// Maximum size in bytes of a pinned piece, the kernel's limit for a fixed buffer.
const MAX_PIECE_LEN: u64 = 1 << 30;
/// Maximum number of pinned pieces, the number of fixed buffers of the worker's ring.
const PIECES: usize = 256;

/// Part of a memory file that is pinned as one fixed buffer.
#[derive(Clone, Debug)]
struct MemoryPiece {
    memory: Memory,
    offset: u64,
    len: u64,
}

impl MemoryPiece {
    fn is_same(&self, other: &MemoryPiece) -> bool {
        self.offset == other.offset && self.len == other.len && self.memory.is_same(&other.memory)
    }
}

/// Pinned pieces of a guest's memory, and those still to be pinned. Empty without a [`Pinner`].
#[derive(Debug, Default)]
pub(crate) struct Pins {
    pins: bool,
    /// Pieces that are pinned or wait for it, each with its address in `windows`.
    pieces: Vec<(MemoryPiece, u64)>,
    windows: PinnedWindows,
    next: u64,
}

fn pieces(regions: &[(Region, Memory)]) -> Vec<MemoryPiece> {
    let sizes = regions.iter().map(|(region, _)| region.size);
    let total = sizes.fold(0u64, u64::saturating_add);
    // Half of the slots are left for the edges of regions.
    let len = (total / (PIECES as u64 / 2)).next_power_of_two();
    let len = len.clamp(PIECE, MAX_PIECE_LEN);
    let mut pieces: Vec<MemoryPiece> = Vec::new();
    for (region, memory) in regions {
        let end = region.mmap_offset.saturating_add(region.size);
        let mut at = region.mmap_offset;
        while at < end && pieces.len() < PIECES {
            let next = (at / len).saturating_add(1).saturating_mul(len).min(end);
            let piece = MemoryPiece {
                memory: memory.clone(),
                offset: at,
                len: next - at,
            };
            if !pieces.iter().any(|known| known.is_same(&piece)) {
                pieces.push(piece);
            }
            at = next;
        }
    }
    pieces
}

impl Pins {
    pub(crate) fn new(pinner: Option<Pinner>) -> Pins {
        Pins {
            pins: pinner.is_some(),
            windows: PinnedWindows::new(pinner),
            ..Pins::default()
        }
    }

    /// Follows a change of the guest's memory: removed pieces are unpinned at once, new ones wait
    /// for [`Pins::pin`].
    pub(crate) fn update(&mut self, regions: &[(Region, Memory)]) {
        if !self.pins {
            return;
        }
        let wanted = pieces(regions);
        let windows = &mut self.windows;
        self.pieces.retain(|(piece, at)| {
            let stays = wanted.iter().any(|new| new.is_same(piece));
            if !stays {
                windows.unmapped(*at, 1);
            }
            stays
        });
        for new in wanted {
            if self.pieces.iter().any(|(piece, _)| piece.is_same(&new)) {
                continue;
            }
            self.next = self.next.wrapping_add(1);
            windows.mapped(self.next, new.len, &new.memory, new.offset);
            self.pieces.push((new, self.next));
        }
    }

    /// Returns whether any piece waits to be pinned.
    pub(crate) fn is_pinning(&self) -> bool {
        self.windows.is_pinning()
    }

    /// Pins a further piece, in as much time as `pace` allows.
    pub(crate) fn pin(&mut self, pace: &mut PinPace) {
        pace.step(&mut self.windows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use volume::{FileOptions, FileVolume, Io, IoOptions, OpenQueue, Volume};

    fn region(size: u64, offset: u64) -> Region {
        Region {
            guest_address: offset,
            size,
            user_address: offset,
            mmap_offset: offset,
        }
    }

    /// Creates a ring that pins, with its volume and queue.
    fn ring() -> (Io, OpenQueue, Arc<dyn Volume>) {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let volume = FileVolume::open(file.path(), FileOptions::default()).unwrap();
        let io = Io::new(IoOptions {
            fixed_buffers: true,
            ..IoOptions::default()
        });
        let queue = volume.open(&io).unwrap();
        (io, queue, Arc::new(volume))
    }

    fn pin_all(pins: &mut Pins) {
        let mut pace = PinPace::default();
        while pins.is_pinning() {
            pins.pin(&mut pace);
        }
    }

    #[test]
    fn memory_is_pinned_by_loop_not_message() {
        let (io, ..) = ring();
        let memory = Memory::anonymous(4 << 20).unwrap();
        let mut pins = Pins::new(io.pinner());
        pins.update(&[(region(4 << 20, 0), memory.clone())]);
        assert_eq!(io.pinned(), 0);
        assert!(pins.is_pinning());
        pin_all(&mut pins);
        assert!(!pins.is_pinning());
        if io.pinned() == 0 {
            println!("skipped: the kernel pins nothing here (ulimit -l)");
            return;
        }
        // Memory that is also in the new table stays pinned; removed memory does not.
        pins.update(&[(region(4 << 20, 0), memory.clone())]);
        assert!(!pins.is_pinning() && io.pinned() == 1);
        pins.update(&[(region(2 << 20, 2 << 20), memory)]);
        assert!(pins.is_pinning() && io.pinned() == 0);
        pin_all(&mut pins);
        assert_eq!(io.pinned(), 1);
        pins.update(&[]);
        assert!(!pins.is_pinning() && io.pinned() == 0);
    }

    #[test]
    fn pin_pieces_cover_regions() {
        let memory = Memory::anonymous(4096).unwrap();
        let cut = |regions: &[Region]| -> Vec<(u64, u64)> {
            let regions: Vec<_> = regions.iter().map(|r| (*r, memory.clone())).collect();
            let pieces = pieces(&regions);
            pieces.iter().map(|p| (p.offset, p.len)).collect()
        };
        assert_eq!(
            cut(&[
                region(0xa_0000, 0),
                region((128 << 20) - 0xc_0000, 0xc_0000)
            ]),
            [(0, 0xa_0000), (0xc_0000, PIECE - 0xc_0000), (PIECE, PIECE)]
        );
        let large = cut(&[region(100 << 30, 0)]);
        assert_eq!(large.len(), 100);
        assert_eq!(large.iter().map(|(_, len)| len).sum::<u64>(), 100 << 30);
        assert_eq!(cut(&[region(1 << 50, 0)]).len(), PIECES);
        assert_eq!(cut(&[region(4096, 0), region(4096, 0)]), [(0, 4096)]);
        assert!(cut(&[]).is_empty());
    }

    #[test]
    fn memory_without_pinner_is_ready() {
        let mut pins = Pins::new(None);
        let memory = Memory::anonymous(4 << 20).unwrap();
        pins.update(&[(region(4 << 20, 0), memory)]);
        assert!(!pins.is_pinning());
    }
}
