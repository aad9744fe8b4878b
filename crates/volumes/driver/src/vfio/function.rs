//! [`Vfio`], the transport to a real controller through the kernel's VFIO.

use super::caps::{self, Region};
use super::iommu::{self, Interface, Iommu, MappingLimits};
use super::sysfs::{self, Sysfs};
use super::{Bdf, VfioError, sys};
use crate::mmio::Registers;
use crate::transport::{DmaLimits, DoorbellCell, Mapping, Transport, TransportError};
use nvme::pci;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_IRQ_SET_ACTION_TRIGGER,
    VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE, VFIO_PCI_BAR0_REGION_INDEX,
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX,
    vfio_device_info, vfio_irq_info,
};

/// Options for opening a PCI function through VFIO.
#[derive(Clone, Debug)]
pub struct VfioOptions {
    /// Kernel interface to use: iommufd, or container and group.
    pub interface: Interface,
    /// Sysfs tree in which the PCI function is found.
    pub sysfs: Sysfs,
    /// Directory of the device nodes, normally `/dev`.
    pub dev: PathBuf,
}

impl Default for VfioOptions {
    fn default() -> Self {
        VfioOptions {
            interface: Interface::Any,
            sysfs: Sysfs::system(),
            dev: "/dev".into(),
        }
    }
}

/// An NVMe controller behind VFIO. Dropping it stops the controller's DMA and returns the device to
/// vfio-pci.
#[derive(Debug)]
pub struct Vfio {
    bdf: Bdf,
    // The drop order matters: registers, device, address space.
    bar0: Vec<Window>,
    device: OwnedFd,
    iommu: Iommu,
    limits: MappingLimits,
    registers: Region,
    config: Region,
    can_reset: bool,
    vectors: u16,
    /// Whether the device was released, so that all further accesses fail.
    released: AtomicBool,
    /// Number of enabled interrupt vectors; the lock also serialises changes of the command
    /// register.
    state: Mutex<usize>,
}

/// Part of BAR0 that is mapped into this process.
#[derive(Debug)]
struct Window {
    range: Range<u64>,
    registers: Arc<Registers>,
}

impl Vfio {
    /// Opens the controller at `bdf` for exclusive use; it must be bound to vfio-pci.
    ///
    /// # Errors
    /// [`VfioError`], with a variant for each reason why a device cannot be opened.
    pub fn open(bdf: Bdf, options: &VfioOptions) -> Result<Vfio, VfioError> {
        let found = options.sysfs.device(bdf);
        let pci = found.ok_or(VfioError::NoDevice { bdf })?;
        let driver = pci.driver();
        // Vendor variants of vfio-pci have names like mlx5_vfio_pci.
        let vfio = |d: &String| d.replace('_', "-").ends_with(sysfs::VFIO_PCI);
        if !driver.as_ref().is_some_and(vfio) {
            return Err(VfioError::NotBound { bdf, driver });
        }
        let controller = |class: u32| class >> 8 == pci::CLASS_CODE >> 8;
        if !pci.class().is_some_and(controller) {
            let what = "is not an NVMe controller";
            return Err(VfioError::Unsuitable { bdf, what });
        }
        let group = pci.group().ok_or(VfioError::NoIommu { bdf })?;
        if group.noiommu {
            return Err(VfioError::NoIommuMode { bdf });
        }
        let (device, iommu) = iommu::open(&pci, &group, options.interface, &options.dev)?;
        let mut info = vfio_device_info {
            argsz: sys::size::<vfio_device_info>(),
            ..vfio_device_info::default()
        };
        sys::call(device.as_fd(), sys::DEVICE_GET_INFO, &mut info)
            .map_err(|e| VfioError::system("VFIO_DEVICE_GET_INFO", e))?;
        if info.flags & VFIO_DEVICE_FLAGS_PCI == 0 {
            return Err(VfioError::Malformed("VFIO_DEVICE_GET_INFO"));
        }
        let registers = region(device.as_fd(), VFIO_PCI_BAR0_REGION_INDEX)?;
        let config = region(device.as_fd(), VFIO_PCI_CONFIG_REGION_INDEX)?;
        if registers.size < BAR0_LEAST || config.size < pci::CONFIG_SIZE as u64 {
            let what = "has no BAR0 of a controller's size";
            return Err(VfioError::Unsuitable { bdf, what });
        }
        let bar0 = windows(device.as_fd(), &registers)?;
        let limits = iommu.limits()?;
        let vectors = vectors(device.as_fd())?;
        Ok(Vfio {
            bdf,
            bar0,
            limits,
            can_reset: info.flags & VFIO_DEVICE_FLAGS_RESET != 0,
            vectors,
            released: AtomicBool::new(false),
            state: Mutex::new(0),
            device,
            iommu,
            registers,
            config,
        })
    }

    /// Returns the PCI address of the function.
    pub fn bdf(&self) -> Bdf {
        self.bdf
    }

    /// Returns the kernel interface in use: `iommufd` or `group`.
    pub fn interface(&self) -> &'static str {
        self.iommu.name()
    }

    /// Reads from PCI configuration space.
    ///
    /// # Errors
    /// [`TransportError::Gone`] when the device is lost; [`TransportError::Io`] beyond the end of
    /// the space.
    pub fn read_config(&self, offset: usize, bytes: &mut [u8]) -> Result<(), TransportError> {
        self.read(&self.config, offset as u64, bytes)
    }

    /// Writes to PCI configuration space. The kernel filters dangerous writes.
    ///
    /// # Errors
    /// [`TransportError::Gone`] when the device is lost; [`TransportError::Io`] beyond the end of
    /// the space.
    pub fn write_config(&self, offset: usize, bytes: &[u8]) -> Result<(), TransportError> {
        self.write(&self.config, offset as u64, bytes)
    }

    fn read(&self, region: &Region, offset: u64, bytes: &mut [u8]) -> Result<(), TransportError> {
        let at = place(region, offset, bytes.len())?;
        let done = rustix::io::pread(&self.device, &mut *bytes, at);
        whole(done.map_err(io::Error::from), bytes.len(), offset)
    }

    fn write(&self, region: &Region, offset: u64, bytes: &[u8]) -> Result<(), TransportError> {
        let at = place(region, offset, bytes.len())?;
        let done = rustix::io::pwrite(&self.device, bytes, at);
        whole(done.map_err(io::Error::from), bytes.len(), offset)
    }

    /// Returns the mapped part of BAR0 that contains a 32-bit register, and the register's offset
    /// in it.
    fn window(&self, offset: u64) -> Option<(&Arc<Registers>, usize)> {
        let window = self.bar0.iter().find(|w| w.range.contains(&offset))?;
        let within = usize::try_from(offset - window.range.start).ok()?;
        let known = window.registers.is_register(within);
        known.then_some((&window.registers, within))
    }

    fn set_irqs(
        &self,
        index: u32,
        start: u32,
        data: u32,
        fds: &[i32],
    ) -> Result<(), TransportError> {
        let flags = data | VFIO_IRQ_SET_ACTION_TRIGGER;
        sys::set_irqs(self.device.as_fd(), index, start, flags, fds)
            .map_err(|e| told("VFIO_DEVICE_SET_IRQS", e))
    }

    /// Returns an error if the device was released.
    fn held(&self) -> Result<(), TransportError> {
        if self.released.load(Ordering::Acquire) {
            return Err(TransportError::Gone("it was released".into()));
        }
        Ok(())
    }
}

/// Minimum size of BAR0: the registers and the admin queue's doorbells (NVMe over PCIe Transport
/// 1.1, 3.1).
const BAR0_LEAST: u64 = 0x1008;

fn region(device: BorrowedFd<'_>, index: u32) -> Result<Region, VfioError> {
    const WHAT: &str = "VFIO_DEVICE_GET_REGION_INFO";
    let bytes = sys::sized(device, sys::DEVICE_GET_REGION_INFO, index)
        .map_err(|e| VfioError::system(WHAT, e))?;
    caps::region(&bytes).ok_or(VfioError::Malformed(WHAT))
}

/// Maps the mappable parts of BAR0, in whole pages. The rest (around the MSI-X table, on older
/// kernels) is accessed through the device's file.
fn windows(device: BorrowedFd<'_>, bar0: &Region) -> Result<Vec<Window>, VfioError> {
    let page = rustix::param::page_size() as u64;
    let mut windows = Vec::new();
    for range in &bar0.mappable {
        let (start, end) = (range.start.next_multiple_of(page), range.end / page * page);
        let Some(len) = end.checked_sub(start).filter(|len| *len > 0) else {
            continue;
        };
        let at = bar0.offset.checked_add(start);
        let place = at.zip(usize::try_from(len).ok());
        let (at, len) = place.ok_or(VfioError::Malformed("VFIO_DEVICE_GET_REGION_INFO"))?;
        let registers = Registers::map(device, at, len)
            .map_err(|e| VfioError::system("mapping the controller's registers", e))?;
        windows.push(Window {
            range: start..end,
            registers: Arc::new(registers),
        });
    }
    Ok(windows)
}

/// Returns the number of interrupts that the device has of one type, such as MSI-X.
fn interrupts(device: BorrowedFd<'_>, index: u32) -> io::Result<u32> {
    let mut info = vfio_irq_info {
        argsz: sys::size::<vfio_irq_info>(),
        index,
        ..vfio_irq_info::default()
    };
    sys::call(device, sys::DEVICE_GET_IRQ_INFO, &mut info)?;
    Ok(info.count)
}

fn vectors(device: BorrowedFd<'_>) -> Result<u16, VfioError> {
    let count = interrupts(device, VFIO_PCI_MSIX_IRQ_INDEX)
        .map_err(|e| VfioError::system("VFIO_DEVICE_GET_IRQ_INFO", e))?;
    Ok(u16::try_from(count)
        .unwrap_or(u16::MAX)
        .min(pci::msix::MAX_ENTRIES))
}

/// Returns the position of `len` bytes at `offset` of a region in the device's file.
pub(super) fn place(region: &Region, offset: u64, len: usize) -> Result<u64, TransportError> {
    let end = offset.checked_add(len as u64);
    end.filter(|end| *end <= region.size)
        .and_then(|_| region.offset.checked_add(offset))
        .ok_or(TransportError::from(VfioError::Register {
            offset,
            width: len,
        }))
}

fn whole(done: io::Result<usize>, len: usize, offset: u64) -> Result<(), TransportError> {
    match done {
        Ok(done) if done == len => Ok(()),
        Ok(_) => Err(VfioError::Register { offset, width: len }.into()),
        Err(e) => Err(told("reaching the device's registers", e)),
    }
}

/// Converts the error of a system call on an open device. ENODEV and ENXIO mean that the device is
/// lost.
fn told(what: &str, e: io::Error) -> TransportError {
    match e.raw_os_error() {
        Some(libc::ENODEV | libc::ENXIO) => TransportError::Gone(format!("{what}: {e}")),
        _ => TransportError::io(what, e),
    }
}

impl From<VfioError> for TransportError {
    fn from(e: VfioError) -> TransportError {
        match e {
            VfioError::MappingsExhausted => TransportError::NoMappings,
            e => TransportError::Vfio(e),
        }
    }
}

impl Transport for Vfio {
    fn read32(&self, offset: u64) -> Result<u32, TransportError> {
        if let Some((registers, at)) = self.window(offset) {
            return Ok(registers.read32(at));
        }
        let mut bytes = [0; 4];
        self.read(&self.registers, offset, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        if let Some((registers, at)) = self.window(offset) {
            registers.write32(at, value);
            return Ok(());
        }
        self.write(&self.registers, offset, &value.to_le_bytes())
    }

    fn doorbell(&self, offset: u64) -> Option<DoorbellCell> {
        let (registers, at) = self.window(offset)?;
        DoorbellCell::mapped(registers, at)
    }

    fn dma_limits(&self) -> DmaLimits {
        DmaLimits {
            iova_ranges: self.limits.ranges.clone(),
            max_mappings: self.limits.mappings,
            page_size: self.limits.page_size,
            host_ranges: true,
        }
    }

    fn map(&self, mapping: Mapping<'_>) -> Result<(), TransportError> {
        self.held()?;
        let len = mapping.len;
        let address = mapping.source.host(len).ok_or_else(|| {
            TransportError::io(
                "mapping for DMA",
                io::Error::from(io::ErrorKind::InvalidInput),
            )
        })?;
        Ok(self
            .iommu
            .map(mapping.iova, address as u64, len, mapping.prot)?)
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<(), TransportError> {
        if self.held().is_err() {
            // The address space was removed with the device.
            return Ok(());
        }
        Ok(self.iommu.unmap(iova, len)?)
    }

    fn msix_vectors(&self) -> u16 {
        self.vectors
    }

    fn set_msix(&self, eventfds: &[Option<BorrowedFd<'_>>]) -> Result<(), TransportError> {
        self.held()?;
        if eventfds.len() > usize::from(self.vectors) {
            return Err(TransportError::Unsupported("so many MSI-X vectors"));
        }
        let mut enabled = self.state.lock().unpoisoned();
        if *enabled != eventfds.len() && *enabled != 0 {
            // Kernels before 6.5 cannot add vectors to the enabled ones, and no kernel removes any.
            self.set_irqs(VFIO_PCI_MSIX_IRQ_INDEX, 0, VFIO_IRQ_SET_DATA_NONE, &[])?;
            *enabled = 0;
        }
        if !eventfds.is_empty() {
            let raw = |fd: &Option<BorrowedFd<'_>>| fd.map_or(-1, |fd| fd.as_raw_fd());
            let fds: Vec<i32> = eventfds.iter().map(raw).collect();
            self.set_irqs(VFIO_PCI_MSIX_IRQ_INDEX, 0, VFIO_IRQ_SET_DATA_EVENTFD, &fds)?;
            *enabled = eventfds.len();
        }
        Ok(())
    }

    fn set_vector(
        &self,
        vector: u16,
        eventfd: Option<BorrowedFd<'_>>,
    ) -> Result<(), TransportError> {
        self.held()?;
        let enabled = self.state.lock().unpoisoned();
        if usize::from(vector) >= *enabled {
            return Err(TransportError::Unsupported("a vector that is not enabled"));
        }
        let fd = eventfd.map_or(-1, |fd| fd.as_raw_fd());
        let data = VFIO_IRQ_SET_DATA_EVENTFD;
        self.set_irqs(VFIO_PCI_MSIX_IRQ_INDEX, vector.into(), data, &[fd])
    }

    fn set_bus_master(&self, enable: bool) -> Result<(), TransportError> {
        let _serialised = self.state.lock().unpoisoned();
        let mut bytes = [0; 2];
        self.read_config(pci::COMMAND, &mut bytes)?;
        let mut command = u16::from_le_bytes(bytes);
        if command == u16::MAX {
            return Err(TransportError::Gone(
                "no answer from configuration space".into(),
            ));
        }
        // Memory space stays on in both cases: without it, an access to the mapped registers is a
        // SIGBUS.
        command |= pci::command::MEMORY_SPACE | pci::command::INTERRUPT_DISABLE;
        if enable {
            command |= pci::command::BUS_MASTER
        } else {
            command &= !pci::command::BUS_MASTER
        }
        self.write_config(pci::COMMAND, &command.to_le_bytes())
    }

    fn set_request(&self, eventfd: Option<BorrowedFd<'_>>) -> Result<bool, TransportError> {
        self.held()?;
        // Older kernels lack this interrupt.
        if interrupts(self.device.as_fd(), VFIO_PCI_REQ_IRQ_INDEX).unwrap_or(0) == 0 {
            return Ok(false);
        }
        let fd = eventfd.map_or(-1, |fd| fd.as_raw_fd());
        self.set_irqs(VFIO_PCI_REQ_IRQ_INDEX, 0, VFIO_IRQ_SET_DATA_EVENTFD, &[fd])?;
        Ok(true)
    }

    fn release(&self) -> Result<(), TransportError> {
        let bus_master = self.set_bus_master(false);
        let _serialised = self.state.lock().unpoisoned();
        if self.released.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        // The kernel waits until the last of these is closed, and the order matters.
        for window in &self.bar0 {
            let detached = window.registers.detach();
            detached.map_err(|e| TransportError::io("releasing the registers", e))?;
        }
        sys::close_in_place(self.device.as_fd())
            .and_then(|()| self.iommu.close_in_place())
            .map_err(|e| TransportError::io("releasing the device", e))?;
        bus_master
    }

    fn reset(&self) -> Result<(), TransportError> {
        self.held()?;
        if !self.can_reset {
            return Err(TransportError::Unsupported("a function reset"));
        }
        sys::plain(self.device.as_fd(), sys::DEVICE_RESET, 0)
            .map_err(|e| told("VFIO_DEVICE_RESET", e))?;
        Ok(())
    }
}

impl Drop for Vfio {
    fn drop(&mut self) {
        // The kernel does this too when the device is closed, but a doorbell cell that still exists
        // keeps it open. An error means that the device is lost.
        let _ = self.set_bus_master(false);
    }
}
