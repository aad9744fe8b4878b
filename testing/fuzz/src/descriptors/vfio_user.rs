//! The vfio-user side: memory is mapped and read, interrupts are signalled, as a server does.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use dma::{DmaMap, MemoryCache, MemoryLimits, Prot};
use eventfd::ClientEventfd;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, recv, sendmsg, socketpair,
};
use vfio_user::{
    Connection, ConnectionStatus, Device, DeviceInfo, DmaMapping, DmaUnmapping, Errno, IrqData,
    IrqInfo, OperationOutcome, RegionInfo, SetIrqs, Unmapped,
};

use super::Message;

/// Interrupts of the device: MSI-X, index 2.
const VECTORS: usize = 20;
const MSIX: u32 = 2;

/// Device that accepts memory and interrupts.
struct Taker {
    memories: MemoryCache,
    map: DmaMap,
    vectors: Vec<Option<ClientEventfd>>,
    taken: u32,
}

impl Taker {
    fn look(&self, iova: u64, size: u64) {
        let mut byte = [0];
        // Memory that its owner has cut off is an error, never a signal.
        for at in [iova, iova + size - 1] {
            let _ = self.map.read(at, &mut byte);
        }
    }
}

impl Device for Taker {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            reset: true,
            pci: true,
            num_regions: 9,
            num_irqs: 5,
        }
    }

    fn region(&self, _index: u32) -> Option<RegionInfo<'_>> {
        None
    }

    fn region_read(&mut self, _: u32, _: u64, _: &mut [u8]) -> Result<(), Errno> {
        Err(Errno::INVAL)
    }

    fn region_write(&mut self, _: u32, _: u64, _: &[u8]) -> Result<OperationOutcome, Errno> {
        Err(Errno::INVAL)
    }

    fn irq(&self, index: u32) -> Option<IrqInfo> {
        (index == MSIX).then_some(IrqInfo {
            count: VECTORS as u32,
            eventfd: true,
            ..Default::default()
        })
    }

    fn set_irqs(&mut self, irqs: SetIrqs) -> Result<OperationOutcome, Errno> {
        if let IrqData::Eventfd(fds) = irqs.data {
            for (vector, fd) in (irqs.start as usize..).zip(fds) {
                self.vectors[vector] = match fd {
                    Some(fd) => {
                        let expected = receive::kind::is_eventfd(&fd);
                        let taken = ClientEventfd::new(fd);
                        assert_eq!(taken.is_ok(), expected, "an interrupt");
                        self.taken += u32::from(expected);
                        Some(taken.map_err(|_| Errno::INVAL)?)
                    }
                    None => None,
                };
            }
        }
        // An eventfd with a full counter, or one that blocks, must not delay the others.
        self.vectors
            .iter()
            .flatten()
            .for_each(ClientEventfd::signal);
        Ok(OperationOutcome::Done)
    }

    fn dma_map(&mut self, map: DmaMapping, fd: Option<OwnedFd>) -> Result<OperationOutcome, Errno> {
        let (iova, size) = (map.iova, map.size);
        let prot = Prot {
            read: map.read,
            write: map.write,
        };
        let backing = match fd {
            Some(fd) => {
                let is_memory = receive::kind::is_memory(&fd);
                let end = map.offset.checked_add(size).ok_or(Errno::INVAL)?;
                let memory = self.memories.import(fd, end, map.write);
                assert!(is_memory || memory.is_err(), "memory of another kind");
                Some((memory.map_err(|_| Errno::INVAL)?, map.offset))
            }
            None => None,
        };
        let backed = backing.is_some();
        let mapped = self.map.map(iova, size, backing, prot);
        mapped.map_err(|_| Errno::INVAL)?;
        self.taken += u32::from(backed);
        self.look(iova, size);
        Ok(OperationOutcome::Done)
    }

    fn dma_unmap(&mut self, unmap: DmaUnmapping) -> Result<Unmapped, Errno> {
        let size = match unmap {
            DmaUnmapping::Range { iova, size } => self.map.unmap(iova, size),
            DmaUnmapping::All => Ok(self.map.unmap_all()),
        };
        let size = size.map_err(|_| Errno::INVAL)?;
        self.map.quiesced();
        let outcome = OperationOutcome::Done;
        Ok(Unmapped { size, outcome })
    }

    fn reset(&mut self) -> Result<OperationOutcome, Errno> {
        Ok(OperationOutcome::Done)
    }

    fn disconnected(&mut self) {
        self.vectors.iter_mut().for_each(|vector| *vector = None);
        self.map.unmap_all();
        self.map.quiesced();
    }
}

pub struct Server {
    connection: Connection,
    device: Taker,
    peer: OwnedFd,
}

fn connected() -> Result<(Connection, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, peer) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok((Connection::new(ours), peer))
}

impl Server {
    pub fn new() -> Result<Server, Errno> {
        let (connection, peer) = connected()?;
        let device = Taker {
            memories: MemoryCache::with_limits(MemoryLimits::DEFAULT),
            map: DmaMap::new(),
            vectors: (0..VECTORS).map(|_| None).collect(),
            taken: 0,
        };
        Ok(Server {
            connection,
            device,
            peer,
        })
    }

    /// Encodes a message.
    pub fn message(&self, message: Message) -> Vec<u8> {
        let Message { what, a, b, fds } = message;
        let words = |words: &[u32]| -> Vec<u8> {
            words.iter().flat_map(|word| word.to_ne_bytes()).collect()
        };
        let place = |byte: u8| u32::from(byte) << 12;
        let (command, payload) = match what % 8 {
            // The version, perhaps once more.
            0 => (1, words(&[0])),
            1..=3 => {
                let protection = u32::from(a & 3);
                let offset = place(b >> 6);
                let size = place(b & 15);
                (
                    2,
                    words(&[32, protection, offset, 0, place(a >> 2), 0, size, 0]),
                )
            }
            4 => (3, words(&[24, 0, place(a >> 2), 0, place(b & 15), 0])),
            5 | 6 => {
                let count = match b & 15 {
                    0..12 => u32::from(fds),
                    other => u32::from(other),
                };
                (8, words(&[20, 4 | 1 << 5, MSIX, u32::from(a % 24), count]))
            }
            _ => (u32::from(a % 20), words(&[u32::from(b); 8])),
        };
        let mut bytes = words(&[command << 16, 16 + payload.len() as u32, 0, 0]);
        bytes.extend(payload);
        bytes
    }

    pub fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // A full or a closed socket is a case like any other.
        let _ = sendmsg(&self.peer, &[IoSlice::new(bytes)], &mut control, flags);
    }

    pub fn work(&mut self) {
        let status = loop {
            match self.connection.on_ready(&mut self.device) {
                Ok(ConnectionStatus::MoreWork) => {}
                status => break status,
            }
        };
        if matches!(status, Ok(ConnectionStatus::Closed) | Err(_))
            && let Ok((connection, peer)) = connected()
        {
            // The next client.
            (self.connection, self.peer) = (connection, peer);
            let version = self.message(super::VERSION);
            self.send(&version, &[]);
        }
        let mut sink = [0; 4096];
        let _ = recv(&self.peer, &mut sink[..], RecvFlags::DONTWAIT);
    }

    /// Disconnects the client; returns the number of accepted descriptors.
    pub fn end(mut self) -> u32 {
        self.work();
        self.connection.close(&mut self.device);
        self.device.taken
    }
}
