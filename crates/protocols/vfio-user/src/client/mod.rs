//! Client side of the protocol, for a VMM, a host driver or a test.
//!
//! The client is blocking, sends one command at a time, and every call has a time limit. After an
//! error other than [`ClientError::Refused`] and the errors of wrong arguments the state of the
//! stream is unknown, and all later calls return [`ClientError::Broken`].

mod error;
mod irqs;
mod migration;
mod raw;
mod region;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub use error::ClientError;
pub use irqs::Irqs;
pub use raw::{Frame, RawClient};
pub use region::{Mapping, Region};

use crate::device::{DeviceInfo, DmaMapping, DmaUnmapping, IrqInfo};
use crate::version::Capabilities;
use crate::wire::{self, Command, HEADER_SIZE, Header, flags};

/// Blocking client of one vfio-user server.
#[derive(Debug)]
pub struct Client {
    raw: RawClient,
    server: Capabilities,
    next_id: u16,
    broken: bool,
    /// Buffers for messages, which every call reuses.
    out: Vec<u8>,
    reply: Vec<u8>,
}

impl Client {
    /// Connects to a server's socket and negotiates the version. `timeout` applies to each call.
    pub fn connect(path: impl AsRef<Path>, timeout: Duration) -> Result<Self, ClientError> {
        let mut client = Self::new(RawClient::connect(path.as_ref(), timeout)?);
        client.negotiate()?;
        Ok(client)
    }

    /// Creates a client over a connected socket, before the version is negotiated.
    pub fn new(raw: RawClient) -> Self {
        let (out, reply) = (Vec::new(), Vec::new());
        Self {
            raw,
            server: Capabilities::default(),
            next_id: 0,
            broken: false,
            out,
            reply,
        }
    }

    /// Returns the connection, for raw messages.
    pub fn raw(&mut self) -> &mut RawClient {
        &mut self.raw
    }

    /// Returns the capabilities that the server has stated in the version message.
    pub fn server_capabilities(&self) -> &Capabilities {
        &self.server
    }

    /// Negotiates the protocol version, and states this crate's capabilities.
    pub fn negotiate(&mut self) -> Result<(), ClientError> {
        let ours = Capabilities {
            max_msg_fds: wire::MAX_MSG_FDS as u64,
            write_multiple: true,
            ..Capabilities::default()
        };
        let (text, _) = ours.text_within(usize::MAX);
        self.negotiate_with(wire::VERSION_MINOR, &text)
    }

    /// Negotiates the version with any minor version and text; the text is empty or ends in NUL.
    pub fn negotiate_with(&mut self, minor: u16, text: &[u8]) -> Result<(), ClientError> {
        let version = wire::Version {
            major: wire::VERSION_MAJOR,
            minor,
        };
        let fds = self.call(Command::VERSION, &[version.as_bytes(), text], &[]);
        let fds = fds.map_err(|error| match error {
            ClientError::Closed
            | ClientError::Refused {
                errno: Some(Errno::BUSY),
                ..
            } => ClientError::NotTaken,
            other => other,
        })?;
        self.no_fds(&fds)?;
        let (reply, text) = self.parse::<wire::Version>("version")?;
        if reply.major != wire::VERSION_MAJOR || reply.minor > minor {
            self.broken = true;
            return Err(ClientError::Version {
                major: reply.major,
                minor: reply.minor,
            });
        }
        match Capabilities::parse(text) {
            Ok(server) => self.server = server,
            Err(error) => {
                self.broken = true;
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Requests the number of regions and interrupt types of the device.
    pub fn device_info(&mut self) -> Result<DeviceInfo, ClientError> {
        let request = wire::DeviceInfo {
            argsz: size_of::<wire::DeviceInfo>() as u32,
            ..Default::default()
        };
        let fds = self.call(Command::DEVICE_GET_INFO, &[request.as_bytes()], &[])?;
        self.no_fds(&fds)?;
        let (info, _) = self.parse::<wire::DeviceInfo>("device information")?;
        Ok(DeviceInfo {
            reset: info.flags & wire::device::RESET != 0,
            pci: info.flags & wire::device::PCI != 0,
            num_regions: info.num_regions,
            num_irqs: info.num_irqs,
        })
    }

    /// Requests the number and properties of the interrupts of type `index`.
    pub fn irq_info(&mut self, index: u32) -> Result<IrqInfo, ClientError> {
        let request = wire::IrqInfo {
            argsz: size_of::<wire::IrqInfo>() as u32,
            index,
            ..Default::default()
        };
        let fds = self.call(Command::DEVICE_GET_IRQ_INFO, &[request.as_bytes()], &[])?;
        self.no_fds(&fds)?;
        let (info, _) = self.parse::<wire::IrqInfo>("interrupt information")?;
        Ok(IrqInfo {
            count: info.count,
            eventfd: info.flags & wire::irq::EVENTFD != 0,
            maskable: info.flags & wire::irq::MASKABLE != 0,
            automasked: info.flags & wire::irq::AUTOMASKED != 0,
            noresize: info.flags & wire::irq::NORESIZE != 0,
        })
    }

    /// Makes a range of memory accessible to the device (`VFIO_USER_DMA_MAP`).
    pub fn dma_map(
        &mut self,
        map: DmaMapping,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), ClientError> {
        let read = if map.read { wire::dma::READ } else { 0 };
        let write = if map.write { wire::dma::WRITE } else { 0 };
        let request = wire::DmaMap {
            argsz: size_of::<wire::DmaMap>() as u32,
            flags: read | write,
            offset: map.offset,
            address: map.iova,
            size: map.size,
        };
        let fds = self.call(Command::DMA_MAP, &[request.as_bytes()], fd.as_slice())?;
        self.no_fds(&fds)
    }

    /// Unmaps memory from the device; when this returns, the device no longer accesses it. Returns
    /// the size in the server's reply: this crate's server reports how much was mapped, some
    /// servers repeat the request.
    pub fn dma_unmap(&mut self, unmap: DmaUnmapping) -> Result<u64, ClientError> {
        let (flags, address, size) = match unmap {
            DmaUnmapping::Range { iova, size } => (0, iova, size),
            DmaUnmapping::All => (wire::dma::UNMAP_ALL, 0, 0),
        };
        let request = wire::DmaUnmap {
            argsz: size_of::<wire::DmaUnmap>() as u32,
            flags,
            address,
            size,
        };
        let fds = self.call(Command::DMA_UNMAP, &[request.as_bytes()], &[])?;
        self.no_fds(&fds)?;
        let (reply, _) = self.parse::<wire::DmaUnmap>("unmapped range")?;
        Ok(reply.size)
    }

    /// Resets the device (`VFIO_USER_DEVICE_RESET`).
    pub fn reset(&mut self) -> Result<(), ClientError> {
        let fds = self.call(Command::DEVICE_RESET, &[], &[])?;
        self.no_fds(&fds)
    }

    /// Sends a command without waiting for the reply. Returns its message ID.
    pub fn send(
        &mut self,
        command: Command,
        command_flags: u32,
        payload: &[&[u8]],
        fds: &[BorrowedFd<'_>],
    ) -> Result<u16, ClientError> {
        if self.broken {
            return Err(ClientError::Broken);
        }
        let message_id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let size = HEADER_SIZE + payload.iter().map(|part| part.len()).sum::<usize>();
        let message_size = u32::try_from(size).map_err(|_| ClientError::TooLong {
            count: size,
            limit: 1 << 32,
        })?;
        let header = Header {
            message_id,
            command,
            message_size,
            flags: flags::COMMAND | command_flags,
            error: 0,
        };
        self.out.clear();
        self.out.extend_from_slice(header.as_bytes());
        for part in payload {
            self.out.extend_from_slice(part);
        }
        let sent = self.raw.send(&self.out, fds);
        self.broken |= sent
            .as_ref()
            .is_err_and(|error| !matches!(error, ClientError::TooManyFds { .. }));
        sent.map(|()| message_id)
    }

    /// Sends a command and waits for its reply; the payload is in `self.reply`.
    fn call(
        &mut self,
        command: Command,
        payload: &[&[u8]],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Vec<OwnedFd>, ClientError> {
        let message_id = self.send(command, 0, payload, fds)?;
        let result = self.wait(command, message_id);
        self.broken |= result
            .as_ref()
            .is_err_and(|error| !matches!(error, ClientError::Refused { .. }));
        result
    }

    fn wait(&mut self, command: Command, message_id: u16) -> Result<Vec<OwnedFd>, ClientError> {
        let deadline = self.raw.deadline();
        loop {
            let (header, fds) = self.raw.recv_into(&mut self.reply, deadline)?;
            match header.flags & flags::TYPE_MASK {
                flags::REPLY => {}
                flags::COMMAND => {
                    // Memory is shared; no request of a server is supported.
                    if header.flags & flags::NO_REPLY == 0 {
                        self.raw.refuse(&header, Errno::NOTSUP)?;
                    }
                    if std::time::Instant::now() >= deadline {
                        return Err(ClientError::TimedOut);
                    }
                    continue;
                }
                _ => return Err(ClientError::Malformed("message type")),
            }
            let errno = i32::try_from(header.error)
                .ok()
                .filter(|errno| (1..4096).contains(errno));
            let errno = errno
                .map(Errno::from_raw_os_error)
                .filter(|_| header.flags & flags::ERROR != 0);
            if (header.command, header.message_id) != (command, message_id) {
                return Err(ClientError::Unsolicited {
                    command: header.command,
                    errno,
                });
            }
            if header.flags & flags::ERROR != 0 {
                return Err(ClientError::Refused { command, errno });
            }
            return Ok(fds);
        }
    }

    /// Parses the structure at the beginning of the reply. Returns it and the remaining bytes.
    fn parse<T: FromBytes + KnownLayout + Immutable>(
        &mut self,
        what: &'static str,
    ) -> Result<(T, &[u8]), ClientError> {
        match T::read_from_prefix(&self.reply) {
            Ok(parsed) => Ok(parsed),
            Err(_) => {
                self.broken = true;
                Err(ClientError::Malformed(what))
            }
        }
    }

    fn no_fds(&mut self, fds: &[OwnedFd]) -> Result<(), ClientError> {
        if fds.is_empty() {
            Ok(())
        } else {
            Err(self.malformed("unexpected file descriptors"))
        }
    }

    fn malformed(&mut self, what: &'static str) -> ClientError {
        self.broken = true;
        ClientError::Malformed(what)
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.raw.as_fd()
    }
}
