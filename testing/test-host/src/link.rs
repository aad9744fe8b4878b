//! Registers and configuration space of a controller over vfio-user.

use crate::Pair;
use anyhow::{Result, ensure};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::{Duration, Instant};
use vfio_user::DmaMapping;
use vfio_user::client::Client;

/// Index of the vfio region that is BAR0, the controller's registers (`<linux/vfio.h>`).
pub const BAR0: u32 = 0;
/// Index of the vfio region that is the PCI configuration space (`<linux/vfio.h>`).
pub const CONFIG: u32 = 7;

/// Offsets of registers (NVMe Base 2.1, 3.1.4).
pub mod reg {
    /// Offset of the Controller Configuration register (CC) in BAR0.
    pub const CC: u64 = 0x14;
    /// Offset of the Controller Status register (CSTS) in BAR0.
    pub const CSTS: u64 = 0x1c;
    pub(crate) const AQA: u64 = 0x24;
    pub(crate) const ASQ: u64 = 0x28;
    pub(crate) const ACQ: u64 = 0x30;
}

/// CSTS.RDY and CSTS.CFS.
const RDY: u32 = 1;
const CFS: u32 = 2;

/// Connects to a server, waiting while it is starting or an earlier client is leaving.
pub fn connect(socket: &Path, limit: Duration) -> Result<Client> {
    let deadline = Instant::now() + limit;
    loop {
        let connected = Client::connect(socket, limit);
        if connected.is_ok() || Instant::now() > deadline {
            return Ok(connected?);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the description of a mapping for reading and writing.
pub fn window(iova: u64, size: u64, offset: u64) -> DmaMapping {
    DmaMapping {
        iova,
        size,
        offset,
        read: true,
        write: true,
    }
}

/// A connection to a vfio-user controller, with access to its registers.
pub struct Link {
    /// The vfio-user connection to the controller.
    pub client: Client,
    /// Whether register writes are posted, that is, sent without waiting for a reply.
    pub posted: bool,
}

impl Link {
    /// Creates a link with writes that wait for replies.
    pub fn new(client: Client) -> Self {
        let posted = false;
        Self { client, posted }
    }

    /// Maps a whole memory file into the controller's address space, at `iova`.
    pub fn map(&mut self, iova: u64, size: u64, fd: BorrowedFd<'_>) -> Result<()> {
        Ok(self.client.dma_map(window(iova, size, 0), Some(fd))?)
    }

    /// Reads `data.len()` bytes of BAR0 from `offset`.
    pub fn read_bar(&mut self, offset: u64, data: &mut [u8]) -> Result<()> {
        Ok(self.client.region_read(BAR0, offset, data)?)
    }

    /// Writes `data` to BAR0 at `offset`.
    pub fn write_bar(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        if self.posted {
            return Ok(self.client.region_write_posted(BAR0, offset, data)?);
        }
        Ok(self.client.region_write(BAR0, offset, data)?)
    }

    /// Reads a register of 32 bits.
    pub fn read32(&mut self, offset: u64) -> Result<u32> {
        let mut data = [0; 4];
        self.read_bar(offset, &mut data)?;
        Ok(u32::from_le_bytes(data))
    }

    /// Reads a register of 64 bits at once.
    pub fn read64(&mut self, offset: u64) -> Result<u64> {
        let mut data = [0; 8];
        self.read_bar(offset, &mut data)?;
        Ok(u64::from_le_bytes(data))
    }

    /// Writes a register of 32 bits.
    pub fn write32(&mut self, offset: u64, value: u32) -> Result<()> {
        self.write_bar(offset, &value.to_le_bytes())
    }

    /// Writes a register of 64 bits at once.
    pub fn write64(&mut self, offset: u64, value: u64) -> Result<()> {
        self.write_bar(offset, &value.to_le_bytes())
    }

    /// Reads `N` bytes of the PCI configuration space from `offset`.
    pub fn read_config<const N: usize>(&mut self, offset: u64) -> Result<[u8; N]> {
        let mut data = [0; N];
        self.client.region_read(CONFIG, offset, &mut data)?;
        Ok(data)
    }

    /// Writes `data` to the PCI configuration space at `offset`.
    pub fn write_config(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        Ok(self.client.region_write(CONFIG, offset, data)?)
    }

    /// Writes the PCI command register.
    pub fn set_command(&mut self, bits: u16) -> Result<()> {
        self.write_config(4, &bits.to_le_bytes())
    }

    /// Waits until CSTS fulfils `wanted`, and returns it.
    pub fn wait_csts(&mut self, limit: Duration, wanted: impl Fn(u32) -> bool) -> Result<u32> {
        let deadline = Instant::now() + limit;
        loop {
            let csts = self.read32(reg::CSTS)?;
            if wanted(csts) {
                return Ok(csts);
            }
            ensure!(
                Instant::now() < deadline,
                "CSTS is {csts:#x} after {limit:?}"
            );
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Clears CC and waits until the controller is not ready.
    pub fn disable(&mut self, limit: Duration) -> Result<()> {
        self.write32(reg::CC, 0)?;
        self.wait_csts(limit, |csts| csts & RDY == 0)?;
        Ok(())
    }

    /// Sets AQA, ASQ and ACQ, writes `cc` (which includes CC.EN), and waits until the controller is
    /// ready or has failed. Returns CSTS.
    pub fn enable(&mut self, admin: &Pair, cc: u32, limit: Duration) -> Result<u32> {
        let aqa = (admin.cq.size - 1) << 16 | (admin.sq.size - 1);
        self.write32(reg::AQA, aqa)?;
        self.write64(reg::ASQ, admin.sq.iova)?;
        self.write64(reg::ACQ, admin.cq.iova)?;
        self.write32(reg::CC, cc)?;
        self.wait_csts(limit, |csts| csts & (RDY | CFS) != 0)
    }
}
