//! A model of a device that records every address and block named by a command, and executes the
//! commands on an array. The driver steps it, so that each run is the same.

use dma::{Memory, Prot};
use driver::transport::{DmaLimits, DoorbellCell, Mapping, Source, Transport, TransportError};
use nvme::cmd::Psdt;
use nvme::cmd::admin::Cns;
use nvme::cmd::io::{DsmCdw10, RwCdw12};
use nvme::identify::{IdentifyController, IdentifyNamespace};
use nvme::regs::{self, Cap, CapCss, Cc, Csts, Shn, Shst};
use nvme::sgl::{SglDescriptor, SglType};
use nvme::{AdminOpcode, Command, Completion, NvmOpcode, Status};
use std::collections::{BTreeMap, HashMap};
use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Configuration of the modelled device.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub blocks: u64,
    pub shift: u8,
    /// MDTS, as 4 KiB shifted left by this value; 0: no limit.
    pub mdts: u8,
    pub sgl: bool,
    pub io_queues: u16,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            blocks: 4096,
            shift: 9,
            mdts: 8,
            sgl: false,
            io_queues: 8,
        }
    }
}

/// An I/O command, as the device received it.
#[derive(Clone, Debug)]
pub struct DeviceCommand {
    pub qid: u16,
    pub command: Command,
    /// Blocks named by the command: first block and number. Dataset Management names several
    /// ranges.
    pub blocks: Vec<(u64, u64)>,
    /// Data buffers: address and length.
    pub data: Vec<(u64, u64)>,
    /// PRP list entries and SGL segments that were read: address, length.
    pub lists: Vec<(u64, u64)>,
}

struct Sq {
    iova: u64,
    entries: u32,
    head: u32,
    tail: u32,
    cqid: u16,
}

struct Cq {
    iova: u64,
    entries: u32,
    tail: u32,
    phase: bool,
}

/// Fate of a command that is not executed normally.
#[derive(Clone, Copy, Debug)]
pub enum Fate {
    Execute,
    /// The command is never completed until a reset.
    Swallow,
    /// The command ends with this status and dword 0.
    End(Status, u32),
    /// The command is executed, and its completion is posted twice.
    Twice,
}

type Hook = Box<dyn FnMut(&Command) -> Fate + Send>;

struct Inner {
    config: Config,
    regs: HashMap<u64, u32>,
    maps: BTreeMap<u64, (u64, Memory, u64, Prot)>,
    sqs: HashMap<u16, Sq>,
    cqs: HashMap<u16, Cq>,
    disk: Vec<u8>,
    log: Vec<DeviceCommand>,
    /// Accessed addresses that no mapping allows.
    faults: Vec<u64>,
    hook: Option<Hook>,
    frozen: bool,
    gone: bool,
}

/// A modelled device.
pub struct Model(Mutex<Inner>);

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Model")
    }
}

impl Inner {
    fn find(&mut self, iova: u64, len: u64, write: bool) -> Option<(Memory, usize)> {
        let found = self
            .maps
            .range(..=iova)
            .next_back()
            .and_then(|(start, map)| {
                let (size, memory, offset, prot) = map;
                let at = iova - start;
                let inside = at.checked_add(len).is_some_and(|end| end <= *size);
                let allowed = if write { prot.write } else { prot.read };
                (inside && allowed).then(|| (memory.clone(), (offset + at) as usize))
            });
        if found.is_none() {
            self.faults.push(iova);
        }
        found
    }

    fn read(&mut self, iova: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        if let Some((memory, at)) = self.find(iova, len, false) {
            memory.read(at, &mut bytes).unwrap();
        }
        bytes
    }

    fn write(&mut self, iova: u64, bytes: &[u8]) {
        if let Some((memory, at)) = self.find(iova, bytes.len() as u64, true) {
            memory.write(at, bytes).unwrap();
        }
    }

    fn post(&mut self, cqid: u16, sqid: u16, cid: u16, status: Status, dw0: u32) {
        let head = self.sqs.get(&sqid).map_or(0, |sq| sq.head);
        let Some(cq) = self.cqs.get_mut(&cqid) else {
            return;
        };
        let (at, phase) = (cq.iova + u64::from(cq.tail) * 16, cq.phase);
        cq.tail += 1;
        if cq.tail == cq.entries {
            (cq.tail, cq.phase) = (0, !cq.phase);
        }
        let entry = Completion {
            dw0: dw0.into(),
            dw1: 0.into(),
            // Values that a guest must never see.
            sqhd: (head as u16).into(),
            sqid: sqid.into(),
            cid: cid.into(),
            status_phase: Completion::pack_status(status, phase),
        };
        self.write(at, entry.as_bytes());
    }

    fn step(&mut self) {
        if self.gone || !self.enabled() {
            return;
        }
        let mut qids: Vec<u16> = self.sqs.keys().copied().collect();
        qids.sort_unstable();
        for qid in qids {
            while let Some(sq) = self.sqs.get_mut(&qid)
                && sq.head != sq.tail
                && (qid == 0 || !self.frozen)
            {
                let (at, cqid) = (sq.iova + u64::from(sq.head) * 64, sq.cqid);
                sq.head = (sq.head + 1) % sq.entries;
                let raw = self.read(at, 64);
                let command = Command::read_from_bytes(&raw).unwrap();
                if qid == 0 {
                    if let Some((status, dw0)) = self.admin(&command) {
                        self.post(0, 0, command.cid.get(), status, dw0);
                    }
                } else {
                    self.io(qid, cqid, &command);
                }
            }
        }
    }

    fn enabled(&self) -> bool {
        Cc::from_bits(self.reg(regs::CC)).en()
    }

    fn reg(&self, offset: u64) -> u32 {
        self.regs.get(&offset).copied().unwrap_or(0)
    }

    fn admin(&mut self, command: &Command) -> Option<(Status, u32)> {
        let (cdw10, cdw11) = (command.cdw10.get(), command.cdw11.get());
        let qid = cdw10 as u16;
        let entries = (cdw10 >> 16) + 1;
        match command.admin_opcode() {
            AdminOpcode::ASYNC_EVENT_REQUEST => return None,
            AdminOpcode::IDENTIFY => {
                let page = self.identify(Cns(cdw10 as u8), command.nsid.get());
                match page {
                    Some(page) => self.write(command.prp1(), &page),
                    None => return Some((Status::INVALID_FIELD, 0)),
                }
            }
            AdminOpcode::SET_FEATURES if cdw10 as u8 == 7 => {
                let most = u32::from(self.config.io_queues - 1);
                return Some((Status::SUCCESS, most << 16 | most));
            }
            AdminOpcode::SET_FEATURES => {}
            AdminOpcode::CREATE_IO_CQ => {
                let iova = command.prp1();
                let cq = Cq {
                    iova,
                    entries,
                    tail: 0,
                    phase: true,
                };
                self.cqs.insert(qid, cq);
            }
            AdminOpcode::CREATE_IO_SQ => {
                let sq = Sq {
                    iova: command.prp1(),
                    entries,
                    head: 0,
                    tail: 0,
                    cqid: (cdw11 >> 16) as u16,
                };
                self.sqs.insert(qid, sq);
            }
            AdminOpcode::DELETE_IO_SQ => drop(self.sqs.remove(&qid)),
            AdminOpcode::DELETE_IO_CQ => drop(self.cqs.remove(&qid)),
            // Not aborted.
            AdminOpcode::ABORT => return Some((Status::SUCCESS, 1)),
            _ => return Some((Status::INVALID_OPCODE, 0)),
        }
        Some((Status::SUCCESS, 0))
    }

    fn identify(&self, cns: Cns, nsid: u32) -> Option<Vec<u8>> {
        match cns {
            Cns::CONTROLLER => {
                let mut id = IdentifyController::new_zeroed();
                id.mdts = self.config.mdts;
                id.nn = 1.into();
                id.oncs = id
                    .oncs
                    .with_nvmcmps(true)
                    .with_nvmdsmsv(true)
                    .with_nvmwzsv(true)
                    .with_nvmvfys(true);
                id.sgls = id.sgls.with_sgls(u8::from(self.config.sgl));
                Some(id.as_bytes().to_vec())
            }
            Cns::ACTIVE_NSID_LIST => {
                let mut page = vec![0; 4096];
                if nsid == 0 {
                    page[0] = 1;
                }
                Some(page)
            }
            Cns::NAMESPACE if nsid == 1 => {
                let mut id = IdentifyNamespace::new_zeroed();
                id.nsze = self.config.blocks.into();
                id.ncap = id.nsze;
                id.nuse = id.nsze;
                id.lbaf[0].lbads = self.config.shift;
                Some(id.as_bytes().to_vec())
            }
            _ => None,
        }
    }

    fn io(&mut self, qid: u16, cqid: u16, command: &Command) {
        let mut seen = DeviceCommand {
            qid,
            command: *command,
            blocks: Vec::new(),
            data: Vec::new(),
            lists: Vec::new(),
        };
        let fate = self
            .hook
            .as_mut()
            .map_or(Fate::Execute, |hook| hook(command));
        let (mut status, mut dw0) = (Status::SUCCESS, 0);
        match fate {
            Fate::Swallow => {}
            Fate::End(with, result) => (status, dw0) = (with, result),
            Fate::Execute | Fate::Twice => status = self.execute(command, &mut seen),
        }
        self.log.push(seen);
        if !matches!(fate, Fate::Swallow) {
            self.post(cqid, qid, command.cid.get(), status, dw0);
        }
        if matches!(fate, Fate::Twice) {
            self.post(cqid, qid, command.cid.get(), status, dw0);
        }
    }

    fn execute(&mut self, command: &Command, seen: &mut DeviceCommand) -> Status {
        let blocks = u64::from(RwCdw12::from_bits(command.cdw12.get()).nlb());
        let shift = self.config.shift;
        let opcode = command.nvm_opcode();
        match opcode {
            NvmOpcode::FLUSH => return Status::SUCCESS,
            NvmOpcode::DATASET_MANAGEMENT => {
                let count = u64::from(DsmCdw10::from_bits(command.cdw10.get()).nr());
                let len = count * 16;
                self.data(command, len, seen);
                // To the standard these are data; they have to be the queue's own all the same.
                seen.lists.append(&mut seen.data);
                for (at, len) in seen.lists.clone() {
                    for range in self.read(at, len).chunks_exact(16) {
                        let word =
                            |at: usize| u64::from_le_bytes(range[at..at + 8].try_into().unwrap());
                        seen.blocks.push((word(8), word(0) >> 32));
                    }
                }
            }
            _ => seen.blocks.push((command.slba(), blocks)),
        }
        let size = self.config.blocks;
        for (lba, blocks) in &seen.blocks {
            if lba.checked_add(*blocks).is_none_or(|end| end > size) {
                return Status::LBA_OUT_OF_RANGE;
            }
        }
        let bytes = |&(lba, blocks): &(u64, u64)| {
            (lba << shift) as usize..((lba + blocks) << shift) as usize
        };
        match opcode {
            NvmOpcode::READ | NvmOpcode::WRITE | NvmOpcode::COMPARE => {
                let len = blocks << shift;
                if self.config.mdts > 0 && len > 4096 << self.config.mdts {
                    return Status::INVALID_FIELD;
                }
                self.data(command, len, seen);
                let mut at = bytes(&seen.blocks[0]).start;
                for (iova, len) in seen.data.clone() {
                    let range = at..at + len as usize;
                    at = range.end;
                    if opcode == NvmOpcode::READ {
                        let bytes = self.disk[range].to_vec();
                        self.write(iova, &bytes);
                    } else {
                        let bytes = self.read(iova, len);
                        if opcode == NvmOpcode::WRITE {
                            self.disk[range].copy_from_slice(&bytes);
                        } else if self.disk[range] != bytes {
                            return Status::COMPARE_FAILURE;
                        }
                    }
                }
            }
            NvmOpcode::WRITE_ZEROES => {
                let range = bytes(&seen.blocks[0]);
                self.disk[range].fill(0);
            }
            NvmOpcode::DATASET_MANAGEMENT if command.cdw11.get() & 4 != 0 => {
                for range in seen.blocks.iter().map(bytes) {
                    self.disk[range].fill(0);
                }
            }
            NvmOpcode::DATASET_MANAGEMENT | NvmOpcode::VERIFY => {}
            _ => return Status::INVALID_OPCODE,
        }
        Status::SUCCESS
    }

    /// Walks the data pointer according to the standard, independently of the walkers under test.
    fn data(&mut self, command: &Command, len: u64, seen: &mut DeviceCommand) {
        if command.flags.psdt() != Psdt::PRP {
            let sgl = command.sgl1();
            match sgl.ty() {
                SglType::DATA_BLOCK => {
                    seen.data.push((sgl.address.get(), sgl.length.get().into()));
                }
                SglType::LAST_SEGMENT => {
                    let (at, size) = (sgl.address.get(), u64::from(sgl.length.get()));
                    seen.lists.push((at, size));
                    for raw in self.read(at, size).chunks_exact(16) {
                        let one = SglDescriptor::read_from_bytes(raw).unwrap();
                        assert_eq!(one.ty(), SglType::DATA_BLOCK);
                        seen.data.push((one.address.get(), one.length.get().into()));
                    }
                }
                other => panic!("the driver does not make {other:?}"),
            }
            let sum: u64 = seen.data.iter().map(|(_, len)| len).sum();
            assert_eq!(sum, len, "the SGL is not as long as the data");
            return;
        }
        let first = (4096 - command.prp1() % 4096).min(len);
        seen.data.push((command.prp1(), first));
        let mut left = len - first;
        if left == 0 {
            return;
        }
        if left <= 4096 {
            seen.data.push((command.prp2(), left));
            return;
        }
        let mut at = command.prp2();
        while left > 0 {
            seen.lists.push((at, 8));
            let entry = u64::from_le_bytes(self.read(at, 8).try_into().unwrap());
            if at % 4096 == 4088 && left > 4096 {
                at = entry;
                continue;
            }
            seen.data.push((entry, left.min(4096)));
            left -= left.min(4096);
            at += 8;
        }
    }

    fn reset(&mut self) {
        self.sqs.clear();
        self.cqs.clear();
        self.regs.clear();
    }
}

impl Model {
    pub fn new(config: Config) -> std::sync::Arc<Self> {
        std::sync::Arc::new(Model(Mutex::new(Inner {
            disk: vec![0; (config.blocks << config.shift) as usize],
            config,
            regs: HashMap::new(),
            maps: BTreeMap::new(),
            sqs: HashMap::new(),
            cqs: HashMap::new(),
            log: Vec::new(),
            faults: Vec::new(),
            hook: None,
            frozen: false,
            gone: false,
        })))
    }

    fn inner(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.0.lock().unwrap()
    }

    /// Returns the commands received since the last call.
    pub fn take_log(&self) -> Vec<DeviceCommand> {
        std::mem::take(&mut self.inner().log)
    }

    /// Addresses that were accessed without a mapping that allows it.
    pub fn faults(&self) -> Vec<u64> {
        self.inner().faults.clone()
    }

    pub fn disk(&self) -> Vec<u8> {
        self.inner().disk.clone()
    }

    pub fn set_disk(&self, at: usize, bytes: &[u8]) {
        self.inner().disk[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub fn hook(&self, hook: impl FnMut(&Command) -> Fate + Send + 'static) {
        self.inner().hook = Some(Box::new(hook));
    }

    pub fn unhook(&self) {
        self.inner().hook = None;
    }

    /// Stops or resumes the execution of I/O commands.
    pub fn freeze(&self, frozen: bool) {
        self.inner().frozen = frozen;
    }

    /// Makes all registers read as all ones from now on.
    pub fn vanish(&self) {
        self.inner().gone = true;
    }

    /// Returns whether a range overlaps the memory of a queue.
    pub fn in_a_ring(&self, at: u64, len: u64) -> bool {
        let inner = self.inner();
        let sqs = inner
            .sqs
            .values()
            .map(|sq| (sq.iova, u64::from(sq.entries) * 64));
        let cqs = inner
            .cqs
            .values()
            .map(|cq| (cq.iova, u64::from(cq.entries) * 16));
        sqs.chain(cqs)
            .any(|(start, size)| at < start + size && start < at + len)
    }

    /// Returns the number of existing mappings.
    pub fn mappings(&self) -> usize {
        self.inner().maps.len()
    }
}

impl Transport for Model {
    fn read32(&self, offset: u64) -> Result<u32, TransportError> {
        let inner = self.inner();
        if inner.gone {
            return Ok(u32::MAX);
        }
        let cap = Cap::new()
            .with_mqes_z(1023)
            .with_cqr(true)
            .with_to(10)
            .with_css(CapCss::new().with_ncss(true))
            .into_bits();
        Ok(match offset {
            regs::CAP => cap as u32,
            0x04 => (cap >> 32) as u32,
            regs::CSTS => {
                let cc = Cc::from_bits(inner.reg(regs::CC));
                let shst = if cc.shn() == Shn::NONE {
                    Shst::NORMAL
                } else {
                    Shst::COMPLETE
                };
                Csts::new().with_rdy(cc.en()).with_shst(shst).into_bits()
            }
            other => inner.reg(other),
        })
    }

    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        let mut inner = self.inner();
        if let Some(doorbell) = regs::Doorbell::at(offset, 0) {
            if !doorbell.is_cq
                && let Some(sq) = inner.sqs.get_mut(&doorbell.qid)
            {
                sq.tail = value;
            }
            return Ok(());
        }
        let before = inner.enabled();
        inner.regs.insert(offset, value);
        if offset == regs::CC && inner.enabled() != before {
            inner.sqs.clear();
            inner.cqs.clear();
            if inner.enabled() {
                let aqa = regs::Aqa::from_bits(inner.reg(regs::AQA));
                let at = |low: u64| u64::from(inner.reg(low + 4)) << 32 | u64::from(inner.reg(low));
                let (asq, acq) = (at(regs::ASQ), at(regs::ACQ));
                let sq = Sq {
                    iova: asq,
                    entries: u32::from(aqa.asqs_z()) + 1,
                    head: 0,
                    tail: 0,
                    cqid: 0,
                };
                let cq = Cq {
                    iova: acq,
                    entries: u32::from(aqa.acqs_z()) + 1,
                    tail: 0,
                    phase: true,
                };
                inner.sqs.insert(0, sq);
                inner.cqs.insert(0, cq);
            }
        }
        Ok(())
    }

    fn doorbell(&self, _offset: u64) -> Option<DoorbellCell> {
        None
    }

    fn dma_limits(&self) -> DmaLimits {
        DmaLimits {
            iova_ranges: vec![0..=(1 << 40) - 1],
            max_mappings: 65_535,
            page_size: 4096,
            host_ranges: false,
        }
    }

    fn map(&self, mapping: Mapping<'_>) -> Result<(), TransportError> {
        let Source::File { memory, offset } = mapping.source else {
            return Err(TransportError::NeedsSharedMemory);
        };
        let entry = (mapping.len, memory.clone(), offset, mapping.prot);
        self.inner().maps.insert(mapping.iova, entry);
        Ok(())
    }

    fn unmap(&self, iova: u64, _len: u64) -> Result<(), TransportError> {
        self.inner().maps.remove(&iova);
        Ok(())
    }

    fn msix_vectors(&self) -> u16 {
        0
    }

    fn set_msix(&self, _eventfds: &[Option<BorrowedFd<'_>>]) -> Result<(), TransportError> {
        Ok(())
    }

    fn set_bus_master(&self, _enable: bool) -> Result<(), TransportError> {
        Ok(())
    }

    fn reset(&self) -> Result<(), TransportError> {
        self.inner().reset();
        Ok(())
    }

    fn pause(&self) {
        self.inner().step();
    }

    fn is_stepped(&self) -> bool {
        true
    }
}
