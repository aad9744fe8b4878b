//! Requests that describe, read and write regions.

use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::{MessageResult, Session, flag, split};
use crate::device::{Device, MmapArea, OperationOutcome, RegionInfo, RegionMmap};
use crate::wire::{self, MULTI_DATA, MULTI_ENTRIES};

/// Returns the result of a region write, which the device has completed or will complete later.
fn written(outcome: OperationOutcome, payload: &[u8], reply: &mut Vec<u8>) -> MessageResult {
    match outcome {
        OperationOutcome::Done => {
            reply.extend_from_slice(payload);
            MessageResult::Reply(None)
        }
        OperationOutcome::Pending => MessageResult::Deferred(payload.to_vec()),
    }
}

/// Returns the index of the region that a region information request names.
pub(crate) fn asked_region(message: &[u8]) -> Option<u32> {
    let (header, payload) = split::<wire::Header>(message).ok()?;
    if header.command != wire::Command::DEVICE_GET_REGION_INFO {
        return None;
    }
    let (request, _) = split::<wire::RegionInfo>(payload).ok()?;
    Some(request.index)
}

impl Session {
    /// Checks a region access against the negotiated limit and the size of the region.
    fn check_access(
        &self,
        device: &dyn Device,
        access: &wire::RegionAccess,
        write: bool,
    ) -> Result<usize, Errno> {
        let max = self.told.as_ref().map_or(0, |told| told.max_data_xfer_size);
        let count = u64::from(access.count);
        if count == 0 || count > max {
            return Err(Errno::INVAL);
        }
        let region = device.region(access.region).ok_or(Errno::INVAL)?;
        let end = access.offset.checked_add(count).ok_or(Errno::INVAL)?;
        let allowed = if write { region.write } else { region.read };
        if !allowed || end > region.size {
            return Err(Errno::INVAL);
        }
        usize::try_from(count).map_err(|_| Errno::INVAL)
    }

    pub(super) fn region_read(
        &self,
        payload: &[u8],
        device: &mut dyn Device,
        reply: &mut Vec<u8>,
    ) -> Result<(), Errno> {
        let (access, _) = split::<wire::RegionAccess>(payload)?;
        let count = self.check_access(device, &access, false)?;
        reply.extend_from_slice(access.as_bytes());
        let data_at = reply.len();
        reply.resize(data_at + count, 0);
        device.region_read(
            access.region,
            access.offset,
            reply.get_mut(data_at..).unwrap_or_default(),
        )
    }

    pub(super) fn region_write(
        &self,
        payload: &[u8],
        device: &mut dyn Device,
        reply: &mut Vec<u8>,
    ) -> Result<MessageResult, Errno> {
        let (access, data) = split::<wire::RegionAccess>(payload)?;
        let count = self.check_access(device, &access, true)?;
        if data.len() != count {
            return Err(Errno::INVAL);
        }
        let outcome = device.region_write(access.region, access.offset, data)?;
        Ok(written(outcome, access.as_bytes(), reply))
    }

    /// Handles the writes as if each had arrived separately: a refused write does not prevent the
    /// remaining ones, but its error is the reply's.
    pub(super) fn region_write_multi(
        &self,
        payload: &[u8],
        device: &mut dyn Device,
        reply: &mut Vec<u8>,
    ) -> Result<MessageResult, Errno> {
        let (count, entries) = split::<u64>(payload)?;
        let length = usize::try_from(count)
            .ok()
            // All entries are handled in one piece.
            .filter(|_| count <= MULTI_ENTRIES)
            .and_then(|count| count.checked_mul(size_of::<wire::MultiWrite>()))
            .ok_or(Errno::INVAL)?;
        let entries = entries.get(..length).ok_or(Errno::INVAL)?;
        let (mut outcome, mut refused) = (OperationOutcome::Done, None);
        for entry in entries.chunks_exact(size_of::<wire::MultiWrite>()) {
            match self.multi_write(entry, device) {
                Ok(OperationOutcome::Done) => {}
                Ok(OperationOutcome::Pending) => outcome = OperationOutcome::Pending,
                Err(errno) => refused = refused.or(Some(errno)),
            }
        }
        match refused {
            Some(errno) => Err(errno),
            None => Ok(written(outcome, count.as_bytes(), reply)),
        }
    }

    fn multi_write(
        &self,
        entry: &[u8],
        device: &mut dyn Device,
    ) -> Result<OperationOutcome, Errno> {
        let (entry, _) = split::<wire::MultiWrite>(entry)?;
        if entry.count as usize > MULTI_DATA {
            return Err(Errno::INVAL);
        }
        let access = wire::RegionAccess {
            offset: entry.offset,
            region: entry.region,
            count: entry.count,
        };
        let count = self.check_access(device, &access, true)?;
        let data = entry.data.get(..count).ok_or(Errno::INVAL)?;
        device.region_write(entry.region, entry.offset, data)
    }

    pub(super) fn region_info(
        &self,
        payload: &[u8],
        device: &mut dyn Device,
        reply: &mut Vec<u8>,
    ) -> Result<MessageResult, Errno> {
        // A known polling host sends as many bytes as the reply may have; bytes after the structure
        // are ignored.
        let (request, _) = split::<wire::RegionInfo>(payload)?;
        let head = size_of::<wire::RegionInfo>();
        if (request.argsz as usize) < head || request.index >= device.info().num_regions {
            return Err(Errno::INVAL);
        }
        // Clients ask for every index below num_regions and accept no error as an answer: a missing
        // region has size 0.
        let absent = RegionInfo {
            size: 0,
            read: false,
            write: false,
            mmap: None,
        };
        let region = device.region(request.index).unwrap_or(absent);
        let mut info = wire::RegionInfo {
            index: request.index,
            size: region.size,
            ..Default::default()
        };
        info.flags |=
            flag(region.read, wire::region::READ) | flag(region.write, wire::region::WRITE);
        let mmap: Option<RegionMmap<'_>> = region.mmap.filter(|_| self.theirs.max_msg_fds > 0);
        let mut needed = head;
        let mut areas: &[MmapArea] = &[];
        if let Some(mmap) = &mmap {
            info.flags |= wire::region::MMAP;
            info.offset = mmap.offset;
            areas = mmap.areas;
            if !areas.is_empty() {
                needed += size_of::<wire::CapHeader>() + size_of::<wire::SparseMmap>();
                needed += size_of_val(areas);
            }
        }
        info.argsz = u32::try_from(needed).map_err(|_| Errno::INVAL)?;
        let fits = needed <= request.argsz as usize;
        // The client repeats the request with the size returned here. Until then the capabilities
        // are not announced: QEMU refuses the flag without an offset.
        if fits && !areas.is_empty() {
            info.flags |= wire::region::CAPS;
            info.cap_offset = u32::try_from(head).map_err(|_| Errno::INVAL)?;
        }
        reply.extend_from_slice(info.as_bytes());
        if fits && !areas.is_empty() {
            let nr_areas = u32::try_from(areas.len()).map_err(|_| Errno::INVAL)?;
            let cap = wire::CapHeader {
                id: wire::CAP_SPARSE_MMAP,
                version: 1,
                next: 0,
            };
            reply.extend_from_slice(cap.as_bytes());
            reply.extend_from_slice(
                wire::SparseMmap {
                    nr_areas,
                    reserved: 0,
                }
                .as_bytes(),
            );
            for area in areas {
                reply.extend_from_slice(
                    wire::SparseArea {
                        offset: area.offset,
                        size: area.size,
                    }
                    .as_bytes(),
                );
            }
        }
        let fd = match mmap {
            Some(mmap) if fits => {
                let fd = mmap.fd.try_clone_to_owned();
                Some(fd.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::MFILE))?)
            }
            _ => None,
        };
        Ok(MessageResult::Reply(fd))
    }
}
