//! A host as the cases need it: registers, memory, queues, and commands that nobody checks.
//!
//! This is not crate `driver`, which sends no wrong commands. Each case has a host of its own, by a
//! connection of its own, so that none depends on another. Completions are checked for the
//! properties of every one of them: the named queue and head pointer, the reserved dword, and that
//! each arrives once.

use crate::verdict::{Check, Expect, Verdict, failed, require, same};
use dma::Memory;
use nvme::regs::{self, Cap, Cc, Csts};
use nvme::{AdminOpcode, NvmOpcode};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::time::{Duration, Instant};
use test_host::{
    Command, Completion, Cq, GuestMemory, Link, Pair, Windows, connect, prp_list_bytes, prps,
};
use vfio_user::DmaUnmapping;

/// Longest time for the server's answer to a message, and for a command's completion.
const ANSWER: Duration = Duration::from_secs(10);
/// Time without a completion after which none is expected.
pub const QUIET: Duration = Duration::from_millis(60);
/// Guest memory begins at this IOVA.
pub const RAM_BASE: u64 = 0x1_0000_0000;
/// Size of guest memory in bytes.
const RAM_SIZE: u64 = 96 << 20;
/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Entries of the admin queues, and of I/O queues unless the controller has fewer.
pub const ENTRIES: u16 = 64;

struct Sq {
    ring: test_host::Sq,
    cqid: u16,
    /// Commands that have not completed.
    outstanding: Vec<u16>,
}

/// Values with which the controller is enabled.
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

/// An admin command.
pub fn admin(opcode: AdminOpcode, nsid: u32) -> Command {
    Command::new(opcode.0, nsid)
}

/// An I/O command.
pub fn nvm(opcode: NvmOpcode, nsid: u32) -> Command {
    Command::new(opcode.0, nsid)
}

/// A host with its connection.
pub struct Host {
    link: Link,
    ram: Windows,
    /// The next byte of memory that nothing uses.
    free: u64,
    /// CAP.
    pub cap: Cap,
    /// The page size that the controller was enabled with, in bytes.
    pub page_size: u64,
    sqs: BTreeMap<u16, Sq>,
    cqs: BTreeMap<u16, Cq>,
    next_cid: u16,
    /// Completions that arrived while another one was waited for: completion queue and entry.
    kept: Vec<(u16, Completion)>,
}

impl Deref for Host {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.link
    }
}

impl DerefMut for Host {
    fn deref_mut(&mut self) -> &mut Link {
        &mut self.link
    }
}

fn without(qid: u16) -> Verdict {
    Verdict::Failed(format!("the case uses queue {qid}, which it has not"))
}

impl Host {
    /// Connects, maps memory and lets the function decode and master; the controller is disabled.
    pub fn attach(socket: &Path) -> Check<Host> {
        let mut link = Link::new(connect(socket, ANSWER)?);
        let ram = Memory::anonymous(RAM_SIZE as usize)
            .map_err(|error| Verdict::Failed(format!("memory for the host: {error}")))?;
        link.map(RAM_BASE, RAM_SIZE, ram.fd())?;
        let mut host = Host {
            link,
            ram: Windows::new(RAM_BASE, ram),
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
        Ok(self.set_command(0x0406)?)
    }

    // Registers.

    /// CSTS.
    pub fn csts(&mut self) -> Check<Csts> {
        Ok(Csts::from_bits(self.read32(regs::CSTS)?))
    }

    /// Returns the longest time for CSTS.RDY to follow CC.EN: CAP.TO, or one unit where that is 0.
    pub fn ready_time(&self) -> Duration {
        Duration::from_millis(500) * u32::from(self.cap.to()).max(1)
    }

    /// Waits until CSTS is as wanted.
    pub fn wait_csts(&mut self, what: &str, wanted: impl Fn(Csts) -> bool) -> Check<Csts> {
        let limit = self.ready_time();
        let wanted = |csts| wanted(Csts::from_bits(csts));
        let csts = self.link.wait_csts(limit, wanted);
        let csts = csts.map_err(|error| error.context(what.to_owned()))?;
        Ok(Csts::from_bits(csts))
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
        let mut admin = Pair::new(asq, acq, how.asq.into());
        admin.cq.size = how.acq.into();
        let cc = how.cc.with_en(true).into_bits();
        let limit = self.ready_time();
        let csts = Csts::from_bits(self.link.enable(&admin, cc, limit)?);
        require!(
            !csts.cfs(),
            "CSTS.CFS is set by an enable that is right (CC {cc:#x}, queues of {} and {} entries)",
            how.asq,
            how.acq
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
        self.ram.add(iova, memory);
    }

    /// Copies from memory.
    pub fn get(&self, iova: u64, len: usize) -> Check<Vec<u8>> {
        let mut data = vec![0; len];
        self.ram.read(iova, &mut data)?;
        Ok(data)
    }

    /// Copies into memory.
    pub fn put(&self, iova: u64, data: &[u8]) -> Check {
        Ok(self.ram.write(iova, data)?)
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
        let list = if len > 2 * page - iova % page {
            self.alloc(prp_list_bytes(page, len))?
        } else {
            0
        };
        Ok(prps(&self.ram, page, iova, len, list)?)
    }

    // Queues.

    /// This host uses a submission queue from now on.
    pub fn know_sq(&mut self, qid: u16, iova: u64, entries: u16, cqid: u16) {
        let sq = Sq {
            ring: test_host::Sq::new(iova, entries.into()),
            cqid,
            outstanding: Vec::new(),
        };
        self.sqs.insert(qid, sq);
    }

    /// This host uses a completion queue from now on.
    pub fn know_cq(&mut self, qid: u16, iova: u64, entries: u16) {
        self.cqs.insert(qid, Cq::new(iova, entries.into()));
    }

    /// This host does not use a submission queue any more.
    pub fn forget_sq(&mut self, qid: u16) {
        self.sqs.remove(&qid);
    }

    /// Offset in BAR0 of a doorbell.
    pub fn doorbell(&self, qid: u16, cq: bool) -> u64 {
        test_host::doorbell(qid, cq, self.cap.dstrd())
    }

    /// Writes a doorbell.
    pub fn ring(&mut self, qid: u16, cq: bool, value: u32) -> Check {
        let offset = self.doorbell(qid, cq);
        Ok(self.write32(offset, value)?)
    }

    fn sq(&mut self, qid: u16) -> Check<&mut Sq> {
        self.sqs.get_mut(&qid).ok_or_else(|| without(qid))
    }

    /// Appends a command without ringing the doorbell; returns its identifier.
    pub fn put_command(&mut self, qid: u16, command: Command) -> Check<u16> {
        self.next_cid = self.next_cid.wrapping_add(1) & 0x7fff;
        let cid = self.next_cid;
        self.put_command_as(qid, command, cid)?;
        Ok(cid)
    }

    /// Appends a command with an identifier of the case's choice.
    pub fn put_command_as(&mut self, qid: u16, command: Command, cid: u16) -> Check {
        let sq = self.sqs.get_mut(&qid).ok_or_else(|| without(qid))?;
        sq.ring.push(&self.ram, &command.with_cid(cid))?;
        sq.outstanding.push(cid);
        Ok(())
    }

    /// The tail of a submission queue, as this host has it.
    pub fn tail(&mut self, qid: u16) -> Check<u16> {
        Ok(self.sq(qid)?.ring.tail as u16)
    }

    /// Rings a submission queue's doorbell for the appended commands.
    pub fn ring_tail(&mut self, qid: u16) -> Check {
        let tail = self.sq(qid)?.ring.tail;
        self.ring(qid, false, tail)
    }

    /// Puts and rings.
    pub fn submit(&mut self, qid: u16, command: Command) -> Check<u16> {
        let cid = self.put_command(qid, command)?;
        self.ring_tail(qid)?;
        Ok(cid)
    }

    /// Returns the next completion of a queue if there is one. The entry is checked, and the head
    /// doorbell is written.
    pub fn poll(&mut self, cqid: u16) -> Check<Option<Completion>> {
        let entry = self.poll_quietly(cqid)?;
        if entry.is_some() {
            self.ring_head(cqid)?;
        }
        Ok(entry)
    }

    /// Writes the head doorbell of a completion queue.
    pub fn ring_head(&mut self, cqid: u16) -> Check {
        let head = self.cqs.get(&cqid).map_or(0, |cq| cq.head);
        self.ring(cqid, true, head)
    }

    /// Returns the next completion without writing the head doorbell.
    pub fn poll_quietly(&mut self, cqid: u16) -> Check<Option<Completion>> {
        let Some(cq) = self.cqs.get_mut(&cqid) else {
            return failed(format!(
                "the case uses completion queue {cqid}, which it has not"
            ));
        };
        let Some(entry) = cq.pop(&self.ram)? else {
            return Ok(None);
        };
        let (sqid, cid) = (entry.sqid(), entry.cid());
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
            u32::from(entry.sqhd()) < sq.ring.size,
            "SQHD {} is outside its queue of {} entries",
            entry.sqhd(),
            sq.ring.size
        );
        Ok(Some(entry))
    }

    /// Waits for any completion of a queue.
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

    /// Waits for the completion of one command; completions of other commands are kept.
    pub fn wait_for(&mut self, qid: u16, cid: u16) -> Check<Completion> {
        let cqid = self.sq(qid)?.cqid;
        let kept = self
            .kept
            .iter()
            .position(|(at, entry)| *at == cqid && entry.sqid() == qid && entry.cid() == cid);
        if let Some(at) = kept {
            return Ok(self.kept.remove(at).1);
        }
        loop {
            let what = format!("completion of command {cid:#x} of queue {qid}");
            let entry = self.wait(cqid, ANSWER, &what)?;
            if (entry.sqid(), entry.cid()) == (qid, cid) {
                return Ok(entry);
            }
            self.kept.push((cqid, entry));
        }
    }

    /// Checks that no command completes for a while.
    pub fn stays_quiet(&mut self, cqid: u16, what: &str) -> Check {
        let until = Instant::now() + QUIET;
        while Instant::now() < until {
            if let Some(entry) = self.poll(cqid)? {
                return failed(format!(
                    "{what}: expected no completion, got one of command {:#x}: {}",
                    entry.cid(),
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
        let tail = self.tail(qid)?;
        same!(
            entry.sqhd(),
            tail,
            "SQHD of opcode {:#x}, the only command of queue {qid}",
            command.opcode()
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
        let [cq, sq] = Pair::new(sq, cq, entries.into()).create(qid, None);
        Ok((cq, sq))
    }

    /// Makes an I/O queue pair.
    pub fn create_pair(&mut self, qid: u16, entries: u16) -> Check {
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
