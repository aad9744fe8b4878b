//! Fast path: plain reads and writes on a volume that completes requests at once.
//!
//! Nearly every request is a read or write in three buffers: the header, data in one piece of guest
//! memory, and the status byte. This module executes such requests in groups, without a slot, a
//! segment list or a pin. Any other request, including every invalid one, takes the general path
//! ([`crate::run`]), which walks its chain anew and alone decides about its errors.
//!
//! Descriptors of a group are copied before the first request is executed, and the header of a
//! request before the one before it is executed: they come from the cache of another processor, and
//! the transfers overlap. Each is read once, and only the copy is examined.

use crate::disk::Disk;
use crate::request::{RequestLimits, VolumeOperation};
use crate::ring::{Descriptor, Ring, flag};
use crate::run::{Run, failed};
use crate::stats::QueueStats;
use crate::virtio::{BlkStatus, kind};
use dma::{Access, DmaMap};
use probes::IoKind;
use volume::{Budget, IoError, Op};

/// Maximum number of requests whose descriptors are copied before the first is executed.
const GROUP: usize = 8;
const HEADER_BYTES: u32 = 16;
/// Size in bytes of an indirect table of three descriptors.
const TABLE_BYTES: u32 = 48;

/// Copies of the descriptors of a chain of three buffers.
#[derive(Clone, Copy, Default)]
struct PlainChain {
    head: u16,
    /// Whether the device may write the data.
    writable: bool,
    len: u32,
    header_at: u64,
    data_at: u64,
    status_at: u64,
}

impl PlainChain {
    /// Reads the chain at `head`; `None` when it has other than the usual three buffers. With
    /// `indirect`, they may be in an indirect table.
    #[inline(always)]
    fn read(head: u16, ring: &Ring, indirect: bool, map: &DmaMap) -> Option<PlainChain> {
        let first = ring.descriptor(head)?;
        let [header, data, status] = if first.flags == flag::NEXT {
            let second = ring.descriptor(first.next)?;
            [first, second, ring.descriptor(second.next)?]
        } else if indirect && first.flags == flag::INDIRECT && first.len == TABLE_BYTES {
            let table = read_table(first.addr, map)?;
            let [header, data, _] = &table;
            if header.flags != flag::NEXT || (header.next, data.next) != (1, 2) {
                return None;
            }
            table
        } else {
            return None;
        };
        let usual = header.len == HEADER_BYTES
            && data.flags & !flag::WRITE == flag::NEXT
            && data.len > 0
            && status.flags == flag::WRITE
            && status.len == 1;
        usual.then_some(PlainChain {
            head,
            writable: data.flags & flag::WRITE != 0,
            len: data.len,
            header_at: header.addr,
            data_at: data.addr,
            status_at: status.addr,
        })
    }

    /// Reads the request's header. Returns the operation, if it is a valid read or write of the
    /// data.
    #[inline(always)]
    fn operation(&self, map: &DmaMap, limits: &RequestLimits) -> Option<VolumeOperation> {
        let [kind_and_priority, sector] = map.load_pair64(self.header_at)?;
        let op = match (kind_and_priority as u32, self.writable) {
            (kind::IN, true) => Op::Read,
            (kind::OUT, false) => Op::Write { fua: limits.fua },
            _ => return None,
        };
        limits.operation(op, sector, self.len.into())
    }

    /// Executes the operation, if the volume completes it at once and the data lies in one piece of
    /// memory.
    #[inline(always)]
    fn execute(
        &self,
        work: &VolumeOperation,
        map: &DmaMap,
        disk: &mut Disk,
    ) -> Option<Result<(), IoError>> {
        let access = if self.writable {
            Access::Write
        } else {
            Access::Read
        };
        let piece = map.piece(self.data_at, work.len, access).ok()??;
        disk.try_now(work, piece.view())
    }
}

/// Copies an indirect table of three descriptors.
fn read_table(at: u64, map: &DmaMap) -> Option<[Descriptor; 3]> {
    let entry = |index: u64| {
        let [low, high] = map.load_pair64(at.checked_add(index * 16)?)?;
        Some(Descriptor::from_words(low, high))
    };
    Some([entry(0)?, entry(1)?, entry(2)?])
}

/// Numbers that are added to the counters before the requests are published.
#[derive(Default)]
struct Tally {
    requests: u64,
    writes: u64,
    bytes_read: u64,
    bytes_written: u64,
}

impl Tally {
    /// Counts an answered request.
    #[inline(always)]
    fn count(&mut self, work: &VolumeOperation) {
        self.requests += 1;
        self.writes += u64::from(work.op.changes());
    }

    /// Counts the data of a request that has succeeded.
    #[inline(always)]
    fn count_bytes(&mut self, work: &VolumeOperation) {
        if work.op.changes() {
            self.bytes_written += work.len;
        } else {
            self.bytes_read += work.len;
        }
    }

    /// Adds the numbers to the counters, before the requests are published: a reader that sees one
    /// of them also finds it counted.
    #[inline(always)]
    fn add_to(&mut self, stats: &QueueStats) {
        let Tally {
            requests,
            writes,
            bytes_read,
            bytes_written,
        } = std::mem::take(self);
        stats.requests.add(requests);
        stats.io.operations(IoKind::Read).add(requests - writes);
        stats.io.operations(IoKind::Write).add(writes);
        stats.io.bytes_read().add(bytes_read);
        stats.io.bytes_written().add(bytes_written);
    }
}

/// Returns how many used entries to publish together, when `waiting` requests wait.
///
/// A client with few outstanding requests has nothing to do until it sees the first one end, so
/// each entry is published at once. A client with many works on while entries are collected, and
/// each publication costs both sides a transfer of a cache line.
fn entries_to_publish(waiting: u16) -> u16 {
    (waiting / 8).clamp(1, 16)
}

impl Run {
    /// Executes up to `limit` of `waiting` requests as long as they are plain, at once and in
    /// order. Returns their number. The general path continues with any other request.
    #[inline(never)]
    pub(crate) fn answer(
        &mut self,
        (limit, waiting): (u16, u16),
        disk: &mut Disk,
        map: &DmaMap,
        stats: &QueueStats,
        budget: &mut Budget,
    ) -> u16 {
        let Some(ring) = &self.ring else {
            return 0;
        };
        // The general path measures the latency of one request in many.
        let limit = u32::from(limit).min(self.until_timed) as u16;
        let together = entries_to_publish(waiting);
        let mut copies = [PlainChain::default(); GROUP];
        let mut tally = Tally::default();
        let mut answered = 0;
        'groups: while answered < limit {
            let wanted = (limit - answered).min(GROUP as u16);
            let mut count = 0;
            for chain in copies.iter_mut().take(wanted.into()) {
                let head = ring.available_head(self.next.wrapping_add(count));
                let Some(read) = PlainChain::read(head, ring, self.indirect, map) else {
                    break;
                };
                // The header is mostly on the same line.
                map.prefetch_for_write(read.status_at);
                *chain = read;
                count += 1;
            }
            ring.prefetch_used(self.used.next());
            let has_more = limit - answered > count;
            let mut chains = copies.iter().take(count.into()).peekable();
            let mut upcoming = chains
                .peek()
                .and_then(|chain| chain.operation(map, &disk.limits));
            while let Some(chain) = chains.next() {
                let Some(work) = upcoming.take() else {
                    break 'groups;
                };
                if let Some(next) = chains.peek() {
                    upcoming = next.operation(map, &disk.limits);
                    if let Some(next) = &upcoming {
                        disk.prefetch(next);
                    }
                }
                if has_more {
                    ring.prefetch_chain(self.next.wrapping_add(count));
                }
                let (status, written) = match chain.execute(&work, map, disk) {
                    Some(Ok(())) => {
                        tally.count_bytes(&work);
                        (BlkStatus::Ok, if chain.writable { chain.len } else { 0 })
                    }
                    Some(Err(error)) if !disk.keeps_failed(&work, error) => {
                        let (status, failure) = failed(self.index, work.op, error);
                        stats.io.failed(failure);
                        (status, 0)
                    }
                    _ => break 'groups,
                };
                // Until here, the next back-end fetches the request again after a death.
                self.next = self.next.wrapping_add(1);
                self.used.begin(chain.head);
                // The memory may be missing; then the guest does not wait for the status.
                let _ = map.store8(chain.status_at, status as u8);
                crash::point!("vhost-blk.plain.answered");
                self.used.post(ring, chain.head, written.saturating_add(1));
                tally.count(&work);
                answered += 1;
                if self.used.unpublished() >= together {
                    tally.add_to(stats);
                    self.used.publish(ring);
                }
                budget.spend(1 + Budget::units_of(work.len, 1));
                if budget.is_spent() {
                    break 'groups;
                }
            }
            if count < wanted {
                break;
            }
        }
        self.until_timed -= u32::from(answered);
        if answered > 0 {
            tally.add_to(stats);
            self.used.publish(ring);
        }
        answered
    }
}
