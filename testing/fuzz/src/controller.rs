//! A hostile guest and VMM against a controller: the input is a script of register accesses,
//! commands, doorbells, changes of memory, failing volumes and resets.

use crate::mediate::{BLOCKS, Below};
use crate::pool::Pool;
use controller::{
    BlockFormat, Controller, ControllerConfig, FormatSaved, FormatStore, Formats, IrqSink,
    KeptFormat, MetadataState, NamespaceConfig, NamespacePool, PlacementState, SavedFormat,
    ZonedState, pci,
};
use dma::{Memory, Prot};
use nvme::cmd::Psdt;
use nvme::cmd::io::{CopyRange, CopyRangeLong};
use nvme::cmd::namespace::NewNamespace;
use nvme::identify::ControllerList;
use nvme::regs::{self, Aqa, Cc};
use nvme::sgl::SglDescriptor;
use nvme::{AdminOpcode, Command, NvmOpcode};
use protection::{Guard, Layout, Protection, StorageTag, Type};
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::{
    Effect, Fault, FaultVolume, Faults, Io, IoErrorKind, IoOptions, MemVolume, OpKind, Volume,
};
use zerocopy::IntoBytes;
use zones::{Geometry, Zones, Zrwa};

const PAGE: u64 = 4096;
/// Windows of guest memory, of [`WINDOW`] bytes each, one behind the other from IOVA 0 on.
const WINDOWS: u64 = 4;
const WINDOW: u64 = 8 * PAGE;
/// All that can be mapped; the file goes on behind it, with bytes that nobody may change.
const MAPPABLE: u64 = WINDOWS * WINDOW;
const CANARY: u64 = 2 * WINDOW;
const CANARY_BYTE: u8 = 0xa5;
/// Bytes of the controller memory buffer: half a window.
const BUFFER: u64 = 4 * PAGE;
const QUEUES: u16 = 3;
/// Entries of the queues that the script creates properly.
const ENTRIES: u32 = 16;
/// Steps of one script, at most.
const STEPS: usize = 512;

struct Deaf;

impl IrqSink for Deaf {
    fn signal(&self) {}
}

/// Takes bytes from the input; zeroes when it is used up.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let (now, rest) = self.0.split_at(N.min(self.0.len()));
        for (to, from) in out.iter_mut().zip(now) {
            *to = *from;
        }
        self.0 = rest;
        out
    }

    fn u8(&mut self) -> u8 {
        let [byte] = self.bytes();
        byte
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    /// A number that is often small, often at an edge.
    fn number(&mut self) -> u32 {
        match self.u8() {
            n @ 0..=127 => u32::from(n),
            128..=143 => u32::MAX,
            144..=159 => 0xffff,
            160..=207 => u32::from(self.u8()) << 16 | u32::from(self.u8()),
            _ => self.u32(),
        }
    }

    /// An address that is often inside of guest memory, often that of a page.
    fn address(&mut self) -> u64 {
        let [kind, low, high] = self.bytes();
        let at = u64::from(low) << 4 | u64::from(high) << 12;
        match kind {
            0..=127 => (at & !4095) % MAPPABLE,
            128..=191 => (at % MAPPABLE) & !3,
            192..=223 => at % (MAPPABLE + CANARY),
            224..=239 => u64::MAX - at,
            _ => u64::from(self.u32()) << 32 | u64::from(self.u32()),
        }
    }
}

/// State of a window: mapped, or unmapped with its contents at the time of release.
enum Window {
    Mapped,
    /// A command may still write there.
    Leaving,
    Gone(Vec<u8>),
}

/// Format store that keeps the format of a namespace, with a volume of this many bytes, for the
/// lifetime of the world.
#[derive(Debug)]
struct Keeps(u64);

impl FormatStore for Keeps {
    fn save(&self, format: BlockFormat, done: FormatSaved) {
        let blocks = self.0 / u64::from(format.block);
        let made = format
            .layout()
            .map(|layout| MetadataState::in_memory(layout, blocks).map(Arc::new));
        done(match made.transpose() {
            Ok(metadata) => SavedFormat::New(KeptFormat { metadata }),
            Err(_) => SavedFormat::Before,
        });
    }
}

struct World {
    controller: Controller,
    /// The device below the first namespace, if that is on the direct path.
    below: Option<Below>,
    io: Io,
    faults: Arc<Faults>,
    memory: Memory,
    windows: Vec<Window>,
    /// Pool of namespaces that the guest creates.
    pool: Option<Arc<Pool>>,
    now: Instant,
    /// Tails of the submission queues, as this guest keeps them.
    tails: [u32; QUEUES as usize + 1],
    cid: u16,
}

fn ring(qid: u16, cq: bool) -> u64 {
    u64::from(qid) * 2 * PAGE + u64::from(cq) * PAGE
}

/// The namespace with zones: few small ones, of which two may have a random write area.
fn zoned(config: NamespaceConfig) -> Option<NamespaceConfig> {
    let zones = Zones::new(Geometry {
        zones: 8,
        size: 16,
        capacity: 12,
        max_open: Some(2),
        max_active: Some(3),
        zrwa: Some(Zrwa {
            size: 4,
            granularity: 2,
            resources: Some(2),
        }),
    });
    let zones = Some(Arc::new(ZonedState::new(zones.ok()?, None)));
    Some(NamespaceConfig { zones, ..config })
}

/// The namespace with placement handles: few, with small units.
fn placed(config: NamespaceConfig) -> Option<NamespaceConfig> {
    let state = PlacementState::in_memory(placement::Geometry {
        handles: 3,
        unit: 8,
        block: 512,
    });
    let placement = Some(Arc::new(state.ok()?));
    Some(NamespaceConfig {
        placement,
        ..config
    })
}

/// Adds metadata to a namespace, behind each block or in a separate buffer.
fn protected(config: NamespaceConfig, extended: bool) -> Option<NamespaceConfig> {
    let layout = Layout {
        block: config.block_size,
        metadata: if extended { 16 } else { 8 },
        extended,
        protection: Some(Protection {
            kind: if extended { Type::Two } else { Type::One },
            guard: Guard::Bits16,
            storage: StorageTag::of(if extended { 12 } else { 0 }),
            first: extended,
        }),
    };
    let blocks = config.volume.info().size / u64::from(config.block_size);
    let metadata = Some(Arc::new(MetadataState::in_memory(layout, blocks).ok()?));
    Some(NamespaceConfig { metadata, ..config })
}

/// All formats that there are.
fn formats(size: u64) -> Formats {
    let first = BlockFormat::plain(4096);
    Formats::with_metadata(first, first, None, Arc::new(Keeps(size)))
}

impl World {
    fn new(setup: u8, direct: bool) -> Option<World> {
        let faulty = FaultVolume::new(Arc::new(MemVolume::new(BLOCKS << 9).ok()?));
        let faults = faulty.faults();
        let plain: Arc<dyn Volume> = Arc::new(MemVolume::new(128 << 10).ok()?);
        let namespace = |nsid, volume, block_size| NamespaceConfig {
            block_size,
            read_only: nsid == 4,
            nguid: [1; 16],
            ..NamespaceConfig::new(nsid, volume)
        };
        let io = Io::new(IoOptions::default());
        let pool = (setup & 32 != 0 && !direct).then(Arc::<Pool>::default);
        let config = ControllerConfig {
            pool: pool.clone().map(|pool| pool as Arc<dyn NamespacePool>),
            io_queues: QUEUES,
            mdts: 4,
            mapped_doorbells: setup & 1 != 0,
            cmb_size: (setup & 128 != 0).then_some(BUFFER),
            max_in_flight: if setup & 2 != 0 { 3 } else { 64 },
            max_namespaces: 7,
            ..ControllerConfig::default()
        };
        let namespaces = vec![
            namespace(1, Arc::new(faulty) as Arc<dyn Volume>, 512),
            NamespaceConfig {
                formats: Some(formats(plain.info().size)),
                ..namespace(2, plain.clone(), 4096)
            },
            zoned(namespace(3, Arc::new(MemVolume::new(64 << 10).ok()?), 512))?,
            namespace(4, plain, 512),
            placed(namespace(5, Arc::new(MemVolume::new(64 << 10).ok()?), 512))?,
            protected(
                namespace(6, Arc::new(MemVolume::new(64 << 10).ok()?), 512),
                setup & 64 != 0,
            )?,
        ];
        let mut controller = Controller::new(7, config, namespaces, &io).ok()?;
        // Bus Master Enable and Memory Space Enable: the input may clear them.
        controller.config_write(4, &[6, 0]);
        let memory = Memory::anonymous((MAPPABLE + CANARY) as usize).ok()?;
        let canary = vec![CANARY_BYTE; CANARY as usize];
        memory.write(MAPPABLE as usize, &canary).ok()?;
        let mut below = None;
        if direct {
            let (device, path) = Below::new(&memory, setup >> 4)?;
            controller.set_passthrough(1, path);
            below = Some(device);
        }
        let mut world = World {
            controller,
            below,
            io,
            faults,
            memory,
            pool,
            windows: (0..WINDOWS)
                .map(|_| Window::Gone(vec![0; WINDOW as usize]))
                .collect(),
            now: Instant::now(),
            tails: [0; QUEUES as usize + 1],
            cid: 0,
        };
        for w in 0..WINDOWS as usize {
            world.map(w);
        }
        if setup & 4 != 0 {
            for vector in 0..=QUEUES {
                world.controller.set_msix(vector, Some(Arc::new(Deaf)));
            }
        } else {
            world.controller.set_intx(Some(Arc::new(Deaf)));
        }
        Some(world)
    }

    // ---- memory

    fn content(&self, w: usize) -> Vec<u8> {
        let mut bytes = vec![0; WINDOW as usize];
        let read = self.memory.read(w * WINDOW as usize, &mut bytes);
        assert!(read.is_ok());
        bytes
    }

    fn map(&mut self, w: usize) {
        if let Some(Window::Gone(before)) = self.windows.get(w) {
            assert!(
                *before == self.content(w),
                "window {w} was written while it was unmapped"
            );
        }
        let iova = w as u64 * WINDOW;
        let mapped =
            self.controller
                .dma_map(iova, WINDOW, Some((self.memory.clone(), iova)), Prot::RW);
        let was = matches!(self.windows.get(w), Some(Window::Mapped));
        assert_eq!(mapped.is_ok(), !was);
        if let Some(window) = self.windows.get_mut(w) {
            *window = Window::Mapped;
        }
    }

    fn unmap(&mut self, w: usize) {
        let unmapped = self.controller.dma_unmap(w as u64 * WINDOW, WINDOW);
        let was = matches!(self.windows.get(w), Some(Window::Mapped));
        assert_eq!(unmapped.is_ok(), was);
        if was && let Some(window) = self.windows.get_mut(w) {
            *window = Window::Leaving;
        }
        self.note_released();
    }

    /// Records the contents of windows that the controller has released.
    fn note_released(&mut self) {
        if !self.controller.dma_quiesced() {
            return;
        }
        for w in 0..self.windows.len() {
            if matches!(self.windows.get(w), Some(Window::Leaving)) {
                let content = self.content(w);
                if let Some(window) = self.windows.get_mut(w) {
                    *window = Window::Gone(content);
                }
            }
        }
    }

    /// The guest writes its own memory, where it is mapped, or the controller memory buffer, where
    /// that is.
    fn poke(&mut self, at: u64, bytes: &[u8]) {
        let end = at.saturating_add(bytes.len() as u64);
        if let Some((base, _)) = self.controller.dma().device_memory()
            && at >= base
            && end <= base + (BUFFER - 1)
        {
            return self.controller.cmb_write(at - base, bytes);
        }
        if end > MAPPABLE || at / WINDOW != (end - 1) / WINDOW {
            return;
        }
        if let Some(Window::Mapped) = self.windows.get((at / WINDOW) as usize) {
            let written = self.memory.write(at as usize, bytes);
            assert!(written.is_ok());
        }
    }

    // ---- the guest

    fn set32(&mut self, offset: u64, value: u32) {
        self.controller.bar0_write(offset, &value.to_le_bytes());
    }

    /// Moves the controller memory buffer, or disables it.
    fn place_buffer(&mut self, how: u8) {
        let base = match how % 6 {
            0 => 0,
            1 => WINDOW - 2 * PAGE,
            2 => ring(1, false),
            3 => MAPPABLE,
            4 => u64::MAX - BUFFER + 1,
            _ => !(PAGE - 1),
        };
        let bits = u64::from(how % 4 != 3) << 1 | 1;
        self.controller
            .bar0_write(regs::CMBMSC, &(base | bits).to_le_bytes());
    }

    fn enable(&mut self) {
        let size = (ENTRIES - 1) as u16;
        self.set32(regs::CC, 0);
        self.set32(
            regs::AQA,
            Aqa::new().with_asqs_z(size).with_acqs_z(size).into_bits(),
        );
        self.controller
            .bar0_write(regs::ASQ, &ring(0, false).to_le_bytes());
        self.controller
            .bar0_write(regs::ACQ, &ring(0, true).to_le_bytes());
        let cc = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
        self.set32(regs::CC, cc.into_bits());
        self.tails = [0; QUEUES as usize + 1];
    }

    fn submit(&mut self, qid: u16, mut command: Command) {
        self.cid = self.cid.wrapping_add(1);
        command.cid = self.cid.into();
        let Some(tail) = self.tails.get_mut(usize::from(qid)) else {
            return;
        };
        let at = ring(qid, false) + u64::from(*tail) * 64;
        *tail = (*tail + 1) % ENTRIES;
        let value = *tail;
        self.poke(at, command.as_bytes());
        self.set32(regs::doorbell_offset(qid, false, 0), value);
    }

    fn create_pair(&mut self, qid: u16) {
        for (opcode, cq, cdw11) in [
            (AdminOpcode::CREATE_IO_CQ, true, 3 | u32::from(qid) << 16),
            (AdminOpcode::CREATE_IO_SQ, false, 1 | u32::from(qid) << 16),
        ] {
            let mut command = Command::new(opcode.0, 0, 0);
            command.cdw10 = ((ENTRIES - 1) << 16 | u32::from(qid)).into();
            command.cdw11 = cdw11.into();
            command.set_prps(ring(qid, cq), 0);
            self.submit(0, command);
        }
        if let Some(tail) = self.tails.get_mut(usize::from(qid)) {
            *tail = 0;
        }
        self.round();
    }

    fn command(&mut self, input: &mut Input<'_>, admin: bool) {
        const ADMIN: [u8; 17] = [
            0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 0x18, 0x7c, 0x14, 0xc0, 0x0d, 0x15, 0x86,
        ];
        const DIRECTIVES: [u8; 2] = [0x19, 0x1a];
        const IO: [NvmOpcode; 9] = [
            NvmOpcode::READ,
            NvmOpcode::WRITE,
            NvmOpcode::FLUSH,
            NvmOpcode::WRITE_ZEROES,
            NvmOpcode::DATASET_MANAGEMENT,
            NvmOpcode::COMPARE,
            NvmOpcode::VERIFY,
            NvmOpcode::COPY,
            NvmOpcode::WRITE_UNCORRECTABLE,
        ];
        const ZONES: [NvmOpcode; 3] = [
            NvmOpcode::ZONE_APPEND,
            NvmOpcode::ZONE_MANAGEMENT_SEND,
            NvmOpcode::ZONE_MANAGEMENT_RECEIVE,
        ];
        const HANDLES: [NvmOpcode; 2] = [
            NvmOpcode::IO_MANAGEMENT_SEND,
            NvmOpcode::IO_MANAGEMENT_RECEIVE,
        ];
        let [opcode, flags, nsid] = input.bytes();
        let chosen = if admin {
            match opcode {
                0xfc.. => DIRECTIVES.get(usize::from(opcode) % 2).copied(),
                _ => ADMIN.get(usize::from(opcode) % ADMIN.len()).copied(),
            }
        } else {
            match opcode {
                0xf0.. => ZONES.get(usize::from(opcode) % ZONES.len()).map(|o| o.0),
                0xec.. => HANDLES.get(usize::from(opcode) % 2).map(|o| o.0),
                _ => IO.get(usize::from(opcode) % IO.len()).map(|o| o.0),
            }
        };
        let sensible = nsid & 0x80 != 0;
        let nsid = match nsid {
            255 => u32::MAX,
            n => u32::from(n % 8),
        };
        let mut command = Command::new(chosen.unwrap_or(opcode), 0, nsid);
        command.set_prps(input.address(), input.address());
        match flags {
            0..=199 => {}
            // Use one data block or segment descriptor, with the script's length.
            200..=239 => {
                let identifier = if flags & 1 == 0 { 0x00 } else { 0x30 };
                let psdt = if flags & 2 == 0 { 0x40 } else { 0x80 };
                command.flags = nvme::cmd::Flags::from_bits(psdt);
                let mut dptr = command.dptr.0;
                let (_, rest) = dptr.split_at_mut(8);
                rest.copy_from_slice(&(u64::from(input.number()) | identifier << 56).to_le_bytes());
                command.dptr.0 = dptr;
            }
            other => command.flags = nvme::cmd::Flags::from_bits(other),
        }
        command.cdw10 = input.number().into();
        command.cdw11 = input.number().into();
        command.cdw12 = input.number().into();
        if !admin && nsid == 5 {
            // Directive Specific.
            command.cdw13 = command.cdw11;
        }
        if !admin && nsid == 6 {
            // Where the metadata is, and the tags: the block's number, often enough.
            command.mptr = (input.address() & !3).into();
            command.cdw14 = command.cdw11;
            command.cdw15 = command.cdw13;
            if sensible {
                // Few blocks that there are; every other command has an SGL of metadata.
                command.cdw10 = (command.cdw10.get() % BLOCKS as u32).into();
                command.cdw11 = 0.into();
                command.cdw12 = (command.cdw12.get() & !0xfff8).into();
                command.cdw14 = command.cdw10;
                if flags & 1 != 0 {
                    let data = SglDescriptor::data_block(command.prp1(), PAGE as u32);
                    command.set_sgl(data);
                    command.flags.set_psdt(Psdt::SGL_MPTR_SGL);
                    command.mptr = (command.mptr.get() & !7).into();
                }
            }
            if command.flags.psdt() == Psdt::SGL_MPTR_SGL {
                self.describe_metadata(&command, input);
            }
        }
        if !admin && sensible && command.nvm_opcode() == NvmOpcode::COPY {
            self.copy_sensibly(&mut command, flags);
        }
        if admin {
            command.cdw13 = input.number().into();
            command.cdw14 = input.number().into();
            if sensible {
                self.manage_sensibly(&mut command, flags);
            }
        } else if self.below.is_some() && sensible {
            // Choose a range within, or near the end of, the first namespace.
            command.nsid = 1.into();
            command.cdw12 = (command.cdw12.get() & 0x1f).into();
            if command.nvm_opcode() != NvmOpcode::DATASET_MANAGEMENT {
                command.cdw10 = (command.cdw10.get() % (BLOCKS as u32 + 8)).into();
                command.cdw11 = 0.into();
            }
        }
        let qid = if admin {
            0
        } else {
            1 + u16::from(flags) % QUEUES
        };
        self.submit(qid, command);
    }

    /// Data, and a selection, that a controller may do something about.
    fn manage_sensibly(&mut self, command: &mut Command, how: u8) {
        let data: Vec<u8> = match command.admin_opcode() {
            AdminOpcode::NAMESPACE_MANAGEMENT if how & 1 == 0 => {
                command.nsid = 0.into();
                (command.cdw10, command.cdw11) = (0.into(), 0.into());
                let blocks = u64::from(how) + 1;
                let new = NewNamespace {
                    nsze: blocks.into(),
                    ncap: blocks.into(),
                    ..NewNamespace::default()
                };
                new.as_bytes().to_vec()
            }
            AdminOpcode::NAMESPACE_ATTACHMENT => {
                command.cdw10 = u32::from(how & 1).into();
                ControllerList::from_iter([1]).as_bytes().to_vec()
            }
            _ => return,
        };
        command.flags = nvme::cmd::Flags::new();
        let at = command.prp1() & (MAPPABLE - 1) & !(PAGE - 1);
        command.set_prps(at, 0);
        self.poke(at, &data);
    }

    /// A descriptor where the metadata pointer points, and behind it some to which it may lead.
    fn describe_metadata(&mut self, command: &Command, input: &mut Input<'_>) {
        let at = command.mptr.get();
        let [count] = input.bytes();
        let mut all = Vec::new();
        for _ in 0..=count % 4 {
            let [kind, len] = input.bytes();
            let kind = match kind {
                0..=127 => 0x00,
                128..=175 => 0x30,
                176..=223 => 0x20,
                other => other,
            };
            let address = match kind {
                0x20 | 0x30 if len & 0x80 == 0 => at.wrapping_add(16),
                _ => input.address(),
            };
            // Tuples of 8 bytes, or descriptors.
            let unit = if kind == 0x00 { 8 } else { 16 };
            all.extend(address.to_le_bytes());
            all.extend((u32::from(len & 0x3f) * unit).to_le_bytes());
            all.extend([0, 0, 0, kind]);
        }
        self.poke(at, &all);
    }

    /// Descriptors of ranges that a controller may copy, with tags that often fit.
    fn copy_sensibly(&mut self, command: &mut Command, how: u8) {
        let format = how >> 4 & 3;
        let slba = u64::from(command.cdw11.get()) % BLOCKS;
        let nlb_z = u16::from(how & 7).into();
        let snsid = u32::from(how >> 3 & 7).into();
        let data = match format & 1 {
            0 => CopyRange {
                snsid,
                slba: slba.into(),
                nlb_z,
                eilbrt: (slba as u32).into(),
                ..CopyRange::default()
            }
            .as_bytes()
            .to_vec(),
            _ => CopyRangeLong {
                snsid,
                slba: slba.into(),
                nlb_z,
                ..CopyRangeLong::default()
            }
            .as_bytes()
            .to_vec(),
        };
        // PRINFO of both sides and FUA stay as they are.
        let others = command.cdw12.get() & !0xfff;
        command.cdw12 = (others | u32::from(format) << 8).into();
        command.cdw10 = (command.cdw10.get() % BLOCKS as u32).into();
        command.cdw11 = 0.into();
        command.cdw14 = command.cdw10;
        command.flags = nvme::cmd::Flags::new();
        let at = command.prp1() & (MAPPABLE - 1) & !(PAGE - 1);
        command.set_prps(at, 0);
        self.poke(at, &data);
    }

    // ---- time

    fn round(&mut self) {
        if let Some(pool) = &self.pool {
            pool.check();
            self.controller.tidy(&self.io);
            pool.answer();
        }
        self.controller.poll(self.now);
        self.io.flush();
        let mut done = Vec::new();
        self.io.poll(&mut |completion| done.push(completion));
        self.controller.poll_volumes(&mut done);
        for completion in done {
            assert_eq!(controller::tag_owner(completion.tag), 7);
            self.controller.complete(completion);
        }
        if let Some(below) = &mut self.below {
            let windows = &self.windows;
            below.check(|at, len| {
                let last = at + len.max(1) - 1;
                (at / WINDOW..=last / WINDOW).all(|w| {
                    let window = windows.get(w as usize);
                    window.is_some_and(|window| !matches!(window, Window::Gone(_)))
                })
            });
        }
        let stats = self.controller.stats();
        for (qid, queue) in stats.queues.iter().enumerate() {
            let (fetched, posted) = (queue.commands.get(), queue.completions.get());
            assert!(
                posted <= fetched,
                "queue {qid}: {posted} completions for {fetched} commands"
            );
        }
        self.note_released();
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let [what, how] = input.bytes();
        match what % 20 {
            0 => {
                let offset = match how % 4 {
                    0 => u64::from(input.u8() % 0x70) & !3,
                    1 => pci::DOORBELL_OFFSET + u64::from(input.u8() % 12) * 4,
                    2 => u64::from(input.number() & 0x7fff),
                    _ => u64::from(input.u32()) << 16 | 0xffff_ffff_0000_0000,
                };
                let data: [u8; 8] = input.bytes();
                let len = [4, 4, 8, usize::from(how >> 4)][usize::from(how >> 2 & 3)];
                self.controller
                    .bar0_write(offset, data.get(..len).unwrap_or(&data));
            }
            1 => {
                let offset = u64::from(input.number());
                let mut data = [0; 64];
                let (data, _) = data.split_at_mut(usize::from(how % 64));
                self.controller.bar0_read(offset, data);
                self.controller.config_read(offset, data);
            }
            2 => {
                let offset = if how & 1 == 0 {
                    u64::from(input.u8())
                } else {
                    u64::from(input.number())
                };
                let data: [u8; 4] = input.bytes();
                self.controller.config_write(
                    offset,
                    data.get(..usize::from(how >> 4 & 3) + 1).unwrap_or(&data),
                );
            }
            3..=5 => self.command(input, true),
            6..=9 => self.command(input, false),
            10 => {
                let (at, bytes): (u64, [u8; 16]) = (input.address(), input.bytes());
                self.poke(at, &bytes);
            }
            // A PRP list, or a list of DSM ranges as good as any.
            11 => {
                let at = input.address();
                for i in 0..u64::from(how % 32) {
                    let entry = input.address();
                    self.poke(at.saturating_add(8 * i), &entry.to_le_bytes());
                }
            }
            12 => {
                let w = usize::from(how) % WINDOWS as usize;
                match self.windows.get(w) {
                    Some(Window::Mapped) => self.unmap(w),
                    _ => self.map(w),
                }
            }
            13 => {
                let effect = match how % 4 {
                    0 => Effect::Hold,
                    1 => Effect::Fail(IoErrorKind::NoSpace.into()),
                    2 => Effect::Fail(IoErrorKind::MediaRead.into()),
                    _ => return self.faults.release(),
                };
                let times = u64::from(how >> 4);
                let fault = Fault::always(OpKind::Any, effect);
                self.faults.add(Fault { times, ..fault });
            }
            14 => match how % 16 {
                0 => self.controller.reset(),
                1 => self.set32(regs::NSSR, regs::NSSR_MAGIC),
                2 => {
                    self.controller.disconnect();
                    for window in &mut self.windows {
                        if matches!(window, Window::Mapped) {
                            *window = Window::Leaving;
                        }
                    }
                    self.note_released();
                }
                3 => self.controller.flush(),
                4 => self.set32(regs::CC, u32::from(input.u8()) << 10 | 0x46_0000),
                5..=10 => self.enable(),
                15 => self.place_buffer(how >> 4),
                _ => self.create_pair(1 + u16::from(how >> 4) % QUEUES),
            },
            15 => {
                self.controller.arm();
                self.controller.recheck();
                let _ = self.controller.needs_polling();
                if let Some(deadline) = self.controller.deadline() {
                    self.now = self.now.max(deadline);
                }
            }
            16 => match how % 4 {
                0 => self.controller.mask_intx(),
                1 => self.controller.unmask_intx(),
                2 => self.controller.set_msix(u16::from(how >> 2), None),
                _ => self
                    .controller
                    .set_msix(u16::from(how >> 2), Some(Arc::new(Deaf))),
            },
            17 => {
                let cell = usize::from(how % 10) + pci::DOORBELL_OFFSET as usize / 4;
                let value = input.number();
                if let Some(cell) = self.controller.bar0_pages().cell(cell) {
                    cell.store(value, std::sync::atomic::Ordering::Release);
                }
            }
            // Heads go where the entries end, so that queues go on.
            18 => {
                for qid in 0..=QUEUES {
                    self.set32(
                        regs::doorbell_offset(qid, true, 0),
                        u32::from(how) % ENTRIES,
                    );
                }
            }
            _ => {
                self.now += Duration::from_micros(u64::from(how) * 100);
                for _ in 0..how % 8 {
                    self.round();
                }
            }
        }
    }

    /// Everybody leaves: nothing may be left behind.
    fn end(mut self) -> (u64, u64) {
        self.controller.disconnect();
        self.faults.clear();
        self.faults.release();
        for window in &mut self.windows {
            if matches!(window, Window::Mapped) {
                *window = Window::Leaving;
            }
        }
        for _ in 0..100 {
            self.round();
        }
        assert!(self.controller.is_drained() && !self.controller.is_resetting());
        assert!(self.controller.dma_quiesced());
        for w in 0..WINDOWS as usize {
            let Some(Window::Gone(before)) = self.windows.get(w) else {
                panic!("window {w} is still held");
            };
            assert!(
                *before == self.content(w),
                "window {w} was written after it was unmapped"
            );
        }
        let mut canary = vec![0; CANARY as usize];
        let read = self.memory.read(MAPPABLE as usize, &mut canary);
        assert!(read.is_ok());
        assert!(
            canary.iter().all(|&b| b == CANARY_BYTE),
            "memory outside of every window was written"
        );
        let stats = self.controller.stats();
        let io = stats.queues.iter().skip(1);
        let below = self.below.as_ref().map_or(0, Below::commands);
        (io.map(|q| q.completions.get()).sum(), below)
    }
}

/// Interprets the input as a script.
///
/// # Panics
/// When the controller panics, posts more completions than it fetched commands, writes where
/// nothing is mapped, or keeps memory or commands after everybody has left.
pub fn controller(data: &[u8]) {
    run(data, false);
}

/// Runs a script, with the first namespace on the direct path or not. Returns the numbers of
/// completed I/O commands and of commands that reached a device.
pub(crate) fn run(data: &[u8], direct: bool) -> (u64, u64) {
    let mut input = Input(data);
    let setup = input.u8();
    let Some(mut world) = World::new(setup, direct) else {
        return (0, 0);
    };
    if setup & 8 != 0 {
        world.enable();
        for qid in 1..=QUEUES {
            world.create_pair(qid);
        }
        if setup & 16 != 0 {
            let mut command = Command::new(AdminOpcode::DOORBELL_BUFFER_CONFIG.0, 0, 0);
            command.set_prps(ring(QUEUES + 1, false), ring(QUEUES + 1, true));
            world.submit(0, command);
            world.round();
        }
    }
    for _ in 0..STEPS {
        if input.0.is_empty() {
            break;
        }
        world.step(&mut input);
    }
    world.end()
}

/// A script by chance.
#[cfg(test)]
pub(crate) fn script(chance: &mut crate::chance::Chance) -> Vec<u8> {
    // Mostly enabled: little happens otherwise.
    chance.script(2000, |setup| *setup |= 8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::Chance;

    #[test]
    fn random_scripts_complete_commands() {
        controller(&[]);
        let mut chance = Chance::new();
        let mut completed = 0;
        for _ in 0..1500 {
            completed += run(&script(&mut chance), false).0;
        }
        assert!(
            completed > 1500,
            "only {completed} I/O commands: the scripts try nothing"
        );
    }
}
