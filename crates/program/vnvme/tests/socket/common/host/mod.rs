//! An NVMe host at the end of a vfio-user socket, which panics where a test cannot go on.

mod commands;
mod files;
pub mod flood;

use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use dma::Memory;
use nvme::pci::command;
use nvme::{Command, Completion};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use test_host::{Link, Pair, Shadow, Windows, doorbell};
use vfio_user::IrqAction;
use vfio_user::client::{Client, Irqs};

use super::WAIT_TIMEOUT;
pub use files::{leave, memfd, new_eventfd};
pub use test_host::{BAR0, CONFIG};

/// Interrupt types of a PCI device.
pub const INTX: u32 = 0;
pub const MSIX: u32 = 2;

/// Guest memory begins at this IOVA.
pub const RAM_BASE: u64 = 0x1_0000_0000;
/// Size of guest memory in bytes.
pub const RAM_SIZE: u64 = 16 << 20;

/// Entries of each queue.
const ENTRIES: u32 = 64;
/// Offsets in guest memory: an Identify page, a PRP list, queues at two pages each, data.
const AT_PAGE: u64 = 0;
const AT_LIST: u64 = 0x1000;
const AT_QUEUES: u64 = 0x2000;
const AT_SHADOW: u64 = 0xf_0000;
const AT_DATA: u64 = 0x10_0000;
/// Shadow doorbells and EventIdx.
const SHADOW: Shadow = Shadow {
    doorbells: RAM_BASE + AT_SHADOW,
    event_idx: RAM_BASE + AT_SHADOW + 0x1000,
};

fn pair(qid: u16) -> Pair {
    let sq = RAM_BASE + AT_QUEUES + u64::from(qid) * 0x2000;
    Pair::new(sq, sq + 0x1000, ENTRIES)
}

/// A host with its memory; the connection ends when it is dropped.
pub struct Host {
    host: test_host::Host,
    /// Guest memory, as a file that is read and written by offsets.
    pub ram: File,
    /// Block size of the namespaces that are read and written.
    pub block: usize,
    vectors: Vec<OwnedFd>,
}

impl Deref for Host {
    type Target = test_host::Host;

    fn deref(&self) -> &Self::Target {
        &self.host
    }
}

impl DerefMut for Host {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.host
    }
}

impl Host {
    /// Connects and gives the device all memory.
    pub fn attach(socket: &Path) -> Host {
        let mut host = Self::over(Client::connect(socket, WAIT_TIMEOUT).unwrap());
        host.map_ram();
        host
    }

    /// A host over a negotiated connection, without memory yet.
    pub fn over(client: Client) -> Host {
        Self::with_memory(client, memfd(RAM_SIZE))
    }

    /// A host over a negotiated connection, with this file as its memory.
    pub fn with_memory(client: Client, ram: File) -> Host {
        let file = ram.try_clone().unwrap().into();
        let mapping = Memory::from_fd(file, RAM_SIZE, true).unwrap();
        let windows = Windows::new(RAM_BASE, mapping);
        Host {
            host: test_host::Host::new(Link::new(client), windows, WAIT_TIMEOUT),
            ram,
            block: 512,
            vectors: Vec::new(),
        }
    }

    /// Connects and makes the controller ready, with one I/O queue pair.
    pub fn up(socket: &Path) -> Host {
        let mut host = Self::attach(socket);
        host.enable();
        host.create_queues(1, None);
        host
    }

    pub fn map_ram(&mut self) {
        let link = &mut self.host.link;
        link.map(RAM_BASE, RAM_SIZE, self.ram.as_fd()).unwrap();
    }

    /// Assigns eventfds to that many MSI-X vectors.
    pub fn assign_vectors(&mut self, count: usize) {
        self.vectors = (0..count).map(|_| new_eventfd()).collect();
        let fds: Vec<Option<BorrowedFd<'_>>> =
            self.vectors.iter().map(|fd| Some(fd.as_fd())).collect();
        self.host
            .client
            .set_irqs(MSIX, 0, IrqAction::Trigger, Irqs::Eventfds(&fds))
            .unwrap();
    }

    /// Waits for a vector's interrupt; returns how many there were.
    pub fn interrupt(&self, vector: usize) -> u64 {
        let fd = &self.vectors[vector];
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        let limit = Timespec {
            tv_sec: WAIT_TIMEOUT.as_secs() as i64,
            tv_nsec: 0,
        };
        assert_eq!(poll(&mut fds, Some(&limit)), Ok(1), "no interrupt");
        self.interrupts(vector)
    }

    /// Takes a vector's interrupts, if there are any.
    pub fn interrupts(&self, vector: usize) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(&self.vectors[vector], &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(_) => 0,
        }
    }

    /// Maps the doorbell page; doorbells are rung by stores from now on.
    pub fn map_doorbells(&mut self) {
        let region = self.client.region_info(BAR0).unwrap();
        let mapping = region.mmap.expect("BAR0 can be mapped");
        assert_eq!(mapping.areas.len(), 1);
        assert_eq!(
            (mapping.areas[0].offset, mapping.areas[0].size),
            (0x1000, 0x1000)
        );
        assert_eq!(mapping.offset, 0);
        self.mapped = Some(Memory::from_fd(mapping.fd, 0x2000, true).unwrap());
    }

    pub fn read32(&mut self, offset: u64) -> u32 {
        self.host.read32(offset).unwrap()
    }

    pub fn write_register(&mut self, offset: u64, data: &[u8]) {
        self.write_bar(offset, data).unwrap();
    }

    /// Writes the PCI command register.
    pub fn set_command(&mut self, command: u16) {
        self.host.set_command(command).unwrap();
    }

    /// Resets the controller and makes it ready with an admin queue.
    pub fn enable(&mut self) {
        self.set_command(command::MEMORY_SPACE | command::BUS_MASTER);
        self.host.enable(pair(0)).unwrap();
    }

    /// Creates I/O queue pairs 1 to `count`; their interrupts go to this vector.
    pub fn create_queues(&mut self, count: u16, vector: Option<u16>) {
        for qid in 1..=count {
            self.create_pair(qid, pair(qid), vector).unwrap();
        }
    }

    /// Puts a command into a queue without ringing; returns its identifier, and the doorbell with
    /// its value.
    pub fn test_dir(&mut self, qid: u16, command: Command) -> (u16, u64, u32) {
        let (cid, tail) = self.push(qid, &command).unwrap();
        (cid, doorbell(qid, false, 0), tail)
    }

    /// Puts a command into a queue and rings its doorbell; returns the command's identifier.
    pub fn submit(&mut self, qid: u16, command: Command) -> u16 {
        self.host.submit(qid, &command).unwrap()
    }

    /// Sends Doorbell Buffer Config: I/O doorbells are rung in memory from now on.
    pub fn use_shadow_doorbells(&mut self) {
        self.use_shadow(SHADOW).unwrap();
    }

    /// Returns whether the buffers of shadow doorbells are unchanged since they were cleared.
    pub fn shadow_pages_are_zero(&self) -> bool {
        let mut pages = [0; 2 * 4096];
        self.ram.read_exact_at(&mut pages, AT_SHADOW).unwrap();
        pages.iter().all(|byte| *byte == 0)
    }

    /// The next completion, if it is there.
    pub fn try_completion(&mut self, qid: u16) -> Option<Completion> {
        let completion = self.poll(qid).unwrap()?;
        completion.cast()
    }

    /// Returns the next completion that a server has left behind, after its end.
    pub fn completion_after_the_end(&mut self, qid: u16) -> Option<Completion> {
        self.silent = true;
        self.try_completion(qid)
    }

    /// Waits for the next completion.
    pub fn completion(&mut self, qid: u16) -> Completion {
        self.wait(qid).unwrap().cast().unwrap()
    }

    /// Runs one command from submission to completion.
    pub fn run(&mut self, qid: u16, command: Command) -> Completion {
        let cid = self.submit(qid, command);
        let completion = self.completion(qid);
        assert_eq!(completion.cid.get(), cid);
        completion
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        leave(&self.client);
    }
}
