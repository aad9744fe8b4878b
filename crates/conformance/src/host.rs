//! A host as the cases need it: registers, memory, queues, and commands that nobody checks.
//!
//! It is not crate `driver`, which sends nothing that is wrong. Each case has a host of its own, by
//! a connection of its own, so that none depends on another. Completions are checked for what holds
//! of every one of them: the queue and the head pointer that they name, the reserved dword, and
//! that each comes once.

use crate::verdict::{Check, Verdict, failed, require, same};
use dma::Memory;
use nvme::regs::{self, Cap, Cc, Csts};
use nvme::{AdminOpcode, Command, Completion, NvmOpcode};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vfio_user::client::{Client, ClientError};
use vfio_user::{DmaMapping, DmaUnmapping};
use zerocopy::{FromBytes, IntoBytes};

/// Region indices of a PCI device (`<linux/vfio.h>`).
const BAR0: u32 = 0;
const CONFIG: u32 = 7;
/// How long the server may take for a message, and a command for its completion.
const ANSWER: Duration = Duration::from_secs(10);
/// How long nothing may come where nothing is to come.
pub const QUIET: Duration = Duration::from_millis(60);
/// Guest memory begins at this IOVA.
pub const RAM_BASE: u64 = 0x1_0000_0000;
/// Its bytes.
const RAM_SIZE: u64 = 96 << 20;
/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Entries of the admin queues, and of I/O queues unless the controller has fewer.
pub const ENTRIES: u16 = 64;

struct Sq {
    iova: u64,
    entries: u16,
    tail: u16,
    cqid: u16,
    /// Commands that have not completed.
    outstanding: Vec<u16>,
}

struct Cq {
    iova: u64,
    entries: u16,
    head: u16,
    phase: bool,
}

/// How the controller is to be enabled.
#[derive(Clone, Copy, Debug)]
pub struct Enable {
    /// Entries of the admin submission queue.
    pub asq: u16,
    /// Entries of the admin completion queue.
    pub acq: u16,
    /// The rest of CC.
    pub cc: Cc,
}

impl Default for Enable {
    fn default() -> Self {
        let cc = Cc::new().with_iosqes(6).with_iocqes(4);
        Enable {
            asq: ENTRIES,
            acq: ENTRIES,
            cc,
        }
    }
}

/// Fields of a submission queue entry, chained.
pub trait Fields: Sized {
    /// Command dword `n`, 2 to 15.
    fn dw(self, n: usize, value: u32) -> Self;
    /// PRP entries 1 and 2.
    fn prp(self, prp1: u64, prp2: u64) -> Self;
    /// The first LBA.
    fn slba(self, slba: u64) -> Self;
    /// FUSE and PSDT as they are: bits 15:8 of dword 0.
    fn flags(self, flags: u8) -> Self;
}

impl Fields for Command {
    fn dw(mut self, n: usize, value: u32) -> Self {
        if let Some(bytes) = self.as_mut_bytes().get_mut(4 * n..4 * n + 4) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
        self
    }

    fn prp(mut self, prp1: u64, prp2: u64) -> Self {
        self.set_prps(prp1, prp2);
        self
    }

    fn slba(self, slba: u64) -> Self {
        self.dw(10, slba as u32).dw(11, (slba >> 32) as u32)
    }

    fn flags(mut self, flags: u8) -> Self {
        self.flags = flags.into();
        self
    }
}

/// An admin command.
pub fn admin(opcode: AdminOpcode, nsid: u32) -> Command {
    Command::new(opcode.0, 0, nsid)
}

/// An I/O command.
pub fn nvm(opcode: NvmOpcode, nsid: u32) -> Command {
    Command::new(opcode.0, 0, nsid)
}

/// A host with its connection.
pub struct Host {
    client: Client,
    ram: Memory,
    /// Memory of the controller's, and where commands find it.
    buffer: Option<(u64, Memory)>,
    /// The next byte of memory that nothing uses.
    free: u64,
    /// CAP.
    pub cap: Cap,
    /// The page size that the controller was enabled with, in bytes.
    pub page_size: u64,
    sqs: BTreeMap<u16, Sq>,
    cqs: BTreeMap<u16, Cq>,
    next_cid: u16,
    /// Completions that came while another one was waited for: completion queue and entry.
    kept: Vec<(u16, Completion)>,
}

fn connect(socket: &Path) -> Check<Client> {
    let deadline = Instant::now() + ANSWER;
    loop {
        match Client::connect(socket, ANSWER) {
            Ok(client) => return Ok(client),
            // The host of the case before has not left yet, or the server has not begun.
            Err(ClientError::NotTaken | ClientError::Connect(_) | ClientError::Closed)
                if Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

impl Host {
    /// Connects, maps memory and lets the function decode and master; the controller is disabled.
    pub fn attach(socket: &Path) -> Check<Host> {
        let mut client = connect(socket)?;
        let ram = Memory::anonymous(RAM_SIZE as usize)
            .map_err(|error| Verdict::Failed(format!("memory for the host: {error}")))?;
        let all = DmaMapping {
            iova: RAM_BASE,
            size: RAM_SIZE,
            offset: 0,
            read: true,
            write: true,
        };
        client.dma_map(all, Some(ram.fd()))?;
        let mut host = Host {
            client,
            ram,
            buffer: None,
            free: RAM_BASE,
            cap: Cap::new(),
            page_size: PAGE,
            sqs: BTreeMap::new(),
            cqs: BTreeMap::new(),
            next_cid: 0x100,
            kept: Vec::new(),
        };
        host.decode()?;
        host.cap = Cap::from_bits(host.read64(regs::CAP)?);
        host.disable()?;
        Ok(host)
    }

    /// Memory Space Enable, Bus Master Enable, Interrupt Disable.
    pub fn decode(&mut self) -> Check {
        self.write_config(4, &0x0406u16.to_le_bytes())
    }

    /// The client, for what has no method here.
    pub fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    // Registers.

    /// Reads BAR0.
    pub fn read_bar(&mut self, offset: u64, data: &mut [u8]) -> Check {
        Ok(self.client.region_read(BAR0, offset, data)?)
    }

    /// Writes BAR0.
    pub fn write_bar(&mut self, offset: u64, data: &[u8]) -> Check {
        Ok(self.client.region_write(BAR0, offset, data)?)
    }

    /// Reads a register of 32 bits.
    pub fn read32(&mut self, offset: u64) -> Check<u32> {
        let mut data = [0; 4];
        self.read_bar(offset, &mut data)?;
        Ok(u32::from_le_bytes(data))
    }

    /// Reads a register of 64 bits at once.
    pub fn read64(&mut self, offset: u64) -> Check<u64> {
        let mut data = [0; 8];
        self.read_bar(offset, &mut data)?;
        Ok(u64::from_le_bytes(data))
    }

    /// Writes a register of 32 bits.
    pub fn write32(&mut self, offset: u64, value: u32) -> Check {
        self.write_bar(offset, &value.to_le_bytes())
    }

    /// Writes a register of 64 bits at once.
    pub fn write64(&mut self, offset: u64, value: u64) -> Check {
        self.write_bar(offset, &value.to_le_bytes())
    }

    /// Reads configuration space.
    pub fn read_config<const N: usize>(&mut self, offset: u64) -> Check<[u8; N]> {
        let mut data = [0; N];
        self.client.region_read(CONFIG, offset, &mut data)?;
        Ok(data)
    }

    /// Writes configuration space.
    pub fn write_config(&mut self, offset: u64, data: &[u8]) -> Check {
        Ok(self.client.region_write(CONFIG, offset, data)?)
    }

    /// CSTS.
    pub fn csts(&mut self) -> Check<Csts> {
        Ok(Csts::from_bits(self.read32(regs::CSTS)?))
    }

    /// How long CSTS.RDY may take to follow CC.EN: CAP.TO, or one unit more than nothing.
    pub fn ready_time(&self) -> Duration {
        Duration::from_millis(500) * u32::from(self.cap.to()).max(1)
    }

    /// Waits until CSTS is as wanted.
    pub fn wait_csts(&mut self, what: &str, wanted: impl Fn(Csts) -> bool) -> Check<Csts> {
        let deadline = Instant::now() + self.ready_time();
        loop {
            let csts = self.csts()?;
            if wanted(csts) {
                return Ok(csts);
            }
            require!(
                Instant::now() < deadline,
                "{what}: not within {:?}, CSTS is {:#x}",
                self.ready_time(),
                csts.into_bits()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// CC.EN to 0, and waits for CSTS.RDY.
    pub fn disable(&mut self) -> Check {
        let cc = Cc::from_bits(self.read32(regs::CC)?);
        self.write32(
            regs::CC,
            cc.with_en(false).with_shn(regs::Shn::NONE).into_bits(),
        )?;
        self.wait_csts("CSTS.RDY follows CC.EN to 0", |csts| !csts.rdy())?;
        self.sqs.clear();
        self.cqs.clear();
        self.kept.clear();
        Ok(())
    }

    /// Enables the controller with new admin queues.
    pub fn enable_with(&mut self, how: Enable) -> Check {
        self.page_size = PAGE << how.cc.mps();
        let align = self.page_size;
        let asq = self.alloc_at(64 * u64::from(how.asq), align)?;
        let acq = self.alloc_at(16 * u64::from(how.acq), align)?;
        let aqa = u32::from(how.acq - 1) << 16 | u32::from(how.asq - 1);
        self.write32(regs::AQA, aqa)?;
        self.write64(regs::ASQ, asq)?;
        self.write64(regs::ACQ, acq)?;
        self.write32(regs::CC, how.cc.with_en(true).into_bits())?;
        self.wait_csts("CSTS.RDY follows CC.EN to 1", |csts| {
            csts.rdy() || csts.cfs()
        })?;
        require!(
            !self.csts()?.cfs(),
            "CSTS.CFS is set by an enable that is right (CC {:#x}, AQA {aqa:#x})",
            how.cc.into_bits()
        );
        self.know_sq(0, asq, how.asq, 0);
        self.know_cq(0, acq, how.acq);
        Ok(())
    }

    /// Enables the controller as hosts do.
    pub fn enable(&mut self) -> Check {
        let mut how = Enable::default();
        if self.cap.css().iocss() && !self.cap.css().ncss() {
            how.cc = how.cc.with_css(regs::CcCss::ALL_SUPPORTED);
        }
        how.cc = how.cc.with_mps(self.cap.mpsmin());
        self.enable_with(how)
    }

    // Memory.

    /// New memory that is zero, at a page's beginning; its IOVA.
    pub fn alloc(&mut self, len: u64) -> Check<u64> {
        let align = self.page_size;
        self.alloc_at(len, align)
    }

    fn alloc_at(&mut self, len: u64, align: u64) -> Check<u64> {
        let at = self.free.next_multiple_of(align);
        self.free = at + len.next_multiple_of(PAGE);
        require!(
            self.free <= RAM_BASE + RAM_SIZE,
            "the case needs more memory than its host has"
        );
        Ok(at)
    }

    /// Commands find memory of the controller's at this IOVA, and so does this host from now on.
    pub fn know_buffer(&mut self, iova: u64, memory: Memory) {
        self.buffer = Some((iova, memory));
    }

    /// What there is at an IOVA, and where in it.
    fn memory(&self, iova: u64) -> (&Memory, usize) {
        match &self.buffer {
            Some((base, memory)) if iova.wrapping_sub(*base) < memory.len() as u64 => {
                (memory, iova.wrapping_sub(*base) as usize)
            }
            _ => (&self.ram, iova.wrapping_sub(RAM_BASE) as usize),
        }
    }

    /// Copies from memory.
    pub fn get(&self, iova: u64, len: usize) -> Check<Vec<u8>> {
        let mut data = vec![0; len];
        let (memory, at) = self.memory(iova);
        memory.read(at, &mut data)?;
        Ok(data)
    }

    /// Copies into memory.
    pub fn put(&self, iova: u64, data: &[u8]) -> Check {
        let (memory, at) = self.memory(iova);
        Ok(memory.write(at, data)?)
    }

    /// Takes all memory away from the controller.
    pub fn unmap_all(&mut self) -> Check {
        self.client.dma_unmap(DmaUnmapping::All)?;
        Ok(())
    }

    /// PRP entries 1 and 2 of `len` bytes from an IOVA on, with a list in new memory if one is
    /// needed.
    pub fn prps(&mut self, iova: u64, len: u64) -> Check<(u64, u64)> {
        let page = self.page_size;
        let first = page - iova % page;
        if len <= first {
            return Ok((iova, 0));
        }
        let second = iova + first;
        if len <= first + page {
            return Ok((iova, second));
        }
        let entries: Vec<u64> = (0..(len - first).div_ceil(page))
            .map(|n| second + n * page)
            .collect();
        // Each list is one page, whose last entry leads to the next one.
        let fit = (page / 8) as usize;
        let lists = entries.len().saturating_sub(2) / (fit - 1) + 1;
        let list = self.alloc(page * lists as u64)?;
        let (mut at, mut rest) = (list, entries.as_slice());
        while !rest.is_empty() {
            let here = if rest.len() <= fit {
                rest.len()
            } else {
                fit - 1
            };
            let (now, later) = rest.split_at(here);
            let mut bytes: Vec<u8> = now.iter().flat_map(|e| e.to_le_bytes()).collect();
            if !later.is_empty() {
                bytes.extend((at + page).to_le_bytes());
            }
            self.put(at, &bytes)?;
            at += page;
            rest = later;
        }
        Ok((iova, list))
    }

    // Queues.

    /// This host uses a submission queue from now on.
    pub fn know_sq(&mut self, qid: u16, iova: u64, entries: u16, cqid: u16) {
        let sq = Sq {
            iova,
            entries,
            tail: 0,
            cqid,
            outstanding: Vec::new(),
        };
        self.sqs.insert(qid, sq);
    }

    /// This host uses a completion queue from now on.
    pub fn know_cq(&mut self, qid: u16, iova: u64, entries: u16) {
        let cq = Cq {
            iova,
            entries,
            head: 0,
            phase: true,
        };
        self.cqs.insert(qid, cq);
    }

    /// This host does not use a submission queue any more.
    pub fn forget_sq(&mut self, qid: u16) {
        self.sqs.remove(&qid);
    }

    /// Offset in BAR0 of a doorbell.
    pub fn doorbell(&self, qid: u16, cq: bool) -> u64 {
        regs::doorbell_offset(qid, cq, self.cap.dstrd())
    }

    /// Writes a doorbell.
    pub fn ring(&mut self, qid: u16, cq: bool, value: u32) -> Check {
        let offset = self.doorbell(qid, cq);
        self.write32(offset, value)
    }

    fn sq(&mut self, qid: u16) -> Check<&mut Sq> {
        let sq = self.sqs.get_mut(&qid);
        sq.ok_or_else(|| Verdict::Failed(format!("the case uses queue {qid}, which it has not")))
    }

    /// Writes a command behind the others, without ringing; its identifier.
    pub fn put_command(&mut self, qid: u16, command: Command) -> Check<u16> {
        self.next_cid = self.next_cid.wrapping_add(1) & 0x7fff;
        let cid = self.next_cid;
        self.put_command_as(qid, command, cid)?;
        Ok(cid)
    }

    /// The same with an identifier of the case's choice.
    pub fn put_command_as(&mut self, qid: u16, mut command: Command, cid: u16) -> Check {
        command.cid = cid.into();
        let sq = self.sq(qid)?;
        let at = sq.iova + 64 * u64::from(sq.tail);
        sq.tail = (sq.tail + 1) % sq.entries;
        sq.outstanding.push(cid);
        self.put(at, command.as_bytes())
    }

    /// The tail of a submission queue, as this host has it.
    pub fn tail(&mut self, qid: u16) -> Check<u16> {
        Ok(self.sq(qid)?.tail)
    }

    /// Rings a submission queue's doorbell for what was put.
    pub fn ring_tail(&mut self, qid: u16) -> Check {
        let tail = self.sq(qid)?.tail;
        self.ring(qid, false, tail.into())
    }

    /// Puts and rings.
    pub fn submit(&mut self, qid: u16, command: Command) -> Check<u16> {
        let cid = self.put_command(qid, command)?;
        self.ring_tail(qid)?;
        Ok(cid)
    }

    /// The entry at the head of a completion queue if it is new. The head is not moved.
    fn peek(&mut self, cqid: u16) -> Check<Option<Completion>> {
        let Some(cq) = self.cqs.get(&cqid) else {
            return failed(format!(
                "the case uses completion queue {cqid}, which it has not"
            ));
        };
        let at = cq.iova + 16 * u64::from(cq.head);
        let phase = cq.phase;
        let (memory, offset) = self.memory(at);
        let cell = memory.atomic_u32(offset + 12);
        let last = cell.map_or(0, |cell| u32::from_le(cell.load(Ordering::Acquire)));
        if (last >> 16 & 1 != 0) != phase {
            return Ok(None);
        }
        let bytes = self.get(at, 16)?;
        Completion::read_from_bytes(&bytes)
            .map(Some)
            .map_err(|_| Verdict::Failed("a completion of another size".into()))
    }

    /// The next completion of a queue if there is one; checked, the head moved and told.
    pub fn poll(&mut self, cqid: u16) -> Check<Option<Completion>> {
        let entry = self.poll_quietly(cqid)?;
        if entry.is_some() {
            self.ring_head(cqid)?;
        }
        Ok(entry)
    }

    /// Tells the controller how far a completion queue was read.
    pub fn ring_head(&mut self, cqid: u16) -> Check {
        let head = self.cqs.get(&cqid).map_or(0, |cq| cq.head);
        self.ring(cqid, true, head.into())
    }

    /// The same without telling the controller.
    pub fn poll_quietly(&mut self, cqid: u16) -> Check<Option<Completion>> {
        let Some(entry) = self.peek(cqid)? else {
            return Ok(None);
        };
        if let Some(cq) = self.cqs.get_mut(&cqid) {
            cq.head = (cq.head + 1) % cq.entries;
            cq.phase ^= cq.head == 0;
        }
        let (sqid, cid) = (entry.sqid.get(), entry.cid.get());
        let Some(sq) = self.sqs.get_mut(&sqid).filter(|sq| sq.cqid == cqid) else {
            return failed(format!(
                "completion queue {cqid} has an entry of submission queue {sqid}, which does not \
                 belong to it"
            ));
        };
        let Some(at) = sq.outstanding.iter().position(|c| *c == cid) else {
            return failed(format!(
                "queue {sqid} completes a command {cid:#x} that is not outstanding"
            ));
        };
        sq.outstanding.swap_remove(at);
        require!(
            entry.sqhd.get() < sq.entries,
            "SQHD {} is outside its queue of {} entries",
            entry.sqhd.get(),
            sq.entries
        );
        Ok(Some(entry))
    }

    /// Waits for a completion of a queue, whichever comes.
    pub fn next(&mut self, cqid: u16) -> Check<Completion> {
        if let Some(at) = self.kept.iter().position(|(qid, _)| *qid == cqid) {
            return Ok(self.kept.remove(at).1);
        }
        self.wait(cqid, ANSWER, "a completion")
    }

    fn wait(&mut self, cqid: u16, limit: Duration, what: &str) -> Check<Completion> {
        let deadline = Instant::now() + limit;
        let mut turns = 0u32;
        loop {
            if let Some(entry) = self.poll(cqid)? {
                return Ok(entry);
            }
            require!(Instant::now() < deadline, "no {what} within {limit:?}");
            turns += 1;
            if turns > 200 {
                std::thread::sleep(Duration::from_micros(200));
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// Waits for the completion of one command; others are kept.
    pub fn wait_for(&mut self, qid: u16, cid: u16) -> Check<Completion> {
        let cqid = self.sq(qid)?.cqid;
        let kept = self.kept.iter().position(|(at, entry)| {
            *at == cqid && entry.sqid.get() == qid && entry.cid.get() == cid
        });
        if let Some(at) = kept {
            return Ok(self.kept.remove(at).1);
        }
        loop {
            let what = format!("completion of command {cid:#x} of queue {qid}");
            let entry = self.wait(cqid, ANSWER, &what)?;
            if (entry.sqid.get(), entry.cid.get()) == (qid, cid) {
                return Ok(entry);
            }
            self.kept.push((cqid, entry));
        }
    }

    /// Nothing completes for a while.
    pub fn stays_quiet(&mut self, cqid: u16, what: &str) -> Check {
        let until = Instant::now() + QUIET;
        while Instant::now() < until {
            if let Some(entry) = self.poll(cqid)? {
                return failed(format!(
                    "{what}: expected no completion, got one of command {:#x}: {}",
                    entry.cid.get(),
                    entry.status()
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Runs one command of a queue to its end. Nothing else may be in the queue but commands that
    /// wait for an event.
    pub fn run(&mut self, qid: u16, command: Command) -> Check<Completion> {
        let cid = self.submit(qid, command)?;
        let entry = self.wait_for(qid, cid)?;
        let tail = self.sq(qid)?.tail;
        same!(
            entry.sqhd.get(),
            tail,
            "SQHD of opcode {:#x}, the only command of queue {qid}",
            command.opcode
        );
        Ok(entry)
    }

    /// Runs an admin command.
    pub fn admin(&mut self, command: Command) -> Check<Completion> {
        self.run(0, command)
    }

    /// Runs a command of I/O queue 1.
    pub fn io(&mut self, command: Command) -> Check<Completion> {
        self.run(1, command)
    }

    /// The commands that make an I/O queue pair, and where its queues are.
    pub fn pair_commands(&mut self, qid: u16, entries: u16) -> Check<(Command, Command)> {
        let cq = self.alloc(16 * u64::from(entries))?;
        let sq = self.alloc(64 * u64::from(entries))?;
        let size = u32::from(entries.wrapping_sub(1)) << 16 | u32::from(qid);
        let make_cq = admin(AdminOpcode::CREATE_IO_CQ, 0)
            .prp(cq, 0)
            .dw(10, size)
            .dw(11, 1);
        let make_sq = admin(AdminOpcode::CREATE_IO_SQ, 0)
            .prp(sq, 0)
            .dw(10, size)
            .dw(11, u32::from(qid) << 16 | 1);
        Ok((make_cq, make_sq))
    }

    /// Makes an I/O queue pair.
    pub fn create_pair(&mut self, qid: u16, entries: u16) -> Check {
        use crate::verdict::Expect;
        let (cq, sq) = self.pair_commands(qid, entries)?;
        self.admin(cq)?
            .succeeds(&format!("Create I/O Completion Queue {qid}"))?;
        self.know_cq(qid, cq.prp1(), entries);
        self.admin(sq)?
            .succeeds(&format!("Create I/O Submission Queue {qid}"))?;
        self.know_sq(qid, sq.prp1(), entries, qid);
        Ok(())
    }

    /// Entries that I/O queues of the cases have.
    pub fn io_entries(&self) -> u16 {
        ENTRIES.min(self.cap.mqes_z().saturating_add(1))
    }
}
