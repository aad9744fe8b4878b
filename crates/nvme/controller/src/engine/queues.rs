//! Queues of an engine with their doorbells; creation and deletion of queues, for the control half.

use super::bus_master::BusMaster;
use super::doorbells::{DoorbellKind, Doorbells};
use super::invariant::broken;
use super::journal::Journal;
use super::polled::PolledQueues;
use super::queue::{Cq, PendingCompletion, QueueMemory, Sq};
use super::slots::Slots;
use super::{Event, Events};
use crate::stats::ControllerStats;
use dma::{Access, DmaMap, SharedPages};
use doorbell::Watch;
use std::sync::Arc;

/// Queues of an engine, their doorbells, and the order in which rounds handle them.
pub(crate) struct Queues {
    /// Number of the engine's controller within its worker, which trace points report.
    pub(super) controller: u16,
    pub(super) stats: Arc<ControllerStats>,
    pub(super) doorbells: Doorbells,
    pub(super) sqs: Vec<Option<Sq>>,
    pub(super) cqs: Vec<Option<Cq>>,
    /// Whether the engine fetches no commands until the controller is enabled again.
    pub(super) halted: bool,
    /// Whether the engine fetches no commands because the guest migrates. A reset does not change
    /// that.
    pub(super) paused: bool,
    pub(super) bus_master: BusMaster,
    /// ID of the completion queue that is migrating to another worker's engine, if any.
    pub(super) migrating: Option<u16>,
    /// IDs of the submission queues to fetch from, in polling order.
    pub(super) polled: PolledQueues,
    /// IDs of the completion queues that have new entries and need an interrupt.
    pub(super) dirty: Vec<u16>,
    /// IDs of the completion queues that were full, so that completions wait for room.
    pub(super) blocked: Vec<u16>,
    /// Whether a command of a queue that no longer exists has ended. [`broken`] is called at the
    /// end of the round, because a call in the completion path would cost each command some
    /// registers.
    pub(super) queue_gone: bool,
}

impl Queues {
    /// Creates room for `queues` queues of each kind, with their doorbell registers in `page`.
    pub(super) fn new(
        controller: u16,
        page: Arc<SharedPages>,
        queues: u16,
        stats: Arc<ControllerStats>,
    ) -> Self {
        Queues {
            controller,
            stats,
            doorbells: Doorbells::new(page, queues),
            sqs: (0..queues).map(|_| None).collect(),
            cqs: (0..queues).map(|_| None).collect(),
            halted: false,
            paused: false,
            bus_master: BusMaster::default(),
            migrating: None,
            polled: PolledQueues::with_capacity(usize::from(queues)),
            dirty: Vec::with_capacity(usize::from(queues)),
            blocked: Vec::with_capacity(usize::from(queues)),
            queue_gone: false,
        }
    }

    /// Deletes all queues in a controller-level reset.
    pub(super) fn delete_all(&mut self) {
        self.sqs.iter_mut().for_each(|q| *q = None);
        self.cqs.iter_mut().for_each(|q| *q = None);
        self.polled.clear();
        self.dirty.clear();
        self.blocked.clear();
        self.queue_gone = false;
        self.halted = false;
        self.migrating = None;
        self.doorbells.forget();
    }

    /// Returns whether fetching has stopped until the controller is enabled again.
    pub fn halted(&self) -> bool {
        self.halted
    }

    /// Stops fetching commands, for a shutdown or a fatal error. Outstanding commands complete.
    pub(super) fn stop_fetching(&mut self) {
        self.halted = true;
        self.polled.clear();
    }

    /// Returns the guest addresses of the shadow doorbell buffer and the EventIdx buffer, as set by
    /// Doorbell Buffer Config.
    pub fn shadow_buffers(&self) -> Option<(u64, u64)> {
        self.doorbells.buffers()
    }

    /// Returns the doorbell page, which a client may map.
    pub fn doorbell_page(&self) -> &Arc<SharedPages> {
        self.doorbells.page()
    }

    /// Returns whether shadow doorbells are in use.
    pub fn shadowed(&self) -> bool {
        self.doorbells.shadowed()
    }

    /// Returns the tail and the phase of the admin completion queue.
    pub fn admin_tail(&self) -> Option<(u32, bool)> {
        let cq = self.cqs.first()?.as_ref()?;
        Some((cq.tail, cq.phase))
    }

    pub fn cq_exists(&self, qid: u16) -> bool {
        self.cqs.get(usize::from(qid)).is_some_and(Option::is_some)
    }

    pub fn sq_exists(&self, qid: u16) -> bool {
        self.sqs.get(usize::from(qid)).is_some_and(Option::is_some)
    }

    pub fn cq_in_use(&self, qid: u16) -> bool {
        matches!(self.cqs.get(usize::from(qid)), Some(Some(cq)) if cq.users > 0)
    }

    /// Returns the IDs of the I/O completion queues.
    pub fn io_cqs(&self) -> impl Iterator<Item = u16> {
        let exists = |(qid, cq): (usize, &Option<Cq>)| cq.is_some().then_some(qid as u16);
        self.cqs.iter().enumerate().skip(1).filter_map(exists)
    }

    pub fn any_io_queue(&self) -> bool {
        self.sqs.iter().skip(1).any(Option::is_some) || self.cqs.iter().skip(1).any(Option::is_some)
    }

    /// Creates a completion queue, to be installed. Returns `None` when its memory is not mapped.
    pub fn make_cq(
        &self,
        dma: &DmaMap,
        journal: &Journal,
        qid: u16,
        (iova, size): (u64, u32),
        vector: Option<u16>,
    ) -> Option<Cq> {
        let mut memory = QueueMemory::new(dma, iova, size, 16, Access::Write)?;
        memory.release();
        let cells = self.doorbells.cells(qid, DoorbellKind::CqHead)?;
        let mut cq = Cq::new(memory, Watch::create(size, cells), vector);
        cq.is_stale = journal.hot.is_some();
        Some(cq)
    }

    /// Creates a submission queue, to be installed in the engine of its completion queue, and sets
    /// the initial value of its doorbell. Returns `None` when its memory is not mapped.
    pub fn make_sq(
        &self,
        dma: &DmaMap,
        qid: u16,
        cqid: u16,
        (iova, size): (u64, u32),
    ) -> Option<Sq> {
        let mut memory = QueueMemory::new(dma, iova, size, 64, Access::Read)?;
        memory.release();
        let cells = self.doorbells.cells(qid, DoorbellKind::SqTail)?;
        Some(Sq::new(cqid, memory, Watch::create(size, cells)))
    }

    /// Installs a completion queue, and looks up its memory in this engine's map. Returns `false`
    /// when its ID is too large.
    #[must_use]
    pub(super) fn install_cq(
        &mut self,
        qid: u16,
        mut cq: Cq,
        dma: &DmaMap,
        journal: &Journal,
    ) -> bool {
        if self.bus_master.is_enabled {
            cq.memory.mapped(dma);
            cq.clear();
        }
        journal.note_cq(qid, &cq);
        let slot = self.cqs.get_mut(usize::from(qid));
        slot.map(|slot| *slot = Some(cq)).is_some()
    }

    /// Installs a submission queue, and looks up its memory in this engine's map. Returns `false`
    /// when its completion queue is not installed already, or its ID is too large.
    #[must_use]
    pub(super) fn install_sq(
        &mut self,
        qid: u16,
        mut sq: Sq,
        dma: &DmaMap,
        journal: &Journal,
    ) -> bool {
        let cqid = sq.cqid;
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(cqid)) else {
            return false;
        };
        let Some(slot) = self.sqs.get_mut(usize::from(qid)) else {
            return false;
        };
        if self.bus_master.is_enabled {
            sq.memory.mapped(dma);
        }
        if let Some(hot) = &journal.hot {
            hot.note_sq(qid, &mut sq, cq.tail);
        }
        *slot = Some(sq);
        cq.users += 1;
        self.start_fetching(qid);
        true
    }

    pub(super) fn start_fetching(&mut self, qid: u16) {
        if !self.halted && !self.paused {
            self.polled.insert(qid);
        }
    }

    /// Begins to delete a submission queue. Commands fetched before are completed first; then
    /// [`Event::SqDrained`] reports the end.
    pub(super) fn delete_sq(&mut self, qid: u16, slots: &mut Slots, events: &mut Events) {
        self.forget_aborts(qid, events);
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) else {
            return broken(events, "a submission queue is to be deleted that is gone");
        };
        sq.deleting = true;
        self.polled.remove(|q| q == qid);
        // The host ignores further completions of this queue. Those that wait for room are dropped,
        // so that a full completion queue cannot block the deletion.
        if let Some(Some(cq)) = self.cqs.get_mut(usize::from(sq.cqid)) {
            cq.backlog.retain(|&PendingCompletion { sqid, slot, .. }| {
                if sqid == qid {
                    sq.outstanding = sq.outstanding.saturating_sub(1);
                    slot.into_iter().for_each(|slot| slots.release_kept(slot));
                }
                sqid != qid
            });
        }
        self.sq_drained(qid, events);
    }

    /// Removes a queue that is being deleted, once it has no outstanding command.
    pub(super) fn sq_drained(&mut self, qid: u16, events: &mut Events) {
        let Some(slot) = self.sqs.get_mut(usize::from(qid)) else {
            return;
        };
        if let Some(sq) = slot
            && sq.deleting
            && sq.outstanding == 0
        {
            let cqid = sq.cqid;
            *slot = None;
            if let Some(Some(cq)) = self.cqs.get_mut(usize::from(cqid)) {
                cq.users = cq.users.saturating_sub(1);
            }
            events.push_back(Event::SqDrained(qid));
        }
    }

    pub(super) fn delete_cq(&mut self, qid: u16) {
        if let Some(slot) = self.cqs.get_mut(usize::from(qid)) {
            *slot = None;
        }
        self.dirty.retain(|&q| q != qid);
        self.blocked.retain(|&q| q != qid);
    }

    /// Returns whether the memory of both buffers for Doorbell Buffer Config is mapped.
    pub fn finds_shadow(&self, dma: &DmaMap, shadow: u64, eventidx: u64) -> bool {
        self.doorbells.find(dma, shadow, eventidx).is_ok()
    }

    /// Applies Doorbell Buffer Config. While the memory of the buffers is unmapped, the doorbell
    /// registers count: this engine may have lost memory that the control half's engine has found.
    pub(super) fn configure_shadow(
        &mut self,
        (shadow, eventidx): (u64, u64),
        dma: &DmaMap,
        journal: &Journal,
        events: &mut Events,
    ) {
        let found = self.doorbells.find(dma, shadow, eventidx).ok();
        let buffers = found.filter(|_| self.bus_master.is_enabled);
        // Doorbell values that the host has published in the old buffers must not be lost.
        self.look_at_all(journal, events);
        self.doorbells.configure(shadow, eventidx, buffers);
        probes::dbbuf_config(self.controller, shadow, eventidx);
        for (qid, sq) in self.sqs.iter_mut().enumerate() {
            let cells = self.doorbells.cells(qid as u16, DoorbellKind::SqTail);
            if let (Some(sq), Some(shadow)) = (sq, cells.and_then(|c| c.shadow)) {
                sq.watch.attach(shadow);
            }
        }
        for (qid, cq) in self.cqs.iter_mut().enumerate() {
            let cells = self.doorbells.cells(qid as u16, DoorbellKind::CqHead);
            if let (Some(cq), Some(shadow)) = (cq, cells.and_then(|c| c.shadow)) {
                cq.watch.attach(shadow);
            }
        }
        self.note(journal);
    }

    /// Notes the state of all queues after a change of their doorbells or memory.
    pub(super) fn note(&mut self, journal: &Journal) {
        let Some(hot) = &journal.hot else {
            return;
        };
        for (qid, cq) in (0..).zip(&self.cqs) {
            if let Some(cq) = cq {
                hot.note_cq(qid, cq);
            }
        }
        for (qid, sq) in (0..).zip(&mut self.sqs) {
            if let Some(sq) = sq
                && let Some(Some(cq)) = self.cqs.get(usize::from(sq.cqid))
            {
                hot.note_sq(qid, sq, cq.tail);
            }
        }
    }

    /// Returns the number of commands fetched from a queue before the last one.
    pub(super) fn last_fetched(&self, sqid: u16) -> u64 {
        match self.sqs.get(usize::from(sqid)) {
            Some(Some(sq)) => sq.fetched.saturating_sub(1),
            _ => 0,
        }
    }

    /// Releases rings in a range of IOVAs that was unmapped, and the shadow buffers if they are in
    /// it.
    pub(super) fn unmapped(
        &mut self,
        (iova, len): (u64, u64),
        journal: &Journal,
        events: &mut Events,
    ) {
        for sq in self.sqs.iter_mut().flatten() {
            sq.memory.unmapped(iova, len);
        }
        for (qid, cq) in (0..).zip(&mut self.cqs) {
            if let Some(cq) = cq
                && cq.memory.unmapped(iova, len)
            {
                journal.note_cq(qid, cq);
            }
        }
        if self.doorbells.lie_in(iova, len) {
            self.release_shadow(journal, events);
        }
    }

    /// Releases the shadow buffers. They are read a last time, and registers a first time without
    /// them: registers count from their next change on.
    pub(super) fn release_shadow(&mut self, journal: &Journal, events: &mut Events) {
        if self.doorbells.shadowed() {
            self.look_at_all(journal, events);
            self.doorbells.release();
            self.look_at_all(journal, events);
        }
    }

    /// Looks up unmapped rings and buffers after some part of this range of IOVAs was mapped.
    pub(super) fn mapped(
        &mut self,
        (iova, len): (u64, u64),
        dma: &DmaMap,
        journal: &Journal,
        events: &mut Events,
    ) {
        if !self.bus_master.is_enabled {
            // Rings are looked up when Bus Master Enable is set.
            return;
        }
        for sq in self.sqs.iter_mut().flatten() {
            sq.memory.mapped_in(dma, iova, len);
        }
        for (qid, cq) in (0..).zip(&mut self.cqs) {
            if let Some(cq) = cq
                && cq.memory.mapped_in(dma, iova, len)
            {
                cq.clear();
                journal.note_cq(qid, cq);
            }
        }
        if self.doorbells.lie_in(iova, len) && self.doorbells.mapped(dma) {
            self.look_at_all(journal, events);
        }
    }
}
