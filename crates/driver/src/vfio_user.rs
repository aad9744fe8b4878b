//! A controller behind a vfio-user socket: our own server's, or another's.
//!
//! Memory goes over as descriptors, so it has to be shared files. Doorbells are stores where the server lets the page be
//! mapped, else a message each, which shadow doorbells make rare.

use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvme::regs;
use vfio_user::client::{Client, ClientError, Irqs};
use vfio_user::{DmaMapping, DmaUnmapping, Errno, IrqAction};

use crate::mmio::Registers;
use crate::transport::{DmaLimits, DoorbellCell, Mapping, Source, Transport, TransportError};

/// PCI region and interrupt indexes (linux/vfio.h).
const BAR0: u32 = 0;
const CONFIG: u32 = 7;
const MSIX: u32 = 2;
/// The PCI command register, and its bits Memory Space Enable and Bus Master Enable (PCI Local Bus 3.0, 6.2.2).
const COMMAND: u64 = 4;
const MEMORY_SPACE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;

/// A mapped part of BAR0.
#[derive(Debug)]
struct Window {
    range: RangeInclusive<u64>,
    registers: Arc<Registers>,
}

/// The transport to a controller behind a socket.
#[derive(Debug)]
pub struct VfioUser {
    client: Mutex<Client>,
    windows: Vec<Window>,
    vectors: u16,
    max_mappings: usize,
}

impl VfioUser {
    /// Connects. `timeout` is that of each message.
    ///
    /// # Errors
    /// [`TransportError`].
    pub fn connect(path: impl AsRef<Path>, timeout: Duration) -> Result<Arc<Self>, TransportError> {
        let mut client = Client::connect(path, timeout).map_err(failed)?;
        let info = client.device_info().map_err(failed)?;
        if !info.pci || info.num_regions <= CONFIG {
            return Err(TransportError::Unsupported("a device that is not PCI"));
        }
        let bar = client.region_info(BAR0).map_err(failed)?;
        let mut windows = Vec::new();
        if let Some(mapping) = bar.mmap {
            let mut areas: Vec<(u64, u64)> =
                mapping.areas.iter().map(|a| (a.offset, a.size)).collect();
            if areas.is_empty() {
                areas.push((0, bar.size));
            }
            for (offset, size) in areas {
                let (Some(at), Ok(len)) =
                    (mapping.offset.checked_add(offset), usize::try_from(size))
                else {
                    continue;
                };
                let Some(last) = size
                    .checked_sub(1)
                    .and_then(|size| offset.checked_add(size))
                else {
                    continue;
                };
                match Registers::map(mapping.fd.as_fd(), at, len) {
                    Ok(registers) => windows.push(Window {
                        range: offset..=last,
                        registers: Arc::new(registers),
                    }),
                    // Without it doorbells are messages.
                    Err(error) => tracing::warn!(%error, "the server's registers cannot be mapped"),
                }
            }
        }
        let vectors = match client.irq_info(MSIX) {
            Ok(info) if info.eventfd => u16::try_from(info.count).unwrap_or(u16::MAX).min(2048),
            _ => 0,
        };
        let max_mappings = client.server_capabilities().max_dma_maps;
        Ok(Arc::new(Self {
            client: Mutex::new(client),
            windows,
            vectors,
            max_mappings: usize::try_from(max_mappings).unwrap_or(usize::MAX),
        }))
    }

    /// Whether doorbells are stores.
    pub fn has_mapped_doorbells(&self) -> bool {
        self.window(regs::DOORBELLS).is_some()
    }

    fn window(&self, offset: u64) -> Option<&Window> {
        self.windows.iter().find(|w| w.range.contains(&offset))
    }

    fn client(&self) -> MutexGuard<'_, Client> {
        // A call that panicked left the stream as an error would: the client knows that it is broken.
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(error: ClientError) -> TransportError {
    match error {
        ClientError::Refused { .. }
        | ClientError::TooLong { .. }
        | ClientError::TooManyFds { .. }
        | ClientError::Connect(_)
        | ClientError::Version { .. } => TransportError::VfioUser(error),
        // Whatever else it was, the connection is over.
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
            // Nobody waits for a doorbell.
            return client
                .region_write_posted(BAR0, offset, &bytes)
                .map_err(failed);
        }
        client.region_write(BAR0, offset, &bytes).map_err(failed)
    }

    fn doorbell(&self, offset: u64) -> Option<DoorbellCell> {
        let window = self.window(offset)?;
        let within = usize::try_from(offset - window.range.start()).ok()?;
        DoorbellCell::mapped(&window.registers, within)
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
        self.client().dma_unmap(range).map_err(failed)
    }

    fn msix_vectors(&self) -> u16 {
        self.vectors
    }

    fn set_msix(&self, eventfds: &[Option<BorrowedFd<'_>>]) -> Result<(), TransportError> {
        if self.vectors == 0 {
            return Ok(());
        }
        let mut client = self.client();
        let none = client.set_irqs(MSIX, 0, IrqAction::Trigger, Irqs::All(0));
        none.map_err(failed)?;
        if eventfds.is_empty() {
            return Ok(());
        }
        let set = client.set_irqs(MSIX, 0, IrqAction::Trigger, Irqs::Eventfds(eventfds));
        set.map_err(failed)
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
            Irqs::Eventfds(&[eventfd]),
        );
        set.map_err(failed)
    }

    fn set_bus_master(&self, enable: bool) -> Result<(), TransportError> {
        let mut bytes = [0; 2];
        let mut client = self.client();
        client
            .region_read(CONFIG, COMMAND, &mut bytes)
            .map_err(failed)?;
        let mut command = u16::from_le_bytes(bytes) | MEMORY_SPACE;
        if enable {
            command |= BUS_MASTER;
        } else {
            command &= !BUS_MASTER;
        }
        client
            .region_write(CONFIG, COMMAND, &command.to_le_bytes())
            .map_err(failed)
    }

    fn reset(&self) -> Result<(), TransportError> {
        self.client().reset().map_err(failed)
    }
}
