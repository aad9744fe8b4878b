//! Region calls of the client.

use std::os::fd::OwnedFd;

use zerocopy::{FromBytes, IntoBytes};

use super::{Client, ClientError};
use crate::device::MmapArea;
use crate::wire::{self, Command, flags};

/// Maximum size in bytes of the reply to a region information request.
const MAX_REGION_INFO: u32 = 64 << 10;

/// Region of the device, as the server describes it.
#[derive(Debug)]
pub struct Region {
    /// Size of the region in bytes; 0 for a region that does not exist.
    pub size: u64,
    /// Whether the region can be read.
    pub read: bool,
    /// Whether the region can be written.
    pub write: bool,
    /// File and areas by which the region can be mapped, if it can be.
    pub mmap: Option<Mapping>,
}

/// File and areas by which a client can map a region.
#[derive(Debug)]
pub struct Mapping {
    /// File to map.
    pub fd: OwnedFd,
    /// Byte offset in the file of the region's first byte.
    pub offset: u64,
    /// Areas of the region that can be mapped; an empty list stands for the whole region.
    pub areas: Vec<MmapArea>,
}

impl Client {
    /// Requests the size, flags and mapping of region `index`.
    pub fn region_info(&mut self, index: u32) -> Result<Region, ClientError> {
        let head = size_of::<wire::RegionInfo>() as u32;
        let (mut info, mut fds) = self.ask_region_info(index, head)?;
        if info.argsz > head {
            if info.argsz > MAX_REGION_INFO {
                return Err(self.malformed("region information size"));
            }
            (info, fds) = self.ask_region_info(index, info.argsz)?;
        }
        let mut mmap = None;
        if info.flags & wire::region::MMAP != 0 && info.size > 0 {
            let mut fds = fds.into_iter();
            let (Some(fd), None) = (fds.next(), fds.next()) else {
                return Err(self.malformed("number of descriptors of a mappable region"));
            };
            let Some(areas) = sparse_areas(&self.reply, &info) else {
                return Err(self.malformed("region capabilities"));
            };
            mmap = Some(Mapping {
                fd,
                offset: info.offset,
                areas,
            });
        } else {
            self.no_fds(&fds)?;
        }
        Ok(Region {
            size: info.size,
            read: info.flags & wire::region::READ != 0,
            write: info.flags & wire::region::WRITE != 0,
            mmap,
        })
    }

    fn ask_region_info(
        &mut self,
        index: u32,
        argsz: u32,
    ) -> Result<(wire::RegionInfo, Vec<OwnedFd>), ClientError> {
        let request = wire::RegionInfo {
            argsz,
            index,
            ..Default::default()
        };
        let fds = self.call(Command::DEVICE_GET_REGION_INFO, &[request.as_bytes()], &[])?;
        let (info, _) = self.parse::<wire::RegionInfo>("region information")?;
        if info.index != index {
            return Err(self.malformed("region index"));
        }
        Ok((info, fds))
    }

    /// Reads `data` from a region (`VFIO_USER_REGION_READ`).
    pub fn region_read(
        &mut self,
        region: u32,
        offset: u64,
        data: &mut [u8],
    ) -> Result<(), ClientError> {
        let access = self.access(region, offset, data.len())?;
        let fds = self.call(Command::REGION_READ, &[access.as_bytes()], &[])?;
        self.no_fds(&fds)?;
        let (reply, read) = self.parse::<wire::RegionAccess>("region read")?;
        if reply != access || read.len() != data.len() {
            return Err(self.malformed("region read"));
        }
        data.copy_from_slice(read);
        Ok(())
    }

    /// Writes to a region (`VFIO_USER_REGION_WRITE`), and waits for the reply.
    pub fn region_write(
        &mut self,
        region: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<(), ClientError> {
        let access = self.access(region, offset, data.len())?;
        let fds = self.call(Command::REGION_WRITE, &[access.as_bytes(), data], &[])?;
        self.no_fds(&fds)
    }

    /// Writes to a region without waiting for completion or errors.
    pub fn region_write_posted(
        &mut self,
        region: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<(), ClientError> {
        let access = self.access(region, offset, data.len())?;
        self.send(
            Command::REGION_WRITE,
            flags::NO_REPLY,
            &[access.as_bytes(), data],
            &[],
        )?;
        Ok(())
    }

    fn access(
        &self,
        region: u32,
        offset: u64,
        count: usize,
    ) -> Result<wire::RegionAccess, ClientError> {
        let limit = self.server.max_data_xfer_size;
        match u32::try_from(count) {
            Ok(narrow) if u64::from(narrow) <= limit => Ok(wire::RegionAccess {
                offset,
                region,
                count: narrow,
            }),
            _ => Err(ClientError::TooLong { count, limit }),
        }
    }
}

/// Parses the mappable areas in the capabilities of a reply; `None` if they are malformed.
fn sparse_areas(reply: &[u8], info: &wire::RegionInfo) -> Option<Vec<MmapArea>> {
    let mut areas = Vec::new();
    if info.flags & wire::region::CAPS == 0 {
        return Some(areas);
    }
    let mut at = info.cap_offset as usize;
    // Offsets of capabilities must ascend, so that the list ends.
    let mut lowest = size_of::<wire::RegionInfo>();
    while at != 0 {
        if at < lowest {
            return None;
        }
        let (cap, rest) = wire::CapHeader::read_from_prefix(reply.get(at..)?).ok()?;
        if cap.id == wire::CAP_SPARSE_MMAP {
            let (sparse, mut rest) = wire::SparseMmap::read_from_prefix(rest).ok()?;
            for _ in 0..sparse.nr_areas {
                let (area, after) = wire::SparseArea::read_from_prefix(rest).ok()?;
                rest = after;
                if area.offset.checked_add(area.size)? > info.size {
                    return None;
                }
                areas.push(MmapArea {
                    offset: area.offset,
                    size: area.size,
                });
            }
        }
        lowest = at.checked_add(size_of::<wire::CapHeader>())?;
        at = cap.next as usize;
    }
    Some(areas)
}
