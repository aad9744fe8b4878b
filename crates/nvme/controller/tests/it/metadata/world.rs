//! A namespace with metadata on a volume with faults, and its host.

use crate::common::*;
use controller::{ControllerConfig, MetadataState, NamespaceConfig};
use dma::SharedPages;
use nvme::cmd::io::{CopyRange, CopyRangeLong};
use nvme::feature::{Fid, HostBehavior};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use protection::table::{self, Identity};
use protection::{Guard, Layout, Protection, StorageTag, Tags, Type};
use std::sync::Arc;
use volume::{Faults, Volume};
use zerocopy::IntoBytes;

pub const BLOCKS: u64 = 64;
/// Where the host's metadata is.
pub const METADATA: u64 = DATA + (4 << 20);
/// Where the descriptors of Copy are.
const DESCRIPTORS: u64 = DATA + (5 << 20);
pub const IDENTITY: Identity = Identity {
    namespace: [1; 16],
    blocks: BLOCKS,
};
/// PRINFO: checks of guard, application tag, reference tag; and PRACT.
pub const GUARD: u32 = 1 << 28;
pub const APPLICATION: u32 = 1 << 27;
pub const REFERENCE: u32 = 1 << 26;
pub const PRACT: u32 = 1 << 29;
pub const ALL: u32 = GUARD | APPLICATION | REFERENCE;
/// Storage Tag Check; of what Copy writes, and of what it reads.
pub const STC: u32 = 1 << 24;
pub const STCR: u32 = 1 << 25;

pub fn layout(block: u32, metadata: u16, protection: Option<(Type, Guard, bool)>) -> Layout {
    Layout {
        block,
        metadata,
        extended: false,
        protection: protection.map(|(kind, guard, first)| Protection {
            kind,
            guard,
            storage: StorageTag::least(guard),
            first,
        }),
    }
}

/// The same with another storage tag.
pub fn stored(layout: Layout, storage: StorageTag) -> Layout {
    let protection = layout.protection.map(|protection| Protection {
        storage,
        ..protection
    });
    Layout {
        protection,
        ..layout
    }
}

/// Blocks of 512 bytes, Type 1, a guard of 16 bits.
pub fn usual() -> Layout {
    layout(512, 8, Some((Type::One, Guard::Bits16, false)))
}

pub struct Protected {
    pub h: Host,
    /// Namespace of the commands that [`Protected::command`] makes; `layout` is that of its blocks.
    pub nsid: u32,
    pub layout: Layout,
    /// The storage tag of its commands, and of the tuples of [`Protected::fill`].
    pub storage: u64,
    /// The data below.
    pub below: Arc<dyn Volume>,
    pub data: Arc<Faults>,
    pub file: Arc<Faults>,
}

/// A source range of Copy: its blocks, and what their tags are expected to be.
#[derive(Clone, Copy, Debug)]
pub struct From {
    pub nsid: u32,
    pub slba: u64,
    pub blocks: u64,
    pub reference: u64,
    /// The storage tag, where it is in the field: [`Protected::placed`].
    pub storage: u128,
    pub application: u16,
    pub mask: u16,
}

/// A range of blocks with the tags of [`Protected::fill`].
pub fn from(slba: u64, blocks: u64) -> From {
    From {
        nsid: 1,
        slba,
        blocks,
        reference: slba,
        storage: 0,
        application: 0x1234,
        mask: 0xffff,
    }
}

/// The metadata as its file has it.
pub fn opened(layout: Layout, pages: &SharedPages, file: &Arc<dyn Volume>) -> Arc<MetadataState> {
    let mut bytes = vec![0; table::HEADER];
    pages.memory().read(0, &mut bytes).unwrap();
    let size = table::len(BLOCKS, layout.metadata).unwrap();
    let generation = table::decode(&bytes, size, &layout, IDENTITY).unwrap();
    let made = MetadataState::new(
        layout,
        BLOCKS,
        generation,
        pages.clone(),
        Some(file.clone()),
    );
    Arc::new(made.unwrap())
}

/// A host that uses extended formats of protection information.
pub fn all_formats() -> HostBehavior {
    HostBehavior {
        lbafee: 1,
        ..HostBehavior::default()
    }
}

/// Set Features, Host Behavior Support.
pub fn behaves(h: &mut Host, says: &HostBehavior) -> Status {
    h.write(PAGE, says.as_bytes());
    let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
    command.cdw10 = u32::from(Fid::HOST_BEHAVIOR_SUPPORT.0).into();
    command.set_prps(PAGE, 0);
    plain(h.admin(command).status())
}

impl Protected {
    pub fn new(layout: Layout) -> Self {
        Self::beside(layout, &[])
    }

    /// The same with other namespaces of these layouts and numbers of blocks, from number 2 on,
    /// with metadata in memory.
    pub fn beside(layout: Layout, others: &[(Layout, u64)]) -> Self {
        let below = mem(BLOCKS * u64::from(layout.block));
        let faulty_below = volume::FaultVolume::new(below.clone());
        let data = faulty_below.faults();
        let size = table::len(BLOCKS, layout.metadata).unwrap();
        let (file, faults) = faulty(size);
        let file: Arc<dyn Volume> = cached(file);
        let pages = SharedPages::new(size as usize).unwrap();
        let header = table::encode(&layout, IDENTITY);
        pages.memory().write(0, &header).unwrap();
        let volume: Arc<dyn Volume> = cached(Arc::new(faulty_below));
        let config = NamespaceConfig {
            metadata: Some(opened(layout, &pages, &file)),
            ..ns(1, volume, layout.block)
        };
        let buffer = ControllerConfig {
            cmb_size: Some(1 << 20),
            ..ControllerConfig::default()
        };
        let others = (2..).zip(others).map(|(nsid, (layout, blocks))| {
            let state = MetadataState::in_memory(*layout, *blocks);
            let size = blocks * u64::from(layout.block);
            NamespaceConfig {
                metadata: (layout.metadata > 0).then(|| Arc::new(state.unwrap())),
                ..ns(nsid, mem(size), layout.block)
            }
        });
        let all = [config].into_iter().chain(others).collect();
        let mut h = Host::with(buffer, all);
        let again = pages.clone();
        h.reload = Some(Box::new(move |config| {
            config.metadata = Some(opened(layout, &again, &file));
        }));
        h.enable();
        h.create_pair(1, 64);
        assert_eq!(behaves(&mut h, &all_formats()), Status::SUCCESS);
        Self {
            h,
            nsid: 1,
            layout,
            storage: 0,
            below,
            data,
            file: faults,
        }
    }

    /// Tags with the initial reference tag `reference`.
    pub fn command(&self, opcode: NvmOpcode, slba: u64, blocks: u32, prinfo: u32) -> Command {
        let mut command = self.h.rw(opcode, self.nsid, slba, blocks, DATA);
        let mut len = u64::from(blocks) * u64::from(self.layout.block);
        if self.layout.extended && !(prinfo & PRACT != 0 && self.layout.is_tuple_only()) {
            len += u64::from(blocks) * u64::from(self.layout.metadata);
        }
        self.h.prps(&mut command, DATA, len, PAGE);
        command.mptr = METADATA.into();
        command.cdw12 = (command.cdw12.get() | prinfo).into();
        self.put_tags(&mut command, slba);
        command
    }

    /// A storage tag where the field of both tags has it.
    pub fn placed(&self, storage: u64) -> u128 {
        let mask = self.layout.protection.map(|p| p.reference_mask());
        u128::from(storage) << mask.unwrap_or(u64::MAX).count_ones()
    }

    /// Storage tag and reference tag of a command or a tuple.
    fn block_tags(&self, slba: u64) -> u128 {
        let mask = self.layout.protection.map(|p| p.reference_mask());
        self.placed(self.storage) | u128::from(slba & mask.unwrap_or(u64::MAX))
    }

    fn put_tags(&self, command: &mut Command, slba: u64) {
        let tags = self.block_tags(slba);
        command.cdw2 = ((tags >> 64) as u32).into();
        command.cdw3 = ((tags >> 32) as u32).into();
        command.cdw14 = (tags as u32).into();
        command.cdw15 = 0xffff_1234.into();
    }

    pub fn status(&mut self, opcode: NvmOpcode, slba: u64, blocks: u32, prinfo: u32) -> Status {
        let command = self.command(opcode, slba, blocks, prinfo);
        plain(self.h.io(command))
    }

    /// A Copy with descriptors of that format, with checks of what is read and of what is written.
    pub fn copy(&self, format: u32, to: u64, prinfo: [u32; 2], ranges: &[From]) -> Command {
        let mut bytes = Vec::new();
        for range in ranges {
            let (snsid, slba) = (range.nsid.into(), range.slba.into());
            let nlb_z = (range.blocks as u16 - 1).into();
            let (elbat, elbatm) = (range.application.into(), range.mask.into());
            if format & 1 == 0 {
                let range = CopyRange {
                    snsid,
                    slba,
                    nlb_z,
                    elbat,
                    elbatm,
                    eilbrt: (range.storage as u32 | range.reference as u32).into(),
                    ..CopyRange::default()
                };
                bytes.extend(range.as_bytes());
                continue;
            }
            let mut elbt = [0; 10];
            let tags = range.storage | u128::from(range.reference);
            elbt.copy_from_slice(&tags.to_be_bytes()[6..]);
            let range = CopyRangeLong {
                snsid,
                slba,
                nlb_z,
                elbat,
                elbatm,
                elbt,
                ..CopyRangeLong::default()
            };
            bytes.extend(range.as_bytes());
        }
        self.h.write(DESCRIPTORS, &bytes);
        let mut command = Command::new(NvmOpcode::COPY.0, 0, self.nsid);
        self.h
            .prps(&mut command, DESCRIPTORS, bytes.len() as u64, PAGE);
        command.set_slba(to);
        let [read, written] = prinfo;
        let fields = format << 8 | read >> 14 | written;
        command.cdw12 = ((ranges.len() as u32 - 1) | fields).into();
        self.put_tags(&mut command, to);
        command
    }

    /// Status of such a command, and dword 0 of its completion.
    pub fn copied(&mut self, command: Command) -> (Status, u32) {
        self.h.submit(1, command);
        let mut done = None;
        self.h.until(|h| {
            done = h.reap(1);
            done.is_some()
        });
        let done = done.unwrap();
        (plain(done.status()), done.dw0.get())
    }

    /// Writes blocks with right tuples.
    pub fn written(&mut self, seed: u64, slba: u64, blocks: u32) -> (Vec<u8>, Vec<u8>) {
        let both = self.fill(seed, slba, blocks);
        let status = self.status(NvmOpcode::WRITE, slba, blocks, GUARD | APPLICATION);
        assert_eq!(status, Status::SUCCESS);
        both
    }

    /// Data and metadata of so many blocks in the host's memory, with right tuples.
    pub fn fill(&mut self, seed: u64, slba: u64, blocks: u32) -> (Vec<u8>, Vec<u8>) {
        let count = blocks as usize;
        let data = pattern(seed, count * self.layout.block as usize);
        let mut metadata = pattern(!seed, count * usize::from(self.layout.metadata));
        self.protect(&data, &mut metadata, slba);
        self.put(&data, &metadata);
        (data, metadata)
    }

    pub fn protect(&self, data: &[u8], metadata: &mut [u8], slba: u64) {
        let Some(protection) = self.layout.protection else {
            return;
        };
        let datas = data.chunks(self.layout.block as usize);
        let metadata = metadata.chunks_mut(self.layout.metadata.into());
        for ((data, metadata), at) in datas.zip(metadata).zip(0..) {
            let tags = Tags {
                application: 0x1234,
                mask: 0xffff,
                block: protection.tags_of(self.block_tags(slba), at),
            };
            protection.generate(data, metadata, tags);
        }
    }

    fn interleaved(&self) -> bool {
        self.layout.extended
    }

    pub fn put(&self, data: &[u8], metadata: &[u8]) {
        if !self.interleaved() {
            self.h.write(DATA, data);
            self.h.write(METADATA, metadata);
            return;
        }
        let datas = data.chunks(self.layout.block as usize);
        let all: Vec<u8> = datas
            .zip(metadata.chunks(self.layout.metadata.into()))
            .flat_map(|(data, metadata)| [data, metadata].concat())
            .collect();
        self.h.write(DATA, &all);
    }

    /// What a read left in the host's memory.
    pub fn got(&self, blocks: u32) -> (Vec<u8>, Vec<u8>) {
        let (block, size) = (
            self.layout.block as usize,
            usize::from(self.layout.metadata),
        );
        let count = blocks as usize;
        if !self.interleaved() {
            let data = self.h.read(DATA, count * block);
            return (data, self.h.read(METADATA, count * size));
        }
        let all = self.h.read(DATA, count * (block + size));
        let (mut data, mut metadata) = (Vec::new(), Vec::new());
        for both in all.chunks(block + size) {
            data.extend(&both[..block]);
            metadata.extend(&both[block..]);
        }
        (data, metadata)
    }

    /// Forgets what is in the host's memory.
    pub fn clear(&self) {
        self.h.write(DATA, &vec![0xee; 1 << 20]);
        self.h.write(METADATA, &vec![0xee; 1 << 16]);
    }

    pub fn read(&mut self, slba: u64, blocks: u32, prinfo: u32) -> (Vec<u8>, Vec<u8>) {
        self.clear();
        let status = self.status(NvmOpcode::READ, slba, blocks, prinfo);
        assert_eq!(status, Status::SUCCESS, "{slba}");
        self.got(blocks)
    }
}
