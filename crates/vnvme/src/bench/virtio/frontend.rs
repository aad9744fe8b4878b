//! The front-end's half of the vhost-user protocol ("Vhost-user Protocol", QEMU interoperability specification), as much of
//! it as one queue needs.

use anyhow::{Context, Result, ensure};
use dma::Memory;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const GET_CONFIG: u32 = 24;

/// Header flags: the protocol's version.
const VERSION: u32 = 1;
/// Bytes of a header, and of a reply's payload at most.
const HEADER: usize = 12;
const MAX_REPLY: usize = 4096;

const F_EVENT_IDX: u64 = 1 << 29;
const F_PROTOCOL_FEATURES: u64 = 1 << 30;
const F_VERSION_1: u64 = 1 << 32;
const FEATURES: u64 = F_EVENT_IDX | F_PROTOCOL_FEATURES | F_VERSION_1;
const PROTOCOL_CONFIG: u64 = 1 << 9;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// The one queue, at the addresses of what was shared; descriptors are at its start.
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
    /// Connects, and agrees on features.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("connecting to {}", socket.display()))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut frontend = Self(stream);
        frontend.send(SET_OWNER, &[], &[])?;
        let offered = frontend.number(GET_FEATURES)?;
        ensure!(
            offered & FEATURES == FEATURES,
            "features are missing: {offered:#x}"
        );
        frontend.send(SET_FEATURES, &words(&[FEATURES]), &[])?;
        let offered = frontend.number(GET_PROTOCOL_FEATURES)?;
        ensure!(offered & PROTOCOL_CONFIG != 0, "no configuration space");
        frontend.send(SET_PROTOCOL_FEATURES, &words(&[PROTOCOL_CONFIG]), &[])?;
        Ok(frontend)
    }

    /// The disk's capacity in sectors of 512 bytes: the configuration space's first field (virtio 1.2, 5.2.4).
    pub fn capacity(&mut self) -> Result<u64> {
        // Offset, size, flags; space for the answer.
        let mut asked = halves(&[0, 8, 0]);
        asked.extend([0; 8]);
        self.send(GET_CONFIG, &asked, &[])?;
        let answer = self.reply(GET_CONFIG)?;
        let (_, capacity) = answer.split_last_chunk().context("a short answer")?;
        Ok(u64::from_le_bytes(*capacity))
    }

    /// Shares the memory, all of it, from address 0 on.
    pub fn share(&mut self, memory: &Memory) -> Result<()> {
        // One region: guest address, size, address of the front-end's own, offset in the file.
        let mut table = halves(&[1, 0]);
        table.extend(words(&[0, memory.len() as u64, 0, 0]));
        self.send(SET_MEM_TABLE, &table, &[memory.fd()])
    }

    /// Starts the queue.
    pub fn start(&mut self, vring: &Vring<'_>) -> Result<()> {
        self.send(SET_VRING_NUM, &halves(&[0, vring.size.into()]), &[])?;
        self.send(SET_VRING_BASE, &halves(&[0, 0]), &[])?;
        // Index and flags; descriptors, used, available, log.
        let mut addresses = halves(&[0, 0]);
        addresses.extend(words(&[0, vring.used, vring.available, 0]));
        self.send(SET_VRING_ADDR, &addresses, &[])?;
        self.send(SET_VRING_CALL, &words(&[0]), &[vring.call.as_fd()])?;
        self.send(SET_VRING_KICK, &words(&[0]), &[vring.kick.as_fd()])?;
        self.send(SET_VRING_ENABLE, &halves(&[0, 1]), &[])?;
        // An export that was told of something it does not take hangs up: then this is not answered.
        self.number(GET_FEATURES).map(drop)
    }

    fn number(&mut self, request: u32) -> Result<u64> {
        self.send(request, &[], &[])?;
        let answer = self.reply(request)?;
        let answer = answer.first_chunk().context("a short answer")?;
        Ok(u64::from_ne_bytes(*answer))
    }

    fn send(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut message = halves(&[request, VERSION, payload.len() as u32]);
        message.extend(payload);
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
        let mut header = [0; HEADER];
        let read = self.0.read_exact(&mut header);
        read.context("the export does not answer")?;
        let (of, size) = (header.first_chunk(), header.last_chunk());
        let (of, size) = of.zip(size).context("a short header")?;
        ensure!(
            u32::from_ne_bytes(*of) == request,
            "an answer to something else"
        );
        let size = u32::from_ne_bytes(*size) as usize;
        ensure!(size <= MAX_REPLY, "an answer of {size} bytes");
        let mut payload = vec![0; size];
        self.0.read_exact(&mut payload)?;
        Ok(payload)
    }
}

fn halves(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

fn words(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}
