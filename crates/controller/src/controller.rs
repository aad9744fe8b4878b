//! The control half: registers and the state of the controller ("NVMe Base 2.1", 3.1.4 and 3.5 to 3.7).

use crate::admin::Admin;
use crate::config::{ConfigError, ControllerConfig, NamespaceConfig};
use crate::engine::{Engine, EngineConfig, Event, Namespace};
use crate::irq::IrqSink;
use crate::pci::{self, ConfigEffect, ConfigSpace};
use crate::stats::ControllerStats;
use dma::{DmaMap, MapError, Memory, Prot, SharedPages};
use nvme::regs::{self, Ams, Aqa, Cap, CapCss, Cc, CcCss, Crto, Csts, Shn, Shst, Vs};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;
use volume::Io;

/// Largest memory page size offered: 4 KiB shifted left by this (CAP.MPSMAX).
const MPSMAX: u8 = 4;

/// What the controller is in the middle of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// CC.EN is 0 and everything is at rest.
    Disabled,
    /// CSTS.RDY is 1.
    Ready,
    /// A controller-level reset waits for the commands in flight.
    Resetting,
    /// A shutdown waits for the commands in flight.
    ShutdownDrain,
    /// A shutdown waits for the volumes to make everything durable.
    ShutdownFlush,
    /// CSTS.SHST is 10b.
    ShutDown,
    /// CSTS.CFS is 1: only a reset helps.
    Failed,
}

/// A virtual NVMe controller: one PCI function, its registers, queues and namespaces.
///
/// It belongs to one thread, its worker. The worker delivers register accesses, calls [`Controller::poll`] and
/// [`Controller::complete`], and sleeps only when [`Controller::arm`] lets it.
pub struct Controller {
    pub(crate) config: ControllerConfig,
    pub(crate) pci: ConfigSpace,
    pub(crate) engine: Engine,
    pub(crate) admin: Admin,
    state: State,
    cap: Cap,
    pub(crate) cc: Cc,
    csts: Csts,
    aqa: Aqa,
    asq: u64,
    acq: u64,
    /// The VMM asked for a reset and waits for its answer.
    pub(crate) now: Instant,
}

impl Controller {
    /// A controller that is powered on and disabled. `id` names it in the tags of its volume requests, see
    /// [`tag_owner`](crate::tag_owner); `io` is its worker's.
    pub fn new(
        id: u16,
        config: ControllerConfig,
        namespaces: Vec<NamespaceConfig>,
        io: &Io,
    ) -> Result<Self, ConfigError> {
        config.check()?;
        let mut seen = BTreeSet::new();
        let mut opened = Vec::new();
        for ns in namespaces {
            if !seen.insert(ns.nsid) {
                return Err(ConfigError::DuplicateNamespace(ns.nsid));
            }
            opened.push(Namespace::open(ns, io)?);
        }
        let mut config = config;
        config.max_namespaces = config.max_namespaces.max(seen.last().copied().unwrap_or(1));
        let vectors = config.io_queues + 1;
        let page = Arc::new(SharedPages::new(pci::BAR0_SIZE as usize)?);
        let engine = Engine::new(
            EngineConfig {
                id,
                io_queues: config.io_queues,
                vectors,
                max_in_flight: config.max_in_flight,
                max_transfer: 4096 << config.mdts,
                page,
            },
            opened,
        );
        let timeout = config.reset_timeout.as_millis().div_ceil(500).clamp(1, 255) as u8;
        let cap = Cap::new()
            .with_mqes_z((config.queue_entries - 1) as u16)
            .with_cqr(true)
            .with_to(timeout)
            .with_nssrs(true)
            .with_css(CapCss::new().with_ncss(true).with_iocss(true))
            .with_mpsmax(MPSMAX)
            .with_crwms(true);
        let admin = Admin::new(&config, &engine);
        engine.stats.power_cycles.add(1);
        let mut controller = Controller {
            pci: ConfigSpace::new(config.pci, vectors),
            config,
            engine,
            admin,
            state: State::Disabled,
            cap,
            cc: Cc::new(),
            csts: Csts::new(),
            aqa: Aqa::new(),
            asq: 0,
            acq: 0,
            now: Instant::now(),
        };
        controller.engine.write_cache = controller.config.write_cache;
        Ok(controller)
    }

    /// The counters, to be read by anyone.
    pub fn stats(&self) -> Arc<ControllerStats> {
        self.engine.stats.clone()
    }

    /// What the controller was made of.
    pub fn config(&self) -> &ControllerConfig {
        &self.config
    }

    /// The pages behind BAR0: a client may map the doorbell page at [`pci::DOORBELL_OFFSET`] of its file.
    pub fn bar0_pages(&self) -> &Arc<SharedPages> {
        self.engine.doorbell_page()
    }

    // ---- PCI

    /// Reads configuration space.
    pub fn config_read(&self, offset: u64, data: &mut [u8]) {
        self.pci.read(offset, data);
    }

    /// Writes configuration space. A function level reset is begun at once; it is over when
    /// [`Controller::is_resetting`] says no.
    pub fn config_write(&mut self, offset: u64, data: &[u8]) {
        if self.pci.write(offset, data) == ConfigEffect::FunctionLevelReset {
            self.reset();
        }
    }

    /// Reads BAR0 at any offset and length. What is no register reads as zero.
    pub fn bar0_read(&mut self, offset: u64, data: &mut [u8]) {
        if (pci::MSIX_PBA_OFFSET..pci::BAR0_SIZE).contains(&offset) {
            return self
                .engine
                .irqs
                .read_pba((offset - pci::MSIX_PBA_OFFSET) as usize, data);
        }
        for (i, byte) in data.iter_mut().enumerate() {
            let at = offset.saturating_add(i as u64);
            let dword = self.read_register(at & !3).to_le_bytes();
            *byte = dword.get((at & 3) as usize).copied().unwrap_or(0);
        }
    }

    fn read_register(&self, offset: u64) -> u32 {
        let low = |v: u64| v as u32;
        let high = |v: u64| (v >> 32) as u32;
        match offset {
            regs::CAP => low(self.cap.into_bits()),
            o if o == regs::CAP + 4 => high(self.cap.into_bits()),
            regs::VS => Vs::V2_1.into_bits(),
            regs::INTMS | regs::INTMC => self.engine.irqs.intms(),
            regs::CC => self.cc.into_bits(),
            regs::CSTS => self.csts.into_bits(),
            regs::AQA => self.aqa.into_bits(),
            regs::ASQ => low(self.asq),
            o if o == regs::ASQ + 4 => high(self.asq),
            regs::ACQ => low(self.acq),
            o if o == regs::ACQ + 4 => high(self.acq),
            // Ready is as fast as enabling is: within the first unit of 500 ms.
            regs::CRTO => Crto::new().with_crwmt(u16::from(self.cap.to())).into_bits(),
            _ => 0,
        }
    }

    /// Writes BAR0. Registers take whole dwords, one or two at a time; other writes are ignored ("NVMe over PCIe
    /// Transport 1.1", 3.1 leaves them undefined).
    pub fn bar0_write(&mut self, offset: u64, data: &[u8]) {
        if offset % 4 != 0 || !matches!(data.len(), 4 | 8) {
            tracing::trace!(
                offset,
                len = data.len(),
                "register write of an odd shape ignored"
            );
            return;
        }
        for (i, dword) in data.chunks_exact(4).enumerate() {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(dword);
            self.write_register(
                offset.saturating_add(4 * i as u64),
                u32::from_le_bytes(bytes),
            );
        }
    }

    fn write_register(&mut self, offset: u64, value: u32) {
        let low = |old: u64| old & !0xffff_ffff | u64::from(value);
        let high = |old: u64| old & 0xffff_ffff | u64::from(value) << 32;
        match offset {
            regs::INTMS => self.engine.irqs.intms_set(value),
            regs::INTMC => {
                self.engine.irqs.intms_clear(value);
                self.engine.end_round();
            }
            regs::CC => self.write_cc(Cc::from_bits(value)),
            // CSTS.NSSRO is cleared by writing 1.
            regs::CSTS => {
                if Csts::from_bits(value).nssro() {
                    self.csts.set_nssro(false);
                }
            }
            regs::NSSR => {
                if value == regs::NSSR_MAGIC {
                    tracing::info!("NVM subsystem reset");
                    self.begin_reset();
                    self.cc = Cc::new();
                    self.csts.set_nssro(true);
                }
            }
            regs::AQA => self.aqa = Aqa::from_bits(value & 0x0fff_0fff),
            regs::ASQ => self.asq = low(self.asq) & !0xfff,
            o if o == regs::ASQ + 4 => self.asq = high(self.asq),
            regs::ACQ => self.acq = low(self.acq) & !0xfff,
            o if o == regs::ACQ + 4 => self.acq = high(self.acq),
            pci::DOORBELL_OFFSET..pci::MSIX_TABLE_OFFSET => {
                let index = ((offset - pci::DOORBELL_OFFSET) / 4) as usize;
                if self.state != State::Disabled && !self.engine.write_doorbell(index, value) {
                    self.invalid_doorbell_register(index, value);
                }
            }
            _ => {}
        }
    }

    fn write_cc(&mut self, new: Cc) {
        let old = std::mem::replace(&mut self.cc, new);
        match (old.en(), new.en()) {
            (false, true) if self.state == State::Resetting => {}
            (false, true) => self.enable(),
            (true, false) => self.begin_reset(),
            _ => {}
        }
        if new.shn() != Shn::NONE && old.shn() != new.shn() {
            self.begin_shutdown();
        }
    }

    // ---- enable, disable, shutdown

    fn enable(&mut self) {
        self.csts.set_shst(Shst::NORMAL);
        let cc = self.cc;
        let page = 4096u64 << cc.mps();
        let sane = cc.mps() <= MPSMAX
            && matches!(cc.css(), CcCss::NVM | CcCss::ALL_SUPPORTED)
            && cc.ams() == Ams::ROUND_ROBIN
            && self.aqa.asqs_z() > 0
            && self.aqa.acqs_z() > 0
            && self.asq % page == 0
            && self.acq % page == 0;
        self.engine.page_size = page;
        let (asqs, acqs) = (
            u32::from(self.aqa.asqs_z()) + 1,
            u32::from(self.aqa.acqs_z()) + 1,
        );
        let made = sane
            && self.engine.create_cq(0, self.acq, acqs, Some(0))
            && self.engine.create_sq(0, 0, self.asq, asqs);
        if !made {
            let shared = self.engine.dma.windows().any(|w| w.backing.is_some());
            tracing::warn!(
                cc = cc.into_bits(),
                aqa = self.aqa.into_bits(),
                asq = self.asq,
                acq = self.acq,
                "controller cannot be enabled: {}",
                if !sane {
                    "the host asks for something that was not offered"
                } else if shared {
                    "its admin queues lie in memory that the guest did not map"
                } else {
                    "no guest memory is shared (QEMU: -object memory-backend-memfd,id=mem,size=...,share=on \
                     -machine memory-backend=mem)"
                }
            );
            self.fail();
            return;
        }
        self.state = State::Ready;
        self.csts.set_rdy(true);
        tracing::info!(queue_entries = asqs, page_size = page, "controller enabled");
    }

    fn fail(&mut self) {
        self.state = State::Failed;
        self.csts.set_cfs(true);
        self.engine.stop_fetching();
    }

    /// Something from which only a reset helps (CSTS.CFS).
    pub(crate) fn fatal(&mut self, why: &str) {
        tracing::warn!(why, "controller fatal status");
        self.fail();
    }

    fn begin_reset(&mut self) {
        self.engine.stop();
        self.engine.stats.resets.add(1);
        self.admin.reset(&self.config, &mut self.engine);
        self.state = State::Resetting;
        self.progress();
    }

    fn begin_shutdown(&mut self) {
        match self.state {
            State::Ready => {
                tracing::info!("shutdown notification");
                self.csts.set_shst(Shst::OCCURRING);
                self.engine.stop_fetching();
                self.state = State::ShutdownDrain;
            }
            State::Disabled | State::Resetting => {
                // Nothing is in flight, nothing was completed that is not flushed by a reset's end.
                self.csts.set_shst(Shst::OCCURRING);
                self.state = State::ShutdownDrain;
            }
            _ => {}
        }
        self.progress();
    }

    /// Goes on with a reset or a shutdown that waits for commands in flight.
    fn progress(&mut self) -> bool {
        let mut moved = false;
        while self.engine.drained() {
            match self.state {
                State::Resetting => {
                    let nssro = self.csts.nssro();
                    self.csts = Csts::new().with_nssro(nssro);
                    self.state = State::Disabled;
                    if self.cc.en() {
                        self.enable();
                    }
                }
                State::ShutdownDrain => {
                    self.engine.flush_all();
                    self.state = State::ShutdownFlush;
                }
                State::ShutdownFlush => {
                    self.csts.set_shst(Shst::COMPLETE);
                    self.state = State::ShutDown;
                }
                _ => break,
            }
            moved = true;
        }
        moved
    }

    /// The VMM resets the device (also: function level reset): registers and configuration space as after power-on.
    /// It is over when [`Controller::is_resetting`] says no. Guest memory and interrupt receivers are the VMM's and stay.
    pub fn reset(&mut self) {
        self.count_unsafe_shutdown();
        self.cc = Cc::new();
        self.aqa = Aqa::new();
        self.asq = 0;
        self.acq = 0;
        self.csts.set_nssro(false);
        self.pci.reset();
        self.begin_reset();
    }

    fn count_unsafe_shutdown(&mut self) {
        if matches!(
            self.state,
            State::Ready | State::ShutdownDrain | State::ShutdownFlush
        ) {
            self.engine.stats.unsafe_shutdowns.add(1);
        }
    }

    /// A reset waits for commands in flight.
    pub fn is_resetting(&self) -> bool {
        self.state == State::Resetting
    }

    /// The VMM is gone: reset, and its memory and interrupt receivers are let go. The next one finds the controller as
    /// after power-on.
    pub fn disconnect(&mut self) {
        self.engine.irqs.forget_sinks();
        self.reset();
        self.engine.unmapped(0, u64::MAX);
        self.engine.dma.unmap_all();
        self.engine.stats.power_cycles.add(1);
    }

    /// Starts to make everything durable, for a clean exit of the process. It is over when
    /// [`Controller::is_drained`] says so.
    pub fn flush(&mut self) {
        self.engine.stop_fetching();
        self.engine.flush_all();
    }

    /// No command is in flight.
    pub fn is_drained(&self) -> bool {
        self.engine.drained()
    }

    // ---- interrupts

    /// Number of MSI-X vectors.
    pub fn vectors(&self) -> u16 {
        self.engine.irqs.vectors()
    }

    /// Sets or takes away the receiver of an MSI-X vector.
    pub fn set_msix(&mut self, vector: u16, sink: Option<Arc<dyn IrqSink>>) {
        self.engine.irqs.set_vector(vector, sink);
    }

    /// Sets or takes away the receiver of the INTx pin.
    pub fn set_intx(&mut self, sink: Option<Arc<dyn IrqSink>>) {
        self.engine.irqs.set_pin(sink);
        self.engine.end_round();
    }

    /// The VMM masks the INTx pin.
    pub fn mask_intx(&mut self) {
        self.engine.irqs.mask_pin();
    }

    /// The VMM unmasks the INTx pin: it fires again if the host has not consumed everything.
    pub fn unmask_intx(&mut self) {
        self.engine.end_round();
        self.engine.irqs.unmask_pin();
    }

    // ---- guest memory

    /// Adds a window of guest memory; `backing` is `None` for memory that is not shared with this process.
    pub fn dma_map(
        &mut self,
        iova: u64,
        len: u64,
        backing: Option<(Memory, u64)>,
        prot: Prot,
    ) -> Result<(), MapError> {
        self.engine.dma.map(iova, len, backing, prot)?;
        self.engine.mapped();
        Ok(())
    }

    /// Takes windows away. Answer the VMM when [`Controller::dma_quiesced`] says so: then no command in flight can
    /// touch them any more.
    pub fn dma_unmap(&mut self, iova: u64, len: u64) -> Result<(), MapError> {
        self.engine.dma.unmap(iova, len)?;
        self.engine.unmapped(iova, len);
        Ok(())
    }

    /// Takes all windows away.
    pub fn dma_unmap_all(&mut self) {
        self.engine.dma.unmap_all();
        self.engine.unmapped(0, u64::MAX);
    }

    /// No command in flight can touch memory that was unmapped.
    pub fn dma_quiesced(&mut self) -> bool {
        self.engine.dma.quiesced()
    }

    /// The windows.
    pub fn dma(&self) -> &DmaMap {
        &self.engine.dma
    }

    // ---- running

    /// One round: what the host submitted is fetched and started, what is over is posted, interrupts are sent. Returns
    /// whether there was anything to do.
    pub fn poll(&mut self, now: Instant) -> bool {
        self.now = now;
        let mut worked = self.engine.poll(now);
        while let Some(event) = self.engine.events.pop_front() {
            worked = true;
            self.event(event);
        }
        worked |= self.check_keep_alive();
        worked |= self.progress();
        worked |= self.engine.end_round();
        worked
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Admin(command) => self.admin_command(&command),
            Event::SqDrained(qid) => self.sq_deleted(qid),
            Event::AbortDone { sqid, cid, aborted } => self.abort_done(sqid, cid, aborted),
            Event::Failed {
                sqid,
                cid,
                status,
                nsid,
                lba,
            } => self.failed(sqid, cid, status, nsid, lba),
            Event::InvalidDoorbell { qid, value } => self.invalid_doorbell_value(qid, value),
        }
    }

    /// A request came back from a volume. Collect completions first, then hand them in: a completion may start the next
    /// request.
    pub fn complete(&mut self, completion: volume::Completion) {
        self.engine.complete(completion);
    }

    /// Hands completions of volumes that complete without the worker's ring to `out`.
    pub fn poll_volumes(&mut self, out: &mut Vec<volume::Completion>) {
        self.engine.poll_volumes(out);
    }

    /// Before sleeping: arms EventIdx of every queue. `true` when something arrived meanwhile: poll again.
    pub fn arm(&mut self) -> bool {
        self.engine.arm()
    }

    /// One more look a little after [`Controller::arm`], for hosts without a barrier between their shadow store and
    /// their EventIdx load. `true` when something arrived: poll again.
    pub fn recheck(&mut self) -> bool {
        self.engine.recheck()
    }

    /// Nothing will tell the worker of new work: doorbells are written by the client's own stores, or a volume
    /// completes by being polled.
    pub fn needs_polling(&self) -> bool {
        (self.config.mapped_doorbells && self.csts.rdy()) || self.engine.polled_in_flight()
    }

    /// The host uses shadow doorbells.
    pub fn shadowed(&self) -> bool {
        self.engine.shadowed()
    }

    /// CSTS.RDY.
    pub fn is_ready(&self) -> bool {
        self.csts.rdy()
    }

    /// When [`Controller::poll`] has to be called next even if nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        [self.engine.next_interrupt(), self.keep_alive_deadline()]
            .into_iter()
            .flatten()
            .min()
    }
}
