//! A guest that knows what each block of its virtual disk may hold.
//!
//! The guest sleeps until an interrupt arrives: a completion without one is never found. It submits
//! through registers, a mapped page or shadow doorbells.

use crate::machine::{Machine, reg};
use crate::oracle::{Moment, Oracle, Stamp, WriteEnd};
use anyhow::{Context, Result, bail, ensure};
use std::collections::{BTreeMap, VecDeque};
use test_host::{Command, Completion, GuestMemory, Pair, Shadow, Windows, doorbell};

/// Entries of each queue.
const QUEUE: u32 = 16;
const ASQ: u64 = 0x1000;
const ACQ: u64 = 0x2000;
const SHADOW: Shadow = Shadow {
    doorbells: 0x8000,
    event_idx: 0x9000,
};
/// Page for data of admin commands.
const PAGE: u64 = 0x4000;
const RINGS: u64 = 0x1_0000;
const RING: u64 = 0x2000;
const BUFFERS: u64 = 0x4_0000;
/// Bytes of a buffer: data of a command, and a page for its PRP list.
const BUFFER: u64 = 0x4000;
const LIST: u64 = 0x3000;
const BUFFER_COUNT: u64 = 48;
const PAGE_SIZE: u64 = 4096;
const BLOCK: u64 = 512;
/// Blocks of the longest command.
const MAX_BLOCKS: u64 = 16;

/// Opcodes of the commands that the guest sends.
mod opcode {
    pub const FLUSH: u8 = 0;
    pub const WRITE: u8 = 1;
    pub const READ: u8 = 2;
    pub const COMPARE: u8 = 5;
    pub const WRITE_ZEROES: u8 = 8;
    pub const DATASET_MANAGEMENT: u8 = 9;
    pub const DELETE_SQ: u8 = 0;
    pub const DELETE_CQ: u8 = 4;
    pub const IDENTIFY: u8 = 6;
    pub const ABORT: u8 = 8;
    pub const SET_FEATURES: u8 = 9;
}

/// Status codes with their type in bits 10:8 (NVMe Base 2.1, 4.2.3).
mod status {
    pub const MASK: u16 = 0x7ff;
    pub const ABORT_REQUESTED: u16 = 0x07;
    pub const SQ_DELETION: u16 = 0x08;
    pub const COMPARE_FAILURE: u16 = 0x285;
}

/// Way in which a guest submits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// Doorbell registers.
    Register,
    /// The doorbell page, mapped into the guest.
    Mapped,
    /// Doorbell Buffer Config.
    Shadow,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Off,
    Enabling,
    Running,
    /// CC.EN was cleared, or a function reset began.
    Resetting,
    /// A normal shutdown that began at this moment and event.
    Stopping(Moment, u64),
}

#[derive(Clone, Debug)]
enum Work {
    Read(u64, u64),
    Write {
        write: u64,
        lba: u64,
        count: u64,
        durable: bool,
    },
    Deallocate {
        write: u64,
        lba: u64,
        count: u64,
    },
    Flush,
    Compare(u64, Vec<Stamp>),
    Admin(Step),
}

/// Admin commands, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    CreateCq(u16),
    CreateSq(u16),
    DeleteSq(u16),
    DeleteCq(u16),
    Shadow,
    Cache(bool),
    Identify,
    Abort,
}

#[derive(Debug)]
struct Outstanding {
    work: Work,
    began: Moment,
    event: u64,
    buffer: Option<u64>,
    /// Offset of the data in the buffer.
    at: u64,
    /// Whether the command has Force Unit Access.
    fua: bool,
    abort: bool,
}

/// Settings of a guest.
#[derive(Clone, Copy, Debug)]
pub struct GuestConfig {
    /// Index of its virtual disk.
    pub seat: usize,
    /// Blocks of its namespace.
    pub blocks: u64,
    /// I/O queue pairs.
    pub queues: u16,
    /// Way in which it submits.
    pub ring: Ring,
    /// Whether its disk has a volatile cache.
    pub has_cache: bool,
}

/// A model guest.
pub struct Guest {
    config: GuestConfig,
    memory: Windows,
    phase: Phase,
    pairs: BTreeMap<u16, Pair>,
    /// Queues with entries whose doorbell was not rung yet.
    silent: Vec<u16>,
    outstanding: BTreeMap<(u16, u16), Outstanding>,
    steps: VecDeque<Step>,
    buffers: VecDeque<u64>,
    next_cid: u16,
    next_stamp: Stamp,
    oracle: Oracle,
    /// Whether the volatile write cache is on; `None` while that changes.
    cache: Option<bool>,
    shadow: bool,
    /// Whether the guest only waits for what it has submitted.
    is_finishing: bool,
    /// Number of I/O commands submitted.
    pub submitted: u64,
}

impl Guest {
    /// Creates a guest that is switched off.
    ///
    /// # Errors
    /// There is no such virtual disk.
    pub fn new(config: GuestConfig, machine: &Machine) -> Result<Self> {
        Ok(Self {
            memory: Windows::new(0, machine.memory(config.seat)?),
            phase: Phase::Off,
            pairs: BTreeMap::new(),
            silent: Vec::new(),
            outstanding: BTreeMap::new(),
            steps: VecDeque::new(),
            buffers: (0..BUFFER_COUNT).map(|n| BUFFERS + n * BUFFER).collect(),
            next_cid: 0,
            next_stamp: 1,
            oracle: Oracle::new(config.blocks as usize),
            cache: Some(config.has_cache),
            shadow: false,
            is_finishing: false,
            submitted: 0,
            config,
        })
    }

    /// The host has lost power.
    ///
    /// # Errors
    /// There is no such virtual disk.
    pub fn power_lost(&mut self, machine: &Machine) -> Result<()> {
        self.forget_all();
        self.oracle.power_lost();
        self.memory = Windows::new(0, machine.memory(self.config.seat)?);
        self.phase = Phase::Off;
        Ok(())
    }

    /// Lets the guest only wait for what it has submitted, or work on.
    pub fn set_finishing(&mut self, is_finishing: bool) {
        self.is_finishing = is_finishing;
    }

    /// Whether the guest runs and waits for nothing.
    pub fn is_idle(&self) -> bool {
        self.phase == Phase::Running
            && self.outstanding.is_empty()
            && self.steps.is_empty()
            && self.silent.is_empty()
    }

    /// Describes what the guest waits for.
    pub fn waits_for(&self) -> String {
        let waits: Vec<String> = self
            .outstanding
            .iter()
            .map(|((qid, cid), one)| format!("{qid}/{cid} {:?}", one.work))
            .collect();
        format!("{:?}, {:?}: {}", self.phase, self.steps, waits.join("; "))
    }

    /// Does one thing.
    ///
    /// # Errors
    /// A completion, a register or data that the oracle does not allow.
    pub fn act(&mut self, machine: &mut Machine) -> Result<()> {
        let seat = self.config.seat;
        match self.phase {
            Phase::Off => {
                machine.trace.say(|| format!("guest {seat}: enables"));
                machine.call(seat, |c| c.config_write(4, &6u16.to_le_bytes()))?;
                let admin = Pair::new(ASQ, ACQ, QUEUE);
                admin.clear(&self.memory)?;
                self.memory.write(SHADOW.doorbells, &[0; 8192])?;
                machine.write32(seat, reg::AQA, (QUEUE - 1) << 16 | (QUEUE - 1))?;
                for (low, value) in [(reg::ASQ, ASQ), (reg::ACQ, ACQ)] {
                    machine.write32(seat, low, value as u32)?;
                    machine.write32(seat, low + 4, 0)?;
                }
                machine.write32(seat, reg::CC, 0x0046_0001)?;
                self.pairs.insert(0, admin);
                self.phase = Phase::Enabling;
            }
            Phase::Enabling => {
                let csts = machine.read32(seat, reg::CSTS)?;
                ensure!(csts & 2 == 0, "guest {seat}: the controller fails");
                if csts & 1 != 0 {
                    self.phase = Phase::Running;
                    machine.trace.count("guest: controller enabled");
                    if self.config.ring == Ring::Shadow {
                        self.steps.push_back(Step::Shadow);
                    }
                    for queue in 1..=self.config.queues {
                        self.steps
                            .extend([Step::CreateCq(queue), Step::CreateSq(queue)]);
                    }
                }
            }
            Phase::Running => self.run(machine)?,
            Phase::Resetting => {
                self.reap(machine)?;
                let csts = machine.read32(seat, reg::CSTS)?;
                let busy = machine.call(seat, |c| c.is_resetting())?;
                if csts & 1 == 0 && !busy {
                    // Completions that were posted before the reset count.
                    for queue in self.pairs.keys().copied().collect::<Vec<_>>() {
                        self.reap_queue(machine, queue)?;
                    }
                    self.forget_all();
                    self.phase = Phase::Off;
                }
            }
            Phase::Stopping(began, event) => {
                self.reap(machine)?;
                let csts = machine.read32(seat, reg::CSTS)?;
                if csts >> 2 & 3 == 2 {
                    if !machine.may_fail(seat, event) {
                        self.oracle.flushed(began);
                        machine.trace.count("guest: clean shutdown");
                    }
                    machine.write32(seat, reg::CC, 0)?;
                    self.phase = Phase::Resetting;
                }
            }
        }
        Ok(())
    }

    fn run(&mut self, machine: &mut Machine) -> Result<()> {
        self.reap(machine)?;
        if machine.random.one_in(2) || self.is_finishing {
            self.ring_all(machine)?;
        }
        if !self.steps.is_empty() {
            return self.next_step(machine);
        }
        if self.is_finishing {
            return Ok(());
        }
        match machine.random.below(400) {
            0 => self.reset(machine),
            1 => {
                // CC with a normal shutdown (SHN).
                let began = self.oracle.tick();
                let event = machine.event;
                machine.write32(self.config.seat, reg::CC, 0x0046_4001)?;
                self.phase = Phase::Stopping(began, event);
                Ok(())
            }
            2..5 => {
                let queue = 1 + machine.random.below(self.config.queues.into()) as u16;
                machine.trace.count("guest: queue deleted");
                self.steps.extend([
                    Step::DeleteSq(queue),
                    Step::DeleteCq(queue),
                    Step::CreateCq(queue),
                    Step::CreateSq(queue),
                ]);
                Ok(())
            }
            5..8 if self.config.has_cache => {
                let on = machine.random.one_in(2);
                self.steps.push_back(Step::Cache(on));
                Ok(())
            }
            8..12 => {
                self.steps.push_back(Step::Identify);
                Ok(())
            }
            12..32 => {
                self.steps.push_back(Step::Abort);
                Ok(())
            }
            _ => {
                for _ in 0..=machine.random.below(6) {
                    self.submit_io(machine)?;
                }
                Ok(())
            }
        }
    }

    /// Begins a reset of either kind.
    fn reset(&mut self, machine: &mut Machine) -> Result<()> {
        let seat = self.config.seat;
        let is_function = machine.random.one_in(3);
        machine
            .trace
            .say(|| format!("guest {seat}: resets, function: {is_function}"));
        if is_function {
            machine.trace.count("guest: function reset");
            machine.call(seat, |c| c.reset())?;
        } else {
            machine.trace.count("guest: controller reset");
            machine.write32(seat, reg::CC, 0)?;
        }
        self.phase = Phase::Resetting;
        Ok(())
    }

    /// Commands that were not completed by the end of a reset never will be.
    fn forget_all(&mut self) {
        for (_, one) in std::mem::take(&mut self.outstanding) {
            self.forget(&one);
        }
        self.pairs.clear();
        self.silent.clear();
        self.steps.clear();
        self.cache = Some(self.config.has_cache);
        self.shadow = false;
    }

    fn forget(&mut self, one: &Outstanding) {
        self.buffers.extend(one.buffer);
        match one.work {
            Work::Write {
                write, lba, count, ..
            }
            | Work::Deallocate { write, lba, count } => {
                self.oracle.end_write(write, lba, count, WriteEnd::Unknown);
            }
            _ => {}
        }
    }

    // ---- admin commands

    fn next_step(&mut self, machine: &mut Machine) -> Result<()> {
        let is_admin = |one: &Outstanding| matches!(one.work, Work::Admin(_));
        if self.outstanding.values().any(is_admin) {
            return Ok(());
        }
        let Some(step) = self.steps.pop_front() else {
            return Ok(());
        };
        let ring = |queue: u16| RINGS + u64::from(queue) * RING;
        let pair = |queue: u16| Pair::new(ring(queue), ring(queue) + 0x1000, QUEUE);
        let command = match step {
            Step::CreateCq(queue) => {
                let pair = pair(queue);
                pair.clear(&self.memory)?;
                let [cq, _] = pair.create(queue, Some(queue));
                cq
            }
            Step::CreateSq(queue) => {
                let [_, sq] = pair(queue).create(queue, None);
                sq
            }
            Step::DeleteSq(queue) => Command::new(opcode::DELETE_SQ, 0).dw(10, queue.into()),
            Step::DeleteCq(queue) => Command::new(opcode::DELETE_CQ, 0).dw(10, queue.into()),
            Step::Shadow => SHADOW.configure(),
            Step::Cache(on) => {
                // Writes that overlap the change are not known to be durable.
                self.cache = None;
                for one in self.outstanding.values_mut() {
                    if let Work::Write { durable, .. } = &mut one.work {
                        *durable = one.fua;
                    }
                }
                Command::new(opcode::SET_FEATURES, 0)
                    .dw(10, 6)
                    .dw(11, on.into())
            }
            Step::Identify => Command::new(opcode::IDENTIFY, 0).dw(10, 1).prp(PAGE, 0),
            Step::Abort => {
                let targets = self.outstanding.iter_mut();
                let mut targets: Vec<_> = targets.filter(|((qid, _), _)| *qid != 0).collect();
                let at = machine.random.below(targets.len() as u64) as usize;
                let Some(((qid, cid), target)) = targets.get_mut(at) else {
                    return Ok(());
                };
                target.abort = true;
                machine.trace.count("guest: abort");
                let target = u32::from(*cid) << 16 | u32::from(*qid);
                Command::new(opcode::ABORT, 0).dw(10, target)
            }
        };
        if let Step::DeleteSq(queue) = step {
            // Entries that the controller may not have seen are never executed after this.
            self.ring(machine, queue)?;
            self.silent.retain(|silent| *silent != queue);
        }
        self.push(machine, 0, command, Work::Admin(step), None)?;
        self.ring(machine, 0)
    }

    fn stepped(
        &mut self,
        machine: &mut Machine,
        (step, since): (Step, u64),
        status: u16,
    ) -> Result<()> {
        let seat = self.config.seat;
        // The controller flushes the volume when the cache is switched off. After a failure the
        // state of the cache is not known.
        if status != 0 && matches!(step, Step::Cache(_)) && machine.may_fail(seat, since) {
            machine.trace.count("result: error");
            return Ok(());
        }
        ensure!(
            status == 0,
            "guest {seat}: {step:?} fails with status {status:#x}"
        );
        let ring = |queue: u16| RINGS + u64::from(queue) * RING;
        match step {
            Step::CreateSq(queue) => {
                let pair = Pair::new(ring(queue), ring(queue) + 0x1000, QUEUE);
                // Interrupts of an earlier queue mean nothing.
                self.pairs.insert(queue, pair);
            }
            Step::DeleteSq(queue) => {
                self.reap_queue(machine, queue)?;
                self.pairs.remove(&queue);
                let gone = |key: &(u16, u16)| key.0 == queue;
                let keys: Vec<_> = self.outstanding.keys().copied().filter(gone).collect();
                for key in keys {
                    if let Some(one) = self.outstanding.remove(&key) {
                        self.forget(&one);
                    }
                }
                // The host resets the doorbells of a queue that it makes again.
                if self.shadow {
                    for is_cq in [false, true] {
                        let at = doorbell(queue, is_cq, 0) - 0x1000;
                        self.memory.write(SHADOW.doorbells + at, &[0; 4])?;
                        self.memory.write(SHADOW.event_idx + at, &[0; 4])?;
                    }
                }
            }
            Step::Shadow => self.shadow = true,
            Step::Cache(on) => self.cache = Some(on),
            Step::CreateCq(_) | Step::DeleteCq(_) | Step::Identify | Step::Abort => {}
        }
        Ok(())
    }

    // ---- I/O commands

    fn submit_io(&mut self, machine: &mut Machine) -> Result<()> {
        let queue = 1 + machine.random.below(self.config.queues.into()) as u16;
        let Some(pair) = self.pairs.get(&queue) else {
            return Ok(());
        };
        let waiting = self.outstanding.keys().filter(|key| key.0 == queue).count() as u32;
        if pair.free() == 0 || waiting + 1 >= QUEUE || self.buffers.is_empty() {
            return Ok(());
        }
        let random = &mut machine.random;
        let longest = if random.one_in(2) { 2 } else { MAX_BLOCKS };
        let count = 1 + random.below(longest);
        // Most commands meet in a few blocks.
        let space = if random.one_in(3) {
            self.config.blocks
        } else {
            24
        };
        let lba = random.below(space.min(self.config.blocks) - count.min(space - 1));
        let fua = random.one_in(4);
        let kinds = [
            (8, opcode::READ),
            (8, opcode::WRITE),
            (2, opcode::WRITE_ZEROES),
            (2, opcode::FLUSH),
            (2, opcode::COMPARE),
            (1, opcode::DATASET_MANAGEMENT),
        ];
        let kind = random.weighted(&kinds).unwrap_or(opcode::READ);
        let at = random.below(8) * if random.one_in(2) { 0 } else { 4 * 64 };
        let buffer = self.buffers.pop_front().context("no buffer")?;
        let data = buffer + at;
        let mut command = Command::new(kind, 1).slba(lba).dw(12, (count - 1) as u32);
        if matches!(kind, opcode::READ | opcode::WRITE | opcode::COMPARE) {
            let len = count * BLOCK;
            let list = buffer + LIST;
            let (prp1, prp2) = test_host::prps(&self.memory, PAGE_SIZE, data, len, list)?;
            command = command.prp(prp1, prp2);
        }
        if fua && matches!(kind, opcode::READ | opcode::WRITE | opcode::WRITE_ZEROES) {
            command = command.dw(12, (count - 1) as u32 | 1 << 30);
        }
        let durable = fua || self.cache == Some(false);
        let work = match kind {
            opcode::READ => {
                machine.trace.count("read");
                self.fill(data, &vec![u64::MAX; count as usize])?;
                Work::Read(lba, count)
            }
            opcode::WRITE => {
                machine
                    .trace
                    .count(if fua { "write with FUA" } else { "write" });
                let stamps: Vec<Stamp> = (self.next_stamp..self.next_stamp + count).collect();
                self.next_stamp += count;
                self.fill(data, &stamps)?;
                let write = self.oracle.begin_write(lba, &stamps);
                Work::Write {
                    write,
                    lba,
                    count,
                    durable,
                }
            }
            opcode::WRITE_ZEROES => {
                machine.trace.count("write zeroes");
                if machine.random.one_in(2) {
                    // DEAC.
                    command = command.dw(12, command.dword(12) | 1 << 25);
                }
                let write = self.oracle.begin_write(lba, &vec![0; count as usize]);
                Work::Write {
                    write,
                    lba,
                    count,
                    durable,
                }
            }
            opcode::COMPARE => {
                machine.trace.count("compare");
                let stamps: Vec<Stamp> = (lba..lba + count)
                    .map(|lba| self.oracle.newest(lba))
                    .collect();
                self.fill(data, &stamps)?;
                Work::Compare(lba, stamps)
            }
            opcode::DATASET_MANAGEMENT => {
                machine.trace.count("deallocate");
                let mut range = [0; 16];
                let (start, end) = range.split_at_mut(8);
                start.copy_from_slice(&(count << 32).to_le_bytes());
                end.copy_from_slice(&lba.to_le_bytes());
                self.memory.write(buffer, &range)?;
                command = Command::new(kind, 1).prp(buffer, 0).dw(11, 4);
                let write = self.oracle.begin_write(lba, &vec![0; count as usize]);
                Work::Deallocate { write, lba, count }
            }
            _ => {
                machine.trace.count("flush");
                command = Command::new(kind, 1);
                Work::Flush
            }
        };
        self.submitted += 1;
        self.push(machine, queue, command, work, Some((buffer, at)))?;
        if machine.random.one_in(4) {
            if !self.silent.contains(&queue) {
                self.silent.push(queue);
            }
            return Ok(());
        }
        self.silent.retain(|silent| *silent != queue);
        self.ring(machine, queue)
    }

    /// Fills blocks of memory with stamps.
    fn fill(&self, at: u64, stamps: &[Stamp]) -> Result<()> {
        let block = |stamp: &Stamp| stamp.to_le_bytes().repeat(BLOCK as usize / 8);
        let bytes: Vec<u8> = stamps.iter().flat_map(block).collect();
        self.memory.write(at, &bytes)
    }

    /// Returns the stamps of blocks in memory.
    fn stamps(&self, at: u64, count: u64) -> Result<Vec<Stamp>> {
        let mut bytes = vec![0; (count * BLOCK) as usize];
        self.memory.read(at, &mut bytes)?;
        let (words, _) = bytes.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let mut stamps = Vec::new();
        for block in words.chunks(BLOCK as usize / 8) {
            let first = block.first().copied().unwrap_or_default();
            ensure!(
                block.iter().all(|word| *word == first),
                "a block is a mixture: {block:x?}"
            );
            stamps.push(first);
        }
        Ok(stamps)
    }

    fn push(
        &mut self,
        machine: &mut Machine,
        queue: u16,
        command: Command,
        work: Work,
        buffer: Option<(u64, u64)>,
    ) -> Result<()> {
        while self.outstanding.contains_key(&(queue, self.next_cid)) {
            self.next_cid = self.next_cid.wrapping_add(1);
        }
        let cid = self.next_cid;
        self.next_cid = cid.wrapping_add(1) % 1000;
        let seat = self.config.seat;
        machine
            .trace
            .say(|| format!("guest {seat}: {queue}/{cid} {work:?}"));
        let pair = self.pairs.get_mut(&queue).context("no such queue")?;
        pair.sq.push(&self.memory, &command.with_cid(cid))?;
        let one = Outstanding {
            work,
            began: self.oracle.tick(),
            event: machine.event,
            buffer: buffer.map(|(buffer, _)| buffer),
            at: buffer.map_or(0, |(_, at)| at),
            fua: command.dword(12) >> 30 & 1 != 0,
            abort: false,
        };
        self.outstanding.insert((queue, cid), one);
        Ok(())
    }

    fn ring_all(&mut self, machine: &mut Machine) -> Result<()> {
        for queue in std::mem::take(&mut self.silent) {
            self.ring(machine, queue)?;
        }
        Ok(())
    }

    /// Rings the doorbell of a submission queue.
    fn ring(&mut self, machine: &mut Machine, queue: u16) -> Result<()> {
        let Some(pair) = self.pairs.get(&queue) else {
            return Ok(());
        };
        let tail = pair.sq.tail;
        self.ring_value(machine, queue, false, tail)
    }

    fn ring_value(
        &mut self,
        machine: &mut Machine,
        queue: u16,
        is_cq: bool,
        value: u32,
    ) -> Result<()> {
        let (seat, offset) = (self.config.seat, doorbell(queue, is_cq, 0));
        match self.config.ring {
            Ring::Mapped => machine.store_doorbell(seat, offset, value),
            Ring::Shadow if self.shadow && queue != 0 => {
                if SHADOW.store(&self.memory, offset, value)? {
                    machine.trace.count("doorbell register beside shadow");
                    machine.write32(seat, offset, value)?;
                }
                Ok(())
            }
            _ => machine.write32(seat, offset, value),
        }
    }

    // ---- completions

    /// Handles the interrupts that have arrived.
    fn reap(&mut self, machine: &mut Machine) -> Result<()> {
        for queue in 0..=self.config.queues {
            if machine.take_interrupt(self.config.seat, queue) {
                self.reap_queue(machine, queue)?;
            }
        }
        Ok(())
    }

    fn reap_queue(&mut self, machine: &mut Machine, queue: u16) -> Result<()> {
        let mut reaped = false;
        while let Some(pair) = self.pairs.get_mut(&queue)
            && let Some(entry) = pair.pop(&self.memory)?
        {
            reaped = true;
            self.completed(machine, &entry)?;
        }
        if reaped && let Some(pair) = self.pairs.get(&queue) {
            let head = pair.cq.head;
            self.ring_value(machine, queue, true, head)?;
        }
        let reads = self.outstanding.values().map(|one| one.began);
        let oldest = reads.min();
        self.oracle.forget(oldest);
        Ok(())
    }

    fn completed(&mut self, machine: &mut Machine, entry: &Completion) -> Result<()> {
        let seat = self.config.seat;
        let key = (entry.sqid(), entry.cid());
        let status = entry.status_bits() & status::MASK;
        machine
            .trace
            .say(|| format!("guest {seat}: {}/{} completes: {status:#x}", key.0, key.1));
        let Some(one) = self.outstanding.remove(&key) else {
            bail!("guest {seat}: completion of {key:?}, which is not outstanding: {entry:?}");
        };
        if let Work::Admin(step) = one.work {
            return self.stepped(machine, (step, one.event), status);
        }
        let is_compare = matches!(one.work, Work::Compare(..));
        let is_expected = match status {
            0 => true,
            status::COMPARE_FAILURE => is_compare,
            status::ABORT_REQUESTED => one.abort,
            status::SQ_DELETION => !self.steps.is_empty() || !self.pairs.contains_key(&key.0),
            _ => machine.may_fail(seat, one.event),
        };
        ensure!(
            is_expected,
            "guest {seat}: {:?} fails with status {status:#x} without a fault",
            one.work
        );
        match status {
            0 => {}
            status::COMPARE_FAILURE => machine.trace.count("result: compare failure"),
            status::ABORT_REQUESTED => machine.trace.count("result: aborted"),
            _ => machine.trace.count("result: error"),
        }
        let data = one.buffer.map_or(0, |buffer| buffer + one.at);
        match &one.work {
            Work::Read(lba, count) if status == 0 => {
                let stamps = self.stamps(data, *count)?;
                for (lba, stamp) in (*lba..).zip(stamps) {
                    self.oracle
                        .check_read(lba, stamp, one.began)
                        .with_context(|| format!("guest {seat}"))?;
                }
            }
            Work::Write {
                write,
                lba,
                count,
                durable,
            } => {
                let end = match status {
                    0 => WriteEnd::Done(*durable),
                    _ => WriteEnd::Unknown,
                };
                self.oracle.end_write(*write, *lba, *count, end);
            }
            Work::Deallocate { write, lba, count } => {
                // The range reads as before or as zeroes: deallocation is a hint.
                self.oracle
                    .end_write(*write, *lba, *count, WriteEnd::Unknown);
            }
            Work::Flush if status == 0 => self.oracle.flushed(one.began),
            Work::Compare(lba, stamps) => {
                let mut blocks = (*lba..).zip(stamps);
                let oracle = &self.oracle;
                let is_possible = match status {
                    0 => blocks.all(|(lba, stamp)| oracle.may_be(lba, *stamp, one.began)),
                    status::COMPARE_FAILURE => {
                        blocks.any(|(lba, stamp)| oracle.may_differ(lba, *stamp, one.began))
                    }
                    _ => true,
                };
                ensure!(
                    is_possible,
                    "guest {seat}: compare of {stamps:x?} at {lba} ends with {status:#x}"
                );
            }
            _ => {}
        }
        self.buffers.extend(one.buffer);
        Ok(())
    }

    /// Submits a read of all blocks from `lba` on that one command can read. Returns the next
    /// block.
    ///
    /// # Errors
    /// The queue has no room.
    pub fn read_from(&mut self, machine: &mut Machine, lba: u64) -> Result<u64> {
        let count = (self.config.blocks - lba).min(MAX_BLOCKS);
        let buffer = self.buffers.pop_front().context("no buffer")?;
        self.fill(buffer, &vec![u64::MAX; count as usize])?;
        let list = buffer + LIST;
        let (prp1, prp2) = test_host::prps(&self.memory, PAGE_SIZE, buffer, count * BLOCK, list)?;
        let command = Command::new(opcode::READ, 1)
            .prp(prp1, prp2)
            .slba(lba)
            .dw(12, (count - 1) as u32);
        self.push(
            machine,
            1,
            command,
            Work::Read(lba, count),
            Some((buffer, 0)),
        )?;
        self.ring(machine, 1)?;
        Ok(lba + count)
    }

    /// Returns the number of blocks of the guest's namespace.
    pub fn blocks(&self) -> u64 {
        self.config.blocks
    }
}
