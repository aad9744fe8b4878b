//! Transport to a controller behind a vfio-user socket, of this project's server or another one.
//!
//! DMA memory is sent as file descriptors, so it must be shared files. Doorbells are stores if the
//! server lets the page be mapped. Otherwise they are messages, which shadow doorbells make rare.

use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use dma::Memory;
use nvme::{pci, regs};
use rustix::event::{EventfdFlags, eventfd};
use vfio_user::client::{Client, ClientError, Irqs, Region};
use vfio_user::{DmaMapping, DmaUnmapping, Errno, IrqAction};

use crate::transport::{
    DmaLimits, DoorbellCell, Mapping, Source, Transport, TransportError, mapped_whole,
};
use sync::Unpoisoned;

/// PCI region and interrupt indexes (linux/vfio.h).
const BAR0: u32 = 0;
const CONFIG: u32 = 7;
const MSIX: u32 = 2;
/// Maximum number of entries of a capability list: more than fit into a configuration space of 256
/// bytes, so a longer list is a loop.
const MAX_CAPABILITIES: usize = 48;

/// Default PCI vendor ID and device ID of this project's own controllers.
const OWN_IDS: (u16, u16) = (0x1234, 0x4e56);

/// Mapped parts of BAR0 in which a doorbell is written by a store.
#[derive(Debug)]
struct Doorbells {
    /// The server's doorbell file, mapped as a whole. The server may shrink the file, which `dma`
    /// survives.
    memory: Memory,
    windows: Vec<Window>,
}

/// Range of BAR0 with doorbells in a file of the server.
#[derive(Debug)]
struct Window {
    range: RangeInclusive<u64>,
    /// Byte offset in the file of the range's first byte.
    at: u64,
}

impl Doorbells {
    /// Maps the doorbells that the server offers; `None` when doorbells must be messages.
    fn map(bar: Region) -> Option<Doorbells> {
        let mapping = bar.mmap?;
        let memory = match Memory::from_fd(mapping.fd, 1, true) {
            Ok(memory) => memory,
            Err(error) => {
                tracing::warn!(%error, "the server's doorbells cannot be mapped");
                return None;
            }
        };
        let mut areas: Vec<(u64, u64)> = mapping.areas.iter().map(|a| (a.offset, a.size)).collect();
        if areas.is_empty() {
            areas.push((0, bar.size));
        }
        let mut windows = Vec::new();
        for (offset, size) in areas {
            let window = window(mapping.offset, offset, size, memory.len());
            if window.is_none() {
                let file = memory.len();
                tracing::warn!(
                    offset,
                    size,
                    file,
                    "an area of BAR0 is not in the server's file"
                );
            }
            // Other registers are accessed by messages, since the server must act on them.
            windows.extend(window.filter(|window| *window.range.end() >= regs::DOORBELLS));
        }
        (!windows.is_empty()).then_some(Doorbells { memory, windows })
    }

    fn cell(&self, offset: u64) -> Option<DoorbellCell> {
        let mut windows = self.windows.iter();
        let window = windows.find(|window| window.range.contains(&offset))?;
        let at = window.at.checked_add(offset - window.range.start())?;
        DoorbellCell::in_file(&self.memory, usize::try_from(at).ok()?)
    }
}

/// Returns the window of an area of BAR0 in a file of `file` bytes; `base` is the region's offset
/// in the file. `None` when the file does not hold all of the area.
fn window(base: u64, offset: u64, size: u64, file: usize) -> Option<Window> {
    let last = offset.checked_add(size.checked_sub(1)?)?;
    let at = base.checked_add(offset)?;
    let end = at.checked_add(size)?;
    (end <= file as u64).then_some(Window {
        range: offset..=last,
        at,
    })
}

/// Transport to an NVMe controller behind a vfio-user socket.
#[derive(Debug)]
pub struct VfioUser {
    client: Mutex<Client>,
    doorbells: Option<Doorbells>,
    vectors: u16,
    max_mappings: usize,
    /// Offset of the MSI-X capability in PCI configuration space.
    msix: Option<u64>,
    /// Eventfd that is never read, for vectors without a waiter: servers on libvfio-user fail a
    /// controller that has no eventfd for an interrupt. `None` if the server is known to keep such
    /// an interrupt pending, as a device does.
    unread: Option<OwnedFd>,
}

impl VfioUser {
    /// Connects to a server. `timeout` applies to each message.
    ///
    /// # Errors
    /// [`TransportError`] when the server cannot be reached, or has no suitable PCI device.
    pub fn connect(path: impl AsRef<Path>, timeout: Duration) -> Result<Arc<Self>, TransportError> {
        let mut client = Client::connect(path, timeout).map_err(failed)?;
        let info = client.device_info().map_err(failed)?;
        if !info.pci || info.num_regions <= CONFIG {
            return Err(TransportError::Unsupported("a device that is not PCI"));
        }
        let bar = client.region_info(BAR0).map_err(failed)?;
        let doorbells = Doorbells::map(bar);
        let vectors = match client.irq_info(MSIX) {
            Ok(info) if info.eventfd => u16::try_from(info.count)
                .unwrap_or(u16::MAX)
                .min(pci::msix::MAX_ENTRIES),
            _ => 0,
        };
        let msix = find_capability(&mut client, pci::cap_id::MSI_X)?;
        let unread = if keeps_pending(&mut client)? {
            None
        } else {
            let made = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
            Some(made.map_err(|errno| TransportError::io("eventfd", errno))?)
        };
        let max_mappings = client.server_capabilities().max_dma_maps;
        Ok(Arc::new(Self {
            client: Mutex::new(client),
            doorbells,
            vectors,
            max_mappings: usize::try_from(max_mappings).unwrap_or(usize::MAX),
            msix,
            unread,
        }))
    }

    /// Returns whether doorbells are written by stores to shared memory instead of messages.
    pub fn has_mapped_doorbells(&self) -> bool {
        self.doorbell(regs::DOORBELLS).is_some()
    }

    fn client(&self) -> MutexGuard<'_, Client> {
        // A call that panicked left the stream as an error would: the client knows that it is
        // broken.
        self.client.lock().unpoisoned()
    }

    /// Sets MSI-X Enable, which a VMM passes on from the guest. SPDK's target sends interrupts only
    /// when it is set, or when Interrupt Disable is clear.
    fn enable_msix(&self, client: &mut Client, enable: bool) -> Result<(), TransportError> {
        let Some(capability) = self.msix else {
            return Ok(());
        };
        let at = capability + pci::msix::CONTROL as u64;
        let before = config16(client, at)?;
        let bits = pci::msix::CONTROL_ENABLE | pci::msix::CONTROL_FUNCTION_MASK;
        let wanted = if enable { pci::msix::CONTROL_ENABLE } else { 0 };
        let control = before & !bits | wanted;
        if control == before {
            return Ok(());
        }
        let written = client.region_write(CONFIG, at, &control.to_le_bytes());
        written.map_err(failed)
    }

    fn unread(&self) -> Option<BorrowedFd<'_>> {
        self.unread.as_ref().map(AsFd::as_fd)
    }
}

fn config16(client: &mut Client, offset: u64) -> Result<u16, TransportError> {
    let mut bytes = [0; 2];
    let read = client.region_read(CONFIG, offset, &mut bytes);
    read.map_err(failed)?;
    Ok(u16::from_le_bytes(bytes))
}

/// Returns the offset of the capability with this ID in configuration space (PCI Local Bus 3.0,
/// 6.7).
fn find_capability(client: &mut Client, id: u8) -> Result<Option<u64>, TransportError> {
    let status = config16(client, pci::STATUS as u64)?;
    if status & pci::status::CAPABILITIES_LIST == 0 {
        return Ok(None);
    }
    let [mut at, _] = config16(client, pci::CAPABILITIES_POINTER as u64)?.to_le_bytes();
    for _ in 0..MAX_CAPABILITIES {
        at &= !0b11;
        if at == 0 {
            break;
        }
        let [found, next] = config16(client, at.into())?.to_le_bytes();
        if found == id {
            return Ok(Some(at.into()));
        }
        at = next;
    }
    Ok(None)
}

/// Returns whether the server keeps the interrupt of a vector without eventfd pending, as this
/// project's server does. No unread eventfd is then needed, which saves a system call for each such
/// interrupt.
fn keeps_pending(client: &mut Client) -> Result<bool, TransportError> {
    let vendor = config16(client, pci::VENDOR_ID as u64)?;
    let device = config16(client, pci::DEVICE_ID as u64)?;
    Ok((vendor, device) == OWN_IDS)
}

fn failed(error: ClientError) -> TransportError {
    match error {
        ClientError::Refused { .. }
        | ClientError::TooLong { .. }
        | ClientError::TooManyFds { .. }
        | ClientError::Connect(_)
        | ClientError::NotTaken
        | ClientError::Version { .. } => TransportError::VfioUser(error),
        // Any other error has ended the connection.
        error => TransportError::Gone(error.to_string()),
    }
}

impl Transport for VfioUser {
    fn read32(&self, offset: u64) -> Result<u32, TransportError> {
        let mut bytes = [0; 4];
        let mut client = self.client();
        client
            .region_read(BAR0, offset, &mut bytes)
            .map_err(failed)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        let bytes = value.to_le_bytes();
        let mut client = self.client();
        if offset >= regs::DOORBELLS {
            // A doorbell write needs no reply.
            return client
                .region_write_posted(BAR0, offset, &bytes)
                .map_err(failed);
        }
        client.region_write(BAR0, offset, &bytes).map_err(failed)
    }

    fn doorbell(&self, offset: u64) -> Option<DoorbellCell> {
        self.doorbells.as_ref()?.cell(offset)
    }

    fn dma_limits(&self) -> DmaLimits {
        DmaLimits {
            iova_ranges: vec![0..=(1 << 48) - 1],
            max_mappings: self.max_mappings.clamp(1, 65_535),
            page_size: 4096,
            host_ranges: false,
        }
    }

    fn map(&self, mapping: Mapping<'_>) -> Result<(), TransportError> {
        let Source::File { memory, offset } = mapping.source else {
            return Err(TransportError::NeedsSharedMemory);
        };
        let message = DmaMapping {
            iova: mapping.iova,
            size: mapping.len,
            offset,
            read: mapping.prot.read,
            write: mapping.prot.write,
        };
        match self.client().dma_map(message, Some(memory.fd())) {
            Err(ClientError::Refused {
                errno: Some(Errno::NOSPC | Errno::NOMEM),
                ..
            }) => Err(TransportError::NoMappings),
            other => other.map_err(failed),
        }
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<(), TransportError> {
        let range = DmaUnmapping::Range { iova, size: len };
        let unmapped = self.client().dma_unmap(range).map_err(failed)?;
        mapped_whole(unmapped, len)
    }

    fn msix_vectors(&self) -> u16 {
        self.vectors
    }

    fn set_msix(&self, eventfds: &[Option<BorrowedFd<'_>>]) -> Result<(), TransportError> {
        if self.vectors == 0 {
            return Ok(());
        }
        let mut client = self.client();
        // MSI-X is off while eventfds change, so that no interrupt is sent without one.
        self.enable_msix(&mut client, false)?;
        let none = client.set_irqs(MSIX, 0, IrqAction::Trigger, Irqs::All(0));
        none.map_err(failed)?;
        let unread = self.unread();
        // The Admin Completion Queue always interrupts, by vector 0 (NVMe Base 2.1, 3.1.4.10).
        let only = [unread];
        let wanted: Vec<_> = eventfds.iter().map(|fd| fd.or(unread)).collect();
        let given = match (wanted.is_empty(), unread) {
            (true, None) => return Ok(()),
            (true, Some(_)) => &only[..],
            (false, _) => &wanted[..],
        };
        let set = client.set_irqs(MSIX, 0, IrqAction::Trigger, Irqs::Eventfds(given));
        set.map_err(failed)?;
        if eventfds.is_empty() {
            return Ok(());
        }
        self.enable_msix(&mut client, true)
    }

    fn set_vector(
        &self,
        vector: u16,
        eventfd: Option<BorrowedFd<'_>>,
    ) -> Result<(), TransportError> {
        let mut client = self.client();
        let set = client.set_irqs(
            MSIX,
            vector.into(),
            IrqAction::Trigger,
            Irqs::Eventfds(&[eventfd.or(self.unread())]),
        );
        set.map_err(failed)
    }

    fn set_bus_master(&self, enable: bool) -> Result<(), TransportError> {
        let at = pci::COMMAND as u64;
        let mut client = self.client();
        let mut command = config16(&mut client, at)?;
        // This driver receives no INTx.
        command |= pci::command::MEMORY_SPACE | pci::command::INTERRUPT_DISABLE;
        if enable {
            command |= pci::command::BUS_MASTER
        } else {
            command &= !pci::command::BUS_MASTER
        }
        let written = client.region_write(CONFIG, at, &command.to_le_bytes());
        written.map_err(failed)
    }

    fn reset(&self) -> Result<(), TransportError> {
        self.client().reset().map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::OWN_IDS;
    use controller::pci::PciIds;

    #[test]
    fn own_ids_match_controller() {
        let ids = PciIds::default();
        assert_eq!(OWN_IDS, (ids.vendor, ids.device));
    }
}
