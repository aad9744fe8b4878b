//! A guest in miniature: what firmware and the guest's NVMe driver do with the device.

use nvme::cmd::admin::{CreateCqCdw11, CreateQueueCdw10, CreateSqCdw11};
use nvme::cmd::io::RwCdw12;
use nvme::pci::{self, cap_id, command, msix};
use nvme::regs::{self, Aqa, Cc, Csts};
use nvme::{AdminOpcode, Command, Completion, NvmOpcode};
use std::error::Error;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_device::{Message, NvmeDevice};
use volume::Volume;
use zerocopy::{FromBytes, IntoBytes};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Logical block size in bytes, which a driver reads from Identify Namespace.
const BLOCK: usize = 512;
const ENTRIES: u16 = 16;
/// Guest addresses: submission and completion queue of each of the two pairs, and data.
const QUEUES: [(u64, u64); 2] = [(0x1000, 0x2000), (0x3000, 0x4000)];
const DATA: u64 = 0x5000;
const TIMEOUT: Duration = Duration::from_secs(60);

/// A guest with one disk.
pub struct Guest {
    /// The disk, for accesses of the guest's that the driver does not make.
    pub device: NvmeDevice,
    memory: GuestMemoryMmap,
    /// Interrupts that the VMM injected.
    pub interrupts: Receiver<Message>,
    /// Number of commands that each queue pair has executed.
    executed: [u16; 2],
    /// Offset of the MSI-X capability, and of its table in BAR0.
    pub msix: (u64, u64),
}

impl Guest {
    /// Creates a guest of 1 MiB, and brings its disk up: PCI, MSI-X, admin queue, one I/O queue.
    ///
    /// # Errors
    /// The device does not behave as a driver expects.
    pub fn new(volume: Arc<dyn Volume>) -> Result<Self> {
        let memfd = dma::Memory::anonymous(1 << 20)?.fd().try_clone_to_owned()?;
        let range = (
            GuestAddress(0),
            1 << 20,
            Some(FileOffset::new(memfd.into(), 0)),
        );
        let memory = GuestMemoryMmap::from_ranges_with_files([range])?;
        let (inject, interrupts) = channel();
        let inject = Arc::new(move |message| inject.send(message).unwrap_or_default());
        let device = NvmeDevice::new(&memory, volume, inject)?;
        let (executed, msix) = ([0; 2], (0, 0));
        let mut guest = Self {
            device,
            memory,
            interrupts,
            executed,
            msix,
        };
        guest.enumerate()?;
        guest.enable()?;
        guest.create_queues()?;
        Ok(guest)
    }

    fn config(&mut self, at: u64) -> u32 {
        let mut bytes = [0; 4];
        self.device.config_read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn register(&mut self, at: u64) -> u32 {
        let mut bytes = [0; 4];
        self.device.bar0_read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Finds the device by its class, sizes BAR0, enables MSI-X and the device's accesses.
    fn enumerate(&mut self) -> Result<()> {
        if self.config(8) >> 8 != pci::CLASS_CODE {
            return Err("not an NVMe controller".into());
        }
        self.device.config_write(pci::BAR0 as u64, &[0xff; 4]);
        let size = !(self.config(pci::BAR0 as u64) & !0xf) + 1;
        let mut at = u64::from(self.config(pci::CAPABILITIES_POINTER as u64) & 0xff);
        while self.config(at) as u8 != cap_id::MSI_X {
            at = u64::from(self.config(at) >> 8 & 0xff);
            if at == 0 {
                return Err("no MSI-X".into());
            }
        }
        self.msix = (at, self.config(at + msix::TABLE as u64).into());
        if self.msix.1 >= size.into() {
            return Err("the MSI-X table lies outside BAR0".into());
        }
        // Entry 0 is the admin queue's vector, entry 1 the I/O queue's.
        for vector in 0..2 {
            self.set_entry(vector, false);
        }
        self.set_msix_control(msix::CONTROL_ENABLE);
        let bits = command::MEMORY_SPACE | command::BUS_MASTER;
        self.device
            .config_write(pci::COMMAND as u64, &bits.to_le_bytes());
        Ok(())
    }

    /// Writes an entry of the MSI-X table: its message, and whether it is masked.
    pub fn set_entry(&mut self, vector: u32, masked: bool) {
        let at = self.msix.1 + u64::from(16 * vector);
        let message = message(vector);
        self.device.bar0_write(at, &message.address.to_le_bytes());
        self.device.bar0_write(at + 8, &message.data.to_le_bytes());
        self.device
            .bar0_write(at + 12, &u32::from(masked).to_le_bytes());
    }

    /// Writes Message Control of MSI-X.
    pub fn set_msix_control(&mut self, bits: u16) {
        let at = self.msix.0 + msix::CONTROL as u64;
        self.device.config_write(at, &bits.to_le_bytes());
    }

    /// Enables the controller with its admin queue.
    fn enable(&mut self) -> Result<()> {
        let size_z = ENTRIES - 1;
        let aqa = Aqa::new()
            .with_asqs_z(size_z)
            .with_acqs_z(size_z)
            .into_bits();
        self.device.bar0_write(regs::AQA, &aqa.to_le_bytes());
        self.device
            .bar0_write(regs::ASQ, &QUEUES[0].0.to_le_bytes());
        self.device
            .bar0_write(regs::ACQ, &QUEUES[0].1.to_le_bytes());
        let (sqe, cqe) = (Command::SIZE_LOG2, Completion::SIZE_LOG2);
        let cc = Cc::new()
            .with_en(true)
            .with_iosqes(sqe)
            .with_iocqes(cqe)
            .into_bits();
        self.device.bar0_write(regs::CC, &cc.to_le_bytes());
        let limit = Instant::now() + TIMEOUT;
        while !Csts::from_bits(self.register(regs::CSTS)).rdy() {
            if Instant::now() > limit {
                return Err("the controller does not get ready".into());
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    fn create_queues(&mut self) -> Result<()> {
        let queue = CreateQueueCdw10::new()
            .with_qid(1)
            .with_qsize_z(ENTRIES - 1);
        let mut create = Command::new(AdminOpcode::CREATE_IO_CQ.0, 0, 0);
        create.cdw10 = queue.into_bits().into();
        create.cdw11 = CreateCqCdw11::new()
            .with_pc(true)
            .with_ien(true)
            .with_iv(1)
            .into_bits()
            .into();
        create.set_prps(QUEUES[1].1, 0);
        self.execute(0, create)?;
        let mut create = Command::new(AdminOpcode::CREATE_IO_SQ.0, 0, 0);
        create.cdw10 = queue.into_bits().into();
        create.cdw11 = CreateSqCdw11::new()
            .with_pc(true)
            .with_cqid(1)
            .into_bits()
            .into();
        create.set_prps(QUEUES[1].0, 0);
        self.execute(0, create)
    }

    /// Puts a command into a queue and rings its doorbell.
    pub fn submit(&mut self, queue: u16, mut command: Command) -> Result<()> {
        let pair = usize::from(queue);
        let (sq, _) = *QUEUES.get(pair).ok_or("no such queue")?;
        let executed = self.executed.get_mut(pair).ok_or("no such queue")?;
        command.cid = (*executed).into();
        let slot = u64::from(*executed % ENTRIES);
        *executed += 1;
        self.memory
            .write_slice(command.as_bytes(), GuestAddress(sq + slot * 64))?;
        let tail = u32::from(*executed % ENTRIES);
        let doorbell = regs::doorbell_offset(queue, false, 0);
        self.device.bar0_write(doorbell, &tail.to_le_bytes());
        Ok(())
    }

    /// Waits for the interrupt of a queue, and checks the completion of its last command.
    pub fn complete(&mut self, queue: u16) -> Result<()> {
        let seen = self.interrupts.recv_timeout(TIMEOUT)?;
        if seen != message(queue.into()) {
            return Err(format!("another interrupt than queue {queue}'s: {seen:?}").into());
        }
        let pair = usize::from(queue);
        let (_, cq) = *QUEUES.get(pair).ok_or("no such queue")?;
        let last = self.executed.get(pair).ok_or("no such queue")? - 1;
        let mut entry = [0; 16];
        let slot = u64::from(last % ENTRIES);
        self.memory
            .read_slice(&mut entry, GuestAddress(cq + slot * 16))?;
        let entry = Completion::read_from_bytes(&entry).map_err(|_| "16 bytes")?;
        let phase = (last / ENTRIES).is_multiple_of(2);
        if entry.phase() != phase || entry.cid.get() != last {
            return Err(format!("no completion of command {last}: {entry:?}").into());
        }
        entry
            .status()
            .into_result()
            .map_err(|status| format!("{status:?}"))?;
        let head = u32::from((last + 1) % ENTRIES);
        let doorbell = regs::doorbell_offset(queue, true, 0);
        self.device.bar0_write(doorbell, &head.to_le_bytes());
        Ok(())
    }

    fn execute(&mut self, queue: u16, command: Command) -> Result<()> {
        self.submit(queue, command)?;
        self.complete(queue)
    }

    /// Returns a command on blocks of the disk, for one page of data.
    fn transfer(opcode: NvmOpcode, block: u64, len: usize) -> Result<Command> {
        if len == 0 || len > 4096 || !len.is_multiple_of(BLOCK) {
            return Err("whole blocks of one page at most".into());
        }
        let mut command = Command::new(opcode.0, 0, 1);
        command.set_slba(block);
        let blocks_z = (len / BLOCK - 1) as u16;
        command.cdw12 = RwCdw12::new().with_nlb_z(blocks_z).into_bits().into();
        command.set_prps(DATA, 0);
        Ok(command)
    }

    /// Writes whole blocks, one page at most.
    ///
    /// # Errors
    /// The command fails.
    pub fn write(&mut self, block: u64, data: &[u8]) -> Result<()> {
        let command = Self::transfer(NvmOpcode::WRITE, block, data.len())?;
        self.memory.write_slice(data, GuestAddress(DATA))?;
        self.execute(1, command)
    }

    /// Reads whole blocks, one page at most.
    ///
    /// # Errors
    /// The command fails.
    pub fn read(&mut self, block: u64, len: usize) -> Result<Vec<u8>> {
        let command = Self::transfer(NvmOpcode::READ, block, len)?;
        self.memory.write_slice(&[0; 4096], GuestAddress(DATA))?;
        self.execute(1, command)?;
        let mut data = vec![0; len];
        self.memory.read_slice(&mut data, GuestAddress(DATA))?;
        Ok(data)
    }

    /// Makes all written data durable.
    ///
    /// # Errors
    /// The command fails.
    pub fn flush(&mut self) -> Result<()> {
        self.execute(1, Command::new(NvmOpcode::FLUSH.0, 0, 1))
    }
}

/// Returns the message that the guest puts into the MSI-X table for a vector.
pub fn message(vector: u32) -> Message {
    let (address, data) = (0xfee0_0000, 0x40 + vector);
    Message { address, data }
}
