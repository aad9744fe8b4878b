//! Polling of doorbells, to find the commands that the host has submitted.

use super::doorbells::{DoorbellKind, trace_eventidx};
use super::journal::Journal;
use super::post::refresh_head;
use super::queue::Sq;
use super::queues::Queues;
use super::{Event, Events};
use doorbell::{Armed, Cells, Invalid, Watch};
use std::sync::atomic::{AtomicU32, Ordering};

/// Reads the doorbell of a submission queue. Returns whether the tail has moved.
///
/// # Errors
/// The event of an invalid doorbell value.
#[inline]
fn take_tail(sq: &mut Sq, cells: Cells<'_, AtomicU32>, qid: u16) -> Result<bool, Event> {
    let cq = false;
    let tail = match sq.watch.poll(cells) {
        Ok(tail) => tail,
        Err(Invalid { value, .. }) => return Err(Event::InvalidDoorbell { qid, cq, value }),
    };
    if tail == sq.seen {
        return Ok(false);
    }
    sq.seen = tail;
    if !sq.allows(tail) {
        let value = tail;
        return Err(Event::InvalidDoorbell { qid, cq, value });
    }
    sq.tail = tail;
    Ok(true)
}

impl Queues {
    /// Handles a doorbell register write that arrived as a message. Returns `false` when the
    /// doorbell has no queue.
    pub fn write_doorbell(&mut self, index: usize, value: u32) -> bool {
        let qid = (index / 2) as u16;
        let exists = if index.is_multiple_of(2) {
            self.sq_exists(qid)
        } else {
            self.cq_exists(qid)
        };
        if exists {
            self.store_doorbell(index, value);
            if index.is_multiple_of(2) {
                self.expect(qid);
            }
        }
        exists
    }

    /// Makes the next round poll a queue that most likely has entries.
    pub(crate) fn expect(&mut self, qid: u16) {
        if self.polled.expect(qid)
            && let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid))
        {
            sq.idle_rounds.reset();
        }
    }

    /// Stores a doorbell value like [`Queues::write_doorbell`], for an existing queue of this or
    /// another engine.
    pub fn store_doorbell(&self, index: usize, value: u32) {
        let qid = (index / 2) as u16;
        let which = if index.is_multiple_of(2) {
            DoorbellKind::SqTail
        } else {
            DoorbellKind::CqHead
        };
        if let Some(cell) = self.doorbells.register(qid, which) {
            if let Some(queue) = self.stats.queues.get(usize::from(qid)) {
                queue.mmio_doorbells.add(1);
            }
            probes::mmio_doorbell(self.controller, qid, which.into(), value);
            // The value is little-endian in memory, as a client writes it that maps the page.
            cell.store(value.to_le(), Ordering::Release);
        }
    }

    /// Returns whether a hot queue has new entries, without fetching them. Called between two
    /// rounds.
    pub fn has_news(&self) -> bool {
        self.polled.hot().any(|qid| self.sq_has_news(qid))
    }

    #[inline]
    fn sq_has_news(&self, qid: u16) -> bool {
        let Some(Some(sq)) = self.sqs.get(usize::from(qid)) else {
            return false;
        };
        let Some(cells) = self.doorbells.cells(qid, DoorbellKind::SqTail) else {
            return false;
        };
        if let Some(ring) = sq.memory.ring() {
            ring.prefetch(sq.head);
        }
        sq.watch.has_news(cells)
    }

    /// Returns whether a queue has been idle for long enough to be polled less often.
    pub(super) fn has_cooled(&mut self, qid: u16) -> bool {
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) else {
            return true;
        };
        sq.idle_rounds.count()
    }

    /// Stores the number of commands fetched from the queue, except the last `rest`, in the state
    /// memory if there is one. All of them are posted or recorded.
    pub(super) fn note_fetched(&mut self, journal: &Journal, qid: u16, rest: u64) {
        let Some(hot) = &journal.hot else {
            return;
        };
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) else {
            return;
        };
        if let Some(Some(cq)) = self.cqs.get(usize::from(sq.cqid)) {
            hot.note_but(qid, sq, cq.tail, rest);
        }
    }

    /// Returns whether the submission queue has entries that were not fetched yet.
    #[inline]
    pub(super) fn has_entries(&self, qid: u16) -> bool {
        matches!(self.sqs.get(usize::from(qid)), Some(Some(sq)) if !sq.is_empty())
    }

    /// Reads every doorbell once, before or after the shadow buffers change.
    pub(super) fn look_at_all(&mut self, journal: &Journal, events: &mut Events) {
        // The next round fetches the entries found here.
        self.polled.poll_all();
        for (qid, sq) in self.sqs.iter_mut().enumerate() {
            let qid = qid as u16;
            if let (Some(sq), Some(cells)) = (sq, self.doorbells.cells(qid, DoorbellKind::SqTail))
                && let Err(event) = take_tail(sq, cells, qid)
            {
                events.push_back(event);
            }
        }
        for (qid, cq) in self.cqs.iter_mut().enumerate() {
            let qid = qid as u16;
            if let Some(cq) = cq {
                let cells = self.doorbells.cells(qid, DoorbellKind::CqHead);
                refresh_head(cq, cells, events, qid);
            }
        }
        self.note(journal);
    }

    /// Reads the doorbell of a queue that is polled. Returns whether the queue has entries; `None`
    /// when there is no such queue.
    #[inline]
    pub(super) fn poll_sq(&mut self, qid: u16, events: &mut Events) -> Option<bool> {
        let sq = self.sqs.get_mut(usize::from(qid))?.as_mut()?;
        let Some(cells) = self.doorbells.cells(qid, DoorbellKind::SqTail) else {
            return Some(false);
        };
        match take_tail(sq, cells, qid) {
            Ok(false) => {}
            Ok(true) => {
                if sq.watch.shadow_live()
                    && let Some(stats) = self.stats.queues.get(usize::from(qid))
                {
                    stats.shadow_doorbells.add(1);
                }
                if sq.watch.shadow_live() {
                    probes::shadow_doorbell(
                        self.controller,
                        qid,
                        probes::Doorbell::SqTail,
                        sq.tail,
                    );
                }
                let before = sq.watch.state().eventidx;
                sq.watch.park(cells);
                trace_eventidx(
                    self.controller,
                    qid,
                    DoorbellKind::SqTail,
                    before,
                    &sq.watch,
                );
            }
            Err(event) => events.push_back(event),
        }
        if sq.is_empty() {
            if let Some(ring) = sq.memory.ring() {
                // Prefetches the cache line of the next entry in parallel with that of its
                // doorbell.
                ring.prefetch(sq.head);
            }
            return Some(false);
        }
        sq.idle_rounds.reset();
        Some(true)
    }

    /// Reads the doorbells of queues that wait for the host a last time, before the worker sleeps;
    /// with `arm`, arms their EventIdx first. `may_fetch`: new commands could be started. Returns
    /// whether a queue has work.
    pub(super) fn last_look(
        &mut self,
        arm: bool,
        may_fetch: bool,
        pin: bool,
        events: &mut Events,
    ) -> bool {
        let mut raced = false;
        for qid in self.polled.iter() {
            let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) else {
                continue;
            };
            // An earlier call has found this value, and no round has handled it.
            raced |= sq.watch.current() != sq.seen;
            // Entries that waited for room or memory, in a queue that the last round did not poll,
            // are announced by no doorbell.
            raced |= may_fetch
                && !sq.is_empty()
                && sq.memory.ring().is_some()
                && matches!(self.cqs.get(usize::from(sq.cqid)), Some(Some(cq)) if cq.backlog.is_empty());
            let Some(cells) = self.doorbells.cells(qid, DoorbellKind::SqTail) else {
                continue;
            };
            if arm
                && cells.shadow.is_some()
                && let Some(stats) = self.stats.queues.get(usize::from(qid))
            {
                stats.arms.add(1);
            }
            let doorbell = (self.controller, qid, DoorbellKind::SqTail);
            raced |= look(&mut sq.watch, cells, doorbell, arm, events);
        }
        if self.blocked.is_empty() && !pin {
            return raced;
        }
        for (qid, cq) in self.cqs.iter_mut().enumerate() {
            let qid = qid as u16;
            let (Some(cq), Some(cells)) = (cq, self.doorbells.cells(qid, DoorbellKind::CqHead))
            else {
                continue;
            };
            let level = pin && cq.vector.is_some() && cq.has_unconsumed();
            if cq.backlog.is_empty() && !level {
                continue;
            }
            let doorbell = (self.controller, qid, DoorbellKind::CqHead);
            raced |= look(&mut cq.watch, cells, doorbell, arm, events);
        }
        raced
    }
}

/// Reads a doorbell a last time; with `arm`, arms its EventIdx first. Returns whether the worker
/// has work.
fn look(
    watch: &mut Watch,
    cells: Cells<'_, AtomicU32>,
    (controller, qid, kind): (u16, u16, DoorbellKind),
    arm: bool,
    events: &mut Events,
) -> bool {
    let look = if arm {
        let before = watch.state().eventidx;
        let look = watch.arm(cells);
        trace_eventidx(controller, qid, kind, before, watch);
        look
    } else {
        watch.recheck(cells)
    };
    match look {
        Ok(Armed::Idle) => false,
        Ok(Armed::Raced(_)) => true,
        Err(Invalid { value, .. }) => {
            let cq = kind == DoorbellKind::CqHead;
            events.push_back(Event::InvalidDoorbell { qid, cq, value });
            true
        }
    }
}
