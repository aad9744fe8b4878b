//! The part of the state memory that an engine writes, from which the next process recovers
//! outstanding commands.
//!
//! *The rings are the journal* of commands that complete within the call. The completion queue
//! shows the posted completions, by the phase tag, and the SQ Head Pointer of its newest entry
//! shows how many entries had been fetched. Once per batch, an engine notes how many commands of
//! the queue it has fetched ([`QueueRows::note`]), all of which are posted or recorded. Commands
//! after the note may be posted only if the note contains the completion queue's tail of just
//! before. There are therefore fewer of them than entries in the ring, and the newest entry is one
//! of theirs. If another completion was posted since the queue's last note, a note also precedes
//! the batch.
//!
//! *A record* is one line for each command with a slot. It contains the submission queue entry, and
//! the queue and the command's number in it, in fields that the NVM command set does not use here.
//! The record is written before the volume gets a request, and removed after the completion was
//! posted. Recovery relies on the order of these stores ([`recover`](super::recover)):
//!
//! ```text
//! record -> volume -> completion posted -> record removed
//!       `-> note of the batch            (the note covers only what is posted or recorded)
//! ```
//!
//! A completion for which its queue has no room keeps its slot, and is stored in the record. The
//! next process posts it without repeating the volume request.

use super::queue::{Cq, Sq};
use crate::config::MAX_QUEUE_ENTRIES;
use dma::{ROW, Row, Rows};
use doorbell::{Watch, WatchState};
use nvme::{Command, NvmOpcode, Status};
use state_memory::StateMemory;
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::{FromBytes, IntoBytes};

/// Word offsets within a queue pair's row of the state memory.
mod hot {
    /// Number of commands fetched from the submission queue since its creation, tail of its
    /// completion queue at that time, and whether the host was seen to use the shadow doorbell. One
    /// word, because they have to be consistent.
    pub const BATCH: usize = 0;
    /// Number of completions posted so far, in the row of the admin queue.
    pub const POSTED: usize = 1;
    /// Last seen value of the shadow doorbell of the submission queue.
    pub const SQ_SEEN: usize = 2;
    /// Register value of the doorbell to be ignored, while the memory of the shadow buffers is
    /// unmapped; otherwise 0.
    pub const SQ_REGISTER: usize = 3;
    /// [`SQ_SEEN`] for the completion queue with this ID, and whether its shadow doorbell is in
    /// use.
    pub const CQ_SEEN: usize = 4;
    /// [`SQ_REGISTER`] for the completion queue.
    pub const CQ_REGISTER: usize = 5;
    /// Last known head of the completion queue.
    pub const CQ_HEAD: usize = 6;
    /// Tail and phase of the completion queue while its memory is unmapped, and whether the queue
    /// is stale; otherwise 0.
    pub const AWAY: usize = 7;
}

/// Number of tail bits in [`hot::BATCH`]. A flag and the number of fetched commands are above them.
const TAIL_BITS: u32 = 12;
const LIVE: u64 = 1 << TAIL_BITS;
/// Number of bits of a command's number, here and in records: enough for seven years at ten million
/// commands per second from one queue.
const NUMBER_BITS: u32 = 64 - 1 - TAIL_BITS;
const _: () = assert!(MAX_QUEUE_ENTRIES <= 1 << TAIL_BITS);

/// Flag of a word that stores an optional index in its lower 32 bits: the index is present.
const FLAG: u64 = 1 << 32;
/// Phase tag bit of a word that stores a queue index in its lower 32 bits.
const PHASE: u64 = 1 << 33;
/// Stale bit ([`Cq::is_stale`]), which earlier versions did not write.
const STALE: u64 = 1 << 34;

/// Rows of the state memory in which an engine notes the state of queue pairs, by queue ID.
#[derive(Clone)]
pub(super) struct QueueRows(Rows);

/// State of a submission queue that an engine has noted in the state memory, for the next process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SqNote {
    /// Number of commands fetched from the queue since its creation.
    pub fetched: u64,
    /// Tail of the completion queue when the state was noted.
    pub cq_tail: u32,
    /// Whether the host uses the queue's shadow doorbell.
    pub shadow_live: bool,
    /// Last value of the shadow doorbell that the engine has read.
    pub seen: u32,
    /// Value of the doorbell register that does not count as a new tail, see [`register_seen`].
    pub register: Option<u32>,
}

impl SqNote {
    /// Returns whether the host uses shadow doorbells, even if their memory is unmapped.
    pub fn is_of_shadow_host(&self) -> bool {
        self.shadow_live || self.register.is_some()
    }
}

/// State of a completion queue that an engine has noted in the state memory, for the next process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CqNote {
    /// Whether the host uses the queue's shadow doorbell.
    pub shadow_live: bool,
    /// Last value of the shadow doorbell that the engine has read.
    pub seen: u32,
    /// Value of the doorbell register that does not count as a new head, see [`register_seen`].
    pub register: Option<u32>,
    /// Head of the completion queue, as far as known when the state was noted.
    pub head: u32,
    /// Tail and phase tag of the completion queue if its memory was unmapped, otherwise `None`.
    pub away: Option<(u32, bool)>,
    /// Whether the queue's memory has never been mapped since its creation, see [`Cq::is_stale`].
    pub is_stale: bool,
}

/// Stores a word of a row. The compiler checks that the row has it.
#[expect(clippy::indexing_slicing, reason = "the assertion proves the bound")]
fn store<const WORD: usize>(row: &Row, value: u64) {
    const { assert!(WORD * size_of::<u64>() < ROW) };
    row[WORD].store(value, Ordering::Release);
}

/// Loads a word of a row. The compiler checks that the row has it.
#[expect(clippy::indexing_slicing, reason = "the assertion proves the bound")]
fn load<const WORD: usize>(row: &Row) -> u64 {
    const { assert!(WORD * size_of::<u64>() < ROW) };
    row[WORD].load(Ordering::Acquire)
}

fn flag(on: bool, bit: u64) -> u64 {
    if on { bit } else { 0 }
}

/// Returns the last seen register value when it is not the doorbell's current value: the host uses
/// the shadow doorbell, but its memory is unmapped. The register counts from its next change on.
pub(super) fn register_seen(watch: &Watch) -> Option<u32> {
    let WatchState {
        shadow_live,
        last_register,
        current,
        ..
    } = watch.state();
    (!shadow_live && last_register != current).then_some(last_register)
}

fn optional(value: Option<u32>) -> u64 {
    value.map_or(0, |value| FLAG | u64::from(value))
}

fn option(word: u64) -> Option<u32> {
    (word & FLAG != 0).then_some(word as u32)
}

/// Parts of the state memory that an engine writes, for the next process.
pub(crate) struct Journal {
    /// State memory with the command records, and the index of this engine's share.
    pub(super) state: Option<(StateMemory, u16)>,
    /// Rows in which the engine notes the state of its queues.
    pub(super) hot: Option<QueueRows>,
    /// Number of admin completions posted so far, including those of previous processes.
    pub admin_posted: u64,
}

impl Journal {
    /// Creates the engine's view of its state memory; without one, nothing is noted.
    pub(super) fn new(state: Option<StateMemory>, share: u16, hot: Option<QueueRows>) -> Self {
        Journal {
            state: state.map(|state| (state, share)),
            admin_posted: hot.as_ref().map_or(0, QueueRows::admin),
            hot,
        }
    }
}

impl Journal {
    /// Counts a posted admin completion, and notes the count.
    pub fn count_admin(&mut self) {
        self.restore_admin(self.admin_posted.wrapping_add(1));
    }

    /// Sets the number of posted admin completions, and notes it.
    pub fn restore_admin(&mut self, posted: u64) {
        self.admin_posted = posted;
        if let Some(hot) = &self.hot {
            hot.note_admin(posted);
        }
    }

    /// Notes the state of a completion queue, see [`QueueRows::note_cq`].
    pub fn note_cq(&self, qid: u16, cq: &Cq) {
        if let Some(hot) = &self.hot {
            hot.note_cq(qid, cq);
        }
    }

    /// Returns the records of this engine's `slots` slots, if the controller has a state memory.
    pub(super) fn records(&self, slots: u16) -> Option<Records> {
        let (state, share) = self.state.as_ref()?;
        Some(Records::new(state.recorded(*share)?, slots))
    }
}

impl QueueRows {
    pub fn new(rows: Rows) -> QueueRows {
        QueueRows(rows)
    }

    fn row(&self, qid: u16) -> Option<&Row> {
        self.0.get(usize::from(qid))
    }

    /// Notes in the state memory that all commands fetched from queue `qid` are posted or recorded.
    #[inline(always)]
    pub fn note(&self, qid: u16, sq: &mut Sq, cq_tail: u32) {
        self.note_but(qid, sq, cq_tail, 0);
    }

    /// Notes that all commands fetched from the queue, except the last `rest`, are posted or
    /// recorded.
    #[inline(always)]
    pub fn note_but(&self, qid: u16, sq: &mut Sq, cq_tail: u32, rest: u64) {
        if let Some([batch, ..]) = self.row(qid) {
            sq.noted_tail = cq_tail;
            let live = u64::from(sq.watch.shadow_live()) << TAIL_BITS;
            let fetched = sq.fetched.wrapping_sub(rest);
            let word = fetched << (TAIL_BITS + 1) | live | u64::from(cq_tail);
            crash::point!("controller.hot.before");
            batch.store(word, Ordering::Release);
            crash::point!("controller.hot.noted");
        }
    }

    /// Notes the state of a submission queue after it was installed in the engine, or its doorbell
    /// cells have changed.
    pub fn note_sq(&self, qid: u16, sq: &mut Sq, cq_tail: u32) {
        if let Some(row) = self.row(qid) {
            store::<{ hot::SQ_SEEN }>(row, sq.watch.state().last_shadow.into());
            store::<{ hot::SQ_REGISTER }>(row, optional(register_seen(&sq.watch)));
            self.note(qid, sq, cq_tail);
        }
    }

    /// Notes the state of a completion queue after it was installed, or its memory was mapped or
    /// unmapped.
    pub fn note_cq(&self, qid: u16, cq: &Cq) {
        let Some(row) = self.row(qid) else {
            return;
        };
        let watch = cq.watch.state();
        let seen = u64::from(watch.last_shadow) | flag(watch.shadow_live, FLAG);
        store::<{ hot::CQ_HEAD }>(row, cq.head.into());
        store::<{ hot::CQ_SEEN }>(row, seen);
        store::<{ hot::CQ_REGISTER }>(row, optional(register_seen(&cq.watch)));
        let away = match cq.memory.ring() {
            Some(_) => 0,
            None => {
                let flags = FLAG | flag(cq.phase, PHASE) | flag(cq.is_stale, STALE);
                u64::from(cq.tail) | flags
            }
        };
        crash::point!("controller.queue.noted");
        store::<{ hot::AWAY }>(row, away);
    }

    /// Notes the number of posted admin completions in the state memory.
    pub fn note_admin(&self, posted: u64) {
        if let Some(row) = self.row(0) {
            store::<{ hot::POSTED }>(row, posted);
        }
        crash::point!("controller.admin.counted");
    }

    /// Returns the number of posted admin completions that [`QueueRows::note_admin`] has noted; 0
    /// before the first.
    pub fn admin(&self) -> u64 {
        self.row(0).map_or(0, load::<{ hot::POSTED }>)
    }

    /// Returns the state of a submission queue that another engine or process has noted.
    pub fn sq(&self, qid: u16) -> SqNote {
        self.row(qid).map_or_else(SqNote::default, |row| {
            let batch = load::<{ hot::BATCH }>(row);
            SqNote {
                fetched: batch >> (TAIL_BITS + 1),
                cq_tail: (batch & (LIVE - 1)) as u32,
                shadow_live: batch & LIVE != 0,
                seen: load::<{ hot::SQ_SEEN }>(row) as u32,
                register: option(load::<{ hot::SQ_REGISTER }>(row)),
            }
        })
    }

    /// Returns the noted state of a completion queue.
    pub fn cq(&self, qid: u16) -> CqNote {
        self.row(qid).map_or_else(CqNote::default, |row| {
            let (seen, away) = (load::<{ hot::CQ_SEEN }>(row), load::<{ hot::AWAY }>(row));
            CqNote {
                shadow_live: seen & FLAG != 0,
                seen: seen as u32,
                register: option(load::<{ hot::CQ_REGISTER }>(row)),
                head: load::<{ hot::CQ_HEAD }>(row) as u32,
                away: (away & FLAG != 0).then_some((away as u32, away & PHASE != 0)),
                is_stale: away & (FLAG | STALE) == FLAG | STALE,
            }
        })
    }
}

// ---- records

/// Word of a record with its order: 0 for an empty record, otherwise the sequence number of the
/// record in this engine, starting at 1. Stored in CDW2 and CDW3 of the entry, which are reserved.
const ORDER: usize = 1;
/// Word of a record with a completion that waits for room: status and dword 0. (For Zone Append,
/// dwords 0 and 1 are the record's own LBA.) Stored in the metadata pointer of the entry, without
/// which commands of namespaces with metadata are not executed again.
const ENDING: usize = 2;
/// Word of a record with the queue ID, and the number of commands fetched from the queue before.
/// Stored in CDW14 and CDW15 of the entry, which concern protection information.
const PLACE: usize = 7;
/// Bit of the word [`ENDING`] in a record: the command has ended, and its completion is in the
/// record.
const ENDED: u64 = 1 << 63;
/// Bit of the word [`ENDING`] in a record: the command's effect was applied, see
/// [`Records::mark_applied`].
const APPLIED: u64 = 1 << 62;

/// Records of an engine's outstanding commands in the state memory, by slot.
pub(super) struct Records {
    rows: Rows,
    /// Number of the engine's own slots. Slots above it belong to commands of the previous process.
    own: u16,
    /// Number of commands that this engine has recorded so far.
    order: u64,
    inherited: Vec<(Rows, usize)>,
}

/// Command that the previous process had recorded as outstanding in the state memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recorded {
    pub order: u64,
    pub sqid: u16,
    /// Number of commands fetched from the queue before this one.
    pub number: u64,
    pub command: Command,
    /// Status and result of a command that has ended: only its completion has to be posted.
    pub ended: Option<(Status, u64)>,
    /// Whether the command's effect was applied, see [`Records::mark_applied`].
    pub applied: bool,
}

impl Records {
    /// Creates the records of an engine with `own` slots, in its share of the state memory's rows.
    pub fn new(rows: Rows, own: u16) -> Records {
        Records {
            rows,
            own,
            order: 0,
            inherited: Vec::new(),
        }
    }

    /// Takes over records of the previous process, for slots after the engine's own, in this order.
    /// New records are numbered after `order`.
    pub fn inherit(&mut self, records: Vec<(Rows, usize)>, order: u64) {
        self.inherited = records;
        self.order = self.order.max(order);
    }

    /// Marks the command's effect on state outside the volume as applied, so that a replay does
    /// only the rest.
    pub fn mark_applied(&self, slot: u16) {
        if let Some(row) = self.row(slot).filter(|row| load::<ORDER>(row) != 0) {
            store::<ENDING>(row, APPLIED);
        }
        crash::point!("controller.record.applied");
    }

    #[inline(always)]
    fn row(&self, slot: u16) -> Option<&Row> {
        if slot < self.own {
            self.rows.get(usize::from(slot))
        } else {
            self.inherited_row(slot)
        }
    }

    #[cold]
    fn inherited_row(&self, slot: u16) -> Option<&Row> {
        let at = usize::from(slot).checked_sub(self.own.into())?;
        let (rows, row) = self.inherited.get(at)?;
        rows.get(*row)
    }

    /// Records a command, before it has any effect.
    #[inline(always)]
    pub fn write(&mut self, slot: u16, sqid: u16, number: u64, command: &Command) {
        self.write_ended(slot, sqid, number, command, 0);
    }

    #[inline(always)]
    fn write_ended(&mut self, slot: u16, sqid: u16, number: u64, command: &Command, ending: u64) {
        self.order += 1;
        let order = self.order;
        let Some(row) = self.row(slot) else {
            return;
        };
        let [head, _, _, prp1, prp2, lba, length, ..] = words(command);
        let [
            head_at,
            order_at,
            ending_at,
            prp1_at,
            prp2_at,
            lba_at,
            length_at,
            place_at,
        ] = row;
        head_at.store(head, Ordering::Relaxed);
        ending_at.store(ending, Ordering::Relaxed);
        prp1_at.store(prp1, Ordering::Relaxed);
        prp2_at.store(prp2, Ordering::Relaxed);
        lba_at.store(lba, Ordering::Relaxed);
        length_at.store(length, Ordering::Relaxed);
        place_at.store(u64::from(sqid) << NUMBER_BITS | number, Ordering::Relaxed);
        crash::point!("controller.record.fields");
        order_at.store(order, Ordering::Release);
        crash::point!("controller.record.written");
    }

    /// Stores a completion that waits for room. An existing record is reused. Otherwise the command
    /// is the last one fetched from its queue; `place` is the queue and the number of commands
    /// before.
    #[cold]
    pub fn end(&mut self, slot: u16, place: (u16, u64), cid: u16, (status, result): (Status, u64)) {
        // For Zone Append, the record itself contains the other half of the result, the LBA
        // written.
        let ending = ENDED | u64::from(status.into_bits()) << 32 | result & 0xffff_ffff;
        if !self.is_recorded(slot) {
            let (sqid, number) = place;
            // The next process never executes this command.
            let command = Command::new(0, cid, 0);
            self.write_ended(slot, sqid, number, &command, ending);
        } else if let Some(row) = self.row(slot) {
            store::<ENDING>(row, ending);
        }
        crash::point!("controller.record.ended");
    }

    /// Returns whether the slot has a record of an outstanding command.
    pub fn is_recorded(&self, slot: u16) -> bool {
        self.row(slot).is_some_and(|row| load::<ORDER>(row) != 0)
    }

    /// Removes a command's record after its completion was posted or is no longer awaited.
    #[inline(always)]
    pub fn remove(&self, slot: u16) {
        crash::point!("controller.record.posted");
        if let Some(row) = self.row(slot) {
            Self::remove_row(row);
        }
        crash::point!("controller.record.removed");
    }

    /// Removes the record of an outstanding command in this row, also one that recovery found and
    /// that belongs to no slot.
    #[inline(always)]
    pub fn remove_row(row: &Row) {
        if let Some(order) = row.get(ORDER) {
            order.store(0, Ordering::Release);
        }
    }
}

/// Returns a submission queue entry as eight words that have the same bytes in memory.
#[inline(always)]
fn words(command: &Command) -> [u64; 8] {
    let bytes: &[u8; 64] = zerocopy::transmute_ref!(command);
    let (chunks, _) = bytes.as_chunks::<8>();
    let mut words = [0; 8];
    for (word, chunk) in words.iter_mut().zip(chunks) {
        *word = u64::from_ne_bytes(*chunk);
    }
    words
}

/// Returns the command recorded in a row of the state memory; `None` if the row has no record.
pub(super) fn recorded(row: &Row) -> Option<Recorded> {
    let mut words = [0; 8];
    for (word, cell) in words.iter_mut().zip(row) {
        *word = AtomicU64::load(cell, Ordering::Acquire);
    }
    let [_, order, ending, .., place] = words;
    if order == 0 {
        return None;
    }
    for unused in [ORDER, ENDING, PLACE] {
        if let Some(word) = words.get_mut(unused) {
            *word = 0;
        }
    }
    let status = Status::from_bits((ending >> 32) as u16 & 0x7fff);
    let command = Command::read_from_bytes(words.as_bytes()).ok()?;
    let appended = command.nvm_opcode() == NvmOpcode::ZONE_APPEND && status.is_success();
    let result = if appended {
        command.slba()
    } else {
        ending & 0xffff_ffff
    };
    Some(Recorded {
        order,
        sqid: (place >> NUMBER_BITS) as u16,
        number: place & ((1 << NUMBER_BITS) - 1),
        command,
        ended: (ending & ENDED != 0).then_some((status, result)),
        applied: ending & APPLIED != 0,
    })
}
