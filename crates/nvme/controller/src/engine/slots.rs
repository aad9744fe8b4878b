//! Outstanding commands: a fixed number of slots, each with the memory that its command needs.

use super::copy::Copying;
use super::journal::Records;
use super::metadata::{LockedBlocks, Moving};
use super::own::OwnRequests;
use super::scratch::Budget;
use super::zoned::ZoneSend;
use dma::{Rows, SegmentList};
use nvme::{Command, Status};
use std::collections::VecDeque;
use volume::{Completion, Op};

/// Kind of an outstanding command, and the work that remains when a part of it completes.
pub(super) enum RemainingWork {
    /// The command is a single volume request.
    Single,
    /// Single volume request that zeroes this number of bytes.
    Zeroes(u64),
    /// Dataset Management, range by range.
    Ranges(Box<Deallocating>),
    /// Compare: the volume request reads into process memory, while the slot holds the guest's
    /// data.
    Compare,
    /// Flush of all namespaces one by one; contains the index of the next one.
    FlushAll(usize),
    /// Flush at the controller's own request.
    OwnFlush,
    /// Volume request with this number at the controller's own request.
    Own(u64),
    /// Reservation command, which the control half executes.
    Reservation,
    /// Copy command, which proceeds piece by piece.
    Copy(Box<Copying>),
    /// Write to a namespace with marked blocks, which removes the marks of the written blocks.
    Write,
    /// The control half is changing marks; then the command ends with this completion dword 0.
    Marking(u32),
    /// Write to a zone.
    ZoneWrite(ZoneWrite),
    /// Zone Management Send, which proceeds zone by zone.
    ZoneSend(Box<ZoneSend>),
    /// Command for blocks with metadata.
    Metadata(Box<Moving>),
}

/// Write to a zone, counted as outstanding on the zone.
#[derive(Clone, Copy)]
pub(super) struct ZoneWrite {
    pub zone: u32,
    pub kind: ZoneWriteKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ZoneWriteKind {
    Write,
    /// Zone Append: the slot contains the LBA at which the data is written.
    Append,
    /// Write Zeroes: number of blocks to zero.
    Zeroes(u32),
}

impl ZoneWriteKind {
    pub fn is_zeroes(self) -> bool {
        matches!(self, Self::Zeroes(_))
    }
}

/// Remaining work of a Dataset Management command.
pub(super) struct Deallocating {
    /// Byte offsets and lengths of ranges to deallocate, in reverse order.
    pub left: Vec<(u64, u64)>,
    /// First block and number of blocks of the marks to remove after all ranges are deallocated.
    pub unmarks: Vec<(u64, u64)>,
}

/// A slot for an outstanding command.
pub(super) struct Slot {
    pub sqid: u16,
    pub cid: u16,
    /// Index of the command's namespace in the engine's table.
    pub ns: usize,
    pub nsid: u32,
    pub slba: u64,
    /// Number of bytes transferred between host and controller, for the counters.
    pub bytes: u64,
    pub kind: Kind,
    pub work: RemainingWork,
    /// First error of the command's volume requests; success while there is none.
    pub status: Status,
    /// Memory segments of the command's data. The list keeps its capacity between commands, to
    /// avoid allocations.
    pub list: SegmentList,
    /// Number of bytes that the command uses of the budget for buffers in process memory.
    pub scratch: u64,
    /// Whether the command waits for a flush of its namespace's table of zones or metadata.
    pub table: bool,
    /// Whether an Abort command waits for this command.
    pub abort: bool,
    /// Whether a controller reset has deleted the command's queue, so that no completion is posted.
    pub orphan: bool,
    pub used: bool,
    /// Whether the command has ended and its completion waits for room, so that only the record is
    /// in use.
    pub kept: bool,
    pub seq: u16,
    /// Fetch time ([`probes::cycles`]) of a command that is timed; otherwise, and in free slots, 0.
    pub fetched_at: u64,
}

impl Slot {
    /// Returns whether the command is a plain read or write, which ends with a posted completion
    /// and nothing else.
    #[inline]
    pub fn is_plain(&self) -> bool {
        matches!(self.kind, Kind::Read | Kind::Write)
            && !self.orphan
            && !self.abort
            && self.scratch == 0
            && self.fetched_at == 0
    }

    /// Returns whether the command belongs to the namespace at this index, or still has to read it.
    fn is_of(&self, ns: usize) -> bool {
        match &self.work {
            RemainingWork::Copy(copying) => copying.touches(ns),
            _ => self.ns == ns,
        }
    }
}

impl Slot {
    fn free() -> Self {
        Slot {
            sqid: 0,
            cid: 0,
            ns: 0,
            nsid: 0,
            slba: 0,
            bytes: 0,
            kind: Kind::Other,
            work: RemainingWork::Single,
            status: Status::SUCCESS,
            list: SegmentList::new(),
            scratch: 0,
            table: false,
            abort: false,
            orphan: false,
            used: false,
            kept: false,
            seq: 0,
            fetched_at: 0,
        }
    }
}

/// Kind of an I/O command, as index of the read and write counters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Read and Compare.
    Read = 0,
    Write = 1,
    /// Write that is durable when it completes. The counters treat it as a write.
    DurableWrite,
    /// Verify, which reads but is not counted as a host read.
    Verify,
    Flush,
    Other,
}

impl Kind {
    /// Returns the kind of a read or write request.
    #[inline(always)]
    pub(super) fn of_transfer(op: Op) -> Self {
        match op {
            Op::Read => Self::Read,
            Op::Write { fua: true } => Self::DurableWrite,
            _ => Self::Write,
        }
    }
}

/// Step of a command that the engine has to handle after [`Execution`](super::Execution) has
/// returned.
pub(super) enum Outcome {
    /// A volume has completed this request within the call that made it.
    Completed(Completion),
    /// The command in this slot has ended, with this completion dword 0.
    Ended(u16, u32),
}

/// Properties of the command that is being started.
#[derive(Clone, Copy, Default)]
pub(super) struct Starting {
    /// Number of commands fetched from the queue before this one.
    pub number: u64,
    /// Fetch time of a command that is timed, otherwise 0.
    pub fetched_at: u64,
    /// Index of the command's slot, once it has one.
    pub slot: Option<u16>,
}

/// Slots for the outstanding commands of one engine, and resources that these share.
pub(crate) struct Slots {
    pub(super) starting: Starting,
    /// Steps that the engine has to handle next.
    pub(super) outcomes: VecDeque<Outcome>,
    /// Slots of commands that the volume executes piece by piece within the call, and that continue
    /// in the next round.
    pub(super) parked: VecDeque<u16>,
    /// Budget for the process memory that Compare, Verify and Copy read into.
    pub(super) scratch: Budget,
    pub own: OwnRequests,
    /// Empty segment list, which keeps its capacity for the next zone write.
    pub(super) spare: SegmentList,
    slots: Vec<Slot>,
    free: Vec<u16>,
    owner: u16,
    /// Number of slots that are neither free nor in use: kept for a waiting completion, or removed.
    resting: usize,
    /// Index of the first slot that exists only for an inherited command, and is removed after it.
    inherited: u16,
    /// Index of the slot reserved for the next command, which is replayed and already recorded
    /// there.
    reserved: Option<u16>,
    /// Whether the effect of the replayed command was already applied, see
    /// [`Records::mark_applied`].
    reserved_is_applied: bool,
    /// Records of the outstanding commands in the state memory; `None` without a state memory.
    pub(super) records: Option<Records>,
}

/// Slot contents of a plain read or write.
pub(super) struct Plain<'a> {
    pub command: &'a Command,
    /// Number of commands fetched from the queue before this one.
    pub number: u64,
    pub sqid: u16,
    pub cid: u16,
    pub ns: usize,
    pub nsid: u32,
    pub slba: u64,
    pub bytes: u64,
    pub kind: Kind,
}

impl Slots {
    /// Allocates a slot for a plain read or write. Returns the tag of its volume request, and its
    /// data. `list` is swapped with the slot's own list, which is empty, so that both lists keep
    /// their capacity.
    #[inline]
    pub(super) fn alloc_plain(
        &mut self,
        plain: Plain<'_>,
        list: &mut SegmentList,
    ) -> Option<(u64, SegmentList)> {
        let owner = self.owner;
        let (slot, index) = self.fill(plain)?;
        let tag = tag(owner, slot.seq, index);
        let data = std::mem::replace(list, std::mem::take(&mut slot.list));
        Some((tag, data))
    }

    /// Allocates a slot for a command that a pass-through device executes, which needs no segment
    /// list here. Returns its tag.
    #[inline]
    pub(super) fn alloc_passed(&mut self, plain: Plain<'_>) -> Option<u64> {
        let owner = self.owner;
        let (slot, index) = self.fill(plain)?;
        Some(tag(owner, slot.seq, index))
    }

    #[inline]
    fn fill(&mut self, plain: Plain<'_>) -> Option<(&mut Slot, u16)> {
        let index = self.free.pop()?;
        let slot = self.slots.get_mut(usize::from(index))?;
        let Plain {
            command,
            number,
            sqid,
            cid,
            ns,
            nsid,
            slba,
            bytes,
            kind,
        } = plain;
        slot.used = true;
        slot.abort = false;
        slot.orphan = false;
        slot.work = RemainingWork::Single;
        slot.status = Status::SUCCESS;
        slot.scratch = 0;
        slot.seq = slot.seq.wrapping_add(1);
        (slot.sqid, slot.cid, slot.ns, slot.nsid) = (sqid, cid, ns, nsid);
        (slot.slba, slot.bytes, slot.kind) = (slba, bytes, kind);
        if let Some(records) = &mut self.records {
            records.write(index, sqid, number, command);
        }
        Some((slot, index))
    }

    /// Creates `count` slots; `max_transfer` is the largest transfer of a command in bytes.
    pub fn new(owner: u16, count: u16, max_transfer: u64) -> Self {
        Slots {
            starting: Starting::default(),
            outcomes: VecDeque::with_capacity(2),
            parked: VecDeque::with_capacity(usize::from(count)),
            scratch: Budget::new(max_transfer),
            own: OwnRequests::default(),
            spare: SegmentList::new(),
            slots: (0..count).map(|_| Slot::free()).collect(),
            free: (0..count).rev().collect(),
            owner,
            resting: 0,
            inherited: count,
            reserved: None,
            reserved_is_applied: false,
            records: None,
        }
    }

    /// Returns the number of slots for outstanding commands, including removed ones.
    pub fn count(&self) -> u16 {
        // Slots are numbered with 16 bits.
        self.slots.len() as u16
    }

    /// Moves a slot in use to the resting ones, which are neither free nor in use.
    pub(super) fn rest(&mut self) {
        self.resting += 1;
    }

    /// Moves a resting slot to those in use.
    pub(super) fn wake(&mut self) {
        self.resting = self.resting.saturating_sub(1);
    }

    pub fn in_use(&self) -> usize {
        self.slots.len() - self.free.len() - self.resting
    }

    /// Returns the number of commands that can be started now.
    pub fn free(&self) -> u32 {
        // The value fits because slots are numbered with 16 bits.
        self.free.len() as u32
    }

    /// Begins to measure the latency of the outstanding command with this tag.
    #[cold]
    pub fn time(&mut self, tag: u64) {
        if let Some((_, slot)) = self.tagged(tag) {
            slot.fetched_at = probes::cycles().max(1);
        }
    }

    /// Returns the index of the slot that will be allocated after `before` others, if none is freed
    /// meanwhile.
    pub fn upcoming(&self, before: usize) -> Option<u16> {
        self.free.iter().rev().nth(before).copied()
    }

    pub fn alloc(&mut self) -> Option<u16> {
        let index = self.reserved.take().or_else(|| self.free.pop())?;
        if let Some(slot) = self.slots.get_mut(usize::from(index)) {
            slot.used = true;
            slot.abort = false;
            slot.orphan = false;
            slot.work = RemainingWork::Single;
            slot.status = Status::SUCCESS;
            slot.kind = Kind::Other;
            slot.bytes = 0;
            slot.scratch = 0;
            slot.nsid = 0;
            slot.slba = 0;
            slot.seq = slot.seq.wrapping_add(1);
        }
        Some(index)
    }

    /// Allocates a slot for a volume request at the controller's own request.
    pub(super) fn alloc_own(&mut self, ns: usize, work: RemainingWork) -> Option<u16> {
        let index = self.alloc()?;
        if let Some(slot) = self.get(index) {
            slot.orphan = true;
            slot.ns = ns;
            slot.work = work;
        }
        Some(index)
    }

    /// Takes over commands of the previous process: those with records in these slots (`own`), and
    /// the `inherited` records, for which additional slots are created. [`Slots::reserve`] selects
    /// each of the slots when its command is replayed. Returns `false` when the maximum number of
    /// slots is exceeded.
    pub fn inherit(&mut self, own: &[u16], inherited: Vec<(Rows, usize)>, order: u64) -> bool {
        let Some(records) = &mut self.records else {
            return own.is_empty() && inherited.is_empty();
        };
        let all = self.slots.len() + inherited.len();
        if all > usize::from(u16::MAX) {
            return false;
        }
        self.free.retain(|slot| !own.contains(slot));
        records.inherit(inherited, order);
        self.slots.resize_with(all, Slot::free);
        true
    }

    /// Reserves a slot for the next command, which is a replayed one. `applied`: see
    /// [`Records::mark_applied`].
    pub fn reserve(&mut self, index: u16, applied: bool) {
        self.reserved = Some(index);
        self.reserved_is_applied = applied;
    }

    /// Returns whether the current command is replayed, and its effect was applied by the previous
    /// process.
    pub fn is_applied(&self) -> bool {
        self.is_reserved() && self.reserved_is_applied
    }

    /// Returns whether the current command is one that the previous process had recorded.
    pub fn is_reserved(&self) -> bool {
        self.reserved.is_some()
    }

    /// Allocates the reserved slot, if no command has used it yet.
    pub fn take_reserved(&mut self) -> Option<u16> {
        self.reserved.is_some().then(|| self.alloc())?
    }

    /// Returns whether commands of the previous process still occupy additional slots, because
    /// their records are not in this engine's share of the state memory.
    pub fn is_inheriting(&self) -> bool {
        let inherited = self.slots.iter().skip(self.inherited.into());
        inherited.into_iter().any(|slot| slot.used)
    }

    #[inline]
    pub fn release(&mut self, index: u16) {
        if let Some(slot) = self.slots.get_mut(usize::from(index))
            && std::mem::take(&mut slot.used)
        {
            slot.list.clear();
            slot.fetched_at = 0;
            self.freed(index);
        }
    }

    /// Frees a command's slot, and returns its buffer memory to the budget for such buffers.
    /// Returns `false` when the slot is not in use.
    #[must_use]
    pub(super) fn discard(&mut self, index: u16) -> bool {
        let Some(slot) = self.get(index) else {
            return false;
        };
        let scratch = std::mem::take(&mut slot.scratch);
        self.scratch.release(scratch);
        self.release(index);
        true
    }

    /// Frees the slots of commands that the control half executes, after their queue was deleted.
    /// The control half does not use the slots.
    pub(super) fn discard_control_commands(&mut self) {
        for index in 0..self.count() {
            if let Some(slot) = self.get(index)
                && !slot.kept
                && matches!(
                    slot.work,
                    RemainingWork::Reservation | RemainingWork::Marking(_)
                )
            {
                let _ = self.discard(index);
            }
        }
    }

    /// Frees a command's slot after its completion was posted or is no longer awaited.
    #[inline]
    fn freed(&mut self, index: u16) {
        if let Some(records) = &self.records {
            records.remove(index);
            if index >= self.inherited {
                self.resting += 1;
                return;
            }
        }
        self.free.push(index);
    }

    /// Frees the slot of a command that is not timed, and returns to it the list that it had lent.
    #[inline]
    pub fn release_with(&mut self, index: u16, mut list: SegmentList) {
        if let Some(slot) = self.slots.get_mut(usize::from(index)) {
            list.clear();
            slot.list = list;
            slot.used = false;
            self.freed(index);
        }
    }

    /// Frees the slot of an untimed command with an empty list.
    #[inline]
    pub fn release_empty(&mut self, index: u16) {
        if let Some(slot) = self.slots.get_mut(usize::from(index)) {
            slot.used = false;
            self.freed(index);
        }
    }

    /// Records the command of a slot in use, unless its record exists already.
    pub fn record(&mut self, index: u16, sqid: u16, number: u64, command: &Command) {
        if let Some(records) = &mut self.records
            && !records.is_recorded(index)
        {
            records.write(index, sqid, number, command);
        }
    }

    /// Marks the effect of the slot's command as applied, see [`Records::mark_applied`].
    pub fn mark_applied(&mut self, index: u16) {
        if let Some(records) = &self.records {
            records.mark_applied(index);
        }
    }

    pub(super) fn get(&mut self, index: u16) -> Option<&mut Slot> {
        self.slots.get_mut(usize::from(index)).filter(|s| s.used)
    }

    /// Returns the tag that identifies the command to volumes: owner, sequence number, slot index.
    /// No completion is accepted for the tag of a slot that does not exist.
    pub fn tag(&self, index: u16) -> u64 {
        let seq = self.slots.get(usize::from(index)).map_or(0, |s| s.seq);
        tag(self.owner, seq, index)
    }

    /// Returns the index of the slot with this tag, unless the tag is stale.
    pub fn of_tag(&self, tag: u64) -> Option<u16> {
        let index = tag as u16;
        let slot = self.slots.get(usize::from(index))?;
        (slot.used && slot.seq == (tag >> 16) as u16 && self.owner == (tag >> 48) as u16)
            .then_some(index)
    }

    /// Returns the slot with this tag and its index, unless the tag is stale.
    #[inline]
    pub(super) fn tagged(&mut self, tag: u64) -> Option<(u16, &mut Slot)> {
        let (owner, index) = (self.owner, tag as u16);
        let slot = self.slots.get_mut(usize::from(index))?;
        let same = slot.used && slot.seq == (tag >> 16) as u16 && owner == (tag >> 48) as u16;
        same.then_some((index, slot))
    }

    pub fn find(&self, sqid: u16, cid: u16) -> Option<u16> {
        let same = |s: &Slot| s.used && !s.kept && !s.orphan && s.sqid == sqid && s.cid == cid;
        self.slots.iter().position(same).map(|i| i as u16)
    }

    /// Marks all outstanding commands as having no queue, so that no completions are posted.
    pub fn orphan_all(&mut self) {
        for slot in &mut self.slots {
            slot.orphan |= slot.used;
        }
    }

    /// Returns whether any outstanding command uses the namespace at this index.
    pub fn any_of(&self, ns: usize) -> bool {
        let of = |slot: &Slot| slot.used && !slot.kept && slot.is_of(ns);
        self.slots.iter().any(of)
    }

    /// Returns the tags of the outstanding commands that may read or change the namespace at this
    /// index.
    pub fn touching(&self, ns: usize) -> impl Iterator<Item = u64> {
        let touches = move |slot: &Slot| {
            slot.used
                && !slot.kept
                && slot.is_of(ns)
                && !matches!(slot.work, RemainingWork::Reservation)
        };
        let slots = self.slots.iter().enumerate();
        let touching = slots.filter(move |(_, slot)| touches(slot));
        touching.map(|(i, _)| self.tag(i as u16))
    }

    /// Returns whether any outstanding command uses blocks with metadata, in the namespace at this
    /// index, for which `such` returns `true`.
    pub(super) fn any_metadata(&self, ns: usize, such: impl Fn(LockedBlocks) -> bool) -> bool {
        let slots = self.slots.iter().filter(|slot| slot.used && !slot.kept);
        let mut held = slots.filter_map(|slot| match &slot.work {
            RemainingWork::Metadata(moving) if slot.ns == ns => moving.held(slot.slba),
            RemainingWork::Copy(copying) => copying.held(ns),
            _ => None,
        });
        held.any(such)
    }

    /// Returns the namespace index and the work of each outstanding command.
    pub(super) fn in_flight(&self) -> impl Iterator<Item = (usize, &RemainingWork)> {
        let slots = self.slots.iter().filter(|slot| slot.used && !slot.kept);
        slots.map(|slot| (slot.ns, &slot.work))
    }

    /// Returns whether the command with this tag is outstanding.
    pub fn is_in_flight(&mut self, tag: u64) -> bool {
        self.tagged(tag).is_some_and(|(_, slot)| !slot.kept)
    }

    /// Returns tags and namespace indices of the requests that may be asked to end early. In a
    /// controller that others share namespaces with, this excludes an erasure's own request: a
    /// cancelled one might take effect after later writes by other hosts.
    pub fn guests_in_flight(&self, shared: bool) -> impl Iterator<Item = (u64, usize)> {
        let own_stays = shared && self.own.erases;
        let guests = move |(i, s): (usize, &Slot)| {
            let stays = match s.work {
                RemainingWork::OwnFlush => true,
                RemainingWork::Own(_) => own_stays,
                _ => false,
            };
            (s.used && !s.kept && !stays).then(|| (self.tag(i as u16), s.ns))
        };
        self.slots.iter().enumerate().filter_map(guests)
    }
}

fn tag(owner: u16, seq: u16, index: u16) -> u64 {
    u64::from(owner) << 48 | u64::from(seq) << 16 | u64::from(index)
}

/// Returns the owner part of a tag: the `id` with which the controller or engine was created.
pub fn tag_owner(tag: u64) -> u16 {
    (tag >> 48) as u16
}
