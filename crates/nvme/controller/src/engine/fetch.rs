//! Fetching commands from submission queues, as announced by doorbells.

use super::run::BatchOutcome;
use super::{Engine, Event};
use nvme::{Command, Status};
use std::time::Instant;
use volume::Budget;

/// Maximum number of entries fetched from one queue before the next queue is polled.
const FETCH_BATCH: u32 = super::run::BATCH as u32;

/// Maximum number of outstanding admin commands, beyond which none is fetched. Waiting commands
/// take memory, and no host has more of them.
const ADMIN_OUTSTANDING: u32 = 256;

/// Cost of an admin command in a round's budget. Most of them build and copy a page.
const ADMIN_UNITS: u32 = 8;

impl Engine {
    /// Fetches and starts submitted commands within the budget. Returns whether there was anything
    /// to do.
    ///
    /// [`PolledQueues`](super::polled::PolledQueues) selects the queues to poll.
    pub fn poll(&mut self, now: Instant, budget: &mut Budget) -> bool {
        self.counters.now = now;
        let parked = !self.slots.parked.is_empty();
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
        while let Some(qid) = self.queues.polled.hot_at(at) {
            if self.poll_sq(qid, budget) {
                worked = true;
                if budget.is_spent() {
                    self.queues.polled.begin_after(at);
                    break;
                }
            } else if self.queues.has_cooled(qid) {
                self.queues.polled.cool(at);
                continue;
            }
            at += 1;
        }
        for _ in 0..self.queues.polled.idle_share() {
            let Some((at, qid)) = self.queues.polled.next_idle() else {
                break;
            };
            if self.poll_sq(qid, budget) {
                worked = true;
                self.queues.polled.found_work(at);
            }
        }
        worked
    }

    /// Fetches from a queue if it has entries. Returns whether it had any, even if the budget was
    /// spent.
    fn poll_sq(&mut self, qid: u16, budget: &mut Budget) -> bool {
        match self.queues.poll_sq(qid, &mut self.events) {
            Some(true) => budget.is_spent() || self.fetch(qid, budget) > 0,
            Some(false) => false,
            None => {
                self.broken("a submission queue is polled that is gone");
                false
            }
        }
    }

    fn fetch(&mut self, qid: u16, budget: &mut Budget) -> u32 {
        let mut fetched = 0;
        if qid == 0 {
            fetched = self.fetch_admin(budget);
        } else {
            while fetched < FETCH_BATCH {
                let units = budget.left();
                self.batch.long.begin(units);
                let limit = FETCH_BATCH - fetched;
                let (count, next) = match self.counters.sampling.until_timed {
                    0 => self.run_timed(qid, limit),
                    _ => self.run(qid, limit),
                };
                self.counters.sampling.until_timed =
                    self.counters.sampling.until_timed.saturating_sub(count);
                budget.spend(count.saturating_add(self.batch.long.spent(units)));
                fetched += count;
                let more = !matches!(next, BatchOutcome::Idle);
                self.after_batch(qid, next, budget);
                if more {
                    self.queues.note_fetched(&self.journal, qid, 0);
                }
                if count == 0 || budget.is_spent() || !(more || self.queues.has_entries(qid)) {
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

    /// Fetches entries of the admin queue and passes them to the control half. Returns their
    /// number.
    fn fetch_admin(&mut self, budget: &mut Budget) -> u32 {
        let mut fetched = 0;
        while fetched < FETCH_BATCH
            && !budget.is_spent()
            && let Some(Some(sq)) = self.queues.sqs.get_mut(0)
            && !sq.is_empty()
            && sq.outstanding < ADMIN_OUTSTANDING
            && matches!(self.queues.cqs.get(usize::from(sq.cqid)), Some(Some(cq)) if cq.backlog.is_empty())
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
        if let Some(Some(sq)) = self.queues.sqs.get_mut(usize::from(qid))
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

    /// Arms EventIdx of every queue that waits for the host, before the worker sleeps, so that the
    /// host's next doorbell write is a register write. Such queues are submission queues, full
    /// completion queues, and, while INTx is used, queues whose head affects its level. Returns
    /// `true` when an entry has arrived meanwhile: do not sleep.
    pub fn arm(&mut self) -> bool {
        // The very next round fetches entries found only now, in any queue.
        self.queues.polled.poll_all();
        // The time since the round's last completions must not count as busy while the worker
        // sleeps.
        self.counters.count_busy(&self.slots);
        self.last_look(true) || !self.events.is_empty()
    }

    /// Reads the doorbells once more, shortly after [`Engine::arm`], for hosts without a memory
    /// barrier between their shadow doorbell store and their EventIdx load. Returns `true` when an
    /// entry has arrived.
    pub fn recheck(&mut self) -> bool {
        self.last_look(false)
    }

    fn last_look(&mut self, arm: bool) -> bool {
        let may_fetch = !self.flushes.is_waiting() && self.slots.free() > 0;
        let pin = self.irqs.pin_based();
        let events = &mut self.events;
        let raced = self.queues.last_look(arm, may_fetch, pin, events);
        raced || !self.slots.parked.is_empty()
    }
}
