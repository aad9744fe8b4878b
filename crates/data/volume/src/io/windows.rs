//! Pinning of a guest's memory windows for one worker.
//!
//! A VMM waits some seconds at most for the reply to each mapping of a window, and other guests of
//! the worker wait for their commands. A window is therefore pinned after the reply, in steps
//! between the worker's rounds. Until then, the kernel looks up pages for each request.

use super::{PinStep, PinnedMemory, Pinner};
use dma::Memory;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Windows of a guest's memory that the kernel pins for one worker's requests; always empty without
/// a [`Pinner`].
#[derive(Debug, Default)]
pub struct PinnedWindows {
    pinner: Option<Pinner>,
    /// Windows of guest memory that are pinned completely: first guest address (IOVA) and memory.
    windows: Vec<(u64, PinnedMemory)>,
    /// Windows of guest memory that are not pinned completely, with their first IOVA.
    waiting: VecDeque<(u64, PinnedMemory)>,
}

impl PinnedWindows {
    /// Creates an empty set; without a `pinner`, added windows are not pinned.
    pub fn new(pinner: Option<Pinner>) -> Self {
        Self {
            pinner,
            ..Self::default()
        }
    }

    /// Adds a mapped window: `len` bytes at `iova`, backed by a memory from `offset` on.
    /// [`PinPace::step`] pins it.
    pub fn mapped(&mut self, iova: u64, len: u64, memory: &Memory, offset: u64) {
        let pinner = self.pinner.as_ref();
        if let Some(waiting) = pinner.and_then(|pinner| pinner.begin(memory, offset, len)) {
            self.waiting.push_back((iova, waiting));
        }
    }

    /// Removes every window that overlaps these addresses. Requests in flight keep their pages
    /// until they have completed.
    pub fn unmapped(&mut self, iova: u64, len: u64) {
        let stays = |start: u64| start.checked_sub(iova).is_none_or(|at| at >= len);
        self.windows.retain(|&(start, _)| stays(start));
        self.waiting.retain(|&(start, _)| stays(start));
    }

    /// Removes all windows, which unpins their memory.
    pub fn clear(&mut self) {
        self.windows.clear();
        self.waiting.clear();
    }

    /// Returns whether a window is not pinned yet, so that [`PinPace::step`] has to be called.
    pub fn is_pinning(&self) -> bool {
        !self.waiting.is_empty()
    }

    fn step(&mut self, bytes: usize) -> Option<PinStep> {
        let (_, first) = self.waiting.front_mut()?;
        let step = first.step(bytes);
        match step {
            PinStep::Allocated | PinStep::Pinned => {}
            PinStep::Done => self.windows.extend(self.waiting.pop_front()),
            PinStep::Failed => drop(self.waiting.pop_front()),
        }
        Some(step)
    }
}

/// Pace at which a worker pins memory: in short steps, and for at most half of the time, because
/// other clients wait meanwhile.
#[derive(Debug)]
pub struct PinPace {
    /// Number of bytes of pages that one step allocates.
    bytes: usize,
    next: Instant,
}

impl Default for PinPace {
    fn default() -> Self {
        Self {
            bytes: Self::MIN_STEP,
            next: Instant::now(),
        }
    }
}

impl PinPace {
    /// Duration that one step of pinning should take.
    const STEP_TIME: Duration = Duration::from_micros(500);
    const MIN_STEP: usize = 64 << 10;
    const MAX_STEP: usize = 16 << 20;

    /// Returns the earliest time of the next step of pinning.
    pub fn next(&self) -> Instant {
        self.next
    }

    /// Allocates or pins the next piece of the first waiting window.
    pub fn step(&mut self, windows: &mut PinnedWindows) {
        let began = Instant::now();
        let step = windows.step(self.bytes);
        let took = began.elapsed();
        self.next = began + 2 * took;
        if step == Some(PinStep::Allocated) {
            if took > Self::STEP_TIME {
                self.bytes = (self.bytes / 2).max(Self::MIN_STEP);
            } else if took < Self::STEP_TIME / 2 {
                self.bytes = (self.bytes * 2).min(Self::MAX_STEP);
            }
        }
    }
}
