//! The control half of a controller: PCI, guest memory, interrupts, and the rounds of its worker.

mod admission;
mod attach;
mod boot;
mod bus_master;
mod cmb;
mod completion;
mod erasing;
mod lifecycle;
mod live;
mod marking;
mod migration;
mod queues;
mod registers;
mod sharing;

use crate::admin::Admin;
use crate::config::{ConfigError, ControllerConfig, NamespaceConfig};
use crate::engine::{Engine, EngineConfig, Event, MemoryChange, Namespace, Order};
use crate::irq::IrqSink;
use crate::passthrough::Passthrough;
use crate::pci::{self, ConfigSpace};
use crate::stats::ControllerStats;
use crate::survival::Survival;
use crate::survival::state::AdminCompletion;
use admission::Admission;
pub use attach::Attach;
use attach::Attaching;
pub(crate) use boot::BootRegisters;
pub use boot::{BootImage, BootImageError, MAX_BOOT_IMAGE};
use bus_master::Draining;
use cmb::Cmb;
use dma::{DmaMap, MapError, Memory, Prot, SharedPages};
use lifecycle::{LifecycleState, Shutdown};
use live::HandOverFlush;
use marking::MarkingState;
use migration::{Migration, QueueOwner};
use nvme::regs::{Aqa, Cap, CapCss, Cc, Csts};
use queues::Queues;
use sharing::Sharing;
use state_memory::StateMemory;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;
use tracing::Span;
use tracing::span::EnteredSpan;
use volume::{Budget, Io};
use zerocopy::IntoBytes;

/// Largest memory page size (CAP.MPSMAX): 4 KiB shifted left by this value.
const MPSMAX: u8 = 4;

/// A virtual NVMe controller: one PCI function with its registers, queues and namespaces.
///
/// Owned by one thread, its worker. The worker delivers register accesses, calls
/// [`Controller::poll`] and [`Controller::complete`], and sleeps only when [`Controller::arm`]
/// permits.
pub struct Controller {
    pub(crate) config: ControllerConfig,
    pub(crate) pci: ConfigSpace,
    pub(crate) engine: Engine,
    pub(crate) admin: Admin,
    pub(crate) migration: Migration,
    pub(crate) admission: Admission,
    pub(crate) marks: MarkingState,
    /// Present when the controller belongs to a subsystem. Declared after the engines, so that no
    /// command is outstanding when the controller leaves the subsystem.
    sharing: Option<Sharing>,
    /// State memory by which another process can take over the controller; `None` if restart is not
    /// enabled.
    pub(crate) survival: Option<Survival>,
    pub(crate) queues: Queues,
    /// Completions of admin commands, which are posted once the commands' effects are committed.
    pub(crate) endings: Vec<AdminCompletion>,
    state: LifecycleState,
    shutdown: Shutdown,
    cap: Cap,
    pub(crate) cc: Cc,
    csts: Csts,
    aqa: Aqa,
    asq: u64,
    acq: u64,
    /// Controller memory buffer; `None` when not configured.
    pub(crate) cmb: Option<Cmb>,
    pub(crate) boot: BootRegisters,
    /// Present while commands that were outstanding when Bus Master Enable was cleared may transfer
    /// data.
    draining: Option<Draining>,
    /// Namespace that is being attached, if any.
    attaching: Option<Attaching>,
    /// Flush before the volume is handed over to another process, if any was requested.
    hand_over: Option<HandOverFlush>,
    /// Whether the last attachment failed because a worker could not open the namespace.
    attach_refused: bool,
    /// Start time of the current round.
    pub(crate) now: Instant,
    /// Number of faults in guest memory of this process at the last check of the windows.
    faults: u64,
    /// The host has sent no admin command since it enabled the controller.
    awaits_first_command: bool,
    /// Names the disk in log lines.
    span: Span,
}

/// Reason of a failure: QEMU passes the file of `memory-backend-memfd,share=off` like a shared one,
/// but the guest writes to private copies of its pages.
const NOT_SHARED: &str = "the guest's first command is all zeroes, so its RAM is not shared with \
                          this process; start QEMU with: -object \
                          memory-backend-memfd,id=mem,size=...,share=on -machine \
                          memory-backend=mem (share=off is the usual mistake); Cloud Hypervisor: \
                          --memory size=...,shared=on";

/// Memory of a controller's doorbells, shared with its client. Clones refer to the same memory,
/// which is unmapped when the last one is dropped.
#[derive(Clone, Debug)]
pub struct DoorbellPage(Arc<SharedPages>);

impl DoorbellPage {
    /// Creates a doorbell page of zeroes.
    ///
    /// # Errors
    /// [`ConfigError::Memory`] when the memory cannot be mapped.
    pub fn new() -> Result<Self, ConfigError> {
        Ok(Self(Arc::new(SharedPages::new(pci::BAR0_SIZE as usize)?)))
    }

    /// Opens the doorbell page of an earlier process from its memory file.
    ///
    /// # Errors
    /// [`ConfigError::Memory`] when `fd` is not such a file, or cannot be mapped.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, ConfigError> {
        let pages = SharedPages::open(fd, pci::BAR0_SIZE as usize)?;
        Ok(Self(Arc::new(pages)))
    }
}

/// Borrows the memory file of the doorbell page, which can be kept across a restart.
impl AsFd for DoorbellPage {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }
}

/// Prepares the zones of a new controller's namespaces. Zones that a running controller uses are
/// not affected.
fn begin_zones(namespaces: &[NamespaceConfig]) {
    for zones in namespaces.iter().filter_map(|ns| ns.zones.as_ref()) {
        zones.begin();
    }
}

impl Controller {
    /// Returns the attached namespaces, which commands find.
    pub(crate) fn active(&self) -> impl Iterator<Item = &Namespace> {
        self.engine.namespaces.active()
    }

    /// Creates a controller that is powered on and disabled. `id` identifies the controller in the
    /// tags of its volume requests, see [`tag_owner`](crate::tag_owner); `io` is the ring of its
    /// worker.
    pub fn new(
        id: u16,
        config: ControllerConfig,
        namespaces: Vec<NamespaceConfig>,
        io: &Io,
    ) -> Result<Self, ConfigError> {
        Self::with_page(id, config, namespaces, io, DoorbellPage::new()?)
    }

    /// Creates a controller with an existing doorbell page, for example one created on a thread
    /// that serves no guests.
    ///
    /// # Errors
    /// [`ConfigError`] when the configuration is invalid, or a volume cannot be opened.
    pub fn with_page(
        id: u16,
        config: ControllerConfig,
        namespaces: Vec<NamespaceConfig>,
        io: &Io,
        page: DoorbellPage,
    ) -> Result<Self, ConfigError> {
        begin_zones(&namespaces);
        let mut controller = Self::make(id, config, namespaces, io, page, None)?;
        controller.abandon_left_erasure();
        Ok(controller)
    }

    /// Creates a controller that the next process can restore ([`Controller::restore`]). `state` is
    /// a new state memory with the layout of [`state_layout`].
    ///
    /// # Errors
    /// [`ConfigError`] when the configuration is invalid, or a volume cannot be opened.
    /// [`ConfigError::State`] when the state memory cannot be used.
    ///
    /// [`state_layout`]: crate::state_layout
    pub fn with_state(
        id: u16,
        config: ControllerConfig,
        namespaces: Vec<NamespaceConfig>,
        io: &Io,
        page: DoorbellPage,
        state: StateMemory,
    ) -> Result<Self, ConfigError> {
        begin_zones(&namespaces);
        let mut controller = Self::make(id, config, namespaces, io, page, Some(state))?;
        controller.abandon_left_erasure();
        controller.settle();
        Ok(controller)
    }

    pub(crate) fn make(
        id: u16,
        config: ControllerConfig,
        namespaces: Vec<NamespaceConfig>,
        io: &Io,
        DoorbellPage(page): DoorbellPage,
        state: Option<StateMemory>,
    ) -> Result<Self, ConfigError> {
        config.check()?;
        let survival = state.clone().map(Survival::new).transpose()?;
        let mut seen = BTreeSet::new();
        let mut opened = Vec::new();
        let mut namespaces = namespaces;
        if let Some(pool) = &config.pool {
            let pooled = pool.namespaces().into_iter();
            let attached = pooled.filter(|ns| ns.attached.contains(&config.cntlid));
            namespaces.extend(attached.filter_map(|ns| ns.config(pool)));
        }
        let configured = namespaces.clone();
        let stats = Arc::new(ControllerStats::new(config.io_queues, config.workers));
        // `ControllerStats::new` creates a share at least for the controller's own worker.
        let own = stats.shares.first().cloned().unwrap_or_default();
        let mut sharing = match &config.subsystem {
            Some(place) => Some(Sharing::join(place, config.cntlid)?),
            None => None,
        };
        for ns in namespaces {
            if !seen.insert(ns.nsid) {
                return Err(ConfigError::DuplicateNamespace(ns.nsid));
            }
            ns.check_for(&config)?;
            if let Some(sharing) = &mut sharing {
                sharing.attach(&ns, opened.len())?;
            }
            opened.push(Namespace::open(ns, io, &own)?);
        }
        let mut config = config;
        if let Some(state) = &state {
            // The state memory limits the number of outstanding commands that can be recorded.
            config.max_in_flight = config.max_in_flight.min(state.commands()).max(1);
        }
        config.max_namespaces = config.max_namespaces.max(seen.last().copied().unwrap_or(1));
        let vectors = config.io_queues + 1;
        let marks = MarkingState::default();
        let offer = config.offer();
        let name = match &*config.name {
            "" => &config.serial,
            name => name,
        };
        let span = tracing::error_span!(parent: None, "disk", %name);
        let template = EngineConfig {
            id,
            share: 0,
            io: own,
            io_queues: config.io_queues,
            vectors,
            max_in_flight: config.max_in_flight,
            max_transfer: config.max_transfer(),
            max_namespaces: config.max_namespaces,
            page,
            stats,
            pending: Arc::default(),
            state,
            offer,
            marks: marks.table.clone(),
            span: span.clone(),
            log: config.log.clone(),
        };
        if let Some(sharing) = &sharing {
            sharing.share_marks(&marks.table);
        }
        let engine = Engine::new(template.clone(), opened)?;
        let timeout = config.reset_timeout.as_millis().div_ceil(500).clamp(1, 255) as u8;
        let cap = Cap::new()
            .with_mqes_z((config.queue_entries - 1) as u16)
            .with_cqr(true)
            .with_to(timeout)
            .with_nssrs(true)
            .with_css(CapCss::new().with_ncss(true).with_iocss(true))
            .with_mpsmax(MPSMAX)
            .with_bps(config.boot.is_some())
            .with_cmbs(config.cmb_size.is_some())
            .with_crwms(true);
        let admin = Admin::new(&config);
        engine.stats.power_cycles.add(1);
        let cmb = config.cmb_size.map(Cmb::new).transpose();
        let mut controller = Controller {
            pci: ConfigSpace::new(config.pci, vectors, config.cmb_size),
            cmb: cmb.map_err(ConfigError::MemoryBuffer)?,
            boot: BootRegisters::default(),
            config,
            engine,
            admin,
            migration: Migration::new(template, configured),
            admission: Admission::default(),
            marks,
            sharing,
            survival,
            queues: Queues::default(),
            endings: Vec::new(),
            state: LifecycleState::Disabled,
            shutdown: Shutdown::No,
            cap,
            cc: Cc::new(),
            csts: Csts::new(),
            aqa: Aqa::new(),
            asq: 0,
            acq: 0,
            draining: None,
            attaching: None,
            hand_over: None,
            attach_refused: false,
            now: Instant::now(),
            faults: dma::sigbus::faults(),
            awaits_first_command: false,
            span,
        };
        controller.apply_features();
        controller.set_gates();
        controller.record_reset();
        Ok(controller)
    }

    /// Returns the doorbell page, in memory shared with the client.
    pub fn doorbell_page(&self) -> DoorbellPage {
        DoorbellPage(self.engine.queues.doorbell_page().clone())
    }

    /// Adds a pass-through device to a namespace, beside its volume. Returns `false` when the
    /// namespace does not exist.
    pub fn set_passthrough(&mut self, nsid: u32, passthrough: Box<dyn Passthrough>) -> bool {
        let mut namespaces = self.engine.namespaces.iter_mut();
        let found = namespaces.find(|ns| ns.config.nsid == nsid);
        found.map(|ns| ns.passthrough = Some(passthrough)).is_some()
    }

    /// Returns the controller's counters, which any thread may read.
    pub fn stats(&self) -> Arc<ControllerStats> {
        self.engine.stats.clone()
    }

    /// Returns the controller's configuration.
    pub fn config(&self) -> &ControllerConfig {
        &self.config
    }

    /// Returns the memory behind BAR0. A client may map the doorbell page, at
    /// [`pci::DOORBELL_OFFSET`] in its file.
    pub fn bar0_pages(&self) -> &Arc<SharedPages> {
        self.engine.queues.doorbell_page()
    }

    /// Creates a new doorbell page for the next client: an earlier client may have the present one
    /// mapped. No client is connected.
    ///
    /// # Errors
    /// [`ConfigError::Memory`] when there is no memory. The earlier client's page stays.
    pub fn renew_doorbells(&mut self) -> Result<(), ConfigError> {
        let DoorbellPage(page) = DoorbellPage::new()?;
        // The earlier client may keep the file open, but none of the pages in it.
        self.engine.queues.doorbell_page().memory().empty_at_end();
        self.order_all(|| Order::Doorbells(page.clone()));
        self.migration.set_doorbells(page);
        Ok(())
    }

    /// Handles the disconnection of the VMM: resets the controller, and releases guest memory and
    /// interrupt receivers. The next client finds the controller in its power-on state.
    pub fn disconnect(&mut self) {
        self.order_all(|| Order::ForgetSinks);
        self.reset();
        self.renew_cmb();
        self.draining = None;
        self.dma_unmap_all();
        self.engine.stats.power_cycles.add(1);
        self.record_reset();
        self.touch();
        self.settle();
        // The next process must not look for the memory of a disconnected client.
        self.note_quiesced();
    }

    /// Begins to flush all data written through this worker, for a clean exit of the process. Every
    /// worker has to do so for its own data. [`Controller::is_drained`] returns `true` when the
    /// flush has ended.
    pub fn flush(&mut self) {
        self.engine.flush_for_exit();
    }

    /// Returns whether neither a command nor a flush is outstanding on this worker.
    pub fn is_drained(&self) -> bool {
        self.engine.drained()
    }

    // ---- interrupts

    /// Returns the number of MSI-X vectors.
    pub fn vectors(&self) -> u16 {
        self.engine.irqs.vectors()
    }

    /// Sets or removes the receiver of an MSI-X vector; a new receiver gets a pending interrupt.
    /// The caller answers the VMM when [`Controller::receivers_settled`] returns `true`: from then
    /// on the previous receiver is not signalled.
    pub fn set_msix(&mut self, vector: u16, sink: Option<Arc<dyn IrqSink>>) {
        self.order_all(|| Order::Vector(vector, sink.clone()));
        self.touch();
        self.settle();
        self.engine.irqs.deliver_pending();
    }

    /// Returns whether every worker has applied the latest changes of interrupt receivers.
    pub fn receivers_settled(&self) -> bool {
        self.migration.receivers_settled()
    }

    /// Sets or removes the receiver of the INTx pin.
    pub fn set_intx(&mut self, sink: Option<Arc<dyn IrqSink>>) {
        self.engine.irqs.set_pin(sink);
        self.touch();
        self.settle();
        self.engine.end_round();
    }

    /// Masks the INTx pin on behalf of the VMM.
    pub fn mask_intx(&mut self) {
        self.engine.irqs.mask_pin();
        self.touch();
        self.settle();
    }

    /// Unmasks the INTx pin on behalf of the VMM. An interrupt is sent if completions are left that
    /// the host has not consumed.
    pub fn unmask_intx(&mut self) {
        self.engine.end_round();
        self.engine.irqs.unmask_pin();
        self.touch();
        self.settle();
    }

    // ---- guest memory

    /// Adds a window of guest memory. `backing` is `None` for memory that this process cannot
    /// access.
    pub fn dma_map(
        &mut self,
        iova: u64,
        len: u64,
        backing: Option<(Memory, u64)>,
        prot: Prot,
    ) -> Result<(), MapError> {
        self.change_memory(&MemoryChange::Map {
            iova,
            len,
            backing: backing.clone(),
            prot,
        })?;
        self.note_mapped(iova, len, backing.as_ref(), prot);
        Ok(())
    }

    /// Returns the length that [`Controller::dma_unmap`] would return for this range, without
    /// unmapping.
    ///
    /// # Errors
    /// [`MapError`] when the range is empty, exceeds the address space, or contains only a part of
    /// a window.
    pub fn dma_unmap_size(&self, iova: u64, len: u64) -> Result<u64, MapError> {
        self.engine.dma.unmap_size(iova, len)
    }

    /// Removes the windows of guest memory in a range, and returns the sum of their lengths. The
    /// caller answers the VMM when [`Controller::dma_quiesced`] returns `true`: from then on no
    /// outstanding command can access the removed windows.
    pub fn dma_unmap(&mut self, iova: u64, len: u64) -> Result<u64, MapError> {
        let bytes = self.change_memory(&MemoryChange::Unmap { iova, len })?;
        if bytes > 0 {
            // The addition cannot overflow, because the range contained windows.
            self.note_unmapped(iova, iova.saturating_add(len - 1));
        }
        Ok(bytes)
    }

    /// Removes all windows of guest memory, and returns the sum of their lengths.
    pub fn dma_unmap_all(&mut self) -> u64 {
        let bytes = self.change_memory(&MemoryChange::UnmapAll);
        let bytes = bytes.unwrap_or_else(|_| {
            self.engine.broken("not all windows can be removed");
            0
        });
        self.note_unmapped(0, u64::MAX);
        bytes
    }

    /// Applies a change of guest memory in the controller's own engine, and in the remote engines
    /// if that succeeds and has an effect.
    fn change_memory(&mut self, change: &MemoryChange) -> Result<u64, MapError> {
        let bytes = self.engine.apply(Order::Memory(change.clone()))?;
        if bytes > 0 {
            self.migration.send_all(|| Order::Memory(change.clone()));
        }
        Ok(bytes)
    }

    /// Returns whether no outstanding command can access unmapped guest memory.
    pub fn dma_quiesced(&mut self) -> bool {
        let quiesced = self.engine.dma.quiesced() && self.migration.quiesced();
        if quiesced {
            self.note_quiesced();
        }
        quiesced
    }

    /// Returns the windows of guest memory.
    pub fn dma(&self) -> &DmaMap {
        &self.engine.dma
    }

    // ---- running

    /// Runs one round: fetches and starts submitted commands, posts completions, and sends
    /// interrupts. Returns whether there was anything to do.
    pub fn poll(&mut self, now: Instant) -> bool {
        self.poll_within(now, &mut Budget::unlimited())
    }

    /// Runs one round within a budget. Work that exceeds the budget is left for the next round.
    pub fn poll_within(&mut self, now: Instant, budget: &mut Budget) -> bool {
        self.now = now;
        let mut worked = self.engine.poll(now, budget);
        while let Some(event) = self.engine.events.pop_front() {
            worked = true;
            self.touch();
            self.event(event);
        }
        worked |= self.check_timers(budget);
        worked |= self.check_memory();
        worked |= self.progress();
        worked |= self.advance_if_migrating();
        self.touch_counters();
        self.settle();
        worked |= self.engine.end_round();
        // Events found at the end of the round are handled in the next one.
        worked || !self.engine.events.is_empty()
    }

    /// Makes log lines name the disk until the result is dropped. Not for every command: this
    /// allocates nothing, but takes a lock of the log's.
    pub(crate) fn in_log(&self) -> EnteredSpan {
        self.span.clone().entered()
    }

    fn event(&mut self, event: Event) {
        let _disk = self.in_log();
        match event {
            Event::Admin(command) => {
                let is_first = std::mem::take(&mut self.awaits_first_command);
                // A host's first command is no Delete I/O Submission Queue of queue 0.
                if is_first && command.as_bytes().iter().all(|byte| *byte == 0) {
                    return self.fatal(NOT_SHARED);
                }
                self.admit(&command);
            }
            Event::SqDrained(qid) => self.sq_deleted(qid),
            Event::AbortDone { sqid, cid, aborted } => self.abort_done(sqid, cid, aborted),
            Event::Failed {
                sqid,
                cid,
                status,
                nsid,
                lba,
                marked,
            } => self.command_failed((sqid, cid), status, (nsid, lba), marked),
            Event::InvalidDoorbell { qid, cq, value } => {
                self.invalid_doorbell_value(qid, cq, value);
            }
            Event::Flushed { number, failed } => {
                self.flush_completed(QueueOwner::Own, number, failed)
            }
            Event::AbortMissed { sqid, cid } => self.abort_missed(sqid, cid),
            Event::Reservation(command) => self.reservation(*command),
            Event::Marking(marking) => self.change_marks(QueueOwner::Own, *marking),
            Event::Released(queues) => self.queue_released(queues),
            Event::MigrationCancelled => self.migration_cancelled(),
            Event::Broken(what) => self.broken(what),
        }
    }

    /// Handles the completion of a volume request, which may start the next request. Pass
    /// completions of the worker's ring as [`Io::poll`] delivers them. Collect those of volumes
    /// without the ring with [`Controller::poll_volumes`] first, and pass them afterwards.
    pub fn complete(&mut self, completion: volume::Completion) {
        self.engine.complete(completion);
    }

    /// Takes over settings of the namespaces' volumes that were changed, for example a first limit
    /// ([`volume::OpenQueue::update`]). Other engines of the controller have to be told, too.
    pub fn update_volumes(&mut self) {
        self.engine.update_volumes();
    }

    /// Appends to `out` the completions of volumes that complete requests without the worker's
    /// ring.
    pub fn poll_volumes(&mut self, out: &mut Vec<volume::Completion>) {
        self.engine.poll_volumes(out);
    }

    /// Arms EventIdx of every queue, before the worker sleeps. Returns `true` when a doorbell was
    /// written meanwhile: call [`Controller::poll`] again.
    pub fn arm(&mut self) -> bool {
        self.engine.arm()
    }

    /// Checks the doorbells once more shortly after [`Controller::arm`], for hosts without a memory
    /// barrier between their shadow doorbell store and their EventIdx load. Returns `true` when a
    /// command has arrived: call [`Controller::poll`] again.
    pub fn recheck(&mut self) -> bool {
        self.engine.recheck()
    }

    /// Returns whether the worker must poll, because a volume completes outstanding requests only
    /// when polled.
    pub fn needs_polling(&self) -> bool {
        self.engine.polled_in_flight()
    }

    /// Returns whether the client writes doorbells in shared memory, so that no notification
    /// announces new commands.
    pub fn is_unannounced(&self) -> bool {
        self.config.mapped_doorbells && self.csts.rdy() && self.engine.queues.is_master()
    }

    /// Returns the number of outstanding commands of the host, polled or not, plus the controller's
    /// own flushes.
    pub fn in_flight(&self) -> usize {
        self.engine.slots.in_use()
    }

    /// Returns whether a recently busy queue has a new doorbell value, so that [`Controller::poll`]
    /// would find a command. This is an optional check between two rounds.
    pub fn has_news(&self) -> bool {
        self.engine.queues.has_news()
    }

    /// Returns whether commands are outstanding, which may complete at any moment.
    pub fn is_busy(&self) -> bool {
        self.engine.slots.in_use() > 0
    }

    /// Returns whether the host uses shadow doorbells (Doorbell Buffer Config).
    pub fn shadowed(&self) -> bool {
        self.engine.queues.shadowed()
    }

    /// Returns whether CSTS.RDY is set.
    pub fn is_ready(&self) -> bool {
        self.csts.rdy()
    }

    /// Returns the time at which [`Controller::poll`] has to be called next even if no event
    /// occurs.
    pub fn deadline(&self) -> Option<Instant> {
        let deadlines = [
            self.engine.next_interrupt(),
            self.engine.next_volume_deadline(),
            self.migration_deadline(),
            self.draining_deadline(),
        ];
        let always = deadlines.into_iter().flatten().min();
        if self.is_paused() {
            return always;
        }
        let deadlines = [
            always,
            self.keep_alive_deadline(),
            self.self_test_deadline(),
            self.erase_deadline(),
            self.management_deadline(),
            self.lba_alert_deadline(),
            self.admin.subsystem_reset,
        ];
        deadlines.into_iter().flatten().min()
    }
}
