//! A guest with its VMM, as far as an attack needs them: a vfio-user client, memory, queues of any
//! size, and commands that nobody checks.

use std::ops::{Deref, DerefMut, RangeInclusive};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use dma::Memory;
use nvme::Command;
use nvme::pci::command;
use test_host::{Host, Link, Pair, Shadow, Windows};
use vfio_user::IrqAction;
use vfio_user::client::{Client, Irqs};

pub(in crate::hostile) use test_host::reg::CSTS as REG_CSTS;
pub(in crate::hostile) use test_host::{BAR0, CONFIG, window as mapping};

/// Longest time of the daemon for one message.
pub(in crate::hostile) const ANSWER: Duration = Duration::from_secs(5);

/// Interrupt type of a PCI device (`<linux/vfio.h>`).
pub(in crate::hostile) const MSIX: u32 = 2;

/// Guest memory begins at this IOVA.
pub(in crate::hostile) const RAM_BASE: u64 = 0x1_0000_0000;
/// Size of guest memory in bytes.
pub(in crate::hostile) const RAM_SIZE: u64 = 64 << 20;
/// Entries of each queue: the limit of a default controller (CAP.MQES).
pub(in crate::hostile) const ENTRIES: u16 = 1024;

/// Shadow doorbells and EventIdx.
const SHADOW: Shadow = Shadow {
    doorbells: RAM_BASE + 0x1000,
    event_idx: RAM_BASE + 0x2000,
};
/// Queues: from one pair to the next, a submission queue and its completion queue behind it.
const QUEUES: u64 = RAM_BASE + 0x10_0000;
const QUEUE_STRIDE: u64 = 0x2_0000;
const CQ_OFFSET: u64 = 0x1_0000;
/// Offset in guest memory of PRP lists, SGLs and ranges; 4 MiB.
pub(in crate::hostile) const AT_LISTS: u64 = 0x40_0000;
/// Offset in guest memory of data; the rest.
pub(in crate::hostile) const AT_DATA: u64 = 0x80_0000;

/// Queue pair `qid` of this guest, not yet used.
pub(in crate::hostile) fn pair(qid: u16, entries: u16) -> Pair {
    let sq = QUEUES + u64::from(qid) * QUEUE_STRIDE;
    Pair::new(sq, sq + CQ_OFFSET, entries.into())
}

/// A guest; its connection ends with it.
pub(in crate::hostile) struct Guest {
    host: Host,
    pub(in crate::hostile) ram: Memory,
}

impl Deref for Guest {
    type Target = Host;

    fn deref(&self) -> &Self::Target {
        &self.host
    }
}

impl DerefMut for Guest {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.host
    }
}

impl Guest {
    /// Connects, waiting while an earlier client of ours still leaves, and maps the memory.
    pub(in crate::hostile) fn attach(socket: &Path) -> Result<Self> {
        let ram = Memory::anonymous(RAM_SIZE as usize)?;
        let mut link = Link::new(connect(socket)?);
        link.map(RAM_BASE, RAM_SIZE, ram.fd())?;
        let windows = Windows::new(RAM_BASE, ram.clone());
        let mut host = Host::new(link, windows, ANSWER);
        host.posted_doorbells = true;
        Ok(Self { host, ram })
    }

    /// Connects and makes the controller ready with so many I/O queue pairs and shadow doorbells.
    pub(in crate::hostile) fn up(socket: &Path, queues: u16) -> Result<Self> {
        let mut guest = Self::attach(socket)?;
        guest.enable()?;
        guest.create_queues(queues, None)?;
        guest.use_shadow(SHADOW)?;
        Ok(guest)
    }

    /// Resets the controller, without waiting for it.
    pub(in crate::hostile) fn disable(&mut self) -> Result<()> {
        self.write32(test_host::reg::CC, 0)
    }

    /// Resets the controller and makes it ready with an admin queue.
    pub(in crate::hostile) fn enable(&mut self) -> Result<()> {
        let bits = command::MEMORY_SPACE | command::BUS_MASTER | command::INTERRUPT_DISABLE;
        self.set_command(bits)?;
        self.host.enable(pair(0, ENTRIES))
    }

    /// Makes I/O queue pairs 1 to `count`; their interrupts go to this vector.
    pub(in crate::hostile) fn create_queues(
        &mut self,
        count: u16,
        vector: Option<u16>,
    ) -> Result<()> {
        for qid in 1..=count {
            self.create_pair(qid, pair(qid, ENTRIES), vector)?;
        }
        Ok(())
    }

    /// Queue 1 with its submission queue at this IOVA, wherever that is.
    pub(in crate::hostile) fn create_queue_at(&mut self, sq_iova: u64) -> Result<()> {
        let mine = pair(1, 64);
        let mut pair = mine;
        pair.sq.iova = sq_iova;
        self.create_pair(1, pair, None)?;
        self.pairs.insert(1, mine);
        Ok(())
    }

    /// Gives MSI-X vectors from 0 on their eventfds.
    pub(in crate::hostile) fn set_vectors(&mut self, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let fds: Vec<Option<BorrowedFd<'_>>> = fds.iter().map(|fd| Some(*fd)).collect();
        let irqs = Irqs::Eventfds(&fds);
        let client = &mut self.client;
        Ok(client.set_irqs(MSIX, 0, IrqAction::Trigger, irqs)?)
    }

    /// Runs a command and returns its status.
    pub(in crate::hostile) fn run(&mut self, qid: u16, command: Command) -> Result<u16> {
        Ok(self.host.run(qid, &command)?.status_bits())
    }

    /// Keeps queues as full as possible until `running` returns false; each completion counts.
    pub(in crate::hostile) fn storm(
        &mut self,
        qids: RangeInclusive<u16>,
        mut running: impl FnMut(u64) -> bool,
    ) -> Result<()> {
        loop {
            let mut all = 0;
            for qid in qids.clone() {
                all += self.reap(qid)?.len() as u64;
                let free = self.pair(qid)?.free();
                self.post(qid, free)?;
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

/// Opens a negotiated connection. While an earlier client still leaves, the socket refuses new
/// ones.
pub(in crate::hostile) fn connect(socket: &Path) -> Result<Client> {
    test_host::connect(socket, ANSWER)
}

impl AsFd for Guest {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.client.as_fd()
    }
}
