//! Life cycle of a controller: enable, identify, queues, shadow doorbells, reset, shutdown.
//!
//! Queues and commands belong to an *epoch* of the controller, which has a number. The number
//! changes when a reset is known to have stopped everything: from then on no command of an earlier
//! epoch can access memory. Queue pairs compare the number (one load). When it has changed, each
//! recreates its queues in its own thread, under the lock of [`Control`]. The thread that finds the
//! controller dead resets it; a second thread finds the epoch changed and does nothing.

mod life;
mod ready;

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use nvme::aen::{EventType, Notice};
use nvme::cmd::admin::{
    AbortCdw10, AbortResult, Cns, CreateCqCdw11, CreateQueueCdw10, CreateSqCdw11, DeleteQueueCdw10,
    GetLogPage, IdentifyCdw10, SetFeaturesCdw10,
};
use nvme::feature::{AsyncEventConfig, Fid, NumberOfQueues};
use nvme::identify::{IdentifyController, IdentifyNamespace, NsidList};
use nvme::log::Lid;
use nvme::regs::{self, Cap};
use nvme::{AdminOpcode, Command};
use zerocopy::{FromBytes, FromZeros};

use crate::admin::{Admin, csts};
use crate::buffer::Heap;
use crate::error::Error;
use crate::iova::Mapper;
use crate::options::{Options, ShadowMemory};
use crate::queue::ring::ShadowBuffers;
use crate::transport::Transport;
use nvme_volume::Namespace;
use sync::Unpoisoned;

/// Maximum number of namespaces that a scan reads. No known controller has more.
const MAX_NAMESPACES: usize = 4096;

/// Capabilities of a controller that matter to queue pairs. They never change.
#[derive(Clone, Copy, Debug)]
pub struct DeviceLimits {
    /// Maximum number of entries of a queue (CAP.MQES + 1).
    pub queue_entries: u32,
    /// Maximum number of I/O queue pairs that the controller allows.
    pub io_queues: u16,
    /// Maximum number of data bytes of one command.
    pub max_transfer: u64,
    /// Memory page size in bytes (CC.MPS).
    pub page_size: u64,
    /// Whether the driver uses SGLs with this controller.
    pub sgl: bool,
    /// Whether the controller has a volatile write cache.
    pub volatile_cache: bool,
    /// Whether the controller supports Compare.
    pub compare: bool,
    /// Whether the controller supports Dataset Management.
    pub dataset_management: bool,
    /// Whether the controller supports Write Zeroes.
    pub write_zeroes: bool,
    /// Whether the controller supports Verify.
    pub verify: bool,
    /// Whether the controller supports Doorbell Buffer Config.
    pub doorbell_buffers: bool,
    /// Number of MSI-X vectors that the driver uses.
    pub vectors: u16,
    /// Doorbell stride (CAP.DSTRD): doorbells are 4 << DSTRD bytes apart.
    pub(crate) dstrd: u8,
}

/// An event that the controller reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A rescan found this namespace new, or with a different size or format.
    NamespaceChanged(Namespace),
    /// A namespace with this ID no longer exists.
    NamespaceRemoved(u32),
    /// Another asynchronous event, as the controller reported it.
    Other(nvme::aen::AsyncEvent),
}

/// Operating state of the controller, as queue pairs see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum DeviceState {
    Live = 0,
    /// The device is lost, and it is certain that it accesses no memory any more.
    GoneQuiet = 1,
    /// The device is lost, and may still access memory. That memory is never used again.
    GoneWild = 2,
    /// The controller is disabled for a while, and queue pairs hold their commands.
    Suspended = 3,
    /// The device will be released. Outstanding commands may finish, new ones are refused.
    Draining = 4,
}

/// State of a device that the device handle and all queue pairs share.
pub(crate) struct SharedDevice {
    pub transport: Arc<dyn Transport>,
    pub mapper: Arc<Mapper>,
    pub heap: Arc<Heap>,
    pub options: Options,
    /// Number of the current epoch; changes at every reset and change of state (see the module
    /// documentation).
    pub epoch: AtomicU32,
    state: AtomicU8,
    /// Number of controller resets since the device was opened.
    pub resets: AtomicU64,
    pub limits: DeviceLimits,
    /// Number of outstanding commands of each queue pair. The queue pair's thread stores it;
    /// [`SharedDevice::release`] reads it.
    flying: Mutex<Vec<Weak<AtomicU32>>>,
    control: Mutex<Control>,
}

pub(crate) struct Control {
    admin: Admin,
    pub identify: Box<IdentifyController>,
    cap: Cap,
    /// Whether each I/O queue identifier is in use; the first entry is for identifier 1.
    used: Vec<bool>,
    eventfds: Vec<OwnedFd>,
    shadow: Option<Arc<ShadowBuffers>>,
    /// Whether shadow doorbells are in use: the controller has accepted Doorbell Buffer Config
    /// since its last reset.
    shadow_live: bool,
    pub namespaces: Vec<Namespace>,
    events: VecDeque<Event>,
    /// Memory of queue pairs that were dropped while the controller might still use it; freed after
    /// the next reset.
    grave: Vec<Box<dyn Send>>,
    /// Eventfd that is signalled when the system asks for the device, for example before unbinding
    /// it.
    request: Option<OwnedFd>,
}

impl SharedDevice {
    /// Initializes a controller: reset, Admin queues, enable, Identify, namespaces.
    pub fn open(transport: Arc<dyn Transport>, options: Options) -> Result<Self, Error> {
        transport.set_bus_master(true)?;
        csts(&*transport)?;
        let cap = Cap::from_bits(transport.read64(regs::CAP)?);
        if cap.into_bits() == u64::MAX {
            return Err(Error::Gone);
        }
        if !cap.css().ncss() && !cap.css().iocss() {
            return Err(Error::Unusable("it has no NVM command set"));
        }
        if cap.mpsmin() > 4 {
            return Err(Error::Unusable("its smallest memory page is above 64 KiB"));
        }
        let mapper = Mapper::new(transport.clone());
        let heap = Heap::new(mapper.clone(), 4096 << cap.mpsmin(), options.memory.clone());
        let admin = Admin::new(&transport, &heap, &options, cap.dstrd())?;
        let wanted = options.io_queues.max(1);
        let mut control = Control {
            admin,
            identify: Box::new(IdentifyController::new_zeroed()),
            cap,
            used: Vec::new(),
            eventfds: Vec::new(),
            shadow: None,
            shadow_live: false,
            namespaces: Vec::new(),
            events: VecDeque::new(),
            grave: Vec::new(),
            request: None,
        };
        control.disable(&*transport)?;
        if options.interrupts && transport.msix_vectors() > 1 {
            let vectors = transport.msix_vectors().min(wanted + 1);
            for _ in 0..vectors {
                let flags =
                    rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
                let fd = rustix::event::eventfd(0, flags).map_err(|errno| Error::System {
                    what: "eventfd",
                    source: errno.into(),
                })?;
                control.eventfds.push(fd);
            }
        }
        let mut limits = DeviceLimits {
            queue_entries: u32::from(cap.mqes_z()) + 1,
            io_queues: wanted,
            max_transfer: 0,
            page_size: 4096 << cap.mpsmin(),
            sgl: false,
            volatile_cache: false,
            compare: false,
            dataset_management: false,
            write_zeroes: false,
            verify: false,
            doorbell_buffers: false,
            vectors: control.eventfds.len() as u16,
            dstrd: cap.dstrd(),
        };
        let allowed = control.bring_up(&transport, &options, wanted)?;
        let id = &control.identify;
        limits.io_queues = allowed.min(wanted);
        // MDTS counts in pages of the minimum size. Whole pages are kept, so that splits lie on
        // page borders.
        let page_min = 4096u32 << cap.mpsmin();
        let mdts = id.mdts_bytes(page_min).unwrap_or(u64::MAX);
        let chosen = options.max_transfer & !(limits.page_size - 1);
        limits.max_transfer = chosen.clamp(limits.page_size, 32 << 20).min(mdts);
        limits.sgl = options.sgl && matches!(id.sgls.sgls(), 1 | 2);
        limits.volatile_cache = id.vwc.vwcp();
        limits.compare = id.oncs.nvmcmps();
        limits.dataset_management = id.oncs.nvmdsmsv();
        limits.write_zeroes = id.oncs.nvmwzsv();
        limits.verify = id.oncs.nvmvfys();
        limits.doorbell_buffers = id.oacs.dbcs();
        control.used = vec![false; usize::from(limits.io_queues) + 1];
        if let Some(admin) = control.used.first_mut() {
            *admin = true;
        }
        control.namespaces = control.scan(&options)?;
        Ok(Self {
            transport,
            mapper,
            heap,
            options,
            epoch: AtomicU32::new(0),
            state: AtomicU8::new(DeviceState::Live as u8),
            resets: AtomicU64::new(0),
            limits,
            flying: Mutex::default(),
            control: Mutex::new(control),
        })
    }

    pub fn lock(&self) -> MutexGuard<'_, Control> {
        // After a panic the next reset repairs partial updates.
        self.control.lock().unpoisoned()
    }

    pub fn state(&self) -> DeviceState {
        match self.state.load(Ordering::Acquire) {
            0 => DeviceState::Live,
            1 => DeviceState::GoneQuiet,
            3 => DeviceState::Suspended,
            4 => DeviceState::Draining,
            _ => DeviceState::GoneWild,
        }
    }

    /// Resets and re-enables the controller, unless another thread has done so since epoch
    /// `observed`. When this returns, the epoch has changed.
    pub fn recover(&self, observed: u32, why: &'static str) -> Result<(), Error> {
        let mut control = self.lock();
        let state = self.state();
        if self.epoch.load(Ordering::Acquire) != observed || state != DeviceState::Live {
            return match state {
                DeviceState::Live => Ok(()),
                DeviceState::Suspended => Err(Error::Suspended),
                _ => Err(Error::Gone),
            };
        }
        tracing::warn!(why, "resetting the controller");
        self.resets.fetch_add(1, Ordering::Relaxed);
        // While another process resets the function, the kernel answers this call only after that
        // reset, with memory space on. Interrupts set up meanwhile would restore the command
        // register that they found: memory space off.
        let _ = self.transport.set_bus_master(true);
        let result = match control.disable(&*self.transport) {
            Ok(()) => {
                // All activity of the previous life has stopped.
                control.grave.clear();
                let wanted = self.limits.io_queues;
                let first = control.bring_up(&self.transport, &self.options, wanted);
                let up = first.or_else(|error| {
                    tracing::warn!(%error, "the controller did not come up; once more after a function reset");
                    self.transport.reset()?;
                    self.transport.set_bus_master(true)?;
                    control.disable(&*self.transport)?;
                    control.bring_up(&self.transport, &self.options, wanted)
                });
                match up {
                    Ok(allowed) if allowed < wanted => {
                        Err(Error::Unusable("it allows fewer queues than before"))
                    }
                    other => other.map(drop),
                }
            }
            Err(error) => Err(error),
        };
        match result {
            Ok(()) => {
                match control.scan(&self.options) {
                    Ok(namespaces) => control.replace(namespaces),
                    Err(error) => tracing::warn!(%error, "namespaces could not be identified"),
                }
                self.epoch.fetch_add(1, Ordering::Release);
                Ok(())
            }
            Err(error) => {
                tracing::error!(%error, "giving up the device");
                self.give_up(&mut control);
                Err(Error::Gone)
            }
        }
    }

    /// Stops using a lost controller. Its access to memory is revoked; if that fails, the memory is
    /// never used again.
    fn give_up(&self, control: &mut Control) {
        let _ = self.transport.set_bus_master(false);
        let quiet = self.mapper.cut_off();
        if quiet {
            control.grave.clear();
        } else {
            for memory in control.grave.drain(..) {
                std::mem::forget(memory);
            }
        }
        let state = if quiet {
            DeviceState::GoneQuiet
        } else {
            DeviceState::GoneWild
        };
        self.state.store(state as u8, Ordering::Release);
        self.epoch.fetch_add(1, Ordering::Release);
    }

    /// Shuts the controller down in an orderly way ("NVMe Base 2.1", 3.6.1) and disables it. No
    /// queue pair works afterwards.
    pub fn close(&self) {
        let mut control = self.lock();
        if matches!(self.state(), DeviceState::GoneQuiet | DeviceState::GoneWild) {
            return;
        }
        if let Err(error) = control.shut_down(&*self.transport) {
            tracing::debug!(%error, "shutdown");
        }
        match control.disable(&*self.transport) {
            Ok(()) => {
                control.grave.clear();
                let _ = self.transport.set_msix(&[]);
                let _ = self.transport.set_bus_master(false);
                self.state
                    .store(DeviceState::GoneQuiet as u8, Ordering::Release);
                self.epoch.fetch_add(1, Ordering::Release);
            }
            Err(_) => self.give_up(&mut control),
        }
    }
}

impl Drop for SharedDevice {
    fn drop(&mut self) {
        self.close();
        self.mapper.trim();
    }
}

impl Control {
    /// Enables a disabled controller and prepares it for I/O queues. Returns the number of I/O
    /// queue pairs that it allows.
    fn bring_up(
        &mut self,
        transport: &Arc<dyn Transport>,
        options: &Options,
        wanted: u16,
    ) -> Result<u16, Error> {
        let fds: Vec<Option<BorrowedFd<'_>>> =
            self.eventfds.iter().map(|fd| Some(fd.as_fd())).collect();
        transport.set_msix(&fds)?;
        self.admin.reset();
        self.enable(&**transport)?;

        let limit = options.admin_timeout;
        let page = self.identify_page(Cns::CONTROLLER, 0, limit)?;
        let id =
            IdentifyController::read_from_bytes(&page).map_err(|_| Error::Unusable("identify"))?;
        *self.identify = id;
        if self.identify.oaes.into_bits() & 1 << 8 != 0 {
            let config = AsyncEventConfig::new().with_nan(true);
            self.set_feature(Fid::ASYNC_EVENT_CONFIG, config.into_bits(), limit)?;
        }
        let ask = NumberOfQueues::new()
            .with_nsq_z(wanted - 1)
            .with_ncq_z(wanted - 1);
        let got = self.set_feature(Fid::NUMBER_OF_QUEUES, ask.into_bits(), limit)?;
        let got = NumberOfQueues::from_bits(got);
        self.admin.request_event();
        Ok(got.nsq_z().min(got.ncq_z()).saturating_add(1))
    }

    fn set_feature(&mut self, fid: Fid, value: u32, limit: Duration) -> Result<u32, Error> {
        let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
        command.cdw10 = SetFeaturesCdw10::new().with_fid(fid).into_bits().into();
        command.cdw11 = value.into();
        Ok(self.admin.execute(command, limit)?.dw0.get())
    }

    fn identify_page(&mut self, cns: Cns, nsid: u32, limit: Duration) -> Result<[u8; 4096], Error> {
        let mut command = Command::new(AdminOpcode::IDENTIFY.0, 0, nsid);
        command.cdw10 = IdentifyCdw10::new().with_cns(cns).into_bits().into();
        let mut page = [0; 4096];
        self.admin.read(command, &mut page, limit)?;
        Ok(page)
    }

    /// Executes an admin command that transfers data to the host, and waits for its completion.
    pub fn read(
        &mut self,
        command: Command,
        data: &mut [u8],
        limit: Duration,
    ) -> Result<u64, Error> {
        let entry = self.admin.read(command, data, limit)?;
        Ok(entry.result64())
    }

    /// Executes an admin command that transfers data from the host, and waits for its completion.
    pub fn write(&mut self, command: Command, data: &[u8], limit: Duration) -> Result<u64, Error> {
        let entry = self.admin.write(command, data, limit)?;
        Ok(entry.result64())
    }

    /// Returns every namespace that the driver can use.
    pub fn scan(&mut self, options: &Options) -> Result<Vec<Namespace>, Error> {
        let limit = options.admin_timeout;
        let mut found = Vec::new();
        let mut after = 0;
        while found.len() < MAX_NAMESPACES {
            let page = self.identify_page(Cns::ACTIVE_NSID_LIST, after, limit)?;
            let list = NsidList::read_from_bytes(&page).map_err(|_| Error::Unusable("identify"))?;
            let mut count = 0;
            for nsid in list.iter() {
                // The identifiers must ascend, or the list would never end.
                if nsid <= after {
                    return Ok(found);
                }
                (after, count) = (nsid, count + 1);
                let page = match self.identify_page(Cns::NAMESPACE, nsid, limit) {
                    Ok(page) => page,
                    Err(Error::Admin { status, .. }) => {
                        tracing::warn!(nsid, %status, "namespace cannot be identified");
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                let id = IdentifyNamespace::read_from_bytes(&page);
                let id = id.map_err(|_| Error::Unusable("identify"))?;
                match Namespace::parse(nsid, &id) {
                    Ok(namespace) => found.push(namespace),
                    Err(why) => tracing::warn!(nsid, why, "namespace is not used"),
                }
            }
            if count < NsidList::CAPACITY {
                break;
            }
        }
        Ok(found)
    }

    /// Replaces the list of namespaces, and adds an event for each difference.
    fn replace(&mut self, namespaces: Vec<Namespace>) {
        for new in &namespaces {
            if !self.namespaces.contains(new) {
                self.events.push_back(Event::NamespaceChanged(*new));
            }
        }
        for old in &self.namespaces {
            if !namespaces.iter().any(|new| new.nsid == old.nsid) {
                self.events.push_back(Event::NamespaceRemoved(old.nsid));
            }
        }
        self.namespaces = namespaces;
    }

    /// Handles the controller's new asynchronous events, and returns the resulting [`Event`]s.
    pub fn service(&mut self, options: &Options) -> Result<Vec<Event>, Error> {
        self.admin.look(None);
        while let Some(event) = self.admin.events.pop_front() {
            tracing::debug!(?event, "asynchronous event");
            let changed = event.aet() == EventType::NOTICE
                && event.aei() == Notice::NAMESPACE_ATTRIBUTE_CHANGED.0;
            // Reading the log page clears the event, so that the next one can be reported.
            let size = if event.lid() == Lid::SMART { 512 } else { 4096 };
            let mut page = vec![0; size];
            if event.lid() != Lid::SUPPORTED_LOG_PAGES || event.aet() == EventType::ERROR {
                let log = GetLogPage {
                    lid: event.lid(),
                    numd_z: size as u32 / 4 - 1,
                    ..GetLogPage::default()
                };
                let mut command =
                    Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, nvme::cmd::NSID_BROADCAST);
                log.apply(&mut command);
                match self.admin.read(command, &mut page, options.admin_timeout) {
                    Ok(_) | Err(Error::Admin { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            if changed {
                let namespaces = self.scan(options)?;
                self.replace(namespaces);
            } else {
                self.events.push_back(Event::Other(event));
            }
        }
        if self.admin.event_requests() == 0 {
            self.admin.request_event();
        }
        Ok(self.events.drain(..).collect())
    }

    /// Returns the eventfd of the Admin queue's interrupt, which also reports events; `None`
    /// without interrupts.
    pub fn admin_eventfd(&self) -> Option<BorrowedFd<'_>> {
        self.eventfds.first().map(AsFd::as_fd)
    }

    /// Allocates a free I/O queue identifier.
    pub fn take_qid(&mut self) -> Result<u16, Error> {
        let allowed = self.used.len().saturating_sub(1) as u16;
        let free = self.used.iter_mut().enumerate().find(|(_, used)| !**used);
        let (qid, used) = free.ok_or(Error::NoQueue { allowed })?;
        *used = true;
        Ok(qid as u16)
    }

    /// Frees an I/O queue identifier. Its queues must no longer exist.
    pub fn free_qid(&mut self, qid: u16) {
        if let Some(used) = self.used.get_mut(usize::from(qid)) {
            *used = false;
        }
    }

    /// Returns the interrupt vector of queue pair `qid` and its eventfd; `None` without interrupts.
    pub fn vector(&self, qid: u16) -> Option<(u16, OwnedFd)> {
        let last = self.eventfds.len().checked_sub(1)?;
        // With fewer vectors than queues, several queues share one vector: a completion of any of
        // them wakes them all.
        let vector = match last {
            0 => 0,
            last => (usize::from(qid) - 1) % last + 1,
        };
        let fd = self.eventfds.get(vector)?;
        Some((vector as u16, fd.try_clone().ok()?))
    }

    /// Creates the completion queue and the submission queue of a pair in the controller.
    pub fn create_queues(&mut self, queues: &Queues, limit: Duration) -> Result<(), Error> {
        let mut command = Command::new(AdminOpcode::CREATE_IO_CQ.0, 0, 0);
        command.set_prps(queues.cq, 0);
        let size = |entries: u32| {
            CreateQueueCdw10::new()
                .with_qid(queues.qid)
                .with_qsize_z((entries - 1) as u16)
        };
        command.cdw10 = size(queues.cq_entries).into_bits().into();
        let cdw11 = CreateCqCdw11::new()
            .with_pc(true)
            .with_ien(queues.vector.is_some())
            .with_iv(queues.vector.unwrap_or(0));
        command.cdw11 = cdw11.into_bits().into();
        self.admin.execute(command, limit)?;

        let mut command = Command::new(AdminOpcode::CREATE_IO_SQ.0, 0, 0);
        command.set_prps(queues.sq, 0);
        command.cdw10 = size(queues.sq_entries).into_bits().into();
        let cdw11 = CreateSqCdw11::new().with_pc(true).with_cqid(queues.qid);
        command.cdw11 = cdw11.into_bits().into();
        if let Err(error) = self.admin.execute(command, limit) {
            let _ = self.delete(AdminOpcode::DELETE_IO_CQ, queues.qid, limit);
            return Err(error);
        }
        Ok(())
    }

    /// Deletes both queues of a pair. After success none of their commands is active any more.
    pub fn delete_queues(&mut self, qid: u16, limit: Duration) -> Result<(), Error> {
        self.delete(AdminOpcode::DELETE_IO_SQ, qid, limit)?;
        self.delete(AdminOpcode::DELETE_IO_CQ, qid, limit)
    }

    fn delete(&mut self, opcode: AdminOpcode, qid: u16, limit: Duration) -> Result<(), Error> {
        let mut command = Command::new(opcode.0, 0, 0);
        command.cdw10 = DeleteQueueCdw10::new().with_qid(qid).into_bits().into();
        self.admin.execute(command, limit).map(drop)
    }

    /// Returns the shadow doorbell buffers for a newly created queue pair; `None` if shadow
    /// doorbells are not used. The first call in an epoch sends Doorbell Buffer Config.
    pub fn shadow(&mut self, shared: &SharedDevice) -> Option<Arc<ShadowBuffers>> {
        let choice = shared.options.doorbells;
        if !choice.shadow || !self.identify.oacs.dbcs() {
            return None;
        }
        if self.shadow_live {
            return self.shadow.clone();
        }
        let page = shared.limits.page_size as usize;
        if self.shadow.is_none() || choice.memory == ShadowMemory::Fresh {
            let pages = || shared.heap.allocate(page);
            let buffers = ShadowBuffers::new(pages().ok()?, pages().ok()?)?;
            self.shadow = Some(Arc::new(buffers));
        }
        let buffers = self.shadow.clone()?;
        if choice.memory == ShadowMemory::Cleared {
            buffers.clear();
        }
        let mut command = Command::new(AdminOpcode::DOORBELL_BUFFER_CONFIG.0, 0, 0);
        command.set_prps(buffers.doorbells().iova(), buffers.eventidxs().iova());
        if let Err(error) = self.admin.execute(command, shared.options.admin_timeout) {
            tracing::warn!(%error, "Doorbell Buffer Config failed; going on without");
            return None;
        }
        self.shadow_live = true;
        if choice.admin {
            let stride = regs::doorbell_stride(shared.limits.dstrd) as usize;
            self.admin.attach(&buffers, stride);
        }
        Some(buffers)
    }

    /// Returns the shadow doorbell buffers, if they are in use.
    pub fn shadow_buffers(&self) -> Option<Arc<ShadowBuffers>> {
        self.shadow.clone().filter(|_| self.shadow_live)
    }

    /// Asks the controller to abort a command. Returns `false` if it did not.
    pub fn abort(&mut self, sqid: u16, cid: u16, limit: Duration) -> Result<bool, Error> {
        let mut command = Command::new(AdminOpcode::ABORT.0, 0, 0);
        let cdw10 = AbortCdw10::new().with_sqid(sqid).with_cid(cid);
        command.cdw10 = cdw10.into_bits().into();
        let entry = self.admin.execute(command, limit)?;
        Ok(!AbortResult::from_bits(entry.dw0.get()).ianp())
    }

    /// Keeps memory of a dropped queue pair until the controller is certain not to access it.
    pub fn bury(&mut self, memory: Box<dyn Send>) {
        self.grave.push(memory);
    }
}

/// Parameters with which the queues of a pair are created.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queues {
    pub qid: u16,
    pub sq: u64,
    pub cq: u64,
    pub sq_entries: u32,
    pub cq_entries: u32,
    pub vector: Option<u16>,
}
