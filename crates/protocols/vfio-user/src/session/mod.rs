//! Interpretation of a message: checks, and calls of the device.

mod dma;
mod irqs;
mod migration;
mod region;

pub(crate) use region::asked_region;

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::device::{Device, OperationOutcome};
use crate::journal::Journal;
use crate::version::Capabilities;
use crate::wire::{self, Command, HEADER_SIZE, Header};

/// Maximum size in bytes of a message before the version is negotiated.
const MAX_FIRST_MESSAGE: usize = 8 << 10;

/// State of the vfio-user protocol with one client, without socket and buffers.
#[derive(Debug)]
pub(crate) struct Session {
    /// Capabilities that the server states.
    ours: Capabilities,
    /// Capabilities that the client may rely on; `None` before the negotiation.
    told: Option<Capabilities>,
    /// Capabilities that the client has stated.
    theirs: Capabilities,
}

/// Received message, with the parts of the connection that handling it needs.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub header: &'a Header,
    pub payload: &'a [u8],
    pub fds: Vec<OwnedFd>,
    /// Journal that stores values for the next process, if the connection has one.
    pub journal: Option<&'a Journal>,
    /// Whether a previous process has begun to handle the message.
    pub again: bool,
}

/// Result of handling a message.
#[derive(Debug)]
pub(crate) enum MessageResult {
    /// The payload of the reply is written. The descriptor is sent with it.
    Reply(Option<OwnedFd>),
    /// The device completes the message later. The reply then has this payload.
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

    /// Returns the capabilities that the client has stated; before the negotiation, the defaults.
    pub fn client(&self) -> &Capabilities {
        &self.theirs
    }

    /// Returns the maximum size of a message in bytes, which the negotiation changes.
    pub fn max_message(&self) -> usize {
        let Some(told) = &self.told else {
            return MAX_FIRST_MESSAGE;
        };
        let data = usize::try_from(told.max_data_xfer_size).unwrap_or(usize::MAX);
        data.saturating_add(HEADER_SIZE + size_of::<wire::RegionAccess>())
            .max(MAX_FIRST_MESSAGE)
    }

    /// Restores the capabilities that a previous process has negotiated.
    pub fn resume(&mut self, told: Capabilities, theirs: Capabilities) {
        self.told = Some(told);
        self.theirs = theirs;
    }

    /// Handles one message. The payload of the reply is appended to `reply`.
    pub fn handle(
        &mut self,
        request: Request<'_>,
        device: &mut dyn Device,
        reply: &mut Vec<u8>,
    ) -> Result<MessageResult, Errno> {
        let Request {
            header,
            payload,
            fds,
            journal,
            again,
        } = request;
        if !fds.is_empty() && !header.command.may_carry_fds() {
            return Err(Errno::INVAL);
        }
        match header.command {
            Command::REGION_WRITE => return self.region_write(payload, device, reply),
            Command::REGION_READ => self.region_read(payload, device, reply)?,
            Command::REGION_WRITE_MULTI => {
                return self.region_write_multi(payload, device, reply);
            }
            Command::VERSION => {
                if again {
                    self.told = None;
                }
                self.version(payload, reply)?;
                if let (Some(journal), Some(told)) = (journal, &self.told) {
                    journal.negotiated(told, &self.theirs);
                }
            }
            Command::DMA_MAP => return dma::dma_map(payload, fds, device, again),
            Command::DMA_UNMAP => {
                return dma::dma_unmap(payload, device, reply, (journal, again));
            }
            Command::DEVICE_GET_INFO => device_info(payload, device, reply)?,
            Command::DEVICE_GET_REGION_INFO => return self.region_info(payload, device, reply),
            Command::DEVICE_GET_IRQ_INFO => irqs::irq_info(payload, device, reply)?,
            Command::DEVICE_SET_IRQS => {
                return irqs::set_irqs(payload, fds, device).map(without_payload);
            }
            Command::DEVICE_RESET => return reset(device),
            Command::DEVICE_FEATURE => return self.device_feature(payload, device, reply),
            Command::MIG_DATA_READ => self.migration_read(payload, device, reply)?,
            Command::MIG_DATA_WRITE => self.migration_write(payload, device)?,
            // Ioeventfds are not supported: clients without them write to the region. DMA_READ and
            // DMA_WRITE are sent by servers only. Dirty pages are a device feature.
            _ => return Err(Errno::NOTSUP),
        }
        Ok(MessageResult::Reply(None))
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
        // Minor 0 is the lowest version, so it never exceeds the client's.
        let version = wire::Version {
            major: wire::VERSION_MAJOR,
            minor: wire::VERSION_MINOR,
        };
        reply.extend_from_slice(version.as_bytes());
        reply.extend_from_slice(&text);
        Ok(())
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

fn reset(device: &mut dyn Device) -> Result<MessageResult, Errno> {
    if !device.info().reset {
        return Err(Errno::NOTSUP);
    }
    device.reset().map(without_payload)
}

/// Returns the result of a message with a reply that consists of a header alone.
fn without_payload(outcome: OperationOutcome) -> MessageResult {
    match outcome {
        OperationOutcome::Done => MessageResult::Reply(None),
        OperationOutcome::Pending => MessageResult::Deferred(Vec::new()),
    }
}

fn flag(set: bool, bit: u32) -> u32 {
    if set { bit } else { 0 }
}

/// Parses the structure at the beginning of a payload. Returns it and the remaining bytes.
fn split<T: FromBytes + KnownLayout + Immutable>(payload: &[u8]) -> Result<(T, &[u8]), Errno> {
    T::read_from_prefix(payload).map_err(|_| Errno::INVAL)
}
