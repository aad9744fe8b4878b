//! What is pinned of a guest's memory for one worker, window by window.

use super::{PinnedMemory, Pinner};
use dma::Memory;

/// Windows of a guest's memory that the kernel has pinned for one worker's requests; none without a [`Pinner`].
#[derive(Debug, Default)]
pub struct PinnedWindows {
    pinner: Option<Pinner>,
    /// First address, in the guest's terms, and the memory.
    windows: Vec<(u64, PinnedMemory)>,
}

impl PinnedWindows {
    /// None yet.
    pub fn new(pinner: Option<Pinner>) -> Self {
        let windows = Vec::new();
        Self { pinner, windows }
    }

    /// A window was mapped: `len` bytes from address `iova` on are those of a memory from `offset` on.
    pub fn mapped(&mut self, iova: u64, len: u64, memory: &Memory, offset: u64) {
        let pinner = self.pinner.as_ref();
        if let Some(pinned) = pinner.and_then(|pinner| pinner.pin(memory, offset, len)) {
            self.windows.push((iova, pinned));
        }
    }

    /// The windows in these addresses are no more; each goes whole. Requests in flight keep their pages until they are over.
    pub fn unmapped(&mut self, iova: u64, len: u64) {
        let stays = |start: u64| start.checked_sub(iova).is_none_or(|at| at >= len);
        self.windows.retain(|&(start, _)| stays(start));
    }

    /// No window is left.
    pub fn clear(&mut self) {
        self.windows.clear();
    }
}
