//! The client: what a VMM, a host driver or a test does.
//!
//! Blocking, one command at a time, every call with a time limit. After an error other than [`ClientError::Refused`] and
//! the errors of wrong arguments the state of the stream is unknown, and all later calls give [`ClientError::Broken`].

mod raw;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub use raw::{Frame, RawClient};

use crate::device::{DeviceInfo, DmaMapping, DmaUnmapping, IrqAction, IrqInfo, MmapArea};
use crate::version::{Capabilities, CapabilitiesError};
use crate::wire::{self, Command, HEADER_SIZE, Header, flags};

/// The largest region information that is asked for, in bytes.
const MAX_REGION_INFO: u32 = 64 << 10;

/// Why a call of the client failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// There is no server at that path, or it cannot be reached.
    #[error("cannot connect")]
    Connect(#[source] Errno),
    /// The socket failed.
    #[error("cannot exchange messages")]
    Io(#[source] Errno),
    /// The server did not answer in time.
    #[error("timed out")]
    TimedOut,
    /// The server closed the connection.
    #[error("connection closed by the server")]
    Closed,
    /// The server answered with an error.
    #[error("command {} refused", .command.0)]
    Refused {
        /// The command.
        command: Command,
        /// The server's error number; `None` if it gave none that is valid.
        #[source]
        errno: Option<Errno>,
    },
    /// The server sent a reply that nothing waits for, for example the error of a posted write.
    #[error("unsolicited reply to command {}", .command.0)]
    Unsolicited {
        /// The command in the reply.
        command: Command,
        /// The error in the reply, if it is one.
        #[source]
        errno: Option<Errno>,
    },
    /// The server's answer makes no sense.
    #[error("malformed answer: {0}")]
    Malformed(&'static str),
    /// The server's capabilities make no sense.
    #[error("malformed capabilities")]
    Capabilities(#[from] CapabilitiesError),
    /// The server speaks another version.
    #[error("server speaks version {major}.{minor}")]
    Version {
        /// Its major version.
        major: u16,
        /// Its minor version.
        minor: u16,
    },
    /// More data than the server takes in one message.
    #[error("{count} bytes in one access, the server takes {limit}")]
    TooLong {
        /// Bytes asked for.
        count: usize,
        /// The server's limit.
        limit: u64,
    },
    /// More descriptors than fit into one message.
    #[error("{count} file descriptors in one message, {limit} are possible")]
    TooManyFds {
        /// Descriptors given.
        count: usize,
        /// The limit.
        limit: usize,
    },
    /// An earlier call failed, so that the state of the stream is unknown.
    #[error("connection is broken by an earlier error")]
    Broken,
}

/// A region as the server describes it.
#[derive(Debug)]
pub struct Region {
    /// Size in bytes; 0 means that there is none.
    pub size: u64,
    /// It can be read.
    pub read: bool,
    /// It can be written.
    pub write: bool,
    /// How it can be mapped, if it can.
    pub mmap: Option<Mapping>,
}

/// How a region can be mapped.
#[derive(Debug)]
pub struct Mapping {
    /// The file to map.
    pub fd: OwnedFd,
    /// Offset in the file of the region's first byte.
    pub offset: u64,
    /// The mappable areas, all inside the region; none means the whole region.
    pub areas: Vec<MmapArea>,
}

/// What interrupts to act on, or which eventfds to assign.
#[derive(Clone, Copy, Debug)]
pub enum Irqs<'a> {
    /// That many.
    All(u32),
    /// Those that are true.
    Chosen(&'a [bool]),
    /// The eventfd of each; `None` de-assigns.
    Eventfds(&'a [Option<BorrowedFd<'a>>]),
}

/// A client of one server.
#[derive(Debug)]
pub struct Client {
    raw: RawClient,
    server: Capabilities,
    next_id: u16,
    broken: bool,
    /// Buffers that are used again and again.
    out: Vec<u8>,
    reply: Vec<u8>,
}

impl Client {
    /// Connects and negotiates. `timeout` is that of each call.
    pub fn connect(path: impl AsRef<Path>, timeout: Duration) -> Result<Self, ClientError> {
        let mut client = Self::new(RawClient::connect(path.as_ref(), timeout)?);
        client.negotiate()?;
        Ok(client)
    }

    /// A client over a connected socket, not yet negotiated.
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

    /// The socket, to send and receive messages of one's own.
    pub fn raw(&mut self) -> &mut RawClient {
        &mut self.raw
    }

    /// What the server stated.
    pub fn server_capabilities(&self) -> &Capabilities {
        &self.server
    }

    /// Negotiates the version, with this crate's capabilities.
    pub fn negotiate(&mut self) -> Result<(), ClientError> {
        let ours = Capabilities {
            max_msg_fds: wire::MAX_MSG_FDS as u64,
            write_multiple: true,
            ..Capabilities::default()
        };
        let (text, _) = ours.text_within(usize::MAX);
        self.negotiate_with(wire::VERSION_MINOR, &text)
    }

    /// Negotiates the version with any minor version and text, which is empty or ends in NUL.
    pub fn negotiate_with(&mut self, minor: u16, text: &[u8]) -> Result<(), ClientError> {
        let version = wire::Version {
            major: wire::VERSION_MAJOR,
            minor,
        };
        let fds = self.call(Command::VERSION, &[version.as_bytes(), text], &[])?;
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

    /// Number of regions and interrupt types.
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

    /// Size, flags and mapping of a region.
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

    /// Number and kind of interrupts of one type.
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

    /// Assigns, masks, unmasks or triggers interrupts from `start` on.
    ///
    /// Eventfds are sent in as many messages as the server needs: at most its `max_msg_fds` in each, and never interrupts
    /// with an eventfd together with such without.
    pub fn set_irqs(
        &mut self,
        index: u32,
        start: u32,
        action: IrqAction,
        irqs: Irqs<'_>,
    ) -> Result<(), ClientError> {
        use wire::irq_set as set;

        let action = match action {
            IrqAction::Mask => set::ACTION_MASK,
            IrqAction::Unmask => set::ACTION_UNMASK,
            IrqAction::Trigger => set::ACTION_TRIGGER,
        };
        let head = wire::IrqSet {
            argsz: size_of::<wire::IrqSet>() as u32,
            flags: action,
            index,
            start,
            count: 0,
        };
        match irqs {
            Irqs::All(count) => {
                let request = wire::IrqSet {
                    flags: action | set::DATA_NONE,
                    count,
                    ..head
                };
                self.set_some_irqs(request, &[], &[])
            }
            Irqs::Chosen(chosen) => {
                let bytes: Vec<u8> = chosen.iter().map(|chosen| u8::from(*chosen)).collect();
                let count = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
                let argsz = head.argsz.saturating_add(count);
                let request = wire::IrqSet {
                    argsz,
                    flags: action | set::DATA_BOOL,
                    count,
                    ..head
                };
                self.set_some_irqs(request, &bytes, &[])
            }
            Irqs::Eventfds(eventfds) => {
                let limit = usize::try_from(self.server.max_msg_fds)
                    .unwrap_or(usize::MAX)
                    .clamp(1, wire::MAX_MSG_FDS);
                let mut start = start;
                for alike in eventfds.chunk_by(|a, b| a.is_some() == b.is_some()) {
                    for chunk in alike.chunks(limit) {
                        let fds: Vec<BorrowedFd<'_>> = chunk.iter().flatten().copied().collect();
                        let count = u32::try_from(chunk.len()).unwrap_or(u32::MAX);
                        let request = wire::IrqSet {
                            flags: action | set::DATA_EVENTFD,
                            start,
                            count,
                            ..head
                        };
                        self.set_some_irqs(request, &[], &fds)?;
                        start = start.saturating_add(count);
                    }
                }
                Ok(())
            }
        }
    }

    fn set_some_irqs(
        &mut self,
        head: wire::IrqSet,
        data: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let fds = self.call(Command::DEVICE_SET_IRQS, &[head.as_bytes(), data], fds)?;
        self.no_fds(&fds)
    }

    /// Reads from a region.
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

    /// Writes to a region and waits until it is done.
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

    /// Writes to a region without waiting, nor being told of errors.
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

    /// Makes memory accessible to the device.
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

    /// Takes memory away from the device; when this returns, the device no longer touches it.
    pub fn dma_unmap(&mut self, unmap: DmaUnmapping) -> Result<(), ClientError> {
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
        self.no_fds(&fds)
    }

    /// Resets the device.
    pub fn reset(&mut self) -> Result<(), ClientError> {
        let fds = self.call(Command::DEVICE_RESET, &[], &[])?;
        self.no_fds(&fds)
    }

    /// Sends a command and does not wait for a reply; returns its message id.
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

    /// Sends a command and waits for its reply, whose payload is in `self.reply` then.
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
                    // Memory is shared; what else a server may ask for is not supported.
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

    /// The structure at the beginning of the reply, and what follows.
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

/// The areas in the reply's capabilities; `None` if these make no sense.
fn sparse_areas(reply: &[u8], info: &wire::RegionInfo) -> Option<Vec<MmapArea>> {
    let mut areas = Vec::new();
    if info.flags & wire::region::CAPS == 0 {
        return Some(areas);
    }
    let mut at = info.cap_offset as usize;
    // Capabilities go upwards only, so that the list ends.
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
