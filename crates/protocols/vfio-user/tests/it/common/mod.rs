//! A mock device, and a server with its peer's end of the socket in one thread.
#![allow(dead_code, reason = "every test file uses a part of this")]

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};
use vfio_user::client::{Frame, RawClient};
use vfio_user::wire::{self, Command, Header};
use vfio_user::{
    Connection, ConnectionError, ConnectionStatus, Device, DeviceInfo, DmaMapping, DmaUnmapping,
    Errno, IrqAction, IrqData, IrqInfo, MmapArea, OperationOutcome, RegionInfo, RegionMmap,
    ServerLimits, SetIrqs, Unmapped,
};
use zerocopy::IntoBytes;

pub const BAR0: u32 = 0;
pub const CONFIG: u32 = 7;
pub const MSIX: u32 = 2;
pub const BAR0_SIZE: u64 = 0x4000;
pub const CONFIG_SIZE: u64 = 0x1000;

/// Which file a descriptor is of.
pub type FileId = u64;

/// A call of the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    Read {
        index: u32,
        offset: u64,
        count: usize,
    },
    Write {
        index: u32,
        offset: u64,
        data: Vec<u8>,
    },
    SetIrqs {
        index: u32,
        start: u32,
        count: u32,
        action: IrqAction,
        data: Irqs,
    },
    Map {
        map: DmaMapping,
        fd: Option<FileId>,
    },
    Unmap(DmaUnmapping),
    Reset,
    Disconnected,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Irqs {
    None,
    Bool(Vec<bool>),
    Eventfd(Vec<Option<FileId>>),
}

/// Records what it is asked to do.
pub struct Mock {
    pub calls: Vec<Call>,
    /// The next operations that can wait do so.
    pub defer: bool,
    /// The next call fails.
    pub fail: Option<Errno>,
    /// How much is mapped in any range; none for all of it.
    pub mapped: Option<u64>,
    /// BAR0's mapping: file, offset, areas.
    pub mmap: Option<(OwnedFd, u64, Vec<MmapArea>)>,
    pub can_reset: bool,
}

impl Default for Mock {
    fn default() -> Self {
        Self {
            calls: Vec::new(),
            defer: false,
            fail: None,
            mapped: None,
            mmap: None,
            can_reset: true,
        }
    }
}

impl Mock {
    fn result<T>(&mut self, ok: T) -> Result<T, Errno> {
        self.fail.take().map_or(Ok(ok), Err)
    }

    fn outcome(&mut self) -> Result<OperationOutcome, Errno> {
        let outcome = if self.defer {
            OperationOutcome::Pending
        } else {
            OperationOutcome::Done
        };
        self.result(outcome)
    }
}

impl Device for Mock {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            reset: self.can_reset,
            pci: true,
            num_regions: 9,
            num_irqs: 5,
        }
    }

    fn region(&self, index: u32) -> Option<RegionInfo<'_>> {
        let mmap = self.mmap.as_ref().map(|(fd, offset, areas)| RegionMmap {
            fd: fd.as_fd(),
            offset: *offset,
            areas,
        });
        match index {
            BAR0 => Some(RegionInfo {
                size: BAR0_SIZE,
                read: true,
                write: true,
                mmap,
            }),
            CONFIG => Some(RegionInfo {
                size: CONFIG_SIZE,
                read: true,
                write: true,
                mmap: None,
            }),
            // Read-only, and longer than any limit.
            2 => Some(RegionInfo {
                size: 1 << 40,
                read: true,
                write: false,
                mmap: None,
            }),
            _ => None,
        }
    }

    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        self.calls.push(Call::Read {
            index,
            offset,
            count: data.len(),
        });
        for (i, byte) in data.iter_mut().enumerate() {
            *byte = pattern(index, offset + i as u64);
        }
        self.result(())
    }

    fn region_write(
        &mut self,
        index: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<OperationOutcome, Errno> {
        self.calls.push(Call::Write {
            index,
            offset,
            data: data.to_vec(),
        });
        match index {
            CONFIG => self.outcome(),
            _ => self.result(OperationOutcome::Done),
        }
    }

    fn irq(&self, index: u32) -> Option<IrqInfo> {
        match index {
            MSIX => Some(IrqInfo {
                count: 33,
                eventfd: true,
                noresize: true,
                ..Default::default()
            }),
            0 => Some(IrqInfo {
                count: 1,
                eventfd: true,
                maskable: true,
                automasked: true,
                noresize: false,
            }),
            _ => None,
        }
    }

    fn set_irqs(&mut self, irqs: SetIrqs) -> Result<OperationOutcome, Errno> {
        let data = match irqs.data {
            IrqData::None => Irqs::None,
            IrqData::Bool(chosen) => Irqs::Bool(chosen),
            IrqData::Eventfd(fds) => {
                Irqs::Eventfd(fds.into_iter().map(|fd| fd.map(file_id)).collect())
            }
        };
        let SetIrqs {
            index,
            start,
            count,
            action,
            ..
        } = irqs;
        self.calls.push(Call::SetIrqs {
            index,
            start,
            count,
            action,
            data,
        });
        self.outcome()
    }

    fn dma_map(&mut self, map: DmaMapping, fd: Option<OwnedFd>) -> Result<OperationOutcome, Errno> {
        self.calls.push(Call::Map {
            map,
            fd: fd.map(file_id),
        });
        self.outcome()
    }

    fn dma_unmap(&mut self, unmap: DmaUnmapping) -> Result<Unmapped, Errno> {
        self.calls.push(Call::Unmap(unmap));
        let size = self.mapped.unwrap_or(match unmap {
            DmaUnmapping::Range { size, .. } => size,
            DmaUnmapping::All => 0,
        });
        let outcome = self.outcome()?;
        Ok(Unmapped { size, outcome })
    }

    fn reset(&mut self) -> Result<OperationOutcome, Errno> {
        self.calls.push(Call::Reset);
        self.outcome()
    }

    fn disconnected(&mut self) {
        self.calls.push(Call::Disconnected);
    }
}

/// What the mock's regions contain.
pub fn pattern(index: u32, offset: u64) -> u8 {
    (offset as u8).wrapping_mul(7).wrapping_add(index as u8)
}

/// The file behind a descriptor.
pub fn file_id(fd: impl AsFd) -> FileId {
    fstat(fd).unwrap().st_ino
}

/// A file of its own.
pub fn memfd() -> OwnedFd {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, 0x10000).unwrap();
    fd
}

/// A command message.
pub fn message(id: u16, command: Command, flags: u32, payload: &[&[u8]]) -> Vec<u8> {
    let size = wire::HEADER_SIZE + payload.iter().map(|part| part.len()).sum::<usize>();
    let header = Header {
        message_id: id,
        command,
        message_size: size as u32,
        flags,
        error: 0,
    };
    let mut bytes = header.as_bytes().to_vec();
    for part in payload {
        bytes.extend_from_slice(part);
    }
    bytes
}

/// The version message of a client without capabilities.
pub fn bare_version(id: u16) -> Vec<u8> {
    message(
        id,
        Command::VERSION,
        0,
        &[wire::Version { major: 0, minor: 0 }.as_bytes()],
    )
}

pub fn dma_map(id: u16, iova: u64) -> Vec<u8> {
    let map = wire::DmaMap {
        argsz: 32,
        flags: 3,
        offset: 0x1000,
        address: iova,
        size: 0x2000,
    };
    message(id, Command::DMA_MAP, 0, &[map.as_bytes()])
}

pub fn mapping(iova: u64) -> DmaMapping {
    DmaMapping {
        iova,
        size: 0x2000,
        offset: 0x1000,
        read: true,
        write: true,
    }
}

pub fn dma_unmap(id: u16, iova: u64) -> Vec<u8> {
    let unmap = wire::DmaUnmap {
        argsz: 24,
        flags: 0,
        address: iova,
        size: 0x2000,
    };
    message(id, Command::DMA_UNMAP, 0, &[unmap.as_bytes()])
}

pub fn region_write(id: u16, flags: u32, region: u32, offset: u64, data: &[u8]) -> Vec<u8> {
    let access = wire::RegionAccess {
        offset,
        region,
        count: data.len() as u32,
    };
    message(id, Command::REGION_WRITE, flags, &[access.as_bytes(), data])
}

pub fn region_read(id: u16, region: u32, offset: u64, count: u32) -> Vec<u8> {
    message(
        id,
        Command::REGION_READ,
        0,
        &[wire::RegionAccess {
            offset,
            region,
            count,
        }
        .as_bytes()],
    )
}

pub fn set_irqs(id: u16, flags: u32, index: u32, start: u32, count: u32, data: &[u8]) -> Vec<u8> {
    let set = wire::IrqSet {
        argsz: 20 + data.len() as u32,
        flags,
        index,
        start,
        count,
    };
    message(id, Command::DEVICE_SET_IRQS, 0, &[set.as_bytes(), data])
}

/// A connection with its device, and the client's end of the socket.
pub struct Server {
    pub connection: Connection,
    pub device: Mock,
    pub peer: RawClient,
}

impl Server {
    pub fn new() -> Self {
        Self::with_limits(ServerLimits::default())
    }

    pub fn with_limits(limits: ServerLimits) -> Self {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        Self {
            connection: Connection::with_limits(ours, limits),
            device: Mock::default(),
            peer: RawClient::from_fd(theirs, Duration::from_secs(20)).unwrap(),
        }
    }

    /// A connection with a version negotiated without capabilities.
    pub fn negotiated() -> Self {
        let mut server = Self::new();
        assert_eq!(server.ask(&bare_version(1), &[]).header.error, 0);
        server
    }

    /// Lets the server work until it has nothing more to do.
    pub fn pump(&mut self) -> Result<ConnectionStatus, ConnectionError> {
        loop {
            match self.connection.on_ready(&mut self.device)? {
                ConnectionStatus::MoreWork => {}
                status => return Ok(status),
            }
        }
    }

    /// Sends in one piece, then lets the server work.
    pub fn send(
        &mut self,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<ConnectionStatus, ConnectionError> {
        self.peer.send(bytes, fds).unwrap();
        self.pump()
    }

    /// Sends a message and lets the server work; the connection stays open.
    pub fn post(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.send(bytes, fds), Ok(ConnectionStatus::Open));
    }

    /// Sends a message and takes its reply.
    pub fn ask(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Frame {
        assert_eq!(self.send(bytes, fds), Ok(ConnectionStatus::Open));
        let reply = self.peer.recv().unwrap();
        assert_eq!(reply.header.message_id.to_ne_bytes(), bytes[..2]);
        assert_eq!(reply.header.command.0.to_ne_bytes(), bytes[2..4]);
        assert_eq!(
            reply.header.flags & wire::flags::TYPE_MASK,
            wire::flags::REPLY
        );
        assert_eq!(
            reply.header.message_size as usize,
            wire::HEADER_SIZE + reply.payload.len()
        );
        assert_eq!(
            reply.header.flags & wire::flags::ERROR != 0,
            reply.header.error != 0
        );
        assert!(self.silent(), "one reply to one message");
        reply
    }

    /// Sends a message that is to be refused; returns the error.
    pub fn refused(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Errno {
        let reply = self.ask(bytes, fds);
        assert!(reply.header.error != 0, "expected an error");
        assert!(reply.payload.is_empty() && reply.fds.is_empty());
        Errno::from_raw_os_error(reply.header.error as i32)
    }

    /// Sends a message that is to succeed; returns the reply.
    pub fn accepted(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Frame {
        let reply = self.ask(bytes, fds);
        assert_eq!(reply.header.error, 0);
        reply
    }

    /// Whether nothing waits to be read by the client.
    pub fn silent(&self) -> bool {
        rustix::io::ioctl_fionread(self.peer.as_fd()).unwrap() == 0
    }

    pub fn take_calls(&mut self) -> Vec<Call> {
        std::mem::take(&mut self.device.calls)
    }
}

/// Sends without blocking; false if the socket is full.
pub fn try_send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    )
}
