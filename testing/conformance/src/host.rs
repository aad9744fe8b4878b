//! Host of a conformance case: registers, memory, queues, and commands that are sent unchecked.
//!
//! Crate `driver` is not used, because it sends no wrong commands. Each case has its own host and
//! connection, so that none depends on another. Completions are checked for general properties: the
//! queue and head pointer that they name, the reserved dword, and that each arrives only once.

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

/// Time limit for a reply of the server, and for the completion of a command.
const ANSWER: Duration = Duration::from_secs(10);
/// Time without a completion after which none is expected.
pub const QUIET_TIME: Duration = Duration::from_millis(60);
/// First guest address (IOVA) of the memory that the host maps.
pub const RAM_BASE: u64 = 0x1_0000_0000;
/// Size of the host's memory in bytes.
const RAM_SIZE: u64 = 96 << 20;
/// Page size of the host's memory in bytes.
pub const PAGE: u64 = 4096;
/// Number of entries of the Admin queues, and of I/O queues unless the controller supports fewer.
pub const ENTRIES: u16 = 64;

struct Sq {
    ring: test_host::Sq,
    cqid: u16,
    /// Identifiers of the queue's outstanding commands.
    outstanding: Vec<u16>,
}

/// Values with which a host enables the controller.
#[derive(Clone, Copy, Debug)]
pub struct Enable {
    /// Number of entries of the Admin submission queue.
    pub asq: u16,
    /// Number of entries of the Admin completion queue.
    pub acq: u16,
    /// Value of the register CC, to which CC.EN is added.
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

/// Returns an admin command for a namespace, without data.
pub fn admin(opcode: AdminOpcode, nsid: u32) -> Command {
    Command::new(opcode.0, nsid)
}

/// Returns an I/O command for a namespace, without data.
pub fn nvm(opcode: NvmOpcode, nsid: u32) -> Command {
    Command::new(opcode.0, nsid)
}

/// NVMe host that tests a controller over a vfio-user connection.
pub struct Host {
    link: Link,
    ram: Windows,
    /// Guest address (IOVA) of the next free byte of memory.
    free: u64,
    /// Value of the controller's CAP register.
    pub cap: Cap,
    /// Memory page size in bytes with which the controller was enabled (CC.MPS).
    pub page_size: u64,
    sqs: BTreeMap<u16, Sq>,
    cqs: BTreeMap<u16, Cq>,
    next_cid: u16,
    /// Completions that arrived while another one was awaited, each with its completion queue ID.
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
    /// Connects, maps memory, and enables memory space and bus mastering; the controller is
    /// disabled.
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

    /// Sets the PCI command register: memory space, bus mastering, and Interrupt Disable.
    pub fn decode(&mut self) -> Check {
        Ok(self.set_command(0x0406)?)
    }

    // Registers.

    /// Returns the value of the CSTS register.
    pub fn csts(&mut self) -> Check<Csts> {
        Ok(Csts::from_bits(self.read32(regs::CSTS)?))
    }

    /// Returns the maximum time for CSTS.RDY to follow CC.EN: CAP.TO, or one unit where that is 0.
    pub fn ready_time(&self) -> Duration {
        Duration::from_millis(500) * u32::from(self.cap.to()).max(1)
    }

    /// Waits until `wanted` returns true for the CSTS register, and returns the value.
    pub fn wait_csts(&mut self, what: &str, wanted: impl Fn(Csts) -> bool) -> Check<Csts> {
        let limit = self.ready_time();
        let wanted = |csts| wanted(Csts::from_bits(csts));
        let csts = self.link.wait_csts(limit, wanted);
        let csts = csts.map_err(|error| error.context(what.to_owned()))?;
        Ok(Csts::from_bits(csts))
    }

    /// Disables the controller (CC.EN), and waits until CSTS.RDY is clear.
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

    /// Enables the controller with new Admin queues and these values.
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

    /// Enables the controller with new Admin queues and the usual values.
    pub fn enable(&mut self) -> Check {
        let mut how = Enable::default();
        if self.cap.css().iocss() && !self.cap.css().ncss() {
            how.cc = how.cc.with_css(regs::CcCss::ALL_SUPPORTED);
        }
        how.cc = how.cc.with_mps(self.cap.mpsmin());
        self.enable_with(how)
    }

    // Memory.

    /// Allocates `len` bytes of zeroed memory at the start of a page. Returns the IOVA.
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

    /// Adds the controller's memory at this IOVA, so that commands and this host can use it.
    pub fn know_buffer(&mut self, iova: u64, memory: Memory) {
        self.ram.add(iova, memory);
    }

    /// Returns `len` bytes of the host's memory from address `iova` on.
    pub fn get(&self, iova: u64, len: usize) -> Check<Vec<u8>> {
        let mut data = vec![0; len];
        self.ram.read(iova, &mut data)?;
        Ok(data)
    }

    /// Writes `data` to the host's memory at address `iova`.
    pub fn put(&self, iova: u64, data: &[u8]) -> Check {
        Ok(self.ram.write(iova, data)?)
    }

    /// Unmaps all of the host's memory from the controller.
    pub fn unmap_all(&mut self) -> Check {
        self.client.dma_unmap(DmaUnmapping::All)?;
        Ok(())
    }

    /// Returns PRP entries 1 and 2 for `len` bytes from an IOVA on, with a PRP list in new memory
    /// if needed.
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

    /// Adds a submission queue to those that this host knows.
    pub fn know_sq(&mut self, qid: u16, iova: u64, entries: u16, cqid: u16) {
        let sq = Sq {
            ring: test_host::Sq::new(iova, entries.into()),
            cqid,
            outstanding: Vec::new(),
        };
        self.sqs.insert(qid, sq);
    }

    /// Adds a completion queue to those that this host knows.
    pub fn know_cq(&mut self, qid: u16, iova: u64, entries: u16) {
        self.cqs.insert(qid, Cq::new(iova, entries.into()));
    }

    /// Removes a submission queue from those that this host knows.
    pub fn forget_sq(&mut self, qid: u16) {
        self.sqs.remove(&qid);
    }

    /// Returns the byte offset in BAR0 of a queue's doorbell.
    pub fn doorbell(&self, qid: u16, cq: bool) -> u64 {
        test_host::doorbell(qid, cq, self.cap.dstrd())
    }

    /// Writes a value to the doorbell of a queue.
    pub fn ring(&mut self, qid: u16, cq: bool, value: u32) -> Check {
        let offset = self.doorbell(qid, cq);
        Ok(self.write32(offset, value)?)
    }

    fn sq(&mut self, qid: u16) -> Check<&mut Sq> {
        self.sqs.get_mut(&qid).ok_or_else(|| without(qid))
    }

    /// Adds a command to a submission queue without ringing the doorbell. Returns the command
    /// identifier.
    pub fn put_command(&mut self, qid: u16, command: Command) -> Check<u16> {
        self.next_cid = self.next_cid.wrapping_add(1) & 0x7fff;
        let cid = self.next_cid;
        self.put_command_as(qid, command, cid)?;
        Ok(cid)
    }

    /// Adds a command with the identifier `cid` to a submission queue.
    pub fn put_command_as(&mut self, qid: u16, command: Command, cid: u16) -> Check {
        let sq = self.sqs.get_mut(&qid).ok_or_else(|| without(qid))?;
        sq.ring.push(&self.ram, &command.with_cid(cid))?;
        sq.outstanding.push(cid);
        Ok(())
    }

    /// Returns the tail of a submission queue, as this host counts it.
    pub fn tail(&mut self, qid: u16) -> Check<u16> {
        Ok(self.sq(qid)?.ring.tail as u16)
    }

    /// Rings a submission queue's doorbell for all added commands.
    pub fn ring_tail(&mut self, qid: u16) -> Check {
        let tail = self.sq(qid)?.ring.tail;
        self.ring(qid, false, tail)
    }

    /// Adds a command to a submission queue and rings the doorbell. Returns the command identifier.
    pub fn submit(&mut self, qid: u16, command: Command) -> Check<u16> {
        let cid = self.put_command(qid, command)?;
        self.ring_tail(qid)?;
        Ok(cid)
    }

    /// Returns the next completion of a queue if it has arrived. Checks the entry, and writes the
    /// head doorbell.
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

    /// Returns the next completion of a queue, if there is one, without writing the head doorbell.
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

    /// Waits for the next completion of a queue.
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

    /// Waits for the completion of command `cid`. Completions of other commands are kept.
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

    /// Checks that no command completes within `QUIET_TIME`.
    pub fn stays_quiet(&mut self, cqid: u16, what: &str) -> Check {
        let until = Instant::now() + QUIET_TIME;
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

    /// Submits a command and waits for its completion. Other commands in the queue may only be
    /// waiting for an event.
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

    /// Executes an admin command, and returns its completion.
    pub fn admin(&mut self, command: Command) -> Check<Completion> {
        self.run(0, command)
    }

    /// Executes a command on I/O queue 1, and returns its completion.
    pub fn io(&mut self, command: Command) -> Check<Completion> {
        self.run(1, command)
    }

    /// Returns the commands that create an I/O queue pair, after allocating its memory.
    pub fn pair_commands(&mut self, qid: u16, entries: u16) -> Check<(Command, Command)> {
        let cq = self.alloc(16 * u64::from(entries))?;
        let sq = self.alloc(64 * u64::from(entries))?;
        let [cq, sq] = Pair::new(sq, cq, entries.into()).create(qid, None);
        Ok((cq, sq))
    }

    /// Creates an I/O queue pair.
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

    /// Returns the number of entries of the cases' I/O queues.
    pub fn io_entries(&self) -> u16 {
        ENTRIES.min(self.cap.mqes_z().saturating_add(1))
    }
}
