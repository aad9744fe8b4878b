//! [`Device`], the handle of an enabled controller.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dma::Memory;
use nvme::cmd::admin::GetLogPage;
use nvme::identify::IdentifyController;
use nvme::log::{Lid, Smart};
use nvme::{AdminOpcode, Command};
use zerocopy::FromBytes;

use crate::buffer::DmaBuffer;
use crate::control::{DeviceLimits, DeviceState, Event, SharedDevice};
use crate::error::Error;
use crate::iova::{MapFailure, Mapper, Registration};
use crate::options::{Options, QueueOptions};
use crate::queue::{QueuePair, ShadowBuffers};
use crate::transport::Transport;
use nvme_volume::Namespace;

/// An enabled NVMe controller. Any thread may use the handle; queue pairs created from it are
/// independent. The controller is shut down when the handle and the last queue pair are dropped, or
/// by [`Device::close`].
#[derive(Clone)]
pub struct Device {
    shared: Arc<SharedDevice>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device")
            .field("limits", &self.shared.limits)
            .finish_non_exhaustive()
    }
}

impl Device {
    /// Initializes a controller: disables it, sets up its Admin queues, enables it within the time
    /// limit that it states, and identifies it and its namespaces.
    ///
    /// # Errors
    /// [`Error`] when the transport, a register or an admin command fails, or the controller is
    /// unusable.
    pub fn open(transport: Arc<dyn Transport>, options: Options) -> Result<Self, Error> {
        Ok(Self {
            shared: Arc::new(SharedDevice::open(transport, options)?),
        })
    }

    /// Returns the capabilities of the controller.
    pub fn limits(&self) -> DeviceLimits {
        self.shared.limits
    }

    /// Returns the transport by which the driver reaches the controller.
    pub fn transport(&self) -> &Arc<dyn Transport> {
        &self.shared.transport
    }

    /// Returns the DMA mapper of the device, for temporary mappings and counters.
    pub fn mapper(&self) -> &Arc<Mapper> {
        &self.shared.mapper
    }

    /// Returns the Identify Controller data structure.
    pub fn identify(&self) -> IdentifyController {
        (*self.shared.lock().identify).clone()
    }

    /// Returns the usable namespaces as of the last scan.
    pub fn namespaces(&self) -> Vec<Namespace> {
        self.shared.lock().namespaces.clone()
    }

    /// Returns a namespace as of the last scan.
    ///
    /// # Errors
    /// [`Error::Namespace`] when the namespace does not exist or is not usable.
    pub fn namespace(&self, nsid: u32) -> Result<Namespace, Error> {
        let control = self.shared.lock();
        let found = control.namespaces.iter().find(|ns| ns.nsid == nsid);
        found.copied().ok_or(Error::Namespace {
            nsid,
            why: "no usable namespace has this number",
        })
    }

    /// Creates an I/O queue pair for a namespace.
    ///
    /// # Errors
    /// [`Error::NoQueue`] when all queue pairs that the controller allows are in use;
    /// [`Error::Namespace`] when the namespace does not exist or is not usable; otherwise the error
    /// of the failed admin command.
    pub fn queue(&self, nsid: u32, options: QueueOptions) -> Result<QueuePair, Error> {
        self.alive()?;
        let namespace = self.namespace(nsid)?;
        let epoch = self.shared.epoch.load(Ordering::Acquire);
        match QueuePair::create(&self.shared, &namespace, options) {
            // The controller does not answer: one more attempt after a reset.
            Err(Error::AdminTimeout { .. } | Error::Fatal { .. } | Error::Gone) => {
                self.shared.recover(epoch, "a queue could not be created")?;
                QueuePair::create(&self.shared, &namespace, options)
            }
            other => other,
        }
    }

    /// Allocates a buffer of zero bytes, aligned to a memory page and contiguous for the device.
    ///
    /// # Errors
    /// [`MapFailure`] when memory or address space is exhausted, or the mapping fails.
    pub fn allocate(&self, len: usize) -> Result<DmaBuffer, MapFailure> {
        self.shared.heap.allocate(len)
    }

    /// Registers memory for DMA. Transfers to and from any part of it need no copy, and
    /// [`Device::find`] finds it by address. Dropping the registration removes the memory from the
    /// lookup; outstanding commands keep the mapping until they complete.
    ///
    /// # Errors
    /// [`MapFailure`] when the memory cannot be mapped.
    pub fn register(&self, memory: &Memory) -> Result<Registration, MapFailure> {
        self.shared.mapper.register(memory)
    }

    /// Returns a buffer for the registered memory at an address of this process; `None` unless all
    /// of it is registered.
    pub fn find(&self, address: usize, len: usize) -> Option<DmaBuffer> {
        let table = self.shared.mapper.table();
        let (region, iova) = table.find(address, len as u64)?;
        DmaBuffer::of_region(region, iova - region.iova(), len as u64)
    }

    /// Maps a part of `memory` for one or a few transfers. The mapping is cached for later
    /// transfers, and evicted when room is needed.
    ///
    /// # Errors
    /// [`MapFailure`] when the memory cannot be mapped.
    pub fn map_temporary(
        &self,
        memory: &Memory,
        offset: u64,
        len: u64,
    ) -> Result<DmaBuffer, MapFailure> {
        let region = self.shared.mapper.map_temporary(memory, offset, len)?;
        DmaBuffer::of_region(&region, 0, len).ok_or(MapFailure::Range)
    }

    /// Handles asynchronous events, including added, removed or resized namespaces. Call it
    /// periodically, or when [`Device::eventfd`] is readable.
    ///
    /// # Errors
    /// [`Error::Gone`] when the device is lost; otherwise the [`Error`] of the failed command.
    pub fn service(&self) -> Result<Vec<Event>, Error> {
        self.alive()?;
        let epoch = self.shared.epoch.load(Ordering::Acquire);
        crate::admin::csts(&*self.shared.transport)
            .map(drop)
            .or_else(|_| self.shared.recover(epoch, "the device does not answer"))?;
        self.shared.transport.pause();
        self.retry(|control, options| control.service(options))
    }

    /// Returns the eventfd of the Admin queue's interrupt; when it is readable, call
    /// [`Device::service`]. `None` without interrupts.
    pub fn eventfd(&self) -> Option<OwnedFd> {
        let control = self.shared.lock();
        let fd: Option<BorrowedFd<'_>> = control.admin_eventfd();
        fd.and_then(|fd| fd.as_fd().try_clone_to_owned().ok())
    }

    /// Scans the namespaces again.
    ///
    /// # Errors
    /// [`Error`] when an Identify command fails.
    pub fn rescan(&self) -> Result<Vec<Namespace>, Error> {
        self.retry(|control, options| {
            control.namespaces = control.scan(options)?;
            Ok(control.namespaces.clone())
        })
    }

    /// Reads the SMART / Health Information log page of the controller.
    ///
    /// # Errors
    /// [`Error`] when the command fails.
    pub fn health(&self) -> Result<Smart, Error> {
        let mut page = [0; size_of::<Smart>()];
        self.log_page(Lid::SMART, nvme::cmd::NSID_BROADCAST, &mut page)?;
        Smart::read_from_bytes(&page).map_err(|_| Error::Unusable("log page"))
    }

    /// Reads the first bytes of a log page: whole dwords, at most 8 KiB.
    ///
    /// # Errors
    /// [`Error`] when the command fails.
    pub fn log_page(&self, lid: Lid, nsid: u32, page: &mut [u8]) -> Result<(), Error> {
        let dwords = page.len() / 4;
        let numd_z = u32::try_from(dwords).unwrap_or(u32::MAX).saturating_sub(1);
        let log = GetLogPage {
            lid,
            numd_z,
            rae: true,
            ..GetLogPage::default()
        };
        let mut command = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, nsid);
        log.apply(&mut command);
        self.admin_read(command, page).map(drop)
    }

    /// Executes any admin command without data or with data to the host (at most 8 KiB). Returns
    /// dwords 0 and 1 of the completion.
    ///
    /// # Errors
    /// [`Error`] when the command fails.
    pub fn admin_read(&self, command: Command, data: &mut [u8]) -> Result<u64, Error> {
        self.retry(|control, options| control.read(command, data, options.admin_timeout))
    }

    /// Executes any admin command without data or with data from the host (at most 8 KiB). The
    /// command is not repeated after a reset. Returns dwords 0 and 1 of the completion.
    ///
    /// # Errors
    /// [`Error`] when the command fails.
    pub fn admin_write(&self, command: Command, data: &[u8]) -> Result<u64, Error> {
        self.alive()?;
        let limit = self.shared.options.admin_timeout;
        self.shared.lock().write(command, data, limit)
    }

    /// Runs an idempotent operation. If the controller does not answer, resets it and runs the
    /// operation once more.
    fn retry<T>(
        &self,
        mut act: impl FnMut(&mut crate::control::Control, &Options) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.alive()?;
        let epoch = self.shared.epoch.load(Ordering::Acquire);
        let first = act(&mut self.shared.lock(), &self.shared.options);
        match first {
            Err(Error::AdminTimeout { .. } | Error::Fatal { .. } | Error::Gone) => {
                self.shared
                    .recover(epoch, "an admin command was not answered")?;
                act(&mut self.shared.lock(), &self.shared.options)
            }
            other => other,
        }
    }

    fn alive(&self) -> Result<(), Error> {
        match self.shared.state() {
            DeviceState::Live => Ok(()),
            DeviceState::Suspended => Err(Error::Suspended),
            _ => Err(Error::Gone),
        }
    }

    /// Resets and re-enables the controller. Queue pairs recover by themselves.
    ///
    /// # Errors
    /// [`Error::Gone`] when the device is lost.
    pub fn reset(&self) -> Result<(), Error> {
        self.alive()?;
        let epoch = self.shared.epoch.load(Ordering::Acquire);
        self.shared.recover(epoch, "asked for")
    }

    /// Returns the number of controller resets since the device was opened.
    pub fn resets(&self) -> u64 {
        self.shared.resets.load(Ordering::Relaxed)
    }

    /// Returns whether the device is lost or closed.
    pub fn is_gone(&self) -> bool {
        matches!(
            self.shared.state(),
            DeviceState::GoneQuiet | DeviceState::GoneWild
        )
    }

    /// Shuts the controller down and disables it, for example before an external reset, a power
    /// loss, or a firmware update. Queue pairs keep their outstanding commands, and accept more
    /// while they have room; command time-outs are paused.
    ///
    /// # Errors
    /// [`Error::Gone`] when the device is lost.
    pub fn suspend(&self) -> Result<(), Error> {
        self.shared.suspend()
    }

    /// Re-enables a suspended controller. Queue pairs submit their kept commands again by
    /// themselves.
    ///
    /// # Errors
    /// [`Error`] when a step fails; the device is then still suspended, and can be resumed again or
    /// closed.
    pub fn resume(&self) -> Result<(), Error> {
        self.shared.resume()
    }

    /// Returns whether the device is suspended.
    pub fn is_suspended(&self) -> bool {
        self.shared.state() == DeviceState::Suspended
    }

    /// Returns a descriptor that becomes readable when the system asks for the device (VFIO's
    /// request interrupt); `None` on a transport without such requests. The application should then
    /// call [`Device::release`].
    ///
    /// # Errors
    /// [`Error::System`] when no eventfd can be created; otherwise the transport's error.
    pub fn request_eventfd(&self) -> Result<Option<OwnedFd>, Error> {
        self.shared.request_eventfd()
    }

    /// Returns the device to the system. New commands are refused, and outstanding ones may finish
    /// within `limit`. The controller is then shut down and released although handles still exist;
    /// these see a lost device. Returns whether all commands finished by themselves; the remaining
    /// ones fail with [`CommandError::Gone`](crate::CommandError::Gone). Each queue pair must be
    /// polled by its own thread meanwhile.
    pub fn release(&self, limit: std::time::Duration) -> bool {
        self.shared.release(limit)
    }

    /// Returns the shadow doorbell buffers in use, for tests.
    pub fn shadow_buffers(&self) -> Option<Arc<ShadowBuffers>> {
        self.shared.lock().shadow_buffers()
    }

    /// Shuts the controller down in an orderly way. Outstanding requests fail with
    /// [`CommandError::Gone`](crate::CommandError::Gone).
    pub fn close(&self) {
        self.shared.close();
    }
}
