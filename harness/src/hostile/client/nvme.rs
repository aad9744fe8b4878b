//! A guest with its VMM, as far as an attack needs them: a vfio-user client, memory, queues of any
//! size, and commands that nobody checks.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use dma::Memory;
use nvme::cmd::admin::{CreateCqCdw11, CreateQueueCdw10, CreateSqCdw11};
use nvme::pci::command;
use nvme::regs::{Aqa, Cc, Csts, doorbell_offset};
use nvme::{AdminOpcode, Command, Completion};
use vfio_user::client::{Client, Irqs};
use vfio_user::{DmaMapping, IrqAction};
use zerocopy::IntoBytes;

/// How long the daemon may take for one message; it is worth nothing to an attack that was stopped.
pub(in crate::hostile) const ANSWER: Duration = Duration::from_secs(5);

/// Region indices and interrupt types of a PCI device (`<linux/vfio.h>`).
pub(in crate::hostile) const BAR0: u32 = 0;
pub(in crate::hostile) const CONFIG: u32 = 7;
pub(in crate::hostile) const MSIX: u32 = 2;

/// Register offsets (NVMe Base 2.1, 3.1.4).
const REG_CC: u64 = 0x14;
pub(in crate::hostile) const REG_CSTS: u64 = 0x1c;
const REG_AQA: u64 = 0x24;
const REG_ASQ: u64 = 0x28;
const REG_ACQ: u64 = 0x30;

/// Guest memory begins at this IOVA.
pub(in crate::hostile) const RAM_BASE: u64 = 0x1_0000_0000;
/// Its bytes.
pub(in crate::hostile) const RAM_SIZE: u64 = 64 << 20;
/// Entries of each queue: what a default controller allows (CAP.MQES).
pub(in crate::hostile) const ENTRIES: u16 = 1024;

/// Offsets in guest memory: shadow doorbells and EventIdx, queues, lists, data.
const AT_SHADOW: u64 = 0x1000;
const AT_EVENT_IDX: u64 = 0x2000;
const AT_QUEUES: u64 = 0x10_0000;
/// From one queue pair to the next: a submission queue, and its completion queue behind it.
const QUEUE_STRIDE: u64 = 0x2_0000;
const CQ_OFFSET: u64 = 0x1_0000;
/// Where PRP lists, SGLs and ranges are; 4 MiB.
pub(in crate::hostile) const AT_LISTS: u64 = 0x40_0000;
/// Where data is; the rest.
pub(in crate::hostile) const AT_DATA: u64 = 0x80_0000;

/// A queue pair.
struct Queue {
    sq: u64,
    cq: u64,
    entries: u16,
    /// As last written to the doorbells.
    tail: u16,
    head: u16,
    phase: bool,
    /// The controller's, as the newest completion has it.
    sq_head: u16,
}

impl Queue {
    fn new(qid: u16, entries: u16) -> Self {
        let sq = AT_QUEUES + u64::from(qid) * QUEUE_STRIDE;
        Self {
            sq,
            cq: sq + CQ_OFFSET,
            entries,
            tail: 0,
            head: 0,
            phase: true,
            sq_head: 0,
        }
    }
}

/// A guest; its connection ends with it.
pub(in crate::hostile) struct Guest {
    pub(in crate::hostile) client: Client,
    pub(in crate::hostile) ram: Memory,
    queues: Vec<Queue>,
    shadow: bool,
    next_cid: u16,
}

impl Guest {
    /// Connects, waiting while an earlier client of ours still leaves, and maps the memory.
    pub(in crate::hostile) fn attach(socket: &Path) -> Result<Self> {
        let mut guest = Self {
            client: connect(socket)?,
            ram: Memory::anonymous(RAM_SIZE as usize)?,
            queues: Vec::new(),
            shadow: false,
            next_cid: 0,
        };
        let all = mapping(RAM_BASE, RAM_SIZE, 0);
        guest.client.dma_map(all, Some(guest.ram.fd()))?;
        Ok(guest)
    }

    /// Connects and makes the controller ready with so many I/O queue pairs and shadow doorbells.
    pub(in crate::hostile) fn up(socket: &Path, queues: u16) -> Result<Self> {
        let mut guest = Self::attach(socket)?;
        guest.enable()?;
        guest.create_queues(queues, None)?;
        guest.use_shadow_doorbells()?;
        Ok(guest)
    }

    pub(in crate::hostile) fn read32(&mut self, offset: u64) -> Result<u32> {
        let mut data = [0; 4];
        self.client.region_read(BAR0, offset, &mut data)?;
        Ok(u32::from_le_bytes(data))
    }

    pub(in crate::hostile) fn write_register(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        Ok(self.client.region_write(BAR0, offset, data)?)
    }

    fn wait_ready(&mut self, ready: bool) -> Result<()> {
        let deadline = Instant::now() + ANSWER;
        while Csts::from_bits(self.read32(REG_CSTS)?).rdy() != ready {
            ensure!(Instant::now() < deadline, "CSTS.RDY is not {ready}");
        }
        Ok(())
    }

    /// Resets the controller, without waiting for it.
    pub(in crate::hostile) fn disable(&mut self) -> Result<()> {
        self.write_register(REG_CC, &0u32.to_le_bytes())
    }

    /// Resets the controller and makes it ready with an admin queue.
    pub(in crate::hostile) fn enable(&mut self) -> Result<()> {
        let bits = command::MEMORY_SPACE | command::BUS_MASTER | command::INTERRUPT_DISABLE;
        self.client.region_write(CONFIG, 4, &bits.to_le_bytes())?;
        self.disable()?;
        self.wait_ready(false)?;
        let admin = Queue::new(0, ENTRIES);
        let aqa = Aqa::new().with_asqs_z(ENTRIES - 1).with_acqs_z(ENTRIES - 1);
        self.write_register(REG_AQA, &aqa.into_bits().to_le_bytes())?;
        self.write_register(REG_ASQ, &(RAM_BASE + admin.sq).to_le_bytes())?;
        self.write_register(REG_ACQ, &(RAM_BASE + admin.cq).to_le_bytes())?;
        self.clear(&admin)?;
        self.queues = vec![admin];
        self.shadow = false;
        self.ram.write(AT_SHADOW as usize, &[0; 0x2000])?;
        let cc = Cc::new()
            .with_iosqes(Command::SIZE_LOG2)
            .with_iocqes(Completion::SIZE_LOG2);
        self.write_register(REG_CC, &cc.with_en(true).into_bits().to_le_bytes())?;
        self.wait_ready(true)
    }

    fn clear(&self, queue: &Queue) -> Result<()> {
        let zeroes = vec![0; QUEUE_STRIDE as usize];
        Ok(self.ram.write(queue.sq as usize, &zeroes)?)
    }

    /// The commands that make I/O queue pair `qid`.
    pub(in crate::hostile) fn create_commands(qid: u16, vector: Option<u16>) -> [Command; 2] {
        let queue = Queue::new(qid, ENTRIES);
        let size = CreateQueueCdw10::new()
            .with_qid(qid)
            .with_qsize_z(ENTRIES - 1);
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
        [cq, sq]
    }

    /// Makes I/O queue pairs 1 to `count`; their interrupts go to this vector.
    pub(in crate::hostile) fn create_queues(
        &mut self,
        count: u16,
        vector: Option<u16>,
    ) -> Result<()> {
        for qid in 1..=count {
            let queue = Queue::new(qid, ENTRIES);
            self.clear(&queue)?;
            for command in Self::create_commands(qid, vector) {
                self.admin(command)?;
            }
            self.queues.push(queue);
        }
        Ok(())
    }

    /// Queue 1 with its submission queue at this IOVA, wherever that is.
    pub(in crate::hostile) fn create_queue_at(&mut self, sq_iova: u64) -> Result<()> {
        let queue = Queue::new(1, 64);
        self.clear(&queue)?;
        let [mut cq, mut sq] = Self::create_commands(1, None);
        let size = CreateQueueCdw10::new().with_qid(1).with_qsize_z(63);
        (cq.cdw10, sq.cdw10) = (size.into_bits().into(), size.into_bits().into());
        sq.set_prps(sq_iova, 0);
        self.admin(cq)?;
        self.admin(sq)?;
        self.queues.push(queue);
        Ok(())
    }

    /// Doorbell Buffer Config: I/O doorbells are rung in memory from now on (NVMe Base 2.1, 5.2.5).
    pub(in crate::hostile) fn use_shadow_doorbells(&mut self) -> Result<()> {
        let mut command = Command::new(AdminOpcode::DOORBELL_BUFFER_CONFIG.0, 0, 0);
        command.set_prps(RAM_BASE + AT_SHADOW, RAM_BASE + AT_EVENT_IDX);
        self.admin(command)?;
        self.shadow = true;
        Ok(())
    }

    /// Gives MSI-X vectors from 0 on their eventfds.
    pub(in crate::hostile) fn set_vectors(&mut self, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let fds: Vec<Option<BorrowedFd<'_>>> = fds.iter().map(|fd| Some(*fd)).collect();
        let irqs = Irqs::Eventfds(&fds);
        Ok(self.client.set_irqs(MSIX, 0, IrqAction::Trigger, irqs)?)
    }

    fn queue(&mut self, qid: u16) -> Result<&mut Queue> {
        self.queues
            .get_mut(usize::from(qid))
            .context("no such queue")
    }

    /// Writes one entry of a submission queue, wherever the tail is.
    pub(in crate::hostile) fn put(&mut self, qid: u16, at: u16, command: &Command) -> Result<()> {
        let at = self.queue(qid)?.sq + u64::from(at) * 64;
        Ok(self.ram.write(at as usize, command.as_bytes())?)
    }

    /// Tells the controller of a doorbell's value, in memory or by a message that asks for no
    /// answer.
    pub(in crate::hostile) fn ring(&mut self, qid: u16, cq: bool, value: u16) -> Result<()> {
        let offset = doorbell_offset(qid, cq, 0);
        if self.shadow && qid != 0 {
            let at = (offset - 0x1000) as usize;
            let shadow = self.ram.atomic_u32(AT_SHADOW as usize + at);
            let shadow = shadow.context("shadow doorbell")?;
            let old = u32::from_le(shadow.swap(u32::from(value).to_le(), Ordering::Release));
            fence(Ordering::SeqCst);
            let event = self.ram.atomic_u32(AT_EVENT_IDX as usize + at);
            let event = event.context("EventIdx")?.load(Ordering::Relaxed);
            let (old, event) = (old as u16, u32::from_le(event) as u16);
            if value.wrapping_sub(event).wrapping_sub(1) >= value.wrapping_sub(old) {
                return Ok(());
            }
        }
        let value = u32::from(value).to_le_bytes();
        Ok(self.client.region_write_posted(BAR0, offset, &value)?)
    }

    /// Takes all completions that are there; answers how many, and the newest status.
    pub(in crate::hostile) fn reap(&mut self, qid: u16) -> Result<(u64, u16)> {
        let ram = self.ram.clone();
        let queue = self.queue(qid)?;
        let (mut count, mut status) = (0, 0);
        loop {
            let at = (queue.cq + u64::from(queue.head) * 16) as usize;
            let cell = ram.atomic_u32(at + 12).context("a completion")?;
            let last = u32::from_le(cell.load(Ordering::Acquire));
            if (last >> 16 & 1 != 0) != queue.phase || count == u64::from(queue.entries) {
                break;
            }
            let cell = ram.atomic_u32(at + 8).context("a completion")?;
            queue.sq_head = u32::from_le(cell.load(Ordering::Relaxed)) as u16;
            status = (last >> 17) as u16;
            queue.head = (queue.head + 1) % queue.entries;
            queue.phase ^= queue.head == 0;
            count += 1;
        }
        if count > 0 {
            let head = queue.head;
            self.ring(qid, true, head)?;
        }
        Ok((count, status))
    }

    /// Makes the submission queue as full as it can be with what stands in it.
    pub(in crate::hostile) fn refill(&mut self, qid: u16) -> Result<()> {
        let queue = self.queue(qid)?;
        let tail = (queue.sq_head + queue.entries - 1) % queue.entries;
        if tail == queue.tail {
            return Ok(());
        }
        queue.tail = tail;
        self.ring(qid, false, tail)
    }

    /// Fills every entry of a submission queue by what `make` answers for its index.
    pub(in crate::hostile) fn fill(
        &mut self,
        qid: u16,
        make: &mut dyn FnMut(u16) -> Command,
    ) -> Result<()> {
        for at in 0..self.queue(qid)?.entries {
            let mut command = make(at);
            command.cid = at.into();
            self.put(qid, at, &command)?;
        }
        Ok(())
    }

    /// One admin command from beginning to end; an error where its status is one.
    pub(in crate::hostile) fn admin(&mut self, command: Command) -> Result<()> {
        let status = self.run(0, command)?;
        ensure!(status == 0, "status {status:#x} of {command:?}");
        Ok(())
    }

    /// One command from beginning to end; its status.
    pub(in crate::hostile) fn run(&mut self, qid: u16, mut command: Command) -> Result<u16> {
        command.cid = self.next_cid.into();
        self.next_cid = self.next_cid.wrapping_add(1);
        let queue = self.queue(qid)?;
        let (at, entries) = (queue.tail, queue.entries);
        queue.tail = (at + 1) % entries;
        let tail = queue.tail;
        self.put(qid, at, &command)?;
        self.ring(qid, false, tail)?;
        let deadline = Instant::now() + ANSWER;
        loop {
            let (count, status) = self.reap(qid)?;
            if count > 0 {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("no completion on queue {qid}");
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Keeps queues as full as they can be until `running` says no more; each completion counts.
    pub(in crate::hostile) fn storm(
        &mut self,
        qids: std::ops::RangeInclusive<u16>,
        mut running: impl FnMut(u64) -> bool,
    ) -> Result<()> {
        for qid in qids.clone() {
            self.refill(qid)?;
        }
        loop {
            let mut all = 0;
            for qid in qids.clone() {
                let (count, _) = self.reap(qid)?;
                all += count;
                self.refill(qid)?;
            }
            if !running(all) {
                return Ok(());
            }
            if all == 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }
}

/// A negotiated connection. While an earlier client still leaves, the socket refuses others.
pub(in crate::hostile) fn connect(socket: &Path) -> Result<Client> {
    let deadline = Instant::now() + ANSWER;
    loop {
        match Client::connect(socket, ANSWER) {
            Ok(client) => return Ok(client),
            Err(error) if Instant::now() > deadline => return Err(error.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// A window for reading and writing.
pub(in crate::hostile) fn mapping(iova: u64, size: u64, offset: u64) -> DmaMapping {
    DmaMapping {
        iova,
        size,
        offset,
        read: true,
        write: true,
    }
}

impl AsFd for Guest {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.client.as_fd()
    }
}
