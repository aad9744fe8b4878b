//! A vhost-user front-end with one virtqueue, as far as an attack needs them: any messages with any
//! descriptors, and chains that nobody checks.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};

use anyhow::{Context, Result, ensure};
use dma::Memory;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vhost_blk::feature;
use vhost_blk::wire::{
    HEADER_SIZE, Header, MAX_PAYLOAD, Region, TableHeader, VringAddr, VringState, flags, protocol,
    request,
};
use zerocopy::{FromBytes, IntoBytes};

use super::nvme::ANSWER;
use super::poison;

/// Descriptors of the ring, and entries of its other parts.
pub(in crate::hostile) const SIZE: u16 = 128;
/// The guest's memory, from address 0 on.
const MEMORY: usize = 16 << 20;
const AVAILABLE: usize = 0x1000;
const USED: usize = 0x2000;
/// Offsets of requests: header, status, tables, data.
pub(in crate::hostile) const AT_HEADER: u64 = 0x1_0000;
pub(in crate::hostile) const AT_STATUS: u64 = 0x2_0000;
pub(in crate::hostile) const AT_TABLE: u64 = 0x10_0000;
pub(in crate::hostile) const AT_DATA: u64 = 0x20_0000;

/// Flags of descriptors (virtio 1.2, 2.7.5).
pub(in crate::hostile) const NEXT: u16 = 1;
pub(in crate::hostile) const WRITE: u16 = 2;
pub(in crate::hostile) const INDIRECT: u16 = 4;

const FEATURES: u64 = feature::INDIRECT_DESC | feature::PROTOCOL_FEATURES | feature::VERSION_1;

/// A connection to an export, of which nothing is expected.
pub(in crate::hostile) struct Raw(UnixStream);

impl Raw {
    pub(in crate::hostile) fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(ANSWER))?;
        stream.set_write_timeout(Some(ANSWER))?;
        Ok(Self(stream))
    }

    /// Sends bytes as they are, in one message of the socket's.
    pub(in crate::hostile) fn bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ensure!(
                control.push(SendAncillaryMessage::ScmRights(fds)),
                "too many descriptors"
            );
        }
        let sent = sendmsg(
            &self.0,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )?;
        ensure!(sent == bytes.len(), "the socket is full");
        Ok(())
    }

    pub(in crate::hostile) fn message(request: u32, payload: &[u8]) -> Vec<u8> {
        let header = Header {
            request,
            flags: flags::VERSION,
            size: payload.len() as u32,
        };
        [header.as_bytes(), payload].concat()
    }

    pub(in crate::hostile) fn send(
        &self,
        request: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<()> {
        self.bytes(&Self::message(request, payload), fds)
    }

    /// Sends a question and waits for the number that answers it.
    pub(in crate::hostile) fn ask(&mut self, request: u32) -> Result<u64> {
        self.send(request, &[], &[])?;
        let mut header = [0; HEADER_SIZE];
        self.0.read_exact(&mut header)?;
        let header = Header::read_from_bytes(&header).ok().context("a header")?;
        let size = header.size as usize;
        ensure!(size <= MAX_PAYLOAD, "an answer of {size} bytes");
        let mut payload = vec![0; size];
        self.0.read_exact(&mut payload)?;
        let number = payload.first_chunk().context("a short answer")?;
        Ok(u64::from_ne_bytes(*number))
    }

    /// Negotiates features as every front-end does.
    pub(in crate::hostile) fn negotiate(&mut self) -> Result<()> {
        self.send(request::SET_OWNER, &[], &[])?;
        let offered = self.ask(request::GET_FEATURES)?;
        self.send(request::SET_FEATURES, (FEATURES & offered).as_bytes(), &[])?;
        let offered = self.ask(request::GET_PROTOCOL_FEATURES)?;
        let wanted = offered & (protocol::MQ | protocol::CONFIG | protocol::CONFIGURE_MEM_SLOTS);
        self.send(request::SET_PROTOCOL_FEATURES, wanted.as_bytes(), &[])
    }

    /// SET_MEM_TABLE with one region of this descriptor's.
    pub(in crate::hostile) fn share(&self, fd: BorrowedFd<'_>, size: u64) -> Result<()> {
        let header = TableHeader {
            regions: 1,
            padding: 0,
        };
        let region = Region {
            guest_address: 0,
            size,
            user_address: 0,
            mmap_offset: 0,
        };
        let table = [header.as_bytes(), region.as_bytes()].concat();
        self.send(request::SET_MEM_TABLE, &table, &[fd])
    }
}

impl AsFd for Raw {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A front-end with a ring.
pub(in crate::hostile) struct Disk {
    pub(in crate::hostile) raw: Raw,
    pub(in crate::hostile) memory: Memory,
    pub(in crate::hostile) kick: OwnedFd,
    pub(in crate::hostile) call: OwnedFd,
    next: u16,
    seen: u16,
}

impl Disk {
    /// Connects and starts queue 0; the export's interrupts go to `call`.
    pub(in crate::hostile) fn up(socket: &Path, call: OwnedFd) -> Result<Self> {
        let mut raw = Raw::connect(socket)?;
        raw.negotiate()?;
        let memory = Memory::anonymous(MEMORY)?;
        raw.share(memory.fd(), MEMORY as u64)?;
        let kick = poison::eventfd()?;
        let state = |num| VringState { index: 0, num };
        raw.send(request::SET_VRING_NUM, state(SIZE.into()).as_bytes(), &[])?;
        raw.send(request::SET_VRING_BASE, state(0).as_bytes(), &[])?;
        let addresses = VringAddr {
            index: 0,
            flags: 0,
            descriptor: 0,
            used: USED as u64,
            available: AVAILABLE as u64,
            log: 0,
        };
        raw.send(request::SET_VRING_ADDR, addresses.as_bytes(), &[])?;
        let index = 0u64;
        raw.send(request::SET_VRING_CALL, index.as_bytes(), &[call.as_fd()])?;
        raw.send(request::SET_VRING_KICK, index.as_bytes(), &[kick.as_fd()])?;
        raw.send(request::SET_VRING_ENABLE, state(1).as_bytes(), &[])?;
        raw.ask(request::GET_FEATURES)?;
        Ok(Self {
            raw,
            memory,
            kick,
            call,
            next: 0,
            seen: 0,
        })
    }

    /// Writes a descriptor into a table at this address.
    pub(in crate::hostile) fn describe(
        &self,
        table: u64,
        index: u16,
        (address, len): (u64, u32),
        flags: u16,
        next: u16,
    ) -> Result<()> {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        let at = table + u64::from(index) * 16;
        Ok(self.memory.write(at as usize, &bytes)?)
    }

    /// Writes the header that all requests of an attack share.
    pub(in crate::hostile) fn header(&self, kind: u32, sector: u64) -> Result<()> {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend([0; 4]);
        bytes.extend(sector.to_le_bytes());
        Ok(self.memory.write(AT_HEADER as usize, &bytes)?)
    }

    /// Describes one request by an indirect table of these pieces, header and status around them;
    /// every descriptor of the ring is that request.
    pub(in crate::hostile) fn indirect(&self, pieces: &[(u64, u32)], flags: u16) -> Result<()> {
        let mut index = 1;
        self.describe(AT_TABLE, 0, (AT_HEADER, 16), NEXT, 1)?;
        for piece in pieces {
            self.describe(AT_TABLE, index, *piece, flags | NEXT, index + 1)?;
            index += 1;
        }
        self.describe(AT_TABLE, index, (AT_STATUS, 1), WRITE, 0)?;
        let bytes = (u32::from(index) + 1) * 16;
        for head in 0..SIZE {
            self.describe(0, head, (AT_TABLE, bytes), INDIRECT, 0)?;
        }
        Ok(())
    }

    /// Offers all descriptors again that have been used; answers how many were.
    pub(in crate::hostile) fn turn(&mut self) -> Result<u64> {
        let mut index = [0; 2];
        self.memory.read(USED + 2, &mut index)?;
        fence(Ordering::SeqCst);
        let used = u16::from_le_bytes(index);
        let count = used.wrapping_sub(self.seen);
        self.seen = used;
        let room = SIZE.saturating_sub(self.next.wrapping_sub(used));
        for _ in 0..room {
            let at = AVAILABLE + 4 + usize::from(self.next % SIZE) * 2;
            let head = self.next % SIZE;
            self.memory.write(at, &head.to_le_bytes())?;
            self.next = self.next.wrapping_add(1);
        }
        if room > 0 {
            fence(Ordering::SeqCst);
            self.memory.write(AVAILABLE + 2, &self.next.to_le_bytes())?;
            poison::signal(&self.kick)?;
        }
        Ok(count.into())
    }

    /// Keeps the ring full until `running` returns false.
    pub(in crate::hostile) fn storm(&mut self, mut running: impl FnMut(u64) -> bool) -> Result<()> {
        loop {
            let count = self.turn()?;
            if !running(count) {
                return Ok(());
            }
            if count == 0 {
                std::thread::sleep(std::time::Duration::from_micros(100));
            }
        }
    }
}
