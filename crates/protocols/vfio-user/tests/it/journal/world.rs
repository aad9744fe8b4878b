//! A server, and what outlives it: its keeper, its sockets and pipes, and the device.

use keeper::{Keeping, Ledger, Link};
use receive::Socket;
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
    recvmsg, socketpair,
};
use state_memory::{DescriptorKind, DescriptorLedger, Layout, StateMemory};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};
use vfio_user::wire::{self};
use vfio_user::*;

pub const BAR0: u32 = 0;
pub const BAR2: u32 = 2;
/// Bytes of the files that are mapped.
pub const PAGE_SIZE: u64 = 0x4000;
pub const BUFFER_SIZE: u64 = 0x8000;
/// Offset in BAR 0 of a counter that a client increments by posted writes, in order.
pub const COUNTER: u64 = 0x3f80;
pub const MSIX: u32 = 2;
pub const VECTORS: u32 = 33;
/// Requests under way.
pub const DEPTH: usize = 6;

/// As good as any, and the same each time.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Size, file and keeper's number of a window.
type Window = (u64, u64, Option<NonZeroU32>);

/// The device, which is left as it is when its process dies between two calls.
pub struct Disk {
    pub bar: Vec<u8>,
    pub page: OwnedFd,
    /// All of it is mapped.
    pub buffer: OwnedFd,
    pub windows: BTreeMap<u64, Window>,
    pub vectors: BTreeMap<u32, (u64, Option<NonZeroU32>)>,
    /// An operation is under way.
    pub pending: bool,
    /// The window that is to be there when the operation ends.
    mapping: Option<(u64, Window)>,
    pub defer: bool,
    pub resets: u32,
    pub disconnects: u32,
    pub numbers: VecDeque<Option<NonZeroU32>>,
}

static AREA: [MmapArea; 1] = [MmapArea {
    offset: 0x1000,
    size: 0x1000,
}];

impl Disk {
    pub fn new() -> Self {
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
            mapping: None,
            defer: false,
            resets: 0,
            disconnects: 0,
            numbers: VecDeque::new(),
        }
    }

    pub fn outcome(&mut self) -> OperationOutcome {
        self.pending = self.defer;
        if self.pending {
            OperationOutcome::Pending
        } else {
            OperationOutcome::Done
        }
    }

    /// The operation ends: in order, or with its process, which has then mapped nothing.
    pub fn end_operation(&mut self, is_done: bool) {
        self.pending = false;
        let mapping = self.mapping.take().filter(|_| is_done);
        self.windows.extend(mapping);
    }

    pub fn needed(&self) -> BTreeSet<NonZeroU32> {
        let windows = self.windows.values().filter_map(|(.., number)| *number);
        let vectors = self.vectors.values().filter_map(|(_, number)| *number);
        windows.chain(vectors).collect()
    }
}

pub fn inode(fd: &OwnedFd) -> u64 {
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

    fn region_write(
        &mut self,
        _: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<OperationOutcome, Errno> {
        let to = offset as usize;
        if offset == COUNTER {
            // A write may be handled again, and none before it.
            let count = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
            let (before, now) = (count(&self.bar[to..to + 8]), count(data));
            assert!(now == before || now == before + 1, "{now} after {before}");
        }
        self.bar[to..to + data.len()].copy_from_slice(data);
        Ok(match offset {
            0 => self.outcome(),
            _ => OperationOutcome::Done,
        })
    }

    fn irq(&self, index: u32) -> Option<IrqInfo> {
        (index == MSIX).then(|| IrqInfo {
            count: VECTORS,
            eventfd: true,
            ..IrqInfo::default()
        })
    }

    fn set_irqs(&mut self, irqs: SetIrqs) -> Result<OperationOutcome, Errno> {
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

    fn dma_map(&mut self, map: DmaMapping, fd: Option<OwnedFd>) -> Result<OperationOutcome, Errno> {
        let number = self.numbers.pop_front().flatten();
        let fd = fd.ok_or(Errno::INVAL)?;
        if self.windows.contains_key(&map.iova) {
            return Err(Errno::EXIST);
        }
        self.mapping = Some((map.iova, (map.size, inode(&fd), number)));
        let outcome = self.outcome();
        if outcome == OperationOutcome::Done {
            self.end_operation(true);
        }
        Ok(outcome)
    }

    fn dma_map_again(
        &mut self,
        map: DmaMapping,
        fd: Option<OwnedFd>,
    ) -> Result<OperationOutcome, Errno> {
        let number = self.numbers.front().copied().flatten();
        let file = inode(fd.as_ref().unwrap());
        if self.windows.get(&map.iova) == Some(&(map.size, file, number)) {
            self.numbers.clear();
            return Ok(OperationOutcome::Done);
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

    fn reset(&mut self) -> Result<OperationOutcome, Errno> {
        self.resets += 1;
        Ok(self.outcome())
    }

    fn disconnected(&mut self) {
        self.end_operation(false);
        self.windows.clear();
        self.vectors.clear();
        self.disconnects += 1;
    }
}

/// The keeper: what it keeps, and the socket of the process that is there.
pub struct Keeper {
    pub kept: BTreeMap<String, OwnedFd>,
    pub channel: Option<OwnedFd>,
}

impl Keeper {
    pub fn link(&mut self) -> Link {
        let flags = SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (ours, theirs) = pair.unwrap();
        self.channel = Some(ours);
        Link::new(theirs, Keeping::Process(7), 1000, self.kept.keys().cloned())
    }

    /// Does what it was told so far.
    pub fn handle(&mut self) {
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
pub struct World {
    pub state: OwnedFd,
    pub keeper: Keeper,
    pub replies: (OwnedFd, OwnedFd),
    pub counter: (OwnedFd, OwnedFd),
    pub client: OwnedFd,
    pub disk: Disk,
    /// With the receiver process's part played by this one.
    pub limits: ServerLimits,
    /// The keeper is late with each answer, and the number of turns in which it was behind.
    pub is_late: bool,
    pub behind: u32,
}

/// A process that serves.
pub struct Process {
    pub connection: Connection,
    pub ledger: Rc<RefCell<Ledger>>,
}

pub fn nonblocking_pipe() -> (OwnedFd, OwnedFd) {
    let Pipe { reader, writer } = Pipe::new().unwrap();
    (reader, writer)
}

pub fn copy(pipe: &(OwnedFd, OwnedFd)) -> Pipe {
    Pipe {
        reader: pipe.0.try_clone().unwrap(),
        writer: pipe.1.try_clone().unwrap(),
    }
}

impl World {
    pub fn new() -> (Self, OwnedFd) {
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
            limits: ServerLimits::default(),
            is_late: false,
            behind: 0,
        };
        (world, peer)
    }

    /// A process begins where the last one has stopped.
    pub fn start(&mut self) -> Process {
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
    pub fn turn(&mut self, process: &mut Process, complete: bool) {
        let late = Duration::from_secs(if self.is_late { 60 } else { 0 });
        let _ = process.ledger.borrow_mut().advance(Instant::now() + late);
        process.connection.keeper_answered();
        if complete {
            process.connection.settle();
        }
        let status = if complete && self.disk.pending {
            self.disk.end_operation(true);
            process.connection.complete(&mut self.disk, Ok(()))
        } else {
            process.connection.on_ready(&mut self.disk)
        };
        self.behind += u32::from(process.connection.is_behind());
        assert_ne!(status, Ok(ConnectionStatus::Closed), "the client is there");
        if let Err(error) = status {
            panic!("{error}");
        }
    }
}
