//! Creation and deletion of queues, for the control half.

use super::doorbells::DoorbellKind;
use super::queue::{Cq, PendingCompletion, QueueMemory, Sq};
use super::{Engine, Event};
use dma::Access;
use doorbell::Watch;

impl Engine {
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
    pub fn make_cq(&self, qid: u16, iova: u64, size: u32, vector: Option<u16>) -> Option<Cq> {
        let mut memory = QueueMemory::new(&self.dma, iova, size, 16, Access::Write)?;
        memory.release();
        let cells = self.doorbells.cells(qid, DoorbellKind::CqHead)?;
        let mut cq = Cq::new(memory, Watch::create(size, cells), vector);
        cq.is_stale = self.journal.hot.is_some();
        Some(cq)
    }

    /// Creates a submission queue, to be installed in the engine of its completion queue, and sets
    /// the initial value of its doorbell. Returns `None` when its memory is not mapped.
    pub fn make_sq(&self, qid: u16, cqid: u16, iova: u64, size: u32) -> Option<Sq> {
        let mut memory = QueueMemory::new(&self.dma, iova, size, 64, Access::Read)?;
        memory.release();
        let cells = self.doorbells.cells(qid, DoorbellKind::SqTail)?;
        Some(Sq::new(cqid, memory, Watch::create(size, cells)))
    }

    /// Installs a completion queue, and looks up its memory in this engine's map.
    pub(super) fn install_cq(&mut self, qid: u16, mut cq: Cq) {
        if self.bus_master.is_enabled {
            cq.memory.mapped(&self.dma);
            cq.clear();
        }
        Self::note_cq(&self.journal.hot, qid, &cq);
        let Some(slot) = self.cqs.get_mut(usize::from(qid)) else {
            return self.broken("a completion queue has no place");
        };
        *slot = Some(cq);
    }

    /// Installs a submission queue, and looks up its memory in this engine's map. Its completion
    /// queue must be installed already.
    pub(super) fn install_sq(&mut self, qid: u16, mut sq: Sq) {
        let cqid = sq.cqid;
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(cqid)) else {
            return self.broken("a submission queue has no completion queue");
        };
        let Some(slot) = self.sqs.get_mut(usize::from(qid)) else {
            return self.broken("a submission queue has no place");
        };
        if self.bus_master.is_enabled {
            sq.memory.mapped(&self.dma);
        }
        if let Some(hot) = &self.journal.hot {
            hot.note_sq(qid, &mut sq, cq.tail);
        }
        *slot = Some(sq);
        cq.users += 1;
        if qid > 0 {
            self.open_records();
        }
        self.start_fetching(qid);
    }

    pub(super) fn start_fetching(&mut self, qid: u16) {
        if !self.halted {
            self.polled.insert(qid);
        }
    }

    /// Begins to delete a submission queue. Commands fetched before are completed first; then
    /// [`Event::SqDrained`] reports the end.
    pub(super) fn delete_sq(&mut self, qid: u16) {
        self.forget_aborts(qid);
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) else {
            return self.broken("a submission queue is to be deleted that is gone");
        };
        sq.deleting = true;
        self.polled.remove(|q| q == qid);
        // The host ignores further completions of this queue. Those that wait for room are dropped,
        // so that a full completion queue cannot block the deletion.
        if let Some(Some(cq)) = self.cqs.get_mut(usize::from(sq.cqid)) {
            let slots = &mut self.slots;
            cq.backlog.retain(|&PendingCompletion { sqid, slot, .. }| {
                if sqid == qid {
                    sq.outstanding = sq.outstanding.saturating_sub(1);
                    slot.into_iter().for_each(|slot| slots.release_kept(slot));
                }
                sqid != qid
            });
        }
        self.sq_drained(qid);
    }

    /// Removes a queue that is being deleted, once it has no outstanding command.
    pub(super) fn sq_drained(&mut self, qid: u16) {
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
            self.events.push_back(Event::SqDrained(qid));
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
    pub fn finds_shadow(&self, shadow: u64, eventidx: u64) -> bool {
        self.doorbells.find(&self.dma, shadow, eventidx).is_ok()
    }

    /// Applies Doorbell Buffer Config. While the memory of the buffers is unmapped, the doorbell
    /// registers count: this engine may have lost memory that the control half's engine has found.
    pub(super) fn configure_shadow(&mut self, shadow: u64, eventidx: u64) {
        let found = self.doorbells.find(&self.dma, shadow, eventidx).ok();
        let buffers = found.filter(|_| self.bus_master.is_enabled);
        // Doorbell values that the host has published in the old buffers must not be lost.
        self.look_at_all();
        self.doorbells.configure(shadow, eventidx, buffers);
        probes::dbbuf_config(self.id, shadow, eventidx);
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
        self.note_queues();
    }
}
