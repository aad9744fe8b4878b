//! Identify data of the controller and its namespaces, and commands that most cases use.

use crate::bytes::{u8_at, u16_at, u32_at, u64_at};
use crate::host::{Host, PAGE, admin, nvm};
use crate::verdict::{Check, Expect, not_applicable, require};
use nvme::feature::Fid;
use nvme::{AdminOpcode, NvmOpcode};
use test_host::{Command, Completion};

/// Broadcast NSID, which stands for all namespaces.
pub const ALL: u32 = 0xffff_ffff;

/// Data of Identify Controller ("NVMe Base 2.1", 5.1.13.2.1).
pub struct Controller(pub Vec<u8>);

impl Controller {
    /// Returns the version that the controller reports (VER).
    pub fn ver(&self) -> u32 {
        u32_at(&self.0, 80)
    }
    /// Returns the maximum data transfer size in bytes for the smallest page size; `None` without
    /// limit (MDTS).
    pub fn max_transfer(&self, page: u64) -> Option<u64> {
        let mdts = u8_at(&self.0, 77);
        (mdts != 0 && mdts < 40).then(|| page << mdts)
    }
    /// Returns the multi-path capabilities (CMIC).
    pub fn cmic(&self) -> u8 {
        u8_at(&self.0, 76)
    }
    /// Returns the controller ID (CNTLID).
    pub fn cntlid(&self) -> u16 {
        u16_at(&self.0, 78)
    }
    /// Returns the controller attributes (CTRATT).
    pub fn ctratt(&self) -> u32 {
        u32_at(&self.0, 96)
    }
    /// Returns a bit of Optional Admin Command Support (OACS).
    pub fn oacs(&self, bit: u32) -> bool {
        u16_at(&self.0, 256) >> bit & 1 != 0
    }
    /// Returns the maximum number of outstanding Abort commands (ACL + 1).
    pub fn abort_limit(&self) -> usize {
        usize::from(u8_at(&self.0, 258)) + 1
    }
    /// Returns the maximum number of outstanding Asynchronous Event Requests (AERL + 1).
    pub fn event_limit(&self) -> usize {
        usize::from(u8_at(&self.0, 259)) + 1
    }
    /// Returns a bit of Log Page Attributes (LPA).
    pub fn lpa(&self, bit: u32) -> bool {
        u8_at(&self.0, 261) >> bit & 1 != 0
    }
    /// Returns the number of error log entries (ELPE + 1).
    pub fn error_entries(&self) -> usize {
        usize::from(u8_at(&self.0, 262)) + 1
    }
    /// Returns the number of power states, zero-based (NPSS).
    pub fn npss(&self) -> u8 {
        u8_at(&self.0, 263)
    }
    /// Returns the keep-alive granularity in units of 100 ms (KAS).
    pub fn kas(&self) -> u16 {
        u16_at(&self.0, 320)
    }
    /// Returns the sanitize capabilities (SANICAP).
    pub fn sanicap(&self) -> u32 {
        u32_at(&self.0, 328)
    }
    /// Returns the maximum NSID (NN).
    pub fn nn(&self) -> u32 {
        u32_at(&self.0, 516)
    }
    /// Returns a bit of Optional NVM Command Support (ONCS).
    pub fn oncs(&self, bit: u32) -> bool {
        u16_at(&self.0, 520) >> bit & 1 != 0
    }
    /// Returns the volatile write cache field (VWC).
    pub fn vwc(&self) -> u8 {
        u8_at(&self.0, 525)
    }
    /// Returns the SGL support field (SGLS).
    pub fn sgls(&self) -> u32 {
        u32_at(&self.0, 536)
    }
}

/// Namespace as Identify Namespace describes it ("NVM Command Set 1.1", 4.1.5.1).
pub struct Namespace {
    /// Namespace ID (NSID).
    pub nsid: u32,
    /// Bytes of the Identify Namespace data.
    pub page: Vec<u8>,
    /// Size of the namespace in blocks (NSZE).
    pub blocks: u64,
    /// Data size of a block in bytes.
    pub block: u64,
}

impl Namespace {
    /// Returns the metadata size of a block in bytes.
    pub fn metadata(&self) -> u16 {
        u16_at(&self.page, 128 + 4 * self.format())
    }

    /// Returns the index of the LBA format in use (FLBAS).
    pub fn format(&self) -> usize {
        let flbas = u8_at(&self.page, 26);
        usize::from(flbas & 0xf | (flbas >> 1 & 0x30))
    }

    /// Returns the number of bytes that `blocks` blocks occupy in the data buffer.
    pub fn bytes(&self, blocks: u64) -> u64 {
        let extended = u8_at(&self.page, 26) & 0x10 != 0;
        let metadata = if extended { self.metadata() } else { 0 };
        blocks * (self.block + u64::from(metadata))
    }
}

impl Host {
    /// Executes Identify with all of dword 10 given.
    pub fn identify_raw(
        &mut self,
        cdw10: u32,
        nsid: u32,
        cdw11: u32,
    ) -> Check<(Completion, Vec<u8>)> {
        let at = self.alloc(PAGE)?;
        // Reveals bytes that the controller does not write.
        self.put(at, &[0xa5; PAGE as usize])?;
        let command = admin(AdminOpcode::IDENTIFY, nsid)
            .prp(at, 0)
            .dw(10, cdw10)
            .dw(11, cdw11);
        let entry = self.admin(command)?;
        Ok((entry, self.get(at, PAGE as usize)?))
    }

    /// Executes Identify, which must succeed, and returns the data.
    pub fn identify(&mut self, cns: u8, nsid: u32) -> Check<Vec<u8>> {
        let (entry, page) = self.identify_raw(cns.into(), nsid, 0)?;
        entry.succeeds(&format!("Identify CNS {cns:02x}h of NSID {nsid:#x}"))?;
        Ok(page)
    }

    /// Returns the data of Identify Controller.
    pub fn controller(&mut self) -> Check<Controller> {
        Ok(Controller(self.identify(1, 0)?))
    }

    /// Returns the NSIDs of the active namespaces.
    pub fn nsids(&mut self) -> Check<Vec<u32>> {
        let page = self.identify(2, 0)?;
        let all = page.chunks_exact(4).map(|chunk| u32_at(chunk, 0));
        Ok(all.take_while(|nsid| *nsid != 0).collect())
    }

    /// Returns the namespace with this NSID.
    pub fn namespace_of(&mut self, nsid: u32) -> Check<Namespace> {
        let page = self.identify(0, nsid)?;
        let flbas = u8_at(&page, 26);
        let format = usize::from(flbas & 0xf | (flbas >> 1 & 0x30));
        let lbads = u8_at(&page, 128 + 4 * format + 2);
        require!(
            (9..32).contains(&lbads),
            "LBADS of the format in use is {lbads}, which is no block size"
        );
        Ok(Namespace {
            nsid,
            blocks: u64_at(&page, 0),
            block: 1 << lbads,
            page,
        })
    }

    /// Returns the first namespace that is not write protected and is large enough for the cases.
    pub fn namespace(&mut self) -> Check<Namespace> {
        for nsid in self.nsids()? {
            let namespace = self.namespace_of(nsid)?;
            let protected = u8_at(&namespace.page, 99) & 1 != 0;
            if !protected && namespace.blocks >= 4096 && namespace.metadata() == 0 {
                return Ok(namespace);
            }
        }
        not_applicable(
            "no namespace can be written, is of 4096 blocks at least, and without metadata",
        )
    }

    /// Creates a Read or Write of blocks with a buffer; `flags` is the upper half of dword 12.
    pub fn rw_command(
        &mut self,
        opcode: NvmOpcode,
        ns: &Namespace,
        slba: u64,
        blocks: u64,
        buffer: u64,
    ) -> Check<Command> {
        let (prp1, prp2) = self.prps(buffer, ns.bytes(blocks))?;
        Ok(nvm(opcode, ns.nsid)
            .prp(prp1, prp2)
            .slba(slba)
            .dw(12, (blocks.wrapping_sub(1) & 0xffff) as u32))
    }

    /// Reads blocks through I/O queue 1, and returns their data.
    pub fn read(&mut self, ns: &Namespace, slba: u64, blocks: u64) -> Check<Vec<u8>> {
        let len = ns.bytes(blocks);
        let at = self.alloc(len)?;
        self.put(at, &vec![0xa5; len as usize])?;
        let command = self.rw_command(NvmOpcode::READ, ns, slba, blocks, at)?;
        self.io(command)?
            .succeeds(&format!("Read of {blocks} blocks from LBA {slba:#x}"))?;
        self.get(at, len as usize)
    }

    /// Writes blocks through I/O queue 1.
    pub fn write(&mut self, ns: &Namespace, slba: u64, data: &[u8]) -> Check {
        let at = self.alloc(data.len() as u64)?;
        self.put(at, data)?;
        let blocks = data.len() as u64 / ns.block;
        let command = self.rw_command(NvmOpcode::WRITE, ns, slba, blocks, at)?;
        self.io(command)?
            .succeeds(&format!("Write of {blocks} blocks to LBA {slba:#x}"))
    }

    /// Checks that the blocks from `slba` on contain `data`.
    pub fn holds(&mut self, ns: &Namespace, slba: u64, data: &[u8], what: &str) -> Check {
        let found = self.read(ns, slba, data.len() as u64 / ns.block)?;
        let differs = found.iter().zip(data).position(|(a, b)| a != b);
        require!(
            differs.is_none(),
            "{what}: the data differ from byte {:#x} of LBA {slba:#x} on",
            differs.unwrap_or(0)
        );
        Ok(())
    }

    /// Executes Get Log Page; NUMD follows from `bytes`, which is a multiple of 4.
    pub fn log_raw(
        &mut self,
        lid: u8,
        nsid: u32,
        bytes: u64,
        offset: u64,
        dw10: u32,
    ) -> Check<(Completion, Vec<u8>)> {
        let at = self.alloc(bytes.max(4))?;
        self.put(at, &vec![0xa5; bytes as usize])?;
        let (prp1, prp2) = self.prps(at, bytes.max(4))?;
        let numd = (bytes / 4).wrapping_sub(1);
        let command = admin(AdminOpcode::GET_LOG_PAGE, nsid)
            .prp(prp1, prp2)
            .dw(10, (numd as u32) << 16 | dw10 & 0xff00 | u32::from(lid))
            .dw(11, (numd >> 16) as u32 & 0xffff)
            .dw(12, offset as u32)
            .dw(13, (offset >> 32) as u32);
        let entry = self.admin(command)?;
        Ok((entry, self.get(at, bytes as usize)?))
    }

    /// Reads a log page from its beginning, which must succeed.
    pub fn log(&mut self, lid: u8, bytes: u64) -> Check<Vec<u8>> {
        let (entry, page) = self.log_raw(lid, ALL, bytes, 0, 0)?;
        entry.succeeds(&format!("Get Log Page {lid:02x}h"))?;
        Ok(page)
    }

    /// Executes Get Features; `sel` is the Select field, bits 10:8 of dword 10.
    pub fn get_feature(&mut self, fid: u8, sel: u8, nsid: u32, cdw11: u32) -> Check<Completion> {
        let at = self.alloc(PAGE)?;
        let command = admin(AdminOpcode::GET_FEATURES, nsid)
            .prp(at, 0)
            .dw(10, u32::from(sel) << 8 | u32::from(fid))
            .dw(11, cdw11);
        self.admin(command)
    }

    /// Sets Host Behavior Support: whether extended LBA formats are enabled, and the formats of
    /// Copy's descriptors.
    pub fn behaves(&mut self, lbafee: u8, formats: u16) -> Check {
        let at = self.alloc(512)?;
        let mut data = [0; 512];
        let [low, high] = formats.to_le_bytes();
        data[2] = lbafee;
        data[4] = low;
        data[5] = high;
        self.put(at, &data)?;
        let (prp1, prp2) = self.prps(at, 512)?;
        let set = admin(AdminOpcode::SET_FEATURES, 0).prp(prp1, prp2);
        let fid = u32::from(Fid::HOST_BEHAVIOR_SUPPORT.0);
        self.admin(set.dw(10, fid))?
            .succeeds("Set Features, Host Behavior Support")
    }

    /// Executes Set Features without data, and returns the completion.
    pub fn set_feature(&mut self, fid: u8, nsid: u32, cdw11: u32) -> Check<Completion> {
        let command = admin(AdminOpcode::SET_FEATURES, nsid)
            .dw(10, fid.into())
            .dw(11, cdw11);
        self.admin(command)
    }
}
