//! Messages exactly once: a strict client, and a server that dies at every point there is.
//!
//! What outlives the server is what a keeper and the kernel have: the session's memory, pipes,
//! sockets, descriptors. The device is a part of it, as a controller with its state memory is.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

mod common;

use common::{dma_map, dma_unmap, message, region_read, region_write, set_irqs, try_send};
use crash::Crashed;
use keeper::{Keeping, Ledger, Link};
use receive::Socket;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
    recvmsg, socketpair,
};
use state_memory::{DescriptorKind, Layout, StateMemory};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Instant;
use vfio_user::wire::{self, Command, Header};
use vfio_user::*;
use zerocopy::{FromBytes, IntoBytes};

const BAR0: u32 = 0;
const BAR2: u32 = 2;
/// Bytes of the files that are mapped.
const PAGE_SIZE: u64 = 0x4000;
const BUFFER_SIZE: u64 = 0x8000;
const MSIX: u32 = 2;
const VECTORS: u32 = 33;
/// Requests under way.
const DEPTH: usize = 6;

/// As good as any, and the same each time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// The device, which is left as it is when its process dies between two calls.
struct Disk {
    bar: Vec<u8>,
    page: OwnedFd,
    /// All of it is mapped.
    buffer: OwnedFd,
    windows: BTreeMap<u64, (u64, u64, Option<NonZeroU32>)>,
    vectors: BTreeMap<u32, (u64, Option<NonZeroU32>)>,
    /// An operation is under way.
    pending: bool,
    defer: bool,
    resets: u32,
    disconnects: u32,
    numbers: VecDeque<Option<NonZeroU32>>,
}

static AREA: [MmapArea; 1] = [MmapArea {
    offset: 0x1000,
    size: 0x1000,
}];

impl Disk {
    fn new() -> Self {
        let page = memfd_create("page", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&page, PAGE_SIZE).unwrap();
        let buffer = memfd_create("buffer", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&buffer, BUFFER_SIZE).unwrap();
        Self {
            bar: vec![0; 0x4000],
            page,
            buffer,
            windows: BTreeMap::new(),
            vectors: BTreeMap::new(),
            pending: false,
            defer: false,
            resets: 0,
            disconnects: 0,
            numbers: VecDeque::new(),
        }
    }

    fn outcome(&mut self) -> Outcome {
        self.pending = self.defer;
        match self.pending {
            true => Outcome::Pending,
            false => Outcome::Done,
        }
    }

    fn needed(&self) -> BTreeSet<NonZeroU32> {
        let windows = self.windows.values().filter_map(|(.., number)| *number);
        let vectors = self.vectors.values().filter_map(|(_, number)| *number);
        windows.chain(vectors).collect()
    }
}

fn inode(fd: &OwnedFd) -> u64 {
    fstat(fd).unwrap().st_ino
}

impl Device for Disk {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            reset: true,
            pci: true,
            num_regions: 9,
            num_irqs: 5,
        }
    }

    fn region(&self, index: u32) -> Option<RegionInfo<'_>> {
        let (size, areas): (_, &[MmapArea]) = match index {
            BAR0 => (self.bar.len() as u64, &AREA),
            BAR2 => (BUFFER_SIZE, &[]),
            _ => return None,
        };
        let fd = self.sent_file(index)?;
        Some(RegionInfo {
            size,
            read: true,
            write: true,
            mmap: Some(RegionMmap {
                fd,
                offset: 0,
                areas,
            }),
        })
    }

    fn region_read(&mut self, _: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        let from = offset as usize;
        data.copy_from_slice(&self.bar[from..from + data.len()]);
        Ok(())
    }

    fn region_write(&mut self, _: u32, offset: u64, data: &[u8]) -> Result<Outcome, Errno> {
        let to = offset as usize;
        self.bar[to..to + data.len()].copy_from_slice(data);
        Ok(match offset {
            0 => self.outcome(),
            _ => Outcome::Done,
        })
    }

    fn irq(&self, index: u32) -> Option<IrqInfo> {
        (index == MSIX).then(|| IrqInfo {
            count: VECTORS,
            eventfd: true,
            ..IrqInfo::default()
        })
    }

    fn set_irqs(&mut self, irqs: SetIrqs) -> Result<Outcome, Errno> {
        match irqs.data {
            IrqData::Eventfd(fds) => {
                for (vector, fd) in (irqs.start..).zip(fds) {
                    let number = self.numbers.pop_front().flatten();
                    match fd {
                        Some(fd) => drop(self.vectors.insert(vector, (inode(&fd), number))),
                        None => drop(self.vectors.remove(&vector)),
                    }
                }
            }
            IrqData::None if irqs.count == 0 => self.vectors.clear(),
            _ => return Err(Errno::INVAL),
        }
        Ok(self.outcome())
    }

    fn dma_map(&mut self, map: DmaMapping, fd: Option<OwnedFd>) -> Result<(), Errno> {
        let number = self.numbers.pop_front().flatten();
        let fd = fd.ok_or(Errno::INVAL)?;
        if self.windows.contains_key(&map.iova) {
            return Err(Errno::EXIST);
        }
        self.windows
            .insert(map.iova, (map.size, inode(&fd), number));
        Ok(())
    }

    fn dma_map_again(&mut self, map: DmaMapping, fd: Option<OwnedFd>) -> Result<(), Errno> {
        let number = self.numbers.front().copied().flatten();
        let file = inode(fd.as_ref().unwrap());
        if self.windows.get(&map.iova) == Some(&(map.size, file, number)) {
            self.numbers.clear();
            return Ok(());
        }
        self.dma_map(map, fd)
    }

    fn dma_mapped(&self, unmap: DmaUnmapping) -> Result<u64, Errno> {
        Ok(match unmap {
            DmaUnmapping::Range { iova, .. } => self.windows.get(&iova).map_or(0, |w| w.0),
            DmaUnmapping::All => self.windows.values().map(|w| w.0).sum(),
        })
    }

    fn descriptors_kept(&mut self, numbers: &[Option<NonZeroU32>]) {
        self.numbers = numbers.iter().copied().collect();
    }

    fn sent_file(&self, region: u32) -> Option<BorrowedFd<'_>> {
        match region {
            BAR0 => Some(self.page.as_fd()),
            BAR2 => Some(self.buffer.as_fd()),
            _ => None,
        }
    }

    fn needs_kept(&self, number: NonZeroU32) -> bool {
        self.needed().contains(&number)
    }

    fn dma_unmap(&mut self, unmap: DmaUnmapping) -> Result<Unmapped, Errno> {
        let size = self.dma_mapped(unmap)?;
        match unmap {
            DmaUnmapping::Range { iova, .. } => drop(self.windows.remove(&iova)),
            DmaUnmapping::All => self.windows.clear(),
        }
        let outcome = self.outcome();
        Ok(Unmapped { size, outcome })
    }

    fn reset(&mut self) -> Result<Outcome, Errno> {
        self.resets += 1;
        Ok(self.outcome())
    }

    fn disconnected(&mut self) {
        self.windows.clear();
        self.vectors.clear();
        self.disconnects += 1;
    }
}

/// The keeper: what it keeps, and the socket of the process that is there.
struct Keeper {
    kept: BTreeMap<String, OwnedFd>,
    channel: Option<OwnedFd>,
}

impl Keeper {
    fn link(&mut self) -> Link {
        let flags = SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (ours, theirs) = pair.unwrap();
        self.channel = Some(ours);
        Link::new(theirs, Keeping::Systemd, 1000, self.kept.keys().cloned())
    }

    /// Does what it was told so far.
    fn handle(&mut self) {
        let Some(channel) = &self.channel else {
            return;
        };
        let mut text = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        loop {
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut text)];
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let Ok(received) = recvmsg(channel, &mut parts, &mut control, flags) else {
                return;
            };
            if received.bytes == 0 {
                return;
            }
            let fds = control.drain().flat_map(|ancillary| match ancillary {
                RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
                _ => Vec::new(),
            });
            let fd: Option<OwnedFd> = fds.last();
            let text = std::str::from_utf8(&text[..received.bytes]).unwrap();
            let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
            match (name, fd) {
                (Some(name), Some(fd)) => {
                    assert!(self.kept.insert(name.into(), fd).is_none(), "{name} twice");
                }
                // A process that was about to remove it may not have noted that.
                (Some(name), None) => drop(self.kept.remove(name)),
                // The answer to a barrier.
                (None, Some(_)) => {}
                (None, None) => panic!("{text}"),
            }
        }
    }
}

/// What is left when a process dies.
struct World {
    state: OwnedFd,
    keeper: Keeper,
    replies: (OwnedFd, OwnedFd),
    counter: (OwnedFd, OwnedFd),
    client: OwnedFd,
    disk: Disk,
    /// With the receiver process's part played by this one.
    limits: Limits,
}

/// A process that serves.
struct Process {
    connection: Connection,
    ledger: SharedLedger,
}

fn nonblocking_pipe() -> (OwnedFd, OwnedFd) {
    let Pipe { reader, writer } = Pipe::new().unwrap();
    (reader, writer)
}

fn copy(pipe: &(OwnedFd, OwnedFd)) -> Pipe {
    Pipe {
        reader: pipe.0.try_clone().unwrap(),
        writer: pipe.1.try_clone().unwrap(),
    }
}

impl World {
    fn new() -> (Self, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let (client, peer) = pair.unwrap();
        let state = StateMemory::create(Layout {
            queues: 0,
            shares: 0,
            commands: 0,
            windows: 0,
            descriptors: 256,
            session: SESSION,
        });
        let state = state.unwrap().fd().try_clone_to_owned().unwrap();
        let world = Self {
            state,
            keeper: Keeper {
                kept: BTreeMap::new(),
                channel: None,
            },
            replies: nonblocking_pipe(),
            counter: nonblocking_pipe(),
            client,
            disk: Disk::new(),
            limits: Limits::default(),
        };
        (world, peer)
    }

    /// A process begins where the last one has stopped.
    fn start(&mut self) -> Process {
        self.keeper.handle();
        let state = StateMemory::open(self.state.try_clone().unwrap()).unwrap();
        let link = self.keeper.link();
        let ledger = Ledger::new("d1".into(), state.descriptors().unwrap(), &link);
        let ledger = Rc::new(RefCell::new(ledger));
        let setup = || JournalSetup {
            area: state.session(),
            ledger: ledger.clone(),
            replies: copy(&self.replies),
            counter: copy(&self.counter),
        };
        // What the keeper has and nobody knows is rubbish.
        let noted = ledger.borrow().noted();
        let names: BTreeSet<String> = noted
            .iter()
            .map(|noted| ledger.borrow().name(noted.number))
            .collect();
        self.keeper.kept.retain(|name, _| names.contains(name));
        let socket = Socket::in_place(self.client.try_clone().unwrap(), wire::MAX_MSG_FDS);
        let journal = Journal::new(setup()).unwrap();
        let connection = match journal.client() {
            Some(_) => {
                let kept = &self.keeper.kept;
                let fd = |number: NonZeroU32| {
                    Some(kept.get(&format!("d1.{number}"))?.try_clone().unwrap())
                };
                Connection::resume(socket, self.limits, setup(), fd, &self.disk).unwrap()
            }
            None => {
                let is_client = |noted: &&state_memory::Descriptor| {
                    noted.kind == DescriptorKind::CLIENT
                        && self
                            .keeper
                            .kept
                            .contains_key(&format!("d1.{}", noted.number))
                };
                let kept = noted.iter().find(is_client).map(|noted| noted.number);
                for other in noted.iter().filter(|noted| Some(noted.number) != kept) {
                    ledger.borrow_mut().forget(other.number);
                }
                Connection::kept(socket, self.limits, journal, kept)
            }
        };
        Process { connection, ledger }
    }

    /// The process does what there is to do, once.
    fn turn(&mut self, process: &mut Process, complete: bool) {
        let _ = process.ledger.borrow_mut().advance(Instant::now());
        let status = if complete && self.disk.pending {
            self.disk.pending = false;
            process.connection.complete(&mut self.disk, Ok(()))
        } else {
            process.connection.on_ready(&mut self.disk)
        };
        assert_ne!(status, Ok(ConnectionStatus::Closed), "the client is there");
        if let Err(error) = status {
            panic!("{error}");
        }
    }
}

/// What a client expects for an answer.
struct Expected {
    id: u16,
    command: Command,
    payload: Option<Vec<u8>>,
    /// Size of the file that comes with it.
    file: Option<u64>,
}

/// A client that takes nothing but what has to come.
struct Client {
    socket: OwnedFd,
    bar: Vec<u8>,
    windows: BTreeMap<u64, OwnedFd>,
    vectors: BTreeMap<u32, OwnedFd>,
    expected: VecDeque<Expected>,
    /// Messages for which there was no room.
    unsent: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    next_id: u16,
    resets: u32,
    answered: u32,
    /// A part of a message.
    header: Option<(Header, Vec<OwnedFd>)>,
    body: Vec<u8>,
}

impl Client {
    fn new(socket: OwnedFd) -> Self {
        let mut client = Self {
            socket,
            bar: vec![0; 0x4000],
            windows: BTreeMap::new(),
            vectors: BTreeMap::new(),
            expected: VecDeque::new(),
            unsent: VecDeque::new(),
            next_id: 1,
            resets: 0,
            answered: 0,
            header: None,
            body: Vec::new(),
        };
        let text = br#"{"capabilities":{"max_msg_fds":8,"max_data_xfer_size":1048576,"write_multiple":true}}"#;
        let version = wire::Version { major: 0, minor: 0 };
        let bytes = message(1, Command::VERSION, 0, &[version.as_bytes(), text, &[0]]);
        client.ask(bytes, Vec::new(), None, None);
        client
    }

    fn ask(
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

    fn post(&mut self, random: &mut Random) {
        let id = self.next_id;
        let offset = random.below(0x3f00);
        match random.below(16) {
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
                    match sent.is_empty() {
                        true => drop(self.vectors.remove(&vector)),
                        false => drop(self.vectors.insert(vector, event)),
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
    fn send(&mut self) {
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

    fn receive(&self, bytes: &mut [u8]) -> Option<(usize, Vec<OwnedFd>)> {
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
    fn take(&mut self) {
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

/// Dies now and then; how often at which point.
struct Deaths {
    random: Random,
    points: Vec<&'static str>,
    seen: BTreeMap<&'static str, u32>,
}

impl Deaths {
    /// Chooses where to die next. `has_died`: the next process begins, and may die of that, too.
    fn arm(&mut self, has_died: bool) {
        if self.points.is_empty() {
            return;
        }
        // A process that always dies again gets nowhere.
        if has_died && self.random.below(3) == 0 {
            return crash::disarm();
        }
        let of_resumption: Vec<&str> = self
            .points
            .iter()
            .copied()
            .filter(|point| OF_RESUMPTION.contains(point))
            .collect();
        let points = match has_died && !of_resumption.is_empty() && self.random.below(2) == 0 {
            true => &of_resumption,
            false => &self.points,
        };
        let point = points[self.random.below(points.len() as u64) as usize];
        crash::arm(point, 1 + self.random.below(3));
    }

    /// Runs a part of a process. `None`: it has died.
    fn run<T>(&mut self, part: impl FnOnce() -> T) -> Option<T> {
        match catch_unwind(AssertUnwindSafe(part)) {
            Ok(done) => Some(done),
            Err(payload) => match payload.downcast::<Crashed>() {
                Ok(crashed) => {
                    *self.seen.entry(crashed.0).or_default() += 1;
                    self.arm(true);
                    None
                }
                Err(payload) => std::panic::resume_unwind(payload),
            },
        }
    }
}

/// Has a client talk to a server that dies at these points, until it has had so many answers.
fn talk(points: &[&'static str], answers: u32, seed: u64) -> BTreeMap<&'static str, u32> {
    let (mut world, peer) = World::new();
    let mut random = Random(seed);
    let mut client = Client::new(peer);
    let mut deaths = Deaths {
        random: Random(seed ^ 0x5555),
        points: points.to_vec(),
        seen: BTreeMap::new(),
    };
    crash::disarm();
    deaths.arm(false);
    let mut process = None;
    let (mut idle, mut turns) = (0, 0);
    while client.answered < answers || !client.expected.is_empty() {
        if client.answered < answers && client.expected.len() < DEPTH && random.below(3) > 0 {
            client.post(&mut random);
        }
        client.send();
        turns += 1;
        if turns % 200 == 0 {
            // The last one was not passed any more.
            deaths.arm(false);
        }
        world.disk.defer = random.below(2) == 0;
        let complete = random.below(3) > 0;
        process = match process {
            None => deaths.run(|| world.start()),
            Some(mut running) => deaths
                .run(|| world.turn(&mut running, complete))
                .map(|()| running),
        };
        if process.is_none() {
            // An operation that was under way is begun again.
            world.disk.pending = false;
        }
        if random.below(4) > 0 {
            world.keeper.handle();
        }
        let before = client.answered;
        if random.below(4) > 0 {
            client.take();
        }
        idle = if client.answered == before {
            idle + 1
        } else {
            0
        };
        assert!(
            idle < 10_000,
            "{} answers, then none; died {:?}, {points:?} seed {seed:#x}",
            client.answered,
            deaths.seen,
        );
    }
    crash::disarm();
    // Posted writes at the end, and what the keeper is told.
    let mut running = process.unwrap_or_else(|| world.start());
    for _ in 0..20 {
        world.keeper.handle();
        world.turn(&mut running, true);
    }
    client.take();
    assert!(client.expected.is_empty());
    assert!(
        world.disk.bar == client.bar,
        "every write counts once, in order"
    );
    assert!(world.disk.resets >= client.resets);
    assert_eq!(world.disk.disconnects, 0);
    let files: BTreeMap<u64, u64> = world
        .disk
        .windows
        .iter()
        .map(|(at, w)| (*at, w.1))
        .collect();
    let sent: BTreeMap<u64, u64> = client
        .windows
        .iter()
        .map(|(at, fd)| (*at, inode(fd)))
        .collect();
    assert_eq!(files, sent);
    let vectors: Vec<u32> = world.disk.vectors.keys().copied().collect();
    assert!(client.vectors.keys().copied().eq(vectors));
    // Nothing is kept that is not needed, and nothing is missing.
    let mut needed: BTreeSet<String> = world
        .disk
        .needed()
        .iter()
        .map(|number| format!("d1.{number}"))
        .collect();
    assert_eq!(needed.len(), files.len() + client.vectors.len());
    let client_number = running.ledger.borrow().noted().into_iter();
    let mut clients = client_number.filter(|noted| noted.kind == DescriptorKind::CLIENT);
    needed.insert(format!("d1.{}", clients.next().unwrap().number));
    assert!(clients.next().is_none());
    let kept: BTreeSet<String> = world.keeper.kept.keys().cloned().collect();
    assert_eq!(kept, needed);
    assert_eq!(running.ledger.borrow().noted().len(), needed.len());
    // The end is the end.
    running.connection.close(&mut world.disk);
    world.keeper.handle();
    assert!(world.keeper.kept.is_empty() && running.ledger.borrow().noted().is_empty());
    deaths.seen
}

/// Points that are passed only by a process that goes on with another's client.
const OF_RESUMPTION: &[&str] = &[
    "vfio-user.resume.received",
    "vfio-user.resume.drained",
    "vfio-user.resume.piped",
    "vfio-user.resume.heading",
    "vfio-user.resume.done",
];

/// Of the end of a connection.
const OF_END: &[&str] = &["vfio-user.connection.shut", "vfio-user.journal.ended"];

fn all_points() -> Vec<&'static str> {
    crash::disarm();
    talk(&[], 300, 7);
    let mut points = passed_points();
    points.extend(OF_RESUMPTION);
    points
}

/// Those that a conversation without deaths passes.
fn passed_points() -> Vec<&'static str> {
    let (mut world, peer) = World::new();
    let mut random = Random(99);
    let mut client = Client::new(peer);
    crash::disarm();
    let mut process = world.start();
    for _ in 0..3000 {
        if client.expected.len() < DEPTH {
            client.post(&mut random);
        }
        client.send();
        world.disk.defer = random.below(2) == 0;
        world.keeper.handle();
        world.turn(&mut process, true);
        client.take();
    }
    let mut passed: Vec<&'static str> = crash::passed().into_keys().collect();
    passed.retain(|point| !OF_END.contains(point));
    passed
}

#[test]
fn a_server_that_lives_answers_everything() {
    talk(&[], 2000, 1);
}

#[test]
fn a_server_may_die_anywhere() {
    std::panic::set_hook(Box::new(|info| {
        if info.payload().downcast_ref::<Crashed>().is_none() {
            eprintln!("{info}");
        }
    }));
    let points = all_points();
    assert!(points.len() > 20, "{points:?}");
    let mut seen = BTreeMap::<&str, u32>::new();
    let mut add = |deaths: BTreeMap<&'static str, u32>| {
        for (point, times) in deaths {
            *seen.entry(point).or_default() += times;
        }
    };
    let rounds = std::env::var("VNVME_DEATHS").map_or(1, |text| text.parse().unwrap());
    for seed in 1..=4 * rounds {
        add(talk(&points, 6000, seed * 0x9e37));
    }
    // Then each by itself, and what leads to it; also at the start of a conversation.
    for &point in &points {
        let before: &[&str] = match point {
            "vfio-user.resume.received" => &["vfio-user.take.moved"],
            "vfio-user.resume.drained" | "vfio-user.resume.piped" => &[
                "vfio-user.reply.writing",
                "vfio-user.reply.written",
                "vfio-user.reply.moved",
                "vfio-user.message.answered",
            ],
            "vfio-user.resume.heading" => &["vfio-user.reply.written", "vfio-user.reply.headed"],
            "vfio-user.resume.done" => &["vfio-user.message.handled"],
            _ => &[],
        };
        let these = [before, &[point]].concat();
        let (mut times, mut seed) = (0, 1);
        while times < 20 * rounds as u32 {
            let deaths = talk(&these, if seed % 2 == 0 { 5 } else { 100 }, seed * 0x79b9);
            times += deaths.get(point).copied().unwrap_or(0);
            add(deaths);
            seed += 1;
            assert!(seed < 1000 * rounds, "{point} is passed {times} times only");
        }
    }
    let total: u32 = seen.values().sum();
    println!("died {total} times: {seen:#?}");
    for point in points {
        let times = seen.get(point).copied().unwrap_or(0);
        assert!(times >= 20, "{point}: {times}");
    }
}
