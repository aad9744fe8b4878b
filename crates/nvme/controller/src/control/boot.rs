//! Boot Partitions ("NVMe Base 2.1", 8.1.3; registers: 3.1.4.13 to 3.1.4.15): two images that a
//! host reads by registers before it has any queue, or later by a log page. Both partitions contain
//! the same image here. Hosts cannot write them, because there is no Firmware Commit.

use super::Controller;
use nvme::log::{BootPartitionHeader, Lid};
use nvme::regs::{self, BootReadStatus, Bpinfo, Bprsel};
use std::fmt;
use std::sync::Arc;
use zerocopy::{FromZeros, IntoBytes};

/// Unit in bytes of the Boot Partition size (BPINFO.BPSZ).
const UNIT: usize = 128 << 10;
/// Unit in bytes of the reads that the register BPRSEL requests.
const PAGE: u64 = 4096;
/// Maximum size of a boot image in bytes.
pub const MAX_BOOT_IMAGE: usize = 64 << 20;

/// Contents of the Boot Partitions, as the log page: a header, then the image.
#[derive(Clone, PartialEq, Eq)]
pub struct BootImage(Arc<[u8]>);

/// Size of the log page's header in bytes.
const HEADER: usize = size_of::<BootPartitionHeader>();

/// Error for a boot image that is empty or too large; contains its size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an image of Boot Partitions has 1 byte to 64 MiB, not {0} bytes")]
pub struct BootImageError(u64);

impl BootImage {
    /// Creates a boot image from these bytes, padded with zeroes to a multiple of 128 KiB.
    ///
    /// # Errors
    /// [`BootImageError`] when the image is empty, or larger than [`MAX_BOOT_IMAGE`].
    pub fn new(bytes: &[u8]) -> Result<Self, BootImageError> {
        if bytes.is_empty() || bytes.len() > MAX_BOOT_IMAGE {
            return Err(BootImageError(bytes.len() as u64));
        }
        let size = bytes.len().next_multiple_of(UNIT);
        let header = BootPartitionHeader {
            lid: Lid::BOOT_PARTITION,
            bpinfo: info(size as u64).into_bits().into(),
            ..BootPartitionHeader::new_zeroed()
        };
        let mut page = Vec::with_capacity(HEADER + size);
        page.extend_from_slice(header.as_bytes());
        page.extend_from_slice(bytes);
        page.resize(HEADER + size, 0);
        Ok(BootImage(page.into()))
    }

    /// Returns the size of each of the two partitions in bytes.
    pub fn size(&self) -> u64 {
        self.bytes().len() as u64
    }

    /// Returns the image without the log page's header, which [`BootImage::new`] has put before it.
    fn bytes(&self) -> &[u8] {
        self.0.get(HEADER..).unwrap_or_default()
    }
}

/// Returns the value of the BPINFO register for Boot Partitions of `size` bytes each.
fn info(size: u64) -> Bpinfo {
    Bpinfo::new().with_bpsz((size / UNIT as u64) as u16)
}

impl fmt::Debug for BootImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BootImage({} bytes)", self.size())
    }
}

/// Boot Partition registers of a controller. A Controller Reset does not change them.
#[derive(Clone, Copy, Default)]
pub(crate) struct BootRegisters {
    bprsel: Bprsel,
    bpmbl: u64,
    status: BootReadStatus,
}

impl BootRegisters {
    /// Returns BPRSEL, BPMBL and BPINFO.BRS, for the next process.
    pub fn save(&self) -> (u32, u64, u8) {
        (self.bprsel.into_bits(), self.bpmbl, self.status.0)
    }

    /// Restores the registers saved by [`BootRegisters::save`].
    pub fn restore((bprsel, bpmbl, status): (u32, u64, u8)) -> Self {
        BootRegisters {
            bprsel: Bprsel::from_bits(bprsel),
            bpmbl,
            status: BootReadStatus(status & 3),
        }
    }
}

impl Controller {
    /// Returns the value of a Boot Partition register; 0 without Boot Partitions.
    pub(super) fn read_boot_register(&self, offset: u64) -> u32 {
        let Some(image) = &self.config.boot else {
            return 0;
        };
        match offset {
            regs::BPINFO => info(image.size()).with_brs(self.boot.status).into_bits(),
            regs::BPRSEL => self.boot.bprsel.into_bits(),
            regs::BPMBL => self.boot.bpmbl as u32,
            _ => (self.boot.bpmbl >> 32) as u32,
        }
    }

    /// Writes a Boot Partition register. A write to BPRSEL starts a read from a partition.
    pub(super) fn write_boot_register(&mut self, offset: u64, value: u32) {
        if self.config.boot.is_none() {
            return;
        }
        let (boot, value) = (&mut self.boot, u64::from(value));
        match offset {
            regs::BPRSEL => {
                // Bit 30 is reserved.
                boot.bprsel = Bprsel::from_bits(value as u32 & !(1 << 30));
                self.boot.status = match self.read_boot_partition() {
                    Some(()) => BootReadStatus::SUCCESS,
                    None => BootReadStatus::ERROR,
                };
            }
            // Bits 11:0 are reserved.
            regs::BPMBL => boot.bpmbl = boot.bpmbl & !0xffff_ffff | value & !0xfff,
            o if o == regs::BPMBL + 4 => boot.bpmbl = boot.bpmbl & 0xffff_ffff | value << 32,
            _ => {}
        }
    }

    /// Copies the range selected by BPRSEL into the host's memory. Returns `None` when the range
    /// exceeds the partition, or the controller may not write that memory.
    fn read_boot_partition(&self) -> Option<()> {
        let selected = self.boot.bprsel;
        let from = usize::try_from(u64::from(selected.bprof()) * PAGE).ok()?;
        let len = usize::try_from(u64::from(selected.bprsz()) * PAGE).ok()?;
        let image = self.config.boot.as_ref()?.bytes();
        let piece = image.get(from..from.checked_add(len)?)?;
        if !self.pci.is_bus_master() {
            return None;
        }
        self.engine.dma.write(self.boot.bpmbl, piece).ok()
    }

    /// Returns the Boot Partition log page ("NVMe Base 2.1", 5.1.12.1.19), which is equal for both
    /// partitions.
    pub(crate) fn boot_partition_log(&self) -> &[u8] {
        self.config.boot.as_ref().map_or(&[], |image| &image.0)
    }
}
