//! Fetching commands from submission queues, as announced by doorbells.

use super::doorbells::{DoorbellKind, trace_eventidx};
use super::post::refresh_head;
use super::queue::Sq;
use super::run::BatchOutcome;
use super::{Engine, Event};
use doorbell::{Armed, Cells, Invalid};
use nvme::{Command, Status};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;
use volume::Budget;

/// Maximum number of entries fetched from one queue before the next queue is polled.
const FETCH_BATCH: u32 = super::run::BATCH as u32;

/// Maximum number of outstanding admin commands, beyond which none is fetched. Waiting commands
/// take memory, and no host has more of them.
const ADMIN_OUTSTANDING: u32 = 256;

/// Cost of an admin command in a round's budget. Most of them build and copy a page.
const ADMIN_UNITS: u32 = 8;

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

impl Engine {
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

    /// Stores a doorbell value like [`Engine::write_doorbell`], for an existing queue of this or
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
            probes::mmio_doorbell(self.id, qid, which.into(), value);
            // The value is little-endian in memory, as a client writes it that maps the page.
            cell.store(value.to_le(), Ordering::Release);
        }
    }

    /// Fetches and starts submitted commands within the budget. Returns whether there was anything
    /// to do.
    ///
    /// [`PolledQueues`](super::polled::PolledQueues) selects the queues to poll.
    pub fn poll(&mut self, now: Instant, budget: &mut Budget) -> bool {
        self.now = now;
        let parked = !self.parked.is_empty();
        if parked {
            self.go_on(budget);
        }
        let fetched = self.poll_queues(budget);
        // Devices are notified of this round's commands, and their completions handled, in the same
        // round.
        self.poll_passed() || fetched || parked
    }

    fn poll_queues(&mut self, budget: &mut Budget) -> bool {
        let mut worked = false;
        let mut at = 0;
        while let Some(qid) = self.polled.hot_at(at) {
            if self.poll_sq(qid, budget) {
                worked = true;
                if budget.is_spent() {
                    self.polled.begin_after(at);
                    break;
                }
            } else if self.has_cooled(qid) {
                self.polled.cool(at);
                continue;
            }
            at += 1;
        }
        for _ in 0..self.polled.idle_share() {
            let Some((at, qid)) = self.polled.next_idle() else {
                break;
            };
            if self.poll_sq(qid, budget) {
                worked = true;
                self.polled.found_work(at);
            }
        }
        worked
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
    fn has_cooled(&mut self, qid: u16) -> bool {
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) else {
            return true;
        };
        sq.idle_rounds.count()
    }

    /// Fetches from a queue if it has entries. Returns whether it had any, even if the budget was
    /// spent.
    fn poll_sq(&mut self, qid: u16, budget: &mut Budget) -> bool {
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) else {
            self.broken("a submission queue is polled that is gone");
            return false;
        };
        let Some(cells) = self.doorbells.cells(qid, DoorbellKind::SqTail) else {
            return false;
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
                    probes::shadow_doorbell(self.id, qid, probes::Doorbell::SqTail, sq.tail);
                }
                let before = sq.watch.state().eventidx;
                sq.watch.park(cells);
                trace_eventidx(self.id, qid, DoorbellKind::SqTail, before, &sq.watch);
            }
            Err(event) => self.events.push_back(event),
        }
        if sq.is_empty() {
            if let Some(ring) = sq.memory.ring() {
                // Prefetches the cache line of the next entry in parallel with that of its
                // doorbell.
                ring.prefetch(sq.head);
            }
            return false;
        }
        sq.idle_rounds.reset();
        budget.is_spent() || self.fetch(qid, budget) > 0
    }

    fn fetch(&mut self, qid: u16, budget: &mut Budget) -> u32 {
        let mut fetched = 0;
        if qid == 0 {
            fetched = self.fetch_admin(budget);
        } else {
            while fetched < FETCH_BATCH {
                let units = budget.left();
                self.long.begin(units);
                let limit = FETCH_BATCH - fetched;
                let (count, next) = match self.sampling.until_timed {
                    0 => self.run_timed(qid, limit),
                    _ => self.run(qid, limit),
                };
                self.sampling.until_timed = self.sampling.until_timed.saturating_sub(count);
                budget.spend(count.saturating_add(self.long.spent(units)));
                fetched += count;
                let more = !matches!(next, BatchOutcome::Idle);
                self.after_batch(qid, next, budget);
                if more {
                    self.note_fetched(qid, 0);
                }
                if count == 0 || budget.is_spent() || !(more || self.has_entries(qid)) {
                    break;
                }
            }
        }
        if fetched > 0
            && let Some(stats) = self.stats.queues.get(usize::from(qid))
        {
            stats.commands.add(fetched.into());
        }
        fetched
    }

    /// Stores the number of commands fetched from the queue, except the last `rest`, in the state
    /// memory if there is one. All of them are posted or recorded.
    pub(super) fn note_fetched(&mut self, qid: u16, rest: u64) {
        let Some(hot) = &self.journal.hot else {
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
    fn has_entries(&self, qid: u16) -> bool {
        matches!(self.sqs.get(usize::from(qid)), Some(Some(sq)) if !sq.is_empty())
    }

    /// Fetches entries of the admin queue and passes them to the control half. Returns their
    /// number.
    fn fetch_admin(&mut self, budget: &mut Budget) -> u32 {
        let mut fetched = 0;
        while fetched < FETCH_BATCH
            && !budget.is_spent()
            && let Some(Some(sq)) = self.sqs.get_mut(0)
            && !sq.is_empty()
            && sq.outstanding < ADMIN_OUTSTANDING
            && matches!(self.cqs.get(usize::from(sq.cqid)), Some(Some(cq)) if cq.backlog.is_empty())
            && let Some(ring) = sq.memory.ring()
        {
            // The entry is read once, and only the copy is used, because the host may change it.
            let command: Command = zerocopy::transmute!(ring.load64(sq.head));
            sq.took(1);
            sq.outstanding += 1;
            fetched += 1;
            budget.spend(ADMIN_UNITS);
            self.events.push_back(Event::Admin(command));
            crash::point!("controller.admin.fetched");
        }
        fetched
    }

    /// Starts an I/O command on the general path, outside of batches.
    pub(super) fn general(&mut self, qid: u16, command: &Command) {
        if let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid))
            && !sq.abort_on_fetch.is_empty()
        {
            let cid = command.cid.get();
            if let Some(at) = sq.abort_on_fetch.iter().position(|&c| c == cid) {
                sq.abort_on_fetch.swap_remove(at);
                self.finish(qid, cid, Status::ABORT_REQUESTED, 0);
                self.events.push_back(Event::AbortDone {
                    sqid: qid,
                    cid,
                    aborted: true,
                });
                return;
            }
        }
        self.execute(qid, command);
    }

    /// Reads every doorbell once, before or after the shadow buffers change.
    pub(super) fn look_at_all(&mut self) {
        // The next round fetches the entries found here.
        self.polled.poll_all();
        for (qid, sq) in self.sqs.iter_mut().enumerate() {
            let qid = qid as u16;
            if let (Some(sq), Some(cells)) = (sq, self.doorbells.cells(qid, DoorbellKind::SqTail))
                && let Err(event) = take_tail(sq, cells, qid)
            {
                self.events.push_back(event);
            }
        }
        for (qid, cq) in self.cqs.iter_mut().enumerate() {
            let qid = qid as u16;
            if let Some(cq) = cq {
                let cells = self.doorbells.cells(qid, DoorbellKind::CqHead);
                refresh_head(cq, cells, &mut self.events, qid);
            }
        }
        self.note_queues();
    }

    /// Arms EventIdx of every queue that waits for the host, before the worker sleeps, so that the
    /// host's next doorbell write is a register write. Such queues are submission queues, full
    /// completion queues, and, while INTx is used, queues whose head affects its level. Returns
    /// `true` when an entry has arrived meanwhile: do not sleep.
    pub fn arm(&mut self) -> bool {
        // The very next round fetches entries found only now, in any queue.
        self.polled.poll_all();
        // The time since the round's last completions must not count as busy while the worker
        // sleeps.
        self.count_busy();
        let raced = self.last_look(true);
        raced || !self.events.is_empty()
    }

    /// Reads the doorbells once more, shortly after [`Engine::arm`], for hosts without a memory
    /// barrier between their shadow doorbell store and their EventIdx load. Returns `true` when an
    /// entry has arrived.
    pub fn recheck(&mut self) -> bool {
        self.last_look(false)
    }

    fn last_look(&mut self, arm: bool) -> bool {
        let mut raced = !self.parked.is_empty();
        let may_fetch = !self.flushes.is_waiting() && self.slots.free() > 0;
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
            let look = if arm {
                if cells.shadow.is_some()
                    && let Some(stats) = self.stats.queues.get(usize::from(qid))
                {
                    stats.arms.add(1);
                }
                let before = sq.watch.state().eventidx;
                let look = sq.watch.arm(cells);
                trace_eventidx(self.id, qid, DoorbellKind::SqTail, before, &sq.watch);
                look
            } else {
                sq.watch.recheck(cells)
            };
            raced |= note(look, qid, false, &mut self.events);
        }
        let pin = self.irqs.pin_based();
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
            let look = if arm {
                let before = cq.watch.state().eventidx;
                let look = cq.watch.arm(cells);
                trace_eventidx(self.id, qid, DoorbellKind::CqHead, before, &cq.watch);
                look
            } else {
                cq.watch.recheck(cells)
            };
            raced |= note(look, qid, true, &mut self.events);
        }
        raced
    }
}

/// Records the result of arming or rechecking a doorbell. Returns whether the worker has work.
fn note(
    look: Result<Armed, Invalid>,
    qid: u16,
    cq: bool,
    events: &mut std::collections::VecDeque<Event>,
) -> bool {
    match look {
        Ok(Armed::Idle) => false,
        Ok(Armed::Raced(_)) => true,
        Err(Invalid { value, .. }) => {
            events.push_back(Event::InvalidDoorbell { qid, cq, value });
            true
        }
    }
}
