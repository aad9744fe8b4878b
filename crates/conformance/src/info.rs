//! Identify data of the controller, and the commands that nearly every case needs.

use crate::bytes::{u8_at, u16_at, u32_at, u64_at};
use crate::host::{Host, PAGE, admin, nvm};
use crate::verdict::{Check, Expect, not_applicable, require};
use nvme::feature::Fid;
use nvme::{AdminOpcode, NvmOpcode};
use test_host::{Command, Completion};

/// The broadcast NSID.
pub const ALL: u32 = 0xffff_ffff;

/// Identify Controller (NVMe Base 2.1, 5.1.13.2.1).
pub struct Controller(pub Vec<u8>);

impl Controller {
    /// VER.
    pub fn ver(&self) -> u32 {
        u32_at(&self.0, 80)
    }
    /// MDTS in bytes, for the smallest page; `None`: there is no limit.
    pub fn max_transfer(&self, page: u64) -> Option<u64> {
        let mdts = u8_at(&self.0, 77);
        (mdts != 0 && mdts < 40).then(|| page << mdts)
    }
    /// CMIC.
    pub fn cmic(&self) -> u8 {
        u8_at(&self.0, 76)
    }
    /// CNTLID.
    pub fn cntlid(&self) -> u16 {
        u16_at(&self.0, 78)
    }
    /// CTRATT.
    pub fn ctratt(&self) -> u32 {
        u32_at(&self.0, 96)
    }
    /// A bit of OACS.
    pub fn oacs(&self, bit: u32) -> bool {
        u16_at(&self.0, 256) >> bit & 1 != 0
    }
    /// ACL, as a number.
    pub fn abort_limit(&self) -> usize {
        usize::from(u8_at(&self.0, 258)) + 1
    }
    /// AERL, as a number.
    pub fn event_limit(&self) -> usize {
        usize::from(u8_at(&self.0, 259)) + 1
    }
    /// A bit of LPA.
    pub fn lpa(&self, bit: u32) -> bool {
        u8_at(&self.0, 261) >> bit & 1 != 0
    }
    /// ELPE, as a number.
    pub fn error_entries(&self) -> usize {
        usize::from(u8_at(&self.0, 262)) + 1
    }
    /// NPSS.
    pub fn npss(&self) -> u8 {
        u8_at(&self.0, 263)
    }
    /// KAS, in units of 100 ms.
    pub fn kas(&self) -> u16 {
        u16_at(&self.0, 320)
    }
    /// SANICAP.
    pub fn sanicap(&self) -> u32 {
        u32_at(&self.0, 328)
    }
    /// NN.
    pub fn nn(&self) -> u32 {
        u32_at(&self.0, 516)
    }
    /// A bit of ONCS.
    pub fn oncs(&self, bit: u32) -> bool {
        u16_at(&self.0, 520) >> bit & 1 != 0
    }
    /// VWC.
    pub fn vwc(&self) -> u8 {
        u8_at(&self.0, 525)
    }
    /// SGLS.
    pub fn sgls(&self) -> u32 {
        u32_at(&self.0, 536)
    }
}

/// A namespace as Identify Namespace describes it (NVM Command Set 1.1, 4.1.5.1).
pub struct Namespace {
    /// NSID of the namespace.
    pub nsid: u32,
    /// The data structure.
    pub page: Vec<u8>,
    /// Blocks.
    pub blocks: u64,
    /// Bytes of a block's data.
    pub block: u64,
}

impl Namespace {
    /// Bytes of metadata of a block.
    pub fn metadata(&self) -> u16 {
        u16_at(&self.page, 128 + 4 * self.format())
    }

    /// Index of the LBA format in use (FLBAS).
    pub fn format(&self) -> usize {
        let flbas = u8_at(&self.page, 26);
        usize::from(flbas & 0xf | (flbas >> 1 & 0x30))
    }

    /// Bytes that a number of blocks takes in the data buffer.
    pub fn bytes(&self, blocks: u64) -> u64 {
        let extended = u8_at(&self.page, 26) & 0x10 != 0;
        let metadata = if extended { self.metadata() } else { 0 };
        blocks * (self.block + u64::from(metadata))
    }
}

impl Host {
    /// Runs Identify; dword 10 whole.
    pub fn identify_raw(
        &mut self,
        cdw10: u32,
        nsid: u32,
        cdw11: u32,
    ) -> Check<(Completion, Vec<u8>)> {
        let at = self.alloc(PAGE)?;
        // Shows bytes that the controller does not write.
        self.put(at, &[0xa5; PAGE as usize])?;
        let command = admin(AdminOpcode::IDENTIFY, nsid)
            .prp(at, 0)
            .dw(10, cdw10)
            .dw(11, cdw11);
        let entry = self.admin(command)?;
        Ok((entry, self.get(at, PAGE as usize)?))
    }

    /// Runs Identify, which has to succeed.
    pub fn identify(&mut self, cns: u8, nsid: u32) -> Check<Vec<u8>> {
        let (entry, page) = self.identify_raw(cns.into(), nsid, 0)?;
        entry.succeeds(&format!("Identify CNS {cns:02x}h of NSID {nsid:#x}"))?;
        Ok(page)
    }

    /// Identify Controller.
    pub fn controller(&mut self) -> Check<Controller> {
        Ok(Controller(self.identify(1, 0)?))
    }

    /// The active NSIDs.
    pub fn nsids(&mut self) -> Check<Vec<u32>> {
        let page = self.identify(2, 0)?;
        let all = page.chunks_exact(4).map(|chunk| u32_at(chunk, 0));
        Ok(all.take_while(|nsid| *nsid != 0).collect())
    }

    /// A namespace.
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

    /// The first namespace that is not write protected, with the size that the cases need.
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

    /// Reads or writes blocks of a buffer; dword 12's upper half is `flags`.
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

    /// Reads blocks by I/O queue 1.
    pub fn read(&mut self, ns: &Namespace, slba: u64, blocks: u64) -> Check<Vec<u8>> {
        let len = ns.bytes(blocks);
        let at = self.alloc(len)?;
        self.put(at, &vec![0xa5; len as usize])?;
        let command = self.rw_command(NvmOpcode::READ, ns, slba, blocks, at)?;
        self.io(command)?
            .succeeds(&format!("Read of {blocks} blocks from LBA {slba:#x}"))?;
        self.get(at, len as usize)
    }

    /// Writes blocks by I/O queue 1.
    pub fn write(&mut self, ns: &Namespace, slba: u64, data: &[u8]) -> Check {
        let at = self.alloc(data.len() as u64)?;
        self.put(at, data)?;
        let blocks = data.len() as u64 / ns.block;
        let command = self.rw_command(NvmOpcode::WRITE, ns, slba, blocks, at)?;
        self.io(command)?
            .succeeds(&format!("Write of {blocks} blocks to LBA {slba:#x}"))
    }

    /// Blocks have this content.
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

    /// Runs Get Log Page; NUMD from bytes, which are a multiple of 4.
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

    /// Reads a log page from its beginning, which has to succeed.
    pub fn log(&mut self, lid: u8, bytes: u64) -> Check<Vec<u8>> {
        let (entry, page) = self.log_raw(lid, ALL, bytes, 0, 0)?;
        entry.succeeds(&format!("Get Log Page {lid:02x}h"))?;
        Ok(page)
    }

    /// Get Features with a Select; dword 10 without FID is `sel` at bit 8.
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

    /// Set Features without data.
    pub fn set_feature(&mut self, fid: u8, nsid: u32, cdw11: u32) -> Check<Completion> {
        let command = admin(AdminOpcode::SET_FEATURES, nsid)
            .dw(10, fid.into())
            .dw(11, cdw11);
        self.admin(command)
    }
}
