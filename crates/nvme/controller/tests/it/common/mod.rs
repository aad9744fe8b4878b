//! A host in the same process: guest memory behind several windows, rings in it, and every way to
//! ring a doorbell.
#![allow(dead_code)]

pub mod volumes;

pub use test_host::Pair;
pub use volumes::*;

use controller::{
    Controller, ControllerConfig, DoorbellPage, IrqSink, NamespaceConfig, Recovery,
    RetainedObjects, state_layout,
};
use dma::{Memory, Prot};
use nvme::pci::command;
use nvme::regs::{self, Aqa, Cc, CcCss, Csts, Shn, Shst};
use nvme::{AdminOpcode, Command, Completion, NvmOpcode, Status};
use state_memory::StateMemory;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use test_host::{GuestMemory, Shadow};
use volume::{Faults, Io, IoOptions, Volume};
use zerocopy::{Immutable, IntoBytes};

/// Low window: rings and small buffers.
pub const LOW: u64 = 0;
/// Bytes of the low window.
pub const LOW_SIZE: u64 = 1 << 20;
/// High window, far above, for data.
pub const HIGH: u64 = 0x40_0000_0000;
/// Bytes of the high window.
pub const HIGH_SIZE: u64 = 16 << 20;
/// Address of the admin submission and completion queue.
pub const ASQ: u64 = 0x1000;
pub const ACQ: u64 = 0x2000;
/// A page for data of admin commands.
pub const PAGE: u64 = 0x4000;
/// I/O queues go here: pair `q` at `RINGS + q * RING_STEP`, submission first.
pub const RINGS: u64 = 0x1_0000;
pub const RING_STEP: u64 = 0x2000;
/// Shadow doorbells and EventIdx.
pub const SHADOW: u64 = 0x8000;
pub const EVENTIDX: u64 = 0x9000;
const HOSTS_SHADOW: Shadow = Shadow {
    doorbells: SHADOW,
    event_idx: EVENTIDX,
};
/// Where commands find the controller memory buffer, once the host has said so.
pub const CMB: u64 = 0x80_0000_0000;
/// Data of I/O commands.
pub const DATA: u64 = HIGH;

/// Counts interrupts.
#[derive(Default)]
pub struct Count {
    signals: AtomicU32,
    /// Under which it is kept; 0: it is not.
    number: u32,
}

impl IrqSink for Count {
    fn signal(&self) {
        self.signals.fetch_add(1, Ordering::Relaxed);
    }

    fn kept(&self) -> Option<NonZeroU32> {
        NonZeroU32::new(self.number)
    }
}

impl Count {
    /// How many since the last call.
    pub fn take(&self) -> u32 {
        self.signals.swap(0, Ordering::Relaxed)
    }
}

/// The number of the first vector's receiver.
const FIRST_VECTOR: u32 = 100;
/// The number of the INTx pin's.
const PIN: u32 = 99;

/// What outlives a controller.
pub struct Keeper {
    memories: [Memory; 2],
    vectors: Vec<Arc<Count>>,
    pub pin: Arc<Count>,
    pub buffer: Option<OwnedFd>,
}

impl RetainedObjects for Keeper {
    fn memory(&mut self, number: NonZeroU32, end: u64, _: bool) -> Option<Memory> {
        let memory = self.memories.get(number.get() as usize - 1)?;
        (memory.len() as u64 >= end).then(|| memory.clone())
    }

    fn receiver(&mut self, number: NonZeroU32) -> Option<Arc<dyn IrqSink>> {
        if number.get() == PIN {
            return Some(self.pin.clone());
        }
        let vector = number.get().checked_sub(FIRST_VECTOR)?;
        let vector: Arc<dyn IrqSink> = self.vectors.get(vector as usize)?.clone();
        Some(vector)
    }

    fn memory_buffer(&mut self) -> Option<OwnedFd> {
        self.buffer.take()
    }
}

fn again(fd: BorrowedFd<'_>) -> OwnedFd {
    fd.try_clone_to_owned().unwrap()
}

/// How the host rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ring {
    Register,
    Mapped,
    Shadow,
}

pub struct Host {
    pub c: Controller,
    pub io: Io,
    pub low: Memory,
    pub high: Memory,
    pub vectors: Vec<Arc<Count>>,
    pub pairs: BTreeMap<u16, Pair>,
    pub ring: Ring,
    pub now: Instant,
    pub cid: u16,
    /// What other workers do in each round.
    pub beside: Option<Beside>,
    pub state: StateMemory,
    /// What is done when the process has died, before the next one begins, and after.
    pub dying: Option<Dying>,
    /// How the next process has a namespace, which this one leaves as it was.
    pub reload: Option<Reload>,
    /// Vectors that have no receiver.
    pub deaf: BTreeSet<u16>,
    /// What the last next process has found.
    pub recovery: Recovery,
    pub deaths: u32,
    /// Of these, at each crash point.
    pub crashes: BTreeMap<&'static str, u32>,
}

/// See [`Host::reload`].
pub type Reload = Box<dyn Fn(&mut NamespaceConfig)>;

/// See [`Host::dying`].
pub type Dying = Box<dyn FnMut(&mut Host, bool)>;

/// A round of other workers; it may concern the controller.
pub type Beside = Box<dyn FnMut(&mut Controller, Instant) -> bool>;

/// A namespace on a volume.
pub fn ns(nsid: u32, volume: Arc<dyn Volume>, block_size: u32) -> NamespaceConfig {
    NamespaceConfig {
        block_size,
        nguid: [nsid as u8; 16],
        ..NamespaceConfig::new(nsid, volume)
    }
}

impl GuestMemory for Host {
    fn at(&self, iova: u64) -> Option<(&Memory, usize)> {
        Some(self.memory(iova))
    }
}

impl Host {
    pub fn with(config: ControllerConfig, namespaces: Vec<NamespaceConfig>) -> Host {
        let io = Io::new(IoOptions::default());
        let state = StateMemory::create(state_layout(&config)).unwrap();
        let page = DoorbellPage::new().unwrap();
        let made = Controller::with_state(3, config, namespaces, &io, page, state.clone());
        let mut c = made.unwrap();
        let low = Memory::anonymous(LOW_SIZE as usize).unwrap();
        let high = Memory::anonymous(HIGH_SIZE as usize).unwrap();
        for (memory, number) in [(&low, 1), (&high, 2)] {
            memory.set_kept(NonZeroU32::new(number).unwrap());
        }
        c.dma_map(LOW, LOW_SIZE, Some((low.clone(), 0)), Prot::RW)
            .unwrap();
        c.dma_map(HIGH, HIGH_SIZE, Some((high.clone(), 0)), Prot::RW)
            .unwrap();
        let count = |v| Count {
            number: FIRST_VECTOR + u32::from(v),
            ..Count::default()
        };
        let vectors = (0..c.vectors()).map(|v| Arc::new(count(v)));
        let vectors: Vec<Arc<Count>> = vectors.collect();
        for (v, sink) in vectors.iter().enumerate() {
            c.set_msix(v as u16, Some(sink.clone()));
        }
        let ring = if c.config().mapped_doorbells {
            Ring::Mapped
        } else {
            Ring::Register
        };
        Host {
            c,
            io,
            low,
            high,
            vectors,
            pairs: BTreeMap::new(),
            ring,
            now: Instant::now(),
            cid: 0,
            beside: None,
            state,
            dying: None,
            reload: None,
            deaf: BTreeSet::new(),
            recovery: Recovery::default(),
            deaths: 0,
            crashes: BTreeMap::new(),
        }
    }

    // ---- death

    /// Does something with the controller, as a request that is made again when the process dies
    /// before it has answered.
    pub fn outliving<R>(&mut self, mut what: impl FnMut(&mut Host) -> R) -> R {
        loop {
            match catch_unwind(AssertUnwindSafe(|| what(self))) {
                Ok(result) => return result,
                Err(panic) => {
                    self.crashed(panic);
                    self.die();
                }
            }
        }
    }

    /// Handles the panic of a crash point; any other panic continues.
    fn crashed(&mut self, panic: Box<dyn std::any::Any + Send>) {
        match panic.downcast::<crash::Crashed>() {
            Ok(crashed) => *self.crashes.entry(crashed.0).or_default() += 1,
            Err(panic) => resume_unwind(panic),
        }
    }

    /// Ends the process, and continues with the next one.
    pub fn die(&mut self) {
        self.deaths += 1;
        let mut dying = self.dying.take();
        if let Some(dying) = &mut dying {
            dying(self, true);
        }
        loop {
            match catch_unwind(AssertUnwindSafe(|| self.restore())) {
                Ok(()) => break,
                // It dies, too.
                Err(panic) => {
                    self.crashed(panic);
                    self.deaths += 1;
                }
            }
        }
        if let Some(dying) = &mut dying {
            dying(self, false);
        }
        self.dying = dying;
        self.told();
    }

    /// What outlives the process.
    pub fn keeper(&self) -> Keeper {
        Keeper {
            memories: [self.low.clone(), self.high.clone()],
            vectors: self.vectors.clone(),
            pin: Arc::default(),
            buffer: self.c.cmb_pages().map(|pages| again(pages.fd())),
        }
    }

    fn restore(&mut self) {
        self.restore_as(self.c.config().clone());
    }

    /// Continues with the next process, whose controller has this configuration.
    pub fn restore_as(&mut self, config: ControllerConfig) {
        let io = Io::new(IoOptions::default());
        let mut kept = self.keeper();
        let mut namespaces: Vec<NamespaceConfig> = self.c.namespaces().cloned().collect();
        // Namespaces of a pool are taken from the pool.
        if let Some(pool) = &self.c.config().pool {
            let pooled = pool.namespaces();
            namespaces.retain(|ns| pooled.iter().all(|pooled| pooled.nguid != ns.nguid));
        }
        if let Some(reload) = &self.reload {
            namespaces.iter_mut().for_each(reload);
        }
        let (c, recovery) = Controller::restore(
            3,
            config,
            namespaces,
            &io,
            DoorbellPage::from_fd(again(self.c.doorbell_page().as_fd())).unwrap(),
            StateMemory::open(again(self.state.fd())).unwrap(),
            &mut kept,
        )
        .unwrap();
        // A process that is killed drops nothing, and so the file keeps its pages.
        std::mem::forget(self.c.cmb_pages().cloned());
        self.c = c;
        self.io = io;
        self.recovery = recovery;
    }

    /// The next process has told the host of everything that it has not consumed.
    pub fn told(&mut self) {
        if self.command_register() & command::BUS_MASTER == 0 || !self.csts().rdy() {
            return;
        }
        let queues = self.c.completion_queues();
        let queues = queues.into_iter().map(|(qid, _)| qid).chain([0]);
        let known = |qid: &u16| self.pairs.contains_key(qid) && !self.deaf.contains(qid);
        for qid in queues.filter(known) {
            let told = self.vectors[usize::from(qid)].take() > 0;
            assert!(told || self.peek(qid).is_none(), "queue {qid}");
        }
    }

    /// Enabled, one namespace of 8 MiB in memory, blocks of 512 bytes, one I/O queue pair of 64
    /// entries.
    pub fn ready() -> Host {
        Host::ready_with(vec![ns(1, mem(8 << 20), 512)])
    }

    pub fn ready_with(namespaces: Vec<NamespaceConfig>) -> Host {
        let mut h = Host::with(ControllerConfig::default(), namespaces);
        h.enable();
        h.create_pair(1, 64);
        h
    }

    /// Forgets the interrupts so far.
    pub fn quiet(&self) {
        self.vectors.iter().for_each(|v| {
            v.take();
        });
    }

    // ---- memory

    fn memory(&self, iova: u64) -> (&Memory, usize) {
        if (CMB..CMB + self.c.cmb_size()).contains(&iova) {
            let pages = self.c.cmb_pages().unwrap();
            (pages.memory(), (iova - CMB) as usize)
        } else if iova >= HIGH {
            (&self.high, (iova - HIGH) as usize)
        } else {
            (&self.low, iova as usize)
        }
    }

    pub fn write(&self, iova: u64, bytes: &[u8]) {
        let (memory, at) = self.memory(iova);
        memory.write(at, bytes).unwrap();
    }

    pub fn read(&self, iova: u64, len: usize) -> Vec<u8> {
        let (memory, at) = self.memory(iova);
        let mut bytes = vec![0; len];
        memory.read(at, &mut bytes).unwrap();
        bytes
    }

    pub fn cell(&self, iova: u64) -> &AtomicU32 {
        let (memory, at) = self.memory(iova);
        memory.atomic_u32(at).unwrap()
    }

    // ---- registers

    pub fn reg32(&mut self, offset: u64) -> u32 {
        let mut b = [0; 4];
        self.c.bar0_read(offset, &mut b);
        u32::from_le_bytes(b)
    }

    pub fn reg64(&mut self, offset: u64) -> u64 {
        let mut b = [0; 8];
        self.c.bar0_read(offset, &mut b);
        u64::from_le_bytes(b)
    }

    pub fn set32(&mut self, offset: u64, value: u32) {
        self.outliving(|h| h.c.bar0_write(offset, &value.to_le_bytes()));
    }

    pub fn set64(&mut self, offset: u64, value: u64) {
        self.outliving(|h| h.c.bar0_write(offset, &value.to_le_bytes()));
    }

    pub fn csts(&mut self) -> Csts {
        Csts::from_bits(self.reg32(regs::CSTS))
    }

    pub fn cc_enabled() -> Cc {
        Cc::new()
            .with_en(true)
            .with_css(CcCss::NVM)
            .with_iosqes(6)
            .with_iocqes(4)
    }

    /// The PCI command register.
    pub fn command_register(&mut self) -> u16 {
        let mut bytes = [0; 2];
        self.c.config_read(4, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    /// Sets the bits of the command register, or clears them.
    pub fn set_command(&mut self, bits: u16, on: bool) {
        let before = self.command_register();
        let value = if on { before | bits } else { before & !bits };
        self.outliving(|h| h.c.config_write(4, &value.to_le_bytes()));
    }

    /// Starts the controller with admin queues of 32 entries.
    pub fn enable(&mut self) {
        self.set_command(command::MEMORY_SPACE | command::BUS_MASTER, true);
        self.set32(
            regs::AQA,
            Aqa::new().with_asqs_z(31).with_acqs_z(31).into_bits(),
        );
        self.set64(regs::ASQ, ASQ);
        self.set64(regs::ACQ, ACQ);
        self.write(ACQ, &[0; 32 * 16]);
        self.pairs.clear();
        self.pairs.insert(0, Pair::new(ASQ, ACQ, 32));
        self.set32(regs::CC, Self::cc_enabled().into_bits());
        assert!(self.csts().rdy(), "{:?}", self.csts());
    }

    pub fn disable(&mut self) {
        let cc = Cc::from_bits(self.reg32(regs::CC)).with_en(false);
        self.set32(regs::CC, cc.into_bits());
        if self.ring == Ring::Shadow {
            self.ring = Ring::Register;
        }
    }

    pub fn shutdown(&mut self, how: Shn) {
        let cc = Cc::from_bits(self.reg32(regs::CC)).with_shn(how);
        self.set32(regs::CC, cc.into_bits());
    }

    pub fn wait_shutdown(&mut self) {
        self.until(|h| h.csts().shst() == Shst::COMPLETE);
    }

    // ---- queues

    /// Makes room for a pair's rings and creates both queues, interrupts on vector `qid`.
    pub fn create_pair(&mut self, qid: u16, size: u32) {
        let sq = RINGS + u64::from(qid) * RING_STEP;
        self.create_pair_at(qid, size, sq, sq + 0x1000);
    }

    pub fn create_pair_at(&mut self, qid: u16, size: u32, sq: u64, cq: u64) {
        self.pairs.remove(&qid);
        assert_eq!(self.create_cq(qid, size, cq, Some(qid)), Status::SUCCESS);
        assert_eq!(self.create_sq(qid, qid, size, sq), Status::SUCCESS);
        self.pairs.insert(qid, Pair::new(sq, cq, size));
    }

    pub fn create_cq(&mut self, qid: u16, size: u32, iova: u64, vector: Option<u16>) -> Status {
        self.write(iova, &vec![0; size as usize * 16]);
        let [command, _] = Pair::new(0, iova, size).create(qid, vector);
        self.admin(command).status()
    }

    /// Queue pair 2 of 16 entries at `window`, completion queue in the page behind the submission
    /// queue.
    pub fn create_cq_in(&mut self, window: u64) {
        assert_eq!(self.create_raw_cq(2, window + 0x1000), Status::SUCCESS);
        assert_eq!(self.create_sq(2, 2, 16, window), Status::SUCCESS);
    }

    pub fn create_cq_status(&mut self, qid: u16, iova: u64) -> Status {
        self.create_raw_cq(qid, iova)
    }

    /// A completion queue of 16 entries at an address that need not be one of the host's usual
    /// windows.
    fn create_raw_cq(&mut self, qid: u16, iova: u64) -> Status {
        let [command, _] = Pair::new(0, iova, 16).create(qid, None);
        self.admin(command).status()
    }

    pub fn create_sq(&mut self, qid: u16, cqid: u16, size: u32, iova: u64) -> Status {
        let [_, command] = Pair::new(iova, 0, size).create(qid, None);
        let cqid = u32::from(cqid) << 16 | 1;
        self.admin(command.dw(11, cqid)).status()
    }

    pub fn delete(&mut self, opcode: AdminOpcode, qid: u16) -> Status {
        self.simple(opcode, u32::from(qid)).status()
    }

    /// An admin command of which only dword 10 matters.
    pub fn simple(&mut self, opcode: AdminOpcode, cdw10: u32) -> Completion {
        let mut command = Command::new(opcode.0, 0, 0);
        command.cdw10 = cdw10.into();
        self.admin(command)
    }

    pub fn next_cid(&mut self) -> u16 {
        self.cid = self.cid.wrapping_add(1);
        self.cid
    }

    /// Puts a command into a queue, with a fresh CID, without ringing.
    pub fn push(&mut self, qid: u16, command: impl IntoBytes + Immutable) -> u16 {
        let cid = self.next_cid();
        let mut pair = self.pairs[&qid];
        let command = test_host::Command::of(&command).with_cid(cid);
        pair.sq.push(self, &command).unwrap();
        self.pairs.insert(qid, pair);
        cid
    }

    /// Offset of a doorbell register.
    pub fn doorbell(qid: u16, cq: bool) -> u64 {
        test_host::doorbell(qid, cq, 0)
    }

    pub fn ring_value(&mut self, qid: u16, cq: bool, value: u32) {
        let offset = Self::doorbell(qid, cq);
        match self.ring {
            Ring::Shadow if qid != 0 => {
                if HOSTS_SHADOW.store(self, offset, value).unwrap() {
                    self.set32(offset, value);
                }
            }
            Ring::Mapped => {
                let cell = self.c.bar0_pages().cell(offset as usize / 4).unwrap();
                cell.store(value.to_le(), Ordering::Release);
            }
            _ => self.set32(offset, value),
        }
    }

    pub fn ring_sq(&mut self, qid: u16) {
        let tail = self.pairs[&qid].sq.tail;
        self.ring_value(qid, false, tail);
    }

    /// Puts a command into a queue and rings.
    pub fn submit(&mut self, qid: u16, command: impl IntoBytes + Immutable) -> u16 {
        let cid = self.push(qid, command);
        self.ring_sq(qid);
        cid
    }

    /// The next completion of a queue, if it is there; rings its head.
    pub fn reap(&mut self, qid: u16) -> Option<Completion> {
        let completion = self.peek(qid)?;
        let pair = self.pairs.get_mut(&qid).unwrap();
        pair.cq.advance();
        let head = pair.cq.head;
        self.ring_value(qid, true, head);
        Some(completion)
    }

    /// The next completion of a queue, if it is there, left there.
    pub fn peek(&self, qid: u16) -> Option<Completion> {
        self.pairs[&qid].cq.peek(self).unwrap()?.cast()
    }

    pub fn reap_all(&mut self, qid: u16) -> Vec<Completion> {
        std::iter::from_fn(|| self.reap(qid)).collect()
    }

    // ---- running

    /// One round as a worker does it.
    pub fn round(&mut self) -> bool {
        self.outliving(Host::round_once)
    }

    /// A round of a process that does not outlive a crash point.
    pub fn round_once(&mut self) -> bool {
        let Host { c, io, .. } = self;
        let mut worked = io.poll(&mut |completion| c.complete(completion)) > 0;
        if self.c.config().pool.is_some() {
            // A process may have begun since.
            self.now = self.now.max(Instant::now());
            self.c.tidy(&self.io);
        }
        worked |= self.c.poll(self.now);
        self.io.flush();
        let mut done = Vec::new();
        self.c.poll_volumes(&mut done);
        worked |= !done.is_empty();
        for completion in done {
            self.c.complete(completion);
        }
        if let Some(beside) = &mut self.beside {
            worked |= beside(&mut self.c, self.now);
        }
        worked
    }

    /// Rounds until nothing moves.
    pub fn run(&mut self) {
        for _ in 0..100_000 {
            if !self.round() {
                return;
            }
        }
        panic!("the controller does not come to rest");
    }

    /// Rounds until the volume holds exactly so many requests, and then a few more.
    pub fn run_held(&mut self, faults: &Faults, held: usize) {
        self.until(|_| faults.held() == held);
        for _ in 0..4 {
            self.round();
        }
        assert_eq!(faults.held(), held);
    }

    /// Rounds until `done`, at most for a minute.
    pub fn until(&mut self, mut done: impl FnMut(&mut Host) -> bool) {
        let limit = Instant::now() + Duration::from_secs(60);
        loop {
            self.round();
            if done(self) {
                return;
            }
            assert!(Instant::now() < limit, "nothing happens");
        }
    }

    /// Runs one command to its end.
    pub fn command(&mut self, qid: u16, command: impl IntoBytes + Immutable) -> Completion {
        let cid = self.submit(qid, command);
        let mut found = None;
        self.until(|h| {
            found = h.reap(qid);
            found.is_some()
        });
        let completion = found.unwrap();
        assert_eq!(completion.cid.get(), cid);
        assert_eq!(completion.sqid.get(), qid);
        // Everything in the queue was fetched, this command last.
        let tail = self.pairs[&qid].sq.tail;
        assert_eq!(u32::from(completion.sqhd.get()), tail, "SQHD");
        completion
    }

    pub fn admin(&mut self, command: impl IntoBytes + Immutable) -> Completion {
        self.command(0, command)
    }

    pub fn io(&mut self, command: impl IntoBytes + Immutable) -> Status {
        self.command(1, command).status()
    }

    /// An I/O command on `blocks` blocks from `slba` on, its data in one run of memory at `iova`,
    /// by PRPs (the list, if there is one, at `PRP_LIST`).
    pub fn rw(&self, opcode: NvmOpcode, nsid: u32, slba: u64, blocks: u32, iova: u64) -> Command {
        let mut command = Command::new(opcode.0, 0, nsid);
        command.set_slba(slba);
        command.cdw12 = (blocks - 1).into();
        command.set_prps(iova, 0);
        command
    }

    /// Points a command's PRPs at `len` bytes at `iova`, lists at `list`.
    pub fn prps(&self, command: &mut Command, iova: u64, len: u64, list: u64) {
        let (prp1, prp2) = test_host::prps(self, 4096, iova, len, list).unwrap();
        command.set_prps(prp1, prp2);
    }

    /// Doorbell Buffer Config, and the host uses the buffers from then on.
    pub fn use_shadow(&mut self) -> Status {
        let status = self.configure_shadow(SHADOW, EVENTIDX);
        if status.is_success() {
            self.ring = Ring::Shadow;
        }
        status
    }

    pub fn configure_shadow(&mut self, shadow: u64, eventidx: u64) -> Status {
        let shadow = Shadow {
            doorbells: shadow,
            event_idx: eventidx,
        };
        self.admin(shadow.configure()).status()
    }

    /// Set Features with a value in dword 11.
    pub fn set_feature(&mut self, fid: nvme::feature::Fid, value: u32) -> Completion {
        let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
        command.cdw10 = u32::from(fid.0).into();
        command.cdw11 = value.into();
        self.admin(command)
    }

    /// Get Features, with Select.
    pub fn get_feature(&mut self, fid: nvme::feature::Fid, sel: u32, cdw11: u32) -> Completion {
        let mut command = Command::new(AdminOpcode::GET_FEATURES.0, 0, 0);
        command.cdw10 = (u32::from(fid.0) | sel << 8).into();
        command.cdw11 = cdw11.into();
        command.set_prps(PAGE, 0);
        self.admin(command)
    }

    /// Get Log Page: `len` bytes from `offset`.
    pub fn log(&mut self, lid: u8, len: usize, offset: u64, rae: bool) -> (Status, Vec<u8>) {
        let mut command = Command::new(AdminOpcode::GET_LOG_PAGE.0, 0, 0xffff_ffff);
        let numd = (len / 4 - 1) as u32;
        command.cdw10 = (u32::from(lid) | u32::from(rae) << 15 | numd << 16).into();
        command.cdw11 = (numd >> 16).into();
        command.cdw12 = (offset as u32).into();
        command.cdw13 = ((offset >> 32) as u32).into();
        self.prps(&mut command, DATA, len as u64, PAGE);
        let status = self.admin(command).status();
        (status, self.read(DATA, len))
    }

    /// Identify.
    pub fn identify(&mut self, cns: u8, nsid: u32, cdw11: u32) -> (Status, Vec<u8>) {
        let mut command = Command::new(AdminOpcode::IDENTIFY.0, 0, nsid);
        command.cdw10 = u32::from(cns).into();
        command.cdw11 = cdw11.into();
        command.set_prps(PAGE, 0);
        self.write(PAGE, &[0xee; 4096]);
        let status = self.admin(command).status();
        (status, self.read(PAGE, 4096))
    }
}

/// Bytes that differ from place to place.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x as u8
        })
        .collect()
}

/// The status without its flags.
pub fn plain(status: Status) -> Status {
    status.without_flags()
}
