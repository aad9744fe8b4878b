//! Commands in flight: a fixed number of slots, each with the memory that its command needs.

use dma::SegmentList;
use nvme::Status;
use volume::Op;

/// What is left to do when a part of the command completes.
pub(super) enum Work {
    /// One request to the volume. `reads` and `writes` tell what to count.
    Single,
    /// The same, which zeroes so many bytes.
    Zeroes(u64),
    /// Dataset Management: the ranges (byte offset, byte length) that have not been deallocated
    /// yet, last first.
    Ranges(Vec<(u64, u64)>),
    /// Compare: the request reads into host memory, the guest's data waits in the slot.
    Compare,
    /// Flush of every namespace, one after the other: the index of the next one.
    FlushAll(usize),
    /// A flush on the controller's own account.
    OwnFlush,
}

/// A command in flight.
pub(super) struct Slot {
    pub sqid: u16,
    pub cid: u16,
    /// Index of its namespace.
    pub ns: usize,
    pub nsid: u32,
    pub slba: u64,
    /// Bytes that the command moves between host and controller, for the counters.
    pub bytes: u64,
    pub kind: Kind,
    pub work: Work,
    /// The first error of its parts.
    pub status: Status,
    /// Capacity is kept from command to command: no allocation in steady state.
    pub list: SegmentList,
    /// Bytes of host memory that it took from the budget.
    pub scratch: u64,
    /// An Abort command waits for it.
    pub abort: bool,
    /// Its queue is gone (controller reset): nothing is posted.
    pub orphan: bool,
    pub used: bool,
    pub seq: u16,
    /// When it was fetched ([`probes::cycles`]), if it is to be timed; else, and in all free slots,
    /// 0.
    pub fetched_at: u64,
}

impl Slot {
    /// A read or write that somebody waits for, with nothing to be done but to say that it is over.
    #[inline]
    pub fn is_plain(&self) -> bool {
        matches!(self.kind, Kind::Read | Kind::Write)
            && !self.orphan
            && !self.abort
            && self.scratch == 0
            && self.fetched_at == 0
    }
}

/// For the counters, which have reads and writes by these numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Read and Compare.
    Read = 0,
    Write = 1,
    /// A write that is durable when it completes; to the counters a write.
    DurableWrite,
    /// Reads, but is no host read command to the counters.
    Verify,
    Flush,
    Other,
}

impl Kind {
    /// That of a read or write.
    #[inline(always)]
    pub(super) fn of_transfer(op: Op) -> Self {
        match op {
            Op::Read => Self::Read,
            Op::Write { fua: true } => Self::DurableWrite,
            _ => Self::Write,
        }
    }
}

/// The slots of one controller.
pub(super) struct Slots {
    slots: Vec<Slot>,
    free: Vec<u16>,
    owner: u16,
}

/// What a slot of a plain read or write holds.
pub(super) struct Plain {
    pub sqid: u16,
    pub cid: u16,
    pub ns: usize,
    pub nsid: u32,
    pub slba: u64,
    pub bytes: u64,
    pub kind: Kind,
}

impl Slots {
    /// A slot for a plain read or write: the tag under which its volume knows it, and its data.
    /// `list` becomes the slot's own, which is empty: so lists go round, with their capacity.
    #[inline]
    pub fn alloc_plain(
        &mut self,
        plain: Plain,
        list: &mut SegmentList,
    ) -> Option<(u64, SegmentList)> {
        let owner = self.owner;
        let (slot, index) = self.fill(plain)?;
        let tag = tag(owner, slot.seq, index);
        let data = std::mem::replace(list, std::mem::take(&mut slot.list));
        Some((tag, data))
    }

    /// A slot for a command whose data another part of the program keeps: its tag.
    #[inline]
    pub fn alloc_passed(&mut self, plain: Plain) -> Option<u64> {
        let owner = self.owner;
        let (slot, index) = self.fill(plain)?;
        Some(tag(owner, slot.seq, index))
    }

    #[inline]
    fn fill(&mut self, plain: Plain) -> Option<(&mut Slot, u16)> {
        let index = self.free.pop()?;
        let slot = self.slots.get_mut(usize::from(index))?;
        let Plain {
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
        slot.work = Work::Single;
        slot.status = Status::SUCCESS;
        slot.scratch = 0;
        slot.seq = slot.seq.wrapping_add(1);
        (slot.sqid, slot.cid, slot.ns, slot.nsid) = (sqid, cid, ns, nsid);
        (slot.slba, slot.bytes, slot.kind) = (slba, bytes, kind);
        Some((slot, index))
    }

    pub fn new(owner: u16, count: u16) -> Self {
        Slots {
            slots: (0..count)
                .map(|_| Slot {
                    sqid: 0,
                    cid: 0,
                    ns: 0,
                    nsid: 0,
                    slba: 0,
                    bytes: 0,
                    kind: Kind::Other,
                    work: Work::Single,
                    status: Status::SUCCESS,
                    list: SegmentList::new(),
                    scratch: 0,
                    abort: false,
                    orphan: false,
                    used: false,
                    seq: 0,
                    fetched_at: 0,
                })
                .collect(),
            free: (0..count).rev().collect(),
            owner,
        }
    }

    pub fn in_use(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Commands that may be started now.
    pub fn free(&self) -> u32 {
        // As many as there are slots, which are numbered in 16 bits.
        self.free.len() as u32
    }

    /// The command in flight is timed from now on.
    #[cold]
    pub fn time(&mut self, tag: u64) {
        if let Some((_, slot)) = self.tagged(tag) {
            slot.fetched_at = probes::cycles().max(1);
        }
    }

    /// The slot that is taken when `before` others have been, none of them free again by then.
    pub fn upcoming(&self, before: usize) -> Option<u16> {
        self.free.iter().rev().nth(before).copied()
    }

    pub fn alloc(&mut self) -> Option<u16> {
        let index = self.free.pop()?;
        if let Some(slot) = self.slots.get_mut(usize::from(index)) {
            slot.used = true;
            slot.abort = false;
            slot.orphan = false;
            slot.work = Work::Single;
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

    #[inline]
    pub fn release(&mut self, index: u16) {
        if let Some(slot) = self.slots.get_mut(usize::from(index))
            && std::mem::take(&mut slot.used)
        {
            slot.list.clear();
            slot.fetched_at = 0;
            self.free.push(index);
        }
    }

    /// The same for a slot in use, that is not timed, that gets back the list that it gave away.
    #[inline]
    pub fn release_with(&mut self, index: u16, mut list: SegmentList) {
        if let Some(slot) = self.slots.get_mut(usize::from(index)) {
            list.clear();
            slot.list = list;
            slot.used = false;
            self.free.push(index);
        }
    }

    /// The same for a slot in use, that is not timed, whose list is empty.
    #[inline]
    pub fn release_empty(&mut self, index: u16) {
        if let Some(slot) = self.slots.get_mut(usize::from(index)) {
            slot.used = false;
            self.free.push(index);
        }
    }

    pub fn get(&mut self, index: u16) -> Option<&mut Slot> {
        self.slots.get_mut(usize::from(index)).filter(|s| s.used)
    }

    /// The tag under which a volume knows the command: owner, sequence, index.
    pub fn tag(&self, index: u16) -> u64 {
        let seq = self.slots.get(usize::from(index)).map_or(0, |s| s.seq);
        tag(self.owner, seq, index)
    }

    /// The slot of a tag, unless the tag is stale.
    pub fn of_tag(&self, tag: u64) -> Option<u16> {
        let index = tag as u16;
        let slot = self.slots.get(usize::from(index))?;
        (slot.used && slot.seq == (tag >> 16) as u16 && self.owner == (tag >> 48) as u16)
            .then_some(index)
    }

    /// The same, with what is in it.
    #[inline]
    pub fn tagged(&mut self, tag: u64) -> Option<(u16, &mut Slot)> {
        let (owner, index) = (self.owner, tag as u16);
        let slot = self.slots.get_mut(usize::from(index))?;
        let same = slot.used && slot.seq == (tag >> 16) as u16 && owner == (tag >> 48) as u16;
        same.then_some((index, slot))
    }

    pub fn find(&self, sqid: u16, cid: u16) -> Option<u16> {
        let same = |s: &Slot| s.used && !s.orphan && s.sqid == sqid && s.cid == cid;
        self.slots.iter().position(same).map(|i| i as u16)
    }

    /// Every command in flight loses its queue.
    pub fn orphan_all(&mut self) {
        for slot in &mut self.slots {
            slot.orphan |= slot.used;
        }
    }

    /// A command is in flight on the namespace of this index.
    pub fn any_of(&self, ns: usize) -> bool {
        self.slots.iter().any(|slot| slot.used && slot.ns == ns)
    }

    /// Tags and namespaces of the guest's commands in flight.
    pub fn guests_in_flight(&self) -> impl Iterator<Item = (u64, usize)> {
        let guests = |(i, s): (usize, &Slot)| {
            (s.used && !matches!(s.work, Work::OwnFlush)).then(|| (self.tag(i as u16), s.ns))
        };
        self.slots.iter().enumerate().filter_map(guests)
    }
}

fn tag(owner: u16, seq: u16, index: u16) -> u64 {
    u64::from(owner) << 48 | u64::from(seq) << 16 | u64::from(index)
}

/// The owner of a tag: the `id` that its controller was made with.
pub fn tag_owner(tag: u64) -> u16 {
    (tag >> 48) as u16
}
