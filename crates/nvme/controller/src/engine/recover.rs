//! Recovery of queues and commands of the previous process from the rings, its notes and its
//! records. Module [`journal`](super::journal), the counterpart, defines the order of the stores.
//!
//! - *Tail of a completion queue*: where the phase tag changes, from the first entry of the ring
//!   on. If the ring's memory is unmapped, the tail was noted when that happened.
//! - *Head of a submission queue*: the largest of the note of the last batch, the SQ Head Pointer
//!   of the newest completion if it is of this queue and was posted after that note (in the middle
//!   of a batch), and the position after each recorded command.
//! - *A record with a posted completion*: at most the last one, because a record is removed right
//!   after the post. It is identified by the newest completion: queue, command identifier, and an
//!   SQ Head Pointer beyond the command. An earlier completion with the same identifier cannot have
//!   such a pointer, because the host could not submit more than a ring's entries since it saw that
//!   completion.
//! - All other recorded commands are executed again in the order in which they were fetched. If a
//!   command had ended, only its completion is posted.
//!
//! Doorbells are not restored but read again. Each queue begins without a seen value, so the first
//! poll finds the current values.

use super::Engine;
use super::doorbells::DoorbellKind;
use super::journal::{CqNote, Recorded, Records, SqNote, recorded};
use super::post::refresh_head;
use super::queue::{Cq, QueueMemory, Sq};
use dma::{Access, Ring, Rows};
use doorbell::{Cell, ProtocolAccess, Watch, WatchState, distance};
use nvme::{Command, Completion, Status};
use std::collections::BTreeMap;
use zerocopy::IntoBytes;

/// Value that differs from every doorbell value: no doorbell was read yet.
const UNSEEN: u32 = u32::MAX;

/// Completion queue as the control state describes it, to be restored by the next process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SavedCq {
    pub qid: u16,
    pub iova: u64,
    /// Size of the completion queue in entries.
    pub size: u32,
    pub vector: Option<u16>,
}

/// Submission queue as the control state describes it, to be restored by the next process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SavedSq {
    pub qid: u16,
    pub cqid: u16,
    pub iova: u64,
    /// Size of the submission queue in entries.
    pub size: u32,
}

/// Numbers of the previous process's outstanding commands that were recovered, for the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Number of outstanding commands that are executed again.
    pub replayed: usize,
    /// Number of commands that had ended. Their completions are posted now or wait for room.
    pub ended: usize,
    /// Number of recorded commands with a completion that the previous process had posted.
    pub posted: usize,
}

/// Record of an outstanding command, with its place in the state memory.
struct LocatedRecord {
    rows: Rows,
    share: u16,
    row: usize,
    recorded: Recorded,
}

/// Newest completion entry that was posted to a queue.
#[derive(Clone, Copy)]
pub(super) struct LastCompletion {
    sqid: u16,
    cid: u16,
    sqhd: u32,
}

/// Returns tail and phase of a completion queue, determined from the phase tags of its entries.
fn tail_of(ring: &Ring) -> (u32, bool) {
    let size = ring.entries();
    let first = completion(ring, 0).phase();
    let changes = (1..size).find(|&i| completion(ring, i).phase() != first);
    match changes {
        Some(tail) => (tail, first),
        // All entries have the same phase, so the tail is at the beginning, and the next turn has
        // the opposite phase.
        None => (0, !first),
    }
}

fn completion(ring: &Ring, index: u32) -> Completion {
    zerocopy::transmute!(ring.load_cqe(index))
}

/// Returns the completion entry before the tail; `None` if none was ever posted to the ring.
fn newest(ring: &Ring, tail: u32, phase: bool) -> Option<LastCompletion> {
    let (index, posted_phase) = match tail.checked_sub(1) {
        Some(index) => (index, phase),
        None => (ring.entries().checked_sub(1)?, !phase),
    };
    let entry = completion(ring, index);
    // In a ring without any completion, the last entry looks like one of the previous turn.
    let nothing = entry.as_bytes().iter().all(|byte| *byte == 0);
    (!nothing && entry.phase() == posted_phase).then(|| LastCompletion {
        sqid: entry.sqid.get(),
        cid: entry.cid.get(),
        sqhd: entry.sqhd.get().into(),
    })
}

/// Returns the number of commands fetched from a queue of `size` entries, by its note (`noted`), a
/// completion posted after the note, and its records. Returns `None` when these contradict each
/// other.
fn taken<'a>(
    size: u32,
    noted: u64,
    posted: Option<&LastCompletion>,
    found: impl Iterator<Item = &'a LocatedRecord>,
) -> Option<u64> {
    let mut taken = noted;
    if let Some(newest) = posted.filter(|newest| newest.sqhd < size) {
        let index = (noted % u64::from(size)) as u32;
        taken = noted.checked_add(distance(index, newest.sqhd, size).into())?;
    }
    for LocatedRecord { recorded, .. } in found {
        let behind = recorded.number.checked_add(1)?;
        if behind > noted.checked_add(size.into())? {
            return None;
        }
        taken = taken.max(behind);
    }
    Some(taken)
}

impl Engine {
    /// Recovers the queues and commands of the previous process; [`Engine::replay`] then restarts
    /// the commands. `fetched` is the number of commands fetched from the admin queue. Guest
    /// memory, Bus Master Enable and shadow buffers must be restored before. Returns `None` when
    /// the state is contradictory.
    pub fn recover(&mut self, cqs: &[SavedCq], sqs: &[SavedSq], fetched: u64) -> Option<Recovered> {
        let mut newest = BTreeMap::new();
        for cq in cqs {
            let hot = self.journal.hot.as_ref()?;
            let note = hot.cq(cq.qid);
            let mut users = sqs.iter().filter(|sq| sq.cqid == cq.qid);
            // A host that uses one shadow doorbell uses all of them, even those that were not
            // polled yet.
            let shadow_live = users.any(|sq| hot.sq(sq.qid).is_of_shadow_host());
            if let Some(entry) = self.recover_cq(cq, note, shadow_live)? {
                newest.insert(cq.qid, entry);
            }
        }
        let mut found = self.find_records();
        let known = |found: &LocatedRecord| sqs.iter().any(|sq| sq.qid == found.recorded.sqid);
        // The queues of these commands were deleted, so the host does not wait for their
        // completions.
        for gone in found.extract_if(.., |found| !known(found) || found.recorded.sqid == 0) {
            gone.remove();
        }
        for sq in sqs {
            let fetched = (sq.qid == 0).then_some(fetched);
            self.recover_sq(sq, fetched, &found, newest.get(&sq.cqid))?;
        }
        let mut recovery = Recovery::default();
        for posted in found.extract_if(.., |found| self.is_posted(&found.recorded, &newest)) {
            crash::point!("controller.recover.posted");
            posted.remove();
            recovery.posted += 1;
        }
        found.sort_by_key(|found| (found.recorded.order, found.share));
        if !self.queues.bus_master.is_enabled {
            self.queues.release_rings(&self.journal);
        }
        Some(Recovered { found, recovery })
    }

    /// Recovers a completion queue. Returns its newest completion, or `None` when the state is
    /// contradictory.
    pub(super) fn recover_cq(
        &mut self,
        saved: &SavedCq,
        note: CqNote,
        shadow_live: bool,
    ) -> Option<Option<LastCompletion>> {
        let SavedCq {
            qid,
            iova,
            size,
            vector,
        } = *saved;
        let mut memory = QueueMemory::away(iova, size, 16, Access::Write);
        memory.mapped(&self.dma);
        let shadow_live = note.shadow_live || shadow_live;
        let (tail, phase) = match (note.away, memory.ring()) {
            (Some(away), _) => away,
            (None, Some(ring)) => tail_of(ring),
            (None, None) => return None,
        };
        if tail >= size {
            return None;
        }
        let ring = memory.ring().filter(|_| note.away.is_none());
        let newest = ring.and_then(|ring| newest(ring, tail, phase));
        // The queue counts as full until its doorbell shows a newer head.
        let full = if tail + 1 == size { 0 } else { tail + 1 };
        let head = note.register.map_or(full, |_| note.head);
        let watch = Watch::from_state(WatchState {
            size,
            current: head,
            last_shadow: if shadow_live || note.register.is_some() {
                UNSEEN
            } else {
                note.seen
            },
            last_register: note.register.unwrap_or(UNSEEN),
            shadow_live,
            eventidx: head,
        })?;
        let mut cq = Cq::new(memory, watch, vector);
        (cq.tail, cq.phase, cq.head, cq.seen) = (tail, phase, head, UNSEEN);
        cq.is_stale = note.is_stale;
        self.park_anew(qid, DoorbellKind::CqHead, head);
        let cells = self.queues.doorbells.cells(qid, DoorbellKind::CqHead);
        refresh_head(&mut cq, cells, &mut self.events, qid);
        self.install_cq(qid, cq);
        crash::point!("controller.recover.cq");
        Some(newest)
    }

    /// Recovers a submission queue, after its completion queue. `fetched` is the number of commands
    /// fetched from the admin queue, which the control half knows.
    fn recover_sq(
        &mut self,
        saved: &SavedSq,
        fetched: Option<u64>,
        found: &[LocatedRecord],
        newest: Option<&LastCompletion>,
    ) -> Option<()> {
        let SavedSq {
            qid, cqid, size, ..
        } = *saved;
        let note = self.journal.hot.as_ref()?.sq(qid);
        let taken = match fetched {
            Some(fetched) => fetched,
            None => {
                let posted = newest.filter(|newest| {
                    newest.sqid == qid && self.cq_tail(cqid) != Some(note.cq_tail)
                });
                taken(
                    size,
                    note.fetched,
                    posted,
                    found.iter().filter(|f| f.recorded.sqid == qid),
                )?
            }
        };
        self.recover_sq_at(saved, note, taken)
    }

    /// Recovers a submission queue from which `taken` commands were fetched.
    pub(super) fn recover_sq_at(
        &mut self,
        saved: &SavedSq,
        note: SqNote,
        taken: u64,
    ) -> Option<()> {
        let SavedSq {
            qid,
            cqid,
            iova,
            size,
        } = *saved;
        let head = (taken % u64::from(size)) as u32;
        let watch = Watch::from_state(WatchState {
            size,
            current: head,
            // If the host uses the shadow doorbell, any value other than the head is new.
            last_shadow: if note.shadow_live || note.register.is_some() {
                head
            } else {
                note.seen
            },
            last_register: note.register.unwrap_or(head),
            shadow_live: note.shadow_live,
            eventidx: head,
        })?;
        let mut memory = QueueMemory::away(iova, size, 64, Access::Read);
        memory.mapped(&self.dma);
        let mut sq = Sq::new(cqid, memory, watch);
        (sq.head, sq.tail, sq.seen, sq.fetched) = (head, head, head, taken);
        self.park_anew(qid, DoorbellKind::SqTail, head);
        self.install_sq(qid, sq);
        crash::point!("controller.recover.sq");
        Some(())
    }

    /// Sets EventIdx so that the host writes the doorbell register at its next move, however late
    /// the first poll is.
    fn park_anew(&self, qid: u16, which: DoorbellKind, index: u32) {
        let cells = self.queues.doorbells.cells(qid, which);
        if let Some(shadow) = cells.and_then(|cells| cells.shadow) {
            Cell::store(shadow.eventidx, index, ProtocolAccess::Initialise);
        }
    }

    fn cq_tail(&self, cqid: u16) -> Option<u32> {
        let cq = self.queues.cqs.get(usize::from(cqid))?.as_ref()?;
        Some(cq.tail)
    }

    /// Returns whether the completion of a recorded command was posted.
    fn is_posted(&self, recorded: &Recorded, newest: &BTreeMap<u16, LastCompletion>) -> bool {
        let Some(Some(sq)) = self.queues.sqs.get(usize::from(recorded.sqid)) else {
            return false;
        };
        newest.get(&sq.cqid).is_some_and(|newest| {
            let behind = distance(newest.sqhd % sq.size, sq.head, sq.size);
            let fetched = sq.fetched.saturating_sub(behind.into());
            newest.sqid == recorded.sqid
                && newest.cid == recorded.command.cid.get()
                && fetched > recorded.number
        })
    }

    /// Restores the buffers of Doorbell Buffer Config without changing their contents.
    pub fn restore_shadow(&mut self, shadow: u64, eventidx: u64) {
        let found = self.queues.doorbells.find(&self.dma, shadow, eventidx).ok();
        let found = found.filter(|_| self.queues.bus_master.is_enabled);
        self.queues.doorbells.configure(shadow, eventidx, found);
    }

    /// Sets the number of outstanding admin commands, after a restart.
    pub fn restore_admin_outstanding(&mut self, outstanding: u32) {
        if let Some(Some(sq)) = self.queues.sqs.first_mut() {
            sq.outstanding = outstanding;
        }
    }

    /// Returns the records of all engines of the previous process.
    fn find_records(&self) -> Vec<LocatedRecord> {
        let Some((state, _)) = &self.journal.state else {
            return Vec::new();
        };
        let mut all = Vec::new();
        for share in 0..state.shares() {
            let Some(rows) = state.recorded(share) else {
                continue;
            };
            for row in 0..rows.count() {
                if let Some(recorded) = rows.get(row).and_then(recorded) {
                    let rows = rows.clone();
                    all.push(LocatedRecord {
                        rows,
                        share,
                        row,
                        recorded,
                    });
                }
            }
        }
        all
    }

    /// Restarts recovered commands. Returns `None` when they exceed the maximum number of
    /// outstanding commands.
    pub fn replay(&mut self, recovered: Recovered) -> Option<Recovery> {
        let Recovered {
            found,
            mut recovery,
        } = recovered;
        let Some(order) = found.last().map(|last| last.recorded.order) else {
            return Some(recovery);
        };
        self.open_records();
        let count = self.slots.count();
        let (mut own, mut inherited, mut all) = (Vec::new(), Vec::new(), Vec::new());
        for LocatedRecord {
            rows,
            share,
            row,
            recorded,
        } in found
        {
            let slot = match u16::try_from(row) {
                Ok(row) if share == 0 && row < count => {
                    own.push(row);
                    row
                }
                _ => {
                    let slot = usize::from(count) + inherited.len();
                    inherited.push((rows, row));
                    u16::try_from(slot).ok()?
                }
            };
            all.push((slot, recorded));
        }
        if !self.slots.inherit(&own, inherited, order) {
            return None;
        }
        for (_, recorded) in &all {
            if let Some(Some(sq)) = self.queues.sqs.get_mut(usize::from(recorded.sqid)) {
                sq.outstanding += 1;
            }
        }
        for (slot, recorded) in all {
            crash::point!("controller.recover.replay");
            match recorded.ended {
                Some(_) => recovery.ended += 1,
                None => recovery.replayed += 1,
            }
            self.replay_one(slot, &recorded);
        }
        Some(recovery)
    }

    /// Resumes operation after recovery. The next round polls every queue, and the host is
    /// signalled for all completions that it has not consumed, whether they were signalled before
    /// or not.
    pub fn resume(&mut self) {
        self.queues.polled.poll_all();
        if self.queues.bus_master.is_enabled {
            let (irqs, events) = (&mut self.irqs, &mut self.events);
            self.queues.signal_all_unread(irqs, events);
        }
    }

    fn replay_one(&mut self, slot: u16, recorded: &Recorded) {
        let (sqid, command): (u16, &Command) = (recorded.sqid, &recorded.command);
        self.slots.reserve(slot, recorded.applied);
        let (status, result) = match recorded.ended {
            Some(ended) => ended,
            // The command's data is not accessible without Bus Master Enable, so the host has to
            // send the command again.
            None if !self.queues.bus_master.is_enabled => (Status::COMMAND_INTERRUPTED, 0),
            None => return self.execute(sqid, command),
        };
        self.end_reserved(sqid, command.cid.get(), status, result);
    }
}

impl LocatedRecord {
    fn remove(&self) {
        if let Some(row) = self.rows.get(self.row) {
            Records::remove_row(row);
        }
    }
}

/// Commands recovered from the previous process, and their counts so far.
pub(crate) struct Recovered {
    found: Vec<LocatedRecord>,
    recovery: Recovery,
}
