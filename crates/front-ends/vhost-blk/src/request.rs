//! Parser of block requests from the buffers of a chain (virtio 1.2, 5.2.6). The header is copied
//! once and only the copy is examined. Drivers may cut the header, the data and the status byte
//! into buffers as they like (2.7.4).

use crate::chain::Buffer;
use crate::virtio::{BlkStatus, FLAG_UNMAP, ID_BYTES, MAX_RANGES, SECTOR, kind};
use dma::{Access, DmaMap, SegmentList};
use std::collections::VecDeque;
use volume::Op;

const HEADER_BYTES: usize = 16;
const RANGE_BYTES: usize = 16;

/// Limits against which requests of the guest are checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestLimits {
    /// Logical block size in bytes, of which ranges have to be multiples.
    pub(crate) block_size: u32,
    /// Maximum number of data bytes of a request.
    pub(crate) max_transfer: u64,
    /// Whether every write has to be durable on completion, because the write cache is off.
    pub(crate) fua: bool,
    /// Whether the driver may use discard requests.
    pub(crate) discard: bool,
    /// Whether the driver may use write-zeroes requests.
    pub(crate) write_zeroes: bool,
}

impl RequestLimits {
    /// Returns the operation on `len` bytes at a sector, if it covers whole blocks and is not too
    /// long.
    #[inline(always)]
    pub(crate) fn operation(&self, op: Op, sector: u64, len: u64) -> Option<VolumeOperation> {
        let offset = sector.checked_mul(SECTOR)?;
        let mask = u64::from(self.block_size).max(SECTOR) - 1;
        let is_long = op.has_data() && len > self.max_transfer;
        if (offset | len) & mask != 0 || is_long {
            return None;
        }
        Some(VolumeOperation { op, offset, len })
    }
}

/// Operation on a byte range of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VolumeOperation {
    pub(crate) op: Op,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// Action that a parsed request requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Operation at the volume; its data was gathered from the chain's buffers.
    Work(VolumeOperation),
    /// Write the serial number to the gathered buffers (GET_ID).
    Id,
    /// Discard or zero the gathered ranges, one after the other; at least one.
    Ranges,
    /// End the request with this status, without an operation.
    End(BlkStatus),
}

/// Parsed request with a place for its status byte, so that it can be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parsed {
    pub(crate) action: Action,
    /// Guest-physical address of the request's status byte.
    pub(crate) status_at: u64,
    /// Number of bytes that the device may write before the status byte.
    pub(crate) writable: u64,
}

/// Error for a descriptor chain without room for a status byte, which cannot be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoStatus;

/// Parses a chain. `data` receives the memory of reads, writes and GET_ID; `ranges` the ranges to
/// be discarded or zeroed. The caller has emptied both.
pub(crate) fn parse(
    buffers: &[Buffer],
    map: &DmaMap,
    limits: &RequestLimits,
    data: &mut SegmentList,
    ranges: &mut VecDeque<VolumeOperation>,
) -> Result<Parsed, NoStatus> {
    let status = buffers
        .last()
        .filter(|last| last.writable)
        .ok_or(NoStatus)?;
    // Empty buffers were left out.
    let status_at = status
        .addr
        .checked_add(u64::from(status.len).saturating_sub(1))
        .ok_or(NoStatus)?;
    let total = |writable: bool| -> u64 {
        let of = buffers.iter().filter(|b| b.writable == writable);
        of.map(|b| u64::from(b.len)).sum()
    };
    let chain = Chain {
        buffers,
        map,
        limits,
        // Neither sum overflows, because a chain is bounded. Header and status byte are not data.
        out_len: total(false),
        in_len: total(true).saturating_sub(1),
    };
    let action = chain.action(data, ranges).unwrap_or_else(|status| {
        data.clear();
        ranges.clear();
        Action::End(status)
    });
    Ok(Parsed {
        action,
        status_at,
        writable: chain.in_len,
    })
}

struct Chain<'a> {
    buffers: &'a [Buffer],
    map: &'a DmaMap,
    limits: &'a RequestLimits,
    /// Number of bytes that the driver provides, including the request header.
    out_len: u64,
    /// Number of bytes that the driver requests, without the status byte.
    in_len: u64,
}

impl Chain<'_> {
    fn action(
        &self,
        data: &mut SegmentList,
        ranges: &mut VecDeque<VolumeOperation>,
    ) -> Result<Action, BlkStatus> {
        let mut header = [0; HEADER_BYTES];
        self.copy_out(0, &mut header)?;
        let (kind, sector) = split_header(header);
        let out_data = self.out_len - HEADER_BYTES as u64;
        match kind {
            kind::IN => {
                let work = self.work(Op::Read, sector, self.in_len)?;
                self.gather(true, 0, self.in_len, data)?;
                Ok(Action::Work(work))
            }
            kind::OUT => {
                let fua = self.limits.fua;
                let work = self.work(Op::Write { fua }, sector, out_data)?;
                self.gather(false, HEADER_BYTES as u64, out_data, data)?;
                Ok(Action::Work(work))
            }
            kind::FLUSH => Ok(Action::Work(VolumeOperation {
                op: Op::Flush,
                offset: 0,
                len: 0,
            })),
            kind::GET_ID => {
                let len = self.in_len.min(ID_BYTES as u64);
                self.gather(true, 0, len, data)?;
                Ok(Action::Id)
            }
            kind::DISCARD if self.limits.discard => self.ranges(kind, out_data, ranges),
            kind::WRITE_ZEROES if self.limits.write_zeroes => self.ranges(kind, out_data, ranges),
            _ => Err(BlkStatus::Unsupported),
        }
    }

    /// Parses the segments of a discard or write-zeroes request, and checks all of them before the
    /// first is begun.
    fn ranges(
        &self,
        kind: u32,
        len: u64,
        ranges: &mut VecDeque<VolumeOperation>,
    ) -> Result<Action, BlkStatus> {
        let count = len / RANGE_BYTES as u64;
        if !len.is_multiple_of(RANGE_BYTES as u64) || count == 0 || count > u64::from(MAX_RANGES) {
            return Err(BlkStatus::IoErr);
        }
        let mut bytes = [0; RANGE_BYTES * MAX_RANGES as usize];
        let bytes = bytes.get_mut(..len as usize).ok_or(BlkStatus::IoErr)?;
        self.copy_out(HEADER_BYTES as u64, bytes)?;
        for range in bytes.chunks_exact(RANGE_BYTES) {
            let (sector, sectors, flags) = split_range(range);
            let op = match (kind, flags) {
                (kind::DISCARD, 0) => Op::Deallocate,
                (kind::WRITE_ZEROES, 0 | FLAG_UNMAP) => Op::WriteZeroes {
                    deallocate: flags & FLAG_UNMAP != 0,
                    fua: self.limits.fua,
                },
                // "The device MUST set the status byte to VIRTIO_BLK_S_UNSUPP" (5.2.6.2).
                _ => return Err(BlkStatus::Unsupported),
            };
            ranges.push_back(self.work(op, sector, u64::from(sectors) * SECTOR)?);
        }
        Ok(Action::Ranges)
    }

    fn work(&self, op: Op, sector: u64, len: u64) -> Result<VolumeOperation, BlkStatus> {
        let operation = self.limits.operation(op, sector, len);
        operation.ok_or(BlkStatus::IoErr)
    }

    /// Copies bytes that the driver provides, from byte `skip` on, to `out`.
    fn copy_out(&self, skip: u64, out: &mut [u8]) -> Result<(), BlkStatus> {
        if self.out_len < skip.saturating_add(out.len() as u64) {
            return Err(BlkStatus::IoErr);
        }
        let mut rest = out;
        self.pieces(false, skip, rest.len() as u64, |addr, len| {
            let (piece, after) = std::mem::take(&mut rest).split_at_mut(len as usize);
            rest = after;
            self.map.read(addr, piece)
        })
    }

    /// Collects the memory segments of the buffers in one direction.
    fn gather(
        &self,
        writable: bool,
        skip: u64,
        len: u64,
        list: &mut SegmentList,
    ) -> Result<(), BlkStatus> {
        let access = if writable {
            Access::Write
        } else {
            Access::Read
        };
        self.pieces(writable, skip, len, |addr, len| {
            self.map.segments(addr, len, access, list)
        })
    }

    /// Calls `each` with every piece of the buffers in one direction, from byte `skip` on.
    fn pieces(
        &self,
        writable: bool,
        mut skip: u64,
        mut len: u64,
        mut each: impl FnMut(u64, u64) -> Result<(), dma::DmaError>,
    ) -> Result<(), BlkStatus> {
        for buffer in self.buffers.iter().filter(|b| b.writable == writable) {
            let size = u64::from(buffer.len);
            let start = skip.min(size);
            skip -= start;
            let take = (size - start).min(len);
            if take == 0 {
                continue;
            }
            let addr = buffer.addr.checked_add(start).ok_or(BlkStatus::IoErr)?;
            each(addr, take).map_err(|_| BlkStatus::IoErr)?;
            len -= take;
        }
        if len == 0 {
            Ok(())
        } else {
            Err(BlkStatus::IoErr)
        }
    }
}

/// Returns the type and the sector in a request header (`struct virtio_blk_req`).
fn split_header(header: [u8; HEADER_BYTES]) -> (u32, u64) {
    let value = u128::from_le_bytes(header);
    (value as u32, (value >> 64) as u64)
}

/// Returns sector, number of sectors and flags of a range (`struct
/// virtio_blk_discard_write_zeroes`).
fn split_range(range: &[u8]) -> (u64, u32, u32) {
    let mut bytes = [0; RANGE_BYTES];
    bytes.copy_from_slice(range);
    let value = u128::from_le_bytes(bytes);
    (value as u64, (value >> 64) as u32, (value >> 96) as u32)
}
