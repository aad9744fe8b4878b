//! The short way: plain reads and writes, a batch at a time.
//!
//! What nearly every command is (Read or Write, PRPs, an existing namespace, a range within it, a volume that takes it)
//! passes through here with its queue, rings and counters looked up once for the batch. Everything else, errors
//! included, leaves the batch and takes the general way ([`super::io`]), which decides alone what a command's fate is:
//! this module only says "plain" or "not plain".

use super::complete::status_of;
use super::doorbells::{Doorbells, Which, trace_eventidx};
use super::namespace::Namespace;
use super::post::refresh_head;
use super::queue::Cq;
use super::slots::{Kind, Plain};
use super::{Engine, Event};
use dma::{Access, DmaMap, SegmentList};
use doorbell::distance;
use nvme::cmd::io::RwCdw12;
use nvme::{Command, Completion, NvmOpcode, Status};
use std::collections::VecDeque;
use volume::{Op, Request};

/// How many entries ahead of the one in hand are asked for: an entry comes from another core's cache, which takes as long
/// as several commands.
const PREFETCH: u32 = 6;

/// How a batch ended.
pub(super) enum Next {
    /// Nothing is left, or nothing can be fetched now.
    Idle,
    /// This command was fetched and takes the general way.
    General(Command),
    /// This command was fetched, and its volume refused it.
    Failed(Command, Status),
    /// This request was started, and is over already.
    Over(volume::Completion),
}

/// A read or write that was checked.
struct ReadWrite {
    ns: usize,
    op: Op,
    slba: u64,
    /// Bytes.
    offset: u64,
    /// Bytes.
    len: u64,
}

/// What does not change within a batch.
struct Rules<'a> {
    by_nsid: &'a [Option<u16>],
    max_transfer: u64,
    page_size: u64,
    write_cache: bool,
}

impl Rules<'_> {
    /// The command as a plain read or write with its data in `list`; none if it is anything else.
    #[inline(always)]
    fn plain<'n>(
        &self,
        command: &Command,
        namespaces: &'n mut [Namespace],
        dma: &DmaMap,
        list: &mut SegmentList,
    ) -> Option<(ReadWrite, &'n mut Namespace)> {
        // PRPs, and not fused.
        if command.flags.into_bits() != 0 {
            return None;
        }
        let cdw12 = RwCdw12::from_bits(command.cdw12.get());
        let (op, access) = match command.nvm_opcode() {
            NvmOpcode::READ => (Op::Read, Access::Write),
            NvmOpcode::WRITE => {
                let fua = cdw12.fua() || !self.write_cache;
                (Op::Write { fua }, Access::Read)
            }
            _ => return None,
        };
        let index = (*self.by_nsid.get(command.nsid.get() as usize)?)?;
        let ns = namespaces.get_mut(usize::from(index))?;
        let blocks = u64::from(cdw12.nlb());
        let slba = command.slba();
        let len = blocks << ns.shift;
        let outside = slba.checked_add(blocks).is_none_or(|end| end > ns.blocks);
        if outside || len > self.max_transfer || (ns.read_only && op.changes()) {
            return None;
        }
        list.begin(dma);
        let (prp1, prp2) = (command.prp1(), command.prp2());
        dma::prp::walk(dma, prp1, prp2, len, self.page_size, access, list).ok()?;
        let plain = ReadWrite {
            ns: usize::from(index),
            op,
            slba,
            offset: slba << ns.shift,
            len,
        };
        Some((plain, ns))
    }
}

/// What a batch adds to the counters.
#[derive(Default)]
struct Tally {
    reads: u64,
    writes: u64,
    bytes_read: u64,
    bytes_written: u64,
    posted: u32,
}

/// An index that may have gone over the end of its ring, by less than a turn.
#[inline(always)]
fn wrap(index: u32, size: u32) -> u32 {
    if index >= size { index - size } else { index }
}

/// Entries that may be posted to a completion queue now. EventIdx is moved so that the host, which cannot consume further
/// than that, need not ring.
#[inline(always)]
fn make_room(
    controller: u16,
    cq: &mut Cq,
    cqid: u16,
    doorbells: &Doorbells,
    events: &mut VecDeque<Event>,
) -> u32 {
    if cq.is_full() {
        refresh_head(cq, doorbells.cells(cqid, Which::CqHead), events, cqid);
    }
    let used = distance(cq.head, cq.tail, cq.size);
    let room = cq.size - 1 - used;
    // Up to the last entry that there is room for.
    let horizon = if cq.head == 0 { cq.size - 1 } else { cq.head - 1 };
    if room > 0
        && doorbells.shadowed()
        && cq.watch.needs_park(horizon)
        && let Some(cells) = doorbells.cells(cqid, Which::CqHead)
    {
        let before = cq.watch.state().eventidx;
        cq.watch.park_until(cells, horizon);
        trace_eventidx(controller, cqid, Which::CqHead, before, &cq.watch);
    }
    room
}

impl Engine {
    /// Fetches up to `limit` entries of an I/O queue and starts them, as long as they are plain. Returns how many were
    /// fetched, the one in [`Next`] included.
    pub(super) fn run(&mut self, qid: u16, limit: u32) -> (u32, Next) {
        let rules = Rules {
            by_nsid: &self.by_nsid,
            max_transfer: self.max_transfer,
            page_size: self.page_size,
            write_cache: self.write_cache,
        };
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(qid)) else {
            return (0, Next::Idle);
        };
        let cqid = sq.cqid;
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(cqid)) else {
            return (0, Next::Idle);
        };
        // A full completion queue stops its submission queues: so the backlog never grows beyond what is in flight.
        if !cq.backlog.is_empty() || !self.flushes.is_empty() {
            return (0, Next::Idle);
        }
        let Some(ring) = sq.memory.ring() else {
            return (0, Next::Idle);
        };
        // Commands that an Abort waits for have their names compared, over there.
        let general = !sq.abort_on_fetch.is_empty() || sq.deleting || cq.memory.ring().is_none();
        let pending = distance(sq.head, sq.tail, sq.size).min(limit);
        for ahead in 1..PREFETCH.min(pending) {
            ring.prefetch(wrap(sq.head + ahead, sq.size));
        }
        let (mut fetched, mut head) = (0, sq.head);
        // Completions that may be posted before the host's head is looked at again.
        let mut room = 0;
        let mut tally = Tally::default();
        let mut next = Next::Idle;
        while fetched < pending && self.slots.any_free() {
            if pending - fetched > PREFETCH {
                ring.prefetch(wrap(head + PREFETCH, sq.size));
            }
            // Read once; only the copy is looked at.
            let command: Command = zerocopy::transmute!(ring.load64(head));
            head = wrap(head + 1, sq.size);
            if room == 0 {
                room = make_room(self.id, cq, cqid, &self.doorbells, &mut self.events)
                    .min(pending - fetched);
            }
            fetched += 1;
            if general || room == 0 {
                next = Next::General(command);
                break;
            }
            let list = &mut self.list;
            let Some((plain, ns)) = rules.plain(&command, &mut self.namespaces, &self.dma, list)
            else {
                list.clear();
                next = Next::General(command);
                break;
            };
            let ReadWrite {
                op, offset, len, ..
            } = plain;
            match ns.queue.try_now(op, offset, len, list) {
                Some(Ok(())) => {
                    list.clear();
                    if op.changes() {
                        tally.writes += 1;
                        tally.bytes_written += len;
                    } else {
                        tally.reads += 1;
                        tally.bytes_read += len;
                    }
                    let mut entry = Completion {
                        sqhd: (head as u16).into(),
                        sqid: qid.into(),
                        cid: command.cid,
                        ..Default::default()
                    };
                    entry.set_status(Status::SUCCESS);
                    // There is room and memory: both were looked at above.
                    cq.push(entry);
                    room -= 1;
                    tally.posted += 1;
                }
                Some(Err(error)) => {
                    list.clear();
                    next = Next::Failed(command, status_of(error, op.changes()));
                    break;
                }
                None => {
                    let kind = if op.changes() { Kind::Write } else { Kind::Read };
                    let plain = Plain {
                        sqid: qid,
                        cid: command.cid.get(),
                        ns: plain.ns,
                        nsid: command.nsid.get(),
                        slba: plain.slba,
                        bytes: len,
                        kind,
                    };
                    let Some((tag, data)) = self.slots.alloc_plain(plain, list) else {
                        next = Next::General(command);
                        break;
                    };
                    if self.busy_since.is_none() {
                        self.busy_since = Some(self.now);
                    }
                    let request = Request {
                        tag,
                        op,
                        offset,
                        len,
                        data,
                    };
                    if let Some(over) = ns.queue.submit(request) {
                        next = Next::Over(over);
                        break;
                    }
                }
            }
        }
        sq.head = head;
        sq.outstanding += fetched - tally.posted;
        if tally.posted > 0 {
            if !std::mem::replace(&mut cq.dirty, true) {
                self.dirty.push(cqid);
            }
            if let Some(queue) = self.stats.queues.get(usize::from(qid)) {
                queue.completions.add(tally.posted.into());
            }
            self.stats.host_reads.add(tally.reads);
            self.stats.host_writes.add(tally.writes);
            self.stats.bytes_read.add(tally.bytes_read);
            self.stats.bytes_written.add(tally.bytes_written);
        }
        (fetched, next)
    }

    /// The general way of an I/O command that left a batch.
    pub(super) fn after_batch(&mut self, qid: u16, next: Next) -> bool {
        match next {
            Next::Idle => return false,
            Next::General(command) => self.general(qid, &command),
            Next::Failed(command, status) => {
                let (cid, nsid, lba) = (command.cid.get(), command.nsid.get(), command.slba());
                self.events.push_back(Event::Failed {
                    sqid: qid,
                    cid,
                    status,
                    nsid,
                    lba,
                });
                self.finish(qid, cid, status, 0);
            }
            Next::Over(completion) => self.complete(completion),
        }
        true
    }
}
