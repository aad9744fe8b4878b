//! A namespace with metadata on a volume with faults, and its host.

use crate::common::*;
use controller::{ControllerConfig, MetadataState, NamespaceConfig};
use dma::SharedPages;
use nvme::{Command, NvmOpcode, Status};
use protection::table::{self, Identity};
use protection::{Guard, Layout, Protection, Tags, Type};
use std::sync::Arc;
use volume::{Faults, Volume};

pub const BLOCKS: u64 = 64;
/// Where the host's metadata is.
pub const METADATA: u64 = DATA + (4 << 20);
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

pub fn layout(block: u32, metadata: u16, protection: Option<(Type, Guard, bool)>) -> Layout {
    Layout {
        block,
        metadata,
        extended: false,
        protection: protection.map(|(kind, guard, first)| Protection { kind, guard, first }),
    }
}

/// Blocks of 512 bytes, Type 1, a guard of 16 bits.
pub fn usual() -> Layout {
    layout(512, 8, Some((Type::One, Guard::Bits16, false)))
}

pub struct Protected {
    pub h: Host,
    pub layout: Layout,
    /// The data below.
    pub below: Arc<dyn Volume>,
    pub data: Arc<Faults>,
    pub file: Arc<Faults>,
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

impl Protected {
    pub fn new(layout: Layout) -> Self {
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
        let mut h = Host::with(buffer, vec![config]);
        let again = pages.clone();
        h.reload = Some(Box::new(move |config| {
            config.metadata = Some(opened(layout, &again, &file));
        }));
        h.enable();
        h.create_pair(1, 64);
        Self {
            h,
            layout,
            below,
            data,
            file: faults,
        }
    }

    /// Tags whose initial reference tag is `reference`.
    pub fn command(&self, opcode: NvmOpcode, slba: u64, blocks: u32, prinfo: u32) -> Command {
        let mut command = self.h.rw(opcode, 1, slba, blocks, DATA);
        let mut len = u64::from(blocks) * u64::from(self.layout.block);
        if self.layout.extended && !(prinfo & PRACT != 0 && self.layout.is_tuple_only()) {
            len += u64::from(blocks) * u64::from(self.layout.metadata);
        }
        self.h.prps(&mut command, DATA, len, PAGE);
        command.mptr = METADATA.into();
        command.cdw12 = (command.cdw12.get() | prinfo).into();
        command.cdw14 = (slba as u32).into();
        command.cdw15 = 0xffff_1234.into();
        command
    }

    pub fn status(&mut self, opcode: NvmOpcode, slba: u64, blocks: u32, prinfo: u32) -> Status {
        let command = self.command(opcode, slba, blocks, prinfo);
        plain(self.h.io(command))
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
                block: protection.tags_of(slba.into(), at),
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
