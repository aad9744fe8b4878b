//! A vfio-user server of one controller, as small as it can be: it polls everything.

use super::common::{host, memory, namespace};
use controller::{ControllerConfig, IrqSink, pci};
use dma::{MemoryCache, Prot};
use driver::in_process::Host;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use vfio_user::{
    Connection, Device, DeviceInfo, DmaMapping, DmaUnmapping, Errno, IrqAction, IrqData, IrqInfo,
    Listener, MmapArea, Outcome, RegionInfo, RegionMmap, SetIrqs, Status,
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

struct Server {
    host: Host,
    cache: MemoryCache,
    /// What the client waits for.
    waiting: Option<fn(&mut controller::Controller) -> bool>,
}

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
        let mapped = index == 0 && controller.config().mapped_doorbells;
        let mmap = mapped.then(|| RegionMmap {
            fd: controller.bar0_pages().fd(),
            offset: 0,
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
        match index {
            0 => self.host.controller().bar0_read(offset, data),
            _ => self.host.controller().config_read(offset, data),
        }
        Ok(())
    }
    fn region_write(&mut self, index: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        match index {
            0 => self.host.controller().bar0_write(offset, data),
            _ => self.host.controller().config_write(offset, data),
        }
        Ok(())
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
    fn set_irqs(&mut self, irqs: SetIrqs) -> Result<Outcome, Errno> {
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
        Ok(Outcome::Done)
    }
    fn dma_map(&mut self, map: DmaMapping, fd: Option<OwnedFd>) -> Result<(), Errno> {
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
        mapped.map_err(|_| Errno::EXIST)
    }
    fn dma_unmap(&mut self, unmap: DmaUnmapping) -> Result<Outcome, Errno> {
        let controller = self.host.controller();
        match unmap {
            DmaUnmapping::Range { iova, size } => {
                controller.dma_unmap(iova, size).map_err(|_| Errno::INVAL)?;
            }
            DmaUnmapping::All => controller.dma_unmap_all(),
        }
        self.waiting = Some(controller::Controller::dma_quiesced);
        Ok(Outcome::Pending)
    }
    fn reset(&mut self) -> Result<Outcome, Errno> {
        self.host.controller().reset();
        self.waiting = Some(|controller| !controller.is_resetting());
        Ok(Outcome::Pending)
    }
    fn disconnected(&mut self) {
        self.waiting = None;
        self.host.controller().disconnect();
    }
}

/// Serves clients of this socket, one after the other, as long as `go_on` says so.
pub fn serve(path: &Path, mapped_doorbells: bool, size: u64, go_on: impl Fn() -> bool) {
    let listener = Listener::bind(path).unwrap();
    let config = ControllerConfig {
        mapped_doorbells,
        mdts: 6,
        ..ControllerConfig::default()
    };
    let namespaces = vec![
        namespace(1, memory(size), 512),
        namespace(2, memory(size), 4096),
    ];
    let host = host(config, namespaces);
    let mut server = Server {
        host,
        cache: MemoryCache::new(),
        waiting: None,
    };
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
                    if matches!(status, Ok(Status::Closed) | Err(_)) {
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
