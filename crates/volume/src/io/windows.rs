//! Pinned windows of a guest's memory for one worker.
//!
//! A VMM waits for the answer to each window that it maps, with a time-out of some seconds, and
//! other guests of the worker wait for their commands. A window is therefore pinned after it was
//! answered, in steps, between the worker's rounds. Requests into memory that is not pinned yet
//! look its pages up.

use super::{PinnedMemory, Pinner, Step};
use dma::Memory;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Windows of a guest's memory that the kernel has pinned for one worker's requests; none without a
/// [`Pinner`].
#[derive(Debug, Default)]
pub struct PinnedWindows {
    pinner: Option<Pinner>,
    /// First address, in the guest's terms, and the memory.
    windows: Vec<(u64, PinnedMemory)>,
    /// Windows that are not pinned yet, with their first addresses; the first one perhaps in part.
    waiting: VecDeque<(u64, PinnedMemory)>,
}

impl PinnedWindows {
    /// None yet.
    pub fn new(pinner: Option<Pinner>) -> Self {
        Self {
            pinner,
            ..Self::default()
        }
    }

    /// A window was mapped: `len` bytes from address `iova` on are those of a memory from `offset`
    /// on. They are pinned by [`PinPace::step`].
    pub fn mapped(&mut self, iova: u64, len: u64, memory: &Memory, offset: u64) {
        let pinner = self.pinner.as_ref();
        if let Some(waiting) = pinner.and_then(|pinner| pinner.begin(memory, offset, len)) {
            self.waiting.push_back((iova, waiting));
        }
    }

    /// Removes the windows in these addresses, each as a whole. Requests in flight keep their pages
    /// until they have completed.
    pub fn unmapped(&mut self, iova: u64, len: u64) {
        let stays = |start: u64| start.checked_sub(iova).is_none_or(|at| at >= len);
        self.windows.retain(|&(start, _)| stays(start));
        self.waiting.retain(|&(start, _)| stays(start));
    }

    /// No window is left.
    pub fn clear(&mut self) {
        self.windows.clear();
        self.waiting.clear();
    }

    /// Returns whether a window is not pinned yet: then [`PinPace::step`] is to be called.
    pub fn is_pinning(&self) -> bool {
        !self.waiting.is_empty()
    }

    fn step(&mut self, bytes: usize) -> Option<Step> {
        let (_, first) = self.waiting.front_mut()?;
        let step = first.step(bytes);
        match step {
            Step::Allocated | Step::Pinned => {}
            Step::Done => self.windows.extend(self.waiting.pop_front()),
            Step::Failed => drop(self.waiting.pop_front()),
        }
        Some(step)
    }
}

/// Pace at which a worker pins memory: in steps short enough for the clients that wait meanwhile,
/// half of the time at most.
#[derive(Debug)]
pub struct PinPace {
    /// Pages to be allocated in a step, in bytes.
    bytes: usize,
    next: Instant,
}

impl Default for PinPace {
    fn default() -> Self {
        Self {
            bytes: Self::LEAST,
            next: Instant::now(),
        }
    }
}

impl PinPace {
    /// Target duration of a step.
    const STEP: Duration = Duration::from_micros(500);
    const LEAST: usize = 64 << 10;
    const MOST: usize = 16 << 20;

    /// When the next step may be taken.
    pub fn next(&self) -> Instant {
        self.next
    }

    /// Allocates or pins a piece of the first waiting window.
    pub fn step(&mut self, windows: &mut PinnedWindows) {
        let began = Instant::now();
        let step = windows.step(self.bytes);
        let took = began.elapsed();
        self.next = began + 2 * took;
        if step == Some(Step::Allocated) {
            if took > Self::STEP {
                self.bytes = (self.bytes / 2).max(Self::LEAST);
            } else if took < Self::STEP / 2 {
                self.bytes = (self.bytes * 2).min(Self::MOST);
            }
        }
    }
}
