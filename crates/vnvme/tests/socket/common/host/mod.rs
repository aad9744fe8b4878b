//! An NVMe host at the end of a vfio-user socket.
//!
//! Guest memory is a memory file that is read and written by system calls, so that no test needs a
//! mapping of its own; only mapped doorbells are stored to directly.

mod commands;
mod files;
pub mod flood;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use dma::Memory;
use nvme::cmd::admin::{CreateCqCdw11, CreateQueueCdw10, CreateSqCdw11};
use nvme::pci::command;
use nvme::regs::{Aqa, Cc, Csts, doorbell_offset};
use nvme::{AdminOpcode, Command, Completion, Status};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vfio_user::client::{Client, Irqs};
use vfio_user::{DmaMapping, IrqAction};
use zerocopy::{FromBytes, IntoBytes};

use super::LIMIT;
pub use files::{leave, memfd, new_eventfd};

/// Region indices of a PCI device (`<linux/vfio.h>`).
pub const BAR0: u32 = 0;
pub const CONFIG: u32 = 7;
/// Interrupt types of a PCI device.
pub const INTX: u32 = 0;
pub const MSIX: u32 = 2;

/// Guest memory begins at this IOVA.
pub const RAM_BASE: u64 = 0x1_0000_0000;
/// Its size in bytes.
pub const RAM_SIZE: u64 = 16 << 20;

/// Register offsets (NVMe Base 2.1, 3.1.4).
const REG_CC: u64 = 0x14;
const REG_CSTS: u64 = 0x1c;
const REG_AQA: u64 = 0x24;
const REG_ASQ: u64 = 0x28;
const REG_ACQ: u64 = 0x30;

/// Entries of each queue.
const ENTRIES: u32 = 64;
/// Offsets in guest memory: an Identify page, a PRP list, queues at two pages each, data.
const AT_PAGE: u64 = 0;
const AT_LIST: u64 = 0x1000;
const AT_QUEUES: u64 = 0x2000;
const AT_SHADOW: u64 = 0xf_0000;
const AT_EVENT_IDX: u64 = AT_SHADOW + 0x1000;
const AT_DATA: u64 = 0x10_0000;

struct Queue {
    sq: u64,
    cq: u64,
    tail: u32,
    head: u32,
    phase: bool,
}

impl Queue {
    fn new(qid: u16) -> Self {
        let sq = AT_QUEUES + u64::from(qid) * 0x2000;
        Queue {
            sq,
            cq: sq + 0x1000,
            tail: 0,
            head: 0,
            phase: true,
        }
    }
}

/// A host with its memory; the connection ends when it is dropped.
pub struct Host {
    pub client: Client,
    pub ram: File,
    /// Block size of the namespaces that are read and written.
    pub block: usize,
    /// Writes to registers are posted, as QEMU's are.
    pub posted: bool,
    /// Nobody listens to doorbells any more.
    deaf: bool,
    vectors: Vec<OwnedFd>,
    doorbells: Option<Memory>,
    /// Guest memory as a mapping, for atomic access to shadow doorbells and EventIdx.
    shadow: Option<Memory>,
    queues: Vec<Queue>,
    next_cid: u16,
}

impl Host {
    /// Connects and gives the device all memory.
    pub fn attach(socket: &Path) -> Host {
        let mut host = Self::over(Client::connect(socket, LIMIT).unwrap());
        host.map_ram();
        host
    }

    /// A host over a negotiated connection, without memory yet.
    pub fn over(client: Client) -> Host {
        Host {
            client,
            ram: memfd(RAM_SIZE),
            block: 512,
            posted: false,
            deaf: false,
            vectors: Vec::new(),
            doorbells: None,
            shadow: None,
            queues: Vec::new(),
            next_cid: 0,
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
        let map = DmaMapping {
            iova: RAM_BASE,
            size: RAM_SIZE,
            offset: 0,
            read: true,
            write: true,
        };
        self.client.dma_map(map, Some(self.ram.as_fd())).unwrap();
    }

    /// Assigns eventfds to that many MSI-X vectors.
    pub fn assign_vectors(&mut self, count: usize) {
        self.vectors = (0..count).map(|_| new_eventfd()).collect();
        let fds: Vec<Option<BorrowedFd<'_>>> =
            self.vectors.iter().map(|fd| Some(fd.as_fd())).collect();
        self.client
            .set_irqs(MSIX, 0, IrqAction::Trigger, Irqs::Eventfds(&fds))
            .unwrap();
    }

    /// Waits for a vector's interrupt; returns how many there were.
    pub fn interrupt(&self, vector: usize) -> u64 {
        let fd = &self.vectors[vector];
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        let limit = Timespec {
            tv_sec: LIMIT.as_secs() as i64,
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
        self.doorbells = Some(Memory::from_fd(mapping.fd, 0x2000, true).unwrap());
    }

    pub fn read32(&mut self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.client.region_read(BAR0, offset, &mut data).unwrap();
        u32::from_le_bytes(data)
    }

    pub fn write_register(&mut self, offset: u64, data: &[u8]) {
        let written = if self.posted {
            self.client.region_write_posted(BAR0, offset, data)
        } else {
            self.client.region_write(BAR0, offset, data)
        };
        written.unwrap();
    }

    fn wait_ready(&mut self, ready: bool) {
        let deadline = Instant::now() + LIMIT;
        while Csts::from_bits(self.read32(REG_CSTS)).rdy() != ready {
            assert!(Instant::now() < deadline, "CSTS.RDY is not {ready}");
        }
    }

    /// Writes the PCI command register.
    pub fn set_command(&mut self, command: u16) {
        let command = command.to_le_bytes();
        self.client.region_write(CONFIG, 4, &command).unwrap();
    }

    /// Resets the controller and makes it ready with an admin queue.
    pub fn enable(&mut self) {
        self.set_command(command::MEMORY_SPACE | command::BUS_MASTER);
        self.write_register(REG_CC, &0u32.to_le_bytes());
        self.wait_ready(false);
        let admin = Queue::new(0);
        let aqa = Aqa::new()
            .with_asqs_z(ENTRIES as u16 - 1)
            .with_acqs_z(ENTRIES as u16 - 1);
        self.write_register(REG_AQA, &aqa.into_bits().to_le_bytes());
        self.write_register(REG_ASQ, &(RAM_BASE + admin.sq).to_le_bytes());
        self.write_register(REG_ACQ, &(RAM_BASE + admin.cq).to_le_bytes());
        self.clear_queue(&admin);
        self.queues = vec![admin];
        if self.shadow.take().is_some() {
            let pages = [0; 2 * 4096];
            self.ram.write_all_at(&pages, AT_SHADOW).unwrap();
        }
        let cc = Cc::new()
            .with_iosqes(Command::SIZE_LOG2)
            .with_iocqes(Completion::SIZE_LOG2);
        self.write_register(REG_CC, &cc.into_bits().to_le_bytes());
        self.write_register(REG_CC, &cc.with_en(true).into_bits().to_le_bytes());
        self.wait_ready(true);
    }

    fn clear_queue(&self, queue: &Queue) {
        self.ram.write_all_at(&[0; 0x2000], queue.sq).unwrap();
    }

    /// Creates I/O queue pairs 1 to `count`; their interrupts go to this vector.
    pub fn create_queues(&mut self, count: u16, vector: Option<u16>) {
        for qid in 1..=count {
            let queue = Queue::new(qid);
            self.clear_queue(&queue);
            let size = CreateQueueCdw10::new()
                .with_qid(qid)
                .with_qsize_z(ENTRIES as u16 - 1);
            let mut cq = Command::new(AdminOpcode::CREATE_IO_CQ.0, 0, 0);
            cq.set_prps(RAM_BASE + queue.cq, 0);
            cq.cdw10 = size.into_bits().into();
            let flags = CreateCqCdw11::new()
                .with_pc(true)
                .with_ien(vector.is_some())
                .with_iv(vector.unwrap_or(0));
            cq.cdw11 = flags.into_bits().into();
            let mut sq = Command::new(AdminOpcode::CREATE_IO_SQ.0, 0, 0);
            sq.set_prps(RAM_BASE + queue.sq, 0);
            sq.cdw10 = size.into_bits().into();
            let flags = CreateSqCdw11::new().with_pc(true).with_cqid(qid);
            sq.cdw11 = flags.into_bits().into();
            for command in [cq, sq] {
                assert_eq!(self.run(0, command).status(), Status::SUCCESS);
            }
            self.queues.push(queue);
        }
    }

    /// Puts a command into a queue without ringing; returns its identifier, and the doorbell with
    /// its value.
    pub fn place(&mut self, qid: u16, mut command: Command) -> (u16, u64, u32) {
        let cid = self.next_cid;
        self.next_cid = self.next_cid.wrapping_add(1);
        command.cid = cid.into();
        let queue = &mut self.queues[usize::from(qid)];
        let at = queue.sq + u64::from(queue.tail) * 64;
        self.ram.write_all_at(command.as_bytes(), at).unwrap();
        queue.tail = (queue.tail + 1) % ENTRIES;
        (cid, doorbell_offset(qid, false, 0), queue.tail)
    }

    /// Puts a command into a queue and rings its doorbell; returns the command's identifier.
    pub fn submit(&mut self, qid: u16, command: Command) -> u16 {
        let (cid, doorbell, tail) = self.place(qid, command);
        self.ring(doorbell, tail);
        cid
    }

    fn ring(&mut self, offset: u64, value: u32) {
        if self.deaf {
            return;
        }
        if let Some(page) = &self.doorbells {
            let cell = page.atomic_u32(offset as usize).unwrap();
            cell.store(value.to_le(), Ordering::Release);
        } else if self.event_wanted(offset, value) {
            self.write_register(offset, &value.to_le_bytes());
        }
    }

    /// Sends Doorbell Buffer Config: I/O doorbells are rung in memory from now on (NVMe Base 2.1,
    /// 5.2.5).
    pub fn use_shadow_doorbells(&mut self) {
        let mut command = Command::new(AdminOpcode::DOORBELL_BUFFER_CONFIG.0, 0, 0);
        command.set_prps(RAM_BASE + AT_SHADOW, RAM_BASE + AT_EVENT_IDX);
        assert_eq!(self.run(0, command).status(), Status::SUCCESS);
        let ram = self.ram.try_clone().unwrap().into();
        self.shadow = Some(Memory::from_fd(ram, RAM_SIZE, true).unwrap());
    }

    /// Rings in memory, if that is how; tells whether the register has to be written, too (NVMe
    /// Base 2.1, B.5).
    fn event_wanted(&self, offset: u64, value: u32) -> bool {
        let at = offset - 0x1000;
        let Some(ram) = self.shadow.as_ref().filter(|_| at >= 8) else {
            return true;
        };
        let cell = |page: u64| ram.atomic_u32((page + at) as usize).unwrap();
        let old = u32::from_le(cell(AT_SHADOW).swap(value.to_le(), Ordering::Release)) as u16;
        fence(Ordering::SeqCst);
        let event_idx = u32::from_le(cell(AT_EVENT_IDX).load(Ordering::Relaxed)) as u16;
        let new = value as u16;
        new.wrapping_sub(event_idx).wrapping_sub(1) < new.wrapping_sub(old)
    }

    /// Nobody wrote to the buffers of shadow doorbells since they were cleared.
    pub fn shadow_pages_are_zero(&self) -> bool {
        let mut pages = [0; 2 * 4096];
        self.ram.read_exact_at(&mut pages, AT_SHADOW).unwrap();
        pages.iter().all(|byte| *byte == 0)
    }

    /// The next completion, if it is there.
    pub fn try_completion(&mut self, qid: u16) -> Option<Completion> {
        let queue = &mut self.queues[usize::from(qid)];
        let at = queue.cq + u64::from(queue.head) * 16;
        let mut entry = [0; 16];
        self.ram.read_exact_at(&mut entry[14..], at + 14).unwrap();
        if (entry[14] & 1 != 0) != queue.phase {
            return None;
        }
        // The phase was seen: what stands before it is there, too.
        self.ram.read_exact_at(&mut entry, at).unwrap();
        queue.head = (queue.head + 1) % ENTRIES;
        queue.phase ^= queue.head == 0;
        let head = queue.head;
        self.ring(doorbell_offset(qid, true, 0), head);
        Some(Completion::read_from_bytes(&entry).unwrap())
    }

    /// The next completion that a server left behind which is gone now.
    pub fn completion_after_the_end(&mut self, qid: u16) -> Option<Completion> {
        self.deaf = true;
        self.try_completion(qid)
    }

    /// Waits for the next completion.
    pub fn completion(&mut self, qid: u16) -> Completion {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(completion) = self.try_completion(qid) {
                return completion;
            }
            assert!(Instant::now() < deadline, "no completion on queue {qid}");
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// One command from beginning to end.
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
