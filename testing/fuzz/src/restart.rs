//! State memory of a process that was controlled by a hostile guest, as read by the next process.
//! The input overwrites the state of an honest process, or replaces its control state.

use controller::{
    Controller, ControllerConfig, DoorbellPage, IrqSink, NamespaceConfig, RetainedObjects,
};
use dma::{Memory, Prot};
use nvme::regs::{self, Aqa, Cc};
use nvme::{AdminOpcode, Command, NvmOpcode};
use state_memory::{Layout, StateMemory};
use std::num::NonZeroU32;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::{Effect, Fault, FaultVolume, Io, IoOptions, MemVolume, OpKind};
use zerocopy::IntoBytes;

const MEMORY: usize = 1 << 20;
const QUEUES: u16 = 3;
const ENTRIES: u32 = 8;
const ASQ: u64 = 0x1000;
const ACQ: u64 = 0x2000;
const SHADOW: u64 = 0x3000;
const RINGS: u64 = 0x1_0000;
const DATA: u64 = 0x8_0000;
/// Where commands find the controller memory buffer, of this size.
const BUFFER: u64 = 0x10_0000_0000;
const BUFFER_SIZE: u64 = 16 << 10;
/// The numbers under which things are kept.
const RAM: u32 = 1;
const RECEIVER: u32 = 2;

struct Deaf;

impl IrqSink for Deaf {
    fn signal(&self) {}

    fn kept(&self) -> Option<NonZeroU32> {
        NonZeroU32::new(RECEIVER)
    }
}

struct Keeper(Memory, Option<OwnedFd>);

impl RetainedObjects for Keeper {
    fn memory(&mut self, number: NonZeroU32, end: u64, _: bool) -> Option<Memory> {
        let found = number.get() == RAM && end <= MEMORY as u64;
        found.then(|| self.0.clone())
    }

    fn receiver(&mut self, number: NonZeroU32) -> Option<Arc<dyn IrqSink>> {
        (number.get() == RECEIVER).then(|| Arc::new(Deaf) as _)
    }

    fn memory_buffer(&mut self) -> Option<OwnedFd> {
        self.1.take()
    }
}

struct Guest {
    memory: Memory,
    controller: Controller,
    tails: [u32; QUEUES as usize + 1],
    cid: u16,
}

impl Guest {
    fn ring(qid: u16, cq: bool) -> u64 {
        match (qid, cq) {
            (0, false) => ASQ,
            (0, true) => ACQ,
            (QUEUES, cq) => BUFFER + u64::from(cq) * 0x1000,
            _ => RINGS + u64::from(qid) * 0x2000 + u64::from(cq) * 0x1000,
        }
    }

    fn submit(&mut self, qid: u16, mut command: Command) {
        self.cid += 1;
        command.cid = self.cid.into();
        let entries = if qid == 0 { 32 } else { ENTRIES };
        if let Some(tail) = self.tails.get_mut(usize::from(qid)) {
            let at = Self::ring(qid, false) + u64::from(*tail) * 64;
            // Like the host, write to the actual place of the ring: that of the last queue is in
            // the controller memory buffer.
            let _ = self.controller.dma().write(at, command.as_bytes());
            *tail = (*tail + 1) % entries;
            let value = tail.to_le_bytes();
            let offset = regs::doorbell_offset(qid, false, 0);
            self.controller.bar0_write(offset, &value);
        }
    }

    fn poll(&mut self, io: &Io) {
        for _ in 0..6 {
            io.poll(&mut |completion| self.controller.complete(completion));
            self.controller.poll(Instant::now());
            let mut done = Vec::new();
            self.controller.poll_volumes(&mut done);
            for completion in done {
                self.controller.complete(completion);
            }
        }
    }
}

fn namespaces(hold: bool) -> Option<Vec<NamespaceConfig>> {
    let volume = FaultVolume::new(Arc::new(MemVolume::new(256 << 10).ok()?));
    if hold {
        volume
            .faults()
            .add(Fault::always(OpKind::Write, Effect::Hold));
    }
    let namespace = |nsid, volume| NamespaceConfig {
        block_size: 512,
        nguid: [1; 16],
        ..NamespaceConfig::new(nsid, volume)
    };
    Some(vec![
        namespace(1, Arc::new(volume) as _),
        namespace(2, Arc::new(MemVolume::new(256 << 10).ok()?)),
    ])
}

fn config() -> ControllerConfig {
    ControllerConfig {
        io_queues: QUEUES,
        max_in_flight: 8,
        max_namespaces: 2,
        workers: 2,
        cmb_size: Some(BUFFER_SIZE),
        ..ControllerConfig::default()
    }
}

/// An honest process, with commands in flight of every kind.
fn honest(state: &StateMemory, page: DoorbellPage) -> Option<Guest> {
    let memory = Memory::anonymous(MEMORY).ok()?;
    memory.set_kept(NonZeroU32::new(RAM)?);
    let io = Io::new(IoOptions::default());
    let made = Controller::with_state(1, config(), namespaces(true)?, &io, page, state.clone());
    let mut guest = Guest {
        memory: memory.clone(),
        controller: made.ok()?,
        tails: [0; QUEUES as usize + 1],
        cid: 0,
    };
    let c = &mut guest.controller;
    c.dma_map(0, MEMORY as u64, Some((memory, 0)), Prot::RW)
        .ok()?;
    c.dma_map(1 << 40, 0x1000, None, Prot::RO).ok()?;
    for vector in 0..c.vectors() {
        c.set_msix(vector, Some(Arc::new(Deaf)));
    }
    // The command register: memory space, bus master.
    c.config_write(4, &[6, 0]);
    c.bar0_write(regs::CMBMSC, &(BUFFER | 3).to_le_bytes());
    let aqa = Aqa::new().with_asqs_z(31).with_acqs_z(31);
    c.bar0_write(regs::AQA, &aqa.into_bits().to_le_bytes());
    c.bar0_write(regs::ASQ, &ASQ.to_le_bytes());
    c.bar0_write(regs::ACQ, &ACQ.to_le_bytes());
    let cc = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
    c.bar0_write(regs::CC, &cc.into_bits().to_le_bytes());
    let mut command = Command::new(AdminOpcode::DOORBELL_BUFFER_CONFIG.0, 0, 0);
    command.set_prps(SHADOW, SHADOW + 0x1000);
    guest.submit(0, command);
    for qid in 1..=QUEUES {
        let size = u32::from(qid) | (ENTRIES - 1) << 16;
        let kinds = [
            (AdminOpcode::CREATE_IO_CQ, 3 | u32::from(qid) << 16, true),
            (AdminOpcode::CREATE_IO_SQ, 1 | u32::from(qid) << 16, false),
        ];
        for (opcode, cdw11, cq) in kinds {
            let mut command = Command::new(opcode.0, 0, 0);
            command.set_prps(Guest::ring(qid, cq), 0);
            command.cdw10 = size.into();
            command.cdw11 = cdw11.into();
            guest.submit(0, command);
        }
    }
    for _ in 0..2 {
        guest.submit(0, Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0));
    }
    guest.poll(&io);
    for qid in 1..=QUEUES {
        for n in 0..4_u32 {
            let opcode = [NvmOpcode::WRITE, NvmOpcode::READ, NvmOpcode::FLUSH];
            let opcode = opcode.get(n as usize % 3)?;
            let mut command = Command::new(opcode.0, 0, 1 + n % 2);
            command.set_slba(u64::from(n));
            command.set_prps(DATA + u64::from(n) * 4096, 0);
            guest.submit(qid, command);
        }
    }
    guest.poll(&io);
    let mut command = Command::new(AdminOpcode::DELETE_IO_SQ.0, 0, 0);
    command.cdw10 = 3.into();
    guest.submit(0, command);
    let mut command = Command::new(AdminOpcode::ABORT.0, 0, 0);
    command.cdw10 = (1 | 1 << 16).into();
    guest.submit(0, command);
    guest.poll(&io);
    Some(guest)
}

/// Overwrites words, or the control state, as selected by the input.
fn take_over(state: &StateMemory, input: &[u8]) {
    let Some((&kind, rest)) = input.split_first() else {
        return;
    };
    let saved = state.control().read().ok().flatten().unwrap_or_default();
    let mut control = state.control();
    match kind % 4 {
        // The whole control state.
        0 => drop(control.commit(rest)),
        // Bytes of it.
        1 => {
            let mut bytes = saved;
            for patch in rest.chunks_exact(3) {
                if let [low, high, value] = *patch {
                    let len = bytes.len().max(1);
                    if let Some(byte) =
                        bytes.get_mut(usize::from(u16::from_le_bytes([low, high])) % len)
                    {
                        *byte = value;
                    }
                }
            }
            let _ = control.commit(&bytes);
        }
        // Words of anything.
        _ => {
            for patch in rest.chunks_exact(12) {
                let (at, value) = patch.split_at(4);
                let at = at
                    .iter()
                    .fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
                // Sections lie in the first part of the file, mostly.
                let span = if kind % 4 == 2 { 1 << 20 } else { 8 << 20 };
                let _ = rustix::io::pwrite(state.fd(), value, (at % span) & !7);
            }
        }
    }
}

/// A state memory is read by the next process, which then serves the guest.
pub fn restart(input: &[u8]) {
    let _ = run(input);
}

fn run(input: &[u8]) -> Option<()> {
    let layout = Layout {
        windows: 16,
        descriptors: 16,
        ..controller::state_layout(&config())
    };
    let state = StateMemory::create(layout).ok()?;
    let page = DoorbellPage::new().ok()?;
    let file = page.as_fd().try_clone_to_owned().ok()?;
    let before = honest(&state, page)?;
    take_over(&state, input);
    let page = DoorbellPage::from_fd(file).ok()?;
    let state = StateMemory::open(state.fd().try_clone_to_owned().ok()?).ok()?;
    let io = Io::new(IoOptions::default());
    let buffer = before.controller.cmb_pages()?;
    let buffer = buffer.fd().try_clone_to_owned().ok()?;
    let mut kept = Keeper(before.memory.clone(), Some(buffer));
    let restored =
        Controller::restore(1, config(), namespaces(false)?, &io, page, state, &mut kept);
    let (controller, _) = restored.ok()?;
    let mut guest = Guest {
        controller,
        ..before
    };
    guest.poll(&io);
    for qid in 0..=QUEUES {
        guest.submit(qid, Command::new(NvmOpcode::FLUSH.0, 0, 2));
    }
    guest.poll(&io);
    let mut registers = [0; 0x40];
    guest.controller.bar0_read(0, &mut registers);
    guest.controller.config_read(0, &mut registers);
    guest.controller.arm();
    guest.controller.dma_unmap_all();
    guest.controller.dma_quiesced();
    guest.controller.reset();
    let limit = Instant::now() + Duration::from_secs(5);
    while guest.controller.is_resetting() {
        guest.poll(&io);
        assert!(Instant::now() < limit, "the reset does not end");
    }
    Some(())
}
