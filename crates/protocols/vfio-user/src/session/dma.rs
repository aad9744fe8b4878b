//! Map and unmap requests for client memory.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::{MessageResult, split, without_payload};
use crate::device::{Device, DmaMapping, DmaUnmapping, OperationOutcome, Unmapped};
use crate::journal::Journal;
use crate::wire;

pub(super) fn dma_map(
    payload: &[u8],
    mut fds: Vec<OwnedFd>,
    device: &mut dyn Device,
    again: bool,
) -> Result<MessageResult, Errno> {
    let (request, _) = split::<wire::DmaMap>(payload)?;
    let access = request.flags & (wire::dma::READ | wire::dma::WRITE);
    if (request.argsz as usize) < size_of::<wire::DmaMap>()
        || access != request.flags
        || access == 0
        || fds.len() > 1
        || !is_range(request.address, request.size)
    {
        return Err(Errno::INVAL);
    }
    // File offsets are signed.
    let file_end = request
        .offset
        .checked_add(request.size)
        .ok_or(Errno::INVAL)?;
    if i64::try_from(file_end).is_err() {
        return Err(Errno::INVAL);
    }
    let map = DmaMapping {
        iova: request.address,
        size: request.size,
        offset: request.offset,
        read: access & wire::dma::READ != 0,
        write: access & wire::dma::WRITE != 0,
    };
    let outcome = if again {
        device.dma_map_again(map, fds.pop())
    } else {
        device.dma_map(map, fds.pop())
    };
    outcome.map(without_payload)
}

pub(super) fn dma_unmap(
    payload: &[u8],
    device: &mut dyn Device,
    reply: &mut Vec<u8>,
    (journal, again): (Option<&Journal>, bool),
) -> Result<MessageResult, Errno> {
    let (request, _) = split::<wire::DmaUnmap>(payload)?;
    if (request.argsz as usize) < size_of::<wire::DmaUnmap>() {
        return Err(Errno::INVAL);
    }
    let unmap = match request.flags {
        0 if is_range(request.address, request.size) => DmaUnmapping::Range {
            iova: request.address,
            size: request.size,
        },
        wire::dma::UNMAP_ALL if request.address == 0 && request.size == 0 => DmaUnmapping::All,
        // The bitmap of dirty pages is not offered. The kernel, too, refuses it with EINVAL while
        // no pages are tracked.
        _ => return Err(Errno::INVAL),
    };
    // A repeated request may find less memory mapped.
    let before = match journal {
        Some(journal) => match journal.noted_hint().filter(|_| again) {
            Some(size) => Some(size),
            None => {
                let size = device.dma_mapped(unmap)?;
                journal.hint(size);
                crash::point!("vfio-user.unmap.noted");
                Some(size)
            }
        },
        None => None,
    };
    let Unmapped { size, outcome } = device.dma_unmap(unmap)?;
    let size = before.unwrap_or(size);
    // The reply repeats the request, which according to the specification names exactly one
    // mapping. Unspecified cases follow VFIO_IOMMU_UNMAP_DMA (type1 v2), on which QEMU's callers
    // rely: the size is the amount that was mapped there.
    let answer = wire::DmaUnmap { size, ..request };
    Ok(match outcome {
        OperationOutcome::Done => {
            reply.extend_from_slice(answer.as_bytes());
            MessageResult::Reply(None)
        }
        OperationOutcome::Pending => MessageResult::Deferred(answer.as_bytes().to_vec()),
    })
}

/// Returns whether an address range is not empty and does not wrap around.
fn is_range(start: u64, size: u64) -> bool {
    size.checked_sub(1)
        .is_some_and(|last| start.checked_add(last).is_some())
}
