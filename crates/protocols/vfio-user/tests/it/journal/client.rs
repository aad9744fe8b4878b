//! A client that is strict.

use crate::common::{dma_map, dma_unmap, message, region_read, region_write, set_irqs, try_send};
use crate::journal::world::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, fstat, memfd_create};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::collections::{BTreeMap, VecDeque};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use vfio_user::wire::{self, Command, Header};
use zerocopy::{FromBytes, IntoBytes};

/// What a client expects for an answer.
pub struct Expected {
    pub id: u16,
    pub command: Command,
    pub payload: Option<Vec<u8>>,
    /// Size of the file that comes with it.
    pub file: Option<u64>,
}

/// A client that takes nothing but what has to come.
pub struct Client {
    pub socket: OwnedFd,
    pub bar: Vec<u8>,
    pub windows: BTreeMap<u64, OwnedFd>,
    pub vectors: BTreeMap<u32, OwnedFd>,
    pub expected: VecDeque<Expected>,
    /// Messages for which there was no room.
    pub unsent: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    pub next_id: u16,
    pub resets: u32,
    /// Number of posted writes to the counter, and of those that follow at once.
    pub counted: u64,
    pub counts: u64,
    pub answered: u32,
    /// A part of a message.
    pub header: Option<(Header, Vec<OwnedFd>)>,
    pub body: Vec<u8>,
}

impl Client {
    pub fn new(socket: OwnedFd) -> Self {
        let mut client = Self {
            socket,
            bar: vec![0; 0x4000],
            windows: BTreeMap::new(),
            vectors: BTreeMap::new(),
            expected: VecDeque::new(),
            unsent: VecDeque::new(),
            next_id: 1,
            resets: 0,
            counted: 0,
            counts: 0,
            answered: 0,
            header: None,
            body: Vec::new(),
        };
        let text = concat!(
            r#"{"capabilities":{"max_msg_fds":8,"max_data_xfer_size":1048576,"#,
            r#""write_multiple":true}}"#
        );
        let version = wire::Version { major: 0, minor: 0 };
        let bytes = message(
            1,
            Command::VERSION,
            0,
            &[version.as_bytes(), text.as_bytes(), &[0]],
        );
        client.ask(bytes, Vec::new(), None, None);
        client
    }

    pub fn ask(
        &mut self,
        bytes: Vec<u8>,
        fds: Vec<OwnedFd>,
        payload: Option<Vec<u8>>,
        file: Option<u64>,
    ) {
        let header = Header::read_from_prefix(&bytes).unwrap().0;
        if header.flags & wire::flags::NO_REPLY == 0 {
            self.expected.push_back(Expected {
                id: header.message_id,
                command: header.command,
                payload,
                file,
            });
        }
        self.next_id = self.next_id.wrapping_add(1);
        self.unsent.push_back((bytes, fds));
    }

    pub fn post(&mut self, random: &mut Random) {
        let id = self.next_id;
        let offset = random.below(0x3f00);
        if self.counts > 0 {
            self.counts -= 1;
            self.counted += 1;
            let data = self.counted.to_le_bytes();
            self.bar[COUNTER as usize..][..8].copy_from_slice(&data);
            let bytes = region_write(id, wire::flags::NO_REPLY, BAR0, COUNTER, &data);
            return self.ask(bytes, Vec::new(), None, None);
        }
        match random.below(17) {
            16 => self.counts = 1 + random.below(12),
            0..=4 => {
                let data: Vec<u8> = (0..1 + random.below(64))
                    .map(|_| random.next() as u8)
                    .collect();
                // At 0 the answer is deferred.
                let offset = if random.below(4) == 0 { 0 } else { offset };
                self.bar[offset as usize..][..data.len()].copy_from_slice(&data);
                let flags = if random.below(3) == 0 {
                    wire::flags::NO_REPLY
                } else {
                    0
                };
                let bytes = region_write(id, flags, BAR0, offset, &data);
                let echo = bytes[16..32].to_vec();
                self.ask(bytes, Vec::new(), Some(echo), None);
            }
            5..=8 => {
                let count = match random.below(8) {
                    0 => 0x4000 - offset,
                    _ => 1 + random.below(0x100),
                };
                let bytes = region_read(id, BAR0, offset, count as u32);
                let data = &self.bar[offset as usize..][..count as usize];
                let answer = [&bytes[16..], data].concat();
                self.ask(bytes, Vec::new(), Some(answer), None);
            }
            9 | 10 => {
                let iova = 0x10000 * (1 + random.below(20));
                let file = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
                if self.windows.remove(&iova).is_some() {
                    let bytes = dma_unmap(id, iova);
                    let answer = bytes[16..].to_vec();
                    self.ask(bytes, Vec::new(), Some(answer), None);
                } else {
                    let sent = file.try_clone().unwrap();
                    self.windows.insert(iova, file);
                    self.ask(dma_map(id, iova), vec![sent], Some(Vec::new()), None);
                }
            }
            11 | 12 => {
                let (start, count) = (random.below(25) as u32, 1 + random.below(8) as u32);
                let events: Vec<OwnedFd> = (0..count)
                    .map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap())
                    .collect();
                let sent = events.iter().map(|event| event.try_clone().unwrap());
                let sent: Vec<OwnedFd> = match random.below(4) {
                    0 => Vec::new(),
                    _ => sent.collect(),
                };
                for (vector, event) in (start..).zip(events) {
                    if sent.is_empty() {
                        drop(self.vectors.remove(&vector))
                    } else {
                        drop(self.vectors.insert(vector, event))
                    }
                }
                let flags = wire::irq_set::DATA_EVENTFD | wire::irq_set::ACTION_TRIGGER;
                let bytes = set_irqs(id, flags, MSIX, start, count, &[]);
                self.ask(bytes, sent, Some(Vec::new()), None);
            }
            13 | 14 => {
                let (index, size) = match random.below(2) {
                    0 => (BAR0, PAGE_SIZE),
                    _ => (BAR2, BUFFER_SIZE),
                };
                let info = wire::RegionInfo {
                    argsz: 4096,
                    index,
                    ..wire::RegionInfo::default()
                };
                let bytes = message(id, Command::DEVICE_GET_REGION_INFO, 0, &[info.as_bytes()]);
                self.ask(bytes, Vec::new(), None, Some(size));
            }
            _ => {
                self.resets += 1;
                let bytes = message(id, Command::DEVICE_RESET, 0, &[]);
                self.ask(bytes, Vec::new(), Some(Vec::new()), None);
            }
        }
    }

    /// Sends what there is room for; a long message may go in pieces.
    pub fn send(&mut self) {
        while let Some((bytes, fds)) = self.unsent.front_mut() {
            let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            match try_send(self.socket.as_fd(), bytes, &borrowed) {
                Ok(sent) if sent == bytes.len() => drop(self.unsent.pop_front()),
                Ok(sent) => {
                    bytes.drain(..sent);
                    fds.clear();
                }
                Err(Errno::AGAIN) => return,
                Err(errno) => panic!("{errno}"),
            }
        }
    }

    pub fn receive(&self, bytes: &mut [u8]) -> Option<(usize, Vec<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let parts = &mut [IoSliceMut::new(bytes)];
        let received = match recvmsg(&self.socket, parts, &mut control, flags) {
            Err(Errno::AGAIN) => return None,
            received => received.unwrap(),
        };
        assert!(received.bytes > 0, "the server is to be there for ever");
        let fds = control.drain().flat_map(|ancillary| match ancillary {
            RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
            _ => Vec::new(),
        });
        Some((received.bytes, fds.collect()))
    }

    /// Takes answers, each of which has to be the one that comes next.
    pub fn take(&mut self) {
        loop {
            if self.header.is_none() {
                let mut bytes = [0; 16];
                let Some((len, fds)) = self.receive(&mut bytes) else {
                    return;
                };
                // As QEMU wants it.
                assert_eq!(len, 16, "a header is in one piece");
                let header = Header::read_from_bytes(&bytes).unwrap();
                self.header = Some((header, fds));
                self.body = vec![];
            }
            let size = self.header.as_ref().unwrap().0.message_size as usize - 16;
            while self.body.len() < size {
                let mut bytes = vec![0; size - self.body.len()];
                let Some((len, fds)) = self.receive(&mut bytes) else {
                    return;
                };
                assert!(fds.is_empty(), "descriptors come with a header");
                self.body.extend(&bytes[..len]);
            }
            let (header, fds) = self.header.take().unwrap();
            let expected = self.expected.pop_front().expect("nothing was asked");
            assert_eq!(
                (header.message_id, header.command),
                (expected.id, expected.command)
            );
            assert_eq!((header.flags, header.error), (wire::flags::REPLY, 0));
            if let Some(payload) = expected.payload {
                assert!(
                    self.body == payload,
                    "{} {:?}",
                    expected.id,
                    expected.command
                );
            }
            // It is dropped at once.
            let sizes = fds.iter().map(|fd| fstat(fd).unwrap().st_size as u64);
            assert!(sizes.eq(expected.file), "another file");
            self.answered += 1;
        }
    }
}
