//! Fast path: plain reads and writes on a volume that completes requests at once.
//!
//! Nearly every request is a read or write in three buffers: the header, data in one piece of guest
//! memory, and the status byte. This module executes such requests in groups, without a slot, a
//! segment list or a pin. Any other request, including every invalid one, takes the general path
//! ([`crate::run`]), which walks its chain anew and alone decides about its errors.
//!
//! The descriptors and headers of a group are copied before its first request is executed, and the
//! descriptors of the next group too: they come from the cache of another processor, and the
//! transfers overlap. Each is read once, and only the copy is examined.
//!
//! The requests are not recorded as outstanding (inflight tracking). Their used entries are
//! published before any other request is fetched, so the next back-end fetches them again if this
//! process dies before that.

use crate::disk::Disk;
use crate::request::{RequestLimits, VolumeOperation};
use crate::ring::{RingEntries, flag};
use crate::run::{Run, failed};
use crate::stats::QueueStats;
use crate::virtio::{BlkStatus, kind};
use dma::{Access, DmaMap};
use probes::{IoKind, TIMED_EVERY, cycles};
use volume::{Budget, IoError, Op};

/// Maximum number of requests that are copied together.
const GROUP: usize = 8;
const HEADER_BYTES: u32 = 16;
/// Size in bytes of an indirect table of three descriptors.
const TABLE_BYTES: u32 = 48;

/// Plain request, copied from guest memory.
#[derive(Clone, Copy, Debug, Default)]
struct PlainRequest {
    header_at: u64,
    data_at: u64,
    status_at: u64,
    /// Start of the data on the volume in bytes, from the header.
    offset: u64,
    len: u32,
    head: u16,
    /// Whether the device writes the data: the request is a read.
    is_read: bool,
}

impl PlainRequest {
    /// Reads the chain at `head`; `None` when it has other than the usual three buffers. With
    /// `indirect`, they may be in an indirect table.
    #[inline(always)]
    fn of_chain(
        head: u16,
        ring: &RingEntries<'_>,
        indirect: bool,
        map: &DmaMap,
    ) -> Option<PlainRequest> {
        let first = ring.descriptor(head)?;
        let [_, high] = first;
        let [header, data, status] = if flags(high) == flag::NEXT {
            let second = ring.descriptor(next(high))?;
            let [_, high] = second;
            [first, second, ring.descriptor(next(high))?]
        } else if indirect && high & !NEXT == half(TABLE_BYTES, flag::INDIRECT) {
            read_table(first, map)?
        } else {
            return None;
        };
        let ([header_at, header], [data_at, data]) = (header, data);
        let [status_at, status] = status;
        let usual = header & !NEXT == half(HEADER_BYTES, flag::NEXT)
            && flags(data) & !flag::WRITE == flag::NEXT
            && data as u32 > 0
            && status & !NEXT == half(1, flag::WRITE);
        usual.then_some(PlainRequest {
            header_at,
            data_at,
            status_at,
            offset: 0,
            len: data as u32,
            head,
            is_read: flags(data) & flag::WRITE != 0,
        })
    }

    /// Reads the header. Returns whether the request is a valid read or write of the data.
    #[inline(always)]
    fn read_header(&mut self, map: &DmaMap, limits: &RequestLimits) -> bool {
        let Some([kind_and_priority, sector]) = map.load_pair64(self.header_at) else {
            return false;
        };
        let wanted = if self.is_read { kind::IN } else { kind::OUT };
        if kind_and_priority as u32 != wanted {
            return false;
        }
        match limits.operation(self.op(limits), sector, self.len.into()) {
            Some(work) => {
                self.offset = work.offset;
                true
            }
            None => false,
        }
    }

    #[inline(always)]
    fn op(&self, limits: &RequestLimits) -> Op {
        if self.is_read {
            Op::Read
        } else {
            Op::Write { fua: limits.fua }
        }
    }

    #[inline(always)]
    fn operation(&self, limits: &RequestLimits) -> VolumeOperation {
        VolumeOperation {
            op: self.op(limits),
            offset: self.offset,
            len: self.len.into(),
        }
    }

    /// Executes the request, if the volume completes it at once and the data lies in one piece of
    /// memory.
    #[inline(always)]
    fn execute(&self, map: &DmaMap, disk: &mut Disk) -> Option<Result<(), IoError>> {
        let access = if self.is_read {
            Access::Write
        } else {
            Access::Read
        };
        let piece = map.piece(self.data_at, self.len.into(), access).ok()??;
        disk.try_now(&self.operation(&disk.limits), piece.view())
    }
}

/// Plain requests that were copied together, in the order of the available ring.
#[derive(Debug, Default)]
pub(crate) struct Group {
    requests: [PlainRequest; GROUP],
    count: usize,
}

impl Group {
    /// Copies the descriptors of up to `wanted` requests from index `next` of the available ring
    /// on, as long as they are plain.
    #[inline]
    fn copy(
        &mut self,
        (next, wanted): (u16, u16),
        ring: &RingEntries<'_>,
        indirect: bool,
        map: &DmaMap,
    ) {
        let mut count: u16 = 0;
        for request in &mut self.requests {
            if count == wanted {
                break;
            }
            let Some(head) = ring.available_head(next.wrapping_add(count)) else {
                break;
            };
            let Some(copy) = PlainRequest::of_chain(head, ring, indirect, map) else {
                break;
            };
            // The header is mostly on the same line.
            map.prefetch_for_write(copy.status_at);
            *request = copy;
            count += 1;
        }
        self.count = count.into();
    }

    /// Reads the headers. Returns the requests before the first with an invalid one.
    #[inline(always)]
    fn read_headers(&mut self, map: &DmaMap, limits: &RequestLimits) -> &[PlainRequest] {
        let mut valid = 0;
        for request in self.requests.iter_mut().take(self.count) {
            if !request.read_header(map, limits) {
                break;
            }
            valid += 1;
        }
        self.requests.get(..valid).unwrap_or_default()
    }
}

/// Copies an indirect table of three descriptors, which form a chain.
fn read_table([at, _]: [u64; 2], map: &DmaMap) -> Option<[[u64; 2]; 3]> {
    let entry = |index: u64| map.load_pair64(at.checked_add(index * 16)?);
    let table = [entry(0)?, entry(1)?, entry(2)?];
    let [[_, header], [_, data], _] = table;
    let chained = flags(header) == flag::NEXT && (next(header), next(data)) == (1, 2);
    chained.then_some(table)
}

/// Field `next` in the second half of a descriptor, of which [`half`] is the rest.
const NEXT: u64 = 0xffff << 48;

/// Returns the second half of a descriptor with this length and these flags, without `next`.
const fn half(len: u32, flags: u16) -> u64 {
    len as u64 | (flags as u64) << 32
}

#[inline(always)]
fn flags(high: u64) -> u16 {
    (high >> 32) as u16
}

#[inline(always)]
fn next(high: u64) -> u16 {
    (high >> 48) as u16
}

/// Numbers that are added to the counters before the requests are published.
#[derive(Default)]
struct Tally {
    reads: u64,
    bytes: u64,
    bytes_read: u64,
}

impl Tally {
    /// Counts an answered request, of which `bytes` bytes were transferred, `read` of them to the
    /// guest.
    #[inline(always)]
    fn count(&mut self, is_read: bool, bytes: u32, read: u32) {
        self.reads += u64::from(is_read);
        self.bytes += u64::from(bytes);
        self.bytes_read += u64::from(read);
    }

    /// Adds the numbers to the counters, before the requests are published: a reader that sees one
    /// of them also finds it counted.
    #[inline(always)]
    fn add_to(&mut self, stats: &QueueStats, requests: u16) {
        let requests = u64::from(requests);
        let Tally {
            reads,
            bytes,
            bytes_read,
        } = std::mem::take(self);
        stats.requests.add(requests);
        stats.io.operations(IoKind::Read).add(reads);
        stats.io.operations(IoKind::Write).add(requests - reads);
        stats.io.bytes_read().add(bytes_read);
        stats.io.bytes_written().add(bytes - bytes_read);
    }
}

impl Run {
    /// Executes up to `limit` of the waiting requests as long as they are plain, at once and in
    /// order. Publishes `together` used entries at a time. Returns the number of requests. The
    /// general path continues with any other request.
    #[inline(never)]
    pub(crate) fn answer(
        &mut self,
        (limit, together): (u16, u16),
        disk: &mut Disk,
        map: &DmaMap,
        stats: &QueueStats,
        budget: &mut Budget,
    ) -> u16 {
        let Some(ring) = &self.ring else {
            return 0;
        };
        let Some(entries) = ring.entries() else {
            return 0;
        };
        // The latency of one request in many is measured, alone.
        let timed_at = (self.until_timed == 0).then(cycles);
        let limit = u32::from(limit).min(self.until_timed.max(1));
        let limit = limit.min(budget.left()) as u16;
        // Requests of the general path are recorded as outstanding, and make a batch of their own.
        self.used.publish(ring);
        let mut tally = Tally::default();
        let (mut answered, mut last) = (0, 0);
        let (granted, mut units) = (budget.left(), 0);
        let [first, second] = &mut *self.groups;
        let (mut group, mut upcoming) = (first, second);
        group.copy((self.next, limit), &entries, self.indirect, map);
        let begins_with_read = group.requests.first().is_some_and(|first| first.is_read);
        'groups: while group.count > 0 {
            let count = group.count as u16;
            // A copy has at most as many requests as are wanted.
            let wanted = limit.saturating_sub(answered + count);
            let next = self.next.wrapping_add(count);
            upcoming.copy((next, wanted), &entries, self.indirect, map);
            let copied = count + upcoming.count as u16;
            let has_more = wanted > upcoming.count as u16;
            entries.prefetch_used(self.used.next());
            let mut requests = group.read_headers(map, &disk.limits);
            let is_complete = requests.len() == usize::from(count);
            while let Some((request, rest)) = requests.split_first() {
                requests = rest;
                if disk.prefetches()
                    && let Some(next) = rest.first()
                {
                    disk.prefetch(&next.operation(&disk.limits));
                }
                if has_more {
                    entries.prefetch_chain(self.next.wrapping_add(copied));
                }
                let (status, bytes) = match request.execute(map, disk) {
                    Some(Ok(())) => (BlkStatus::Ok, request.len),
                    Some(Err(error)) => {
                        let work = request.operation(&disk.limits);
                        if disk.keeps_failed(&work, error) {
                            break 'groups;
                        }
                        let (status, failure) = failed(self.index, work.op, error);
                        stats.io.failed(failure);
                        (status, 0)
                    }
                    None => break 'groups,
                };
                // The memory may be missing; then the guest does not wait for the status.
                let _ = map.store8(request.status_at, status as u8);
                crash::point!("vhost-blk.plain.answered");
                let read = if request.is_read { bytes } else { 0 };
                last = request.head;
                self.used
                    .post_unrecorded(&entries, last, read.wrapping_add(1));
                self.next = self.next.wrapping_add(1);
                tally.count(request.is_read, bytes, read);
                answered += 1;
                if self.used.unpublished() >= together {
                    tally.add_to(stats, self.used.unpublished());
                    self.used.publish_unrecorded(ring, last);
                }
                // At most 64 requests of 32-bit lengths: the sum is small.
                units += 1 + request.len / Budget::BYTES_PER_UNIT as u32;
                if units >= granted {
                    break 'groups;
                }
            }
            if !is_complete {
                break;
            }
            std::mem::swap(&mut group, &mut upcoming);
        }
        budget.spend(units);
        if answered > 0 {
            if let Some(at) = timed_at {
                let kind = if begins_with_read {
                    IoKind::Read
                } else {
                    IoKind::Write
                };
                self.until_timed = TIMED_EVERY;
                stats.io.depth_seen(self.in_flight() as u64 + 1);
                stats.io.timed(kind, cycles().saturating_sub(at));
            }
            self.until_timed -= u32::from(answered);
            tally.add_to(stats, self.used.unpublished());
            self.used.publish_unrecorded(ring, last);
        }
        answered
    }
}
