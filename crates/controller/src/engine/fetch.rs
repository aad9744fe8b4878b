//! From doorbells to commands.

use super::doorbells::{Which, trace_eventidx};
use super::post::refresh_head;
use super::queue::Sq;
use super::{Engine, Event};
use doorbell::{Armed, Cells, Invalid};
use nvme::{Command, Status};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;
use zerocopy::FromBytes;

/// Entries fetched from one queue before the next one has its turn.
const FETCH_BATCH: u32 = 32;

/// Looks at a submission queue's doorbell. Returns whether the tail moved.
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
    /// A doorbell register was written by message. `false` when it belongs to no queue.
    pub fn write_doorbell(&mut self, index: usize, value: u32) -> bool {
        let qid = (index / 2) as u16;
        let (which, exists) = if index.is_multiple_of(2) {
            (Which::SqTail, self.sq_exists(qid))
        } else {
            (Which::CqHead, self.cq_exists(qid))
        };
        if exists && let Some(cell) = self.doorbells.register(qid, which) {
            if let Some(queue) = self.stats.queues.get(usize::from(qid)) {
                queue.mmio_doorbells.add(1);
            }
            probes::mmio_doorbell(self.id, qid, which.into(), value);
            // Little-endian in memory, as a client that maps the page writes it.
            cell.store(value.to_le(), Ordering::Release);
        }
        exists
    }

    /// Fetches and starts what the host submitted. Returns whether there was anything.
    pub fn poll(&mut self, now: Instant) -> bool {
        self.now = now;
        let mut worked = false;
        for i in 0..self.active.len() {
            if let Some(&qid) = self.active.get(i) {
                worked |= self.poll_sq(qid);
            }
        }
        worked
    }

    fn poll_sq(&mut self, qid: u16) -> bool {
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) else {
            return false;
        };
        let Some(cells) = self.doorbells.cells(qid, Which::SqTail) else {
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
                trace_eventidx(self.id, qid, Which::SqTail, before, &sq.watch);
            }
            Err(event) => self.events.push_back(event),
        }
        !sq.is_empty() && self.fetch(qid) > 0
    }

    fn fetch(&mut self, qid: u16) -> u32 {
        let mut fetched = 0;
        while fetched < FETCH_BATCH {
            let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) else {
                break;
            };
            // A full completion queue stops its submission queues: so the backlog never grows beyond what is in flight.
            let stalled = !matches!(self.cqs.get(usize::from(sq.cqid)), Some(Some(cq)) if cq.backlog.is_empty());
            let free = self.flushes.is_empty() && self.slots.any_free();
            if sq.is_empty() || stalled || (qid != 0 && !free) {
                break;
            }
            let Some(ring) = sq.memory.ring() else {
                break;
            };
            // Read once; only the copy is looked at.
            let raw = ring.load64(sq.head);
            sq.advance_head();
            sq.outstanding += 1;
            fetched += 1;
            let Ok(command) = Command::read_from_bytes(&raw) else {
                break;
            };
            if qid == 0 {
                self.events.push_back(Event::Admin(command));
                continue;
            }
            if !sq.abort_on_fetch.is_empty() {
                let cid = command.cid.get();
                if let Some(at) = sq.abort_on_fetch.iter().position(|&c| c == cid) {
                    sq.abort_on_fetch.swap_remove(at);
                    self.finish(qid, cid, Status::ABORT_REQUESTED, 0);
                    self.events.push_back(Event::AbortDone {
                        sqid: qid,
                        cid,
                        aborted: true,
                    });
                    continue;
                }
            }
            self.execute(qid, &command);
        }
        if fetched > 0
            && let Some(stats) = self.stats.queues.get(usize::from(qid))
        {
            stats.commands.add(fetched.into());
        }
        fetched
    }

    /// Looks at every doorbell once, before or after the shadow buffers change.
    pub(super) fn look_at_all(&mut self) {
        for (qid, sq) in self.sqs.iter_mut().enumerate() {
            let qid = qid as u16;
            if let (Some(sq), Some(cells)) = (sq, self.doorbells.cells(qid, Which::SqTail))
                && let Err(event) = take_tail(sq, cells, qid)
            {
                self.events.push_back(event);
            }
        }
        for (qid, cq) in self.cqs.iter_mut().enumerate() {
            let qid = qid as u16;
            if let Some(cq) = cq {
                let cells = self.doorbells.cells(qid, Which::CqHead);
                refresh_head(cq, cells, &mut self.events, qid);
            }
        }
    }

    /// Before the worker sleeps: arms EventIdx of every queue that waits for the host, so that the host's next doorbell
    /// is a register write: submission queues, completion queues that are full, and where the pin is used those whose
    /// head decides its level. `true` when something arrived meanwhile: do not sleep.
    pub fn arm(&mut self) -> bool {
        let raced = self.last_look(true);
        raced || !self.events.is_empty()
    }

    /// One more look after [`Engine::arm`], a little later, for hosts that lack the barrier between their shadow store
    /// and their EventIdx load. `true` when something arrived.
    pub fn recheck(&mut self) -> bool {
        self.last_look(false)
    }

    fn last_look(&mut self, arm: bool) -> bool {
        let mut raced = false;
        for &qid in &self.active {
            let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) else {
                continue;
            };
            let Some(cells) = self.doorbells.cells(qid, Which::SqTail) else {
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
                trace_eventidx(self.id, qid, Which::SqTail, before, &sq.watch);
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
            let (Some(cq), Some(cells)) = (cq, self.doorbells.cells(qid, Which::CqHead)) else {
                continue;
            };
            let level = pin && cq.vector.is_some() && cq.has_unconsumed();
            if cq.backlog.is_empty() && !level {
                continue;
            }
            let look = if arm {
                let before = cq.watch.state().eventidx;
                let look = cq.watch.arm(cells);
                trace_eventidx(self.id, qid, Which::CqHead, before, &cq.watch);
                look
            } else {
                cq.watch.recheck(cells)
            };
            raced |= note(look, qid, true, &mut self.events);
        }
        raced
    }
}

/// Whether a last look found something.
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
