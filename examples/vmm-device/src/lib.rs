//! A virtual NVMe disk as a PCI device of a VMM: configuration space, BAR0, and MSI-X.
//!
//! [`NvmeDevice`] has the calls that a VMM's PCI bus makes. The controller runs in a thread of its
//! own, whose loop polls while there is work and sleeps otherwise. Configuration space and
//! registers are the controller's. The MSI-X table belongs to the VMM, because only the VMM can
//! inject the messages in it.
#![forbid(unsafe_code)]

use controller::{Controller, ControllerConfig, IrqSink, NamespaceConfig, pci};
use in_process::{Host, InProcess};
use nvme::pci::{CAPABILITIES_POINTER, cap_id, msix};
use std::error::Error;
use std::sync::Arc;
use vm_memory::GuestMemoryMmap;
use volume::{Io, IoOptions, Volume};

/// An interrupt message, as the guest's driver put it into the MSI-X table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Address that the message is written to.
    pub address: u64,
    /// Data that is written.
    pub data: u32,
}

/// The VMM's function that injects a message into the guest. It must not block.
pub type Inject = Arc<dyn Fn(Message) + Send + Sync>;

/// Receiver of one vector's interrupts.
struct Vector(Message, Inject);

impl IrqSink for Vector {
    fn signal(&self) {
        (self.1)(self.0);
    }
}

/// A virtual NVMe disk, as a VMM's PCI bus sees it.
pub struct NvmeDevice {
    disk: Arc<InProcess>,
    inject: Inject,
    /// Offset of the MSI-X capability in configuration space.
    msix: u64,
    /// MSI-X table, as the guest reads and writes it: 16 bytes for each vector.
    table: Vec<u8>,
    /// Message Control of the MSI-X capability, as the receivers of interrupts were last set.
    control: u16,
}

impl NvmeDevice {
    /// Creates a disk on `volume` for a guest with this memory, and starts its thread.
    ///
    /// # Errors
    /// The memory is not shared, or the volume cannot be opened.
    pub fn new(
        memory: &GuestMemoryMmap,
        volume: Arc<dyn Volume>,
        inject: Inject,
    ) -> Result<Self, Box<dyn Error>> {
        let windows = dma::vm_memory::windows(memory)?;
        let disk = in_process::spawn(move || {
            let io = Io::new(IoOptions::default()); // the thread's io_uring
            let namespace = NamespaceConfig::new(1, volume).with_nguid([0x76; 16]);
            let config = ControllerConfig {
                serial: "EXAMPLE1".into(),
                ..ControllerConfig::default()
            };
            let mut controller = Controller::new(0, config, vec![namespace], &io)
                .map_err(|error| error.to_string())?;
            for window in windows {
                controller
                    .dma_map(window.iova, window.len, window.backing, window.prot)
                    .map_err(|error| error.to_string())?;
            }
            Host::new(controller, io).map_err(|error| error.to_string())
        })?;
        let vectors = disk.with(|host| host.controller().vectors())?;
        let mut table = vec![0; 16 * usize::from(vectors)];
        // Vectors are masked after power-on.
        table
            .iter_mut()
            .skip(12)
            .step_by(16)
            .for_each(|control| *control = 1);
        let (msix, control) = (0, 0);
        let mut device = Self {
            disk,
            inject,
            msix,
            table,
            control,
        };
        device.msix = device
            .capability(cap_id::MSI_X)
            .ok_or("no MSI-X capability")?;
        Ok(device)
    }

    /// Returns the offset of a capability in configuration space.
    fn capability(&mut self, id: u8) -> Option<u64> {
        let mut at = [0];
        self.config_read(CAPABILITIES_POINTER as u64, &mut at);
        while at[0] != 0 {
            let mut header = [0; 2];
            self.config_read(at[0].into(), &mut header);
            if header[0] == id {
                return Some(at[0].into());
            }
            at[0] = header[1];
        }
        None
    }

    /// Handles a read of configuration space. (The VMM itself moves BAR0 in its address space.)
    pub fn config_read(&mut self, offset: u64, data: &mut [u8]) {
        self.read(data, move |controller, data| {
            controller.config_read(offset, data)
        });
    }

    /// Handles a write of configuration space. Returns when the write has taken effect: after Bus
    /// Master Enable was cleared, the device writes nothing to guest memory.
    pub fn config_write(&mut self, offset: u64, data: &[u8]) {
        let data = data.to_vec();
        self.disk
            .with(move |host| host.controller().config_write(offset, &data))
            .ok();
        let settled =
            |controller: &mut Controller| controller.config_settled() && !controller.is_resetting();
        while let Ok(false) = self.disk.with(move |host| settled(host.controller())) {
            std::thread::yield_now();
        }
        let mut control = [0; 2];
        self.config_read(self.msix + msix::CONTROL as u64, &mut control);
        let control = u16::from_le_bytes(control);
        if std::mem::replace(&mut self.control, control) != control {
            (0..self.table.len() / 16).for_each(|vector| self.set_receiver(vector));
        }
    }

    /// Handles a read of BAR0.
    pub fn bar0_read(&mut self, offset: u64, data: &mut [u8]) {
        match self.table_range(offset, data.len()) {
            Some(range) => data.copy_from_slice(self.table.get(range).unwrap_or_default()),
            None => self.read(data, move |controller, data| {
                controller.bar0_read(offset, data)
            }),
        }
    }

    /// Handles a write of BAR0. A doorbell only wakes the controller's thread.
    pub fn bar0_write(&mut self, offset: u64, data: &[u8]) {
        let Some(range) = self.table_range(offset, data.len()) else {
            let data = data.to_vec();
            self.disk
                .post(move |host| host.controller().bar0_write(offset, &data))
                .ok();
            return;
        };
        let vector = range.start / 16;
        if let Some(bytes) = self.table.get_mut(range) {
            bytes.copy_from_slice(data);
        }
        self.set_receiver(vector);
    }

    /// Returns the part of the MSI-X table that an access of 4 or 8 bytes means, if it means any.
    fn table_range(&self, offset: u64, len: usize) -> Option<std::ops::Range<usize>> {
        let start = usize::try_from(offset.checked_sub(pci::MSIX_TABLE_OFFSET)?).ok()?;
        let is_inside = start.checked_add(len)? <= self.table.len();
        (is_inside && matches!(len, 4 | 8) && start.is_multiple_of(len))
            .then_some(start..start + len)
    }

    /// Gives a vector its receiver, or none while it is masked: the controller then keeps its
    /// interrupts in the pending bit array, and delivers them to the next receiver.
    fn set_receiver(&mut self, vector: usize) {
        let mut entry = self.table.iter().skip(16 * vector).copied();
        let mut word = || u32::from_le_bytes([(); 4].map(|()| entry.next().unwrap_or(0)));
        let (low, high, data, mask) = (word(), word(), word(), word() & 1 != 0);
        let address = u64::from(high) << 32 | u64::from(low);
        let enabled = self.control & msix::CONTROL_ENABLE != 0;
        let is_open = enabled && self.control & msix::CONTROL_FUNCTION_MASK == 0 && !mask;
        let receiver = is_open.then(|| {
            let message = Message { address, data };
            Arc::new(Vector(message, self.inject.clone())) as Arc<dyn IrqSink>
        });
        let set = move |host: &mut Host| host.controller().set_msix(vector as u16, receiver);
        self.disk.with(set).ok();
    }

    /// Reads from the controller in its thread. All bits are ones if the thread has ended.
    fn read(
        &self,
        data: &mut [u8],
        read: impl FnOnce(&mut Controller, &mut [u8]) + Send + 'static,
    ) {
        data.fill(0xff);
        let mut bytes = data.to_vec();
        let answer = self.disk.with(move |host| {
            read(host.controller(), &mut bytes);
            bytes
        });
        if let Ok(bytes) = answer {
            data.copy_from_slice(&bytes);
        }
    }
}
