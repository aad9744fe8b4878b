//! What one message means: checks it and calls the device.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::device::{
    Device, DmaMapping, DmaUnmapping, IrqAction, IrqData, MmapArea, Outcome, RegionInfo,
    RegionMmap, SetIrqs,
};
use crate::version::Capabilities;
use crate::wire::{self, Command, HEADER_SIZE, Header, MULTI_DATA};

/// The longest message before the limits are negotiated: room for any sensible JSON text.
const MAX_FIRST_MESSAGE: usize = 8 << 10;

/// State of the protocol, without socket and buffers.
#[derive(Debug)]
pub(crate) struct Session {
    /// What the server states.
    ours: Capabilities,
    /// What the client may rely on, once negotiated.
    told: Option<Capabilities>,
    /// What the client stated.
    theirs: Capabilities,
}

/// How a message was handled.
#[derive(Debug)]
pub(crate) enum Handled {
    /// The reply's payload is written; this descriptor goes with it.
    Reply(Option<OwnedFd>),
    /// The device will finish it later; then the reply has this payload.
    Deferred(Vec<u8>),
}

impl Session {
    pub fn new(ours: Capabilities) -> Self {
        Self {
            ours,
            told: None,
            theirs: Capabilities::default(),
        }
    }

    pub fn is_negotiated(&self) -> bool {
        self.told.is_some()
    }

    /// What the client stated; the defaults before negotiation.
    pub fn client(&self) -> &Capabilities {
        &self.theirs
    }

    /// The longest message that may come, in bytes.
    pub fn max_message(&self) -> usize {
        let Some(told) = &self.told else {
            return MAX_FIRST_MESSAGE;
        };
        let data = usize::try_from(told.max_data_xfer_size).unwrap_or(usize::MAX);
        data.saturating_add(HEADER_SIZE + size_of::<wire::RegionAccess>())
            .max(MAX_FIRST_MESSAGE)
    }

    /// Handles one message. The payload of the reply is appended to `reply`.
    pub fn handle(
        &mut self,
        header: &Header,
        payload: &[u8],
        fds: Vec<OwnedFd>,
        device: &mut dyn Device,
        reply: &mut Vec<u8>,
    ) -> Result<Handled, Errno> {
        if !fds.is_empty() && !header.command.may_carry_fds() {
            return Err(Errno::INVAL);
        }
        match header.command {
            Command::REGION_WRITE => self.region_write(payload, device, reply)?,
            Command::REGION_READ => self.region_read(payload, device, reply)?,
            Command::REGION_WRITE_MULTI => self.region_write_multi(payload, device, reply)?,
            Command::VERSION => self.version(payload, reply)?,
            Command::DMA_MAP => dma_map(payload, fds, device)?,
            Command::DMA_UNMAP => return dma_unmap(payload, device, reply),
            Command::DEVICE_GET_INFO => device_info(payload, device, reply)?,
            Command::DEVICE_GET_REGION_INFO => return self.region_info(payload, device, reply),
            Command::DEVICE_GET_IRQ_INFO => irq_info(payload, device, reply)?,
            Command::DEVICE_SET_IRQS => set_irqs(payload, fds, device)?,
            Command::DEVICE_RESET => return reset(device),
            // No ioeventfds: clients without them write to the region. DMA_READ and DMA_WRITE go the other way only,
            // and dirty pages and migration are not offered.
            _ => return Err(Errno::NOTSUP),
        }
        Ok(Handled::Reply(None))
    }

    fn version(&mut self, payload: &[u8], reply: &mut Vec<u8>) -> Result<(), Errno> {
        if self.is_negotiated() {
            return Err(Errno::INVAL);
        }
        let (version, text) = split::<wire::Version>(payload)?;
        if version.major != wire::VERSION_MAJOR {
            return Err(Errno::NOTSUP);
        }
        self.theirs = Capabilities::parse(text).map_err(|error| {
            tracing::debug!(%error, "version refused");
            Errno::INVAL
        })?;
        let ours = Capabilities {
            write_multiple: self.ours.write_multiple && self.theirs.write_multiple,
            ..self.ours
        };
        let (text, told) = ours.text_within(text.len());
        self.told = Some(told);
        // Minor 0 is the lowest there is, so it is never above the client's.
        let version = wire::Version {
            major: wire::VERSION_MAJOR,
            minor: wire::VERSION_MINOR,
        };
        reply.extend_from_slice(version.as_bytes());
        reply.extend_from_slice(&text);
        Ok(())
    }

    /// Checks an access against the negotiated limit and the region.
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

    fn region_read(
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

    fn region_write(
        &self,
        payload: &[u8],
        device: &mut dyn Device,
        reply: &mut Vec<u8>,
    ) -> Result<(), Errno> {
        let (access, data) = split::<wire::RegionAccess>(payload)?;
        let count = self.check_access(device, &access, true)?;
        if data.len() != count {
            return Err(Errno::INVAL);
        }
        device.region_write(access.region, access.offset, data)?;
        reply.extend_from_slice(access.as_bytes());
        Ok(())
    }

    /// Handles the writes as if each had come by itself: a refused one does not keep the others from being done, but its
    /// error is the reply's.
    fn region_write_multi(
        &self,
        payload: &[u8],
        device: &mut dyn Device,
        reply: &mut Vec<u8>,
    ) -> Result<(), Errno> {
        let (count, entries) = split::<u64>(payload)?;
        let length = usize::try_from(count)
            .ok()
            .and_then(|count| count.checked_mul(size_of::<wire::MultiWrite>()))
            .ok_or(Errno::INVAL)?;
        let entries = entries.get(..length).ok_or(Errno::INVAL)?;
        let mut result = Ok(());
        for entry in entries.chunks_exact(size_of::<wire::MultiWrite>()) {
            result = result.and(self.multi_write(entry, device));
        }
        result?;
        reply.extend_from_slice(count.as_bytes());
        Ok(())
    }

    fn multi_write(&self, entry: &[u8], device: &mut dyn Device) -> Result<(), Errno> {
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

    fn region_info(
        &self,
        payload: &[u8],
        device: &mut dyn Device,
        reply: &mut Vec<u8>,
    ) -> Result<Handled, Errno> {
        // One polling host sends as many bytes as the reply may have; those after the structure mean nothing.
        let (request, _) = split::<wire::RegionInfo>(payload)?;
        let head = size_of::<wire::RegionInfo>();
        if (request.argsz as usize) < head || request.index >= device.info().num_regions {
            return Err(Errno::INVAL);
        }
        // Clients ask for every index below num_regions and take no error for an answer: a region that is not there has
        // size 0.
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
        // The client asks again with the size that it is told here. Until then the capabilities are not announced: QEMU
        // refuses the flag without an offset.
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
        Ok(Handled::Reply(fd))
    }
}

fn device_info(payload: &[u8], device: &mut dyn Device, reply: &mut Vec<u8>) -> Result<(), Errno> {
    let (request, _) = split::<wire::DeviceInfo>(payload)?;
    if (request.argsz as usize) < size_of::<wire::DeviceInfo>() {
        return Err(Errno::INVAL);
    }
    let info = device.info();
    let wire_info = wire::DeviceInfo {
        argsz: size_of::<wire::DeviceInfo>() as u32,
        flags: flag(info.reset, wire::device::RESET) | flag(info.pci, wire::device::PCI),
        num_regions: info.num_regions,
        num_irqs: info.num_irqs,
    };
    reply.extend_from_slice(wire_info.as_bytes());
    Ok(())
}

fn irq_info(payload: &[u8], device: &mut dyn Device, reply: &mut Vec<u8>) -> Result<(), Errno> {
    let (request, _) = split::<wire::IrqInfo>(payload)?;
    if (request.argsz as usize) < size_of::<wire::IrqInfo>()
        || request.index >= device.info().num_irqs
    {
        return Err(Errno::INVAL);
    }
    let info = device.irq(request.index).unwrap_or_default();
    let wire_info = wire::IrqInfo {
        argsz: size_of::<wire::IrqInfo>() as u32,
        flags: flag(info.eventfd, wire::irq::EVENTFD)
            | flag(info.maskable, wire::irq::MASKABLE)
            | flag(info.automasked, wire::irq::AUTOMASKED)
            | flag(info.noresize, wire::irq::NORESIZE),
        index: request.index,
        count: info.count,
    };
    reply.extend_from_slice(wire_info.as_bytes());
    Ok(())
}

fn set_irqs(payload: &[u8], fds: Vec<OwnedFd>, device: &mut dyn Device) -> Result<(), Errno> {
    use wire::irq_set as set;

    let (request, data) = split::<wire::IrqSet>(payload)?;
    if (request.argsz as usize) < size_of::<wire::IrqSet>()
        || request.flags & !(set::DATA_MASK | set::ACTION_BITS) != 0
    {
        return Err(Errno::INVAL);
    }
    let action = match request.flags & set::ACTION_BITS {
        set::ACTION_MASK => IrqAction::Mask,
        set::ACTION_UNMASK => IrqAction::Unmask,
        set::ACTION_TRIGGER => IrqAction::Trigger,
        _ => return Err(Errno::INVAL),
    };
    if request.index >= device.info().num_irqs {
        return Err(Errno::INVAL);
    }
    let available = device.irq(request.index).unwrap_or_default().count;
    let end = request
        .start
        .checked_add(request.count)
        .ok_or(Errno::INVAL)?;
    let data_kind = request.flags & set::DATA_MASK;
    let tear_down =
        data_kind == set::DATA_NONE && action == IrqAction::Trigger && request.start == 0;
    if end > available || (request.count == 0 && !tear_down) {
        return Err(Errno::INVAL);
    }
    let count = request.count as usize;
    let data = match data_kind {
        set::DATA_NONE if fds.is_empty() => IrqData::None,
        set::DATA_BOOL if fds.is_empty() => {
            let booleans = data.get(..count).ok_or(Errno::INVAL)?;
            IrqData::Bool(booleans.iter().map(|boolean| *boolean != 0).collect())
        }
        set::DATA_EVENTFD if fds.len() == count => {
            IrqData::Eventfd(fds.into_iter().map(Some).collect())
        }
        set::DATA_EVENTFD if fds.is_empty() => IrqData::Eventfd((0..count).map(|_| None).collect()),
        _ => return Err(Errno::INVAL),
    };
    device.set_irqs(SetIrqs {
        index: request.index,
        start: request.start,
        count: request.count,
        action,
        data,
    })
}

fn dma_map(payload: &[u8], mut fds: Vec<OwnedFd>, device: &mut dyn Device) -> Result<(), Errno> {
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
    device.dma_map(map, fds.pop())
}

fn dma_unmap(
    payload: &[u8],
    device: &mut dyn Device,
    reply: &mut Vec<u8>,
) -> Result<Handled, Errno> {
    let (request, _) = split::<wire::DmaUnmap>(payload)?;
    if request.flags & wire::dma::UNMAP_DIRTY_BITMAP != 0 {
        return Err(Errno::NOTSUP);
    }
    if (request.argsz as usize) < size_of::<wire::DmaUnmap>() {
        return Err(Errno::INVAL);
    }
    let unmap = match request.flags {
        0 if is_range(request.address, request.size) => DmaUnmapping::Range {
            iova: request.address,
            size: request.size,
        },
        wire::dma::UNMAP_ALL if request.address == 0 && request.size == 0 => DmaUnmapping::All,
        _ => return Err(Errno::INVAL),
    };
    let outcome = device.dma_unmap(unmap)?;
    // The reply repeats the request (specification, VFIO_USER_DMA_UNMAP).
    Ok(match outcome {
        Outcome::Done => {
            reply.extend_from_slice(request.as_bytes());
            Handled::Reply(None)
        }
        Outcome::Pending => Handled::Deferred(request.as_bytes().to_vec()),
    })
}

fn reset(device: &mut dyn Device) -> Result<Handled, Errno> {
    if !device.info().reset {
        return Err(Errno::NOTSUP);
    }
    Ok(match device.reset()? {
        Outcome::Done => Handled::Reply(None),
        Outcome::Pending => Handled::Deferred(Vec::new()),
    })
}

/// Whether a range of addresses is not empty and does not wrap.
fn is_range(start: u64, size: u64) -> bool {
    size.checked_sub(1)
        .is_some_and(|last| start.checked_add(last).is_some())
}

fn flag(set: bool, bit: u32) -> u32 {
    if set { bit } else { 0 }
}

/// The payload's structure and what follows it.
fn split<T: FromBytes + KnownLayout + Immutable>(payload: &[u8]) -> Result<(T, &[u8]), Errno> {
    T::read_from_prefix(payload).map_err(|_| Errno::INVAL)
}
