//! The part of the state memory that an engine writes, from which the next process recovers its
//! commands.
//!
//! *The rings are the journal* of commands that are answered within the call. The completion
//! queue shows the posted completions, by the phase tag, and the newest entry's SQ Head Pointer
//! shows the number of entries fetched by then. An engine notes once for each batch how many
//! commands of the queue it has fetched ([`Hot::note`]): all of them posted, or recorded.
//! Commands beyond the note are posted only where the note has the completion queue's tail of
//! just before. They are therefore less than a turn of the ring, and the newest entry is one of
//! them. If another completion was posted since the queue's last note, a note also precedes the
//! batch.
//!
//! *A record* is one line for each command that has a slot: the entry itself, with its queue and
//! its number in it, in fields that no command of the NVM command set uses here. The record is
//! written before the volume gets a request, and is removed when the completion is in the
//! completion queue. Recovery relies on the order of these stores ([`recover`](super::recover)):
//!
//! ```text
//! record -> volume -> completion posted -> record removed
//!       `-> note of the batch            (the note covers only what is posted or recorded)
//! ```
//!
//! A completion that finds no room in its queue keeps its slot, and its record then contains the
//! completion. The next process posts it, too, and does not ask the volume a second time.

use super::queue::{Cq, Sq};
use crate::config::MAX_QUEUE_ENTRIES;
use dma::{Row, Rows};
use doorbell::{Watch, WatchState};
use nvme::{Command, NvmOpcode, Status};
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::{FromBytes, IntoBytes};

/// Words of a hot row.
mod hot {
    /// Commands fetched from the submission queue since it was created; tail of its completion
    /// queue at that time, and whether the host was seen to use the shadow entry. One word, for
    /// neither is of use without the other.
    pub const BATCH: usize = 0;
    /// In the admin queue's row: completions posted so far.
    pub const POSTED: usize = 1;
    /// Value of the shadow entry that means nothing new.
    pub const SQ_SEEN: usize = 2;
    /// Register value that means nothing new, where the shadow buffers' memory was removed, else
    /// 0.
    pub const SQ_REGISTER: usize = 3;
    /// [`SQ_SEEN`] of the completion queue of this number, and whether its shadow entry counts.
    pub const CQ_SEEN: usize = 4;
    /// [`SQ_REGISTER`] of the completion queue.
    pub const CQ_REGISTER: usize = 5;
    /// Last known head of the completion queue.
    pub const CQ_HEAD: usize = 6;
    /// Tail and phase of the completion queue, and whether it is stale, while its memory is not
    /// mapped, else 0.
    pub const AWAY: usize = 7;
}

/// Number of tail bits in [`hot::BATCH`]. Above them are one flag and the number of commands
/// fetched.
const TAIL_BITS: u32 = 12;
const LIVE: u64 = 1 << TAIL_BITS;
/// Number of bits of the number of commands fetched, here and in a record: enough for seven years
/// at ten million commands a second from one queue.
const NUMBER_BITS: u32 = 64 - 1 - TAIL_BITS;
const _: () = assert!(MAX_QUEUE_ENTRIES <= 1 << TAIL_BITS);

/// Flag bit of a word with an index in its lower half.
const FLAG: u64 = 1 << 32;
/// Phase bit of such a word.
const PHASE: u64 = 1 << 33;
/// Stale bit, which earlier versions did not write: [`Cq::is_stale`].
const STALE: u64 = 1 << 34;

/// The rows of the queues, one each, by their numbers.
#[derive(Clone)]
pub(super) struct Hot(Rows);

/// Noted state of a submission queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SqNote {
    /// Commands fetched since the queue was created.
    pub fetched: u64,
    /// Tail of the completion queue when that was noted.
    pub cq_tail: u32,
    /// The shadow entry counts.
    pub shadow_live: bool,
    /// The shadow entry as it was last seen.
    pub seen: u32,
    /// See [`register_seen`].
    pub register: Option<u32>,
}

impl SqNote {
    /// Returns whether the host uses the shadow entry, though its memory may not be there.
    pub fn is_of_shadow_host(&self) -> bool {
        self.shadow_live || self.register.is_some()
    }
}

/// Noted state of a completion queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CqNote {
    /// The shadow entry counts.
    pub shadow_live: bool,
    /// The shadow entry as it was last seen.
    pub seen: u32,
    /// See [`register_seen`].
    pub register: Option<u32>,
    /// Head, as far as known when this was noted.
    pub head: u32,
    /// Tail and phase, if its memory was not there.
    pub away: Option<(u32, bool)>,
    /// The queue's memory has not been mapped since the queue was created: [`Cq::is_stale`].
    pub is_stale: bool,
}

fn store(row: &Row, word: usize, value: u64) {
    if let Some(word) = row.get(word) {
        word.store(value, Ordering::Release);
    }
}

fn load(row: &Row, word: usize) -> u64 {
    row.get(word).map_or(0, |word| word.load(Ordering::Acquire))
}

fn flag(on: bool, bit: u64) -> u64 {
    if on { bit } else { 0 }
}

/// Returns the last seen register value, when the doorbell's value does not come from the
/// register: the host uses the shadow entry, and its memory is not there. The register counts
/// from its next change on.
fn register_seen(watch: &Watch) -> Option<u32> {
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

impl Hot {
    pub fn new(rows: Rows) -> Hot {
        Hot(rows)
    }

    fn row(&self, qid: u16) -> Option<&Row> {
        self.0.get(usize::from(qid))
    }

    /// Notes that all commands fetched from the queue are posted or recorded.
    #[inline(always)]
    pub fn note(&self, qid: u16, sq: &mut Sq, cq_tail: u32) {
        self.note_but(qid, sq, cq_tail, 0);
    }

    /// Notes all but the last `rest` commands.
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

    /// Notes a submission queue after it was added to the engine, or its doorbell has moved.
    pub fn note_sq(&self, qid: u16, sq: &mut Sq, cq_tail: u32) {
        if let Some(row) = self.row(qid) {
            store(row, hot::SQ_SEEN, sq.watch.state().last_shadow.into());
            store(row, hot::SQ_REGISTER, optional(register_seen(&sq.watch)));
            self.note(qid, sq, cq_tail);
        }
    }

    /// Notes a completion queue after it was added, or its memory was mapped or removed.
    pub fn note_cq(&self, qid: u16, cq: &Cq) {
        let Some(row) = self.row(qid) else {
            return;
        };
        let watch = cq.watch.state();
        let seen = u64::from(watch.last_shadow) | flag(watch.shadow_live, FLAG);
        store(row, hot::CQ_HEAD, cq.head.into());
        store(row, hot::CQ_SEEN, seen);
        store(row, hot::CQ_REGISTER, optional(register_seen(&cq.watch)));
        let away = match cq.memory.ring() {
            Some(_) => 0,
            None => {
                let flags = FLAG | flag(cq.phase, PHASE) | flag(cq.is_stale, STALE);
                u64::from(cq.tail) | flags
            }
        };
        crash::point!("controller.queue.noted");
        store(row, hot::AWAY, away);
    }

    /// Notes the number of posted completions of admin commands.
    pub fn note_admin(&self, posted: u64) {
        if let Some(row) = self.row(0) {
            store(row, hot::POSTED, posted);
        }
        crash::point!("controller.admin.counted");
    }

    /// Returns the number noted by [`Hot::note_admin`].
    pub fn admin(&self) -> u64 {
        self.row(0).map_or(0, |row| load(row, hot::POSTED))
    }

    /// Returns the note of a submission queue by another engine or process.
    pub fn sq(&self, qid: u16) -> SqNote {
        self.row(qid).map_or_else(SqNote::default, |row| {
            let batch = load(row, hot::BATCH);
            SqNote {
                fetched: batch >> (TAIL_BITS + 1),
                cq_tail: (batch & (LIVE - 1)) as u32,
                shadow_live: batch & LIVE != 0,
                seen: load(row, hot::SQ_SEEN) as u32,
                register: option(load(row, hot::SQ_REGISTER)),
            }
        })
    }

    /// Returns the note of a completion queue.
    pub fn cq(&self, qid: u16) -> CqNote {
        self.row(qid).map_or_else(CqNote::default, |row| {
            let (seen, away) = (load(row, hot::CQ_SEEN), load(row, hot::AWAY));
            CqNote {
                shadow_live: seen & FLAG != 0,
                seen: seen as u32,
                register: option(load(row, hot::CQ_REGISTER)),
                head: load(row, hot::CQ_HEAD) as u32,
                away: (away & FLAG != 0).then_some((away as u32, away & PHASE != 0)),
                is_stale: away & (FLAG | STALE) == FLAG | STALE,
            }
        })
    }
}

// ---- records

/// Word of a record with its order: 0 for an empty record, else the command's position in the
/// order in which this engine recorded commands, from 1 on. In the entry: CDW2 and CDW3, which
/// are reserved.
const ORDER: usize = 1;
/// Word of a record with a completion that waits for room: status and dword 0 (for Zone Append,
/// dwords 0 and 1 are the record's own LBA). In the entry: the metadata pointer, without which
/// commands of namespaces with metadata are not executed again.
const ENDING: usize = 2;
/// Queue, and how many commands were fetched from it before. In the entry: CDW14 and CDW15, which
/// are about protection information.
const PLACE: usize = 7;
/// Bit of [`ENDING`]: the word contains a completion.
const ENDED: u64 = 1 << 63;
/// Bit of [`ENDING`]: see [`Records::mark_applied`].
const APPLIED: u64 = 1 << 62;

/// The records of an engine's commands, by slot.
pub(super) struct Records {
    rows: Rows,
    /// Number of the engine's own slots; those behind them have inherited records.
    own: u16,
    /// Commands recorded so far.
    order: u64,
    inherited: Vec<(Rows, usize)>,
}

/// A command that another process recorded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recorded {
    pub order: u64,
    pub sqid: u16,
    /// Commands fetched from the queue before it.
    pub number: u64,
    pub command: Command,
    /// Status and result of an ended command: only its completion is to be posted.
    pub ended: Option<(Status, u64)>,
    /// See [`Records::mark_applied`].
    pub applied: bool,
}

impl Records {
    /// Creates the records of an engine with that many slots, in the rows of its share.
    pub fn new(rows: Rows, own: u16) -> Records {
        Records {
            rows,
            own,
            order: 0,
            inherited: Vec::new(),
        }
    }

    /// Takes over records: the slots behind its own, in this order. New ones come after `order`.
    pub fn inherit(&mut self, records: Vec<(Rows, usize)>, order: u64) {
        self.inherited = records;
        self.order = self.order.max(order);
    }

    /// Marks the command's effect on the state beside the volume as applied: replay does only the
    /// rest of it.
    pub fn mark_applied(&self, slot: u16) {
        if let Some(row) = self.row(slot).filter(|row| load(row, ORDER) != 0) {
            store(row, ENDING, APPLIED);
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

    /// Records a command: before anything is done with it.
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

    /// Stores a completion that waits for room. An existing record keeps its place; otherwise the
    /// command is the last one that was fetched from the queue, after `number` earlier ones.
    #[cold]
    pub fn end(&mut self, slot: u16, place: (u16, u64), cid: u16, (status, result): (Status, u64)) {
        // For Zone Append, the record has the rest of the result: the LBA written.
        let ending = ENDED | u64::from(status.into_bits()) << 32 | result & 0xffff_ffff;
        if !self.is_recorded(slot) {
            let (sqid, number) = place;
            // This command is never executed.
            let command = Command::new(0, cid, 0);
            self.write_ended(slot, sqid, number, &command, ending);
        } else if let Some(row) = self.row(slot) {
            store(row, ENDING, ending);
        }
        crash::point!("controller.record.ended");
    }

    /// Returns whether a command is recorded in the slot.
    pub fn is_recorded(&self, slot: u16) -> bool {
        self.row(slot).is_some_and(|row| load(row, ORDER) != 0)
    }

    /// Removes a record after its completion was posted, or is no longer awaited.
    #[inline(always)]
    pub fn remove(&self, slot: u16) {
        crash::point!("controller.record.posted");
        if let Some(row) = self.row(slot) {
            Self::remove_row(row);
        }
        crash::point!("controller.record.removed");
    }

    /// Removes a record that no slot has.
    #[inline(always)]
    pub fn remove_row(row: &Row) {
        if let Some(order) = row.get(ORDER) {
            order.store(0, Ordering::Release);
        }
    }
}

/// Returns the entry as eight words with the same bytes in memory.
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

/// Returns the command recorded in a row, if there is one.
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
    let result = match appended {
        true => command.slba(),
        false => ending & 0xffff_ffff,
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
