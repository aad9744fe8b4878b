//! A vfio-user server of one controller, as small as it can be: it polls everything. It can be told
//! to behave as servers of others do.
#![allow(dead_code)]

use crate::common::{host, memory, namespace};
use controller::{ControllerConfig, IrqSink, pci};
use dma::{MemoryCache, Prot};
use in_process::Host;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vfio_user::{
    Connection, ConnectionStatus, Device, DeviceInfo, DmaMapping, DmaUnmapping, Errno, IrqAction,
    IrqData, IrqInfo, Listener, MmapArea, OperationOutcome, RegionInfo, RegionMmap, SetIrqs,
    Unmapped,
};

const AREA: [MmapArea; 1] = [MmapArea {
    offset: pci::DOORBELL_OFFSET,
    size: pci::DOORBELL_SIZE,
}];

struct Signal(OwnedFd);
impl IrqSink for Signal {
    fn signal(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// In what a server differs from ours.
#[derive(Default)]
pub struct Foreign {
    /// It fails the controller when an interrupt has no eventfd.
    pub strict: Option<Arc<Strict>>,
    /// It offers this file for its doorbells.
    pub file: Option<DoorbellFile>,
}

/// A file to be mapped in place of the controller's own page.
pub struct DoorbellFile {
    pub fd: OwnedFd,
    /// Where it has BAR0's first byte, as the server says.
    pub offset: u64,
}

/// Interrupts as SPDK's target sends them: when Interrupt Disable is clear or MSI-X Enable is set,
/// to the vector's eventfd; without one the controller fails for good (`post_completion` in its
/// lib/nvmf/vfio_user.c).
#[derive(Default)]
pub struct Strict {
    enabled: AtomicBool,
    eventfds: Mutex<Vec<Option<OwnedFd>>>,
    /// Interrupts that were sent.
    pub sent: AtomicU64,
    /// The controller has failed.
    pub failed: AtomicBool,
}

struct Vector(Arc<Strict>, usize);
impl IrqSink for Vector {
    fn signal(&self) {
        let Vector(strict, number) = self;
        if !strict.enabled.load(Ordering::Relaxed) {
            return;
        }
        match strict.eventfds.lock().unwrap().get(*number) {
            Some(Some(fd)) => {
                let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
                strict.sent.fetch_add(1, Ordering::Relaxed);
            }
            _ => strict.failed.store(true, Ordering::Relaxed),
        }
    }
}

impl Strict {
    fn assign(&self, start: usize, fds: Vec<Option<OwnedFd>>) {
        let mut known = self.eventfds.lock().unwrap();
        for (vector, fd) in (start..).zip(fds) {
            if known.len() <= vector {
                known.resize_with(vector + 1, || None);
            }
            known[vector] = fd;
        }
    }
}

struct Server {
    host: Host,
    foreign: Foreign,
    cache: MemoryCache,
    /// What the client waits for.
    waiting: Option<fn(&mut controller::Controller) -> bool>,
}

impl Server {
    /// After everything that changes configuration space or receivers: the strict ones
    /// are told of each interrupt.
    fn attend(&mut self) {
        let Some(strict) = &self.foreign.strict else {
            return;
        };
        let controller = self.host.controller();
        let (mut command, mut control) = ([0; 2], [0; 2]);
        controller.config_read(nvme::pci::COMMAND as u64, &mut command);
        controller.config_read(
            MSIX_CAPABILITY + nvme::pci::msix::CONTROL as u64,
            &mut control,
        );
        let intx = u16::from_le_bytes(command) & nvme::pci::command::INTERRUPT_DISABLE == 0;
        let msix = u16::from_le_bytes(control) & nvme::pci::msix::CONTROL_ENABLE != 0;
        strict.enabled.store(intx || msix, Ordering::Relaxed);
        for vector in 0..controller.vectors() {
            let sink = Vector(strict.clone(), vector.into());
            controller.set_msix(vector, Some(Arc::new(sink)));
        }
    }
}

/// Where the controller has its MSI-X capability.
const MSIX_CAPABILITY: u64 = 0x50;

impl Device for Server {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            reset: true,
            pci: true,
            num_regions: 9,
            num_irqs: 5,
        }
    }
    fn region(&self, index: u32) -> Option<RegionInfo<'_>> {
        let controller = self.host.controller_ref();
        let offered = controller.config().mapped_doorbells || self.foreign.file.is_some();
        let mapped = index == 0 && offered;
        let mmap = mapped.then(|| RegionMmap {
            fd: match &self.foreign.file {
                Some(file) => file.fd.as_fd(),
                None => controller.bar0_pages().fd(),
            },
            offset: self.foreign.file.as_ref().map_or(0, |file| file.offset),
            areas: &AREA,
        });
        let size = match index {
            0 => pci::BAR0_SIZE,
            7 => pci::CONFIG_SIZE as u64,
            _ => 0,
        };
        (index < 9).then_some(RegionInfo {
            size,
            read: size > 0,
            write: size > 0,
            mmap,
        })
    }
    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        let failed = |strict: &Arc<Strict>| strict.failed.load(Ordering::Relaxed);
        match index {
            0 if offset == nvme::regs::CSTS && self.foreign.strict.as_ref().is_some_and(failed) => {
                let status = nvme::regs::Csts::new().with_rdy(true).with_cfs(true);
                data.copy_from_slice(&status.into_bits().to_le_bytes());
            }
            0 => self.host.controller().bar0_read(offset, data),
            _ => self.host.controller().config_read(offset, data),
        }
        Ok(())
    }
    fn region_write(
        &mut self,
        index: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<OperationOutcome, Errno> {
        match index {
            0 => self.host.controller().bar0_write(offset, data),
            _ => self.host.controller().config_write(offset, data),
        }
        self.attend();
        Ok(OperationOutcome::Done)
    }
    fn irq(&self, index: u32) -> Option<IrqInfo> {
        let count = if index == 2 {
            u32::from(self.host.controller_ref().vectors())
        } else {
            0
        };
        (index < 5).then_some(IrqInfo {
            count,
            eventfd: true,
            ..IrqInfo::default()
        })
    }
    fn set_irqs(&mut self, irqs: SetIrqs) -> Result<OperationOutcome, Errno> {
        if let (Some(strict), IrqAction::Trigger) = (&self.foreign.strict, irqs.action) {
            match irqs.data {
                IrqData::Eventfd(fds) => strict.assign(irqs.start as usize, fds),
                _ => strict.eventfds.lock().unwrap().clear(),
            }
            return Ok(OperationOutcome::Done);
        }
        let controller = self.host.controller();
        match (irqs.action, irqs.data) {
            (IrqAction::Trigger, IrqData::None) => {
                (0..controller.vectors()).for_each(|v| controller.set_msix(v, None));
            }
            (IrqAction::Trigger, IrqData::Eventfd(fds)) => {
                for (vector, fd) in (irqs.start as u16..).zip(fds) {
                    let sink = fd.map(|fd| Arc::new(Signal(fd)) as Arc<dyn IrqSink>);
                    controller.set_msix(vector, sink);
                }
            }
            _ => return Err(Errno::INVAL),
        }
        Ok(OperationOutcome::Done)
    }
    fn dma_map(&mut self, map: DmaMapping, fd: Option<OwnedFd>) -> Result<OperationOutcome, Errno> {
        let memory = self
            .cache
            .import(fd.ok_or(Errno::INVAL)?, map.offset + map.size, map.write);
        let backing = Some((memory.map_err(|_| Errno::INVAL)?, map.offset));
        let prot = Prot {
            read: map.read,
            write: map.write,
        };
        let mapped = self
            .host
            .controller()
            .dma_map(map.iova, map.size, backing, prot);
        mapped.map_err(|_| Errno::EXIST)?;
        Ok(OperationOutcome::Done)
    }
    fn dma_unmap(&mut self, unmap: DmaUnmapping) -> Result<Unmapped, Errno> {
        let controller = self.host.controller();
        let size = match unmap {
            DmaUnmapping::Range { iova, size } => {
                controller.dma_unmap(iova, size).map_err(|_| Errno::INVAL)?
            }
            DmaUnmapping::All => controller.dma_unmap_all(),
        };
        self.waiting = Some(controller::Controller::dma_quiesced);
        Ok(Unmapped {
            size,
            outcome: OperationOutcome::Pending,
        })
    }
    fn reset(&mut self) -> Result<OperationOutcome, Errno> {
        self.host.controller().reset();
        self.attend();
        self.waiting = Some(|controller| !controller.is_resetting());
        Ok(OperationOutcome::Pending)
    }
    fn disconnected(&mut self) {
        self.waiting = None;
        self.host.controller().disconnect();
        self.attend();
    }
}

/// Serves clients of this socket, one after the other, as long as `go_on` says so.
pub fn serve(path: &Path, mapped_doorbells: bool, size: u64, go_on: impl Fn() -> bool) {
    let config = ControllerConfig {
        mapped_doorbells,
        mdts: 6,
        ..ControllerConfig::default()
    };
    serve_with(path, config, Foreign::default(), size, go_on);
}

/// As [`serve`], for a server of others: by its identifiers it is not one of ours.
pub fn serve_foreign(path: &Path, foreign: Foreign, size: u64, go_on: impl Fn() -> bool) {
    let config = ControllerConfig {
        pci: pci::PciIds {
            vendor: 0x4e58,
            device: 1,
            ..pci::PciIds::default()
        },
        ..ControllerConfig::default()
    };
    serve_with(path, config, foreign, size, go_on);
}

fn serve_with(
    path: &Path,
    config: ControllerConfig,
    foreign: Foreign,
    size: u64,
    go_on: impl Fn() -> bool,
) {
    let listener = Listener::bind(path).unwrap();
    let namespaces = vec![
        namespace(1, memory(size), 512),
        namespace(2, memory(size), 4096),
    ];
    let host = host(config, namespaces);
    let mut server = Server {
        host,
        foreign,
        cache: MemoryCache::new(),
        waiting: None,
    };
    server.attend();
    let mut connection: Option<Connection> = None;
    let mut idle = 0u32;
    while go_on() {
        idle = if server.host.step() {
            0
        } else {
            idle.saturating_add(1)
        };
        if idle.is_multiple_of(16) {
            match &mut connection {
                None => connection = listener.accept().unwrap().map(Connection::new),
                Some(open) => {
                    let status = open.on_ready(&mut server);
                    if matches!(status, Ok(ConnectionStatus::Closed) | Err(_)) {
                        connection = None;
                    }
                }
            }
        }
        if let Some(over) = server.waiting
            && over(server.host.controller())
            && let Some(open) = &mut connection
        {
            server.waiting = None;
            let _ = open.complete(&mut server, Ok(()));
        }
        if idle > 2000 {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}
