//! Live migration of a controller's guest: the engine's queues stop, are described for the
//! destination, and are installed there. While the guest runs, pages that queues write are logged.
//!
//! The log costs nothing while commands are executed. `dma` logs data. Rings and the shadow buffers
//! are written without a translation: [`Engine::log_queues`] finds out what was written since the
//! last call, and is called before the log is read and before a queue or its memory changes.

use super::Engine;
use super::doorbells::DoorbellKind;
use super::journal::{CqNote, SqNote, register_seen};
use super::queue::Cq;
use super::queues::Queues;
use super::recover::{SavedCq, SavedSq};
use crate::survival::stream::{MovedCq, MovedQueue, MovedSq};
use std::sync::atomic::Ordering;

/// Largest number of fetched commands that a moved queue may have.
const MAX_FETCHED: u64 = 1 << 48;

/// State of a completion queue when its entries were logged last.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct LoggedCq {
    tail: u32,
    phase: bool,
    /// Number of completions of all queues.
    completions: u64,
}

impl LoggedCq {
    fn of(cq: &Cq, completions: u64) -> Self {
        LoggedCq {
            tail: cq.tail,
            phase: cq.phase,
            completions,
        }
    }

    /// Returns whether the queue may have got entries since. Its index repeats after two turns.
    fn is_older_than(&self, now: &LoggedCq, size: u32) -> bool {
        (self.tail, self.phase) != (now.tail, now.phase)
            || now.completions.wrapping_sub(self.completions) >= size.into()
    }
}

impl Queues {
    /// Stops fetching commands until [`Queues::unpause`]. Outstanding commands complete.
    pub(super) fn pause(&mut self) {
        self.paused = true;
        self.polled.clear();
    }

    /// Fetches commands again.
    pub(super) fn unpause(&mut self) {
        if !std::mem::replace(&mut self.paused, false) {
            return;
        }
        for qid in 0..self.sqs.len() as u16 {
            if let Some(Some(sq)) = self.sqs.get(usize::from(qid))
                && !sq.deleting
            {
                self.start_fetching(qid);
            }
        }
    }

    /// Returns whether [`Queues::pause`] has stopped the queues.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Returns whether completions of I/O commands wait for room in their queues.
    pub fn has_backlog(&self) -> bool {
        let mut cqs = self.cqs.iter().skip(1).flatten();
        cqs.any(|cq| !cq.backlog.is_empty())
    }

    fn completions(&self) -> u64 {
        let queues = self.stats.queues.iter();
        queues.fold(0, |sum, queue| sum.wrapping_add(queue.completions.get()))
    }

    fn doorbell_values(&self, qid: u16) -> (u32, u32) {
        let value = |which| {
            let cell = self.doorbells.register(qid, which);
            cell.map_or(0, |cell| u32::from_le(cell.load(Ordering::Acquire)))
        };
        (value(DoorbellKind::SqTail), value(DoorbellKind::CqHead))
    }
}

impl Engine {
    /// Stops fetching commands, see [`Queues::pause`].
    pub fn pause(&mut self) {
        self.queues.pause();
    }

    /// Fetches commands again. The host is signalled for all completions that it has not consumed.
    pub fn unpause(&mut self) {
        self.queues.unpause();
        self.resume();
    }

    /// Describes all queues for the destination. None of their commands is outstanding.
    pub fn moved_queues(&self) -> Vec<MovedQueue> {
        let queues = (0..).zip(self.queues.sqs.iter().zip(&self.queues.cqs));
        let moved = queues.filter(|(_, (sq, cq))| sq.is_some() || cq.is_some());
        let moved = moved.map(|(qid, (sq, cq))| {
            let (sq_doorbell, cq_doorbell) = self.queues.doorbell_values(qid);
            MovedQueue {
                qid,
                sq: sq.as_ref().map(|sq| MovedSq {
                    doorbell: sq_doorbell,
                    fetched: sq.fetched,
                    shadow_live: sq.watch.state().shadow_live,
                    seen: sq.watch.state().last_shadow,
                    register: register_seen(&sq.watch),
                }),
                cq: cq.as_ref().map(|cq| MovedCq {
                    doorbell: cq_doorbell,
                    tail: cq.tail,
                    phase: cq.phase,
                    head: cq.head,
                    shadow_live: cq.watch.state().shadow_live,
                    seen: cq.watch.state().last_shadow,
                    register: register_seen(&cq.watch),
                    is_stale: cq.is_stale,
                }),
            }
        });
        moved.collect()
    }

    /// Installs the queues of a guest that has migrated here, without fetching from them. Guest
    /// memory, Bus Master Enable and shadow buffers must be set before. Returns `None` when the
    /// description is contradictory.
    pub fn install_moved(
        &mut self,
        cqs: &[SavedCq],
        sqs: &[SavedSq],
        moved: &[MovedQueue],
    ) -> Option<()> {
        let of = |qid: u16| moved.iter().find(|moved| moved.qid == qid);
        for saved in cqs {
            let cq = of(saved.qid)?.cq.as_ref()?;
            let cell = self
                .queues
                .doorbells
                .register(saved.qid, DoorbellKind::CqHead);
            cell?.store(cq.doorbell.to_le(), Ordering::Release);
            let note = CqNote {
                shadow_live: cq.shadow_live,
                seen: cq.seen,
                register: cq.register,
                head: cq.head,
                away: Some((cq.tail, cq.phase)),
                is_stale: cq.is_stale,
            };
            self.recover_cq(saved, note, cq.shadow_live)?;
        }
        for saved in sqs {
            let sq = of(saved.qid)?.sq.as_ref()?;
            if sq.fetched > MAX_FETCHED {
                return None;
            }
            let cell = self
                .queues
                .doorbells
                .register(saved.qid, DoorbellKind::SqTail);
            cell?.store(sq.doorbell.to_le(), Ordering::Release);
            let note = SqNote {
                fetched: sq.fetched,
                cq_tail: 0,
                shadow_live: sq.shadow_live,
                seen: sq.seen,
                register: sq.register,
            };
            self.recover_sq_at(saved, note, sq.fetched)?;
        }
        if !self.queues.bus_master.is_enabled {
            self.queues.release_rings(&self.journal);
        }
        Some(())
    }

    /// Begins to log written pages. Everything that queues have written so far is old.
    pub fn start_dirty_log(&mut self) {
        self.dma.start_dirty_log();
        let completions = self.queues.completions();
        for cq in self.queues.cqs.iter_mut().flatten() {
            cq.logged = Some(LoggedCq::of(cq, completions));
        }
    }

    /// Logs the pages that queues have written since the last call: rings with new completions, and
    /// the buffers of shadow doorbells.
    pub fn log_queues(&mut self) {
        if !self.dma.is_logging() {
            return;
        }
        let completions = self.queues.completions();
        for cq in self.queues.cqs.iter_mut().flatten() {
            let now = LoggedCq::of(cq, completions);
            let logged = cq.logged.replace(now);
            if logged.is_none_or(|logged| logged.is_older_than(&now, cq.size)) {
                let (iova, len) = cq.memory.range();
                self.dma.note_written(iova, len);
            }
        }
        let bytes = self.queues.doorbells.buffer_size();
        if let Some((shadow, eventidx)) = self.queues.shadow_buffers() {
            self.dma.note_written(shadow, bytes);
            self.dma.note_written(eventidx, bytes);
        }
    }

    /// Removes the written pages of a range from the log, see [`dma::DmaMap::take_dirty`].
    pub fn take_dirty(&mut self, iova: u64, len: u64, each: &mut dyn FnMut(u64)) {
        self.log_queues();
        self.dma.take_dirty(iova, len, each);
    }
}
