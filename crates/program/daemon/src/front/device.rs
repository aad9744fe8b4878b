//! The NVMe controller as a vfio-user device: regions, interrupts, guest memory.

use super::live::{HandOver, LiveMigration};
use crate::front::irq_eventfd::IrqEventfd;
use crate::serve::options::ClientLimits;
use controller::{Controller, IrqSink, pci};
use dma::{Import, MapError, Memory, MemoryCache, PendingImport, Prot};
use driver::NvmeVolume;
use driver::iova::Registration;
use probes::{LogLimit, LogLimits};
use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::Waker;
use vfio_user::{
    Device, DeviceInfo, DmaMapping, DmaUnmapping, Errno, IrqAction, IrqData, IrqInfo, Migration,
    MmapArea, OperationOutcome, RegionInfo, RegionMmap, ServerLimits, SetIrqs, Unmapped,
};
use volume::{PinPace, PinnedWindows, Pinner};

const REGIONS: u32 = 9;
const REGION_BAR0: u32 = 0;
const REGION_CMB: u32 = pci::CMB_BAR as u32;
const REGION_CONFIG: u32 = 7;
const IRQS: u32 = 5;
const IRQ_INTX: u32 = 0;
const IRQ_MSIX: u32 = 2;

/// Minimum size of guest RAM in bytes. A smaller window without a descriptor is a ROM or another
/// device.
const RAM_AT_LEAST: u64 = 16 << 20;

static DOORBELL_AREA: [MmapArea; 1] = [MmapArea {
    offset: pci::DOORBELL_OFFSET,
    size: pci::DOORBELL_SIZE,
}];

/// Event that has to happen before a VMM's request is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitReason {
    /// No request of the VMM is waiting.
    No,
    /// All commands have ended that may access unmapped guest memory, or that began before written
    /// pages were logged.
    Unmap,
    /// The reset of the controller has completed, after its outstanding commands.
    Reset,
    /// Acknowledgement of the other workers, which may still signal removed interrupt eventfds, or
    /// do not know the controller memory buffer's address yet.
    Receivers,
    /// End of outstanding commands that may still access guest memory although Bus Master Enable
    /// was cleared.
    BusMaster,
    /// End of the mapping of a memory file, which is made on another thread.
    Map,
    /// The migration state that the VMM has requested.
    Migration,
}

/// Request of the VMM to map guest memory that waits for its memory file.
struct PendingMap {
    request: DmaMapping,
    import: PendingImport,
    /// Keeper's number of the memory file.
    kept: Option<NonZeroU32>,
}

/// NVMe controller as the device of a vfio-user connection.
pub struct NvmeDevice {
    pub controller: Controller,
    pub waiting: WaitReason,
    /// Memory files that the current client has mapped for guest memory.
    memories: MemoryCache,
    mapping: Option<PendingMap>,
    /// Waker of the worker, for the thread that maps memory files.
    waker: Waker,
    limits: ClientLimits,
    /// NVMe devices of the volumes, which access guest memory directly once it is registered with
    /// them.
    backends: Vec<Arc<NvmeVolume>>,
    registered: Vec<(Memory, Vec<Registration>)>,
    /// Guest memory of a disconnected client, still registered with devices because commands are
    /// outstanding.
    leaving: Vec<(Memory, Vec<Registration>)>,
    /// Guest memory that is pinned for the worker's io_uring, if configured.
    pinned: PinnedWindows,
    mapped_doorbells: bool,
    /// Rate limit of log messages about guest memory, which clients can cause.
    log: LogLimits,
    /// Rate limit of the message about guest memory that is not shared, separate so that other
    /// messages do not suppress it.
    not_shared: LogLimit,
    /// Whether the warning about guest memory that is not shared was handled for this client.
    warned_not_shared: bool,
    /// Live migration; `None` if the disk has no volume that can be handed over.
    pub(super) live: Option<LiveMigration>,
    /// Result of a change of the migration state that the VMM waits for.
    migrated: Result<(), Errno>,
    /// Whether memory of the last client, or the volume's lock, have to be looked after.
    is_settling: bool,
    has_client: bool,
    /// Keeper's number of each descriptor in the message that is being handled.
    numbers: VecDeque<Option<NonZeroU32>>,
}

impl NvmeDevice {
    /// Creates a device. `memories` contains the files of guest memory that the controller already
    /// uses.
    pub fn new(
        controller: Controller,
        backends: Vec<Arc<NvmeVolume>>,
        limits: ClientLimits,
        memories: MemoryCache,
        waker: Waker,
        hand_over: Option<HandOver>,
    ) -> Self {
        let mut controller = controller;
        let live = hand_over.map(|it| LiveMigration::new(it, waker.clone(), &mut controller));
        let mut device = NvmeDevice {
            mapped_doorbells: controller.config().mapped_doorbells,
            controller,
            waiting: WaitReason::No,
            memories,
            mapping: None,
            waker,
            limits,
            backends,
            registered: Vec::new(),
            leaving: Vec::new(),
            pinned: PinnedWindows::default(),
            log: LogLimits::default(),
            not_shared: LogLimit::default(),
            warned_not_shared: false,
            live,
            migrated: Ok(()),
            is_settling: true,
            has_client: false,
            numbers: VecDeque::new(),
        };
        device.register_all();
        device
    }

    /// Registers the guest memory that a client of the previous process has mapped with the
    /// devices.
    fn register_all(&mut self) {
        let windows = self.controller.dma().windows();
        let memories: Vec<Memory> = windows
            .filter_map(|window| Some(window.backing?.0))
            .collect();
        for memory in &memories {
            self.register(memory);
        }
    }

    /// Returns the keeper's number of the next descriptor in the current message.
    fn next_number(&mut self) -> Option<NonZeroU32> {
        self.numbers.pop_front().flatten()
    }

    fn sinks(&mut self, fds: Vec<Option<OwnedFd>>) -> Result<Vec<Option<Arc<dyn IrqSink>>>, Errno> {
        let mut sink = |fd: OwnedFd| {
            let kept = self.next_number();
            IrqEventfd::new(fd, kept).map(|e| Arc::new(e) as Arc<dyn IrqSink>)
        };
        fds.into_iter()
            .map(|fd| fd.map(&mut sink).transpose())
            .collect()
    }

    /// Returns the limits of the vfio-user protocol that are announced to the client.
    pub fn protocol_limits(&self) -> ServerLimits {
        let windows = self.limits.windows.map(u32::from);
        ServerLimits {
            max_dma_maps: windows.unwrap_or(ServerLimits::DEFAULT.max_dma_maps),
            ..ServerLimits::DEFAULT
        }
    }

    /// Returns whether guest memory is left for [`NvmeDevice::pin_on`] to pin.
    pub fn is_pinning(&self) -> bool {
        self.pinned.is_pinning()
    }

    /// Pins a further piece of guest memory, in as much time as `pace` allows.
    pub fn pin_on(&mut self, pace: &mut PinPace) {
        pace.step(&mut self.pinned);
    }

    /// Sets the pinner for windows of guest memory that are mapped from now on. They are pinned
    /// after their mapping was answered.
    pub fn set_pinner(&mut self, pinner: Option<Pinner>) {
        self.pinned = PinnedWindows::new(pinner);
        for window in self.controller.dma().windows() {
            if let Some((memory, offset)) = &window.backing {
                self.pinned.mapped(window.iova, window.len, memory, *offset);
            }
        }
    }

    /// Returns whether the event that the VMM's request waits for has happened.
    pub fn wait_is_over(&mut self) -> bool {
        if self.is_settling {
            self.settle();
        }
        match self.waiting {
            WaitReason::No => false,
            WaitReason::Unmap => self.controller.dma_quiesced(),
            WaitReason::Reset => !self.controller.is_resetting(),
            WaitReason::Receivers => self.controller.receivers_settled(),
            WaitReason::BusMaster => self.controller.config_settled(),
            WaitReason::Map => self.is_mapped(),
            WaitReason::Migration => self.has_migrated(),
        }
    }

    /// Releases the memory of a client that has left, and looks after the volume's lock.
    #[cold]
    fn settle(&mut self) {
        if !self.leaving.is_empty() && !self.controller.is_resetting() {
            self.leaving.clear();
        }
        let mut left = !self.leaving.is_empty();
        let loses = |live: &LiveMigration| live.has_lost_volume(&self.controller);
        if self.live.as_ref().is_some_and(loses) {
            // The last owner of the volume closes it.
            sync::discard(self.live.take());
            self.controller.unpause();
            let is_logging = self.controller.is_logging();
            self.controller.suspend_survival(is_logging);
        }
        if let Some(live) = &mut self.live {
            left |= live.settle(&mut self.controller, self.has_client);
        }
        self.is_settling = left;
    }

    /// Notes that a namespace may be detached.
    pub(super) fn may_lose_volume(&mut self) {
        self.is_settling = true;
    }

    /// Returns whether nothing reads or writes the namespaces now, nor will before the next client:
    /// no command of the last client is outstanding, nor work that it has begun, and the disk keeps
    /// its volume's lock.
    pub fn is_unused(&self) -> bool {
        let controller = &self.controller;
        let live = self.live.as_ref();
        live.is_none_or(LiveMigration::keeps_lock)
            && controller.is_busy_for_migration().is_none()
            && controller.is_quiet()
    }

    /// Notes that a client has connected.
    pub fn connected(&mut self) {
        self.has_client = true;
    }

    fn has_migrated(&mut self) -> bool {
        let Some(live) = &mut self.live else {
            return true;
        };
        match live.advance(&mut self.controller) {
            Some(result) => {
                self.migrated = result;
                true
            }
            None => false,
        }
    }

    /// Defers the answer to a change of the migration state.
    pub(super) fn wait_for_migration(&mut self) -> OperationOutcome {
        self.waiting = WaitReason::Migration;
        OperationOutcome::Pending
    }

    /// Has the volume's lock taken, if the guest needs it.
    fn look_after_lock(&mut self) {
        let controller = &self.controller;
        let lacks =
            |live: &LiveMigration| live.lacks_lock(controller) || live.may_lack_lock(controller);
        self.is_settling |= self.live.as_ref().is_some_and(lacks);
    }

    fn is_mapped(&self) -> bool {
        let mapping = self.mapping.as_ref();
        mapping.is_none_or(|mapping| mapping.import.is_done())
    }

    /// Ends the wait after [`NvmeDevice::wait_is_over`]. Returns the answer to the VMM's request.
    pub fn end_wait(&mut self) -> Result<(), Errno> {
        if std::mem::replace(&mut self.waiting, WaitReason::No) == WaitReason::Migration {
            return std::mem::replace(&mut self.migrated, Ok(()));
        }
        let Some(mapping) = self.mapping.take() else {
            return Ok(());
        };
        let PendingMap {
            request,
            import,
            kept,
        } = mapping;
        let memory = self
            .memories
            .finish(&import)
            .unwrap_or(Err(MapError::Empty));
        let memory = memory.map_err(|error| self.refuse(request, error))?;
        self.map_memory(request, memory, kept)
    }

    /// Logs that a memory file was refused. Returns the error number for the VMM.
    fn refuse(&self, request: DmaMapping, error: MapError) -> Errno {
        let DmaMapping { iova, size, .. } = request;
        self.log.line("refused", |left_out| {
            let iova = format_args!("{iova:#x}");
            tracing::warn!(iova, size, %error, left_out, "guest memory refused");
        });
        errno(error)
    }

    /// Maps a window on a memory file.
    fn map_memory(
        &mut self,
        request: DmaMapping,
        memory: Memory,
        kept: Option<NonZeroU32>,
    ) -> Result<(), Errno> {
        // A file is kept once, even if several windows use it.
        if memory.kept().is_none()
            && let Some(number) = kept
        {
            memory.set_kept(number);
        }
        self.register(&memory);
        self.map_window(request, Some((memory, request.offset)))
    }

    fn map_window(
        &mut self,
        request: DmaMapping,
        backing: Option<(Memory, u64)>,
    ) -> Result<(), Errno> {
        let DmaMapping {
            iova,
            size,
            offset,
            read,
            write,
        } = request;
        tracing::trace!(
            iova = format_args!("{iova:#x}"),
            size,
            offset,
            read,
            write,
            shared = backing.is_some(),
            "map"
        );
        self.controller
            .dma_map(iova, size, backing.clone(), Prot { read, write })
            .map_err(|error| {
                tracing::debug!(iova = format_args!("{iova:#x}"), size, %error, "DMA map refused");
                errno(error)
            })?;
        if let Some((memory, offset)) = backing {
            self.pinned.mapped(iova, size, &memory, offset);
        }
        Ok(())
    }

    /// Registers a memory file with the volumes' devices for access without copies, until the
    /// client leaves.
    fn register(&mut self, memory: &Memory) {
        if self.backends.is_empty()
            || self
                .registered
                .iter()
                .any(|(known, _)| known.is_same(memory))
        {
            return;
        }
        let mut registrations = Vec::new();
        for backend in &self.backends {
            match backend.register(memory) {
                Ok(registration) => registrations.push(registration),
                Err(error) => {
                    self.log.line("copied", |left_out| {
                        let text = "guest memory is copied on its way to a device";
                        tracing::warn!(%error, left_out, "{text}");
                    });
                }
            }
        }
        self.registered.push((memory.clone(), registrations));
    }

    pub(super) fn outcome(&mut self, waiting: WaitReason) -> OperationOutcome {
        self.waiting = waiting;
        if self.wait_is_over() {
            self.waiting = WaitReason::No;
            return OperationOutcome::Done;
        }
        OperationOutcome::Pending
    }
}

fn errno(error: MapError) -> Errno {
    match error {
        MapError::Overlap { .. } => Errno::EXIST,
        MapError::System { errno, .. } => errno,
        MapError::TableFull | MapError::TooManyMappings { .. } => Errno::NOSPC,
        MapError::TooManyBytes { .. } | MapError::AddressSpaceFull { .. } => Errno::NOMEM,
        _ => Errno::INVAL,
    }
}

impl Device for NvmeDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            reset: true,
            pci: true,
            num_regions: REGIONS,
            num_irqs: IRQS,
        }
    }

    fn region(&self, index: u32) -> Option<RegionInfo<'_>> {
        let region = |size, mmap| {
            Some(RegionInfo {
                size,
                read: size > 0,
                write: size > 0,
                mmap,
            })
        };
        match index {
            REGION_BAR0 => {
                let mmap = self.sent_file(index).map(|fd| RegionMmap {
                    fd,
                    offset: 0,
                    areas: &DOORBELL_AREA,
                });
                region(pci::BAR0_SIZE, mmap)
            }
            REGION_CMB => {
                let mmap = self.sent_file(index).map(|fd| RegionMmap {
                    fd,
                    offset: 0,
                    areas: &[],
                });
                region(self.controller.cmb_size(), mmap)
            }
            REGION_CONFIG => region(pci::CONFIG_SIZE as u64, None),
            _ if index < REGIONS => region(0, None),
            _ => None,
        }
    }

    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        match index {
            REGION_BAR0 => self.controller.bar0_read(offset, data),
            REGION_CMB => self.controller.cmb_read(offset, data),
            REGION_CONFIG => self.controller.config_read(offset, data),
            _ => return Err(Errno::INVAL),
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
            REGION_BAR0 => {
                self.controller.bar0_write(offset, data);
                if offset < pci::DOORBELL_OFFSET {
                    self.look_after_lock();
                }
                // Other workers need the address of the controller memory buffer.
                let has_buffer = self.controller.cmb_size() > 0;
                if !has_buffer || self.controller.receivers_settled() {
                    return Ok(OperationOutcome::Done);
                }
                if self.waiting == WaitReason::BusMaster {
                    return Ok(OperationOutcome::Pending);
                }
                Ok(self.outcome(WaitReason::Receivers))
            }
            REGION_CMB => {
                self.controller.cmb_write(offset, data);
                Ok(OperationOutcome::Done)
            }
            REGION_CONFIG => {
                self.controller.config_write(offset, data);
                // Another write of the same message may already be waiting; both are answered
                // together.
                if self.waiting == WaitReason::BusMaster {
                    return Ok(OperationOutcome::Pending);
                }
                Ok(self.outcome(WaitReason::BusMaster))
            }
            _ => Err(Errno::INVAL),
        }
    }

    fn irq(&self, index: u32) -> Option<IrqInfo> {
        match index {
            IRQ_INTX => Some(IrqInfo {
                count: 1,
                eventfd: true,
                maskable: true,
                automasked: true,
                noresize: false,
            }),
            IRQ_MSIX => {
                let count = u32::from(self.controller.vectors());
                Some(IrqInfo {
                    count,
                    eventfd: true,
                    ..IrqInfo::default()
                })
            }
            _ if index < IRQS => Some(IrqInfo::default()),
            _ => None,
        }
    }

    fn set_irqs(&mut self, irqs: SetIrqs) -> Result<OperationOutcome, Errno> {
        let tear_down = irqs.is_tear_down();
        let (data, mut sinks) = match irqs.data {
            IrqData::Eventfd(fds) => (None, self.sinks(fds)?),
            data => (Some(data), Vec::new()),
        };
        let controller = &mut self.controller;
        match (irqs.index, irqs.action, data) {
            (IRQ_MSIX, IrqAction::Trigger, Some(IrqData::None)) if tear_down => {
                (0..controller.vectors()).for_each(|v| controller.set_msix(v, None));
            }
            (IRQ_MSIX, IrqAction::Trigger, None) => {
                for (vector, sink) in (irqs.start..).zip(sinks) {
                    controller.set_msix(u16::try_from(vector).map_err(|_| Errno::INVAL)?, sink);
                }
            }
            (IRQ_INTX, IrqAction::Trigger, Some(IrqData::None)) if tear_down => {
                controller.set_intx(None);
            }
            (IRQ_INTX, IrqAction::Trigger, None) => {
                controller.set_intx(sinks.pop().flatten());
            }
            (IRQ_INTX, IrqAction::Mask, Some(IrqData::None)) => controller.mask_intx(),
            (IRQ_INTX, IrqAction::Unmask, Some(IrqData::None)) => controller.unmask_intx(),
            (IRQ_INTX, IrqAction::Mask, Some(IrqData::Bool(yes))) if yes == [true] => {
                controller.mask_intx()
            }
            (IRQ_INTX, IrqAction::Unmask, Some(IrqData::Bool(yes))) if yes == [true] => {
                controller.unmask_intx()
            }
            _ => return Err(Errno::INVAL),
        }
        Ok(self.outcome(WaitReason::Receivers))
    }

    fn dma_map(&mut self, map: DmaMapping, fd: Option<OwnedFd>) -> Result<OperationOutcome, Errno> {
        let DmaMapping {
            iova,
            size,
            offset,
            write,
            ..
        } = map;
        let kept = self.next_number();
        if fd.is_none()
            && write
            && size >= RAM_AT_LEAST
            && !std::mem::replace(&mut self.warned_not_shared, true)
        {
            self.not_shared.line(|left_out| {
            tracing::warn!(
                iova = format_args!("{iova:#x}"),
                size,
                left_out,
                "guest RAM is not shared with this process, so the guest's commands cannot be reached. Start QEMU with: \
                 -object memory-backend-memfd,id=mem,size={}M,share=on -machine memory-backend=mem (size: the guest's \
                 RAM); Cloud Hypervisor: --memory size=...,shared=on",
                size >> 20
            );
            });
        }
        // Same error as from the kernel's VFIO when the limit on mappings is reached.
        let most = self.protocol_limits().max_dma_maps;
        if self.controller.dma().window_count() >= most as usize {
            return Err(Errno::NOSPC);
        }
        let Some(fd) = fd else {
            self.map_window(map, None)?;
            return Ok(OperationOutcome::Done);
        };
        let end = offset.checked_add(size).ok_or(Errno::INVAL)?;
        match self.memories.begin(fd, end, write, &self.waker) {
            Ok(Import::Done(memory)) => {
                self.map_memory(map, memory, kept)?;
                Ok(OperationOutcome::Done)
            }
            Ok(Import::Pending(import)) => {
                self.mapping = Some(PendingMap {
                    request: map,
                    import,
                    kept,
                });
                // Even if it is mapped by now: `end_wait` adds the window.
                self.waiting = WaitReason::Map;
                Ok(OperationOutcome::Pending)
            }
            Err(error) => Err(self.refuse(map, error)),
        }
    }

    fn dma_map_again(
        &mut self,
        map: DmaMapping,
        fd: Option<OwnedFd>,
    ) -> Result<OperationOutcome, Errno> {
        let mut windows = self.controller.dma().windows();
        let is_it = |window: &dma::Window| {
            let offset = window.backing.as_ref().map(|(_, offset)| *offset);
            window.iova == map.iova
                && window.len == map.size
                && (window.prot.read, window.prot.write) == (map.read, map.write)
                && offset == fd.as_ref().map(|_| map.offset)
        };
        // A window with the same range and backing comes from the request that was being handled
        // when the previous process died.
        if windows.any(|window| is_it(&window)) {
            return Ok(OperationOutcome::Done);
        }
        drop(windows);
        self.dma_map(map, fd)
    }

    fn dma_mapped(&self, unmap: DmaUnmapping) -> Result<u64, Errno> {
        match unmap {
            DmaUnmapping::Range { iova, size } => {
                let size = self.controller.dma_unmap_size(iova, size);
                size.map_err(errno)
            }
            DmaUnmapping::All => {
                let windows = self.controller.dma().windows();
                Ok(windows
                    .map(|window| window.len)
                    .fold(0, u64::saturating_add))
            }
        }
    }

    fn descriptors_kept(&mut self, numbers: &[Option<NonZeroU32>]) {
        self.numbers.clear();
        self.numbers.extend(numbers);
    }

    fn sent_file(&self, region: u32) -> Option<BorrowedFd<'_>> {
        match region {
            REGION_BAR0 if self.mapped_doorbells => Some(self.controller.bar0_pages().fd()),
            REGION_CMB => self.controller.cmb_pages().map(|pages| pages.fd()),
            _ => None,
        }
    }

    fn needs_kept(&self, number: NonZeroU32) -> bool {
        self.controller.needs_kept(number)
    }

    fn dma_unmap(&mut self, unmap: DmaUnmapping) -> Result<Unmapped, Errno> {
        tracing::trace!(?unmap, "unmap");
        let size = match unmap {
            DmaUnmapping::Range { iova, size } => {
                let sum = self.controller.dma_unmap(iova, size).map_err(errno)?;
                // Outstanding requests keep their pages, and the answer waits for them.
                self.pinned.unmapped(iova, size);
                sum
            }
            DmaUnmapping::All => {
                let sum = self.controller.dma_unmap_all();
                self.pinned.clear();
                sum
            }
        };
        Ok(Unmapped {
            size,
            outcome: self.outcome(WaitReason::Unmap),
        })
    }

    fn reset(&mut self) -> Result<OperationOutcome, Errno> {
        tracing::debug!("device reset");
        self.controller.reset();
        if let Some(live) = &mut self.live {
            live.reset(&mut self.controller);
        }
        self.is_settling = true;
        Ok(self.outcome(WaitReason::Reset))
    }

    fn migration(&mut self) -> Option<&mut dyn Migration> {
        let live = self.live.as_ref()?;
        live.is_offered(&self.controller)
            .then_some(self as &mut dyn Migration)
    }

    fn disconnected(&mut self) {
        self.waiting = WaitReason::No;
        self.mapping = None;
        self.warned_not_shared = false;
        self.controller.stop_dirty_log();
        self.controller.disconnect();
        if let Some(live) = &mut self.live {
            live.reset(&mut self.controller);
        }
        self.has_client = false;
        self.is_settling = true;
        self.pinned.clear();
        self.leaving.append(&mut self.registered);
        // The next client has its own memory account. Memory of the last client is returned to the
        // old account shortly afterwards.
        self.memories = self.memories.next_client();
    }
}
