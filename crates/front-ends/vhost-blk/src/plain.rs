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
use crate::log::DirtyLog;
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

/// Plain request, copied from guest memory.
#[derive(Clone, Copy, Debug, Default)]
struct PlainRequest {
    header_at: u64,
    data_at: u64,
    /// Second half of the data's descriptor: its length, and its flags.
    data: u64,
    status_at: u64,
    /// Start of the data on the volume in bytes, from the header.
    offset: u64,
    head: u16,
}

impl PlainRequest {
    /// Copies the chain at `head`, without its header. Returns `false` when it has other than the
    /// usual three buffers. With `indirect`, they may be in an indirect table.
    #[inline(always)]
    fn copy(
        &mut self,
        head: u16,
        ring: &RingEntries<'_>,
        indirect: bool,
        map: &DmaMap,
    ) -> Option<()> {
        let [header_at, high] = ring.descriptor(head)?;
        let chain: Chain = if equals(high, HEADER) {
            let data = ring.descriptor(next(high))?;
            (header_at, data, ring.descriptor(next(data[1]))?)
        } else if indirect && equals(high, TABLE) {
            read_table(header_at, map)?
        } else {
            return None;
        };
        let (header_at, [data_at, data], [status_at, status]) = chain;
        let is_plain =
            flags(data) & !flag::WRITE == flag::NEXT && data as u32 > 0 && equals(status, STATUS);
        if !is_plain {
            return None;
        }
        self.header_at = header_at;
        self.data_at = data_at;
        self.data = data;
        self.status_at = status_at;
        self.head = head;
        Some(())
    }

    /// Reads the header. Returns whether the request is a valid read or write of the data.
    #[inline(always)]
    fn read_header(&mut self, map: &DmaMap, limits: &RequestLimits) -> bool {
        let Some([[kind_and_priority, sector]]) = map.load_pairs64(self.header_at) else {
            return false;
        };
        let wanted = if self.is_read() { kind::IN } else { kind::OUT };
        if kind_and_priority as u32 != wanted {
            return false;
        }
        match limits.operation(self.op(limits), sector, self.len().into()) {
            Some(work) => {
                self.offset = work.offset;
                true
            }
            None => false,
        }
    }

    /// Returns the length of the data in bytes.
    #[inline(always)]
    fn len(&self) -> u32 {
        self.data as u32
    }

    /// Returns whether the device writes the data.
    #[inline(always)]
    fn is_read(&self) -> bool {
        self.data & half(0, flag::WRITE) != 0
    }

    #[inline(always)]
    fn op(&self, limits: &RequestLimits) -> Op {
        if self.is_read() {
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
            len: self.len().into(),
        }
    }

    /// Executes the request, if the volume completes it at once and the data lies in one piece of
    /// memory.
    #[inline(always)]
    fn execute(&self, map: &DmaMap, disk: &mut Disk) -> Option<Result<(), IoError>> {
        // Each direction has code of its own, in which operation and access are constants.
        if self.is_read() {
            self.transfer(Op::Read, Access::Write, map, disk)
        } else {
            let fua = disk.limits.fua;
            self.transfer(Op::Write { fua }, Access::Read, map, disk)
        }
    }

    #[inline(always)]
    fn transfer(
        &self,
        op: Op,
        access: Access,
        map: &DmaMap,
        disk: &mut Disk,
    ) -> Option<Result<(), IoError>> {
        let piece = map.piece(self.data_at, self.len().into(), access).ok()??;
        disk.try_now(op, self.offset, piece.view())
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
        self.count = 0;
        let wanted = usize::from(wanted).min(GROUP);
        let Some(requests) = self.requests.get_mut(..wanted) else {
            return;
        };
        let mut index = next;
        for request in requests {
            let copied = ring
                .available_head(index)
                .and_then(|head| request.copy(head, ring, indirect, map));
            if copied.is_none() {
                break;
            }
            // The header is mostly on the same line.
            map.prefetch_for_write(request.status_at);
            index = index.wrapping_add(1);
        }
        self.count = index.wrapping_sub(next).into();
    }

    /// Reads the headers. Returns the requests before the first with an invalid one.
    #[inline(always)]
    fn read_headers(&mut self, map: &DmaMap, limits: &RequestLimits) -> &[PlainRequest] {
        let requests = self.requests.get_mut(..self.count).unwrap_or_default();
        let mut valid = 0;
        for request in &mut *requests {
            if !request.read_header(map, limits) {
                break;
            }
            valid += 1;
        }
        requests.get(..valid).unwrap_or_default()
    }
}

/// Address of a request's header, and both halves of the descriptors of its data and its status.
type Chain = (u64, [u64; 2], [u64; 2]);

/// Copies an indirect table of three descriptors, which form a chain that begins with a header.
#[inline(always)]
fn read_table(at: u64, map: &DmaMap) -> Option<Chain> {
    let [[header_at, header], data, status] = map.load_pairs64(at)?;
    let is_chained = equals(header, HEADER) && (next(header), next(data[1])) == (1, 2);
    is_chained.then_some((header_at, data, status))
}

/// Second halves of the descriptors of a request's header, status, and indirect table.
const HEADER: u64 = half(16, flag::NEXT);
const STATUS: u64 = half(1, flag::WRITE);
const TABLE: u64 = half(3 * 16, flag::INDIRECT);

/// Returns whether the second half of a descriptor equals one of [`half`], with any `next`.
#[inline(always)]
fn equals(high: u64, half: u64) -> bool {
    high << 16 == half << 16
}

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

/// Counts a request, of which `bytes` bytes were transferred, before it is published: a reader that
/// sees it also finds it counted.
#[inline(always)]
fn count(stats: &QueueStats, is_read: bool, bytes: u32) {
    stats.requests.add(1);
    if is_read {
        stats.io.operations(IoKind::Read).add(1);
        stats.io.bytes_read().add(bytes.into());
    } else {
        stats.io.operations(IoKind::Write).add(1);
        stats.io.bytes_written().add(bytes.into());
    }
}

impl Run {
    /// Executes plain requests as [`Run::answer_plain`] does, and marks the pages that they write.
    #[inline(never)]
    pub(crate) fn answer_logged(
        &mut self,
        log: &DirtyLog,
        counts: (u16, u16),
        disk: &mut Disk,
        map: &DmaMap,
        stats: &QueueStats,
        budget: &mut Budget,
    ) -> u16 {
        let mark = |addr, len| log.mark(addr, len);
        self.answer_plain(counts, disk, map, stats, budget, mark)
    }

    /// Executes plain requests as [`Run::answer_plain`] does.
    #[inline(never)]
    pub(crate) fn answer(
        &mut self,
        counts: (u16, u16),
        disk: &mut Disk,
        map: &DmaMap,
        stats: &QueueStats,
        budget: &mut Budget,
    ) -> u16 {
        self.answer_plain(counts, disk, map, stats, budget, |_, _| ())
    }

    /// Executes up to `limit` of the waiting requests as long as they are plain, at once and in
    /// order. Publishes `together` used entries at a time. Returns the number of requests. The
    /// general path continues with any other request. `mark` is called with address and length of
    /// written guest memory, without the used ring.
    #[inline(always)]
    fn answer_plain(
        &mut self,
        (limit, together): (u16, u16),
        disk: &mut Disk,
        map: &DmaMap,
        stats: &QueueStats,
        budget: &mut Budget,
        mark: impl Fn(u64, u64),
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
        self.used.publish(&entries);
        let (first_index, mut last) = (self.next, 0);
        let granted = budget.left();
        let mut units_left = granted;
        let [first, second] = &mut *self.groups;
        let (mut group, mut upcoming) = (first, second);
        group.copy((self.next, limit), &entries, self.indirect, map);
        let begins_with_read = group.requests.first().is_some_and(PlainRequest::is_read);
        'groups: while group.count > 0 {
            let copied = group.count as u16;
            let next = self.next.wrapping_add(copied);
            let wanted = limit.saturating_sub(next.wrapping_sub(first_index));
            upcoming.copy((next, wanted), &entries, self.indirect, map);
            for ahead in GROUP as u16..wanted.min(2 * GROUP as u16) {
                entries.prefetch_chain(next.wrapping_add(ahead));
            }
            entries.prefetch_used(self.used.next());
            let mut requests = group.read_headers(map, &disk.limits).iter();
            let is_complete = requests.len() == usize::from(copied);
            while let Some(request) = requests.next() {
                if disk.prefetches()
                    && let Some(next) = requests.as_slice().first()
                {
                    disk.prefetch(&next.operation(&disk.limits));
                }
                let (status, bytes) = match request.execute(map, disk) {
                    Some(Ok(())) => (BlkStatus::Ok, request.len()),
                    Some(Err(error)) => {
                        let work = request.operation(&disk.limits);
                        match refused(work, error, disk, self.index, stats) {
                            Some(status) => (status, 0),
                            None => break 'groups,
                        }
                    }
                    None => break 'groups,
                };
                // The memory may be missing; then the guest does not wait for the status.
                let _ = map.store8(request.status_at, status as u8);
                crash::point!("vhost-blk.plain.answered");
                count(stats, request.is_read(), bytes);
                let read = if request.is_read() { bytes } else { 0 };
                mark(request.data_at, read.into());
                mark(request.status_at, 1);
                last = request.head;
                self.used
                    .post_unrecorded(&entries, last, read.wrapping_add(1));
                self.next = self.next.wrapping_add(1);
                if self.used.unpublished() >= together {
                    self.used.publish_unrecorded(&entries, last);
                }
                let units = 1 + request.len() / Budget::BYTES_PER_UNIT as u32;
                if units >= units_left {
                    units_left = 0;
                    break 'groups;
                }
                units_left -= units;
            }
            if !is_complete {
                break;
            }
            std::mem::swap(&mut group, &mut upcoming);
        }
        budget.spend(granted - units_left);
        let answered = self.next.wrapping_sub(first_index);
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
            self.used.publish_unrecorded(&entries, last);
        }
        answered
    }
}

/// Returns the status of a request that the volume has refused, which is then counted as failed;
/// `None` when the volume's error policy wants to repeat it.
#[cold]
#[inline(never)]
fn refused(
    work: VolumeOperation,
    error: IoError,
    disk: &Disk,
    queue: u16,
    stats: &QueueStats,
) -> Option<BlkStatus> {
    if disk.keeps_failed(&work, error) {
        return None;
    }
    let (status, failure) = failed(queue, work.op, error);
    stats.io.failed(failure);
    Some(status)
}
