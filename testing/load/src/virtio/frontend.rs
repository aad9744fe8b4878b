//! Front-end side of the vhost-user protocol ("Vhost-user Protocol", QEMU interoperability
//! specification), limited to the needs of one queue.

use anyhow::{Context, Result, ensure};
use dma::Memory;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use vhost_blk::feature;
use vhost_blk::wire::{
    ConfigHeader, HEADER_SIZE, Header, MAX_PAYLOAD, Region, TableHeader, VringAddr, VringState,
    flags, protocol, request,
};
use zerocopy::{FromBytes, IntoBytes};

const FEATURES: u64 = feature::EVENT_IDX | feature::PROTOCOL_FEATURES | feature::VERSION_1;

/// Time limit for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// Addresses of the single queue in the shared memory. The descriptors are at its start.
pub struct Vring<'a> {
    pub size: u16,
    pub available: u64,
    pub used: u64,
    pub kick: BorrowedFd<'a>,
    pub call: BorrowedFd<'a>,
}

/// A connection to an export.
pub struct Frontend(UnixStream);

impl Frontend {
    /// Connects to an export, and negotiates features.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("connecting to {}", socket.display()))?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        let mut frontend = Self(stream);
        frontend.send(request::SET_OWNER, &[], &[])?;
        let offered = frontend.number(request::GET_FEATURES)?;
        ensure!(
            offered & FEATURES == FEATURES,
            "features are missing: {offered:#x}"
        );
        // Without it there may be no cache, and each write is made durable (virtio 1.2, 5.2.6.2).
        let accepted = FEATURES | (offered & feature::FLUSH);
        frontend.send(request::SET_FEATURES, accepted.as_bytes(), &[])?;
        let offered = frontend.number(request::GET_PROTOCOL_FEATURES)?;
        let wanted = protocol::CONFIG;
        ensure!(offered & wanted != 0, "no configuration space");
        frontend.send(request::SET_PROTOCOL_FEATURES, wanted.as_bytes(), &[])?;
        Ok(frontend)
    }

    /// Returns the disk's capacity in sectors of 512 bytes: the first field of the configuration
    /// space (virtio 1.2, 5.2.4).
    pub fn capacity(&mut self) -> Result<u64> {
        let header = ConfigHeader {
            offset: 0,
            size: 8,
            flags: 0,
        };
        // With space for the answer.
        let asked = [header.as_bytes(), &[0; 8]].concat();
        self.send(request::GET_CONFIG, &asked, &[])?;
        let answer = self.reply(request::GET_CONFIG)?;
        let (_, capacity) = answer.split_last_chunk().context("a short answer")?;
        Ok(u64::from_le_bytes(*capacity))
    }

    /// Shares a whole memory with the export, at guest address 0.
    pub fn share(&mut self, memory: &Memory) -> Result<()> {
        let header = TableHeader {
            regions: 1,
            padding: 0,
        };
        let region = Region {
            guest_address: 0,
            size: memory.len() as u64,
            user_address: 0,
            mmap_offset: 0,
        };
        let table = [header.as_bytes(), region.as_bytes()].concat();
        self.send(request::SET_MEM_TABLE, &table, &[memory.fd()])
    }

    /// Starts the queue.
    pub fn start(&mut self, vring: &Vring<'_>) -> Result<()> {
        // The queue index is 0.
        let state = |num| VringState { index: 0, num };
        let size = state(vring.size.into());
        self.send(request::SET_VRING_NUM, size.as_bytes(), &[])?;
        self.send(request::SET_VRING_BASE, state(0).as_bytes(), &[])?;
        let addresses = VringAddr {
            index: 0,
            flags: 0,
            descriptor: 0,
            used: vring.used,
            available: vring.available,
            log: 0,
        };
        self.send(request::SET_VRING_ADDR, addresses.as_bytes(), &[])?;
        let index = 0u64;
        let (call, kick) = (vring.call.as_fd(), vring.kick.as_fd());
        self.send(request::SET_VRING_CALL, index.as_bytes(), &[call])?;
        self.send(request::SET_VRING_KICK, index.as_bytes(), &[kick])?;
        self.send(request::SET_VRING_ENABLE, state(1).as_bytes(), &[])?;
        // An export that rejects one of these messages hangs up: then this request is not answered.
        self.number(request::GET_FEATURES).map(drop)
    }

    fn number(&mut self, request: u32) -> Result<u64> {
        self.send(request, &[], &[])?;
        let answer = self.reply(request)?;
        let answer = answer.first_chunk().context("a short answer")?;
        Ok(u64::from_ne_bytes(*answer))
    }

    fn send(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let header = Header {
            request,
            flags: flags::VERSION,
            size: payload.len() as u32,
        };
        let message = [header.as_bytes(), payload].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ensure!(
                control.push(SendAncillaryMessage::ScmRights(fds)),
                "too many descriptors"
            );
        }
        let bytes = [IoSlice::new(&message)];
        let sent = sendmsg(&self.0, &bytes, &mut control, SendFlags::NOSIGNAL)?;
        ensure!(sent == message.len(), "the export's socket is full");
        Ok(())
    }

    fn reply(&mut self, request: u32) -> Result<Vec<u8>> {
        let mut header = [0; HEADER_SIZE];
        let read = self.0.read_exact(&mut header);
        read.context("the export does not answer")?;
        let header = Header::read_from_bytes(&header).ok();
        let header = header.context("a short header")?;
        ensure!(header.request == request, "an answer to something else");
        let size = header.size as usize;
        ensure!(size <= MAX_PAYLOAD, "an answer of {size} bytes");
        let mut payload = vec![0; size];
        self.0.read_exact(&mut payload)?;
        Ok(payload)
    }
}
